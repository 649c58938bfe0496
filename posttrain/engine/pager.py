"""Whether and how a policy generates in pages: the one place where the engine asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from posttrain.engine.fused import fused
from posttrain.engine.paged import Paged
from posttrain.engine.paged_batch import PagedBatch
from posttrain.engine.work import Work
from posttrain.models.layers import report_plain_path
from posttrain.models.policy import Policy
from posttrain.types import Completion

DEVICES = {"cuda"}  # it runs on others too, where it only shows that it is right


class Pager:
    """Generation in pages, with CUDA graphs."""

    def __init__(self, policy: Policy):
        self.policy, self.wanted, self.busy = policy, policy.device.type in DEVICES, False
        self.paged: Paged | None = None

    def takes(self, requests: Sequence[Work]) -> bool:
        """Whether these requests go this way. A second call while one is half-way does not: there is one pool."""
        return self.wanted and not self.busy and bool(requests) and self._ready()

    def generate(
        self, requests: Sequence[Work], max_rows: int, version: int
    ) -> Iterator[tuple[Completion, ...]]:
        assert self.paged is not None
        self.busy = True
        try:
            yield from PagedBatch(self.paged, requests, max_rows, version).run()
        finally:  # also when the caller stops listening half-way
            self.busy = False

    def release(self) -> None:
        """Give the memory of the pool, of captured graphs and of copied weights back, as before training; the next call takes it
        anew and captures again. Nothing is given back while an answer is half-way."""
        if self.paged is not None and not self.busy:
            self.paged.release()
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()  # to the device: a private pool of graphs would not serve the trainer

    def _ready(self) -> bool:
        """Take the present weights; False, and said once, where the model is not of a kind that this way knows."""
        if self.paged is not None and self.paged.decoder.places == self.paged.decoder.addresses():
            self.paged.decoder.refresh()
            return True
        decoder, reason = fused(
            self.policy
        )  # the first call, or parameters were moved and captured graphs read the old ones
        if decoder is None:
            report_plain_path(self.policy, "engine", reason)
            self.wanted = False
            return False
        self.paged = Paged(decoder, self.policy.stop_ids)
        return True
