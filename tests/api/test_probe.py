"""Rewards before training: shipped ones with options, and what a probe says of a reward."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import posttrain as pt
from posttrain.api.run import _Stepper
from posttrain.runs.layout import Row

SUMS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(10, 20)]


def right(response: str, answer: str) -> float:
    return float(response.strip() == answer)


def short(response: str) -> float:
    return float(len(response) < 3)


def test_a_probe_of_functions_on_prompts_with_answers() -> None:
    report = pt.probe(right, prompts=SUMS, problems=4)
    assert report.passed and report.problems == 4 and report.reward.startswith("right (test_probe.py line ")
    assert str(report).startswith("reward: right (") and "nothing pays that should not" in str(report)
    mixed = pt.probe({"right": right, "short": short}, prompts=SUMS, weights={"right": 0.0}, problems=4)
    assert not mixed.passed and {row.kind for row in mixed.rows if row.verdict == "pays"} >= {"another problem's gold"}
    assert pt.probe(task="arithmetic", problems=4).passed
    with pytest.raises(pt.UserError, match="probe: give either prompts or a task"):
        pt.probe(right)


def test_a_shipped_reward_with_its_options_is_a_function() -> None:
    by_phrase: Any = pt.reward("math", phrase="final answer:")
    assert by_phrase("2+3=", "Final answer: 5", "5").value == 1 and by_phrase("2+3=", "5", "5").value == 0
    with pytest.raises(pt.UserError, match="option of the reward math: 'frase'; did you mean 'phrase'"):
        pt.reward("math", frase="final answer:")


def test_a_reward_model_is_evaluated_on_pairs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pairs = [{"prompt": f"n{n}", "chosen": "a" * (1 + n % 3), "rejected": "zz" + "b" * (n % 3)} for n in range(20)]
    rm = pt.reward_model("tiny:nano", pairs, steps=8, batch=8, lr=3e-3, warmup=0, members=2, device="cpu", threads=1)
    found = pt.evaluate(rm, data=pairs)
    assert found["pairs"] == 20 and {"accuracy", "accuracy/0", "accuracy/1", "calibration"} <= set(found)
    swapped = [{"prompt": p["prompt"], "chosen": p["rejected"], "rejected": p["chosen"]} for p in pairs]
    assert rm.evaluate(data=swapped)["accuracy"][0] == pytest.approx(1 - found["accuracy"][0]) and found["accuracy"][0] != 0.5
    assert pt.evaluate(rm.scorers()[1], data=pairs)["accuracy"] == found["accuracy/1"]
    renamed = [{"q": p["prompt"], "good": p["chosen"], "bad": p["rejected"]} for p in pairs]
    assert rm.evaluate(data=renamed, columns={"prompt": "q", "chosen": "good", "rejected": "bad"}) == found
    with pytest.raises(pt.UserError, match="unknown setting 'samples'; known: columns, max_length"):
        rm.evaluate(data=pairs, samples=2)
    assert pt.probe(rm, prompts=SUMS, problems=2).calls > 50
    labels = [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "c", "label": False}]
    with pytest.raises(pt.UserError, match=r"evaluate: data holds rows of kind unpaired, not pairs or rankings"):
        rm.evaluate(data=labels)


def test_a_run_that_was_taken_step_by_step_leaves_no_thread_behind() -> None:
    """Python aborts where one is still ending when the program does."""

    class Slow:
        def __del__(self) -> None:
            time.sleep(0.3)

    def work(on_step: Any) -> None:
        on_step(Slow(), Row("rl", 1, 1, 0.0, {}))

    stepper = _Stepper(work)
    assert stepper.next() is not None and stepper.next() is None
    assert not stepper._thread.is_alive()
