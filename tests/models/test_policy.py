"""The one model object."""

from __future__ import annotations

import torch

from posttrain.models.policy import silence_dropout


def test_training_mode_has_no_dropout_wherever_a_family_keeps_it() -> None:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = OPTForCausalLM(
        OPTConfig(**sizes, dropout=0.5, attention_dropout=0.5, max_position_embeddings=32, word_embed_proj_dim=16)
    )
    ids = torch.arange(3, 13)[None]
    plain = model.eval()(ids).logits
    assert not torch.equal(model.train()(ids).logits, plain)
    silence_dropout(model)
    assert torch.equal(model.train()(ids).logits, plain)
