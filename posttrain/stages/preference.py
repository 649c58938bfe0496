"""Learning from preferences in files: pairs, rankings, or single responses that people called good or bad."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.dpo import DPO
from posttrain.collect import Examples
from posttrain.data.preferences import Unit, as_pairs, as_singles, count_labels, with_mismatched
from posttrain.errors import Count, require
from posttrain.evals.statistics import share_interval
from posttrain.runs.metrics import merge
from posttrain.stages._material import numbered_prompts, split_by_prompt
from posttrain.stages.base import Context
from posttrain.stages.train import ReferenceStage, UnitStage, trained
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import micro_batches, pack_examples, with_loss
from posttrain.train.trainer import Trainer
from posttrain.types import JSON, Metric


@dataclass(frozen=True, kw_only=True)
class PreferenceStage(UnitStage, ReferenceStage):
    """Train `model` on the preferences in the `data` files (see data/preferences.py for what they may hold), `batch` units a step.

    Rankings become all of their pairs. An algorithm that learns from single examples takes a pair as one good and one bad, and
    each example gets a mismatched one with it for the baseline. The reference, where the algorithm needs one, is the model the
    stage starts from, frozen, or the one that `reference` names. Loss, accuracy and margins are measured every `evaluate_every` steps
    on the files in `held_out_data` or, without any, on a share `held_out` of the prompts, which is kept apart.
    """

    reads = ("pairs", "labels")
    builds = ("proximal", "reference")

    algorithm: Algorithm = field(default_factory=DPO)
    optimizer: Optimization = field(
        default_factory=lambda: Optimization(lr=1e-6, warmup=20, schedule="cosine")
    )
    held_out_data: tuple[str, ...] = ()
    evaluate_units: Count = 500  # of what is held out

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.reference and "reference" not in self.algorithm.roles:
            yield "reference is given, but this algorithm has no use for one; try dpo"

    def measures(self) -> bool:
        return self.evaluate_every > 0 and (self.held_out > 0 or bool(self.held_out_data))

    def ready(self, names: Collection[str]) -> None:
        there = all(path not in names and Path(path).is_file() for path in self.data)
        if self.algorithm.learns_from == "labels" and there:
            good, bad = map(sum, zip(*map(count_labels, self.data), strict=True))
            self.check_labels(good, bad)

    def check_labels(self, good: int, bad: int) -> None:
        """Refuse labels that are all the same: with nothing to tell apart, everything becomes likelier, or less likely."""
        what = f"{self.name}: all {good + bad} labelled responses are {'good' if good else 'bad'}"
        why = f"{self.algorithm.name} learns from good and bad ones; add some of the other kind"
        why += ", or imitate these with an sft stage" if good else ""
        require((good > 0) == (bad > 0), f"{what}, and {why}")

    def read(self, context: Context, tokenizer: object, paths: Sequence[str]) -> list[Unit]:
        """The units of some files, in the shape that the algorithm learns from; what became of each row is announced."""
        units = super().read(context, tokenizer, paths)
        return as_pairs(units) if self.algorithm.learns_from == "pairs" else as_singles(units)

    def material(self, context: Context, tokenizer: object) -> tuple[list[Unit], list[Unit]]:
        """(to train on, held out)."""
        units, labels = (
            self.read(context, tokenizer, self.data),
            self.algorithm.learns_from == "labels",
        )
        if self.held_out_data:
            train, held_out = units, self.read(context, tokenizer, self.held_out_data)
        else:
            train, held_out = split_by_prompt(units, self.held_out, context.seed, self.name)
        held_out = held_out[: self.evaluate_units]
        what = "labelled responses" if labels else "pairs"
        said = f"{len(train):,} {what} to train on, {len(held_out):,} held out"
        if not labels:
            context.announce(self.name, [said])
            return train, held_out
        good = sum(unit[0].reward > 0.5 for unit in train)
        self.check_labels(good, len(train) - good)
        own, limit, seed = train, self.max_length, context.seed
        train, held_out = (with_mismatched(part, own, limit, seed) for part in (train, held_out))
        more = sum(len(unit) > 1 for unit in train)
        extra = f"{more:,} mismatched responses with them, for the baseline"
        context.announce(self.name, [said, extra])
        return train, held_out

    def run(self, context: Context) -> dict[str, JSON]:
        policy = self.load(context)
        policy.check_length(self.max_length, "lower max_length")
        train, held_out = self.material(context, policy.tokenizer)
        trainer = self.make_trainer(context, policy, self.make_roles(context, policy))
        judge = Judge(trainer, held_out)
        loop = self.train(
            context,
            trainer,
            Examples([train], [1.0], self.batch, context.seed, policy.device),
            self.schedule(self.evaluate_every if held_out else 0),
            evaluate=judge.evaluate,
        )
        result = {**trained(loop), "trained_on": len(train)}
        if held_out:  # before adapters are merged into weights that the reference shares
            result |= self.verdict(context, judge)
        context.save_model(self.name, policy, self.lora)
        return result

    def verdict(self, context: Context, judge: Judge) -> dict[str, JSON]:
        """What is said of the held-out preferences at the end. The pairs of one ranking share its responses: the interval is over
        prompts."""
        pieces = judge.pieces(by_unit=True)
        figures, right = merge([metric for _, metrics in pieces for metric in metrics]), []
        for prompt, metrics in pieces:
            one = merge(metrics).merged["accuracy"]
            right += [(float(one.value), prompt)] * round(float(one.count or 0))
        marks, prompts = zip(*right, strict=True)
        accuracy = share_interval(marks, prompts)
        context.announce(self.name, [f"held-out accuracy {accuracy}, loss {figures['loss']:.4f}"])
        named = {name: f for name, f in figures.items() if f == f and name != "accuracy"}
        return {"held_out": len(right), "accuracy": accuracy.row(), "figures": named}


class Judge:
    """The loss and the figures of an algorithm on preferences that it does not learn from."""

    def __init__(self, trainer: Trainer, units: Sequence[Unit]):
        self.trainer, self.units = trainer, units

    def evaluate(self) -> Mapping[str, float]:
        """For the loop: every figure by name, as of what is held out; without those that nothing was measured for."""
        figures = merge([metric for _, metrics in self.pieces() for metric in metrics])
        return {f"{name}/held_out": value for name, value in figures.items() if value == value}

    def pieces(self, by_unit: bool = False) -> list[tuple[int, list[Metric]]]:
        """The number of the first prompt and the metrics of each micro-batch, or of each unit: as one step of all units, so that
        weights and baseline are those of all that is held out."""
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
            for piece in micro_batches(with_loss(batch), trainer.settings.token_budget):
                outputs, start = trainer.outputs(piece), 0
                for part in micro_batches(piece, 1) if by_unit else [piece]:
                    terms = algorithm.terms(outputs.take(start, start + part.tokens), part)
                    start += part.tokens
                    losses = ((term.weight * term.loss).sum() for term in terms.terms)
                    metrics = [*(Metric("loss", loss, None) for loss in losses), *terms.metrics]
                    found.append((int(part.group_N[0]), metrics))
        return found
