"""Readers of what others write, given text that was cut, flipped, repeated and mixed: each case must end in a value or in one line.

    python -m tests.security.fuzz --seconds 300 --seed 0      # `make fuzz`

Each reader runs in a process of its own. A case is made from the seed, the reader's name and its number alone, so that a find can be
repeated: --reader NAME --case NUMBER. What is reported: another error than those a reader may raise, more than one line, more than
`CASE_SECONDS` for a case, and memory that grows.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CASE_SECONDS, GROWTH = 60.0, 192 << 20  # of a case, on a crowded machine; bytes after the first cases
WARM = 50  # cases after which memory must not grow

Reader = Callable[[bytes, Path], object]


# --- texts ------------------------------------------------------------------------------------------------------------


def mutated(seeds: list[bytes], chance: random.Random) -> bytes:
    """One of the seeds after a few changes of bytes, numbers and pieces."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.randint(1, 6)):
        place = chance.randrange(len(data) + 1)
        end = min(len(data), place + chance.choice([1, 2, 8, 40, 400]))
        kind = chance.randrange(9)
        if kind == 0 and data:
            data[place % len(data)] = chance.randrange(256)
        elif kind == 1:
            del data[place:end]
        elif kind == 2:
            data[place:place] = data[place:end] * chance.choice([1, 2, 50])
        elif kind == 3:
            other = chance.choice(seeds)
            start = chance.randrange(len(other) + 1)
            data[place:end] = other[start : start + chance.choice([1, 10, 200])]
        elif kind == 4:
            numbers = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]
            data[place : place + 8] = struct.pack("<Q", chance.choice(numbers))
        elif kind == 5:
            words = [
                b"-1",
                b"1e999",
                b"NaN",
                b"null",
                b'""',
                b"9" * 40,
                b"9" * 5000,
                b"{}",
                b"[]",
                b"\xff",
                b"\\ud800",
                b"\x1b[2J",
                b"true",
            ]
            data[place:end] = chance.choice(words)
        elif kind == 6:
            data[place:place] = chance.choice(
                [b"[", b"{", b'{"a":', b"(", b"\\frac{", b"- ", b"&a ", b"*a ", b"^"]
            ) * chance.choice([1, 30, 3000])
        elif kind == 7:
            del data[place:]
        else:
            data[place:place] = bytes(chance.randrange(256) for _ in range(chance.choice([1, 4, 64])))
    return bytes(data[: 1 << 18])


# --- readers -----------------------------------------------------------------------------------------------------------------


def read_gguf(data: bytes, folder: Path) -> object:
    from posttrain.models.load_gguf import read_header

    (folder / "x.gguf").write_bytes(data)
    return read_header(folder / "x.gguf")


def load_gguf(data: bytes, folder: Path) -> object:
    from posttrain.models.load import load

    (folder / "x.gguf").write_bytes(data)
    return load(str(folder / "x.gguf")).stop_ids


def grade_math(data: bytes, folder: Path) -> object:
    from posttrain.rewards.math import MathReward

    text = data.decode("utf-8", "replace")
    half = len(text) // 2
    return MathReward()("a question", f"so the answer is \\boxed{{{text[:half]}}}", text[half:]), MathReward()(
        "?", text, "\\frac{1}{2}"
    )


def read_wire(data: bytes, folder: Path) -> object:
    from posttrain.rewards.sandbox import wire

    try:
        value = wire.decode(wire.parse(data, 1 << 16))
    except wire.Malformed:
        return None
    return wire.same(value, value), wire.encode(value)


def read_jsonl(data: bytes, folder: Path) -> object:
    from posttrain.data.demonstrations import from_file
    from posttrain.data.records import read_rows
    from tests.data.tokenizers_for_tests import CHATML, characters

    for name in ("x.jsonl", "x.json", "x.csv", "x.jsonl.gz"):
        (folder / name).write_bytes(data)
        try:
            list(read_rows(folder / name))
            if name == "x.jsonl":
                from_file(str(folder / name), characters(template=CHATML))
        except Exception as error:
            one_line(error)
    return None


def read_yaml(data: bytes, folder: Path) -> object:
    from posttrain import config

    (folder / "x.yaml").write_bytes(data)
    return config.to_config(config.parse(str(folder / "x.yaml"), []))


def read_run(data: bytes, folder: Path) -> object:
    """A run directory in which the bytes stand for every file in turn."""
    from posttrain import pipeline
    from posttrain.runs.read import Run
    from posttrain.runs.write import RunWriter
    from posttrain.train import checkpoint

    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    place = run / "checkpoints" / "rl" / "step-1"
    for path in (run / "rollouts" / "rl", run / "stages" / "rl", place):
        path.mkdir(parents=True)
    for name in (
        "metrics.jsonl",
        "events.jsonl",
        "summary.json",
        "rollouts/rl/step-000001.jsonl",
        "rollouts/rl/step-000001.safetensors",
        "stages/rl/result.json",
        "stages/rl/lineage.json",
        "trackers.json",
        *(f"checkpoints/rl/step-1/{n}" for n in ("manifest.json", "state.json")),
    ):
        (run / name).write_bytes(data)
    for settings in (b"format: 2\nname: x\nstages: []\n", data):
        (run / "config.yaml").write_bytes(settings)
        for read in (
            lambda: Run(run).config,
            lambda: Run(run).summary,
            lambda: Run(run).metrics(),
            lambda: Run(run).events(),
            lambda: Run(run).rollouts("rl", 1),
            lambda: Run(run).arrays("rl", 1),
            lambda: Run(run).rollout_steps("rl"),
            lambda: Run(run).column("loss"),
            lambda: checkpoint.verify(place),
            lambda: checkpoint.verify(place, contents=False),
            lambda: RunWriter.resume(run).close(),
            lambda: pipeline.changed(Run(run), {"stages": []}),
        ):
            try:
                read()
            except Exception as error:
                one_line(error)
    return None


def read_model(data: bytes, folder: Path) -> object:
    """A model directory in which the bytes are one of the files."""
    from posttrain.models.load import load

    model = folder / "model"
    if not model.is_dir():
        shutil.copytree(small_model(), model)
    kept = {name: (model / name).read_bytes() for name in ("config.json", "tokenizer.json", "tokenizer_config.json")}
    name = sorted(kept)[data[0] % 3 if data else 0]
    try:
        (model / name).write_bytes(data)
        return load(str(model)).stop_ids
    finally:
        (model / name).write_bytes(kept[name])


# --- seeds ---------------------------------------------------------------------------------------------------------------


def small_model() -> Path:
    from posttrain.models.save import save
    from posttrain.models.tiny import character_tokenizer, tiny_model

    place = Path(tempfile.gettempdir()) / "posttrain-fuzz-model"
    if not (place / "config.json").is_file():
        tokenizer = character_tokenizer("0123456789+= \n")
        save(tiny_model(tokenizer, "nano", 0), tokenizer, place, replace=True)
    return place


def gguf_seeds() -> list[bytes]:
    from tests.security.test_models import HEADERS, gguf, tensor, text, value

    array = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + text("a") + text("b") + text("c")
    model = text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("gpt2")
    sizes = b"".join(
        value(f"llama.{key}", 8) for key in ("block_count", "embedding_length", "context_length", "attention.head_count")
    )
    whole = gguf(tensors=1, values=7, more=sizes + array + model + tensor("token_embd.weight", (8, 3)) + bytes(200))
    return [whole, whole, whole, *HEADERS.values()]


MATH = [
    r"\frac{1}{2}",
    r"3\sqrt{2}-1",
    r"(1, 2] \cup [3, \infty)",
    r"\{1, 2, 3\}",
    r"x^2+2x+1",
    r"10^{-3}",
    r"1,234.5\%",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
    r"\text{yes}",
    r"2\pi i",
    r"\pm 3",
    r"\sin^2 x + \cos^2 x",
    r"12_{7}",
    r"3:45",
    r"\log_2 8",
    r"5!",
    r"\binom{5}{2}",
    r"\boxed{7}",
    r"1\frac{1}{2}",
    r"x=3,y=-4",
    r"half a dozen",
    r"3 million",
    r"\left(\frac{a}{b}\right)^{-n}",
    r"\int_0^1 x dx",
    r"\sum_{n=1}^{10} n",
    r"0.\overline{3}",
    r"-\infty",
    r"2^{2^{2^{2}}}",
    r"|x-1|<2",
]
ROW: dict[str, Any] = {
    "step": 1,
    "stage": "rl",
    "attempt": 1,
    "time": 1.0,
    "kind": "config",
    "loss": 1.0,
    "config": {"stages": [{"name": "rl"}]},
}
ROW |= {
    "problem": "p",
    "question": "q",
    "answer": "a",
    "sample": 0,
    "response": "r",
    "reward": 1.0,
    "parts": {"a": 1.0},
    "outcome": "o",
}
ROW |= {
    "level": 1,
    "failure": None,
    "finish": "stop",
    "length": 1,
    "version": 0,
    "advantage": 0.5,
    "format": 2,
    "inputs": {},
    "files": {},
}
EXAMPLES = [
    {"prompt": "1+1", "completion": "2"},
    {
        "messages": [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "2", "tool_calls": [{"function": {"name": "f"}}]},
        ]
    },
    {"question": "q", "answer": "#### 4"},
    {"prompt": "p", "chosen": "a", "rejected": "b"},
]
YAML = b"""name: x
seed: 1
stages:
  - {stage: sft, name: sft, model: tiny:nano, data: [{task: {name: arithmetic, level: 1}, counts: {1: 20}}], steps: 3, lr: 1e-3}
  - rounds: 2
    first: {rl: sft}
    stages: &a
      - {stage: rl, name: rl, model: previous rl, task: {name: arithmetic}, algorithm: {name: grpo, group: 4}, steps: 2}
"""


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def wire_seeds() -> list[bytes]:
    from posttrain.rewards.sandbox import wire

    values: list[Any] = [1, "text", [1, 2.5, None], {"a": (1, 2), 3: {4, 5}}, True, b"bytes", 2**70, float("inf"), [[[[]]]]]
    return [wire.encode(value).encode() for value in values]


def model_seeds() -> list[bytes]:
    return [(small_model() / name).read_bytes() for name in ("config.json", "tokenizer.json", "tokenizer_config.json")]


READERS: dict[str, tuple[Reader, Callable[[], list[bytes]]]] = {
    "gguf": (read_gguf, gguf_seeds),
    "gguf model": (load_gguf, gguf_seeds),
    "math": (grade_math, lambda: [text.encode() for text in MATH]),
    "wire": (read_wire, wire_seeds),
    "jsonl": (read_jsonl, lambda: [lines(EXAMPLES), *(lines([row]) for row in EXAMPLES), b"prompt,completion\n1,2\n"]),
    "yaml": (read_yaml, lambda: [YAML, b"recipe: quickstart\nrl.steps: 3\nsft: {optimizer: {lr: 0.1}}\n"]),
    "run": (read_run, lambda: [lines([ROW, ROW | {"kind": "resume"}]), json.dumps(ROW).encode(), YAML]),
    "model": (read_model, model_seeds),
}


# --- running -----------------------------------------------------------------------------------------------------------------


def one_line(error: Exception) -> None:
    """Raise again what is not an error for a user, or more than one line."""
    from posttrain.errors import UserError

    if not isinstance(error, UserError) or "\n" in str(error) or len(str(error)) > 3000:
        raise error


def case(name: str, seed: int, number: int, seeds: list[bytes], folder: Path) -> None:
    data = mutated(seeds, random.Random(f"{seed} {name} {number}"))
    try:
        READERS[name][0](data, folder)
    except Exception as error:
        one_line(error)


def work(name: str, seed: int, first: int, seconds: float, channel: Any) -> None:
    """Run cases for so long after the first, which waits for imports; say each number before it is run, and what was found."""
    with tempfile.TemporaryDirectory() as place:
        seeds = READERS[name][1]()
        warm, number, until = 0, first, math.inf
        while time.time() < until:
            channel.send(number)
            try:
                case(name, seed, number, seeds, Path(place))
            except BaseException:
                channel.send(f"case {number}: {traceback.format_exc()[-3000:]}")
            if number == first + WARM:
                warm = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            until = time.time() + seconds if number == first else until
            number += 1
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - warm) << 10
        if warm and grown > GROWTH:
            channel.send(f"memory grew by {grown >> 20} MB in {number - first - WARM} cases")
        channel.send(None)


@contextmanager
def started(name: str, seed: int, first: int, seconds: float) -> Iterator[tuple[Any, Any]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(name, seed, first, seconds, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(30)
        ours.close()


def fuzz(name: str, seed: int, seconds: float) -> tuple[int, list[str]]:
    """How many cases a reader had, and what was found."""
    first, found = 0, list[str]()
    while seconds > 0 and len(found) < 5:
        with started(name, seed, first, seconds) as (process, channel):
            current, patience, began = first, 300.0, math.inf
            while True:
                if not channel.poll(patience):
                    found.append(f"case {current}: took over {patience:g} s")
                    break
                try:
                    said = channel.recv()
                except EOFError:
                    process.join(10)
                    found.append(f"case {current}: the process ended with {process.exitcode}")
                    break
                if said is None:
                    return current + 1, found
                if isinstance(said, str):
                    found.append(said)
                else:
                    current = said
                    if said > first:
                        patience, began = CASE_SECONDS, min(began, time.time())
            seconds -= max(0.0, time.time() - began)
            first = current + 1
    return first, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="for all readers together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", choices=READERS)
    parser.add_argument("--case", type=int, help="run one case alone, with its traceback")
    options = parser.parse_args()
    if options.case is not None:
        with tempfile.TemporaryDirectory() as place:
            case(options.reader, options.seed, options.case, READERS[options.reader][1](), Path(place))
        return 0
    names = [options.reader] if options.reader else list(READERS)
    failed = 0
    for name in names:
        count, found = fuzz(name, options.seed, options.seconds / len(names))
        failed += len(found)
        sys.stdout.write(f"{name}: {count:,} cases, {len(found)} finds\n" + "".join(f"  {text}\n" for text in found))
        sys.stdout.flush()
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
