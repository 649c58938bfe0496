"""List what is shipped: recipes, stages, algorithms, tasks, tools, rewards (with a name, its keys), and data formats."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from posttrain import catalogue
from posttrain.cli.base import add_json, print_json, print_lines
from posttrain.errors import UserError, require, unknown

KINDS = ("recipes", "stages", "algorithms", "tasks", "tools", "rewards", "formats")

EXAMPLE = "posttrain list stages sft"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", metavar="{" + ",".join(KINDS) + "}")
    text = "one of them, or a FILE.py:NAME: every key with its type, default and meaning"
    parser.add_argument("name", nargs="?", help=text)
    add_json(parser)


def call(options: argparse.Namespace) -> None:
    if options.kind and options.kind not in KINDS:
        raise _unknown_kind(options.kind)
    if options.name:
        _show_keys(options.kind, options.name, options.json)
    else:
        _show_entries([options.kind] if options.kind else KINDS, options.json)


def _unknown_kind(name: str) -> UserError:
    for kind in KINDS[:-1]:
        if name in catalogue.names(kind.removesuffix("s")):
            return UserError(f"{name} is one of the {kind}: posttrain list {kind} {name}")
    return unknown("kind", name, KINDS)


def _show_keys(kind: str, name: str, as_json: bool) -> None:
    """Print every key of one entry."""
    from posttrain.commands import keys

    require(kind != "formats", f"list formats shows every format; leave {name} out")
    found = keys.keys_of(kind.removesuffix("s"), name)
    if as_json:
        print_json([asdict(key) for key in found])
        return
    entries = catalogue.describe(kind.removesuffix("s"))
    print_lines(f"{name}: {entry.summary}" for entry in entries if entry.name == name)
    print_lines(line for key in found for line in key.lines())


def _show_entries(kinds: Sequence[str], as_json: bool) -> None:
    """Print all entries of some kinds; of stages alone, with their keys."""
    from posttrain.commands import keys
    from posttrain.data.formats import FORMATS

    entries = {k: catalogue.describe(k.removesuffix("s")) for k in kinds if k != "formats"}
    formats = FORMATS if "formats" in kinds else ()
    if as_json:
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
            if kinds == ["stages"]:
                print_lines(keys.lines("stage", entry.name, nested=False))
    print_lines(["formats"] if formats else [])
    for one in formats:
        row = json.dumps(one.example, ensure_ascii=False)
        print_lines([f"  {one.name}: {one.title}, for {one.stages}", f"    {row}"])
        print_lines([f"    {one.note}"] if one.note else [])
