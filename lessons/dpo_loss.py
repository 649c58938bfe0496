"""Lesson: the loss of DPO.

From a pair of responses, each with its log-prob (summed over its tokens) under the policy and under the reference:

    margin = beta ((chosen - reference_chosen) - (rejected - reference_rejected))
    loss   = -log sigmoid(margin)

It should also be right for margins of 800, where exp overflows.

python lessons/check.py dpo_loss FILE
"""


def dpo_loss(chosen, rejected, reference_chosen, reference_rejected, beta):
    """The loss of one pair, a number."""
    raise NotImplementedError
