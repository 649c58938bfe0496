"""Chooses a method for a goal, by rules over the tables of advise.yaml. `posttrain advise` and docs/advise.md use the same rules.

The available signal decides first (a program that checks answers, comparisons, a judge, binary feedback, demonstrations), then
the available memory, then the limits of the goal. The chosen chain can be written as a recipe and run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from posttrain.errors import refuse_unknown, require, unknown
from posttrain.types import JSON

TRAINED = ("policy", "critic")  # these have gradients and moments; the others are frozen

START = """\
a small recipe like it, on a CPU: posttrain run {}

start: save this as advice.yaml (--config prints it alone). It plans and runs as it is; its first lines say how to put in what is yours

  {}
  {}
"""


@dataclass(frozen=True, slots=True)
class Compute:
    """A kind of machine, with the bytes per parameter of a trained and of a frozen model."""

    title: str
    trained_bytes: int
    frozen_bytes: int
    prompts: int


@dataclass(frozen=True, slots=True)
class Method:
    """A chain of (stage, algorithm), the models in memory at its largest stage, its pitfalls and its settings by stage."""

    stages: Sequence[Sequence[str]]
    models: Sequence[str]
    why: str
    pitfalls: Sequence[str]
    settings: Mapping[str, Mapping[str, JSON]] = field(default_factory=dict)
    sft_first: bool = True
    lengths: Mapping[str, float] = field(default_factory=dict)  # shares of the new tokens
    example: str = "quickstart"


@dataclass(frozen=True, slots=True)
class Textbook:
    """What textbooks advise for a goal: from which data, the matching methods of this package, and why another one is
    chosen."""

    says: str
    needs: str
    methods: Sequence[str]
    differs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StandIn:
    """A shipped task in place of the user's; `ordinary` are its settings for the data of the first model."""

    task: Mapping[str, JSON]
    ordinary: Mapping[str, JSON]
    counts: Mapping[int, int]
    tokens: int
    goals: Sequence[str]


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal, the signals that serve it (best first), and its methods where they differ from the usual ones."""

    title: str
    signals: Sequence[str]
    reason: str
    pitfalls: Sequence[str]
    textbook: Textbook
    picks: Mapping[str, Sequence[str]] = field(default_factory=dict)


_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
DATA: Mapping[str, str] = _TABLES["data"]
COMPUTE: Mapping[str, Compute] = {name: Compute(**row) for name, row in _TABLES["compute"].items()}
METHODS: Mapping[str, Method] = {name: Method(**row) for name, row in _TABLES["methods"].items()}
GOALS: Mapping[str, Goal] = {
    name: Goal(**row | {"textbook": Textbook(**row["textbook"])})
    for name, row in _TABLES["goals"].items()
}
STAND_INS: Mapping[str, StandIn] = {
    goal: StandIn(**row) for row in _TABLES["stand_ins"].values() for goal in row["goals"]
}
REPLACEMENTS: Mapping[str, str] = _TABLES["replacements"]
PICKS: Mapping[str, Sequence[str]] = _TABLES["picks"]
FIRST_STEPS: Mapping[str, str] = _TABLES["first_steps"]


@dataclass(frozen=True, slots=True)
class Advice:
    """The chain of stages, its reasons, memory and pitfalls, and the recipe; without a signal, what to do first."""

    goal: str
    compute: str
    reasons: Sequence[str]
    pitfalls: Sequence[str]
    recipe: dict[str, JSON]
    replace: Sequence[str]  # how to put in the user's own data and models
    textbook: str
    command: str = "posttrain run advice.yaml"
    have: Sequence[str] = ()
    signal: str = ""  # what the method learns from; "" if there is no data yet
    method: str = ""
    chain: Sequence[tuple[str, str]] = ()  # (stage, algorithm)
    models: Sequence[str] = ()
    bytes_a_parameter: int = 0
    example: str = "quickstart"  # a shipped recipe to try first


def find_goal(words: str) -> str:
    """Return the name of a goal, given its name, its title or a word of its title.

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
    """Return the chain of stages for a goal, given the available data and compute.

    >>> advise("math", ["verifier"], "laptop").chain
    (('rl', 'grpo'),)
    >>> advise("general chat", ["demonstrations", "comparisons"], "cluster").chain
    (('sft', 'sft'), ('reward_model', 'reward_model'), ('rl', 'ppo'))
    """
    name = find_goal(goal)
    for kind in have:
        refuse_unknown("kind of data", [kind], DATA)
    refuse_unknown("compute", [compute], COMPUTE)
    given = tuple(kind for kind in DATA if kind in have and kind != "nothing")
    clear = not (given and "nothing" in have)
    require(clear, f"have=nothing with {', '.join(given)}: leave it out")
    wanted = GOALS[name]
    # other methods begin with demonstrations: they are the signal only if there is no other
    signals = [kind for kind in wanted.signals if kind in given and kind != "demonstrations"]
    signals += ["demonstrations"] if "demonstrations" in given else []
    if not signals:
        reasons = (FIRST_STEPS.get(name, FIRST_STEPS["default"]), wanted.reason)
        recipe, replaced = _recipe(name, [], None, compute, ())
        return Advice(name, compute, reasons, wanted.pitfalls, recipe, replaced, textbook(name))
    signal = signals[0]
    chosen = {**PICKS, **wanted.picks}[signal][list(COMPUTE).index(compute)]
    if chosen == "simpo" and "demonstrations" not in given:
        # the model has not learned the form of an answer: ORPO teaches it in the same stage
        chosen = "orpo"
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
    recipe, replaced = _recipe(name, chain, method, compute, given)
    return Advice(
        goal=name,
        compute=compute,
        reasons=reasons,
        pitfalls=pitfalls,
        recipe=recipe,
        replace=replaced,
        textbook=textbook(name, given, chosen),
        have=given,
        signal=signal,
        method=chosen,
        chain=tuple(chain),
        models=method.models,
        bytes_a_parameter=machine.trained_bytes * trained + machine.frozen_bytes * frozen,
        example=method.example,
    )


def textbook(name: str, given: Sequence[str] = (), chosen: str = "") -> str:
    """Return what textbooks advise for a goal and, if the choice differs, why.

    >>> textbook("math", ["verifier"], "grpo")
    'GRPO with rewards by rule: cheap, and the answers can be verified. The same here'
    """
    book = GOALS[name].textbook
    if chosen in book.methods:
        return f"{book.says}. The same here"
    if book.needs not in given:
        return f"{book.says}. That needs another signal: {book.needs}"
    return f"{book.says}. Here {chosen}: {book.differs[chosen]}"


def _recipe(
    name: str,
    chain: Sequence[tuple[str, str]],
    method: Method | None,
    compute: str,
    given: Sequence[str],
) -> tuple[dict[str, JSON], list[str]]:
    """Return the chain as a recipe that runs unchanged, and how to put in the user's own data. Shipped tasks and a tiny model
    stand in for the user's. Every stage begins with the policy of the stage before."""
    own, kinds, model = STAND_INS[name], [stage for stage, _ in chain], "tiny:nano"
    sampling: dict[str, JSON] = {"max_new_tokens": own.tokens}
    stages: list[dict[str, JSON]] = []
    replaced = ["training"] if chain else []

    def add(stage: str, label: str, **settings: JSON) -> None:
        training = _TABLES["training"].get(stage, {})
        steps = {"steps": training["steps"]} if training else {}
        rate = {"optimizer": {"lr": training["lr"]}} if training else {}
        stages.append({"stage": stage, "name": label, "model": model, **settings, **steps, **rate})

    def stand_in(stage: str, label: str, **settings: JSON) -> str:
        replaced.append(label)
        add(stage, label, **settings)
        return label

    if "sft" not in kinds:
        ordinary = {"task": {**own.task, **own.ordinary}, "counts": {**own.counts}}
        model = stand_in("sft", "start", data=[ordinary])
    if method is None:
        sampling["temperature"] = 1.0
        add("evaluate", "now", task={**own.task}, samples=8, problems=100, sampling=sampling)
        return {"name": f"advice-{name}", "stages": stages}, _replacements([*replaced, "nothing"])
    for stage, algorithm in chain:
        label = stage if kinds.count(stage) == 1 else algorithm
        if stage == "sft":
            replaced.append("demonstrations")
            add(stage, label, data=[{"task": {**own.task}, "counts": {**own.counts}}])
        elif stage == "rl":
            rl = _rl_settings(algorithm, method, compute, own, "reward_model" in kinds)
            add(stage, label, task={**own.task}, **rl, sampling=sampling)
            ask = [kind for kind in ("verifier", "judge") if kind in given]
            replaced.append("prompts" if "reward_model" in kinds else ask[0])
        else:
            data = "feedback" if algorithm == "kto" else "comparisons"
            stand_in("comparisons", data, task={**own.task}, sampling=sampling)
            add(stage, label, data=[data], algorithm={"name": algorithm})
        tree = stages[-1]
        for key, value in method.settings.get(label, {}).items():
            tree[key] = tree.get(key, {}) | value if isinstance(value, dict) else value
        model = label if stage != "reward_model" else model
    return {"name": f"advice-{name}", "stages": stages}, _replacements(replaced)


def _replacements(names: Sequence[str]) -> list[str]:
    return [text for name, text in REPLACEMENTS.items() if name in names]


def _rl_settings(
    algorithm: str, method: Method, compute: str, own: StandIn, by_model: bool
) -> dict[str, JSON]:
    """Return the settings of an rl stage besides its task; with one GPU or none, idle models are kept in host memory."""
    offload = {"device": "cpu"} if compute != "cluster" and len(method.models) > 2 else {}
    lengths = {key: int(share * own.tokens) for key, share in method.lengths.items()}
    settings: dict[str, JSON] = {"prompts": COMPUTE[compute].prompts}
    settings["algorithm"] = {"name": algorithm, **(lengths if algorithm == "dapo" else {})}
    if by_model:
        settings["reward"] = {"name": "models", "models": ["reward_model"], **offload}
    return settings | ({"reference_device": "cpu"} if offload else {})


def recipe_text(advice: Advice) -> str:
    """Return the recipe as YAML, after comments that explain how to put in the user's own data."""
    text = yaml.safe_dump(advice.recipe, sort_keys=False, default_flow_style=None, width=120)
    comments = ["shipped tasks and a tiny model stand for what is yours", *advice.replace]
    return "".join(f"# {line}\n" for line in comments) + str(text)


def lines(advice: Advice) -> list[str]:
    """Return the advice as text."""
    have, machine = ", ".join(advice.have) or "nothing", COMPUTE[advice.compute].title
    text = [f"goal: {GOALS[advice.goal].title}; at hand: {have}; on {machine}", ""]
    if not advice.have:
        text[1:] = ["(what you have is said by --have; posttrain advise --help lists it)", ""]
    if advice.chain:
        text += ["do:  " + " -> ".join(s if s == a else f"{s} ({a})" for s, a in advice.chain), ""]
    text += ["because", *(f"  - {reason}" for reason in advice.reasons), ""]
    text += [f"textbooks say: {advice.textbook}", ""]
    if advice.models:
        count = f"{len(advice.models)} model{'s' if len(advice.models) > 1 else ''}"
        size = f"about {advice.bytes_a_parameter} bytes a parameter before activations"
        names = ", ".join(advice.models)
        text += [f"{count} in memory ({names}): {size}, if all are of one size", ""]
    text += ["pitfalls", *(f"  - {pitfall}" for pitfall in advice.pitfalls), ""]
    text += [START.format(advice.example, advice.command.replace("run", "plan", 1), advice.command)]
    text += [f"  {line}" for line in recipe_text(advice).splitlines()]
    return "\n".join(text).split("\n")
