"""Runs and rollouts as HTML without scripts, for the studio's report and for notebooks.

All text of a model or a file is escaped, and every piece is bounded in size."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from posttrain.errors import UserError, many
from posttrain.events import printable
from posttrain.runs.index import Index
from posttrain.runs.plot import draw
from posttrain.runs.status import alarms, status, verdict
from posttrain.system.files import read_bytes

MAP_TOKENS = 300  # tokens in one map
CHARACTERS = 400  # characters of a text in a table
LINES = 30  # rows of a list or a table
PICTURE = 1_000_000  # bytes
HEAT = 0.42  # the largest opacity, at which text stays readable
BLUE, ORANGE = "0,114,178", "213,94,0"  # above and below the centre, as in the studio
MAPS = {
    "advantage": "advantage: blue tokens are made more likely by the update, orange ones less",
    "logprob": "log-prob: the darker, the less likely the model found the token",
    "kl": "KL: how far the model is from the reference at each token",
    "value": "value: what the critic expected to be paid from here on",
}
# a notebook would typeset text between dollar signs
PLAIN = "<div class='tex2jax_ignore mathjax_ignore'>{}</div>"
WRAP = "white-space:pre-wrap;overflow-wrap:anywhere;text-align:left;font-family:monospace"


def text(value: object) -> str:
    """Return escaped text, which is displayed and never interpreted."""
    return escape(printable(str(value), lines=True))


def short(value: object) -> str:
    """Return escaped text, cut at a limit."""
    said = str(value)
    return text(said if len(said) <= CHARACTERS else f"{said[:CHARACTERS]} …")


def listing(lines: Iterable[str]) -> str:
    items = [f"<li>{text(line)}</li>" for line in lines]
    return f"<ul>{''.join(items)}</ul>" if items else ""


def table(
    rows: Iterable[Iterable[object]],
    header: Sequence[str] = (),
    cell: Callable[[object], str] = text,
) -> str:
    head = "".join(f"<th style='text-align:left'>{text(name)}</th>" for name in header)
    style = f"style='{WRAP};vertical-align:top'"
    cells = ("".join(f"<td {style}>{cell(value)}</td>" for value in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def picture(path: Path, about: str) -> str:
    """Embed a PNG file in the page; return nothing if it is too large."""
    data = read_bytes(path) if path.stat().st_size <= PICTURE else b""
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return f"<img style='max-width:100%' alt='{text(about)}' src='{source}'>" if data else ""


def curves(index: Index) -> str:
    """Return the plot of a run; nothing if nothing was measured."""
    with tempfile.TemporaryDirectory() as folder, suppress(UserError):
        path = Path(folder) / "plot.png"
        draw(index.run, path)
        return picture(path, "the curves of the run")
    return ""


def warnings(index: Index) -> str:
    """Return the alarms of a run."""
    return listing(str(e.details.get("text", "")) for e in alarms(index.events()))


def run_html(index: Index) -> str:
    """Return a notebook's view of a run: whether it learns, the evidence, its alarms and its curves."""
    found, now = verdict(index), status(index.run, index.events())
    raised = warnings(index)
    parts = [
        f"<b>{short(index.run.name)}</b> ({text(now.kind)}): {short(found.headline)}",
        listing(found.because),
        f"Alarms:{raised}" if raised else "",
        curves(index),
    ]
    return PLAIN.format("".join(parts))


def rollouts_html(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """Return the rollouts of a step as a table."""
    shown = table(map(cells_of, rows[:LINES]), ("prompt", "response", "reward", "advantage"), short)
    more = f"<p>{len(rows) - LINES} more are not shown</p>" if len(rows) > LINES else ""
    return PLAIN.format(f"<p>{text(title)}</p>{shown}{more}")


def cells_of(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return prompt, response, reward (or why there is none) and advantage of a rollout."""
    reward, advantage = row["reward"], row["advantage"]
    paid = f"failed: {row['failure']}" if reward is None else f"{reward:.3g}"
    return row["question"], row["response"], paid, "" if advantage is None else f"{advantage:+.2f}"


def rollout_html(row: Mapping[str, Any], tokens: Mapping[str, Any] | None) -> str:
    """Return one rollout: its rewards, and its tokens coloured by their values, with the first map open."""
    question, response, paid, advantage = cells_of(row)
    parts = "".join(f" · {short(k)} {v:.3g}" for k, v in list(row["parts"].items())[:LINES])
    head = f"<p>reward {short(paid)}{parts} · advantage {advantage or 'none'} · {many(row['length'], 'token')}</p>"
    if tokens is None:
        body = f"<pre style='{WRAP}'>{short(question)}\n<b>{short(response)}</b></pre>"
        return PLAIN.format(f"{head}{body}<p>Figures by token were not kept for this step.</p>")
    names = [name for name in MAPS if name in tokens["figures"]]
    maps = [_map(tokens, name, opened=name == names[0]) for name in names]
    return PLAIN.format(head + "".join(maps))


def _map(tokens: Mapping[str, Any], name: str, opened: bool) -> str:
    figures, sampled = tokens["figures"], tokens["figures"]["sampled"]
    known = zip(figures[name], sampled, strict=True)
    values = [v if on and v is not None else 0.0 for v, on in known]
    largest = max([abs(v) for v in values], default=0.0) or 1.0
    spans = []
    for n, (word, value) in enumerate(zip(tokens["text"][:MAP_TOKENS], values, strict=False)):
        opacity = HEAT * abs(value) / largest
        colour = f"background:rgba({BLUE if value > 0 else ORANGE},{opacity:.2f})"
        style = colour if sampled[n] else "opacity:.6"
        about = f"{name} {figures[name][n]}" if sampled[n] else "given, not sampled"
        visible = text(word[:CHARACTERS]).replace("\n", "↵\n")
        spans.append(f"<span style='{style}' title='{about}'>{visible}</span>")
    left = len(tokens["text"]) - MAP_TOKENS
    more = f"<p>{left} more tokens are not shown</p>" if left > 0 else ""
    low, high = min(values, default=0.0), max(values, default=0.0)
    title = f"{MAPS[name]} ({low:.3g} to {high:.3g})"
    shown = f"<div style='{WRAP};line-height:1.9'>{''.join(spans)}</div>{more}"
    return f"<details{' open' if opened else ''}><summary>{title}</summary>{shown}</details>"
