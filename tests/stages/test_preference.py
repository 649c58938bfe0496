"""The preference stage end to end on a CPU: from a YAML file and JSONL data to a model that prefers what people did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain import cli, config, config_tree
from posttrain.algorithms.ipo import IPO
from posttrain.errors import UserError
from posttrain.evals.statistics import share_interval
from posttrain.runs.read import Run
from posttrain.stages import base
from posttrain.stages.base import Stage
from posttrain.stages.preference import PreferenceStage

WORDS = ["cat", "dog", "fish", "bird", "cow", "pig", "hen", "fox", "owl", "bee", "ant", "bat"]
PAIRS = [{"prompt": f"{w}{n}", "chosen": "yes", "rejected": "no"} for w in WORDS for n in range(3)]
LABELS = [{"prompt": p["prompt"], "completion": p[k], "label": k == "chosen"} for p in PAIRS for k in ("chosen", "rejected")]


def write(folder: Path, records: list[dict[str, Any]], name: str = "prefs.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def settings(data: list[str], **changes: Any) -> dict[str, Any]:
    stage = {
        "stage": "preference", "name": "prefs", "model": "tiny:nano", "data": data, "steps": 24, "batch": 8, "max_length": 64,
        "held_out": 0.25, "evaluate_every": 12, "optimizer": {"lr": 3e-3, "warmup": 2},
    }  # fmt: skip
    return {"stages": [stage | changes]}


def go(folder: Path, tree: dict[str, Any], out: str = "run") -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert cli.main(["run", str(path), f"out={folder / out}", "device=cpu"]) == 0
    return folder / out


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "stages" / "prefs" / "result.json").read_text())


@pytest.mark.parametrize(
    ("algorithm", "records", "lora"),
    [
        ("dpo", PAIRS, None),
        ("ipo", PAIRS, None),
        ("simpo", PAIRS, None),
        ("orpo", PAIRS, None),
        ("kto", LABELS, None),
        ("kto", PAIRS, None),
        ("dpo", PAIRS, 4),
    ],
    ids=["dpo", "ipo", "simpo", "orpo", "kto", "kto-pairs", "dpo-lora"],
)
def test_held_out_preferences_are_learned(
    tmp_path: Path, algorithm: str, records: list[dict[str, Any]], lora: int | None
) -> None:
    if lora:
        pytest.importorskip("peft")
    run = go(tmp_path, settings([write(tmp_path, records)], algorithm={"name": algorithm}, lora=lora))
    found = result(run)
    assert found["accuracy"][0] >= 0.9 and found["steps"] == 24
    rows = Run(run).metrics("prefs")
    assert [row.step for row in rows if "accuracy/held_out" in row.figures] == [0, 12, 24]
    assert rows[0].figures["loss/held_out"] > rows[-1].figures["loss/held_out"]
    assert rows[-1].figures["loss/held_out"] == pytest.approx(found["figures"]["loss"])
    assert (run / "export" / "model.safetensors").is_file()
    if algorithm in ("dpo", "ipo"):  # it begins as its own reference
        assert rows[0].figures["margin/held_out"] == 0.0 and rows[0].figures["accuracy/held_out"] == 0.5
    if algorithm == "dpo":
        assert rows[0].figures["loss/held_out"] == pytest.approx(0.6931, abs=1e-4)
    if lora:
        folder = run / "stages" / "prefs" / "model" / "adapter"
        assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_with_lora_the_reference_is_no_second_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage loads one model, and every frozen weight of the reference is the policy's own tensor."""
    pytest.importorskip("peft")
    loaded: list[str] = []
    original, made = base.load_policy, PreferenceStage.make_trainer
    monkeypatch.setattr(base, "load_policy", lambda name, *more: loaded.append(name) or original(name, *more))

    def look(self: PreferenceStage, context: Any, policy: Any, roles: Any, **more: Any) -> Any:
        trainer = made(self, context, policy, roles, **more)
        own = {p.data_ptr() for p in policy.model.parameters() if not p.requires_grad}
        assert own >= {p.data_ptr() for p in roles[0].policy.model.parameters()}
        return trainer

    monkeypatch.setattr(PreferenceStage, "make_trainer", look)
    go(tmp_path, settings([write(tmp_path, PAIRS)], steps=1, evaluate_every=0, held_out=0.0, lora={"rank": 2}))
    assert loaded == ["tiny:nano"]


def test_the_data_report_is_said_first(tmp_path: Path) -> None:
    path = write(tmp_path, [*PAIRS, {"prompt": "x", "chosen": "same", "rejected": "same"}])
    run = go(tmp_path, settings([path], steps=1, held_out=0.0))
    text = (run / "events.jsonl").read_text()
    assert f"1 skipped: responses are equal (line {len(PAIRS) + 1})" in text
    assert f"{len(PAIRS)} of {len(PAIRS) + 1} rows kept" in text and "36 pairs to train on, 0 held out" in text
    assert result(run)["trained_on"] == len(PAIRS) and "accuracy" not in result(run)


def test_held_out_files_and_rankings(tmp_path: Path) -> None:
    ranked = [{"prompt": p["prompt"], "responses": ["no", "maybe", "yes"], "scores": [0, 1, 2]} for p in PAIRS[:6]]
    train, aside = write(tmp_path, PAIRS[6:]), write(tmp_path, ranked, "aside.jsonl")
    run = go(tmp_path, settings([train], held_out_data=[aside], steps=2, evaluate_every=0))
    found = result(run)
    assert found["trained_on"] == 30 and found["held_out"] == 18  # six rankings of three have three pairs each


def test_the_interval_is_over_prompts_and_ties_are_half_right(tmp_path: Path) -> None:
    """A model that has not moved from its reference ties every pair. Three pairs of each of five rankings are 15 halves, in five
    prompts; rounding 7.5 of 15 to 8 and taking 15 for independent would give 0.533 and a narrower interval."""
    ranked = [{"prompt": p["prompt"], "responses": ["no", "maybe", "yes"], "scores": [0, 1, 2]} for p in PAIRS[:5]]
    train, aside = write(tmp_path, PAIRS[6:]), write(tmp_path, ranked, "aside.jsonl")
    tree = settings([train], held_out_data=[aside], steps=1, evaluate_every=0, optimizer={"lr": 1e-30, "warmup": 0})
    found = result(go(tmp_path, tree))
    assert found["held_out"] == 15 and found["accuracy"] == share_interval([0.5] * 5, means=True).row()


def test_prompts_do_not_cross_the_split(tmp_path: Path) -> None:
    twice = [*PAIRS, *[{**p, "rejected": "never"} for p in PAIRS]]
    run = go(tmp_path, settings([write(tmp_path, twice)], steps=1, evaluate_every=0))
    assert result(run)["held_out"] == 2 * round(0.25 * len(PAIRS))


def test_mismatched_examples_give_kto_its_baseline(tmp_path: Path) -> None:
    run = go(tmp_path, settings([write(tmp_path, LABELS)], algorithm={"name": "kto"}, steps=10, optimizer={"lr": 1e-2}))
    assert "54 mismatched responses with them, for the baseline" in (run / "events.jsonl").read_text()
    rows = Run(run).metrics("prefs")
    assert rows[1].figures["kl"] == 0.0 and max(row.figures.get("kl", 0.0) for row in rows) > 0.0


def test_one_held_out_prompt_is_enough_for_a_baseline(tmp_path: Path) -> None:
    """The responses that do not match come from what is trained on."""
    run = go(tmp_path, settings([write(tmp_path, LABELS[:8])], algorithm={"name": "kto"}, steps=2, held_out=0.2))
    assert result(run)["held_out"] == 2


def test_it_is_repeated_exactly(tmp_path: Path) -> None:
    tree = settings([write(tmp_path, LABELS)], algorithm={"name": "kto"}, steps=4)
    losses = [[row.figures.get("loss") for row in Run(go(tmp_path, tree, out)).metrics("prefs")] for out in ("one", "two")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("changes", [{}, {"reference_ema": 0.5}, {"reference_every": 3}], ids=["frozen", "ema", "every"])
def test_a_resumed_run_ends_at_the_same_weights(changes: dict[str, Any], tmp_path: Path) -> None:
    """The order of the data, the mismatched examples and the reference are those of the first attempt, also where it moves."""
    short = {"steps": 6, "checkpoint_every": 4, "evaluate_every": 0}
    tree = settings([write(tmp_path, LABELS)], algorithm={"name": "kto"}, **short, **changes)
    run = go(tmp_path, tree)
    weights, figures = (run / "export" / "model.safetensors").read_bytes(), result(run)["figures"]
    shutil.rmtree(run / "stages" / "prefs")  # as if it had been stopped after its last checkpoint, at step 4
    (run / "summary.json").unlink()
    assert cli.main(["resume", str(run)]) == 0
    assert (run / "export" / "model.safetensors").read_bytes() == weights
    assert result(run)["figures"] == figures
    assert [row.step for row in Run(run).metrics("prefs")] == [1, 2, 3, 4, 5, 6]


REFUSED = [
    ({"algorithm": {"name": "grpo"}}, "grpo learns from rollouts; use an rl stage"),
    ({"algorithm": {"name": "sft"}}, "sft learns from demonstrations; use an sft stage"),
    ({"algorithm": {"name": "reward_model"}}, "reward_model learns from rankings; use a reward_model stage"),
    ({"algorithm": {"name": "simpo"}, "reference": "tiny:nano"}, "reference is given, but this algorithm has no use for one"),
    ({"steps": 0}, "steps must be at least 1"),
    ({"data": []}, "give at least one JSONL file"),
    ({"held_out": 1.0}, "held_out must be a share of the prompts"),
    ({"reference_ema": 0.9, "reference_every": 3}, "reference_ema and reference_every are two ways to move the reference"),
    ({"reference_ema": 1.0}, "reference_ema must be in \\[0, 1\\), not 1.0"),
    ({"algorithm": {"name": "simpo"}, "reference_every": 3}, "the reference moves, but this algorithm has no use for one"),
    (
        {"reference_ema": 0.9, "reference": "tiny:nano"},
        "a reference that moves begins as the stage's model with all of its weights",
    ),
    ({"reference_device": "gpu"}, "reference_device: input should be 'same' or 'cpu'"),
    ({"held_in": 1}, "did you mean 'held_out'"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_settings_that_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        config.from_config(settings(**({"data": ["prefs.jsonl"]} | changes)), "mine.yaml")


def test_settings_come_back_from_the_configuration() -> None:
    stage = PreferenceStage(
        name="p", model="m", data=("a.jsonl", "b.jsonl"), algorithm=IPO(tau=0.2), held_out_data=("c.jsonl",)
    )
    assert config_tree.from_tree(config_tree.to_tree(stage), Stage, "stages[0]") == stage


@pytest.mark.parametrize(
    ("algorithm", "records", "words"),
    [
        ("dpo", LABELS, "holds rows of kind unpaired; this algorithm learns from pair or openai or ranking"),
        (
            "kto",
            [{"prompt": "a", "responses": ["b", "c"], "scores": [1, 2]}],
            "holds rows of kind ranking; this algorithm learns",
        ),
        (
            "kto",
            [{"prompt": "a", "completion": c, "label": c == "b"} for c in "bc"],
            "mismatched examples need at least two different prompts",
        ),
        (
            "kto",
            [row for row in LABELS if row["label"]],
            "prefs: all 27 labelled responses to train on are good, and kto learns from good and bad",
        ),
        (
            "kto",
            [row for row in LABELS if not row["label"]],
            "prefs: all 27 labelled responses to train on are bad, and kto learns from good",
        ),
        ("dpo", [{"prompt": "a", "chosen": "b"}], "prefs.jsonl line 1: no rejected"),
        ({"name": "dpo", "labels": "soft"}, PAIRS, "soft labels are made of scores, and"),
    ],
)
def test_data_that_is_refused(
    tmp_path: Path, algorithm: Any, records: list[dict[str, Any]], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    named = {"name": algorithm} if isinstance(algorithm, str) else algorithm
    path.write_text(yaml.safe_dump(settings([write(tmp_path, records)], algorithm=named)))
    assert cli.main(["run", str(path), f"out={tmp_path / 'run'}", "device=cpu"]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_labels_of_one_kind_are_refused_before_the_first_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipeline in which they would be read second; the files of a stage count together, and what is held out does not count."""
    good, bad = ([row for row in LABELS if row["label"] == label] for label in (True, False))
    files = [write(tmp_path, good[:20], "a.jsonl"), write(tmp_path, good[20:], "b.jsonl")]
    first = {"stage": "preference", "name": "first", "model": "tiny:nano", "data": [write(tmp_path, PAIRS)], "steps": 1}
    path = tmp_path / "mine.yaml"

    def run(data: list[str]) -> tuple[int, str, str]:
        tree = settings(data, algorithm={"name": "kto"}, steps=1, model="first")
        path.write_text(yaml.safe_dump({"stages": [first, *tree["stages"]]}))
        code = cli.main(["run", str(path), f"out={tmp_path / 'run'}", "device=cpu"])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    code, said, error = run(files)
    assert code == 2 and "all 27 labelled responses to train on are good" in error and error.count("\n") == 1
    assert "first" not in said and not (tmp_path / "run").exists(), "nothing was trained"
    assert run([*files, write(tmp_path, bad[:30], "c.jsonl")])[0] == 0


def test_all_that_is_left_to_train_on_may_not_be_of_one_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The only bad responses are of the prompts that are held out, or too long."""
    good = [row for row in LABELS if row["label"]]
    path = tmp_path / "mine.yaml"
    long = [{"prompt": "cat0", "completion": "no" * 99, "label": False}]
    path.write_text(yaml.safe_dump(settings([write(tmp_path, good + long)], algorithm={"name": "kto"})))
    assert cli.main(["run", str(path), f"out={tmp_path / 'run'}", "device=cpu"]) == 2
    assert "labelled responses to train on are good, and kto learns" in capsys.readouterr().err


def test_a_reference_with_another_vocabulary_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from posttrain.models.save import save
    from posttrain.models.tiny import character_tokenizer, tiny_model

    tokenizer = character_tokenizer("abc")
    save(tiny_model(tokenizer, "nano", 0), tokenizer, tmp_path / "other", replace=True)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(settings([write(tmp_path, PAIRS)], reference=str(tmp_path / "other"))))
    assert cli.main(["run", str(path), f"out={tmp_path / 'run'}", "device=cpu"]) == 2
    assert "has another vocabulary than" in capsys.readouterr().err
