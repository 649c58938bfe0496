# %% [markdown]
# # DPO from pairs that you label here
#
# The model answers twice; you say which is better; DPO trains on your choices, without a reward model and without sampling.

# %%
import posttrain as pt

animals = ["cat", "dog", "owl", "fox", "hen", "cow", "pig", "ant", "bee", "elk"]
said = [(f"say {x}", text) for x in animals for text in (x, f"{x} {x}", f"the {x}", f"{x}!")]
start = pt.sft("tiny:nano", [{"prompt": p, "completion": c} for p, c in said], steps=200, lr=3e-3)
prompts = [f"say {x}" for x in animals]
answers = start.sample(prompts, n=8, max_new_tokens=12)
answers[0]

# %% [markdown]
# Two different answers of each prompt, side by side.

# %%
offered = []
for prompt, texts in zip(prompts, answers, strict=True):
    different = list(dict.fromkeys(texts))
    offered += [(prompt, a, b) for a, b in zip(different[::2], different[1::2], strict=False)]
for number, (prompt, a, b) in enumerate(offered):
    print(f"{number:2}  {prompt:8}  A {a!r:14} B {b!r}")

# %% [markdown]
# Write your labels here: "A", "B", or "-" to leave a pair out. When this notebook is executed without a person, the function below
# answers in your place: it prefers an exclamation mark, then the shorter one. Change it, or replace `labels` by your own text.


# %%
def me(prompt, a, b):
    def taste(text):
        return (text.endswith("!"), -len(text))

    return "A" if taste(a) >= taste(b) else "B"


labels = "".join(me(*one) for one in offered)
print(labels)

# %%
order = {"A": (1, 2), "B": (2, 1)}
pairs = [
    {"prompt": one[0], "chosen": one[order[label][0]], "rejected": one[order[label][1]]}
    for one, label in zip(offered, labels, strict=True)
    if label in order
]
print(len(pairs), "pairs;", pairs[0])
tuned = pt.dpo(start, pairs, steps=30, lr=1e-4, beta=0.1)
tuned

# %% [markdown]
# The margin is beta times how much more the chosen answer gained than the rejected one. DPO also lowers the chosen log-prob at times:
# look at both, not at the margin alone.

# %%
for row in tuned.metrics[1::6]:
    print({name: round(value, 3) for name, value in row.items() if name in ("step", "loss", "margin", "accuracy")})

# %% [markdown]
# Before and after, in the same prompts. DPO samples nothing, so it has no rollouts of its own: these are samples.

# %%
after = tuned.sample(prompts, n=8, max_new_tokens=12)
for prompt, old, new in zip(prompts[:4], answers, after, strict=False):
    print(prompt, "| before", old[:4], "| after", new[:4])


def share(texts):
    return sum(text.endswith("!") for group in texts for text in group) / sum(map(len, texts))


print("answers with an exclamation mark: before", share(answers), "after", share(after))
assert share(after) > share(answers)
