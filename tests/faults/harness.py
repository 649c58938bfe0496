"""Runs that kill themselves: a child process counts the moments at which it could die, and dies at a chosen one.

Children are forked from the process of the tests, so that a kill costs no imports. Where there is a GPU, whose driver no fork survives,
they are forked from a server that has imported torch but computed nothing.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib.util
import json
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.runs.read import Run

PRELOAD = ["tests.faults.preload"]
TIMES = ("seconds", "tokens_per_second", "elapsed", "time", "memory")
LETTERS = str(Path(__file__).with_name("letters.py")) + ":Letters"
INSIDE_A_SAVE = ("save_file", "sync", "_digest", "_write_json", "prune", "rename")
KINDS = ("sft", "reward_model", "ppo", "dapo", "dpo", "pipeline", "quickstart")
if importlib.util.find_spec("peft") is not None:
    KINDS = (*KINDS, "lora")

# The shipped recipe in seconds, by the keys a person would give it: few demonstrations of one-digit sums, learned well enough that
# some samples of RL are right. A low threshold then opens the next level in the middle of the stage.
QUICKSTART = {
    "sft.data": [{"task": {"name": "arithmetic", "level": 1}, "counts": {1: 40}}],
    "sft.steps": 24,
    "sft.optimizer.lr": 5e-3,
    "sft.optimizer.warmup": 4,
    "sft.checkpoint_every": 12,
    "before.problems": 4,
    "after.problems": 4,
    "rl.task.level": 2,
    "rl.steps": 6,
    "rl.prompts": 4,
    "rl.curriculum.start": 1,
    "rl.curriculum.window": 8,
    "rl.curriculum.threshold": 0.05,
    "rl.curriculum.review": 0.5,
    "rl.evaluate_every": 3,
    "rl.evaluate_problems": 4,
    "rl.checkpoint_every": 2,
    "rl.rollouts_every": 1,
}


@dataclass(frozen=True)
class Fate:
    """When a child dies, and of what: at moment `number` (0: never) of all moments, or of those inside a save."""

    number: int = 0
    inside_a_save: bool = False
    by: int = signal.SIGKILL


LIVE = Fate()
LONGEST = 300.0  # seconds of a child


def settings(kind: str, directory: Path) -> Any:
    """A tiny run of a kind. What it reads lies beside the run directory, and is the same for every run."""
    from posttrain import catalogue
    from posttrain.algorithms.dapo import DAPO
    from posttrain.algorithms.dpo import DPO
    from posttrain.algorithms.ppo import PPO
    from posttrain.config import Settings
    from posttrain.data.curriculum import Curriculum
    from posttrain.models.lora import Lora
    from posttrain.recipes.base import Recipe
    from posttrain.stages._material import Data
    from posttrain.stages.preference import PreferenceStage
    from posttrain.stages.reward_model import RewardModelStage
    from posttrain.stages.reward_sources import RewardModels
    from posttrain.stages.rl import RLStage
    from posttrain.stages.sft import SFTStage
    from posttrain.tasks.arithmetic import Arithmetic
    from posttrain.train.optimizer import Optimization
    from posttrain.types import Sampling

    quick = Optimization(lr=3e-3, warmup=2, schedule="cosine", token_budget=400)
    data, model = (str(directory.parent / "pairs.jsonl"),), "tiny:nano"
    if kind in ("reward_model", "dpo", "pipeline", "lora"):
        write_pairs(Path(data[0]))
    letters = catalogue.load("task", LETTERS)
    rl = RLStage(
        name="rl", model=model, task=letters(), steps=5, prompts=2, sampling=Sampling(6), curriculum=Curriculum(), optimizer=quick,
        evaluate_every=3, evaluate_problems=2, checkpoint_every=2, rollouts_every=1,
    )  # fmt: skip
    sft = SFTStage(
        name="sft", model=model, data=(Data(task=Arithmetic(level=1), counts={1: 20}),), steps=6, batch=3, optimizer=quick,
        checkpoint_every=2,
    )  # fmt: skip
    reward = RewardModelStage(
        name="reward",
        model=model,
        data=data,
        steps=4,
        batch=3,
        members=2,
        optimizer=quick,
        evaluate_every=3,
        checkpoint_every=2,
    )
    preference = PreferenceStage(
        name="dpo",
        model=model,
        data=data,
        algorithm=DPO(),
        steps=5,
        batch=3,
        optimizer=quick,
        evaluate_every=3,
        checkpoint_every=2,
    )
    ppo = PPO(epochs=2, mini_batches=2, kl_target=0.5, kl_horizon=20)
    stages = {
        "sft": (sft,),
        "reward_model": (reward,),
        "ppo": (replace(rl, algorithm=ppo, task=letters(workers=False)),),
        "dapo": (replace(rl, algorithm=DAPO(group=2, l_max=0, l_cache=0), watch_kl=True),),
        "dpo": (preference,),
        "lora": tuple(replace(one, lora=Lora(rank=2), keep="best", evaluate_every=1) for one in (preference, reward)),
        # the reward model of one stage is what the next learns from, and where its critic starts
        "pipeline": (
            replace(reward, steps=3, members=1),
            replace(
                rl,
                steps=3,
                algorithm=ppo,
                task=letters(workers=False),
                reward=RewardModels(models=("reward",)),
                critic="reward",
            ),
        ),
    }[kind]
    keep = 1 if kind == "sft" else 2  # so that a save also removes one
    return Settings(Recipe(stages), kind, device="cpu", threads=1, out=str(directory), checkpoint_keep=keep)


def shipped(directory: Path) -> Any:
    """The recipe quickstart as it is shipped, SFT to evaluation, made small."""
    from posttrain.config import build
    from posttrain.recipes.quickstart import quickstart

    return build("quickstart", quickstart, {**QUICKSTART, "device": "cpu", "threads": 1, "out": str(directory)})


def write_pairs(path: Path) -> None:
    """Preferences for more of the letter z, as a file."""
    if not path.exists():
        chance = random.Random(0)
        words = ["".join(chance.choices("xyz", k=5)) for _ in range(80)]
        rows = [
            {"prompt": f"say {n}", "chosen": max(a, b, key=key), "rejected": min(a, b, key=key)}
            for n, (a, b) in enumerate(zip(words[::2], words[1::2], strict=True))
            if (key := lambda word: word.count("z")) and a.count("z") != b.count("z")
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def child(kind: str, directory: str, fate: Fate, counted: Any, saves: Any) -> None:
    """Start or continue the run; die at the chosen moment."""
    # the clock of the tests themselves has not survived the fork, and to stop it would be to wait for it
    faulthandler.dump_traceback_later = faulthandler.cancel_dump_traceback_later = lambda *_, **__: None
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    hook(fate, counted, saves)
    from posttrain import pipeline
    from posttrain.errors import Interrupted

    pipeline.draw = lambda *_: None  # type: ignore[assignment]  # a picture takes as long as the training here

    folder = Path(directory)
    with open(folder.parent / "said.txt", "a", buffering=1) as said:  # what children say is nobody's business while tests run
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    try:
        if (folder / "config.yaml").is_file():
            pipeline.resume(folder, allow_code=True)
        else:
            pipeline.start(shipped(folder) if kind == "quickstart" else settings(kind, folder))
    except Interrupted:
        sys.exit(130)


def hook(fate: Fate, counted: Any, saves: Any) -> None:
    """Make every moment that matters count: generation, scoring, updates, each file of a save, its syncs and its rename. Saves happen
    in a thread of their own, so two moments may come at once."""
    from posttrain import collect as rollouts
    from posttrain import loop
    from posttrain.engine.engine import Engine
    from posttrain.runs.write import RunWriter
    from posttrain.stages.base import Context
    from posttrain.system import files
    from posttrain.train import checkpoint
    from posttrain.train.trainer import Trainer
    from posttrain.turns import Turns

    process = os.getpid()

    def moment(name: str) -> None:
        if os.getpid() != process:  # a reward's worker: what it is told to do is another story
            return
        counter = saves if fate.inside_a_save else counted
        with counted.get_lock():
            counted.value += 1
            saves.value += name in INSIDE_A_SAVE
            due = counter.value == fate.number and (not fate.inside_a_save or name in INSIDE_A_SAVE)
        if due:
            os.kill(process, fate.by)

    def wrap(owner: Any, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            if name == "sync" and "checkpoints" not in args[0].parts:  # of a model or a result
                return inner(*args, **kwargs)
            moment(name)
            result = inner(*args, **kwargs)
            moment(name)
            return result

        setattr(owner, name, outer)

    for owner, name in (
        (Engine, "submit"), (Turns, "submit"), (rollouts, "rollout_groups"), (Trainer, "forward_backward"), (Trainer, "update"),
        (checkpoint, "save_file"), (files, "sync"), (checkpoint, "_digest"), (checkpoint, "_write_json"),
        (checkpoint, "prune"), (loop.Loop, "save"), (RunWriter, "metrics"), (RunWriter, "event"), (RunWriter, "rollouts"),
        (Context, "finish"), (Context, "save_model"), (Path, "rename"),
    ):  # fmt: skip
        wrap(owner, name)


@dataclass(frozen=True)
class Life:
    """How a child ended, and how many moments it had."""

    code: int
    moments: int
    saves: int


class Server:
    """Starts children and says how they ended."""

    def __init__(self) -> None:
        import torch

        self.context = multiprocessing.get_context("forkserver" if torch.cuda.is_available() else "fork")
        self.context.set_forkserver_preload(PRELOAD)
        if not torch.cuda.is_available():
            import tests.faults.preload  # noqa: F401

    def run(self, kind: str, directory: Path, fate: Fate = LIVE) -> Life:
        counted, saves = self.context.Value("i", 0), self.context.Value("i", 0)
        process = self.context.Process(target=child, args=(kind, str(directory), fate, counted, saves))
        process.start()
        process.join(LONGEST)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"the run in {directory} hangs")
        return Life(process.exitcode, counted.value, saves.value)


def fingerprint(directory: Path) -> dict[str, Any]:
    """Everything of a run that must not depend on how often it died: figures, sampled text and ids, weights."""
    run = Run(directory)
    figures = [
        (row.stage, row.step, sorted((k, v.hex()) for k, v in row.figures.items() if not k.startswith(TIMES)))
        for row in run.metrics()
    ]
    rollouts = {}
    for stage in run.stages():
        for step in run.rollout_steps(stage):
            rows = [(r.problem, r.sample, r.response, r.reward, r.advantage) for r in run.rollouts(stage, step)]
            arrays = run.arrays(stage, step)
            found = None if arrays is None else {k: v.tobytes() for k, v in sorted(arrays.arrays.items())}
            rollouts[stage, step] = (rows, found)
    weights = {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.glob("stages/*/model*/*.safetensors"))
    }
    problems = {str(p.relative_to(directory)): p.read_text() for p in sorted(directory.glob("stages/*/problems.jsonl"))}
    return {"figures": figures, "rollouts": rollouts, "weights": weights, "problems": problems}
