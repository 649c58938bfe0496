"""Environments of verifiers: one that it publishes, unchanged, and small ones of several agents, with errors and without."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from environments_for_tests import needs, page_task, play

from posttrain.errors import UserError
from posttrain.tasks import verifiers
from posttrain.tasks.verifiers import Verifiers
from posttrain.trust import Trust, trusting
from posttrain.types import Score

pytestmark = pytest.mark.environments
WORDS = "apple\nbread\nhouse\nriver\n"
OWN = """
import time
import verifiers.v1 as vf

__all__ = ["Sums", "Debate"]

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(self.data.answer in (trace.branches[-1].messages[-1].content or ""))

class Sums(vf.Taskset[Sum]):
    def load(self):
        for n in range(10):
            yield Sum(Data(prompt=f"{n}+{n}=", answer=str(2 * n)), self.config.task)

class Config(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()

class Debate(vf.Env[Config]):
    async def run(self, task, agents):
        solved = await agents.solver.run(task)
        said = solved.branches[-1].messages[-1].content
        if said == "raise":
            raise ZeroDivisionError("no debate")
        if said == "block":
            time.sleep(3)
        await agents.critic.run(task.with_data(prompt=f"Is {said} right?"))
"""

TOOLS = '''
import verifiers.v1 as vf

__all__ = ["Doubles"]

class Tools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def double(self, number: int) -> int:
        """Twice a number."""
        return 2 * number

class Config(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()

class Double(vf.Task[vf.TaskData, vf.State, Config]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(config.tools)]

    @vf.reward()
    async def right(self, trace) -> float:
        return float(trace.branches[-1].messages[-1].content == "It is 10.")

class SetConfig(vf.TasksetConfig):
    task: Config = Config()

class Doubles(vf.Taskset[Double, SetConfig]):
    def load(self):
        for n in range(10):
            yield Double(vf.TaskData(prompt=f"Double {n}."), self.config.task)

if __name__ == "__main__":
    Tools.run()
'''
HERMES = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools> <tool_call>\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(autouse=True)
def package(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "without_the_package" in request.node.name:
        return
    needs("verifiers.v1", "verifiers")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "own_debate.py").write_text(OWN)
    (tmp_path / "own_tools.py").write_text(TOOLS)


def test_a_published_environment_is_played_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hangman of its taskset textarena, with word lists of our own in place of a download."""
    nltk = needs("nltk", "textarena")
    folder = tmp_path / "corpora" / "words"
    folder.mkdir(parents=True)
    for name in ("en", "en-basic", "README"):
        (folder / name).write_text(WORDS)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *_, **__: False)
    task = page_task("verifiers", tasks=20)
    train, test = (task.problems(split) for split in ("train", "test"))
    assert (len(train), len(test)) == (16, 4) and not {p.id for p in train} & {p.id for p in test}

    def guess(text: str, turn: int) -> str:
        letters = "aeoupbrdlhsiv"
        return f"[{letters[turn]}]"

    groups = play(task, test, guess, samples=2)
    for group in groups:
        first, second = group.rollouts
        assert first.response == second.response and first.score == second.score, "one seed, one word"
        given = [s.text for s in first.segments if not s.sampled]
        assert "You are playing Hangman" in given[0] and "Hangman" not in given[1], "history is appended, never said again"
    assert any(g.rollouts[0].score == Score(1.0) for g in groups)
    (group,) = play(page_task("verifiers", tasks=20, max_turns=2), test[:1], lambda text, turn: f"[{'xz'[turn]}]")
    assert group.rollouts[0].score.outcome == "turn limit" and group.rollouts[0].turns == 2


def test_every_agent_is_a_role_and_is_scored_by_its_own_trace() -> None:
    task = Verifiers("own_debate", tasks=10)
    (problem,) = (p for p in task.problems("test") if p.question == "5+5=")
    solver, critic = play(task, [problem], lambda text, turn: "no" if "right?" in text else "10", samples=2)
    assert (solver.role, critic.role) == ("solver", "critic")
    assert [r.score for r in solver.rollouts] == [Score(2.0)] * 2 and [r.score for r in critic.rollouts] == [Score(0.0)] * 2


def test_the_tools_of_a_task_are_called_and_read() -> None:
    task = Verifiers("own_tools", tasks=10, max_turns=4)
    (problem,) = (p for p in task.problems("test") if p.question == "Double 5.")
    names: list[str] = []

    def policy(text: str, turn: int) -> str:
        names.extend(re.findall(r'"name": ?"(\w*double)"', text))
        return f'<tool_call>{{"name": "{names[0]}", "arguments": {{"number": 5}}}}</tool_call>' if turn == 0 else "It is 10."

    (group,) = play(task, [problem], policy, template=HERMES)
    (rollout,) = group.rollouts
    assert rollout.score == Score(1.0) and rollout.turns == 2 and "10" in rollout.segments[2].text
    (group,) = play(task, [problem], policy)
    assert "the chat template does not show the tools" in str(group.rollouts[0].score.failure)


def test_what_the_environment_breaks_has_no_score() -> None:
    task = Verifiers("own_debate", tasks=10)
    (group,) = play(task, task.problems("test")[:1], lambda text, turn: "raise")
    assert "no debate" in str(group.rollouts[0].score.failure)


def test_an_environment_that_blocks_is_given_up_and_keeps_no_sampler_waiting() -> None:
    task = Verifiers("own_debate", tasks=10, max_seconds=1.0)
    began = time.monotonic()
    (group,) = play(task, task.problems("test")[:1], lambda text, turn: "block")
    assert group.rollouts[0].score.failure is not None and time.monotonic() - began < 2.9
    time.sleep(2.5)  # its thread is free again


def test_settings_that_cannot_work_are_one_line() -> None:
    with pytest.raises(UserError, match="verifiers: no_such_set cannot be loaded: .*no_such_set"):
        Verifiers("no_such_set").ready()
    with pytest.raises(UserError, match="cannot be loaded"):
        Verifiers("own_debate", {"taskset": {"colour": 1}}).ready()
    with trusting(Trust(file="strange.yaml")), pytest.raises(UserError, match="would run code of an installed package"):
        Verifiers("own_debate").ready()


def test_without_the_package_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for cached in (verifiers._loaders, verifiers._tasks):
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(UserError, match=r"pip install 'posttrain\[verifiers\]'"):
        Verifiers("gsm8k-v1").problems("test")
