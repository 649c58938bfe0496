"""A step computed again: to the bit, without a trace in the run, and with what moved the model in it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain import cli, config, pipeline
from posttrain.commands import replay_loop
from posttrain.commands.replay import Replay, lines, replay
from posttrain.errors import UserError
from posttrain.runs.lock import Lock
from posttrain.runs.read import Run
from posttrain.train.roles.critic import Critic

LETTERS = Path(__file__).parent.parent / "faults" / "letters.py"
OPTIMIZER = {"lr": 3e-3, "warmup": 2, "schedule": "cosine"}
RL = {"stage": "rl", "model": "sft", "steps": 5, "prompts": 2, "sampling": {"max_new_tokens": 6}, "optimizer": OPTIMIZER,
      "evaluate_every": 2, "evaluate_problems": 2, "checkpoint_every": 2, "rollouts_every": 2}  # fmt: skip
PPO = {"name": "ppo", "group": 2, "epochs": 2, "mini_batches": 2, "ptx": 0.5, "kl_target": 0.5}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of SFT, five of GRPO, two of PPO, two of PPO whose critic learns early, three of an ensemble of two reward
    models."""
    folder = tmp_path_factory.mktemp("work")
    shutil.copy(LETTERS, folder / "letters.py")
    task = {"name": f"{folder / 'letters.py'}:Letters", "workers": False}
    chance = random.Random(0)
    words = [["".join(chance.choices("xyz", k=6)) for _ in range(2)] for _ in range(12)]
    pairs = [{"prompt": f"say {n}", "chosen": max(two), "rejected": min(two)} for n, two in enumerate(words)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    rows = [{"prompt": f"say {n}", "completion": "abc"[: n % 3 + 1]} for n in range(12)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = [{"file": str(folder / "text.jsonl")}]
    sft = {"stage": "sft", "name": "sft", "model": "tiny:nano", "steps": 3, "batch": 3, "data": text, "optimizer": OPTIMIZER}
    grpo = {**RL, "name": "rl", "task": task, "algorithm": {"name": "grpo", "group": 3}}
    ppo = {**RL, "name": "ppo", "task": task, "steps": 2, "algorithm": PPO, "pretraining": text, "pretraining_batch": 2}
    once = {**RL, "name": "once", "task": task, "steps": 2, "algorithm": {"name": "ppo", "group": 2, "epochs": 1}}
    reward = {"stage": "reward_model", "name": "reward", "model": "sft", "steps": 2, "batch": 2, "members": 2,
              "optimizer": OPTIMIZER, "data": [str(folder / "pairs.jsonl")], "held_out": 0.0}  # fmt: skip
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"seed": 7, "device": "cpu", "threads": 1, "stages": [sft, grpo, ppo, once, reward]}))
    return pipeline.start(config.parse(str(recipe), [f"out={folder / 'run'}"], allow_code=True))


def found(run: Path, place: str, **more: Any) -> Replay:
    return replay(run, place, allow_code=True, **more)


def numbers(run: Path, place: str) -> list[int]:
    return [item.number for item in found(run, place, top=1).found.items]


def contents(run: Path) -> dict[str, str]:
    files = (path for path in sorted(run.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_step_is_computed_again_to_the_bit_and_the_run_is_unchanged(run: Path) -> None:
    before, said = contents(run), list[str]()
    made = found(run, "rl/5", without=2, say=said.append)
    assert contents(run) == before
    [row] = [row for row in Run(run).metrics("rl") if row.step == 5]
    assert (made.start, made.found.steps, made.found.difference) == (4, 1, None)
    assert made.found.compared >= len([n for n in row.figures if not n.startswith(("seconds", "tokens_per", "accuracy"))])
    assert made.found.grad_norm == pytest.approx(row.figures["grad_norm"], rel=1e-6)
    assert said[0] == "recomputes rl from the checkpoint step-4 to step 5: its 1 step took the run 0s"
    assert sum(item.share for item in made.found.items) == pytest.approx(1, abs=1e-5)
    shares = [abs(item.share) for item in made.found.items]
    assert shares == sorted(shares, reverse=True) and len(shares) == 6
    for item in made.found.items[:5]:
        assert sum(span.share for span in item.spans) == pytest.approx(item.share, abs=1e-5)


def test_what_a_critic_has_learned_early_is_learned_again_after_the_look(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in nothing else: the parts of the gradient, and the update without a rollout, are the policy's alone."""
    asked, plain = list[int](), Critic.outputs
    monkeypatch.setattr(Critic, "outputs", lambda role, piece: asked.append(piece.tokens) or plain(role, piece))
    first, second = (row.figures for row in Run(run).metrics("once") if row.step)
    assert second["grad_norm/critic"] > 0
    assert found(run, "once/2", without=1, top=1).found.difference is None
    assert sum(asked) == first["tokens"] + 2 * second["tokens"]


def test_the_numbers_of_rollouts_are_those_of_show(run: Path) -> None:
    made, rows = found(run, "rl/4", top=1), Run(run).rollouts("rl", 4)
    assert made.found.kind == "rollout" and made.start == 2
    for item in made.found.items:
        [member] = item.members
        assert (member.text, member.reward) == (rows[item.number].response, pytest.approx(rows[item.number].reward))
        assert member.advantage == pytest.approx(rows[item.number].advantage)


def test_a_figure_that_differs_is_named(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    shutil.copytree(run, other)
    text = (other / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in text]
    for row in rows:
        if (row["stage"], row["step"]) == ("rl", 3):
            row["grad_norm"] += 1e-9
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = found(other, "rl/4", top=1)
    assert made.found.difference is not None
    assert (made.found.difference.step, made.found.difference.figure) == (3, "grad_norm")
    assert any("rl/4, recomputed from step 2: NOT what the run did: grad_norm of step 3" in line for line in lines(made))


def test_without_checkpoints_it_begins_with_the_stage(run: Path, tmp_path: Path) -> None:
    other, said = tmp_path / "run", list[str]()
    shutil.copytree(run, other)
    shutil.rmtree(other / "checkpoints")
    made = found(other, "rl/3", top=1, say=said.append)
    assert (made.start, made.found.steps, made.found.difference) == (0, 3, None)
    assert "from its start to step 3 (no checkpoint at or before step 2 was kept): its 3 steps took" in said[0]


def test_the_update_without_a_rollout_begins_where_the_update_began(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out changes the update; where nothing is left out, it is the same to the bit: also in the first step, in which Adam
    has no moments, and with a critic and pretraining text."""
    made = found(run, "rl/1", without=1, top=1, answer="abc", prompt="say 3").found
    assert made.without is not None and made.without.number == 1
    assert made.without.distance > 0 and made.without.cosine < 1 and made.without.norm > 0
    members = {item.number: item.members[0] for item in made.items}
    own = members[1]
    assert own.without is not None and own.without != own.after and own.before != own.after
    assert made.answer is not None and made.answer.tokens > 3
    assert len({made.answer.before, made.answer.after, made.answer.without}) == 3
    monkeypatch.setattr(replay_loop, "gather", lambda batch, rest: batch)
    for place, number in (("rl/1", 1), ("ppo/1", numbers(run, "ppo/1")[0]), ("once/1", 1)):
        same = found(run, place, without=number, top=1).found.without
        assert same is not None and same.distance == 0.0 and same.cosine == pytest.approx(1)


def test_of_several_updates_one_is_shown(run: Path) -> None:
    first, second = (found(run, "ppo/2", update=update, top=1).found for update in (1, 2))
    assert first.difference is None and second.difference is None
    assert (first.update, second.update, first.updates) == (1, 2, 4)
    numbers = [{item.number for item in made.items} for made in (first, second)]
    assert numbers[0] | numbers[1] == {0, 1, 2, 3} and not numbers[0] & numbers[1], "each has its mini-batch"
    for made in (first, second):
        shares = sum(item.share for item in made.items) + made.additions["pretraining"]
        assert shares == pytest.approx(1, abs=1e-5) and made.additions["pretraining"] != 0


def test_examples_and_pairs_have_shares_too(run: Path) -> None:
    made = found(run, "sft/2", answer="0", without=1, top=1).found
    assert (made.kind, made.measure, made.difference) == ("example", "log-prob", None)
    assert {item.number for item in made.items} == {0, 1, 2} and made.items[0].members[0].prompt
    assert made.answer is not None and made.answer.text == {i.number: i for i in made.items}[0].members[0].text
    made = found(run, "reward-1/2", top=1).found
    assert (made.kind, made.measure, made.difference) == ("ranking", "score", None)
    assert [len(item.members) for item in made.items] == [2, 2]
    assert sum(item.share for item in made.items) == pytest.approx(1, abs=1e-5)


def test_the_command_prints_a_table_json_and_a_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["replay", str(run), "rl/5", "--allow-code", "--top", "2"]
    assert cli.main([*words, "--json", "--save", str(tmp_path / "found.json")]) == 0
    tree, saved = json.loads(capsys.readouterr().out), json.loads((tmp_path / "found.json").read_text())
    assert tree == saved and (tree["stage"], tree["step"]) == ("rl", 5)
    number = tree["found"]["items"][0]["number"]
    assert cli.main([*words, "--answer", str(number), "--without", str(number)]) == 0
    text = capsys.readouterr().out
    assert "are those of the run to the bit" in text and f"without rollout {number}: the weights move by" in text
    assert "log-prob of" in text and "rollouts by their share of the gradient" in text and "tokens by their share" in text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rl2/3"], "unknown stage with steps 'rl2'; did you mean 'rl'?"),
        (["rl/6"], "{run} has steps 1 to 5 of rl, not 6"),
        (["rl"], "'rl' is not STAGE/STEP, such as rl/5"),
        (["rl/0"], "{run} has steps 1 to 5 of rl, not 0"),
        (["rl/5", "--answer", "abc"], "--answer needs the --prompt that it answers, or is the number of a rollout of the step"),
        (["rl/5", "--prompt", "abc"], "--prompt needs the --answer whose log-prob is asked for"),
        (["rl/5", "--top", "0"], "--update and --top count from 1, not 1 and 0"),
        (["rl/5", "--without", "9"], "rl: --without 9: update 1 of step 5 trains on rollouts 0, 1, 2, 3, 4, 5"),
        (["rl/5", "--update", "2"], "rl: step 5 made 1 update: there is no update 2 to look at"),
    ],
)
def test_bad_input_is_one_line(run: Path, words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(run), *words, "--allow-code"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"posttrain: {line.format(run=run)}"


def test_a_stage_without_steps_is_named_as_such(run: Path) -> None:
    folder = run / "stages" / "after"
    folder.mkdir()
    (folder / "result.json").write_text("{}")
    try:
        with pytest.raises(UserError, match="^after has no steps; those that have: sft, rl"):
            replay(run, "after/1", allow_code=True)
    finally:
        (folder / "result.json").unlink()
        folder.rmdir()


def test_code_that_changed_is_refused(run: Path) -> None:
    file = run.parent / "letters.py"
    text = file.read_text()
    file.write_text(text + "\n# changed\n")
    try:
        with pytest.raises(
            UserError, match=r"^rl is not what the run trained: its input letters.py \(code\) has changed; put it"
        ):
            found(run, "rl/5")
    finally:
        file.write_text(text)


def test_a_live_run_and_one_of_another_version_are_refused(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    shutil.copytree(run, other)
    lock = Lock(other / "lock")
    try:
        with pytest.raises(UserError, match=f"is being written by process {os.getpid()}; replay it when"):
            found(other, "rl/5")
    finally:
        lock.release()
    tree = yaml.safe_load((other / "config.yaml").read_text())
    (other / "config.yaml").write_text(yaml.safe_dump({**tree, "format": 1}))
    with pytest.raises(UserError, match="was written by another version of posttrain"):
        found(other, "rl/5")


def test_a_stage_that_samples_ahead_is_refused(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    shutil.copytree(run, other)
    tree = yaml.safe_load((other / "config.yaml").read_text())
    for stage in tree["stages"]:
        if stage["name"] == "rl":
            stage |= {"max_staleness": 1, "sampler": "process"}
    (other / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError, match=r"^rl samples ahead \(max_staleness=1\)"):
        found(other, "rl/5")


def test_another_version_of_torch_is_said(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    shutil.copytree(run, other)
    summary = json.loads((other / "summary.json").read_text())
    summary["versions"]["torch"] = "1.0"
    (other / "summary.json").write_text(json.dumps(summary))
    [note] = found(other, "sft/1", top=1).notes
    assert note.startswith("the run was made with torch 1.0, here 2.")
