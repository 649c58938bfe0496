"""Search at inference: chooses one of several answers by vote or by reward models, or searches over steps with a process reward
model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Annotated

from posttrain.branches import Continued, beginning, cut, joined
from posttrain.collect import rate_groups
from posttrain.data.text import Decoder
from posttrain.errors import Count, Range, many
from posttrain.evals.best_of_n import frontier
from posttrain.evals.evaluate import Evaluation, prompts
from posttrain.evals.statistics import share_interval
from posttrain.models.policy import Policy
from posttrain.stages._answers import AnswerStage, seeds
from posttrain.stages._naming import ScorerName
from posttrain.stages.base import Context, load_reward_models
from posttrain.train.rating import ProcessRating
from posttrain.types import JSON, Group, Problem, Rollout, Score

# how the score of an answer is computed from the probabilities of its steps
RULES: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "product": prod,
    "last": lambda chances: chances[-1],
}


@dataclass(frozen=True, kw_only=True)
class SearchStage(AnswerStage):
    """Sample N = `samples` answers of `model` to each of `problems` held-out problems. For n = 1, 2, 4, ..., N, the stage measures
    the accuracy of the most frequent of n answers (majority), of the best of n by the reward model `outcome`, and of the best of n by
    the process reward model `process`. The value of an answer by `process` is the minimum, the product or the last of its steps'
    probabilities. pass@n is the accuracy of a perfect choice.

    Beam search over steps samples N candidates for the first step and keeps the best `beams`, then samples N / beams candidates for
    the next step of each, and so on. Candidates are ranked by the probability of their last step; the best at the end is the answer.
    A candidate step has at most `step_tokens` tokens. `tokens` in the result is the number of tokens sampled for a problem: N
    answers, and N / beams x beams a round.
    """

    process: ScorerName  # a process reward model: a stage or a directory
    outcome: ScorerName = ""  # a model of the same kind that was trained on outcomes only
    problems: Annotated[int, Range(ge=2)] = 500
    samples: Annotated[int, Range(ge=2)] = 16
    beams: Count = 4  # prefixes that are kept after each step
    step_tokens: Count = 64  # token limit of a step in beam search
    max_steps: Count = 32  # rounds of beam search
    steps: str = "\n"  # what ends a step, as in reward=process

    def mistakes(self) -> Iterator[str]:
        if self.sampling.temperature == 0:
            yield "several answers at temperature 0 are all the same; raise the temperature"
        if self.samples % self.beams:
            yield f"samples={self.samples} must be a multiple of beams={self.beams}"
        if self.task.isolated:
            yield "beginnings of a task that is scored in worker processes cannot be continued yet; use another task"

    def reads_ids(self) -> tuple[str, ...]:
        return tuple(name for _, name in self.named("reward model"))

    def run(self, context: Context) -> dict[str, JSON]:
        policy, problems = self.load(context), list(self.task.problems("test")[: self.problems])
        groups = list(self.ask(context, policy, problems, self.samples, seeds(context, 65)))
        finals = tuple(tuple(self.task.final(r.judged) for r in g.rollouts) for g in groups)
        whole = Evaluation(tuple(groups), finals)
        ns = [2**power for power in range(self.samples.bit_length())]
        found: dict[str, dict[str, JSON]] = {"pass": {str(n): whole.passed(n).row() for n in ns}}
        votes = {str(n): whole.majority(n) for n in ns} if whole.has_finals else {}
        found["majority"] = {n: vote.row() for n, vote in votes.items() if vote}
        rating = self.rating(context, policy, self.process)
        chosen = {f"process_{rule}": (rating, rule) for rule in RULES}
        if self.outcome:
            chosen["outcome"] = (self.rating(context, policy, self.outcome), "last")
        for name, (by, rule) in chosen.items():
            points = frontier(ruled(rate_groups(by, groups), rule), ns=ns)
            found[name] = {str(point.n): point.gold.row() for point in points}
        ends, tokens = self.beam_search(context, policy, rating, problems)
        right = [float(self.task.score(r.problem, r.judged).solved) for r in ends]
        found["beam"] = {str(self.samples): share_interval(right, prompts(groups)).row()}
        context.write_lines(self.name, map(row, ends, right))
        top = str(self.samples)
        said = [f"{name} {rows[top][0]:.3f}" for name, rows in found.items() if top in rows]
        line = f"{self.model}, accuracy with {many(self.samples, 'sample')}: {', '.join(said)}"
        context.announce(self.name, [line])
        sampled = sum(r.length for g in groups for r in g.rollouts)
        spent = {"answers": sampled / len(groups), "beam": tokens / len(groups)}
        return {"model": self.model, "problems": len(groups), "accuracy": found, "tokens": spent}

    def rating(self, context: Context, policy: Policy, name: str) -> ProcessRating:
        scorers = load_reward_models(name, context)
        return ProcessRating(scorers, tokenizer=policy.tokenizer, separator=self.steps)

    def beam_search(
        self, context: Context, policy: Policy, rating: ProcessRating, problems: Sequence[Problem]
    ) -> tuple[list[Rollout], int]:
        """The best final answer found for each problem, and the number of sampled tokens."""
        limit = min(self.step_tokens, self.sampling.max_new_tokens)
        fewest = min(self.sampling.min_new_tokens, limit)
        sampling = replace(self.sampling, max_new_tokens=limit, min_new_tokens=fewest)
        first = replace(self, sampling=sampling)
        later = replace(self, task=Continued(self.task))
        decoder, tokens = Decoder(policy.tokenizer), 0
        kept: list[list[Rollout]] = [[] for _ in problems]
        for number in range(1, self.max_steps + 1):
            seed = seeds(context, 66, number)
            live = [(n, r) for n, beams in enumerate(kept) for r in beams if self.open_ended(r)]
            if number == 1:
                asked, each = list(range(len(problems))), self.samples
                groups = first.ask(context, policy, problems, each, seed)
            else:
                asked, each = [n for n, _ in live], self.samples // self.beams
                ends = [min(r.length + limit, self.sampling.max_new_tokens) for _, r in live]
                begun = [
                    beginning(r, len(r.ids), end) for (_, r), end in zip(live, ends, strict=True)
                ]
                groups = later.ask(context, policy, begun, each, seed)
            candidates = [[r for r in beams if not self.open_ended(r)] for beams in kept]
            for n, group in zip(asked, groups, strict=True):
                tokens += sum(r.length for r in group.rollouts)
                whole = [joined(r, decoder) for r in group.rollouts]
                candidates[n] += [cut(r, number, self.steps, decoder) for r in whole]
            kept = self.best(candidates, rating)
            if not any(self.open_ended(r) for beams in kept for r in beams):
                break
        return [beams[0] for beams in kept], tokens

    def open_ended(self, rollout: Rollout) -> bool:
        limit = self.sampling.max_new_tokens
        limit = min(limit, self.task.limits(rollout.problem).tokens or limit)
        return rollout.finish != "stop" and rollout.length < limit

    def best(
        self, candidates: Sequence[Sequence[Rollout]], rating: ProcessRating
    ) -> list[list[Rollout]]:
        """For each problem the `beams` candidates with the best last steps, best first; equal candidates are kept, because they
        represent more samples."""
        scores = iter(rating.rate([r for own in candidates for r in own]))
        kept = []
        for own in candidates:
            values = [worth(next(scores), "last") for _ in own]
            order = sorted(range(len(own)), key=lambda n: -values[n])
            kept.append([own[n] for n in order[: self.beams]])
        return kept


def worth(score: Score, rule: str) -> float:
    """The value of an answer by a process reward model's score; a failure is below everything else."""
    chances = [chance for _, chance in score.steps]
    if score.value is None:
        return -1.0
    return RULES[rule](chances) if chances else score.value


def ruled(groups: Sequence[Group], rule: str) -> list[Group]:
    """Rated groups, with the values that `rule` computes from their steps."""

    def valued(rollout: Rollout) -> Rollout:
        return replace(rollout, score=replace(rollout.score, value=worth(rollout.score, rule)))

    valid = ([r for r in group.rollouts if r.score.valid] for group in groups)
    made = (tuple(map(valued, rollouts)) for rollouts in valid)
    return [replace(group, rollouts=own) for group, own in zip(groups, made, strict=True)]


def row(rollout: Rollout, right: float) -> dict[str, JSON]:
    problem = rollout.problem
    return {
        "problem": problem.id,
        "question": problem.question,
        "answer": problem.answer,
        "responses": [rollout.response],
        "values": [right],
    }
