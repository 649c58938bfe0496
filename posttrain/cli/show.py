"""Print rollouts, or one of them as a Markov decision process, token by token."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.cli.base import print_lines

EXAMPLE = "posttrain show runs/quickstart-1 rl/120/0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path)
    text = "STAGE/STEP/NUMBER; without it, the rollouts of the last step"
    parser.add_argument("rollout", nargs="?", default="", help=text)


def call(options: argparse.Namespace) -> None:
    from posttrain.runs.layout import require_run

    require_run(options.run)  # before torch is imported, which takes seconds
    from posttrain.commands.show import show

    print_lines(show(options.run, options.rollout))
