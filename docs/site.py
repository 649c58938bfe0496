"""What mkdocs asks while `make docs-site` builds the site: the first page is README.md, folders are listed as they are, and a link to a
file outside of docs/ leads to a page with its text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
Navigation = list[Any]


def expanded(nav: Navigation, docs: Path) -> Navigation:
    """The navigation with `folder/*` replaced by the pages of the folder, and without `page.md?` where the page is not there."""
    made: Navigation = []
    for item in nav:
        title, place = next(iter(item.items())) if isinstance(item, dict) else ("", item)
        if isinstance(place, list):
            place = expanded(place, docs)
        elif place.endswith("/*"):
            found = (str(path.relative_to(docs)) for path in docs.glob(f"{place}.md"))
            place = sorted(found, key=lambda page: (not page.endswith("/index.md"), page))
        elif place.endswith("?"):
            place = place[:-1] if (docs / place[:-1]).exists() else ""
        if place:
            made.append({title: place} if title else place)
    return made


def places(nav: Navigation) -> Iterator[str]:
    """The pages of an expanded navigation."""
    for item in nav:
        value = next(iter(item.values())) if isinstance(item, dict) else item
        yield from places(value) if isinstance(value, list) else [value]


def site_place(file: str) -> str:
    """Where a file of the repository is on the site."""
    if file == "README.md":
        return "index.md"
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    return f"source/{file}" if file.endswith(".md") else f"source/{file}.md"


def in_repository(page: str) -> str:
    """The file that a page of the site is made from."""
    if page == "index.md":
        return "README.md"
    return page.removeprefix("source/") if page.startswith("source/") else f"docs/{page}"


def relinked(text: str, file: str) -> str:
    """The text of a file of the repository, with its links as they are on the site."""

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file), found[2]))
        if not (ROOT / target).is_file():
            return found[0]  # mkdocs says what is missing
        return f"{found[1]}{posixpath.relpath(site_place(target), posixpath.dirname(site_place(file)) or '.')}{found[3]}"

    return LINK.sub(link, text)


def outside(text: str, file: str) -> set[str]:
    """The files outside of docs/ that a text links to."""
    targets = {posixpath.normpath(posixpath.join(posixpath.dirname(file), place)) for _, place, _ in LINK.findall(text)}
    return {target for target in targets if not target.startswith(("docs/", "..")) and (ROOT / target).is_file()}


def as_page(file: str) -> str:
    """A file as a page: Markdown as it is, a program in a block of code."""
    text = (ROOT / file).read_text("utf-8")
    return text if file.endswith(".md") else f"# {file}\n\n`````{Path(file).suffix[1:]}\n{text}\n`````\n"


def on_config(config: Any) -> Any:
    from pymdownx.slugs import slugify

    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")  # headings are named as on GitHub
    config.nav = expanded(config.nav, Path(config.docs_dir))
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds README.md, and what pages link to, step by step."""
    from mkdocs.structure.files import File, InclusionLevel

    waiting = {"README.md"} | {
        target for page in files.documentation_pages() for target in outside(page.content_string, f"docs/{page.src_uri}")
    }
    done: set[str] = set()
    while waiting:
        file = waiting.pop()
        done.add(file)
        text = as_page(file)
        level = InclusionLevel.INCLUDED if file == "README.md" else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, site_place(file), content=text, inclusion=level))
        waiting |= (outside(text, file) if file.endswith(".md") else set()) - done
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    file = in_repository(page.file.src_uri)
    markdown = re.sub(r"\A<!--.*?-->\n", "", markdown)  # a page is named after its heading, where that comes first
    return relinked(markdown, file) if file.endswith(".md") and (ROOT / file).is_file() else markdown
