"""Compares a judge with people, before anything is trained on its verdicts: how often it prefers what they preferred."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.data.preferences import read_pairs, read_preferences
from posttrain.engine.random import derive
from posttrain.errors import Count, GuardStop, Share, many, require
from posttrain.evals.agreement import cohen_kappa
from posttrain.evals.statistics import share_interval
from posttrain.models.load import Reader
from posttrain.rewards.judge import Verdict
from posttrain.stages._answers import BUDGET
from posttrain.stages._judged import JudgedStage
from posttrain.stages._naming import DataName
from posttrain.stages._plan import DryRun, fewer
from posttrain.stages.base import Context, data_place, load_reward_model, model_places
from posttrain.stages.reward_model import judge_pairs
from posttrain.types import JSON


@dataclass(frozen=True, kw_only=True)
class AgreementStage(JudgedStage):
    """`judge` judges up to `pairs` comparisons of people, each in both orders. They come from a file of preferences or an earlier
    stage (`data`). The seed decides which answer is shown first. The stage reports:

        agreement = #(judge prefers what people preferred) / #(pairs that it judged)
        kappa     = (agreement - chance) / (1 - chance)

    A tie of the judge counts as disagreement. Chance is how often both would agree at random, each at its own rates. The stage stops
    if agreement is below `min_agreement`, because a policy would learn the judge's errors. With a `reward_model` instead of the
    judge, agreement is its accuracy on the pairs.
    """

    leaves = ""

    data: DataName
    # the file's own names of columns, as in {prompt: question, chosen: better, rejected: worse}
    columns: Mapping[str, str] = field(default_factory=dict)
    pairs: Count = 200
    min_agreement: Share = 0.0  # the stage stops below this agreement; 0: no gate

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if bool(self.reward_model) == (self.judge is not None):
            yield "name a judge or a reward_model that is compared with people, one of them"

    def check_data(self, reader: Reader, context: Context, before: Collection[str]) -> None:
        if self.data not in before:
            read_pairs(self.data, self.columns)

    def dry_run(self) -> DryRun:
        return fewer(self, "pairs", min_agreement=0.0)

    def run(self, context: Context) -> dict[str, JSON]:
        file = data_place(self.data, context)
        if self.judge is None:
            return self.accuracy(file, context)
        rows = read_pairs(file, self.columns)[: self.pairs]
        judge, usage = self.judge.open(context)
        labels = ["A" if derive(context.seed, n) & 1 else "B" for n in range(len(rows))]
        shown = [
            (q, better, worse) if label == "A" else (q, worse, better)
            for (q, better, worse), label in zip(rows, labels, strict=True)
        ]
        verdicts = judge.compare(shown)
        result = self.figures(verdicts, labels, [question for question, _, _ in rows])
        lines = self.lines(rows, labels, verdicts)
        context.write_lines(self.name, lines, "verdicts.jsonl")
        share, low, high = result["agreement"]
        said = f"{self.judge} agrees with people on {share:.1%} ({low:.1%} to {high:.1%}) of {many(result['judged'], 'pair')}"
        said += f", kappa {result['kappa']:.2f}; {many(result['ties'], 'tie')}, {result['swayed']} of them by the order alone"
        context.announce(self.name, [f"{said}; {result['unjudged']} not judged"])
        self.gate(share, "the judge", "change the rubric or the model")
        return {**result, "usage": usage.row()}

    def accuracy(self, file: str, context: Context) -> dict[str, JSON]:
        """How often the reward model gives the higher score to the response that people preferred."""
        scorer = load_reward_model(model_places(self.reward_model, context)[0], context)
        limit = scorer.model.config.max_position_embeddings
        read = read_preferences(file, scorer.tokenizer, limit, self.columns)
        context.announce(self.name, read.lines())
        found = judge_pairs(scorer, read.units[: self.pairs], BUDGET)
        accuracy, judged = found.accuracy, len(found.margin_K)
        said = f"{self.reward_model} prefers what people preferred in {accuracy} of {many(judged, 'pair')}"
        context.announce(self.name, [said])
        self.gate(accuracy.value, self.reward_model, "look at its data, or train longer")
        return {"agreement": accuracy.row(), "judged": judged}

    def gate(self, share: float, who: str, advice: str) -> None:
        if share < self.min_agreement:
            low = f"{self.name}: {who} agrees with people on {share:.1%} of the pairs, less than {self.min_agreement:.1%}"
            raise GuardStop(f"{low}; {advice}")

    def figures(
        self, verdicts: Sequence[Verdict], labels: Sequence[str], questions: Sequence[str]
    ) -> dict[str, JSON]:
        judged = {n: v.winner for n, v in enumerate(verdicts) if v.winner is not None}
        why = next((v.failure for v in verdicts if v.failure), "")
        require(judged, f"{self.name}: the judge gave no verdict on any pair: {why}")
        kappa = cohen_kappa(judged, dict(enumerate(labels)))  # None: all verdicts are the same
        same = [float(winner == labels[n]) for n, winner in judged.items()]
        # the interval is over prompts: one prompt may be compared several times
        ties = [v for v in verdicts if v.winner == "tie"]
        return {
            "agreement": share_interval(same, [questions[n] for n in judged]).row(),
            "kappa": 1.0 if kappa is None else kappa,
            "judged": len(judged),
            "unjudged": len(verdicts) - len(judged),
            "ties": len(ties),
            "swayed": sum(not v.agreed for v in ties),
        }

    @staticmethod
    def lines(
        rows: Sequence[tuple[str, str, str]], labels: Sequence[str], verdicts: Sequence[Verdict]
    ) -> list[dict[str, JSON]]:
        """Each pair with the verdicts of people and judge, for reading."""
        names = ("question", "preferred", "other", "people", "judge", "both orders")
        return [
            dict(zip(names, (*row, label, v.winner, v.agreed), strict=True))
            for row, label, v in zip(rows, labels, verdicts, strict=True)
        ]
