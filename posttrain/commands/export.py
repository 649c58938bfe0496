"""Exports a run's model: to a folder with its card, to a hub, or to a GGUF file by llama.cpp's converter."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from posttrain.commands.card import model_card
from posttrain.errors import UserError, first_line, require
from posttrain.models.directory import check_directory
from posttrain.models.load import HUB_NAME
from posttrain.models.save import check_target, one_line_when_unwritable
from posttrain.runs.read import Run
from posttrain.system.files import atomic_folder, atomic_write, read_json, read_text

# files of a model; other files in its folder are not exported
FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
CONVERTER, LLAMA_CPP = "convert_hf_to_gguf.py", "LLAMA_CPP"


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which model of a run, and the fields of its card."""

    run: Path
    stage: str = ""  # "": the stage that the run exports
    adapter: bool = False  # only the LoRA adapters
    base: str = ""  # the hub name of the model that they belong to
    licence: str = ""
    card: Path | None = None  # the user's own card


def folder_of(chosen: Chosen) -> Path:
    """Return the folder of the chosen model."""
    run, stage = Run(chosen.run), chosen.stage
    names = run.configured
    other = f"{chosen.run} has no stage {stage!r}; it has {', '.join(names)}"
    require(not stage or stage in names, other)
    folder = chosen.run / "stages" / stage / "model" if stage else chosen.run / "export"
    advice = "let it end (posttrain resume), or choose another with --stage NAME"
    require((folder / "config.json").is_file(), f"{chosen.run} has no model in {folder}; {advice}")
    check_directory(folder)
    if not chosen.adapter:
        return folder
    none = f"{folder} has no adapters: its stage was trained without lora; leave out --adapter"
    require((folder / "adapter" / "adapter_config.json").is_file(), none)
    return folder / "adapter"


def write_folder(chosen: Chosen, folder: Path) -> None:
    """Write the model's files and README.md, as they are published."""
    source, base = folder_of(chosen), chosen.base
    for path in sorted(path for pattern in FILES for path in source.glob(pattern)):
        shutil.copyfile(path, folder / path.name)
    if chosen.adapter:
        settings = read_json(folder / "adapter_config.json")
        base = base or str(settings.get("base_model_name_or_path", ""))
        advice = "name it with --base ORG/NAME, or publish the merged model without --adapter"
        named = HUB_NAME.fullmatch(base) is not None and not Path(base).exists()
        other = f"the adapters are for {base}, which is not the name of a model on the hub"
        require(named, f"{other}; {advice}")
        settings["base_model_name_or_path"] = base
        atomic_write(folder / "adapter_config.json", json.dumps(settings, indent=2) + "\n")
    if chosen.card:
        require(chosen.card.is_file(), f"--card {chosen.card}: there is no such file")
        text = read_text(chosen.card)
    else:
        text = model_card(Run(chosen.run), chosen.licence, base, chosen.adapter, chosen.stage)
    atomic_write(folder / "README.md", text)


def export(chosen: Chosen, target: Path) -> Path:
    """Write to a new folder what `push` would send; the folder appears complete or not at all."""
    check_target(target.absolute(), False, "remove that folder first")
    with one_line_when_unwritable(target), atomic_folder(target.absolute()) as folder:
        write_folder(chosen, folder)
    return target


def push(chosen: Chosen, repository: str, public: bool = False) -> Iterator[str]:
    """Send the model to a hub and yield the address of the commit. The hub's library uses its own token, HF_TOKEN or that of
    `hf auth login`; it is neither read nor written here. A new repository is private unless `public`; an existing one keeps its
    visibility."""
    import httpx  # used by the hub's library
    from huggingface_hub import HfApi, errors

    fine = HUB_NAME.fullmatch(repository) is not None and "@" not in repository
    require(fine, f"{repository!r} is not the name of a repository, such as org/name")
    with tempfile.TemporaryDirectory(prefix="posttrain-push-") as made:
        with one_line_when_unwritable(Path(made)):
            write_folder(chosen, Path(made))
        try:
            api = HfApi()
            api.create_repo(repository, private=not public, exist_ok=True)
            message = "Upload with posttrain"
            done = api.upload_folder(repo_id=repository, folder_path=made, commit_message=message)
        except (errors.HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
            code = getattr(getattr(error, "response", None), "status_code", None)
            if code in (401, 403) or "token" in first_line(error).lower():
                found = f"the hub refuses to write {repository}: set HF_TOKEN to a token that may"
                found += " write there, or log in with `hf auth login`"
            else:
                found = f"{repository} cannot be written to the hub ({first_line(error)}); check the network, then push again"
            raise UserError(found) from None
    if not chosen.adapter and (folder_of(chosen) / "adapter").is_dir():
        yield "the adapters were not sent, they are merged into the model; to send them alone: --adapter, to a repository of their own"
    yield f"{repository}: {getattr(done, 'commit_url', done)}"


def to_gguf(chosen: Chosen, target: Path, kind: str) -> Path:
    """Make a GGUF file of the chosen model with llama.cpp's converter."""
    require(target.suffix == ".gguf", f"{target}: the name of a GGUF file ends in .gguf")
    require(not target.exists(), f"{target} is there already; give another name")
    require(not chosen.adapter, "--adapter: GGUF files are made of whole models; leave it out")
    converter, source = find_converter(), folder_of(chosen)
    part = target.with_name(f".{target.name}.part.gguf")
    line = [sys.executable, str(converter), str(source), "--outfile", str(part), "--outtype", kind]
    try:
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode or not part.is_file():
            last = [*filter(str.strip, ["it says nothing", *done.stderr.splitlines()])][-1]
            failed = f"{converter} cannot convert {source} (exit {done.returncode})"
            raise UserError(f"{failed}: {last.strip()[:300]}")
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)
    return target


def find_converter() -> Path:
    """Return llama.cpp's converter: in the folder that LLAMA_CPP names, or on the PATH."""
    folder = os.environ.get(LLAMA_CPP, "")
    found = Path(folder, CONVERTER) if folder else Path(shutil.which(CONVERTER) or "")
    advice = f"clone llama.cpp and set {LLAMA_CPP} to its folder, or put {CONVERTER} on the PATH"
    none = f"{found} is not there" if folder else f"{CONVERTER} of llama.cpp is not installed"
    require(found.is_file(), f"{none}; {advice}")
    return found
