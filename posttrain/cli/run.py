"""Run a recipe: a shipped name, a YAML file, or file.py:function."""

from __future__ import annotations

import argparse

from posttrain.cli.base import add_allow_code, add_settings, report_sweep

EXAMPLE = "posttrain run quickstart seed=1 rl.lr=1e-4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe")
    sweep = "several values, as in seeds=0,1,2 rl.lr=1e-4,3e-4, make a sweep"
    only = "only=STAGE,... runs some alone"
    add_settings(parser, f"settings of the recipe and of its stages; {only}; {sweep}")
    add_allow_code(parser)


def call(options: argparse.Namespace) -> int | None:
    from posttrain import config, pipeline
    from posttrain.commands import sweep

    if sweep.axes(options.settings)[1]:
        return report_sweep(sweep.run(options.recipe, options.settings, options.allow_code))
    pipeline.start(config.parse(options.recipe, options.settings, options.allow_code))
    return None
