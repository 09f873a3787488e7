"""Headless Chromium and curl for the tests."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, overload

import pytest
from clients import PATIENCE

if TYPE_CHECKING:  # playwright is imported by the tests that need it: each process of a run collects all tests
    from playwright.sync_api import Browser, Locator, Page
    from playwright.sync_api._generated import LocatorAssertions, PageAssertions

UNPACKED = Path(__file__).parents[2] / ".cache/chromium/chromium"
LIBRARIES = [str(path) for path in UNPACKED.parent.glob("root/usr/lib/*-linux-gnu")]
# Browsers treat a host that is not the loopback and has no TLS more strictly.
OTHER_HOST = "queues.test"
# One process for all pages: to start one takes a second of processor time.
SMALL = ["--disable-site-isolation-trials", "--renderer-process-limit=1"]
ARGUMENTS = ["--no-sandbox", "--disable-gpu", *SMALL, f"--host-resolver-rules=MAP {OTHER_HOST} 127.0.0.1"]


def add_curl(patch: pytest.MonkeyPatch) -> None:
    """Put the program `curl` on the PATH: that of this machine, or the one that test/tools.py has unpacked."""
    patch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{UNPACKED.parent}")
    if shutil.which("curl") is None:
        assert not os.environ.get("CI"), "curl is missing: make test-tools fetches it"
        pytest.skip("curl is missing: make test-tools fetches it")


@contextmanager
def chromium() -> "Iterator[Browser]":
    """Run the Chromium of this machine, or the one that test/tools.py has unpacked."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or (str(UNPACKED) if UNPACKED.exists() else None)
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


@overload
def expect(actual: "Page") -> "PageAssertions": ...
@overload
def expect(actual: "Locator") -> "LocatorAssertions": ...
def expect(actual: "Page | Locator") -> "PageAssertions | LocatorAssertions":
    """Wait until an assertion about a page, or a part of it, holds."""
    from playwright.sync_api import expect

    expect.set_options(timeout=1000 * PATIENCE)
    return expect(actual)
