"""Decides which settings may change between two attempts of one run, and which would make it another run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from posttrain.types import JSON

# Settings that decide how the work is done or what is measured, but not what is learned. Threads and devices may change the
# last bits of a number; a micro-batch budget does not change a batch.
_HARMLESS = """
    name device deterministic threads processes parallel trackers checkpoint_hook checkpoint_sync checkpoint_keep token_budget
    checkpointing release_cache max_rows checkpoint_every evaluate_every evaluate_problems evaluate_units rollouts_every
    reference_device watch_kl monitor sampler sampler_processes
    tensor_parallel prometheus cluster cluster_spread worker_cpus worker_gpus on_failed_node
"""
HARMLESS = frozenset(_HARMLESS.split())
# of these, the settings that decide what a stage with keep=best exports, and where one with stop.plateau ends
MEASURED = frozenset({"evaluate_every", "evaluate_problems", "evaluate_units"})
# settings of the recipe; a stage may have fields of these names that matter
SUMMARY = frozenset({"next_command", "before", "after"})
LENGTHS = ("steps", "epochs")  # of a stage: it may train longer, or end at once
# a mapping with keys of the user's own: a new one is a change, not a setting of a later version
WHOLE = "options"
ABSENT = object()


@dataclass(frozen=True, slots=True)
class Changes:
    """`named` changes are allowed and reported; `refused` ones would make a resumed run neither the old run nor a new one.
    Stages in `extended` train longer, and give the same result as if they had been that long from the start."""

    named: tuple[str, ...]
    refused: tuple[str, ...]
    extended: tuple[str, ...] = ()


def compare(
    before: Mapping[str, JSON],
    after: Mapping[str, JSON],
    begun: Collection[str],
    reached: Mapping[str, int] | None = None,
) -> Changes:
    """Compare two resolved configurations. A stage that has not begun may change. One that has `reached` a step without an end may
    end there or later. A setting that did not exist in the version of posttrain that began the run is not a change.

    >>> old, new = ({"seed": 0, "threads": t, "stages": [{"name": "rl", "lr": r}]} for t, r in ((1, 0.1), (2, 0.2)))
    >>> compare(old, new, ["rl"])
    Changes(named=('threads: 1 -> 2',), refused=('rl.lr: 0.1 -> 0.2',), extended=())
    >>> compare(old, new, []).refused
    ()
    >>> old, new = ({"stages": [{"name": "rl", "task": {"options": o}}]} for o in ({"mark": 1}, {"mark": 1, "case": 0}))
    >>> compare(old, new, ["rl"]).refused
    ("rl.task.options: {'mark': 1} -> {'mark': 1, 'case': 0}",)
    >>> old, new = ({"stages": [{"name": "rl", "keep": "best", "evaluate_every": n}]} for n in (5, 10))
    >>> compare(old, new, ["rl"]).refused
    ('rl.evaluate_every: 5 -> 10',)
    """
    ours, theirs = flatten(before), flatten(after)
    named: list[str] = []
    refused: list[str] = []
    extended: list[str] = []
    for key in dict.fromkeys([*ours, *theirs]):
        was, now = ours.get(key, ABSENT), theirs.get(key, ABSENT)
        if was == now:
            continue
        stage, *rest = key.split(".")
        # the name of a run is harmless; that of an algorithm or a task within a stage identifies it
        parts = [part for part in rest if part != "name"] or ([stage] if not rest else [])
        later = was is ABSENT or bool(rest and stage not in begun)
        measured = theirs.get(f"{stage}.keep") == "best" or theirs.get(f"{stage}.stop.plateau")
        chooses = measured and not MEASURED.isdisjoint(parts)
        passing = not HARMLESS.isdisjoint(parts) and not chooses
        harmless = later or key in SUMMARY or passing
        old, new = ("nothing" if value is ABSENT else short(value) for value in (was, now))
        text = f"{key}: {old} -> {new}"
        numbers = isinstance(was, int | float) and isinstance(now, int | float)
        if not harmless and len(rest) == 1 and rest[0] in LENGTHS and numbers:
            step = (reached or {}).get(stage, 0) if rest[0] == "steps" else 0
            reason = _not_extended(stage, was, now, theirs, step)
            text += f" ({reason})" if reason else ""
            harmless = not reason
            extended += [stage] if harmless and now > was else []
        (named if harmless else refused).append(text)
    return Changes(tuple(named), tuple(refused), tuple(extended))


def _not_extended(
    stage: str, was: JSON, now: JSON, settings: Mapping[str, JSON], reached: int = 0
) -> str:
    """Return why a stage that trains for `now` instead of `was` would not be the same up to there; "" if it is. `reached` is the step
    of its newest checkpoint if it has not ended.

    >>> _not_extended("rl", 9, 20, {"rl.optimizer.schedule": "constant"})
    ''
    >>> _not_extended("rl", 9, 20, {"rl.optimizer.schedule": "cosine"}).partition(",")[0]
    'optimizer.schedule=cosine ends at the last step'
    >>> _not_extended("rl", 20, 9, {"rl.optimizer.schedule": "cosine"}, reached=9)
    ''
    """
    if now < was and not 0 < reached <= now:
        also = f"; it can end at step {reached}, where its checkpoint is" if reached else ""
        return f"a stage that has begun can be made longer, not shorter{also}"
    if settings.get(f"{stage}.as_long_as"):
        return "as_long_as decides its length"
    own = {key: value for key, value in settings.items() if key.startswith(f"{stage}.")}
    schedules = {key: value for key, value in own.items() if key.endswith("optimizer.schedule")}
    given = [f"{key}={value}" for key, value in schedules.items() if value != "constant"]
    # where it ends at its checkpoint, nothing more is trained
    falling = [text.removeprefix(f"{stage}.") for text in given if now != reached]
    if falling:
        other = f"{falling[0]} ends at the last step, so that a longer run has another learning rate from the start"
        return f"{other}; a stage that is to be extended begins with schedule=constant"
    return "" if schedules else "it is no stage that trains"


def flatten(tree: Mapping[str, JSON]) -> dict[str, JSON]:
    """Flatten a configuration into dotted keys, stages by their names.

    >>> flatten({"seed": 0, "stages": [{"name": "rl", "optimizer": {"lr": 0.1}, "data": [1, 2]}]})
    {'seed': 0, 'rl.name': 'rl', 'rl.optimizer.lr': 0.1, 'rl.data': [1, 2]}
    """
    flat: dict[str, JSON] = {}

    def walk(prefix: str, value: JSON) -> None:
        if isinstance(value, Mapping) and value and prefix.rpartition(".")[2] != WHOLE:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            flat[prefix] = value

    walk("", {key: value for key, value in tree.items() if key != "stages"})
    stages = tree.get("stages", [])
    for place, stage in enumerate(stages if isinstance(stages, list | tuple) else [stages]):
        # a stage written by another program may lack a name, and then differs
        walk(str(stage.get("name", place) if isinstance(stage, Mapping) else place), stage)
    return flat


def short(value: object) -> str:
    """Return a value as text of at most 60 characters."""
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
