"""The reward-model stage: what it leaves behind, its gate, its ensembles, and a resumed run that is the same run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from posttrain import catalogue, config_tree
from posttrain.algorithms.process_reward_model import ProcessRewardModel
from posttrain.algorithms.reward_model import RewardModel
from posttrain.algorithms.sft import SFT
from posttrain.errors import GuardStop, Interrupted, UserError
from posttrain.evals.calibration import pair_accuracy
from posttrain.evals.statistics import wilson
from posttrain.loop import Loop
from posttrain.models.lora import Lora
from posttrain.models.save import save
from posttrain.models.scorer import load_scorer
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.stages._material import numbered_prompts, split_sources, until_end
from posttrain.stages.base import PRINTABLE, Context, Stage, load_reward_model, run_stages
from posttrain.stages.reward_model import RewardModelStage, Verdicts, report
from posttrain.train.optimizer import Optimization
from posttrain.train.rating import ModelRating, last_scores
from posttrain.types import Example

FAST = Optimization(lr=3e-3, warmup=5, schedule="cosine")


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pairs(count: int, seed: int = 0) -> list[dict]:
    """The response with more of the letter z is preferred."""
    generator = np.random.default_rng(seed)
    rows: list[dict] = []
    while len(rows) < count:
        a, b = ("".join(generator.choice(list("xyz"), 6)) for _ in range(2))
        if a.count("z") != b.count("z"):
            good, bad = (a, b) if a.count("z") > b.count("z") else (b, a)
            rows.append(
                {"prompt": f"say {len(rows)}", "chosen": good, "rejected": bad, "margin": good.count("z") - bad.count("z")}
            )
    return rows


def stage(path: str, **changes: object) -> RewardModelStage:
    made = RewardModelStage(
        name="reward", model="tiny:nano", data=(path,), steps=25, batch=16, held_out=0.25, optimizer=FAST, evaluate_every=12
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def context(directory: Path, seed: int = 0) -> Context:
    used = (directory / "config.yaml").is_file()
    return Context(RunWriter.resume(directory) if used else RunWriter.create(directory, {}), seed, threads=1, say=False)


def test_it_learns_judges_itself_and_leaves_a_plain_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    path = write(tmp_path / "pairs.jsonl", pairs(200))
    run = context(tmp_path / "run")
    run_stages([stage(path, min_accuracy=0.8)], run)
    result = run.result("reward")
    assert result is not None
    assert result["accuracy"][0] > 0.9, "seen 1.0"
    assert result["held_out"] == 50 and result["trained_on"] == 150 and result["pairs"] == 50
    assert sum(b["pairs"] for b in result["by_label_margin"]) == 50 and len(result["by_label_margin"]) > 1
    assert 0 <= result["calibration"]["error"] <= 1
    figures = Run(tmp_path / "run").metrics("reward")
    assert figures[-1].figures["accuracy/held_out"] == result["accuracy"][0]
    assert figures[0].figures["accuracy/held_out"] < 0.75
    assert {"accuracy", "margin", "score", "loss/preference"} <= set(figures[-1].figures)

    folder = tmp_path / "run" / "stages" / "reward" / "model"
    scorer = load_scorer(str(folder))
    stock = AutoModelForSequenceClassification.from_pretrained(folder)
    ids = np.array(scorer.tokenizer("zzx")["input_ids"])
    with torch.no_grad():
        assert float(stock(torch.from_numpy(ids)[None]).logits[0, 0]) == pytest.approx(last_scores(scorer, [ids])[0], abs=1e-4)


def test_a_head_with_a_hidden_layer_learns_and_is_read_by_later_stages(tmp_path: Path) -> None:
    run = context(tmp_path / "run")
    run_stages([stage(write(tmp_path / "pairs.jsonl", pairs(200)), head="mlp", evaluate_every=0)], run)
    result = run.result("reward")
    assert result is not None and result["accuracy"][0] > 0.9, "seen 1.0"
    scorer = load_reward_model(str(tmp_path / "run" / "stages" / "reward" / "model"), run)
    assert isinstance(scorer.model.score, torch.nn.Sequential)
    good, bad = (np.array(scorer.tokenizer(text)["input_ids"]) for text in ("zzz", "xyx"))
    first, second = last_scores(scorer, [good, bad])
    assert first > second
    with pytest.raises(UserError, match="adapters are saved for peft, which has no head=mlp"):
        stage("pairs.jsonl", head="mlp", lora=Lora())


def test_with_lora_it_learns_and_peft_adds_its_adapters_and_head_to_the_base(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    peft = pytest.importorskip("peft")
    tokenizer = character_tokenizer(PRINTABLE)
    base = save(tiny_model(tokenizer, "nano", 3), tokenizer, tmp_path / "base")
    run = context(tmp_path / "run")
    run_stages([stage(write(tmp_path / "pairs.jsonl", pairs(200)), model=str(base), lora=Lora(rank=4), members=2)], run)
    result = run.result("reward")
    assert result is not None and result["accuracy"][0] > 0.9, "seen 1.0"
    ids = np.array(tokenizer("zzx")["input_ids"])
    for name in ("model", "model-1"):  # the second starts from the base too, not from what the first was merged into
        folder = tmp_path / "run" / "stages" / "reward" / name
        plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        plain.config.pad_token_id = tokenizer.pad_token_id
        loaded = peft.PeftModel.from_pretrained(plain, str(folder / "adapter"))
        assert loaded.peft_config["default"].task_type == "SEQ_CLS"
        with torch.no_grad():
            found = float(loaded(torch.from_numpy(ids)[None]).logits[0, 0])
        assert found == pytest.approx(last_scores(load_scorer(str(folder)), [ids])[0], abs=1e-4)


def test_a_bad_reward_model_stops_the_run_with_one_line(tmp_path: Path) -> None:
    """Labels by coin: nothing can be learned, and the stage must not count as done."""
    rows = pairs(120)
    for row in rows[::2]:
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    run = context(tmp_path / "run")
    with pytest.raises(
        GuardStop, match=r"^reward: held-out accuracy of model is 0\.\d+ \[.*\] over 30 prompts, below min_accuracy=0.9"
    ):
        run_stages([stage(write(tmp_path / "pairs.jsonl", rows), min_accuracy=0.9, steps=10)], run)
    assert run.result("reward") is None


def test_an_ensemble_has_members_that_differ(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", pairs(60))
    run = context(tmp_path / "run")
    run_stages([stage(path, members=3, steps=8)], run)
    result = run.result("reward")
    assert result is not None and {"accuracy", "accuracy/0", "accuracy/1", "accuracy/2"} <= result.keys()
    folder = tmp_path / "run" / "stages" / "reward"
    members = [load_scorer(str(folder / name)) for name in ("model", "model-1", "model-2")]
    ids = [np.array(members[0].tokenizer("zzx")["input_ids"])]
    assert len({last_scores(m, ids)[0] for m in members}) == 3
    ModelRating(members, "worst", tokenizer=members[1].tokenizer)
    assert len(Run(tmp_path / "run").metrics("reward-2")) > 0


def numbers(tree: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a JSON tree by its path."""
    if isinstance(tree, int | float):
        yield name, tree
        return
    assert isinstance(tree, dict | list)
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from numbers(value, f"{name}/{key}")


@pytest.mark.parametrize(("fatal", "left"), [(5, 6 + 9), (13, 6)])
def test_a_resumed_run_is_the_same_run(tmp_path: Path, fatal: int, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the first member, or in the second with the first done: the same weights, to the last bit."""
    made = stage(write(tmp_path / "pairs.jsonl", pairs(60)), members=2, steps=9, checkpoint_every=3, evaluate_every=4)
    run_stages([made], context(tmp_path / "whole"))

    taken, whole_step = 0, Loop.one_step

    def dying(self: Loop) -> dict[str, float]:
        nonlocal taken
        taken += 1
        if taken == fatal:
            raise Interrupted("the plug was pulled")
        return whole_step(self)

    monkeypatch.setattr(Loop, "one_step", dying)
    first = context(tmp_path / "cut")
    with pytest.raises(Interrupted):
        run_stages([made], first)
    first.writer.close()
    taken, fatal = 0, 0
    run_stages([made], context(tmp_path / "cut"))
    assert taken == left, "from the checkpoint at step 3, and a member that is done is not trained again"
    for name in ("model", "model-1"):
        one, other = (tmp_path / where / "stages" / "reward" / name / "model.safetensors" for where in ("whole", "cut"))
        assert one.read_bytes() == other.read_bytes(), name
    results = [json.loads((tmp_path / where / "stages" / "reward" / "result.json").read_text()) for where in ("whole", "cut")]
    whole, cut = (dict(numbers({**r, "seconds": 0, "lineage": {}})) for r in results)
    # the weights are the same; a model that was read may lie in memory otherwise, which moves the last digits of its scores
    assert cut == pytest.approx(whole, abs=1e-4)


@pytest.mark.parametrize("label", [True, False, 0.5])
def test_labels_of_steps_that_are_all_the_same_are_refused(tmp_path: Path, label: bool | float) -> None:
    rows = [{"prompt": f"do {n}", "completions": ["x", "y"], "labels": [label] * 2} for n in range(20)]
    run = context(tmp_path)
    with pytest.raises(
        UserError, match=rf"^reward: all steps to train on have the label {float(label):g}: there is nothing to tell"
    ):
        run_stages([stage(write(tmp_path / "steps.jsonl", rows), algorithm=ProcessRewardModel(), steps=2)], run)


def test_steps_train_a_process_reward_model(tmp_path: Path) -> None:
    """A step of three letters is right where it holds no y."""
    generator = np.random.default_rng(0)
    rows = []
    for number in range(200):
        steps = ["".join(generator.choice(list("xyz"), 3)) for _ in range(3)]
        rows.append({"prompt": f"do {number}", "completions": steps, "labels": ["y" not in s for s in steps]})
    run = context(tmp_path / "run")
    run_stages([stage(write(tmp_path / "steps.jsonl", rows), algorithm=ProcessRewardModel(), steps=40)], run)
    result = run.result("reward")
    assert result is not None and result["pairs"] == 150 and result["held_out"] == 50
    assert result["accuracy"][0] > 0.85, "seen 1.0"


def test_the_wrong_kind_of_file_is_refused(tmp_path: Path) -> None:
    labels = write(tmp_path / "labels.jsonl", [{"prompt": "a", "completion": "b", "label": True}])
    with pytest.raises(
        UserError, match="labels.jsonl holds rows of kind unpaired; this algorithm learns from pair or openai or ranking$"
    ):
        run_stages([stage(labels)], context(tmp_path / "one"))
    with pytest.raises(UserError, match="holds rows of kind pair; this algorithm learns from steps$"):
        run_stages(
            [stage(write(tmp_path / "pairs.jsonl", pairs(4)), algorithm=ProcessRewardModel())], context(tmp_path / "two")
        )


def unit(prompt: list[int], *responses: list[int]) -> tuple[Example, ...]:
    return tuple(
        Example(np.array([*prompt, *r]), np.arange(len(prompt) + len(r)) >= len(prompt), reward=float(n))
        for n, r in enumerate(responses)
    )


def test_prompts_are_held_out_whole() -> None:
    """No prompt is on both sides, however often it was compared; the order within a side is that of the file."""
    units = [unit([3, n // 3], [5], [6 + n]) for n in range(30)]
    (train,), held_out = split_sources([units], 0.2, seed=0)
    assert len(held_out) == 6 and len(train) == 24
    sides = [{u[0].ids[:2].tobytes() for u in side} for side in (train, held_out)]
    assert not sides[0] & sides[1]
    assert split_sources([units], 0.2, 0)[1] == held_out and split_sources([units], 0.2, 1)[1] != held_out
    assert split_sources([units], 0.0, 0) == ([units], [])
    assert split_sources([units[:3]], 0.9, 0) == ([units[:3]], []), "of one prompt nothing is held out"


def test_what_a_template_adds_after_the_response_is_cut() -> None:
    whole = Example(np.array([3, 4, 5, 6]), np.array([False, True, True, False]), 0, 1.0, np.array([np.nan, 1, 0, np.nan]))
    cut = until_end(whole)
    assert cut.ids.tolist() == [3, 4, 5] and cut.mask.tolist() == [False, True, True] and cut.reward == 1.0
    assert cut.steps is not None and len(cut.steps) == 3


def test_every_sequence_ends_where_a_rollout_would(tmp_path: Path) -> None:
    """A template that writes a line break after the end token: the score is learned at the end token, where sampling stops."""
    tokenizer = character_tokenizer("sayxz 0123456789\n")
    tokenizer.chat_template = tokenizer.chat_template.replace("{% endgeneration %}", "{% endgeneration %}\n")
    one = stage(write(tmp_path / "pairs.jsonl", [{"prompt": "say", "chosen": "zz", "rejected": "xx"}]))
    units = one.read(context(tmp_path / "run"), tokenizer, one.data)
    assert [int(e.ids[-1]) for unit in units for e in unit] == [tokenizer.eos_token_id] * 2


def test_the_report_by_hand() -> None:
    """Two members on three pairs, one unit of two pairs and one of one: their mean margins are 2, -1 and 1."""
    distance, units = np.array([1.0, 2.0, 2.0]), np.array([0, 0, 1])
    members = [Verdicts(np.array(m), distance, units) for m in ([3.0, -1.0, -1.0], [1.0, -1.0, 3.0])]
    found = report(members)
    assert found["accuracy"][0] == 0.75 and found["accuracy/0"][0] == 0.25 and found["accuracy/1"][0] == 0.75
    assert all(0 <= bound <= 1 for bound in found["accuracy"])
    assert found["pairs"] == 3 and found["held_out"] == 2
    assert [(b["low"], b["pairs"], b["accuracy"]) for b in found["by_label_margin"]] == [(1.0, 1, 1.0), (2.0, 2, 0.5)]
    assert sum(b["pairs"] * b["accuracy"] for b in found["by_score_margin"]) / 3 == pytest.approx(
        pair_accuracy([2.0, -1.0, 1.0])
    )
    json.dumps(found, allow_nan=False)


def test_pairs_about_one_prompt_are_one_observation() -> None:
    """Rankings of nine that are written as 36 pairs each: 360 right pairs of 10 prompts are 10 prompts."""
    units = [unit([3, n], [5, k], [6, k]) for n in range(10) for k in range(36)]
    assert numbered_prompts(units) == [n for n in range(10) for _ in range(36)]
    right = Verdicts(np.ones(360), np.ones(360), np.array(numbered_prompts(units)))
    assert right.accuracy == wilson(10, 10)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": ()}, "give at least one JSONL file"),
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"members": 0}, "members must be at least 1"),
        ({"held_out": 1.0}, r"held_out must be a share of the prompts in \[0, 1\), not 1.0"),
        ({"held_out": 0.0, "min_accuracy": 0.6}, "min_accuracy is judged on held-out data"),
        ({"min_accuracy": 1.5}, "min_accuracy must be in"),
        ({"algorithm": SFT()}, "sft learns from demonstrations; use an sft stage"),
    ],
)
def test_refusals(changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=f"^reward: {words}"):
        stage("pairs.jsonl", **changes)


def test_it_is_found_by_name_and_survives_its_configuration() -> None:
    made = stage("pairs.jsonl", algorithm=RewardModel(margin=True), members=2)
    assert catalogue.load("stage", "reward_model", Stage) is RewardModelStage
    again = config_tree.from_tree(config_tree.to_tree(made), Stage, "stages[0]")
    assert asdict(again) == asdict(made) and again == made
