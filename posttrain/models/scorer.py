"""A language model with a head of one number in place of the vocabulary's: a reward model, or PPO's critic.

It is a plain `...ForSequenceClassification` of transformers with one label, so that a saved reward model loads there unchanged.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.errors import UserError, require
from posttrain.models.attention import install
from posttrain.models.policy import Network, Policy, with_our_attention

HEADS = ("linear", "mlp")


@dataclass(eq=False)
class Scorer(Network):
    """Ids in, one number for each token out: what the model thinks of everything up to it."""

    model: Any  # transformers ...ForSequenceClassification with one label
    tokenizer: Any
    source: str = ""
    body: Any = field(init=False)

    def __post_init__(self) -> None:
        self.body = self.model.base_model

    def score(self, hidden_KH: Tensor) -> Tensor:
        """[K, H] -> [K], in float32 or wider: differences of scores are small against the scores."""
        head = self.model.score
        wide = torch.promote_types(next(head.parameters()).dtype, torch.float32)
        if isinstance(
            head, nn.Linear
        ):  # in bf16 the product itself would be rounded, by 0.03 at a score of 5
            return F.linear(
                hidden_KH.to(wide),
                head.weight.to(wide),
                None if head.bias is None else head.bias.to(wide),
            )[:, 0]
        score_K1: Tensor = head(hidden_KH.to(next(head.parameters()).dtype))
        return score_K1[:, 0].to(wide)


def from_policy(
    policy: Policy, head: str = "linear", zero: bool = True, seed: int = 0, share: bool = False
) -> Scorer:
    """A scorer on a copy of the policy's body. `zero` starts its head at 0, as a critic's; else at random, as a reward model's.

    `share` makes the body another module over the policy's own parameters, for who freezes them (see models/lora.py).
    """
    require(head in HEADS, f"a head is one of {', '.join(HEADS)}, not {head!r}")
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(policy.model.config)
    config.num_labels = 1
    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(config)
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{policy.source or type(policy.model).__name__}: transformers has no model with a score for this family ({error})"
        ) from None
    kept = {id(p): p for p in policy.body.parameters()} if share else {}
    setattr(model, model.base_model_prefix, copy.deepcopy(policy.body, kept))
    width = policy.model.config.get_text_config().hidden_size
    model.score = make_head(head, width, zero, seed, policy.dtype, policy.device)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    install(model)
    if model.config.pad_token_id is None and policy.tokenizer is not None:
        model.config.pad_token_id = policy.tokenizer.pad_token_id
    return Scorer(model, policy.tokenizer, policy.source)


def make_head(
    kind: str, width: int, zero: bool, seed: int, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """`linear`: one row of weights, as transformers has it. `mlp`: a hidden layer of the same width before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        last = nn.Linear(width, 1, bias=kind == "mlp")
        nn.init.normal_(last.weight, std=(width + 1) ** -0.5)
        if last.bias is not None:
            nn.init.zeros_(last.bias)
        if zero:
            nn.init.zeros_(last.weight)
        made = last if kind == "linear" else nn.Sequential(nn.Linear(width, width), nn.Tanh(), last)
    return made.to(device=device, dtype=dtype)


def wrap_scorer(model: Any, tokenizer: Any, source: str = "") -> Scorer:
    """Plug our attention into a loaded scorer; see `with_our_attention`."""
    require(
        isinstance(getattr(model, "score", None), nn.Module),
        f"{source or type(model).__name__}: the model has no score head of one label",
    )
    return with_our_attention(
        Scorer(model, tokenizer, source),
        lambda id_T: model.base_model(id_T[None], use_cache=False).last_hidden_state[0],
        lambda _, hidden_TH: hidden_TH,
    )


def load_scorer(
    name: str, dtype: str | torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Scorer:
    """A reward model saved by `posttrain` or by transformers: a directory or a hub name."""
    from posttrain.models.load import as_dtype, check_device, check_vocabulary, locate, quiet
    from posttrain.models.load_directory import read_directory

    check_device(device)
    path: Path = locate(name)
    require(
        path.suffix.lower() != ".gguf",
        f"{name}: a reward model is read from a safetensors directory, not from GGUF",
    )
    with quiet():
        model, tokenizer = read_directory(path, as_dtype(dtype), score=True)
    check_vocabulary(model, tokenizer, name)
    return wrap_scorer(model.to(device), tokenizer, name)
