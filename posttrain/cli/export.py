"""Write a run's model to a folder with its model card, or to a GGUF file by llama.cpp's converter."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.cli.base import add_model_of_run, chosen_model, print_lines

EXAMPLE = "posttrain export runs/quickstart-1 model.gguf --type q8_0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_of_run(parser)
    text = "a folder that is not there yet, or the name of a file that ends in .gguf"
    parser.add_argument("target", type=Path, help=text)
    kinds = ("auto", "f32", "f16", "bf16", "q8_0", "tq1_0", "tq2_0")
    parser.add_argument("--type", choices=kinds, default="f16", help="of a GGUF file's weights")


def call(options: argparse.Namespace) -> None:
    from posttrain.commands.export import export, to_gguf

    chosen = chosen_model(options)
    if options.target.suffix.lower() == ".gguf":
        print_lines([f"model: {to_gguf(chosen, options.target, options.type)}"])
    else:
        print_lines([f"model: {export(chosen, options.target)}"])
