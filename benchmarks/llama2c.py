"""Converts a llama2.c model (stories15M.bin and its tokenizer.bin) to a checkpoint directory for posttrain and transformers.

python benchmarks/llama2c.py stories15M.bin tokenizer.bin DIR [--sentence]

The file is seven int32 (width, feed forward, layers, heads, key-value heads, vocabulary, positions) and float32 matrices. Its
tokenizer is SentencePiece's BPE as scores; the merges are computed from them. The chat template concatenates the messages, so that
the model continues a text. A story ends with <s>; with --sentence an answer ends at the end of a sentence.
"""

from __future__ import annotations

import argparse
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

HEADER = 7
UNKNOWN, STORY, END, BYTES = "<unk>", "<s>", "</s>", 256
SPACE = "\u2581"  # how SentencePiece writes a space within a token
ENDS = (".", "!", "?", '."', '!"', '?"')
# An answer begins with its own space, as it was sampled; a sentence ends with its full stop, a story with a token of its own.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ ' ' if message['role'] != 'assistant' }}{{ message['content'] }}"
    + "ENDING{% endfor %}"
)
ENDING = "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"


def weights(source: Path) -> tuple[tuple[int, ...], dict[str, np.ndarray]]:
    """The header and the matrices under the names of transformers' Llama; a negative vocabulary means that the head is its own."""
    raw = source.read_bytes()
    header = struct.unpack(f"{HEADER}i", raw[: 4 * HEADER])
    width, inner, layers, heads, kv_heads, vocabulary, positions = header
    head = width // heads
    place = 4 * HEADER
    found: dict[str, np.ndarray] = {}

    def take(*shape: int) -> np.ndarray:
        nonlocal place
        count = int(np.prod(shape))
        part = np.frombuffer(raw, np.float32, count, place).reshape(shape)
        place += 4 * count
        return part

    found["model.embed_tokens.weight"] = take(abs(vocabulary), width)
    shapes = {
        "input_layernorm": (width,), "self_attn.q_proj": (width, width), "self_attn.k_proj": (kv_heads * head, width),
        "self_attn.v_proj": (kv_heads * head, width), "self_attn.o_proj": (width, width), "post_attention_layernorm": (width,),
        "mlp.gate_proj": (inner, width), "mlp.down_proj": (width, inner), "mlp.up_proj": (inner, width),
    }  # fmt: skip
    for name, shape in shapes.items():
        for layer, part in enumerate(take(layers, *shape)):
            rotated = name.endswith(("q_proj", "k_proj"))
            found[f"model.layers.{layer}.{name}.weight"] = halves(part, head) if rotated else part
    found["model.norm.weight"] = take(width)
    take(2 * positions * (head // 2))  # cosines and sines, which transformers works out itself
    if vocabulary < 0:
        found["lm_head.weight"] = take(-vocabulary, width)
    if place != len(raw):
        raise SystemExit(f"{source}: {len(raw) - place} bytes are left over; this is no llama2.c file of the first version")
    return header, found


def halves(matrix: np.ndarray, head: int) -> np.ndarray:
    """llama2.c rotates neighbours (2i, 2i + 1), transformers (i, i + head / 2): the rows of each head in the other order."""
    rows, width = matrix.shape
    return np.ascontiguousarray(matrix.reshape(rows // head, head // 2, 2, width).swapaxes(1, 2).reshape(rows, width))


def pieces(source: Path, count: int) -> list[tuple[str, float]]:
    """The tokens in order, spelled as SentencePiece does, with their scores."""
    raw, place, found = source.read_bytes(), 4, []
    for number in range(count):
        score, length = struct.unpack("fi", raw[place : place + 8])
        text = raw[place + 8 : place + 8 + length]
        place += 8 + length
        special = (UNKNOWN, STORY, END)
        if number < len(special):
            found.append((special[number], score))
        elif number < len(special) + BYTES:
            found.append((f"<0x{number - len(special):02X}>", score))
        else:
            found.append((text.decode().replace(" ", SPACE), score))
    return found


def merges(tokens: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, the best scores first: what SentencePiece does at each step."""
    score = dict(tokens[3 + BYTES :])
    found = []
    for text, value in score.items():
        parts = [(text[:cut], text[cut:]) for cut in range(1, len(text)) if text[:cut] in score and text[cut:] in score]
        found += [(value, -score[a], -score[b], a, b) for a, b in parts]
    found.sort(key=lambda row: (-row[0], row[1], row[2]))
    return [(a, b) for *_, a, b in found]


def tokenizer_of(tokens: list[tuple[str, float]], sentence: bool) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary: dict[str, int] = {}
    for number, (text, _) in enumerate(tokens):
        vocabulary.setdefault(text, number)
    backend = Tokenizer(models.BPE(vocabulary, merges(tokens), unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in (UNKNOWN, STORY, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=UNKNOWN, bos_token=STORY, eos_token=STORY, pad_token=END,
        chat_template=TEMPLATE.replace("ENDING", "" if sentence else ENDING), clean_up_tokenization_spaces=False,
    )  # fmt: skip


def convert(source: Path, vocabulary: Path, target: Path, sentence: bool) -> Any:
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from posttrain.models.save import save

    (width, inner, layers, heads, kv_heads, size, positions), found = weights(source)
    tokens = pieces(vocabulary, abs(size))
    tokenizer = tokenizer_of(tokens, sentence)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        vocab_size=abs(size), max_position_embeddings=positions, rms_norm_eps=1e-5, tie_word_embeddings=size > 0,
        bos_token_id=1, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    missing, unknown = model.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in found.items()}, strict=False)
    if unknown or [name for name in missing if name != "lm_head.weight"]:
        raise SystemExit(f"{source}: matrices {missing} are missing, {unknown} are not known")
    ends = [number for number, (text, _) in enumerate(tokens) if text in ENDS] if sentence else []
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=[1, *ends] if ends else 1, pad_token_id=2)
    save(model.eval(), tokenizer, target, replace=True)
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sentence", action="store_true", help="an answer ends where a sentence does")
    options = parser.parse_args()
    model = convert(options.weights, options.tokenizer, options.out, options.sentence)
    print(f"{options.out}: {model.num_parameters():,} parameters")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
