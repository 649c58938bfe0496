"""k3 uses reference / policy, whose mean over the policy's tokens is 1. The other ratio estimates no KL of these tokens.
posttrain/ops/kl.py has all estimators."""

import math


def kl(logprob, reference):
    difference = reference - logprob
    return math.expm1(difference) - difference
