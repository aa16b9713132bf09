"""A real browser without a window: Chromium and its driver, as a Linux distribution has them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"


def missing() -> str:
    """Return which part of a browser is not installed; empty if all is there."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium"
    if not any(map(shutil.which, CHROMIUM)):
        return CHROMIUM[0]
    return "" if shutil.which(DRIVER) else DRIVER


class Page:
    """A page in the browser."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def open(self, path: Path) -> None:
        self._driver.get(path.as_uri())

    def click(self, selector: str) -> None:
        """Click the first element that a CSS selector finds."""
        from selenium.webdriver.common.by import By

        self._driver.find_element(By.CSS_SELECTOR, selector).click()

    def type(self, selector: str, text: str) -> None:
        from selenium.webdriver.common.by import By

        field = self._driver.find_element(By.CSS_SELECTOR, selector)
        field.clear()
        field.send_keys(text)

    def text(self, selector: str) -> str:
        """Return the text that is seen of the first element that a selector finds."""
        from selenium.webdriver.common.by import By

        return self._driver.find_element(By.CSS_SELECTOR, selector).text

    def rows(self, selector: str) -> list[list[str]]:
        """Return the cells of the rows of a table's body."""
        script = "return Array.from(document.querySelector(arguments[0]).tBodies[0].rows,"
        script += " (row) => Array.from(row.cells, (cell) => cell.textContent));"
        return self._driver.execute_script(script, selector)

    def resize(self, width: int, height: int) -> None:
        """Give the page a size in pixels, without what is around it."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def run(self, script: str) -> Any:
        return self._driver.execute_script(script)

    def complaints(self) -> list[str]:
        """Return all that the console has shown since the last call."""
        return [entry["message"] for entry in self._driver.get_log("browser")]


@contextmanager
def browser() -> Iterator[Page]:
    """Start a browser for a `with` block. Nothing is loaded from a network: there is a proxy that answers nobody."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, CHROMIUM)))
    switches = ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1500,1400")
    for switch in (*switches, "proxy-server=127.0.0.1:9", "disable-background-networking"):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which(DRIVER)))
    try:
        yield Page(driver)
    finally:
        driver.quit()
