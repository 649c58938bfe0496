"""Choose the better of two or more responses in the terminal; the choices are data for dpo and reward models."""

from __future__ import annotations

import argparse
import getpass

from posttrain.cli.base import print_lines
from posttrain.cli.chat import typed

EXAMPLE = "posttrain label comparisons.jsonl --out labels.jsonl"
WORDS = {"t": "tie", "b": "bad", "s": "skip"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "rows of prompt and responses (a list), or of prompt, chosen and rejected"
    parser.add_argument("file", help=text)
    text = "the file that labels are written to; by default NAME.labels.jsonl for NAME.jsonl"
    parser.add_argument("--out", default="", help=text)
    text = "who labels: each annotator sees every row, and votes are counted together"
    parser.add_argument("--annotator", default="", help=text)


def call(options: argparse.Namespace) -> None:
    from posttrain.data.labels import Labels, annotator_name

    labels = Labels.read(options.file, options.out)
    who = annotator_name(options.annotator or getpass.getuser())
    answers = typed("best (number; t: tie, b: both bad, s: skip, u: undo, q: end): ")
    item, word = labels.next(who), ""
    while item is not None and word != "q":
        print_lines(item.lines(who))
        for answer in answers:
            word = answer.strip().lower()
            sides = {str(n + 1): n for n in range(len(item.responses))}
            if word == "u":
                labels.undo(who)
            elif word in sides or word in WORDS:
                labels.vote(who, item.id, [sides[word]] if word in sides else WORDS[word])
            elif word != "q":
                continue
            break
        else:
            break
        item = labels.next(who)
    wrote = f"{labels.write()} with a preferred response are in {labels.out}"
    print_lines([f"{labels.labelled()} of {len(labels.items)} rows are labelled; {wrote}"])
