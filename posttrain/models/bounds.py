"""What a model's files say about sizes, checked before anything of these sizes is made. Loading a model takes no more than its weight
files account for, whatever its configuration says: a few bytes may ask for a billion layers.

The bound: parameters and buffers have at most twice as many elements as the weight files, and `SPARE` more.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import UserError, require

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig

LAYERS = 256  # that may be asked for without as many tensors in the files
SPARE = 1 << 27  # elements that need not be in the files: buffers of positions, say
LARGEST_NUMBER = 10**8  # in a configuration, of what is not said to be a frequency
LARGEST_COUNT = 10**6  # of what is said to be a number of things, each of which may have a name
MODULES = 10_000  # that a model may have without as many tensors in the files
GROWTH = 1 << 14  # times that a tokenizer may make a text longer
LARGEST_JSON = 256 * 1024 * 1024  # the largest tokenizer.json in use is about 40 MB
LARGEST_SETTINGS = 8 * 1024 * 1024  # of all other files of settings
LARGEST_CONFIG = 1024 * 1024  # of config.json, and what else has a line for each setting
READ = (".json", ".jinja", ".txt", ".model", ".safetensors", ".gguf")  # endings of what is read
DEPTH = re.compile(r"layers?$|block_count$|depth$")
COUNT = re.compile(r"num_|n_")
FREE = re.compile(r"theta|freq|base|token|length|seed")
# what each step of a normalizer makes of a character at most, where it does so once however often it is repeated
ONCE = {**dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD"), 18), "Lowercase": 3, "BertNormalizer": 54}
_CALM = """
    Strip StripAccents Nmt Split Whitespace WhitespaceSplit Punctuation Digits BertPreTokenizer CharDelimiterSplit UnicodeScripts
    FixedLength ByteFallback Fuse CTC WordPiece BPEDecoder
"""
CALM = frozenset(_CALM.split())


def check_files(folder: Path) -> None:
    """Refuse links out of a model's folder, pipes and devices, and files of settings that are too large to be any. The hub's cache
    links from a snapshot to the blobs beside it."""
    home = folder.resolve()
    roots = [home] + ([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])
    for path in [*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")]:
        if path.suffix.lower() not in READ and path.name != "additional_chat_templates":
            continue
        real = Path(os.path.realpath(path))
        within = any(real.is_relative_to(root) for root in roots)
        require(within, f"{path} is a link out of the model's folder; copy the file there")
        about = real.stat() if real.exists() else None
        known = about is not None and (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode))
        require(known, f"{path} is not a plain file; copy the model anew")
        assert about is not None
        texts = path.name in ("tokenizer.json", "vocab.json") or path.suffix in (".txt", ".model")
        short = path.name in ("config.json", "generation_config.json")
        limit = LARGEST_CONFIG if short else LARGEST_JSON if texts else LARGEST_SETTINGS
        fits = path.suffix in (".safetensors", ".gguf") or about.st_size <= limit
        require(fits, f"{path} is too large to be a configuration file; copy it anew")


def check_numbers(where: str, tree: Any, tensors: int, elements: int, key: str = "") -> None:
    """Refuse numbers that the weights cannot account for, before transformers makes a list with so many entries."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            check_numbers(where, value, tensors, elements, str(name))
    elif isinstance(tree, list | tuple):
        for value in tree:
            check_numbers(where, value, tensors, elements, key)
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        if DEPTH.search(key) and tree > LAYERS:
            detail = f"asks for {tree} layers ({key}), and the weights are {tensors} tensors"
            require(tree <= tensors, f"{where} {detail}; copy it anew")
        fine = isinstance(tree, float) or FREE.search(key) is not None
        counts = COUNT.match(key) is not None
        large = abs(tree) > (LARGEST_COUNT if counts else max(LARGEST_NUMBER, elements))
        detail = f"says {key}: {tree}, and the weights have {elements:,} elements"
        require(fine or not large, f"{where} {detail}; copy it anew")


def check_size(
    where: str, kind: Any, config: PretrainedConfig, tensors: int, elements: int
) -> None:
    """Refuse a configuration whose model is larger than the weight files, by building it without memory; this is given up at once
    where there are more modules or elements."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.device("meta"), counted(where, tensors, elements):
        kind.from_config(config)


@contextmanager
def counted(where: str, tensors: int, elements: int) -> Iterator[None]:
    """Count what modules register while this lasts."""
    from torch.nn.modules import module as hooks

    max_elements, max_modules = 2 * elements + SPARE, 20 * tensors + MODULES
    found = {"elements": 0, "modules": 0}
    detail = f"describes a model that is larger than its weights, {tensors:,} tensors of {elements:,} elements"

    def count(owner: nn.Module, name: str, tensor: Tensor | None) -> None:
        found["elements"] += 0 if tensor is None else tensor.numel()
        require(found["elements"] <= max_elements, f"{where} {detail}; copy it anew")

    def add(owner: nn.Module, name: str, module: nn.Module | None) -> None:
        found["modules"] += 1
        require(found["modules"] <= max_modules, f"{where} {detail}; copy it anew")

    handles = [
        hooks.register_module_parameter_registration_hook(count),
        hooks.register_module_buffer_registration_hook(count),
        hooks.register_module_module_registration_hook(add),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_growth(path: Path) -> None:
    """Refuse a tokenizer.json whose steps could make a text so much longer that it does not fit into memory."""
    try:
        tree = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        detail = f"the tokenizer cannot be read ({str(error)[:100]})"
        raise UserError(f"{path.parent}: {detail}; copy it anew") from None
    require(isinstance(tree, dict), f"{path} does not hold a JSON object; copy it anew")
    for parts in (("normalizer", "pre_tokenizer"), ("decoder",)):
        once: dict[str, float] = {}
        factor = prod(growth(tree.get(part), once, str(path)) for part in parts)
        detail = f"its {' and '.join(parts)} could make a text over {GROWTH:,} times as long"
        require(factor * prod(once.values()) <= GROWTH, f"{path}: {detail}; copy it anew")


def growth(step: Any, once: dict[str, float], where: str) -> float:
    """How many times as many characters a step may make; of what counts once, it is noted in `once`."""
    if step is None:
        return 1.0
    require(isinstance(step, dict), f"{where}: a step is not an object; copy it anew")
    kind = step.get("type")
    inner = [part for value in step.values() if isinstance(value, list) for part in value]
    if kind == "Sequence":
        factor = 1.0
        for part in inner:
            factor = min(factor * growth(part, once, where), 2.0 * GROWTH)
        return factor
    if kind in ONCE:
        once["Unicode" if str(kind).startswith("NF") else str(kind)] = ONCE[kind]
        return 1.0
    return 1.0 if kind in CALM else _factor(step)


def _factor(step: Mapping[str, Any]) -> float:
    """Of a step that counts each time."""
    kind, content = step.get("type"), len(str(step.get("content", "")))
    if kind == "Replace":
        pattern = step.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        # an expression may match between any two characters
        return max(1.0, ceil(content / len(text))) if text else 1.0 + content
    if kind == "Prepend":
        return 1.0 + len(str(step.get("prepend", "")))
    if kind == "Precompiled":
        longest = 1
        with suppress(ValueError, binascii.Error):
            table = base64.b64decode(str(step.get("precompiled_charsmap") or ""))
            texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
            longest = max(map(len, texts), default=1)
        return float(max(longest, 1))
    return 4.0 if kind == "ByteLevel" else 2.0
