"""llama2.c files as checkpoints: the converted network against a NumPy one that reads the file's own layout, and its tokenizer."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from scripts_for_tests import load_script

from posttrain.data.chat import render_example, render_prompt
from posttrain.models.load import load
from posttrain.types import Message

ROOT = Path(__file__).parent.parent.parent
WIDTH, INNER, LAYERS, HEADS, KV_HEADS, POSITIONS = 16, 24, 2, 4, 2, 32
HEAD = WIDTH // HEADS
WORDS = [" ", "a", "b", "c", ".", "!", "ab", " a", " ab", "bc"]  # in the order of their scores: the best merges first
SIZE = 3 + 256 + len(WORDS)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/llama2c.py")


def write(folder: Path, own_head: bool) -> dict[str, np.ndarray]:
    """A random model in the file's layout, and its matrices."""
    random = np.random.default_rng(0)
    kv = KV_HEADS * HEAD
    shapes = {
        "embed": (SIZE, WIDTH), "norm1": (LAYERS, WIDTH), "q": (LAYERS, WIDTH, WIDTH), "k": (LAYERS, kv, WIDTH),
        "v": (LAYERS, kv, WIDTH), "o": (LAYERS, WIDTH, WIDTH), "norm2": (LAYERS, WIDTH), "w1": (LAYERS, INNER, WIDTH),
        "w2": (LAYERS, WIDTH, INNER), "w3": (LAYERS, INNER, WIDTH), "norm": (WIDTH,), "turns": (POSITIONS * HEAD,),
    }  # fmt: skip
    shapes |= {"head": (SIZE, WIDTH)} if own_head else {}
    made = {name: random.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}
    header = struct.pack("7i", WIDTH, INNER, LAYERS, HEADS, KV_HEADS, -SIZE if own_head else SIZE, POSITIONS)
    (folder / "m.bin").write_bytes(header + b"".join(matrix.tobytes() for matrix in made.values()))
    spelled = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(bytes([n]) for n in range(256)), *(word.encode() for word in WORDS)]
    rows = [struct.pack("fi", -max(0.0, n - 259), len(text)) + text for n, text in enumerate(spelled)]
    (folder / "t.bin").write_bytes(struct.pack("i", 8) + b"".join(rows))
    return made


def logits(made: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """The network as llama2.c runs it, in float64: neighbours 2i and 2i + 1 of a head turn by position / 10000^(2i / head)."""
    w = {name: matrix.astype(np.float64) for name, matrix in made.items()}

    def normed(x_TD: np.ndarray, weight_D: np.ndarray) -> np.ndarray:
        return x_TD / np.sqrt((x_TD**2).mean(-1, keepdims=True) + 1e-5) * weight_D

    def turned(x_THE: np.ndarray) -> np.ndarray:
        angle_TE = np.arange(len(ids))[:, None] / 10000 ** (np.arange(0, HEAD, 2) / HEAD)
        cos, sin, even, odd = np.cos(angle_TE)[:, None], np.sin(angle_TE)[:, None], x_THE[..., ::2], x_THE[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x_THE.shape)

    x_TD = w["embed"][ids]
    for n in range(LAYERS):
        h_TD = normed(x_TD, w["norm1"][n])
        q, k, v = ((h_TD @ w[name][n].T).reshape(len(ids), -1, HEAD) for name in "qkv")
        q, k, v = turned(q), turned(k).repeat(HEADS // KV_HEADS, 1), v.repeat(HEADS // KV_HEADS, 1)
        score_HTT = np.einsum("the,she->hts", q, k) / math.sqrt(HEAD)
        score_HTT = np.where(np.tri(len(ids), dtype=bool), score_HTT, -np.inf)
        weight_HTT = np.exp(score_HTT - score_HTT.max(-1, keepdims=True))
        weight_HTT /= weight_HTT.sum(-1, keepdims=True)
        x_TD = x_TD + np.einsum("hts,she->the", weight_HTT, v).reshape(len(ids), WIDTH) @ w["o"][n].T
        h_TD = normed(x_TD, w["norm2"][n])
        gate = h_TD @ w["w1"][n].T
        x_TD = x_TD + (gate / (1 + np.exp(-gate)) * (h_TD @ w["w3"][n].T)) @ w["w2"][n].T
    return normed(x_TD, w["norm"]) @ w.get("head", w["embed"]).T


@pytest.mark.parametrize("own_head", [False, True])
def test_the_network_is_the_files_own(script: ModuleType, tmp_path: Path, own_head: bool) -> None:
    made, ids = write(tmp_path, own_head), [1, 260, 265, 262, 264, 3, 268]
    script.convert(tmp_path / "m.bin", tmp_path / "t.bin", tmp_path / "out", False)
    loaded = load(str(tmp_path / "out"))
    with torch.no_grad():
        found = loaded.model(torch.tensor([ids])).logits[0].double().numpy()
    assert np.abs(found - logits(made, ids)).max() < 1e-4
    assert loaded.model.config.tie_word_embeddings is not own_head and loaded.stop_ids == (1,)


def test_the_tokenizer_merges_the_best_scores_first(script: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, False)
    script.convert(tmp_path / "m.bin", tmp_path / "t.bin", tmp_path / "out", True)
    loaded = load(str(tmp_path / "out"))
    names = {word: 259 + n for n, word in enumerate(WORDS)}
    ids = render_prompt(loaded.tokenizer, [Message("user", "abc.")])
    assert ids == (1, names[" ab"], names["c"], names["."])  # <s>, the space before a word; "ab" is better than "bc"
    assert set(loaded.stop_ids) == {1, names["."], names["!"]}  # an answer is a sentence
    assert loaded.tokenizer.decode([names[" ab"], names["c"], 3 + 0x21]) == " abc!"
    both = render_example(loaded.tokenizer, [Message("user", "abc."), Message("assistant", " ab!")])
    assert both.ids.tolist() == [*ids, names[" ab"], names["!"]] and both.mask.tolist() == [False] * 4 + [True] * 2


def test_a_file_of_another_layout_is_refused(script: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, False)
    with (tmp_path / "m.bin").open("ab") as file:
        file.write(b"1234")
    with pytest.raises(SystemExit, match="4 bytes are left over"):
        script.weights(tmp_path / "m.bin")
