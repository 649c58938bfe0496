# %% [markdown]
# # A reward model, and PPO by hand
#
# RLHF in three parts: a policy from SFT, a reward model from pairs, PPO with a critic. Then one number of PPO is computed by hand.

# %%
import posttrain as pt

things = ["tea", "milk", "rice", "soup", "bread", "fish", "corn", "salt"]
polite = [{"prompt": f"pass the {x}", "completion": f"please take the {x}"} for x in things]
rude = [{"prompt": f"pass the {x}", "completion": f"get the {x} yourself"} for x in things]
start = pt.sft("tiny:nano", polite + rude, steps=100, lr=3e-3)
start.sample("pass the tea", n=4, max_new_tokens=28)

# %% [markdown]
# Somebody prefers the polite answers. The reward model learns a score whose difference is the log-odds of that choice.

# %%
pairs = [
    {"prompt": a["prompt"], "chosen": a["completion"], "rejected": b["completion"]} for a, b in zip(polite, rude, strict=True)
] * 4
scorer = pt.reward_model(start, pairs, steps=10, lr=1e-3)
print("held-out accuracy", scorer.result["accuracy"])
print("please take the tea  ", scorer.score("pass the tea", "please take the tea"))
print("get the tea yourself ", scorer.score("pass the tea", "get the tea yourself"))

# %% [markdown]
# PPO with four models: the policy, the reference (its start), the reward model, and a critic that begins as the reward model.
# `steps()` takes one step at a time.

# %%
prompts = [row["prompt"] for row in polite]
run = pt.rl(
    start, prompts, scorer, algorithm="ppo", critic=scorer, steps=40, batch=8, lr=2e-4, max_new_tokens=28, beta=0.05, held_out=0
)
for figures in run.steps():
    if figures["step"] % 10 == 0:
        print({name: round(figures[name], 3) for name in ("step", "reward", "kl", "loss/value")})
run

# %%
run.rollouts()[:8]

# %% [markdown]
# One rollout: the map `value` is what the critic expected at each token.

# %%
one = run.rollouts()[0]
one

# %% [markdown]
# By hand. In GAE with gamma = 1 and lambda = 1 the advantage of a token is what was still paid less the value. PPO's loss of a token is
# -min(ratio A, clip(ratio, 1 - 0.2, 1 + 0.2) A). A token that is now 1.5 times as likely as when it was sampled:

# %%
ratio, clip = 1.5, 0.2
for advantage in (1.0, -1.0):
    clipped = min(max(ratio, 1 - clip), 1 + clip)
    print(f"A {advantage:+}: loss {-min(ratio * advantage, clipped * advantage):+.2f}")

# %% [markdown]
# For A > 0 the loss is that of ratio 1.2: it has no gradient, the token was raised far enough. For A < 0 nothing is clipped: a
# bad token that got more likely is brought down in full.

# %%
texts = run.sample("pass the tea", n=16, max_new_tokens=28)
print(texts[:4])
assert sum("please" in text for text in texts) > sum(
    "please" in text for text in start.sample("pass the tea", n=16, max_new_tokens=28)
)
