"""A language model with a scalar head (a reward model or PPO's critic), and models that are on the device only while they compute,
so that a reward model does not hold GPU memory between calls.

A scorer is a plain `...ForSequenceClassification` of transformers with one label, so that a saved reward model loads there unchanged.
Two kinds are read here alone: those of families for which transformers has no such class (`scorer_class` in load.py), and those with an
`mlp` head, which have `score_head: mlp` in their config.json and for which transformers would start a new head.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.func import functional_call

from posttrain.errors import UserError, first_line, require
from posttrain.models.attention import install
from posttrain.models.load import scorer_class
from posttrain.models.policy import Network, Policy, text_body, with_our_attention
from posttrain.types import Rating, Rollout, Score

HEADS = ("linear", "mlp")
HEAD = "score."  # names of its tensors begin so


@dataclass(eq=False)
class Scorer(Network):
    """Ids in, one score for each token out: the score of the sequence up to it."""

    model: Any  # transformers ...ForSequenceClassification with one label
    tokenizer: Any
    source: str = ""

    def score(self, hidden_KH: Tensor) -> Tensor:
        """[K, H] -> [K], in float32 or wider, because differences of scores are small compared with the scores."""
        # in bf16 the product itself would be rounded, by 0.03 at a score of 5
        head = self.model.score
        wide = torch.promote_types(next(head.parameters()).dtype, torch.float32)
        weights = {name: weight.to(wide) for name, weight in head.named_parameters()}
        score_K1: Tensor = functional_call(head, weights, (hidden_KH.to(wide),))
        return score_K1[:, 0]


def from_policy(
    policy: Policy, head: str = "linear", zero: bool = True, seed: int = 0, share: bool = False
) -> Scorer:
    """A scorer on a copy of the policy's body. With `zero` its head starts at 0, as for a critic; else at random, as for a reward
    model.

    `share` makes the body another module over the policy's own parameters, for who freezes them (see models/lora.py).
    """
    require(head in HEADS, f"a head is one of {', '.join(HEADS)}, not {head!r}")
    config = copy.deepcopy(policy.model.config.get_text_config())
    config.num_labels = 1
    if head != "linear":
        config.score_head = head
    try:
        with torch.device("meta"):
            model = scorer_class(type(config)).from_config(config)
    except (ValueError, KeyError) as error:
        reason = f"transformers makes no model with a score of it ({first_line(error)})"
        raise UserError(f"{policy.source or type(policy.model).__name__}: {reason}") from None
    kept = {id(p): p for p in policy.body.parameters()} if share else {}
    setattr(model, model.base_model_prefix, copy.deepcopy(policy.body, kept))
    width = policy.model.config.get_text_config().hidden_size
    model.score = make_head(head, width, zero, seed, policy.dtype, policy.device)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())  # codes of 4 bits cannot learn
    if not policy.padded:
        install(model)
    if model.config.pad_token_id is None and policy.tokenizer is not None:
        model.config.pad_token_id = policy.tokenizer.pad_token_id
    return Scorer(model, policy.tokenizer, policy.source)


def make_head(
    kind: str, width: int, zero: bool, seed: int, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """A scalar head. `linear`: one row of weights, as in transformers. `mlp`: with a hidden layer of the same width before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        last = nn.Linear(width, 1, bias=kind == "mlp")
        nn.init.normal_(last.weight, std=(width + 1) ** -0.5)
        for parameter in (last.weight if zero else None, last.bias):
            if parameter is not None:
                nn.init.zeros_(parameter)
        made = last if kind == "linear" else nn.Sequential(nn.Linear(width, width), nn.Tanh(), last)
    return made.to(device=device, dtype=dtype)


def wrap_scorer(model: Any, tokenizer: Any, source: str = "") -> Scorer:
    """Plug our attention into a loaded scorer; see `with_our_attention`."""
    headed, name = isinstance(getattr(model, "score", None), nn.Module), type(model).__name__
    require(headed, f"{source or name}: the model has no score head of one label")
    return with_our_attention(
        Scorer(model, tokenizer, source),
        lambda id_T: text_body(model)(id_T[None], use_cache=False).last_hidden_state[0],
        lambda _, hidden_TH: hidden_TH,
    )


def load_scorer(
    name: str, dtype: str | torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Scorer:
    """Load a reward model saved by `posttrain` or by transformers, from a directory or a hub name."""
    from posttrain.models import load

    load.check_device(device)
    path = load.locate(name)
    packed = path.suffix.lower() == ".gguf"
    require(not packed, f"{name}: a reward model is read from {load.UNPACKED}")
    with load.quiet():
        model, tokenizer = load.read_directory(path, load.as_dtype(dtype), score=True)
    if getattr(model.config, "score_head", "") == "mlp":
        read_head(model, path)
    load.check_vocabulary(model, tokenizer, name)
    return wrap_scorer(model.to(device), tokenizer, name)


def read_head(model: Any, folder: Path) -> None:
    """Replace the head that transformers read by the head with a hidden layer in the model's files."""
    width = model.config.get_text_config().hidden_size
    model.score = make_head("mlp", width, True, 0, model.dtype, model.device)
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names = [name for name in tensors.keys() if name.startswith(HEAD)]  # noqa: SIM118
            found |= {name.removeprefix(HEAD): tensors.get_tensor(name) for name in names}
    shapes = {name: tensor.shape for name, tensor in found.items()}
    wanted = {name: weight.shape for name, weight in model.score.state_dict().items()}
    other = f"{folder}: the head in the weight files has {shapes or 'no tensors'}, not {wanted}"
    require(shapes == wanted, f"{other}; copy the model anew")
    model.score.load_state_dict(found)


@contextmanager
def on_device(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Move the model to `device` for the block, and back after it, also if the block fails."""
    before = next(model.parameters()).device
    if before == device:
        yield
        return
    model.to(device)
    try:
        yield
    finally:
        model.to(before)


class OffloadedRating:
    """A rating whose models are moved to `device` for each call and back after it."""

    def __init__(self, rating: Rating, models: Sequence[nn.Module], device: torch.device):
        self.rating, self.models, self.device = rating, tuple(models), device

    def rate(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        with ExitStack() as moved:
            for model in self.models:
                moved.enter_context(on_device(model, self.device))
            return self.rating.rate(rollouts)
