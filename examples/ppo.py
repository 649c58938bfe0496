"""PPO with four models: the policy, the reference of the KL, a reward model, and a critic that starts as a copy of the reward model.

python examples/ppo.py model=DIR prompts=prompts.jsonl reward_models=runs/reward_model-1 steps=100
"""

import posttrain as pt

settings = pt.arguments(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    prompts="trl-lib/ultrafeedback-prompt",
    reward_models="runs/reward_model-1",  # made by examples/reward_model.py
    steps=200,
    lr=1e-6,
)
algorithm = pt.PPO(clip=0.2, beta=0.2, gamma=0.99, lam=0.95)
others = {"reference": settings["model"], "critic": settings["reward_models"]}
run = pt.rl(algorithm=algorithm, **others, **settings)
for figures in run.steps():
    print({name: figures.get(name) for name in ("step", "reward", "kl", "loss/policy", "loss/value")})
print("trained:", run.export)
