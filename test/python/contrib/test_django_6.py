"""The tests of Django with Django 6, which needs Python 3.12: where there is an interpreter."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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


@pytest.mark.long(part="consumer")
def test_all_holds_with_django_6(server: str, tmp_path: Path) -> None:
    python = interpreter()
    if sys.version_info >= (3, 12) or python is None:
        pytest.skip("Python 3.12 runs the tests with Django 6 anyway" if python else "there is no Python 3.12")
    subprocess.run([python, "-m", "venv", tmp_path], check=True)
    own = str(tmp_path / "bin/python")
    subprocess.run([own, "-m", "pip", "install", "--quiet", *requirements()], check=True)
    version = subprocess.run([own, "-m", "django", "--version"], check=True, capture_output=True, text=True).stdout
    assert version.startswith("6.")
    left = {name: text for name, text in os.environ.items() if not name.startswith(("PYTEST", "DJANGO", "PGQUEUE"))}
    variables = left | {"PGQUEUE_TEST_DSN": server, "PYTHONPATH": str(ROOT / "python/src")}
    words = ["-m", "pytest", "-q", "-c", "python/pyproject.toml", "--rootdir", ".", "-p", "no:cacheprovider"]
    subprocess.run([own, *words, *FILES], cwd=ROOT, env=variables, check=True)
