"""Rejection sampling: a model answers training problems, and its good answers become examples for sft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from posttrain.errors import Several, many, require
from posttrain.stages._answers import AskingStage, assistant, ended, listed
from posttrain.stages._plan import DryRun, fewer
from posttrain.stages.base import Context
from posttrain.stages.comparisons import ComparisonsStage
from posttrain.tasks.base import Task
from posttrain.tasks.hinted import ANSWER, Hinted
from posttrain.types import JSON, Group, Problem, Rollout

KINDS = ("written", "rejected", "repeated", "truncated", "failed")  # outcomes of answers


@dataclass(frozen=True, kw_only=True)
class SampleStage(AskingStage):
    """Sample `samples` answers to each of `prompts` training problems. Keep answers whose score is at least `min_score`: at most
    `keep` a problem, best first, without duplicates. They are written to `data.jsonl`, which an sft stage reads as `Data(file=NAME)`.

    The next model then imitates pi(y | x) restricted to {y: score(x, y) >= min_score}: it learns what this model can do, without its
    errors.

    With a `hint` (STaR's rationalisation, Zelikman et al. 2022, arXiv:2203.14465), a problem without a kept answer is asked again
    with the hint at the end of its prompt; {answer} in it is replaced by the right answer. Answers that then reach `min_score` are
    written with the original prompt, without the hint, so that unsolved problems also give examples. A score that checks only the
    final answer cannot tell whether the reasoning is sound.

    With `labels` every answer is written, labelled by whether it reaches `min_score`: binary feedback, from which a preference stage
    with algorithm=kto learns.
    """

    min_score: float = 1.0
    keep: Several = 1  # answers kept for each problem
    labels: bool = False  # write all answers, each labelled good or bad
    hint: str = ""  # such as "(The answer is {answer}.)"; "": unsolved problems are left out

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.samples > 1 and self.sampling.temperature == 0:
            yield f"{self.samples} samples at temperature 0 are all the same; raise the temperature"
        if self.hint and self.labels:
            yield "an answer that was given with a hint is no feedback on the model; leave out hint or labels"
        if self.hint and ANSWER not in self.hint:
            yield f"hint={self.hint!r} has no {ANSWER} in it, so that it would say nothing of the problem"

    def tasks(self) -> Sequence[Task]:
        return [Hinted(self.task, self.hint) if self.hint else self.task]

    def dry_run(self) -> DryRun:
        cut = fewer(self, self.counts, min_score=0.0)  # accept any answer
        if not self.labels:
            return cut
        # answers of an untrained model may all get the same label, which is refused; comparisons always have a better answer
        sampling = replace(self.sampling, temperature=self.sampling.temperature or 1.0)
        asked = {name: getattr(cut.stage, name) for name in ("name", "model", "task", "prompts")}
        return replace(cut, stage=ComparisonsStage(**asked, sampling=sampling))

    def run(self, context: Context) -> dict[str, JSON]:
        counts, problems = dict.fromkeys(KINDS, 0), self.training_problems()
        rows, unsolved = self.written(context, self, problems, counts)
        result: dict[str, JSON] = {**counts, "problems": self.prompts}
        result["answered"] = self.prompts - len(unsolved)
        said = [f"answers of {self.model}: {listed(counts)}"]
        said[0] += f"; {result['answered']:,} of {many(self.prompts, 'problem')} have one"
        if self.labels:
            result["good"] = sum(bool(row["label"]) for row in rows)
            said[0] += f"; {result['good']:,} are good"
        if self.hint:
            hinted = replace(self, task=Hinted(self.task, self.hint), hint="")
            counts = dict.fromkeys(KINDS, 0)
            more, _ = self.written(context, hinted, [p for p in unsolved if p.answer], counts)
            rows += more
            result["hinted"] = dict(counts)
            said.append(f"to the {len(unsolved):,} others with a hint: {listed(counts)}")
        none = f"{self.name}: no answer ended and scored {self.min_score} or more"
        found = "; ".join([none, *said])
        require(rows, f"{found}. Lower min_score, or raise samples or max_new_tokens")
        context.write_lines(self.name, rows, "data.jsonl")
        context.announce(self.name, said)
        return result

    def written(
        self,
        context: Context,
        asked: SampleStage,
        problems: Sequence[Problem],
        counts: dict[str, int],
    ) -> tuple[list[dict[str, JSON]], list[Problem]]:
        """Rows of the kept answers to `problems`, sampled with another stage's prompts and written with this one's; and the
        problems without a kept answer."""
        rows: list[dict[str, JSON]] = []
        unsolved: list[Problem] = []
        for group in asked.answers(context, problems):
            kept = self.chosen(group, counts)
            unsolved += [] if kept else [group.problem]
            prompt = [m.row() for m in self.task.prompt(group.problem)]
            for rollout in kept:
                label = {"label": self.good(rollout)} if self.labels else {}
                rows.append({"prompt": prompt, "completion": assistant(rollout), **label})
        return rows, unsolved

    def good(self, rollout: Rollout) -> bool:
        return rollout.score.value is not None and rollout.score.value >= self.min_score

    def chosen(self, group: Group, counts: dict[str, int]) -> list[Rollout]:
        """The answers of a problem that are kept; the others are counted by reason."""
        scored = ended(group, counts)
        usable = [r for r in scored if self.labels or self.good(r)]
        counts["rejected"] += len(scored) - len(usable)
        best = sorted(usable, key=lambda r: -(r.score.value or 0.0))
        different = list({r.response: r for r in best}.values())
        kept = different if self.labels else different[: self.keep]
        counts["repeated"] += len(usable) - len(kept)
        counts["written"] += len(kept)
        return kept
