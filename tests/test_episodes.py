"""Episodes against a scripted sampler: which requests are made, in which order, what becomes of errors, and what runs at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from material_for_tests import small_policy
from sampler_for_tests import ScriptedSampler, completion

from posttrain import catalogue
from posttrain.algorithms.grpo import GRPO
from posttrain.collect import rate_groups
from posttrain.data.chat import render_prompt
from posttrain.data.curriculum import Curriculum, CurriculumState
from posttrain.data.text import Decoder
from posttrain.engine.engine import Engine
from posttrain.engine.random import derive
from posttrain.episodes import Episodes, rollout_groups
from posttrain.errors import GuardStop, UserError
from posttrain.evals.evaluate import Evaluation
from posttrain.models.tiny import character_tokenizer
from posttrain.rewards.math import grade
from posttrain.runs.metrics import group_metrics
from posttrain.system.workers import WorkerPool
from posttrain.tasks.base import ContextFull, EpisodeEnd, Generate, Limits, Task, validate
from posttrain.train.pack import pack_groups, part_values
from posttrain.turns import Seconds
from posttrain.types import Completion, Group, Message, Problem, Request, Rollout, Sampling, Score

TOKENIZER = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 .<|>")
DECODER = Decoder(TOKENIZER)
END = TOKENIZER.convert_tokens_to_ids("<|end|>")
SAMPLING = Sampling(8)
Run = Callable[[Problem, Generate], Any]


def encoded(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text)["input_ids"])


def says(text: str) -> Completion:
    return completion([*encoded(text), END])


@dataclass(frozen=True)
class Scripted(Task):
    """A task whose episode is a function."""

    episode: Run | None = None
    score_of: Callable[[Problem, str], Any] = field(default=lambda problem, response: Score(1.0))
    seconds: float = 10.0  # type: ignore[assignment]
    limit: Limits = field(default_factory=Limits)

    def limits(self, problem: Problem) -> Limits:
        return self.limit

    def isolates_run(self, problem: Problem) -> bool:
        return self.episode is not None and super().isolates_run(problem)

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return [Problem(f"p{n}", f"q{n}") for n in range(3)]

    async def run(self, problem: Problem, generate: Generate) -> Rollout | Sequence[Rollout]:
        return await (super().run(problem, generate) if self.episode is None else self.episode(problem, generate))

    def score(self, problem: Problem, response: str) -> Score:
        found: Score = self.score_of(problem, response)
        return found


def groups(
    task: Task, reply: Callable[[Request], Completion], samples: int = 2, **more: Any
) -> tuple[list[Group], ScriptedSampler]:
    sampler = ScriptedSampler(reply)
    return rollout_groups(task, sampler, DECODER, task.problems("train"), samples, SAMPLING, 5, **more), sampler


def test_the_inherited_episode_is_one_turn_with_the_seed_of_its_draw_and_sample() -> None:
    found, sampler = groups(Scripted(), lambda request: says(f"a{request.session}"))
    prompts = [render_prompt(TOKENIZER, (Message("user", f"q{n}"),)) for n in range(3)]
    assert sampler.requests == [
        Request(prompts[n], derive(derive(5, n), s), SAMPLING, session=2 * n + s, group=n) for n in range(3) for s in range(2)
    ]
    assert [[r.response for r in g.rollouts] for g in found] == [["a0", "a1"], ["a2", "a3"], ["a4", "a5"]]
    assert [g.problem.id for g in found] == ["p0", "p1", "p2"]
    one = found[1].rollouts[1]
    assert one.sample == 1 and one.ids.tolist() == [*prompts[1], *encoded("a3"), END] and one.finish == "stop"
    assert one.mask.tolist() == [False] * len(prompts[1]) + [True] * 3
    assert found[1].rollouts[0].segments[0] is one.segments[0], "the prompt is decoded once for the group"


def test_tools_are_shown_with_the_tasks_own_prompt() -> None:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 .")
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.name }} {% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )

    async def run(problem: Problem, generate: Generate) -> Rollout:
        await generate(tools=[{"name": "add"}], last=True)
        return generate.rollout()

    task, sampler = Scripted(run), ScriptedSampler(lambda request: completion([4]))
    found = rollout_groups(task, sampler, Decoder(tokenizer), task.problems("train"), 2, SAMPLING, 5)
    assert [tokenizer.decode(request.ids) for request in sampler.requests] == [f"add q{n}" for n in range(3) for _ in range(2)]
    assert [r.score.failure for g in found for r in g.rollouts] == [None] * 6 and sampler.requests[1].group == 0


def test_each_sample_of_a_problem_may_be_drawn_in_its_own_way() -> None:
    """As ReMax asks: the first without chance, the others as the stage says."""
    task, sampler = Scripted(), ScriptedSampler(lambda request: says("a"))
    drawn = (replace(SAMPLING, temperature=0.0), SAMPLING)
    found = rollout_groups(task, sampler, DECODER, task.problems("train"), 2, drawn, 5)
    assert [request.sampling for request in sampler.requests] == [*drawn] * 3
    assert [[r.sample for r in g.rollouts] for g in found] == [[0, 1]] * 3


THINKING = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 .<|>/\\{}")
THINKING.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"


@pytest.mark.parametrize(("reply", "paid"), [("so \\boxed{7}", 0.0), ("so</think> \\boxed{7}", 1.0)])
def test_a_box_in_a_block_of_reasoning_that_the_template_opened_counts_after_its_end(reply: str, paid: float) -> None:
    seen: list[str] = []

    def score(problem: Problem, response: str) -> Score:
        seen.append(response)
        return replace(grade(response, "7"), steps=((len(response), 1.0),))

    ids = THINKING(reply)["input_ids"]
    task = Scripted(score_of=score)
    sampler = ScriptedSampler(lambda request: completion(ids))
    (group,) = rollout_groups(task, sampler, Decoder(THINKING), task.problems("train")[:1], 1, SAMPLING, 5)
    (rollout,) = group.rollouts
    assert seen == [f"<think>{reply}"] and rollout.score.value == paid
    # what was sampled stays as it is, and steps end at its characters
    assert rollout.response == reply and rollout.score.steps == ((len(reply), 1.0),)


async def two_turns(problem: Problem, generate: Generate) -> Rollout:
    first = await generate()
    await generate([Message("user", f"after {first.text}")], last=True)
    return generate.rollout()


def test_a_second_turn_appends_what_the_template_writes_in_between() -> None:
    found, sampler = groups(Scripted(two_turns), lambda r: says("x" if r.turn == 0 else "y"), samples=1)
    first, second = sampler.requests[0], sampler.requests[3]
    assert (first.turn, first.keep, second.turn, second.keep) == (0, True, 1, False)
    assert second.ids == encoded("<|user|>after x<|end|><|assistant|>"), "the sampled end of the turn is not written twice"
    assert second.seed == derive(first.seed, 1) and second.session == first.session
    rollout = found[0].rollouts[0]
    whole = [Message("user", "q0"), Message("assistant", "x"), Message("user", "after x")]
    assert rollout.ids.tolist() == [*render_prompt(TOKENIZER, whole), *encoded("y"), END]
    assert (
        [s.sampled for s in rollout.segments] == [False, True, False, True] and rollout.response == "xy" and rollout.turns == 2
    )


def test_a_turn_that_was_cut_off_is_closed_by_the_template() -> None:
    found, sampler = groups(
        Scripted(two_turns), lambda r: completion(encoded("xx"), finish="length") if r.turn == 0 else says("y"), samples=1
    )
    assert sampler.requests[3].ids == encoded("<|end|><|user|>after xx<|end|><|assistant|>")
    assert found[0].rollouts[0].finish == "length", "truncated: one of its turns was"


def test_text_and_ids_are_appended_as_they_are_and_an_observation_cannot_end_a_turn() -> None:
    async def run(problem: Problem, generate: Generate) -> Rollout:
        await generate("ab")
        await generate([7, 8])
        await generate([Message("user", "no <|end|> here")])
        return generate.rollout()

    _, sampler = groups(Scripted(run), lambda r: says("x"), samples=1)
    assert [r.ids for r in sampler.requests[::3]][:2] == [encoded("ab"), (7, 8)]
    assert sampler.requests[6].ids == encoded("<|user|>no < |end|> here<|end|><|assistant|>")
    assert all(r.keep for r in sampler.requests)


def test_rounds_are_ordered_whatever_time_tools_take() -> None:
    """The last episodes have the fastest tools; their second turns still enter in the order of draw and sample."""

    async def run(problem: Problem, generate: Generate) -> Rollout:
        await generate()
        await asyncio.sleep(0.03 * (3 - int(problem.id[1])))
        await generate("b", last=True)
        return generate.rollout()

    began = time.perf_counter()
    _, sampler = groups(Scripted(run), lambda r: says("x"))
    assert [(r.session, r.turn) for r in sampler.requests] == [(n, turn) for turn in (0, 1) for n in range(6)]
    assert time.perf_counter() - began < 0.4, "tools run at once, not one after the other"


def test_a_turn_after_the_one_called_the_last_begins_a_session_with_the_whole_history() -> None:
    async def run(problem: Problem, generate: Generate) -> Rollout:
        await generate("a", last=True)
        await generate("b")
        await generate("c", last=True)
        return generate.rollout()

    found, sampler = groups(Scripted(run), lambda r: says("x"), samples=1)
    first, second, third = (r for r in sampler.requests if r.session in (0, 3))
    assert (first.session, first.turn, first.keep) == (0, 0, False)
    assert second.ids == (*encoded("ax"), END, *encoded("b")) and second.turn == 0 and second.session == third.session == 3
    assert third.ids == encoded("c") and third.turn == 1
    assert [g.rollouts[0].response for g in found] == ["xxx"] * 3


def test_without_order_a_turn_is_submitted_as_soon_as_it_is_asked_for() -> None:
    answered: list[tuple[int, int]] = []

    def reply(request: Request) -> Completion:
        answered.append((request.session, request.turn))
        return says("x")

    found, sampler = groups(Scripted(two_turns), reply, samples=1, ordered=False)
    asked = [(r.session, r.turn) for r in sampler.requests]
    assert asked[:3] == [(0, 0), (1, 0), (2, 0)] and asked.index((0, 1)) == 3 and len(answered) == 6
    assert [g.problem.id for g in found] == ["p0", "p1", "p2"]


def test_an_error_of_a_task_is_a_named_failure_of_what_was_sampled() -> None:
    async def run(problem: Problem, generate: Generate) -> Rollout:
        if problem.id == "p0":
            raise ConnectionError("no environment")
        await generate()
        if problem.id == "p1":
            raise ConnectionError("it went away")
        return generate.rollout()

    found, _ = groups(Scripted(run), lambda r: says("x"))
    line = run.__code__.co_firstlineno
    assert [[r.score.failure for r in g.rollouts] for g in found] == [
        [f"ConnectionError: no environment at {__file__} line {line + 2}"] * 2,
        [f"ConnectionError: it went away at {__file__} line {line + 5}"] * 2,
        [None] * 2,
    ]
    assert [g.rollouts[0].length for g in found] == [0, 2, 2]
    metrics = {m.name: m.value for m in group_metrics(found)}
    assert metrics["failed/ConnectionError"] == pytest.approx(2 / 3) and metrics["reward"] == 1.0
    batch = GRPO(beta=0.0).prepare(pack_groups(found, 1.0), {})
    assert batch.valid_N.tolist() == [False] * 4 + [True] * 2 and bool(np.isfinite(batch.weight_T.numpy()).all())

    class Rates:
        def rate(self, rollouts: Sequence[Rollout]) -> list[Score]:
            return [Score(0.5)] * len(rollouts)

    rated = rate_groups(Rates(), found)
    assert [g.rollouts[0].score.value for g in rated] == [None, None, 0.5], "a model does not score an episode that failed"


@pytest.mark.parametrize("error", [UserError("give the option url"), GuardStop("a canary won")])
def test_errors_that_end_the_run_do(error: Exception) -> None:
    async def run(problem: Problem, generate: Generate) -> Rollout:
        await generate()
        raise error

    with pytest.raises(type(error), match=str(error)):
        groups(Scripted(run), lambda r: says("x"))


def test_a_sampler_that_fails_leaves_its_own_line_alone(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio prints the traceback of what is cancelled with it, where nobody has read that."""

    class Gone(ScriptedSampler):
        def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
            raise UserError("the sampler is gone")

    with pytest.raises(UserError, match="the sampler is gone"):
        rollout_groups(Scripted(), Gone(lambda r: says("x")), DECODER, Scripted().problems("train"), 2, SAMPLING, 5)
    gc.collect()
    assert not caplog.records


def test_what_is_no_rollout_is_named() -> None:
    async def nothing(problem: Problem, generate: Generate) -> list[Rollout]:
        await generate()
        return []

    found, _ = groups(Scripted(nothing), lambda r: says("x"), samples=1)
    assert str(found[0].rollouts[0].score.failure).startswith("TypeError: run must return rollouts")


def test_a_turn_beyond_the_context_ends_the_episode_which_is_scored() -> None:
    class Small(ScriptedSampler):
        def submit(self, requests: Sequence[Request]) -> None:
            if requests[0].turn:
                raise UserError("the model has 10 positions")
            super().submit(requests)

    async def catches(problem: Problem, generate: Generate) -> Rollout:
        await generate()
        with pytest.raises(ContextFull, match="10 positions"):
            await generate("b")
        return generate.rollout(Score(0.25))

    for run, score in ((two_turns, Score(1.0, outcome="context full")), (catches, Score(0.25))):
        (group, *_) = rollout_groups(
            Scripted(run), Small(lambda r: says("x")), DECODER, Scripted().problems("train"), 1, SAMPLING, 5
        )
        assert group.rollouts[0].score == score and group.rollouts[0].response == "x"


async def talks(problem: Problem, generate: Generate) -> Rollout:
    await generate()
    while True:
        await generate([Message("user", "go on")])


def one_group(task: Task, reply: Callable[[Request], Completion], **more: Any) -> tuple[Rollout, ScriptedSampler]:
    sampler = ScriptedSampler(reply)
    (group,) = rollout_groups(task, sampler, DECODER, task.problems("train")[:1], 1, SAMPLING, 5, **more)
    return group.rollouts[0], sampler


THOUGHT = "<think>aaaa</think>b"


@pytest.mark.parametrize(
    ("limits", "reply", "outcome", "turns"),
    [
        (Limits(turns=3), "x", "turn limit", 3),
        (Limits(tokens=5), "x", "token limit", 3),  # of 2 tokens each; the third turn may have one
        (Limits(thinking=7), THOUGHT, "thinking limit", 2),
    ],
)
def test_each_limit_is_a_named_ending_of_an_episode_that_is_scored(
    limits: Limits, reply: str, outcome: str, turns: int
) -> None:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 .<|>/")
    ids = [*tokenizer(reply)["input_ids"], END]
    task = Scripted(talks, limit=limits)
    sampler = ScriptedSampler(
        lambda r: completion(
            ids[: r.sampling.max_new_tokens], finish="stop" if r.sampling.max_new_tokens >= len(ids) else "length"
        )
    )
    (group,) = rollout_groups(task, sampler, Decoder(tokenizer), task.problems("train")[:1], 1, Sampling(99), 5)
    (rollout,) = group.rollouts
    assert rollout.score == Score(1.0, outcome=outcome) and rollout.turns == turns and not rollout.score.solved
    if limits.tokens:
        assert rollout.length == limits.tokens and rollout.finish == "length"
    metrics = {m.name: m.value for m in group_metrics([group])}
    assert metrics[f"ended/{outcome.replace(' ', '_')}"] == 1.0


def test_a_turn_may_be_shorter_than_the_stage_says() -> None:
    async def run(problem: Problem, generate: Generate) -> Rollout:
        await generate(max_new_tokens=3)
        return generate.rollout()

    _, sampler = one_group(Scripted(run), lambda r: says("x"))
    assert sampler.requests[0].sampling == replace(SAMPLING, max_new_tokens=3)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("where", ["in a tool", "before a turn is submitted", "while it is decoded"])
def test_an_episode_whose_time_is_over_ends_alone_and_is_scored(where: str, ordered: bool) -> None:
    """One of three; the others go on to their ends, and what it had asked for is withdrawn."""
    cancelled: list[int] = []

    class Slow(ScriptedSampler):
        def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
            time.sleep(0.01)
            if where == "while it is decoded" and len(self.waiting) == 1 and self.waiting[0].turn:
                return []
            return super().poll(timeout)

        def cancel(self, sessions: Any) -> None:
            cancelled.extend(sessions)
            super().cancel(sessions)

    async def run(problem: Problem, generate: Generate) -> Rollout:
        await generate()
        if where == "in a tool" and problem.id == "p1":
            await asyncio.sleep(60)
        if where == "before a turn is submitted" and problem.id != "p1":
            await asyncio.sleep(1.2 if problem.id == "p0" else 0.01)
        await generate([Message("user", "go on")], last=True)
        return generate.rollout()

    @dataclass(frozen=True)
    class Hurried(Scripted):
        def limits(self, problem: Problem) -> Limits:
            return Limits(seconds=0.6 if problem.id == ("p2" if where == "while it is decoded" else "p1") else 0.0)

    sampler = Slow(lambda r: says("x"))
    task = Hurried(run)
    found = rollout_groups(task, sampler, DECODER, task.problems("train"), 1, SAMPLING, 5, ordered=ordered)
    outcomes = [g.rollouts[0].score.outcome for g in found]
    late = 2 if where == "while it is decoded" else 1
    if where == "before a turn is submitted" and not ordered:
        assert outcomes == ["", "", ""], "nobody waits for the others"
    else:
        assert outcomes == ["time limit" if n == late else "" for n in range(3)] and found[late].rollouts[0].turns == 1
        assert [g.rollouts[0].turns for n, g in enumerate(found) if n != late] == [2, 2] and late in cancelled
        later = [(r.session, r.turn) for r in sampler.requests if r.turn]
        assert late == 2 or later == [(0, 1), (2, 1)] or not ordered, (
            "a round waits for those that go on, and has no turn of another"
        )


def test_a_task_ends_an_episode_that_the_policy_spoiled_with_a_name() -> None:
    async def run(problem: Problem, generate: Generate) -> Rollout:
        await generate()
        raise EpisodeEnd("illegal move", Score(-1.0) if problem.id == "p0" else None)

    found, _ = groups(Scripted(run), lambda r: says("x"), samples=1)
    assert [g.rollouts[0].score for g in found] == [Score(v, outcome="illegal move") for v in (-1.0, 1.0, 1.0)]


def test_what_turns_were_paid_is_a_part_of_the_return() -> None:
    async def run(problem: Problem, generate: Generate) -> Rollout:
        await generate()
        generate.reward(0.25)
        generate.reward(0.25)
        generate.count("moves", 2)
        await generate([Message("user", "go on")])
        return generate.rollout() if problem.id != "p0" else generate.rollout(Score(2.0))

    found, _ = groups(Scripted(run), lambda r: says("x"), samples=1)
    assert [g.rollouts[0].score for g in found] == [Score(v, {"turns": 0.5}) for v in (2.5, 1.5, 1.5)]
    assert [s.reward for s in found[0].rollouts[0].segments] == [0.0, 0.5, 0.0, 0.0]
    batch = pack_groups(found, 1.0)
    first = len(found[0].rollouts[0].segments[0].ids)
    assert batch.paid_T.nonzero()[0].item() == first + 1 and batch.paid_T.sum() == 1.5, "at the token that ends the turn"
    assert {m.name: m.value for m in group_metrics(found)}["moves"] == 2.0
    idle, _ = groups(Scripted(), lambda r: says("x"), samples=1)  # nothing was paid in these: 0, in every mean
    assert {m.name: m.value for m in group_metrics([*found, *idle])}["reward/turns"] == 0.25
    assert (part := Evaluation((*found, *idle)).part("turns")) is not None and part.value == 0.25
    assert part_values([g.rollouts[0] for g in (found[0], idle[0])], "turns") == [0.5, 0.0]
    assert "paid_T" not in pack_groups(groups(Scripted(), lambda r: says("x"))[0], 1.0).columns

    class Rates:
        def rate(self, rollouts: Sequence[Rollout]) -> list[Score]:
            return [Score(0.1)] * len(rollouts)

    assert rate_groups(Rates(), found)[0].rollouts[0].score.value == 0.6, "also where a model scores the whole"


def test_an_answer_is_scored_in_place_of_all_turns() -> None:
    async def run(problem: Problem, generate: Generate) -> Rollout:
        await generate()
        reply = await generate([Message("user", "go on")])
        return generate.rollout(answer=reply.text)

    def score(problem: Problem, response: str) -> Score:
        return Score(float(len(response)), steps=((1, 0.5),))

    rollout, _ = one_group(Scripted(run, score), lambda r: says("abc" if r.turn == 0 else "xy"))
    assert rollout.score.value == 2.0 and rollout.response == "abcxy" and rollout.score.steps == ((4, 0.5),)


@pytest.mark.parametrize(
    ("given", "failure"),
    [
        ("x" * 1_000_001, "ValueError: the task gives 1,000,001 characters at once"),
        ({"a": 1}, "TypeError: generate takes text, ids, or messages"),
        (None, "TypeError: generate takes text, ids, or messages"),
        (b"abc", "TypeError: generate takes text, ids, or messages"),
    ],
)
def test_what_an_environment_does_wrong_is_a_named_failure(given: Any, failure: str) -> None:
    async def run(problem: Problem, generate: Generate) -> Rollout:
        await generate()
        await generate(given)
        return generate.rollout()

    rollout, _ = one_group(Scripted(run), lambda r: says("x"))
    assert str(rollout.score.failure).startswith(failure) and rollout.score.outcome == "episode failed"


@pytest.mark.parametrize(("wrong", "said"), [(999_999, "a token id is outside the model's"), (-1, "the task gives a negative")])
def test_ids_that_the_model_does_not_have_fail_their_episode_alone(wrong: int, said: str) -> None:
    async def run(problem: Problem, generate: Generate) -> Rollout:
        await generate()
        await generate([4, wrong if problem.id == "p1" else len(TOKENIZER) + 3])
        return generate.rollout()

    size = len(TOKENIZER) + 8  # a model may have more ids than its tokenizer, and sample them
    engine = Engine(small_policy(dtype=torch.float32, vocab_size=size), processes=1)
    task = Scripted(run)
    found = rollout_groups(task, engine, DECODER, task.problems("train"), 2, Sampling(4), 0)
    failed = [[str(r.score.failure) for r in group.rollouts] for group in found]
    assert failed[0] == failed[2] == ["None"] * 2 and not engine.sessions
    assert all(one.startswith(f"ValueError: {said}") for one in failed[1])


@pytest.mark.parametrize("isolated", [False, True])
def test_what_an_episode_awaits_may_be_cancelled(isolated: bool) -> None:
    async def run(problem: Problem, generate: Generate) -> Rollout:
        await generate()
        if problem.id == "p0":
            raise asyncio.CancelledError
        return generate.rollout()

    async def score(problem: Problem, response: str) -> Score:
        raise asyncio.CancelledError

    with WorkerPool([task := Isolated(run) if isolated else Scripted(run, score)], 1) as workers:  # type: ignore[arg-type]
        found, _ = groups(task, lambda r: says("x"), samples=1, workers=workers)
    failed = [str(g.rollouts[0].score.failure).split(":")[0] for g in found]
    assert failed == ["CancelledError"] + ["None" if isolated else "CancelledError"] * 2


@pytest.mark.parametrize("isolated", [False, True])
def test_an_episode_may_be_scored_by_a_number(isolated: bool) -> None:
    async def run(problem: Problem, generate: Generate) -> Rollout:
        await generate()
        if problem.id == "p0":
            raise EpisodeEnd("lost", 0.25)
        if problem.id == "p1":
            raise EpisodeEnd("lost", "much")  # type: ignore[arg-type]
        return generate.rollout(0.5)

    with WorkerPool([task := (Isolated if isolated else Scripted)(run)], 1) as workers:
        found, _ = groups(task, lambda r: says("x"), samples=1, workers=workers)
    scores = [g.rollouts[0].score for g in found]
    assert scores[0] == Score(0.25, outcome="lost") and scores[2] == Score(0.5)
    assert str(scores[1].failure).startswith("TypeError: a reward must be a number")


@pytest.mark.parametrize("made", [None, 3, "text", [], [None]])
def test_what_run_returns_must_be_rollouts(made: Any) -> None:
    async def run(problem: Problem, generate: Generate) -> Any:
        await generate()
        return made

    rollout, _ = one_group(Scripted(run), lambda r: says("x"))
    assert str(rollout.score.failure).startswith("TypeError: run must return rollouts, as generate.rollout() makes them, not")


def test_rollouts_may_come_scored_and_outcomes_are_kept() -> None:
    async def run(problem: Problem, generate: Generate) -> Rollout:
        await generate()
        return generate.rollout(Score(0.3)) if problem.id == "p0" else generate.rollout(outcome="turn limit")

    found, _ = groups(Scripted(run), lambda r: says("x"), samples=1)
    assert [g.rollouts[0].score for g in found] == [Score(0.3)] + [Score(1.0, outcome="turn limit")] * 2


def test_roles_are_groups_of_their_own() -> None:
    async def run(problem: Problem, generate: Generate) -> list[Rollout]:
        other = generate.session("critic")
        await generate()
        await other("c")
        twice = [other.rollout(Score(0.0))] if problem.id == "p0" else []
        return [generate.rollout(), *twice]

    found, sampler = groups(Scripted(run), lambda r: says("x"))
    sizes = [(g.problem.id, g.role, len(g.rollouts)) for g in found]
    assert sizes == [("p0", "", 2), ("p0", "critic", 2), ("p1", "", 2), ("p2", "", 2)]
    assert len({r.seed for r in sampler.requests}) == 12, "no two conversations draw the same random numbers"
    assert {r.group for r in sampler.requests[6:]} == {3, 4, 5}, "equal prompts of one problem are prefilled once"


@pytest.mark.parametrize("ordered", [True, False])
def test_conversations_of_an_episode_may_sample_at_once(ordered: bool) -> None:
    async def run(problem: Problem, generate: Generate) -> list[Rollout]:
        talks = [generate, generate.session("second"), generate.session("third")]
        await asyncio.gather(*(talk(f"a{n}") for n, talk in enumerate(talks)))
        if problem.id == "p1":
            await asyncio.sleep(0.05)  # a tool
        await asyncio.gather(*(talk(f"b{n}") for n, talk in enumerate(talks)))
        return [talk.rollout() for talk in talks]

    found, sampler = groups(Scripted(run), lambda r: says("x"), ordered=ordered)
    turns = [(r.session, r.turn) for r in sampler.requests]
    assert [[r.turns for r in g.rollouts] for g in found] == [[2, 2]] * 9 and len(turns) == 36 == len(set(turns))
    assert not ordered or [turn for _, turn in turns] == [0] * 18 + [1] * 18, "a round waits for the slow episode"


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("late", [False, True])
def test_a_turn_that_an_episode_left_behind_delays_no_other(ordered: bool, late: bool) -> None:
    """`gather` raises the first error, and leaves the other turns to themselves."""
    left: list[str] = []

    class Silent(ScriptedSampler):
        def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
            self.waiting.sort(key=lambda r: r.ids == encoded("b"))
            unanswered = self.waiting and self.waiting[0].ids == encoded("b")
            return [] if unanswered else super().poll(timeout)

    async def other(talk: Generate) -> None:
        try:
            if late:  # it is still busy when the episode ends
                await asyncio.sleep(0.02)
            await talk("b")
        except BaseException as error:
            left.append(type(error).__name__)
            raise

    async def run(problem: Problem, generate: Generate) -> Rollout:
        await generate("a")
        if problem.id == "p1":
            with contextlib.suppress(EpisodeEnd):
                await asyncio.gather(generate("c"), other(generate.session("critic")))
        else:
            await asyncio.sleep(0.05)
            await generate("d")
        return generate.rollout()

    task, sampler = Scripted(run, limit=Limits(turns=1)), Silent(lambda r: says("x"))
    found = rollout_groups(task, sampler, DECODER, task.problems("train"), 1, SAMPLING, 5, ordered=ordered)
    assert [[r.turns for r in g.rollouts] for g in found] == [[1]] * 3
    assert [g.rollouts[0].score.outcome for g in found] == ["turn limit", "", "turn limit"]
    assert left == ["ValueError" if late else "CancelledError"] and not sampler.waiting


def test_a_conversation_samples_one_turn_at_a_time() -> None:
    async def run(problem: Problem, generate: Generate) -> Rollout:
        await asyncio.gather(generate("a"), generate("b"))
        return generate.rollout()

    found, sampler = groups(Scripted(run), lambda r: says("x"))
    said = {str(r.score.failure).partition(" at a time")[0] for g in found for r in g.rollouts}
    assert said == {"ValueError: a conversation samples one turn"} and not sampler.waiting


@dataclass(frozen=True)
class Compared(Scripted):
    def score_group(self, problem: Problem, responses: Sequence[str]) -> Sequence[Score] | None:
        if problem.id == "p2":
            return None
        return [Score(float(len(responses) * 10 + n)) for n in range(len(responses) - (problem.id == "p1"))]


def test_a_group_is_scored_together_when_it_is_complete() -> None:
    found, _ = groups(Compared(), lambda r: says("x"))
    assert [r.score.value for r in found[0].rollouts] == [20.0, 21.0]
    assert found[1].rollouts[0].score.failure == "score_group returned 1 scores for 2 responses"
    assert [r.score.value for r in found[2].rollouts] == [1.0, 1.0]


def test_coroutine_rewards_of_a_step_run_at_once() -> None:
    async def slow(problem: Problem, response: str) -> Score:
        await asyncio.sleep(0.1)
        return Score(0.5)

    began, seconds = time.perf_counter(), Seconds()
    found, _ = groups(Scripted(score_of=slow), lambda r: time.sleep(0.01) or says("x"), samples=8, seconds=seconds)
    assert time.perf_counter() - began < 1.2, "24 scores of 0.1 s, one after the other, are 2.4 s"
    assert all(r.score == Score(0.5) for g in found for r in g.rollouts)
    assert seconds.generate >= 0.24 and seconds.overlapped > 0.5 and 0.05 < seconds.score < 0.5
    assert {m.name for m in seconds.metrics()} == {"seconds/generate", "seconds/score", "seconds/overlapped"}


def test_a_reward_may_run_an_event_loop_of_its_own() -> None:
    async def inner() -> float:
        return 0.25

    found, _ = groups(Scripted(score_of=lambda p, r: asyncio.run(inner())), lambda r: says("x"), samples=1)
    assert [g.rollouts[0].score for g in found] == [Score(0.25)] * 3

    async def notebook() -> list[Group]:
        return groups(Scripted(), lambda r: says("x"))[0]

    assert len(asyncio.run(notebook())) == 3, "and episodes may be run from within one"


@dataclass(frozen=True)
class Isolated(Scripted):
    isolated = True  # type: ignore[assignment]


def test_isolated_scores_overlap_with_generation_and_need_a_pool() -> None:
    task = Isolated(score_of=lambda p, r: time.sleep(0.1) or Score(float(len(r))))
    with pytest.raises(UserError, match="give rollout_groups a WorkerPool"):
        groups(task, lambda r: says("x"))
    with WorkerPool([task], 2) as workers:
        groups(task, lambda r: says("x"), samples=1, workers=workers)  # they are started
        seconds = Seconds()
        found, _ = groups(task, lambda r: time.sleep(0.1) or says("x" * (1 + r.session)), workers=workers, seconds=seconds)
    assert [r.score.value for g in found for r in g.rollouts] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert seconds.generate >= 0.6 and seconds.overlapped > 0.3 and seconds.score < 0.3


async def plays(problem: Problem, generate: Generate) -> Rollout | list[Rollout]:
    """All that an episode may do; what it does depends on its problem."""
    first = await generate()
    other = generate.session("other")
    generate.count("moves", 2)
    await other([Message("user", f"{generate.template[:5]} {first.text}")], max_new_tokens=3)
    other.reward(0.25)
    reply = await generate("b", last=True)
    assert (reply.finish, len(reply.ids)) == ("stop", 2)
    return [generate.rollout(answer=reply.text), other.rollout(Score(0.5, {"a": 1.0}, ((1, 0.5),), "fine"))]


async def spoils(problem: Problem, generate: Generate) -> Rollout:
    await generate()
    if problem.id == "p0":
        raise EpisodeEnd("illegal move", Score(0.25))
    if problem.id == "p1":
        raise ConnectionError("it went away")
    while True:
        await generate([Message("user", "go on")])


def plain(found: list[Group]) -> list[Any]:
    return [
        [(r.role, r.sample, r.ids.tolist(), r.mask.tolist(), r.score, r.answer, dict(r.counts), r.paid) for r in g.rollouts]
        for g in found
    ]


@pytest.mark.parametrize("run", [plays, spoils])
def test_an_isolated_episode_is_the_same_in_a_process_of_its_own(run: Run) -> None:
    limits = Limits(turns=3)
    here, before = groups(Scripted(run, limit=limits), lambda r: says(f"a{r.turn}"))
    task = Isolated(run, limit=limits)
    with WorkerPool([task], 2) as workers:
        found, sampler = groups(task, lambda r: says(f"a{r.turn}"), workers=workers)
    asked = [[replace(r, session=0, group=0) for r in one.requests] for one in (sampler, before)]
    assert plain(found) == plain(here) and asked[0] == asked[1], "in the same order, whichever process was first"
    if run is spoils:
        scores = [g.rollouts[0].score for g in found]
        assert [s.outcome for s in scores] == ["illegal move", "episode failed", "turn limit"]
        assert str(scores[1].failure).startswith(f"ConnectionError: it went away at {__file__} line ")


def test_an_endless_episode_and_one_whose_process_dies_are_ended_and_counted() -> None:
    async def run(problem: Problem, generate: Generate) -> Rollout:
        await generate()
        if problem.id == "p0":
            while True:
                pass
        if problem.id == "p1":
            os._exit(3)
        await generate("b", last=True)
        return generate.rollout()

    task = Isolated(run, seconds=0.5)
    with WorkerPool([task], 2) as workers:
        found, _ = groups(task, lambda r: says("x"), samples=1, workers=workers)
    failures = [g.rollouts[0].score.failure for g in found]
    late, died = "EpisodeTimeout: the episode did not go on within 0.5 s", "WorkerDied: the process of the episode died"
    assert failures == [late, died, None] and [g.rollouts[0].turns for g in found] == [1, 1, 2]
    assert {m.name for m in group_metrics(found)} >= {"failed/EpisodeTimeout", "failed/WorkerDied"}


@pytest.mark.parametrize("made", [None, [3]])
def test_an_isolated_episode_must_return_rollouts_too(made: Any) -> None:
    async def run(problem: Problem, generate: Generate) -> Any:
        await generate()
        return made

    task = Isolated(run)
    with WorkerPool([task], 1) as workers:
        found, _ = groups(task, lambda r: says("x"), samples=1, workers=workers)
    assert str(found[0].rollouts[0].score.failure).startswith("TypeError: run must return rollouts")


def test_a_step_that_stops_cancels_what_is_being_generated() -> None:
    cancelled: list[int] = []

    class Sampler(ScriptedSampler):
        def cancel(self, sessions: Any) -> None:
            cancelled.extend(sessions)
            super().cancel(sessions)

    def score(problem: Problem, response: str) -> Score:
        raise UserError("stop")

    task = Scripted(score_of=score)
    sampler = Sampler(lambda r: says("x"))
    with pytest.raises(UserError, match="stop"):
        rollout_groups(task, sampler, DECODER, task.problems("train"), 20, SAMPLING, 5)
    assert not sampler.waiting and len(cancelled) > 40


def test_the_turns_of_a_step_that_stops_are_cancelled_together() -> None:
    """Each call looks at all rows of a sampler, and there may be thousands of turns."""
    calls: list[set[int]] = []

    class Failing(ScriptedSampler):
        def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
            raise GuardStop("stop")

        def cancel(self, sessions: Any) -> None:
            calls.append(set(sessions))

    sampler, task = Failing(lambda r: says("x")), Scripted()
    with pytest.raises(GuardStop, match="stop"):
        rollout_groups(task, sampler, DECODER, task.problems("train"), 20, SAMPLING, 5)
    assert set().union(*calls) == {r.session for r in sampler.requests} and len(sampler.requests) == 60
    assert len(calls) < 4


def test_episodes_end_with_the_step_that_is_cancelled() -> None:
    """As an asynchronous run cancels groups: what their tools have begun must not go on."""
    ended: list[str] = []

    async def run(problem: Problem, generate: Generate) -> Rollout:
        try:
            await generate()
            await asyncio.sleep(60 if problem.id == "p0" else 0)
            await generate("b")
            return generate.rollout()
        finally:
            ended.append(problem.id)

    async def step() -> None:
        task, sampler = Scripted(run), ScriptedSampler(lambda r: says("x"))
        given = task.problems("train")
        running = asyncio.ensure_future(Episodes(task, sampler, DECODER, given, (SAMPLING,), 5, None, Seconds(), True).run())
        await asyncio.sleep(0.2)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled() and sorted(ended) == ["p0", "p1", "p2"]

    asyncio.run(step())


def test_rollouts_are_not_printed_on_the_way() -> None:
    """`asyncio.run` asks for the handler of SIGINT, and the name of its own has the main task's result in it: half a second a step."""

    printed: list[str] = []

    class Printed(Problem):
        def __repr__(self) -> str:
            printed.append(self.id)
            return self.id

    rollout_groups(Scripted(), ScriptedSampler(lambda r: says("x")), DECODER, [Printed("p", "q")], 2, SAMPLING, 5)
    assert printed == []


def test_the_page_on_tasks_pays_a_second_try_that_is_right(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "tasks.md").read_text()
    one, several, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text(one + several)
    task = catalogue.load("task", f"{tmp_path / 'mine.py'}:SecondTry")()
    tries = ["5", "8"]
    tokenizer = character_tokenizer("0123456789 *=.Thatiswrong ryagn")
    sampler = ScriptedSampler(lambda r: completion(tokenizer(tries[r.turn])["input_ids"]))
    (group,) = rollout_groups(task, sampler, Decoder(tokenizer), [Problem("p", "2 * 4 =", "8")], 1, Sampling(4), 0)
    assert [r.score.value for r in group.rollouts] == [1.0] and group.rollouts[0].turns == 2


def test_the_page_on_tasks_has_levels_that_a_curriculum_climbs(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "tasks.md").read_text()
    one, _, levels = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text(one + levels)
    task = catalogue.load("task", f"{tmp_path / 'mine.py'}:Sums")()
    validate(task)
    for level in task.levels:
        (train, test) = ({p.id.split("/")[1] for p in task.problems(split, level)} for split in ("train", "test"))
        assert train and test and not train & test and {len(number) for number in train | test} == {level}
    climbed = CurriculumState(task.levels, [9, 9, 9], Curriculum(window=2), 0)
    for problem in task.problems("train", 1)[:2]:
        climbed.observe(problem.level, 1.0)
    assert climbed.level == 2
