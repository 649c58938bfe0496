"""The sft stage: with LoRA adapters learn, and what it leaves is a plain model; what is too long for the model is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from posttrain import config, pipeline
from posttrain.errors import UserError
from posttrain.models.lora import Lora
from posttrain.models.tiny import MAX_POSITIONS, character_tokenizer, tiny_model
from posttrain.recipes.base import Recipe
from posttrain.stages._material import Data
from posttrain.stages.base import Stage
from posttrain.stages.reward_model import RewardModelStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.train.optimizer import Optimization


@pytest.mark.parametrize("rank", [0, 2])
def test_what_learns_and_what_is_left(rank: int, tmp_path: Path) -> None:
    if rank:
        pytest.importorskip("peft")
    one = SFTStage(
        name="sft", model="tiny:nano", data=(Data(task=Arithmetic(level=1), counts={1: 20}),), steps=4, batch=4, checkpoint_every=2,
        optimizer=Optimization(lr=1e-3), lora=Lora(rank=rank) if rank else None,
    )  # fmt: skip
    directory = pipeline.start(config.Settings(Recipe((one,)), "test", threads=1, device="cpu", out=str(tmp_path / "run")))
    start = tiny_model(character_tokenizer(one.alphabet()), "nano", 0).state_dict()
    exported = load_file(directory / "export" / "model.safetensors")
    moved = {name for name, tensor in exported.items() if not tensor.equal(start[name])}
    saved = set(load_file(directory / "checkpoints" / "sft" / "step-2" / "model.safetensors"))
    if rank:
        assert moved == {name for name in exported if "_proj" in name} and all("lora_" in name for name in saved)
    else:
        assert moved == set(exported) == saved


@pytest.mark.parametrize("stage", [SFTStage, RewardModelStage])
def test_examples_beyond_the_models_positions_are_refused(stage: type[Stage], tmp_path: Path) -> None:
    """Rotary positions go on for ever, so nothing would fail: it would only be learned where the model cannot know its place."""
    long, short = "b" * (MAX_POSITIONS + 1), "c"
    file = tmp_path / "long.jsonl"
    rows = [{"prompt": f"a{n}", "completion": long, "chosen": long, "rejected": short} for n in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data: tuple[object, ...] = (Data(file=str(file)),) if stage is SFTStage else (str(file),)
    one = stage(name="one", model="tiny:nano", data=data, steps=1, batch=1, max_length=2 * MAX_POSITIONS)  # type: ignore[call-arg]
    with pytest.raises(UserError, match=rf"but tiny:nano has {MAX_POSITIONS} positions; lower one.max_length"):
        pipeline.start(config.Settings(Recipe((one,)), "test", threads=1, device="cpu", out=str(tmp_path / "run")))


def test_empty_answers_and_a_share_that_holds_nothing_out_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "completion": ""}\n' * 2 + '{"prompt": "a", "completion": "b"}\n')
    one = SFTStage(name="one", model="tiny:nano", data=(Data(file=str(file)),), steps=1, batch=1, held_out=0.2)
    pipeline.start(config.Settings(Recipe((one,)), "test", threads=1, device="cpu", out=str(tmp_path / "run")))
    said = capsys.readouterr().out
    assert said.count("one: warning: 2 rows with an empty answer (lines 1, 2): the model learns to say nothing") == 1
    assert "one: warning: held_out=0.2: no source has a second prompt; nothing is held out or measured" in said
