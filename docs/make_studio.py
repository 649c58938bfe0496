"""Draws docs/studio_run.png and docs/studio_phone.png: a finished run in the studio, on a desktop and on a phone in the dark.

posttrain run quickstart out=runs/quickstart && python docs/make_studio.py runs/quickstart

It needs the packages of posttrain[studio], playwright and chromium (`make test-studio` installs the last two).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from posttrain.studio.library import path_id

HERE = Path(__file__).parent
VIEWS = {  # width, height, colour scheme
    "studio_run": (1280, 800, "light"),
    "studio_phone": (390, 844, "dark"),
}


def main() -> None:
    run = Path(sys.argv[1]).resolve()
    command = [sys.executable, "-m", "posttrain", "studio", str(run.parent), "--port", "0"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as studio,
        sync_playwright() as playwright,
    ):
        assert studio.stdout
        try:
            address = next(line.split()[1].rstrip("/") for line in studio.stdout if line.startswith("studio: "))
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for name, (width, height, colours) in VIEWS.items():
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=colours)  # type: ignore[arg-type]
                page.goto(f"{address}/run/{path_id(run)}")
                page.wait_for_selector("main canvas, main svg")
                page.wait_for_timeout(1500)  # until the curves are drawn
                page.screenshot(path=HERE / f"{name}.png")
            browser.close()
        finally:
            studio.terminate()


if __name__ == "__main__":
    main()
