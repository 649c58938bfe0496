"""Evaluates a stage that learns from examples on its held-out examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from posttrain.data.preferences import Unit
from posttrain.evals.statistics import Interval, mean_interval
from posttrain.runs.metrics import merge, merged
from posttrain.stages._material import numbered_prompts
from posttrain.train.pack import micro_batches, pack_examples, with_loss
from posttrain.train.trainer import Trainer
from posttrain.types import Metric

Piece = tuple[int, list[Metric]]  # index of the first prompt, and its metrics


class HeldOutEvaluation:
    """Computes the loss and the metrics of an algorithm on held-out units."""

    def __init__(self, trainer: Trainer, units: Sequence[Unit]):
        self.trainer, self.units = trainer, units

    def evaluate(self) -> Mapping[str, float]:
        """The held-out metrics by name, for the loop, without those that have no measurement."""
        figures = merge([metric for _, metrics in self.pieces() for metric in metrics])
        return {f"{name}/held_out": value for name, value in figures.items() if value == value}

    def pieces(self, by_unit: bool = False) -> list[Piece]:
        """(index of the first prompt, metrics) of each micro-batch, or of each unit. All units are prepared as one step, so that
        weights and baseline are those of all held-out units."""
        trainer, algorithm = self.trainer, self.trainer.algorithm
        flat = [replace(e, unit=number) for number, unit in enumerate(self.units) for e in unit]
        numbered = zip(numbered_prompts(self.units), self.units, strict=True)
        prompts = [prompt for prompt, unit in numbered for _ in unit]
        trainer.policy.model.eval()
        found = []
        with torch.no_grad():
            packed = pack_examples(flat, trainer.policy.device, algorithm.unit != "sequence")
            packed = packed.replace(group_N=torch.tensor(prompts, device=packed.group_N.device))
            batch = algorithm.prepare(trainer.fill(packed), algorithm.start())
            for piece in micro_batches(with_loss(batch), trainer.token_budget):
                outputs, start = trainer.outputs(piece), 0
                for part in micro_batches(piece, 1) if by_unit else [piece]:
                    terms = algorithm.terms(outputs.take(start, start + part.tokens), part)
                    start += part.tokens
                    losses = ((term.weight * term.loss).sum() for term in terms.terms)
                    metrics = [*(Metric("loss", loss, None) for loss in losses), *terms.metrics]
                    found.append((int(part.group_N[0]), metrics))
        return found

    def loss(self) -> Interval:
        """The mean negative log-likelihood of a token, with its interval over prompts."""
        values, prompts = zip(*by_count(self.pieces(by_unit=True), "nll"), strict=True)
        return mean_interval(values, prompts)


def by_count(pieces: Iterable[Piece], name: str) -> list[tuple[float, int]]:
    """A metric of each unit, once for each token or pair that it averages over, with the index of the unit's prompt."""
    found: list[tuple[float, int]] = []
    for prompt, metrics in pieces:
        one = merged(metrics)[name]
        found += [(float(one.value), prompt)] * round(float(one.count or 0))
    return found
