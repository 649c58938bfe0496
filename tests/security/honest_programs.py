# ruff: noqa: E501 (tables of programs, one a line)
"""100 responses that must be paid: what models write and a grader may stumble over. Each solves what its tests ask, by other means."""

from __future__ import annotations

from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

from posttrain.rewards.code import CallTest, CheckTest, StdioTest, Test
from posttrain.tasks._code_data import fenced


def check(text: str) -> list[Test]:
    return [CheckTest(text, ("f",), ("f",))]


def prints(text: str, stdin: str = "") -> list[Test]:
    return [StdioTest(stdin, text)]


def gives(expected: Any, *arguments: Any) -> list[Test]:
    return [CallTest("f", arguments, expected)]


EXITS = [
    ("print(6)\nexit()", prints("6")),
    ("print(6)\nquit()", prints("6")),
    ("print(6)\nexit(0)\nprint(7)", prints("6")),
    ("import sys\nprint(6)\nsys.exit()", prints("6")),
    ("print(6)\nraise SystemExit", prints("6")),
    ("import os\nprint(6, flush=True)\nos._exit(0)", prints("6")),
    ("import atexit\natexit.register(print, 7)\nprint(6)\nexit()", prints("6\n7")),
    ("def f(n):\n    try: exit(3)\n    except SystemExit as e: return e.code + n", gives(6, 3)),
    ("def f(n):\n    return n\nif __name__ == '__main__':\n    quit()", gives(3, 3)),
    ("while True:\n    try: n = int(input())\n    except EOFError: quit()\n    print(n)", prints("3\n4", "3\n4\n")),
]
FILES = [
    ("import os\ndef f(): return os.path.splitext(os.path.basename(__file__))[1]", gives(".py")),
    ("import os\ndef f(): return os.path.isfile(os.path.abspath(__file__))", gives(True)),
    ("import pathlib\nprint(pathlib.Path(__file__).resolve().name)", prints("program.py")),
    ("import inspect\ndef g(): return 1\ndef f(): return 'return 1' in inspect.getsource(g)", gives(True)),
    ("import sys\nprint(len(sys.argv), bool(__file__), __name__)", prints("1 True __main__")),
    ("import tempfile\ndef f():\n    with tempfile.NamedTemporaryFile('w+') as t:\n        t.write('hi'); t.seek(0); return t.read()", gives("hi")),
    ("import tempfile, os\ndef f():\n    with tempfile.TemporaryDirectory() as d:\n        open(d + '/x', 'w').write('hi'); return os.listdir(d)", gives(["x"])),
    ("import tempfile, os\ndef f():\n    h, p = tempfile.mkstemp(); os.write(h, b'hi'); os.close(h)\n    t = open(p).read(); os.unlink(p); return t", gives("hi")),
    ("def f():\n    with open('notes.txt', 'w') as o: o.write('hi')\n    with open('notes.txt', 'a') as o: o.write('!')\n    return open('notes.txt').read()", gives("hi!")),
    ("import shutil, os\ndef f():\n    os.makedirs('a/b'); open('a/b/x', 'w').write('hi'); shutil.copytree('a', 'c'); shutil.rmtree('a')\n    return open('c/b/x').read()", gives("hi")),
    ("import shutil, os, stat\ndef f():\n    open('x', 'w').write('hi'); os.chmod('x', 0o600); shutil.copy2('x', 'y'); os.replace('y', 'z')\n    return oct(os.stat('z').st_mode & 0o777)", gives("0o600")),
    ("import csv\ndef f():\n    with open('t.csv', 'w', newline='') as o: csv.writer(o).writerows([[1, 2], [3, 4]])\n    return list(csv.reader(open('t.csv')))", gives([["1", "2"], ["3", "4"]])),
    ("import zipfile, io, gzip\ndef f():\n    with zipfile.ZipFile('x.zip', 'w') as z: z.writestr('a', 'hi')\n    gzip.open('x.gz', 'wb').write(b'!')\n    return zipfile.ZipFile('x.zip').read('a') + b'!'", gives(b"hi!")),
    ("from pathlib import Path\ndef f():\n    p = Path('d'); p.mkdir(); (p / 'x').write_text('hi'); (p / 'l').symlink_to('x')\n    return sorted(q.name for q in p.iterdir()), (p / 'l').read_text()", gives((["l", "x"], "hi"))),
    ("import os, glob\ndef f():\n    for n in 'abc': open(n + '.t', 'w').close()\n    os.truncate('a.t', 3)\n    return sorted(glob.glob('*.t')), os.path.getsize('a.t')", gives((["a.t", "b.t", "c.t"], 3))),
    ("import sqlite3\ndef f():\n    c = sqlite3.connect(':memory:'); c.execute('create table t (x)'); c.execute('insert into t values (6)')\n    return c.execute('select x from t').fetchone()[0]", gives(6)),
    ("import os\nopen('helper.py', 'w').write('def g(): return 6')\nimport helper\ndef f(): return helper.g()", gives(6)),
    ("import tempfile\ndef f():\n    with tempfile.SpooledTemporaryFile(4, 'w+') as t:\n        t.write('longer than four'); t.seek(0); return len(t.read())", gives(16)),
    ("import sys\nsys.stdin = open(0)\nprint(2 * int(sys.stdin.readline()))", prints("6", "3\n")),
    ("import os\nprint(2 * int(os.read(0, 99)))", prints("6", "3\n")),
]  # fmt: skip
PICKLES = [
    ("import pickle\nclass A:\n    def __init__(s, x): s.x = x\ndef f(n): return pickle.loads(pickle.dumps(A(n))).x", gives(3, 3)),
    ("import pickle, dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\ndef f(n): return pickle.loads(pickle.dumps(A(n))) == A(n)", gives(True, 3)),
    ("import pickle, collections\nP = collections.namedtuple('P', 'x y')\ndef f(n): return pickle.loads(pickle.dumps(P(n, 2)))", gives((3, 2), 3)),
    ("import pickle, enum\nclass E(enum.Enum):\n    A = 1\ndef f(): return pickle.loads(pickle.dumps(E.A)) is E.A", gives(True)),
    ("import pickle\nclass A:\n    x = 6\nprint(pickle.loads(pickle.dumps(A())).x)", prints("6")),
    ("import copy\nclass N:\n    def __init__(s): s.next = s\ndef f():\n    a = copy.deepcopy(N()); return a.next is a", gives(True)),
    ("import pickle\nclass A(dict): pass\ndef g(): return 6\ndef f(): return pickle.loads(pickle.dumps((A(x=1), g)))[1]()", gives(6)),
    ("import typing\nclass A:\n    x: 'B'\nclass B: pass\ndef f(): return typing.get_type_hints(A)['x'] is B", gives(True)),
]  # fmt: skip
VALUES = [
    ("from fractions import Fraction\ndef f(): return Fraction(1, 2)", gives(0.5)),
    ("from fractions import Fraction\ndef f(): return Fraction(1, 3)", gives(Fraction(1, 3))),
    ("from fractions import Fraction\ndef f(x): return x / 2", check("from fractions import Fraction\nassert f(Fraction(1, 3)) == Fraction(1, 6)\nassert f(Fraction(4)) == 2")),
    ("from decimal import Decimal\ndef f(): return Decimal('2.50')", gives(2.5)),
    ("from decimal import Decimal\ndef f(x): return x * Decimal('1.1')", check("from decimal import Decimal\nassert f(Decimal(2)) == Decimal('2.2')")),
    ("from decimal import Decimal\ndef f(): return [Decimal('0.1') + Decimal('0.2')]", gives([Decimal("0.3")])),
    ("from fractions import Fraction\ndef f(): return {Fraction(1, 2): [Fraction(3)]}", gives({0.5: [3]})),
    ("def f(n): return range(n)", check("assert f(3) == range(3) and list(f(3)) == [0, 1, 2]")),
    ("from datetime import date, timedelta\ndef f(): return date(2024, 2, 28) + timedelta(days=1)", gives(date(2024, 2, 29))),
    ("from datetime import datetime\ndef f(a, b): return b - a", check("from datetime import datetime, timedelta\nassert f(datetime(2024, 1, 1), datetime(2024, 1, 2, 1)) == timedelta(days=1, hours=1)")),
    ("from datetime import timedelta\ndef f(): return timedelta(hours=36)", gives(timedelta(days=1, seconds=43200))),
    ("from collections import deque\ndef f(x):\n    x.rotate(1); return x", check("from collections import deque\nassert f(deque([1, 2, 3])) == deque([3, 1, 2])")),
    ("from collections import Counter, OrderedDict, defaultdict\ndef f(s): return [Counter(s), OrderedDict(a=1), defaultdict(int, b=2)]", gives([{"a": 2}, {"a": 1}, {"b": 2}], "aa")),
    ("def f(d): return d.keys()", check("assert f({1: 2, 3: 4}) == {1, 3}")),
    ("import uuid\ndef f(): return uuid.UUID(int=6)", check("import uuid\nassert f() == uuid.UUID(int=6)")),
    ("def f(n): return n > 2", gives(1, 3)),
    ("def f(n): return 1 if n else 0", gives(False, 0)),
    ("def f(n): return [1, 0]", gives([True, False], 3)),
    ("def f(n): return n > 2", check("assert f(3) == 1 and f(1) == 0 and f(3) is True")),
    ("def f(n): return float(n)", check("assert f(3) == 3 and f(True) == 1")),
    ("def f(): return (1, [2, (3,)])", gives([1, [2, [3]]])),
    ("import re\ndef f(t): return re.match('a', t)", check("assert f('ab')\nassert not f('b')")),
    ("def f(): return frozenset([1]), {2}, b'x', 1 + 2j, None, 10**30, float('inf')", gives((frozenset([1]), {2}, b"x", 1 + 2j, None, 10**30, float("inf")))),
    ("import enum\nclass C(enum.IntEnum):\n    A = 6\ndef f(): return C.A", gives(6)),
    ("def f(x): return sorted(x, reverse=True)", check("a = [3, 1]\nassert f(a) == [3, 1] and f(x=[1, 2]) == [2, 1]")),
]  # fmt: skip
RUNNING = [
    ("import threading\ndef f():\n    r = []; t = [threading.Thread(target=r.append, args=(i,)) for i in range(8)]\n    [x.start() for x in t]; [x.join() for x in t]; return sorted(r)", gives([*range(8)])),
    ("from concurrent.futures import ThreadPoolExecutor\ndef f():\n    with ThreadPoolExecutor(8) as p: return list(p.map(abs, range(-3, 0)))", gives([3, 2, 1])),
    ("import threading, queue\ndef f():\n    q = queue.Queue(); threading.Thread(target=lambda: [q.put(i) for i in range(3)]).start()\n    return [q.get() for _ in range(3)]", gives([0, 1, 2])),
    ("import threading\ndef f():\n    b = threading.Barrier(3, timeout=5); r = []\n    def g(): b.wait(); r.append(1)\n    t = [threading.Thread(target=g) for _ in range(3)]\n    [x.start() for x in t]; [x.join() for x in t]; return len(r)", gives(3)),
    ("import threading\ndef f():\n    r = []; t = threading.Timer(0.01, r.append, (6,)); t.start(); t.join(); return r", gives([6])),
    ("import threading\nprint('a', flush=True)\nthreading.Thread(target=lambda: print('b')).start()", prints("a\nb")),
    ("import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\ndef main():\n    def down(k): return 0 if k == 0 else 1 + down(k - 1)\n    print(down(50000))\nt = threading.Thread(target=main); t.start(); t.join()", prints("50000")),
    ("import asyncio\nasync def g(n):\n    await asyncio.sleep(0.001); return n\nasync def main(): return await asyncio.gather(g(1), g(2))\ndef f(): return asyncio.run(main())", gives([1, 2])),
    ("import asyncio\ndef f(): return asyncio.run(asyncio.wait_for(asyncio.to_thread(lambda: 6), 5))", gives(6)),
    ("import multiprocessing.dummy as m\ndef f():\n    with m.Pool(3) as p: return p.map(lambda x: x * x, range(4))", gives([0, 1, 4, 9])),
    ("import signal\ndef f():\n    hits = []; signal.signal(signal.SIGALRM, lambda *_: hits.append(1)); signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause(); return hits", gives([1])),
    ("from zoneinfo import ZoneInfo\nfrom datetime import datetime\ndef f(): return datetime(2024, 7, 1, tzinfo=ZoneInfo('Europe/Berlin')).utcoffset().total_seconds()", gives(7200)),
    ("from zoneinfo import ZoneInfo, available_timezones\ndef f(): return len(available_timezones()) > 300 and ZoneInfo('Asia/Kolkata').key", gives("Asia/Kolkata")),
    ("from datetime import datetime, timezone\nfrom zoneinfo import ZoneInfo\ndef f(): return datetime(2024, 1, 1, tzinfo=timezone.utc).astimezone(ZoneInfo('America/New_York'))",
     check("from datetime import *\nassert f() == datetime(2024, 1, 1, tzinfo=timezone.utc) and f().hour == 19")),
    ("import time, os\ndef f():\n    os.environ['TZ'] = 'Asia/Tokyo'; time.tzset(); return time.localtime(0).tm_hour", gives(9)),
    ("import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)", gives(100000, 100000)),
    ("import sys\nfrom functools import lru_cache\nsys.setrecursionlimit(10**6)\n@lru_cache(None)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)", gives(20000, 20000)),
    ("import sys\nsys.setrecursionlimit(20000)\ndef f(n): return max([f(n - 1) + 1], key=lambda x: x) if n else 0", gives(5000, 5000)),
    ("def f(n):\n    try: return f(n + 1)\n    except RecursionError: return 6", gives(6, 0)),
    ("class A:\n    def __init__(s, d): s.d = d and A(d - 1)\n    def depth(s): return 1 + s.d.depth() if s.d else 0\ndef f(n): return A(n).depth()", gives(300, 300)),
    ("import time\ntime.sleep(0.5)\ndef f(n):\n    time.sleep(0.2); return n", [CallTest("f", [n], n) for n in range(3)]),
    ("import time\ntime.sleep(0.3)\nprint(input())", [StdioTest(str(n), str(n)) for n in range(4)]),
    ("import random\nrandom.seed(1)\ndef f(): return len({random.random() for _ in range(9)})", gives(9)),
    ("def f(n):\n    print('debug', n); return n", gives(3, 3)),
    ("import sys, os, platform, locale, uuid, getpass, hashlib, secrets, statistics, unicodedata\ndef f(): return os.cpu_count() > 0 and bool(platform.python_version()) and len(uuid.uuid4().hex)", gives(32)),
]  # fmt: skip
BODY = "def f(n):\n    return 2 * n\n"
SCRIPT = "n = int(input())\nprint(2 * n)\n"
INDENTED = "   1. Do it:\n\n      ```python\n      def f(n):\n          return 2 * n\n      ```\n"
RESPONSES = [
    (INDENTED, gives(6, 3)),
    (INDENTED.replace("      ", "\t"), gives(6, 3)),
    ("- ```python\n  def f(n):\n      return 2 * n\n  ```", gives(6, 3)),
    ("> ```python\n> def f(n):\n>     return 2 * n\n> ```", gives(6, 3)),
    ("    ```\n    def f(n):\n        return 2 * n\n    ```", gives(6, 3)),
    *((f"```{label}\n{BODY}```", gives(6, 3)) for label in
      ("python3.11", "python title=x", "Python3", "py3", "python {.numbered}", "{.python}", "python:main.py", 'python title="a.py" linenums="1"', "PYTHON ", "ipython3")),
    (f"```python\n{BODY}```\nUsage:\n```python\nprint(f(3))\n```", gives(6, 3)),
    (f"```python\n{BODY}```\nExample:\n```python\nfrom solution import f\nassert f(3) == 7\n```\n```\n6\n```", gives(6, 3)),
    (f"```python\n{BODY}```\nTests:\n```python\nimport unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(3), 6)\n```", check("assert f(3) == 6")),
    (f"```python\n{SCRIPT}```\nFor instance:\n```python\nn = 3\nprint(2 * n)  # 6\n```", prints("8", "4")),
    ("```python\nclass Solution:\n    def f(self, n):\n        return 2 * n\n```\n```python\nsolution = Solution()\nprint(solution.f(3))\n```", [CallTest("Solution.f", [3], 6)]),
]  # fmt: skip
HONEST: list[tuple[str, list[Test]]] = [
    *((fenced(program), tests) for program, tests in (*EXITS, *FILES, *PICKLES, *VALUES, *RUNNING)),
    *RESPONSES,
]
