"""Reads groups of responses that were sampled and scored before: by a run of posttrain, or by another program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.data.demonstrations import completion_example
from posttrain.data.records import read_jsonl
from posttrain.data.text import Decoder
from posttrain.errors import UserError, many, require
from posttrain.runs.layout import EpisodeRow, RolloutRow, sampled_tokens, stages_of
from posttrain.runs.read import Run
from posttrain.stages._material import until_end
from posttrain.types import JSON, Group, Problem, Rollout, Score, Segment, as_number

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
