"""Imports that wait until the first test of a module runs. Every process of a run collects all tests, so an import that
takes a second would cost each of them a second.
"""

import ast
from pathlib import Path
from typing import Any


def run_type_checking_blocks(namespace: dict[str, Any]) -> None:
    """Run the blocks `if TYPE_CHECKING:` of a module in its namespace. They name what only its tests need."""
    path = namespace["__file__"]
    for statement in ast.parse(Path(path).read_text()).body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(statement.body, []), path, "exec"), namespace)
