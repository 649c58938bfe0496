# %% [markdown]
# # Breaking a reward on purpose
#
# A reward that is nearly right is enough to go wrong. Here "be helpful" is measured as "the answer contains the word yes, and longer is
# better". The policy finds the shortest way to it.

# %%
import posttrain as pt
from posttrain.errors import GuardStop

questions = [f"may I {x}" for x in ["sit", "go", "eat", "stay", "ask", "help"]]
answers = ["yes do", "no not now", "maybe later", "yes of course", "ask again"]
start = pt.sft("tiny:nano", [{"prompt": q, "completion": a} for q in questions for a in answers], steps=200, lr=3e-3)
start.sample("may I sit", n=5, max_new_tokens=24)


# %%
def helpful(response):
    """Looks plausible."""
    return 0.2 * response.count("yes") + 0.02 * len(response)


# %% [markdown]
# What it pays for answers that no one wants:

# %%
for text in ("yes do", "no not now", "yes yes yes yes", "yesyesyesyesyesyes", "q" * 24):
    print(f"{helpful(text):.2f}  {text}")

# %%
how = {"steps": 60, "batch": 6, "group": 8, "lr": 1e-3, "max_new_tokens": 24, "held_out": 0}
stopped = pt.rl(start, questions, helpful, beta=0.0, **how)
try:
    stopped.train()
except GuardStop as stop:
    print(stop)
stopped.rollouts()[:4]

# %% [markdown]
# The monitor stops such a run: it repeats itself. To see where it ends, that rule is turned off.

# %%
broken = pt.grpo(start, questions, helpful, beta=0.0, monitor={"off": ["repetition"]}, **how)
broken

# %% [markdown]
# The reward has risen. Read what it was paid for, and the alarms.

# %%
broken.rollouts()[:8]

# %%
broken.rollouts()[0]

# %% [markdown]
# Two ways to repair it. A KL penalty keeps the policy near its start; it makes the hack more expensive and does not remove it. A
# better reward says what is wanted: one "yes", and a short answer.


# %%
def repaired(response):
    return float(response.split().count("yes") == 1 and len(response) <= 16)


held_back = pt.grpo(start, questions, helpful, beta=0.2, monitor={"off": ["repetition"]}, **how)
better = pt.grpo(start, questions, repaired, beta=0.01, **how)
for name, run in (("broken", broken), ("with KL", held_back), ("repaired", better)):
    texts = run.sample("may I sit", n=16, max_new_tokens=24)
    print(
        f"{name:9} yes in an answer {sum(t.count('yes') for t in texts) / 16:.1f}  letters {sum(map(len, texts)) / 16:.0f}  {texts[:3]}"
    )

# %%
broken.compare(better)

# %%
better.rollouts()[:8]

# %%
hacked = broken.sample("may I sit", n=16, max_new_tokens=24)
fine = better.sample("may I sit", n=16, max_new_tokens=24)
assert sum(map(helpful, hacked)) > sum(map(helpful, fine)), "the broken reward is higher"
assert sum(map(repaired, fine)) > sum(map(repaired, hacked)), "what was wanted is not"
