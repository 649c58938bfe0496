"""The same library on a CUDA device: bf16 with float32 master weights. Run with `make test-gpu`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posttrain.algorithms.grpo import GRPO
from posttrain.collect import Prompt, generate_groups
from posttrain.engine.engine import Engine
from posttrain.models.load import stop_ids
from posttrain.models.policy import Policy, wrap_model
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.recipes.quickstart import quickstart
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.stages.base import Context, run_stages
from posttrain.train.forward import forward
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_groups
from posttrain.train.trainer import Trainer
from posttrain.types import Group, Problem, Rollout, Sampling, Score, Segment

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def policy(dtype: torch.dtype) -> Policy:
    tokenizer = character_tokenizer("0123456789+=#,")
    model = tiny_model(tokenizer, "mini", 0).to("cuda")
    for parameter in model.parameters():  # not model.to(dtype): that would round the rotary frequencies too
        parameter.data = parameter.data.to(dtype)
    return wrap_model(model, tokenizer, stop_ids(model, tokenizer))


def groups(engine: Engine) -> list[Group]:
    """Rollouts with rewards that alternate, so that every group has something to teach."""
    made = []
    for number in range(4):
        request = Prompt((5, 7, 9, 11 + number), 4, number, Sampling(24))
        completions = next(iter(generate_groups(engine, [request])))
        problem = Problem(str(number), "")
        rollouts = []
        for n, c in enumerate(completions):
            prompt = Segment(torch.tensor(request.ids).numpy(), "", False)
            rollouts.append(Rollout(problem, n, (prompt, Segment(c.ids, "", True, c.logprobs)), Score(float(n % 2))))
        made.append(Group(problem, tuple(rollouts)))
    return made


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_the_engine_and_the_trainer_agree(dtype: torch.dtype, bound: float) -> None:
    mine = policy(dtype)
    batch = pack_groups(groups(Engine(mine)), 1.0, "cuda")
    with torch.no_grad():
        logprob = forward(mine, batch).logprob_T
    difference = (logprob - batch.behaviour_T)[batch.mask_T].abs()
    assert float(difference.mean()) < bound, f"mean {difference.mean():.2g}, worst {difference.max():.2g}"


def test_greedy_ids_in_float32_are_those_of_transformers() -> None:
    mine = policy(torch.float32)
    prompt = (5, 7, 9, 11, 13)
    ours = next(iter(generate_groups(Engine(mine), [Prompt(prompt, 1, 0, Sampling(32, temperature=0.0, min_new_tokens=32))])))[
        0
    ]
    plain = tiny_model(mine.tokenizer, "mini", 0).cuda()
    plain.generation_config.eos_token_id = None
    expected = plain.generate(torch.tensor([prompt], device="cuda"), max_new_tokens=32, do_sample=False)[0, len(prompt) :]
    assert ours.ids.tolist() == expected.tolist()


def test_small_updates_survive_in_the_master_weights() -> None:
    """A learning rate below bf16's resolution moves the float32 masters, and in the end the bf16 weights."""
    mine = policy(torch.bfloat16)
    algorithm = GRPO(beta=0.0, group=4)
    trainer = Trainer(mine, algorithm, Optimization(lr=1e-6))
    batch = algorithm.prepare(pack_groups(groups(Engine(mine)), 1.0, "cuda"), {})
    before = {n: m.clone() for n, m in trainer.optimizer.masters.items()}
    for _ in range(3):
        assert trainer.update(batch, 1e-6).moved
    moved = [float((m - before[n]).abs().max()) for n, m in trainer.optimizer.masters.items()]
    assert all(m.dtype == torch.float32 for m in trainer.optimizer.masters.values())
    assert max(moved) > 1e-7
    for name, parameter in trainer.optimizer.parameters.items():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, trainer.optimizer.masters[name].bfloat16())


def test_a_short_pipeline_learns_and_resumes(tmp_path: Path) -> None:
    stages = list(quickstart().stages)
    stages[0] = replace(stages[0], steps=150)
    stages[1] = replace(stages[1], problems=200)
    stages[2] = replace(stages[2], steps=6, checkpoint_every=3, rollouts_every=2)
    stages = stages[:3]
    with RunWriter.create(tmp_path / "run", {}) as writer:
        context = Context(writer, 0, "cuda", say=False)
        run_stages([*stages[:2], replace(stages[2], steps=4)], context)
        (context.folder("rl") / "result.json").unlink()
    with RunWriter.resume(tmp_path / "run") as writer:
        run_stages(stages, Context(writer, 0, "cuda", say=False))
    rows = Run(tmp_path / "run").metrics()
    losses = [row.figures["loss"] for row in rows if row.stage == "sft"]
    assert losses[-1] < 0.5 * losses[0]
    assert [row.step for row in rows if row.stage == "rl"] == list(range(7))
