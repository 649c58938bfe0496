"""Compares two models on the same held-out prompts: win rate, KL between them, and perplexity."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Annotated

import numpy as np

from posttrain.errors import Range, many, prefixed, require
from posttrain.evals import statistics
from posttrain.evals.evaluate import prompts
from posttrain.evals.statistics import Interval, win_rate_at_equal_length
from posttrain.models.load import Reader
from posttrain.models.policy import Policy
from posttrain.monitor.monitor import Monitor
from posttrain.monitor.rules import ADVICE, SYMPTOMS
from posttrain.monitor.series import Change, change
from posttrain.rewards.judge import SHARES, Verdict
from posttrain.runs.metrics import GOLD, group_metrics, merge
from posttrain.stages._answers import UNLIMITED, AnswerStage, kl_known, kl_to, perplexity, rated_by
from posttrain.stages._judged import JudgedStage
from posttrain.stages._material import Data, check_sources, placed
from posttrain.stages._naming import ModelName
from posttrain.stages.base import Context
from posttrain.types import JSON, Group

PARTS = 10  # groups of problems, to estimate the spread


@dataclass(frozen=True, kw_only=True)
class VersusStage(JudgedStage, AnswerStage):
    """Compare `model` with `against` by one answer each to `problems` held-out problems. The task's own score decides or, if given, a
    reward model or a `judge`, which is asked in both orders as in an agreement stage; if the two verdicts differ, it is a tie. A tie
    counts as half a win. Pairs without a verdict are counted and left out. If the model wins and its answers differ strongly from
    those of `against`, an alarm is emitted, as in training. KL(model || against) is in nats a response, estimated on the model's
    answers; it is not measured if they are not samples (temperature 0) or if the vocabularies differ. `win_rate_at_equal_length` is
    the win rate that answers of equal length in characters would have (evals/statistics.py). `text` is data for the perplexity of
    both models, on which neither was tuned: the alignment tax."""

    against: ModelName
    problems: Annotated[int, Range(ge=2)] = 500
    text: tuple[Data, ...] = ()  # data for the perplexity of both models

    def mistakes(self) -> Iterator[str]:
        if self.judge and self.reward_model:
            yield "a judge or a reward_model decides, not both"

    def check_data(self, reader: Reader, context: Context, before: Collection[str]) -> None:
        check_sources(self.text, reader, before, UNLIMITED)

    def run(self, context: Context) -> dict[str, JSON]:
        judge, usage = (None, None) if self.judge is None else self.judge.open(context)
        policies = [self.load(context, name) for name in (self.model, self.against)]
        alike = policies[0].tokenizer.get_vocab() == policies[1].tokenizer.get_vocab()
        ours, theirs = (self.answers(context, policy) for policy in policies)
        pairs = list(zip(ours, theirs, strict=True))
        both = ((g.problem, g.rollouts[0], r.rollouts[0]) for g, r in pairs)
        texts = [(asked.question, one.response, other.response) for asked, one, other in both]
        verdicts = judge.compare(texts) if judge else decided(ours, theirs)
        with prefixed(self.name):
            result = tally(verdicts, ours, theirs)
        rate, kl = Interval(*result["win_rate"]), None
        if kl_known(self.sampling) and alike:
            kl = kl_to(ours, policies[1], self.sampling).value
        result |= {"reward": _reward(ours), "reward_against": _reward(theirs), "kl": kl}
        if usage is not None:
            # ties because the two orders gave different verdicts
            swayed = sum(v.winner == "tie" and not v.agreed for v in verdicts)
            result |= {"swayed": swayed, "usage": usage.row()}
        text = placed(self.text, context)
        for name, policy in zip(("", "_against"), policies, strict=True) if text else ():
            result[f"perplexity{name}"] = perplexity(policy, text, context.seed)
        lines = (_line(a, b, v) for (a, b), v in zip(pairs, verdicts, strict=True))
        context.write_lines(self.name, lines)
        said = won_text(self.model, self.against, result)
        said += "" if kl is None else f", at a KL of {kl:.2f} nats"
        context.announce(self.name, [said])
        if alike:  # otherwise their tokens cannot be compared
            self.warn(context, ours, theirs, rate)
        return result

    def warn(
        self, context: Context, ours: Sequence[Group], theirs: Sequence[Group], rate: Interval
    ) -> None:
        """Raise an alarm if winning answers have changed a lot: the win may be due to that alone."""
        if rate.low <= 0.5:
            return
        # a judge does not change the task's own score, which is then reported together with its verdicts
        for alarm, seen in drifts(ours, theirs, (*GOLD, "reward") if self.judge else GOLD).items():
            text = f"{alarm}: {self.model} wins {rate} against {self.against} with {seen}; {ADVICE[alarm]}"
            context.events.emit("alarm", text, "warning", stage=self.name, data={"rule": alarm})

    def answers(self, context: Context, policy: Policy) -> list[Group]:
        problems = self.task.problems("test")[: self.problems]
        groups = [*self.ask(context, policy, problems, 1, lambda _: context.seed, len(problems))]
        name = self.reward_model
        return rated_by(context, policy, name, groups) if name else groups


def win_rate(won: Sequence[float], asked: Sequence[Hashable] | None = None) -> Interval:
    """The mean of wins (1), ties (1/2) and losses (0). Without ties it is a proportion with Wilson's interval. With ties it is
    (1 + d) / 2, where d is the mean paired difference of wins (1), ties (0) and losses (-1); its interval has a width even if all are
    ties. If prompts (`asked`) are repeated, each prompt is a cluster.

    >>> print(win_rate([0.5] * 20), win_rate([1.0] * 20))
    0.500 [0.455, 0.545] 1.000 [0.839, 1.000]
    """
    if asked is not None and len(set(asked)) < len(won):
        return statistics.share_interval(won, asked)
    if 0.5 not in won:
        return statistics.wilson(won.count(1.0), len(won))
    found = statistics.paired_interval([2 * share - 1 for share in won])
    return Interval(*((1 + bound) / 2 for bound in found.row()))


def drifts(ours: Sequence[Group], theirs: Sequence[Group], golds: Sequence[str]) -> dict[str, str]:
    """What has changed from their answers to ours, by the rules of training: metric by metric, with PARTS groups of problems in place
    of steps. Nothing if a gold metric, the first of `golds` that was measured, has risen; without one, only very large changes."""
    if len(ours) < 2 * PARTS:
        return {}
    monitor, rows = Monitor(), []
    for groups in (theirs, ours):
        for part in (groups[n::PARTS] for n in range(PARTS)):
            rows.append({**merge(group_metrics(part)), **monitor.measure(part)})

    def moved(figure: str) -> Change | None:
        values = np.array([row.get(figure, nan) for row in rows])
        return change(values, PARTS, PARTS) if np.isfinite(values).all() else None

    gold = next((name for name in golds if moved(name)), "")
    real = moved(gold)
    if real is not None and real.now > real.then:
        return {}
    seen = {name: one.seen(moved(one.figure), gold, real) for name, one in SYMPTOMS.items()}
    return {name: text for name, text in seen.items() if text}


def decided(ours: Sequence[Group], theirs: Sequence[Group]) -> list[Verdict]:
    """The verdict of the scores on each pair of samples, problem by problem; None if one of the two has no score."""
    sides = ([r.score.value for g in groups for r in g.rollouts] for groups in (ours, theirs))
    return [
        Verdict(None if a is None or b is None else "tie" if a == b else "A" if a > b else "B")
        for a, b in zip(*sides, strict=True)
    ]


def tally(
    verdicts: Sequence[Verdict], ours: Sequence[Group], theirs: Sequence[Group]
) -> dict[str, JSON]:
    """The win rate over the given verdicts, one for each pair of samples, problem by problem."""
    pairs = [
        (key, (len(one.response), len(other.response)))
        for key, mine, others in zip(prompts(ours), ours, theirs, strict=True)
        for one, other in zip(mine.rollouts, others.rollouts, strict=True)
    ]
    found = zip(verdicts, pairs, strict=True)
    judged = [(SHARES[v.winner], *pair) for v, pair in found if v.winner is not None]
    require(len(judged) > 1, "hardly any answer could be judged")
    won, keys, lengths = map(list, zip(*judged, strict=True))
    return {
        "problems": len(won),
        "prompts": len(set(keys)),
        "unjudged": len(verdicts) - len(won),
        "win_rate": win_rate(won, keys).row(),
        "win_rate_at_equal_length": win_rate_at_equal_length(won, lengths, keys).row(),
        "length": [sum(column) / len(lengths) for column in zip(*lengths, strict=True)],
        "ties": won.count(0.5),
    }


def won_text(model: str, against: str, found: Mapping[str, JSON]) -> str:
    """The result of `tally` in words."""
    prompts = f" to {found['prompts']} prompts" if found["prompts"] < found["problems"] else ""
    said = f"{model} wins {Interval(*found['win_rate'])} of {many(found['problems'], 'answer')}{prompts} against {against}"
    more = [many(found["ties"], "tie")] if found["ties"] else []
    more += [f"{found['unjudged']} more could not be judged"] if found["unjudged"] else []
    said = f"{said} ({', '.join(more)})" if more else said
    return f"{said}; {Interval(*found['win_rate_at_equal_length'])} at equal length"


def _reward(groups: Sequence[Group]) -> list[float] | None:
    """The mean score; None if hardly any answer has one, as with a judge for a task that cannot score."""
    kept = [g for g in groups if g.rewards]
    if len(kept) < 2:
        return None
    return statistics.score_interval([g.rewards[0] for g in kept], prompts(kept)).row()


def _line(ours: Group, theirs: Group, verdict: Verdict) -> dict[str, JSON]:
    one, other = ours.rollouts[0], theirs.rollouts[0]
    return {
        "problem": ours.problem.id,
        "question": ours.problem.question,
        "responses": [one.response, other.response],
        "values": [one.score.value, other.score.value],
        "won": None if verdict.winner is None else SHARES[verdict.winner],
    }
