"""What is refused of a model's directory, which is untrusted data, before `transformers` opens a file of it: whatever could run code,
unpickle, read another path or silently change the model. Nothing is trusted to a flag of the callee.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from posttrain.errors import UserError, first_line, require
from posttrain.models import bounds

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
MODEL_FILES = ("tokenizer.model", "spiece.model", "tiktoken.model")
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", *MODEL_FILES)

# Settings that make transformers read weights from elsewhere, or put other modules in place of the model's own.
REFUSED_SETTINGS = {
    "quantization_config": "its weights are quantized and cannot be trained; take the unquantized checkpoint",
    "transformers_weights": "it names its own weight file; rename that file to model.safetensors and remove the setting",
    "fusion_config": "it asks for fused modules; remove the setting",
}

COPY_TOKENIZER = "copy the tokenizer files of its base model there"
GIVE = "give a model directory, a .gguf file or a hub name (org/name)"


def check_directory(folder: Path, weights: bool = True) -> None:
    """Refuse a directory that is incomplete, corrupt, or asks to run code; one without `weights` may lack those."""
    require(folder.is_dir(), f"{folder} is not a directory; {GIVE}")
    adapter, path = folder / "adapter_config.json", folder / "config.json"
    advice = "merge it into its base model and save that"
    require(not adapter.exists(), f"{folder} holds a LoRA adapter; {advice}")
    require(path.is_file(), f"{folder} has no config.json; is it a saved model?")
    bounds.check_files(folder)
    config = read_json(path)
    require("model_type" in config, f"{path} names no model_type; is it a model of transformers?")
    for setting, reason in REFUSED_SETTINGS.items():
        require(config.get(setting) is None, f"{folder}/config.json sets {setting}: {reason}")
    for part in ("", "tokenizer_", "generation_", "processor_"):
        if (folder / f"{part}config.json").is_file():
            refuse_code(folder / f"{part}config.json")
    if weights:
        check_weights(folder)
    absent = f"{folder} has no tokenizer (tokenizer.json or a vocabulary file)"
    require(any((folder / name).is_file() for name in VOCABULARIES), f"{absent}; {COPY_TOKENIZER}")


def refuse_code(path: Path) -> None:
    """Refuse a JSON file that maps classes to Python code, at any depth of it."""
    pending: list[Any] = [read_json(path)]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            code = value.get("auto_map") or value.get("custom_pipelines")
            asks = f"{path} asks to run Python code that came with the model (auto_map), which posttrain never does"
            require(not code, f"{asks}; use a model whose architecture is part of transformers")
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)


def check_weights(folder: Path) -> None:
    """Refuse weights that are absent, pickled, outside the directory, incomplete or corrupt."""
    if (folder / WEIGHTS).is_file():
        check_safetensors(folder / WEIGHTS)
        return
    if (folder / INDEX).is_file():
        for shard in shards(folder):
            check_safetensors(folder / shard)
        return
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    found = f"{folder} has only pickled weights ({pickles[0] if pickles else ''}), which can run code when read"
    advice = "safetensors first (load the model where you trust it and call save_pretrained)"
    require(not pickles, f"{found}; convert them to {advice}")
    absent = f"{folder} has no weights: neither {WEIGHTS} nor {INDEX}"
    raise UserError(f"{absent}; copy the weight files there")


def weight_sizes(folder: Path) -> tuple[int, int]:
    """How many tensors the weight files hold, and of how many elements, by their headers."""
    from safetensors import safe_open

    tensors = elements = 0
    for name in [WEIGHTS] if (folder / WEIGHTS).is_file() else shards(folder):
        with safe_open(folder / name, framework="np") as file:
            shapes = [file.get_slice(key).get_shape() for key in file.keys()]  # noqa: SIM118
        tensors, elements = tensors + len(shapes), elements + sum(map(prod, shapes))
    return tensors, elements


def shards(folder: Path) -> list[str]:
    """The weight files named by the index, each a plain name of a file that exists."""
    index, advice = folder / INDEX, "copy the index anew"
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map; {advice}")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        plain = name.endswith(".safetensors") and not set(name) & set("/\\:\0")
        detail = f"{name!r}, which is not a plain .safetensors file name"
        require(plain, f"{index} names {detail}; {advice}")
        detail, there = f"{name} that its index names", (folder / name).is_file()
        require(there, f"{folder} lacks the weight file {detail}; copy it there")
    return names


def check_safetensors(path: Path) -> None:
    """Refuse a file whose header or length is wrong. Reads the header only."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            names = list(file.keys())
    except (SafetensorError, OSError, ValueError) as error:
        found = f"{path} is corrupt or cut short ({first_line(error)})"
        raise UserError(f"{found}; copy it anew") from error
    require(names, f"{path} holds no tensors; copy it anew")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or one line that names the file."""
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({first_line(error)}); copy it anew") from error
    require(isinstance(value, dict), f"{path} does not hold a JSON object; copy it anew")
    return value
