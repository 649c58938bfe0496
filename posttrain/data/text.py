"""Decodes token ids to text, with the position in the text where each token's characters end."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

Tokenizer = Any  # a transformers tokenizer; its classes carry no types
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACEMENT = "\ufffd"
AROUND = 12  # tokens before and after one that is shown


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's mapping of printable characters to bytes, which byte-level vocabularies use."""
    spans = (("!", "~"), ("¡", "¬"), ("®", "ÿ"))
    plain = [byte for first, last in spans for byte in range(ord(first), ord(last) + 1)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(rest)}


BYTE_ALPHABET = _byte_alphabet()


# Steps of decoders that join what their tokens say: bytes, or characters where every token is made of whole ones
JOIN_BYTES = (["ByteLevel"], ["ByteFallback", "Fuse", "Replace", "ByteLevel"])
_SPACED = ["Replace", "ByteFallback", "Fuse"]  # SentencePiece's
JOIN_CHARACTERS = (*JOIN_BYTES, ["Fuse"], _SPACED, [*_SPACED, "Strip"])
EXACT: dict[str, dict[str, object]] = {
    "Replace": {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    "Strip": {"type": "Strip", "content": " ", "start": 1, "stop": 0},  # a text's first space
}


def _decoder_steps(tokenizer: Tokenizer) -> list[str]:
    """The steps of a tokenizer's decoder; none if one of them, or a clean-up after them, depends on more than one token."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return []
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        # transformers skips the clean-up of BPE, unless it is told to
        forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        if type(backend.model).__name__ != "BPE" or getattr(tokenizer, forced, False):
            return []
    described = json.loads(backend.decoder.__getstate__())
    steps = described.get("decoders", [described])
    known = all(EXACT.get(step["type"], step) == step for step in steps)
    return [step["type"] for step in steps] if known else []


def _joins_bytes(tokenizer: Tokenizer, steps: list[str]) -> bool:
    """Whether every text is the concatenation of its tokens' bytes by construction: it is byte-level, and no token is one that a step
    before the last would change."""
    if steps not in JOIN_BYTES or len(steps) == 1:
        return steps in JOIN_BYTES
    backend = tokenizer.backend_tokenizer
    spelled = any(backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    return not spelled and not any("▁" in str(t) for t in tokenizer.added_tokens_decoder.values())


def unknown_tokens(tokenizer: Tokenizer, texts: Iterable[Sequence[int] | np.ndarray]) -> list[str]:
    """A line about text that the vocabulary lacks. A token that also begins, ends or pads a text is no evidence of that."""
    lost, others = tokenizer.unk_token_id, ("bos_token_id", "eos_token_id", "pad_token_id")
    if lost is None or lost in (getattr(tokenizer, name) for name in others):
        return []
    found = [(ids, np.flatnonzero(np.asarray(ids) == lost)) for ids in texts]
    found = [(ids, places) for ids, places in found if len(places)]
    if not found:
        return []
    ids, place = found[0][0], int(found[0][1][0])
    count = sum(len(places) for _, places in found)
    shown = tokenizer.decode(ids[max(place - AROUND, 0) : place + AROUND])
    hint = f"the model reads each as {tokenizer.unk_token}; take a model whose tokenizer has them"
    many = f"{count:,} characters or words in {len(found):,} texts are not in the vocabulary"
    return [f"{many}, first in {shown!r}: {hint}"]


class Decoder:
    """Decodes with offsets. The bytes of each id are looked up once. Where the tokenizer's decoder joins its tokens, the text is their
    concatenation; else the tokenizer decodes the text, and the offsets, too, if the bytes do not add up to it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        # of ids whose bytes are whole characters: their texts, and how many characters they have (-1: of the others)
        self._complete: dict[int, str] = {}
        self._length_V = np.full(len(tokenizer), -1, np.int64)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = set(tokenizer.all_special_ids) | {i for i in added if added[i].special}
        steps = _decoder_steps(tokenizer)
        self._joins = _joins_bytes(tokenizer, steps)
        self._joins_characters = self._joins or steps in JOIN_CHARACTERS
        self._strips = "Strip" in steps
        self._anchor = self._find_anchor()

    def decode(self, ids: Sequence[int] | np.ndarray) -> tuple[str, np.ndarray]:
        """The text without control tokens and, for each token, the number of characters that are complete after it.

        The last offset is always the length of the text, and offsets never fall. A token that ends inside a character (part of
        an emoji) completes none; the character counts at the token that finishes it.
        """
        array = np.asarray(ids, dtype=np.int64)
        if self._joins_characters and array.size and array.max() < len(self._length_V):
            length_T = self._length_V[array]
            if length_T.min() < 0:
                for rare in set(array[length_T < 0].tolist()):
                    self._bytes_of(rare)
                length_T = self._length_V[array]
            if length_T.min() >= 0:
                text = "".join(map(self._complete.__getitem__, array.tolist()))
                end_T = length_T.cumsum()
                if self._strips and text.startswith(" "):
                    text, end_T = text[1:], np.maximum(end_T - 1, 0)
                return text, end_T
        listed = array.tolist()
        pieces = self._pieces(listed)
        joined = "".join(pieces)
        text = joined if self._joins else self._text(listed)
        # tokenizers that write words with a leading space drop the first one
        if joined == " " + text:
            first = next(n for n, piece in enumerate(pieces) if piece)
            pieces[first], joined = pieces[first][1:], text
        if joined == text:
            return text, np.fromiter(map(len, pieces), np.int64, len(pieces)).cumsum()
        return text, self._slow_offsets(listed, text)

    def _text(self, ids: list[int]) -> str:
        # as an array: of a list, transformers asks for the type of every number
        return str(self.tokenizer.decode(np.array(ids, np.int64), skip_special_tokens=True))

    def _find_anchor(self) -> list[int]:
        """A token with text of its own, to put before another: many tokenizers drop the leading space of the first token."""
        for i in range(min(len(self.tokenizer), 1000)):
            text = "" if i in self._special else self._text([i])
            if text.strip() and REPLACEMENT not in text:
                return [i]
        return []

    def _pieces(self, ids: list[int]) -> list[str]:
        """The characters that each token completes: its own if all tokens are whole characters, else by an incremental UTF-8
        decoder over the tokens' bytes."""
        with suppress(KeyError):  # of a token that is new, or a part of a character
            return list(map(self._complete.__getitem__, ids))
        stream = codecs.getincrementaldecoder("utf-8")("replace")
        last = len(ids) - 1
        return [stream.decode(self._bytes_of(i), n == last) for n, i in enumerate(ids)]

    def _bytes_of(self, i: int) -> bytes:
        known = self._bytes.get(i)
        if known is None:
            known = self._bytes[i] = b"" if i in self._special else self._find_bytes(i)
            with suppress(UnicodeDecodeError):
                self._complete[i] = known.decode()
                if i < len(self._length_V):
                    self._length_V[i] = len(self._complete[i])
        return known

    def _find_bytes(self, i: int) -> bytes:
        # none beyond the vocabulary: a model may have more rows
        token = str(self.tokenizer.convert_ids_to_tokens(i) or "")
        if self._joins:  # bytes, or the text of a token that was added
            known = [BYTE_ALPHABET.get(character, -1) for character in token]
            return bytes(known) if min(known, default=0) >= 0 else token.encode()
        piece = self._text([*self._anchor, i])[len(self._text(self._anchor)) :]
        if REPLACEMENT not in piece:
            return piece.encode()
        if found := BYTE_TOKEN.fullmatch(token):
            return bytes([int(found[1], 16)])
        if all(character in BYTE_ALPHABET for character in token):
            return bytes(BYTE_ALPHABET[character] for character in token)
        return piece.encode()

    def _slow_offsets(self, ids: list[int], text: str) -> np.ndarray:
        """Offsets for any tokenizer: a token ends where the text decoded so far agrees with the whole. Quadratic in the length."""
        offsets = np.zeros(len(ids), dtype=np.int64)
        reached = 0
        for t in range(len(ids)):
            # replacement marks at the end may yet become a character
            prefix = self._text(ids[: t + 1]).rstrip(REPLACEMENT)
            while text[reached : reached + 1] == prefix[reached : reached + 1] != "":
                reached += 1
            offsets[t] = reached
        offsets[-1:] = len(text)
        return offsets
