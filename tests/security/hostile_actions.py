# ruff: noqa: E501 (tables of programs, one a line)
"""500 programs that want a reward without the work, or no score at all instead of that of a wrong answer.

Each is an action of a class, done in one of several places: when the program is imported, in the function that is called, in a thread,
when it ends, in the methods of what it returns, in a signal handler, in a script. All say something wrong besides: none may be paid.
The task is that of tests/rewards/hostile_programs.py: `double(n)`, or a script that doubles the number that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from textwrap import indent

from tests.rewards.hostile_programs import HOSTILE, Case

WALL = 0.5  # seconds for a program; a nap is a little less

MODULES = [
    "asyncio",
    "atexit",
    "builtins",
    "collections",
    "copy",
    "ctypes",
    "decimal",
    "fractions",
    "functools",
    "gc",
    "inspect",
    "io",
    "itertools",
    "json",
    "math",
    "mmap",
    "os",
    "queue",
    "re",
    "resource",
    "select",
    "signal",
    "socket",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
]
FRAMES = """
import os
def frames(*texts, size=None):
    for text in texts:
        data = text if isinstance(text, bytes) else text.encode()
        for fd in range(3, 12):
            try: os.write(fd, (b'%08x' % len(data) if size is None else size) + data)
            except OSError: pass
"""

# of one hash
MERSENNE = "(2**61 - 1)"
ACTIONS = {
    "time": [
        "time.sleep(99)", "time.sleep(NAP)", "while True: pass", "while True: time.sleep(0.01)", "threading.Event().wait()", "signal.pause()",
        "select.select([], [], [], 99)", "os.read(os.pipe()[0], 1)", "queue.Queue().get()", "sum(itertools.count())", "re.match('(a+)+$', 'a' * 99 + 'b')",
        "asyncio.run(asyncio.sleep(99))", "l = threading.Lock(); l.acquire(); l.acquire()", "any(iter(int, 1))", "math.factorial(10**7)", "pow(3, 10**9)",
        "time.sleep = time.monotonic = lambda *a: 0\nwhile True: pass", "collections.deque(itertools.repeat(0), maxlen=0)",
        "[signal.signal(s, 1) for s in range(1, 32) if s not in (9, 19)]\nwhile True: pass",
    ],
    "collisions": [
        f"{{i * {MERSENNE} for i in range(10**5)}}", f"{{i * {MERSENNE}: 0 for i in range(10**5)}}", "{(i * (2**61 - 1),) for i in range(10**5)}",
        "class H(int):\n    def __hash__(s): return 1\nset(map(H, range(10**5)))", "{frozenset([i * (2**61 - 1)]) for i in range(10**5)}",
        "class S(str):\n    __hash__ = lambda s: 7\ndict.fromkeys(S(i) for i in range(10**5))", "collections.Counter(i * (2**61 - 1) for i in range(10**5))",
        "functools.lru_cache(None)(lambda x: x)\nd = {}\nfor i in range(10**6): d[i * (2**61 - 1)] = i",
    ],
    "memory": [
        "bytearray(1 << 33)", "x = bytearray(200 << 20)", "x = []\nwhile True: x.append(bytearray(1 << 22))", "'x' * (1 << 34)", "[0] * (1 << 31)",
        "mmap.mmap(-1, 1 << 32)", "x = ''\nwhile True: x += 'x' * (1 << 20)", "x = {}\nfor i in itertools.count(): x[i] = [i]",
        "for i in range(99): open(f'/tmp/{i}', 'wb').write(bytes(1 << 22))", "for i in range(10**5): open(f'/tmp/{i}', 'w')",
        "threading.stack_size(1 << 26)\nfor _ in range(99): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "ctypes.create_string_buffer(1 << 33)", "list(itertools.permutations(range(12)))", "decimal.Decimal(10) ** (10**7)",
    ],
    "output": [
        "while True: print('x' * 9999)", "while True: os.write(1, b'x' * 9999)", "while True: os.write(2, b'x' * 9999)", "while True: sys.stderr.write('\\x1b]0;x\\x07' * 99)",
        "for fd in itertools.cycle(range(12)):\n    try: os.write(fd, b'x' * 999)\n    except OSError: pass", "while True: print(end='x', flush=True)",
        "import warnings\nwarnings.simplefilter('always')\nwhile True: warnings.warn('x' * 999)", "import faulthandler\nwhile True: faulthandler.dump_traceback()",
        "import logging\nwhile True: logging.error('x' * 999)", "sys.stdout.buffer.raw.write(b'\\xff' * (1 << 23))",
    ],
    "descriptors": [
        "os.closerange(0, 64)", "os.close(0)", "os.close(1)", "os.close(2)", "os.closerange(3, 64)", "sys.stdout.close(); sys.stderr.close(); sys.stdin.close()",
        "n = os.open('/dev/null', 2)\nfor fd in range(9): os.dup2(n, fd)", "r, w = os.pipe()\nfor fd in range(9): os.dup2(r, fd)",
        "for fd in range(12):\n    try: os.set_blocking(fd, False)\n    except OSError: pass", "while True: os.dup(0)",
        "for fd in range(12):\n    try: os.read(fd, 1 << 20)\n    except OSError: pass",
    ],
    "killing itself": [
        *(f"os._exit({code})" for code in (0, 1, 77, 78, 128, 137, 255)), *(f"os.kill(os.getpid(), signal.{name})" for name in
        ("SIGKILL", "SIGTERM", "SIGXCPU", "SIGSEGV", "SIGPIPE", "SIGHUP")), "os.abort()", "ctypes.string_at(0)", "sys.exit(0)", "raise SystemExit", "exit()", "quit(77)",
        "signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(9)", "signal.pthread_kill(threading.main_thread().ident, 9)", "raise KeyboardInterrupt",
        "raise MemoryError", "raise GeneratorExit", "import _ctypes\n_ctypes.call_function(1, ())",
    ],
    "stopping itself": [
        *(f"os.kill(os.getpid(), signal.{name})" for name in ("SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU")), "signal.raise_signal(signal.SIGSTOP)",
        "while True: signal.raise_signal(signal.SIGSTOP)", "signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)",
        "signal.signal(signal.SIGCONT, lambda *_: os.kill(os.getpid(), 19)); os.kill(os.getpid(), 19)",
        "threading.Timer(0.01, os.kill, (os.getpid(), 19)).start()",
    ],
    "forging": [
        *(f"frames('{text}')" for text in ('["value",6]', '["loaded"]', '["done"]', '["opaque",true]', '["value"]', "[]", "{}", "null", '["call","f",[]]',
          '["value",["f","nan"]]', '["value",["d",[[1,2],[1,3]]]]', '["value",["o",["Decimal","sNaN"]]]', '["memory"]', '["syntax"]', '["infrastructure"]')),
        "frames('[' * 9999)", "frames('[\"value\",' + '[\"l\",[' * 200 + '1' + ']]' * 200 + ']')", "frames(b'\\xff\\xfe')", "frames('', size=b'ffffffff')",
        "frames('x', size=b'-0000001')", "frames('', size=b'000fffff'); time.sleep(99)", "frames('', size=b'0000')", "frames('ready\\n', size=b'')",
        "frames('began\\n', size=b'')", "frames(*['[\"value\",6]'] * 50)", "frames('[\"value\",' + '9' * 99999 + ']')", "frames('[\"value\",6', '6]')",
        "frames('[\"value\",[\"s\",[' + ','.join('[\"i\",\"%#x\"]' % (i * (2**61 - 1)) for i in range(9999)) + ']]]')",
    ],
    "harness": [
        "m = sys.modules['__main__']\nfor name in list(vars(m)):\n    try: setattr(m, name, lambda *a, **k: 6)\n    except Exception: pass",
        "m = sys.modules['__main__']\nm.text_of = lambda *a, **k: '6'", "m = sys.modules['__main__']\nm.complaint = lambda error: '[\"value\",6]'",
        "for name in ('all', 'any', 'len', 'isinstance', 'type', 'getattr', 'map', 'int'): setattr(builtins, name, lambda *a, **k: True)",
        "for f in inspect.stack():\n    f.frame.f_globals.update(expected=0, passed=True, result=True)", "sys.settrace(lambda *a: None); sys.setprofile(lambda *a: None)",
        "for o in gc.get_objects():\n    if isinstance(o, dict): o.pop('answer', None)", "sys.modules.clear()", "gc.freeze(); gc.disable(); sys.setswitchinterval(99)",
        "builtins.__import__ = lambda *a, **k: sys", "json.dumps = json.loads = lambda *a, **k: 6", "sys.setrecursionlimit(60)", "os.write = os.read = lambda *a: 0",
        "sys.stdout = sys.stderr = io.StringIO()", "sys.excepthook = lambda *a: os._exit(0); raise ValueError", "sys.exc_info = sys.exit = os._exit = print",
    ],
    "files": [
        "open('/tmp/program.py', 'w').write('def double(n): return 2 * n')", "open('json.py', 'w').write('raise SystemExit')",
        "os.symlink('/', '/tmp/whole'); open('/tmp/whole/made', 'w')", "os.chroot('/tmp')", "open('/etc/passwd').read()", "open('/proc/self/mem', 'r+b')",
        "os.remove('/usr')", "open(os.__file__, 'a')", "os.truncate(os.__file__, 0)", "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)", "os.chmod(os.__file__, 0)",
        "os.rename('/tmp', '/x')", "os.mkfifo('/tmp/f'); open('/tmp/f')", "os.chdir('/'); open('made', 'w')", "os.link(os.__file__, '/tmp/os.py')",
        "for root in os.walk('/'): pass\nopen('/home/made', 'w')",
    ],
    "reach": [
        "socket.socket()", "socket.create_connection(('127.0.0.1', 22), 1)", "socket.socketpair(1, 2)", "os.fork()", "os.execv('/bin/true', ['x'])", "subprocess.run(['/bin/true'])",
        "os.kill(os.getppid(), 9)", "os.kill(-1, 9)", "os.kill(0, 9)", "os.setpriority(0, 0, 19)", "ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0); raise OSError",
        "ctypes.CDLL(None).unshare(0x10000000); raise OSError", "ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, 0); raise OSError", "os.setuid(0)", "os.setsid()",
        "resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))", "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))", "os.memfd_create('x')",
        "os.system('true') and 1 / 0", "import multiprocessing\nmultiprocessing.Process(target=print).start()", "os.sched_setaffinity(os.getppid(), [0])",
    ],
    "recursion": [
        "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", "sys.setrecursionlimit(10**9)\nf = lambda x: sorted([x], key=f)\nf(1)", "x = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
        "x = ()\nfor _ in range(10**6): x = (x,)\nhash(x)", "sys.setrecursionlimit(10**9)\nclass A:\n    def __getattr__(s, n): return getattr(s, n + 'x')\nA().y",
        "eval('(' * 10**5)", "compile('-' * 10**5 + '1', '', 'eval')", "json.loads('[' * 10**6)", "x = []\nx.append(x)\ncopy.deepcopy(x); x == [x]",
        "sys.setrecursionlimit(10**9)\n@functools.lru_cache(None)\ndef f(n): return f(n + 1)\nf(0)",
        "x = iter([])\nfor _ in range(10**6): x = itertools.chain(x)\nlist(x)", "isinstance(1, functools.reduce(lambda a, _: (a,), range(10**5), int))",
    ],
}  # fmt: skip
VALUES = {
    "values": [
        "'x' * (8 << 20)", "[0] * 10**6", "[[] for _ in range(10**5)]", "1 << 3_000_000", "bytes(1 << 22)", "{i: i for i in range(10**5)}", "'\\ud800' * (1 << 20)",
        "collections.deque(range(10**6))", "fractions.Fraction(1 << 10**6, 3)", "decimal.Decimal('1' * 99999)", "range(10**30)", "float('nan')", "True", "None", "NotImplemented",
        "(i for i in range(9))", "functools.reduce(lambda a, _: [a], range(10**5), 0)", "{i * (2**61 - 1) for i in range(999)}", "{(-1, -2) + tuple(c) for c in itertools.product((-1, -2), repeat=9)}",
        "[{i * (2**61 - 1): j for i in range(99)} for j in range(999)]", "b'6'", "'6'", "[6]", "6j", "type('I', (int,), {'__eq__': lambda s, o: True})(1)", "object()", "double", "...",
    ],
    "comparisons": [  # what is asked of a value: each either lies, loops or sleeps
        "type('E', (), {'__eq__': lambda s, o: True, '__hash__': None})()", "type('E', (), {'__eq__': lambda s, o: time.sleep(99)})()",
        "type('E', (), {'__bool__': lambda s: time.sleep(99) or True})()", "type('E', (), {'__bool__': lambda s: bool(sum(itertools.count()))})()",
        "type('E', (int,), {'__index__': lambda s: time.sleep(99)})(1)", "type('E', (list,), {'__iter__': lambda s: itertools.count()})([1])",
        "type('E', (dict,), {'items': lambda s: time.sleep(99)})({1: 2})", "type('E', (str,), {'__str__': lambda s: time.sleep(99), '__eq__': lambda s, o: True})('6')",
        "type('E', (float,), {'hex': lambda s: '0x1.8p+2'})(1.0)", "type('E', (), {'__class__': property(lambda s: int), '__eq__': lambda s, o: True})()",
        "type('E', (), {'__class__': property(lambda s: list), '__iter__': lambda s: itertools.count(), '__len__': lambda s: 1})()",
        "type('E', (fractions.Fraction,), {'numerator': property(lambda s: time.sleep(99))})(1, 2)", "type('E', (decimal.Decimal,), {'__str__': lambda s: '6' * 10**7})(1)",
        "type('E', (collections.deque,), {'__iter__': lambda s: itertools.count()})()", "type('E', (collections.OrderedDict,), {'__eq__': lambda s, o: True})({1: 2})",
        "type('E', (), {'__getattribute__': lambda s, n: time.sleep(99)})()", "type('E', (), {'__len__': lambda s: 1 << 62, '__getitem__': lambda s, i: 6})()",
    ],
}  # fmt: skip


def _whole(program: str) -> str:
    """With the modules and helpers that it uses."""
    used = [name for name in MODULES if f"{name}." in program]
    nap = f"NAP = {0.8 * WALL}\n" if "NAP" in program else ""
    return "".join([*(f"import {name}\n" for name in used), nap, FRAMES if "frames(" in program else "", program])


def _in_function(body: str) -> str:
    return f"def double(n):\n{indent(body, '    ')}\n    return 0\n"


def _act(body: str) -> str:
    return f"def act(*_):\n{indent(body, '    ')}\n"


WRONG = "def double(n):\n    return 0\n"
RETURNED = "class R(int):\n    def __eq__(s, o): act(); return True\n    __index__ = __hash__ = __bool__ = act\ndef double(n):\n    return [R(1), {R(2)}]\n"
PLACES = {
    "at import": lambda body: ("calls", f"{body}\n{WRONG}"),
    "in the function": lambda body: ("calls", _in_function(body)),
    "in a thread": lambda body: ("calls", f"{_act(body)}threading.Thread(target=act, daemon=True).start()\n{WRONG}"),
    "again and again": lambda body: (
        "calls",
        f"{_act(body)}def double(n):\n    for _ in range(3):\n        try: act()\n        except BaseException: pass\n    return 0\n",
    ),
    "at the end": lambda body: ("stdio", f"{_act(body)}atexit.register(act)\nprint(0)\n"),
    "in a value": lambda body: ("calls", _act(body) + RETURNED),
    "in a handler": lambda body: (
        "calls",
        f"{_act(body)}signal.signal(signal.SIGALRM, act)\nsignal.setitimer(signal.ITIMER_REAL, 0.001)\n"
        "def double(n):\n    time.sleep(0.02)\n    return 0\n",
    ),
    "in a script": lambda body: ("stdio", f"{body}\nprint(2 * int(input()) + 1)\n"),
    "after output": lambda body: ("stdio", f"print('6 or -100', flush=True)\n{body}\n"),
}


def _all() -> Iterator[Case]:
    number = 0
    for kind, actions in ACTIONS.items():
        for action in actions:
            for place in islice(_rotated(number), 3):
                how, program = PLACES[place](action)
                yield Case(f"{kind}, {place}: {action[:60]}", _whole(program), kind, how)
            number += 1
    for kind, values in VALUES.items():
        for value in values:
            yield Case(f"{kind}: {value[:60]}", _whole(_in_function(f"return {value}")), kind)


def _rotated(start: int) -> Iterator[str]:
    names = list(PLACES)
    return (names[(start + step * 4) % len(names)] for step in range(len(names)))


CASES = [*_all()]
CLASSES = (*ACTIONS, *VALUES)
ALL = [*CASES, *HOSTILE]
