"""What a run will do and need, said before it is started: batch arithmetic in words, memory, and the data report."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from posttrain.errors import require
from posttrain.models.load import Reader, check_device, same_vocabulary
from posttrain.models.policy import Policy
from posttrain.runs.console import duration
from posttrain.stages._plan import size_text
from posttrain.stages.base import Context, Stage, load_policy
from posttrain.system import machine
from posttrain.trust import trusting

if TYPE_CHECKING:
    from posttrain.commands.dry_run import Estimate
    from posttrain.config import Settings


class Elsewhere(Policy):
    """A model that is priced for a CUDA device which this machine does not have; its weights are in host memory."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


def describe(settings: Settings, dry: bool = False) -> list[str]:
    """The whole plan as lines. Loads the first model (to price it and to count tokens), trains nothing, writes nothing. `dry` runs a
    few steps of every stage in a temporary folder, to say how long the run will take."""
    from posttrain.commands.dry_run import estimate
    from posttrain.runs.write import RunWriter

    device, stages = machine.device(settings.device), settings.recipe.stages
    away = device.startswith("cuda") and not torch.cuda.is_available()
    absent = f"device={device}: a dry run needs the device, and torch sees no CUDA device here"
    require(not (dry and away), f"{absent}; leave --dry out")
    if not away:
        check_device(device)
    names = " -> ".join(stage.name for stage in stages)
    lines = [f"recipe {settings.name}, seed {settings.seed}: {names}"]
    lines += [f"priced for {device}, which this machine does not have"] if away else []
    with (
        trusting(settings.trust),
        tempfile.TemporaryDirectory() as folder,
        RunWriter(Path(folder)) as writer,
    ):
        seen = estimate(stages, settings.seed, device, settings.threads) if dry else {}
        context = Context(writer, settings.seed, device, say=False)
        policies: dict[str, Policy] = {}
        before: dict[str, Stage] = {}
        for stage in stages:
            lines += ["", f"{stage.name} ({type(stage).__name__})"]
            inner = [f"warning: {text}" for text in stage.warnings()]
            inner += stage_lines(stage, context, policies, before)
            inner += [dry_run_line(seen[stage.name])] if dry else []
            lines += [f"  {line}" for line in inner]
            before[stage.name] = stage
    if dry:
        total, longest = (sum(getattr(e, f) for e in seen.values()) for f in ("seconds", "longest"))
        whole = f"the whole run: about {time_text(total)}{upper_bound(longest, total)}"
        lines += ["", f"{whole}, by a dry run on this machine"]
    return lines


def time_text(seconds: float) -> str:
    """
    >>> time_text(1.739), time_text(75)
    ('1.74s', '1m15s')
    """
    return f"{seconds:.3g}s" if seconds < 60 else duration(seconds)


def dry_run_line(seen: Estimate) -> str:
    """What the dry run says of a stage."""
    each = f"a step takes {seen.step:.3g} s, " if seen.step else ""
    measured = f"an evaluation {seen.evaluation:.3g} s, " if seen.evaluation else ""
    length = f" with responses of {seen.length:.0f} tokens, as in its examples"
    time = f"{time_text(seen.seconds)}{length if seen.length else ''}"
    bound = upper_bound(seen.longest, seen.seconds)
    return (
        f"dry run: about {time}{bound}; {each}{measured}memory {size_text(seen.memory)} at its peak"
    )


def upper_bound(longest: float, usual: float) -> str:
    said = f", at most {time_text(longest)} where every response reaches its limit"
    return said if longest > 1.05 * usual else ""


def stage_lines(
    stage: Stage, context: Context, policies: dict[str, Policy], before: Mapping[str, Stage]
) -> list[str]:
    """What a stage says of itself. `policies` are the models so far, by the name of a stage or their own; a stage's model has the
    size of the one it starts from."""
    model = stage.starts_from()
    if not model:
        return ["no estimate for this kind of stage"]
    if model not in policies:
        policies[model] = load_priced(model, context, stage.alphabet())
    policy = policies[stage.name] = policies[model]
    check_vocabularies(stage, policy, policies)
    dtype = str(policy.dtype).removeprefix("torch.")
    size = f"model {model}: {policy.parameters:,} parameters, {dtype}"
    return [size, *stage.plan(policy, context, before)]


def load_priced(name: str, context: Context, alphabet: str) -> Policy:
    """The model as a run would have it on the device, or in host memory where the device is not here."""
    if not context.device.startswith("cuda") or torch.cuda.is_available():
        return load_policy(name, context, alphabet)
    policy = load_policy(name, context, alphabet, place="cpu")
    return Elsewhere(policy.model, policy.tokenizer, policy.stop_ids, policy.source)


def check_vocabularies(stage: Stage, policy: Policy, policies: Mapping[str, Policy]) -> None:
    """Refuse a reference, critic or reward model that the run would refuse for its vocabulary. Of those on the disk only the
    tokenizer is read, of those on the hub nothing."""
    for name in dict.fromkeys(stage.reads_ids()):
        if name in policies or name.startswith("tiny:") or Path(name).expanduser().exists():
            reader = policies.get(name) or read_reader(name, stage.alphabet())
            same_vocabulary(stage.name, policy, reader)


def read_reader(name: str, alphabet: str) -> Reader:
    from posttrain.models.load import load, locate
    from posttrain.models.load_directory import read_tokenizer
    from posttrain.models.tiny import character_tokenizer

    if name.startswith("tiny:"):
        return Reader(character_tokenizer(alphabet), name)
    path = locate(name)
    gguf = path.suffix.lower() == ".gguf"
    return Reader(load(name).tokenizer if gguf else read_tokenizer(path), name)
