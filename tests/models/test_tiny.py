"""Tiny models: a tokenizer that loses nothing, and networks that depend on their seed alone."""

from __future__ import annotations

import string

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.errors import UserError
from posttrain.models.tiny import END, SIZES, SPECIAL_TOKENS, character_tokenizer, tiny_model

ALPHABET = string.printable + "éß→数"
TOKENIZER = character_tokenizer(ALPHABET)
CHAT = [
    {"role": "system", "content": "sum"},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "\n 2 "},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": ""},
]


@given(st.text(alphabet=ALPHABET))
@settings(max_examples=200, deadline=None)
def test_any_text_over_the_alphabet_survives(text: str) -> None:
    ids = TOKENIZER(text).input_ids
    assert TOKENIZER.decode(ids) == text
    if not any(token in text for token in SPECIAL_TOKENS):
        assert len(ids) == len(text)


@pytest.mark.parametrize("text", [" ", "  ", "\n\n", "a\r\n\tb ", " ,don't .", "<|user|>", "<|end|", "<|end|>  <|end|>"])
def test_spaces_and_markers_survive(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text


def test_ids_are_special_tokens_then_the_alphabet_in_order() -> None:
    tokenizer = character_tokenizer("cab" + "a")  # a repeated character counts once
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))) == [*SPECIAL_TOKENS, "c", "a", "b"]
    assert tokenizer("abc").input_ids == [7, 8, 6]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 5)


def test_a_character_outside_the_alphabet_is_unknown() -> None:
    tokenizer = character_tokenizer("ab")
    assert tokenizer("azb").input_ids == [6, tokenizer.unk_token_id, 7]


def test_an_empty_alphabet_is_refused() -> None:
    with pytest.raises(UserError, match="at least one character"):
        character_tokenizer("")


def test_the_chat_template_renders_every_role() -> None:
    text = TOKENIZER.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|system|>sum<|end|><|user|>1+1=<|end|><|assistant|>\n 2 <|end|><|user|>2+2=<|end|><|assistant|><|end|><|assistant|>"
    )


def test_rendered_markers_are_single_tokens() -> None:
    ids = TOKENIZER.apply_chat_template(CHAT[1:2], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert TOKENIZER.convert_ids_to_tokens(ids) == ["<|user|>", "1", "+", "1", "=", "<|end|>", "<|assistant|>"]


def test_the_assistant_mask_covers_its_words_and_their_end() -> None:
    rendered = TOKENIZER.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    said = [token for token, mask in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True) if mask]
    assert TOKENIZER.convert_ids_to_tokens(said) == ["\n", " ", "2", " ", END, END]


def test_an_unknown_role_is_refused_by_the_template() -> None:
    with pytest.raises(Exception, match="not tool"):
        TOKENIZER.apply_chat_template([{"role": "tool", "content": "4"}], tokenize=False)


@pytest.mark.parametrize(("size", "millions"), [("nano", 0.2), ("micro", 0.9), ("mini", 2.8), ("small", 9.5)])
def test_sizes_are_as_promised(size: str, millions: float) -> None:
    model = tiny_model(TOKENIZER, size, seed=0)
    assert model.num_parameters() / 1e6 == pytest.approx(millions, rel=0.06)
    assert model.config.vocab_size % 8 == 0 and model.config.vocab_size >= len(TOKENIZER)
    assert model.config.max_position_embeddings >= 1024
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("size", SIZES)
def test_heads_divide_evenly(size: str) -> None:
    width, _, heads, key_value_heads, _ = SIZES[size]
    assert width % heads == 0 and heads % key_value_heads == 0
    assert (width // heads) % 2 == 0  # rotary positions turn pairs


def test_weights_depend_on_the_seed_alone_and_leave_the_random_stream_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (tiny_model(TOKENIZER, "nano", seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(5)
    later = tiny_model(TOKENIZER, "nano", 3)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]) and torch.equal(weight, later.state_dict()[name])
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)


def test_generation_knows_the_end_and_the_padding() -> None:
    model = tiny_model(TOKENIZER, "nano", 0)
    assert model.generation_config.eos_token_id == TOKENIZER.eos_token_id
    assert model.generation_config.pad_token_id == TOKENIZER.pad_token_id
    assert not model.training


def test_an_unknown_size_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'micro'"):
        tiny_model(TOKENIZER, "mikro", 0)
