"""vLLM as the sampler of a worker process: it takes the same requests, returns ids with log-probs, and replaces weights in place.

The log-probs are those of the distribution that was sampled from (`processed_logprobs`: after the temperature). A model's generation
config is ignored. Every request has its own seed if results must be reproducible: on a CPU, and on a GPU with `deterministic`.
Otherwise a batch has the seed of its first request, because vLLM draws for seeded rows one after the other. Requests in flight when
weights are published are recomputed from their ids, as in our engine, so that no cache outlives its weights. This file runs in the
Python that has vLLM, which needs none of posttrain's other packages.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.errors import require
from posttrain.types import Completion, Request, Statistics

if TYPE_CHECKING:
    from torch import Size, Tensor

    from posttrain.cluster.worker import WorkerSettings

OLDEST, NEWEST = (0, 24), (0, 32)  # supported versions
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process and ends with it
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # otherwise it compiles kernels for minutes at the first start
}
GPU_SHARE = 0.3  # share of a GPU's memory, which the trainer also uses
# tensors that vLLM fuses into one, by rows
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(slots=True, eq=False)
class Row:
    """A request that is being decoded, and what was sampled for it so far."""

    request: Request
    prompt: tuple[int, ...]  # including all earlier turns
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class VLLMSampler:
    """A `Sampler`. `weights` returns tensors under the trainer's names."""

    def __init__(self, settings: WorkerSettings):
        os.environ.update({k: v for k, v in ENVIRONMENT.items() if k not in os.environ})
        import vllm

        check_version(vllm.__version__)
        self.settings, self.capacity, self.version = settings, settings.rows, 0
        self.statistics = Statistics()
        self.rows: dict[str, Row] = {}
        self.kept: dict[int, tuple[int, ...]] = {}  # all ids of a session, for its next turn
        self.count = 0
        self.seeded = settings.device == "cpu" or settings.deterministic
        with tempfile.TemporaryDirectory() as folder:  # it reads only the model's configuration
            Path(folder, "config.json").write_text(json.dumps(settings.config))
            if settings.device == "cpu":
                keep_plain_weights()
            self.llm: Any = vllm.LLM(
                folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype=settings.dtype,
                seed=0,
                max_num_seqs=settings.rows,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",
                **({"enforce_eager": True} if settings.device == "cpu" else graphs(settings.rows)),
                gpu_memory_utilization=GPU_SHARE,
                trust_remote_code=False,
            )
        self.engine: Any = self.llm.llm_engine

    def submit(self, requests: Sequence[Request]) -> None:
        # vLLM's own seed for rows without one; a session below 0 is a probe, whose seeds are always the same
        if not self.seeded and requests and requests[0].session >= 0:
            import torch

            torch.manual_seed(requests[0].seed % 2**63)
        for request in requests:
            none = "sampler=vllm has no min_new_tokens: it would change the distribution"
            require(request.sampling.min_new_tokens == 0, none)
            self._add(Row(request, (*self.kept.pop(request.session, ()), *request.ids)))
        self.statistics += Statistics(prefilled=sum(len(r.ids) for r in requests))

    def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
        if not self.rows:
            return []
        found = []
        for output in self.engine.step():  # finished rows
            row, (new,) = self.rows.pop(output.request_id, None), output.outputs
            if row is not None:  # otherwise it was cancelled
                self._sampled(row, new.token_ids, new.logprobs)
                found.append((row.request, self._completion(row, new.finish_reason)))
        return found

    def cancel(self, sessions: Collection[int]) -> None:
        gone = [key for key, row in self.rows.items() if row.request.session in sessions]
        self.engine.abort_request(gone)
        for key in gone:
            del self.rows[key]
        for session in sessions:
            self.kept.pop(session, None)

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        running = list(self.rows.values())
        # request_states holds tokens that were sampled but not returned yet. All of them are kept: the last tokens of an unfinished
        # response do not end it, and sampling them again would end more responses.
        for state in self.engine.output_processor.request_states.values():
            row = self.rows.get(state.external_req_id)
            if row is not None:
                logprobs = state.logprobs_processor.logprobs
                self._sampled(row, state.detokenizer.output_token_ids, logprobs)
        self.engine.abort_request(list(self.rows))
        self.rows.clear()
        self.load(weights or ())
        self.engine.reset_prefix_cache()
        self.version = version
        for row in running:
            self._add(row)
        again = sum(len(row.prompt) + len(row.ids) for row in running)
        self.statistics += Statistics(recomputed=again)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load weights into the served model with vLLM's own loader, which knows its layout."""
        copies = ((name, weight.clone()) for name, weight in weights)
        self.engine.apply_model(lambda model: len(model.load_weights(copies) or ()))

    def weights(self, shapes: Mapping[str, Size]) -> dict[str, Tensor | None]:
        """The current tensors, by the names and shapes that were sent; None for a tensor that vLLM keeps in another form."""
        found: dict[str, Tensor | None] = {}

        def read(model: Any) -> None:
            own = dict(model.named_parameters()) | dict(model.named_buffers())
            found.update({name: part_of(own, name, shapes) for name in shapes})

        self.engine.apply_model(read)
        return found

    def release(self) -> None:
        self.engine.reset_prefix_cache()

    def close(self) -> None:
        self.cancel([row.request.session for row in self.rows.values()])

    def _add(self, row: Row) -> None:
        """Queue a row, from its beginning or from where it was."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling, done = row.request.sampling, len(row.ids)
        self.count += 1
        self.rows[str(self.count)] = row
        params = SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            max_tokens=sampling.max_new_tokens - done,
            seed=(row.request.seed + done) % 2**63 if self.seeded else None,
            stop_token_ids=list(self.settings.stop_ids),
            ignore_eos=True,  # the end token of the configuration is not used
            # Flat lists of numbers instead of an object for each token, and no output for a row before it is finished: with many
            # rows, the Python work for each row and step takes longer than the model.
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": [*row.prompt, *row.ids]}
        self.engine.add_request(str(self.count), prompt, params)

    def _sampled(self, row: Row, ids: Sequence[int], logprobs: Any) -> None:
        """Record what vLLM has sampled for a row since it was queued, with the current weight version."""
        same = list(ids) == logprobs.token_ids
        require(same, "vLLM gave log-probs of other tokens than it sampled")
        row.ids += ids
        row.logprobs += logprobs.logprobs
        row.versions += [self.version] * len(ids)

    def _completion(self, row: Row, reason: str) -> Completion:
        finite = bool(np.isfinite(row.logprobs).all())
        require(finite, "vLLM gave a token no finite log-prob: its logits are broken")
        require(reason in ("stop", "length"), f"vLLM ended a response with {reason!r}")
        if row.request.keep:
            self.kept[row.request.session] = (*row.prompt, *row.ids)
        self.statistics += Statistics(sampled=len(row.ids))
        return Completion(
            np.array(row.ids, np.int64),
            np.array(row.logprobs, np.float32),
            np.array(row.versions, np.int32),
            reason,
        )


def check_version(text: str) -> None:
    """Refuse an untested version of vLLM: how it replaces weights in place changes from version to version."""
    found = re.match(r"(\d+)\.(\d+)", text)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    tried = f"vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    other = f"sampler=vllm works with {tried}, and this Python has {text}"
    require(OLDEST <= version <= NEWEST, f"{other}; install one of those")


def graphs(rows: int) -> dict[str, Any]:
    """Batch sizes whose decoding is captured as CUDA graphs, up to all rows. By default vLLM captures none above 512 rows and
    launches each kernel separately."""
    sizes = [1 << n for n in range(7)] + list(range(128, rows, 128)) + [rows]
    return {
        "compilation_config": {"cudagraph_capture_sizes": sorted({min(n, rows) for n in sizes})}
    }


def keep_plain_weights() -> None:
    """On a CPU, make layers multiply with their own parameter. vLLM would pack a copy and empty the parameter, and a reload does not
    update the copy of tied embeddings, so the served model would be wrong."""
    import torch
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def part_of(own: Mapping[str, Tensor], name: str, shapes: Mapping[str, Size]) -> Tensor | None:
    """The tensor of that name, or its rows in the fused or padded tensor that contains it."""
    start, tensor = 0, own.get(name)
    for fused, parts in FUSED.items():
        for number, part in enumerate(parts):
            if f".{part}." in name and tensor is None:
                tensor = own.get(name.replace(f".{part}.", f".{fused}."))
                before = (name.replace(f".{part}.", f".{p}.") for p in parts[:number])
                start = sum(shapes[other][0] for other in before if other in shapes)
    shape = shapes[name]
    if tensor is None or tensor.shape[1:] != shape[1:]:
        return None
    found = tensor[start : start + shape[0]] if shape else tensor
    return found if found.shape == shape else None
