"""Which families of transformers can be trained and sampled here, and in which way: a tiny random model of each is wrapped, takes a
training step, and samples answers; log-probs of both are compared with a forward pass of transformers.

    python benchmarks/families.py [model_type ...]                   # prints a line for each family, then one JSON line
    python benchmarks/families.py --write docs/models.md             # also replaces the table of that page

A model is made by the family's own configuration class with small numbers. Some need numbers of their own (`CHANGES`); a family whose
model cannot be made so is listed as not tried.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto import modeling_auto as auto

from posttrain.algorithms.sft import SFT
from posttrain.collect import Prompt, generate_groups
from posttrain.engine.engine import Engine
from posttrain.engine.padded import plain_backend
from posttrain.errors import UserError, first_line
from posttrain.models.layers import describe
from posttrain.models.load import attention_for
from posttrain.models.policy import wrap_model
from posttrain.train.forward import forward
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_examples
from posttrain.train.trainer import Trainer
from posttrain.types import Example, Sampling

START, END = "<!-- made by benchmarks/families.py -->", "<!-- end -->"
LARGEST = 60e6  # parameters of what is called tiny
NEAR = 2e-3  # nats: far above rounding in float32, far below a token that is not seen
LONG = tuple(np.random.default_rng(0).integers(3, 60, 300).tolist())  # past windows, and keys that stand for many tokens
PROMPTS = ((5,), (7, 8, 9), (3, 4, 5, 6, 7, 8, 9, 10, 11), (20, 19, 18, 17), LONG, LONG[:150])
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "initializer_range": 0.3,
}  # fmt: skip
PAIR = ["sliding_attention", "full_attention"]
HEAD = {"head_dim": 8, "sliding_window": 6, "layer_types": PAIR}
EXPERTS = {
    "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "shared_expert_intermediate_size": 24,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "qk_head_dim": 8,
    "v_head_dim": 4, "head_dim": 4,
}  # fmt: skip
INDEX = {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 32}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_d_ssm": 64,
    "mamba_chunk_size": 16,
}  # fmt: skip
NARROW = {"head_dim": 8, "global_head_dim": 16, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
FOUR = {"num_hidden_layers": 4, "layer_types": PAIR * 2, "sliding_window": 6, "num_kv_shared_layers": 2}
GPT_2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
CHANGES: dict[str, dict[str, Any]] = {
    "axk1": LATENT | EXPERTS, "axk2": LATENT | EXPERTS, "bamba": MAMBA | {"attn_layer_indices": [1]},
    "codegen": GPT_2 | {"rotary_dim": 4},
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v2": LATENT | EXPERTS | {"q_lora_rank": None}, "deepseek_v3": LATENT | EXPERTS,
    "deepseek_v32": LATENT | EXPERTS | INDEX, "dots1": EXPERTS, "falcon": {"new_decoder_architecture": False, "alibi": False},
    "falcon_h1": MAMBA | {"lm_head_multiplier": 0.5}, "gemma2": HEAD, "gemma3_text": HEAD,
    "gemma3n_text": NARROW | FOUR | {"intermediate_size": [48] * 4, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": NARROW | FOUR, "glm4_moe_lite": LATENT | EXPERTS, "glm_moe_dsa": LATENT | EXPERTS | INDEX,
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gpt_oss": HEAD | EXPERTS | {"rope_parameters": ROPE}, "gptj": GPT_2 | {"rotary_dim": 4},
    "granitemoehybrid": MAMBA | EXPERTS | {"shared_intermediate_size": 24, "layer_types": ["mamba", "attention"]},
    "helium": {"head_dim": 8}, "hunyuan_v1_dense": {"head_dim": 8}, "hunyuan_v1_moe": EXPERTS | {"head_dim": 8, "moe_topk": 2},
    "hyperclovax": {"logits_scaling": 0.5}, "granite": {"logits_scaling": 2.0}, "cohere": {"logit_scale": 0.5},
    "hy_v3": EXPERTS | {"head_dim": 8},
    "hy_v4": EXPERTS | {"head_dim": 8},
    "jamba": EXPERTS | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8,
        "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "kimi_linear": LATENT | EXPERTS | LINEAR, "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": EXPERTS | {"intermediate_size_mlp": 48, "head_dim": 8},
    "longcat_flash": LATENT | EXPERTS | {
        "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "zero_expert_num": 2, "moe_topk": 2, "num_layers": 2,
    },
    "mamba": {"state_size": 8}, "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "mimo_v2_flash": HEAD | EXPERTS | {"v_head_dim": 4}, "minicpm3": LATENT,
    "ministral": {"head_dim": 8}, "minimax": EXPERTS | {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8},
    "nemotron_h": {
        "hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8,
        "n_groups": 1, "head_dim": 8, "chunk_size": 16,
    },
    "qwen2_moe": EXPERTS, "qwen3_5_moe_text": EXPERTS | LINEAR, "qwen3_5_text": LINEAR, "qwen3_moe": EXPERTS,
    "qwen3_next": EXPERTS | LINEAR, "recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent", "attention"]},
    "solar_open": EXPERTS | {"head_dim": 8}, "xlstm": {"num_heads": 4, "embedding_dim": 32, "num_blocks": 2},
    "youtu": LATENT,
    "zamba2": {
        "num_hidden_layers": 4, "mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 8, "chunk_size": 16, "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid"] * 2, "use_shared_mlp_adapter": False, "adapter_rank": 4,
    },
}  # fmt: skip
# the text of models that also read images, and what reads them
ANGLES = {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}}
PATCHES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
SEEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (HEAD, PATCHES), "gemma4": (NARROW | FOUR, PATCHES | {"num_key_value_heads": 2, "head_dim": 16}),
    "llama4": (
        CHANGES["llama4_text"],
        PATCHES | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "llava": ({"model_type": "llama"}, PATCHES | {"model_type": "clip_vision_model"}),
    "mistral3": ({"model_type": "mistral"}, PATCHES | {"model_type": "pixtral"}), "qwen2_5_vl": (ANGLES, VISION),
    "qwen3_5": (LINEAR, VISION), "qwen3_5_moe": (EXPERTS | LINEAR, VISION),
    "qwen3_vl": ({"head_dim": 8} | ANGLES, VISION | {"deepstack_visual_indexes": [0]}),
    "qwen3_vl_moe": (EXPERTS | {"head_dim": 8} | ANGLES, VISION | {"deepstack_visual_indexes": [0]}),
    "smolvlm": ({"model_type": "llama"}, PATCHES),
    "internvl": ({"model_type": "qwen2"}, PATCHES | {"image_size": [28, 28], "patch_size": [14, 14]}),
}  # fmt: skip
WAYS = {
    "fast": ("fast", "one pass over packed sequences", "CUDA graphs on a GPU, a decoder of its own on a CPU"),
    "packed": ("packed", "packed sequences through the model's own layers", "token by token through the model's own layers"),
    "padded": ("padded", "padded batches through the model's own layers and attention", "the same, over transformers' cache"),
    "train": (
        "training only",
        "packed or padded",
        "refused: its cache does not compute what training does; vLLM may sample it",
    ),
    "refused": ("refused", "", ""),
    "untried": ("not tried", "", ""),
    "wrong": ("wrong", "", ""),
}


def made(family: str) -> Any:
    """A tiny random model of a family, as transformers makes it."""
    if family in SEEING:
        text, vision = SEEING[family]
        config = AutoConfig.for_model(family, text_config=TINY | text, vision_config=vision)
        kind: Any = transformers.AutoModelForImageTextToText
    else:
        config = AutoConfig.for_model(family, **(TINY | CHANGES.get(family, {})))
        kind = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        size = kind.from_config(config).num_parameters()
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f}M parameters with small numbers")
    torch.manual_seed(0)
    return kind.from_config(config, dtype=torch.float32, attn_implementation=attention_for(config)).eval()


def tried(family: str) -> tuple[str, str]:
    """The way in which a family is computed, and the reason."""
    try:
        model = made(family)
    except Exception as error:  # whatever a configuration raises that was given other numbers than it knows
        return "untried", first_line(error)
    stock = copy.deepcopy(model)
    try:
        policy = wrap_model(model, None, (1,))
    except UserError as error:
        own = "does not run" in str(error)
        return "untried" if own else "refused", str(error)
    described = describe(policy)
    way = "padded" if policy.padded else "packed" if isinstance(described, str) else "fast"
    shown = [ids[: policy.positions] for ids in PROMPTS if len(ids) > 1]
    batch = pack_examples([Example(np.array(ids), np.arange(len(ids)) > 0) for ids in shown])
    worst = trained(stock, policy, batch)
    if worst <= NEAR:
        try:
            plain_backend(policy)
            worst = max(worst, farthest(stock, policy))
        except UserError as error:
            way, described = "train", str(error)
    if worst > NEAR:
        return "wrong", f"log-probs {worst:.2g} nats apart"
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    Trainer(policy, SFT(), Optimization(lr=1e-3)).update(SFT().prepare(batch, {}), 1e-3)
    if all(torch.equal(tensor, before[name]) for name, tensor in policy.model.state_dict().items()):
        return "wrong", "training changes nothing"
    return way, described if isinstance(described, str) else f"{worst:.1g} nats"


@torch.no_grad()
def own(stock: Any, ids: Any) -> np.ndarray:
    """The log-probs of all tokens but the first by transformers' own forward pass."""
    id_T = torch.tensor(ids)
    logits = stock(id_T[None], use_cache=False).logits[0].float()
    return torch.log_softmax(logits, -1)[:-1].gather(1, id_T[1:, None])[:, 0].numpy()


@torch.no_grad()
def trained(stock: Any, policy: Any, batch: Any) -> float:
    """How far the trainer's log-probs are from those, at most."""
    policy.learn()
    found = forward(policy, batch).logprob_T.numpy()
    pairs = list(pairwise(batch.starts))
    return max(float(np.abs(found[a + 1 : b] - own(stock, batch.ids_T[a:b].tolist())).max()) for a, b in pairs)


def farthest(stock: Any, policy: Any) -> float:
    """How far the log-probs of sampled tokens are from those, at most."""
    worst, most = 0.0, policy.positions or 512
    cut = [prompt[: most - 16] for prompt in PROMPTS]
    requests = [Prompt(prompt, 2, n, Sampling(16)) for n, prompt in enumerate(cut)]
    for request, completions in zip(requests, generate_groups(Engine(policy), requests), strict=True):
        for completion in completions:
            full = own(stock, [*request.ids, *completion.ids])[len(request.ids) - 1 :]
            worst = max(worst, float(np.abs(completion.logprobs - full).max()))
    return worst


def page(found: dict[str, tuple[str, str]]) -> str:
    lines = ["| way | training | sampling | families, by `model_type` in config.json |", "|---|---|---|---|"]
    for way, cells in WAYS.items():
        names = ", ".join(sorted(name for name, (own, _) in found.items() if own == way))
        if names:
            lines.append(f"| {' | '.join(cells)} | {names} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    began, found = time.time(), dict[str, tuple[str, str]]()
    for family in given.families or sorted({*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *SEEING}):
        found[family] = tried(family)
        print(f"{family:24} {found[family][0]:8} {found[family][1][:180]}", flush=True)
    if given.write:
        text = given.write.read_text()
        before, after = text.split(START)[0], text.split(END)[1]
        given.write.write_text(f"{before}{START}\n\n{page(found)}\n\n{END}{after}")
    counts = {way: sum(own == way for own, _ in found.values()) for way in WAYS}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"benchmark": "families", "seconds": round(time.time() - began), "counts": counts, **versions}))
    return sum(way == "wrong" for way, _ in found.values())


if __name__ == "__main__":
    sys.exit(main())
