"""Lesson: the advantage of GRPO.

GRPO samples a group of responses to one prompt. The advantage of a response says how much better it was than the others:

    A_i = (r_i - mean(r)) / (std(r) + 1e-4)

where the standard deviation divides by n - 1. Two things are easy to get wrong. In a group whose rewards are all equal, every
advantage is exactly 0. And a response that could not be scored has the reward None: it does not count in the mean and the standard
deviation, and its advantage is 0.

python lessons/check.py grpo_advantage FILE
"""


def advantages(rewards):
    """The advantages of one group: a list of numbers, as long as `rewards`."""
    raise NotImplementedError
