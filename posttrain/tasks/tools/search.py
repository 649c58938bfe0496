"""Search in a collection of texts by BM25 (Robertson and Zaragoza 2009), with the package bm25s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from posttrain.data.records import read_jsonl
from posttrain.errors import Count, optional, require
from posttrain.tasks.tools.base import Tool, ToolError


@dataclass(frozen=True)
class Search(Tool):
    """`file` holds the texts: JSON lines with a text (and optionally a title) each, or plain text split into paragraphs."""

    shorthand: ClassVar[str] = "file"
    blocks: ClassVar[bool] = False

    file: str
    results: Count = 3
    length: Count = 500  # characters of each result

    def ready(self) -> tuple[str, ...]:
        texts, _ = _index(self.file)
        return (*super().ready(), f"search: {len(texts):,} texts of {self.file}")

    def begin(self) -> Callable[..., Any]:
        def search(query: str) -> str:
            """Search a collection of texts, and read the passages that fit best.

            Args:
                query: words to search for
            """
            texts, find = _index(self.file)
            found = find(query, min(self.results, len(texts)))
            if not found:
                raise ToolError("nothing was found; use other words")
            return "\n\n".join(texts[n][: self.length] for n in found)

        return search


@lru_cache(maxsize=8)
def _index(file: str) -> tuple[list[str], Callable[[str, int], list[int]]]:
    """Return the texts of a file, and a function that finds the best of them for a query."""
    bm25s = optional("bm25s", "the search tool needs bm25s: pip install 'posttrain[search]'")
    path = Path(file).expanduser()
    require(path.is_file(), f"search: there is no file {file}")
    texts = _texts(path)
    require(texts, f"search: {file} holds no text")
    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)

    def find(query: str, count: int) -> list[int]:
        words = bm25s.tokenize(query, show_progress=False)
        places, scores = index.retrieve(words, k=count, show_progress=False)
        pairs = zip(places[0].tolist(), scores[0].tolist(), strict=True)
        return [place for place, score in pairs if score > 0]

    return texts, find


def _texts(path: Path) -> list[str]:
    if path.suffix != ".jsonl":
        return [part.strip() for part in path.read_text("utf-8").split("\n\n") if part.strip()]
    found = []
    for where, row in read_jsonl(path):
        text, title = row.get("text", row.get("contents")), row.get("title")
        require(isinstance(text, str), f"{where}: no column text; it has {', '.join(row)[:80]}")
        found.append(f"{title}\n{text}" if isinstance(title, str) else str(text))
    return found
