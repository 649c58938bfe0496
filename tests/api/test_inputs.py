"""Data, models and settings from Python: what is taken, and what is refused before the first step in one line."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import posttrain as pt
from posttrain.api.inputs import Files
from posttrain.data.records import read_jsonl
from posttrain.errors import UserError

QUICK: dict[str, Any] = {"steps": 1, "device": "cpu", "threads": 1}
ROWS = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(8)]
PAIRS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "no"} for n in range(8)]
GRPO: dict[str, Any] = {**QUICK, "group": 2, "batch": 1, "beta": 0.0, "max_new_tokens": 3, "evaluate_every": 0}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    program = "import sys, posttrain as pt; dir(pt); print('torch' in sys.modules, pt.GRPO(group=2).name, pt.DrGRPO.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "grpo", "DrGRPO"]
    with pytest.raises(AttributeError, match="no GRPOTrainer; a trainer with its config is one call"):
        _ = pt.GRPOTrainer
    for call in (pt.sft, pt.dpo, pt.reward_model):
        with pytest.raises(UserError, match="train_dataset is called data here"):
            call(model="tiny:nano", train_dataset=[])
        with pytest.raises(UserError, match="give data: rows or a file"):
            call(model="tiny:nano")
    with pytest.raises(AttributeError, match="posttrain has no GRPOO"):
        _ = pt.GRPOO


def test_columns_may_have_other_names() -> None:
    rows = [{"q": row["prompt"], "good": row["chosen"], "bad": row["rejected"]} for row in PAIRS]
    names = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    assert pt.dpo(model="tiny:nano", data=rows, columns=names, **QUICK).result["trained_on"] == 7
    start = pt.sft(model="tiny:nano", data=rows, columns={"prompt": "q", "completion": "good"}, **QUICK)
    assert start.result["trained_on"] == 8
    with pytest.raises(UserError, match="data row 1: completion: expected .* not int '3'; write numbers as text"):
        pt.sft(model="tiny:nano", data=[{"prompt": "1+2=", "completion": 3}], **QUICK)


def test_a_place_that_cannot_be_written_is_refused_in_one_line() -> None:
    Path("taken").write_text("a file")
    with pytest.raises(UserError, match="cannot write the run directory taken/run: .*; choose another"):
        pt.sft(model="tiny:nano", data=ROWS, out="taken/run", **QUICK)


class Dataset:
    """As much of `datasets.Dataset` as is used."""

    column_names = ("prompt", "completion")

    def __iter__(self) -> Any:
        return iter(ROWS)


def read(data: Any, folder: Path, what: str = "data") -> list[dict[str, Any]]:
    files = Files(folder, "x")
    path = files.path(data, what)
    files.write(new=False)
    with files.named():
        return [row for _, row in read_jsonl(path)]


def test_data_of_every_kind_is_the_same_rows(tmp_path: Path) -> None:
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "a.csv").write_text("prompt,completion\n" + "".join(f"{r['prompt']},{r['completion']}\n" for r in ROWS))
    with gzip.open("a.jsonl.gz", "wt") as file:
        file.write(text)
    for data in (ROWS, iter(ROWS), Dataset(), {"train": ROWS}, "a.jsonl", Path("a.json"), "a.csv", "a.jsonl.gz"):
        assert read(data, tmp_path / "run") == ROWS
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(ROWS)
    assert read(table, tmp_path / "run") == ROWS
    lacking = pandas.DataFrame({"prompt": ["a", "b"], "answer": ["1", float("nan")], "level": pandas.array([1, None], "Int64")})
    expected = [{"prompt": "a", "answer": "1", "level": 1}, {"prompt": "b", "answer": None, "level": None}]
    assert read(lacking, tmp_path / "run", "prompts") == expected
    pytest.importorskip("pyarrow")
    table.to_parquet("a.parquet")
    assert read("a.parquet", tmp_path / "run") == ROWS
    assert read(["a", [{"role": "user", "content": "b"}]], tmp_path / "run", "prompts")[0] == {"prompt": "a"}


def test_sft_dpo_and_a_model_from_a_run() -> None:
    run = pt.sft(model="tiny:nano", data=ROWS, batch=4, **QUICK)
    assert run.metrics[-1]["loss"] > 0 and Path("runs/sft-1/data/data.jsonl").is_file()
    tuned = pt.dpo(model=run, data=PAIRS, batch=4, **QUICK)
    assert "margin" in tuned.metrics[-1] and tuned.directory == Path("runs/dpo-1")
    kto = pt.preference(model=str(run.directory), data=PAIRS, algorithm="kto", batch=4, **QUICK)
    assert [figures["step"] for figures in kto.steps()] == [1]
    found = tuned.evaluate("arithmetic", problems=4, max_new_tokens=4)
    assert found["problems"] == 4 and len(found["accuracy"]) == 3
    for itself in (tuned, tuned.directory, str(tuned.export), pt.load(tuned.export)):
        near = tuned.evaluate("arithmetic", problems=4, max_new_tokens=4, temperature=1.0, reference=itself)
        assert near["kl"][0] == pytest.approx(0.0, abs=1e-4), "a model is at no distance from itself"
    paid = pt.evaluate(tuned, prompts=["a", "b"], reward=lambda response: len(response), max_new_tokens=4)
    assert paid["problems"] == 2 and paid["reward"][0] <= 4 and "accuracy" not in paid
    assert len(pt.sample(tuned, ["1+1=", "2+1="], n=2, max_new_tokens=3)) == 2
    assert pt.load(tuned.export).sample("1+1=", temperature=0.0, max_new_tokens=3) == pt.sample(
        tuned, "1+1=", temperature=0.0, max_new_tokens=3
    )


def test_lora_is_a_rank_or_its_settings() -> None:
    pytest.importorskip("peft")
    run = pt.sft(model="tiny:nano", data=ROWS, lora=4, batch=4, lr=3e-2, **{**QUICK, "steps": 24})
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"] - 0.5
    assert json.loads((run.export / "adapter" / "adapter_config.json").read_text())["r"] == 4
    chosen = pt.grpo(model=run, task="arithmetic", lora={"rank": 2, "targets": ["q_proj"]}, **GRPO)
    found = json.loads((chosen.export / "adapter" / "adapter_config.json").read_text())
    assert found["r"] == 2 and all(name.endswith("q_proj") for name in found["target_modules"])
    with pytest.raises(UserError, match=r"dpo: lora\.rank: .*not 'high'"):
        pt.dpo(model="tiny:nano", data=PAIRS, lora="high")
    with pytest.raises(UserError, match="keep=best needs held-out scores; set evaluate_every above 0"):
        pt.dpo(model="tiny:nano", data=PAIRS, keep="best", evaluate_every=0)


def test_a_module_is_copied_and_stays_as_it_was() -> None:
    from posttrain.models.tiny import character_tokenizer, tiny_model

    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))))
    module = tiny_model(tokenizer, "nano", seed=3)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    attention = module.config._attn_implementation
    run = pt.grpo(model=module, tokenizer=tokenizer, prompts=["a", "b"], reward=len, lr=1e-2, **{**GRPO, "group": 8})
    assert all(before[name].equal(tensor) for name, tensor in module.state_dict().items())
    assert module.config._attn_implementation == attention
    moved = run.model.state_dict()["model.embed_tokens.weight"]
    assert not before["model.embed_tokens.weight"].equal(moved)
    assert pt.sample((module, tokenizer), "a", max_new_tokens=3)
    with pytest.raises(pt.UserError, match="comes with its tokenizer"):
        pt.grpo(model=module, prompts=["a", "b"], reward=len)


def test_a_model_without_an_end_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """It would learn from answers without an end, and each of its own would be cut off, with no error anywhere."""
    from posttrain.models.tiny import character_tokenizer, tiny_model

    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))))
    module = tiny_model(tokenizer, "nano", seed=3)
    tokenizer.chat_template, tokenizer.eos_token = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}", None
    module.config.eos_token_id = module.generation_config.eos_token_id = None
    said = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    pt.sft((module, tokenizer), [said] * 2, **QUICK)
    assert (
        "sft: warning: no row ends with an end token: the model does not learn to end its answers; set eos"
        in capsys.readouterr().out
    )
    pt.dpo((module, tokenizer), [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2, **QUICK)
    assert "dpo: warning: no row ends with an end token" in capsys.readouterr().out
    pt.grpo((module, tokenizer), prompts=["a", "b"], reward=len, **GRPO)
    assert "rl: warning: the model has no end token, so every response is cut off" in capsys.readouterr().out


def letters(prompts: list[str], completions: list[str]) -> list[float]:
    return [0.0] * (len(completions) - 1)


class Undecorated(pt.Task):
    def problems(self, split: str, level: int | None = None) -> list[Any]:
        return []

    def score(self, problem: Any, response: str) -> Any:
        return 1.0


@dataclass
class Adapters:
    """A dataclass of another library, such as peft's LoraConfig."""

    r: int = 8


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompts": ["a"], "reward": len, "grop": 4}, "unknown setting 'grop'; did you mean 'group'"),
    ({"prompts": ["a"], "reward": len, "steps": 0}, "steps must be at least 1, not 0"),
    ({"prompts": ["a"], "reward": len, "steps": "many"}, "steps: input should be a valid integer"),
    ({"prompts": ["a"], "reward": len, "seed": -1}, "seed is a whole number"),
    ({"reward": len}, "give either prompts or a task"),
    ({"prompts": ["a"]}, "the task scores nothing by itself; give it a reward"),
    ({"prompts": []}, "prompts: there are no rows"),
    ({"prompts": [3]}, "prompts row 1: expected a dict of columns, not int '3'"),
    ({"prompts": [{"text": "a"}], "reward": len}, "prompts row 1: no column prompt, question or messages; it has text"),
    ({"prompts": [{"prompt": "a", "at": object()}], "reward": len}, "prompts row 1: the column at is a object"),
    ({"prompts": ["a", "b\ud83d"]}, r"prompts row 2: half a character .*; no tokenizer reads it"),
    (
        {"prompts": [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}], "reward": len},
        r"problem prompts.jsonl:1 ends with a turn of the assistant, .*; leave that turn out",
    ),
    ({"prompts": "none.jsonl", "reward": len}, "prompts: there is no file none.jsonl"),
    ({"prompts": ["a", "b"], "reward": len, "held_out": 2}, "held_out=2 of 2 different prompts leaves none to train on"),
    ({"prompts": ["a", "b"], "reward": len, "held_out": 1.0}, "or a number of prompts from 2 on, not 1.0"),
    ({"prompts": ["a", "b"], "reward": len, "held_out": -1}, "held_out is a share, 0 for none, or a number of prompts"),
    ({"prompts": ["a"], "reward": lambda prompt, style: 0}, r"reward lambda .* asks for style, .* nor a column of the data \(prompt\)"),
    ({"prompts": [{"prompt": "a", "gold": "b"}], "reward": lambda response, answer: 0}, r"asks for answer, .* \(prompt, gold\)"),
    ({"prompts": ["a"], "reward": "mahts"}, "unknown reward 'mahts'; did you mean 'math'"),
    ({"prompts": ["a"], "reward": 3}, "a reward is a function or the name of one, not 3"),
    ({"prompts": ["a"], "reward": [len, max], "weights": [1]}, "weights: 1 for 2 rewards"),
    ({"prompts": ["a"], "reward": {"a": len}, "weights": {"b": 1}}, "unknown reward in weights: 'b'"),
    ({"prompts": ["a"], "reward": [len, max], "weights": "12"}, "weights: a list of numbers, one for each reward, not '12'"),
    ({"prompts": ["a"], "reward": len, "weights": 3}, "weights: a list of numbers, one for each reward, not 3"),
    ({"prompts": ["a"], "reward": len, "weights": [None]}, "weights: input should be a valid number, not None"),
    ({"prompts": ["a"], "reward": len, "weights": [float("nan")]}, r"weights must be finite, not \[nan\]"),
    ({"prompts": ["a"], "reward": lambda *texts: 1.0}, "has no parameter for the response; name one"),
    ({"prompts": "a " * 3000, "reward": len}, "prompts: there is no file a a"),
    ({"prompts": ["a"], "reward": len, "callback": 3}, "callback: a function of a step's metrics, not 3"),
    ({"prompts": ["a"], "reward": len, "out": 3}, "out: the path of a directory, not 3"),
    ({"prompts": ["a"], "reward": len, "out": "x" * 300}, "File name too long; choose another"),
    ({"prompts": ["a"], "reward": len, "seed": None}, "seed: input should be a valid integer, not None"),
    (
        {"prompts": ["a", "b" * 2050, "b", "c" * 3000], "reward": len},
        r"2048 positions; lower max_new_tokens, or leave out or shorten the 2 of 4 training prompts of more than 2,045 tokens "
        r"\(prompts.jsonl:2, prompts.jsonl:4\)$",
    ),
    ({"prompts": ["a"], "reward": len, "max_new_tokens": 4000}, "2048 positions; lower max_new_tokens$"),
    ({"prompts": ["a"], "reward": len, "optimizer": None}, "optimizer takes keys, not None"),
    ({"prompts": ["a"], "reward": letters}, "returned 1 values for 2 completions; return one for each"),
    ({"prompts": ["a"], "reward": len, "lora": Adapters()}, r"lora: give its keys \(rank, .*\), not Adapters"),
    ({"prompts": ["a"], "reward": len, "lora": pt.GRPO()}, r"lora: give its keys \(rank, .*\), not GRPO"),
    (
        {"prompts": ["a"], "reward": len, "learning_rate": 1e-5, "num_generations": 4, "bf16": True},
        "learning_rate is called lr here; num_generations is called group here; bf16 is left out here",
    ),
    ({"prompts": ["a"], "reward": "mine.py"}, "reward mine.py: say which of it, as in mine.py:NAME"),
    ({"prompts": ["a"], "reward": len, "tools": [3]}, "tools: give a tool by its name or settings, not int"),
    ({"task": Undecorated}, "task: a name, settings or a Task, such as Mine\\(\\), not the class Undecorated"),
    ({"task": "arithmetik"}, "unknown task 'arithmetik'; did you mean 'arithmetic'"),
    ({"task": Undecorated()}, r"task Undecorated: write @dataclass\(frozen=True\) above the class"),
    ({"prompts": ["a"], "reward": len, "model": 3}, "int is no plain causal language model"),
    ({"prompts": ["a"], "reward": len, "algorithm": "dpo"}, "dpo learns from pairs; use a preference stage"),
    ({"prompts": ["a"], "reward": len, "algorithm": "grpoo"}, "unknown algorithm 'grpoo'"),
    ({"prompts": ["a"], "reward": len, "algorithm": pt.PPO}, "a name or an instance such as GRPO"),
]  # fmt: skip


def test_rows_in_memory_are_named_by_their_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        pt.sft("tiny:nano", [{"prompt": "a", "completion": "b"}, {"prompt": "a"}])
    assert str(caught.value).startswith("sft: data row 2: ") and "jsonl" not in str(caught.value)
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    with pytest.raises(UserError, match="held_out_data row 1: "):
        pt.dpo("tiny:nano", rows, held_out_data=[{"prompt": 3, "chosen": "b", "rejected": "c"}])


@pytest.mark.parametrize(("given", "text"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_wrong_is_refused_in_one_line_and_nothing_is_left(given: dict[str, Any], text: str, tmp_path: Path) -> None:
    chosen = {} if given.get("algorithm") else {"group": 2, "beta": 0.0}
    how = {"model": "tiny:nano", **QUICK, "batch": 1, "max_new_tokens": 3, **chosen, **given}
    with pytest.raises(pt.UserError, match=text) as refused:
        pt.rl(**how).train()
    assert "\n" not in str(refused.value)
    assert not [*tmp_path.rglob("*.jsonl")]


def test_what_a_run_is_asked_for_is_checked() -> None:
    run = pt.rl("tiny:nano", ["a", "b"], len, **GRPO, algorithm="grpo").train()
    assert run.sample("a", seed=np.int64(2), max_new_tokens=3) == run.sample("a", seed=2, max_new_tokens=3)
    asked: dict[str, Any] = {
        "sample: n: input should be a valid integer": lambda: run.sample("a", n=None),
        "sample: seed: input should be a valid integer": lambda: run.sample("a", seed=None),
        "evaluate: seed: input should be a valid integer": lambda: run.evaluate(prompts=["a"], reward=len, seed=None),
        "has trained a language model, not a reward model": lambda: run.score("a", "b"),
        "no run in .*runs/other: it has no config.yaml": lambda: run.compare("runs/other"),
        "compare: a run or its directory, not 3": lambda: run.compare(3),
        "are the same run": lambda: run.compare(str(run.directory)),
        "there is no run and no model None": lambda: pt.load(None),
        "unknown stage with rollouts 'sft'; known: rl": lambda: run.rollouts(stage="sft"),
        "no rollouts of rl step 9; there are those of 1": lambda: run.rollouts(9),
        "there is no run and no model runs/grop-1": lambda: pt.load("runs/grop-1"),
        r"sample: a prompt is text or messages: give \[row\['prompt'\] for row in rows\]": lambda: run.sample([{"prompt": "a"}]),
        "reward: the name of a shipped reward, not 3": lambda: pt.reward(3),
        "run: model: text, numbers, lists or dicts, not object": lambda: pt.run("quickstart", model=object()),
    }  # fmt: skip
    for text, call in asked.items():
        with pytest.raises(pt.UserError, match=text):
            call()
    with pytest.raises(pt.UserError, match="dpo: model and data, a file of preferences, go together"):
        pt.run("dpo", model=run, out=Path("dpo"), seed=np.int64(3), **{"dpo.steps": np.int64(0)})


def test_a_call_that_is_refused_leaves_the_files_that_were_there() -> None:
    pt.sft("tiny:nano", ROWS, batch=4, **QUICK, out="run")
    before = Path("run/data/data.jsonl").read_bytes()
    with pytest.raises(pt.UserError, match="run already holds a run"):
        pt.sft("tiny:nano", ROWS[:2], batch=4, **QUICK, out="run")
    assert Path("run/data/data.jsonl").read_bytes() == before

    def files() -> dict[Path, bytes]:
        """All but the log, which has every attempt."""
        return {p: p.read_bytes() for p in Path("run").rglob("*") if p.is_file() and p.name not in ("lock", "events.jsonl")}

    kept = files()
    bad = [*ROWS, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    for model, rows, text in (("tiny:none", ROWS[:2], "tiny model size 'none'"), ("tiny:nano", bad, "data row .*")):
        for learn in (pt.sft, pt.dpo):
            with pytest.raises(pt.UserError, match=text):
                learn(model, rows, batch=4, **QUICK, out="run", again=True)
            assert files() == kept
    for name in ("data/data.jsonl", "export/notes.txt", "config.json"):
        own = Path("mine", name)
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text("mine")
        with pytest.raises(pt.UserError, match=f"mine .*holds .*{own.parts[1]}.*; choose another directory"):
            pt.sft("tiny:nano", ROWS, batch=4, **QUICK, out="mine")
        assert own.read_text() == "mine" and not Path("mine/config.yaml").exists()
        shutil.rmtree("mine")
    Path("mine/checkpoints").mkdir(parents=True)
    pt.sft("tiny:nano", ROWS, batch=4, **QUICK, out="mine")  # an empty folder is no file of others


def test_a_directory_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run = pt.sft("tiny:nano", ROWS, batch=4, **QUICK, out="~/run")
    assert run.directory == tmp_path / "home/run" and run.metrics and not Path("~").exists()


def test_rows_that_are_written_already_are_left_alone(tmp_path: Path) -> None:
    """Processes of a run share its directory: the first has written them, and reads them."""
    files, fewer = Files(tmp_path, "x"), Files(tmp_path, "x")
    path = Path(files.path(ROWS, "data"))
    files.write()
    before = path.stat().st_ino
    files.write(new=False)
    assert path.stat().st_ino == before and files.made == []
    fewer.path(ROWS[:2], "data")
    fewer.write(new=False)
    assert path.stat().st_ino != before and path.read_text().count("\n") == 2


def test_a_corrected_call_may_use_the_directory_of_a_refused_one() -> None:
    notes = Path("mine/data/notes.txt")
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    with pytest.raises(pt.UserError, match="data row 9: .* add completion"):
        pt.sft("tiny:nano", [*ROWS, {"prompt": "a"}], batch=4, **QUICK, out="mine")
    assert [*Path("mine").rglob("*.*")] == [notes], "of its own files none is left"
    assert pt.sft("tiny:nano", ROWS, batch=4, **QUICK, out="mine").directory == Path("mine")


def test_a_column_of_prompts_is_a_list_of_them() -> None:
    lines = Files(Path("run"), "x")
    lines.path(np.array(["a", "b"]), "prompts")
    assert [*lines.lines.values()] == [['{"prompt": "a"}', '{"prompt": "b"}']]


def test_a_list_of_texts_is_no_data_for_sft() -> None:
    with pytest.raises(
        pt.UserError, match="a list of texts is one of files, and there is no file '1.1=2'; of texts make rows:"
    ):
        pt.sft("tiny:nano", ["1+1=2", "2+2=4"])
    for learn in (pt.dpo, pt.reward_model):  # neither reads rows of text
        with pytest.raises(pt.UserError, match="no file '1.1=2'; give rows, as 'posttrain list formats' shows them"):
            learn("tiny:nano", ["1+1=2", "2+2=4"])


def test_files_for_sft_have_weights(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    paths = [str(tmp_path / "a.jsonl"), tmp_path / "b.jsonl"]
    run = pt.sft("tiny:nano", paths, weights=[3, 1], batch=4, **QUICK)
    stages = yaml.safe_load((run.directory / "config.yaml").read_text())["stages"]
    assert [source["weight"] for source in stages[0]["data"]] == [3.0, 1.0]
    for weights, text in (([1], "weights: 1 for 2 files"), ("31", "weights: a list of numbers, one for each file, not '31'")):
        with pytest.raises(pt.UserError, match=text):
            pt.sft("tiny:nano", paths, weights=weights, **QUICK)


def test_a_recipe_by_name_and_stages_in_a_list() -> None:
    from posttrain.stages.sft import Data, SFTStage

    seen: list[tuple[str, int]] = []
    few = {"sft.steps": 1, "rl.steps": 2, "rl.prompts": 2, "rl.evaluate_problems": 4, "before.problems": 4, "after.problems": 4}
    run = pt.run("quickstart", callback=lambda f: seen.append((f["stage"], f["step"])), device="cpu", threads=1, seed=3, **few)
    assert seen == [("sft", 1), ("rl", 1), ("rl", 2)] and run.directory == Path("runs/quickstart-1")
    assert run.summary["seed"] == 3 and len(run.summary["after"]) == 3
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = (Data(file="rows.jsonl"),)
    stages = [SFTStage(name=name, model=model, data=data, steps=1) for name, model in (("a", "tiny:nano"), ("b", "a"))]
    two = pt.run(stages, out="two", device="cpu", threads=1)
    assert [row["stage"] for row in two.metrics] == ["a", "b"]
    with pytest.raises(pt.UserError, match="unknown setting 'seeed'; did you mean 'seed'"):
        pt.run(stages, seeed=1)


@pytest.mark.parametrize("body", ["pt.grpo('tiny:nano', task=__file__ + ':Mine')", "pt.sft('tiny:nano', [{'text': 'a'}])"])
def test_a_file_that_begins_a_run_where_it_is_read_is_refused(body: str) -> None:
    """It would be read again for that run, which would begin another, and so on."""
    text = (
        "import posttrain as pt\nfrom dataclasses import dataclass\n\n\n@dataclass(frozen=True)\nclass Mine(pt.Task):\n"
        "    def problems(self, split, level=None):\n        return [pt.Problem(split, split, '1')]\n\n"
        "    def score(self, problem, response):\n        return pt.Score(1.0)\n\n\n"
    )
    Path("mine.py").write_text(f"{text}{body}\n")
    with pytest.raises(
        UserError, match="mine.py is read for what it defines, and begins a run: put that below `if __name__ == "
    ):
        pt.rl("tiny:nano", task="mine.py:Mine", algorithm="grpo")
    Path("mine.py").write_text(f"{text}if __name__ == '__main__':\n    {body}\n")
    assert len(pt.grpo("tiny:nano", task="mine.py:Mine", **GRPO).metrics) == 1
