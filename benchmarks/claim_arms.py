"""The arms of benchmarks/claims.py as recipes: posttrain run benchmarks/claim_arms.py:explore arm=dpo seed=0 out=DIR

Each claim has one function. `arm` chooses the arm, and `scale` multiplies all steps and counts (0.01 is a smoke test). The arms of a
claim begin with the same stages and the same seed, and so with the same base model. This file also has the toy tasks that only these
claims need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Any, ClassVar, Literal

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.dpo import DPO
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ppo import PPO
from posttrain.errors import require
from posttrain.monitor.rules import MonitorSettings
from posttrain.recipes._reviews import PEOPLE, SAMPLING, UNSEEN
from posttrain.recipes._toys import RATE, SUMS, imitating
from posttrain.recipes.base import Recipe, repeat
from posttrain.stages._material import Data
from posttrain.stages.agreement import AgreementStage
from posttrain.stages.base import Stage
from posttrain.stages.comparisons import ComparisonsStage
from posttrain.stages.evaluate import EvaluateStage
from posttrain.stages.preference import PreferenceStage
from posttrain.stages.pretrain import PretrainStage
from posttrain.stages.reward_model import RewardModelStage
from posttrain.stages.reward_sources import RewardModels
from posttrain.stages.rl import RLStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks._procedural import Procedural, stable_hash
from posttrain.tasks.arithmetic import ALPHABET as DIGITS
from posttrain.tasks.arithmetic import MARKER, SEPARATOR, Arithmetic, carries
from posttrain.tasks.base import Generate, Task
from posttrain.tasks.countdown import ALPHABET as NUMBERS
from posttrain.tasks.countdown import Countdown
from posttrain.tasks.reviews import Reviews
from posttrain.train.optimizer import Optimization
from posttrain.types import Message, Problem, Rollout, Sampling, Score

SUM = Arithmetic(level=3, min_level=3)
STRICT = Reviews(strict=True)
RULES = tuple(range(1, 10))
TRAINED_RULE, CHANGED_RULE = 3, 7  # of claim 2
HABITS = {"check": "!", "back_track": "~", "sub_goal": ";", "backward": "<"}
BUDGETS = (16, 32, 48, 64, 80)  # tokens of thinking, claim 6
SUM_BUDGETS = (5, 11, 17, 23, 29)  # the work of one digit, of two, of three, of four, and room for all
THINKING = BUDGETS[-1]
GROUP = GRPO(group=8, beta=0.0, reduction="token_mean")


# --- toy tasks --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Direct(Arithmetic):
    """The same sums, whose demonstrations give the answer without the work: 47+85= is answered #132."""

    def demonstration(self, problem: Problem) -> str:
        return MARKER + problem.answer


@dataclass(frozen=True)
class Slipped(Arithmetic):
    """The same sums, whose demonstrations have one wrong digit in the work and in the answer: 47+85= is answered 75014,48113#134."""

    def demonstration(self, problem: Problem) -> str:
        work, _, answer = super().demonstration(problem).partition(MARKER)
        steps, digits = work.split(SEPARATOR), list(answer)
        at, other = divmod(stable_hash("slip", problem.id), 8)
        at %= len(steps)
        digits[-1 - at] = str((int(digits[-1 - at]) + other) % 9 + 1)  # another one, never 0
        steps[at] = steps[at][:-1] + digits[-1 - at]
        return SEPARATOR.join(steps) + MARKER + "".join(digits)


@dataclass(frozen=True)
class Budgeted(Arithmetic):
    """Sums of `min_level` to `level` digits in turn, also in the test. `budget` > 0 ends the work after as many tokens: the answer is
    asked for."""

    budget: int = 0

    def problems(self, split: str, level: int | None = None) -> Procedural:
        if split == "train" or level is not None:
            return super().problems(split, level)
        own = [super(Budgeted, self).problems(split, n) for n in self.levels]
        return Procedural(lambda index: own[index % len(own)][index // len(own)], range(len(own) * min(map(len, own))))

    async def run(self, problem: Problem, generate: Generate) -> Rollout | Sequence[Rollout]:
        return await (within(self.budget, generate) if self.budget else super().run(problem, generate))

    def observation_roles(self, template: str) -> tuple[str, ...]:
        return ()


async def within(budget: int, generate: Generate) -> Rollout:
    """An episode that may think for as many tokens; where it has given no answer by then, the marker is appended and it must."""
    thought = (await generate(max_new_tokens=budget)).text
    if MARKER in thought:
        return generate.rollout(answer=thought)
    answer = (await generate(MARKER, last=True, max_new_tokens=16)).text
    return generate.rollout(answer=thought + MARKER + answer)


@dataclass(frozen=True)
class Carried(Arithmetic):
    """Sums where a digit carries into the next, in the test too."""

    carry: Literal["any", "none", "some"] = "some"

    def problems(self, split: str, level: int | None = None) -> Procedural:
        plain = super().problems(split, level)
        if split == "train":
            return plain
        having = [p for n in range(min(len(plain), 2000)) if carries("+", (p := plain[n]).facts["a"], p.facts["b"])]
        return Procedural(lambda index: having[index], range(len(having)))


@dataclass(frozen=True)
class Ruled(Arithmetic):
    """Sums with a digit that the question defines: x=3:4x+85= is 43+85, answered as ever with the work. `rules` are the values of x
    that occur; a question is made of a sum that has this digit, so that a sum is on one side of the split whatever the rule."""

    alphabet: ClassVar[str] = DIGITS + "x:"

    rules: tuple[int, ...] = RULES

    def problems(self, split: str, level: int | None = None) -> Procedural:
        plain = super().problems(split, level)
        if split == "train":
            return Procedural(lambda index: self.ruled(plain, index), range(len(plain) // 100))
        having = [p for n in range(min(len(plain), 2000)) if (p := self.renamed(plain[n]))]
        return Procedural(lambda index: having[index], range(len(having)))

    def ruled(self, plain: Sequence[Problem], index: int) -> Problem:
        """The first sum from a place of its own on that has the digit of its rule."""
        found = (self.renamed(plain[(100 * index + n) % len(plain)]) for n in range(10_000))
        return next(problem for problem in found if problem is not None)

    def renamed(self, problem: Problem) -> Problem | None:
        digit = str(self.rules[stable_hash("rule", problem.id) % len(self.rules)])
        if digit not in problem.question:
            return None
        return replace(problem, question=f"x={digit}:" + problem.question.replace(digit, "x"))


@dataclass(frozen=True)
class Search(Countdown):
    """Countdown with three numbers, and what demonstrations look like: `direct` gives the expression, `search` first tries others, each
    of which is worked out and left, `wrong` searches as well and ends with an expression that is not worth the target. 3,7,4=40: by
    search: `3+7=10;10+4=14~40<4*10;3+7=10!#(3+7)*4`. Habits are marks: `;` after a sub-goal, `<` where the target is
    taken apart (backward), `~` back-track, `!` checked and right; `score` counts them. `budget` > 0 ends the thinking after as many
    tokens: the answer is asked for."""

    alphabet: ClassVar[str] = NUMBERS + "".join(HABITS.values())

    level: int = 3
    min_level: int = 3
    max_number: int = 9
    max_target: int = 40
    style: Literal["direct", "search", "wrong"] = "search"
    budget: int = 0

    def demonstration(self, problem: Problem) -> str:
        if self.style == "direct":
            return MARKER + problem.answer
        numbers, target = tuple(problem.facts["numbers"]), int(problem.facts["target"])
        tried = attempts(numbers)
        right = [a for a in tried if a.value == target]
        wrong = [a for a in tried if a.value != target]
        draw = Draw(stable_hash("search", problem.id))
        ends = right if self.style == "search" else wrong
        chosen = [draw.one(wrong) for _ in range(draw.roll(4) + (not ends))] if wrong else []
        last = draw.one(ends or wrong)
        work = [(a.backward() if draw.roll(4) == 0 and a is last and last in right else a.forward()) for a in [*chosen, last]]
        marks = ["~"] * len(chosen) + ["!" if last.value == target else "~"]
        return "".join(w + m for w, m in zip(work, marks, strict=True)) + MARKER + last.expression

    def score(self, problem: Problem, response: str) -> Score:
        judged = super().score(problem, response)
        counts = {name: float(response.count(mark)) for name, mark in HABITS.items()}
        return replace(judged, parts={**judged.parts, **counts})

    def observation_roles(self, template: str) -> tuple[str, ...]:
        return ()

    async def run(self, problem: Problem, generate: Generate) -> Rollout | Sequence[Rollout]:
        return await (within(self.budget, generate) if self.budget else super().run(problem, generate))


@dataclass(frozen=True, slots=True)
class Attempt:
    """(first sign second) sign' third, or third sign' (first sign second), and what it is worth."""

    first: str  # the sub-goal: 3+7
    inner: int
    sign: str
    third: int
    swapped: bool
    value: int

    def joined(self, inner: str) -> str:
        return f"{self.third}{self.sign}{inner}" if self.swapped else f"{inner}{self.sign}{self.third}"

    def forward(self) -> str:
        return f"{self.first}={self.inner};{self.joined(str(self.inner))}={self.value}"

    def backward(self) -> str:
        return f"{self.value}<{self.joined(str(self.inner))};{self.first}={self.inner}"

    @property
    def expression(self) -> str:
        return self.joined(f"({self.first})")


@lru_cache(maxsize=100_000)
def attempts(numbers: tuple[int, ...]) -> tuple[Attempt, ...]:
    """Every way to join two of three numbers and then the third, by positive integers alone."""
    made = []
    for pair in combinations(range(3), 2):
        (third,) = {0, 1, 2} - {*pair}
        for x, y, sign, inner, _ in joins(*(numbers[n] for n in pair)):
            for _, _, outer, value, swapped in joins(inner, numbers[third]):
                made.append(Attempt(f"{x}{sign}{y}", inner, outer, numbers[third], swapped, value))
    return tuple(made)


def joins(x: int, y: int) -> Iterator[tuple[int, int, str, int, bool]]:
    yield x, y, "+", x + y, False
    yield x, y, "*", x * y, False
    for one, other, swapped in ((x, y, False), (y, x, True)):
        if one > other:
            yield one, other, "-", one - other, swapped
        if other > 1 and one % other == 0:
            yield one, other, "/", one // other, swapped


@dataclass(slots=True)
class Draw:
    """Small draws out of one 128-bit number."""

    left: int

    def roll(self, sides: int) -> int:
        self.left, face = divmod(self.left, sides)
        return face

    def one(self, choices: Sequence[Attempt]) -> Attempt:
        return choices[self.roll(len(choices))]


@dataclass(frozen=True)
class CountdownInWords(Countdown):
    """Countdown for a real model: asked in words, answered by an expression after the last `Answer:`."""

    level: int = 4
    min_level: int = 3
    max_number: int = 25
    max_target: int = 100

    def prompt(self, problem: Problem) -> tuple[Message, ...]:
        numbers = ", ".join(map(str, problem.facts["numbers"]))
        asked = f"Make {problem.facts['target']} from the numbers {numbers} with + - * / and brackets. Use each number exactly once. "
        asked += (
            "Think step by step and check what you try. Then write one last line: Answer: followed by the expression alone."
        )
        return (Message("user", asked),)

    def score(self, problem: Problem, response: str) -> Score:
        _, found, last = response.rpartition("Answer:")
        line = (last.strip().splitlines() or [""])[0].strip(" `*$.") if found else ""
        return super().score(problem, line.split("=")[0])


# --- what the recipes are made of -------------------------------------------------------------------------------------------


Count = Callable[[int], int]


def scaled(scale: float) -> Count:
    """Counts that a smoke test makes small."""
    return lambda count: max(2, round(scale * count))


def chosen(arm: str, arms: dict[str, Any]) -> Any:
    require(arm in arms, f"there is no arm {arm!r}; there are {', '.join(arms)}")
    return arms[arm]


def evaluation(
    name: str, model: str, task: Task, n: Count, tokens: int = 32, samples: int = 8, problems: int = 300
) -> EvaluateStage:
    """Sampled answers to held-out problems: pass@1 and pass@`samples`."""
    return EvaluateStage(name=name, model=model, task=task, problems=n(problems), samples=samples, sampling=Sampling(tokens))


def reinforce(model: str, task: Task, steps: int, tokens: int = 32, algorithm: Algorithm = GROUP, **more: Any) -> RLStage:
    """128 answers a step, by default 16 problems x 8, at a constant rate."""
    group = algorithm.group_size
    usual: dict[str, Any] = {
        "name": "rl",
        "prompts": 128 // group,
        "optimizer": Optimization(lr=3e-4, warmup=min(10, steps)),
        "evaluate_every": 0,
        "checkpoint_every": 10**6,
        "rollouts_every": 10**6,
    }
    return RLStage(model=model, task=task, steps=steps, sampling=Sampling(tokens), algorithm=algorithm, **{**usual, **more})


def pretrained(steps: int, *data: Data, size: str = "nano") -> PretrainStage:
    return PretrainStage(
        name="base", model=f"tiny:{size}", data=data, steps=steps, optimizer=replace(RATE, warmup=min(20, steps))
    )


def imitated(steps: int, *data: Data) -> SFTStage:
    return replace(imitating("nano", *(data or SUMS), steps=steps), optimizer=replace(RATE, warmup=min(20, steps)))


# --- the claims, by number --------------------------------------------------------------------------------------------------


def amplify(arm: str = "strong", scale: float = 1.0) -> Recipe:
    """1. RL amplifies SFT: the same RL after SFT of three lengths."""
    n = scaled(scale)
    steps = chosen(arm, {"weak": 150, "middling": 250, "strong": 500})
    stages = [
        imitated(n(steps)),
        evaluation("before", "sft", SUM, n),
        reinforce("sft", SUM, n(200), monitor=MonitorSettings(off=("flat",))),
        evaluation("after", "rl", SUM, n),
    ]
    return Recipe(tuple(stages), "before", "after")


def memorise(arm: str = "rl", scale: float = 1.0) -> Recipe:
    """2. SFT memorises, RL generalises: all learn to carry in three-digit sums where x is 3, and are asked sums where x is 7. The base
    has read sums with every value of x, those of three digits only without a carry."""
    n = scaled(scale)
    every, trained, changed = (Ruled(level=3, min_level=3, rules=rules) for rules in (RULES, (TRAINED_RULE,), (CHANGED_RULE,)))
    read = (
        Data(task=replace(every, level=2, min_level=1), counts={1: n(500), 2: n(5000)}),
        Data(task=replace(every, carry="none"), counts={3: n(5000)}),
    )
    sft = SFTStage(
        name="train",
        model="previous train",
        data=(Data(task=trained, counts={3: n(2000)}),),
        steps=n(100),
        optimizer=Optimization(lr=3e-4),
    )
    rl = replace(reinforce("previous train", trained, n(60)), name="train")
    learn = chosen(arm, {"sft": sft, "rl": rl})
    measures = [evaluation("same", "train", trained, n), evaluation("changed", "train", changed, n)]
    stages: list[Stage] = [pretrained(n(900), *read)]
    stages += [replace(stage, name=f"{stage.name}_0", model="base") for stage in measures]
    return Recipe((*stages, *repeat([learn, *measures], 3, first={"train": "base"})))


def pattern(arm: str = "primed", scale: float = 1.0) -> Recipe:
    """3. RL needs the pattern in the base: bases that have read answers alone, searches, or searches that end wrongly; the same RL."""
    n, style = scaled(scale), chosen(arm, {"unprimed": "direct", "primed": "search", "primed_wrong": "wrong"})
    task = Search(style=style)
    stages = [
        pretrained(n(1500), Data(task=task, counts={3: n(20_000)})),
        evaluation("before", "base", task, n, THINKING),
        reinforce("base", task, n(150), THINKING),
        evaluation("after", "rl", task, n, THINKING),
    ]
    return Recipe(tuple(stages), "before", "after")


def work(arm: str = "primed", scale: float = 1.0) -> Recipe:
    """11, claim 3 once more: models that have read sums without their work, half of them with it, or half with wrong work."""
    n = scaled(scale)
    primer = chosen(arm, {"unprimed": Direct, "primed": Arithmetic, "primed_wrong": Slipped})
    counts = {1: n(200), 2: n(1000), 3: n(1000)}
    stages = [
        imitated(n(1000), *(Data(task=kind(level=3), counts=counts, weight=0.5) for kind in (Direct, primer))),
        evaluation("before", "sft", SUM, n),
        reinforce("sft", SUM, n(150), monitor=MonitorSettings(off=("flat",))),
        evaluation("after", "rl", SUM, n),
    ]
    return Recipe(tuple(stages), "before", "after")


def memory(arm: str = "grpo", scale: float = 1.0, seconds: float = 60.0) -> Recipe:
    """5. PPO against GRPO: the same 128 answers a step for the same wall time."""
    n = scaled(scale)
    ppo = PPO(epochs=2, mini_batches=2, beta=0.02, critic_warmup=5)
    grpo = replace(GROUP, beta=0.02, epochs=2, mini_batches=2)
    algorithm = chosen(arm, {"ppo": ppo, "grpo": grpo, "grpo_no_kl": replace(grpo, beta=0.0)})
    critic = {"critic_optimizer": Optimization(lr=1e-3)} if "critic" in algorithm.roles else {}
    timed = {"seconds": seconds * scale, "evaluate_every": 20, "evaluate_problems": n(200), **critic}
    stages = [
        imitated(n(500)),
        evaluation("before", "sft", SUM, n),
        reinforce("sft", SUM, n(5000), algorithm=algorithm, **timed),
        evaluation("after", "rl", SUM, n),
    ]
    return Recipe(tuple(stages), "before", "after")


def thinking(arm: str = "chain", scale: float = 1.0) -> Recipe:
    """6. Direct answers against chains of thought on the same sums, by SFT and the same RL; and the accuracy by the tokens that a
    model may think, of one that searches (`budgets`) and of one that works sums of two to four digits out (`budgets_sums`)."""
    n = scaled(scale)
    if arm == "budgets_sums":
        sums = Budgeted(level=4, min_level=2)
        shown = [Data(task=Arithmetic(level=2), counts={1: n(200), 2: n(1000)})]
        shown += [Data(task=Arithmetic(level=level), counts={level: n(1000)}) for level in (3, 4)]
        budgets = [evaluation(f"budget_{b}", "sft", replace(sums, budget=b), n, samples=4) for b in SUM_BUDGETS]
        return Recipe((imitated(n(1000), *shown), *budgets))
    if arm == "budgets":
        task = Search()
        stages: list[Stage] = [
            pretrained(n(1500), Data(task=task, counts={3: n(20_000)})),
            reinforce("base", task, n(100), THINKING),
        ]
        for budget in BUDGETS:
            forced = replace(task, budget=budget)
            stages.append(evaluation(f"budget_{budget}", "rl", forced, n, THINKING, 4))
        return Recipe(tuple(stages))
    kind = chosen(arm, {"direct": Direct, "chain": Arithmetic})
    data = (Data(task=kind(level=2), counts={1: n(200), 2: n(1000)}), Data(task=kind(level=3), counts={3: n(1000)}))
    stages = [
        imitated(n(500), *data),
        evaluation("before", "sft", SUM, n),
        reinforce("sft", SUM, n(150)),
        evaluation("after", "rl", SUM, n),
    ]
    return Recipe(tuple(stages), "before", "after")


def rare(n: Count) -> tuple[Data, ...]:
    """Demonstrations of sums that hardly ever carry: in 100 of 1,300 with one and two digits, and in none with three."""
    plain, carried = Arithmetic(level=2, carry="none"), Carried(level=2, min_level=2)
    return (
        Data(task=plain, counts={1: n(200), 2: n(1000)}),
        Data(task=carried, counts={2: n(100)}),
        Data(task=replace(plain, level=3), counts={3: n(1000)}),
    )


def explore(arm: str = "grpo", scale: float = 1.0) -> Recipe:
    """7. DPO cannot explore: from a model that rarely carries in three-digit sums, 25,600 answers each. DPO has all of them sampled
    before, iterative DPO in four rounds, GRPO in 200 steps."""
    n, task = scaled(scale), Carried(level=3, min_level=3)
    rounds = chosen(arm, {"dpo": 1, "iterative_dpo": 4, "grpo": 0})
    stages: list[Stage] = [imitated(n(500), *rare(n)), evaluation("before", "sft", task, n)]
    if not rounds:
        stages += [reinforce("sft", task, n(200)), evaluation("after", "rl", task, n)]
        return Recipe(tuple(stages), "before", "after")
    asked = n(3200 // rounds)
    compare = ComparisonsStage(
        name="pairs", model="previous dpo", task=task, prompts=asked, samples=8, noise=0.0, sampling=Sampling(32)
    )
    learn = PreferenceStage(
        name="dpo",
        model="previous dpo",
        data=("pairs",),
        steps=n(100 // rounds),
        batch=64,
        algorithm=DPO(beta=1.0),
        optimizer=Optimization(lr=1e-4, warmup=min(5, n(100 // rounds))),
        evaluate_every=0,
        checkpoint_every=10**6,
    )
    stages += repeat([compare, learn], rounds, first={"dpo": "sft"}, advance={"pairs.skip": asked})
    return Recipe((*stages, evaluation("after", f"dpo_{rounds}", task, n)), "before", "after")


def judged(arm: str = "weak", scale: float = 1.0) -> Recipe:
    """8. Weak judge, strong policy: a reward model of few or many comparisons of the base; how often it agrees with the simulated
    annotator about what the policy writes, as the policy learns from it."""
    n = scaled(scale)
    compared = chosen(arm, {"weak": 200, "strong": 3000})

    def measures(model: str) -> list[Stage]:
        pairs = ComparisonsStage(
            name="pairs", model=model, task=STRICT, prompts=n(500), skip=50_000, noise=0.0, sampling=SAMPLING
        )
        agree = AgreementStage(name="agreement", data="pairs", reward_model="reward", pairs=n(500))
        return [pairs, agree, evaluation("gold", model, STRICT, n, 120, 1, 400)]

    first = [
        pretrained(n(600), PEOPLE),
        ComparisonsStage(name="comparisons", model="base", task=STRICT, prompts=n(compared), sampling=SAMPLING),
        RewardModelStage(
            name="reward",
            model="base",
            data=("comparisons",),
            steps=n(200),
            batch=32,
            min_accuracy=0.0,
            optimizer=Optimization(lr=1e-3, warmup=min(20, n(200)), schedule="cosine"),
        ),
    ]
    zero = [
        replace(s, name=f"{s.name}_0", **({"data": "pairs_0"} if isinstance(s, AgreementStage) else {}))
        for s in measures("base")
    ]
    slow = Optimization(lr=1e-4, warmup=min(5, n(20)))
    rl = reinforce("previous rl", STRICT, n(20), 120, reward=RewardModels(models=("reward",)), optimizer=slow)
    return Recipe((*first, *zero, *repeat([rl, *measures("rl")], 4, first={"rl": "base"})))


def tax(arm: str = "plain", scale: float = 1.0) -> Recipe:
    """9. Alignment tax: PPO on kind reviews; sums and ordinary reviews that the base has read are not trained on."""
    n, sums = scaled(scale), Arithmetic(level=2, min_level=2)
    read = (Data(task=Reviews("any"), counts={0: n(10_000)}, weight=0.5), Data(task=sums, counts={2: n(4000)}, weight=0.5))
    ptx, beta = chosen(arm, {"plain": (0.0, 0.02), "ptx": (0.5, 0.02), "kl": (0.0, 0.2)})
    algorithm = PPO(epochs=2, mini_batches=2, beta=beta, critic_warmup=5, ptx=ptx)

    def measures(when: str, model: str) -> list[EvaluateStage]:
        aligned = evaluation(f"reviews_{when}", model, Reviews(), n, 120, 1, 400)
        return [replace(aligned, text=(UNSEEN,)), evaluation(f"sums_{when}", model, sums, n, 24, 2)]

    rl = reinforce(
        "base", Reviews(), n(100), 120, algorithm, pretraining=read if ptx else (), critic_optimizer=Optimization(lr=1e-3)
    )
    return Recipe(
        (pretrained(n(900), *read), *measures("before", "base"), rl, *measures("after", "rl")), "sums_before", "sums_after"
    )


def entropy(arm: str = "plain", scale: float = 1.0) -> Recipe:
    """10. Clip-higher: how far one answer may become likelier in a step, over 300 steps of four updates each. Countdown answered at
    once: a problem has several right answers, so that the start has entropy to lose."""
    n, task = scaled(scale), Search(style="direct")
    high = chosen(arm, {"plain": 0.2, "clip_higher": 0.28, "clip_half": 0.5})
    algorithm = replace(GROUP, clip_high=high, epochs=2, mini_batches=2)
    stages = [
        pretrained(n(900), Data(task=task, counts={3: n(10_000)})),
        evaluation("before", "base", task, n, 16, samples=16),
        reinforce("base", task, n(300), 16, algorithm, evaluate_every=50, evaluate_problems=n(200)),
        evaluation("after", "rl", task, n, 16, samples=16),
    ]
    return Recipe(tuple(stages), "before", "after")


def thoughts(
    model: str = "",
    steps: int = 200,
    seconds: float = 400.0,
    lr: float = 3e-6,
    prompts: int = 64,
    tokens: int = 512,
    problems: int = 200,
    level: int = 4,
) -> Recipe:
    """4. R1-Zero's growing thoughts: a real model on one GPU. Length, reflection and accuracy over training, and greedy answers before
    and after by the number of numbers: before_3 and after_3 have three, before and after `level`. `seconds` ends RL early."""
    require(bool(model), "thoughts: give a model")
    task = CountdownInWords(level=level)

    def measures(when: str, name: str) -> list[EvaluateStage]:
        greedy = Sampling(tokens, temperature=0.0)
        return [
            EvaluateStage(
                name=when if k == level else f"{when}_{k}",
                model=name,
                task=CountdownInWords(level=k),
                problems=problems,
                sampling=greedy,
            )
            for k in range(3, level + 1)
        ]

    rl = RLStage(
        name="rl",
        model=model,
        task=task,
        steps=steps,
        seconds=seconds,
        prompts=prompts,
        sampling=Sampling(tokens),
        algorithm=GRPO(group=16, beta=0.0, reduction="token_mean", clip_high=0.28),
        optimizer=Optimization(lr=lr, warmup=5, token_budget=32768),
        evaluate_every=20,
        evaluate_problems=problems,
        checkpoint_every=10**6,
    )
    return Recipe((*measures("before", model), rl, *measures("after", "rl")), "before", "after")
