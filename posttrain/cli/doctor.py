"""Check this machine: versions, GPU, sandbox, disk; and show what to fix."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from posttrain.cli.base import add_json, print_json, print_lines

EXAMPLE = "posttrain doctor --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def call(options: argparse.Namespace) -> int:
    from posttrain.commands.doctor import examine, healthy, lines

    findings = examine()
    if options.json:
        print_json({"healthy": healthy(findings), "findings": [asdict(f) for f in findings]})
    else:
        print_lines(lines(findings))
    return 0 if healthy(findings) else 1
