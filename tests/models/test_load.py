"""Loading: what a good directory gives, and the one line that every bad one gives."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, tokenization_utils_base

from posttrain.errors import UserError
from posttrain.models.given import give
from posttrain.models.load import Loaded, load, read_tokenizer, stop_ids
from posttrain.models.policy import wrap_model
from posttrain.models.save import save
from posttrain.models.tiny import character_tokenizer, tiny_model

TOKENIZER = character_tokenizer("0123456789+= \n")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(TOKENIZER, "nano", 0), TOKENIZER, tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit(path: Path, **changes: object) -> None:
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**settings, **changes}))


def refusal(name: str | Path) -> str:
    """The message of the refusal: one line, and about this model."""
    with pytest.raises(UserError) as caught:
        load(str(name))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def shard(folder: Path) -> None:
    """Cut model.safetensors in two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def test_a_directory_loads_as_it_was_saved(saved: Path) -> None:
    loaded = load(str(saved))
    assert isinstance(loaded, Loaded) and loaded.source == str(saved)
    model = tiny_model(TOKENIZER, "nano", 0)
    ids = torch.tensor([TOKENIZER("1+1=2").input_ids])
    assert torch.equal(loaded.model(ids).logits, model(ids).logits)
    assert loaded.model.config._attn_implementation == "sdpa" and not loaded.model.training
    assert loaded.stop_ids == (TOKENIZER.eos_token_id,)
    assert loaded.tokenizer("1+1=\n").input_ids == TOKENIZER("1+1=\n").input_ids
    assert loaded.tokenizer.chat_template


def test_threads_may_load_at_the_same_time(saved: Path) -> None:
    """transformers alone, in two threads, says that weights are missing."""
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(lambda _: load(str(saved)).model.state_dict(), range(16))]
    for state in found[1:]:
        assert all(torch.equal(state[name], tensor) for name, tensor in found[0].items())


def test_a_tiny_model_is_the_same_while_other_threads_make_and_load_models(saved: Path) -> None:
    """In a thread beside a load its head was another tensor than its embeddings, and its weights were those of no seed."""
    tokenizer = character_tokenizer("ab")
    alone = tiny_model(tokenizer, "nano", 0).state_dict()
    with ThreadPoolExecutor(4) as threads:
        loads = [threads.submit(load, str(saved)) for _ in range(16)]
        made = [*threads.map(lambda _: tiny_model(tokenizer, "nano", 0), range(32))]
        assert all(one.result() for one in loads)
    for model in made:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert all(torch.equal(alone[name], tensor) for name, tensor in model.state_dict().items())


def test_shards_load(checkpoint: Path) -> None:
    shard(checkpoint)
    model = load(str(checkpoint)).model
    for name, weight in tiny_model(TOKENIZER, "nano", 0).state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16])
def test_a_dtype_can_be_asked_for(saved: Path, dtype: str | torch.dtype) -> None:
    model = load(str(saved), dtype=dtype).model
    assert model.dtype == (getattr(torch, dtype) if isinstance(dtype, str) else dtype)


def test_bad_dtype_and_device_are_refused(saved: Path) -> None:
    with pytest.raises(UserError, match="unknown dtype 'bfloat61'; did you mean 'bfloat16'"):
        load(str(saved), dtype="bfloat61")
    with pytest.raises(UserError, match="device 'abacus' cannot be used here"):
        load(str(saved), device="abacus")


# --- names -----------------------------------------------------------------------------------------------------------------


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    assert f"there is no model directory {tmp_path / 'nowhere'}" in refusal(tmp_path / "nowhere")
    assert "is named org/name" in refusal("nowhere")
    assert "there is no GGUF file nowhere/at-all.gguf" in refusal("nowhere/at-all.gguf")
    assert "the model name is empty" in refusal(" ")
    assert "tiny:nano is made from nothing where a stage trains it" in refusal("tiny:nano")


def test_a_file_is_not_a_directory(saved: Path) -> None:
    assert "is a file; give the model directory" in refusal(saved / "model.safetensors")


def test_the_hub_out_of_reach_is_one_line(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from posttrain.errors import UserError\n"
        "from posttrain.models.load import load\n"
        "try:\n    load('nobody-at-all/no-such-model')\n"
        "except UserError as error:\n    print(error)\n"
        "assert 'torch' not in sys.modules, 'a wrong name should not cost the import of torch'\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 1
    assert "no directory nobody-at-all/no-such-model here, and the hub cannot be reached" in result.stdout


def test_a_hub_name_fetches_no_pickles_and_no_code(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fnmatch

    import huggingface_hub

    asked: dict[str, object] = {}

    def snapshot(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(repository=repository, revision=revision, patterns=allow_patterns)
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    loaded = load("org/name@v1.0")
    assert (asked["repository"], asked["revision"], loaded.source) == ("org/name", "v1.0", "org/name@v1.0")
    patterns = asked["patterns"]
    assert isinstance(patterns, list)
    for file in ("pytorch_model.bin", "model.pt", "modeling_evil.py", "weights.pkl", "x.gguf"):
        assert not any(fnmatch.fnmatch(file, pattern) for pattern in patterns)


# --- incomplete and corrupt directories ------------------------------------------------------------------------------------


def test_no_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    assert "has no config.json" in refusal(checkpoint)


@pytest.mark.parametrize("text", ["{", "[1]", "", "[" * 100_000])
def test_config_that_is_not_an_object(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text)
    assert "config.json" in refusal(checkpoint)


def test_config_of_an_unknown_family(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", model_type="llamma")
    assert "cannot be read" in refusal(checkpoint)  # the model or, in some versions of transformers, its tokenizer
    (checkpoint / "config.json").write_text("{}")
    assert "names no model_type" in refusal(checkpoint)


def test_no_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert "has no weights" in refusal(checkpoint)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_only_pickled_weights(checkpoint: Path, tmp_path: Path, name: str) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).write_bytes(pickle.dumps(Bomb()))
    message = refusal(checkpoint)
    assert name in message and "convert them to safetensors" in message
    assert not (tmp_path / "exploded").exists()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def scribble(path: Path) -> None:
    path.write_bytes(b"\xff" * 16 + path.read_bytes()[16:])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("spoil", [truncate, scribble, empty])
def test_corrupt_weights_name_the_file(checkpoint: Path, spoil: Callable[[Path], None]) -> None:
    spoil(checkpoint / "model.safetensors")
    assert f"{checkpoint / 'model.safetensors'} is corrupt or cut short" in refusal(checkpoint)


def test_a_missing_and_a_corrupt_shard_are_named(checkpoint: Path) -> None:
    shard(checkpoint)
    second = checkpoint / "model-00002-of-00002.safetensors"
    truncate(second)
    assert f"{second} is corrupt or cut short" in refusal(checkpoint)
    second.unlink()
    assert "lacks the weight file model-00002-of-00002.safetensors" in refusal(checkpoint)


@pytest.mark.parametrize(
    "name", ["../model/x.safetensors", "/etc/x.safetensors", "..\\x.safetensors", "x.bin", "a\0.safetensors"]
)
def test_a_shard_elsewhere_is_refused(checkpoint: Path, name: str) -> None:
    shard(checkpoint)
    edit(checkpoint / "model.safetensors.index.json", weight_map={"lm_head.weight": name})
    assert "not a plain .safetensors file name" in refusal(checkpoint)


def test_a_missing_tensor_is_not_filled_with_random_numbers(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert "1 tensors are not in the weight files (model.layers.1.mlp.up_proj.weight)" in refusal(checkpoint)


def test_a_tensor_of_another_shape(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", intermediate_size=128)
    assert "6 tensors do not have the shape config.json says (model.layers.0.mlp.down_proj.weight" in refusal(checkpoint)


def test_no_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    assert "has no tokenizer" in refusal(checkpoint)


def test_a_corrupt_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text('{"version": "1.0"')
    assert "the tokenizer cannot be read" in refusal(checkpoint)


def test_a_tokenizer_larger_than_the_embedding(checkpoint: Path) -> None:
    character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyz").save_pretrained(checkpoint)
    message = refusal(checkpoint)
    assert "the tokenizer has ids up to 41 but the model embeds only 24" in message


# --- hostile directories ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("nested", [False, True])
def test_code_is_refused_and_not_run(checkpoint: Path, tmp_path: Path, file: str, nested: bool) -> None:
    (checkpoint / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'exploded')!r})\nclass Evil: pass\n")
    mapping = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    edit(checkpoint / file, **({"text_config": {"auto_map": mapping}} if nested else {"auto_map": mapping}))
    assert f"{file} asks to run Python code" in refusal(checkpoint)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("setting", ["quantization_config", "transformers_weights", "fusion_config"])
def test_settings_that_replace_the_model_are_refused(checkpoint: Path, setting: str) -> None:
    edit(checkpoint / "config.json", **{setting: {"quant_method": "awq"}})
    assert f"config.json sets {setting}" in refusal(checkpoint)


def test_an_adapter_is_not_a_model(checkpoint: Path) -> None:
    edit(checkpoint / "adapter_config.json", base_model_name_or_path="elsewhere")
    assert "holds a LoRA adapter" in refusal(checkpoint)


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% for x in %}", "{{ raise_exception('no') }}"]
)
def test_a_chat_template_that_fails_tells_nothing(checkpoint: Path, template: str) -> None:
    (checkpoint / "chat_template.jinja").write_text(template)
    assert load(str(checkpoint)).stop_ids == (TOKENIZER.eos_token_id,)


def test_no_chat_template(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").unlink()
    assert load(str(checkpoint)).stop_ids == (TOKENIZER.eos_token_id,)


# --- stop ids --------------------------------------------------------------------------------------------------------------

CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
LLAMA3 = "{% for m in messages %}<|start|>{{ m['role'] }}\n\n{{ m['content'] }}<|eot_id|>{% endfor %}"
PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def marked_tokenizer(special: list[str], template: str | None, **roles: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate([*special, *"abc"])}, unk_token=special[0])
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **roles)


@pytest.mark.parametrize(
    ("special", "template", "roles", "stated", "begin", "expected"),
    [
        # eos of the tokenizer differs from the template's end of turn: both stop
        (["<eos>", "<|im_start|>", "<|im_end|>"], CHATML, {"eos_token": "<eos>"}, None, None, (0, 2)),
        (["<eos>", "<|start|>", "<|eot_id|>"], LLAMA3, {"eos_token": "<eos>"}, [0, 1], None, (0, 1, 2)),
        (["<eos>", "<|start|>", "<|eot_id|>"], LLAMA3, {}, 0, None, (0, 2)),
        # no marker after the assistant's words, or no template
        (["<eos>", "<x>"], PLAIN, {"eos_token": "<eos>"}, None, None, (0,)),
        (["<eos>", "<x>"], None, {"eos_token": "<eos>"}, [1], None, (0, 1)),
        # -1 stands for none
        (["<eos>", "<x>"], PLAIN, {"eos_token": "<eos>"}, -1, None, (0,)),
        (["<x>"], PLAIN, {}, [-1], None, ()),
        # a pad token in the list of ends is no end ...
        (["<eos>", "<pad>"], PLAIN, {"eos_token": "<eos>", "pad_token": "<pad>"}, [0, 1], None, (0,)),
        # ... unless it is the eos, the end of a turn, or the token that also begins a text
        (["<eos>", "<x>"], PLAIN, {"eos_token": "<eos>", "pad_token": "<eos>"}, [0], None, (0,)),
        (["<eos>", "<|im_start|>", "<|im_end|>"], CHATML, {"eos_token": "<eos>", "pad_token": "<|im_end|>"}, [0], None, (0, 2)),
        (
            ["<text>", "<|im_start|>", "<|im_end|>"],
            CHATML,
            {"eos_token": "<|im_end|>", "pad_token": "<text>"},
            [2, 0],
            0,
            (0, 2),
        ),
        # nothing is known
        (["<x>"], PLAIN, {}, None, None, ()),
    ],
)
def test_stop_ids(
    special: list[str],
    template: str | None,
    roles: dict[str, str],
    stated: int | list[int] | None,
    begin: int | None,
    expected: tuple[int, ...],
) -> None:
    model = tiny_model(TOKENIZER, "nano", 0)
    model.generation_config = GenerationConfig(eos_token_id=stated)
    model.config.bos_token_id = begin
    assert stop_ids(model, marked_tokenizer(special, template, **roles)) == expected


def test_an_end_token_beyond_the_vocabulary_is_refused() -> None:
    model = tiny_model(TOKENIZER, "nano", 0)
    model.generation_config = GenerationConfig(eos_token_id=9999)
    with pytest.raises(UserError, match=r"of the end tokens \(.*9999\) one is beyond its [0-9]+ ids; correct eos_token_id"):
        stop_ids(model, TOKENIZER)


def test_weights_that_are_not_finite_are_named_as_such(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    found = load(str(checkpoint))
    with pytest.raises(UserError, match="its outputs are not finite: weights are NaN, infinite or far too large"):
        wrap_model(found.model, found.tokenizer, found.stop_ids)


def test_a_tokenizer_warns_of_no_length_which_stages_check(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of what it is tried on when it is read, nor of the user's text."""
    said: list[str] = []
    monkeypatch.setattr(tokenization_utils_base.logger, "warning", lambda text, *more: said.append(text))
    tokenizer = read_tokenizer(checkpoint)
    tokenizer.model_max_length = 10
    tokenizer.save_pretrained(checkpoint)
    found = read_tokenizer(checkpoint)
    assert found.model_max_length == 10 and len(found("1" * 20)["input_ids"]) == 20
    assert len(character_tokenizer("1")("1" * 3000)["input_ids"]) == 3000 and said == []
    plain = PreTrainedTokenizerFast.from_pretrained(checkpoint)  # as a program may give it
    give(load(str(checkpoint)).model, plain)
    assert len(plain("1" * 20)["input_ids"]) == 20 and said == []
