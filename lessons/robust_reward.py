"""Lesson: a reward that resists hacks.

The prompt is a sum, and the response should end with a line "Answer: N". The reward below accepts every response that contains the
right number, and a policy learns to exploit that. Write one that gives 0.9 to 1 for a right answer and at most 0.2 for anything else:
a wrong or missing answer, several answers, the right number only in the reasoning, numbers that contain the right one, endless text.

python lessons/check.py robust_reward FILE
"""


def reward(prompt, response, answer):
    """A number from 0 to 1."""
    return float(answer in response)
