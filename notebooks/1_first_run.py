# %% [markdown]
# # First run
#
# A model of 0.2 million parameters learns to add two digits, on a CPU, in a minute. Two stages: supervised fine-tuning (SFT) on
# examples, then GRPO, which pays for right answers alone.

# %%
import posttrain as pt

problems = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
shown = [
    {"prompt": row["prompt"], "completion": str(max(0, int(row["answer"]) + off))} for row in problems for off in (-1, 0, 1)
]

# %% [markdown]
# The examples are bad: of three answers to a sum, one is right. SFT learns the form of an answer and to be nearly right.

# %%
start = pt.sft("tiny:nano", shown, steps=300, lr=3e-3)
start

# %%
start.sample(["3+4=", "8+7="], n=4, max_new_tokens=4)

# %% [markdown]
# The reward is a function. GRPO samples 8 responses to each prompt, and makes those more likely that are paid more than the others.


# %%
def right(response, answer):
    return float(response.strip() == answer)


run = pt.grpo(start, problems, right, steps=150, batch=16, group=8, lr=3e-4, beta=0.0, max_new_tokens=4, held_out=0)
run

# %% [markdown]
# What was sampled in the last step, with rewards and advantages.

# %%
run.rollouts()[:12]

# %% [markdown]
# One rollout, token by token. Blue tokens are made more likely; open the other maps too. A group in
# which all are right, or all wrong, has advantages of 0.

# %%
max(run.rollouts(), key=lambda row: row["advantage"])

# %% [markdown]
# Before and after, on all 100 sums, sampled at temperature 1 as in training: mean, and the 95% interval. (At temperature 0 the start is
# right too: its most likely answer is the middle one of the three that it was shown.)

# %%
how = {"prompts": problems, "reward": right, "max_new_tokens": 4, "problems": 100, "temperature": 1.0}
before, after = start.evaluate(**how)["reward"], run.evaluate(**how)["reward"]
print("before", before)
print("after ", after)
assert after[0] > before[0]
