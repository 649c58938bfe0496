"""Outcome supervision: 1 if the final answer is right, else 0, and nothing for the steps.

python examples/outcome_reward.py model=DIR task=arithmetic steps=100
"""

import posttrain as pt

run = pt.grpo(reward="math", **pt.arguments(model="Qwen/Qwen2.5-0.5B-Instruct", task="gsm8k", steps=200))
print("mean reward of the last step:", run.metrics[-1]["reward"])
