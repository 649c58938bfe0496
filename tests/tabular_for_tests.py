"""Problems so small that every response can be written down: policies are tables of logits, expectations are sums, not samples.

A step holds every group of responses that could be drawn. The algorithm selects and prepares it as it would a sampled one; then each
sequence's weight is multiplied by the probability of its group, so that the gradient is the expected one of a large step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product

import numpy as np
import torch
from material_for_tests import WIDE, group, rollout, segment
from torch import Tensor

from posttrain.algorithms.base import Algorithm
from posttrain.ops.logprobs import Head
from posttrain.train.pack import pack_examples, pack_groups
from posttrain.types import Batch, Example, Metric, Outputs, Prediction, Rollout

PROMPT = 9
Policy = np.ndarray  # [responses]: a probability for each


@dataclass(frozen=True)
class Table:
    """`reference[s][v]` is the probability of token v in state s; the state is what was said before, in the order of `states`."""

    responses: tuple[tuple[int, ...], ...]
    reward: tuple[float, ...]
    reference: tuple[tuple[float, ...], ...]

    @property
    def states(self) -> list[tuple[int, ...]]:
        return sorted({r[:n] for r in self.responses for n in range(len(r))}, key=lambda prefix: (len(prefix), prefix))

    @property
    def flipped(self) -> Table:
        return Table(self.responses, tuple(-r for r in self.reward), self.reference)

    @lru_cache  # noqa: B019 - tables are constants
    def cells(self, responses: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor]:
        """State and token at every position of prompts and responses laid end to end; the prompt's own are (0, 0)."""
        where = {prefix: n for n, prefix in enumerate(self.states)}
        pairs = [(0, 0) if n < 0 else (where[r[:n]], r[n]) for r in responses for n in range(-1, len(r))]
        return torch.tensor([s for s, _ in pairs]), torch.tensor([v for _, v in pairs])

    @cached_property
    def owners(self) -> tuple[Tensor, Tensor]:
        """Whose token stands at each position of prompts and responses laid end to end, and whether it is a prompt's."""
        owner_T = torch.tensor([n for n, r in enumerate(self.responses) for _ in range(1 + len(r))])
        return owner_T, torch.tensor([position < 0 for r in self.responses for position in range(-1, len(r))])

    def policy(self, logits_SV: Tensor) -> Policy:
        """The probability of each response."""
        state_T, token_T = self.cells(self.responses)
        logprob_T = logits_SV.detach().log_softmax(1)[state_T, token_T]
        owner_T, prompt_T = self.owners
        sums_N = torch.zeros(len(self.responses), dtype=WIDE).index_add(0, owner_T, logprob_T.where(~prompt_T, 0.0))
        return sums_N.exp().numpy()

    @property
    def start(self) -> Tensor:
        return torch.tensor(self.reference, dtype=WIDE).log()

    @property
    def teacher(self) -> Tensor:
        """The logits of a policy that is sure of what the reference hardly says."""
        return 2 * self.start.flip(1)

    def optimum(self, beta: float, reward: Sequence[float] | None = None) -> Policy:
        """pi* = ref exp(r / beta) / Z, the policy that maximises E[r] - beta KL(pi || ref)."""
        weight = self.policy(self.start) * np.exp(np.array(self.reward if reward is None else reward) / beta)
        return weight / weight.sum()

    @property
    def best(self) -> int:
        return int(np.argmax(self.reward))


# one token: a bandit with five arms
BANDIT = Table(tuple((v,) for v in range(5)), (1.0, 0.0, 0.5, -0.5, 0.25), ((0.1, 0.2, 0.3, 0.25, 0.15),))
# token 0 ends a response at once; after 1 and 2 there is one token more. The best response begins with an unlikely token.
TREE = Table(
    ((0,), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)),
    (0.2, -0.6, 0.4, 0.1, 1.0, -1.0, 0.3),
    ((0.3, 0.5, 0.2), (0.2, 0.3, 0.5), (0.3, 0.5, 0.2)),
)


def divergence(p: Policy, q: Policy) -> float:
    """KL(p || q)."""
    return float((p * (np.log(p) - np.log(q))).sum())


@dataclass(eq=False)
class Enumeration:
    """A step of everything that could be drawn: the batch, the cells of its tokens, and what the draw of each sequence weighs."""

    table: Table
    batch: Batch
    drawn: list[tuple[int, ...]]  # of each sequence, the responses that were drawn together with it
    draws: int
    likelihood: Callable[[np.ndarray, Policy], np.ndarray]  # of each row of draws

    def __post_init__(self) -> None:
        ids = [self.batch.ids_T[a + 1 : b].tolist() for a, b in pairwise(self.batch.starts)]
        self.state_T, self.token_T = self.table.cells(tuple(tuple(i) for i in ids))
        self.drawn_NG = np.array(self.drawn)
        self.reference_T = self.logprobs(self.table.start)

    def logprobs(self, logits_SV: Tensor) -> Tensor:
        return logits_SV.log_softmax(1)[self.state_T, self.token_T].where(self.batch.mask_T, 0.0)

    def filled(self, logits_SV: Tensor, value_S: Tensor, algorithm: Algorithm) -> Batch:
        """The step as the trainer hands it to the algorithm, on the policy that sampled it."""
        logprob_T, roles = self.logprobs(logits_SV.detach()), algorithm.roles
        return self.batch.replace(
            behaviour_T=logprob_T if algorithm.learns_from == "rollouts" else self.batch.behaviour_T,
            reference_T=self.reference_T if "reference" in roles else None,
            proximal_T=logprob_T if "proximal" in roles else None,
            value_T=value_S.detach()[self.state_T].where(self.batch.mask_T, 0.0) if "critic" in roles else None,
            teacher_T=self.logprobs(self.table.teacher) if algorithm.teacher_by_token else None,
        )

    def predictions(self, logits_SV: Tensor) -> dict[str, Prediction]:
        """The policy and the teacher as heads on hidden states that name the state."""
        at_M = self.batch.mask_T.nonzero()[:, 0]
        hidden_MS = torch.eye(len(logits_SV), dtype=WIDE)[self.state_T[at_M]]
        heads = {"policy": logits_SV, "teacher": self.table.teacher}
        return {name: Prediction(at_M, hidden_MS, Head(table_SV.t())) for name, table_SV in heads.items()}

    def weighted(self, prepared: Batch, policy: Policy) -> Batch:
        """The prepared step with each sequence's weight times the likelihood of its draw."""
        factor_N = self.draws * torch.from_numpy(self.likelihood(self.drawn_NG, policy))
        weight_T, weight_N, bonus_N = (prepared.columns.get(name) for name in ("weight_T", "weight_N", "bonus_N"))
        return prepared.replace(
            weight_T=None if weight_T is None else weight_T * factor_N[prepared.sequence_T],
            weight_N=None if weight_N is None else weight_N * factor_N,
            bonus_N=None if bonus_N is None else bonus_N * factor_N,
        )


def every_group(table: Table, algorithm: Algorithm) -> Enumeration:
    """All groups of responses, each as likely as the policy makes it, as the algorithm selects from them."""
    draws = list(product(range(len(table.responses)), repeat=algorithm.group_size))

    def one(response: int, problem: str, sample: int) -> Rollout:
        return rollout(
            [segment([PROMPT], False), segment(table.responses[response], True)], table.reward[response], problem, sample
        )

    groups = [
        group([one(response, str(number), sample) for sample, response in enumerate(draw)], str(number))
        for number, draw in enumerate(draws)
    ]
    kept = algorithm.select(groups, algorithm.start()).groups
    batch = pack_groups(kept, 1.0, together=algorithm.unit in ("pair", "ranking"))
    drawn = [draws[int(r.problem.id)] for g in kept for r in g.rollouts]
    batch = batch.replace(reward_N=torch.tensor([r.score.value for g in kept for r in g.rollouts], dtype=WIDE))
    return Enumeration(table, batch, drawn, len(draws), lambda draws, policy: policy[draws].prod(1))


def every_pair(table: Table, noisy: bool = True) -> Enumeration:
    """All ordered pairs (preferred, other): as likely as Bradley-Terry makes that verdict, or (not noisy) as the reward says."""
    count = len(table.responses)
    draws = [(a, b) for a in range(count) for b in range(count) if a != b]
    examples = [
        Example(np.array([PROMPT, *table.responses[response]]), np.arange(1 + len(table.responses[response])) > 0, unit, label)
        for unit, draw in enumerate(draws)
        for response, label in zip(draw, (1.0, 0.0), strict=True)
    ]

    def verdict(drawn: np.ndarray, policy: Policy) -> np.ndarray:
        margin = np.array(table.reward)[drawn[:, 0]] - np.array(table.reward)[drawn[:, 1]]
        return (1 / (1 + np.exp(-margin)) if noisy else (margin > 0).astype(float)) / len(draws)

    return Enumeration(table, pack_examples(examples), [d for d in draws for _ in range(2)], len(draws), verdict)


def every_label(table: Table, threshold: float) -> Enumeration:
    """All responses, each labelled good or bad by the reward, equally often."""
    examples = [
        Example(np.array([PROMPT, *y]), np.arange(1 + len(y)) > 0, n, float(r > threshold))
        for n, (y, r) in enumerate(zip(table.responses, table.reward, strict=True))
    ]
    count = len(examples)
    return Enumeration(
        table,
        pack_examples(examples),
        [(n,) for n in range(count)],
        count,
        lambda draws, policy: np.full(len(draws), 1 / count),
    )


def train(algorithm: Algorithm, step: Enumeration, steps: int = 300, rate: float = 0.1, start: Tensor | None = None) -> Policy:
    """Expected gradients and Adam with a falling rate, from the reference on; where the policy ends."""
    table = step.table
    logits_SV = (table.start if start is None else start).clone().requires_grad_()
    value_S = torch.zeros(len(table.states), dtype=WIDE, requires_grad=True)
    optimizer = torch.optim.Adam([logits_SV, value_S], lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 if 2 * n < steps else 0.02 ** (2 * n / steps - 1))
    state = algorithm.start()
    for _ in range(steps):
        policy = table.policy(logits_SV)
        filled = step.filled(logits_SV, value_S, algorithm)
        for _ in range(algorithm.reuse.epochs):
            prepared = step.weighted(algorithm.prepare(filled, state), policy)
            logprob_T, value_T = step.logprobs(logits_SV), value_S[step.state_T]
            made = Outputs(logprob_T, torch.zeros_like(logprob_T), step.predictions(logits_SV), value_T=value_T)
            terms = algorithm.terms(made, prepared)
            loss = torch.stack([(t.weight * t.loss).sum() for t in terms.terms]).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        reward = Metric("reward", float(policy @ np.array(table.reward)), 1)
        state = algorithm.finish(state, [*terms.metrics, reward])
    return table.policy(logits_SV)
