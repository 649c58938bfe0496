"""The model object that trainer and engine share: a transformers module, its head, its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from posttrain.errors import UserError, require
from posttrain.events import Events
from posttrain.models.attention import LAYOUT, Packed, install
from posttrain.models.load import FEWER, check_positions
from posttrain.models.routing import ROUTES, use_routes
from posttrain.ops.logprobs import Head, head_logits

Result = TypeVar("Result")
# relative distance below which rows of the head are equal, and how many equal rows are suspicious
SAME, MANY = 0.01, 16
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
        self.body = self.model.base_model

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
    def active_parameters(self) -> int:
        """The number of parameters that a token is multiplied with: for a mixture of experts, with its share of the experts."""
        return active_parameters(self.model)

    def within(self, function: Callable[..., Result], *given: Any) -> Result:
        """Call a function that reads the weights. Weights of a sharded network are gathered while it reads them."""
        if self.sharded is None:
            return function(*given)
        return self.model.within(partial(function, *given))[1]  # type: ignore[no-any-return]

    def hidden(self, ids: Tensor, position_ids: Tensor, **layout: Any) -> Tensor:
        """The final hidden states, [B, S, H], of ids at explicit positions under a layout of models/attention.py. Routers of
        experts record their choices in `ROUTES`."""
        use_routes(self.body, layout.pop(ROUTES, None))
        outputs = self.body(input_ids=ids, position_ids=position_ids, use_cache=False, **layout)
        return outputs.last_hidden_state  # type: ignore[no-any-return]


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
        divisor = getattr(config, "logits_scaling", None) or 1.0
        scale = getattr(config, "logit_scale", None) or 1.0 / divisor
        softcap = getattr(config, "final_logit_softcapping", None)
        return Head(layer.weight, layer.bias, float(scale), softcap)

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model supports; None if its configuration does not say."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return None if limit is None else int(limit)

    def check_length(self, tokens: int, advice: str = FEWER) -> None:
        check_positions(self.source, self.positions, tokens, advice)


def probe_tokens(model: Any) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Ids, positions and starts of two short packed sequences, on which two forward passes are compared."""
    ids_T = torch.arange(1, 12, device=model.device) % model.config.get_text_config().vocab_size
    return ids_T, torch.cat([torch.arange(7), torch.arange(4)]).to(model.device), (0, 7, 11)


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
    rotary = getattr(getattr(model.base_model, "rotary_emb", None), "rope_type", "")
    if "dynamic" in (rotary.values() if isinstance(rotary, dict) else (rotary,)):
        reason = "dynamic rotary scaling makes a sequence depend on its neighbours"
        raise UserError(f"{source or type(model).__name__}: {reason}; not supported")
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

    `own` computes a sequence as the model does before, `outputs` the same of the hidden states of packed sequences.
    """
    model, where = network.model, network.source or type(network.model).__name__
    silence_dropout(model)
    ids_T, position_T, starts = probe_tokens(model)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        expected = torch.cat([own(ids_T[start:end]) for start, end in pairwise(starts)])
        install(model)
        layout = {LAYOUT: Packed(starts, model.device)}
        try:
            found = outputs(network, network.hidden(ids_T[None], position_T[None], **layout)[0])
        except (NotImplementedError, TypeError, AttributeError, RuntimeError) as error:
            reason = f"this architecture does not work with packed attention: {error}"
            raise UserError(f"{where}: {reason}") from None
    model.train(was_training)
    worst, limit = disagreement(found, expected, model.dtype)
    finite = "its outputs are not finite: weights are NaN, infinite or far too large; copy the model anew"
    require(expected.isfinite().all(), f"{where}: {finite}")
    if not worst <= limit:
        found_by = f"by {worst:.2g} (at most {limit:g} is rounding)"
        reason = f"outputs with our attention differ from the model's own {found_by}"
        raise UserError(f"{where}: {reason}; this architecture is not supported")
    return network


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
