"""List what is shipped: recipes, stages, algorithms, tasks, rewards; with a name, all of its keys."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from posttrain import catalogue
from posttrain.cli.base import add_json, print_json, print_lines

KINDS = ("recipes", "stages", "algorithms", "tasks", "rewards")

EXAMPLE = "posttrain list stages sft"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", choices=KINDS)
    text = "one of them, or a FILE.py:NAME: every key with its type, default and meaning"
    parser.add_argument("name", nargs="?", help=text)
    add_json(parser)


def call(options: argparse.Namespace) -> None:
    from posttrain.commands import keys

    if options.name:
        found = keys.keys_of(options.kind.removesuffix("s"), options.name)
        if options.json:
            print_json([asdict(key) for key in found])
        else:
            print_lines(line for key in found for line in key.lines())
        return
    kinds = [options.kind] if options.kind else KINDS
    entries = {kind: catalogue.describe(kind.removesuffix("s")) for kind in kinds}
    if options.json:
        print_json({kind: [asdict(entry) for entry in found] for kind, found in entries.items()})
        return
    for kind, listed in entries.items():
        sys.stdout.write(f"{kind}\n")
        width = max((len(entry.name) for entry in listed), default=0)
        for entry in listed:
            paper = f"  [{entry.paper}]" if entry.paper else ""
            sys.stdout.write(f"  {entry.name:<{width}} {entry.summary}{paper}\n")
            if options.kind == "stages":
                print_lines(keys.lines("stage", entry.name, nested=False))
