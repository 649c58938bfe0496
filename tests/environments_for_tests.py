"""Plays tasks whose environments are those of other packages with a scripted policy, in worker processes as a run does."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from sampler_for_tests import ScriptedSampler, completion

from posttrain import config_tree
from posttrain.data.text import Decoder
from posttrain.episodes import rollout_groups
from posttrain.models.tiny import character_tokenizer
from posttrain.system.workers import WorkerPool
from posttrain.tasks.base import Task
from posttrain.types import Group, Problem, Sampling

PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"
Policy = Callable[[str, int], str]  # what it reads in this turn, and the number of the turn


def needs(package: str, extra: str) -> Any:
    """The package, or a test that is skipped with one line."""
    hint = f"needs {package}: pip install 'posttrain[{extra}]', or make test-environments"
    return pytest.importorskip(package, reason=hint)


def play(task: Task, problems: Sequence[Problem], policy: Policy, samples: int = 1, template: str = "") -> list[Group]:
    """The groups of episodes in which the policy, whose chat template may be another, says what the function returns."""
    tokenizer = character_tokenizer(PRINTABLE)
    tokenizer.chat_template = template or tokenizer.chat_template

    def reply(request: Any) -> Any:
        text = policy(tokenizer.decode(request.ids), request.turn)
        return completion([*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])

    with WorkerPool([task], 2) as workers:
        return rollout_groups(task, ScriptedSampler(reply), Decoder(tokenizer), problems, samples, Sampling(200), 0, workers)


def page_task(task: str, **more: Any) -> Task:
    """The task of a section of docs/adapters.md, with some settings changed."""
    text = (Path(__file__).parent.parent / "docs" / "adapters.md").read_text()
    trees = [yaml.safe_load(block)["task"] for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    (tree,) = (tree for tree in trees if tree["name"].split(":")[0] == task)
    return config_tree.from_tree(tree | more, Task, "task")
