"""Tests of other projects, unchanged, from their source distributions in .cache/brokers."""

import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

__all__ = ["SUITES", "run", "unpacked"]

SUITES = Path(__file__).parents[3] / ".cache/brokers"


@pytest.fixture
def unpacked(tmp_path: Path) -> Callable[[str], Path]:
    """Unpacks the source distribution of a project, and returns its directory."""

    def unpack(project: str) -> Path:
        archives = [*SUITES.glob(f"{project}-*.tar.gz")]
        if not archives:
            pytest.skip(f"the source distribution of {project} is missing: make test-long-tools")
        with tarfile.open(archives[0]) as tar:
            wanted = [each for each in tar if project != "django" or "/tests/tasks/" in each.name]
            tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Debian's Python 3.11.2 has none
            tar.extractall(tmp_path, wanted)
        return next(tmp_path.glob(f"{project}-*"))

    return unpack


def run(home: Path, dsn: str, *words: str, python: str = sys.executable, **variables: str) -> dict[str, str]:
    """Run tests in a process of their own. Returns the outcome of each: passed, skipped or failed."""
    environment = os.environ | variables | {"DATABASE": dsn}
    paths = [str(home), str(Path(__file__).parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    report = home / "report.xml"
    options = ["-q", "-c", os.devnull, "--rootdir", home, "-o", "python_classes=test_* Bas*", f"--junit-xml={report}"]
    plugins = ["-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [python, "-m", "pytest", *map(str, options), *plugins, *words],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout[-20_000:], done.stderr)
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        ends = {end.tag for end in case}
        outcome = "failed" if ends & {"failure", "error"} else "skipped" if "skipped" in ends else "passed"
        found[f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"] = outcome
    return found
