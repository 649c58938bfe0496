"""The design, checked: who may import whom, how long things may be, and what may never be called.

Every check is a function from a package folder to a list of complaints, so that each can also be shown to fail.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "posttrain"

FILE_LINES, FUNCTION_LINES, PACKAGE_LINES = 580, 70, 47_400  # those of the package without blanks, comments, docstrings

# Who may import whom: a part may import itself, `errors`, and what its line names. A name covers everything below it, so
# "runs" covers runs/read.py and "runs.read" only that file. To add a part, add a line.
LEAVES = "types trust events"
MODELS = "types events ops data models"
BELOW_COLLECT = "types trust events catalogue system ops rewards tasks algorithms data models engine train"
BELOW_LOOP = f"{BELOW_COLLECT} evals"
# not runs.read
TRAINING_RUNS = "runs.write runs.layout runs.metrics runs.trackers runs.console"
LOOP = f"{BELOW_LOOP} {TRAINING_RUNS}"
MAY_IMPORT = {
    "errors": "",
    "types": "",
    "events": "types",
    "trust": "types",
    "catalogue": "trust system.processes",
    "system": "types",
    "ops": LEAVES,
    "rewards": f"{LEAVES} catalogue system.threads",
    "tasks": f"{LEAVES} catalogue data.records data.calls rewards serve system.machine system.threads system.wire",
    "runs": f"{LEAVES} data.safe_readers system.files system.processes system.sqlite system.threads",
    "algorithms": f"{LEAVES} ops",
    "data": f"{LEAVES} ops system.files system.sqlite",
    "models": f"{LEAVES} ops data.safe_readers system.files",
    "engine": f"{MODELS} system",
    "train": f"{MODELS} system.files system.processes system.world algorithms rewards.judge rewards._asking rewards._models",
    "evals": f"{LEAVES} collect tasks rewards.compose runs ops.kl data.labels data.steps data.stream data.text engine.sampler",
    "turns": f"{LEAVES} tasks.base",
    "episodes": f"{LEAVES} system rewards tasks data engine.random turns",
    "branches": f"{LEAVES} tasks data",
    "collect": f"{BELOW_COLLECT} branches episodes turns runs.metrics",
    "monitor": f"{LOOP} collect",
    "loop": f"{LOOP} collect episodes monitor",
    "stages": f"{LOOP} runs branches collect episodes monitor loop cluster",
    "recipes": f"{LOOP} runs monitor stages",
    "config_tree": f"{LEAVES} catalogue algorithms tasks stages data.safe_readers",
    "config": f"{LEAVES} catalogue config_tree system stages recipes runs.layout data.safe_readers cluster.placement",
    "pipeline": f"{LOOP} runs loop stages recipes config config_tree monitor cluster __version__",
    "commands": f"{LOOP} runs collect episodes monitor loop stages recipes config config_tree pipeline serve __version__",
    "api": f"{LOOP} runs collect loop stages recipes config config_tree pipeline commands.compare "
    "commands.evaluate commands.models commands.probe commands.replay commands.sample",
    "cluster": f"{MODELS} system algorithms engine tasks train collect episodes turns runs.layout runs.console __version__",
    "serve": f"{MODELS} trust engine train.rating system.threads",
    # not runs.write: the studio shows runs, and starts them as processes of their own
    "studio": f"{LEAVES} catalogue serve.server data.labels data.preferences data.stream evals.agreement evals.statistics system.files "
    "system.processes runs.read runs.layout runs.index runs.status "
    "runs.lock runs.metrics runs.plot runs.resume_policy runs.tokens runs.html",
    "cli": f"{LOOP} runs collect episodes loop stages recipes config pipeline commands cluster serve studio __version__",
    "__version__": "",
    "__init__": "api catalogue algorithms types tasks stages",  # lazily: see the fresh process below
    "__main__": "cli",
}

# Packages that a part may not import: anywhere in it, or while its module is imported. TYPE_CHECKING imports are free.
NEVER = {
    "torch": "types errors events catalogue tasks rewards",
    "transformers": "types errors events catalogue tasks rewards runs ops algorithms",
    "pydantic": " ".join(part for part in MAY_IMPORT if part not in ("config_tree", "cli", "serve", "studio")),
}
NOT_AT_IMPORT = {
    "torch": "api cli config config_tree __init__ recipes runs",
    "transformers": "api cli config config_tree __init__ recipes",
    "pydantic": "api cli __init__",
    "matplotlib": " ".join(MAY_IMPORT),
    # Windows has none of these; rewards/sandbox/child.py is a program of its own for Linux
    **dict.fromkeys(("fcntl", "pwd", "grp", "termios"), " ".join(MAY_IMPORT)),
    "resource": " ".join(part for part in MAY_IMPORT if part != "rewards"),
}

FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
FORBIDDEN_BUILTINS = {"eval", "exec"}
FORBIDDEN_CALLS = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "torch.load", "numpy.load", "np.load"}

EQUATION_SIGNS = ("*", "/", "^", "sum", "exp(", "log", "mean(", "min(", "max(", "E[", "sigmoid", "clip(", "|", "∑", "√", "π")


@dataclass(frozen=True)
class Import:
    """One imported name: where, what, and whether it happens while the module is imported or only for the type checker."""

    line: int
    target: str
    at_import: bool
    typing_only: bool


def sources(package: Path) -> Iterator[tuple[str, Path, ast.Module]]:
    """(dotted name within the package, file, syntax tree) of every module."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        yield name, path, _parsed(path, path.stat().st_mtime_ns)


@cache
def _parsed(path: Path, changed: int) -> ast.Module:
    """Parsed once for all checks that look at it."""
    return ast.parse(path.read_text())


def imports(tree: ast.Module, name: str, is_package: bool) -> list[Import]:
    """Every import of a module, also within functions and through importlib with a plain string."""
    found: list[Import] = []

    def visit(node: ast.AST, at_import: bool, typing_only: bool) -> None:
        for target in _targets(node, name, is_package):
            found.append(Import(getattr(node, "lineno", 0), target, at_import, typing_only))
        inner = at_import and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, inner, True)
            for child in node.orelse:
                visit(child, inner, typing_only)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, inner, typing_only)

    visit(tree, True, False)
    return found


def _targets(node: ast.AST, name: str, is_package: bool) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = ["posttrain", *name.split(".")]
            parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
            base = ".".join([*parts, *([node.module] if node.module else [])])
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__"):
        return [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return []


def part_of(name: str) -> str:
    return name.split(".")[0]


def inner_imports(package: Path) -> list[str]:
    complaints = []
    for name, path, tree in sources(package):
        part = part_of(name)
        if part not in MAY_IMPORT:
            complaints.append(f"{path.relative_to(package)}: {part!r} has no line in MAY_IMPORT")
            continue
        allowed = [part, "errors", *MAY_IMPORT[part].split()]
        for entry in imports(tree, name, path.stem == "__init__"):
            if entry.target.split(".")[0] != package.name:
                continue
            target = entry.target.removeprefix(package.name).lstrip(".")
            if not any(target == prefix or target.startswith(prefix + ".") for prefix in allowed):
                complaints.append(f"{path.relative_to(package)}:{entry.line}: {part} may not import {target or package.name}")
    return complaints


def outer_imports(package: Path) -> list[str]:
    complaints = []
    for name, path, tree in sources(package):
        part = part_of(name)
        for entry in imports(tree, name, path.stem == "__init__"):
            if entry.typing_only:
                continue
            library = entry.target.split(".")[0]
            never = part in NEVER.get(library, "").split()
            late = entry.at_import and part in NOT_AT_IMPORT.get(library, "").split()
            if never or late:
                when = "anywhere" if never else "at module level"
                complaints.append(f"{path.relative_to(package)}:{entry.line}: {part} may not import {library} {when}")
    return complaints


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines with code on them: blank lines, comments and docstrings are there to be read, and are not counted."""
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def test_code_lines_by_hand() -> None:
    text = (
        '"""Module."""\n\nx = 1  # why\n# a comment\n\n\ndef f():\n    """Two\n    lines."""\n    return (\n        x\n    )\n'
    )
    assert code_lines(text, ast.parse(text)) == 5


def sizes(package: Path) -> list[str]:
    complaints, total = [], 0
    for _, path, tree in sources(package):
        lines = len(path.read_text().splitlines())
        total += code_lines(path.read_text(), tree)
        if lines >= FILE_LINES:
            complaints.append(f"{path.relative_to(package)}: {lines} lines; under {FILE_LINES}, please")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                kernel = any("triton.jit" in ast.unparse(d) for d in node.decorator_list)  # its arguments are one a line
                length = node.end_lineno - (node.body[0].lineno if kernel else node.lineno) + 1
                if length >= FUNCTION_LINES:
                    complaints.append(
                        f"{path.relative_to(package)}: {node.name} has {length} lines; under {FUNCTION_LINES}, please"
                    )
    if total >= PACKAGE_LINES:
        complaints.append(f"the package has {total} lines of code; under {PACKAGE_LINES}, please")
    return complaints


def dangers(package: Path) -> list[str]:
    """Ways in which data could become code."""
    complaints = []
    for name, path, tree in sources(package):
        for entry in imports(tree, name, path.stem == "__init__"):
            if entry.target.split(".")[0] in FORBIDDEN_MODULES or entry.target in FORBIDDEN_CALLS:
                complaints.append(f"{path.relative_to(package)}:{entry.line}: {entry.target}")
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_BUILTINS:
                complaints.append(f"{path.relative_to(package)}:{node.lineno}: {node.func.id}()")
            if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in FORBIDDEN_CALLS:
                complaints.append(f"{path.relative_to(package)}:{node.lineno}: {ast.unparse(node.func)}()")
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in ("trust_remote_code", "allow_pickle") and not off:
                    complaints.append(f"{path.relative_to(package)}:{node.lineno}: {keyword.arg} must be False")
    return complaints


def algorithms(package: Path) -> list[str]:
    """An algorithm's file names its paper, states its equation, and has a test."""
    complaints = []
    for path in sorted((package / "algorithms").glob("*.py")):
        if path.stem.startswith("_") or path.stem == "base":
            continue
        classes = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]
        if not any(_constant(cls, "paper") for cls in classes):
            complaints.append(f"{path.name}: no class has a `paper`")
        if not any(states_equation(ast.get_docstring(cls) or "") for cls in classes):
            complaints.append(f"{path.name}: no class docstring has a line with ' = ' and one of {' '.join(EQUATION_SIGNS)}")
        test = package.parent / "tests" / "algorithms" / f"test_{path.stem}.py"
        if not test.is_file():
            complaints.append(f"{path.name}: there is no {test.relative_to(package.parent)}")
    return complaints


def _constant(cls: ast.ClassDef, name: str) -> str:
    for node in cls.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        value = getattr(node, "value", None)
        if any(isinstance(t, ast.Name) and t.id == name for t in targets) and isinstance(value, ast.Constant):
            return str(value.value or "")
    return ""


def states_equation(docstring: str) -> bool:
    """A line with an equals sign between spaces and, on either side of it, some mathematics."""
    return any(" = " in line and any(sign in line for sign in EQUATION_SIGNS) for line in docstring.splitlines())


CHECKS: tuple[Callable[[Path], list[str]], ...] = (inner_imports, outer_imports, sizes, dangers, algorithms)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_package_follows_its_design(check: Callable[[Path], list[str]]) -> None:
    complaints = check(PACKAGE)
    assert not complaints, "\n" + "\n".join(complaints)


def test_the_table_has_no_cycles() -> None:
    """Parts form layers: whoever may be imported may not import back, even through others."""
    names = {part: {part_of(entry) for entry in line.split()} - {part} for part, line in MAY_IMPORT.items()}
    assert set().union(*names.values()) <= set(MAY_IMPORT)

    def reachable(part: str, seen: frozenset[str]) -> frozenset[str]:
        for below in names[part] - seen:
            seen = reachable(below, seen | {below})
        return seen

    assert [part for part in MAY_IMPORT if part in reachable(part, frozenset())] == []


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "pydantic", "matplotlib", "numpy"]
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import posttrain; print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "words",
    ["run quikstart", "plan nothing.yaml", "resume nothing", "replay nothing rl/1", "show nothing", "eval m --task sms"],
)
def test_a_mistyped_name_waits_for_no_torch(words: str) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from posttrain.cli import main; "
        f"print(main({words.split()!r}), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "2 False", done.stderr


def test_an_error_in_settings_waits_for_no_compiler() -> None:
    """It needs the classes of stages and algorithms, which import torch; transformers and torch's compiler take as long again."""
    heavy = ["transformers", "torch._dynamo", "sympy", "matplotlib"]
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from posttrain.cli import main; "
        f"print(main(['plan', 'quickstart', 'rl.nope=3']), [m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "2 []"
    assert "unknown key 'rl.nope'" in done.stderr


BAD = [
    # check, file, source, what the complaint says
    (inner_imports, "types.py", "from posttrain.ops import kl", "types may not import ops.kl"),
    (inner_imports, "ops/kl.py", "def f():\n    import posttrain.models.load", "ops may not import models.load"),
    (inner_imports, "ops/kl.py", "from posttrain import models", "ops may not import models"),
    (inner_imports, "ops/kl.py", "from ..engine.cache import Cache", "ops may not import engine.cache.Cache"),
    (inner_imports, "ops/__init__.py", "from ..engine import cache", "ops may not import engine.cache"),
    (inner_imports, "ops/kl.py", "import importlib\nimportlib.import_module('posttrain.train')", "ops may not import train"),
    (inner_imports, "engine/cache.py", "from posttrain.train.pack import pack", "engine may not import train"),
    (inner_imports, "train/pack.py", "from posttrain.engine import cache", "train may not import engine"),
    (inner_imports, "loop.py", "from posttrain.runs.read import Run", "loop may not import runs.read"),
    (inner_imports, "studio/app.py", "from posttrain.runs.write import RunWriter", "studio may not import runs.write"),
    (inner_imports, "stages/rl.py", "import posttrain.cli", "stages may not import cli"),
    (inner_imports, "tasks/sums.py", "import posttrain", "tasks may not import posttrain"),
    (inner_imports, "attic/old.py", "", "'attic' has no line"),
    (outer_imports, "tasks/sums.py", "def f():\n    import torch", "tasks may not import torch anywhere"),
    (outer_imports, "rewards/math.py", "from torch.nn import functional", "rewards may not import torch"),
    (outer_imports, "types.py", "import torch", "types may not import torch"),
    (outer_imports, "types.py", "if not TYPE_CHECKING:\n    pass\nelse:\n    import torch", "types may not import torch"),
    (outer_imports, "cli.py", "try:\n    import torch\nexcept ImportError: pass", "cli may not import torch at module level"),
    (outer_imports, "loop.py", "import pydantic", "loop may not import pydantic"),
    (outer_imports, "runs/plot.py", "import matplotlib.pyplot", "runs may not import matplotlib at module level"),
    (sizes, "ops/kl.py", "x = 1\n" * FILE_LINES, f"{FILE_LINES} lines"),
    (sizes, "ops/kl.py", "def long():\n" + "    x = 1\n" * (FUNCTION_LINES - 1), f"long has {FUNCTION_LINES} lines"),
    (
        sizes,
        "ops/kl.py",
        "class A:\n    async def long(self):\n" + "        x = 1\n" * (FUNCTION_LINES - 1),
        f"long has {FUNCTION_LINES} lines",
    ),
    (dangers, "a.py", "import pickle", "pickle"),
    (dangers, "a.py", "from pickle import loads", "pickle"),
    (dangers, "a.py", "eval('1')", "eval()"),
    (dangers, "a.py", "exec('1')", "exec()"),
    (dangers, "a.py", "import yaml\nyaml.load('a', yaml.Loader)", "yaml.load()"),
    (dangers, "a.py", "from yaml import load", "yaml.load"),
    (dangers, "a.py", "import torch\ntorch.load('a', weights_only=True)", "torch.load()"),
    (dangers, "a.py", "from torch import load as fetch", "torch.load"),
    (dangers, "a.py", "f(trust_remote_code=True)", "trust_remote_code must be False"),
    (dangers, "a.py", "f(trust_remote_code=flag)", "trust_remote_code must be False"),
    (algorithms, "algorithms/x.py", 'class X:\n    """L = a * b"""', "no class has a `paper`"),
    (algorithms, "algorithms/x.py", 'class X:\n    """Good."""\n    paper = "A, 2024"', "no class docstring has a line"),
    (
        algorithms,
        "algorithms/x.py",
        'class X:\n    """L = a * b"""\n    paper = "A, 2024"',
        "there is no tests/algorithms/test_x.py",
    ),
]


@pytest.mark.parametrize(("check", "file", "source", "complaint"), BAD)
def test_each_check_can_fail(check, file: str, source: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "posttrain" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    complaints = check(tmp_path / "posttrain")
    assert any(complaint in text for text in complaints), complaints


def test_the_whole_may_not_grow_without_end(tmp_path: Path) -> None:
    folder = tmp_path / "posttrain" / "ops"
    folder.mkdir(parents=True)
    for number in range(PACKAGE_LINES // 500 + 1):
        (folder / f"part{number}.py").write_text("x = 1\n" * 500)
    (complaint,) = sizes(tmp_path / "posttrain")
    assert complaint.endswith(f"lines of code; under {PACKAGE_LINES}, please")


GOOD = {
    "types.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor\n",
    "cli.py": "import posttrain.studio.app\ndef main():\n    import torch\n    from posttrain.loop import run\n",
    "ops/kl.py": "import torch\nfrom posttrain.types import Batch\nfrom . import weights\nimport posttrain.errors\n",
    "runs/plot.py": "def draw():\n    import matplotlib\n",
    "models/load.py": "model.eval()\nast.literal_eval('1')\nf(trust_remote_code=False)\nyaml.safe_load('a')\n",
    "algorithms/x.py": 'class X:\n    """Learns:\n\n    L = sum_t w_t l_t\n    """\n    paper: ClassVar[str] = "A, 2024"\n',
    "algorithms/base.py": "class Algorithm: ...\n",
    "../tests/algorithms/test_x.py": "",
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_what_is_allowed_passes(check: Callable[[Path], list[str]], tmp_path: Path) -> None:
    for file, source in GOOD.items():
        path = tmp_path / "posttrain" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert check(tmp_path / "posttrain") == []
