"""Writes the generated pages: algorithms.md from the classes, advise.md from commands/advise.py, trl.md from errors.py,
data-formats.md from posttrain/data/formats.py, laws.md from the tests; and the tables of toys over three seeds, in results.md and in
the recipes' pages, from benchmarks/results/recipes.json.

python docs/make_tables.py            # writes all of them; tests/test_tables.py fails where a committed page is another one
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from posttrain import catalogue
from posttrain.algorithms.base import Algorithm
from posttrain.commands import advise
from posttrain.data.formats import DEMONSTRATIONS, PREFERENCES
from posttrain.errors import ELSEWHERE, UserError, called_here

HERE = Path(__file__).parent
ROOT = HERE.parent
GENERATED = "<!-- made by docs/make_tables.py; do not edit -->"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


# --- algorithms.md ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """What can be said of an algorithm from its class, with its default settings."""

    name: str
    kind: type[Algorithm]

    @property
    def default(self) -> Algorithm:
        return self.kind()

    @property
    def source(self) -> str:
        """The code of the class and of what it inherits from, below the contract."""
        return "".join(inspect.getsource(c) for c in self.kind.__mro__ if issubclass(c, Algorithm) and c is not Algorithm)

    @property
    def family(self) -> str:
        if self.kind.learns_from == "rollouts" and self.kind.unit == "sequence":
            return "Policy gradients" if "advantage_T" in self.source else "From the best samples"
        families = {"demonstrations": "From demonstrations", "rankings": "Reward models", "step_labels": "Reward models"}
        return families.get(self.kind.learns_from, "From preferences")

    @property
    def reward(self) -> str:
        if "teacher" in self.default.roles:
            return "a teacher's distribution, and any reward"
        if self.default.branches.completions:
            return "the task's own score"
        if self.kind.learns_from == "rollouts":
            pairs = self.kind.unit == "pair"
            return "any reward, turned into pairs" if pairs else "any reward"
        return {
            "rankings": "rankings and pairs", "step_labels": "labels of steps", "pairs": "pairs",
            "labels": "good or bad, one by one", "demonstrations": "none: demonstrations",
        }[self.kind.learns_from]  # fmt: skip

    @property
    def anchor(self) -> str:
        """Where the reference enters, and how strongly; or whether it can."""
        inner = getattr(self.default, "loss", self.default)
        names = [f.name for f in fields(inner)] if is_dataclass(inner) else []
        strength = next((n for n in ("beta", "tau") if n in names), "")
        if "reference" in self.default.roles:
            place = (
                "in the loss"
                if self.kind.learns_from != "rollouts" or self.kind.unit == "pair"
                else f"in the {getattr(inner, 'kl_in', 'reward')}"
            )
            return f"{strength} = {getattr(inner, strength):g} {place}"
        return "none; beta > 0 adds one" if strength and can_anchor(self.kind) else "none"

    @property
    def models(self) -> str:
        """Besides what scores: a reward model, where it is the reward, is one more."""
        first = "reward model" if self.kind.trains == "scorer" else "policy"
        names = [first, *(n for n in ("reference", "critic", "teacher") if n in self.default.roles)]
        rated = self.kind.learns_from == "rollouts" and not self.default.branches.completions
        more = f"; {len(names) + 1} with a reward model" if rated else ""
        return f"{len(names)}: {', '.join(names)}{more}"

    @property
    def use(self) -> str:
        """The sentence of the docstring that says when to use it."""
        text = " ".join((inspect.getdoc(self.kind) or "").split())
        found = re.search(r"\bUse it\b(.*?[a-z)])(?:\.(?= |$)|: (?=[a-z]))", text)
        if found is None:
            raise UserError(f"{self.name}: the docstring must say when to use it, in a sentence that begins with 'Use it'")
        return found.group(1).strip()


def can_anchor(kind: type[Algorithm]) -> bool:
    """Whether some beta makes the algorithm ask for a reference."""
    return any(f.name == "beta" for f in fields(kind)) and "reference" in kind(beta=0.1).roles  # type: ignore[call-arg]


def all_facts() -> list[Facts]:
    return [Facts(name, catalogue.load("algorithm", name, Algorithm)) for name in catalogue.names("algorithm")]


CONVERGENCE = """
RL with a KL penalty, E[r] - beta KL(pi || ref), has one optimum: pi* = ref exp(r / beta) / Z. On problems small enough to be
enumerated, with exact expectations and with the reward as it is and flipped, `tests/laws/test_optimum.py` finds:

- **KL in the reward** (every policy gradient with `kl_in=reward`, and ppo): pi*. There all advantages are 0, so no scale,
  reduction or clip can move it.
- **KL in the loss, unbiased baseline** (rloo, remax, vineppo, reinforce, and ppo without whitening, with `kl=corrected` or `k2`),
  responses of one token: pi*.
- **KL in the loss, mean of the group as the baseline** (grpo with `scale=none`, dr_grpo): pi* of beta G / (G - 1), because a
  sample is part of its own baseline, which shrinks the gradient of the reward and not that of the KL.
- **grpo with `kl=k3`** (the paper's): pi_a = beta ref_a / (beta + c - g_a) for the gain g_a of a response, the optimum under
  the forward KL. Its tails are heavier: bad responses are kept.
- **grpo divided by the std** with the KL in the loss: the gain of a response is how often it beats the others, not by how
  much; a reward 7 times as large has the same optimum.
- **KL in the loss, several tokens**: a token pays for its own divergence and not for that of where it leads, so early tokens
  favour branches that move far from the reference. With the KL in the reward this does not happen.
- **dpo** on Bradley-Terry pairs, **online_dpo** with `loss.labels=soft`: pi*. With verdicts that never err both run away to
  the best response. **dpo** with `form=robust` on labels of which the share `label_smoothing` was exchanged: pi* too.
  **xpo** with `loss.labels=soft` ends near pi*, on the side away from the reference: by alpha, exactly at pi* with alpha = 0.
- **ipo** with `length=sum`: ref exp(p / tau) / Z with p the chance to beat a response of the data; finite also where verdicts
  never err.
- **No anchor** (beta = 0, best_of_n, raft, simpo on verdicts that never err): the best response takes all. **orpo** orders
  responses by the reward and keeps more than one; **kto** keeps the good ones, as labels say no more.
- **distillation**, whatever its divergence: the teacher, where the student can be it. With `reward_weight` w and the reverse KL,
  exact or sampled, responses of one token: q exp(w r) / Z, the teacher in the place of the reference.
- **reward_model**: the reward behind the pairs, up to a constant. **process_reward_model**: the log-odds of the labels.
  **sft**: the frequencies of its demonstrations.
"""
OPTIONS = """
Methods of papers that are an option of the algorithms above, not an algorithm of their own:

| method | paper | where |
|---|---|---|
| dual clip | arXiv:1912.09729 | `dual_clip=3` of ppo and of every policy gradient with a clipped objective |
| IcePop | arXiv:2510.18855 | `correction=decoupled mask_low=0.5 mask_high=5` of ppo and of every policy gradient |
| rewards normalised one by one (GDPO) | arXiv:2601.05242 | `parts` and `part_weights` of grpo |
| pass@k advantages | arXiv:2508.10751 | `pass_k` of grpo |
| lambda by the length of a response (VAPO) | arXiv:2504.05118 | `lam_alpha=0.05 lam=1` of ppo |
| KL in the loss of PPO | - | `kl_in=loss` of ppo |
| values of steps in PPO | - | `supervision=process` or `both` of ppo: each enters GAE at the token its step ends in |
| a reference that moves (TR-DPO) | arXiv:2404.09656 | `reference_ema`, `reference_every` of rl, preference and offline_rl stages |
| group algorithms on saved groups | - | the stage `offline_rl` ([data-formats.md](data-formats.md)) |

TRPO (arXiv:1502.05477) is another optimizer, and therefore not in the tables above. `posttrain/train/trust_region.py`
takes its step for a plain module of at most 5,000,000 weights. It refuses larger ones, because an update is a dozen
backward passes through the graph of a gradient. `benchmarks/trpo.py` compares it with REINFORCE and PPO
([results.md](results.md#reinforce-trpo-and-ppo-over-updates)).

Of VAPO, clip-higher (ppo has one clip for both sides) and the likelihood term on right answers are left out.
"""
FAMILIES = {
    "Policy gradients": "They sample from the policy, so they explore. Most take any reward: a task's score, a verifier, a reward model"
    " or a judge.",
    "From the best samples": "They sample from the policy, keep the best responses, and imitate these.",
    "From preferences": "`online_dpo` and `xpo` sample from the policy and compare its responses by a reward. The others learn from"
    " given responses and do not explore.",
    "Reward models": "They learn to score responses, from given data. They train no policy.",
    "From demonstrations": "It imitates given responses and does not explore.",
}


def algorithms_page() -> str:
    found = all_facts()
    entries = {entry.name: entry for entry in catalogue.describe("algorithm")}
    lines = [
        GENERATED,
        "# Algorithms",
        "",
        *wrapped(
            f"This page lists the {len(found)} algorithms, when to use each, and what it needs with its default settings. Each is one"
            " file in `posttrain/algorithms/`. [advise.md](advise.md) helps you choose, [laws.md](laws.md) shows which properties are"
            " tested, and [own-algorithm.md](own-algorithm.md) shows how to write your own."
        ),
        "",
        *wrapped(
            'The column "models in memory" counts models of the policy\'s size while it trains. On the command line,'
            " `rl.algorithm=NAME` sets the algorithm of a stage `rl`, and `rl.algorithm.KEY=VALUE` one of its settings"
            " ([reference/algorithms.md](reference/algorithms.md))."
        ),
    ]
    heads = ["name", "use it", "learns from", "KL anchor", "models in memory", "paper"]
    for family, text in FAMILIES.items():
        rows = [
            [f"[{f.name}](../{entries[f.name].file})", f.use, f.reward, f.anchor, f.models, f.kind.paper]
            for f in found if f.family == family
        ]  # fmt: skip
        lines += ["", f"## {family}", "", *wrapped(text), "", *table(heads, rows)]
    lines += ["", "## Options and relatives", "", *OPTIONS.strip().splitlines()]
    lines += ["", "## Where they converge", "", *CONVERGENCE.strip().splitlines()]
    return "\n".join(lines) + "\n"


# --- advise.md -------------------------------------------------------------------------------------------------------------------


def advise_page() -> str:
    lines = [
        GENERATED,
        "# Which method for my goal",
        "",
        "This page says which method fits your goal, your data and your machine. `posttrain advise` answers the same for one case,",
        "with its reasons and a recipe:",
        "",
        "```sh",
        "posttrain advise 'math and reasoning' --have verifier --compute laptop",
        "```",
        "",
        "The recipe runs as it is printed. It uses shipped tasks and a tiny model in place of yours; the comments at its top say how",
        "to replace them. `--config` prints the recipe alone.",
        "",
        *table(["you have (`--have`)", "that is"], [[f"`{kind}`", text] for kind, text in advise.DATA.items()]),
        "",
        "In the tables below, `sft -> dpo (2)` means: first SFT, then DPO, with at most two models in memory.",
    ]
    for name, goal in advise.GOALS.items():
        signals = ", ".join(s for s in goal.signals if s != "demonstrations")
        book = goal.textbook
        lines += ["", f"## {sentence(goal.title)}", ""]
        lines += wrapped(f"{sentence(goal.reason)}. If you have several signals, use the first of these: {signals}.")
        lines += ["", *table(["you have", *(machine.title for machine in advise.COMPUTE.values())], advice_rows(name)), ""]
        lines += wrapped(f"With {book.needs}, textbooks advise: {book.says}. Why the table differs, by [method](#the-methods):")
        lines += [""] + [line for m, reason in book.differs.items() for line in wrapped(f"- `{m}`: {reason}.")]
        lines += ["", "Pitfalls:", ""] + [line for pitfall in goal.pitfalls for line in wrapped(f"- {sentence(pitfall)}.")]
    rows = [
        [f"`{name}`", " -> ".join(s if s == a else f"{s} ({a})" for s, a in m.stages), f"{len(m.models)}: {', '.join(m.models)}",
         m.why]
        for name, m in advise.METHODS.items()
    ]  # fmt: skip
    lines += ["", "## The methods", "", *table(["method", "stages", "models in memory", "why"], rows), ""]
    lines += wrapped(
        "If there are demonstrations, an sft stage comes first. The exceptions are `imitate`, which is that stage, and `orpo`,"
        " which needs none."
    )
    lines += ["", "What goes wrong with each, and what to do:", ""]
    lines += [line for name, m in advise.METHODS.items() for line in wrapped(f"- `{name}`: {'; '.join(m.pitfalls)}.")]
    return "\n".join(lines) + "\n"


def sentence(text: str) -> str:
    """The text with a capital at its beginning, unless it begins with a setting or a command."""
    return text if text.startswith(("posttrain ", "lora")) else text[0].upper() + text[1:]


def wrapped(text: str) -> list[str]:
    """The lines of a paragraph or of an item of a list."""
    return textwrap.wrap(
        text, 118, subsequent_indent="  " * text.startswith("- "), break_long_words=False, break_on_hyphens=False
    )


def advice_rows(goal: str) -> list[list[str]]:
    """For each signal alone, with demonstrations before it, what is advised on each kind of machine."""
    rows = []
    for kind in ("nothing", "demonstrations", *(k for k in advise.GOALS[goal].signals if k != "demonstrations")):
        have = [kind] if kind in ("nothing", "demonstrations") else ["demonstrations", kind]
        found = [advise.advise(goal, have, compute) for compute in advise.COMPUTE]
        cells = [" -> ".join(a for _, a in one.chain) or one.reasons[0].split(":")[0] for one in found]
        counts = [f" ({len(one.models)})" if one.models else "" for one in found]
        rows.append([" and ".join(have), *(cell + count for cell, count in zip(cells, counts, strict=True))])
    return rows


# --- trl.md ----------------------------------------------------------------------------------------------------------------------

TRAINERS = {
    "SFTTrainer": "pt.sft(model=..., data=...)",
    "RewardTrainer": "pt.reward_model(model=..., data=...)",
    "DPOTrainer": "pt.dpo(model=..., data=...)",
    "KTOTrainer": 'pt.preference(algorithm="kto", model=..., data=...).train()',
    "ORPOTrainer": 'pt.preference(algorithm="orpo", model=..., data=...).train()',
    "GRPOTrainer": "pt.grpo(model=..., prompts=..., reward=...)",
    "RLOOTrainer": 'pt.rl(algorithm="rloo", model=..., prompts=..., reward=...).train()',
    "PPOTrainer": "pt.ppo(model=..., prompts=..., reward=...)",
    "XPOTrainer": 'pt.rl(algorithm="xpo", model=..., prompts=..., reward=...).train()',
    "GKDTrainer": 'pt.rl(algorithm="distillation", teacher=..., model=..., task=...).train()',
    "OnlineDPOTrainer": 'pt.rl(algorithm="online_dpo", model=..., prompts=..., reward=...).train()',
}


def trl_page() -> str:
    lines = [
        GENERATED,
        "# Coming from TRL",
        "",
        "This page maps TRL's trainers and arguments to posttrain's. A trainer with its config becomes one call, or one stage of a",
        "recipe ([python.md](python.md)). Your data stays as it is ([data-formats.md](data-formats.md)), and reward functions over",
        "lists work unchanged.",
        "",
        "```text",
        "# TRL",
        'settings = GRPOConfig(output_dir="out", num_generations=8, learning_rate=1e-6, max_completion_length=256, max_steps=100)',
        'trainer = GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", args=settings, train_dataset=rows, reward_funcs=right)',
        "trainer.train()",
        "",
        "# posttrain",
        "run = pt.grpo(",
        '    "Qwen/Qwen2.5-0.5B-Instruct", prompts=rows, reward=right, group=8, lr=1e-6, max_new_tokens=256, steps=100, out="out"',
        ")",
        "```",
        "",
        "## Trainers",
        "",
    ]
    lines += table(["TRL", "here"], [[f"`{trainer}`", f"`{call}`"] for trainer, call in TRAINERS.items()])
    lines += [
        "",
        "## Arguments",
        "",
        "`beta`, `temperature`, `top_p`, `top_k` and `seed` keep their names. If you pass one of the names in the first column, the",
        "error gives the hint in the second. A few names are those of other libraries. Defaults differ from TRL's:",
        "[reference/stages.md](reference/stages.md) and [reference/algorithms.md](reference/algorithms.md) list every key.",
        "",
    ]
    named: dict[str, list[str]] = {}
    for name in ELSEWHERE:
        if called := called_here(name):
            named.setdefault(replacement(name, called), []).append(f"`{name}`")
    rows = [[", ".join(names), here] for here, names in named.items()]
    lines += table(["TRL", "here"], rows)
    return "\n".join(lines) + "\n"


def replacement(name: str, called: str) -> str:
    """What stands here for one of TRL's names, from the hint of the error."""
    text = called.removeprefix(f"{name} is ").removeprefix("called ")
    text = re.sub(r"\bhere\b", "", re.sub(r"^left out( here)?:", "not needed:", text))
    text = re.sub(r" +([,:(]|$)", lambda found: found[1] if found[1] != "(" else " (", text)
    text = re.sub(r"(?<![`\w./])[a-zA-Z]+(?:[_.=]\w+)+", r"`\g<0>`", text)  # keys, functions
    return text if text.startswith("not needed") else re.sub(r"^[a-z0-9]+\b(?! and)", r"`\g<0>`", text)


# --- laws.md ---------------------------------------------------------------------------------------------------------------------


def everyone(facts: Facts) -> str:
    return ""


def with_advantages(facts: Facts) -> str:
    return "" if facts.family == "Policy gradients" else "it has no advantages"


def with_a_reward(facts: Facts) -> str:
    return "" if facts.kind.learns_from == "rollouts" else "no rollouts, no rewards"


def with_a_sign(facts: Facts) -> str:
    """Whether there is a reward or a preference that can be turned round."""
    by_name = {"sft": "demonstrations have no opposite", "process_reward_model": "labels are learned as they are"}
    return by_name.get(facts.name, "")


def in_trl(facts: Facts) -> str:
    compared = {"dpo", "kto", "reward_model", "grpo", "rloo"}
    return "" if facts.name in compared else "not compared with TRL: its own test has an independent reference"


@dataclass(frozen=True)
class Property:
    """A column: tests say with `@pytest.mark.proves(title)` that they prove it; `excused` is the reason where it does not apply."""

    title: str
    text: str
    excused: Callable[[Facts], str] = everyone


PROPERTIES = (
    Property("value", "values worked by hand, or an independent reference in NumPy"),
    Property("slope", "gradients by finite differences, of the terms and the whole way from the weights"),
    Property("policy gradient", "a fresh policy follows the policy gradient", with_advantages),
    Property("unscored", "what could not be scored has no vote and no gradient", with_a_reward),
    Property("masks", "masked tokens change no loss, weight, figure or gradient"),
    Property("extremes", "no log-ratio or score gives NaN"),
    Property("layout", "no micro-batch, order or packing changes a gradient"),
    Property("coefficients", "every number among its settings changes the gradient"),
    Property("optimum", "where it converges to on an enumerable problem"),
    Property("flipped", "with the reward flipped it goes the other way", with_a_sign),
    Property("learns", "it learns on a tiny task"),
    Property("refusals", "bad settings are refused by name"),
    Property("peer", "the same loss and gradient as TRL's", in_trl),
)
Proof = tuple[str, str]  # the title of a property, and the id of a test: FILE::FUNCTION[CASE]
COLLECT = """
import pytest
class Plugin:
    def pytest_collection_finish(self, session):
        for item in session.items:
            for title in (title for marker in item.iter_markers("proves") for title in marker.args):
                print(f"proof|{title}|{item.nodeid}")
raise SystemExit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "tests/laws", "tests/algorithms"], [Plugin()]))
"""


def collected() -> list[Proof]:
    """What marked tests prove, as pytest finds them; and, by what they import, those against peers."""
    done = subprocess.run([sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, timeout=300)
    rows = [line.split("|", 2) for line in done.stdout.splitlines() if line.startswith("proof|")]
    proofs = [(title, test) for _, title, test in rows]
    if done.returncode != 0 or not proofs:
        raise RuntimeError(f"the tests could not be collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    unknown = {title for title, _ in proofs} - {one.title for one in PROPERTIES}
    if unknown:
        raise UserError(f"tests prove properties that are not in the table: {', '.join(sorted(unknown))}")
    # peers may not be installed, and then pytest finds nothing in their files
    for path in sorted((ROOT / "tests" / "peers").glob("test_*.py")):
        modules = [n.module or "" for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
        names = [m.rpartition(".")[2] for m in modules if m.startswith("posttrain.algorithms.")]
        known = [name for name in names if name in catalogue.names("algorithm")]
        proofs += [("peer", f"tests/peers/{path.name}::imports[{name}]") for name in known]
    return proofs


def algorithms_of(test: str, names: Sequence[str]) -> set[str]:
    """The algorithms that a test is about: that of its file, or those in the words of its case."""
    own = re.match(r"tests/algorithms/test_(\w+)\.py", test)
    if own:
        return {own.group(1)} & set(names)
    case = re.search(r"\[(.*)\]", test)
    function = test.partition("::")[2].partition("[")[0]
    words = set(case.group(1).split("-")) if case else set()
    return {name for name in names if name in words or function.startswith(f"test_{name}_")}


def proven(proofs: Sequence[Proof]) -> dict[tuple[str, str], str]:
    """(algorithm, property) -> yes, MISSING, or a reason in brackets."""
    found = all_facts()
    names = [f.name for f in found]
    shown = {(name, title) for title, test in proofs for name in algorithms_of(test, names)}
    cells = {}
    for f in found:
        for one in PROPERTIES:
            reason = one.excused(f)
            cells[f.name, one.title] = "yes" if (f.name, one.title) in shown else f"({reason})" if reason else "MISSING"
    return cells


def laws_page(proofs: Sequence[Proof]) -> str:
    cells = proven(proofs)
    names = list(dict.fromkeys(name for name, _ in cells))
    reasons = list(dict.fromkeys(cell for cell in cells.values() if cell.startswith("(")))
    marks = {reason: f"n/a {number}" for number, reason in enumerate(reasons, 1)} | {"yes": "yes", "MISSING": "🔴 **MISSING**"}
    lines = [
        GENERATED,
        "# Which property is tested of which algorithm",
        "",
        "This page shows which properties of each algorithm a test proves. It is generated from the tests in `tests/laws` and",
        "`tests/algorithms` that are marked `proves`, and from `tests/peers`. A test fails while a cell is missing. The properties:",
        "",
    ]
    lines += [f"- **{one.title}**: {one.text}" for one in PROPERTIES]
    rows = [[name, *(marks[cells[name, one.title]] for one in PROPERTIES)] for name in names]
    lines += ["", *table(["algorithm", *(one.title for one in PROPERTIES)], rows), "", "Not applicable:", ""]
    return "\n".join(lines + [f"{number}. {reason[1:-1]}" for number, reason in enumerate(reasons, 1)]) + "\n"


# --- data-formats.md -------------------------------------------------------------------------------------------------------------

FORMATS_TEXT = """
This page lists the rows that posttrain trains on. Each line of a JSONL file is one row; this one is enough for SFT:

```json
{"messages": [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]}
```

Files may be JSONL, a JSON list, CSV (also with semicolons or tabs) or TSV, all also gzipped, or parquet; empty rows are skipped. In
Python, rows may also be a list of dicts, a `datasets.Dataset` or a pandas table. `posttrain list formats` prints the formats
below, with `--json` for programs.

## How rows are recognised

posttrain recognises a row by its columns. Rows to imitate may have different formats in one file; preferences of one file
have one format. A row of unknown format is refused before the first step. The error names the file, the line, the columns
and the nearest format:

    chats.jsonl line 1: a row of question, answer has no format that is read here; nearest is prompt_completion, with prompt and
    completion: rename question to prompt, answer to completion; or give columns={prompt: question, completion: answer}; see
    'posttrain list formats'

- `columns` says which columns a file has in place of these, so that it need not be rewritten: in Python
  `pt.dpo(model, "pairs.csv", columns={"prompt": "question", "chosen": "better", "rejected": "worse"})`, in a preference or
  reward_model stage `columns: {prompt: question, chosen: better, rejected: worse}`, and in an sft stage with each file:
  `data: [{file: chats.csv, columns: {prompt: question, completion: reply}}]`. The tasks `jsonl` and `prompts` have the keys
  `question` and `answer` for this.
- A table's first line names its columns. If it is a row, the error shows the names that were read and says so.
- The data report names columns that are not read, and the lines of rows that are kept but may be a mistake: an empty
  prompt or answer, an answer that begins with its prompt, messages as text in place of a list, and a pair or label whose
  opposite is in an earlier row. It also says where no answer ends with an end token. Rows that teach nothing (responses that
  are equal or empty, scores that tie) are left out of preferences, with their lines.
- Columns that other trainers use and posttrain does not (`images`, `functions`, `history`, `weight`, ...) are refused unless
  they are empty: without them the model would learn to answer without information that it needs.
- Null values count as absent, also inside messages, tool calls and tools: parquet and `datasets` give each call the
  arguments of all. To keep a null argument, write `arguments` as JSON text.
- A single row is enough for sft, preference and reward_model. With a single prompt, nothing is held out.

## How long a stage trains, and what it holds out

- `steps` or `epochs` sets the length of training. `sft.epochs=3` is three passes over the rows that are not held out, and
  `posttrain plan` shows the number of steps.
- `batch` is the number of rows per step; with `epochs`, at most the number of rows.
- `held_out` is the share of prompts kept for evaluation (0: none). An sft stage measures their loss before the first step,
  every `evaluate_every` steps and at the end.
- `max_length` limits the rows of a preference or reward_model stage; the default is the model's number of positions.
"""


GROUPS_TEXT = """
## Saved groups: offline_rl

An `offline_rl` stage trains a group algorithm (grpo, rloo, sapo, ...) on completions that were sampled and scored earlier.
It samples nothing. A line is a prompt (text or messages) with its responses and their rewards; the reward of a response
that could not be scored is null.

```json
{"prompt": "12+34=", "responses": ["46", "45"], "rewards": [1, 0], "logprobs": [[-0.1, -0.3, -0.2], [-0.1, -2.0, -0.2]]}
```

| field | meaning |
|---|---|
| `logprobs` | the log-prob of each token when it was sampled, including the token that ends the response |
| `response_ids` | the sampled tokens, if they differ from the tokenizer's encoding of the text |
| `temperature` | the sampling temperature |

With log-probs, the importance ratio is computed against them, and the algorithm's `clip_low`, `clip_high`, `correction`,
`drop` and `mask_high` apply. Without them there is no off-policy correction: each response counts as a sample of the
current policy, and the run says so.

A file of rollouts that a run kept, `RUN/rollouts/STAGE/step-N.jsonl`, is read together with its tokens and log-probs;
`rollouts_every` sets which steps a run keeps.
"""


def formats_page() -> str:
    lines = [GENERATED, "# Data formats", FORMATS_TEXT]
    for title, formats in (
        ("To imitate: sft, pretrain", DEMONSTRATIONS),
        ("Preferences: preference, reward_model", PREFERENCES),
    ):
        lines += [f"## {title}", ""]
        for one in formats.values():
            more = [name for name in one.optional if name not in one.example]
            optional = f" Optional: {', '.join(f'`{name}`' for name in more)}." if more else ""
            about = textwrap.fill(" ".join(f"For {one.stages}. {one.note}{optional}".split()), 120, break_on_hyphens=False)
            lines += [
                f"### `{one.name}`: {one.title}",
                "",
                about,
                "",
                "```json",
                json.dumps(one.example, ensure_ascii=False),
                "```",
                "",
            ]
    lines += [GROUPS_TEXT.strip(), ""]
    return "\n".join(lines)


# --- toys over three seeds -------------------------------------------------------------------------------------------------------

ROWS = ROOT / "benchmarks" / "results" / "recipes.json"
BEGIN, END = "<!-- toys: made by docs/make_tables.py from benchmarks/results/recipes.json -->", "<!-- end of toys -->"
# recipe: its page, the figure, who judges it
TOYS = {
    "quickstart": ("quickstart", "greedy accuracy, 1,000 sums", "exact"),
    "r1_zero": ("r1_zero", "sampled accuracy, 500 sums", "exact"),
    "iterate": ("iterate", "greedy accuracy, 1,000 sums", "exact"),
    "star": ("star", "greedy accuracy, 1,000 sums", "exact"),
    "distill": ("distill", "greedy accuracy, 1,000 sums", "exact"),
    "nanochat_rl": ("nanochat_rl", "sampled accuracy, 200 sums", "exact"),
    "process": ("process", "sampled accuracy, 200 sums, process reward", "exact"),
    "calculator": ("calculator", "sampled accuracy, 1,000 sums, with a tool", "exact"),
    "guess": ("guess", "success, 1,000 episodes", "the game"),
    "shop": ("shop", "success, 1,000 episodes", "the game"),
    "solver_critic": ("solver_critic", "success of both roles, 2,000 answers and verdicts", "exact"),
    "tictactoe": ("tictactoe", "success against the best player, 1,000 games", "the game"),
    "code": ("code", "pass@1, 50 problems, 16 programs each", "unit tests"),
    "dpo": ("dpo", "win rate against SFT, 500 answers", "annotator"),
    "iterative_dpo": ("dpo", "win rate against SFT, 500 answers", "annotator"),
    "kto": ("kto", "win rate against SFT, 500 answers", "annotator"),
    "rejection_sampling": ("rejection_sampling", "win rate against SFT, 500 answers", "annotator"),
    "best_of_n": ("rejection_sampling", "win rate against SFT, 500 answers", "annotator"),
    "summarize": ("summarize", "win rate against SFT, 1,000 posts", "held-out reader"),
    "rlaif": ("rlaif", "win rate against SFT, 1,000 posts", "simulated people, who label nothing"),
}


def seeds_of(recipe: str) -> list[dict[str, Any]]:
    """The rows of seeds 0, 1, 2."""
    rows = {row["seed"]: row for row in json.loads(ROWS.read_text())["rows"] if row["recipe"] == recipe}
    return [rows[seed] for seed in (0, 1, 2)]


def errors_of(row: dict[str, Any]) -> str:
    """By how many standard errors it moved, in bold where that is less than two."""
    found = f"{row['errors']:.0f}" if abs(row["errors"]) >= 9.95 else f"{row['errors']:.1f}"
    return f"**{found}**" if abs(row["errors"]) < 2 else found


def toys_table() -> list[str]:
    """Of results.md: a line a recipe."""
    lines = []
    for recipe, (page, figure, judge) in TOYS.items():
        rows = seeds_of(recipe)
        before = ["50"] if "win rate" in figure else [f"{100 * row['from']:.1f}" for row in rows]
        after = [f"{100 * row['to']:.1f} [{100 * row['low']:.0f}, {100 * row['high']:.0f}]" for row in rows]
        cells = (", ".join(before), ", ".join(after), ", ".join(map(errors_of, rows)))
        lines.append([f"[{recipe}](recipes/{page}.md)", figure, judge, *cells])
    return table(("recipe", "figure", "judged by", "before", "after", "standard errors"), lines)


def seeds_table(recipes: Sequence[str]) -> list[str]:
    """Of a recipe's page: a line a seed."""
    lines, machines = [], set()
    for recipe in recipes:
        for row in seeds_of(recipe):
            after = f"{100 * row['to']:.1f}% [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
            lines.append([f"`posttrain run {recipe} seed={row['seed']}`", f"{100 * row['from']:.1f}%", after, errors_of(row)])
            machines.add(f"{row['date']}, {row['machine']}")
    heads = ("command", "before", "after", "standard errors of the difference")
    command = f"`python benchmarks/recipes.py OUT --recipes {shlex.quote(','.join(recipes))} --seeds 0,1,2`"
    return [*table(heads, lines), "", f"{command}: {'; '.join(sorted(machines))}."]


def with_toys(page: Path) -> str:
    """The page, its table of toys made anew. The recipes of a recipe's page stand after the words of `BEGIN`."""
    text = page.read_text()
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    if page.stem == "results":
        return f"{before}{BEGIN}\n\n{chr(10).join(toys_table())}\n\n{END}{after}"
    named = re.match(r" <!-- (.+?) -->\n", old)
    assert named is not None, page
    return f"{before}{BEGIN}{named[0]}\n{chr(10).join(seeds_table(named[1].split(', ')))}\n\n{END}{after}"


def toy_pages() -> list[Path]:
    """Every page that has such a table."""
    return [page for page in sorted(HERE.rglob("*.md")) if BEGIN in page.read_text()]


def main() -> None:
    pages = {
        "algorithms": algorithms_page(),
        "advise": advise_page(),
        "data-formats": formats_page(),
        "trl": trl_page(),
        "laws": laws_page(collected()),
    }
    for name, text in pages.items():
        (HERE / f"{name}.md").write_text(text)
        sys.stdout.write(f"wrote docs/{name}.md\n")
    for page in toy_pages():
        page.write_text(with_toys(page))


if __name__ == "__main__":
    sys.exit(main())
