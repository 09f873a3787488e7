"""Do the fast tests of each promise see a fault that breaks it?

`run.py` applies each fault of faults.toml to a copy of the tree, one at a time, and runs the fast tests that the table
Promises of test/README.md names for its promise. The tests must fail. `run.py NAME…` runs some faults, `run.py --check`
only looks whether each fault can be applied.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test"))

from promises import references, rows  # noqa: E402 - a module beside, whoever starts this program

COPIES = Path(os.environ.get("MUTANTS", ROOT / ".cache/mutants"))
SECONDS = 600  # for the tests of one fault
COPIED = ("extension", "sql", "python", "test", "Makefile", "META.json", "pgqueue.control", "README.md", "SECURITY.md")
# Exit status of pytest and of the harness if tests were run and some failed, and the line that names the first of them.
TESTS_FAILED = 1
FAILED = re.compile(r"^(FAILED|ERROR) \S+::.*|^\S+\.sql +\(Wstat.*|^\+\+\+ \S+\.spec", re.MULTILINE)


class Fault(NamedTuple):
    """A change of one place of the product that breaks a promise."""

    name: str
    promise: str
    file: str
    old: str
    new: str
    hangs: bool = False  # A fault that makes tests hang says so. Of another one, a time-out shows nothing.


class Result(NamedTuple):
    """What the tests of a fault have shown."""

    fault: Fault
    is_seen: bool
    text: str


def faults() -> list[Fault]:
    """All faults in their order."""
    return [Fault(**fault) for fault in tomllib.loads((Path(__file__).parent / "faults.toml").read_text())["fault"]]


def problems(found: list[Fault], tests: dict[str, list[str]]) -> Iterator[str]:
    """Why faults cannot be applied."""
    names = [fault.name for fault in found]
    for fault in found:
        if names.count(fault.name) > 1:
            yield f"{fault.name}: two faults have this name"
        if (count := (ROOT / fault.file).read_text().count(fault.old)) != 1:
            yield f"{fault.name}: {fault.file} contains the text {count} times: {fault.old}"
        if not tests.get(fault.promise):
            yield f"{fault.name}: test/README.md has no fast tests for the promise {fault.promise}"


def make_copy(place: Path) -> None:
    """Copy what the tests need; what was fetched is shared."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name, ignore=shutil.ignore_patterns("results", ".*_cache", "*.egg-info"))
        else:
            shutil.copy(source, place / name)
    (place / ".venv").symlink_to(ROOT / ".venv")
    (place / ".cache").symlink_to(ROOT / ".cache")


def commands(tests: list[str]) -> Iterator[list[str]]:
    """The commands that run tests, in the directory python/ of a copy: each fails if one of its tests fails."""
    python = str(ROOT / ".venv/bin/python")
    files = sorted({f"../test/{test.partition(': ')[0]}" for test in tests if test.startswith("sql/")})
    specs = sorted(f"../test/{test}" for test in tests if test.endswith(".spec"))
    functions = sorted({f"../test/{test}" for test in tests if "::" in test})
    suites = ["fresh"] * bool(files) + ["isolation"] * bool(specs)
    if suites:
        yield [python, "../test/harness.py", "--pg", "18", "--suite", *suites, "--", *files, *specs]
    if functions:
        pytest = [python, "-m", "pytest", "-c", "pyproject.toml", "--rootdir", "..", "-qx", "-p", "no:cacheprovider"]
        yield [*pytest, "-m", "not long", *functions]


def run(fault: Fault, tests: list[str], copy: Path) -> Result:
    """Apply a fault to a copy, run tests there until one fails, and undo the fault."""
    environment = os.environ | {"PYTHONPATH": str(copy / "python/src"), "CI": "true"}
    file = copy / fault.file
    original = file.read_text()
    file.write_text(original.replace(fault.old, fault.new))
    end = time.monotonic() + SECONDS
    try:
        if fault.file.startswith("sql/"):
            subprocess.run(["make", "--silent", "build"], cwd=copy, check=True)
        for command in commands(tests):
            done = subprocess.run(
                command,
                cwd=copy / "python",
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=max(1.0, end - time.monotonic()),
            )
            if done.returncode:
                failed = FAILED.search(done.stdout) if done.returncode == TESTS_FAILED else None
                return Result(fault, failed is not None, failed[0] if failed else f"not run:\n{done.stdout}")
    except subprocess.TimeoutExpired:
        return Result(fault, fault.hangs, f"{'' if fault.hangs else 'HANGS: '}the tests did not end in {SECONDS} s")
    finally:
        file.write_text(original)
    return Result(fault, False, f"SURVIVED: none of its tests failed: {', '.join(tests)}")


def main() -> int:
    """Run the faults that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only look whether each fault can be applied")
    parser.add_argument("names", nargs="*", help="only these faults, or those of these promises")
    arguments = parser.parse_args()
    tests = {anchor: references(row.fast) for anchor, row in rows([]).items()}
    found = faults()
    if wrong := list(problems(found, tests)):
        print("\n".join(wrong))
        return 1
    if arguments.check:
        return 0
    if arguments.names:
        found = [fault for fault in found if {fault.name, fault.promise} & {*arguments.names}]
    copies: SimpleQueue[Path] = SimpleQueue()
    for number in range(os.cpu_count() or 1):
        copy = COPIES / str(number)
        make_copy(copy)
        copies.put(copy)

    def judge(fault: Fault) -> Result:
        copy, began = copies.get(), time.monotonic()
        try:
            result = run(fault, tests[fault.promise], copy)
        finally:
            copies.put(copy)
        print(f"{fault.name} ({fault.promise}, {time.monotonic() - began:.0f} s): {result.text}", flush=True)
        return result

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        results = list(threads.map(judge, found))
    seen = sum(result.is_seen for result in results)
    print(f"{seen} passed, {len(results) - seen} failed")
    return 0 if seen == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
