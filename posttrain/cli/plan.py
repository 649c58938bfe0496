"""Show what a recipe would do and need, without training; or what a model of any size would need on many GPUs."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain import catalogue
from posttrain.cli.base import add_allow_code, add_settings, add_sweep, print_lines
from posttrain.errors import require

EXAMPLE = "posttrain plan quickstart rl.prompts=64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", default="")
    add_settings(parser, "settings of the recipe and of its stages; with --params prompts=512, ...")
    add_sweep(parser)
    add_allow_code(parser)
    text = "run a few steps of every stage, to estimate how long it takes"
    parser.add_argument("--dry", action="store_true", help=text)
    sizes = "a size such as 70B or 30B-A3B, or the folder or the name of a model"
    parser.add_argument("--params", help=f"in place of a recipe: {sizes}")
    parser.add_argument("--gpus", type=int, default=8, help="how many of them, with --params")
    parser.add_argument("--gpu", default="h100", help="their kind: h100, h200, a100, ...")


def call(options: argparse.Namespace) -> None:
    if options.params is not None:
        from posttrain.cluster import estimate

        words = [*([options.recipe] if options.recipe else []), *options.settings]
        work = estimate.with_settings(estimate.Work(), words)
        shape = estimate.shape_of(options.params)
        print_lines(estimate.lines(shape, work, options.gpu, options.gpus))
        return
    require(options.recipe, "give a recipe, or a size with --params; see 'posttrain plan --help'")
    catalogue.check_recipe(options.recipe)  # before torch is imported, which takes seconds
    from posttrain import config
    from posttrain.commands import sweep
    from posttrain.commands.plan import describe

    plain, several = sweep.axes(options.settings, options.sweep)
    runs = [run.arguments for run in sweep.members(Path(), several)]
    found = [config.parse(options.recipe, [*plain, *run], options.allow_code) for run in runs]
    if several:
        sweep.check(found[0])
        print_lines([f"a sweep of {len(runs)}; this is the run with {', '.join(runs[0])}"])
    print_lines(describe(found[0], options.dry))
