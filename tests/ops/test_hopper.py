"""The gated product and FlashAttention 4 by stand-ins for the libraries: what they are asked for, their gradients, and what happens
where they fail or differ. The libraries themselves are tested in tests/gpu/test_hopper.py."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

import kernels_for_tests  # noqa: F401  kernels run on the CPU too
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.models.attention import Packed, Rule, attend_packed
from posttrain.ops import hopper
from posttrain.ops.hopper import gated_product

CPU = torch.device("cpu")
ASKED: list[dict[str, Any]] = []


def gemm_act(x: Tensor, weight: Tensor, *, activation: str, store_preact: bool, **how: Any) -> tuple[Tensor | None, Tensor]:
    """As quack's: the sums before the gate with gate and up of an element side by side."""
    assert how["concat_layout"] == ("B",)
    ASKED.append({"rows": len(x), "kept": store_preact, "broad": how["config"].tile_n})
    gate, up = (x @ weight).chunk(2, 1)
    act = {"swiglu": F.silu, "geglu": lambda t: F.gelu(t, approximate="tanh")}[activation]
    return torch.stack([gate, up], 2).flatten(1) if store_preact else None, act(gate) * up


def flash_attn_varlen_func(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, None]:
    """As FlashAttention 4's: the last query is at the last key."""
    assert how.pop("causal") and how["max_seqlen_k"] == int(how["cu_seqlens_k"].diff().max())
    ASKED.append({"queries": len(query), "width": query.shape[-1]})
    news, olds = (how[name].diff().tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    out = []
    for q, k, v in zip(query.split(news), key.split(olds), value.split(olds), strict=True):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1).transpose(0, 1) for t in (k, v))
        seen = torch.ones(len(q), k.shape[1], dtype=torch.bool).tril(k.shape[1] - len(q))
        scores = (q.transpose(0, 1) @ k.transpose(1, 2)).float() * how["softmax_scale"]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype)
        out.append((weights @ v).transpose(0, 1))
    return torch.cat(out), None


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[types.SimpleNamespace]:
    """Both libraries, and a device that can run them."""
    quack, interface, config = (types.ModuleType(f"quack{name}") for name in ("", ".gemm_interface", ".gemm_config"))
    flash_attn, cute = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.cute")
    modules = (quack, interface, config, flash_attn, cute)
    for module in modules:
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(interface)["gemm_act"], vars(config)["GemmConfig"] = gemm_act, types.SimpleNamespace
    vars(cute)["flash_attn_varlen_func"] = flash_attn_varlen_func
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=132))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("QUACK_CACHE_DIR", "")
    monkeypatch.delenv("QUACK_CACHE_DIR")
    cached = (hopper.fuses_gate, hopper._flash, hopper._config)
    for function in cached:
        function.cache_clear()
    ASKED.clear()
    yield types.SimpleNamespace(interface=interface, cute=cute)
    for function in cached:
        function.cache_clear()


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("tanh", [False, True])
def test_the_gated_product_and_its_gradients_are_those_of_two_products(tanh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "_fits", lambda x, weight: True)
    found = []
    for ours in (True, False):
        x, weight = numbers(130, 8).requires_grad_(), numbers(12, 8).requires_grad_()
        gate, up = weight.split(6)
        act = F.gelu(x @ gate.t(), approximate="tanh") if tanh else F.silu(x @ gate.t())
        out = gated_product(x, weight, tanh) if ours else act * (x @ up.t())
        (out * numbers(130, 6)).sum().backward()
        found.append([out, x.grad, weight.grad])
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)
    assert ASKED == [{"rows": 130, "kept": True, "broad": 128}]


@pytest.mark.usefixtures("installed")
def test_only_gradients_that_are_asked_for_are_computed_and_sums_are_kept_only_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hopper, "_fits", lambda x, weight: True)
    x, weight = numbers(200, 8).requires_grad_(), numbers(12, 8)
    gated_product(x, weight, False).sum().backward()
    assert x.grad is not None and weight.grad is None
    with torch.no_grad():
        gated_product(x, weight, False)
    gated_product(x.detach(), weight, False)
    assert [asked["kept"] for asked in ASKED] == [True, False, False]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("rows", "columns", "width", "dtype", "fused"),
    [
        (128, 32, 16, torch.bfloat16, True),
        (127, 32, 16, torch.bfloat16, False),
        (128, 32, 16, torch.float32, False),
        (128, 24, 16, torch.bfloat16, False),
        (128, 32, 12, torch.bfloat16, False),
    ],
)
def test_few_rows_and_what_the_kernel_cannot_read_take_the_usual_way(
    rows: int, columns: int, width: int, dtype: torch.dtype, fused: bool
) -> None:
    assert hopper.fuses_gate(CPU)
    ASKED.clear()
    x, weight = numbers(rows, width).to(dtype), numbers(columns, width).to(dtype)
    out = gated_product(x, weight, False)
    gate, up = (x.double() @ weight.double().t()).chunk(2, 1)
    torch.testing.assert_close(out.double(), F.silu(gate) * up, rtol=0.05, atol=0.1)
    assert bool(ASKED) == fused


def test_a_library_that_gives_something_else_is_named_and_not_used(
    installed: types.SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    def side_by_side_no_more(x: Tensor, weight: Tensor, **how: Any) -> Any:
        kept, out = gemm_act(x, weight, **how)
        return kept.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1), out

    installed.interface.gemm_act = side_by_side_no_more
    assert not hopper.fuses_gate(CPU)
    installed.cute.flash_attn_varlen_func = lambda query, *_, **how: query * 1.0
    assert hopper.flash(CPU, 64) is None
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("quack is installed and is not used, the usual kernels are: its results are off by 1.")
    assert second.startswith("FlashAttention 4 is installed and is not used, the usual kernels are: ")


def test_a_library_whose_calls_have_changed_is_named_and_not_used(
    installed: types.SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    installed.interface.gemm_act = lambda x, weight: None
    del installed.cute.flash_attn_varlen_func
    assert not hopper.fuses_gate(CPU) and hopper.flash(CPU, 64) is None
    assert "TypeError: " in caplog.text and "ImportError: " in caplog.text and len(caplog.records) == 2
    x, weight = numbers(128, 16).bfloat16(), numbers(32, 16).bfloat16()
    assert gated_product(x, weight, False).shape == (128, 16), "and the usual kernels are used"


@pytest.mark.usefixtures("installed")
def test_compiled_kernels_are_kept_where_nobody_else_can_put_some(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    assert hopper.fuses_gate(CPU)
    assert os.environ["QUACK_CACHE_DIR"] == str(tmp_path / "posttrain" / "quack")
    hopper.fuses_gate.cache_clear()
    monkeypatch.setenv("QUACK_CACHE_DIR", "elsewhere")
    assert hopper.fuses_gate(CPU) and os.environ["QUACK_CACHE_DIR"] == "elsewhere"


@pytest.mark.usefixtures("installed")
def test_packed_sequences_attend_by_flash_attention_4_where_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from posttrain.models import attention

    usual = []

    def varlen(*given: Any, **how: Any) -> Tensor:
        usual.append(how["window_size"])
        return torch.zeros_like(given[0])

    monkeypatch.setattr(attention, "available", lambda *_: True)
    monkeypatch.setattr(attention, "varlen", lambda: varlen)
    lengths = (3, 9, 5)

    def tensors(width: int, queries: int) -> list[Tensor]:
        return [numbers(n, heads, width).float().requires_grad_() for n, heads in ((queries, 4), (17, 2), (17, 2))]

    assert hopper.flash(CPU, 16) is not None
    for queries in (None, (2, 4, 5)):
        ASKED.clear()
        given = tensors(16, 17 if queries is None else 11)
        out = attend_packed(lengths, CPU, queries)(0, *given, Rule(0.3))
        rows = [t.transpose(0, 1)[None] for t in given]
        if queries is None:
            expected = Packed((0, 3, 12, 17)).attend(0, rows[0], rows[1], rows[2], Rule(0.3))[0]
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        assert [{"queries": len(given[0]), "width": 16}] == ASKED and not usual
    attend_packed(lengths, CPU)(0, *tensors(16, 17), Rule(0.3, sliding_window=4))
    attend_packed(lengths, CPU)(0, *tensors(16, 17), Rule(0.3, sliding_window=9))
    attend_packed(lengths, CPU)(0, *tensors(256, 17), Rule(0.3))
    with torch.inference_mode():
        attend_packed(lengths, CPU)(0, *tensors(16, 17), Rule(0.3))
    torch.use_deterministic_algorithms(True)
    try:
        attend_packed(lengths, CPU)(0, *tensors(16, 17), Rule(0.3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert usual == [(3, 0), *[(-1, 0)] * 3], "a window as long as the longest sequence hides nothing"
