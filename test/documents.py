"""Checks the form of prose: the sizes of two documents, the words of all, and the length of lines in documents and in
comments of SQL and specs.

Lines of tables, code and generated text may be longer. A word has a letter. Words of code, of generated text, of
CHANGELOG.md and of tables of figures do not count. `documents.py --words` prints the words of each document.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BYTES = {"README.md": 12_000, "python/README.md": 15_000}  # what a document may have at most
WIDTH = 120
WORDS = 40_000  # what all documents may have
FIGURES = "test/bench/README.md"  # its tables
EXEMPT = re.compile(r"\||!\[")
# How the lines of a comment begin, by the suffix of the file.
COMMENTS = {".sql": ("--",), ".spec": ("#", "--")}


def files() -> Iterator[Path]:
    """The documents, the SQL written by hand, and the isolation specs."""
    yield from ROOT.glob("*.md")
    yield from ROOT.glob("extension/doc/**/*.md")
    yield from ROOT.glob("test/isolation/specs/*.spec")
    for directory in ("sql", "python", "test"):
        for pattern in ("**/*.md", "**/*.sql"):
            yield from (path for path in (ROOT / directory).glob(pattern) if "node_modules" not in path.parts)


def prose(text: str, suffix: str) -> Iterator[tuple[int, str]]:
    """The lines of a file with this suffix that people read as text, with their numbers."""
    is_code = is_generated = is_comment = False
    for number, line in enumerate(text.splitlines(), 1):
        if suffix in COMMENTS:
            is_comment |= line.startswith("comment on ")
            if is_comment or line.lstrip().startswith(COMMENTS[suffix]):
                yield number, line
            is_comment &= not line.endswith(";")
        elif line.lstrip().startswith("```"):
            is_code = not is_code
        elif marks := re.match(r"<!-- \w+: (begin|end) -->", line):
            is_generated = marks[1] == "begin"
        elif not is_code and not is_generated and not EXEMPT.match(line):
            yield number, line


def words(document: Path) -> int:
    """The words of a document, also those of its tables."""
    is_code = is_generated = False
    count = 0
    for line in document.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif marks := re.match(r"<!-- \w+: (begin|end) -->", line):
            is_generated = marks[1] == "begin"
        elif not is_code and not is_generated and not (line.startswith("|") and document == ROOT / FIGURES):
            count += sum(1 for word in line.split() if re.search("[A-Za-z]", word))
    return count


def main() -> int:
    """Print what is too long."""
    counts = {file.relative_to(ROOT): words(file) for file in files() if file.suffix == ".md"}
    del counts[Path("CHANGELOG.md")]
    if "--words" in sys.argv:
        print("\n".join(f"{count:6,} {file}" for file, count in counts.items()))
        print(f"{sum(counts.values()):6,} of {WORDS:,}")
        return 0
    problems = []
    if (total := sum(counts.values())) > WORDS:
        problems.append(f"the documents have {total:,} words; they may have {WORDS:,}: test/documents.py --words")
    for name, most in BYTES.items():
        size = len((ROOT / name).read_bytes())
        if size > most:
            problems.append(f"{name} has {size} bytes; it may have {most}: move details beside the code")
    for file in files():
        for number, line in prose(file.read_text(encoding="utf-8"), file.suffix):
            if len(line) > WIDTH:
                where = f"{file.relative_to(ROOT)}:{number}"
                problems.append(f"{where}: {len(line)} characters; a line of prose may have {WIDTH}")
    print("\n".join(problems), end="\n" * bool(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
