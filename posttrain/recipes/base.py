"""What a recipe is: a function of its own name that returns stages. Its parameters are the recipe's top-level settings."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.stages.base import Stage


@dataclass(frozen=True)
class Recipe:
    """Stages in order, and which two evaluations the summary compares."""

    stages: tuple[Stage, ...]
    before: str = ""  # an evaluate stage
    after: str = ""
    next_command: str = ""  # what to try afterwards
