"""The dashboard as a visitor meets it: `streamlit run app/main.py` in Chromium."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import BrowserContext, ConsoleMessage, Page, Request, sync_playwright

from cache.recording import write_capture
from cache.store import Capture
from model.families.opening import open_network
from probes.running import catalog, command, report
from probes.running.live import Change, Kind, look, made
from probes.running.source import Source
from probes.running.stored import keep_result
from tests.support.app_captures import episodes, plant_answers
from tests.support.planted import BASELINE, LOOPED

ROOT = Path(__file__).parents[2]
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]

NUMBERS = {"Budget calculator": "budget", "Matching": "matching", "Scaling": "scaling", "Serving": "serving"}
"""Pages without a capture, by title: their commands."""


PROBES = ("attention_sink", "expert_tokens", "dyck_icl")
"""Whose pages are opened here; every probe's is run in process elsewhere."""


def chromium() -> str:
    """The browser's path. Ends the test run with one line when there is none."""
    named = os.environ.get("CHROMIUM", "")
    found = shutil.which(named or "chromium")
    if found is None:
        got = f"CHROMIUM={named}, which is none" if named else "none on the path"
        pytest.exit(f"browser tests need Chromium; got {got}: install it, or set CHROMIUM to its path", returncode=4)
    return found


def test_without_a_browser_the_run_ends_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHROMIUM", "/nowhere/chromium")
    with pytest.raises(pytest.exit.Exception, match="browser tests need Chromium; got CHROMIUM=/nowhere/chromium"):
        chromium()


@pytest.fixture(scope="module")
def shared() -> Iterator[BrowserContext]:
    """One for all visitors, so that Streamlit's scripts are fetched once; each page is a visit of its own."""
    path = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=QUIET)
        context = browser.new_context(viewport={"width": 1440, "height": 1000})
        context.set_default_timeout(60_000)
        yield context
        browser.close()


@pytest.fixture
def context(shared: BrowserContext) -> Iterator[BrowserContext]:
    yield shared
    for page in shared.pages:
        page.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the dashboard is started with."""
    folder = tmp_path_factory.mktemp("captures")
    write_capture(folder / "looped", [episodes(LOOPED)])
    write_capture(folder / "baseline", [episodes(BASELINE)])
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Where the dashboard is served."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "streamlit", "run", "app/main.py", "--server.port", str(port)]
    with subprocess.Popen([*words, "--", "--captures", str(folder)], cwd=ROOT, stdout=subprocess.DEVNULL) as server:
        try:
            wait_for(f"http://localhost:{port}/_stcore/health", server)
            yield f"http://localhost:{port}"
        finally:
            server.terminate()


def wait_for(url: str, server: "subprocess.Popen[bytes]") -> None:
    for _ in range(600):
        assert server.poll() is None, "the server ended"
        try:
            with urlopen(url):
                return
        except URLError:
            time.sleep(0.1)
    raise AssertionError(f"{url} did not answer within a minute")


class Visitor:
    """One visitor's page, and what went wrong on it."""

    def __init__(self, context: BrowserContext) -> None:
        self.page: Page = context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        # Below a page's path Streamlit's client looks for its server there before it asks at the root.
        if message.type == "error" and "/_stcore/" not in message.location["url"]:
            self.complaints.append(message.text)

    def _request(self, request: Request) -> None:
        url = urlsplit(request.url)
        if url.scheme in ("http", "https", "ws") and url.hostname != "localhost":
            self.complaints.append(f"asked {url.hostname}")

    def open(self, url: str) -> None:
        self.page.goto(url)
        self.settle()

    def follow(self, title: str) -> None:
        """The link of that name in the navigation."""
        self.page.get_by_test_id("stSidebarNav").get_by_role("link", name=title, exact=True).click()
        self.settle(title)

    def choose(self, name: str, option: str) -> None:
        self.page.get_by_role("combobox", name=name).click()
        self.page.get_by_role("option", name=option, exact=True).click()
        self.settle()

    def type(self, name: str, text: str) -> None:
        box = self.page.get_by_role("spinbutton", name=name)
        box.fill(text)
        box.press("Enter")

    def settle(self, title: str = "") -> None:
        """Wait until the script has run and everything on the page is drawn; nothing may have gone wrong."""
        if title:
            self.page.get_by_role("heading", level=1, name=title, exact=True).wait_for()
        self.page.wait_for_timeout(300)  # the run that a click asks for has begun
        self.page.locator('[data-testid=stApp][data-test-script-state="notRunning"]').wait_for()
        self.page.wait_for_function("!document.querySelector('[data-testid=stSkeleton]')")
        assert self.page.get_by_test_id("stException").count() == 0
        assert self.page.get_by_test_id("stAlert").count() == 0
        assert not self.complaints

    def choices(self) -> list[str]:
        """What every widget of the sidebar shows."""
        return [box.input_value() for box in self.page.get_by_test_id("stSidebar").locator("input").all()]

    def click_row(self, title: str, row: int, height: int, table: int = 0) -> None:
        """The box before a row, from 0, of a table of a page, whose rows are that high."""
        self.page.get_by_role("heading", level=1, name=title, exact=True).wait_for()
        box = self.page.get_by_test_id("stDataFrame").nth(table).bounding_box()
        self.page.mouse.click(box["x"] + 16, box["y"] + 1.1 * height + (row + 0.5) * height)

    def faults(self) -> list[str]:
        """What axe finds serious or critical on the page, but in Streamlit's own list of pages."""
        found = Axe().run(self.page, context={"exclude": [["[data-testid=stSidebarNav]"]]}).response["violations"]
        return [
            f"{fault['help']}: {node['html']}"
            for fault in found
            if fault["impact"] in ("serious", "critical")
            for node in fault["nodes"]
        ]

    def command(self) -> str:
        return self.page.get_by_test_id("stCode").last.inner_text().strip()


@pytest.mark.browser
def test_pages_open_and_an_address_gives_the_same_view(address: str, context: BrowserContext) -> None:
    visitor = Visitor(context)
    visitor.open(address)
    assert visitor.page.get_by_role("heading", level=1).inner_text() == "Captures"
    assert visitor.page.url.endswith("?capture=looped")  # the first that visits a layer twice
    visitor.choose("Capture", "baseline")
    assert visitor.page.url.endswith("?capture=baseline")
    visitor.choose("Capture", "looped")

    for name in PROBES:
        visitor.follow(catalog.load(name).TITLE)
        visitor.page.locator("[data-testid=stPlotlyChart] .main-svg").first.wait_for()
        assert visitor.page.url == f"{address}/{name}?capture=looped"
        assert f"probes.{name} --capture" in visitor.command()

    for title, module in NUMBERS.items():
        visitor.follow(title)
        assert visitor.page.url == f"{address}/{module}"
        assert visitor.command().startswith(f"python -m smelt_interp.{module} ")
        assert visitor.page.get_by_role("combobox", name="Capture").count() == 0

    visitor.follow(catalog.load("attention_sink").TITLE)
    visitor.type("T min", "2")
    visitor.settle()
    assert visitor.command().endswith("--t-min 2")
    assert visitor.page.url.endswith("t_min=2")
    visitor.type("T min", "3")
    visitor.settle()
    visitor.page.go_back()
    visitor.settle()
    assert visitor.command().endswith("--t-min 2")  # a choice is a step back
    other = Visitor(context)
    other.open(visitor.page.url)
    assert (other.choices(), other.command()) == (visitor.choices(), visitor.command())


@pytest.mark.browser
def test_attention_is_read_by_pointer_and_by_keys_and_a_link_opens_the_same(
    address: str, context: BrowserContext
) -> None:
    visitor = Visitor(context)
    visitor.open(f"{address}/attention?capture=looped&second=baseline")
    page = visitor.page
    maps, read = page.locator("canvas.map"), page.locator(".read")
    maps.first.wait_for()
    assert maps.count() == 6  # two visits and their difference, of two networks

    page.locator(".thumbnails button", has=page.locator("span", has_text=re.compile("^4$"))).click()
    page.wait_for_url("**head=4**")
    page.locator(".canvas").focus()
    for key, said in (("ArrowDown", "layer=3"), ("PageDown", "sample=2"), ("ArrowLeft", "head=3")):
        page.keyboard.press(key)
        page.wait_for_url(f"**{said}**")
    visitor.settle()
    box = maps.nth(0).bounding_box()
    page.mouse.move(box["x"] + 52, box["y"] + box["height"] / 2)  # the first key
    assert "sample 2, layer 3, head 3" in read.inner_text()
    assert "key 1 ‘<bos>’" in read.inner_text()
    (looped, baseline) = read.inner_text().splitlines()[1:]
    assert looped.startswith("looped: layer 3, visit 1 0.6001, layer 3, visit 2 0.0200, visit 2 − visit 1 -0.5801; ")
    assert baseline.startswith("baseline: layer 3, visit 1 0.6001; uniform ")  # it has no step 5
    page.mouse.click(box["x"] + 52, box["y"] + box["height"] / 2)
    page.wait_for_url("**query=**")
    visitor.settle()

    other = Visitor(context)
    other.open(page.url)
    other.page.locator("canvas.map").first.wait_for()
    assert other.page.locator(".thumbnails .chosen span").inner_text() == "3"
    assert other.page.locator(".read").inner_text().endswith(", pinned: point at a key to read it")
    page.go_back()  # the query is let go
    visitor.settle()
    assert "query=" not in page.url
    page.mouse.move(box["x"] + 80, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 200)
    page.mouse.up()
    page.wait_for_url("**zoom=**")
    visitor.settle()
    page.go_back()  # to all of the map
    visitor.settle()
    assert "zoom=" not in page.url
    page.mouse.move(1, 1)
    page.locator(".read", has_not_text="pinned").wait_for()


@pytest.mark.browser
def test_a_sample_is_opened_by_a_click_goes_along_and_axe_finds_no_serious_fault(
    address: str, context: BrowserContext
) -> None:
    visitor = Visitor(context)
    visitor.open(f"{address}/?capture=looped")
    assert visitor.faults() == []
    visitor.follow("Samples")
    visitor.click_row("Samples", 1, 28)
    visitor.page.get_by_role("heading", name="Sample 2", exact=True).wait_for()
    visitor.page.wait_for_url("**sample=2**")
    visitor.settle()
    assert visitor.faults() == []
    # The sample is that of the next page too, and of the one that Back leads to.
    visitor.follow("Attention, both visits")
    visitor.page.wait_for_url("**/attention**sample=2**")
    visitor.page.locator(".canvas[aria-label^='sample 2, ']").wait_for()
    visitor.page.go_back()
    visitor.page.get_by_role("heading", name="Sample 2", exact=True).wait_for()


@pytest.mark.browser
def test_what_is_kept_of_a_capture_leads_on_and_goes_with_it(
    folder: Path, address: str, context: BrowserContext
) -> None:
    told, probe = folder / "told", catalog.load("attention_sink")
    shutil.copytree(folder / "looped", told, ignore=shutil.ignore_patterns("results"))
    plant_answers(Capture(told), wrong=(0, 1))
    asked = command.Run(source=Source(capture=told), data=probe.DATA, measure=probe.Options(), output=command.Output())
    document = command.describe(asked, command.measure_all("attention_sink", probe, asked), "planted")
    keep_result(told, document, report.json_text(document))
    visitor = Visitor(context)
    page = visitor.page

    visitor.open(f"{address}/overview?capture=told&against=")
    point = page.locator(".scatterlayer .trace").nth(1).locator(".point").nth(3)  # step 4 of the start mass
    box = point.bounding_box()
    page.mouse.move(box["x"] + 1, box["y"] + 1)
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.get_by_role("link", name=f"{probe.TITLE}, layer 2").click()
    visitor.settle(probe.TITLE)
    page.get_by_text("Rows of layer 2").last.wait_for()
    assert page.url == f"{address}/attention_sink?capture=told&layer=2"
    page.go_back()
    visitor.settle("Overview by step")
    assert urlsplit(page.url).query.startswith("capture=told")

    visitor.follow("Answers along the steps")
    visitor.click_row("Answers along the steps", 1, 28, table=1)  # of those answered wrong
    page.wait_for_url("**wrong=2**")
    visitor.settle()
    page.get_by_role("link", name="Attention of sample 2").click()
    page.locator(".canvas[aria-label='sample 2, layer 2']").wait_for()

    visitor.follow("Captures")
    page.get_by_role("button", name="Delete …").click()
    assert told.exists()
    page.get_by_role("button", name="Delete told").click()
    page.wait_for_url("**/?capture=looped")
    visitor.settle("Captures")
    assert not told.exists()
    assert "told" not in page.get_by_test_id("stMain").inner_text()


@pytest.mark.browser
def test_a_recording_is_started_followed_and_listed(folder: Path, address: str, context: BrowserContext) -> None:
    visitor = Visitor(context)
    page = visitor.page
    page.set_default_timeout(200_000)  # the recorder imports torch
    visitor.open(f"{address}/?capture=looped")
    page.get_by_text("Record a capture").click()
    visitor.type("Samples", "2")
    page.get_by_text("At most 2 × 160 tokens, about").wait_for()
    page.get_by_role("button", name="Record", exact=True).click()
    page.get_by_text("demo-smelt-dyck-2: ").first.wait_for()
    page.get_by_role("cell", name="demo-smelt-dyck-2", exact=True).wait_for()
    assert (folder / "demo-smelt-dyck-2" / "manifest.json").exists()
    visitor.choose("Capture", "demo-smelt-dyck-2")
    visitor.follow(catalog.load("attention_sink").TITLE)
    page.locator("[data-testid=stPlotlyChart] .main-svg").first.wait_for()


@pytest.mark.browser
def test_two_who_intervene_at_once_get_their_own_answers(address: str, context: BrowserContext) -> None:
    network = open_network(ROOT / "checkpoints" / "demo-smelt")
    asked: dict[Kind, str] = {"skip": "One of them types this.", "again": "The other types that!"}
    visitors = {kind: Visitor(context) for kind in asked}
    for kind, visitor in visitors.items():
        visitor.page.set_default_timeout(300_000)  # torch is imported when the page is first opened
        visitor.open(f"{address}/live?network=checkpoints/demo-smelt&edit={kind}")
    assert visitors["skip"].faults() == []
    for kind, visitor in visitors.items():
        visitor.page.get_by_role("textbox", name="Prompt").fill(asked[kind])
        visitor.page.get_by_text("Changed since it was run: press Run.").wait_for()
    for visitor in visitors.values():
        visitor.page.get_by_role("button", name="Run").click()
    for kind, visitor in visitors.items():
        visitor.page.wait_for_url("**prompt=**")
        visitor.settle()
        seen = look(network, asked[kind], made(network, Change(kind=kind, layers=(), visits=(1,))).edit)
        metrics = visitor.page.get_by_test_id("stMetricValue").all_inner_texts()
        assert metrics[:3] == [f"{loss:.3f}" for loss in seen.mean_loss().values()]
        assert repr(asked[kind]) in visitor.command()
        assert visitor.page.get_by_text("press Run").count() == 0


@pytest.mark.browser
def test_an_address_that_is_completed_or_corrected_is_no_step_back(address: str, context: BrowserContext) -> None:
    visitor = Visitor(context)
    visitor.open(f"{address}/captures?capture=baseline")
    visitor.settle("Captures")
    assert visitor.page.url == f"{address}/?capture=baseline"
    visitor.page.goto(f"{address}/attention_sink?capture=looped&t_min=1e400")
    visitor.page.get_by_text("t_min must be whole number; got 1e400").wait_for()
    assert visitor.page.url == f"{address}/attention_sink?capture=looped"
    visitor.page.go_back()
    visitor.settle("Captures")
    assert visitor.page.url == f"{address}/?capture=baseline"


@pytest.mark.browser
def test_a_page_is_as_dark_as_the_browser_asks_and_cuts_no_metric_when_it_is_narrow(
    address: str, context: BrowserContext
) -> None:
    page = context.new_page()
    page.set_viewport_size({"width": 800, "height": 1000})
    page.goto(f"{address}/budget")
    page.get_by_test_id("stMetric").nth(2).wait_for()
    cut = (
        "[...document.querySelectorAll('[data-testid=stMetricValue] *')].filter(e => e.scrollWidth > e.clientWidth + 1)"
    )
    assert page.evaluate(f"{cut}.map(e => e.innerText)") == []
    colour = "getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor"
    for scheme, most_is in (("light", ">"), ("dark", "<")):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function(f"Math.max(...{colour}.match(/\\d+/g).slice(0, 3)) {most_is} 127")


@pytest.mark.browser
def test_a_foreign_page_gets_no_websocket(address: str, context: BrowserContext) -> None:
    port = urlsplit(address).port
    asked = (
        "GET /_stcore/stream HTTP/1.1\r\nHost: evil.example\r\nOrigin: http://evil.example\r\nUpgrade: websocket\r\n"
    )
    keys = "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    with socket.create_connection(("localhost", port)) as connection:
        connection.sendall((asked + keys).encode())
        assert connection.recv(64).split()[1] == b"403"
