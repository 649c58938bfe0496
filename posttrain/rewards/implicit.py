"""The implicit reward of a preference-trained model: how much likelier it finds a response than its reference does."""

from __future__ import annotations


def implicit_reward(logprob: float, reference: float, beta: float) -> float:
    """r(x, y) = beta [ log pi(y | x) - log ref(y | x) ], up to a term that depends on the prompt alone (Rafailov et al. 2023, eq. 5).

    That term is the same for all responses to a prompt: differences within a group are rewards, values across prompts are not.

    >>> implicit_reward(-3.0, -5.0, beta=0.5)
    1.0
    """
    return beta * (logprob - reference)
