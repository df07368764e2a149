"""The console in Chromium: only its own script runs, pages are accessible, and the live tail works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from console_shop import HOSTILE, fill

from segmentlog.store import LogStore

playwright = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("browser")]

PAGES = [
    "/", "/?q=ord&internal=1", "/topics/orders", "/topics/customers/partitions/0", "/topics/orders/config",
    "/topics/orders/delete", "/topics/hostile/records", "/topics/orders/records?at=time&where=x&path=%5B",
    "/topics/orders/records/0/5", "/topics/hostile/records/0/0", "/topics/hostile/records/0/16", "/topics/orders/tail",
    "/groups", "/groups/group?group=billing", "/groups/reset?group=billing&to=latest", "/transactions",
    "/transactions/abort?name=etl-1", "/damage", "/nowhere",
]  # fmt: skip
_ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync",
]  # fmt: skip


_NAME = """() => {
    const one = document.activeElement;
    return one === document.body ? "" : one.innerText.trim() || one.name || one.getAttribute("aria-label");
}"""
"""Name of the focused element."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Run `segmentlog http --allow-writes` on a filled store, and provide its address and the store's path."""
    path = tmp_path_factory.mktemp("browser") / "store"
    with LogStore(path, background=False) as store:
        fill(store)
    command = [
        sys.executable,
        "-m",
        "segmentlog",
        "--dir",
        str(path),
        "http",
        "--listen",
        "127.0.0.1:0",
        "--allow-writes",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        found = re.search(r"http://\S+", server.stderr.readline())
        assert found
        yield f"{found[0]}/ui", path
        server.terminate()
        assert server.wait(20) == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Debian's Chromium once for all tests of this module."""
    program = shutil.which("chromium")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("there is no chromium, and CI is to have one")
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=program, args=_ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Any, address: tuple[str, Path]) -> Iterator[Callable[..., Any]]:
    """Provide a function that opens pages. Script errors and violations of the policy fail the test at its end."""
    contexts, errors = [], []

    def told(message: Any) -> None:
        if message.type == "error" and "the server responded with a status of 4" not in message.text:
            errors.append(message.text)

    def make(path: str, **options: Any) -> Any:
        contexts.append(browser.new_context(viewport={"width": 1280, "height": 800}, **options))
        made = contexts[-1].new_page()
        made.set_default_timeout(20_000)
        made.on("console", told)
        made.on("pageerror", lambda error: errors.append(str(error)))
        made.on("dialog", lambda dialog: errors.append(dialog.message))
        made.goto(address[0] + path)
        return made

    yield make
    for context in contexts:
        context.close()
    assert errors == []


def test_an_accessibility_checker_finds_nothing_and_nothing_is_too_wide(page: Callable[..., Any]) -> None:
    """axe finds no problem on any page in light and dark. At 360 pixels wide content scrolls within its own box."""
    shown = page("/", color_scheme="light")
    home = shown.url.removesuffix("/")
    checker = axe.Axe()
    for path in PAGES:
        shown.goto(home + path)
        found = checker.run(shown).response
        assert found["passes"], path
        shown.emulate_media(color_scheme="dark")
        dark = checker.run(shown, options={"runOnly": ["color-contrast"]}).response
        assert dark["passes"], path
        problems = [
            (one["id"], node["target"], node["failureSummary"])
            for one in found["violations"] + dark["violations"]
            for node in one["nodes"]
        ]
        assert problems == [], path
        shown.emulate_media(color_scheme="light")
        assert shown.title().endswith("segmentlog"), path
        shown.set_viewport_size({"width": 360, "height": 740})
        assert shown.evaluate("document.documentElement.scrollWidth") <= 360, path
        shown.set_viewport_size({"width": 1280, "height": 800})


def test_nothing_in_a_log_runs_or_is_drawn(page: Callable[..., Any]) -> None:
    """Hostile keys, values, headers and group names are shown completely, as text only."""
    shown = page("/topics/hostile/records?n=200")
    assert shown.title() == "Records of hostile · segmentlog"
    cells = shown.locator("td.value").all_inner_texts()
    assert HOSTILE[0] in cells
    assert "nul \\x00 escape \\x1b[31m red" in cells
    assert any(cell.startswith("\\u202eevil") for cell in cells)
    for selector in ("main img", "main script", "main b", "main iframe"):
        assert shown.locator(selector).count() == 0
    for at in (0, 2, 4, 14):
        shown.goto(f"{shown.url.partition('/topics')[0]}/topics/hostile/records/0/{at}")
        assert shown.locator("#value-text").inner_text() == HOSTILE[at // 2]
        assert "pwned" not in shown.title()


def test_everything_is_reached_by_keyboard(page: Callable[..., Any]) -> None:
    """The Tab key reaches the skip link first, then all controls from top to bottom, each with a visible frame."""
    shown = page("/")
    shown.keyboard.press("Tab")
    skip = shown.locator(":focus")
    assert skip.inner_text() == "Skip to the content"
    box = skip.bounding_box()
    assert box
    assert box["x"] >= 0
    shown.keyboard.press("Enter")
    assert shown.evaluate("document.activeElement.id") == "main"
    shown.keyboard.press("Tab")
    assert shown.evaluate("document.activeElement.id") == "q"
    reached, frames = [], set()
    for _ in range(18):
        shown.keyboard.press("Tab")
        reached.append(shown.evaluate(_NAME))
        if reached[-1]:  # else the last one is passed
            frames.add(shown.evaluate("getComputedStyle(document.activeElement).outlineStyle"))
    wanted = ["internal", "Filter", "Topic ↑", "Offsets", "customers", "empty", "hostile", "orders"]
    assert [one for one in reached if one in wanted] == wanted
    assert frames == {"solid"}
    shown.locator("a", has_text="orders").focus()
    shown.keyboard.press("Enter")
    shown.wait_for_url("**/topics/orders")
    assert shown.locator("h1").inner_text() == "orders"


def test_times_are_the_readers_with_utc_at_hand(page: Callable[..., Any]) -> None:
    """Tables show local times with UTC in the title, and a typed time is in the reader's zone."""
    shown = page("/topics/orders/records/0/5", timezone_id="Asia/Kathmandu")
    first = shown.locator("time").first
    moment = first.get_attribute("datetime")
    assert moment.endswith("Z")
    expected = shown.evaluate("moment => new Date(moment).toLocaleString('sv', {timeZone: 'Asia/Kathmandu'})", moment)
    assert first.inner_text().startswith(expected)
    assert first.get_attribute("title") == moment.replace("T", " ").replace("Z", " UTC")
    shown.goto(f"{shown.url.partition('/records')[0]}/records")
    shown.select_option("#at", "time")
    shown.fill("#where", "2026-01-02 05:45")
    shown.get_by_role("button", name="Search").click()
    shown.wait_for_url("**where=2026-01-02T00**")
    assert shown.input_value("#where") == "2026-01-02T00:00:00.000Z"


def test_a_live_tail_shows_pauses_goes_on_and_samples(page: Callable[..., Any], address: tuple[str, Path]) -> None:
    """The tail shows records of other processes, catches up after a pause, and samples a flood of records."""
    shown = page("/topics/hostile/tail")
    rows = shown.locator("#tail-rows tr")
    with LogStore(address[1], background=False) as store:
        log = store.topic("hostile").partition(0)
        shown.locator("#tail-status", has_text="Waiting for records").wait_for()
        log.append([text.encode() for text in HOSTILE], keys=[text.encode() for text in HOSTILE])
        playwright.expect(rows).to_have_count(len(HOSTILE))
        assert HOSTILE[0] in rows.locator("td.value").all_inner_texts()
        assert shown.locator("#tail-rows script, #tail-rows img").count() == 0
        shown.click("#pause")
        log.append([b"while it was paused"])
        time.sleep(1.2)
        assert rows.count() == len(HOSTILE)
        shown.click("#pause")
        shown.wait_for_selector("text=while it was paused")
        assert rows.count() == len(HOSTILE) + 1
        for _ in range(10):
            log.append([b"flood"] * 10_000)
        shown.locator("#tail-status", has_text="a sample").wait_for()
        log.append([b"the last of all"])
        shown.wait_for_selector("text=the last of all")
        assert rows.count() <= 500
        assert axe.Axe().run(shown).response["violations"] == []
        log.truncate(20)
    assert shown.title() == "Live tail of hostile · segmentlog"


def test_what_is_looked_at_is_refreshed_on_request(page: Callable[..., Any], address: tuple[str, Path]) -> None:
    """A refresh keeps the keyboard focus, and happens only if it is switched on."""
    shown = page("/topics/empty")
    with LogStore(address[1], background=False) as store:
        store.topic("empty").partition(0).append([b"x"] * 4321)
        shown.locator("#live a", has_text="0").focus()
        shown.locator("#refresh").evaluate("box => box.click()")
        shown.wait_for_selector("dd >> text=4,321")
        assert shown.evaluate("document.activeElement.textContent") == "0"
        store.topic("empty").partition(0).trim(4321)


def test_forms_work_and_a_copy_is_what_is_shown(page: Callable[..., Any], address: tuple[str, Path]) -> None:
    """The browser's same-origin headers pass the check, and errors are announced beside their field."""
    with LogStore(address[1], background=False) as store:
        store.create_topic("of-no-use")
        shown = page("/topics/of-no-use/config", permissions=["clipboard-read", "clipboard-write"])
        shown.fill("[name='retention.ms']", "soon")
        shown.get_by_role("button", name="Change").click()
        field = shown.locator("[aria-invalid]")
        assert field.input_value() == "soon"
        described = field.get_attribute("aria-describedby").split()
        assert "a time" in shown.locator(f"[id='{described[-1]}']").inner_text()
        field.fill("2d")
        shown.get_by_role("button", name="Change").click()
        shown.wait_for_url("**/topics/of-no-use?done=altered")
        assert shown.get_by_role("status").inner_text() == "Configuration changed."
        shown.click("text=Delete…")
        shown.fill("#name", "of-no-use")
        shown.get_by_role("button", name="Delete").click()
        shown.wait_for_url("**/ui/?done=deleted")
        assert "of-no-use" not in store.topics()
        shown.goto(f"{address[0]}/topics/orders/records/0/5")
        shown.click("text=Copy the value as shown")
        shown.wait_for_selector("text=Copied")
        assert '"name": "User 1"' in shown.evaluate("navigator.clipboard.readText()")
