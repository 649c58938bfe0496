"""The first hour: your chats, pairs, prompts and reward, LoRA, a pipeline in YAML, the same in Python, and the model in transformers.

python examples/first_hour.py                            # on a new model of 0.2M parameters, which learns little
python examples/first_hour.py model=DIR steps=100        # on yours

Files and runs go to the folder first_hour. Every setting except the model and the number of steps has its default.
"""

import inspect
import json
import os
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain as pt
from posttrain import cli

PIPELINE = """
stages:
  - {stage: sft, name: sft, model: MODEL, data: [{file: chats.jsonl}], lora: {}, steps: STEPS}
  - {stage: preference, name: dpo, model: sft, algorithm: {name: dpo}, data: [pairs.jsonl], lora: {}, steps: STEPS}
  - {stage: rl, name: rl, model: dpo, task: {name: prompts, file: prompts.jsonl, reward: "mine.py:right"}, lora: {}, steps: STEPS}
  - {stage: evaluate, name: after, model: rl, task: {name: prompts, file: prompts.jsonl, reward: "mine.py:right"}}
"""


def right(response, answer):
    """1 for the right number, a little for any other number."""
    return 1.0 if response.strip() == answer else 0.1 * response.strip().isdigit()


def write(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def files(model, steps):
    """Write the files that a user provides: conversations, pairs, prompts with a column for the reward, the reward, the pipeline."""
    sums = [(f"What is {a}+{b}?", str(a + b)) for a in range(17) for b in range(17)]
    chats, pairs, prompts = sums[::3], sums[1::3], sums[2::3]
    turns = [({"role": "user", "content": asked}, {"role": "assistant", "content": said}) for asked, said in chats]
    write("chats.jsonl", [{"messages": turn} for turn in turns])
    write("pairs.jsonl", [{"prompt": asked, "chosen": said, "rejected": f"{said}, I guess"} for asked, said in pairs])
    write("prompts.jsonl", [{"prompt": asked, "answer": said} for asked, said in prompts])
    Path("mine.py").write_text(inspect.getsource(right))
    Path("pipeline.yaml").write_text(PIPELINE.replace("MODEL", str(model)).replace("STEPS", str(steps)))


def command(*words):
    print("\n$ posttrain", *words)
    code = cli.main([*words])
    if code != 0:
        raise SystemExit(code)


def main(model, steps, folder):
    Path(folder).mkdir()
    os.chdir(folder)
    files(model, steps)

    # on the command line
    command("plan", "pipeline.yaml", "--allow-code")
    command("run", "pipeline.yaml", "--allow-code", "out=pipeline")
    command("show", "pipeline")
    command("sample", "pipeline", "What is 3+4?")

    # the same in Python, with the reward as a function
    print(pt.probe(right, prompts="prompts.jsonl"))
    tuned = pt.sft(model, data="chats.jsonl", lora={}, steps=steps, out="sft")
    preferred = pt.dpo(tuned, data="pairs.jsonl", lora={}, steps=steps, out="dpo")
    scorer = pt.reward_model(tuned, data="pairs.jsonl", lora={}, steps=steps, out="scorer")
    print("share of held-out pairs that the reward model orders rightly:", scorer.result["accuracy"])
    run = pt.grpo(preferred, prompts="prompts.jsonl", reward=right, lora={}, steps=steps, out="grpo")
    print(run.sample("What is 3+4?", n=4), run.metrics[-1]["reward"])

    # the result is a plain transformers checkpoint, with peft adapters in export/adapter
    module, tokenizer = AutoModelForCausalLM.from_pretrained(run.export), AutoTokenizer.from_pretrained(run.export)
    chat = [{"role": "user", "content": "What is 3+4?"}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    print(tokenizer.decode(module.generate(**asked, max_new_tokens=16, do_sample=False)[0]))


if __name__ == "__main__":
    main(**pt.arguments(model="tiny:nano", steps=20, folder="first_hour"))
