"""The program of a worker process that runs a sampler.

It makes its sampler from settings that JSON can carry, without weights: those come by `publish`, so that it needs no files of the
trainer. Where vLLM samples, this runs in the Python that has it, so nothing here imports more of posttrain than that has packages for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

from posttrain.errors import UserError
from posttrain.system.processes import end_with_parent
from posttrain.system.wire import Channel, decode_requests, encode_completions
from posttrain.types import JSON, Completion, Request, Statistics

if TYPE_CHECKING:
    from torch import Size, Tensor

    from posttrain.cluster.publish import Receipt
    from posttrain.engine.engine import Engine

    ReadWeights = Callable[[dict[str, Size]], Mapping[str, Tensor | None]]

REPLY_SECONDS = 0.02  # between replies with completions
HEARTBEAT = 1.0  # seconds between replies where nothing finishes


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings from which a worker builds its sampler."""

    config: Mapping[str, JSON]  # the model's config.json
    vocabulary: int
    stop_ids: tuple[int, ...]
    kind: str = "engine"  # or vllm
    dtype: str = "float32"
    device: str = "cpu"
    rows: int = 256  # decoded at once
    processes: int = 0  # of the engine on a CPU
    threads: int = 1  # of torch
    # rank, alpha and targets of the policy's adapters, if it has some
    lora: Mapping[str, JSON] | None = None
    deterministic: bool = False
    source: str = ""  # the model's origin, for messages
    # what the engine computes in fp8; see engine/fp8.py
    quantization: str = "none"


class SamplerWorker:
    """Holds a sampler, and also makes it answer the prompts of a probe: `poll` returns these completions, too, with negative
    sessions, for `Receipts.probe`."""

    def __init__(self, settings: WorkerSettings):
        self.vocabulary = settings.vocabulary
        self.sampler, self.read = make_sampler(settings)
        self.open: set[tuple[int, int]] = set()  # sessions and turns
        self.probed = Statistics()
        self.found: list[tuple[Request, Completion]] = []

    @property
    def busy(self) -> bool:
        return bool(self.open or self.found)

    @property
    def statistics(self) -> Statistics:
        """The sampler's statistics without the probes."""
        found: Statistics = self.sampler.statistics
        own = self.probed
        prefilled, sampled = found.prefilled - own.prefilled, found.sampled - own.sampled
        return replace(found, prefilled=prefilled, sampled=sampled)

    def submit(self, requests: Sequence[Request]) -> None:
        self.sampler.submit(requests)
        self.open |= {(r.session, r.turn) for r in requests}

    def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
        found, self.found = self.found, []
        found += self.sampler.poll(timeout) if not found else []
        for request, completion in found:
            self.open.discard((request.session, request.turn))
            if request.session < 0:
                self.probed += Statistics(len(request.ids), len(completion.ids))
        return found

    def cancel(self, sessions: Collection[int]) -> None:
        self.sampler.cancel(sessions)
        self.open = {key for key in self.open if key[0] not in sessions}
        self.found = [pair for pair in self.found if pair[0].session not in sessions]

    def load(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> Receipt:
        """Load new weights, and make a receipt from the weights that the sampler then uses."""
        from posttrain.cluster.publish import Receipt, hashes

        shapes: dict[str, Size] = {}

        def noted() -> Iterable[tuple[str, Tensor]]:
            for name, weight in weights:
                shapes[name] = weight.shape
                yield name, weight

        self.sampler.publish(version, noted())
        own = self.read(shapes)
        known = hashes({name: tensor for name, tensor in own.items() if tensor is not None})
        return Receipt(self.sampler.version, {name: known.get(name) for name in own})

    def probe(self) -> None:
        """Ask the sampler for the tokens of a probe. They are sampled before later requests, so that the probe changes nobody
        else's batch; if others are being decoded, together with those."""
        from posttrain.cluster.publish import probe_requests

        probes = probe_requests(self.vocabulary)
        self.cancel({r.session for r in probes})
        idle = not self.busy
        self.submit(probes)
        while idle and self.open:
            self.found += self.sampler.poll()
            self.open -= {(r.session, r.turn) for r, _ in self.found}


def make_sampler(settings: WorkerSettings) -> tuple[Any, ReadWeights]:
    """(a sampler whose weights are still random, its `version`, and a function that reads its weights)."""
    if settings.kind == "vllm":
        from posttrain.cluster.vllm import VLLMSampler

        served = VLLMSampler(settings)
        return served, served.weights
    engine = make_engine(settings)
    model = engine.policy.model

    def read(names: Collection[str]) -> dict[str, Tensor | None]:
        own = dict(model.named_parameters()) | dict(model.named_buffers())
        return {name: own[name] for name in names}

    return engine, read


def make_engine(settings: WorkerSettings) -> Engine:
    """Our engine on a model of the given configuration."""
    import torch
    from transformers import AutoConfig

    from posttrain.engine.engine import Engine
    from posttrain.engine.fp8 import Precision
    from posttrain.models.load import attention_for, class_for
    from posttrain.models.lora import Lora, add_adapters
    from posttrain.models.policy import wrap_model
    from posttrain.train.torch_settings import use_deterministic_kernels

    if settings.deterministic:
        use_deterministic_kernels(settings.device)
    torch.set_num_threads(settings.threads)
    config = AutoConfig.for_model(**settings.config)
    with torch.device(settings.device):
        model = class_for(config).from_config(
            config, dtype=getattr(torch, settings.dtype), attn_implementation=attention_for(config)
        )
    policy = wrap_model(model.eval(), None, tuple(settings.stop_ids), settings.source)
    if settings.lora is not None:
        add_adapters(policy.model, Lora(**settings.lora), seed=0)
    policy.model.requires_grad_(False)
    precision = Precision(settings.quantization)
    return Engine(policy, settings.rows, settings.processes, precision=precision)


def serve(channel: Channel) -> None:
    """The main loop of a worker: messages in, completions and receipts out, until the other end is closed."""
    settings, description = channel.receive()
    worker = SamplerWorker(WorkerSettings(**settings))
    seen, sent = 0, 0.0
    finished: list[tuple[Request, Completion]] = []
    memory: list[Tensor] = []

    def filled() -> None:
        nonlocal seen
        channel.receive()
        seen += 1

    def reply() -> None:
        nonlocal finished, sent
        channel.send("reply", seen, astuple(worker.statistics), encode_completions(finished))
        finished, sent = [], time.monotonic()

    while True:
        while not worker.busy or channel.ready():
            what, *about = channel.receive()
            seen += 1
            if what == "submit":
                worker.submit(decode_requests(about[0]))
                continue
            if what == "cancel":
                worker.cancel(about[0])
            elif what == "publish":
                from posttrain.cluster.publish import opened, unpack

                memory = memory or opened(description)
                given = unpack(about[1], memory, filled, lambda: channel.send("free"))
                receipt = worker.load(about[0], given)
                channel.send("receipt", receipt.version, dict(receipt.hashes))
                worker.probe()
                finished += worker.poll() if worker.found else []
            elif what == "release":
                worker.sampler.release()
            reply()
        finished += worker.poll()
        late = time.monotonic() - sent
        if late > HEARTBEAT or (finished and (late > REPLY_SECONDS or not worker.busy)):
            reply()


def main() -> None:
    """`python -m posttrain.cluster.worker REQUESTS REPLIES`: the numbers of two inherited pipes."""
    end_with_parent()
    channel = Channel(int(sys.argv[1]), int(sys.argv[2]))
    try:
        serve(channel)
    except EOFError:
        pass  # the trainer has ended, or closed its sampler
    except UserError as error:
        channel.send("error", str(error))


if __name__ == "__main__":
    main()
