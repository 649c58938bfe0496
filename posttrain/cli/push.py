"""Send a run's model, or its adapters, to a hub, with a model card made from the run."""

from __future__ import annotations

import argparse

from posttrain.cli.base import add_model_of_run, chosen_model, print_lines

EXAMPLE = "posttrain push runs/quickstart-1 org/name"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_of_run(parser)
    parser.add_argument("repository", help="org/name; made where it is not there")
    text = "make the repository public, not private"
    parser.add_argument("--public", action="store_true", help=text)


def call(options: argparse.Namespace) -> None:
    from posttrain.commands.export import push

    print_lines(push(chosen_model(options), options.repository, options.public))
