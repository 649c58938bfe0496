"""Model files that would hang or eat memory are refused before anything of their sizes is made: one line, soon, in little memory."""

from __future__ import annotations

import base64
import json
import os
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.errors import UserError
from posttrain.models import bounds
from posttrain.models.load import load, locate
from posttrain.models.load_gguf import read_header


@contextmanager
def refused(match: str = "") -> Iterator[None]:
    """One line within seconds, and within 256 MB of what was there before."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=match) as caught:
        yield
    line = str(caught.value)
    assert "\n" not in line and len(line) < 1000, line
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert time.monotonic() - began < 30 and grown < 256 << 10, grown


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- sizes ------------------------------------------------------------------------------------------------------------

SIZES = {
    "layers": {"num_hidden_layers": 10**9, "layer_types": None},
    "layers as a float": {"num_hidden_layers": 1e9, "layer_types": None},
    "some more layers": {"num_hidden_layers": 1020, "layer_types": None},
    "vocabulary": {"vocab_size": 10**9},
    "a vocabulary below all bounds of numbers": {"vocab_size": 90_000_000},
    "hidden size": {"hidden_size": 2**22},
    "intermediate size": {"intermediate_size": 2**26},
    "heads": {"num_attention_heads": 10**7, "num_key_value_heads": 10**7},
    "width of heads": {"head_dim": 2**24},
    "mixture of experts": {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 10**8},
    "mixture of experts, in modules": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 10**7,
    },
    "a table of positions": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 10**7},
    "layers under another name": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 10**9},
    "beyond 64 bits": {"vocab_size": 10**30},
    "names of labels": {"num_labels": 90_000_000},
    "negative": {"vocab_size": -(10**30)},
    "inside": {"text_config": {"num_hidden_layers": 10**9}},
    "a long list of factors": {
        "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 10**6, "long_factor": [1.0] * 10**6}
    },
    "a list": {"layer_types": ["full_attention"] * 10**6, "num_hidden_layers": 10**6},
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_beyond_the_weights_are_refused(name: str, model: Path) -> None:
    edit(model / "config.json", **SIZES[name])
    with refused("config.json|cannot be read|are not in the weight files"):
        load(str(model))


def test_what_the_weights_account_for_is_loaded(model: Path) -> None:
    before = torch.random.get_rng_state()
    assert load(str(model)).model.num_parameters() > 0
    assert torch.equal(torch.random.get_rng_state(), before), "the trial draws no random number"


def test_a_size_for_each_layer_is_no_number_of_layers() -> None:
    """As in Gemma 3n."""
    bounds.check_numbers("config.json", {"vocab_size_per_layer_input": 262_144, "rope_theta": 10**9}, 400, 10**9)


def test_a_file_of_holes_is_no_weights(model: Path) -> None:
    """A header that claims a petabyte in a file that has it, and nothing in it."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(model / "model.safetensors", 8 + len(header) + 2**40)
    with refused("model"):
        load(str(model))


# --- tokenizers -----------------------------------------------------------------------------------------------------------


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


LONG = base64.b64encode((8).to_bytes(4, "little") + bytes(8) + b"x" * 10**6 + b"\0").decode()
NORMALIZERS = {
    "doubling": sequence(*[replace("1", "11")] * 40),
    "in turn": sequence(*[replace("1", "22"), replace("2", "11")] * 20),
    "one long": replace("1", "1" * 10**6),
    "an expression": {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 10**6},
    "expressions": sequence(*[{"type": "Replace", "pattern": {"Regex": "$|^|."}, "content": "1111"}] * 12),
    "prepending": sequence(*[{"type": "Prepend", "prepend": "1" * 200_000}] * 3),
    "bytes of bytes": sequence(*[{"type": "ByteLevel"}] * 40),
    "nested": sequence(sequence(sequence(*[replace("1", "1111")] * 10)), *[replace("1", "1111")] * 10),
    "unicode and bytes": sequence(*[{"type": "NFKD"}, {"type": "ByteLevel"}] * 30),
    "a table": {"type": "Precompiled", "precompiled_charsmap": LONG},
    "an unknown kind": sequence(*[{"type": "Mystery"}] * 60),
    "no object": [1, 2],
}


@pytest.mark.parametrize("name", NORMALIZERS)
def test_a_normalizer_that_explodes_is_refused(name: str, model: Path) -> None:
    edit(model / "tokenizer.json", normalizer=NORMALIZERS[name])
    with refused("times as long|is not an object|cannot be read"):
        load(str(model))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("decoder", {"type": "Sequence", "decoders": [replace("1", "11")] * 40}),
        (
            "pre_tokenizer",
            {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}] * 40},
        ),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(1|11)+$x"}, "behavior": "Isolated", "invert": False}),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "(1|11)+$x"}, "content": ""}),
    ],
)
def test_so_are_other_parts_that_explode(part: str, value: Any, model: Path) -> None:
    edit(model / "tokenizer.json", **{part: value})
    with refused("times as long|tokenizer cannot be read"):
        load(str(model))


def test_normalizers_in_use_are_accepted(tmp_path: Path) -> None:
    """Of Llama 2, BERT, CLIP, XLM-R, ALBERT and GPT-2."""
    table = base64.b64encode((8).to_bytes(4, "little") + bytes(8) + b"x" * 33 + b"\0").decode()
    compiled = {"type": "Precompiled", "precompiled_charsmap": table}
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    known = [
        (sequence({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")), None),
        ({"type": "BertNormalizer"}, {"type": "BertPreTokenizer"}),
        (sequence({"type": "NFC"}, spaces, {"type": "Lowercase"}), {"type": "ByteLevel"}),
        (sequence(compiled, spaces), {"type": "Metaspace"}),
        (
            sequence(replace("``", '"'), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}, compiled),
            {"type": "Metaspace"},
        ),
        (None, {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "Split"}, {"type": "ByteLevel"}]}),
    ]
    path = tmp_path / "tokenizer.json"
    for normalizer, cut in known:
        path.write_text(json.dumps({"normalizer": normalizer, "pre_tokenizer": cut}))
        bounds.check_growth(path)


# --- links ------------------------------------------------------------------------------------------------------------

FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
    "chat_template.jinja",
    "generation_config.json",
)


def link(path: Path) -> None:
    away = path.parent.parent / f"away-{path.name}"
    path.rename(away) if path.exists() else away.write_text("{}")
    path.symlink_to(away)


def chain(path: Path) -> None:
    link(path)
    path.rename(path.with_name("between.json"))
    path.symlink_to("between.json")


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def dangling(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.parent / "nowhere")


def device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("change", [link, chain, pipe, dangling, device])
def test_links_out_of_the_folder_pipes_and_devices_are_refused(change: Callable[[Path], None], file: str, model: Path) -> None:
    change(model / file)
    with refused(f"{file}|between.json|no config.json|has no|corrupt"):
        load(str(model))


def test_so_are_templates_in_a_folder_of_their_own(model: Path) -> None:
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool.jinja").symlink_to("/etc/passwd")
    with refused("tool.jinja is a link out of the model's folder"):
        load(str(model))


def test_the_hubs_cache_links_to_its_blobs_and_a_folder_may_be_a_link(model: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(model.iterdir()):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(blobs / str(number))
    (tmp_path / "here").symlink_to(snapshot)
    assert load(str(tmp_path / "here")).model.num_parameters() > 0


# --- GGUF headers -------------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(tensors: int = 0, values: int = 1, more: bytes = b"", version: int = 3) -> bytes:
    """A header with its claims, an architecture and whatever follows."""
    named = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + named + more


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def value(key: str, number: int) -> bytes:
    return text(key) + struct.pack("<IQ", 10, number)


HEADERS = {
    "entries": gguf(values=2**40),
    "tensors": gguf(tensors=2**63),
    "a long name": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62),
    "an array": gguf(values=2, more=text("a") + struct.pack("<IIQ", 9, 8, 2**40)),
    "an array of bytes": gguf(values=2, more=text("a") + struct.pack("<IIQ", 9, 0, 2**60)),
    "arrays of arrays": gguf(values=2, more=text("a") + struct.pack("<IIQ", 9, 9, 3)),
    "dimensions": gguf(tensors=1, more=text("a") + struct.pack("<I", 2**32 - 1) + bytes(2000)),
    "a large tensor": gguf(tensors=1, more=tensor("a", (2**40, 2**40))),
    "a large tensor of no rows": gguf(tensors=1, more=tensor("a", (2**62, 0)) + bytes(64)),
    "one upon the other": gguf(tensors=50, more=b"".join(tensor(f"t{n}", (1000,)) for n in range(50)) + bytes(5000)),
    "twice the same": gguf(tensors=2, more=tensor("a", (8,)) * 2 + bytes(200)),
    "an unknown type": gguf(tensors=1, more=tensor("a", (8,), kind=4000) + bytes(200)),
    "a key twice": gguf(values=3, more=value("x", 1) * 2),
    "an alignment": gguf(values=2, more=value("general.alignment", 2**60)),
    "nothing": b"",
    "four letters": b"GGUF",
    "another version": gguf(version=7),
    "no text": gguf(values=2, more=struct.pack("<Q", 2) + b"\xff\xfe" + bytes(30)),
}


@pytest.mark.parametrize("name", HEADERS)
def test_an_absurd_header_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(HEADERS[name])
    with refused("model.gguf"):
        if name == "a large tensor of no rows":
            load(str(tmp_path / "model.gguf"))
        read_header(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("block_count", 10**9),
        ("embedding_length", 2**40),
        ("feed_forward_length", 10**10),
        ("attention.head_count", 10**12),
        ("expert_count", 10**9),
        ("vocab_size", 2**50),
    ],
)
def test_sizes_beyond_the_tensors_are_refused_in_gguf_too(key: str, number: int, tmp_path: Path) -> None:
    body = tensor("token_embd.weight", (8, 8))
    (tmp_path / "model.gguf").write_bytes(gguf(tensors=1, values=2, more=value(f"llama.{key}", number) + body + bytes(500)))
    with refused("model.gguf"):
        load(str(tmp_path / "model.gguf"))


def test_a_file_that_leads_out_of_the_folder_is_not_its_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "other.gguf").write_bytes(gguf())
    (tmp_path / "model" / "model.gguf").symlink_to(tmp_path / "other.gguf")
    with refused("is a link out of the model's folder"):
        locate(str(tmp_path / "model"))
