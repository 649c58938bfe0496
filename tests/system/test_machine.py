"""Threads: what OpenMP may be told is read as it reads it, how it waits is set before torch is loaded, and too many are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from material_for_tests import small_policy

from posttrain import cli
from posttrain.commands import doctor
from posttrain.config import parse
from posttrain.engine.engine import Engine
from posttrain.errors import UserError
from posttrain.system import machine

# Says how OpenMP will wait at the moment in which torch is first looked for, and ends.
WATCH = """
import os, sys
class Watch:
    def find_spec(self, name, *rest):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
"""
WAYS = {
    "posttrain": "sys.argv = ['posttrain', 'doctor']; from posttrain.cli import main; sys.exit(main())",
    "python -m posttrain": "import runpy; sys.argv = ['posttrain', 'doctor']; runpy.run_module('posttrain', run_name='__main__')",
    "a library's user": "import posttrain.engine.engine",
}


def fresh(program: str, **environment: str) -> str:
    """What a Python process of its own prints; it must end well."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    root = str(Path(machine.__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", program], env=kept | {"PYTHONPATH": root} | environment, text=True, timeout=60,
                          capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize("way", WAYS)
def test_threads_sleep_between_operators_however_posttrain_is_started(way: str) -> None:
    assert fresh(WATCH + WAYS[way]) == "PASSIVE"
    assert fresh(WATCH + WAYS[way], OMP_WAIT_POLICY="ACTIVE") == "ACTIVE", "what the user says counts"


def test_spawned_processes_wait_in_the_same_way() -> None:
    child = "import os; print(os.environ['OMP_WAIT_POLICY'])"
    assert fresh(f"import subprocess, sys, posttrain; subprocess.run([sys.executable, '-c', {child!r}])") == "PASSIVE"


@pytest.mark.parametrize(("told", "threads"), [
    ("3", 3), ("4,2", 4), (" 4 , 2 ", 4), ("4,", 4), ("", 0), ("0", 0), ("-3", 0), ("many", 0), (",4", 0), ("2.5", 0), ("1e3", 0),
    ("٤", 0), ("9" * 5000, 0),
])  # fmt: skip
def test_omp_num_threads_is_read_as_openmp_reads_it(told: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list is one number for each level of nesting; what is no number is as if nothing were said."""
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    assert machine.requested_threads() == threads
    assert doctor.threads().state in (doctor.OK, doctor.NOTE)


def test_a_list_in_omp_num_threads_is_no_crash() -> None:
    assert fresh("from posttrain.engine import forked; print(forked.CORES)", OMP_NUM_THREADS="1,2") == "1"


def test_doctor_compares_the_first_number_with_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for told, state in ((f"{machine.cores() + 1},1", doctor.NOTE), (f"1,{machine.cores() + 1}", doctor.OK)):
        monkeypatch.setenv("OMP_NUM_THREADS", told)
        assert doctor.threads().state == state


@pytest.mark.parametrize("command", ["run", "plan"])
def test_threads_beyond_all_cores_are_refused_before_anything_starts(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([command, "quickstart", "threads=10000"]) == 2
    assert f"threads=10000 is more than 8 for each of the {machine.cores()} core" in capsys.readouterr().err
    monkeypatch.setenv("OMP_NUM_THREADS", "10000,1")
    assert cli.main([command, "quickstart"]) == 2
    assert "OMP_NUM_THREADS=10000 is more than 8 for each" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_some_more_threads_than_cores_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert parse("quickstart", [f"threads={8 * machine.cores()}"]).threads == 8 * machine.cores()
    with pytest.raises(UserError, match=f"threads={8 * machine.cores() + 1} is more than"):
        parse("quickstart", [f"threads={8 * machine.cores() + 1}"])


def test_an_engine_has_no_more_processes_than_that() -> None:
    with pytest.raises(UserError, match="processes=10000 is more than 8 for each"):
        Engine(small_policy(), processes=10_000)
