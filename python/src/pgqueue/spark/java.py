"""Finds the Java that Spark runs on, and says what to install where there is none, before a JVM says it at length."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LEAST_MAJOR", "Java", "JavaNotFoundError", "find_java", "use_java"]

LEAST_MAJOR = 17  # what Spark 4 asks for
_PATIENCE = 30.0  # seconds; a first start from a cold disk takes some

# Where installers put it. The first is of a checkout, where `make setup` unpacks a JRE without root.
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
# Not always in the first line: before it, Java says which options it took from the environment.
_VERSION = re.compile(r'^.*version "(?:1\.)?(\d+).*$', re.MULTILINE)


class JavaNotFoundError(RuntimeError):
    """No Java that Spark can run on was found; the message says what was looked at and what to install."""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java: its home, the major version, and the line of `java -version` that says it."""

    home: Path
    major: int
    version: str


def find_java() -> Java:
    """Return the first Java of LEAST_MAJOR or later: that of JAVA_HOME, of PATH, or of the usual places.

    Each is asked for its version: a JAVA_HOME that is wrong, or too old, is passed over. Raises JavaNotFoundError.
    """
    seen: dict[Path, str] = {}
    for home, named_by in _homes():
        if home in seen:
            continue
        found = _ask(home)
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
    """Find a Java, and make it the one that a Spark session of this process starts on, by JAVA_HOME."""
    java = find_java()
    os.environ["JAVA_HOME"] = str(java.home)
    return java


def _homes() -> Iterator[tuple[Path, str]]:
    if given := os.environ.get("JAVA_HOME"):
        yield Path(given).absolute(), "JAVA_HOME"
    if on_path := shutil.which("java"):
        # Links, as those of Debian's alternatives, hide where the home is.
        yield Path(on_path).resolve().parents[1], "PATH"
    for root, pattern in _PLACES:
        # The latest comes first, if names are any guide.
        for home in sorted(root.glob(pattern), reverse=True):
            yield home.resolve(), "found"


def _ask(home: Path) -> Java | str:
    """Ask a Java for its version; a text says what is wrong with it."""
    program = home / "bin" / ("java.exe" if sys.platform == "win32" else "java")
    if not program.is_file():
        return "has no bin/java"
    try:
        done = subprocess.run(
            [program, "-version"], capture_output=True, text=True, errors="replace", timeout=_PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    said = done.stderr or done.stdout
    version = _VERSION.search(said)
    if done.returncode != 0 or version is None:
        return f"does not run: {(said.strip().splitlines() or ['it says nothing'])[0]}"
    return Java(home, int(version[1]), version[0].strip())


def _advice() -> str:
    if sys.platform == "darwin":
        return "Install one, as by brew install openjdk@21"
    if shutil.which("apt-get"):
        return "Install one, as by apt-get install openjdk-17-jre-headless"
    if shutil.which("dnf"):
        return "Install one, as by dnf install java-21-openjdk-headless"
    return "Install one, as Temurin 21"
