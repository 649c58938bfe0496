"""Offline reinforcement learning on groups of responses that were sampled and scored before; nothing is sampled."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.grpo import GRPO
from posttrain.collect import SavedGroups
from posttrain.data.demonstrations import completion_example
from posttrain.data.records import read_jsonl
from posttrain.data.text import Decoder
from posttrain.errors import Count, Positive, Several, UserError, many, require
from posttrain.models.load import Reader
from posttrain.models.policy import Policy
from posttrain.runs.layout import EpisodeRow, RolloutRow, sampled_tokens, stages_of
from posttrain.runs.read import Run
from posttrain.stages._material import until_end
from posttrain.stages._naming import DataName
from posttrain.stages._plan import DryRun, few_steps, planned_way, training_memory
from posttrain.stages.base import Context, Stage, data_place
from posttrain.stages.train import MaxLength, ReferenceStage, length_limit, trained
from posttrain.types import JSON, Group, Problem, Rollout, Sampling, Score, Segment, as_number

UNKNOWN = (
    "no log-probs of what sampled these responses are given: each is taken for a sample of the policy itself (importance ratio "
    "1, no off-policy correction), which is biased as far as another policy wrote them"
)
OWN = "prompt, responses (texts) and rewards (numbers; null: could not be scored), with logprobs and response_ids or without"


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """The groups of a file. `known` says whether it has the log-probs of the sampled tokens."""

    groups: tuple[Group, ...]
    known: bool
    too_long: int  # responses left out
    untrained: int  # responses of a run whose tokens were not kept

    def lines(self) -> list[str]:
        """Lines about the rows that were read and those that were not."""
        count = sum(len(group.rollouts) for group in self.groups)
        said = [f"{many(count, 'saved response')} in {many(len(self.groups), 'group')}"]
        if self.too_long:
            said.append(f"{many(self.too_long, 'response')} left out: longer than max_length")
        if self.untrained:
            said.append(f"{many(self.untrained, 'response')} left out: the run kept no tokens")
        return said


def read_saved(path: str, tokenizer: Any, max_length: int, temperature: float) -> Saved:
    """Read the groups of a JSONL file. A line is one prompt with its responses, or a rollout of a step as a run wrote it. Rollouts of
    a run must have been sampled at this temperature."""
    rows = list(read_jsonl(path))
    require(rows, f"{path} has no rows; give one of {OWN} a line")
    where, first = rows[0]
    if {"problem", "response", "reward"} <= first.keys():
        made, untrained = _of_run(Path(path), where, Decoder(tokenizer), temperature)
    else:
        made, untrained = [_group(row, tokenizer, where) for where, row in rows], 0
    segments = (s for g in made for r in g.rollouts for s in r.segments if s.sampled)
    known = {segment.logprobs is not None for segment in segments}
    require(len(known) < 2, f"{path}: some responses have logprobs; give them for all, or for none")
    short = [
        Group(g.problem, tuple(r for r in g.rollouts if len(r.ids) <= max_length), g.role)
        for g in made
    ]
    kept = tuple(group for group in short if group.rollouts)
    require(kept, f"{path}: no response of at most {max_length} tokens; raise max_length")
    count = sum(len(g.rollouts) for g in made) - sum(len(g.rollouts) for g in kept)
    return Saved(kept, known == {True}, count, untrained)


def _group(row: Mapping[str, Any], tokenizer: Any, where: str) -> Group:
    """One prompt with its responses."""
    lacking = ", ".join(name for name in ("prompt", "responses", "rewards") if name not in row)
    require(not lacking, f"{where}: no {lacking}; a row has {OWN}")
    texts, rewards = row["responses"], row["rewards"]
    lists = {
        name: row[name]
        for name in ("responses", "rewards", "logprobs", "response_ids")
        if row.get(name) is not None
    }
    for name, values in lists.items():
        fits = isinstance(values, list) and len(values) == len(texts) > 0
        require(fits, f"{where}: {name} must be a list, one entry for each of the responses")
    problem = Problem(where, str(row["prompt"]))
    rollouts = []
    for n, (text, reward) in enumerate(zip(texts, rewards, strict=True)):
        what = f"{where}: response {n + 1}"
        example = until_end(completion_example(row["prompt"], _text(text, what), tokenizer, what))
        begin = int(np.flatnonzero(example.mask)[0])
        ids = _numbers(lists, "response_ids", n, what, np.int64)
        ids = example.ids[begin:] if ids is None else ids
        require(len(ids) > 0, f"{what}: it is empty")
        inside = ids.min() >= 0 and ids.max() < len(tokenizer)
        require(inside, f"{what}: response_ids has a token that the tokenizer has not")
        logprobs = _numbers(lists, "logprobs", n, what, np.float32)
        found = 0 if logprobs is None else len(logprobs)
        unlike = f"{what}: {found} logprobs for {len(ids)} tokens"
        fits = logprobs is None or found == len(ids)
        require(fits, f"{unlike}; give the tokens they are of as response_ids")
        parts = (
            Segment(example.ids[:begin], "", False),
            Segment(ids, text, True, logprobs, finish="stop"),
        )
        rollouts.append(Rollout(problem, n, parts, _score(reward, what)))
    return Group(problem, tuple(rollouts))


def _text(value: Any, what: str) -> str:
    require(isinstance(value, str), f"{what} must be text, not {type(value).__name__}")
    return str(value)


def _score(value: JSON, what: str) -> Score:
    try:
        return Score.failed("not scored") if value is None else Score(as_number(value, "a reward"))
    except (TypeError, ValueError) as error:
        raise UserError(f"{what}: {error}") from None


def _numbers(
    lists: Mapping[str, Any], name: str, n: int, what: str, dtype: type
) -> np.ndarray | None:
    """One entry of a column of lists of numbers; None if there is no such column."""
    if name not in lists:
        return None
    try:
        found: np.ndarray = np.array(lists[name][n], dtype=dtype)
    except (TypeError, ValueError, OverflowError):
        found = np.zeros((0, 0))
    fine = found.ndim == 1 and bool(np.isfinite(found).all())
    require(fine, f"{what}: {name} must be a list of numbers")
    return found


def _of_run(
    path: Path, where: str, decoder: Decoder, temperature: float
) -> tuple[list[Group], int]:
    """The groups of a step that a run wrote, with the tokens and log-probs that it trained on, and the number of rollouts without
    these."""
    parts, step = path.absolute().parts, path.stem.removeprefix("step-")
    text = f"{where}: a rollout of a run, whose tokens lie beside it; give RUN/rollouts/STAGE/step-N.jsonl"
    require(len(parts) > 3 and parts[-3] == "rollouts" and step.isdigit(), text)
    run, stage = Run(path.absolute().parents[2]), parts[-2]
    _check_temperature(path, run, stage, temperature)
    rows, arrays = run.rollouts(stage, int(step)), run.arrays(stage, int(step))
    if arrays is None:
        lost = f"{path}: the run has not kept the tokens of this step ({path.stem}.safetensors)"
        raise UserError(f"{lost}; give another")
    several = f"{path}: {len(rows)} rows for {arrays.sequences} sequences of tokens"
    require(arrays.sequences == len(rows), several)
    found = [(row, arrays.sequence(n)) for n, row in enumerate(rows)]
    kept = [(row, own) for row, own in found if len(own.get("ids", ()))]
    asked = (Problem(row.problem, row.question, row.answer, row.level) for row in rows)
    problem = {one.id: one for one in asked}
    made: dict[tuple[str, str], list[Rollout]] = {}
    for row, own in kept:
        segments = tuple(_segments(row, own))
        said = "".join(decoder.decode(s.ids)[0] for s in segments if s.sampled)
        other = f"{path}: its tokens are of another tokenizer than the model's"
        require(said == row.response, other)
        role = row.role if isinstance(row, EpisodeRow) else ""
        score = Score.failed(row.failure) if row.failure else None
        score = score or Score(row.reward, row.parts, outcome=row.outcome)
        rollout = Rollout(problem[row.problem], row.sample, segments, score, role)
        made.setdefault((row.problem, role), []).append(rollout)
    groups = [Group(problem[name], tuple(members), role) for (name, role), members in made.items()]
    return groups, len(found) - len(kept)


def _check_temperature(path: Path, run: Run, stage: str, temperature: float) -> None:
    """Refuse rollouts of another temperature: their log-probs would make every importance ratio wrong."""
    own = [s for s in stages_of(run.config) if s.get("name") == stage]
    how = own[0].get("sampling") if own else None
    sampled = how.get("temperature", temperature) if isinstance(how, dict) else temperature
    other = f"{path} was sampled at temperature {sampled}, and temperature is {temperature}"
    require(sampled == temperature, f"{other}; set temperature={sampled}")


def _segments(row: RolloutRow, own: Mapping[str, np.ndarray]) -> Iterator[Segment]:
    """The given and the sampled segments, in order."""
    ids, logprob = own["ids"].astype(np.int64), own["logprob"].astype(np.float32)
    sampled = sampled_tokens(own, row.length)
    changes = np.flatnonzero(np.diff(sampled)) + 1
    for start, end in pairwise([0, *changes.tolist(), len(sampled)]):
        if sampled[start]:
            yield Segment(ids[start:end], "", True, logprob[start:end], finish=row.finish)
        else:
            yield Segment(ids[start:end], "", False)


@dataclass(frozen=True, kw_only=True)
class OfflineRLStage(ReferenceStage):
    """Train `model` on the groups in the `data` files, `batch` groups a step. A line is a prompt with responses and rewards, or a
    rollout of a step that a run kept (RUN/rollouts/STAGE/step-N.jsonl). If the file has the log-probs of the sampling policy, the
    algorithm's importance ratio uses them, clipped and corrected by its settings (`correction`, `drop`, `mask_high`). If not, there
    is no correction, and a message says so. New responses of the policy are never sampled or scored."""

    reads = ("rollouts",)
    builds = ("proximal", "reference")
    shares = "batch"
    reads_first = True

    data: tuple[DataName, ...]
    steps: Count = 100
    batch: Several = 16  # groups a step
    max_length: MaxLength = 0
    temperature: Positive = 1.0  # at which the responses were sampled
    algorithm: Algorithm = field(default_factory=GRPO)

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if not self.data:
            yield "give at least one JSONL file of saved groups as data"
        if len(set(self.algorithm.samples(Sampling()))) > 1:
            name = self.algorithm.name
            yield f"{name} compares with an answer that is sampled in another way, which saved groups do not mark; use grpo"
        if self.algorithm.learns_steps:
            yield "supervision=process needs the values of steps, which saved groups do not have"

    def check_data(self, reader: Reader, context: Context, before: Collection[str]) -> None:
        if reader.tokenizer is None:
            return
        longest = length_limit(self.name, self.max_length, reader)
        for path in (path for path in self.data if path not in before):
            read_saved(path, reader.tokenizer, longest, self.temperature)

    def read(self, context: Context, policy: Policy) -> list[Saved]:
        places = [data_place(path, context) for path in self.data]
        tokenizer, longest = policy.tokenizer, length_limit(self.name, self.max_length, policy)
        saved = [read_saved(place, tokenizer, longest, self.temperature) for place in places]
        alike = len({one.known for one in saved}) == 1
        require(alike, f"{self.name}: some files of data have logprobs; give them in all, or none")
        return saved

    def plan(self, policy: Policy, context: Context, before: Mapping[str, Stage]) -> list[str]:
        step = f"a step: {many(self.batch, 'group')}; {many(self.steps, 'step')}"
        later = [f"groups written by {path}: not there yet" for path in self.data if path in before]
        if later:
            return [step, *later]
        saved = self.read(context, policy)
        sizes = [len(r.ids) for one in saved for g in one.groups for r in g.rollouts]
        way = planned_way(self, policy, max(sizes))
        tokens = min(way.tokens, self.batch * sum(sizes) // sum(len(one.groups) for one in saved))
        others = self.role_bytes(policy, tokens)
        memory = training_memory(self, policy, tokens, way.layered, others)
        return [step, *chain(*(one.lines() for one in saved)), memory.line()]

    def dry_run(self) -> DryRun:
        return few_steps(self)

    def run(self, context: Context) -> dict[str, JSON]:
        policy = self.load(context)
        saved = self.read(context, policy)
        for one in saved:
            context.announce(self.name, one.lines())
        known = saved[0].known
        if not known:
            context.announce(self.name, [UNKNOWN], "warning")
        trainer = self.make_trainer(context, policy, self.make_roles(context, policy))
        groups = [group for one in saved for group in one.groups]
        logprobs = None if known else trainer.logprobs
        source = SavedGroups(
            groups, self.batch, context.seed, self.temperature, policy.device, logprobs
        )
        loop = self.train(context, trainer, source, self.schedule())
        context.save_model(self.name, policy, self.lora)
        return {**trained(loop), "trained_on": len(groups), "logprobs_known": known}
