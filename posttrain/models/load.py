"""Loads a causal language model by name: a checkpoint directory in the hub's layout (config.json, safetensors weights, tokenizer),
a GGUF file, or a model on the hub.

Whatever the source, weights come as safetensors or GGUF, no code of the model's is run (directory.py refuses it), and bad input gives
one line. Importing this module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.data import safe_readers
from posttrain.errors import UserError, first_line, refuse_unknown, require
from posttrain.models import bounds, directory
from posttrain.models.tiny import LOADING, without_length_warning
from posttrain.system.files import model_folder

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

    from posttrain.models.policy import Network


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
# What is fetched from the hub: no pickles and no Python, so that neither can be read by mistake.
SMALL_FILES = ["*.json", "*.jinja", "*.txt", *directory.MODEL_FILES]
HUB_FILES = ["*.safetensors", *SMALL_FILES]
DTYPES = ("float32", "bfloat16", "float16", "float64")
ONE_FAMILY = "use models of one family"
# what any tokenizer cuts within a moment
PROBE = [
    letter * 500 for letter in (" ", "a", "A", "1", "\n", ".", "a ", "\u00e9", "\u4e00", "aA1 .\n")
]
FEWER = "lower max_new_tokens or shorten the prompts"
_SCORERS: dict[type, Any] = {}
UNPACKED = "a safetensors directory, not from GGUF"


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A loaded model with its tokenizer. `stop_ids` end a response."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    source: str
    stop_ids: tuple[int, ...]


def load(
    name: str, dtype: str | torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Loaded:
    """Load the model called `name`: a directory, a .gguf file (or a directory with one), or `org/name[@revision]` on the hub.

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
    return Loaded(model.to(device).eval(), tokenizer, name, stop_ids(model, tokenizer, name))


def locate(name: str, weights: bool = True) -> Path:
    """The directory or .gguf file of `name`. `org/name` is fetched from the hub if there is no such directory; without `weights`,
    only its small files are."""
    require(name.strip(), f"the model name is empty; {directory.GIVE}")
    path = Path(name).expanduser()
    if path.is_dir():
        path = model_folder(path)
        unfinished = (path / "config.yaml").is_file() and not (path / "config.json").is_file()
        advice = "let it end (posttrain resume), or name one of its stages as RUN/stages/NAME"
        require(not unfinished, f"{name} is a run that has made no model yet; {advice}")
        return single_gguf(path) or path
    if path.suffix.lower() == ".gguf":
        require(path.is_file(), f"there is no GGUF file {name}; check the path")
        return path
    advice = "give the model directory that holds it, or a .gguf file"
    require(not path.exists(), f"{name} is a file; {advice}")
    made = f"{name} is made from nothing where a stage trains it, and can do nothing yet"
    require(not name.startswith("tiny:"), f"{made}; give the run of such a stage")
    advice = "check the path (a model on the hub is named org/name)"
    require(HUB_NAME.fullmatch(name) is not None, f"there is no model directory {name}; {advice}")
    return fetch(name, HUB_FILES if weights else SMALL_FILES)


def single_gguf(folder: Path) -> Path | None:
    """The one GGUF file of a directory that holds no safetensors checkpoint."""
    files = sorted(p for p in folder.iterdir() if p.suffix.lower() == ".gguf" and p.is_file())
    if not files or any(folder.glob("*.safetensors")):
        return None
    bounds.check_files(folder)
    names = ", ".join(path.name for path in files[:4])
    count = len(files)
    require(count == 1, f"{folder} holds {count} GGUF files ({names}); name the one to load")
    return files[0]


def fetch(name: str, files: list[str] = HUB_FILES) -> Path:
    """Download a model from the hub: safetensors and JSON only. Uses the cache if the hub cannot be reached."""
    from huggingface_hub import errors, snapshot_download

    repository, _, revision = name.partition("@")
    wanted = revision or None
    try:
        return Path(snapshot_download(repository, revision=wanted, allow_patterns=files))
    except (errors.HfHubHTTPError, OSError, ValueError) as error:  # the first are among the last
        if isinstance(error, errors.GatedRepoError):
            found = f"{name} on the hub is gated; accept its terms on its page and log in with `hf auth login`"
        elif isinstance(error, errors.RepositoryNotFoundError):
            found = f"{name} is neither a directory here nor a model on the hub; check the spelling"
        elif isinstance(error, errors.LocalEntryNotFoundError):
            found = (
                f"there is no directory {name} here, and the hub cannot be reached (offline, or no network); give a model "
                "directory or a .gguf file, or fetch the model first where there is a network"
            )
        else:
            found = f"{name} cannot be fetched from the hub ({first_line(error)}); give a directory"
        raise UserError(found) from error


def as_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype from its name."""
    import torch

    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    refuse_unknown("dtype", [dtype], DTYPES)
    found: torch.dtype = getattr(torch, dtype)
    return found


def check_device(device: str | torch.device) -> None:
    """Raise an error for a device that is not available, before minutes are spent on reading weights."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        detail = f"device {str(device)!r} cannot be used here ({first_line(error)})"
        raise UserError(f"{detail}; use device cpu") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and warnings of transformers. What they warn about is checked here and reported in one line."""
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
    """Raise an error if the tokenizer can produce an id without a row in the embedding. On a GPU that would be a device-side
    assertion."""
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=-1)
    require(largest >= 0, f"{source}: the tokenizer has no vocabulary; {directory.COPY_TOKENIZER}")
    detail = f"ids up to {largest} but the model embeds only {rows}; they do not belong together"
    require(largest < rows, f"{source}: the tokenizer has {detail}")


@dataclass(frozen=True, slots=True)
class Reader:
    """How a model that is not loaded reads text. `tokenizer` is None if it is not known before the weights are."""

    tokenizer: Any
    source: str
    positions: int | None = None

    def check_length(self, tokens: int, advice: str = FEWER) -> None:
        check_positions(self.source, self.positions, tokens, advice)


def check_positions(source: str, limit: int | None, tokens: int, advice: str) -> None:
    """Raise an error for sequences longer than the model's positions: it would not fail but write nonsense."""
    has = f"{source or 'the model'} has {limit} positions"
    found = f"prompt and response may be {tokens} tokens long, but {has}"
    require(limit is None or tokens <= limit, f"{found}; {advice}")


def longest(config: PretrainedConfig) -> int | None:
    """The longest sequence that a model supports; None if its configuration does not say. Beyond a chunk of Llama 4, tokens would see
    what the model does not; beyond the first length of `longrope` (Phi), a long sequence would change what its neighbours compute;
    beyond the keys that an indexer chooses (DeepSeek-V3.2), transformers chooses others with a cache than without."""
    text = config.get_text_config()
    stated = [getattr(text, "max_position_embeddings", None), getattr(text, "index_topk", None)]
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        stated.append(getattr(text, "attention_chunk_size", None))
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        stated.append(rope.get("original_max_position_embeddings"))
    return min((int(limit) for limit in stated if limit is not None), default=None)


def outline(name: str, score: bool | None = False) -> Reader:
    """What can be known of the model called `name` without its weights. With `score` it must be a reward model; None: it may be
    one. Of a model on the hub only the small files are fetched."""
    path = locate(name, weights=False)
    if path.suffix.lower() == ".gguf":
        require(not score, f"{name}: a reward model is read from {UNPACKED}")
        return Reader(None, name)
    directory.check_directory(path, weights=Path(name).expanduser().is_dir())
    with quiet():
        config = read_config(path)
        if score is not None:
            check_head(name, config, score)
        return Reader(read_tokenizer(path), name, longest(config))


def check_head(source: str, config: PretrainedConfig, score: bool) -> None:
    """Refuse a language model where a reward model is asked for, and a reward model as a language model: where the output layer shares
    its weights with the embedding, nothing is missing, and it would write something."""
    heads = [str(one) for one in config.architectures or ()]
    causal = any(head.endswith(("ForCausalLM", "ForConditionalGeneration")) for head in heads)
    advice = "train one with a reward_model stage and name that"
    require(not (score and causal), f"{source} is a language model, no reward model; {advice}")
    scores = bool(heads) and all(head.endswith("ForSequenceClassification") for head in heads)
    advice = "name the model that it was trained from"
    require(score or not scores, f"{source} is a reward model, no language model; {advice}")


def read_config(folder: Path) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a malformed file makes transformers raise
        raise UserError(unreadable(folder, error)) from error


def unreadable(folder: Path, error: Exception) -> str:
    return f"{folder}: the model cannot be read ({first_line(error)}); check config.json"


def same_vocabulary(
    where: str, own: Reader | Network, other: Reader | Network, advice: str = ONE_FAMILY
) -> None:
    """Raise an error if two models read different text from the same ids: log-probs, values and scores would be meaningless. If one
    has no tokenizer, loaded models must have equal numbers of ids."""
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
            token = min(differ, key=lambda t: (min(v.get(t, len(v)) for v in (mine, theirs)), t))
            detail = f"{len(differ)} tokens differ, such as {token!r}: id {theirs.get(token)} against {mine.get(token)}"
    unlike = f"{other.source or 'a model'} has another vocabulary than {own.source or 'the policy'} ({detail})"
    require(not detail, f"{where}: {unlike}, and would read other text from the same ids; {advice}")


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
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = getattr(generation, "pad_token_id", None)
    if pad not in own and pad != getattr(model.config.get_text_config(), "bos_token_id", None):
        stops.discard(pad)
    # some configurations write -1 for none
    found = tuple(sorted(int(stop) for stop in stops if stop is not None and stop >= 0))
    words = model.config.get_text_config().vocab_size
    text = f"{source}: of the end tokens {found} one is beyond its {words:,} ids"
    fine = all(stop < words for stop in found)
    require(fine, f"{text}; correct eos_token_id in generation_config.json and config.json")
    return found


def end_of_turn(tokenizer: PreTrainedTokenizerFast, source: str = "the model") -> int | None:
    """The special token that the chat template writes after an assistant's message; None if there is none.

    Found by rendering a message, so it is right for templates nobody has listed.
    """
    if not tokenizer.chat_template:
        return None
    marker = "the assistant's words"
    turns = (("user", "a question"), ("assistant", marker))
    rendered = render(tokenizer, [{"role": role, "content": text} for role, text in turns], source)
    tail = rendered.rpartition(marker)[2].lstrip() if marker in rendered else ""
    added = tokenizer.added_tokens_decoder.items()
    special = {token.content: index for index, token in added if token.special}
    matches = [token for token in special if token and tail.startswith(token)]
    return special[max(matches, key=len)] if matches else None


def render(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], source: str) -> str:
    """The text of a conversation, or "" if the template refuses it. A template that does not end is an error.

    The template is the model maker's program. Jinja's sandbox keeps it from all but time and memory, which `safe_readers` limits.
    """

    [found] = safe_readers.render_template(tokenizer, [(messages, False)])
    if isinstance(found, tuple):
        return found[0]
    advice = "for two short messages; replace chat_template.jinja"
    require(not found.limit, f"{source}: the chat template is not fit to run: {found} {advice}")
    # a template may insist on a system message or refuse roles: then it says nothing about its end
    return ""


def read_directory(
    folder: Path, dtype: torch.dtype | None, score: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Read model and tokenizer of a checked directory. `dtype` None keeps the checkpoint's own. With `score` it must be a reward
    model."""
    directory.check_directory(folder)
    safe: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    tokenizer = read_tokenizer(folder)
    try:
        where, sizes = str(folder / "config.json"), directory.weight_sizes(folder)
        # before transformers makes something for every layer
        bounds.check_numbers(where, directory.read_json(folder / "config.json"), *sizes)
        config = read_config(folder)
        check_head(str(folder), config, score)
        kind = class_for(config, score)
        with LOADING:
            bounds.check_size(where, kind, config, *sizes)
            model, report = kind.from_pretrained(
                folder,
                config=config,
                dtype="auto" if dtype is None else dtype,
                use_safetensors=True,
                attn_implementation=attention_for(config),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported, and refused below with their names; the error names none
                **safe,
            )
    except UserError:
        raise
    except Exception as error:
        raise UserError(unreadable(folder, error)) from error
    if score and getattr(config, "score_head", "") == "mlp":
        # not a head of transformers: who asked reads it
        report["missing_keys"] = {*report["missing_keys"]} - {"score.weight"}
    check_report(str(folder), report)
    return model, tokenizer


def class_for(config: PretrainedConfig, score: bool = False) -> Any:
    """The class of transformers that reads a model. One that also reads images (Gemma 3, Qwen3.5, Mistral 3) is read whole, so that
    what is written has all its weights."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    if score:
        return scorer_class(type(config))
    seeing = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    only = type(config) not in auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if seeing is not None and (only or seeing.__name__ in (config.architectures or ())):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def scorer_class(kind: type[PretrainedConfig]) -> Any:
    """The class of transformers that reads a reward model of a family. Where there is none (Granite, LFM2, Mamba) it is made of
    transformers' parts, under the usual name: such a reward model is read here alone."""
    from transformers import AutoModelForSequenceClassification
    from transformers.models.auto import modeling_auto as auto

    if kind in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or kind not in auto.MODEL_MAPPING:
        return AutoModelForSequenceClassification
    if kind not in _SCORERS:
        _SCORERS[kind] = _made_scorer(kind, auto.MODEL_MAPPING[kind])
    return _SCORERS[kind]


def _made_scorer(kind: type[PretrainedConfig], body: type[PreTrainedModel]) -> Any:
    from transformers import PreTrainedModel
    from transformers.modeling_layers import GenericForSequenceClassification

    family = next(base for base in body.__mro__[1:] if issubclass(base, PreTrainedModel))
    name = f"{body.__name__.removesuffix('Model')}ForSequenceClassification"
    own = {"__module__": body.__module__, "config_class": kind}
    own["from_config"] = vars(PreTrainedModel)["_from_config"]
    return type(name, (GenericForSequenceClassification, family), own)


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model directory."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer puts the rules of some families (Qwen 2, Llama) in place of tokenizer.json's; the file is the truth.
    whole = (folder / "tokenizer.json").is_file()
    if whole:
        bounds.check_growth(folder / "tokenizer.json")
    reader = PreTrainedTokenizerFast if whole else AutoTokenizer
    try:
        found = reader.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        # an expression that would try for ever fails here
        found(PROBE, add_special_tokens=False, verbose=False)
        return without_length_warning(found)
    # whatever a malformed file makes transformers raise, Rust's panics too
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        detail = f"the tokenizer cannot be read ({first_line(error)})"
        raise UserError(f"{folder}: {detail}; copy it anew") from error


def attention_for(config: PretrainedConfig) -> str | None:
    """The stock attention that computes this model as it was trained: `sdpa` ignores the soft cap of Gemma 2's scores."""
    text = config.get_text_config()
    return "eager" if getattr(text, "attn_logit_softcapping", None) is not None else None


def check_report(source: str, report: dict[str, Any]) -> None:
    """Raise an error if transformers filled in missing weights with random numbers, which it only reports in a warning."""
    for kind, meaning in (
        ("missing_keys", "are not in the weight files"),
        ("mismatched_keys", "do not have the shape config.json says"),
    ):
        found = report.get(kind) or ()
        names = sorted(name if isinstance(name, str) else name[0] for name in found)
        detail = f"{len(names)} tensors {meaning} ({', '.join(names[:2])})"
        require(not names, f"{source}: {detail}; copy the model anew")
