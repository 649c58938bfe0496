"""VinePPO: what steps change by hand, an independent NumPy one, the completions it asks for, and a small thing learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from bandit_for_tests import chance_of_good, train
from material_for_tests import plain_batch, small_policy
from numpy_for_tests import Response, clipped, parity
from sampler_for_tests import ScriptedSampler, three_lines

from posttrain.algorithms.rloo import RLOO
from posttrain.algorithms.vineppo import VinePPO
from posttrain.branches import value_steps
from posttrain.collect import Collected, Rollouts
from posttrain.data.curriculum import Curriculum, CurriculumState
from posttrain.errors import UserError
from posttrain.models.tiny import character_tokenizer
from posttrain.ops.advantages import step_advantages
from posttrain.stages.reward_sources import RewardModels
from posttrain.stages.rl import RLStage
from posttrain.system.workers import WorkerPool
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Limits, Task
from posttrain.tasks.jsonl import Jsonl
from posttrain.tasks.shop import Shop
from posttrain.train.pack import step_rewards
from posttrain.types import Group, Problem, Request, Rollout, Sampling, Score, Segment

TOKENIZER = character_tokenizer("ax0123456789\n?")


@pytest.mark.proves("refusals")
def test_refusals_and_contract() -> None:
    with pytest.raises(UserError, match="^vineppo: group must be at least 2, not 1"):
        VinePPO(group=1)
    with pytest.raises(UserError, match="^vineppo: completions must be at least 1"):
        VinePPO(completions=0)
    with pytest.raises(UserError, match="^rl: steps: '\\(' is no regular expression"):
        RLStage(name="rl", model="m", task=Arithmetic(), algorithm=VinePPO(steps="pattern:("))
    with pytest.raises(UserError, match="^rl: steps: 'token:#': token:TEXT is for reward=process"):
        RLStage(name="rl", model="m", task=Arithmetic(), algorithm=VinePPO(steps="token:#"))
    assert VinePPO(completions=3, steps="#").branches == (3, "#", False) and not RLOO().branches.completions
    assert VinePPO().roles == frozenset() and VinePPO(beta=0.1).roles == {"reference"}


@pytest.mark.proves("refusals")
@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"task": Shop()}, "vineppo continues answers of one turn, and this task has its own episodes"),
        ({"reward": RewardModels(models=("m",))}, "vineppo scores completions by the task, and the reward is 'models'"),
        (
            {"task": Jsonl("a.jsonl", reward="judge", options={"url": "http://a", "model": "m", "mode": "tournament"})},
            "vineppo values the end of a step by a score of its own, and mode=tournament compares completions of it",
        ),
        ({"max_staleness": 1, "sampler": "process"}, "vineppo needs the sampler after a step's responses are scored"),
    ],
)
def test_stages_in_which_nothing_could_be_completed_are_refused(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=f"^rl: {line}"):
        RLStage(name="rl", model="m", algorithm=VinePPO(), **{"task": Arithmetic(), **given})


@pytest.mark.proves("value")
def test_advantages_by_hand() -> None:
    """Rewards 1, 0, 0 of four, three and one tokens: V(s_0) is 0, 1/2, 1/2. The first has values of 0.25 after its second token and
    0.75 after its third; the second 0.5 after its first; that at a last token is not used."""
    nan = math.nan
    step = plain_batch([1.0, 0.0, 0.0, None], [0] * 4, [4, 3, 1, 1])
    step = step.replace(step_T=torch.tensor([nan, nan, 0.25, 0.75, nan, nan, 0.5, nan, 9.0, nan, nan, nan, nan]))
    prepared = VinePPO().prepare(step, {})
    assert prepared.advantage_T.tolist() == pytest.approx([0, 0.25, 0.25, 0.5, 0.25, 0, 0, -0.5, -0.5, 0, -0.5, 0, 0])
    without = VinePPO(beta=0.0).prepare(step.replace(step_T=torch.full((13,), nan)), {})
    assert without.advantage_T.tolist() == RLOO(beta=0.0).prepare(step, {}).advantage_T.tolist(), "with one step each"


@pytest.mark.proves("value")
def test_kl_in_the_reward_by_hand() -> None:
    """beta 0.1, log mu - log ref of 1 and 2 in the first response, 1 in the second. V(s_0) has the KL of the others, 0 - 0.1 and
    1 - 0.3; a token is charged for its own KL and that of later tokens."""
    step = plain_batch([1.0, 0.0], [0, 0], [2, 1]).replace(
        step_T=torch.tensor([math.nan, 0.6, math.nan, math.nan, math.nan]),
        behaviour_T=torch.tensor([9.0, -1.0, -1.0, 9.0, -1.0]),
        reference_T=torch.tensor([0.0, -2.0, -3.0, 0.0, -2.0]),
    )
    prepared = VinePPO(beta=0.1, kl_in="reward").prepare(step, {})
    assert prepared.advantage_T.tolist() == pytest.approx([0, 0.6 + 0.1 - 0.3, 1 - 0.6 - 0.2, 0, 0 - 0.7 - 0.1])


@pytest.mark.proves("value")
def test_of_all_steps_the_changes_sum_to_the_whole() -> None:
    value_T, mask_T = torch.tensor([1.0, 2.0, math.nan, 4.0, 8.0, 16.0]), torch.tensor([False, True, True, True, True, True])
    found = step_advantages(
        value_T, torch.tensor([10.0, 0.0]), torch.tensor([7.0, 1.0]), mask_T, torch.tensor([0, 0, 0, 0, 1, 1])
    )
    assert found.tolist()[1:] == [2.0 - 10.0, 7.0 - 2.0, 7.0 - 2.0, 8.0, 1.0 - 8.0]


@pytest.mark.proves("value")
@pytest.mark.parametrize("seed", range(3))
def test_parity_with_an_independent_one(seed: int) -> None:
    def formula(members: list[Response]) -> tuple[float, list[np.ndarray]]:
        loss, slopes, count = 0.0, [], sum(one.length for one in members)
        for i, one in enumerate(members):
            others = [m.reward for j, m in enumerate(members) if j != i and m.group == one.group]
            ends = [t for t in range(one.length - 1) if np.isfinite(one.steps[t])]
            value, slope = np.zeros(one.length), np.zeros(one.length)
            for t in range(one.length):
                before = [one.steps[e] for e in ends if e < t]
                after = [one.steps[e] for e in ends if e >= t]
                start = before[-1] if before else np.mean(others) if others else one.reward
                change = (after[0] if after else one.reward) - start
                value[t], slope[t] = clipped(np.exp(one.log_ratio[t]), change, 0.2, 0.2)
            loss += value.sum() / count
            slopes.append(slope / count)
        return loss, slopes

    parity(VinePPO(), formula, seed)


# --- completions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoX(Task):
    """An answer of three lines is right where none of them is x."""

    apart: bool = False

    @property
    def isolated(self) -> bool:
        return self.apart

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return [Problem(f"{split}/{n}", f"{n}?", "") for n in range(40)]

    def score(self, problem: Problem, response: str) -> Score:
        return Score.failed("no") if response.startswith("x") else Score(float("x" not in response) + len(response) / 100)


script = three_lines(TOKENIZER, "aax")


def collected(
    algorithm: VinePPO, tokens: int = 16, task: Task | None = None, least: int = 0
) -> tuple[Collected, list[Request]]:
    sampler, task = ScriptedSampler(script), task or NoX()
    state = CurriculumState(task.levels, [40], Curriculum(), 0)
    with WorkerPool([task], 1) as workers:
        given = (task, sampler, TOKENIZER, state, 4, Sampling(tokens, min_new_tokens=least), 0, torch.device("cpu"))
        source = Rollouts(*given, workers=workers)  # type: ignore[arg-type]
        return source.collect(0, algorithm, {}), sampler.requests


def test_the_value_of_a_step_is_the_mean_score_of_completions_from_its_end() -> None:
    found, requests = collected(VinePPO(group=4, completions=5))
    begun: dict[str, list[float]] = {}
    for request in requests[16:]:
        question, _, before = TOKENIZER.decode(list(request.ids)).partition("<|assistant|>")
        assert request.sampling.max_new_tokens == 16 - len(before), "answers are as long as those that are trained on"
        answer = before + TOKENIZER.decode(script(request).ids).removesuffix("<|end|>")
        begun.setdefault(question + before, []).append(float("x" not in answer) + 5 / 100)
    assert all(len(scores) == 5 for scores in begun.values()), "equal beginnings are completed once"
    assert {m.name: m.total for m in found.metrics}["completions"] == len(requests) - 16 == 5 * len(begun)
    rollouts, step_T = [r for g in found.groups for r in g.rollouts], found.batch.step_T
    valued = 0
    for n, rollout in enumerate(rollouts):
        asked = f"<|user|>{rollout.problem.question}<|end|>"
        own_T = step_T[found.batch.starts[n] : found.batch.starts[n + 1]]
        at = torch.isfinite(own_T).nonzero()[:, 0].tolist()
        if not rollout.score.valid:
            assert at == []
            continue
        prompt = len(rollout.segments[0].ids)
        assert at == [prompt + 1, prompt + 3], "a separator belongs to the step before it"
        for end, value in zip(at, own_T[at].tolist(), strict=True):
            before = rollout.response[: end - prompt + 1]
            assert value == pytest.approx(sum(begun[asked + before]) / 5)
            valued += 1
    assert valued > 10 and {r.score.valid for r in rollouts} == {True, False}


def test_completions_that_are_cut_off_are_paid_nothing_where_answers_are_not() -> None:
    """Of three lines five characters fit, and no end: every completion is cut off."""
    kept, zero = (collected(VinePPO(group=4, completions=2, truncated=kind), 5)[0] for kind in ("keep", "zero"))
    values = [c.batch.step_T[torch.isfinite(c.batch.step_T)] for c in (kept, zero)]
    assert len(values[0]) == len(values[1]) > 10 and values[0].min() > 0 and not values[1].any()


def test_limits_of_a_whole_answer_count_what_a_completion_continues() -> None:
    class Short(NoX):
        def limits(self, problem: Problem) -> Limits:
            return Limits(tokens=7, thinking=1)

    _, requests = collected(VinePPO(group=4, completions=2), task=Short(), least=3)
    assert {(r.sampling.max_new_tokens, r.sampling.min_new_tokens) for r in requests[:16]} == {(7, 3)}
    left = [(r.sampling.max_new_tokens, r.sampling.min_new_tokens) for r in requests[16:]]
    assert {*left} == {(5, 1), (3, 0)}, "two tokens are written at the end of a first step, four at that of a second"


def test_a_plan_runs_it_at_the_limit_of_its_answers() -> None:
    stage = RLStage(name="rl", model="m", task=Arithmetic(), algorithm=VinePPO(), sampling=Sampling(12))
    assert stage.dry_run().at_length(12, "longest").sampling.min_new_tokens == 12  # type: ignore[attr-defined]


def test_a_step_without_a_scored_completion_goes_on_into_the_next() -> None:
    @dataclass(frozen=True)
    class Late(NoX):
        def score(self, problem: Problem, response: str) -> Score:
            given = len(problem.facts.get("given_ids", ())) - problem.facts.get("given_begin", 0)
            return Score.failed("no") if given == 2 else Score(1.0)

    found, _ = collected(VinePPO(group=4, completions=2), task=Late())
    assert {len(r.score.steps) for g in found.groups for r in g.rollouts} == {1}, "of two inner ends the second alone"


def test_steps_that_end_in_one_token_have_one_value() -> None:
    """Of a,b,c the second token completes two steps. Of a,b, cut off at its limit, a completion would follow the last token."""
    asked: list[Problem] = []

    def ask(begun: list[Problem]) -> list[Group]:
        asked.extend(begun)
        return [Group(problem, (written("z"),)) for problem in begun]

    def written(*tokens: str, finish: str = "stop") -> Rollout:
        ids, offsets = np.arange(len(tokens)), np.cumsum([len(token) for token in tokens])
        turn = Segment(ids, "".join(tokens), True, offsets=offsets, finish=finish)
        return Rollout(Problem("one", ""), 0, (Segment(np.array([9]), "?", False), turn), Score(0.5))

    group = Group(Problem("one", ""), (written("a", ",b,", "c", ""), written("a", ",b", finish="length")))
    ((made,), completed) = value_steps([group], ",", ask, 2, False)
    first, second = (step_rewards(rollout) for rollout in made.rollouts)
    assert first is not None and first[2] == 0.5 and np.isfinite(first).sum() == 1, "the mean of completions, once"
    assert second is None and completed == len(asked) == 1, "nothing can follow where no token is left"


def test_completions_of_an_isolated_task_are_scored_by_its_workers() -> None:
    apart, here = (collected(VinePPO(group=4, completions=2), task=NoX(kind))[0] for kind in (True, False))
    assert torch.equal(apart.batch.step_T.nan_to_num(-1), here.batch.step_T.nan_to_num(-1)) and len(here.batch.step_T)


def test_a_pattern_that_backtracks_stops_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.data.steps.SECONDS", 1e-9)
    with pytest.raises(UserError, match=r"^steps: 'pattern:\(a\|aa\)\+\[0-9\]' took over .*; it backtracks, simplify it"):
        collected(VinePPO(group=4, steps="pattern:(a|aa)+[0-9]"))


# --- learning -------------------------------------------------------------------------------------------------------------


@pytest.mark.proves("learns")
def test_it_learns_from_rewards() -> None:
    """From at most 0.43 of the mass on right tokens to above 0.95 in 40 steps."""
    policy = small_policy(0, torch.float32)
    assert chance_of_good(policy) < 0.6
    train(policy, VinePPO(group=8), 40)
    assert chance_of_good(policy) > 0.95
