"""What a run will need, worked out by hand for a small model: everyone on stage is priced, and so is each way to save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from material_for_tests import small_policy

from posttrain import config, plan
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ppo import PPO
from posttrain.models.lora import Lora
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic

POLICY = small_policy(dtype=torch.float32)
COUNT = POLICY.parameters
ADAPTERS = (
    16 * 2 * sum(sum(s) for s in [(16, 16), (16, 8), (16, 8), (16, 16), (16, 24), (16, 24), (24, 16)])
)  # rank 16, 2 layers
LAYER = 18 * 16 + 4 * 24 + 4 * 2 * 4  # width 16, feed-forward 24, two heads of 4 for keys and values


def stage(**settings: Any) -> RLStage:
    return RLStage(name="rl", model="x", task=Arithmetic(), **settings)


def items(one: RLStage, judges: float = 0.0, policy: Any = POLICY) -> dict[str, float]:
    return {name: size for name, size in plan.rl_memory(one, policy, 100, 7.0, judges).items if size}


def test_a_policy_alone() -> None:
    activations = 4.0 * 100 * 2 * LAYER
    own = {"weights": 4.0 * COUNT, "gradients": 4.0 * COUNT, "optimizer": 8.0 * COUNT, "activations": activations}
    assert items(stage(algorithm=GRPO(beta=0.0))) == own | {"key-value cache": 7.0}
    assert items(stage(algorithm=GRPO(beta=0.1)))["reference"] == 4.0 * COUNT
    assert items(stage(algorithm=GRPO(beta=0.0), watch_kl=True))["reference"] == 4.0 * COUNT


def test_everyone_of_ppo() -> None:
    """The critic has weights, gradients, two moments and activations of its own."""
    found = items(stage(algorithm=PPO(), reward_models=("a", "b")), judges=1e6)
    assert found["reference"] == 4.0 * COUNT and found["reward models"] == 1e6
    assert found["critic"] == (4 + 4 + 8) * COUNT + 4.0 * 100 * 2 * LAYER


def test_models_on_the_cpu_cost_nothing_there() -> None:
    found = items(stage(algorithm=PPO(), reward_models=("a",), reference_device="cpu", reward_device="cpu"), judges=1e6)
    assert "reference" not in found and "reward models" not in found


def test_lora_has_one_set_of_frozen_weights() -> None:
    found = items(stage(algorithm=PPO(), lora=Lora(rank=16)))
    assert found["weights"] == 4.0 * (COUNT + ADAPTERS)
    assert found["gradients"] == 4.0 * ADAPTERS and found["optimizer"] == 8.0 * ADAPTERS
    assert "reference" not in found
    assert found["critic"] == (4 + 4 + 8) * ADAPTERS + 4.0 * 100 * 2 * LAYER
    assert items(stage(algorithm=PPO(), lora=Lora(), reference="y"))["reference"] == 4.0 * COUNT
    assert items(stage(algorithm=PPO(), lora=Lora(), critic="y"))["critic"] == found["critic"] + 4.0 * COUNT


def test_bfloat16_keeps_float32_masters_of_what_learns() -> None:
    half = small_policy(dtype=torch.bfloat16)
    found = items(stage(algorithm=GRPO(beta=0.1)), policy=half)
    assert found["weights"] == found["reference"] == 2.0 * COUNT and found["float32 master weights"] == 4.0 * COUNT


def test_each_way_to_save_is_priced() -> None:
    one = stage(algorithm=PPO(), reward_models=("a",))
    (line,) = plan.choices(one, lambda other: plan.rl_memory(other, POLICY, 100, 7.0, 2048.0))
    lora = plan.rl_memory(one, POLICY, 100, 0, 0).total
    lora -= plan.rl_memory(stage(algorithm=PPO(), lora=Lora()), POLICY, 100, 0, 0).total
    assert f"rl.reference_device=cpu saves {plan.size_text(4.0 * COUNT)}" in line
    assert "rl.reward_device=cpu saves 2.0 KiB" in line
    assert ("rl.lora.rank=16" in line) == (
        lora > 0
    )  # on a model this small, adapters of rank 16 are larger than what they save
    plain = stage(algorithm=GRPO(beta=0.0), lora=Lora())
    assert plan.choices(plain, lambda other: plan.rl_memory(other, POLICY, 100, 7.0, 0.0)) == []


def test_reward_models_by_stage_and_by_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)

    class Judges:
        members = 3

    one = stage(algorithm=PPO(), reward_models=("rm", str(tmp_path)))
    assert plan.judge_bytes(one, POLICY, {"rm": Judges()}) == 3 * 4.0 * COUNT + 1000.0  # type: ignore[dict-item]


def test_the_plan_of_a_recipe_names_everyone() -> None:
    lines = "\n".join(
        plan.describe(config.parse("quickstart", ["rl.algorithm=ppo", "rl.reward_models=[sft]", "sft.lora.rank=2"]))
    )
    assert (
        "critic " in lines and "reward models " in lines and "to save memory on a GPU: rl.reference_device=cpu saves" in lines
    )


@pytest.mark.parametrize("rank", [1, 5])
def test_adapters_are_counted_as_they_are_made(rank: int) -> None:
    pytest.importorskip("peft")
    from posttrain.models.lora import add_adapters

    policy = small_policy()
    expected = Lora(rank=rank).parameters(policy.body)
    add_adapters(policy.model, Lora(rank=rank), 0)
    assert expected == sum(p.numel() for p in policy.model.parameters() if p.requires_grad)


def test_the_plan_of_rounds_follows_them_to_the_best() -> None:
    lines = plan.describe(config.parse("iterate", ["rounds=2"]))
    assert "  400 training problems, after those that mine_1 kept, x 4 answers; those solved at most 50% are kept" in lines
    assert "  keeps one of train_1, train_2, by accuracy" in lines
    assert lines[-2].strip().startswith("model best: ") and "1000 held-out problems" in lines[-1]
