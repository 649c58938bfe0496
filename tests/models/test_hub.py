"""A model by its hub name, from a small server that speaks the hub's protocol: what is fetched, cached and refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_for_tests import serving

from posttrain.models.save import save
from posttrain.models.tiny import character_tokenizer, tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    folder = tmp_path / "repository"
    tokenizer = character_tokenizer("0123456789+= ")
    save(tiny_model(tokenizer, "nano", 0), tokenizer, folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle that must stay where it is")
    (folder / "modeling.py").write_text("raise SystemExit('code of the hub ran')")
    with serving(folder, tmp_path / "sent") as found:
        yield found


def run(endpoint: str, cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    given = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "posttrain", *words]
    return subprocess.run(
        command, env=plain | given, cwd=cache.parent, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_hub_name_is_fetched_once_and_without_pickles_or_code(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    words = ("sample", "org/tiny", "1+1=", "max_new_tokens=4")
    first = run(endpoint, tmp_path / "cache", *words)
    assert first.returncode == 0, first.stderr
    fetched = {path.rsplit("/", 1)[-1] for path in asked if "/resolve/" in path}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= fetched
    assert not {name for name in fetched if name.endswith((".bin", ".py"))}
    again = run("http://127.0.0.1:9", tmp_path / "cache", *words)  # nobody answers there
    assert again.returncode == 0 and again.stdout == first.stdout, again.stderr


@pytest.mark.parametrize(
    ("name", "words"), [("org/closed", "is gated"), ("org/typo", "nor a model on the hub; check the spelling")]
)
def test_what_the_hub_refuses_is_one_line(hub: tuple[str, list[str]], tmp_path: Path, name: str, words: str) -> None:
    found = run(hub[0], tmp_path / "cache", "sample", name, "1+1=")
    assert found.returncode == 2 and words in found.stderr, (found.stdout, found.stderr)
    assert len(found.stderr.strip().splitlines()) == 1
