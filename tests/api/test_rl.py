"""Reinforcement learning from Python: prompts, rewards and runs as a program has them."""

from __future__ import annotations

import asyncio
import gc
import importlib
import linecache
import os
import runpy
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import posttrain as pt
from posttrain import cli
from posttrain.commands.show import show
from posttrain.errors import GuardStop
from posttrain.runs.read import Run as Reader
from posttrain.runs.tokens import rollout_tokens
from posttrain.types import Sampling

SMALL: dict[str, Any] = {
    "model": "tiny:nano", "steps": 2, "group": 4, "batch": 2, "beta": 0.0, "max_new_tokens": 6, "lr": 1e-3, "device": "cpu",
    "evaluate_every": 1, "threads": 1,
}  # fmt: skip
FOUR = ["one", "two", "three", "four"]


def vowels(response: str) -> float:
    return sum(c in "aeiou" for c in response) / 10


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_held_out_prompts_may_be_given_and_names_of_trl_lead_to_theirs() -> None:
    run = pt.grpo(prompts=FOUR, held_out_data=["five", "six"], reward=vowels, system="brief", **SMALL)
    assert {row["question"] for row in run.rollouts(step=1)} <= set(FOUR) and "reward/test" in run.metrics[0]
    assert (run.directory / "data" / "held_out_data.jsonl").read_text().count("\n") == 2
    assert "system: brief" in (run.directory / "config.yaml").read_text()
    for given, said in (
        ({"train_dataset": FOUR}, "grpo: train_dataset is called data here, in pt.rl, pt.grpo and pt.ppo prompts"),
        ({}, "grpo: give either prompts or a task"),
        ({"prompts": FOUR, "system_prompt": "brief"}, "system_prompt is called system here"),
        ({"prompts": FOUR, "algorithm": "dapo"}, r"grpo has its algorithm; another is pt.rl\(..., algorithm=...\).train\(\)"),
        ({"task": "arithmetic", "held_out_data": FOUR}, "grpo: held_out_data goes with prompts"),
    ):
        with pytest.raises(pt.UserError, match=said):
            pt.grpo(reward=vowels, **given, **SMALL)


def test_a_reward_that_says_right_or_wrong_gives_accuracy_and_pass_at_k() -> None:
    def ends(prompts: list[str], completions: list[str]) -> list[bool]:
        return [len(text) < 4 for text in completions]

    run = pt.grpo(prompts=FOUR, held_out_data=["five", "six"], reward=[vowels, ends], **SMALL)
    assert {"accuracy/test", "reward/test"} <= run.metrics[-1].keys()
    asked: dict[str, Any] = {"prompts": FOUR, "samples": 4, "temperature": 1.0, "max_new_tokens": 6}
    found = run.evaluate(reward=[vowels, ends], **asked)
    assert found["accuracy"][0] == found["pass_at"]["1"][0] <= found["pass_at"]["4"][0] and "reward" in found
    assert found["accuracy"] == run.evaluate(reward=ends, **asked)["reward"]
    assert "accuracy" not in run.evaluate(reward=vowels, **asked)


def test_grpo_on_four_prompts_and_a_function_gives_a_trained_run() -> None:
    seen: list[dict[str, Any]] = []
    run = pt.grpo(prompts=FOUR, reward=vowels, callback=seen.append, **SMALL)
    assert run.directory == Path("runs/grpo-1") and (run.directory / "export" / "model.safetensors").is_file()
    assert [row["step"] for row in run.metrics] == [1, 2] == [figures["step"] for figures in seen]
    assert seen[-1].items() <= run.metrics[-1].items() and 0 <= seen[-1]["reward"] < 1
    rows = run.rollouts(step=1)
    assert len(rows) == 8 and all(row["reward"] == vowels(row["response"]) for row in rows)
    assert {row["question"] for row in rows} <= set(FOUR), "none is held out of so few"
    texts = run.sample("one", n=3, max_new_tokens=4)
    assert len(texts) == 3 and all(isinstance(text, str) for text in texts)
    assert type(run.model).__name__ == "LlamaForCausalLM" and run.tokenizer.decode(run.tokenizer("one")["input_ids"]) == "one"
    assert run.frame()["reward"].tolist() == [row["reward"] for row in run.metrics]
    assert run.result["steps"] == 2 and run.plot("curves.png").is_file()
    with pytest.raises(pt.UserError, match="is trained already; rl"):
        next(run.steps())
    again = pt.load(run.directory)
    assert isinstance(again, pt.Run) and again.metrics == run.metrics


def test_a_reward_may_leave_the_folder_and_switch_gradients_off(tmp_path: Path) -> None:
    """The run goes on where it was begun, though its directory is named from there; and it learns."""

    def careless(response: str) -> float:
        folder = tempfile.mkdtemp(dir=tmp_path)
        os.chdir(folder)
        os.rmdir(folder)
        torch.set_grad_enabled(False)
        return vowels(response)

    try:
        run = pt.grpo(prompts=FOUR, reward=careless, out="here", checkpoint_every=1, **SMALL)
    finally:
        torch.set_grad_enabled(True)
    assert run.directory == Path("here") and len(run.metrics) == 2 and run.metrics[0]["grad_norm"] > 0
    assert cli.main(["resume", "here"]) == 0, "a complete run needs no function"
    assert (tmp_path / "here" / "export").is_dir() and list((tmp_path / "here" / "checkpoints").rglob("step-1"))


def test_a_base_model_without_a_chat_template_reads_prompts_as_they_are() -> None:
    from posttrain.models.tiny import character_tokenizer, tiny_model
    from posttrain.stages.base import PRINTABLE

    tokenizer = character_tokenizer(PRINTABLE)
    tokenizer.chat_template = None
    how = {**SMALL, "model": (tiny_model(tokenizer, "nano", 0), tokenizer), "steps": 1}
    run = pt.grpo(prompts=FOUR, reward=vowels, **how)
    arrays = Reader(run.directory).arrays("rl", 1)
    assert arrays is not None
    for number, row in enumerate(run.rollouts()):
        text = tokenizer.decode(arrays.sequence(number)["ids"], skip_special_tokens=True)
        assert text.startswith(row["question"] + row["response"])
    assert pt.evaluate(run, prompts=FOUR, reward=vowels, max_new_tokens=4)["problems"] == 4


def test_a_run_is_evaluated_on_its_own_task() -> None:
    run = pt.rl(task={"name": "arithmetic", "level": 1}, out="mine", **{**SMALL, "evaluate_every": 0, "steps": 2})
    next(run.steps())
    source = "task and sampling as in stage rl of mine: arithmetic level=1"
    short = {"problems": 4, "max_new_tokens": 2}
    assert run.evaluate(problems=2)["sampling"] == asdict(Sampling(SMALL["max_new_tokens"], temperature=0.0))
    assert run.evaluate(**short)["task_source"] == source, "between two steps"
    run.train()
    for found in (run.evaluate(**short), pt.evaluate(run, "arithmetic", **short), pt.load("mine").evaluate(**short)):
        assert found["task_source"] == source
    for found in (run.evaluate("arithmetic", level=1, **short), run.evaluate("sums", **short)):
        assert "task_source" not in found
    assert run.evaluate(level=2, **short)["task_source"] == source.replace("level=1", "level=2")
    with pytest.raises(pt.UserError, match="evaluate: give either prompts or a task"):
        pt.evaluate("some/model")


@dataclass(frozen=True)
class Spoken(pt.Task):
    def problems(self, split: str, level: int | None = None) -> list[pt.Problem]:
        return [pt.Problem(f"{split}{n}", f"{split} {n}", "1") for n in range(2)]

    def score(self, problem: pt.Problem, response: str) -> pt.Score:
        return pt.Score(float("a" in response))


def test_a_task_of_a_program_is_given_to_evaluate_its_run() -> None:
    run = pt.grpo(task=Spoken(), **SMALL)
    with pytest.raises(
        pt.UserError, match=r"task is the class Spoken of a program, .*; give the task, as in evaluate\(Spoken\("
    ):
        run.evaluate(problems=2)
    assert run.evaluate(Spoken(), problems=2, max_new_tokens=2)["problems"] == 2


def test_tokens_are_spelled_before_a_model_is_saved() -> None:
    run = pt.rl(prompts=FOUR, reward=vowels, out="run", **{**SMALL, "steps": 2})
    next(run.steps())
    first = run.rollouts()[0]
    found = rollout_tokens(Reader(run.directory), "rl", 1, 0, first["length"], len(run.rollouts()))
    asked = f"<|user|>{first['question']}<|end|><|assistant|>"
    assert found is not None and "".join(found["text"]).startswith(asked + first["response"])
    assert show(run.directory, "rl/1/0")[1].startswith(f"s_0 = {asked} ")


def test_a_tokenizer_in_python_alone_samples_too() -> None:
    """It has no tokenizer.json: its tokens are shown as numbers."""
    from posttrain.models.tiny import tiny_model

    tokenizer = transformers.ByT5Tokenizer()
    how = {**SMALL, "model": (tiny_model(tokenizer, "nano", 0), tokenizer)}
    run = pt.grpo(prompts=FOUR, reward=vowels, **how)
    assert "s_0 = [" in show(run.directory, "rl/1/0")[1]


def test_steps_can_be_left_and_continued_and_looking_changes_nothing() -> None:
    how = {**SMALL, "steps": 4}
    pt.grpo(prompts=FOUR, reward=vowels, out="whole", **how)
    run = pt.rl(algorithm=pt.GRPO(group=4, beta=0.0), prompts=FOUR, reward=vowels, out="steps", **how)
    assert "not begun" in repr(run) and not Path("steps").exists()
    for figures in run.steps():
        if figures["step"] == 2:
            break
    before = run.model.state_dict()["model.embed_tokens.weight"].clone()
    assert [row["step"] for row in run.metrics] == [1, 2] and len(run.sample("one", n=2)) == 2
    assert next(run.steps())["step"] == 3
    assert not before.equal(run.model.state_dict()["model.embed_tokens.weight"]), "the policy as it is"
    assert [figures["step"] for figures in run.steps()] == [4] and "done" in repr(run)
    assert Path("steps/export/model.safetensors").read_bytes() == Path("whole/export/model.safetensors").read_bytes()


def test_a_result_of_an_untrained_run_trains_it_and_stop_ends_it_early() -> None:
    run = pt.rl(prompts=FOUR, reward=vowels, **SMALL)
    assert len(run.metrics) == 2
    run = pt.rl(prompts=FOUR, reward=vowels, **{**SMALL, "steps": 100})
    next(run.steps())
    assert run.stop().metrics[-1]["step"] == 1 and run.export.is_dir()
    early = pt.grpo(prompts=FOUR, reward=vowels, callback=lambda figures: figures["step"] < 2, **{**SMALL, "steps": 100})
    assert len(early.metrics) == 2 and early.result["steps"] == 2
    run = pt.rl(prompts=FOUR, reward=vowels, out="left", **SMALL)
    next(run.steps())
    thread = run._stepper._thread
    del run
    gc.collect()
    thread.join(30)
    assert not thread.is_alive(), "nobody can ask for another step"
    with pytest.warns(ResourceWarning, match=r"never begun: call \.train"):
        pt.rl(prompts=FOUR, reward=vowels, **SMALL).__del__()


def test_a_run_that_was_left_is_not_done_and_goes_on_where_it_was_loaded() -> None:
    how = {**SMALL, "steps": 3, "checkpoint_every": 1, "reward": "length"}
    whole = pt.rl(prompts=FOUR, out="whole", **how).train()
    run = pt.rl(prompts=FOUR, out="left", **how)
    next(run.steps())
    thread = run._stepper._thread
    del run
    gc.collect()
    thread.join(30)
    left = pt.load("left")
    assert isinstance(left, pt.Run) and "not ended" in repr(left) and "not ended" in repr(left.stop())
    assert left.train().metrics[-1]["step"] == 3 and "done" in repr(left) and "done" in repr(whole)
    assert Path("left/export/model.safetensors").read_bytes() == Path("whole/export/model.safetensors").read_bytes()
    with pytest.raises(pt.UserError, match="there is no run and no model nowhere"):
        pt.load("nowhere")


def test_an_error_in_the_thread_of_steps_is_raised_where_they_are_taken() -> None:
    run = pt.rl(prompts=FOUR, reward=lambda response: "good", **SMALL)
    with pytest.raises(
        pt.UserError, match=r"reward lambda \(test_rl.py line \d+\) returned str 'good' for the row prompts.jsonl:\d"
    ):
        next(run.steps())


def test_columns_reach_the_reward_and_held_out_reward_has_an_interval() -> None:
    rows = [{"prompt": f"say {n}", "wanted": chr(97 + n), "limit": n} for n in range(20)]
    asked: set[tuple[str, str, int]] = set()

    def reward(prompt: str, response: str, wanted: str, limit: int, other: int = 3) -> float:
        asked.add((prompt, wanted, limit))
        return 2.0 * (wanted in response) + other - 3

    run = pt.grpo(prompts=rows, reward=reward, held_out=4, **SMALL)
    assert asked and all(prompt == f"say {limit}" and wanted == chr(97 + limit) for prompt, wanted, limit in asked)
    last = run.metrics[-1]
    assert last["reward/test_low"] <= last["reward/test"] <= last["reward/test_high"] and "accuracy/test" not in last
    trained = {row["question"] for step in (1, 2) for row in run.rollouts(step)} if run.rollouts(1) else set()
    assert len(trained) <= 16


async def slow(prompts: list[str], completions: list[str], style: list[str], **columns: Any) -> list[float | None]:
    await asyncio.sleep(0)
    assert len(prompts) == len(completions) == len(style) == len(columns["answer"]) and set(style) == {"short"}
    return [None if len(c) > 5 else 1.0 for c in completions]


def test_a_reward_that_scores_none_of_the_held_out_prompts_is_said_to() -> None:
    def known(answer: str) -> float | None:
        return None

    said = r"rl: no answer to the 2 held-out problems could be scored \(.*known returned None\); fix it, or hold out"
    with pytest.raises(pt.UserError, match=said):
        pt.grpo(prompts=[{"prompt": text, "answer": ""} for text in FOUR], reward=known, **{**SMALL, "held_out": 2})


def test_rewards_in_lists_and_several_with_weights() -> None:
    rows = [{"prompt": text, "style": "short", "answer": [1, 2]} for text in FOUR]
    run = pt.grpo(prompts=rows, reward=[vowels, slow], weights=[1.0, 0.5], rollouts_every=1, **SMALL)
    for row in run.rollouts(1) + run.rollouts(2):
        short = {"slow": 1.0} if len(row["response"]) <= 5 else {}
        assert row["parts"] == {"vowels": vowels(row["response"]), **short}
        assert row["reward"] == pytest.approx(vowels(row["response"]) + 0.5 * len(short))
    none = pt.grpo(prompts=rows, reward=slow, rollouts_every=1, **{**SMALL, "monitor.failed": 1.0})
    kinds = {(row["reward"], row["failure"]) for row in none.rollouts(1)}
    assert kinds <= {(1.0, None), (None, "not scored: slow returned None")}


def test_an_exception_of_a_reward_names_the_line_of_the_users_file(tmp_path: Path) -> None:
    file = tmp_path / "mine_of_the_user.py"
    file.write_text("def helper(text):\n    return 1 / text.count('q')\n\ndef bad(response):\n    return helper(response)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        bad = importlib.import_module("mine_of_the_user").bad
    with pytest.raises(Exception, match="could not be scored|failed") as stopped:
        pt.grpo(prompts=FOUR, reward=bad, out="bad", **SMALL)
    assert type(stopped.value).__name__ in ("GuardStop", "UserError")
    assert f"ZeroDivisionError: division by zero at {file} line 2 (reward bad)" in Path("bad/events.jsonl").read_text()


def test_a_function_in_place_of_a_tasks_own_score() -> None:
    run = pt.grpo(task="arithmetic", reward=vowels, **SMALL)
    rows = run.rollouts(1)
    assert all(row["reward"] == vowels(row["response"]) and "task" in row["parts"] for row in rows)
    assert "accuracy/test" in run.metrics[-1], "that of the task"


def test_a_run_with_a_closure_says_so_and_goes_on_from_python_alone(capsys: pytest.CaptureFixture[str]) -> None:
    from posttrain import pipeline

    how = {**SMALL, "checkpoint_every": 1, "out": "closure"}

    def once(figures: dict[str, Any]) -> None:
        if figures["step"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pt.grpo(prompts=FOUR, reward=vowels, callback=once, **{**how, "steps": 3})
    line = "not resumable from its directory, which does not hold vowels (test_rl.py line "
    assert line in capsys.readouterr().out
    import posttrain.rewards._functions as functions

    known = dict(functions._given)
    functions._given.clear()  # as in another process
    with pytest.raises(pt.UserError, match="vowels .* is a function of another Python process") as refused:
        pipeline.resume(Path("closure"))
    assert "again=True" in str(refused.value)
    functions._given.update(known)
    run = pt.grpo(prompts=FOUR, reward=vowels, again=True, **{**how, "steps": 3})
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    assert [e.details["step"] for e in Reader("closure").events() if e.kind == "resume"] == [1]


def test_ppo_with_a_reward_model_and_a_rule(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [{"prompt": f"n{n}", "chosen": "a" * (1 + n % 3), "rejected": "zz" + "b" * (n % 3)} for n in range(30)]
    rm = pt.reward_model(model="tiny:nano", data=pairs, steps=6, batch=8, lr=3e-3, warmup=0, device="cpu", threads=1, members=2)
    assert rm.result["held_out"] == 3 and 0 <= rm.result["accuracy"][0] <= 1
    assert isinstance(rm.score("n1", "aa"), float)
    with pytest.raises(pt.UserError, match="reward model, which writes nothing"):
        rm.sample("n1")
    assert "posttrain sample" not in capsys.readouterr().out
    with pytest.raises(pt.UserError, match="is a reward model, no language model"):
        pt.sample(str(rm.directory), "n1")
    how = {key: value for key, value in SMALL.items() if key not in ("group", "beta")}
    run = pt.ppo(prompts=FOUR, reward=rm, held_out=2, **how)
    assert {"loss/value", "value/error"} <= run.metrics[-1].keys()
    assert "reward/test" in run.metrics[-1]
    mixed = pt.rl(algorithm="ppo", prompts=FOUR, reward={"rm": rm, "short": vowels}, weights={"rm": 0.5}, **{**how, "steps": 1})
    for row in mixed.train().rollouts(1):
        assert row["reward"] == pytest.approx(row["parts"]["rules"] + 0.5 * row["parts"]["rm"])
    with pytest.raises(pt.UserError, match="has trained a language model, not a reward model"):
        pt.ppo(prompts=FOUR, reward=run, **how)


def test_an_async_reward_may_keep_a_client_from_the_probe_to_the_last_step() -> None:
    """Such as openai.AsyncOpenAI() at the top of a file: its connections and locks belong to the loop that first used them."""
    first, calls = asyncio.Semaphore(1), []

    async def single(response: str) -> float:
        async with first:
            await asyncio.sleep(0)
            calls.append(asyncio.get_running_loop())
        return float(len(response))

    async def listed(prompts: list[str], completions: list[str]) -> list[float]:
        return list(await asyncio.gather(*map(single, completions)))

    pt.probe(single, prompts=FOUR)
    run = pt.grpo(prompts=FOUR, reward=[single, listed], **{**SMALL, "held_out": 2})
    assert [row["failed"] for row in run.metrics[1:]] == [0.0, 0.0] and len({*map(id, calls)}) == 1


def test_a_call_that_was_cancelled_within_a_reward_is_a_failure_of_that_response() -> None:
    async def cancelled(response: str) -> float:
        if response:
            raise asyncio.CancelledError
        return 0.0

    with pytest.raises(GuardStop, match="could not be scored: 8 CancelledError.*reward cancelled"):
        pt.grpo(prompts=FOUR, reward=cancelled, **SMALL, min_new_tokens=2)


def test_a_reward_that_was_changed_in_place_runs_again_and_one_that_moved_does_not() -> None:
    def called(source: str) -> list[float]:
        Path("mine.py").write_text(source)
        reward = runpy.run_path("mine.py")["rew"]
        run = pt.grpo(prompts=FOUR, reward=reward, **{**SMALL, "evaluate_every": 0}, out="mine", again=True)
        return [row["reward"] for row in run.metrics]

    one = "def rew(response): return 1.0 + len(response)"
    first, made = called(one), Path("mine/stages/rl/result.json")
    before = made.stat().st_mtime_ns
    assert called("# a comment\n\n" + one) == first and made.stat().st_mtime_ns == before
    assert called(one.replace("1.0", "-100.0"))[0] == first[0] - 101


def test_a_reward_with_state_keeps_what_was_done_with_it() -> None:
    class Counting:
        def __init__(self) -> None:
            self.calls, self.began = 0, time.time()

        def __call__(self, response: str) -> float:
            self.calls += 1
            return float(len(response))

    def noting() -> Any:
        seen: list[str] = []

        def reward(response: str) -> float:
            seen.append(response)
            return float(len(response))

        return reward

    how = {**SMALL, "evaluate_every": 0, "steps": 3, "checkpoint_every": 1, "again": True}
    for name, reward in (("object", Counting()), ("closure", noting())):
        steps: list[int] = []

        def stop(figures: dict[str, Any], steps: list[int] = steps) -> None:
            steps.append(figures["step"])
            if figures["step"] == 2 and len(steps) == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pt.grpo(prompts=FOUR, reward=reward, out=name, callback=stop, **how)
        pt.grpo(prompts=FOUR, reward=reward, out=name, callback=stop, **how)
        assert steps[:2] == [1, 2] and 1 not in steps[2:] and steps[-1] == 3, "it goes on from its checkpoint"
        pt.grpo(prompts=FOUR, reward=reward, out=name, callback=stop, **how)
        assert steps[-1] == 3 and steps.count(3) == 1, "and is kept when it is done"


def test_a_class_of_a_program_is_compared_by_its_code_and_named_as_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Also in a module with the name of a shipped algorithm, which a resume would otherwise take in its place."""
    source = (
        "import posttrain as pt\nfrom dataclasses import dataclass\n\n\n@dataclass(frozen=True, kw_only=True)\nclass Mine(pt.GRPO):\n"
        "    def advantages(self, step, mask_T, state):\n        return 1.0 * super().advantages(step, mask_T, state)\n"
    )
    how = {key: value for key, value in SMALL.items() if key not in ("group", "beta", "evaluate_every")}

    def called(source: str) -> list[float]:
        Path("grpo.py").write_text(source)
        sys.modules.pop("grpo", None)
        linecache.checkcache()
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(".")
            patch.setattr(sys, "dont_write_bytecode", True)
            mine = importlib.import_module("grpo").Mine(group=4, beta=0.0)
        run = pt.rl(algorithm=mine, prompts=FOUR, reward="length", min_new_tokens=1, out="mine", again=True, **how).train()
        return [row["grad_norm"] for row in run.metrics]

    first, made = called(source), Path("mine/stages/rl/result.json")
    assert "not resumable from its directory, which does not hold Mine;" in capsys.readouterr().out
    before = made.stat().st_mtime_ns
    assert called("# a comment\n" + source) == first and made.stat().st_mtime_ns == before
    assert called(source.replace("1.0 *", "3.0 *"))[0] == pytest.approx(3 * first[0])
    assert "runs again: its input python:Mine (code) has changed" in capsys.readouterr().out
    assert cli.main(["resume", "mine", "rl.steps=3", "--allow-code"]) == 2
    assert "the algorithm Mine is a class of another Python process" in capsys.readouterr().err


def test_a_module_with_other_weights_runs_again() -> None:
    from posttrain.models.tiny import character_tokenizer, tiny_model

    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))))
    module = tiny_model(tokenizer, "nano", seed=3)
    called = partial(pt.grpo, prompts=FOUR, reward="length", out="mine", again=True, **{**SMALL, "model": (module, tokenizer)})
    called()
    made = Path("mine/stages/rl/result.json")
    before = made.stat().st_mtime_ns
    called()
    assert made.stat().st_mtime_ns == before
    with torch.no_grad():
        next(module.parameters()).mul_(2.0)
    called()
    assert made.stat().st_mtime_ns > before
