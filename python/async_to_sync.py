"""Writes the sync client, src/pgqueue/_client_sync.py, from the async one, src/pgqueue/_client_async.py.

Usage: async_to_sync.py [--check]; with --check it writes nothing, and fails if the sync client is not current.
"""

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

SOURCE = Path(__file__).parent / "src/pgqueue/_client_async.py"
TARGET = SOURCE.with_name("_client_sync.py")
HEADER = "# Generated from _client_async.py by async_to_sync.py: do not edit.\n"
NAMES = {
    "AsyncConnection": "Connection",
    "AsyncOwnCursor": "OwnCursor",
    "AsyncQueue": "Queue",
    "AsyncQueues": "Queues",
    "AsyncRows": "Rows",
    "each_row_async": "each_row",
}
WORDS = re.compile(rf"\b({'|'.join(NAMES)})\b")


def synchronous(source: str) -> str:
    """The same code without `async` and `await`, and with the sync names, also in its docstrings."""
    lines = source.splitlines(keepends=True)
    for token in reversed([*tokenize.generate_tokens(io.StringIO(source).readline)]):
        if token.type == tokenize.NAME and token.string in ("async", "await", *NAMES):
            (row, begin), (_, end) = token.start, token.end
            before, after = lines[row - 1][:begin], lines[row - 1][end:]
            lines[row - 1] = before + (NAMES[token.string] + after if token.string in NAMES else after.lstrip(" "))
        elif token.type == tokenize.STRING:
            for number in range(token.start[0], token.end[0] + 1):
                lines[number - 1] = WORDS.sub(lambda found: NAMES[found[1]], lines[number - 1])
    return HEADER + "".join(lines).replace("asynchronous", "synchronous")


def formatted(code: str) -> str:
    """The code as ruff would write it, with its imports sorted and without those that nothing uses."""
    ruff = [str(Path(sys.executable).with_name("ruff"))]
    name = ["--stdin-filename", str(TARGET)]
    for command in (["check", "--quiet", "--fix-only", "--select", "F401,I"], ["format", "--quiet"]):
        code = subprocess.run(
            [*ruff, *command, *name, "-"], input=code, capture_output=True, text=True, check=True, cwd=SOURCE.parents[2]
        ).stdout
    return code


def main(arguments: list[str]) -> int | str:
    """Write the sync client, or check it."""
    code = formatted(synchronous(SOURCE.read_text("utf8")))
    if "--check" not in arguments:
        TARGET.write_text(code, "utf8")
    elif code != TARGET.read_text("utf8"):
        return f'{TARGET.name} is not what {SOURCE.name} generates: run "make client"'
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
