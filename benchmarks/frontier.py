"""The reward-KL frontier: PPO, GRPO, DPO and best-of-N against one reward model of a taste that is known.

    python benchmarks/frontier.py OUT [--steps 300] [--seed 0] [--processes 2]

A small model is pretrained on tiny reviews, a reward model is fitted to 3,000 comparisons of its own samples by the annotator, and each
method is set against that reward model with several strengths of the KL anchor. Proxy (reward model) and gold (annotator) reward are
measured on held-out prompts against KL from the pretrained model, in nats a response. Draws OUT/frontier.png, prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from pathlib import Path
from typing import Any

SAMPLES, BEST = 64, 64  # of each of the prompts that best-of-N is measured on
MEASURED = 400  # held-out responses of each trained model


def foundation(out: Path, seed: int) -> None:
    """The pretrained model, the comparisons, the reward model, and pairs that the reward model labelled."""
    from posttrain.runs.write import RunWriter
    from posttrain.stages._material import Data
    from posttrain.stages.base import Context, run_stages
    from posttrain.stages.comparisons import ComparisonsStage
    from posttrain.stages.pretrain import PretrainStage
    from posttrain.stages.reward_model import RewardModelStage
    from posttrain.tasks.reviews import Reviews
    from posttrain.train.optimizer import Optimization
    from posttrain.types import Sampling

    stages = [
        PretrainStage(
            name="base", model="tiny:nano", data=(Data(task=Reviews("any"), counts={0: 20_000}),), steps=800, batch=32,
            optimizer=Optimization(lr=3e-3, warmup=20, schedule="cosine"),
        ),
        ComparisonsStage(name="comparisons", model="base", task=Reviews(), prompts=3000, noise=0.1, sampling=Sampling(120)),
        RewardModelStage(
            name="reward", model="base", data=("comparisons",), steps=300, batch=32,
            optimizer=Optimization(lr=1e-3, warmup=20, schedule="cosine"),
        ),
    ]  # fmt: skip
    with RunWriter.create(out, {"seed": seed}) as writer:
        run_stages(stages, Context(writer, seed=seed, threads=1))


def models(out: Path, name: str = "base") -> Any:
    from posttrain.models.load import load
    from posttrain.models.policy import adopt

    loaded = load(str(out / "stages" / name / "model"))
    return adopt(loaded.model, loaded.tokenizer, loaded.stop_ids, name)


def rating(out: Path) -> Any:
    from posttrain.models.scorer import load_scorer
    from posttrain.train.rating import ModelRating

    return ModelRating([load_scorer(str(out / "stages" / "reward" / "model"))])


def sampled(policy: Any, judge: Any, split: str, prompts: int, group: int, seed: int) -> list[Any]:
    """Groups of a policy's samples: the value is the proxy, the part `task` is the gold."""
    from posttrain.data.text import Decoder
    from posttrain.engine.engine import Engine
    from posttrain.rollouts import rate_groups, rollout_groups
    from posttrain.tasks.reviews import Reviews
    from posttrain.types import Sampling

    seconds = {"generate": 0.0, "score": 0.0}
    task = Reviews()
    problems = task.problems(split)[:prompts]
    decoder, engine = Decoder(policy.tokenizer), Engine(policy, processes=1)
    groups = rollout_groups(task, engine, policy.tokenizer, decoder, problems, group, Sampling(120), seed, seconds)
    return rate_groups(judge, groups, seconds)


def measured(policy: Any, base: Any, judge: Any, seed: int = 77) -> dict[str, float]:
    """Proxy, gold and KL of a policy on held-out prompts."""
    import torch

    from posttrain.train.forward import forward
    from posttrain.train.pack import micro_batches, pack_groups

    groups = sampled(policy, judge, "test", MEASURED, 1, seed)
    batch = pack_groups(groups, 1.0)
    with torch.no_grad():
        reference_T = torch.cat([forward(base, piece).logprob_T for piece in micro_batches(batch, 8192)])
    kl = float((batch.behaviour_T - reference_T).where(batch.mask_T, 0.0).sum()) / batch.sequences
    scores = [r.score for g in groups for r in g.rollouts]
    return {
        "kl": kl,
        "proxy": sum(s.value for s in scores) / len(scores),
        "gold": sum(s.parts["task"] for s in scores) / len(scores),
    }


def online(out: Path, name: str, algorithm: Any, steps: int, seed: int) -> list[dict[str, float]]:
    """Train against the reward model, measuring on the way."""
    from posttrain.data.curriculum import Climb, Curriculum
    from posttrain.engine.engine import Engine
    from posttrain.models.scorer import from_policy
    from posttrain.rollouts import Rollouts
    from posttrain.tasks.reviews import Reviews
    from posttrain.train.optimizer import Optimization
    from posttrain.train.pack import mini_batches
    from posttrain.train.trainer import Trainer
    from posttrain.types import Metric, Sampling

    policy, base, judge = models(out), models(out), rating(out)
    critic = from_policy(policy) if "value" in algorithm.needs else None
    trainer = Trainer(policy, algorithm, Optimization(lr=3e-4, warmup=10), base, critic, Optimization(lr=1e-3))
    task, engine = Reviews(), Engine(policy, processes=1)
    climb = Climb(task.levels, [len(task.problems("train"))], Curriculum(), seed)
    prompts = 128 // algorithm.group_size
    source = Rollouts(task, engine, policy.tokenizer, climb, prompts, Sampling(120), seed, policy.device, judge)
    state, curve = algorithm.start(), [{"step": 0, **measured(policy, base, judge)}]
    for step in range(steps):
        collected = source.collect(step, algorithm, state)
        filled = trainer.fill(collected.batch)
        epochs, pieces = algorithm.reuse
        metrics: list[Metric] = list(collected.metrics)
        for piece in [p for _ in range(epochs) for p in mini_batches(filled, pieces)]:
            update = trainer.update(algorithm.prepare(piece, state), 3e-4)
            metrics += update.metrics
        state = algorithm.finish(state, metrics)
        if (step + 1) % max(1, steps // 10) == 0:
            curve.append({"step": step + 1, **measured(policy, base, judge)})
    return curve


def offline(out: Path, name: str, algorithm: Any, steps: int, seed: int) -> list[dict[str, float]]:
    """DPO on pairs of the base model's samples that the reward model ordered by a Bradley-Terry draw."""
    import numpy as np

    from posttrain.rollouts import Examples
    from posttrain.train.optimizer import Optimization
    from posttrain.train.trainer import Trainer
    from posttrain.types import Example

    policy, base, judge = models(out), models(out), rating(out)
    coins = np.random.default_rng(seed)
    units = []
    for group in sampled(base, judge, "train", 3000, 2, seed + 1):
        one, other = group.rollouts
        if one.response == other.response:
            continue
        first = coins.random() < 1 / (1 + math.exp(other.score.value - one.score.value))
        labels = (1.0, 0.0) if first else (0.0, 1.0)
        units.append(
            tuple(
                Example(r.ids, np.concatenate([np.full(len(s.ids), s.sampled) for s in r.segments]), reward=label)
                for r, label in zip((one, other), labels, strict=True)
            )
        )
    trainer = Trainer(policy, algorithm, Optimization(lr=1e-4, warmup=10), base)
    source = Examples([units], [1.0], 64, seed, policy.device)
    curve = [{"step": 0, **measured(policy, base, judge)}]
    for step in range(steps):
        batch = trainer.fill(source.collect(step, algorithm, {}).batch)
        trainer.update(algorithm.prepare(batch, {}), 1e-4)
        if (step + 1) % max(1, steps // 6) == 0:
            curve.append({"step": step + 1, **measured(policy, base, judge)})
    return curve


def arm(job: tuple[str, str, float, int, int]) -> tuple[str, Any]:
    out, name, beta, steps, seed = job
    import torch

    from posttrain.algorithms.dpo import DPO
    from posttrain.algorithms.grpo import GRPO
    from posttrain.algorithms.ppo import PPO

    torch.set_num_threads(1)
    began, folder = time.perf_counter(), Path(out)
    if name == "best of n":
        from posttrain.evals.best_of_n import frontier

        ns = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= BEST]
        points = frontier(sampled(models(folder), rating(folder), "test", 60, SAMPLES, seed), ns=ns)
        curve: Any = [{"n": p.n, "kl": p.kl, "proxy": p.proxy.value, "gold": p.gold.value} for p in points]
    elif name == "dpo":
        curve = offline(folder, name, DPO(beta=beta), steps, seed)
    elif name == "ppo":
        curve = online(folder, name, PPO(beta=beta, epochs=2, mini_batches=2, critic_warmup=10), steps, seed)
    else:
        curve = online(folder, name, GRPO(group=8, beta=beta, kl="corrected", scale="none"), steps, seed)
    return f"{name} {beta:g}".strip(), {"method": name, "beta": beta, "curve": curve, "seconds": time.perf_counter() - began}


def draw(found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"ppo": "#1f77b4", "grpo": "#d62728", "dpo": "#2ca02c", "best of n": "black"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharex=True)
    for one in found.values():
        kl = [math.sqrt(max(0.0, p["kl"])) for p in one["curve"]]
        for axis, what in ((left, "proxy"), (right, "gold")):
            values = [p[what] for p in one["curve"]]
            axis.plot(
                kl, values, color=colours[one["method"]], alpha=0.8, lw=2.5 if one["method"] == "best of n" else 1.0, marker="."
            )
    for method, colour in colours.items():
        left.plot([], [], color=colour, label=method)
    left.set(xlabel="square root of KL from the pretrained model (nats a response)", ylabel="reward model (proxy)")
    right.set(xlabel="square root of KL", ylabel="annotator (gold)")
    left.legend(frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    began = time.perf_counter()
    if not (options.out / "stages" / "reward" / "result.json").is_file():
        foundation(options.out, options.seed)
    jobs = [(str(options.out), name, beta, options.steps, options.seed) for name, betas in (
        ("best of n", (0.0,)), ("ppo", (0.5, 0.2, 0.05, 0.01)), ("grpo", (0.5, 0.2, 0.05, 0.01)), ("dpo", (1.0, 0.3, 0.1, 0.03)),
    ) for beta in betas]  # fmt: skip
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        found = dict(pool.imap_unordered(arm, jobs))
    draw(found, options.out / "frontier.png")
    reward = json.loads((options.out / "stages" / "reward" / "result.json").read_text())
    for label, one in sorted(found.items()):
        last = one["curve"][-1]
        print(f"{label:<12} KL {last['kl']:7.2f}  proxy {last['proxy']:6.2f}  gold {last['gold']:.3f}  {one['seconds']:.0f} s")
    print(json.dumps({"date": time.strftime("%Y-%m-%d"), "seed": options.seed, "steps": options.steps,
                      "reward_accuracy": reward["accuracy"], "seconds": time.perf_counter() - began, "arms": found}))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
