"""Learns from preference data in files: pairs, rankings, or single responses labelled good or bad."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.dpo import DPO
from posttrain.data.preferences import Unit, as_pairs, as_singles, with_mismatched
from posttrain.errors import Count, require
from posttrain.evals.statistics import share_interval
from posttrain.runs.metrics import merge
from posttrain.stages._held_out import HeldOutEvaluation, by_count
from posttrain.stages._material import measured_units
from posttrain.stages._naming import DataName
from posttrain.stages.base import Context
from posttrain.stages.train import ReferenceStage, UnitStage
from posttrain.train.optimizer import Optimization
from posttrain.types import JSON


@dataclass(frozen=True, kw_only=True)
class PreferenceStage(UnitStage, ReferenceStage):
    """Train `model` on the preferences in the `data` files (data/preferences.py describes their formats), `batch` units a step.

    A ranking becomes all of its pairs. An algorithm that learns from single examples takes a pair as one good and one bad example,
    and gets a mismatched example with each for the baseline. If the algorithm needs a reference, it is the stage's starting model,
    frozen, or the model that `reference` names. Loss, accuracy and margins are measured every `evaluate_every` steps. They are
    measured on the files in `held_out_data` or, without any, on a share `held_out` of the prompts, which is not trained on.
    """

    reads = ("pairs", "labels")
    builds = ("proximal", "reference")

    algorithm: Algorithm = field(default_factory=DPO)
    optimizer: Optimization = field(
        default_factory=lambda: Optimization(lr=1e-6, warmup=20, schedule="cosine")
    )
    # files of held-out preferences; none: a share held_out of the prompts
    held_out_data: tuple[DataName, ...] = ()
    # how many held-out units are evaluated; drawn by the seed if there are more
    evaluate_units: Count = 500

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.reference and "reference" not in self.algorithm.roles:
            yield "reference is given, but this algorithm has no use for one; try dpo"

    def measures(self) -> bool:
        return self.evaluate_every > 0 and (self.held_out > 0 or bool(self.held_out_data))

    def check_labels(self, units: Sequence[Unit]) -> None:
        """Raise an error if all labels are the same: training would only raise all probabilities, or lower all of them."""
        good = sum(unit[0].reward > 0.5 for unit in units)
        what = f"{self.name}: all {len(units)} labelled responses to train on are {'good' if good else 'bad'}"
        why = f"{self.algorithm.name} learns from good and bad ones; add some of the other kind"
        why += ", or imitate these with an sft stage" if good else ""
        require(0 < good < len(units), f"{what}, and {why}")

    def read(self, context: Context, tokenizer: object, paths: Sequence[str]) -> list[Unit]:
        """Read the units of some files in the form that the algorithm learns from, and report what became of the rows."""
        units = super().read(context, tokenizer, paths)
        return as_pairs(units) if self.algorithm.learns_from == "pairs" else as_singles(units)

    def split(self, context: Context, tokenizer: object) -> tuple[list[Unit], list[Unit]]:
        if self.held_out_data:
            places = (self.data, self.held_out_data)
            train, held_out = (self.read(context, tokenizer, paths) for paths in places)
        else:
            train, held_out = super().split(context, tokenizer)
        if self.algorithm.learns_from == "labels":
            self.check_labels(train)
        return train, held_out

    def material(self, context: Context, tokenizer: object) -> tuple[list[Unit], list[Unit]]:
        """(training, held out) units."""
        train, held_out = self.split(context, tokenizer)
        labels = self.algorithm.learns_from == "labels"
        what = "labelled responses" if labels else "pairs"
        said = f"{len(train):,} {what} to train on, {len(held_out):,} held out"
        held_out = measured_units(context, self.name, held_out, self.evaluate_units)
        if not labels:
            context.announce(self.name, [said])
            return train, held_out
        own, limit, seed = train, self.max_length, context.seed
        train, held_out = (with_mismatched(part, own, limit, seed) for part in (train, held_out))
        extra = f"{sum(len(unit) > 1 for unit in train):,} mismatched responses with them, for the baseline"
        context.announce(self.name, [said, extra])
        return train, held_out

    def run(self, context: Context) -> dict[str, JSON]:
        policy = self.load(context)
        limited = self.limited(policy)
        train, held_out = limited.material(context, policy.tokenizer)
        return limited.learn(context, policy, [train], [1.0], held_out)

    def held_out_result(self, context: Context, evaluation: HeldOutEvaluation) -> dict[str, JSON]:
        """The figures on held-out preferences at the end. The pairs of one ranking share its responses, so the interval is over
        prompts."""
        pieces = evaluation.pieces(by_unit=True)
        figures = merge([metric for _, metrics in pieces for metric in metrics])
        right = by_count(pieces, "accuracy")
        marks, prompts = zip(*right, strict=True)
        accuracy = share_interval(marks, prompts)
        context.announce(self.name, [f"held-out accuracy {accuracy}, loss {figures['loss']:.4f}"])
        named = {name: f for name, f in figures.items() if f == f and name != "accuracy"}
        return {"held_out": len(right), "accuracy": accuracy.row(), "figures": named}
