"""Say what a recipe would do, and what it needs, without training."""

from __future__ import annotations

import argparse

from posttrain.cli.base import add_allow_code, add_settings, print_lines

EXAMPLE = "posttrain plan quickstart rl.prompts=64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe")
    add_settings(parser, "settings of the recipe and of its stages")
    add_allow_code(parser)
    text = "run a few steps of every stage, to estimate how long it takes"
    parser.add_argument("--dry", action="store_true", help=text)


def call(options: argparse.Namespace) -> None:
    from posttrain import config
    from posttrain.commands.plan import describe

    settings = config.parse(options.recipe, options.settings, options.allow_code)
    print_lines(describe(settings, options.dry))
