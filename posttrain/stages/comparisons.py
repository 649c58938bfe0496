"""Comparisons by a simulated annotator: a model answers twice or more, and the task's own score, with noise, says which is better."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from posttrain.engine.random import derive
from posttrain.errors import NotNegative, Range, require
from posttrain.stages._answers import BATCH, AskingStage, assistant
from posttrain.stages.base import Context, data_place
from posttrain.types import JSON, Group, Rollout

KINDS = ("written", "equal", "failed", "truncated", "empty")  # what becomes of answers


@dataclass(frozen=True, kw_only=True)
class ComparisonsStage(AskingStage):
    """`prompts` training problems, `samples` answers to each, ordered by a simulated annotator that knows the task's own score s. It
    prefers a to b with probability sigmoid((s_a - s_b) / noise), the Bradley-Terry model; noise 0 never errs. What is written,
    `data.jsonl` in the stage's folder, is read by reward_model and preference stages that name this stage as their data.
    """

    samples: Annotated[int, Range(ge=2, text="at least 2 (one answer cannot be compared)")] = 2
    noise: NotNegative = 0.1
    against: str = ""  # a second model: half of the answers to each problem are its own
    before: str = ""  # an earlier comparisons stage, or a file: its rows come first, and are learned from again

    def mistakes(self) -> Iterator[str]:
        if self.sampling.temperature == 0:
            yield "a temperature of 0 gives equal answers"

    def run(self, context: Context) -> dict[str, JSON]:
        counts = dict.fromkeys(KINDS, 0)
        rows = [json.dumps(row) for row in self.rows(context, counts)]
        text = f"{self.name}: no two answers differed in a way that the task's score could see; raise the temperature"
        require(bool(rows), text)
        earlier: list[str] = []
        if self.before:
            earlier = Path(data_place(self.before, context)).read_text("utf-8").splitlines()
        context.write_lines(self.name, [*earlier, *rows], "data.jsonl")
        said = f"{len(earlier):,} from before; " if earlier else ""
        said += ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
        context.announce(self.name, [f"comparisons of {self.samples} answers each: {said}"])
        return {**counts, "from_before": len(earlier)} if self.before else {**counts}

    def rows(self, context: Context, counts: dict[str, int]) -> Iterator[dict[str, JSON]]:
        def seed(first: int) -> int:
            return derive(context.seed, self.skip + first) >> 1

        half = self.samples // 2 if self.against else 0
        drawn = [(self.model, self.samples - half, seed)]
        if self.against:
            drawn.append((self.against, half, lambda first: derive(seed(first), 1) >> 1))
        problems = self.training_problems()
        made = [
            self.ask(context, self.load(context, name), problems, count, seeds)
            for name, count, seeds in drawn
        ]
        for number, groups in enumerate(zip(*made, strict=True)):
            group = Group(groups[0].problem, tuple(r for g in groups for r in g.rollouts))
            place = number % BATCH
            row = self.row(group, derive(seed(number - place), place), counts)
            if row is not None:
                yield row

    def row(self, group: Group, coin: int, counts: dict[str, int]) -> dict[str, JSON] | None:
        """One prompt's answers in the simulated annotator's order; None, and counted, where there is nothing to order."""
        usable = [r for r in group.rollouts if r.finish != "length"]
        counts["truncated"] += len(group.rollouts) - len(usable)
        scored = [r for r in usable if r.score.value is not None]
        counts["failed"] += len(usable) - len(scored)
        spoken = [r for r in scored if r.response.strip()]
        counts["empty"] += len(scored) - len(spoken)
        different = list({r.response: r for r in spoken}.values())
        if len(different) < 2:
            counts["equal"] += 1
            return None
        counts["written"] += 1
        prompt = [m.row() for m in self.task.prompt(group.problem)]
        ranked = [assistant(rollout) for rollout in self.ordered(different, coin)]
        if self.samples == 2:  # a file holds rows of one kind
            return {"prompt": prompt, "chosen": ranked[0], "rejected": ranked[1]}
        ranking: JSON = list(range(1, len(ranked) + 1))
        return {"prompt": prompt, "responses": ranked, "ranking": ranking}

    def ordered(self, rollouts: list[Rollout], coin: int) -> list[Rollout]:
        """Best first, by score plus Gumbel noise: the difference of two such is logistic, so each pair is a Bradley-Terry draw."""

        def liked(place: int) -> float:
            uniform = ((derive(coin, place) >> 11) + 0.5) / (1 << 53)
            value = rollouts[place].score.value
            assert value is not None
            return value - self.noise * math.log(-math.log(uniform))

        return [rollouts[n] for n in sorted(range(len(rollouts)), key=liked, reverse=True)]
