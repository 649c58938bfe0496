"""Executes the commands of docs/ten-minutes.md in an empty folder and environment, and times each block.

`pip install posttrain` installs a wheel of this checkout, with the versions of constraints.txt; nothing else in the page is changed.
Prints one JSON line last. The exit code is 1 if a command fails, an answer is wrong, or the whole takes more than ten minutes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 600.0  # seconds


def blocks(page: str) -> list[tuple[str, str]]:
    """The commands of a page with the heading that they stand under."""
    parts = re.split(r"^## (.*)\n", page, flags=re.M)[1:]
    return [
        (title, code)
        for title, body in zip(parts[::2], parts[1::2], strict=True)
        for code in re.findall(r"```sh\n(.*?)```", body, re.S)
    ]


def main() -> int:
    found = blocks((ROOT / "docs" / "ten-minutes.md").read_text())
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="ten-minutes-") as made:
        wheels, folder = Path(made, "wheels"), Path(made, "empty")
        folder.mkdir()
        build = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(wheels),
            str(ROOT),
        ]
        subprocess.run(build, check=True)
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "VIRTUAL_ENV", "PIP_CONSTRAINT"))
        }
        links = f"{wheels} {os.environ.get('PIP_FIND_LINKS', '')}".strip()
        own |= {"PIP_FIND_LINKS": links, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_NO_CACHE_DIR": "1"}
        said = ""
        for title, code in found:
            print(f"== {title}", flush=True)
            began = time.perf_counter()
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", code], cwd=folder, env=own, stdout=subprocess.PIPE, text=True, check=False
            )
            seconds[title] = round(time.perf_counter() - began, 1)
            said += done.stdout
            print(done.stdout[-3000:], flush=True)
            if done.returncode:
                return 1
        summary = json.loads((folder / "tuned" / "summary.json").read_text())
        whole = (folder / "model" / "README.md").is_file()
    took = sum(seconds.values())
    figures = {key: summary[key] for key in ("before", "after", "versions")}
    print(
        json.dumps(
            {
                "seconds": seconds,
                "all": round(took, 1),
                "limit": LIMIT,
                "load": os.getloadavg()[0],
                "cores": os.cpu_count(),
                **figures,
            }
        )
    )
    return 0 if took <= LIMIT and whole and "1987-03-09" in said else 1


if __name__ == "__main__":
    sys.exit(main())
