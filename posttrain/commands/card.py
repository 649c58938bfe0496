"""The model card of a run: base model, data, settings, held-out results with intervals, and limits.

All of it is read from the run directory. Paths of this machine, and passwords and parameters of addresses, are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

import yaml

from posttrain.commands.compare import interval_of
from posttrain.errors import many, require
from posttrain.models.load import HUB_NAME
from posttrain.monitor.monitor import alarm_lines
from posttrain.runs.layout import stages_of
from posttrain.runs.read import Run
from posttrain.types import JSON

# keys that name training data
DATA = ("task", "data", "pairs", "problems", "pretraining", "text")
# the other keys only say where a run is stored and which services track it
SETTINGS = ("format", "name", "seed", "deterministic", "processes", "stages")
LICENCE = re.compile("[a-z0-9][a-z0-9.-]{0,60}")  # the hub's identifiers: apache-2.0, mit, other


def model_card(
    run: Run, licence: str = "", base: str = "", adapter: bool = False, stage: str = ""
) -> str:
    """Return the card as Markdown with the hub's metadata; `base` is the model that adapters belong to. Of a `stage` that is not the
    one a run exports, later stages and the figures of their models are left out."""
    such = "is not an identifier of the hub, such as apache-2.0, mit or other"
    require(not licence or LICENCE.fullmatch(licence) is not None, f"license {licence!r} {such}")
    stages = every = stages_of(run.config)
    ended = run.summary is not None
    so_far = {"seed": run.config.get("seed", "unknown"), "alarms": alarm_lines(run.events())}
    summary = dict(run.summary or so_far)
    if stage:
        names = [str(s["name"]) for s in stages]
        stages = stages[: names.index(stage) + 1]
        own = {**(summary.get("stages") or {})}
        late = {
            n: r for n, r in own.items() if n in names[len(stages) :] and r.get("model") != stage
        }
        summary["stages"] = {name: result for name, result in own.items() if name not in late}
    base = base or next((m for s in stages if HUB_NAME.fullmatch(m := str(s.get("model", "")))), "")
    chosen = [s["algorithm"] for s in stages if isinstance(s.get("algorithm"), dict)]
    algorithms = [str(algorithm["name"]) for algorithm in chosen]
    metadata = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        **({"license": licence} if licence else {}),
        **({"base_model": base} if base else {}),
        "tags": list(dict.fromkeys(["posttrain", *algorithms])),
    }
    missing = "Not stated. Its publisher must choose one that the base model and the data permit."
    licensed = f"`{licence}`, as its publisher says." if licence else missing
    origin = f"`{base}`" if base else "a model that is not on the hub"
    kept = published({**{key: run.config.get(key) for key in SETTINGS}, "stages": stages})
    settings = yaml.safe_dump(kept, sort_keys=False)
    sections = {
        "Training": _training(stages),
        "Held-out figures": _figures(summary, every),
        "Data": _data(stages, summary),
        "Limits": _limits(summary, ended),
        "Licence": [licensed],
        "All settings": ["Paths are shortened to their last part.", "", f"```yaml\n{settings}```"],
    }
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---",
        f"# {_cell(run.config.get('name', 'A model'))}, trained with posttrain",
        f"{'Adapters (LoRA) for' if adapter else 'Trained from'} {origin}."
        + (f" This is the model of the stage {_cell(stage)}." if stage else ""),
    ]
    parts += ["\n".join([f"## {title}", "", *lines]) for title, lines in sections.items()]
    return "\n\n".join(parts) + "\n"


def published(value: JSON) -> JSON:
    """Return a setting that may be published: the last part of a local path, an address without password and parameters.

    >>> published({"file": "/home/me/rows.jsonl", "url": "https://me:secret@host/v1?key=1", "model": "org/name", "steps": 2})
    {'file': 'rows.jsonl', 'url': 'https://host/v1', 'model': 'org/name', 'steps': 2}
    """
    if isinstance(value, Mapping):
        return {str(key): published(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [published(item) for item in value]
    if not isinstance(value, str):
        return value
    if re.match(r"~|\.{0,2}[/\\]|[A-Za-z]:[/\\]|file:", value):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return re.sub(r"//[^/@]*@", "//", value).partition("?")[0] if "://" in value else value


def _training(stages: list[dict[str, JSON]]) -> Iterator[str]:
    yield "| stage | kind | from | algorithm | steps | learning rate |"
    yield "|---|---|---|---|---|---|"
    for stage in stages:
        if "steps" in stage and stage.get("algorithm"):
            rate = (stage.get("optimizer") or {}).get("lr", "")
            made = (stage["name"], stage["stage"], published(stage.get("model", "")))
            cells = (*made, stage["algorithm"]["name"], stage["steps"], rate)
            yield f"| {' | '.join(map(_cell, cells))} |"


def _figures(summary: Mapping[str, JSON], stages: list[dict[str, JSON]]) -> Iterator[str]:
    """Yield each evaluation: what it measured, on how many problems, with 95% intervals."""
    tasks = {str(s["name"]): s.get("task") for s in stages}
    rows = list[str]()
    for name, result in (summary.get("stages") or {}).items():
        figures = {key: result.get(key) for key in ("accuracy", "reward")}
        passes = (result.get("pass_at") or {}).items()
        figures |= {f"pass@{k}": value for k, value in passes if k != "1"}
        for figure, value in figures.items():
            if found := interval_of(value):
                task = tasks.get(name)
                task = task.get("name", "") if isinstance(task, dict) else task or ""
                interval = f"{found.value:.4g} [{found.low:.4g}, {found.high:.4g}]"
                model, problems = result.get("model", ""), result.get("problems", "")
                cells = (name, model, task, figure, interval, problems)
                rows.append(f"| {' | '.join(map(_cell, cells))} |")
    if not rows:
        yield "None: no stage of the run evaluated the model on held-out problems."
        return
    yield "| evaluation | model of stage | task | figure | value [95% interval] | problems |"
    yield "|---|---|---|---|---|---|"
    yield from rows


def _data(stages: list[dict[str, JSON]], summary: Mapping[str, JSON]) -> Iterator[str]:
    results = summary.get("stages") or {}
    for stage in stages:
        keys = [key for key in DATA if stage.get(key)] if stage.get("algorithm") else []
        given = {key: published(stage[key]) for key in keys}
        count = (results.get(stage["name"]) or {}).get("trained_on")
        more = f"; {count} distinct texts" if count else ""
        if given:
            yield f"- {stage['name']}: `{json.dumps(given, ensure_ascii=False).replace('`', '')}`{more}"


def _limits(summary: Mapping[str, JSON], ended: bool) -> Iterator[str]:
    if not ended:
        yield "- The run had not ended when this card was made: figures that it has measured are missing here."
    yield f"- One run with seed {summary.get('seed', 'unknown')}: intervals are over problems, not over seeds."
    results = (summary.get("stages") or {}).values()
    failed = sum(int(result.get("failed") or 0) for result in results)
    seen = sum(int(result.get("contaminated") or 0) for result in results)
    if ended:
        yield f"- Evaluations: {many(failed, 'response')} could not be scored; also trained on: {many(seen, 'problem')}."
    alarms = [str(line) for line in summary.get("alarms") or ()]
    yield from (f"- Alarm in training: {_cell(line)}" for line in alarms)
    yield from () if alarms else ["- No alarm in training."]
    yield "- Measured only on the tasks above. Its safety, its bias and other uses were not evaluated."
    known = (summary.get("versions") or {}).items()
    versions = ", ".join(f"{name} {version}" for name, version in known)
    made = f"- Made in {float(summary.get('seconds') or 0):.0f} s with {versions}"
    yield from [f"{made}; settings sha256 `{summary.get('config_sha256', '')}`."] if ended else []


def _cell(value: JSON) -> str:
    """Escape text from a file for one cell of a table, so that it cannot begin another."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
