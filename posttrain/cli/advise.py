"""Advise a method for a goal, given your data and compute."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from posttrain.cli.base import add_json, print_json, print_lines

EXAMPLE = "posttrain advise math --have demonstrations,verifier --compute laptop"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("goal", nargs="*", help="without one, the goals there are")
    kinds = "demonstrations, comparisons, feedback, verifier, judge"
    parser.add_argument("--have", default="nothing", help=f"data at hand, with commas: {kinds}")
    parser.add_argument("--compute", default="gpu", help="laptop, gpu or cluster")
    parser.add_argument("--config", action="store_true", help="print the recipe alone, as YAML")
    add_json(parser)


def call(options: argparse.Namespace) -> None:
    from posttrain.commands.advise import GOALS, advise, lines, recipe_text

    if not options.goal:
        titles = {name: goal.title for name, goal in GOALS.items()}
        if options.json:
            print_json(titles, indent=None)
        else:
            print_lines(f"{name:<10} {title}" for name, title in titles.items())
            print_lines([f"choose a goal, and say what you have: {EXAMPLE}"])
        return
    have = [word for word in options.have.split(",") if word]
    found = advise(" ".join(options.goal), have, options.compute)
    if options.config:
        print_lines(recipe_text(found).splitlines())
    elif options.json:
        print_json(asdict(found))
    else:
        print_lines(lines(found))
