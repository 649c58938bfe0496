"""Compare two runs: held-out results in pairs, curves in one plot, settings that differ."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from posttrain.cli.base import add_json, print_json, print_lines

EXAMPLE = "posttrain compare runs/quickstart-1 runs/quickstart-2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="RUN")
    parser.add_argument("second", type=Path, metavar="OTHER")
    parser.add_argument("--stage", default="", help="the evaluation; ONE:OTHER for two names")
    parser.add_argument("--out", type=Path, help="the picture; default: compare-RUN-RUN.png here")
    add_json(parser)


def call(options: argparse.Namespace) -> None:
    from posttrain.commands.compare import compare_runs, lines
    from posttrain.runs.layout import encode

    found = compare_runs(options.first, options.second, options.out, options.stage)
    print_json(encode(asdict(found))) if options.json else print_lines(lines(found))
