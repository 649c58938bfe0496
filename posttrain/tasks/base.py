"""The base class of a task: problems, episodes and scores. Tasks import no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import isawaitable
from typing import Any, ClassVar, Protocol

from posttrain.errors import STOPS, Checked, NotNegative, Whole, check_fields, raised, require
from posttrain.rewards._loop import no_running_loop, step_ends
from posttrain.rewards.compose import as_score
from posttrain.types import JSON, Message, Problem, Rollout, Score, Segment

FAULTS = (Exception, SystemExit, CancelledError)  # what a task's code may raise

Given = Sequence[Message] | str | Sequence[int]  # the input of a turn: messages, text or ids


class EpisodeEnd(Exception):
    """Ends an episode because of what the policy did: it reached a limit or made an illegal move, for example. Unless `run` catches it,
    the episode ends there. Its rollouts get `score` or, without one, the task's score; `outcome` names the end."""

    def __init__(self, outcome: str, score: Score | float | None = None) -> None:
        super().__init__(outcome)
        self.outcome, self.score = outcome, None if score is None else as_score(score)


class ContextFull(EpisodeEnd):
    """The next turn would exceed the model's context length."""

    def __init__(self, text: str) -> None:
        super().__init__("context full")
        self.args = (text,)


@dataclass(frozen=True, slots=True)
class Limits(Checked):
    """Limits at which an episode is ended; 0 is no limit. Turns and tokens count those of one conversation. The outcome names the
    limit: `turn limit`, `token limit`, `thinking limit`, `time limit`."""

    where: ClassVar[str] = "a limit of an episode: "

    turns: Whole = 0
    tokens: Whole = 0  # sampled in all turns together; the last turn may be cut off
    thinking: Whole = 0  # sampled tokens within reasoning blocks
    seconds: NotNegative = 0.0  # since the episode began; may end it in the middle of a turn


NO_LIMITS = Limits()


class Generate(Protocol):
    """The `generate` argument of a task's `run`: one conversation with the policy. Awaiting a call samples a turn."""

    @property
    def template(self) -> str:
        """The chat template of the policy's tokenizer; "" if it has none."""

    @property
    def decoder(self) -> Any:
        """Decodes ids to text; its `tokenizer` is the policy's."""

    async def __call__(
        self,
        given: Given | None = None,
        last: bool = False,
        *,
        tools: Sequence[JSON] | None = None,
        max_new_tokens: int = 0,
        written: int = 0,
    ) -> Segment:
        """Append `given` to the conversation, without loss, and return the turn that the policy samples after it.

        Messages are rendered with the chat template; after the first turn, as the template continues a conversation. Text and ids are
        appended as they are. None stands for the task's own prompt. `last` says that no turn follows, so that the sampler need not keep
        its cache. `tools` are JSON schemas that the template shows with the messages of the first turn. A turn has at most
        `max_new_tokens` tokens; 0: the limit of the stage's sampling. `written` of the tokens in `given` count as the policy's own.
        """

    def reward(self, value: float) -> None:
        """Add a reward to the last turn, for credit by turn. The score of the whole rollout is added to these."""

    def count(self, name: str, amount: float = 1.0) -> None:
        """Count an event. The mean over all rollouts becomes a metric."""

    def rollout(
        self, score: Score | float | None = None, outcome: str = "", answer: str | None = None
    ) -> Rollout:
        """Return the conversation so far as a rollout. Without `score`, the task's `score` or `score_group` scores it later, by
        `answer` or else the text of all turns; `outcome` then replaces the outcome of that score."""

    def session(self, role: str) -> Generate:
        """Start another conversation in the same episode. Its rollouts are compared with those of the same role."""


class Task(ABC):
    """A frozen dataclass whose fields are its settings. Its own gold answers must score 1; `validate` checks that."""

    def __init_subclass__(cls, **more: Any) -> None:
        """Check what a user's `problems` returns, wherever it is called."""
        super().__init_subclass__(**more)
        if "problems" in vars(cls) and not cls.__module__.startswith("posttrain."):
            cls.problems = _checked(cls.problems)  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        check_fields(self, f"{self.known_as()}: ")

    @classmethod
    def known_as(cls) -> str:
        """Its name in the catalogue; the class name for a user's own task."""
        package, _, module = cls.__module__.rpartition(".")
        return module if package.startswith("posttrain.") else cls.__name__

    def check(self, condition: bool, message: str) -> None:
        """Raise an error about the settings unless `condition` holds."""
        require(condition, f"{self.known_as()}: {message}")

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels of difficulty that a curriculum may step through. Most tasks have one."""
        return (0,)

    @abstractmethod
    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        """The problems of a split, "train" or "test", which never share a problem, at one level; None: at the task's target level."""

    def prompt(self, problem: Problem) -> tuple[Message, ...]:
        """The messages that the policy answers."""
        return (Message("user", problem.question),)

    async def run(self, problem: Problem, generate: Generate) -> Rollout | Sequence[Rollout]:
        """Run one episode; several run concurrently. A task with several turns, tools or roles overrides this. An error in it becomes a
        named failure, which is counted and not scored. To end an episode because of what the policy did (too many turns, a malformed
        call), raise `EpisodeEnd`: the episode is then scored."""
        await generate(last=True)
        return generate.rollout()

    def limits(self, problem: Problem) -> Limits:
        """The limits of an episode of this problem."""
        return NO_LIMITS

    def observation_roles(self, template: str) -> tuple[str, ...]:
        """The roles of the messages that `run` appends after the first turn, for a policy with this chat template. A template that
        cannot continue with them is refused before the first stage."""
        return () if type(self).run is Task.run else ("user",)

    def tags(self, template: str) -> tuple[str, ...]:
        """Strings that a policy with this chat template must write exactly. A warning names those whose tokens were never trained."""
        return ()

    @property
    def resettable(self) -> bool:
        """Whether all episodes of a problem begin in the same state. Otherwise they cannot be compared with each other."""
        return True

    @abstractmethod
    def score(self, problem: Problem, response: str) -> Score:
        """Score a response. If it cannot be scored, return `Score.failed`, not 0."""

    async def scored(self, problem: Problem, response: str) -> Score:
        """The score of a response. An error in `score` becomes a named failure, which is counted and is not 0."""
        try:
            with no_running_loop():
                found: Any = self.score(problem, response)
            # a user's reward may be a coroutine
            return as_score(await found if isawaitable(found) else found)
        except FAULTS as error:  # reward code is not ours
            return failed(error)

    def final(self, response: str) -> str | None:
        """The final answer in a response, in a normal form, for majority votes. None if there is none."""
        return None

    def score_group(self, problem: Problem, responses: Sequence[str]) -> Sequence[Score] | None:
        """Score all responses to one problem together, if a score depends on the others. None: `score` scores each by itself."""
        return None

    @property
    def verifiable(self) -> bool:
        """Whether a score tells if a response is right. Then accuracy is reported, else the mean reward."""
        return True

    @property
    def scores(self) -> bool:
        """Whether the task scores responses itself. Otherwise the reward of the stage does."""
        return True

    @property
    def isolated(self) -> bool:
        """Whether to score in worker processes with a time limit, for rewards that are slow or may hang or crash."""
        return False

    @property
    def scorer(self) -> Task:
        """The task whose score is taken, which worker processes know."""
        return self

    def isolates(self, problem: Problem) -> bool:
        """`isolated` for one problem, if problems differ."""
        return self.isolated

    def isolates_run(self, problem: Problem) -> bool:
        """Whether `run` executes in a worker process, too, so that an endless episode can be ended."""
        return type(self).run is not Task.run and self.isolates(problem)

    async def run_remotely(self, problem: Problem, exchange: Callable[[JSON], JSON]) -> JSON:
        """Execute `run` in a worker process, which exchanges messages with its parent to sample turns."""
        from posttrain.tasks._remote import run

        return await run(self, problem, exchange)

    @property
    def seconds(self) -> float:
        """The time limit of one isolated score, and of an isolated episode from one turn to the next."""
        return 10.0

    def ready(self) -> tuple[str, ...]:
        """Prepare what scoring needs, before workers start, or raise an error. Returns lines to show."""
        return ()

    def demonstration(self, problem: Problem) -> str:
        """A worked response that scores 1."""
        return problem.answer

    def program(self, problem: Problem) -> tuple[str, str] | None:
        """A Python program that computes the answer, and its output; None if there is none."""
        return None

    def shown_tools(self, template: str) -> list[JSON] | None:
        """JSON schemas of the tools that this chat template shows in its conversations; None if it shows none."""
        return None

    def conversation(self, problem: Problem) -> tuple[Message, ...]:
        """The messages for supervised training: the prompt and its demonstration or, in an environment, the turns of an episode. Empty
        if this problem has no demonstration; it is then left out."""
        return (*self.prompt(problem), Message("assistant", self.demonstration(problem)))


def _checked(problems: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(problems)
    def checked(self: Task, *given: Any, **more: Any) -> Any:
        found = problems(self, *given, **more)
        listed = hasattr(found, "__getitem__") and not isinstance(found, Mapping | str)
        first = found[0] if listed and len(found) else None
        fine = listed and (first is None or isinstance(first, Problem))
        kind = type(found).__name__ + ("" if first is None else f" of {type(first).__name__}")
        self.check(fine, f"problems returns a {kind}; return a list or a tuple of Problem")
        asked = type(getattr(first, "question", "")).__name__
        text = f"a question is text, not {asked}; messages are what `prompt` returns"
        self.check(asked == "str", text)
        level, own = more.get("level", [*given, None, None][1]), getattr(first, "level", None)
        named = None in (level, own) or len(self.levels) == 1 or own == level
        text = f"a problem of level {level} says level {own}; give each Problem its level, by which a curriculum counts"
        self.check(named, text)
        return found

    return checked


async def score_group(task: Task, problem: Problem, responses: Sequence[str]) -> list[Score] | None:
    """The scores of all responses to a problem if the task compares them; None if it scores each by itself."""
    try:
        with no_running_loop():
            given: Any = task.score_group(problem, responses)
        given = await given if isawaitable(given) else given
        found = None if given is None else [as_score(score) for score in given]
    except FAULTS as error:
        return [failed(error)] * len(responses)
    if found is None or len(found) == len(responses):
        return found
    text = f"score_group returned {len(found)} scores for {len(responses)} responses"
    return [Score.failed(text)] * len(responses)


def failed(error: BaseException) -> Score:
    """The failed score for an error in a task's code, with the line in the user's file where it happened. An error that ends the
    run or the step is raised again."""
    if isinstance(error, STOPS) or step_ends(error):
        raise error
    return Score.failed(raised(error))


def validate(task: Task, split: str = "test", count: int = 50) -> None:
    """Check that the task scores its own demonstrations 1 and an empty response less, at every level."""
    for level in task.levels:
        problems = task.problems(split, level)
        for problem in problems[: min(count, len(problems))]:
            good, empty = task.score(problem, task.demonstration(problem)), task.score(problem, "")
            if good.value != 1.0:
                raise AssertionError(f"the demonstration of {problem.id} scores {good}")
            if empty.value is not None and empty.value >= 1.0:
                raise AssertionError(f"an empty response to {problem.id} scores {empty}")
