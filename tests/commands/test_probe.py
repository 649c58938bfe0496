"""What a reward would pay: shipped tasks and recipes pass, and rewards with a known fault do not, each for its own reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from lexicon_for_tests import WordLexicon

from posttrain import catalogue, cli, config
from posttrain.api.inputs import as_probed
from posttrain.commands.probe import Report, lines, probe, probe_named
from posttrain.commands.probe_answers import KINDS, Case, answers, changed, lookup_program, read_program_tests
from posttrain.errors import UserError
from posttrain.rewards.sandbox import isolation
from posttrain.tasks import sentiment
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Task
from posttrain.tasks.bilingual import Bilingual
from posttrain.tasks.countdown import Countdown
from posttrain.tasks.gsm8k import Gsm8k
from posttrain.tasks.ifeval import IFEval
from posttrain.tasks.jsonl import Jsonl
from posttrain.tasks.math import Math
from posttrain.tasks.mixed import Mixed, Source
from posttrain.tasks.reviews import Reviews
from posttrain.tasks.sentiment import Sentiment
from posttrain.tasks.sums import Sums
from posttrain.types import Problem, Score

PRAISE = dict.fromkeys(("love", "beautiful", "wonderful", "best", "happiest", "great", "perfect", "glad"), 3.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Word problems as gsm8k and math publish them."""
    sums = [(2 + 3 * n, 1 + 7 * n % 30, 2 + n % 7) for n in range(60)]
    for split, part in (("train", sums[:45]), ("test", sums[45:])):
        rows = []
        for a, b, c in part:
            steps = f"One box holds {a}+{b}={a + b} pens.\nSo {c} boxes hold {c}*{a + b}={c * (a + b)} pens."
            question = f"A box holds {a} red and {b} blue pens. How many pens are in {c} boxes?"
            rows.append({"question": question, "answer": f"{steps}\n#### {c * (a + b)}"})
        (tmp_path / f"gsm8k-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        fractions = [
            {
                "problem": f"Compute ${a}/{a + b}$.",
                "solution": f"It is $\\boxed{{\\frac{{{a}}}{{{a + b}}}}}$.",
                "level": "Level 1",
            }
            for a, b, _ in part
        ]
        (tmp_path / f"math-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in fractions))
    return tmp_path


def jsonl(folder: Path, **settings: Any) -> Jsonl:
    return Jsonl(str(folder / "gsm8k-train.jsonl"), answer_after="####", **settings)


MIX = {"parts": [{"reward": "math", "weight": 0.8}, {"reward": "format", "weight": 0.1}, {"reward": "steps", "weight": 0.1}]}
TASKS: dict[str, Callable[[Path], Task]] = {
    "arithmetic": lambda _: Arithmetic(),
    "arithmetic, minus, spelled, steps": lambda _: Arithmetic(operation="-", steps="spelled", steps_weight=0.5),
    "countdown": lambda _: Countdown(),
    "sums": lambda _: Sums(),
    "bilingual": lambda _: Bilingual(),
    "bilingual in words": lambda _: Bilingual(wording="words"),
    "reviews": lambda _: Reviews(),
    "strict reviews": lambda _: Reviews(strict=True),
    "sentiment": lambda _: Sentiment(),
    "strict sentiment": lambda _: Sentiment(strict=True),
    "gsm8k": lambda folder: Gsm8k(data=str(folder)),
    "gsm8k, thinking": lambda folder: Gsm8k(data=str(folder), style="thinking"),
    "gsm8k, direct, format": lambda folder: Gsm8k(data=str(folder), style="direct", format_weight=0.1),
    "math": lambda folder: Math(data=str(folder)),
    "jsonl": lambda folder: jsonl(folder),
    "jsonl, marker": lambda folder: jsonl(folder, options={"marker": "####"}),
    "jsonl, phrase": lambda folder: jsonl(folder, options={"phrase": "final answer:"}),
    "jsonl, answer": lambda folder: jsonl(folder, reward="answer"),
    "jsonl, steps": lambda folder: jsonl(folder, reward="arithmetic_steps"),
    "jsonl, textbook mix": lambda folder: jsonl(folder, reward="compose", options=MIX),
    "mixed": lambda _: Mixed((Source(name="a", task=Arithmetic()), Source(name="b", task=Countdown()))),
}


@pytest.mark.parametrize("name", TASKS)
def test_nothing_pays_that_should_not_in_a_shipped_task(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentiment, "lexicon", lambda: WordLexicon(PRAISE))
    report = probe(None, TASKS[name](folder), problems=16)
    assert report.passed, "\n".join(lines(report))
    assert not report.failures and report.spread > 0


@pytest.mark.parametrize("name", catalogue.names("recipe"))
def test_nothing_pays_that_should_not_in_a_shipped_recipe(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentiment, "lexicon", lambda: WordLexicon(PRAISE))
    keys = [f"data={folder}"] if name in ("gsm8k", "math") else []
    stages = config.parse(name, keys).recipe.stages
    tasks = {repr(task): task for stage in stages if isinstance(task := getattr(stage, "task", None), Task)}
    for task in tasks.values():
        report = probe(None, task, problems=8)
        assert report.passed, "\n".join(lines(report))


def verdicts(report: Report) -> dict[str, str]:
    return {row.kind: row.verdict for row in report.rows}


def contains(prompt: str, response: str, answer: str) -> float:
    return float(answer in response)


def test_a_reward_that_looks_for_the_answer_anywhere_pays_what_only_contains_it() -> None:
    found = verdicts(probe(as_probed(contains, None), Arithmetic(), problems=8))
    pays = {"every candidate at once", "right or wrong", "right, then wrong", "ten times the number", "sign flipped"}
    assert {kind for kind, verdict in found.items() if verdict == "pays"} == pays
    assert found["gold answer"] == found["empty"] == found["keywords"] == "ok"


@pytest.mark.parametrize(
    ("reward", "verdict", "kinds"),
    [
        (lambda p, r, a: min(1.0, len(r) / 10), "pays", {"filler, 4 times the length", "phrase repeated", "number off by one"}),
        (lambda p, r, a: len(r) / 100, "pays more", {"gold padded to 2 times", "gold padded to 4 times"}),
        (lambda p, r, a: float("10/10" in r or r.endswith(f"#{a}")), "pays", {"injection", "wrong with an injection"}),
        (lambda p, r, a: float(not r.strip() or r.endswith(f"#{a}")), "pays", {"empty", "whitespace"}),
        (lambda p, r, a: float(p in r or r.endswith(f"#{a}")), "pays", {"question copied"}),
        (lambda p, r, a: float("#" in r), "pays", {"format without content", "another problem's gold"}),
        (lambda p, r, a: float(r.split()[0].endswith(a)), "fails", {"empty", "whitespace"}),
        (lambda p, r, a: float(r.endswith("?")), "not paid", {"gold answer"}),
    ],
)
def test_a_fault_is_named_by_the_kind_of_answer_that_shows_it(reward: Any, verdict: str, kinds: set[str]) -> None:
    report = probe(as_probed(reward, None), Arithmetic(), problems=8)
    found = verdicts(report)
    assert not report.passed and {kind for kind in kinds if found[kind] == verdict} == kinds
    assert all(any(line.startswith(f"{kind}: ") for line in report.findings) for kind in kinds)
    shown = {example.kind for example in report.examples}
    assert verdict != "pays" or (shown and all(found[kind] == "pays" for kind in shown))


def test_a_reward_that_never_differs_teaches_nothing() -> None:
    report = probe(as_probed(lambda prompt, response, answer: 1.0, None), Arithmetic(), problems=4)
    assert not report.passed and report.without_spread == 1.0 and report.spread == 0.0
    assert any("nothing can be learned" in line for line in report.findings)


def test_failures_are_counted_by_name_and_an_unreadable_gold_answer_is_the_datas() -> None:
    def reward(prompt: str, response: str, answer: str) -> Score | float:
        if prompt.startswith("1"):
            return Score.failed("gold answer cannot be read")
        return float(response.endswith(f"#{answer}"))

    report = probe(as_probed(reward, None), Arithmetic(level=2, min_level=2), problems=24)
    assert report.passed and set(report.failures) == {"gold answer cannot be read"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("length", "filler, 4 times the length"), ("language", "empty"), ("steps", "truncated"), ("repetition", "empty")],
)
def test_a_reward_that_is_only_a_part_of_a_mix_does_not_pass_alone(folder: Path, name: str, kind: str) -> None:
    report = probe(name, jsonl(folder), problems=4)
    assert not report.passed and verdicts(report)[kind] == "pays"


def test_options_reach_the_reward_and_wrong_ones_are_refused(folder: Path) -> None:
    task = Arithmetic()
    assert verdicts(probe("math", task, problems=4))["gold answer"] == "not paid"
    assert probe("math", task, options={"marker": "#"}, problems=4).passed
    with pytest.raises(UserError, match="option of the reward math: 'markr'"):
        probe("math", task, options={"markr": "#"})
    with pytest.raises(UserError, match="options are those of a reward"):
        probe(None, task, options={"marker": "#"})


def test_a_file_of_the_users_is_scored_in_a_process_with_a_time_limit(folder: Path) -> None:
    file = folder / "mine.py"
    file.write_text(
        "def exact(prompt, response, answer):\n"
        "    if 'spañol' in response:\n        import time; time.sleep(60)\n"
        "    return float(response.endswith('#### ' + answer))\n"
    )
    report = probe(f"{file}:exact", jsonl(folder, score_seconds=1.5), problems=2)
    assert verdicts(report)["another language"] == "fails" and verdicts(report)["gold answer"] == "ok"
    assert any("time" in failure or "s" in failure for failure in report.failures)


def test_programs_that_only_seem_to_pass_their_tests_earn_nothing(folder: Path) -> None:
    try:
        isolation.choose("auto")
    except UserError as error:
        pytest.skip(str(error))
    file = folder / "code.jsonl"
    rows = [{"question": f"add{n}", "answer": json.dumps([[f"add{n}", [k], k + n] for k in range(3)])} for n in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = probe(None, Jsonl(str(file), reward="code"), problems=2)
    assert report.passed, "\n".join(lines(report))
    found = verdicts(report)
    assert found["gold answer"] == found["exits early"] == found["equals everything"] == found["empty program"] == "ok"


def test_a_judge_is_asked_about_few_problems_and_what_it_used_is_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def judged(question: str, responses: Sequence[str], **options: Any) -> list[Score]:
        asked.extend(responses)
        return [Score(float("10/10" in response), {"judge_tokens": 2.0}) for response in responses]

    monkeypatch.setattr("posttrain.tasks._judged.judged", judged)
    report = probe("judge", jsonl(folder), options={"url": "http://localhost:9", "model": "m"})
    assert report.problems == 4 and report.calls == len(asked) and report.judge_tokens == 2 * len(asked)
    assert not report.passed and verdicts(report)["gold answer"] == "not paid"


def test_a_reward_model_in_a_directory_is_asked_about_prompt_and_response(tmp_path: Path) -> None:
    from posttrain.models.load import stop_ids
    from posttrain.models.policy import wrap_model
    from posttrain.models.save import save
    from posttrain.models.scorer import from_policy
    from posttrain.models.tiny import character_tokenizer, tiny_model

    tokenizer = character_tokenizer("0123456789+=#, ")
    model = tiny_model(tokenizer, "nano", 0)
    scorer = from_policy(wrap_model(model, tokenizer, stop_ids(model, tokenizer)), zero=False, seed=3)
    report = probe(str(save(scorer.model, tokenizer, tmp_path / "reward")), Arithmetic(), problems=2)
    assert not report.failures and report.spread > 0 and report.calls > 80


def test_the_gold_program_of_tests_without_a_solution_knows_their_answers() -> None:
    tests = read_program_tests('[["Box.add", [1, 2], 3], ["4 5", "9"]]')
    text = lookup_program(tests)
    assert text is not None
    names: dict[str, Any] = {}
    exec(text.split("\n", 1)[1].rpartition("```")[0].partition("import sys")[0], names)  # noqa: S102
    assert names["Box"]().add(1, 2) == 3 and "'4 5': '9'" in text
    assert read_program_tests("no tests") == ()


def test_every_kind_of_answer_has_what_it_should_earn_and_advice() -> None:
    tests = read_program_tests('[["f", [1], 2]]')
    cases = [
        Case(Problem("p", "What is 3 + 4?\n(A) 6\n(B) 7\n", "7"), "<think>3+4</think>\\boxed{7}", ["\\boxed{8}"]),
        Case(Problem("c", "f", '[["f", [1], 2]]'), lookup_program(tests) or "", [], tests),
    ]
    assert {kind for case in cases for kind, _ in answers(case)} == set(KINDS)
    assert all(expected in ("pays", "not", "either") and advice for expected, advice in KINDS.values())
    assert changed("-7", "plus") == "-6" and changed("0", "sign") == "1" and changed("0", "ten") == "10"


def test_the_command_prints_the_report_and_says_by_its_exit_code_whether_it_passed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["probe", "--task", "arithmetic", "task.level=2", "problems=4"]) == 0
    assert "nothing pays that should not" in capsys.readouterr().out
    assert cli.main(["probe", "math", "--task", "arithmetic", "reward.marker=#", "problems=4", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["passed"] and tree["problems"] == 4 and {"median", "p95", "max"} == set(tree["seconds"])
    file = f"task.file={folder / 'gsm8k-train.jsonl'}"
    assert cli.main(["probe", "length", "--task", "jsonl", file, "task.answer_after=####", "problems=4"]) == 1
    assert "do not pay for length" in capsys.readouterr().out
    assert cli.main(["probe", "--task", "arithmetic", "problem=4"]) == 2
    assert "problems" in capsys.readouterr().err


def test_a_split_without_problems_is_named(tmp_path: Path) -> None:
    row = {
        "key": 1,
        "prompt": "Say it in lower case.",
        "instruction_id_list": ["change_case:english_lowercase"],
        "kwargs": [{}],
    }
    (tmp_path / "ifeval.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match="the task has no train problems"):
        probe(None, IFEval(str(tmp_path)))
    assert probe(None, IFEval(str(tmp_path)), split="test").problems == 1


def test_words_are_checked() -> None:
    with pytest.raises(UserError, match="problems is a whole number"):
        probe_named(None, "arithmetic", ["problems=many"])
    with pytest.raises(UserError, match="unknown reward 'mathh'"):
        probe_named("mathh", "arithmetic", [])
