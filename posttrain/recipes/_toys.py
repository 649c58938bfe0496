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
# one- and two-digit sums of every kind, three-digit sums only if no digit carries into the next
SUMS = (
    Data(task=Arithmetic(level=2), counts={1: 200, 2: 1000}),
    Data(task=Arithmetic(level=3, carry="none"), counts={3: 1000}),
)


def pretrained(size: str, *data: Data) -> PretrainStage:
    """Pretrain a model on text."""
    tiny = f"tiny:{size}"
    return PretrainStage(name="pretrain", model=tiny, data=data, steps=600, optimizer=RATE)


def imitating(size: str, *data: Data, steps: int = 500) -> SFTStage:
    """Train a model on demonstrations and nothing else."""
    return SFTStage(name="sft", model=f"tiny:{size}", data=data, steps=steps, optimizer=RATE)
