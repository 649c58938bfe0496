"""What comes from outside and would otherwise be read without limits: YAML, and chat templates, which are programs of a model's maker.

A template runs in Jinja's sandbox (`transformers` sees to that), which keeps it from everything but time and memory; those are limited
here. YAML is data (`SafeLoader`), but a few lines of it may name each other and stand for billions.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml

from posttrain.errors import UserError, require

TEMPLATE_SECONDS = 5.0
TEMPLATE_BYTES = 1 << 30  # that a template may add to the memory of the process
TEMPLATE_TEXT = 1 << 26  # characters that it may write
YAML_NODES = 200_000
LOOK_SECONDS = 0.02  # between looks at a template that is being rendered
THREAD_CLOCK = hasattr(time, "pthread_getcpuclockid")  # another thread's processor time can be read
Result = TypeVar("Result")


class TemplateLimit(Exception):
    """A template took more time or memory than any conversation needs."""


def limited(render: Callable[[], Result], seconds: float | None = None) -> Result:
    """The result of rendering a template, which is ended where it takes too long or too much: another thread raises `TemplateLimit` in
    this one, between two operations. One that is endless by itself is not ended; see `probe` for those."""
    global _watch
    if _watch is None or not _watch.is_alive():  # in a forked process it is not
        _watch = _Watch()
        _watch.start()
    found = _watch.limited(render, TEMPLATE_SECONDS if seconds is None else seconds)
    if isinstance(found, str) and len(found) > TEMPLATE_TEXT:
        raise TemplateLimit(f"it wrote {len(found):,} characters")
    return found


@dataclass(slots=True, eq=False)
class _Rendering:
    """A template that is being rendered."""

    thread: int
    seconds: float
    began: float  # processor time of the thread: on a crowded machine waiting is not the template's fault
    memory: int  # of the process
    over: str = ""  # which limit it has exceeded


class _Watch(threading.Thread):
    """Looks at what is being rendered, and raises an error there once it exceeds a limit."""

    def __init__(self) -> None:
        super().__init__(name="template limits", daemon=True)
        self.lock, self.begun, self.now = threading.Lock(), threading.Event(), set[_Rendering]()

    def limited(self, render: Callable[[], Result], seconds: float) -> Result:
        began = time.thread_time() if THREAD_CLOCK else time.monotonic()
        one = _Rendering(threading.get_ident(), seconds, began, resident())
        self.now.add(one)
        if not self.begun.is_set():
            self.begun.set()
        try:
            try:
                return render()
            finally:
                self.end(one)
        except TemplateLimit as error:
            self.now.discard(one)
            raise TemplateLimit(one.over) from error

    def end(self, one: _Rendering) -> None:
        """From here on no error is raised in this thread."""
        with self.lock:
            self.now.discard(one)
        if one.over:
            with suppress(TemplateLimit):  # an error that is on its way comes now
                for _ in range(100):
                    time.sleep(0)
            raise TemplateLimit

    def run(self) -> None:
        while self.begun.wait():
            time.sleep(LOOK_SECONDS)
            with self.lock:
                for one in list(self.now):
                    self.look(one)
                if not self.now:
                    self.begun.clear()

    def look(self, one: _Rendering) -> None:
        now = time.monotonic()
        if THREAD_CLOCK:
            now = time.clock_gettime(time.pthread_getcpuclockid(one.thread))
        if now - one.began > one.seconds:
            one.over = f"it took over {one.seconds:g} s"
        if resident() - one.memory > TEMPLATE_BYTES:
            one.over = f"it took over {TEMPLATE_BYTES >> 20} MB of memory"
        if one.over:  # at every look until it ends, because Jinja catches a few errors
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(one.thread), ctypes.py_object(TemplateLimit)
            )


_watch: _Watch | None = None


def resident() -> int:
    """Bytes of memory that this process holds; 0 where it cannot be known."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def probe(render: Callable[[], object], seconds: float) -> str | None:
    """Try a template in a process of its own, with the system's limits on memory and time: what was wrong, or None. A template that
    would fill the memory in one operation dies there. Where processes cannot be forked, nothing is tried."""
    if sys.platform != "linux":
        return None
    import resource

    with warnings.catch_warnings():
        # about a fork in a process with threads: the child uses none of them
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with open("/proc/self/statm", "rb") as file:
                taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (taken + TEMPLATE_BYTES,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            render()
            code = 0
        except MemoryError:
            code = 2
        except BaseException:
            # a template may refuse a conversation; that is reported where it is rendered for good
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
            os.waitpid(pid, 0)
            return f"it took over {seconds:g} s"
        time.sleep(0.002)
    return None if status == 0 else f"it took over {TEMPLATE_BYTES >> 20} MB of memory"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML 1.2's words: true and false alone are truths, so that a directory may be called "no"; a date is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, known) for tag, known in found if not tag.endswith((":bool", ":timestamp"))]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF")
)


def read_yaml(text: str, where: str) -> Any:
    """The plain data in a YAML text. Tags that make objects, keys that are given twice, and text that stands for more than it could
    say itself are refused, each with a line.

    >>> read_yaml("a: [1, 2]", "x.yaml")
    {'a': [1, 2]}
    """
    try:
        return read_values(text, where)
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{where} is not valid YAML: {reason}") from None


def read_values(text: str, where: str) -> Any:
    """The same, where the text may be none of YAML (yaml.YAMLError, ValueError)."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_node(node, {}, set(), where)
        return loader.construct_document(node)
    except RecursionError:
        raise UserError(f"{where} is not valid YAML: it is nested too deep") from None
    finally:
        loader.dispose()


def _check_node(node: yaml.Node, sizes: dict[int, int], above: set[int], where: str) -> int:
    """How many values a node stands for, those it refers to counted each time."""
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
    large = f"{where}: line {line} stands for more than {YAML_NODES:,} values"
    require(size <= YAML_NODES, large)
    above.discard(id(node))
    sizes[id(node)] = size
    return size
