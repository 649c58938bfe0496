"""The rl stage with everyone on stage: critic, reward models, reference, pretraining mix. What it refuses, and an exact resume."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from material_for_tests import small_policy
from safetensors.torch import load_file

from posttrain import config, loop, pipeline
from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ppo import PPO
from posttrain.algorithms.rloo import RLOO
from posttrain.commands.evaluate import evaluate
from posttrain.errors import Interrupted, UserError
from posttrain.loop import Stop
from posttrain.models.load import Reader, stop_ids
from posttrain.models.lora import Lora
from posttrain.models.policy import wrap_model
from posttrain.models.save import save
from posttrain.models.scorer import from_policy
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.monitor.rules import MonitorSettings
from posttrain.recipes.base import Recipe
from posttrain.runs.read import Run
from posttrain.stages._check import check_problems
from posttrain.stages._material import Data
from posttrain.stages.base import Context
from posttrain.stages.evaluate import EvaluateStage
from posttrain.stages.reward_sources import (
    ImplicitReward,
    JudgeReward,
    MixedReward,
    ProcessRewardModels,
    RewardModels,
    Weighted,
)
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Generate
from posttrain.tasks.jsonl import Jsonl
from posttrain.train.optimizer import Optimization
from posttrain.types import Message, Problem, Rollout, Sampling, Score
from tests.faults.harness import fingerprint

TASK = Arithmetic(level=1)
DATA = (Data(task=TASK, counts={1: 12}),)


def stage(**settings: Any) -> RLStage:
    small: dict[str, Any] = {
        "steps": 5, "prompts": 3, "sampling": Sampling(6), "optimizer": Optimization(lr=1e-3), "rollouts_every": 1,
        "evaluate_every": 0, "checkpoint_every": 2, "pretraining_batch": 2,
    }  # fmt: skip
    return RLStage(**({"name": "rl", "model": "tiny:nano", "task": TASK} | small | settings))


def run(directory: Path, one: RLStage) -> Path:
    return pipeline.start(config.Settings(Recipe((one,)), "test", threads=1, device="cpu", out=str(directory)))


def reward_model(folder: Path, seed: int, alphabet: str = "") -> str:
    tokenizer = character_tokenizer(alphabet or stage().alphabet())
    model = tiny_model(tokenizer, "nano", 0)
    scorer = from_policy(wrap_model(model, tokenizer, stop_ids(model, tokenizer)), zero=False, seed=seed)
    return str(save(scorer.model, tokenizer, folder))


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("judges")
    return reward_model(folder / "a", 1), reward_model(folder / "b", 2)


def full(judges: tuple[str, str]) -> RLStage:
    """InstructGPT's whole cast."""
    return stage(
        algorithm=PPO(group=2, epochs=2, mini_batches=2, kl_target=6.0, kl_horizon=100, ptx=0.5, critic_warmup=1),
        critic=judges[0], critic_optimizer=Optimization(lr=5e-3), pretraining=DATA,
        reward=RewardModels(models=judges, combine="worst", device="cpu"), reference_device="cpu",
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(judges: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "full", full(judges))


def test_everyone_is_on_stage(finished: Path) -> None:
    rows = Run(finished).metrics("rl")
    assert [row.step for row in rows] == [1, 2, 3, 4, 5]
    figures = rows[-1].figures
    wanted = {"reward", "reward/task", "reward/member/0", "reward/member/1", "reward/disagreement", "kl", "kl/response", "beta"}
    wanted |= {
        "value/error",
        "value/clip_fraction",
        "loss/policy",
        "loss/value",
        "pretraining/nll",
        "grad_norm/critic",
        "updates",
    }
    assert wanted <= set(figures), wanted - set(figures)
    assert figures["updates"] == 4  # two epochs of two mini-batches
    assert figures["reward"] < min(
        figures["reward/member/0"], figures["reward/member/1"]
    )  # the worst of each, not of the means
    assert rows[0].figures["grad_norm"] == 0.0 and "pretraining/nll" not in rows[0].figures  # the critic warms up
    assert rows[1].figures["grad_norm"] > 0.0
    assert rows[0].figures["beta"] == 0.2 and rows[-1].figures["beta"] != 0.2


def test_the_checkpoint_has_the_critic_and_the_controllers(finished: Path) -> None:
    (newest,) = sorted((finished / "checkpoints" / "rl").glob("step-4"))
    names = set(load_file(newest / "model.safetensors"))
    assert {n for n in names if n.startswith("critic.")} and {n for n in names if not n.startswith("critic.")}
    state = json.loads((newest / "state.json").read_text())
    assert state["algorithm"]["steps"] == 4 and state["pretraining"] is not None
    exported = load_file(finished / "export" / "model.safetensors")
    assert not any(name.startswith(("critic.", "score.")) for name in exported)  # the policy alone


def stop_and_resume(directory: Path, one: RLStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after steps 1 and 3, as by Ctrl-C, and resumed each time."""
    report = loop.Loop.report
    due = [1, 3]

    def stopping(self: loop.Loop, console: Any, figures: Any) -> None:
        report(self, console, figures)
        if due and self.step == due[0]:
            self.interrupt.requested = bool(due.pop(0))

    monkeypatch.setattr(loop.Loop, "report", stopping)
    with pytest.raises(Interrupted, match="stopped after step 1"):
        run(directory, one)
    with pytest.raises(Interrupted, match="stopped after step 3"):
        pipeline.resume(directory)
    pipeline.resume(directory)


def test_stopped_and_resumed_it_is_the_same_run(
    judges: tuple[str, str], finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Critic, its optimizer, controllers, the mix's place in its data: all come back bit for bit, in warm-up and after it."""
    stop_and_resume(tmp_path / "run", full(judges), monkeypatch)
    expected, found = fingerprint(finished), fingerprint(tmp_path / "run")
    for part in expected:
        assert found[part] == expected[part], part


def test_with_lora_adapters_alone_are_trained_and_saved(
    judges: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints hold adapters and the critic's head, the export is a plain model, and a resumed run is the same run."""
    pytest.importorskip("peft")
    one = stage(algorithm=PPO(group=2, epochs=2), reward=RewardModels(models=judges[:1]), lora=Lora(rank=2), steps=4)
    directory = run(tmp_path / "whole", one)
    rows = Run(directory).metrics("rl")
    assert abs(rows[0].figures["kl"]) < 1e-6 < abs(rows[-1].figures["kl"])  # it starts at its reference, and leaves it
    names = set(load_file(directory / "checkpoints" / "rl" / "step-2" / "model.safetensors"))
    assert names and all("lora_" in name or name.startswith("critic.score.") for name in names)
    tokenizer = character_tokenizer(one.alphabet())
    start, exported = tiny_model(tokenizer, "nano", 0).state_dict(), load_file(directory / "export" / "model.safetensors")
    assert exported.keys() <= start.keys() and not any("lora" in name for name in exported)
    moved = {name for name, tensor in exported.items() if not tensor.equal(start[name])}
    assert moved and all("_proj" in name for name in moved)
    stop_and_resume(tmp_path / "resumed", one, monkeypatch)
    assert fingerprint(tmp_path / "resumed") == fingerprint(directory)


def test_a_new_critic_with_a_hidden_layer(judges: tuple[str, str], tmp_path: Path) -> None:
    one = stage(algorithm=PPO(beta=0.0, epochs=1), critic_head="mlp", steps=3, reward=RewardModels(models=judges[:1]))
    directory = run(tmp_path / "run", one)
    rows = Run(directory).metrics("rl")
    assert rows[0].figures["value/mean"] == 0.0, "a new critic starts at 0"
    assert rows[-1].figures["value/mean"] != 0.0
    names = set(load_file(directory / "checkpoints" / "rl" / "step-2" / "model.safetensors"))
    assert "critic.score.0.weight" in names and "critic.score.2.bias" in names


def test_another_reference(tmp_path: Path) -> None:
    """The policy is not its own reference: the KL of the very first step is not 0."""
    tokenizer = character_tokenizer(stage().alphabet())
    other = save(tiny_model(tokenizer, "nano", 7), tokenizer, tmp_path / "other")
    algorithm = GRPO(group=2)
    for reference, zero in (("", True), (str(other), False)):
        directory = run(tmp_path / f"run-{zero}", stage(algorithm=algorithm, reference=reference, steps=1))
        assert (abs(Run(directory).metrics("rl")[0].figures["kl"]) < 1e-6) == zero


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": PPO(ptx=0.1)}, r"rl: this algorithm mixes pretraining text in \(ptx > 0\); give some as pretraining"),
    ({"algorithm": PPO(), "pretraining": DATA}, "rl: pretraining data is given, but this algorithm does not mix it in"),
    ({"critic": "x"}, "rl: critic is given, but this algorithm has none"),
    ({"critic_optimizer": Optimization()}, "rl: critic_optimizer is given, but this algorithm has no critic"),
    (
        {"algorithm": PPO(), "critic_optimizer": Optimization(router_aux_loss_coef=0.1)},
        "rl: critic_optimizer.router_aux_loss_coef has",
    ),
    ({"algorithm": PPO(), "critic": "x", "critic_head": "mlp"}, "rl: a critic from 'x' has its head already"),
    ({"algorithm": PPO(), "critic_head": "deep"}, "rl: critic_head must be linear or mlp, not 'deep'"),
    ({"algorithm": PPO(beta=0.0), "reference": "x"}, "rl: reference is given, but this algorithm has no use for one"),
    ({"reference_device": "gpu"}, "rl: reference_device must be same or cpu, not 'gpu'"),
    ({"algorithm": PPO(), "lora": Lora(), "reference_device": "cpu"}, "rl: with lora the reference is the policy's own frozen"),
    ({"algorithm": PPO(ptx=0.1), "pretraining": DATA, "pretraining_batch": 0}, "rl: pretraining_batch must be at least 1"),
    ({"sampler_quantization": "int4"}, "rl: sampler_quantization must be none or fp8, not 'int4'"),
    (
        {"sampler_quantization": "fp8", "sampler": "vllm"},
        "rl: sampler_quantization=fp8 is for our engine, and sampler=vllm has another",
    ),
    ({"sampler_quantization": "fp8", "lora": Lora(load_in_4bit=True)}, "rl: sampler_quantization=fp8 would round weights that"),
    ({"staleness_correction": "none"}, "rl: in_flight and staleness_correction are for max_staleness above 0"),
]


def test_a_sampler_in_fp8_sets_a_correction_and_a_wider_limit_unless_they_were_chosen() -> None:
    low: dict[str, Any] = {"sampler_quantization": "fp8"}
    assert stage().algorithm == GRPO() and stage().monitor.mismatch == 0.1
    assert stage(**low).algorithm == GRPO(correction="token") and stage(**low).monitor.mismatch == 0.3
    for chosen in (GRPO(correction="sequence"), PPO(correction="decoupled"), GRPO(mask_low=0.5, mask_high=5.0)):
        assert stage(**low, algorithm=chosen).algorithm == chosen
    without = stage(**low, staleness_correction="none", monitor=MonitorSettings(mismatch=0.05))
    assert without.algorithm == GRPO() and without.monitor.mismatch == 0.05


def test_a_gpu_without_fp8_is_refused_before_the_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    stage().check_ready("cuda", ())
    with pytest.raises(UserError, match=r"sampler_quantization=fp8 needs a GPU of compute capability 8\.9 or more .* has 8\.0"):
        stage(sampler_quantization="fp8").check_ready("cuda", ())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    stage(sampler_quantization="fp8").check_ready("cuda", ())


def test_a_run_with_a_sampler_in_fp8_shows_its_mismatch_and_weighs_it(tmp_path: Path) -> None:
    found = Run(run(tmp_path / "fp8", stage(steps=2, sampler_quantization="fp8")))
    for figures in (row.figures for row in found.metrics()):
        assert 1e-4 < figures["mismatch"] < 0.3 and figures["mismatch/kl"] > 0 and 0.9 < figures["correction"] < 1.1
    (line,) = [text for event in found.events() if "generation in fp8" in (text := str(event.details.get("text")))]
    assert "sampler_quantization=fp8" in line and "above 0.3 the run stops" in line
    plain = Run(run(tmp_path / "plain", stage(steps=1)))
    assert all(row.figures["mismatch"] < 1e-5 for row in plain.metrics())


@pytest.mark.parametrize(("settings", "message"), REFUSALS)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        stage(**settings)


def test_experts_are_replayed_on_a_gpu_and_by_a_model_that_has_some() -> None:
    with pytest.raises(UserError, match="router_replay is for a GPU: on a CPU the sampler and the trainer compute in float32"):
        stage(router_replay=True).check_ready("cpu", ())
    with pytest.raises(
        UserError,
        match="router_replay: LlamaForCausalLM has no routers like those of Qwen3-MoE in packed sequences; leave it out",
    ):
        stage(router_replay=True)._replays(small_policy())


@pytest.mark.parametrize("role", ["reward", "critic", "reference"])
def test_another_vocabulary_is_refused(role: str, tmp_path: Path) -> None:
    """Ids would be other text to it."""
    strange = reward_model(tmp_path / "strange", 0, alphabet="abc")
    if role == "reference":
        tokenizer = character_tokenizer("abc")
        strange = str(save(tiny_model(tokenizer, "nano", 0), tokenizer, tmp_path / "lm"))
    settings = {role: RewardModels(models=(strange,)) if role == "reward" else strange}
    with pytest.raises(UserError, match=r"rl: .*(strange|lm) has another vocabulary than tiny:nano .* tokens differ"):
        run(tmp_path / "run", stage(algorithm=PPO(), **settings))


def test_a_missing_reward_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        run(tmp_path / "run", stage(reward=RewardModels(models=(str(tmp_path / "nowhere"),)), algorithm=PPO()))


def test_keys_of_the_command_line() -> None:
    """Another algorithm's own keys work at once; an optional group of settings is made when one of its keys is given."""
    keys = [
        "rl.algorithm=ppo",
        "rl.lam=0.9",
        "rl.critic_optimizer.lr=1e-5",
        "rl.lora.rank=4",
        "rl.reward=models",
        "rl.reward.models=[a, b]",
    ]
    settings = config.parse("quickstart", keys)
    one = next(s for s in settings.recipe.stages if s.name == "rl")
    assert isinstance(one, RLStage) and one.algorithm == PPO(lam=0.9)
    assert one.critic_optimizer == Optimization(lr=1e-5) and one.reward == RewardModels(models=("a", "b"))
    assert one.lora == Lora(rank=4) and config.parse("quickstart", []).recipe.stages[2].lora is None  # type: ignore[attr-defined]
    assert config.from_config(config.to_config(settings), "config.yaml").recipe == settings.recipe
    with pytest.raises(UserError, match=r"rl.lr: lr is a key of optimizer and of critic_optimizer; say which"):
        config.parse("quickstart", [*keys, "rl.lr=1e-5"])
    with pytest.raises(UserError, match="rl.steps.x: steps has no keys of its own"):
        config.parse("quickstart", ["rl.steps.x=1"])


@pytest.mark.parametrize("algorithm", [PPO(), GRPO(group=3), RLOO(group=3)], ids=["ppo", "grpo", "rloo"])
def test_values_of_steps_that_nobody_learns_from_are_said(
    algorithm: Algorithm, judges: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once; and not where they are learned from, or where there are none."""
    process: dict[str, Any] = {"reward": ProcessRewardModels(models=judges), "steps": 2}
    run(tmp_path / "unused", stage(algorithm=algorithm, **process))
    assert capsys.readouterr().out.count(f"the reward scores steps, and {algorithm.name} learns from the score of") == 1
    if not isinstance(algorithm, RLOO):
        run(tmp_path / "used", stage(algorithm=replace(algorithm, supervision="process"), **process | {"steps": 1}))
    run(tmp_path / "none", stage(algorithm=algorithm, steps=1))
    assert "scores steps" not in capsys.readouterr().out


def test_process_reward_models_give_steps_and_tuned_models_an_implicit_reward(judges: tuple[str, str], tmp_path: Path) -> None:
    tokenizer = character_tokenizer(stage().alphabet())
    tuned = str(save(tiny_model(tokenizer, "nano", 7), tokenizer, tmp_path / "tuned"))
    origin = str(save(tiny_model(tokenizer, "nano", 8), tokenizer, tmp_path / "origin"))
    process = stage(
        algorithm=GRPO(group=3, beta=0.0, supervision="process"),
        reward=ProcessRewardModels(models=judges, combine="worst"),
        steps=2,
    )
    implicit = stage(
        algorithm=GRPO(group=3, beta=0.0),
        reward=ImplicitReward(model=tuned, reference=origin, beta=0.5),
        steps=2,
    )
    found = {}
    for name, one in (("process", process), ("implicit", implicit)):
        rows = [json.loads(line) for line in (run(tmp_path / name, one) / "metrics.jsonl").read_text().splitlines()]
        found[name] = [row for row in rows if row["stage"] == "rl" and row.get("reward") is not None]
    assert all(0 < row["reward"] < 1 and "reward/disagreement" in row for row in found["process"])
    for row in found["implicit"]:
        assert row["reward"] == pytest.approx(0.5 * (row["reward/logprob"] - row["reward/reference"]), rel=1e-5)
    for reward in (
        RewardModels(models=judges),
        JudgeReward(model=tuned),
        MixedReward(parts=(Weighted(reward=process.reward),)),
    ):
        with pytest.raises(UserError, match=rf"^rl: supervision=process learns .*the reward '{reward.name}' gives none"):
            stage(reward=reward, algorithm=PPO(supervision="process"))


def test_a_template_that_forgets_earlier_turns_is_refused_before_the_first_stage() -> None:
    class Talk(Arithmetic):
        async def run(self, problem: Problem, generate: Generate) -> Rollout:
            await generate()
            await generate([Message("user", "again")], last=True)
            return generate.rollout()

    tokenizer = character_tokenizer(stage().alphabet())
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    check_problems(stage(), Reader(tokenizer, "x"))
    with pytest.raises(UserError, match="^rl.task: the chat template drops the reasoning of earlier turns"):
        check_problems(stage(task=Talk(level=1)), Reader(tokenizer, "x"))


@pytest.mark.parametrize("failing", [False, True])
def test_the_sampler_is_closed_with_the_stage(failing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that samples would stay as long as the run, where an error keeps a reference to it for ever."""
    closed, make = list[bool](), Context.sampler

    def made(*given: Any, **how: Any) -> Any:
        sampler = make(*given, **how)
        close = sampler.close
        monkeypatch.setattr(sampler, "close", lambda: closed.append(True) or close())
        return sampler

    def broken(*_: Any) -> Any:
        raise UserError("it cannot be scored")

    monkeypatch.setattr(Context, "sampler", made)
    if failing:
        monkeypatch.setattr(Arithmetic, "score", broken)
    with pytest.raises(UserError, match="it cannot be scored") if failing else nullcontext():
        run(tmp_path / "run", stage(steps=1, evaluate_every=0))
    assert closed == [True]


def test_a_kl_ends_the_stage_in_the_step_that_passes_it_and_the_run_goes_on(tmp_path: Path) -> None:
    """Also of an algorithm that has no reference of its own: `watch_kl` measures it in every step then."""
    one = stage(algorithm=GRPO(group=2, beta=0.0), watch_kl=True, stop=Stop(kl=0.01, kl_steps=1), rollouts_every=100)
    finished = run(tmp_path / "run", one)
    kls = [row.figures["kl/response"] for row in Run(finished).metrics("rl")]
    assert len(kls) < one.steps and kls[-1] > 0.01 and all(kl <= 0.01 for kl in kls[:-1])
    result = json.loads((finished / "stages" / "rl" / "result.json").read_text())
    assert (
        result["steps"] == len(kls) and result["stopped"].endswith("(stop.kl=0.01)") and (finished / "summary.json").is_file()
    )
    with pytest.raises(UserError, match=r"rl: stop\.kl needs samples and a reference"):
        stage(algorithm=GRPO(group=2, beta=0.0), stop=Stop(kl=1.0))


@dataclass(frozen=True)
class OftenUnscored(Arithmetic):
    """Scores a response if its length is even."""

    def score(self, problem: Problem, response: str) -> Score:
        return Score.failed("timeout") if len(response) % 2 else Score(len(set(response)) / 6)


def test_a_limit_of_the_kl_that_is_never_reached_changes_no_figure(tmp_path: Path) -> None:
    """PPO measures the KL over the responses that have a score, for its controller too."""
    algorithm = PPO(beta=0.1, kl_target=50.0, kl_horizon=1, group=4, mini_batches=2)
    shared: dict[str, Any] = {"task": OftenUnscored(level=1), "algorithm": algorithm, "steps": 3}
    found = []
    for limit in (0.0, 1e9):
        one = stage(**shared, stop=Stop(kl=limit), monitor=MonitorSettings(off=("failed",)))
        rows = Run(run(tmp_path / str(limit), one)).metrics("rl")
        found.append([[row.figures.get(name) for name in ("failed", "kl/response", "beta")] for row in rows])
    assert found[0] == found[1] and 0 < found[0][-1][0] < 1 and found[0][-1][1] != 0


def test_prompts_that_the_vocabulary_lacks_are_said_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, questions in {"train": ["1+1=", "one plus öne?"], "test": ["2+2=", "2+ß="]}.items():
        rows = [json.dumps({"question": question, "answer": "2"}) + "\n" for question in questions]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    task = Jsonl(file=str(tmp_path / "train.jsonl"), test_file=str(tmp_path / "test.jsonl"), reward="answer")
    directory = run(tmp_path / "run", stage(task=task, steps=1, evaluate_every=1))
    said = capsys.readouterr().out
    line = (
        "rl: warning: of 4 prompts that were looked at, 2 characters or words in 2 texts are not in the vocabulary, first in "
    )
    assert said.count(line) == 1 and "<|unk|>ne?" in said and said.index(line) < said.index("reward")
    files = [f"task.{key}={getattr(task, key)}" for key in ("file", "test_file", "reward")]
    report = evaluate(str(directory), "jsonl", [*files, "problems=2"])
    assert [line for line in report.models[0].notes if "of 2 prompts that were looked at, 1 characters or words" in line]


def test_a_prompt_that_does_not_fit_is_named_before_the_first_step_wherever_it_is(tmp_path: Path) -> None:
    questions = [f"{n}+1=" for n in range(300)]
    questions[280] = "1+" * 1500 + "1="
    rows = [json.dumps({"question": question, "answer": "2"}) + "\n" for question in questions]
    (tmp_path / "sums.jsonl").write_text("".join(rows))
    task = Jsonl(file=str(tmp_path / "sums.jsonl"), reward="answer", held_out=0)
    line = (
        r"^rl\.task: problem sums.jsonl:281: prompt and response may be 3\d\d\d tokens long, but tiny:nano has 2048 positions"
    )
    with pytest.raises(UserError, match=line):
        run(tmp_path / "run", stage(task=task))


def test_held_out_problems_that_are_never_asked_may_be_of_any_length(tmp_path: Path) -> None:
    for name, longest in (("train", 0), ("test", 399)):
        questions = [f"{n}+{len(name)}=" if n != longest or not n else "1+" * 1500 + "1=" for n in range(400)]
        rows = [json.dumps({"question": question, "answer": "2"}) + "\n" for question in questions]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    task = Jsonl(file=str(tmp_path / "train.jsonl"), test_file=str(tmp_path / "test.jsonl"), reward="answer")
    tokenizer = character_tokenizer(stage().alphabet())
    reader, asked = Reader(tokenizer, "x", 100), {"task": task, "evaluate_every": 1}
    made = {"name": "e", "model": "x", "task": task, "sampling": Sampling(6, temperature=0.0)}
    for few in (stage(evaluate_problems=2, **asked), stage(evaluate_problems=0, **asked), EvaluateStage(problems=2, **made)):
        check_problems(few, reader)
    for many in (stage(evaluate_problems=400, **asked), EvaluateStage(problems=400, **made)):
        with pytest.raises(UserError, match=r"problem test.jsonl:400: prompt and response may be"):
            check_problems(many, reader)


def test_a_conversation_is_as_long_as_all_its_turns(tmp_path: Path) -> None:
    before = [{"role": "user", "content": "1+" * 1500 + "1="}, {"role": "assistant", "content": "1"}]
    turns = [[{"role": "user", "content": f"{n}+1="}] for n in range(1000, 1599)] + [
        [*before, {"role": "user", "content": "1="}]
    ]
    rows = [{"question": asked, "answer": "2"} for asked in turns]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = stage(task=Jsonl(file=str(tmp_path / "train.jsonl"), reward="answer"), evaluate_every=0)
    with pytest.raises(UserError, match=r"problem train.jsonl:600: prompt and response may be"):
        check_problems(made, Reader(character_tokenizer(stage().alphabet()), "x", 100))
