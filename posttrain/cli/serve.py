"""Serve a model, or every stage of a run, through an OpenAI-compatible endpoint. Ctrl-C ends it."""

from __future__ import annotations

import argparse

from posttrain.cli.base import add_address, add_model, add_settings, print_lines

EXAMPLE = "posttrain serve runs/quickstart-1 --port 8000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_address(parser, 8000)
    add_settings(parser, "token, loaded, max_new_tokens, device, ...")


def call(options: argparse.Namespace) -> None:
    from posttrain.commands.serve import serving

    place = {"host": options.host, "port": options.port, "hosts": options.name}
    with serving(options.model, options.settings, **place) as (server, lines):
        print_lines(lines)
        server.run()
