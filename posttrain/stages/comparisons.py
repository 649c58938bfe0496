"""Makes preference data from a model's answers. The model answers each prompt several times, and the task's own score with noise, or
a judge, decides which answer is better."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from posttrain.data.labels import Labels
from posttrain.engine.random import derive
from posttrain.errors import NotNegative, TwoOrMore, Waiting, Whole, many, require
from posttrain.rewards.judge import Judge
from posttrain.stages._answers import BATCH, AskingStage, assistant, ended, listed, rated_by
from posttrain.stages._judged import JudgedStage, gumbel
from posttrain.stages._lineage import RECORD, sha256
from posttrain.stages._naming import DataName, ModelName
from posttrain.stages.base import Context, data_place
from posttrain.system.files import atomic_write
from posttrain.types import JSON, Group, Rollout

KINDS = ("written", "equal", "failed", "truncated", "empty")  # outcomes of answers
JUDGED = ("written", "equal", "truncated", "empty", "tied", "unjudged")  # the same with a judge


@dataclass(frozen=True, kw_only=True)
class ComparisonsStage(JudgedStage, AskingStage):
    """Sample `samples` answers to each of `prompts` training problems, and order them by preference. By default a simulated annotator
    decides. It knows the task's own score s, or that of a `reward_model`, and prefers a to b with probability sigmoid((s_a - s_b) /
    noise), the Bradley-Terry model. With noise 0 it never errs, and has no preference between equal scores.

    A `judge`, which is a model in this process or behind a URL, compares every two answers in both orders. More than two answers are
    ranked by the comparisons that they win. Answers that the judge finds equal are left out, because nothing can be learned from
    them.

    With `annotator=people` the answers are written to the run's folder `labels`, and the run ends. People compare them in the studio
    or with `posttrain label`. After `needed` comparisons (0: all) the run can be resumed, and continues with their preferences.

    The stage writes `data.jsonl` in its folder. Reward_model and preference stages read it if they name this stage as their data.
    """

    samples: Annotated[int, TwoOrMore(text="at least 2 (one answer cannot be compared)")] = 2
    noise: NotNegative = 0.1  # of the simulated annotator
    # people: the run ends until people have compared the answers
    annotator: Literal["simulated", "people"] = "simulated"
    needed: Whole = 0  # comparisons by people before the run may continue; 0: all
    against: ModelName = ""  # a second model, which gives half of the answers to each problem
    # an earlier comparisons stage, or a file, whose rows are put first and trained on again
    before: DataName = ""

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.sampling.temperature == 0:
            yield "a temperature of 0 gives equal answers"
        if self.annotator == "people" and (self.judge or self.before):
            yield "people compare, or a judge does, and an earlier file is not mixed in; leave one out"
        if self.reward_model and (self.judge or self.annotator == "people"):
            yield "a reward_model, a judge or people decide, not two of them"
        unscored = self.judge is None and self.annotator == "simulated" and not self.reward_model
        if unscored and not self.task.scores:
            yield "the task scores nothing by itself; give it a reward (task.reward), or name a reward_model or a judge"

    def run(self, context: Context) -> dict[str, JSON]:
        counts: dict[str, int] = dict.fromkeys(JUDGED if self.judge else KINDS, 0)
        used: dict[str, JSON] = {}
        if self.annotator == "people":
            rows, sees = self.labelled(context, counts), "people"
        elif self.judge is None:
            rows = [*self.rows(context, counts)]
            sees = "reward model" if self.reward_model else "task's score"
        else:
            judge, usage = self.judge.open(context)
            rows, sees = [*self.judged(context, judge, counts)], "judge"
            used["usage"] = usage.row()
        text = f"{self.name}: no two answers differed in a way that the {sees} could see; raise the temperature"
        require(rows, text)
        earlier: list[str] = []
        if self.before:
            earlier = Path(data_place(self.before, context)).read_text("utf-8").splitlines()
        context.write_lines(self.name, [*earlier, *rows], "data.jsonl")
        said = f"{len(earlier):,} from before; " if earlier else ""
        said += listed(counts)
        context.announce(self.name, [f"comparisons of {self.samples} answers each: {said}"])
        return {**counts, "from_before": len(earlier), **used} if self.before else counts | used

    def rows(self, context: Context, counts: dict[str, int]) -> Iterator[dict[str, JSON]]:
        """Rows ordered by the simulated annotator."""
        for group, coin in self.groups(context):
            kept = self.different(group, counts)
            rated = [(self.liking(r, derive(coin, place)), r) for place, r in enumerate(kept)]
            yield from self.row(group, rated, "equal", counts)

    def liking(self, rollout: Rollout, coin: int) -> float:
        """The score plus Gumbel noise: the difference of two Gumbel variables is logistic, so each pair is a Bradley-Terry draw."""
        assert rollout.score.value is not None
        return rollout.score.value + self.noise * gumbel(coin >> 11)

    def judged(
        self, context: Context, judge: Judge, counts: dict[str, int]
    ) -> Iterator[dict[str, JSON]]:
        """Rows ordered by the judge, which is asked about many problems at once."""
        groups = (group for group, _ in self.groups(context))
        while part := list(islice(groups, BATCH)):
            usable = [(group, kept) for group in part if (kept := self.different(group, counts))]
            asked = [(g.problem.question, [r.response for r in kept]) for g, kept in usable]
            found = judge.scores("tournament", asked)
            for (group, kept), scores in zip(usable, found, strict=True):
                pairs = zip(scores, kept, strict=True)
                rated = [(s.value, r) for s, r in pairs if s.value is not None]
                counts["unjudged"] += len(kept) - len(rated)
                yield from self.row(group, rated, "tied", counts)

    def row(
        self,
        group: Group,
        rated: Sequence[tuple[float, Rollout]],
        equal: str,
        counts: dict[str, int],
    ) -> Iterator[dict[str, JSON]]:
        """The row of a prompt with rated answers; none, and counted, if they are `equal`. The rank of the best answer is 1; equal
        answers share a rank."""
        if len({value for value, _ in rated}) < 2:
            counts[equal] += len(rated) > 1
            return
        counts["written"] += 1
        values, best_first = zip(*sorted(rated, key=lambda pair: -pair[0]), strict=True)
        prompt = [m.row() for m in self.task.prompt(group.problem)]
        ranked = [assistant(rollout) for rollout in best_first]
        if self.samples == 2:  # a file holds rows of one kind
            yield {"prompt": prompt, "chosen": ranked[0], "rejected": ranked[1]}
        else:
            ranks = [1 + values.index(value) for value in values]
            yield {"prompt": prompt, "responses": ranked, "ranking": ranks}

    def labelled(self, context: Context, counts: dict[str, int]) -> list[dict[str, JSON]]:
        """Rows by people's preferences. If they have not compared enough yet, the run ends here. If the stage's inputs change,
        another file is used: comparisons of answers that would not be sampled again do not count."""
        made = sha256(context.folder(self.name) / RECORD)[:8]
        file = context.directory / "labels" / f"{self.name}-{made}.jsonl"
        if not file.is_file():
            asked = [kept for g, _ in self.groups(context) if (kept := self.different(g, counts))]
            rows = [self.asked(kept) for kept in asked]
            said = f"{many(len(rows), 'prompt')} to compare; left out: {listed(counts)}"
            context.announce(self.name, [said])
            require(rows, f"{self.name}: no two answers to a prompt differ; raise the temperature")
            atomic_write(file, "".join(json.dumps(row) + "\n" for row in rows), folder=True)
        labels = Labels.read(file)
        done, every = labels.labelled(), len(labels.items)
        needed = min(self.needed or every, every)
        if done < needed:
            how = f"in 'posttrain studio' or with 'posttrain label {shlex.quote(str(file))}'"
            text = f"waiting for labels: {done} of {needed}; compare the answers {how}"
            data = {"needed": needed, "file": file.name}
            context.events.emit("waiting", text, stage=self.name, data=data)
            raise Waiting(text)
        found = list(labels.rows())
        counts["written"] = len(found)
        return found

    def asked(self, rollouts: Sequence[Rollout]) -> dict[str, JSON]:
        """Answers to one prompt, for people to compare."""
        prompt = [m.row() for m in self.task.prompt(rollouts[0].problem)]
        return {"prompt": prompt, "responses": [assistant(rollout) for rollout in rollouts]}

    def groups(self, context: Context) -> Iterator[tuple[Group, int]]:
        """The answers to each problem, and a seed for the draws about them."""

        def seed(first: int) -> int:
            return derive(context.seed, self.skip + first) >> 1

        half = self.samples // 2 if self.against else 0
        drawn = [(self.model, self.samples - half, seed)]
        if self.against:
            drawn.append((self.against, half, lambda first: derive(seed(first), 1) >> 1))
        problems = self.training_problems()
        policies = [self.load(context, name) for name, _, _ in drawn]
        made: list[Iterable[Group]] = [
            self.ask(context, policy, problems, count, seeds)
            for policy, (_, count, seeds) in zip(policies, drawn, strict=True)
        ]
        if name := self.reward_model:
            both = zip(policies, made, strict=True)
            made = [rated_by(context, policy, name, list(groups)) for policy, groups in both]
        for number, groups in enumerate(zip(*made, strict=True)):
            group = Group(groups[0].problem, tuple(r for g in groups for r in g.rollouts))
            place = number % BATCH
            yield group, derive(seed(number - place), place)

    def different(self, group: Group, counts: dict[str, int]) -> list[Rollout]:
        """The answers that can be compared; none, and counted, if there are fewer than two."""
        # people and judges need no score
        scored = self.judge is None and self.annotator == "simulated"
        usable = ended(group, counts, scored)
        spoken = [r for r in usable if r.response.strip()]
        counts["empty"] += len(usable) - len(spoken)
        different = list({r.response: r for r in spoken}.values())
        if len(different) < 2:
            counts["equal"] += 1
            return []
        return different
