"""What changes while a stage trains is in its checkpoint, or is declared derived here with the reason. Nothing else may change.

Everything that can be reached from the loop is walked before training, after some steps, and in a new loop that resumed from a
checkpoint. A value that moved must come back to the bit; a field that somebody adds and forgets to save is found here, not in a run
that continues a little differently after a crash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import random
import re
import types
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.dapo import DAPO
from posttrain.algorithms.ppo import PPO
from posttrain.algorithms.reinforce import Reinforce
from posttrain.data.curriculum import Curriculum
from posttrain.loop import Loop
from posttrain.runs.write import RunWriter
from posttrain.stages._material import Data
from posttrain.stages.base import Context, Stage
from posttrain.stages.rl import RLStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Task
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling
from tests.faults.letters import Letters

# Paths that change and are not saved, and why a resumed run does not need them.
DERIVED = {
    r"loop\.elapsed": "wall time, saved; two attempts differ in it by what they measure",
    r"loop\.stage_monitor\.monitor\.seconds.*": "how long recent steps took: another attempt may run on another machine",
    r"loop\.identities.*": "of the frozen models' weights, worked out once, compared on resume",
    r".*\.training": "set by whoever uses the model next, before it uses it",
    r".*\.grad": "dropped after every update",
    r".*optimizer\.adam\.param_groups.*": "the rate is set before every update, from the step",
    r".*\.(sampler|source\.sampler)\.(scheduler|pool|memory|numbers|took_over).*": "caches, and counts of tokens",
    r"loop\.(source|pretraining)\.decoder.*": "a cache of what tokens decode to",
    r"loop\.source\.looked_ahead.*": "prompts rendered ahead, used only where the same problems are drawn",
    r"global\.cuda": "saved where there is a device",
}
# Not state of the training: what writes it down, and what it reads.
SKIPPED = {"writer", "trackers", "checkpoints", "interrupt", "evaluate", "tokenizer", "task", "config", "generation_config"}
PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, Path, np.generic)
CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type, property, staticmethod)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def walk(value: Any, path: str, found: dict[str, str], seen: dict[int, Any]) -> None:
    """Note every leaf that can be reached, by a path that is the same in another process."""
    if isinstance(value, PLAIN):
        found[path] = repr(value)
        return
    if isinstance(value, CODE) or id(value) in seen:
        return
    seen[id(value)] = (path, value)  # kept alive, so that its id stays its own
    if isinstance(value, torch.Tensor):
        found[path] = f"{value.dtype} {tuple(value.shape)} {digest(value.detach().cpu().contiguous().numpy().tobytes())}"
        found[f"{path}.grad"] = "none" if value.grad is None else digest(value.grad.numpy().tobytes())
    elif isinstance(value, np.ndarray):
        found[path] = f"{value.dtype} {value.shape} {digest(np.ascontiguousarray(value).tobytes())}"
    elif isinstance(value, np.random.Generator):
        found[path] = repr(value.bit_generator.state)
    elif isinstance(value, torch.Generator):
        found[path] = digest(value.get_state().numpy().tobytes())
    elif isinstance(value, random.Random):
        found[path] = digest(repr(value.getstate()).encode())
    elif isinstance(value, itertools.count):
        found[path] = repr(value)
    elif isinstance(value, Mapping):
        found[f"{path}.len"] = str(len(value))
        for number, (key, item) in enumerate(
            value.items()
        ):  # optimizers have parameters as keys: those have paths of their own
            name = repr(key) if isinstance(key, str | int | tuple) else seen[id(key)][0] if id(key) in seen else f"#{number}"
            walk(item, f"{path}[{name}]", found, seen)
    elif isinstance(value, list | tuple | deque | set | frozenset):
        found[f"{path}.len"] = str(len(value))
        if len(value) > 1000:  # data
            found[path] = digest(repr(value).encode())
            return
        for number, item in enumerate(sorted(value, key=repr) if isinstance(value, set | frozenset) else value):
            walk(item, f"{path}[{number}]", found, seen)
    elif isinstance(value, nn.Module):
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            walk(tensor, f"{path}.{name}", found, seen)
        for name, module in value.named_modules():
            found[f"{path}.{name}.training"] = str(module.training)
    elif not (dataclasses.is_dataclass(value) and type(value).__dataclass_params__.frozen):  # type: ignore[attr-defined]
        slots = [s for kind in type(value).__mro__ for s in getattr(kind, "__slots__", ())]
        for name in dict.fromkeys([*getattr(value, "__dict__", {}), *slots]):
            if name not in SKIPPED and hasattr(value, name):
                walk(getattr(value, name), f"{path}.{name}", found, seen)


def everything(loop: Loop) -> dict[str, str]:
    found: dict[str, str] = {}
    walk(loop, "loop", found, {})
    generators = {"torch": digest(torch.get_rng_state().numpy().tobytes()), "numpy": digest(repr(np.random.get_state()).encode()),
                  "python": digest(repr(random.getstate()).encode())}  # fmt: skip
    return found | {f"global.{name}": value for name, value in generators.items()}


def lost(before: dict[str, str], after: dict[str, str], resumed: dict[str, str]) -> list[str]:
    """Paths that training changed, a resume does not bring back, and nobody declared derived."""
    moved = [path for path in after.keys() | before.keys() if before.get(path) != after.get(path)]
    return sorted(p for p in moved if resumed.get(p) != after.get(p) and not any(re.fullmatch(d, p) for d in DERIVED))


TASK = Arithmetic(level=2)
TEXT = (Data(task=Arithmetic(level=1), counts={1: 12}),)
FAST = Optimization(lr=1e-3, warmup=2, schedule="cosine")


def rl(algorithm: Algorithm, task: Task = TASK, **more: Any) -> RLStage:
    return RLStage(
        name="rl", model="tiny:nano", task=task, algorithm=algorithm, steps=3, prompts=2, sampling=Sampling(6), optimizer=FAST,
        evaluate_every=0, rollouts_every=1, **more,
    )  # fmt: skip


STAGES: dict[str, Stage] = {
    "sft": SFTStage(
        name="sft", model="tiny:nano", data=(*TEXT, Data(task=TASK, counts={2: 9})), steps=3, batch=4, optimizer=FAST
    ),
    "ppo": rl(
        PPO(group=2, epochs=2, mini_batches=2, kl_target=6.0, ptx=0.5, critic_warmup=1),
        curriculum=Curriculum(start=1, review=0.3),
        pretraining=TEXT,
        pretraining_batch=2,
    ),
    "dapo": rl(DAPO(group=2, l_max=0, l_cache=0), Letters(workers=False)),
    "reinforce": rl(Reinforce(beta=0.1), watch_kl=True),
}


class Prepared(Exception):
    """The loop of a stage, before it runs."""


def loop_of(stage: Stage, writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> Loop:
    """The loop that a stage makes, with everyone on stage."""
    made: list[Loop] = []

    def stop(self: Loop) -> None:
        made.append(self)
        raise Prepared

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "run", stop)
        torch.manual_seed(0)
        with pytest.raises(Prepared):
            stage.run(Context(writer, seed=0, threads=1, say=False))
    return made[0]


def train_and_resume(stage: Stage, folder: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any = None) -> list[str]:
    with RunWriter(folder / "run", config={"name": "state"}) as writer:
        loop = loop_of(stage, writer, monkeypatch)
        if spoil is not None:
            spoil(loop)
        before = everything(loop)
        loop.run()
        after = everything(loop)
        for part in (
            "loop.step",
            "loop.trainer.policy",
            "loop.trainer.optimizer.adam.state",
            "loop.source",
            "loop.stage_monitor.monitor",
        ):
            assert any(before.get(p) != after[p] for p in after if p.startswith(part)), (
                f"{part} is not looked at, or does not change"
            )
        loop.save()
        loop.checkpoints.finish()
    random.seed(5)
    torch.manual_seed(5)
    with RunWriter.resume(folder / "run") as writer:
        again = loop_of(stage, writer, monkeypatch)
        if spoil is not None:
            spoil(again)
        again.resume()
        return lost(before, after, everything(again))


@pytest.mark.parametrize("name", STAGES)
def test_what_changes_is_saved_or_declared_derived(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = train_and_resume(STAGES[name], tmp_path, monkeypatch)
    assert not found, "neither saved nor declared derived:\n" + "\n".join(found[:20])


@dataclasses.dataclass
class Forgotten:
    """An adaptive coefficient that somebody keeps in the trainer, and nobody saves."""

    inner: Any
    beta: float = 0.1
    history: list[float] = dataclasses.field(default_factory=list)

    def __call__(self, *given: Any) -> Any:
        self.beta *= 1.5
        self.history.append(self.beta)
        return self.inner(*given)


def test_a_field_that_is_not_saved_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(loop: Loop) -> None:
        loop.trainer.update = Forgotten(loop.trainer.update)  # type: ignore[method-assign]

    found = train_and_resume(STAGES["sft"], tmp_path, monkeypatch, spoil)
    assert {"loop.trainer.update.beta", "loop.trainer.update.history.len"} <= set(found)
    assert all(path.startswith("loop.trainer.update.") for path in found)


def test_every_kind_of_state_is_seen() -> None:
    generator, torch_generator, chance, numbers = (
        np.random.default_rng(0),
        torch.Generator(),
        random.Random(0),
        itertools.count(),
    )

    class Holder:
        def __init__(self) -> None:
            self.parts = {
                "a": [1, {"b": np.zeros(2)}],
                "chance": chance,
                "numpy": generator,
                "torch": torch_generator,
                "count": numbers,
            }
            self.weight = nn.Parameter(torch.zeros(2))
            self.queue = deque([1])

    holder = Holder()
    first: dict[str, str] = {}
    walk(holder, "h", first, {})
    holder.parts["a"][1]["b"][0] = 1.0  # type: ignore[index]
    holder.queue.append(2)
    next(numbers), chance.random(), generator.random(), torch.rand(1, generator=torch_generator)
    with torch.no_grad():
        holder.weight[1] = 1e-30
    second: dict[str, str] = {}
    walk(holder, "h", second, {})
    changed = {path for path in second if first.get(path) != second[path]}
    assert changed == {"h.parts['a'][1]['b']", "h.parts['chance']", "h.parts['numpy']", "h.parts['torch']", "h.parts['count']",
                       "h.weight", "h.queue.len", "h.queue[1]"}  # fmt: skip
