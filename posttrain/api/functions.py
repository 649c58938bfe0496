"""The functions of the Python interface. Each builds a stage, the same as the command line, and a run of it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from posttrain import catalogue, config, config_tree
from posttrain.algorithms.base import Algorithm
from posttrain.api import inputs
from posttrain.api.run import Callback, Model, Run
from posttrain.commands.probe import Report
from posttrain.commands.probe import probe as probe_task
from posttrain.data.records import parse_messages
from posttrain.errors import UserError, called_here, refuse_unknown, require
from posttrain.recipes.base import Recipe, as_recipe
from posttrain.rewards.base import check, resolve
from posttrain.rewards.compose import Reward
from posttrain.runs.layout import CONFIG, require_run
from posttrain.stages._material import ROWS, Data, until_end
from posttrain.stages.base import Stage, make_sampler, worker_pool
from posttrain.stages.comparisons import ComparisonsStage
from posttrain.stages.evaluate import EvaluateStage
from posttrain.stages.preference import PreferenceStage
from posttrain.stages.reward_model import RewardModelStage, judge_pairs, report
from posttrain.stages.rl import RLStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks.base import Task
from posttrain.tasks.prompts import Prompts
from posttrain.trust import PREFIX, active, trusting
from posttrain.types import JSON, Problem, Sampling

if TYPE_CHECKING:
    from posttrain.commands.evaluate import TaskOfRun

# files of runs that may not have begun yet, so that no other run takes their directories
_waiting: WeakSet[inputs.Files] = WeakSet()


def rl(
    model: Any,
    prompts: Any = None,
    reward: Any = None,
    *,
    algorithm: Algorithm | str = "grpo",
    task: Any = None,
    tools: Any = (),
    weights: Any = None,
    reward_models: Any = (),
    held_out_data: Any = None,
    tokenizer: Any = None,
    callback: Callback | None = None,
    out: str | Path = "",
    **settings: Any,
) -> Run:
    """Set up reinforcement learning on `prompts` (texts, rows, a file, a data set) or on a `task`. Training starts with `.train()` or
    `.steps()` of the returned run.

    `reward` is a function of (prompt, response, answer, columns ...), a function of lists (prompts, completions, columns ...), the name
    of a shipped reward, the run of a reward model, a source such as JudgeReward(model=..., url=...), or a list or dict of these, whose
    sum is weighted by `weights`. `reward_models` are runs or paths of reward models whose mean is the reward, weighted by `weights` if
    there is no `reward`. `held_out_data` are prompts to evaluate on; without them a share `held_out` of the prompts is kept for that.
    `settings` are those of the stage, its algorithm, optimizer, sampling and task (steps, group, beta, lr,
    max_new_tokens, system, ...; `batch` is the number of prompts a step), and those of the run (seed, device, again, ...). The KL is
    measured to `reference`, by default the initial model. `critic` is a reward model from which PPO's critic starts. `teacher` is the
    model that distillation learns from. `tools` are functions with type hints and a docstring, names of shipped tools, or settings of
    tools; the policy may call them before it answers.
    """
    chosen = _algorithm(algorithm)
    either = "give either prompts or a task"
    _check_given(chosen.name, (prompts is None) != (task is None), settings, either)
    files = _files(out, chosen.name)
    if held_out_data is not None:
        alone = "held_out_data goes with prompts; a task has its own held-out problems"
        require(task is None, f"{chosen.name}: {alone}")
        settings["test_file"] = files.path(held_out_data, "held_out_data")
    file = "" if prompts is None else files.path(prompts, "prompts")
    own = None if task is None else inputs.as_task(task)
    scored, source = inputs.as_rewards(reward, weights, reward_models, own, file)
    scored = inputs.with_tools(scored, tools, settings) if tools else scored
    if "batch" in settings:  # the stage calls this number `prompts`
        settings["prompts"] = settings.pop("batch")
    others = [k for k in ("reference", "critic", "teacher") if settings.get(k)]
    settings |= {k: inputs.as_model(settings[k]) for k in others}
    given = {"model": inputs.as_model(model, tokenizer), "algorithm": chosen, "task": scored}
    return _run(RLStage, {"name": "rl", **given, "reward": source}, settings, files, callback)


def grpo(model: Any, prompts: Any = None, reward: Any = None, **settings: Any) -> Run:
    """Train `model` on `prompts` with GRPO and a `reward`, to the end: `rl(...).train()`, whose docstring has what each may be.

    >>> grpo("tiny:nano", ["Name a colour."], len, steps=100, group=8, lr=1e-6, max_new_tokens=64)  # doctest: +SKIP
    """
    _check_fixed("grpo", "rl", settings)
    return rl(model, prompts, reward, algorithm="grpo", **settings).train()


def ppo(model: Any, prompts: Any = None, reward: Any = None, **settings: Any) -> Run:
    """Train `model` on `prompts` with PPO and a critic, to the end: `rl(...).train()`, whose docstring has what each may be.

    >>> ppo("tiny:nano", ["Name a colour."], len, steps=100, lr=1e-6, max_new_tokens=64)  # doctest: +SKIP
    """
    _check_fixed("ppo", "rl", settings)
    return rl(model, prompts, reward, algorithm="ppo", **settings).train()


def _check_fixed(name: str, general: str, settings: Mapping[str, Any]) -> None:
    other = f"{name} has its algorithm; another is pt.{general}(..., algorithm=...).train()"
    require("algorithm" not in settings, other)


def _check_given(
    name: str, given: bool, settings: Mapping[str, Any], advice: str = "give data: rows or a file"
) -> None:
    """Raise an error for a call without data. If a setting has one of TRL's names, the error says what it is called here."""
    called = [text for key in settings if (text := called_here(key))]
    require(given, f"{name}: {called[0] if called else advice}")


def sft(
    model: Any,
    data: Any = None,
    *,
    weights: Any = None,
    tokenizer: Any = None,
    callback: Callback | None = None,
    out: str | Path = "",
    **settings: Any,
) -> Run:
    """Supervised fine-tuning on demonstrations: rows with messages, or prompt and completion. `weights` are the shares of several
    files in what is drawn; without them a file counts by its size."""
    _check_given("sft", data is not None, settings)
    files = _files(out, "sft")
    columns, paths = settings.pop("columns", {}), files.paths(data, "data")
    found = [0.0] * len(paths) if weights is None else inputs.numbers(weights, len(paths), "file")
    pairs = zip(paths, found, strict=True)
    sources = tuple(Data(file=path, weight=share, columns=columns) for path, share in pairs)
    given = {"name": "sft", "model": inputs.as_model(model, tokenizer), "data": sources}
    return _run(SFTStage, given, settings, files, callback).train()


def preference(
    model: Any,
    data: Any = None,
    *,
    algorithm: Algorithm | str = "dpo",
    held_out_data: Any = (),
    reference: Any = "",
    tokenizer: Any = None,
    callback: Callback | None = None,
    out: str | Path = "",
    **settings: Any,
) -> Run:
    """Set up learning from pairs, rankings or labels without sampling: DPO, IPO, KTO, ORPO, SimPO. Training starts with `.train()` or
    `.steps()` of the returned run."""
    chosen = _algorithm(algorithm)
    _check_given(chosen.name, data is not None, settings)
    files = _files(out, chosen.name)
    given = {
        "name": chosen.name,
        "model": inputs.as_model(model, tokenizer),
        "algorithm": chosen,
        "data": files.paths(data, "data"),
        "held_out_data": files.paths(held_out_data, "held_out_data") if held_out_data else (),
        "reference": inputs.as_model(reference) if reference else "",
    }
    return _run(PreferenceStage, given, settings, files, callback)


def dpo(model: Any, data: Any = None, **settings: Any) -> Run:
    """Train with DPO on pairs to the end: `preference(..., algorithm="dpo").train()`."""
    _check_fixed("dpo", "preference", settings)
    return preference(model, data, algorithm="dpo", **settings).train()


def reward_model(
    model: Any,
    data: Any = None,
    *,
    algorithm: Algorithm | str = "reward_model",
    tokenizer: Any = None,
    callback: Callback | None = None,
    out: str | Path = "",
    **settings: Any,
) -> Run:
    """Train a reward model on pairs or rankings or, with algorithm="process_reward_model", on labelled steps. The returned run can be
    used as a reward: `ppo(..., reward=run)`. `run.result` has its held-out accuracy."""
    _check_given("reward_model", data is not None, settings)
    files = _files(out, "reward_model")
    given = {"model": inputs.as_model(model, tokenizer), "algorithm": _algorithm(algorithm)}
    given |= {"name": "reward_model", "data": files.paths(data, "data")}
    return _run(RewardModelStage, given, settings, files, callback).train()


def comparisons(
    model: Any,
    prompts: Any = None,
    judge: Any = None,
    *,
    task: Any = None,
    tokenizer: Any = None,
    callback: Callback | None = None,
    out: str | Path = "",
    **settings: Any,
) -> Run:
    """Sample pairs of a model's own answers (rankings, with samples=3 or more) to `prompts`, or to training problems of a `task`, and
    compare them. A `judge` decides which is better: the path, hub name or run of a model that runs in this process, or settings such as
    {"model": ..., "url": ...}. Without a judge, the task's own score decides. The returned run can be used as data:
    `dpo(..., data=run)`. `problems` is the number of prompts, by default all."""
    require((prompts is None) != (task is None), "comparisons: give either prompts or a task")
    files = _files(out, "comparisons")
    given: dict[str, Any] = {"name": "comparisons", "model": inputs.as_model(model, tokenizer)}
    given["judge"] = inputs.as_judge(judge)
    if task is None:
        file = files.path(prompts, "prompts")
        given["task"] = asked = Prompts(file, held_out=0)
        given["prompts"] = len(files.lines.get(Path(file)) or asked.problems("train"))
    else:
        given["task"] = inputs.as_task(task)
    if "problems" in settings:  # the stage calls this number `prompts`
        settings["prompts"] = settings.pop("problems")
    return _run(ComparisonsStage, given, settings, files, callback).train()


def run(
    recipe: str | Recipe | Sequence[Stage],
    *,
    callback: Callback | None = None,
    out: str | Path = "",
    **settings: Any,
) -> Run:
    """Run a recipe by its name or file, with the settings of the command line: run("quickstart", seed=1, **{"rl.lr": 1e-4}). Or run a
    list of stages in order; a stage may refer to earlier ones by name."""
    if not isinstance(recipe, str):
        made = recipe() if callable(recipe) else recipe
        return _begun(as_recipe(made, "run"), _files(out, "run"), callback, settings).train()
    whole = config.parse(recipe, [f"{key}={_text(key, value)}" for key, value in settings.items()])
    files = _files(out, whole.name)
    return Run(files.directory, replace(whole, out=str(files.directory)), files, callback).train()


def _text(key: str, value: Any) -> str:
    """A setting as it is typed on the command line."""
    plain = inputs.as_model(value) if isinstance(value, Run | Model | Path) else value
    try:
        return json.dumps(plain, default=inputs.as_plain)
    except (TypeError, ValueError):
        kind = type(value).__name__
        raise UserError(f"run: {key}: text, numbers, lists or dicts, not {kind}") from None


def load(place: str | Path) -> Run | Model:
    """Open a run by its directory, or a model by its path or hub name. `load(DIRECTORY).train()` continues a run that was killed."""
    none = f"there is no run and no model {place}; check the path (on the hub it is org/name)"
    require(isinstance(place, str | Path) and bool(str(place)), none)
    found = Path(place).expanduser()
    # a mistyped run: its folder has others
    mistyped = not os.path.lexists(found) and any(found.parent.glob(f"*/{CONFIG}"))
    require(("/" in str(place) and not mistyped) or os.path.exists(found), none)
    if any(found.glob(f"*/{CONFIG}")) and not (found / "config.json").is_file():
        require_run(found)
    return Run(found) if (found / CONFIG).is_file() else Model(str(place))


def sample(
    model: Any, prompt: Any, n: int = 1, *, seed: int = 0, tokenizer: Any = None, **sampling: Any
) -> Any:
    """Sample `n` answers to a prompt and return their texts. A prompt is a text or a list of messages. For a list of prompts, return a
    list of texts for each."""
    from posttrain.collect import Prompt
    from posttrain.commands.sample import answers, prompt_ids

    policy = _policy(model, tokenizer)
    how = inputs.built(Sampling, {}, sampling, "sample")
    n, seed = (inputs.value_of(v, int, f"sample: {k}") for k, v in {"n": n, "seed": seed}.items())
    require(n >= 1, f"sample: n must be at least 1, not {n}")
    several = isinstance(prompt, list | tuple) and bool(prompt)
    several = several and all(isinstance(p, str | list) for p in prompt)
    listed = prompt if several else [prompt]
    rows = isinstance(listed[0], list) and listed[0] and "prompt" in listed[0][0]
    require(not rows, "sample: a prompt is text or messages: give [row['prompt'] for row in rows]")
    asked = [p if isinstance(p, str) else parse_messages(p, "prompt") for p in listed]
    requests = [Prompt(prompt_ids(policy.tokenizer, one), n, seed, how) for one in asked]
    groups = answers(make_sampler(policy), policy.tokenizer, requests)
    found = [[one.text for one in group] for group in groups]
    return found if several else found[0]


def evaluate(
    model: Any,
    task: Any = None,
    *,
    prompts: Any = None,
    reward: Any = None,
    weights: Any = None,
    data: Any = None,
    tools: Any = (),
    seed: int = 0,
    tokenizer: Any = None,
    allow_code: bool = False,
    **settings: Any,
) -> dict[str, JSON]:
    """Evaluate a model on the held-out problems of a `task`, or on all `prompts` with a `reward`: accuracy, reward and pass@k, each
    with its confidence interval. `settings` are those of an evaluate stage (problems, samples, temperature, max_new_tokens, and
    `reference`, a model as `model` is) and of the task. Without a task, a run is evaluated on the task of its last stage that has
    one, with the sampling of that stage's evaluation; the name of that task, without settings of the task, means the same. The
    result then names the stage in `task_source`; with `allow_code`, the task may run code that the run's directory names. For a
    reward model, give pairs or rankings as `data`, with `columns` if the columns have other names: the result is the share that it
    orders correctly, and its calibration."""
    seed = inputs.value_of(seed, int, "evaluate: seed")
    if data is not None:
        refuse_unknown("setting", settings, ("max_length", "columns"))
        return _agreement(model, data, **settings)
    if settings.get("reference"):
        settings["reference"] = inputs.as_model(settings["reference"])
    own = _own_task(model, task, settings) if prompts is None else None
    either = (prompts is None) != (task is None and own is None)
    require(either, "evaluate: give either prompts or a task")
    trust = active() if own is None else own.trust(settings, allow_code)
    with trusting(trust), tempfile.TemporaryDirectory() as folder:
        files = inputs.Files(Path(folder), "evaluate")
        if prompts is not None:
            made, _ = inputs.as_rewards(reward, weights, (), None, files.path(prompts, "prompts"))
            values = {f.name: getattr(made, f.name) for f in fields(Prompts) if f.init}
            given: Task = _AllPrompts(**values)
        else:
            alone = "evaluate: a task has its own reward; give prompts with this one"
            require(reward is None, alone)
            given = inputs.as_task(task if own is None else own.tree)
        given = inputs.with_tools(given, tools, settings) if tools else given
        how = {} if own is None else own.how
        given_stage = {"name": "eval", "model": "model", "task": given, **how}
        stage = inputs.built(EvaluateStage, given_stage, settings, "evaluate")
        config.check_named([stage])
        files.write()
        with files.named(), worker_pool([stage]) as workers:
            stage.task.ready()
            policy = _policy(model, tokenizer)
            reference = partial(_policy, stage.reference)
            result: dict[str, JSON] = stage.measure(policy, reference, seed, workers=workers)[1]
    found = {**result, "sampling": asdict(stage.sampling)}
    return found if own is None else {**found, "task_source": own.source(stage.task)}


def _own_task(model: Any, task: Any, settings: Mapping[str, Any]) -> TaskOfRun | None:
    """The task of a run, unless another is given, or the same with settings."""
    from posttrain.commands.evaluate import task_of_run

    if not isinstance(model, Run) or not isinstance(task, str | None):
        return None
    model.policy()  # a run that has not begun is trained first
    found = task_of_run(str(model.directory), task or "")
    name = str(found.tree["name"]).removeprefix(PREFIX) if found else ""
    lost = f"evaluate: the run's task is the class {name} of a program, which its directory does not hold"
    fine = found is None or found.tree["name"] == name
    require(fine, f"{lost}; give the task, as in evaluate({name}(...))")
    changed = (key.removeprefix("task.") for key in settings)
    return None if found and task and any(key in found.tree for key in changed) else found


def _agreement(
    model: Any, data: Any, max_length: int = 1024, columns: Mapping[str, str] | None = None
) -> dict[str, JSON]:
    """Evaluate the reward models of a run, or one in a directory, on pairs or rankings."""
    from posttrain.data.preferences import read_preferences
    from posttrain.models.scorer import load_scorer

    places = model.scorers() if isinstance(model, Run) else [inputs.as_model(model)]
    scorers = [load_scorer(place) for place in places]
    with tempfile.TemporaryDirectory() as folder:
        files = inputs.Files(Path(folder), "evaluate")
        paths = files.paths(data, "data")
        files.write()
        with files.named():
            tokenizer = scorers[0].tokenizer
            read = [read_preferences(path, tokenizer, max_length, columns) for path in paths]
            for path, found in zip(paths, read, strict=True):
                other = f"evaluate: {path} holds rows of kind {found.kind}, not pairs or rankings"
                require(found.kind in ROWS["rankings"], other)
    units = [tuple(map(until_end, unit)) for found in read for unit in found.units]
    return report([judge_pairs(scorer, units, 8192) for scorer in scorers])


def reward(name: str, **options: Any) -> Reward:
    """Return a shipped reward with its options as a function: reward("math", phrase="final answer:")."""
    require(isinstance(name, str), f"reward: the name of a shipped reward, not {name!r}")
    check(name, options)
    return resolve(name, options)


def probe(reward: Any = None, task: Any = None, *, prompts: Any = None, **settings: Any) -> Report:
    """Test a reward before any training: its scores for the gold answers of a `task`, or of `prompts` with answers, and for wrong,
    empty, padded and other responses. The report prints as a table. Settings: weights of several rewards; problems, split,
    examples."""
    require((prompts is None) != (task is None), "probe: give either prompts or a task")
    scored = inputs.as_probed(reward, settings.pop("weights", None))
    with tempfile.TemporaryDirectory() as folder:
        files = inputs.Files(Path(folder), "probe")
        made = inputs.as_task(task) if task is not None else Prompts(files.path(prompts, "prompts"))
        files.write()
        with files.named():
            found = probe_task(scored, made, **settings)
    return replace(found, reward=found.reward.removeprefix(PREFIX))


def arguments(**defaults: Any) -> dict[str, Any]:
    """The settings of a script: `defaults`, overridden by key=value arguments of its command line, which are read as YAML. If a default
    is a dict, `key.inner=value` sets one of its entries. A key without a default is passed on. `--help` prints the script's docstring
    and the defaults."""
    words = sys.argv[1:]
    if "--help" in words or "-h" in words:
        text = (getattr(sys.modules["__main__"], "__doc__", "") or "").strip()
        sys.stdout.write(f"{text}\n\n" + "".join(f"{k}={v}\n" for k, v in defaults.items()))
        raise SystemExit(0)
    found = {k: dict(v) if isinstance(v, Mapping) else v for k, v in defaults.items()}
    for key, value in map(config_tree.pair, words):
        head, dot, rest = key.partition(".")
        inner = bool(dot) and isinstance(found.get(head), dict)
        place, name = (found[head], rest) if inner else (found, key)
        place[name] = config_tree.meant(value, str if isinstance(place.get(name), str) else Any)
    return found


class _AllPrompts(Prompts):
    """Evaluates all prompts, because none are for training."""

    def problems(self, split: str, level: int | None = None) -> tuple[Problem, ...]:
        return self._read(self.parts()[0]).problems


def _policy(model: Any, tokenizer: Any = None) -> Any:
    if isinstance(model, Run | Model):
        return model.policy()
    name = inputs.as_model(model, tokenizer)
    from posttrain.models import given

    if not name.startswith(PREFIX):
        return Model(name).policy()
    from posttrain.models.policy import wrap_model

    loaded = given.copied(name)
    return wrap_model(loaded.model, loaded.tokenizer, loaded.stop_ids, name)


def _algorithm(given: Algorithm | str) -> Algorithm:
    if isinstance(given, Algorithm):
        return given
    fine = isinstance(given, str)
    require(fine, f"algorithm: a name or an instance such as GRPO(group=8), not {given!r}")
    made: Algorithm = catalogue.load("algorithm", given, Algorithm)()
    return made


def _files(out: str | Path, name: str) -> inputs.Files:
    """The files of a run in the directory `out`, or in the first free runs/NAME-N."""
    fine = isinstance(out, str | Path) and "\0" not in str(out)
    require(fine or out is None, f"out: the path of a directory, not {out!r}")
    if out:
        return inputs.Files(Path(out).expanduser(), name)
    taken = {files.place for files in _waiting}
    directories = (Path("runs", f"{name}-{number}") for number in count(1))
    free = (d for d in directories if d.absolute() not in taken and not d.exists())
    files = inputs.Files(next(free), name)
    _waiting.add(files)
    return files


def _run(
    kind: type[Stage],
    given: Mapping[str, Any],
    settings: dict[str, Any],
    files: inputs.Files,
    callback: Callback | None,
) -> Run:
    """The run of one stage."""
    top = {key: settings.pop(key) for key in list(settings) if key in config.TOP}
    return _begun(Recipe((inputs.built(kind, given, settings, files.name),)), files, callback, top)


def _begun(
    recipe: Recipe, files: inputs.Files, callback: Callback | None, top: Mapping[str, Any]
) -> Run:
    given = {"recipe": recipe, "name": files.name, "out": str(files.directory)}
    refuse_unknown("setting", top, config.TOP, [files.name])
    settings = inputs.built(config.Settings, given, top, files.name)
    return Run(files.directory, settings, files, callback)
