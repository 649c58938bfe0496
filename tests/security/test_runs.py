"""Run directories of others: links, pipes and devices, sizes, JSON that is wrong or deep, names, and text for the terminal."""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from posttrain import cli
from posttrain.errors import UserError
from posttrain.events import Event, printable
from posttrain.runs import console, layout
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.system import files
from posttrain.train import checkpoint
from tests.test_architecture import PACKAGE, sources

# --- static ---------------------------------------------------------------------------------------------------------

# Ways to open a file that follow links and wait for pipes, and who may use them: for files of the package, of the user, of /proc,
# and of models, whose folders are checked whole.
OPENS = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "mkfifo", "fdopen"}
_OWN = """
    catalogue.py cluster/estimate.py cluster/ray_cluster.py cluster/vllm.py commands/advise.py commands/doctor.py commands/evaluate.py
    commands/harness.py commands/keys.py commands/plan.py commands/probe_answers.py commands/serve.py config.py
    data/formats.py data/records.py data/template_process.py errors.py models/bounds.py models/directory.py
    models/load_gguf.py models/save.py models/tiny.py monitor/rules.py monitor/watchdog.py rewards/_asking.py rewards/base.py
    rewards/judge.py rewards/language.py rewards/mathematics/phrases.py rewards/mathematics/words.py runs/index.py runs/lock.py
    runs/trackers.py stages/_lineage.py stages/comparisons.py
    studio/app.py studio/jobs.py studio/pages_label.py studio/report.py studio/server.py system/files.py
    system/processes.py system/workers.py tasks/reasoning_gym.py tasks/tools/search.py
"""
OWN = set(_OWN.split())
PRINTS = {
    "cli/studio.py",
    "studio/server.py",
    "api/functions.py",
    "runs/console.py",
    "events.py",
    "cli/base.py",
    "rewards/sandbox/child.py",
    "data/template_process.py",
}


NOT_FILES = ("console", "files", "self.judge", "Trackers")  # what else has methods of these names


def calls(package: Path, found: Callable[[ast.Call], bool], allowed: set[str]) -> list[str]:
    complaints = []
    for _, path, tree in sources(package):
        file = path.relative_to(package).as_posix()
        if file not in allowed and not file.startswith("rewards/sandbox"):
            nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and found(node)]
            complaints += [f"{file}:{node.lineno}: {ast.unparse(node)[:80]}" for node in nodes]
    return complaints


def reads(package: Path) -> list[str]:
    """Files that are opened by other means than those of system/files.py."""

    def opens(node: ast.Call) -> bool:
        if isinstance(node.func, ast.Attribute):
            return node.func.attr in OPENS and ast.unparse(node.func.value) not in NOT_FILES
        return ast.unparse(node.func) == "open"

    return calls(package, opens, OWN)


def prints(package: Path) -> list[str]:
    """Text that reaches the terminal by other means than `console.write_text`."""
    return calls(package, lambda node: ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write"), PRINTS)


@pytest.mark.parametrize("check", [reads, prints])
def test_there_is_one_way_to_open_a_file_of_a_run_and_one_to_print(check: Callable[[Path], list[str]]) -> None:
    assert check(PACKAGE) == []


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (reads, "from pathlib import Path\nPath('x').read_text()"),
        (reads, "open('x')"),
        (reads, "import os\nos.fdopen(3)"),
        (reads, "def f(path):\n    path.write_bytes(b'')"),
        (reads, "import gzip\ngzip.open('x')"),
        (prints, "print('x')"),
        (prints, "import sys\nsys.stdout.write('x')"),
        (prints, "import sys\nsys.stderr.write('x')"),
    ],
)
def test_the_static_checks_can_fail(check: Callable[[Path], list[str]], source: str, tmp_path: Path) -> None:
    (tmp_path / "posttrain").mkdir()
    (tmp_path / "posttrain" / "a.py").write_text(source)
    assert len(check(tmp_path / "posttrain")) == 1


# --- links, pipes and devices ------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A small run with a file of each kind."""
    directory = tmp_path / "run"
    tree = {"format": layout.FORMAT, "seed": 0, "stages": []}
    with RunWriter.create(directory, tree) as writer:
        for step in (1, 2):
            writer.metrics("rl", step, {"loss": 1.0 / step, "reward": 0.5})
        writer.summary({"name": "x", "stages": {}})
    for name, text in (
        ("stages/rl/result.json", "{}"),
        ("stages/rl/problems.jsonl", ""),
        ("rollouts/rl/step-000001.jsonl", ""),
    ):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    (directory / "checkpoints" / "rl").mkdir(parents=True)
    return directory


def to_link(path: Path) -> None:
    away = Path(os.environ["AWAY"]) / path.name
    shutil.move(path, away) if path.exists() else away.write_text("mine")
    path.symlink_to(away)


def to_inner_link(path: Path) -> None:
    inner = path.with_name(f"inner-{path.name}")
    path.rename(inner) if path.exists() else inner.write_text("")
    path.symlink_to(inner.name)


def clear(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def to_pipe(path: Path) -> None:
    clear(path)
    os.mkfifo(path)


def to_device(path: Path) -> None:
    clear(path)
    path.symlink_to("/dev/zero")


def to_socket(path: Path) -> None:
    clear(path)
    listening, here = socket.socket(socket.AF_UNIX), os.getcwd()
    os.chdir(path.parent)
    try:
        listening.bind(path.name)
    finally:
        os.chdir(here)
        listening.close()


CHANGES = (to_link, to_inner_link, to_pipe, to_device, to_socket)
PLACES = (
    "config.yaml",
    "metrics.jsonl",
    "events.jsonl",
    "summary.json",
    "lock",
    "plot.png",
    "trackers.json",
    "rollouts",
    "rollouts/rl",
    "rollouts/rl/step-000001.jsonl",
    "stages",
    "stages/rl/result.json",
    "checkpoints",
    "export",
    "alarms",
)
WAYS: dict[str, Callable[[Path], object]] = {
    "read": lambda run: Run(run).metrics(),
    "resume": lambda run: RunWriter.resume(run).close(),
    "show": lambda run: cli.main(["show", str(run)]),
    "compare": lambda run: cli.main(["compare", str(run), str(run)]),
}


# every place with one of the changes, and one of the places with every change; all of them among the slow tests
PAIRS = [(place, change) for place in PLACES for change in CHANGES]
FEW = [pair for number, pair in enumerate(PAIRS) if number % 6 == 0 or pair[0] == "events.jsonl"]


@pytest.mark.parametrize(
    ("place", "change"), [pair if pair in FEW else pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS]
)
def test_links_pipes_and_devices_are_refused_everywhere(
    place: str,
    change: Callable[[Path], None],
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "away").mkdir()
    monkeypatch.setenv("AWAY", str(tmp_path / "away"))
    change(run / place)
    before = {p: p.read_bytes() for p in (tmp_path / "away").rglob("*") if p.is_file()}
    for name, way in WAYS.items():
        began = time.monotonic()
        if name in ("show", "compare"):
            assert way(run) == 2 and "is a link, a pipe or a device" in capsys.readouterr().err
        else:
            with pytest.raises(UserError, match="is a link, a pipe or a device"):
                way(run)
        assert time.monotonic() - began < 20
    assert {p: p.read_bytes() for p in (tmp_path / "away").rglob("*") if p.is_file()} == before, "nothing went through"


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR, os.O_WRONLY | os.O_APPEND])
def test_the_one_way_to_open_a_file_refuses_them_too(
    flags: int, change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one comes after the directory was looked at."""
    (tmp_path / "away").mkdir()
    monkeypatch.setenv("AWAY", str(tmp_path / "away"))
    (tmp_path / "file").write_text("x")
    change(tmp_path / "file")
    with pytest.raises((UserError, OSError), match="file"):
        files.open_file(tmp_path / "file", flags)


def test_a_temporary_file_that_was_put_there_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / f".summary.json.{os.getpid()}.tmp").symlink_to(tmp_path / "mine")
    files.atomic_write(tmp_path / "summary.json", "{}")
    assert (tmp_path / "mine").read_text() == "mine" and (tmp_path / "summary.json").read_text() == "{}"


@pytest.mark.parametrize(
    "name", ["summary.json", "config.yaml", "metrics.jsonl", "events.jsonl", "rollouts/rl/step-000001.jsonl"]
)
def test_files_without_end_are_refused(name: str, run: Path) -> None:
    os.truncate(run / name, 1 << 40)
    ways: dict[str, Callable[[Run], object]] = {
        "summary.json": lambda run: run.summary,
        "config.yaml": lambda run: run.config,
        "metrics.jsonl": lambda run: run.metrics(),
        "events.jsonl": lambda run: run.events(),
    }
    with pytest.raises(UserError, match="is larger than"):
        ways.get(name, lambda run: run.rollouts("rl", 1))(Run(run))


# --- JSON ---------------------------------------------------------------------------------------------------------------

VALUES = {
    "deep": "[" * 100_000,
    "deep objects": '{"a":' * 100_000,
    "torn": '{"a": 1',
    "a list": "[1, 2]",
    "a number of many digits": '{"step": ' + "9" * 5000 + "}",
    "no UTF-8": b"\xff\xfe\x00",
    "not finite": '{"step": Infinity, "time": NaN, "attempt": 1e999, "stage": "rl"}',
    "nothing": "",
}
FIELDS = (
    "step",
    "stage",
    "attempt",
    "time",
    "kind",
    "config",
    "loss",
    "problem",
    "response",
    "parts",
    "reward",
    "advantage",
    "conversation",
)
WRONG = ([], {}, None, True, "x", -1, 1.5, 10**30, 10**400, "nan", [[]], {"a": {}}, "\ud800")


@pytest.mark.parametrize("name", VALUES)
def test_wrong_json_is_one_line(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = VALUES[name]
    data = value if isinstance(value, bytes) else value.encode()
    for file in ("summary.json", "stages/rl/result.json"):
        (run / file).write_bytes(data)
    for file in ("metrics.jsonl", "events.jsonl", "stages/rl/problems.jsonl", "rollouts/rl/step-000001.jsonl"):
        (run / file).write_bytes(data + b"\n" + data)
    assert Run(run).metrics() == [] and Run(run).events() == [] and Run(run).rollouts("rl", 1) == []
    if name == "not finite":
        assert Run(run).summary is not None
    else:
        with pytest.raises(UserError, match="summary.json is damaged"):
            _ = Run(run).summary
    for words in (["show", str(run)], ["compare", str(run), str(run)]):
        assert cli.main(words) in (0, 2) and "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("field", FIELDS)
def test_values_of_wrong_types_are_left_out_or_one_line(field: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row: dict[str, Any] = {
        "step": 1,
        "stage": "rl",
        "attempt": 1,
        "time": 0.0,
        "kind": "config",
        "loss": 1.0,
        "level": 1,
        "sample": 0,
    }
    row |= {"problem": "p", "question": "q", "answer": "a", "response": "r", "reward": 1.0, "parts": {"a": 1.0}, "outcome": "o"}
    row |= {"failure": None, "finish": "stop", "length": 1, "version": 0, "advantage": 0.5}
    lines = "".join(json.dumps(row | {field: value}) + "\n" for value in WRONG)
    for file in ("metrics.jsonl", "events.jsonl", "rollouts/rl/step-000001.jsonl", "stages/rl/problems.jsonl"):
        (run / file).write_text(lines)
    for read in (
        Run(run).metrics,
        Run(run).events,
        Run(run).stages,
        lambda: Run(run).rollouts("rl", 1),
        lambda: Run(run).rollout_steps("rl"),
    ):
        read()
    Run(run).column("loss")
    for words in (["show", str(run)], ["show", str(run), "--step", "1"], ["compare", str(run), str(run)]):
        assert cli.main(words) in (0, 2), words
    RunWriter.resume(run).close()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 40, (2**60).to_bytes(8, "little") + b"{}", b"\x02\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0[]"]
)
def test_wrong_arrays_are_one_line(data: bytes, run: Path) -> None:
    (run / "rollouts/rl/step-000001.safetensors").write_bytes(data)
    with pytest.raises(UserError, match="step-000001.safetensors is damaged"):
        Run(run).arrays("rl", 1)


def test_arrays_that_do_not_fit_are_one_line(run: Path) -> None:
    from safetensors.numpy import save

    for starts in (np.array([5, 1]), np.zeros((2, 2)), np.array([], dtype=np.int64), np.array([0, 99])):
        (run / "rollouts/rl/step-000001.safetensors").write_bytes(save({"starts": starts, "ids": np.arange(3)}))
        with pytest.raises(UserError, match="step-000001.safetensors is damaged"):
            Run(run).arrays("rl", 1)


def test_a_checkpoint_behind_a_link_is_damaged(run: Path, tmp_path: Path) -> None:
    folder = run / "checkpoints" / "rl" / "step-1"
    folder.mkdir()
    (tmp_path / "manifest.json").write_text("{}")
    (folder / "manifest.json").symlink_to(tmp_path / "manifest.json")
    assert "is a link" in str(checkpoint.verify(folder)) and checkpoint.verify(folder, contents=False) is not None


# --- names ---------------------------------------------------------------------------------------------------------------

NAMES = ("../../x", "..", "/tmp/x", "a\\b", "", ".hidden", "x\n", "nul\0", "x" * 300, "\u202e", "CON:")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["recipe", "run", "stage"])
def test_a_name_is_one_plain_component(place: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from posttrain import config, pipeline

    stage = {
        "stage": "evaluate",
        "name": name if place == "stage" else "e",
        "model": "tiny:nano",
        "problems": 2,
        "task": {"name": "arithmetic"},
    }
    tree = {"format": layout.FORMAT, "name": "x" if place == "stage" else name, "stages": [stage]}
    if place == "recipe":
        (tmp_path / "x.yaml").write_text(yaml.safe_dump({k: v for k, v in tree.items() if k != "format"}))
        with pytest.raises(UserError) as caught:
            config.parse(str(tmp_path / "x.yaml"), [])
    else:
        RunWriter.create(tmp_path / "run", tree).close()
        with pytest.raises(UserError) as caught:
            pipeline.resume(tmp_path / "run")
    assert "plain name" in str(caught.value) and not printable(str(caught.value)).count("\n")


# --- the terminal --------------------------------------------------------------------------------------------------------

ESCAPES = (
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\x1b]8;;http://x\x1b\\",
    "\x9b31m",
    "\r",
    "\x08",
    "\u202e",
    "\u200b",
    "\x1b[6n",
    "\x1bP+q\x1b\\",
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def hostile(run: Path) -> Path:
    """Escapes wherever a run holds text."""
    bad = "".join(ESCAPES)
    row = {
        "problem": bad,
        "level": 1,
        "question": bad,
        "answer": bad,
        "sample": 0,
        "response": bad,
        "reward": 1.0,
        "parts": {bad: 1.0},
    }
    row |= {"outcome": bad, "failure": bad, "finish": bad, "length": 1, "version": 0, "attempt": 1, "advantage": 0.5}
    (run / "rollouts/rl/step-000001.jsonl").write_text(json.dumps(row) + "\n")
    with RunWriter.resume(run) as writer:
        writer.metrics("rl", 3, {bad: 1.0, "loss": 2.0})
        writer.event("alarm", {"stage": bad, "text": bad, "rule": bad, "level": "warning"})
        bounds = [0.5, 0.4, 0.6]
        stages = {bad: {"accuracy": bounds, "pass_at": {bad: bounds}}, "rl": {"accuracy": bounds}}
        writer.summary(
            {"name": bad, "stages": stages, "before": bounds, "after": bounds, "alarms": [bad], "versions": {bad: bad}}
        )
    tree = {
        "format": layout.FORMAT,
        "seed": 0,
        "name": bad,
        "next_command": bad,
        "stages": [{"name": bad, "stage": bad}, {"name": "rl"}],
    }
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    problem = {"problem": bad, "question": bad, "answer": bad, "responses": [bad], "rewards": [1.0], "outcomes": [bad]}
    (run / "stages/rl/problems.jsonl").write_text(json.dumps(problem) + "\n")
    (run / "stages/rl/result.json").write_text(json.dumps({"accuracy": bounds, bad: bad}))
    return run


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    "words",
    [
        ["show", "RUN"],
        ["show", "RUN", "--step", "1"],
        ["compare", "RUN", "RUN"],
        ["resume", "RUN"],
        ["run", "RUN"],
        ["sample", "RUN", "x"],
        ["eval", "RUN", "--task", "\x1b[2J"],
        ["eval", "RUN"],
        ["plan", "\x1b]0;x\x07"],
        ["show", "\x1b[2J"],
    ],
)
def test_escapes_in_a_run_do_not_reach_the_terminal(
    words: list[str], terminal: bool, hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = (Terminal() if terminal else io.StringIO() for _ in range(2))
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    assert cli.main([word.replace("RUN", str(hostile)) for word in words]) in (0, 2)
    said = out.getvalue() + err.getvalue()
    assert said
    for escape in ESCAPES:
        assert escape not in said, (escape, said[:2000])


@pytest.mark.parametrize("escape", ESCAPES)
def test_nor_do_those_of_events_tables_and_errors(escape: str) -> None:
    stream = Terminal()
    bounds = (0.5, 0.4, 0.6)
    console.write_text(Event("message", f"a{escape}b", stage=escape).line() + escape, stream)
    console.show(console.final_table([console.BeforeAfter(escape, bounds, bounds)], escape), stream)
    console.show(console.side_by_side([console.Answers(escape, escape, escape, escape)]), stream)
    console.show(console.figures_table({"parts": {escape: bounds}}), stream)
    assert escape not in stream.getvalue()


# --- packed data ------------------------------------------------------------------------------------------------------------


def packed(path: Path, size: int, piece: bytes) -> None:
    import gzip

    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(size // len(piece)):
            file.write(piece)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.data import records

    monkeypatch.setattr(records, "MAX_UNPACKED", 1 << 20)
    monkeypatch.setattr(records, "MAX_LINE", 1 << 18)


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("x.jsonl.gz", b'{"prompt": "1", "completion": "2"}\n'),
        ("x.jsonl.gz", b" " * 1000),
        ("x.jsonl.gz", b"\n" * 1000),
        ("x.csv.gz", b"prompt,completion\n"),
        ("x.json.gz", b'[{"prompt": "1"},\n'),
        ("x.json.gz", b"[" * 1000),
    ],
)
def test_packed_files_are_bounded_while_they_stream(name: str, piece: bytes, tmp_path: Path, small: None) -> None:
    from posttrain.data.records import read_jsonl

    packed(tmp_path / name, 1 << 21, piece)
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        for _ in read_jsonl(tmp_path / name):
            pass
    assert time.monotonic() - began < 20 and "\n" not in str(caught.value)


@pytest.mark.parametrize("rows", [10**5, 3])
def test_a_packed_table_is_bounded_too(rows: int, tmp_path: Path, small: None) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    from posttrain.data.records import read_jsonl

    long = pa.array(["x" * (3 * 10**7 // rows)])
    table = pa.table({"prompt": pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), long)})
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(UserError, match="larger than"):
        for _ in read_jsonl(tmp_path / "x.parquet"):
            pass
