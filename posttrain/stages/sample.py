"""Rejection sampling into data: a model answers training problems, and its good answers become examples to imitate."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from posttrain.errors import Count, Whole, require
from posttrain.stages._answers import answers, training_problems
from posttrain.stages._material import alphabet
from posttrain.stages._plan import DryRun, fewer
from posttrain.stages.base import Context, Stage
from posttrain.tasks.base import Task
from posttrain.types import JSON, Group, Rollout, Sampling

KINDS = ("written", "rejected", "repeated", "truncated", "failed")  # what becomes of answers


@dataclass(frozen=True, kw_only=True)
class SampleStage(Stage):
    """`prompts` training problems, `samples` answers to each. Those whose score is at least `min_score` are kept, no text twice and at
    most `keep` a problem, best first, and written to `data.jsonl`, which an sft stage reads as `Data(file=NAME)`.

    What is imitated is pi(y | x) restricted to {y: score(x, y) >= min_score}: the next model may say what this one can, without its
    errors.
    """

    model: str
    task: Task
    prompts: Count = 1000
    samples: Count = 4
    min_score: float = 1.0
    keep: Count = 1  # answers to one problem
    skip: Whole = 0  # problems to pass over, so that another round sees fresh ones
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        super().__post_init__()
        equal = self.samples > 1 and self.sampling.temperature == 0
        require(
            not equal,
            f"{self.name}: {self.samples} samples at temperature 0 are all the same; raise the temperature",
        )

    def alphabet(self) -> str:
        return alphabet([self.task])

    def dry_run(self) -> DryRun:
        return fewer(self, "prompts", min_score=0.0)

    def run(self, context: Context) -> dict[str, JSON]:
        counts, answered, lines = dict.fromkeys(KINDS, 0), 0, []
        problems = training_problems(self.task, self.skip, self.prompts)
        alphabet = self.alphabet()
        for group in answers(
            context,
            self.model,
            self.task,
            problems,
            self.samples,
            self.sampling,
            self.skip,
            alphabet,
        ):
            kept = self.chosen(group, counts)
            answered += bool(kept)
            prompt = [m.row() for m in self.task.prompt(group.problem)]
            for rollout in kept:
                lines.append(
                    json.dumps(
                        {
                            "prompt": prompt,
                            "completion": [{"role": "assistant", "content": rollout.response}],
                        }
                    )
                )
        require(
            bool(lines),
            f"{self.name}: no answer of {self.model} scored {self.min_score} or more; lower min_score, or raise samples",
        )
        context.write_lines(self.name, lines, "data.jsonl")
        said = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
        context.announce(
            self.name,
            [
                f"answers of {self.model}: {said}; {answered:,} of {self.prompts:,} problems have one"
            ],
        )
        return {**counts, "problems": self.prompts, "answered": answered}

    def chosen(self, group: Group, counts: dict[str, int]) -> list[Rollout]:
        """The answers of a problem that are kept; what becomes of the others is counted."""
        whole = [r for r in group.rollouts if r.finish != "length"]
        counts["truncated"] += len(group.rollouts) - len(whole)
        scored = [r for r in whole if r.score.value is not None]
        counts["failed"] += len(whole) - len(scored)
        good = [r for r in scored if r.score.value is not None and r.score.value >= self.min_score]
        counts["rejected"] += len(scored) - len(good)
        best = sorted(good, key=lambda r: -(r.score.value or 0.0))
        kept = list({r.response: r for r in best}.values())[: self.keep]
        counts["repeated"] += len(good) - len(kept)
        counts["written"] += len(kept)
        return kept
