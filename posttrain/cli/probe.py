"""Show what a reward gives to gold, wrong, empty, padded and injected answers, before any training."""

from __future__ import annotations

import argparse

from posttrain.cli.base import add_json, add_settings, check_tasks, print_json, print_lines

EXAMPLE = "posttrain probe math --task jsonl task.file=problems.jsonl reward.rounding=2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "reward",
        nargs="?",
        help="a name of 'posttrain list rewards', file.py:function or the directory of a reward model; without it, the task's own",
    )
    parser.add_argument("--task", required=True)
    add_json(parser)
    add_settings(parser, "task.KEY, reward.KEY, problems, split, examples")


def call(options: argparse.Namespace) -> int:
    check_tasks([options.task])
    from posttrain.commands.probe import lines, probe_named

    reward, settings = options.reward, list(options.settings)
    if reward is not None and "=" in reward:  # the first setting, and not a reward
        reward, settings = None, [reward, *settings]
    report = probe_named(reward, options.task, settings)
    print_json(report.tree()) if options.json else print_lines(lines(report))
    return 0 if report.passed else 1
