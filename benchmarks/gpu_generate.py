"""Generation on one GPU, with log-probs: tokens a second, compared with the roofline of the GPU's memory and matrix rates.

    python benchmarks/gpu_generate.py                     # cases a, b and d, and a with lognormal lengths
    python benchmarks/gpu_generate.py --cases a --profile # and where the time of a step goes
    python benchmarks/gpu_generate.py --cases a --quantization fp8
    python benchmarks/gpu_generate.py --cases a --ahead 1,3   # lognormal lengths, unfinished answers continue in the next step

Needs a CUDA device, torch, transformers and triton. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from gpu_cases import (  # noqa: E402
    CASES,
    Case,
    ceilings,
    clock,
    decode_bound,
    lognormal_lengths,
    make_model,
    make_policy,
    make_requests,
    settle,
)

from posttrain.cluster.admission import Admission, Staleness  # noqa: E402
from posttrain.collect import Prompt, generate_groups, group_requests  # noqa: E402
from posttrain.engine.cuda import CUDABackend  # noqa: E402
from posttrain.engine.engine import Engine  # noqa: E402
from posttrain.engine.fp8 import Precision  # noqa: E402
from posttrain.engine.rows import pages_of  # noqa: E402
from posttrain.engine.scheduler import Scheduler, Work  # noqa: E402
from posttrain.ops.hopper import fuses_gate  # noqa: E402
from posttrain.types import Completion  # noqa: E402


class Varied(Scheduler):
    """Rows that end at lengths given beforehand, as real answers end at their own. Requests promise the longest."""

    lengths = np.zeros(0, np.int64)

    def _enter(self, works: Sequence[Work], first: int) -> None:
        super()._enter(works, first)
        given = self.lengths[[request.session for work in works for request in work.requests]]
        promised = sum(sum(map(pages_of, work.limits)) for work in works)
        backend_of(self).promised -= promised - sum(pages_of(int(n)) for n in given)
        self.rows.live("limit", first)[:] = given


def backend_of(scheduler: Scheduler | None) -> CUDABackend:
    assert scheduler is not None and isinstance(scheduler.backend, CUDABackend), "the plain path was taken"
    return scheduler.backend


LIMIT = {False: 0.05, True: 0.3}  # of the mean difference of log-probs, without and with fp8


def gate(case: Case, engine: Engine, requests: list[Prompt], answers: list[tuple[Completion, ...]]) -> dict[str, float]:
    """The engine's log-probs against a float32 forward of the same ids, for some of the answers."""
    exact = make_model(case, torch.float32)
    with torch.no_grad():
        for mine, theirs in zip(exact.parameters(), engine.policy.model.parameters(), strict=True):
            mine.copy_(theirs)
        differences = []
        for request, group in list(zip(requests, answers, strict=True))[:4]:
            ids = torch.tensor(np.concatenate([request.ids, group[0].ids]), device="cuda")
            first = len(request.ids)
            logits = exact(ids[None], use_cache=False).logits[0, first - 1 : -1].float()
            expected = torch.log_softmax(logits, -1).gather(1, ids[first:, None])[:, 0].cpu().numpy()
            differences.append(np.abs(expected - group[0].logprobs))
    found = np.concatenate(differences)
    assert found.mean() < LIMIT[engine.precision.products], (
        f"log-probs differ from a float32 forward by {found.mean():.3f} on average"
    )
    return {"mean": float(found.mean()), "max": float(found.max())}


def run_case(name: str, repeats: int, precision: Precision) -> dict[str, Any]:
    case = CASES[name]
    engine = Engine(make_policy(case), max_rows=case.rows, precision=precision)
    torch.cuda.reset_peak_memory_stats()
    began = clock()
    answers = list(generate_groups(engine, make_requests(case, 0)))
    first = clock() - began
    checked = gate(case, engine, make_requests(case, 0), answers)
    settle()
    seconds = []
    for repeat in range(repeats + 1):
        began = clock()
        answers = list(generate_groups(engine, make_requests(case, 1 + repeat)))
        seconds.append(clock() - began)
    tokens = sum(len(c.ids) for group in answers for c in group)
    assert tokens == case.rows * case.new
    backend = backend_of(engine.scheduler)
    middle = statistics.median(seconds[1:])
    return {
        "case": name, "tokens_s": tokens / middle, "seconds": middle, "fastest": min(seconds[1:]), "slowest": max(seconds[1:]),
        "first_call": first, "graphs": len(backend.graphs),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "logprob_difference": checked, "engine": engine,
    }  # fmt: skip


def run_lognormal(engine: Engine, case: Case, repeats: int) -> dict[str, Any]:
    """Case a with lengths of mean 256 and at most 1024: real tokens a second."""
    from dataclasses import replace

    long = replace(case, new=1024)
    backend = backend_of(engine.scheduler)
    engine.scheduler = Varied(engine.policy, backend, case.rows)
    Varied.lengths = lognormal_lengths(case, 256, 1024)
    seconds = []
    for repeat in range(repeats + 1):
        requests = make_requests(long, 50 + repeat, endless=False)
        began = clock()
        answers = list(generate_groups(engine, requests))
        seconds.append(clock() - began)
    tokens = sum(len(c.ids) for group in answers for c in group)
    middle = statistics.median(seconds[1:])
    engine.scheduler = Scheduler(engine.policy, backend, case.rows)
    return {"tokens_s": tokens / middle, "seconds": middle, "tokens": tokens, "first_call": seconds[0],
            "graphs": len(backend.graphs)}  # fmt: skip


def run_ahead(
    engine: Engine, case: Case, staleness: int, keep: bool, counted: int = 6, mean: int = 256, longest: int = 1024
) -> dict[str, Any]:
    """Lognormal lengths in steps of `case.prompts` groups as `max_staleness` has them: a step takes the oldest finished groups, and
    those that it does not wait for continue after a publish, which computes their cache again unless they `keep` it. The steps at
    both ends, with fewer rows, are not counted, nor two in which graphs are captured. Training, which would come between, is left
    out."""
    from dataclasses import replace

    steps, group = counted + 2 + 2 * staleness, case.group
    asked = [p for step in range(steps) for p in make_requests(replace(case, new=longest), 50 + step, endless=False)]
    members = [tuple(same) for _, same in groupby(group_requests(asked), key=lambda request: request.group)]
    backend = backend_of(engine.scheduler)
    engine.scheduler = Varied(engine.policy, backend, case.rows, keep)
    Varied.lengths = np.concatenate([lognormal_lengths(case, mean, longest, seed) for seed in range(steps)])
    admission = Admission(Staleness(batch=case.prompts, max_staleness=staleness))
    missing, written = [group] * len(asked), [0] * len(asked)
    rates = []
    for _ in range(steps):
        began, room = clock(), len(asked) - admission.drawn
        begun = [one for _ in range(room) if (one := admission.begin()) is not None]
        engine.submit([request for one in begun for request in members[one.number]])
        while (chosen := admission.next_step()) is None:
            for request, completion in engine.poll():
                missing[request.group] -= 1
                written[request.group] += len(completion.ids)
                if not missing[request.group]:
                    admission.finish(admission.running[request.group])
        rates.append((sum(written[one.number] for one in chosen), clock() - began))
        admission.trained(chosen)
        engine.publish(engine.version + 1)
    recomputed = engine.statistics.recomputed
    engine.scheduler = Scheduler(engine.policy, backend, case.rows)
    engine.scheduler.version = engine.version
    tokens, seconds = (sum(column) for column in zip(*rates[2 + staleness : steps - staleness], strict=True))
    return {"tokens_s": tokens / seconds, "steps": rates, "counted": counted, "recomputed": recomputed}


def profile(engine: Engine, case: Case) -> list[tuple[str, float, int]]:
    """Milliseconds and launches of each kernel in one step in the middle of the answers."""
    from dataclasses import replace

    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    requests = make_requests(replace(case, new=case.new // 2 + 64), 99)
    scheduler, backend = engine.scheduler, backend_of(engine.scheduler)
    assert scheduler is not None
    engine.submit(group_requests(requests))
    engine.poll()
    while int(scheduler.rows["count"][0]) < case.new // 2 - 64:
        engine.poll()
    with torch.inference_mode():
        scheduler._collect()
        with watch(activities=[ProfilerActivity.CUDA]) as seen:
            backend.launch()
            torch.cuda.synchronize()
        steps = backend.drawn[0].steps
        scheduler.launched = True
    engine.cancel(list(engine.sessions))
    rows = [(e.key[:70], e.self_device_time_total / 1000 / steps, e.count // steps) for e in seen.key_averages()]
    return sorted(rows, key=lambda r: -r[1])[:24]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="a,b,d")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-lognormal", action="store_true")
    parser.add_argument("--ahead", default="", help="max_staleness of lognormal lengths in steps, such as 1,3")
    parser.add_argument("--quantization", default="none", choices=["none", "fp8"])
    options = parser.parse_args()
    import transformers

    bytes_s, flops_s = ceilings()
    print(f"ceilings: {bytes_s / 1e12:.2f} TB/s, {flops_s / 1e12:.0f} TFLOP/s", flush=True)
    results = []
    for name in options.cases.split(","):
        case = CASES[name]
        precision = Precision(options.quantization)
        result = run_case(name, options.repeats, precision) | asdict(precision) | {"hopper": fuses_gate(torch.device("cuda"))}
        engine = result.pop("engine")
        result["bound_s"] = decode_bound(case, bytes_s, flops_s)
        result["share_of_bound"] = result["bound_s"] / result["seconds"]
        print(f"{name}: {result['tokens_s']:,.0f} tokens/s, {result['seconds']:.2f} s, {100 * result['share_of_bound']:.0f}% of the "
              f"bound, peak {result['peak_gib']:.1f} GiB, first call {result['first_call']:.1f} s, "
              f"log-probs {result['logprob_difference']}", flush=True)  # fmt: skip
        if name == "a" and not options.no_lognormal:
            result["lognormal"] = run_lognormal(engine, case, max(1, options.repeats // 2))
            share = result["lognormal"]["tokens_s"] / result["tokens_s"]
            print(f"a, lognormal: {result['lognormal']['tokens_s']:,.0f} tokens/s, {100 * share:.0f}% of equal lengths, "
                  f"{result['lognormal']}", flush=True)  # fmt: skip
        for staleness in map(int, filter(None, options.ahead.split(","))):
            for way in ("continue", "keep"):
                ahead = result[f"ahead_{staleness}_{way}"] = run_ahead(engine, case, staleness, way == "keep")
                share = ahead["tokens_s"] / result["tokens_s"]
                print(f"{name}, lognormal, max_staleness={staleness}, in_flight={way}: {ahead['tokens_s']:,.0f} tokens/s, "
                      f"{100 * share:.0f}% of equal lengths, {ahead}", flush=True)  # fmt: skip
        if options.profile:
            result["profile"] = profile(engine, case)
            for key, milliseconds, launches in result["profile"]:
                print(f"  {milliseconds:7.3f} ms {launches:5d}  {key}")
        results.append(result)
        del engine
        torch.cuda.empty_cache()
    print(json.dumps({
        "benchmark": "gpu_generate", "date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__, "transformers": transformers.__version__, "bytes_s": bytes_s, "flops_s": flops_s,
        "results": results,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
