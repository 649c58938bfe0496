"""What a run will need, worked out by hand for a small model: everyone on stage is priced, and so is each way to save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from material_for_tests import small_policy
from scripts_for_tests import load_script

from posttrain import cli, config
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ppo import PPO
from posttrain.commands import plan
from posttrain.errors import UserError
from posttrain.models.lora import Lora
from posttrain.models.save import save
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.stages.reward_sources import RewardModels
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
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


def items(one: RLStage, judges: float = 0.0, policy: Any = POLICY) -> dict[str, float]:
    return {name: size for name, size in plan.rl_memory(one, policy, 100, 7.0, judges).items if size}


def test_a_policy_alone() -> None:
    activations = 4.0 * 100 * LAYERS
    own = {"weights": 4.0 * COUNT, "gradients": 4.0 * COUNT, "optimizer": 8.0 * COUNT, "activations": activations}
    own |= {"logits": 8.0 * 100 * POLICY.model.config.vocab_size}
    assert items(stage(algorithm=GRPO(beta=0.0))) == own | {"key-value cache": 7.0}
    assert items(stage(algorithm=GRPO(beta=0.1)))["reference"] == 4.0 * COUNT
    assert items(stage(algorithm=GRPO(beta=0.0), watch_kl=True))["reference"] == 4.0 * COUNT


def test_everyone_of_ppo() -> None:
    """The critic has weights, gradients, two moments and activations of its own."""
    found = items(stage(algorithm=PPO(), reward=RewardModels(models=("a", "b"))), judges=1e6)
    assert found["reference"] == 4.0 * COUNT and found["reward models"] == 1e6
    assert found["critic"] == (4 + 4 + 8) * COUNT + 4.0 * 100 * LAYERS


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
    (line,) = plan.choices(one, lambda other: plan.rl_memory(other, POLICY, 100, 7.0, plan.judge_bytes(other, POLICY, {})))
    lora = plan.rl_memory(one, POLICY, 100, 0, 0).total
    lora -= plan.rl_memory(stage(algorithm=PPO(), lora=Lora()), POLICY, 100, 0, 0).total
    assert f"rl.reference_device=cpu saves {plan.size_text(4.0 * COUNT)}" in line
    assert f"rl.reward.device=cpu saves {plan.size_text(4.0 * COUNT)}" in line
    assert ("rl.lora.rank=16" in line) == (
        lora > 0
    )  # on a model this small, adapters of rank 16 are larger than what they save
    assert "rl.release_cache=true saves 7.0 B" in line, "the cache, which gradients and activations outweigh"
    plain = stage(algorithm=GRPO(beta=0.0), lora=Lora(), release_cache=True)
    assert plan.choices(plain, lambda other: plan.rl_memory(other, POLICY, 100, 0.0, 0.0)) == []


def test_a_cache_that_is_given_back_counts_where_it_is_larger_than_what_follows_it() -> None:
    one = stage(algorithm=GRPO(beta=0.0), release_cache=True)
    kept = plan.activation_bytes(POLICY, 100) + 4.0 * COUNT
    small, large = (dict(plan.rl_memory(one, POLICY, 100, size, 0.0).items)["key-value cache"] for size in (kept, kept + 9.0))
    assert small == 0.0 and large == 9.0


def test_checkpointing_is_chosen_and_priced() -> None:
    """By the memory at hand, which holds the weights already; as the setting says where it says so."""
    kept, least = (plan.size_text(plan.activation_bytes(POLICY, 100, way)) for way in (False, True))
    price = f"; per layer, activations take {least} in place of {kept}, and training about a third longer"
    need = 5000.0

    def line(have: float | None, way: str = "auto") -> str:
        one = stage(optimizer=Optimization(checkpointing=way))
        (found,) = plan.checkpointing_lines(one, POLICY, 100, need + 4.0 * COUNT, have)
        return found

    assert line(None) == "activation checkpointing: never on a CPU" + price
    assert line(6144.0) == "activation checkpointing: never, for 4.9 KiB are needed and 6.0 KiB are at hand" + price
    assert line(4096.0) == "activation checkpointing: per layer, for 4.9 KiB are needed and 4.0 KiB are at hand" + price
    assert line(4096.0, "never") == "activation checkpointing: never" + price
    layered = items(stage(algorithm=GRPO(beta=0.0), optimizer=Optimization(checkpointing="layer")))
    assert layered["activations"] == plan.activation_bytes(POLICY, 100, checkpointed=True)


def test_reward_models_by_stage_and_by_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)

    class Judges:
        members = 3

    one = stage(algorithm=PPO(), reward=RewardModels(models=("rm", str(tmp_path))))
    assert plan.judge_bytes(one, POLICY, {"rm": Judges()}) == 3 * 4.0 * COUNT + 1000.0  # type: ignore[dict-item]


def test_the_plan_of_a_recipe_names_everyone() -> None:
    lines = "\n".join(
        plan.describe(
            config.parse("quickstart", ["rl.algorithm=ppo", "rl.reward=models", "rl.reward.models=[sft]", "sft.lora.rank=2"])
        )
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


def test_stages_that_learn_from_preferences_count_their_data(tmp_path: Path) -> None:
    rows = [{"prompt": f"say {n}", "chosen": "zzz" if n < 40 else "z" * 3000, "rejected": "xyx"} for n in range(41)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "stages": [
            {"stage": "preference", "name": "dpo", "model": "tiny:nano", "data": [str(tmp_path / "pairs.jsonl")], "steps": 9,
             "batch": 4, "held_out": 0.1},
            {"stage": "reward_model", "name": "reward", "model": "tiny:nano", "data": ["dpo"], "members": 2},
        ]
    }  # fmt: skip
    lines = "\n".join(plan.describe(config.from_config(tree, "x")))
    assert "a step: 4 of 40 units" in lines and "9 steps = 1.0 passes over what is not held out" in lines
    assert "40 of 41" in lines, "the one that is too long is counted"
    assert "reference " in lines
    assert "preferences written by dpo: not there yet" in lines and "steps, 2 times over" in lines


def other_model(folder: Path) -> str:
    tokenizer = character_tokenizer("0123456789abc")
    return str(save(tiny_model(tokenizer, "nano", 0), tokenizer, folder))


@pytest.mark.parametrize(
    "stage",
    [
        {"stage": "rl", "task": {"name": "arithmetic"}, "algorithm": {"name": "grpo", "beta": 0.1}, "reference": "OTHER"},
        {"stage": "rl", "task": {"name": "arithmetic"}, "algorithm": {"name": "ppo"}, "critic": "OTHER"},
        {"stage": "rl", "task": {"name": "arithmetic"}, "reward": {"name": "models", "models": ["OTHER"]}},
        {"stage": "preference", "data": ["pairs.jsonl"], "reference": "OTHER"},
        {"stage": "evaluate", "task": {"name": "arithmetic"}, "reference": "OTHER", "sampling": {"temperature": 1.0}},
    ],
    ids=["reference", "critic", "reward model", "preference", "evaluation"],
)
def test_a_model_with_another_vocabulary_is_refused_before_the_run(stage: dict[str, Any], tmp_path: Path) -> None:
    """As the run itself would, but perhaps hours earlier."""
    tree = json.loads(
        json.dumps({"name": "one", "model": "tiny:nano", **stage}).replace("OTHER", other_model(tmp_path / "other"))
    )
    with pytest.raises(UserError, match=r"one: .*other has another vocabulary than tiny:nano .* use models of one family"):
        plan.describe(config.from_config({"stages": [tree]}, "test"))


def test_a_judge_may_have_another_vocabulary(tmp_path: Path) -> None:
    tree = {"stage": "rl", "name": "one", "model": "tiny:nano", "task": {"name": "arithmetic"},
            "reward": {"name": "judge", "model": other_model(tmp_path / "other")}}  # fmt: skip
    assert plan.describe(config.from_config({"stages": [tree]}, "test"))


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="plans for a GPU that is not there")


def saved_model(folder: Path) -> str:
    """A Llama with heads of 8 in a directory: on CUDA it is loaded in bfloat16 and takes the fused pass."""
    tokenizer = character_tokenizer(Arithmetic().alphabet)
    model = small_policy(dtype=torch.float32, vocab_size=len(tokenizer), hidden_size=32).model
    return str(save(model, tokenizer, folder))


@NO_GPU
def test_a_gpu_that_is_not_there_is_priced_as_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command: weights of 2 bytes with float32 masters, the fused pass's activations, chunks of logits, and all rows at once."""
    recipe = tmp_path / "recipe.yaml"
    stage = {"stage": "rl", "name": "rl", "model": saved_model(tmp_path / "model"), "task": {"name": "arithmetic"}, "steps": 9,
             "prompts": 64, "algorithm": {"name": "grpo", "group": 8, "beta": 0.1}, "sampling": {"max_new_tokens": 20}}  # fmt: skip
    recipe.write_text(json.dumps({"stages": [stage]}))
    assert cli.main(["plan", str(recipe), "device=cuda"]) == 0
    text = capsys.readouterr().out
    count = small_policy(vocab_size=len(character_tokenizer(Arithmetic().alphabet)), hidden_size=32).parameters
    one = config.parse(str(recipe), []).recipe.stages[0]
    assert isinstance(one, RLStage)
    longest = one.longest(character_tokenizer(Arithmetic().alphabet))
    tokens = round((longest + 7 * 20) / (8 * longest) * min(one.optimizer.token_budget, 512 * longest))
    vocabulary = len(character_tokenizer(Arithmetic().alphabet))
    expected = {
        "weights": 2.0 * count,
        "gradients": 4.0 * count,
        "float32 master weights": 4.0 * count,
        "optimizer": 8.0 * count,
        "activations": 2.0 * tokens * 2 * (6 * 32 + 3 * 24 + 2 * 2 * 8),
        "logits": 6.0 * tokens * vocabulary,
        "key-value cache": 2.0 * 512 * longest * 2 * 8 * 2 * 2,
        "reference": 2.0 * count,
    }
    assert f"model {stage['model']}: {count:,} parameters, bfloat16" in text
    assert ", ".join(f"{name} {plan.size_text(size)}" for name, size in expected.items()) in text
    assert "activation checkpointing: chosen by the memory of the GPU, which is not here" in text and "CPU;" not in text
    assert cli.main(["plan", str(recipe), "device=cpu"]) == 0
    assert "float32" in (plain := capsys.readouterr().out) and "never on a CPU" in plain and "master" not in plain


@NO_GPU
def test_what_the_fused_pass_would_refuse_is_priced_by_the_module(tmp_path: Path) -> None:
    """Heads of 4 are too narrow for its kernel; and a tiny model stays in float32 on any device."""
    narrow = small_policy(dtype=torch.bfloat16)
    planned = plan.Elsewhere(narrow.model, None, narrow.stop_ids)
    assert planned.device.type == "cuda" and plan.activation_bytes(planned, 100) == 2.0 * 100 * LAYERS
    lines = "\n".join(plan.describe(config.parse("quickstart", ["device=cuda"])))
    assert "parameters, float32" in lines and "master" not in lines


@NO_GPU
def test_dry_steps_need_the_device() -> None:
    with pytest.raises(UserError, match="device=cuda: dry steps run on the device, and torch sees no CUDA device here"):
        plan.describe(config.parse("quickstart", ["device=cuda"]), dry=True)


def test_the_benchmark_reads_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/plan_accuracy.py takes both figures from the lines of `describe`, which the command prints."""
    script, asked = load_script("benchmarks/plan_accuracy.py"), []

    def describe(settings: config.Settings, dry: bool = False) -> list[str]:
        asked.append((settings.device, settings.threads, dry, settings.recipe.stages))
        return ["", "  memory: about 1.5 MiB (weights 1.5 MiB)", "", SAID.format(times.pop(0))]

    monkeypatch.setattr(plan, "describe", describe)
    stage = script.stage_of("sft", "cuda", "tiny:nano", 2)
    times = ["2.25s", "59.9s", "1m40s", "2h03m", "1d02h"]
    for seconds in (2.25, 59.9, 100, 7380, 93600):
        assert script.planned(stage, "cuda") == (seconds, 1.5 * 2**20, "memory: about 1.5 MiB (weights 1.5 MiB)")
    assert asked == [("cuda", 0, True, (stage,))] * 5


SAID = "the whole run: about {}, at most 3m00s where every response reaches its limit, by dry steps on this machine"
