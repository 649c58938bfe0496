"""Stages that learn from given rows: for steps or epochs, with a held-out share, on files of one row and more."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from posttrain import cli, config, pipeline
from posttrain.api.inputs import built
from posttrain.commands import plan
from posttrain.errors import UserError, many
from posttrain.models.tiny import MAX_POSITIONS
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.stages._material import Data, measured_units, split_sources
from posttrain.stages.base import Context
from posttrain.stages.preference import PreferenceStage
from posttrain.stages.reward_model import RewardModelStage
from posttrain.stages.rl import RLStage
from posttrain.stages.sft import SFTStage
from posttrain.train.optimizer import Optimization
from posttrain.types import Example


def write(folder: Path, count: int) -> str:
    """Rows that every stage reads: sft the completion, the others the pair."""
    path = folder / f"{count}.jsonl"
    rows = [{"prompt": f"say {n}", "completion": f"yes {n}", "chosen": f"yes {n}", "rejected": "no"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tree(kind: str, file: str, **changes: Any) -> dict[str, Any]:
    data: Any = [{"file": file}] if kind == "sft" else [file]
    optimizer = {"lr": 3e-3, "warmup": 0, "schedule": "constant"}
    return {"stages": [{"stage": kind, "name": "one", "model": "tiny:nano", "data": data, "optimizer": optimizer, **changes}]}


def go(folder: Path, what: dict[str, Any], *arguments: str) -> dict[str, Any]:
    (folder / "mine.yaml").write_text(yaml.safe_dump(what))
    assert cli.main(["run", str(folder / "mine.yaml"), f"out={folder / 'run'}", "device=cpu", "threads=1", *arguments]) == 0
    return json.loads((folder / "run" / "stages" / "one" / "result.json").read_text())


@pytest.mark.parametrize("kind", ["sft", "preference", "reward_model"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_small_files_train_with_the_defaults(kind: str, count: int, tmp_path: Path, capsys: Any) -> None:
    found = go(tmp_path, tree(kind, write(tmp_path, count), epochs=2))
    held_out = 0 if kind == "sft" or count == 1 else 1
    assert (found["steps"], found["trained_on"], found.get("held_out", 0)) == (2, count - held_out, held_out)
    size = many(count - held_out, "example")
    assert f"2 epochs of {size} = 2 steps of {count - held_out}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("epochs", "size", "batch", "steps"),
    [(1, 64, 32, 2), (1, 65, 32, 3), (3, 5, 32, 3), (0.5, 64, 32, 1), (0.001, 64, 8, 1), (3, 10, 3, 10)],
)
def test_epochs_as_steps(epochs: float, size: int, batch: int, steps: int) -> None:
    stage = SFTStage(name="one", model="m", data=(Data(file="x"),), epochs=epochs, batch=batch)
    assert stage.steps is None and stage.counted(size).steps == steps


def test_one_epoch_reads_every_row_once(tmp_path: Path) -> None:
    """As many tokens as there are, in batches that do not divide the rows evenly but for the last."""
    go(tmp_path, tree("sft", write(tmp_path, 9), epochs=2, batch=3))
    rows = Run(tmp_path / "run").metrics("one")
    first, second = (sum(row.figures["trained"] for row in rows[n : n + 3]) for n in (0, 3))
    assert len(rows) == 6 and first == second


@pytest.mark.parametrize("kind", [SFTStage, PreferenceStage, RewardModelStage])
def test_steps_and_epochs_together_are_refused(kind: Any) -> None:
    data = (Data(file="x"),) if kind is SFTStage else ("x",)
    with pytest.raises(UserError, match="^one: give steps or epochs, not both$"):
        kind(name="one", model="m", data=data, steps=3, epochs=1)
    assert kind(name="one", model="m", data=data).steps == 300


def test_on_the_command_line_one_takes_the_place_of_the_other(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(tree("sft", "x.jsonl", steps=7)))
    stage: Any = config.parse(str(file), ["one.epochs=2"]).recipe.stages[0]
    assert (stage.steps, stage.epochs) == (None, 2)
    file.write_text(yaml.safe_dump(tree("sft", "x.jsonl", epochs=7)))
    stage = config.parse(str(file), ["one.steps=2"]).recipe.stages[0]
    assert (stage.steps, stage.epochs) == (2, None)
    with pytest.raises(UserError, match="one: give steps or epochs, not both"):
        config.parse(str(file), ["one.steps=2", "one.epochs=1"])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("sft", "8 steps = 2.0 passes over 8 examples, 2 held out"), ("preference", "8 steps = 2.0 passes over 8")],
)
def test_a_plan_shows_the_steps_and_a_warm_up_that_is_longer(kind: str, expected: str, tmp_path: Path) -> None:
    optimizer = {"warmup": 20, "schedule": "cosine"}
    what = tree(kind, write(tmp_path, 10), epochs=2, batch=2, held_out=0.2, optimizer=optimizer)
    settings = config.from_config(what, "x")
    lines = "\n".join(plan.describe(settings))
    assert expected in lines and "one.optimizer.warmup is 20 steps and the stage has 8" in lines


def test_a_plan_leaves_out_held_out_data_that_an_earlier_stage_will_write(tmp_path: Path) -> None:
    what = tree("preference", write(tmp_path, 4), epochs=2, held_out_data=["compare"])
    compare = {"stage": "comparisons", "name": "compare", "model": "tiny:nano", "task": {"name": "reviews"}}
    lines = "\n".join(plan.describe(config.from_config({"stages": [compare, *what["stages"]]}, "x")))
    assert "a step: 32 units; 2 epochs" in lines and "preferences written by compare: not there yet" in lines


def test_a_dry_run_of_epochs_is_that_of_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    inner = plan.loop_seconds
    monkeypatch.setattr(plan, "loop_seconds", lambda rows, steps, every: asked.append(steps) or inner(rows, steps, every))
    settings = config.from_config(tree("sft", write(tmp_path, 10), epochs=20, batch=2), "x")
    plan.describe(settings, dry=True)
    assert asked == [100]


def test_the_loss_of_held_out_examples_is_measured_before_and_after(tmp_path: Path, capsys: Any) -> None:
    found = go(tmp_path, tree("sft", write(tmp_path, 20), steps=12, batch=4, held_out=0.25, evaluate_every=5))
    rows = Run(tmp_path / "run").metrics("one")
    assert [row.step for row in rows if "loss/held_out" in row.figures] == [0, 5, 10, 12]
    (after, low, high), before = found["loss"]["after"], found["loss"]["before"]
    assert found["held_out"] == 5 and found["trained_on"] == 15 and low < after < high and after < before
    assert before == rows[0].figures["loss/held_out"] and after == pytest.approx(rows[-1].figures["loss/held_out"], rel=1e-5)
    assert f"held-out loss {after:.3f} [" in capsys.readouterr().out
    assert found["best_score"]["figure"] == "loss/held_out"


def test_the_step_of_the_lowest_held_out_loss_is_kept(tmp_path: Path) -> None:
    what = {"steps": 6, "batch": 4, "evaluate_every": 2, "keep": "best"}
    found = go(tmp_path, tree("sft", write(tmp_path, 8), held_out=0.25, **what))
    assert found["kept_step"] == found["best_score"]["step"] and found["best_score"]["figure"] == "loss/held_out"
    with pytest.raises(UserError, match="^one: keep=best needs held-out scores"):
        config.from_config(tree("sft", "x.jsonl", **what), "x")


def test_after_a_plateau_the_next_stage_starts_from_the_best_step(tmp_path: Path) -> None:
    """A rate that is far too high: the loss rises, the stage ends early, and the pipeline goes on."""
    what = tree("sft", write(tmp_path, 8), held_out=0.25, steps=9, batch=4, evaluate_every=1, keep="best", stop={"plateau": 2})
    what["stages"][0]["optimizer"] |= {"lr": 0.5, "clip_norm": 100.0}
    two = {**what["stages"][0], "name": "two", "model": "one", "steps": 1, "keep": "last", "stop": {}}
    what["stages"].append(two)
    found = go(tmp_path, what)
    assert found["steps"] == found["kept_step"] + 2 < 9 and "(stop.plateau=2)" in found["stopped"]
    start = Run(tmp_path / "run").metrics("two")[0]
    assert start.step == 0 and start.figures["loss/held_out"] == pytest.approx(found["best_score"]["score"], rel=1e-5)


def test_a_stop_that_could_never_come_is_refused() -> None:
    with pytest.raises(UserError, match=r"^one: stop\.plateau needs held-out scores"):
        config.from_config(tree("sft", "x.jsonl", stop={"plateau": 2}), "x")
    with pytest.raises(UserError, match=r"^one: stop\.kl needs samples and a reference"):
        config.from_config(tree("sft", "x.jsonl", stop={"kl": 10}), "x")
    with pytest.raises(UserError, match="stop: kl_steps must be at least 1, not 0"):
        config.from_config(tree("sft", "x.jsonl", stop={"kl_steps": 0}), "x")


def test_texts_without_a_prompt_are_held_out_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} is even"}) + "\n" for n in range(0, 20, 2)))
    found = go(tmp_path, tree("sft", str(path), steps=1, held_out=0.3))
    assert (found["trained_on"], found["held_out"]) == (7, 3)


def test_the_longest_pair_is_that_of_the_models_positions(tmp_path: Path) -> None:
    """By default; nothing is said of a number that nobody gave."""
    path = tmp_path / "long.jsonl"
    rows = [{"prompt": f"p{n}", "chosen": "a" * long, "rejected": "b"} for n, long in enumerate((1500, MAX_POSITIONS, 2, 3))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = go(tmp_path, tree("preference", str(path), steps=1, batch=1, held_out=0))
    assert found["trained_on"] == 3, "the one that is longer is left out, and the one of 1500 tokens is not"


def sources(*prompts: range) -> list[list[tuple[Example]]]:
    mask = np.array([False, False, True])
    return [[(Example(np.array([3, n, place]), mask),) for n in part] for place, part in enumerate(prompts)]


@pytest.mark.parametrize("seed", range(5))
def test_a_prompt_of_two_files_is_held_out_of_both(seed: int) -> None:
    train, held_out = split_sources(sources(range(10), range(9, -1, -1), range(20, 40)), 0.3, seed)
    prompts = [{int(unit[0].ids[1]) for unit in units} for units in (*train, held_out)]
    assert not prompts[3] & (prompts[0] | prompts[1] | prompts[2]) and len(prompts[3]) == 9


@pytest.mark.parametrize("seed", range(5))
def test_every_file_keeps_a_prompt_to_train_on(seed: int) -> None:
    train, held_out = split_sources(sources(range(1), range(1, 3), range(3, 9)), 0.8, seed)
    assert all(train) and sum(map(len, train)) + len(held_out) == 9


@pytest.mark.parametrize("kind", ["sft", "preference"])
def test_more_held_out_than_is_measured_is_sampled_and_said(kind: str, tmp_path: Path, capsys: Any) -> None:
    found = go(
        tmp_path, tree(kind, write(tmp_path, 40), epochs=0.1, batch=32, held_out=0.5, evaluate_units=4, evaluate_every=0)
    )
    said = capsys.readouterr().out
    assert found["held_out"] == 4 and "measured on 4 of the 20 held out, drawn by the seed (evaluate_units)" in said
    assert "= 1 step of " in said


def test_the_sample_of_what_is_held_out_is_not_its_beginning(tmp_path: Path) -> None:
    units = [(Example(np.array([n, n]), np.array([False, True])),) for n in range(1000)]
    with RunWriter(tmp_path) as writer:
        drawn = [measured_units(Context(writer, seed, say=False), "one", units, 100) for seed in (0, 0, 1)]
        assert measured_units(Context(writer, 0, say=False), "one", units, 1000) == units
    places = [[int(unit[0].ids[0]) for unit in part] for part in drawn]
    assert places[0] == places[1] != places[2] and places[0] == sorted(places[0])
    assert 300 < sum(places[0]) / 100 < 700 and len(set(places[0])) == 100


@pytest.mark.parametrize("how", [{"epochs": 2}, {"steps": 2}])
@pytest.mark.parametrize(("kind", "usual"), [("sft", "1e-05"), ("preference", "1e-06")])
def test_adapters_with_the_learning_rate_of_full_training_are_named_once(
    kind: str, usual: str, how: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what = tree(kind, write(tmp_path, 4), batch=2, lora=4, **how)
    del what["stages"][0]["optimizer"]

    def count(lines: str) -> int:
        return lines.count(f"{usual} is the default of full training")

    def planned(*given: str) -> int:
        (tmp_path / "r.yaml").write_text(yaml.safe_dump(what))
        return count("\n".join(plan.describe(config.parse(str(tmp_path / "r.yaml"), list(given)))))

    assert planned() == planned("one.beta1=0.8") == 1
    assert planned(f"one.lr={usual}") == planned("one.lr=1e-7") == 1, "the same training, whoever wrote the number"
    assert planned("one.lr=1e-4") == planned("one.lora=null") == 0
    settings = config.parse(str(tmp_path / "r.yaml"), [f"out={tmp_path / 'run'}", "device=cpu"])
    pipeline.start(settings)
    assert count(capsys.readouterr().out) == 1


def test_a_group_that_is_given_in_part_keeps_the_defaults_of_the_stage() -> None:
    """An optimizer's own defaults are those of rl; the pages of the reference list others for sft and preferences."""
    usual = SFTStage(name="one", model="x", data=("y",)).optimizer
    expected = replace(usual, beta1=0.8)
    part: dict[str, Any] = {"optimizer": {"beta1": 0.8}}
    what: dict[str, Any] = {"name": "one", "model": "x", "data": ["y"]}
    given = {"stage": "sft", **what, **part}
    assert usual.lr == 1e-5 and usual.schedule == "cosine"
    assert config.from_config({"stages": [given]}, "x").recipe.stages[0].optimizer == expected  # type: ignore[attr-defined]
    loose = config.from_config({"stages": [{**given, "lr": 3e-4}]}, "x").recipe.stages[0]
    assert loose.optimizer == replace(expected, lr=3e-4)  # type: ignore[attr-defined]
    assert built(SFTStage, what, part, "sft").optimizer == expected
    assert SFTStage(**what, **part).optimizer == expected


def test_an_equal_learning_rate_is_named_whatever_object_it_is() -> None:
    given = {"name": "rl", "model": "x", "task": "arithmetic", "lora": 4}
    for rate, named in ((None, 1), (float("1e-6"), 1), (Optimization.lr, 1), (1e-5, 0)):
        own = {} if rate is None else {"optimizer": Optimization(lr=rate)}
        assert len(RLStage(**given, **own).warnings()) == named  # type: ignore[arg-type]
