"""Loads the model of a command, with the options that say where it runs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from posttrain import config, config_tree
from posttrain.errors import Checked, Seed, require
from posttrain.runs.read import Run
from posttrain.system import machine
from posttrain.types import JSON

Options = TypeVar("Options", bound="MachineOptions")


def open_policy(name: str, device: str = "auto") -> Any:
    """Load a model for inference."""
    from posttrain.models.load import load
    from posttrain.models.policy import wrap_model

    device = machine.device(device)
    loaded = load(name, dtype="bfloat16" if device.startswith("cuda") else "float32", device=device)
    return wrap_model(loaded.model, loaded.tokenizer, loaded.stop_ids, loaded.source)


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Checked):
    """Where a model runs, and its seed."""

    seed: Seed = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        config.check_machine(self.seed, self.device)
        super().__post_init__()


def take_options(pairs: dict[str, JSON], kind: type[Options], where: str) -> Options:
    """Take the options of a kind out of the settings and check them."""
    tree = {field.name: pairs.pop(field.name) for field in fields(kind) if field.name in pairs}
    made: Options = config_tree.from_tree(tree, kind, where)
    return made


def stage_models(directory: Path) -> dict[str, Path]:
    """Return the models of a run that can generate, by stage; raises an error if there is none."""
    from posttrain.stages._side_by_side import answering_models

    found = answering_models(directory, Run(directory).configured)
    require(found, f"{directory}: none of its stages has made a model that answers")
    return found
