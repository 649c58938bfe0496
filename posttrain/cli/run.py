"""Run a recipe: a shipped name, a YAML file, or file.py:function."""

from __future__ import annotations

import argparse

from posttrain.cli.base import add_allow_code, add_settings, report_sweep

EXAMPLE = "posttrain run quickstart seed=1 rl.lr=1e-4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe")
    more = "only=STAGE,... runs some alone; seeds=0,1,2 runs it with each of them"
    add_settings(parser, f"settings of the recipe and of its stages; {more}")
    text = (
        "a run with each of these values, as in rl.lr=1e-4,3e-4; may be given again for another key"
    )
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=VALUE,VALUE", help=text
    )
    add_allow_code(parser)


def call(options: argparse.Namespace) -> int | None:
    from posttrain import config, pipeline
    from posttrain.commands import sweep

    if sweep.axes(options.settings, options.sweep)[1]:
        words = options.recipe, options.settings, options.sweep
        return report_sweep(sweep.run(*words, options.allow_code))
    pipeline.start(config.parse(options.recipe, options.settings, options.allow_code))
    return None
