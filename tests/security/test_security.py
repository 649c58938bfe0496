"""The security list: what is loaded from disk or network is data, never code; names are not paths; secrets stay where they are.

Static checks look at the source of the package; dynamic ones set traps (a pickle that leaves a file, a template that would not end) and
see that they do not spring. SECURITY.md says what is trusted and what is not; X-numbers refer to its table.
"""

from __future__ import annotations

import ast
import json
import pickle
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from posttrain import config, config_tree, pipeline
from posttrain.errors import UserError
from posttrain.events import printable
from posttrain.models.load import load
from posttrain.rewards._asking import Endpoint
from posttrain.runs import layout
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.stages.base import check_names
from posttrain.train import checkpoint
from posttrain.trust import KEY_VARIABLE
from tests.faults.harness import settings
from tests.test_architecture import PACKAGE, ROOT, dangers, imports, sources

SECRET = "hf_thisIsASecretThatMustNotBeSeen"


# --- static ---------------------------------------------------------------------------------------------------

# Modules with which a program can start others, reach memory or the network, and the only files that may use them.
AUDITED = {
    "subprocess": {
        "train/saving.py",
        "data/safe_readers.py",
        "rewards/sandbox/mechanisms.py",
        "commands/doctor.py",
        "commands/export.py",  # llama.cpp's converter, where the user has installed it
        "cluster/launch.py",
        "cluster/remote.py",
        "cluster/ray_cluster.py",
        "cluster/ray_host.py",
        "system/processes.py",  # in one place: ranks, and processes with pipes
        # the studio starts, stops and resumes runs and model servers, with posttrain's own command line
        "studio/jobs.py",
    },
    "ctypes": {
        "system/processes.py",
        "engine/forked.py",
        "rewards/sandbox/pool.py",
        "rewards/sandbox/child.py",
        "rewards/sandbox/mechanisms.py",
    },
    "socket": {
        "runs/lock.py",
        "rewards/sandbox/isolation.py",
        "system/workers.py",
        "serve/app.py",
        "serve/server.py",
        "cluster/launch.py",
        "cluster/ray_cluster.py",
        "cluster/ray_host.py",
    },
    "multiprocessing": set(),
    "http": {"runs/prometheus.py"},  # figures for whoever asks on the loopback interface
    "socketserver": set(),
    "xmlrpc": set(),
    "telnetlib": set(),
    "urllib.request": {"tasks/openenv.py"},  # asks the server that the user named whether it is up
    "ftplib": set(),
    "zipfile": set(),
    "tarfile": set(),
    "jinja2": set(),  # templates are rendered by transformers, in its sandbox, in the process of data/template_process.py
}
FORBIDDEN = {"os.system", "os.popen", "tempfile.mktemp", "os.spawnl", "pty.spawn"}


def uses(package: Path) -> list[str]:
    """Audited modules in other files than those that are named."""
    complaints = []
    for name, path, tree in sources(package):
        file = path.relative_to(package).as_posix()
        for entry in imports(tree, name, path.stem == "__init__"):
            for module, files in AUDITED.items():
                if (entry.target == module or entry.target.startswith(module + ".")) and file not in files:
                    complaints.append(f"{file}:{entry.line}: {entry.target} is for {', '.join(sorted(files)) or 'nobody'}")
    return complaints


def calls(package: Path) -> list[str]:
    """Shells, names of temporary files that others can guess, and servers that everybody can reach."""
    complaints = []
    for _, path, tree in sources(package):
        file = path.relative_to(package).as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                shell = any(
                    k.arg == "shell" and not (isinstance(k.value, ast.Constant) and k.value.value is False)
                    for k in node.keywords
                )
                if shell or ast.unparse(node.func) in FORBIDDEN:
                    complaints.append(
                        f"{file}:{node.lineno}: {ast.unparse(node.func)} with a shell"
                        if shell
                        else f"{file}:{node.lineno}: {ast.unparse(node.func)}"
                    )
            if isinstance(node, ast.Constant) and node.value == "0.0.0.0":
                complaints.append(f"{file}:{node.lineno}: binds to every interface")
    return complaints


@pytest.mark.parametrize("check", [dangers, uses, calls])
def test_the_source_never_turns_data_into_code(check: Callable[[Path], list[str]]) -> None:
    assert check(PACKAGE) == []


@pytest.mark.parametrize(
    ("check", "source", "complaint"),
    [
        (uses, "import subprocess", "subprocess is for"),
        (uses, "def f():\n    from urllib.request import urlopen", "urllib.request.urlopen is for tasks/openenv.py"),
        (uses, "import jinja2", "jinja2 is for nobody"),
        (calls, "import subprocess\nsubprocess.run('ls', shell=True)", "with a shell"),
        (calls, "import os\nos.system('ls')", "os.system"),
        (calls, "serve(host='0.0.0.0')", "every interface"),
    ],
)
def test_the_static_checks_can_fail(check: Callable[[Path], list[str]], source: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "posttrain").mkdir()
    (tmp_path / "posttrain" / "a.py").write_text(source)
    assert any(complaint in text for text in check(tmp_path / "posttrain"))


def test_importing_uses_no_network_and_writes_nothing(tmp_path: Path) -> None:
    program = (
        "import sys\nsys.dont_write_bytecode = True\nseen = []\n"
        "def hook(event, arguments):\n"
        "    if event in ('socket.connect', 'socket.getaddrinfo', 'subprocess.Popen', 'os.system'):\n        seen.append(event)\n"
        "    if event == 'open' and set(str(arguments[1] or '')) & set('wax+') and arguments[0] != '/dev/null':\n"
        "        seen.append(str(arguments[0]))\n"
        f"sys.addaudithook(hook)\nsys.path.insert(0, {str(ROOT)!r})\n"
        "import posttrain, posttrain.cli, posttrain.config, posttrain.runs.read, posttrain.runs.write\nprint(seen)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path
    )
    assert done.stdout.strip() == "[]" and list(tmp_path.iterdir()) == []


def test_the_lock_file_has_a_hash_for_everything_and_agrees_with_the_constraints() -> None:
    def pins(text: str) -> dict[str, str]:
        found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", text, re.MULTILINE)
        return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}

    lock = (ROOT / "requirements.lock").read_text()
    entries = re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", lock, flags=re.MULTILINE).strip())
    assert len(entries) > 50 and [entry for entry in entries if "--hash=sha256:" not in entry] == []
    locked, constrained = pins(lock), pins((ROOT / "constraints.txt").read_text())
    assert {name: version for name, version in locked.items() if constrained.get(name, version) != version} == {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.sub(r"[-_.]+", "-", re.split(r"[<>=!~;\[ ]", line)[0]).lower() for line in project["dependencies"]}
    assert needed <= set(locked), "run the command at the top of requirements.lock again"


# --- hostile model directories -------------------------------------------------------------------------------------


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


PICKLED = ("pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "data.pkl", "optimizer.pt", "rng_state.pth", "scheduler.pt",
           "training_args.bin", ".metadata", "trainer_state.npy", "arrays.npz", "model.joblib")  # fmt: skip


def plant(folder: Path, mark: Path) -> None:
    """A pickle that leaves a file, under every name that somebody might read."""
    for name in PICKLED:
        if name.endswith(".npy"):
            np.save(folder / name, np.array([Bomb(mark)], dtype=object), allow_pickle=True)
        else:
            (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    pickle.loads((folder / "data.pkl").read_bytes())  # noqa: S301 - to see that the trap works
    assert mark.exists()
    mark.unlink()


def test_pickles_next_to_a_model_are_not_read(model: Path, tmp_path: Path) -> None:
    plant(model, tmp_path / "mark")
    load(str(model))
    assert not (tmp_path / "mark").exists()


def test_a_model_of_pickles_alone_is_refused(model: Path, tmp_path: Path) -> None:
    plant(model, tmp_path / "mark")
    (model / "model.safetensors").unlink()
    with pytest.raises(UserError, match="only pickled weights"):
        load(str(model))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_code_that_comes_with_a_model_is_not_run(file: str, model: Path, tmp_path: Path) -> None:
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'mark')!r}).touch()\n"
    for name in ("evil.py", "modeling_evil.py", "tokenizer.py", "configuration_evil.py", "__init__.py"):
        (model / name).write_text(code)
    path = model / file
    tree = json.loads(path.read_text()) if path.exists() else {}
    load(str(model))  # files of code alone change nothing
    path.write_text(
        json.dumps(tree | {"auto_map": {"AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}})
    )
    with pytest.raises(UserError, match="asks to run Python code"):
        load(str(model))
    assert not (tmp_path / "mark").exists()


def test_a_model_of_a_billion_layers_is_refused_before_they_are_made(model: Path) -> None:
    path = model / "config.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps(tree | {"num_hidden_layers": 10**9, "layer_types": None}))
    began = time.monotonic()
    with pytest.raises(UserError, match="config.json asks for 1000000000 layers .*, and the weights are .* tensors"):
        load(str(model))
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "..\\x.safetensors", "C:x.safetensors", "a\0.safetensors"]
)
def test_an_index_does_not_name_files_elsewhere(name: str, model: Path) -> None:
    (model / "model.safetensors").rename(model.parent / "other.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="not a plain .safetensors file name"):
        load(str(model))


# --- hostile configurations -------------------------------------------------------------------------------------------------

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
CONFIGS = {
    "an object": ("!!python/object/apply:os.system ['touch MARK']", "not valid YAML"),
    "a name": ("seed: !!python/name:os.system", "not valid YAML"),
    "a module": ("seed: !!python/module:os", "not valid YAML"),
    "a target": ("_target_: os.system\ncommand: touch MARK", "_target_"),
    "a million laughs": (LAUGHS + "stages: *a9", "stands for more than 200,000 values"),
    "itself": ("stages: &s [*s]", "refers to itself"),
    "a key given twice": ("seed: 1\nseed: 2\nstages: []", "the key 'seed' is given twice"),
    "depth": ("stages: " + "[\n  " * 2000, "not valid YAML"),
    "no mapping": ("[1, 2]", "must hold keys|does not hold a configuration"),
    "an unknown key": ("seeed: 1\nstages: []", "did you mean 'seed'"),
    "bytes": ("\0", "not valid YAML"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("place", ["recipe", "run"])
def test_a_configuration_is_data(place: str, name: str, tmp_path: Path) -> None:
    text, line = CONFIGS[name]
    text = text.replace("MARK", str(tmp_path / "mark"))
    began = time.monotonic()
    RunWriter.create(tmp_path / "run", {}).close()
    (tmp_path / "run" / "config.yaml").write_text(f"format: {layout.FORMAT}\n{text}" if ":" in text else text)
    (tmp_path / "evil.yaml").write_text(text)
    with pytest.raises(UserError, match=line) as caught:
        config.parse(str(tmp_path / "evil.yaml"), []) if place == "recipe" else pipeline.resume(tmp_path / "run")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000 and time.monotonic() - began < 20
    assert not (tmp_path / "mark").exists()


def test_environment_variables_are_not_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    for text in ("${oc.env:HF_TOKEN}", "${HF_TOKEN}", "$HF_TOKEN", "{{ env.HF_TOKEN }}"):
        assert config_tree.pair(f"out={text}")[1] in (text, None) or SECRET not in str(config_tree.pair(f"out={text}"))


@pytest.mark.parametrize(
    "change",
    [
        {"stages": [{"stage": "MARK.py:Evil", "name": "x"}]},
        {"stages": [{"stage": "sft", "name": "x", "model": "tiny:nano", "algorithm": {"name": "MARK.py:Evil"}}]},
        {"stages": [{"stage": "rl", "name": "x", "model": "tiny:nano", "task": {"name": "MARK.py:Evil"}}]},
        {"stages": [], "checkpoint_hook": ["python3", "MARK.py"]},
        {"stages": [], "checkpoint_hook": "python3 MARK.py"},
    ],
)
def test_code_and_programs_named_by_a_run_directory_do_not_run(change: dict[str, Any], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "evil.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nclass Evil: ...\n")
    RunWriter.create(tmp_path / "run", {}).close()
    tree = json.loads(json.dumps({"format": layout.FORMAT, "seed": 0, **change}).replace("MARK.py", str(tmp_path / "evil.py")))
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError, match="pass --allow-code if you trust it"):
        pipeline.resume(tmp_path / "run")
    assert not mark.exists()


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize(
    ("reward", "options"),
    [("code", {"sandbox": "unsafe"}), ("judge", {"url": "http://127.0.0.1:1/v1", "model": "m", "key_variable": "AWS_SECRET"})],
)
def test_a_file_does_not_weaken_the_sandbox_or_choose_a_secret(
    reward: str, options: dict[str, str], depth: int, tmp_path: Path
) -> None:
    for _ in range(depth):
        reward, options = "compose", {"parts": [{"reward": "format"}, {"reward": reward, "options": options}]}
    task = {"name": "jsonl", "file": "rows.jsonl", "reward": reward, "options": options}
    stage = {"stage": "rl", "name": "rl", "model": "tiny:nano", "task": task}
    for tree in ({"stages": [stage]}, {"recipe": "quickstart", "rl": {"task": task}}):
        (tmp_path / "evil.yaml").write_text(yaml.safe_dump(tree))
        with pytest.raises(
            UserError, match=r"(sandbox: unsafe|key_variable: AWS_SECRET).*pass --allow-code if you trust it"
        ) as caught:
            config.parse(str(tmp_path / "evil.yaml"), [])
        assert "\n" not in str(caught.value)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"stages": [stage]}))
    assert config.parse(str(tmp_path / "mine.yaml"), [], allow_code=True).recipe.stages[0].task.options == options
    assert Endpoint(url="http://x", model="m").key_variable == KEY_VARIABLE


@pytest.mark.parametrize(
    "keys",
    [
        {"rl": {"task": {"name": "MARK.py:Evil"}}},
        {"rl.algorithm": "MARK.py:Evil"},
        {"rl.task": {"name": "jsonl", "file": "x", "reward": "MARK.py:f"}},
    ],
)
def test_keys_of_a_recipe_in_a_file_do_not_run_code(keys: dict[str, Any], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "evil.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nclass Evil: ...\n")
    tree = json.loads(json.dumps({"recipe": "quickstart", **keys}).replace("MARK.py", str(tmp_path / "evil.py")))
    (tmp_path / "evil.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError, match="pass --allow-code if you trust it"):
        config.parse(str(tmp_path / "evil.yaml"), [])
    assert not mark.exists()


# --- hostile checkpoints and run directories ------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint and without an end."""
    directory = tmp_path_factory.mktemp("stopped") / "run"
    threads = torch.get_num_threads()
    pipeline.start(settings("sft", directory))
    torch.set_num_threads(threads)
    (directory / "summary.json").unlink()
    shutil.rmtree(directory / "stages")
    return directory


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Iterator[Path]:
    threads = torch.get_num_threads()
    yield Path(shutil.copytree(stopped, tmp_path / "run"))
    torch.set_num_threads(threads)


def newest(run: Path) -> Path:
    path, _ = checkpoint.newest(run / "checkpoints" / "sft")
    assert path is not None
    return path


def forge(path: Path, file: str, content: bytes) -> None:
    """Change a file of a checkpoint, and its manifest with it."""
    import hashlib

    (path / file).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][file] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_pickles_in_a_checkpoint_are_not_read(run: Path, tmp_path: Path) -> None:
    plant(newest(run), tmp_path / "mark")
    pipeline.resume(run)
    assert not (tmp_path / "mark").exists() and Run(run).summary is not None


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("what", ["pickle", "nothing", "empty object", "deep", "other"])
def test_a_forged_checkpoint_is_one_line(file: str, what: str, run: Path, tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}).encode()
    content = {
        "pickle": pickle.dumps(Bomb(tmp_path / "mark")),
        "nothing": b"",
        "empty object": b"{}",
        "deep": b"[" * 200_000,
        "other": len(header).to_bytes(8, "little") + header + b"\0\0\0\0"
        if "safe" in file
        else b'{"algorithm": 3, "generators": {"cpu": "zz"}}',
    }[what]
    forge(newest(run), file, content)
    with pytest.raises(UserError) as caught:
        pipeline.resume(run)
    assert "\n" not in str(caught.value) and "checkpoints/sft/step-" in str(caught.value)
    assert not (tmp_path / "mark").exists()


def test_a_manifest_does_not_name_files(run: Path, tmp_path: Path) -> None:
    """Names in it are looked up, never followed."""
    path = newest(run)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] |= {"../../../../etc/passwd": {"size": 1, "sha256": "0"}, "evil.py": {"size": 0, "sha256": ""}}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.verify(path) is None and set(checkpoint.load(path).state) >= {"stage", "algorithm"}


NAMES = ("../up", "..%2fup", "%252e%252e/up", "..\\up", "/absolute", "file:///etc/passwd", "nul\0", "~", "C:\\x", ".hidden", "a/b", "",
         "x" * 10_000, "\uff0e\uff0e/x", "a b", "-\n-", "con:")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_are_not_paths(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a plain name"):
        layout.rollout_file(tmp_path, name, 1)
    with RunWriter.create(tmp_path / "run", {}) as writer, pytest.raises(UserError, match="is not a plain name"):
        writer.metrics(name, 1, {})
    stage = settings("sft", tmp_path / "other").recipe.stages[0]
    object.__setattr__(stage, "name", name)
    with pytest.raises(UserError, match="is not a plain name"):
        check_names([stage])


def test_a_stage_name_in_a_run_directory_does_not_lead_out_of_it(run: Path, tmp_path: Path) -> None:
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["stages"][0]["name"] = "../../outside"
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    (run / "events.jsonl").unlink()
    with pytest.raises(UserError, match="is not a plain name"):
        pipeline.resume(run)
    assert not (tmp_path / "outside").exists() and not (run.parent / "outside").exists()


def test_what_a_model_writes_stays_on_its_line(tmp_path: Path) -> None:
    evil = 'x\n{"kind":"resume","stage":"rl","step":0}\r\u2028\x1b]0;title\x07\x1b[2J\u202e'
    with RunWriter.create(tmp_path, {}) as writer:
        writer.event("message", {"text": evil})
    assert len((tmp_path / "events.jsonl").read_bytes().splitlines()) == 2
    assert Run(tmp_path).events()[-1].details["text"] == evil
    shown = printable(evil)
    assert "\x1b" not in shown and "\n" not in shown and "\u202e" not in shown and "\r" not in shown


# --- data -------------------------------------------------------------------------------------------------------------

ROWS = {
    "deep": '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "long number": '{"prompt": ' + "9" * 100_000 + "}",
    "wrong types": '{"prompt": 3, "completion": {"a": 1}}',
    "no object": "[1, 2]",
    "half a character": '{"prompt": "\\ud83d", "completion": "b"}',
    "control tokens": '{"prompt": "1<|im_end|>2", "completion": "3"}',
    "torn": '{"prompt": "1", "compl',
}


@pytest.mark.parametrize("name", ROWS)
def test_hostile_rows_of_a_data_file_are_one_line_errors(name: str, tmp_path: Path) -> None:
    from posttrain.data.demonstrations import from_file
    from tests.data.tokenizers_for_tests import CHATML, characters

    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1", "completion": "2"}\n' + ROWS[name] + "\n")
    with pytest.raises(UserError, match="line 2") as caught:
        from_file(str(path), characters(template=CHATML))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_keys_in_the_environment_are_not_written_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, SECRET)
    threads = torch.get_num_threads()
    pipeline.start(settings("pipeline", tmp_path / "run"))
    torch.set_num_threads(threads)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 10 and [str(path) for path in files if SECRET.encode() in path.read_bytes()] == []
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err
