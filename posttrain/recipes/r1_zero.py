"""R1-Zero: pure RL from a base model, with only accuracy and format rewards."""

from __future__ import annotations

from posttrain.algorithms.grpo import GRPO
from posttrain.data.curriculum import Curriculum
from posttrain.errors import require
from posttrain.recipes._toys import SHOWN, pretrained
from posttrain.recipes.base import Recipe, evaluate, falling, given
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.sums import Sums
from posttrain.types import Sampling

DIGITS = 2  # digits of the sums for a real model


def r1_zero(
    size: str = "nano",
    steps: int | None = None,
    samples: int | None = None,
    model: str = "",
    lr: float | None = None,
    prompts: int | None = None,
    problems: int | None = None,
    examples: int | None = None,
) -> Recipe:
    """DeepSeek-R1-Zero on three-digit sums, on a CPU: a base model pretrained on worked sums, of which those of three digits forget
    four carries in five, then GRPO without any fine-tuning between. pass@k of the base and the trained model up to `samples`
    shows what RL added and what it only made likelier.

    With a `model` (a hub name, a directory, a GGUF file) it trains a real model, which is the base, and the sums are asked in
    words. Its prompt has `examples` solved sums before the question (2 by default), from which it takes the form and the way to
    add. With examples=0 it starts as R1-Zero does: no solved sum, and words ask for the form.
    """
    fine = bool(model) or examples is None
    require(fine, "r1_zero: examples are for a real model: give one as model")
    if model:
        sums = Sums(level=DIGITS, min_level=DIGITS, examples=given(examples, 2))
        asked = given(samples, 256), given(problems, 200)
        return real(model, sums, given(steps, 50), given(lr, 3e-5), given(prompts, 128), *asked)
    measured = given(problems, 500), Sampling(40), given(samples, 32)
    task = Arithmetic(level=3, format_weight=0.1)
    stages = [
        pretrained(size, *SHOWN, steps=1000),
        evaluate("base", "pretrain", task, *measured),
        RLStage(
            name="rl",
            model="pretrain",
            task=task,
            steps=given(steps, 200),
            prompts=given(prompts, 32),
            algorithm=GRPO(group=8, beta=0.0, reduction="token_mean"),
            sampling=Sampling(max_new_tokens=32),
            curriculum=Curriculum(start=2, review=0.1),
            watch_kl=True,
            optimizer=falling(given(lr, 3e-4)),
        ),
        evaluate("trained", "rl", task, *measured),
    ]
    return Recipe(tuple(stages), "base", "trained", "posttrain run r1_zero steps=400")


def real(
    model: str, task: Sums, steps: int, lr: float, prompts: int, samples: int, problems: int
) -> Recipe:
    """Train a real model, on one GPU: greedy accuracy on held-out sums, and pass@k on two in five of them, before and after."""
    # without an example to copy, the model reasons in its own words, which takes more tokens
    tokens, whole = 48 if task.examples else 160, 5 * problems // 2
    sampling, greedy = Sampling(tokens), Sampling(tokens, temperature=0.0)
    stages = [
        evaluate("before", model, task, whole, greedy),
        evaluate("base", model, task, problems, sampling, samples),
        RLStage(
            name="rl",
            model=model,
            task=task,
            steps=steps,
            prompts=prompts,
            sampling=sampling,
            algorithm=GRPO(group=16, beta=0.0, reduction="token_mean"),
            watch_kl=True,
            optimizer=falling(lr, 5, token_budget=32768),
            evaluate_every=25,
            evaluate_problems=whole,
            checkpoint_every=50,
        ),
        evaluate("trained", "rl", task, problems, sampling, samples),
        evaluate("after", "rl", task, whole, greedy),
    ]
    again = f"posttrain run r1_zero model={model} lr=1e-5 steps=150"
    return Recipe(tuple(stages), "before", "after", again)
