"""A forked child: asked and answering through pipes, ended on demand, and never waited for without end."""

from __future__ import annotations

import os
import sys
import time

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
