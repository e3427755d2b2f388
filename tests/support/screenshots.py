"""Pictures of the dashboard's pages, light and dark, in docs/screenshots/.

python -m tests.support.screenshots --captures captures      after `make demo`, which records them, and after
    python -m probes.answer_lens --ckpt checkpoints/demo-smelt --capture captures/demo-smelt-dyck
    python -m probes.reproduction --pair checkpoints/demo-smelt checkpoints/demo-baseline --out captures
"""

import os
import shutil
from io import BytesIO
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from benchmarks.dashboard import served
from smelt_interp.errors import UserError, run_command
from smelt_interp.terminal.command_line import parse
from smelt_interp.validation import validated

FOLDER = Path(__file__).parents[2] / "docs" / "screenshots"
SIZE = {"width": 1280, "height": 960}
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
COLOURS = 128
"""Of a picture's palette."""
MOST_WAITED = 240_000
"""Milliseconds for a probe that is measured now."""
LOOPED = "capture=demo-smelt-dyck"
VIEWS = {
    "captures": f"?{LOOPED}&with=demo-baseline-dyck",
    "overview": f"overview?{LOOPED}",
    "samples": f"samples?{LOOPED}&colour=start+mass",
    "attention": f"attention?{LOOPED}&second=demo-baseline-dyck&query=40",
    "experts": f"experts?{LOOPED}",
    "answers": f"answers?{LOOPED}",
    "probe": f"attention_sink?{LOOPED}",
    "reproduction": "reproduction",
    "live": "live?network=checkpoints/demo-smelt&edit=clamp",
    "budget": "budget",
    "matching": "matching",
    "scaling": "scaling",
    "serving": "serving",
}
"""What each picture shows, by its name."""


@validated
class Options:
    """Whose pages are shown."""

    captures: Path = Path("captures")
    """Folder with the captures that `make demo` records."""
    only: tuple[str, ...] = tuple(VIEWS)
    """Names of the pictures to make."""


def main() -> None:
    """Write every picture and say what it weighs."""
    options = parse(Options, prog="python -m tests.support.screenshots", description=__doc__ or "")
    path = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    if path is None:
        raise UserError("Chromium must be installed; got none on the path: set CHROMIUM to its path")
    FOLDER.mkdir(exist_ok=True)
    words = ["--", "--captures", str(options.captures)]
    with sync_playwright() as playwright, served("app/main.py", words) as server:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE, reduced_motion="reduce")
        page.set_default_timeout(MOST_WAITED)
        for name in options.only:
            page.goto(f"{server.url}/{VIEWS[name]}")
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                wait_until_drawn(page)
                target = FOLDER / f"{name}-{scheme}.png"
                target.write_bytes(picture(page))
                print(f"{target.name}: {target.stat().st_size / 1e3:.0f} kB", flush=True)
        browser.close()


def wait_until_drawn(page: Page) -> None:
    """The script has ended and nothing on the page is a placeholder."""
    page.get_by_role("heading", level=1).wait_for()
    page.locator('[data-testid=stApp][data-test-script-state="notRunning"]').wait_for()
    page.wait_for_function("!document.querySelector('[data-testid=stSkeleton], [data-testid=stSpinner]')")
    page.wait_for_timeout(1500)  # charts and fonts


def picture(page: Page) -> bytes:
    """What is seen of the page, as a PNG of few colours."""
    seen = Image.open(BytesIO(page.screenshot())).convert("RGB")
    written = BytesIO()
    seen.quantize(COLOURS, dither=Image.Dither.NONE).save(written, "png", optimize=True)
    return written.getvalue()


if __name__ == "__main__":
    run_command(main)
