"""Who may ask the studio for what: hosts, origins, tokens, limits, and the headers of every answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs_for_tests import make_run
from starlette.testclient import TestClient

from posttrain.studio.app import make_app
from posttrain.studio.guard import BODY_BYTES, TRIES, Guard

HERE = "http://127.0.0.1:7860"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "one", 10)
    return root


@pytest.fixture
def app(root: Path) -> Guard:
    return make_app([root], token="secret")


@pytest.fixture
def client(app: Guard) -> TestClient:
    return TestClient(app, base_url=HERE)


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:7860", "", "localhost.evil", "0.0.0.0:7860", "127.0.0.1:7860@evil"]
)
def test_a_name_that_points_here_is_not_enough(client: TestClient, host: str) -> None:
    assert client.get("/api/runs", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:7860", "localhost:80", "LOCALHOST", "[::1]:7860", "[::1]"])
def test_names_of_this_machine_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"])
def test_whatever_may_change_something_needs_the_token(client: TestClient, method: str) -> None:
    json = {"content-type": "application/json"}
    for headers in (json, {**json, "x-studio-token": "wrong"}, {**json, "cookie": "posttrain_studio=secret"}):
        assert client.request(method, "/api/label", headers=headers, content="{}").status_code == 401
    right = {**json, "x-studio-token": "secret"}
    assert client.request(method, "/api/label", headers=right, content="{}").status_code in (400, 405)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"origin": "http://["}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"origin": HERE}, 400),
    ],
)
def test_changes_come_from_our_own_pages_as_json(client: TestClient, headers: dict[str, str], code: int) -> None:
    sent = {"content-type": "application/json", "x-studio-token": "secret", **headers}
    assert client.post("/api/label", headers=sent, content="{}").status_code == code


def test_another_site_may_link_here_but_not_embed(client: TestClient) -> None:
    assert client.get("/", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}).status_code == 200
    assert client.get("/api/runs", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}).status_code == 403


def test_beyond_this_machine_everything_needs_the_token(root: Path) -> None:
    app = make_app([root], token="secret", hosts=frozenset({"box"}), local=False)
    client = TestClient(app, base_url="http://box:7860", follow_redirects=False)
    for path in ("/", "/api/runs", "/static/studio.css", "/?token=wrong", "/api/runs?token=secret"):
        assert client.get(path).status_code == 401
    opened = client.get("/?token=secret")
    cookie = opened.headers["set-cookie"]
    assert opened.status_code == 303 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert client.get("/api/runs").status_code == 200
    assert client.post("/api/label", json={}).status_code == 401  # the cookie alone changes nothing


def test_guessing_a_token_ends_soon(root: Path) -> None:
    client = TestClient(make_app([root], token="secret", local=False), base_url=HERE)
    codes = [client.get("/api/runs", headers={"x-studio-token": str(n)}).status_code for n in range(TRIES + 2)]
    assert codes[0] == 401 and codes[-1] == 429


def test_every_answer_has_the_policy(client: TestClient) -> None:
    for path in ("/", "/api/runs", "/static/js/app.js", "/nowhere", "/api/runs/none"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in headers
    assert "unsafe" not in client.get("/").text


def test_large_bodies_are_refused(client: TestClient) -> None:
    headers = {"content-type": "application/json", "x-studio-token": "secret"}
    assert client.post("/api/label", headers=headers, content=b"x" * (BODY_BYTES + 1)).status_code == 413

    def pieces():  # without a length
        for _ in range(4):
            yield b"x" * BODY_BYTES

    answer = client.post("/api/label", headers=headers, content=pieces())
    assert answer.status_code == 400 and "at most" in answer.text


def test_no_script_of_ours_makes_markup_of_text() -> None:
    static = Path(__file__).parents[2] / "posttrain" / "studio" / "static"
    for file in static.glob("js/*.js"):
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            "new Function",
            "srcdoc",
            "DOMParser",
        ):
            assert word not in file.read_text(), f"{file.name}: {word}"
    page = (static / "index.html").read_text()
    assert "http" not in page and " on" not in page.replace(" only", "").replace("</noscript>", "")
