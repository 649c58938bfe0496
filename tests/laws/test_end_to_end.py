"""Pinned runs: ten steps from the recipe to the saved weights, in one process and with generation in two.

The trajectories in test_trajectories.py feed fixed batches to the trainer. These runs use everything: recipe, data, engine, scoring,
selection, packing, loss, optimizer, and the written files. A run is read from its directory alone, so that the test pins what a user
sees: for every step the metrics to the bit, the text and the reward of every rollout, and the ids, log-prob bits and advantages of
the trained ones; at the end the weights. They are equal to the bit if torch, the instruction set and the processor are those that the
file names. Elsewhere sums are rounded differently, so only the first step is compared, with its figures within 1e-4. After an
intended change,

    PIN_TRAJECTORIES=1 python -m pytest tests/laws/test_end_to_end.py

writes the file again; say in the commit why its numbers changed.
"""

from __future__ import annotations

import hashlib
import json
import random
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pins_for_tests import WRITE, place
from safetensors.torch import load_file

from posttrain import config, pipeline
from posttrain.engine import forked
from posttrain.runs.read import Run

FILE = Path(__file__).with_name("end_to_end.json")
COMMAND = f"PIN_TRAJECTORIES=1 python -m pytest tests/laws/{Path(__file__).name}"
TASK = str(Path(__file__).parent.parent / "faults" / "letters.py") + ":Letters"
STEPS = 10
SHOWN = ("loss", "grad_norm", "reward", "length", "groups/zero_variance")  # figures that are kept as numbers
TIMES = ("seconds", "tokens_per_second", "memory")  # figures of the machine, not of the run
LATER = ("ratio/",)  # figures that are newer than the pins

OPTIMIZER = {"lr": 3e-3, "warmup": 2, "schedule": "cosine", "token_budget": 700}
RL = {"stage": "rl", "name": "rl", "model": "tiny:nano", "steps": STEPS, "prompts": 8, "sampling": {"max_new_tokens": 20},
      "task": {"name": TASK, "workers": False}, "optimizer": OPTIMIZER, "evaluate_every": 5, "evaluate_problems": 4,
      "checkpoint_every": 1000, "rollouts_every": 1}  # fmt: skip
TEXT = {"task": {"name": "arithmetic", "level": 1}, "counts": {1: 24}}
PPO = {"name": "ppo", "group": 4, "epochs": 2, "mini_batches": 2, "ptx": 0.5, "kl_target": 0.5, "kl_horizon": 200}
STAGES: dict[str, dict[str, Any]] = {
    "grpo": {**RL, "algorithm": {"name": "grpo", "group": 4}, "sampling": {"max_new_tokens": 64}},  # long enough for packed weights
    "ppo": {**RL, "algorithm": PPO, "pretraining": [TEXT], "pretraining_batch": 4},
    "online_dpo": {**RL, "algorithm": {"name": "online_dpo", "group": 4}},
    # scores in fifths, so that some groups teach nothing and the step asks for others
    "dapo": {**RL, "algorithm": {"name": "dapo", "group": 4, "l_max": 0, "l_cache": 0},
             "task": {"name": TASK, "workers": False, "grades": 5}},
    "sft": {"stage": "sft", "name": "sft", "model": "tiny:nano", "steps": STEPS, "batch": 6, "data": [TEXT], "optimizer": OPTIMIZER,
            "checkpoint_every": 1000},
    "reward_model": {"stage": "reward_model", "name": "reward", "model": "tiny:nano", "steps": STEPS, "batch": 4,
                     "optimizer": OPTIMIZER, "evaluate_every": 5, "checkpoint_every": 1000},
}  # fmt: skip
CASES = [(name, processes) for name in STAGES for processes in (1, 2)]


def run(name: str, processes: int, folder: Path) -> Run:
    """One stage, as the command line would run it."""
    recipe = folder / "recipe.yaml"
    stage = {**STAGES[name], "data": [str(folder / "pairs.jsonl")]} if name == "reward_model" else STAGES[name]
    recipe.write_text(yaml.safe_dump({"seed": 7, "device": "cpu", "threads": processes, "stages": [stage]}))
    chance = random.Random(0)
    words = [["".join(chance.choices("xyz", k=6)) for _ in range(2)] for _ in range(40)]
    pairs = [
        {"prompt": f"say {n}", "chosen": max(two), "rejected": min(two)} for n, two in enumerate(words) if two[0] != two[1]
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return Run(pipeline.start(config.parse(str(recipe), [f"out={folder / 'run'}"], allow_code=True)))


def digest(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]


def facts(found: Run) -> dict[str, Any]:
    """What a run directory says of a run, short enough to be kept: digests, and some figures to read when they differ."""
    stage = found.stages()[0]
    rows = [{k: v for k, v in row.figures.items() if not k.startswith(TIMES + LATER)} for row in found.metrics(stage)]
    figures = [[f"{key} {value.hex()}" for key, value in sorted(row.items())] for row in rows]
    weights = load_file(found.directory / "stages" / stage / "model" / "model.safetensors")
    texts, tokens = [], []
    for step in found.rollout_steps(stage):
        written = [
            asdict(replace(rollout, advantage=None)) for rollout in found.rollouts(stage, step)
        ]  # it is among the tokens
        texts.append(digest(json.dumps(written)))
        arrays = found.arrays(stage, step)
        assert arrays is not None, "what was trained on is there token by token"
        columns = {"starts": arrays.starts, **arrays.arrays}
        tokens.append(" ".join(f"{key}:{digest(column.tobytes())}" for key, column in sorted(columns.items())))
    return {
        "shown": [{key: row[key] for key in SHOWN if key in row} for row in rows],
        "metrics": [digest("\n".join(row)) for row in figures],
        "rollouts": texts,
        "tokens": tokens,
        "weights": digest(b"".join(key.encode() + value.numpy().tobytes() for key, value in sorted(weights.items()))),
    }


@pytest.fixture(autouse=True)
def threads():  # type: ignore[no-untyped-def]
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "processes"), CASES, ids=lambda value: str(value))
def test_ten_steps_are_those_that_were_pinned(
    name: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    submit = forked.EngineWorkers.submit
    monkeypatch.setattr(forked.EngineWorkers, "submit", lambda pool, *given: calls.append(given[1]) or submit(pool, *given))
    monkeypatch.setattr(forked, "MIN_TOKENS", 512)  # two processes for as few tokens as suffice here
    made = facts(run(name, processes, tmp_path))
    assert bool(calls) == (processes > 1 and STAGES[name]["stage"] == "rl"), (
        "generation is in as many processes as were asked for"
    )
    case = f"{name}-{processes}"
    pinned: dict[str, Any] = json.loads(FILE.read_text()) if FILE.is_file() else {}
    if WRITE:
        runs = pinned.get("runs", {}) | {case: made}
        FILE.write_text(json.dumps({"place": place(), "runs": {key: runs[key] for key in sorted(runs)}}, indent=1) + "\n")
        return
    check(made, pinned["runs"][case], pinned["place"] == place(), f"{case} is another run; if that is meant: {COMMAND}")


def check(made: dict[str, Any], expected: dict[str, Any], to_the_bit: bool, changed: str) -> None:
    first = next(n for n, row in enumerate(expected["shown"]) if "loss" in row)  # a row before it is that of an evaluation
    assert made["shown"][first] == pytest.approx(expected["shown"][first], rel=1e-4, abs=1e-5), changed
    if to_the_bit:
        assert made["shown"] == expected["shown"], changed
        for part in ("rollouts", "tokens", "metrics"):
            assert made[part] == expected[part], f"{part}: {changed}"
        assert made["weights"] == expected["weights"], changed


def test_on_another_machine_another_first_step_is_noticed() -> None:
    """And nothing else is: sums that are rounded otherwise, and all that follows from them."""
    for case, expected in json.loads(FILE.read_text())["runs"].items():
        for name, factor in (("grad_norm", 1.01), ("length", 1.01), ("grad_norm", 1 + 1e-6)):
            made = json.loads(json.dumps({**expected, "weights": "others", "metrics": []}))
            row = next(row for row in made["shown"] if "loss" in row)
            row[name] *= factor
            made["shown"][-1]["loss"] += 1.0
            with pytest.raises(AssertionError, match=case) if factor > 1.001 else nullcontext():
                check(made, expected, to_the_bit=False, changed=case)


def test_the_pinned_runs_are_what_they_are_for() -> None:
    """All ten steps learn something, DAPO leaves groups out and refills, and two processes write the text of one."""
    runs = json.loads(FILE.read_text())["runs"]
    assert set(runs) == {f"{name}-{processes}" for name, processes in CASES}
    for case, made in runs.items():
        assert sum(row.get("grad_norm", 0) > 0 for row in made["shown"]) == STEPS, case
    assert any(row.get("groups/zero_variance", 0) > 0 for row in runs["dapo-1"]["shown"])
    for name in (name for name, stage in STAGES.items() if stage["stage"] == "rl"):
        assert runs[f"{name}-1"]["rollouts"][0] == runs[f"{name}-2"]["rollouts"][0]
