"""Reading a checkpoint directory in the hub's layout: config.json, safetensors weights, tokenizer.

The directory is untrusted data. Everything in it that could run code, unpickle, read another path or silently change the
model is looked for and refused here, before `transformers` opens a file, rather than trusted to a flag of the callee.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import UserError, require

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
MODEL_FILES = ("tokenizer.model", "spiece.model", "tiktoken.model")
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", *MODEL_FILES)
LARGEST_JSON = 256 * 1024 * 1024  # the largest tokenizer.json in use is about 40 MB

# Settings that make transformers read weights from elsewhere, or put other modules in place of the model's own.
REFUSED_SETTINGS = {
    "quantization_config": "its weights are quantized and cannot be trained; take the unquantized checkpoint",
    "transformers_weights": "it names its own weight file; rename that file to model.safetensors and remove the setting",
    "fusion_config": "it asks for fused modules; remove the setting",
}


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error's message, shortened: foreign messages run to paragraphs."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def read_directory(
    folder: Path, dtype: torch.dtype | None, score: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model and tokenizer of a checked directory; `dtype` None keeps the checkpoint's own. `score` asks for a reward model."""
    check_directory(folder)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    safe: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    tokenizer = read_tokenizer(folder)
    try:
        check_depth(folder)  # before transformers makes something for every layer
        config = AutoConfig.from_pretrained(folder, **safe)
        kind = AutoModelForSequenceClassification if score else AutoModelForCausalLM
        model, report = kind.from_pretrained(
            folder,
            config=config,
            dtype="auto" if dtype is None else dtype,
            use_safetensors=True,
            attn_implementation=attention_for(config),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below with their names; the error names none
            **safe,
        )
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{folder}: the model cannot be read ({first_line(error)}); check config.json"
        ) from error
    check_report(str(folder), report)
    return model, tokenizer


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model directory."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer puts the rules of some families (Qwen 2, Llama) in place of tokenizer.json's; the file is the truth.
    reader = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    try:
        return reader.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a malformed file makes transformers raise
        raise UserError(
            f"{folder}: the tokenizer cannot be read ({first_line(error)}); copy it anew"
        ) from error


def attention_for(config: PretrainedConfig) -> str:
    """The stock attention that computes this model as it was trained: `sdpa` leaves out the soft cap of Gemma 2's scores."""
    text = config.get_text_config()
    return "eager" if getattr(text, "attn_logit_softcapping", None) is not None else "sdpa"


def check_report(source: str, report: dict[str, Any]) -> None:
    """Refuse a model that transformers filled up with random numbers, which it reports only in a warning."""
    for kind, meaning in (
        ("missing_keys", "are not in the weight files"),
        ("mismatched_keys", "do not have the shape config.json says"),
    ):
        names = sorted(
            name if isinstance(name, str) else name[0] for name in report.get(kind) or ()
        )
        require(
            not names,
            f"{source}: {len(names)} tensors {meaning} ({', '.join(names[:2])}); copy the model anew",
        )


def check_directory(folder: Path) -> None:
    """Refuse a directory that is incomplete, corrupt, or asks to run code."""
    require(
        folder.is_dir(),
        f"{folder} is not a directory; give a model directory, a .gguf file or a hub name (org/name)",
    )
    adapter = folder / "adapter_config.json"
    require(
        not adapter.exists(),
        f"{folder} holds a LoRA adapter; merge it into its base model and save that",
    )
    require(
        (folder / "config.json").is_file(), f"{folder} has no config.json; is it a saved model?"
    )
    config = read_json(folder / "config.json")
    require(
        "model_type" in config,
        f"{folder}/config.json names no model_type; is it a model of transformers?",
    )
    for setting, reason in REFUSED_SETTINGS.items():
        require(config.get(setting) is None, f"{folder}/config.json sets {setting}: {reason}")
    for part in ("", "tokenizer_", "generation_", "processor_"):
        if (folder / f"{part}config.json").is_file():
            refuse_code(folder / f"{part}config.json")
    check_weights(folder)
    require(
        any((folder / name).is_file() for name in VOCABULARIES),
        f"{folder} has no tokenizer (tokenizer.json or a vocabulary file); copy the tokenizer files of its base model there",
    )


def refuse_code(path: Path) -> None:
    """Refuse a JSON file that maps classes to Python code, at any depth of it."""
    pending: list[Any] = [read_json(path)]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            require(
                not value.get("auto_map") and not value.get("custom_pipelines"),
                f"{path} asks to run Python code that came with the model (auto_map), which posttrain never does; "
                "use a model whose architecture is part of transformers",
            )
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
    require(
        not pickles,
        f"{folder} has only pickled weights ({pickles[0] if pickles else ''}), which can run code when read; convert them to "
        "safetensors first (load the model where you trust it and call save_pretrained)",
    )
    raise UserError(
        f"{folder} has no weights: neither {WEIGHTS} nor {INDEX}; copy the weight files there"
    )


def check_depth(folder: Path) -> None:
    """Refuse more layers than there are tensors: layers are made before weights are read, and a billion of them would eat the host."""
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text("utf-8"))
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    layers = max(
        (n for part in parts if isinstance(n := part.get("num_hidden_layers", 0), int)), default=0
    )
    tensors = 0
    for name in [WEIGHTS] if (folder / WEIGHTS).is_file() else shards(folder):
        with safe_open(folder / name, framework="np") as file:
            tensors += len(file.keys())
    require(
        layers <= tensors,
        f"{folder / 'config.json'} asks for {layers} layers, and the weights are {tensors} tensors; copy it anew",
    )


def shards(folder: Path) -> list[str]:
    """The weight files named by the index, each a plain name of a file that exists."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    require(
        isinstance(weight_map, dict) and bool(weight_map),
        f"{folder / INDEX} has no weight_map; copy the index anew",
    )
    assert isinstance(weight_map, dict)
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        plain = name.endswith(".safetensors") and not any(
            mark in name for mark in ("/", "\\", ":", "\0")
        )
        require(
            plain,
            f"{folder / INDEX} names {name!r}, which is not a plain .safetensors file name; copy the index anew",
        )
        require(
            (folder / name).is_file(),
            f"{folder} lacks the weight file {name} that its index names; copy it there",
        )
    return names


def check_safetensors(path: Path) -> None:
    """Refuse a file whose header or length is wrong. Reads the header only."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            names = list(file.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"{path} is corrupt or cut short ({first_line(error)}); copy it anew"
        ) from error
    require(bool(names), f"{path} holds no tensors; copy it anew")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or one line that names the file."""
    require(
        path.stat().st_size <= LARGEST_JSON,
        f"{path} is too large to be a configuration file; copy it anew",
    )
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({first_line(error)}); copy it anew") from error
    require(isinstance(value, dict), f"{path} does not hold a JSON object; copy it anew")
    return value
