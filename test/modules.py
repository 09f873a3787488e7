"""Checks the order of the SQL modules: a function calls only functions of its own module or of an earlier one.

Usage: modules.py CORE_MODULE... -- ROOM_MODULE..., in the order of the Makefile. As the order is a list, modules cannot
form a cycle. A core module must not use a table of a room either.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

SQL = Path(__file__).resolve().parents[1] / "sql"

FUNCTION = re.compile(
    r"^create or replace (?:function|procedure) pgqueue\.(?P<name>\w+)\(.*?^as \$\$(?P<body>.*?)\$\$;$",
    re.MULTILINE | re.DOTALL,
)
NAME = re.compile(r"\bpgqueue\.(\w+)")
COMMENT = re.compile(r"--[^\n]*")
LITERAL = re.compile(r"'(?:[^']|'')*'")
ROOM_TABLES = {
    "archive": ["archive_promises"],
    "streams": ["streams"],
    "sink": ["staged_attempts", "staged_messages", "sink_commits"],
    "topics": ["subscriptions"],
    "schedules": ["schedules"],
    "transport": ["transports"],
    "compact": ["compactions"],
}


def functions(module: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the body, without comments, of each function of a module."""
    for function in FUNCTION.finditer((SQL / f"{module}.sql").read_text(encoding="utf-8")):
        body = COMMENT.sub("", function["body"])
        # Hints of errors name functions without calling them.
        yield function["name"], LITERAL.sub("", body) if function["name"].startswith("_raise_") else body


def faults(core: list[str], rooms: list[str]) -> Iterator[str]:
    """Yield a message for each use of a later module."""
    modules = [*core, *rooms]
    home = {name: module for module in modules for name, _ in functions(module)}
    home |= {table: room for room, tables in ROOM_TABLES.items() for table in tables}
    for place, module in enumerate(modules):
        for name, body in functions(module):
            for used in sorted(set(NAME.findall(body))):
                if home.get(used, module) in modules[place + 1 :]:
                    yield f"sql/{module}.sql: {name} uses pgqueue.{used} of sql/{home[used]}.sql, a later module"


if __name__ == "__main__":
    divider = sys.argv.index("--")
    sys.exit("\n".join(faults(sys.argv[1:divider], sys.argv[divider + 1 :])) or None)
