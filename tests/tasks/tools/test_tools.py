"""Tools: the schema of a function, calls in every format, and what comes back of what a model or a tool does wrong."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from posttrain import config_tree
from posttrain.data.calls import Call, calls, format_of
from posttrain.errors import UserError
from posttrain.rewards.sandbox import pool
from posttrain.tasks.tools import python as python_tool
from posttrain.tasks.tools.answer import Answer
from posttrain.tasks.tools.base import Malformed, Signature, Tool, ToolFailure
from posttrain.tasks.tools.calculator import Calculator
from posttrain.tasks.tools.function import Function, give
from posttrain.tasks.tools.python import Python
from posttrain.tasks.tools.search import Search
from posttrain.tasks.tools.toolbox import Toolbox
from posttrain.types import Message


def weather(
    city: str, unit: Literal["celsius", "kelvin"] = "celsius", days: int | None = None, at: list[float] | None = None
) -> str:
    """The weather of a city.

    Args:
        city: its name
        days (int, optional): how far ahead

    Returns:
        a sentence
    """
    return f"{city} in {unit}"


def test_a_function_is_a_json_schema() -> None:
    assert Signature.of(weather).schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name"},
                    "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
                    "days": {"type": "integer", "description": "how far ahead"},
                    "at": {"type": "array", "items": {"type": "number"}},
                },
                "required": ["city"],
            },
        },
    }


def test_the_schema_is_that_of_transformers() -> None:
    from transformers.utils import get_json_schema

    def add(a: int, b: float = 0.5) -> float:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    assert Signature.of(add).schema["function"] == {k: v for k, v in get_json_schema(add)["function"].items() if k != "return"}


def untyped(x) -> str:  # type: ignore[no-untyped-def]
    """Untyped."""
    return str(x)


def silent(x: int) -> int:
    return x


def strange(x: Path) -> str:
    """Strange."""
    return str(x)


def several(*x: int) -> str:
    """Several."""
    return str(x)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (untyped, "tool untyped: the parameter x needs a type hint"),
        (silent, "tool silent: the model reads its docstring; give it one"),
        (strange, "tool strange: the parameter x is Path; str, int, float, bool, list, dict and Literal"),
        (several, "tool several: *args, **kwargs and positional-only"),
        (3, "a tool is a function (def), not 3"),
        (dict, "a tool is a function (def), not <class 'dict'>"),
        (partial(weather, unit="kelvin"), "a tool is a function (def), not functools.partial"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_in_one_line(function: Any, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        give(function)


@pytest.mark.parametrize(
    ("given", "bound"),
    [
        ({"city": "Ulm", "days": 2}, {"city": "Ulm", "days": 2}),
        ("Ulm", {"city": "Ulm"}),
        ({"city": "Ulm", "at": [1, 2.5]}, {"city": "Ulm", "at": [1, 2.5]}),
        ({}, "weather needs the argument city"),
        ({"city": "Ulm", "town": "x"}, "weather has no argument town"),
        ({"city": 3}, "city of weather must be a string"),
        ({"city": "Ulm", "days": True}, "days of weather must be an integer"),
        ({"city": "Ulm", "unit": "miles"}, "unit of weather must be one of celsius, kelvin"),
        ({"city": "Ulm", "at": ["x"]}, "at of weather must be an array of a number"),
    ],
)
def test_arguments_are_checked(given: Any, bound: Any) -> None:
    if isinstance(bound, dict):
        assert Signature.of(weather).bind(given) == bound
    else:
        with pytest.raises(Malformed, match=bound):
            Signature.of(weather).bind(given)


CALL = json.dumps({"name": "add", "arguments": {"a": 1}})
TEXT = '{"name": "add", "arguments": "{\\"a\\": 1}"}'  # as OpenAI's interface has it
ADD = Call("add", {"a": 1})
WRONG = Call(problem='a call is {"name": "...", "arguments": {...}} in JSON')


@pytest.mark.parametrize(
    ("form", "text", "found"),
    [
        ("hermes", f"so\n<tool_call>\n{CALL}\n</tool_call>", [ADD]),
        ("hermes", f"<tool_call>{CALL}</tool_call><tool_call>{TEXT}</tool_call>", [ADD, ADD]),
        ("hermes", f"<think><tool_call>{CALL}</tool_call></think>42", []),
        ("hermes", f"<think><tool_call>{CALL}</tool_call>", []),
        ("hermes", f"<tool_call>{CALL}", [Call(problem="<tool_call> is not closed with </tool_call>")]),
        ("hermes", "<tool_call>{'name': 1}</tool_call>", [WRONG]),
        ("hermes", "<tool_call>[1]</tool_call>", [WRONG]),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', [WRONG]),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", [WRONG]),
        ("hermes", "the answer is 42", []),
        ("hermes", f"so\n```json\n{CALL}\n```", [ADD]),
        ("hermes", f"```\n{CALL}\n```\nand\n```json\n{TEXT}\n```", [ADD, ADD]),
        ("hermes", f" {CALL}\n", [ADD]),
        ("hermes", '{"name": "add", "arguments": {"a": "1\n2"}}', [Call("add", {"a": "1\n2"})]),
        ("hermes", f"```json\n{CALL[:-1]}\n```", [WRONG]),
        ("hermes", f"```json\n{CALL}", []),
        ("hermes", '```json\n{"name": "Ulm", "arguments": {}}\n```', []),
        ("hermes", '```json\n{"name": "Ulm"}\n```', []),
        ("llama3", '{"name": "add", "parameters": {"a": 1}}', [ADD]),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [ADD]),
        ("llama3", '{"name": "add", "parameters"', [Call(problem='a call is {"name": "...", "parameters": {...}} in JSON')]),
        ("llama3", "it is 42", []),
        ("tag", "so <add>1</add>", [Call("add", "1")]),
        ("tag", '<add>{"a": 1}</add>', [ADD]),
        ("tag", "so <add>1", [Call(problem="<add> is not closed")]),
        ("tag", "so <subtract>1</subtract>", [Call("subtract")]),
        ("tag", "a < b > c", []),
        ("call", "so add((1+2)*3)=", [Call("add", "(1+2)*3")]),
        ("call", "so (1+2)=", [Call(problem="a call is name(argument)=")]),
        ("call", "add(1=", [Call(problem="a call is name(argument)=")]),
        ("call", "1+2=", []),
        ("call", "42", []),
    ],
)  # fmt: skip
def test_calls_are_read_in_the_format_of_the_template(form: Any, text: str, found: list[Call]) -> None:
    assert calls(form, text, ("add",)) == found


@pytest.mark.parametrize("form", ["hermes", "llama3", "tag", "call"])
@pytest.mark.parametrize("text", ["<tool_call>", "(", ")=", "{", "<add>", "</add>", "a", "```json\n", "a```\n", "\n", "```\n "])
def test_a_long_turn_is_read_in_linear_time(form: Any, text: str) -> None:
    began = time.perf_counter()
    calls(form, text * 50_000 + ")=", ("add",))
    assert time.perf_counter() - began < 1.0


def test_the_format_is_taken_from_the_chat_template() -> None:
    qwen = "{{ '<tool_call>' }}"
    llama = "{% if tools %}{'name': function name, 'parameters': ...}{% endif %}<|start_header_id|>ipython"
    assert [format_of(t) for t in (qwen, llama, "{{ messages }}")] == ["hermes", "llama3", "tag"]


class Counting:
    """A conversation that is only counted in."""

    template = ""

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}

    def count(self, name: str, amount: float = 1.0) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + amount


def said(tools: list[Any], *turns: str, form: Any = "tag") -> tuple[list[list[str]], Counting]:
    """What the tools say to each turn of one episode."""
    counting = Counting()

    async def talk() -> list[list[str]]:
        box = Toolbox(tools, counting, form)  # type: ignore[arg-type]
        return [[m.content.removeprefix("<output>\n").removesuffix("\n</output>") for m in await box.answer(t)] for t in turns]

    return asyncio.run(talk()), counting


def test_the_calculator_is_exact() -> None:
    turns = ["<calculator>0.1+0.2</calculator>", "<calculator>2/3</calculator>", "<calculator>1,200*-3</calculator>"]
    found, _ = said([Calculator()], *turns)
    assert found == [["0.3"], ["0.666667"], ["-3600"]]
    found, counting = said([Calculator("calc")], "calc((12+34)*2)=", "calc(1/0)=", "calc(__import__)=", form="call")
    assert found[0] == ["92"] and all(one[0].startswith("error: cannot compute that") for one in found[1:])
    assert counting.counts == {"tool/calls": 3.0, "tool/error": 2.0}


def doubled(number: int) -> int:
    """Twice a number."""
    return 2 * number


def today() -> str:
    """The day."""
    return "Monday"


def shift(days: int = 1) -> str:
    """A later day."""
    return f"in {days}"


def test_a_tool_that_needs_nothing_is_called_with_nothing() -> None:
    found, _ = said([today, shift], "<today></today>", "<shift></shift>", "<shift>2</shift>", "<today>x</today>")
    assert found == [["Monday"], ["in 1"], ["in 2"], ["error: today takes nothing"]]
    assert said([today], "today()=", form="call")[0] == [["Monday"]]


class Slow(Tool):
    """A tool of one's own, which says what it is."""

    ends = True
    seconds = 0.2

    def begin(self) -> Callable[..., Any]:
        return blocks

    def ready(self) -> tuple[str, ...]:
        return ("it is ready",)


@pytest.mark.parametrize("given", [Slow, Slow(), give(Slow), give(Slow())])
def test_a_tool_of_ones_own_keeps_what_it_says_of_itself(given: Any) -> None:
    tool = given if isinstance(given, Tool) else give(given)
    assert (tool.ends, tool.seconds, tool.ready()) == (True, 0.2, ("it is ready",))
    assert Function(give(Slow).function, limit=3.0).seconds == 3.0
    began = time.perf_counter()
    found, _ = said([given], "<blocks>30</blocks>", "<blocks>0.01</blocks>")
    assert found == [["error: no result within 0.2 s"], []], "only a result ends the episode"
    assert time.perf_counter() - began < 5.0, "in its own thread"


def test_a_toolbox_takes_plain_functions() -> None:
    found, _ = said([doubled, Calculator()], "<doubled>21</doubled>", "<calculator>1+1</calculator>")
    assert found == [["42"], ["2"]]


def blocks(text: str) -> str:
    """Take long."""
    time.sleep(float(text))
    return text


async def waits(text: str) -> str:
    """Wait."""
    await asyncio.sleep(float(text))
    return text


def floods(count: int) -> str:
    """Say much."""
    return "x" * count


def breaks(text: str) -> str:
    """Break."""
    raise ValueError(text)


def quits(text: str) -> str:
    """Quit."""
    raise SystemExit(text)


def lost(text: str) -> str:
    """Be out of order."""
    raise ToolFailure("the server is gone")


def structured(text: str) -> dict[str, list[int]]:
    """Give a structure."""
    return {text: [1, 2]}


@pytest.mark.parametrize(
    ("function", "argument", "answer", "counted"),
    [
        (blocks, "30", "error: no result within 0.1 s", "tool/timeout"),
        (waits, "30", "error: no result within 0.1 s", "tool/timeout"),
        (waits, "0.01", "0.01", ""),
        (floods, "1000000", "x" * 2000 + "\n... (998,000 more characters were left out)", "tool/cut"),
        (breaks, "no", "error: ValueError: no", "tool/error"),
        (quits, "no", "error: SystemExit", "tool/error"),
        (structured, "a", '{"a": [1, 2]}', ""),
        (floods, "many", "error: count of floods must be an integer", "tool/malformed"),
    ],
)
def test_what_a_tool_does_wrong_is_a_short_observation(
    function: Callable[..., Any], argument: str, answer: str, counted: str
) -> None:
    tool = Function(give(function).function, limit=0.1 if "0.1 s" in answer else 30.0)
    began = time.perf_counter()
    name = function.__name__
    (found,), counting = said([tool], f"<{name}>{argument}</{name}>")
    assert found == [answer] and time.perf_counter() - began < 2.0
    assert counting.counts == {"tool/calls": 1.0, **({counted: 1.0} if counted else {})}


def test_an_unknown_tool_is_named_with_those_that_there_are() -> None:
    (found,), counting = said([Calculator(), Answer()], "<oracle>x</oracle>")
    assert found == ["error: there is no tool oracle; there are calculator, answer"] and counting.counts["tool/unknown"] == 1


def test_a_turn_with_a_thousand_calls_makes_sixteen() -> None:
    (found,), _ = said([Calculator()], "<calculator>1</calculator>" * 1000)
    assert len(found) == 16 and found[-1] == "1\n(the other 984 calls of this turn were not made)"


def test_a_tool_that_is_out_of_order_is_not_the_models_fault() -> None:
    with pytest.raises(ToolFailure, match="the server is gone"):
        said([give(lost)], "<lost>x</lost>")


def test_the_final_answer_ends_the_episode() -> None:
    found, _ = said([Answer()], "<answer>42</answer>")
    assert found == [[]]


def test_an_interpreter_keeps_its_state_between_calls_and_not_between_episodes() -> None:
    turns = [
        "x = 3\nprint(x)",
        "def f(n):\n    return n * x\nf(4)",
        "1/0",
        "while True: pass",
        "import os\nx + 1",
        "print('a' * 5000)",
    ]
    tagged = [f"<python>{turn}</python>" for turn in turns]
    found, counting = said([Python(wall=1.0)], *tagged)
    assert found[:3] == [["3\n"], ["12\n"], ["ZeroDivisionError: division by zero\n"]]
    assert found[3] == ["error: the program was ended: timeout"] and found[4] == ["4\n"], "the state outlives what was ended"
    assert found[5][0].endswith("(3,001 more characters were left out)")
    assert counting.counts == {"tool/calls": 6.0, "tool/error": 1.0, "tool/cut": 1.0}
    (other,), _ = said([Python()], "<python>x</python>")
    assert other == ["NameError: name 'x' is not defined\n"]


def test_many_episodes_may_call_the_interpreter_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program has open files here: forty at once would need more than there are."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(python_tool, "_at_once", threading.BoundedSemaphore(2))
    monkeypatch.setattr(pool, "_pool", pool.Pool(spare=1))
    boxes = [Toolbox((Python(),), Counting(), "tag") for _ in range(40)]  # type: ignore[arg-type]

    async def every() -> list[Any]:
        return await asyncio.gather(*(box.answer(f"<python>{n} * 2</python>") for n, box in enumerate(boxes)))

    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, limit[1]))
    try:
        found = asyncio.run(every())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert [one[0].content for one in found] == [f"<output>\n{n * 2}\n\n</output>" for n in range(40)]


def test_search_finds_the_passage(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    file = tmp_path / "facts.jsonl"
    facts = {"Ulm": "has the tallest church of the world", "Bern": "is the capital of Switzerland", "Rome": "has seven hills"}
    file.write_text("".join(json.dumps({"title": k, "text": f"{k} {v}"}) + "\n" for k, v in facts.items()))
    (found, none), counting = said([Search(str(file), results=1)], "<search>tallest church</search>", "<search>zebra</search>")
    assert found == ["Ulm\nUlm has the tallest church of the world"]
    assert none == ["error: nothing was found; use other words"] and counting.counts["tool/error"] == 1
    with pytest.raises(UserError, match="search: there is no file"):
        Search(str(tmp_path / "none.jsonl")).ready()


def test_settings_name_tools_by_name_by_file_and_with_options(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        'from posttrain.tasks.tools.base import Tool\n\ndef double(x: int) -> int:\n    """Double."""\n    return 2 * x\n\n'
        "class Counter(Tool):\n    def begin(self):\n        seen = []\n        def counter(x: str) -> int:\n"
        '            """Count calls."""\n            seen.append(x)\n            return len(seen)\n        return counter\n'
    )
    place = tmp_path / "mine.py"
    tree = {"name": "tool_use", "task": "arithmetic", "tools": ["calculator", f"{place}:double", {"name": "python", "wall": 2}]}
    from posttrain.tasks.base import Task

    task = config_tree.from_tree(tree, Task, "task")
    assert task.tools == (Calculator(), Function(f"{place}:double"), Python(wall=2))
    assert config_tree.from_tree(config_tree.to_tree(task), Task, "task") == task
    (found, again), _ = said([Function(f"{place}:Counter")], "<counter>a</counter>", "<counter>a</counter>")
    assert (found, again) == (["1"], ["2"])
    with pytest.raises(UserError, match="unknown tool 'calculater'; did you mean 'calculator'"):
        config_tree.from_tree({**tree, "tools": ["calculater"]}, Task, "task")
    with pytest.raises(UserError, match="tool_use: give at least one tool"):
        config_tree.from_tree({**tree, "tools": []}, Task, "task")


def test_the_prompt_explains_tools_where_the_template_does_not() -> None:
    box = Toolbox([Calculator()], Counting(), "tag")  # type: ignore[arg-type]
    (message,) = box.prompt([Message("user", "12+34?")])
    assert "<calculator>...</calculator>" in message.content and message.content.endswith("\n\n12+34?")
    assert "- calculator(expression: string): Compute the value" in message.content and box.schemas is None
    shown = Toolbox([Calculator()], Counting(), "hermes")  # type: ignore[arg-type]
    assert shown.prompt([Message("user", "q")]) == [Message("user", "q")] and shown.schemas is not None
