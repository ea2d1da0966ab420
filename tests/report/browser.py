"""Debian's Chromium without a screen, and what pages ask of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

PHONE, DESK = (360, 740), (1280, 900)


def missing() -> list[str]:
    return [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]


class Browser:
    """One session for many pages."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        # As root, and in containers, Chromium's sandbox cannot be made.
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))

    def open(self, path: Path, size: tuple[int, int] = DESK, scheme: str = "light") -> None:
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get(path.as_uri())

    def ask(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(f"return {script}", *arguments)

    def do(self, script: str, *arguments: Any) -> None:
        self.driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """Everything on the console: errors of scripts, and what the page's policy has stopped."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def close(self) -> None:
        self.driver.quit()
