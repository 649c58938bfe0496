"""What is published: a wheel and an sdist that hold all that the package reads, and run in an empty environment outside the repository.

`make test-package` builds and installs them, with `PYTHONS="python3.11 python3.12"` for several versions of Python. On those of
`READERS`, for which there is no torch to install, runs are only read.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "posttrain"
NOT_READ = {"posttrain/ruff.toml"}  # of development
APART = {"vllm", "verifiers", "openenv", "textarena"}  # extras with versions of their own; see .ci/lock
PYTHONS = os.environ.get("PYTHONS", "").split() or [sys.executable]
READERS = os.environ.get("READERS", "").split()
QUICK = [
    "sft.steps=4",
    "sft.batch=8",
    "rl.steps=2",
    "rl.prompts=4",
    "rl.group=4",
    "before.problems=4",
    "after.problems=4",
    "out=run",
]
PLAN = """
import sys
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration
made = apply_configuration(Distribution(), "pyproject.toml")
build = made.get_command_obj("build_py")
build.ensure_finalized()
print(*(f"{folder}/{name}" for _, folder, _, names in build.get_data_files_without_manifest() for name in names), sep="\\n")
"""


def package_files(pattern: str) -> set[str]:
    found = (path for path in PACKAGE.rglob(pattern) if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in found} - NOT_READ


def plain_environment(**more: str) -> dict[str, str]:
    left_out = ("PYTHON", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)} | more


def call(*command: object, cwd: Path, **more: str) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=plain_environment(**more), capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


def test_the_wheel_is_planned_with_every_file_that_the_package_reads() -> None:
    """Without building it: setuptools is asked what `pyproject.toml` selects."""
    planned = call(sys.executable, "-c", PLAN, cwd=ROOT).split()
    selected = {re.sub(".*?(posttrain/)", r"\1", path, count=1) for path in planned}
    assert package_files("*") - package_files("*.py") - selected == set()


def test_the_lock_has_a_hash_and_a_permitted_version_of_every_dependency() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    text = (ROOT / "requirements.lock").read_text()
    entries = re.findall(r"^([\w.-]+)==(\S+)(?: ; .*?)? \\\n((?:    --hash=.*\n?)+)", text, re.M)
    locked: dict[str, list[str]] = {}
    for name, version, _ in entries:
        locked.setdefault(canonicalize_name(name), []).append(version)
    assert len(entries) == len(re.findall(r"^[\w.-]+==", text, re.M)), "an entry without a hash"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    command = text.splitlines()[1]
    extras = re.findall(r"--extra (\S+)", command)
    assert set(project["optional-dependencies"]) - set(extras) == APART
    wanted = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    for requirement in map(Requirement, wanted):
        versions = locked.get(canonicalize_name(requirement.name), [])
        assert versions and all(requirement.specifier.contains(one) for one in versions), requirement
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    for name in ("torch", "transformers"):
        assert locked[name] == [pins[name]]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of a copy of what git knows, and the wheel that is made of the sdist."""
    folder = tmp_path_factory.mktemp("distributions")
    names = call("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / "copy" / name)
    program = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    call(sys.executable, "-c", program, folder, cwd=folder / "copy")
    (sdist,) = folder.glob("posttrain-*.tar.gz")
    call(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, sdist, cwd=folder)
    (wheel,) = folder.glob("posttrain-*.whl")
    return sdist, wheel


@pytest.mark.slow
@pytest.mark.package
def test_the_wheel_made_of_the_sdist_holds_the_package_and_no_more(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == package_files("*")


@pytest.mark.slow
@pytest.mark.package
@pytest.mark.parametrize("python", PYTHONS)
def test_in_an_empty_environment_the_first_commands_work(python: str, distributions: tuple[Path, Path], tmp_path: Path) -> None:
    """Outside the repository: the quickstart, cut down; its rollouts; a run of this format, resumed; its model, exported."""
    call(python, "-m", "venv", "env", cwd=tmp_path)
    own, posttrain = tmp_path / "env" / "bin" / "python", tmp_path / "env" / "bin" / "posttrain"
    pip = (own, "-m", "pip", "install", "--quiet", "--no-cache-dir", "-c", ROOT / "constraints.txt")
    call(*pip, distributions[1], cwd=tmp_path)
    place = call(
        own, "-c", "import posttrain, torch; print(posttrain.__file__); print(torch.__version__)", cwd=tmp_path
    ).split()
    assert place[0].startswith(str(tmp_path)) and place[1].startswith("2.13.0")
    call(posttrain, "run", "quickstart", *QUICK, cwd=tmp_path)
    assert "rl step 2: 16 rollouts" in call(posttrain, "show", "run", cwd=tmp_path)
    shutil.copytree(ROOT / "tests" / "runs" / "format-2", tmp_path / "kept")
    call(posttrain, "resume", "run", cwd=tmp_path / "kept")
    call(posttrain, "export", "run", "model", cwd=tmp_path / "kept")
    assert (tmp_path / "kept" / "model" / "model.safetensors").is_file()
    print(call(own, "--version", cwd=tmp_path).strip(), "torch", place[1])


@pytest.mark.slow
@pytest.mark.package
@pytest.mark.parametrize("python", READERS)
def test_without_torch_runs_are_read_and_every_module_compiles(
    python: str, distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    call(python, "-m", "venv", "env", cwd=tmp_path)
    own, posttrain = tmp_path / "env" / "bin" / "python", tmp_path / "env" / "bin" / "posttrain"
    pip = (own, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
    call(*pip, "--no-deps", distributions[1], cwd=tmp_path)
    call(*pip, "numpy", "rich", "pyyaml", "pydantic", "safetensors", "filelock", "regex", "jinja2", "mpmath", cwd=tmp_path)
    assert "quickstart" in call(posttrain, "list", "recipes", cwd=tmp_path)
    run = ROOT / "tests" / "runs" / "format-2" / "run"
    program = f"from posttrain.runs.read import Run; print(len(Run({str(run)!r}).rollouts('rl', 2)))"
    assert call(own, "-c", program, cwd=tmp_path).strip() == "4"
    folder = call(own, "-c", "import posttrain; print(posttrain.__path__[0])", cwd=tmp_path).strip()
    call(own, "-W", "error", "-m", "compileall", "-q", "-f", folder, cwd=tmp_path)
    print(call(own, "--version", cwd=tmp_path).strip())
