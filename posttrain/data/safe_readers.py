"""What comes from outside and would otherwise be read without limits: YAML, and chat templates, which are programs of a model's maker.

A template runs in Jinja's sandbox (`transformers` sees to that), which keeps it from everything but time and memory; those are limited
here. YAML is data (`SafeLoader`), but a few lines of it may name each other and stand for billions.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

import yaml

from posttrain.errors import UserError, require

TEMPLATE_SECONDS = 5.0
TEMPLATE_BYTES = 1 << 30  # that a template may add to the memory of the process
TEMPLATE_TEXT = 1 << 26  # characters that it may write
YAML_NODES = 200_000
TEMPLATE_FILE = "<template>"  # what Jinja calls a template that came from a string
Result = TypeVar("Result")


class TemplateLimit(Exception):
    """A template took more time or memory than any conversation needs."""


def limited(render: Callable[[], Result], seconds: float | None = None) -> Result:
    """The result of rendering a template, which is ended where it takes too long or too much.

    It is watched line by line: a thread could only be given up on, not ended. One operation of one line is not seen from within; see
    `probe` for those.
    """
    allowed = TEMPLATE_SECONDS if seconds is None else seconds
    began = checked = time.thread_time()  # on a crowded machine waiting is not the template's fault
    before = resident()

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal checked
        now = time.thread_time()
        if now > began + allowed:
            raise TemplateLimit(f"it took over {allowed:g} s")
        if now > checked + 0.01:  # as long as it takes to fill a few megabytes
            checked = now
            if resident() - before > TEMPLATE_BYTES:
                raise TemplateLimit(f"it took over {TEMPLATE_BYTES >> 20} MB of memory")
        return line

    previous = sys.gettrace()
    sys.settrace(lambda frame, *_: line if frame.f_code.co_filename == TEMPLATE_FILE else None)
    try:
        found = render()
    finally:
        sys.settrace(previous)
    if isinstance(found, str) and len(found) > TEMPLATE_TEXT:
        raise TemplateLimit(f"it wrote {len(found):,} characters")
    return found


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
    loader = yaml.SafeLoader(text)
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
