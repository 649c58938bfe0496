"""Generation in pages on a CUDA device: its kernels, its graphs, and what no schedule may change. Run with `make test-gpu`."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from kernels_for_tests import Steps  # whose import lets kernels run on the CPU too

from posttrain.collect import Prompt, generate, generate_groups
from posttrain.engine import cuda
from posttrain.engine import engine as engine_module
from posttrain.engine import fused as kernels
from posttrain.engine.cuda import CUDABackend
from posttrain.engine.engine import Engine
from posttrain.engine.rows import PAGE, Rows
from posttrain.models.attention import Rule
from posttrain.models.layers import Heads
from posttrain.models.policy import Policy, wrap_model
from posttrain.ops.logprobs import Head, head_logits
from posttrain.train.forward import forward
from posttrain.train.pack import pack_examples
from posttrain.types import Completion, Example, Request, Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPE = {"vocab_size": 5000, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "initializer_range": 0.15,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
         "pad_token_id": 0}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"head_dim": 64, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "smollm": (
        "LlamaConfig",
        {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2Config", WINDOW),
    "qwen3": ("Qwen3Config", {"head_dim": 128}),
    "gemma": ("GemmaConfig", {"head_dim": 256}),
    "qwen3-moe": ("Qwen3MoeConfig", EXPERTS),
}
PROMPTS = [(5,), (7, 8, 9), tuple(range(3, 90)), (20, 19, 18, 17)]


def models(family: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Policy]:
    name, changes = FAMILIES[family]
    torch.manual_seed(1)
    with torch.device("cuda"):
        config = getattr(transformers, name)(**(SHAPE | changes))
        stock = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype).eval()
    return stock, wrap_model(copy.deepcopy(stock), None, (1,))


def run(policy: Policy, requests: list[Prompt], rows: int = 256) -> list[Completion]:
    engine = Engine(policy, rows)
    answers = [c for group in generate_groups(engine, requests) for c in group]
    backend_of(engine)
    return answers


def backend_of(engine: Engine) -> CUDABackend:
    assert engine.scheduler is not None and isinstance(engine.scheduler.backend, CUDABackend), "the plain path was taken"
    return engine.scheduler.backend


def plain(policy: Policy, requests: list[Prompt]) -> list[Completion]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "PAGED_DEVICES", set())
        return [c for group in generate_groups(Engine(policy), requests) for c in group]


def several(temperature: float = 1.0) -> list[Prompt]:
    return [Prompt(p, 5, n, Sampling(100, temperature if n % 2 else 1.0)) for n, p in enumerate(PROMPTS)]


def alike(one: list[Completion], other: list[Completion]) -> None:
    """The same ids, and log-probs, as far as they go: a rounding difference may turn a draw, and then all that follows it."""
    common, total = 0, 0
    for a, b in zip(one, other, strict=True):
        shorter = min(len(a.ids), len(b.ids))
        differ = np.flatnonzero(a.ids[:shorter] != b.ids[:shorter])
        same = int(differ[0]) if len(differ) else shorter
        common, total = common + same, total + shorter
        np.testing.assert_allclose(a.logprobs[:same], b.logprobs[:same], rtol=0, atol=2e-3)
    assert common >= 0.7 * total, f"{common} of {total} tokens are equal"


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_in_float32_are_those_of_transformers(family: str) -> None:
    stock, policy = models(family)
    found = run(policy, [Prompt(p, 3, 0, Sampling(100, temperature=0.0)) for p in PROMPTS])
    for n, prompt in enumerate(PROMPTS):
        expected = stock.generate(
            torch.tensor([prompt], device="cuda"), do_sample=False, max_new_tokens=100, eos_token_id=1, pad_token_id=0,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device="cuda"),
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert [c.ids.tolist() for c in found[3 * n : 3 * n + 3]] == [expected] * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_pages_sample_what_the_plain_path_samples(family: str) -> None:
    _, policy = models(family)
    alike(run(policy, several(0.7)), plain(policy, several(0.7)))


def test_few_rows_and_truncated_sampling() -> None:
    """Rows that leave, requests that wait; and top-k and top-p, which sample by plain torch inside the graph."""
    _, policy = models("qwen2")
    alike(run(policy, several()), run(policy, several(), 7))
    cut = [Prompt(p, 3, n, Sampling(30, top_k=9, top_p=0.9)) for n, p in enumerate(PROMPTS)]
    alike(run(policy, cut), plain(policy, cut))


def test_rows_that_leave_before_they_are_read_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the third call every graph is there, and the device drops rows that are done without waiting for the host."""
    _, policy = models("qwen2", torch.bfloat16)
    engine, launches, launch = Engine(policy), list[int](), CUDABackend.launch
    monkeypatch.setattr(CUDABackend, "launch", lambda one: (launches.append(one.rows.count), launch(one))[1])
    monkeypatch.setattr(cuda, "FEW", 0)
    prompts = [Prompt(PROMPTS[n % 4], 5, n, Sampling(10 + 13 * n)) for n in range(16)]
    calls = [[c for group in generate_groups(engine, prompts) for c in group] for _ in range(3)]
    assert launches[-1] == 80 and len(launches) > 3
    for one, *others in zip(*calls, strict=True):
        for other in others:
            assert one.ids.tolist() == other.ids.tolist()
            np.testing.assert_array_equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe"])
def test_a_graph_replays_what_the_step_computes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, policy = models(family, torch.bfloat16)
    captured = run(policy, several())
    monkeypatch.setattr(CUDABackend, "_capture", lambda one, *sizes: Steps(lambda: one._step(*sizes)))
    for one, other in zip(captured, run(policy, several()), strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_a_group_samples_what_single_requests_sample() -> None:
    """The prompt read once for eight rows, or for one: sample 0 is the same."""
    _, policy = models("qwen3")
    groups = run(policy, [Prompt(p, 8, n, Sampling(60)) for n, p in enumerate(PROMPTS)])
    alike(groups[::8], run(policy, [Prompt(p, 1, n, Sampling(60)) for n, p in enumerate(PROMPTS)]))


# where two experts are nearly equal, rounding decides between them
@pytest.mark.parametrize(("family", "bound"), [("qwen2", 0.03), ("qwen3-moe", 0.1)])
def test_log_probs_after_an_update_are_those_of_the_new_weights(family: str, bound: float) -> None:
    _, policy = models(family, torch.bfloat16)
    engine = Engine(policy)
    for change in (1.0, 1.2, 0.7):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(change)
        answers = [c for group in generate_groups(engine, several()) for c in group]
        for n, completion in enumerate(answers[::5]):
            ids = np.concatenate([PROMPTS[n], completion.ids])
            with torch.no_grad():
                batch = pack_examples([Example(ids, np.arange(len(ids)) >= len(PROMPTS[n]))], "cuda")
                expected = forward(policy, batch).logprob_T[len(PROMPTS[n]) :].cpu().numpy()
            assert float(np.abs(expected - completion.logprobs).mean()) < bound
    assert len(backend_of(engine).graphs) > 0


def test_replayed_experts_bring_the_trainer_closer_to_the_sampler() -> None:
    """A mixture of experts in bfloat16: without replay some tokens go to other experts in the trainer."""
    _, policy = models("qwen3-moe", torch.bfloat16)
    policy.router_replay = True
    apart: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for n, completion in enumerate(run(policy, several())[::5]):
        ids, first = np.concatenate([PROMPTS[n], completion.ids]), len(PROMPTS[n])
        assert completion.routes is not None and (completion.routes[: len(ids) - 2] >= 0).all()
        example = pack_examples([Example(ids, np.arange(len(ids)) >= first)], "cuda")
        batch = example.replace(routes_T=torch.from_numpy(completion.routes).cuda())
        for replay, found in apart.items():
            policy.router_replay = replay
            with torch.no_grad():
                outputs = forward(policy, batch)
            found.append(np.abs(outputs.logprob_T[first:].cpu().numpy() - completion.logprobs))
        assert float(outputs.logprob_T.isfinite().all()) and ("rerouted_T" in outputs.columns) == policy.router_replay
    with_replay, without = (float(np.concatenate(apart[replay]).mean()) for replay in (True, False))
    assert with_replay < 0.03 and with_replay <= without


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen2", torch.bfloat16), ("qwen2-window", torch.float32), ("gemma", torch.bfloat16), ("qwen3-moe", torch.float32)],
)
def test_a_second_turn_on_kept_pages_is_the_turn_computed_from_scratch(family: str, dtype: torch.dtype) -> None:
    """By the flash kernel in bfloat16, by torch's own attention in float32."""
    _, policy = models(family, dtype)
    engine = Engine(policy)
    first = list(generate(engine, [Request(p, n, Sampling(90), n, keep=True) for n, p in enumerate(PROMPTS)]))
    second = [Request((9, 8, 7), 50 + n, Sampling(40), n, 1) for n in range(len(PROMPTS))]
    kept = list(generate(engine, second))
    assert engine.statistics.recomputed == 0
    whole = [Request((*p, *first[n].ids.tolist(), 9, 8, 7), 50 + n, Sampling(40), n) for n, p in enumerate(PROMPTS)]
    again = list(generate(engine, whole))
    if dtype == torch.float32:
        alike(kept, again)
    for one, other in zip(kept, again, strict=True):
        same = one.ids[: len(other.ids)] == other.ids[: len(one.ids)]
        until = int(np.argmin(same)) if not same.all() else len(same)
        assert until == 0 or float(np.abs(one.logprobs[:until] - other.logprobs[:until]).mean()) < 0.03
    backend = backend_of(engine)
    assert sorted(backend.pages.free.tolist()) == list(range(1, backend.pages.pages)) and not backend.promised


def test_new_weights_while_a_burst_is_in_flight() -> None:
    """The burst that was launched before the weights changed is of the old ones; what follows is of the new."""
    _, policy = models("qwen2")
    engine, request = Engine(policy), Request((5, 6, 7), 3, Sampling(200, min_new_tokens=200))
    (old,) = generate(Engine(policy), [request])
    engine.submit([request])
    assert engine.poll() == []
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.2)
    engine.publish(4)
    found: list[Completion] = []
    while not found:
        found = [c for _, c in engine.poll()]
    before = int((found[0].versions == 0).sum())
    assert 0 < before < 200 and found[0].versions.tolist() == [0] * before + [4] * (200 - before)
    assert found[0].ids[:before].tolist() == old.ids[:before].tolist()
    ids = np.concatenate([request.ids, found[0].ids])
    with torch.no_grad():
        batch = pack_examples([Example(ids, np.arange(len(ids)) >= 3)], "cuda")
        expected = forward(policy, batch).logprob_T[3:].cpu().numpy()
    np.testing.assert_allclose(found[0].logprobs[before:], expected[before:], rtol=0, atol=2e-3)


@pytest.mark.parametrize("size", [700, 5000, 151936])
def test_the_sampler_draws_by_its_law(size: int) -> None:
    """Chi-square over forty bins of equal ids; log-probs are those of a log-softmax; cold rows take the largest."""
    rows = Rows(4096, 1, 1, 1, torch.device("cuda"))
    rows["done"].zero_()
    rows["seed"].copy_(torch.arange(4096, device="cuda") * 7919 + 13)
    rows.temperature.fill_(0.8)
    rows.top_p.fill_(1.0)
    torch.manual_seed(0)
    logits = torch.randn(size, device="cuda") * 2
    exact = torch.log_softmax(logits.double() / 0.8, -1)
    ids = []
    for position in range(8):
        rows["count"].fill_(position)
        id_N, logprob_N = kernels.choose(logits.expand(4096, -1).contiguous(), rows, False)
        torch.testing.assert_close(logprob_N.double(), exact[id_N], rtol=0, atol=1e-4)
        ids.append(id_N)
    found = torch.bincount(torch.cat(ids) * 40 // size, minlength=40).double()
    expected = torch.zeros(40, dtype=torch.float64, device="cuda").index_add_(
        0, torch.arange(size, device="cuda") * 40 // size, exact.exp()
    ) * len(torch.cat(ids))  # fmt: skip
    assert float(((found - expected) ** 2 / expected).sum()) < 80.0  # 39 degrees of freedom: beyond 80 once in 10,000
    rows.temperature.zero_()
    id_N, logprob_N = kernels.choose(logits.expand(4096, -1).contiguous(), rows, False)
    assert set(id_N.tolist()) == {int(logits.argmax())} and not logprob_N.any()


@pytest.mark.parametrize(("count", "size", "width"), [(300, 700, 64), (1000, 151936, 896), (130, 5000, 72)])
def test_sampling_without_logits_in_memory_is_sampling_from_logits(count: int, size: int, width: int) -> None:
    """Log-probs are those of a log-softmax of the logits, ids nearly all the same, and cold rows take the largest."""
    torch.manual_seed(0)
    rows, head = Rows(count, 1, 1, 1, torch.device("cuda")), Head((torch.randn(size, width, device="cuda") * 0.1).bfloat16())
    hidden = torch.randn(count, width, device="cuda").bfloat16()
    rows["done"].zero_()
    rows["seed"].copy_(torch.arange(count, device="cuda") * 7919 + 13)
    rows.temperature.fill_(0.7)
    rows.temperature[1] = 0.0
    logits = head_logits(hidden, head)
    (found, logprob), (expected, _) = kernels.sample(hidden, head, rows, False), kernels.choose(logits, rows, False)
    exact = torch.log_softmax(logits / 0.7, -1).gather(1, found[:, None])[:, 0]
    exact[1] = 0.0
    torch.testing.assert_close(logprob, exact, rtol=0, atol=2e-4)
    assert float((found == expected).float().mean()) > 0.98 and int(found[1]) == int(logits[1].argmax())


@pytest.mark.parametrize("heads", [Heads(14, 2, 64), Heads(9, 3, 64), Heads(8, 2, 128), Heads(4, 1, 256), Heads(4, 4, 80)])
@pytest.mark.parametrize("rule", [Rule(0.1), Rule(0.1, sliding_window=70), Rule(0.2, sliding_window=5, softcap=3.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("programs", [1, 512])
def test_attention_to_pages(
    heads: Heads, rule: Rule, dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Triton kernels against plain torch on the same pages; keys in one part, or in several."""
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    torch.manual_seed(0)
    one, two = Rows(12, 4, 3, 8, torch.device("cuda")), Rows(12, 4, 3, 8, torch.device("cpu"))
    store = [torch.randn(60 * PAGE, heads.keys, heads.width, dtype=dtype) for _ in range(2)]
    pages, prompt = torch.randperm(59) + 1, torch.tensor([150] * 4 + [3] * 5 + [64])
    count = torch.tensor([1, 64, 65, 130, 200, 2, 63, 128, 129, 7])
    mixed = torch.randn(10, (heads.heads + 2 * heads.keys) * heads.width, dtype=dtype)
    for rows in (one, two):
        rows.table[:10] = pages[:40].view(10, 4).int()
        rows.prompt_table[:3] = pages[40:49].view(3, 3).int()
        rows.tile[:, :3] = torch.tensor([[0, 4, 9], [4, 5, 1], [150, 3, 64]]).int()
        rows["count"][:10], rows["position"][:10], rows["done"][:10] = count, prompt + count - 1, 0
    queries = kernels.tile_rows(heads, 5)[1]
    query = mixed.view(10, -1, heads.width)[:, : heads.heads]
    expected = kernels.attend_pages(query, (store[0], store[1]), two, heads, rule, 4, queries)
    query = mixed.cuda().view(10, -1, heads.width)[:, : heads.heads]
    found = kernels.attend_pages(query, (store[0].cuda(), store[1].cuda()), one, heads, rule, 4, queries).cpu()
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)
