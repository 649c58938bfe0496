"""Serve a model, or every stage of a run, through an OpenAI-compatible endpoint. Ctrl-C ends it."""

from __future__ import annotations

import argparse

from posttrain.cli.base import add_model, add_settings, print_lines

EXAMPLE = "posttrain serve runs/quickstart-1 port=8000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_settings(parser, "port, host, token, loaded, max_new_tokens, device, ...")


def call(options: argparse.Namespace) -> None:
    from posttrain.commands.serve import serving

    with serving(options.model, options.settings) as (server, lines):
        print_lines(lines)
        server.run()
