"""The program of the process that renders chat templates, within limits that the kernel enforces; see `safe_readers`.

It reads one request a line, as JSON: the template, what it is given, and some conversations, each with whether the generation prompt is
wanted. For every conversation it writes one line: [text, spans of the generation blocks], {"refused": why} where the template refuses
it, or {"over": which limit}. A conversation that takes too much processor time ends the process, in whatever operation it is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def renderer() -> Callable[..., Any]:
    """The renderer of transformers, without importing the whole package, which takes a second more."""
    found = importlib.util.find_spec("transformers")
    assert found is not None and found.submodule_search_locations is not None
    home = found.submodule_search_locations[0]
    stubs = {"transformers": home, "transformers.utils": os.path.join(home, "utils")}
    for name, folder in stubs.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [folder]
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError:  # of a version whose renderer needs the package
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        from transformers.utils.chat_template_utils import render_jinja_template
    function: Callable[..., Any] = render_jinja_template
    return function


def limit_memory(size: int) -> None:
    """Limit memory to `size` bytes more than now, and forbid writing files."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        with open("/proc/self/statm", "rb") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (taken + size, taken + size))


def limit_time(seconds: float) -> None:
    """Make the kernel end this process after this much processor time; 0: no limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def answer(render: Callable[..., Any], request: Any, conversation: Any, prompt: bool) -> Any:
    texts, spans = render(
        conversations=[conversation],
        tools=request["tools"],
        chat_template=request["template"],
        return_assistant_tokens_mask=request["marked"],
        add_generation_prompt=prompt,
        **request["tokens"],
    )
    long = len(texts[0]) > request["characters"]
    return {"over": f"it wrote {len(texts[0]):,} characters"} if long else [texts[0], spans]


def main(size: int) -> None:
    render = renderer()
    limit_memory(size)
    found: Any = None
    out = sys.stdout.buffer
    memory = {"over": f"it took over {size >> 20} MB of memory"}
    for line in sys.stdin.buffer:
        request = json.loads(line)
        for conversation, prompt in request["conversations"]:
            limit_time(request["seconds"])
            try:
                found = answer(render, request, conversation, prompt)
                text = json.dumps(found)
            except MemoryError:
                found, text = memory, json.dumps(memory)
            except Exception as error:
                reason = (str(error).splitlines() or [""])[0][:500]
                text = json.dumps({"refused": reason or type(error).__name__})
            limit_time(0)
            out.write(text.encode() + b"\n")
            out.flush()
            if found is memory:  # what is left of the memory is not worth keeping
                return


if __name__ == "__main__":
    main(int(sys.argv[1]))
