"""nanochat's loss in numbers worked out by hand, its reward, and the recipe in both sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from material_for_tests import assert_same_gradients, gradients, material, plain_batch, small_policy

from posttrain import cli
from posttrain.recipes.nanochat_rl import nanochat_loss, nanochat_rl
from posttrain.stages.rl import RLStage
from posttrain.tasks.gsm8k import Gsm8k
from posttrain.tasks.tool_use import ToolUse
from posttrain.train.forward import forward
from posttrain.train.pack import with_loss
from posttrain.types import Problem

ROWS = [
    {"question": f"Tom has {n} apples and buys {n}. How many?", "answer": f"<<{n}+{n}={2 * n}>>\n#### {2 * n}"}
    for n in range(12)
]


def test_a_token_weighs_its_reward_above_the_mean_of_its_group_over_all_tokens() -> None:
    """Rewards 1, 0, 0, 0 in responses of 1, 2, 1 and 4 tokens: A = 3/4 and -1/4, and each of the 8 tokens weighs 1/8. With log-probs of
    -1 the loss of nanochat is -(1/8) (3/4 (-1) - 1/4 (-2) - 1/4 (-1) - 1/4 (-4)) = -(1/8) (-3/4 + 7/4) = -1/8; the gradient of a
    log-prob is -A / 8."""
    prepared = nanochat_loss(4).prepare(plain_batch([1.0, 0.0, 0.0, 0.0], [0] * 4, [1, 2, 1, 4]), {})
    advantage_T, weight_T = prepared.advantage_T, prepared.weight_T
    sampled_T = weight_T != 0
    assert advantage_T[sampled_T].tolist() == pytest.approx([3 / 4] + [-1 / 4] * 7)
    assert weight_T[sampled_T].tolist() == pytest.approx([1 / 8] * 8)
    logprob_T = torch.full_like(advantage_T, -1.0)
    assert float(-(weight_T * advantage_T * logprob_T).sum()) == pytest.approx(-1 / 8)


def test_the_gradient_is_that_of_reinforce_without_a_ratio() -> None:
    """Where the sampler's log-probs are not the trainer's, a ratio would weigh tokens; nanochat has none."""
    ours, policy = nanochat_loss(4), small_policy()
    prepared = with_loss(ours.prepare(material(ours), {}))
    _, found = gradients(ours, prepared, policy=policy)
    _, ratio = gradients(replace(ours, correction="none"), prepared, policy=policy)
    logprob_T = forward(policy, prepared).logprob_T
    (-(prepared.weight_T * prepared.advantage_T * logprob_T).sum()).backward()
    plain = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    assert_same_gradients((0.0, plain), (0.0, found), 1e-7)
    assert any(not torch.allclose(ratio[name], gradient) for name, gradient in plain.items())


def test_the_reward_is_the_number_after_the_marker_and_nothing_else() -> None:
    task, problem = Gsm8k(style="marked"), Problem("p", "2+2?", "4")
    said = ["2+2=4\n#### 4", "#### 5", "It is 4.", r"\boxed{4}", "#### 4.0"]
    assert [task.score(problem, text).value for text in said] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert task.prompt(problem)[0].content.endswith("the final answer after ####.")
    assert task.score(problem, task.demonstration(problem)).value == 1.0


def test_both_sizes_have_the_same_loss_and_the_calculator() -> None:
    for recipe, group in ((nanochat_rl(), 16), (nanochat_rl("m", "d", group=4), 4)):
        (stage,) = (s for s in recipe.stages if isinstance(s, RLStage))
        assert stage.algorithm == nanochat_loss(group) and isinstance(stage.task, ToolUse)
        assert [type(tool).__name__ for tool in stage.task.tools] == ["Calculator"] and not stage.watch_kl


def test_the_toy_runs_and_the_real_size_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shorter = [
        "sft.steps=4",
        "steps=2",
        "prompts=2",
        "group=4",
        "problems=4",
        "rl.evaluate_every=0",
        "before.samples=1",
        "after.samples=1",
        "threads=1",
    ]
    assert cli.main(["run", "nanochat_rl", f"out={tmp_path / 'run'}", *shorter]) == 0
    assert "rl 2/2" in capsys.readouterr().out
    for split in ("train", "test"):
        rows = ROWS[:8] if split == "train" else ROWS[8:]
        (tmp_path / f"gsm8k-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tmp_path / "run" / "export"
    assert cli.main(["plan", "nanochat_rl", f"model={model}", f"data={tmp_path}"]) == 0
    assert "467" in capsys.readouterr().out
