"""The recipes for real models, run whole with a tiny random one: what they leave, and what their script makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lexicon_for_tests import WordLexicon
from scripts_for_tests import load_script

from posttrain import cli, config
from posttrain.algorithms.kto import KTO
from posttrain.errors import UserError
from posttrain.models.save import save
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.recipes.base import Recipe
from posttrain.recipes.dpo import dpo
from posttrain.recipes.gsm8k import gsm8k
from posttrain.recipes.instructgpt import instructgpt
from posttrain.recipes.iterative_dpo import iterative_dpo
from posttrain.recipes.kto import kto
from posttrain.recipes.math import math
from posttrain.recipes.r1 import r1
from posttrain.recipes.r1_zero import r1_zero
from posttrain.stages._material import Data
from posttrain.stages.base import PRINTABLE
from posttrain.stages.preference import PreferenceStage
from posttrain.stages.rl import RLStage
from posttrain.tasks import sentiment
from posttrain.tasks.math import Math
from posttrain.tasks.prompts import Prompts
from posttrain.tasks.requests import Requests
from posttrain.tasks.reviews import Reviews
from posttrain.tasks.sentiment import Sentiment

ROOT = Path(__file__).parent.parent.parent


WIN_RATES = ["versus_sft", "versus_base", "second_judge"]  # of instructgpt
WORDS = {"a": 1.0, "i": 2.0, "x": -1.0}  # that a random model of letters does write


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/real_models.py")


@pytest.fixture(scope="module")
def checked(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("real")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentiment, "lexicon", lambda: WordLexicon(WORDS, 10.0))
        script.check(out)
    return out


def figures(folder: Path, name: str) -> dict:  # type: ignore[type-arg]
    return dict(json.loads((folder / f"{name}.json").read_text()))


def test_gsm8k_measures_before_and_after_and_keeps_its_curves(checked: Path) -> None:
    kept = figures(checked, "gsm8k")
    assert list(kept["stages"]) == ["before", "rl", "after"]
    assert [kept["stages"][s]["problems"] for s in ("before", "after")] == [4, 4]
    curves = kept["curves"]["rl"]
    assert {"reward", "reward/format", "length", "kl", "entropy", "accuracy/test", "generated_per_second"} <= set(curves)
    assert [step for step, _ in curves["reward"]] == [1, 2]
    samples, length, seconds = 4, curves["length"][0][1], dict(map(tuple, curves["seconds/generate"]))[1]
    assert curves["generated_per_second"][0][1] == pytest.approx(samples * length / seconds, rel=1e-3)
    assert kept["paired"]["difference"][0] == pytest.approx((kept["paired"]["gained"] - kept["paired"]["lost"]) / 4)
    assert set(kept["lenient"]["before"]) == {"accuracy", "boxed"}


def test_math_is_gsm8k_on_other_problems(checked: Path) -> None:
    kept, other = figures(checked, "math"), figures(checked, "gsm8k")
    assert [kept["stages"][s]["problems"] for s in ("before", "after")] == [4, 4]
    assert set(kept["curves"]["rl"]) <= set(other["curves"]["rl"])
    small, large = (math(max_level=level).stages[1] for level in (1, 5))
    assert isinstance(small, RLStage) and isinstance(large, RLStage) and isinstance(small.task, Math)
    assert (small.task.max_level, small.task.held_out) == (1, 0.05)
    assert small.algorithm == large.algorithm == gsm8k().stages[1].algorithm  # type: ignore[attr-defined]


def test_dpo_is_measured_on_a_quarter_of_the_prompts(checked: Path) -> None:
    result = figures(checked, "dpo")["stages"]["dpo"]
    assert (result["trained_on"], result["held_out"]) == (18, 6)


def test_r1_zero_has_pass_at_k_of_base_and_trained_model(checked: Path) -> None:
    stages = figures(checked, "r1_zero")["stages"]
    assert list(stages) == ["before", "base", "rl", "trained", "after"]
    assert [sorted(stages[s]["pass_at"]) for s in ("base", "trained")] == [["1", "2"]] * 2


def test_instructgpt_runs_from_demonstrations_to_the_win_rate_and_the_tax(checked: Path) -> None:
    kept = figures(checked, "instructgpt")
    assert kept["stopped"] == ""
    names = ["ordinary", "unseen", "demonstrations", "sft", "comparisons", "reward", "rl", *WIN_RATES]
    assert list(kept["stages"]) == names
    assert all(0 <= kept["stages"][name]["win_rate"][0] <= 1 for name in WIN_RATES)
    result = kept["stages"]["versus_sft"]
    assert result["problems"] == 4
    assert result["perplexity"] > 1 and result["perplexity_against"] > 1
    assert {"reward", "reward/task", "kl", "length"} <= set(kept["curves"]["rl"])
    assert len(kept["compared"]["versus_sft"][0]["responses"]) == 2


def test_r1_has_the_figures_of_its_table(checked: Path, script: ModuleType) -> None:
    kept = figures(checked, "r1")
    assert kept["stopped"] == ""
    models = kept["r1"]["models"]
    assert list(models) == ["base", "cold_start", "reasoning", "mixture", "final"]
    assert all(set(own) == {"format", "answer", "language", "win"} for own in models.values())
    assert [row["stage"][0] for row in kept["r1"]["stages"]] == ["1", "2", "3", "4"]
    assert models["final"]["win"][0] == pytest.approx(kept["stages"]["final_general"]["win_rate"][0])
    assert models["final"]["answer"][0] == kept["stages"]["final_sums"]["accuracy"][0]
    assert any(line.startswith("| 4 final RL |") for line in script.rows(kept))
    assert {"reward/answer", "reward/format", "reward/language"} <= set(kept["curves"]["reasoning"])


def test_only_figures_are_kept_and_drawn(checked: Path) -> None:
    kept = {p.name for p in checked.iterdir()} - {"model"}
    data = {"gsm8k-train.jsonl", "gsm8k-test.jsonl", "math-train.jsonl", "math-500.jsonl", "pairs.jsonl"}
    names = ("gsm8k", "math", "dpo", "r1_zero", "instructgpt", "r1")
    assert kept == data | {f"{name}.{ending}" for name in names for ending in ("json", "png")}
    assert all((checked / f"{name}.png").stat().st_size > 10_000 for name in names)


def test_sizes() -> None:
    assert [s.name for s in dpo().stages] == ["pretrain", "sft", "comparisons", "dpo", "versus_sft"]
    assert [s.name for s in dpo(model="m", data="d").stages] == ["dpo"]
    assert [s.name for s in r1_zero().stages] == ["pretrain", "base", "rl", "trained"]
    shown = {n: by_name(r1_zero(model="m", examples=n))["rl"] for n in (None, 0)}
    assert [(s.task.examples, s.sampling.max_new_tokens) for s in shown.values()] == [(2, 48), (0, 160)]
    with pytest.raises(UserError, match="examples are for a real model"):
        r1_zero(examples=0)
    with pytest.raises(UserError, match="go together"):
        dpo(model="m")
    with pytest.raises(UserError, match="beta must be above 0"):
        dpo(model="m", data="d", beta=0)
    settings = config.parse("gsm8k", ["model=somewhere", "data=folder", "rl.lr=1e-6", "after.problems=7"])
    before, training, after = settings.recipe.stages
    assert (before.problems, after.problems, training.optimizer.lr, training.task.data) == (1319, 7, 1e-6, "folder")
    assert [s.task.held_out for s in settings.recipe.stages] == [0.0, 0.05, 0.0], "the curve is not of the test"
    chosen = (training.prompts, training.algorithm.group, training.algorithm.clip_high, training.steps)
    assert chosen == (128, 8, 0.28, 280)
    assert config.parse("gsm8k", []).recipe.stages[1].optimizer.lr == 3e-6
    assert training.optimizer.token_budget == "auto"


def by_name(recipe: Recipe) -> dict[str, Any]:
    return {stage.name: stage for stage in recipe.stages}


def test_instructgpt_takes_the_files_of_people() -> None:
    made = by_name(instructgpt(model="m"))
    assert list(made)[:3] == ["ordinary", "unseen", "demonstrations"]
    assert made["unseen"].skip == made["ordinary"].prompts, "what is measured was not trained on"
    files = {"demonstrations": "a.jsonl", "data": "b.jsonl", "ordinary": "c.jsonl", "unseen": "d.jsonl"}
    made = by_name(instructgpt(model="m", **files))
    assert list(made) == ["sft", "reward", "rl", *WIN_RATES]
    assert (made["sft"].data, made["reward"].data) == ((Data(file="a.jsonl"),), ("b.jsonl",))
    assert (made["rl"].pretraining, made["versus_sft"].text) == ((Data(file="c.jsonl"),), (Data(file="d.jsonl"),))
    with pytest.raises(UserError, match="give one as model"):
        instructgpt(data="b.jsonl")


def test_instructgpt_has_a_kl_budget_and_a_second_judge_who_labelled_nothing() -> None:
    for toy, given in ((True, {}), (False, {"model": "m"})):
        made, kind = by_name(instructgpt(**given)), Reviews if toy else Sentiment
        assert [made[name].task for name in ("comparisons", "rl", "versus_sft")] == [kind(strict=not toy)] * 3
        assert made["second_judge"].judge.rules == kind(strict=toy), "the taste that compared nothing"
        assert [made[name].against for name in WIN_RATES] == ["sft", "pretrain" if toy else "m", "sft"]
        assert (made["rl"].stop.kl, made["rl"].samples_kl()) == (0.0 if toy else 10.0, True)
    made = by_name(instructgpt(model="m", strict=False, max_kl=4, judge="j"))
    assert (made["demonstrations"].task, made["rl"].stop.kl) == (Sentiment(), 4)
    assert made["second_judge"].judge.model == "j"
    with pytest.raises(UserError, match="a judge is for a real model"):
        instructgpt(judge="j")


def test_without_the_mix_there_is_no_pretraining_text() -> None:
    for made in (instructgpt(ptx=0), instructgpt(model="m", ptx=0)):
        assert next(stage for stage in made.stages if isinstance(stage, RLStage)).pretraining == ()


def test_the_last_stage_of_r1_is_paid_for_refusing_what_is_harmful_where_that_is_asked_for() -> None:
    for plain, given in ((r1(), r1(harmless=True)), (r1(model="m"), r1(model="m", harmless=True))):
        more = {name for name in by_name(given) if name not in by_name(plain)}
        assert more == {f"{name}_requests" for name in ("base", "cold_start", "reasoning", "mixture", "final")}
        final = by_name(given)["final"]
        assert [source.name for source in final.task.sources] == ["sums", "general", "requests"]
        assert final.reward.rated == "general", "requests are scored by their own rule"
    shown = [by_name(r1(harmless=True))[name].data for name in ("base", "mixture")]
    assert all(any(isinstance(data.task, Requests) for data in own) for own in shown)


def test_both_sizes_of_r1_have_the_same_stages() -> None:
    small, large, slow = by_name(r1()), by_name(r1(model="m")), by_name(r1(model="m", restart="reasoning", lr=1e-6))
    assert list(small)[1:] == list(large)[1:] and (next(iter(small)), next(iter(large))) == ("base", "favourites")
    assert (small["cold_start"].model, large["cold_start"].model) == ("base", "m")
    assert (small["mixture"].model, large["mixture"].model) == ("base", "m"), "stage 3 begins at the base"
    assert slow["mixture"].model == "reasoning"
    assert large["final_general"].against == large["base_sums"].model == "m"
    assert sum(source.weight for source in large["mixture"].data) == pytest.approx(1)
    assert [slow[stage].optimizer.lr for stage in ("reasoning", "final")] == [1e-6, 1e-6]
    assert slow["mixture"].optimizer == large["mixture"].optimizer, "lr is that of RL"


def test_kto_learns_from_feedback_of_both_sizes() -> None:
    assert [s.name for s in kto().stages] == ["pretrain", "sft", "feedback", "kto", "versus_sft"]
    (stage,) = kto(model="m", data="d", beta=0.2, undesirable=2.0).stages
    assert isinstance(stage, PreferenceStage) and stage.algorithm == KTO(beta=0.2, undesirable=2.0)
    assert stage.held_out == 0.25 and stage.data == ("d",)
    with pytest.raises(UserError, match="kto: model and data, a file of feedback, go together"):
        kto(data="d")


def test_iterative_dpo_ranks_answers_by_a_reward_or_a_reward_model() -> None:
    toy = [s.name for s in iterative_dpo(rounds=2).stages]
    assert toy[:3] == ["pretrain", "sft", "comparisons_1"] and toy[-1] == "best"
    made = by_name(iterative_dpo(model="m", data="p.jsonl", reward="length", rounds=2, prompts=50))
    assert list(made) == ["comparisons_1", "dpo_1", "versus_sft_1", "comparisons_2", "dpo_2", "versus_sft_2", "best"]
    assert (made["comparisons_1"].model, made["comparisons_2"].model, made["comparisons_2"].skip) == ("m", "dpo_1", 50)
    assert made["dpo_2"].model == "dpo_1" and made["versus_sft_2"].against == "m"
    assert made["comparisons_1"].task == made["versus_sft_1"].task == Prompts("p.jsonl", reward="length", held_out=0.1)
    judged = by_name(iterative_dpo(model="m", data="p.jsonl", reward_model="r", rounds=1))
    assert judged["comparisons_1"].reward_model == judged["versus_sft_1"].reward_model == "r"
    for given, said in (
        ({"model": "m"}, "give prompts as data"),
        ({"model": "m", "data": "p"}, "reward or reward_model, one of them"),
        ({"model": "m", "data": "p", "reward": "length", "reward_model": "r"}, "one of them"),
        ({"data": "p"}, "give one as model"),
    ):
        with pytest.raises(UserError, match=f"iterative_dpo: .*{said}"):
            iterative_dpo(**given)


def test_iterative_dpo_runs_with_prompts_of_ones_own(tmp_path: Path) -> None:
    """Two rounds from the command line with a tiny random model and a shipped reward; the best round is what it leaves."""
    tokenizer = character_tokenizer(PRINTABLE)
    model = save(tiny_model(tokenizer, "nano", 0), tokenizer, tmp_path / "model")
    rows = [{"prompt": f"say {n}"} for n in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        f"model={model}",
        f"data={tmp_path}/prompts.jsonl",
        "reward=length",
        "rounds=2",
        "prompts=12",
        "steps=1",
        "tokens=150",
    ]
    more = ["samples=3", "problems=4", "lr=1e-4", "threads=1", f"out={tmp_path}/run"]
    assert cli.main(["run", "iterative_dpo", *words, *more]) == 0
    stages = {p.name for p in (tmp_path / "run" / "stages").iterdir()}
    assert {"comparisons_2", "dpo_2", "versus_sft_2", "best"} <= stages
    assert "win_rate" in json.loads((tmp_path / "run" / "stages" / "versus_sft_1" / "result.json").read_text())
