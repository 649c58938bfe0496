"""Choose the better of two or more responses in the terminal; what was chosen is data for dpo and reward models."""

from __future__ import annotations

import argparse
import sys

from posttrain.cli.base import print_lines
from posttrain.cli.chat import typed

EXAMPLE = "posttrain label comparisons.jsonl --out labels.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "rows of prompt and responses (a list), or of prompt, chosen and rejected"
    parser.add_argument("file", help=text)
    text = "the file that labels are added to; FILE.labels.jsonl where none is given"
    parser.add_argument("--out", default="", help=text)


def call(options: argparse.Namespace) -> None:
    from posttrain.commands.label import Labels

    labels, answers = (
        Labels.read(options.file, options.out),
        typed("best (number, s: skip, q: end): "),
    )
    for row in labels.open_rows():
        print_lines(row.lines())
        if not labels.ask(row, answers):
            break
    sys.stdout.write(f"{labels.count} rows are labelled in {labels.out}\n")
