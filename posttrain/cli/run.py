"""Run a recipe: a shipped name, a YAML file, or file.py:function."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from posttrain import catalogue
from posttrain.cli import base
from posttrain.errors import UserError

EXAMPLE = "posttrain run quickstart seed=1 rl.lr=1e-4"


class Help(argparse.Action):
    """`run --help`; after a recipe, every key of that recipe."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any
    ) -> None:
        if recipe := getattr(namespace, "recipe", None):
            base.print_lines(_keys(recipe))
        else:
            parser.print_help()
        parser.exit()


def _keys(recipe: str) -> Iterator[str]:
    from posttrain import config
    from posttrain.commands import keys
    from posttrain.trust import code_place

    try:
        stages = config.parse(recipe, []).recipe.stages
    except UserError as error:
        if not code_place(recipe):
            raise
        return iter([*keys.recipe_lines(recipe, {}), f"its stages are not known yet: {error}"])
    return keys.recipe_lines(recipe, {stage.name: catalogue.name_of(stage) for stage in stages})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "show this; after a recipe, every key with its type, default and meaning"
    parser.add_argument("-h", "--help", action=Help, nargs=0, help=text)
    parser.add_argument("recipe")
    more = "only=STAGE,... runs some alone; seeds=0,1,2 runs it with each of them"
    base.add_settings(parser, f"settings of the recipe and of its stages; {more}")
    base.add_sweep(parser)
    base.add_allow_code(parser)


def call(options: argparse.Namespace) -> int | None:
    catalogue.check_recipe(options.recipe)  # before torch is imported, which takes seconds
    from posttrain import config, pipeline
    from posttrain.commands import sweep

    if sweep.axes(options.settings, options.sweep)[1]:
        words = options.recipe, options.settings, options.sweep
        return base.report_sweep(sweep.run(*words, options.allow_code))
    settings = config.parse(options.recipe, options.settings, options.allow_code)
    directory = pipeline.place(settings)
    command = ["run", options.recipe, *options.settings, f"out={directory}"]
    code = base.start_processes(command, options.allow_code, settings, directory)
    if code is None:
        pipeline.start(settings)
    return code
