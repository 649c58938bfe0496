"""Chooses a method for a goal, by rules over the tables of advise.yaml. `posttrain advise` and docs/advise.md say the same.

What decides is the signal at hand (a program that checks answers, comparisons, a judge, binary feedback, demonstrations), then how
much memory there is, then what the goal tolerates. The chain that is chosen can be written as a recipe and run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from posttrain.errors import UserError, require, unknown
from posttrain.types import JSON

TRAINED = ("policy", "critic")  # these have gradients and moments; the others are frozen

START = """\
a small recipe like it, on a CPU: posttrain run {}

start: save this as advice.yaml (add --config to print it alone), put in your model and files, then

  {}
  {}
"""
TASK = "my_task.py is yours: problems(), and score(), {} (posttrain/tasks/countdown.py is an example)\n"


@dataclass(frozen=True, slots=True)
class Compute:
    """A kind of machine, with the bytes of a parameter of a trained and of a frozen model."""

    title: str
    trained_bytes: int
    frozen_bytes: int
    prompts: int


@dataclass(frozen=True, slots=True)
class Method:
    """A chain of (stage, algorithm), the models in memory at its widest stage, its pitfalls and its settings by stage."""

    stages: Sequence[Sequence[str]]
    models: Sequence[str]
    why: str
    pitfalls: Sequence[str]
    settings: Mapping[str, Mapping[str, JSON]] = field(default_factory=dict)
    sft_first: bool = True
    example: str = "quickstart"


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted, the signals that serve it (best first), and the methods where they differ from the usual ones."""

    title: str
    signals: Sequence[str]
    reason: str
    pitfalls: Sequence[str]
    picks: Mapping[str, Sequence[str]] = field(default_factory=dict)


_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
DATA: Mapping[str, str] = _TABLES["data"]
COMPUTE: Mapping[str, Compute] = {name: Compute(**row) for name, row in _TABLES["compute"].items()}
METHODS: Mapping[str, Method] = {name: Method(**row) for name, row in _TABLES["methods"].items()}
GOALS: Mapping[str, Goal] = {name: Goal(**row) for name, row in _TABLES["goals"].items()}
PICKS: Mapping[str, Sequence[str]] = _TABLES["picks"]
FIRST_STEPS: Mapping[str, str] = _TABLES["first_steps"]


@dataclass(frozen=True, slots=True)
class Advice:
    """The chain of stages, its reasons, memory and pitfalls, and the recipe; without a signal, what to do first."""

    goal: str
    compute: str
    reasons: Sequence[str]
    pitfalls: Sequence[str]
    command: str
    have: Sequence[str] = ()
    signal: str = ""  # what the method learns from; "" where there is nothing yet
    method: str = ""
    chain: Sequence[tuple[str, str]] = ()  # (stage, algorithm)
    models: Sequence[str] = ()
    bytes_a_parameter: int = 0
    recipe: dict[str, JSON] | None = None
    example: str = "quickstart"  # a shipped recipe to try first


def find_goal(words: str) -> str:
    """The name of a goal, from its name, its title or a word of its title.

    >>> find_goal("Math and reasoning"), find_goal("limited-compute"), find_goal("reasoning")
    ('math', 'limited', 'math')
    """
    wanted = " ".join(words.lower().replace("-", " ").replace("_", " ").split())
    names: dict[str, str] = {}
    for name, goal in GOALS.items():
        words_of_title = [word for word in goal.title.split() if len(word) > 3]
        names |= dict.fromkeys([name, goal.title, *words_of_title], name)
    if wanted not in names:
        raise unknown("goal", words, [*GOALS, *(goal.title for goal in GOALS.values())])
    return names[wanted]


def advise(goal: str, have: Sequence[str] = (), compute: str = "gpu") -> Advice:
    """The chain of stages for a goal, given data at hand and compute.

    >>> advise("math", ["verifier"], "laptop").chain
    (('rl', 'grpo'),)
    >>> advise("general chat", ["demonstrations", "comparisons"], "cluster").chain
    (('sft', 'sft'), ('reward_model', 'reward_model'), ('rl', 'ppo'))
    """
    name = find_goal(goal)
    for kind in have:
        if kind not in DATA:
            raise unknown("kind of data", kind, DATA)
    if compute not in COMPUTE:
        raise unknown("compute", compute, COMPUTE)
    given = tuple(kind for kind in DATA if kind in have and kind != "nothing")
    clear = not (given and "nothing" in have)
    require(clear, f"have=nothing with {', '.join(given)}: leave it out")
    wanted = GOALS[name]
    # demonstrations are where others begin: they are the signal only where there is no other
    signals = [kind for kind in wanted.signals if kind in given and kind != "demonstrations"]
    signals += ["demonstrations"] if "demonstrations" in given else []
    if not signals:
        reasons = (FIRST_STEPS.get(name, FIRST_STEPS["default"]), wanted.reason)
        return Advice(name, compute, reasons, wanted.pitfalls, "posttrain run quickstart")
    signal = signals[0]
    chosen = {**PICKS, **wanted.picks}[signal][list(COMPUTE).index(compute)]
    if chosen == "simpo" and "demonstrations" not in given:
        chosen = "orpo"  # the model has not been taught the form of an answer: ORPO teaches it in the same stage
    return _compose(name, given, compute, signal, chosen)


def _compose(name: str, given: tuple[str, ...], compute: str, signal: str, chosen: str) -> Advice:
    method, goal, machine = METHODS[chosen], GOALS[name], COMPUTE[compute]
    sft = method.sft_first and "demonstrations" in given
    chain = [("sft", "sft")] if sft else []
    chain += [(stage, algorithm) for stage, algorithm in method.stages]
    reasons = [goal.reason, f"{signal}: {DATA[signal]}", f"{chosen}: {method.why}"]
    if sft:
        reasons.insert(2, "sft first: what follows can only strengthen what is sampled sometimes")
    pitfalls = [*method.pitfalls, *goal.pitfalls]
    form = "without demonstrations, begin with a model that already answers in the right form"
    pitfalls += [form] if "demonstrations" not in given else []
    unused = [kind for kind in given if kind not in (signal, "demonstrations")]
    if unused:
        reasons.append(f"not used: {', '.join(unused)}; keep them to judge the result")
    trained = sum(model in TRAINED for model in method.models)
    frozen = len(method.models) - trained
    code = " --allow-code" if any(stage == "rl" for stage, _ in chain) else ""
    return Advice(
        goal=name,
        compute=compute,
        reasons=reasons,
        pitfalls=pitfalls,
        command=f"posttrain run advice.yaml{code}",
        have=given,
        signal=signal,
        method=chosen,
        chain=tuple(chain),
        models=method.models,
        bytes_a_parameter=machine.trained_bytes * trained + machine.frozen_bytes * frozen,
        recipe=_recipe(name, chain, method, compute),
        example=method.example,
    )


def _recipe(
    name: str, chain: Sequence[tuple[str, str]], method: Method, compute: str
) -> dict[str, JSON]:
    """The chain as a recipe file: every stage begins with the policy that the last one left. Files and the task are the user's."""
    stages: list[dict[str, JSON]] = []
    kinds, model = [stage for stage, _ in chain], "path/to/model"
    for stage, algorithm in chain:
        label = stage if kinds.count(stage) == 1 else algorithm
        tree: dict[str, JSON] = {"stage": stage, "name": label, "model": model}
        if stage == "rl":
            tree |= {"task": {"name": "my_task.py:MyTask"}, "prompts": COMPUTE[compute].prompts}
            tree |= {"algorithm": {"name": algorithm}}
            offload = {"device": "cpu"} if compute != "cluster" and len(method.models) > 2 else {}
            if "reward_model" in kinds:
                tree |= {"reward": {"name": "models", "models": ["reward_model"], **offload}}
            tree |= {"reference_device": "cpu"} if offload else {}
        elif stage == "sft":
            tree |= {"data": [{"file": "demonstrations.jsonl"}]}
        else:
            file = "feedback.jsonl" if algorithm == "kto" else "comparisons.jsonl"
            tree |= {"data": [file], "algorithm": {"name": algorithm}}
        for key, value in method.settings.get(label, {}).items():
            tree[key] = tree.get(key, {}) | value if isinstance(value, dict) else value
        stages.append(tree)
        model = label if stage != "reward_model" else model
    return {"name": f"advice-{name}", "stages": stages}


def recipe_text(advice: Advice) -> str:
    """The recipe as YAML, to be saved as advice.yaml and edited."""
    if advice.recipe is None:
        raise UserError(f"there is no recipe yet: {advice.reasons[0]}")
    return str(yaml.safe_dump(advice.recipe, sort_keys=False, default_flow_style=None, width=120))


def lines(advice: Advice) -> list[str]:
    """The advice as text."""
    have, machine = ", ".join(advice.have) or "nothing", COMPUTE[advice.compute].title
    text = [f"goal: {GOALS[advice.goal].title}; at hand: {have}; on {machine}", ""]
    if advice.chain:
        text += ["do:  " + " -> ".join(s if s == a else f"{s} ({a})" for s, a in advice.chain), ""]
    text += ["because", *(f"  - {reason}" for reason in advice.reasons), ""]
    if advice.models:
        count = f"{len(advice.models)} model{'s' if len(advice.models) > 1 else ''}"
        size = f"about {advice.bytes_a_parameter} bytes a parameter before activations"
        names = ", ".join(advice.models)
        text += [f"{count} in memory ({names}): {size}, if all are of one size", ""]
    text += ["pitfalls", *(f"  - {pitfall}" for pitfall in advice.pitfalls), ""]
    if advice.recipe is None:
        return [*text, f"to see a whole run meanwhile: {advice.command}"]
    text += [START.format(advice.example, advice.command.replace("run", "plan", 1), advice.command)]
    if "--allow-code" in advice.command:
        by_model = "reported; the reward model decides"
        scored = by_model if "reward" in advice.models else f"the {advice.signal}'s verdict"
        text += [TASK.format(scored)]
    text += [f"  {line}" for line in recipe_text(advice).splitlines()]
    return "\n".join(text).split("\n")
