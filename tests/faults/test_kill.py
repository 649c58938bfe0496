"""A run killed with SIGKILL at any moment and resumed is the same run: losses, sampled ids, rewards and weights, bit for bit.

`make test` kills every kind of run once, the shipped quickstart among them. `make test-faults` kills over a hundred times:
at random moments, and at every single moment inside a save.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from posttrain.runs.read import Run
from tests.faults.harness import INSIDE_A_SAVE, KINDS, Fate, Life, Server, fingerprint

POINTS = [(kind, seed) for kind in KINDS for seed in range(1, 10 if kind == "quickstart" else 15)]
MOMENTS_A_SAVE = 30  # that are hooked; a test checks the number. A save that removes an older checkpoint has two more


@dataclass(frozen=True)
class Reference:
    """A run that was left alone, and how many moments it had to die at."""

    found: dict[str, Any]
    life: Life


@pytest.fixture(scope="module")
def server() -> Server:
    return Server()


@pytest.fixture(scope="module")
def reference(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    @lru_cache
    def made(kind: str) -> Reference:
        directory = tmp_path_factory.mktemp(kind) / "run"
        life = server.run(kind, directory)
        assert life.code == 0, (directory.parent / "said.txt").read_text()
        found = fingerprint(directory)
        assert found["figures"] and found["weights"] and (found["rollouts"] or kind in ("sft", "reward_model", "dpo", "lora"))
        levels = [row.figures["level"] for row in Run(directory).metrics() if "level" in row.figures]
        assert kind != "quickstart" or {1, 2} <= set(levels), f"no level opened, so nothing of it can be lost: {levels}"
        return Reference(found, life)

    return made


def assert_same(found: dict[str, Any], reference: Reference, why: str) -> None:
    for part, expected in reference.found.items():
        assert found[part] == expected, f"{part} differ after {why}"


def finish(server: Server, kind: str, directory: Path) -> None:
    life = server.run(kind, directory)
    assert life.code == 0, (directory.parent / "said.txt").read_text()
    rows = Run(directory).metrics()
    assert len({(row.stage, row.step) for row in rows}) == len(rows), "no step twice"


def kill_and_compare(server: Server, reference: Reference, kind: str, directory: Path, seed: int) -> None:
    """Die at a random moment, resume; die again with some luck; resume to the end."""
    chance = random.Random(f"{kind} {seed}")
    moments = reference.life.moments
    first = chance.randint(1, moments)
    if kind == "quickstart":  # of its ten points one in each tenth of the run; that of `make test` is after a level opened
        first = 1 + (first - 1 + (seed + 8) % 10 * moments) // 10
    assert server.run(kind, directory, Fate(first)).code == -signal.SIGKILL
    if seed % 2:
        assert server.run(kind, directory, Fate(chance.randint(1, moments))).code in (0, -signal.SIGKILL)
    if not (directory / "summary.json").exists():
        finish(server, kind, directory)
    assert_same(fingerprint(directory), reference, f"a kill (seed {seed})")


# PPO alone is more of the same: the pipeline dies in it
@pytest.mark.parametrize("kind", [kind if kind != "ppo" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_killed_and_resumed(kind: str, server: Server, reference: Callable[[str], Reference], tmp_path: Path) -> None:
    kill_and_compare(server, reference(kind), kind, tmp_path / "run", seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), POINTS)
def test_killed_at_more_points(
    kind: str, seed: int, server: Server, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    kill_and_compare(server, reference(kind), kind, tmp_path / "run", seed)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, MOMENTS_A_SAVE + 3))
def test_killed_at_every_moment_of_a_save(
    number: int, server: Server, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    """The second save of the run, so that there is a checkpoint before it: at most the steps since that one are done again."""
    whole = reference("sft")
    expected = MOMENTS_A_SAVE + (MOMENTS_A_SAVE + 2) + 4  # and the renames of the model and its export at the end
    assert whole.life.saves == expected, f"a save has other moments than this test knows: {INSIDE_A_SAVE}"
    directory = tmp_path / "run"
    assert server.run("sft", directory, Fate(MOMENTS_A_SAVE + number, inside_a_save=True)).code == -signal.SIGKILL
    finish(server, "sft", directory)
    assert_same(fingerprint(directory), whole, f"a kill at moment {number} of a save")
    (resumed,) = [event for event in Run(directory).events() if event.kind == "resume"]
    assert resumed.details["step"] >= 2
    assert [p.name for p in (directory / "checkpoints" / "sft").iterdir() if p.name.startswith(".")] == [], (
        "leftovers are swept"
    )


@pytest.mark.parametrize(("number", "by"), [(15, signal.SIGTERM), (40, signal.SIGINT)])
def test_asked_to_stop_it_saves_and_goes_on_later(
    number: int, by: int, server: Server, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    assert server.run("dpo", directory, Fate(number, by=by)).code == 130
    run = Run(directory)
    last = [event for event in run.events() if event.kind == "checkpoint"][-1]
    assert last.details["step"] == run.metrics()[-1].step, "nothing that was trained is lost"
    assert not (directory / "lock.holder").exists()
    finish(server, "dpo", directory)
    assert_same(fingerprint(directory), reference("dpo"), f"signal {by}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_run(kind: str, server: Server, reference: Callable[[str], Reference], tmp_path: Path) -> None:
    life = server.run(kind, tmp_path / "run")
    assert life == reference(kind).life
    assert_same(fingerprint(tmp_path / "run"), reference(kind), "nothing at all")
