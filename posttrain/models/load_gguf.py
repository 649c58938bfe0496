"""Reading a GGUF file into an ordinary model: weights unpacked to floats, tokenizer and chat template from its metadata.

`transformers` does the unpacking. What it gets wrong or leaves out is fixed here: special tokens, the rule by which text is
cut before the merges, the width of heads, the scaling of Llama 3's rotary positions, and a head that is the embedding.
"""

from __future__ import annotations

import mmap
import struct
import tempfile
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from posttrain.errors import UserError, first_line, require
from posttrain.models import bounds
from posttrain.models.load import attention_for, check_report
from posttrain.models.tiny import LOADING, without_length_warning

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

# Codes of the format: a metadata value's type -> how struct reads it.
SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
# in a header; a large vocabulary has 2^18 words
MAX_ENTRIES, MAX_DIMENSIONS, MAX_ITEMS = (1 << 17, 8, 1 << 22)
STRING, ARRAY, CONTROL, USER_DEFINED = 8, 9, 3, 4
# Relative distance: 0.04 between an 8-bit and a 5-bit copy of one matrix, about 0.3 with 2 bits; over 1 for two trained apart.
SAME_MATRIX = 0.4

# How byte-level tokenizers cut text before merging, by the name in `tokenizer.ggml.pre`.
LLAMA3_PIECES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_PIECES = LLAMA3_PIECES.replace("{1,3}", "")
PIECES = dict.fromkeys(("llama-bpe", "llama3"), LLAMA3_PIECES)
PIECES |= dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2_PIECES)
# single digits first, then the pieces of GPT-2
DIGIT_SPLITTERS = {"smollm", "starcoder", "refact", "command-r"}


class Header(NamedTuple):
    """What a GGUF file says before its weights: single values of its metadata, and where each tensor lies, its first byte and its
    length."""

    values: dict[str, Any]
    tensors: dict[str, tuple[int, int]]
    elements: int

    def own(self, key: str, default: Any = None) -> Any:
        """A value of the file's architecture."""
        return self.values.get(f"{self.values['general.architecture']}.{key}", default)


def read_gguf(
    path: Path, dtype: torch.dtype | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model, in `dtype` or float32, and the tokenizer of a GGUF file. Nothing else in its directory is read."""
    absent = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    needed = f"reading a GGUF file needs the package {' and '.join(absent)}"
    require(not absent, f"{path}: {needed}; pip install posttrain[gguf]")
    header = read_header(path)
    sizes = len(header.tensors), header.elements
    bounds.check_numbers(str(path), header.values, *sizes)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers import modeling_gguf_pytorch_utils as checkpoint
        from transformers.utils import logging

        checkpoint.tqdm = logging.tqdm  # its own one ignores `disable_progress_bar`
        parsed = checkpoint.load_gguf_checkpoint(str(path))
        config = AutoConfig.for_model(**parsed["config"])
        head_width = header.own("attention.key_length")
        if head_width is not None and hasattr(config, "head_dim"):
            config.head_dim = int(head_width)  # transformers leaves Qwen 3's at its default
        tokenizer = make_tokenizer(parsed["tokenizer"], config.model_type, header)
        bounds.check_size(str(path), AutoModelForCausalLM, config, *sizes)
    except UserError:
        raise
    except Exception as error:  # whatever a malformed file makes the readers raise
        found = f"{path}: the GGUF metadata cannot be read ({first_line(error)})"
        raise UserError(f"{found}; fetch the file anew") from error
    restore_rotary_scaling(path, header, config)
    model = read_model(path, config, dtype)
    tie_equal_head(model, header)
    return model, tokenizer


def read_model(path: Path, config: PretrainedConfig, dtype: torch.dtype | None) -> PreTrainedModel:
    """The weights, unpacked. An empty folder is given in place of the file's own, whose other files must not be read."""
    import torch
    import transformers

    # Without this, transformers 5.17 keeps blocks packed where it finds a kernel, and such a model cannot be trained.
    packing = getattr(transformers, "GgufConfig", None)
    settings = {"quantization_config": packing(dequantize=True)} if packing else {}
    try:
        with tempfile.TemporaryDirectory() as empty, LOADING:
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                empty,
                gguf_file=str(path.resolve()),
                config=config,
                dtype=torch.float32 if dtype is None else dtype,
                attn_implementation=attention_for(config),
                output_loading_info=True,
                trust_remote_code=False,
                local_files_only=True,
                **settings,
            )
    except Exception as error:
        found = f"{path}: the GGUF weights cannot be read ({first_line(error)})"
        raise UserError(f"{found}; fetch the file anew") from error
    check_report(str(path), report)
    check_shapes(str(path), model)
    leftovers = ((model, "hf_quantizer"), (model, "quantization_method"))
    for owner, name in (*leftovers, (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.is_quantized = False
    model.config._name_or_path = ""
    return model


def check_shapes(source: str, model: PreTrainedModel) -> None:
    """Refuse tensors of other shapes than the metadata says: transformers takes them from a GGUF file as they come."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(model.config).state_dict()
    found = model.state_dict().items()
    wrong = sum(tensor.shape != expected[name].shape for name, tensor in found)
    detail = f"{wrong} tensors do not have the shape its metadata says"
    require(not wrong, f"{source}: {detail}; fetch the file anew")


def make_tokenizer(
    fields: dict[str, Any], model_type: str, header: Header
) -> PreTrainedTokenizerFast:
    """The file's tokenizer. Special tokens are set by id from the metadata: transformers' own conversion takes the begin token
    of a Llama file for its end token, and a fixed token for Qwen's."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.ggml import convert_gguf_tokenizer

    tokens, types = list(fields["tokens"]), list(fields.get("token_type") or ())
    backend, _ = convert_gguf_tokenizer(model_type, dict(fields))
    if header.values.get("tokenizer.ggml.model") == "gpt2":
        set_pieces(backend, str(header.values.get("tokenizer.ggml.pre", "default")))
    for kind, add in ((CONTROL, backend.add_special_tokens), (USER_DEFINED, backend.add_tokens)):
        marked = [token for token, own in zip(tokens, types, strict=False) if own == kind]
        add([AddedToken(token, normalized=False, special=kind == CONTROL) for token in marked])
    names = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = header.values.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and 0 <= index < len(tokens):
            names[f"{role}_token"] = tokens[index]
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=header.values.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=int(header.own("context_length", 2**20)),
        **names,
    )
    return without_length_warning(made)


def set_pieces(backend: Tokenizer, name: str) -> None:
    """Cut text before the merges as the model's maker did; transformers cuts every Llama file as GPT-2 did."""
    from tokenizers import Regex, decoders, pre_tokenizers

    if name in PIECES:
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        cut = pre_tokenizers.Split(Regex(PIECES[name]), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, whole])
    elif name in DIGIT_SPLITTERS:
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    backend.decoder = decoders.ByteLevel()
    if PIECES.get(name) == LLAMA3_PIECES:
        # Llama 3 takes a piece that is a token whole, whatever the merges say
        backend.model.ignore_merges = True


def restore_rotary_scaling(path: Path, header: Header, config: PretrainedConfig) -> None:
    """Put back Llama 3's stretching of slow rotations, which the file holds as a tensor that transformers ignores.

    Any other scaling is refused: without it the model would run, and be another model.
    """
    advice = "which transformers does not read from GGUF; use the safetensors checkpoint"
    factors = any(name.startswith("rope_factors") for name in header.tensors)
    plain = header.own("rope.scaling.type", "none") in ("none", "") and not factors
    require(plain, f"{path}: its rotary positions are scaled, {advice}")
    if "rope_freqs.weight" not in header.tensors:
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    start, length = header.tensors["rope_freqs.weight"]
    stored = np.fromfile(path, dtype="<f4", count=length // 4, offset=start)
    theta = config.rope_parameters["rope_theta"]
    unscaled = theta ** -(np.arange(0, 2 * len(stored), 2) / (2 * len(stored)))
    config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(stored.max(initial=1.0)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, None)
    matches = len(frequencies) == len(stored)
    matches = matches and np.allclose(unscaled / frequencies.numpy(), stored, rtol=1e-3)
    require(matches, f"{path}: its rotary positions are scaled in an unknown way, {advice}")


def tie_equal_head(model: PreTrainedModel, header: Header) -> None:
    """Make head and embedding one matrix again where the file holds two copies of it, perhaps rounded differently.

    Otherwise training would move them apart, and a fifth of a small model would be counted twice. The finer copy is kept.
    """
    names = ("output.weight", "token_embd.weight")
    if model.config.tie_word_embeddings or not set(names) <= set(header.tensors):
        return
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    if head.shape != embedding.shape or (head - embedding).norm() > SAME_MATRIX * embedding.norm():
        return
    finer, coarser = (header.tensors[name][1] for name in names)
    if finer > coarser:
        embedding.data.copy_(head.data)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


class Cursor:
    """Reads little-endian values one after another, and never past the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.position = data, 0
        self.items = 0  # of arrays

    def value(self, code: str) -> Any:
        return struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code)))[0]

    def bytes(self, size: int) -> bytes:
        self.skip(size)
        return self.data[self.position - size : self.position]

    def skip(self, size: int) -> None:
        if size > len(self.data) - self.position:
            raise ValueError("it ends in the middle of its header")
        self.position += size

    def string(self) -> str:
        return self.bytes(self.value("Q")).decode("utf-8")

    def metadata(self, kind: int) -> Any:
        """A single value; None for an array, which is passed over."""
        if kind in SCALARS:
            return self.value(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise ValueError(f"its metadata has a value of unknown type {kind}")
        item, count = self.value("I"), self.value("Q")
        self.items += count
        if self.items > MAX_ITEMS:
            raise ValueError(f"its arrays claim {self.items:,} entries")
        if item in SCALARS:
            self.skip(count * struct.calcsize("<" + SCALARS[item]))
        elif item == STRING:
            for _ in range(count):
                self.skip(self.value("Q"))
        else:
            raise ValueError(f"its metadata has an array of unknown type {item}")
        return None


def read_header(path: Path) -> Header:
    """The header of a GGUF file, with a check that all the tensors it promises are there."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return parse_header(Cursor(data))
    except (ValueError, OverflowError, OSError, KeyError, struct.error) as error:
        found = f"{path} is not a usable GGUF file: {first_line(error)}"
        raise UserError(f"{found}; fetch the file anew") from error


def parse_header(cursor: Cursor) -> Header:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if cursor.bytes(4) != b"GGUF":
        raise ValueError("it does not begin with the letters GGUF")
    version = cursor.value("I")
    if version not in (2, 3):
        raise ValueError(f"it has format version {version}, and versions 2 and 3 are read")
    tensor_count, value_count = cursor.value("Q"), cursor.value("Q")
    if max(tensor_count, value_count) > MAX_ENTRIES:
        raise ValueError(f"it claims {max(tensor_count, value_count):,} entries")
    values: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.string()
        if key in values:
            raise ValueError(f"its metadata has {key[:100]!r} twice")
        values[key] = cursor.metadata(cursor.value("I"))
    if not isinstance(values.get("general.architecture"), str):
        raise ValueError("it names no architecture")
    places: dict[str, tuple[int, int]] = {}
    total = 0
    for _ in range(tensor_count):
        name, dimensions = cursor.string(), cursor.value("I")
        if dimensions > MAX_DIMENSIONS or name in places:
            many = f"{dimensions} dimensions, or is there twice"
            raise ValueError(f"its tensor {name[:100]!r} has {many}")
        elements = prod(cursor.value("Q") for _ in range(dimensions))
        total += elements
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(cursor.value("I"))]
        places[name] = cursor.value("Q"), elements // block * size
    alignment = values.get("general.alignment") or 32
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise ValueError("its alignment is no number of bytes")
    first = -(-cursor.position // alignment) * alignment
    for name, (offset, length) in places.items():
        if first + offset + length > len(cursor.data):
            raise ValueError(f"it is cut short: {name[:100]} lies beyond its end")
    if sum(length for _, length in places.values()) > len(cursor.data):
        raise ValueError("its tensors lie one upon the other")
    placed = {name: (first + at, length) for name, (at, length) in places.items()}
    return Header(values, placed, total)
