"""The reward-KL frontier: PPO, GRPO, DPO and best-of-N against one reward model of a known preference.

    python benchmarks/frontier.py OUT [--steps 120] [--seed 0] [--processes 2] [--scale 1]   # continues where it stopped
    python benchmarks/frontier.py --draw FILE.json docs/frontier.png

A small model is pretrained on tiny reviews. A reward model is trained on 3,000 comparisons of the model's samples by a simulated
annotator. Each method optimises that reward model with several coefficients of the KL. Proxy (reward model) and gold (annotator)
reward are measured on samples for held-out prompts, against the KL from the pretrained model in nats a response:

    PPO, GRPO     along training, beta = the KL coefficient
    DPO           along training, on pairs of the pretrained model's samples ordered by the reward model; beta as in its loss
    best of N     KL = log N - (N - 1) / N, N = 1 .. 64

Writes OUT/frontier.json. --scale multiplies all counts except --steps; 0.02 is a smoke test.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shutil
import sys
import time
from pathlib import Path
from typing import Any

SAMPLES, PROBLEMS = 64, 100  # of best-of-N
MEASURED = 500  # held-out responses of each point of a trained model
PAIRS, PIECES = 3000, 5  # for DPO: pairs, and pieces of training with a measurement after each
ARMS = (("best of n", 0.0), ("ppo", 0.1), ("grpo", 0.1), ("dpo", 0.3), ("ppo", 0.5), ("ppo", 0.02), ("grpo", 0.02), ("dpo", 0.1),
        ("grpo", 0.5), ("dpo", 1.0), ("dpo", 0.03))  # fmt: skip

SCALE = [1.0]  # of all counts, in this process and in those of the pool


def set_scale(share: float) -> None:
    SCALE[0] = share


def count(full: int) -> int:
    return max(2, round(full * SCALE[0]))


def run(folder: Path, stages: list[Any], seed: int) -> None:
    from posttrain.runs.write import RunWriter
    from posttrain.stages.base import Context, run_stages

    with RunWriter.create(folder, {"name": "frontier", "seed": seed}) as writer:
        run_stages(stages, Context(writer, seed=seed, threads=1, say=False))


def foundation(folder: Path, seed: int) -> None:
    """The pretrained model, comparisons of its samples by the annotator, and the reward model."""
    from posttrain.stages._material import Data
    from posttrain.stages.comparisons import ComparisonsStage
    from posttrain.stages.pretrain import PretrainStage
    from posttrain.stages.reward_model import RewardModelStage
    from posttrain.tasks.reviews import Reviews
    from posttrain.train.optimizer import Optimization
    from posttrain.types import Sampling

    data, rate = (Data(task=Reviews("any"), counts={0: count(20_000)}),), Optimization(lr=3e-3, warmup=20, schedule="cosine")
    run(folder, [
        PretrainStage(name="base", model="tiny:nano", data=data, steps=count(800), batch=32, optimizer=rate),
        ComparisonsStage(name="comparisons", model="base", task=Reviews(), prompts=count(3000), noise=0.1, sampling=Sampling(120)),
        RewardModelStage(name="reward", model="base", data=("comparisons",), steps=count(300), batch=32,
                         optimizer=Optimization(lr=1e-3, warmup=20, schedule="cosine")),
    ], seed)  # fmt: skip


def place(root: Path, name: str) -> str:
    return str((root / "foundation" / "stages" / name / "model").resolve())


def policy_in(folder: str) -> Any:
    from posttrain.models.load import load
    from posttrain.models.policy import wrap_model

    loaded = load(folder)
    return wrap_model(loaded.model, loaded.tokenizer, loaded.stop_ids, folder)


def sampled(root: Path, policy: Any, split: str, prompts: int, group: int, seed: int) -> list[Any]:
    """Groups of a policy's samples: the value is the proxy, the part `task` is the gold."""
    from posttrain.collect import rate_groups
    from posttrain.data.text import Decoder
    from posttrain.engine.engine import Engine
    from posttrain.episodes import rollout_groups
    from posttrain.models.scorer import load_scorer
    from posttrain.tasks.reviews import Reviews
    from posttrain.train.rating import ModelRating
    from posttrain.types import Sampling

    task, decoder = Reviews(), Decoder(policy.tokenizer)
    problems, engine = task.problems(split)[:prompts], Engine(policy, processes=1)
    groups = rollout_groups(task, engine, decoder, problems, group, Sampling(120), seed)
    return rate_groups(ModelRating([load_scorer(place(root, "reward"))]), groups)


def online(root: Path, folder: Path, algorithm: Any, steps: int, seed: int) -> list[dict[str, float]]:
    """Trained against the reward model, measured ten times on the way."""
    from posttrain.runs.read import Run
    from posttrain.stages.reward_sources import RewardModels
    from posttrain.stages.rl import RLStage
    from posttrain.tasks.reviews import Reviews
    from posttrain.train.optimizer import Optimization
    from posttrain.types import Sampling

    stage = RLStage(
        name="rl", model=place(root, "base"), task=Reviews(), steps=steps, prompts=128 // algorithm.group_size,
        algorithm=algorithm, sampling=Sampling(120), reward=RewardModels(models=(place(root, "reward"),)),
        optimizer=Optimization(lr=3e-4, warmup=10),
        critic_optimizer=Optimization(lr=1e-3) if "critic" in algorithm.roles else None,
        evaluate_every=max(1, steps // 10), evaluate_problems=0, measure_problems=count(MEASURED),
        checkpoint_every=10**6, rollouts_every=10**6,
    )  # fmt: skip
    run(folder, [stage], seed)
    names = {
        "kl": "kl/test",
        "proxy": "proxy/test",
        "gold": "gold/test",
        "gold_low": "gold/test_low",
        "gold_high": "gold/test_high",
    }
    rows = [row for row in Run(folder).metrics("rl") if "gold/test" in row.figures]
    return [{"step": row.step, **{name: row.figures[figure] for name, figure in names.items()}} for row in rows]


def labelled(root: Path, seed: int) -> list[dict[str, Any]]:
    """Pairs of the pretrained model's samples that the reward model ordered: a is chosen with probability sigmoid(r_a - r_b)."""
    import numpy as np

    coins, rows = np.random.default_rng(seed), []
    for group in sampled(root, policy_in(place(root, "base")), "train", count(PAIRS), 2, seed + 1):
        one, other = group.rollouts
        if coins.random() >= 1 / (1 + math.exp(other.score.value - one.score.value)):
            one, other = other, one
        if one.response.strip() and other.response.strip() and one.response != other.response:
            rows.append({"prompt": group.problem.question, "chosen": one.response, "rejected": other.response})
    return rows


def offline(root: Path, folder: Path, beta: float, steps: int, seed: int) -> list[dict[str, float]]:
    """DPO in pieces, each from where the last one ended and all with the pretrained model as reference."""
    from posttrain.algorithms.dpo import DPO
    from posttrain.stages._answers import proxy_gold_kl
    from posttrain.stages.preference import PreferenceStage
    from posttrain.train.optimizer import Optimization
    from posttrain.types import Sampling

    base, file = place(root, "base"), root / "pairs.jsonl"
    names = [f"dpo-{n}" for n in range(PIECES)]
    run(folder, [
        PreferenceStage(name=name, model=before, reference=base, data=(str(file.resolve()),), steps=max(1, steps // PIECES), batch=64,
                        algorithm=DPO(beta=beta), optimizer=Optimization(lr=1e-4, warmup=5), evaluate_every=0, checkpoint_every=10**6)
        for before, name in zip([base, *names], names, strict=False)
    ], seed)  # fmt: skip
    reference, curve = policy_in(base), []
    for n, model in enumerate([base, *(str(folder / "stages" / name / "model") for name in names)]):
        found = proxy_gold_kl(sampled(root, policy_in(model), "test", count(MEASURED), 1, seed), reference, Sampling(120))
        gold = {"gold_low": found["gold"].low, "gold_high": found["gold"].high}
        curve.append({"step": n * max(1, steps // PIECES), **{name: one.value for name, one in found.items()}, **gold})
    return curve


def arm(job: tuple[str, str, float, int, int]) -> tuple[str, Any]:
    out, name, beta, steps, seed = job
    import torch

    from posttrain.algorithms.grpo import GRPO
    from posttrain.algorithms.ppo import PPO
    from posttrain.evals.best_of_n import frontier

    torch.set_num_threads(1)
    began, root = time.perf_counter(), Path(out)
    label = label_of(name, beta)
    folder, curve = root / label.replace(" ", "-"), []
    if name == "best of n":
        points = frontier(
            sampled(root, policy_in(place(root, "base")), "test", count(PROBLEMS), SAMPLES, seed), ns=[2**k for k in range(7)]
        )
        for p in points:
            gold = {"gold": p.gold.value, "gold_low": p.gold.low, "gold_high": p.gold.high}
            curve.append({"n": p.n, "kl": p.kl, "proxy": p.proxy.value, **gold})
    elif name == "dpo":
        curve = offline(root, folder, beta, steps, seed)
    elif name == "ppo":
        curve = online(root, folder, PPO(beta=beta, epochs=2, mini_batches=2, critic_warmup=10), steps, seed)
    else:
        curve = online(root, folder, GRPO(group=8, beta=beta, kl="corrected", scale="none"), steps, seed)
    return label, {"method": name, "beta": beta, "curve": curve, "seconds": round(time.perf_counter() - began, 1)}


def label_of(name: str, beta: float) -> str:
    return f"{name} {beta:g}" if beta else name


def finished(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The arms that an earlier call with the same settings has left; the folders of half-done ones are thrown away."""
    before = json.loads(path.read_text()) if path.is_file() else {}
    arms = dict(before.get("arms", {})) if all(before.get(key) == facts[key] for key in ("seed", "steps")) else {}
    for name, beta in ARMS:
        if label_of(name, beta) not in arms:
            shutil.rmtree(path.parent / label_of(name, beta).replace(" ", "-"), ignore_errors=True)
    return arms


def draw(found: dict[str, Any], path: Path) -> None:
    """Two panels over the square root of KL (Gao et al. 2022): what the reward model thinks, and what the annotator thinks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = {"best of n": "black", "ppo": "#1f77b4", "grpo": "#d62728", "dpo": "#2ca02c"}
    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for number, (what, title) in enumerate((("proxy", "reward model (proxy)"), ("gold", "annotator (gold)"))):
        axis = figure.add_subplot(1, 2, number + 1)
        for method, colour in colours.items():
            arms = sorted((one for one in found["arms"].values() if one["method"] == method), key=lambda one: -one["beta"])
            for depth, one in enumerate(arms):
                kl = [math.sqrt(max(0.0, p["kl"])) for p in one["curve"]]
                label = f"{method}, beta {one['beta']:g}" if one["beta"] else "best of n, n = 1 to 64"
                width = 2.5 if method == "best of n" else 1.2
                alpha = 1.0 if len(arms) == 1 else 0.35 + 0.65 * depth / (len(arms) - 1)
                axis.plot(kl, [p[what] for p in one["curve"]], ".-", color=colour, alpha=alpha, lw=width, label=label)
        axis.set(xlabel="square root of KL from the pretrained model, nats a response", ylabel=title)
        axis.spines[["top", "right"]].set_visible(False)
        if number:
            axis.legend(frameon=False, fontsize=7, ncols=2)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/frontier"))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("JSON", "PNG"))
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(options.draw[0].read_text()), options.draw[1])
        return 0
    set_scale(options.scale)
    began, foot = time.perf_counter(), options.out / "foundation"
    if not (foot / "stages" / "reward" / "result.json").is_file():
        foundation(foot, options.seed)
    accuracy = json.loads((foot / "stages" / "reward" / "result.json").read_text())["accuracy"]
    facts = {"benchmark": "frontier", "date": time.strftime("%Y-%m-%d"), "seed": options.seed, "steps": options.steps,
             "processes": options.processes, "reward_accuracy": accuracy}  # fmt: skip
    if not (options.out / "pairs.jsonl").is_file():
        rows = labelled(options.out, options.seed)
        (options.out / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arms, found = finished(options.out / "frontier.json", facts), facts
    jobs = [
        (str(options.out), name, beta, options.steps, options.seed) for name, beta in ARMS if label_of(name, beta) not in arms
    ]
    with multiprocessing.get_context("spawn").Pool(options.processes, set_scale, (options.scale,)) as pool:
        for label, one in pool.imap_unordered(arm, jobs):
            last, arms[label] = one["curve"][-1], one
            shown = f"KL {last['kl']:7.2f}  proxy {last['proxy']:6.2f}  gold {last['gold']:.3f}  {one['seconds']:.0f} s"
            print(f"{label:<12} {shown}", file=sys.stderr)
            found = {
                **facts,
                "seconds": round(time.perf_counter() - began, 1),
                "arms": {name: arms[name] for name in sorted(arms)},
            }
            (options.out / "frontier.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
