"""The forward pass of a described model (models/layers.py) as a short list of kernels over flat tokens, for prefilling and for
decoding in CUDA graphs; and the other operations of a decode step, one Triton kernel each.

It reads the parameters of the policy's own module. Products that share their input are done as one, for which their weights are
copied side by side (`refresh`, at every call of `generate`, a millisecond for a billion weights); everything else is the module's own
memory, so that an optimizer step in place is seen by graphs already captured. Adapters are not merged, which in bf16 would round
small ones away: they are two narrow products in addition to each wide one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.engine.random import uniforms
from posttrain.engine.rows import PAGE, Rows
from posttrain.engine.sampler import Choices, draw
from posttrain.models.attention import Attend, Packed, Rule, attend_packed
from posttrain.models.layers import (
    Heads,
    LayerDescription,
    ModelDescription,
    Norm,
    Projection,
    RopeTable,
    describe,
    prove,
)
from posttrain.models.policy import Policy
from posttrain.ops.experts import Routes
from posttrain.ops.fused import add_norm, gated, power_of_two

BLOCK = 4096  # logits that one program sums
MAX_QUERIES = 64  # queries that read a prompt together


class Products:
    """y = x W^T + b + (x A^T) B^T of one or more linear layers that read the same x: weights side by side, adapters (scale in B, one
    block of it a layer) likewise. A layer alone lends its own weight; what is copied is filled by `copies`. Weights in 4 bits are not
    copied: they are made anew for each product."""

    def __init__(self, projection: Projection):
        self.projection, self.narrow = projection, bool(projection.narrow)
        self.copied = len(projection.modules) > 1 and not self.narrow
        self.allocate()

    def allocate(self) -> None:
        """Room for the copies."""
        modules, rows = self.projection.modules, sum(self.projection.sizes)
        first, bias = modules[0].weight.detach(), modules[0].bias
        self.weight = first.new_empty(rows, first.shape[1]) if self.copied else first
        if self.narrow:
            self.weight = first.new_empty(0)
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = first.new_empty(rows) if len(modules) > 1 else bias.detach()
        ranks = sum(adapter.a_RI.shape[0] for adapter in self.projection.present)
        self.down, self.up = first.new_empty(ranks, first.shape[1]), first.new_zeros(rows, ranks)

    def release(self) -> None:
        """Give the copies back, until `allocate`."""
        self.weight = self.down = self.up = self.weight.new_empty(0)

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """(target, source) of what is copied."""
        pairs: list[tuple[Tensor, Tensor]] = []
        projection, sizes = self.projection, self.projection.sizes
        if self.copied:
            weights = (m.weight.detach() for m in projection.modules)
            pairs += zip(self.weight.split_with_sizes(sizes), weights, strict=True)
        if self.bias is not None and len(sizes) > 1:
            biases = (m.bias.detach() for m in projection.modules)
            pairs += zip(self.bias.split_with_sizes(sizes), biases, strict=True)
        rank = 0
        for adapter, part in zip(projection.adapters, self.up.split_with_sizes(sizes), strict=True):
            if adapter is not None:
                until = rank + adapter.a_RI.shape[0]
                pairs.append((self.down[rank:until], adapter.a_RI.detach()))
                pairs.append((part[:, rank:until], adapter.scale * adapter.b_OR.detach()))
                rank = until
        return pairs

    def __call__(self, x: Tensor) -> Tensor:
        return self._adapt(F.linear(x, self._whole(), self.bias), x)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """total += what a call gives, summed inside the products."""
        total.addmm_(x, self._whole().t())
        if self.bias is not None:
            total += self.bias
        self._adapt(total, x)

    def _whole(self) -> Tensor:
        return self.projection.weight() if self.narrow else self.weight

    def _adapt(self, out: Tensor, x: Tensor) -> Tensor:
        return out if not self.down.shape[0] else out.addmm_(F.linear(x, self.down), self.up.t())


class Layer:
    """One decoder layer on flat tokens, in place on the residual stream."""

    def __init__(self, layer: LayerDescription):
        self.described, self.heads = layer, layer.heads
        self.products = [Products(projection) for projection in layer.projections]
        self.qkv, self.out, *self.mlp = self.products

    def __call__(
        self,
        x: Tensor,
        rope: RopeTable,
        position: Tensor,
        slot: Tensor,
        store: tuple[Tensor, Tensor],
        attend: Attend,
        routes: Routes | None = None,
    ) -> None:
        layer, heads = self.described, self.heads
        qkv = self.qkv(_normalised(x, layer.input_norm))
        rotate_store(qkv, heads, rope, position, slot, store, layer.qk_norms)
        split = qkv.view(len(qkv), -1, heads.width)
        query, key, value = split.split_with_sizes([heads.heads, heads.keys, heads.keys], 1)
        out = attend(layer.number, query, key, value, layer.rule)
        self.out.add_to(x, out.reshape(len(qkv), -1))
        inner = _normalised(x, layer.post_norm)
        if layer.experts is not None:
            x += layer.experts(inner, partial(gated, tanh=layer.tanh), routes)
            return
        gate_up, down = self.mlp
        down.add_to(x, gated(gate_up(inner), layer.tanh))


def _normalised(x: Tensor, norm: Norm) -> Tensor:
    return add_norm(x, None, norm.weight.detach(), norm.epsilon, norm.shifted)[1]


class Fused:
    """Hidden states of flat tokens at explicit positions, with keys and values stored as they come. It has the weights of the moment
    it was made, until `refresh`."""

    def __init__(self, policy: Policy, described: ModelDescription):
        self.policy, self.body, self.described = policy, policy.body, described
        self.layers = [Layer(layer) for layer in described.layers]
        self.heads = tuple(layer.heads for layer in described.layers)
        self.products = [product for layer in self.layers for product in layer.products]
        self.scale = getattr(self.body.embed_tokens, "embed_scale", None)
        self.rope: RopeTable | None = None
        self.places, self.released = self.addresses(), False
        self.refresh()

    def addresses(self) -> tuple[int, ...]:
        """Where the parameters lie. A captured graph is valid as long as they stay there."""
        parameters = (*self.body.parameters(), self.policy.head.weight_VH)
        return tuple(p.data_ptr() for p in parameters)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the present weights into the copies."""
        if self.released:
            for product in self.products:
                product.allocate()
            self.released = False
        pairs = [pair for product in self.products for pair in product.copies()]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])

    def release(self) -> None:
        """Give the memory of the copies back; `refresh` takes it anew, in another place."""
        for product in self.products:
            product.release()
        self.released = True

    def ensure_rope_table(self, positions: int) -> bool:
        """Have angles for this many positions; true where the table had to be made anew."""
        if self.rope is not None and positions <= self.rope[0].shape[0]:
            return False
        self.rope = self.described.rope_table(positions)
        return True

    def embed(self, id_T: Tensor) -> Tensor:
        x = F.embedding(id_T, self.body.embed_tokens.weight.detach())
        return x if self.scale is None else x * self.scale.to(x.dtype)

    def hidden(
        self,
        id_T: Tensor,
        position_T: Tensor,
        slot_T: Tensor,
        stores: list[tuple[Tensor, Tensor]],
        attend: Attend,
        choices: Tensor | None = None,
    ) -> Tensor:
        """[T] ids -> [T, H] final hidden states. `ensure_rope_table` must cover the positions. What routers choose is stored like keys
        and values, where there are `choices`, [slots, L K]."""
        assert self.rope is not None
        x, routes = self.embed(id_T), None if choices is None else Routes()
        for layer, store in zip(self.layers, stores, strict=True):
            layer(x, self.rope, position_T, slot_T, store, attend, routes)
        if choices is not None and routes is not None:
            choices[slot_T] = routes.choices()
        return self.final_norm(x)

    def final_norm(self, x_TH: Tensor) -> Tensor:
        return _normalised(x_TH, self.described.norm)

    def layer_alone(
        self,
        number: int,
        x_TH: Tensor,
        position_T: Tensor,
        packed: Packed,
        routes: Routes | None = None,
    ) -> Tensor:
        x, tokens, heads = x_TH.clone(), len(x_TH), self.heads[number]
        keys, values = x.new_empty(2, tokens, heads.keys, heads.width)
        rope = self.described.rope_table(int(position_T.max()) + 1)
        slots = torch.arange(tokens, device=x.device)
        attend = attend_packed(packed.lengths, x.device)
        self.layers[number](x, rope, position_T, slots, (keys, values), attend, routes)
        return x


def fused(policy: Policy) -> tuple[Fused | None, str]:
    """The fused decoder of a policy, proved on tokens to compute what the module computes; or None, and why not."""
    described = describe(policy)
    if isinstance(described, str):
        return None, described
    reason = prove(policy, described, "cuda", lambda: Fused(policy, described))
    return (None, reason) if reason else (Fused(policy, described), "")


def _triton() -> Any:
    from posttrain.engine import triton_kernels

    return triton_kernels


def rotate_store(
    qkv: Tensor,
    heads: Heads,
    rope: RopeTable,
    position_T: Tensor,
    slot_T: Tensor,
    store: tuple[Tensor, Tensor],
    norms: tuple[Norm, Norm] | None,
) -> None:
    """In place on [T, (Hq + 2 Hk) D]: normalise queries and keys, where there are norms, rotate them by their positions' angles, and
    write keys and values into their slots of the [slots, Hk, D] stores."""
    weights = (norms[0].weight.detach(), norms[1].weight.detach()) if norms else (qkv, qkv)
    epsilon, shifted = (norms[0].epsilon, norms[0].shifted) if norms else (0.0, False)
    blocks = (power_of_two(heads.width // 2), power_of_two(heads.heads + 2 * heads.keys))
    sizes = (heads.heads, heads.keys, heads.width, *blocks)
    inputs = (qkv, *rope, position_T, slot_T, *store, *weights)
    flags = (norms is not None, shifted)
    _triton().rotate_store_kernel[(len(qkv),)](*inputs, epsilon, *sizes, *flags)


def tile_rows(heads: Heads, group: int) -> tuple[int, int]:
    """(rows of a tile, queries of its program) for groups of up to `group` rows."""
    queries = min(MAX_QUERIES, max(16, power_of_two(group * heads.grouped)))
    queries = max(queries, power_of_two(heads.grouped))
    return queries // heads.grouped, queries


def attend_pages(
    query_NHD: Tensor,
    store: tuple[Tensor, Tensor],
    rows: Rows,
    heads: Heads,
    rule: Rule,
    tiles: int,
    queries: int,
) -> Tensor:
    """One new token of each of the first rows against its prompt, read once a tile, and its own tokens: [N, Hq, D]. The queries are
    those within [N, (Hq + 2 Hk) D].

    With (o, s) the output and log-sum-exp over a part of the keys, two parts merge to
    o = (o1 exp(s1) + o2 exp(s2)) / (exp(s1) + exp(s2)).
    """
    kernels, count, wide = _triton(), len(query_NHD), torch.float32
    before = torch.empty(query_NHD.shape, dtype=wide, device=query_NHD.device)
    # every live row is in a tile
    lse = torch.empty(count, heads.heads, dtype=wide, device=query_NHD.device)
    out = torch.empty(query_NHD.shape, dtype=query_NHD.dtype, device=query_NHD.device)
    limits = (rule.scaling, rule.softcap or 1.0, rule.sliding_window or 0)
    precision = "ieee" if query_NHD.dtype == wide else "tf32"
    flags = (PAGE, rule.sliding_window is not None, rule.softcap is not None, precision)
    shape = (heads.heads, heads.keys, heads.width, max(16, power_of_two(heads.width)))
    state = (query_NHD, *store, before, lse)
    prompts = (rows.tile, rows.prompt_table, rows["position"])
    sizes = (rows.capacity, rows.prompt_pages, *shape, queries)
    inputs = (*state, *prompts, *limits, *sizes, *flags)
    kernels.prefix_kernel[(tiles, heads.keys)](*inputs, num_stages=2)
    own = (rows["count"], rows["done"], rows.table)
    own_sizes = (rows.pages, *shape, max(16, power_of_two(heads.grouped)))
    own_inputs = (*state, out, *own, *limits, *own_sizes, *flags)
    kernels.suffix_kernel[(count, heads.keys)](*own_inputs, num_stages=3)
    return out


def choose(logits_NV: Tensor, rows: Rows, truncated: bool) -> tuple[Tensor, Tensor]:
    """An id and its log-prob for each of the first rows, drawn at the row's own uniform. Logits are read once, and one block of
    them again; rows that are done get nothing of meaning."""
    count, size = logits_NV.shape
    if truncated:
        choices = Choices(rows.temperature[:count], rows["top_k"][:count], rows.top_p[:count])
        uniform_N = uniforms(rows["seed"][:count], rows["count"][:count])
        return draw(logits_NV, choices, uniform_N, truncated)
    kernels, blocks, device = _triton(), -(-size // BLOCK), logits_NV.device
    top, total = (torch.empty(count, blocks, dtype=torch.float32, device=device) for _ in range(2))
    best = torch.empty(count, blocks, dtype=torch.int32, device=device)
    id_N = torch.zeros(count, dtype=torch.int64, device=device)
    logprob_N = torch.zeros(count, device=device)
    sums, sizes = (logits_NV, rows.temperature, top, total, best), (size, blocks, BLOCK)
    kernels.block_sums_kernel[(count, blocks)](*sums, *sizes)
    state = (rows["seed"], rows["count"], rows["done"], id_N, logprob_N)
    kernels.draw_kernel[(count,)](*sums, *state, *sizes, power_of_two(blocks))
    return id_N, logprob_N


def advance(id_N: Tensor, logprob_N: Tensor, stop_V: Tensor, rows: Rows) -> None:
    """Write down what was drawn, and make the rows that go on ready for their next token. Done rows stay as they are."""
    names = ("last", "count", "position", "slot", "limit", "min", "done")
    state = (*(rows[name] for name in names), rows.table, rows.step, rows.ids, rows.logprobs)
    sizes = (len(id_N), rows.capacity, rows.pages, PAGE, 128)
    _triton().advance_kernel[(-(-len(id_N) // 128),)](id_N, logprob_N, stop_V, *state, *sizes)
    rows.step.add_(1)
