"""A mixture of experts in training: its auxiliary loss, and that it learns what it samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from families_for_tests import EXPERTS, HEADS, IDS, SHAPE, STOP, models
from kernels_for_tests import decode_in_pages
from material_for_tests import group, rollout, segment, small_mixture, small_policy
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.sft import SFT
from posttrain.collect import Prompt, generate, generate_groups
from posttrain.engine import cuda
from posttrain.engine.engine import Engine
from posttrain.errors import UserError
from posttrain.models.policy import PADDED, Policy, wrap_model
from posttrain.models.routing import ROUTES
from posttrain.ops.experts import Routes
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.train.forward import forward
from posttrain.train.memory import activation_bytes
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_examples, pack_groups
from posttrain.train.trainer import Trainer
from posttrain.types import Batch, Example, Request, Sampling

SEQUENCES = [np.arange(3, 15), np.arange(3, 20) * 7 % 23, np.array([3, 4, 5, 6, 7, 22, 21, 20])]  # two begin alike


def batch() -> Batch:
    return pack_examples([Example(ids, np.arange(len(ids)) > 2) for ids in SEQUENCES])


def test_the_auxiliary_loss_of_each_sequence_is_that_of_transformers() -> None:
    """Also where two sequences share their beginning, which is computed once."""
    policy, stock = small_mixture(), small_mixture().model
    balance_T, whole = forward(policy, batch()).balance_T, batch()
    for n, ids in enumerate(SEQUENCES):
        with torch.no_grad():
            logits = stock(torch.tensor(ids)[None], output_router_logits=True).router_logits
        expected = load_balancing_loss_func(logits, 4, 2)
        assert float(balance_T[whole.sequence_T == n].mean()) == pytest.approx(float(expected), rel=1e-5)
    assert 2.0 < float(balance_T.mean()) < 4.0 and not balance_T.requires_grad


@pytest.mark.parametrize("checkpointing", ["never", "layer"])
def test_its_gradient_is_that_of_transformers_however_a_step_is_cut(checkpointing: str) -> None:
    """The mean over sequences of the loss of each, times the coefficient, is added to that of the algorithm."""
    coefficient, found = 0.5, []
    for budget in (8, 4096):
        settings = Optimization(lr=1e-3, token_budget=budget, router_aux_loss_coef=coefficient, checkpointing=checkpointing)
        trainer = Trainer(small_mixture(torch.float64), SFT(), settings)
        prepared = SFT().prepare(batch(), {})
        metrics = [m for _, own in trainer.accumulate(trainer._balanced(prepared), (), lambda: None) for m in own]
        found.append({name: p.grad.clone() for name, p in trainer.policy.model.named_parameters()})
        balance = [m for m in metrics if m.name == "router/balance"]
        added = sum(float(m.total) for m in metrics if m.name == "loss/router")
        assert sum(int(m.count or 0) for m in balance) == batch().tokens and added == pytest.approx(coefficient * 2.2, rel=0.2)
    stock = small_mixture(torch.float64).model
    prepared, whole = SFT().prepare(batch(), {}), batch()
    loss = torch.zeros((), dtype=torch.float64)
    for n, ids in enumerate(SEQUENCES):
        out = stock(torch.tensor(ids)[None], output_router_logits=True)
        logprob = torch.log_softmax(out.logits[0, :-1], -1).gather(1, torch.tensor(ids[1:, None]))[:, 0]
        weight = (prepared.weight_T * whole.mask_T)[whole.sequence_T == n][1:]
        loss = (
            loss - (weight * logprob).sum() + coefficient / len(SEQUENCES) * load_balancing_loss_func(out.router_logits, 4, 2)
        )
    loss.backward()
    for name, parameter in stock.named_parameters():
        for gradient in found:
            assert float((gradient[name] - parameter.grad).norm()) <= 1e-5 * float(parameter.grad.norm()), name


def test_a_dense_model_has_no_auxiliary_loss() -> None:
    policy = small_policy(dtype=torch.float32)
    assert "balance_T" not in forward(policy, batch()).columns
    with pytest.raises(
        UserError, match="router_aux_loss_coef: LlamaForCausalLM is no language model with the routers of Qwen3-MoE"
    ):
        Trainer(policy, SFT(), Optimization(router_aux_loss_coef=0.1))


def test_active_weights_and_activations_are_those_of_the_chosen_experts() -> None:
    """Two of four experts: half of 2 layers x 4 experts x 3 matrices of 16 x 16 is not used by a token."""
    policy = small_mixture()
    assert policy.parameters - policy.active_parameters == 2 * 2 * 3 * 16 * 16
    assert small_policy().active_parameters == small_policy().parameters
    # by layer and token: (9 + 2 x 2) x 16 + 4 x 2 x 16 + 2 x 8, and 4 x (16 + 2 x 16) at work
    assert activation_bytes(policy, 10) == 4 * 10 * (2 * ((9 + 4) * 16 + 4 * 32 + 2 * 8) + 4 * (16 + 32))


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> Policy:
    """A policy whose routers are recorded, decoded in pages as on a GPU."""
    decode_in_pages(monkeypatch)
    policy = small_mixture()
    policy.router_replay = True
    return policy


def own_routes(policy: Policy, ids: np.ndarray) -> np.ndarray:
    """What the routers of the module choose for a sequence, [T, layers x 2]."""
    routes = Routes()
    with torch.no_grad():
        given: dict[str, Any] = {ROUTES: routes}
        policy.hidden(torch.tensor(ids)[None], torch.arange(len(ids))[None], **given)
    return routes.choices().numpy()


def test_the_sampler_records_the_experts_of_prompts_and_answers_also_of_a_second_turn(replaying: Policy) -> None:
    """All but those of the last two tokens: the last is never an input, and the slot of the one before is written again."""
    engine, prompt = Engine(replaying, 4), (5, 6, 7, 8)
    first = list(
        generate(engine, [Request(prompt, n, Sampling(70, min_new_tokens=70), n, group=0, keep=True) for n in range(3)])
    )
    second = list(generate(engine, [Request((9, 10), 50 + n, Sampling(5, min_new_tokens=5), n, 1) for n in range(3)]))
    for one, two in zip(first, second, strict=True):
        for ids, found in ((np.r_[prompt, one.ids], one.routes), (np.r_[prompt, one.ids, 9, 10, two.ids], two.routes)):
            assert found is not None and found.shape == (len(ids), 4) and found.dtype == np.int16
            np.testing.assert_array_equal(found[:-2], own_routes(replaying, ids)[:-2])
            assert (found[-2:] == -1).all()


def test_the_experts_of_many_rows_are_read_in_few_copies(replaying: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy waits for the device. In as many portions as it takes, they are the same."""
    requests = [Request((5, 6, 7), n, Sampling(4 + n, min_new_tokens=4 + n), n, group=0) for n in range(6)]
    own, made, copied = torch.Tensor.cpu, [], list[int]()
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: (copied.append(len(t)) if t.dtype == torch.int16 else 0, own(t))[1])
    for tokens in (cuda.PREFILL_TOKENS, 16):
        copied.clear()
        made.append(list(generate(Engine(replaying, 6), requests)))
        monkeypatch.setattr(cuda, "PREFILL_TOKENS", 16)
        assert len(copied) == 1 if tokens > 16 else 1 < len(copied) < 6
    for one, other in zip(*made, strict=True):
        np.testing.assert_array_equal(np.array(one.routes), np.array(other.routes))


def test_the_trainer_takes_the_experts_of_the_sampler_and_counts_those_it_would_not_have_taken(replaying: Policy) -> None:
    """Of 2 x 4 loss tokens, the last two of each have no routes; one of the others goes elsewhere in one of two layers."""
    prompt, algorithm = (5, 6, 7), GRPO(beta=0.0)
    requests = [Request(prompt, n, Sampling(4, min_new_tokens=4), n, group=0) for n in range(2)]
    made = list(generate(Engine(replaying, 4), requests))
    moved = np.array(made[0].routes)
    at = own_routes(replaying, np.r_[prompt, made[0].ids])[3, :2]
    moved[3, :2] = [n for n in range(4) if n not in at]
    found = []
    for routes in (made[0].routes, moved, None):
        given = (routes, None if routes is None else made[1].routes)
        rollouts = [
            replace(rollout([segment(prompt, False), segment(c.ids, True, c.logprobs)], float(n)), routes=given[n])
            for n, c in enumerate(made)
        ]
        batch = algorithm.prepare(pack_groups([group(rollouts)], 1.0), {})
        trainer = Trainer(replaying, algorithm, Optimization(lr=1e-3))
        metrics = trainer.forward_backward(batch)
        found.append({m.name: m.value for m in metrics})
    assert [one["router/replayed"] for one in found] == [0.5, 0.5, 0.0]
    assert found[0]["router/mismatch"] == 0.0 and found[1]["router/mismatch"] == pytest.approx(0.5 / 4)
    assert "router/mismatch" not in found[2] and found[0]["mismatch"] < 1e-6 < 1e-3 < found[1]["mismatch"]


def test_reinforcement_raises_the_reward_of_what_is_sampled() -> None:
    """Reward: the share of ids below 12. Eight steps of GRPO; the sampler's and the trainer's log-probs agree at each."""
    policy, algorithm = small_mixture(), GRPO(beta=0.0, group=16)
    trainer = Trainer(policy, algorithm, Optimization(lr=1e-2, router_aux_loss_coef=1e-3))
    rewards = []
    for step in range(8):
        requests = [Prompt((5, 6, n), 16, 100 * step + n, Sampling(8)) for n in (3, 4)]
        groups = []
        for request, completions in zip(requests, generate_groups(Engine(policy, processes=1), requests), strict=True):
            members = [[segment(request.ids, False), segment(c.ids, True, c.logprobs)] for c in completions]
            scores = [float((c.ids < 12).mean()) for c in completions]
            groups.append(group([rollout(parts, score) for parts, score in zip(members, scores, strict=True)]))
            rewards += scores
        update = trainer.update(algorithm.prepare(pack_groups(groups, 1.0), {}), 1e-2)
        figures = {m.name: m.value for m in update.metrics}
        assert figures["mismatch"] < 1e-5 and 2.0 <= figures["router/balance"] < 4.0
    assert np.mean(rewards[-32:]) > np.mean(rewards[:32]) + 0.3


def test_routers_that_draw_experts_in_training_do_as_they_sample() -> None:
    """Phi-MoE's; elsewhere nothing is computed otherwise in training mode."""
    config = transformers.PhimoeConfig(
        **(SHAPE | HEADS | IDS | EXPERTS | {"router_jitter_noise": 0.3, "input_jitter_noise": 0.1})
    )
    policy = wrap_model(transformers.AutoModelForCausalLM.from_config(config).eval(), None, (STOP,))
    batch = pack_examples([Example(np.arange(3, 20), np.arange(17) > 0)])
    with torch.no_grad():
        sampled = forward(policy, batch).logprob_T
        policy.learn()
        assert policy.model.training and torch.equal(forward(policy, batch).logprob_T, sampled)


def test_experts_of_padding_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    _, policy = models("qwen3-moe")
    monkeypatch.setattr(policy.body, PADDED, True)
    policy.model.set_attn_implementation("eager")
    found = forward(policy, pack_examples([Example(np.arange(3, end), np.arange(end - 3) > 0) for end in (5, 20)]))
    assert set(found.columns) == {"logprob_T", "entropy_T"}
    with pytest.raises(
        UserError, match="router_aux_loss_coef: Qwen3MoeForCausalLM is no language model with the routers .* in packed"
    ):
        Trainer(policy, SFT(), Optimization(router_aux_loss_coef=0.1))
    stage = RLStage(model="tiny:nano", task=Arithmetic(), name="rl", algorithm=GRPO(), steps=1, router_replay=True)
    with pytest.raises(UserError, match="router_replay: Qwen3MoeForCausalLM has no routers .* in packed sequences"):
        stage._replays(policy)
