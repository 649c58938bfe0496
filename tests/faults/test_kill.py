"""A run killed with SIGKILL at any moment and resumed is the same run: losses, sampled ids, rewards and weights, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.harness import Server, fingerprint


@pytest.fixture(scope="module")
def server() -> Server:
    return Server()


@pytest.fixture(scope="module")
def reference(server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, int]:
    """A run that was left alone, and how many moments it had to die at."""
    directory = tmp_path_factory.mktemp("reference") / "run"
    code, moments = server.run(directory)
    assert code == 0
    return fingerprint(directory), moments


def kill_and_compare(server: Server, reference: tuple[dict, int], directory: Path, seed: int) -> None:
    """Die at a random moment, resume; die again with some luck; resume to the end."""
    expected, moments = reference
    chance = random.Random(seed)
    code, _ = server.run(directory, fatal=chance.randint(1, moments))
    assert code == -9
    if not (directory / "config.yaml").is_file():
        pytest.fail("the run died before it wrote its configuration")
    code, _ = server.run(directory, fatal=chance.randint(1, moments))
    assert code in (0, -9)
    if code == -9:
        code, _ = server.run(directory)
    assert code == 0
    found = fingerprint(directory)
    for part in expected:
        assert found[part] == expected[part], f"{part} differ after a kill (seed {seed})"


def test_same_seed_same_run(server: Server, reference: tuple[dict, int], tmp_path: Path) -> None:
    code, moments = server.run(tmp_path / "run")
    assert code == 0
    assert fingerprint(tmp_path / "run") == reference[0]
    assert moments == reference[1]


@pytest.mark.parametrize("seed", range(3))
def test_killed_and_resumed(server: Server, reference: tuple[dict, int], tmp_path: Path, seed: int) -> None:
    kill_and_compare(server, reference, tmp_path / "run", seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 13))
def test_killed_at_ten_more_points(server: Server, reference: tuple[dict, int], tmp_path: Path, seed: int) -> None:
    kill_and_compare(server, reference, tmp_path / "run", seed)
