"""`posttrain studio` from the command line: what it refuses, and that nobody else pays for it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from posttrain import cli


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["--port", "99999"], "port must be from 0 to 65535"),
        (["--port", "x"], "invalid int value"),
        (["--host", "0.0.0.0", "--port", "0"], "--host 0.0.0.0 listens at every address"),
        (["--host", "::", "--port", "0"], "listens at every address"),
        (["--host", "0:0:0:0:0:0:0:0", "--port", "0"], "listens at every address"),
        (["--host", "no.such.host.invalid", "--port", "0"], "cannot listen"),
    ],
)
def test_bad_words_are_one_line(
    words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["studio", *words]) == 2
    said = capsys.readouterr().err
    assert text in said and said.count("\n") == 1


def test_a_port_that_is_taken_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert cli.main(["studio", str(tmp_path), "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_without_its_packages_the_studio_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "starlette" or name.startswith("posttrain.studio")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setitem(sys.modules, "posttrain.serve.server", None)
    assert cli.main(["studio"]) == 2
    assert "pip install 'posttrain[studio]'" in capsys.readouterr().err


def test_the_studio_loads_no_torch() -> None:
    """Its memory is that of an index; models are in processes of their own. And without it nothing of it is imported."""
    program = "import sys, posttrain.cli; posttrain.cli.parser(); assert 'starlette' not in sys.modules; import posttrain.studio.server"
    check = "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", f"{program}; {check}"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_control_c_ends_the_studio_as_it_ends_a_server(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
             "from posttrain import cli; sys.exit(cli.main(sys.argv[1:]))", "studio", str(tmp_path), "--port", "0"]  # fmt: skip
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with urlopen(process.stdout.readline().removeprefix("studio: "), timeout=60) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert (process.wait(60), process.communicate()[1]) == (0, "")


def test_serve_and_studio_take_an_address_in_the_same_words() -> None:
    """And what a server says of a wrong port is one text, whoever starts it."""
    words = ["--host", "127.0.0.1", "--port", "1", "--name", "box"]
    made = [vars(cli.parse([command, "somewhere", *words])) for command in ("serve", "studio")]
    assert [(one["host"], one["port"], one["name"]) for one in made] == [("127.0.0.1", 1, ["box"])] * 2
