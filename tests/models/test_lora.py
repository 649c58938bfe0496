"""LoRA: nothing changes at the start, the frozen weights serve everyone, and what comes out is a plain model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from families_for_tests import GROUPS, HEADS, IDS, LATENT, SHAPE, STOP, models
from material_for_tests import WIDE, material, small_mixture, small_policy
from torch import Tensor

from posttrain.algorithms.ppo import PPO
from posttrain.algorithms.sft import SFT
from posttrain.collect import Prompt, generate_groups
from posttrain.engine.engine import Engine
from posttrain.errors import UserError
from posttrain.models.load import load
from posttrain.models.lora import Lora, add_adapters, merge_adapters, share_weights
from posttrain.models.policy import Policy, wrap_model
from posttrain.models.scorer import Scorer, from_policy
from posttrain.models.tiny import character_tokenizer
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.stages.base import Context
from posttrain.train.forward import forward, scores
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_examples
from posttrain.train.roles.critic import Critic
from posttrain.train.roles.reference import Reference
from posttrain.train.trainer import Trainer
from posttrain.types import Example, Sampling

pytest.importorskip("peft")
BATCH = pack_examples([Example(np.array(ids), np.arange(len(ids)) > 0) for ids in ([3, 4, 5, 6, 7], [3, 9, 8, 10])])
LORA = Lora(rank=3, alpha=6.0)


def logprobs(policy: Policy) -> Tensor:
    with torch.no_grad():
        return forward(policy, BATCH).logprob_T


def adapted(lora: Lora = LORA, dtype: torch.dtype = WIDE) -> tuple[Policy, Policy]:
    """A policy with adapters, and its reference: the policy without them."""
    policy = small_policy(dtype=dtype)
    reference = share_weights(policy)
    add_adapters(policy.model, lora, seed=1)
    return policy, reference


def train(policy: Policy, steps: int = 3) -> Trainer:
    trainer = Trainer(policy, SFT(), Optimization(lr=1e-2))
    for _ in range(steps):
        trainer.update(SFT().prepare(BATCH, {}), 1e-2)
    return trainer


def test_new_adapters_leave_the_model_as_it_is_to_the_bit() -> None:
    policy, reference = adapted()
    assert torch.equal(logprobs(policy), logprobs(small_policy()))
    assert torch.equal(logprobs(reference), logprobs(policy))


def test_the_reference_is_no_second_copy() -> None:
    policy, reference = adapted()
    own = {p.data_ptr() for p in policy.model.parameters()}
    assert all(p.data_ptr() in own for p in reference.model.parameters())
    assert not any("lora_" in name for name, _ in reference.model.named_parameters())


def test_only_adapters_learn_and_the_reference_stays() -> None:
    policy, reference = adapted()
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    start = logprobs(reference)
    trainer = train(policy)
    moved = {name for name, p in policy.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name} and moved
    assert torch.equal(logprobs(reference), start)
    assert float((logprobs(policy) - start).abs().max()) > 0.01
    assert set(trainer.weights()) == moved, "a checkpoint holds the adapters alone"
    size = sum(p.numel() for name, p in policy.model.named_parameters() if name in moved)
    assert LORA.parameters(reference.body) == size == sum(3 * sum(shape) for shape in SHAPES)


# q, k, v, o, gate, up, down of the two layers of the small policy
SHAPES = [(16, 16), (16, 8), (16, 8), (16, 16), (16, 24), (16, 24), (24, 16)] * 2


def test_the_gradient_is_that_of_the_weight_through_the_adapter() -> None:
    """W' = W + s B A with B = 0: dL/dB = s (dL/dW) A^T and dL/dA = 0, with dL/dW from the same model trained in full."""
    whole, (policy, _) = small_policy(), adapted()
    for one in (whole, policy):
        Trainer(one, SFT(), Optimization()).forward_backward(SFT().prepare(BATCH, {}))
    plain = dict(whole.model.named_parameters())
    parts = dict(policy.model.named_parameters())
    checked = 0
    for name, parameter in parts.items():
        if "lora_B" in name:
            a = parts[name.replace("lora_B", "lora_A")]
            slope = plain[name.split(".lora_B")[0] + ".weight"].grad
            assert slope is not None and parameter.grad is not None and a.grad is not None
            torch.testing.assert_close(parameter.grad, (6.0 / 3) * slope @ a.detach().T, rtol=1e-8, atol=1e-12)
            assert float(a.grad.abs().max()) == 0.0
            checked += 1
    assert checked == len(SHAPES)


def test_merged_adapters_equal_unmerged_ones(tmp_path: Path) -> None:
    policy, _ = adapted()
    train(policy)
    expected = logprobs(policy)
    merge_adapters(policy.model)
    torch.testing.assert_close(logprobs(policy), expected, rtol=0, atol=1e-12)
    plain = small_policy()
    assert set(policy.model.state_dict()) == set(plain.model.state_dict())
    assert [type(m) for m in policy.model.modules()] == [type(m) for m in plain.model.modules()]


def small_update(policy: Policy, base: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adapters whose update is a hundredth of the spacing of bfloat16 at its weights or less; what they add to each, in float64."""
    added = {}
    with torch.no_grad():
        for name, module in policy.model.named_modules():
            if hasattr(module, "lora_A"):
                a, b, w = module.lora_A["default"].weight, module.lora_B["default"].weight, base[f"{name}.weight"]
                w.copy_(torch.where(w < 0, w - 0.25, w + 0.25))  # none of them near 0, where small updates are kept
                b.copy_(1e-5 * torch.sin(torch.arange(b.numel()) + 1.0).view_as(b))
                added[f"{name}.weight"] = (LORA.alpha / LORA.rank) * b.double() @ a.double()
    return added


def test_an_update_below_the_spacing_of_bfloat16_is_in_the_export(tmp_path: Path) -> None:
    """Kept of the update: its product with what the exported weights differ by, in parts of its own square. In bfloat16: none."""
    policy, base = half()
    added = small_update(policy, base)
    base = {name: weight.detach().clone() for name, weight in base.items()}  # exporting changes them in place
    said = export(policy, tmp_path)
    assert "merged in float32" in said and "0% of the changed weights differ from the base" in said
    exported = load(str(tmp_path / "run/stages/sft/model")).model
    assert exported.dtype == torch.float32
    weights = exported.state_dict()
    for dtype, least, most in ((torch.float32, 0.999, 1.001), (torch.bfloat16, 0.0, 0.01)):
        differ = {name: weights[name].to(dtype).double() - base[name].double() for name in added}
        kept = sum(float((differ[n] * added[n]).sum()) for n in added) / sum(float(added[n].pow(2).sum()) for n in added)
        assert least <= kept <= most, f"{kept:.3f} of the update in {dtype}"


def test_peft_puts_the_exported_adapters_beside_the_base(tmp_path: Path) -> None:
    """The very policy that was trained, in bfloat16, bit for bit; and the merged export is close to it in float32."""
    policy, base = half()
    train(policy)
    trained, base = logits(policy.model), {name: weight.detach().clone() for name, weight in base.items()}
    assert "merged in float32" in export(policy, tmp_path)
    plain = small_policy(dtype=torch.bfloat16).model
    plain.load_state_dict(base, strict=False)
    before = logits(plain)
    folder = tmp_path / "run/stages/sft/model"
    loaded = pytest.importorskip("peft").PeftModel.from_pretrained(plain, str(folder / "adapter"), autocast_adapter_dtype=False)
    assert torch.equal(logits(loaded), trained) and float((trained - before).abs().max()) > 0.2
    assert float((logits(load(str(folder)).model) - trained).abs().max()) < 0.05


def half() -> tuple[Policy, dict[str, Tensor]]:
    """A policy in bfloat16 with adapters, and its frozen weights by their names in a plain model."""
    policy = small_policy(dtype=torch.bfloat16)
    policy.tokenizer = character_tokenizer("0123456789+=")
    add_adapters(policy.model, LORA, seed=1)
    return policy, {n.replace(".base_layer", ""): p for n, p in policy.model.named_parameters() if "lora_" not in n}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(BATCH.ids_T[None]).logits.float()


def export(policy: Policy, folder: Path) -> str:
    """As a stage does at its end; what it says."""
    with RunWriter(folder / "run", config={}) as writer:
        Context(writer, 0, say=False).save_model("sft", policy, LORA)
    (said,) = [str(event.details["text"]) for event in Run(folder / "run").events() if event.kind == "message"]
    return said


def test_the_engine_samples_with_the_adapters_on() -> None:
    """The log-probs of what is sampled are those of the adapted policy, not of the model below; also in a call that is long enough
    for the engine's faster ways."""
    policy, reference = adapted(dtype=torch.float32)
    train(policy, 5)
    (completions,) = generate_groups(Engine(policy), [Prompt((3, 4, 5), 16, 0, Sampling(40))])
    for completion in completions[:6]:
        ids = np.concatenate([[3, 4, 5], completion.ids])
        batch = pack_examples([Example(ids, np.arange(len(ids)) > 2)])
        with torch.no_grad():
            ours, below = (forward(p, batch).logprob_T[3:].numpy() for p in (policy, reference))
        np.testing.assert_allclose(completion.logprobs, ours, atol=1e-4)
        assert np.abs(completion.logprobs - below).max() > 0.01


def critic_of(policy: Policy) -> Scorer:
    critic = from_policy(policy, "mlp", seed=2, share=True)
    add_adapters(critic.model, LORA, seed=2, learning=("score.",))
    return critic


def test_the_critic_shares_the_trunk_and_learns_apart() -> None:
    """One step of PPO with all three on one set of frozen weights: each moves what is its own."""
    policy = small_policy()
    reference, critic = share_weights(policy), critic_of(policy)
    add_adapters(policy.model, LORA, seed=1)
    trunk = {p.data_ptr() for p in reference.body.parameters()}
    own = {name for name, p in critic.model.named_parameters() if p.data_ptr() not in trunk}
    assert own == {name for name, p in critic.model.named_parameters() if p.requires_grad}
    assert all(name.startswith("score.") or "lora_" in name for name in own) and len(own) == 4 + 2 * len(SHAPES)
    with torch.no_grad():
        assert float(scores(critic, BATCH).abs().max()) == 0.0
    algorithm = PPO()
    trainer = Trainer(policy, algorithm, Optimization(lr=1e-2), [Reference(reference), Critic(critic, Optimization(lr=1e-2))])
    frozen = {name: p.detach().clone() for name, p in reference.model.named_parameters()}
    trained = {name: p.clone() for name, p in trainer.weights().items()}
    step = material(algorithm, noise=0.0)
    for _ in range(3):  # a critic's hidden layer has no gradient while the last one is 0
        trainer.update(algorithm.prepare(trainer.fill(step), {}), 1e-2)
    assert all(torch.equal(p, frozen[name]) for name, p in reference.model.named_parameters())
    assert {n for n, p in trainer.weights().items() if not torch.equal(p, trained[n])} == set(trained)
    assert not {id(p) for p in trainer.optimizer.parameters.values()} & {
        id(p) for p in trainer.learners[1].optimizer.parameters.values()
    }


def test_chosen_layers_only() -> None:
    lora = Lora(rank=2, targets=("q_proj", "v_proj"))
    policy, reference = adapted(lora)
    names = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert len(names) == 2 * 2 * 2 and all("q_proj" in n or "v_proj" in n for n in names)
    assert lora.parameters(reference.body) == 2 * 2 * ((16 + 16) + (16 + 8))


def test_same_seed_same_adapters_and_the_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, other = adapted()[0], adapted()[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "lora: rank must be at least 1 and at most 65,536, not 0"),
        ({"alpha": 0.0}, "lora: alpha must be above 0, not 0.0"),
    ],
)
def test_refusals(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Lora(**settings)


def test_unknown_layers_are_named() -> None:
    """The output layer too: its adapter would be out of the log-probs' sight."""
    with pytest.raises(
        UserError, match="lora: this model has no linear layer called c_attn, lm_head; it has down_proj, gate_proj"
    ):
        add_adapters(small_policy().model, Lora(targets=("q_proj", "c_attn", "lm_head")), 0)


def test_a_mixture_of_experts_has_adapters_in_its_attention_alone_and_merges_to_a_plain_model() -> None:
    with pytest.raises(UserError, match="called gate_proj; it has k_proj, o_proj, q_proj, v_proj, and experts get none"):
        add_adapters(small_mixture().model, Lora(targets=("q_proj", "gate_proj")), 0)
    policy = small_mixture()
    add_adapters(policy.model, LORA, 0)
    learning = {name.split(".")[-4] for name, p in policy.model.named_parameters() if p.requires_grad}
    assert learning == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
        expected = forward(policy, BATCH).logprob_T
        merge_adapters(policy.model)
        torch.testing.assert_close(forward(policy, BATCH).logprob_T, expected, rtol=0, atol=1e-5)
    assert policy.model.state_dict().keys() == small_mixture().model.state_dict().keys()


def test_without_peft_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"LoRA needs peft: pip install 'posttrain\[lora\]'"):
        add_adapters(small_policy().model, LORA, 0)


@pytest.mark.parametrize(("family", "adapted"), [("mamba", {"in_proj"}), ("falcon-h1", {"in_proj", "q_proj", "gate_proj"})])
def test_of_a_mamba_mixer_only_what_its_kernels_do_not_read_gets_adapters(family: str, adapted: set[str]) -> None:
    _, policy = models(family)
    add_adapters(policy.model, Lora(rank=2), seed=1)
    names = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name, p in policy.model.named_parameters() if p.requires_grad}
    assert adapted <= names and not names & {"out_proj", "x_proj", "dt_proj"}
    with torch.no_grad():
        first = logprobs(policy)
    train(policy)
    merge_adapters(policy.model)
    assert not torch.equal(logprobs(policy), first)


def test_a_model_without_linear_layers_is_refused() -> None:
    """GPT-2 keeps its weights in modules of its own."""
    with pytest.raises(
        UserError, match="^lora: no layer of GPT2Model is an nn.Linear, to which adapters are added; train all weights: leave"
    ):
        add_adapters(models("gpt2")[1].model, LORA, seed=1)


def family(name: str, **changes: Any) -> Policy:
    config = transformers.AutoConfig.for_model(name, **(SHAPE | HEADS | IDS | {"pad_token_id": 2} | changes))
    return wrap_model(transformers.AutoModelForCausalLM.from_config(config).eval(), None, (STOP,))


def test_a_weight_that_layers_share_has_no_adapters() -> None:
    """Zamba2's, which would be merged with those of all its layers."""
    mamba = {"mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 8, "chunk_size": 16, "num_mem_blocks": 1}
    layers = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "use_shared_mlp_adapter": False}
    policy = family("zamba2", adapter_rank=4, **mamba, **layers)
    add_adapters(policy.model, Lora(rank=2), seed=1)
    train(policy, 5)
    before = logprobs(policy)
    merge_adapters(policy.model)
    torch.testing.assert_close(logprobs(policy), before, rtol=1e-4, atol=1e-4)


def test_experts_beside_lists_of_layers_are_left_alone() -> None:
    """LongCat's, in the same block as `mlps`: their adapters could not be merged when a run ended."""
    sizes = {"ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "zero_expert_num": 2, "moe_topk": 2, "num_layers": 2}
    policy = family("longcat_flash", head_dim=4, qk_head_dim=8, **(LATENT | GROUPS | sizes))
    add_adapters(policy.model, Lora(rank=2), seed=1)
    train(policy)
    before = logprobs(policy)
    merge_adapters(policy.model)
    torch.testing.assert_close(logprobs(policy), before, rtol=1e-4, atol=1e-4)


def test_what_peft_refuses_is_one_line() -> None:
    """It takes the gate of AfMoE's attention for one of its experts."""
    policy = family("afmoe", **(GROUPS | {"num_experts": 4}))
    with pytest.raises(UserError, match=r"^lora: Cannot convert PEFT target\(s\) gate_proj .*; name others by lora.targets"):
        add_adapters(policy.model, Lora(rank=2), seed=1)
    add_adapters(policy.model, Lora(rank=2, targets=("q_proj", "v_proj")), seed=1)
