"""Writes the functions in sql/REFERENCE.md from the comments of the public functions.

Usage: reference.py SQL_FILE... reads the modules in the order given and replaces what stands between the two
reference marks; with --check it changes nothing and fails where the file is not current.
"""

import re
import sys
from pathlib import Path
from textwrap import fill

from sections import update_section

FUNCTION = re.compile(
    r"^create or replace function pgqueue\.(?P<name>[a-z]\w*)\((?P<arguments>.*?)\)\nreturns (?P<returns>[^\n]+)",
    re.MULTILINE | re.DOTALL,
)
COMMENT = re.compile(
    r"^comment on function pgqueue\.(?P<name>[a-z]\w*)\([^;]*?\) is\n'(?P<text>(?:[^']|'')*)';", re.MULTILINE
)
WIDTH = 100


def reference(files: list[Path]) -> str:
    """A list of all functions, then each with its signature and its comment, by module."""
    index, entries = [], []
    for file in files:
        sql = file.read_text(encoding="utf-8")
        comments = {m["name"]: re.sub(r"\s+", " ", m["text"].replace("''", "'")) for m in COMMENT.finditer(sql)}
        functions = list(FUNCTION.finditer(sql))
        if functions:
            links = (f"[`{function['name']}`](#{function['name']})" for function in functions)
            index.append(f"| {file.stem.replace('_', ' ')} | {', '.join(links)} |")
        for function in functions:
            name = function["name"]
            if name not in comments:
                sys.exit(f"{file}: {name} has no comment on function in this file, which is the text of the reference")
            entries.append(f"### {name}\n\n```text\n{signature(function)}\n```\n\n{paragraphs(comments[name])}\n")
    return "\n".join(["| module | functions |\n|---|---|", *index, "", *entries])


def signature(function: re.Match[str]) -> str:
    """The function, its arguments with their defaults, and what it returns: on one line if it is short enough."""
    name, returns = function["name"], function["returns"].replace("pgqueue.", "")
    listed = re.sub(r"\s+", " ", function["arguments"]).strip()
    # The domains of names are text to a caller, and no caller gives the argument caller: the reference says so once.
    listed = re.sub(r"pgqueue\.(new_)?queue_of_\w+", "text", re.sub(r"(, )?caller pgqueue\.caller .*", "", listed))
    listed = listed.replace(" default ", " = ")
    line = f"{name}({listed}) → {returns}"
    if len(line) <= WIDTH:
        return line
    separated = ",\n    ".join(re.split(r", (?=\w+ [a-z])", listed))
    return f"{name}(\n    {separated}\n) → {returns}"


def paragraphs(comment: str) -> str:
    """A comment in lines, the errors that it ends with in a paragraph of their own."""
    parts = re.sub(r" (Raises [^.]*\.)$", r"\n\1", comment).split("\n")
    return "\n\n".join(fill(part, 120, break_long_words=False, break_on_hyphens=False) for part in parts)


def main(arguments: list[str]) -> int:
    """Write the reference, or check it."""
    files = [Path(argument) for argument in arguments if argument != "--check"]
    stale = 'the reference is not what sql/ says: run "make reference"'
    return update_section("reference", reference(files), stale, "sql/REFERENCE.md")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
