"""The examples in the documentation are executed as they stand; what it points to is there; every recipe has its page."""

from __future__ import annotations

import doctest
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*DOCS, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
RECIPES = [path.stem for path in sorted((ROOT / "posttrain" / "recipes").glob("[a-z]*.py")) if path.stem != "base"]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)#\s]+)[^)]*\)")
FILE = re.compile(
    r"`((?:posttrain/)?(?:algorithms|stages|tasks|rewards|ops|evals|data|engine|train|runs|recipes)/[a-z0-9_/]+\.py)`"
)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_examples_are_true(path: Path) -> None:
    failed, _ = doctest.testfile(str(path), module_relative=False)
    assert failed == 0


def test_there_are_examples() -> None:
    assert doctest.testfile(str(next(p for p in DOCS if p.name == "mdp.md")), module_relative=False).attempted > 10


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_what_a_page_points_to_is_there(path: Path) -> None:
    text = path.read_text()
    links = [link for link in LINK.findall(text) if "://" not in link]
    named = [ROOT / n if n.startswith("posttrain/") else ROOT / "posttrain" / n for n in FILE.findall(text)]
    missing = [link for link in links if not (path.parent / link).exists()]
    missing += [str(name.relative_to(ROOT)) for name in named if not name.exists()]
    assert missing == []


def slugs(path: Path) -> set[str]:
    """The names of a page's headings, as links have them."""
    headings = re.findall(r"^#+ +(.*?)\s*$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_link_to_a_heading_names_one_that_is_there() -> None:
    found = [(path, *link) for path in PAGES for link in re.findall(r"\]\(([^)#\s:]*\.md)?#([^)\s]+)\)", path.read_text())]
    missing = [
        f"{path.name}: {place}#{name}"
        for path, place, name in found
        if name not in slugs((path.parent / place) if place else path)
    ]
    assert len(found) > 20 and missing == []


def test_what_the_hosting_site_reads_is_what_the_project_says() -> None:
    """CITATION.cff and the workflow follow pyproject.toml and .ci/run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    test = workflow["jobs"]["test"]
    named = {c.rpartition(" :: ")[2] for c in project["classifiers"] if "Python :: 3." in c}
    assert set(test["strategy"]["matrix"]["python"]) == named
    assert [step["run"] for step in test["steps"] if "run" in step] == [".ci/run"]
    assert workflow["permissions"] == {"contents": "read"}
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"):
        assert {"name", "description", "body"} == set(yaml.safe_load(form.read_text()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_page(recipe: str) -> None:
    pages = [path for path in (ROOT / "docs" / "recipes").glob("*.md") if f"posttrain run {recipe}" in path.read_text()]
    assert pages, f"docs/recipes has no page on {recipe}"
    assert any(f"posttrain/recipes/{recipe}.py" in path.read_text() and LINK.search(path.read_text()) for path in pages)
