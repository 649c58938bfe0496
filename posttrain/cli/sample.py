"""Let a model answer a prompt."""

from __future__ import annotations

import argparse
import sys

from posttrain.cli.base import add_settings

EXAMPLE = "posttrain sample runs/quickstart-1/export '128+394='"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a run, RUN/stages/NAME/model, a directory, a GGUF file or a name of the hub"
    parser.add_argument("model", help=text)
    parser.add_argument("prompt")
    add_settings(parser, "temperature, max_new_tokens, group, seed, ...")


def call(options: argparse.Namespace) -> None:
    from posttrain.commands.inspect import sample
    from posttrain.runs.console import write_text

    for number, answer in enumerate(sample(options.model, options.prompt, options.settings)):
        figures = f"{answer.tokens} tokens, {answer.finish}, mean log-prob {answer.logprob:.3f}"
        write_text(f"[{number}] {answer.text}\n    ({figures})\n", sys.stdout)
