"""Tasks with tools: episodes in the formats of chat templates, from settings and from Python, and the pages that show them."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from sampler_for_tests import ScriptedSampler, completion

from posttrain import catalogue, cli, config_tree
from posttrain.data.text import Decoder
from posttrain.episodes import rollout_groups
from posttrain.errors import UserError
from posttrain.models.tiny import character_tokenizer
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Task
from posttrain.tasks.tool_use import ToolUse
from posttrain.tasks.tools.answer import Answer
from posttrain.tasks.tools.calculator import Calculator
from posttrain.tasks.tools.function import Function, give
from posttrain.types import Problem, Rollout, Sampling, Score

DOCS = Path(__file__).parents[2] / "docs"
PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"


def episode(task: ToolUse, turns: list[str], tokenizer: Any = None, sampling: int = 99) -> tuple[Rollout, ScriptedSampler]:
    tokenizer = tokenizer or character_tokenizer(PRINTABLE)
    end = tokenizer.eos_token_id
    sampler = ScriptedSampler(lambda r: completion([*tokenizer(turns[r.turn], add_special_tokens=False)["input_ids"], end]))
    problem = Problem("p", "12+34=", "46", facts={"operands": [12, 34]})
    (group,) = rollout_groups(task, sampler, Decoder(tokenizer), [problem], 1, Sampling(sampling), 0)
    return group.rollouts[0], sampler


class Sum(Arithmetic):
    def score(self, problem: Problem, response: str) -> Score:
        right = response.strip() == problem.answer
        return Score(float(right), outcome="correct" if right else "wrong")


def test_a_tiny_model_calls_and_reads_the_result() -> None:
    task = ToolUse(Sum(), (Calculator("calc"),), format="call")
    rollout, sampler = episode(task, ["calc(12+34)=", "46"])
    assert rollout.score == Score(1.0, outcome="correct") and rollout.turns == 2 and rollout.counts == {"tool/calls": 1.0}
    tokenizer = character_tokenizer(PRINTABLE)
    assert tokenizer.decode(sampler.requests[1].ids) == "<|user|>46<|end|><|assistant|>"
    assert rollout.response == "calc(12+34)=46" and rollout.answer == "46"


HERMES = (
    "{% if tools %}<|system|>\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools> <tool_call><|end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|user|>\n<tool_response>\n{{ m.content }}\n</tool_response><|end|>\n"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def hermes() -> Any:
    tokenizer = character_tokenizer(PRINTABLE)
    tokenizer.chat_template = HERMES
    return tokenizer


def test_a_model_whose_template_shows_tools_is_shown_their_schemas() -> None:
    call = json.dumps({"name": "calculator", "arguments": {"expression": "12+34"}})
    task = ToolUse(Sum(), (Calculator(), Answer()))
    turns = [f"<tool_call>\n{call}\n</tool_call>", '<tool_call>{"name": "answer", "arguments": {"text": "46"}}</tool_call>']
    rollout, sampler = episode(task, turns, hermes())
    first, second = (hermes().decode(r.ids) for r in sampler.requests)
    assert '"name": "calculator"' in first and "<tools>" in first
    assert second == "\n<|user|>\n<tool_response>\n46\n</tool_response><|end|>\n<|assistant|>\n", (
        "with the line break that ends a turn"
    )
    assert rollout.answer == "46" and rollout.score.value == 1.0 and rollout.counts == {"tool/calls": 2.0}


def test_an_endless_caller_meets_the_limit_of_turns() -> None:
    rollout, _ = episode(ToolUse(Sum(), (Calculator("calc"),), format="call", max_turns=3), ["calc(1)="] * 9)
    assert rollout.score == Score(0.0, outcome="turn limit") and rollout.turns == 3


def test_a_task_with_episodes_of_its_own_is_refused() -> None:
    with pytest.raises(UserError, match="the task has episodes of its own"):
        ToolUse(ToolUse(Sum(), (Calculator(),)), (Calculator(),))


def test_two_tools_of_one_name_are_refused_before_the_first_stage() -> None:
    def calculator(text: str) -> str:
        """Compute."""
        return text

    with pytest.raises(UserError, match="tools need other names than calculator, calculator"):
        ToolUse(Sum(), (Calculator(), give(calculator))).ready()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_the_page_gives_a_model_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    function, program, notes, loop = blocks("tools.md", "python")
    (tmp_path / "mine.py").write_text(function + notes + loop)
    (tmp_path / "program.py").write_text(program)
    run = runpy.run_path("program.py")["run"]
    assert len(run.metrics) == 2 and run.metrics[-1]["failed"] == 0
    task = config_tree.from_tree(
        yaml.safe_load(blocks("tools.md", "yaml")[0].replace("gsm8k", "arithmetic"))["task"], Task, "task"
    )
    assert [type(tool).__name__ for tool in task.tools] == ["Calculator", "Python", "Function"] and task.max_turns == 6
    task = ToolUse(Sum(), (Function("mine.py:population"), Function("mine.py:Notes")))
    rollout, _ = episode(
        task, ["<population>Ulm</population>", "<note>a</note>", "<note>b</note>", "<population>Rome</population>", "46"]
    )
    given = [s.text for s in rollout.segments if not s.sampled]
    assert [re.findall("<output>\n(.*)\n</output>", g, re.DOTALL) for g in given[1:]] == [
        ["129000"],
        ["a"],
        ["a\nb"],
        ["error: KeyError: 'Rome'"],
    ]


def test_the_page_writes_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, program = blocks("environments.md", "python")
    lines = [line for line in file.splitlines() if line.strip() and not line.strip().startswith(("#", "from"))]
    assert len(lines) <= 30
    (tmp_path / "guess.py").write_text(file)
    (tmp_path / "my.yaml").write_text(blocks("environments.md", "yaml")[0])
    assert cli.main(["run", "my.yaml", "--allow-code", "rl.steps=1", "rl.prompts=2", "threads=1"]) == 0
    (stage,) = yaml.safe_load((tmp_path / "my.yaml").read_text())["stages"]
    task = catalogue.load("task", stage["task"], Task)()
    tokenizer = character_tokenizer(task.alphabet)
    end = tokenizer.eos_token_id
    for turns, score in [
        (["50", "25", "37"], Score(1.0)),
        (["50", "x"], Score(0.0, outcome="no number")),
        (["9"] * 9, Score(0.0, outcome="turn limit")),
    ]:
        sampler = ScriptedSampler(lambda r, turns=turns: completion([*tokenizer(turns[r.turn])["input_ids"], end]))
        (group,) = rollout_groups(task, sampler, Decoder(tokenizer), [Problem("37", "?", "37")], 1, Sampling(4), 0)
        assert group.rollouts[0].score == score
    (tmp_path / "program.py").write_text(program.replace("steps=200", "steps=2, batch=4"))
    figures = runpy.run_path("program.py")["run"].metrics[-1]
    assert figures["turns"] >= 1 and figures["failed"] == 0


def test_tags_of_the_chat_template_must_be_written_to_the_letter() -> None:
    task = ToolUse(Sum(), (Calculator("calc"),))
    assert task.tags("... <tool_call> ...") == ("<tool_call>", "</tool_call>") and task.tags("") == ()
    assert replace(task, format="tag").tags("<tool_call>") == ()


def test_whatever_a_tool_raises_or_returns_the_model_reads_it_at_once() -> None:
    def first(text: str) -> str:
        """The first word that begins with a text."""
        return next(word for word in () if word.startswith(text))

    async def fetch(text: str) -> str:
        """A page."""
        raise asyncio.CancelledError

    async def leave(text: str) -> str:
        """Leave."""
        sys.exit(text)

    def half(text: str) -> str:
        """A file that is no UTF-8."""
        return "a\udce9b"

    said = {"first": "error: StopIteration", "fetch": "error: CancelledError: ", "leave": "error: SystemExit: 1", "half": "a?b"}
    for tool in (first, fetch, leave, half):
        rollout, sampler = episode(ToolUse(Sum(), (give(tool),), format="call"), [f"{tool.__name__}(1)=", "46"])
        assert rollout.score.value == 1.0 and "tool/timeout" not in rollout.counts
        read = character_tokenizer(PRINTABLE).decode(sampler.requests[1].ids)
        assert read == f"<|user|>{said[tool.__name__]}<|end|><|assistant|>"


def test_tools_of_one_name_are_told_apart() -> None:
    def make(number: int) -> Any:
        def tell(text: str) -> str:
            """Tell a number."""
            return str(number)

        return tell

    one, two, again = (give(make(number)) for number in (1, 2, 1))
    assert [tool.begin()("") for tool in (one, two, again)] == ["1", "2", "1"] and one == again != two
