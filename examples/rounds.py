"""Five rounds of RL: evaluate, then train by GRPO on new problems, with the model at the start of the round as the reference.

python examples/rounds.py model=DIR task=arithmetic rounds=3 train.steps=20

A round of 63 steps with 16 prompts each uses about 1,000 prompts, with 8 answers at temperature 1. Each round is a run in
runs/rounds.
"""

import posttrain as pt

settings = pt.arguments(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    task="gsm8k",
    rounds=5,
    train={"steps": 63, "batch": 16, "group": 8, "temperature": 1.0},
    test={"problems": 500},
    out="runs/rounds",
)
model, task, out = settings["model"], settings["task"], settings["out"]
scores = [pt.evaluate(model, task, **settings["test"])["accuracy"]]
for number in range(1, settings["rounds"] + 1):
    model = pt.grpo(model, task=task, seed=number, out=f"{out}/{number}", **settings["train"])
    scores.append(model.evaluate(task, **settings["test"])["accuracy"])
    print(f"round {number}: accuracy {scores[-2][0]:.3f} -> {scores[-1][0]:.3f}, model in {model.export}")
