"""Checks the SQL modules: functions and do blocks use only functions of their own or of an earlier module.

Usage: modules.py MODULE..., in the order of the Makefile. As the order is a list, modules cannot form a cycle. The same
holds for tables that belong to one module, so the core uses no table of a room. A plain literal has no backslash unless
its function pins standard_conforming_strings: a database can set it to off.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

SQL = Path(__file__).resolve().parents[1] / "sql"

FUNCTION = re.compile(
    r"^create or replace (?:function|procedure) pgqueue\.(?P<name>\w+)\(.*?\bas \$\$(?P<body>.*?)\$\$;$",
    re.MULTILINE | re.DOTALL,
)
BLOCK = re.compile(r"^do \$\$(.*?)\$\$;$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"\bpgqueue\.(\w+)")
COMMENT = re.compile(r"--[^\n]*")
LITERAL = re.compile(r"'(?:[^']|'')*'")
ESCAPED = re.compile(r"\be'(?:[^'\\]|\\.|'')*'")
PINNED = "\nset standard_conforming_strings = on\n"
MODULE_TABLES = {
    "dedup": ["dedup_keys"],
    "archive": ["archived_messages", "unfiled_messages", "archive_promises", "archive_clock"],
    "streams": ["streams"],
    "sink": ["staged_attempts", "staged_messages", "sink_commits"],
    "topics": ["subscriptions"],
    "schedules": ["schedules"],
    "results": ["results"],
    "transport": ["transports"],
}
# An acknowledgement and a receive insert into the archive in the statement that deletes, and date
# it by the archive's clock: see sql/finish.sql.
EXEMPT = {(module, table) for module in ("finish", "receive") for table in ("archived_messages", "unfiled_messages")}
EXEMPT.add(("finish", "archive_clock"))


def bodies(module: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the body, without comments, of each function and do block of a module."""
    sql = COMMENT.sub("", (SQL / f"{module}.sql").read_text(encoding="utf-8"))
    for function in FUNCTION.finditer(sql):
        # Hints of errors name functions without calling them.
        is_error = function["name"].startswith("_raise")
        yield function["name"], LITERAL.sub("", function["body"]) if is_error else function["body"]
    for block in BLOCK.findall(sql):
        yield "a do block", block


def faults(modules: list[str]) -> Iterator[str]:
    """Yield a message for each use of a later module."""
    home = {name: module for module in modules for name, _ in bodies(module)}
    home |= {table: module for module, tables in MODULE_TABLES.items() for table in tables}
    for place, module in enumerate(modules):
        for name, body in bodies(module):
            for used in sorted(set(NAME.findall(body))):
                if home.get(used, module) in modules[place + 1 :] and (module, used) not in EXEMPT:
                    yield f"sql/{module}.sql: {name} uses pgqueue.{used} of sql/{home[used]}.sql, a later module"


def plain_backslashes(modules: list[str]) -> Iterator[str]:
    """Yield a message for each plain literal with a backslash."""
    for module in modules:
        sql = COMMENT.sub("", (SQL / f"{module}.sql").read_text(encoding="utf-8"))
        sql = FUNCTION.sub(lambda function: "" if PINNED in function[0] else function[0], sql)
        for literal in LITERAL.findall(ESCAPED.sub("", sql)):
            if "\\" in literal:
                yield f"sql/{module}.sql: a plain literal has a backslash, write it with e: {literal[:60]}"


if __name__ == "__main__":
    sys.exit(
        "\n".join([*faults(sys.argv[1:]), *plain_backslashes(["schema", "types", "tables", "dump", *sys.argv[1:]])])
        or None
    )
