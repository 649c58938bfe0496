"""The API of the rollouts page and the pipeline page: responses by step, problem and group, token by token, and stage by
stage."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from posttrain.errors import require
from posttrain.runs.index import Filter, Found, Index
from posttrain.runs.layout import RolloutRow
from posttrain.runs.tokens import rollout_tokens
from posttrain.studio.library import require_stage, stages
from posttrain.studio.replies import Missing, number, reply, routes_of, text_of, whole, word
from posttrain.types import JSON

if TYPE_CHECKING:
    from posttrain.studio.app import Studio

SHORT = 600  # characters of a text in a list
LONGEST = 200_000  # characters of a text on its own page
ANSWER_TOKENS = 256
INDEX_SECONDS = 0.4  # spent on indexing in one request; the next request continues


def routes(studio: Studio) -> list[Any]:
    return routes_of(
        studio,
        ("/api/runs/{run}/rollouts", _rollouts),
        ("/api/runs/{run}/rollouts.jsonl", _export),
        ("/api/runs/{run}/rollouts/{stage}/{step:int}/{number:int}", _rollout),
        ("/api/runs/{run}/pipeline", _pipeline),
        ("/api/runs/{run}/ask", _ask, "POST"),
    )


def filter_of(request: Request) -> Filter:
    """The filter that an address states; its keys are the fields of Filter."""
    found: dict[str, Any] = {}
    for one in fields(Filter):
        said = word(request, one.name)
        if said and one.name.endswith(("_from", "_to")):
            whole_number = one.name.startswith(("step", "length"))
            found[one.name] = number(request, one.name, int if whole_number else float, 0)
        elif said:
            found[one.name] = said == "true" if one.name == "failed" else said
    return Filter(**found)


def _rollouts(studio: Studio, request: Request) -> Response:
    index = studio.index(request)
    left = index.read_rollouts(INDEX_SECONDS)
    wanted = filter_of(request)
    sort, down = word(request, "sort", "step"), word(request, "down") == "true"
    limit, skip = whole(request, "limit", 50, 200), whole(request, "skip", 0, 10**8)
    found = index.find(wanted, sort, down, limit, skip)
    rows = [shown(one, row, SHORT) for one, row in zip(found, index.text(found), strict=True)]
    every = {"total": index.count(wanted), "choices": index.choices(), "left": left}
    return reply({"rollouts": rows, **every})


def at_step(stage: str, step: int) -> Filter:
    return Filter(stage=stage, step_from=step, step_to=step)


def numbered(found: Sequence[Found], number: int) -> Found:
    mine = next((one for one in found if one.number == number), None)
    if mine is None:
        raise Missing("no such rollout")
    return mine


def shown(found: Found, row: RolloutRow, limit: int) -> JSON:
    """A rollout for the page: its fields in the index, and its text up to a limit."""
    texts = {name: getattr(row, name)[:limit] for name in ("question", "answer", "response")}
    said = {"cut": len(row.response) > limit, "characters": len(row.response)}
    conversation = [[kind, text[:limit]] for kind, text in getattr(row, "conversation", ())]
    return {**asdict(found), **texts, **said, "conversation": conversation}


def _export(studio: Studio, request: Request) -> Response:
    """The rollouts that match a filter, as JSONL, as they stand in the run's files."""
    index = studio.index(request)
    wanted = filter_of(request)

    def lines() -> Iterator[str]:
        skip = 0
        while found := index.find(wanted, "step", limit=500, skip=skip):
            for one, row in zip(found, index.text(found), strict=True):
                place = {"stage": one.stage, "step": one.step, "number": one.number}
                yield json.dumps({**place, **asdict(row)}) + "\n"
            skip += len(found)

    headers = {"content-disposition": 'attachment; filename="rollouts.jsonl"'}
    return StreamingResponse(lines(), media_type="application/x-ndjson", headers=headers)


def _rollout(studio: Studio, request: Request) -> Response:
    """One rollout with its tokens, and the other rollouts of its group."""
    index = studio.index(request)
    place = request.path_params
    stage = require_stage(index, place["stage"])
    index.read_rollouts(INDEX_SECONDS, (stage, place["step"]))
    found = index.find(at_step(stage, place["step"]), "number", limit=100_000)
    mine = numbered(found, place["number"])
    group = [one for one in found if (one.problem, one.role) == (mine.problem, mine.role)][:64]
    rows = index.text(group)
    tokens = rollout_tokens(index.run, mine.stage, mine.step, mine.number, mine.length, len(found))
    return reply(
        {
            "rollout": shown(mine, rows[group.index(mine)], LONGEST),
            "group": [shown(one, row, 4 * SHORT) for one, row in zip(group, rows, strict=True)],
            "tokens": tokens,
            "steps": [step for step, *_ in index.rollout_steps(stage)],
            "count": len(found),
        }
    )


def _pipeline(studio: Studio, request: Request) -> Response:
    """Answers to the same prompts from every stage that answered them, as the run saved them: held-out problems of evaluate
    stages, and rollouts of rl stages, step by step."""
    index = studio.index(request)
    left = index.read_rollouts(INDEX_SECONDS)
    config = stages(index.run.config)
    found = [{"name": s["name"], "steps": index.rollout_steps(str(s["name"]))} for s in config]
    prompts = [{"question": q[:SHORT]} for q in prompts_of(index, word(request, "text").lower())]
    answers = _answers(index, config, word(request, "prompt"))
    return reply({"stages": found, "left": left, "prompts": prompts, "answers": answers})


def _evaluations(
    index: Index, config: Sequence[dict[str, JSON]]
) -> Iterator[tuple[dict[str, JSON], list[dict[str, JSON]]]]:
    for settings in config:
        rows = index.run.stage_rows(str(settings["name"]), "problems.jsonl")
        if rows and "responses" in rows[0] and "question" in rows[0]:
            yield settings, rows


def prompts_of(index: Index, text: str = "") -> list[str]:
    """Prompts that the run has answers to. Those that every stage answered come first, then those of evaluations, and
    among these first the ones whose answers changed, then those of rollouts."""
    seen: dict[str, list[JSON]] = {}
    for _, rows in _evaluations(index, stages(index.run.config)):
        for row in rows:
            if text in str(row["question"]).lower():
                seen.setdefault(str(row["question"]), []).append((row.get("values") or [None])[0])
    ranked = sorted(seen, key=lambda q: (-len(seen[q]), -(len({str(v) for v in seen[q]}) > 1)))
    first = [row.prompt for row in index.run.answers() if text in row.prompt.lower()]
    return [*dict.fromkeys([*first, *ranked[:200], *index.questions(text)])]


def _answers(index: Index, config: Sequence[dict[str, JSON]], prompt: str) -> list[JSON]:
    """Each model's answers to one prompt: at the end of the run, in an evaluation, in a comparison of two models, or in
    rollouts."""
    if not prompt:
        return []
    found: dict[str, dict[str, JSON]] = {}
    for said in index.run.answers():
        if said.prompt[:SHORT] == prompt:
            one = {"text": said.response[:LONGEST], "reward": None, "outcome": ""}
            place = {"stage": said.stage, "model": said.stage, "note": "saved at the end"}
            found[said.stage] = {**place, "gold": said.answer, "answers": [one]}
    if found:
        return [*found.values()]
    for settings, rows in _evaluations(index, config):
        for row in (row for row in rows if str(row["question"])[:SHORT] == prompt):
            versus = "won" in row and len(row["responses"]) == 2
            models = [settings.get("against")] * versus + [settings.get("model")]
            for model in models:
                name, gold = settings["name"], row.get("answer")
                measured = {"stage": name, "model": model, "gold": gold, "answers": []}
                held = found.setdefault(f"{name} {model}", measured)["answers"]
                held += _listed(row, models.index(model) ^ 1 if versus else None)
    shown = [{**one, "answers": one["answers"][:8]} for one in found.values()]
    return shown or [*_first_and_last(index, config, prompt)]


def _listed(row: dict[str, JSON], side: int | None) -> list[JSON]:
    """The answers in a row of an evaluation; in a row of a comparison, those of one side."""
    outcomes = row.get("outcomes") or [""] * len(row["responses"])
    listed = zip(row["responses"], row.get("values") or [], outcomes, strict=False)
    answers = [{"text": str(t)[:LONGEST], "reward": v, "outcome": o} for t, v, o in listed]
    return answers if side is None else answers[side : side + 1]


def _first_and_last(index: Index, config: Sequence[dict[str, JSON]], prompt: str) -> Iterator[JSON]:
    """Rollouts of a prompt at the first and at the last step of each stage that drew it."""
    for settings in config:
        stage = str(settings["name"])
        drawn = index.find(Filter(stage=stage, question=prompt), "step", limit=1)
        drawn += index.find(Filter(stage=stage, question=prompt), "step", down=True, limit=1)
        for step in sorted({one.step for one in drawn}):
            here = Filter(stage=stage, question=prompt, step_from=step, step_to=step)
            found = index.find(here, "number", limit=8)
            answers = []
            for one, row in zip(found, index.text(found), strict=True):
                paid = {"reward": one.reward, "tokens": one.length, "outcome": one.outcome}
                answers.append({"text": row.response[:LONGEST], **paid})
            model = f"{stage}, step {step}"
            yield {"stage": stage, "model": model, "note": "a rollout", "answers": answers}


def _ask(studio: Studio, request: Request, sent: dict[str, JSON]) -> Response:
    """Sample answers from the model of every stage to a prompt that the user typed, with their rewards."""
    prompt, gold = text_of(sent, "prompt", 4000), text_of(sent, "gold", 4000, "")
    require(prompt.strip(), "type a prompt")
    return reply({"answers": ask_stages(studio, studio.index(request).run.directory, prompt, gold)})


def ask_stages(studio: Studio, directory: Path, prompt: str, gold: str) -> list[JSON]:
    """Answer one prompt with the model of every stage, at the same seed and temperature, and score each answer."""
    server = studio.models.of_run(directory)
    said, found = [{"role": "user", "content": prompt}], []
    for name in server.names():
        [answer] = server.answers(name, said, {"seed": 0, "max_tokens": ANSWER_TOKENS})
        found.append({"stage": name, **answer, "tokens": len(answer["tokens"])})
    server.judge(found, gold)
    return found
