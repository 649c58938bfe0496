"""Writes a run as one HTML file: verdict, plot, alarms, scores, settings and some rollouts. All text from a model is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from posttrain.errors import many
from posttrain.runs.html import curves, listing, table, text, warnings
from posttrain.runs.index import Filter, Index
from posttrain.runs.resume_policy import flatten
from posttrain.runs.status import status, verdict

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = Path(__file__).with_suffix(".css").read_text("utf-8")
ROLLOUTS = 6  # of each kind


def render(index: Index) -> str:
    """The whole report."""
    run, found = index.run, verdict(index)
    now, drawn = status(run, index.events()), curves(index)
    parts = [
        f"<h1>{text(run.name)}</h1><p class='dim'>{text(run.config.get('name', ''))}; {text(now.kind)}</p>",
        f"<p class='answer'>{text(found.headline)}</p>",
        listing(found.because),
        f"<h2>Curves</h2>{drawn}" if drawn else "",
        "<h2>Alarms</h2>",
        warnings(index) or "<p>None.</p>",
        "<h2>Rollouts</h2>",
        *_rollouts(index),
        "<h2>Settings</h2>",
        table(flatten(run.config).items()),
    ]
    head = f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{text(run.name)}</title>"
    meta = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>{STYLE}</style></head><body>'
    return f"{head}{meta}{''.join(parts)}</body></html>"


def _rollouts(index: Index) -> Iterable[str]:
    """The rollouts with the highest and the lowest rewards in the last step."""
    stages = [stage for stage in index.stage_names() if index.rollout_steps(stage)]
    if not stages:
        yield "<p>None were kept.</p>"
        return
    stage = stages[-1]
    step = index.rollout_steps(stage)[-1][0]
    here = Filter(stage=stage, step_from=step, step_to=step, failed=False)
    for title, down in (("highest reward", True), ("lowest reward", False)):
        found = index.find(here, "reward", down, ROLLOUTS)
        yield f"<h3>{text(stage)} step {step}: {title}</h3>"
        for one, row in zip(found, index.text(found), strict=True):
            paid = f"reward {one.reward:.3g}, {many(one.length, 'token')}, {one.outcome}"
            said = f"<pre>{text(row.question)}</pre><pre><b>{text(row.response)}</b></pre>"
            yield f"<article><p class='dim'>{text(paid)}</p>{said}</article>"
