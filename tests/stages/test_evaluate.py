"""Evaluation of models: KL and perplexity against plain transformers, the guard against memory, and `posttrain eval`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain import cli, config, pipeline
from posttrain.errors import UserError
from posttrain.models.policy import Policy, wrap_model
from posttrain.models.save import save
from posttrain.models.scorer import from_policy
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.recipes.base import Recipe
from posttrain.runs.layout import CONFIG, FORMAT
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.stages._answers import kl_to, perplexity
from posttrain.stages._contamination import file_questions
from posttrain.stages._material import Data
from posttrain.stages.base import Context, run_stages
from posttrain.stages.evaluate import EvaluateStage
from posttrain.stages.rl import RLStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks.arithmetic import ALPHABET, Arithmetic
from posttrain.tasks.base import Task
from posttrain.types import Problem, Sampling, Score
from tests.rewards.test_judge import serve  # noqa: F401  a fixture
from tests.stages.test_judges import longer


@dataclass(frozen=True)
class Given(Task):
    """The training problems are 0 to 7, the held-out ones `first` to `first` + 3."""

    first: int = 8

    def problems(self, split: str, level: int | None = None) -> list[Problem]:
        numbers = range(8) if split == "train" else range(self.first, self.first + 4)
        return [Problem(f"{split}/{n}", f"{n}+0=", str(n)) for n in numbers]

    def score(self, problem: Problem, response: str) -> Score:
        return Score(float(problem.id in ("test/5", "test/8")))

    @property
    def alphabet(self) -> str:
        return ALPHABET


def model(seed: int, folder: Path | None = None) -> Policy:
    tokenizer = character_tokenizer(ALPHABET)
    made = tiny_model(tokenizer, "nano", seed)
    if folder is not None:
        save(made, tokenizer, folder)
    return wrap_model(made, tokenizer, (tokenizer.eos_token_id,))


def logprobs(policy: Policy, ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """log p of every token but the first, by the plain model, in float64."""
    with torch.no_grad():
        logits = policy.model(torch.tensor([ids])).logits[0].double().numpy() / temperature
    top = logits - logits.max(-1, keepdims=True)
    table = top - np.log(np.exp(top).sum(-1, keepdims=True))
    return table[np.arange(len(ids) - 1), ids[1:]]


def test_kl_and_its_interval_against_plain_transformers() -> None:
    ours, other, sampling = model(0), model(1), Sampling(6, temperature=0.7)
    stage = EvaluateStage(name="e", model="", task=Arithmetic(level=1), problems=3, samples=2, sampling=sampling)
    evaluation, _ = stage.measure(ours, lambda: other, seed=0)
    found = kl_to(evaluation.groups, other, sampling)
    means = []
    for group in evaluation.groups:
        ratios = []
        for one in group.rollouts:
            ids, first = one.ids.tolist(), len(one.segments[0].ids) - 1
            ratios.append((logprobs(ours, ids, 0.7) - logprobs(other, ids, 0.7))[first:].sum())
        means.append(np.mean(ratios))
    assert math.isclose(found.value, np.mean(means), abs_tol=1e-4) and abs(found.value) > 1e-3
    assert math.isclose(found.high - found.value, 4.302653 * np.std(means, ddof=1) / math.sqrt(3), abs_tol=1e-4)
    assert abs(kl_to(evaluation.groups, ours, sampling).value) < 1e-4
    with pytest.raises(UserError, match="temperature above 0"):
        kl_to(evaluation.groups, other, Sampling(6, temperature=0.0))


def test_perplexity_against_plain_transformers(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "1+2=3"}\n{"text": "12-7=5"}\n')
    policy = model(0)
    end = policy.tokenizer.eos_token_id
    values = np.concatenate([logprobs(policy, [*policy.tokenizer(t)["input_ids"], end]) for t in ("1+2=3", "12-7=5")])
    found = perplexity(policy, [Data(file=str(tmp_path / "text.jsonl"))], 0)
    assert math.isclose(found, math.exp(-values.mean()), rel_tol=1e-5)


def test_a_long_text_is_cut_into_windows_and_no_token_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "1+2=3-12"}) + "\n")
    policy, source = model(0), Data(file=str(tmp_path / "text.jsonl"))
    ids = [*policy.tokenizer("1+2=3-12")["input_ids"], policy.tokenizer.eos_token_id]
    monkeypatch.setattr("posttrain.stages._answers.WINDOW", 4)
    values = np.concatenate([logprobs(policy, ids[start : start + 4]) for start in range(0, len(ids) - 1, 3)])
    assert len(values) == len(ids) - 1
    assert math.isclose(perplexity(policy, [source], 0), math.exp(-values.mean()), rel_tol=1e-5)
    monkeypatch.setattr("posttrain.stages._answers.WINDOW", 4096)
    policy.model.config.max_position_embeddings = 4
    assert math.isclose(perplexity(policy, [source], 0), math.exp(-values.mean()), rel_tol=1e-5), (
        "as many as the model has positions"
    )


def test_what_makes_no_sense_is_refused() -> None:
    task: dict[str, Any] = {"name": "e", "model": "m", "task": Given()}
    with pytest.raises(UserError, match="the KL to m is estimated from samples"):
        EvaluateStage(**task, reference="m")
    with pytest.raises(UserError, match="at least 2"):
        EvaluateStage(**task, problems=1, samples=4, sampling=Sampling(4))


def run(directory: Path, *stages: Any) -> Context:
    with RunWriter.create(directory, {}) as writer:
        context = Context(writer, seed=0, say=False)
        run_stages(stages, context)
    return context


def test_an_evaluation_counts_what_its_model_was_trained_on(tmp_path: Path) -> None:
    sampling = Sampling(2, temperature=0.0)
    (tmp_path / "more.jsonl").write_text('{"prompt": " 8+0=", "completion": "8"}\n')
    context = run(
        tmp_path / "run",
        SFTStage(name="sft", model="tiny:nano", data=(Data(task=Given(), counts={0: 4}),), steps=1, batch=2),
        SFTStage(name="more", model="sft", data=(Data(file=str(tmp_path / "more.jsonl")),), steps=1, batch=1),
        EvaluateStage(name="clean", model="sft", task=Given(), problems=4, sampling=sampling),
        EvaluateStage(name="leaked", model="more", task=Given(5), problems=4, sampling=sampling),
    )
    clean, leaked = context.result("clean"), context.result("leaked")
    assert clean is not None and leaked is not None
    assert clean["contaminated"] == 0 and "accuracy_clean" not in clean
    # held out are 5, 6, 7, 8: the first three were the task's own, and 8 was in the file; 5 and 8 count as solved
    assert leaked["contaminated"] == 4 and leaked["accuracy_clean"] is None and leaked["accuracy"][0] == 0.5
    (alarm,) = [e for e in Run(tmp_path / "run").events() if e.kind == "alarm"]
    assert alarm.details["rule"] == "contamination" and "4 of 4 held-out problems" in str(alarm.details["text"])
    context = run(
        tmp_path / "half",
        SFTStage(name="sft", model="tiny:nano", data=(Data(file=str(tmp_path / "more.jsonl")),), steps=1, batch=1),
        EvaluateStage(name="e", model="sft", task=Given(6), problems=4, sampling=sampling),
    )
    half = context.result("e")
    assert half is not None and half["contaminated"] == 1
    assert half["accuracy"][0] == 0.25 and half["accuracy_clean"][0] == 0.0  # only 8 is solved, and that one was known


def test_what_is_asked_in_a_file(tmp_path: Path) -> None:
    user, system, reply = ({"role": role, "content": role[0]} for role in ("user", "system", "assistant"))
    rows = [
        {"prompt": "p", "completion": "c"},
        {"messages": [system, user, reply]},
        {"prompt": [user, reply, user]},
        {"text": "t"},
    ]
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(file_questions(Data(file=str(tmp_path / "f.jsonl")))) == ["p", "u", "s\nu", "u", "u", "u\na\nu", "t"]


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_training_on_a_task_that_shares_its_questions_is_refused_before_it_starts(tmp_path: Path, kind: str) -> None:
    task = Given(7)
    stage = (
        RLStage(name="rl", model="nowhere", task=task)
        if kind == "rl"
        else SFTStage(name="sft", model="nowhere", data=(Data(task=task, counts={0: 2}),))
    )
    with pytest.raises(UserError, match=f"{kind}: 1 of 4 held-out questions are among the 8 trained on, such as '7.0='"):
        run(tmp_path / "run", stage)


def test_a_stage_that_measures_nothing_is_told_instead(tmp_path: Path) -> None:
    small: dict[str, Any] = {"steps": 1, "prompts": 1, "evaluate_every": 0, "sampling": Sampling(2)}
    run(tmp_path / "run", RLStage(name="rl", model="tiny:nano", task=Given(7), **small))
    said = [str(e.details["text"]) for e in Run(tmp_path / "run").events() if e.kind == "message"]
    assert "data: 1 of 4 held-out questions are among the 8 trained on" in said


def test_eval_prints_a_table_json_and_a_paired_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(0, tmp_path / "one")
    model(1, tmp_path / "two")
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "1+2=3"}\n')
    asked = [
        "eval",
        str(tmp_path / "one"),
        "--task",
        "arithmetic",
        "task.level=1",
        "problems=6",
        "samples=4",
        "max_new_tokens=4",
    ]
    asked += ["temperature=1.0", f"reference={tmp_path / 'two'}", f"text=[{{file: '{text}'}}]", f"against={tmp_path / 'two'}"]
    assert cli.main([*asked, f"save={tmp_path / 'rows.jsonl'}"]) == 0
    shown = capsys.readouterr().out
    for word in ("pass@4", "avg@4", "perplexity", "kl ", "p = ", "tokens; 0 could not be scored"):
        assert word in shown, word
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 6
    assert cli.main([*asked, "--json", "save=/dev/full"]) == 2, "the figures are shown also where no row can be saved"
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert said.err == "posttrain: eval: save=/dev/full could not be written: No space left on device\n"
    assert {"kl", "perplexity", "avg_at", "majority_at", "against", "paired"} <= set(found)
    assert found["paired"]["wins"] + found["paired"]["losses"] + found["paired"]["ties"] == 6
    assert abs(found["against"]["kl"][0]) < 1e-4, "the other one is the reference itself"
    assert (found["won"]["problems"], found["won"]["prompts"]) == (24, 6) and 0 <= found["won"]["win_rate"][0] <= 1
    assert "by the task's score" in shown and "of 24 answers to 6 prompts against" in shown


def test_eval_lets_a_judge_or_a_reward_model_decide_who_wins(
    serve: Any,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The judge, asked in both orders, prefers the longer answer; what it found is in the saved rows."""
    model(0, tmp_path / "one")
    other = model(1, tmp_path / "two")
    _, endpoint = serve(longer)
    asked = [
        "eval",
        str(tmp_path / "one"),
        "--task",
        "arithmetic",
        "problems=8",
        "max_new_tokens=9",
        "sampling.temperature=1.0",
        "--json",
    ]
    judge = ["judge=m", f"judge.url={endpoint.url}"]
    assert cli.main([*asked, *judge]) == 2
    assert "judge decides who wins between two models; name the other" in capsys.readouterr().err
    asked += ["--against", str(tmp_path / "two"), f"save={tmp_path / 'rows.jsonl'}"]
    assert cli.main([*asked, *judge]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    lengths = [[len(text) for text in row["responses"]] for row in rows]
    assert [row["won"] for row in rows] == [0.5 if a == b else float(a > b) for a, b in lengths]
    assert found["problems"] == 8 and found["win_rate"][0] == sum(row["won"] for row in rows) / 8
    assert found["usage"]["requests"] > 16, "both orders"
    assert cli.main([*asked, *judge, "save=/dev/full"]) == 2
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["win_rate"] == found["win_rate"]
    assert said.err == "posttrain: eval: save=/dev/full could not be written: No space left on device\n"
    scorer = from_policy(other, zero=False, seed=1)
    save(scorer.model, other.tokenizer, tmp_path / "scorer")
    assert cli.main([*asked, f"reward_model={tmp_path / 'scorer'}"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert found["win_rate"][0] == sum(a > b for a, b in (row["values"] for row in rows)) / 8
    assert cli.main([*asked, f"reward_model={tmp_path / 'scorer'}", "samples=2"]) == 2
    assert "samples" in capsys.readouterr().err


def test_a_reward_that_tells_no_right_from_wrong_has_no_accuracy(tmp_path: Path) -> None:
    """Neither in the result of the stage, which tables and model cards are made from, nor on problems that were not trained on."""

    @dataclass(frozen=True)
    class Graded(Given):
        verifiable = False

    (tmp_path / "more.jsonl").write_text('{"prompt": " 8+0=", "completion": "8"}\n')
    context = run(
        tmp_path / "run",
        SFTStage(name="sft", model="tiny:nano", data=(Data(file=str(tmp_path / "more.jsonl")),), steps=1, batch=1),
        EvaluateStage(name="e", model="sft", task=Graded(6), problems=4, sampling=Sampling(2, temperature=0.0)),
    )
    found = context.result("e")
    assert found is not None and found["contaminated"] == 1 and len(found["reward"]) == len(found["reward_clean"]) == 3
    assert not {"accuracy", "accuracy_clean", "pass_at", "avg_at", "majority_at"} & found.keys()


def test_eval_by_a_reward_that_tells_no_right_from_wrong_compares_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, name in enumerate(("one", "two")):
        model(seed, tmp_path / name)
    rows = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text("def share(response): return sum(map(ord, response)) / 1e6\n")
    settings = [f"task.file={tmp_path}/rows.jsonl", "task.held_out=1", f"task.reward={tmp_path}/mine.py:share", "temperature=1"]
    asked = [
        "eval",
        str(tmp_path / "one"),
        "--task",
        "jsonl",
        *settings,
        "max_new_tokens=6",
        "--against",
        str(tmp_path / "two"),
    ]
    assert cli.main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["problems"] == 8 and not {"accuracy", "pass_at", "avg_at"} & found.keys()
    difference = found["reward"][0] - found["against"]["reward"][0]
    assert found["paired"]["difference"]["value"] == pytest.approx(difference) and found["paired"]["ties"] < 8


def test_eval_of_a_task_that_needs_a_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(0, tmp_path / "one")
    rows = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(60)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ["eval", str(tmp_path / "one"), "--task", "jsonl", "max_new_tokens=2", "problems=2"]
    assert cli.main([*asked, f"task.file={tmp_path / 'q.jsonl'}"]) == 0
    assert "2 held-out problems of jsonl" in capsys.readouterr().out
    assert cli.main(asked) == 2
    assert "missing file" in capsys.readouterr().err


def configured(folder: Path, *tasks: dict[str, Any]) -> Path:
    """A run directory of one model; a stage for each task."""
    model(0, folder / "export")
    model(0, folder / "stages" / "after0" / "model")
    stages = [{"stage": "evaluate", "name": f"after{n}", "model": "m", "task": task} for n, task in enumerate(tasks)]
    config_file = {"format": FORMAT, "stages": [*stages, {"stage": "sft", "name": "last", "model": "m"}]}
    (folder / CONFIG).write_text(json.dumps(config_file))
    return folder


def test_eval_of_a_run_takes_the_task_of_its_last_stage_that_has_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = configured(tmp_path / "run", {"name": "arithmetic", "level": 2}, {"name": "arithmetic", "level": 1})
    short = ["problems=4", "max_new_tokens=2", "device=cpu"]

    def said(*words: str, place: Path = run) -> str:
        assert cli.main(["eval", str(place), *words, *short]) == 0
        return capsys.readouterr().out

    line = f"task and sampling as in stage after1 of {run}: arithmetic level=1\n"
    assert said().startswith(line + f"{run} on 4 held-out problems of arithmetic")
    assert said("--task", "arithmetic").startswith(line)
    for place in (run / "export", run / "stages" / "after0", run / "stages" / "after0" / "model"):
        assert said(place=place).startswith(line)
    assert said("task.level=2").startswith(line.replace("level=1", "level=2"))
    assert said("--task", "arithmetic,sums", "arithmetic.level=2").count("as in stage") == 0
    assert said("--task", "arithmetic,sums").count("as in stage") == 1
    for words in (["--task", "arithmetic", "task.level=2"], ["--task", "arithmetic", "task.seed=1"], ["--task", "sums"]):
        assert "as in stage" not in said(*words)
    saved = [
        said("--json", *words, f"save={tmp_path / name}")
        for name, *words in [("a",), ("b", "--task", "arithmetic", "task.level=1")]
    ]
    assert json.loads(saved[0])["task_source"] + "\n" == line and "task_source" not in json.loads(saved[1])
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text(), "the same problems"


GREEDY = {"max_new_tokens": 256, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_new_tokens": 0}
DRAWN = {"max_new_tokens": 3, "temperature": 0.7, "top_k": 5}


@pytest.mark.parametrize(
    ("stage", "words", "sampling", "samples"),
    [
        ({"stage": "evaluate", "sampling": DRAWN, "samples": 2}, [], GREEDY | DRAWN, 2),
        ({"stage": "evaluate"}, ["max_new_tokens=4"], GREEDY | {"max_new_tokens": 4}, 1),
        ({"stage": "evaluate", "sampling": DRAWN}, ["sampling.temperature=0"], GREEDY | DRAWN | {"temperature": 0.0}, 1),
        ({"stage": "rl", "sampling": {**DRAWN, "top_k": 0}}, [], GREEDY | {"max_new_tokens": 3}, 1),
        ({"stage": "rl", "sampling": DRAWN}, ["--task", "sums", "max_new_tokens=4"], GREEDY | {"max_new_tokens": 4}, 1),
    ],
    ids=["evaluate", "evaluate_without_sampling", "one_key_changed", "rl_evaluates_greedily", "another_task"],
)
def test_eval_of_a_run_samples_as_the_run_evaluates(
    stage: dict[str, Any], words: list[str], sampling: Any, samples: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model(0, tmp_path / "run" / "export")
    own = {"name": "last", "model": "m", "task": {"name": "arithmetic", "level": 1}, **stage}
    (tmp_path / "run" / CONFIG).write_text(json.dumps({"format": FORMAT, "stages": [own]}))
    asked = ["eval", str(tmp_path / "run"), "problems=2", "device=cpu", *words]
    assert cli.main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["sampling"], [*found["avg_at"]]) == (sampling, [str(samples)])
    assert cli.main(asked) == 0
    how = f"max_new_tokens={sampling['max_new_tokens']} temperature={sampling['temperature']}"
    assert f"{samples} sample{'s' * (samples > 1)} each, {how}" in capsys.readouterr().out


def test_greedy_eval_of_a_run_with_several_samples_says_what_to_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(0, tmp_path / "run" / "export")
    own = {"stage": "evaluate", "name": "after", "model": "m", "task": {"name": "arithmetic"}, "sampling": DRAWN, "samples": 2}
    (tmp_path / "run" / CONFIG).write_text(json.dumps({"format": FORMAT, "stages": [own]}))
    assert cli.main(["eval", str(tmp_path / "run"), "temperature=0"]) == 2
    assert "2 samples at temperature 0 are all the same; raise the temperature, or set samples=1" in capsys.readouterr().err


def test_eval_of_a_run_from_elsewhere_runs_none_of_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(60)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "pay.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'mark')!r}).touch()\ndef pay(response):\n    return 1.0\n"
    )
    task = {"name": "jsonl", "file": str(tmp_path / "q.jsonl"), "reward": f"{tmp_path / 'pay.py'}:pay"}
    run = configured(tmp_path / "run", task)
    for words in ([], ["--task", "jsonl"]):
        asked = ["eval", str(run), *words, "problems=2", "max_new_tokens=2", "device=cpu"]
        assert cli.main(asked) == 2
        assert "would run code from a file; pass --allow-code if you trust it" in capsys.readouterr().err
    assert not (tmp_path / "mark").exists()
    assert cli.main([*asked, "--allow-code"]) == 0 and (tmp_path / "mark").exists()


def test_eval_without_a_task_says_why_it_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = configured(tmp_path / "run")
    assert cli.main(["eval", str(run)]) == 2
    assert f"eval: no stage of {run} has a task; give one (--task NAME)" in capsys.readouterr().err


def test_eval_of_a_run_says_what_it_was_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Questions 0 to 3 were learned, and a control that is not exported learned 4 too; held out are 2 to 5."""

    def file(name: str, numbers: range) -> str:
        rows = [{"prompt": f"{n}+0=", "completion": str(n), "question": f"{n}+0=", "answer": str(n)} for n in numbers]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    learned, more = (Data(file=file(f"{n}.jsonl", range(n))) for n in (4, 5))
    small: dict[str, Any] = {"model": "tiny:nano", "steps": 1, "batch": 2}
    sft, control = (SFTStage(name=name, data=(data,), **small) for name, data in (("sft", learned), ("control", more)))
    directory = pipeline.start(
        config.Settings(Recipe((sft, control)), "test", device="cpu", threads=1, out=str(tmp_path / "run"))
    )
    asked = ["--task", "jsonl", f"task.file={file('other', range(7, 9))}", f"task.test_file={file('held', range(2, 6))}"]
    asked += ["max_new_tokens=2", "device=cpu"]
    for place, count in (("run", 2), ("run/export", 2), ("run/stages/sft/model", 2), ("run/stages/control/model", 3)):
        capsys.readouterr()
        assert cli.main(["eval", str(tmp_path / place), *asked]) == 0
        assert (
            f"{count} of 4 held-out problems are among what {tmp_path / place} was trained on; accuracy on the other"
            in " ".join(capsys.readouterr().out.split())
        )
    assert cli.main(["eval", str(directory), *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["contaminated"] == 2 and len(found["accuracy_clean"]) == 3
    (directory / "export").rename(tmp_path / "elsewhere")
    assert cli.main(["eval", str(tmp_path / "elsewhere"), *asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["contaminated"] == 0


def test_a_run_of_evaluations_alone_names_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = EvaluateStage(name="e", model="tiny:nano", task=Given(), problems=4, sampling=Sampling(2, temperature=0.0))
    directory = pipeline.start(config.Settings(Recipe((stage,)), "test", device="cpu", threads=1, out=str(tmp_path / "run")))
    shown = capsys.readouterr().out
    assert "took" in shown and "model:" not in shown and not (directory / "export").exists()


def test_a_run_with_two_evaluations_of_several_samples_draws_pass_at_k(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config.parse("r1_zero", ["samples=4"])
    row = {"problem": "p", "question": "1+1=", "answer": "2", "responses": ["#2"], "outcomes": ["correct"]}
    figures = {"problems": 2, "accuracy": [0.5, 0.1, 0.9], "parts": {}, "pass_at": {"1": [0.5, 0.1, 0.9], "2": [0.6, 0.2, 1.0]}}
    with RunWriter.create(tmp_path / "run", config.to_config(settings)) as writer:
        writer.metrics("rl", 0, {"reward": 0.5})
        context = Context(writer, seed=0, say=False)
        for stage in ("base", "trained"):
            assert not pipeline.pass_at_k(context, settings.recipe.stages), "one curve is no comparison"
            context.finish(stage, figures)
            context.write_lines(stage, [json.dumps(row), json.dumps(row | {"problem": "q"})])
        pipeline.conclude(settings, context, *pipeline._draw(settings, context))
    assert f"pass@k:   {tmp_path / 'run' / 'pass_at_k.png'}" in capsys.readouterr().out
    assert (tmp_path / "run" / "pass_at_k.png").read_bytes()[:4] == b"\x89PNG"


def test_more_problems_after_training_than_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table at the end compares the problems of both evaluations and says how many it leaves out."""
    common = {
        "stage": "evaluate",
        "model": "tiny:nano",
        "task": {"name": "arithmetic", "level": 1},
        "sampling": {"temperature": 0.0},
    }
    stages = [{**common, "name": name, "problems": count} for name, count in (("first", 4), ("second", 7))]
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({"stages": stages, "before": "first", "after": "second"}))
    assert cli.main(["run", str(file), f"out={tmp_path / 'run'}", "device=cpu"]) == 0
    text = capsys.readouterr().out
    assert "of the 4 problems in both evaluations; 3 that only one of them has are left out" in text
