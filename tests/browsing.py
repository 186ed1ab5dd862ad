"""A real browser for tests of pages: Debian's Chromium, driven by Playwright; and axe-core, which judges how usable
a page is for everyone."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from waiting import wait_until

ROOT = Path(__file__).resolve().parents[1]
AXE = Path(os.environ.get("AXE_CORE", ROOT / "node_modules" / "axe-core" / "axe.min.js"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 60_000
"""Milliseconds: far above what anything takes."""

needs_browser = pytest.mark.skipif(
    CHROMIUM is None or find_spec("playwright") is None,
    reason="no browser: apt-get install chromium, and playwright of the dev group; `make browser` does both",
)
needs_axe = pytest.mark.skipif(not AXE.is_file(), reason="no axe-core: `make browser` gets it with npm")


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    """Start Chromium; without its sandbox, which root cannot have."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def open_page(browser: Any, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Any]:
    """Open a page and wait until it shows a run; whatever it reports as an error fails the test."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
    )
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if _is_trouble(message) else None)
    elsewhere: list[str] = []
    origin = "/".join(url.split("/")[:3])
    page.on("request", lambda request: None if _is_own(request.url, origin) else elsewhere.append(request.url))
    try:
        page.goto(url)
        wait_for(page, "page.run !== null")
        yield page
        assert not errors, errors
        assert not elsewhere, elsewhere
    finally:
        context.close()


def wait_for(page: Any, expression: str, seconds: float = PATIENCE / 1000) -> None:
    """Wait until an expression is true in the page, whose own policy forbids Playwright's way of doing it."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"not within {seconds} s: {expression}"
        page.wait_for_timeout(20)


def _is_trouble(message: Any) -> bool:
    # An answer such as 404, for a worker without a log, is none.
    return message.type == "error" and not message.text.startswith("Failed to load resource")


def _is_own(url: str, origin: str) -> bool:
    return url.startswith((f"{origin}/", "data:"))


@contextlib.contextmanager
def served(run: Any) -> Iterator[str]:
    """Serve a run as `roost watch` does, and yield the address of its page."""
    from roost.watch.page import PageServer

    server = PageServer(run)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        wait_until(lambda: server._server.started, "the server to listen")
        yield server.url
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


def serious_findings(page: Any) -> list[str]:
    """Return what axe-core finds that is serious or critical."""
    # Not as a script element, which the page's own policy forbids.
    page.evaluate(AXE.read_text(encoding="utf-8") + "; 0")
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{item['id']}: {item['help']}: {[node['html'][:120] for node in item['nodes'][:3]]}"
        for item in found["violations"]
        if item["impact"] in ("serious", "critical")
    ]
