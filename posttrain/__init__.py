"""posttrain: reinforcement learning for language models. `import posttrain as pt`; see docs/python.md."""

import os
from typing import TYPE_CHECKING, Any

# Threads of OpenMP sleep while they wait for each other: spinning, they take the cores from every other process (6 times slower beside
# one). It is read once, when torch is loaded, and child processes inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"

if TYPE_CHECKING:
    from posttrain.api.functions import *  # noqa: F403
    from posttrain.api.run import Run as Run
    from posttrain.errors import UserError as UserError
    from posttrain.stages.reward_sources import JudgeReward as JudgeReward
    from posttrain.stages.reward_sources import RewardModels as RewardModels
    from posttrain.tasks.base import Task as Task
    from posttrain.types import Message as Message
    from posttrain.types import Problem as Problem
    from posttrain.types import Sampling as Sampling
    from posttrain.types import Score as Score

# where each name is; algorithms (GRPO, PPO, DPO, ...) are found in the catalogue
_PLACES = {
    "posttrain.api.functions": (
        "arguments comparisons dpo evaluate grpo load ppo preference probe reward reward_model rl run "
        "sample sft"
    ),
    "posttrain.api.run": "Run",
    "posttrain.errors": "UserError",
    "posttrain.stages.reward_sources": "JudgeReward RewardModels",
    "posttrain.tasks.base": "Task",
    "posttrain.types": "Message Problem Sampling Score",
}
_NAMES = {name: module for module, names in _PLACES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """What is imported when it is first used: torch takes seconds."""
    from importlib import import_module

    if name in _NAMES:
        found = getattr(import_module(_NAMES[name]), name)
    elif name[:1].isupper():
        from posttrain import catalogue

        plain = {entry.replace("_", ""): entry for entry in catalogue.names("algorithm")}
        if name.lower() not in plain:
            trl = name.endswith(("Trainer", "Config"))
            hint = "a trainer with its config is one call, such as pt.grpo(...): docs/trl.md"
            hint = hint if trl else "algorithms are in `posttrain list`"
            raise AttributeError(f"posttrain has no {name}; {hint}")
        found = getattr(import_module(f"posttrain.algorithms.{plain[name.lower()]}"), name)
    else:
        listed = ", ".join(_PLACES["posttrain.api.functions"].split())
        raise AttributeError(f"posttrain has no {name}; its functions are {listed}: docs/python.md")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
