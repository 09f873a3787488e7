"""Finding Java, and commands in processes of their own: errors in one line, and no files left after a signal."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from sparks import long

if TYPE_CHECKING:
    from pyspark import SparkContext

    import pgqueue.spark
    from pgqueue.demo import java
    from pgqueue.demo.java import JavaNotFoundError, find_java
    from pgqueue.spark import register


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Hide all Java installations of the machine."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(java, "_PLACES", ((tmp_path / "jvm", "*"),))
    return tmp_path


def program(home: Path, script: str) -> Path:
    file = home / "bin/java"
    file.parent.mkdir(parents=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return home


def ran(code: str, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own. The limit ends only a program that hangs."""
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=1200, **more)


def says(version: str) -> str:
    return f"echo 'openjdk version \"{version}\" 2026-01-20' >&2"


def test_without_java_the_error_says_what_to_install(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JavaNotFoundError, match=r"17 or later: there is none in JAVA_HOME, on PATH") as refused:
        find_java()
    assert "Install one" in str(refused.value)
    program(nowhere / "jvm/java-8", says("1.8.0_402"))
    program(nowhere / "jvm/broken", "echo 'Error: could not find libjava.so' >&2; exit 2")
    monkeypatch.setenv("JAVA_HOME", str(nowhere / "wrong"))
    with pytest.raises(JavaNotFoundError) as refused:
        find_java()
    assert f"{nowhere / 'wrong'} (JAVA_HOME) has no bin/java" in str(refused.value)
    assert "java-8 (found) is Java 8" in str(refused.value)
    assert "broken (found) does not run: Error: could not find libjava.so" in str(refused.value)


HIDDEN = """
import sys
if sys.argv[1] == "demo":
    from pgqueue.demo import java
    java._PLACES = ()
    from pgqueue.demo.spark import main
    sys.exit(main(["--messages", "10", *sys.argv[2:]]))
from pgqueue.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "words", [("spark", "archive-to-parquet", "x"), pytest.param(("demo", "--out", "x"), marks=long)]
)
def test_commands_without_java_fail_before_they_start_anything(words: tuple[str, ...], tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "JAVA", "PATH"))}
    kept |= {"PATH": str(tmp_path), "PGQUEUE_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    done = ran(HIDDEN, *words, env=kept, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert done.stderr.count("\n") == 1
    assert "Spark needs a Java runtime of version 17 or later" in done.stderr
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("variables", "chosen"),
    [
        ({}, sys.executable),
        ({"PYSPARK_PYTHON": "/opt/python3"}, "/opt/python3"),
        ({"PYSPARK_GATEWAY_PORT": "1"}, None),  # spark-submit runs the program
    ],
)
def test_an_import_chooses_the_running_python_for_workers_unless_one_is_chosen(
    variables: dict[str, str], chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    for name in ("PYSPARK_PYTHON", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    importlib.reload(pgqueue.spark)
    assert os.environ.get("PYSPARK_PYTHON") == chosen


def session_with(python: str) -> Any:
    return SimpleNamespace(_jvm=object(), conf={}, sparkContext=SimpleNamespace(pythonExec=python))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo Traceback >&2; echo \"ModuleNotFoundError: No module named 'pgqueue'\" >&2; exit 1", "No module named"),
        ("exit 3", "it does not run"),
    ],
)
def test_register_says_what_to_set_if_the_workers_lack_the_package(tmp_path: Path, script: str, reason: str) -> None:
    python = str(program(tmp_path, script) / "bin/java")
    with pytest.raises(ImportError, match="the Python of Spark's workers") as refused:
        register(session_with(python))
    assert python in str(refused.value)
    assert reason in str(refused.value)
    assert f"set PYSPARK_PYTHON={sys.executable}" in str(refused.value)
    with pytest.raises(ImportError, match="No such file"):
        register(session_with(str(tmp_path / "missing")))


SESSION = """
from pgqueue.spark.pipelines import local_session
with local_session("local[2]") as spark:
    spark.range(7).count()
"""


def test_a_failed_start_of_spark_raises_spark_failure(tmp_path: Path) -> None:
    home = program(tmp_path / "half", f'{says("17.0.1")}; test "$1" = -version || {{ echo "no memory" >&2; exit 1; }}')
    done = ran(SESSION, env=os.environ | {"JAVA_HOME": str(home), "TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert done.returncode == 1
    assert "SparkFailure: Spark did not start: " in done.stderr
