"""InstructGPT: SFT, a reward model from comparisons, then PPO against it with a KL anchor and the pretraining mix."""

from __future__ import annotations

from posttrain.algorithms.ppo import PPO
from posttrain.recipes._reviews import PEOPLE, SAMPLING, TASK, beginning, comparisons, versus
from posttrain.recipes.base import Recipe
from posttrain.stages.reward_model import RewardModelStage
from posttrain.stages.rl import RLStage
from posttrain.train.optimizer import Optimization


def instructgpt(size: str = "nano", beta: float = 0.1, ptx: float = 0.2, steps: int = 70) -> Recipe:
    """On tiny reviews with an annotator whose taste is known (tasks/reviews.py), on a CPU.

    Ouyang et al. 2022: a policy that pleases a Bradley-Terry model of people's comparisons, kept near the SFT model by
    KL in the reward, and good at its old text by gradients of its likelihood. The reward model must pass an accuracy gate first.
    """
    stages = [
        *beginning(size),
        comparisons("comparisons", "sft", 2500),
        RewardModelStage(
            name="reward", model="sft", data=("comparisons",), steps=250, batch=32, least_accuracy=0.6,
            optimizer=Optimization(lr=1e-3, warmup=20, schedule="cosine"),
        ),
        RLStage(
            name="rl", model="sft", task=TASK, steps=steps, prompts=128,
            algorithm=PPO(beta=beta, epochs=2, mini_batches=2, critic_warmup=5, ptx=ptx),
            sampling=SAMPLING, reward_models=("reward",), critic="reward", pretraining=(PEOPLE,),
            optimizer=Optimization(lr=3e-4, warmup=5), critic_optimizer=Optimization(lr=1e-3), evaluate_every=0,
        ),
        versus("versus_sft", "rl"),
    ]  # fmt: skip
    return Recipe(tuple(stages), next_command="posttrain run instructgpt beta=0.02 ptx=0")
