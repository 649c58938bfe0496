"""Evaluates a model on the held-out problems of a task, alone or against another model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from posttrain import catalogue, config, config_tree
from posttrain.commands.models import MachineOptions, open_policy, take_options
from posttrain.errors import UserError, many, require
from posttrain.evals.evaluate import prompts
from posttrain.evals.statistics import Comparison, compare
from posttrain.runs.console import BeforeAfter
from posttrain.runs.layout import CONFIG, encode, stages_of
from posttrain.runs.read import Run
from posttrain.runs.resume_policy import short
from posttrain.stages._check import check_problems, check_stages
from posttrain.stages._contamination import made_by, noted
from posttrain.stages.base import Stage, temporary_context, worker_pool
from posttrain.stages.evaluate import EvaluateStage, rows, seen
from posttrain.stages.versus import VersusStage, decided, tally, won_text
from posttrain.system import machine
from posttrain.tasks.base import Task
from posttrain.trust import EVERYTHING, Trust, active, trusting
from posttrain.types import JSON, Sampling


@dataclass(frozen=True, kw_only=True)
class EvalOptions(MachineOptions):
    """Options of `posttrain eval` that are not settings of an evaluate stage."""

    against: str = ""
    save: str = ""

    def mistakes(self) -> Iterator[str]:
        place = Path(self.save)
        written = place if place.exists() else place.parent
        fine = place.parent.is_dir() and os.access(written, os.W_OK) and not place.is_dir()
        if self.save and not fine:
            yield f"save={self.save}: no file can be written there"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The held-out results of one model, and lines that a person should read with them."""

    model: str
    figures: Mapping[str, JSON]
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class EvalReport:
    """The results of one model, or of two on the same problems with the paired difference and the win rate `won`. If a reward
    model or a judge decides, there is only the win rate, without `models`."""

    setting: str  # which problems, and how many samples of each
    models: Sequence[Evaluated]
    paired: Comparison | None = None
    won: Mapping[str, JSON] = field(default_factory=dict)
    lines: Sequence[str] = ()  # about two models, for a person
    source: str = ""  # where the task's settings come from, if from the run
    unsaved: str = ""  # why the file `save` could not be written

    def change(self, name: str) -> BeforeAfter:
        """Return two models as a row of a table of tasks: the second is the one before."""
        assert self.paired is not None
        right, count = "accuracy" in self.models[0].figures, self.models[0].figures["problems"]
        after, before = (one.figures["accuracy" if right else "reward"] for one in self.models)
        return BeforeAfter(name, before, after, self.paired.difference.row(), count, right)

    def tree(self) -> JSON:
        """Return the report as `posttrain eval --json` prints it."""
        tree = {**self.models[0].figures} if self.models else dict(self.won)
        if self.paired:
            tree |= {"against": self.models[1].figures, "paired": asdict(self.paired)}
            tree["won"] = dict(self.won)
        return encode(tree | ({"task_source": self.source} if self.source else {}))


@dataclass(frozen=True, slots=True)
class TaskOfRun:
    """The task of the last stage of a run that has one, with its settings, and how that stage samples answers to held-out
    problems: an evaluate stage as it says, others greedily, as rl does."""

    run: Path
    stage: str
    tree: dict[str, JSON]
    how: dict[str, Any]  # sampling, samples

    def trust(self, typed: Mapping[str, JSON], allow_code: bool) -> Trust:
        """Return what its settings may name: the run may come from someone else."""
        where = str(self.run / CONFIG)
        return EVERYTHING if allow_code else Trust(where, typed, strict=False)

    def source(self, task: Any) -> str:
        """Return one line for a person: the task as it is used, without defaults."""
        own = [one for one in fields(task) if one.init] if is_dataclass(task) else []
        settings = [(one.name, getattr(task, one.name), one.default) for one in own]
        words = [f"{n}={short(value)}" for n, value, usual in settings if value not in (usual, {})]
        task_text = " ".join([str(self.tree["name"]), *words])
        return f"task and sampling as in stage {self.stage} of {self.run}: {task_text}"


def task_of_run(model: str, task: str = "") -> TaskOfRun | None:
    """Return the task of the run that made the model. With a name in `task`, None if the run's task is another one, or if no
    run made the model; without, both are errors."""
    run = Path(model).expanduser()
    if not (run / CONFIG).is_file() and (folder := made_by(model)) is not None:
        run = folder.parent.parent
    if not (run / CONFIG).is_file():
        require(bool(task), f"eval: {model} is not the model of a run; give a task (--task NAME)")
        return None
    trees = [s for s in stages_of(Run(run).config) if isinstance(s.get("task"), dict)]
    require(bool(trees or task), f"eval: no stage of {run} has a task; give one (--task NAME)")
    if not trees:
        return None
    last, tree = trees[-1], dict(trees[-1]["task"])
    typed = catalogue.short_form("task", task, Task) if task else {"name": tree.get("name")}
    if "name" not in tree or any(tree.get(key) != value for key, value in typed.items()):
        return None
    sampling = config_tree.from_tree(last.get("sampling", {"temperature": 0.0}), Sampling, "eval")
    how = {"sampling": sampling, "samples": last.get("samples", 1)}
    if last.get("stage") != "evaluate":
        how = {"sampling": Sampling(sampling.max_new_tokens, temperature=0.0)}
    return TaskOfRun(run, str(last.get("name")), tree, how)


def evaluate_tasks(
    model: str, tasks: Sequence[str], settings: Sequence[str], allow_code: bool = False
) -> dict[str, EvalReport]:
    """Evaluate each of several tasks. A setting NAME.KEY applies to the task NAME only, others to all."""
    if len(tasks) == 1:
        return {tasks[0]: evaluate(model, tasks[0], settings, allow_code)}
    require(len(set(tasks)) == len(tasks), f"eval: {','.join(tasks)}: a task is named twice")
    saved = [word for word in settings if word.startswith("save=")]
    require(not saved, "eval: save is of one task; leave it out, or name one task")
    found = {}
    for task in tasks:
        others = tuple(f"{other}." for other in tasks if other != task)
        own = [word for word in settings if not word.startswith(others)]
        words = [re.sub(rf"^{re.escape(task)}\.", "task.", word) for word in own]
        found[task] = evaluate(model, task, words, allow_code)
    return found


def evaluate(
    model: str, task: str, settings: Sequence[str], allow_code: bool = False
) -> EvalReport:
    """Measure a model on a task's held-out problems; with `against`, also another model on the same ones, and which of the two
    wins: by the task's score or, if one is named, by a `reward_model` or a `judge`. `save` names a file for the per-problem
    results.

    Without a task, it uses that of the run that made the model, and the sampling with which the run evaluates. A task that is
    named without settings gets those of the run, if it is the run's task."""
    pairs = dict(map(config_tree.pair, settings))
    alone = not any(key.startswith("task.") for key in pairs)
    found = task_of_run(model, task) if alone or not task else None
    tree: dict[str, JSON] = {"task": {"name": task}}
    if found is not None:
        tree = {"task": found.tree, **config_tree.to_tree(found.how)}
    typed = {**pairs, "task": task}
    with trusting(active() if found is None else found.trust(typed, allow_code)):
        stage, report = _evaluate(model, tree, pairs)
    return report if found is None else replace(report, source=found.source(stage.task))


def _evaluate(model: str, tree: dict[str, JSON], pairs: dict[str, JSON]) -> tuple[Any, EvalReport]:
    """Evaluate by the settings of a stage, which `pairs` change. Returns the stage and the report."""
    task = str(tree["task"]["name"])
    options = take_options(pairs, EvalOptions, "eval")
    if judges := sorted({key.partition(".")[0] for key in pairs} & {"reward_model", "judge"}):
        needs = f"eval: {judges[0]} decides who wins between two models"
        require(bool(options.against), f"{needs}; name the other: against=MODEL")
        return _versus(model, tree, pairs, options)
    stage = _eval_stage("evaluate", model, tree, pairs)
    if not isinstance(stage, EvaluateStage):
        raise UserError("eval: model and task cannot be changed by settings")
    stage.task.ready()
    models, evaluations = [], []
    with worker_pool([stage]) as workers:
        for name in [model, options.against] if options.against else [model]:
            policy = open_policy(name, options.device)
            warnings = check_problems(stage, policy)
            evaluation, figures = stage.measure(
                policy,
                lambda: open_policy(stage.reference, options.device),
                options.seed,
                workers=workers,
            )
            known = noted(made_by(name))
            counted, contamination = seen(evaluation, stage.task.verifiable, name, known)
            failed = f"{evaluation.failed} could not be scored"
            notes = [f"  length {evaluation.length:.1f} tokens; {failed}"]
            notes += [f"  warning: {line}" for line in warnings]
            notes += [f"  contamination: {contamination}"] if contamination else []
            how = {"sampling": asdict(stage.sampling)}
            figures = {"model": name, "task": task, **how, **figures, **counted}
            models.append(Evaluated(name, figures, notes))
            evaluations.append(evaluation)
    ours, theirs = evaluations[0], evaluations[-1]
    unsaved = _save(options.save, (json.dumps(row) + "\n" for row in rows(ours)))
    title = f"{many(ours.problems, 'held-out problem')} of {task}, {many(stage.samples, 'sample')} each, {stage.sampling}"
    if not options.against:
        return stage, EvalReport(title, models, unsaved=unsaved)
    asked = prompts(ours.groups)
    right = "accuracy" in models[0].figures
    paired = compare(theirs.by_problem(right), ours.by_problem(right), asked)
    won = tally(decided(ours.groups, theirs.groups), ours.groups, theirs.groups)
    line = f"  by the task's score {won_text(model, options.against, won)}"
    return stage, EvalReport(title, models, paired, won, [line], unsaved=unsaved)


def _save(place: str, lines: Iterable[str]) -> str:
    """Write the results of each problem, if a file is named. Returns why that failed, "" if it did not: the figures are shown
    first."""
    try:
        if place:
            Path(place).write_text("".join(lines), "utf-8")
    except OSError as error:
        return f"eval: save={place} could not be written: {error.strerror}"
    return ""


def _eval_stage(
    kind: str, model: str, given: dict[str, JSON], pairs: dict[str, JSON], **more: str
) -> Stage:
    """Make a stage of the command's model and task with the other settings. A task or a judge may need its settings to be
    constructed at all, so they are put into the tree before it is read."""
    tree: dict[str, JSON] = {"stage": kind, "name": "eval", "model": model, **more}
    tree |= {"sampling": {"temperature": 0.0}, **given, "task": dict(given["task"])}
    if isinstance(pairs.get("judge"), str):
        tree["judge"] = {"model": pairs.pop("judge")}
    own = [key for key in pairs if key.startswith(("task.", "judge."))]
    for key in (key for key in own if key.count(".") == 1):
        group, _, name = key.partition(".")
        tree.setdefault(group, {})[name] = pairs.pop(key)
    keys = {f"eval.{key}": value for key, value in pairs.items()}
    stage: Stage = config_tree.override([config_tree.from_tree(tree, Stage, "eval")], keys)[0]
    config.check_named([stage])
    return stage


def _versus(
    model: str, tree: dict[str, JSON], pairs: dict[str, JSON], options: EvalOptions
) -> tuple[Any, EvalReport]:
    """Decide the winner by a reward model or a judge: a versus stage in a temporary run directory."""
    one = {key: value for key, value in tree.items() if key != "samples"}
    stage = _eval_stage("versus", model, one, pairs, against=options.against)
    assert isinstance(stage, VersusStage)
    device = machine.device(options.device)
    warnings = check_stages([stage], options.seed, device, [stage.name])[stage.name]
    alarms = [f"warning: {line}" for line in warnings]
    with (
        worker_pool([stage]) as workers,
        temporary_context(options.seed, device, workers=workers) as context,
    ):
        context.events.subscribe(lambda e: alarms.append(e.text) if e.kind == "alarm" else None)
        found = stage.run(context)
        written = context.folder(stage.name) / "problems.jsonl"
        unsaved = _save(options.save, [written.read_text("utf-8")])
    how = {"task": tree["task"]["name"], "sampling": asdict(stage.sampling)}
    won = {"model": model, "against": options.against, **how, **found}
    lines = [won_text(model, options.against, found), f"  {stage.sampling}"]
    lines += [f"  {text}" for text in alarms]
    return stage, EvalReport("", [], None, won, lines, unsaved=unsaved)
