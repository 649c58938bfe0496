"""Loading a causal language model by name: a checkpoint directory, a GGUF file, or a model on the hub.

Whatever the source, weights come as safetensors or GGUF, no code of the model's is run, and bad input gives one line.
Importing this module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.data import safe_readers
from posttrain.errors import UserError, require, unknown
from posttrain.models.load_directory import MODEL_FILES, first_line, read_directory

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from posttrain.models.policy import Network

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
# What is fetched from the hub: no pickles and no Python, so that neither can be read by mistake.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", *MODEL_FILES]
DTYPES = ("float32", "bfloat16", "float16", "float64")
RENDER_SECONDS = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A model with all that is needed to talk to it. `stop_ids` end a response."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    source: str
    stop_ids: tuple[int, ...]


def load(
    name: str, dtype: str | torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Loaded:
    """The model called `name`: a directory, a .gguf file (or a directory with one), or `org/name[@revision]` on the hub.

    `dtype` None keeps what the checkpoint states; a GGUF file is unpacked to float32. The model comes in evaluation mode.
    """
    path = locate(name)
    wanted = as_dtype(dtype)
    check_device(device)
    with quiet():
        if path.suffix.lower() == ".gguf":
            from posttrain.models.load_gguf import read_gguf

            model, tokenizer = read_gguf(path, wanted)
        else:
            model, tokenizer = read_directory(path, wanted)
    check_vocabulary(model, tokenizer, name)
    stops = stop_ids(model, tokenizer, name)
    return Loaded(model.to(device).eval(), tokenizer, name, stops)


def locate(name: str) -> Path:
    """The directory or .gguf file that `name` stands for, fetched from the hub when it is `org/name` and nothing is here."""
    require(
        bool(name.strip()),
        "the model name is empty; give a model directory, a .gguf file or a hub name (org/name)",
    )
    path = Path(name).expanduser()
    if path.is_dir():
        return single_gguf(path) or path
    if path.suffix.lower() == ".gguf":
        require(path.is_file(), f"there is no GGUF file {name}; check the path")
        return path
    require(
        not path.exists(),
        f"{name} is a file; give the model directory that holds it, or a .gguf file",
    )
    if HUB_NAME.fullmatch(name):
        return fetch(name)
    raise UserError(
        f"there is no model directory {name}; check the path (a model on the hub is named org/name)"
    )


def single_gguf(folder: Path) -> Path | None:
    """The one GGUF file of a directory that holds no safetensors checkpoint."""
    files = sorted(
        path for path in folder.iterdir() if path.suffix.lower() == ".gguf" and path.is_file()
    )
    if not files or any(folder.glob("*.safetensors")):
        return None
    names = ", ".join(path.name for path in files[:4])
    require(
        len(files) == 1, f"{folder} holds {len(files)} GGUF files ({names}); name the one to load"
    )
    return files[0]


def fetch(name: str) -> Path:
    """A local copy of a model on the hub: safetensors and JSON only. Taken from the cache where the hub cannot be reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    repository, _, revision = name.partition("@")
    try:
        return Path(
            snapshot_download(repository, revision=revision or None, allow_patterns=HUB_FILES)
        )
    except GatedRepoError as error:
        raise UserError(
            f"{name} on the hub is gated; accept its terms on its page and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{name} is neither a directory here nor a model on the hub; check the spelling"
        ) from error
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"there is no directory {name} here, and the hub cannot be reached (offline, or no network); give a model "
            "directory or a .gguf file, or fetch the model first where there is a network"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(
            f"{name} cannot be fetched from the hub ({first_line(error)}); give a directory"
        ) from error


def as_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype from its name."""
    import torch

    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    found: torch.dtype = getattr(torch, dtype)
    return found


def check_device(device: str | torch.device) -> None:
    """Refuse a device that is not there before minutes are spent on reading weights."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"device {str(device)!r} cannot be used here ({first_line(error)}); use device cpu"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and warnings of transformers: what they warn of is checked here and reported in one line."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def check_vocabulary(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, source: str
) -> None:
    """Refuse a tokenizer that can make an id without a row in the embedding: on a GPU that is an assertion far away."""
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=-1)
    require(
        largest >= 0,
        f"{source}: the tokenizer has no vocabulary; copy the tokenizer files of its base model there",
    )
    require(
        largest < rows,
        f"{source}: the tokenizer has ids up to {largest} but the model embeds only {rows}; they do not belong together",
    )


@dataclass(frozen=True, slots=True)
class Reader:
    """How a model reads: what is asked of one that is not loaded."""

    tokenizer: Any
    source: str


def same_vocabulary(
    where: str,
    own: Reader | Network,
    other: Reader | Network,
    advice: str = "use models of one family",
) -> None:
    """Refuse a model that reads other text from the same ids: its log-probs, values and scores would be about something else. Where
    one has no tokenizer, loaded models must have as many ids."""
    detail = ""
    if own.tokenizer is None or other.tokenizer is None:
        models = [network.model for network in (own, other) if not isinstance(network, Reader)]
        sizes = [model.config.get_text_config().vocab_size for model in models]
        if len(set(sizes)) == 2:
            detail = f"{sizes[1]} tokens against {sizes[0]}"
    elif own.tokenizer is not other.tokenizer:
        mine, theirs = own.tokenizer.get_vocab(), other.tokenizer.get_vocab()
        differ = {token for token, _ in mine.items() ^ theirs.items()}
        if differ:
            token = min(
                differ, key=lambda t: (min(mine.get(t, len(mine)), theirs.get(t, len(theirs))), t)
            )
            detail = f"{len(differ)} tokens differ, such as {token!r}: id {theirs.get(token)} against {mine.get(token)}"
    require(
        not detail,
        f"{where}: {other.source or 'a model'} has another vocabulary than {own.source or 'the policy'} ({detail}), and would "
        f"read other text from the same ids; {advice}",
    )


def stop_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, source: str = "the model"
) -> tuple[int, ...]:
    """Ids that end a response: the end tokens of the generation config, the tokenizer and the chat template, sorted.

    A padding token among them is left out, unless it is an end in its own right: the tokenizer's or the template's end token,
    or the token that also begins a text (<|endoftext|> in Qwen's models, which use it for padding too).
    """
    own = {tokenizer.eos_token_id, end_of_turn(tokenizer, source)}
    generation = getattr(model, "generation_config", None)
    stated: Any = getattr(generation, "eos_token_id", None)
    stops = own | set(stated if isinstance(stated, list | tuple) else (stated,))
    pad = (
        tokenizer.pad_token_id
        if tokenizer.pad_token_id is not None
        else getattr(generation, "pad_token_id", None)
    )
    if pad not in own and pad != getattr(model.config.get_text_config(), "bos_token_id", None):
        stops.discard(pad)
    return tuple(sorted(int(stop) for stop in stops if stop is not None))


def end_of_turn(tokenizer: PreTrainedTokenizerFast, source: str = "the model") -> int | None:
    """The special token that the chat template writes after an assistant's message; None where there is none.

    Found by rendering a message, so it is right for templates nobody has listed.
    """
    if not tokenizer.chat_template:
        return None
    marker = "the assistant's words"
    rendered = render(
        tokenizer,
        [{"role": "user", "content": "a question"}, {"role": "assistant", "content": marker}],
        source,
    )
    tail = rendered.rpartition(marker)[2].lstrip() if marker in rendered else ""
    special = {
        token.content: index
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    matches = [token for token in special if token and tail.startswith(token)]
    return special[max(matches, key=len)] if matches else None


def render(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], source: str) -> str:
    """The text of a conversation, or "" where the template refuses it. A template that does not come to an end is an error.

    The template is the model maker's program. Jinja's sandbox keeps it from all but time and memory, which `safe_readers` limits.
    """

    def work() -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))

    advice = "for two short messages; replace chat_template.jinja"
    found = safe_readers.probe(work, RENDER_SECONDS)
    require(found is None, f"{source}: the chat template is not fit to run: {found} {advice}")
    try:
        return safe_readers.limited(work, RENDER_SECONDS)
    except safe_readers.TemplateLimit as error:
        raise UserError(
            f"{source}: the chat template is not fit to run: {error} {advice}"
        ) from error
    except Exception:  # a template may insist on a system message or refuse roles: then it says nothing about its end
        return ""
