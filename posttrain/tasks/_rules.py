"""A task's score as a judge in this process: a judge with known preferences, errors and position bias."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from posttrain.rewards._asking import Form, Messages, Reply, Unanswered, Usage
from posttrain.tasks._procedural import stable_hash
from posttrain.tasks.base import Task
from posttrain.types import Problem

# the form of a block in rewards/judge.py: a name, and a text between markers
BLOCK = re.compile(
    r"^([A-Z]+(?: \d+)?):\n<([0-9a-f]{16})>\n(.*?)\n</\2>$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class RuleJudge:
    """Gets the same requests as any judge, reads question and answers from them, and scores them by `rules`. The verdict on a
    pair follows from the difference of the two scores, plus Gumbel `noise` of each text, the same in both orders, plus
    `position_bias` in favour of the text that is shown first."""

    rules: Task
    noise: float = 0.0
    position_bias: float = 0.0
    usage: Usage = field(default_factory=Usage)

    def ask(self, conversations: Sequence[Messages], form: Form) -> list[Reply]:
        self.usage.requests += len(conversations)
        return [self.reply(str(messages[-1]["content"]), form) for messages in conversations]

    def reply(self, content: str, form: Form) -> Reply:
        shown = {name: text for name, _, text in BLOCK.findall(content)}
        question = shown.pop("QUESTION", "")
        values = [self.rules.score(Problem("", question), text).value for text in shown.values()]
        known = [value for value in values if value is not None]
        if len(known) < len(values) or not known:
            return Unanswered("the rules give no score")
        if form.field == "verdict":
            texts = zip(known, shown.values(), strict=True)
            first, second = (value + self.noise * _gumbel(question, text) for value, text in texts)
            ahead = first - second + self.position_bias
            return json.dumps({"verdict": "tie" if ahead == 0 else "A" if ahead > 0 else "B"})
        low, high = min(form.options), max(form.options)
        points = [low + round((high - low) * min(1.0, max(0.0, value))) for value in known]
        return json.dumps({form.field: points if form.count else points[0]})


def _gumbel(question: str, text: str) -> float:
    uniform = (stable_hash("judge", question, text) % (1 << 53) + 0.5) / (1 << 53)
    return -math.log(-math.log(uniform))
