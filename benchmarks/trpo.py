"""REINFORCE, TRPO and PPO over updates: the same samples, advantages and policy, three ways to take a step. Writes docs/trpo.png;
prints a table, then one JSON line.

The task: write the four letters that follow a given one, in an alphabet of eight. The reward is the share of right letters, at the
end. The policy is a plain module of 4,664 weights that sees the given letter, the position and the previous letter, and starts at
random; an update has 64 episodes. The advantage is the reward minus the mean of the update, divided by its standard deviation. Three
arms:

    REINFORCE    one Adam step on -A log pi
    PPO          ten Adam steps on the clipped ratio (0.2)
    TRPO         one natural-gradient step with a KL of at most delta, by conjugate gradients and a line search

Learning rates and delta are chosen for each arm by the mean score over all updates, on seeds that are not reported. The KL of an
update is KL(before || after), computed exactly in every visited state.

python benchmarks/trpo.py [--seeds 5] [--updates 60] [--plot docs/trpo.png]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.ops.policy import clipped_surrogate, importance_ratio
from posttrain.train.trust_region import TrustRegion, trust_region_step

LETTERS, LENGTH, EPISODES, EPOCHS, CLIP = 8, 4, 64, 10, 0.2
CHOOSING = (100, 101)  # seeds
GRID = {
    "REINFORCE": (1e-2, 3e-2, 1e-1, 3e-1),
    "PPO": (3e-3, 1e-2, 3e-2),
    "TRPO": (0.03, 0.1, 0.3),
}


class Speaker(nn.Module):
    """Log-probs [N, V] of the next letter, by the given letter, the place and the letter before."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Embedding(size, 48) for size in (LETTERS, LENGTH, LETTERS + 1))
        self.hidden, self.head = nn.Linear(48, 64), nn.Linear(64, LETTERS)

    def forward(self, state_N3: Tensor) -> Tensor:
        summed = torch.stack([table(column) for table, column in zip(self.inputs, state_N3.T, strict=True)]).sum(0)
        return self.head(torch.tanh(self.hidden(summed))).log_softmax(-1)


@dataclass(frozen=True, eq=False)
class Samples:
    """What one update learns from: states, letters and advantages of all of its tokens, and the mean reward."""

    state_T3: Tensor
    letter_T: Tensor
    advantage_T: Tensor
    old_TV: Tensor
    reward: float

    def chosen(self, logprob_TV: Tensor) -> Tensor:
        return logprob_TV.gather(1, self.letter_T[:, None])[:, 0]


@torch.no_grad()
def sample(policy: Speaker, generator: torch.Generator) -> Samples:
    given_N = torch.randint(LETTERS, (EPISODES,), generator=generator)
    before_N, right_N, states, letters = torch.full((EPISODES,), LETTERS), torch.zeros(EPISODES), [], []
    for place in range(LENGTH):
        states.append(torch.stack([given_N, torch.full_like(given_N, place), before_N], 1))
        before_N = torch.multinomial(policy(states[-1]).exp(), 1, generator=generator)[:, 0]
        letters.append(before_N)
        right_N += (before_N == (given_N + place + 1) % LETTERS).float()
    reward_N = right_N / LENGTH
    advantage_N = (reward_N - reward_N.mean()) / (reward_N.std() + 1e-6)
    state_T3 = torch.cat(states)
    return Samples(state_T3, torch.cat(letters), advantage_N.repeat(LENGTH), policy(state_T3), float(reward_N.mean()))


Step = Callable[[Speaker, Samples], None]


def reinforce(policy: Speaker, rate: float) -> Step:
    adam = torch.optim.Adam(policy.parameters(), lr=rate)

    def step(policy: Speaker, drawn: Samples) -> None:
        adam.zero_grad()
        (-drawn.advantage_T * drawn.chosen(policy(drawn.state_T3))).mean().backward()
        adam.step()

    return step


def ppo(policy: Speaker, rate: float) -> Step:
    adam = torch.optim.Adam(policy.parameters(), lr=rate)

    def step(policy: Speaker, drawn: Samples) -> None:
        for _ in range(EPOCHS):
            ratio_T = importance_ratio(drawn.chosen(policy(drawn.state_T3)), drawn.chosen(drawn.old_TV))
            adam.zero_grad()
            clipped_surrogate(ratio_T, drawn.advantage_T, CLIP, CLIP).mean().backward()
            adam.step()

    return step


def trpo(policy: Speaker, delta: float) -> Step:
    settings = TrustRegion(delta=delta)

    def step(policy: Speaker, drawn: Samples) -> None:
        def objective() -> tuple[Tensor, Tensor]:
            logprob_TV = policy(drawn.state_T3)
            ratio_T = importance_ratio(drawn.chosen(logprob_TV), drawn.chosen(drawn.old_TV))
            return -(ratio_T * drawn.advantage_T).mean(), logprob_TV

        trust_region_step(policy, objective, settings)

    return step


ARMS = {"REINFORCE": reinforce, "PPO": ppo, "TRPO": trpo}


def run(arm: str, value: float, seed: int, updates: int) -> np.ndarray:
    """[updates, 2]: the mean reward of the samples of each update, and how far it moved the policy."""
    torch.manual_seed(seed)
    policy, generator = Speaker(), torch.Generator().manual_seed(seed)
    step, rows = ARMS[arm](policy, value), []
    for _ in range(updates):
        drawn = sample(policy, generator)
        step(policy, drawn)
        with torch.no_grad():
            kl = (drawn.old_TV.exp() * (drawn.old_TV - policy(drawn.state_T3))).sum(1).mean()
        rows.append((drawn.reward, float(kl)))
    return np.array(rows)


def plot(found: dict[str, np.ndarray], chosen: dict[str, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for arm, runs_SU2 in found.items():
        for axis, runs_SU in zip(axes, np.moveaxis(runs_SU2, 2, 0), strict=True):
            middle = runs_SU.mean(0)
            name = "delta" if arm == "TRPO" else "lr"
            (line,) = axis.plot(middle, label=f"{arm}, {name} {chosen[arm]:g}")
            axis.fill_between(range(len(middle)), runs_SU.min(0), runs_SU.max(0), color=line.get_color(), alpha=0.15)
    axes[0].set(xlabel="update of 64 episodes", ylabel="share of right letters", ylim=(0, 1.02))
    axes[1].set(xlabel="update of 64 episodes", ylabel="KL(before || after), nats a token", yscale="log", ylim=(1e-5, 3))
    axes[0].legend(loc="lower right")
    figure.suptitle(f"Three ways to take a step: mean, least and most of {len(next(iter(found.values())))} seeds")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--plot", type=Path, default=Path(__file__).parent.parent / "docs" / "trpo.png")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began, updates = time.perf_counter(), given.updates
    chosen, found = {}, {}
    for arm, values in GRID.items():
        means = [np.mean([run(arm, value, seed, updates)[:, 0].mean() for seed in CHOOSING]) for value in values]
        chosen[arm] = values[int(np.argmax(means))]
        found[arm] = np.stack([run(arm, chosen[arm], seed, updates) for seed in range(given.seeds)])
    figures = {}
    print(f"{'':10} {'chosen':>8} {'updates to 0.6':>15} {'last ten':>9} {'mean KL':>8} {'largest KL':>11}")
    for arm, runs in found.items():
        reached = [int(np.argmax(one[:, 0] >= 0.6)) if (one[:, 0] >= 0.6).any() else None for one in runs]
        last, kl, top = runs[:, -10:, 0].mean(), runs[:, :, 1].mean(), runs[:, :, 1].max()
        known = [n for n in reached if n is not None]
        when = f"{np.mean(known):.0f} ({len(known)} of {len(reached)})" if known else "never"
        print(f"{arm:10} {chosen[arm]:8g} {when:>15} {last:9.3f} {kl:8.4f} {top:11.4f}")
        figures[arm] = {
            "chosen": chosen[arm],
            "updates_to_0.6": reached,
            "last_ten": round(float(last), 4),
            "kl_mean": round(float(kl), 5),
        }
        figures[arm]["kl_max"] = round(float(top), 5)
    plot(found, chosen, given.plot)
    print(
        json.dumps(
            {
                "benchmark": "trpo",
                "seeds": given.seeds,
                "updates": updates,
                "seconds": round(time.perf_counter() - began),
                **figures,
            }
        )
    )


if __name__ == "__main__":
    main()
