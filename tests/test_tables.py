"""The generated pages are what their generator makes now, and the table of properties has no empty cell."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
from material_for_tests import algorithm_class
from scripts_for_tests import load_script

import posttrain
from posttrain import catalogue, cli, config, errors
from posttrain.algorithms._policy_gradient import Reduction
from posttrain.commands import keys
from posttrain.errors import UserError

DOCS = Path(__file__).parent.parent / "docs"
ASKED = [
    "ppo", "reinforce", "reinforce_plus_plus", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "dpo", "ipo", "kto", "orpo", "simpo",
    "online_dpo", "reward_model", "process_reward_model", "best_of_n", "raft", "sft",
]  # fmt: skip


@pytest.fixture(scope="module")
def make() -> ModuleType:
    return load_script("docs/make_tables.py")


@pytest.fixture(scope="module")
def proofs(make: ModuleType) -> list[tuple[str, str]]:
    return make.collected()


def committed(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


STALE = "docs/{}.md is out of date: run python docs/make_tables.py"


def test_the_algorithms_page_is_generated(make: ModuleType) -> None:
    assert committed("algorithms") == make.algorithms_page(), STALE.format("algorithms")


def test_the_tables_of_toys_are_those_of_their_rows(make: ModuleType) -> None:
    pages = make.toy_pages()
    assert {page.stem for page in pages} >= {
        "results",
        "star",
        "iterate",
        "distill",
        "code",
        "dpo",
        "kto",
        "summarize",
        "r1_zero",
        "guess",
        "shop",
        "solver_critic",
    }
    for recipe, (_, figure, _) in make.TOYS.items():
        said = int(re.findall(r"[\d,]*\d(?= )", figure)[0].replace(",", ""))
        assert {row["problems"] for row in make.seeds_of(recipe)} == {said}, f"{recipe}: {figure}"
    for page in pages:
        assert page.read_text() == make.with_toys(page), STALE.format(page.stem)


def test_the_page_for_users_of_trl_is_generated_and_names_what_exists(make: ModuleType) -> None:
    assert committed("trl") == make.trl_page(), STALE.format("trl")
    known = {"tokenizer", "weights", "reward", "callback", "system"}  # arguments of pt.rl
    for kind in ("stage", "algorithm"):
        for name in catalogue.names(kind):
            for key in keys.keys_of(kind, name):
                known |= {key.name, *(f"{key.name}.{inner.name}" for inner in key.keys), *(inner.name for inner in key.keys)}
    known |= {field.name for field in dataclasses.fields(config.Settings)}
    for name, new in errors.ELSEWHERE.items():
        first = re.match(r"[\w.]+", new)
        assert new.startswith("left out") or (first and first[0] in known), f"{name}: {new}"
    losses = errors.ELSEWHERE["loss_type"]  # TRL's dapo is a mean over tokens, not the algorithm with its dynamic sampling
    assert "token_mean for its dapo" in losses and {*re.findall(r"\w+_mean", losses)} < {*get_args(Reduction)}
    for call in make.TRAINERS.values():
        function = re.match(r"pt\.(\w+)", call)
        assert function and hasattr(posttrain, function[1]), call
        assert all(name in catalogue.names("algorithm") for name in re.findall(r'algorithm="(\w+)"', call))


def test_the_advise_page_is_generated(make: ModuleType) -> None:
    assert committed("advise") == make.advise_page(), STALE.format("advise")


def test_the_page_of_data_formats_is_generated(make: ModuleType) -> None:
    assert committed("data-formats") == make.formats_page(), STALE.format("data-formats")


def test_the_laws_page_is_generated(make: ModuleType, proofs: list[tuple[str, str]]) -> None:
    assert committed("laws") == make.laws_page(proofs), STALE.format("laws")


def test_every_property_is_proven_of_every_algorithm_it_applies_to(make: ModuleType, proofs: list[tuple[str, str]]) -> None:
    missing = [f"{title} of {name}" for (name, title), cell in make.proven(proofs).items() if cell == "MISSING"]
    assert not missing, "no test shows: " + ", ".join(missing)


def test_an_empty_cell_is_detected(make: ModuleType, proofs: list[tuple[str, str]]) -> None:
    fewer = [(title, test) for title, test in proofs if not (title == "optimum" and "rloo" in test)]
    assert make.proven(fewer)["rloo", "optimum"] == "MISSING" and make.proven(proofs)["rloo", "optimum"] == "yes"
    assert "🔴 **MISSING**" in make.laws_page(fewer)


def test_an_excuse_is_not_taken_where_there_is_a_test(make: ModuleType, proofs: list[tuple[str, str]]) -> None:
    """Cells that do not apply are empty of tests: otherwise the excuse is out of date."""
    cells = make.proven(proofs)
    excused = [
        (f.name, one.title) for f in make.all_facts() for one in make.PROPERTIES if one.excused(f) and one.title != "peer"
    ]
    assert excused and not [key for key in excused if cells[key] == "yes"]


def test_whom_a_test_is_about(make: ModuleType) -> None:
    names = catalogue.names("algorithm")
    about = make.algorithms_of
    assert about("tests/algorithms/test_grpo.py::test_contract", names) == {"grpo"}
    assert about("tests/laws/test_kl.py::test_signs[k3]", names) == set()
    assert about("tests/laws/test_x.py::test_budgets[dr_grpo-kl=k2-0.5]", names) == {"dr_grpo"}
    assert about("tests/laws/test_x.py::test_linear[3.0-ppo]", names) == {"ppo"}


def test_facts_are_read_from_the_classes(make: ModuleType) -> None:
    facts = {f.name: f for f in make.all_facts()}
    assert [f for f, one in facts.items() if "critic" in one.models] == ["ppo"]
    assert facts["ppo"].models == "3: policy, reference, critic; 4 with a reward model"
    assert facts["ppo"].anchor == "beta = 0.2 in the reward" and facts["grpo"].anchor == "beta = 0.04 in the loss"
    assert facts["online_dpo"].anchor == "beta = 0.1 in the loss" and facts["ipo"].anchor == "tau = 0.1 in the loss"
    assert facts["dapo"].anchor == "none; beta > 0 adds one" and facts["simpo"].anchor == "none"
    assert facts["kto"].reward == "good or bad, one by one" and facts["sft"].reward == "none: demonstrations"
    assert {one.family for one in facts.values()} == set(make.FAMILIES)


def test_an_algorithm_must_say_when_to_use_it(make: ModuleType) -> None:
    silent = type("Silent", (algorithm_class("sft"),), {"__doc__": "L = sum_t w_t. Useful."})
    with pytest.raises(UserError, match="silent: the docstring must say when to use it"):
        make.Facts("silent", silent).use


def test_list_has_every_algorithm_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "algorithms", "--json"]) == 0
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["algorithms"]}
    assert set(ASKED) <= set(found)
    assert all(entry["summary"] and entry["paper"] for entry in found.values())
