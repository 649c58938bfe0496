"""The lessons: solutions pass, exercises as given do not, and typical mistakes are answered with a line that helps."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from scripts_for_tests import load_script

from posttrain.ops.advantages import generalised_advantages, group_advantages
from posttrain.ops.kl import kl_estimate
from posttrain.ops.preference import sigmoid_loss

LESSONS = Path(__file__).parents[2] / "lessons"


checker = load_script("lessons/check.py", "lesson_check")


@pytest.mark.parametrize("name", checker.LESSONS)
def test_the_solution_passes_and_the_exercise_does_not(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert checker.main([name, str(LESSONS / "solutions" / f"{name}.py")]) == 0
    said = capsys.readouterr().out
    assert said.endswith(f"{name} is solved\n") and said.count("ok ") >= 2
    assert checker.main([name, str(LESSONS / f"{name}.py")]) == 1
    (line,) = capsys.readouterr().out.splitlines()[-1:]
    assert line.startswith("wrong  ") and len(line) < 400
    assert f"check.py {name} FILE" in (LESSONS / f"{name}.py").read_text()


def test_every_lesson_has_its_files() -> None:
    assert {path.stem for path in LESSONS.glob("*.py")} - {"check"} == set(checker.LESSONS)
    assert {path.stem for path in (LESSONS / "solutions").glob("*.py")} == set(checker.LESSONS)


GRPO = "from statistics import *\ndef advantages(r):\n    "
KL = "import math\ndef kl(p, q):\n    "
REWARD = "import re\ndef reward(prompt, response, answer):\n    "
GAE = "def gae(r, v, g, l):\n    a, n, out = 0.0, 0.0, []\n    for x, y in zip(r[::-1], v[::-1]):\n        "
DPO = "import math\ndef s(x): return 1 / (1 + math.exp(-x))\ndef dpo_loss(c, r, rc, rr, beta):\n    "
MASK = "def policy_loss(p, a, m):\n    t = [(-x * z, w) for y, z, v in zip(p, a, m) for x, w in zip(y, v)]\n    "
SCORED = "s = [x for x in r if x is not None]\n    "
MISTAKES = [
    ("grpo_advantage", GRPO + "return r", "Subtract the mean"),
    ("grpo_advantage", GRPO + "return [x - mean(r) for x in r]", "still to be divided"),
    ("grpo_advantage", GRPO + "return [(x - mean(r)) / (pstdev(r) + 1e-4) for x in r]", "asks for n - 1"),
    ("grpo_advantage", GRPO + "return [(x - mean(r)) / stdev(r) for x in r]", "Add 1e-4"),
    (
        "grpo_advantage",
        GRPO + "return [(x - sum(r) / len(r)) / (stdev(r, sum(r) / len(r)) + 1e-4) for x in r]",
        "raised TypeError",
    ),
    (
        "grpo_advantage",
        GRPO + "r = [x or 0.0 for x in r]\n    return [(x - mean(r)) / (stdev(r) + 1e-4) for x in r]",
        "not one with reward 0",
    ),
    (
        "grpo_advantage",
        GRPO + SCORED + "return [0 if x is None else (x - mean(s)) / (stdev(s) + 1e-4) for x in r]",
        "raised StatisticsError",
    ),
    ("kl_bug", KL + "return p - q", "That is k1"),
    ("kl_bug", KL + "return (p - q) ** 2 / 2", "That is k2"),
    ("kl_bug", KL + "return (q - p) - math.exp(q - p) + 1", "never below 0"),
    ("robust_reward", REWARD + "return float(response.strip() == answer)", "pays 0 for working and an answer"),
    ("robust_reward", REWARD + "return float(f'Answer: {answer}' in response.replace('  ', ' '))", "the last one counts"),
    ("robust_reward", REWARD + "return float(re.findall(r'\\d+', response or '0')[-1:] == [answer])", "all small numbers"),
    ("robust_reward", REWARD + "return 2.0", "pays 2 for"),
    ("gae", GAE + "out.append(x + g * n - y); n = y\n    return out[::-1]", "error of one step"),
    ("gae", GAE + "a = x + g * a; out.append(a - y)\n    return out[::-1]", "lam = 1 alone"),
    ("gae", GAE + "a = x + g * n - y + l * a; n = y; out.append(a)\n    return out[::-1]", "gamma is missing"),
    ("gae", GAE + "a = x + g * n - y + g * l * a; n = y; out.append(a)\n    return out", "from the last token to the first"),
    ("gae", GAE + "a = x + g * n - y + g * l * a; n = y; out.append(a + y)\n    return out[::-1]", "These are returns"),
    ("dpo_loss", DPO + "return -math.log(s((c - rc) - (r - rr)))", "beta is missing"),
    ("dpo_loss", DPO + "return -math.log(s(beta * (c - r)))", "without the reference"),
    ("dpo_loss", DPO + "return -math.log(s(beta * ((r - rr) - (c - rc))))", "swapped"),
    ("dpo_loss", DPO + "return -math.log(s(beta * ((c - rc) - (r - rr))))", "exp overflows"),
    ("mask", MASK + "return sum(x for x, _ in t) / len(t)", "The mask is not used"),
    ("mask", MASK + "return sum(x * w for x, w in t) / len(t)", "divides by all tokens"),
    ("mask", MASK + "return sum(x * w for x, w in t) / max(1, sum(w for _, w in t))", "0 * nan is nan"),
    ("mask", MASK + "return sum(x for x, w in t if w) / sum(w for _, w in t)", "raised ZeroDivisionError"),
    ("mask", "def policy_loss(p, a, m):\n    pass", "is there a `return`?"),
    ("mask", "x = 1", "has no function policy_loss"),
    ("mask", "1 / 0", "cannot be run: ZeroDivisionError"),
    ("mask", "raise SystemExit", "cannot be run: SystemExit"),
    ("kl_bug", KL + "raise SystemExit", "raised SystemExit"),
]


@pytest.mark.parametrize(("name", "source", "hint"), MISTAKES, ids=[f"{name}: {hint}" for name, _, hint in MISTAKES])
def test_a_typical_mistake_is_named(
    name: str, source: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(source)
    assert checker.main([name, str(mine)]) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("wrong  ") and hint in line, line


def test_an_unknown_lesson_or_file_is_one_line_and_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["gaee", "x.py"], "no lesson 'gaee'"),
        (["gae", "absent.py"], "no file absent.py"),
        ([], "grpo_advantage"),
    ):
        assert checker.main(words) == 2
        assert said in (out := capsys.readouterr().err) and "kl_bug" in out


def test_an_endless_loop_is_ended_and_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checker.bounded(["kl_bug", str(LESSONS / "solutions/kl_bug.py")]) == 0 and "is solved" in capfd.readouterr().out
    mine = tmp_path / "mine.py"
    mine.write_text("def kl(*given):\n    while True:\n        pass")
    monkeypatch.setattr(checker, "SECONDS", 1.0)
    assert checker.bounded(["kl_bug", str(mine)]) == 1
    line = capfd.readouterr().out.splitlines()[-1]
    assert line == f"wrong  the check that comes next did not end within 1 s; look for an endless loop in {mine}"


def test_the_solutions_are_what_the_package_computes() -> None:
    def solution(name: str) -> ModuleType:
        return load_script(f"lessons/solutions/{name}.py", f"lesson_{name}")

    rewards, valid = torch.tensor([0.3, 1.0, 9.0, 0.0]), torch.tensor([True, True, False, True])
    ours = group_advantages(rewards, valid, torch.zeros(4, dtype=torch.long))
    assert solution("grpo_advantage").advantages([0.3, 1.0, None, 0.0]) == pytest.approx(ours.tolist(), rel=1e-5)
    p, q = math.log(0.3), math.log(0.8)
    assert solution("kl_bug").kl(p, q) == pytest.approx(kl_estimate("k3", torch.tensor(p), torch.tensor(q)).item(), rel=1e-5)
    paid, values = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.2, 0.9, 0.4])
    one = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long), 1
    theirs = generalised_advantages(paid, values, *one, 0.9, 0.7)[0]
    assert solution("gae").gae(paid.tolist(), values.tolist(), 0.9, 0.7) == pytest.approx(theirs.tolist(), rel=1e-5)
    loss = sigmoid_loss(torch.tensor([0.3 * (1.0 - -2.0)]))
    assert solution("dpo_loss").dpo_loss(-1.0, -5.0, -2.0, -3.0, 0.3) == pytest.approx(loss.item(), rel=1e-5)
