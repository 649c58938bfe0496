"""Tokenizers of three families, made in the test: by character, byte-level BPE, and BPE with word marks and byte fallback; the last two
also as other files describe them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = ["hello world, naïve café", "你好 世界 🙂🙃", "the quick brown fox 12+34=46", "Ünïcödé — “quotes” 👩‍🚀"] * 5
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As CHATML, with blocks; the end-of-turn token stands outside its block, as some templates have it.
CHATML_BLOCKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Shows tools, calls, names and reasoning, as Qwen's does; the blocks hold the whole turn.
_TOOL_TURN = (
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function or c %}<tool_call>"
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>{% endfor %}'
)
CHATML_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}{{ '\\n' }}"
    + _TOOL_TURN
    + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_TOOL_BLOCKS = CHATML_TOOLS.replace(
    _TOOL_TURN,
    "{% if m.role == 'assistant' %}{% generation %}" + _TOOL_TURN + "{% endgeneration %}{% else %}{{ m.content }}{% endif %}",
)
# The block holds the content alone: the calls stand after it.
CHATML_CALLS_OUTSIDE = CHATML_TOOLS.replace(
    "{{ m.content }}{% for c",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% for c",
)
# Writes every assistant turn but the last without its thinking, as reasoning models' templates do.
FORGETFUL = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}")


def _wrap(backend: Tokenizer, template: str | None = None) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


@lru_cache(maxsize=1)
def _byte_level_backend() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<s>", "<|im_start|>", "<|im_end|>"]
    backend.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=specials, show_progress=False)
    )
    return str(backend.to_str())


def byte_level(template: str | None = None) -> Any:
    return _wrap(Tokenizer.from_str(_byte_level_backend()), template)


def byte_level_of_gguf() -> Any:
    """As transformers reads Llama 3's or SmolLM2's from a GGUF file: steps that change nothing come before the byte level, and the
    clean-up of spaces is on, which transformers skips for BPE."""
    tokenizer = byte_level()
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.clean_up_tokenization_spaces = True
    return tokenizer


def word_marks(drops_space: bool = True) -> Any:
    """As Llama 2: spaces are marks on words, unknown characters are spelled in byte tokens, a leading space is dropped (in Gemma it
    stays)."""
    letters = "▁abcdefghijklmnopqrstuvwxyz0123456789+=,"
    tokens = ["<s>", "<|im_start|>", "<|im_end|>", *(f"<0x{b:02X}>" for b in range(256)), *letters, "▁h", "▁he"]
    backend = Tokenizer(
        models.BPE(
            vocab={token: n for n, token in enumerate(tokens)},
            merges=[("▁", "h"), ("▁h", "e")],
            byte_fallback=True,
            unk_token="<s>",
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if drops_space else steps)
    return _wrap(backend)


def characters(alphabet: str = "0123456789+-=,#abc \n", template: str | None = CHATML_BLOCKS) -> Any:
    tokens = ["<s>", "<|im_start|>", "<|im_end|>", *dict.fromkeys(alphabet + "usertantsystemi")]
    backend = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.Fuse()
    return _wrap(backend, template)
