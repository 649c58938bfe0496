"""On-policy distillation: the student samples, and learns the teacher's distribution at every token of its samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import torch
from torch import Tensor

from posttrain.algorithms._policy_gradient import PolicyGradient
from posttrain.algorithms.base import Correction, State
from posttrain.errors import NotNegative, Positive, Range, Several
from posttrain.ops.divergence import vocabulary_divergence
from posttrain.ops.kl import kl_estimate
from posttrain.types import Batch, Metric, Outputs, Term, Terms

Divergence = Literal["reverse", "forward", "jensen_shannon", "sampled"]


@dataclass(frozen=True, kw_only=True)
class Distillation(PolicyGradient):
    """Sample from the student p, and move p towards the teacher's distribution q at every token of the samples:

        L = sum_i sum_t w_it [ D(p_it, q_it) + c_it l(rho_it, A_it) ],    y_i ~ p,    A_it = reward_weight A_i

    with the divergence D over the whole vocabulary, and l, rho, c and w those of policy gradients. There is no gradient through the
    sampling. The student visits the states of its own mistakes and learns the teacher's next token there; SFT on the teacher's samples
    never shows it these states.

    divergence      reverse         KL(p || q): a student too small for all of q keeps to what q is sure of
                    forward         KL(q || p): it covers all of q
                    jensen_shannon  between the two, by `jsd_beta` in (0, 1): towards forward at 0 and reverse at 1 (ops/divergence.py)
                    sampled         no D, and log q(y_it) - log mu(y_it) is added to A_it: the gradient of the reverse KL on average,
                                    from one number a token, with the noise of a sample
    temperature     of both distributions in D; None: that of the sampling
    reward_weight   of the task's reward: A_i = r_i less the mean of the others of its group (rloo); 0: the teacher alone decides

    The teacher has the student's tokenizer and any size. With the stage's `teacher_prompt` it reads the same responses after another
    prompt, and may be the student's own initial model: context distillation. beta is that of the KL to the reference, as in all policy
    gradients; the paper's beta is `jsd_beta`.
    Use it where a stronger model of the same family exists: every token is a lesson, where a reward says one number a response.
    """

    paper = "Agarwal et al. 2023 (GKD), arXiv:2306.13649"
    min_group = 1

    group: Several = 1
    divergence: Divergence = "reverse"
    # of jensen_shannon: towards forward at 0, towards reverse at 1
    jsd_beta: Annotated[float, Range(gt=0, lt=1)] = 0.5
    temperature: Positive | None = None
    reward_weight: NotNegative = 0.0

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.divergence != "jensen_shannon" and self.jsd_beta != type(self).jsd_beta:
            yield "jsd_beta is that of divergence=jensen_shannon, which is not chosen"
        if self.divergence == "sampled" and self.temperature is not None:
            own = "divergence=sampled compares log-probs of what was sampled, at the temperature of the sampling"
            yield f"{own}; leave temperature out"
        if self.reward_weight > 0 and self.group < 2:
            yield "reward_weight compares responses to one prompt; set group to 2 or more"
        if self.kl_in_reward and self.reward_weight == 0:
            yield "kl_in=reward is a part of the task's reward, whose reward_weight is 0; use kl_in=loss"
        if self.truncated == "zero" and self.reward_weight == 0:
            yield "truncated=zero changes the task's reward, whose reward_weight is 0; use truncated=mask"

    @property
    def teacher_by_token(self) -> bool:
        return self.divergence == "sampled"

    @property
    def has_advantages(self) -> bool:
        return self.teacher_by_token or self.reward_weight > 0

    @property
    def only_advantages(self) -> bool:
        return self.teacher_by_token and not (self.kl_in_loss or self.entropy)

    @property
    def roles(self) -> frozenset[str]:
        return super().roles | {"teacher"}

    @property
    def compares_episodes(self) -> bool:
        return self.reward_weight > 0

    def corrected(self, correction: Correction) -> Self:
        return super().corrected(correction) if self.has_advantages else self

    def advantages(self, step: Batch, mask_T: Tensor, state: State) -> Tensor:
        advantage_T = torch.zeros_like(step.behaviour_T)
        if self.reward_weight > 0:
            compared = {"baseline": "leave_one_out", "scale": "none"}
            advantage_T = self.reward_weight * self.group_relative(step, mask_T, **compared)
        if not self.teacher_by_token:
            return advantage_T
        return advantage_T - self.sampled_kl(step, mask_T)

    def sampled_kl(self, step: Batch, mask_T: Tensor) -> Tensor:
        """[T]: log mu - log q of the sampled tokens."""
        sampled_T, teacher_T = (x.where(mask_T, 0.0) for x in (step.behaviour_T, step.teacher_T))
        return kl_estimate("k1", sampled_T, teacher_T)

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        found = super().terms(outputs, batch)
        kept = [term for term in found.terms if term.name != "policy" or self.has_advantages]
        if self.teacher_by_token:
            value = self.sampled_kl(batch, batch.mask_T)
        else:
            p, q = outputs.predictions["policy"], outputs.predictions["teacher"]
            temperature = self.temperature or batch.temperature
            both = (p.hidden_MH, p.head, q.hidden_MH, q.head)
            value = vocabulary_divergence(*both, self.divergence, temperature, self.jsd_beta)
            kept.append(Term("divergence", value, batch.weight_T[p.at_M]))
        measured = Metric("divergence", value.detach().sum(), batch.mask_T.sum())
        return Terms(tuple(kept), (*found.metrics, measured))
