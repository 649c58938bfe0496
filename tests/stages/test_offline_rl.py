"""Groups that were sampled before: read from two kinds of files, trained on without sampling, with and without log-probs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from posttrain import cli
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ppo import PPO
from posttrain.algorithms.remax import ReMax
from posttrain.errors import UserError
from posttrain.models.load import load
from posttrain.models.policy import Policy, wrap_model
from posttrain.models.save import save
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.runs.read import Run
from posttrain.stages.base import PRINTABLE
from posttrain.stages.offline_rl import OfflineRLStage, read_saved
from posttrain.train.forward import forward
from posttrain.train.pack import pack_groups

WORDS = ["cat", "dog", "fish", "bird", "cow", "pig", "hen", "fox"]
ROWS = [{"prompt": w, "responses": ["yes", "no", "no", "yes"], "rewards": [1, 0.0, 0, True]} for w in WORDS]


def write(folder: Path, rows: list[dict[str, Any]], name: str = "groups.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def go(folder: Path, stage: dict[str, Any], out: str) -> Path:
    path = folder / f"{out}.yaml"
    path.write_text(yaml.safe_dump({"stages": [stage]}))
    assert cli.main(["run", str(path), f"out={folder / out}", "device=cpu"]) == 0
    return folder / out


def stage(data: list[str], **changes: Any) -> dict[str, Any]:
    own = {"stage": "offline_rl", "name": "rl", "model": "tiny:nano", "data": data, "steps": 12, "batch": 8}
    return own | {"algorithm": {"name": "grpo", "beta": 0.0}, "optimizer": {"lr": 3e-3}} | changes


@pytest.fixture(scope="module")
def nano() -> Policy:
    tokenizer = character_tokenizer(PRINTABLE)
    return wrap_model(tiny_model(tokenizer, "nano", 0), tokenizer, (tokenizer.eos_token_id,), "tiny:nano")


def loaded(place: Path) -> Policy:
    found = load(str(place))
    return wrap_model(found.model, found.tokenizer, found.stop_ids, str(place))


def test_saved_groups_are_learned_without_sampling(tmp_path: Path, nano: Policy, capsys: pytest.CaptureFixture[str]) -> None:
    """'yes' is paid and 'no' is not. Without log-probs the run says that nothing corrects for who wrote them."""
    run = go(tmp_path, stage([write(tmp_path, ROWS)]), "run")
    assert "importance ratio 1, no off-policy correction" in " ".join(capsys.readouterr().out.split())
    result = json.loads((run / "stages" / "rl" / "result.json").read_text())
    assert (result["steps"], result["trained_on"], result["logprobs_known"]) == (12, 8, False)

    def margin(policy: Policy) -> float:
        batch = pack_groups(read_saved(str(tmp_path / "groups.jsonl"), policy.tokenizer, 99, 1.0).groups, 1.0)
        with torch.no_grad():
            logprob_T = forward(policy, batch).logprob_T.where(batch.mask_T, 0.0)
        sum_N = torch.zeros(batch.sequences).index_add(0, batch.sequence_T, logprob_T)
        return float((sum_N * (batch.reward_N - 0.5)).mean())

    assert margin(loaded(run / "export")) > margin(nano) + 1.0
    rows = Run(run).metrics("rl")
    assert [row.figures["reward"] for row in rows] == [0.5] * 12 and rows[0].figures["clip_fraction"] == 0.0
    assert rows[0].figures["mismatch/stale"] == 0.0, "each is taken for the policy's own"


def test_the_rollouts_of_a_run_are_read_with_their_tokens_and_log_probs(tmp_path: Path, nano: Policy) -> None:
    """The model that sampled the first step gives its tokens the saved log-probs: the run is trained on again, as it was sampled."""
    save(nano.model, nano.tokenizer, tmp_path / "nano")
    own = {
        "stage": "rl",
        "name": "rl",
        "model": str(tmp_path / "nano"),
        "task": {"name": "arithmetic"},
        "steps": 1,
        "prompts": 4,
    }
    own |= {"sampling": {"max_new_tokens": 6}, "algorithm": {"name": "grpo", "beta": 0.0, "group": 4}, "evaluate_every": 0}
    first = go(tmp_path, own | {"rollouts_every": 1}, "first")
    file = first / "rollouts" / "rl" / "step-000001.jsonl"
    rows = Run(first).rollouts("rl", 1)
    grpo = {"name": "grpo", "beta": 0.0, "entropy": 0.01, "correction": "decoupled", "mask_low": 0.5, "mask_high": 5.0}
    run = go(tmp_path, stage([str(file)], steps=2, batch=4, algorithm=grpo, model=str(tmp_path / "nano")), "again")
    result = json.loads((run / "stages" / "rl" / "result.json").read_text())
    figures = Run(run).metrics("rl")[0].figures
    assert result["logprobs_known"] and result["trained_on"] == 4 and figures["tokens"] > sum(row.length for row in rows)
    assert figures["mismatch/stale"] < 1e-4 and figures["correction"] == pytest.approx(1.0, abs=1e-3) and figures["masked"] == 0
    file.with_suffix(".safetensors").unlink()
    with pytest.raises(UserError, match="the run has not kept the tokens of this step"):
        read_saved(str(file), character_tokenizer(PRINTABLE), 99, 1.0)
    with pytest.raises(UserError, match=r"was sampled at temperature 1\.0, and temperature is 0\.7; set temperature=1\.0"):
        read_saved(str(file), character_tokenizer(PRINTABLE), 99, 0.7)


def test_log_probs_and_tokens_are_taken_as_they_are_given(tmp_path: Path, nano: Policy) -> None:
    row = {"prompt": "cat", "responses": ["yes", "no"], "rewards": [1, None], "response_ids": [[5, 6, 7], [8]]}
    saved = read_saved(write(tmp_path, [row | {"logprobs": [[-1, -2, -3], [-0.5]]}]), nano.tokenizer, 99, 1.0)
    yes, no = saved.groups[0].rollouts
    assert (yes.response, no.response) == ("yes", "no")
    assert saved.known and yes.segments[1].ids.tolist() == [5, 6, 7] and no.segments[1].logprobs is not None
    assert np.allclose(no.segments[1].logprobs, [-0.5]) and not no.score.valid and yes.score.value == 1.0
    assert not read_saved(write(tmp_path, ROWS), nano.tokenizer, 99, 1.0).known
    short = read_saved(write(tmp_path, [ROWS[0] | {"responses": ["yes", "n" * 50, "no", "no"]}]), nano.tokenizer, 30, 1.0)
    assert short.too_long == 1 and "1 response left out: longer than max_length" in short.lines()


BAD = [
    ({"prompt": "a", "responses": ["b"]}, "line 1: no rewards; a row has prompt, responses"),
    ({"prompt": "a", "responses": ["b"], "rewards": [1, 2]}, "line 1: rewards must be a list, one entry for each"),
    ({"prompt": "a", "responses": "b", "rewards": [1]}, "line 1: responses must be a list"),
    ({"prompt": "a", "responses": [3], "rewards": [1]}, "line 1: response 1 must be text, not int"),
    ({"prompt": "a", "responses": ["b"], "rewards": ["good"]}, "line 1: response 1: a reward must be a number, not str"),
    ({"prompt": "a", "responses": ["b"], "rewards": [float("nan")]}, "line 1"),
    (
        {"prompt": "a", "responses": ["b"], "rewards": [1], "logprobs": [[-1] * 9]},
        "line 1: response 1: 9 logprobs for . tokens",
    ),
    ({"prompt": "a", "responses": ["b"], "rewards": [1], "logprobs": ["x"]}, "response 1: logprobs must be a list of numbers"),
    (
        {"prompt": "a", "responses": ["b"], "rewards": [1], "response_ids": [[10**6]]},
        "response_ids has a token that the tokenizer",
    ),
    ({"problem": "a", "response": "b", "reward": 1}, "give RUN/rollouts/STAGE/step-N.jsonl"),
]


@pytest.mark.parametrize(("row", "words"), BAD)
def test_rows_that_cannot_be_read_are_refused_by_line(row: dict[str, Any], words: str, tmp_path: Path, nano: Policy) -> None:
    with pytest.raises(UserError, match=words):
        read_saved(write(tmp_path, [row]), nano.tokenizer, 99, 1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": ()}, "rl: give at least one JSONL file of saved groups as data"),
        ({"algorithm": ReMax()}, "remax compares with an answer that is sampled in another way"),
        ({"algorithm": PPO()}, "ppo asks for the role critic, which this stage does not build"),
        ({"algorithm": GRPO(supervision="process")}, "supervision=process needs the values of steps"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        OfflineRLStage(**({"name": "rl", "model": "tiny:nano", "data": ("x.jsonl",)} | changes))
