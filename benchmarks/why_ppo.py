"""Why PPO: rollouts that are used eight times each, by a plain policy gradient and by PPO.

Writes docs/why_ppo.png; prints a table, then one JSON line. The task: continue the alphabet from a given letter. Supervised learning
on careless demonstrations gives a model that gets about every second letter right. Three arms continue from it, over fixed seeds:

    policy gradient    -A_t log pi(y_t): no clip, no KL penalty
    clip               PPO's clipped ratio, no KL penalty
    PPO                the clip, and a KL penalty to the starting model in the reward

All arms have the same critic, kind of advantage, learning rate and number of rollouts a step. The score is the share of right
letters. KL is estimated from the sampled tokens: by k1 if it is in the reward, by k3 if it is only measured.

python benchmarks/why_ppo.py [--seeds 3] [--steps 60]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.ppo import PPO
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.stages._material import Data
from posttrain.stages.base import Context, run_stages
from posttrain.stages.rl import RLStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks.base import Task
from posttrain.train.optimizer import Optimization
from posttrain.types import Batch, Metric, Outputs, Problem, Sampling, Score, Term

EPOCHS, RATE = 8, 3e-4
COLLAPSED = 0.5  # an arm has collapsed where its score ends below this share of what it began with
LETTERS, LENGTH, CARELESS = string.ascii_lowercase, 6, 0.35


def following(letter: str) -> str:
    return (LETTERS + LETTERS)[LETTERS.index(letter) + 1 :][:LENGTH]


@dataclass(frozen=True)
class Alphabet(Task):
    """Say the six letters after this one; after z comes a. The demonstrations are careless: a third of their letters are wrong.
    All 26 questions are on both sides, which is refused of questions with a gold answer: the score knows it by itself."""

    alphabet: ClassVar[str] = LETTERS

    def problems(self, split: str, level: int | None = None) -> list[Problem]:
        return [Problem(f"{split}/{n}", LETTERS[n % 26], "") for n in range(2000)]

    def demonstration(self, problem: Problem) -> str:
        dice = random.Random(problem.id)
        return "".join(dice.choice(LETTERS) if dice.random() < CARELESS else letter for letter in following(problem.question))

    def score(self, problem: Problem, response: str) -> Score:
        right = sum(a == b for a, b in zip(response, following(problem.question), strict=False))
        return Score(right / max(LENGTH, len(response)))


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(PPO):
    """The same with the surrogate -A_t log pi(y_t), whatever the policy that sampled y_t has become since."""

    def policy_terms(self, outputs: Outputs, batch: Batch) -> tuple[list[Term], list[Metric]]:
        terms, metrics = super().policy_terms(outputs, batch)

        plain_T = -batch.advantage_T * outputs.logprob_T.where(batch.mask_T, 0.0)
        return [Term("policy", plain_T, batch.weight_T), *terms[1:]], metrics


ARMS: dict[str, Algorithm] = {
    "policy-gradient": PolicyGradient(epochs=EPOCHS, beta=0.0, critic_warmup=2),
    "clip": PPO(epochs=EPOCHS, beta=0.0, critic_warmup=2),
    "PPO": PPO(epochs=EPOCHS, beta=0.05, critic_warmup=2),
}


def one_seed(folder: str, seed: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Every arm from this seed's supervised model: curves by arm and figure."""
    import torch

    torch.set_num_threads(1)
    task = Alphabet()
    data = (Data(task=task, counts={0: 2000}),)
    stages = [
        SFTStage(
            name="sft", model="tiny:nano", data=data, steps=200, optimizer=Optimization(lr=3e-3, warmup=20, schedule="cosine")
        )
    ]
    for arm, algorithm in ARMS.items():
        stages.append(
            RLStage(
                name=arm, model="sft", task=task, steps=steps, prompts=32, algorithm=algorithm, sampling=Sampling(10),
                optimizer=Optimization(lr=RATE), watch_kl=True, evaluate_every=0,
                checkpoint_every=10**6, rollouts_every=1,
            )
        )  # fmt: skip
    with RunWriter.create(Path(folder) / str(seed), {"name": "why_ppo", "seed": seed}) as writer:
        run_stages(stages, Context(writer, seed, say=False, threads=1))
    run = Run(Path(folder) / str(seed))
    return {arm: {name: curve(run, arm, name) for name in ("reward", "entropy", "kl")} for arm in ARMS}


def curve(run: Run, stage: str, name: str) -> list[tuple[int, float]]:
    return [(row.step, row.figures[name]) for row in run.metrics(stage) if name in row.figures]


def draw(results: Sequence[dict[str, dict[str, list[float]]]], path: Path) -> None:
    """Accuracy, entropy and KL by step: one thin line a seed, one thick line their mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = {"policy-gradient": "#cf3f4f", "clip": "#e08214", "PPO": "#2f6fde"}
    panels = {"reward": "score of what is sampled", "entropy": "entropy, nats a token", "kl": "KL from the start, nats a token"}
    figure = Figure(figsize=(13, 3.9), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for number, (name, title) in enumerate(panels.items()):
        axes = figure.add_subplot(1, 3, number + 1)
        for arm, colour in colours.items():
            lines = [result[arm][name] for result in results]
            for line in lines:
                axes.plot(*zip(*line, strict=True), color=colour, alpha=0.25, linewidth=0.8)
            means = [statistics.fmean(values) for values in zip(*([v for _, v in line] for line in lines), strict=True)]
            axes.plot([step for step, _ in lines[0]], means, color=colour, linewidth=2, label=arm.replace("-", " "))
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        if name == "kl":
            axes.set_yscale("symlog", linthresh=0.1)
        if number == 0:
            axes.set_ylim(0, 1)
            axes.legend(frameon=False)
    figure.suptitle(f"Each rollout used {EPOCHS} times, learning rate {RATE:g}", x=0.01, ha="left", fontweight="bold")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "why_ppo.png")
    options = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        jobs = [pool.submit(one_seed, folder, seed, options.steps) for seed in range(options.seeds)]
        results = [job.result() for job in jobs]
    draw(results, options.out)
    summary: dict[str, object] = {}
    for arm in ARMS:
        curves = [[value for _, value in result[arm]["reward"]] for result in results]
        starts, ends = ([statistics.fmean(line[part]) for line in curves] for part in (slice(3), slice(-10, None)))
        collapsed = sum(end < COLLAPSED * start for start, end in zip(starts, ends, strict=True))
        rounded = {name: [round(v, 3) for v in values] for name, values in (("start", starts), ("end", ends))}
        summary[arm] = {**rounded, "collapsed": collapsed}
        print(f"{arm:<16} score from {statistics.fmean(starts):.3f} to {statistics.fmean(ends):.3f}; "
              f"{collapsed} of {len(curves)} seeds collapsed")  # fmt: skip
    facts = {"benchmark": "why_ppo", "seeds": options.seeds, "steps": options.steps, "epochs": EPOCHS, "lr": RATE}
    print(json.dumps({**facts, "arms": summary, "seconds": round(time.perf_counter() - began, 1)}))


if __name__ == "__main__":
    main()
