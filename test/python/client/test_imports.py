"""The import graph of the package: no module imports itself through others, and `import pgqueue` stays small."""

import os
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pgqueue

# Optional dependencies, and the packages of this distribution that need them.
HEAVY = ("msgspec", "pyarrow", "pyspark", "starlette", "uvicorn", "pgqueue.http", "pgqueue.spark")


def test_no_module_imports_itself_through_others() -> None:
    """Imports in functions and under TYPE_CHECKING count, too."""
    import grimp

    graph = grimp.build_graph("pgqueue", cache_dir=None)
    edges = {module: graph.find_modules_directly_imported_by(module) - {module} for module in graph.modules}
    assert "pgqueue.consumer" in edges["pgqueue.cli.work"]  # in a function
    TopologicalSorter(edges).prepare()  # raises CycleError
    with pytest.raises(CycleError, match=r"pgqueue\.message"):
        TopologicalSorter(edges | {"pgqueue.message": {"pgqueue.client"}}).prepare()


def test_importing_pgqueue_loads_no_optional_dependency() -> None:
    code = "import sys, pgqueue; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "pgqueue.client" in loaded
    assert [name for name in loaded if any(f"{name}.".startswith(f"{heavy}.") for heavy in HEAVY)] == []


def test_dir_lists_the_names_of_the_consumer() -> None:
    assert {"Consumer", "Delivery", "Queue", "Retry"} <= set(dir(pgqueue))


def test_importing_beside_the_pgqueue_of_another_author_says_what_happened(tmp_path: Path) -> None:
    (tmp_path / "pgqueue").symlink_to(Path(pgqueue.__file__).parent)
    (tmp_path / "pgqueue.py").touch()  # as pip installs it
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = [sys.executable, "-c", "import pgqueue"]
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=environment)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {tmp_path}/pgqueue.py is the PgQ client of another author, which pip calls pgqueue. It has the"
        " same name as this package, which pip calls pgqueue-sql. Remove it: pip uninstall pgqueue"
    )
