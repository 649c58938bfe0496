"""A sampler in other processes: the same completions, a session that stays, processes that die and are replaced."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children_for_tests import running
from families_for_tests import models
from material_for_tests import small_mixture
from torch import Tensor

from posttrain.cluster import remote as remote_module
from posttrain.cluster.publish import Receipts, fill
from posttrain.cluster.remote import VLLM_PYTHON, RemoteSampler, WorkerProcess, probe_logprobs, remote_sampler, worker_settings
from posttrain.cluster.worker import serve
from posttrain.config import Settings
from posttrain.data.text import Decoder
from posttrain.engine.engine import Engine
from posttrain.engine.fp8 import Precision
from posttrain.episodes import rollout_groups
from posttrain.errors import GuardStop, UserError
from posttrain.models.lora import Lora
from posttrain.models.policy import Policy, wrap_model
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.pipeline import start
from posttrain.recipes.base import Recipe
from posttrain.stages.base import make_sampler
from posttrain.stages.rl import RLStage
from posttrain.system.processes import end, fork
from posttrain.system.wire import Channel
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.types import Completion, Request, Sampler, Sampling
from tests.faults.harness import fingerprint

TASK = Arithmetic(level=2)
PROBLEMS = TASK.problems("train")[:4]


def make_policy(seed: int) -> Policy:
    tokenizer = character_tokenizer(str(TASK.alphabet))
    return wrap_model(tiny_model(tokenizer, "nano", seed), tokenizer, (tokenizer.eos_token_id,))


def test_a_model_that_decodes_otherwise_than_it_trains_is_refused_before_a_process_starts() -> None:
    _, policy = models("olmo")
    policy.body.layers[1].self_attn.layer_idx = 0  # both layers write one cache
    with pytest.raises(UserError, match="OlmoForCausalLM cannot be sampled token by token here"):
        remote(policy)


def remote(policy: Policy, count: int = 1) -> RemoteSampler:
    return RemoteSampler(policy, worker_settings(policy, 64, processes=1), count)


class FakeProcess:
    """A thread in the place of a process: starts in no time."""

    pid = os.getpid()

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float) -> None: ...

    def kill(self) -> None: ...


class ThreadSampler(RemoteSampler):
    """The same messages through the same pipes, to workers in threads."""

    def _start(self, number: int) -> WorkerProcess:
        theirs, into = os.pipe()
        out, ours = os.pipe()

        def live() -> None:
            with suppress(EOFError, OSError):
                serve(Channel(theirs, ours))

        threading.Thread(target=live, daemon=True).start()
        process: Any = FakeProcess()
        worker = WorkerProcess(pid=process.pid, into=into, out=out, number=number, process=process, said=BytesIO())
        self._write(worker, (asdict(self.settings), self.buckets.describe()))
        return worker


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy(0)


@pytest.fixture(scope="module")
def sampler(policy: Policy) -> Iterator[RemoteSampler]:
    made = remote(policy)
    yield made
    made.close()


@pytest.fixture
def threads(policy: Policy) -> Iterator[ThreadSampler]:
    made = ThreadSampler(policy, worker_settings(policy, 64, processes=1), 2)
    yield made
    made.close()


def finished(sampler: Sampler, count: int, seconds: float = 30.0) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    deadline = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        found |= {request.session: completion for request, completion in sampler.poll(0.1)}
    assert len(found) == count
    return found


def requests(count: int, tokens: int = 12) -> list[Request]:
    return [Request((6, 7, 8 + n % 3), 100 + n, Sampling(tokens), session=n) for n in range(count)]


@pytest.mark.parametrize("count", [1, 2])
def test_groups_are_those_of_the_engine_in_this_process(count: int, request: pytest.FixtureRequest, policy: Policy) -> None:
    """To the bit where the same rows are decoded together; the company of a row changes its last bits."""
    sampler = request.getfixturevalue("sampler" if count == 1 else "threads")
    for version in (count, count + 1):
        policy.model.load_state_dict(make_policy(version).model.state_dict())
        sampler.publish(version)
        here, there = (
            rollout_groups(TASK, one, Decoder(policy.tokenizer), PROBLEMS, 3, Sampling(6), 5, ordered=True)
            for one in (Engine(policy, 64, processes=1), sampler)
        )
        assert [g.problem.id for g in there] == [p.id for p in PROBLEMS]
        for a, b in zip((r for g in here for r in g.rollouts), (r for g in there for r in g.rollouts), strict=True):
            assert a.sample == b.sample and a.ids.tolist() == b.ids.tolist() and a.score == b.score
            own, other = a.segments[1].logprobs, b.segments[1].logprobs
            assert own is not None and other is not None
            np.testing.assert_allclose(own, other, rtol=0, atol=0 if count == 1 else 1e-5)
            assert set(b.segments[1].versions.tolist()) == {version}  # type: ignore[union-attr]
    assert all(worker.statistics.sampled for worker in sampler.workers), "every process has work"


def test_sessions_stay_and_groups_are_not_cut(threads: ThreadSampler) -> None:
    groups = [Request((6, 7 + n // 2), n, Sampling(4), session=n, group=n // 2, keep=True) for n in range(8)]
    threads.submit(groups)
    finished(threads, 8)
    there = [threads.sessions[n].worker.number for n in range(8)]
    assert there == [0, 0, 1, 1, 0, 0, 1, 1]
    threads.submit([Request((6,), n, Sampling(4), session=n, turn=1) for n in range(8)])
    assert len(finished(threads, 8)) == 8 and not threads.sessions


def test_a_process_that_is_ended_twice_closes_no_file_of_others(policy: Policy) -> None:
    """As one for which there was no new place, when its sampler is closed."""
    sampler = ThreadSampler(policy, worker_settings(policy, 64, processes=1))
    sampler.workers[0].end()
    others = os.pipe() + os.pipe()
    sampler.close()
    for handle in others:
        os.close(handle)


def test_what_is_cancelled_does_not_come_back(threads: ThreadSampler) -> None:
    threads.submit(requests(4, 400))
    first = {request.session for request, _ in threads.poll(0.0)}
    threads.cancel([1, 2])
    left = {0, 3} - first
    assert set(finished(threads, len(left))) == left and not threads.sessions
    threads.submit([Request((6,), 0, Sampling(2), session=1)])
    threads.release()
    assert finished(threads, 1)[1].ids.size


def turns(sampler: Sampler, kill: Sequence[int] = ()) -> list[dict[int, Completion]]:
    """Three turns of three sessions; before each turn in `kill`, the process with the first is killed."""
    found = []
    for turn in range(3):
        if turn in kill:
            assert isinstance(sampler, RemoteSampler)
            os.kill(sampler.sessions[0].worker.process.pid, signal.SIGKILL)
        sampler.submit([Request((6 + n, 7), 10 * turn + n, Sampling(8), n, turn, keep=True) for n in range(3)])
        found.append(finished(sampler, 3))
    sampler.cancel(range(3))
    return found


def test_turns_go_on_where_a_process_was_killed(policy: Policy, sampler: RemoteSampler) -> None:
    sampler.publish(5)
    before = sampler.statistics.failed_workers
    here, there, killed = turns(Engine(policy, processes=1)), turns(sampler), turns(sampler, kill=(2,))
    for one in (there, killed):
        for a, b in zip(here, one, strict=True):
            assert all(a[session].ids.tolist() == b[session].ids.tolist() for session in range(3))
    assert sampler.statistics.failed_workers == before + 1 and not sampler.sessions


def test_a_request_is_refused_at_once(sampler: RemoteSampler) -> None:
    with pytest.raises(UserError, match="2048 positions"):
        sampler.submit([Request((6,), 0, Sampling(5000))])
    with pytest.raises(UserError, match="needs turn 0 finished"):
        sampler.submit([Request((6,), 0, Sampling(4), session=9, turn=1)])


def test_processes_end_with_the_trainer_that_is_killed(policy: Policy) -> None:
    def live(_: int, replies: int) -> None:
        sampler = remote(policy)
        os.write(replies, b"%d" % sampler.workers[0].process.pid)
        time.sleep(60)

    child, into, out = fork(live)
    pid = int(os.read(out, 100))
    assert Path(f"/proc/{pid}").exists()
    end(child, into, out)  # by SIGKILL
    deadline = time.monotonic() + 20
    while running(pid):
        assert time.monotonic() < deadline, "the sampler's process is an orphan"
        time.sleep(0.05)


def test_a_process_that_dies_at_once_is_named_with_its_reason(policy: Policy) -> None:
    settings = worker_settings(policy, 64)
    broken = RemoteSampler(policy, settings, python="/bin/false")
    broken.submit(requests(1))
    with pytest.raises(UserError, match=r"process 0 .* ended with exit code 1 \(1 in a row\)"):
        broken.poll()
    broken.close()


def test_a_worker_in_fp8_is_held_to_its_own_tolerance(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes are of the weights as they were sent; the log-probs of the probe may differ by what fp8 rounds, and not by more."""
    settings = worker_settings(policy, 64, processes=1, **asdict(Precision("fp8")))
    made = ThreadSampler(policy, settings, 1)
    made.publish(1)
    made.submit(requests(2))
    found = finished(made, 2)
    assert made.receipts.limit == 0.3
    plain = Engine(policy, 64, processes=1)
    plain.submit(requests(2))
    for session, completion in finished(plain, 2).items():
        assert (
            completion.logprobs[0] != found[session].logprobs[0]
            and abs(completion.logprobs[0] - found[session].logprobs[0]) < 0.3
        )
    probe = remote_module.probe_logprobs
    monkeypatch.setattr(remote_module, "probe_logprobs", lambda *given: probe(*given) - 0.5)

    def again() -> None:
        made.publish(2)
        made.submit(requests(1))
        finished(made, 1)

    with pytest.raises(GuardStop, match=r"another model than the trainer's .* and at most 0\.3 is rounding"):
        again()
    made.close()


def test_weights_that_are_not_the_trainers_stop_the_run(
    policy: Policy, threads: ThreadSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults on the way to the workers, each named by the publish at which it happens."""
    sampler = threads
    name = "model.layers.1.mlp.down_proj.weight"
    weights = remote_module.published_weights

    def perturbed(given: Iterable[Tensor], memory: Sequence[Tensor]) -> Iterator[None]:
        other = (g + 1e-6 if g.shape == (96, 256) else g for g in given)
        return fill(other, memory)

    def skipping(*given: Any) -> dict[str, Tensor]:
        return {n: w for n, w in weights(*given).items() if n != name}

    with monkeypatch.context() as patch:
        patch.setattr(remote_module, "fill", perturbed)
        with pytest.raises(GuardStop, match=r"process 0 .* other weights than the trainer at version 7: .*down_proj"):
            sampler.publish(7)
    with monkeypatch.context() as patch:
        patch.setattr(remote_module, "published_weights", skipping)
        patch.setattr(
            sampler.receipts,
            "expect",
            lambda v, w, *more: Receipts.expect(sampler.receipts, v, weights(policy.model, True), *more),
        )
        with pytest.raises(GuardStop, match=rf"at version 8: {name}; resume"):
            sampler.publish(8)
    with monkeypatch.context() as patch:
        send = sampler._send
        patch.setattr(sampler, "_send", lambda w, what, *m: send(w, what, *((m[0] - 1, m[1]) if what == "publish" else m)))
        with pytest.raises(GuardStop, match="has the weights of version 8, and version 9 was published"):
            sampler.publish(9)
    sampler.publish(10)
    sampler.submit(requests(2))
    assert {int(v) for c in finished(sampler, 2).values() for v in c.versions} == {10}
    assert sampler.receipts.version == 10 and sampler.statistics.sampled > 0

    def until_stopped() -> None:
        while True:
            assert not sampler.poll(0.1), "what the wrong model sampled came back"

    monkeypatch.setattr(remote_module, "probe_logprobs", lambda *given: probe_logprobs(*given) - 0.01)
    sampler.publish(11)
    sampler.submit(requests(2))
    with pytest.raises(GuardStop, match=r"samples from another model than the trainer's at version 11: .* 0.01 on average"):
        until_stopped()


def test_the_trainer_computes_its_side_of_a_probe_while_the_sampler_works(
    threads: ThreadSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in `publish`; before a completion is given out, and before the weights may be given back."""
    calls = []
    monkeypatch.setattr(remote_module, "probe_logprobs", lambda *given: calls.append(1) or probe_logprobs(*given))
    threads.publish(1)
    assert not calls and threads.receipts.version == 1 and all(worker.receipt for worker in threads.workers)
    threads.submit(requests(2))
    first = threads.poll(0.0)
    assert len(calls) == 1
    finished(threads, 2 - len(first))
    threads.publish(2)
    assert len(calls) == 1
    threads.release()
    assert len(calls) == 2


def test_a_run_with_sampler_process_is_the_same_to_the_bit(tmp_path: Path) -> None:
    """What is trained, evaluated and sampled, in two steps with LoRA, whose adapters alone are sent."""
    found = []
    for kind in ("engine", "process"):
        stage = RLStage(
            name="rl", model="tiny:nano", task=TASK, steps=2, prompts=2, sampling=Sampling(6), evaluate_every=1,
            evaluate_problems=4, checkpoint_every=2, rollouts_every=1, lora=Lora(rank=2), sampler=kind,
        )  # fmt: skip
        settings = Settings(Recipe((stage,)), "test", threads=1, device="cpu", out=str(tmp_path / kind))
        found.append(fingerprint(start(settings)))
    assert found[0] == found[1]


def test_vllm_on_a_cluster_is_refused_and_not_replaced_by_the_engine(policy: Policy) -> None:
    somewhere: Any = object()
    with pytest.raises(UserError, match="sampler=vllm is not on a cluster yet"):
        make_sampler(policy, kind="vllm", cluster=somewhere)


def test_vllm_that_is_not_there_is_refused_before_the_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = RLStage(name="rl", model="tiny:nano", task=TASK, sampler="vllm")
    monkeypatch.delenv(VLLM_PYTHON, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"needs vLLM, which is not installed: pip install 'posttrain\[vllm\]', or name a Python"
    ):
        stage.check_ready("cpu", ())
    monkeypatch.setenv(VLLM_PYTHON, "/nowhere/python")
    with pytest.raises(UserError, match="POSTTRAIN_VLLM_PYTHON=/nowhere/python is no program"):
        stage.check_ready("cpu", ())


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"sampler_processes": 2}, "sampler_processes is for sampler=process"),
        ({"sampler": "vllm", "sampling": Sampling(4, min_new_tokens=2)}, "sampler=vllm has no min_new_tokens"),
        ({"sampler": "process", "lora": Lora(load_in_4bit=True)}, "sampler=process cannot be sent weights in 4 bits"),
        ({"sampler": "process", "router_replay": True}, "sampler=process does not send them"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(more: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        RLStage(name="rl", model="tiny:nano", task=TASK, **more)


def test_a_python_without_vllm_is_refused_before_the_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = RLStage(name="rl", model="tiny:nano", task=Arithmetic(), sampler="vllm")
    for named in ("/bin/true", sys.executable):
        monkeypatch.setenv(VLLM_PYTHON, named)
        with pytest.raises(UserError, match=f"{named} is no Python that has vLLM"):
            stage.check_ready("cpu", ())


def test_a_mixture_of_experts_is_not_sampled_by_vllm() -> None:
    with pytest.raises(UserError, match="sampler=vllm: vLLM keeps the weights of experts in another form"):
        remote_sampler(small_mixture(), 4, 1, "vllm", 1)
