"""`make install` and `make uninstall`, in a copy of the checkout with spaces in its paths, and the SQL file in psql."""

import re
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path

import psycopg
import pytest
from clients import PATIENCE
from commands import NewDatabase
from packaging.requirements import Requirement

import pgqueue
from pgqueue.embedded import _packaged_bindir

ROOT = Path(__file__).parents[3]
SCRIPT = f"pgqueue--{pgqueue.__version__}.sql"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that building and installing need."""
    copy = tmp_path / "check out"
    for name in ("sql", "extension"):
        shutil.copytree(ROOT / name, copy / name)
    for name in ("Makefile", "pgqueue.control"):
        shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture
def pg_config(tmp_path: Path) -> Path:
    """A pg_config that names a directory with a space, which already has another extension in it."""
    program = tmp_path / "my tools/pg_config"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n[ "$*" = --sharedir ] && echo "/opt/my share"\n')
    program.chmod(0o755)
    return program


def make(directory: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["make", "-C", str(directory), *words], capture_output=True, text=True, timeout=PATIENCE)


def test_make_install_uses_pg_config_and_uninstall_removes_the_files(checkout: Path, pg_config: Path) -> None:
    root = checkout.parent / "my root"
    there = root / "opt/my share/extension"
    there.mkdir(parents=True)
    (there / "other.control").touch()
    words = (f"PG_CONFIG={pg_config}", f"DESTDIR={root}")
    for _ in range(2):
        done = make(checkout, "install", *words)
        assert done.returncode == 0, done.stderr
    installed = {file.name: file for file in there.iterdir()}
    assert {"other.control", "pgqueue.control", SCRIPT} <= set(installed)
    assert installed[SCRIPT].read_bytes() == (checkout / "extension" / SCRIPT).read_bytes()
    assert installed["pgqueue.control"].stat().st_mode & 0o777 == 0o644
    assert make(checkout, "uninstall", *words).returncode == 0
    assert [file.name for file in there.iterdir()] == ["other.control"]


def test_make_install_with_a_prefix_needs_no_pg_config(checkout: Path) -> None:
    prefix = checkout.parent / "pre fix"
    done = make(checkout, "install", f"prefix={prefix}", "PG_CONFIG=/no/such/pg_config")
    assert done.returncode == 0, done.stderr
    assert (prefix / "share/postgresql/extension/pgqueue.control").exists()


def test_make_install_reports_a_missing_pg_config(checkout: Path) -> None:
    done = make(checkout, "install", "PG_CONFIG=/no/such/pg_config")
    assert done.returncode == 2
    assert "/no/such/pg_config does not run: name the one of your server" in done.stderr


def test_make_build_works_in_a_directory_of_any_name(checkout: Path) -> None:
    shutil.rmtree(checkout / "extension")
    plain = checkout.parent / "plain"
    shutil.copytree(checkout, plain)
    for directory, words in ((checkout, ["-j2"]), (plain, [])):
        done = make(directory, *words, "build")
        assert done.returncode == 0, done.stderr
    for name in ("pgqueue.sql", SCRIPT):
        assert (checkout / "extension" / name).read_bytes() == (plain / "extension" / name).read_bytes() != b""


group = runpy.run_path(str(ROOT / "test/tools.py"))["group"]
PROJECT = tomllib.loads((ROOT / "python/pyproject.toml").read_text(encoding="utf-8"))


def test_the_demo_sets_up_only_what_it_needs(checkout: Path) -> None:
    """The tests need ten times as much: Spark alone has 500 MB."""
    for name in ("python/pyproject.toml", "test/tools.py"):
        (checkout / name).parent.mkdir()
        shutil.copy2(ROOT / name, checkout / name)
    done = make(checkout, "--dry-run", "demo")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"tools\.py .*", done.stdout) == ["tools.py venv demo"]
    (demo,) = map(Requirement, group("demo"))
    extras = PROJECT["project"]["optional-dependencies"]
    needed = [need for extra in demo.extras for need in extras[extra]]
    assert any(need.startswith("rich") for need in needed)
    assert not [need for need in needed if need.startswith(("mypy", "playwright", "plotly", "py"))]
    assert not {"bench", "demo", "dev", "long"} & extras.keys()
    servers = [name for name, needed in extras.items() if "embedded" in str(needed)]
    assert servers == ["embedded", "testing"]


def test_make_help_lists_every_target(checkout: Path) -> None:
    done = make(checkout, "help")
    told = {line.split()[0] for line in done.stdout.splitlines()}
    phony = (checkout / "Makefile").read_text().split(".PHONY: ")[1].replace("\\\n", " ").split()
    assert set(phony) - told == {"test-sql", "long-postgres", "long-mutants"}
    assert {"build", "install", "uninstall", "installcheck", "test", "lint", "demo"} <= told


def test_the_package_has_the_license() -> None:
    project = tomllib.loads((ROOT / "python/pyproject.toml").read_text())["project"]
    assert project["license-files"] == ["LICENSE"]
    assert (ROOT / "python/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_psql_prints_one_error_if_the_database_has_pgqueue(empty_database: NewDatabase) -> None:
    dsn = empty_database()

    def psql() -> "subprocess.CompletedProcess[str]":
        command: list[str | Path] = [_packaged_bindir() / "psql", "-Xq", dsn, "-f", ROOT / "extension/pgqueue.sql"]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)

    first = psql()
    assert (first.returncode, first.stdout, first.stderr) == (0, "", "")
    with psycopg.connect(dsn) as connection:
        connection.execute("select pgqueue.create_queue('kept')")
    again = psql()
    assert again.returncode == 3
    error, hint, context = again.stderr.splitlines()
    assert error.endswith(' ERROR:  schema "pgqueue" already exists')
    assert hint.startswith("HINT:  ")
    assert "pgqueue upgrade" in hint
    assert context.startswith("CONTEXT:  ")
    with psycopg.connect(dsn) as connection:
        assert connection.execute("select name from pgqueue.list_queues()").fetchall() == [("kept",)]
