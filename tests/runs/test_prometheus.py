"""The newest figures of a run, as Prometheus reads them, on the loopback interface alone."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.errors import UserError
from posttrain.runs.layout import Row
from posttrain.runs.prometheus import Endpoint


def asked(port: int, path: str = "/metrics") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


def test_the_last_row_of_each_stage_is_shown() -> None:
    endpoint = Endpoint(0)
    try:
        assert endpoint.server.server_address[0] == "127.0.0.1"
        for step in (1, 2):
            endpoint.log(Row("rl", step, 1, 0.0, {"reward": 0.25 * step, 'odd"name': float("nan")}))
        status, text = asked(endpoint.port)
        assert status == 200 and 'posttrain_step{stage="rl"} 2' in text
        assert 'posttrain_figure{stage="rl",name="reward"} 0.5' in text and 'name="odd\\"name"} NaN' in text
        assert asked(endpoint.port, "/")[0] == 404
        with pytest.raises(UserError, match="cannot be used"):
            Endpoint(endpoint.port)
    finally:
        endpoint.close()


def test_a_port_in_use_is_refused_before_the_first_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["run", "quickstart", "device=cpu", f"prometheus={port}", f"out={tmp_path / 'run'}"]) == 2
    assert (
        f"prometheus={port}: 127.0.0.1:{port} cannot be used (Address already in use); choose another port"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()
