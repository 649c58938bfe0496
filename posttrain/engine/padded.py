"""Sampling for models that our attention cannot compute (`Network.padded`): by the model's own module over transformers' own cache.

Works of similar lengths that enter together are a batch, whose prompts are padded on the left. New ones enter when three quarters of
the rows have ended, since each batch is a forward pass of its own. No cache of a session is kept: its next turn computes all that was
before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import signature
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.engine.cache import Cache, Decode, Prefill
from posttrain.engine.cpu import PREFILL_TOKENS, CPUBackend, KeptRow
from posttrain.engine.decoder import Decoder
from posttrain.engine.scheduler import Work
from posttrain.errors import UserError, first_line
from posttrain.models import layers
from posttrain.models.attention import LAYOUT, Packed
from posttrain.models.policy import FAILURES, Policy, disagreement, probe_tokens
from posttrain.ops.logprobs import head_logits

DECODED = 8  # tokens of a probe that are decoded one by one
_CHECKED: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


class Batch:
    """Neighbouring rows with one cache: their tokens, padded on the left, of which the first are computed at once."""

    def __init__(self, policy: Policy, ids: Sequence[np.ndarray]):
        from transformers import DynamicCache

        self.policy, self.length, longest = policy, 0, max(map(len, ids))
        self.padding_N = torch.tensor([longest - len(own) for own in ids]).to(policy.device)
        # Mamba has no attention, and its state takes no mask of the tokens before
        self.attends = "cache_params" not in signature(policy.body.forward).parameters
        self.name = "past_key_values" if self.attends else "cache_params"
        self.cache = DynamicCache(config=policy.model.config.get_text_config())
        padded = np.stack([np.pad(own, (longest - len(own), 0)) for own in ids])
        # the hidden state of the last token of each
        self.hidden_NH = self.extend(torch.from_numpy(padded).to(policy.device))

    @property
    def rows(self) -> int:
        return len(self.padding_N)

    def extend(self, ids_NS: Tensor) -> Tensor:
        """Compute the next tokens of all rows: the hidden state of the last, [N, H]."""
        first, self.length = self.length, self.length + ids_NS.shape[1]
        behind_NL = torch.arange(self.length, device=ids_NS.device) - self.padding_N[:, None]
        seen_NL = (behind_NL if self.attends else behind_NL[:, first:]) >= 0
        given = {self.name: self.cache, "attention_mask": seen_NL.long()}
        at_NS = behind_NL[:, first:].clamp(min=0)
        return self.policy.body_pass(ids_NS, at_NS, use_cache=True, **given)[:, -1]

    def take(self, rows: np.ndarray) -> None:
        at = torch.from_numpy(rows).to(self.padding_N.device)
        self.padding_N = self.padding_N[at]
        self.cache.reorder_cache(at)


class PaddedBackend(CPUBackend):
    """Rows are in the order in which they entered, by batch."""

    batches: list[Batch]
    entering: bool  # whether works may enter

    def make_decoder(self, tokens: int, lasting: bool = False) -> Decoder | None:
        return None

    def prepare(self, works: Sequence[Work], rows: int, fresh: bool) -> None:
        super().prepare(works, 0, fresh)
        self.capacity = rows

    def fits(self, work: Work | None) -> bool:
        self.entering = self.entering or 4 * self.rows.count <= self.capacity
        return work is None or self.entering

    def prefill(
        self, works: Sequence[Work], caches: Sequence[KeptRow | None], first: int
    ) -> tuple[np.ndarray, np.ndarray]:
        samples = [len(work.requests) for work in works]
        hidden_NH = self._enter([work.ids for work in works], samples, first)
        self._settle()
        return self._draw(hidden_NH, first)

    def resume(self, works: Sequence[Work], first: int) -> None:
        every = [np.concatenate([work.ids, ids[:-1]]) for work in works for ids, *_ in work.written]
        self._enter(every, [1] * len(every), first)
        self.settled = False

    def _enter(self, every: Sequence[np.ndarray], samples: Sequence[int], first: int) -> Tensor:
        """Add these sequences, of which each begins so many rows. The rows from `first` on are sorted by length, so that neighbours are
        a batch. Returns the hidden states of the last tokens."""
        shortest_first = np.argsort([len(ids) for ids in every], kind="stable")
        own = np.repeat(np.arange(len(every)), samples)
        order = np.argsort(np.argsort(shortest_first)[own], kind="stable")
        self.rows.take(np.concatenate([np.arange(first), first + order]))
        sizes = [(len(every[n]), samples[n]) for n in shortest_first]
        hidden = []
        for part in hardly_padded(sizes):
            with self.products:
                batch = Batch(self.policy, [every[n] for n in shortest_first[part]])
            rows = np.repeat(range(batch.rows), [count for _, count in sizes[part]])
            batch.take(rows)
            self.batches.append(batch)
            hidden.append(batch.hidden_NH[torch.from_numpy(rows).to(self.device)])
        return torch.cat(hidden)

    def launch(self) -> None:
        self.entering = False
        if not self.settled:
            self._settle()
        last = self.last_N[:, None].split_with_sizes([batch.rows for batch in self.batches])
        with self.products:
            hidden = [batch.extend(ids) for batch, ids in zip(self.batches, last, strict=True)]
        self.drawn = self._draw(torch.cat(hidden), 0)

    def keep(self, row: int, number: int) -> None:
        return None

    def remove(self, gone: np.ndarray) -> np.ndarray:
        stay, first, left = np.delete(np.arange(self.rows.count), gone), 0, []
        for batch in self.batches:
            own = stay[(stay >= first) & (stay < first + batch.rows)] - first
            first += batch.rows
            if 0 < len(own) < batch.rows:
                batch.take(own)
            left += [batch] if len(own) else []
        self.batches, self.settled = left, False
        return stay

    def idle(self) -> None:
        super().idle()
        self.batches, self.entering = [], True


def hardly_padded(sizes: Sequence[tuple[int, int]]) -> Iterator[slice]:
    """Cut sequences of ascending (length, rows) into batches of at most `PREFILL_TOKENS` tokens. Rows that the longest makes more than
    twice as long on average, and more than that many tokens, are batches of their own.

    >>> [(part.start, part.stop) for part in hardly_padded([(30, 8), (40, 8), (50, 8), (3000, 8), (4000, 8), (5000, 8)])]
    [(0, 3), (3, 5), (5, 6)]
    """
    first = tokens = rows = filled = 0
    for n, (length, count) in enumerate(sizes):
        whole = length * (rows + count)
        wide = whole > max(PREFILL_TOKENS, 2 * (filled + length * count))
        if n > first and (wide or tokens + length > PREFILL_TOKENS):
            yield slice(first, n)
            first, tokens, rows, filled = n, 0, 0, 0
        tokens, rows, filled = tokens + length, rows + count, filled + length * count
    yield slice(first, len(sizes))


def plain_backend(policy: Policy) -> type[CPUBackend]:
    """The backend that decodes with the policy's own module. That it computes what training does is checked once for each body."""
    if policy.body not in _CHECKED:
        if isinstance(layers.describe(policy), str):
            _check(policy)
        _CHECKED[policy.body] = True
    return PaddedBackend if policy.padded else CPUBackend


@torch.inference_mode()
def _check(policy: Policy) -> None:
    """Compare tokens decoded one by one with a forward pass of the whole sequences."""
    model, was_training = policy.model, policy.model.training
    ids_T, position_T, starts = probe_tokens(model, (0, DECODED + 3, 2 * DECODED + 4))
    sequences = [ids_T[start:end] for start, end in pairwise(starts)]
    last = [end - n for end in starts[1:] for n in range(DECODED, 0, -1)]
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    model.eval()
    try:
        if any("compressed" in kind for kind in kinds):  # DeepSeek-V4
            raise NotImplementedError("what its keys stand for depends on padding")
        packed = {LAYOUT: Packed(starts, policy.device)}
        hidden_TH = policy.hidden(ids_T[None], position_T[None], **packed)[0]
        expected = head_logits(hidden_TH[last], policy.head)
        decoded = _over_own_cache if policy.padded else _over_rows
        found = head_logits(decoded(policy, sequences), policy.head)
        worst, limit = disagreement(found, expected, policy.dtype)
        reason = f"outputs differ by {worst:.2g} (at most {limit:g} is rounding)"
        wrong = not worst <= limit
    except FAILURES as error:
        wrong, reason = True, first_line(error).rstrip(".")
    finally:
        model.train(was_training)
    if wrong:
        name = policy.source or type(model).__name__
        advice = "let vLLM sample (sampler=vllm)"
        raise UserError(f"{name} cannot be sampled token by token here: {reason}; {advice}")


def _over_rows(policy: Policy, sequences: Sequence[Tensor]) -> Tensor:
    """The hidden states of the last `DECODED` tokens of each, [N S, H], decoded over the cache of CPUBackend."""
    found = list[Tensor]()
    for ids in sequences:
        first, cache = len(ids) - DECODED, Cache(1, policy.dtype, policy.device)
        cache.reserve(len(ids))
        at = torch.arange(len(ids), device=policy.device)
        prompt = {LAYOUT: Prefill(cache, (0, first), 0, [1])}
        policy.hidden(ids[None, :first], at[None, :first], **prompt)
        for n in range(first, len(ids)):
            now, layout = slice(n, n + 1), {LAYOUT: Decode(cache, at[n : n + 1], n, n)}
            found.append(policy.hidden(ids[None, now], at[None, now], **layout)[0])
    return torch.cat(found)


def _over_own_cache(policy: Policy, sequences: Sequence[Tensor]) -> Tensor:
    """The same over transformers' own cache, of which rows are moved."""
    batch = Batch(policy, [ids[:-DECODED].cpu().numpy() for ids in sequences])
    batch.take(np.arange(len(sequences))[::-1].copy())
    last = torch.stack([ids[-DECODED:] for ids in reversed(sequences)], 1)
    return torch.stack([batch.extend(ids_N[:, None]) for ids_N in last], 1).flip(0).flatten(0, 1)
