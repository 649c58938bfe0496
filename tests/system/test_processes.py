"""A forked child: asked and answering through pipes, ended on demand, and never waited for without end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from children_for_tests import no_child_left

from posttrain.system import processes as children

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux only")


def shout(questions: int, answers: int) -> None:
    while said := os.read(questions, 100):
        os.write(answers, said.upper())


def test_a_child_answers_until_it_is_ended() -> None:
    with no_child_left():
        pid, into, out = children.fork(shout)
        for word in (b"one", b"two"):
            children.write_all(into, word)
            assert os.read(out, 100) == word.upper()
        children.end(pid, into, out)


def test_an_error_ends_the_child_and_its_pipe() -> None:
    def fail(questions: int, answers: int) -> None:
        os.close(2)  # its traceback is of no interest here
        raise RuntimeError("on purpose")

    pid, into, out = children.fork(fail)
    assert os.read(out, 100) == b""
    children.end(pid, into, out)


def test_a_child_that_does_not_listen_is_given_up_at_the_deadline() -> None:
    pid, into, out = children.fork(lambda questions, answers: time.sleep(60))
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        children.write_all(into, bytes(1 << 20), began + 0.2)  # more than a pipe holds
    assert 0.2 <= time.monotonic() - began < 10
    children.end(pid, into, out)


def test_a_child_leaves_it_to_its_parent_to_stop_when_the_terminal_is_closed() -> None:
    pid, into, out = children.fork(shout)
    children.write_all(into, b"one")
    assert os.read(out, 100) == b"ONE"  # it has begun
    os.kill(pid, signal.SIGHUP)
    children.write_all(into, b"two")
    assert os.read(out, 100) == b"TWO"
    children.end(pid, into, out)


def test_after_a_hang_up_a_pipe_without_a_reader_is_no_error_and_a_file_is_written(tmp_path: Path) -> None:
    """`posttrain run ... 2> log | tee` in a terminal that is closed: tee is gone too."""

    def writes(questions: int, answers: int) -> None:
        reader, pipe = os.pipe()
        os.dup2(pipe, 1)
        os.dup2(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), 2)
        os.close(reader)
        children.Terminal().hang_up()
        os.write(1, b"nobody reads this\n")
        os.write(2, b"kept")
        os.write(answers, b"alive")

    pid, into, out = children.fork(writes)
    assert os.read(out, 100) == b"alive"
    children.end(pid, into, out)
    assert (tmp_path / "log").read_text() == "kept"


def test_what_is_written_to_a_closed_terminal_is_discarded() -> None:
    """In a child, whose output it is: an error there would end a run before its checkpoint."""

    def writes(questions: int, answers: int) -> None:
        terminal, ours = os.openpty()
        os.dup2(ours, 1)
        found = children.Terminal()
        before = found.lost()
        os.close(terminal)
        after = found.lost()
        os.write(1, b"nobody reads this\n")
        os.write(answers, f"{found.handles} {before} {after}".encode())

    pid, into, out = children.fork(writes)
    assert os.read(out, 100) in (b"[1] False True", b"[1, 2] False True")
    children.end(pid, into, out)


def test_processes_do_not_import_from_the_current_folder(tmp_path: Path) -> None:
    """As the installed program, which imports from its own folder and the packages, starts others."""
    (tmp_path / "random.py").write_text("raise SystemError('a file of the user')")
    program = (
        "import subprocess; from posttrain.cluster.launch import COMMAND; from posttrain.studio.jobs import recipe_settings; "
        "print(subprocess.call([*COMMAND, 'list', 'tools']), recipe_settings('quickstart')['name'])"
    )
    packages = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": packages},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.endswith("0 quickstart\n"), done.stderr


@pytest.mark.parametrize("here", [True, False])
def test_processes_import_from_where_this_one_does(here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/packages"] if here else ["/packages"])
    assert children._python()[1:] == (() if here else ("-P",))
