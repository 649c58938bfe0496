"""Continue a run that was stopped or killed, or a finished one for more steps."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.cli.base import add_allow_code, add_settings, report_sweep, start_processes
from posttrain.errors import require

EXAMPLE = "posttrain resume runs/quickstart-1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path)
    text = "settings of how the work is done, not of what is learned: threads, token_budget, ...; or more steps: rl.steps=200"
    add_settings(parser, text)
    add_allow_code(parser)


def call(options: argparse.Namespace) -> int | None:
    from posttrain.runs.layout import require_run

    if not options.run.is_dir():  # before torch is imported, which takes seconds
        require_run(options.run)
    from posttrain import pipeline
    from posttrain.commands import sweep
    from posttrain.runs.read import Run

    if (options.run / sweep.RECORD).is_file():
        require(not options.settings, "the settings of a sweep cannot change when it is resumed")
        return report_sweep(sweep.resume(options.run, options.allow_code))
    left = pipeline.to_resume(Run(options.run), options.allow_code, options.settings)
    words = ["resume", str(options.run), *options.settings]
    code = left and start_processes(words, options.allow_code, left[0], options.run)
    if code is None:
        pipeline.resume(options.run, options.allow_code, options.settings)
    return code
