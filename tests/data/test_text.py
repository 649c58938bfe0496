"""Offsets: each token's characters, for tokenizers of every family and for ids that spell no valid text."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers_for_tests import byte_level, byte_level_of_gguf, characters, word_marks

from posttrain.data.text import Decoder, unknown_tokens
from posttrain.models.tiny import character_tokenizer

TOKENIZERS = {
    "byte_level": byte_level(),
    "byte_level_of_gguf": byte_level_of_gguf(),
    "word_marks": word_marks(),
    "word_marks_with_first_space": word_marks(drops_space=False),
    "characters": characters(),
}
DECODERS = {kind: Decoder(tokenizer) for kind, tokenizer in TOKENIZERS.items()}
KINDS = sorted(DECODERS)


def by_definition(tokenizer: Any, ids: list[int], text: str) -> list[int]:
    """How many characters of `text` are there after each token, when a character counts once none of its bytes is missing."""
    offsets: list[int] = []
    for t in range(1, len(ids) + 1):
        prefix = tokenizer.decode(ids[:t], skip_special_tokens=True).rstrip("\ufffd")
        assert text.startswith(prefix)
        offsets.append(max([len(prefix), *offsets]))  # a wrong byte can spoil what was there before it
    return offsets


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "characters"])
@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd▁"), max_size=12))
def test_offsets_of_any_text_are_what_they_mean(kind: str, text: str) -> None:
    decoder = DECODERS[kind]
    ids = decoder.tokenizer(text, add_special_tokens=False)["input_ids"]
    decoded, offsets = decoder.decode(ids)
    if kind.startswith("byte_level"):
        assert decoded == text
    assert offsets.tolist() == by_definition(decoder.tokenizer, ids, decoded)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_at_all(kind: str, data: st.DataObject) -> None:
    """Those without a token, too, which the padded rows of a vocabulary have: they have no text."""
    decoder = DECODERS[kind]
    ids = data.draw(st.lists(st.integers(0, len(decoder.tokenizer) + 40), max_size=25))
    text, offsets = decoder.decode(np.array(ids, dtype=np.int64))
    assert text == decoder.tokenizer.decode(ids, skip_special_tokens=True)
    assert len(offsets) == len(ids)
    assert offsets.dtype == np.int64
    assert all(a <= b for a, b in zip([0, *offsets], offsets, strict=False))
    assert not ids or offsets[-1] == len(text)


def test_an_emoji_counts_at_the_token_that_finishes_it() -> None:
    decoder = DECODERS["byte_level"]
    rare = "a𓂀b"  # four bytes, never merged
    ids = decoder.tokenizer(rare, add_special_tokens=False)["input_ids"]
    text, offsets = decoder.decode(ids)
    assert (text, offsets.tolist()) == (rare, [1, 1, 1, 1, 2, 3])


def test_control_tokens_have_no_characters() -> None:
    decoder = DECODERS["characters"]
    end = decoder.tokenizer.eos_token_id
    ids = decoder.tokenizer("12", add_special_tokens=False)["input_ids"]
    text, offsets = decoder.decode([*ids, end, *ids, end])
    assert (text, offsets.tolist()) == ("1212", [1, 2, 2, 3, 4, 4])


def test_bytes_of_a_byte_level_token_are_read_off_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """As decoding would find them, of every token: also those that are added, of which special ones have none, and ids beyond."""
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.add_tokens(["<idea>", "naïve→"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|pad|>"]})
    decoder, slow = Decoder(tokenizer), Decoder(tokenizer)
    slow._joins = False
    expected = [slow._bytes_of(i) for i in range(len(tokenizer) + 9)]
    monkeypatch.setattr(Decoder, "_text", None)
    assert [decoder._bytes_of(i) for i in range(len(tokenizer) + 9)] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_whole_characters_are_not_decoded_by_the_tokenizer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its tokens are known, a text is a concatenation: decoding it takes longer than to write it."""
    tokenizer = TOKENIZERS[kind]
    decoder, ids = Decoder(tokenizer), tokenizer("12+34=46, 12", add_special_tokens=False)["input_ids"]
    expected = decoder.decode(ids)[0]
    assert expected == tokenizer.decode(ids, skip_special_tokens=True)
    monkeypatch.setattr(Decoder, "_text", None)
    assert decoder.decode(ids)[0] == expected


def other_replacement(tokenizer: Any) -> None:
    steps = [decoders.Replace("▁", "_"), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)


def strips_three(tokenizer: Any) -> None:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 3, 0)]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)


def spaces_between_words(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()


def cleans_up(tokenizer: Any) -> None:
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True


@pytest.mark.parametrize("change", [other_replacement, strips_three, spaces_between_words, cleans_up])
def test_a_decoder_that_does_more_than_join_is_asked(change: Any) -> None:
    tokenizer = copy.deepcopy(TOKENIZERS["word_marks"])
    change(tokenizer)
    decoder, ids = Decoder(tokenizer), tokenizer.convert_tokens_to_ids(["▁", "▁", "a", "▁", ",", "▁h", "▁", "▁", "b"])
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert [decoder.decode(ids)[0] for _ in range(2)] == [expected] * 2
    assert expected != DECODERS["word_marks"].decode(ids)[0]


@pytest.mark.parametrize("token", ["<0x41>", "a▁b"])
def test_byte_level_tokens_that_earlier_steps_change_are_decoded(token: str) -> None:
    tokenizer = byte_level_of_gguf()
    tokenizer.add_tokens([token])
    ids = [*tokenizer("12")["input_ids"], len(tokenizer) - 1]
    decoder = Decoder(tokenizer)
    assert [decoder.decode(ids)[0] for _ in range(2)] == [tokenizer.decode(ids, skip_special_tokens=True)] * 2


def test_the_dropped_leading_space_belongs_to_the_first_token() -> None:
    decoder = DECODERS["word_marks"]
    ids = decoder.tokenizer("he had", add_special_tokens=False)["input_ids"]
    assert decoder.tokenizer.convert_ids_to_tokens(ids) == ["▁he", "▁h", "a", "d"]
    text, offsets = decoder.decode(ids)
    assert (text, offsets.tolist()) == ("he had", [2, 4, 5, 6])


@pytest.mark.parametrize("kind", KINDS)
def test_the_slow_way_agrees_on_text(kind: str) -> None:
    decoder = DECODERS[kind]
    for text in ("12+34=46", "1, 2", ""):
        ids = decoder.tokenizer(text, add_special_tokens=False)["input_ids"]
        decoded, offsets = decoder.decode(ids)
        assert decoder._slow_offsets(ids, decoded).tolist() == offsets.tolist()


def test_a_tokenizer_whose_pieces_do_not_add_up_goes_the_slow_way() -> None:
    class Shouting:
        """Decodes with an exclamation mark at the end: no sum of pieces gives that."""

        all_special_ids: tuple[int, ...] = ()

        def __len__(self) -> int:
            return 26

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "".join(chr(97 + i) for i in ids) + "!"

        def convert_ids_to_tokens(self, i: int) -> str:
            return chr(97 + i)

    text, offsets = Decoder(Shouting()).decode([0, 1, 2])
    assert (text, offsets.tolist()) == ("abc!", [1, 2, 4])


def test_characters_outside_of_the_vocabulary_are_counted() -> None:
    tokenizer = character_tokenizer("12")
    texts = (np.array(tokenizer(text)["input_ids"]) for text in ("1ö2ß", "12"))
    examples = [*texts]
    (line,) = unknown_tokens(tokenizer, examples)
    assert line.startswith("2 characters or words in 1 texts are not in the vocabulary, first in '1<|unk|>2<|unk|>'")
    assert unknown_tokens(tokenizer, examples[1:]) == []
    tokenizer.unk_token = tokenizer.eos_token  # as GPT-2's: it ends texts, and says nothing of what is in them
    assert unknown_tokens(tokenizer, examples) == []
