"""Measure a model on a task's held-out problems."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from posttrain.cli import base
from posttrain.errors import many, require

if TYPE_CHECKING:
    from posttrain.commands.evaluate import EvalReport

EXAMPLE = "posttrain eval runs/quickstart-1 problems=1000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model")
    what = parser.add_mutually_exclusive_group()
    text = "a task, or several with commas: NAME.KEY is a setting of one; of a run, without it, the run's own task and sampling"
    what.add_argument("--task", default="", help=text)
    text = "tasks of lm-evaluation-harness: TASK.yaml or names, a,b"
    what.add_argument("--harness", metavar="TASK", help=text)
    parser.add_argument("--against", default="", help="another model: who wins on the same prompts")
    base.add_json(parser)
    base.add_allow_code(parser)
    text = "problems, samples, task.KEY, sampling.KEY, reference, text, against, save, seed,"
    text += " device; of a win rate also reward_model, judge, judge.KEY;"
    text += " with --harness limit, fewshot, chat, max_length, seed, device"
    base.add_settings(parser, text)


def call(options: argparse.Namespace) -> None:
    if options.harness:
        call_harness(options)
        return
    tasks = options.task.split(",")
    base.check_tasks(filter(None, tasks))
    from posttrain.commands.evaluate import evaluate_tasks

    against = [f"against={options.against}"] if options.against else []
    settings = [*options.settings, *against]
    reports = evaluate_tasks(options.model, tasks, settings, options.allow_code)
    show_reports(options, reports)
    for report in reports.values():
        require(not report.unsaved, report.unsaved)


def show_reports(options: argparse.Namespace, reports: Mapping[str, EvalReport]) -> None:
    from posttrain.runs.console import final_table, show

    tasks = [*reports]
    if options.json:
        trees = {task: report.tree() for task, report in reports.items()}
        base.print_json(trees if len(tasks) > 1 else trees[tasks[0]], indent=None)
        return
    base.print_lines(report.source for report in reports.values() if report.source)
    if len(tasks) > 1 and all(report.paired for report in reports.values()):
        base.print_lines(report.setting for report in reports.values())
        first, second = (one.model for one in next(iter(reports.values())).models)
        rows = [report.change(task) for task, report in reports.items()]
        show(final_table(rows, f"before: {second}; after: {first}"))
        return
    for report in reports.values():
        show_report(options.model, report)


def show_report(model: str, found: EvalReport) -> None:
    from posttrain.runs.console import figures_table, show

    for one in found.models:
        base.print_lines([f"{one.model} on {found.setting}"])
        show(figures_table(one.figures))
        base.print_lines(one.notes)
    if found.paired:
        base.print_lines([f"  {model} less {found.models[1].model}: {found.paired}"])
    base.print_lines(found.lines)


def call_harness(options: argparse.Namespace) -> None:
    from posttrain.commands.harness import evaluate

    require(not options.against, "eval: --against compares two models on a --task")
    found = evaluate(options.model, options.harness.split(","), options.settings)
    if options.json:
        base.print_json({"model": options.model, **found}, indent=None)
        return
    for task, figures in found["tasks"].items():
        documents = figures.pop("documents")
        base.print_lines([f"{options.model} on {many(documents, 'document')} of {task}"])
        for name, value in figures.items():
            single = isinstance(value, float)
            spelled = f"{value:.4f}" if single else "{:.4f} [{:.4f}, {:.4f}]".format(*value)
            base.print_lines([f"  {name:<24} {spelled}"])
    if found["cut"]:
        cut = many(found["cut"], "input")
        base.print_lines([f"{cut} lost the beginning: longer than max_length"])
