"""Programs that talk with the policy through an address: what they were served is trained on, and whatever they do the run goes on."""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from posttrain import cli
from posttrain.data.text import Decoder
from posttrain.engine.engine import Engine
from posttrain.episodes import rollout_groups
from posttrain.errors import UserError
from posttrain.models.policy import Policy, wrap_model
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.runs.metrics import group_metrics
from posttrain.runs.read import Run
from posttrain.serve.app import collected
from posttrain.serve.wire import ChatBody
from posttrain.tasks._served import ServedEpisode
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.outside import Outside
from posttrain.train.pack import pack_groups
from posttrain.types import Group, Sampling, Segment

AGENT = f"{sys.executable} -I -S {Path(__file__).with_name('agent_for_tests.py')}"
TASK = Arithmetic(level=1)


@pytest.fixture(scope="module")
def policy() -> Policy:
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))))
    return wrap_model(tiny_model(tokenizer, "nano", 0), tokenizer, (tokenizer.eos_token_id,))


def episodes(policy: Policy, agent: str, problems: int = 1, samples: int = 1, ordered: bool = True, **more: Any) -> list[Group]:
    task = Outside(f"{AGENT} {agent}", TASK, **more)
    given, engine = TASK.problems("train")[:problems], Engine(policy, processes=1)
    groups = rollout_groups(task, engine, Decoder(policy.tokenizer), given, samples, Sampling(8), 3, ordered=ordered)
    assert engine.sessions == {}
    return groups


def check_exact(policy: Policy, groups: list[Group]) -> None:
    """Every log-prob is that of a fresh forward, and every sampled token carries loss exactly once."""
    for rollout in (r for g in groups for r in g.rollouts):
        with torch.no_grad():
            logits = policy.model(torch.from_numpy(rollout.ids)[None]).logits[0]
        by_hand = logits.log_softmax(-1)[torch.arange(len(rollout.ids) - 1), torch.from_numpy(rollout.ids[1:])].numpy()
        sampled = np.concatenate([s.logprobs for s in rollout.segments if s.sampled])
        np.testing.assert_allclose(sampled, by_hand[rollout.mask[1:]], atol=1e-4)
        for segment in rollout.segments:
            assert segment.offsets is not None and len(segment.offsets) == len(segment.ids)
    batch = pack_groups(groups, 1.0)
    assert batch.mask_T.tolist() == [m for g in groups for r in g.rollouts for m in r.mask]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_conversation_is_one_rollout_of_exact_ids(policy: Policy, ordered: bool) -> None:
    groups = episodes(policy, "turn turn turn", 2, 2, ordered)
    check_exact(policy, groups)
    assert [len(g.rollouts) for g in groups] == [2, 2]
    for rollout in (r for g in groups for r in g.rollouts):
        assert [s.sampled for s in rollout.segments] == [False, True] * 3 and rollout.counts["agent/calls"] == 3
        assert rollout.answer == rollout.segments[-1].text and rollout.score.valid
        assert rollout.segments[2].text == "more"
    again = episodes(policy, "turn turn turn", 2, 2, ordered)
    assert [r.ids.tolist() for g in again for r in g.rollouts] == [r.ids.tolist() for g in groups for r in g.rollouts]


def test_a_changed_history_forks_and_each_sampled_token_is_learned_once(policy: Policy) -> None:
    (group,) = episodes(policy, "turn turn forget turn")
    check_exact(policy, [group])
    first, second = group.rollouts
    assert (first.turns, second.turns) == (2, 1) and "short" in second.segments[0].text
    assert first.score == second.score and first.sample == second.sample
    (group,) = episodes(policy, "turn same turn")  # three samples after the same turn
    check_exact(policy, [group])
    first, *others = group.rollouts
    assert [r.turns for r in group.rollouts] == [2, 1, 1]
    shared = len(first.segments[0].ids) + len(first.segments[1].ids)
    assert all(o.ids[:shared].tolist() == first.ids[:shared].tolist() and not o.mask[:shared].any() for o in others)
    assert not pack_groups([group], 1.0).episode_N.any()  # an episode votes once


def test_a_retry_is_answered_with_what_was_sampled_before(policy: Policy) -> None:
    (group,) = episodes(policy, "retry turn")
    (rollout,) = group.rollouts
    assert rollout.turns == 2 and rollout.counts == {"agent/retries": 1, "agent/calls": 2}


def test_a_client_that_left_gets_the_answer_later_and_equal_requests_at_once_get_their_own(policy: Policy) -> None:
    counts: Counter[str] = Counter()

    class Sampled:
        """A conversation whose turns are numbered, in the order in which they are asked for."""

        decoder, sampled, free = Decoder(policy.tokenizer), itertools.count(5), asyncio.Event()

        async def __call__(self, given: Any) -> Segment:
            await self.free.wait()
            ids = np.array([next(self.sampled)])
            text, offsets = self.decoder.decode(ids)
            return Segment(ids, text, True, np.zeros(1), offsets, np.zeros(1, np.int32), "stop")

        def session(self, role: str) -> Sampled:
            return Sampled()

        def count(self, name: str, amount: float = 1.0) -> None:
            counts[name] += int(amount)

    async def served() -> list[list[int]]:
        episode, body = ServedEpisode(Sampled(), 9), ChatBody(messages=[{"role": "user", "content": "1"}])  # type: ignore[arg-type]

        async def ask(retry: bool = False) -> list[int]:
            return [i for delta in await collected((await episode.answer(body, retry)).deltas) for i in delta.ids]

        async def asks(*retries: bool) -> list[asyncio.Future[list[int]]]:
            made = [asyncio.ensure_future(ask(retry)) for retry in retries]
            await asyncio.sleep(0.05)
            return made

        (left,) = await asks(False)
        left.cancel()
        first, second, third = await asks(False, False, False)
        second.cancel()
        later = await asks(True, True)
        Sampled.free.set()
        found = await asyncio.gather(first, third, *later)
        assert episode.calls == 3
        return found

    assert asyncio.run(served()) == [[5], [7], [6], [7]] and counts["agent/retries"] == 3


def test_an_answer_that_was_cut_is_trained_as_far_as_it_was_served(policy: Policy) -> None:
    (group,) = episodes(policy, "cut turn cut")
    check_exact(policy, [group])
    (rollout,) = group.rollouts
    assert [len(s.ids) for s in rollout.segments if s.sampled][::2] == [2, 2]
    tokenizer = policy.tokenizer
    assert rollout.segments[2].ids[0] == tokenizer.eos_token_id, "the template closes the turn that was cut"


def test_prompts_of_ids_continue_what_was_sampled(policy: Policy) -> None:
    (group,) = episodes(policy, "ids")
    check_exact(policy, [group])
    (rollout,) = group.rollouts
    assert rollout.segments[0].ids.tolist() == [7, 8, 9] and rollout.segments[2].ids.tolist() == [10]


@pytest.mark.parametrize(
    ("agent", "settings", "value", "said"),
    [
        ("turn crash", {}, None, "the agent ended with 1: out of memory"),
        ("crash", {}, None, "AgentFailed: the agent ended with 1: out of memory"),
        ("turn hang", {"max_seconds": 1.0}, None, "the agent was not done within 1 s"),
        ("done", {}, None, "AgentFailed: the agent never called the model"),
        ("long turn", {}, None, "AgentFailed: the agent ended with 1: "),
        ("turn long turn", {}, 0.0, "context full"),
        ("flood", {"max_calls": 3}, 0.0, "call limit"),
        ("turn flood", {"max_calls": 2, "reward": "printed"}, None, "no number"),
        ("turn noise 0.25", {"reward": "printed"}, 0.25, ""),
        ("turn child 0.25", {"reward": "printed"}, 0.25, ""),
        ("turn daemon 0.25", {"reward": "printed"}, 0.25, ""),
        ("turn nan", {"reward": "printed"}, None, "the agent's last line is no number: 'nan'"),
    ],
)
def test_whatever_a_program_does_is_a_named_ending(
    policy: Policy, agent: str, settings: dict[str, Any], value: float | None, said: str
) -> None:
    began = time.monotonic()
    (group,) = episodes(policy, agent, **settings)
    for rollout in group.rollouts:
        score = rollout.score
        assert score.value == value and said in (score.failure or score.outcome), score
    assert time.monotonic() - began < 20
    assert group_metrics([group])


def test_a_command_counts_as_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"{AGENT} turn turn"
    stage = {"stage": "rl", "name": "rl", "model": "tiny:nano", "steps": 2, "prompts": 2, "evaluate_every": 0, "rollouts_every": 1,
             "algorithm": {"name": "grpo", "group": 2, "beta": 0.0}, "sampling": {"max_new_tokens": 5},
             "task": {"name": "outside", "command": command, "task": {"name": "arithmetic", "level": 1}}}  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"seed": 7, "device": "cpu", "threads": 1, "stages": [stage]}))
    words = ["run", str(tmp_path / "recipe.yaml"), f"out={tmp_path / 'run'}"]
    assert cli.main(words) == 2
    assert "would run a program; pass --allow-code" in capsys.readouterr().err
    assert cli.main([*words, f"rl.task.command={command}"]) == 0
    run = Run(tmp_path / "run")
    for name in ("agent/calls", "turns"):
        assert list(run.column(name, stage="rl")[1]) == [2, 2]


@pytest.mark.parametrize(
    ("command", "said"),
    [("", "give a command"), ("python 'x", "is not a command line"), ("no-such-program x", "there is no program")],
)
def test_a_command_that_cannot_be_run_is_refused_in_words(command: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Outside(command, TASK).ready()


def test_the_page_trains_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "outside.md").read_text()
    (agent,), (recipe,) = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "yaml"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(agent)
    (tmp_path / "agent.yaml").write_text(recipe.replace("command: python", f"command: {sys.executable}"))
    small = ["rl.steps=1", "rl.prompts=1", "rl.algorithm.group=2", "rl.evaluate_every=0", "device=cpu", "out=run"]
    assert cli.main(["run", "agent.yaml", "--allow-code", *small]) == 0
    run = Run(tmp_path / "run")
    figures = {name: run.column(name, stage="rl")[1][-1] for name in ("agent/calls", "turns", "failed")}
    assert figures["agent/calls"] == figures["turns"] >= 1 and figures["failed"] == 0


def test_a_program_that_pays_for_something_teaches_it(tmp_path: Path) -> None:
    """It talks two turns with the policy and prints the share of signs and digits in what was said."""
    task = {
        "name": "outside",
        "command": f"{AGENT} turn turn low",
        "task": {"name": "arithmetic", "level": 1},
        "reward": "printed",
    }
    learning = {
        "algorithm": {"name": "grpo", "group": 8, "beta": 0.0},
        "optimizer": {"lr": 1e-2},
        "sampling": {"max_new_tokens": 6},
    }
    stage = {
        "stage": "rl",
        "name": "rl",
        "model": "tiny:nano",
        "task": task,
        "prompts": 2,
        "steps": 6,
        "evaluate_every": 0,
        **learning,
    }
    (tmp_path / "low.yaml").write_text(yaml.safe_dump({"stages": [stage]}))
    assert (
        cli.main(["run", str(tmp_path / "low.yaml"), "--allow-code", "threads=1", "device=cpu", f"out={tmp_path / 'run'}"]) == 0
    )
    reward = Run(tmp_path / "run").column("reward", stage="rl")[1]
    assert np.mean(reward[-2:]) > np.mean(reward[:2]) + 0.15, reward
