"""Draws the curves of a run as one PNG. Panels whose figures were not recorded are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.errors import require
from posttrain.runs.read import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT, GRID = "#24292f", "#8c959f", "#e7eaed"
BLUE, GREEN, ORANGE, PURPLE, RED = "#2f6fde", "#1f9d61", "#e08214", "#8250df", "#cf3f4f"
COLOURS, DASHES = (BLUE, ORANGE, GREEN, PURPLE, RED), ("-", "--", ":", "-.")
STYLE = Path(__file__).with_suffix(".mplstyle")
OVERLAID = {
    "accuracy/test": "Held-out accuracy",
    "reward": "Reward while training",
    "sft loss": "Supervised loss",
    "length": "Response length",
    "kl": "KL from the start",
    "entropy": "Entropy",
}


@dataclass(frozen=True, slots=True)
class Series:
    """One figure of one stage, finite values only."""

    stage: str
    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes: a title in plain words, and the function that draws it."""

    title: str
    subtitle: str
    paint: Callable[[Axes], None]


def draw(run: Run, path: Path) -> None:
    """Draw the run's curves to `path`."""
    panels = _panels(run)
    require(bool(panels), f"nothing to draw: {run.directory} has no metrics yet")
    _save(panels, run.name, path)


def draw_together(runs: Sequence[Run], path: Path) -> list[str]:
    """Draw the figures that at least two runs recorded, one panel each, a colour for a run and a dash for a stage; the titles drawn."""
    names, found = _labels(runs), [_collect(run) for run in runs]
    panels = []
    for figure, title in OVERLAID.items():
        having = [
            (names[n], figures[figure]) for n, figures in enumerate(found) if figure in figures
        ]
        if len(having) > 1:
            panels.append(Panel(title, figure, partial(_overlay, order=names, having=having)))
    if panels:
        _save(panels, " and ".join(names), path)
    return [panel.title for panel in panels]


def _labels(runs: Sequence[Run]) -> list[str]:
    """Names of runs that tell them apart: with the folder above where the last part is the same."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.directory) for run in runs]


def _overlay(axes: Axes, order: Sequence[str], having: Sequence[tuple[str, list[Series]]]) -> None:
    stages = list(dict.fromkeys(series.stage for _, found in having for series in found))
    for name, found in having:
        colour = COLOURS[order.index(name) % len(COLOURS)]
        for series in found:
            place = stages.index(series.stage)
            label = f"{name} {series.stage}" if len(stages) > 1 else name
            _curve(axes, series, colour, _plain(label), DASHES[place % len(DASHES)])


def draw_pass_at_k(
    curves: Mapping[str, Mapping[int, tuple[float, float, float]]], title: str, path: Path
) -> None:
    """pass@k against k, with 95% bands: what a model can do in k tries. Where the trained model is above at k = 1 and the two meet at
    large k, training made likely what was possible before; where it stays above, it made something new."""

    def paint(axes: Axes) -> None:
        every = sorted({k for curve in curves.values() for k in curve})
        for number, (name, curve) in enumerate(curves.items()):
            ks, colour = sorted(curve), COLOURS[number % len(COLOURS)]
            value, low, high = (np.array([curve[k][part] for k in ks]) for part in range(3))
            axes.fill_between(ks, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(ks, value, color=colour, marker="o", label=_plain(name))
        axes.set_xscale("log", base=2)
        axes.set_xticks(every, [str(k) for k in every])
        axes.set_xlabel("k: answers to a problem")
        _percent(axes, 1.03)

    require(bool(curves) and all(curves.values()), "nothing to draw: no pass@k was measured")
    subtitle = "held-out problems with a right answer among k; band: 95% interval"
    _save([Panel("pass@k", subtitle, paint)], title, path)


def _plain(text: str) -> str:
    """Text without formulas, which a dollar would begin."""
    return text.replace("$", r"\$")


def _percent(axes: Axes, top: float) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.set_ylim(-0.03, top)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


@contextmanager
def own_style() -> Iterator[None]:
    """matplotlib's defaults and ours: it reads a matplotlibrc in the working directory, which may come with a run and have TeX run on
    labels."""
    import matplotlib
    import matplotlib.style

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.style.use(STYLE)
        yield


@own_style()
def _save(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Panels in a grid under a title. Imports matplotlib only here, and opens no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(3, len(panels)) if len(panels) != 4 else 2
    rows = -(-len(panels) // columns)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure((4.9 * columns, 3.5 * rows + 0.7), dpi=130, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)  # draws to memory: no window, no global state
    bold: dict[str, Any] = {"fontsize": 14, "fontweight": "bold", "color": INK}
    figure.suptitle(_plain(title), x=0.012, ha="left", **bold)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        axes.set_title(panel.title)
        axes.text(0, 1.035, panel.subtitle, transform=axes.transAxes, fontsize=8.5, color=FAINT)
        axes.set_xlabel("training step")
        axes.locator_params(axis="x", integer=True)
        panel.paint(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _panels(run: Run) -> list[Panel]:
    """The panels that this run has figures for, in reading order: how well, then how."""
    figures = _collect(run)
    panels = []

    def add(title: str, subtitle: str, paint: Callable[..., None], *names: str) -> None:
        if any(name in figures for name in names):
            found = [figures.get(name, []) for name in names]
            panels.append(Panel(title, subtitle, lambda axes: paint(axes, *found)))

    add("Reward while training", "mean score of the samples it learns from", _rewards, "reward")
    task = "the same samples, scored by the task itself"
    add("What the reward stands for", task, _rewards, "reward/task")
    interval = ("accuracy/test", "accuracy/test_low", "accuracy/test_high")
    unseen = "problems it never trains on; band: 95% interval"
    add("Held-out accuracy", unseen, _accuracy, *interval)
    better = "held-out pairs in which the better answer is rated higher"
    add("Pairs told apart", better, _rewards, "accuracy/held_out")
    distance = "by how much the better answer of a pair is rated higher"
    add("Margin", distance, partial(_several, colours=(ORANGE, *COLOURS)), "margin")
    loss = "negative log-likelihood of the examples; lower is better"
    add("Supervised loss", loss, partial(_several, colours=(ORANGE, *COLOURS)), "sft loss")
    tokens = partial(_several, colours=(PURPLE, *COLOURS))
    add("Response length", "tokens a response", tokens, "length")
    words = {"kl": "KL: distance from the start", "entropy": "entropy: how undecided it is"}
    both = "; ".join(text for name, text in words.items() if name in figures)
    add("Drift and variety" if "kl" in figures else "Variety", both, _drift, "kl", "entropy")
    if any(np.ptp(series.values) for series in figures.get("level", [])):
        add("Difficulty", "level of the problems it is given", _levels, "level")
    return panels


def _collect(run: Run) -> dict[str, list[Series]]:
    """Series by figure. A loss without rewards beside it is a supervised loss; others are not comparable across steps."""
    rows = run.metrics()
    figures: dict[str, list[Series]] = {}
    for stage in dict.fromkeys(row.stage for row in rows):
        of_stage = [row for row in rows if row.stage == stage]
        online, pairs = (
            any(name in row.figures for row in of_stage) for name in ("reward", "margin")
        )
        for name in dict.fromkeys(name for row in of_stage for name in row.figures):
            points = [
                (row.step, row.figures[name])
                for row in of_stage
                if np.isfinite(row.figures.get(name, np.nan))
            ]
            if not points:
                continue
            steps, values = (np.array(axis, dtype=np.float64) for axis in zip(*points, strict=True))
            if name in ("entropy", "length") and not online:
                continue  # of given text, not of what the model writes
            name = "sft loss" if name in ("loss", "nll") and not online and not pairs else name
            if not any(series.stage == stage for series in figures.get(name, [])):
                figures.setdefault(name, []).append(Series(stage, steps, values))
    return figures


def smooth(values: np.ndarray, span: int) -> np.ndarray:
    """A centred moving mean over `span` values, over those that exist at the ends.

    >>> smooth(np.array([0.0, 3.0, 0.0, 3.0]), 3).tolist()
    [1.5, 1.0, 2.0, 1.5]
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first, last = np.maximum(index - span // 2, 0), np.minimum(index + span // 2 + 1, len(values))
    return np.asarray((sums[last] - sums[first]) / (last - first))


def _curve(
    axes: Axes, series: Series, colour: str, label: str | None = None, dash: str = "-"
) -> None:
    """A faint line for every step and a strong one for its moving mean; only the strong one where there are few."""
    span = len(series.values) // 12
    style: dict[str, Any] = {"color": colour, "linestyle": dash}
    if span >= 2:
        axes.plot(series.steps, series.values, linewidth=0.9, alpha=0.28, **style)
    line = smooth(series.values, span | 1) if span >= 2 else series.values
    axes.plot(series.steps, line, label=label, marker="o" if len(line) == 1 else None, **style)


def _label(series: Series, found: Sequence[Series]) -> str | None:
    """Stages are named where there is more than one."""
    return _plain(series.stage) if len(found) > 1 else None


def _several(axes: Axes, found: Sequence[Series], colours: Sequence[str]) -> None:
    """The series of several stages, each from its own step 0."""
    for number, series in enumerate(found):
        _curve(axes, series, colours[number % len(colours)], _label(series, found))


def _rewards(axes: Axes, found: list[Series]) -> None:
    _several(axes, found, (BLUE, PURPLE, ORANGE, GREEN))
    if all(series.values.min() >= 0 and series.values.max() <= 1 for series in found):
        axes.set_ylim(-0.03, 1.03)


def _accuracy(axes: Axes, found: list[Series], lows: list[Series], highs: list[Series]) -> None:
    low_of, high_of = {s.stage: s for s in lows}, {s.stage: s for s in highs}
    for number, series in enumerate(found):
        colour = (GREEN, BLUE, ORANGE, PURPLE)[number % 4]
        low, high = low_of.get(series.stage), high_of.get(series.stage)
        if low is not None and high is not None and np.array_equal(low.steps, high.steps):
            band: dict[str, Any] = {"color": colour, "alpha": 0.15, "linewidth": 0}
            axes.fill_between(low.steps, low.values, high.values, **band)
        label = _label(series, found)
        axes.plot(series.steps, series.values, color=colour, marker="o", label=label)
        style: dict[str, Any] = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center"}
        style |= {"fontsize": 9, "color": colour, "weight": "bold"}
        for place in {0, len(series.values) - 1}:
            step, value = series.steps[place], series.values[place]
            axes.annotate(f"{value:.0%}", (step, value), **style)
    _percent(axes, 1.08)


def _drift(axes: Axes, kl: list[Series], entropy: list[Series]) -> None:
    """Two scales, each axis in its line's colour: the two are read against themselves, not against each other."""
    if kl:
        _several(axes, kl, (RED, ORANGE))
    if not entropy:
        axes.set_ylabel("KL", color=RED, fontsize=9)
        return
    other = axes.twinx() if kl else axes
    _several(other, entropy, (BLUE, PURPLE))
    other.spines["bottom"].set_visible(other is axes)
    other.tick_params(axis="y", colors=BLUE)
    other.set_ylabel("entropy", color=BLUE, fontsize=9)
    if kl:
        other.grid(visible=False)
        axes.tick_params(axis="y", colors=RED)
        axes.set_ylabel("KL", color=RED, fontsize=9)


def _levels(axes: Axes, found: list[Series]) -> None:
    for number, series in enumerate(found):
        colour, label = (ORANGE, BLUE, GREEN)[number % 3], _label(series, found)
        axes.step(series.steps, series.values, where="post", color=colour, label=label)
    axes.locator_params(axis="y", integer=True)
