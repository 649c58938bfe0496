"""Scoring in worker processes: a reward that is slow, hangs, crashes or leaks costs its own time limit and nothing else.

Workers are forked from this process and inherit the task and the problems as they are, so that nothing of a user's is encoded: a
response and the place of its problem go to them, and a score comes back, as JSON lines. A worker whose answer does not come in time
is killed and replaced, and the response gets a named failure: it is not the policy's fault, so it is masked, counted and never a 0.
A UserError or GuardStop of the reward ends the run, wherever it was raised. Where processes cannot be forked, rewards are computed
in this one.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import select
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from posttrain.errors import GuardStop, UserError
from posttrain.rewards.compose import as_score
from posttrain.system import machine
from posttrain.system import processes as children
from posttrain.tasks.base import Task
from posttrain.types import JSON, Problem, Score

LONGEST_FAILURE = 500  # characters of a foreign error that are kept
STOPS: dict[str, type[Exception]] = {
    "UserError": UserError,
    "GuardStop": GuardStop,
}  # errors that end the run
RETRIES = 1  # a worker that died without an answer is tried once more


def score_one(task: Task, problem: Problem, response: str) -> Score:
    """A task's score; what it raises becomes a named failure, which is counted and never a 0."""
    try:
        found = task.score(problem, response)
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
        return as_score(found)
    except tuple(STOPS.values()):  # ours: a missing option, a judge that fell for its canaries
        raise
    except (Exception, SystemExit) as error:  # reward code is not ours
        return _failed(error)


def _failed(error: BaseException) -> Score:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # its words are not ours either
        text = type(error).__name__
    return Score.failed(text[:LONGEST_FAILURE])


async def _awaited(found):  # type: ignore[no-untyped-def]
    return await found


def score_group(task: Task, problem: Problem, responses: Sequence[str]) -> list[Score]:
    """Scores of a problem's responses, together where the task compares them, else one by one."""
    try:
        given = task.score_group(problem, responses)
        together = None if given is None else [as_score(score) for score in given]
    except tuple(STOPS.values()):
        raise
    except (Exception, SystemExit) as error:
        return [_failed(error)] * len(responses)
    if together is None:
        return [score_one(task, problem, response) for response in responses]
    if len(together) != len(responses):
        return [
            Score.failed(
                f"score_group returned {len(together)} scores for {len(responses)} responses"
            )
        ] * len(responses)
    return together


@dataclass(slots=True)
class _Job:
    """A response on its way to a score."""

    place: int  # of its problem
    response: str
    score: Score | None = None
    attempts: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    """A process that scores one response at a time."""

    pid: int
    into: int
    out: int
    known: int  # problems that it has inherited
    job: _Job | None = None
    deadline: float = 0.0
    heard: bytearray = field(default_factory=bytearray)


class Workers:
    """Scores `submit`ted responses in up to `count` processes, `seconds` at most for each. Use as a context manager. Workers inherit
    `problems`; for one that is submitted later they are forked anew."""

    def __init__(
        self, task: Task, count: int = 0, seconds: float = 10.0, problems: Sequence[Problem] = ()
    ):
        self.task, self.seconds, self.problems = task, seconds, list(problems)
        self.places = {id(problem): place for place, problem in enumerate(self.problems)}
        self.count = count or machine.cores()
        self.able = sys.platform == "linux"
        self.workers: list[_Worker] = []
        self.waiting: deque[_Job] = deque()
        self.jobs: list[_Job] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, problem: Problem, responses: Sequence[str]) -> None:
        """Start on these; returns at once unless rewards are computed here."""
        if id(problem) not in self.places:
            self.places[id(problem)] = len(self.problems)
            self.problems.append(problem)
        for response in responses:
            job = _Job(self.places[id(problem)], response)
            self.jobs.append(job)
            if self.able:
                self.waiting.append(job)
            else:
                job.score = score_one(self.task, problem, response)
        self._serve(0.0)

    def results(self) -> list[Score]:
        """Scores of everything submitted since the last call, in that order."""
        while any(job.score is None for job in self.jobs):
            self._serve(0.05)
        done, self.jobs = self.jobs, []
        return [job.score for job in done if job.score is not None]

    def close(self) -> None:
        """End the workers: none outlives its pool."""
        for worker in self.workers:
            self._end(worker)
        self.workers.clear()
        self.waiting.clear()

    def _serve(self, patience: float) -> None:
        """Hand out what waits, take in what is done, end what takes too long."""
        self._hand_out()
        busy = [w for w in self.workers if w.job is not None]
        if not busy:
            return
        ready, _, _ = select.select([w.out for w in busy], [], [], patience)
        for worker in busy:
            if worker.out in ready:
                self._hear(worker)
            elif time.monotonic() > worker.deadline:
                self._settle(worker, Score.failed(f"timeout: no score within {self.seconds:g} s"))
                self._replace(worker)
        self._hand_out()

    def _hand_out(self) -> None:
        while self.waiting:
            free = next((w for w in self.workers if w.job is None), None)
            if free is not None and free.known <= self.waiting[0].place:
                self._replace(free)
                free = None
            if free is None and len(self.workers) < self.count:
                free = self._fork()
                self.workers.append(free)
            if free is None:
                return
            job = self.waiting.popleft()
            job.attempts += 1
            free.job, free.deadline = job, time.monotonic() + self.seconds
            line = json.dumps([job.place, job.response]).encode() + b"\n"
            try:
                children.write_all(free.into, line, free.deadline)
            except OSError:  # it died while idle, or does not listen
                self._died(free)

    def _hear(self, worker: _Worker) -> None:
        piece = os.read(worker.out, 1 << 16)
        if not piece:
            self._died(worker)
            return
        worker.heard += piece
        if worker.heard.endswith(b"\n"):
            found = json.loads(worker.heard)
            worker.heard.clear()
            if isinstance(found, dict):
                raise STOPS[found["stop"]](found["text"])
            self._settle(worker, Score(*found))

    def _settle(self, worker: _Worker, score: Score) -> None:
        assert worker.job is not None
        worker.job.score, worker.job = score, None

    def _died(self, worker: _Worker) -> None:
        job, worker.job = worker.job, None
        if job is not None and job.attempts <= RETRIES:
            self.waiting.appendleft(job)
        elif job is not None:
            job.score = Score.failed("the process that computed the reward died")
        self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        self._end(worker)
        self.workers.remove(worker)

    @staticmethod
    def _end(worker: _Worker) -> None:
        children.end(worker.pid, worker.into, worker.out, whole_group=True)

    def _fork(self) -> _Worker:
        if not self.workers:  # what they need is made here, once: each inherits it
            getattr(self.task, "ready", tuple)()

        def live(questions: int, answers: int) -> None:
            os.setpgid(0, 0)
            for other in self.workers:  # a worker must not hold another's pipe open
                os.close(other.into)
                os.close(other.out)
            _work(self.task, self.problems, questions, answers)

        worker = _Worker(*children.fork(live), known=len(self.problems))
        with suppress(OSError):
            os.setpgid(worker.pid, worker.pid)
        return worker


def _work(task: Task, problems: Sequence[Problem], theirs: int, ours: int) -> None:
    """A worker's life: a line in, a line out, until the pipe closes."""
    with os.fdopen(theirs, "rb") as requests:
        for line in requests:
            place, response = json.loads(line)
            answer: JSON
            try:
                score = score_one(task, problems[place], response)
                answer = [score.value, score.parts, score.steps, score.outcome, score.failure]
            except tuple(STOPS.values()) as error:
                kind = next(name for name, kind in STOPS.items() if isinstance(error, kind))
                answer = {"stop": kind, "text": str(error)}
            children.write_all(ours, json.dumps(answer).encode() + b"\n")
