"""What a cluster is asked for: addresses, resources and versions, refused in one line before anything starts. No Ray is needed."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain import config, pipeline
from posttrain.cli import main
from posttrain.cluster import ray_cluster, ray_sampler
from posttrain.cluster.placement import Placement, Resources, check_address, shortage
from posttrain.errors import UserError


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["cluster=ray"], "cluster=ray: nothing of this run is on it; add processes=N, or sampler=process to an rl stage"),
        (["cluster=somewhere", "processes=2"], "cluster=somewhere is no address of a cluster: use ray, or HOST:PORT"),
        (["cluster=10.0.0.5:99999", "processes=2"], "cluster=10.0.0.5:99999 has no port of 1 to 65535"),
        (["cluster=ray://10.0.0.5:10001", "processes=2"], "a run is started on a node of its cluster"),
        (
            ["cluster=127.0.0.1:1", "processes=2"],
            "cluster=127.0.0.1:1 cannot be reached: Connection refused; look at 'ray status'",
        ),
        (["cluster=127.0.0.1:1", "rl.sampler=process"], "cluster=127.0.0.1:1 cannot be reached: Connection refused"),
        (["cluster=ray", "processes=2", "on_failed_node=wait"], "on_failed_node"),
        (["cluster=ray", "processes=2", "worker_gpus=-1"], "worker_gpus"),
        (["cluster=ray", "rl.sampler=process", "worker_cpus=0"], "worker_cpus"),
        (["worker_cpus=2"], "worker_cpus is for a cluster, and there is none; add cluster=ray, or leave it out"),
        (["worker_cpus=1", "worker_gpus=0.5"], "worker_gpus is for a cluster"),
        (["on_failed_node=shrink"], "on_failed_node is for a cluster"),
        (["cluster_spread=true"], "cluster_spread is for a cluster"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "quickstart", "device=cpu", f"out={tmp_path / 'run'}", *words]) == 2
    said, printed = capsys.readouterr()[::-1]
    without = "Ray is not installed; install posttrain[ray]" if importlib.util.find_spec("ray") is None else line
    assert (line in said or without in said) and said.count("\n") == 1 and not printed
    assert not (tmp_path / "run").exists()


def test_a_run_may_go_on_without_its_cluster() -> None:
    tree = config.to_config(config.parse("quickstart", ["cluster=ray", "processes=2", "cluster_spread=true"]))
    assert config.from_config(tree, "config.yaml").cluster_spread
    assert not config.from_config(tree, "config.yaml", {"cluster": ""}).cluster_spread
    with pytest.raises(UserError, match="cluster_spread is for a cluster"):
        config.from_config(tree, "config.yaml", {"cluster": "", "cluster_spread": True})


def test_a_file_may_not_name_a_cluster_that_nobody_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would get the user's token, and run the user's code elsewhere."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("recipe: quickstart\nprocesses: 2\ncluster: 10.0.0.5:6379\n")
    assert main(["run", str(recipe), f"out={tmp_path / 'run'}"]) == 2
    assert "10.0.0.5:6379" in capsys.readouterr().err
    recipe.write_text("recipe: quickstart\nprocesses: 2\ncluster: ray\n")
    assert config.parse(str(recipe), []).cluster == "ray"


@pytest.mark.parametrize(
    ("nodes", "asked", "line"),
    [
        ([Resources(8, 8)], [Resources(1, 1)] * 8, ""),
        ([Resources(8, 8)] * 2, [Resources(1, 1)] * 17, "the run needs 17 GPU(s) and the 2 node(s) of the cluster have 16"),
        ([Resources(2)] * 2, [Resources(1)] * 5, "the run needs 5 CPU(s) and the 2 node(s) of the cluster have 4"),
        # enough in all, and not on one node
        ([Resources(8, 1)] * 4, [Resources(1, 2)], "no node has room for a process with 1 CPU(s) and 2 GPU(s)"),
        # samplers that share the GPUs of the ranks, and do not
        ([Resources(8, 2)], [Resources(1, 0.5)] * 4, ""),
        ([Resources(8, 2)], [Resources(1, 1.0)] * 2 + [Resources(1, 0.5)], "the run needs 2.5 GPU(s)"),
        # the largest are placed first
        ([Resources(3), Resources(2)], [Resources(1), Resources(2), Resources(2)], ""),
    ],
)
def test_a_placement_that_does_not_fit_says_why(nodes: list[Resources], asked: list[Resources], line: str) -> None:
    found = shortage(nodes, asked)
    assert found.startswith(line) and bool(found) == bool(line)


def test_every_rank_has_its_samplers(tmp_path: Path) -> None:
    words = ["cluster=ray", "processes=2", "rl.sampler=process", "rl.sampler_processes=3", "worker_cpus=2", "device=cuda"]
    found = pipeline.placement(config.parse("quickstart", [*words, "worker_gpus=0.5"]))
    assert found.bundles == [Resources(1, 1)] * 2 + [Resources(2, 0.5)] * 6
    assert check_address("[::1]:6379") == ("::1", 6379)


def test_the_one_that_is_left_of_a_group_is_on_its_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config.parse("quickstart", ["cluster=10.0.0.5:6379", "processes=1"])
    with pytest.raises(UserError, match="nothing of this run is on it"):
        pipeline.placement(settings)
    monkeypatch.setenv("POSTTRAIN_STARTED", "1")
    assert pipeline.placement(settings).bundles == []


def test_the_token_of_a_user_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for _ in range(2):
        ray_cluster.own_token()
    path = tmp_path / ".ray" / "auth_token"
    assert len(path.read_text()) == 64 and stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)  # as Ray makes it
    kept = path.read_text()
    ray_cluster.own_token()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_text() == kept


class Full(Exception):
    pass


def fake_ray(**more: Any) -> Any:
    errors = SimpleNamespace(ObjectStoreFullError=Full, OutOfDiskError=Full, RayError=Full, GetTimeoutError=TimeoutError)
    return SimpleNamespace(exceptions=errors, **more)


def test_a_full_object_store_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(value: object) -> object:
        raise Full("the local object store is full")

    monkeypatch.setattr(ray_sampler, "load_ray", lambda: fake_ray(put=put))
    sampler = object.__new__(ray_sampler.RaySampler)
    memory = SimpleNamespace(cpu=lambda: SimpleNamespace(numpy=lambda: b""))
    sampler.put, sampler.buckets = (-1, None), SimpleNamespace(memory=[memory], size=64 << 20)  # type: ignore[assignment]
    with pytest.raises(UserError, match="the object store of the cluster has no room for 64 MiB of weights"):
        sampler._stored(0)


def test_a_node_with_other_versions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(asked: object, timeout: float) -> object:
        return [("10.0.0.5", {**ray_cluster.placement.versions(), "posttrain": "0.0.9"})]

    host = SimpleNamespace(about=SimpleNamespace(remote=lambda: None))
    cluster = ray_cluster.Cluster(Placement("10.0.0.4:6379"))
    with pytest.raises(UserError, match=r"node 10\.0\.0\.5 has posttrain 0\.0\.9, and this one has"):
        cluster._check(fake_ray(get=get), [host], Resources())


@pytest.mark.parametrize(("deaths", "fine"), [(2, True), (3, False)])
def test_a_place_on_a_node_that_fails_is_taken_elsewhere(deaths: int, fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def get(given: object, timeout: float) -> object:
        asked.append(given)
        if len(asked) <= deaths:
            raise Full("The actor died because its node has died.")
        return [("10.0.0.6", ray_cluster.placement.versions())]

    ray = fake_ray(get=get, available_resources=dict)
    monkeypatch.setattr(ray_cluster, "load_ray", lambda: ray)
    cluster = ray_cluster.Cluster(Placement("10.0.0.4:6379"))
    cluster.connected = True
    host = SimpleNamespace(about=SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr(cluster, "_host", lambda *given: host)
    if fine:
        assert cluster.place(Resources()) is host
    else:
        with pytest.raises(TimeoutError, match="no place for 1 process"):
            cluster.place(Resources())
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("ended", "answers", "lost"),
    [(None, True, False), (None, False, True), (ray_cluster.FAILED, False, True), (9, False, False)],
)
def test_a_process_is_lost_where_its_actor_is(
    ended: int | None, answers: bool, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs, or that is about to be ended with the others, is not."""

    def get(asked: object, timeout: float) -> object:
        return ("10.0.0.6", {}) if answers else fail()

    def fail() -> None:
        raise Full("the actor is unavailable")

    monkeypatch.setattr(ray_cluster, "load_ray", lambda: fake_ray(get=get, wait=lambda *_, timeout: ([], [])))
    remote = SimpleNamespace(remote=lambda: None)
    process = ray_cluster.NodeProcess(SimpleNamespace(about=remote, wait=remote), 1)
    process.returncode = ended
    assert ray_cluster.StartedElsewhere(1, process).gone() is lost


@pytest.mark.parametrize(
    ("cpus", "lacking"), [(8.0, ""), (1.0, "the run needs 2 CPU(s) and the 1 node(s) of the cluster have 1")]
)
def test_a_cluster_of_this_machine_is_a_new_one_with_room(cpus: float, lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that RAY_ADDRESS names, which `ray.init` would join."""
    given: dict[str, Any] = {}
    nodes = [{"Alive": True, "Resources": {"CPU": cpus}}, {"Alive": False, "Resources": {"CPU": 9.0}}]
    ray = fake_ray(init=lambda **more: given.update(more), nodes=lambda: nodes, shutdown=lambda: given.clear())
    monkeypatch.setattr(ray_cluster, "load_ray", lambda: ray)
    monkeypatch.setattr(ray_cluster, "own_token", lambda: None)
    cluster = ray_cluster.Cluster(Placement("ray", ranks=2))
    monkeypatch.setattr(cluster, "_keep", lambda: "")
    if lacking:
        with pytest.raises(UserError, match=re.escape(lacking)):
            cluster.connect()
        assert not given, "and is ended"
    else:
        cluster.connect()
        assert given["address"] == "local" and given["_node_ip_address"] == "127.0.0.1" and cluster.connected


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(UserError, match=r"Ray is not installed; install posttrain\[ray\]"):
        ray_cluster.load_ray()


def test_the_keeper_ends_what_has_its_mark_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the process that started it closes its pipe, as the kernel does when that is killed."""
    cluster = ray_cluster.Cluster(Placement("ray"))
    folder = Path(cluster._keep())
    command, clean = ["sleep", "60"], os.environ | {ray_cluster.MARK: "/tmp/posttrain-ray-of-others"}
    started = subprocess.Popen
    with (folder / "log").open("w") as log:  # as what has a title for its environment
        inside, open_file, outside = started(command), started(command, env=clean, stdout=log), started(command, env=clean)
    own = (folder / "own").open("w")  # the process itself has files there too, and goes on
    try:
        cluster.close()
        assert inside.wait(20) == open_file.wait(20) == -9 and outside.poll() is None
        assert ray_cluster.MARK not in os.environ and not folder.exists()
    finally:
        own.close()
        for process in (inside, open_file, outside):
            process.kill()
            process.wait(10)
