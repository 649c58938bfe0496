"""Worker processes for isolated tasks: a reward that is slow, hangs, crashes or leaks costs only its own time limit. An episode of an
isolated task also has its own process, which requests the turns that it samples.

One pool serves a whole run. Its fork server starts before CUDA is initialised and before threads. It inherits the tasks of the run as
they are, including a user's own objects; workers are forked from it. They receive problems and responses and return scores, as JSON
lines. A worker whose score does not come in time is killed and replaced, and the response gets a named failure. This is not the
policy's fault, so the response is masked and counted, and never gets a 0. A UserError or GuardStop of the reward ends the run.
Workers end with the fork server, and the fork server ends with this process, even on SIGKILL. On platforms without fork, rewards are
computed in this process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import select
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields
from functools import cache
from time import monotonic
from typing import BinaryIO, Protocol

from posttrain.errors import STOPS, UserError, require
from posttrain.system import machine, processes, wire
from posttrain.system.wire import from_line, to_line
from posttrain.types import JSON, Problem, Score

IDLE = 128  # idle workers to keep: forking one takes longer than a short episode
RETRIES = 1  # a score whose worker died is tried once more
START_SECONDS = 60.0  # to start a worker
IMPORT_SECONDS = 300.0  # to import a user's file, which may load a model
END_SECONDS = 10.0  # for the fork server to end its workers
DIED = "the process that starts reward workers died; resume the run"


# sends a message from an episode in a worker process to the parent, and returns the reply
Exchange = Callable[[JSON], JSON]


class Task(Protocol):
    """The part of a task that a pool uses; see tasks/base.py."""

    @property
    def isolated(self) -> bool: ...

    @property
    def seconds(self) -> float: ...

    def ready(self) -> tuple[str, ...]: ...

    async def scored(self, problem: Problem, response: str) -> Score: ...

    async def run_remotely(self, problem: Problem, exchange: Exchange) -> JSON: ...


class EpisodeTimeout(Exception):
    """An episode in a worker process exceeded its time limit."""


class WorkerDied(Exception):
    """The process of an episode has ended."""


@cache
def stacks() -> BinaryIO:
    """The file to which workers write the stacks of their threads on SIGUSR1; monitor/watchdog.py reads it."""
    return tempfile.TemporaryFile(buffering=0)


@dataclass(slots=True, eq=False)
class _Job:
    """A response that waits for a score or is being scored, or a message to an episode whose reply is awaited."""

    line: bytes
    seconds: float
    reply: asyncio.Future[JSON]
    attempts: int = 0
    episode: bool = False


@dataclass(eq=False, kw_only=True)
class _Worker(wire.PipedProcess):
    """A process that scores one response, or runs one episode, at a time."""

    job: _Job | None = None
    held: bool = False  # used by an episode
    timer: asyncio.TimerHandle | None = None
    importing: bool = False  # a user's file


class WorkerPool(AbstractContextManager["WorkerPool"]):
    """Scores responses to problems of `tasks` in up to `count` processes. Close it, or use it as a context manager.

    A call of `score` belongs to a running event loop; the pool belongs to none, and outlives the loop of a step.
    """

    def __init__(self, tasks: Iterable[Task] = (), count: int = 0):
        self.tasks = list({id(task): task for task in tasks if task.isolated}.values())
        self.count = count or machine.cores()
        self.workers: list[_Worker] = []
        self._waiting: deque[_Job] = deque()
        self._encoded: tuple[Problem, list[JSON]] | None = None  # the last problem, encoded
        self._server: _ForkServer | None = None
        for task in self.tasks:
            task.ready()  # what scoring needs is made once, and all workers inherit it
        if self.tasks and sys.platform == "linux":
            self._server = _ForkServer(self.tasks)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers and the processes that they started, then the fork server."""
        for worker in [*self.workers]:
            self._end(worker)
        if self._server is not None:
            self._server.close()
            self._server = None

    async def score(self, task: Task, problem: Problem, response: str) -> Score:
        """The score of one response, or a named failure after `task.seconds`."""
        if self._server is None:
            return await task.scored(problem, response)
        line = to_line([self._number(task), *self._fields(problem), response])
        job = _Job(line, task.seconds, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._assign()
        try:
            found = await job.reply
        finally:
            if not job.reply.done() or job.reply.cancelled():  # the step was cancelled
                self._abandon(job)
        return found if isinstance(found, Score) else Score(*found)

    async def converse(
        self, task: Task, problem: Problem, answer: Callable[[JSON], Awaitable[JSON]]
    ) -> JSON:
        """Run an episode in its own process. `answer` replies to its messages while it waits. Returns the episode's result. The
        episode is ended if it takes longer than `task.seconds` from one message to the next."""
        worker = self._free()
        worker.held = True
        line = to_line([-1 - self._number(task), *self._fields(problem)])
        try:
            while True:
                reply = asyncio.get_running_loop().create_future()
                job = _Job(line, task.seconds, reply, RETRIES, True)
                self._give(worker, job)
                found = await job.reply
                if "done" in found:
                    worker.held = False
                    return found["done"]
                line = to_line(await answer(found["ask"]))
        finally:
            idle = sum(w.job is None and not w.held for w in self.workers)
            if worker in self.workers and (worker.held or idle > IDLE):
                if worker.job is not None:
                    self._release(worker)
                self._end(worker)

    @property
    def runs_episodes(self) -> bool:
        """Whether there are processes for episodes. Otherwise they run in this process."""
        return self._server is not None

    def _number(self, task: Task) -> int:
        same = [n for n, known in enumerate(self.tasks) if known is task]
        same = same or [n for n, known in enumerate(self.tasks) if known == task]
        require(same, f"the worker processes were started without the task {task}")
        return same[0]

    def _fields(self, problem: Problem) -> list[JSON]:
        """A problem as JSON; an error if a worker would receive a different one."""
        if self._encoded is None or self._encoded[0] is not problem:
            tree = {f.name: getattr(problem, f.name) for f in fields(problem)}
            changed = wire.changed_by_json(tree)
            if type(problem) is not Problem:
                changed = f"it is a {type(problem).__qualname__}"
            text = f"problem {problem.id}: {changed}, which JSON cannot carry to a worker process as it is"
            advice = "use text, numbers, lists and dictionaries with text as keys, or a task that is not isolated"
            require(not changed, f"{text}; {advice}")
            self._encoded = problem, list(tree.values())
        return self._encoded[1]

    def _assign(self) -> None:
        """Assign waiting jobs to free workers, of which there are at most `count`, not counting those of episodes."""
        while self._waiting:
            if sum(w.job is not None and not w.held for w in self.workers) >= self.count:
                return
            self._give(self._free(), self._waiting.popleft())

    def _free(self) -> _Worker:
        return next((w for w in self.workers if w.job is None and not w.held), None) or self._fork()

    def _fork(self) -> _Worker:
        assert self._server is not None
        self.workers.append(self._server.fork())
        return self.workers[-1]

    def _give(self, worker: _Worker, job: _Job) -> None:
        loop = asyncio.get_running_loop()
        worker.job = job
        job.attempts += 1
        loop.add_reader(worker.out, self._read, worker)
        self._time(worker)
        try:
            processes.write_all(worker.into, job.line, monotonic() + job.seconds)
        except OSError:  # the worker died while idle, or was stopped
            self._died(worker)

    def _read(self, worker: _Worker) -> None:
        piece = os.read(worker.out, 1 << 16)
        if not piece:
            self._died(worker)
            return
        for found in map(from_line, wire.whole_lines(worker.received, piece)):
            if isinstance(found, bool):
                worker.importing = found
                self._time(worker)
                continue
            job = self._release(worker)
            if not job.reply.done():
                if isinstance(found, dict) and "stop" in found:
                    job.reply.set_exception(STOPS[found["stop"]](found["text"]))
                else:
                    job.reply.set_result(found)
            self._assign()

    def _time(self, worker: _Worker) -> None:
        """Start the time limit of a worker's job, or of an import."""
        assert worker.job is not None
        if worker.timer is not None:
            worker.timer.cancel()
        seconds = IMPORT_SECONDS if worker.importing else worker.job.seconds
        worker.timer = asyncio.get_running_loop().call_later(seconds, self._timeout, worker)

    def _timeout(self, worker: _Worker) -> None:
        """Handle the end of a score's time limit, unless a message came while this process was busy."""
        ended = worker.timer
        if select.select([worker.out], [], [], 0)[0]:
            self._read(worker)
        if worker.job is not None and worker.timer is ended:
            job = self._release(worker)
            self._end(worker)
            late = "the episode did not go on" if job.episode else "no score"
            late = f"{late} within {job.seconds:g} s"
            if worker.importing:
                late = f"the import of a file took more than {IMPORT_SECONDS:g} s"
            self._fail(job, f"timeout: {late}", EpisodeTimeout(late) if job.episode else None)

    def _died(self, worker: _Worker) -> None:
        job = self._release(worker)
        self._end(worker)
        if job.attempts <= RETRIES:
            self._waiting.appendleft(job)
            self._assign()
        else:
            fate = WorkerDied("the process of the episode died") if job.episode else None
            self._fail(job, "the process that computed the reward died", fate)

    def _fail(self, job: _Job, reason: str, error: Exception | None) -> None:
        if not job.reply.done() and error is not None:
            job.reply.set_exception(error)
        elif not job.reply.done():
            job.reply.set_result(Score.failed(reason))
        self._assign()

    def _abandon(self, job: _Job) -> None:
        with suppress(ValueError):
            self._waiting.remove(job)
        for worker in [w for w in self.workers if w.job is job]:
            self._release(worker)
            self._end(worker)

    def _release(self, worker: _Worker) -> _Job:
        """Take the job from a worker."""
        job, worker.job = worker.job, None
        assert job is not None and worker.timer is not None
        worker.timer.cancel()
        job.reply.get_loop().remove_reader(worker.out)
        return job

    def _end(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        worker.close_pipes()
        if self._server is not None:
            self._server.end(worker.pid)


class _ForkServer:
    """A process that was forked while this one was small, and that forks the workers."""

    def __init__(self, tasks: Sequence[Task]):
        stacks()  # opened here, so that workers inherit it
        self._channel, theirs = socket.socketpair()  # carries the pipes of new workers

        def live(commands: int, output: int) -> None:
            self._channel.close()
            _serve_forks(tasks, commands, output, theirs)

        self._pid, self._commands, self._output = processes.fork(live)
        theirs.close()
        self._channel.settimeout(START_SECONDS)

    def fork(self) -> _Worker:
        """A new worker."""
        self._command(0)
        try:
            data, (requests, scores), _, _ = socket.recv_fds(self._channel, 64, 2)
        except (OSError, ValueError):  # a closed socket gives no pipes
            raise UserError(DIED) from None
        return _Worker(pid=int(data), into=requests, out=scores)

    def end(self, pid: int) -> None:
        """End a worker and the processes that it started."""
        with suppress(UserError):  # the workers of a dead fork server have ended, too
            self._command(pid)

    def _command(self, number: int) -> None:
        try:
            processes.write_all(self._commands, b"%d\n" % number, monotonic() + END_SECONDS)
        except OSError:
            raise UserError(DIED) from None

    def close(self) -> None:
        """Let it end the workers that it was asked to end, then itself."""
        os.close(self._commands)
        select.select([self._output], [], [], END_SECONDS)  # closed when it has ended
        processes.end(self._pid, None, self._output)
        self._channel.close()


def _serve_forks(tasks: Sequence[Task], commands: int, output: int, channel: socket.socket) -> None:
    """The main loop of the fork server: 0 asks for a new worker, another number ends the worker of that process id."""
    with os.fdopen(commands, "rb", buffering=0) as lines:

        def live(requests: int, scores: int) -> None:
            os.setpgid(0, 0)
            lines.close()
            os.close(output)
            channel.close()
            _work(tasks, requests, scores)

        for line in lines:
            ended = int(line)
            if ended:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(ended, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(ended, 0)
                continue
            pid, into, out = processes.fork(live)
            with suppress(OSError):
                os.setpgid(pid, pid)
            socket.send_fds(channel, [b"%d" % pid], [into, out])
            os.close(into)
            os.close(out)


def _work(tasks: Sequence[Task], requests: int, scores: int) -> None:
    """The main loop of a worker: a line in, a line out, until the pipe closes."""
    faulthandler.register(signal.SIGUSR1, file=stacks(), all_threads=True)
    processes.on_import.append(lambda begins: processes.write_all(scores, to_line(begins)))
    with os.fdopen(requests, "rb") as lines, asyncio.Runner() as runner:

        def exchange(message: JSON) -> JSON:
            processes.write_all(scores, to_line({"ask": message}))
            line = lines.readline()
            if not line:  # the parent has ended
                os._exit(1)
            return from_line(line)

        for line in lines:
            number, *parts = from_line(line)
            answer: JSON
            try:
                if number < 0:  # an episode
                    run = tasks[-1 - number].run_remotely(Problem(*parts), exchange)
                    answer = {"done": runner.run(run)}
                else:
                    *parts, response = parts
                    score = runner.run(tasks[number].scored(Problem(*parts), response))
                    answer = [score.value, score.parts, score.steps, score.outcome, score.failure]
            except STOPS as error:
                kinds = [isinstance(error, kind) for kind in STOPS]
                answer = {"stop": kinds.index(True), "text": str(error)}
            processes.write_all(scores, to_line(answer))
