"""docs/reference, the index of papers and the settings of verl and OpenRLHF are what their generator makes now, and name what exists;
every page of docs/ is in the navigation of the site."""

from __future__ import annotations

import html
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from runs_for_tests import make_run
from scripts_for_tests import load_script

from posttrain import catalogue
from posttrain.commands.keys import Key, Source, keys_of
from posttrain.runs.read import Run

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAPER = re.compile(r"arXiv:\d{4}\.\d{4,5}")


@pytest.fixture(scope="module")
def make() -> ModuleType:
    return load_script("docs/make_reference.py")


@pytest.fixture(scope="module")
def pages(make: ModuleType) -> dict[str, str]:
    return make.pages()


def test_the_pages_are_generated(pages: dict[str, str]) -> None:
    stale = [place for place, text in pages.items() if (DOCS / place).read_text().rstrip("\n") != text.rstrip("\n")]
    assert stale == [], "run make docs"
    assert {f"reference/{path.name}" for path in (DOCS / "reference").glob("*.md")} <= set(pages)


def test_every_key_has_a_row_with_a_type_and_a_meaning(pages: dict[str, str]) -> None:
    for place, text in pages.items():
        rows = re.findall(r"^\| `([\w.]+)` \|(.*)\|$", text, re.MULTILINE) if place.startswith("reference/") else []
        cells = {name: re.split(r"(?<!\\)\|", rest) for name, rest in rows}
        assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in cells.values()), place
    for kind in ("stage", "algorithm", "task", "reward", "recipe"):
        text = pages[f"reference/{catalogue.KINDS[kind]}.md"]
        sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
        assert list(sections) == catalogue.names(kind)
        missing = [
            f"{name}.{key.name}"
            for name in sections
            for key in keys_of(kind, name)
            if f"\n| `{key.name}` |" not in sections[name]
        ]
        assert missing == []


def paths(keys: list[Key] | tuple[Key, ...], prefix: str) -> set[str]:
    return {one for key in keys for one in ({prefix + key.name} | paths(key.keys, f"{prefix}{key.name}."))}


def test_what_settings_of_verl_and_openrlhf_are_called_here_exists(make: ModuleType) -> None:
    known = paths(keys_of("stage", "rl"), "") | {""}
    for name in catalogue.names("algorithm"):
        known |= paths(keys_of("algorithm", name), "algorithm.")
    known |= paths(list(Source.of(ROOT / "posttrain" / "config.py").keys("Settings").values()), "run.")
    assert [row for row in make.tables()["peers"] if row[1] not in known] == []


def test_the_index_has_every_paper_of_the_package_and_each_is_in_its_file(make: ModuleType, pages: dict[str, str]) -> None:
    named = {paper for path in (ROOT / "posttrain").rglob("*.py") for paper in PAPER.findall(path.read_text())}
    assert named - set(PAPER.findall(pages["papers.md"])) == set()
    recipes = {path: path.read_text() for path in (DOCS / "recipes").glob("*.md")}
    for _, paper, _, file, _ in make.tables()["papers"]:
        texts = [(ROOT / file).read_text(), *(text for text in recipes.values() if file in text)]
        assert any(paper in text for text in texts), f"{file} does not name {paper}"


def test_every_page_is_in_the_navigation_once_and_folders_are_listed_as_they_are(tmp_path: Path) -> None:
    """What `make docs-site` refuses is found here without building the site."""
    site = load_script("docs/site.py", "docs_site")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = [place for place in site.places(site.expanded(config["nav"], DOCS)) if (DOCS / place).exists()]
    pages = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    assert sorted(listed) == pages, "list a new page under nav of mkdocs.yml"
    (tmp_path / "guides").mkdir()
    for name in ("chat", "index"):
        (tmp_path / "guides" / f"{name}.md").touch()
    nav = [{"Guides": "guides/*"}, {"Concepts": "concepts/*"}, {"FAQ": "faq.md?"}]
    assert site.expanded(nav, tmp_path) == [{"Guides": ["guides/index.md", "guides/chat.md"]}]


def test_links_that_leave_the_docs_lead_to_pages_of_the_site() -> None:
    site = load_script("docs/site.py", "docs_site")
    text = "[a](../posttrain/loop.py), [b](mdp.md#x) and ![c](docs/mdp.md) [d](https://x.y/z)"
    assert site.relinked(text, "docs/laws.md") == (
        "[a](source/posttrain/loop.py.md), [b](mdp.md#x) and ![c](docs/mdp.md) [d](https://x.y/z)"
    )
    assert (
        site.relinked("[x](docs/mdp.md#y) [z](examples/README.md)", "README.md")
        == "[x](mdp.md#y) [z](source/examples/README.md)"
    )
    assert site.relinked("[x](../../SECURITY.md)", "docs/reference/a.md") == "[x](../source/SECURITY.md)"


def test_the_picture_of_the_console_shows_a_step_and_both_scores_of_a_run(tmp_path: Path) -> None:
    run = Run(make_run(tmp_path / "quickstart"))
    svg = html.unescape(load_script("docs/make_console.py").drawn(run)).replace("\xa0", " ")
    for part in ("posttrain run quickstart", "24/40", "reward", "answer right", "before", "after"):
        assert part in svg, part
    drawn = (DOCS / "console.svg").read_text()
    assert re.match(r"<svg .* width=", drawn) and "url(http" not in drawn.replace('"', "")
