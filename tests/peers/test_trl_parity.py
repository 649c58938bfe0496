"""The same mathematics in TRL: its own trainers and ours on the same ids, models and rewards; losses and every gradient compared.

`make test-peers` installs TRL; without it these tests are skipped.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from material_for_tests import STOP, VOCABULARY, roles_for
from torch import Tensor

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.dpo import DPO
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ipo import IPO
from posttrain.algorithms.kto import KTO
from posttrain.algorithms.orpo import ORPO
from posttrain.algorithms.reward_model import RewardModel
from posttrain.algorithms.rloo import RLOO
from posttrain.algorithms.simpo import SimPO
from posttrain.models.policy import Policy, wrap_model
from posttrain.models.scorer import Scorer, wrap_scorer
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_examples, pack_groups
from posttrain.train.trainer import Trainer
from posttrain.types import Batch, Example, Group, Outputs, Problem, Rollout, Score, Segment

pytestmark = pytest.mark.peers
trl = pytest.importorskip("trl", reason="TRL is not installed: make test-peers installs it")
datasets = pytest.importorskip("datasets", reason="TRL's datasets are not installed: make test-peers installs them")

PLAIN = {
    "per_device_train_batch_size": 4,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
}
TOLERANCE = {"rtol": 2e-4, "atol": 2e-6}  # TRL works in float32


def language_model(seed: int, score: bool = False) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.25, tie_word_embeddings=False,
        pad_token_id=0, eos_token_id=STOP, bos_token_id=1, num_labels=1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = (AutoModelForSequenceClassification if score else AutoModelForCausalLM).from_config(config, dtype=torch.float32)
    return made.eval()


def tokenizer() -> Any:
    """Letters, each a token of its own."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<s>", "<end>", *"abcdefghijklmnopqrstuvwxyz"[: VOCABULARY - 3]]
    backend = Tokenizer(models.BPE(vocab={t: n for n, t in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="<end>")


def ours(algorithm: Algorithm, model: Any, batch: Batch, reference: Any = None) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the whole step through our trainer, on copies of the models."""
    learner: Policy | Scorer
    if algorithm.trains == "scorer":
        learner = wrap_scorer(copy.deepcopy(model), None)
    else:
        learner = wrap_model(copy.deepcopy(model), None, (STOP,))
    frozen = wrap_model(copy.deepcopy(reference), None, (STOP,)) if reference is not None else None
    trainer = Trainer(learner, algorithm, Optimization(), roles_for(algorithm, learner, Optimization(), frozen))  # type: ignore[arg-type]
    metrics = trainer.forward_backward(algorithm.prepare(trainer.fill(batch), algorithm.start()))
    found = {name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None}
    return sum(float(m.total) for m in metrics if m.name == "loss"), found


def theirs(trainer: Any, inputs: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """TRL's loss and its gradients by parameter name."""
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def assert_same(one: tuple[float, dict[str, Tensor]], other: tuple[float, dict[str, Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5, abs=1e-6)
    shared = [name for name in other[1] if bool(other[1][name].any()) or name in one[1]]
    assert len(shared) > 10
    for name in shared:
        torch.testing.assert_close(one[1][name], other[1][name], **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


def rows(inputs: dict[str, Any], prefix: str = "") -> list[Example]:
    """The sequences of a padded batch of TRL's, as they are."""
    found = []
    for ids, seen, mask in zip(
        *(inputs[f"{prefix}{k}"] for k in ("input_ids", "attention_mask", "completion_mask")), strict=True
    ):
        keep = seen.bool()
        found.append(Example(ids[keep].numpy(), mask[keep].bool().numpy()))
    return found


PAIRS = [("abc", "de", "fgh"), ("b", "ccd", "a"), ("cde", "f", "ghij"), ("kl", "mno", "pq")]


def settings(kind: str, folder: Path, **changes: Any) -> Any:
    return getattr(trl, kind)(output_dir=str(folder), **(PLAIN | changes))


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        (DPO(beta=0.3), {"loss_type": ["sigmoid"], "beta": 0.3}),
        (IPO(tau=0.3), {"loss_type": ["ipo"], "beta": 0.3}),
    ],
    ids=["dpo", "ipo"],
)
def test_pairs(algorithm: Algorithm, changes: dict[str, Any], tmp_path: Path) -> None:
    data = datasets.Dataset.from_list([{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS])
    model, reference = language_model(0), language_model(1)
    trainer = trl.DPOTrainer(
        model=copy.deepcopy(model), ref_model=copy.deepcopy(reference), args=settings("DPOConfig", tmp_path, **changes),
        train_dataset=data, processing_class=tokenizer(),
    )  # fmt: skip
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    sequences = rows(inputs)
    half = len(sequences) // 2
    assert half == len(PAIRS)
    units = [
        Example(e.ids, e.mask, n, reward)
        for n in range(half)
        for e, reward in ((sequences[n], 1.0), (sequences[half + n], 0.0))
    ]
    assert_same(ours(algorithm, model, pack_examples(units), reference), theirs(trainer, inputs))


def pair_losses(algorithm: Algorithm) -> tuple[list[float], Tensor, Tensor]:
    """Our preference loss of random pairs, one by one, and the mean log-probs of their two sides."""
    generator = torch.Generator().manual_seed(0)
    examples = [
        Example(np.arange(length), np.arange(length) > 0, n // 2, 1.0 - n % 2) for n, length in enumerate([3, 5, 2, 9, 4, 4])
    ]
    batch = algorithm.prepare(pack_examples(examples), {})
    logprob_T = -3 * torch.rand(batch.tokens, generator=generator)
    terms = {t.name: t for t in algorithm.terms(Outputs(logprob_T, torch.zeros_like(logprob_T)), batch).terms}
    means_N = torch.stack([logprob_T[a + 1 : b].mean() for a, b in pairwise(batch.starts)])
    return (3 * terms["preference"].weight * terms["preference"].loss).tolist(), means_N[::2], means_N[1::2]


def test_orpo() -> None:
    """The odds-ratio term; the likelihood term of theirs also counts the prompt."""
    trainer = pytest.importorskip("trl.experimental.orpo").ORPOTrainer
    losses, chosen, rejected = pair_losses(ORPO(lam=0.3))
    settings = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))
    assert losses == pytest.approx((-trainer.odds_ratio_loss(settings, chosen, rejected)[0]).tolist(), rel=1e-5)


def test_simpo() -> None:
    trainer = pytest.importorskip("trl.experimental.cpo").CPOTrainer
    losses, chosen, rejected = pair_losses(SimPO(beta=1.5, gamma=0.7))
    settings = SimpleNamespace(
        alpha=0.0, beta=1.5, simpo_gamma=0.7, loss_type="simpo", label_smoothing=0.0, accelerator=SimpleNamespace(device="cpu")
    )
    assert losses == pytest.approx(trainer.cpo_loss(settings, chosen, rejected)[0].tolist(), rel=1e-5)


@pytest.mark.parametrize("changes", [{}, {"desirable_weight": 1.3, "undesirable_weight": 0.6, "beta": 0.4}])
def test_kto(changes: dict[str, Any], tmp_path: Path) -> None:
    """The mismatched sequences are TRL's own: each prompt with the response of its neighbour."""
    labels = [True, False, False, True]
    data = datasets.Dataset.from_list(
        [{"prompt": p, "completion": c, "label": v} for (p, c, _), v in zip(PAIRS, labels, strict=True)]
    )
    model, reference = language_model(0), language_model(1)
    trainer = trl.KTOTrainer(
        model=copy.deepcopy(model), ref_model=copy.deepcopy(reference), args=settings("KTOConfig", tmp_path, **changes),
        train_dataset=data, processing_class=tokenizer(),
    )  # fmt: skip
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    good = [float(v) for v in inputs["label"]]
    examples = [Example(e.ids, e.mask, -1, reward) for e, reward in zip(rows(inputs), good, strict=True)]
    examples += [Example(e.ids, e.mask, -1, math.nan) for e in rows(inputs, "KL_")]
    algorithm = KTO(
        beta=changes.get("beta", 0.1),
        desirable=changes.get("desirable_weight", 1.0),
        undesirable=changes.get("undesirable_weight", 1.0),
    )
    assert_same(ours(algorithm, model, pack_examples(examples), reference), theirs(trainer, inputs))


@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize("centring", [0.0, 0.05])
def test_reward_model(margin: bool, centring: float, tmp_path: Path) -> None:
    extra = [{"margin": 0.5 * (n + 1)} if margin else {} for n in range(4)]
    data = datasets.Dataset.from_list(
        [{"chosen": p + c, "rejected": p + r, **e} for (p, c, r), e in zip(PAIRS, extra, strict=True)]
    )
    model = language_model(0, score=True)
    trainer = trl.RewardTrainer(
        model=copy.deepcopy(model), args=settings("RewardConfig", tmp_path, center_rewards_coefficient=centring or None),
        train_dataset=data, processing_class=tokenizer(),
    )  # fmt: skip
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    half = len(inputs["input_ids"]) // 2
    wanted = inputs["margin"].tolist() if margin else [1.0] * half
    examples = []
    for n in range(half):
        for row, reward in ((n, wanted[n]), (half + n, 0.0)):
            ids = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].numpy()
            examples.append(Example(ids, np.arange(len(ids)) > 0, n, reward))
    assert_same(ours(RewardModel(margin=margin, centring=centring), model, pack_examples(examples)), theirs(trainer, inputs))


def reward(completions: list[str], **_: Any) -> list[float]:
    """Something that differs from sample to sample."""
    return [sum(ord(c) - 96 for c in text) % 7 / 3 for text in completions]


def rolled(trainer: Any, inputs: dict[str, Any], group: int, old: Callable[[int], np.ndarray]) -> Batch:
    """TRL's own samples as our rollouts, with the reward computed from their text."""
    rollouts: list[Rollout] = []
    for n in range(len(inputs["prompt_ids"])):
        prompt = inputs["prompt_ids"][n][inputs["prompt_mask"][n].bool()].numpy()
        keep = inputs["completion_mask"][n].bool()
        response = inputs["completion_ids"][n][keep].numpy()
        text = trainer.processing_class.decode(response, skip_special_tokens=True)
        logprobs = old(n)[: int(keep.sum())].astype(np.float32)
        segments = (Segment(prompt, "", False), Segment(response, text, True, logprobs))
        rollouts.append(Rollout(Problem(str(n // group), ""), n % group, segments, Score(reward([text])[0])))
    groups = [Group(rollouts[n].problem, tuple(rollouts[n : n + group])) for n in range(0, len(rollouts), group)]
    return pack_groups(groups, 1.0)


def online(kind: str, folder: Path, **changes: Any) -> tuple[Any, dict[str, Any], Any, Any]:
    """A trainer of TRL's after it has sampled, scored, and moved a little away from where it sampled."""
    data = datasets.Dataset.from_list([{"prompt": p} for p, _, _ in PAIRS])
    model, moved = language_model(0), language_model(0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    args = settings(
        f"{kind}Config", folder, num_generations=4, generation_batch_size=8, per_device_train_batch_size=8, max_completion_length=6,
        seed=1, num_iterations=2, **changes,
    )  # fmt: skip
    model.save_pretrained(folder / "model")  # the reference is read from there
    trainer = getattr(trl, f"{kind}Trainer")(
        model=str(folder / "model"), reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer()
    )
    torch.manual_seed(1)
    trainer.model.train()
    # not through `_prepare_inputs`, which shuffles what it has sampled
    inputs = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(dict(moved.named_parameters())[name])
    trainer.current_gradient_accumulation_steps = 1
    return trainer, inputs, model, moved


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        (GRPO(group=4, beta=0.0), {"loss_type": "grpo", "beta": 0.0}),
        (GRPO(group=4, beta=0.1), {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False}),
        (GRPO(group=4, beta=0.1, kl="corrected"), {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True}),
        (GRPO(group=4, beta=0.0, scale="none", reduction="constant_mean", constant=6.0),
         {"loss_type": "dr_grpo", "beta": 0.0, "scale_rewards": "none"}),
        (GRPO(group=4, beta=0.0, reduction="token_mean", scale="batch"), {"loss_type": "bnpo", "beta": 0.0, "scale_rewards": "batch"}),
    ],
    ids=["grpo", "k3", "corrected", "dr_grpo", "token_mean"],
)  # fmt: skip
def test_grpo(algorithm: GRPO, changes: dict[str, Any], tmp_path: Path) -> None:
    trainer, inputs, model, moved = online("GRPO", tmp_path, **changes)
    old = inputs["old_per_token_logps"]
    batch = rolled(trainer, inputs, 4, lambda n: old[n].numpy())
    advantages = [float(a) for a in inputs["advantages"]]
    prepared = algorithm.prepare(batch.replace(reference_T=torch.zeros(batch.tokens)), {})
    assert prepared.advantage_T is not None
    last = torch.tensor(batch.starts[1:]) - 1
    assert prepared.advantage_T[last].tolist() == pytest.approx(advantages, abs=1e-5) and any(advantages)
    assert_same(ours(algorithm, moved, batch, model), theirs(trainer, inputs))


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_rloo(beta: float, tmp_path: Path) -> None:
    trainer, inputs, model, moved = online("RLOO", tmp_path, beta=beta, epsilon=0.2)
    per_token = _logprobs(model, inputs)
    assert per_token.sum(1).tolist() == pytest.approx(inputs["old_logps"].tolist(), abs=1e-4)
    batch = rolled(trainer, inputs, 4, lambda n: per_token[n].numpy())
    algorithm = RLOO(group=4, beta=beta, clip_low=0.2, clip_high=0.2, correction="none")  # TRL compares with the sampler
    found = ours(algorithm, moved, batch, model)
    expected = theirs(trainer, inputs)
    # our loss is written per token with the gradient of theirs; its value is another
    assert_same((expected[0], found[1]), expected)


def _logprobs(model: Any, inputs: dict[str, Any]) -> Tensor:
    """[N, T] of the completions under a model, 0 at padding."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    position = (seen.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, attention_mask=seen, position_ids=position).logits
    width = inputs["completion_ids"].shape[1]
    found = logits[:, -width - 1 : -1].log_softmax(-1).gather(2, inputs["completion_ids"][..., None])[..., 0]
    return found * inputs["completion_mask"]
