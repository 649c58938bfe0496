"""Shared code of the CPU benchmark: two-digit sums with a character tokenizer, a small Qwen2, and the work that both sides do."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.collect import Prompt, generate_groups
from posttrain.tasks.base import Task
from posttrain.types import Example, Problem, Sampling, Score

VOCABULARY = 128
HELD_OUT = 512
LARGEST = 74  # with this, 600 steps of fine-tuning leave something for reinforcement learning to do
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # both sides see the bare text


@dataclass(frozen=True, kw_only=True)
class Addition(Task):
    """12+34= -> 46. With `random_reward` the score is luck: for timing, where nothing must be learned."""

    random_reward: bool = False

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        pairs = [(a, b) for a in range(10, LARGEST + 1) for b in range(10, LARGEST + 1)]
        random.Random(0).shuffle(pairs)
        chosen = pairs[:HELD_OUT] if split == "test" else pairs[HELD_OUT:]
        return [Problem(f"{a}+{b}", f"{a}+{b}=", str(a + b)) for a, b in chosen]

    def score(self, problem: Problem, response: str) -> Score:
        if self.random_reward:
            return Score(random.random())
        return Score(float(response.removesuffix("<|end|>") == problem.answer))


def make_tokenizer() -> Any:
    """One token a character, 128 in all."""
    from posttrain.models.tiny import SPECIAL_TOKENS, character_tokenizer

    extra = "".join(chr(n) for n in range(0xC0, 0x180))
    alphabet = "".join(dict.fromkeys(string.digits + "+=" + string.printable + extra))[: VOCABULARY - len(SPECIAL_TOKENS)]
    tokenizer = character_tokenizer(alphabet)
    tokenizer.chat_template = PLAIN_TEMPLATE
    return tokenizer


def make_model(tokenizer: Any, spread: float) -> Any:
    """2.79M parameters with random weights. A larger `spread` makes a distribution far from uniform."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=640, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True, initializer_range=spread,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load(folder: Path) -> tuple[Any, Any]:
    """The model and its tokenizer as they were saved, for either side."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer


def example(tokenizer: Any, problem: Problem) -> Example:
    """A worked sum, with loss on the answer and its end."""
    prompt, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (problem.question, problem.answer))
    ids = [*prompt, *answer, tokenizer.eos_token_id]
    return Example(np.array(ids, np.int64), np.arange(len(ids)) >= len(prompt))


def accuracy(model: Any, tokenizer: Any) -> float:
    """Share of the held-out sums that argmax gets right, by the same code for both sides."""
    from posttrain.engine.engine import Engine
    from posttrain.models.policy import wrap_model

    problems = Addition().problems("test")
    greedy = Sampling(max_new_tokens=8, temperature=0.0)
    requests = [Prompt(tuple(tokenizer(p.question)["input_ids"]), 1, 0, greedy) for p in problems]
    stock = model.config._attn_implementation
    answers = generate_groups(Engine(wrap_model(model, tokenizer, (tokenizer.eos_token_id,))), requests)
    texts = [tokenizer.decode(one.ids) for (one,) in answers]
    model.set_attn_implementation(stock)
    return sum(Addition().score(p, text).value or 0.0 for p, text in zip(problems, texts, strict=True)) / len(problems)


def finetune(folder: Path, enough: float = 0.75, steps: int = 600, batch: int = 64) -> float:
    """Teach a fresh model to add, not quite: SFT with a cosine from 1e-3 until it is right often `enough`. Saves it and returns its
    accuracy."""
    from posttrain.algorithms.sft import SFT
    from posttrain.models.attention import install
    from posttrain.models.policy import wrap_model
    from posttrain.train.optimizer import Optimization
    from posttrain.train.pack import pack_examples
    from posttrain.train.trainer import Trainer

    tokenizer = make_tokenizer()
    model = make_model(tokenizer, 0.02)
    settings = Optimization(lr=1e-3, schedule="cosine", beta2=0.999)
    trainer = Trainer(wrap_model(model, tokenizer, (tokenizer.eos_token_id,)), SFT(), settings)
    examples = [example(tokenizer, problem) for problem in Addition().problems("train")]
    generator = np.random.default_rng(0)
    for step in range(steps):
        chosen = [examples[i] for i in generator.choice(len(examples), batch, replace=False)]
        trainer.update(SFT().prepare(pack_examples(chosen), {}), settings.rate(step, steps))
        if step >= 200 and step % 20 == 0:
            reached = accuracy(model, tokenizer)
            install(model)  # measuring leaves the stock attention behind
            if reached >= enough:
                break
    model.set_attn_implementation("sdpa")
    save(folder, model, tokenizer)
    return reached
