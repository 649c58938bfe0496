"""Core data types: frozen, slotted, independent of the rest of the package.

Dimension letters used as suffixes everywhere: P problems, G group, N sequences, T tokens, V vocabulary. Per-token arrays are
aligned with their token: `logprob_T[t]` is log p(ids[t] | ids[<t]), and the first token of a sequence has none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import partial
from operator import add, index
from typing import TYPE_CHECKING, Annotated, Any, Protocol, runtime_checkable

import numpy as np

from posttrain.errors import Count, NotNegative, Range, UserError, Whole, check_fields, require

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

UNSCORED = "unscored"
COUNTED = "counted"  # the key of `Problem.facts` that says how many items each part of a score averages over
TURNS = "turns"  # the part of a score that says what its turns were paid
THINK, THINK_END = "<think>", "</think>"  # around a block of reasoning
# outcomes of episodes that a limit ended
ENDINGS = ("turn limit", "token limit", "thinking limit", "time limit", "context full")
JSON = Any  # null, bool, int, float, str, and lists and dicts of these


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, before the chat template renders it.

    >>> Message("user", "12+34=")
    Message(role='user', content='12+34=')
    """

    role: str  # system | user | assistant | tool
    content: str
    # further fields for the chat template: tool_calls, name, reasoning_content, ...
    more: Mapping[str, JSON] = field(default_factory=dict, repr=False, hash=False)

    def row(self) -> dict[str, JSON]:
        """The message as a dict, for JSON files and chat templates."""
        return {"role": self.role, "content": self.content, **self.more}


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and everything needed to score an answer to it. Groups are formed by `id`, unique within the task, never by text."""

    id: str
    question: str
    answer: str = ""
    level: int = 0
    facts: Mapping[str, JSON] = field(default_factory=dict)


def as_number(value: Any, what: str) -> float:
    """Convert any real number to a float: bool, int, Fraction, Decimal, NumPy scalar, or an array or tensor without dimensions.

    >>> as_number(np.float32(0.5), "a reward"), as_number(True, "a reward")
    (0.5, 1.0)
    >>> as_number("0.5", "a reward")
    Traceback (most recent call last):
    TypeError: a reward must be a number, not str
    """
    if type(value) is float:
        return value
    # NumPy's kinds of real numbers; text, complex numbers and dates have other kinds
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    several = getattr(value, "ndim", 0) > 0
    if not hasattr(value, "__float__") or kind not in "biuf" or several:
        shape = f" of shape {tuple(value.shape)}" if several and hasattr(value, "shape") else ""
        raise TypeError(f"{what} must be a number, not {type(value).__name__}{shape}")
    return float(value)


def _as_text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be text, not {type(value).__name__}")
    return str.__str__(value)  # the plain text of a subclass of str, such as a StrEnum


@dataclass(frozen=True, slots=True)
class Score:
    """The result of a reward: a value with its named parts, or a named failure. A value is always finite: a reward that fails
    returns a failure, not NaN and not 0. Numbers of any type become floats.

    >>> Score(1.0, parts={"format": 1.0}).valid
    True
    >>> Score.failed("timeout").valid
    False
    >>> Score(float("nan"))
    Traceback (most recent call last):
    ValueError: a score must be finite, not nan; use Score.failed(reason) where there is no value
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[tuple[int, float], ...] = ()  # (character position where a step ends, its value)
    outcome: str = ""  # correct, wrong, unparseable, ...
    failure: str | None = None  # why there is no value: timeout, crash, ...

    def __post_init__(self) -> None:
        if (self.value is None) != (self.failure is not None):
            raise ValueError("a score has either a value or a failure")
        value, parts, steps = self.value, self.parts, self.steps
        plain = type(value) is float and type(parts) is dict and type(steps) is tuple
        bare = not parts and not steps and type(self.outcome) is str
        if plain and bare and math.isfinite(value or 0.0):
            object.__setattr__(self, "parts", {})  # its own
            return
        put = partial(object.__setattr__, self)
        if self.value is not None:
            put("value", as_number(self.value, "a score"))
        named = [(_as_text(name, "a part's name"), value) for name, value in self.parts.items()]
        put("parts", {k: as_number(v, f"the part {k!r} of a score") for k, v in named})
        put("steps", tuple([(index(end), as_number(v, "a step's value")) for end, v in self.steps]))
        put("outcome", _as_text(self.outcome, "an outcome"))
        if self.failure is not None:
            put("failure", _as_text(self.failure, "a failure"))
        for value in (self.value, *self.parts.values(), *[v for _, v in self.steps]):
            if value is not None and not math.isfinite(value):
                hint = "use Score.failed(reason) where there is no value"
                raise ValueError(f"a score must be finite, not {value}; {hint}")

    @property
    def valid(self) -> bool:
        return self.failure is None

    @property
    def solved(self) -> bool:
        """Whether the problem counts as solved: the outcome is correct or, without an outcome, the value is at least 1."""
        full = self.value is not None and self.value >= 1.0
        return self.outcome in ("correct", "pass") if self.outcome else full

    @classmethod
    def failed(cls, failure: str, outcome: str = "error") -> Score:
        return cls(None, outcome=outcome, failure=failure)

    @classmethod
    def pending(cls, outcome: str = "") -> Score:
        """The placeholder of a rollout that is not scored yet. A non-empty `outcome` replaces that of the later score."""
        return cls(None, outcome=outcome, failure=UNSCORED)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Temperature 0 means argmax. A stop id ends a response and belongs to it."""

    max_new_tokens: Count = 256
    temperature: NotNegative = 1.0
    top_k: Annotated[int, Range(ge=0, text="0 (all) or a number of tokens")] = 0
    top_p: Annotated[float, Range(gt=0, le=1)] = 1.0
    min_new_tokens: Whole = 0  # stop ids are ignored before this many tokens

    def __post_init__(self) -> None:
        check_fields(self)
        drawn = self.temperature == 0 or 1e-6 <= self.temperature <= 1e6  # float32 can divide by it
        bounds = "temperature must be 0 (the most likely token) or from 1e-6 to 1e6"
        require(drawn, f"{bounds}, not {self.temperature}")
        few = f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}"
        require(self.min_new_tokens <= self.max_new_tokens, f"{few}; lower it")

    def __str__(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @property
    def truncated(self) -> bool:
        """Whether top-k or top-p cuts the support, so that tokens are not drawn from the policy's full softmax."""
        return self.top_k > 0 or self.top_p < 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one sampled turn. The first turn of a session carries the whole prompt, a later turn only the ids that were
    added since the turn before.

    >>> Request((5, 6), seed=3, sampling=Sampling(8), session=1).turn
    0
    """

    ids: tuple[int, ...]  # the new ids of this turn
    seed: int  # seeds the draws of this turn, and of no other
    sampling: Sampling
    session: int = 0  # unique among the sessions that the sampler holds
    turn: int = 0
    # First turns with the same group number have the same ids: the sampler prefills them once. -1: no group.
    group: int = -1
    keep: bool = False  # keep the session's KV cache for another turn, until `cancel`
    model: str = ""  # "" is the policy; else the name of a frozen checkpoint

    def __post_init__(self) -> None:
        require(self.ids, "a prompt needs at least one token, to predict the first of the answer")
        if self.turn < 0:
            raise UserError(f"turns are counted from 0, not {self.turn}")


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The sampled tokens of one request, as ids that are never decoded and re-encoded, and their log-probs when they were sampled."""

    ids: np.ndarray  # int64 [T]
    logprobs: np.ndarray  # float32 [T]
    versions: np.ndarray  # int32 [T]: the version of the weights that sampled each token
    finish: str  # stop | length
    # int16 [all tokens of the session so far, layers x experts a token]: the experts of a mixture of experts, if recorded
    routes: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters of a sampler since it was created."""

    prefilled: int = 0  # tokens of prompts and later turns; a group's prompt counts once
    sampled: int = 0  # tokens
    # tokens prefilled again: after `publish`, for dropped sessions, for failed workers
    recomputed: int = 0
    dropped_sessions: int = 0  # sessions whose kept cache was freed because memory was short
    # processes that died or hung; others took over their requests, more slowly
    failed_workers: int = 0

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(*map(add, astuple(self), astuple(other)))


@runtime_checkable
class Sampler(Protocol):
    """Generates completions for requests: the engine in this process, a server, workers elsewhere, a simulator."""

    @property
    def capacity(self) -> int:
        """How many rows it decodes at once."""

    @property
    def statistics(self) -> Statistics: ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests and return at once; earlier requests may still be decoding."""

    def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
        """Run at most one burst of decoding and return the finished requests. The list may be empty."""

    def cancel(self, sessions: Collection[int]) -> None:
        """Stop decoding these sessions and free their caches. Unknown sessions are ignored."""

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Sample with these weights from now on, as `version`. Without `weights`, use the parameters shared with the trainer as
        they are now. Kept caches and rows in flight are recomputed from their ids, unless the sampler was told to keep them."""

    def release(self) -> None:
        """Free memory, for example before training."""

    def close(self) -> None:
        """End its processes. The sampler cannot be used afterwards."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive tokens that were either all sampled by the policy or all given to it (prompt, tool output)."""

    ids: np.ndarray  # int64 [T]
    text: str
    sampled: bool
    logprobs: np.ndarray | None = None  # float32 [T], when sampled
    offsets: np.ndarray | None = None  # int64 [T]: where in `text` each token's characters end
    # int32 [T], when sampled: the version of the weights that sampled each token
    versions: np.ndarray | None = None
    finish: str = ""  # stop | length, when sampled
    reward: float = 0.0  # of this turn, where the task pays by turn


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One conversation of an episode: its segments in order, and its score. The score's value is the whole return, including the
    rewards of single turns."""

    problem: Problem
    sample: int  # the index of the episode among those of its problem
    segments: tuple[Segment, ...]
    score: Score
    role: str = ""  # the policy's role, where an episode has several
    answer: str | None = None  # the text that the task scores; None: the text of all turns
    # event counts of the episode: tool/calls, ...
    counts: Mapping[str, float] = field(default_factory=dict)
    routes: np.ndarray | None = None  # those of the last completion, which cover all tokens

    @property
    def ids(self) -> np.ndarray:
        return np.concatenate([s.ids for s in self.segments])

    @property
    def mask(self) -> np.ndarray:
        """bool [T]: the policy sampled the token."""
        return np.concatenate([np.full(len(s.ids), s.sampled) for s in self.segments])

    @property
    def response(self) -> str:
        """The text the policy wrote, in all turns."""
        return "".join(s.text for s in self.segments if s.sampled)

    @property
    def openings(self) -> list[int]:
        """Character positions in `response` of the turns whose reasoning block the chat template opened."""
        found, place, given = [], 0, ""
        for segment in self.segments:
            if segment.sampled and given.rstrip().endswith(THINK):
                found.append(place)
            place += len(segment.text) if segment.sampled else 0
            given = "" if segment.sampled else segment.text
        return found

    @property
    def judged(self) -> str:
        """The response as a reward reads it, including a `<think>` that the chat template wrote for the policy. Without that tag,
        the text of a reasoning block that never ends would count as the answer."""
        if self.answer is not None:
            return self.answer
        text = self.response
        for place in reversed(self.openings):
            text = text[:place] + THINK + text[place:]
        return text

    @property
    def length(self) -> int:
        return sum(len(s.ids) for s in self.segments if s.sampled)

    @property
    def paid(self) -> float:
        """The sum of the rewards of single turns."""
        return sum(s.reward for s in self.segments)

    def part(self, name: str) -> float | None:
        """The named part of the score, if it has one. An episode whose turns earned nothing has earned 0 in its turns."""
        return self.score.parts.get(name, 0.0 if name == TURNS and self.score.valid else None)

    @property
    def turns(self) -> int:
        return sum(s.sampled for s in self.segments)

    @property
    def finish(self) -> str:
        """How the last turn ended, or "length" if any turn was cut off at its limit."""
        ends = [s.finish for s in self.segments if s.sampled]
        return "length" if "length" in ends else (ends or [""])[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The rollouts of one problem and one role, over which baselines are computed. Groups may differ in size."""

    problem: Problem
    rollouts: tuple[Rollout, ...]
    role: str = ""

    @property
    def rewards(self) -> list[float]:
        """The values of the rollouts that have one."""
        return [r.score.value for r in self.rollouts if r.score.value is not None]


class Rating(Protocol):
    """A reward that runs a model in this process, on many rollouts at once: a reward model, an ensemble, an implicit reward."""

    def rate(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """Return one score for each rollout. The score that a rollout already has is its task's."""

    @property
    def models(self) -> Sequence[Module]:
        """The frozen networks; a checkpoint records a checksum of their weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A sequence from a data set: its ids, and which of them carry loss (never the first)."""

    ids: np.ndarray  # int64 [T]
    mask: np.ndarray  # bool [T]
    unit: int = -1  # examples of one unit (a pair, a ranking) stay together; -1: a unit of its own
    # the label: in a pair or ranking the higher is preferred, by the margin between them; else 1 good, 0 bad
    reward: float = float("nan")
    # float32 [T]: the label of a step at the token where it ends, NaN elsewhere
    steps: np.ndarray | None = None


class _Columns:
    """Named tensors, read as attributes: [T] per token, with names that end in _T, or [N] per sequence, with names in _N."""

    __slots__ = ()
    columns: Mapping[str, Tensor]

    def __getattr__(self, name: str) -> Tensor:
        if name.endswith(("_T", "_N")) and name in self.columns:
            return self.columns[name]
        kind = type(self).__name__
        if not name.endswith(("_T", "_N")):
            raise AttributeError(f"{kind} has no {name}; the name of a column ends in _T or _N")
        unfilled = "no role of the algorithm and no method before this one filled it"
        known = ", ".join(sorted(self.columns)) or "none"
        raise AttributeError(f"the {kind} has no column {name}: {unfilled}; there are {known}")


@dataclass(frozen=True, slots=True, eq=False)
class Batch(_Columns):
    """N sequences concatenated without padding: all the tokens of an optimizer step, or of one of its micro-batches.

    `columns` holds further tensors, read as attributes and set by `replace`. Packing, cutting and gathering treat all columns alike.
    Reading a column that nothing has filled is an error. The columns in use:

    rollout_N    int64: the index of the sequence's rollout among all rollouts of the step, in the order of the groups
    step_T       float32: the reward or label of a reasoning step, at the token where it ends; NaN elsewhere
    reference_T  log-prob under the reference model
    value_T      the critic's value, before the update
    proximal_T   log-prob under the policy at the start of the step
    teacher_T    log-prob under a teacher, which may have read another prompt
    advantage_T, return_T
    token_reward_T  float32: the reward of every token, where a critic estimates advantages
    weight_T     the reduction: the loss is a plain sum of weight * loss
    weight_N     the same for losses per sequence or per unit
    stale_T      bool: another policy sampled the token, so its log-prob is expected to differ
    baseline_N   the baseline of a sequence
    bonus_N      the weight of an exploration term, in addition to weight_N
    episode_N    int64: the index of the sequence's episode, where an episode has several sequences in a group
    part/NAME_N  float32: a part of the score, where the algorithm learns from parts; NaN where there is no score
    routes_T     int16 [T, layers x experts a token]: the experts that the sampler chose; -1 where unknown
    paid_T       float32: the reward of a turn, at its last token; included in reward_N; present only where turns are paid
    """

    ids_T: Tensor  # int64
    starts: tuple[int, ...]  # N+1 offsets into T
    sequence_T: Tensor  # int64: the index of the token's sequence
    mask_T: Tensor  # bool: the token carries loss
    behaviour_T: Tensor  # float32: log-prob when sampled; 0 where not sampled
    reward_N: Tensor  # float32: a score, or an example's label; NaN where there is none
    valid_N: Tensor  # bool: the sequence has a score and counts in its group's baseline
    group_N: Tensor  # int64: the index of the sequence's group
    unit_N: tuple[int, ...]  # non-decreasing; micro-batches are cut only where it changes
    truncated_N: Tensor  # bool: the response ended at the length limit
    temperature: float = 1.0
    resting: frozenset[str] = frozenset()  # names of the learners that this step does not update
    learned: frozenset[str] = frozenset()  # names of the learners that already have their gradient
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    # host copies, so that the next micro-batch can be cut while the device still works on this one
    ids: np.ndarray | None = None  # of ids_T
    mask: np.ndarray | None = None  # of mask_T; `replace` drops it when it sets another mask_T

    @property
    def sequences(self) -> int:
        return len(self.starts) - 1

    @property
    def tokens(self) -> int:
        return self.starts[-1]

    def replace(self, **changes: Any) -> Batch:
        """Return the batch with other fields or columns. None removes a column."""
        own = {name: changes.pop(name) for name in list(changes) if name in _BATCH_FIELDS}
        if "mask_T" in own:
            own.setdefault("mask", None)
        if changes:
            columns = {**self.columns, **own.get("columns", {}), **changes}
            own["columns"] = {name: c for name, c in columns.items() if c is not None}
        return replace(self, **own)


_BATCH_FIELDS = frozenset(f.name for f in fields(Batch))


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """The hidden states that predict the M loss tokens of a batch, and the head that turns them into logits. A divergence over the
    whole vocabulary is computed from these in chunks, because [M, V] would not fit in memory."""

    at_M: Tensor  # int64: the positions of the loss tokens in the batch
    hidden_MH: Tensor
    head: Any  # ops.logprobs.Head


class Outputs(_Columns):
    """The results of the forward passes, as columns aligned with the batch's tokens. Reading a missing column is an error.

    logprob_T  float32: log p of the token at the batch's temperature, where a policy is trained
    entropy_T  float32: entropy of the distribution that predicts the token
    value_T    the critic's value of the state before the token
    score_T    the scorer's output for the sequence up to and including the token
    rerouted_T share of layers whose router would choose other experts than the sampler's, which are replayed
    balance_T  terms of the routers' auxiliary loss, where a mixture of experts is trained (ops/experts.py)
    """

    __slots__ = ("columns", "predictions")

    def __init__(
        self,
        logprob_T: Tensor | None = None,
        entropy_T: Tensor | None = None,
        predictions: Mapping[str, Prediction] | None = None,
        **columns: Tensor | None,
    ):
        given = {"logprob_T": logprob_T, "entropy_T": entropy_T, **columns}
        self.columns = {name: c for name, c in given.items() if c is not None}
        self.predictions = dict(predictions or {})  # keyed by `policy` or the name of a role

    def join(self, other: Outputs) -> Outputs:
        """Merge with the outputs of another pass over the same tokens."""
        return self.replaced({**self.columns, **other.columns}, other.predictions)

    def take(self, start: int, end: int) -> Outputs:
        """Return the columns of the tokens from `start` to `end`."""
        return self.replaced({name: column[start:end] for name, column in self.columns.items()})

    def replaced(
        self, columns: Mapping[str, Tensor], predictions: Mapping[str, Prediction] | None = None
    ) -> Outputs:
        """Return outputs with these columns, and further predictions."""
        made = Outputs(predictions={**self.predictions, **(predictions or {})})
        made.columns = dict(columns)
        return made


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One term of a loss: sum(weight * loss). Weights are normalised over the whole step, so terms add over micro-batches and
    ranks."""

    name: str
    loss: Tensor
    weight: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """A figure that can be merged: total / count, a plain sum if count is None, or the `largest` or `smallest` of `count` values. A
    count of 0 gives NaN: nothing was measured. Keeping total and count apart prevents a mean of means.

    >>> Metric("reward", 3.0, 4).value
    0.75
    """

    name: str
    total: Tensor | float
    count: Tensor | float | None
    largest: bool = False
    smallest: bool = False

    @property
    def value(self) -> float:
        if self.count is None:
            return float(self.total)
        count = float(self.count)
        whole = 1.0 if self.largest or self.smallest else count
        return float(self.total) / whole if count else float("nan")


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """What an algorithm returns for a micro-batch: the terms of its loss, and metrics."""

    terms: tuple[Term, ...]
    metrics: tuple[Metric, ...] = ()


def part_column(name: str) -> str:
    """The name of the batch column that holds a part of the scores; see `Algorithm.learns_parts`."""
    return f"part/{name}_N"


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The groups that a step trains on, and how many more the algorithm wants before the step starts. Without any group the loop
    skips the update."""

    groups: tuple[Group, ...]
    refill: int = 0
    metrics: tuple[Metric, ...] = ()
