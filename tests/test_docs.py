"""The examples in the documentation are executed as they stand; what it points to is there; every recipe has its page."""

from __future__ import annotations

import doctest
import json
import re
import runpy
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from scripts_for_tests import load_script

from posttrain import config

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


FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = [(path, kind, code) for path in PAGES for kind, code in FENCE.findall(path.read_text())]
# who executes the programs of a page that are no doctests
EXECUTED = {
    "README.md": "tests/examples/test_examples.py",
    "environments.md": "tests/tasks/test_tool_use.py",
    "faq.md": "tests/api/test_page.py",
    "outside.md": "tests/tasks/test_outside.py",
    "own-algorithm.md": "tests/algorithms/test_own_page.py",
    "python.md": "tests/api/test_page.py",
    "rewards.md": "tests/test_docs.py",
    "serve.md": "tests/serve/test_serve.py",
    "tasks.md": "tests/test_episodes.py",
    "tools.md": "tests/tasks/test_tool_use.py",
}


def of_kind(kind: str, page: str = "") -> list[tuple[Path, str]]:
    return [(path, code) for path, own, code in BLOCKS if own == kind and page in path.name]


def test_every_block_says_what_it_is() -> None:
    assert [(path.name, code[:40]) for path, kind, code in BLOCKS if kind not in ("python", "sh", "yaml", "json", "text")] == []
    fences = sum(line.startswith("```") for path in PAGES for line in path.read_text().splitlines())
    assert fences == 2 * len(BLOCKS), "a block is not closed, or has more than a word behind its first marks"


def test_every_program_is_a_doctest_or_is_executed_by_a_named_test() -> None:
    programs = {path.name for path, code in of_kind("python") if ">>>" not in code}
    assert programs == set(EXECUTED)
    assert [page for page, test in EXECUTED.items() if page not in (ROOT / test).read_text()] == []


def test_the_reward_of_the_page_pays_what_it_says(tmp_path: Path) -> None:
    (code,) = (code for _, code in of_kind("python", "rewards.md") if ">>>" not in code)
    (tmp_path / "mine.py").write_text(code)
    polite = runpy.run_path(str(tmp_path / "mine.py"))["polite"]
    assert [polite("", text, "4") for text in ("4, please", "4", "5, please")] == [1.0, 0.5, 0.0]


def test_every_yaml_block_is_read_with_all_its_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of stages, one stage, a task, an algorithm: none has a key that is not known. Kubernetes reads its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rubric.txt").write_text("Prefer the answer that is right.")
    for name, pages in {
        "mine.py": ("rewards.md", "tools.md"),
        "guess.py": ("environments.md",),
        "median.py": ("own-algorithm.md",),
    }.items():
        own = [code for page in pages for _, code in of_kind("python", page) if code.startswith(f"# {name}")]
        (tmp_path / name).write_text("\n".join(own))
    for number, (path, code) in enumerate(of_kind("yaml")):
        tree = yaml.safe_load(code)
        if isinstance(tree, dict) and "apiVersion" in tree:
            continue
        if isinstance(tree, dict) and "stages" not in tree:
            ((key, value),) = tree.items()
            tree = {"stages": [{"stage": "rl", "name": "rl", "model": "tiny:nano", "task": "arithmetic", key: value}]}
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump({"stages": tree} if isinstance(tree, list) else tree))
        assert config.parse(str(file), [], allow_code=True).recipe.stages, path


def test_every_script_and_target_of_a_command_is_there() -> None:
    """`python FILE --option` names a file that has the option, `make TARGET` a target, a shell block is one that bash reads."""
    missing = []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in PAGES:
        text = path.read_text()
        missing += [
            f"{path.name}: make {t}" for t in re.findall(r"(?:^ *|`)make ([a-z-]+)", text, re.MULTILINE) if t not in targets
        ]
        for script, words in re.findall(r"(?:^ *|`)python (\w+/\w+\.py)([^`\n#]*)", text, re.MULTILINE):
            source = (ROOT / script).read_text() if (ROOT / script).exists() else ""
            options = [word for word in re.findall(r"--[a-z-]+", words) if word != "--help" and word not in source]
            missing += [f"{path.name}: {script} {word}" for word in (options if source else [""])]
    assert missing == []
    for path, code in of_kind("sh"):
        assert subprocess.run(["bash", "-n"], input=code, text=True, check=False).returncode == 0, path


def test_every_command_that_needs_a_gpu_ran_on_one() -> None:
    """benchmarks/docs_commands.py executes them with small settings, and names what it cannot execute and what is still to be run."""
    known = load_script("benchmarks/docs_commands.py")
    ran = json.loads((ROOT / "benchmarks" / "results" / "docs_commands.json").read_text())
    good = {one["command"] for one in ran["commands"] if known.holds(one)}
    assert "NVIDIA" in ran["device"]
    assert {line for line in known.listed() if line not in good and not known.elsewhere(line)} == set(ran["pending"])


def test_every_other_command_was_executed_or_has_a_reason() -> None:
    """`make test-commands` executes what has no result yet; reasons name commands that are there."""
    known = load_script("benchmarks/docs_commands.py")
    ran = json.loads((ROOT / "benchmarks" / "results" / "docs_commands_cpu.json").read_text())
    good, wanted = {one["command"] for one in ran["commands"] if known.holds(one)}, known.listed(gpu=False)
    assert {line for line in wanted if line not in good and not known.elsewhere(line)} == set(ran["pending"])
    reasons = known.known.ELSEWHERE_CPU
    assert [word for word in reasons if not any(word in line for line in wanted)] == []
    named = [
        name for why in [*reasons.values(), *known.known.PAGES_ELSEWHERE.values()] for name in re.findall(r"tests/[\w/.]+", why)
    ]
    assert len(wanted) > 180 and [name for name in named if not (ROOT / name).exists()] == []


def test_every_recipe_of_a_command_knows_its_settings_and_what_is_added() -> None:
    """What the shell or the command itself reads is left out; judges behind an address get no small settings."""
    known, parsed = load_script("benchmarks/docs_commands.py"), 0
    lines = [line for gpu in (False, True) for line in known.listed(gpu) if "url=https" not in line]
    for part in (part for line in lines for part in re.split(r" && |; ", line)):
        if found := re.fullmatch(r"(?:\w+=\S+ )?posttrain run (\w+)( .*)?", part):
            more = re.sub(r"seeds=\S+|--sweep \S+|--[a-z-]+", "", found[2] or "")
            config.parse(found[1], shlex.split(f"{more} {known.small(part)}"))
            parsed += 1
    assert parsed > 80


def test_a_shell_block_has_nothing_but_commands_that_are_executed() -> None:
    known = load_script("benchmarks/docs_commands.py")
    for path in known.pages():
        for kind, code in FENCE.findall(path.read_text()) if path.name not in known.known.PAGES_ELSEWHERE else ():
            lines = [line for line in code.replace("\\\n", "").splitlines() if line.strip() and not line.startswith("#")]
            assert kind != "sh" or len(known.commands(f"```sh\n{code}```")) == len(lines), (path.name, code)


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
    assert re.search(rf"\b{recipe}\b", (ROOT / "docs" / "recipes" / "index.md").read_text()), "docs/recipes/index.md"


RESULTS = ROOT / "benchmarks" / "results"
# a row of README.md: the files of its runs, and the stages before and after
REAL = {
    "[gsm8k]": (("gsm8k_seed0", "gsm8k_seed1", "gsm8k_seed2"), "before", "after"),
    "the same, 150 steps": (("gsm8k_1.5b",), "before", "after"),
    "[math]": (("math",), "before", "after"),
    "[code]": (("code",), "before", "after"),
    "[r1_zero]": (("r1_zero_qwen",), "base", "trained"),
    "[dpo]": (("dpo_seed0", "dpo_seed1", "dpo_seed2"), "", "dpo"),
}


def test_the_first_page_has_the_figures_of_the_result_files() -> None:
    table = (ROOT / "README.md").read_text().partition("## What is proven")[2].partition("Seconds for one")[0]
    cells = {line.split("|")[1].strip(): line.split("|")[4:6] for line in table.splitlines() if line.startswith("| ")}

    def said(cell: str) -> list[str]:
        return re.findall(r"\d+\.\d", cell)

    def shares(values: list[float]) -> list[str]:
        return [f"{100 * value:.1f}" for value in values]

    for row, (files, first, last) in REAL.items():
        (before, after) = next(cells[name] for name in cells if name.startswith(row))
        runs = [json.loads((RESULTS / "real" / f"{file}.json").read_text())["stages"] for file in files]
        assert said(after) == shares([run[last]["accuracy"][0] for run in runs]), row
        assert {*said(before)} == {*shares([run[first]["accuracy"][0] for run in runs])} if first else "50%" in before, row
    toys = json.loads((RESULTS / "recipes.json").read_text())["rows"]
    for recipe in ("quickstart", "distill"):
        (before, after) = next(cells[name] for name in cells if name.startswith(f"[{recipe}]"))
        rows = {row["seed"]: row for row in toys if row["recipe"] == recipe and row["seed"] < 3}
        assert [said(before), said(after)] == [shares([rows[seed][end] for seed in range(3)]) for end in ("from", "to")], recipe


def test_the_changelog_counts_families_as_the_page_of_models_does() -> None:
    page, changes = ((ROOT / name).read_text() for name in ("docs/models.md", "CHANGELOG.md"))
    found = re.findall(r"^\| ([a-z ]+) \|[^|]*\|[^|]*\| ([^|]+) \|$", page, re.MULTILINE)
    ways = {way: len(names.split(", ")) for way, names in found if way != "way"}
    both, trained = sum(ways[way] for way in ("fast", "packed", "padded")), ways["training only"]
    text = " ".join(changes.split())
    assert (
        f"of {both + trained + ways['refused']} families" in text
        and f"{both} are trained and sampled and {trained} trained only" in text
    )


def test_the_packages_of_the_design_are_those_that_are_there() -> None:
    """Each file and folder of the package has its row, and each file that a row names is in its folder."""
    text = (ROOT / "docs" / "design.md").read_text().partition("## 3. The packages")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+(?:/|\.py))` \| (.*) \|$", text, re.MULTILINE))
    package = ROOT / "posttrain"
    there = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in package.glob("[a-z]*")
        if path.is_dir() or path.suffix == ".py"
    }
    assert there - {*rows} == set() and {*rows} - there == {"benchmarks/", "docs/", "tests/"}
    own = {folder: names for folder, names in rows.items() if folder in there and folder.endswith("/")}
    missing = [
        f"{f}{n}"
        for f, names in own.items()
        for n in re.findall(r"(?<![\w/])\w+\.py\b", names)
        if not list((package / f).rglob(n))
    ]
    assert missing == []
