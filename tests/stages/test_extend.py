"""A run that is extended is the run that it would have been, had it been longer from the start."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

import posttrain as pt
from posttrain import cli, pipeline
from posttrain.loop import Loop
from posttrain.runs.read import Run

QUICK = {"lr": 3e-3, "warmup": 2, "schedule": "constant"}
TASK = {"name": "arithmetic", "level": 1}
PAIRS = [{"prompt": f"say {n}", "chosen": f"yes {n}", "rejected": "no", "completion": f"yes {n}"} for n in range(8)]
STAGES: dict[str, dict[str, Any]] = {
    "sft": {"stage": "sft", "data": [{"file": "pairs.jsonl"}], "batch": 3, "held_out": 0.2, "evaluate_every": 3},
    "reward_model": {"stage": "reward_model", "data": ["pairs.jsonl"], "batch": 3, "members": 2, "evaluate_every": 3},
    "rl": {"stage": "rl", "task": TASK, "prompts": 2, "sampling": {"max_new_tokens": 6}, "evaluate_every": 3, "evaluate_problems": 2},
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "draw", lambda *_: None)
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))


def start(name: str, steps: int, kind: str, code: int = 0, **changes: Any) -> Path:
    first = {
        "name": "one",
        "model": "tiny:nano",
        "steps": steps,
        "optimizer": QUICK,
        "checkpoint_every": 2,
        **STAGES[kind],
        **changes,
    }
    sampling = {"max_new_tokens": 4, "temperature": 0.0}
    after = {"stage": "evaluate", "name": "after", "model": "one", "task": TASK, "problems": 4, "sampling": sampling}
    tree = {"stages": [first, after] if kind == "rl" else [first], "name": "run"}
    Path("run.yaml").write_text(yaml.safe_dump(tree))
    assert cli.main(["run", "run.yaml", f"out={name}", "device=cpu", "threads=1"]) == code
    return Path(name)


def learned(run: Path) -> tuple[list[Any], dict[str, Any], dict[str, bytes]]:
    """Figures of every step, results and weights, all without the clocks."""
    rows = [(row.stage, row.step, {k: v for k, v in row.figures.items() if "second" not in k}) for row in Run(run).metrics()]
    results = json.loads((run / "summary.json").read_text())["stages"]
    for result in results.values():
        for clock in ("seconds", "train_seconds"):
            result.pop(clock, None)
    files = sorted((run / "stages").rglob("*.safetensors"))
    tensors = {f"{f.parent.name} {k}": t.numpy().tobytes() for f in files for k, t in load_file(f).items()}
    return sorted(rows, key=lambda row: row[:2]), results, tensors


@pytest.mark.parametrize("kind", list(STAGES))
def test_an_extended_run_is_the_longer_run_to_the_bit(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    longer, run = start("longer", 5, kind), start("run", 3, kind)
    before = learned(run)
    assert cli.main(["resume", "run", "one.steps=5"]) == 0
    assert "changed since the last attempt: one.steps: 3 -> 5" in capsys.readouterr().out
    assert learned(run) == learned(longer) != before
    assert yaml.safe_load((run / "config.yaml").read_text())["stages"][0]["steps"] == 5
    assert [e for e in Run(run).events() if e.kind == "resume"], "it went on from a checkpoint"
    assert cli.main(["resume", "run", "one.steps=5"]) == 0 and "run is complete: " in capsys.readouterr().out


def test_a_stopped_stage_may_end_where_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a run that was killed has a model, from which a new one may start with another learning rate."""
    shorter, step = start("shorter", 3, "rl"), Loop.one_step

    def interrupted(loop: Loop) -> Any:
        os.kill(os.getpid(), signal.SIGINT) if loop.step == 2 else None
        return step(loop)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "one_step", interrupted)
        run = start("run", 9, "rl", 130)
    assert cli.main(["resume", "run", "one.optimizer.lr=1e-4"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "let one end where it is (posttrain resume run one.steps=3) and give the new run one.model=run" in line
    assert cli.main(["resume", "run", "one.steps=2"]) == 2
    assert "longer, not shorter; it can end at step 3, where its checkpoint is)" in capsys.readouterr().err
    assert cli.main(["resume", "run", "one.steps=3"]) == 0
    rows, results, weights = learned(run)
    assert weights == learned(shorter)[2] and results["after"] == learned(shorter)[1]["after"]
    assert [row[:2] for row in rows] == [row[:2] for row in learned(shorter)[0]]


def test_epochs_are_extended_in_python() -> None:
    rows = [{"prompt": row["prompt"], "completion": row["completion"]} for row in PAIRS]
    how = {"model": "tiny:nano", "data": rows, "batch": 4, "optimizer.schedule": "constant", "lr": 1e-3, "device": "cpu"}
    run = pt.sft(epochs=1, checkpoint_every=1, out="epochs", **how)
    assert run.result["steps"] == 2
    assert run.extend(epochs=3).result["steps"] == 6 and len(run.metrics) == 6
    with pytest.raises(
        pt.UserError, match=r"sft.epochs: 3.0 -> 1.0 \(a stage that has begun can be made longer, not shorter\)"
    ):
        run.extend(epochs=1)


def test_a_schedule_that_depends_on_the_steps_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    run = start("run", 2, "sft", optimizer={"schedule": "cosine"})
    summary = (run / "summary.json").read_bytes()
    assert cli.main(["resume", "run", "one.steps=4"]) == 2
    line = capsys.readouterr().err.strip()
    assert "one.steps: 2 -> 4 (optimizer.schedule=cosine ends at the last step" in line and "\n" not in line
    assert (run / "summary.json").read_bytes() == summary


def test_data_that_has_changed_since_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    run = start("run", 2, "sft")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "events.jsonl"}
    with Path("pairs.jsonl").open("a") as file:
        file.write(json.dumps(PAIRS[0]) + "\n")
    assert cli.main(["resume", "run", "one.steps=4"]) == 2
    assert "one was begun with other inputs: its input pairs.jsonl has changed" in capsys.readouterr().err
    assert all(path.read_bytes() == text for path, text in before.items()), "what it had made is not lost"
