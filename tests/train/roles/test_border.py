"""Who may name a role: the roles themselves, the algorithms that ask for them and the stages that build them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import posttrain
from posttrain.train.roles.base import Role
from posttrain.train.roles.critic import Critic
from posttrain.train.roles.pretraining import Pretraining
from posttrain.train.roles.proximal import Proximal
from posttrain.train.roles.reference import Reference
from posttrain.train.roles.teacher import Teacher

PACKAGE = Path(posttrain.__file__).parent
ROLES: list[type[Role]] = [Critic, Pretraining, Proximal, Reference, Teacher]
NAME = re.compile(rf"(?i)({'|'.join(role.name for role in ROLES)})(_T)?$|({'|'.join(c for r in ROLES for c in r.columns)})$")
FILES = [
    path
    for place in ("train/*.py", "monitor/*.py", "loop.py", "collect.py", "engine/*.py")
    for path in sorted(PACKAGE.glob(place))
]
OTHER = "ImplicitRating"  # is about the reference of a model that DPO tuned, which is a reward's and no role


def named(source: str) -> Iterator[str]:
    """Identifiers and strings of a program that name a role; prose (docstrings, messages, comments) may."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ClassDef) and node.name == OTHER)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            words = [*(alias.name for alias in node.names), *(getattr(node, "module", None) or "").split(".")]
        else:
            values = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "value")]
            words = [value for value in values if isinstance(value, str)]
        yield from (word for word in words if NAME.match(word))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_the_trainer_and_the_loop_name_no_role(path: Path) -> None:
    assert list(named(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "x = trainer.critic",
        'if "reference" in roles: pass',
        "batch.value_T",
        "f(proximal_T=1)",
        "from a.roles.teacher import Teacher",
    ],
)
def test_a_name_is_found(source: str) -> None:
    assert list(named(source))


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_one_file_of_its_name(role: type[Role]) -> None:
    assert role.__module__ == f"posttrain.train.roles.{role.name}"
