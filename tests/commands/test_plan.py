"""What a run will need, worked out by hand for a small model: all models are priced."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from material_for_tests import small_mixture, small_policy
from scripts_for_tests import load_script

from posttrain import cli, config
from posttrain.algorithms.grpo import GRPO
from posttrain.commands import plan
from posttrain.errors import UserError
from posttrain.models.lora import Lora
from posttrain.models.policy import wrap_model
from posttrain.models.save import save
from posttrain.models.scorer import from_policy
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.runs.write import RunWriter
from posttrain.stages._plan import planned_way, size_text
from posttrain.stages.base import Context, load_policy
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.train.memory import activation_bytes, weight_bytes

LAYERS = 2 * (9 * 16 + 4 * 24 + 2 * 2 * 4) + 4 * (16 + 24)  # as in tests/stages/test_plan.py


def test_the_plan_of_a_recipe_names_everyone(tmp_path: Path) -> None:
    first = config.parse("quickstart", []).recipe.stages[0]
    tokenizer = character_tokenizer(first.alphabet())
    scorer = other_model(tmp_path / "scorer", tokenizer, scores=True)
    settings = ["rl.algorithm=ppo", "rl.reward=models", f"rl.reward.models=[{scorer}]", "sft.lora.rank=2"]
    lines = "\n".join(plan.describe(config.parse("quickstart", settings)))
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
    asked = "  400 training problems, after those that mine_1 kept, x 4 answers"
    assert f"{asked}; those solved at most 50% are kept, at least 200" in lines
    assert "  keeps one of train_1, train_2, by accuracy" in lines
    assert lines[-2].strip().startswith("model best: ") and "1,000 held-out problems x 1 = 1,000 answers" in lines[-1]


def test_sources_by_weight_and_the_problems_that_there_are(tmp_path: Path) -> None:
    """A source that has 1 row in 21 and 3 draws in 4; and a task with fewer held-out problems than asked for."""
    texts = {"short": ["a"] * 20, "long": ["b" * 100]}
    for name, own in texts.items():
        (tmp_path / name).with_suffix(".jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in own))
    sources = [{"file": str(tmp_path / "short.jsonl"), "weight": 1}, {"file": str(tmp_path / "long.jsonl"), "weight": 3}]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"question": f"{n}", "answer": "1"}) + "\n" for n in range(10)))
    task = {"name": "jsonl", "file": str(tmp_path / "q.jsonl"), "held_out": 0.3}
    tree = {
        "stages": [
            {"stage": "sft", "name": "sft", "model": "tiny:nano", "data": sources, "steps": 2, "batch": 4},
            {"stage": "evaluate", "name": "after", "model": "sft", "task": task},
        ]
    }
    lines = "\n".join(plan.describe(config.from_config(tree, "x")))
    lengths = [int(n) for n in re.findall(r"lengths: median (\d+)", lines)]
    assert f"a step: 4 examples, about {lengths[0] + 3 * lengths[1]} tokens; 2 steps = 0.4 passes over 21 examples" in lines
    held_out = int(re.findall(r"(\d+) held-out problems", lines)[0])
    assert 1 <= held_out < 10 and f"{held_out} held-out problems x 1 = {held_out} answers" in lines


def test_stages_that_learn_from_preferences_count_their_data(tmp_path: Path) -> None:
    rows = [{"prompt": f"say {n}", "chosen": "zzz" if n < 40 else "z" * 3000, "rejected": "xyx"} for n in range(41)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "stages": [
            {"stage": "preference", "name": "dpo", "model": "tiny:nano", "data": [str(tmp_path / "pairs.jsonl")], "steps": 9,
             "batch": 4, "held_out": 0.1},
            {"stage": "comparisons", "name": "compared", "model": "dpo", "task": {"name": "arithmetic"}},
            {"stage": "reward_model", "name": "reward", "model": "tiny:nano", "data": ["compared"], "members": 2},
        ]
    }  # fmt: skip
    lines = "\n".join(plan.describe(config.from_config(tree, "x")))
    assert "a step: 4 of 40 units" in lines and "9 steps = 1.0 passes over 36 that are not held out" in lines
    assert "40 of 41" in lines, "the one that is too long is counted"
    assert "reference " in lines
    assert "preferences written by compared: not there yet" in lines and "steps, 2 times over" in lines


def other_model(folder: Path, tokenizer: Any = None, scores: bool = False) -> str:
    tokenizer = tokenizer or character_tokenizer("0123456789abc")
    model = tiny_model(tokenizer, "nano", 0)
    made = from_policy(wrap_model(model, tokenizer, ())).model if scores else model
    return str(save(made, tokenizer, folder))


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
    other = other_model(tmp_path / "other", scores="critic" in stage or "reward" in stage)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}))
    text = json.dumps({"name": "one", "model": "tiny:nano", **stage})
    tree = json.loads(text.replace("OTHER", other).replace("pairs.jsonl", str(pairs)))
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
    rows = one.optimizer.plain_budget // longest  # of a micro-batch, in groups of 8
    tokens = -(-rows // 8) * (longest - 20) + rows * 20
    vocabulary = len(character_tokenizer(Arithmetic().alphabet))
    expected = {
        "weights": 2.0 * count,
        "gradients": 4.0 * count,
        "float32 master weights": 4.0 * count,
        "optimizer": 8.0 * count,
        "activations": 2.0 * tokens * 2 * (6 * 32 + 3 * 24 + 2 * 2 * 8),
        "logits": 6.0 * rows * 20 * vocabulary + 6.0 * vocabulary * 32,  # and the gradient of the head
        "key-value cache": 2.0 * (512 * 20 + 64 * (longest - 20)) * 2 * 8 * 2 * 2,  # a prompt once a group
        "reference": 2.0 * count,
        "weights of the sampler": 2.0 * 2 * 32 * (32 + 2 * 2 * 8 + 2 * 24),  # what the engine copies side by side
    }
    assert f"model {stage['model']}: {count:,} parameters, bfloat16" in text
    assert ", ".join(f"{name} {size_text(size)}" for name, size in expected.items()) in text
    assert "activation checkpointing: chosen by the memory of the GPU, which is not here" in text and "CPU;" not in text
    assert "of up to 8192 tokens, or more by the memory of the GPU, which is not here (this changes memory" in text
    assert cli.main(["plan", str(recipe), "device=cpu"]) == 0
    assert "float32" in (plain := capsys.readouterr().out) and "never on a CPU" in plain and "master" not in plain


@NO_GPU
def test_what_the_fused_pass_would_refuse_is_priced_by_the_module(tmp_path: Path) -> None:
    """Heads of 4 are too narrow for its kernel."""
    narrow = small_policy(dtype=torch.bfloat16)
    planned = plan.Elsewhere(narrow.model, None, narrow.stop_ids)
    assert planned.device.type == "cuda" and activation_bytes(planned, 100) == 2.0 * 100 * LAYERS


@NO_GPU
def test_a_tiny_model_has_the_precision_of_the_device_in_its_first_stage_too(tmp_path: Path) -> None:
    """The second stage loads what the first has saved as it loads any other model."""
    lines = "\n".join(plan.describe(config.parse("quickstart", ["device=cuda"])))
    assert "parameters, bfloat16" in lines and "float32 master weights" in lines
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        with RunWriter(tmp_path / device, config={}) as writer:
            context = Context(writer, 0, device, say=False)
            first = load_policy("tiny:nano", context, place="cpu")
            context.save_model("first", first)
            assert first.dtype == load_policy("first", context, place="cpu").dtype == dtype


@NO_GPU
def test_a_gpu_need_not_hold_in_full_what_it_will_have_in_4_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A plan reads such a model into host memory, and counts what the GPU will have of it."""
    pytest.importorskip("peft")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    lora = Lora(rank=2, load_in_4bit=True)
    one = RLStage(name="rl", model="tiny:nano", task=Arithmetic(), lora=lora, algorithm=GRPO(beta=0.0))
    with RunWriter(tmp_path / "run", config={}) as writer:
        policy = plan.load_priced(one, Context(writer, 0, "cuda", say=False))
    assert policy.device.type == "cuda" and policy.model.device.type == "cpu"
    monkeypatch.setattr("posttrain.stages._plan.memory.at_hand", lambda device: 1e9)
    monkeypatch.setattr("posttrain.stages._plan.memory.step_bytes", lambda *given: 0.0)
    has = weight_bytes(policy) + lora.weight_bytes(policy.body, policy.dtype.itemsize)
    assert planned_way(one, policy, 10).have == 1e9 - has and has < weight_bytes(policy)


@NO_GPU
def test_a_dry_run_needs_the_device() -> None:
    with pytest.raises(UserError, match="device=cuda: a dry run needs the device, and torch sees no CUDA device here"):
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


SAID = "the whole run: about {}, at most 3m00s where every response reaches its limit, by a dry run on this machine"


def test_a_directory_that_a_run_could_not_have_is_refused_by_plan_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "config.yaml").write_text("stages: []")
    for out, said in (
        ("file/run", "cannot write the run directory"),
        ("file", "cannot write the run directory"),
        ("used", "already holds a run"),
    ):
        told = []
        for command in ("plan", "run"):
            assert cli.main([command, "quickstart", f"out={tmp_path / out}"]) == 2
            told.append(capsys.readouterr().err)
        assert told[0] == told[1] and said in told[0] and told[0].count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"file", "used"}


def test_plan_takes_what_run_takes_for_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["quickstart", "seeds=3,4", "--sweep", "rl.prompts=8,16", f"out={tmp_path / 'sweep'}"]
    assert cli.main(["plan", *given]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "a sweep of 4; this is the run with rl.prompts=8, seed=3",
        "recipe quickstart, seed 3: sft -> before -> rl -> after",
    ]
    assert any("8 prompts" in line for line in lines) and not list(tmp_path.iterdir())
    for wrong, said in (("seeds=1,one", "seeds are whole numbers"), ("only=rl", "a sweep runs whole pipelines")):
        told = []
        for command in ("plan", "run"):
            assert cli.main([command, *given, wrong] if wrong == "only=rl" else [command, "quickstart", wrong]) == 2
            told.append(capsys.readouterr().err)
        assert told[0] == told[1] and said in told[0]


def test_plan_describes_the_stages_that_run(tmp_path: Path) -> None:
    """A stage that is left out is not described, and what it reads need not be there; a run needs what it made."""
    done = tmp_path / "stages" / "sft"
    done.mkdir(parents=True)
    (done / "result.json").write_text("{}")
    settings = [f"sft.data=[{tmp_path / 'gone.jsonl'}]", "only=rl", f"out={tmp_path}"]
    lines = plan.describe(config.parse("quickstart", settings))
    assert lines[0].endswith(": rl") and [line for line in lines if line and line[0] != " "][1:] == ["rl (RLStage)"]
    with pytest.raises(UserError, match="only: rl needs sft, which has not been run"):
        plan.describe(config.parse("quickstart", ["only=rl", f"out={tmp_path / 'new'}"]))
    with pytest.raises(UserError, match="unknown stage in only: 'rll'"):
        plan.describe(config.parse("quickstart", ["only=rll"]))


def test_one_of_a_thing_is_said_in_the_singular() -> None:
    """A count and its noun go through one function, whose doctest has the rule."""
    few = ["rl.prompts=1", "rl.algorithm.group=2", "rl.steps=1", "after.problems=1", "sft.batch=1"]
    text = "\n".join(plan.describe(config.parse("quickstart", few)))
    assert (
        "a step: 1 prompt x 2 samples = 2 responses of at most" in text
        and "then 1 optimizer update of 2 responses each" in text
    )
    assert "1 held-out problem x 1 = 1 answer of at most" in text and "a step: 1 example, about" in text
    assert not re.search(r"\b1 (?:prompts|samples|responses|steps|examples|answers|updates|tokens)\b|\(e?s\)", text)


def test_what_processes_divide_is_priced() -> None:
    """199,392 float32 weights with gradients and moments are 16 bytes each; the copy for generation 4."""
    lines = plan.describe(config.parse("quickstart", ["processes=2", "parallel=fsdp", "device=cpu"]))
    shared = [line.strip() for line in lines if "processes share a step" in line]
    whole = size_text(16 * 199_392)
    assert shared == [
        f"2 processes share a step (parallel=fsdp): with ddp each has {whole} of weights, gradients and moments; parallel=fsdp has "
        f"{size_text(8 * 199_392)} of it{copied}"
        for copied in ("", f" and {size_text(4 * 199_392)} of the copy for generation")
    ]


def test_the_weights_that_a_token_uses_are_stated_of_a_mixture_of_experts() -> None:
    """Of 4 experts a token has 2: half of 2 layers x 4 x 3 matrices of 16 x 16 is left out."""
    count = small_mixture().parameters
    line = f"model it: {count:,} parameters of which a token uses {count - 3072:,}, float32"
    assert plan.model_line("it", small_mixture()) == line
    assert "of which" not in plan.model_line("it", small_policy())
