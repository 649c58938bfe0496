"""Writes docs/reference/ from the source, and from docs/tables.yaml the index of papers and the settings of verl and OpenRLHF.

python -m docs.make_reference         # `make docs` does; tests/test_reference.py fails where a committed page is another one
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from docs.make_tables import HERE, table
from posttrain import catalogue
from posttrain.commands.keys import Key, Source, keys_of, owner_of
from posttrain.data.safe_readers import read_yaml

GENERATED = "<!-- made by docs/make_reference.py; do not edit -->"
HEADS = ("key", "type", "default", "meaning")
INTRODUCTIONS = {
    "stage": "Every key of every stage. A run is a list of stages. Keys are set as `NAME.KEY=VALUE` on the command line, where NAME is"
    " the stage's in the recipe, as arguments in Python, and in YAML ([pipelines.md](../pipelines.md)).",
    "algorithm": "Every key of every algorithm, which is what a stage trains by: `rl.algorithm=dapo rl.algorithm.l_max=1024`,"
    " `pt.rl(algorithm=pt.DAPO(l_max=1024), ...)`, or `algorithm: {name: dapo, l_max: 1024}`. [algorithms.md](../algorithms.md)"
    " compares them.",
    "task": "Every key of every task, which is where problems come from: `rl.task=gsm8k`, or `task: {name: gsm8k, ...}`."
    " [tasks.md](../tasks.md) says how to write one.",
    "reward": "Every option of the shipped rewards, which pay a response: `reward: math` of a task. [rewards.md](../rewards.md) says"
    " how to compose them and to write one.",
    "recipe": "Every key of every recipe, a whole pipeline: `posttrain run NAME KEY=VALUE`. Each has a page under"
    " [recipes](../recipes/index.md).",
}
PEER_VERSIONS = "verl 0.9.1 and OpenRLHF 0.11.2"


def tables() -> dict[str, Any]:
    path = HERE / "tables.yaml"
    return dict(read_yaml(path.read_text("utf-8"), str(path)))


def cell(text: str) -> str:
    """Text in a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def code(text: str) -> str:
    """The same in the font of code, where there is any."""
    return f"`{text}`".replace("|", "\\|") if text else ""


def rows(keys: Sequence[Key], prefix: str = "") -> Iterator[list[str]]:
    for key in keys:
        default = code(key.default) if key.default else "required"
        yield [code(prefix + key.name), cell(key.type), default, cell(key.meaning)]
        yield from rows(key.keys, f"{prefix}{key.name}.")


def prose(docstring: str) -> list[str]:
    """A docstring without its examples. What is indented, equations and tables, stays as it is."""
    lines = docstring.partition(">>>")[0].rstrip().splitlines()
    plain = [re.sub(r"(`[^`]*`)|<", lambda found: found[1] or "&lt;", line) for line in lines]
    return [line if line.startswith("    ") else escaped for line, escaped in zip(lines, plain, strict=True)]


def explained(kind: str, name: str, file: str) -> list[str]:
    """The first lines of the file, and what the class or the function says of itself."""
    source = Source.of(HERE.parent / file)
    functions = [node for node in source.tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    own = functions[0] if functions else owner_of(source, kind, name)
    texts = [ast.get_docstring(node) or "" for node in (source.tree, own) if node is not None]
    return [line for text in texts if text for line in [*prose(text), ""]]


def kind_page(kind: str) -> str:
    links = ", ".join(f"[{name}](#{name})" for name in catalogue.names(kind))
    lines = [GENERATED, f"# Reference: {kind}s", "", INTRODUCTIONS[kind], "", links, ""]
    for entry in catalogue.describe(kind):
        paper = f" {entry.paper}." if entry.paper else ""
        lines += [f"## {entry.name}", "", f"[{entry.file}](../../{entry.file}).{paper}", ""]
        lines += explained(kind, entry.name, entry.file)
        keys = keys_of(kind, entry.name)
        lines += [*table(HEADS, rows(keys)), ""] if keys else ["It has no keys.", ""]
    return "\n".join(lines)


def run_page() -> str:
    """Keys of every run, and the sources of a reward."""
    settings = Source.of(catalogue.HOME / "config.py").keys("Settings").values()
    keys = [key for key in settings if key.name not in ("recipe", "name", "trust")]
    lines = [
        GENERATED,
        "# Reference: runs and sources of rewards",
        "",
        "Keys of every run, whatever its recipe: `posttrain run NAME seed=1`.",
    ]
    lines += ["", *table(HEADS, rows(keys)), ""]
    source = Source.of(catalogue.HOME / catalogue.KINDS["reward_source"])
    lines += ["## Sources of rewards", "", *prose(ast.get_docstring(source.tree) or ""), ""]
    for name in catalogue.names("reward_source"):
        node = next(
            n
            for n in source.tree.body
            if isinstance(n, ast.ClassDef) and re.search(rf"\n    name\b.* = '{name}'", ast.unparse(n))
        )
        lines += [f"### {name}", "", *prose(ast.get_docstring(node) or ""), ""]
        lines += [*table(HEADS, rows(list(source.keys(node.name).values()))), ""]
    return "\n".join(lines)


def functions_page() -> str:
    """The functions of `import posttrain as pt`."""
    lines = [
        GENERATED,
        "# Reference: functions",
        "",
        "Every function of `import posttrain as pt`, with its arguments; [python.md](../python.md) shows them at work.",
        "",
    ]
    for node in ast.parse((catalogue.HOME / "api" / "functions.py").read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            signature = ",\n    ".join(ast.unparse(node.args).split(", "))
            lines += [f"## pt.{node.name}", "", "```text", f"pt.{node.name}(\n    {signature},\n){returns}", "```", ""]
            lines += [*prose(ast.get_docstring(node) or ""), ""]
    return "\n".join(lines)


def equation(docstring: str) -> str:
    """The first equation of a docstring."""
    found = next((" ".join(line.split()) for line in docstring.splitlines() if line.startswith("    ") and " = " in line), "")
    return code(found.replace("`", ""))


def papers_page() -> str:
    """Every paper that the package implements: those that algorithms name, and those of docs/tables.yaml."""
    lines = [
        GENERATED,
        "# Papers",
        "",
        "This page says what is implemented of each paper, in which file, and with which settings.",
        "",
        "## Algorithms",
        "",
    ]
    made = []
    for entry in catalogue.describe("algorithm"):
        node = owner_of(Source.of(HERE.parent / entry.file), "algorithm", entry.name)
        keys = [field for field in node.body if isinstance(field, ast.AnnAssign)] if node else []
        names = ", ".join(code(ast.unparse(field.target)) for field in keys if "ClassVar" not in ast.unparse(field.annotation))
        link = f"[{entry.name}](reference/algorithms.md#{entry.name})"
        shown = equation(ast.get_docstring(node) or "") if node else ""
        made.append([cell(entry.paper), shown, f"[{entry.file}](../{entry.file})", f"{link}{': ' if names else ''}{names}"])
    lines += table(("paper", "first equation of the file", "file", "algorithm and its own settings"), sorted(made))
    lines += ["", "## Options, recipes, tasks and measurements", ""]
    more = sorted(
        [f"{who}, {number}", cell(what), f"[{file}](../{file})", cell(how)]
        for who, number, what, file, how in tables()["papers"]
    )
    return "\n".join([*lines, *table(("paper", "what", "file", "settings"), more)]) + "\n"


def peers_page() -> str:
    """Settings of verl and OpenRLHF beside ours."""
    lines = [
        GENERATED,
        "# Coming from verl or OpenRLHF",
        "",
        "This page maps settings of verl and OpenRLHF to posttrain's. [trl.md](trl.md) does the same for TRL.",
        "",
        f"- The names are those of {PEER_VERSIONS}, read in their packages. `A` stands for `actor_rollout_ref`.",
        "- A key in the column `here` belongs to an rl stage, as in `posttrain run FILE rl.prompts=64`, or to the run if the table",
        "  says so.",
        "- Defaults differ: see [the stage rl](reference/stages.md#rl) and [the algorithms](reference/algorithms.md).",
        "- Not available: Megatron, DeepSpeed, and prompts with images or audio. Several processes were tested on CPUs, not on",
        "  several GPUs ([cluster.md](cluster.md)).",
        "",
    ]
    made = []
    for what, here, verl, openrlhf, note in tables()["peers"]:
        own = f"{code(here.removeprefix('run.'))} of the run" if here.startswith("run.") else code(here) or "none"
        made.append([what, own, code(verl), code(openrlhf and f"--{openrlhf}"), note])
    return "\n".join([*lines, *table(("what", "here", "verl", "OpenRLHF", "remark"), made)]) + "\n"


def pages() -> dict[str, str]:
    """What is written, by its place below docs/."""
    made = {f"reference/{catalogue.KINDS[kind]}.md": kind_page(kind) for kind in INTRODUCTIONS}
    made |= {"reference/runs.md": run_page(), "reference/functions.md": functions_page()}
    return made | {"papers.md": papers_page(), "coming-from.md": peers_page()}


def main() -> None:
    for place, text in pages().items():
        path = Path(HERE / place)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.rstrip("\n") + "\n")
        sys.stdout.write(f"wrote docs/{place}\n")


if __name__ == "__main__":
    sys.exit(main())
