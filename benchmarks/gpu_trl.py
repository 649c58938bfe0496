"""TRL's GRPO steps of one case with HF generate, forced to the same lengths: the arm that gpu_grpo_step.py starts.

usage: gpu_trl.py CASE MICRO_BATCH [STEPS]     prints one JSON line; the first step is the warm-up
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from gpu_cases import CASES, make_model  # noqa: E402


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<eos>": 0, "<pad>": 1, "<unk>": 2} | {f"w{i}": i + 3 for i in range(2000)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def main() -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    case, micro, steps = CASES[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 3
    folder = tempfile.mkdtemp()
    make_model(case).save_pretrained(f"{folder}/model")
    random.seed(0)
    words = [" ".join(f"w{random.randrange(2000)}" for _ in range(case.prompt)) for _ in range(case.prompts * steps)]
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.began)
            print(f"step {seconds[-1]:.2f} s", flush=True)

    arguments = GRPOConfig(
        output_dir=f"{folder}/out", per_device_train_batch_size=micro, gradient_accumulation_steps=case.rows // micro,
        num_generations=case.group, max_completion_length=case.new, max_steps=steps, report_to="none", save_strategy="no", bf16=True,
        learning_rate=1e-6, beta=0.0, temperature=1.0, gradient_checkpointing=False, disable_tqdm=True,
        model_init_kwargs={"dtype": "bfloat16"}, generation_kwargs={"min_new_tokens": case.new},
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=f"{folder}/model", processing_class=make_tokenizer(), args=arguments, callbacks=[Clock()],
        reward_funcs=lambda completions, **_: [random.random() for _ in completions],
        train_dataset=Dataset.from_list([{"prompt": text} for text in words]),
    )  # fmt: skip
    trainer.train()
    timed = sorted(seconds[1:])
    import trl

    figures = {"step": statistics.median(timed), "fastest": timed[0], "slowest": timed[-1], "warm_up": seconds[0]}
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps({"trl": trl.__version__, **figures, "steps": seconds[1:], "peak_gib": peak}))


if __name__ == "__main__":
    main()
