# %% [markdown]
# # Reasoning with GRPO, and how to read its curves
#
# Sums of two numbers of two digits, with written steps. The examples forget the carry in half of the sums that have one. GRPO is paid
# for the right final answer alone: which steps lead there it has to find out.

# %%
import posttrain as pt

problems = [(a, b) for a in range(10, 40) for b in range(10, 40)]


def steps_of(a, b, carry=True):
    """The steps as text: the ones, then the tens with what was carried, then the answer."""
    ones = a % 10 + b % 10
    one = ones // 10 if carry else 0
    tens = a // 10 + b // 10 + one
    return f"{a % 10}+{b % 10}={ones};{a // 10}+{b // 10}+{one}={tens};>{tens}{ones % 10}"


rows = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a, b in problems]
shown = [{"prompt": f"{a}+{b}", "completion": steps_of(a, b, carry)} for a, b in problems for carry in (True, False)]
carried = [row for row, (a, b) in zip(rows, problems, strict=True) if a % 10 + b % 10 >= 10]
print(shown[-2:], len(carried), "of", len(rows), "sums have a carry")
start = pt.sft("tiny:nano", shown, steps=400, lr=3e-3)
start.sample(["12+13", "28+17"], n=3, max_new_tokens=24)


# %%
def right(response, answer):
    """1 for the right final answer; the steps are not paid."""
    return float(response.rpartition(">")[2].strip() == answer)


run = pt.grpo(
    start,
    carried,
    right,
    steps=60,
    batch=8,
    group=8,
    lr=3e-4,
    beta=0.0,
    max_new_tokens=24,
    held_out=60,
    evaluate_every=20,
    watch_kl=True,
)
run

# %% [markdown]
# How to read the curves:
#
# - `reward` is the mean of the step's samples, at temperature 1, on training prompts. It is noisy: 64 samples a step.
# - `reward/test` is on held-out prompts, with an interval. Believe this one.
# - `entropy` falls when the model gets sure. If it falls to 0 while the reward stands still, it explores nothing any more.
# - `groups/zero_variance` is the share of groups that taught nothing: all right, or all wrong. Near 1, the prompts are too
#   easy or too hard.
# - `kl` is how far the model is from its start. Here nothing holds it back (beta = 0); it is measured alone.
# - `length`: if it grows without the reward, look at the rollouts.

# %%
names = ("step", "reward", "reward/test", "entropy", "groups/zero_variance", "kl", "length")
for row in run.metrics[::10]:
    print({name: round(row[name], 3) for name in names if name in row})

# %% [markdown]
# A group of the first step: the same prompt, right and wrong steps, and their advantages.

# %%
first = run.rollouts(step=1)
best = max(first, key=lambda row: row["advantage"])
for row in first:
    if row["problem"] == best["problem"]:
        print(f"{row['advantage']:+.2f}  {row['question']}  {row['response']}")

# %% [markdown]
# A rollout of the last step, token by token. Look at log-prob: at which digit was the model least sure?

# %%
max(run.rollouts(), key=lambda row: row["advantage"])

# %%
test = [row["reward/test"] for row in run.metrics if "reward/test" in row]
print("held-out reward", test)
assert test[-1] > test[0]
