"""Monte-Carlo labels of steps, and search by them, with a policy and a reward model that are written by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sampler_for_tests import ScriptedSampler, completion, three_lines

from posttrain.data.preferences import read_preferences
from posttrain.errors import UserError
from posttrain.models.tiny import character_tokenizer
from posttrain.runs.write import RunWriter
from posttrain.stages.base import Context, Stage, worker_pool
from posttrain.stages.search import SearchStage
from posttrain.stages.step_labels import StepLabelsStage
from posttrain.tasks.base import Limits, Task
from posttrain.tasks.mixed import Mixed, Source
from posttrain.types import Problem, Rollout, Sampling, Score

TOKENIZER = character_tokenizer("ax0123456789\n?")


@dataclass(frozen=True)
class NoX(Task):
    """An answer of three lines is right where none of them is x."""

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return [Problem(f"{split}/{n}", f"{n}?", "") for n in range(40)]

    def score(self, problem: Problem, response: str) -> Score:
        right = response == "a\na\na"
        return Score(float(right), outcome="correct" if right else "wrong")

    def final(self, response: str) -> str | None:
        return response


script = three_lines(TOKENIZER, "ax")


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> ScriptedSampler:
    made = ScriptedSampler(script)
    monkeypatch.setattr(Context, "sampler", lambda *given: made)
    monkeypatch.setattr(Stage, "load", lambda *given: SimpleNamespace(tokenizer=TOKENIZER))
    return made


def run(folder: Path, stage: Stage) -> dict[str, Any]:
    with RunWriter.create(folder, {}) as writer:
        return stage.run(Context(writer, 0, threads=1, say=False))


def labelling(**more: Any) -> StepLabelsStage:
    return StepLabelsStage(name="labels", model="m", task=NoX(), prompts=4, samples=4, sampling=Sampling(16), **more)


def test_a_step_is_labelled_by_the_completions_from_its_end(sampler: ScriptedSampler, tmp_path: Path) -> None:
    result = run(tmp_path / "run", labelling(completions=8))
    begun: dict[str, list[bool]] = {}
    for request in sampler.requests[16:]:
        question, _, before = TOKENIZER.decode(list(request.ids)).partition("<|assistant|>")
        rest = TOKENIZER.decode(script(request).ids).removesuffix("<|end|>")
        begun.setdefault(question + before, []).append(before + rest == "a\na\na")
    assert all(len(solved) == 8 for solved in begun.values()), "equal beginnings are completed once"
    assert result["completions"] == 8 * len(begun) == len(sampler.requests) - 16
    rows = [json.loads(line) for line in (tmp_path / "run/stages/labels/data.jsonl").open()]
    assert len(rows) == result["written"] and result["written"] + result["repeated"] == 16
    seen = set()
    for row in rows:
        asked = f"<|user|>{row['prompt'][0]['content']}<|end|>"
        first, second, last = row["labels"]
        texts, response = row["completions"], "".join(row["completions"])
        assert (texts[0], response.count("\n"), row["separator"]) == (response[0], 2, "")
        for label, before in ((first, texts[0] + "\n"), (second, texts[0] + texts[1] + "\n")):
            solved = begun[asked + before]
            assert label == sum(solved) / 8 and (label == 0 or "x" not in before)
            seen.add(label)
        assert last == float(response == "a\na\na")
    assert len(seen) > 3, "shares, not only 0 and 1"
    (unit, *_) = read_preferences(str(tmp_path / "run/stages/labels/data.jsonl"), TOKENIZER, 100).units
    at = [n for n, label in enumerate(unit[0].steps) if label == label]  # type: ignore[arg-type]
    assert [TOKENIZER.decode(unit[0].ids[n]) for n in at] == [text[-1] for text in rows[0]["completions"]]


def test_hard_labels_say_whether_any_completion_solves(sampler: ScriptedSampler, tmp_path: Path) -> None:
    run(tmp_path / "run", labelling(completions=8, label="any"))
    rows = [json.loads(line) for line in (tmp_path / "run/stages/labels/data.jsonl").open()]
    assert {label for row in rows for label in row["labels"]} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("steps", "line"), [("pattern:(", "no regular expression"), ("token:a", "token:TEXT is for reward=process")]
)
def test_separators_that_find_no_steps_are_refused_at_once(steps: str, line: str) -> None:
    with pytest.raises(UserError, match=f"^labels: steps: .*{line}"):
        replace(labelling(), steps=steps)


def test_a_mixture_of_tasks_of_one_turn_is_labelled(sampler: ScriptedSampler, tmp_path: Path) -> None:
    mixed = Mixed(sources=(Source(name="one", task=NoX()), Source(name="two", task=NoX())))
    with RunWriter.create(tmp_path / "run", {}) as writer:
        found = replace(labelling(completions=3), task=mixed).run(Context(writer, 0, threads=1, say=False))
    assert found["written"] > 10 and found["completions"] > 30


def test_a_dry_run_asks_no_judge(sampler: ScriptedSampler, tmp_path: Path) -> None:
    class Compared(NoX):
        def score_group(self, problem: Problem, responses: Sequence[str]) -> Sequence[Score] | None:
            pytest.fail("it was asked")

    stage = replace(labelling(completions=3), task=Compared()).dry_run().stage
    with RunWriter.create(tmp_path / "dry", {}) as writer:
        stage.run(Context(writer, 0, threads=1, say=False))


def test_the_completions_of_an_isolated_task_are_scored_by_its_workers(sampler: ScriptedSampler, tmp_path: Path) -> None:
    class Apart(NoX):
        isolated = True

    stage = replace(labelling(completions=3), task=Apart())
    for name, one in (("here", labelling(completions=3)), ("apart", stage), ("dry", stage.dry_run().stage)):
        with RunWriter.create(tmp_path / name, {}) as writer, worker_pool([one]) as workers:
            one.run(Context(writer, 0, threads=1, say=False, workers=workers))
    here, apart = ((tmp_path / name / "stages/labels/data.jsonl").read_text() for name in ("here", "apart"))
    assert here == apart


def test_without_completions_a_solution_is_one_step_with_its_outcome(sampler: ScriptedSampler, tmp_path: Path) -> None:
    result = run(tmp_path / "run", labelling(completions=0))
    rows = [json.loads(line) for line in (tmp_path / "run/stages/labels/data.jsonl").open()]
    assert len(sampler.requests) == 16 and result["completions"] == 0
    assert [row["labels"] for row in rows] == [[float(row["completions"] == ["a\na\na"])] for row in rows]


def test_a_dry_run_has_labels_of_both_kinds_though_its_model_solves_nothing(sampler: ScriptedSampler, tmp_path: Path) -> None:
    sampler.reply = lambda request: completion(
        [TOKENIZER.convert_tokens_to_ids("x")] * (1 + request.seed % 3) + [TOKENIZER.eos_token_id]
    )
    run(tmp_path / "run", labelling(completions=2).dry_run().stage)
    rows = [json.loads(line) for line in (tmp_path / "run/stages/labels/data.jsonl").open()]
    assert {label for row in rows for label in row["labels"]} == {0.0, 1.0}


class Perfect:
    """Says of every step whether an x stands before its end."""

    def rate(self, rollouts: Sequence[Rollout]) -> list[Score]:
        found = []
        for text in (r.response.rstrip("\n") for r in rollouts):
            ends = [n for n, c in enumerate(text) if c == "\n"] + [len(text)]
            steps = tuple((end, float("x" not in text[:end])) for end in ends)
            found.append(Score(min(value for _, value in steps), steps=steps))
        return found


def test_with_a_perfect_model_the_best_of_n_is_pass_at_n_and_beam_search_finds_every_answer(
    sampler: ScriptedSampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SearchStage, "rating", lambda *given: Perfect())
    settings = {"samples": 8, "beams": 2, "step_tokens": 4, "problems": 40, "sampling": Sampling(16)}
    stage = SearchStage(name="search", model="m", task=NoX(), process="prm", outcome="orm", **settings)
    result = run(tmp_path / "run", stage)
    found = result["accuracy"]
    for name in ("process_min", "process_product", "process_last", "outcome"):
        for n, row in found["pass"].items():
            assert found[name][n][0] == pytest.approx(row[0]), "the interval is over means of draws, the value the same"
    assert found["pass"]["8"][0] < 0.9 and found["majority"]["8"][0] < found["pass"]["8"][0]
    assert found["beam"]["8"][0] > 0.97, "8 candidates for each step, and two beams of 4"
    spent = 8 * (4 + 4 + 2)  # two lines, of which the second is cut off, twice, and then the last with its end
    assert result["tokens"] == {"answers": 48.0, "beam": spent}


class Short(NoX):
    """No more than three lines fit, without their end."""

    def limits(self, problem: Problem) -> Limits:
        return Limits(tokens=6)


def test_limits_of_a_whole_answer_count_what_a_completion_continues(
    sampler: ScriptedSampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(16, min_new_tokens=3)
    run(tmp_path / "labels", replace(labelling(completions=2), task=Short(), sampling=sampling))
    asked = {(r.sampling.max_new_tokens, r.sampling.min_new_tokens) for r in sampler.requests[16:]}
    assert asked == {(4, 1), (2, 0)}, "after two and after four tokens"
    monkeypatch.setattr(SearchStage, "rating", lambda *given: Perfect())
    settings = {"samples": 8, "beams": 2, "step_tokens": 4, "problems": 3, "sampling": replace(sampling, max_new_tokens=5)}
    sampler.requests.clear()
    run(tmp_path / "search", SearchStage(name="search", model="m", task=Short(), process="prm", **settings))
    asked = {(r.sampling.max_new_tokens, r.sampling.min_new_tokens) for r in sampler.requests[48:]}
    assert asked == {(3, 1), (1, 0)}, "to five tokens in all"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: labelling(completions=4, label="all"), "label"),
        (lambda: SearchStage(name="s", model="m", task=NoX(), process="p", samples=6, beams=4), "multiple of beams=4"),
        (
            lambda: SearchStage(name="s", model="m", task=NoX(), process="p", sampling=Sampling(temperature=0.0)),
            "temperature 0",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()
