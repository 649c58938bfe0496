"""Tiny models of the families of transformers, by name of the family."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from material_for_tests import VOCABULARY

from posttrain.engine import engine
from posttrain.engine.padded import PaddedBackend
from posttrain.models import policy as policies
from posttrain.models.policy import Policy, wrap_model

STOP = 1
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
IDS = {"bos_token_id": 0, "eos_token_id": STOP, "pad_token_id": 0}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"moe_intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "num_key_value_heads": 4,
}
GROUPS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
# the last two layers attend to keys of the first two, and heads are wider where all is seen
SHARED = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"attention_bias": True}),
    "smollm": (
        "LlamaConfig",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 6, **LAYERS}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3-moe": ("Qwen3MoeConfig", {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0, **LAYERS},
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 6, **LAYERS}),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    "cohere": ("CohereConfig", {"logit_scale": 0.5}),
    "hyperclovax": ("HyperCLOVAXConfig", {"logits_scaling": 0.5}),  # Granite divides by it
    "gpt2": ("GPT2Config", {"n_positions": 128}),
    "olmo": ("OlmoConfig", {}),  # norms without weights
    "gpt-oss": (
        "GptOssConfig",
        EXPERTS | {"head_dim": 8, "sliding_window": 6, "rope_parameters": ROPE, **LAYERS},
    ),  # with sinks
    "mimo": (
        "MiMoV2FlashConfig",
        EXPERTS | LAYERS | {"head_dim": 8, "v_head_dim": 4, "n_routed_experts": 4, "sliding_window": 6},
    ),  # sinks, and a sigmoid chooses the experts
    "deepseek-v3": ("DeepseekV3Config", LATENT | GROUPS),  # values narrower than keys
    "gemma4": (
        "Gemma4TextConfig",
        {"layer_types": LAYERS["layer_types"] * 2, "num_hidden_layers": 4, "sliding_window": 6} | SHARED,
    ),
}
# linear attention of Qwen3.5, and beside it attention
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 16,
    "lm_head_multiplier": 0.5,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 10, **LAYERS, "num_experts": 4, "shared_expert_intermediate_size": 24}
# models that our attention cannot compute: with a state besides attention, with attention of their own, with layers that do not hand on
# our layout, with layers that attend twice, and with a window in the mask alone
PADDED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5TextConfig", LINEAR),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "mamba": ("MambaConfig", {"state_size": 8}),
    "falcon-h1": ("FalconH1Config", MAMBA),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "gptj": ("GPTJConfig", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4}),
    "stablelm": ("StableLmConfig", {}),
    "diffllama": ("DiffLlamaConfig", {}),
    "qwen2-moe": ("Qwen2MoeConfig", EXPERTS | WINDOW),
}
# models that also read images, of text as above
ANGLES = {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}}
CHUNKS = {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4, "attention_chunk_size": 64}
PATCHES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
SEEING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3-vision": ("Gemma3Config", {"head_dim": 8, "sliding_window": 6, **LAYERS}, PATCHES),
    "mistral3": ("Mistral3Config", {"model_type": "mistral"}, PATCHES | {"model_type": "pixtral"}),
    "qwen3-vl": ("Qwen3VLConfig", {"head_dim": 8} | ANGLES, VISION | {"deepstack_visual_indexes": [0]}),
    "qwen3.5-vision": ("Qwen3_5Config", LINEAR, VISION),
    "smolvlm": ("SmolVLMConfig", {"model_type": "llama"}, PATCHES),
    "llama4": (
        "Llama4Config",
        CHUNKS,
        PATCHES | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
}
# batches pad with 0, which must not be seen: it has an embedding where it is not the padding
EVERY = FAMILIES | {name: (config, changes | {"pad_token_id": 2}) for name, (config, changes) in PADDED.items()}


@cache
def stock_model(family: str) -> Any:
    """A random model as transformers runs it, with eager attention."""
    if family in SEEING:
        name, text, vision = SEEING[family]
        config = getattr(transformers, name)(text_config=SHAPE | HEADS | IDS | text, vision_config=vision)
        kind = transformers.AutoModelForImageTextToText
    else:
        name, changes = EVERY[family]
        config = getattr(transformers, name)(**(SHAPE | HEADS | IDS | changes))
        kind = transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return kind.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


def models(family: str) -> tuple[Any, Policy]:
    """The same random model twice: as transformers runs it, and as a policy, with our attention where it computes the family."""
    stock = stock_model(family)
    policy = wrap_model(copy.deepcopy(stock), None, (STOP,))
    padded = family in PADDED or family == "qwen3.5-vision"
    ours = "eager" if padded else "posttrain"
    assert stock.config._attn_implementation == "eager" and policy.model.config._attn_implementation == ours
    assert policy.padded == padded
    return stock, policy


def sample_padded(patch: pytest.MonkeyPatch) -> None:
    """Compute every policy that samples as one that our attention cannot compute."""

    def padded(policy: Policy) -> type[PaddedBackend]:
        patch.setattr(policy.body, policies.PADDED, True)
        patch.setattr(policy.model.config, "_attn_implementation", "eager")
        return PaddedBackend

    patch.setattr(engine, "plain_backend", padded)
