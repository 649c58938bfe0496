"""Runs posttrain on a Ray cluster: one that starts and ends with the run on this machine, or one that is already running.

Ray provides places. An actor on a node starts one process of posttrain there, with its share of the resources, and reports how it
ended. The processes are the same as those that `processes=N` and `sampler=process` start on one machine. An actor ends with the
process that requested it. What the actor started ends with the actor, even if the actor is killed.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from posttrain.cluster import placement
from posttrain.cluster.launch import LOOPBACK, Started, launch
from posttrain.cluster.placement import LOCAL, Placement, Resources, shortage
from posttrain.cluster.ray_host import host_class, interface
from posttrain.errors import UserError, optional, require
from posttrain.system import machine
from posttrain.system.processes import PYTHON

ANSWER = float(os.environ.get("POSTTRAIN_CLUSTER_WAIT", 60))  # seconds, for a cluster or a place
# the environment variable with the address of the cluster that the parent process is connected to
ADDRESS = "POSTTRAIN_RAY"
FAILED = -1000  # as an exit code: the node or the actor of a process has failed
PLACES = 3  # places to try for one process if nodes fail
STORE = 1 << 28  # bytes of the object store of a cluster on this machine
# Environment of a cluster on this machine, set before Ray is imported: the cluster listens on the loopback interface, requires the
# token of this user, and ends what its actors have started together with them.
SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_process_group_cleanup_enabled": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
PASSED = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "POSTTRAIN_WAIT", "PYTHONPATH", "HF_HUB_OFFLINE")
# runs in another process, which is ended after ANSWER: a client waits without limit for a port that accepts and does not reply
PROBE = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='error')"
MARK = "POSTTRAIN_CLUSTER"  # environment variable of all processes of a cluster on this machine: its folder
# Ends a cluster on this machine when the process that started it ends, for any reason, and removes its folder: some of Ray's
# processes would stay for a minute. A process that has overwritten its environment with a title is found by an open file of the
# folder.
KEEPER = f"""
import os, shutil, sys, time
sys.stdin.buffer.read()
folder, spared = sys.argv[1], (int(sys.argv[2]), os.getpid())

def belongs(place):
    with open(place + "/environ", "rb") as file:
        if ("{MARK}=" + folder).encode() in file.read().split(b"\\0"):
            return True
    links = (os.readlink(place + "/fd/" + name) for name in os.listdir(place + "/fd"))
    return any(link.startswith(folder + "/") for link in links)

for _ in range(100):
    found = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and int(name) not in spared and belongs("/proc/" + name):
                os.kill(int(name), 9)
                found += 1
        except OSError:
            pass
    if not found:
        break
    time.sleep(0.05)
shutil.rmtree(folder, ignore_errors=True)
"""


def load_ray() -> Any:
    ray = optional("ray", "Ray is not installed; install posttrain[ray]")
    logging.getLogger("ray").setLevel(logging.ERROR)
    return ray


class NodeDied(UserError):
    """The node of a new process has failed."""


class Cluster(AbstractContextManager["Cluster"]):
    """The connection of this process to a cluster, made at its first use. Close it."""

    def __init__(self, settings: Placement):
        self.settings, self.connected = settings, False
        self.keeper: subprocess.Popen[bytes] | None = None
        placement.check_address(settings.address)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self.connected:
            self.connected = False
            load_ray().shutdown()
        if self.keeper is not None:
            os.environ.pop(MARK)
            self.keeper.communicate(timeout=30)
            self.keeper = None

    def connect(self) -> None:
        """Start a cluster on this machine, or join a running one if its nodes have the requested resources."""
        if self.connected:
            return
        given = os.environ.get(ADDRESS, "")
        address = given or self.settings.address
        os.environ.update({k: os.environ.get(k, v) for k, v in SETTINGS.items()})
        where: dict[str, Any] = {"address": address}
        if address == LOCAL:
            own_token()
            # CPUs are counted but not reserved: processes share the cores, as with `processes=N`
            cpus = int(sum(one.cpus for one in self.settings.bundles)) + 1
            where = {"address": "local", "num_cpus": max(machine.cores(), cpus)}
            where |= {"include_dashboard": False, "object_store_memory": STORE}
            where |= {"_node_ip_address": LOOPBACK, "_temp_dir": self._keep()}
        else:
            probe(address)
        quiet = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
        ray = load_ray()
        try:
            ray.init(**where, **quiet)
        except (RuntimeError, ValueError, OSError, ConnectionError) as error:
            raise UserError(f"cluster={address}: {one_line(error)[:300]}") from None
        self.connected = True
        found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        nodes = [Resources(one.get("CPU", 0.0), one.get("GPU", 0.0)) for one in found]
        if not given and (lacking := shortage(nodes, self.settings.bundles)):
            self.close()
            raise UserError(f"cluster={address}: {lacking}")

    def _keep(self) -> str:
        """Make everything that is started from now on end with this process. Returns the folder of its files."""
        root = tempfile.gettempdir() if len(tempfile.gettempdir()) < 20 else "/tmp"
        folder = os.environ[MARK] = tempfile.mkdtemp(prefix="posttrain-ray-", dir=root)
        none = subprocess.DEVNULL
        self.keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", KEEPER, folder, str(os.getpid())],
            env={k: v for k, v in os.environ.items() if k != MARK},
            stdin=subprocess.PIPE,
            stdout=none,
            stderr=none,
            start_new_session=True,
        )
        return folder

    def places(self, resources: Resources, count: int) -> tuple[list[Any], Any]:
        """Hosts for `count` processes with the requested resources, the first on this node, and their placement group."""
        ray = load_ray()
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.connect()
        bundle = {"CPU": resources.cpus} | ({"GPU": resources.gpus} if resources.gpus else {})
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        strategy = "SPREAD" if self.settings.spread else "PACK"
        group = placement_group(
            [bundle] * count, strategy, bundle_label_selector=[here] + [{}] * (count - 1)
        )
        require(group.wait(ANSWER), self._no_place(resources, count))
        places = [PlacementGroupSchedulingStrategy(group, number) for number in range(count)]
        found = [self._host(resources, place) for place in places]
        try:
            self._check(ray, found, resources)
        except TimeoutError as error:
            raise UserError(str(error)) from None
        return found, group

    def place(self, resources: Resources) -> Any:
        """The host of one more process; TimeoutError if there is no room."""
        self.connect()
        ray = load_ray()
        for _ in range(PLACES):
            host = self._host(resources, "SPREAD" if self.settings.spread else "DEFAULT")
            try:
                self._check(ray, [host], resources)
                return host
            except TimeoutError:
                ray.kill(host)
                raise
            except NodeDied:  # the place was on a failed node, which Ray had not noticed yet
                continue
        raise TimeoutError(self._no_place(resources, 1))

    def _host(self, resources: Resources, strategy: Any) -> Any:
        ray = load_ray()
        made = ray.remote(concurrency_groups={"in": 1, "out": 1})(host_class(ray))
        given = {"num_cpus": resources.cpus, "num_gpus": resources.gpus}
        return made.options(scheduling_strategy=strategy, max_restarts=0, **given).remote()

    def _check(self, ray: Any, hosts: Sequence[Any], resources: Resources) -> None:
        """Wait until all hosts have started, and compare their versions."""
        try:
            found = ray.get([host.about.remote() for host in hosts], timeout=ANSWER)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(self._no_place(resources, len(hosts))) from None
        except ray.exceptions.RayError as error:
            text = one_line(error)
            kind = NodeDied if "node has died" in text else UserError
            where = f"cluster={self.settings.address}"
            raise kind(f"{where}: a node cannot run posttrain: {text[-300:]}") from None
        for node, versions in found:
            placement.check_versions(placement.versions(), versions, node)

    def _no_place(self, resources: Resources, count: int) -> str:
        free = load_ray().available_resources()
        text = f"cluster={self.settings.address}: no place for {count} process(es) with {resources} within {ANSWER:g} s"
        return f"{text}; free are {free.get('CPU', 0):g} CPU(s) and {free.get('GPU', 0):g} GPU(s): others hold the rest"


def own_token() -> None:
    """Create the token that clusters of this user require, in a file that only the user can read. Ray would create one that others
    can."""
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    with suppress(FileExistsError), os.fdopen(os.open(path, flags, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    path.chmod(0o600)


def probe(address: str) -> None:
    """Refuse, in one line, a cluster that does not answer or has another version."""
    found = placement.check_address(address)
    assert found is not None
    advice = "look at 'ray status' there, or start one with 'ray start --head'"
    try:
        socket.create_connection(found, timeout=min(ANSWER, 10.0)).close()
    except OSError as error:
        reason = error.strerror or "no answer within 10 s"
        raise UserError(f"cluster={address} cannot be reached: {reason}; {advice}") from None
    load_ray()
    command = [*PYTHON, "-c", PROBE, address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER, check=False)
    except subprocess.TimeoutExpired:
        text = f"cluster={address}: something listens there and is no cluster of Ray"
        raise UserError(f"{text} that answers within {ANSWER:g} s; {advice}") from None
    said = one_line(done.stderr)[-300:]
    require(done.returncode == 0, f"cluster={address} refused this process: {said}")


def one_line(error: object) -> str:
    return " ".join(str(error).split())


class NodeProcess:
    """The launcher's view of a process on another node."""

    def __init__(self, host: Any, pid: int):
        self.host, self.pid, self.said = host, pid, ""
        self.returncode: int | Any = None
        self.result = host.wait.remote()

    def wait(self, timeout: float) -> int:
        found = self.poll(timeout)
        return -signal.SIGKILL if found is None else found

    def poll(self, seconds: float = 0) -> int | None:
        ray: Any = load_ray()
        if self.returncode is None and ray.wait([self.result], timeout=seconds)[0]:
            try:
                self.returncode, self.said = ray.get(self.result, timeout=ANSWER)
            except ray.exceptions.RayError:
                self.returncode = FAILED
        return self.returncode

    def send_signal(self, sig: int) -> None:
        self.host.signal.remote(sig)


class StartedElsewhere(Started):
    """A process of the run on another node."""

    process: NodeProcess

    def text(self) -> str:
        return self.process.said

    def gone(self) -> bool:
        """Whether the process was lost with its node: the actor of a running process answers as long as its node does."""
        ray, process = load_ray(), self.process
        with suppress(ray.exceptions.RayError):
            alive = process.poll() is None and ray.get(process.host.about.remote(), timeout=ANSWER)
            return not alive and process.returncode == FAILED
        return True

    def end(self) -> None:
        load_ray().kill(self.process.host)


class Ranks(AbstractContextManager["Ranks"]):
    """Places for the processes of a run. The first is on this machine, which the others reach at `address`; Ray chooses the
    others."""

    def __init__(self, cluster: Cluster, count: int):
        self.cluster = cluster
        self.hosts, self.group = cluster.places(cluster.settings.rank, count)
        ray = load_ray()
        self.address = str(ray.util.get_node_ip_address())
        self.shared = {ADDRESS: str(ray.get_runtime_context().gcs_address)}
        self.shared |= {name: os.environ[name] for name in PASSED if name in os.environ}

    def variables(self) -> dict[str, str]:
        """Environment variables of the first process, in addition to those of all."""
        gpus = load_ray().get(self.hosts[0].visible.remote(), timeout=ANSWER)
        visible = {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        return interface(self.address) | self.shared | visible

    def start(self, words: Sequence[str], rank: int, environment: dict[str, str]) -> Started:
        ray, host = load_ray(), self.hosts[rank]
        started = host.run.remote(list(words), environment | self.shared, os.getcwd())
        try:
            pid = ray.get(started, timeout=ANSWER)
        except ray.exceptions.RayTaskError as error:
            raise UserError(str(error.cause)) from None
        except ray.exceptions.RayError as error:
            text = f"process {rank} could not be started on its node: {one_line(error)[:200]}"
            raise UserError(text) from None
        return StartedElsewhere(rank, NodeProcess(host, pid))

    def __exit__(self, *error: object) -> None:
        from ray.util.placement_group import remove_placement_group

        for host in self.hosts:
            load_ray().kill(host)
        remove_placement_group(self.group)


def launch_ranks(words: Sequence[str], settings: Placement, directory: Path) -> int:
    """Run `posttrain WORDS` as several processes on the nodes of a cluster. Returns the exit code."""
    shrinks = settings.on_failed_node == "shrink"
    with Cluster(settings) as cluster:
        return launch(words, settings.ranks, directory, lambda n: Ranks(cluster, n), shrinks)
