"""vLLM as a sampler, for real: in the Python that POSTTRAIN_VLLM_PYTHON names (`make test-vllm` makes one)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from posttrain.cluster import remote as remote_module
from posttrain.cluster.remote import VLLM_PYTHON, RemoteSampler, probe_logprobs, remote_sampler
from posttrain.config import Settings
from posttrain.errors import GuardStop, UserError
from posttrain.models.lora import Lora, add_adapters
from posttrain.models.policy import Policy, wrap_model
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.pipeline import start
from posttrain.recipes.base import Recipe
from posttrain.runs.read import Run
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.train.optimizer import Optimization
from posttrain.types import Completion, Request, Sampling

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(VLLM_PYTHON not in os.environ, reason=f"{VLLM_PYTHON} names no Python with vLLM"),
]
TASK = Arithmetic(level=1)


def make_policy(seed: int) -> Policy:
    tokenizer = character_tokenizer(str(TASK.alphabet))
    return wrap_model(tiny_model(tokenizer, "nano", seed), tokenizer, (tokenizer.eos_token_id,))


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy(0)


@pytest.fixture(scope="module")
def sampler(policy: Policy) -> Iterator[RemoteSampler]:
    made = remote_sampler(policy, 8, 1, "vllm", 1)
    made.publish(0)  # and so it has started
    yield made
    made.close()


def finished(sampler: RemoteSampler, count: int) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    deadline = time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline:
        found |= {request.session: completion for request, completion in sampler.poll(1.0)}
    assert len(found) == count
    return found


def own_logprobs(policy: Policy, before: list[int], ids: list[int], temperature: float) -> np.ndarray:
    every = torch.tensor([*before, *ids])
    with torch.no_grad():
        logits = policy.model(every[None]).logits[0, len(before) - 1 : -1].float() / temperature
    return np.asarray(logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)].numpy())


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_log_probs_are_ours_at_every_temperature_and_turn(policy: Policy, sampler: RemoteSampler, temperature: float) -> None:
    sampling, history = Sampling(10, temperature=temperature), {n: list[int]() for n in range(12)}
    for turn in range(2):
        given = [[6 + n, 7 + turn] for n in range(12)]
        sampler.submit([Request(tuple(given[n]), 10 * turn + n, sampling, n, turn, keep=True) for n in range(12)])
        for session, completion in finished(sampler, 12).items():
            ids, before = completion.ids.tolist(), [*history[session], *given[session]]
            np.testing.assert_allclose(completion.logprobs, own_logprobs(policy, before, ids, temperature), atol=1e-4)
            assert completion.finish == ("stop" if ids[-1] in policy.stop_ids else "length")
            assert len(ids) == 10 or completion.finish == "stop"
            history[session] = [*before, *ids]
    sampler.cancel(range(12))


def test_the_seed_of_a_request_decides_what_is_drawn(sampler: RemoteSampler) -> None:
    found = []
    for seeds in ((1, 2), (2, 1), (2**63 + 5, 2**64 - 1)):
        sampler.submit([Request((6, 7), seed, Sampling(30), session=n) for n, seed in enumerate(seeds)])
        found.append([finished_one.ids.tolist() for _, finished_one in sorted(finished(sampler, 2).items())])
    assert found[0] == found[1][::-1] and found[0][0] != found[0][1] != found[2][0]


def test_without_seeds_of_its_own_a_batch_has_that_of_its_first_request(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU without `deterministic`."""
    begin, end = remote_module.PROGRAM.split("from posttrain", 1)
    plant = "from posttrain.cluster import vllm as module; made = module.VLLMSampler.__init__\n"
    plant += "def init(self, settings): made(self, settings); self.seeded = False\nmodule.VLLMSampler.__init__ = init\n"
    monkeypatch.setattr(remote_module, "PROGRAM", f"{begin}\n{plant}\nfrom posttrain{end}")
    found = []
    with closing(remote_sampler(policy, 8, 1, "vllm", 1)) as sampler:
        sampler.publish(0)
        for first in (1, 2, 1):
            sampler.submit([Request((6, 7), seed, Sampling(30), session=n) for n, seed in enumerate((first, 9))])
            found.append([one.ids.tolist() for _, one in sorted(finished(sampler, 2).items())])
    assert found[0] == found[2] != found[1] and found[0][0] != found[0][1]


def test_rows_in_flight_go_on_with_the_new_weights(policy: Policy, sampler: RemoteSampler) -> None:
    before = {name: weight.clone() for name, weight in policy.model.state_dict().items()}
    old, new = make_policy(0), make_policy(1)
    sampler.submit([Request((6, 7 + n), n, Sampling(400), session=n) for n in range(8)])
    found = {request.session: completion for request, completion in sampler.poll(0.2)}
    policy.model.load_state_dict(new.model.state_dict())
    sampler.publish(1)
    found |= finished(sampler, 8 - len(found))
    assert any(set(c.versions.tolist()) == {0, 1} for c in found.values())
    for session, completion in found.items():
        ids, versions = completion.ids.tolist(), completion.versions
        assert versions.tolist() == sorted(versions.tolist())
        for version, model in enumerate((old, new)):
            own, mask = own_logprobs(model, [6, 7 + session], ids, 1.0), versions == version
            np.testing.assert_allclose(completion.logprobs[mask], own[mask], atol=1e-4)
    policy.model.load_state_dict(before)
    sampler.publish(2)


def test_every_tensor_is_in_the_receipt(policy: Policy, sampler: RemoteSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused and padded ones too: each, perturbed by itself on the way, is named."""
    fill, names = remote_module.fill, [n for n, _ in policy.model.named_parameters()]
    for version, name in enumerate(names[:12] + names[-1:], start=10):
        place = names.index(name)

        def perturbed(given, memory, place=place):
            return fill((w * 1.0001 if n == place else w for n, w in enumerate(given)), memory)

        with monkeypatch.context() as patch:
            patch.setattr(remote_module, "fill", perturbed)
            with pytest.raises(GuardStop, match=rf"at version {version}: {name};"):
                sampler.publish(version)
    sampler.publish(30)


def test_adapters_are_merged_before_they_are_sent(sampler: RemoteSampler) -> None:
    """Of a policy with adapters, into the vLLM of one without."""
    adapted, plain = make_policy(0), sampler.policy
    add_adapters(adapted.model, Lora(rank=2), 0)
    for name, parameter in adapted.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    assert (probe_logprobs(adapted, 24) - probe_logprobs(plain, 24)).abs().max() > 0.01
    sampler.policy = adapted
    try:
        sampler.publish(40)
        sampler.submit([Request((6, 7), 1, Sampling(8), session=0)])
        (completion,) = finished(sampler, 1).values()
        ids = completion.ids.tolist()
        np.testing.assert_allclose(completion.logprobs, own_logprobs(adapted, [6, 7], ids, 1.0), atol=1e-4)
        assert len(remote_module.published_weights(adapted.model, False, True)) == 14, "adapted layers alone"
    finally:
        sampler.policy = plain


def test_ten_steps_of_grpo(tmp_path: Path) -> None:
    stage = RLStage(
        name="rl", model="tiny:nano", task=TASK, steps=10, prompts=4, sampling=Sampling(6), sampler="vllm",
        optimizer=Optimization(lr=1e-3), evaluate_every=10, evaluate_problems=8,
    )  # fmt: skip
    run = Run(start(Settings(Recipe((stage,)), "test", threads=1, device="cpu", out=str(tmp_path / "run"))))
    rows = [row.figures for row in run.metrics() if "grad_norm" in row.figures]
    assert len(rows) == 10 and any(row["grad_norm"] > 0 for row in rows)
    gaps = [row["mismatch/logprob"] for row in rows if "mismatch/logprob" in row]
    assert all(abs(gap) < 1e-3 for gap in gaps), "what sampled is what is trained"


# A model that was loaded from files, and reloaded by vLLM's own call: it raises no error and, with tied embeddings, serves another.
STOCK = """
import tempfile
import vllm
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from posttrain.cluster import vllm as module

made = vllm.LLM

def from_files(folder, **settings):
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return made(folder, **settings | {"load_format": "auto"})

def load(self, weights):
    with tempfile.TemporaryDirectory() as folder:
        save_file({n: w.clone() for n, w in weights}, folder + "/model.safetensors")
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})

vllm.LLM = from_files
module.keep_plain_weights = lambda: None
module.VLLMSampler.load = load
"""


def test_a_reload_that_serves_a_wrong_model_is_caught(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, end = remote_module.PROGRAM.split("from posttrain", 1)
    monkeypatch.setattr(remote_module, "PROGRAM", f"{begin}\n{STOCK}\nfrom posttrain{end}")
    sampler = remote_sampler(policy, 8, 1, "vllm", 1)
    with closing(sampler):
        sampler.publish(0)  # without an error, and with the right hashes of what can be read
        sampler.submit([Request((6, 7), 1, Sampling(8), session=0)])
        with pytest.raises(GuardStop, match="samples from another model than the trainer's at version 0"):
            finished(sampler, 1)


def test_another_version_is_refused_in_one_line(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, end = remote_module.PROGRAM.split("from posttrain", 1)
    plant = "from posttrain.cluster import vllm as module; module.NEWEST = (0, 30)"
    monkeypatch.setattr(remote_module, "PROGRAM", f"{begin}\n{plant}\nfrom posttrain{end}")
    sampler = remote_sampler(policy, 8, 1, "vllm", 1)
    with pytest.raises(UserError, match=r"works with vLLM 0\.24 to 0\.30, and this Python has 0\.32"):
        sampler.publish(0)
    sampler.close()
