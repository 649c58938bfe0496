"""CPU time of the host's part of a step of gpu_grpo_step.py, without a GPU: every tensor is on torch's meta device, which computes
nothing, and the kernels, graphs and the optimizer's step do nothing.

    python benchmarks/host_grpo_step.py                      # case d
    python benchmarks/host_grpo_step.py --cases a,b --steps 9
    python benchmarks/host_grpo_step.py --against FOLDER     # another checkout, a step of each in turn, in this process

The answers are random tokens that were drawn beforehand. A GPU is idle in the parts marked with *; in the others it has work queued.
Copies take no time here, and some operations of the meta device are slower to start than kernels, so compare two versions of the
package, not a part with a GPU's time. Prints the median milliseconds of each part; of two versions those of both, and the median of
what this one takes of the other's. One JSON line last.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import gpu_grpo_step  # noqa: E402
from gpu_cases import CASES, STOP, Case, make_model  # noqa: E402

from posttrain.engine import cuda  # noqa: E402
from posttrain.engine import engine as engine_module  # noqa: E402
from posttrain.engine.fused import Fused  # noqa: E402
from posttrain.engine.rows import Drawn  # noqa: E402
from posttrain.loop import collect_garbage, manual_garbage_collection  # noqa: E402
from posttrain.models import layers  # noqa: E402
from posttrain.models.policy import Policy, wrap_model  # noqa: E402
from posttrain.train import forward  # noqa: E402
from posttrain.train.optimizer import Optimizer  # noqa: E402

LAYERS = 8  # at most: the host's part of a layer is in graphs, or is not timed
WARM_UP = 2  # steps
COPIED = {"posttrain", "gpu_cases", "gpu_grpo_step"}  # of each checkout its own
ALL = "* all parts in which a GPU is idle"


class Marks(list[tuple[str, float]]):
    """Events of a step with the process's CPU time."""

    def add(self, name: str) -> None:
        self.append((name, time.process_time()))

    def of(self, name: str) -> list[float]:
        return [seconds for other, seconds in self if other == name]

    def parts(self) -> dict[str, float]:
        """Milliseconds between events."""
        spans = {
            "* until the prompts are computed": (self.of("begin")[0], self.of("prefill")[0]),
            "* from their first tokens to the first burst": (self.of("read")[0], self.of("burst")[0]),
            "while bursts are computed": (self.of("burst")[0], self.of("collect")[-1]),
            "* from the last burst until the batch is packed": (self.of("collect")[-1], self.of("packed")[0]),
            "* from there to the first training kernel": (self.of("packed")[0], self.of("forward")[0]),
            "after the last micro-batch was begun": (self.of("forward")[-1], self.of("end")[0]),
        }
        found = {name: 1000 * (end - begin) for name, (begin, end) in spans.items()}
        found[ALL] = sum(milliseconds for name, milliseconds in found.items() if name.startswith("*"))
        between = [1000 * (b - a) for a, b in pairwise(self.of("forward"))]
        return found | ({"from one micro-batch to the next": statistics.mean(between)} if between else {})


class Graph:
    """A captured step that does nothing."""

    def __init__(self, marks: Marks):
        self.marks = marks

    def replay(self) -> None:
        if self.marks[-1][0] == "read":
            self.marks.add("burst")


def make_policy(case: Case) -> Policy:
    """The case's model, without its numbers."""
    few = replace(case, layers=min(case.layers, LAYERS))
    policy = wrap_model(make_model(few, device="cpu"), None, (STOP,), "a model without numbers")
    policy.model.to("meta")
    return policy


@contextmanager
def without_a_device(case: Case, policy: Policy, marks: Marks) -> Iterator[None]:
    """Replace what needs a device, by what takes no time."""
    drawn = torch.from_numpy(np.random.default_rng(0).integers(3, case.vocabulary, (cuda.BURST, case.rows)))
    mask_T = torch.tensor(([False] * case.prompt + [True] * case.new) * case.rows)
    decoder = Fused(policy, described(policy))
    of, to_cpu, to_float = Drawn.of, Tensor.cpu, Tensor.__float__

    def hidden(self: Fused, ids_T: Tensor, *rest: Any) -> Tensor:
        marks.add("prefill")
        return torch.empty(len(ids_T), case.hidden, device="meta")

    def take(self: Drawn, steps: int) -> None:
        if not self.steps:  # its memory is new
            self.ids.copy_(drawn)
        self.steps = steps

    def collected(self: Drawn, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        marks.add("collect")
        return of(self, order)

    def cpu(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return to_cpu(tensor)
        if tensor.shape == mask_T.shape:
            return mask_T.clone()
        marks.add("read")
        return torch.full(tensor.shape, 3, dtype=tensor.dtype)

    class Body:
        def hidden(self, ids_K: Tensor, *rest: Any) -> Tensor:
            marks.add("forward")
            return policy.head.weight_VH[:1].expand(len(ids_K), -1)

    def logprobs(hidden_MH: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return hidden_MH[:, 0].float(), hidden_MH[:, 1].float()

    replaced: list[tuple[Any, str, Any]] = [
        (engine_module, "PAGED_DEVICES", {"meta"}),
        (engine_module, "fused", lambda *_: (decoder, "")),
        (Fused, "hidden", hidden),
        (cuda, "usable_bytes", lambda _: 2.0**40),
        (cuda, "sample", lambda *_: (None, None)),
        (cuda, "advance", lambda *_: None),
        (cuda.CUDABackend, "_capture", lambda *_: Graph(marks)),
        (Drawn, "look", lambda self: self.done.zero_()),
        (Drawn, "take", take),
        (Drawn, "of", collected),
        (Tensor, "cpu", cpu),
        (Tensor, "__int__", lambda tensor: case.prompts - 1 if tensor.is_meta else int(tensor.item())),
        (Tensor, "__float__", lambda tensor: 1.0 if tensor.is_meta else to_float(tensor)),
        (forward, "fused_body", lambda _: Body()),
        (forward, "token_logprobs", logprobs),
        (Optimizer, "_update", lambda _: None),
        (Optimizer, "norm", lambda _: torch.ones(())),
        (gpu_grpo_step, "make_policy", lambda _: policy),
    ]
    with ExitStack() as stack:
        for where, name, other in replaced:
            stack.enter_context(patch.object(where, name, other))
        yield


def described(policy: Policy) -> layers.ModelDescription:
    found = layers.describe(policy)
    assert isinstance(found, layers.ModelDescription), found
    return found


def one_step(ours: gpu_grpo_step.Ours, seed: int, marks: Marks) -> dict[str, float]:
    marks.clear()
    marks.add("begin")
    batch = ours.rollout(seed)
    marks.add("packed")
    prepared = ours.algorithm.prepare(batch, ours.algorithm.start())
    update = ours.trainer.update(prepared, 1e-6, collect_garbage)
    marks.add("end")
    assert update.moved
    return marks.parts()


def steps_of(case: Case, budget: int) -> Callable[[int], dict[str, float]]:
    """A function that takes a step and returns the milliseconds of its parts."""
    policy, marks = make_policy(case), Marks()
    with without_a_device(case, policy, marks):
        ours = gpu_grpo_step.Ours(case, budget)

    def step(seed: int) -> dict[str, float]:
        with without_a_device(case, policy, marks):
            return one_step(ours, seed, marks)

    return step


def of_checkout(folder: Path) -> Any:
    """This script with the package and the benchmarks of another checkout."""
    own = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in COPIED}
    sys.path[:0] = [str(folder / "benchmarks"), str(folder)]
    try:
        importlib.import_module("gpu_grpo_step")
        found = importlib.util.spec_from_file_location("host_grpo_step_of_another", __file__)
        assert found is not None and found.loader is not None
        script = importlib.util.module_from_spec(found)
        sys.modules[found.name] = script
        found.loader.exec_module(script)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in COPIED]:
            del sys.modules[name]
        sys.modules.update(own)
    assert Path(script.cuda.__file__).is_relative_to(folder.resolve()), f"{folder} is no checkout"
    return script


def run_case(name: str, steps: int, budget: int | None, other: Any = None) -> list[list[dict[str, float]]]:
    """The parts of each step; where there is another checkout, its own after them."""
    case, tokens = CASES[name], budget or gpu_grpo_step.BUDGETS[name]
    versions = [steps_of(case, tokens)]
    if other is not None:
        versions.append(other.steps_of(other.CASES[name], tokens))
    with manual_garbage_collection():
        rows = [[step(seed) for step in versions] for seed in range(WARM_UP + steps)][WARM_UP:]
    return [list(column) for column in zip(*rows, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="d")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--against", type=Path, help="another checkout")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    other, found = given.against and of_checkout(given.against), dict[str, dict[str, list[float]]]()
    for name in given.cases.split(","):
        versions, found[name] = run_case(name, given.steps, given.budget, other), {}
        for part in versions[0][0]:
            columns = [[row[part] for row in rows] for rows in versions]
            figures = [statistics.median(column) for column in columns]
            if other is not None:
                figures.append(statistics.median(mine / its for mine, its in zip(*columns, strict=True)))
            print(name, *(f"{figure:8.2f}" for figure in figures), f" {part}")
            found[name][part] = figures
    print(json.dumps({"benchmark": "host_grpo_step", "found": found}))


if __name__ == "__main__":
    main()
