"""A CUDA device's memory: what happens when it is full, what is given back, and a sampler that is not the trainer's. Run with
`make test-gpu`."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from events_for_tests import Emitted

from posttrain.algorithms.base import Algorithm, State
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.sft import SFT
from posttrain.collect import Collected, Prompt, Source, generate_groups
from posttrain.engine.cuda import CUDABackend
from posttrain.engine.engine import Engine
from posttrain.errors import GuardStop, UserError
from posttrain.loop import Interrupt, Loop, LoopSchedule
from posttrain.models.policy import Policy, wrap_model
from posttrain.runs.metrics import group_metrics
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.train.memory import activation_bytes
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_examples, pack_groups
from posttrain.train.saving import Saving, Store
from posttrain.train.trainer import Trainer
from posttrain.types import Batch, Example, Group, Problem, Rollout, Sampling, Score, Segment

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOKENS, LENGTH = 32768, 512


@pytest.fixture(autouse=True)
def whole_device() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def make() -> Policy:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=1000, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
        max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.05, eos_token_id=1,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return wrap_model(model, None, (1,))


def step() -> Batch:
    generator = np.random.default_rng(0)
    rows = generator.integers(3, 1000, (TOKENS // LENGTH, LENGTH))
    return SFT().prepare(pack_examples([Example(row, np.arange(LENGTH) > 0) for row in rows], "cuda"), {})


def trained(budget: int, **settings: Any) -> tuple[Trainer, float, int, int]:
    """(trainer after one step, norm of its gradient, memory before, most memory in it)."""
    gc.collect()
    torch.cuda.empty_cache()
    chosen = Optimization(lr=1e-3, token_budget=budget, **settings)
    trainer, batch = Trainer(make(), SFT(), chosen, events=Emitted()), step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    norm = trainer.update(batch, 1e-3).grad_norm
    return trainer, norm, before, torch.cuda.max_memory_allocated()


def limit(size: float) -> None:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.get_device_properties(0).total_memory)


def test_a_full_device_halves_the_budget_once_and_gives_the_same_gradient() -> None:
    *_, whole = trained(TOKENS)
    halved, norm, _, half = trained(TOKENS // 2)
    expected = [m.clone() for m in halved.optimizer.masters.values()]
    del halved
    assert half < 0.7 * whole
    limit(0.35 * whole + 0.65 * half)
    trainer, found, *_ = trained(TOKENS, checkpointing="never")
    (text,) = trainer.events.texts  # type: ignore[attr-defined]
    assert trainer.token_budget == TOKENS // 2 and "token_budget is halved to 16384" in text
    assert found == pytest.approx(norm, rel=2e-3)
    moved = [float((m - e).abs().max()) for m, e in zip(trainer.optimizer.masters.values(), expected, strict=True)]
    assert max(moved) <= 2.1e-3, "no weight of Adam's first step moves by more than its rate"
    close = [
        float(((m - e).abs() < 2e-4).float().mean()) for m, e in zip(trainer.optimizer.masters.values(), expected, strict=True)
    ]
    assert np.mean(close) > 0.97, "and nearly all of them the same way: atomics add in any order"


def test_a_device_that_is_too_full_stops() -> None:
    *_, half = trained(TOKENS // 2)
    limit(0.75 * half)
    with pytest.raises(torch.OutOfMemoryError):
        trained(TOKENS, checkpointing="never")


def test_checkpointed_layers_keep_less_and_the_estimate_holds() -> None:
    plain, norm, base, never = trained(TOKENS, checkpointing="never")
    kept, least = activation_bytes(plain.policy, TOKENS), activation_bytes(plain.policy, TOKENS, checkpointed=True)
    del plain
    trainer, other, _, layer = trained(TOKENS, checkpointing="layer")
    assert trainer.checkpointed and other == pytest.approx(norm, rel=2e-3)
    assert 0.7 * (kept - least) < never - layer < 1.4 * (kept - least), (kept, least, never - base, layer - base)
    del trainer
    automatic, *_ = trained(TOKENS)
    assert not automatic.checkpointed and automatic.events.texts == []
    crowded = Trainer(make(), SFT(), Optimization(token_budget=TOKENS), reserved_bytes=1e15, events=Emitted())
    assert crowded.checkpointed and "layer by layer" in crowded.events.texts[0]


def backend_of(engine: Engine) -> CUDABackend:
    assert engine.scheduler is not None and isinstance(engine.scheduler.backend, CUDABackend)
    return engine.scheduler.backend


def test_the_cache_is_given_back_to_the_device_and_taken_anew() -> None:
    policy = make()
    engine = Engine(policy, 256)
    requests = [Prompt(tuple(range(3, 60)), 32, n, Sampling(200, min_new_tokens=200)) for n in range(8)]
    before = [c.ids.tolist() for group in generate_groups(engine, requests) for c in group]
    backend = backend_of(engine)
    size, held = backend.pages.pages * backend.page_bytes, torch.cuda.memory_reserved()
    copies = sum(target.nbytes for product in backend.decoder.products for target, _ in product.copies())
    assert size > 1 << 25 and copies > 1 << 24
    engine.release()
    assert held - torch.cuda.memory_reserved() >= 0.95 * (size + copies)
    assert [c.ids.tolist() for group in generate_groups(engine, requests) for c in group] == before


def test_too_little_memory_for_one_group_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose cache is larger than the device: refused in words, before anything is computed."""
    policy = make()
    monkeypatch.setattr(policy.model.config, "max_position_embeddings", 1 << 40)
    with pytest.raises(
        UserError, match=r"needs [\d.e+]+ GiB of cache, and there is room for \d+ GiB: lower max_new_tokens to \d+, or "
    ):
        list(generate_groups(Engine(policy), [Prompt((5, 6), 4096, 0, Sampling(1 << 20))]))


class Sampled(Source):
    """Rollouts of the engine on two prompts, with rewards that alternate, so that every group has something to teach."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def collect(self, step: int, algorithm: Algorithm, state: State) -> Collected:
        groups = []
        for number in range(2):
            request = Prompt((5, 7, 9, 11 + number), 4, 10 * step + number, Sampling(40, min_new_tokens=40))
            prompt, problem = Segment(np.array(request.ids), "", False), Problem(str(number), "")
            answers = next(iter(generate_groups(self.engine, [request])))
            parts = [(prompt, Segment(c.ids, "", True, c.logprobs)) for c in answers]
            groups.append(Group(problem, tuple(Rollout(problem, n, p, Score(float(n % 2))) for n, p in enumerate(parts))))
        return Collected(pack_groups(groups, 1.0, self.engine.policy.device), tuple(groups), group_metrics(groups))

    def observe(self, groups: Sequence[Group]) -> None:
        pass

    def state(self) -> None:
        return None

    def restore(self, state: None) -> None:
        pass


def run(folder: Path, release: bool = False) -> list[dict[str, float]]:
    """The figures of three steps."""
    policy = make()
    engine = Engine(policy)
    loop = Loop(
        stage="rl",
        schedule=LoopSchedule(steps=3, checkpoint_every=100),
        trainer=Trainer(policy, GRPO(beta=0.0, group=4), Optimization(lr=1e-4)),
        source=Sampled(engine),
        writer=RunWriter(folder, config={"name": "gpu"}),
        checkpoints=Store(folder / "checkpoints", Saving(synchronous=True)),
        interrupt=Interrupt(),
        sampler=engine,
        release=engine.release if release else None,
    )
    loop.run()
    assert bool(backend_of(engine).stores) != release
    return [dict(row.figures) for row in Run(folder).metrics()]


def test_a_sampler_with_other_weights_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound, sampler and trainer differ by rounding; with copies of the weights that are a third too large, the guard stops the run
    at its first step, before the next one samples."""
    figures = run(tmp_path / "sound")
    assert len(figures) == 3 and max(f["mismatch"] for f in figures) < 0.03
    plain = CUDABackend._refresh

    def wrong(backend: CUDABackend) -> None:
        plain(backend)
        for product in backend.decoder.products:
            if product.copied:
                product.weight.mul_(1.33)

    monkeypatch.setattr(CUDABackend, "_refresh", wrong)
    with pytest.raises(
        GuardStop, match=r"mismatch: .*above 0\.1; the sampler's weights or its temperature are not the trainer's"
    ):
        run(tmp_path / "wrong")
    assert [row.step for row in Run(tmp_path / "wrong").metrics()] == [1]


def test_a_run_that_gives_its_cache_back_samples_the_same(tmp_path: Path) -> None:
    kept, given = (run(tmp_path / str(release), release) for release in (False, True))
    assert [f["tokens"] for f in kept] == [f["tokens"] for f in given]
    assert [f["mismatch"] for f in kept] == pytest.approx([f["mismatch"] for f in given], rel=0.3)
    assert kept[0]["entropy"] == pytest.approx(given[0]["entropy"], rel=1e-5)


def test_moments_of_8_bits_take_a_quarter_and_move_the_weights_alike() -> None:
    pytest.importorskip("torchao")
    moved, held = [], []
    start = torch.cat([p.detach().float().flatten() for p in make().model.parameters()])
    for moments in ("float32", "int8"):
        trainer, _, before, _ = trained(8192, moments=moments)
        held.append(torch.cuda.memory_allocated() - before)  # what a step leaves behind
        for _ in range(4):
            trainer.update(step(), 1e-3)
        moved.append(torch.cat([m.flatten() for m in trainer.optimizer.masters.values()]) - start)
        del trainer
    assert held[1] < 0.3 * held[0]
    assert float((moved[1] - moved[0]).norm() / moved[0].norm()) < 0.1
