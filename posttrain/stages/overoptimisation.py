"""Measures over-optimisation: the reward model's score (proxy) and the task's own score (gold) against the KL to the starting
model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from posttrain.errors import Range, require
from posttrain.evals.best_of_n import frontier
from posttrain.runs.plot import Panel, draw_band, save_panels
from posttrain.runs.read import Run
from posttrain.stages._answers import AnswerStage, rated_by, seeds
from posttrain.stages._naming import ScorerName, StageName
from posttrain.stages.base import Context
from posttrain.types import JSON

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURES = ("proxy", "gold", "kl")
BATCH = 8  # problems whose samples are written together
FALLEN = 2.0  # standard errors below its best at which the gold reward counts as fallen
Curve = list[dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class OveroptimisationStage(AnswerStage):
    """Curves of (KL, proxy, gold), as in Stiennon et al. 2020 and Gao et al. 2022:

    - for each rl stage in `trained`, during its training, as it measured itself with `measure_problems`;
    - for best of n by each of `reward_models`, from `samples` answers of `model` to `problems` held-out problems, n = 1, 2, 4, ...,
      at KL = log n - (n - 1) / n.

    Writes curve.png. The result has every point and, for each curve, its best gold reward, its last, and the fall between them in
    standard errors. The best is chosen from the same samples, so a small fall is not significant.
    """

    trained: tuple[StageName, ...] = ()
    reward_models: tuple[ScorerName, ...] = ()
    problems: Annotated[int, Range(ge=2)] = 100
    samples: Annotated[int, Range(ge=2)] = 64

    def mistakes(self) -> Iterator[str]:
        if not (self.trained or self.reward_models):
            yield "name rl stages as trained, or reward_models, or both"
        if self.sampling.temperature == 0:
            yield "best of n needs a temperature above 0"

    def run(self, context: Context) -> dict[str, JSON]:
        curves = {stage: self.training(context, stage) for stage in self.trained}
        curves |= self.best_of_n(context) if self.reward_models else {}
        found = {name: {**verdict(curve), "points": curve} for name, curve in curves.items()}
        context.announce(self.name, [said(name, one) for name, one in found.items()])
        draw(curves, context.folder(self.name) / "curve.png")
        return {"curves": found}

    def training(self, context: Context, stage: str) -> Curve:
        """The points that an rl stage measured while it trained."""
        curve = training_curve(context, stage)
        none = f"{self.name}: stage {stage!r} has measured no proxy and gold reward; set its measure_problems"
        require(curve, none)
        return curve

    def best_of_n(self, context: Context) -> dict[str, Curve]:
        """The points of best-of-n: one set of samples, ordered by each reward model in turn."""
        policy, problems = self.load(context), self.task.problems("test")[: self.problems]
        seed = seeds(context, 64)
        groups = list(self.ask(context, policy, problems, self.samples, seed, batch=BATCH))
        ns = [2**power for power in range(self.samples.bit_length())]
        curves = {}
        for name in self.reward_models:
            curves[f"best of n, {name}"] = [
                {"n": p.n, "kl": p.kl, **p.proxy.figures("proxy"), **p.gold.figures("gold")}
                for p in frontier(rated_by(context, policy, name, groups), ns=ns)
            ]
        return curves


def training_curve(context: Context, stage: str) -> Curve:
    """Step, proxy, gold and KL with their intervals, for the steps that an rl stage has made; empty if it did not measure them."""
    names = [(what, end) for what in FIGURES for end in ("", "_low", "_high")]
    return [
        {"step": row.step, **{f"{a}{end}": row.figures[f"{a}/test{end}"] for a, end in names}}
        for row in Run(context.directory).metrics(stage)
        if "gold/test" in row.figures
    ]


def verdict(curve: Sequence[Mapping[str, float]]) -> dict[str, JSON]:
    """The point of the best gold reward, the last point, and how far the gold reward has fallen between them: errors = (best -
    last) / sqrt(e_best^2 + e_last^2), e = half of a 95% interval / 1.96.

    >>> point = {"kl": 1.0, "proxy": 0.0, "gold": 0.5, "gold_low": 0.402, "gold_high": 0.598}
    >>> later = {"kl": 9.0, "proxy": 4.0, "gold": 0.2, "gold_low": 0.102, "gold_high": 0.298}
    >>> found = verdict([point, later])
    >>> found["best"]["kl"], round(found["errors"], 3), found["turned_down"]
    (1.0, 4.243, True)
    """
    best, last = max(curve, key=lambda p: p["gold"]), curve[-1]
    error = math.hypot(*((p["gold_high"] - p["gold_low"]) / 3.92 for p in (best, last)))
    fall = best["gold"] - last["gold"]
    errors = fall / error if error else math.copysign(1e6, fall) if fall else 0.0
    down = errors > FALLEN and last["proxy"] > best["proxy"]
    return {"best": dict(best), "last": dict(last), "errors": errors, "turned_down": down}


def said(name: str, found: Mapping[str, JSON]) -> str:
    best, last = found["best"], found["last"]
    line = f"{name}: gold {found['points'][0]['gold']:.3f}, best {best['gold']:.3f} at a KL of {best['kl']:.1f}"
    if not found["turned_down"]:
        return f"{line}, {last['gold']:.3f} at the end ({last['kl']:.1f})"
    proxies = f"the proxy rose from {best['proxy']:.2f} to {last['proxy']:.2f}"
    return f"{line}, then down to {last['gold']:.3f} ({last['kl']:.1f}) while {proxies}: over-optimised"


def draw(curves: Mapping[str, Curve], path: Path) -> None:
    """Draw gold and proxy with their 95% intervals against the square root of the KL, in which both have the simplest form (Gao et
    al. 2022)."""

    def paint(axes: Axes, what: str) -> None:
        for number, (name, curve) in enumerate(curves.items()):
            root = [math.sqrt(max(0.0, p["kl"])) for p in curve]
            bounds = [[p[f"{what}{end}"] for p in curve] for end in ("", "_low", "_high")]
            draw_band(axes, root, bounds, number, name, "--" if "n" in curve[0] else "-")
        axes.set_xlabel("square root of KL from the start, nats a response")

    titles = {"gold": "the score of the task", "proxy": "the reward model of that curve"}
    panels = [Panel(w.capitalize(), text, partial(paint, what=w)) for w, text in titles.items()]
    save_panels(panels, "Over-optimisation", path)
