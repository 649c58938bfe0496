"""A run stands for its model; what its stages answer, a conversation, and labels by a person."""

from __future__ import annotations

import io
import json
import shutil
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from posttrain import cli
from posttrain.commands import sample as talk
from posttrain.commands.sample import sample, sample_stages
from posttrain.commands.serve import serving
from posttrain.data.labels import Labels
from posttrain.errors import UserError
from posttrain.models.load import locate
from posttrain.models.save import save
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.runs.layout import CONFIG, FORMAT
from posttrain.stages._contamination import made_by
from posttrain.stages._lineage import trace
from posttrain.stages.evaluate import EvaluateStage
from posttrain.tasks.arithmetic import Arithmetic

TOKENIZER = character_tokenizer("".join(map(chr, range(32, 127))))
SHORT = ["max_new_tokens=3", "device=cpu", "temperature=0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two stages that answer and one that scores."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    for seed, name in enumerate(("sft", "rl")):
        save(tiny_model(TOKENIZER, "nano", seed), TOKENIZER, folder / "stages" / name / "model")
    scorer = folder / "stages" / "judge" / "model"
    scorer.mkdir(parents=True)
    (scorer / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    shutil.copytree(folder / "stages" / "rl" / "model", folder / "export")
    stages = [{"stage": "sft", "name": name} for name in ("sft", "judge", "rl")]
    (folder / CONFIG).write_text(json.dumps({"format": FORMAT, "stages": stages}))
    return folder


def test_every_stage_is_served_under_its_name(run: Path) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 3, "temperature": 0})
    with serving(str(run), ["device=cpu", "token=mine"], port=0) as (server, lines), server.in_thread() as url:
        assert lines[-1] == f"serving sft, rl at {url}/v1"  # a token that is made is shown, one that is given is not
        # its configuration is no whole one
        assert lines[:-1] == ["the rewards of its rl stages cannot be computed: stages[0]: missing model"]
        connection, headers = HTTPConnection(url.removeprefix("http://"), timeout=30), {"Authorization": "Bearer mine"}

        def ask(method: str, path: str, body: str | None = None) -> Any:
            connection.request(method, path, body, headers)
            return json.loads(connection.getresponse().read())

        assert [(card["id"], card["max_model_len"]) for card in ask("GET", "/v1/models")["data"]] == [
            ("sft", 2048),
            ("rl", 2048),
        ]
        for stage, named in (("rl", {}), ("sft", {"model": "sft"})):  # the last one where none is named
            answer = ask("POST", "/v1/chat/completions", json.dumps(json.loads(body) | named))
            [expected] = sample(str(run / "stages" / stage), "1+1=", SHORT)
            assert answer["choices"][0]["message"]["content"] == expected.text and answer["model"] == stage


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [("nowhere", [], "there is no model directory nowhere"), ("RUN", ["--port", "99999"], "port must be from 0 to 65535"),
     ("RUN", ["--prot=1"], "--prot"), ("RUN", ["tokne=1"], "did you mean 'token'"), ("RUN", ["loaded=0"], "loaded"),
     ("RUN", ["--port", "0", "--host", "203.0.113.1"], "cannot listen on 203.0.113.1:0"),
     ("RUN", ["port=0"], "unknown key in serve: 'port'; an earlier version had it, use --port"),
     ("RUN", ["host=::1"], "use --host"), ("RUN", ["hosts=box"], "use --name")],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_in_one_line(
    run: Path, model: str, settings: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", model.replace("RUN", str(run)), "device=cpu", *settings]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_run_and_a_stage_stand_for_their_models(run: Path) -> None:
    assert locate(str(run)) == run / "export"
    assert locate(str(run / "stages" / "sft")) == run / "stages" / "sft" / "model"
    assert locate(str(run / "export")) == run / "export"
    assert made_by(str(run / "stages" / "sft")) == (run / "stages" / "sft").resolve()


def test_a_run_without_a_model_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("stages: []")
    with pytest.raises(UserError, match="is a run that has made no model yet; let it end"):
        locate(str(tmp_path))


def test_of_a_run_only_its_model_is_an_input(run: Path) -> None:
    stage = EvaluateStage(name="e", model=str(run), task=Arithmetic())
    before = trace(stage, 0, {}).inputs
    (run / "notes.txt").write_text("more")
    assert trace(stage, 0, {}).inputs == before and str(run) in before


def test_every_stage_answers_the_same_prompt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [stage for stage, _ in sample_stages(run, "1+1=", [*SHORT, "n=2"])] == ["sft", "sft", "rl", "rl"]
    assert cli.main(["sample", str(run), "1+1=", "--stages", *SHORT]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["sft", "rl"]
    assert cli.main(["sample", str(run / "export"), "1+1=", "--stages"]) == 2


def test_a_conversation_goes_on_until_it_is_begun_anew(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def prompt_ids(tokenizer: Any, prompt: Any, plain: bool) -> tuple[int, ...]:
        asked.append(" ".join(message.role for message in prompt))
        return real_ids(tokenizer, prompt, plain)

    real_ids = talk.prompt_ids
    monkeypatch.setattr(talk, "prompt_ids", prompt_ids)
    assert len(list(talk.chat(str(run), ["Hello", "Hello", "/new", "Hello"], SHORT))) == 3
    assert asked == ["user", "user assistant user", "user"]
    with pytest.raises(UserError, match="one answer"):
        next(talk.chat(str(run), ["Hello"], ["n=2"]))


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # as the locale of a terminal sets it
def test_a_message_that_is_not_utf8_is_one_line(
    run: Path, errors: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", errors))
    assert cli.main(["chat", str(run), *SHORT]) == 2
    assert capsys.readouterr().err.strip().endswith("is not UTF-8 text")


def test_an_unknown_key_of_sample_is_refused_with_all_that_there_are(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sample", str(run), "1+1=", "count=3"]) == 2
    said = capsys.readouterr().err
    assert (
        "unknown key of sample 'count'; known: device, max_new_tokens, min_new_tokens, n, " in said
        and "seed, temperature" in said
    )
    assert cli.main(["sample", str(run), "1+1=", "group=3"]) == 2
    assert "unknown key of sample 'group'; an earlier version had it, use n" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["sample", "n=2"], ["sample", "--stages"], ["chat"]], ids=" ".join)
def test_characters_that_the_vocabulary_lacks_are_warned_of_once(
    words: list[str], run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for prompt, lines in (("1+€=", 1), ("1+1=", 0)):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{prompt}\n"))
        given = [prompt] if words[0] == "sample" else []
        assert cli.main([words[0], str(run), *given, *words[1:], *SHORT]) == 0
        said = capsys.readouterr()
        assert said.err.count("warning: 1 characters or words in 1 texts are not in the vocabulary") == lines
        assert said.err.count("\n") == lines and said.out


def test_chat_reads_the_terminal(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert cli.main(["chat", str(run), *SHORT]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    monkeypatch.setattr("sys.stdin", io.StringIO("/help\n/new\n"))
    assert cli.main(["chat", str(run), *SHORT]) == 0
    assert capsys.readouterr().out == "/new begins another conversation; an empty line or Ctrl-D ends it.\n"


def test_labels_are_kept_at_once_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "asked.jsonl", tmp_path / "asked.labels.jsonl"
    rows = [{"prompt": "a", "responses": ["x", "y"]}, {"prompt": "b", "chosen": "u", "rejected": "v"}]
    rows += [{"prompt": "c", "completions": ["1", "2", "3"]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("sys.stdin", io.StringIO("7\n2\nu\n2\nq\n"))
    assert cli.main(["label", str(file), "--annotator", "ann"]) == 0
    text = capsys.readouterr().out.splitlines()
    first, shown = text[0].removeprefix("prompt: "), text[2].removeprefix("[2] ")
    assert text[-1] == f"1 of 3 rows are labelled; 1 with a preferred response are in {out}"
    labels = Labels.read(str(file))
    left = [item for item in labels.items.values() if item.prompt != first]
    for item in left:
        labels.vote("ann", item.id, [0])
    assert labels.next("ann") is None and labels.write() == 3
    found = {row["prompt"]: row for row in map(json.loads, out.read_text().splitlines())}
    best = {
        prompt: row["responses"][row["scores"].index(1.0)] for prompt, row in found.items()
    }  # of different lengths: all as scores
    assert best[first] == shown and sorted(found["c"]["scores"]) == [0.0, 0.0, 1.0]
    labels.store.unlink()
    with pytest.raises(UserError, match="is missing"):
        Labels.read(str(file))


@pytest.mark.parametrize(
    ("row", "text"), [({"prompt": "a"}, "line 1: give responses"), ({"responses": ["a", "b"]}, "line 1: no prompt")]
)
def test_what_cannot_be_labelled_is_refused_with_its_line(row: dict[str, object], text: str, tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=text):
        Labels.read(str(file))


def test_several_tasks_against_another_model_are_one_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = str(run / "stages" / "sft" / "model")
    words = [
        "eval",
        str(run),
        "--task",
        "arithmetic,countdown",
        "--against",
        base,
        "problems=4",
        "max_new_tokens=3",
        "device=cpu",
    ]
    assert cli.main([*words, "arithmetic.level=1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("before") == 2 and all(name in printed for name in ("arithmetic", "countdown", "change", base))
    assert cli.main([*words, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert list(tree) == ["arithmetic", "countdown"] and tree["countdown"]["against"]["model"] == base
    assert cli.main([*words, "save=x.jsonl"]) == 2
    assert "save is of one task" in capsys.readouterr().err
    assert cli.main([*words, "countdown.nothing=1"]) == 2
    assert "nothing" in capsys.readouterr().err
