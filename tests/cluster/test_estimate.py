"""What a run of any size would need, against arithmetic by hand and published runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.cluster.estimate import (
    GB,
    GPUS,
    OTHER,
    TRAIN,
    Layout,
    Work,
    best,
    estimate,
    fewest,
    memory_of,
    shape_of,
    textbook_lines,
)
from posttrain.models.tiny import character_tokenizer, tiny_model

H100 = GPUS["h100"]
# Steps of GRPO by NeMo-RL 0.4 on H100: size, responses, tokens of one on average, GPUs, seconds.
PUBLISHED = [
    ("8B", 2048, 1060, 16, 97.7),
    ("32B", 2048, 3206, 32, 393.0),
    ("30B-A3B", 2048, 3154, 32, 225.0),
    ("235B-A22B", 512, 5671, 128, 506.0),
]


@pytest.mark.parametrize(("size", "responses", "length", "gpus", "seconds"), PUBLISHED)
def test_published_steps_are_within_a_factor_of_2(size: str, responses: int, length: int, gpus: int, seconds: float) -> None:
    work = Work("grpo", prompts=responses // 16, group=16, prompt=100, response=length - 100)
    found = best(shape_of(size), work, H100, gpus)
    assert found is not None and 0.5 < found.step / seconds < 2.0


def test_memory_by_hand() -> None:
    """70B on 64 GPUs: 18 bytes a weight that learns and 2 of the reference, divided by 64; a copy on 8 GPUs for generation."""
    training, generation = memory_of(shape_of("70B"), Work("grpo"), Layout(64, 64, 8, offloaded=False))
    assert training["weights that learn, gradients, moments"] == pytest.approx(18 * 70e9 / 64)
    assert training["frozen models"] == pytest.approx(2 * 70e9 / 64)
    assert generation["weights of the copy"] == pytest.approx(2 * 70e9 / 8)
    assert generation["weights that learn, moments"] == pytest.approx(18 * 70e9 / 64)


def test_a_layer_that_is_divided_takes_less_while_it_works() -> None:
    """405B for RLVR: a gathered layer of 19 GB on each GPU is what does not fit on 128."""
    whole, divided = (memory_of(shape_of("405B"), Work("rlvr"), Layout(128, 128, 16, False, 1, d))[0] for d in (1, 8))
    assert divided["a gathered layer"] == pytest.approx(whole["a gathered layer"] / 8)
    same = "weights that learn, gradients, moments"
    assert divided[same] == whole[same] and divided["activations by layer"] < whole["activations by layer"]
    slower = [estimate(shape_of("70B"), Work("sft"), H100, Layout(64, 64, 0, False, 1, d)) for d in (1, 2)]
    assert slower[0] is not None and slower[1] is not None and slower[1].train > slower[0].train
    assert "FSDP2 over 64 GPUs, each layer over 2 of them (tensor_parallel=2)" in slower[1].layout.text()
    experts = best(shape_of("235B-A22B"), Work("grpo", prompts=32), H100, 256)
    assert experts is not None and experts.layout.divided == 1


def test_time_by_hand() -> None:
    """SFT of 8B on 8 GPUs: forward, backward and forward again are 8 FLOP a weight and token, and attention 2 L H S a pass."""
    shape, work = shape_of("8B"), Work("sft", prompts=64, prompt=100, response=924)
    found = estimate(shape, work, H100, Layout(8, 8, 0, offloaded=False))
    assert found is not None and found.generate == 0.0
    tokens = 64 * 2 * 1024
    flops = 8 * 8e9 * tokens + 4 * tokens * 2 * 32 * 4096 * 1024
    assert found.train == pytest.approx(flops / (8 * 989e12 * TRAIN))
    assert found.step == pytest.approx(OTHER * found.train)


def test_what_fits_fits_and_more_gpus_are_faster() -> None:
    shape, work = shape_of("70B"), Work("grpo", prompts=128)
    need = fewest(shape, work, H100)
    assert need is not None and best(shape, work, H100, need // 2) is None
    steps = [best(shape, work, H100, need * n) for n in (1, 2, 4)]
    for one in steps:
        assert one is not None and max(sum(one.training.values()), sum(one.generation.values())) <= 0.9 * H100.memory * GB
    seconds = [one.step for one in steps if one is not None]
    assert seconds == sorted(seconds, reverse=True)
    assert (fewest(shape, work, GPUS["h200"]) or 0) <= need


def test_a_small_model_needs_one_gpu_and_no_sharding() -> None:
    found = best(shape_of("0.5B"), Work("rlvr", prompts=8), GPUS["h200"], 1)
    assert found is not None and found.layout == Layout(1, 1, 1, offloaded=False)
    assert "planned" not in found.layout.text()


def test_the_table_of_the_textbooks_is_printed_with_what_differs() -> None:
    said = textbook_lines(H100)
    assert len(said) == 6 and "GRPO, 70B: said 32-64 GPUs; fits from 32" in said[3]


def test_the_shape_of_a_model_that_is_there_is_read_from_its_config(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("abc")
    model = tiny_model(tokenizer, "nano", 0)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    shape = shape_of(str(tmp_path))
    assert shape.weights == shape.active == model.num_parameters()
    assert (shape.layers, shape.hidden, shape.keys) == (2, 96, 32)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--params", "seventy"], "--params seventy: give a size such as 7B, 350M or 30B-A3B"),
        (["--params", "3B-A7B"], "a token uses some of the weights, not more than all"),
        (["--params", "70B", "--gpus", "8"], "grpo of 70B weights does not fit on 8 x h100; it fits on 32"),
        (["--params", "7B", "--gpus", "0"], "--gpus 0: give a number of GPUs"),
        (["--params", "7B", "--gpu", "h101"], "unknown GPU 'h101'; did you mean 'h100'"),
        (["--params", "7B", "prompts=many"], "prompts=many: give a whole number"),
        (["--params", "7B", "prompt_count=8"], "unknown key of an estimate 'prompt_count'"),
        (["--params", "7B", "algorithm=gropo"], "unknown algorithm of an estimate 'gropo'; did you mean 'grpo'"),
        (["--params", "7B", "response=100", "limit=50"], "limit is the longest response, not below the average"),
        (["--params", "7B", "quickstart"], "'quickstart' is not key=value: with --params there is no recipe"),
        ([], "give a recipe, or a size with --params"),
    ],
)
def test_what_cannot_be_estimated_is_refused_in_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    said = capsys.readouterr()
    assert line in said.err and len(said.err.splitlines()) == 1 and not said.out


def test_the_command_prints_memory_layout_time_and_money(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "70B", "--gpus", "64", "--gpu", "h100", "prompts=128"]) == 0
    said = capsys.readouterr().out
    for word in (
        "an estimate:",
        "layout: FSDP2 over 64 GPUs",
        "memory of a GPU in training:",
        "tokens/s a GPU",
        "days",
        "$",
        "assumed:",
    ):
        assert word in said
