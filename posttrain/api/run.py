"""A run as a Python object: its metrics, rollouts and model, and training step by step."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from posttrain import catalogue, config, pipeline
from posttrain.api.display import Rollouts, rollouts
from posttrain.errors import Interrupted, UserError, optional, refuse_unknown, require
from posttrain.runs import read
from posttrain.runs.html import run_html
from posttrain.runs.index import Index
from posttrain.runs.layout import SUMMARY, Row
from posttrain.runs.plot import draw
from posttrain.stages._lineage import inside
from posttrain.stages.base import Stage, exported
from posttrain.system.files import is_reward_model
from posttrain.trust import PREFIX
from posttrain.types import JSON

if TYPE_CHECKING:
    from posttrain.api.inputs import Files
    from posttrain.commands.compare import Report as Comparison
    from posttrain.commands.replay import Replay
    from posttrain.loop import Loop, OnStep
    from posttrain.models.policy import Policy

Figures = dict[str, Any]
Callback = Callable[[Figures], "bool | None"]
NOT_RESUMABLE = "not resumable from its directory, which does not hold {}; the same call with out= and again=True goes on"
WAIT = 1.0  # seconds after which a waiting program looks for Ctrl-C
END = 30.0  # seconds to wait for the training thread to end


class Run:
    """A run directory, and the training that fills it. Functions named after an algorithm return a trained run. `rl` and `preference`
    return a run before its first step: `train()`, `steps()` or reading a result starts it."""

    def __init__(
        self,
        directory: Path | str,
        settings: config.Settings | None = None,
        files: Files | None = None,
        callback: Callback | None = None,
    ) -> None:
        if settings is not None:
            catalogue.outside_files()
        self.directory = Path(directory)
        fine = callback is None or callable(callback)
        require(fine, f"callback: a function of a step's metrics, not {callback!r}")
        self._settings, self._files, self._callback = settings, files, callback
        self._stepper: _Stepper | None = None
        self._loaded: Any = None

    def __repr__(self) -> str:
        ended = "done" if (self.directory / SUMMARY).is_file() else "not ended"
        state = "not begun" if self._settings else "at a step" if self._stepper else ended
        return f"<Run {self.directory}: {state}>"

    def _repr_html_(self) -> str | None:
        """A verdict on whether it learns, and its curves. None before it has begun, so that the text is shown."""
        if self._settings is not None:
            return None
        index = Index(self._reader())
        index.read_metrics()
        return run_html(index)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_settings", None) is not None:
            text = f"the run {self.directory} was never begun: call .train(), or take its .steps()"
            warnings.warn(text, ResourceWarning, stacklevel=1)
        stepper: _Stepper | None = getattr(self, "_stepper", None)
        if stepper is not None and not finalizing():
            stepper.leave()

    # training

    def train(self, allow_code: bool = False) -> Run:
        """Train to the end from the current step, and return the run. A run that was loaded and has not ended is continued as by
        `posttrain resume`; `allow_code`: trust what its directory names."""
        if self._stepper is not None:
            for _ in self.steps():
                pass
        elif self._settings is not None:
            self._work()(self._report)
        elif not (self.directory / SUMMARY).is_file():
            pipeline.resume(self.directory, allow_code)
            self._loaded = None
        return self

    def _work(self) -> Callable[[OnStep], None]:
        """The training as a function, handed out once. It holds no reference to the run."""
        settings, self._settings = self._settings, None
        assert settings is not None and self._files is not None
        return partial(_train, settings, self._files)

    def steps(self) -> Iterator[Figures]:
        """Train one step at a time and yield its metrics. Nothing runs between two steps: you may leave the loop, inspect the current
        policy by `sample` and `model`, and continue with `steps()` or `train()`."""
        if self._stepper is None:
            others = "rl(algorithm=...) and preference(algorithm=...) return a run whose steps you can take"
            require(self._settings is not None, f"{self.directory} is trained already; {others}")
            self._stepper = _Stepper(self._work())
        while self._stepper is not None and (row := self._next(self._stepper)) is not None:
            figures = _figures(row)
            if self._callback is not None and self._callback(figures) is False:
                self._stepper.last = True
            yield figures

    def _next(self, stepper: _Stepper) -> Row | None:
        try:
            return stepper.next()
        finally:
            if stepper.over:
                self._stepper = None

    def stop(self) -> Run:
        """End the training after the current step. The model so far becomes the run's model."""
        if self._stepper is not None:
            self._stepper.last = True
        return self.train() if self._stepper or self._settings else self

    def extend(self, allow_code: bool = False, **settings: Any) -> Run:
        """Train for longer, as if it had been set so from the start: `extend(steps=200)` or, with several stages,
        `extend(**{"rl.steps": 200})`. Later stages that use the extended stage's model run again."""
        stages = self._reader().configured
        bare = [key for key in settings if "." not in key]
        which = f"extend: say of which stage {', '.join(bare)} is: {', '.join(stages)}"
        require(not bare or len(stages) == 1, which)
        given = {k if "." in k else f"{stages[0]}.{k}": value for k, value in settings.items()}
        changes = [f"{key}={value}" for key, value in given.items()]
        pipeline.resume(self.directory, allow_code, changes)
        self._loaded = None
        return self

    def _report(self, loop: Loop, row: Row) -> bool | None:
        return None if self._callback is None else self._callback(_figures(row))

    # results

    def _reader(self) -> read.Run:
        if self._settings is not None:
            self.train()
        return read.Run(self.directory)

    @property
    def metrics(self) -> list[Figures]:
        """One dict for each step: stage, step and every metric."""
        return [_figures(row) for row in self._reader().metrics()]

    def frame(self) -> Any:
        """The metrics as a pandas DataFrame."""
        pandas = optional("pandas", "frame() needs the package pandas: pip install pandas")
        return pandas.DataFrame(self.metrics)

    def plot(self, path: Path | str = "") -> Path:
        """Draw the curves to a PNG file, by default `DIRECTORY/plot.png`, and return its path."""
        place = Path(path) if path else self.directory / "plot.png"
        draw(self._reader(), place)
        return place

    def rollouts(self, step: int | None = None, stage: str = "") -> Rollouts:
        """Responses with their rewards of a step that was kept, by default the last. A list of dicts, which a notebook shows as a
        table, and each dict as a map of its tokens."""
        reader = self._reader()
        stages = [name for name in reader.stages() if reader.rollout_steps(name)]
        require(stages, f"{self.directory} holds no rollouts")
        stage = stage or stages[-1]
        refuse_unknown("stage with rollouts", [stage], stages)
        kept = reader.rollout_steps(stage)
        wanted, there = kept[-1] if step is None else step, ", ".join(map(str, kept))
        require(wanted in kept, f"no rollouts of {stage} step {wanted}; there are those of {there}")
        return rollouts(reader, stage, wanted)

    def compare(
        self, other: Run | Path | str, picture: Path | str = "", stage: str = ""
    ) -> Comparison:
        """Compare this run with another, or with that in a directory, as `posttrain compare`. Draws the curves to
        `picture`, by default compare-RUN-RUN.png."""
        from posttrain.commands.compare import compare_runs

        fine = isinstance(other, Run | Path | str)
        require(fine, f"compare: a run or its directory, not {other!r}")
        place = other if isinstance(other, Run) else Run(Path(other).expanduser())
        first, second = self._reader().directory, place._reader().directory
        return compare_runs(first, second, Path(picture) if picture else None, stage)

    def replay(self, place: str, **asked: Any) -> Replay:
        """Compute a step (`"rl/12"`) again, with the parts of its gradient, as `posttrain replay` with its options as keywords."""
        from posttrain.commands.replay import replay

        return replay(self._reader().directory, place, **asked)

    @property
    def answers(self) -> list[dict[str, Any]]:
        """The answers of each trained stage to the same prompts, from the end of a run that trained several models: answers.jsonl."""
        return [asdict(row) for row in self._reader().answers()]

    @property
    def summary(self) -> Mapping[str, JSON]:
        """Results, versions and lineage: summary.json."""
        found = self._reader().summary
        require(found is not None, f"{self.directory} has not ended")
        return dict(found or {})

    @property
    def result(self) -> Mapping[str, JSON]:
        """The final figures of the last stage."""
        return dict([*self.summary["stages"].values()][-1])

    @property
    def export(self) -> Path:
        """The directory of the trained model, a plain transformers checkpoint."""
        self._reader()
        place = self.directory / "export"
        require(place.is_dir(), f"{self.directory} has made no model yet")
        return place

    @property
    def data(self) -> Path:
        """The file of rows that the last stage wrote, as `comparisons` does."""
        place = self.directory / "stages" / self._reader().configured[-1] / "data.jsonl"
        require(place.is_file(), f"{self.directory} has written no data")
        return place

    def scorers(self) -> list[str]:
        """The paths of the reward models that the run trained: all members of an ensemble."""
        stage = exported(self.directory, self._reader().configured)
        if stage is None:
            raise UserError(f"{self.directory} has made no model yet")
        places = [stage / "model", *sorted(stage.glob("model-*"))]
        other = f"{self.directory} has trained a language model, not a reward model"
        require(is_reward_model(places[0]), other)
        return [str(place) for place in places]

    def policy(self) -> Policy:
        """The policy, ready to sample. Between two steps, the one that is being trained."""
        if self._stepper is not None and self._stepper.loop is not None:
            return self._stepper.loop.trainer.policy  # type: ignore[return-value]
        mute = f"{self.directory} has trained a reward model, which writes nothing; use score"
        require(not is_reward_model(self.export), mute)
        if self._loaded is None:
            from posttrain.commands.models import open_policy

            self._loaded = open_policy(str(self.export))
        return self._loaded  # type: ignore[no-any-return]

    def scorer(self) -> Any:
        """The reward model of the run, which `score` uses."""
        place = self.scorers()[0]
        if self._loaded is None:
            from posttrain.models.scorer import load_scorer

            self._loaded = load_scorer(place)
        return self._loaded

    def _network(self) -> Any:
        at_step = self._stepper is not None
        return self.policy() if at_step or not is_reward_model(self.export) else self.scorer()

    @property
    def model(self) -> Any:
        """The trained transformers module. Between two steps, the one that is being trained."""
        return self._network().model

    @property
    def tokenizer(self) -> Any:
        return self._network().tokenizer

    def sample(self, prompt: Any, n: int = 1, **settings: Any) -> Any:
        """`posttrain.sample` with this model."""
        from posttrain.api.functions import sample

        return sample(self, prompt, n, **settings)

    def evaluate(self, task: Any = None, **settings: Any) -> dict[str, JSON]:
        """`posttrain.evaluate` with this model."""
        from posttrain.api.functions import evaluate

        return evaluate(self, task, **settings)

    def score(self, prompt: Any, response: str) -> float:
        """The reward model's score of a response."""
        from posttrain.data.demonstrations import completion_example
        from posttrain.stages._material import until_end
        from posttrain.train.rating import last_scores

        scorer = self.scorer()
        example = until_end(completion_example(prompt, response, scorer.tokenizer, "prompt"))
        return float(last_scores(scorer, [example.ids], 8192)[0])


class Model:
    """A model that no run of ours trained, with the methods of a run's model."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._loaded: Any = None

    def __repr__(self) -> str:
        return f"<Model {self.source}>"

    def policy(self) -> Policy:
        if self._loaded is None:
            from posttrain.commands.models import open_policy

            self._loaded = open_policy(self.source)
        return self._loaded  # type: ignore[no-any-return]

    model = property(lambda self: self.policy().model)
    tokenizer = property(lambda self: self.policy().tokenizer)
    sample, evaluate = Run.sample, Run.evaluate


class _Stepper:
    """Runs the training in a thread that waits between two steps. A stage is one function call, and only a thread can pause in the
    middle of it."""

    def __init__(self, work: Callable[[OnStep], None]) -> None:
        self.last = False  # the current step is the last
        self.loop: Loop | None = None
        self._rows: SimpleQueue[Row | BaseException | None] = SimpleQueue()
        self._go = threading.Semaphore(0)
        self._waits = self.over = self._left = False
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)

    def next(self) -> Row | None:
        """The metrics of the next step, or None after the last."""
        if self._thread.ident is None:
            self._thread.start()
        elif self._waits:
            self._go.release()
        self._waits = False
        found = self._get()
        self._waits = isinstance(found, Row)
        self.over = not self._waits
        if self.over:
            # a thread that is still ending when the interpreter exits would abort the process
            self._thread.join(END)
        if isinstance(found, BaseException):
            raise found
        return found

    def leave(self) -> None:
        """End the thread, and with it the run's lock and workers, when no further step is wanted."""
        self._left = True
        self._go.release()

    def _get(self) -> Row | BaseException | None:
        while True:
            try:
                return self._rows.get(timeout=WAIT)
            except Empty:
                continue

    def _run(self, work: Callable[[OnStep], None]) -> None:
        last: BaseException | None = None
        try:
            work(self._at_step)
        except BaseException as error:
            last = error
        self.loop = None
        self._rows.put(last)

    def _at_step(self, loop: Loop, row: Row) -> bool | None:
        self.loop = loop
        self._rows.put(row)
        self._go.acquire()
        if self._left:
            raise Interrupted(f"left at step {row.step} of {row.stage}")
        return False if self.last else None


def _train(settings: config.Settings, files: Files, on_step: OnStep) -> None:
    """Run the stages. With the first step, report if the run cannot be resumed without this process."""
    unnamed = in_memory(settings.recipe.stages)

    def noted(loop: Loop, row: Row) -> bool | None:
        if unnamed:
            loop.writer.events.emit("message", NOT_RESUMABLE.format(", ".join(unnamed)))
            unnamed.clear()
        return on_step(loop, row)

    with files.named():
        pipeline.start(settings, noted, files.write)


def _figures(row: Row) -> Figures:
    return {"stage": row.stage, "step": row.step, **row.figures}


def in_memory(stages: Sequence[Stage]) -> list[str]:
    """The functions, classes and modules in this process that stages refer to."""
    values = [value for stage in stages for _, value in inside(stage)]
    named = [v for v in values if isinstance(v, str)]
    named += [catalogue.name_of(v) for v in values if is_dataclass(v)]
    return [name.removeprefix(PREFIX) for name in dict.fromkeys(named) if name.startswith(PREFIX)]
