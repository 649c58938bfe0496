"""How a user's reward function is called, and what is made of what it returns."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.errors import UserError
from posttrain.rewards._functions import Function, Mix, fingerprint, finished, give, given
from posttrain.types import Problem, Score

PROBLEM = Problem("p1", "ask", "gold", facts={"columns": {"prompt": "ask", "answer": ["gold"], "style": "x"}})
CHAT = Problem("p2", "ask", facts={"messages": [{"role": "user", "content": "ask"}]})


def called(function: Any, problem: Problem = PROBLEM, response: str = "said") -> Score:
    [score] = finished(Mix((Function.of(function),), (1.0,)).scores([problem], [response]))
    assert isinstance(score, Score)
    return score


def test_a_function_gets_the_parameters_that_it_declares() -> None:
    seen: list[Any] = []

    def keep(*values: Any) -> float:
        seen.append(values)
        return 0.0

    def columns(response: str, **rest: Any) -> float:
        return keep(response, rest)

    called(lambda prompt, response, answer: keep(prompt, response, answer))
    called(lambda response, style, other=3: keep(response, style, other))
    called(lambda completion: keep(completion))
    called(lambda p, r: keep(p, r))
    called(lambda question, response, truth: keep(question, response, truth))
    called(lambda text: keep(text))
    called(lambda solution_str, ground_truth, **rest: keep(solution_str, ground_truth))
    called(partial(lambda response, k: keep(response, k), k=2))
    called(columns)
    assert seen == [
        ("ask", "said", ["gold"]), ("said", "x", 3), ("said",), ("ask", "said"), ("ask", "said", ["gold"]), ("said",),
        ("said", ["gold"]), ("said", 2),
        ("said", {"prompt": "ask", "answer": ["gold"], "style": "x"}),
    ]  # fmt: skip
    assert called(len).value == 4.0


def test_lists_are_those_of_trl_and_conversations_stay_such() -> None:
    def batch(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        assert prompts == ["ask", [{"role": "user", "content": "ask"}]]
        assert completions == ["a", [{"role": "assistant", "content": "b"}]]
        assert columns == {"answer": [["gold"], None], "style": ["x", None]}
        return [1, True]

    mix = Mix((Function.of(batch),), (1.0,))
    assert [score.value for score in mix.scores([PROBLEM, CHAT], ["a", "b"])] == [1.0, 1.0]


def test_without_an_answer_a_function_gets_none_in_which_no_text_is() -> None:
    """An empty text is in every response, so that `answer in response` would pay all of them."""
    empty = Problem("p3", "ask", facts={"columns": {"prompt": "ask", "answer": ""}})
    for problem in (empty, CHAT):
        assert not called(lambda response, answer: float(answer in response), problem).valid
        assert called(lambda response, answer: float(response == answer), problem).value == 0.0


def test_other_callables_are_called_by_their_own_parameters() -> None:
    class Own:
        def forward(self, x: str) -> str:
            return x

        def __call__(self, prompt: str, response: str) -> float:
            return float(response == self.forward("yes"))

    assert [score.value for score in Function.of(Own()).scores([Problem("a", "?")] * 2, ["yes", "no"])] == [1.0, 0.0]

    def tolerant(response: str, input_ids: Any = None) -> float:
        return 1.0

    Function.of(tolerant).check(())


def test_a_torch_module_gets_the_parameters_of_its_forward() -> None:
    class Scorer(torch.nn.Module):
        @torch.no_grad()
        def forward(self, prompts: list[str], completions: list[str], **columns: Any) -> torch.Tensor:
            return torch.tensor([float(len(p) + len(c)) for p, c in zip(prompts, completions, strict=True)])

    assert called(Scorer()).value == 7.0
    assert Function.of(Scorer()).batched and str(Function.of(Scorer())).startswith("Scorer (test_functions.py line ")


def test_a_model_of_transformers_is_refused_before_anything_is_sampled() -> None:
    class Classifier(torch.nn.Module):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, **more: Any) -> None: ...

    with pytest.raises(UserError, match=r"reward Classifier .* takes token ids, .* save it and give reward_models=\[FOLDER\]"):
        Function.of(Classifier()).check(())


def test_what_a_function_changes_in_a_row_no_other_call_sees() -> None:
    """Neither another sample of the group nor the next epoch, nor the prompt that is rendered then."""
    asked, row = [{"role": "user", "content": "ask"}], {"answer": ["gold"], "tests": [1, 2], "more": {"a": [1]}}
    problem = Problem("p", "ask", facts={"messages": asked, "columns": row})

    def single(response: str, tests: list[int], more: dict[str, list[int]]) -> float:
        more["a"].append(2)
        return tests.pop() + len(more["a"])

    def listed(prompts: Any, completions: Any, tests: Any, answer: Any) -> list[float]:
        for prompt, own, gold in zip(prompts, tests, answer, strict=True):
            prompt[0]["content"] += "!"
            own.append(3)
            gold.clear()
        return [len(own) + len(prompt[0]["content"]) for own, prompt in zip(tests, prompts, strict=True)]

    for function, value in ((single, 4.0), (listed, 7.0), (lambda p, r, answer: len(answer.pop()), 4.0)):
        mix = Mix((Function.of(function),), (1.0,))
        for _ in range(2):
            assert [score.value for score in mix.scores([problem] * 3, ["a", "b", "c"])] == [value] * 3
    assert asked == [{"role": "user", "content": "ask"}] and row == {"answer": ["gold"], "tests": [1, 2], "more": {"a": [1]}}


@pytest.mark.parametrize(
    ("returned", "value"), [(True, 1.0), (2, 2.0), (Score(0.5, parts={"a": 1.0}), 0.5), (None, None), (float("nan"), None)]
)
def test_what_a_function_may_return(returned: Any, value: float | None) -> None:
    assert called(lambda response: returned).value == value

    async def later(response: str) -> Any:
        await asyncio.sleep(0)
        return returned

    assert called(later).value == value


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError


def mute(response: str) -> float:
    raise Mute


def test_failures_have_names_and_wrong_types_end_the_run() -> None:
    assert called(lambda response: None).failure == "not scored: lambda returned None"
    assert "nan" in str(called(lambda response: float("nan")).failure)
    failure = str(called(lambda response: 1 / 0).failure)
    assert failure.startswith("ZeroDivisionError: division by zero at ") and "test_functions.py line" in failure
    assert str(called(mute).failure).startswith("Mute:  at ")
    inside = str(called(lambda response: json.loads(response)).failure)  # the line that called the library
    assert inside.startswith("JSONDecodeError: ") and "test_functions.py line" in inside
    with pytest.raises(
        UserError, match=r"reward lambda \(test_functions.py line \d+\) returned str 'good' for the row p1; return"
    ):
        called(lambda response: "good")


def test_several_are_summed_with_weights_and_one_without_a_score_has_no_part() -> None:
    functions = Function.of(lambda r: 1.0, "a"), Function.of(lambda r: None if "no" in r else 2.0, "b")
    mix = Mix(functions, (1.0, 0.5))
    both, one = mix.scores([PROBLEM, PROBLEM], ["yes", "no"])
    assert (both.value, dict(both.parts)) == (2.0, {"a": 1.0, "b": 2.0}) and (one.value, dict(one.parts)) == (1.0, {"a": 1.0})
    broken = Mix((functions[0], Function.of(lambda r: 1 / 0, "c")), (1.0, 1.0)).scores([PROBLEM], ["x"])[0]
    assert str(broken.failure).startswith("c: ZeroDivisionError")


def test_parameters_without_a_name_get_their_texts() -> None:
    def last(response: str, /, prompt: str) -> float:
        return float(response == "said" and prompt == PROBLEM.question)

    def alone(prompt: str, response: str, /) -> float:
        return float(response == "said" and prompt == "bound")

    assert Function.of(last).scores([PROBLEM], ["said"])[0].value == 1
    assert Function.of(partial(alone, "bound")).scores([PROBLEM], ["said"])[0].value == 1
    for blind in (lambda: 1.0, lambda *texts: 1.0):
        with pytest.raises(UserError, match="has no parameter for the response; name one"):
            Function.of(blind).check([])


@pytest.mark.parametrize("function", [lambda prompt, missing: 0, lambda prompts, missing: [], lambda a, b, c, d: 0])
def test_parameters_that_nothing_fills_are_refused(function: Any) -> None:
    with pytest.raises(UserError, match=r"asks for .*, which is neither .* nor a column of the data \(style\)"):
        Function.of(function).check(["style"])


@pytest.mark.parametrize(
    "function",
    [lambda response, answer: 0, lambda p, r, a: 0, lambda solution_str, ground_truth: 0, lambda completions, answer: []],
)
def test_an_answer_that_no_row_has_is_refused_and_never_an_empty_text(function: Any) -> None:
    with pytest.raises(UserError, match=r"asks for (answer|a|ground_truth), but no row has an answer: answer=NAME .* \(gold\)"):
        Function.of(function).check(["gold"], answered=False)
    Function.of(function).check(["gold"], answered=True)
    Function.of(lambda response, answer="": 0).check(["gold"], answered=False)
    Function.of(lambda solution_str, ground_truth: 0).check(["ground_truth"], answered=False)


def test_parameters_that_are_filled_by_their_order_are_named() -> None:
    said = Function.of(lambda pred, gold: 0).said(["prompt"])
    assert said.endswith("is called with pred = the prompt, gold = the response")
    for function in (lambda pred: 0, lambda response, answer: 0, lambda completions, **rest: []):
        assert Function.of(function).said(["prompt"]) == ""


def test_functions_of_one_name_are_told_apart_and_one_defined_again_is_the_same() -> None:
    def made(k: float) -> Any:
        def constant(response: str) -> float:
            return k

        return constant

    names = [give(Mix((Function.of(made(k)),), (1.0,))) for k in (1.0, 2.0, 1.0)]
    assert names[0] == names[2] != names[1] and names[1] == f"{names[0]} #2"
    assert [given(name).scores([PROBLEM], [""])[0].value for name in names] == [1.0, 2.0, 1.0]
    with pytest.raises(UserError, match="the reward nobody is a function of another Python process"):
        given("python:nobody")


SAMPLE = """
def rated(words=("a", "b"), k=1.0):
    def inner(response):
        return k * sum(word in {"x", "y", "zz"} for word in response.split()) + len(words)
    return inner
"""


def test_a_fingerprint_is_of_what_a_function_does_in_every_process(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"

    def found(source: str, **made_with: Any) -> Any:
        file.write_text(source)
        return fingerprint(runpy.run_path(str(file))["rated"](**made_with))

    assert found(SAMPLE.replace("word in {", "word not in {")) != (same := found(SAMPLE)) != found(SAMPLE.replace("zz", "z"))
    assert same != found(SAMPLE, k=2.0) and same != found(SAMPLE, words=())
    assert same == found("# a line more\n\n" + SAMPLE) == json.loads(json.dumps(same))
    bound = SAMPLE.replace("inner(response)", "inner(response, *, k=k)")
    assert found(bound) == found(bound, k=1.0) != found(bound, k=2.0), "defaults of keywords"
    state: list[str] = []
    counted = SAMPLE.replace("words=(", "state=[], words=(").replace("return k", "state.append(response); return k")
    assert found(counted) == found(counted, state=["x"]) != same, "what it has seen is not what it does"
    assert fingerprint(state.append) == fingerprint(["x"].append)
    one = {"reward": lambda r: 1.0, "steps": 3}
    two = {"reward": lambda r: 2.0, "steps": 3}
    more = {"reward": lambda r: 1.0, "steps": 4}
    assert fingerprint(one["reward"]) == fingerprint(more["reward"]) != fingerprint(two["reward"])
    assert fingerprint(len) != fingerprint(partial(round, ndigits=1)) != fingerprint(partial(round, ndigits=2))
    file.write_text(SAMPLE)
    program = "import json, runpy, sys; from posttrain.rewards._functions import fingerprint;"
    program += "print(json.dumps(fingerprint(runpy.run_path(sys.argv[1])['rated']())))"
    for seed in ("1", "2"):
        asked = [sys.executable, "-c", program, str(file)]
        said = subprocess.run(asked, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
        assert json.loads(said.stdout) == same
