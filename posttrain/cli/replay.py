"""Recompute a step of a run from the nearest checkpoint, and show which rollouts and tokens changed the model."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.cli.base import add_allow_code, add_json, print_json, print_lines

EXAMPLE = "posttrain replay runs/quickstart-1 rl/110 --without 17"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path)
    parser.add_argument("place", metavar="STAGE/STEP")
    text = "also make the update without the rollout (example, pair) of this number"
    parser.add_argument("--without", type=int, metavar="N", help=text)
    text = "a text, or the number of a rollout, whose log-prob before and after is shown"
    parser.add_argument("--answer", default="", help=text)
    parser.add_argument("--prompt", default="", help="what the text of --answer is an answer to")
    text = "which update, where a step has several (PPO's epochs and mini-batches)"
    parser.add_argument("--update", type=int, default=1, metavar="K", help=text)
    text = "how many are looked at token by token and printed"
    parser.add_argument("--top", type=int, default=5, metavar="N", help=text)
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write what --json prints")
    add_json(parser)
    add_allow_code(parser)


def call(options: argparse.Namespace) -> None:
    import json
    import sys

    from posttrain.runs.layout import require_run

    require_run(options.run)  # before torch is imported, which takes seconds
    from posttrain.commands.replay import lines, replay, tables
    from posttrain.runs.console import show, write_text
    from posttrain.system.files import atomic_write

    names = ("update", "without", "answer", "prompt", "top", "allow_code")
    asked = {name: getattr(options, name) for name in names}
    asked["say"] = lambda line: write_text(f"{line}\n", sys.stderr)
    found = replay(options.run, options.place, **asked)
    if options.save is not None:
        atomic_write(options.save, json.dumps(found.tree()), durable=False)
    if options.json:
        print_json(found.tree())
        return
    print_lines(lines(found))
    for table in tables(found, options.top):
        show(table)
