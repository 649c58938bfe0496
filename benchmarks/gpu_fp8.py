"""Measures fp8 on one GPU: the time of matrix products at a model's shapes compared with bf16, the time of the whole MLP including
the quantisation of its inputs, and how much quantising each kind of product changes the log-probs of a real model.

    python benchmarks/gpu_fp8.py                      # products and MLPs of the shapes a, b and c, 1024 rows
    python benchmarks/gpu_fp8.py --model FOLDER       # and log-probs of the model there

Needs a CUDA device of compute capability 8.9 or more. Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from gpu_cases import CASES, graphed, make_policy  # noqa: E402

from posttrain.collect import Prompt, generate_groups  # noqa: E402
from posttrain.engine.engine import Engine  # noqa: E402
from posttrain.engine.fp8 import Emulation, Precision, quantize, quantize_weights, row_product  # noqa: E402
from posttrain.engine.fused import Fused, Layer  # noqa: E402
from posttrain.models.attention import LAYOUT, Packed  # noqa: E402
from posttrain.models.layers import describe  # noqa: E402
from posttrain.models.load import load  # noqa: E402
from posttrain.models.policy import Policy, wrap_model  # noqa: E402
from posttrain.ops.logprobs import Head, token_logprobs  # noqa: E402
from posttrain.train.forward import forward, positions  # noqa: E402
from posttrain.train.pack import pack_examples  # noqa: E402
from posttrain.types import Completion, Example, Sampling  # noqa: E402

PRECISIONS = {
    "bf16": Precision(),
    "products": Precision("fp8"),
}
QUESTION = (
    "A shop sells {} apples at {} cents each and {} pears at {} cents each. What does all of it cost? Think step by step."
)


def products(rows: int, inner: int, outer: int) -> dict[str, float]:
    """One product in bf16, in fp8 with one scale, and with a scale a row; None where torch refuses it."""
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16)
    (q, row), (v, column), one = quantize(x), quantize(weight), torch.ones((), device="cuda")

    def by_row() -> Tensor:
        given = (q, v.t(), row[:, None].contiguous(), column[None].contiguous())
        return torch._scaled_mm(*given, out_dtype=torch.bfloat16, use_fast_accum=True)

    return {
        "bf16": graphed(lambda: F.linear(x, weight)),
        "one scale": graphed(lambda: row_product(q, v, one, torch.bfloat16)),
        "one scale, float32": graphed(lambda: row_product(q, v, one, torch.float32)),
        "a scale a row": graphed(by_row),
    }


def mlp(name: str, rows: int) -> dict[str, float]:
    """The MLP of one layer from the residual stream to the residual stream, with its norm: in bf16, and in fp8."""
    policy = make_policy(replace(CASES[name], layers=1, vocabulary=1024, lora=0))
    described = describe(policy)
    assert not isinstance(described, str)
    layers = [Fused(policy, described, p).layers[0] for p in (Precision(), Precision("fp8"))]
    x = torch.randn(rows, CASES[name].hidden, device="cuda", dtype=torch.bfloat16)

    def only_mlp(layer: Layer) -> Callable[[], None]:
        return lambda: layer.add_mlp(x)

    with torch.inference_mode():
        plain, quantised = (graphed(only_mlp(layer)) for layer in layers)
    return {"bf16": plain, "fp8": quantised}


def logprob_batches(
    policy: Policy, prompts: list[Prompt], answers: list[tuple[Completion, ...]]
) -> list[tuple[Any, np.ndarray]]:
    """Batches of responses after their prompts, and the log-probs that they were sampled with."""
    found = []
    for prompt, group in zip(prompts, answers, strict=True):
        ids = [np.concatenate([prompt.ids, c.ids]) for c in group]
        batch = pack_examples([Example(one, np.arange(len(one)) >= len(prompt.ids)) for one in ids], policy.device)
        found.append((batch, np.concatenate([c.logprobs for c in group])))
    return found


def trainer_logprobs(policy: Policy, batch: Any) -> np.ndarray:
    with torch.no_grad():
        return forward(policy, batch).logprob_T[batch.mask_T].cpu().numpy()


def apart(one: list[np.ndarray], other: list[np.ndarray]) -> dict[str, float]:
    """Mean and largest |difference|, and KL by its k3 estimate."""
    d = np.concatenate(one) - np.concatenate(other)
    return {"mean": float(np.abs(d).mean()), "max": float(np.abs(d).max()), "kl": float((np.exp(d) - 1 - d).mean())}


def real_model(folder: str) -> dict[str, Any]:
    """The mismatch of sampler and trainer by precision; and what quantising more products would do to log-probs of the same tokens."""
    loaded = load(folder, torch.bfloat16, "cuda")
    policy = wrap_model(loaded.model, loaded.tokenizer, loaded.stop_ids, loaded.source)
    generator, prompts = np.random.default_rng(0), []
    for n in range(16):
        question = QUESTION.format(*generator.integers(2, 90, 4).tolist())
        text = loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompts.append(Prompt(tuple(loaded.tokenizer(text).input_ids), 16, n, Sampling(256)))
    found: dict[str, Any] = {}
    for name, precision in PRECISIONS.items():
        engine = Engine(policy, 256, precision=precision)
        batches = logprob_batches(policy, prompts, list(generate_groups(engine, prompts)))
        found[name] = apart([trainer_logprobs(policy, batch) for batch, _ in batches], [sampled for _, sampled in batches])
        found[name]["length"] = float(np.mean([len(sampled) / 16 for _, sampled in batches]))
        engine.close()
        if name == "bf16":
            kept = batches
        print(f"{name}: {found[name]}", flush=True)
    return found | by_products(policy, [batch for batch, _ in kept])


def by_products(policy: Policy, batches: list[Any]) -> dict[str, Any]:
    """Log-probs of the module's own pass with products in fp8 against those without."""
    described = describe(policy)
    assert not isinstance(described, str)
    modes: dict[str, Any] = {"mlp": Emulation(policy), "mlp and attention": Emulation(policy), "vocabulary": nullcontext()}
    for projection in (p for layer in described.layers for p in (layer.qkv, layer.out)):
        modes["mlp and attention"].add([m.weight for m in projection.modules])
    plain = [module_logprobs(policy, batch, nullcontext()) for batch in batches]
    found: dict[str, Any] = {}
    for name, mode in modes.items():
        now = [module_logprobs(policy, batch, mode, name == "vocabulary") for batch in batches]
        found[f"products of {name}"] = apart(now, plain)
        print(f"products of {name}: {found[f'products of {name}']}", flush=True)
    return found


@torch.no_grad()
def module_logprobs(policy: Policy, batch: Any, mode: Any, vocabulary: bool = False) -> np.ndarray:
    """By the module's own pass within `mode`; `vocabulary`: with its product in fp8."""
    layout = {LAYOUT: Packed(batch.starts, policy.device)}
    with mode:
        hidden_TH = policy.hidden(batch.ids_T[None], positions(batch)[None], **layout)[0]
    head = policy.head
    if vocabulary:
        (q, row), ([v], scale) = quantize(hidden_TH), quantize_weights([head.weight_VH])
        hidden_TH, head = q.float() * row[:, None], Head(v.float() * scale)
    found = token_logprobs(hidden_TH[:-1], batch.ids_T[1:], head)[0]
    return found[batch.mask_T[1:]].float().cpu().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--cases", default="a,b,c")
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "gpu_fp8", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in options.cases.split(","):
        case = CASES[name]
        shapes = {
            "qkv": (case.hidden, (case.heads + 2 * case.keys) * case.width), "out": (case.hidden, case.hidden),
            "gate and up": (case.hidden, 2 * case.feed_forward), "down": (case.feed_forward, case.hidden),
            "vocabulary": (case.hidden, case.vocabulary),
        }  # fmt: skip
        found = {part: products(options.rows, *shape) for part, shape in shapes.items()}
        found["MLP with its norm"] = mlp(name, options.rows)
        result[name] = found
        for part, times in found.items():
            print(f"{name} {part}: " + ", ".join(f"{way} {us:.1f} us" for way, us in times.items()), flush=True)
    if options.model:
        result["logprobs"] = real_model(options.model)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
