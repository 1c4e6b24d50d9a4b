"""A headless Chromium, driven by Selenium; needs Debian's packages chromium and chromium-driver."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--window-size=1300,900",
)


def missing() -> str | None:
    """Returns what is missing for tests that need a browser, as the reason to skip them."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs {' and '.join(absent)} (Debian's chromium and chromium-driver)" if absent else None


@contextmanager
def chromium() -> Iterator[Any]:
    """Yields a Selenium driver."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for option in (*OPTIONS, f"--user-data-dir={profile}"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(
            options, Service(str(shutil.which("chromedriver")), log_output=str(Path(profile, "log")))
        )
        driver.set_page_load_timeout(120)
        driver.set_script_timeout(60)
        try:
            yield driver
        finally:
            driver.quit()
