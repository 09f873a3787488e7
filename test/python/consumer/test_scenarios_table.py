"""The table of scenarios in test/README.md names every scenario once, and tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

TEST = Path(__file__).resolve().parents[2]
ROWS = re.findall(r"^\| (H?\d+) \| .+? \| (.+) \|$", (TEST / "README.md").read_text(), re.MULTILINE)


@cache
def functions(path: str) -> set[str]:
    return {node.name for node in ast.parse((TEST / path).read_text()).body if isinstance(node, ast.FunctionDef)}


def exists(reference: str) -> bool:
    """A file, a file and a function in it, or a file and a sentence in it."""
    path, colons, name = reference.partition("::")
    if colons:
        return name in functions(path)
    path, _, sentence = reference.partition(": ")
    return (TEST / path).exists() and (not sentence or sentence in (TEST / path).read_text())


def test_every_scenario_is_in_the_table() -> None:
    assert [number for number, _ in ROWS] == [*map(str, range(1, 62)), *(f"H{number}" for number in range(1, 15))]


def test_the_table_names_tests_that_exist() -> None:
    references = [reference for _, proofs in ROWS for reference in re.findall(r"`([^`]+)`", proofs)]
    assert len(references) > 100
    assert [reference for reference in references if not exists(reference)] == []


def test_a_scenario_without_a_test_says_why() -> None:
    assert [number for number, proofs in ROWS if not proofs.startswith("`") and "does not apply" not in proofs] == []
