"""The loop of a replay: recomputes the steps of a run, without saving or measuring, up to the requested one.

There it analyses the parts of the update, and afterwards the update without one of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch

from posttrain.data.demonstrations import completion_example
from posttrain.data.text import Decoder
from posttrain.errors import UserError, require
from posttrain.loop import Loop, manual_garbage_collection
from posttrain.monitor.rules import ALWAYS, RULES
from posttrain.stages._material import until_end
from posttrain.train import attribution
from posttrain.train.attribution import Part, Span, Tensors, dot, gradient, norm, token_spans
from posttrain.train.pack import gather, micro_batches, pack_examples, unit_ends, with_loss
from posttrain.train.roles.base import Addition
from posttrain.train.trainer import Update
from posttrain.types import JSON, Batch, Group, Rollout

# metrics of the machine, not of the run
TIMES = ("seconds", "tokens_per_second", "memory", "failed_workers")
EVERY = 1.0  # seconds between two lines of progress


@dataclass(frozen=True, slots=True)
class Difference:
    """The first metric that differs from the one that the run recorded."""

    step: int
    figure: str
    written: float
    replayed: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """Neighbouring tokens of a member of a unit, and their share of the gradient."""

    member: int
    first: int
    last: int
    text: str
    share: float


@dataclass(frozen=True, slots=True)
class Member:
    """A sequence of an update: a rollout, an example, or one response of a pair; with the log-prob of all tokens that carry
    loss, or a scorer's score: `before` the update, `after` it, and after the update `without` another unit."""

    number: int
    prompt: str
    text: str
    tokens: int
    reward: float | None
    advantage: float | None
    before: float
    after: float
    without: float | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """A unit of an update, with its part of the gradient."""

    number: int
    share: float
    norm: float
    members: tuple[Member, ...]
    spans: tuple[Tokens, ...] = ()


@dataclass(frozen=True, slots=True)
class Without:
    """The same optimizer step without a unit; everything else stays, including the advantages and weights of the others.
    `cosine` is that between the two changes of the weights, `norm` the norm of this change, `distance` the norm of their
    difference divided by the norm of the whole change."""

    number: int
    cosine: float
    norm: float
    distance: float


@dataclass(frozen=True, slots=True)
class Answered:
    """A text that the user asked about: its log-prob before and after the update, and after the update without a unit."""

    prompt: str
    text: str
    tokens: int
    before: float
    after: float
    without: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What changed the model in one update."""

    kind: str  # the kind of unit: rollout | example | pair | ranking
    measure: str  # log-prob | score
    update: int  # which of the step's `updates`
    updates: int
    learning_rate: float
    grad_norm: float
    clipped: float  # the factor by which clipping multiplied the gradient
    update_norm: float  # norm of the change of the weights; 0: nothing was updated
    items: tuple[Item, ...]  # the largest shares first
    additions: Mapping[str, float]  # shares that roles add, such as pretraining text
    without: Without | None
    answer: Answered | None
    steps: int  # number of steps computed
    compared: int  # number of metrics compared
    difference: Difference | None


class Replayed(Exception):
    """Leaves a stage with the findings."""

    def __init__(self, findings: Findings) -> None:
        super().__init__()
        self.findings = findings


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The step, and the questions about it. `written` has the metrics of the run by step."""

    step: int
    checkpoint: Path | None
    written: Mapping[int, Mapping[str, float]]
    say: Callable[[str], None]
    update: int = 1
    without: int | None = None
    # the rollout whose log-prob is asked for; or that of an answer to a prompt
    rollout: int | None = None
    answer: str = ""
    prompt: str = ""
    top: int = 5


@dataclass(eq=False, kw_only=True)
class Seen:
    """The update in question. `levels` has the log-prob of every sequence, and last that of the answer in question, `before`
    it, `after` it, and after the update `without` a unit."""

    prepared: Batch
    rate: float
    norm: float  # norm of the gradient
    parts: list[Part]
    spans: dict[Part, list[Span]]  # for the largest parts
    additions: dict[str, float]
    answer: Batch | None
    masters: Tensors  # the weights before the update
    weights: Tensors  # including those of other learners; empty if no unit is left out
    moments: Tensors
    roles: list[JSON]  # the roles' states before the update
    levels: dict[str, list[float]] = field(default_factory=dict)
    change: Tensors = field(default_factory=dict)  # change of the weights; empty if nothing changed


@dataclass(eq=False)
class ReplayLoop(Loop):
    """Recomputes the steps of a run up to the one that `question` asks about. Of the monitor's rules only those about non-finite
    numbers are on: the run has passed the others."""

    question: Question = field(kw_only=True)
    updates: int = 0  # updates so far of the current step
    compared: int = 0
    difference: Difference | None = None
    rollouts: Sequence[Rollout] = ()
    seen: Seen | None = None

    def __post_init__(self) -> None:
        self.keep_best, self.evaluate, self.trackers, self.on_step = False, None, None, None
        off = tuple(name for name in RULES if name not in ALWAYS)
        self.monitor = replace(self.monitor, off=off, warn=(), stop=())
        super().__post_init__()

    def newest(self) -> tuple[Path | None, list[str]]:
        return self.question.checkpoint, []

    def run(self) -> None:
        asked, said = self.question, time.monotonic()
        self.state = self.trainer.algorithm.start()
        self.resume()
        first = self.step
        with self.stage_monitor.running() as monitor, manual_garbage_collection():
            while self.step < asked.step:
                began, self.updates = time.perf_counter(), 0
                with monitor.step(self.step + 1):
                    figures = self.one_step()
                self.compare(figures)
                if self.step < asked.step:
                    took = time.perf_counter() - began
                    monitor.after(self.step, {**figures, "seconds/total": took})
                if time.monotonic() - said > EVERY:
                    asked.say(f"step {self.step} of {asked.step}")
                    said = time.monotonic()
            raise Replayed(self.findings(asked.step - first))

    def compare(self, figures: Mapping[str, float]) -> None:
        """Compare the metrics of a step with those that the run recorded, bit by bit."""
        written = self.question.written.get(self.step, {})
        for name, value in figures.items():
            if name not in written or name.startswith(TIMES):
                continue
            self.compared += 1
            same = value == written[name] or (value != value and written[name] != written[name])
            if not same and self.difference is None:
                self.difference = Difference(self.step, name, written[name], value)

    def apply(
        self, prepared: Batch, rate: float, meanwhile: Callable[[], object], groups: Sequence[Group]
    ) -> Update:
        self.updates += 1
        self.rollouts = [rollout for group in groups for rollout in group.rollouts]
        if (self.step + 1, self.updates) != (self.question.step, self.question.update):
            return super().apply(prepared, rate, meanwhile, groups)
        self.question.say("the parts of the gradient")
        with torch.random.fork_rng():
            seen = self.seen = self.look(prepared, rate)
            if prepared.learned:
                self.trainer.learn_again()
        done = super().apply(prepared, rate, meanwhile, groups)
        seen.change, seen.levels["after"] = self.change(seen), self.levels(seen)
        return done

    def look(self, prepared: Batch, rate: float) -> Seen:
        """Compute what must be known of an update before the weights change. The trainer, its roles and the generators are left
        unchanged."""
        trainer, asked = self.trainer, self.question
        rests = "the policy rests while its critic warms up: nothing moved it"
        require("policy" not in prepared.resting, f"{self.where}: {rests}")
        numbers = sorted(self.number(prepared, end - 1) for end in unit_ends(prepared))
        for name, one in (("--without", asked.without), ("--answer", asked.rollout)):
            some = f"{name} {one}: update {asked.update} of {self.where} trains on {self.kind}s"
            known = f"{', '.join(map(str, numbers[:20]))}{', ...' * (len(numbers) > 20)}"
            require(one is None or one in numbers, f"{some} {known}")
        answer = self.answer(prepared)
        states = [deepcopy(role.state()) for role in trainer.roles]
        added = [(role.name, more) for role in trainer.roles if (more := role.draw()) is not None]
        self.restore_roles(states)
        whole = attribution.whole_gradient(trainer, prepared, added)
        none = "the gradient is 0: no token carries loss, or all advantages are 0"
        require(norm(whole) != 0, f"{self.where}: {none}")
        parts = sorted(attribution.unit_parts(trainer, prepared, whole), key=rank)
        kept = asked.without is not None
        seen = Seen(
            prepared=prepared,
            rate=rate,
            norm=norm(whole),
            parts=parts,
            spans={p: token_spans(trainer, prepared, p, whole) for p in parts[: asked.top]},
            additions={name: self.addition_share(more, whole) for name, more in added},
            answer=answer,
            masters=copies(trainer.optimizer.masters),
            weights=copies(trainer.weights()) if kept else {},
            moments=copies(trainer.moments()) if kept else {},
            roles=states,
        )
        seen.levels["before"] = self.levels(seen)
        return seen

    @property
    def where(self) -> str:
        return f"step {self.question.step}"

    @property
    def kind(self) -> str:
        """Return the kind of unit of an update."""
        unit = self.trainer.algorithm.unit
        return unit if unit != "sequence" else "rollout" if self.rollouts else "example"

    def number(self, batch: Batch, first: int) -> int:
        """Return the number of the unit that has the given sequence: a rollout by its number in the step, as in `posttrain
        show`."""
        by_rollout = self.kind == "rollout" and "rollout_N" in batch.columns
        return int(batch.rollout_N[first]) if by_rollout else batch.unit_N[first]

    def restore_roles(self, states: Sequence[JSON]) -> None:
        for role, state in zip(self.trainer.roles, states, strict=True):
            role.restore(deepcopy(state))

    def addition_share(self, more: Addition, whole: Tensors) -> float:
        def backward() -> None:
            for piece in micro_batches(with_loss(more.batch), self.trainer.token_budget):
                self.trainer.forward_backward(piece, more.algorithm)

        return dot(gradient(self.trainer, backward), whole) / dot(whole, whole)

    def answer(self, prepared: Batch) -> Batch | None:
        """Return the answer in question, as a batch."""
        asked = self.question
        if not asked.answer:
            return None
        tokenizer, device = self.trainer.policy.tokenizer, prepared.ids_T.device
        example = until_end(completion_example(asked.prompt, asked.answer, tokenizer, "--answer"))
        return pack_examples([example], device).replace(temperature=prepared.temperature)

    def levels(self, seen: Seen) -> list[float]:
        """Return for each sequence, and last for the answer: the log-prob of all tokens that carry loss, or the score at the
        last one."""
        scored, found = self.trainer.algorithm.trains == "scorer", []
        for batch in (seen.prepared, seen.answer) if seen.answer is not None else (seen.prepared,):
            said_T = self.trainer.logprobs(batch).double()
            own_T = said_T.where(batch.mask_T, 0.0)
            for start, end in pairwise(batch.starts):
                found.append(float(said_T[end - 1] if scored else own_T[start:end].sum()))
        return found

    def change(self, seen: Seen) -> Tensors:
        """Return the change of the weights since the update began."""
        masters = self.trainer.optimizer.masters
        return {name: m.detach() - seen.masters[name] for name, m in masters.items()}

    # afterwards

    def findings(self, steps: int) -> Findings:
        """Return the findings at the requested step, after its update."""
        asked, seen, many = self.question, self.seen, self.updates
        made = f"{self.where} made {many} update{'s' * (many != 1)}"
        if seen is None:
            raise UserError(f"{made}: there is no update {asked.update} to look at")
        without = None if asked.without is None else self.leave_out(seen, asked.without)
        items = tuple(self.item(seen, part) for part in seen.parts)
        finite = seen.norm == seen.norm
        return Findings(
            kind=self.kind,
            measure="score" if self.trainer.algorithm.trains == "scorer" else "log-prob",
            update=asked.update,
            updates=many,
            learning_rate=seen.rate,
            grad_norm=seen.norm,
            clipped=min(1.0, self.trainer.settings.clip_norm / seen.norm) if finite else 1.0,
            update_norm=norm(seen.change),
            items=items,
            additions=seen.additions,
            without=without,
            answer=self.answered(seen, items),
            steps=steps,
            compared=self.compared,
            difference=self.difference,
        )

    def answered(self, seen: Seen, items: Sequence[Item]) -> Answered | None:
        """Return the text in question; for a pair or a ranking, its first response."""
        asked = self.question
        if seen.answer is not None:
            tokens = int(seen.answer.mask_T.sum())
            return Answered(asked.prompt, asked.answer, tokens, *seen_levels(seen, -1))
        if asked.rollout is None:
            return None
        m = next(item.members[0] for item in items if item.number == asked.rollout)
        return Answered(m.prompt, m.text, m.tokens, m.before, m.after, m.without)

    def leave_out(self, seen: Seen, left: int) -> Without:
        """Repeat the update from its start, without a unit. Learners that were updated earlier are not updated again; nothing
        reads them."""
        trainer, batch = self.trainer, seen.prepared
        for learner in trainer.learners:  # a learner that began anew has no moments to restore
            learner.optimizer.adam.state.clear()
        trainer.restore(dict(seen.weights), dict(seen.moments))
        self.restore_roles(seen.roles)
        out = next(p for p in seen.parts if self.number(batch, p.first) == left)
        rest = [n for n in range(batch.sequences) if not out.first <= n < out.last]
        trainer.update(gather(batch, rest), seen.rate)
        change, seen.levels["without"] = self.change(seen), self.levels(seen)
        long, whole = norm(change), norm(seen.change)
        apart = norm({name: t - seen.change[name] for name, t in change.items()})
        cosine = dot(change, seen.change) / (long * whole) if long * whole else math.nan
        return Without(left, cosine, long, apart / whole if whole else math.nan)

    def item(self, seen: Seen, part: Part) -> Item:
        tokenizer, ids = self.trainer.policy.tokenizer, seen.prepared.ids_T.tolist()
        spans = []
        for span in seen.spans.get(part, ()):
            at = seen.prepared.starts[span.sequence]
            text = str(tokenizer.decode(ids[at + span.first : at + span.last]))
            place = span.sequence - part.first
            spans.append(Tokens(place, span.first, span.last, text, span.share))
        members = tuple(self.member(seen, n) for n in range(part.first, part.last))
        number = self.number(seen.prepared, part.first)
        return Item(number, part.share, part.norm, members, tuple(spans))

    def member(self, seen: Seen, n: int) -> Member:
        batch = seen.prepared
        start, end = batch.starts[n], batch.starts[n + 1]
        mask_T, advantage = batch.mask_T[start:end], None
        if "advantage_T" in batch.columns and bool(mask_T.any()):
            advantage = float(batch.advantage_T[start:end][mask_T].mean())
        given = int(mask_T.int().argmax())
        decode = Decoder(self.trainer.policy.tokenizer).decode
        ids = batch.ids_T[start:end].cpu().numpy()
        prompt, text = decode(ids[:given])[0], decode(ids[given:])[0]
        reward = float(batch.reward_N[n])
        place = n
        if "rollout_N" in batch.columns:
            place = int(batch.rollout_N[n])
            rollout = self.rollouts[place]
            prompt, text = rollout.problem.question, rollout.response
        paid = reward if reward == reward else None
        said = (prompt, text, int(mask_T.sum()))
        return Member(place, *said, paid, advantage, *seen_levels(seen, n))


def seen_levels(seen: Seen, n: int) -> tuple[float, float, float | None]:
    """Return the values before, after (the same if nothing was updated), and without."""
    before = seen.levels["before"][n]
    without = seen.levels["without"][n] if "without" in seen.levels else None
    return before, seen.levels["after"][n] if "after" in seen.levels else before, without


def rank(part: Part) -> float:
    """Sort by the largest share, positive or negative; gradients that are not finite come first."""
    return -abs(part.share) if math.isfinite(part.share) else -math.inf


def copies(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
