"""OpenEnv: the environment that its own `openenv init` writes, as a server on this machine, and what it refuses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from urllib.request import urlopen

import pytest
from environments_for_tests import needs, page_task, play

from posttrain.errors import UserError
from posttrain.tasks.openenv import OpenEnv
from posttrain.types import Score

pytestmark = pytest.mark.environments


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the template's environment, as it is written, for four sessions."""
    needs("openenv.core", "openenv")
    folder = tmp_path_factory.mktemp("openenv")
    made = [sys.executable, "-m", "openenv.cli", "init", "echo_env", "--output-dir", str(folder)]
    subprocess.run(made, check=True, capture_output=True, timeout=120)
    app = folder / "echo_env" / "server" / "app.py"
    text = app.read_text()
    assert "max_concurrent_envs=1," in text
    app.write_text(text.replace("max_concurrent_envs=1,", "max_concurrent_envs=4,"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "echo_env.server.app:app", "--port", str(port)]
    process = subprocess.Popen(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)}, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urlopen(f"{url}/health", timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, "the server has ended"
                time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_the_template_is_played_and_pays_by_length_until_the_limit_of_turns(server: str) -> None:
    task = page_task("openenv", name=f"openenv:{server}", instruction="Say much.", max_turns=3)
    assert task.ready() == ()
    groups = play(task, task.problems("train")[:2], lambda text, turn: "ab" * (turn + 1), samples=2)
    for rollout in (r for g in groups for r in g.rollouts):
        assert rollout.score.value == pytest.approx(0.1 * (2 + 4 + 6)) and rollout.score.outcome == "turn limit"
        assert rollout.counts == {"env/steps": 3.0}
        given = [s.text for s in rollout.segments if not s.sampled]
        assert given[0].startswith("Say much.\n") and given[0].endswith("environment ready!") and given[1:] == ["ab", "abab"]


def test_an_action_of_another_form_is_named_and_counted(server: str) -> None:
    task = OpenEnv(server, action="", max_turns=9, credit="turn")
    turns = ['{"message": "abcde"}', "[]", '{"text": 1}']
    (group,) = play(task, task.problems("test")[:1], lambda text, turn: turns[turn])
    (rollout,) = group.rollouts
    assert rollout.score.outcome == "invalid action" and rollout.counts == {"env/steps": 1.0, "env/invalid": 2.0}
    assert rollout.paid == pytest.approx(0.5) and "That is no action" in rollout.segments[4].text


def test_a_field_that_is_not_there_and_more_sessions_than_the_server_has_are_episodes_without_a_score(server: str) -> None:
    task = OpenEnv(server, observation="speech")
    (group,) = play(task, task.problems("test")[:1], lambda text, turn: "a")
    assert "LookupError: no field speech; it has " in str(group.rollouts[0].score.failure)
    task = OpenEnv(server, max_turns=1)
    (group,) = play(task, task.problems("test")[:1], lambda text, turn: "a", samples=6)
    scores = [r.score for r in group.rollouts]
    assert sum(s.valid for s in scores) >= 4 and all(s == Score(0.1, outcome="turn limit") for s in scores if s.valid)


def test_settings_that_cannot_work_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="url is http://HOST:PORT, not 'echo'"):
        OpenEnv("echo")
    assert not OpenEnv("http://127.0.0.1:1", seeded=False).resettable, "episodes that begin elsewhere are no group"
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(UserError, match=r"pip install 'posttrain\[openenv\]'"):
        OpenEnv("http://127.0.0.1:1").ready()


def test_no_server_is_one_line() -> None:
    needs("openenv.core", "openenv")
    with pytest.raises(UserError, match="no server answers at http://127.0.0.1:1: "):
        OpenEnv("http://127.0.0.1:1").ready()
