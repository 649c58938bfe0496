"""The processes of a run are started and ended together: one that is lost ends the others, in bounded time and with one line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ranks_for_tests as ranks
import torch

from posttrain import pipeline
from posttrain.cli import main
from posttrain.cluster import launch as launcher
from posttrain.errors import UserError
from posttrain.system.processes import HALVED, OUT_OF_MEMORY, PEER_FAILED
from posttrain.train import processes
from tests.faults import harness

ROOT = Path(__file__).parents[2]
# A process of a run as far as its launcher knows: it says where it is, then does what it is told, by its rank.
SCRIPT = """
import os, sys, time
from posttrain.system.processes import end_with_parent
end_with_parent()
open(f"{sys.argv[1]}/pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
while len([n for n in os.listdir(sys.argv[1]) if n.startswith("pid-")]) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
exec(sys.argv[2 + int(os.environ["RANK"])])
"""
WAIT = "time.sleep(600)"
ENDED_BY_SIGINT = "import signal; signal.signal(2, signal.SIG_DFL); os.kill(os.getpid(), 2)"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "COMMAND", (sys.executable, "-c", SCRIPT))
    monkeypatch.setattr(launcher, "GRACE", 2.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def alive(folder: Path) -> list[int]:
    found = []
    for path in folder.glob("pid-*"):
        try:
            state = Path(f"/proc/{path.read_text()}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        found += [int(path.read_text())] if state not in "ZX" else []
    return found


@pytest.mark.parametrize(
    ("does", "code", "line"),
    [
        (["pass", "pass"], 0, ""),
        ([WAIT, "os.kill(os.getpid(), 9)"], 1, "posttrain: process 1 of 2 was ended by SIGKILL; the others were stopped"),
        (["os.kill(os.getpid(), 9)", WAIT], 1, "posttrain: process 0 of 2 was ended by SIGKILL; the others were stopped"),
        # who lost another process is not the cause, whichever ends first
        (
            [f"sys.exit({PEER_FAILED})", "time.sleep(0.2); os.kill(os.getpid(), 11)"],
            1,
            "posttrain: process 1 of 2 was ended by SIGSEGV",
        ),
        # nor is one that waited for another in vain
        (
            [f"sys.exit({PEER_FAILED})", WAIT],
            1,
            "posttrain: process 1 of 2 does not answer (the others wait for 1800 s",
        ),
        # where several are left, none is named alone: some of them may wait too
        (
            [f"sys.exit({PEER_FAILED})", WAIT, WAIT],
            1,
            "posttrain: one of the processes 1, 2 of 3 does not answer (the others wait for 1800 s",
        ),
        # Ctrl-C before a process can do more than end
        ([ENDED_BY_SIGINT, WAIT], 130, "posttrain: interrupted\n"),
        (["os.kill(os.getpid(), 1)", WAIT], 129, "posttrain: interrupted\n"),
        (["sys.exit(129)", "sys.exit(129)"], 129, ""),
        ([WAIT, "sys.exit('out of memory')"], 1, "out of memory\nposttrain: process 1 of 2 ended with exit code 1"),
        # the first ends in the middle, to wait for people; the others notice
        (["pass", f"time.sleep(0.2); sys.exit({PEER_FAILED})"], 0, ""),
        # a mistake that all of them find is said by the first
        (["time.sleep(0.2); sys.exit(2)", "sys.exit(2)"], 2, ""),
        # or that the first alone finds
        (["sys.exit(2)", WAIT], 2, ""),
        ([f"sys.exit({PEER_FAILED})", "sys.stderr.write('a reward was refused\\n'); sys.exit(2)"], 2, "a reward was refused\n"),
    ],
)
def test_one_that_ends_ends_the_others(
    does: list[str], code: int, line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert launcher.launch([str(tmp_path), *does], len(does), tmp_path / "run") == code
    assert time.monotonic() - began < 30
    said = capfd.readouterr().err
    assert said.startswith(line) if line else not said
    assert said.count("posttrain:") <= 1 and not alive(tmp_path)


ONCE = f"sys.exit(0 if '{HALVED}' in os.environ else {OUT_OF_MEMORY})"
ALWAYS = f"sys.exit({OUT_OF_MEMORY})"


@pytest.mark.parametrize(("second", "code"), [(ONCE, 0), (ALWAYS, 1)])
def test_out_of_memory_starts_all_again_once(second: str, code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = f"sys.exit(0 if '{HALVED}' in os.environ else {PEER_FAILED})"
    assert launcher.launch([str(tmp_path), first, second], 2, tmp_path / "run") == code
    said = capfd.readouterr().err
    assert said.startswith("posttrain: memory: process 1 of 2 ran out of memory; token_budget is halved in all")
    assert said.count("\n") == 1 + code and HALVED not in os.environ


FULL = """
import os, torch, traceback
from dataclasses import dataclass
from posttrain.algorithms.grpo import GRPO

@dataclass(frozen=True, kw_only=True)
class Full(GRPO):
    def terms(self, outputs, batch):
        seen.extend(frame.name for frame in traceback.extract_stack() if frame.name == "accumulate")
        if os.environ.get("RANK") == "1" and len(seen) == 3 and "POSTTRAIN_HALVED" not in os.environ:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().terms(outputs, batch)

seen = []
"""


@pytest.mark.cluster
def test_a_run_with_sharded_weights_that_runs_out_of_memory_goes_on_with_half_the_budget(
    real: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full.py").write_text(FULL)
    recipe = tmp_path / "recipe.yaml"
    named = RECIPE.format(task=harness.LETTERS).replace("name: grpo", f'name: "{tmp_path / "full.py"}:Full"')
    recipe.write_text(named)
    words = ["run", str(recipe), "--allow-code", "processes=2", "device=cpu", "parallel=fsdp", f"out={tmp_path / 'run'}"]
    assert main(words) == 0, capfd.readouterr().err
    assert "process 1 of 2 ran out of memory; token_budget is halved in all" in capfd.readouterr().err
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["attempt"] for line in lines} == {1, 2}, "the steps before it were kept"


class Nodes:
    """Places for the processes on this machine; the node of the second process of three dies with it."""

    address = "127.0.0.1"

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *error: object) -> None: ...

    def variables(self) -> dict[str, str]:
        return {}

    def start(self, words: Sequence[str], rank: int, environment: dict[str, str]) -> launcher.Started:
        with socket.socket() as server:
            started = launcher._start(words, rank, environment, server)
        started.gone = lambda: started.process.poll() == -9  # type: ignore[method-assign]
        return started


@pytest.mark.parametrize("shrinks", [True, False])
def test_only_processes_of_a_lost_node_are_left_out(shrinks: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The third process waits, and is ended with the others: it is not lost."""
    counts: list[int] = []

    def places(count: int) -> Nodes:
        counts.append(count)
        return Nodes()

    three = "if os.environ['WORLD_SIZE'] == '3': "
    does = [f"{three}sys.exit({PEER_FAILED})", f"{three}os.kill(os.getpid(), 9)", WAIT]
    code = launcher.launch([str(tmp_path), *does], 3, tmp_path / "run", places, shrinks)
    assert (code, counts) == ((0, [3, 2]) if shrinks else (1, [3]))
    line = "1 process(es) were lost with their nodes; going on with 2" if shrinks else "process 1 of 3 was lost with its node"
    assert capfd.readouterr().err.startswith(f"posttrain: {line}") and not alive(tmp_path)


def test_the_line_names_what_to_resume(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("")
    launcher.launch([str(tmp_path), WAIT, "os.kill(os.getpid(), 9)"], 2, tmp_path)
    assert f"continue with: posttrain resume {tmp_path}" in capfd.readouterr().err


def test_they_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    """Even where that is killed, and cannot say goodbye."""
    program = (
        f"import sys; from posttrain.cluster import launch; launch.COMMAND = (sys.executable, '-c', {SCRIPT!r}); "
        f"launch.launch([{str(tmp_path)!r}, {WAIT!r}, {WAIT!r}], 2, __import__('pathlib').Path('run'))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    deadline = time.monotonic() + 60
    while len(alive(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(alive(tmp_path)) == 2
    process.kill()
    process.wait(10)
    while alive(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(tmp_path)


def test_a_signal_is_passed_on_to_all(tmp_path: Path) -> None:
    """Ctrl-C reaches each process once: a second one would mean 'at once'."""
    catch = "import signal; signal.signal(15, lambda *_: sys.exit(130)); "
    ask = catch + "time.sleep(0.5); os.kill(os.getppid(), 15); "
    assert launcher.launch([str(tmp_path), catch + WAIT, ask + WAIT], 2, tmp_path) == 130
    assert not alive(tmp_path)


def test_how_a_process_ended_is_said_also_where_its_code_is_not_known() -> None:
    class Process:
        def __init__(self, returncode: int | None) -> None:
            self.returncode = returncode

    def words(code: int | None, fate: str = "") -> str:
        return launcher.Started(1, Process(code), fate=fate).ended()  # type: ignore[arg-type]

    assert [words(c) for c in (3, -9, None)] == ["ended with exit code 3", "was ended by SIGKILL", "did not end"]
    assert words(None, launcher.NODE_FAILED) == launcher.NODE_FAILED


def test_a_signal_while_they_are_started_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[launcher.Started] = []
    start = launcher._start

    def interrupted(*given: Any) -> launcher.Started:
        started.append(start(*given))
        os.kill(os.getpid(), signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(launcher, "_start", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            launcher.launch([str(tmp_path), "pass", "pass"], 2, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(started) == 1
    started[0].end()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rl.prompts=1"], "rl.prompts=1: 2 processes cannot share a step of 1; use processes=1 or fewer, or raise rl.prompts"),
        (["sft.batch=1"], "sft.batch=1: 2 processes cannot share a step of 1; use processes=1 or fewer, or raise sft.batch"),
        (["processes=9999"], "processes=9999 is more than 8 for each of the"),
        (["processes=0"], "processes"),
        (["parallel=tensor"], "parallel"),
        (["seeds=0,1"], "the runs of a sweep have one process each: leave out processes"),
    ],
)
def test_what_cannot_be_shared_is_refused_in_one_line(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for word in ["processes=2", "device=cpu"] if word.partition("=")[0] not in " ".join(words)]
    assert main(["run", "quickstart", f"out={tmp_path / 'run'}", *given, *words]) == 2
    said = capsys.readouterr()
    assert line in said.err and len(said.err.strip().splitlines()) == 1
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="processes=4: torch sees 2 CUDA device.*use processes=2"):
        processes.check_devices(4)


def joining(identities: list[dict[str, str]]) -> Any:
    def join() -> None:
        with processes.joined("cpu", "never", identities[processes.rank()]):
            pass

    return join


def test_processes_of_other_versions_are_refused() -> None:
    ended = ranks.start(2, joining([{"torch": "2.13.0"}, {"torch": "2.11.0"}]))
    text = "UserError: process 1 has torch 2.11.0 and process 0 has torch 2.13.0; start all processes with the same"
    assert [text in said for said in ended.raised] == [True, True], ended.raised


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1.*in use"), processes.joined("cpu", "never", {}):
            pass


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK=one in the environment is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT is not in the environment"),
    ],
)
def test_a_wrong_environment_is_named(variables: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in processes.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=line), processes.joined("cpu", "never", {}):
        pass


def test_a_program_cannot_start_itself_again(tmp_path: Path) -> None:
    from dataclasses import replace

    settings = replace(harness.settings("sft", tmp_path / "run"), processes=2)
    with pytest.raises(UserError, match="processes=2: a program cannot start itself again; start it with the command"):
        pipeline.start(settings)


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "COMMAND", (sys.executable, "-m", "posttrain"))
    monkeypatch.setattr(launcher, "GRACE", 5.0)


RECIPE = """
name: letters
stages:
  - {{stage: rl, name: rl, model: "tiny:nano", task: {{name: "{task}", workers: false}}, steps: 4, prompts: 4,
     algorithm: {{name: grpo, group: 4}}, sampling: {{max_new_tokens: 6}}, evaluate_every: 0, checkpoint_every: 1, rollouts_every: 1}}
"""


@pytest.mark.cluster
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_real_run_whose_process_is_killed_says_so_and_resumes(
    real: None, parallel: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command line: a run left alone, and one of which the process that reads the order dies in the middle of a step."""
    recipe, orders = tmp_path / "recipe.yaml", tmp_path / "orders"
    recipe.write_text(RECIPE.format(task=harness.LETTERS))
    words = ["run", str(recipe), "--allow-code", "processes=2", "device=cpu", f"parallel={parallel}"]
    assert main([*words, f"out={tmp_path / 'alone'}"]) == 0, capfd.readouterr().err
    monkeypatch.setenv("LETTERS_ORDERS", str(orders))
    orders.write_text("die")
    began = time.monotonic()
    assert main([*words, f"out={tmp_path / 'killed'}"]) == 1
    assert time.monotonic() - began < 120
    said = capfd.readouterr().err
    assert "of 2 was ended by SIGKILL; the others were stopped; continue with: posttrain resume" in said
    assert said.count("posttrain: ") == 1 and "Traceback" not in said
    left = subprocess.run(["pgrep", "-f", str(recipe)], capture_output=True, text=True, timeout=10, check=False)
    assert not [pid for pid in left.stdout.split() if int(pid) != os.getpid()]
    assert main(["resume", str(tmp_path / "killed"), "--allow-code"]) == 0, capfd.readouterr().err
    first, second = (rows(tmp_path / name) for name in ("alone", "killed"))
    assert first == second


def rows(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    kept = {row["step"]: row for row in lines}
    timed = ("time", "attempt", "seconds/", "tokens_per_second")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in kept.values()]
