"""Writes generated sections of documents, each between two marks."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def update_section(name: str, text: str, stale: str, readme: str = "README.md") -> int:
    """Write a text between the marks of this name in a document; returns the exit status.

    If --check is among the program's arguments, the file is not changed: a difference prints `stale` and returns 1.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    file = ROOT / readme
    old = file.read_text(encoding="utf-8")
    if old.count(begin) != 1 or old.count(end) != 1:
        print(f"{readme} needs {begin} and {end}, once each, where the text belongs")
        return 1
    before, rest = old.split(begin)
    new = f"{before}{begin}\n\n{text}\n{end}{rest.split(end)[1]}"
    if new == old:
        return 0
    if "--check" in sys.argv:
        print(f"{readme}: {stale}")
        return 1
    file.write_text(new, encoding="utf-8")
    return 0
