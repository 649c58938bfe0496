"""What a stage says before it runs: memory worked out by hand for a small model, and the ways to save it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from material_for_tests import small_policy

from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ppo import PPO
from posttrain.models.lora import Lora
from posttrain.stages import _plan as plan
from posttrain.stages.reward_model import RewardModelStage
from posttrain.stages.reward_sources import RewardModels
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.train.memory import activation_bytes
from posttrain.train.optimizer import Optimization

POLICY = small_policy(dtype=torch.float32)
COUNT = POLICY.parameters
ADAPTERS = (
    16 * 2 * sum(sum(s) for s in [(16, 16), (16, 8), (16, 8), (16, 16), (16, 24), (16, 24), (24, 16)])
)  # rank 16, 2 layers
# two layers of width 16, feed-forward 24, two heads of 4 for keys and values; and the gradients of the one at work
LAYERS = 2 * (9 * 16 + 4 * 24 + 2 * 2 * 4) + 4 * (16 + 24)


def stage(**settings: Any) -> RLStage:
    return RLStage(name="rl", model="x", task=Arithmetic(), **settings)


def items(one: RLStage, rewards: float = 0.0, policy: Any = POLICY) -> dict[str, float]:
    return {name: size for name, size in plan.rl_memory(one, policy, 100, 7.0, rewards).sizes.items() if size}


def test_a_policy_alone() -> None:
    activations = 4.0 * 100 * LAYERS
    own = {"weights": 4.0 * COUNT, "gradients": 4.0 * COUNT, "optimizer": 8.0 * COUNT, "activations": activations}
    own |= {"logits": 8.0 * 100 * POLICY.model.config.vocab_size}
    assert items(stage(algorithm=GRPO(beta=0.0))) == own | {"key-value cache": 7.0}
    assert items(stage(algorithm=GRPO(beta=0.1)))["reference"] == 4.0 * COUNT
    assert items(stage(algorithm=GRPO(beta=0.0), watch_kl=True))["reference"] == 4.0 * COUNT


def test_each_process_that_samples_has_weights_of_its_own() -> None:
    two = {"sampler": "process", "sampler_processes": 2}
    assert "weights of the sampler" not in items(stage())
    assert items(stage(**two))["weights of the sampler"] == 2 * 4.0 * COUNT
    assert items(stage(**two, lora=Lora()))["weights of the sampler"] == 2 * 4.0 * (COUNT + ADAPTERS)


def test_all_models_of_ppo() -> None:
    """The critic has weights, gradients, two moments and activations of its own; the last not while the policy has its own, where
    one learns after the other."""
    found = items(stage(algorithm=PPO(), reward=RewardModels(models=("a", "b"))), rewards=1e6)
    assert found["reference"] == 4.0 * COUNT and found["reward models"] == 1e6
    assert found["critic"] == (4 + 4 + 8) * COUNT + 4.0 * 100 * LAYERS
    assert items(stage(algorithm=PPO(epochs=1)))["critic"] == (4 + 4 + 8) * COUNT
    assert items(stage(algorithm=PPO(epochs=1, critic_warmup=1)))["critic"] == found["critic"]


def test_models_on_the_cpu_cost_nothing_there() -> None:
    found = items(stage(algorithm=PPO(), reward=RewardModels(models=("a",), device="cpu"), reference_device="cpu"))
    assert "reference" not in found and "reward models" not in found


def test_lora_has_one_set_of_frozen_weights() -> None:
    found = items(stage(algorithm=PPO(), lora=Lora(rank=16)))
    assert found["weights"] == 4.0 * (COUNT + ADAPTERS)
    assert found["gradients"] == 4.0 * ADAPTERS and found["optimizer"] == 8.0 * ADAPTERS
    assert "reference" not in found
    assert found["critic"] == (4 + 4 + 8) * ADAPTERS + 4.0 * 100 * LAYERS
    assert items(stage(algorithm=PPO(), lora=Lora(), reference="y"))["reference"] == 4.0 * COUNT
    assert items(stage(algorithm=PPO(), lora=Lora(), critic="y"))["critic"] == found["critic"] + 4.0 * COUNT


def test_bfloat16_keeps_float32_masters_of_what_learns() -> None:
    half = small_policy(dtype=torch.bfloat16)
    found = items(stage(algorithm=GRPO(beta=0.1)), policy=half)
    assert found["weights"] == found["reference"] == 2.0 * COUNT and found["float32 master weights"] == 4.0 * COUNT


def test_each_way_to_save_is_priced() -> None:
    one = stage(algorithm=PPO(), reward=RewardModels(models=("a",)))
    (line,) = plan.savings(one, lambda other: plan.rl_memory(other, POLICY, 100, 7.0, plan.reward_bytes(other, POLICY, {})))
    lora = plan.rl_memory(one, POLICY, 100, 0, 0).total
    lora -= plan.rl_memory(stage(algorithm=PPO(), lora=Lora()), POLICY, 100, 0, 0).total
    assert f"rl.reference_device=cpu saves {plan.size_text(4.0 * COUNT)}" in line
    assert f"rl.reward.device=cpu saves {plan.size_text(4.0 * COUNT)}" in line
    assert ("rl.lora.rank=16" in line) == (
        lora > 0
    )  # on a model this small, adapters of rank 16 are larger than what they save
    assert "rl.release_cache=true saves 7.0 B" in line, "the cache, which gradients and activations outweigh"
    plain = stage(algorithm=GRPO(beta=0.0), lora=Lora(), release_cache=True)
    assert plan.savings(plain, lambda other: plan.rl_memory(other, POLICY, 100, 0.0, 0.0)) == []


def test_the_plan_says_that_generation_is_in_fp8() -> None:
    (line,) = stage(sampler_quantization="fp8").precision_lines()
    assert line.startswith("generation in fp8 (sampler_quantization=fp8): `mismatch` shows") and stage().precision_lines() == []


def test_a_run_that_samples_ahead_is_planned_without_giving_its_cache_back() -> None:
    ahead = stage(algorithm=GRPO(beta=0.0), lora=Lora(), sampler="process", max_staleness=1)
    assert plan.savings(ahead, lambda other: plan.rl_memory(other, POLICY, 100, 7.0, 0.0)) == []


def test_a_cache_that_is_given_back_counts_where_it_is_larger_than_what_follows_it() -> None:
    one = stage(algorithm=GRPO(beta=0.0), release_cache=True)
    kept = activation_bytes(POLICY, 100) + 4.0 * COUNT
    small, large = (plan.rl_memory(one, POLICY, 100, size, 0.0).sizes["key-value cache"] for size in (kept, kept + 9.0))
    assert small == 0.0 and large == 9.0


def test_checkpointing_is_chosen_and_priced() -> None:
    """By the memory at hand, which holds the weights already; as the setting says where it says so."""
    kept, least = (plan.size_text(activation_bytes(POLICY, 100, way)) for way in (False, True))
    price = f"; per layer, activations take {least} in place of {kept}, and training about a third longer"
    need = 5000.0

    def line(have: float | None, way: str = "auto") -> str:
        one = stage(optimizer=Optimization(checkpointing=way))
        return plan.checkpointing_line(one, POLICY, 100, plan.Way(100, have is not None and need > have, need, have))

    assert line(None) == "activation checkpointing: never on a CPU" + price
    assert line(6144.0) == "activation checkpointing: never, for 4.9 KiB are needed without and 6.0 KiB are at hand" + price
    assert line(4096.0) == "activation checkpointing: per layer, for 4.9 KiB are needed without and 4.0 KiB are at hand" + price
    assert line(4096.0, "never") == "activation checkpointing: never" + price
    one = stage(algorithm=GRPO(beta=0.0), optimizer=Optimization(checkpointing="layer"))
    assert plan.planned_way(one, POLICY, 100).layered
    layered = plan.rl_memory(one, POLICY, 100, 7.0, 0.0, layered=True).sizes
    assert layered["activations"] == activation_bytes(POLICY, 100, checkpointed=True)


def test_the_way_of_a_step_is_planned_by_the_memory_that_4_bits_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the trainer will choose it: by what is at hand once the weights are in 4 bits, with what learns counted as it is."""
    monkeypatch.setattr(plan.memory, "at_hand", lambda device: have)
    have = 1e9
    narrow = stage(lora=Lora(load_in_4bit=True))
    saved = -Lora(load_in_4bit=True).weight_bytes(POLICY.body, 4)
    assert plan.planned_way(narrow, POLICY, 10).have == have + saved
    free = plan.planned_way(stage(), POLICY, 10)
    assert free.tokens == 65536 and not free.layered and free.have == have
    have = free.need * 4096 / 65536
    short = plan.planned_way(stage(), POLICY, 10)
    assert short.tokens < 8192 and short.layered
    assert plan.planned_way(stage(optimizer=Optimization(token_budget=700)), POLICY, 10).tokens == 700


def test_reward_models_by_stage_and_by_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)

    trained = RewardModelStage(name="rm", model="x", data=("y.jsonl",), members=3)
    one = stage(algorithm=PPO(), reward=RewardModels(models=("rm", str(tmp_path))))
    assert plan.reward_bytes(one, POLICY, {"rm": trained}) == 3 * 4.0 * COUNT + 1000.0


def test_a_reference_that_moves_is_planned_with_weights_of_its_own() -> None:
    """No adapters are advised, on whose frozen weights it could not move; the mean of weights of 16 bits has 4 bytes each."""
    one = stage(reference_ema=0.9)
    (line,) = plan.savings(one, lambda other: plan.rl_memory(other, POLICY, 100, 7.0, 0.0))
    assert "reference_device=cpu" in line and "lora" not in line
    narrow = small_policy(dtype=torch.bfloat16)
    assert items(one)["reference"] == 4.0 * COUNT and items(one, policy=narrow)["reference"] == 6.0 * COUNT
    assert items(stage(reference_every=5), policy=narrow)["reference"] == 2.0 * COUNT
