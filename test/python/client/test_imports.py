"""The import graph of the package: no module imports itself through others, and `import pgqueue` stays small."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pgqueue

SOURCE = Path(pgqueue.__file__).parent
# Optional dependencies, and the packages of this distribution that need them.
HEAVY = ("fastapi", "pyarrow", "pydantic", "pyspark", "starlette", "uvicorn", "pgqueue.http", "pgqueue.spark")

Graph = dict[str, set[str]]


def sources(root: Path) -> dict[str, Path]:
    """The module names of a package, with their files."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules that a module imports anywhere in its text: in functions and under TYPE_CHECKING, too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text("utf8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                target = f"{base}.{alias.name}"
                if target in modules:  # `from . import module` is an import of the module, not of the package
                    yield target
                elif base in modules:
                    yield base


def graph(root: Path) -> Graph:
    modules = sources(root)
    return {name: set(imports(name, path, modules)) - {name} for name, path in modules.items()}


def cycle(edges: Graph) -> list[str]:
    """A path of imports that ends where it starts; empty if there is none."""
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for imported in sorted(edges.get(name, ())):
            if found := search(imported, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(edges) if (found := search(name, []))), [])


def test_no_module_imports_itself_through_others() -> None:
    found = cycle(graph(SOURCE))
    assert not found, f"circular import: {' -> '.join(found)}"


def test_the_graph_has_imports_of_every_form(tmp_path: Path) -> None:
    root = tmp_path / "shop"
    (root / "parts").mkdir(parents=True)
    for name, text in {
        "__init__.py": "from .parts import wheel",
        "parts/__init__.py": "",
        "parts/wheel.py": "def turn():\n    from ..engine import start",
        "engine.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import shop.parts.wheel",
    }.items():
        (root / name).write_text(text)
    edges = graph(root)
    assert edges == {
        "shop": {"shop.parts.wheel"},
        "shop.parts": set(),
        "shop.parts.wheel": {"shop.engine"},
        "shop.engine": {"shop.parts.wheel"},
    }
    assert cycle(edges) == ["shop.parts.wheel", "shop.engine", "shop.parts.wheel"]
    assert cycle(edges | {"shop.engine": set()}) == []


def test_importing_pgqueue_loads_no_optional_dependency() -> None:
    code = "import sys, pgqueue; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "pgqueue.client" in loaded
    assert [name for name in loaded if any(f"{name}.".startswith(f"{heavy}.") for heavy in HEAVY)] == []
