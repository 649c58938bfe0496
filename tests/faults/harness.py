"""Runs that kill themselves: a child process counts the moments at which it could die, and dies at a chosen one.

Children are forked from a server that has imported torch but computed nothing, so that a kill costs seconds, not imports.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.runs.read import Run

ARGUMENTS = (
    "threads=1",
    "sft.steps=8",
    "sft.batch=4",
    "sft.checkpoint_every=3",
    "rl.steps=8",
    "rl.prompts=2",
    "rl.group=2",
    "rl.beta=0.04",
    "rl.checkpoint_every=3",
    "rl.rollouts_every=1",
    "rl.evaluate_every=4",
    "rl.evaluate_problems=4",
    "before.problems=8",
    "after.problems=8",
)
PRELOAD = ["torch", "transformers", "posttrain.pipeline", "posttrain.recipes.quickstart", "tests.faults.harness"]
TIMES = ("seconds", "tokens_per_second", "elapsed", "time")


def child(directory: str, arguments: tuple[str, ...], fatal: int, counted: Any) -> None:
    """Start or continue the run; die by SIGKILL at moment number `fatal` (0: live)."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    hook(fatal, counted)
    from posttrain import config, pipeline

    if (Path(directory) / "config.yaml").is_file():
        pipeline.resume(Path(directory))
    else:
        pipeline.start(config.parse("quickstart", [*arguments, f"out={directory}"]))


def hook(fatal: int, counted: Any) -> None:
    """Make every moment that matters count: generation, scoring, updates, each file of a save, its syncs and its rename."""
    from posttrain import loop, scoring
    from posttrain.engine.engine import Engine
    from posttrain.runs.write import RunWriter
    from posttrain.stages.base import Context
    from posttrain.train import checkpoint
    from posttrain.train.trainer import Trainer

    def moment() -> None:
        counted.value += 1
        if counted.value == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(owner: Any, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            moment()
            result = inner(*args, **kwargs)
            moment()
            return result

        setattr(owner, name, outer)

    for owner, name in (
        (Engine, "generate"), (scoring, "score_one"), (Trainer, "forward_backward"), (Trainer, "update"),
        (checkpoint, "save_file"), (checkpoint, "_sync"), (checkpoint, "_digest"), (checkpoint, "_write_json"),
        (checkpoint, "prune"), (loop.Loop, "save"), (RunWriter, "metrics"), (RunWriter, "event"), (RunWriter, "rollouts"),
        (Context, "finish"), (Context, "save_model"), (Path, "rename"),
    ):  # fmt: skip
        wrap(owner, name)


class Server:
    """Starts children and says how they ended."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)

    def run(self, directory: Path, fatal: int = 0, arguments: tuple[str, ...] = ARGUMENTS) -> tuple[int, int]:
        """(exit code, moments counted)."""
        counted = self.context.Value("i", 0)
        process = self.context.Process(target=child, args=(str(directory), arguments, fatal, counted))
        process.start()
        process.join(300)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"the run in {directory} hangs")
        return process.exitcode, counted.value


def fingerprint(directory: Path) -> dict[str, Any]:
    """Everything of a run that must not depend on how often it died: figures, sampled text and ids, weights."""
    run = Run(directory)
    figures = [
        (row.stage, row.step, sorted((k, v.hex()) for k, v in row.figures.items() if not k.startswith(TIMES)))
        for row in run.metrics()
    ]
    rollouts = {}
    for step in run.rollout_steps("rl"):
        rows = [(r.problem, r.sample, r.response, r.reward, r.advantage) for r in run.rollouts("rl", step)]
        arrays = run.arrays("rl", step)
        rollouts[step] = (rows, None if arrays is None else {k: v.tobytes() for k, v in sorted(arrays.arrays.items())})
    weights = {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.glob("stages/*/model/*.safetensors"))
    }
    problems = {str(p.relative_to(directory)): p.read_text() for p in sorted(directory.glob("stages/*/problems.jsonl"))}
    return {"figures": figures, "rollouts": rollouts, "weights": weights, "problems": problems}
