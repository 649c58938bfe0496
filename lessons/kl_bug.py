"""Lesson: find the bug in this KL.

The tokens were sampled from the policy. `kl` should be the estimator k3 of KL(policy || reference) from one token: never below 0, and
its mean over the policy's tokens is the KL. The code below is never below 0 and is 0 for equal models, and training with it works for a
while. Its mean is not the KL.

python lessons/check.py kl_bug FILE
"""

import math


def kl(logprob, reference):
    """k3 of one token, from its log-prob under the policy and under the reference."""
    ratio = math.exp(logprob - reference)
    return ratio - 1 - (logprob - reference)
