"""Small models, batches made by hand, and every algorithm of the catalogue with settings that exercise its branches."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from posttrain import catalogue
from posttrain.algorithms.base import Algorithm
from posttrain.collect import Examples
from posttrain.models.policy import Policy, wrap_model
from posttrain.models.scorer import Scorer, from_policy
from posttrain.train.forward import forward
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import micro_batches, pack_examples, pack_groups, with_loss
from posttrain.train.roles.base import Role
from posttrain.train.roles.critic import Critic, values
from posttrain.train.roles.pretraining import Pretraining
from posttrain.train.roles.proximal import Proximal
from posttrain.train.roles.reference import Reference
from posttrain.train.roles.teacher import Teacher
from posttrain.train.trainer import Trainer
from posttrain.types import Batch, Example, Group, Prediction, Problem, Rollout, Score, Segment

torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other

VOCABULARY, STOP = 24, 2
WIDE = torch.float64

# Settings under which each algorithm is tested besides its defaults. An algorithm without a line is tested with its defaults.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "reward_model": [{"margin": True, "centring": 0.01}],
    "process_reward_model": [{"reduction": "sequence_mean"}],
    "best_of_n": [{"reduction": "sequence_mean"}],
    "raft": [{"share": 1.0, "threshold": 0.5}],
    "sft": [{"reduction": "sequence_mean"}],
    "dpo": [
        {"label_smoothing": 0.1, "alpha": 0.5},
        {"labels": "soft", "beta": 0.5},
        {"form": "robust", "label_smoothing": 0.2},
        {"form": "hinge", "alpha": 0.1},
        {"form": "apo_zero"},
        {"form": "apo_down"},
    ],
    "ipo": [{"length": "sum"}],
    "kto": [{"desirable": 1.3, "undesirable": 0.7, "beta": 0.5}],
    "simpo": [{"gamma": 0.0}],
    "xpo": [{"alpha": 0.5, "max_weight": 1.05}, {"group": 4, "alpha": 0.1}],
    "grpo": [
        {"beta": 0.0},
        {"beta": 0.0, "reduction": "token_mean", "clip_high": 0.28, "truncated": "zero"},
        {"beta": 0.0, "scale": "none", "reduction": "constant_mean", "constant": 7.0},
        {"kl": "k2", "scale": "batch", "ddof": 0, "dual_clip": 1.1, "mask_low": 0.9, "mask_high": 1.1},
        {"kl": "corrected", "entropy": 0.01},
        {"supervision": "process", "correction": "token", "cap": 1.05},
        {"kl_in": "reward", "truncated": "mask", "drop": "mean", "bound": 0.12},
        {"pass_k": 2, "solved": 0.25},
        {"parts": ("answer", "format"), "part_weights": (1.0, 0.5)},
    ],
    "reinforce": [{"baseline": "none"}, {"beta": 0.1, "correction": "decoupled"}],
    "reinforce_plus_plus": [{"group": 4, "baseline": "group"}],
    "rloo": [{"kl_in": "both", "kl": "k2", "clip_low": 0.2, "clip_high": 0.2, "epochs": 2}, {"correction": "none"}],
    "dapo": [{"l_max": 8, "l_cache": 4}],
    "gspo": [
        {"form": "token", "supervision": "process", "beta": 0.1, "clip_low": 0.1, "clip_high": 0.1, "mini_batches": 2},
        {"correction": "none"},
    ],
    "distillation": [
        {"divergence": "forward", "temperature": 1.3, "reduction": "sequence_mean"},
        {"divergence": "jensen_shannon", "jsd_beta": 0.3, "beta": 0.1, "entropy": 0.01},
        {"divergence": "sampled", "clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.1, "mini_batches": 2, "truncated": "mask"},
        {"divergence": "sampled", "drop": "mean", "bound": 0.12, "mask_low": 0.9, "mask_high": 1.1},
        {"reward_weight": 2.0, "group": 4, "kl_in": "reward", "beta": 0.1, "correction": "token", "cap": 1.05},
    ],
    "dppo": [{"ratio_cap": 1.05, "divergence": "kl", "delta": 0.05}],
    "remax": [{"group": 3, "kl_in": "both", "beta": 0.5, "clip_low": 0.2, "clip_high": 0.2}],
    "cispo": [{"clip_high": 0.1, "clip_low": 0.1, "correction": "sequence", "cap": 1.1}],
    "ppo": [
        {"beta": 0.0, "clip_value": 0.0, "whiten_advantages": False, "reduction": "sequence_mean"},
        {"entropy": 0.01, "whiten_rewards": True, "missing_eos": 0.5, "gamma": 0.9, "lam": 0.5, "kl_target": 6.0},
        {"supervision": "both", "beta": 0.0},
        {"ptx": 0.5, "target_kl": 0.1, "mini_batches": 2},
        {"correction": "token", "cap": 1.05, "drop": "mean", "bound": 0.12},
        {"kl_in": "loss", "kl": "corrected", "lam_alpha": 0.4, "dual_clip": 1.1},
    ],
}


def algorithm_class(name: str) -> type[Algorithm]:
    return catalogue.load("algorithm", name, Algorithm)


def _cases() -> Iterator[Any]:
    for name in catalogue.names("algorithm"):
        for settings in ({}, *VARIANTS.get(name, [])):
            label = "-".join([name, *(f"{key}={value}" for key, value in settings.items())])
            yield pytest.param(algorithm_class(name)(**settings), id=label)


CASES = list(_cases())
DEFAULTS = [pytest.param(algorithm_class(name)(), id=name) for name in catalogue.names("algorithm")]
IMITATING = {"best_of_n", "raft"}  # online, but they learn the samples they keep by maximum likelihood: no advantages
ONLINE = [
    case
    for case in CASES
    if (one := case.values[0]).learns_from == "rollouts"
    and one.unit == "sequence"
    and catalogue.name_of(one) not in IMITATING
    and getattr(one, "has_advantages", True)
]  # those with advantages
POLICIES = [case for case in CASES if case.values[0].trains == "policy"]  # those with log-probs


def small_policy(seed: int = 0, dtype: torch.dtype = WIDE, stop_ids: tuple[int, ...] = (STOP,), **shape: Any) -> Policy:
    """A Llama of a few thousand weights, large enough in scale that its distribution is far from uniform. It is a copy: to build a
    model takes five times as long."""
    return copy.deepcopy(_small_policy(seed, dtype, stop_ids, tuple(sorted(shape.items()))))


@lru_cache
def _small_policy(seed: int, dtype: torch.dtype, stop_ids: tuple[int, ...], shape: tuple[tuple[str, Any], ...]) -> Policy:
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.25}
    config = LlamaConfig(**(sizes | heads | {"tie_word_embeddings": True} | dict(shape)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = model.to(dtype).eval()
    if dtype == WIDE:
        widen(model)
    return wrap_model(model, None, stop_ids)


def small_mixture(dtype: torch.dtype = torch.float32) -> Policy:
    """A Qwen3-MoE with four experts, of which a token has two. It is a copy."""
    return wrap_model(copy.deepcopy(_small_mixture(dtype)), None, (STOP,))


@lru_cache
def _small_mixture(dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, moe_intermediate_size=16, num_hidden_layers=2, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
        max_position_embeddings=128, initializer_range=0.3, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.set_experts_implementation("eager")  # transformers' loop, which it has for float64 too
    return model.eval()


def widen(model: nn.Module) -> None:
    """Norms that stay in float64: those of transformers round to float32 whatever the model's dtype, and would hide 1e-10."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=WIDE)
                norm.weight = child.weight
                setattr(module, name, norm)


@lru_cache
def shared_policy(seed: int = 0, dtype: torch.dtype = WIDE) -> Policy:
    """A policy that tests may read and take gradients of, but not move."""
    return small_policy(seed, dtype)


@lru_cache
def shared_teacher() -> Policy:
    """A teacher that is wider than the shared policy."""
    return small_policy(2, hidden_size=32)


@lru_cache
def shared_scorer() -> Scorer:
    """The scorer that `trainer_for` gives as a critic to the shared policy."""
    return from_policy(shared_policy(), zero=False, seed=1)


def segment(ids: Sequence[int], sampled: bool, logprobs: Sequence[float] | None = None, finish: str = "") -> Segment:
    values = np.zeros(len(ids), np.float32) if logprobs is None and sampled else logprobs
    return Segment(
        np.array(ids, dtype=np.int64), "", sampled, None if values is None else np.array(values, np.float32), finish=finish
    )


def rollout(segments: Sequence[Segment], reward: float | None, problem: str = "p", sample: int = 0) -> Rollout:
    score = Score.failed("timeout") if reward is None else Score(reward)
    return Rollout(Problem(problem, ""), sample, tuple(segments), score)


def group(rollouts: Sequence[Rollout], problem: str = "p") -> Group:
    """Each rollout is an episode of its own."""
    return Group(Problem(problem, ""), tuple(replace(r, sample=n) for n, r in enumerate(rollouts)))


def plain_batch(
    rewards: Sequence[float | None], groups: Sequence[int], lengths: Sequence[int] | None = None, prompt: int = 1
) -> Batch:
    """One prompt of `prompt` tokens and a response of the given length for each reward; behaviour log-probs of 0."""
    lengths = [1] * len(rewards) if lengths is None else lengths
    made = []
    for number in dict.fromkeys(groups):
        members = [i for i, g in enumerate(groups) if g == number]
        responses = [(segment([3] * prompt, False), segment([4 + i] * lengths[i], True)) for i in members]
        made.append(group([rollout(parts, rewards[i]) for parts, i in zip(responses, members, strict=True)]))
    return pack_groups(made, 1.0)


@cache
def material(algorithm: Algorithm, seed: int = 0, noise: float = 0.15) -> Batch:
    """`make_material`, once for each algorithm: nobody may change the tensors of a step in place."""
    return make_material(algorithm, seed, noise)


def make_material(algorithm: Algorithm, seed: int = 0, noise: float = 0.15) -> Batch:
    """A step that the algorithm can prepare: ragged, with an observation in the middle of one rollout, a rollout that could not
    be scored and a group in which all rewards are equal; what the algorithm needs of others is filled in."""
    strange = algorithm.roles - {"reference", "critic", "proximal", "pretraining", "teacher"}
    assert not strange, f"teach material_for_tests.material to provide {sorted(strange)}"
    generator = np.random.default_rng(seed)
    batch = _online(generator, algorithm) if algorithm.learns_from == "rollouts" else _offline(generator, algorithm.unit)
    with torch.no_grad():
        if algorithm.learns_from == "rollouts":
            logprob_T = forward(shared_policy(), batch).logprob_T
            shift_T = torch.from_numpy(generator.normal(0, noise, batch.tokens)) if noise else torch.zeros(batch.tokens)
            batch = batch.replace(behaviour_T=(logprob_T + shift_T).where(batch.mask_T, 0.0))
        if "reference" in algorithm.roles:
            batch = batch.replace(reference_T=forward(shared_policy(1), batch).logprob_T)
        if algorithm.teacher_by_token:
            batch = batch.replace(teacher_T=forward(shared_teacher(), batch).logprob_T)
        if "critic" in algorithm.roles:
            shift_T = torch.from_numpy(generator.normal(0, noise, batch.tokens))
            batch = batch.replace(value_T=(values(shared_scorer(), batch) + shift_T).where(batch.mask_T, 0.0))
        if "proximal" in algorithm.roles:
            shift_T = torch.from_numpy(generator.normal(0, noise / 3, batch.tokens))
            logprob_T = forward(shared_policy(), batch).logprob_T
            batch = batch.replace(proximal_T=(logprob_T + shift_T).where(batch.mask_T, 0.0))
    return batch


def bare(step: Batch) -> Batch:
    """A step made by hand, with others who say nothing of it: log-probs and values of 0, and steps that end with the response."""
    zero_T, step_T = torch.zeros(step.tokens), torch.full((step.tokens,), torch.nan)
    step_T[torch.tensor(step.starts[1:]) - 1] = step.reward_N
    return parted(step.replace(reference_T=zero_T, value_T=zero_T, proximal_T=zero_T, teacher_T=zero_T, step_T=step_T))


def parted(step: Batch) -> Batch:
    """A step whose scores have two parts: the reward, and whether there is any."""
    return step.replace(**{"part/answer_N": step.reward_N, "part/format_N": (step.reward_N > 0).float()})


def _online(generator: np.random.Generator, algorithm: Algorithm) -> Batch:
    rewards: list[list[float | None]] = [[1.0, 0.0, 0.25, None], [0.5, 0.5, 0.5], [0.0, 1.0, 1.0, 0.0]]
    groups = []
    for number, scored in enumerate(rewards):
        prompt = _ids(generator, 2 + number)
        members = []
        for sample, value in enumerate(scored):
            parts = [segment(prompt, False), segment(_ids(generator, 1 + (sample * 3) % 8), True)]
            if number == 0 and sample == 1:  # a tool answered, and the policy went on
                parts += [segment(_ids(generator, 3), False), segment(_ids(generator, 4), True)]
            members.append(rollout(parts, value, f"p{number}", sample))
        groups.append(group(members, f"p{number}"))
    together = algorithm.unit != "sequence"  # then what is trained on is what the algorithm selects, kept together
    batch = pack_groups(algorithm.select(groups, algorithm.start()).groups if together else groups, 0.7, together=together)
    batch = batch.replace(step_T=_steps(generator, batch), truncated_N=torch.arange(batch.sequences) % 5 == 1)
    return parted(batch) if algorithm.learns_parts else batch


def _steps(generator: np.random.Generator, batch: Batch) -> Tensor:
    """A value for the step that ends at some of the loss tokens, and at the last one of every sequence."""
    last_T = torch.zeros(batch.tokens, dtype=torch.bool)
    last_T[torch.tensor(batch.starts[1:]) - 1] = True
    ends_T = batch.mask_T & (last_T | torch.from_numpy(generator.random(batch.tokens) < 0.3))
    return torch.from_numpy(generator.integers(0, 2, batch.tokens).astype(np.float32)).where(ends_T, torch.nan)


def _offline(generator: np.random.Generator, unit: str) -> Batch:
    members = {"pair": 2, "ranking": 4}.get(unit, 1)
    examples = []
    for number in range(8):
        length = 3 + (number * 5) % 9
        mask = np.arange(length) >= 1 + number % 2
        mask[length // 2] = length < 8  # some have a gap, as between two turns
        # a pair or ranking from better to worse; single examples are good, bad, or there for comparison only
        label = float(members - 1 - number % members) if members > 1 else (1.0, 0.0, 1.0, math.nan)[number % 4]
        examples.append(Example(np.array(_ids(generator, length)), mask, number // members, label))
    batch = pack_examples(examples)
    return batch.replace(step_T=_steps(generator, batch))


def _ids(generator: np.random.Generator, count: int) -> list[int]:
    return generator.integers(3, VOCABULARY, count).tolist()


def gradients(
    algorithm: Algorithm, prepared: Batch, budget: int = 10**6, policy: Policy | None = None, dropped: bool = True
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a prepared step and its gradient by parameter name, as the trainer adds them up. An algorithm that trains a
    scorer gets one on the policy's body; one with a critic, a fixed one beside it."""
    trainer = shared_trainer(algorithm) if policy is None else trainer_for(algorithm, policy, Optimization())
    trained = [learner.network.model for learner in trainer.learners]
    for model in trained:
        model.zero_grad()
    whole = with_loss(prepared) if dropped else prepared
    metrics = [m for piece in micro_batches(whole, budget) for m in trainer.forward_backward(piece)]
    found = {
        ("critic." if n else "") + name: p.grad.clone()
        for n, m in enumerate(trained)
        for name, p in m.named_parameters()
        if p.grad is not None
    }
    for model in trained:
        model.zero_grad()
    return sum(float(m.total) for m in metrics if m.name == "loss"), found


def trainer_for(algorithm: Algorithm, policy: Policy, settings: Optimization, reference: Policy | None = None) -> Trainer:
    """A trainer with the roles that the algorithm asks for; the reference only where it is given."""
    learner = from_policy(policy, zero=False) if algorithm.trains == "scorer" else policy
    return Trainer(learner, algorithm, settings, roles_for(algorithm, policy, settings, reference))


def roles_for(
    algorithm: Algorithm,
    policy: Policy,
    settings: Optimization,
    reference: Policy | None = None,
    text: Sequence[Example] = (),
) -> list[Role]:
    """A critic on the policy's body with a head at random, the proximal policy, `reference` and `text` where there are any."""
    made: list[Role] = [] if reference is None else [Reference(reference, watched="reference" not in algorithm.roles)]
    if "critic" in algorithm.roles:
        made.append(Critic(from_policy(policy, zero=False, seed=1), settings))
    if "proximal" in algorithm.roles:
        made.append(Proximal(policy))
    if "teacher" in algorithm.roles:
        made.append(Teacher(shared_teacher(), algorithm.teacher_by_token))
    if text:
        source = Examples([list(text)], [1.0], len(text), 0, torch.device("cpu"))
        made.append(Pretraining(source, algorithm.additions["pretraining"]))
    return made


def predictions(algorithm: Algorithm, batch: Batch) -> dict[str, Prediction]:
    """Hidden states and heads of the shared policy and of the teacher, where the algorithm has one."""
    return shared_trainer(algorithm).outputs(batch).predictions if "teacher" in algorithm.roles else {}


@cache
def shared_trainer(algorithm: Algorithm) -> Trainer:
    """A trainer of the shared policy, for gradients alone: it may not update."""
    return trainer_for(algorithm, shared_policy(), Optimization())


def assert_same_gradients(
    one: tuple[float, dict[str, Tensor]], other: tuple[float, dict[str, Tensor]], tolerance: float = 1e-10
) -> None:
    assert one[1].keys() == other[1].keys()
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in one[1].values()))
    assert one[0] == pytest.approx(
        other[0], abs=tolerance * max(1.0, norm), rel=tolerance
    )  # a loss may cancel to nearly nothing
    for name, gradient in one[1].items():
        worst = float((gradient - other[1][name]).abs().max())
        assert worst <= tolerance * max(1.0, norm), f"{name} differs by {worst}"


def copies_that_wait(patch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the tensors that are copied to a device from now on by a copy that would wait for a GPU."""
    own, found = Tensor.to, list[torch.Size]()

    def to(tensor: Tensor, *given: Any, **options: Any) -> Tensor:
        if any(isinstance(one, (torch.device, str)) for one in given) and not options.get("non_blocking"):
            found.append(tensor.shape)
        return own(tensor, *given, **options)

    patch.setattr(Tensor, "to", to)
    return found
