"""Shared by recipes that learn from preferences: comparisons of answers, a reward model and PPO against it or DPO and its like,
and the results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.ppo import PPO
from posttrain.recipes.base import Recipe, given, with_given
from posttrain.stages._judged import JudgeSettings
from posttrain.stages._material import Data
from posttrain.stages.comparisons import ComparisonsStage
from posttrain.stages.preference import PreferenceStage
from posttrain.stages.reward_model import RewardModelStage
from posttrain.stages.reward_sources import RewardModels, RewardSource
from posttrain.stages.rl import RLStage
from posttrain.stages.sft import SFTStage
from posttrain.stages.versus import VersusStage
from posttrain.tasks.base import Task
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling

TOY_FIT = Optimization(lr=1e-3, warmup=20, schedule="cosine")
TOY_POLICY, TOY_CRITIC = Optimization(lr=3e-4, warmup=5), Optimization(lr=1e-3)
REAL_RATES: dict[str, Any] = {
    "fit": Optimization(lr=2e-5, warmup=10, schedule="cosine"),
    "policy": Optimization(lr=5e-6, warmup=5),
    "critic": Optimization(lr=1e-5),
    "checkpoint_every": 1000,
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The settings that differ between a toy model and a real one."""

    start: str = "sft"  # the model that is optimised; KL is measured from it
    task: Task
    sampling: Sampling
    algorithm: PPO
    steps: int
    prompts: int
    fit: Optimization = TOY_FIT  # of the reward model
    fit_steps: int = 250
    policy: Optimization = TOY_POLICY
    critic: Optimization = TOY_CRITIC
    compared: int = 2500  # prompts whose two answers are compared
    data: str = ""  # people's comparisons, in place of the annotator's
    ordinary: tuple[Data, ...] = ()  # text of the pretraining mix
    unseen: tuple[Data, ...] = ()  # text whose perplexity measures the cost
    problems: int = 500
    checkpoint_every: int = 25
    # PPO ends at this KL from the first model, in nats per response; 0: no limit
    max_kl: float = 0.0

    def changed(
        self,
        steps: int | None,
        prompts: int | None,
        problems: int | None,
        compared: int | None,
        beta: float | None,
        lr: float | None,
    ) -> Self:
        """Return these settings with the values that the user gave; None keeps a value."""
        algorithm, policy = with_given(self.algorithm, beta=beta), with_given(self.policy, lr=lr)
        counts = {"steps": steps, "prompts": prompts, "problems": problems, "compared": compared}
        return with_given(self, algorithm=algorithm, policy=policy, **counts)


def imitate_file(model: str, file: str, steps: int) -> SFTStage:
    """A real model learns from demonstrations."""
    gentle, data = Optimization(lr=1e-5, warmup=5, schedule="cosine"), (Data(file=file),)
    return SFTStage(name="sft", model=model, data=data, steps=steps, optimizer=gentle)


def compare(
    scale: Scale,
    name: str = "comparisons",
    task: Task | None = None,
    judge: JudgeSettings | None = None,
    annotator: Literal["simulated", "people"] = "simulated",
) -> ComparisonsStage:
    """Compare two answers of the first model to each prompt, by the task's own score, a judge, or people."""
    return ComparisonsStage(
        name=name,
        model=scale.start,
        task=task or scale.task,
        prompts=scale.compared,
        sampling=scale.sampling,
        annotator=annotator,
        judge=judge,
    )


def fit(
    scale: Scale, name: str = "reward", data: str = "comparisons", min_accuracy: float = 0.6
) -> RewardModelStage:
    """Fit a reward model to the comparisons. It must pass an accuracy gate."""
    return RewardModelStage(
        name=name,
        model=scale.start,
        data=(data,),
        steps=scale.fit_steps,
        batch=32,
        min_accuracy=min_accuracy,
        optimizer=scale.fit,
    )


def prefer(
    algorithm: Algorithm, data: str, steps: int, lr: float, model: str = "sft"
) -> PreferenceStage:
    """Learn from preferences without a reward model. The stage has the name of its algorithm."""
    return PreferenceStage(
        name=algorithm.name,
        model=model,
        data=(data,),
        steps=steps,
        algorithm=algorithm,
        optimizer=Optimization(lr=lr, warmup=10, schedule="cosine"),
    )


def prefer_real(
    algorithm: Algorithm, data: str, steps: int | None, lr: float | None, model: str
) -> Recipe:
    """`prefer` alone, for a real model on people's preferences, on one GPU: a quarter of the prompts is held out."""
    stage = prefer(algorithm, data, given(steps, 75), given(lr, 2e-5), model)
    optimizer = replace(stage.optimizer, token_budget=16384)
    stage = replace(
        stage, optimizer=optimizer, held_out=0.25, evaluate_units=2000, evaluate_every=25
    )
    again = f"posttrain run {algorithm.name} model={model} data={data} beta=0.3"
    return Recipe((stage,), next_command=again)


def optimise(scale: Scale, reward: RewardSource | None = None, critic: str = "reward") -> RLStage:
    """PPO against the reward model, or another `reward`. The critic is initialised from a reward model."""
    stage = RLStage(
        name="rl",
        model=scale.start,
        task=scale.task,
        steps=scale.steps,
        prompts=scale.prompts,
        algorithm=scale.algorithm,
        sampling=scale.sampling,
        reward=reward or RewardModels(models=("reward",)),
        critic=critic,
        pretraining=scale.ordinary if scale.algorithm.ptx else (),
        optimizer=scale.policy,
        critic_optimizer=scale.critic,
        evaluate_every=0,
        checkpoint_every=scale.checkpoint_every,
    )
    return replace(stage, stop=replace(stage.stop, kl=scale.max_kl))


def versus(
    scale: Scale,
    name: str = "versus_sft",
    task: Task | None = None,
    judge: JudgeSettings | None = None,
    against: str = "",
) -> VersusStage:
    """Compare the model after RL with the first one, or another, on held-out prompts."""
    return VersusStage(
        name=name,
        model="rl",
        against=against or scale.start,
        task=task or scale.task,
        problems=scale.problems,
        sampling=scale.sampling,
        judge=judge,
        text=scale.unseen,
    )
