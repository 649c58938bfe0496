"""Proxy and gold against KL: the figures by hand, the rounds of comparisons, and the recipe in both of its sizes, tiny."""

from __future__ import annotations

import doctest
import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lexicon_for_tests import LetterLexicon
from material_for_tests import group, rollout, segment, small_policy

from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ppo import PPO
from posttrain.errors import UserError
from posttrain.models.save import save
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.recipes.base import Recipe
from posttrain.recipes.sentiment import sentiment
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.stages import overoptimisation
from posttrain.stages._answers import kl_to, proxy_gold_kl
from posttrain.stages._material import Data
from posttrain.stages.base import PRINTABLE, Context, Stage, run_stages
from posttrain.stages.overoptimisation import OveroptimisationStage, said, verdict
from posttrain.stages.reward_sources import RewardModels
from posttrain.stages.rl import RLStage
from posttrain.tasks import sentiment as annotator
from posttrain.tasks.reviews import Reviews
from posttrain.train.optimizer import Optimization
from posttrain.types import Group, Sampling, Score


def rated(proxy: float | None, gold: float) -> Group:
    one = rollout([segment([5, 6], False), segment([7, 8, 2], True)], 0.0)
    score = Score.failed("no") if proxy is None else Score(proxy, {"task": gold})
    return group([replace(one, score=score)])


def test_proxy_gold_and_kl_of_rated_samples() -> None:
    groups, reference = [rated(1.0, 0.2), rated(3.0, 0.6), rated(None, 0.9)], small_policy()
    found = proxy_gold_kl(groups, reference, Sampling(8))
    assert found["proxy"].value == 2.0 and found["gold"].value == pytest.approx(0.4)  # the failure is in neither
    assert found["kl"] == kl_to(groups, reference, Sampling(8))
    with pytest.raises(UserError, match="hardly any sample could be scored"):
        proxy_gold_kl([rated(None, 0.1), rated(1.0, 0.1)], reference, Sampling(8))


def points(*rows: tuple[float, float, float]) -> list[dict[str, float]]:
    return [
        {"kl": kl, "proxy": proxy, "gold": gold, "gold_low": gold - 0.049, "gold_high": gold + 0.049}
        for kl, proxy, gold in rows
    ]


def test_a_fall_counts_where_the_gold_fell_while_the_proxy_rose() -> None:
    over = verdict(points((0.0, 0.0, 0.5), (2.0, 2.0, 0.7), (9.0, 4.0, 0.4)))
    assert over["turned_down"] and over["errors"] == pytest.approx(0.3 / (0.025 * math.sqrt(2)))
    assert over["best"]["kl"] == 2.0 and over["last"]["kl"] == 9.0
    assert not verdict(points((0.0, 0.0, 0.5), (2.0, 2.0, 0.7), (9.0, 1.0, 0.4)))["turned_down"]  # the proxy fell as well
    assert not verdict(points((0.0, 0.0, 0.5), (2.0, 2.0, 0.7), (9.0, 4.0, 0.69)))["turned_down"]
    assert verdict(points((0.0, 0.0, 0.5)))["errors"] == 0.0
    assert doctest.testmod(overoptimisation).failed == 0
    line = said("rl", {**over, "points": points((0.0, 0.0, 0.5))})
    assert "best 0.700 at a KL of 2.0, then down to 0.400 (9.0)" in line and line.endswith("over-optimised")


def test_what_cannot_be_measured_is_refused() -> None:
    common: dict[str, Any] = {"name": "o", "model": "sft", "task": Reviews()}
    with pytest.raises(UserError, match="name rl stages as trained"):
        OveroptimisationStage(**common)
    with pytest.raises(UserError, match="samples must be at least 2"):
        OveroptimisationStage(**common, reward_models=("r",), samples=1)
    with pytest.raises(UserError, match="measure_problems compares reward models"):
        RLStage(**{**common, "name": "rl"}, measure_problems=10)
    with pytest.raises(UserError, match="measure_problems compares reward models"):
        RLStage(**{**common, "name": "rl"}, measure_problems=10, reward=RewardModels(models=("r",)), algorithm=GRPO(beta=0.0))


def run(recipe: Recipe, folder: Path, **changes: dict[str, Any]) -> Context:
    """Run a recipe with settings of some stages changed."""
    stages: list[Stage] = [replace(s, **changes.get(s.name, {})) for s in recipe.stages]  # type: ignore[arg-type]
    with RunWriter.create(folder, {"seed": 0}) as writer:
        context = Context(writer, seed=0, say=False, threads=1)
        run_stages(stages, context)
    return context


def check(context: Context, rounds: int) -> None:
    """What must hold of a finished run, however short."""
    found = context.result("overoptimisation")
    assert found is not None
    curves = found["curves"]
    assert list(curves) == [f"rl_{n}" for n in range(1, rounds + 1)] + [f"best of n, reward_{n}" for n in range(1, rounds + 1)]
    for n in range(1, rounds + 1):
        along, best = curves[f"rl_{n}"]["points"], curves[f"best of n, reward_{n}"]["points"]
        assert [p["step"] for p in along] == [0, 1, 2]
        assert abs(along[0]["kl"]) < 1e-3 and abs(along[-1]["kl"]) > 1e-3  # it began at the reference, and moved
        assert along[0]["gold"] == curves["rl_1"]["points"][0]["gold"]  # every round starts from the same model
        assert [p["kl"] for p in best] == pytest.approx([math.log(p["n"]) - (p["n"] - 1) / p["n"] for p in best])
        assert all(a["proxy"] < b["proxy"] for a, b in pairwise(best))
    golds = [curves[f"best of n, reward_{n}"]["points"][0]["gold"] for n in range(1, rounds + 1)]
    assert golds == [pytest.approx(golds[0])] * rounds  # the same samples, whoever orders them
    lines = [len((context.folder(f"comparisons_{n}") / "data.jsonl").read_text().splitlines()) for n in range(1, rounds + 1)]
    assert lines == sorted(set(lines))  # each holds those before it, and more
    first, last = ((context.folder(f"comparisons_{n}") / "data.jsonl").read_text() for n in (1, rounds))
    assert last.startswith(first)
    assert (context.folder("overoptimisation") / "curve.png").is_file()


def test_the_recipe_from_nothing(tmp_path: Path) -> None:
    recipe = sentiment(rounds=2, comparisons=12, fresh=4, steps=2, prompts=8, problems=12)
    short: dict[str, Any] = {"measure_problems": 12, "algorithm": PPO(beta=0.02, critic_warmup=0)}
    few = (Data(task=Reviews("any"), counts={0: 100}),)
    fast = {"steps": 25, "batch": 8, "data": few, "optimizer": Optimization(lr=5e-3, warmup=5)}
    context = run(
        recipe, tmp_path / "run", sft=fast, reward_1={"steps": 4}, reward_2={"steps": 4},
        rl_1=short, rl_2=short, overoptimisation={"problems": 3, "samples": 4},
        versus_sft_1={"text": few}, versus_sft_2={"text": few},
    )  # fmt: skip
    check(context, 2)
    assert Run(tmp_path / "run").metrics("rl_2")[0].figures.keys() >= {"proxy/test_low", "gold/test_high", "kl/test"}
    prompts = [
        [json.loads(line)["prompt"] for line in (context.folder(f"comparisons_{n}") / "data.jsonl").open()] for n in (1, 2)
    ]
    assert prompts[1][: len(prompts[0])] == prompts[0]
    assert context.result("versus_sft_2")["problems"] == 12  # type: ignore[index]


def test_the_recipe_on_a_model_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotator, "lexicon", LetterLexicon)
    monkeypatch.setattr(annotator, "factors", lambda text: {})  # random letters have no words
    tokenizer = character_tokenizer(PRINTABLE)
    save(tiny_model(tokenizer, "nano", 0), tokenizer, tmp_path / "model")
    recipe = sentiment(
        model=str(tmp_path / "model"), rounds=1, comparisons=30, steps=2, prompts=8, tokens=60, problems=12, lr=1e-3
    )
    short: dict[str, Any] = {"algorithm": PPO(beta=0.02, critic_warmup=0)}
    context = run(recipe, tmp_path / "run", reward_1={"steps": 3}, rl_1=short, overoptimisation={"problems": 3, "samples": 4})
    check(context, 1)


def test_an_rl_stage_that_measured_nothing_has_no_curve(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", {"seed": 0}) as writer:
        stage = OveroptimisationStage(name="o", model="sft", task=Reviews(), trained=("rl",))
        with pytest.raises(UserError, match="set its measure_problems"):
            stage.run(Context(writer, seed=0, say=False))
