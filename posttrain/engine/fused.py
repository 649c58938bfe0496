"""The forward pass of a described model (models/layers.py) as a short list of kernels over flat tokens, for prefilling and for
decoding in CUDA graphs; and the other operations of a decode step, one Triton kernel each.

It reads the parameters of the policy's own module. Products that share their input are done as one, for which their weights are
copied side by side (`refresh`, at every call of `generate`, a millisecond for a billion weights); everything else is the module's own
memory, so that an optimizer step in place is seen by graphs already captured. Adapters are not merged, which in bf16 would round
small ones away: they are two narrow products in addition to each wide one, the first of them beside it.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.engine import fp8
from posttrain.engine.random import uniforms
from posttrain.engine.rows import PAGE, Rows
from posttrain.engine.sampler import Choices, draw
from posttrain.models import layers
from posttrain.models.attention import Attend, Packed, Rule, attend_packed
from posttrain.models.policy import Policy
from posttrain.ops.device import is_hopper
from posttrain.ops.experts import Routes
from posttrain.ops.fused import add_norm, gated, power_of_two
from posttrain.ops.hopper import gated_product
from posttrain.ops.logprobs import Head, head_logits

BLOCK = 4096  # logits that one program sums
MAX_QUERIES = 64  # queries that read a prompt together
PROGRAMS = 128  # of an attention kernel; with fewer, keys are cut into parts
PROMPT_PARTS = 1  # into which prompts are cut then
TALL = 128  # rows from which on logits are not written
# rows, ids and elements that one program of the output layer's product takes
HEAD_TILE = (128, 256, 64)
FINE = 64  # of those ids: logits that are computed again where one of them is drawn


class Products:
    """y = x W^T + b + (x A^T) B^T of one or more linear layers that read the same x: weights side by side, adapters (scale in B, one
    block of it a layer) likewise. A layer alone lends its own weight; what is copied is filled by `refresh`. Weights in 4 bits are not
    copied: they are made anew for each product; and of `quantised` ones (engine/fp8.py) only the adapters are used."""

    def __init__(self, projection: layers.Projection, quantised: bool = False):
        self.projection, self.narrow = projection, bool(projection.narrow)
        self.copied = len(projection.modules) > 1 and not (self.narrow or quantised)
        self.allocate()

    def allocate(self) -> None:
        """Room for the copies."""
        modules, rows = self.projection.modules, sum(self.projection.sizes)
        first, bias = modules[0].weight.detach(), modules[0].bias
        self.weight: Tensor = first.new_empty(rows, first.shape[1]) if self.copied else first
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
        inner = self._inner(x)
        return self._adapt(F.linear(x, self._whole(), self.bias), x, inner)

    def gated(self, x: Tensor, tanh: bool) -> Tensor:
        """act(gate) * up of what a call gives, which is gate and then up."""
        if self.projection.plain:
            return gated_product(x, self.weight, tanh)
        return gated(self(x), tanh)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """total += what a call gives, summed inside the products."""
        inner = self._inner(x)
        total.addmm_(x, self._whole().t())
        if self.bias is not None:
            total += self.bias
        self._adapt(total, x, inner)

    def _whole(self) -> Tensor:
        return self.projection.weight() if self.narrow else self.weight

    def adapted(self, x: Tensor) -> Tensor:
        """What the adapters alone give."""
        return F.linear(F.linear(x, self.down), self.up)

    def _inner(self, x: Tensor) -> tuple[Tensor, SideStream] | None:
        """Room for x A^T, and from when on it may be computed. Both are taken before the wide product: memory that this gives back
        while it runs must not be written beside it."""
        ranks = self.down.shape[0]
        return (x.new_empty(len(x), ranks), SideStream(x.device)) if ranks else None

    def _adapt(self, out: Tensor, x: Tensor, inner: tuple[Tensor, SideStream] | None) -> Tensor:
        if inner is None:
            return out
        inner_TR, stream = inner
        with stream:
            torch.mm(x, self.down.t(), out=inner_TR)
        return out.addmm_(inner_TR, self.up.t())


class SideStream:
    """On CUDA, a second stream for what depends on nothing that was launched after this was made. The current stream waits for it at
    the end of the context."""

    def __init__(self, device: torch.device):
        self.begun: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.current, self.side = torch.cuda.current_stream(device), _side_stream(device)
            self.begun = self.current.record_event()

    def __enter__(self) -> None:
        if self.begun is not None:
            self.side.wait_event(self.begun)
            torch.cuda.set_stream(self.side)

    def __exit__(self, *_: object) -> None:
        if self.begun is not None:
            torch.cuda.set_stream(self.current)
            self.current.wait_stream(self.side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Layer:
    """One decoder layer on flat tokens, in place on the residual stream."""

    def __init__(self, layer: layers.LayerDescription, quantised: bool):
        self.described, self.heads = layer, layer.heads
        low = (False, False, quantised, quantised)
        self.products = list(map(Products, layer.projections, low))
        self.qkv, self.out, *self.mlp = self.products
        self.quantised_mlp = fp8.QuantizedMLP(layer, *self.mlp) if quantised else None

    def __call__(
        self,
        x: Tensor,
        rope: layers.RopeTable,
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
        self.add_mlp(x, routes)

    def add_mlp(self, x: Tensor, routes: Routes | None = None) -> None:
        """x += what the MLP, or the experts, make of it."""
        layer = self.described
        if self.quantised_mlp is not None:
            self.quantised_mlp(x, is_hopper(x.device))
            return
        inner = _normalised(x, layer.post_norm)
        if layer.experts is not None:
            x += layer.experts(inner, partial(gated, tanh=layer.tanh), routes)
            return
        gate_up, down = self.mlp
        down.add_to(x, gate_up.gated(inner, layer.tanh))


def _normalised(x: Tensor, norm: layers.Norm) -> Tensor:
    return add_norm(x, None, norm.weight.detach(), norm.epsilon, norm.shifted)[1]


class Fused:
    """Hidden states of flat tokens at explicit positions, with keys and values stored as they come. It has the weights of the moment
    it was made, until `refresh`."""

    def __init__(
        self,
        policy: Policy,
        described: layers.ModelDescription,
        precision: fp8.Precision = fp8.AS_TRAINED,
    ):
        self.policy, self.body, self.described = policy, policy.body, described
        self.precision = precision
        self.layers = [Layer(layer, precision.products) for layer in described.layers]
        self.quantised = [q for layer in self.layers if (q := layer.quantised_mlp) is not None]
        self.heads = tuple(layer.heads for layer in described.layers)
        self.products = [product for layer in self.layers for product in layer.products]
        self.scale = getattr(self.body.embed_tokens, "embed_scale", None)
        self.rope: layers.RopeTable | None = None
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
            for mlp in self.quantised:
                mlp.allocate()
            self.released = False
        pairs = [pair for product in self.products for pair in product.copies()]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
        for mlp in self.quantised:
            mlp.refresh()

    def release(self) -> None:
        """Give the memory of the copies back; `refresh` takes it anew, in another place."""
        for product in self.products:
            product.release()
        for mlp in self.quantised:
            mlp.release()
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

    @torch.inference_mode()
    def layer_alone(
        self, number: int, x_TH: Tensor, position_T: Tensor, packed: Packed, routes: Routes | None
    ) -> Tensor:
        x, tokens, heads = x_TH.clone(), len(x_TH), self.heads[number]
        keys, values = x.new_empty(2, tokens, heads.keys, heads.width)
        rope = self.described.rope_table(int(position_T.max()) + 1)
        slots = torch.arange(tokens, device=x.device)
        attend = attend_packed(packed.lengths, x.device)
        self.layers[number](x, rope, position_T, slots, (keys, values), attend, routes)
        return x


def fused(policy: Policy, precision: fp8.Precision = fp8.AS_TRAINED) -> tuple[Fused | None, str]:
    """The fused decoder of a policy, proved on tokens to compute what the module computes; or None, and why not. Products in fp8 are
    proved with a wider tolerance."""
    described = layers.describe(policy)
    if isinstance(described, str):
        return None, described
    if precision.products and (reason := fp8.unsupported(described)):
        return None, reason
    name, wider = ("cuda fp8", fp8.TOLERANCE) if precision.products else ("cuda", 0.0)
    reason = layers.prove(
        policy, described, name, lambda: Fused(policy, described, precision), wider
    )
    return (None, reason) if reason else (Fused(policy, described, precision), "")


def _triton() -> Any:
    from posttrain.engine import triton_kernels

    return triton_kernels


def _sampling() -> Any:
    from posttrain.engine import triton_sampling

    return triton_sampling


def rotate_store(
    qkv: Tensor,
    heads: layers.Heads,
    rope: layers.RopeTable,
    position_T: Tensor,
    slot_T: Tensor,
    store: tuple[Tensor, Tensor],
    norms: tuple[layers.Norm, layers.Norm] | None,
) -> None:
    """In place on [T, (Hq + 2 Hk) D]: normalise queries and keys, where there are norms, rotate them by
    their positions' angles, and write keys and values into their slots of the [slots, Hk, D] stores."""
    weights = (norms[0].weight.detach(), norms[1].weight.detach()) if norms else (qkv, qkv)
    epsilon, shifted = (norms[0].epsilon, norms[0].shifted) if norms else (0.0, False)
    blocks = (power_of_two(heads.width // 2), power_of_two(heads.heads + 2 * heads.keys))
    sizes, early = (heads.heads, heads.keys, heads.width, *blocks), is_hopper(qkv.device)
    inputs = (qkv, *rope, position_T, slot_T, *store, *weights, epsilon)
    flags = (norms is not None, shifted, early)
    _triton().rotate_store_kernel[(len(qkv),)](*inputs, *sizes, *flags, launch_pdl=early)


def tile_rows(heads: layers.Heads, group: int) -> tuple[int, int]:
    """(rows of a tile, queries of its program) for groups of up to `group` rows."""
    queries = min(MAX_QUERIES, max(16, power_of_two(group * heads.grouped)))
    queries = max(queries, power_of_two(heads.grouped))
    return queries // heads.grouped, queries


def parts(programs: int, pages: int) -> int:
    """Into how many parts the keys of a row with up to so many pages are cut, where there are too few rows for the device: a power
    of two, so that few kernels are compiled, and two pages or more each.

    >>> [parts(programs, 16) for programs in (2048, 64, 32, 2)], parts(16, 2)
    ([1, 2, 4, 8], 1)
    """
    return power_of_two(max(1, min(PROGRAMS // programs, 8, pages // 2)) + 1) // 2


def attend_pages(
    query_NHD: Tensor,
    store: tuple[Tensor, Tensor],
    rows: Rows,
    heads: layers.Heads,
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
    own = parts(count * heads.keys, rows.pages)
    whole = own == 1
    ahead = 1 if whole else PROMPT_PARTS
    total, device = ahead if whole else ahead + own, query_NHD.device
    found = torch.empty(total, *query_NHD.shape, dtype=wide, device=device)
    # every live row is in a tile
    lse = torch.empty(total, count, heads.heads, dtype=wide, device=device)
    out = torch.empty(query_NHD.shape, dtype=query_NHD.dtype, device=device)
    limits = (rule.scaling, rule.softcap or 1.0, rule.sliding_window or 0, count)
    precision = "ieee" if query_NHD.dtype == wide else "tf32"
    early = is_hopper(device)
    flags = (PAGE, rule.sliding_window is not None, rule.softcap is not None, precision, early)
    shape = (heads.heads, heads.keys, heads.width, max(16, power_of_two(heads.width)))
    state = (query_NHD, *store, found, lse)
    prompts = (rows.tile, rows.prompt_table, rows["position"])
    sizes = (rows.capacity, rows.prompt_pages, *shape, queries)
    inputs = (*state, *prompts, *limits, *sizes, *flags)
    written = (rows["count"], rows["done"], rows.table)
    own_sizes = (rows.pages, ahead, whole, *shape, max(16, power_of_two(heads.grouped)))
    own_inputs = (*state, out, *written, *limits, *own_sizes, *flags)
    page_bytes = PAGE * shape[-1] * store[0].dtype.itemsize
    # the next page's keys and values are on their way while this one's are used, where shared memory holds both
    how: dict[str, Any] = {"num_stages": 3 if page_bytes <= 1 << 15 else 2, "launch_pdl": early}
    kernels.prefix_kernel[(tiles, heads.keys, ahead)](*inputs, **how)
    warps = 2 if page_bytes <= 1 << 13 else 4
    kernels.suffix_kernel[(heads.keys, count, own)](*own_inputs, num_warps=warps, **how)
    if not whole:
        merged = (total, heads.heads, heads.width, shape[-1], power_of_two(heads.heads), early)
        kernels.merge_kernel[(count,)](found, lse, out, count, *merged, launch_pdl=early)
    return out


def _head_fits(hidden_NH: Tensor, head: Head) -> bool:
    """Whether the kernel that sums logits without writing them can do this output layer on this device: Hopper's, on which it was
    timed; others may have too little shared memory for its tiles."""
    plain = head.softcap is None and head.bias_V is None and head.scale == 1.0
    narrow = hidden_NH.dtype.itemsize == 2 and hidden_NH.shape[1] % 8 == 0
    return plain and narrow and is_hopper(hidden_NH.device)


def sample(hidden_NH: Tensor, head: Head, rows: Rows, truncated: bool) -> tuple[Tensor, Tensor]:
    """An id and its log-prob for each of the first rows, drawn at the row's own uniform; rows that are done get nothing of meaning.
    Logits are not written to memory where there are many and nothing but the product makes them."""
    if truncated or len(hidden_NH) < TALL or not _head_fits(hidden_NH, head):
        return choose(head_logits(hidden_NH, head), rows, truncated)
    kernels, (count, width), size = _sampling(), hidden_NH.shape, head.weight_VH.shape[0]
    tall, broad, deep = HEAD_TILE
    grid = (-(-count // tall), -(-size // broad))
    sums = [
        t
        for blocks in (grid[1], grid[1] * (broad // FINE))
        for t in hidden_NH.new_empty(2, count, blocks, dtype=torch.float32)
    ]
    tiles = (kernels.tiles(hidden_NH, tall, deep), kernels.tiles(head.weight_VH, broad, deep))
    sizes = (count, size, width, FINE, *HEAD_TILE)
    kernels.head_sums_kernel[grid](
        *tiles, rows.temperature, *sums, *sizes, num_warps=8, num_stages=3
    )
    return _drawn(hidden_NH, head.weight_VH, rows, sums, (size, grid[1], width, broad))


def choose(logits_NV: Tensor, rows: Rows, truncated: bool) -> tuple[Tensor, Tensor]:
    """`sample` from logits, which are read once, and one block of them again."""
    count, size = logits_NV.shape
    if truncated:
        choices = Choices(rows.temperature[:count], rows["top_k"][:count], rows.top_p[:count])
        uniform_N = uniforms(rows["seed"][:count], rows["count"][:count])
        return draw(logits_NV, choices, uniform_N, truncated)
    blocks = -(-size // BLOCK)
    top, total = logits_NV.new_empty(2, count, blocks)
    sums = (logits_NV, rows.temperature, top, total, size, blocks, BLOCK)
    _sampling().block_sums_kernel[(count, blocks)](*sums)
    return _drawn(logits_NV, None, rows, [top, total] * 2, (size, blocks, size, BLOCK))


def _drawn(
    source: Tensor,
    weight_VH: Tensor | None,
    rows: Rows,
    sums: list[Tensor],
    sizes: tuple[int, int, int, int],
) -> tuple[Tensor, Tensor]:
    """Ids and log-probs by the sums of blocks and of their parts, and logits or hidden states."""
    count, device = len(source), source.device
    id_N = torch.zeros(count, dtype=torch.int64, device=device)
    logprob_N = torch.zeros(count, device=device)
    state = (rows["seed"], rows["count"], rows["done"], id_N, logprob_N)
    again = weight_VH is not None
    given = (source, weight_VH if again else source, rows.temperature, *sums, *state, *sizes)
    _sampling().draw_kernel[(count,)](*given, power_of_two(sizes[1]), FINE, 128, again)
    return id_N, logprob_N


def advance(id_N: Tensor, logprob_N: Tensor, stop_V: Tensor, rows: Rows) -> None:
    """Write down what was drawn, and make the rows that go on ready for their next token. Done rows stay as they are."""
    names = ("last", "count", "position", "slot", "limit", "min", "done")
    state = (*(rows[name] for name in names), rows.table, rows.step, rows.ids, rows.logprobs)
    sizes = (len(id_N), rows.capacity, rows.pages, PAGE, 128)
    _sampling().advance_kernel[(-(-len(id_N) // 128),)](id_N, logprob_N, stop_V, *state, *sizes)
    rows.step.add_(1)
