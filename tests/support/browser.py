"""A headless Chromium for tests of the page, driven by selenium; both are optional."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def missing() -> str:
    """Return what is missing for a browser, or nothing."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        return "chromium and chromedriver are not installed"
    return ""


@contextlib.contextmanager
def browser(width: int = 1000, height: int = 900) -> Iterator[Any]:
    """Yield selenium's driver of a fresh Chromium, and end it."""
    from selenium import webdriver

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        driver = webdriver.Chrome(options=options, service=service)
        try:
            yield driver
        finally:
            driver.quit()
