"""Evaluates a model, of this run or any other, on held-out problems."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from typing import ClassVar

from posttrain.collect import rate_groups
from posttrain.data.text import Decoder
from posttrain.episodes import rollout_groups
from posttrain.errors import Count, Several, UserError, many, require
from posttrain.evals.contamination import content_hash, known
from posttrain.evals.evaluate import Evaluation, prompts
from posttrain.models.load import Reader, same_vocabulary
from posttrain.models.policy import Policy
from posttrain.stages._answers import UNLIMITED, AnswerStage, kl_known, kl_to, perplexity
from posttrain.stages._contamination import trained_on
from posttrain.stages._material import Data, check_sources, placed
from posttrain.stages._naming import ModelName
from posttrain.stages.base import Context, Stage, make_sampler
from posttrain.system.workers import WorkerPool
from posttrain.tasks.base import Task
from posttrain.types import JSON, Problem, Rating, Sampler, Sampling

ALONE = "one problem says nothing of the spread over problems; at least 2 are needed"
KS = (1, 2, 4, 8, 10, 16, 32, 64, 100, 128, 256)


def answer_problems(
    task: Task,
    sampler: Sampler,
    tokenizer: object,
    problems: Sequence[Problem],
    samples: int,
    sampling: Sampling,
    seed: int,
    workers: WorkerPool | None = None,
    rating: Rating | None = None,
) -> Evaluation:
    """Sample answers to problems and score them by the task or, if given, by `rating`. With several samples of each, also find
    their final answers."""
    decoder = Decoder(tokenizer)
    groups = rollout_groups(task, sampler, decoder, problems, samples, sampling, seed, workers)
    groups = groups if rating is None else rate_groups(rating, groups)
    several = groups if samples > 1 else ()
    finals = (tuple(task.final(r.judged) for r in g.rollouts) for g in several)
    evaluation = Evaluation(tuple(groups), tuple(finals))
    if evaluation.failed == sum(len(g.rollouts) for g in groups):
        failure = groups[0].rollouts[0].score.failure
        none = f"no answer to the {many(len(problems), 'held-out problem')} could be scored ({failure})"
        raise UserError(f"{none}; fix it, or hold out problems that can be")
    return evaluation


@dataclass(frozen=True, kw_only=True)
class EvaluateStage(AnswerStage):
    """Answer `problems` held-out problems `samples` times each. Temperature 0 with one sample is greedy accuracy. If `reference`
    names a model, KL(model || reference) is measured on the answers, which must then be samples. `text` is held-out data on which
    perplexity is measured."""

    together: ClassVar[bool] = True

    problems: Count = 500
    samples: Several = 1
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    reference: ModelName = ""  # measure the KL to this model on sampled answers
    text: tuple[Data, ...] = ()  # held-out text for perplexity

    def mistakes(self) -> Iterator[str]:
        if self.sampling.temperature == 0 and self.samples > 1:
            yield f"{self.samples} samples at temperature 0 are all the same; raise the temperature, or set samples=1"
        if self.problems == 1 and self.spread:
            yield ALONE
        if self.reference and not kl_known(self.sampling):
            need = "set sampling.temperature above 0, without top_k and top_p"
            yield f"the KL to {self.reference} is estimated from samples: {need}"
        if not self.task.scores:
            yield "the task scores nothing by itself; give it a reward"

    @property
    def spread(self) -> bool:
        """Whether the settings ask for a figure whose interval is over problems."""
        return self.samples > 1 or bool(self.reference)

    def tasks(self) -> list[Task | None]:
        return [self.task, *(d.task for d in self.text)]

    def check_data(self, reader: Reader, context: Context, before: Collection[str]) -> None:
        few = self.spread and len(self.task.problems("test")) < 2
        require(not few, f"{self.name}: {ALONE}")
        check_sources(self.text, reader, before, UNLIMITED)

    def reads_ids(self) -> tuple[str, ...]:
        return (self.reference,) if self.reference else ()

    def plan(self, policy: Policy, context: Context, before: Mapping[str, Stage]) -> list[str]:
        asked = len(self.task.problems("test")[: self.problems])
        total = f"{many(asked, 'held-out problem')} x {self.samples} = {many(asked * self.samples, 'answer')}"
        return [f"{total} of at most {self.sampling.max_new_tokens} tokens"]

    def run(self, context: Context) -> dict[str, JSON]:
        reference = partial(self.load, context, self.reference)
        evaluation, result = replace(self, text=placed(self.text, context)).measure(
            self.load(context), reference, context.seed, context.threads, context.workers
        )
        found = evaluation.headlines(self.task.verifiable).items()
        figures = ", ".join(f"{name} {figure}" for name, figure in found)
        said = f"{figures} on {many(evaluation.problems, 'held-out problem')}"
        context.announce(self.name, [f"{self.model}: {said}"])
        hashes = trained_on(context, self.model)
        counted, said = seen(evaluation, self.task.verifiable, self.model, hashes)
        if said:
            data = {"rule": "contamination"}
            context.events.emit("alarm", said, "warning", stage=self.name, data=data)
        result |= counted
        context.write_lines(self.name, rows(evaluation))
        kind = {} if self.task.verifiable else {"verifiable": False}
        return {"model": self.model, **result, **kind}

    def measure(
        self,
        policy: Policy,
        reference: Callable[[], Policy],
        seed: int,
        threads: int = 0,
        workers: WorkerPool | None = None,
    ) -> tuple[Evaluation, dict[str, JSON]]:
        """Compute every figure that the settings ask for. `reference` is called only if there is a reference model."""
        held_out = self.task.problems("test")
        require(len(held_out) > 0, f"{self.name}: the task has no held-out problems")
        require(len(held_out) > 1 or not self.spread, f"{self.name}: {ALONE}")
        sampler = make_sampler(policy, processes=threads)
        asked, tokenizer = held_out[: self.problems], policy.tokenizer
        evaluation = answer_problems(
            self.task, sampler, tokenizer, asked, self.samples, self.sampling, seed, workers
        )
        result = summarise(evaluation, self.task.verifiable)
        if self.reference:
            other = reference()
            same_vocabulary(self.name, policy, other)
            result["kl"] = kl_to(evaluation.groups, other, self.sampling).row()
        if self.text:
            result["perplexity"] = perplexity(policy, self.text, seed)
        return evaluation, result


def seen(
    evaluation: Evaluation, verifiable: bool, model: str, hashes: frozenset[str]
) -> tuple[dict[str, JSON], str]:
    """How many of the problems the model was trained on, by the `hashes` of its training problems, and its accuracy on the others,
    or reward if no score tells right from wrong; and a line about it, "" if there are none."""
    marks = known([g.problem for g in evaluation.groups], hashes)
    if not any(marks):
        return {"contaminated": 0}, ""
    clean, others, row = evaluation.without(marks), "no other problem is left", None
    what = "accuracy" if evaluation.tells(verifiable) else "reward"
    if clean is not None and (found := getattr(clean, what)) is not None:
        others = f"{what} on the other {clean.problems}: {found}"
        row = found.row()
    said = f"{sum(marks)} of {many(len(marks), 'held-out problem')} are among what {model} was trained on; {others}"
    return {"contaminated": sum(marks), f"{what}_clean": row}, said


def summarise(evaluation: Evaluation, verifiable: bool = True) -> dict[str, JSON]:
    """The figures of an evaluation, each with its interval: accuracy, the parts of the score, and the accuracy of each role. Without
    accuracies if no score tells right from wrong."""
    samples, reward = len(evaluation.groups[0].rollouts), evaluation.reward
    ks = [*(k for k in KS if k < samples), samples]
    parts = {name: evaluation.part(name) for name in evaluation.part_names} | evaluation.roles
    majorities = {k: evaluation.majority(k) for k in ks if k > 2} if evaluation.has_finals else {}
    right: dict[str, JSON] = {
        "accuracy": evaluation.accuracy.row(),
        "pass_at": {str(k): evaluation.passed(k).row() for k in ks},
        "avg_at": {str(samples): evaluation.accuracy.row()},
        "majority_at": {str(k): share.row() for k, share in majorities.items() if share},
    }
    return {
        "problems": evaluation.problems,
        **(right if evaluation.tells(verifiable) else {}),
        "parts": {n: part.row() for n, part in parts.items() if part and isfinite(part.low)},
        "reward": reward.row() if reward and evaluation.problems > 1 else None,
        "length": evaluation.length,
        "failed": evaluation.failed,
        **({"counts": counts} if (counts := mean_counts(evaluation)) else {}),
    }


def mean_counts(evaluation: Evaluation) -> dict[str, JSON]:
    """Means over all episodes of the events they counted, such as tool calls."""
    rollouts = [rollout for group in evaluation.groups for rollout in group.rollouts]
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.counts)
    return {n: sum(r.counts.get(n, 0.0) for r in rollouts) / len(rollouts) for n in names}


def rows(evaluation: Evaluation) -> list[dict[str, JSON]]:
    """One JSON row for each problem."""
    groups, finals = evaluation.groups, evaluation.finals or [()] * evaluation.problems
    return [
        {
            "problem": group.problem.id,
            **({"role": group.role} if group.role else {}),
            "prompt": content_hash(asked),
            "question": group.problem.question,
            "answer": group.problem.answer,
            "responses": [r.response for r in group.rollouts],
            "values": [r.score.value for r in group.rollouts],
            "outcomes": [r.score.outcome or r.score.failure for r in group.rollouts],
            "solved": [r.score.solved for r in group.rollouts],
            "parts": [dict(r.score.parts) for r in group.rollouts],
            **({"finals": list(found)} if evaluation.has_finals else {}),
        }
        for group, found, asked in zip(groups, finals, prompts(groups), strict=True)
    ]
