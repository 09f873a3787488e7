"""The tests of Django with Django 6, which needs Python 3.12: where there is an interpreter."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from suites import run, unpacked

__all__ = ["unpacked"]

ROOT = Path(__file__).resolve().parents[3]
FILES = ("test/python/contrib/test_django.py", "test/python/contrib/test_django_tasks.py")
# What the helpers of the tests import.
TOOLS = ("httpx", "hypothesis", "pytest", "pytest-asyncio", "pytest-randomly", "pytest-xdist")


def interpreter() -> str | None:
    """A Python from 3.12 on, on the PATH or of pyenv."""
    places = [*sorted(Path("~/.pyenv/versions").expanduser().glob("3.1[2-9]*/bin")), *map(Path, os.get_exec_path())]
    for path in (place / f"python3.{minor}" for place in places for minor in range(12, 20)):
        # A shim of pyenv can stand for an interpreter that is missing.
        if path.exists() and subprocess.run([path, "-c", ""], check=False).returncode == 0:
            return str(path)
    return None


def requirements() -> list[str]:
    """What the tests need, with the ranges of pyproject.toml, and Django 6."""
    settings = tomllib.loads((ROOT / "python/pyproject.toml").read_text(encoding="utf-8"))
    project = settings["project"]
    extras = project["optional-dependencies"]
    own = [*project["dependencies"], *extras["embedded"], *extras["cli"], *extras["pool"], *extras["http"]]
    dev = [line for line in settings["dependency-groups"]["dev"] if isinstance(line, str)]
    tools = [line for line in dev if line.partition("[")[0].partition(">")[0] in TOOLS]
    return ["django>=6,<7", "psutil", *(line for line in [*own, *tools] if not line.startswith("pgqueue-sql["))]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with Django 6."""
    found = interpreter()
    if sys.version_info >= (3, 12) or found is None:
        pytest.skip("Python 3.12 runs the tests with Django 6 anyway" if found else "there is no Python 3.12")
    home = tmp_path_factory.mktemp("django")
    subprocess.run([found, "-m", "venv", home], check=True)
    own = str(home / "bin/python")
    subprocess.run([own, "-m", "pip", "install", "--quiet", *requirements()], check=True)
    version = subprocess.run([own, "-m", "django", "--version"], check=True, capture_output=True, text=True).stdout
    assert version.startswith("6.")
    return own


@pytest.mark.long(part="consumer")
def test_all_holds_with_django_6(server: str, python: str) -> None:
    left = {name: text for name, text in os.environ.items() if not name.startswith(("PYTEST", "DJANGO", "PGQUEUE"))}
    variables = left | {"PGQUEUE_TEST_DSN": server, "PYTHONPATH": str(ROOT / "python/src")}
    words = ["-m", "pytest", "-q", "-c", "python/pyproject.toml", "--rootdir", ".", "-p", "no:cacheprovider"]
    subprocess.run([python, *words, *FILES], cwd=ROOT, env=variables, check=True)


@pytest.mark.long(part="consumer")
def test_the_tests_of_django_pass(unpacked: Callable[[str], Path], own_database: str, python: str) -> None:
    home = unpacked("django") / "tests"
    paths = {"PYTHONPATH": str(ROOT / "python/src"), "DJANGO_ALLOW_ASYNC_UNSAFE": "1"}
    outcomes = run(home, own_database, "--pyargs", "django_suites", python=python, **paths)
    assert (len(outcomes), set(outcomes.values())) == (54, {"passed"})
