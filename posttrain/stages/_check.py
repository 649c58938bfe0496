"""Checks of a pipeline before its first stage runs. `plan` and a run call the same functions, so both raise the same errors."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from heapq import nlargest
from pathlib import Path

from posttrain.data.chat import check_continues, render_prompts, unopened
from posttrain.data.text import unknown_tokens
from posttrain.errors import many, prefixed, refuse_unknown, require
from posttrain.models import given
from posttrain.models.directory import GIVE
from posttrain.models.load import Reader, outline, same_vocabulary
from posttrain.models.policy import Policy
from posttrain.models.tiny import MAX_POSITIONS, SIZES, character_tokenizer
from posttrain.stages.base import Stage, check_names, temporary_context
from posttrain.tasks.base import Task
from posttrain.trust import PREFIX
from posttrain.types import Problem

PROMPTS = 256  # how many of the first prompts, and of the longest, are compared with the model's positions and vocabulary
Readers = dict[tuple[str, str, bool | None], Reader]  # by (name, alphabet of a tiny model, kind)


def check_stages(
    stages: Sequence[Stage],
    seed: int,
    device: str,
    due: Collection[str],
    read: Collection[str] = (),
) -> dict[str, list[str]]:
    """Raise an error if a stage that is `due` names something that does not exist, or asks for something impossible. The data of
    the stages in `read` is read completely; a stage that runs at once, or that a plan reads, reads its own data. Returns warnings
    by stage."""
    names = check_names(stages)
    for place, stage in enumerate(stages):
        if stage.name in due:
            check_named(stage, stages[:place], names[place:])
    before: dict[str, Stage] = {}
    readers: Readers = {}
    warnings: dict[str, list[str]] = {}
    with temporary_context(seed, device) as context:
        for stage in stages:
            if stage.name in due:
                with prefixed(stage.name):
                    stage.check_ready(device, names)
                reader = check_models(stage, before, readers)
                warnings[stage.name] = check_problems(stage, reader)
                if stage.name in read:
                    with prefixed(stage.name):
                        stage.check_data(reader, context, before)
            before[stage.name] = stage
    return warnings


def check_named(stage: Stage, before: Sequence[Stage], later: Collection[str]) -> None:
    """Raise an error for names of later stages, for stages that do not produce what is asked of them, and for missing files."""
    for key, word in stage.named("stage"):
        check_stage(f"{stage.name}.{key}", word, before, later)
    for what in ("model", "reward model", "data"):
        for key, word in stage.named(what):
            check_word(f"{stage.name}.{key}", word, what, before, later)


def check_word(
    where: str, word: str, what: str, before: Sequence[Stage], later: Collection[str]
) -> None:
    """Raise an error for a word that is neither a stage that produces `what`, nor a file or a model."""
    fitting = [one for one in before if one.leaves is None or one.leaves.endswith(what)]
    found = next((one for one in before if one.name == word), None)
    if found is not None:
        names = [one.name for one in fitting if one.leaves is not None]
        hint = f"name {' or '.join(names)}" if names else "name a file or a directory"
        require(found in fitting, f"{where}: the stage {word!r} leaves no {what}; {hint}")
        return
    if word in later and not Path(word).expanduser().exists():
        check_stage(where, word, before, later)
    there = file_there if what == "data" else model_there
    there(where, word, [one.name for one in fitting])


def check_stage(where: str, word: str, before: Sequence[Stage], later: Collection[str]) -> None:
    """Raise an error for a name that is not that of an earlier stage."""
    names = [stage.name for stage in before]
    known = f"those before it are {', '.join(names)}" if names else "there is none before it"
    order = f"{where}: {word!r} runs at the same time or later, and has made nothing yet"
    require(word not in later, f"{order}; {known}")
    require(word in names, f"{where}: no stage is called {word!r}{nearest(word, names)}; {known}")


def nearest(word: str, names: Sequence[str]) -> str:
    near = get_close_matches(word, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def model_there(where: str, word: str, stages: Sequence[str]) -> None:
    """Raise an error for a plain word that is neither a stage nor a directory. Other names are checked when the model is read."""
    require(word.strip(), f"{where}: the model name is empty; {GIVE}")
    plain = not set(word) & set("/:") and not Path(word).suffix
    found = not plain or Path(word).expanduser().exists()
    hint = "give a directory, a .gguf file, a hub name (org/name), tiny:nano, or an earlier stage"
    nobody = f"{where}: there is no model {word!r}, neither a stage before it nor a directory"
    require(found, f"{nobody}{nearest(word, stages) or f'; {hint}'}")


def file_there(where: str, word: str, stages: Sequence[str]) -> None:
    path = Path(word).expanduser()
    require(not path.is_dir(), f"{where}: {word} is a directory; name a file in it")
    place = "" if path.is_absolute() else f" in {Path.cwd()}"
    hint = nearest(word, [*stages, *neighbours(path)]) or "; check the path"
    require(path.is_file(), f"{where}: there is no file {word}{place}{hint}")


def neighbours(path: Path) -> list[str]:
    """Files next to a missing one, written as in a setting."""
    folder = path.parent
    return [str(one) for one in sorted(folder.glob("*"))[:1000]] if folder.is_dir() else []


def check_models(stage: Stage, before: Mapping[str, Stage], readers: Readers) -> Reader:
    """The reader of a stage's model. The models that receive its token ids must have its vocabulary. The model of an earlier stage
    reads like that stage's starting model."""
    for what in ("model", "reward model"):
        for key, word in stage.named(what):
            with prefixed(f"{stage.name}.{key}"):
                find_reader(word, stage, what != "model", before, readers)
    reader = find_reader(stage.starts_from(), stage, False, before, readers)
    for name in dict.fromkeys(stage.reads_ids()):
        other = find_reader(name, stage, None, before, readers)
        if reader.tokenizer is not None and other.tokenizer is not None:
            same_vocabulary(stage.name, reader, other)
    return reader


def find_reader(
    name: str, stage: Stage, score: bool | None, before: Mapping[str, Stage], readers: Readers
) -> Reader:
    """How the model called `name` reads. With `score` it must be a reward model, without it must not, as far as that is known; None:
    either."""
    while name in before:
        stage, name, score = before[name], before[name].starts_from(), False
    if not name:
        return Reader(None, name)
    tiny = name.startswith("tiny:") and not score
    key = (name, stage.alphabet() if tiny else "", score)
    if key not in readers and tiny:
        refuse_unknown("tiny model size", [name.removeprefix("tiny:")], SIZES)
        readers[key] = Reader(character_tokenizer(key[1]), name, MAX_POSITIONS)
    elif key not in readers:
        readers[key] = given.reader(name) if name.startswith(PREFIX) else outline(name, score)
    return readers[key]


def check_problems(stage: Stage, reader: Reader | Policy) -> list[str]:
    """Raise an error for splits without problems, and for prompts that do not fit the model together with their responses. Returns
    lines about prompt text that the vocabulary lacks, and about prompts that do not open the assistant's turn."""
    # the task as its model reads it, including a hint
    task = stage.tasks()[0] if hasattr(stage, "task") else None
    sampling = getattr(stage, "sampling", None)
    if not isinstance(task, Task):
        return []
    seen: list[tuple[int, ...]] = []
    with prefixed(f"{stage.name}.task"):
        if reader.tokenizer is not None:
            template = str(reader.tokenizer.chat_template or "")
            check_continues(reader.tokenizer, task.observation_roles(template))
        for split, level in stage.splits():
            problems = task.problems(split, level)
            held = "held-out" if split == "test" else "training"
            of_level = "" if level is None else f" of level {level}"
            lacking = f"the task has no {held} problem{of_level}"
            advice = "give a test file, or hold some out" if split == "test" else "give others"
            require(len(problems) > 0, f"{lacking}; {advice}")
            if reader.tokenizer is None or sampling is None:
                continue
            looked = first_and_longest(stage.asks(split, problems))
            names = [f"problem {p.id}" for p in looked]
            asked = zip(names, map(task.prompt, looked), strict=True)
            prompts = render_prompts(reader.tokenizer, asked)
            longest, name = max(zip(map(len, prompts), names, strict=True))
            room = (reader.positions or sys.maxsize) - sampling.max_new_tokens
            long = [p.id for p, ids in zip(looked, prompts, strict=True) if len(ids) > room]
            # the longest were looked at, so that only many may be more
            these = f"{'at least ' * (len(long) >= PROMPTS)}{len(long):,} of {len(problems):,}"
            which = f"{', '.join(long[:5])}{', ...' * (len(long) > 5)}"
            rows = f", or leave out or shorten the {these} {held} prompts of more than {room:,} tokens ({which})"
            with prefixed(name):
                advice = f"lower max_new_tokens{rows if room > 0 else ''}"
                reader.check_length(longest + sampling.max_new_tokens, advice)
            seen += prompts
    lines = unknown_tokens(reader.tokenizer, seen) if seen else []
    lines = [f"of {many(len(seen), 'prompt')} that were looked at, {line}" for line in lines]
    if seen and (opening := unopened(reader.tokenizer)):
        none = "the chat template has no generation prompt ({% if add_generation_prompt %})"
        lines.append(f"{none}: the model itself must begin its answers with {opening!r}")
    return lines


def first_and_longest(problems: Sequence[Problem]) -> list[Problem]:
    """The first problems and as many of the longest others, among problems that were read and need not be generated. The length of
    a conversation is that of all its turns."""
    first = [problems[n] for n in range(min(PROMPTS, len(problems)))]
    rest = problems[PROMPTS:] if isinstance(problems, list | tuple) else ()
    return [*first, *nlargest(PROMPTS, rest, key=_asked_length)]


def _asked_length(problem: Problem) -> int:
    return sum(len(str(turn)) for turn in problem.facts.get("messages") or [problem.question])
