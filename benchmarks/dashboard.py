"""How quick the dashboard is in Chromium: as ratios to an empty Streamlit page served in the same run, and absolute.

    python -m benchmarks.dashboard                  1 GB of captures
    python -m benchmarks.dashboard --samples 1      the short run

Both pages are started in turn, round after round, so that a busy machine slows them alike. Choices are keys that are
pressed on the attention page: a head is drawn from what the browser has, a layer or a sample is asked of the server; a
time ends with the first frame that shows the choice. `a change` says what the websocket brought for it.
"""

import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
from playwright.sync_api import Browser, Page, sync_playwright
from pydantic import Field

from cache.batch import Batch
from cache.recording import write_capture
from smelt_interp.config import ModelConfig
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import UserError, run_command
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Table, compact, print_table
from smelt_interp.validation import Seed, validated

ROOT = Path(__file__).parents[1]
PATTERN = "attn.hook_pattern"
EMPTY = "import streamlit as st\nst.title('Empty')\n"
SETTINGS = ["--server.headless=true", "--browser.gatherUsageStats=false", "--server.fileWatcherType=none"]
# Press a key on the canvas, and wait for the frame that shows what it chose.
PRESS = """async (key) => {
  const host = [...document.querySelectorAll('[data-testid=stBidiComponentIsolated]')].find(
    (each) => each.shadowRoot?.querySelector('.canvas'));
  const canvas = host.shadowRoot.querySelector('.canvas'), view = host.shadowRoot.view;
  const before = performance.now(), scene = view.scene;
  canvas.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
  const asked = canvas.classList.contains('waiting');
  const frame = () => new Promise((shown) => requestAnimationFrame(shown));
  do await frame(); while (asked && (view.scene === scene || canvas.classList.contains('waiting')));
  return performance.now() - before;
}"""


@validated
class Options:
    """How much is served, how often each thing is timed."""

    samples: Annotated[int, Field(ge=1, le=64)] = 5
    """Samples of 1024 tokens, 16 heads, 6 steps: about 200 MB each."""
    rounds: Annotated[int, Field(ge=1, le=100)] = 5
    seed: Seed = 0


class Times(NamedTuple):
    """Of one page, in seconds, a number a round."""

    ready: list[float]
    first: list[float]


def main() -> None:
    """Print the table."""
    options = parse(Options, prog="python -m benchmarks.dashboard", description=__doc__ or "")
    path = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    if path is None:
        raise UserError("Chromium must be installed; got none on the path: set CHROMIUM to its path")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        (folder / "empty.py").write_text(EMPTY)
        captures = folder / "captures"
        num_bytes = write_captures(captures, options)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        empty, dashboard = Times([], []), Times([], [])
        for _ in range(options.rounds):
            for script, words, times in ((str(folder / "empty.py"), [], empty),
                                         ("app/main.py", ["--", "--captures", str(captures)], dashboard)):  # fmt: skip
                with served(script, words) as server:
                    times.ready.append(server.ready)
                    times.first.append(first_page(browser, server.url))
        rows = [ratio_row("server ready", empty.ready, dashboard.ready, 1.5),
                ratio_row("first page", empty.first, dashboard.first, 2.5)]  # fmt: skip
        with served("app/main.py", ["--", "--captures", str(captures)]) as server:
            rows += changes(browser, server.url, "short", options.rounds)
            rows += changes(browser, server.url, "long", options.rounds)
            rows.append(["memory of the server", "-", f"{compact(server.memory(), digits=3)}B", "-", "500 MB"])
        browser.close()
    title = f"dashboard in Chromium, {compact(num_bytes, digits=3)}B of captures; median of {options.rounds}"
    print_table(Table(title, ["what", "empty page", "dashboard", "ratio", "asked"], rows, ()))


# What is served


def write_captures(folder: Path, options: Options) -> int:
    """Two captures of random attention: 160 tokens with 8 heads, and 1024 with 16. The bytes that they take."""
    for name, heads, length, samples in (("short", 8, 160, 8), ("long", 16, 1024, options.samples)):
        config = ModelConfig(
            num_layers=4, width=8 * heads, num_heads=heads, num_kv_heads=heads, head_width=8, num_experts=8, top_k=2,
            expert_width=8, vocab_size=259, context=length, loop_start=1, loop_stop=3, num_visits=2, loop_scale=0.5,
        )  # fmt: skip
        write_capture(folder / name, [random_batch(config, length, row, options.seed) for row in range(samples)])
    return sum(path.stat().st_size for path in folder.glob("*/*.h5"))


def random_batch(config: ModelConfig, length: int, row: int, seed: int) -> Batch:
    """One sample of code whose attention is random and causal at every step."""
    drawn = load_samples(DataOptions(data=("code",), samples=row + 1, length=length), length, BYTES)
    generator = np.random.default_rng([seed, row])
    causal_TS = np.tril(np.ones((length, length), np.float32))
    sites = {}
    for step in range(len(config.architecture().steps)):
        pattern_QTS = np.exp(2 * generator.standard_normal((config.num_heads, length, length), np.float32)) * causal_TS
        pattern_QTS /= pattern_QTS.sum(-1, keepdims=True)
        sites[step, PATTERN] = pattern_QTS[None].astype(np.float16)
    shape = (1, length)
    return Batch(
        architecture=config.architecture(), samples=drawn.rows(slice(row, row + 1)),
        sample_ids=np.array([row], np.int64), logprob_BT=np.zeros(shape, np.float32),
        argmax_BT=np.zeros(shape, np.int32), sites=sites, heads={PATTERN: tuple(range(config.num_heads))},
    )  # fmt: skip


class Server(NamedTuple):
    """A page that is served."""

    url: str
    ready: float
    """Seconds until it answered."""
    process: "subprocess.Popen[bytes]"

    def memory(self) -> int:
        """Bytes that the server holds."""
        (line,) = [line for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
                   if line.startswith("VmRSS")]  # fmt: skip
        return int(line.split()[1]) * 1024


@contextmanager
def served(script: str, words: list[str]) -> Iterator[Server]:
    """A script under `streamlit run`, until the block ends."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "streamlit", "run", script, f"--server.port={port}", *SETTINGS, *words]
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not answers(f"http://localhost:{port}/_stcore/health"):
                if process.poll() is not None or time.perf_counter() - began > 120:
                    raise UserError(f"streamlit must serve {script} within two minutes; got nothing on {port}")
                time.sleep(0.01)
            yield Server(f"http://localhost:{port}", time.perf_counter() - began, process)
        finally:
            process.terminate()


def answers(url: str) -> bool:
    """Whether somebody serves it."""
    try:
        with urlopen(url):
            return True
    except URLError:
        return False


# What is timed


def first_page(browser: Browser, url: str) -> float:
    """Seconds until a new visitor's page is drawn and its script has ended."""
    page = browser.new_context().new_page()
    began = time.perf_counter()
    page.goto(url)
    page.get_by_role("heading", level=1).wait_for(timeout=60_000)
    page.locator('[data-testid=stApp][data-test-script-state="notRunning"]').wait_for(timeout=60_000)
    seconds = time.perf_counter() - began
    page.context.close()
    return seconds


def changes(browser: Browser, url: str, capture: str, rounds: int) -> list[list[str]]:
    """Rows: another head, layer, sample on the attention page of a capture, with what each brought."""
    page = browser.new_context(viewport={"width": 1440, "height": 1000}).new_page()
    received: list[int] = []
    page.on("websocket", lambda ws: ws.on("framereceived", lambda data: received.append(len(data))))
    page.goto(f"{url}/attention?capture={capture}")
    page.locator("canvas.map").first.wait_for(timeout=120_000)
    asked = {"short": ("50 ms", "250 ms", "250 ms"), "long": ("1 s, 2 MB",) * 3}[capture]
    rows = []
    for (what, there, back), limit in zip(
        (("head", "ArrowRight", "ArrowLeft"), ("layer", "ArrowDown", "ArrowUp"), ("sample", "PageDown", "PageUp")),
        asked, strict=True,
    ):  # fmt: skip
        seconds, sizes = [], []
        for at in range(rounds):
            settle(page)
            received.clear()
            seconds.append(page.evaluate(PRESS, back if at % 2 else there) / 1e3)
            settle(page)
            sizes.append(sum(received))
        took = f"{1e3 * statistics.median(seconds):.0f} ms, {compact(statistics.median(sizes), digits=3)}B a change"
        rows.append([f"{capture}: another {what}", "-", took, "-", limit])
    page.context.close()
    return rows


def settle(page: Page) -> None:
    """Until the server has answered everything."""
    page.wait_for_timeout(700)
    page.locator('[data-testid=stApp][data-test-script-state="notRunning"]').wait_for(timeout=60_000)


def ratio_row(what: str, empty: list[float], dashboard: list[float], most: float) -> list[str]:
    """The medians, and the median of the rounds' ratios."""
    ratio = statistics.median(mine / base for mine, base in zip(dashboard, empty, strict=True))
    return [what, *(f"{statistics.median(times):.2f} s" for times in (empty, dashboard)), f"{ratio:.2f}", f"{most:g}"]


if __name__ == "__main__":
    run_command(main)
