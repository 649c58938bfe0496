"""GFLOP/s of one CPU core in the products of a model of 2.8M parameters, by torch, oneDNN and numpy's library.

    python benchmarks/cpu_products.py
    python benchmarks/cpu_products.py --repeats 2     # does the script work?

Weights alternate, as in a decode step. Calls of all ways take turns; a rate is that of the 20th percentile of the times. Prints a line
for each number of rows and shape, then one JSON line.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import argparse
import json
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

SHAPES = ((256, 512), (256, 256), (256, 640), (640, 256))
WEIGHTS = 8


def rates(rows: int, inputs: int, outputs: int, repeats: int) -> dict[str, float]:
    x, gradient = torch.randn(rows, inputs), torch.randn(rows, outputs)
    weights = [torch.randn(inputs, outputs) for _ in range(WEIGHTS)]
    turned = [w.t().contiguous() for w in weights]
    arrays, number = [w.numpy() for w in weights], count()

    def n() -> int:
        return next(number) % WEIGHTS

    ways: dict[str, Callable[[], Any]] = {
        "torch.mm": lambda: torch.mm(x, weights[n()]),
        "F.linear": lambda: F.linear(x, turned[n()]),
        "oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(x, turned[n()], None, "none", [], ""),
        "numpy": lambda: np.dot(x.numpy(), arrays[n()]),
        "gradient of x, torch": lambda: torch.mm(gradient, turned[n()]),
        "gradient of W, torch": lambda: torch.mm(x.t(), gradient),
        "gradient of W, numpy": lambda: np.dot(x.numpy().T, gradient.numpy()),
    }
    if not torch.backends.mkldnn.is_available():
        del ways["oneDNN"]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    return {name: 2e-9 * rows * inputs * outputs / float(np.percentile(t, 20)) for name, t in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25, help="of the largest; of few rows 20 times as many")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = []
    for rows in (8, 32, 4480):
        for inputs, outputs in SHAPES:
            made = rates(rows, inputs, outputs, given.repeats * (1 if rows > 1000 else 20))
            found.append({"rows": rows, "inputs": inputs, "outputs": outputs, "gflops": made})
            print(
                f"{rows:5} rows, {inputs} to {outputs}:",
                ", ".join(f"{name} {rate:.0f}" for name, rate in made.items()),
                flush=True,
            )
    print(json.dumps({"benchmark": "cpu_products", "found": found}))


if __name__ == "__main__":
    main()
