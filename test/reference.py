"""Writes the reference in the README from the comments of the public functions.

Usage: reference.py [--check] SQL_FILE... reads the modules in this order, and replaces the text between the two
reference marks. With --check it changes nothing, and fails if the README is not current.
"""

import re
import sys
from pathlib import Path

from readme_sections import update_section

FUNCTION = re.compile(
    r"^create or replace function pgqueue\.(?P<name>[a-z]\w*)\((?P<arguments>.*?)\)\nreturns (?P<returns>[^\n]+)",
    re.MULTILINE | re.DOTALL,
)
COMMENT = re.compile(
    r"^comment on function pgqueue\.(?P<name>[a-z]\w*)\([^;]*?\) is\n'(?P<text>(?:[^']|'')*)';", re.MULTILINE
)


def reference(files: list[Path]) -> str:
    """Return the reference as Markdown."""
    entries = []
    for file in files:
        sql = file.read_text(encoding="utf-8")
        comments = {m["name"]: m["text"].replace("''", "'") for m in COMMENT.finditer(sql)}
        for function in FUNCTION.finditer(sql):
            name = function["name"]
            arguments = re.sub(r"\s+", " ", function["arguments"]).strip().replace(" default ", " = ")
            returns = function["returns"].replace("pgqueue.", "")
            entries.append(f"**`{name}({arguments})`** → `{returns}`<br>\n{comments[name]}\n")
    return "\n".join(entries)


def main(arguments: list[str]) -> int:
    files = [Path(argument) for argument in arguments if argument != "--check"]
    return update_section("reference", reference(files), 'the reference is not what sql/ says: run "make reference"')


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
