"""Step markers: does a response show its reasoning in steps? Easy to fake, so it belongs in a mix with a small weight."""

from __future__ import annotations

import re

from posttrain.types import Score

MARKER = re.compile(
    r"^\s{0,3}(?:step\s+\d+|\d{1,3}[.)]\s|[-*]\s|(?:first|second|third|next|then|finally|therefore|so)\b[ ,:])",
    re.IGNORECASE | re.MULTILINE,
)
LIMIT = 200_000


def marked(text: str) -> int:
    """Count the lines that begin a step: "Step 2", "3.", a bullet, "First," and the like. A repeated line counts once.

    >>> marked("Step 1: add\\n2. carry\\nso it is 4\\nStep 1: add")
    3
    """
    return len({line.strip().lower() for line in text[:LIMIT].splitlines() if MARKER.match(line)})


def steps(prompt: str, response: str, answer: str, wanted: int = 3) -> Score:
    """The reward: the number of distinct marked steps divided by `wanted`, at most 1."""
    value = min(1.0, marked(response) / max(1, wanted))
    return Score(value, parts={"steps": value})
