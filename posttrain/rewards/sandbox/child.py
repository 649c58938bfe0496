"""The inside of the sandbox: a fresh interpreter runs this text (`python -c`) and knows nothing else of this package.

It limits itself, drops its privileges, reports that it is ready, and waits for one job. Once the program of that job starts,
the grader trusts nothing that comes out of here: this code shares its memory with the program, and holds no expected value. The
package never imports this file. It starts for every program, so it imports next to nothing: `_json` is the part of `json`
written in C.
"""

from __future__ import annotations

import builtins
import os
import resource
import sys
from _json import encode_basestring_ascii, make_scanner
from _sitebuiltins import Quitter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, Never

DEPTH, SMALL = 100, 1 << 53
DEATH_SIGNAL, DUMPABLE, KEEP_CAPS, CAP_READ_SEARCH, CAPABILITY_VERSION = 1, 4, 8, 1 << 2, 0x20080522
NO_NEW_PRIVILEGES, SECCOMP, SECCOMP_FILTER = 38, 22, 2
NOBODY, HERE, EMPTY_PATH, RECURSIVE = 65534, -100, 0x1000, 0x8000
# nosuid, nodev, noexec
NEW_MOUNTS, NEW_USER, PRIVATE, PLAIN_FILES, DETACH = (0x20000, 0x10000000, 0x44000, 0xE, 2)
OPEN_TREE, MOVE_MOUNT, SET_MOUNT, CREATE_RULES, ADD_RULE, APPLY_RULES = 428, 429, 442, 444, 445, 446
READ_ONLY = bytes([1]) + bytes(31)  # struct mount_attr
# Landlock's rights: to read files and folders; those of a file (write, read, truncate); all of the first five versions
READ, OF_FILES, RIGHTS = 0xC, 0x4006, (13, 14, 15, 15, 16)
# in the rules, in place of the process's own pid: see seccomp.py
OWN_PID = bytes.fromhex("17faa17f")
CRASH, OUT_OF_MEMORY, SYNTAX = 1, 77, 78  # exit codes of a program that has the streams for itself


class Settings:
    """The attributes that the JSON scanner reads."""

    strict = True
    object_hook = object_pairs_hook = parse_constant = None
    parse_float, parse_int = float, int


scanner: Any = make_scanner
scan = scanner(Settings)


def guard(library: Library, settings: dict[str, Any]) -> None:
    """The first process of a container waits here, and ends the container after its time limit. It has the same user as the
    program, which must not reach it through /proc/1/mem: the kernel closes that file for a process that may not be dumped."""
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
    # as a shell reports it
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def own_root(library: Library, settings: dict[str, Any]) -> None:
    """Make a file system for this process: the readable part of the host, read-only, and an empty /tmp in memory, which ends
    with this process. Root makes it directly; an ordinary user needs a user namespace, in which it is `nobody` and only its own
    threads are counted."""
    user, group, base = os.getuid(), os.getgid(), b"/tmp"
    library.call("unshare", NEW_MOUNTS | NEW_USER if user else NEW_MOUNTS)
    maps = {"setgroups": "deny", "uid_map": f"{NOBODY} {user} 1", "gid_map": f"{NOBODY} {group} 1"}
    for name, text in maps.items() if user else ():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    os.umask(0o022)
    library.call("mount", None, b"/", None, PRIVATE, None)
    trees = [
        (path, library.system(OPEN_TREE, HERE, path.encode(), RECURSIVE | 1))
        for path in settings["readable"]
    ]
    library.call("mount", b"none", base, b"tmpfs", PLAIN_FILES, b"mode=755,size=1m")
    os.mkdir(base + b"/tmp")
    options = f"mode=1777,size={settings['limits']['FSIZE']},nr_inodes=1024"
    library.call("mount", b"none", base + b"/tmp", b"tmpfs", PLAIN_FILES, options.encode())
    for path, tree in trees:
        target = base.decode() + path
        if os.fstat(tree).st_mode & 0o170000 == 0o040000:
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        library.system(SET_MOUNT, tree, b"", EMPTY_PATH | RECURSIVE, READ_ONLY, len(READ_ONLY))
        library.system(MOVE_MOUNT, tree, b"", HERE, target.encode(), 4)
        os.close(tree)
    for link, target in settings["links"]:
        os.symlink(target, base.decode() + link)
    library.system(SET_MOUNT, HERE, base, 0, READ_ONLY, len(READ_ONLY))
    os.chdir(base)
    library.system(settings["pivot_root"], b".", b".")
    library.call("umount2", b".", DETACH)


def allow_files(library: Library, settings: dict[str, Any]) -> None:
    """Apply Landlock: from here on the kernel refuses to open all files but these. If it supports that, it also refuses
    connections and signals; the system call filter refuses them everywhere."""
    version = library.system(CREATE_RULES, None, 0, 1)
    handled = (1 << RIGHTS[min(version, len(RIGHTS)) - 1]) - 1
    attributes = b"".join(part.to_bytes(8, sys.byteorder) for part in (handled, 3, 3))
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = library.system(CREATE_RULES, attributes, size, 0)
    allowed = dict.fromkeys(settings["readable"], READ) | {"/dev/null": READ | 2}
    for path, rights in (allowed | ({"/tmp": handled} if settings["pivot_root"] else {})).items():
        place = os.open(path, os.O_PATH)
        if os.fstat(place).st_mode & 0o170000 != 0o040000:
            rights &= OF_FILES
        rule = (rights & handled).to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder)
        library.system(ADD_RULE, rules, 1, rule, 0)
        os.close(place)
    library.call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    library.system(APPLY_RULES, rules, 0)
    os.close(rules)


def confine(library: Library, settings: dict[str, Any]) -> None:
    """Restrict the files first, then set the limits, then change the user: an ordinary one, so that no other user's processes
    count against its limit."""
    try:  # if the machine runs out of memory, the kernel ends this process and not the grader
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass
    if settings["pivot_root"]:
        own_root(library, settings)
    if settings["readable"]:
        allow_files(library, settings)
    for name, value in settings["limits"].items():
        number = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(number)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        # a second between the soft and the hard limit, so that running out of processor time has its own signal
        highest = value + 1 if name == "CPU" and hard == resource.RLIM_INFINITY else value
        resource.setrlimit(number, (value, highest))
    user = settings["user"]
    if user:
        become(library, user, settings["read_search"])
        if 0 in os.getresuid() or 0 in os.getresgid():
            raise RuntimeError("still root")
    elif settings["pivot_root"]:
        keep_capabilities(library, 0)
    os.chdir("/tmp" if settings["limits"]["FSIZE"] else "/")
    os.umask(0o077)
    # die with the parent (changing the user resets this); a parent that has already ended sends no signal
    library.call("prctl", DEATH_SIGNAL, 9, 0, 0, 0)
    if settings["parent"] not in (0, os.getppid()):
        os._exit(0)
    if settings["rules"]:
        restrict(library, bytes.fromhex(settings["rules"]))


class Library:
    """Calls the C library through the part of `ctypes` written in C: importing the rest takes longer than starting the
    interpreter. Numbers are passed as a C int, bytes as a pointer to them, None as a null pointer."""

    def __init__(self) -> None:
        import _ctypes

        self.module: Any = _ctypes
        number = type("Number", (_ctypes._SimpleCData,), {"_type_": "i"})
        flags = self.module.FUNCFLAG_CDECL | self.module.FUNCFLAG_USE_ERRNO
        attributes = {"_flags_": flags, "_restype_": number}
        self.function: Any = type("Function", (_ctypes.CFuncPtr,), attributes)
        self.handle = self.module.dlopen(None, 0)

    def call(self, name: str, *arguments: int | bytes | None) -> int:
        result: int = self.function(self.module.dlsym(self.handle, name))(*arguments)
        if result < 0:
            raise OSError(self.module.get_errno(), f"{name} {arguments[0]!r}")
        return result

    def system(self, number: int, *arguments: int | bytes | None) -> int:
        """Make a system call by its number."""
        return self.call("syscall", number, *arguments)


def restrict(library: Library, rules: bytes) -> None:
    """From here on the kernel refuses all calls that `rules` does not allow, in all threads of this process. The rules are
    passed as a struct sock_fprog: see seccomp(2)."""
    import array

    steps = array.array("B", rules.replace(OWN_PID, os.getpid().to_bytes(4, sys.byteorder)))
    address, size = steps.buffer_info()
    program = (size // 8).to_bytes(8, sys.byteorder) + address.to_bytes(8, sys.byteorder)
    library.call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    library.call("prctl", SECCOMP, SECCOMP_FILTER, program)


def become(library: Library, user: int, read_search: bool) -> None:
    """Leave root, and with it all capabilities. If the interpreter is where only root may look (/root), keep the capability to
    search and read; Landlock then decides which files can be opened."""
    library.call("prctl", KEEP_CAPS, int(read_search), 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    if read_search:
        keep_capabilities(library, CAP_READ_SEARCH)


def keep_capabilities(library: Library, kept: int) -> None:
    words = (CAPABILITY_VERSION, 0), (kept, kept, 0, 0, 0, 0)
    parts = (b"".join(word.to_bytes(4, sys.byteorder) for word in part) for part in words)
    library.call("capset", *parts)


def read_exactly(descriptor: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.read(descriptor, min(count, 1 << 20))
        if not part:
            os._exit(0)  # the grader has ended
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
    """Encode a value like `wire.encode`, but send a subclass (a named tuple, a Counter) as the builtin it extends."""
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
    for kind, tag in SEQUENCES:
        if isinstance(value, kind):
            items = [text_of(item, depth - 1) for item in kind.__iter__(value)]
            return f'["{tag}",[' + ",".join(items) + "]]"
    if isinstance(value, dict):
        texts = [[text_of(each, depth - 1) for each in pair] for pair in dict.items(value)]
        return '["d",[' + ",".join([f"[{key},{item}]" for key, item in texts]) + "]]"
    # a value of this type exists, so its module is loaded
    for place, attributes in NAMED.items():
        name, _, module = place.partition(" ")
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(value, kind):
            if name == "deque":
                return '["q",[' + ",".join([text_of(item, depth - 1) for item in value]) + "]]"
            parts = [getattr(value, attribute) for attribute in attributes.split()]
            items = [text_of(part() if callable(part) else part, depth - 1) for part in parts]
            return f'["o",["{name}",' + ",".join(items) + "]]"
    raise TypeError("not plain")


SEQUENCES: Any = ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z"))
SEQUENCES += ((type({}.keys()), "s"), (type({}.items()), "s"))
# as in `wire.TEXTS` and `wire.NUMBERS`: a type and its module, and the attributes that are sent
NAMED = {"range builtins": "start stop step", "deque collections": ""}
NAMED |= {"Fraction fractions": "numerator denominator", "Decimal decimal": "__str__"}
NAMED |= {f"{name} datetime": "isoformat" for name in ("datetime", "date", "time")}
NAMED |= {"timedelta datetime": "days seconds microseconds", "UUID uuid": "__str__"}
PLACES = dict(place.split() for place in NAMED)


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
    if tag == "o":
        kind = getattr(__import__(PLACES[content[0]]), content[0])
        make = kind.fromisoformat if hasattr(kind, "fromisoformat") else kind
        return make(*map(plain, content[1:]))
    if tag == "q":
        return __import__("collections").deque(map(plain, content))
    return {"l": list, "t": tuple, "s": set, "z": frozenset}[tag](plain(item) for item in content)


class Opaque:
    """A returned value that cannot be sent: a match, a generator. It is true or false, and equal to nothing."""

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
    """Run the program as its own module. Its code object is called as a function whose globals are the module's. As for a
    script, its source is written to a file if files can be written, modules are imported from the same folder, and `exit` and
    `quit` exist."""
    path = os.path.join(os.getcwd(), "program.py")
    try:
        code = compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, OverflowError) as error:
        raise NotAProgramError from error
    try:
        with open(path, "w") as file:
            file.write(source)
        sys.path.insert(0, os.path.dirname(path))
    except OSError:
        pass
    for word in ("exit", "quit"):
        setattr(builtins, word, Quitter(word, ""))
    module = type(sys)(name)
    # every module has these; numpy looks for them
    module.__dict__.update(names, __builtins__=__builtins__, __file__=path)
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
    """Return the function `name`, or `Class.method` of an instance made without arguments."""
    first, *rest = function.split(".")
    found = getattr(module, first)
    for name in rest:
        found = getattr(found() if isinstance(found, type) else found, name)
    return found


def answer(module: ModuleType, function: str, arguments: list[Any], named: list[Any]) -> str:
    try:
        found = find(module, function)
    except AttributeError:
        return words("missing")
    except BaseException as error:
        return complaint(error)
    try:
        value = found(*map(plain, arguments), **{name: plain(item) for name, item in named})
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
    """Move the grader's pipes to other descriptors: the program reads an empty input, and its output goes to the other pipe."""
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
        send(replies, answer(module, *receive(requests)), limit)


def serve_check(source: str, functions: list[str], limit: int) -> None:
    """Run a data set's own check, which calls the program under test through the grader and gets only plain values from it."""
    requests, replies = channels()

    def remote(function: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            given = ",".join(map(text_of, arguments))
            pairs = ",".join([f"[{text_of(name)},{text_of(named[name])}]" for name in named])
            send(replies, f'["call","{function}",[{given}],[{pairs}]]', limit)
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
    """Run the program as a script. Only the name of an exception is shown: the program controls its text, which may be
    endless."""
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
