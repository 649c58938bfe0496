"""A trained model that is exported and loaded again has the same bits and the same logits, in posttrain and in transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from posttrain.algorithms.sft import SFT
from posttrain.models.load import load, stop_ids
from posttrain.models.policy import wrap_model
from posttrain.models.save import save
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.train.forward import forward
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_examples
from posttrain.train.trainer import Trainer
from posttrain.types import Example


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exported_model_is_loaded_with_the_same_bits_and_logits(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = character_tokenizer("0123456789+= ")
    model = tiny_model(tokenizer, "nano", 0)
    for parameter in model.parameters():  # not model.to: the frequencies of the positions must stay in float32
        parameter.data = parameter.data.to(dtype)
    policy = wrap_model(model, tokenizer, stop_ids(model, tokenizer))
    batch = pack_examples([Example(np.array([6, 7, 8, 9, 10]), np.arange(5) > 0)])
    trainer = Trainer(policy, SFT(), Optimization(lr=1e-2))
    trainer.update(SFT().prepare(batch, {}), 1e-2)
    folder = save(policy.model, tokenizer, tmp_path / "export")

    loaded = load(str(folder))
    again = wrap_model(loaded.model, loaded.tokenizer, loaded.stop_ids)
    assert again.stop_ids == policy.stop_ids
    assert again.dtype == dtype
    own = dict(policy.model.named_parameters())
    assert own.keys() == dict(again.model.named_parameters()).keys()
    assert all(torch.equal(p, own[name]) for name, p in again.model.named_parameters())
    with torch.no_grad():
        assert torch.equal(forward(policy, batch).logprob_T, forward(again, batch).logprob_T)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert all(torch.equal(p, own[name]) for name, p in stock.named_parameters())
