"""Serves the newest metrics of a run to Prometheus, at /metrics on a port of the loopback interface."""

from __future__ import annotations

import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from posttrain.errors import UserError
from posttrain.runs.layout import Row

HOST, PATH = "127.0.0.1", "/metrics"
TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Endpoint:
    """A tracker that keeps the last row of each stage, and serves them. Port 0 takes a free one."""

    def __init__(self, port: int):
        self.rows: dict[str, Row] = {}
        try:
            self.server = ThreadingHTTPServer((HOST, port), _handler(self))
        except OSError as error:
            text = f"prometheus={port}: {HOST}:{port} cannot be used ({error.strerror})"
            raise UserError(f"{text}; choose another port") from None
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, name="prometheus", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])

    def log(self, row: Row) -> None:
        self.rows[row.stage] = row

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def text(self) -> str:
        """Return all metrics, in the Prometheus text format."""
        lines = ["# TYPE posttrain_step gauge", "# TYPE posttrain_figure gauge"]
        for stage, row in list(self.rows.items()):
            lines.append(f"posttrain_step{{stage={_quoted(stage)}}} {row.step}")
            for name, value in row.figures.items():
                labels = f"stage={_quoted(stage)},name={_quoted(name)}"
                lines.append(f"posttrain_figure{{{labels}}} {_number(value)}")
        return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    r"""Return a quoted label value.

    >>> print(_quoted('a "b"\n'))
    "a \"b\"\n"
    """
    escaped = text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{escaped}"'


def _number(value: float) -> str:
    """
    >>> _number(float("-inf")), _number(float("nan")), _number(0.5)
    ('-Inf', 'NaN', '0.5')
    """
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _handler(endpoint: Endpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds that a client may take

        def do_GET(self) -> None:
            found = self.path == PATH
            body = endpoint.text().encode() if found else b""
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Log nothing: the terminal is for the run."""

    return Handler
