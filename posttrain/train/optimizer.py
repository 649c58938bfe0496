"""AdamW on float32 weights with moments of 32 or 8 bits, a learning-rate schedule and global-norm clipping. `Learner` is a model
with its optimizer and its names in checkpoints."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from posttrain import errors
from posttrain.errors import Checked, Count, NotNegative, Positive, Range, Share, UserError, require
from posttrain.models.policy import Policy
from posttrain.models.scorer import Scorer
from posttrain.system.world import ALONE, current
from posttrain.train import checkpoint
from posttrain.train.memory import choose_budget
from posttrain.train.parts import copies, is_sharded, own_part, part_of, rows_of, whole

BLOCK = 256  # numbers that share a scale where moments are kept in 8 bits
MIN_NARROW = 4096  # a tensor with fewer numbers keeps moments of 32 bits
NO_TORCHAO = "optimizer.moments=int8 needs torchao: pip install 'posttrain[int8]'"
NOT_COMPILED = (
    "optimizer.moments=int8 needs a compiler for C and C++ on this machine, and compiling does not work: install g++ (in CC and CXX "
    "another may be named), or leave optimizer.moments out"
)
DEFAULT_CXX = "clang++" if sys.platform == "darwin" else "g++"
# only one optimizer at a time may take a module's gradients
COLLECTORS: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Optimization(Checked):
    """The settings of an optimizer. The learning rate rises linearly over `warmup` steps, then follows `schedule` down to `final *
    lr`."""

    lr: Positive = 1e-6
    warmup: Annotated[int, Range(ge=0, text="a number of steps")] = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final: Share = 0.0  # share of lr after the last step of linear and cosine
    beta1: Annotated[float, Range(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Range(ge=0, lt=1)] = 0.99
    epsilon: float = 1e-8
    weight_decay: NotNegative = 0.0
    clip_norm: Annotated[float, Range(gt=0, text="positive (inf for none)", infinite=True)] = 1.0
    # tokens in a micro-batch; changes memory, never the gradient. auto: 8192, on a GPU up to 65536 by what memory it has left
    token_budget: Count | Literal["auto"] = "auto"
    # never, layer (compute activations again in backward), or auto: where memory asks for it
    checkpointing: Literal["auto", "never", "layer"] = "auto"
    # Adam's, or int8: a quarter of the memory, rounded (needs torchao)
    moments: Literal["float32", "int8"] = "float32"
    # coefficient of the load-balancing loss of a mixture of experts, added to the policy's loss; 0: none
    router_aux_loss_coef: NotNegative = 0.0

    def warning(self, name: str, steps: int) -> str:
        """A warning if the warm-up does not end within `steps` steps, else "". `name` is the key of these settings."""
        if self.warmup <= steps:
            return ""
        ends = f"the learning rate ends at {self.rate(steps - 1, steps):.3g} and never reaches {self.lr:g}"
        return f"{name}.warmup is {self.warmup} steps and the stage has {steps}: {ends}; lower it to {steps}, or raise the steps"

    def ready(self, device: str) -> None:
        """Raise an error if the machine lacks what these settings need."""
        if self.moments == "int8":
            require(importlib.util.find_spec("torchao") is not None, NO_TORCHAO)
            check_compiler(device)

    @property
    def plain_budget(self) -> int:
        """Tokens in a micro-batch if memory is not estimated."""
        return choose_budget(self.token_budget, float, None)

    @property
    def moment_bytes(self) -> float:
        """Bytes of both moments of one weight."""
        return 8.0 if self.moments == "float32" else 2.0 * (1 + 4 / BLOCK)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of step 0, 1, ..., steps - 1.

        >>> [Optimization(lr=1.0, warmup=2, schedule="linear").rate(s, 6) for s in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, steps - self.warmup)
        if self.schedule == "linear":
            return self.lr * (1 - (1 - self.final) * progress)
        if self.schedule == "cosine":
            falling = 0.5 * (1 + math.cos(math.pi * progress))
            return self.lr * (self.final + (1 - self.final) * falling)
        return self.lr


class Optimizer:
    """AdamW over the trainable parameters of a module. If these are not float32, it updates float32 master copies: gradients are
    summed in float32, and the rounded result is written back in place."""

    def __init__(self, module: nn.Module, settings: Optimization):
        self.settings = settings
        self.parameters: dict[str, nn.Parameter] = {
            n: p for n, p in module.named_parameters() if p.requires_grad
        }
        require(self.parameters, "the model has no trainable parameters")
        narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in self.parameters.values())
        # this process's part of each: all of it, or its shard, in the same memory
        self.parts: dict[str, Tensor] = {n: own_part(p) for n, p in self.parameters.items()}
        self.masters: dict[str, Tensor] = {
            n: p.detach().float().clone() if narrow else p for n, p in self.parts.items()
        }
        self.sharded = any(p is not self.parameters[n] for n, p in self.parts.items())
        whole = "optimizer.moments=int8 needs whole weights, in blocks; use parallel=ddp, or leave it out"
        require(not self.sharded or settings.moments != "int8", whole)
        # an earlier stage's optimizer must not take this one's gradients
        for handle in COLLECTORS.pop(module, ()):
            handle.remove()
        if narrow or self.sharded:
            COLLECTORS[module] = [
                p.register_post_accumulate_grad_hook(self._collect(self.masters[name]))  # type: ignore[no-untyped-call]
                for name, p in self.parameters.items()
            ]
        decay = [m for m in self.masters.values() if m.ndim >= 2]
        groups = [
            {"params": decay, "weight_decay": settings.weight_decay},
            {"params": [m for m in self.masters.values() if m.ndim < 2], "weight_decay": 0.0},
        ]
        betas = (settings.beta1, settings.beta2)
        common: dict[str, Any] = {"lr": settings.lr, "betas": betas, "eps": settings.epsilon}
        if settings.moments == "int8":
            narrow_adam = errors.optional("torchao.optim", NO_TORCHAO).AdamW8bit
            self.adam = narrow_adam(groups, **common, block_size=BLOCK)
        else:
            self.adam = torch.optim.AdamW(groups, **common, fused=True)

    @staticmethod
    def _collect(master: Tensor) -> Callable[[Tensor], None]:
        """Add a finished bf16 gradient to the float32 sum. Adding micro-batches in bf16 would lose small gradients."""

        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            found = own_part(parameter.grad)
            master.grad = found.to(master.dtype) if master.grad is None else master.grad.add_(found)
            parameter.grad = None

        return hook

    def gradients(self) -> Iterable[Tensor]:
        return (m.grad for m in self.masters.values() if m.grad is not None)

    def norm(self) -> Tensor:
        """The norm of the whole gradient, in float32."""
        gradients = [g.detach() for g in self.gradients()]
        if not gradients and not self.sharded:
            return torch.zeros(())
        norms = [n.float() for n in torch._foreach_norm(gradients, 2.0)]
        if self.sharded and current().tensor > 1:  # values that several processes have count once
            there = [self.parameters[n] for n, m in self.masters.items() if m.grad is not None]
            norms = [n / math.sqrt(copies(like)) for n, like in zip(norms, there, strict=True)]
        found: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        if self.sharded:
            squared = found.double().square()
            dist.all_reduce(squared)
            found = squared.sqrt()
        return found

    def step(self, rate: float, norm: float | None = None) -> float:
        """Clip to the global norm and update. Returns the norm before clipping; pass it as `norm` if it is known already. A
        non-finite gradient changes nothing."""
        norm = float(self.norm()) if norm is None else norm
        if not math.isfinite(norm):
            self.zero()
            return norm
        if norm > self.settings.clip_norm:
            torch._foreach_mul_(list(self.gradients()), self.settings.clip_norm / norm)
        for group in self.adam.param_groups:
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        self._update()
        parts, masters = list(self.parts.values()), list(self.masters.values())
        if parts[0] is not masters[0]:  # all or none are copies; at once, because the device waits
            with torch.no_grad():
                torch._foreach_copy_(parts, masters)
        self.zero()
        return norm

    def _update(self) -> None:
        """Make Adam's step. Torchao's step is compiled at its first call."""
        try:
            self.adam.step()
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"{NOT_COMPILED} ({reason})") from error

    def zero(self) -> None:
        # both: a backward pass may break off between them
        for tensor in (*self.masters.values(), *self.parameters.values()):
            tensor.grad = None

    def state(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, by parameter name. For sharded weights, only the first process returns it."""
        return of_first(self._tensors()) if self.sharded else dict(self._tensors())

    def own_state(self) -> dict[str, Tensor]:
        """`state`, but for sharded weights only this process's part. Values that every process has are returned by the first."""
        first = current().first
        return {n: t for n, t in self._tensors(rows_of) if first or (self.sharded and t.ndim)}

    def _tensors(
        self, put: Callable[[Tensor, Tensor], Tensor] = whole
    ) -> Iterator[tuple[str, Tensor]]:
        for name, master in self.masters.items():
            like = self.parameters[name]
            if master is not self.parts[name]:
                yield f"master.{name}", put(master, like)
            for key, value in self.adam.state.get(master, {}).items():
                parts = {"": value if value.ndim == 0 else put(value, like)}
                if hasattr(value, "codes"):
                    parts = {"_codes": value.codes, "_scale": value.scale}
                yield from ((f"{key}{part}.{name}", tensor) for part, tensor in parts.items())

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore saved moments and master weights, bit for bit."""
        with torch.no_grad():
            for name, master in self.masters.items():
                if f"master.{name}" in tensors:
                    master.copy_(part_of(tensors[f"master.{name}"], self.parameters[name]))
                if f"step.{name}" in tensors:
                    keys = ("step", "exp_avg", "exp_avg_sq")
                    self.adam.state[master] = {k: self._moment(tensors, k, name) for k in keys}

    def _moment(self, tensors: dict[str, Tensor], key: str, name: str) -> Tensor:
        master, narrow = self.masters[name], self.settings.moments == "int8"
        if key == "step":  # torchao counts on the CPU
            return tensors[f"step.{name}"].clone().to("cpu" if narrow else master.device)
        saved = tensors.get(f"{key}.{name}")
        int8 = "the checkpoint has moments of 8 bits: go on with optimizer.moments=int8"
        require(narrow or saved is not None, int8)
        blocks = narrow and master.numel() >= MIN_NARROW and master.numel() % BLOCK == 0
        if saved is not None and not blocks:
            return part_of(saved, self.parameters[name]).clone().to(master.device)
        from torchao.optim.subclass_8bit import OptimState8bit

        signed, kind = key == "exp_avg", (master.device, master.dtype)
        moment = OptimState8bit.zeros(master.shape, signed, BLOCK, *kind)
        if saved is not None:  # the run began with float32 weights
            return moment.copy_(saved.to(master.device))  # type: ignore[no-any-return]
        moment.codes.copy_(tensors[f"{key}_codes.{name}"])
        moment.scale.copy_(tensors[f"{key}_scale.{name}"])
        return moment  # type: ignore[no-any-return]


class Learner:
    """A trained model with its optimizer. `name` identifies it in messages, metrics and `Batch.resting`; `prefix` begins the names
    of its tensors in a checkpoint."""

    def __init__(
        self, name: str, network: Policy | Scorer, settings: Optimization, prefix: str = ""
    ):
        self.name, self.network, self.settings, self.prefix = name, network, settings, prefix
        if current() is not ALONE:
            from posttrain.train.sharding import spread

            spread(network, settings.moment_bytes)
        self.optimizer = Optimizer(network.model, settings)

    @property
    def state_bytes(self) -> float:
        """Bytes of gradients and moments."""
        count = sum(p.numel() for p in self.optimizer.parts.values())
        return (4 + self.settings.moment_bytes) * count

    def weights(self) -> dict[str, Tensor]:
        """All trained weights, by their names in a checkpoint. For a sharded network, only the first process returns them."""
        if self.network.sharded is None:
            return self._named(checkpoint.weights(self.network.model))
        return self._named(of_first(self.network.sharded.weights()))

    def own_parts(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """`weights` and `moments`, but for a sharded network only this process's part. Values that every process has are returned
        by the first."""
        first, sharded = current().first, self.network.sharded
        model = self.network.model if sharded is None else sharded.reshard()
        found = checkpoint.weights(model).items()
        own = {n: rows_of(t, t) if is_sharded(t) else t for n, t in found if first or is_sharded(t)}
        return self._named(own), self._named(self.optimizer.own_state())

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state, by its names in a checkpoint."""
        return self._named(self.optimizer.state())

    def restore(self, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> None:
        """Restore what `weights` and `moments` returned, by the same names, bit for bit."""
        if self.network.sharded is not None:
            self.network.sharded.reshard()
        checkpoint.restore_weights(self.network.model, weights)
        # a checkpoint of float32 weights has no masters: they are the weights, also where this device rounds them
        masters = {f"master.{name}": weights[name] for name in self.optimizer.masters}
        self.optimizer.restore({**masters, **moments})

    def _named(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {self.prefix + name: tensor for name, tensor in tensors.items()}


def of_first(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Gather whole tensors in the host memory of the first process. The others take part and keep nothing."""
    return {name: tensor.cpu() for name, tensor in tensors if current().first}


def check_compiler(device: str) -> None:
    """Raise an error if torch.compile, which torchao's optimizer step needs, finds no compiler: on a CPU that of $CXX or the
    default C++ compiler; on CUDA that of $CC, gcc or clang, with which triton builds its kernel launchers."""
    cuda = device.startswith("cuda")
    usual = ["gcc", "clang"] if cuda else [DEFAULT_CXX]
    names = os.environ.get("CC" if cuda else "CXX", "").split()[:1] or usual
    require(any(map(shutil.which, names)), f"{NOT_COMPILED}: there is no {' or '.join(names)}")
