"""Reads a run directory: while it is written, after the run was killed, or years later. Never writes, never imports torch.

run = Run(Path("runs/quickstart"))
steps, reward = run.column("reward", stage="rl")
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from posttrain.data.safe_readers import read_yaml
from posttrain.errors import UserError, require
from posttrain.runs import layout
from posttrain.runs.layout import AnswerRow, EpisodeRow, EventRow, RolloutRow, Row, TokenArrays
from posttrain.system.files import MAX_JSON, read_bytes, read_json, read_text
from posttrain.types import JSON


class Run:
    """One run directory. Every call reads the files again, so that a live run can be followed."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        layout.require_run(directory)

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @property
    def config(self) -> Mapping[str, JSON]:
        """Return the resolved configuration."""
        path = self.directory / layout.CONFIG
        config = read_yaml(read_text(path, MAX_JSON), str(path))
        require(isinstance(config, dict), f"{path} does not hold a configuration")
        return dict(config)

    @property
    def configured(self) -> list[str]:
        """Return the names of the configured stages, in order."""
        return [str(stage.get("name")) for stage in layout.stages_of(self.config)]

    @property
    def summary(self) -> Mapping[str, JSON] | None:
        """Return the summary, or None until the run has ended."""
        try:
            return read_json(self.directory / layout.SUMMARY)
        except FileNotFoundError:
            return None

    def answers(self) -> list[AnswerRow]:
        """Return each trained stage's answers to the same prompts; empty if the run has not ended or trained only one model."""
        records = layout.json_lines(self.directory / layout.ANSWERS)
        names = {f.name for f in fields(AnswerRow)}
        return [AnswerRow(**record) for record in records if record and record.keys() == names]

    def events(self) -> list[EventRow]:
        """Return all events of all attempts, in the order in which they were written."""
        records = layout.json_lines(self.directory / layout.EVENTS)
        return [row for record in records if record and (row := parse_event(record)) is not None]

    def metrics(self, stage: str | None = None) -> list[Row]:
        """Return one row per step, by stage and step, of the attempts that count."""
        records = layout.json_lines(self.directory / layout.METRICS)
        rows = [row for record in records if record and (row := parse_row(record)) is not None]
        rows = supersede(rows, self.events())
        return [row for row in rows if stage is None or row.stage == stage]

    def stages(self) -> list[str]:
        """Return the stages that have metrics, in the order in which they ran."""
        return list(dict.fromkeys(row.stage for row in self.metrics()))

    def column(self, name: str, stage: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps and values of one metric, where it was recorded."""
        rows = [row for row in self.metrics(stage) if name in row.figures]
        steps, values = [row.step for row in rows], [row.figures[name] for row in rows]
        return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)

    def rollout_steps(self, stage: str) -> list[int]:
        """Return the steps of a stage whose rollouts were kept and still count."""
        folder = layout.rollout_file(self.directory, stage, 0).parent
        steps = (layout.step_of(path) for path in folder.glob("step-*.jsonl"))
        found = sorted(step for step in steps if step is not None)
        history = self._history()
        if not history.resumes:
            return found  # nothing can be superseded, so no file is opened
        attempts = {step: layout.attempt_of(self.directory, stage, step) for step in found}
        return [step for step in found if not history.superseded(stage, step, attempts[step])]

    def rollouts(self, stage: str, step: int) -> list[RolloutRow]:
        """Return the rollouts of a step, in the order in which they were written; empty if none count."""
        records = layout.json_lines(layout.rollout_file(self.directory, stage, step))
        rows = [row for record in records if record and (row := parse_rollout(record)) is not None]
        history = self._history()
        return [row for row in rows if not history.superseded(stage, step, row.attempt)]

    def stage_rows(self, stage: str, name: str) -> list[dict[str, JSON]]:
        """Return the objects of a stage's file: one per line or, for a .json file, one in all; empty without such a file."""
        require(layout.plain_name(stage), f"stage {stage!r} is not a plain name")
        path = self.directory / "stages" / stage / name
        if not path.is_file():
            return []
        rows = list(layout.json_lines(path)) if ".jsonl" in name else [read_json(path)]
        found = [row for row in rows if row is not None]
        require(len(found) == len(rows), f"{path} is damaged: it should hold JSON objects")
        return found

    def _history(self) -> History:
        records = layout.json_lines(self.directory / layout.METRICS)
        return History.of(self.events(), (str(r["stage"]) for r in records if r and "stage" in r))

    def arrays(self, stage: str, step: int) -> TokenArrays | None:
        """Return the per-token arrays of a step, or None if they were not kept."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        path = layout.rollout_file(self.directory, stage, step, ".safetensors")
        try:
            tensors = load(read_bytes(path))
            return TokenArrays(tensors.pop("starts"), tensors)
        except FileNotFoundError:
            return None
        except (SafetensorError, KeyError, ValueError, TypeError, OverflowError) as error:
            raise UserError(f"{path} is damaged: {str(error)[:200]}") from None


@dataclass(frozen=True, slots=True)
class History:
    """Where attempts resumed, and the order of stages. This decides which rows still count."""

    resumes: tuple[tuple[int, str, int], ...]  # attempt, stage, step
    order: Mapping[str, int]
    kept: Mapping[str, int]  # stage -> the last attempt that found it done and unchanged

    @classmethod
    def of(cls, events: Sequence[EventRow], stages: Iterable[str]) -> History:
        resumes = tuple(
            (e.attempt, str(e.details.get("stage")), step)
            for e in events
            # -1: from before the first step
            if e.kind == "resume"
            and (step := layout.whole_number(e.details.get("step"), -1)) is not None
        )
        kept = {str(e.details.get("stage")): e.attempt for e in events if e.kind == "kept"}
        # the order matters only if rows may be superseded; for a run that never resumed it need not be read
        order = enumerate(dict.fromkeys(stages)) if resumes else ()
        return cls(resumes, {stage: place for place, stage in order}, kept)

    def superseded(self, stage: str, step: int, attempt: int) -> bool:
        """Whether a later attempt went back to before this step: to an earlier step of the stage, or to an earlier stage
        without then finding this one done and unchanged."""
        last = len(self.order)  # a stage without metrics has not finished its first step
        place = self.order.get(stage, last)
        whole = _whole(stage)
        # attempts that went on after this step built on it, even if they had gone through an earlier stage again
        built = (later for later, name, after in self.resumes if name == stage and after >= step)
        kept = max(self.kept.get(stage, 0), self.kept.get(whole, 0), *built)
        return any(
            step > resumed_step
            if stage == resumed_stage
            else place > self.order.get(resumed_stage, last)
            and kept < later
            # another member of the ensemble, which records itself where it resumed
            and not (whole in self.order and whole == _whole(resumed_stage))
            for later, resumed_stage, resumed_step in self.resumes
            if later > attempt
        )


def _whole(stage: str) -> str:
    """Return the stage of a member of an ensemble: reward for reward-1."""
    return re.sub(r"-\d+$", "", stage)


def supersede(rows: Sequence[Row], events: Sequence[EventRow]) -> list[Row]:
    """Return the rows that count, by stage in order of appearance and by step.

    For one (stage, step) the last attempt wins; rows that one attempt wrote for the same step are merged. If an attempt resumed
    after step n, later steps of earlier attempts, and their later stages, do not count.
    """
    history = History.of(events, (row.stage for row in rows))
    order = {stage: place for place, stage in enumerate(dict.fromkeys(row.stage for row in rows))}
    current: dict[tuple[str, int], Row] = {}
    for row in rows:
        if history.superseded(row.stage, row.step, row.attempt):
            continue
        held = current.get((row.stage, row.step))
        if held is None or row.attempt > held.attempt:
            current[row.stage, row.step] = row
        elif row.attempt == held.attempt:
            current[row.stage, row.step] = replace(row, figures={**held.figures, **row.figures})
    return sorted(current.values(), key=lambda row: (order[row.stage], row.step))


def parse_event(record: Mapping[str, JSON]) -> EventRow | None:
    """Parse a line of events.jsonl; None for JSON of another form."""
    details = {key: value for key, value in record.items() if key not in layout.EVENT_KEYS}
    attempt, kind = layout.whole_number(record.get("attempt", 0)), record.get("kind")
    with suppress(ValueError):
        time = layout.decode_number(record.get("time", 0.0))
        if attempt is not None and isinstance(kind, str):
            return EventRow(kind, time, attempt, details)
    return None


def parse_row(record: Mapping[str, JSON]) -> Row | None:
    """Parse a line of metrics.jsonl; None for JSON of another form. Values that are not numbers are left out."""
    stage, step = record.get("stage"), layout.whole_number(record.get("step"))
    attempt = layout.whole_number(record.get("attempt"))
    if not isinstance(stage, str) or step is None or attempt is None:
        return None
    try:
        time = layout.decode_number(record.get("time"))
    except ValueError:
        return None
    figures = {}
    for name, value in record.items():
        if name not in layout.ROW_KEYS:
            with suppress(ValueError):
                figures[name] = layout.decode_number(value)
    return Row(stage, step, attempt, time, figures)


def parse_rollout(record: Mapping[str, JSON]) -> RolloutRow | None:
    """Parse a line of a rollout file; None if a field is missing, as another program might write."""
    kind = EpisodeRow if "conversation" in record else RolloutRow
    known = {field.name: record[field.name] for field in fields(kind) if field.name in record}
    try:
        for name in ("advantage", "reward"):
            if known.get(name) is not None:
                known[name] = layout.decode_number(known[name])
        row = kind(**known)
    except (TypeError, ValueError):
        return None
    return row if _well_typed(row) else None


def _well_typed(row: RolloutRow) -> bool:
    counts = (row.level, row.sample, row.length, row.version, row.attempt)
    texts = [row.problem, row.question, row.answer, row.response, row.outcome, row.finish]
    texts += [] if row.failure is None else [row.failure]
    if isinstance(row, EpisodeRow):
        parts = row.conversation if isinstance(row.conversation, list) else [None]
        pairs = all(isinstance(part, list) and len(part) == 2 for part in parts)
        texts += [row.role, *(word for part in parts for word in part or ())] if pairs else [None]  # type: ignore[list-item]
    figures = row.parts.values() if isinstance(row.parts, dict) else [None]
    numbers = all(type(count) is int and abs(count) < 2**53 for count in counts)
    measured = all(isinstance(value, int | float | str | None) for value in figures)
    spelled = isinstance(row.parts, dict) and all(isinstance(text, str) for text in texts)
    return numbers and measured and spelled
