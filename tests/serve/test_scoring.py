"""Scores of answers, over HTTP: log-probs and the KL between two models, rewards of reward models and of a run's stages."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from serving_for_tests import LIMITS, make_policy

from posttrain import config
from posttrain.commands.serve import serving
from posttrain.data.chat import render_prompt
from posttrain.models.policy import Policy, wrap_model
from posttrain.models.save import save
from posttrain.models.scorer import Scorer, from_policy
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.runs.write import RunWriter
from posttrain.serve.app import application
from posttrain.serve.models import Models
from posttrain.serve.scoring import Scoring
from posttrain.serve.server import Address, make_server
from posttrain.tasks.reviews import LETTERS, taste
from posttrain.train.rating import last_scores
from posttrain.types import Message

FILM = [{"role": "user", "content": "a film:"}]
REVIEW = "the plot was very warm, the cast was dull."


@pytest.fixture(scope="module")
def policies() -> dict[str, Policy]:
    return {"first": make_policy(0), "second": make_policy(1)}


@pytest.fixture(scope="module")
def client(policies: dict[str, Policy]) -> Iterator[httpx.Client]:
    """Two models, of which one is in memory at a time."""
    models = Models(dict.fromkeys(policies, 2048), lambda name: policies[name], "first", loaded=1)
    routes = application(lambda _: models, LIMITS, scores=Scoring(models))
    with make_server(routes, Address(port=0), LIMITS).in_thread() as url, httpx.Client(base_url=url, timeout=60) as made:
        yield made
    models.close()


def scored(client: httpx.Client, model: str, *items: dict[str, Any], code: int = 200, against: str = "") -> Any:
    answer = client.post("/v1/score", json={"model": model, "items": list(items), "against": against})
    assert answer.status_code == code, answer.text
    return answer.json()["data"] if code == 200 else answer.json()["error"]["message"]


def test_what_was_sampled_has_the_log_probs_it_was_sampled_with_and_no_kl_from_itself(client: httpx.Client) -> None:
    asked = {"model": "second", "messages": FILM, "max_tokens": 12, "seed": 3, "logprobs": True, "return_token_ids": True}
    answer = client.post("/v1/chat/completions", json=asked).json()
    [choice] = answer["choices"]
    item = {"prompt": answer["prompt_token_ids"], "answer": choice["token_ids"]}
    [own] = scored(client, "second", item, against="second")
    sampled = [token["logprob"] for token in choice["logprobs"]["content"]]
    np.testing.assert_allclose(own["logprobs"], sampled, atol=1e-4)
    assert own["tokens"] == len(sampled) and own["kl"] == 0.0
    [other] = scored(client, "first", item)
    [far] = scored(client, "second", item, against="first")
    assert far["kl"] == pytest.approx(own["logprob"] - other["logprob"], abs=1e-6) and abs(far["kl"]) > 0.01


def test_text_is_scored_as_the_turn_it_would_be(client: httpx.Client, policies: dict[str, Policy]) -> None:
    tokenizer = policies["first"].tokenizer
    prompt = render_prompt(tokenizer, [Message("user", "a film:")])
    ids = [*tokenizer("fine", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    by_text, by_ids = scored(client, "first", {"messages": FILM, "answer": "fine"}, {"prompt": [*prompt], "answer": ids})
    assert by_text["tokens"] == 5
    np.testing.assert_allclose(by_text["logprobs"], by_ids["logprobs"], atol=1e-5)


def test_bad_items_are_refused_in_words(client: httpx.Client) -> None:
    fine = {"prompt": "a", "answer": "b"}
    assert "no model 'third'" in scored(client, "third", fine, code=404)
    assert "at most 256" in scored(client, "first", *[fine] * 257, code=400)
    assert "those from 0 to" in scored(client, "first", {"prompt": [99999], "answer": [1]}, code=400)
    assert "items.0" in scored(client, "first", {"prompt": [-1], "answer": [1]}, code=400)
    assert "a token each" in scored(client, "first", {"prompt": "a", "answer": ""}, code=400)
    assert "2048" in scored(client, "first", {"prompt": "a" * 3000, "answer": "b"}, code=400)
    assert client.get("/v1/score").json()["data"] == [{"id": n, "kind": "policy"} for n in ("first", "second")]
    assert scored(client, "first", fine)[0]["tokens"] == 1  # and the server goes on


def instructgpt_like(directory: Path) -> tuple[Policy, list[Scorer]]:
    """A finished run whose models are not trained: pretrain, sft and rl, and an ensemble of two reward models."""
    tokenizer = character_tokenizer(LETTERS)
    policy = wrap_model(tiny_model(tokenizer, "nano", 0), tokenizer, (tokenizer.eos_token_id,))
    scorers = [from_policy(policy, zero=False, seed=seed) for seed in (1, 2)]
    with RunWriter.create(directory, config.to_config(config.parse("instructgpt", ["reward.members=2"]))):
        pass
    for stage in ("pretrain", "sft", "rl"):
        save(policy.model, tokenizer, directory / "stages" / stage / "model")
    for name, scorer in zip(("model", "model-1"), scorers, strict=True):
        save(scorer.model, tokenizer, directory / "stages" / "reward" / name)
    return policy, scorers


def test_a_run_gives_the_reward_of_its_models_and_of_its_rl_stage_to_a_typed_prompt(tmp_path: Path) -> None:
    policy, scorers = instructgpt_like(tmp_path / "run")
    with serving(str(tmp_path / "run"), ["device=cpu"], port=0) as (server, lines), server.in_thread() as url:
        assert "serving pretrain, sft, rl" in lines[-1]
        with httpx.Client(base_url=url, timeout=60) as client:
            kinds = {card["id"]: card["kind"] for card in client.get("/v1/score").json()["data"]}
            assert kinds == {
                **dict.fromkeys(("pretrain", "sft", "rl"), "policy"),
                "reward": "reward_model",
                "rl/reward": "stage",
            }
            typed = {"messages": [{"role": "user", "content": "a typed prompt:"}], "answer": REVIEW}
            [by_model], [by_stage] = scored(client, "reward", typed), scored(client, "rl/reward", typed)
            tokenizer = policy.tokenizer
            prompt = render_prompt(tokenizer, [Message("user", "a typed prompt:")])
            said = [*tokenizer(REVIEW, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            members = [last_scores(scorer, [np.array([*prompt, *said])])[0] for scorer in scorers]
            assert by_model["reward"] == pytest.approx(sum(members) / 2, abs=1e-5)
            assert [by_model["parts"][f"member/{n}"] for n in (0, 1)] == pytest.approx(members, abs=1e-5)
            assert by_stage["reward"] == by_model["reward"]
            assert by_stage["parts"]["task"] == taste(REVIEW)[0]


def test_a_task_that_needs_the_right_answer_knows_it_or_is_given_it(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(string.printable)
    policy = wrap_model(tiny_model(tokenizer, "nano", 0), tokenizer, (tokenizer.eos_token_id,))
    stages = [{"stage": "rl", "name": "rl", "model": "tiny:nano", "task": {"name": "sums"}}]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"stages": stages}))
    settings = config.parse(str(tmp_path / "recipe.yaml"), [])
    with RunWriter.create(tmp_path / "run", config.to_config(settings)):
        pass
    save(policy.model, tokenizer, tmp_path / "run" / "stages" / "rl" / "model")
    problem = settings.recipe.stages[0].task.problems("test")[0]  # type: ignore[attr-defined]
    with (
        serving(str(tmp_path / "run"), ["device=cpu"], port=0) as (server, _),
        server.in_thread() as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):

        def paid(question: str, answer: str, gold: str = "") -> Any:
            item = {"messages": [{"role": "user", "content": question}], "answer": answer, "gold": gold}
            return scored(client, "rl/reward", item)[0]

        right = "<think>.</think>\n<answer>{}</answer>".format
        assert paid(problem.question, right(problem.answer))["reward"] == 1.0
        assert paid(problem.question, right("1"))["reward"] < 1.0
        unknown = paid("What is 9 + 9 + 9?", right("27"))
        assert unknown["reward"] is None and "not known" in unknown["failure"]
        assert paid("What is 9 + 9 + 9?", right("27"), gold="27")["reward"] == 1.0


def test_code_that_a_run_names_is_not_run_and_its_models_are_served_all_the_same(tmp_path: Path) -> None:
    instructgpt_like(tmp_path / "run")
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')\n")
    file = tmp_path / "run" / "config.yaml"
    tree = yaml.safe_load(file.read_text())
    next(s for s in tree["stages"] if s["name"] == "rl")["reward"] = {
        "name": "function",
        "reward": f"{tmp_path}/mine.py:reward",
    }
    file.write_text(yaml.safe_dump(tree))
    with serving(str(tmp_path / "run"), ["device=cpu"], port=0) as (server, lines), server.in_thread() as url:
        assert "cannot be computed" in lines[0] and "would run code" in lines[0]
        kinds = [card["id"] for card in json.loads(httpx.get(f"{url}/v1/score").text)["data"]]
        assert kinds == ["pretrain", "sft", "rl", "reward"]
