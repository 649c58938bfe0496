"""Rollouts that are sampled ahead: the plain ones at staleness 0; beyond it nothing is lost, doubled, too old or starved."""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks_for_tests as ranks
import torch
from sampler_for_tests import ScriptedSampler

from posttrain import pipeline
from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.dapo import DAPO
from posttrain.algorithms.dppo import DPPO
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ppo import PPO
from posttrain.algorithms.raft import RAFT
from posttrain.cluster.admission import Staleness
from posttrain.cluster.asynchronous import Asynchronous
from posttrain.cluster.remote import RemoteSampler
from posttrain.data.curriculum import Curriculum, CurriculumState
from posttrain.engine.engine import Engine
from posttrain.errors import GuardStop, UserError
from posttrain.loop import Loop
from posttrain.models.policy import Policy
from posttrain.models.tiny import character_tokenizer
from posttrain.runs.layout import Row
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.stages.base import Context
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.train.optimizer import Optimization
from posttrain.train.trainer import Trainer
from posttrain.types import Completion, Request, Sampling
from tests.faults import harness
from tests.faults.letters import Letters

TASK = Arithmetic(level=2)
TOKENIZER = character_tokenizer(str(TASK.alphabet))
TIMES = ("seconds", "tokens_per_second", "time", "memory")
NEW = ("staleness", "queue")


class Scripted(ScriptedSampler):
    """Writes a token of each request in each poll until `done` says that it is enough, given the versions of the weights that wrote
    them. `rows` are written at once."""

    def __init__(self, done: Callable[[Request, list[int]], bool], rows: int = 4):
        super().__init__(lambda request: pytest.fail("not used"))
        self.done, self.rows = done, rows
        self.written: dict[int, list[int]] = {}  # versions, by session

    def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
        found = []
        for request in self.waiting[: self.rows]:
            versions = self.written.setdefault(request.session, [])
            versions.append(self.version)
            if self.done(request, versions):
                ids = np.array([TOKENIZER.eos_token_id] * len(versions))
                done = Completion(
                    ids, np.zeros(len(ids), np.float32), np.array(self.written.pop(request.session), np.int32), "stop"
                )
                found.append((request, done))
                self.waiting.remove(request)
        time.sleep(0.001)
        return found


def source_of(sampler: Any, staleness: int, batch: int = 2, steps: int = 6, **more: Any) -> Asynchronous:
    problems = {2: TASK.problems("train", 2)[:400]}
    state = CurriculumState([2], [400], Curriculum(), 0)
    given = (TASK, sampler, TOKENIZER, state, batch, Sampling(64), 0, torch.device("cpu"))
    bound = Staleness(batch=batch, max_staleness=staleness)
    return Asynchronous(*given, problems=problems, staleness=bound, steps=steps, **more)


def drive(source: Asynchronous, steps: int, algorithm: Algorithm, seconds: float = 0.0) -> Iterator[tuple[list[int], Any]]:
    """A loop without a model: numbers of the groups of each step, and what was collected."""
    for step in range(source.admission.version, source.admission.version + steps):
        found = source.collect(step, algorithm, {})
        numbers = [one.number for one in source.taken]
        time.sleep(seconds)
        source.publish(step + 1)
        source.observe(found.groups)
        yield numbers, found


def test_long_answers_are_trained_on_as_often_as_they_are_offered() -> None:
    """Every fifth problem takes thirty times as long; with rules that drop what is late none of those would be trained on."""
    lengths: dict[tuple[int, ...], int] = {}

    def done(request: Request, versions: list[int]) -> bool:
        return len(versions) == lengths.setdefault(request.ids, 30 if len(lengths) % 5 == 0 else 1)

    with closing(source_of(Scripted(done, rows=6), 2, batch=2, steps=15)) as source:
        steps = list(drive(source, 15, GRPO(group=2)))
    assert sorted(n for numbers, _ in steps for n in numbers) == list(range(30)), "each once"
    trained = Counter(r.length for _, found in steps for g in found.groups for r in g.rollouts)
    assert trained == {30: 12, 1: 48}
    ages = [m.value for _, found in steps for m in found.metrics if m.name == "staleness/max"]
    assert max(ages) in (1, 2), "ahead, within the bound"


def both(in_flight: str) -> tuple[list[list[int]], list[int]]:
    """Versions of the tokens of two groups, of which the second is not done before there are new weights."""
    first: list[Request] = []

    def done(request: Request, versions: list[int]) -> bool:
        first.append(request)
        return request.ids == first[0].ids or versions.count(1) == 5

    found = []
    with closing(source_of(Scripted(done), 1, 1, 2, in_flight=in_flight)) as source:
        for _, collected in drive(source, 2, GRPO(group=2)):
            found += [list(map(int, r.segments[1].versions)) for g in collected.groups for r in g.rollouts]
    return found[:2], found[2]


def test_what_is_in_flight_goes_on_with_new_weights_or_is_begun_again() -> None:
    first, second = both("continue")
    assert first == [[0], [0]] and sorted(set(second)) == [0, 1] and second == sorted(second)
    first, second = both("restart")
    assert first == [[0], [0]] and second == [1] * 5


def test_a_step_that_asks_for_more_gets_it_and_nothing_is_lost() -> None:
    """DAPO leaves out groups whose rewards are equal, here all of them, and asks again, three times."""
    with closing(source_of(Scripted(lambda request, versions: True), 1, 2, 3)) as source:
        steps = list(drive(source, 3, DAPO(group=2, l_max=0, l_cache=0)))
        assert [len(numbers) for numbers, _ in steps] == [8, 8, 8]
        assert sorted(n for numbers, _ in steps for n in numbers) == list(range(24))
        assert source.planned == 6 and not source.admission.outstanding, "nothing is begun that no step is left for"


def test_a_sampler_that_dies_ends_the_run_with_its_own_words() -> None:
    class Dead(ScriptedSampler):
        def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
            raise UserError("the sampler is gone")

    source = source_of(Dead(lambda request: pytest.fail("not used")), 1)
    began = time.monotonic()
    with closing(source), pytest.raises(UserError, match="the sampler is gone"):
        source.collect(0, GRPO(group=2), {})
    with pytest.raises(UserError, match="the sampler is gone"):
        source.publish(1)
    assert time.monotonic() - began < 10


def test_a_sampler_that_stands_still_ends_the_run_in_bounded_time() -> None:
    class Stuck(ScriptedSampler):
        def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
            time.sleep(0.01)
            return []

    source = source_of(Stuck(lambda request: pytest.fail("not used")), 1, longest_wait=0.5)
    with closing(source), pytest.raises(GuardStop, match=r"finished nothing for \d+ s.*POSTTRAIN_WAIT"):
        source.collect(0, GRPO(group=2), {})
    assert not source.producer.thread.is_alive()


def test_an_error_of_an_episode_ends_the_run() -> None:
    """A prompt that the sampler refuses, as in the plain loop."""

    class Refusing(ScriptedSampler):
        def submit(self, requests: Sequence[Request]) -> None:
            raise UserError("the prompt is too long")

    source = source_of(Refusing(lambda request: pytest.fail("not used")), 1)
    with closing(source), pytest.raises(UserError, match="the prompt is too long"):
        source.collect(0, GRPO(group=2), {})


# --- with a model -------------------------------------------------------------------------------------------------------


class Copied(Engine):
    """An engine with weights of its own, which works while the model learns: what a sampler in another process has."""

    pause = None  # type: ignore[assignment]

    def __init__(self, policy: Policy):
        own = copy.copy(policy)
        own.model = copy.deepcopy(policy.model)
        super().__init__(own, processes=1)
        self.learner = policy

    def publish(self, version: int, weights: Any = None) -> None:
        super().publish(version, self.learner.model.named_parameters())


def stage_of(algorithm: Algorithm | None = None, **more: Any) -> RLStage:
    usual: dict[str, Any] = {
        "steps": 5, "prompts": 2, "sampling": Sampling(6), "evaluate_every": 2, "evaluate_problems": 2, "rollouts_every": 1,
        "optimizer": Optimization(lr=1e-2, warmup=1), "checkpoint_every": 2,
    }  # fmt: skip
    given = usual | more
    task = Letters(workers=False, grades=2)
    return RLStage(name="rl", model="tiny:nano", task=task, algorithm=algorithm or GRPO(group=4), **given)


def train(stage: RLStage, folder: Path, on_step: Callable[[Loop, Row], bool | None] | None = None, own: bool = True) -> Run:
    resumed = (folder / "config.yaml").is_file()
    writer = RunWriter.resume(folder) if resumed else RunWriter(folder, config={"name": "rl"})
    with writer, pytest.MonkeyPatch.context() as patch:
        if own:
            patch.setattr(Context, "sampler", lambda self, policy, **_: Copied(policy))
        torch.manual_seed(0)
        stage.run(Context(writer, seed=0, threads=1, say=False, on_step=on_step))
    return Run(folder)


def figures_of(run: Run) -> list[dict[str, float]]:
    return [{k: v for k, v in row.figures.items() if not k.startswith((*TIMES, *NEW))} for row in run.metrics()]


@pytest.mark.parametrize("algorithm", [GRPO(group=4), DAPO(group=2, l_max=0, l_cache=0)], ids=["grpo", "dapo with refills"])
def test_staleness_0_is_the_plain_run_to_the_bit(algorithm: Algorithm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_of(algorithm)
    plain = train(stage, tmp_path / "plain", own=False)

    ahead = partial(Asynchronous, staleness=Staleness(batch=stage.prompts), steps=stage.steps)
    monkeypatch.setattr("posttrain.stages.rl.Rollouts", ahead)
    same = train(stage, tmp_path / "same", own=False)
    assert figures_of(same) == figures_of(plain) and len(figures_of(plain)) == 6
    assert all(row.figures["staleness/max"] == 0 for row in same.metrics()[1:] if "staleness/max" in row.figures)
    assert max(row.get("grad_norm", 0.0) for row in figures_of(plain)) > 0, "something was learned"
    weights = [(tmp_path / run / "stages/rl/model/model.safetensors").read_bytes() for run in ("plain", "same")]
    assert weights[0] == weights[1]


def test_a_sampler_that_works_ahead_is_proven_before_the_weights_change_again() -> None:
    done: list[Any] = []
    sampler, source = RemoteSampler.__new__(RemoteSampler), Asynchronous.__new__(Asynchronous)
    vars(sampler).update(publish=done.append, prove=lambda: done.append("proven"))
    vars(source).update(sampler=sampler, changing=None, running=None, pause=None, learning=ExitStack())
    source.publish(3)
    assert done == [3, "proven"]


class Killed(BaseException):
    pass


def record(path: Path, kill_at: int = 0) -> Callable[[Loop, Row], bool | None]:
    """Writes which groups each step was made of; kills the process after a step, when the checkpoint before it is written."""

    def on_step(loop: Loop, row: Row) -> None:
        source = loop.source
        assert isinstance(source, Asynchronous)
        trained = sorted({*range(source.admission.drawn)} - {*source.drawn})
        with path.open("a") as file:
            file.write(json.dumps([loop.step, trained]) + "\n")
        if loop.step == kill_at:
            deadline = time.monotonic() + 30  # the checkpoint is written beside the steps, which are short here
            while not (path.parent / f"run/checkpoints/rl/step-{kill_at - 1}").is_dir() and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    return on_step


def killed(stage: RLStage, folder: Path, path: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    train(stage, folder, record(path, 3))


def test_every_problem_is_trained_on_once_also_over_a_kill(tmp_path: Path) -> None:
    stage, path = stage_of(max_staleness=2, sampler="process", steps=7, evaluate_every=0), tmp_path / "trained.jsonl"
    child = multiprocessing.get_context("fork").Process(target=killed, args=(stage, tmp_path / "run", path))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    run = train(stage, tmp_path / "run", record(path))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [step for step, _ in rows] == [1, 2, 3, 3, 4, 5, 6, 7], "it went back to step 2"
    after = dict(rows)
    assert all(len(after[step]) == 2 * step for step in after), "two groups a step, none twice"
    assert after[7] == list(range(14)), "and none is left out"
    figures = [row.figures for row in run.metrics()]
    assert max(row["staleness/max"] for row in figures) in (1, 2)
    assert all("correction" in row for row in figures if row.get("updates")), "weights of the correction are logged"
    assert {"staleness/mean", "queue", "seconds/trainer_idle", "seconds/sampler_idle"} <= {*figures[-1]}


def test_a_checkpoint_holds_groups_that_wait_as_they_were_sampled(tmp_path: Path) -> None:
    stage, kept = stage_of(max_staleness=2, sampler="process", steps=4, evaluate_every=0), []

    def stop(loop: Loop, row: Row) -> bool:
        assert isinstance(loop.source, Asynchronous)
        with loop.source.drained():
            loop.save()
        loop.checkpoints.finish()
        kept.append(dict(loop.source.ready))
        raise Killed

    with pytest.raises(Killed):
        train(stage, tmp_path / "run", stop)

    def compare(loop: Loop, row: Row) -> bool:
        return False

    ready, restore = kept[0], Asynchronous.restore
    found: list[dict[int, Any]] = []

    def restored(self: Asynchronous, state: Any) -> None:
        restore(self, state)
        found.append(dict(self.ready))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Asynchronous, "restore", restored)
        train(stage, tmp_path / "run", compare)
    assert {*found[0]} == {*ready} and len(ready) == 6, "three steps ahead"
    for number, groups in ready.items():
        for was, now in zip(groups, found[0][number], strict=True):
            assert now.problem == was.problem
            for a, b in zip(was.rollouts, now.rollouts, strict=True):
                assert a.score == b.score and a.sample == b.sample
                for s, t in zip(a.segments, b.segments, strict=True):
                    for name in ("ids", "logprobs", "versions", "offsets"):
                        x, y = getattr(s, name), getattr(t, name)
                        assert (x is None and y is None) or (x.dtype == y.dtype and x.tobytes() == y.tobytes())


def test_a_process_that_dies_while_the_model_learns_is_replaced_with_the_next_weights(tmp_path: Path) -> None:
    """Its requests go on in the new one. With weights that are half updated, log-probs of later samples would not be the trainer's."""
    update, killed = Trainer.update, []

    def kill(self: Trainer, *given: Any) -> Any:
        if sampler := made[-1] if len(killed) < made[-1].version else None:
            worker = sampler.workers[0]
            killed.append(sampler.version)
            if len(killed) == 2:
                worker.process.kill()
                worker.process.wait(10)
                time.sleep(0.1)  # the producer notices
                assert sampler.workers[0] is worker, "not replaced while the weights change"
        return update(self, *given)

    made: list[Any] = []
    make, path = Context.sampler, tmp_path / "trained.jsonl"

    def sampler(self: Context, *given: Any, **how: Any) -> Any:
        made.append(make(self, *given, **how))
        return made[-1]

    stage = stage_of(max_staleness=1, sampler="process", steps=6, evaluate_every=0, sampling=Sampling(24))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Context, "sampler", sampler)
        patch.setattr(Trainer, "update", kill)
        run = train(stage, tmp_path / "run", record(path), own=False)
    assert len(killed) > 2 and made[0].statistics.failed_workers == 1
    assert json.loads(path.read_text().splitlines()[-1])[1] == list(range(12)), "each once"
    fresh = [row.figures["mismatch"] for row in run.metrics() if row.figures.get("mismatch") == row.figures.get("mismatch")]
    assert max(value for value in fresh if value is not None) < 1e-4


@pytest.mark.parametrize("in_flight", ["continue", "keep"])
def test_the_engine_of_this_process_stands_still_while_the_model_learns(
    in_flight: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Responses that a step did not wait for continue with the next weights. With weights that are half updated, log-probs would not be
    the trainer's. Those of the current weights on an older cache are not either, and count as stale."""
    update, poll, learning = Trainer.update, Engine.poll, []

    def learn(self: Trainer, *given: Any) -> Any:
        learning.append(True)
        done = update(self, *given)
        time.sleep(0.05)  # in which a sampler that goes on would be asked
        learning.pop()
        return done

    def watched(self: Engine, timeout: float | None = None) -> list[tuple[Request, Completion]]:
        assert not learning, "sampled while the weights change"
        return poll(self, timeout)

    monkeypatch.setattr(Trainer, "update", learn)
    monkeypatch.setattr(Engine, "poll", watched)
    path, more = (
        tmp_path / "trained.jsonl",
        {"max_rows": 4, "sampling": Sampling(24), "evaluate_every": 3, "in_flight": in_flight},
    )
    run = train(stage_of(max_staleness=1, steps=6, **more), tmp_path / "run", record(path), own=False)
    assert json.loads(path.read_text().splitlines()[-1])[1] == list(range(12)), "each once"
    figures = [row.figures for row in run.metrics()]
    assert max(row.get("staleness/max", 0.0) for row in figures) == 1
    fresh = [value for row in figures if (value := row.get("mismatch", math.nan)) == value]
    assert fresh and max(fresh) < 1e-4


def test_corrections_are_switched_on_where_samples_may_be_old() -> None:
    ahead = {"max_staleness": 1, "sampler": "process"}
    assert stage_of(**ahead).algorithm == GRPO(group=4, correction="token")
    assert stage_of().algorithm == GRPO(group=4)
    assert stage_of(**ahead, staleness_correction="none").algorithm == GRPO(group=4)
    assert stage_of(GRPO(group=4, correction="sequence"), **ahead).algorithm.correction == "sequence"  # type: ignore[attr-defined]
    assert stage_of(PPO(), **ahead, staleness_correction="decoupled").algorithm.correction == "decoupled"  # type: ignore[attr-defined]
    for without in (DPPO(), RAFT()):
        assert stage_of(without, **ahead).algorithm == without


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"sampler": "process", "release_cache": True}, "release_cache"),
        ({"max_staleness": 0, "in_flight": "restart"}, "in_flight .* max_staleness above 0"),
        ({"sampler": "process", "in_flight": "keep"}, "in_flight=keep is for sampler=engine"),
        ({"release_cache": True, "in_flight": "keep"}, "without release_cache"),
        ({"max_staleness": 0, "staleness_correction": "none"}, "staleness_correction .* max_staleness above 0"),
    ],
)
def test_keys_that_contradict_max_staleness_are_refused(wrong: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        stage_of(**{"max_staleness": 1, **wrong})


# --- several processes that train ---------------------------------------------------------------------------------------


def sampled_by_two(world: Any) -> list[Any]:
    """Numbers of the groups of each step, the ids of their rollouts, and how many requests this process has had."""
    asked = list[Request]()

    def done(request: Request, versions: list[int]) -> bool:
        if len(versions) == 1:
            asked.append(request)
        return len(versions) == 1 + request.seed % 7

    found, saved = list[Any](), []
    with closing(source_of(Scripted(done), 1, batch=3, steps=6)) as source:
        for numbers, collected in drive(source, 6, GRPO(group=2)):
            found.append([numbers, [r.segments[1].ids.tolist() for g in collected.groups for r in g.rollouts]])
            if len(found) == 3:
                saved.append(json.loads(json.dumps(source.state(), default=lambda array: array.tolist())))
        assert not source.admission.outstanding
    return [found, saved, len(asked)]


def test_two_processes_take_the_same_groups_of_which_each_has_sampled_its_own() -> None:
    (first, saved, asked), (second, other, asked_too) = ranks.run(2, sampled_by_two)
    assert first == second and saved == other and len(saved) == 1
    assert sorted(n for numbers, _ in first for n in numbers) == list(range(18)), "each once"
    assert asked == asked_too == 18, "half of 18 groups of 2"


def ahead(directory: Path, path: Path, kill_at: int = 0) -> Callable[[], str]:
    """A run that samples ahead in one process of several, or goes on; the first one writes which groups each step was made of."""

    def work() -> str:
        observe, rank = Asynchronous.observe, int(os.environ.get("RANK", 0))

        def recorded(self: Asynchronous, groups: Any) -> None:
            step = self.admission.version + 1
            if rank == 0:
                with path.open("a") as file:
                    file.write(json.dumps([step, [one.number for one in self.taken]]) + "\n")
            elif step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            observe(self, groups)

        pipeline.draw = lambda *_: None
        Asynchronous.observe = recorded  # type: ignore[method-assign]
        Context.sampler = lambda self, policy, **_: Copied(policy)  # type: ignore[method-assign]
        if (directory / "config.yaml").is_file():
            return str(pipeline.resume(directory, allow_code=True))
        whole = harness.settings("dapo", directory)
        (rl,) = (one for one in whole.recipe.stages if isinstance(one, RLStage))
        more = {"algorithm": GRPO(group=2), "max_staleness": 1, "sampler": "process"}
        stage = replace(rl, steps=5, prompts=2, checkpoint_every=1, **more)
        return str(pipeline.start(replace(whole, recipe=replace(whole.recipe, stages=(stage,)))))

    return work


@pytest.mark.parametrize("then", [2, pytest.param(1, marks=pytest.mark.cluster)])
def test_two_processes_train_on_every_problem_once_over_a_kill(then: int, tmp_path: Path) -> None:
    """Also where one process alone goes on."""
    directory, path = tmp_path / "run", tmp_path / "trained.jsonl"
    ended = ranks.start(2, ahead(directory, path, kill_at=3))
    assert ended.codes[1] == -signal.SIGKILL and "PeerFailed" in ended.raised[0]
    ranks.finished(ranks.start(then, ahead(directory, path)))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    trained = dict(rows)  # what counts is the last time that a step was made
    assert [*trained] == [1, 2, 3, 4, 5] and len(rows) in (6, 7), "it went back to the last checkpoint"
    assert sorted(n for numbers in trained.values() for n in numbers) == list(range(10)), "each once"
    assert max(row.figures["staleness/max"] for row in Run(directory).metrics() if "staleness/max" in row.figures) == 1
