"""Headless Chromium and curl for the tests."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

UNPACKED = Path(__file__).parents[2] / ".cache/chromium/chromium"
LIBRARIES = [str(path) for path in UNPACKED.parent.glob("root/usr/lib/*-linux-gnu")]
# Browsers treat a host that is not the loopback and has no TLS more strictly.
OTHER_HOST = "queues.test"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", f"--host-resolver-rules=MAP {OTHER_HOST} 127.0.0.1"]


def chromium() -> str | None:
    """The Chromium of this machine, or the one that test/tools.py has unpacked."""
    return shutil.which("chromium") or (str(UNPACKED) if UNPACKED.exists() else None)


@pytest.fixture
def curl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program `curl` is on the PATH: that of this machine, or the one that test/tools.py has unpacked."""
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{UNPACKED.parent}")
    if shutil.which("curl") is None:
        assert not os.environ.get("CI"), "curl is missing: make test-tools fetches it"
        pytest.skip("curl is missing: make test-tools fetches it")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()
    if path is None:
        assert not os.environ.get("CI"), "chromium is missing: make test-tools fetches it"
        pytest.skip("chromium is missing: make test-tools fetches it")
    with pytest.MonkeyPatch.context() as environment:
        # The Node of playwright needs libatomic, which came with Chromium if the machine lacks it.
        environment.setenv("LD_LIBRARY_PATH", ":".join(LIBRARIES))
        playwright = sync_playwright().start()
    browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
    yield browser
    browser.close()
    playwright.stop()
