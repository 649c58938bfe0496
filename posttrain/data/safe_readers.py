"""Reads untrusted input within limits: YAML, and chat templates, which are programs written by a model's author.

A template runs in Jinja's sandbox (`transformers` sees to that), which keeps it from everything but time and memory; those the system
limits, in a process of its own. YAML is data (`SafeLoader`), but a few lines of it may name each other and stand for billions.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from posttrain.errors import UserError, require

TEMPLATE_SECONDS = 5.0  # of processor time, for one conversation
TEMPLATE_BYTES = 1 << 30  # of memory
TEMPLATE_TEXT = 1 << 22  # characters that it may write
# of wall time, from one answer to the next: for a crowded machine, and where the system limits no processor time. A machine may be
# suspended, so a conversation without an answer by then is asked once more
ANSWER_SECONDS = 120.0
# environment variables of the rendering process: for the date, and to find Python's libraries
KEPT = ("PATH", "TZ", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT")
YAML_NODES = 200_000


class TemplateError(Exception):
    """A template refused a conversation, is not valid Jinja, or (`limit`) exceeded the time or memory that any conversation needs."""

    def __init__(self, reason: str, limit: bool = False) -> None:
        super().__init__(reason)
        self.limit = limit


LATE = TemplateError(f"it did not answer within {ANSWER_SECONDS:g} s, twice", limit=True)
Rendered = tuple[str, list[tuple[int, int]]]  # a text, and the spans of its generation blocks
Conversation = tuple[list[dict[str, Any]], bool]  # with whether the generation prompt is wanted


def render_template(
    tokenizer: Any, conversations: Sequence[Conversation], tools: Any = None, marked: bool = False
) -> list[Rendered | TemplateError]:
    """Render each conversation with the chat template of a tokenizer; with `marked`, also return where its generation blocks are."""
    global _renderer
    if os.getpid() != _renderer.owner:  # this process was forked: the pipes are its parent's
        _renderer = _Renderer()
    request = {
        "template": tokenizer.get_chat_template(tools=tools),
        "tools": tools,
        "tokens": tokenizer.special_tokens_map,
        "marked": marked,
        "seconds": TEMPLATE_SECONDS,
        "characters": TEMPLATE_TEXT,
    }
    return _renderer.ask(request, conversations)


class _Renderer:
    """A process that renders templates within the system's limits; see `template_process`. It starts with the first conversation,
    and again after one that ended it. It is a new process and not a fork, because this process may have threads and use a GPU."""

    def __init__(self) -> None:
        self.owner, self.lock = os.getpid(), threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.watch = threading.Lock()  # of what the timer reads
        self.clock: threading.Timer | None = None
        # since when, and which process
        self.asked: tuple[float, subprocess.Popen[bytes]] | None = None
        self.late: subprocess.Popen[bytes] | None = None  # the last one that did not answer
        atexit.register(self.stop)

    def start(self) -> subprocess.Popen[bytes]:
        program = Path(__file__).with_name("template_process.py")
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-P", str(program), str(TEMPLATE_BYTES)]
        pipe, none = subprocess.PIPE, subprocess.DEVNULL
        # a group of its own: signals of the terminal are not for it
        return subprocess.Popen(
            command, env=kept, stdin=pipe, stdout=pipe, stderr=none, process_group=0
        )

    def stop(self) -> int:
        """Wait until the process has ended, and return its exit status."""
        process, self.process = self.process, None
        if process is None or os.getpid() != self.owner:
            return 0
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        try:
            return process.wait(0.5)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C at the exit
            process.kill()
            return process.wait(60)

    def ask(
        self, request: dict[str, Any], conversations: Sequence[Conversation]
    ) -> list[Rendered | TemplateError]:
        found: list[Rendered | TemplateError] = []
        again = False
        with self.lock:
            while len(found) < len(conversations):
                if self.process is None or self.process.poll() is not None:
                    self.stop()
                    self.process = self.start()
                answers = self._answers(self.process, request, conversations[len(found) :])
                if answers[-1] is LATE and (len(answers) > 1 or not again):
                    again = True
                    found += answers[:-1]
                    continue
                found += answers
                if _over(found[-1]):  # one is enough, and others may take as long
                    found += [found[-1]] * (len(conversations) - len(found))
        return found

    def _answers(
        self,
        process: subprocess.Popen[bytes],
        request: dict[str, Any],
        conversations: Sequence[Conversation],
    ) -> list[Rendered | TemplateError]:
        """The renderings of the first conversations: all, or up to the one that ended the process."""
        assert process.stdin is not None and process.stdout is not None
        found: list[Rendered | TemplateError] = []
        self._watch(process)
        try:
            with suppress(BrokenPipeError):  # it has ended, which reading will show
                line = json.dumps({**request, "conversations": conversations})
                process.stdin.write(line.encode() + b"\n")
                process.stdin.flush()
            while len(found) < len(conversations):
                answer = process.stdout.readline()
                ended = None if answer else self._ended(request, process)
                found.append(ended or _answer(json.loads(answer)))
                self.asked = time.monotonic(), process
                if not answer or _over(found[-1]):  # it has ended, or is about to
                    self.stop()
                    break
        finally:
            with self.watch:
                self.asked = None
        return found

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """End the process if it does not answer in time. One timer looks after all requests of that time: the thread of a timer for
        each takes as long to start as a conversation takes to render."""
        with self.watch:
            self.asked = time.monotonic(), process
            if self.clock is None:
                self._look_in(ANSWER_SECONDS)

    def _look_in(self, seconds: float) -> None:
        self.clock = threading.Timer(seconds, self._look)
        self.clock.daemon = True
        self.clock.start()

    def _look(self) -> None:
        with self.watch:
            self.clock = None
            if self.asked is None:
                return
            began, process = self.asked
            left = began + ANSWER_SECONDS - time.monotonic()
            if left > 0:
                self._look_in(left)
            else:
                self.late = process
                process.kill()

    def _ended(self, request: dict[str, Any], process: subprocess.Popen[bytes]) -> TemplateError:
        """The error for the limit that ended the process."""
        code = self.stop()
        if self.late is process:
            return LATE
        if code >= 0:
            raise RuntimeError(f"the process that renders chat templates ended with {code}")
        slow = f"{request['seconds']:g} s of processor time"
        limit = slow if -code == signal.SIGPROF else f"{TEMPLATE_BYTES >> 20} MB of memory"
        return TemplateError(f"it took over {limit}", limit=True)


def _over(found: Rendered | TemplateError) -> bool:
    return isinstance(found, TemplateError) and found.limit


def _answer(said: Any) -> Rendered | TemplateError:
    if isinstance(said, dict):
        [(kind, reason)] = said.items()
        return TemplateError(reason, limit=kind == "over")
    text, spans = said
    return text, [(start, end) for start, end in (spans[0] if spans else ())]


_renderer = _Renderer()


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML 1.2's rules: only true and false are booleans, so that a directory may be called "no"; a date is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, known) for tag, known in found if not tag.endswith((":bool", ":timestamp"))]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_TRUTHS = re.compile("^(?:true|True|TRUE|false|False|FALSE)$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _TRUTHS, list("tTfF"))


def read_yaml(text: str, where: str) -> Any:
    """The plain data in a YAML text. Tags that create objects, duplicate keys, and references that expand to much more than the
    text are refused, each with a line number.

    >>> read_yaml("a: [1, 2]", "x.yaml")
    {'a': [1, 2]}
    """
    try:
        return read_values(text, where)
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{where} is not valid YAML: {reason}") from None


def read_values(text: str, where: str) -> Any:
    """`read_yaml` for text that may not be YAML at all (raises yaml.YAMLError or ValueError)."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_node(node, {}, set(), where)
        return loader.construct_document(node)
    except RecursionError:
        raise UserError(f"{where} is not valid YAML: it is nested too deep") from None
    except (LookupError, AttributeError, TypeError) as error:  # of a tag, such as !!bool perhaps
        raise ValueError(f"a tag does not fit its value: {error}") from None
    finally:
        loader.dispose()


def _check_node(node: yaml.Node, sizes: dict[int, int], above: set[int], where: str) -> int:
    """The number of values that a node expands to, counting references each time."""
    if id(node) in sizes:
        return sizes[id(node)]
    line = node.start_mark.line + 1
    require(id(node) not in above, f"{where}: line {line} refers to itself")
    above.add(id(node))
    size = 1
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, count in Counter(keys).items():
            once = count == 1 or key == "<<"
            require(once, f"{where}: the key {key!r} is given twice near line {line}")
        size += sum(_check_node(part, sizes, above, where) for pair in node.value for part in pair)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_check_node(part, sizes, above, where) for part in node.value)
    require(size <= YAML_NODES, f"{where}: line {line} stands for more than {YAML_NODES:,} values")
    above.discard(id(node))
    sizes[id(node)] = size
    return size
