"""Low-rank adapters through peft: a frozen model, and small trained matrices added to its layers.

    W x  becomes  W x + (alpha / rank) B (A x),    A random, B = 0 at first

Because the frozen weights never change, other modules can share them: the reference and the critic's body are other modules over
the same parameters, so that neither is a second copy.
"""

from __future__ import annotations

import copy
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from posttrain.errors import Checked, Positive, Several, UserError, first_line, optional, require
from posttrain.models import nf4
from posttrain.models.policy import Network, Policy, text_body

ADAPTER = "lora_"  # part of the names of peft's matrices
NO_PEFT = "LoRA needs peft: pip install 'posttrain[lora]'"


@dataclass(frozen=True, kw_only=True)
class Lora(Checked):
    """Settings of LoRA adapters: rank, scale and the layers they are added to; () means every linear layer of the decoder.
    `load_in_4bit` keeps the frozen weights in 4 bits, on CUDA: QLoRA (models/nf4.py)."""

    where: ClassVar[str] = "lora: "
    shorthand: ClassVar[str] = "rank"  # lora: 16 is lora: {rank: 16}

    rank: Several = 16
    alpha: Positive = 32.0
    targets: tuple[str, ...] = ()
    load_in_4bit: bool = False

    def ready(self, device: str) -> None:
        """Raise an error on a machine without peft, and for 4 bits without CUDA."""
        require(importlib.util.find_spec("peft") is not None, NO_PEFT)
        slow = f"lora: load_in_4bit saves the memory of a GPU, and the device is {device}"
        require(not self.load_in_4bit or device.startswith("cuda"), f"{slow}; leave it out")

    def weight_bytes(self, body: nn.Module, itemsize: int) -> float:
        """Bytes of the adapters, minus what 4-bit storage saves on the frozen weights: all but the largest two, gate and up, which
        one product dequantises."""
        added = float(itemsize * self.parameters(body))
        if not self.load_in_4bit:
            return added
        counts = [m.weight.numel() for m in Lora().layers(body).values() if nf4.fits(m)]
        made = 2 * max(counts, default=0) * itemsize
        return added - sum(counts) * (itemsize - 0.5 - itemsize / nf4.BLOCK) + made

    def parameters(self, body: nn.Module) -> int:
        """The number of trained weights: rank * (inputs + outputs) for each layer."""
        layers = self.layers(body).values()
        return sum(self.rank * (layer.in_features + layer.out_features) for layer in layers)

    def layers(self, body: nn.Module) -> dict[str, nn.Linear]:
        """The linear layers that get an adapter, by name. In a mixture of experts only those of the attention do: experts are not
        linear layers, and peft would take the name of an MLP layer for them. Of a Mamba mixer only the first does: Mamba's kernels read
        the weights of the others themselves, past adapters. A weight that layers share (Zamba2) gets none: each would have its own, and
        one weight cannot be merged with both."""
        inner, named = has_experts(body), dict(body.named_modules())
        uses = Counter(id(m._parameters.get("weight")) for m in named.values())
        mixed = (n for n, m in named.items() if hasattr(m, "A_log") and hasattr(m, "D"))
        mixers = tuple(f"{name}." for name in mixed)
        linear = {
            name: m
            for name, m in named.items()
            if type(m) in (nn.Linear, nf4.Linear4bit) and not (inner and ".mlp" in name)
            if isinstance(m, nf4.Linear4bit) or uses[id(m.weight)] == 1
            if not name.startswith(mixers) or name.endswith(".in_proj")
        }
        chosen = self.targets or {name.rsplit(".", 1)[-1] for name in linear}
        return {name: m for name, m in linear.items() if name.rsplit(".", 1)[-1] in chosen}


def has_experts(module: nn.Module) -> bool:
    """Whether a model is a mixture of experts, whose weights transformers keeps in one tensor for all experts."""
    return any(".experts." in name for name, _ in module.named_parameters())


def share_weights(policy: Policy) -> Policy:
    """Another module over the same parameters, which stays without adapters when the first gets them."""
    kept = {id(p): p for p in policy.model.parameters()}
    return replace(policy, model=copy.deepcopy(policy.model, kept))


def add_adapters(model: Any, lora: Lora, seed: int, learning: Sequence[str] = ()) -> None:
    """Freeze the model and add adapters to its body, in place. Parameters whose names begin with one of `learning` stay trainable,
    such as a critic's head."""
    peft = optional("peft", NO_PEFT)
    body = text_body(model)
    none = f"lora: no layer of {type(body).__name__} is an nn.Linear, to which adapters are added"
    require(Lora().layers(body), f"{none}; train all weights: leave lora out")
    present = sorted({name.rsplit(".", 1)[-1] for name in Lora().layers(body)})
    missing = ", ".join(name for name in lora.targets if name not in present)
    has = f"it has {', '.join(present)}" + (", and experts get none" if has_experts(body) else "")
    require(not missing, f"lora: this model has no linear layer called {missing}; {has}")
    targets = list(lora.layers(body))
    settings = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(settings, body)
        except (
            ValueError,
            AttributeError,
        ) as error:  # it knows some layers of experts by their names
            advice = "name others by lora.targets, or train all weights"
            raise UserError(f"lora: {first_line(error)}; {advice}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(ADAPTER in name or name.startswith(tuple(learning)))


def merge_adapters(model: Any) -> float:
    """Merge the adapters into the weights of their layers, in place, and remove them.

    A model in half precision becomes one in float32, on the CPU: what adapters learn is often less than the spacing of its weights
    (2^-8 of them in bfloat16), and W + s B A, rounded to W, would be the model before training. Returns the share of the changed
    weights that are still others than before where they are rounded back. Of weights in 4 bits the merged ones are what those stand
    for, on which the adapters were trained.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    narrow = model.dtype if model.dtype.itemsize < 4 else None
    if narrow is not None:
        model.to("cpu", torch.float32)
    nf4.dequantize_layers(model)
    changed, kept = 0, 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, BaseTunerLayer):
                layer: Any = child.get_base_layer()
                before = layer.weight.detach().clone()
                child.merge()
                changed += int((layer.weight != before).sum())
                if narrow is not None:
                    kept += int((layer.weight.to(narrow) != before.to(narrow)).sum())
                setattr(module, name, layer)
    return kept / max(1, changed) if narrow is not None else 1.0


def peft_files(network: Network, lora: Lora) -> Callable[[Path], None]:
    """Write the adapters of a policy or a scorer to a folder from which peft can add them to the base model. A scorer's head is
    written with them, because the base model has none."""
    from peft import LoraConfig

    layers = [name for name, module in network.model.named_modules() if hasattr(module, "lora_A")]
    scorer = isinstance(getattr(network.model, "score", None), nn.Module)
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=layers,
        task_type="SEQ_CLS" if scorer else "CAUSAL_LM",
        modules_to_save=["score"] if scorer else None,
    )
    settings.base_model_name_or_path, settings.inference_mode = network.source, True
    # peft made a set of them, whose order changes from process to process
    settings.target_modules = layers
    learned = {n: p.detach() for n, p in network.model.named_parameters() if p.requires_grad}
    tensors = {
        f"base_model.model.{name.replace('.default.', '.')}": bits.to("cpu", copy=True).contiguous()
        for name, bits in learned.items()
    }

    def write(folder: Path) -> None:
        settings.save_pretrained(str(folder))
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    return write


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The adapter of one linear layer: y += scale * B (A x)."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float


def adapter_of(module: Any) -> Adapter | None:
    """The one plain adapter that a peft layer applies; None if there is none, or if it is more than B (A x)."""
    base = getattr(module, "base_layer", None)
    if type(base) not in (nn.Linear, nf4.Linear4bit) or not hasattr(module, "lora_A"):
        return None
    kept = base.scale if isinstance(base, nf4.Linear4bit) else base.weight  # type: ignore[union-attr]
    names = [name for name in module.active_adapters if name in module.lora_A]
    if len(names) != 1 or module.disable_adapters or module.merged or module.lora_variant:
        return None
    (name,) = names
    a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    plain = isinstance(dropout, nn.Identity) or getattr(dropout, "p", 1.0) == 0.0
    plain = plain and a.bias is None and b.bias is None and a.weight.dtype == kept.dtype
    if not plain:
        return None
    return Adapter(a.weight, b.weight, float(module.scaling[name]))


@contextmanager
def perturbed_adapters(body: nn.Module) -> Iterator[None]:
    """Make the adapters nonzero within the block, and restore their bits after it. They start at 0, so a comparison of two forward
    passes would not see them."""
    found = [adapter.b_OR for adapter in map(adapter_of, body.modules()) if adapter is not None]
    kept = [b.detach().clone() for b in found]
    try:
        with torch.no_grad():
            for n, b in enumerate(found):
                at = torch.arange(b.numel(), device=b.device, dtype=torch.float32).view_as(b)
                b.copy_(torch.sin(at * 1.7 + n) / b.shape[1])
        yield
    finally:
        with torch.no_grad():
            for b, bits in zip(found, kept, strict=True):
                b.copy_(bits)
