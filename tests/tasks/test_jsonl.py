"""Problems from files: fields, splits, styles, rewards of the user's own, and what is refused."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from posttrain import config
from posttrain.errors import UserError
from posttrain.system.workers import WorkerPool
from posttrain.tasks import _questions
from posttrain.tasks._procedural import stable_hash
from posttrain.tasks.jsonl import Jsonl

GSM = [
    {"question": f"What is {n} plus {n}?", "answer": f"It is {n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n}"}
    for n in range(40)
]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "gsm.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in GSM))
    return str(path)


def gsm(file: str, **settings: object) -> Jsonl:
    return Jsonl(file, answer_after="####", style="boxed", **settings)  # type: ignore[arg-type]


def test_fields_and_the_gold_answer(file: str) -> None:
    task = gsm(file)
    train, test = task.problems("train"), task.problems("test")
    assert len(train) + len(test) == 40 and 1 <= len(test) <= 12
    assert not {p.question for p in train} & {p.question for p in test}
    first = train[0]
    number = int(first.question.split()[2])
    assert first.answer == str(2 * number) and first.id == f"gsm.jsonl:{number + 1}"
    (message,) = task.prompt(first)
    assert message.role == "user" and message.content.startswith(first.question) and "\\boxed{}" in message.content
    assert task.demonstration(first).endswith(f"\\boxed{{{2 * number}}}")
    assert task.score(first, task.demonstration(first)).outcome == "correct"
    assert task.score(first, "\\boxed{-1}").outcome == "wrong"


def test_styles_systems_and_examples(file: str) -> None:
    task = gsm(file, system="Be brief.", examples=2)
    problem = task.problems("test")[0]
    roles = [m.role for m in task.prompt(problem)]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    train = task.problems("train")
    assert train[0].question not in task.prompt(train[0])[1].content  # a problem is not its own example


def test_conversations_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl.gz"
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi?"}]
    with gzip.open(path, "wt") as out:
        out.write(
            "".join(
                json.dumps({"prompt": [*turns, {"role": "user", "content": f"q{n}"}], "gold": str(n)}) + "\n" for n in range(30)
            )
        )
    task = Jsonl(str(path), question="prompt", answer="gold", reward="answer")
    problem = task.problems("train")[0]
    assert [m.content for m in task.prompt(problem)] == ["s", "hi?", problem.question]
    assert task.score(problem, f"#{problem.answer}").value == 1.0


def test_a_style_that_is_set_goes_into_the_last_turn_of_a_conversation(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    rows = [[{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}] for n in range(30)]
    path.write_text(
        "".join(json.dumps({"question": [*row, {"role": "user", "content": "So?"}], "answer": "1"}) + "\n" for row in rows)
    )
    for style, last in (
        ("", "So?"),
        ("direct", "So?"),
        ("boxed", "So?\n\nThink step by step, then give the final answer in \\boxed{}."),
    ):
        task = Jsonl(str(path), test_file=str(path), style=style)
        contents = [message.content for message in task.prompt(task.problems("train")[0])]
        assert contents == ["q0", "a", last]
    task = Jsonl(str(path), test_file=str(path), examples=2)
    with pytest.raises(UserError, match="is a conversation, before which no examples can be shown"):
        task.prompt(task.problems("train")[0])


@pytest.mark.parametrize(
    ("reward", "options", "boxed"),
    [
        ("math", {}, True),
        ("math", {"marker": "####"}, False),
        ("answer", {}, False),
        ("compose", {"parts": [{"reward": "math"}, {"reward": "steps"}]}, True),
    ],
)
def test_a_box_is_asked_for_where_the_reward_looks_for_one(file: str, reward: str, options: Any, boxed: bool) -> None:
    task = Jsonl(file, reward=reward, options=options)
    assert ("\\boxed" in task.prompt(task.problems("train")[0])[0].content) == boxed
    assert "\\boxed" not in Jsonl(file, style="direct").prompt(task.problems("train")[0])[0].content


@pytest.mark.parametrize(
    ("reward", "options", "asked"),
    [
        ("math", {}, "\\boxed{}"),
        ("math", {"phrase": "final answer:"}, "\\boxed{}"),
        ("math", {"marker": "####"}, "after ####"),
        ("answer", {}, "after #."),
        ("answer", {"marker": "ANSWER:"}, "after ANSWER:"),
    ],
)
@pytest.mark.parametrize("style", ["", "direct"])
def test_a_demonstration_earns_1_and_the_question_asks_for_its_form(
    file: str, reward: str, options: Any, asked: str, style: str
) -> None:
    task = Jsonl(file, answer_after="####", reward=reward, options=options, style=style)
    for problem in task.problems("train")[:5]:
        assert task.score(problem, task.demonstration(problem)).value == 1.0
    assert (asked in task.prompt(problem)[0].content) == (not style)
    assert [("does not ask for" in line) for line in task.ready()] == [True] * bool(style)


def test_data_whose_gold_answers_earn_nothing_is_refused_before_a_run(tmp_path: Path) -> None:
    path = tmp_path / "essays.jsonl"
    rows = [{"question": f"Why {n}?", "answer": "{" * 3 + "because" * n} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="math does not pay the gold answers of the task: that of problem essays.jsonl:"):
        Jsonl(str(path)).ready()
    Jsonl(str(path), reward="answer").ready()


def test_few_shot_prompts_do_not_split_the_file_again(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    monkeypatch.setattr(_questions, "stable_hash", lambda *parts: hashed.append(parts) or stable_hash(*parts))
    task = gsm(file, examples=2)
    problems = task.problems("train")
    for problem in problems:
        task.prompt(problem)
    assert len(hashed) == 40  # once a row, however many prompts there are


def test_calls_in_a_conversation_reach_the_prompt(tmp_path: Path) -> None:
    """A turn that only calls a tool has no content, and must not become the word None."""
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    turns = [{"role": "user", "content": "hi?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "tool", "content": "3"}]  # fmt: skip
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"prompt": turns, "gold": str(n)}) + "\n" for n in range(30)))
    task = Jsonl(str(path), question="prompt", answer="gold", reward="answer", held_out=0.5)
    side = "train" if stable_hash("held out", "3") % 10_000 >= 5_000 else "test"
    asked = task.prompt(task.problems(side)[0])
    assert [m.content for m in asked] == ["hi?", "", "3"] and asked[1].more == {"tool_calls": [call]}


def test_a_test_file_that_repeats_training_questions_is_refused(file: str, tmp_path: Path) -> None:
    other = tmp_path / "test.jsonl"
    other.write_text(json.dumps(GSM[3]) + "\n")
    with pytest.raises(UserError, match=r"1 questions are also in .*gsm\.jsonl"):
        gsm(file, test_file=str(other)).problems("test")
    other.write_text(json.dumps({"question": "What is 99 plus 1?", "answer": "#### 100"}) + "\n")
    assert [p.answer for p in gsm(file, test_file=str(other)).problems("test")] == ["100"]
    assert len(gsm(file, test_file=str(other)).problems("train")) == 40


def test_a_reward_of_the_users_own(file: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import time\n"
        "def short(prompt, response, answer, limit=10):\n    return 1.0 if len(response) <= limit else 0.0\n"
        "async def later(prompt, response, answer):\n    return 0.5\n"
        "def hang(prompt, response, answer):\n    time.sleep(60)\n"
    )
    task = gsm(file, reward=f"{mine}:short", options={"limit": 3})
    assert task.isolated
    problem = task.problems("train")[0]
    assert [task.score(problem, r).value for r in ("abc", "abcd")] == [1.0, 0.0]
    for name, expected in (("later", 0.5), ("hang", None)):
        task = gsm(file, reward=f"{mine}:{name}", score_seconds=0.5)
        with WorkerPool([task], 1) as workers:
            assert asyncio.run(workers.score(task, problem, "x")).value == expected


def test_code_in_a_configuration_needs_leave(file: str, tmp_path: Path) -> None:
    def named(reward: str, allow_code: bool) -> str:
        task = {"name": "jsonl", "file": file, "reward": reward}
        tree = {"stages": [{"stage": "rl", "name": "rl", "model": "tiny:nano", "task": task}]}
        return str(config.from_config(tree, "config.yaml", {}, allow_code).recipe.stages[0].task.reward)  # type: ignore[attr-defined]

    mine = f"{tmp_path}/mine.py:short"
    with pytest.raises(UserError, match="allow-code"):
        named(mine, False)
    assert named(mine, True) == mine and named("math", False) == "math"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("{\n", "line 1: not JSON"),
        ("[1]\n", "line 1: expected a JSON object"),
        ('{"question": "q"}\n', "line 1: no field 'answer'; it has question"),
        ('{"question": "q", "answer": "4"}\n', "line 1: '####' is not in the field 'answer'"),
        ('{"question": " ", "answer": "#### 4"}\n', "line 1: the field 'question' is empty"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=said.replace("[", r"\[")):
        gsm(str(path)).problems("train")


def test_a_missing_file_and_bad_settings() -> None:
    with pytest.raises(UserError, match="there is no data file"):
        Jsonl("nowhere.jsonl").problems("train")
    with pytest.raises(UserError, match="style"):
        Jsonl("x", style="rhyme")
    with pytest.raises(UserError, match="held_out"):
        Jsonl("x", held_out=1.5)


def test_a_reward_file_that_is_missing_or_no_python_is_told_before_a_run(file: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    task = Jsonl(file, reward=f"{path}:good")
    with pytest.raises(UserError, match=r"own.py:good: cannot read .*own.py: No such file"):
        task.ready()
    path.write_text("x = 1\ndef good(problem, response:\n")
    with pytest.raises(UserError, match=r"own.py line 2 is not Python: '\(' was never closed"):
        task.ready()
    path.write_text("raise SystemExit\ndef good(prompt, response): return 1.0\n")
    assert task.ready() == (), "nothing in it is run"


@pytest.mark.parametrize(
    ("reward", "options", "complaint"),
    [
        ("maths", {}, "did you mean 'math'"),
        ("ensemble", {}, "unknown reward"),
        ("compose", {"parts": [{"reward": "maths"}]}, "did you mean 'math'"),
        ("compose", {"parts": []}, "give a list of parts"),
        ("judge", {}, "needs the options url and model"),
        ("judge", {"url": "http://localhost:1", "model": "m", "rubrik": "x"}, "did you mean 'rubric'"),
        ("judge", {"url": "http://localhost:1", "model": "m", "mode": "pairs"}, "mode is one of"),
        ("judge", {"url": "http://localhost:1", "model": "m", "rubric": "nowhere.txt"}, "no rubric file"),
    ],
)
def test_a_reward_that_cannot_be_is_refused_before_the_first_stage(
    file: str, reward: str, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        gsm(file, reward=reward, options=options).ready()


def test_an_answer_that_is_not_there_is_a_failure_and_no_answer_of_that_name(tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_text(
        "".join(f'{{"question": "1+{n}=", "answer": {answer}}}\n' for n, answer in enumerate(("2", "null", "null")))
    )
    task = Jsonl(file=str(file), reward="math", held_out=0)
    scores = [task.score(problem, "\\boxed{7}") for problem in task.problems("train")]
    assert [score.value for score in scores] == [0.0, None, None]
    assert {score.failure for score in scores[1:]} == {"gold answer cannot be read: it is empty"}


def test_an_answer_of_several_values_is_refused_where_one_text_is_compared(tmp_path: Path) -> None:
    file = tmp_path / "lists.jsonl"
    tests = [["add", [1, 2], 3]]
    file.write_text("".join(json.dumps({"question": f"1+{n}=", "answer": tests}) + "\n" for n in range(3)))
    for reward in ("answer", "math"):
        with pytest.raises(UserError, match=f"line 1: the answer is a list, but the reward {reward} compares with one text"):
            Jsonl(str(file), reward=reward, held_out=0).ready()
    parts = {"parts": [{"reward": "answer"}, {"reward": "steps"}]}
    with pytest.raises(UserError, match="a list, but the reward answer compares with one text"):
        Jsonl(str(file), reward="compose", options=parts, held_out=0).problems("train")
    [first, *_] = Jsonl(str(file), reward="code", held_out=0).problems("train")
    assert json.loads(first.answer) == tests  # as the reward `code` reads tests
