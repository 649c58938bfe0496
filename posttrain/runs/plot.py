"""Draws the curves of a run as one PNG. Panels whose metrics were not recorded are left out."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.errors import require
from posttrain.runs.layout import Row
from posttrain.runs.read import Run
from posttrain.system.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT = "#24292f", "#8c959f"
BLUE, GREEN, ORANGE, PURPLE, RED = "#2f6fde", "#1f9d61", "#e08214", "#8250df", "#cf3f4f"
COLOURS, DASHES = (BLUE, ORANGE, GREEN, PURPLE, RED), ("-", "--", ":", "-.")
STYLE = Path(__file__).with_suffix(".mplstyle")
# metric -> (title, subtitle), in reading order: results first, then how they came about
PANELS = {
    "reward": ("Reward while training", "mean score of the samples it learns from"),
    "reward/task": ("What the reward stands for", "the same samples, scored by the task itself"),
    "accuracy/test": ("Held-out accuracy", "problems it never trains on; band: 95% interval"),
    "reward/test": ("Held-out reward", "mean over prompts it never trains on"),
    "accuracy/held_out": ("Preference accuracy", "held-out pairs, the better answer rated higher"),
    "margin": ("Margin", "by how much the better answer of a pair is rated higher"),
    "sft loss": ("Supervised loss", "negative log-likelihood of the examples; lower is better"),
    "length": ("Response length", "tokens a response"),
    "level": ("Difficulty", "level of the problems it is given"),
}
# the colour of the first stage, if not blue
FIRST = {"accuracy/test": GREEN, "margin": ORANGE, "sft loss": ORANGE, "length": PURPLE}
_FIRST = ("accuracy/test", "reward/test", "accuracy/held_out")
OVERLAID = {name: PANELS[name][0] for name in (*_FIRST, "reward", "margin", "sft loss", "length")}
OVERLAID |= {"kl": "KL from the start", "entropy": "Entropy"}


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one stage, finite values only."""

    stage: str
    steps: np.ndarray
    values: np.ndarray


Figures = Mapping[str, list[Series]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes: a title in plain words, and the function that draws it."""

    title: str
    subtitle: str
    paint: Callable[[Axes], None]


def draw(run: Run, path: Path) -> None:
    """Draw the run's curves to `path`."""
    panels = _panels(run)
    require(panels, f"nothing to draw: {run.directory} has no metrics yet")
    save_panels(panels, run.name, path)


def draw_together(runs: Sequence[Run], path: Path) -> list[str]:
    """Draw the metrics that at least two runs recorded, one panel each, with a colour per run and a dash pattern per stage.
    Returns the titles of the panels."""
    names, found = [run.name for run in runs], [_collect(run) for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.directory) for run in runs]
    panels = []
    for figure, title in OVERLAID.items():
        having = [(names[n], have[figure]) for n, have in enumerate(found) if figure in have]
        if len(having) > 1:
            panels.append(Panel(title, figure, partial(_overlay, order=names, having=having)))
    if panels:
        save_panels(panels, " and ".join(names), path)
    return [panel.title for panel in panels]


def _overlay(axes: Axes, order: Sequence[str], having: Sequence[tuple[str, list[Series]]]) -> None:
    stages = list(dict.fromkeys(series.stage for _, found in having for series in found))
    for name, found in having:
        colour = COLOURS[order.index(name) % len(COLOURS)]
        for series in found:
            dash = DASHES[stages.index(series.stage) % len(DASHES)]
            label = f"{name} {series.stage}" if len(stages) > 1 else name
            _curve(axes, series, colour, _plain(label), dash)


def draw_pass_at_k(
    curves: Mapping[str, Mapping[int, tuple[float, float, float]]], title: str, path: Path
) -> None:
    """Draw pass@k against k, with 95% bands: how often a model solves a problem in k tries. If the trained model is above at k
    = 1 and the curves meet at large k, training made likelier what was possible before; if it stays above, it solves new
    problems."""

    def paint(axes: Axes) -> None:
        every = sorted({k for curve in curves.values() for k in curve})
        for number, (name, curve) in enumerate(curves.items()):
            ks = sorted(curve)
            draw_band(axes, ks, [[curve[k][part] for k in ks] for part in range(3)], number, name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(every, [str(k) for k in every])
        axes.set_xlabel("k: answers to a problem")
        _percent(axes, 1.03)

    require(curves and all(curves.values()), "nothing to draw: no pass@k was measured")
    subtitle = "held-out problems with a right answer among k; band: 95% interval"
    save_panels([Panel("pass@k", subtitle, paint)], title, path)


def draw_band(
    axes: Axes,
    where: Sequence[float],
    bounds: Sequence[Sequence[float]],
    number: int,
    name: str,
    dash: str = "-",
) -> None:
    """Draw curve `number` of several, with its lower and upper bounds as a band."""
    (value, low, high), colour = bounds, COLOURS[number % len(COLOURS)]
    axes.fill_between(where, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(where, value, color=colour, marker="o", label=_plain(name), linestyle=dash)


def _plain(text: str) -> str:
    """Escape dollar signs, which would begin a formula."""
    return text.replace("$", r"\$")


def _percent(axes: Axes, top: float) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.set_ylim(-0.03, top)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


@contextmanager
def own_style() -> Iterator[None]:
    """Use matplotlib's defaults and our style only: matplotlib reads a matplotlibrc in the working directory, which may come
    with an untrusted run and run TeX on labels."""
    import matplotlib
    import matplotlib.style

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.style.use(STYLE)
        yield


@own_style()
def save_panels(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Draw panels in a grid under a title. Imports matplotlib only here, and opens no window."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(3, len(panels)) if len(panels) != 4 else 2
    rows = -(-len(panels) // columns)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure((4.9 * columns, 3.5 * rows + 0.7), dpi=130, facecolor="white", layout=layout)
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
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    atomic_write(path, picture.getvalue(), durable=False, folder=True)


def _panels(run: Run) -> list[Panel]:
    """Return the panels for which this run has metrics."""
    figures = _collect(run)
    if not any(np.ptp(series.values) for series in figures.get("level", [])):
        figures.pop("level", None)  # a level that never changes is not worth a panel
    panels = {}
    for name in (name for name in PANELS if name in figures):
        first = FIRST.get(name, BLUE)
        colours = (first, *(colour for colour in COLOURS if colour != first))
        painted = partial(PAINTERS.get(name, _curves), figures=figures, name=name, colours=colours)
        panels[name] = Panel(*PANELS[name], painted)
    words = {"kl": "KL: distance from the start", "entropy": "entropy: how undecided it is"}
    both = "; ".join(text for name, text in words.items() if name in figures)
    title = "Drift and variety" if "kl" in figures else "Variety"
    drift = [Panel(title, both, partial(_drift, figures=figures))] if both else []
    last = [panels.pop("level")] if "level" in panels else []
    return [*panels.values(), *drift, *last]


def _collect(run: Run) -> dict[str, list[Series]]:
    """Return series by metric. The loss of a stage without rewards is a supervised loss; other losses are not comparable across
    steps."""
    stages: dict[str, list[Row]] = {}
    for row in run.metrics():
        stages.setdefault(row.stage, []).append(row)
    figures: dict[str, list[Series]] = {}
    for stage, rows in stages.items():
        names = dict.fromkeys(name for row in rows for name in row.figures)
        for name in names:
            points = [(row.step, row.figures.get(name, np.nan)) for row in rows]
            points = [point for point in points if np.isfinite(point[1])]
            if not points or (name in ("entropy", "length") and "reward" not in names):
                continue  # entropy and length of given text, not of sampled text
            if name in ("loss", "nll") and not names.keys() & {"reward", "margin"}:
                name = "sft loss"
            if all(series.stage != stage for series in figures.get(name, [])):
                steps, values = np.array(points, dtype=np.float64).T
                figures.setdefault(name, []).append(Series(stage, steps, values))
    return figures


def smooth(values: np.ndarray, span: int) -> np.ndarray:
    """Return a centred moving mean over `span` values; at the ends, over the values that exist.

    >>> smooth(np.array([0.0, 3.0, 0.0, 3.0]), 3).tolist()
    [1.5, 1.0, 2.0, 1.5]
    """
    window = np.ones(span)
    counts = np.convolve(np.ones(len(values)), window, "same")
    return np.asarray(np.convolve(values, window, "same") / counts)


def _curve(axes: Axes, series: Series, colour: str, label: str, dash: str = "-") -> None:
    """Draw a faint line of all steps and a strong one of the moving mean; with few steps, only the strong one."""
    span = len(series.values) // 12
    style: dict[str, Any] = {"color": colour, "linestyle": dash}
    if span >= 2:
        axes.plot(series.steps, series.values, linewidth=0.9, alpha=0.28, **style)
    line = smooth(series.values, span | 1) if span >= 2 else series.values
    axes.plot(series.steps, line, label=label, marker="o" if len(line) == 1 else None, **style)


def _styled(found: Sequence[Series], colours: Sequence[str]) -> Iterator[tuple[Series, str, str]]:
    """Yield each series with its colour and label: stages are named if there is more than one."""
    for number, series in enumerate(found):
        label = _plain(series.stage) if len(found) > 1 else ""
        yield series, colours[number % len(colours)], label


def _curves(axes: Axes, figures: Figures, name: str, colours: Sequence[str]) -> None:
    """Draw the series of several stages, each from its own step 0."""
    for series, colour, label in _styled(figures[name], colours):
        _curve(axes, series, colour, label)
    values = np.concatenate([series.values for series in figures[name]])
    if name.startswith(("reward", "accuracy")) and values.min() >= 0 and values.max() <= 1:
        axes.set_ylim(-0.03, 1.03)


def _accuracy(axes: Axes, figures: Figures, name: str, colours: Sequence[str]) -> None:
    ends = (figures.get(f"{name}_{end}", []) for end in ("low", "high"))
    lows, highs = ({series.stage: series for series in found} for found in ends)
    for series, colour, label in _styled(figures[name], colours):
        low, high = lows.get(series.stage), highs.get(series.stage)
        if low is not None and high is not None and np.array_equal(low.steps, high.steps):
            band: dict[str, Any] = {"color": colour, "alpha": 0.15, "linewidth": 0}
            axes.fill_between(low.steps, low.values, high.values, **band)
        axes.plot(series.steps, series.values, color=colour, marker="o", label=label)
        style: dict[str, Any] = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center"}
        style |= {"fontsize": 9, "color": colour, "weight": "bold"}
        for place in {0, len(series.values) - 1}:
            value = series.values[place]
            axes.annotate(f"{value:.0%}", (series.steps[place], value), **style)
    _percent(axes, 1.08)


def _levels(axes: Axes, figures: Figures, name: str, colours: Sequence[str]) -> None:
    for series, colour, label in _styled(figures[name], colours):
        axes.step(series.steps, series.values, where="post", color=colour, label=label)
    axes.locator_params(axis="y", integer=True)


PAINTERS = {"accuracy/test": _accuracy, "level": _levels}


def _drift(axes: Axes, figures: Figures) -> None:
    """Draw two curves on two scales, each axis in the colour of its curve: the curves are not to be compared with each
    other."""
    right = axes.twinx() if figures.keys() >= {"kl", "entropy"} else axes
    for side, name, colours in ((axes, "kl", (RED, ORANGE)), (right, "entropy", (BLUE, PURPLE))):
        if name in figures:
            _curves(side, figures, name, colours)
            side.tick_params(axis="y", colors=colours[0])
            side.set_ylabel(name.replace("kl", "KL"), color=colours[0], fontsize=9)
    if right is not axes:
        right.spines["bottom"].set_visible(False)
        right.grid(visible=False)
