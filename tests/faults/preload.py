"""All that a child would import, imported once by whoever forks them. No tensor is computed here: no thread survives a fork."""

# ruff: noqa: F401

import gc
from contextlib import suppress
from pathlib import Path

import pydantic.type_adapter
import safetensors.numpy
import torch._dynamo
import transformers.generation.utils
import transformers.masking_utils
import transformers.models.auto.modeling_auto
import transformers.models.auto.tokenization_auto
import transformers.models.llama.modeling_llama
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import posttrain.algorithms.dapo
import posttrain.algorithms.dpo
import posttrain.algorithms.ppo
import posttrain.engine.engine
import posttrain.models.load
import posttrain.models.save
import posttrain.models.scorer
import posttrain.models.tiny
import posttrain.pipeline
import posttrain.recipes.quickstart
import posttrain.stages.preference
import posttrain.stages.reward_model
import posttrain.train.rating
import posttrain.train.saving
import posttrain.train.torch_settings
import posttrain.train.trainer
import tests.faults.harness

with suppress(ImportError):
    import peft
get_checkpoint_conversion_mapping("llama")  # six hundred patterns, compiled once
tests.faults.harness.shipped(Path("nowhere"))  # and the schemas of a recipe
gc.freeze()  # a child that collects garbage need not look through all of it
