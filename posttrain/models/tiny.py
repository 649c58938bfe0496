"""Small models made from nothing: a character tokenizer with a chat template and a Llama-family network of a named size.

They are what the tests train, and what a laptop can take through a whole pipeline in minutes.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.errors import refuse_unknown, require

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|pad|>", "<|unk|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
PAD, UNKNOWN, USER, ASSISTANT, SYSTEM, END = SPECIAL_TOKENS
MAX_POSITIONS = 2048
# transformers patches itself and torch while it loads, and all threads have one random stream: models are made one at a time
LOADING = threading.Lock()

# The generation block marks what the assistant says, its end token included: that is what carries loss.
CHAT_TEMPLATE = "".join(Path(__file__).with_suffix(".jinja").read_text("utf-8").splitlines())


# Width, layers, heads, key-value heads, width of the feed-forward layer. Parameters with a vocabulary of about 100 characters: 0.2M,
# 0.9M, 2.8M, 9.5M, 24M.
SIZES = {
    "nano": (96, 2, 3, 1, 256),
    "micro": (128, 4, 4, 2, 448),
    "mini": (256, 4, 4, 2, 640),
    "small": (384, 6, 6, 2, 1024),
    "medium": (512, 8, 8, 4, 1408),
}


def without_length_warning(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Stages check lengths themselves. transformers would warn of indexing errors that do not come."""
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character of `alphabet`; any text over it survives encode and decode unchanged.

    Characters outside the alphabet become <|unk|>. Ids 0 to 5 are the special tokens, then the alphabet in its order.
    """
    require(alphabet, "a character tokenizer needs at least one character in its alphabet")
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = (*SPECIAL_TOKENS, *dict.fromkeys(alphabet))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    # without one, a word-level model puts spaces between its tokens
    backend.decoder = decoders.Fuse()
    special = [AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS]
    backend.add_special_tokens(special)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        extra_special_tokens=[USER, ASSISTANT, SYSTEM],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
    )
    return without_length_warning(made)


def tiny_model(tokenizer: PreTrainedTokenizerFast, size: str, seed: int) -> PreTrainedModel:
    """A Llama-family model of a size in `SIZES` with random weights that depend on `seed` alone, in float32 on the CPU."""
    refuse_unknown("tiny model size", [size], SIZES)
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    width, layers, heads, key_value_heads, feed_forward = SIZES[size]
    config = LlamaConfig(
        # whole rows of eight: faster matrix products, and room for a token or two
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # The caller's random stream must not notice that a model was made.
    with LOADING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()
