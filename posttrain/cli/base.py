"""Arguments and output that the commands share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain import catalogue
from posttrain.errors import UserError
from posttrain.trust import code_place

if TYPE_CHECKING:  # imports numpy
    from posttrain.commands.export import Chosen
    from posttrain.config import Settings
    from posttrain.types import JSON

TRUST = "trust the YAML file or the run like a program: code, addresses and files it names"


def add_settings(parser: argparse.ArgumentParser, text: str = "") -> None:
    parser.add_argument("settings", nargs="*", metavar="key=value", help=text)


def add_model(parser: argparse.ArgumentParser) -> None:
    text = "a run, RUN/stages/NAME, a directory, a GGUF file or a name of the hub"
    parser.add_argument("model", help=text)


def add_address(parser: argparse.ArgumentParser, port: int) -> None:
    """Add arguments that say where a server listens."""
    text = "the address to listen at; beyond this machine every request needs the token that is printed"
    parser.add_argument("--host", default="127.0.0.1", help=text)
    parser.add_argument("--port", type=int, default=port, help=f"default: {port}; 0: any free one")
    text = "a name by which clients reach it, where that is not --host; may be given again"
    parser.add_argument("--name", action="append", default=[], help=text)


def add_allow_code(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--allow-code", action="store_true", help=TRUST)


def add_sweep(parser: argparse.ArgumentParser) -> None:
    text = "a run with each of these values, as in rl.lr=1e-4,3e-4"
    text += "; may be given again for another key"
    form = "KEY=VALUE,VALUE"
    parser.add_argument("--sweep", action="append", default=[], metavar=form, help=text)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def add_model_of_run(parser: argparse.ArgumentParser) -> None:
    """Add arguments that select a model of a run, and the fields of its card."""
    parser.add_argument("run")
    text = "the stage whose model it is; the last one that made one without this"
    parser.add_argument("--stage", default="", metavar="NAME", help=text)
    text = "the adapters of LoRA alone, not the model that they are merged into"
    parser.add_argument("--adapter", action="store_true", help=text)
    text = "of --adapter: the model on the hub that the adapters are for, where the run began with a copy of it"
    parser.add_argument("--base", default="", metavar="ORG/NAME", help=text)
    text = "the hub's identifier, such as apache-2.0; without it the card says that none is stated"
    parser.add_argument("--license", default="", metavar="ID", help=text)
    text = "your own README.md, not the one made from the run"
    parser.add_argument("--card", metavar="FILE", help=text)


def chosen_model(options: argparse.Namespace) -> Chosen:
    from posttrain.commands.export import Chosen

    given = (options.stage, options.adapter, options.base, options.license)
    return Chosen(Path(options.run), *given, Path(options.card) if options.card else None)


def check_tasks(names: Iterable[str]) -> None:
    """Refuse a mistyped task before torch is imported, which takes seconds. Each is NAME, NAME:VALUE or FILE.py:NAME."""
    for name in names:
        whole = code_place(name) is not None
        catalogue.check_name("task", name if whole else name.partition(":")[0])


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they come. Text of a model within a line cannot end it or control the terminal."""
    from posttrain.events import printable
    from posttrain.runs.console import write_text

    for line in lines:
        write_text(f"{printable(line)}\n", sys.stdout)


def print_warnings(lines: Iterable[str]) -> None:
    """Print warnings as lines of stderr, so that they do not mix with what a program reads."""
    from posttrain.runs.console import write_text

    for line in lines:
        write_text(f"warning: {line}\n", sys.stderr)


def print_json(value: JSON, indent: int | None = 2) -> None:
    sys.stdout.write(json.dumps(value, indent=indent) + "\n")


def start_processes(
    words: list[str], allow_code: bool, settings: Settings, directory: Path
) -> int | None:
    """Run the same command in several processes and return its exit code. None if it asks for one, or if this is one of
    them."""
    from posttrain.cluster.launch import launch
    from posttrain.pipeline import check_processes, placement
    from posttrain.train import processes

    if settings.processes == 1 or processes.size() > 1:
        return None
    check_processes(settings, settings.processes)
    words = [*words, *(["--allow-code"] if allow_code else [])]
    if not settings.cluster:
        return launch(words, settings.processes, directory)
    from posttrain.cluster.ray_cluster import launch_ranks

    return launch_ranks(words, placement(settings), directory)


def fail(text: str, code: int) -> int:
    """Print one line of error and return the exit code."""
    from posttrain.runs.console import write_text

    line = " ".join(part.strip() for part in text.splitlines())  # a path may have two spaces
    with suppress(OSError, UserError):  # the code is left to say it
        write_text(f"posttrain: {line.strip()}\n", sys.stderr)
    return code


def report_sweep(failed: int) -> int:
    """Return the exit code of a sweep in which `failed` runs failed."""
    text = f"{failed} of the sweep's runs failed; their directories say why in failure.txt"
    return fail(text, 1) if failed else 0
