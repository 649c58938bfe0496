"""List what is shipped: recipes, stages, algorithms, tasks, tools, rewards (with a name, its keys), and data formats."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from posttrain import catalogue
from posttrain.cli.base import add_json, print_json, print_lines
from posttrain.errors import require, unknown

KINDS = ("recipes", "stages", "algorithms", "tasks", "tools", "rewards", "formats")

EXAMPLE = "posttrain list stages sft"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", metavar="{" + ",".join(KINDS) + "}")
    text = "one of them, or a FILE.py:NAME: every key with its type, default and meaning"
    parser.add_argument("name", nargs="?", help=text)
    add_json(parser)


def call(options: argparse.Namespace) -> None:
    from posttrain.commands import keys
    from posttrain.data.formats import FORMATS

    if options.kind and options.kind not in KINDS:
        name = options.kind
        for kind in KINDS[:-1]:
            known = name in catalogue.names(kind.removesuffix("s"))
            require(not known, f"{name} is one of the {kind}: posttrain list {kind} {name}")
        raise unknown("kind", name, KINDS)
    if options.name:
        every = f"list formats shows every format; leave {options.name} out"
        require(options.kind != "formats", every)
        found = keys.keys_of(options.kind.removesuffix("s"), options.name)
        if options.json:
            print_json([asdict(key) for key in found])
        else:
            listed = catalogue.describe(options.kind.removesuffix("s"))
            print_lines(f"{options.name}: {e.summary}" for e in listed if e.name == options.name)
            print_lines(line for key in found for line in key.lines())
        return
    kinds = [options.kind] if options.kind else KINDS
    entries = {k: catalogue.describe(k.removesuffix("s")) for k in kinds if k != "formats"}
    formats = FORMATS if "formats" in kinds else ()
    if options.json:
        shown = {kind: [asdict(entry) for entry in listed] for kind, listed in entries.items()}
        rows = {"formats": [asdict(one) for one in formats]} if formats else {}
        print_json({**shown, **rows})
        return
    for kind, listed in entries.items():
        print_lines([kind])
        width = max((len(entry.name) for entry in listed), default=0)
        for entry in listed:
            paper = f"  [{entry.paper}]" if entry.paper else ""
            print_lines([f"  {entry.name:<{width}} {entry.summary}{paper}"])
            if options.kind == "stages":
                print_lines(keys.lines("stage", entry.name, nested=False))
    if formats:
        print_lines(["formats"])
    for one in formats:
        row = json.dumps(one.example, ensure_ascii=False)
        print_lines([f"  {one.name}: {one.title}, for {one.stages}", f"    {row}"])
        print_lines([f"    {one.note}"] if one.note else [])
