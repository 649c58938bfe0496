"""Evaluates a model, samples from it, and shows a rollout as a decision process. The command line prints the results."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from posttrain import catalogue, config, config_tree
from posttrain.errors import Checked, Count, Seed, UserError, refuse_unknown, require
from posttrain.evals.evaluate import prompts
from posttrain.evals.statistics import Comparison, compare
from posttrain.events import printable
from posttrain.runs.layout import CONFIG, EpisodeRow, RolloutRow, encode, sampled_tokens
from posttrain.runs.read import Run
from posttrain.runs.resume_policy import short
from posttrain.system import machine
from posttrain.trust import EVERYTHING, Trust, active, trusting
from posttrain.types import JSON, Message, Sampler, Sampling

if TYPE_CHECKING:
    from posttrain.collect import Prompt
    from posttrain.runs.console import BeforeAfter
    from posttrain.runs.layout import TokenArrays
    from posttrain.stages.base import Stage

Options = TypeVar("Options", bound="MachineOptions")


def open_policy(name: str, device: str = "auto") -> Any:
    """Load a model for inference."""
    from posttrain.models.load import load
    from posttrain.models.policy import wrap_model

    device = machine.device(device)
    loaded = load(name, dtype="bfloat16" if device.startswith("cuda") else "float32", device=device)
    return wrap_model(loaded.model, loaded.tokenizer, loaded.stop_ids, loaded.source)


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Checked):
    """Where a model runs, and its seed."""

    seed: Seed = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        config.check_machine(self.seed, self.device)
        super().__post_init__()


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


@dataclass(frozen=True, kw_only=True)
class SampleOptions(MachineOptions):
    """Options of `posttrain sample` that are not settings of sampling."""

    plain: bool = False
    group: Count = 1


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
        from posttrain.runs.console import BeforeAfter

        assert self.paired is not None
        right, many = "accuracy" in self.models[0].figures, self.models[0].figures["problems"]
        after, before = (one.figures["accuracy" if right else "reward"] for one in self.models)
        return BeforeAfter(name, before, after, self.paired.difference.row(), many, right)

    def tree(self) -> JSON:
        """Return the report as `posttrain eval --json` prints it."""
        tree = {**self.models[0].figures} if self.models else dict(self.won)
        if self.paired:
            tree |= {"against": self.models[1].figures, "paired": asdict(self.paired)}
            tree["won"] = dict(self.won)
        return encode(tree | ({"task_source": self.source} if self.source else {}))


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion of a prompt; `logprob` is the mean over its tokens."""

    text: str
    tokens: int
    finish: str
    logprob: float
    warnings: Sequence[str] = ()  # about the prompt


def _options(pairs: dict[str, JSON], kind: type[Options], where: str) -> Options:
    """Take the options of a kind out of the settings and check them."""
    tree = {field.name: pairs.pop(field.name) for field in fields(kind) if field.name in pairs}
    made: Options = config_tree.from_tree(tree, kind, where)
    return made


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
    from posttrain.stages._contamination import made_by
    from posttrain.tasks.base import Task

    run = Path(model).expanduser()
    if not (run / CONFIG).is_file() and (folder := made_by(model)) is not None:
        run = folder.parent.parent
    if not (run / CONFIG).is_file():
        require(bool(task), f"eval: {model} is not the model of a run; give a task (--task NAME)")
        return None
    stages = Run(run).config.get("stages", [])
    trees = [
        tree for tree in stages if isinstance(tree, dict) and isinstance(tree.get("task"), dict)
    ]
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
    from posttrain.stages._check import check_problems
    from posttrain.stages._contamination import made_by, noted
    from posttrain.stages.base import worker_pool
    from posttrain.stages.evaluate import EvaluateStage, rows, seen
    from posttrain.stages.versus import decided, tally, won_text

    task = str(tree["task"]["name"])
    options = _options(pairs, EvalOptions, "eval")
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
    many = f"{ours.problems} held-out problems of {task}, {stage.samples} sample(s) each, {stage.sampling}"
    if not options.against:
        return stage, EvalReport(many, models, unsaved=unsaved)
    asked = prompts(ours.groups)
    right = "accuracy" in models[0].figures
    paired = compare(theirs.by_problem(right), ours.by_problem(right), asked)
    won = tally(decided(ours.groups, theirs.groups), ours.groups, theirs.groups)
    line = f"  by the task's score {won_text(model, options.against, won)}"
    return stage, EvalReport(many, models, paired, won, [line], unsaved=unsaved)


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
    from posttrain.stages.base import Stage

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
    from posttrain.stages._check import check_stages
    from posttrain.stages.base import temporary_context, worker_pool
    from posttrain.stages.versus import VersusStage, won_text

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


def sample(model: str, prompt: str, settings: Sequence[str]) -> Iterator[Answer]:
    """Yield a model's answers to a prompt: through its chat template, or as plain text without one (or with `plain=true`)."""
    options, sampling = sample_options(settings)
    ask = _asker(model, options, sampling)
    yield from ask(prompt, options.seed)


def sample_options(settings: Sequence[str]) -> tuple[SampleOptions, Sampling]:
    pairs = dict(map(config_tree.pair, settings))
    known = [field.name for kind in (SampleOptions, Sampling) for field in fields(kind)]
    refuse_unknown("key of sample", pairs, known)
    options = _options(pairs, SampleOptions, "sample")
    return options, config_tree.from_tree(pairs, Sampling, "sample")


def _asker(
    model: str, options: SampleOptions, sampling: Sampling
) -> Callable[[str | Sequence[Message], int], list[Answer]]:
    """Load a model and return a function that answers a prompt or a conversation, given a seed."""
    from posttrain.collect import Prompt
    from posttrain.data.text import unknown_tokens
    from posttrain.stages.base import make_sampler

    policy = open_policy(model, options.device)
    sampler = make_sampler(policy)

    def ask(prompt: str | Sequence[Message], seed: int) -> list[Answer]:
        if not isinstance(prompt, str) and (options.plain or not policy.tokenizer.chat_template):
            prompt = prompt[-1].content  # without a template each message stands alone
        ids = prompt_ids(policy.tokenizer, prompt, options.plain)
        [group] = answers(sampler, policy.tokenizer, [Prompt(ids, options.group, seed, sampling)])
        warnings = unknown_tokens(policy.tokenizer, [ids])
        return [replace(answer, warnings=warnings) for answer in group]

    return ask


def stage_models(directory: Path) -> dict[str, Path]:
    """Return the models of a run that can generate, by stage; raises an error if there is none."""
    from posttrain.stages._side_by_side import answering_models

    found = answering_models(directory, Run(directory).configured)
    require(bool(found), f"{directory}: none of its stages has made a model that answers")
    return found


def sample_stages(
    directory: Path, prompt: str, settings: Sequence[str]
) -> Iterator[tuple[str, Answer]]:
    """Yield the answers of every stage of a run to the same prompt, with the same seed."""
    options, sampling = sample_options(settings)
    for name, folder in stage_models(directory).items():
        for answer in _asker(str(folder), options, sampling)(prompt, options.seed):
            yield name, answer


def chat(model: str, said: Iterable[str], settings: Sequence[str]) -> Iterator[Answer]:
    """Yield the answer to each message of a person, given the conversation so far; `/new` begins another conversation."""
    options, sampling = sample_options(settings)
    require(options.group == 1, "chat: a message has one answer; leave out group")
    ask, history = _asker(model, options, sampling), list[Message]()
    for number, text in enumerate(said):
        if text.strip() == "/new":
            history.clear()
        elif text.strip():
            history.append(Message("user", text))
            [answer] = ask(tuple(history), options.seed + number)
            history.append(Message("assistant", answer.text))
            yield answer


def prompt_ids(
    tokenizer: Any, prompt: str | Sequence[Message], plain: bool = False
) -> tuple[int, ...]:
    """Return a prompt as ids."""
    from posttrain.data.chat import render_prompt, text_ids

    if isinstance(prompt, str) and (plain or not tokenizer.chat_template):
        ids = tuple(text_ids(tokenizer, prompt))
    else:
        turns = (Message("user", prompt),) if isinstance(prompt, str) else tuple(prompt)
        ids = tuple(render_prompt(tokenizer, turns))
    require(bool(ids), "the prompt has no tokens")
    return ids


def answers(sampler: Sampler, tokenizer: Any, prompts: Sequence[Prompt]) -> Iterator[list[Answer]]:
    """Yield the completions of each prompt, as text."""
    from posttrain.collect import generate_groups
    from posttrain.data.text import Decoder

    decoder = Decoder(tokenizer)
    for group in generate_groups(sampler, prompts):
        yield [
            Answer(decoder.decode(c.ids)[0], len(c.ids), c.finish, float(c.logprobs.mean()))
            for c in group
        ]


def show(directory: Path, rollout: str = "") -> list[str]:
    """Return the rollouts of a step as lines, or one of them token by token."""
    run = Run(directory)
    stages = [s for s in run.stages() if run.rollout_steps(s)]
    require(bool(stages), f"{directory} holds no rollouts yet")
    stage, step, number = _parse(rollout, run, stages)
    rows = run.rollouts(stage, step)
    kept = ", ".join(map(str, run.rollout_steps(stage)))
    require(bool(rows), f"no rollouts of {stage} step {step}; there are those of {kept}")
    if number is None:
        return _overview(directory, stage, step, rows)
    there = f"{stage} step {step} has rollouts 0 to {len(rows) - 1}"
    require(0 <= number < len(rows), f"{there}, not {number}")
    return episode(rows[number], run.arrays(stage, step), number, _tokenizer(directory, stage))


def _parse(rollout: str, run: Run, stages: list[str]) -> tuple[str, int, int | None]:
    parts = [part for part in rollout.split("/") if part]
    stage = parts[0] if parts else stages[-1]
    refuse_unknown("stage with rollouts", [stage], stages)
    try:
        step = int(parts[1]) if len(parts) > 1 else run.rollout_steps(stage)[-1]
        return stage, step, int(parts[2]) if len(parts) > 2 else None
    except (ValueError, IndexError):
        raise UserError(f"{rollout!r} is not STAGE/STEP/NUMBER, such as rl/600/0") from None


def _overview(directory: Path, stage: str, step: int, rows: Sequence[RolloutRow]) -> list[str]:
    lines = [f"{stage} step {step}: {len(rows)} rollouts"]
    for number, row in enumerate(rows[:32]):
        advantage = "" if row.advantage is None else f" advantage {row.advantage:+.2f}"
        text = f"{printable(row.question)} -> {printable(_said(row))[:70]}"
        lines.append(f"  {number:>3}  reward {_reward(row)}{advantage}  {text}")
    lines += [f"  ... and {len(rows) - 32} more"] if len(rows) > 32 else []
    place = shlex.quote(str(directory))
    return [*lines, f"one of them, token by token: posttrain show {place} {stage}/{step}/0"]


def _said(row: RolloutRow) -> str:
    """Return the response; with several turns, also the given text in between, after a `>`."""
    turns = row.conversation[1:] if isinstance(row, EpisodeRow) else ()
    parts = (text if kind == "sampled" else f"> {text}" for kind, text in turns)
    return " | ".join(parts) or row.response


def _reward(row: RolloutRow) -> str:
    return "failed" if row.reward is None else f"{row.reward:.2f}"


def episode(row: RolloutRow, arrays: TokenArrays | None, number: int, tokenizer: Any) -> list[str]:
    """Return a rollout as a Markov decision process: at each time the state, the action, its log-prob, KL, reward and
    advantage."""
    question, answer = printable(row.question), printable(row.answer)
    lines = [f"problem {row.problem} (level {row.level}): {question}   gold answer: {answer}"]
    token = None if arrays is None else arrays.sequence(number)
    several = row if isinstance(row, EpisodeRow) else None
    if several is not None and several.counts:
        lines.append(", ".join(f"{name} {count:g}" for name, count in several.counts.items()))
    if token is None or not len(token["ids"]):
        turns = several.conversation if several is not None else ()
        lines += [f"{kind}: {printable(said)}" for kind, said in turns]
        lines += [] if turns else [f"response: {printable(row.response)}"]
        lines += [f"reward: {row.reward}"]
        absent = "the per-token figures of this step were not kept; the last steps have them"
        untrained = "it was not trained on, so there are no figures by token"
        return [*lines, absent if token is None else untrained]
    sampled = sampled_tokens(token, row.length)
    first = int(sampled.argmax())
    text = [printable(tokenizer.decode([i])) for i in token["ids"].tolist()]
    lines.append(f"s_0 = {''.join(text[:first])}   (the prompt: {first} tokens, given, not chosen)")
    heading = f"{'t':>3}  {'state s_t ends with':<24} {'action a_t':<12} {'log pi':>8} "
    lines.append(heading + f"{'KL' if 'kl' in token else '':>8} {'reward':>7} {'advantage':>9}")
    actions = np.flatnonzero(sampled).tolist()
    rewards = _turn_rewards(row, actions)
    for t, at in enumerate(actions):
        if t and at > actions[t - 1] + 1:
            lines.append(f"     given: {''.join(text[actions[t - 1] + 1 : at])}")
        reward = rewards.get(at, "0")
        state = "".join(text[max(0, at - 12) : at])[-24:]
        kl = f"{token['kl'][at]:8.4f}" if "kl" in token else " " * 8
        figures = f"{token['logprob'][at]:8.4f} {kl} {reward:>7} {token['advantage'][at]:9.3f}"
        lines.append(f"{t:>3}  {state:<24} {text[at]:<12} {figures}")
    total = f"log pi(response | prompt) = {float(np.sum(token['logprob'][first:])):.3f}"
    outcome = row.outcome or row.failure
    return [*lines, f"end: {row.finish}; {total}; outcome {outcome}; {row.parts}"]


def _turn_rewards(row: RolloutRow, actions: Sequence[int]) -> dict[int, str]:
    """Return the reward at the last token of each turn: the turn's own reward, and in the last one the rest of the return."""
    ends = [a for a, b in pairwise([*actions, -1]) if b != a + 1]
    paid = [*row.paid] if isinstance(row, EpisodeRow) and row.paid else [0.0] * len(ends)
    if row.reward is None or len(paid) != len(ends):
        return {actions[-1]: _reward(row)}
    paid[-1] += row.reward - sum(paid)
    return {at: f"{value:.2f}" for at, value in zip(ends, paid, strict=True)}


def _tokenizer(directory: Path, stage: str) -> Any:
    """Return the tokenizer of the stage's model, of the export, or of any stage that has one: a run uses one throughout."""
    from posttrain.models.load import read_tokenizer

    own = [directory / "stages" / stage / "model", directory / "export"]
    found = [path for path in [*own, *sorted(directory.glob("stages/*/model"))] if path.is_dir()]
    require(bool(found), f"{directory} holds no model yet, so its tokens cannot be spelled")
    return read_tokenizer(found[0])
