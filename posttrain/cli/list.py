"""List what is shipped: recipes, stages, algorithms, tasks, rewards."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from posttrain import catalogue
from posttrain.cli.base import add_json, print_json

KINDS = ("recipes", "stages", "algorithms", "tasks", "rewards")

EXAMPLE = "posttrain list algorithms --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", choices=KINDS)
    add_json(parser)


def call(options: argparse.Namespace) -> None:
    kinds = [options.kind] if options.kind else KINDS
    entries = {kind: catalogue.describe(kind.removesuffix("s")) for kind in kinds}
    if options.json:
        print_json({kind: [asdict(entry) for entry in found] for kind, found in entries.items()})
        return
    for kind, found in entries.items():
        sys.stdout.write(f"{kind}\n")
        width = max((len(entry.name) for entry in found), default=0)
        for entry in found:
            paper = f"  [{entry.paper}]" if entry.paper else ""
            sys.stdout.write(f"  {entry.name:<{width}} {entry.summary}{paper}\n")
