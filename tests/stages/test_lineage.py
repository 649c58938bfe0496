"""What is done again and what is not: by settings, by content of inputs, by name; rounds, the best of them, and stages run alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from posttrain import catalogue, cli, config, pipeline
from posttrain.algorithms.ppo import PPO
from posttrain.errors import Interrupted, UserError, field_types
from posttrain.recipes.base import Recipe, best_round, repeat
from posttrain.recipes.iterative_dpo import iterative_dpo
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.stages._lineage import MODELS, PLACES, Lineage
from posttrain.stages._naming import Names
from posttrain.stages.base import Context, Stage, check_inputs, data_place, run_stages
from posttrain.stages.best import BestStage
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.types import JSON

RAN: list[str] = []


@dataclass(frozen=True)
class Inner:
    size: int = 1
    token_budget: int = 100  # says how, not what


@dataclass(frozen=True, kw_only=True)
class Note(Stage):
    """Writes its word after what it read; fails when told to."""

    word: str = ""
    source: str = ""
    inner: Inner = Inner()
    skip: int = 0
    score: float = 0.0
    checkpoint_every: int = 25
    options: Mapping[str, JSON] = field(default_factory=dict)
    model: str = ""

    def run(self, context: Context) -> dict[str, JSON]:
        RAN.append(self.name)
        if self.word == "fail":
            raise Interrupted("told to")
        read = Path(data_place(self.source, context)).read_text().split() if self.source else []
        context.write_lines(self.name, [*read, self.word], "data.jsonl")
        model = context.folder(self.name) / "model"
        model.mkdir(exist_ok=True)
        (model / "weights").write_text(self.word)
        context.writer.metrics(self.name, 1, {"loss": float(len(self.word))})
        return {"length": len(read) + 1, "accuracy": [self.score, 0.0, 1.0]}


CHAIN = (
    Note(name="a", word="x"),
    Note(name="b", word="y", source="a"),
    Note(name="c", word="z"),
    Note(name="d", word="w", source="b"),
)


@contextmanager
def opened(directory: Path, seed: int = 0) -> Iterator[Context]:
    made = RunWriter.resume(directory) if (directory / "config.yaml").is_file() else RunWriter.create(directory, {})
    with made as writer:
        yield Context(writer, seed, say=False)


def ran(directory: Path, stages: tuple[Stage, ...], seed: int = 0, **options: object) -> list[str]:
    RAN.clear()
    with opened(directory, seed) as context:
        run_stages(stages, context, **options)  # type: ignore[arg-type]
    return list(RAN)


def said(directory: Path) -> list[str]:
    return [f"{e.details['stage']}: {e.details['text']}" for e in Run(directory).events() if e.kind == "message"]


def test_what_is_done_and_unchanged_is_not_done_again(tmp_path: Path) -> None:
    assert ran(tmp_path, CHAIN) == ["a", "b", "c", "d"]
    assert ran(tmp_path, CHAIN) == []
    harmless = replace(CHAIN[0], inner=Inner(token_budget=7), checkpoint_every=3)
    assert ran(tmp_path, (harmless, *CHAIN[1:])) == [], "how the work is done is no reason to do it again"


def test_a_change_runs_its_stage_and_what_depends_on_it(tmp_path: Path) -> None:
    ran(tmp_path, CHAIN)
    changed = replace(CHAIN[1], inner=Inner(size=2), word="v")
    assert ran(tmp_path, (CHAIN[0], changed, *CHAIN[2:])) == ["b", "d"], "c does not depend on b"
    aside = f"what it had made is now in {tmp_path}/replaced"
    assert said(tmp_path) == [
        f"b: runs again: word: y -> v; inner.size: 1 -> 2; {aside}/b-1",
        f"d: runs again: its input b has changed; {aside}/d-1",
    ]
    assert (tmp_path / "replaced/b-1/stages/b/model/weights").read_text() == "y", "what was trained is not lost"
    ran(tmp_path, CHAIN)
    assert (tmp_path / "replaced/b-2/stages/b/model/weights").read_text() == "v"
    assert (tmp_path / "replaced/d-2/stages/d/data.jsonl").read_text().split() == ["x", "v", "w"]
    assert [row.stage for row in Run(tmp_path).metrics()] == ["a", "b", "c", "d"], "what stands is not lost from sight"


def test_the_same_outcome_changes_nothing_below(tmp_path: Path) -> None:
    ran(tmp_path, CHAIN)
    assert ran(tmp_path, (replace(CHAIN[0], inner=Inner(size=2)), *CHAIN[1:])) == ["a"], "a is made again, and is as it was"


def test_seed_and_kind_of_stage_are_part_of_it(tmp_path: Path) -> None:
    ran(tmp_path, CHAIN[:1])
    assert ran(tmp_path, CHAIN[:1], seed=1) == ["a"]

    @dataclass(frozen=True, kw_only=True)
    class Other(Note):
        pass

    other = Other(name="a", word="x")
    assert ran(tmp_path, (other,), seed=1) == ["a"], "another class of the same module"
    best = BestStage(name="a", models=("m",), measured=("n",))
    with pytest.raises(UserError, match="measured nothing"):
        ran(tmp_path, (best,), seed=1)


@pytest.mark.parametrize(
    ("field", "word", "file", "seen"),
    [
        ("word", "pairs.jsonl.gz", "pairs.jsonl.gz", True),  # a file with an ending
        ("model", "words", "words", True),  # without one, in a field for places
        ("model", "mine", "mine/model.safetensors", True),
        ("word", "a/b", "a/b/x.txt", True),  # a path
        ("word", "train", "train/x.json", False),  # what happens to be called like a setting
        ("word", "code", "code", False),
        ("word", "score.py:polite", "score.py", True),  # a function of the user's own
        ("word", "~/far.jsonl", "far.jsonl", True),  # in the user's home
        ("model", ".", "notes.json", False),  # a mark, such as where an answer ends, and no place
    ],
)
def test_inputs_are_found_by_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, word: str, file: str, seen: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("one")
    stages = (replace(Note(name="a"), **{field: word}),)
    assert ran(tmp_path / "run", stages) == ["a"] and ran(tmp_path / "run", stages) == []
    path.write_text("two")
    assert ran(tmp_path / "run", stages) == (["a"] if seen else [])


@pytest.mark.parametrize("name", catalogue.names("stage"))
def test_every_setting_that_names_a_model_or_data_is_a_place_of_an_input(name: str) -> None:
    for key, hint in field_types(catalogue.load("stage", name, Stage)):
        inner = get_args(hint)[0] if get_origin(hint) is tuple else hint
        kinds = [mark.kind for mark in getattr(inner, "__metadata__", ()) if isinstance(mark, Names)]
        assert key in {"model": MODELS, "reward model": MODELS, "data": PLACES}.get("".join(kinds), [key])


def test_a_cache_is_no_input_and_functions_of_one_name_are_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "score.py").write_text("1")
    stages = (Note(name="a", word="one/score.py:f", source="", options={"cache": "kept/answers", "reward": "two/score.py:f"}),)
    assert ran(tmp_path / "run", stages) == ["a"]
    (tmp_path / "kept" / "answers").mkdir(parents=True)
    (tmp_path / "kept" / "answers" / "x.json").write_text("{}")
    assert ran(tmp_path / "run", stages) == [], "what the work itself has filled"
    for folder in ("one", "two"):
        (tmp_path / folder / "score.py").write_text("2")
        assert ran(tmp_path / "run", stages) == ["a"]


def test_what_a_file_of_code_imports_from_its_folder_is_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {"score.py": "import json, near\nfrom inner.deep import f\n", "near.py": "import score\n", "inner/__init__.py": "",
             "inner/deep.py": "from . import side\nfrom ..far import g\nimport near\n", "inner/far.py": "", "far.py": "(",
             "inner/side.py": f"import posttrain.types\nfrom posttrain import types\nfrom {'.' * 99}far import g\n",
             "other.py": "", "inner/near.py": "", "posttrain/__init__.py": "", "posttrain/types.py": ""}  # fmt: skip
    unused = ("other.py", "inner/near.py", "inner/far.py", "posttrain/__init__.py", "posttrain/types.py")
    for folder in ("inner", "posttrain"):
        (tmp_path / folder).mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    stages = (Note(name="a", word="score.py:f"),)
    assert ran(tmp_path / "run", stages) == ["a"]
    for name, text in texts.items():
        (tmp_path / name).write_text(text + " ")
        assert ran(tmp_path / "run", stages) == ([] if name in unused else ["a"]), name


def test_what_an_older_version_did_not_look_at_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept options key by key, and no functions among the inputs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "score.py").write_text("1")
    stages = (Note(name="a", word="score.py:f", options={"mark": "#", "inner": {"x": 1}}),)
    ran(tmp_path / "run", stages)
    record = tmp_path / "run" / "stages" / "a" / "lineage.json"
    tree = json.loads(record.read_text())
    assert tree["config"].pop("options") == {"mark": "#", "inner": {"x": 1}} and tree["inputs"].pop("score.py (code)")
    record.write_text(json.dumps({**tree, "config": {**tree["config"], "options.mark": "#", "options.inner.x": 1}}))
    assert ran(tmp_path / "run", stages) == []
    assert ran(tmp_path / "run", (replace(stages[0], options={"mark": "+", "inner": {"x": 1}}),)) == ["a"]


def test_one_more_of_a_users_own_options_is_a_change(tmp_path: Path) -> None:
    def stages(**options: JSON) -> tuple[Stage, ...]:
        return (Note(name="a", word="x", options=options),)

    assert ran(tmp_path, stages(marker="#")) == ["a"]
    assert ran(tmp_path, stages(marker="#")) == []
    assert ran(tmp_path, stages(marker="#", ignore_case=True)) == ["a"]
    assert ran(tmp_path, stages()) == ["a"] and ran(tmp_path, stages(marker="#")) == ["a"]


def test_files_are_compared_by_content(tmp_path: Path) -> None:
    file, run = tmp_path / "words.jsonl", tmp_path / "run"
    file.write_text("one\n")
    stages = (Note(name="a", word="x", source=str(file)),)
    assert ran(run, stages) == ["a"]
    file.write_text("one\n")
    assert ran(run, stages) == []
    file.write_text("two\n")
    assert ran(run, stages) == ["a"]
    assert said(run)[-1].startswith(f"a: runs again: its input {file} has changed; ")


def test_data_that_changes_while_a_stage_runs_is_said(tmp_path: Path) -> None:
    file, run = tmp_path / "words.jsonl", tmp_path / "run"
    file.write_text("one\n")

    @dataclass(frozen=True, kw_only=True)
    class Slow(Note):
        def run(self, context: Context) -> dict[str, JSON]:
            file.write_text(f"{self.word}\n")
            return super().run(context)

    assert ran(run, (Slow(name="a", word="one", source=str(file)),)) == ["a"]
    assert said(run) == []
    assert ran(run, (Slow(name="b", word="another", source=str(file)),)) == ["b"]
    assert said(run) == [f"b: {file} changed while the stage ran: it may have read both versions"]


def test_a_half_done_stage_with_other_inputs_is_refused_or_begun_anew(tmp_path: Path) -> None:
    file, run = tmp_path / "words.jsonl", tmp_path / "run"
    file.write_text("one\n")
    half = Note(name="a", word="fail", source=str(file))
    with pytest.raises(Interrupted):
        ran(run, (half,))
    checkpoint = run / "checkpoints" / "a" / "step-1"
    checkpoint.mkdir(parents=True)
    for name in ("a-1", "a-2", "a-b"):
        (run / "checkpoints" / name).mkdir()
    (run / "stages" / "a-2").mkdir()
    for name in ("a", "a-2"):
        (run / "rollouts" / name).mkdir(parents=True)
    file.write_text("two\n")
    with pytest.raises(UserError, match=r"begun with other inputs: its input .* has changed.*again=true"):
        ran(run, (half,))
    assert checkpoint.exists()
    assert ran(run, (replace(half, word="x"),), again=True) == ["a"]
    assert not checkpoint.exists(), "its checkpoints are of something else"
    aside = run / "replaced" / "a-1"
    assert sorted(p.name for p in (aside / "checkpoints").glob("*")) == ["a", "a-1"], "kept, with those of its second model"
    assert (aside / "checkpoints/a/step-1").is_dir() and (aside / "stages/a/lineage.json").is_file()
    assert sorted(p.name for p in (run / "checkpoints").glob("*")) == ["a-2", "a-b"], "other stages' are not touched"
    assert (aside / "rollouts/a").is_dir() and [p.name for p in (run / "rollouts").glob("*")] == ["a-2"]


@pytest.mark.parametrize("moves", range(5))
def test_a_kill_while_results_are_set_aside_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int) -> None:
    """Checkpoints of two models, rollouts and the stage's folder are moved, and then their folder is named: a process that dies
    before any of the five leaves a run that the next one finds as it was."""
    ran(tmp_path, CHAIN[:1])
    for path in ("checkpoints/a/step-1", "checkpoints/a-1/step-1", "rollouts/a/step-000001.jsonl"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)

    def files() -> list[str]:
        known = (
            p.relative_to(tmp_path) for part in ("checkpoints", "rollouts", "stages") for p in (tmp_path / part).rglob("*")
        )
        return sorted(map(str, known))

    before, left = files(), iter(range(moves))

    def killed(real: Callable[..., Any]) -> Callable[..., Any]:
        def move(*given: Any) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return real(*given)

        return move

    other = (replace(CHAIN[0], word="other"),)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "move", killed(shutil.move))
        patch.setattr(Path, "rename", killed(Path.rename))
        with pytest.raises(KeyboardInterrupt):
            ran(tmp_path, other)
    assert ran(tmp_path, CHAIN[:1]) == [] and files() == before, "with its settings again, it is kept"
    assert not list((tmp_path / "replaced").glob("*"))
    assert ran(tmp_path, other) == ["a"]
    moved = tmp_path / "replaced" / "a-1"
    assert sorted(str(p.relative_to(moved)) for p in moved.glob("*/**/*")) == before, "all in one place"


def test_a_resume_refuses_other_inputs_of_a_finished_stage(tmp_path: Path) -> None:
    """What it made would be discarded, and the half-done stage after it could not be continued with another."""
    file, run = tmp_path / "words.jsonl", tmp_path / "run"
    file.write_text("one\n")
    stages = (Note(name="a", word="x", source=str(file)), Note(name="b", word="y", source="a"))
    ran(run, stages)
    (run / "stages/a/result.json").write_text("damaged")  # is said when it is read
    with opened(run) as context:
        check_inputs(stages, context)
        file.write_text("two\n")
        with pytest.raises(
            UserError, match=r"a was begun with other inputs: its input .*words.jsonl has changed; put them back"
        ):
            check_inputs(stages, context)


def test_stages_run_alone_on_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="b needs a, which has not been run"):
        ran(tmp_path, CHAIN, only=("b",))
    assert ran(tmp_path, CHAIN, only=("a",)) == ["a"]
    assert ran(tmp_path, CHAIN, only=("b", "d")) == ["b", "d"]
    assert ran(tmp_path, (replace(CHAIN[0], word="q"), *CHAIN[1:]), only=("d",)) == []
    assert said(tmp_path)[-1] == "a: is out of date and used as it is: word: x -> q"
    with pytest.raises(UserError, match="did you mean 'd'"):
        ran(tmp_path, CHAIN, only=("dd",))


def test_a_run_of_an_older_version_is_left_alone(tmp_path: Path) -> None:
    ran(tmp_path, CHAIN[:1])
    (tmp_path / "stages/a/lineage.json").unlink()
    assert ran(tmp_path, (replace(CHAIN[0], word="q"),)) == []


def settings(directory: Path, stages: tuple[Stage, ...], **more: object) -> config.Settings:
    return config.Settings(Recipe(stages), "test", device="cpu", threads=1, out=str(directory), **more)  # type: ignore[arg-type]


def test_a_pipeline_run_again_into_its_directory(tmp_path: Path) -> None:
    pipeline.start(settings(tmp_path / "run", CHAIN))
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert set(summary["lineage"]) == {"a", "b", "c", "d"}
    code = {"python:Note (code)", "python:Inner (code)"}
    assert set(summary["lineage"]["b"]["inputs"]) == {"a", *code}
    assert summary["lineage"]["b"]["inputs"]["a"] == summary["lineage"]["a"]["made_sha256"]
    assert "lineage" not in summary["stages"]["b"]
    RAN.clear()
    with pytest.raises(UserError, match="already holds a run"):
        pipeline.start(settings(tmp_path / "run", CHAIN))
    other = (*CHAIN[:3], replace(CHAIN[3], word="new"))
    pipeline.start(settings(tmp_path / "run", other, again=True))
    assert RAN == ["d"]
    after = json.loads((tmp_path / "run/summary.json").read_text())["lineage"]
    assert after["c"] == summary["lineage"]["c"]
    assert after["d"]["config_sha256"] != summary["lineage"]["d"]["config_sha256"]
    assert (tmp_path / "run/export/weights").read_text() == "new"


def test_a_pipeline_with_only_some_stages_is_not_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="only: b needs a"):
        pipeline.start(settings(tmp_path / "run", CHAIN, only=("b",)))
    assert not (tmp_path / "run").exists(), "refused before anything was written"
    pipeline.start(settings(tmp_path / "run", CHAIN, only=("a", "c")))
    assert "not run yet: b, d" in capsys.readouterr().out
    assert not (tmp_path / "run/summary.json").exists()
    pipeline.start(settings(tmp_path / "run", CHAIN, only=("b", "d")))
    assert (tmp_path / "run/summary.json").exists()
    assert cli.main(["run", "quickstart", "only=rll", f"out={tmp_path / 'other'}"]) == 2
    assert "did you mean 'rl'" in capsys.readouterr().err


def test_rounds_carry_what_they_made_into_the_next() -> None:
    inside = [Note(name="data", source="previous train", skip=5), Note(name="train", source="data", word="base")]
    made = repeat(inside, 3, first={"train": "base"}, advance={"data.skip": 10, "train.inner.size": 1})
    assert [(s.name, s.source, s.skip) for s in made] == [  # type: ignore[attr-defined]
        ("data_1", "base", 5), ("train_1", "data_1", 0), ("data_2", "train_1", 15), ("train_2", "data_2", 0),
        ("data_3", "train_2", 25), ("train_3", "data_3", 0),
    ]  # fmt: skip
    assert [s.inner.size for s in made] == [1, 1, 1, 2, 1, 3]  # type: ignore[attr-defined]
    assert made[1].word == "base", "other names mean what they mean outside"  # type: ignore[attr-defined]
    for bad, words in (
        ({"count": 0}, "at least 1"),
        ({"count": 2}, "means nothing in round 1"),
        ({"count": 2, "first": {"trian": "x"}}, "did you mean 'train'"),
        ({"count": 2, "first": {"train": "x"}, "advance": {"data.word": 1}}, "not a number that could advance"),
        ({"count": 2, "first": {"train": "x"}, "advance": {"data.skp": 1}}, "did you mean 'skip'"),
    ):
        with pytest.raises(UserError, match=words):
            repeat(inside, **bad)  # type: ignore[arg-type]


def test_a_word_of_a_fixed_list_is_not_the_name_of_a_stage() -> None:
    (stage,) = repeat([RLStage(name="reward", model="reward", task=Arithmetic(), algorithm=PPO(kl_in="reward"))], 1)
    assert isinstance(stage, RLStage) and isinstance(stage.algorithm, PPO)
    assert (stage.name, stage.model, stage.algorithm.kl_in) == ("reward_1", "reward_1", "reward")


def test_iterative_dpo_is_what_it_was() -> None:
    stages = {stage.name: stage for stage in iterative_dpo(rounds=2).stages}
    assert list(stages) == [
        "pretrain",
        "sft",
        "comparisons_1",
        "dpo_1",
        "versus_sft_1",
        "comparisons_2",
        "dpo_2",
        "versus_sft_2",
        "best",
    ]
    one, two = stages["dpo_1"], stages["dpo_2"]
    assert (one.model, one.data, two.model, two.data) == ("sft", ("comparisons_1",), "dpo_1", ("comparisons_2",))  # type: ignore[attr-defined]
    assert (stages["comparisons_2"].model, stages["comparisons_2"].skip) == ("dpo_1", 1000)  # type: ignore[attr-defined]
    assert (stages["versus_sft_2"].model, stages["versus_sft_2"].against) == ("dpo_2", "sft")  # type: ignore[attr-defined]


def test_yaml_can_say_rounds_and_a_setting_of_all_of_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "stages:\n- {stage: sft, name: sft, model: 'tiny:nano', data: [{file: a.jsonl}]}\n"
        "- rounds: 2\n  first: {dpo: sft}\n  advance: {dpo.steps: 10}\n  stages:\n"
        "  - {stage: preference, name: dpo, model: previous dpo, data: [pairs.jsonl], steps: 5}\n"
    )
    stages = config.parse(str(path), ["dpo.lr=0.5", "dpo_2.lr=0.25"]).recipe.stages
    assert [(s.name, s.model) for s in stages] == [("sft", "tiny:nano"), ("dpo_1", "sft"), ("dpo_2", "dpo_1")]  # type: ignore[attr-defined]
    assert [s.steps for s in stages[1:]] == [5, 15]  # type: ignore[attr-defined]
    assert [s.optimizer.lr for s in stages[1:]] == [0.5, 0.25]  # type: ignore[attr-defined]
    path.write_text("stages:\n- {rounds: 2, frist: {}, stages: []}\n")
    with pytest.raises(UserError, match="did you mean 'first'"):
        config.parse(str(path), [])


def test_the_best_round_is_kept_by_its_figure(tmp_path: Path) -> None:
    scores = [0.3, 0.6, 0.6]
    stages = [Note(name=f"train_{n + 1}", word=f"w{n}", score=score) for n, score in enumerate(scores)]
    best = best_round("train", "train", 3, "accuracy")
    assert ran(tmp_path, (*stages, best)) == ["train_1", "train_2", "train_3"]
    assert (tmp_path / "stages/best/model/weights").read_text() == "w1", "the first of equals"
    ran(tmp_path, (*stages[:2], replace(stages[2], score=0.9), best))
    assert (tmp_path / "stages/best/model/weights").read_text() == "w2"
    assert json.loads((tmp_path / "stages/best/result.json").read_text())["best"] == "train_3"
    ran(tmp_path, (*stages[:2], replace(stages[2], score=0.9), replace(best, figure="length", higher=False)))
    assert (tmp_path / "stages/best/model/weights").read_text() == "w0"
    for figure, words in (("accuracies", "has no figure"), ("accuracy.x", "has no figure"), ("lineage.inputs", "not a number")):
        with pytest.raises(UserError, match=words):
            ran(tmp_path, (*stages[:2], replace(stages[2], score=0.9), replace(best, figure=figure)))


def test_a_file_that_is_not_in_this_folder_is_said_to_be_looked_for_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed in another folder than the one where it was begun."""
    monkeypatch.chdir(tmp_path)
    names = ["rows.jsonl", "mine.py (code)", "/none/rows.jsonl", "python:Mine.right (code)", "org/model"]
    lost = Lineage({}, {}).changes(Lineage({}, dict.fromkeys(names, "0" * 64)))
    here = f"is not in {tmp_path}"
    assert lost == [f"its input {name} {how}" for name, how in zip(names, [here, here, *["is gone"] * 3], strict=True)]
