"""A small server that speaks the hub's protocol: models are fetched from it, and sent to it."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN = "hf_a-secret-of-the-user"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Two repositories: org/tiny, a folder, and org/closed, which is gated. Others are what is sent, below `sent`."""

    folder: Path
    asked: list[str]
    sent: Path

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        self.asked.append(self.path)
        files = sorted(self.folder.iterdir())
        if parts[:5] == ["api", "models", "org", "tiny", "tree"]:
            tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": COMMIT} for f in files]
            self.reply(json.dumps(tree).encode(), body)
        elif parts[:4] == ["api", "models", "org", "tiny"]:
            names = [{"rfilename": f.name} for f in files]
            self.reply(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": names}).encode(), body)
        elif parts[:3] == ["org", "tiny", "resolve"] and (self.folder / parts[-1]).is_file():
            self.reply((self.folder / parts[-1]).read_bytes(), body)
        else:
            gated = "closed" in parts
            self.send_response(403 if gated else 404)
            self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def do_POST(self) -> None:
        """Making a repository, and commits to it: small files are in the commit, weights come before it by LFS."""
        data, parts = self.rfile.read(int(self.headers["Content-Length"])), self.path.split("?")[0].strip("/").split("/")
        self.asked.append(self.path)
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif parts[:3] == ["api", "repos", "create"]:
            made = json.loads(data)
            folder = self.sent / made["organization"] / made["name"]
            folder.mkdir(parents=True)
            (folder / "visibility").write_text(str(made.get("visibility")))
            self.reply(json.dumps({"url": f"{self.address}/{made['organization']}/{made['name']}"}).encode(), True)
        elif parts == ["api", "validate-yaml"]:  # of the card's metadata
            self.reply(b'{"warnings": [], "errors": []}', True)
        elif parts[4:5] == ["preupload"]:
            names = [one["path"] for one in json.loads(data)["files"]]
            modes = {True: "lfs", False: "regular"}
            files = [{"path": n, "uploadMode": modes[n.endswith(".safetensors")], "shouldIgnore": False} for n in names]
            self.reply(json.dumps({"files": files}).encode(), True)
        elif parts[-3:] == ["info", "lfs", "objects"] or parts[-1] == "batch":
            objects = json.loads(data)["objects"]
            action = {one["oid"]: {"upload": {"href": f"{self.address}/lfs/{one['oid']}"}} for one in objects}
            found = [{**one, "actions": action[one["oid"]]} for one in objects]
            self.reply(json.dumps({"transfer": "basic", "objects": found}).encode(), True)
        elif parts[4:5] == ["commit"]:
            for line in map(json.loads, data.splitlines()):
                value, target = line["value"], self.sent / parts[2] / parts[3]
                if line["key"] == "file":
                    (target / value["path"]).write_bytes(base64.b64decode(value["content"]))
                elif line["key"] == "lfsFile":
                    (self.sent / value["oid"]).rename(target / value["path"])
            commit = {"commitUrl": f"{self.address}/{parts[2]}/{parts[3]}/commit/{COMMIT}", "commitOid": COMMIT}
            self.reply(json.dumps({"success": True, **commit}).encode(), True)
        else:
            self.send_error(404)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        (self.sent / self.path.rsplit("/", 1)[-1]).write_bytes(data)
        self.reply(b"", True)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def reply(self, data: bytes, body: bool) -> None:
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(folder: Path, sent: Path) -> Iterator[tuple[str, list[str]]]:
    """The server's address, and what it was asked."""
    asked = list[str]()
    handler = type("Serving", (Hub,), {"folder": folder, "asked": asked, "sent": sent})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join(10)
