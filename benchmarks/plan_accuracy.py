"""The accuracy of plans: memory and time by `posttrain plan --dry`, compared with what the same stage then takes.

    python benchmarks/plan_accuracy.py                       # on the CPU: sft, grpo, ppo
    python benchmarks/plan_accuracy.py --device cuda --out plan.json grpo

Each case runs in separate processes, after a small warm-up stage that is not counted (imports, thread pools, compiled kernels).
Memory of a CUDA device is the peak that torch has allocated; memory of a CPU is the growth of the process's resident set. Prints a
table, and one JSON line last. The exit code is 1 if memory is off by more than 15% or time by more than 30%.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MEMORY, TIME = 0.15, 0.30
SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
CASES = ("sft", "grpo", "ppo")


def stage_of(case: str, device: str, model: str, steps: int):  # type: ignore[no-untyped-def]
    from posttrain.algorithms.grpo import GRPO
    from posttrain.algorithms.ppo import PPO
    from posttrain.stages._material import Data
    from posttrain.stages.rl import RLStage
    from posttrain.stages.sft import SFTStage
    from posttrain.tasks.arithmetic import Arithmetic
    from posttrain.train.optimizer import Optimization
    from posttrain.types import Sampling

    large = device.startswith("cuda")
    task, optimizer = Arithmetic(level=2), Optimization(lr=1e-5, token_budget=16384 if large else 2048)
    if case == "sft":
        data = (Data(task=task, counts={2: 400}),)
        return SFTStage(name="sft", model=model, data=data, steps=steps, batch=512 if large else 80, optimizer=optimizer)
    length = 256 if large else 24  # of every response: a plan is for the worst case
    algorithm = GRPO(group=8, beta=0.04) if case == "grpo" else PPO(group=2)
    return RLStage(
        name="rl", model=model, task=task, steps=steps, prompts=(32 if large else 8) * 8 // algorithm.group_size, algorithm=algorithm,
        sampling=Sampling(length, min_new_tokens=length), optimizer=optimizer, evaluate_every=10, evaluate_problems=64 if large else 16,
        checkpoint_every=10_000,
    )  # fmt: skip


def run(stage, device: str) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """Seconds and peak bytes of a stage."""
    from posttrain.commands.plan import Peak
    from posttrain.runs.write import RunWriter
    from posttrain.stages.base import Context

    with tempfile.TemporaryDirectory() as folder, RunWriter(Path(folder) / "run", config={}) as writer:
        peak, began = Peak(device), time.perf_counter()
        stage.run(Context(writer, 0, device, threads=1 if device == "cpu" else 0, say=False))
        return time.perf_counter() - began, peak.bytes()


def planned(stage, device: str) -> tuple[float, float, str]:  # type: ignore[no-untyped-def]
    """Seconds by a dry run, bytes by the plan's arithmetic, and its words: read from the lines that `posttrain plan --dry` prints."""
    from posttrain import config
    from posttrain.commands import plan
    from posttrain.recipes.base import Recipe

    settings = config.Settings(Recipe((stage,)), stage.name, device=device, threads=1 if device == "cpu" else 0)
    lines = [line.strip() for line in plan.describe(settings, dry=True)]
    (line,) = [line for line in lines if line.startswith("memory: about")]
    found, time_text = re.match(r"memory: about ([\d.]+) (\w+)", line), re.match(r"the whole run: about ([\w.]+)", lines[-1])
    assert found is not None and time_text is not None
    seconds = sum(float(number) * SECONDS[unit] for number, unit in re.findall(r"([\d.]+)([dhms])", time_text[1]))
    return seconds, float(found[1]) * UNITS[found[2]], line


def make_model(name: str, folder: Path) -> str:
    """`made:WIDTHxLAYERS`: random weights in a directory, which a GPU then loads in bfloat16; other names are what they say."""
    if not name.startswith("made:"):
        return name
    from transformers import AutoModelForCausalLM, LlamaConfig

    from posttrain.models.save import save
    from posttrain.models.tiny import character_tokenizer
    from posttrain.tasks.arithmetic import Arithmetic

    width, layers = map(int, name.removeprefix("made:").split("x"))
    tokenizer = character_tokenizer(Arithmetic().alphabet)
    heads = max(1, width // 64)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4), tie_word_embeddings=True, max_position_embeddings=4096,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return str(save(AutoModelForCausalLM.from_config(config), tokenizer, folder / "model"))


def child(case: str, options: argparse.Namespace) -> dict[str, object]:
    """What is planned, what is used, or both, in this process."""
    if options.clock == "cpu":
        time.perf_counter = time.time = time.process_time  # type: ignore[assignment]
    found: dict[str, object] = {}
    device = options.device
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        place = make_model(options.model, Path(folder))
        small = stage_of(case, device, "tiny:nano", 2)
        run(small if case == "sft" else replace(small, evaluate_every=0), device)
        stage = stage_of(case, device, place, options.steps)
        if options.part != "run":
            seconds, size, line = planned(stage, device)
            found |= {"planned_seconds": round(seconds, 2), "planned_mib": round(size / 2**20, 1), "plan": line}
        if options.part != "plan":
            took, used = run(stage, device)
            found |= {"seconds": round(took, 2), "mib": round(used / 2**20, 1)}
    return found


def case_of(case: str, options: argparse.Namespace) -> dict[str, object]:
    """A CUDA device knows what is allocated; on a CPU what planning took stays with the process, and the run needs one of its own."""
    given = [
        "--device",
        options.device,
        "--model",
        options.model,
        "--steps",
        str(options.steps),
        "--clock",
        options.clock,
        case,
    ]
    found: dict[str, object] = {
        "case": case,
        **{name: getattr(options, name) for name in ("device", "model", "steps", "clock")},
    }
    for part in ("plan", "run") if options.device == "cpu" else ("both",):
        done = subprocess.run([sys.executable, __file__, "--part", part, *given], capture_output=True, text=True, timeout=3600)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        found |= json.loads(done.stdout.splitlines()[-1])
    for kind, unit in (("time", "seconds"), ("memory", "mib")):
        found[f"{kind}_error"] = round(float(found[f"planned_{unit}"]) / float(found[unit]) - 1, 3)  # type: ignore[arg-type]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="tiny:mini", help="tiny:SIZE, made:WIDTHxLAYERS, or a directory")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--clock", default="wall", choices=["wall", "cpu"], help="cpu: processor time, where others use the cores too"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=["plan", "run", "both"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(child(options.cases[0], options)))
        return 0
    rows = []
    for case in options.cases:
        rows.append(row := case_of(case, options))
        print(f"{case:<5} time {row['planned_seconds']:>8} s planned, {row['seconds']:>8} s taken ({row['time_error']:+.0%});  memory "
              f"{row['planned_mib']:>8} MiB planned, {row['mib']:>8} MiB used ({row['memory_error']:+.0%})", flush=True)  # fmt: skip
        print(f"      {row['plan']}", flush=True)
    good = all(abs(row["time_error"]) <= TIME and abs(row["memory_error"]) <= MEMORY for row in rows)  # type: ignore[arg-type]
    text = json.dumps({"benchmark": "plan_accuracy", "ok": good, "rows": rows})
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
