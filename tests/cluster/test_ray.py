"""Runs on a real Ray cluster of two local nodes: the same samples as without it, and what is left when a process, a node or the driver
is killed. `make test-cluster` installs Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from children_for_tests import descendants, running

from posttrain.cluster import ray_cluster
from posttrain.runs.read import Run
from tests.faults import harness

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
RECIPE = """
name: letters
stages:
  - {{stage: rl, name: rl, model: "tiny:nano", task: {{name: "{task}", workers: {workers}}}, steps: {steps}, prompts: 4,
     algorithm: {{name: grpo, group: 4}}, sampling: {{max_new_tokens: 6}}, evaluate_every: 0, checkpoint_every: 1, rollouts_every: 1}}
"""
SAMPLERS = ["rl.sampler=process", "rl.sampler_processes=2"]
TIMED = ("time", "attempt", "seconds/", "tokens_per_second", "sampler/")
SECONDS = 400  # that a run may take here


@pytest.fixture(scope="module")
def settings() -> Iterator[None]:
    """What posttrain sets for a cluster of this machine, before Ray is imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ray_cluster.SETTINGS.items():
            patch.setenv(name, value)
        patch.setenv("RAY_health_check_period_ms", "1000")
        ray_cluster.own_token()
        pytest.importorskip("ray")
        yield


@pytest.fixture
def cluster(settings: None) -> Iterator[Any]:
    """Two nodes, with room for one process and the driver, and for two."""
    from ray.cluster_utils import Cluster

    given = {"object_store_memory": 150 << 20, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **given})
    made.add_node(num_cpus=2, object_store_memory=150 << 20, node_ip_address="127.0.0.1")
    made.wait_for_nodes(60)
    try:
        yield made
    finally:
        made.shutdown()


class Command:
    """`posttrain ...` as a process of its own."""

    def __init__(self, *words: str, **environment: str):
        command = [sys.executable, "-m", "posttrain", *words]
        more = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]), "OMP_NUM_THREADS": "1", **environment}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, env=os.environ | more, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=pipe, text=True, start_new_session=True
        )

    def end(self) -> tuple[int, str]:
        try:
            _, said = self.process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        return self.process.returncode, said


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., str]:
    def made(steps: int = 4, workers: str = "false") -> str:
        path = tmp_path / f"recipe-{steps}-{workers}.yaml"
        path.write_text(RECIPE.format(task=harness.LETTERS, steps=steps, workers=workers))
        return str(path)

    return made


def rows(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    kept = {row["step"]: row for row in lines}
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in kept.values()]


def ids(directory: Path) -> list[bytes]:
    run = Run(directory)
    found = [run.arrays("rl", step) for step in run.rollout_steps("rl")]
    return [arrays.arrays["ids"].tobytes() for arrays in found if arrays is not None]


def finished(*words: str, **environment: str) -> str:
    code, said = Command(*words, **environment).end()
    assert code == 0, said
    return said


def until(condition: Callable[[], Any], seconds: float = 240.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


def steps_of(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def processes(pattern: str) -> list[int]:
    """What this process has started, and what that has, whose command matches."""
    found = []
    for pid in descendants(os.getpid()):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if re.search(pattern, line) and running(pid):
            found.append(pid)
    return found


WORKER = r"posttrain\.cluster\.worker"


def test_samplers_on_two_nodes_give_the_run_without_a_cluster_and_one_that_is_killed_is_replaced(
    cluster: Any, recipe: Callable[..., str], tmp_path: Path
) -> None:
    """Also with a reward worker that dies. The samples are the same: seeds belong to requests."""
    plain, there, killed = (tmp_path / name for name in ("plain", "there", "killed"))
    words = ["--allow-code", "device=cpu", *SAMPLERS]
    finished("run", recipe(6, "true"), *words, f"out={plain}")
    address = f"cluster={cluster.address}"
    finished("run", recipe(6, "true"), *words, address, "cluster_spread=true", f"out={there}")
    assert rows(there) == rows(plain) and ids(there) == ids(plain)
    orders = tmp_path / "orders"
    orders.write_text("die")
    command = Command("run", recipe(6, "true"), *words, address, f"out={killed}", LETTERS_ORDERS=str(orders))
    victims = until(lambda: processes(WORKER) if steps_of(killed) >= 1 else [])
    os.kill(victims[0], signal.SIGKILL)
    code, said = command.end()
    assert code == 0, said
    assert not orders.exists(), "a reward worker has died"
    assert ids(killed) == ids(plain)
    until(lambda: not processes(WORKER))


@pytest.mark.parametrize("choice", ["shrink", "stop"])
def test_a_lost_node_leaves_the_samplers_that_have_a_place(
    choice: str, cluster: Any, recipe: Callable[..., str], tmp_path: Path
) -> None:
    words = ["run", recipe(40), "--allow-code", "device=cpu", *SAMPLERS, f"cluster={cluster.address}", "cluster_spread=true"]
    command = Command(*words, f"on_failed_node={choice}", f"out={tmp_path / 'run'}", POSTTRAIN_CLUSTER_WAIT="40")
    until(lambda: steps_of(tmp_path / "run") >= 2 or command.process.poll() is not None)
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    code, said = command.end()
    if choice == "shrink":
        assert code == 0, said
        assert len(rows(tmp_path / "run")) == 40
    else:
        assert code == 2 and "was lost" in said and "on_failed_node=shrink" in said, said
        assert said.count("posttrain: ") == 1 and "Traceback" not in said
    until(lambda: not processes(WORKER))


@pytest.mark.parametrize("choice", ["stop", "shrink"])
def test_a_group_that_loses_a_node_stops_or_goes_on_with_fewer(
    choice: str, cluster: Any, recipe: Callable[..., str], tmp_path: Path
) -> None:
    """In bounded time; a resume is exact."""
    out = tmp_path / "run"
    words = ["--allow-code", "device=cpu", "processes=2", "cluster_spread=true", f"cluster={cluster.address}"]
    command = Command("run", recipe(30), *words, f"on_failed_node={choice}", f"out={out}")
    until(lambda: steps_of(out) >= 2)
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    began = time.monotonic()
    code, said = command.end()
    if choice == "shrink":
        assert code == 0, said
        assert "1 process(es) were lost with their nodes; going on with 1 from the last checkpoint" in said
    else:
        assert code == 1 and time.monotonic() - began < 90, said
        assert (
            "process 1 of 2 was lost with its node or its actor; the others were stopped; continue with: posttrain resume"
            in said
        )
        finished("resume", str(out), "--allow-code", "processes=1", "cluster=")
    assert [row["step"] for row in rows(out)] == list(range(1, 31)) and not processes(recipe(30))


def test_a_killed_driver_leaves_nothing_behind_and_its_run_resumes_exactly(
    settings: None, recipe: Callable[..., str], tmp_path: Path
) -> None:
    """Of a cluster of this machine, whose sockets are all of the loopback interface."""
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    words = ["run", recipe(12), "--allow-code", "device=cpu", *SAMPLERS, "cluster=ray"]
    finished(*words, f"out={alone}")
    command = Command(*words, f"out={killed}")
    until(lambda: steps_of(killed) >= 2)
    started = descendants(command.process.pid)
    assert len(started) > 6, "Ray, two actors, two samplers"
    assert [address for pid in started for address in listening(pid) if not address.startswith("127.")] == []
    assert [address for pid in started for address in listening(pid)]
    command.process.kill()
    command.end()
    until(lambda: not [pid for pid in started if running(pid)], 15)
    finished("resume", str(killed), "--allow-code")
    assert rows(killed) == rows(alone) and ids(killed) == ids(alone)


def listening(pid: int) -> list[str]:
    """The addresses on which a process accepts connections."""
    try:
        links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    except OSError:
        return []
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = []
    for line in (line.split() for table in tables for line in table):
        if line[3] == "0A" and line[9] in inodes:
            raw = bytes.fromhex(line[1].split(":")[0])
            words = b"".join(raw[n : n + 4][::-1] for n in range(0, len(raw), 4))
            mapped = len(words) == 16 and words.startswith(b"\0" * 10 + b"\xff\xff")
            family = socket.AF_INET if len(words) == 4 or mapped else socket.AF_INET6
            found.append(socket.inet_ntop(family, words[12:] if mapped else words))
    return found


def test_a_port_that_says_nothing_is_refused_in_bounded_time(
    settings: None, recipe: Callable[..., str], tmp_path: Path
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"cluster=127.0.0.1:{server.getsockname()[1]}"
        words = ["run", recipe(), "--allow-code", "device=cpu", *SAMPLERS, address, f"out={tmp_path / 'run'}"]
        code, said = Command(*words, POSTTRAIN_CLUSTER_WAIT="8").end()
    assert code == 2 and "something listens there and is no cluster of Ray" in said and said.count("\n") == 1, said
    assert not (tmp_path / "run").exists()


def test_too_few_resources_are_refused_before_anything_starts(cluster: Any, recipe: Callable[..., str], tmp_path: Path) -> None:
    words = ["run", recipe(), "--allow-code", "device=cpu", f"cluster={cluster.address}", f"out={tmp_path / 'run'}"]
    for more, line in (
        (["processes=4"], "the run needs 4 CPU(s) and the 2 node(s) of the cluster have 3"),
        ([*SAMPLERS, "worker_gpus=1"], "the run needs 2 GPU(s) and the 2 node(s) of the cluster have 0"),
    ):
        code, said = Command(*words, *more).end()
        assert code == 2 and line in said and said.count("\n") == 1, said
