"""Tokens without mask are left out, not multiplied by 0: 0 * nan is nan. posttrain/ops/weights.py has the reductions for tensors."""


def policy_loss(logprobs, advantages, masks):
    terms = [
        -advantage * logprob
        for row, advantage, mask in zip(logprobs, advantages, masks, strict=True)
        for logprob, sampled in zip(row, mask, strict=True)
        if sampled
    ]
    return sum(terms) / len(terms) if terms else 0.0
