"""Notebooks from the percent files of this folder, and their execution.

python notebooks/make.py FOLDER            # writes FOLDER/NAME.ipynb of each
python notebooks/make.py FOLDER --run      # and executes them there, each within 5 minutes; needs posttrain[notebooks]

A percent file is a Python program: "# %%" begins a cell of code, "# %% [markdown]" one of text in comments. It can be read, compared
line by line, checked by the linter and run by itself, and it holds no outputs. Editors and jupytext open it as a notebook.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

SOURCES = sorted(Path(__file__).parent.glob("[0-9]*.py"))
LIMIT = 300  # seconds of one notebook
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def notebook(source: str) -> dict[str, Any]:
    """A percent file as a notebook of format 4.

    >>> [(cell["cell_type"], cell["source"]) for cell in notebook("# %% [markdown]\\n# # One\\n#\\n# 2\\n\\n# %%\\nx = 1")["cells"]]
    [('markdown', '# One\\n\\n2'), ('code', 'x = 1')]
    """
    cells: list[dict[str, Any]] = []
    for part in f"\n{source}".split("\n# %%")[1:]:
        kind, _, body = part.partition("\n")
        cell = {"id": f"cell-{len(cells)}", "metadata": {}}
        if kind.strip() == "[markdown]":
            text = "\n".join(line[1:].removeprefix(" ") for line in body.strip().splitlines())
            cells.append({"cell_type": "markdown", **cell, "source": text})
        else:
            cells.append({"cell_type": "code", **cell, "source": body.strip(), "execution_count": None, "outputs": []})
    return {"cells": cells, "metadata": {"kernelspec": KERNEL}, "nbformat": 4, "nbformat_minor": 5}


def execute(path: Path) -> float:
    """Run a notebook in a kernel of its own and keep its outputs in the file. Returns seconds; an error in a cell is raised."""
    import nbformat
    from nbclient import NotebookClient

    held = nbformat.read(path, as_version=4)
    began = time.monotonic()
    try:
        NotebookClient(held, timeout=LIMIT, resources={"metadata": {"path": str(path.parent)}}).execute()
    finally:
        nbformat.write(held, path)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--only", default="", help="part of a name")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    late = []
    for source in (path for path in SOURCES if options.only in path.name):
        path = options.folder / f"{source.stem}.ipynb"
        path.write_text(json.dumps(notebook(source.read_text()), indent=1) + "\n")
        if options.run:
            seconds = execute(path)
            late += [source.stem] * (seconds > LIMIT)
            print(f"{source.stem}: {seconds:.0f} s", flush=True)
    if late:
        raise SystemExit(f"over {LIMIT} seconds: {', '.join(late)}")


if __name__ == "__main__":
    main()
