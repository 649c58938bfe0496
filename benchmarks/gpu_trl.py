"""TRL's training steps on the weights and lengths of our GPU benchmarks, one method a process.

    python benchmarks/gpu_trl.py grpo a --micro-batch 32      # case a of gpu_grpo_step.py, with HF generate
    python benchmarks/gpu_trl.py sft a --micro-batch 16       # 64 rows of 1,024 tokens, as gpu_train.py --parts sft
    python benchmarks/gpu_trl.py dpo a --micro-batch 8        # 32 pairs of 512 + 512 tokens, as gpu_train.py --parts dpo
    python benchmarks/gpu_trl.py gsm8k --model DIR --data FOLDER --lr 3e-6    # the recipe gsm8k: 128 x 8 answers
    python benchmarks/gpu_trl.py gsm8k --model DIR --data FOLDER --lr 3e-6 --dtype float32 --steps 280 --stop 60 --save OUT \
        --after 6 --between 'python benchmarks/real_models.py run gsm8k OURS model=DIR data=FOLDER held_out=0 seconds=90 \
        rl.evaluate_every=10 rl.optimizer.token_budget=32768'
    posttrain eval OUT/20 --task gsm8k task.data=FOLDER problems=1319 sampling.max_new_tokens=320    # its saved models
    python benchmarks/gpu_trl.py sft --tiny                   # a tiny model on a CPU: does the script work?

Weights in bfloat16 (with --dtype float32, autocast to bfloat16: at a rate of 3e-6 an update is less than bfloat16 can hold), sdpa
attention, no gradient checkpointing, no KL term in GRPO. The first step is the warm-up. `--between` is a command that runs alone on the
GPU after step `--after`, while TRL waits; its time is not counted. Prints one JSON line. `--generation continuous` generates by
transformers' continuous batching, `--generation vllm` by vLLM in the same process (not measured yet: vLLM pins its own torch).
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from gpu_cases import CASES, Case, make_model  # noqa: E402

from posttrain.tasks._questions import STYLES  # noqa: E402

CUDA = torch.cuda.is_available()
TINY = Case(2, 64, 192, 4, 2, 2048, 4, 4, 16, 24)


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<eos>": 0, "<pad>": 1, "<unk>": 2} | {f"w{i}": i + 3 for i in range(2000)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def text(count: int) -> str:
    """As many tokens of `make_tokenizer`."""
    return " ".join(f"w{random.randrange(2000)}" for _ in range(count))


def common(options: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Arguments of all TRL's trainers."""
    return {
        "output_dir": f"{options.folder}/out", "per_device_train_batch_size": min(options.micro_batch, rows),
        "gradient_accumulation_steps": max(1, rows // options.micro_batch), "max_steps": options.steps, "report_to": "none",
        "logging_steps": 1, "save_strategy": "no", "bf16": CUDA, "use_cpu": not CUDA, "learning_rate": options.lr,
        "gradient_checkpointing": False, "disable_tqdm": True, "model_init_kwargs": {"dtype": options.dtype if CUDA else "float32"},
    }  # fmt: skip


def sft(options: argparse.Namespace, case: Case) -> dict[str, Any]:
    """TRL adds the end token: one word less."""
    from trl import SFTConfig, SFTTrainer

    rows, length = (8, 32) if options.tiny else (64, 1024)
    texts = [{"text": text(length - 1)} for _ in range(rows * options.steps)]
    arguments = SFTConfig(**common(options, rows), max_length=length, packing=False)
    return {"trainer": SFTTrainer, "args": arguments, "rows": texts}


def dpo(options: argparse.Namespace, case: Case) -> dict[str, Any]:
    from trl import DPOConfig, DPOTrainer

    rows, length = (4, 16) if options.tiny else (32, 512)
    pairs = [
        {"prompt": text(length), "chosen": " " + text(length - 1), "rejected": " " + text(length - 1)}
        for _ in range(rows * options.steps)
    ]
    arguments = DPOConfig(**common(options, rows), max_length=2 * length)
    return {"trainer": DPOTrainer, "args": arguments, "rows": pairs}


def grpo(options: argparse.Namespace, case: Case) -> dict[str, Any]:
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        **common(options, case.rows), num_generations=case.group, max_completion_length=case.new, beta=0.0, temperature=1.0,
        generation_kwargs={"min_new_tokens": case.new},
    )  # fmt: skip

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [random.random() for _ in completions]

    prompts = [{"prompt": text(case.prompt)} for _ in range(case.prompts * options.steps)]
    return {"trainer": GRPOTrainer, "args": arguments, "rows": prompts, "reward_funcs": reward}


def gsm8k(options: argparse.Namespace, case: Case) -> dict[str, Any]:
    """The rows and answers of the recipe, whose rate is --lr 3e-6; the reward compares the number in the box as text."""
    from trl import GRPOConfig, GRPOTrainer

    count, group, tokens = (2, 4, 8) if options.tiny else (128, 8, 320)
    arguments = GRPOConfig(
        **common(options, count * group), num_generations=group, max_completion_length=tokens, beta=0.0, temperature=1.0,
        epsilon_high=0.28, warmup_steps=5, use_transformers_continuous_batching=options.generation == "continuous",
        use_vllm=options.generation == "vllm", vllm_mode="colocate", vllm_gpu_memory_utilization=0.25, vllm_max_model_length=1024,
    )  # fmt: skip
    with gzip.open(Path(options.data) / "gsm8k-train.jsonl.gz", "rt") as file:
        read = [json.loads(line) for line in file]
    random.shuffle(read)
    prompts = [
        {
            "prompt": [{"role": "user", "content": STYLES["boxed"].replace("{question}", row["question"])}],
            "answer": row["answer"].split("####")[-1].strip(),
        }
        for row in read
    ]

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        boxes = [re.findall(r"\\boxed\{([^{}]*)\}", one[0]["content"]) for one in completions]
        return [
            float(bool(box) and box[-1].replace(",", "") == gold.replace(",", ""))
            for box, gold in zip(boxes, answer, strict=True)
        ]

    return {"trainer": GRPOTrainer, "args": arguments, "rows": prompts, "reward_funcs": reward}


METHODS = {"sft": sft, "dpo": dpo, "grpo": grpo, "gsm8k": gsm8k}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("case", nargs="?", default="a", choices=CASES)
    parser.add_argument("--micro-batch", type=int, default=32, help="sequences, for DPO pairs")
    parser.add_argument("--steps", type=int, default=4, help="the first is the warm-up")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--model", default="", help="a directory; without it random weights of the case's shape")
    parser.add_argument("--data", default="")
    parser.add_argument("--stop", type=int, default=0, help="the last step, of --steps for which the rate is scheduled")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the weights")
    parser.add_argument(
        "--save", default="", help="a folder for the model of every tenth step and the last; the time of saving is not counted"
    )
    parser.add_argument("--after", type=int, default=0, help="the step after which --between runs")
    parser.add_argument("--between", default="", help="a command")
    parser.add_argument("--generation", default="transformers", choices=("transformers", "continuous", "vllm"), help="of gsm8k")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    options.folder, case = tempfile.mkdtemp(), TINY if options.tiny else CASES[options.case]
    random.seed(0)
    seconds: list[float] = []
    logged: list[dict[str, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = clock()

        def on_step_end(self, _: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            seconds.append(clock() - self.began)
            print(f"step {state.global_step} {seconds[-1]:.2f} s, {sum(seconds):.0f} s in all", flush=True)
            if options.save and (state.global_step % 10 == 0 or state.global_step == options.stop):
                copy.deepcopy(model).to(torch.bfloat16).save_pretrained(f"{options.save}/{state.global_step}")
                more["processing_class"].save_pretrained(f"{options.save}/{state.global_step}")
            if options.between and state.global_step == options.after:
                torch.cuda.empty_cache()
                subprocess.run(shlex.split(options.between), check=True)
            control.should_training_stop |= state.global_step == options.stop

        def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
            kept = ("reward", "completions/mean_length", "loss")
            logged.append({key: float(value) for key, value in (logs or {}).items() if key in kept})

    made = METHODS[options.method](options, case)
    if not options.model:
        make_model(case, torch.bfloat16 if CUDA else torch.float32, "cuda" if CUDA else "cpu").save_pretrained(
            f"{options.folder}/model"
        )
        made["processing_class"] = make_tokenizer()
    trainer, rows = made.pop("trainer"), made.pop("rows")
    trainer(
        model=options.model or f"{options.folder}/model", callbacks=[Clock()], train_dataset=Dataset.from_list(rows), **made
    ).train()
    timed = sorted(seconds[1:])
    figures = {"step": statistics.median(timed), "fastest": timed[0], "slowest": timed[-1], "warm_up": seconds[0]}
    peak = torch.cuda.max_memory_allocated() / 2**30 if CUDA else None
    print(json.dumps({"trl": trl.__version__, "method": options.method, "micro_batch": options.micro_batch, **figures,
                      "steps": seconds[1:], "peak_gib": peak, "logged": logged}))  # fmt: skip


def clock() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
