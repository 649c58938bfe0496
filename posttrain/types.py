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

from posttrain.errors import Count, NotNegative, Range, Whole, check_fields, require

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

UNSCORED = "unscored"
THINK, THINK_END = "<think>", "</think>"  # around a block of reasoning
# outcomes of episodes that were ended by a limit
ENDINGS = ("turn limit", "token limit", "thinking limit", "time limit", "context full")
JSON = Any  # null, bool, int, float, str, list and dict of these: what a checkpoint's JSON can hold


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation, before it is rendered.

    >>> Message("user", "12+34=")
    Message(role='user', content='12+34=')
    """

    role: str  # system | user | assistant | tool
    content: str
    # what else the chat template is given: tool_calls, name, reasoning_content, ...
    more: Mapping[str, JSON] = field(default_factory=dict, repr=False, hash=False)

    def row(self) -> dict[str, JSON]:
        """As a file and a template have it."""
        return {"role": self.role, "content": self.content, **self.more}


# of a problem's facts: how many things each named part of a score is a share of
COUNTED = "counted"


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with what is needed to score an answer. `id` is unique in its task: groups form by it, never by text."""

    id: str
    question: str
    answer: str = ""
    level: int = 0
    facts: Mapping[str, JSON] = field(default_factory=dict)


def as_number(value: Any, what: str) -> float:
    """Any real number as a float: a bool, an int, a Fraction, a Decimal, a NumPy scalar, an array or a tensor of no dimensions.

    >>> as_number(np.float32(0.5), "a reward"), as_number(True, "a reward")
    (0.5, 1.0)
    >>> as_number("0.5", "a reward")
    Traceback (most recent call last):
    TypeError: a reward must be a number, not str
    """
    if type(value) is float:
        return value
    # of NumPy: neither text nor complex numbers nor dates
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    several = getattr(value, "ndim", 0) > 0
    if not hasattr(value, "__float__") or kind not in "biuf" or several:
        shape = f" of shape {tuple(value.shape)}" if several and hasattr(value, "shape") else ""
        raise TypeError(f"{what} must be a number, not {type(value).__name__}{shape}")
    return float(value)


def _as_text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be text, not {type(value).__name__}")
    return str.__str__(value)  # of a subclass, such as an enumeration's, the text itself


@dataclass(frozen=True, slots=True)
class Score:
    """What a reward says: a value with its named parts, or a named failure. Never NaN, never a failure dressed as 0. Numbers of any
    kind become floats.

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
    steps: tuple[tuple[int, float], ...] = ()  # (character position where the step ends, its value)
    outcome: str = ""  # correct, wrong, unparseable, ...
    failure: str | None = None  # timeout, crash, ...: why there is no value

    def __post_init__(self) -> None:
        if (self.value is None) != (self.failure is not None):
            raise ValueError("a score has either a value or a failure")
        put = partial(object.__setattr__, self)
        if self.value is not None:
            put("value", as_number(self.value, "a score"))
        names = [_as_text(name, "a part's name") for name in self.parts]
        values = [as_number(v, f"the part {k!r} of a score") for k, v in self.parts.items()]
        put("parts", dict(zip(names, values, strict=True)))
        put("steps", tuple((index(end), as_number(v, "a step's value")) for end, v in self.steps))
        put("outcome", _as_text(self.outcome, "an outcome"))
        if self.failure is not None:
            put("failure", _as_text(self.failure, "a failure"))
        for value in (self.value, *self.parts.values(), *(v for _, v in self.steps)):
            if value is not None and not math.isfinite(value):
                hint = "use Score.failed(reason) where there is no value"
                raise ValueError(f"a score must be finite, not {value}; {hint}")

    @property
    def valid(self) -> bool:
        return self.failure is None

    @property
    def solved(self) -> bool:
        """Whether the problem counts as solved: judged correct or, where the reward does not judge, the full value."""
        full = self.value is not None and self.value >= 1.0
        return self.outcome in ("correct", "pass") if self.outcome else full

    @classmethod
    def failed(cls, failure: str, outcome: str = "error") -> Score:
        return cls(None, outcome=outcome, failure=failure)

    @classmethod
    def pending(cls, outcome: str = "") -> Score:
        """Of a rollout that is not scored yet; `outcome` becomes that of the score, where it says something."""
        return cls(None, outcome=outcome, failure=UNSCORED)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `stop_ids` end a response and belong to it; temperature 0 means argmax."""

    max_new_tokens: Count = 256
    temperature: NotNegative = 1.0
    top_k: Annotated[int, Range(ge=0, text="0 (all) or a number of tokens")] = 0
    top_p: Annotated[float, Range(gt=0, le=1)] = 1.0
    min_new_tokens: Whole = 0  # stop ids are ignored before this many tokens

    def __post_init__(self) -> None:
        check_fields(self)
        few = f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}"
        require(self.min_new_tokens <= self.max_new_tokens, f"{few}; lower it")

    @property
    def truncated(self) -> bool:
        """Whether the support is cut, so that the policy's own softmax is not the distribution sampled from."""
        return self.top_k > 0 or self.top_p < 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """One sample: the first turn of a session with its whole prompt, or a later turn with the ids that came since.

    >>> Request((5, 6), seed=3, sampling=Sampling(8), session=1).turn
    0
    """

    ids: tuple[int, ...]  # new ids of this turn
    seed: int  # of this turn: the row draws with exactly this seed
    sampling: Sampling
    session: int = 0  # unique among what the sampler holds
    turn: int = 0
    # neighbouring first turns of one group have the same ids: prefilled once; -1: alone
    group: int = -1
    keep: bool = False  # keep the cache of the session for another turn, until `cancel`
    model: str = ""  # the policy, or a named frozen checkpoint

    def __post_init__(self) -> None:
        empty = "a prompt needs at least one token: nothing would predict the first of the answer"
        require(bool(self.ids), empty)
        require(self.turn >= 0, f"turns are counted from 0, not {self.turn}")


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What was sampled, as ids: never decoded and re-encoded. `logprobs` are under the distribution that was sampled from."""

    ids: np.ndarray  # int64 [T]
    logprobs: np.ndarray  # float32 [T]
    versions: np.ndarray  # int32 [T]: the version of the weights that sampled each token
    finish: str  # stop | length
    # int16 [all tokens of the session up to here, layers x experts a token]: where they went in a mixture of experts, if recorded
    routes: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a sampler has done since it was made."""

    prefilled: int = 0  # tokens of prompts and later turns, each group's prompt counted once
    sampled: int = 0  # tokens
    # tokens prefilled again: after `publish`, of dropped sessions, of failed workers
    recomputed: int = 0
    dropped_sessions: int = 0  # kept caches that were given up for want of memory
    # processes that died or hung: their requests were taken over, more slowly
    failed_workers: int = 0

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(*map(add, astuple(self), astuple(other)))


@runtime_checkable
class Sampler(Protocol):
    """Generates completions for requests: the engine in this process, a server, workers elsewhere, a simulator."""

    @property
    def capacity(self) -> int:
        """Rows that it decodes at once."""

    @property
    def statistics(self) -> Statistics: ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, and return at once. Others may be decoding meanwhile."""

    def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
        """Run at most one burst of decoding, and return what is finished: nothing where nothing is, or nothing was submitted."""

    def cancel(self, sessions: Collection[int]) -> None:
        """Stop what these sessions are decoding and forget their caches. Unknown ones are ignored."""

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Sample with these weights as `version` from now on; None: the parameters it shares with the trainer, as they are now.
        Kept caches and rows that are being decoded are recomputed from their ids."""

    def release(self) -> None:
        """Give memory back, as before training."""

    def close(self) -> None:
        """End its processes; it cannot be used afterwards."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of tokens that were all sampled by the policy or all given to it (prompt, tool output)."""

    ids: np.ndarray  # int64 [T]
    text: str
    sampled: bool
    logprobs: np.ndarray | None = None  # float32 [T], when sampled
    offsets: np.ndarray | None = None  # int64 [T]: where in `text` each token's characters end
    # int32 [T], when sampled: the weights that sampled each token
    versions: np.ndarray | None = None
    finish: str = ""
    reward: float = 0.0  # of a turn, where the task pays by turn


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One conversation of an episode: segments in the order they happened, and its score, whose value is the whole return: what was
    paid by turn included."""

    problem: Problem
    sample: int  # the number of the episode among those of its problem
    segments: tuple[Segment, ...]
    score: Score
    role: str = ""  # who the policy was in it, where an episode has several
    answer: str | None = None  # what the task scores; None: the text of all turns
    # what happened in it: tool/calls, ...
    counts: Mapping[str, float] = field(default_factory=dict)
    routes: np.ndarray | None = None  # as of the last completion

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
        """Where in the response a turn begins whose block of reasoning the chat template opened."""
        found, place, given = [], 0, ""
        for segment in self.segments:
            if segment.sampled and given.rstrip().endswith(THINK):
                found.append(place)
            place += len(segment.text) if segment.sampled else 0
            given = "" if segment.sampled else segment.text
        return found

    @property
    def judged(self) -> str:
        """The response as a reward reads it: with the `<think>` that the chat template wrote for the policy. Without it, what stands in
        a block of reasoning that never ends would pass for an answer."""
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
        """What was paid by turn."""
        return sum(s.reward for s in self.segments)

    @property
    def turns(self) -> int:
        return sum(s.sampled for s in self.segments)

    @property
    def finish(self) -> str:
        """How the last turn ended; "length" where any turn was cut off at its limit."""
        ends = [s.finish for s in self.segments if s.sampled]
        return "length" if "length" in ends else (ends or [""])[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The rollouts of one problem, of one role where its episodes have several: what baselines are taken over. Sizes may differ."""

    problem: Problem
    rollouts: tuple[Rollout, ...]
    role: str = ""

    @property
    def rewards(self) -> list[float]:
        """Values of the rollouts that could be scored."""
        return [r.score.value for r in self.rollouts if r.score.value is not None]


class Rating(Protocol):
    """A reward that runs a model in this process, on many rollouts at once: a reward model, an ensemble, an implicit reward."""

    def rate(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """One score for each rollout. The score a rollout already has is its task's own."""

    @property
    def models(self) -> Sequence[Module]:
        """The frozen networks, for a checkpoint to name them by their weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A sequence to learn from as it stands: ids and which of them carry loss (never the first)."""

    ids: np.ndarray  # int64 [T]
    mask: np.ndarray  # bool [T]
    unit: int = -1  # examples of one unit (a pair, a ranking) stay together; -1: a unit of its own
    # what people said of it: in a pair or ranking the higher is preferred, by so much; 1 good, 0 bad
    reward: float = float("nan")
    # float32 [T]: the label of the step that ends at a token, NaN elsewhere
    steps: np.ndarray | None = None


class _Columns:
    """Named tensors as attributes: one per token ([T], names end in _T) or per sequence ([N], names end in _N)."""

    __slots__ = ()
    columns: Mapping[str, Tensor]

    def __getattr__(self, name: str) -> Tensor:
        if name.endswith(("_T", "_N")) and name in self.columns:
            return self.columns[name]
        kind = type(self).__name__
        if not name.endswith(("_T", "_N")):
            raise AttributeError(f"{kind} has no attribute {name}")
        unfilled = "no role of the algorithm and no method before this one filled it"
        known = ", ".join(sorted(self.columns)) or "none"
        raise AttributeError(f"the {kind} has no column {name}: {unfilled}; there are {known}")


@dataclass(frozen=True, slots=True, eq=False)
class Batch(_Columns):
    """N sequences laid end to end without padding: all the tokens of an optimizer step, or of one micro-batch of it.

    Besides its fields it has `columns`, which are read as attributes and set by `replace`; packing, cutting and gathering treat all of
    them alike, and to read one that nobody filled is an error. Those in use:

    rollout_N    int64: which of the step's rollouts the sequence is, all groups counted in order
    step_T       float32: the reward or label of the step that ends at this token; NaN elsewhere
    reference_T  log-prob under the frozen reference
    value_T      the critic's value before the step
    proximal_T   log-prob under the policy at the start of the step
    teacher_T    log-prob under a teacher, which may have read another prompt
    advantage_T, return_T
    weight_T     the reduction: the loss is a plain sum of weight * loss
    weight_N     the same for losses per sequence or per unit
    version_T    int32: the version of the weights that sampled the token; -1 where not sampled
    baseline_N   what a sequence's own figure is compared with
    bonus_N      weight of a term for exploration, beside that of weight_N
    vote_N       float32: its share of the vote of its episode, where one has several sequences in a group
    part/NAME_N  float32: a part of the score, where the algorithm learns from parts; NaN where there is no score
    routes_T     int16 [T, layers x experts a token]: the experts that the sampler chose, -1 where that is not known
    paid_T       float32: what a turn was paid, at its last token; a part of reward_N, there only where turns were paid
    """

    ids_T: Tensor  # int64
    starts: tuple[int, ...]  # N+1 offsets into T
    sequence_T: Tensor  # int64: which sequence a token is in
    mask_T: Tensor  # bool: the token carries loss
    behaviour_T: Tensor  # float32: log-prob when sampled; 0 where not sampled
    reward_N: Tensor  # float32, a score or an example's label; NaN where there is none
    valid_N: Tensor  # bool: the sequence was scored and votes in its group
    group_N: Tensor  # int64: which problem the sequence answers
    unit_N: tuple[int, ...]  # non-decreasing; a micro-batch is cut only where it changes
    truncated_N: Tensor  # bool: the response ended at the length limit
    temperature: float = 1.0
    resting: frozenset[str] = frozenset()  # learners that this step leaves as they are, by name
    learned: frozenset[str] = frozenset()  # learners whose gradient of the step is there already
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    # host copies, so that a micro-batch can be laid out while the device is still at work on the one before
    ids: np.ndarray | None = None  # of ids_T
    mask: np.ndarray | None = None  # of mask_T; `replace` drops it with the mask that it was of

    @property
    def sequences(self) -> int:
        return len(self.starts) - 1

    @property
    def tokens(self) -> int:
        return self.starts[-1]

    def replace(self, **changes: Any) -> Batch:
        """The batch with other fields or columns; None removes a column."""
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
    """Hidden states that predict the M loss tokens of a batch, and the head that makes logits of them: what a divergence over the
    whole vocabulary is computed from in chunks, because [M, V] is too large."""

    at_M: Tensor  # int64: where in the batch's tokens the loss tokens are
    hidden_MH: Tensor
    head: Any  # ops.logprobs.Head


class Outputs(_Columns):
    """What the forward passes give an algorithm, as columns aligned with the batch's tokens; to read one that is not there is an error.

    logprob_T  float32, log p of the token at the batch's temperature, where a policy learns
    entropy_T  float32, of the distribution the token was drawn from
    value_T    the critic's value of the state in which the token was chosen
    score_T    a scorer's number for everything up to and with the token
    rerouted_T share of layers in which it would go to other experts than the sampler's, which are replayed
    balance_T  terms of the routers' auxiliary loss, where a mixture of experts learns (ops/experts.py)
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
        self.predictions = dict(predictions or {})  # by who makes them: `policy`, or a role

    def join(self, other: Outputs) -> Outputs:
        """These outputs with those of another pass over the same tokens."""
        return self.replaced({**self.columns, **other.columns}, other.predictions)

    def take(self, start: int, end: int) -> Outputs:
        """The columns of some of the tokens."""
        return self.replaced({name: column[start:end] for name, column in self.columns.items()})

    def replaced(
        self, columns: Mapping[str, Tensor], predictions: Mapping[str, Prediction] | None = None
    ) -> Outputs:
        """Outputs with other columns, and further predictions."""
        made = Outputs(predictions={**self.predictions, **(predictions or {})})
        made.columns = dict(columns)
        return made


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One term of a loss: it adds sum(weight * loss). Weights are global, so terms add over micro-batches and ranks."""

    name: str
    loss: Tensor
    weight: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """A figure that merges: total over count, or a plain sum where count is None; or the `largest` or the `smallest` of all, whose
    count says of how many. A count of 0 is NaN: nothing was measured. Means of means cannot arise by accident.

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
    """What an algorithm returns for a micro-batch: the terms of its loss and figures about it."""

    terms: tuple[Term, ...]
    metrics: tuple[Metric, ...] = ()


def part_column(name: str) -> str:
    """The column of a batch that holds a part of the scores, which an algorithm asked for (`Algorithm.learns_parts`)."""
    return f"part/{name}_N"


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The groups a step will train on, and how many more are wanted before it can start. With no groups there is nothing to learn
    from, and the loop leaves the step out."""

    groups: tuple[Group, ...]
    refill: int = 0
    metrics: tuple[Metric, ...] = ()
