"""Load a real pretrained model, look at it, and ask it a question.

    python examples/real_model.py PATH [QUESTION]

PATH is a .gguf file (pip install posttrain[gguf]), a model directory with safetensors weights, or a hub name (org/name).
SmolLM2-135M-Instruct, for one, loads in about 15 seconds and answers on a CPU.
"""

# ruff: noqa: T201  (a script prints)

from __future__ import annotations

import sys
import time

import torch

from posttrain.errors import UserError
from posttrain.models.load import Loaded, load, require_chat_template

QUESTION = "What is the capital of France?"


def describe(loaded: Loaded) -> None:
    """What was loaded: family, size, and the tokens that end an answer."""
    model, tokenizer = loaded.model, loaded.tokenizer
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    print(f"family      {model.config.model_type}, {model.config.num_hidden_layers} layers, width {model.config.hidden_size}")
    precision = str(model.dtype).removeprefix("torch.")
    print(f"parameters  {model.num_parameters():,} in {precision}, head {'tied to the embedding' if tied else 'its own'}")
    print(f"vocabulary  {len(tokenizer):,}")
    print(f"stops at    {', '.join(tokenizer.convert_ids_to_tokens(list(loaded.stop_ids)))}")


def answer(loaded: Loaded, question: str, max_new_tokens: int = 128) -> str:
    """The model's likeliest answer, with transformers' own generation."""
    # The template turns a conversation into the exact text, role markers and all, that the model was trained on.
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    print(f"\n--- prompt as the model sees it ---\n{prompt}\n-----------------------------------")
    # The rendered text already holds its special tokens: adding them again would begin the text twice.
    inputs = loaded.tokenizer(prompt, add_special_tokens=False, return_tensors="pt").to(loaded.model.device)
    pad = loaded.tokenizer.pad_token_id if loaded.tokenizer.pad_token_id is not None else loaded.stop_ids[0]
    with torch.inference_mode():
        output = loaded.model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(loaded.stop_ids),
            pad_token_id=pad,
        )
    # Keep only what is new, and decode it without the end token.
    return str(loaded.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print(__doc__)
        return 2
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.perf_counter()
    try:
        loaded = load(sys.argv[1], dtype="bfloat16" if device == "cuda" else None, device=device)
        require_chat_template(loaded.tokenizer, loaded.source)
    except UserError as error:  # a wrong path, a corrupt file, a missing package: one line says which
        print(error, file=sys.stderr)
        return 2
    print(f"loaded      {loaded.source} on {device} in {time.perf_counter() - started:.1f} s")
    describe(loaded)
    print(answer(loaded, sys.argv[2] if len(sys.argv) == 3 else QUESTION))
    return 0


if __name__ == "__main__":
    sys.exit(main())
