"""Lesson: why a mask matters.

A sequence has the prompt, the tokens that the model sampled, and perhaps the output of a tool. Only the sampled tokens are actions:
the mask is 1 there and 0 elsewhere. The loss of a batch is the mean over all tokens with mask 1, of all sequences together:

    loss = - sum of A log-prob over tokens with mask 1 / number of such tokens

Training on the prompt teaches the model to write prompts; dividing by all tokens makes steps small if prompts are long.

python lessons/check.py mask FILE
"""


def policy_loss(logprobs, advantages, masks):
    """`logprobs` and `masks` are lists of lists, one a sequence; `advantages` has one number a sequence. Returns a number."""
    raise NotImplementedError
