"""Load a real pretrained model, ask it a question, and train it for a few GRPO steps on your own task.

    python examples/real_model.py PATH [STEPS]

PATH is a .gguf file (pip install posttrain[gguf]), a model directory with safetensors weights, or a hub name (org/name).
SmolLM2-135M-Instruct, for example, loads in about 15 seconds and answers on a CPU.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from posttrain.algorithms.grpo import GRPO
from posttrain.collect import Prompt, generate_groups
from posttrain.data.chat import render_prompt
from posttrain.data.text import Decoder
from posttrain.engine.engine import Engine
from posttrain.errors import UserError
from posttrain.models.load import Loaded, load
from posttrain.models.policy import Policy, wrap_model
from posttrain.pipeline import fresh
from posttrain.runs.write import RunWriter
from posttrain.stages.base import Context, run_stages
from posttrain.stages.rl import RLStage
from posttrain.tasks.base import Task
from posttrain.train.optimizer import Optimization
from posttrain.types import Message, Problem, Sampling, Score

QUESTION = "What is the capital of France?"


def describe(loaded: Loaded) -> None:
    """Print the family, the size, and the tokens that end an answer."""
    model, tokenizer = loaded.model, loaded.tokenizer
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    print(f"family      {model.config.model_type}, {model.config.num_hidden_layers} layers, width {model.config.hidden_size}")
    precision = str(model.dtype).removeprefix("torch.")
    print(f"parameters  {model.num_parameters():,} in {precision}, head {'tied to the embedding' if tied else 'its own'}")
    print(f"vocabulary  {len(tokenizer):,}")
    print(f"stops at    {', '.join(tokenizer.convert_ids_to_tokens(list(loaded.stop_ids)))}")


def answer(policy: Policy, question: str, max_new_tokens: int = 64) -> str:
    """The model's likeliest answer, from the engine that training samples with."""
    # The template renders a conversation as the exact ids, including role markers, that the model was trained on.
    prompt = render_prompt(policy.tokenizer, (Message("user", question),))
    request = Prompt(prompt, samples=1, seed=0, sampling=Sampling(max_new_tokens, temperature=0.0))
    completion = next(iter(generate_groups(Engine(policy), [request])))[0]
    return Decoder(policy.tokenizer).decode(completion.ids)[0]


@dataclass(frozen=True)
class Sums(Task):
    """Your own task: problems, a prompt and a score."""

    def problems(self, split: str, level: int | None = None) -> list[Problem]:
        pairs = [(a, b) for a in range(1, 6) for b in range(1, 6) if ((a + 2 * b) % 5 == 0) == (split == "test")]
        return [Problem(f"{split}/{a}+{b}", f"What is {a} + {b}? Answer with one number.", str(a + b)) for a, b in pairs]

    def score(self, problem: Problem, response: str) -> Score:
        numbers = re.findall(r"\d+", response)
        right = bool(numbers) and numbers[-1] == problem.answer
        return Score(float(right), outcome="correct" if right else "wrong")


def train(path: str, steps: int, run: Path) -> None:
    """Train the model for a few GRPO steps, in a normal run directory."""
    stage = RLStage(
        name="rl",
        model=path,
        task=Sums(),
        steps=steps,
        prompts=4,
        algorithm=GRPO(group=4, beta=0.0),
        sampling=Sampling(max_new_tokens=16, temperature=0.7),
        optimizer=Optimization(lr=2e-6),
        evaluate_every=steps,
        evaluate_problems=5,
        rollouts_every=1,
    )
    with RunWriter.create(run, {"model": path}) as writer:
        run_stages([stage], Context(writer, seed=0, device="cuda" if torch.cuda.is_available() else "cpu"))
    print(f"look at what it wrote: posttrain show {run}")


def main() -> int:
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    path, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) == 3 else 3
    try:
        began = time.perf_counter()
        loaded = load(path, dtype="float32")
        print(f"loaded {path} in {time.perf_counter() - began:.1f} s")
        describe(loaded)
        policy = wrap_model(loaded.model, loaded.tokenizer, loaded.stop_ids, path)
        print(f"\n{QUESTION}\n{answer(policy, QUESTION)}\n")
        if steps:
            train(path, steps, fresh(Path("runs"), "real-model"))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
