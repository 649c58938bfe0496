"""Outcome against process reward: Monte-Carlo labels of steps, a process reward model, RL with and without it, and search by it."""

from __future__ import annotations

from dataclasses import replace

from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.process_reward_model import ProcessRewardModel
from posttrain.recipes._toys import SHOWN, imitating
from posttrain.recipes.base import Recipe, evaluate
from posttrain.stages.reward_model import RewardModelStage
from posttrain.stages.reward_sources import ProcessRewardModels
from posttrain.stages.rl import RLStage
from posttrain.stages.search import SearchStage
from posttrain.stages.step_labels import StepLabelsStage
from posttrain.tasks.arithmetic import SEPARATOR, Arithmetic
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling

TOKENS, GROUP, PROMPTS = 24, 16, 16
TASK = Arithmetic(level=3, min_level=3)
ALGORITHM = GRPO(group=GROUP, beta=0.0, reduction="token_mean")
PRM = RewardModelStage(
    name="prm",
    model="sft",
    data=("labels",),
    algorithm=ProcessRewardModel(),
    batch=32,
    steps=400,
    optimizer=Optimization(lr=1e-3, warmup=20, schedule="cosine"),
    checkpoint_every=0,
)


def process(
    size: str = "nano",
    steps: int = 60,
    solutions: int = 2400,
    completions: int = 4,
    problems: int = 200,
    samples: int = 8,
    lr: float = 1e-4,
    beta: float = 1.0,
) -> Recipe:
    """Three-digit sums, digit by digit: a solution has three steps. SFT has seen such sums with four carries in five forgotten, and
    forgets as often. It writes `solutions` solutions, two to a problem. From the end of each step `completions` completions are
    sampled, which label it. `prm` learns the labels of steps, `orm` only the outcomes of the same solutions.
    Then, each on `problems` held-out sums:

    - `search`: majority, best of N by either model, beam search by `prm`, N = `samples`;
    - `outcome` and `process`: GRPO from the same SFT model for `steps` steps of 16 x 16 answers, rewarded by the task for the
      right answer, or by `prm` for each step, minus `beta` times the KL from SFT: `prm` is wrong about text that SFT never writes.
      `outcome_longer` has as many more steps as cost the same number of samples as the completions of the labels.
    """
    labels = _labels(solutions // 2, completions)
    measured = evaluate("before", "sft", TASK, problems, Sampling(TOKENS), samples)
    outcome = _trained(steps, lr, problems)
    # two of a solution's three steps are completed
    spent = solutions * (1 + 2 * completions) // (PROMPTS * GROUP)
    stages = (
        imitating(size, *SHOWN, steps=1000),
        measured,
        labels,
        replace(labels, name="outcomes", completions=0),
        PRM,
        replace(PRM, name="orm", data=("outcomes",)),
        SearchStage(
            name="search",
            model="sft",
            task=TASK,
            process="prm",
            outcome="orm",
            problems=problems,
            samples=samples,
            step_tokens=12,
            steps=SEPARATOR,
            sampling=Sampling(TOKENS),
        ),
        outcome,
        replace(outcome, name="outcome_longer", steps=steps + spent, evaluate_every=20),
        replace(
            outcome,
            name="process",
            algorithm=replace(ALGORITHM, supervision="process", beta=beta),
            reward=ProcessRewardModels(models=("prm",), steps=SEPARATOR),
        ),
        replace(measured, name="after_outcome", model="outcome"),
        replace(measured, name="after_outcome_longer", model="outcome_longer"),
        replace(measured, name="after_process", model="process"),
    )
    return Recipe(stages, "before", "after_process", "posttrain run process seed=1")


def _labels(prompts: int, completions: int) -> StepLabelsStage:
    """Two solutions to each problem, labelled step by step."""
    return StepLabelsStage(
        name="labels",
        model="sft",
        task=TASK,
        prompts=prompts,
        samples=2,
        completions=completions,
        steps=SEPARATOR,
        sampling=Sampling(TOKENS),
    )


def _trained(steps: int, lr: float, problems: int) -> RLStage:
    """RL with a reward for right answers."""
    return RLStage(
        name="outcome",
        model="sft",
        task=TASK,
        steps=steps,
        prompts=PROMPTS,
        sampling=Sampling(TOKENS),
        algorithm=ALGORITHM,
        optimizer=Optimization(lr=lr, warmup=5),
        evaluate_every=10,
        evaluate_problems=problems,
        checkpoint_every=0,
    )
