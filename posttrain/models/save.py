"""Writing a model as a plain checkpoint that `transformers` loads without posttrain: safetensors, config, tokenizer, template.

The directory appears whole or not at all.
"""

from __future__ import annotations

import copy
import errno
import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.errors import UserError, require
from posttrain.models.load import quiet
from posttrain.system.files import atomic_folder

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

# How a tokenizer was loaded, which transformers would write into its configuration.
LOADING_SETTINGS = ("is_local", "local_files_only", "trust_remote_code")
# Names of one class: version 5 of transformers writes the first, and version 4 knows only the second.
NEW_TOKENIZER, KNOWN_TOKENIZER = "TokenizersBackend", "PreTrainedTokenizerFast"
# how images are prepared, which transformers and vLLM read beside a model that takes them
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
FULL_DISK = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file may not be that large here (ulimit -f)",
}


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    directory: str | Path,
    replace: bool = False,
    adapter: Callable[[Path], None] | None = None,
) -> Path:
    """Write model and tokenizer to `directory` and return its path. With `replace`, an earlier export there is replaced. `adapter`
    writes the adapters that were merged into the model to a folder `adapter` of it.

    Weights keep their dtype, which config.json states; matrices that the model shares are written once and load as one.
    """
    target = Path(directory).expanduser().absolute()
    check_target(target, replace)
    with (
        one_line_when_unwritable(target),
        atomic_folder(target, f".{uuid.uuid4().hex[:12]}") as folder,
    ):
        if adapter is not None:
            adapter(folder / "adapter")
        write(model, tokenizer, folder)
    return target


def check_target(target: Path, replace: bool, how: str = "replace=True to overwrite it") -> None:
    """Refuse to write over anything but an earlier export, and over that only when asked; `how` says how."""
    if not target.exists() and not target.is_symlink():
        return
    advice, plain = "give another place to save the model", not target.is_symlink()
    require(target.is_dir() and plain, f"{target} is not a directory; {advice}")
    if not any(target.iterdir()):
        return
    exported = (target / "config.json").is_file()
    require(exported, f"{target} holds other files, and is left alone; {advice}")
    advice = f"give another place, or {how}"
    require(replace, f"{target} already holds a saved model; {advice}")


def write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """The files of a checkpoint, without traces of the process that wrote them."""
    kept = getattr(model, "generation_config", None)  # a reward model has none
    with quiet():
        try:
            if kept is not None:
                model.generation_config = savable(kept)
            model.save_pretrained(folder)
        finally:
            if kept is not None:
                model.generation_config = kept
        tokenizer.save_pretrained(folder)
    if hasattr(model.config, "vision_config"):
        for read in (Path(model.name_or_path, name) for name in PROCESSORS):
            if read.is_file():
                shutil.copyfile(read, folder / read.name)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8"))
    for name in LOADING_SETTINGS:
        settings.pop(name, None)
    if settings.get("tokenizer_class") == NEW_TOKENIZER:
        settings["tokenizer_class"] = KNOWN_TOKENIZER
    text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", "utf-8")
    mode = (folder / "config.json").stat().st_mode
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)  # safetensors makes files that only their owner can read


def savable(generation_config: GenerationConfig) -> GenerationConfig:
    """The generation config in a form that transformers agrees to write.

    Some published models set a temperature without sampling; transformers reads that but refuses to save it, and a trained
    model must not be lost over it.
    """
    sampling = copy.deepcopy(generation_config)
    sampling.do_sample = True
    for candidate in (generation_config, sampling):
        with suppress(ValueError):
            candidate.validate(strict=True)
            return candidate
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return type(generation_config)(**{n: getattr(generation_config, n, None) for n in names})


@contextmanager
def one_line_when_unwritable(target: Path) -> Iterator[None]:
    """Report a full or forbidden disk in one line. The safetensors writer raises an error of its own for it, not an OSError."""
    from safetensors import SafetensorError

    advice = "nothing was changed there; free some space or give another place"
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        for full, reason in FULL_DISK.items():
            if number == full or f"os error {full})" in str(error):
                raise UserError(f"{reason}: {target} could not be written; {advice}") from error
        forbidden = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
        if isinstance(error, OSError) and number in forbidden:
            found = f"{target} cannot be written ({error.strerror})"
            raise UserError(f"{found}; give another place to save the model") from error
        raise
