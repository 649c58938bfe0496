"""What a page tells a user to type is read by the command line, every file of a guide is planned, and links to headings lead to one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from scripts_for_tests import load_script

from posttrain import catalogue, cli, config
from posttrain.commands import plan
from posttrain.errors import UserError

DOCS = Path(__file__).parent.parent / "docs"
GUIDES = sorted((DOCS / "guides").glob("*.md"))
PAGES = [*GUIDES, *(DOCS / name for name in ("faq.md", "coverage.md")), *sorted((DOCS / "concepts").glob("*.md"))]
FILE = re.compile(r"```yaml\n# (\w+\.yaml)[^\n]*\n(.*?)```", re.DOTALL)
TYPED = "|".join(path.stem for path in Path(cli.__file__).parent.glob("[a-z]*.py") if path.stem != "base")
COMMAND = re.compile(rf"(?:^(?: {{4}})?|`)(?:env/bin/)?(posttrain (?:{TYPED}) [^`\n#;&|]+)", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s:]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FILES = {name: body for path in PAGES for name, body in FILE.findall(path.read_text())}
READ = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
COMMANDS = {
    line.strip().replace("=N", "=0"): path.name
    for path in READ
    for line in COMMAND.findall(path.read_text())
    if "--help" not in line
}


def recipes_of(commands: Iterable[str]) -> list[str]:
    """The commands that plan or run a recipe, once."""
    words = {line: line.split() for line in commands}
    known = catalogue.names("recipe")
    several = re.compile("--sweep|seeds=")
    return [line for line, w in words.items() if w[1] in ("plan", "run") and w[2] in known and not several.search(line)]


PLANNED = recipes_of({line.strip() for path in PAGES for line in COMMAND.findall(path.read_text())})


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the model and the files that the pages name."""
    folder, made = tmp_path_factory.mktemp("guides"), load_script("benchmarks/docs_settings.py")
    made.make_files(folder)
    made.make_models(folder)
    for name, body in FILES.items():
        (folder / name).write_text(body)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.mark.parametrize("name", sorted(FILES))
def test_every_file_of_a_guide_is_planned(name: str) -> None:
    lines = plan.describe(config.parse(name, []))
    assert lines[0].startswith("recipe ") and len(lines) > 3


def test_every_command_is_read_with_all_its_keys() -> None:
    wrong, recipes = [], set(recipes_of(COMMANDS))
    for line, page in COMMANDS.items():
        words = shlex.split(line)[1:]
        try:
            assert cli.parse(words).command == words[0]
            if line in recipes:
                recipe, *settings = [word for word in words[1:] if not word.startswith("--")]
                config.parse(recipe, settings)
        except UserError as error:
            wrong.append(f"{page}: {line}: {error}")
    assert wrong == [] and len(COMMANDS) > 200 and len(recipes) > 80


@pytest.mark.slow
@pytest.mark.parametrize("line", PLANNED)
def test_every_recipe_of_a_guide_is_planned(line: str) -> None:
    recipe, *settings = [word for word in shlex.split(line)[2:] if not word.startswith("--")]
    assert plan.describe(config.parse(recipe, settings))


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_a_guide_is_short_and_has_commands(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 80 and COMMAND.search(text)


@cache
def anchors(path: Path) -> set[str]:
    """Of the headings of a page, as GitHub and mkdocs name them."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in HEADING.findall(text)}


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: str(path.relative_to(DOCS)))
def test_every_link_to_a_heading_leads_to_one(path: Path) -> None:
    links = [(path.parent / page if page else path, heading) for page, heading in LINK.findall(path.read_text())]
    assert [(str(page), heading) for page, heading in links if heading not in anchors(page)] == []
