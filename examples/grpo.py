"""GRPO with a reward function: eight answers to a prompt, each compared with the mean of its group.

python examples/grpo.py model=DIR task=arithmetic steps=100
"""

import re

import posttrain as pt


def reward(prompt, response, answer):
    """1 if the last box of the response has the answer, else 0."""
    return float(re.findall(r"\\boxed\{(.*?)\}", response)[-1:] == [answer])


settings = pt.arguments(model="Qwen/Qwen2.5-0.5B-Instruct", task="gsm8k", steps=200, lr=1e-6)
algorithm = pt.GRPO(group=8, clip_low=0.2, clip_high=0.2, beta=0.04)
run = pt.rl(algorithm=algorithm, reward=reward, **settings)
for figures in run.steps():
    print({name: figures.get(name) for name in ("step", "reward", "kl", "loss")})
print("trained:", run.export)
