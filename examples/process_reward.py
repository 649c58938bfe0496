"""Process supervision: 1 for each right step, -0.5 for each wrong one, and each token learns from the steps that end at it or later.

python examples/process_reward.py model=DIR task=arithmetic steps=100

Steps are equations, which can be checked. For other steps, use a process reward model: docs/rewards.md.
"""

import posttrain as pt

verifier = pt.reward("arithmetic_steps")  # 1 or 0 for each equation, and last for the final answer


def process(prompt, response, answer):
    steps = [(end, 1.0 if right else -0.5) for end, right in verifier(prompt, response, answer).steps]
    return pt.Score(sum(value for _, value in steps) / max(1, len(steps)), steps=steps)


settings = pt.arguments(model="Qwen/Qwen2.5-0.5B-Instruct", task="gsm8k", steps=200)
run = pt.rl(algorithm=pt.GRPO(supervision="process"), reward=process, **settings).train()
print(run.metrics[-1]["reward"], run.rollouts()[0]["response"])
