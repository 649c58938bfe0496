"""Which method for my goal: plain data and the rules that choose from it. `posttrain advise` and docs/advise.md say the same.

What decides is the signal at hand (a program that checks answers, comparisons, a judge, thumbs up and down, demonstrations), then how
much memory there is, then what the goal forgives. The chain that is chosen can be written as a recipe and run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.errors import UserError, require, unknown
from posttrain.types import JSON

COMPUTE = ("laptop", "gpu", "cluster")
DATA = {
    "demonstrations": "prompts with good answers",
    "comparisons": "pairs or rankings: this answer is better than that one",
    "thumbs": "single answers that people called good or bad",
    "verifier": "a program that can tell a right answer from a wrong one: a checker, unit tests, a classifier",
    "judge": "a model that can be asked which answer is better, or for a grade",
    "nothing": "a model and an idea",
}
WORDS = {"laptop": "a laptop", "gpu": "one GPU", "cluster": "a cluster"}
TRAINED = ("policy", "value")  # these have gradients and moments; the others are frozen
# a parameter of a trained and of a frozen model, as `plan` counts
BYTES = {"laptop": (16, 4), "gpu": (18, 2), "cluster": (18, 2)}
PROMPTS = {"laptop": 8, "gpu": 32, "cluster": 128}


@dataclass(frozen=True, slots=True)
class Method:
    """A chain of stages as (stage, algorithm), why it, who is in memory at its widest, and what goes wrong with it."""

    stages: tuple[tuple[str, str], ...]
    models: tuple[str, ...]
    why: str
    pitfalls: tuple[str, ...]
    settings: tuple[
        tuple[str, str, JSON], ...
    ] = ()  # stage, key, value; a key of the algorithm begins with "algorithm."
    demonstrated: bool = True  # begins with sft where there are demonstrations
    example: str = "quickstart"  # a shipped recipe that does much the same in small


METHODS = {
    "imitate": Method(
        (("sft", "sft"),),
        ("policy",),
        "with demonstrations alone there is nothing to explore: learn them",
        (
            "it imitates mistakes as well as skill, and cannot exceed its demonstrations",
            "held-out loss rises after a few passes",
        ),
        demonstrated=False,
    ),
    "grpo": Method(
        (("rl", "grpo"),),
        ("policy",),
        "several samples of a prompt are each other's baseline: no critic, and with beta = 0 no reference",
        (
            "prompts that are always or never solved teach nothing: watch groups/zero_variance and choose the level by it",
            "without a KL term the style drifts: watch kl (watch_kl=true)",
        ),
        (("rl", "algorithm.beta", 0.0), ("rl", "algorithm.group", 8)),
    ),
    "anchored_grpo": Method(
        (("rl", "grpo"),),
        ("policy", "reference"),
        "a group as the baseline, and a KL term that keeps the model what it was elsewhere",
        (
            "k3, the paper's estimator, pulls like the forward KL; kl=corrected has the reverse KL's gradient",
            "what the checker does not see is free to change: hold out what must stay",
        ),
        (("rl", "algorithm.beta", 0.04), ("rl", "algorithm.kl", "corrected")),
    ),
    "dr_grpo": Method(
        (("rl", "dr_grpo"),),
        ("policy",),
        "GRPO without its biases of length and difficulty: answers do not grow for the sake of it",
        (
            "prompts that are always or never solved teach nothing: watch groups/zero_variance",
            "constant scales the learning rate: leave it when the length limit changes",
        ),
        (("rl", "algorithm.group", 8),),
    ),
    "dapo": Method(
        (("rl", "dapo"),),
        ("policy",),
        "long reasoning at scale: useless prompts are replaced, rare tokens may grow, length is held by a soft limit",
        (
            "set l_max to the limit on new tokens: its default is the paper's 20480",
            "replacing prompts multiplies sampling where most are solved or hopeless",
        ),
        (
            ("rl", "algorithm.group", 16),
            ("rl", "algorithm.l_max", 4096),
            ("rl", "algorithm.l_cache", 1024),
            ("rl", "sampling.max_new_tokens", 4096),
        ),
    ),
    "raft": Method(
        (("rl", "raft"),),
        ("policy",),
        "sample, keep the best, imitate: as stable as SFT, and one model in memory",
        (
            "it never learns what not to do, and narrows: watch entropy",
            "without a threshold the best of a bad group is learned too",
        ),
        (("rl", "algorithm.share", 0.25),),
        example="rejection_sampling",
    ),
    "raft_dapo": Method(
        (("rl", "raft"), ("rl", "dapo")),
        ("policy",),
        "rejection sampling first gets the easy part cheaply; RL then goes beyond what "
        "sampling alone reaches",
        (
            "stop raft while its entropy is still high: what it forgets RL cannot sample",
            "set l_max to the limit on new tokens",
        ),
        (
            ("raft", "algorithm.share", 1.0),
            ("raft", "algorithm.threshold", 1.0),
            ("dapo", "algorithm.l_max", 4096),
            ("dapo", "algorithm.l_cache", 1024),
            ("dapo", "sampling.max_new_tokens", 4096),
        ),
        example="rejection_sampling",
    ),
    "dpo": Method(
        (("preference", "dpo"),),
        ("policy", "reference"),
        "one supervised loss whose optimum is that of RL with a KL penalty",
        (
            "both likelihoods may fall while the margin grows: watch logprob/preferred, and set alpha above 0 if it does",
            "pairs that another model wrote are off-policy: do SFT on the preferred ones first",
        ),
        (("preference", "algorithm.beta", 0.1),),
        example="dpo",
    ),
    "simpo": Method(
        (("preference", "simpo"),),
        ("policy",),
        "preference learning with one model in memory instead of two",
        ("nothing anchors it: keep the learning rate small and the run short",),
        example="dpo",
    ),
    "orpo": Method(
        (("preference", "orpo"),),
        ("policy",),
        "from a base model to a preferring one in one stage and with one model",
        ("it imitates all preferred answers as well: bad pairs teach twice",),
        demonstrated=False,
        example="dpo",
    ),
    "kto": Method(
        (("preference", "kto"),),
        ("policy", "reference"),
        "single verdicts are enough: no pairs, and good and bad may be unbalanced",
        (
            "keep desirable * good between 1 and 4/3 times undesirable * bad (numbers of examples)",
            "thumbs follow who clicks: look at who does",
        ),
        example="dpo",
    ),
    "online_dpo": Method(
        (("rl", "online_dpo"),),
        ("policy", "reference"),
        "pairs stay on-policy, and a judge need only say which is better: its scale does not matter",
        (
            "judges prefer the first, the longer and their own: swap the order and take the mean",
            "verdicts without noise ask for infinite margins: loss.labels=soft where the judge grades",
        ),
        (("rl", "algorithm.group", 4),),
        example="iterative_dpo",
    ),
    "rm_ppo": Method(
        (("reward_model", "reward_model"), ("rl", "ppo")),
        ("policy", "reference", "value", "reward"),
        "InstructGPT's way: a reward model carries comparisons over to fresh samples, a critic shares out credit within long answers",
        (
            "the policy finds the reward model's errors: stop at a KL, not at a reward, and judge with another model",
            "a critic that starts from nothing misleads: start it from the reward model, or warm it up",
        ),
        (
            ("reward_model", "min_accuracy", 0.6),
            ("rl", "critic", "reward_model"),
            ("rl", "algorithm.kl_target", 6.0),
        ),
        example="instructgpt",
    ),
    "rm_rloo": Method(
        (("reward_model", "reward_model"), ("rl", "rloo")),
        ("policy", "reference", "reward"),
        "the reward model's samples without a critic: PPO's aim at little more than half its memory",
        (
            "the policy finds the reward model's errors: stop at a KL, not at a reward, and judge with another model",
        ),
        (("reward_model", "min_accuracy", 0.6), ("rl", "algorithm.group", 4)),
        example="instructgpt",
    ),
    "worst_of_ppo": Method(
        (("reward_model", "reward_model"), ("rl", "ppo")),
        ("policy", "reference", "value", "reward", "reward", "reward"),
        "several reward models that must all agree: what only one of them likes is probably an error of it",
        (
            "members of one body share its blind spots: use different ones if you can",
            "refusing everything is safe and useless: score both",
        ),
        (
            ("reward_model", "min_accuracy", 0.6),
            ("reward_model", "members", 3),
            ("rl", "combine", "worst"),
            ("rl", "algorithm.kl_target", 6.0),
        ),
        example="instructgpt",
    ),
}


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted, which signals serve it (best first), what to mind, and where its choice differs from the usual one."""

    title: str
    signals: tuple[str, ...]
    says: str
    pitfalls: tuple[str, ...]
    picks: tuple[tuple[str, str], ...] = ()  # signal, methods for a laptop, one GPU and a cluster


USUAL = {
    "verifier": "grpo grpo dapo",
    "comparisons": "dpo dpo rm_ppo",
    "judge": "raft online_dpo online_dpo",
    "thumbs": "kto kto kto",
    "demonstrations": "imitate imitate imitate",
}
TASTE = ("comparisons", "judge", "thumbs", "verifier", "demonstrations")
TRUTH = ("verifier", "comparisons", "judge", "thumbs", "demonstrations")
GOALS = {
    "chat": Goal(
        "general chat",
        TASTE,
        "what is good is what people prefer, so comparisons lead",
        (
            "annotators prefer length: compare at equal length, and watch it",
            "keep some tasks held out: chat tuning costs skills elsewhere",
        ),
    ),
    "quality": Goal(
        "maximum quality",
        TRUTH,
        "spend the memory: what explores beyond the data goes furthest",
        (
            "gains on the training reward are not gains: hold out problems and another judge",
            "run three seeds before you believe a difference",
        ),
        (("verifier", "grpo raft_dapo raft_dapo"), ("comparisons", "dpo rm_rloo rm_ppo")),
    ),
    "math": Goal(
        "math and reasoning",
        TRUTH,
        "an answer can be checked, so let it be checked: RL with a verifiable reward",
        (
            "begin where the model solves some of its samples: pass@8 above 0, below 1",
            "a checker has holes: try empty, repeated and every answer",
            "answers that are cut off count as wrong: give them room",
        ),
        (("verifier", "grpo dr_grpo dapo"),),
    ),
    "code": Goal(
        "code",
        TRUTH,
        "tests decide; run them in the sandbox",
        (
            "weak tests are gamed: special cases, exits, patched asserts; hold tests out",
            "a timeout is a failure, not a zero: watch how many",
        ),
    ),
    "limited": Goal(
        "limited compute",
        ("demonstrations", "verifier", "comparisons", "thumbs", "judge"),
        "one model in memory, few samples, and no more stages than needed",
        (
            "a small model that is trained beats a large one that does not fit",
            "lora: {} in an sft or rl stage trains adapters instead of all weights, and the reference then costs nothing",
            "posttrain plan prices a recipe before it runs",
        ),
        (
            ("verifier", "raft raft grpo"),
            ("comparisons", "simpo simpo dpo"),
            ("judge", "raft raft raft"),
        ),
    ),
    "safety": Goal(
        "safety",
        TASTE,
        "errors of the reward cost most here: anchor, use several judges, and measure refusals too",
        (
            "refusing everything is safe and useless: hold out harmless prompts that look harmful",
            "attacks change: keep some unseen ones",
        ),
        (
            ("comparisons", "dpo rm_rloo worst_of_ppo"),
            ("judge", "online_dpo online_dpo online_dpo"),
            ("verifier", "anchored_grpo anchored_grpo anchored_grpo"),
        ),
    ),
    "creative": Goal(
        "creative writing",
        TASTE,
        "taste has no checker, and variety is part of it: stay near the reference",
        (
            "optimising one judge's taste makes every story the same: raise beta, watch entropy and repetition",
            "compare at temperature 1, as people will read it",
        ),
        (
            ("comparisons", "dpo rm_rloo rm_rloo"),
            ("judge", "online_dpo online_dpo online_dpo"),
            ("verifier", "anchored_grpo anchored_grpo anchored_grpo"),
        ),
    ),
}
START_WITH_A_SIGNAL = {
    "math": "write a checker first: posttrain/tasks/arithmetic.py and countdown.py are two that run as they are",
    "code": "collect problems with tests first: tests are a verifier, and posttrain/rewards/code.py runs them in the sandbox",
    "quality": "find a signal first: a program that checks answers, or two hundred comparisons of your model's own samples",
}
NO_SIGNAL = "get a signal first: sample two answers a prompt (posttrain sample) and compare two hundred pairs, yourself or with a judge"


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, why, what it takes, what goes wrong, and the recipe."""

    goal: str
    compute: str
    reasons: tuple[str, ...]
    pitfalls: tuple[str, ...]
    command: str
    have: tuple[str, ...] = ()
    signal: str = ""  # what the method learns from; "" where there is nothing yet
    method: str = ""
    chain: tuple[tuple[str, str], ...] = ()  # (stage, algorithm)
    models: tuple[str, ...] = ()
    bytes_a_parameter: int = 0
    recipe: dict[str, JSON] | None = None
    example: str = "quickstart"  # a shipped recipe to try first


def find_goal(words: str) -> str:
    """The goal that someone means.

    >>> find_goal("Math and reasoning"), find_goal("limited-compute"), find_goal("reasoning")
    ('math', 'limited', 'math')
    """
    wanted = " ".join(words.lower().replace("-", " ").replace("_", " ").split())
    names = {name: name for name in GOALS} | {goal.title: name for name, goal in GOALS.items()}
    names |= {
        word: name for name, goal in GOALS.items() for word in goal.title.split() if len(word) > 3
    }
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
    for one in have:
        if one not in DATA:
            raise unknown("kind of data", one, DATA)
    if compute not in COMPUTE:
        raise unknown("compute", compute, COMPUTE)
    given = tuple(kind for kind in DATA if kind in have and kind != "nothing")
    require(
        not (given and "nothing" in have), f"have=nothing beside {', '.join(given)}: leave it out"
    )
    wanted = GOALS[name]
    signals = [kind for kind in wanted.signals if kind in given]
    # demonstrations are where others begin: they are the signal only where there is no other
    signal = next(
        (kind for kind in signals if kind != "demonstrations"), signals[0] if signals else ""
    )
    if not signal:
        first = START_WITH_A_SIGNAL.get(name, NO_SIGNAL)
        return Advice(
            name, compute, (first, wanted.says), wanted.pitfalls, "posttrain run quickstart"
        )
    picked = (dict(wanted.picks) | {"demonstrations": USUAL["demonstrations"]}).get(
        signal, USUAL[signal]
    )
    chosen = picked.split()[COMPUTE.index(compute)]
    if chosen == "simpo" and "demonstrations" not in given:
        chosen = "orpo"  # the model has not been taught the form of an answer: ORPO teaches it in the same stage
    return _compose(name, given, compute, signal, chosen)


def _compose(name: str, given: tuple[str, ...], compute: str, signal: str, chosen: str) -> Advice:
    method, goal = METHODS[chosen], GOALS[name]
    shown = method.demonstrated and "demonstrations" in given
    chain = ((("sft", "sft"),) if shown else ()) + method.stages
    reasons = [goal.says, f"{signal}: {DATA[signal]}", f"{chosen}: {method.why}"]
    if shown:
        reasons.insert(2, "sft first: what follows can only strengthen what is sampled sometimes")
    pitfalls = list(method.pitfalls + goal.pitfalls)
    if "demonstrations" not in given:
        pitfalls.append(
            "without demonstrations, begin with a model that already answers in the right form"
        )
    unused = [kind for kind in given if kind not in (signal, "demonstrations")]
    if unused:
        reasons.append(f"not used: {', '.join(unused)}; keep them to judge the result")
    trained = sum(model in TRAINED for model in method.models)
    full, frozen = BYTES[compute]
    cost = full * trained + frozen * (len(method.models) - trained)
    command = "posttrain run advice.yaml" + (
        " --allow-code" if any(stage == "rl" for stage, _ in chain) else ""
    )
    recipe = _recipe(name, chain, method, compute)
    return Advice(
        name,
        compute,
        tuple(reasons),
        tuple(pitfalls),
        command,
        given,
        signal,
        chosen,
        chain,
        method.models,
        cost,
        recipe,
        method.example,
    )


def _recipe(
    name: str, chain: Sequence[tuple[str, str]], method: Method, compute: str
) -> dict[str, JSON]:
    """The chain as a recipe file: every stage begins with the policy that the last one left. Files and the task are the user's."""
    stages: list[dict[str, JSON]] = []
    kinds = [stage for stage, _ in chain]
    model = "path/to/model"
    for stage, algorithm in chain:
        label = stage if kinds.count(stage) == 1 else algorithm
        tree: dict[str, JSON] = {"stage": stage, "name": label, "model": model}
        if stage == "rl":
            tree |= {
                "task": {"name": "my_task.py:MyTask"},
                "prompts": PROMPTS[compute],
                "algorithm": {"name": algorithm},
            }
            tree |= {"reward_models": ["reward_model"]} if "reward_model" in kinds else {}
            if compute != "cluster" and len(method.models) > 2:
                tree |= {"reference_device": "cpu", "reward_device": "cpu"}
        elif stage == "sft":
            tree |= {"data": [{"file": "demonstrations.jsonl"}]}
        else:
            tree |= {
                "data": ["comparisons.jsonl" if algorithm != "kto" else "thumbs.jsonl"],
                "algorithm": {"name": algorithm},
            }
        for where, key, value in method.settings:
            if where == label:
                at, _, inner = key.rpartition(".")
                target = tree.setdefault(at, {}) if at else tree
                target[inner] = value
        stages.append(tree)
        model = label if stage != "reward_model" else model
    return {"name": f"advice-{name}", "stages": stages}


def recipe_text(advice: Advice) -> str:
    """The recipe as YAML, to be saved as advice.yaml and edited."""
    import yaml

    if advice.recipe is None:
        raise UserError(f"there is no recipe yet: {advice.reasons[0]}")
    return str(yaml.safe_dump(advice.recipe, sort_keys=False, default_flow_style=None, width=120))


def models_line(advice: Advice) -> str:
    """Who is in memory at the widest stage, and what that comes to."""
    count = len(advice.models)
    text = f"{count} model{'s' if count > 1 else ''} in memory ({', '.join(advice.models)})"
    return f"{text}: about {advice.bytes_a_parameter} bytes a parameter before activations, if all are of one size"


def lines(advice: Advice) -> list[str]:
    """The advice in words."""
    have = ", ".join(advice.have) or "nothing"
    said = [f"goal: {GOALS[advice.goal].title}; at hand: {have}; on {WORDS[advice.compute]}", ""]
    if advice.chain:
        said += ["do:  " + " -> ".join(s if s == a else f"{s} ({a})" for s, a in advice.chain), ""]
    said += ["because"] + [f"  - {reason}" for reason in advice.reasons] + [""]
    if advice.models:
        said += [models_line(advice), ""]
    said += ["mind"] + [f"  - {pitfall}" for pitfall in advice.pitfalls] + [""]
    if advice.recipe is None:
        return [*said, f"to see the whole way meanwhile: {advice.command}"]
    said += [f"much the same in small, on a CPU: posttrain run {advice.example}", ""]
    said += [
        "start: save this as advice.yaml (add --config to print it alone), put in your model and files, then",
        "",
    ]
    said += [f"  {advice.command.replace('run', 'plan', 1)}", f"  {advice.command}", ""]
    if "--allow-code" in advice.command:
        scored = (
            "reported; the reward model decides"
            if "reward" in advice.models
            else f"the {advice.signal}'s verdict"
        )
        said += [
            f"my_task.py is yours: problems(), and score(), {scored} (posttrain/tasks/countdown.py is an example)",
            "",
        ]
    return said + [f"  {line}" for line in recipe_text(advice).splitlines()]
