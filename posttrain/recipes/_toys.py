"""The first stages of recipes that need no given model: a small one, trained on a CPU."""

from __future__ import annotations

from posttrain.stages._material import Data
from posttrain.stages.pretrain import PretrainStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.train.optimizer import Optimization

RATE = Optimization(lr=3e-3, warmup=20, schedule="cosine")
# for a model that is already trained
GENTLE = Optimization(lr=1e-3, warmup=10, schedule="cosine")
# one- and two-digit sums, all right
SHORT = Data(task=Arithmetic(level=2), counts={1: 200, 2: 1000})


def forgetful(share: float, count: int = 3000) -> tuple[Data, Data]:
    """Demonstrations of short sums, and of three-digit sums of every kind that forget this share of the carries."""
    return SHORT, Data(task=Arithmetic(level=3, forgotten=share), counts={3: count})


SHOWN = forgetful(0.8)  # a carry that is remembered is rare, but it is there
# three-digit sums only if no digit carries into the next
SUMS = (SHORT, Data(task=Arithmetic(level=3, carry="none"), counts={3: 1000}))


def pretrained(size: str, *data: Data, steps: int = 600) -> PretrainStage:
    """Pretrain a model on text."""
    tiny = f"tiny:{size}"
    return PretrainStage(name="pretrain", model=tiny, data=data, steps=steps, optimizer=RATE)


def imitating(size: str, *data: Data, steps: int = 500) -> SFTStage:
    """Train a model on demonstrations and nothing else."""
    return SFTStage(name="sft", model=f"tiny:{size}", data=data, steps=steps, optimizer=RATE)
