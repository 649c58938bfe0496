"""What a task is: problems, an episode for each, and a score for what the policy wrote. It imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, ClassVar, Protocol

from posttrain.errors import Checked, GuardStop, NotNegative, UserError, Whole, check_fields
from posttrain.rewards._loop import no_running_loop
from posttrain.rewards.compose import as_score
from posttrain.types import JSON, Message, Problem, Rollout, Score, Segment

MAX_FAILURE = 500  # characters of an error in reward code that are kept
# errors that end the run: a missing option, a judge that prefers a canary
STOPS = (UserError, GuardStop)

Given = Sequence[Message] | str | Sequence[int]  # what the policy reads before a turn


class EpisodeEnd(Exception):
    """The policy has brought its episode to an end that has a name: a limit, an illegal move. An episode that does not catch it ends
    there, and what was sampled is scored by the task, or has `score`; the name is its outcome."""

    def __init__(self, outcome: str, score: Score | None = None) -> None:
        super().__init__(outcome)
        self.outcome, self.score = outcome, score


class ContextFull(EpisodeEnd):
    """A later turn would not fit into the positions of the model."""

    def __init__(self, text: str) -> None:
        super().__init__("context full")
        self.args = (text,)


@dataclass(frozen=True, slots=True)
class Limits(Checked):
    """Where an episode ends that does not end by itself; 0 is no limit. Turns and tokens are those of one conversation. Each limit is
    an ending with a name of its own: `turn limit`, `token limit`, `thinking limit`, `time limit`."""

    where: ClassVar[str] = "a limit of an episode: "

    turns: Whole = 0
    tokens: Whole = 0  # sampled in all turns; the last of them may be cut off
    thinking: Whole = 0  # of these, in blocks of reasoning
    seconds: NotNegative = 0.0  # since the episode began; it ends also in the middle of a turn


NO_LIMITS = Limits()


class Generate(Protocol):
    """What a task's `run` is given: one conversation with the policy. Awaiting it samples a turn."""

    @property
    def template(self) -> str:
        """The chat template of the policy's tokenizer; "" where it has none."""

    @property
    def decoder(self) -> Any:
        """Makes text of ids; its `tokenizer` is the policy's."""

    async def __call__(
        self,
        given: Given | None = None,
        last: bool = False,
        *,
        tools: Sequence[JSON] | None = None,
        max_new_tokens: int = 0,
    ) -> Segment:
        """Append what is given, which carries no loss, and return the turn that the policy samples after it.

        Messages are rendered with the chat template, after the first turn as the template continues a conversation; text and ids are
        appended as they are. None is the task's own prompt. `last` says that no turn follows: nothing is kept for one. `tools` are
        JSON schemas that the template shows with the messages of the first turn. A turn has at most `max_new_tokens`, or as many as
        the stage's sampling says.
        """

    def reward(self, value: float) -> None:
        """Pay the last turn: credit by turn. Payments of one turn add up; the score of the whole comes on top."""

    def count(self, name: str, amount: float = 1.0) -> None:
        """Count something that happened: its mean over all rollouts is a metric."""

    def rollout(
        self, score: Score | None = None, outcome: str = "", answer: str | None = None
    ) -> Rollout:
        """The conversation so far as a rollout. Without a score the task's `score` or `score_group` gives it one, named `outcome`, for
        the text of all turns or for `answer`."""

    def session(self, role: str) -> Generate:
        """Another conversation of the same episode; its rollouts are compared with those of the same role."""


class Task(ABC):
    """A frozen dataclass whose fields are its settings. Its own gold answers must score 1: `posttrain.tasks.base.validate`."""

    def __post_init__(self) -> None:
        with suppress(NameError):  # a user's type that only a type checker imports
            check_fields(self, f"{self.known_as()}: ")

    @classmethod
    def known_as(cls) -> str:
        """What it is called in the catalogue; a user's own by its class."""
        package, _, module = cls.__module__.rpartition(".")
        return module if package.startswith("posttrain.") else cls.__name__

    def check(self, condition: bool, message: str) -> None:
        """Refuse settings unless `condition` holds."""
        if not condition:
            raise UserError(f"{self.known_as()}: {message}")

    @property
    def levels(self) -> tuple[int, ...]:
        """Difficulties that a curriculum may move up through; one level where there is nothing to choose from."""
        return (0,)

    @abstractmethod
    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        """Problems of `split` ("train" or "test"; the two never share one), of one level or of the task's target level."""

    def prompt(self, problem: Problem) -> tuple[Message, ...]:
        """The conversation so far, ready to be answered."""
        return (Message("user", problem.question),)

    async def run(self, problem: Problem, generate: Generate) -> Rollout | Sequence[Rollout]:
        """One episode; several are run at once. A task of several turns, with tools or with several roles writes its own. What it
        raises is a named failure: not scored and counted. An episode that the policy brought to its end (a limit of turns, a malformed
        call) is scored, with an outcome that says so: `EpisodeEnd`."""
        await generate(last=True)
        return generate.rollout()

    def limits(self, problem: Problem) -> Limits:
        """Where an episode of this problem ends that does not end by itself."""
        return NO_LIMITS

    def observation_roles(self, template: str) -> tuple[str, ...]:
        """Roles of the messages that `run` gives after the first turn, to a policy with this chat template: one that cannot go on with
        them is refused before the first stage."""
        return () if type(self).run is Task.run else ("user",)

    def tags(self, template: str) -> tuple[str, ...]:
        """What a policy with this chat template must write to the letter: a warning says where it was never trained on these tokens."""
        return ()

    @property
    def resettable(self) -> bool:
        """Whether several episodes of a problem begin in the same state. Those of another kind cannot be compared with each other."""
        return True

    @abstractmethod
    def score(self, problem: Problem, response: str) -> Score:
        """Judge a response. Parts are named; a response that cannot be judged is a failure, not a 0."""

    async def scored(self, problem: Problem, response: str) -> Score:
        """The score of a response; what `score` raises becomes a named failure, which is counted and never a 0."""
        try:
            with no_running_loop():
                found: Any = self.score(problem, response)
            # a user's reward may be a coroutine
            return as_score(await found if isawaitable(found) else found)
        except STOPS:
            raise
        except (Exception, SystemExit) as error:  # reward code is not ours
            return failed(error)

    def final(self, response: str) -> str | None:
        """The final answer within a response, spelled in one way: what a majority is counted over. None where none can be found."""
        return None

    def score_group(self, problem: Problem, responses: Sequence[str]) -> Sequence[Score] | None:
        """Judge the responses to one problem together, where a score depends on the others; None: each by itself."""
        return None

    @property
    def verifiable(self) -> bool:
        """Whether a score says that a response is right, so that accuracy can be counted; else the mean reward is reported."""
        return True

    @property
    def scores(self) -> bool:
        """Whether it scores responses by itself; else the reward of the stage does."""
        return True

    @property
    def isolated(self) -> bool:
        """Whether to score in worker processes with a time limit: for rewards that are slow, or that might hang or crash."""
        return False

    def isolates(self, problem: Problem) -> bool:
        """The same of one problem, where they differ in it."""
        return self.isolated

    def isolates_run(self, problem: Problem) -> bool:
        """Whether `run` executes in a process of its own too, so that an endless one can be ended."""
        return type(self).run is not Task.run and self.isolates(problem)

    async def run_remotely(self, problem: Problem, exchange: Callable[[JSON], JSON]) -> JSON:
        """`run` in a worker process, whose conversations with the policy are messages to its parent."""
        from posttrain.tasks._remote import run

        return await run(self, problem, exchange)

    @property
    def seconds(self) -> float:
        """The time limit of one isolated score, and of an isolated episode between two turns."""
        return 10.0

    def ready(self) -> tuple[str, ...]:
        """Prepare what scoring needs, before workers are started, or refuse in words; returns lines to show."""
        return ()

    def demonstration(self, problem: Problem) -> str:
        """A worked response that scores 1."""
        return problem.answer

    def program(self, problem: Problem) -> tuple[str, str] | None:
        """A Python program that computes the answer, and what it prints; None where none is known."""
        return None

    def shown_tools(self, template: str) -> list[JSON] | None:
        """JSON schemas of tools that this chat template shows in its conversations; None where it shows none."""
        return None

    def conversation(self, problem: Problem) -> tuple[Message, ...]:
        """What supervised training learns from: the prompt and its demonstration; in an environment, the turns of an episode. Nothing
        where this problem has no demonstration: it is left out."""
        return (*self.prompt(problem), Message("assistant", self.demonstration(problem)))


async def score_group(task: Task, problem: Problem, responses: Sequence[str]) -> list[Score] | None:
    """The scores of all responses to a problem, where the task compares them; None where it scores each by itself."""
    try:
        with no_running_loop():
            given: Any = task.score_group(problem, responses)
        given = await given if isawaitable(given) else given
        found = None if given is None else [as_score(score) for score in given]
    except STOPS:
        raise
    except (Exception, SystemExit) as error:
        return [failed(error)] * len(responses)
    if found is None or len(found) == len(responses):
        return found
    text = f"score_group returned {len(found)} scores for {len(responses)} responses"
    return [Score.failed(text)] * len(responses)


def failed(error: BaseException) -> Score:
    """The failure that an error of a task's code is counted as."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # its text is the user's code too
        text = type(error).__name__
    return Score.failed(text[:MAX_FAILURE])


def validate(task: Task, split: str = "test", count: int = 50) -> None:
    """Prove that the task scores its own demonstrations 1 and an empty response less, on every level."""
    for level in task.levels:
        problems = task.problems(split, level)
        for problem in problems[: min(count, len(problems))]:
            good, empty = task.score(problem, task.demonstration(problem)), task.score(problem, "")
            if good.value != 1.0:
                raise AssertionError(f"the demonstration of {problem.id} scores {good}")
            if empty.value is not None and empty.value >= 1.0:
                raise AssertionError(f"an empty response to {problem.id} scores {empty}")
