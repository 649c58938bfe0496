"""Seconds to read rows for training: chats of five messages, prompts with completions, and pairs.

    python benchmarks/read_data.py --tokenizer FOLDER                # of a chat model
    python benchmarks/read_data.py --tiny                            # characters: does the script work?
    PYTHONPATH=OTHER python benchmarks/read_data.py ...              # another checkout

The rows are random English words. Prints a line for each kind, the median of three, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.data.demonstrations import from_file
from posttrain.data.preferences import read_preferences
from posttrain.models.tiny import character_tokenizer
from posttrain.stages.base import PRINTABLE

SENTENCE = "the a model learns to answer questions about numbers and words by reading many examples of text that people wrote"
WORDS = SENTENCE.split()


def rows(kind: str, count: int) -> list[dict[str, Any]]:
    generator = random.Random(0)

    def text(words: int) -> str:
        return " ".join(generator.choice(WORDS) for _ in range(words)).capitalize() + "."

    def chat(number: int) -> dict[str, Any]:
        said = (("system", "You are helpful."), ("user", f"{number}: {text(40)}"), ("assistant", text(80)))
        more = (("user", text(20)), ("assistant", text(60)))
        return {"messages": [{"role": role, "content": content} for role, content in (*said, *more)]}

    make = {
        "chats": chat,
        "prompts with completions": lambda n: {"prompt": f"{n}: {text(40)}", "completion": text(80)},
        "pairs": lambda n: {"prompt": f"{n}: {text(40)}", "chosen": text(80), "rejected": text(70)},
    }[kind]
    return [make(number) for number in range(count)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(arguments)
    if not given.tiny and not given.tokenizer:
        parser.error("give --tokenizer, or --tiny")
    tokenizer: Any = character_tokenizer(PRINTABLE)
    if given.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("chats", "prompts with completions", "pairs"):
            file = Path(folder, f"{kind}.jsonl")
            file.write_text("".join(json.dumps(row) + "\n" for row in rows(kind, given.rows)))
            seconds = []
            for _ in range(3):
                began = time.perf_counter()
                read = read_preferences(file, tokenizer, 4096).units if kind == "pairs" else from_file(file, tokenizer)
                seconds.append(time.perf_counter() - began)
                assert len(read) == given.rows
            found[kind] = statistics.median(seconds)
            print(f"{found[kind]:7.2f} s  {given.rows:,} {kind}", flush=True)
    print(json.dumps({"benchmark": "read_data", "rows": given.rows, "seconds": found}))


if __name__ == "__main__":
    main()
