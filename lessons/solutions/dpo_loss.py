"""-log sigmoid(x) = log(1 + exp(-x)), written so that exp never gets a large argument. posttrain/ops/preference.py has sigmoid_loss."""

import math


def dpo_loss(chosen, rejected, reference_chosen, reference_rejected, beta):
    margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    return max(-margin, 0.0) + math.log1p(math.exp(-abs(margin)))
