"""Finds the Java runtime for Spark. If there is none, the error says what to install."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LEAST_MAJOR", "Java", "JavaNotFoundError", "find_java", "use_java"]

LEAST_MAJOR = 17  # required by Spark 4
_VERSION_TIMEOUT = 30.0  # seconds; the first start from a cold disk is slow

# Directories of installers. The first is for a checkout, where make unpacks a JRE without root.
_CHECKOUT = Path(__file__).resolve().parents[4]
_PLACES = (
    (_CHECKOUT, ".cache/java/root/usr/lib/jvm/*"),
    (Path("/usr/lib/jvm"), "*"),
    (Path("/usr/java"), "*"),
    (Path("/opt"), "*j[dr][ke]*"),
    (Path("/opt/java"), "*"),
    (Path("/opt/homebrew/opt"), "openjdk*/libexec/openjdk.jdk/Contents/Home"),
    (Path("/Library/Java/JavaVirtualMachines"), "*/Contents/Home"),
    (Path.home(), ".sdkman/candidates/java/*"),
    (Path.home(), ".jdks/*"),
)
# The version is not always in the first line: Java first prints the options from the environment.
_VERSION = re.compile(r'^.*version "(?:1\.)?(\d+).*$', re.MULTILINE)


class JavaNotFoundError(RuntimeError):
    """No suitable Java was found. The message lists the places that were searched, and says what to install."""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime: its home directory, the major version, and the version line of `java -version`."""

    home: Path
    major: int
    version: str


def find_java() -> Java:
    """Return the first Java of version LEAST_MAJOR or later: from JAVA_HOME, PATH, or the usual directories.

    A JAVA_HOME that is wrong or too old is skipped. Raises JavaNotFoundError.
    """
    seen: dict[Path, str] = {}
    for home, named_by in _homes():
        if home in seen:
            continue
        found = _inspect(home)
        if isinstance(found, Java):
            if found.major >= LEAST_MAJOR:
                return found
            found = f"is Java {found.major}"
        seen[home] = f"{home} ({named_by}) {found}"
    looked = "; ".join(seen.values()) or "there is none in JAVA_HOME, on PATH, or in the usual places"
    raise JavaNotFoundError(
        f"Spark needs a Java runtime of version {LEAST_MAJOR} or later: {looked}. {_advice()}, or set JAVA_HOME."
    )


def use_java() -> Java:
    """Find a Java, and set JAVA_HOME to it for Spark sessions of this process. Raises JavaNotFoundError."""
    java = find_java()
    os.environ["JAVA_HOME"] = str(java.home)
    return java


def _homes() -> Iterator[tuple[Path, str]]:
    if given := os.environ.get("JAVA_HOME"):
        yield Path(given).absolute(), "JAVA_HOME"
    if on_path := shutil.which("java"):
        # The home is found behind symbolic links, such as those of Debian's alternatives.
        yield Path(on_path).resolve().parents[1], "PATH"
    for root, pattern in _PLACES:
        # By name, so the latest version usually comes first.
        for home in sorted(root.glob(pattern), reverse=True):
            yield home.resolve(), "found"


def _inspect(home: Path) -> Java | str:
    """Return the Java in a directory, or a text that says what is wrong with it."""
    program = home / "bin" / ("java.exe" if sys.platform == "win32" else "java")
    if not program.is_file():
        return "has no bin/java"
    try:
        done = subprocess.run(
            [program, "-version"], capture_output=True, text=True, errors="replace", timeout=_VERSION_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    output = done.stderr or done.stdout
    version = _VERSION.search(output)
    if done.returncode != 0 or version is None:
        return f"does not run: {(output.strip().splitlines() or ['it prints nothing'])[0]}"
    return Java(home, int(version[1]), version[0].strip())


def _advice() -> str:
    if sys.platform == "darwin":
        return "Install one, for example with: brew install openjdk@21"
    if shutil.which("apt-get"):
        return "Install one, for example with: apt-get install openjdk-17-jre-headless"
    if shutil.which("dnf"):
        return "Install one, for example with: dnf install java-21-openjdk-headless"
    return "Install one, for example Temurin 21"
