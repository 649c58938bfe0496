"""Times the parts of a decode step on one GPU, each compared with alternatives, at the shapes of case a.

    python benchmarks/gpu_kernels.py --parts step,sampling,attention

Prints one JSON line for each part. A part that fails reports it and does not stop the others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from gpu_cases import CASES, clock, graphed, make_policy, make_requests, run_parts  # noqa: E402

from posttrain.collect import generate_groups, group_requests  # noqa: E402
from posttrain.engine import cuda, fused  # noqa: E402
from posttrain.engine.engine import Engine  # noqa: E402
from posttrain.engine.rows import PAGE, Rows  # noqa: E402
from posttrain.models.attention import Rule  # noqa: E402
from posttrain.models.layers import Heads  # noqa: E402
from posttrain.ops import logprobs  # noqa: E402
from posttrain.ops.fused import power_of_two  # noqa: E402

HIDDEN, INNER, VOCABULARY, CUDA = 896, 4864, 151936, torch.device("cuda")


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@contextmanager
def changed(**values: Any) -> Iterator[None]:
    """With other constants or functions of the engine's modules, by name."""
    old = {(module, name): getattr(module, name) for module in (cuda, fused) for name in values if hasattr(module, name)}
    for module, name in old:
        setattr(module, name, values[name])
    try:
        yield
    finally:
        for (module, name), value in old.items():
            setattr(module, name, value)


def from_logits(hidden: Tensor, head: Any, rows: Rows, truncated: bool) -> tuple[Tensor, Tensor]:
    return fused.choose(logprobs.head_logits(hidden, head), rows, truncated)


WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "logits written to memory": {"TALL": 1 << 30},
    "keys never cut": {"PROGRAMS": 1},
    "no kernel begun early": {"is_hopper": lambda device: False},
}


def step() -> dict[str, Any]:
    """Milliseconds of a decode step by the number of rows, at 256 to 320 own tokens."""
    found: dict[str, Any] = {}
    case = CASES["a"]
    engine = Engine(make_policy(case), max_rows=case.rows)
    list(generate_groups(engine, make_requests(replace(case, new=64), 0)))
    scheduler = engine.scheduler
    assert scheduler is not None
    backend: Any = scheduler.backend
    for way, values in WAYS.items():
        for rows in (1024, 768, 512, 256, 128, 64, 32, 8, 1):
            if values and rows not in (1024, 256, 64, 8):
                continue
            with changed(**values):
                backend._forget_graphs()
                few = replace(case, prompts=max(1, rows // 8), group=min(8, rows), new=400)
                engine.submit(group_requests(make_requests(few, 1)))
                while int(scheduler.rows["count"][0]) < 250:
                    engine.poll()
                with torch.inference_mode():
                    scheduler._collect()
                    began = clock()
                    backend.launch()
                    seconds = clock() - began
                    found[f"{way}, {rows}"] = seconds * 1000 / backend.drawn[0].steps
                    scheduler.launched = True
                engine.cancel(list(engine.sessions))
    return found


def sampling() -> dict[str, Any]:
    """Microseconds from hidden states to ids, and how far log-probs are from a log-softmax."""
    found: dict[str, Any] = {}
    head = logprobs.Head(torch.randn(VOCABULARY, HIDDEN, device=CUDA, dtype=torch.bfloat16) * 0.05)
    for count in (1024, 256, 64, 8):
        hidden = torch.randn(count, HIDDEN, device=CUDA, dtype=torch.bfloat16)
        rows = Rows(count, 1, 1, 1, CUDA)
        rows["done"].zero_()
        rows["seed"].copy_(torch.arange(count, device=CUDA) * 7919)
        rows.temperature.fill_(1.0)
        found[f"{count}, logits written"] = graphed(lambda h=hidden, r=rows: from_logits(h, head, r, False), 5)
        expected = torch.log_softmax(logprobs.head_logits(hidden, head), -1)
        for fine, tile in product((32, 64, 128), ((128, 256, 64), *(((64, 256, 64),) if count <= 64 else ()))):
            with changed(FINE=fine, HEAD_TILE=tile, TALL=1):
                try:
                    name = f"{count}, fused, {fine}, {tile}"
                    found[name] = graphed(lambda h=hidden, r=rows: fused.sample(h, head, r, False), 5)
                    ids, logprob = fused.sample(hidden, head, rows, False)
                    found[f"{name}, error"] = float((expected.gather(1, ids[:, None])[:, 0] - logprob).abs().max())
                except Exception as problem:
                    found[name] = str(problem)[:100]
    return found


def attention() -> dict[str, Any]:
    """Microseconds of one layer's attention in a decode step after prompts of 256 tokens, and its error where keys are cut."""
    found: dict[str, Any] = {}
    heads, rule = Heads(14, 2, 64), Rule(0.125)
    for rows, group, own in ((1024, 8, 240), (128, 8, 4080), (256, 4, 400), (16, 1, 760)):
        prompts, state = rows // group, Rows(rows, own // PAGE + 1, 32, 1, CUDA)
        pages = rows * state.pages + prompts * 4 + 1
        copies = max(1, 8 * 1024 * 256 // (rows * own))  # more than the cache holds
        stores = [torch.randn(2, pages * PAGE, 2, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(min(copies, 64))]
        order = (torch.randperm(pages - 1) + 1).int().cuda()
        state.table.copy_(order[: rows * state.pages].view(rows, -1))
        state.prompt_table[:prompts, :4] = order[rows * state.pages :].view(-1, 4)
        first = torch.arange(prompts) * group
        state.tile[:, :prompts] = torch.stack([first, torch.full_like(first, group), torch.full_like(first, 256)]).int()
        state["count"].fill_(own)
        state["position"].fill_(256 + own - 1)
        state["done"].zero_()
        mixed = torch.randn(rows, 18, 64, device=CUDA, dtype=torch.bfloat16)
        sizes, turn, reference = (power_of_two(prompts), fused.tile_rows(heads, group)[1]), [0], None

        def run(
            stores: Any = stores, mixed: Tensor = mixed, state: Rows = state, sizes: Any = sizes, turn: Any = turn
        ) -> Tensor:
            turn[0] += 1
            store = stores[turn[0] % len(stores)]
            return fused.attend_pages(mixed[:, :14], (store[0], store[1]), state, heads, rule, *sizes)

        ways: dict[str, dict[str, Any]] = {
            "as it is": {},
            "kernels in turn": {"is_hopper": lambda device: False},
            "keys never cut": {"PROGRAMS": 1},
            "keys cut for 512 programs": {"PROGRAMS": 512},
            "prompts in 4": {"PROMPT_PARTS": 4},
        }
        for way, values in ways.items():
            with changed(**values):
                turn[0] = 0
                try:
                    out = run()
                    reference = out if reference is None else reference
                    found[f"{rows} x {own}, {way}"] = graphed(run)
                    assert error(out, reference) < 1e-2, way
                except Exception as problem:
                    found[f"{rows} x {own}, {way}"] = str(problem)[:200]
    return found


PARTS = {
    "step": step,
    "sampling": sampling,
    "attention": attention,
}


if __name__ == "__main__":
    run_parts(PARTS, __doc__)
