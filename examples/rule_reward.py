"""A reward from rules: 0.8 for the right answer, in a box or after "final answer:"; 0.1 for this format; 0.1 for reasoning in steps.

python examples/rule_reward.py model=DIR task=sums steps=100

Before training, it prints the reward of wrong, empty, padded and other answers.
"""

import posttrain as pt

reward = {
    "correctness": pt.reward("math", phrase="final answer:"),
    "format": pt.reward("format", announce=True),  # a box 1, "final answer:" 0.7, neither 0.3
    "reasoning": pt.reward("steps"),  # lines that begin a step; paying for length would reward padding
}
weights = {"correctness": 0.8, "format": 0.1, "reasoning": 0.1}
settings = pt.arguments(model="Qwen/Qwen2.5-0.5B-Instruct", task="gsm8k", steps=200)
print(pt.probe(reward, settings["task"], weights=weights))
run = pt.grpo(reward=reward, weights=weights, **settings)
print({name: value for name, value in run.metrics[-1].items() if name.startswith("reward")})
