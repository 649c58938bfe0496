"""A model with a head of one number: packed like a policy, saved as transformers has it."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from families_for_tests import models
from material_for_tests import VOCABULARY, shared_policy, small_policy

from posttrain.errors import UserError
from posttrain.models.load import load, stop_ids
from posttrain.models.policy import wrap_model
from posttrain.models.save import save
from posttrain.models.scorer import from_policy, load_scorer
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.train.forward import scores
from posttrain.train.pack import pack_examples
from posttrain.train.roles.critic import values
from posttrain.types import Example

IDS = ([3, 4, 5, 6, 7], [3, 4, 5, 9], [8, 3])
BATCH = pack_examples([Example(np.array(ids), np.arange(len(ids)) > 0) for ids in IDS])


def test_scores_are_those_of_each_sequence_alone() -> None:
    scorer = from_policy(shared_policy(), zero=False)
    with torch.no_grad():
        packed_T = scores(scorer, BATCH)
        alone = [scorer.model.score(scorer.body(torch.tensor([ids])).last_hidden_state)[0, :, 0] for ids in IDS]
    torch.testing.assert_close(packed_T, torch.cat(alone), rtol=1e-10, atol=1e-10)


def test_a_value_is_the_score_of_what_came_before() -> None:
    scorer = from_policy(shared_policy(), zero=False)
    with torch.no_grad():
        score_T, value_T = scores(scorer, BATCH), values(scorer, BATCH)
    for start, end in zip(BATCH.starts, BATCH.starts[1:], strict=False):
        assert value_T[start] == 0.0  # nothing was chosen there
        assert torch.equal(value_T[start + 1 : end], score_T[start : end - 1])


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_a_critic_starts_at_zero_on_a_body_of_its_own(head: str) -> None:
    policy = small_policy()
    scorer = from_policy(policy, head)
    assert float(scores(scorer, BATCH).detach().abs().max()) == 0.0
    with torch.no_grad():
        next(scorer.body.parameters()).add_(1.0)
    assert not torch.equal(next(scorer.body.parameters()), next(policy.body.parameters()))
    assert all(p.requires_grad for p in scorer.model.parameters())


@pytest.mark.parametrize("family", ["granite", "lfm2", "mamba", "mimo"])
def test_a_family_without_such_a_class_has_one_made_of_its_parts(family: str, tmp_path: Path) -> None:
    _, policy = models(family)
    scorer = from_policy(policy, zero=False)
    tokenizer = character_tokenizer("".join(chr(ord("a") + n) for n in range(VOCABULARY - 6)))
    save(scorer.model, tokenizer, tmp_path / "rm")
    (name,) = json.loads((tmp_path / "rm" / "config.json").read_text())["architectures"]
    assert name.endswith("ForSequenceClassification") and not hasattr(transformers, name)
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    again = load_scorer(str(tmp_path / "rm"))
    with torch.no_grad():
        torch.testing.assert_close(scores(again, BATCH), scores(scorer, BATCH), rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="is a reward model, no language model"):
        load(str(tmp_path / "rm"))


def test_a_saved_scorer_is_a_plain_classifier_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    tokenizer = character_tokenizer("0123456789+= ")
    model = tiny_model(tokenizer, "nano", 0)
    policy = wrap_model(model, tokenizer, stop_ids(model, tokenizer))
    scorer = from_policy(policy, zero=False, seed=3)
    folder = save(scorer.model, tokenizer, tmp_path / "reward")
    again = load_scorer(str(folder))
    own = dict(scorer.model.named_parameters())
    assert all(torch.equal(p, own[name]) for name, p in again.model.named_parameters())
    with torch.no_grad():
        torch.testing.assert_close(
            scores(again, BATCH), scores(scorer, BATCH), rtol=1e-6, atol=1e-6
        )  # memory may be aligned otherwise
        stock = AutoModelForSequenceClassification.from_pretrained(folder)
        last = stock(torch.tensor([IDS[0]])).logits[0, 0]
    assert float(last) == pytest.approx(float(scores(scorer, BATCH).detach()[4]), abs=1e-5)


def test_a_reward_model_is_no_language_model(tmp_path: Path) -> None:
    """Its embedding would do as an output layer, and it would write something."""
    tokenizer = character_tokenizer("0123456789+= ")
    model = tiny_model(tokenizer, "nano", 0)
    assert model.config.tie_word_embeddings
    policy = wrap_model(model, tokenizer, stop_ids(model, tokenizer))
    folder = save(from_policy(policy).model, tokenizer, tmp_path / "rm")
    with pytest.raises(UserError, match="rm is a reward model, no language model; name the model that it was trained from"):
        load(str(folder))
    assert load_scorer(str(folder))


def test_a_head_with_a_hidden_layer_is_saved_and_read(tmp_path: Path) -> None:
    """All of it, also after a second round; files without it, or with another, are refused and never filled with random numbers."""
    tokenizer = character_tokenizer("0123456789+= ")
    model = tiny_model(tokenizer, "nano", 0)
    policy = wrap_model(model, tokenizer, stop_ids(model, tokenizer))
    scorer = from_policy(policy, "mlp", zero=False, seed=3)
    again = load_scorer(str(save(scorer.model, tokenizer, tmp_path / "first")))
    twice = load_scorer(str(save(again.model, tokenizer, tmp_path / "second")), torch.bfloat16)
    own = dict(scorer.model.named_parameters())
    assert {n for n in own if n.startswith("score")} == {f"score.{n}" for n in ("0.weight", "0.bias", "2.weight", "2.bias")}
    for name, parameter in twice.model.named_parameters():
        assert torch.equal(parameter, own[name].bfloat16()), name
    with torch.no_grad():
        torch.testing.assert_close(scores(again, BATCH), scores(scorer, BATCH), rtol=1e-6, atol=1e-6)

    config = json.loads((tmp_path / "first" / "config.json").read_text())
    plain = save(from_policy(policy, zero=False).model, tokenizer, tmp_path / "plain")
    (plain / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="the head in the weight files has .* copy the model anew"):
        load_scorer(str(plain))
    del config["score_head"]
    (tmp_path / "first" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"1 tensors are not in the weight files \(score.weight\)"):
        load_scorer(str(tmp_path / "first"))


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("0123456789+= ")
    folder = save(tiny_model(tokenizer, "nano", 0), tokenizer, tmp_path / "lm")
    with pytest.raises(UserError, match="lm is a language model, no reward model; train one"):
        load_scorer(str(folder))


def test_scores_of_a_hidden_layer_in_bf16_are_computed_in_float32() -> None:
    scorer = from_policy(small_policy(dtype=torch.bfloat16), "mlp", zero=False, seed=3)
    with torch.no_grad():
        score_T = scores(scorer, BATCH)
        hidden = torch.cat([scorer.body(torch.tensor([ids])).last_hidden_state[0] for ids in IDS])
        exact_T = copy.deepcopy(scorer.model.score).double()(hidden.double())[:, 0]
    torch.testing.assert_close(score_T.double(), exact_T, rtol=1e-5, atol=1e-5)


def test_scores_of_a_bf16_model_are_not_rounded_to_bf16() -> None:
    policy = small_policy(dtype=torch.bfloat16)
    scorer = from_policy(policy, zero=False, seed=3)
    with torch.no_grad():
        scorer.model.score.weight.mul_(40.0)
        score_T = scores(scorer, BATCH)
        hidden = torch.cat([scorer.body(torch.tensor([ids])).last_hidden_state[0] for ids in IDS])
    exact_T = hidden.double() @ scorer.model.score.weight[0].double()
    assert score_T.dtype == torch.float32 and float(score_T.abs().max()) > 4
    torch.testing.assert_close(score_T.double(), exact_T, rtol=1e-5, atol=1e-4)
    assert float((score_T - score_T.bfloat16().float()).abs().max()) > 1e-3  # bf16 could not have held them
