"""GGUF: files written here with the `gguf` package come back with the same weights, tokens and special tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from posttrain.errors import UserError
from posttrain.models import load_gguf
from posttrain.models.load import load
from posttrain.models.save import save

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed (pip install posttrain[gguf])")
pytest.importorskip("accelerate", reason="the accelerate package is not installed (pip install posttrain[gguf])")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
TEXT = "Hello 123456 world, DON'T\n\n  12+34=46 ▁é"
Q8_0, F32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32


def byte_pairs() -> tuple[list[str], list[str]]:
    """A small byte-level vocabulary and its merges, with special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["hello world don't 12 12 34 34 123 123 456 hello hello world"] * 20, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(merge) for merge in model["merges"]]


VOCABULARY, MERGES = byte_pairs()


@dataclass(frozen=True)
class Recipe:
    """What to write."""

    architecture: str = "llama"
    pre: str = "smollm"
    head: str = "tied"  # tied: none in the file; equal: a copy; coarser, finer: one of the two in 8 bits; own: another matrix
    quantized: bool = False
    template: str | None = TEMPLATE
    rotary: np.ndarray | None = None


def network(recipe: Recipe) -> PreTrainedModel:
    config = FAMILIES[recipe.architecture](
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        tie_word_embeddings=recipe.head != "own",
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows that llama.cpp wants for rotary queries and keys."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write(path: Path, recipe: Recipe) -> PreTrainedModel:
    """Write a GGUF file and return the model that it should load as, but for rounding."""
    model = network(recipe)
    config, architecture = model.config, recipe.architecture
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if architecture != "qwen2" else 16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(recipe.pre)
    writer.add_token_list(VOCABULARY)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in VOCABULARY])
    for add, token in ((writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2), (writer.add_pad_token_id, 0)):
        add(token)
    if recipe.template is not None:
        writer.add_chat_template(recipe.template)
    names = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture), 2)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and recipe.head == "tied":
            continue
        weight = tensor.numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = interleave(weight, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        eight_bits = (
            recipe.quantized or {"coarser": "lm_head.weight", "finer": "model.embed_tokens.weight"}.get(recipe.head) == name
        )
        kind = Q8_0 if weight.ndim == 2 and eight_bits else F32
        packed = gguf.quantize(np.ascontiguousarray(weight), kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), packed, raw_dtype=kind)
    if recipe.rotary is not None:
        writer.add_tensor("rope_freqs.weight", recipe.rotary.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def ids_of(text: str = TEXT) -> torch.Tensor:
    return torch.tensor([[index % len(VOCABULARY) for index in text.encode()]])


@pytest.mark.parametrize("architecture", FAMILIES)
def test_weights_come_back_bit_for_bit(tmp_path: Path, architecture: str) -> None:
    model = write(tmp_path / "m.gguf", Recipe(architecture))
    loaded = load(str(tmp_path / "m.gguf"))
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, loaded.model.state_dict()[name]), name
    torch.testing.assert_close(loaded.model(ids_of()).logits, model(ids_of()).logits, rtol=1e-4, atol=1e-5)
    assert loaded.model.dtype == torch.float32 and loaded.model.get_input_embeddings().weight.requires_grad
    assert load(str(tmp_path), dtype="bfloat16").model.dtype == torch.bfloat16  # a directory with one file is that file


def test_no_progress_bar_reaches_the_console(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "m.gguf", Recipe())
    capfd.readouterr()
    load(str(tmp_path / "m.gguf"))
    assert capfd.readouterr() == ("", "")


def test_quantized_weights_are_unpacked_and_can_be_trained(tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", Recipe(quantized=True))
    loaded = load(str(tmp_path / "m.gguf")).model
    for name, weight in model.state_dict().items():
        difference = (loaded.state_dict()[name] - weight).norm() / weight.norm()
        assert 0 <= difference < 0.01, name
    loaded.train()(ids_of(), labels=ids_of()).loss.backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


@pytest.mark.parametrize("architecture", FAMILIES)
def test_special_tokens_are_those_of_the_file(tmp_path: Path, architecture: str) -> None:
    write(tmp_path / "m.gguf", Recipe(architecture, pre="qwen2" if architecture != "llama" else "smollm"))
    loaded = load(str(tmp_path / "m.gguf"))
    tokenizer = loaded.tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    assert len(tokenizer) == len(VOCABULARY)
    assert tokenizer("<|fim|>").input_ids == [3]  # every control token of the file is one token
    assert loaded.stop_ids == (2,)
    chat = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["1", "2", "3", "4", "5", "6"]),
        ("qwen2", ["1", "2", "3", "4", "5", "6"]),
        ("llama-bpe", ["123", "456"]),
        ("default", ["123456"]),
    ],
)
def test_text_is_cut_as_the_file_says(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    write(tmp_path / "m.gguf", Recipe(pre=pre))
    tokenizer = load(str(tmp_path / "m.gguf")).tokenizer
    cut = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("x123456") if piece != "x"]
    assert cut == pieces
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT


@pytest.mark.parametrize(
    ("head", "tied"), [("tied", True), ("equal", True), ("coarser", True), ("finer", True), ("own", False)]
)
def test_a_copied_head_is_tied_again(tmp_path: Path, head: str, tied: bool) -> None:
    model = write(tmp_path / "m.gguf", Recipe(head=head))
    loaded = load(str(tmp_path / "m.gguf"))
    embedding, output = loaded.model.get_input_embeddings().weight, loaded.model.get_output_embeddings().weight
    assert (embedding is output) == tied == loaded.model.config.tie_word_embeddings
    assert torch.equal(embedding, model.get_input_embeddings().weight)  # the finer copy is the one kept
    folder = save(loaded.model, loaded.tokenizer, tmp_path / "export")
    again = load(str(folder))
    assert (again.model.get_input_embeddings().weight is again.model.get_output_embeddings().weight) == tied
    assert torch.equal(again.model(ids_of()).logits, loaded.model(ids_of()).logits)
    assert again.tokenizer(TEXT).input_ids == loaded.tokenizer(TEXT).input_ids
    assert again.tokenizer.decode(again.tokenizer(TEXT).input_ids) == TEXT
    assert again.stop_ids == loaded.stop_ids
    for path in folder.glob("*.json"):
        assert "gguf" not in path.read_text().lower(), path.name


def llama3_factors(factor: float) -> np.ndarray:
    """The divisors that llama.cpp stores for Llama 3 (its convert script), for a base of 10000 and heads of 16."""
    frequencies = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    divisors = []
    for frequency in frequencies:
        length = 2 * np.pi / frequency
        smooth = (8192 / length - 1.0) / (4.0 - 1.0)
        divisors.append(1.0 if length < 8192 / 4 else factor if length > 8192 else 1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors)


def test_the_rotary_scaling_of_llama_3_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Recipe(pre="llama-bpe", rotary=llama3_factors(8.0)))
    rotary = load(str(tmp_path / "m.gguf")).model.config.rope_parameters
    assert (rotary["rope_type"], rotary["factor"]) == ("llama3", 8.0)


def test_an_unknown_rotary_scaling_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Recipe(rotary=np.linspace(1, 3, 8)))
    with pytest.raises(UserError, match=r"scaled in an unknown way.*use the safetensors checkpoint"):
        load(str(tmp_path / "m.gguf"))


def test_no_template_is_no_template(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Recipe(template=None))
    loaded = load(str(tmp_path / "m.gguf"))
    assert loaded.tokenizer.chat_template is None and loaded.stop_ids == (2,)


def test_other_files_of_the_directory_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.gguf", Recipe())
    read = AutoModelForCausalLM.from_pretrained

    def spy(folder: str, **options: object) -> object:
        assert not list(Path(folder).iterdir()), "transformers looks for adapters and configurations in this folder"
        return read(folder, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spy)
    for name in ("config.json", "tokenizer_config.json", "adapter_config.json", "tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_text("{ not JSON")
    assert load(str(tmp_path / "m.gguf")).stop_ids == (2,)


# --- refusals --------------------------------------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_two_files_need_a_name(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    assert "holds 2 GGUF files (a.gguf, b.gguf); name the one to load" in refusal(tmp_path)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_absent_packages_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.setattr(load_gguf, "find_spec", lambda name: None if name == package else object())
    assert f"needs the package {package}; pip install posttrain[gguf]" in refusal(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"PK\x03\x04" + bytes(64), b"GGUF" + bytes(64), b"GGUF\x03\0\0\0" + b"\xff" * 64]
)
def test_not_a_gguf_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    assert "is not a usable GGUF file" in refusal(tmp_path / "m.gguf")


def test_a_file_cut_short_anywhere(tmp_path: Path) -> None:
    write(tmp_path / "whole.gguf", Recipe())
    content = (tmp_path / "whole.gguf").read_bytes()
    for part, words in ((0.001, "the middle of its header"), (0.5, "cut short"), (0.9, "cut short"), (0.999, "cut short")):
        (tmp_path / "m.gguf").write_bytes(content[: int(len(content) * part)])
        assert words in refusal(tmp_path / "m.gguf")


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "whole.gguf", Recipe())
    content = (tmp_path / "whole.gguf").read_bytes()
    assert content.count(b"blk.1.ffn_up.weight") == 1
    (tmp_path / "m.gguf").write_bytes(content.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    assert "1 tensors are not in the weight files" in refusal(tmp_path / "m.gguf")


def test_tensors_of_another_shape_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "whole.gguf", Recipe())
    content = (tmp_path / "whole.gguf").read_bytes()
    key = b"llama.feed_forward_length" + (4).to_bytes(4, "little")
    assert content.count(key + (96).to_bytes(4, "little")) == 1
    (tmp_path / "m.gguf").write_bytes(content.replace(key + (96).to_bytes(4, "little"), key + (80).to_bytes(4, "little")))
    assert "6 tensors do not have the shape its metadata says" in refusal(tmp_path / "m.gguf")


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "whole.gguf", Recipe())
    (tmp_path / "m.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes().replace(b"llama", b"lloma"))
    assert "architecture lloma is not supported" in refusal(tmp_path / "m.gguf")
