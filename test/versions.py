"""Checks that all files have the same version and home page, that commands install our package, and that META.json is
valid for PGXN.

Standard library only.
"""

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

SEMANTIC_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?")


def first(pattern: str, file: str) -> str | None:
    """Return the first group of a pattern's first match in a file; None if there is no match or no file."""
    path = ROOT / file
    found = re.search(pattern, path.read_text(), re.MULTILINE) if path.exists() else None
    return found[1] if found else None


def disagreements(meta: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each place with another version than pgqueue.control."""
    version = first(r"^default_version *= *'(.*)'", "pgqueue.control")
    project = tomllib.loads((ROOT / "python/pyproject.toml").read_text())["project"]
    provided = meta["provides"]["pgqueue"]
    places = {
        "META.json": meta["version"],
        "META.json, provides.pgqueue": provided["version"],
        "META.json, provides.pgqueue.file": provided["file"].removeprefix("extension/pgqueue--").removesuffix(".sql"),
        "python/pyproject.toml": project["version"],
        "python/src/pgqueue/__init__.py": first(r'^__version__ = "(.*)"', "python/src/pgqueue/__init__.py"),
        "sql/doctor.sql, version()": first(r"^as \$\$ select '(\d.*)'::text \$\$", "sql/doctor.sql"),
        "CHANGELOG.md, its top entry": first(r"^## \[?v?(\d[^\s\]]*)", "CHANGELOG.md"),
    }
    for place, found in places.items():
        if found != version:
            yield f"{place} has version {found}, pgqueue.control {version}"
    homes = meta.get("resources", {}).get("homepage"), project.get("urls", {}).get("Homepage")
    if homes[0] != homes[1]:
        yield f"META.json has the home page {homes[0]}, python/pyproject.toml {homes[1]}"


def other_names() -> Iterator[str]:
    """Yield a message for each command that would install the package of another author, which PyPI calls pgqueue."""
    files = [*ROOT.glob("*.md"), *(ROOT / "extension/doc").rglob("*.md"), *(ROOT / "python").rglob("*.md")]
    for path in (*files, *(ROOT / "python/src").rglob("*.py")):
        for found in re.finditer(r"pip install [^`\n]*?[' ](pgqueue)(?![\w-])(?! of)", path.read_text()):
            if "uninstall" not in found[0]:
                yield f"{path.relative_to(ROOT)}: the package is pgqueue-sql: {found[0]}"


def faults(meta: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each violation of the PGXN Meta Spec 1.0.0 in META.json."""
    for key in ("name", "version", "abstract", "maintainer", "license", "provides", "meta-spec"):
        if not meta.get(key):
            yield f"META.json: {key} is required"
    for name, extension in meta["provides"].items():
        for key in ("file", "docfile"):
            if not extension.get(key) or not (ROOT / extension[key]).exists():
                yield f"META.json: provides.{name}.{key} does not exist"
        if not SEMANTIC_VERSION.fullmatch(extension.get("version", "")):
            yield f"META.json: provides.{name}.version is not a semantic version"
    if not SEMANTIC_VERSION.fullmatch(meta["version"]):
        yield "META.json: version is not a semantic version"
    if meta["meta-spec"].get("version") != "1.0.0":
        yield "META.json: meta-spec.version must be 1.0.0"
    if meta["license"] != "postgresql":
        yield "META.json: the license is postgresql"
    if meta.get("release_status", "stable") not in ("stable", "testing", "unstable"):
        yield "META.json: release_status is stable, testing or unstable"
    if bad := [tag for tag in meta.get("tags", []) if not re.fullmatch(r"[^/\\\x00-\x1f]{2,255}", tag)]:
        yield f"META.json: tags have 2 to 255 characters and no slash: {bad}"
    for phase, relations in meta.get("prereqs", {}).items():
        for relation, needed in relations.items():
            for name, least in needed.items():
                if least != 0 and not SEMANTIC_VERSION.fullmatch(str(least)):
                    yield f"META.json: prereqs.{phase}.{relation}.{name} is not a semantic version or 0"


if __name__ == "__main__":
    card = json.loads((ROOT / "META.json").read_text())
    if problems := [*disagreements(card), *other_names(), *faults(card)]:
        sys.exit("\n".join(problems))
