"""Shared by summarize and rlaif: the settings of a toy model that summarises posts, and of a real one with the user's files."""

from __future__ import annotations

from dataclasses import replace

from posttrain.algorithms.ppo import PPO
from posttrain.errors import require
from posttrain.recipes._feedback import REAL_RATES, Scale, imitate_file
from posttrain.recipes._toys import imitating
from posttrain.stages._material import Data
from posttrain.stages.base import Stage
from posttrain.tasks.posts import Posts
from posttrain.tasks.prompts import Prompts
from posttrain.types import Sampling

PEOPLE = Data(task=Posts("any"), counts={0: 20_000})  # summaries as people write them
TOY = Scale(
    task=Posts(),
    sampling=Sampling(max_new_tokens=60),
    steps=25,
    prompts=64,
    problems=1000,
    compared=5000,
    fit_steps=400,
    algorithm=PPO(epochs=2, mini_batches=2, beta=0.3, critic_warmup=5, missing_eos=1.0),
)
REAL = Scale(
    task=Posts(),
    sampling=Sampling(64),
    steps=60,
    prompts=256,
    algorithm=PPO(epochs=2, mini_batches=2, beta=0.05, critic_warmup=3, missing_eos=1.0),
    **REAL_RATES,
)


def beginning(
    recipe: str,
    size: str,
    model: str,
    file: str,
    demonstrations: str,
    tokens: int,
    sft_steps: int = 400,
) -> tuple[list[Stage], Scale]:
    """Return the stages before feedback, and the settings: a toy model that imitates people for `sft_steps` steps, or a real one
    for the prompts of a file."""
    if not model:
        files = "files of prompts and demonstrations are for a real model"
        alone = f"{recipe}: {files}: give one as model"
        require(not (file or demonstrations), alone)
        return [imitating(size, PEOPLE, steps=sft_steps)], TOY
    require(bool(file), f"{recipe}: a real model needs a JSONL file of prompts")
    scale = replace(REAL, start=model, task=Prompts(file, held_out=0.2), sampling=Sampling(tokens))
    if not demonstrations:
        return [], scale
    return [imitate_file(model, demonstrations, steps=100)], replace(scale, start="sft")
