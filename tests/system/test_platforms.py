"""macOS and Windows, as far as they can be had here (see platforms_for_tests.py): imports, a small run, and refusals in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain import cli
from posttrain.runs import lock

ROOT = Path(__file__).parents[2]
SMALL = ["sft.steps=2", "sft.batch=4", "rl.steps=1", "rl.prompts=2", "rl.group=2", "before.problems=2", "after.problems=2"]
IMPORTS = """
import importlib, pkgutil, sys, posttrain
for found in pkgutil.walk_packages(posttrain.__path__, "posttrain."):
    if not found.name.endswith(("__main__", "sandbox.child", "triton_fp8", "triton_kernels", "triton_sampling", "triton_training")):
        importlib.import_module(found.name)
from posttrain import cli
sys.exit(cli.main(["run", "quickstart", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["processes=2"], "processes=2 needs Linux or macOS, or WSL on Windows; leave it out"),
        (["rl.sampler=process"], "sampler=process needs Linux or macOS, or WSL on Windows; use sampler=engine"),
    ],
)
def test_what_windows_cannot_do_is_refused_before_the_first_stage(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert cli.main(["run", "quickstart", *SMALL, *words, f"out={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert expected in error and len(error.splitlines()) == 1 and not (tmp_path / "run").exists()


def test_on_windows_nobody_is_sent_ctrl_c_to_see_whether_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signal 0 asks on Unix whether a process is there; on Windows it is Ctrl-C."""
    held = lock.Lock(tmp_path / "lock")
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    assert lock.live_owner(tmp_path / "lock") == os.getpid() and sent == [0]
    monkeypatch.setattr(lock, "sys", SimpleNamespace(platform="win32"))
    assert lock.live_owner(tmp_path / "lock") == os.getpid() and sent == [0]
    held.release()


@pytest.mark.slow
@pytest.mark.package
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_every_module_is_imported_and_a_small_run_trains(platform: str, tmp_path: Path) -> None:
    command = [sys.executable, "tests/platforms_for_tests.py", platform, "-c", IMPORTS, *SMALL, f"out={tmp_path / 'run'}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
