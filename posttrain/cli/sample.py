"""Sample a model's answer to a prompt."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from posttrain.cli.base import add_model, add_settings, print_warnings
from posttrain.errors import many

EXAMPLE = "posttrain sample runs/quickstart-1/export '128+394='"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("prompt")
    text = "of a run: the answers of every stage, one below the other"
    parser.add_argument("--stages", action="store_true", help=text)
    add_settings(parser, "temperature, max_new_tokens, n (answers), seed, ...")


def call(options: argparse.Namespace) -> None:
    from posttrain.commands.sample import sample, sample_stages
    from posttrain.events import printable
    from posttrain.runs.console import write_text

    if options.stages:
        found = list(sample_stages(Path(options.model), options.prompt, options.settings))
        width = max(len(stage) for stage, _ in found)
        print_warnings(found[0][1].warnings)
        for stage, answer in found:
            write_text(f"{stage:<{width}}  {printable(answer.text)}\n", sys.stdout)
        return
    for number, answer in enumerate(sample(options.model, options.prompt, options.settings)):
        print_warnings(answer.warnings if number == 0 else ())
        size = many(answer.tokens, "token")
        about = f"{size}, {answer.finish}, mean log-prob {answer.logprob:.3f}"
        write_text(f"[{number}] {answer.text}\n    ({about})\n", sys.stdout)
