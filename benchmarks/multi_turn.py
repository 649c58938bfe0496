"""The cost of several turns: episodes of many turns compared with single turns of the same lengths, tools that sleep, and a server.

    python benchmarks/multi_turn.py                                  # a model of 0.2M parameters on one thread of a CPU
    python benchmarks/multi_turn.py --device cuda --model DIRECTORY  # under 90 s on one GPU
    python benchmarks/multi_turn.py --only turns sleep               # some of: rate, turns, sleep, serve

rate   sampled tokens a second of 256 episodes of 4 turns, and of 256 single turns with the same tokens given and sampled in all
turns  seconds of each turn of 64 episodes of 10 turns, and of a single turn of the same length after a prompt as long as the history
sleep  256 rows and 1,024 episodes of 4 turns, of which a tenth wait 1 s for a tool after their first turn: in deterministic rounds, and
       with deterministic=false
serve  milliseconds until the first token of a stream of `posttrain serve`, and of the bare engine

Turns have a fixed number of tokens. On a CPU, which other programs may use, seconds are the CPU time of this process plus its waits
for tools (except for `serve`). Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from posttrain.data.text import Decoder
from posttrain.engine.engine import Engine
from posttrain.episodes import rollout_groups
from posttrain.models.policy import Policy, wrap_model
from posttrain.tasks.base import Task
from posttrain.turns import Seconds
from posttrain.types import Problem, Request, Sampling, Score

ROWS, SLEEPS, PARTS = 256, 1.0, ("rate", "turns", "sleep", "serve")


@dataclass(frozen=True)
class Sizes:
    """Tokens of the prompt, of what is given before each later turn, and of a turn; how often each figure is measured."""

    prompt: int
    given: int
    turn: int
    repeats: int


CPU, GPU = Sizes(48, 16, 32, 3), Sizes(256, 64, 64, 3)


@dataclass
class Episodes(Task):
    """`turns` turns; every `every`-th problem waits for a tool after its first turn. Notes when the last episode had each turn."""

    sizes: Sizes
    turns: int = 1
    every: int = 0
    ends: list[float] = field(default_factory=list)
    now: Callable[[], float] = time.perf_counter

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return [Problem(str(n), "", "") for n in range(4096)]

    async def run(self, problem: Problem, generate: Any) -> Any:
        number = int(problem.id)
        ids = [2 + (number + n) % 8 for n in range(self.sizes.prompt)]
        for turn in range(self.turns):
            await generate(ids, last=turn == self.turns - 1)
            self.ends[turn:] = [self.now()]
            if not turn and self.every and number % self.every == 0:
                await asyncio.sleep(SLEEPS)
            ids = [2 + (number + turn + n) % 8 for n in range(self.sizes.given)]
        return generate.rollout(Score(1.0))

    def score(self, problem: Problem, response: str) -> Score:
        return Score(0.0)


def load_policy(arguments: argparse.Namespace) -> Policy:
    if arguments.model:
        from posttrain.models.load import load

        dtype = "bfloat16" if arguments.device == "cuda" else "float32"
        found = load(arguments.model, dtype=dtype, device=arguments.device)
        return wrap_model(found.model, found.tokenizer, found.stop_ids, found.source)
    from posttrain.models.tiny import character_tokenizer, tiny_model

    tokenizer = character_tokenizer("0123456789+-*/=() \nabcdefghijklmnopqrstuvwxyz:,.?")
    model = tiny_model(tokenizer, arguments.size, 0).to(arguments.device)
    return wrap_model(model, tokenizer, (tokenizer.eos_token_id,))


@dataclass
class Bench:
    policy: Policy
    sizes: Sizes
    device: str
    asleep: int = 4 * ROWS  # episodes of `sleep`

    def __post_init__(self) -> None:
        self.engine = Engine(self.policy, ROWS, processes=1)
        self.decoder = Decoder(self.policy.tokenizer)

    def seconds(self, task: Episodes, episodes: int, tokens: int, ordered: bool = True) -> float:
        problems, sampling = task.problems("train")[:episodes], Sampling(tokens, min_new_tokens=tokens)
        task.ends.clear()
        task.now = time.process_time if self.device == "cpu" else time.perf_counter
        waited, began = Seconds(), task.now()
        groups = rollout_groups(task, self.engine, self.decoder, problems, 1, sampling, 0, None, waited, ordered)
        taken = task.now() - began + (waited.tools if self.device == "cpu" else 0.0)
        assert all(r.score.value == 1.0 for g in groups for r in g.rollouts), groups[0].rollouts[0].score
        return taken

    def rate(self) -> dict[str, Any]:
        """Alternating, after one of each: the machine may be shared."""
        sizes, turns = self.sizes, 4
        several = Episodes(sizes, turns)
        single = Episodes(Sizes(sizes.prompt + 3 * sizes.given, 0, 0, 0))
        found: dict[str, list[float]] = {"several": [], "single": []}
        for n in range(sizes.repeats + 1):
            for name, task, tokens in (("several", several, sizes.turn), ("single", single, turns * sizes.turn)):
                taken = self.seconds(task, ROWS, tokens)
                found[name] += [ROWS * turns * sizes.turn / taken] if n else []
        shares = [a / b for a, b in zip(found["several"], found["single"], strict=True)]
        speed = {name: statistics.median(rates) for name, rates in found.items()}
        return {**speed, "share": statistics.median(shares)}

    def turns(self) -> dict[str, Any]:
        """A decoded token reads the whole history on any engine: a single turn after as long a prompt is the measure of that. It pays
        for its prompt as well, which is left out by its time with one token."""
        sizes, task = self.sizes, Episodes(self.sizes, 10)
        taken, alone = list[list[float]](), list[list[float]]()
        for n in range(self.sizes.repeats + 1):
            began = time.process_time() if self.device == "cpu" else time.perf_counter()
            self.seconds(task, 64, sizes.turn)
            if n:
                taken.append([b - a for a, b in zip([began, *task.ends], task.ends, strict=False)])
            row = []
            for turn in (0, 9) if n else ():
                history = Episodes(Sizes(sizes.prompt + turn * (sizes.turn + sizes.given), 0, 0, 0))
                row.append(self.seconds(history, 64, sizes.turn) - self.seconds(history, 64, 1))
            alone += [row] if row else []
        by_turn = [statistics.median(column) for column in zip(*taken, strict=True)]
        least = [statistics.median(column) for column in zip(*alone, strict=True)]
        growth = by_turn[9] / by_turn[1]
        return {
            "by_turn": by_turn,
            "last_over_second": growth,
            "decoding_alone": least,
            "alone_last_over_first": least[1] / least[0],
        }

    def sleep(self) -> dict[str, Any]:
        plain, tool = Episodes(self.sizes, 4), Episodes(self.sizes, 4, every=10)
        found: dict[str, float] = {}
        for name, ordered in (("rounds", True), ("free", False)):
            pairs = []
            for _ in range(2):
                without = self.seconds(plain, self.asleep, self.sizes.turn, ordered)
                pairs.append((self.seconds(tool, self.asleep, self.sizes.turn, ordered), without))
            slept, without = min(pairs)
            found |= {f"{name}_plain_seconds": without, f"{name}_cost": 1 - without / slept}
        return found

    def serve(self) -> dict[str, Any]:
        import http.client

        from posttrain.serve.app import Limits, application
        from posttrain.serve.models import Models
        from posttrain.serve.server import Address, make_server

        models = Models({"model": self.policy.positions}, lambda name: self.policy, "model")
        body = {"messages": [{"role": "user", "content": "1+1=" * 8}], "stream": True, "max_tokens": 32}
        asked, bare = list[float](), list[float]()
        engine = Engine(self.policy, ROWS, processes=1, bursts=1)
        with make_server(application(lambda _: models, Limits()), Address(port=0), Limits()).in_thread() as url:
            for n in range(13):
                connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
                began = time.perf_counter()
                connection.request(
                    "POST", "/v1/chat/completions", json.dumps({**body, "seed": n}), {"Content-Type": "application/json"}
                )
                reply = connection.getresponse()
                while b'"content":"' not in (line := reply.readline()).replace(b" ", b"") and line:
                    pass
                asked.append(time.perf_counter() - began)
                reply.read()
                connection.close()
                began = time.perf_counter()
                engine.submit([Request((5,) * 40, n, Sampling(32), n, 0, -1, keep=False)])
                done = engine.poll(0.0)
                while not done and not engine.written({n}):
                    done = engine.poll(0.0)
                bare.append(time.perf_counter() - began)
                engine.cancel([n])
        models.close()
        served, engine_alone = (1000 * statistics.median(times[3:]) for times in (asked, bare))
        return {"served_ms": served, "engine_ms": engine_alone, "more_ms": served - engine_alone}


def told(name: str, found: dict[str, Any]) -> str:
    if name == "rate":
        return f"4 turns {found['several']:,.0f} tokens/s, single turn {found['single']:,.0f}: {found['share']:.0%}"
    if name == "turns":
        seconds = " ".join(f"{one:.3f}" for one in found["by_turn"])
        text = f"s by turn {seconds}: last / second {found['last_over_second']:.2f}"
        return f"{text}; decoding alone, after as long a prompt: {found['alone_last_over_first']:.2f}"
    if name == "sleep":
        return f"costs {found['rounds_cost']:.1%} in rounds, {found['free_cost']:.1%} with deterministic=false"
    return f"first token {found['served_ms']:.1f} ms, bare engine {found['engine_ms']:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="")
    parser.add_argument("--size", default="nano", help="of a model made here")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=4 * ROWS, help="of sleep; the wait of the last ones is never hidden")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    sizes = GPU if arguments.device == "cuda" else CPU
    sizes = Sizes(sizes.prompt, sizes.given, sizes.turn, arguments.repeats or sizes.repeats)
    bench = Bench(load_policy(arguments), sizes, arguments.device, arguments.episodes)
    result: dict[str, Any] = {"device": arguments.device, "model": arguments.model or f"tiny:{arguments.size}"}
    for name in arguments.only:
        began = time.perf_counter()
        result[name] = getattr(bench, name)()
        print(f"{name:6}| {told(name, result[name])}  ({time.perf_counter() - began:.0f} s)", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
