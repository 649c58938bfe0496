"""Says what a reward would pay, before any training: it scores answers of many kinds to some problems of a task.

A reward is what a policy learns to satisfy. One that pays an empty answer, every candidate at once or an injected verdict teaches that;
one that never differs between answers teaches nothing. Both can be seen in a second, and cost a run to find out later.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain import config
from posttrain.commands.probe_answers import (
    GOLD,
    KINDS,
    Case,
    answers,
    lookup_program,
    read_program_tests,
)
from posttrain.errors import require
from posttrain.rewards.base import Options, check
from posttrain.rewards.compose import as_score
from posttrain.system.workers import WorkerPool
from posttrain.tasks._judged import Judged
from posttrain.tasks.base import Task, no_running_loop, score_group
from posttrain.types import JSON, Message, Problem, Score

PROBLEMS, JUDGED_PROBLEMS = 32, 4  # a judge is asked over a network, and costs
TOLERATED = 0.05  # the share of answers of a kind that may pay by coincidence
BAD = ("pays", "pays more", "not paid", "fails")
MARGIN = 1e-9
Function = Callable[[str, str, str], Score | float]


@dataclass(frozen=True, kw_only=True)
class Rewarded(Judged):
    """The problems, prompts and demonstrations of a task, scored by another reward: one by name, or a function."""

    task: Task
    function: Function | None = None
    batched: Callable[[Problem, Sequence[str]], list[Score]] | None = None

    def parts(self) -> Any:
        raise AssertionError("the problems are those of the task")

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return self.task.problems(split, level)

    def pool(self, split: str) -> tuple[Problem, ...]:
        return ()  # nothing is refused before it is scored: the report says what the gold answers earn

    def prompt(self, problem: Problem) -> tuple[Message, ...]:
        return self.task.prompt(problem)

    def demonstration(self, problem: Problem) -> str:
        return self.task.demonstration(problem)

    def score(self, problem: Problem, response: str) -> Score:
        if self.batched is not None:
            return self.batched(problem, [response])[0]
        if self.function is None:
            return super().score(problem, response)
        found: Any = self.function(problem.question, response, problem.answer)
        return found if hasattr(found, "__await__") else as_score(found)

    def score_group(self, problem: Problem, responses: Sequence[str]) -> Sequence[Score] | None:
        if self.batched is not None:
            return self.batched(problem, responses)
        return super().score_group(problem, responses) if self.function is None else None


@dataclass(frozen=True, slots=True)
class Row:
    """What the answers of one kind earn. `at_gold`: the share that earns as much as the gold answer to its problem, or more."""

    kind: str
    expected: str
    count: int
    mean: float | None
    at_gold: float | None
    verdict: str
    advice: str


@dataclass(frozen=True, slots=True)
class Example:
    """An answer that earns what it should not."""

    kind: str
    problem: str
    question: str
    response: str
    value: float
    gold: float


@dataclass(frozen=True, slots=True)
class Report:
    """What a reward pays. `passed` is False where something pays that should not, or nothing can be learned from it."""

    task: str
    reward: str
    problems: int
    calls: int
    rows: Sequence[Row]
    findings: Sequence[str]
    passed: bool
    seconds: Mapping[str, float]  # of one call: median, p95, max
    failures: Mapping[str, int]  # answers that could not be scored, by reason
    # standard deviation between the answers to one problem, and the share of problems where none differ
    spread: float
    without_spread: float
    examples: Sequence[Example] = ()
    judge_tokens: int = 0

    def tree(self) -> JSON:
        """As `posttrain probe --json` prints it."""
        return asdict(self)


@dataclass(slots=True)
class _Scored:
    case: Case
    kind: str
    response: str
    score: Score


@dataclass(slots=True)
class _Scores:
    """All answers with their scores and how long each took."""

    found: list[_Scored] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def probe(
    reward: str | Function | None = None,
    task: str | Task = "arithmetic",
    *,
    options: Options | None = None,
    problems: int = 0,
    split: str = "train",
    examples: int = 5,
) -> Report:
    """Score many kinds of answers to some problems of a task with a reward: a name of `posttrain list rewards` with its options,
    file.py:function, a function, the directory of a reward model, or None for the task's own."""
    made: Task = config.from_tree({"name": task}, Task, "task") if isinstance(task, str) else task
    judged = rewarded(made, reward, options or {})
    asks = isinstance(judged, Judged) and any(name == "judge" for name, _ in judged.rewards())
    count = problems or (JUDGED_PROBLEMS if asks else PROBLEMS)
    require(count > 0, f"probe: problems is a positive number, not {problems}")
    judged.ready()
    cases = _cases(judged, split, count)
    scores = _score(judged, cases)
    name = getattr(reward, "__name__", str(reward)) if reward is not None else "the task's own"
    return _report(scores, type(made).__name__.lower(), name, len(cases), examples)


def rewarded(task: Task, reward: str | Function | None, options: Options) -> Task:
    """The task with another reward in the place of its own."""
    if reward is None:
        require(not options, "probe: options are those of a reward; name one")
        return task
    if not isinstance(reward, str):
        return Rewarded(task=task, reward="math", function=reward)
    if Path(reward).is_dir():
        return Rewarded(task=task, reward="math", batched=_model(task, reward))
    check(reward, options)
    if isinstance(task, Judged):
        return replace(task, reward=reward, options=options)
    return Rewarded(task=task, reward=reward, options=options)


def _model(task: Task, place: str) -> Callable[[Problem, Sequence[str]], list[Score]]:
    """A reward model in a directory as a reward."""
    from posttrain.data.chat import render_prompt
    from posttrain.models.scorer import load_scorer
    from posttrain.train.rating import ModelRating, last_scores

    scorer = load_scorer(place, "float32", "cpu")
    scorer.model.requires_grad_(False)
    rating, tokenizer = ModelRating([scorer]), scorer.tokenizer
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def rate(problem: Problem, responses: Sequence[str]) -> list[Score]:
        prompt = list(render_prompt(tokenizer, task.prompt(problem)))
        texts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in responses]
        sequences = [np.array([*prompt, *text, *end], dtype=np.int64) for text in texts]
        return [rating.score([value]) for value in last_scores(scorer, sequences)]

    return rate


def _cases(task: Task, split: str, count: int) -> list[Case]:
    given = task.problems(split)
    step = max(1, len(given) // count)
    chosen = [given[n * step] for n in range(min(count, len(given)))]
    programs = isinstance(task, Judged) and any(name == "code" for name, _ in task.rewards())
    tests = [read_program_tests(problem.answer) if programs else () for problem in chosen]
    golds = []
    for problem, own in zip(chosen, tests, strict=True):
        gold = (lookup_program(own) if own else None) or task.demonstration(problem)
        golds.append(gold)
    cases = []
    for place, problem in enumerate(chosen):
        after = [n % len(chosen) for n in range(place + 1, place + len(chosen))]
        others = [
            golds[n] for n in after if chosen[n].answer != problem.answer or not problem.answer
        ]
        others = [other for other in others if other != golds[place]]
        cases.append(Case(problem, golds[place], others[:2], tests[place]))
    return cases


def _score(task: Task, cases: Sequence[Case]) -> _Scores:
    """Every answer to every problem; those of an isolated task in worker processes, with its time limit."""
    scores = _Scores()

    async def one(case: Case, workers: WorkerPool) -> None:
        pairs = [(k, text) for k, text in answers(case) if k == GOLD or text != case.gold]
        texts, began = [text for _, text in pairs], time.perf_counter()
        isolates = task.isolates(case.problem)
        found = None if isolates else score_group(task, case.problem, texts)
        if found is not None:
            scores.seconds += [(time.perf_counter() - began) / len(texts)] * len(texts)
        else:
            found = []
            for text in texts:
                began = time.perf_counter()
                scorer = (
                    workers.score(task, case.problem, text)
                    if isolates
                    else task.scored(case.problem, text)
                )
                found.append(await scorer)
                scores.seconds.append(time.perf_counter() - began)
        scores.found += [
            _Scored(case, *pair, score) for pair, score in zip(pairs, found, strict=True)
        ]

    async def every(workers: WorkerPool) -> None:
        for case in cases:
            await one(case, workers)

    with WorkerPool([task], 1) as workers, no_running_loop():
        asyncio.run(every(workers))
    return scores


def _report(scores: _Scores, task: str, reward: str, problems: int, limit: int) -> Report:
    gold = {s.case.problem.id: s.score.value for s in scores.found if s.kind == GOLD}
    by_problem: dict[str, list[float]] = defaultdict(list)
    by_kind: dict[tuple[str, str], list[_Scored]] = defaultdict(list)
    for one in scores.found:
        by_kind[one.kind, one.case.expected(one.kind)].append(one)
        if one.score.value is not None:
            by_problem[one.case.problem.id].append(one.score.value)
    # problems whose gold answer earns more than the worst: only there does it say something to earn as much
    floor = {problem: min(values) for problem, values in by_problem.items()}
    paid = {p for p, value in gold.items() if value is not None and value > floor[p] + MARGIN}
    order = list(KINDS)
    keys = sorted(by_kind, key=lambda key: (order.index(key[0]), key[1]))
    rows = [_row(*key, by_kind[key], gold, floor, paid) for key in keys]
    failures = Counter(s.score.failure for s in scores.found if s.score.failure)
    spreads = [statistics.pstdev(values) for values in by_problem.values() if values]
    without = sum(spread <= MARGIN for spread in spreads) / len(spreads) if spreads else 1.0
    findings = [f"{row.kind}: {_said(row)}; {row.advice}" for row in rows if row.verdict in BAD]
    if without == 1.0:
        findings.append(
            "the reward never differs between the answers to a problem, so nothing can be learned from it"
        )
    if findings and not paid:
        findings.insert(
            0,
            "no gold answer earns more than the worst other answer, so nothing else can be compared with it",
        )
    worst = [
        s
        for s in scores.found
        if s.case.expected(s.kind) == "not" and _at_gold(s, gold) and s.case.problem.id in paid
    ]
    worst.sort(key=lambda s: (-(s.score.value or 0.0), len(s.response)))
    distinct = {s.kind: s for s in reversed(worst)}
    first = [*reversed(distinct.values()), *worst]
    shown = list({id(s): s for s in first}.values())[:limit]
    seconds = sorted(scores.seconds) or [0.0]
    times = {
        "median": statistics.median(seconds),
        "p95": seconds[int(0.95 * (len(seconds) - 1))],
        "max": seconds[-1],
    }
    tokens = sum(s.score.parts.get("judge_tokens", 0.0) for s in scores.found)
    return Report(
        task=task,
        reward=reward,
        problems=problems,
        calls=len(scores.found),
        rows=rows,
        findings=findings,
        passed=not findings,
        seconds=times,
        failures=dict(failures.most_common()),
        spread=statistics.fmean(spreads) if spreads else 0.0,
        without_spread=without,
        examples=[_example(s, gold) for s in shown],
        judge_tokens=round(tokens),
    )


def _at_gold(one: _Scored, gold: Mapping[str, float | None], more: bool = False) -> bool:
    value, best = one.score.value, gold[one.case.problem.id]
    if value is None or best is None:
        return False
    return value > best + MARGIN if more else value >= best - MARGIN


def _row(
    kind: str,
    expected: str,
    found: Sequence[_Scored],
    gold: Mapping[str, float | None],
    floor: Mapping[str, float],
    paid: set[str],
) -> Row:
    values = [one.score.value for one in found if one.score.value is not None]
    mean = statistics.fmean(values) if values else None
    both = [one for one in found if one.score.value is not None and one.case.problem.id in paid]
    share = sum(_at_gold(one, gold) for one in both) / len(both) if both else None
    # an unreadable gold answer fails whatever the response is: that is the data's fault, and is counted by name
    failed = [
        one for one in found if one.score.value is None and gold[one.case.problem.id] is not None
    ]
    verdict, advice = "-" if expected == "either" else "ok", KINDS[kind][1]
    if kind == GOLD:
        unpaid = sum(
            gold[one.case.problem.id] is not None and one.case.problem.id not in paid
            for one in found
        )
        verdict = "not paid" if unpaid > TOLERATED * len(found) or not values else "ok"
    elif len(failed) > TOLERATED * len(found):
        verdict, advice = (
            "fails",
            "the reward must return a number for whatever a policy writes: an error is masked, and hides this answer",
        )
    elif expected == "not" and share is not None and share > TOLERATED:
        verdict = "pays"
    elif expected == "not" and both and mean is not None and _halfway(both, gold, floor):
        verdict = "partly"
    elif (
        "padded" in kind
        and both
        and sum(_at_gold(one, gold, more=True) for one in both) > TOLERATED * len(both)
    ):
        verdict = "pays more"
    return Row(kind, expected, len(found), mean, share, verdict, advice)


def _halfway(
    both: Sequence[_Scored], gold: Mapping[str, float | None], floor: Mapping[str, float]
) -> bool:
    """Whether answers earn, on average, half of what the gold answer earns over the worst one."""
    earned = sum((one.score.value or 0.0) - floor[one.case.problem.id] for one in both)
    whole = sum((gold[one.case.problem.id] or 0.0) - floor[one.case.problem.id] for one in both)
    return earned >= 0.5 * whole


def _said(row: Row) -> str:
    share = (
        f"{row.at_gold:.0%} of {row.count} answers earn" if row.at_gold is not None else "they earn"
    )
    return {
        "pays": f"{share} as much as the gold answer",
        "pays more": "padding earns more than the gold answer alone",
        "not paid": "it earns no more than the worst of the other answers",
        "fails": "it could not be scored",
    }[row.verdict]


def _example(one: _Scored, gold: Mapping[str, float | None]) -> Example:
    problem = one.case.problem
    value, best = one.score.value or 0.0, gold[problem.id] or 0.0
    return Example(one.kind, problem.id, problem.question[:200], one.response[:400], value, best)


def lines(report: Report) -> list[str]:
    """The report as text."""
    width = max(len(row.kind) for row in report.rows)
    text = [
        f"reward: {report.reward}; task: {report.task}; {report.problems} problems, {report.calls} answers",
        "",
        f"{'answers':<{width}}  {'count':>5}  {'mean':>7}  {'as gold':>7}  {'should':<6}  verdict",
    ]
    for row in report.rows:
        mean = "-" if row.mean is None else f"{row.mean:.3f}"
        share = "-" if row.at_gold is None else f"{row.at_gold:.0%}"
        should = {"pays": "pay", "not": "not", "either": "either"}[row.expected]
        verdict = row.verdict.upper() if row.verdict in BAD else row.verdict
        text.append(
            f"{row.kind:<{width}}  {row.count:>5}  {mean:>7}  {share:>7}  {should:<6}  {verdict}"
        )
    milliseconds = ", ".join(
        f"{name} {1000 * value:.3g} ms" for name, value in report.seconds.items()
    )
    text += ["", f"time by call: {milliseconds}"]
    if report.judge_tokens:
        text.append(f"the judge used {report.judge_tokens:,} tokens")
    spread = f"spread between the answers to a problem: {report.spread:.3f}"
    text.append(f"{spread}; none differ in {report.without_spread:.0%} of the problems")
    text += [f"not scored {count} times: {name}" for name, count in report.failures.items()]
    if report.examples:
        text += ["", "answers that pay and should not:"]
    for one in report.examples:
        text.append(
            f"  {one.kind} ({one.value:.2f}, gold {one.gold:.2f}): {one.question[:60]!r} -> {one.response[:80]!r}"
        )
    text += ["", *report.findings] if report.findings else ["", "nothing pays that should not"]
    return text


def probe_named(reward: str | None, task: str, settings: Sequence[str]) -> Report:
    """`probe` from words: task.KEY and reward.KEY are settings of the task and options of the reward; problems, split and examples are
    those of the probe."""
    pairs = dict(config.pair(argument) for argument in settings)
    inner = {
        key.removeprefix("task."): pairs.pop(key) for key in [*pairs] if key.startswith("task.")
    }
    options = {
        key.removeprefix("reward."): pairs.pop(key) for key in [*pairs] if key.startswith("reward.")
    }
    config.refuse_unknown(
        "setting of probe", pairs, ["problems", "split", "examples", "task.KEY", "reward.KEY"], []
    )
    for key in ("problems", "examples"):
        fine = key not in pairs or (
            isinstance(pairs[key], int) and not isinstance(pairs[key], bool)
        )
        require(fine, f"probe: {key} is a whole number, not {pairs.get(key)!r}")
    made: Task = config.from_tree({"name": task, **inner}, Task, "task")
    return probe(reward, made, options=options, **pairs)
