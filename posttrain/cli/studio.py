"""Open the studio: a local web app that shows runs, their rollouts and how the model changes, and where people label answers."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.cli.base import add_address
from posttrain.errors import UserError, require
from posttrain.trust import ip_of

EXAMPLE = "posttrain studio runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "folders that hold runs; runs/ where none is given"
    parser.add_argument("runs", nargs="*", type=Path, help=text)
    add_address(parser, 7860)
    text = "the address of a model server, as in http://127.0.0.1:8000/v1"
    parser.add_argument("--serve", default="", help=text)
    text = "first make a small run to look at (about two minutes on a CPU), in runs/demo"
    parser.add_argument("--demo", action="store_true", help=text)
    parser.add_argument("--open", action="store_true", help="open it in a browser")


def call(options: argparse.Namespace) -> None:
    try:
        from posttrain.serve.server import Address
        from posttrain.studio.server import serve
    except ImportError as error:
        needs = f"the studio needs a package that is not installed ({error.name})"
        raise UserError(f"{needs}; pip install 'posttrain[studio]'") from None
    roots = options.runs or [Path("runs")]
    if options.demo or not options.runs:
        roots[0].mkdir(parents=True, exist_ok=True)
    for root in roots:
        require(root.is_dir(), f"{root} is not a folder; give one that holds runs")
    address = Address(options.host, options.port, hosts=options.name)
    every = f"--host {options.host} listens at every address: say by which name browsers reach it, with --name"
    ip = ip_of(options.host)
    require(ip is None or not ip.is_unspecified or options.name, every)
    serve(roots, address, options.serve, options.demo, options.open)
