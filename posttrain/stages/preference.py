"""Learning from preferences in files: pairs, rankings, or single responses that people called good or bad."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.dpo import DPO
from posttrain.collect import Examples
from posttrain.data.preferences import count_labels
from posttrain.data.units import Unit, as_pairs, as_singles, with_mismatched
from posttrain.errors import Count, require
from posttrain.evals.statistics import share_interval
from posttrain.loop import Loop
from posttrain.models.load import same_vocabulary
from posttrain.runs.metrics import Figures, merge
from posttrain.stages._plan import DryRun, few_steps, preference_plan
from posttrain.stages._preferences import (
    PreferenceLearner,
    numbered_prompts,
    read_units,
    split_by_prompt,
)
from posttrain.stages.base import Context, Stage, load_policy
from posttrain.train.pack import micro_batches, pack_examples, with_loss
from posttrain.types import JSON, Metric, Outputs

if TYPE_CHECKING:
    from posttrain.models.policy import Policy
    from posttrain.train.trainer import Trainer

PAIRS, LABELS = (
    ("pair", "openai", "ranking"),
    ("unpaired", "pair", "openai"),
)  # kinds of files that give them


@dataclass(frozen=True, kw_only=True)
class PreferenceStage(PreferenceLearner):
    """Train `model` on the preferences in the `data` files (see data/preferences.py for what they may hold), `batch` units a step.

    Rankings become all of their pairs. An algorithm that learns from single examples takes a pair as one good and one bad, and
    each example gets a mismatched one beside it for the baseline. The reference, where the algorithm needs one, is the model the
    stage starts from, frozen, or the one that `reference` names. Loss, accuracy and margins are measured every `evaluate_every` steps
    on the files in `held_out_data` or, without any, on a share `held_out` of the prompts, which is kept apart.
    """

    algorithm: Algorithm = field(default_factory=DPO)
    held_out_data: tuple[str, ...] = ()
    reference: str = ""
    reference_device: Literal["same", "cpu"] = (
        "same"  # cpu: it comes to the policy's device only when it is asked
    )
    evaluate_units: Count = 500  # of what is held out

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.name
        require(
            not self.algorithm.online,
            f"{name}: this algorithm samples its own data; use an rl stage",
        )
        require(
            self.algorithm.trains == "policy",
            f"{name}: this algorithm trains a scorer; use a reward_model stage",
        )
        learns = self.algorithm.unit == "pair" or "proximal" in self.algorithm.needs
        require(
            learns,
            f"{name}: this algorithm does not look at preferences; use dpo or a relative, or an sft stage",
        )
        useless = bool(self.reference) and "reference" not in self.algorithm.needs
        require(
            not useless,
            f"{name}: reference is given, but this algorithm has no use for one; try dpo",
        )

    def ready(self, names: Collection[str]) -> None:
        if self.algorithm.unit != "pair" and all(
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
        wanted = PAIRS if self.algorithm.unit == "pair" else LABELS
        units: list[Unit] = []
        for path in paths:
            found, report = read_units(context, self.name, path, tokenizer, self.max_length, wanted)
            plain = getattr(self.algorithm, "labels", "") == "soft" and not report.margins
            require(
                not plain,
                f"{self.name}: soft labels are made of scores, and {path} has none; use labels=hard",
            )
            units += found
        return as_pairs(units) if self.algorithm.unit == "pair" else as_singles(units)

    def material(self, context: Context, tokenizer: object) -> tuple[list[Unit], list[Unit]]:
        """(to train on, held out)."""
        units = self.read(context, tokenizer, self.data)
        if self.held_out_data:
            train, held_out = units, self.read(context, tokenizer, self.held_out_data)
        else:
            train, held_out = split_by_prompt(units, self.held_out, context.seed, self.name)
        if self.algorithm.unit != "pair":
            good = sum(unit[0].reward > 0.5 for unit in train)
            self.check_labels(good, len(train) - good)
        held_out = held_out[: self.evaluate_units]
        what = "pairs" if self.algorithm.unit == "pair" else "labelled responses"
        context.announce(
            self.name, [f"{len(train):,} {what} to train on, {len(held_out):,} held out"]
        )
        if "proximal" in self.algorithm.needs:
            train, held_out = (
                with_mismatched(part, train, self.max_length, context.seed)
                for part in (train, held_out)
            )
            alone = sum(len(unit) == 1 for unit in train)
            context.announce(
                self.name,
                [f"{len(train) - alone:,} mismatched responses beside them, for the baseline"],
            )
        return train, held_out

    def reads_ids(self) -> tuple[str, ...]:
        return (self.reference,) if self.reference else ()

    def plan(self, policy: Policy, context: Context, before: Mapping[str, Stage]) -> list[str]:
        reference = "reference" in self.algorithm.needs and self.reference_device == "same"
        return preference_plan(self, policy, context, before, reference=reference)

    def dry_run(self) -> DryRun:
        return few_steps(self, self.evaluate_every)

    def run(self, context: Context) -> dict[str, JSON]:
        from posttrain.train.trainer import Trainer

        policy = load_policy(self.model, context, self.alphabet())
        policy.check_length(self.max_length, "lower max_length")
        train, held_out = self.material(context, policy.tokenizer)
        trainer = Trainer(
            policy,
            self.algorithm,
            self.optimizer,
            self.make_reference(context, policy),
            events=context.events,
        )
        judge = Judge(trainer, held_out)
        loop = Loop(
            stage=self.name,
            schedule=self.schedule(held_out),
            trainer=trainer,
            source=Examples([train], [1.0], self.batch, context.seed, policy.device),
            writer=context.writer,
            checkpoints=context.checkpoints(self.name),
            interrupt=context.interrupt,
            trackers=context.trackers,
            monitor=self.monitor,
            evaluate=judge.evaluate,
        )
        loop.run()
        context.save_model(self.name, policy)
        result: dict[str, JSON] = {
            "steps": loop.step,
            "train_seconds": loop.elapsed,
            "trained_on": len(train),
            **loop.best_figures(),
        }
        return result | self.verdict(context, judge) if held_out else result

    def make_reference(self, context: Context, policy: Policy) -> Policy | None:
        """The frozen model that log-ratios are taken with, where the algorithm needs one."""
        if "reference" not in self.algorithm.needs:
            return None
        reference = load_policy(self.reference or self.model, context, self.alphabet())
        same_vocabulary(self.name, policy, reference)
        if self.reference_device == "cpu":
            reference.model.to("cpu")
        return reference

    def verdict(self, context: Context, judge: Judge) -> dict[str, JSON]:
        """What is said of the held-out preferences at the end. The pairs of one ranking share its responses: the interval is over
        prompts."""
        pieces = judge.pieces(by_unit=True)
        figures, right = merge([metric for _, metrics in pieces for metric in metrics]), []
        for prompt, metrics in pieces:
            one = merge(metrics).merged["accuracy"]
            count = round(float(one.count or 0))
            right += [(float(one.value), prompt)] * count
        accuracy, count = share_interval(*zip(*right, strict=True)), len(right)
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
            packed = pack_examples(flat, trainer.policy.device)
            packed = packed.replace(group_N=torch.tensor(prompts, device=packed.group_N.device))
            batch = algorithm.prepare(trainer.fill(packed), algorithm.start())
            for piece in micro_batches(with_loss(batch), trainer.settings.token_budget):
                outputs, start = trainer.outputs(piece), 0
                for part in micro_batches(piece, 1) if by_unit else [piece]:
                    terms = algorithm.terms(_cut(outputs, start, start + part.tokens), part)
                    start += part.tokens
                    loss = [
                        Metric("loss", (term.weight * term.loss).sum(), None)
                        for term in terms.terms
                    ]
                    found.append((int(part.group_N[0]), [*loss, *terms.metrics]))
        return found


def _cut(outputs: Outputs, start: int, end: int) -> Outputs:
    values = {f.name: getattr(outputs, f.name) for f in fields(outputs)}
    return Outputs(
        **{name: None if value is None else value[start:end] for name, value in values.items()}
    )
