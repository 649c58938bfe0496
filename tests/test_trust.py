"""Names from a stranger's file: no code runs, no key or file leaves, unless the user types it. All through the command line.

Traps: a Python file that leaves a mark when it is executed, and a server on this machine that answers for every host and keeps what
it is sent.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain import cli, config
from posttrain.errors import UserError
from posttrain.events import printable
from posttrain.runs.layout import FORMAT
from posttrain.runs.write import RunWriter
from posttrain.tasks.hub import Hub

KEY, PRIVATE = "sk-this-key-is-the-users", "this text is the users"
RL = {"stage": "rl", "name": "rl", "model": "tiny:nano", "steps": 1, "prompts": 2}
ROWS = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(30)]
PAIRS = [{"prompt": f"say {n}", "chosen": "good", "rejected": "bad"} for n in range(4)]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Server = self.server  # type: ignore[assignment]
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        server.seen.append((dict(self.headers), body))
        if server.redirect:
            self.send_response(307)
            self.send_header("location", server.redirect)
            self.end_headers()
            return
        verdict = '{"verdict": "A"}' if "verdict" in body.rpartition("response_format")[2] else '{"score": 1}'
        reply = json.dumps({"choices": [{"message": {"content": verdict}}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[dict[str, str], str]] = []
        self.redirect = ""
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def keys(self) -> set[str | None]:
        return {headers.get("Authorization", headers.get("authorization")) for headers, _ in self.seen}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Server]]:
    """Servers that every host name leads to."""
    running: list[Server] = []
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: real("127.0.0.1", *rest, **more))

    def start() -> Server:
        running.append(Server())
        return running[-1]

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stranger's folder, with what his recipe may read; beside it what he may not. The user stands above both."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEY + "2")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("POSTTRAIN_JUDGE_HOSTS", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "stranger"
    made.mkdir()
    for place in (made, tmp_path):
        for name, rows in (("rows.jsonl", ROWS), ("pairs.jsonl", PAIRS)):
            (place / name).write_text("".join(json.dumps(row | {"note": PRIVATE}) + "\n" for row in rows))
        (place / "rubric.txt").write_text(f"Judge the answer. {PRIVATE}")
    for name in ("private", "agree"):
        (tmp_path / name).write_text(PRIVATE)
    (made / "evil.py").write_text(EVIL.format(mark=str(tmp_path / "mark")))
    return made


EVIL = """
import pathlib
with open({mark!r}, "a") as file:
    file.write("x")
from posttrain.recipes.quickstart import quickstart as recipe
from posttrain.stages.evaluate import EvaluateStage as Evil
def f(prompt, response, answer): return 1.0
"""


def write(folder: Path, tree: Any) -> str:
    path = folder / "recipe.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree, sort_keys=False))
    return str(path)


def run_directory(folder: Path, tree: Any) -> str:
    RunWriter.create(folder / "run", {}).close()
    text = tree if isinstance(tree, str) else yaml.safe_dump(tree, sort_keys=False)
    (folder / "run" / "config.yaml").write_text(f"format: {FORMAT}\n{text}")
    return str(folder / "run")


def refused(capsys: pytest.CaptureFixture[str], words: list[str], *said: str) -> None:
    capsys.readouterr()
    assert cli.main(words) == 2, words
    line = capsys.readouterr().err.strip()
    assert "\n" not in line and all(part in line for part in said), line


# --- code ----------------------------------------------------------------------------------------------------------------------

JSONL = {"name": "jsonl", "file": "stranger/rows.jsonl"}
CODE: dict[str, Any] = {
    "a reward through the rounds": {
        "stages": [{"rounds": 1, "first": {"rl": "EVIL:f"}, "stages": [RL | {"task": JSONL | {"reward": "previous rl"}}]}]
    },
    "a second round": {
        "stages": [
            {
                "rounds": 2,
                "first": {"rl": "EVIL:f"},
                "stages": [RL | {"task": {"name": "mixed", "sources": [{"name": "a", "task": JSONL | {"reward": "previous rl"}}]}}],
            }
        ]
    },
    "a plain reward": {"stages": [RL | {"task": JSONL | {"reward": "EVIL:f"}}]},
    "a reward behind ./ and ..": {"stages": [RL | {"task": JSONL | {"reward": "./stranger/../stranger/evil.py:f"}}]},
    "a reward behind ~": {"stages": [RL | {"task": JSONL | {"reward": "~/stranger/evil.py:f"}}]},
    "a reward behind a link": {"stages": [RL | {"task": JSONL | {"reward": "stranger/link.py:f"}}]},
    "escapes of YAML": 'stages: [{stage: rl, name: rl, model: "tiny:nano", task: {name: "EVIL\\x3aEvil"}}]',
    "a merge key": "stages:\n- &s {stage: rl, name: rl, model: 'tiny:nano', task: {name: 'EVIL:Evil'}}\n- {<<: *s, name: again}\n",
    "a stage": {"stages": [{"stage": "EVIL:Evil", "name": "x"}]},
    "an algorithm": {"stages": [RL | {"task": {"name": "arithmetic"}, "algorithm": {"name": "EVIL:Evil"}}]},
    "a task of data": {
        "stages": [{"stage": "sft", "name": "s", "model": "tiny:nano", "data": [{"task": {"name": "EVIL:Evil"}, "counts": {1: 1}}]}]
    },
    "a task within a mixture": {
        "stages": [RL | {"task": {"name": "mixed", "sources": [{"name": "a", "task": {"name": "EVIL:Evil"}}]}}]
    },
    "a recipe": {"recipe": "EVIL:recipe"},
    "a key of a recipe": {"recipe": "quickstart", "rl": {"task": {"name": "EVIL:Evil"}}},
    "a dotted key of a recipe": {"recipe": "quickstart", "rl.task": JSONL | {"reward": "EVIL:f"}},
    "a shorthand": {"recipe": "quickstart", "rl.algorithm": "EVIL:Evil"},
    "a program": {"recipe": "quickstart", "checkpoint_hook": ["python3", "stranger/evil.py"]},
}  # fmt: skip


def placed(tree: Any) -> Any:
    """A tree with EVIL replaced by the stranger's Python file."""
    if isinstance(tree, dict):
        return {key: placed(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [placed(value) for value in tree]
    return tree.replace("EVIL", "stranger/evil.py") if isinstance(tree, str) else tree


@pytest.mark.parametrize("place", ["recipe", "run"])
@pytest.mark.parametrize("name", CODE)
def test_a_file_does_not_name_code(name: str, place: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "link.py").symlink_to(folder / "evil.py")
    tree = placed(CODE[name])
    keys = ["rl.lr=1e-4"] if "rl" in str(tree) and "rounds" not in str(tree) else []
    # what a round puts in place of a name is no reward: that is refused when the file is read
    said = "unknown reward 'previous rl'" if "rounds" in str(tree) else "--allow-code"
    if place == "run":
        said = "key in" if "recipe" in tree else said  # a run directory holds no recipes
        refused(capsys, ["resume", run_directory(folder, tree), *keys], said)
    else:
        for command in ("plan", "run"):
            refused(capsys, [command, write(folder, tree), *keys], said)
        refused(capsys, ["run", write(folder, tree), "seeds=0,1"], said)
    assert not Path("mark").exists() and not Path("runs").exists()


SHIPPED = r'{"recipe": "quickstart", "arguments": ["seeds=0,1", "KEY"]}'
ROWS_TASK = r"rl.task={name: jsonl, file: rows.jsonl, "
SWEEPS = {
    "a recipe": '{"recipe": "stranger/evil.py:recipe", "arguments": ["seeds=0,1"]}',
    "a recipe in escapes of JSON": '{"recipe": "stranger/evil.\\u0070y:recipe", "arguments": ["seeds=0,1"]}',
    "a task in escapes of YAML": SHIPPED.replace("KEY", r"rl.task={name: \"stranger/evil.\\x70y:Evil\"}"),
    "an algorithm": SHIPPED.replace("KEY", r"rl.algorithm=\"stranger/evil.\\u0070y:Evil\""),
    "a reward": SHIPPED.replace("KEY", ROWS_TASK + r"reward: \"stranger/evil\\x2epy:f\"}"),
    "one of several values": '{"recipe": "quickstart", "arguments": ["rl.algorithm=grpo,stranger/evil.py:Evil"]}',
    "a program": SHIPPED.replace("KEY", "checkpoint_hook=touch mark"),
    "a recipe file": '{"recipe": "stranger/recipe.yaml", "arguments": ["seeds=0,1"]}',
    "an open sandbox": SHIPPED.replace("KEY", ROWS_TASK + r"reward: code, options: {sandbox: uns\u0061fe}}"),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_the_record_of_a_sweep_does_not_name_code(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, {"stages": [RL | {"task": JSONL | {"reward": "stranger/evil.py:f"}}]})
    (folder / "sweep.json").write_text(SWEEPS[name])
    refused(capsys, ["resume", str(folder)], "sweep.json", "--allow-code")
    assert not Path("mark").exists() and not list(folder.glob("*seed*"))


@pytest.mark.parametrize("rounds", [10**9, 1001, 0, -1])
def test_a_file_does_not_name_rounds_without_end(rounds: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = {"stages": [{"rounds": rounds, "stages": [RL | {"task": {"name": "arithmetic"}}]}]}
    refused(capsys, ["plan", write(folder, tree)], f"at least 1 and at most 1000, not {rounds}")


def test_an_argument_of_a_sweep_does_not_stand_for_billions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few lines of YAML that refer to each other, in sweep.json."""
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]"
    for n in range(1, 12):
        bomb += f", a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]"
    for value in (f"{{{bomb}}}", "&a [*a]", "{a: 1, a: 2}", "[" * 5000 + "]" * 5000):
        record = {"recipe": "quickstart", "arguments": ["seeds=0,1", f"rl.task.options={value}"]}
        (folder / "sweep.json").write_text(json.dumps(record))
        refused(capsys, ["resume", str(folder)], "rl.task.options")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"recipe": 3, "arguments": []}', '{"recipe": "x", "arguments": [3]}', "[" * 99999]
)
def test_a_damaged_record_of_a_sweep_is_one_line(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sweep.json").write_text(text)
    refused(capsys, ["resume", str(folder)], "sweep.json is damaged")


def test_a_user_names_code_on_the_command_line_or_allows_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yaml_file = write(folder, {"stages": [RL | {"task": JSONL}]})
    assert cli.main(["plan", yaml_file, "rl.task.reward=stranger/evil.py:f"]) == 0
    assert cli.main(["plan", yaml_file, "rl.task={name: jsonl, file: stranger/rows.jsonl, reward: stranger/evil.py:f}"]) == 0
    yaml_file = write(folder, {"stages": [RL | {"task": JSONL | {"reward": "stranger/evil.py:f"}}]})
    assert cli.main(["plan", yaml_file, "--allow-code"]) == 0
    assert cli.main(["plan", yaml_file, "rl.task.reward=./stranger/evil.py:f"]) == 0
    refused(capsys, ["plan", yaml_file, "rl.task.style=boxed"], "--allow-code")
    assert not Path("mark").exists(), "nothing of a reward runs before there are answers"


@pytest.mark.parametrize("sandbox", ["unsafe", "docker:evil", "podman:evil/image:1", "docker:"])
def test_a_file_does_not_open_the_sandbox(sandbox: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"sandbox": sandbox}
    for reward, given in (("code", options), ("compose", {"parts": [{"reward": "code", "options": options}]})):
        tree = {"stages": [RL | {"task": JSONL | {"reward": reward, "options": given}}]}
        refused(capsys, ["plan", write(folder, tree)], f"sandbox: {sandbox}", "--allow-code")
        refused(capsys, ["resume", run_directory(folder, tree)], f"sandbox: {sandbox}", "--allow-code")
        shutil.rmtree(folder / "run")
    cli.main(["plan", write(folder, tree), "--allow-code"])  # refused for want of a runtime, where there is none
    assert "--allow-code" not in capsys.readouterr().err


# --- executed once ---------------------------------------------------------------------------------------------------------------

COUNTED = """
from dataclasses import dataclass, field
with open({log!r}, "a") as file:
    file.write("executed\\n")
from posttrain.algorithms.grpo import GRPO
from posttrain.recipes.base import Recipe
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
@dataclass(frozen=True)
class MyTask(Arithmetic): pass
@dataclass(frozen=True)
class MyGRPO(GRPO): paper = "mine"
@dataclass(frozen=True)
class MyStage(RLStage): pass
def mine(steps: int = 1) -> Recipe:
    return Recipe((MyStage(name="rl", model="tiny:nano", task=MyTask(), algorithm=MyGRPO(), steps=steps),))
"""


@pytest.mark.parametrize("how", ["recipe", "keys", "yaml"])
def test_a_users_file_is_executed_once(how: str, folder: Path) -> None:
    mine, log = folder / "mine.py", folder / "log"
    mine.write_text(COUNTED.format(log=str(log)))
    stages = [RL | {"stage": f"{mine}:MyStage", "task": {"name": f"{mine}:MyTask"}, "algorithm": {"name": f"{mine}:MyGRPO"}}]
    words = {
        "recipe": [f"{mine}:mine", "rl.lr=1e-4", "rl.task.level=2", "rl.algorithm.group=4", "steps=2"],
        "keys": ["quickstart", f"rl.task={mine}:MyTask", f"rl.algorithm={mine}:MyGRPO", "rl.algorithm.group=4"],
        "yaml": [write(folder, {"stages": stages}), "rl.lr=1e-4", "rl.algorithm.group=4"],
    }[how]
    made = config.parse(words[0], words[1:], allow_code=how == "yaml")
    assert log.read_text() == "executed\n"
    again = config.parse(words[0], words[1:], allow_code=how == "yaml")
    assert log.read_text() == "executed\n" and again.recipe.stages == made.recipe.stages
    mine.write_text(mine.read_text() + "\n")  # edited: another file
    config.parse(words[0], words[1:], allow_code=how == "yaml")
    assert log.read_text() == "executed\n" * 2


# --- keys and texts ----------------------------------------------------------------------------------------------------------------

AGREE = {"stage": "agreement", "name": "agree", "data": "stranger/pairs.jsonl", "judge": "m"}
ASKS = {"judge": {"model": "m", "url": "http://localhost:1/v1"}}


def judged_by(url: str, where: str, **more: Any) -> dict[str, Any]:
    """A pipeline that asks a judge, named in one of the places that can."""
    options = {"url": url, "model": "m", **more}
    part = {"parts": [{"reward": "format"}, {"reward": "judge", "options": options}]}
    task = {"judge": JSONL | {"reward": "judge", "options": options}, "compose": JSONL | {"reward": "compose", "options": part}}
    evaluate = {"stage": "evaluate", "name": "e", "model": "tiny:nano", "problems": 2}
    versus = {
        "stage": "versus",
        "name": "v",
        "model": "tiny:nano",
        "against": "tiny:nano",
        "task": JSONL,
    }
    rubric = {key: value for key, value in more.items() if key == "rubric"}
    return {"stages": {
        "agreement": [AGREE | {"judge": {"model": "m", "url": url} | rubric}],
        "versus": [versus | {"judge": {"model": "m", "url": url} | rubric}],
        "judge": [evaluate | {"task": task["judge"]}],
        "compose": [evaluate | {"task": task["compose"]}],
        "mixed": [evaluate | {"task": {"name": "mixed", "sources": [{"name": "a", "task": task["judge"]}]}}],
        "rounds": [{"rounds": 1, "first": {"agree": url}, "stages": [AGREE | {"judge": {"model": "m", "url": "previous agree"}}]}],
    }[where]}  # fmt: skip


@pytest.mark.parametrize("where", ["agreement", "versus", "judge", "compose", "mixed", "rounds"])
def test_a_file_does_not_choose_who_is_sent_the_key(
    where: str, folder: Path, servers: Callable[[], Server], capsys: pytest.CaptureFixture[str]
) -> None:
    server = servers()
    tree = judged_by(f"http://judge.example:{server.server_port}/v1", where)
    refused(capsys, ["run", write(folder, tree)], "POSTTRAIN_JUDGE_HOSTS=judge.example")
    refused(capsys, ["resume", run_directory(folder, tree)], "POSTTRAIN_JUDGE_HOSTS=judge.example")
    assert server.seen == [] and not Path("runs").exists()


@pytest.mark.parametrize(
    "url",
    [
        "https://localhost.evil.example/v1", "http://127.0.0.1.evil.example:PORT/v1", "http://0.0.0.0:PORT/v1", "http://2130706433:PORT/v1",
        "http://localhost:PORT@evil.example/v1", "http://user@localhost:PORT/v1", "http://evil.example:PORT\\@localhost/v1",
        "http://evil.example:PORT#@localhost/v1", "http://evil.example:PORT?@localhost/v1", "http://@evil.example:PORT/v1",
        " http://evil.example:PORT/v1", "HTTP://evil.example:PORT/v1", "http://loc\talhost:PORT/v1", "http://localhost%2eevil.example:PORT",
        "http://ⓛocalhost:PORT/v1", "file:///etc/passwd", "http://[::ffff:8.8.8.8]:PORT/v1", "http:localhost:PORT",
        "http://localhost:99999/v1", "http://localhost:0/v1", "http://localhost.:PORT/v1", "http://127.1:PORT/v1", "http://0x7f000001:PORT",
        "//localhost:PORT/v1",
    ],
)  # fmt: skip
def test_an_address_that_only_looks_like_this_machine(
    url: str, folder: Path, servers: Callable[[], Server], capsys: pytest.CaptureFixture[str]
) -> None:
    server = servers()
    tree = judged_by(url.replace("PORT", str(server.server_port)), "agreement")
    refused(capsys, ["run", write(folder, tree)])
    assert server.seen == []


def test_who_may_be_asked_and_who_is_sent_the_key(
    folder: Path, servers: Callable[[], Server], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server, proxy = servers(), servers()
    port = server.server_port
    monkeypatch.setenv("HTTP_PROXY", f"http://proxy.example:{proxy.server_port}")
    here = f"http://localhost:{port}/v1"

    def asked(tree: dict[str, Any], *words: str) -> set[str | None]:
        server.seen.clear()
        assert cli.main(["run", write(folder, tree), *words]) == 0, capsys.readouterr().err
        assert server.seen and PRIVATE in server.seen[0][1]
        return server.keys

    mine = judged_by(here, "agreement", rubric="stranger/rubric.txt")
    assert asked(mine) == {None}, "a server on this machine, without the key"
    assert asked(mine, f"agree.url={here}") == {f"Bearer {KEY}"}, "typed"
    assert asked(mine, "--allow-code") == {f"Bearer {KEY}"}
    monkeypatch.setenv("POSTTRAIN_JUDGE_HOSTS", f"api.example, localhost:{port}")
    assert asked(mine) == {f"Bearer {KEY}"}, "in the environment"
    monkeypatch.setenv("POSTTRAIN_JUDGE_HOSTS", "localhost")
    assert asked(mine) == {f"Bearer {KEY}"}, "any port of a host"
    monkeypatch.setenv("POSTTRAIN_JUDGE_HOSTS", "api.example, localhost:1")
    assert asked(mine) == {None}
    assert proxy.seen == [], "what is for this machine goes through no proxy"
    clear = f"http://judge.example:{port}/v1"
    server.seen.clear()
    refused(capsys, ["run", write(folder, mine), f"agree.url={clear}"], "not sent to judge.example over plain http")
    assert server.seen == []
    monkeypatch.delenv("HTTP_PROXY")
    monkeypatch.delenv("OPENAI_API_KEY")
    assert asked(mine, f"agree.url={clear}") == {None}, "without a key plain http is the user's choice"
    theirs = judged_by(clear, "agreement", rubric="stranger/rubric.txt")
    monkeypatch.setenv("POSTTRAIN_JUDGE_HOSTS", "judge.example")
    refused(capsys, ["run", write(folder, theirs)], f"POSTTRAIN_JUDGE_HOSTS=judge.example:{port}")  # not https turned into http
    monkeypatch.setenv("POSTTRAIN_JUDGE_HOSTS", f"judge.example:{port}")
    assert asked(theirs) == {None}, "by its port plain http is the user's choice, too"


def test_a_redirect_carries_nothing_elsewhere(folder: Path, servers: Callable[[], Server]) -> None:
    server, other = servers(), servers()
    server.redirect = f"http://judge.example:{other.server_port}/v1/chat/completions"
    tree = judged_by(f"http://localhost:{server.server_port}/v1", "agreement")
    assert cli.main(["run", write(folder, tree), "--allow-code"]) == 3, "no verdict, and the canaries stop the run"
    assert server.seen and other.seen == []


@pytest.mark.parametrize("variable", ["AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "HOME", "openai_api_key", "OPENAI_API_KEY "])
def test_a_file_does_not_choose_the_key(variable: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for where in ("judge", "compose", "mixed"):
        tree = judged_by("http://localhost:1/v1", where, key_variable=variable)
        refused(capsys, ["run", write(folder, tree)], f"key_variable: {variable.strip()}", "--allow-code")
        refused(capsys, ["resume", run_directory(folder, tree)], f"key_variable: {variable.strip()}", "--allow-code")
        shutil.rmtree(folder / "run")


# --- files -------------------------------------------------------------------------------------------------------------------------

FILES = {
    "absolute": "ROOT/rubric.txt", "up": "stranger/../rubric.txt", "of the working directory": "rubric.txt", "home": "~/rubric.txt",
    "no ending": "private", "called like the stage": "agree", "a link": "stranger/link.txt",
    "a link of a folder": "stranger/folder/rubric.txt",
}  # fmt: skip


@pytest.mark.parametrize("where", ["agreement", "versus", "judge", "mixed"])
@pytest.mark.parametrize("name", FILES)
def test_a_rubric_lies_beside_the_recipe(
    name: str, where: str, folder: Path, servers: Callable[[], Server], capsys: pytest.CaptureFixture[str]
) -> None:
    server = servers()
    (folder / "link.txt").symlink_to(folder.parent / "private")
    (folder / "folder").symlink_to(folder.parent)
    file = FILES[name].replace("ROOT", str(folder.parent))
    tree = judged_by(f"http://localhost:{server.server_port}/v1", where, rubric=file)
    refused(capsys, ["run", write(folder, tree)], f"names {file} outside of its folder")
    refused(capsys, ["resume", run_directory(folder, tree)], "outside of its folder")
    assert server.seen == []


DATA = {
    "rows": [RL | {"task": {"name": "jsonl", "file": "FILE"}}],
    "held-out rows": [RL | {"task": JSONL | {"test_file": "FILE"}}],
    "a folder": [RL | {"task": {"name": "gsm8k", "data": "FOLDER"}}],
    "the folder above": [RL | {"task": {"name": "gsm8k", "data": "stranger/.."}}],
    "the working directory": [RL | {"task": {"name": "gsm8k", "data": "."}}],
    "everything": [RL | {"task": {"name": "gsm8k", "data": "/"}}],
    "a folder with a link in it": [RL | {"task": {"name": "math", "data": "stranger/data"}}],
    "a folder as a data set": [RL | {"task": {"name": "hub", "dataset": "stranger"}}],
    "examples": [{"stage": "sft", "name": "s", "model": "tiny:nano", "data": [{"file": "FILE"}]}],
    "pairs": [{"stage": "preference", "name": "p", "model": "tiny:nano", "data": ["FILE"], "algorithm": {"name": "dpo"}}],
    "held-out pairs": [{"stage": "preference", "name": "p", "model": "tiny:nano", "data": ["stranger/pairs.jsonl"],
                        "held_out_data": ["FILE"], "algorithm": {"name": "dpo"}}],
    "problems": [RL | {"task": {"name": "arithmetic"}, "problems": "FILE"}],
    "mined again": [{"stage": "mine", "name": "m", "model": "tiny:nano", "task": {"name": "arithmetic"}, "again": "FILE"}],
    "compared before": [{"stage": "comparisons", "name": "c", "model": "tiny:nano", "task": {"name": "arithmetic"}, "before": "FILE"}],
    "judged pairs": [AGREE | {"data": "FILE"}],
    "through the rounds": [{"rounds": 1, "first": {"agree": "FILE"}, "stages": [AGREE | {"data": "previous agree"}]}],
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_data_lies_beside_the_recipe(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").symlink_to(folder.parent / "rows.jsonl")
    text = json.dumps(DATA[name]).replace("FILE", "rows.jsonl").replace("FOLDER", str(folder.parent))
    stages = json.loads(text)
    refused(capsys, ["plan", write(folder, {"stages": stages})], "give ", "on the command line")
    # nothing leaves the machine: a run that is taken up again reads what it read
    settings = config.from_config({"stages": stages}, str(folder / "run" / "config.yaml"))
    assert settings.trust.file.endswith("config.yaml")
    sends = {"stages": [*stages, AGREE | ASKS | {"name": "asks", "data": "stranger/run/pairs.jsonl"}]}
    refused(capsys, ["resume", run_directory(folder, sends)], "give ", "on the command line")


def test_a_path_on_the_command_line_may_be_anywhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yaml_file = write(folder, {"stages": [RL | {"task": {"name": "jsonl", "file": "rows.jsonl"}}]})
    refused(capsys, ["plan", yaml_file], "outside of its folder", f"paths begin at {Path.cwd()}: cd to that folder")
    for words in (
        ["rl.task.file=rows.jsonl"],
        ["rl.task={name: jsonl, file: rows.jsonl}"],
        ["rl.task.file=stranger/rows.jsonl"],
        ["--allow-code"],
    ):
        assert cli.main(["plan", yaml_file, *words]) == 0  # fmt: skip
    yaml_file = write(folder, {"recipe": "quickstart", "sft.data": [{"file": "rows.jsonl"}]})
    refused(capsys, ["plan", yaml_file], "outside of its folder")
    for word in (f"out={folder.parent}", f"sft.model={folder.parent}", "out=rows.jsonl"):
        refused(capsys, ["plan", yaml_file, word], "outside of its folder")


def test_what_an_earlier_stage_left_does_not_lead_elsewhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run directory with a link in place of the data that a stage wrote, which a later stage would send to a judge."""
    made = {"stage": "comparisons", "name": "made", "model": "tiny:nano", "task": {"name": "arithmetic"}}
    tree = {"stages": [made, AGREE | ASKS | {"data": "made"}]}
    run = Path(run_directory(folder, tree))
    (run / "stages" / "made").mkdir(parents=True)
    (run / "stages" / "made" / "data.jsonl").symlink_to(folder.parent / "pairs.jsonl")
    refused(capsys, ["resume", str(run)], "data.jsonl is a link")
    refused(capsys, ["run", write(folder, tree), f"out={run}", "again=true"], "data.jsonl is a link")


# --- places to write ---------------------------------------------------------------------------------------------------------------

EVALUATE = {"stage": "evaluate", "name": "e", "model": "tiny:nano", "problems": 2, "task": {"name": "arithmetic"}}
LINKS = [
    "metrics.jsonl",
    "events.jsonl",
    "lock",
    "stages/e/problems.jsonl",
    "stages/e/model",
    "checkpoints",
    "export",
    "plot.png",
]


@pytest.mark.parametrize("place", LINKS)
def test_links_in_a_run_directory_are_not_written_through(place: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is sent anywhere here; but what a run writes into a file of the user's may be executed, as in .bashrc."""
    run = Path(run_directory(folder, {"stages": [EVALUATE]}))
    (run / place).unlink(missing_ok=True)
    (run / place).parent.mkdir(parents=True, exist_ok=True)
    (run / place).symlink_to(folder.parent / "private")
    before = sorted(run.rglob("*"))
    refused(capsys, ["resume", str(run)], f"{Path(place).name} is a link")
    refused(capsys, ["resume", str(run), "--allow-code"], f"{Path(place).name} is a link")
    refused(capsys, ["run", write(folder, {"stages": [EVALUATE]}), f"out={run}", "again=true"], "is a link")
    shutil.copytree(run, folder / "sweep" / "seed=0", symlinks=True)
    (folder / "sweep" / "sweep.json").write_text('{"recipe": "quickstart", "arguments": ["seeds=0,1"]}')
    refused(capsys, ["resume", str(folder / "sweep")], "is a link")
    assert (folder.parent / "private").read_text() == PRIVATE and sorted(run.rglob("*")) == before


def test_links_of_a_tracker_are_fine(folder: Path) -> None:
    run = Path(run_directory(folder, {"stages": [EVALUATE]}))
    (run / "wandb").mkdir()
    (run / "wandb" / "latest-run").symlink_to(run / "wandb")
    assert cli.main(["resume", str(run)]) == 0


def test_a_typed_out_may_be_anywhere(folder: Path, servers: Callable[[], Server]) -> None:
    server = servers()
    tree = judged_by(f"http://localhost:{server.server_port}/v1", "agreement")
    assert cli.main(["run", write(folder, tree), f"out={folder.parent / 'elsewhere'}"]) == 0
    assert server.seen


@pytest.mark.parametrize("name", ["../../x", "/x", "a/b", "..", ".hidden", "", "a\\b", "a\nb", "x" * 200, "\x1b[2J", 3.5])
def test_the_name_of_a_recipe_file_is_no_path(name: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = {"name": name, "stages": [EVALUATE]}
    if name == 3.5:
        assert cli.main(["plan", write(folder, tree)]) == 0  # a number is a plain name, too
        return
    for words in (["plan"], ["run"], ["run", "seeds=0,1"], ["run", "out=there"]):
        refused(capsys, [words[0], write(folder, tree), *words[1:]], "plain name")
    assert sorted(p.name for p in folder.parent.iterdir()) == [
        "agree",
        "pairs.jsonl",
        "private",
        "rows.jsonl",
        "rubric.txt",
        "stranger",
    ]


@pytest.mark.parametrize("file", ["recipe.yaml", "my recipe.yaml", ".hidden.yaml", "x.y.yml", "é.yaml"])
def test_a_recipe_file_without_a_name_runs_under_runs(file: str, folder: Path) -> None:
    (folder / file).write_text(yaml.safe_dump({"stages": [EVALUATE]}))
    for path in (str(folder / file), f"stranger/{file}", f"stranger/../stranger/{file}"):
        assert cli.main(["run", path]) == 0
    assert len(list(Path("runs").iterdir())) == 3 and all(p.name.endswith(f"-{p.name[-1]}") for p in Path("runs").iterdir())


@pytest.mark.parametrize(
    "out", ["ROOT/elsewhere", "../elsewhere", "runs/../../elsewhere", "stranger/link/elsewhere", ".config/x", "a\0b"]
)
def test_a_file_does_not_choose_where_to_write(
    out: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = folder.parent / "work"
    work.mkdir()
    folder.rename(work / "stranger")
    folder = work / "stranger"
    monkeypatch.chdir(work)
    (folder / "link").symlink_to(work.parent)
    out = out.replace("ROOT", str(work.parent))
    refused(
        capsys, ["run", write(folder, {"stages": [EVALUATE], "out": out})], f"would write to {printable(out)}", "command line"
    )
    refused(
        capsys, ["run", write(folder, {"recipe": "quickstart", "out": out})], f"would write to {printable(out)}", "command line"
    )
    assert not (work.parent / "elsewhere").exists()
    for fine in ("runs/mine", "stranger/mine"):
        assert cli.main(["run", write(folder, {"stages": [EVALUATE], "out": fine})]) == 0
    assert "\0" in out or cli.main(["run", write(folder, {"stages": [EVALUATE]}), f"out={out}"]) == 0


@pytest.mark.parametrize("key", ["again", "only"])
def test_a_file_does_not_do_a_run_of_the_users_again(key: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", write(folder, {"stages": [EVALUATE]}), "out=mine"]) == 0
    other = {"stages": [EVALUATE | {"problems": 3}], "out": "mine", key: {"again": True, "only": ["e"]}[key]}
    refused(capsys, ["run", write(folder, other)], f"{key}", "command line")
    assert json.loads(Path("mine/stages/e/result.json").read_text())["problems"] == 2


@pytest.mark.parametrize("dataset", ["text", "json", "csv", "pandas", "parquet", "webdataset", "imagefolder"])
def test_a_data_set_is_no_builder_that_reads_the_working_directory(
    dataset: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`load_dataset("text")` without files reads those of the working directory."""
    task = {"name": "hub", "dataset": dataset, "test_split": "", "question": "note", "answer": "note"}
    refused(capsys, ["run", write(folder, {"stages": [EVALUATE | {"task": task}]})], f"{dataset!r}", "org/name")
    with pytest.raises(UserError, match="org/name"):
        Hub(dataset).problems("train")


@pytest.mark.parametrize("options", [[["url", "http://localhost:1/v1"], ["model", "m"], ["rubric", "private"]], "x", 3, [3]])
@pytest.mark.parametrize("reward", ["judge", "code", "format"])
def test_options_of_a_part_have_names(reward: str, options: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """dict() would make options of a list of pairs, in which no check finds an url or a file."""
    task = JSONL | {"reward": "compose", "options": {"parts": [{"reward": reward, "options": options}]}}
    refused(capsys, ["run", write(folder, {"stages": [EVALUATE | {"task": task}]})], "compose", "options")


def test_settings_of_a_folder_do_not_say_where_figures_go(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """W&B takes the server that gets the key, and more, from wandb/settings in the working directory, which may be a stranger's."""
    for place in ("wandb", ".wandb"):
        Path(place).mkdir()
        (Path(place) / "settings").write_text("[default]\nbase_url = https://evil.example\n")
        for named in (["wandb"], "wandb", "tensorboard, wandb"):
            tree = {"stages": [EVALUATE], "trackers": named}
            refused(capsys, ["run", write(folder, tree)], f"{place}/settings", "trackers=wandb")
            refused(capsys, ["resume", run_directory(folder, tree)], f"{place}/settings", "trackers=wandb")
            shutil.rmtree(folder / "run")
            assert cli.main(["plan", write(folder, tree), "trackers=wandb"]) == 0
        shutil.rmtree(place)
        assert cli.main(["plan", write(folder, tree)]) == 0


# --- terminals ---------------------------------------------------------------------------------------------------------------------

ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e"


def test_what_a_file_says_does_not_steer_the_terminal(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def said(words: list[str], code: int) -> None:
        assert cli.main(words) == code, words
        found = capfd.readouterr()
        assert not set("\x1b\x07\u202e") & set(found.out + found.err), words
        assert "\\x1b]0;owned" in found.out + found.err, words

    said(
        [
            "run",
            write(folder, {"stages": [RL | {"task": JSONL | {"reward": "code", "options": {"sandbox": f"docker:{ESCAPE}"}}}]}),
        ],
        2,
    )
    said(["plan", write(folder, {"stages": [EVALUATE | {"model": ESCAPE}]})], 2)
    data = [{"file": f"stranger/{ESCAPE}.jsonl"}]
    (folder / f"{ESCAPE}.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    said(["plan", write(folder, {"stages": [{"stage": "sft", "name": "s", "model": "tiny:nano", "data": data}]})], 0)
    runs = []
    for n in range(2):
        task = JSONL | {"system": f"{ESCAPE}{n}"}
        run = folder / f"run{n}"
        RunWriter.create(run, {"stages": [EVALUATE | {"task": task, "name": f"{ESCAPE}{n}"}], f"{ESCAPE}{n}": 1}).close()
        (run / "metrics.jsonl").write_text("")
        runs.append(str(run))
    said(["compare", *runs], 2)
    rollouts = folder / "run0" / "rollouts" / "rl"
    rollouts.mkdir(parents=True)
    row = {"problem": ESCAPE, "level": 1, "question": ESCAPE, "answer": ESCAPE, "response": ESCAPE, "sample": 0, "version": 0,
           "reward": 0.0, "advantage": 0.0, "finish": ESCAPE, "outcome": ESCAPE, "failure": ESCAPE, "parts": {ESCAPE: 1.0},
           "length": 1, "attempt": 1}  # fmt: skip
    (rollouts / "step-000001.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "run0" / "metrics.jsonl").write_text(json.dumps({"stage": "rl", "step": 1, "attempt": 1, "time": 0.0}) + "\n")
    said(["show", runs[0]], 0)
    said(["show", runs[0], "rl/1/0"], 0)
    (folder / "sweep").mkdir()
    (folder / "sweep" / "sweep.json").write_text(json.dumps({"recipe": f"{ESCAPE}.yaml", "arguments": [f"{ESCAPE}=1"]}))
    said(["resume", str(folder / "sweep")], 2)


# --- verifiers that evaluate -------------------------------------------------------------------------------------------------------

GYM = {
    "__init__.py": "def create_dataset(name, seed, size, **options): return factory.DATASETS[name]()\nfrom . import factory\n",
    "factory.py": "DATASETS = {}\nfrom . import evaluating, plain, inherited, composed\n",
    "base.py": "class Base:\n    def __len__(self): return 50\n"
    "    def __getitem__(self, n): return {'question': f'{n}?', 'answer': str(n)}\n",
    "evaluating.py": "from .base import Base\nfrom .factory import DATASETS\nfrom sympy.parsing.sympy_parser import parse_expr\n"
    "class Evaluating(Base):\n    def score_answer(self, answer, entry): return float(parse_expr(answer) == int(entry['answer']))\n"
    "DATASETS['evaluating'] = Evaluating\n",
    "plain.py": "from .base import Base\nfrom .factory import DATASETS\n"
    "class Plain(Base):\n    def score_answer(self, answer, entry): return float(answer == entry['answer'])\n"
    "DATASETS['plain'] = Plain\n",
    "inherited.py": "from .evaluating import Evaluating\nfrom .factory import DATASETS\n"
    "class Inherited(Evaluating): pass\nDATASETS['inherited'] = Inherited\n",
    "composed.py": "from .base import Base\nfrom .factory import DATASETS\nfrom . import create_dataset\n"
    "class Composed(Base):\n    def __init__(self): self.inner = create_dataset('evaluating', 0, 1)\n"
    "    def score_answer(self, answer, entry): return self.inner.score_answer(answer, entry)\n"
    "DATASETS['composed'] = Composed\n",
}  # fmt: skip


@pytest.mark.parametrize("generator", ["evaluating", "inherited", "composed", "plain"])
def test_a_file_does_not_name_a_verifier_that_evaluates(
    generator: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some verifiers of reasoning_gym hand to sympy what a model writes, and the model may be the stranger's too."""
    package = folder.parent / "packages" / "reasoning_gym"
    package.mkdir(parents=True)
    for name, text in GYM.items():
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(str(package.parent))
    for name in [name for name in sys.modules if name.split(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    task = {"name": "reasoning_gym", "generator": generator, "train": 4, "test": 4}
    try:
        for one in (task, {"name": f"reasoning_gym:{generator}"}, {"name": "mixed", "sources": [{"name": "a", "task": task}]}):
            tree = {"stages": [EVALUATE | {"task": one}]}
            if generator == "plain":
                assert cli.main(["run", write(folder, tree)]) == 0
                continue
            refused(capsys, ["run", write(folder, tree)], f"{generator} evaluates", "--allow-code")
            refused(capsys, ["resume", run_directory(folder, tree)], f"{generator} evaluates", "--allow-code")
            shutil.rmtree(folder / "run")
            assert cli.main(["run", write(folder, tree), "--allow-code"]) == 0
            assert cli.main(["run", write(folder, tree), f"e.task=reasoning_gym:{generator}"]) == 0
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "reasoning_gym"]:
            del sys.modules[name]


# --- messages for honest use -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["agreement", "versus", "judge"])
def test_what_is_wrong_with_a_judge_is_said_before_the_first_stage(
    where: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stages(url: str, **more: Any) -> str:
        return write(folder, {"stages": [EVALUATE | {"name": "first"}, *judged_by(url, where, **more)["stages"]]})

    clear = "http://judge.example:8000/v1"
    monkeypatch.setenv("POSTTRAIN_JUDGE_HOSTS", "judge.example:8000")
    refused(capsys, ["run", stages(clear)], "not sent to judge.example over plain http", "unset OPENAI_API_KEY")
    refused(
        capsys,
        ["run", stages("http://localhost:1/v1", rubric="stranger/none.txt")],
        "there is no rubric file stranger/none.txt",
    )
    monkeypatch.setitem(sys.modules, "openai", None)  # not installed
    refused(capsys, ["run", stages("http://localhost:1/v1")], "pip install 'posttrain[judge]'")
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


def test_a_judge_that_does_not_answer_says_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tree = judged_by(f"http://localhost:{port}/v1", "judge", attempts=1)
    assert cli.main(["run", write(folder, tree)]) == 3
    assert "no connection to http://localhost:" in capsys.readouterr().err


def test_a_path_is_relative_to_the_working_directory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").unlink()
    for key in ("file", "test_file"):
        late = EVALUATE | {"name": "late", "task": JSONL | {key: "rows.jsonl"}}
        words = f"there is no data file rows.jsonl in {Path.cwd()}"
        refused(capsys, ["run", write(folder, {"stages": [EVALUATE, late]})], words)
        refused(capsys, ["run", write(folder, {"stages": [EVALUATE, late]}), "--allow-code"], words)
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


def test_a_file_cannot_name_an_environment_on_another_machine(tmp_path: Path) -> None:
    from posttrain.tasks.openenv import OpenEnv
    from posttrain.trust import Trust, trusting

    with trusting(Trust(str(tmp_path / "recipe.yaml"))):
        OpenEnv("http://127.0.0.1:8000")
        with pytest.raises(UserError, match=r"would send texts and your key to http://10\.0\.0\.1:80"):
            OpenEnv("http://10.0.0.1:80")
    OpenEnv("http://10.0.0.1:80")
