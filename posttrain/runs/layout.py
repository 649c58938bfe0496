"""The layout of a run directory: file names, the fields of a line, and numbers in JSON. Shared by writer and readers.

config.yaml                        the resolved configuration, written once
metrics.jsonl                      one object a step: step, stage, attempt, time, figures
events.jsonl                       one object an event: kind, time, attempt, details
rollouts/STAGE/step-000123.jsonl   one rollout a line
rollouts/STAGE/tokenizer.json      spells the tokens of the arrays
rollouts/STAGE/step-000123.safetensors   per-token arrays, flat, with `starts`; only some steps are kept
alarms/                            what a monitor kept: a batch that could not be trained on, stacks of a step that hung
checkpoints/  export/              written by others
answers.jsonl                      what each trained stage answers to the same prompts, written when the run has ended
summary.json                       results, written when the run has ended
lock, lock.holder                  held by the process that writes, and its name
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path

import numpy as np

from posttrain.errors import require
from posttrain.system.files import check_tree, open_file
from posttrain.types import JSON

CONFIG, METRICS, EVENTS, SUMMARY = "config.yaml", "metrics.jsonl", "events.jsonl", "summary.json"
LOCK, ROLLOUTS, ALARMS, ANSWERS = "lock", "rollouts", "alarms", "answers.jsonl"
# the format of a run directory, recorded in its configuration; the first edition recorded none
FORMAT = 2
UPGRADE = "pip install --upgrade posttrain"
ROW_KEYS = ("step", "stage", "attempt", "time")
EVENT_KEYS = ("kind", "time", "attempt")
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True)
class Row:
    """The metrics of one step. Non-finite values are kept: a NaN loss must be visible."""

    stage: str
    step: int
    attempt: int
    time: float
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EventRow:
    """A single event: a stage's start, a resume, an alarm."""

    kind: str
    time: float
    attempt: int
    details: Mapping[str, JSON]


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One rollout as text. `reward` is None exactly if `failure` names a reason."""

    problem: str  # the problem's id
    level: int
    question: str
    answer: str
    sample: int
    response: str
    reward: float | None
    parts: Mapping[str, float]
    outcome: str
    failure: str | None
    finish: str
    length: int
    version: int  # the oldest policy version that sampled one of its tokens
    attempt: int
    advantage: float | None = None  # the mean of its sampled tokens, if it was trained on


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """The answer of one stage's model to a prompt; `answer` is the right one, if it is known."""

    prompt: str
    answer: str
    held_out: bool  # otherwise trained on
    stage: str
    response: str
    finish: str


@dataclass(frozen=True, slots=True)
class EpisodeRow(RolloutRow):
    """A rollout of several turns, or of a role."""

    role: str = ""
    conversation: Sequence[Sequence[str]] = ()  # ["sampled" or "given", text] of each segment
    paid: Sequence[float] = ()  # the reward of each turn, if turns are rewarded
    # counts of its events: tool/calls, ...
    counts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class TokenArrays:
    """Per-token arrays of N concatenated sequences: sequence n is `[starts[n]:starts[n + 1]]` of each array.

    >>> arrays = TokenArrays(np.array([0, 2, 5]), {"ids": np.arange(5)})
    >>> arrays.sequence(1)["ids"].tolist()
    [2, 3, 4]
    >>> TokenArrays(np.array([0, 2]), {"ids": np.arange(5)})
    Traceback (most recent call last):
    ValueError: array 'ids' has shape (5,); starts end at 2
    """

    starts: np.ndarray  # int64 [N+1]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)  # [T] each

    def __post_init__(self) -> None:
        starts = self.starts
        if starts.ndim != 1 or len(starts) == 0 or starts[0] != 0 or np.any(np.diff(starts) < 0):
            raise ValueError("starts must be N+1 offsets that begin at 0 and never decrease")
        for name, array in self.arrays.items():
            if name == "starts" or array.shape != (int(starts[-1]),):
                shape = f"array {name!r} has shape {array.shape}"
                raise ValueError(f"{shape}; starts end at {starts[-1]}")

    @property
    def sequences(self) -> int:
        return len(self.starts) - 1

    def sequence(self, n: int) -> Mapping[str, np.ndarray]:
        """Return the arrays of sequence n, without those that are NaN throughout: they were measured on other sequences."""
        if not 0 <= n < self.sequences:
            raise IndexError(f"sequence {n} of {self.sequences}")
        span = slice(self.starts[n], self.starts[n + 1])
        arrays = ((name, array[span]) for name, array in self.arrays.items())
        return {name: array for name, array in arrays if not len(array) or (array == array).any()}


def sampled_tokens(held: Mapping[str, np.ndarray], length: int) -> np.ndarray:
    """Return which tokens of a sequence the policy sampled: as recorded, or else the last `length`."""
    size = len(held["ids"])
    return held.get("sampled", np.arange(size) >= size - length).astype(bool)


def require_run(directory: Path | str) -> None:
    """Raise an error for a directory without a run, of a newer format, or with links, pipes or devices in it."""
    check_tree(Path(directory))
    path = Path(directory) / CONFIG
    # the folder of a sweep, or of all runs
    inner = "".join(f"; {one.parent} is one" for one in sorted(path.parent.glob(f"*/{CONFIG}"))[:1])
    require(path.is_file(), f"no run in {directory}: it has no {CONFIG}{inner}")
    with open_file(path) as file:
        # it is the first key, so the file need not be read whole
        found = re.match(rb"format: (\d{1,9})\s", file.read(20))
    newer = found is not None and int(found[1]) > FORMAT
    text = "was written by a newer posttrain (format {}; this one reads up to {}): {}"
    require(not newer, f"{directory} {text.format(found and int(found[1]), FORMAT, UPGRADE)}")


def rollout_file(directory: Path, stage: str, step: int, suffix: str = ".jsonl") -> Path:
    """Return the path of a step's rollouts. The stage may come from users or from the browser, so it must be a plain name."""
    rule = "use letters, digits, '-', '_' and '.', not starting with '.'"
    require(plain_name(stage), f"stage {stage!r} is not a plain name: {rule}")
    require(step >= 0, f"step must not be negative, not {step}")
    return directory / ROLLOUTS / stage / f"step-{step:06d}{suffix}"


def plain_name(name: str) -> bool:
    """Whether a name is safe as one component of a path, on every system.

    >>> plain_name("rl-2"), plain_name("../rl"), plain_name(".hidden"), plain_name("")
    (True, False, False, False)
    """
    return re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", name) is not None


def stages_of(config: Mapping[str, JSON]) -> list[dict[str, JSON]]:
    """Return the stages of a configuration that was read from a run; what is no stage is left out.

    >>> stages_of({"stages": [{"name": "rl"}, 3]}), stages_of({"stages": None}), stages_of({})
    ([{'name': 'rl'}], [], [])
    """
    found = config.get("stages")
    return [stage for stage in found if isinstance(stage, dict)] if isinstance(found, list) else []


def step_of(path: Path) -> int | None:
    """Return the step in a rollout file's name, or None for any other file.

    >>> step_of(Path("step-000123.jsonl")), step_of(Path("notes.jsonl"))
    (123, None)
    """
    match = re.fullmatch(r"step-(\d+)", path.stem)
    return int(match[1]) if match else None


def dump_line(record: Mapping[str, JSON]) -> bytes:
    """Return one JSON object on one line. ASCII only, so no text of a model can end a line or reach a terminal unescaped."""
    try:
        text = _ENCODER.encode(record)
    except (TypeError, ValueError):  # a number that is not finite, or a key that is not text
        text = _ENCODER.encode(encode(record))
    return text.encode() + b"\n"


def encode(value: JSON) -> JSON:
    """Return a JSON value with plain Python numbers, and the strings "nan", "inf" and "-inf" for non-finite ones.

    Bare NaN is not JSON and breaks other readers; null would hide which of the three it was.

    >>> encode({"loss": float("-inf"), "count": np.int64(3), "parts": (0.5,)})
    {'loss': '-inf', 'count': 3, 'parts': [0.5]}
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    raise TypeError(f"a run can hold JSON values, not {type(value).__name__}")


# `encode` converts what the encoder does not know (NumPy numbers, mappings)
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=encode)


def decode_number(value: JSON) -> float:
    """Undo `encode` for a number; raises ValueError for any other value.

    >>> decode_number("-inf"), decode_number(2)
    (-inf, 2.0)
    """
    if isinstance(value, str) and value in NON_FINITE:
        return NON_FINITE[value]
    if (isinstance(value, int | float) and abs(value) < 2**1000) or value != value:
        return float(value)
    raise ValueError(f"not a number: {value!r}")


def parse_object(line: bytes) -> dict[str, JSON] | None:
    """Return the object on a line; None if it is not one, which a killed writer or a full disk may leave."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # malformed JSON or UTF-8, nested too deep
        return None
    return record if isinstance(record, dict) else None


def json_lines(path: Path) -> Iterator[dict[str, JSON] | None]:
    """Yield the objects of a JSONL file in order; None for a line that is not one."""
    try:
        stream = open_file(path)
    except FileNotFoundError:
        return
    with stream:
        yield from map(parse_object, stream)


def whole_number(value: JSON, first: int = 0) -> int | None:
    """Return a valid whole number from a run's file, else None."""
    return value if type(value) is int and first <= value < 2**53 else None


def attempt_of(directory: Path, stage: str, step: int) -> int:
    """Return the attempt that wrote a step's rollouts; all lines of a file belong to one. 0 if it is not known."""
    record = next(json_lines(rollout_file(directory, stage, step)), None)
    return whole_number(record.get("attempt", 0)) or 0 if record else 0
