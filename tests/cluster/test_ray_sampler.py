"""The sampler on a cluster, with actors that are called directly: its process, its messages and its weights are real, Ray is not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from posttrain.cluster import ray_cluster, ray_sampler
from posttrain.cluster.placement import Placement, Resources
from posttrain.cluster.ray_host import Host
from posttrain.cluster.ray_sampler import RaySampler
from posttrain.engine.engine import Engine
from posttrain.errors import UserError
from posttrain.models.policy import Policy, wrap_model
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.types import Completion, Request, Sampler, Sampling


class Gone(Exception):
    pass


class Actor:
    """`actor.method.remote(...)`, done at once."""

    def __init__(self) -> None:
        self.host = Host()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self.host, name))

    def kill(self) -> None:
        self.host.signal(signal.SIGKILL)


class Cluster:
    """Places for so many actors, and then none."""

    def __init__(self, on_failed_node: Any, room: int):
        self.settings, self.room = Placement("ray", sampler=Resources(), on_failed_node=on_failed_node), room
        self.actors: list[Actor] = []

    def place(self, resources: Resources) -> Actor:
        if len(self.actors) == self.room:
            raise TimeoutError("no place for 1 process(es)")
        self.actors.append(Actor())
        return self.actors[-1]


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = SimpleNamespace(RayError=Gone, ObjectStoreFullError=Gone, OutOfDiskError=Gone)
    fake = SimpleNamespace(
        exceptions=errors, get=lambda value, timeout: value, put=np.copy, kill=Actor.kill, is_initialized=lambda: True
    )
    monkeypatch.setattr(ray_sampler, "load_ray", lambda: fake)
    monkeypatch.setattr(ray_cluster, "load_ray", lambda: fake)
    monkeypatch.setattr(Host, "about", lambda self: ("127.0.0.1", {}))


@pytest.fixture(scope="module")
def policy() -> Policy:
    tokenizer = character_tokenizer("0123456789+=")
    return wrap_model(tiny_model(tokenizer, "nano", 0), tokenizer, (tokenizer.eos_token_id,))


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Cluster:
    return Cluster(*request.param)


@pytest.fixture
def sampler(policy: Policy, cluster: Cluster) -> Iterator[RaySampler]:
    made = RaySampler(policy, 64, 1, 2 if cluster.room < 3 else 1, cluster)  # type: ignore[arg-type]
    yield made
    made.close()


def sampled(sampler: Sampler, seed: int) -> list[list[int]]:
    requests = [Request((3, 4, 5), seed + n, Sampling(max_new_tokens=12), session=100 * seed + n) for n in range(6)]
    sampler.submit(requests)
    found: dict[int, Completion] = {}
    while len(found) < len(requests):
        found |= {request.session: completion for request, completion in sampler.poll()}
    return [found[request.session].ids.tolist() for request in requests]


@pytest.mark.parametrize("cluster", [("stop", 3)], indirect=True)
def test_samples_are_those_of_the_engine_also_after_a_process_was_killed(
    policy: Policy, cluster: Cluster, sampler: RaySampler
) -> None:
    here = Engine(policy, 64, processes=1)
    sampler.publish(1)
    assert sampled(sampler, 1) == sampled(here, 1)
    cluster.actors[0].kill()
    assert sampled(sampler, 2) == sampled(here, 2)
    assert sampler.statistics.failed_workers == 1 and len(cluster.actors) == 2


@pytest.mark.cluster
@pytest.mark.parametrize("cluster", [("shrink", 2)], indirect=True)
def test_without_room_for_a_new_process_the_others_go_on_or_the_run_ends(
    policy: Policy, cluster: Cluster, sampler: RaySampler
) -> None:
    sampler.publish(1)
    cluster.actors[0].kill()
    assert sampled(sampler, 3) == sampled(Engine(policy, 64, processes=1), 3)
    assert len(sampler.workers) == 1 and sampler.capacity == 32
    object.__setattr__(cluster.settings, "on_failed_node", "stop")
    cluster.actors[1].kill()
    with pytest.raises(UserError, match=r"was lost; no place for 1 process\(es\); resume when there is room again"):
        sampled(sampler, 4)
    assert not [a for a in cluster.actors if a.host.process is not None and os.path.exists(f"/proc/{a.host.process.pid}/fd/0")]
