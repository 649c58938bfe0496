# %% [markdown]
# # Your own reward
#
# A reward is a function of the prompt, the response and the columns of the row. This one wants a word that begins with a letter, of a
# length between 3 and 6.

# %%
import posttrain as pt

letters = "abcdefgh"
words = ["ant", "apple", "bear", "bee", "cat", "cow", "dog", "dove", "eel", "elk", "fox", "frog", "goat", "gull", "hare", "hen"]
rows = [{"prompt": f"an animal with {c}", "letter": c} for c in letters]
# examples: any word, and as often one with the letter
shown = [{"prompt": f"an animal with {c}", "completion": word} for c in letters for word in words]
shown += [row for row in shown if row["completion"][0] == row["prompt"][-1]] * 7
start = pt.sft("tiny:nano", shown, steps=200, lr=3e-3)
start.sample("an animal with c", n=6, max_new_tokens=8)


# %%
def begins(response, letter):
    return float(response[:1] == letter)


def length(response):
    return 1.0 if 3 <= len(response) <= 6 else 0.0


# %% [markdown]
# Ask what the reward pays before you train on it. Columns of the row, here `letter`, come by their names.

# %%
for response in ("cat", "dog", "c", "", "c" * 50):
    print(f"{response[:10]!r:14} begins {begins(response, 'c')} length {length(response)}")

# %% [markdown]
# Several rewards are added up with weights, and each is reported by itself.

# %%
run = pt.grpo(
    start,
    rows,
    [begins, length],
    weights=[0.8, 0.2],
    steps=80,
    batch=8,
    group=8,
    lr=3e-4,
    max_new_tokens=8,
    beta=0.01,
    held_out=0,
)
run

# %%
for step in (0, 19, 39, 79):
    print({name: round(value, 2) for name, value in run.metrics[step].items() if name.startswith("reward/") or name == "step"})

# %% [markdown]
# Rollouts of the first and of the last step.

# %%
run.rollouts(step=1)[:8]

# %%
run.rollouts()[:8]

# %% [markdown]
# The KL map shows where the model has moved from the one that it began as: at the first letter.

# %%
run.rollouts()[0]

# %%
assert run.metrics[-1]["reward"] > run.metrics[0]["reward"]
