"""The model object that trainer and engine share: a transformers module, its head, its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from posttrain.errors import UserError, first_line, require
from posttrain.events import Events
from posttrain.models.attention import LAYOUT, Layout, Once, Packed, install
from posttrain.models.load import FEWER, check_positions, longest
from posttrain.models.routing import ROUTES, routers, use_routes
from posttrain.ops.logprobs import Head, head_logits

Result = TypeVar("Result")
# relative distance below which rows of the head are equal, and how many equal rows are suspicious
SAME, MANY = 0.01, 16
PADDED = "posttrain_padded"  # set on a body, with which copies are made
# what a model's own code may raise
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)
HALF = 0.25  # seen by rounding in bf16: 0.13; by a sequence that sees its neighbour: 1 and more


class Network:
    """The base class of policy and scorer: a transformers module whose body computes hidden states."""

    model: Any
    body: Any
    tokenizer: Any
    source: str
    events = Events()  # for messages about the model; a stage sets the run's
    sharded: Any = None  # train/sharding.py: where the weights are spread over processes
    router_replay = False  # train with the experts that the sampler chose; it is recorded by it

    def __post_init__(self) -> None:
        self.body = text_body(self.model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device  # type: ignore[no-any-return]  # transformers has no types

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype  # type: ignore[no-any-return]

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def trainable(self) -> int:
        """The number of parameters that are trained where all are: of models that also read images, those of the text."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def active_parameters(self) -> int:
        """The number of parameters that a token is multiplied with: for a mixture of experts, with its share of the experts."""
        return active_parameters(self.model)

    def within(self, function: Callable[..., Result], *given: Any) -> Result:
        """Call a function that reads the weights. Weights of a sharded network are gathered while it reads them."""
        if self.sharded is None:
            return function(*given)
        return self.model.within(partial(function, *given))[1]  # type: ignore[no-any-return]

    @property
    def padded(self) -> bool:
        """Whether sequences are rows of padded batches, computed by the model's own attention: it carries a state from token to token
        besides, as Qwen3.5, LFM2 and Mamba do, or has attention that ours cannot replace, as Bloom. End to end, sequences would see
        their neighbours."""
        return getattr(self.body, PADDED, False)

    @property
    def routers(self) -> dict[int, Any]:
        """The routers of experts whose choices can be recorded, by layer: those of padded batches see padding, too."""
        return {} if self.padded else routers(self.body)

    def learn(self) -> None:
        """Training mode, because layers are computed again in backward only then. Routers that draw experts in it (Phi-MoE) stay
        as they are where the model samples."""
        self.model.train()
        for module in self.model.modules():
            if any("jitter" in name for name in vars(module)):
                module.eval()

    def hidden(self, ids: Tensor, position_ids: Tensor, **layout: Any) -> Tensor:
        """The final hidden states, [B, S, H], of ids at explicit positions under a layout of models/attention.py. Routers of
        experts record their choices in `ROUTES`."""
        use_routes(self.body, layout.pop(ROUTES, None))
        packed = layout.get(LAYOUT)
        if self.padded and isinstance(packed, Packed):
            assert packed.source is None, "rows share no beginning"
            # padding comes after the tokens of a row, which do not see it
            rows = [self.body_pass(ids[0, at], position_ids[0, at]) for at in packed.buckets]
            joined = torch.cat([row.flatten(0, 1) for row in rows])
            return (joined if packed.order is None else joined[packed.order])[None]
        return self.body_pass(ids, position_ids, **layout)

    def body_pass(self, ids: Tensor, position_ids: Tensor, **given: Any) -> Tensor:
        """The body's own forward pass."""
        given = {"use_cache": False} | given
        found = self.body(input_ids=ids, position_ids=position_ids, **given).last_hidden_state
        return found.to(self.dtype)  # type: ignore[no-any-return]  # Mamba's is float32


def text_body(model: Any) -> Any:
    """The part of a model that computes hidden states of text; of a model that also reads images, its language model."""
    body = model.base_model
    inner = getattr(body, "language_model", None) or getattr(body, "text_model", body)
    # a language model of its own within (Llama 4), which names no part as its body
    return inner if inner.get_output_embeddings() is None else inner.model


def active_parameters(model: Any) -> int:
    text = model.config.get_text_config()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    every = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    used = getattr(text, "num_experts_per_tok", None) or every
    return int(sum(sizes.values()) - experts + experts * used // every)


N = TypeVar("N", bound=Network)


@dataclass(eq=False)
class Policy(Network):
    """A causal language model: ids in, hidden states out, and a head that turns them into logits."""

    model: Any  # transformers.PreTrainedModel
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    source: str = ""  # its origin, for messages

    @property
    def head(self) -> Head:
        """The head, read at each use: the parameter may be replaced, as when embeddings are tied or adapters added."""
        layer, config = self.model.get_output_embeddings(), self.model.config.get_text_config()
        names = ("logit_scale", "lm_head_multiplier", "logits_scaling")
        scale, multiplier, other = (getattr(config, name, None) or 1.0 for name in names)
        # HyperCLOVA X multiplies by it
        scale *= multiplier * other ** (1 if config.model_type == "hyperclovax" else -1)
        softcap = getattr(config, "final_logit_softcapping", None)
        return Head(layer.weight, layer.bias, float(scale), softcap)

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model supports; None if its configuration does not say."""
        return longest(self.model.config)

    def check_length(self, tokens: int, advice: str = FEWER) -> None:
        check_positions(self.source, self.positions, tokens, advice)


def probe_tokens(
    model: Any, starts: tuple[int, ...] = (0, 7, 11)
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Ids, positions and starts of short packed sequences, on which two forward passes are compared. The ids are spread, because the
    first ones of a vocabulary may be alike: nobody trained them."""
    ids_T = torch.arange(1, starts[-1] + 1, device=model.device)
    ids_T = ids_T * model.config.get_text_config().vocab_size // (starts[-1] + 2)
    positions = [torch.arange(end - start) for start, end in pairwise(starts)]
    return ids_T, torch.cat(positions).to(model.device), starts


def silence_dropout(model: nn.Module) -> None:
    """Set every dropout rate to 0: of modules, and of attributes that are passed to functions (OPT)."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and type(value) is float:
                setattr(module, name, 0.0)


def disagreement(found_TV: Tensor, expected_TV: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """(how far outputs differ, how far rounding may make them differ). In float32: the largest difference relative to the largest
    output. In half precision, where single outputs of deep models differ as much as with a wrong attention: the largest distance of
    a row relative to the row's own spread."""
    if dtype in (torch.float32, torch.float64):
        largest = expected_TV.abs().max().clamp(min=1.0)
        return float((found_TV - expected_TV).abs().max() / largest), 2e-4
    pair = (expected_TV.float(), found_TV.float() - expected_TV.float())
    own_TV, apart_TV = (x - x.mean(-1, keepdim=True) for x in pair)
    return float((apart_TV.norm(dim=-1) / own_TV.norm(dim=-1)).max()), HALF


def wrap_model(model: Any, tokenizer: Any, stop_ids: tuple[int, ...], source: str = "") -> Policy:
    """Plug our attention into a causal language model; see `with_our_attention`."""
    body = text_body(model)
    rotary = getattr(getattr(body, "rotary_emb", None), "rope_type", "")
    if "dynamic" in (rotary.values() if isinstance(rotary, dict) else (rotary,)):
        reason = "dynamic rotary scaling makes a sequence depend on its neighbours"
        raise UserError(f"{source or type(model).__name__}: {reason}; not supported")
    used = {*body.parameters(), *model.get_output_embeddings().parameters()}
    for parameter in {*model.parameters()} - used:
        parameter.requires_grad_(False)  # what reads images
    return with_our_attention(
        Policy(model, tokenizer, tuple(stop_ids), source),
        lambda id_T: model(id_T[None], use_cache=False).logits[0].float(),
        lambda policy, hidden_TH: head_logits(hidden_TH, policy.head),
    )


def with_our_attention(
    network: N, own: Callable[[Tensor], Tensor], outputs: Callable[[N, Tensor], Tensor]
) -> N:
    """Plug our attention into a transformers model, and check that it still computes the same: a model of an unsupported kind is
    refused here and not trained wrongly. Dropout is switched off, because sampling and training must see the same distribution.

    `own` computes a sequence as the model does before, `outputs` the same of hidden states. The check is of two packed sequences whose
    common beginning is computed once. A model that our attention cannot compute is `padded` and keeps its own.
    """
    model, where = network.model, network.source or type(network.model).__name__
    silence_dropout(model)
    stock, was_training = model.config._attn_implementation, model.training
    text = model.config.get_text_config()
    ids_K, device = probe_tokens(model)[0], model.device
    _, position_T, starts = probe_tokens(model, (0, 7, 15))
    source = torch.tensor([*range(7), *range(4), *range(7, 11)], device=device)
    kept = torch.tensor([*range(7), *range(11, 15)], device=device)
    model.eval()
    layout: dict[str, Layout]
    reasons = list[str]()
    with torch.no_grad():
        try:
            expected = torch.cat([own(ids_K[source[start:end]]) for start, end in pairwise(starts)])
        except FAILURES as error:
            reason = f"the model does not run ({first_line(error)}); check config.json"
            raise UserError(f"{where}: {reason}") from error
        finite = "its outputs are not finite: weights are NaN, infinite or far too large; copy the model anew"
        require(expected.isfinite().all(), f"{where}: {finite}")
        network.learn()
        for padded in (False, True):
            setattr(network.body, PADDED, padded)
            try:
                if padded:
                    model.set_attn_implementation(stock)
                    layout = {LAYOUT: Packed(starts, device)}
                    hidden_TH = network.hidden(ids_K[source][None], position_T[None], **layout)[0]
                else:
                    install(model)
                    once = Once(Packed(starts, device, kept, source), text)
                    layout = {LAYOUT: once}
                    found_KH = network.hidden(ids_K[None], position_T[kept][None], **layout)[0]
                    once.check()
                    hidden_TH = found_KH[source]
                worst, limit = disagreement(outputs(network, hidden_TH), expected, model.dtype)
                if worst <= limit:
                    model.train(was_training)
                    return network
                off = f"by {worst:.2g} (at most {limit:g} is rounding)"
                reasons.append(f"outputs differ from the model's own {off}")
            except FAILURES as error:
                reasons.append(first_line(error).rstrip("."))
    both = f"{reasons[0]}; with its own attention: {reasons[1]}"
    raise UserError(f"{where}: this architecture is not supported: {both}")


def untrained_tags(policy: Policy, tags: Sequence[str]) -> list[str]:
    """A warning about tags that are single tokens whose rows in the head equal those of many other tokens, to within `SAME` of
    their length: the model was never trained on them. It may write them greedily; when sampling, any of the others may come
    instead."""
    vocabulary, weight_VH = policy.tokenizer.get_vocab(), policy.head.weight_VH.detach()
    found = list[str]()
    for tag in tags:
        if tag in vocabulary:
            row_H = weight_VH[vocabulary[tag]].float()
            far_V = torch.cat(
                [(part.float() - row_H).norm(dim=-1) for part in torch.split(weight_VH, 8192)]
            )
            others = int((far_V <= SAME * row_H.norm()).sum()) - 1
            found += [f"{tag} ({others:,})"] if others >= MANY else []
    if not found:
        return []
    return [
        f"the model was never trained on {', '.join(found)}: in its head they have the rows of other tokens (in brackets, how "
        "many). Sampled, another stands in their place, and calls cannot be read; set the task's format to tag"
    ]
