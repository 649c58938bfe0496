"""Benchmarks are scripts outside the package: no type checker reads them, and most need a GPU or minutes."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPTS = sorted(Path(__file__, "../../../benchmarks").resolve().glob("*.py"))


def module_of(name: str) -> Any:
    """A module of the package; of one that needs Triton, which is for GPUs, what its source defines."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
    source = (SCRIPTS[0].parent.parent / name.replace(".", "/")).with_suffix(".py").read_text()
    return SimpleNamespace(**{n.name: n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)})


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_benchmark_takes_from_the_package_is_there(script: Path) -> None:
    tree = ast.parse(script.read_text())
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("posttrain")]
    taken = {
        alias.asname or alias.name: getattr(module, alias.name, None) or module_of(f"{node.module}.{alias.name}")
        for node in imports
        for module in [module_of(str(node.module))]
        for alias in node.names
    }
    used = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    modules = {name: found for name, found in taken.items() if isinstance(found, ModuleType)}
    missing = [f"{n.value.id}.{n.attr}" for n in used if n.value.id in modules and not hasattr(modules[n.value.id], n.attr)]  # type: ignore[attr-defined]
    assert not missing
