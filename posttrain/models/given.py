"""Models that a Python program hands over as modules: known in this process alone, by a name that settings can hold."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

import torch

from posttrain.errors import require
from posttrain.models import load
from posttrain.models.load import Loaded, Reader
from posttrain.models.tiny import without_length_warning
from posttrain.trust import elsewhere, known_as

_given: dict[str, tuple[Any, Any]] = {}


def give(model: Any, tokenizer: Any) -> str:
    """Make a causal language model of transformers and its tokenizer known; the name that settings call them."""
    kind = type(model).__name__
    causal = callable(getattr(model, "get_output_embeddings", None)) and hasattr(model, "config")
    plain = causal and model.get_output_embeddings() is not None
    other = f"model: {kind} is no plain causal language model of transformers; merge adapters (merge_and_unload), or give a path"
    require(plain and not hasattr(model, "peft_config"), other)
    alone = f"model: a module ({kind}) comes with its tokenizer: give tokenizer=..., or model=(module, tokenizer)"
    require(callable(getattr(tokenizer, "get_vocab", None)), alone)
    load.check_vocabulary(model, tokenizer, kind)
    name = known_as(_given, kind, lambda one: one[0] is model and one[1] is tokenizer)
    _given[name] = model, without_length_warning(tokenizer)
    return name


def reader(name: str) -> Reader:
    """How the module reads."""
    model, tokenizer = _known(name)
    return Reader(tokenizer, name, load.longest(model.config))


def content(name: str) -> str:
    """A hash of the module's weights and of its tokenizer."""
    model, tokenizer = _known(name)
    reads = [sorted(tokenizer.get_vocab().items()), str(tokenizer.chat_template)]
    found = hashlib.sha256(json.dumps(reads).encode())
    for key, tensor in model.state_dict().items():
        found.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def _known(name: str) -> tuple[Any, Any]:
    require(name in _given, elsewhere("model", name, "module", "save the model and give its path"))
    return _given[name]


def copied(
    name: str, dtype: str | torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Loaded:
    """A copy of the module, which is never changed itself: a run trains the copy, and a reference is another one."""
    model, tokenizer = _known(name)
    load.check_device(device)
    made = copy.deepcopy(model).to(device=device, dtype=load.as_dtype(dtype))
    for parameter in made.parameters():
        parameter.requires_grad_(True)
    return Loaded(made.eval(), tokenizer, name, load.stop_ids(made, tokenizer, name))
