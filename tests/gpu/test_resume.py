"""A run on a CUDA device that was killed and resumed is the same run, bit for bit, in the deterministic mode.

python tests/gpu/test_resume.py                  # without pytest
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.faults.harness import fingerprint  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STEPS, KILLED = 6, 5  # a checkpoint every two steps: the killed run goes back to step 4


def train(folder: Path, name: str, device: str, kill_at: int = 0) -> None:
    """GRPO with a reference, in bfloat16, so that flash attention, fused kernels and pages are used; or what is left of it."""
    from posttrain.algorithms.grpo import GRPO
    from posttrain.loop import Loop
    from posttrain.models.save import save
    from posttrain.models.tiny import character_tokenizer, tiny_model
    from posttrain.runs.write import RunWriter
    from posttrain.stages.base import Context, run_stages
    from posttrain.stages.rl import RLStage
    from posttrain.tasks.arithmetic import Arithmetic
    from posttrain.train.optimizer import Optimization
    from posttrain.train.torch_settings import use_deterministic_kernels
    from posttrain.types import Sampling

    use_deterministic_kernels(device)
    torch.manual_seed(0)
    task = Arithmetic(level=2)
    if not (folder / "model").is_dir():
        tokenizer = character_tokenizer(task.alphabet)
        save(tiny_model(tokenizer, "mini", 0), tokenizer, folder / "model")
    stage = RLStage(
        name="rl", model=str(folder / "model"), task=task, steps=STEPS, prompts=8, algorithm=GRPO(group=8, beta=0.02),
        sampling=Sampling(48), optimizer=Optimization(lr=1e-3, token_budget=2048), evaluate_every=3, evaluate_problems=16,
        checkpoint_every=2, rollouts_every=1,
    )  # fmt: skip
    if kill_at:
        plain = Loop.one_step

        def one_step(self: Loop) -> object:
            found = plain(self)
            if self.step == kill_at:
                self.checkpoints.finish()
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        Loop.one_step = one_step  # type: ignore[assignment, method-assign]
    directory = folder / name
    with RunWriter(directory) if directory.exists() else RunWriter.create(directory, {"name": name}) as writer:
        run_stages((stage,), Context(writer, 0, device, threads=1, say=False))


def child(folder: Path, *arguments: str) -> int:
    """A process of its own: nothing of one attempt may help the next."""
    command = [sys.executable, __file__, str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=300).returncode


def kill_and_resume(folder: Path, device: str = "cuda") -> dict[str, float]:
    began = time.monotonic()
    assert child(folder, "both", device) == -signal.SIGKILL
    middle = time.monotonic()
    assert child(folder, "killed", device) == 0
    whole, resumed = fingerprint(folder / "whole"), fingerprint(folder / "killed")
    assert len(whole["figures"]) == STEPS + 1 and len(whole["rollouts"]) == STEPS and whole["weights"]
    for part in whole:
        assert resumed[part] == whole[part], f"a kill changes the {part}"
    events = [json.loads(line) for line in (folder / "killed/events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["kind"] == "resume"] == [KILLED - 1]
    return {"steps": STEPS, "killed_after": KILLED, "seconds": round(time.monotonic() - began, 1), "resumed_in": round(
        time.monotonic() - middle, 1)}  # fmt: skip


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    kill_and_resume(tmp_path)


def save_experts(folder: Path) -> None:
    """A mixture of experts for the runs of this folder."""
    import transformers

    from posttrain.models.save import save
    from posttrain.models.tiny import character_tokenizer
    from posttrain.tasks.arithmetic import Arithmetic

    tokenizer = character_tokenizer(Arithmetic(level=2).alphabet)
    config = transformers.Qwen3MoeConfig(
        vocab_size=-(-len(tokenizer) // 8) * 8, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    save(transformers.AutoModelForCausalLM.from_config(config), tokenizer, folder / "model")


def test_that_of_a_mixture_of_experts_too(tmp_path: Path) -> None:
    save_experts(tmp_path)
    kill_and_resume(tmp_path)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        where, what, which = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
        if what == "both":  # a run left alone, then one that is killed
            train(where, "whole", which)
            train(where, "killed", which, KILLED)
        else:
            train(where, what, which)
        sys.exit(0)
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(kill_and_resume(Path(made), *sys.argv[1:2]) | {"bit_identical": True}))
