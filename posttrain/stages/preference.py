"""Learning from preferences in files: pairs, rankings, or single responses that people called good or bad."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.dpo import DPO
from posttrain.collect import Examples
from posttrain.data.preferences import count_labels
from posttrain.data.units import Unit, as_pairs, as_singles, with_mismatched
from posttrain.errors import Count, Interval, require
from posttrain.evals.statistics import share_interval
from posttrain.runs.metrics import Figures, merge
from posttrain.stages._material import alphabet
from posttrain.stages._plan import DryRun, few_steps, preference_plan
from posttrain.stages._preferences import (
    HeldOut,
    check_data,
    numbered_prompts,
    read_units,
    split_by_prompt,
)
from posttrain.stages.base import Context, Stage, load_policy
from posttrain.stages.train import TrainStage, load_reference, trained
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import micro_batches, pack_examples, with_loss
from posttrain.types import JSON, Metric

if TYPE_CHECKING:
    from posttrain.models.policy import Policy
    from posttrain.train.roles.base import Role
    from posttrain.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class PreferenceStage(TrainStage):
    """Train `model` on the preferences in the `data` files (see data/preferences.py for what they may hold), `batch` units a step.

    Rankings become all of their pairs. An algorithm that learns from single examples takes a pair as one good and one bad, and
    each example gets a mismatched one with it for the baseline. The reference, where the algorithm needs one, is the model the
    stage starts from, frozen, or the one that `reference` names. Loss, accuracy and margins are measured every `evaluate_every` steps
    on the files in `held_out_data` or, without any, on a share `held_out` of the prompts, which is kept apart.
    """

    reads = ("pairs", "labels")
    builds = ("proximal", "reference")

    data: tuple[str, ...]
    algorithm: Algorithm = field(default_factory=DPO)
    batch: Count = 32  # units an optimizer step
    max_length: int = 1024
    optimizer: Optimization = field(
        default_factory=lambda: Optimization(lr=1e-6, warmup=20, schedule="cosine")
    )
    evaluate_every: Interval = 50
    held_out: HeldOut = 0.1
    held_out_data: tuple[str, ...] = ()
    reference: str = ""
    # cpu: it comes to the policy's device only when it is asked
    reference_device: Literal["same", "cpu"] = "same"
    evaluate_units: Count = 500  # of what is held out

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.name
        check_data(name, self.data)
        useless = bool(self.reference) and "reference" not in self.algorithm.roles
        require(
            not useless,
            f"{name}: reference is given, but this algorithm has no use for one; try dpo",
        )

    def alphabet(self) -> str:
        return alphabet([])

    def ready(self, names: Collection[str]) -> None:
        if self.algorithm.learns_from == "labels" and all(
            path not in names and Path(path).is_file() for path in self.data
        ):
            good, bad = map(sum, zip(*map(count_labels, self.data), strict=True))
            self.check_labels(good, bad)

    def check_labels(self, good: int, bad: int) -> None:
        """Refuse labels that are all the same: with nothing to tell apart, everything becomes likelier, or less likely."""
        what = "good" if good else "bad"
        require(
            good + bad == 0 or (good > 0 and bad > 0),
            f"{self.name}: all {good + bad} labelled responses are {what}, and "
            f"{self.algorithm.name} learns from good and bad ones; add some of the other kind"
            + (", or imitate these with an sft stage" if good else ""),
        )

    def read(self, context: Context, tokenizer: object, paths: Sequence[str]) -> list[Unit]:
        """The units of some files, in the shape that the algorithm learns from; what became of each row is announced."""
        learns = self.algorithm.learns_from
        units: list[Unit] = []
        for path in paths:
            found, report = read_units(context, self.name, path, tokenizer, self.max_length, learns)
            require(
                bool(report.margins) or not self.algorithm.needs_scores,
                f"{self.name}: soft labels are made of scores, and {path} has none; use labels=hard",
            )
            units += found
        return as_pairs(units) if learns == "pairs" else as_singles(units)

    def material(self, context: Context, tokenizer: object) -> tuple[list[Unit], list[Unit]]:
        """(to train on, held out)."""
        units = self.read(context, tokenizer, self.data)
        if self.held_out_data:
            train, held_out = units, self.read(context, tokenizer, self.held_out_data)
        else:
            train, held_out = split_by_prompt(units, self.held_out, context.seed, self.name)
        if self.algorithm.learns_from == "labels":
            good = sum(unit[0].reward > 0.5 for unit in train)
            self.check_labels(good, len(train) - good)
        held_out = held_out[: self.evaluate_units]
        what = "pairs" if self.algorithm.learns_from == "pairs" else "labelled responses"
        context.announce(
            self.name, [f"{len(train):,} {what} to train on, {len(held_out):,} held out"]
        )
        if self.algorithm.learns_from == "labels":
            train, held_out = (
                with_mismatched(part, train, self.max_length, context.seed)
                for part in (train, held_out)
            )
            alone = sum(len(unit) == 1 for unit in train)
            context.announce(
                self.name,
                [f"{len(train) - alone:,} mismatched responses with them, for the baseline"],
            )
        return train, held_out

    def reads_ids(self) -> tuple[str, ...]:
        return (self.reference,) if self.reference else ()

    def plan(self, policy: Policy, context: Context, before: Mapping[str, Stage]) -> list[str]:
        return preference_plan(self, policy, context, before)

    def dry_run(self) -> DryRun:
        return few_steps(self, self.evaluate_every)

    def run(self, context: Context) -> dict[str, JSON]:
        policy = load_policy(self.model, context, self.alphabet())
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
        context.save_model(self.name, policy)
        result = {**trained(loop), "trained_on": len(train)}
        return result | self.verdict(context, judge) if held_out else result

    def make_role(self, name: str, context: Context, policy: Policy) -> Role:
        from posttrain.train.roles.reference import Reference

        if name == "reference":
            return Reference(
                load_reference(self, self.reference, self.reference_device, context, policy)
            )
        return super().make_role(name, context, policy)

    def role_bytes(self, policy: Policy, tokens: int) -> dict[str, float]:
        from posttrain.train.roles.reference import Reference

        if "reference" not in self.algorithm.roles:
            return {}
        return {"reference": Reference.price(policy, self.reference_device == "same")}

    def verdict(self, context: Context, judge: Judge) -> dict[str, JSON]:
        """What is said of the held-out preferences at the end. The pairs of one ranking share its responses: the interval is over
        prompts."""
        pieces = judge.pieces(by_unit=True)
        figures, right = merge([metric for _, metrics in pieces for metric in metrics]), []
        for prompt, metrics in pieces:
            one = merge(metrics).merged["accuracy"]
            count = round(float(one.count or 0))
            right += [(float(one.value), prompt)] * count
        marks, prompts = zip(*right, strict=True)
        accuracy, count = share_interval(marks, prompts), len(right)
        context.announce(self.name, [f"held-out accuracy {accuracy}, loss {figures['loss']:.4f}"])
        named = {
            name: value for name, value in figures.items() if value == value and name != "accuracy"
        }
        return {"held_out": count, "accuracy": accuracy.row(), "figures": named}


class Judge:
    """The loss and the figures of an algorithm on preferences that it does not learn from."""

    def __init__(self, trainer: Trainer, units: Sequence[Unit]):
        self.trainer, self.units = trainer, units

    def evaluate(self) -> Mapping[str, float]:
        """For the loop: every figure by name, as of what is held out; without those that nothing was measured for."""
        return {
            f"{name}/held_out": value for name, value in self.figures().items() if value == value
        }

    def figures(self) -> Figures:
        return merge([metric for _, metrics in self.pieces() for metric in metrics])

    def pieces(self, by_unit: bool = False) -> list[tuple[int, list[Metric]]]:
        """The number of the first prompt and the metrics of each micro-batch, or of each unit: as one step of all units, so that
        weights and baseline are those of all that is held out."""
        trainer, algorithm = self.trainer, self.trainer.algorithm
        flat = [
            replace(example, unit=number)
            for number, unit in enumerate(self.units)
            for example in unit
        ]
        prompts = [
            prompt
            for prompt, unit in zip(numbered_prompts(self.units), self.units, strict=True)
            for _ in unit
        ]
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
                    loss = [
                        Metric("loss", (term.weight * term.loss).sum(), None)
                        for term in terms.terms
                    ]
                    found.append((int(part.group_N[0]), [*loss, *terms.metrics]))
        return found
