"""Executes the commands of README.md and docs/ unchanged, except that settings for small runs are appended.

    python benchmarks/docs_commands.py OUT.json --cpu FOLDER [--only PATTERN] [--limit 3600]
    MODEL=DIR DATA=FOLDER python benchmarks/docs_commands.py OUT.json [--at-once 4] [--only PATTERN] [--limit 600]
    MODEL=DIR DATA=FOLDER DEVICE=cpu python benchmarks/docs_commands.py OUT.json         # the recipes' commands, on a CPU

With --cpu, it executes the commands that need no GPU, one after the other, in the order of the pages, in FOLDER. FOLDER gets a copy
of the repository and keeps the runs that later commands name. Without --cpu, it executes the commands that need one GPU; DIR is a
model with a chat template, and FOLDER has the files of GSM8K, MBPP and HumanEval that the recipes name. It makes the other files that
commands name (docs_settings.py, which also has the appended settings). Commands that OUT.json lists with the same appended settings
are skipped. OUT.json has for each command the appended settings, its exit code, its seconds and, if it failed, its last lines.
tests/test_docs.py reads benchmarks/results/docs_commands.json (GPU) and docs_commands_cpu.json. SANDBOX=unsafe is for a machine on
which the sandbox does not start. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import docs_settings as known  # noqa: E402

ROOT = HERE.parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"^ {4}((?:POSTTRAIN_\w+=\S+ )?(?:posttrain|python|torchrun|make|pip|cp|curl) (?:\\\n|[^\n])+)", re.M)
GPU_SCRIPTS = "gpu_generate|gpu_grpo_step|gpu_train|gpu_train_kernels|gpu_kernels|gpu_memory|gpu_scale|gpu_trl|product_step"
GPU = re.compile(rf"device[= ]cuda|/({GPU_SCRIPTS}|sequence_ratio_mismatch)\.py|sampler=vllm")
SERVERS = re.compile(r"posttrain (serve|studio) ")
SECONDS = 400.0  # for one command on a CPU


def commands(page: str) -> list[str]:
    """Those of a page's shell blocks, and those that are indented, without their comments."""
    shown = BLOCK.sub(lambda found: re.sub("^", "    ", found[2], flags=re.M) if found[1] == "sh" else "", page)
    found = [re.sub(r"\s+#.*", "", line.replace("\\\n", " ")) for line in COMMAND.findall(shown)]
    return [" ".join(line.split()) for line in found]


def needs_gpu(line: str) -> bool:
    return bool(GPU.search(line)) and " plan " not in line


def elsewhere(line: str) -> str:
    """Why it is not executed here; empty where it is."""
    reasons = known.ELSEWHERE_GPU if needs_gpu(line) else known.ELSEWHERE_CPU
    return next((why for word, why in reasons.items() if word in line), "")


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def listed(gpu: bool = True) -> list[str]:
    """Every command of the docs that needs a GPU, or every other one, once."""
    asked = [path for path in pages() if gpu or path.name not in known.PAGES_ELSEWHERE]
    return sorted({line for path in asked for line in commands(path.read_text()) if needs_gpu(line) == gpu})


def small(line: str) -> str:
    """What is added: of the first entry whose words stand in the command, a path by its last part."""
    words = {word.rsplit("/", 1)[-1] for word in line.split()}
    tables = [known.SMALL] if "model=" in line else [known.TOYS, known.SMALL]
    return next((more for table in tables for key, more in table.items() if words >= set(key.split())), "")


def environment(root: Path) -> dict[str, str]:
    """That of a command: this Python and the package in `root` come first, and no browser is opened."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}", "BROWSER": "true"}


class Lane:
    """A process that executes one command after the other: what is imported and compiled once serves all of them."""

    def __init__(self, root: Path = ROOT) -> None:
        own = environment(root)
        words = [sys.executable, __file__, "--lane"]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own)

    def ask(self, words: list[str], place: Path) -> tuple[int, str]:
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps([words, str(place)]) + "\n")
            self.process.stdin.flush()
            code, said = json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            return 124, "its process was ended: out of time, or a crash"
        return int(code), str(said)


def end_all(lanes: list[Lane]) -> None:
    for lane in lanes:
        lane.process.kill()


def serve() -> None:
    """The other side of a lane: a command a line from standard input, its exit code and last words to standard output."""
    from posttrain import cli

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        words, place = json.loads(line)
        os.chdir(place)
        log = os.open("log.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            if words[0] == "posttrain":
                code: object = cli.main(words[1:])
            else:
                sys.argv = [str(ROOT / words[1]), *words[2:]]
                runpy.run_path(sys.argv[0], run_name="__main__")
                code = 0
        except SystemExit as end:
            code = end.code or 0
        except Exception:  # what a command raises is its result, and the next one is to run
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os.close(log)
        said = Path("log.txt").read_text(errors="replace")[-2000:]
        answers.write(json.dumps([code if isinstance(code, int) else 1, said]) + "\n")
        answers.flush()


def words_of(line: str) -> list[str]:
    """A command with its small settings, and what is there in place of DIR, FOLDER and the like."""
    model, data = os.environ["MODEL"], os.environ["DATA"]
    sandbox = f" sandbox={os.environ.get('SANDBOX', 'auto')}" if re.search("run (code|agent) ", line) else ""
    text = f"{line} {small(line)}{sandbox}".replace("cuda", os.environ.get("DEVICE", "cuda"))
    text = re.sub(r"\bFOLDER\b|(?<=data=)(DIR\b|\.\.\.)", data, text)
    text = re.sub(r"\b(JUDGE|OTHER)\b", "tiny:nano", text)  # a small real model gives points to an empty answer, and is refused
    return shlex.split(re.sub(r"\bDIR\b(?!/)|(?<=model=)\.\.\.", model, text))


def result(line: str, began: float, code: int, said: str) -> dict[str, Any]:
    seconds = round(time.perf_counter() - began, 1)
    print(f"{code} {seconds} s  {line}", flush=True)
    found = {"command": line, "added": small(line), "code": code, "seconds": seconds}
    return found if went_through(found) else {**found, "said": said}


def went_through(one: dict[str, Any]) -> bool:
    """Whether a command ended as it should: with 0, or with the code that says what it found."""
    verdict = next((code for words, code in known.VERDICTS.items() if words in one["command"]), 0)
    return one["code"] in (0, verdict)


def holds(one: dict[str, Any]) -> bool:
    """Whether a result is good, and of the settings that are added now."""
    return went_through(one) and one["added"] == small(one["command"])


def execute(lane: Lane, line: str, place: Path) -> dict[str, Any]:
    """One command that needs a GPU, in a folder of its own."""
    known.make_files(place)
    began = time.perf_counter()
    code, said = 0, ""
    if "=REWARD" in line:  # the run of a reward model
        device = os.environ.get("DEVICE", "cuda")
        stage = {"stage": "reward_model", "name": "reward", "model": "DIR", "data": ["pairs.jsonl"], "steps": 1}
        (place / "reward.yaml").write_text(json.dumps({"stages": [stage]}).replace("DIR", os.environ["MODEL"]))
        code, said = lane.ask(words_of(f"posttrain run reward.yaml out=REWARD device={device}"), place)
    if code == 0:
        code, said = lane.ask(words_of(line), place)
    shutil.rmtree(place)
    return result(line, began, code, said)


class Desk:
    """Executes commands that need no GPU, one after the other in one folder."""

    def __init__(self, place: Path) -> None:
        self.place, self.lane, self.own = place, Lane(place), environment(place)

    def prepare(self, page: str, line: str) -> tuple[int, str]:
        """What the command names is there: files as they were, models, runs."""
        known.make_files(self.place)
        known.make_models(self.place)
        known.write_blocks(page, self.place)
        if "OUT" in line:  # of one script, and of all commands that go on with what it made
            folder = "out/" + re.findall(r"(\w+)\.py", line)[0]
            (self.place / folder).mkdir(parents=True, exist_ok=True)
            self.stands_for("OUT", folder)
        code, said = 0, ""
        for words, name, made, how in known.NEEDS:
            if words not in f"{line} ":
                continue
            if not made or not (self.place / made).exists():
                code, said = self.typed(how)
            if name:
                self.stands_for(name, made)
            if code or name:
                break
        return code, said

    def stands_for(self, name: str, made: str) -> None:
        """Within one command; what has the name is put aside."""
        path = self.place / name
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            path.rename(f"{path}.aside")
        path.symlink_to(self.place / made)

    def put_back(self) -> None:
        for path in [*self.place.glob("*.aside"), *self.place.glob("runs/*.aside")]:
            path.with_suffix("").unlink(missing_ok=True)
            path.rename(path.with_suffix(""))

    def text(self, line: str) -> str:
        """The command with its small settings; of two in one line, each with its own."""
        line = line.replace("model=...", "model=DIR").replace("data=...", "data=FOLDER")
        parts = re.split(r"( && |; )", line)
        made = "".join(part if n % 2 else f"{part} {small(part)}" for n, part in enumerate(parts))
        return f"{made} READY= PEERS= BIN={Path(sys.executable).parent}" if line.startswith("make ") else made

    def typed(self, text: str, given: str = "") -> tuple[int, str]:
        """A line of the shell, by the lane where it is one command of posttrain."""
        if text.startswith("posttrain ") and not given and not re.search("[;&|]", text):
            if self.lane.process.poll() is not None:
                self.lane = Lane(self.place)
            clock = threading.Timer(SECONDS, self.lane.process.kill)
            clock.start()
            answer = self.lane.ask(shlex.split(text), self.place)
            clock.cancel()
            return answer
        with self.started(text, given) as (process, log):
            with_limit(process, SECONDS)
        return process.returncode, log.read_text(errors="replace")[-2000:]

    @contextmanager
    def started(self, text: str, given: str = "") -> Iterator[tuple[subprocess.Popen[str], Path]]:
        log = self.place / "log.txt"
        (self.place / "typed.txt").write_text(given)
        with log.open("w") as out, (self.place / "typed.txt").open() as typed:
            process = subprocess.Popen(
                ["bash", "-c", text], cwd=self.place, env=self.own, stdin=typed, stdout=out, stderr=out, text=True,
                start_new_session=True,
            )  # fmt: skip
            try:
                yield process, log
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def served(self, text: str, ask: str = "") -> tuple[int, str]:
        """A server: started, asked one request, which is a command of the page or for its first page, and ended by a signal."""
        with self.started(f"exec {text}") as (process, log):
            until, found = time.monotonic() + SECONDS, None
            while not found and process.poll() is None and time.monotonic() < until:
                time.sleep(0.2)
                found = re.search(r"http://[\w.:]+\d(/v1)?", log.read_text(errors="replace"))
            if not found:
                return 1, f"no address: {log.read_text(errors='replace')[-2000:]}"
            if ask:
                line = re.sub(r"http://[\w.:]+/v1", found[0], ask)
                asked = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=SECONDS)
                code, said = asked.returncode, asked.stdout + asked.stderr
            else:
                with urllib.request.urlopen(f"{found[0]}/models" if found[1] else found[0], timeout=60) as answer:
                    code, said = int(answer.status != 200), ""
            process.send_signal(signal.SIGINT)
            with_limit(process, 60)
        return code or process.returncode, said or log.read_text(errors="replace")[-2000:]

    def execute(self, page: str, line: str) -> dict[str, Any]:
        code, said = self.prepare(page, line)
        began, text = time.perf_counter(), self.text(line)
        if code == 0 and line.startswith("curl "):
            (server,) = (one for one in commands(page) if one.startswith("posttrain serve"))
            code, said = self.served(self.text(server), text)
        elif code == 0 and SERVERS.match(line):
            code, said = self.served(text)
        elif code == 0:
            code, said = self.typed(text, next((given for words, given in known.TYPED.items() if line.startswith(words)), ""))
        self.put_back()
        return result(line, began, code, said)


def with_limit(process: subprocess.Popen[str], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


class Kept:
    """What ran, in a file that is written after each command: what is cut off later has not been for nothing."""

    def __init__(self, path: Path, wanted: list[str], device: str) -> None:
        before = json.loads(path.read_text())["commands"] if path.exists() else []
        self.path, self.wanted, self.lock = path, [line for line in wanted if not elsewhere(line)], threading.Lock()
        self.rows = [one for one in before if holds(one) and one["command"] in wanted]
        self.found = {"date": datetime.now(UTC).date().isoformat(), "device": device}

    def left(self) -> list[str]:
        ran = {one["command"] for one in self.rows if holds(one)}
        return [line for line in self.wanted if line not in ran]

    def add(self, one: dict[str, Any]) -> None:
        with self.lock:
            self.rows.append(one)
            rows = sorted(self.rows, key=lambda one: str(one["command"]))
            self.path.write_text(json.dumps({**self.found, "commands": rows, "pending": self.left()}, indent=1) + "\n")

    def report(self, todo: list[str]) -> int:
        failed = [line for line in todo if line in self.left()]
        print(json.dumps({"run": len(self.rows) - len(failed), "failed": failed}))
        return 1 if failed else 0


def on_cpu(given: argparse.Namespace) -> int:
    """One process at a time: figures of time are no part of it, and the machine stays usable."""
    place, kept = given.cpu.resolve(), Kept(given.out, listed(gpu=False), "cpu")
    todo = [line for line in kept.left() if re.search(given.only, line)]
    shutil.copytree(
        ROOT, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "runs", "build", "dist", "__pycache__")
    )
    desk, until = Desk(place), time.monotonic() + given.limit
    for page in (path.read_text() for path in pages()):
        for line in commands(page):
            if line in todo and line in kept.left() and time.monotonic() < until:
                kept.add(desk.execute(page, line))
    desk.lane.process.kill()
    return kept.report(todo)


def on_gpu(given: argparse.Namespace) -> int:
    kept = Kept(given.out, listed(), device())
    todo = [line for line in kept.left() if re.search(given.only, line)]
    todo.sort(key=lambda line: (line.startswith("python "), len(small(line))))  # those with few stages first
    if os.environ.get("DEVICE") == "cpu":
        todo = [line for line in todo if line.startswith("posttrain ")]
    lanes = [Lane() for _ in range(min(given.at_once, len(todo)))]
    waiting, lock = iter(list(enumerate(todo))), threading.Lock()

    def drain(lane: Lane, folder: Path) -> None:
        while True:
            with lock:
                number, line = next(waiting, (0, ""))
            if not line or lane.process.poll() is not None:
                return
            kept.add(execute(lane, line, folder / str(number)))

    with tempfile.TemporaryDirectory() as made:
        clock = threading.Timer(given.limit, end_all, args=[lanes])
        clock.start()
        threads = [threading.Thread(target=drain, args=(lane, Path(made))) for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        clock.cancel()
        end_all(lanes)
    return kept.report(todo)


def main() -> int:
    if "--lane" in sys.argv:
        serve()
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu", type=Path, metavar="FOLDER", help="execute those that need no GPU, in this folder")
    parser.add_argument("--at-once", type=int, default=4, help="commands that need a GPU")
    parser.add_argument("--only", default="", help="commands that match this pattern")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds in all; what has not ended then has failed")
    given = parser.parse_args()
    return on_cpu(given) if given.cpu else on_gpu(given)


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
