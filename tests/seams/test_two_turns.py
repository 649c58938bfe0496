"""A task of two turns: what is trained on is exactly what was sampled, the cache is kept between turns, and a kill changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import yaml

from posttrain.catalogue import load
from posttrain.data.text import Decoder
from posttrain.engine.engine import Engine
from posttrain.episodes import rollout_groups
from posttrain.models.policy import wrap_model
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.runs.read import Run
from posttrain.train.pack import pack_groups, token_versions
from posttrain.types import Sampling

TASK = f"{Path(__file__).with_name('two_turns.py')}:TwoTurns"
STAGE = {"stage": "rl", "name": "rl", "model": "tiny:nano", "task": {"name": TASK}, "steps": 4, "prompts": 2,
         "algorithm": {"name": "grpo", "group": 2, "beta": 0.0}, "sampling": {"max_new_tokens": 5}, "checkpoint_every": 1,
         "evaluate_every": 0, "rollouts_every": 1}  # fmt: skip


def test_ids_masks_and_log_probs_are_exact_and_the_cache_is_kept() -> None:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789. ")
    policy = wrap_model(tiny_model(tokenizer, "nano", 0), tokenizer, (tokenizer.eos_token_id,))
    engine, task = Engine(policy, processes=1), load("task", TASK)()
    groups = rollout_groups(task, engine, Decoder(tokenizer), task.problems("train")[:3], 2, Sampling(6), 3)
    rollouts = [r for g in groups for r in g.rollouts]
    for rollout in rollouts:
        first, turn, given, second = rollout.segments
        assert tokenizer.decode(given.ids).endswith(
            f"<|user|>{len(turn.text)} letters. again<|end|><|user|>{len(turn.text) + 1}<|end|><|assistant|>"
        )
        mask = np.concatenate([np.full(len(s.ids), sampled) for s, sampled in ((first, 0), (turn, 1), (given, 0), (second, 1))])
        assert (rollout.mask == mask).all() and not rollout.mask[0]
        with torch.no_grad():
            logits = policy.model(torch.from_numpy(rollout.ids)[None]).logits[0]
        by_hand = logits.log_softmax(-1)[torch.arange(len(rollout.ids) - 1), torch.from_numpy(rollout.ids[1:])].numpy()
        sampled = np.concatenate([turn.logprobs, second.logprobs])  # type: ignore[list-item]
        np.testing.assert_allclose(sampled, by_hand[rollout.mask[1:]], atol=1e-5)
    batch = pack_groups(groups, 1.0)
    assert batch.ids_T.tolist() == [i for r in rollouts for i in r.ids]
    assert batch.mask_T.tolist() == [m for r in rollouts for m in r.mask]
    assert (token_versions(groups, batch) == torch.where(batch.mask_T, 0, -1)).all()
    # each prompt once for its group; of a second turn what was given, and the sampled token that was not read yet
    prompts = sum(len(g.rollouts[0].segments[0].ids) for g in groups)
    later = sum(len(r.segments[2].ids) + 1 for r in rollouts)
    assert engine.statistics.recomputed == 0 and engine.statistics.prefilled <= prompts + later


def run(folder: Path, command: str, kill: str = "") -> int:
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"seed": 7, "device": "cpu", "threads": 1, "stages": [STAGE]}))
    arguments = [str(recipe), f"out={folder / 'run'}"] if command == "run" else [str(folder / "run")]
    process = [sys.executable, "-m", "posttrain", command, *arguments, "--allow-code"]
    return subprocess.run(process, env=os.environ | {"TWO_TURNS_KILL": kill}, timeout=300).returncode


def test_a_run_killed_between_two_turns_resumes_to_the_bit(tmp_path: Path) -> None:
    whole, killed, left = tmp_path / "whole", tmp_path / "killed", tmp_path / "left"
    whole.mkdir(), killed.mkdir()
    left.write_text("11")  # episodes, of 4 in a step: in the third step
    assert run(whole, "run") == 0 and run(killed, "run", str(left)) == -9 and run(killed, "resume") == 0
    assert left.read_text() == "0" and Run(killed / "run").events()[-1].attempt == 2
    weights = [(folder / "run" / "export" / "model.safetensors").read_bytes() for folder in (whole, killed)]
    assert weights[0] == weights[1]
    rows = [[row.conversation for row in Run(folder / "run").rollouts("rl", 4)] for folder in (whole, killed)]
    assert rows[0] == rows[1] and len(rows[0][0]) == 4
