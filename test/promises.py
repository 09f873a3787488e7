"""Has each promise of the documents an anchor, a row in test/README.md, and a fast test? Standard library only.

A promise is a sentence, an item of a list or a row of a table under a heading `Promises` or `Guarantees`. The table
`Promises` of test/README.md names the tests that fail when it is broken: the fast ones, which `make test` runs, and
those of `make test-long`, which have the mark `long`.

The program fails for a promise without an anchor or a row, a row without a promise or a fast test, a test that does not
exist, a test in the wrong column, a scenario that has no test or is missing, and a mark that names no part.
"""

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TEST = ROOT / "test"
TABLES = TEST / "README.md"

HEADING = re.compile(r"#+ (.+)")
ANCHOR = re.compile(r'<a id="([^"]+)"></a>')
LINK = re.compile(r"\[([^\]]+)\]\(([^)#]+)#([^)]+)\)")
# Between two sentences.
STOP = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\[<])")
# A sentence that leads to other promises.
REFERENCE = re.compile(r"\]\([^)]*#promises\)|:$")
# What comes before a description, or the part of it that is the same for all queues.
QUOTE = r"'(?:: |%\d*\$?[sIL]:? | )?"
# The numbers in the tables of scenarios, each of which is there once.
SCENARIOS = [*map(str, range(1, 62)), *(f"H{number}" for number in range(1, 15))]
# The mark `long` with its part; where it marks all forms of a test, or all tests of a module; and where a file uses it,
# also by the names that tests have for it.
MARK = re.compile(r"\bmark\.long\b(?:\(part=\"(\w+)\"\))?")
MARKED = re.compile(r"^@(?:pytest\.mark\.long\b|(?:long|LONG)$)", re.MULTILINE)
MARKED_MODULE = re.compile(r"^pytestmark = .*\bmark\.long\b", re.MULTILINE)
USED = re.compile(r"\b(?:mark\.long|marks=long|LONG)\b")


class Line(NamedTuple):
    """A line of a document, or several that form one text, and the place of the first."""

    place: str
    text: str


class Promise(NamedTuple):
    """An anchor and its place."""

    place: str
    document: Path


class Row(NamedTuple):
    """A row of the table of promises."""

    place: str
    document: Path
    fast: str
    long: str


# Documents.


def documents() -> list[Path]:
    """All documents in which promises may be: not this table, nor what tests or tools have fetched."""
    places = ("*.md", "extension/doc/**/*.md", "sql/**/*.md", "python/**/*.md")
    found = [path for place in places for path in ROOT.glob(place)]
    return sorted(path for path in found if "node_modules" not in path.parts)


def section(document: Path, title: str) -> Iterator[Line]:
    """The lines between a heading that matches the title and the next heading, without code."""
    is_code = is_inside = False
    for number, text in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        if text.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and (heading := HEADING.match(text)):
            is_inside = bool(re.fullmatch(title, heading[1]))
        elif not is_code and is_inside:
            yield Line(f"{document.relative_to(ROOT)}:{number}", text)


def blocks(document: Path) -> Iterator[Line]:
    """The paragraphs, items and rows of the promises of a document. A row with the names of columns is none."""
    block: list[str] = []
    start = ""
    for place, text in [*section(document, "Promises|Guarantees"), Line("", "")]:
        if block and (not text or re.match(r"\||\* ", text)):
            yield Line(start, " ".join(block))
            block = []
        if set(text) <= set("|-: ") and text:
            continue
        if text:
            start = start if block else place
            block.append(text.strip())


def sentences(document: Path) -> Iterator[Line]:
    """The sentences of these blocks. A row is one, and the head of a table is left out."""
    is_table = False
    for place, text in blocks(document):
        was_table, is_table = is_table, text.startswith("|")
        if is_table:
            if was_table:
                yield Line(place, text.removeprefix("| "))
            continue
        for sentence in STOP.split(text.removeprefix("* ")):
            yield Line(place, sentence)


def promises(problems: list[str]) -> dict[str, Promise]:
    """The promises of all documents by their anchors."""
    found: dict[str, Promise] = {}
    for document in documents():
        for place, text in sentences(document):
            anchor = ANCHOR.match(text)
            if anchor and anchor[1] in found:
                problems.append(f"{place}: the anchor {anchor[1]} is at {found[anchor[1]].place}, too")
            elif anchor:
                found[anchor[1]] = Promise(place, document)
            elif not REFERENCE.search(text):
                problems.append(f'{place}: a promise without an anchor <a id="…"></a>: {text}')
    return found


# References to tests.


@cache
def kinds(reference: str) -> set[str]:
    """Whether the test of a reference is fast or long, or may be both; nothing if it does not exist.

    A test in Python is long if a decorator or its module has the mark. It can have long forms if its file uses it.
    """
    path, colons, name = reference.partition("::")
    if colons:
        text = (TEST / path).read_text(encoding="utf-8") if (TEST / path).is_file() else ""
        if not (test := re.search(rf"((?:^[@ )\]].*\n)*)^(?:async )?def {re.escape(name)}\(", text, re.MULTILINE)):
            return set()
        if MARKED.search(test[1]) or MARKED_MODULE.search(text):
            return {"long"}
        return {"fast", "long"} if USED.search(text) else {"fast"}
    path, _, description = reference.partition(": ")
    if not (TEST / path).exists():
        return set()
    if path.endswith(".sql") and description:
        quoted = QUOTE + re.escape(description.replace("'", "''"))
        return {"fast"} if re.search(quoted, (TEST / path).read_text(encoding="utf-8")) else set()
    return {"fast"} if path.endswith(".spec") else {"long"}


def references(cell: str) -> list[str]:
    """The tests that a cell names."""
    return re.findall(r"`([^`]+)`", cell)


def wrong(place: str, cell: str, kind: str = "") -> Iterator[str]:
    """What is wrong with the tests in a cell; with a kind, all of them must be of that kind."""
    for reference in references(cell):
        found = kinds(reference)
        if not found:
            yield f"{place}: there is no test {reference}"
        elif kind and kind not in found:
            yield f"{place}: {reference} is {' and '.join(found)}, and stands under {kind}"


# The tables of test/README.md.


def rows(problems: list[str]) -> dict[str, Row]:
    """The table of promises by the anchors."""
    found: dict[str, Row] = {}
    for place, text in section(TABLES, "Promises"):
        cells = [cell.strip() for cell in text.strip("| ").split("|")] if text.startswith("| ") else []
        if not cells or cells[0] == "anchor":
            continue
        link = LINK.fullmatch(cells[0])
        if len(cells) not in (2, 3) or not link or link[1] != link[3]:
            problems.append(f"{place}: a row is [anchor](document#anchor), fast tests, long tests: {text}")
        elif link[1] in found:
            problems.append(f"{place}: there is another row of {link[1]} at {found[link[1]].place}")
        else:
            found[link[1]] = Row(place, (TEST / link[2]).resolve(), cells[1], "".join(cells[2:]))
    return found


def unproved(row: Row) -> Iterator[str]:
    """What is wrong with the tests of a promise."""
    yield from wrong(row.place, row.fast, "fast")
    yield from wrong(row.place, row.long, "long")
    if references(row.fast):
        return
    if not re.match(r"long only: \w", row.fast):
        yield f"{row.place}: no fast test, and no `long only: reason`"
    elif not references(row.long):
        yield f"{row.place}: long only, and no long test"


def check_promises() -> Iterator[str]:
    """Compare the promises with the table."""
    problems: list[str] = []
    promised, proved = promises(problems), rows(problems)
    yield from problems
    for anchor, promise in promised.items():
        if anchor not in proved:
            yield f"{promise.place}: {anchor} has no row in the table Promises of {TABLES.relative_to(ROOT)}"
    for anchor, row in proved.items():
        if anchor not in promised or promised[anchor].document != row.document:
            yield f"{row.place}: {row.document.relative_to(ROOT)} has no promise with the anchor {anchor}"
        yield from unproved(row)


def check_scenarios() -> Iterator[str]:
    """Is every scenario in the tables, and every test that they name in the tree?"""
    lines = [Line(f"test/README.md:{n}", text) for n, text in enumerate(TABLES.read_text().splitlines(), 1)]
    found = [(place, row) for place, text in lines if (row := re.fullmatch(r"\| (H?\d+) \| .+? \| (.+) \|", text))]
    numbers = [row[1] for _, row in found]
    for number in [*SCENARIOS, *sorted(set(numbers) - set(SCENARIOS))]:
        if numbers.count(number) != 1 or number not in SCENARIOS:
            yield f"test/README.md: scenario {number} is there {numbers.count(number)} times"
    for place, row in found:
        yield from wrong(place, row[2])
        if not references(row[2]) and "does not apply" not in row[2]:
            yield f"{place}: scenario {row[1]} has no test and does not say why"


# Parts.


def check_parts() -> Iterator[str]:
    """Does every mark `long` name a part that exists?"""
    parts = re.findall(r"^PARTS = (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[0].split()
    for path in sorted({*TEST.rglob("*.py")} - {Path(__file__).resolve()}):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if any(part not in parts for part in MARK.findall(line)):
                yield f"{path.relative_to(ROOT)}:{number}: the mark names no part of the Makefile: {' '.join(parts)}"


def main() -> int:
    """Print what is wrong."""
    problems = [*check_promises(), *check_scenarios(), *check_parts()]
    print("\n".join(problems), end="\n" * bool(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
