"""Shows what a reward gives, before any training: it scores answers of many kinds to some problems of a task.

A policy learns to satisfy its reward. A reward for an empty answer, for all candidates at once or for an injected verdict
teaches that; a reward that never differs between answers teaches nothing. This check finds both in a second; later they cost a
run.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain import catalogue
from posttrain.commands import probe_answers
from posttrain.commands.probe_answers import GOLD, KINDS, Case, answers
from posttrain.config_tree import from_tree, meant, pair
from posttrain.errors import many, refuse_unknown, require
from posttrain.rewards._loop import run_to_end
from posttrain.rewards.base import Options
from posttrain.system.workers import WorkerPool
from posttrain.tasks._judged import Judged
from posttrain.tasks._nested import of_task
from posttrain.tasks._turns import Environment
from posttrain.tasks.base import Task, score_group
from posttrain.types import JSON, Problem, Score

PROBLEMS, JUDGED_PROBLEMS = 32, 4  # a judge is asked over a network, and costs money
TOLERATED = 0.05  # the share of answers of a kind that may be rewarded by coincidence
BAD = ("pays", "pays more", "not paid", "fails")
MARGIN = 1e-9
SAME = "the reward never differs between the answers to a problem"
NO_SPREAD = f"{SAME}, so nothing can be learned from it"
NUMBERS = "return a number for whatever a policy writes"
ERRORS_MASK = f"{NUMBERS}: an error is masked, and hides this answer"


@dataclass(frozen=True, kw_only=True)
class Rewarded(Judged):
    """The problems, prompts and demonstrations of a task, scored by another reward: one by name, or the models of `batched`."""

    task: Task
    batched: Callable[[Problem, Sequence[str]], list[Score]] | None = None

    def parts(self) -> Any:
        raise AssertionError("the problems are those of the task")

    problems = of_task("problems")
    prompt = of_task("prompt")
    demonstration = of_task("demonstration")

    def pool(self, split: str) -> tuple[Problem, ...]:
        return ()  # nothing is refused before scoring: the report shows what the gold answers earn

    def score(self, problem: Problem, response: str) -> Score:
        if self.batched is not None:
            return self.batched(problem, [response])[0]
        return super().score(problem, response)

    def score_group(self, problem: Problem, responses: Sequence[str]) -> Sequence[Score] | None:
        if self.batched is not None:
            return self.batched(problem, responses)
        return super().score_group(problem, responses)


@dataclass(frozen=True, slots=True)
class Row:
    """What the answers of one kind earn. `at_gold`: the share that earns at least as much as the gold answer to its problem."""

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

    @classmethod
    def of(cls, one: Scored) -> Example:
        problem, value, gold = one.case.problem, one.score.value or 0.0, one.gold or 0.0
        return cls(one.kind, problem.id, problem.question[:200], one.response[:400], value, gold)


@dataclass(frozen=True, slots=True)
class Report:
    """What a reward gives. `passed` is False if an answer is rewarded that should not be, or if nothing can be learned from the
    reward."""

    task: str
    reward: str
    problems: int
    calls: int
    rows: Sequence[Row]
    findings: Sequence[str]
    passed: bool
    seconds: Mapping[str, float]  # of one call: median, p95, max
    failures: Mapping[str, int]  # answers that could not be scored, by reason
    # standard deviation between the answers to one problem, and the share of problems whose answers all score the same
    spread: float
    without_spread: float
    examples: Sequence[Example] = ()
    judge_tokens: int = 0

    def __str__(self) -> str:
        return "\n".join(lines(self))

    def tree(self) -> JSON:
        """Return the report as `posttrain probe --json` prints it."""
        return asdict(self)


@dataclass(slots=True)
class Scored:
    """An answer with its score, and the scores of the gold answer and of the worst answer to the same problem."""

    case: Case
    kind: str
    response: str
    score: Score
    seconds: float
    gold: float | None = None
    worst: float = 0.0

    @property
    def expected(self) -> str:
        return self.case.expected(self.kind)

    @property
    def gold_paid(self) -> bool:
        """Whether the gold answer earns more than the worst. Only then does it matter that an answer earns as much as the gold
        one."""
        return self.gold is not None and self.gold > self.worst + MARGIN

    def over_gold(self, by: float = -MARGIN) -> bool:
        """Whether the answer earns as much as the gold answer, or more than it by some margin."""
        value = self.score.value
        return self.gold is not None and value is not None and value >= self.gold + by


def probe(
    reward: str | None,
    task: Task,
    *,
    options: Options | None = None,
    problems: int = 0,
    split: str = "train",
    examples: int = 5,
) -> Report:
    """Score many kinds of answers to some problems of a task with a reward: a name of `posttrain list rewards` with its
    options, file.py:function, the directory of a reward model, or None for the task's own."""
    judged = rewarded(task, reward, options or {})
    asks = isinstance(judged, Judged) and any(name == "judge" for name, _ in judged.rewards())
    count = problems or (JUDGED_PROBLEMS if asks else PROBLEMS)
    require(count > 0, f"probe: problems is a positive number, not {problems}")
    cases = _cases(judged, split, count)
    require(cases, f"probe: the task has no {split} problems; name another split=")
    judged.ready()
    with WorkerPool([judged], 1) as workers:
        found = run_to_end(_score(judged, cases, workers))
    return _report(found, catalogue.name_of(task), reward or "the task's own", examples)


def rewarded(task: Task, reward: str | None, options: Options) -> Task:
    """Return the task with another reward in place of its own."""
    if reward is None:
        require(not options, "probe: options are those of a reward; name one")
        return task
    if Path(reward).is_dir():
        return Rewarded(task=task, reward="math", batched=_model(task, reward))
    if isinstance(task, Judged):
        return replace(task, reward=reward, options=options)
    return Rewarded(task=task, reward=reward, options=options)


def _model(task: Task, place: str) -> Callable[[Problem, Sequence[str]], list[Score]]:
    """Return a reward model in a directory as a reward."""
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
    tests = [probe_answers.read_program_tests(p.answer) if programs else () for p in chosen]
    golds = [
        (probe_answers.lookup_program(own) if own else None) or task.demonstration(problem)
        for problem, own in zip(chosen, tests, strict=True)
    ]
    cases = []
    for place, problem in enumerate(chosen):
        after = [n % len(chosen) for n in range(place + 1, place + len(chosen))]
        differ = [n for n in after if chosen[n].answer != problem.answer or not problem.answer]
        others = [golds[n] for n in differ if golds[n] != golds[place]]
        own, turns = (golds[place], others[:2], tests[place]), isinstance(task, Environment)
        cases.append(Case(problem, *own, turns))
    return cases


async def _score(task: Task, cases: Sequence[Case], workers: WorkerPool) -> list[Scored]:
    """Score every answer to every problem; those of an isolated task in worker processes, with its time limit."""
    found: list[Scored] = []
    for case in cases:
        own: list[Scored] = []
        pairs = [(kind, text) for kind, text in answers(case) if kind == GOLD or text != case.gold]
        isolates, began = task.isolates(case.problem), time.perf_counter()
        texts = [text for _, text in pairs]
        together = None if isolates else await score_group(task, case.problem, texts)
        each = (time.perf_counter() - began) / len(pairs)
        for place, (kind, text) in enumerate(pairs):
            if together is not None:
                own.append(Scored(case, kind, text, together[place], each))
                continue
            began = time.perf_counter()
            if isolates:
                score = await workers.score(task, case.problem, text)
            else:
                score = await task.scored(case.problem, text)
            own.append(Scored(case, kind, text, score, time.perf_counter() - began))
        values = [one.score.value for one in own if one.score.value is not None]
        for one in own:
            one.gold, one.worst = own[0].score.value, min(values, default=0.0)
        found += own
    return found


def _report(found: Sequence[Scored], task: str, reward: str, limit: int) -> Report:
    by_kind: dict[tuple[int, str], list[Scored]] = defaultdict(list)
    values: dict[str, list[float]] = defaultdict(list)
    for one in found:
        by_kind[list(KINDS).index(one.kind), one.expected].append(one)
        if one.score.value is not None:
            values[one.case.problem.id].append(one.score.value)
    rows = [_row(by_kind[key]) for key in sorted(by_kind)]
    spreads = [statistics.pstdev(own) for own in values.values()] or [0.0]
    without = sum(spread <= MARGIN for spread in spreads) / len(spreads)
    findings = [f"{row.kind}: {_said(row)}; {row.advice}" for row in rows if row.verdict in BAD]
    findings += [NO_SPREAD] * (without == 1.0)
    bad = [one for one in found if one.expected == "not" and one.gold_paid and one.over_gold()]
    bad.sort(key=lambda one: (-(one.score.value or 0.0), len(one.response)))
    first = {one.kind: one for one in reversed(bad)}  # the worst of each kind
    seconds = sorted(one.seconds for one in found)
    times = [statistics.median(seconds), seconds[int(0.95 * (len(seconds) - 1))], seconds[-1]]
    return Report(
        task=task,
        reward=reward,
        problems=len({id(one.case) for one in found}),
        calls=len(found),
        rows=rows,
        findings=findings,
        passed=not findings,
        seconds=dict(zip(("median", "p95", "max"), times, strict=True)),
        failures=dict(Counter(one.score.failure for one in found if one.score.failure)),
        spread=statistics.fmean(spreads),
        without_spread=without,
        examples=[Example.of(one) for one in [*reversed(first.values())][:limit]],
        judge_tokens=round(sum(one.score.parts.get("judge_tokens", 0.0) for one in found)),
    )


def _row(found: Sequence[Scored]) -> Row:
    """Summarise the answers of one kind, which should earn the same."""
    kind, expected = found[0].kind, found[0].expected
    values = [one.score.value for one in found if one.score.value is not None]
    both = [one for one in found if one.score.value is not None and one.gold_paid]
    share = sum(one.over_gold() for one in both) / len(both) if both else None
    # an unreadable gold answer fails for every response: that is a fault of the data, and is counted by name
    failed = sum(one.score.value is None and one.gold is not None for one in found)
    earned = sum((one.score.value or 0.0) - one.worst for one in both)
    whole = sum((one.gold or 0.0) - one.worst for one in both)
    tolerated, verdict = TOLERATED * len(found), "-" if expected == "either" else "ok"
    if kind == GOLD:
        unpaid = sum(one.gold is not None and not one.gold_paid for one in found)
        verdict = "not paid" if unpaid > tolerated or not values else "ok"
    elif failed > tolerated:
        verdict = "fails"
    elif expected == "not" and share is not None and share > TOLERATED:
        verdict = "pays"
    elif expected == "not" and both and earned >= 0.5 * whole:
        verdict = "partly"
    elif "padded" in kind and sum(one.over_gold(MARGIN) for one in both) > tolerated:
        verdict = "pays more"
    advice = ERRORS_MASK if verdict == "fails" else KINDS[kind][1]
    mean = statistics.fmean(values) if values else None
    return Row(kind, expected, len(found), mean, share, verdict, advice)


def _said(row: Row) -> str:
    return {
        "pays": f"{row.at_gold or 0.0:.0%} of {many(row.count, 'answer')} earn as much as the gold answer",
        "pays more": "padding earns more than the gold answer alone",
        "not paid": "it earns no more than the worst of the other answers",
        "fails": "it could not be scored",
    }[row.verdict]


def lines(report: Report) -> list[str]:
    """Return the report as text."""
    width = max(len(row.kind) for row in report.rows)
    text = [
        f"reward: {report.reward}; task: {report.task}; {many(report.problems, 'problem')}, {many(report.calls, 'answer')}",
        "",
        f"{'answers':<{width}}  {'count':>5}  {'mean':>7}  {'as gold':>7}  {'should':<6}  verdict",
    ]
    for row in report.rows:
        mean = "-" if row.mean is None else f"{row.mean:.3f}"
        share = "-" if row.at_gold is None else f"{row.at_gold:.0%}"
        should = {"pays": "pay", "not": "not", "either": "either"}[row.expected]
        verdict = row.verdict.upper() if row.verdict in BAD else row.verdict
        said = f"{row.kind:<{width}}  {row.count:>5}  {mean:>7}  {share:>7}"
        text.append(f"{said}  {should:<6}  {verdict}")
    times = (f"{name} {1000 * value:.3g} ms" for name, value in report.seconds.items())
    text += ["", f"time by call: {', '.join(times)}"]
    if report.judge_tokens:
        text.append(f"the judge used {report.judge_tokens:,} tokens")
    spread = f"spread between the answers to a problem: {report.spread:.3f}"
    text.append(f"{spread}; none differ in {report.without_spread:.0%} of the problems")
    text += [f"not scored {many(count, 'time')}: {name}" for name, count in report.failures.items()]
    if report.examples:
        text += ["", "answers that pay and should not:"]
    for one in report.examples:
        paid = f"  {one.kind} ({one.value:.2f}, gold {one.gold:.2f})"
        text.append(f"{paid}: {one.question[:60]!r} -> {one.response[:80]!r}")
    text += ["", *report.findings] if report.findings else ["", "nothing pays that should not"]
    return text


def probe_named(reward: str | None, task: str, settings: Sequence[str]) -> Report:
    """Call `probe` with settings from the command line: task.KEY and reward.KEY are settings of the task and options of the
    reward; problems, split and examples are those of the probe."""
    pairs = {key: meant(value) for key, value in map(pair, settings)}
    inner, options = (
        {key.removeprefix(p): pairs.pop(key) for key in [*pairs] if key.startswith(p)}
        for p in ("task.", "reward.")
    )
    known = ["problems", "split", "examples", "task.KEY", "reward.KEY"]
    refuse_unknown("setting of probe", pairs, known)
    for key in ("problems", "examples"):
        fine = type(pairs.get(key, 0)) is int
        require(fine, f"probe: {key} is a whole number, not {pairs.get(key)!r}")
    made: Task = from_tree({"name": task, **inner}, Task, "task")
    return probe(reward, made, options=options, **pairs)
