"""The sampler draws from exactly the distribution whose log-probs it returns; its uniforms are SplitMix64's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.engine.random import derive, derive_each, mix, signed, uniforms
from posttrain.engine.sampler import Choices, invert, sample, truncate
from posttrain.errors import UserError
from posttrain.ops.logprobs import Head
from posttrain.types import Request, Sampling

DRAWS = 100_000
V = 20
LOGITS = torch.tensor([math.sin(3.0 * i) * 2 for i in range(V)])
CRITICAL = {19: 43.82, 6: 22.46, 4: 18.47}  # chi-square at 0.999 by degrees of freedom
MASK = (1 << 64) - 1


def draws(settings_of_all: Sampling, count: int = DRAWS, plain: bool | None = None, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Ids and log-probs of `count` rows with the same logits, each with its own uniform."""
    head = Head(LOGITS[:, None])
    s = settings_of_all
    plain = s.temperature == 1.0 and not s.truncated if plain is None else plain
    settings = (torch.full((count,), value) for value in (s.temperature, s.top_k, s.top_p))
    choices = Choices(*settings, plain=plain)
    return sample(torch.ones(count, 1), head, choices, uniforms(torch.full((count,), seed), torch.arange(count)))


def expected_probabilities(s: Sampling) -> np.ndarray:
    """Temperature, then top k, then the smallest set whose mass reaches p, renormalised: by hand in NumPy."""
    z = LOGITS.double().numpy() / s.temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if s.top_k:
        p[order[s.top_k :]] = 0
        p /= p.sum()
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), s.top_p - 1e-9)) + 1]
    cut = np.zeros_like(p)
    cut[kept] = p[kept]
    return cut / cut.sum()


SETTINGS = [
    *(Sampling(temperature=t) for t in (0.3, 0.6, 1.0, 1.5)),
    Sampling(top_k=5),
    Sampling(top_p=0.7),
    Sampling(temperature=0.6, top_k=7, top_p=0.9),
    Sampling(temperature=1.5, top_k=5, top_p=0.999),
]


@pytest.mark.parametrize("s", SETTINGS, ids=str)
def test_draws_follow_the_distribution(s: Sampling) -> None:
    """Chi-square on 100,000 draws, merging cells that expect fewer than ten; nothing outside the support is ever drawn."""
    id_N, logprob_N = draws(s)
    p = expected_probabilities(s)
    counts = np.bincount(id_N.numpy(), minlength=V)
    assert not counts[p == 0].any()
    enough = p * DRAWS >= 10
    observed = np.append(counts[enough], counts[~enough].sum())
    wanted = np.append(p[enough] * DRAWS, max(p[~enough].sum() * DRAWS, 1e-9))
    if wanted[-1] < 10:  # the rest is too rare to test
        observed, wanted = observed[:-1], wanted[:-1]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    bound = freedom + 3.1 * math.sqrt(2 * freedom) + 6.5  # above the 0.999 quantile for every number of degrees
    assert statistic < bound, f"chi-square {statistic:.1f} on {freedom} degrees of freedom"
    np.testing.assert_allclose(logprob_N.exp().numpy(), p[id_N.numpy()], rtol=1e-5)


def test_the_bound_of_the_chi_square_is_not_lax() -> None:
    for freedom, quantile in CRITICAL.items():
        assert quantile <= freedom + 3.1 * math.sqrt(2 * freedom) + 6.5 <= 1.25 * quantile
    # and a sampler that forgets the temperature is caught at once
    counts = np.bincount(draws(Sampling(temperature=0.6))[0].numpy(), minlength=V)
    wanted = expected_probabilities(Sampling(temperature=1.0)) * DRAWS
    assert ((counts - wanted) ** 2 / wanted).sum() > 1000


def test_low_temperature_and_top_k_1_are_argmax() -> None:
    best = int(LOGITS.argmax())
    for s in (Sampling(temperature=0.0), Sampling(temperature=1e-4), Sampling(top_k=1), Sampling(top_p=1e-6)):
        id_N, logprob_N = draws(s, 200)
        assert id_N.tolist() == [best] * 200
        assert logprob_N.tolist() == [0.0] * 200


def test_plain_and_truncated_sampling_paths_agree() -> None:
    one, other = draws(Sampling(), 1000, plain=True), draws(Sampling(), 1000, plain=False)
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_log_probs_are_those_of_the_kept_support() -> None:
    """Under top-k the kept mass is divided out; the full softmax would say less."""
    id_N, logprob_N = draws(Sampling(top_k=3), 100)
    full = torch.log_softmax(LOGITS, -1)
    kept = torch.logsumexp(full.sort(descending=True).values[:3], 0)
    torch.testing.assert_close(logprob_N, full[id_N] - kept, rtol=1e-5, atol=1e-6)
    assert float(kept) < -0.1


def test_rows_of_a_mixed_batch_do_not_touch_each_other() -> None:
    """A row without truncation keeps its log-probs to the last bit beside rows that have it; a cold row stays cold."""
    choices = Choices(torch.tensor([1.0, 0.7, 0.0, 1.0]), torch.tensor([0, 3, 0, 0]), torch.tensor([1.0, 1.0, 1.0, 0.5]))
    seed_N, position_N = torch.tensor([1, 2, 3, 4]), torch.zeros(4, dtype=torch.long)
    id_N, logprob_N = sample(torch.ones(4, 1), Head(LOGITS[:, None]), choices, uniforms(seed_N, position_N))
    for n in range(4):
        only = Choices(choices.temperature_N[n : n + 1], choices.top_k_N[n : n + 1], choices.top_p_N[n : n + 1])
        alone = sample(torch.ones(1, 1), Head(LOGITS[:, None]), only, uniforms(seed_N[n : n + 1], position_N[n : n + 1]))
        assert torch.equal(alone[0], id_N[n : n + 1]) and torch.equal(alone[1], logprob_N[n : n + 1])


def test_top_p_one_cuts_nothing_even_where_rounding_reaches_one() -> None:
    """In float32 the mass before a token of 2e-9 is 1 already: without care, top_p = 1 would forbid it."""
    logprob_NV = torch.log_softmax(torch.tensor([[0.0, -20.0, -21.0]]), -1)
    torch.testing.assert_close(truncate(logprob_NV, torch.tensor([3]), torch.tensor([1.0])), logprob_NV)


def test_top_p_keeps_the_token_that_crosses() -> None:
    logprob_NV = torch.tensor([[0.5, 0.3, 0.2]]).log()
    kept = truncate(logprob_NV, torch.tensor([0]), torch.tensor([0.6])).exp()
    torch.testing.assert_close(kept, torch.tensor([[0.625, 0.375, 0.0]]))


@settings(max_examples=100, deadline=None)
@given(u=st.floats(0, 1, exclude_max=True), p=st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_inversion_takes_the_first_id_past_the_uniform(u: float, p: list[float]) -> None:
    if sum(p) < 1e-6:
        return
    logprob = torch.tensor([p], dtype=torch.float64).log()
    found = int(invert(logprob, torch.tensor([u], dtype=torch.float64)))
    total = np.cumsum(np.exp(logprob[0].numpy()))
    assert p[found] > 0
    assert total[found] >= u * total[-1] - 1e-12
    assert found == 0 or total[found - 1] <= u * total[-1] + 1e-12


def reference_splitmix(seed: int, count: int) -> list[int]:
    """SplitMix64 as published, on Python integers."""
    state, outputs = seed & MASK, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(z ^ (z >> 31))
    return outputs


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1, 2**63, MASK, 0xDEADBEEFCAFEBABE])
def test_uniforms_are_splitmix64(seed: int) -> None:
    found = uniforms(torch.full((50,), signed(seed)), torch.arange(50))
    assert found.dtype == torch.float64
    assert found.tolist() == [(x >> 11) * 2.0**-53 for x in reference_splitmix(seed, 50)]


def test_published_outputs_of_splitmix64() -> None:
    """Seed 1234567, from the test vectors of its reference implementation."""
    assert reference_splitmix(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniforms_are_uniform_and_rows_unrelated() -> None:
    rows = torch.stack([uniforms(torch.full((20_000,), signed(derive(5, n))), torch.arange(20_000)) for n in range(2)])
    assert float(rows.min()) >= 0 and float(rows.max()) < 1
    assert abs(float(rows.mean()) - 0.5) < 0.01 and abs(float(rows.var()) - 1 / 12) < 0.005
    assert abs(float(torch.corrcoef(rows)[0, 1])) < 0.03


def test_seeds_derive_from_paths() -> None:
    """Order and depth matter, neighbours differ in half their bits, nothing collides."""
    paths = [(a, b) for a in range(60) for b in range(60)]
    assert len({derive(*path) for path in paths}) == len(paths)
    assert derive(1, 2) != derive(2, 1) and derive(1) != derive(1, 0) and derive(0) != derive()
    flips = [bin(derive(0, n) ^ derive(0, n + 1)).count("1") for n in range(200)]
    assert 28 < np.mean(flips) < 36
    assert all(0 <= derive(*path) <= MASK for path in paths)
    assert [signed(x) & MASK for x in (0, 2**63, MASK)] == [0, 2**63, MASK] and mix(0) == 0


def test_seeds_of_many_paths_are_those_of_each() -> None:
    first, second = (-3, 0, 7, MASK, 1 << 70), (5, 2, -1, 0, 1)
    found = derive_each(first, second)
    assert found == [derive(*path) for path in zip(first, second, strict=True)]
    assert {type(seed) for seed in found} == {int}  # JSON has no uint64
    assert derive_each([], []) == []


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ({"temperature": -0.1}, "temperature must be at least 0, not -0.1"),
        ({"temperature": math.nan}, "temperature must be at least 0, not nan"),
        ({"top_k": -1}, "top_k must be 0 (all) or a number of tokens, not -1"),
        ({"top_p": 0.0}, "top_p must be in (0, 1], not 0.0"),
        ({"top_p": 1.5}, "top_p must be in (0, 1], not 1.5"),
        ({"min_new_tokens": -1}, "min_new_tokens must be at least 0, not -1"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens=5 is more than max_new_tokens=4; lower it"),
    ],
)
def test_settings_without_meaning_are_refused(settings_: dict, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        Sampling(**settings_)
    assert str(refusal.value) == message


def test_requests_without_meaning_are_refused() -> None:
    with pytest.raises(UserError, match="a prompt needs at least one token"):
        Request((), 0, Sampling())
    with pytest.raises(UserError, match="turns are counted from 0, not -1"):
        Request((3,), 0, Sampling(), turn=-1)
