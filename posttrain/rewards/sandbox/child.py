"""The inside of the sandbox: this text is given to a fresh interpreter (`python -c`), which knows nothing else of ours.

It limits itself, gives up its privileges, says that it is ready, and waits for one job. From the moment the program of that job
starts, nothing that comes out of here is believed: it shares its memory with the program, and holds no expected value. This package
never imports it. It is started for every program, so it imports next to nothing: `_json` is the part of `json` written in C.
"""

from __future__ import annotations

import os
import resource
import sys
from _json import encode_basestring_ascii, make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, Never

DEPTH, SMALL = 100, 1 << 53
DEATH_SIGNAL, DUMPABLE, KEEP_CAPS, CAP_READ_SEARCH, CAPABILITY_VERSION = 1, 4, 8, 1 << 2, 0x20080522
NO_NEW_PRIVILEGES, SECCOMP, SECCOMP_FILTER = 38, 22, 2
OWN_PID = bytes.fromhex("17faa17f")  # in the rules: see seccomp.py
CRASH, OUT_OF_MEMORY, SYNTAX = 1, 77, 78  # exit codes where the program has the streams for itself


class Settings:
    """What the scanner asks for."""

    strict = True
    object_hook = object_pairs_hook = parse_constant = None
    parse_float, parse_int = float, int


scanner: Any = make_scanner
scan = scanner(Settings)


def guard(library: Library, settings: dict[str, Any]) -> None:
    """The first process of a container stays behind here, and ends it after its hour. It has the user of the program, which must not
    reach it through /proc/1/mem: the kernel keeps that closed where a process may not be dumped."""
    import signal

    library.call("prctl", DUMPABLE, 0, 0, 0, 0)
    settings["parent"] = os.getpid()
    pid = os.fork()
    if pid == 0:
        return
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.alarm(settings["longest"])
    os.closerange(0, 3)
    status = os.waitpid(pid, 0)[1]
    # as a shell has it
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def confine(library: Library, settings: dict[str, Any]) -> None:
    """Limits first, then the user: an ordinary one, with nobody else's processes to count against its limit."""
    for name, value in settings["limits"].items():
        number = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(number)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        # a second between soft and hard, so that running out of processor time has a signal of its own
        highest = value + 1 if name == "CPU" and hard == resource.RLIM_INFINITY else value
        resource.setrlimit(number, (value, highest))
    user = settings["user"]
    if user:
        become(library, user, settings["read_search"])
        if 0 in os.getresuid() or 0 in os.getresgid():
            raise RuntimeError("still root")
    os.chdir("/")
    os.umask(0o077)
    # to die with the parent (becoming another user takes this back); one that is gone already sends no signal
    library.call("prctl", DEATH_SIGNAL, 9, 0, 0, 0)
    if settings["parent"] not in (0, os.getppid()):
        os._exit(0)
    if settings["rules"]:
        restrict(library, bytes.fromhex(settings["rules"]))


class Library:
    """The C library, through the part of `ctypes` written in C: the rest of it takes longer to import than the interpreter to start.
    Numbers are passed as a C int, bytes as a pointer to them."""

    def __init__(self) -> None:
        import _ctypes

        self.module: Any = _ctypes
        number = type("Number", (_ctypes._SimpleCData,), {"_type_": "i"})
        flags = self.module.FUNCFLAG_CDECL | self.module.FUNCFLAG_USE_ERRNO
        self.function: Any = type(
            "Function", (_ctypes.CFuncPtr,), {"_flags_": flags, "_restype_": number}
        )
        self.handle = self.module.dlopen(None, 0)

    def call(self, name: str, *arguments: int | bytes) -> None:
        if self.function(self.module.dlsym(self.handle, name))(*arguments):
            raise OSError(self.module.get_errno(), name)


def restrict(library: Library, rules: bytes) -> None:
    """From here on the kernel refuses all calls that `rules` does not allow, to all threads of this process: struct sock_fprog, as
    seccomp(2) has it."""
    import array

    steps = array.array("B", rules.replace(OWN_PID, os.getpid().to_bytes(4, sys.byteorder)))
    address, size = steps.buffer_info()
    program = (size // 8).to_bytes(8, sys.byteorder) + address.to_bytes(8, sys.byteorder)
    library.call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    library.call("prctl", SECCOMP, SECCOMP_FILTER, program)


def become(library: Library, user: int, read_search: bool) -> None:
    """Leave root, and with it all capabilities. The interpreter may live where only root may look (/root): then the one to
    search and read is kept, and Landlock says what of all that can be opened."""
    library.call("prctl", KEEP_CAPS, int(read_search), 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    if read_search:
        words = (CAPABILITY_VERSION, 0), (CAP_READ_SEARCH, CAP_READ_SEARCH, 0, 0, 0, 0)
        parts = (b"".join(word.to_bytes(4, sys.byteorder) for word in part) for part in words)
        library.call("capset", *parts)


def read_exactly(descriptor: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.read(descriptor, min(count, 1 << 20))
        if not part:
            os._exit(0)  # the grader is gone
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def receive(descriptor: int) -> Any:
    count = int(read_exactly(descriptor, 8), 16)
    return scan(read_exactly(descriptor, count).decode("ascii"), 0)[0]


def send(descriptor: int, text: str, limit: int) -> None:
    data = text.encode("ascii") if len(text) <= limit else b'["large"]'
    data = b"%08x" % len(data) + data
    while data:
        data = data[os.write(descriptor, data) :]


def words(*parts: str) -> str:
    return "[" + ",".join(map(encode_basestring_ascii, parts)) + "]"


def text_of(value: Any, depth: int = DEPTH) -> str:
    """As `wire.encode`, but a subclass (a named tuple, a Counter) is sent as the builtin it extends."""
    if depth < 0:
        raise TypeError("too deep")
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if isinstance(value, int):
        value = int.__index__(value)
        return int.__repr__(value) if -SMALL < value < SMALL else f'["i","{value:#x}"]'
    if isinstance(value, float):
        return f'["f","{float.hex(value)}"]'
    if isinstance(value, complex):
        return f'["c",["{value.real.hex()}","{value.imag.hex()}"]]'
    if isinstance(value, (bytes, bytearray)):
        return f'["b","{value.hex()}"]'
    kind: Any
    for kind, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z")):
        if isinstance(value, kind):
            items = [text_of(item, depth - 1) for item in kind.__iter__(value)]
            return f'["{tag}",[' + ",".join(items) + "]]"
    if isinstance(value, dict):
        texts = [[text_of(each, depth - 1) for each in pair] for pair in dict.items(value)]
        return '["d",[' + ",".join([f"[{key},{item}]" for key, item in texts]) + "]]"
    raise TypeError("not plain")


def plain(tree: Any) -> Any:
    if not isinstance(tree, list):
        return tree
    tag, content = tree
    if tag == "i":
        return int(content, 16)
    if tag == "f":
        return float.fromhex(content)
    if tag == "c":
        return complex(*map(float.fromhex, content))
    if tag == "b":
        return bytes.fromhex(content)
    if tag == "d":
        return {plain(key): plain(item) for key, item in content}
    return {"l": list, "t": tuple, "s": set, "z": frozenset}[tag](plain(item) for item in content)


class Opaque:
    """What a program returned and cannot be sent: a match, a generator. It is true or false, and equal to nothing."""

    def __init__(self, truth: bool) -> None:
        self.truth = truth

    def __bool__(self) -> bool:
        return self.truth

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class NotAProgramError(Exception):
    pass


def run(source: str, name: str, names: dict[str, Any]) -> ModuleType:
    """The program as a module of its own. Its code object is called as a function whose globals are the module's."""
    try:
        code = compile(source, "program.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, OverflowError) as error:
        raise NotAProgramError from error
    module = type(sys)(name)
    # as every module has: numpy looks there
    module.__dict__.update(names, __builtins__=__builtins__)
    sys.modules[name] = module
    function: Any = type(run)
    function(code, module.__dict__)()
    return module


def complaint(error: BaseException) -> str:
    if isinstance(error, NotAProgramError):
        return words("syntax")
    if isinstance(error, SystemExit):
        return words("exit")
    return words("memory" if isinstance(error, MemoryError) else "error")


def find(module: ModuleType, function: str) -> Any:
    """`name`, or `Class.method` of an instance made without arguments."""
    first, *rest = function.split(".")
    found = getattr(module, first)
    for name in rest:
        found = getattr(found() if isinstance(found, type) else found, name)
    return found


def answer(module: ModuleType, function: str, arguments: list[Any]) -> str:
    try:
        found = find(module, function)
    except AttributeError:
        return words("missing")
    except BaseException as error:
        return complaint(error)
    try:
        value = found(*arguments)
    except BaseException as error:
        return complaint(error)
    try:
        return f'["value",{text_of(value)}]'
    except MemoryError:
        return words("memory")
    except BaseException:
        pass
    try:
        return '["opaque",true]' if value else '["opaque",false]'
    except BaseException as error:
        return complaint(error)


def channels() -> tuple[int, int]:
    """The pipes of the grader move out of the way of the program: it finds no input, and its output goes to the other pipe."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return requests, replies


def serve_calls(source: str, limit: int) -> None:
    requests, replies = channels()
    try:
        module = run(source, "program", {})
    except BaseException as error:
        send(replies, complaint(error), limit)
        return
    send(replies, words("loaded"), limit)
    while True:
        function, arguments = receive(requests)
        send(replies, answer(module, function, [plain(item) for item in arguments]), limit)


def serve_check(source: str, functions: list[str], limit: int) -> None:
    """A data set's own check, which calls the program under test through the grader and sees only plain values of it."""
    requests, replies = channels()

    def remote(function: str) -> Any:
        def call(*arguments: Any) -> Any:
            given = ",".join(map(text_of, arguments))
            send(replies, f'["call","{function}",[{given}]]', limit)
            kind, content = receive(requests)
            return plain(content) if kind == "value" else Opaque(content)

        return call

    try:
        run(source, "check", {name: remote(name) for name in functions})
    except BaseException:
        send(replies, words("failed"), limit)
        return
    send(replies, words("done"), limit)


def run_with_streams(source: str) -> None:
    """As a script. Only the name of an exception is shown: its text is the program's, and may never end."""
    try:
        run(source, "__main__", {})
    except SystemExit:
        raise
    except BaseException as error:
        code = OUT_OF_MEMORY if isinstance(error, MemoryError) else CRASH
        leave(SYNTAX if isinstance(error, NotAProgramError) else code, type(error).__name__)


def leave(code: int, name: str) -> Never:
    try:
        sys.stdout.flush()
        os.write(2, ascii(name).encode()[:200] + b"\n")
    finally:
        os._exit(code)


def main() -> None:
    settings = scan(sys.argv[1], 0)[0]
    sys.argv = ["program.py"]
    library = Library()
    if settings["longest"]:
        guard(library, settings)
    confine(library, settings)
    os.write(1, b"ready\n")
    job = receive(0)
    os.write(1, b"began\n")
    if job["kind"] == "stdio":
        run_with_streams(job["source"])
    elif job["kind"] == "calls":
        serve_calls(job["source"], settings["result"])
    else:
        serve_check(job["source"], job["functions"], settings["result"])


main()
