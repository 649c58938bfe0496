"""Recomputes a step of a run from the nearest checkpoint, without writing to the run, and shows what changed the model in it."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from posttrain.commands.replay_loop import Findings, Question, Replayed, ReplayLoop
from posttrain.config import Settings
from posttrain.errors import UserError, many, prefixed, refuse_unknown, require
from posttrain.events import printable
from posttrain.pipeline import device_of, set_up_torch, settings_of, versions
from posttrain.runs.console import duration
from posttrain.runs.layout import LOCK, Row, encode
from posttrain.runs.lock import live_owner
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.stages import _lineage
from posttrain.stages.base import Context, Stage, worker_pool
from posttrain.stages.train import TrainStage
from posttrain.train import checkpoint
from posttrain.trust import trusting
from posttrain.types import JSON

TEXT = 36  # characters of a column


@dataclass(frozen=True, slots=True)
class Replay:
    """A recomputed step of a run. `start` is the step of the checkpoint that it began from; 0: the start of the stage."""

    run: str
    stage: str
    step: int
    start: int
    notes: tuple[str, ...]
    seconds: float
    found: Findings

    def tree(self) -> JSON:
        """Return the result as `posttrain replay --json` prints it."""
        return encode(asdict(self))


@dataclass(eq=False)
class ReplayContext(Context):
    """Reads the run at `place`, and writes only to its own folder. The replayed stage does not find its earlier output."""

    stage: str = ""

    def folder(self, stage: str) -> Path:
        root = self.writer.directory if stage == self.stage else self.directory
        return root / "stages" / stage


def replay(
    directory: Path,
    place: str,
    *,
    update: int = 1,
    without: int | None = None,
    answer: str = "",
    prompt: str = "",
    top: int = 5,
    allow_code: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Replay:
    """Recompute the step `place` (STAGE/STEP) and analyse one of its updates: the parts of its gradient, the update `without`
    one of them, and the log-prob before and after it of an `answer` to a `prompt`, or of the rollout with that number. `say`
    gets lines of progress."""
    began, run, numbered = time.monotonic(), Run(directory), bool(answer) and not prompt
    both = "--answer needs the --prompt that it answers, or is the number of a rollout of the step"
    require(answer or not prompt, "--prompt needs the --answer whose log-prob is asked for")
    require(answer.isdigit() or not numbered, both)
    require(update >= 1 and top >= 1, f"--update and --top count from 1, not {update} and {top}")
    _check_ended(run)
    name, step, rows = _step(run, place)
    settings, _ = settings_of(run, allow_code, ())
    stage, member = _stage(settings, name)
    _check_inputs(run, settings, stage)
    path = _nearest(run, name, step)
    start = 0 if path is None else int(path.name.removeprefix("step-"))
    say(_announcement(name, path, step, [row for row in rows if start < row.step <= step]))
    question = Question(
        step=step,
        checkpoint=path,
        written={row.step: row.figures for row in rows},
        say=say,
        update=update,
        without=without,
        rollout=int(answer) if numbered else None,
        answer="" if numbered else answer,
        prompt=prompt,
        top=top,
    )
    found = _recompute(run, settings, stage, member, question)
    notes, seconds = tuple(_notes(run, settings)), time.monotonic() - began
    return Replay(str(run.directory), name, step, start, notes, seconds, found)


def _check_ended(run: Run) -> None:
    owner = live_owner(run.directory / LOCK)
    by = f"process {owner}" if owner else "a process on another machine"
    stop = "replay it when that has ended or was stopped"
    require(owner is None, f"{run.directory} is being written by {by}; {stop}")


def _announcement(name: str, path: Path | None, step: int, rows: Sequence[Row]) -> str:
    """Return what is recomputed, and how long the run took for it."""
    since = "its start" if path is None else f"the checkpoint {path.name}"
    kept = f" (no checkpoint at or before step {step - 1} was kept)" if path is None else ""
    took = duration(sum(row.figures.get("seconds/total", 0.0) for row in rows))
    return f"recomputes {name} from {since} to step {step}{kept}: its {many(len(rows), 'step')} took the run {took}"


def _recompute(
    run: Run, settings: Settings, stage: TrainStage, member: int, question: Question
) -> Findings:
    """Run the stage up to the step, in a temporary folder."""
    with (
        tempfile.TemporaryDirectory(prefix="posttrain-replay-") as folder,
        trusting(settings.trust),
        worker_pool([stage]) as workers,
        RunWriter(Path(folder) / "run") as writer,
        prefixed(stage.name),
    ):
        device = device_of(settings)
        context = ReplayContext(
            writer,
            settings.seed,
            device,
            threads=set_up_torch(settings, device),
            say=False,
            workers=workers,
            place=run.directory,
            loop=partial(ReplayLoop, question=question),
            stage=stage.name,
        )
        # members of an ensemble that were trained earlier are only read
        for number in range(member):
            name = f"model-{number}" if number else "model"
            made = context.folder(stage.name)
            made.mkdir(parents=True, exist_ok=True)
            (made / name).symlink_to((run.directory / "stages" / stage.name / name).resolve())
        try:
            with writer.events.at(stage.name):
                stage.run(context)
        except Replayed as found:
            return found.findings
    raise UserError(f"{stage.name} ended before step {question.step}")


def _step(run: Run, place: str) -> tuple[str, int, list[Row]]:
    """Return the stage and the step that STAGE/STEP names, and the rows of the stage."""
    name, _, said = place.partition("/")
    trained = run.stages()
    require(trained, f"{run.directory} has no steps yet")
    others = {path.parent.name for path in run.directory.glob("stages/*/result.json")}
    none = f"{name} has no steps; those that have: {', '.join(trained)}"
    require(name in trained or name not in others, none)
    refuse_unknown("stage with steps", [name], trained)
    rows = [row for row in run.metrics(name) if row.step > 0]
    last = rows[-1].step if rows else 0
    there = f"{run.directory} has steps 1 to {last} of {name}"
    numbered = said.isdigit() and len(said) < 16
    require(numbered, f"{place!r} is not STAGE/STEP, such as {name}/{last}")
    require(int(said) in {row.step for row in rows}, f"{there}, not {said}")
    return name, int(said), rows


def _stage(settings: Settings, name: str) -> tuple[TrainStage, int]:
    """Return the stage that trained a series of steps, and which of its models."""
    stages: dict[str, Stage] = {stage.name: stage for stage in settings.recipe.stages}
    member = re.fullmatch(r"(.+)-(\d+)", name) if name not in stages else None
    stage = stages.get(member[1] if member else name)
    if not isinstance(stage, TrainStage):
        raise UserError(f"the configuration of the run has no stage {name!r} that trains")
    return stage, int(member[2]) if member else 0


def _check_inputs(run: Run, settings: Settings, stage: Stage) -> None:
    """Raise an error if settings, files or code have changed since the stage was trained, or if it cannot be trained in the same
    way again."""
    ahead = int(getattr(stage, "max_staleness", 0))
    chance = f"{stage.name} samples ahead (max_staleness={ahead}): which rollouts a step has is decided by the clock"
    require(not ahead, f"{chance}, so that it cannot be computed again")
    earlier = takewhile(lambda other: other.name != stage.name, settings.recipe.stages)
    folders = {other.name: run.directory / "stages" / other.name for other in earlier}
    before = _lineage.read(run.directory / "stages" / stage.name)
    now = _lineage.trace(stage, settings.seed, folders)
    changes = [] if before is None else now.changes(before)
    text = f"{stage.name} is not what the run trained: {'; '.join(changes[:3])}"
    require(not changes, f"{text}; put it back as it was to replay the run")


def _notes(run: Run, settings: Settings) -> list[str]:
    """Return why the metrics may differ in their last bits."""
    notes, made, now = [], dict((run.summary or {}).get("versions") or {}), versions()
    other = [f"{name} {v}, here {now[name]}" for name, v in made.items() if now.get(name, v) != v]
    if other:
        notes.append(f"the run was made with {'; '.join(other)}: figures may differ")
    if settings.processes > 1:
        count = settings.processes
        notes.append(f"the run had {count} processes, here is one: sums are in another order")
    return notes


def _nearest(run: Run, name: str, step: int) -> Path | None:
    """Return the newest complete checkpoint before a step."""
    folder = run.directory / "checkpoints" / name
    before = [p for p in checkpoint.steps(folder) if int(p.name.removeprefix("step-")) < step]
    return next((path for path in before if checkpoint.verify(path) is None), None)


def lines(replayed: Replay) -> Iterator[str]:
    """Yield the lines that go with the tables."""
    found, first = replayed.found, replayed.found.difference
    yield from replayed.notes
    since = f"step {replayed.start}" if replayed.start else "the start of the stage"
    said = f"{replayed.stage}/{replayed.step}, recomputed from {since}"
    if first is not None:
        wrote = f"{first.figure} of step {first.step} is {first.replayed!r}, and the run wrote {first.written!r}"
        yield f"{said}: NOT what the run did: {wrote}"
    else:
        yield f"{said}: {many(found.compared, 'figure')} of {many(found.steps, 'step')} are those of the run to the bit"
    if found.updates > 1:
        yield f"update {found.update} of the {found.updates} of this step (--update)"
    clipped = f", clipped to {found.clipped:.3g} of it" if found.clipped < 1 else ""
    moved = f"the weights moved by {found.update_norm:.4g}" if found.update_norm else "no update"
    yield f"gradient norm {found.grad_norm:.4g}{clipped}; learning rate {found.learning_rate:.4g}; {moved}"
    for name, share in found.additions.items():
        yield f"{name}: {share:+.1%} of the gradient"
    if (out := found.without) is not None:
        yield (
            f"without {found.kind} {out.number}: the weights move by {out.norm:.4g}, cosine {out.cosine:.4f} with the update, "
            f"distance {out.distance:.1%} of it"
        )
    if found.answer is not None:
        asked = found.answer
        other = asked.without
        without = "" if other is None else f"; without it {other - asked.before:+.4f}"
        text = f"{found.measure} of {asked.text[:80]!r}: {asked.before:.4f} -> {asked.after:.4f}"
        yield f"{text} ({asked.after - asked.before:+.4f}{without})"


def tables(replayed: Replay, top: int) -> Iterator[Table]:
    """Yield the units with the largest shares of the gradient, and the tokens with the largest shares in these."""
    found = replayed.found
    heads = ["#", "share", "norm", "reward", "advantage", found.measure, "change"]
    heads += ["without"] if found.without is not None else []
    table = Table(title=f"{found.kind}s by their share of the gradient", box=SIMPLE_HEAD)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("text", overflow="ellipsis", no_wrap=True, max_width=TEXT)
    for item in found.items[:top]:
        for place, m in enumerate(item.members):
            own = (str(item.number), f"{item.share:+.1%}", f"{item.norm:.3g}")
            figures = [_figure(m.reward), _figure(m.advantage), f"{m.before:.2f}"]
            figures.append(f"{m.after - m.before:+.3f}")
            figures += [] if m.without is None else [f"{m.without - m.before:+.3f}"]
            said = Text(f"{printable(m.prompt)[-TEXT // 2 :]} -> {printable(m.text)}")
            table.add_row(*(("", "", "") if place else own), *figures, said)
    yield table
    spans = [(item, span) for item in found.items[:top] for span in item.spans]
    tokens = Table(title="tokens by their share", box=SIMPLE_HEAD)
    for head in ("#", "token", "share", "text"):
        tokens.add_column(head, justify="left" if head == "text" else "right")
    for item, span in sorted(spans, key=lambda pair: -abs(pair[1].share))[: 2 * top]:
        at = str(span.first) if span.last == span.first + 1 else f"{span.first}-{span.last - 1}"
        text = Text(repr(printable(span.text)[:60]))
        tokens.add_row(str(item.number), at, f"{span.share:+.1%}", text)
    yield tokens


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
