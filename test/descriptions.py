"""Is every pgTAP description a sentence of its own? Standard library only.

This cannot be decided in general. The check finds calls without a description, descriptions of fewer than three words,
and descriptions that start with a word that continues another sentence.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# The number of arguments that come before the description.
ASSERTIONS = {
    "alike": 2,
    "cmp_ok": 3,
    "columns_are": 3,
    "has_column": 3,
    "has_schema": 1,
    "hasnt_view": 2,
    "is": 2,
    "is_empty": 1,
    "isnt": 2,
    "isnt_empty": 1,
    "lives_ok": 1,
    "matches": 2,
    "ok": 1,
    "results_eq": 2,
    "set_eq": 2,
    "throws_like": 2,
    "throws_ok": 3,
    "unalike": 2,
    "volatility_is": 4,
}
CALL = re.compile(rf"(?<![\w.$'])({'|'.join(ASSERTIONS)})\(")
# A string, a dollar-quoted string, a comment, or a single character.
TOKEN = re.compile(r"'(?:[^']|'')*'|(\$\w*\$)(?s:.*?)\1|--[^\n]*|(?s:.)")
CONTINUES = re.compile(r"(also|and|but|nor|or|so|then|though|too|which|who|whoever|whose)\b", re.IGNORECASE)
# What takes the place of an expression whose value the source does not show.
VALUE = "x"


def arguments(source: str, start: int) -> list[str]:
    """The arguments of the call whose opening parenthesis ends at start."""
    found, depth = [""], 0
    for token in TOKEN.finditer(source, start):
        text = token[0]
        if text in "([":
            depth += 1
        elif text in ")]":
            if depth == 0:
                break
            depth -= 1
        if text == "," and depth == 0:
            found.append("")
        else:
            found[-1] += text
    return found


def description(argument: str) -> str | None:
    """The text of an argument, with a word for each expression in it; None if it contains no string."""
    if argument.strip().startswith("format("):
        argument = arguments(argument, argument.index("(") + 1)[0]
    parts = re.split(r"('(?:[^']|'')*')", argument)
    if len(parts) == 1:
        return None
    shown = [part[1:-1].replace("''", "'") if number % 2 else VALUE for number, part in enumerate(parts)]
    ends = [number for number in (0, len(parts) - 1) if not parts[number].strip()]
    text = "".join(part for number, part in enumerate(shown) if number not in ends)
    # In a function that tests several kinds of queue a description starts with the name of the queue.
    return re.sub(rf"^({VALUE}|%s): ", "", re.sub(r"%\d*\$?[IL]", VALUE, text))


def faults(path: Path) -> Iterator[str]:
    """The descriptions of a file that are no sentences."""
    source = path.read_text()
    for call in CALL.finditer(source):
        given = arguments(source, call.end())
        place = f"{path.relative_to(ROOT)}:{source.count(chr(10), 0, call.start()) + 1}"
        if len(given) <= ASSERTIONS[call[1]]:
            yield f"{place}: {call[1]} has no description"
            continue
        text = description(given[-1])
        if text is None:
            continue
        if CONTINUES.match(text):
            yield f"{place}: a description starts with a word that continues another sentence: {text}"
        elif len(text.split()) < 3:
            yield f"{place}: a description has fewer than three words: {text}"


if __name__ == "__main__":
    if problems := [fault for path in sorted((ROOT / "test/sql").glob("*.sql")) for fault in faults(path)]:
        sys.exit("\n".join(problems))
