"""The loop with monitors: a fault stops it before harm is done, and a clean run raises no alarm."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from material_for_tests import group, roles_for, rollout, segment, small_policy
from safetensors.numpy import load_file

from posttrain.algorithms.base import Algorithm, State
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ppo import PPO
from posttrain.algorithms.reinforce import Reinforce
from posttrain.algorithms.remax import ReMax
from posttrain.collect import Collected, Source
from posttrain.errors import GuardStop, Interrupted, UserError
from posttrain.loop import Interrupt, Loop, LoopSchedule, Stop
from posttrain.monitor import monitor as module
from posttrain.monitor.rules import MonitorSettings
from posttrain.ops.weights import reduction
from posttrain.runs.metrics import group_metrics
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.train.forward import forward
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import gather, pack_groups
from posttrain.train.saving import Saving, Store
from posttrain.train.trainer import Trainer
from posttrain.types import Batch, Group, Outputs, Score, Term, Terms


def text(ids: Sequence[int], reward: float | None = 1.0, logprobs: Sequence[float] | None = None, sample: int = 0):  # type: ignore[no-untyped-def]
    return rollout([segment([3, 4], False), segment(list(ids), True, logprobs, "stop")], reward, sample=sample)


# --- in the loop -------------------------------------------------------------------------------------------------------------


class Answers(Source):
    """A source of rollouts with made-up rewards, and log-probs of the policy itself; `plant` may change a step's groups."""

    def __init__(self, policy: Any, plant: Callable[[int, list[Group]], list[Group]] = lambda step, groups: groups):
        self.policy, self.plant, self.seen = policy, plant, 0

    def collect(self, step: int, algorithm: Algorithm, state: State) -> Collected:
        self.seen += 1
        generator = np.random.default_rng(step)
        groups = []
        for number in range(2):
            members = [
                text(generator.integers(3, 24, 18).tolist(), float((n + step + number) % 3 == 0), sample=n) for n in range(4)
            ]
            groups.append(group(members, f"p{number}"))
        batch = pack_groups(groups, 1.0)
        with torch.no_grad():
            logprob_T = forward(self.policy, batch).logprob_T
        spread = iter(torch.split(logprob_T, [20] * 8))
        groups = [
            group(
                [text(r.segments[1].ids.tolist(), r.score.value, next(spread)[2:].tolist(), r.sample) for r in g.rollouts],
                g.problem.id,
            )
            for g in groups
        ]
        groups = self.plant(step, groups)
        return Collected(pack_groups(groups, 1.0), tuple(groups), group_metrics(groups))

    models = ()

    def observe(self, groups: Sequence[Group]) -> None:
        pass

    def state(self) -> int:
        return self.seen

    def restore(self, state: int) -> None:
        self.seen = state


def make(
    folder: Path,
    algorithm: Algorithm | None = None,
    plant: Callable[[int, list[Group]], list[Group]] | None = None,
    **more: Any,
) -> Loop:
    policy, settings = small_policy(dtype=torch.float32), Optimization(lr=1e-3)
    algorithm = algorithm or GRPO(beta=0.0)
    reference = small_policy(1, torch.float32) if "reference" in algorithm.roles else None
    steps, every = more.pop("steps", 4), more.pop("every", 1)
    writer = more.pop("writer", None) or RunWriter(folder / "run", config={"name": "guards"})
    return Loop(
        stage="rl",
        schedule=LoopSchedule(steps=steps, checkpoint_every=every),
        trainer=Trainer(policy, algorithm, settings, roles_for(algorithm, policy, settings, reference), events=writer.events),
        source=Answers(policy, plant) if plant else Answers(policy),
        writer=writer,
        checkpoints=Store(folder / "run" / "checkpoints", Saving(synchronous=True), writer.events),
        interrupt=Interrupt(),
        **more,
    )


def alarm_events(loop: Loop) -> list[tuple[str, bool]]:
    return [
        (str(e.details["rule"]), e.details["level"] == "stop") for e in Run(loop.writer.directory).events() if e.kind == "alarm"
    ]


class Unmeasured(Answers):
    """As rollouts are collected: the loop itself measures the rewards."""

    def collect(self, step: int, algorithm: Algorithm, state: State) -> Collected:
        return replace(super().collect(step, algorithm, state), metrics=())


def test_a_step_without_a_gradient_still_moves_the_algorithms_state(tmp_path: Path) -> None:
    """Every reward of the first step is 0.5, so that no advantage differs from 0 and the update is skipped: the running baseline is
    0.5 all the same."""
    alike = lambda step, groups: [group([replace(r, score=Score(0.5)) for r in g.rollouts]) for g in groups]  # noqa: E731
    loop = make(tmp_path, Reinforce(baseline="running"), steps=1)
    loop.source = Unmeasured(loop.trainer.policy, alike)
    loop.run()
    assert Run(loop.writer.directory).metrics("rl")[-1].figures["skipped"] == 1
    assert loop.state == {"baseline": 0.5}


def test_the_greedy_answer_of_remax_is_in_no_figure_of_its_samples(tmp_path: Path) -> None:
    """Its log-probs are 0, which would halve the entropy, of which an alarm is raised; its reward is the figure `baseline`."""
    scored = lambda step, groups: [group([replace(r, score=Score(float(r.sample == 0))) for r in g.rollouts]) for g in groups]  # noqa: E731
    found = []
    for algorithm in (ReMax(group=4, beta=0.0), GRPO(beta=0.0, group=4)):
        loop = make(tmp_path / algorithm.name, algorithm, steps=1)
        loop.source = Unmeasured(loop.trainer.policy, scored)
        loop.run()
        found.append(Run(loop.writer.directory).metrics("rl")[-1].figures["reward"])
    assert found == [0.0, 0.25]


class NothingSelected(Answers):
    def collect(self, step: int, algorithm: Algorithm, state: State) -> Collected:
        found = super().collect(step, algorithm, state)
        return found if step != 1 else replace(found, batch=pack_groups([], 1.0))


@pytest.mark.parametrize("algorithm", [GRPO(), PPO(group=4, mini_batches=2)], ids=["grpo", "ppo"])
def test_a_step_without_any_selected_group_is_left_out(algorithm: Algorithm, tmp_path: Path) -> None:
    loop = make(tmp_path, algorithm, steps=3)
    loop.source = NothingSelected(loop.trainer.policy)
    weights: list[list[torch.Tensor]] = []
    plain = loop.one_step
    loop.one_step = lambda: (weights.append([p.clone() for p in loop.trainer.weights().values()]), plain())[1]  # type: ignore[method-assign]
    loop.run()
    rows = Run(loop.writer.directory).metrics("rl")
    assert [(row.figures.get("skipped"), row.figures.get("updates")) for row in rows][1] == (1, None)
    assert loop.step == 3 and all(torch.equal(a, b) for a, b in zip(weights[1], weights[2], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))


def test_a_mini_batch_without_a_score_has_no_part_in_the_mean_of_the_gradients_norm(tmp_path: Path) -> None:
    def plant(step: int, groups: list[Group]) -> list[Group]:
        unscored = [replace(r, score=Score.failed("timeout")) for r in groups[1].rollouts]
        return [groups[0], replace(groups[1], rollouts=tuple(unscored))]

    loop = make(tmp_path, GRPO(beta=0.0, mini_batches=2), plant, steps=1, monitor=MonitorSettings(off=("failed",)))
    update, norms = loop.trainer.update, list[float]()

    def recording(batch: Batch, *more: Any) -> Any:
        found = update(batch, *more)
        norms.append(found.grad_norm)
        return found

    loop.trainer.update = recording  # type: ignore[method-assign]
    loop.run()
    (row,) = Run(loop.writer.directory).metrics("rl")
    assert (len(norms), min(norms)) == (2, 0.0) and row.figures["skipped"] == row.figures["updates"] == 1
    assert row.figures["grad_norm"] == max(norms) > 0


@pytest.mark.parametrize(
    "algorithm",
    [GRPO(beta=0.04, entropy=0.01), GRPO(beta=0.0, epochs=2, mini_batches=2), PPO(group=4, critic_warmup=2, clip=0.1)],
)
def test_a_clean_run_raises_no_alarm(algorithm: Algorithm, tmp_path: Path) -> None:
    loop = make(tmp_path, algorithm, steps=7)
    loop.run()
    assert alarm_events(loop) == [] and loop.step == 7
    assert not (tmp_path / "run" / "alarms").exists()
    monitor = loop.stage_monitor.monitor
    frozen = [role for role in loop.trainer.roles if role.frozen is not None]
    assert monitor.coefficients_checked and (monitor.frozen is None) == (not frozen)


@pytest.mark.parametrize("budget", [10_000, 25])
@pytest.mark.parametrize("algorithm", [PPO(group=4, epochs=3, mini_batches=2, beta=0.0), GRPO(beta=0.0)], ids=["ppo", "grpo"])
def test_losses_are_means_over_the_updates_of_a_step(algorithm: Algorithm, budget: int, tmp_path: Path) -> None:
    """Whatever the micro-batches: what is shown does not grow with epochs and mini-batches. `updates` says how many there were."""
    loop = make(tmp_path, algorithm, steps=2)
    loop.trainer.token_budget = budget
    update, seen = loop.trainer.update, []

    def recording(batch: Batch, *more: Any) -> Any:
        found = update(batch, *more)
        sums: dict[str, float] = {}
        for metric in found.metrics:
            if metric.name.startswith("loss") or metric.name == "trained":
                sums[metric.name] = sums.get(metric.name, 0.0) + float(metric.total)
        seen.append(sums)
        return found

    loop.trainer.update = recording  # type: ignore[method-assign]
    loop.run()
    each = algorithm.reuse.epochs * algorithm.reuse.mini_batches
    for number, row in enumerate(Run(loop.writer.directory).metrics("rl")):
        updates = seen[each * number : each * (number + 1)]
        assert row.figures["updates"] == each and {"loss", "loss/policy", "trained"} <= set(updates[0])
        for name in updates[0]:
            assert row.figures[name] == pytest.approx(sum(one[name] for one in updates) / each), name


def dealt(folder: Path, steps: int = 3, **settings: Any) -> list[tuple[int, ...]]:
    """The groups of every update, of 6 groups in 2 epochs of 3 mini-batches a step."""
    loop = make(folder, GRPO(beta=0.0, epochs=2, mini_batches=3), lambda step, groups: [*groups] * 3, steps=steps, **settings)
    update, found = loop.trainer.update, []

    def recording(batch: Batch, *more: Any) -> Any:
        found.append(tuple(sorted(set(batch.group_N.tolist()))))
        return update(batch, *more)

    loop.trainer.update = recording  # type: ignore[method-assign]
    loop.run()
    loop.writer.close()
    return found


def test_every_pass_deals_the_groups_into_mini_batches_anew(tmp_path: Path) -> None:
    """By the seed of the run, the step and the pass: the same in every run, also in one that is resumed."""
    found = dealt(tmp_path / "a", seed=1)
    passes = [tuple(sorted(found[i : i + 3])) for i in range(0, len(found), 3)]
    assert len(passes) == 6 and all(sorted(n for piece in one for n in piece) == list(range(6)) for one in passes)
    assert len(set(passes)) >= 4, "of 15 ways to deal 6 groups"
    assert found == dealt(tmp_path / "b", seed=1) and found != dealt(tmp_path / "c", seed=2)
    first = dealt(tmp_path / "d", steps=2, seed=1)
    resumed = dealt(tmp_path / "d", seed=1, writer=RunWriter.resume(tmp_path / "d" / "run"))
    assert found[:12] == first and found[-len(resumed) :] == resumed


class Poisoned(GRPO):
    """Its loss is not a number at the steps in `at`."""

    at: ClassVar[set[int]] = set()
    calls: ClassVar[int] = 0

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        found = super().terms(outputs, batch)
        if not outputs.logprob_T.requires_grad:  # asked by nobody who learns
            return found
        type(self).calls += 1
        scale = math.nan if type(self).calls in self.at else 1.0
        return Terms(tuple(replace(t, loss=scale * t.loss) for t in found.terms), found.metrics)


def poisoned(*steps: int) -> Poisoned:
    Poisoned.at, Poisoned.calls = set(steps), 0
    return Poisoned(beta=0.0)


def moments(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in (loop.trainer.weights() | loop.trainer.moments()).items()}


def test_a_loss_that_is_not_a_number_stops_before_the_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = make(tmp_path, poisoned(3), monitor=MonitorSettings(off=("coefficient",)))
    before: dict[str, torch.Tensor] = {}
    plain = loop.trainer.update

    def update(*arguments: Any) -> Any:
        before.update(moments(loop))
        return plain(*arguments)

    loop.trainer.update = update  # type: ignore[method-assign]
    with pytest.raises(
        GuardStop, match=r"rl: nonfinite: step 3: the gradient's norm is nan.*nothing was updated.*step-2 is intact"
    ):
        loop.run()
    assert all(torch.equal(tensor, before[name]) for name, tensor in moments(loop).items())
    assert alarm_events(loop) == [("nonfinite", True)]
    assert "stop: nonfinite: step 3" in capsys.readouterr().out
    rows = Run(loop.writer.directory).metrics("rl")
    assert (
        [row.step for row in rows] == [1, 2, 3]
        and math.isnan(rows[2].figures["loss"])
        and math.isnan(rows[2].figures["grad_norm"])
    )
    kept = load_file(tmp_path / "run" / "alarms" / "rl-step-3.safetensors")
    assert {"ids", "mask", "sampled_logprob", "logprob", "advantage", "reward", "starts"} <= set(kept)
    assert kept["starts"].tolist() == list(range(0, 161, 20)) and np.allclose(
        kept["logprob"][kept["mask"]], kept["sampled_logprob"][kept["mask"]], atol=1e-5
    )
    assert checkpoint_steps(loop) == [2, 1]


def checkpoint_steps(loop: Loop) -> list[int]:
    return sorted((int(p.name[5:]) for p in loop.checkpoints.directory.glob("step-*")), reverse=True)


def test_a_few_steps_that_are_not_finite_may_be_skipped(tmp_path: Path) -> None:
    loop = make(tmp_path, poisoned(2, 3, 5), steps=6, monitor=MonitorSettings(skip=2, off=("coefficient",)))
    loop.run()
    assert alarm_events(loop) == [("nonfinite", False)] * 3, "two in a row, then one: never three"
    rows = Run(loop.writer.directory).metrics("rl")
    assert [math.isnan(row.figures["loss"]) for row in rows] == [False, True, True, False, True, False]
    steps = {int(v) for name, v in loop.trainer.moments().items() if name.startswith("step.")}
    assert steps == {3}, "the optimizer counts the updates that were made"
    with pytest.raises(GuardStop, match="step 4"):
        make(tmp_path / "more", poisoned(2, 3, 4), steps=6, monitor=MonitorSettings(skip=2, off=("coefficient",))).run()


def test_neither_policy_nor_critic_moves_if_one_is_not_finite(tmp_path: Path) -> None:
    loop = make(tmp_path, PPO(group=4))
    with torch.no_grad():
        next(p for n, p in loop.trainer.learners[1].network.model.named_parameters() if n.startswith("score"))[0] = math.inf
    before = moments(loop)
    with pytest.raises(GuardStop, match="nonfinite"):
        loop.run()
    assert all(torch.equal(tensor, before[name]) for name, tensor in moments(loop).items())


def test_a_sampler_that_returns_nan_is_stopped_before_it_is_learned_from(tmp_path: Path) -> None:
    def plant(step: int, groups: list[Group]) -> list[Group]:
        spoiled = text(range(3, 21), 1.0, [math.nan] * 18)
        return groups if step < 2 else [group([spoiled, *groups[0].rollouts[1:]], "p0"), *groups[1:]]

    loop = make(tmp_path, plant=plant)
    with pytest.raises(GuardStop, match=r"nonfinite: step 3: 1 of 8 responses.*problems p"):
        loop.run()
    assert np.isnan(load_file(tmp_path / "run" / "alarms" / "rl-step-3.safetensors")["sampled_logprob"]).sum() == 18


def test_steps_with_nan_log_probs_may_be_skipped_but_not_for_ever(tmp_path: Path) -> None:
    def plant(step: int, groups: list[Group]) -> list[Group]:
        spoiled = text(range(3, 21), 1.0, [math.nan] * 18)
        return [group([spoiled, *groups[0].rollouts[1:]], "p0"), *groups[1:]] if step in (1, 3, 4, 5) else groups

    loop = make(tmp_path, plant=plant, steps=9, monitor=MonitorSettings(skip=2))
    with pytest.raises(GuardStop, match="nonfinite: step 6"):
        loop.run()
    assert [e.details["step"] for e in Run(loop.writer.directory).events() if e.kind == "alarm"] == [2, 4, 5, 6]
    assert alarm_events(loop) == [("nonfinite", False)] * 3 + [("nonfinite", True)]
    rows = Run(loop.writer.directory).metrics("rl")
    assert [row.step for row in rows if "loss" in row.figures] == [1, 3], "no update, and so no loss"
    assert {int(v) for name, v in loop.trainer.moments().items() if name.startswith("step.")} == {2}


def test_a_critic_learns_nothing_of_a_step_that_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(step: int, groups: list[Group]) -> list[Group]:
        spoiled = text(range(3, 21), 1.0, [math.nan] * 18)
        return [group([spoiled, *groups[0].rollouts[1:]], "p0"), *groups[1:]] if step == 1 else groups

    learned, plain = [], Trainer._learn
    monkeypatch.setattr(Trainer, "_learn", lambda trainer, *given: learned.append(loop.step) or plain(trainer, *given))
    loop = make(tmp_path, PPO(group=4, epochs=1), plant, steps=3, monitor=MonitorSettings(skip=2))
    loop.run()
    assert learned == [0, 2]


def test_the_last_step_makes_nothing_for_a_next_one(tmp_path: Path) -> None:
    loop, looked = make(tmp_path, steps=3), list[int]()
    loop.source.look_ahead = lambda: looked.append(loop.step + 1)  # type: ignore[method-assign]
    loop.run()
    assert looked == [1, 2]


def test_the_problem_is_named_also_where_the_batch_is_part_of_the_rollouts(tmp_path: Path) -> None:
    """A mini-batch, or what was selected, in an order of its own: its second sequence is not the second rollout."""
    loop = make(tmp_path)
    parts = [segment([3, 4], False), segment(range(3, 9), True, [-1.0] * 6)]
    groups = [group([rollout(parts, float(n), f"p{number}", n) for n in range(2)]) for number in range(3)]
    batch = gather(pack_groups(groups, 1.0), [5, 2])
    behaviour_T = batch.behaviour_T.clone()
    behaviour_T[-1] = math.nan
    assert loop.stage_monitor.keep(1, batch.replace(behaviour_T=behaviour_T), groups).endswith("not finite: p1)")


def test_log_probs_of_another_model_stop_the_run(tmp_path: Path) -> None:
    def plant(step: int, groups: list[Group]) -> list[Group]:
        def shifted(r):  # type: ignore[no-untyped-def]
            return text(r.segments[1].ids.tolist(), r.score.value, (r.segments[1].logprobs - 0.4).tolist(), r.sample)

        return groups if step < 2 else [group([shifted(r) for r in g.rollouts], g.problem.id) for g in groups]

    with pytest.raises(
        GuardStop, match=r"mismatch: step 3: 0.4 mean difference of log-prob between sampler and trainer, above 0.1"
    ):
        make(tmp_path, plant=plant).run()


def test_frozen_weights_that_move_stop_the_run_before_a_checkpoint(tmp_path: Path) -> None:
    loop = make(tmp_path, GRPO(beta=0.04))

    def plant(step: int, groups: list[Group]) -> list[Group]:
        if step == 2:
            with torch.no_grad():
                next(loop.trainer.roles[0].frozen.parameters())[0, 0] += 1e-6
        return groups

    loop.source.plant = plant  # type: ignore[attr-defined]
    with pytest.raises(GuardStop, match="frozen: step 3: weights that must not move"):
        loop.run()
    assert checkpoint_steps(loop) == [2, 1]


def test_weights_under_adapters_are_frozen_too(tmp_path: Path) -> None:
    loop = make(tmp_path)
    base = dict(loop.trainer.policy.model.named_parameters())["model.layers.0.mlp.up_proj.weight"].requires_grad_(False)
    first = loop.trainer.checksum()
    assert first is not None and first == loop.trainer.checksum()

    def plant(step: int, groups: list[Group]) -> list[Group]:
        with torch.no_grad():
            base[0, 0] += 1.0 if step == 3 else 0.0
        return groups

    loop.source.plant = plant  # type: ignore[attr-defined]
    with pytest.raises(GuardStop, match="frozen: step 4"):
        loop.run()
    assert checkpoint_steps(loop) == [3, 2]


@dataclass(frozen=True, kw_only=True)
class Forgetful(Algorithm):
    """Has two coefficients and uses one."""

    learns_from: ClassVar[str] = "demonstrations"
    used: float = 1.5
    forgotten: float = 0.5

    def prepare(self, step: Batch, state: State) -> Batch:
        return step.replace(weight_T=reduction("token_mean", step.mask_T, step.sequence_T, step.sequences))

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        assert batch.weight_T is not None
        return Terms((Term("nll", self.used * (-outputs.logprob_T).where(batch.mask_T, 0.0), batch.weight_T),))


@pytest.mark.parametrize(
    ("state", "why"),
    [({"mean": torch.zeros(2)}, "Tensor cannot be saved in a checkpoint"), ({"best": -math.inf}, ".*not JSON compliant.*"),
     (None, "it is a NoneType"), ({"seen": {1}}, "set cannot be saved in a checkpoint")],
)  # fmt: skip
@pytest.mark.parametrize("method", ["start", "finish"])
def test_a_state_that_no_checkpoint_holds_is_refused_at_once(
    method: str, state: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forgetful, method, lambda *given: state)
    loop = make(tmp_path, Forgetful(), steps=3)
    asked = "Forgetful: start and finish return a dict of finite numbers, texts, lists and dicts, which checkpoints hold"
    with pytest.raises(UserError, match=f"^{asked}; {why}$"):
        loop.run()
    assert loop.step == 0


def test_a_dead_coefficient_is_said_once(tmp_path: Path) -> None:
    loop = make(tmp_path, Forgetful(), steps=3)
    loop.run()
    assert alarm_events(loop) == [("coefficient", False)]
    event = next(e for e in Run(loop.writer.directory).events() if e.kind == "alarm")
    assert "forgotten" in event.details["text"] and "used" not in event.details["text"]


def test_without_a_chosen_coefficient_no_batch_is_prepared_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "dead_coefficients", None)
    loop = make(tmp_path, GRPO(beta=0.0), steps=1)
    loop.run()
    assert loop.stage_monitor.monitor.coefficients_checked


def test_out_of_memory_stops_with_the_setting_to_change(tmp_path: Path) -> None:
    loop = make(tmp_path)
    plain = loop.trainer.update

    def update(*arguments: Any) -> Any:
        if loop.step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return plain(*arguments)

    loop.trainer.update = update  # type: ignore[method-assign]
    with pytest.raises(
        GuardStop, match=r"memory: step 2: out of memory .*token_budget \(now 8192.*the checkpoint step-1 is intact"
    ):
        loop.run()


def test_a_step_that_hangs_leaves_the_stacks_of_every_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_SECONDS", 0.3)

    def plant(step: int, groups: list[Group]) -> list[Group]:
        if step == 6:
            time.sleep(1.0)
        return groups

    loop = make(tmp_path, plant=plant, steps=8, every=100, monitor=MonitorSettings(slow=2.0))
    loop.run()
    assert alarm_events(loop) == [("slow", False)]
    stacks = (tmp_path / "run" / "alarms" / "rl-stacks.txt").read_text()
    assert "in plant" in stacks and "one_step" in stacks


def test_a_run_that_a_guard_stopped_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """The alarm's memory is in the checkpoint: a resumed run has the same figures, and the same first steps to compare with."""
    whole = make(tmp_path / "whole", steps=8)
    whole.run()
    halted = make(tmp_path / "halted", steps=8, plant=lambda step, groups: groups)
    halted.interrupt.requested = False
    halted.schedule = replace(halted.schedule, steps=4)
    halted.run()
    halted.save()
    halted.writer.close()
    resumed = make_again(tmp_path / "halted", 8)
    resumed.run()
    assert resumed.stage_monitor.monitor.state() == whole.stage_monitor.monitor.state()
    assert resumed.stage_monitor.monitor.history.first["entropy"][1] > module.START
    assert all(torch.equal(t, moments(whole)[name]) for name, t in moments(resumed).items())


def make_again(folder: Path, steps: int) -> Loop:
    return make(folder, steps=steps, writer=RunWriter.resume(folder / "run"))


def test_the_best_held_out_score_is_kept_with_its_step_and_resumed(tmp_path: Path) -> None:
    scores = iter([0.2, 0.5, 0.7, 0.7, 0.6])
    loop = make(tmp_path, steps=4, evaluate=lambda: {"accuracy/test": next(scores), "accuracy/test_low": 0.9})
    loop.schedule = replace(loop.schedule, evaluate_every=1)
    loop.run()
    loop.save()
    assert loop.best_figures() == {"best_score": {"figure": "accuracy/test", "score": 0.7, "step": 2}}
    loop.writer.close()
    resumed = make_again(tmp_path, 5)
    resumed.evaluate = lambda: {"accuracy/test": 0.65}
    resumed.schedule = replace(resumed.schedule, evaluate_every=1)
    resumed.run()
    assert resumed.best == loop.best, "what came before the resume counts"


def best_of(folder: Path, scores: Sequence[float], steps: int, every: int = 2, writer: RunWriter | None = None) -> Loop:
    """A loop that keeps the best of these scores, of steps 0, 1, 2, ..."""
    loop = make(folder, steps=steps, every=every, writer=writer, keep_best=True)
    loop.evaluate = lambda: {"accuracy/test": scores[loop.step]}
    loop.schedule = replace(loop.schedule, evaluate_every=1)
    return loop


def weights(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in loop.trainer.weights().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_keep_best_ends_with_the_weights_of_the_best_score(tmp_path: Path) -> None:
    short = make(tmp_path / "short", steps=2)
    short.run()
    whole = best_of(tmp_path / "whole", (0.1, 0.3, 0.8, 0.5, 0.2), 4)
    whole.run()
    assert same(weights(whole), weights(short)), "those after step 2"
    assert whole.best_figures()["kept_step"] == 2
    (said,) = [e for e in Run(tmp_path / "whole" / "run").events() if "keep=best" in str(e.details.get("text"))]
    assert said.details["text"] == "keep=best: the model is that of step 2 of 4, with accuracy/test 0.8"
    with pytest.raises(UserError, match="rl: keep=best needs held-out scores, and nothing is held out"):
        make(tmp_path / "none", keep_best=True).run()


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_keep_best_is_the_same_after_a_resume(stop: int, tmp_path: Path) -> None:
    """Scores that rise after the last checkpoint are measured again; a best from before it is still there, though better ones, of
    steps that the resume gave up, were kept meanwhile."""
    scores = (0.1, 0.6, 0.5, 0.7, 0.8, 0.4, 0.3)
    whole = best_of(tmp_path / "whole", scores, 6)
    whole.run()
    first = best_of(tmp_path / "halted", scores, 6)
    first.on_step = lambda loop, row: (_ for _ in ()).throw(KeyboardInterrupt) if loop.step == stop else None
    with pytest.raises(KeyboardInterrupt):
        first.run()
    first.writer.close()
    resumed = best_of(tmp_path / "halted", scores, 6, writer=RunWriter.resume(tmp_path / "halted" / "run"))
    resumed.run()
    assert resumed.best == whole.best and whole.best is not None and whole.best.step == 4
    assert same(weights(resumed), weights(whole))
    (tmp_path / "halted" / "run" / "checkpoints" / "best" / "step-4" / "model.safetensors").write_bytes(b"")
    resumed.writer.close()
    again = best_of(tmp_path / "halted", scores, 6, writer=RunWriter.resume(tmp_path / "halted" / "run"))
    again.run()
    assert again.best is not None and again.best.step == 5, "what is damaged is not kept"


def test_keep_best_finds_the_best_that_a_checkpoint_names(tmp_path: Path) -> None:
    """Its weights are not removed when a better step comes that the resumed run, which is now shorter, does not reach."""
    scores = (0.1, 0.6, 0.5, 0.9, 0.0)
    first = best_of(tmp_path, scores, 6)
    first.on_step = lambda loop, row: (_ for _ in ()).throw(KeyboardInterrupt) if loop.step == 3 else None
    with pytest.raises(KeyboardInterrupt):
        first.run()
    first.writer.close()
    resumed = best_of(tmp_path, scores, 2, writer=RunWriter.resume(tmp_path / "run"))
    resumed.run()
    short = make(tmp_path / "short", steps=1)
    short.run()
    assert resumed.best_figures()["kept_step"] == 1 and same(weights(resumed), weights(short))


def plateau_of(folder: Path, scores: Sequence[float], plateau: int, writer: RunWriter | None = None) -> Loop:
    loop = best_of(folder, scores, len(scores) - 1, writer=writer)
    loop.schedule = replace(loop.schedule, stop=Stop(plateau=plateau))
    return loop


@pytest.mark.parametrize("halt", [2, 3])
def test_a_plateau_of_the_held_out_score_ends_the_stage_with_its_best_step(halt: int, tmp_path: Path) -> None:
    """Equal is not better; the end is an end, not an error, and the same after a resume in the middle of the plateau, or at its end."""
    scores = (0.1, 0.6, 0.5, 0.6, 0.9, 0.9)
    whole = plateau_of(tmp_path / "whole", scores, 2)
    whole.run()
    why = "step 3 of 5: no better than accuracy/test 0.6 of step 1 (stop.plateau=2)"
    assert whole.best_figures() == {
        "stopped": why,
        "best_score": {"figure": "accuracy/test", "score": 0.6, "step": 1},
        "kept_step": 1,
    }
    texts = [str(e.details.get("text")) for e in Run(tmp_path / "whole" / "run").events()]
    assert f"the stage ends at {why}" in texts
    first = plateau_of(tmp_path / "halted", scores, 2)
    first.on_step = lambda loop, row: setattr(loop.interrupt, "requested", loop.step == halt)
    with pytest.raises(Interrupted):
        first.run()
    first.writer.close()
    first = plateau_of(tmp_path / "halted", scores, 2, RunWriter.resume(tmp_path / "halted" / "run"))
    first.run()
    assert first.best_figures() == whole.best_figures() and same(weights(first), weights(whole))


def test_without_a_score_there_is_no_plateau(tmp_path: Path) -> None:
    loop = plateau_of(tmp_path, (math.nan,) * 5, 1)
    loop.run()
    assert loop.step == 4 and loop.best_figures() == {}
    nothing = make(tmp_path / "none")
    nothing.schedule = replace(nothing.schedule, stop=Stop(plateau=1))
    with pytest.raises(UserError, match="rl: stop.plateau needs held-out scores, and nothing is held out"):
        nothing.run()


def test_a_kl_above_the_limit_several_steps_in_a_row_ends_the_stage(tmp_path: Path) -> None:
    """One step above it does not, and what was counted is in the checkpoint. The last step is measured, as every last step is."""
    kls = (5.0, 11.0, 4.0, 12.0, math.nan, 13.0, 14.0, 15.0)

    def made(writer: RunWriter | None = None) -> Loop:
        loop = make(tmp_path, steps=8, writer=writer, evaluate=lambda: {"accuracy/test": 0.5})
        loop.schedule = replace(loop.schedule, stop=Stop(kl=10.0, kl_steps=2), evaluate_every=100)
        plain = loop.one_step
        loop.one_step = lambda: plain() | {"kl/response": kls[loop.step - 1]}  # type: ignore[method-assign]
        return loop

    first = made()
    for halt in (4, 6):
        first.on_step = lambda loop, row, halt=halt: setattr(loop.interrupt, "requested", loop.step == halt)  # type: ignore[misc]
        with pytest.raises(Interrupted):
            first.run()
        first.writer.close()
        first = made(RunWriter.resume(tmp_path / "run"))
    loop = first
    loop.run()
    assert loop.step == 6 and loop.stopped == "step 6 of 8: a KL of 13 nats a response (stop.kl=10)"
    assert "accuracy/test" in Run(tmp_path / "run").metrics("rl")[-1].figures


def test_a_checkpoint_of_an_older_version_goes_on(tmp_path: Path) -> None:
    """Format 1 had neither the frozen models' names nor the state of monitors and scores."""
    whole = make(tmp_path / "whole", steps=6)
    whole.run()
    first = make(tmp_path, steps=3)
    first.run()
    first.save()
    first.writer.close()
    folder = first.checkpoints.directory / "step-3"
    state = json.loads((folder / "state.json").read_text())
    old = {key: value for key, value in state.items() if key not in ("frozen", "monitor", "best")}
    (folder / "state.json").write_text(json.dumps(old))
    manifest = json.loads((folder / "manifest.json").read_text())
    content = (folder / "state.json").read_bytes()
    manifest["files"]["state.json"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 1}))
    resumed = make_again(tmp_path, 6)
    resumed.run()
    assert resumed.step == 6
    assert all(torch.equal(tensor, moments(whole)[name]) for name, tensor in moments(resumed).items())


def test_a_checkpoint_of_a_newer_version_says_why_it_cannot(tmp_path: Path) -> None:
    first = make(tmp_path, steps=2)
    first.run()
    first.save()
    first.writer.close()
    for path in first.checkpoints.directory.glob("step-*/manifest.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(UserError, match="is of format 99, this version of posttrain reads 1 and 2"):
        make_again(tmp_path, 6).run()


def test_zero_is_never_and_less_is_refused(tmp_path: Path) -> None:
    loop = make(tmp_path, steps=3, every=0)
    loop.run()
    assert loop.step == 3 and checkpoint_steps(loop) == []
    with pytest.raises(UserError, match="checkpoint_every must be 0 \\(never\\) or a number of steps, not -1"):
        LoopSchedule(steps=3, checkpoint_every=-1)
