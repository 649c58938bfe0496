"""Talk with a model in the terminal. /new begins another conversation; an empty line or Ctrl-D ends it."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator

from posttrain.cli.base import add_model, add_settings, print_lines, print_warnings
from posttrain.errors import UserError

EXAMPLE = "posttrain chat runs/quickstart-1 temperature=0.7"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_settings(parser, "temperature, max_new_tokens, seed, ...")


def call(options: argparse.Namespace) -> None:
    from posttrain.commands.sample import chat

    for answer in chat(options.model, asked(typed("> ")), options.settings):
        print_warnings(answer.warnings)
        print_lines(answer.text.splitlines() or [""])


def asked(lines: Iterable[str]) -> Iterator[str]:
    """Yield the messages to the model, and /new. Any other word after a slash looks like a mistyped command: print the known
    ones."""
    for line in lines:
        if re.fullmatch(r"/[a-z]+", line.strip()) and line.strip() != "/new":
            print_lines([(__doc__ or "").partition(". ")[2]])
        else:
            yield line


def typed(prompt: str) -> Iterator[str]:
    """Yield lines from the terminal, or from a pipe without a prompt, up to an empty one."""
    while True:
        try:
            line = input(prompt if sys.stdin.isatty() else "")
        except EOFError:
            return
        except UnicodeDecodeError:
            raise UserError("the message is not UTF-8 text") from None
        if not line.strip():
            return
        yield line
