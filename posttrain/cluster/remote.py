"""A sampler in other processes of this machine, each with a copy of the weights.

A session stays with one process, which has its cache. A process that dies or hangs is replaced: the new one gets the weights of the
same version, and the requests of the old one with the same seeds, a later turn with all ids of its session. Processes end with this
one, even where it is killed, and every wait for one of them has a limit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from posttrain.cluster.publish import Buckets, Receipt, Receipts, fill, layout, probe_prompts
from posttrain.cluster.worker import WorkerSettings
from posttrain.engine.engine import Session, check_requests
from posttrain.engine.fp8 import AS_TRAINED, E4M3, Precision
from posttrain.engine.padded import plain_backend
from posttrain.errors import UserError, require
from posttrain.models.attention import LAYOUT, Packed
from posttrain.models.lora import ADAPTER, adapter_of, has_experts
from posttrain.models.policy import Policy
from posttrain.ops.logprobs import head_logits
from posttrain.system import wire
from posttrain.system.processes import start_piped
from posttrain.types import JSON, Completion, Request, Statistics

HUNG = 1800.0  # seconds that one with work may say nothing at all
ENDING = 5.0  # seconds that one has to end by itself
CHANGING = 0.01  # seconds that a poll waits for weights that are being changed
RESTARTS = 3  # deaths in a row, without a completion between, that are taken for an accident
VLLM_PYTHON = "POSTTRAIN_VLLM_PYTHON"  # the path of a Python that has vLLM
PROGRAM = "import sys; sys.path.insert(0, sys.argv.pop(1)); from posttrain.cluster.worker import main; main()"
# environment variables of the run's processes, which a sampler's processes must not have
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def worker_settings(policy: Policy, rows: int, processes: int = 0, **more: Any) -> WorkerSettings:
    """The settings with which a worker builds the same model; `more` are further fields."""
    found = {n: adapter_of(m) for n, m in policy.model.named_modules() if hasattr(m, "lora_A")}
    lora: dict[str, JSON] | None = None
    for name, adapter in found.items():
        if adapter is None:
            cannot = "is not one that a sampler in a process can have"
            raise UserError(f"the adapter of {name} {cannot}")
        rank, targets = adapter.a_RI.shape[0], sorted({n.rsplit(".", 1)[-1] for n in found})
        lora = {"rank": rank, "alpha": adapter.scale * rank, "targets": targets}
    config = policy.model.config
    tree = json.loads(config.to_json_string(use_diff=False))
    return WorkerSettings(
        config=tree | {"architectures": [type(policy.model).__name__]},
        vocabulary=int(config.get_text_config().vocab_size),
        stop_ids=policy.stop_ids,
        dtype=str(policy.dtype).removeprefix("torch."),
        device=str(policy.device),
        rows=rows,
        processes=processes,
        threads=torch.get_num_threads(),
        lora=lora,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        source=policy.source,
        **more,
    )


def remote_sampler(
    policy: Policy,
    rows: int,
    processes: int,
    kind: str,
    count: int,
    precision: Precision = AS_TRAINED,
) -> RemoteSampler:
    """A sampler of the policy in `count` processes, which decode up to `rows` responses together: our engine in each (kind
    process), or vLLM. `processes` is how many processes each may start on a CPU; 0: all cores."""
    settings = worker_settings(policy, -(-rows // count), processes, **asdict(precision))
    if kind != "vllm":
        return RemoteSampler(policy, settings, count)
    kept = "vLLM keeps the weights of experts in another form, into which new ones cannot be put"
    require(not has_experts(policy.body), f"sampler=vllm: {kept}; use sampler=engine or process")
    return RemoteSampler(policy, replace(settings, kind="vllm"), count, vllm_python())


def vllm_python() -> str:
    """The Python interpreter that has vLLM: the one that an environment variable names, or this one."""
    named = os.environ.get(VLLM_PYTHON, "")
    if named:
        there = Path(named).is_file() and os.access(named, os.X_OK)
        require(there, f"{VLLM_PYTHON}={named} is no program; give the path of a Python with vLLM")
        look = "import importlib.util; print(importlib.util.find_spec('vllm') is not None)"
        line = [named, "-P", "-c", look]
        found = b""
        with suppress(OSError, subprocess.TimeoutExpired):  # the system cannot run it, or no Python
            found = subprocess.run(line, capture_output=True, timeout=60).stdout
        without = f"{VLLM_PYTHON}={named} is no Python that has vLLM"
        require(found == b"True\n", f"{without}; install vLLM there, or name another")
        return named
    here = importlib.util.find_spec("vllm") is not None
    advice = f"pip install 'posttrain[vllm]', or name a Python that has it in {VLLM_PYTHON}"
    require(here, f"sampler=vllm needs vLLM, which is not installed: {advice}")
    return sys.executable


@dataclass(eq=False, kw_only=True)
class WorkerProcess(wire.PipedProcess):
    """One process of the sampler."""

    number: int
    process: subprocess.Popen[bytes]
    said: IO[bytes]  # its stderr
    # by (session, turn): the number of the message that sent it, and the request
    open: dict[tuple[int, int], tuple[int, Request]] = field(default_factory=dict)
    freed: int = 0  # buckets of this publish that it has read
    receipt: Receipt | None = None
    complete: bool = False  # whether it has received all weights, including frozen ones
    last_reply: float = field(default_factory=time.monotonic)  # when it last said something

    @property
    def name(self) -> str:
        return f"the sampler's process {self.number} (pid {self.pid})"

    def exit_code(self) -> int | None:
        """The exit code of a process that has ended; None if it hangs."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(ENDING)
        return None

    def reason(self) -> str:
        """How the process ended, in its own words if it left some."""
        self.said.seek(0)
        return how_it_ended(self.exit_code(), self.said.read().decode(errors="replace"))

    def end(self) -> None:
        """End the process and close its pipes. A process that could not be replaced is ended twice."""
        self.close_pipes()
        if not self.gone:
            with suppress(subprocess.TimeoutExpired):  # it ends when its pipe is closed
                self.process.wait(ENDING)
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):  # it ends, if later
            self.process.wait(ENDING)
        self.said.close()

    def hangs(self) -> bool:
        return min(self.idle(), self.quiet()) > wire.SILENCE or self.quiet() > HUNG

    def quiet(self) -> float:
        """Seconds since its last message."""
        return time.monotonic() - self.last_reply


class RemoteSampler:
    """A `Sampler` in `count` processes of the interpreter `python`, by default this one. Requests are sent with the next `poll`, so
    that those submitted together are decoded together, as in this process."""

    def __init__(self, policy: Policy, settings: WorkerSettings, count: int = 1, python: str = ""):
        self.policy, self.settings, self.python = policy, settings, python or sys.executable
        self.merges = settings.kind == "vllm"
        if not self.merges:  # theirs are random weights at first, which do not show what is wrong
            plain_backend(policy)
        self.capacity = settings.rows * count
        self.version: int | None = None  # None: nothing was published yet
        self.sessions: dict[int, Session] = {}
        # by session that moved: the turn at which it began again
        self.first_turns: dict[int, int] = {}
        self.queued: list[Request] = []
        self.finished: wire.Finished = []
        self.probes: list[tuple[int, Completion, str]] = []  # not compared yet
        self.past = Statistics()  # statistics of ended processes
        self.deaths = 0
        one_gpu = policy.device.type == "cuda" and settings.device == str(policy.device)
        self.receipts, self.buckets = Receipts(), Buckets(device=policy.device if one_gpu else None)
        # held by a trainer that changes the weights while others poll: a new process waits for the next version
        self.changing = threading.Lock()
        self.workers: list[WorkerProcess] = []
        # from which a Python with other packages can import posttrain, and nothing else of this one's
        self.folder = tempfile.TemporaryDirectory(prefix="posttrain-")
        Path(self.folder.name, "posttrain").symlink_to(Path(__file__).parents[1])
        weakref.finalize(self, _end_all, self.workers, self.buckets)
        for number in range(count):
            self.workers.append(self._start(number))

    @property
    def statistics(self) -> Statistics:
        return sum((worker.statistics for worker in self.workers), self.past)

    def submit(self, requests: Sequence[Request]) -> None:
        check_requests(requests, self.sessions, self.policy)
        for request in requests:
            known, ids = self.sessions.get(request.session), np.array(request.ids, np.int64)
            if known is not None:
                ids = np.concatenate([known.ids, ids])
            worker = None if known is None else known.worker
            self.sessions[request.session] = Session(ids, request.turn, worker=worker)
        self.queued += requests

    def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
        if self.queued:
            if self.version is None:
                self.publish(0)
            self._send_requests()
        self.prove()
        if any(worker.open for worker in self.workers) and not self.finished:
            self._read(self.workers, wire.LOOK if timeout is None else min(timeout, wire.LOOK))
            self._replace_gone()
        while self.probes:
            self.receipts.probe(*self.probes.pop())
        found, self.finished = self.finished, []
        for request, completion in found:
            session = self.sessions[request.session]
            if request.keep:
                session.ids, session.waits = np.concatenate([session.ids, completion.ids]), False
            else:
                self._forget([request.session])
        return found

    def cancel(self, sessions: Collection[int]) -> None:
        known = [session for session in sessions if session in self.sessions]
        for worker in self.workers:
            there = [s for s in known if self.sessions[s].worker is worker]
            worker.open = {k: v for k, v in worker.open.items() if k[0] not in there}
            if there:
                self._send(worker, "cancel", there)
        self.queued = [r for r in self.queued if r.session not in known]
        self.finished = [pair for pair in self.finished if pair[0].session not in known]
        self._forget(known)

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        if weights is not None:
            own = dict(self.policy.model.named_parameters())
            with torch.no_grad():
                for name, weight in weights:
                    own[name].copy_(weight)
        self.version = version
        self._send_weights(self.workers)
        self._replace_gone()

    def release(self) -> None:
        self.prove()
        for worker in self.workers:
            self._send(worker, "release")
        self._wait(self.workers, lambda worker: worker.seen >= worker.sent)
        self._replace_gone()

    def close(self) -> None:
        _end_all(self.workers, self.buckets)
        self.sessions, self.queued, self.finished = {}, [], []

    def _forget(self, sessions: Iterable[int]) -> None:
        for session in sessions:
            del self.sessions[session]
            self.first_turns.pop(session, None)

    def _start(self, number: int) -> WorkerProcess:
        """Start a process and send its settings. It builds its sampler while this process continues."""
        environment = {k: v for k, v in os.environ.items() if k not in RANKS}
        said = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        command = [self.python, "-P", "-c", PROGRAM, self.folder.name]
        process, into, out = start_piped(
            command, environment, self.buckets.handles, stdout=said, stderr=said
        )
        worker = WorkerProcess(
            pid=process.pid, into=into, out=out, number=number, process=process, said=said
        )
        self._write(worker, (asdict(self.settings), self.buckets.describe()))
        return worker

    def _send(self, worker: WorkerProcess, *message: JSON) -> None:
        worker.sent += 1
        self._write(worker, message)

    def _write(self, worker: WorkerProcess, message: JSON) -> None:
        worker.last_reply = time.monotonic()
        worker.write(message, lambda: self._take(worker))

    def _read(self, workers: Sequence[WorkerProcess], wait: float) -> None:
        """Read what these processes wrote, and detect those that died or hang."""
        alive = [worker for worker in workers if not worker.gone]
        ready = select.select([worker.out for worker in alive], [], [], wait)[0] if alive else []
        for worker in alive:
            if worker.out in ready:
                self._take(worker)
            elif worker.open or worker.seen < worker.sent:
                worker.gone |= worker.hangs()

    def _take(self, worker: WorkerProcess) -> None:
        piece = os.read(worker.out, 1 << 20)
        worker.gone |= not piece
        worker.last_reply = time.monotonic()
        for line in wire.whole_lines(worker.received, piece):
            what, *about = wire.from_line(line)
            if what == "free":
                worker.freed += 1
            elif what == "receipt":
                worker.receipt = Receipt(*about)
            elif what == "error":
                raise UserError(f"{worker.name}: {about[0]}")
            else:
                worker.seen, counts = about[0], about[1]
                worker.statistics = Statistics(*counts)
                for key, completion in wire.decode_completions(about[2]):
                    self._completed(worker, key, completion)

    def _completed(
        self, worker: WorkerProcess, key: tuple[int, int], completion: Completion
    ) -> None:
        if key[0] < 0:
            self.probes.append((key[0], completion, worker.name))
            return
        message, request = worker.open.get(key, (worker.seen + 1, None))
        if request is None or message > worker.seen:  # it was cancelled
            return
        del worker.open[key]
        self.deaths = 0
        self.finished.append((request, completion))

    def _wait(
        self, workers: Sequence[WorkerProcess], done: Callable[[WorkerProcess], bool]
    ) -> None:
        """Wait until `done` holds for all live processes. `_read` removes those that hang."""
        while waiting := [w for w in workers if not w.gone and not done(w)]:
            self._read(waiting, wire.LOOK)

    def _wait_freed(self, workers: Sequence[WorkerProcess], count: int) -> None:
        self._wait(workers, lambda worker: worker.freed >= count)

    def _send_requests(self) -> None:
        """Send waiting requests to the processes: a session to the process that has it, a group to the one with the least work."""
        shares: dict[int, list[Request]] = {}
        chosen: dict[int, WorkerProcess] = {}  # by group
        load = {worker.number: len(worker.open) for worker in self.workers}
        for request in self.queued:
            session, first = self.sessions[request.session], 0
            worker = session.worker
            if worker is None:
                smallest = min(self.workers, key=lambda worker: load[worker.number])
                worker = chosen.get(request.group, smallest) if request.group >= 0 else smallest
                chosen[request.group], session.worker = worker, worker
                first = self.first_turns[request.session] = request.turn
            first = self.first_turns[request.session]
            given = replace(request, turn=request.turn - first)
            if request.turn and not given.turn:  # its process is gone: all ids again
                given = replace(given, ids=tuple(session.ids.tolist()), group=-1)
            worker.open[given.session, given.turn] = (worker.sent + 1, request)
            load[worker.number] += 1
            shares.setdefault(worker.number, []).append(given)
        self.queued = []
        for worker in self.workers:
            if worker.number in shares:
                self._send(worker, "submit", wire.encode_requests(shares[worker.number]))

    def _send_weights(self, workers: Sequence[WorkerProcess]) -> None:
        """Send the weights of the current version to these processes, and check their receipts."""
        every = not all(worker.complete for worker in workers)
        weights = published_weights(self.policy.model, every, self.merges)
        plan = layout(weights)
        for worker in workers:
            worker.freed, worker.receipt = 0, None
            self._send(worker, "publish", self.version, plan)
        filled = 0
        for _ in fill(weights.values(), self.buckets.memory):
            filled += 1
            for worker in workers:
                self._send(worker, "bucket")
            self._wait_freed(workers, filled - 1)  # the bucket that is filled next was read
        self._wait_freed(workers, filled)
        # all have the weights in place, and hash them while this one does
        assert self.version is not None
        dtype = E4M3 if Precision(self.settings.quantization).products else self.policy.dtype
        self.receipts.expect(self.version, weights, dtype)
        self._wait(workers, lambda worker: worker.receipt is not None)
        for worker in workers:
            if worker.receipt is not None:
                self.receipts.check(worker.receipt, worker.name)
                worker.complete = True

    def prove(self) -> None:
        """Compute the log-probs with which the probe's answers are compared, while the processes sample. Call it before changing
        the weights, if that happens before the next `poll` or `release`."""
        version, known = self.version, self.receipts.logprobs_PV
        if version is not None and version not in known:
            known[version] = probe_logprobs(self.policy, self.settings.vocabulary)

    def _replace_gone(self) -> None:
        """Start a new process for each that died, with the same weights and requests."""
        gone = any(worker.gone for worker in self.workers)
        if not gone or not self.changing.acquire(timeout=CHANGING):
            return
        try:
            self._replace_all()
        finally:
            self.changing.release()

    def _replace_all(self) -> None:
        while gone := [worker for worker in self.workers if worker.gone]:
            self.deaths += len(gone)
            # an error of its own at the start would come again; to be killed may be an accident
            again = all(w.complete or (w.exit_code() or 0) <= 0 for w in gone)
            fine = again and self.deaths <= RESTARTS
            require(fine, f"{gone[0].name} {gone[0].reason()} ({self.deaths} in a row)")
            for worker in gone:
                left = [request for _, request in worker.open.values()]
                worker.end()
                lost = Statistics(failed_workers=1, recomputed=sum(len(r.ids) for r in left))
                self.past += worker.statistics + lost
                for session in self.sessions.values():
                    if session.worker is worker:
                        session.worker = None
                self.queued = left + self.queued
                self._replace(worker)
            if self.version is not None:
                self._send_weights([worker for worker in self.workers if not worker.complete])
            self._send_requests()

    def _replace(self, worker: WorkerProcess) -> None:
        self.workers[self.workers.index(worker)] = self._start(worker.number)


def published_weights(model: Any, every: bool, merged: bool = False) -> dict[str, Tensor]:
    """The weights that a worker with the same modules needs: trained parameters, or with `every` all, and persistent buffers. Tied
    ones are sent once. `merged`: for a worker without adapters, layer weights with the adapters merged, under the model's plain
    names."""
    found = {n: p.detach() for n, p in model.named_parameters() if every or p.requires_grad}
    kept = model.state_dict(keep_vars=True)
    found |= {n: b.detach() for n, b in model.named_buffers() if n in kept}
    if not merged:
        return found
    plain = {n.replace(".base_layer.", "."): w for n, w in found.items() if ADAPTER not in n}
    for name, module in model.named_modules():
        adapter = adapter_of(module)
        if adapter is not None:
            base: Tensor = module.base_layer.weight
            added = adapter.scale * (adapter.b_OR.float() @ adapter.a_RI.float())
            plain[f"{name}.weight"] = (base.float() + added).to(base.dtype).detach()
    return plain


def probe_logprobs(policy: Policy, vocabulary: int) -> Tensor:
    """[P, V]: the log-probs, by the trainer's own forward pass, of every token after each prompt of a probe."""
    ids_P, device = torch.tensor(probe_prompts(vocabulary)[-1]), policy.device
    position_P = torch.arange(len(ids_P), device=device)
    with torch.no_grad():
        layout = {LAYOUT: Packed((0, len(ids_P)), device)}
        hidden_PH = policy.hidden(ids_P[None].to(device), position_P[None], **layout)[0]
        return head_logits(hidden_PH, policy.head).log_softmax(-1)


def how_it_ended(code: int | None, text: str) -> str:
    ended = "does not answer" if code is None else f"ended with exit code {code}"
    lines = text.strip().splitlines()
    return f"{ended}: {lines[-1][:300]}" if lines else ended


def _end_all(workers: list[WorkerProcess], buckets: Buckets) -> None:
    for worker in workers:
        worker.end()
    workers.clear()
    buckets.close()
