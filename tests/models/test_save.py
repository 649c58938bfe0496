"""Saving: what comes back is what was there, under plain transformers; and nothing half-written is ever in its place."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from posttrain.errors import UserError
from posttrain.models.load import load
from posttrain.models.save import save
from posttrain.models.tiny import character_tokenizer, tiny_model

TOKENIZER = character_tokenizer("0123456789+= \nabc")
IDS = torch.tensor([TOKENIZER("12+34=46 \n").input_ids])
FAMILIES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "qwen3-moe": Qwen3MoeConfig,
}


def family(name: str, tied: bool = True) -> PreTrainedModel:
    config = FAMILIES[name](
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        sliding_window=4,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
    )
    if name == "gemma2":
        config.attn_logit_softcapping = 0.1  # tight, so that attention without the cap would show
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases start at 0 or 1, where a lost one would not show
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def assert_same(first: PreTrainedModel, second: PreTrainedModel) -> None:
    assert first.state_dict().keys() == second.state_dict().keys()
    for name, weight in first.state_dict().items():
        other = second.state_dict()[name]
        assert weight.dtype == other.dtype, name
        assert torch.equal(weight, other), name


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_family_comes_back_bit_for_bit(tmp_path: Path, name: str, tied: bool) -> None:
    model = family(name, tied)
    folder = save(model, TOKENIZER, tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    ours = load(str(folder)).model
    plain.set_attn_implementation("eager")
    model.set_attn_implementation("eager")
    expected = model(IDS).logits
    for again in (plain, ours):
        assert_same(model, again)
        assert (again.get_input_embeddings().weight is again.get_output_embeddings().weight) == tied
    assert torch.equal(plain(IDS).logits, expected)
    torch.testing.assert_close(ours(IDS).logits, expected)  # in its own attention: equal but for rounding


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokenizer_comes_back(tmp_path: Path, name: str) -> None:
    folder = save(family(name), TOKENIZER, tmp_path / "model")
    text = "<|user|>1 + 2=\n<|end|><|assistant|> 3"
    readers = [load(str(folder)).tokenizer]
    if name != "qwen2":  # for this family AutoTokenizer cuts text by Qwen's own rule, whatever tokenizer.json says
        readers.append(AutoTokenizer.from_pretrained(folder))
    for tokenizer in readers:
        assert tokenizer(text).input_ids == TOKENIZER(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids) == text
        assert tokenizer.chat_template == TOKENIZER.chat_template
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    folder = save(family("llama"), TOKENIZER, tmp_path / "model")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_is_stated_and_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_model(TOKENIZER, "nano", 0).to(dtype)
    folder = save(model, TOKENIZER, tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert_same(model, load(str(folder)).model)


def test_the_name_of_our_attention_and_the_source_do_not_leak(tmp_path: Path) -> None:
    AttentionInterface.register("private-attention", sdpa_attention_forward)
    first = save(tiny_model(TOKENIZER, "nano", 0), TOKENIZER, tmp_path / "first-place")
    loaded = load(str(first))
    model = loaded.model
    model.set_attn_implementation("private-attention")
    folder = save(model, loaded.tokenizer, tmp_path / "second")
    assert {path.name for path in folder.iterdir()} == {path.name for path in first.iterdir()}
    for path in folder.iterdir():  # a model that was only loaded is written as it was read, byte for byte
        assert path.read_bytes() == (first / path.name).read_bytes(), path.name
    assert model.config._attn_implementation == "private-attention"  # the model in hand is as it was
    assert AutoModelForCausalLM.from_pretrained(folder).config._attn_implementation == "sdpa"


def test_older_readers_know_the_class_of_the_tokenizer(tmp_path: Path) -> None:
    folder = save(tiny_model(TOKENIZER, "nano", 0), TOKENIZER, tmp_path / "model")
    assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_model_in_training_is_left_as_it_was(tmp_path: Path) -> None:
    model = tiny_model(TOKENIZER, "nano", 0).train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    generation = model.generation_config
    save(model, TOKENIZER, tmp_path / "model")
    assert model.training and model.generation_config is generation
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("settings", [{"temperature": 0.6, "do_sample": False}, {"top_p": 0.9, "do_sample": False}])
def test_a_contradictory_generation_config_does_not_lose_the_model(tmp_path: Path, settings: dict[str, object]) -> None:
    model = tiny_model(TOKENIZER, "nano", 0)
    model.generation_config = GenerationConfig(eos_token_id=TOKENIZER.eos_token_id, **settings)
    folder = save(model, TOKENIZER, tmp_path / "model")
    assert load(str(folder)).stop_ids == (TOKENIZER.eos_token_id,)


@pytest.mark.skipif(os.name == "nt", reason="file modes are a POSIX matter")
def test_all_files_can_be_read_by_the_same_people(tmp_path: Path) -> None:
    folder = save(tiny_model(TOKENIZER, "nano", 0), TOKENIZER, tmp_path / "model")
    (tmp_path / "ordinary").touch()
    expected = stat.S_IMODE((tmp_path / "ordinary").stat().st_mode)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {expected}


# --- places ----------------------------------------------------------------------------------------------------------------


def test_an_earlier_export_gives_way_only_when_asked(tmp_path: Path) -> None:
    first, second = tiny_model(TOKENIZER, "nano", 0), tiny_model(TOKENIZER, "nano", 1)
    folder = save(first, TOKENIZER, tmp_path / "model")
    (folder / "leftover.txt").write_text("of the first export")
    with pytest.raises(UserError, match="already holds a saved model; give another place, or replace=True"):
        save(second, TOKENIZER, folder)
    assert_same(load(str(folder)).model, first)
    save(second, TOKENIZER, folder, replace=True)
    assert_same(load(str(folder)).model, second)
    assert not (folder / "leftover.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_other_peoples_files_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files, and is left alone"):
        save(tiny_model(TOKENIZER, "nano", 0), TOKENIZER, tmp_path, replace=True)
    with pytest.raises(UserError, match="is not a directory"):
        save(tiny_model(TOKENIZER, "nano", 0), TOKENIZER, tmp_path / "notes.txt", replace=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_empty_directory_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    model = tiny_model(TOKENIZER, "nano", 0)
    assert_same(load(str(save(model, TOKENIZER, tmp_path / "empty"))).model, model)
    assert_same(load(str(save(model, TOKENIZER, tmp_path / "a" / "b" / "c"))).model, model)


# --- interruptions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["tokenizer.save_pretrained", "posttrain.system.files.sync", "pathlib.Path.rename"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("pulled the plug")])
@pytest.mark.parametrize("replace", [False, True])
def test_an_interruption_leaves_the_old_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, error: BaseException, replace: bool
) -> None:
    first, second = tiny_model(TOKENIZER, "nano", 0), tiny_model(TOKENIZER, "nano", 1)
    folder = tmp_path / "model"
    if replace:
        save(first, TOKENIZER, folder)
    tokenizer = character_tokenizer("0123456789+= \nabc")
    rename = Path.rename

    def fail(*arguments: object, **_: object) -> object:
        if moment.endswith("rename") and not str(arguments[0]).endswith(".tmp"):
            return rename(*arguments)  # type: ignore[arg-type, type-var]
        raise error

    if moment.startswith("tokenizer"):
        monkeypatch.setattr(tokenizer, "save_pretrained", fail)
    else:
        monkeypatch.setattr(moment, fail)
    with pytest.raises(type(error)):
        save(second, tokenizer, folder, replace=replace)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if replace else [])
    if replace:
        assert_same(load(str(folder)).model, first)


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
]


@pytest.mark.parametrize("error", FULL, ids=["system", "safetensors"])
def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    model = tiny_model(TOKENIZER, "nano", 0)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(model, "save_pretrained", fail)
    with pytest.raises(UserError, match="the disk is full") as caught:
        save(model, TOKENIZER, tmp_path / "model")
    assert "\n" not in str(caught.value) and str(tmp_path / "model") in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_parent_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        save(tiny_model(TOKENIZER, "nano", 0), TOKENIZER, tmp_path / "file" / "model")
