"""GSM8K: GRPO on a real instruct model, rewarded only for the right number in a box."""

from __future__ import annotations

from dataclasses import replace

from posttrain.algorithms.grpo import GRPO
from posttrain.recipes.base import Recipe, evaluate, falling
from posttrain.stages.rl import RLStage
from posttrain.tasks.gsm8k import Gsm8k
from posttrain.types import Sampling


def gsm8k(
    model: str = "Qwen/Qwen2.5-0.5B-Instruct",
    data: str = "",
    steps: int = 280,
    prompts: int = 128,
    group: int = 8,
    mini_batches: int = 1,
    clip_high: float = 0.28,
    lr: float = 3e-6,
    format_weight: float = 0.0,
    tokens: int = 320,
    problems: int = 1319,
    held_out: float = 0.05,
    seconds: float = 0.0,
) -> Recipe:
    """It needs one GPU with 80 GB or more. A step has 128 x 8 answers in `mini_batches` updates, clipped at `clip_high`.
    `model` is a hub name, a directory or a GGUF file; `data` a folder with gsm8k-train.jsonl and gsm8k-test.jsonl, without
    which the hub's copy is read. A GGUF file is unpacked for every stage: to save these minutes, convert it to a directory
    first (benchmarks/real_models.py does). `seconds` ends RL early.

    An answer that does not end within `tokens` gets 0 (`truncated = "zero"`): the grader reads the last box, and a policy that
    was rewarded for it learned to repeat its answer up to the limit (docs/recipes/gsm8k.md). There is no KL term, because the
    reward is verifiable; KL from the start is only monitored. A share `held_out` of the training problems is not trained on, to
    tune settings: the curve is greedy accuracy on these. `before` and `after` are greedy answers to `problems` test problems,
    and decide nothing; the last step counts. A share of the reward for the box (`format_weight`) decides alone if all of a
    group is wrong: with a share of 0.1, and with `lr` 1e-5, answers became short before they became right. At equal cost,
    64 x 16 answers at 5e-6 learned half as fast as the defaults (docs/recipes/gsm8k.md).
    """
    task = Gsm8k(data=data, format_weight=format_weight)
    greedy = Sampling(tokens, temperature=0.0)
    stages = [
        evaluate("before", model, task, problems, greedy),
        RLStage(
            name="rl",
            model=model,
            task=replace(task, held_out=held_out),
            steps=steps,
            seconds=seconds,
            prompts=prompts,
            sampling=Sampling(tokens),
            algorithm=GRPO(
                group=group,
                beta=0.0,
                clip_high=clip_high,
                reduction="token_mean",
                truncated="zero",
                mini_batches=mini_batches,
            ),
            watch_kl=True,
            optimizer=falling(lr, 5, 0.25),
            evaluate_every=25,
            evaluate_problems=problems,
            checkpoint_every=50,
        ),
        evaluate("after", "rl", task, problems, greedy),
    ]
    return Recipe(tuple(stages), "before", "after", "posttrain run gsm8k steps=500")
