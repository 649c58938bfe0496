"""Models that also read images are read whole, trained on text, and written whole."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from families_for_tests import SEEING, STOP, models, stock_model
from material_for_tests import VOCABULARY

from posttrain.algorithms.sft import SFT
from posttrain.collect import Prompt, generate_groups
from posttrain.engine.engine import Engine
from posttrain.models.load import class_for, longest, read_directory
from posttrain.models.lora import Lora, add_adapters, merge_adapters
from posttrain.models.policy import Policy, text_body, wrap_model
from posttrain.models.save import save
from posttrain.models.scorer import from_policy, load_scorer
from posttrain.models.tiny import character_tokenizer
from posttrain.stages._plan import training_memory
from posttrain.stages.sft import SFTStage
from posttrain.train.forward import forward, scores
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_examples
from posttrain.train.trainer import Trainer
from posttrain.types import Example, Sampling

PROMPTS = [(5,), (7, 8, 9), (3, 4, 5, 6, 7, 8, 9, 10, 11)]
BATCH = pack_examples([Example(np.array(ids), np.arange(len(ids)) > 0) for ids in ([3, 4, 5, 6, 7], [3, 4, 10, 2], [8, 3])])
EYES = ("vision", "visual", "multi_modal", "connector")


def train(policy: Policy) -> None:
    trainer = Trainer(policy, SFT(), Optimization(lr=1e-2))
    for _ in range(2):
        trainer.update(SFT().prepare(BATCH, {}), 1e-2)


@pytest.fixture(params=SEEING)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """It has an id for each row of the embedding that models are made with here."""
    made = character_tokenizer("".join(chr(ord("a") + n) for n in range(VOCABULARY - 6)))
    assert len(made) == VOCABULARY
    return made


def test_what_is_sampled_is_what_transformers_generates_and_training_computes(family: str) -> None:
    stock, policy = models(family)
    requests = [Prompt(ids, 1, 0, Sampling(20, temperature=0.0)) for ids in PROMPTS]
    for ids, (completion,) in zip(PROMPTS, generate_groups(Engine(policy), requests), strict=True):
        given = {"attention_mask": torch.ones(1, len(ids), dtype=torch.long), "eos_token_id": STOP, "pad_token_id": 0}
        expected = stock.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=20, **given)
        assert completion.ids.tolist() == expected[0, len(ids) :].tolist()
    requests = [Prompt(ids, 2, n, Sampling(20)) for n, ids in enumerate(PROMPTS)]
    for request, completions in zip(requests, generate_groups(Engine(policy), requests), strict=True):
        for completion in completions:
            every = np.concatenate([request.ids, completion.ids])
            batch = pack_examples([Example(every, np.arange(len(every)) >= len(request.ids))])
            with torch.no_grad():
                trained = forward(policy, batch).logprob_T[len(request.ids) :]
            np.testing.assert_allclose(completion.logprobs, trained.numpy(), rtol=0, atol=1e-4)


def test_training_changes_the_language_model_alone_and_all_is_written(family: str, tmp_path: Path) -> None:
    stock = stock_model(family)
    save(stock, tokenizer(), tmp_path / "before")
    (tmp_path / "before" / "preprocessor_config.json").write_text('{"size": 28}')
    model, _ = read_directory(tmp_path / "before", None)
    assert type(model) is type(stock)
    policy = wrap_model(model, None, (STOP,))
    train(policy)
    save(policy.model, tokenizer(), tmp_path / "after")
    assert (tmp_path / "after" / "preprocessor_config.json").read_text() == '{"size": 28}'
    kind = transformers.AutoModelForImageTextToText
    before, after = (kind.from_pretrained(tmp_path / name).state_dict() for name in ("before", "after"))
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same and same == {name for name in before if any(part in name for part in EYES)}


def test_adapters_are_added_to_the_language_model_and_merged(family: str) -> None:
    pytest.importorskip("peft")
    stock, policy = models(family)
    add_adapters(policy.model, Lora(rank=2), seed=1)
    learning = [name for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
    assert learning and all("lora_" in name and not any(part in name for part in EYES) for name in learning)
    with torch.no_grad():
        first = forward(policy, BATCH).logprob_T
    train(policy)
    merge_adapters(policy.model)
    assert policy.model.state_dict().keys() == stock.state_dict().keys()
    with torch.no_grad():
        assert not torch.equal(forward(policy, BATCH).logprob_T, first)


def test_its_scorer_has_the_text_part_and_is_read_again(family: str, tmp_path: Path) -> None:
    _, policy = models(family)
    scorer = from_policy(policy, zero=False)
    assert scorer.model.config.model_type == policy.model.config.get_text_config().model_type
    save(scorer.model, tokenizer(), tmp_path / "rm")
    again = load_scorer(str(tmp_path / "rm"))
    with torch.no_grad():
        torch.testing.assert_close(scores(again, BATCH), scores(scorer, BATCH), rtol=1e-4, atol=1e-4)


def test_a_config_of_text_alone_is_read_as_a_language_model() -> None:
    config = copy.deepcopy(stock_model("qwen3.5-vision").config)
    assert config.architectures == ["Qwen3_5ForConditionalGeneration"]
    assert class_for(config) is transformers.AutoModelForImageTextToText
    config.architectures = ["Qwen3_5ForCausalLM"]
    assert class_for(config) is transformers.AutoModelForCausalLM
    assert class_for(config.get_text_config()) is transformers.AutoModelForCausalLM


def test_the_body_is_that_of_the_text(family: str) -> None:
    body = text_body(stock_model(family))
    assert type(body).__name__.endswith(("TextModel", "MistralModel", "LlamaModel"))
    assert body.get_output_embeddings() is None and not any(
        any(part in name for part in EYES) for name, _ in body.named_modules()
    )


def test_what_bounds_sequences() -> None:
    """A chunk of Llama 4, and the keys that an indexer chooses."""
    assert longest(stock_model("llama4").config) == 64
    assert longest(stock_model("mistral3").config) == 128
    assert longest(transformers.DeepseekV32Config(max_position_embeddings=128, index_topk=16)) == 16


@pytest.mark.parametrize("first", [None, 32])
def test_longrope_is_bounded_by_its_first_length(first: int | None) -> None:
    """Beyond it a long sequence of a pack would turn the angles of its neighbours."""
    shape = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4, "rope_type": "longrope"}
    changes = {} if first is None else {"rope_parameters": factors, "original_max_position_embeddings": first}
    assert longest(transformers.Phi3Config(**shape, **changes)) == (first or 128)


def test_what_reads_images_needs_no_gradients_and_moments(family: str) -> None:
    _, policy = models(family)
    train(policy)
    text = sum(p.numel() for name, p in policy.model.named_parameters() if not any(part in name for part in EYES))
    assert policy.trainable == text < policy.parameters
    found = training_memory(SFTStage(name="sft", model="x", data=("y",)), policy, 64, False, {}).sizes
    assert found["gradients"] == 4.0 * text and found["optimizer"] == 8.0 * text
