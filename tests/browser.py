"""A real Chromium for pages under test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: no page is opened in a browser"
)


@contextmanager
def browser_window(problems: list[str], requests: list[str]) -> Iterator[Any]:
    """A window that notes messages of its console, errors and requests; it waits however slow the machine is."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=0)
        window = browser.new_page()
        window.set_default_timeout(0)
        window.on("console", lambda message: problems.append(message.text))
        window.on("pageerror", lambda error: problems.append(str(error)))
        window.on("request", lambda request: requests.append(request.url))
        yield window
        browser.close()
