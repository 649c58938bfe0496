"""Chat templates are programs of a model's maker: they leave no sandbox, and end within limits of time and memory."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import safe_readers
from posttrain.data.chat import render_example, render_prompt, render_prompts, render_turn
from posttrain.errors import UserError
from posttrain.models.load import load
from posttrain.types import Message
from tests.data.tokenizers_for_tests import CHATML, characters

ASK = [Message("user", "1+1=")]
ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('touch MARK').read() }}",
    "{{ self.__init__.__globals__.__builtins__.__import__('os').system('touch MARK') }}",
    "{{ messages.append.__self__.__class__.__base__.__subclasses__() }}",
    "{% set x = messages.__class__.__init__.__globals__ %}",
    "{{ ('%s' | attr('form' ~ 'at')).__globals__.x }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch MARK') }}",
    "{{ lipsum.__globals__['os'].system('touch MARK') }}",
)
# in one operation, which nothing in the interpreter could interrupt
AT_ONCE = {
    "a repeat": "{{ 'x' * 10 ** 10 }}",
    "a repeat of a list": "{{ ([0] * 10 ** 10) | length }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a remainder of powers": "{{ (7 ** 99999999) % 3 }}",
    "a wide field": "{{ '%10000000000d' % 1 }}",
    "a format": "{{ '{:>10000000000}'.format(1) }}",
    "padding": "{{ 'x'.ljust(10 ** 10) }}",
    "centring": "{{ 'x' | center(10 ** 10) }}",
    "indentation": "{{ ('x\n' * 9999) | indent(10 ** 7) }}",
    "replacing": "{{ ('x' * 10 ** 6) | replace('x', 'y' * 10 ** 6) }}",
    "tabs": "{{ '\t'.expandtabs(2 ** 31 - 1) ~ '\t'.expandtabs(2 ** 31 - 1) }}",
    "bytes": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "lorem": "{{ lipsum(n=10 ** 9) }}",
    "JSON": "{{ ([0] * 10 ** 6) | tojson(indent=10 ** 6) }}",
    "a product of lists": "{{ (range(99999) | list) * 99999 }}",
}
BY_STEPS = {
    "a loop in a loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "text without end": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}",
    "doubling": "{% set ns = namespace(x='x' * 1000) %}{% for a in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "sums that grow": "{% set ns = namespace(x=3) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "recursion": "{% macro m(n) %}{{ m(n + 1) if n < 60 }}{{ m(n + 1) if n < 60 }}{% endmacro %}{{ m(0) }}",
    "a long text": "{{ 'x' * (2 ** 22 + 1) }}",
}
BOMBS = AT_ONCE | BY_STEPS
QUICK = ("a repeat", "a power", "padding", "replacing", "a loop in a loop", "doubling", "recursion", "a long text")
OVER = r"it (took over (0.2 s of processor time|256 MB of memory)|wrote 4,194,305 characters)"


@pytest.fixture(autouse=True, scope="module")
def strict() -> Iterator[None]:
    """Smaller limits, to be quick."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safe_readers, "TEMPLATE_SECONDS", 0.2)
        patch.setattr(safe_readers, "TEMPLATE_BYTES", 1 << 28)
        safe_readers._renderer.stop()
        yield
        safe_readers._renderer.stop()


def taken() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.parametrize("template", ESCAPES)
def test_a_chat_template_does_not_leave_its_sandbox(template: str, tmp_path: Path) -> None:
    tokenizer = characters(template=template.replace("MARK", str(tmp_path / "mark")))
    with pytest.raises(UserError, match="the chat template refused the conversation"):
        render_prompt(tokenizer, ASK)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BOMBS])
def test_a_template_that_takes_too_much_time_or_memory_is_refused(name: str) -> None:
    began, before = time.monotonic(), taken()
    with pytest.raises(UserError, match=OVER):
        render_prompt(characters(template=BOMBS[name]), ASK)
    assert time.monotonic() - began < 60 and taken() - before < 1 << 28


@pytest.mark.parametrize("name", ["a power", pytest.param("a repeat", marks=pytest.mark.slow)])
def test_a_model_with_such_a_template_is_not_loaded(name: str, model: Path) -> None:
    (model / "chat_template.jinja").write_text(BOMBS[name])
    with pytest.raises(UserError, match=f"not fit to run: {OVER} for two short messages"):
        load(str(model))


@pytest.mark.parametrize("name", ["a power", pytest.param("doubling", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["prompt", "prompts", "turn", "example", "marked"])
def test_the_limits_hold_everywhere_a_template_renders(way: str, name: str) -> None:
    """Harmless when the model is loaded, and a bomb for some conversations of the training data."""
    bomb = "{% if messages[-1].content == '1+1=' %}" + BOMBS[name] + "{% endif %}"
    turn = "{{ messages[0].content }}{% generation %}x{% endgeneration %}"
    tokenizer = characters(template=CHATML + bomb + (turn if way == "marked" else ""))
    reply = [*ASK, Message("assistant", "1+1=")]
    ways = {
        "prompt": lambda: render_prompt(tokenizer, ASK),
        "prompts": lambda: render_prompts(tokenizer, [("row 1", [Message("user", "2+2=")])] + [("row 2", ASK)] * 99),
        "turn": lambda: render_turn(tokenizer, ASK, None),
        "example": lambda: render_example(tokenizer, reply),
        "marked": lambda: render_example(tokenizer, reply),
    }
    began = time.monotonic()
    with pytest.raises(UserError, match=OVER):
        ways[way]()
    assert time.monotonic() - began < 60, "one bad conversation costs its limit once"
    assert render_prompt(characters(template=CHATML), [Message("user", "2+2=")]), "and the next one is rendered"


def test_a_renderer_that_stood_still_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A computer that slept, or one with too much to do: the template took no processor time."""
    tokenizer, renderer = characters(template=CHATML), safe_readers._renderer
    expected = render_prompt(tokenizer, ASK)
    assert renderer.process is not None
    renderer.process.send_signal(signal.SIGSTOP)
    start = renderer.start

    def hurry() -> None:
        monkeypatch.setattr(safe_readers, "ANSWER_SECONDS", 0.2)
        assert renderer.clock is not None
        renderer.clock.cancel()
        renderer.clock = None

    hurry()

    def patient() -> Any:
        monkeypatch.setattr(safe_readers, "ANSWER_SECONDS", 120.0)
        return start()

    monkeypatch.setattr(renderer, "start", patient)
    assert render_prompt(tokenizer, ASK) == expected

    def stopped() -> Any:
        process = start()
        process.send_signal(signal.SIGSTOP)
        return process

    hurry()
    monkeypatch.setattr(renderer, "start", stopped)
    renderer.stop()
    with pytest.raises(UserError, match="it did not answer within 120 s, twice"):
        render_prompt(tokenizer, ASK)
    monkeypatch.undo()
    renderer.stop()


def test_the_time_for_an_answer_begins_with_the_answer_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of long conversations may take longer than the limit for one."""
    tokenizer, renderer = (
        characters(template="{% for m in range(300) %}{% for n in range(1000) %}{% endfor %}{% endfor %}" + CHATML),
        safe_readers._renderer,
    )
    expected = render_prompt(tokenizer, ASK)
    began = time.monotonic()
    render_prompt(tokenizer, ASK)
    limit = 6 * (time.monotonic() - began)
    monkeypatch.setattr(safe_readers, "ANSWER_SECONDS", limit)
    if renderer.clock is not None:
        renderer.clock.cancel()
        renderer.clock = None
    process, began = renderer.process, time.monotonic()
    assert render_prompts(tokenizer, [("row", ASK)] * 30) == [expected] * 30
    assert time.monotonic() - began > limit
    assert renderer.process is process, "it was not ended"


def test_one_timer_looks_after_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, renderer = characters(template=CHATML), safe_readers._renderer
    monkeypatch.setattr(safe_readers, "ANSWER_SECONDS", 2.0)
    if renderer.clock is not None:
        renderer.clock.cancel()
        renderer.clock = None
    render_prompt(tokenizer, ASK)
    first = renderer.clock
    assert first is not None and [render_prompt(tokenizer, ASK) for _ in range(9)] and renderer.clock is first
    first.join(30)
    assert not first.is_alive() and renderer.clock is None, "nothing was asked, and it is gone"
    assert renderer.process is not None and renderer.process.poll() is None, "who has answered is left alone"
    render_prompt(tokenizer, ASK)
    assert renderer.clock is not None


def test_rendering_is_that_of_transformers() -> None:
    tokenizer = characters(template=CHATML)
    rows = [[Message("user", f"say {n} \ud800\n\x1b\u2028")] for n in range(9)]
    ours = safe_readers.render_template(tokenizer, [([m.row() for m in row], True) for row in rows])
    asked = {"tokenize": False, "add_generation_prompt": True}
    theirs = [tokenizer.apply_chat_template([m.row() for m in row], **asked) for row in rows]
    assert [text for text, _ in ours] == theirs


def test_the_process_has_no_secrets_and_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    render_prompt(characters(template=CHATML), ASK)
    process = safe_readers._renderer.process
    assert process is not None and b"secret" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == 0


def test_a_killed_renderer_is_started_again() -> None:
    tokenizer = characters(template=CHATML)
    before = render_prompt(tokenizer, ASK)
    process = safe_readers._renderer.process
    assert process is not None
    process.kill()
    process.wait(30)
    assert render_prompt(tokenizer, ASK) == before


def test_threads_and_forked_processes_render_apart() -> None:
    tokenizer, found = characters(template=CHATML), list[object]()
    asked = [[Message("user", f"{n}")] for n in range(8)]
    threads = [threading.Thread(target=lambda row=row: found.append(render_prompt(tokenizer, row))) for row in asked]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == sorted(render_prompt(tokenizer, row) for row in asked)  # type: ignore[type-var]
    pid = os.fork()
    if pid == 0:
        alike = render_prompt(tokenizer, asked[0]) == render_prompt(tokenizer, asked[0])
        safe_readers._renderer.stop()
        os._exit(0 if alike else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert render_prompt(tokenizer, asked[3]) in found


def test_rendering_leaves_a_debugger_alone() -> None:
    tokenizer, before = characters(template=CHATML), sys.gettrace()
    trace = lambda *_: None  # noqa: E731
    sys.settrace(trace)
    try:
        render_prompt(tokenizer, ASK)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
