"""Writes the functions and the row types in sql/REFERENCE.md from the comments in sql/.

Usage: reference.py SQL_FILE... reads the modules in the order given and replaces what stands between the two
reference marks; with --check it changes nothing and fails where the file is not current.
"""

import re
import sys
from pathlib import Path
from textwrap import fill

from sections import ROOT, update_section

FUNCTION = re.compile(
    r"^create or replace function pgqueue\.(?P<name>[a-z]\w*)\((?P<arguments>.*?)\)"
    r"\s+returns (?P<returns>[^\n]+?)\s+language ",
    re.MULTILINE | re.DOTALL,
)
COMMENT = re.compile(r"^comment on function pgqueue\.(?P<name>[a-z]\w*) is\n'(?P<text>(?:[^']|'')*)';", re.MULTILINE)
TYPE = re.compile(r"^create type pgqueue\.(?P<name>\w+) as \(\n(?P<columns>.*?)\n\);", re.MULTILINE | re.DOTALL)
TEXT_OF_TYPE = re.compile(r"^comment on type pgqueue\.(\w+) is\s+'((?:[^']|'')*)';", re.MULTILINE)
TEXT_OF_COLUMN = re.compile(r"^comment on column pgqueue\.(\w+\.\w+) is\s+'((?:[^']|'')*)';", re.MULTILINE)
SETTING = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)
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
    names, types = row_types(ROOT / "sql" / "types.sql")
    index.append(f"| row types | {', '.join(f'[`{name}`](#{name})' for name in names)} |")
    return "\n".join(["| module | functions |\n|---|---|", *index, "", *entries, *types])


def row_types(file: Path) -> tuple[list[str], list[str]]:
    """The names of the types that functions return, and for each its columns and what they mean."""
    sql = file.read_text(encoding="utf-8")
    texts, meanings = dict(TEXT_OF_TYPE.findall(sql)), dict(TEXT_OF_COLUMN.findall(sql))
    settings = SETTING.findall((ROOT / "sql" / "REFERENCE.md").read_text(encoding="utf-8").split("\n## ")[1])
    entries = []
    for name, columns in TYPE.findall(sql):
        rows, repeated = [], []
        for column, kind in re.findall(r"^    (\w+) (.*?),?$", columns, re.MULTILINE):
            if meaning := meanings.get(f"{name}.{column}"):
                rows.append(f"| `{column}` | {kind} | {meaning} |")
            elif f"message.{column}" in meanings or (name == "queue" and column in settings):
                repeated.append(f"`{column}`")
            else:
                sys.exit(f"{file}: {name}.{column} has no comment on column, which is the text of the reference")
        same = "[settings](#settings-of-a-queue)" if name == "queue" else "in [`message`](#message)"
        text = re.sub(r"\s+", " ", texts[name]).replace("''", "'")
        if repeated:
            text += f" The other columns are as {same}: {', '.join(repeated)}."
        listed = "\n".join(["| column | type | meaning |", "|---|---|---|", *rows])
        entries.append(f"### {name}\n\n{paragraphs(text)}\n\n{listed}\n")
    return [name for name, _ in TYPE.findall(sql)], entries


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
