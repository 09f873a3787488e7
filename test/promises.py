"""Has each promise of the documents an anchor, a row in test/README.md, and a fast test? Standard library only.

A promise is a sentence, an item of a list or a row of a table under a heading `Promises` or `Guarantees`. The table
`Promises` of test/README.md names the tests that fail when it is broken: the fast ones, which `make test` runs, and
those of `make test-long`, which have the mark `long`. The tests in the tables of scenarios there must exist, too.
"""

import ast
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
Function = ast.FunctionDef | ast.AsyncFunctionDef


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
    found = [*ROOT.glob("*.md")]
    for directory in ("sql", "python"):
        found += [path for path in (ROOT / directory).glob("**/*.md") if "node_modules" not in path.parts]
    return sorted(found)


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


# Tests in Python.


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def modules() -> dict[str, Path]:
    """The Python files of test/ by the name by which others import them."""
    return {path.stem: path for path in TEST.rglob("*.py") if path.stem != "conftest"}


@cache
def definitions(path: Path) -> dict[str, ast.AST]:
    """What a file defines by name: a function, a class, the value of a constant, or the import that provides it."""
    found: dict[str, ast.AST] = {}
    for node in tree(path).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found[node.name] = node
            case ast.Assign() | ast.AnnAssign(value=ast.expr()):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = (name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
                found |= {name.id: node.value or node for name in names}
            case ast.ImportFrom():
                found |= {alias.asname or alias.name: node for alias in node.names}
    return found


@cache
def sources(path: Path) -> list[Path]:
    """The files that define what a test can name: its own, and each conftest.py beside it or above."""
    above = (directory / "conftest.py" for directory in path.parents if TEST in directory.parents)
    return [path, *(file for file in above if file.exists())]


@cache
def meaning(path: Path, name: str) -> tuple[Path, ast.AST] | None:
    """What a name means in a file, and the file that defines it; also the name of a fixture."""
    for file in sources(path):
        node = definitions(file).get(name)
        if isinstance(node, ast.ImportFrom):
            source = modules().get(node.module or "")
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            return meaning(source, original) if source else None
        if node:
            return file, node
    return None


def is_long(node: ast.AST) -> bool:
    """Is the node pytest.mark.long, or a call of it?"""
    node = node.func if isinstance(node, ast.Call) else node
    return isinstance(node, ast.Attribute) and node.attr == "long" and ast.unparse(node.value).endswith("mark")


def is_mark(path: Path, node: ast.AST) -> bool:
    """Is it a mark `long`, a name for one, a list that contains one, or a parametrization with long values only?"""
    if isinstance(node, ast.Name):
        meant = meaning(path, node.id)
        return meant is not None and is_mark(*meant)
    if isinstance(node, ast.List | ast.Tuple):
        return any(is_mark(path, element) for element in node.elts)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.parametrize" and len(node.args) > 1:
        values = node.args[1]
        return isinstance(values, ast.List) and all(contains_mark(path, value) for value in values.elts)
    return is_long(node)


def contains_mark(path: Path, node: ast.AST) -> bool:
    """Is a mark `long` anywhere in an expression, or in the constants that it names?"""
    for each in ast.walk(node):
        meant = meaning(path, each.id) if isinstance(each, ast.Name) else None
        is_constant = meant and isinstance(meant[1], ast.expr)
        if is_long(each) or (meant and is_constant and contains_mark(*meant)):
            return True
    return False


@cache
def has_long_form(path: Path, function: Function) -> bool:
    """Has the function, or a fixture that it uses, a parameter with the mark?"""
    if any(contains_mark(path, decorator) for decorator in function.decorator_list):
        return True
    fixtures = (meaning(path, argument.arg) for argument in [*function.args.args, *function.args.kwonlyargs])
    return any(
        has_long_form(fixture[0], fixture[1])
        for fixture in fixtures
        if fixture and isinstance(fixture[1], Function) and fixture[1] is not function
    )


def marks_of_body(path: Path, body: list[ast.stmt]) -> bool:
    """Does a module or class mark all its tests, by pytestmark?"""
    return any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark" and is_mark(path, node.value)
        for node in body
    )


def search(path: Path, node: ast.Module | ast.ClassDef, name: str, long: bool = False) -> tuple[Function, bool] | None:
    """The function or method of this name in a module or class, and whether all its forms are long."""
    long |= marks_of_body(path, node.body)
    for each in node.body:
        if not isinstance(each, Function | ast.ClassDef):
            continue
        marked = long or any(is_mark(path, decorator) for decorator in each.decorator_list)
        if isinstance(each, ast.ClassDef):
            if found := search(path, each, name, marked):
                return found
        elif each.name == name:
            return each, marked
    return None


# References to tests.


@cache
def kinds(reference: str) -> set[str]:
    """Whether the test of a reference is fast or long, or both by its parameters; nothing if it does not exist."""
    path, colons, name = reference.partition("::")
    if colons:
        file = TEST / path
        found = search(file, tree(file), name.rpartition("::")[2]) if file.is_file() else None
        if found is None:
            return set()
        if found[1]:
            return {"long"}
        return {"fast", "long"} if has_long_form(file, found[0]) else {"fast"}
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


def parts() -> list[str]:
    """The parts of `make test-long`."""
    words = re.search(r"^PARTS = (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return words[1].split() if words else []


def check_parts() -> Iterator[str]:
    """Does every mark `long` name a part that exists?"""
    known = parts()
    for path in sorted(TEST.rglob("*.py")):
        if path == Path(__file__).resolve() or "mark.long" not in path.read_text(encoding="utf-8"):
            continue
        nodes = list(ast.walk(tree(path)))
        calls = {node.func: node for node in nodes if isinstance(node, ast.Call)}
        for mark in sorted((node for node in nodes if isinstance(node, ast.Attribute) and is_long(node)), key=position):
            given = [word.value for word in calls[mark].keywords if word.arg == "part"] if mark in calls else []
            if not any(isinstance(part, ast.Constant) and part.value in known for part in given):
                place = f"{path.relative_to(ROOT)}:{mark.lineno}"
                yield f"{place}: {ast.unparse(calls.get(mark, mark))} names no part of the Makefile: {' '.join(known)}"


def position(node: ast.expr) -> tuple[int, int]:
    """Where a node begins in its file."""
    return node.lineno, node.col_offset


def main() -> int:
    """Print what is wrong."""
    problems = [*check_promises(), *check_scenarios(), *check_parts()]
    print("\n".join(problems), end="\n" * bool(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
