"""All that a child would import, imported once by the server that forks them. Nothing is computed here: no thread survives a fork."""

# ruff: noqa: F401

import matplotlib.backends.backend_agg
import matplotlib.pyplot
import torch._dynamo
import transformers.generation.utils
import transformers.masking_utils
import transformers.models.auto.modeling_auto
import transformers.models.auto.tokenization_auto
import transformers.models.llama.modeling_llama

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
import posttrain.train.trainer
import tests.faults.harness
