"""Rejection sampling into data: a model answers training problems, and its good answers become examples to imitate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from posttrain.errors import Several, require
from posttrain.stages._answers import AskingStage, assistant
from posttrain.stages._plan import DryRun, fewer
from posttrain.stages.base import Context
from posttrain.types import JSON, Group, Rollout

KINDS = ("written", "rejected", "repeated", "truncated", "failed")  # what becomes of answers


@dataclass(frozen=True, kw_only=True)
class SampleStage(AskingStage):
    """`prompts` training problems, `samples` answers to each. Those whose score is at least `min_score` are kept, no text twice and at
    most `keep` a problem, best first, and written to `data.jsonl`, which an sft stage reads as `Data(file=NAME)`.

    What is imitated is pi(y | x) restricted to {y: score(x, y) >= min_score}: the next model may say what this one can, without its
    errors.
    """

    min_score: float = 1.0
    keep: Several = 1  # answers to one problem

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.samples > 1 and self.sampling.temperature == 0:
            yield f"{self.samples} samples at temperature 0 are all the same; raise the temperature"

    def dry_run(self) -> DryRun:
        return fewer(self, self.counts, min_score=0.0)  # any answer will do

    def run(self, context: Context) -> dict[str, JSON]:
        counts, answered, lines = dict.fromkeys(KINDS, 0), 0, []
        for group in self.answers(context, self.training_problems()):
            kept = self.chosen(group, counts)
            answered += bool(kept)
            prompt = [m.row() for m in self.task.prompt(group.problem)]
            lines += [json.dumps({"prompt": prompt, "completion": assistant(r)}) for r in kept]
        none = f"{self.name}: no answer of {self.model} scored {self.min_score} or more; lower min_score, or raise samples"
        require(bool(lines), none)
        context.write_lines(self.name, lines, "data.jsonl")
        said = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
        said += f"; {answered:,} of {self.prompts:,} problems have one"
        context.announce(self.name, [f"answers of {self.model}: {said}"])
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
