"""The in-process sampler: one scheduler and, on a CPU, worker processes with a scheduler each.

It samples with the policy's own parameters, so no weights are copied: `publish` only tells it that they have changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.engine import forked, fp8
from posttrain.engine.cpu import CPUBackend
from posttrain.engine.cuda import CUDABackend
from posttrain.engine.decoder import cpu_decoder
from posttrain.engine.fused import fused
from posttrain.engine.padded import plain_backend
from posttrain.engine.scheduler import Backend, Scheduler, Work
from posttrain.errors import UserError, require
from posttrain.models.layers import report_plain_path
from posttrain.models.policy import Policy
from posttrain.system.machine import check_threads
from posttrain.types import Completion, Request, Statistics

PAGED_DEVICES = {"cuda"}


@dataclass(slots=True, eq=False)
class Session:
    """The state of a session between its first request and its end."""

    ids: np.ndarray  # all ids so far, including those of the last request
    turn: int
    waits: bool = True  # whether its last request is unfinished
    worker: Any = None  # the worker process that holds its cache


def check_requests(
    requests: Sequence[Request], sessions: Mapping[int, Session], policy: Policy
) -> None:
    """Raise an error for requests that do not continue their sessions, that may need more tokens than the model has positions, or
    whose ids the model does not have."""
    longest = 0
    for request in requests:
        key, turn, session = request.session, request.turn, sessions.get(request.session)
        if request.model:
            raise UserError(f"this sampler has the policy alone, no model {request.model!r}")
        if turn and (session is None or session.waits or session.turn != turn - 1):
            raise UserError(f"turn {turn} of session {key} needs turn {turn - 1} finished and kept")
        if not turn and session is not None:
            raise UserError(f"session {key} is there already")
        before = 0 if session is None else len(session.ids)
        longest = max(longest, before + len(request.ids) + request.sampling.max_new_tokens)
    policy.check_length(longest)
    vocabulary = policy.head.weight_VH.shape[0]
    for ids in {id(r.ids): r.ids for r in requests}.values():  # a group has them once
        if min(ids, default=0) < 0 or max(ids, default=0) >= vocabulary:
            raise ValueError(
                f"a token id is outside the model's vocabulary, 0 to {vocabulary - 1:,}"
            )
    differ = len({request.session for request in requests}) == len(requests)
    require(differ, "requests submitted together must be of different sessions")


def _prefill_key(r: Request) -> object:
    """Requests with the same key are prefilled as one sequence."""
    return r.session if r.turn or r.group < 0 else (r.group, r.ids)


class Engine:
    """A `Sampler` in this process. `processes` is the number of cores to use on a CPU, 0 for all; see engine/forked.py. `bursts` is the
    number of bursts a poll decodes if nothing finishes: 1 to stream tokens by `written`, 0 for the fastest. `precision` selects what is
    computed in fp8. With `keep_caches`, responses in flight continue after `publish` on what the weights before had computed."""

    def __init__(
        self,
        policy: Policy,
        max_rows: int = 256,
        processes: int = 0,
        bursts: int = 0,
        precision: fp8.Precision = fp8.AS_TRAINED,
        keep_caches: bool = False,
    ):
        precision.check_device(policy.device)
        self.precision, self.keep_caches = precision, keep_caches
        self.policy, self.capacity, self.processes = policy, max_rows, processes or forked.CORES
        check_threads(self.processes, "processes")
        self.version, self.bursts = 0, bursts
        self.scheduler: Scheduler | None = None
        self.pool = forked.EngineWorkers()
        weakref.finalize(self, self.pool.close)
        self.memory: tuple[int, ...] = ()  # addresses of the weights that the workers share
        self.sessions: dict[int, Session] = {}
        self.numbers = count()
        self.took_over = False  # whether the scheduler has works of a failed worker

    @property
    def statistics(self) -> Statistics:
        own = Statistics() if self.scheduler is None else self.scheduler.statistics
        return own + self.pool.statistics

    def submit(self, requests: Sequence[Request]) -> None:
        check_requests(requests, self.sessions, self.policy)
        works, scheduler = self._works(requests), self._scheduler()
        if isinstance(scheduler.backend, CUDABackend):
            scheduler.backend.check_room(works)
        for work in works:
            for request in work.requests:
                worker = self.sessions[request.session].worker if request.turn else None
                self.sessions[request.session] = Session(work.ids, request.turn, worker=worker)
        here, first = list[Work](), list[Work]()
        for work in works:
            worker = self.sessions[work.session].worker
            if worker is None:
                (first if not work.requests[0].turn else here).append(work)
            else:
                worker.submit([work])
        if self._forks(first):
            for worker, share in self.pool.submit(first, self.processes, self._worker_scheduler):
                for request in (r for work in share for r in work.requests):
                    self.sessions[request.session].worker = worker
        else:
            here += first
        scheduler.submit(sorted(here, key=lambda work: work.number))

    def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
        scheduler = self.scheduler
        if scheduler is None:
            return []
        found = list[tuple[Request, Completion]]()
        if self.pool.busy:
            found = self.pool.poll(0.0 if scheduler.busy else timeout)
            if failed := self.pool.failed_works():
                self._take_over(failed)
        if scheduler.busy or scheduler.finished:
            # with one thread, as in the worker, sums round the same
            with forked.one_thread() if self.took_over else nullcontext():
                found += scheduler.poll()
            self.took_over &= scheduler.busy
        for request, completion in found:
            if request.keep:
                session = self.sessions[request.session]
                session.ids, session.waits = np.concatenate([session.ids, completion.ids]), False
            else:
                del self.sessions[request.session]
        return found

    def cancel(self, sessions: Collection[int]) -> None:
        known = {one: self.sessions.pop(one) for one in sessions if one in self.sessions}
        if known and self.scheduler is not None:
            self.pool.cancel(known)
            self.scheduler.cancel(known)

    def written(self, sessions: Collection[int]) -> dict[int, Completion]:
        """The tokens so far of those sessions that this process is decoding; `finish` is empty."""
        return {} if self.scheduler is None else self.scheduler.written(sessions)

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        if self.scheduler is not None:
            # it suspends its rows, and reads the new weights at the next poll; captured graphs stay
            self.scheduler.publish(version)
        if weights is not None:
            self.pool.pause()
            model = self.policy.model
            own = dict(model.named_parameters()) | dict(model.named_buffers())
            with torch.no_grad():
                for name, weight in weights:
                    require(name in own, f"the policy has no parameter {name!r}")
                    own[name].copy_(weight)
        self.version = version
        if self.pool.workers and self.memory != self._memory():  # workers see the old memory
            self._take_over(self.pool.close())
        self.pool.publish(version)

    def pause(self) -> None:
        """Decode nothing until the next poll or publish, because the weights are about to change. In this process nothing is decoded
        between two polls anyway."""
        self.pool.pause()

    def release(self) -> None:
        """Free the memory of caches, captured graphs and copied weights. Workers stop decoding, too; their rows are recomputed at the
        next poll."""
        self.pool.pause("release")
        if self.scheduler is not None:
            self.scheduler.release()

    def close(self) -> None:
        self.pool.close()
        self.cancel(list(self.sessions))
        self.release()

    def _works(self, requests: Sequence[Request]) -> list[Work]:
        """One work for neighbouring samples of a group, and one for each other request."""
        works: list[Work] = []
        for _, run in groupby(requests, key=_prefill_key):
            members = tuple(run)
            ids, computed = np.array(members[0].ids, np.int64), 0
            if members[0].turn:
                before = self.sessions[members[0].session].ids
                ids, computed = np.concatenate([before, ids]), max(0, len(before) - 2)
            works.append(Work(next(self.numbers), members, ids, computed))
        return works

    def _scheduler(self) -> Scheduler:
        if self.scheduler is None:
            self.scheduler = self._make_scheduler(self._backend())
            self.scheduler.backend.bursts = self.bursts or self.scheduler.backend.bursts
        return self.scheduler

    def _backend(self) -> Backend:
        if self.policy.device.type in PAGED_DEVICES:
            decoder, reason = fused(self.policy, self.precision)
            if decoder is not None:
                return CUDABackend(self.policy, decoder)
            text = f"sampler_quantization=fp8 is for models on the fast path, and this has {reason}; leave it out"
            require(not self.precision.products, text)
            report_plain_path(self.policy, "engine", reason)
        return plain_backend(self.policy)(self.policy, self.precision)

    def _forks(self, works: Sequence[Work]) -> bool:
        """Whether works go to worker processes, which share this policy's weights. If the weights have moved to other memory, as when
        adapters are added, the workers are started anew."""
        backend = self._scheduler().backend
        able = self.policy.device.type == "cpu" and isinstance(backend, CPUBackend)
        if not able or not forked.worthwhile(works, self.policy.parameters, self.processes):
            return False
        if self.memory != self._memory():
            self._take_over(self.pool.close())
            # checks the model once, before the fork, so that the workers inherit the result
            cpu_decoder(self.policy, pack=False)
            for tensor in (*self.policy.model.parameters(), *self.policy.model.buffers()):
                tensor.untyped_storage().share_memory_()
            self.memory = self._memory()
        return True

    def _memory(self) -> tuple[int, ...]:
        model = self.policy.model
        return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))

    def _worker_scheduler(self) -> Scheduler:
        """Make the scheduler of a worker; runs in the worker."""
        return self._make_scheduler(plain_backend(self.policy)(self.policy, self.precision))

    def _make_scheduler(self, backend: Backend) -> Scheduler:
        scheduler = Scheduler(self.policy, backend, self.capacity, self.keep_caches)
        scheduler.version = self.version
        return scheduler

    def _take_over(self, works: Sequence[Work]) -> None:
        """Compute the unfinished works of failed or closed workers in this process. Their sessions continue here."""
        for session in self.sessions.values():
            if session.worker is not None and session.worker not in self.pool.workers:
                session.worker = None
        self._scheduler().submit(works)
        self.took_over |= bool(works)
