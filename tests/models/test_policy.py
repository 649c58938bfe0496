"""The one model object."""

from __future__ import annotations

import torch

from posttrain.models.policy import silence_dropout, untrained_tags, wrap_model
from posttrain.models.tiny import character_tokenizer, tiny_model


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


def test_tags_whose_rows_are_those_of_other_tokens_are_named() -> None:
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))))
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", *(f"<unused{n}>" for n in range(20))], special_tokens=True)
    model = tiny_model(tokenizer, "nano", 0)
    policy, tags = wrap_model(model, tokenizer, ()), ("<tool_call>", "</tool_call>", "<python>")
    assert untrained_tags(policy, tags) == [], "rows of their own; plain text is no single token"
    ids = tokenizer.convert_tokens_to_ids(["<tool_call>", *(f"<unused{n}>" for n in range(20))])
    with torch.no_grad():
        rows = policy.head.weight_VH
        rows[ids] = rows[ids[0]] * (1 + 0.001 * torch.randn(len(ids), 1))
    (line,) = untrained_tags(policy, tags)
    assert "never trained on <tool_call> (20)" in line and "</tool_call>" not in line and "format to tag" in line
