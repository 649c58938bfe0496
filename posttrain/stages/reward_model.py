"""Trains reward models: on comparisons, to score responses, or on labelled steps, to score the steps of solutions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.reward_model import RewardModel
from posttrain.collect import Examples
from posttrain.data.preferences import Unit
from posttrain.engine.random import derive
from posttrain.errors import GuardStop, Range, Several, many, require
from posttrain.evals.calibration import accuracy_by, calibration, pair_accuracy
from posttrain.evals.statistics import Interval, share_interval
from posttrain.models.policy import Policy
from posttrain.models.scorer import Scorer, from_policy, load_scorer
from posttrain.stages._material import numbered_prompts
from posttrain.stages._plan import DryRun
from posttrain.stages.base import Context
from posttrain.stages.train import UnitStage
from posttrain.train.rating import last_scores, token_scores
from posttrain.types import JSON


@dataclass(frozen=True, slots=True, eq=False)
class Verdicts:
    """A scorer's verdicts on held-out comparisons. `margin_K` is positive if it agrees with the labels, `distance_K` is the distance
    between the labels, and `prompt_K` is the index of the prompt."""

    margin_K: np.ndarray
    distance_K: np.ndarray
    prompt_K: np.ndarray

    @property
    def accuracy(self) -> Interval:
        """Share of comparisons in the right order, averaged over prompts. Prompts are independent; comparisons of one prompt are not:
        a ranking of K responses has K (K - 1) / 2 pairs."""
        numbers = np.unique(self.prompt_K)
        margins = (self.margin_K[self.prompt_K == number].tolist() for number in numbers)
        shares = [pair_accuracy(one) for one in margins]
        return share_interval(shares, means=len(self.prompt_K) > len(numbers))


@dataclass(frozen=True, kw_only=True)
class RewardModelStage(UnitStage):
    """Train a scorer, a copy of the body of `model` with a new scalar head, on the comparisons in the `data` files (or, with
    algorithm=process_reward_model, on labelled steps). A share `held_out` of the prompts is not trained on. The stage stops if the
    accuracy on them is below `min_accuracy`, because a policy trained against a bad reward model only learns its errors. The
    `members` of an ensemble differ in the seeds of the head and of the data order. They are saved as model, model-1, model-2, ...:
    plain transformers checkpoints, except with head=mlp, which only posttrain reads."""

    leaves = "reward model"
    reads = ("rankings", "step_labels")
    builds = ()

    algorithm: Algorithm = field(default_factory=RewardModel)
    batch: Several = 16  # pairs, rankings or solutions an optimizer step
    # the stage stops below this held-out accuracy; 0: no gate
    min_accuracy: Annotated[float, Range(ge=0, lt=1)] = 0.0
    members: Several = 1  # reward models to train, with different seeds, as an ensemble
    # linear, as in transformers, or mlp with one hidden layer
    head: Literal["linear", "mlp"] = "linear"

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.min_accuracy > 0 and self.held_out == 0:
            yield "min_accuracy is judged on held-out data; set held_out above 0"
        if self.head != "linear" and self.lora is not None:
            yield f"adapters are saved for peft, which has no head={self.head}; use head=linear, or train without lora"

    def split(self, context: Context, tokenizer: object) -> tuple[list[Unit], list[Unit]]:
        train, held_out = super().split(context, tokenizer)
        gate = "min_accuracy is judged on held-out data, and one prompt leaves none; add data"
        require(held_out or self.min_accuracy == 0, f"{self.name}: {gate}")
        steps = [unit[0].steps for unit in train if unit[0].steps is not None]
        labels = {float(v) for one in steps for v in one[np.isfinite(one)]}
        same = f"{self.name}: all steps to train on have the label {min(labels, default=0):g}: there is nothing to tell apart"
        require(len(labels) != 1, f"{same}; add steps of the other kind")
        return train, held_out

    def makes(self) -> int:
        return self.members

    def dry_run(self) -> DryRun:
        return replace(self, min_accuracy=0.0).dry_run() if self.min_accuracy else super().dry_run()

    def run(self, context: Context) -> dict[str, JSON]:
        policy = self.load(context)
        train, held_out = self.limited(policy).split(context, policy.tokenizer)
        context.announce(self.name, [f"{len(train):,} to train on, {len(held_out):,} held out"])
        verdicts = []
        stage = self.begin(context, len(train))
        for member in range(self.members):
            scorer = stage.member(context, policy, train, held_out, member)
            if held_out:
                verdicts.append(self.judge(scorer, held_out))
                self.gate(context, verdicts[-1], member)
        result: dict[str, JSON] = {"steps": stage.steps, "members": self.members}
        result["trained_on"] = len(train)
        if verdicts:
            result |= report(verdicts)
            each = ", ".join(f"{v.accuracy.value:.3f}" for v in verdicts)
            members = f" (members {each})" if self.members > 1 else ""
            said = f"held-out accuracy {Interval(*result['accuracy'])}{members}"
            said += f"; expected calibration error {result['calibration']['error']:.3f}"
            context.announce(self.name, [said])
        return result

    def folder(self, context: Context, member: int) -> Path:
        return context.folder(self.name) / (f"model-{member}" if member else "model")

    def member(
        self, context: Context, policy: Policy, train: list[Unit], held_out: list[Unit], member: int
    ) -> Scorer:
        """Train one scorer and save it. A scorer that an earlier attempt saved is only read."""
        folder, kind = self.folder(context, member), (policy.dtype, policy.device)
        if folder.is_dir():
            return load_scorer(str(folder), *kind)
        seed = derive(context.seed, member) >> 1
        # merging changes the body, which the next member needs unchanged
        share = self.lora is not None and self.members == 1
        scorer = from_policy(policy, self.head, zero=False, seed=seed, share=share)
        self.train(
            context,
            self.make_trainer(context, scorer, seed=seed),
            Examples([train], [1.0], self.batch, seed, policy.device),
            self.schedule(self.evaluate_every if held_out else 0),
            label=f"{self.name}-{member}" if member else self.name,
            evaluate=lambda: {"accuracy/held_out": self.judge(scorer, held_out).accuracy.value},
        )
        context.save_model(self.name, scorer, self.lora, folder.name)
        # merged in float32 on the CPU: the evaluation must use the weights that others will load
        return scorer if self.lora is None else load_scorer(str(folder), *kind)

    def judge(self, scorer: Scorer, units: Sequence[Unit]) -> Verdicts:
        """A scorer's verdicts on units that it was not trained on."""
        by_step = self.algorithm.learns_from == "step_labels"
        return (judge_steps if by_step else judge_pairs)(scorer, units, self.optimizer.plain_budget)

    def gate(self, context: Context, verdicts: Verdicts, member: int) -> None:
        accuracy, count = verdicts.accuracy, len(np.unique(verdicts.prompt_K))
        if accuracy.value < self.min_accuracy:
            which = self.folder(context, member).name
            low = f"is {accuracy} over {many(count, 'prompt')}, below min_accuracy={self.min_accuracy}"
            advice = "a policy would learn its errors: look at the data, or train longer"
            raise GuardStop(f"{self.name}: held-out accuracy of {which} {low}; {advice}")


def judge_pairs(scorer: Scorer, units: Sequence[Unit], token_budget: int) -> Verdicts:
    """The margins of all pairs with a preference in each unit: the score of the better minus that of the worse."""
    ids = [example.ids for unit in units for example in unit]
    scores, rows = iter(last_scores(scorer, ids, token_budget)), []
    for number, unit in zip(numbered_prompts(units), units, strict=True):
        own = [(example.reward, next(scores)) for example in unit]
        rows += [(a - b, better - worse, number) for a, better in own for b, worse in own if a > b]
    return verdicts_of(rows)


def judge_steps(scorer: Scorer, units: Sequence[Unit], token_budget: int) -> Verdicts:
    """The margins of labelled steps: the score if the label is at least one half, else its negative."""
    numbered = zip(numbered_prompts(units), units, strict=True)
    examples = [(example, number) for number, unit in numbered for example in unit]
    rows = []
    scores = token_scores(scorer, [e.ids for e, _ in examples], token_budget)
    for (example, number), score_T in zip(examples, scores, strict=True):
        label_T = example.steps
        assert label_T is not None
        for score, label in zip(score_T.tolist(), label_T.tolist(), strict=True):
            if not np.isnan(label):
                rows.append((2 * abs(label - 0.5), score if label >= 0.5 else -score, number))
    return verdicts_of(rows)


def verdicts_of(rows: Sequence[tuple[float, float, int]]) -> Verdicts:
    distance_K, margin_K, prompt_K = (np.array(column) for column in zip(*rows, strict=True))
    return Verdicts(margin_K, distance_K, prompt_K)


def report(verdicts: Sequence[Verdicts]) -> dict[str, JSON]:
    """The accuracy of each member and of their mean, and for the mean also the accuracy by distance of labels and scores, and
    calibration."""
    mean = replace(verdicts[0], margin_K=np.mean([v.margin_K for v in verdicts], axis=0))
    margins = mean.margin_K.tolist()
    found: dict[str, JSON] = {"held_out": len(np.unique(mean.prompt_K)), "pairs": len(margins)}
    found["accuracy"] = mean.accuracy.row()
    for number, one in enumerate(verdicts) if len(verdicts) > 1 else ():
        found[f"accuracy/{number}"] = one.accuracy.row()
    for name, distance_K in (("label", mean.distance_K), ("score", np.abs(mean.margin_K))):
        parts = accuracy_by(distance_K.tolist(), margins)
        found[f"by_{name}_margin"] = [asdict(part) for part in parts]
    found["calibration"] = asdict(calibration(margins))
    return found
