"""Serves a model, or the models of a run's stages under their names, through an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain import config_tree
from posttrain.commands.models import MachineOptions, open_policy, stage_models
from posttrain.errors import Count, require
from posttrain.runs.layout import CONFIG
from posttrain.runs.read import Run
from posttrain.system.files import model_folder

if TYPE_CHECKING:
    from posttrain.commands.rewards import RunRewards
    from posttrain.serve.server import Address, Server

BASE = "base"  # the model with which the first stage of a run began


@dataclass(frozen=True, kw_only=True)
class ServeOptions(MachineOptions):
    """Options of `posttrain serve`."""

    token: str = ""  # "": none on this machine, else a new one, which is printed
    loaded: Count = 2  # models in memory
    rows: Count = 256  # samples decoded at once
    # requests that wait or are being answered; further ones are refused with 429
    requests: Count = 1024
    max_new_tokens: Count = 2048  # if a request does not set it
    body_bytes: Count = 4 << 20


def model_places(model: str) -> dict[str, str]:
    """Return the paths of the models by name, in the order in which a run made them; the last one is the default."""
    folder = Path(model).expanduser()
    if not (folder / CONFIG).is_file():
        return {folder.name if folder.exists() else model: model}
    stages = Run(folder).config.get("stages") or [{}]
    first = str(stages[0].get("model", ""))
    elsewhere = bool(first) and (Path(first).expanduser().is_dir() or "/" in first)
    base = {BASE: first} if elsewhere else {}
    return base | {name: str(place) for name, place in stage_models(folder).items()}


def context_length(place: str) -> int | None:
    """Return the context length in the configuration of a local model, before it is loaded."""
    with suppress(OSError, ValueError, AttributeError):
        tree = json.loads((model_folder(Path(place).expanduser()) / "config.json").read_text())
        return int(tree.get("max_position_embeddings")) or None
    return None


@contextmanager
def serving(
    model: str, settings: Sequence[str], **place: Any
) -> Iterator[tuple[Server, Sequence[str]]]:
    """Yield a server of a model or a run whose port is open and whose default model is loaded, and lines to show. `place` is its
    host, port and hosts, as of `Address`. The server of a run also provides the rewards of its reward models and rl stages."""
    needs = "serve needs its packages: pip install 'posttrain[serve]'"
    require(all(map(find_spec, ("starlette", "uvicorn"))), needs)
    from posttrain.commands.rewards import run_rewards
    from posttrain.serve.server import Address

    pairs = dict(map(config_tree.pair, settings))
    options: ServeOptions = config_tree.from_tree(pairs, ServeOptions, "serve")
    address = Address(token=options.token, **place).secured()
    folder = Path(model).expanduser()
    is_run = (folder / CONFIG).is_file()
    with run_rewards(folder, options.device) if is_run else nullcontext() as rewards:
        yield from _serving(model, options, address, rewards)


def _serving(
    model: str, options: ServeOptions, address: Address, rewards: RunRewards | None
) -> Iterator[tuple[Server, Sequence[str]]]:
    from posttrain.serve.app import Limits, application
    from posttrain.serve.models import Models
    from posttrain.serve.scoring import Scoring
    from posttrain.serve.server import make_server

    places = model_places(model)
    default = [*places][-1]
    first = {default: open_policy(places[default], options.device)}
    models = Models(
        {name: context_length(place) for name, place in places.items()},
        lambda name: first.pop(name, None) or open_policy(places[name], options.device),
        default,
        options.loaded,
        options.rows,
        options.max_new_tokens,
    )
    limits = Limits(options.body_bytes, options.requests)
    given = (rewards.models(), rewards.of_stages()) if rewards else ()
    scoring = Scoring(models, *given)
    lines = [rewards.note] if rewards and rewards.note else []
    try:
        server = make_server(application(lambda _: models, limits, scores=scoring), address, limits)
        lines.append(f"serving {', '.join(places)} at {server.url}/v1")
        made = address.token != options.token
        yield server, lines + ([f"token: {address.token}"] if made else [])
    finally:
        models.close()
