"""`posttrain doctor`: ten lines, what to fix, and an exit code that says whether training can work here."""

from __future__ import annotations

import importlib.metadata
import json
import re
import tomllib
from pathlib import Path

import pytest

from posttrain import cli
from posttrain.commands import doctor
from posttrain.commands.doctor import BROKEN, NOTE, OK, Finding
from posttrain.errors import UserError
from posttrain.rewards.sandbox import isolation


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "describe", lambda: "code sandbox: tested elsewhere")


def test_it_says_ten_lines_and_that_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len([line for line in said if line.startswith((OK, NOTE, BROKEN))]) == 10
    assert "torch" in said[1] and "sandbox" in said[7]


def test_for_programs_it_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] is True and {f["state"] for f in found["findings"]} <= {OK, NOTE}
    assert set(found["findings"][0]) == {"name", "state", "text", "fix"}


def test_what_is_broken_is_said_with_its_cure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.1+cu128" if name == "torch" else real(name))
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "torch 2.9.1+cu128 is older than 2.11" in said and "  packages: pip install --upgrade posttrain" in said


def test_a_directory_that_cannot_be_written_is_broken(tmp_path: Path) -> None:
    assert doctor.writing(tmp_path).state == OK
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    assert doctor.writing(tmp_path / "nowhere").state == BROKEN


def test_a_small_disk_and_too_many_threads_are_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MIN_DISK", 1e30)
    assert doctor.disk(tmp_path).state == NOTE and "free some space" in doctor.disk(tmp_path).fix
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    assert doctor.threads().state == NOTE and "unset" in doctor.threads().fix
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert doctor.threads().state == OK


def test_no_sandbox_is_a_note_for_only_rewards_that_run_programs_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise UserError("no sandbox for code works here; install one")

    monkeypatch.setattr(isolation, "describe", none)
    found = doctor.sandbox()
    assert found.state == NOTE and "install one" in found.fix and doctor.healthy([found])
    assert not doctor.healthy([found, Finding("x", BROKEN, "")])


def test_what_is_needed_is_what_the_package_declares() -> None:
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["dependencies"]
    least = {name: version or "0" for name, version in (re.fullmatch(r"([\w-]+)(?:>=([\d.]+))?", d).groups() for d in declared)}  # type: ignore[union-attr]
    assert all(least[name] == version for name, version in doctor.NEEDED.items())
    assert {name for name, version in least.items() if version != "0"} <= set(doctor.NEEDED)
