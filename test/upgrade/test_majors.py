"""Move from the oldest supported PostgreSQL to the newest, by pg_upgrade and by dumps of both formats.

The databases contain a message in every state."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clients import QUIET
from doors import restore
from harness import CACHE, TOOLS, Server, prepare_fresh, prepare_plain
from test_doors import LONG, data, fill, run_every_verb

from pgqueue.embedded import EmbeddedServer, _identity

OLD = CACHE / "postgres/node_modules/pg15/native/bin"
DOORS = {"extension": prepare_fresh, "plain": prepare_plain}
ROLES = ("producer", "consumer", "raw")
# The packages from npm lack pg_controldata and pg_resetwal, which pg_upgrade runs on the old cluster. The
# pg_controldata of the newest major reads the fields that matter here. It prints everything that `pg_resetwal -n`
# would print, except the next WAL segment.
RESETWAL = f"""#!/bin/sh
known=$('{TOOLS}/pg_controldata' "$2")
segment=$(echo "$known" | sed -n 's/.*REDO WAL file: *//p')
echo "$known"
printf 'First log segment after reset: %s%08X\\n' "${{segment%????????}}" $((0x${{segment#????????????????}} + 1))
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory that the user of the servers may enter."""
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    directory.chmod(0o777)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def old(place: Path) -> Iterator[EmbeddedServer]:
    """A server of the oldest major."""
    if not (OLD / "postgres").exists() and not os.environ.get("CI"):
        pytest.skip("PostgreSQL 15 is not available on this machine (make test-tools fetches it)")
    with EmbeddedServer(bindir=OLD, data_dir=place / "old", durable=False, settings=QUIET) as server:
        with Server("PostgreSQL 15", server.dsn).connect("postgres") as connection:
            for role in ROLES:
                connection.execute(f"create role {role}")
        yield server


def filled(server: EmbeddedServer, door: str) -> Server:
    """The server, with pgqueue in a database that has the name of its door."""
    at = Server("PostgreSQL 15", server.dsn)
    with at.connect("postgres") as connection:
        if connection.execute("select 1 from pg_database where datname = %s", (door,)).fetchone():
            return at
        connection.execute(f"create database {door}")
    DOORS[door](at, door)
    with at.connect(door) as connection:
        fill(connection)
    return at


def check_upgraded(server: Server, database: str, before: Any) -> None:
    """Check that the data is unchanged, that doctor's repair adapts to the new major, and that every verb works."""
    assert data(server, database) == before
    with server.connect(database) as connection:
        unfit = "select repair from pgqueue.doctor() where finding = 'unfit_keys'"
        for (repair,) in connection.execute(unfit).fetchall():
            connection.execute(str(repair).encode())
        assert not connection.execute(unfit).fetchall()
        run_every_verb(connection)


@pytest.fixture(scope="module")
def new() -> Iterator[Server]:
    with EmbeddedServer(durable=False, settings=QUIET) as embedded:
        server = Server("PostgreSQL 18", embedded.dsn)
        with server.connect("postgres") as connection:
            for role in ROLES:
                connection.execute(f"create role {role}")
        yield server


@pytest.mark.parametrize(
    ("door", "form"),
    [
        ("extension", "custom"),
        *(
            pytest.param(*each, marks=LONG)
            for each in (("plain", "plain"), ("plain", "custom"), ("extension", "plain"))
        ),
    ],
)
def test_a_dump_of_the_oldest_major_is_restored(
    old: EmbeddedServer, new: Server, door: str, form: str, place: Path
) -> None:
    source = filled(old, door)
    file = place / f"{door}.{form}"
    subprocess.run([TOOLS / "pg_dump", f"--format={form}", "--file", file], env=source.environment(door), check=True)
    with new.database(f"{door}_{form}") as target:
        if form == "plain":
            restore(new, file.read_text(), target)
        else:
            subprocess.run(
                [TOOLS / "pg_restore", "--exit-on-error", "--dbname", target, file],
                env=new.environment(target),
                check=True,
            )
        check_upgraded(new, target, data(source, door))


def as_server(*command: object, cwd: Path) -> None:
    """Run a program as the user that the servers run as."""
    identity = _identity()
    done = subprocess.run(
        [str(word) for word in (*identity.prefix, *command)], cwd=cwd, **identity.switch, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


@LONG
def test_pg_upgrade_loses_no_message(old: EmbeddedServer, place: Path) -> None:
    before = {name: data(filled(old, name), name) for name in DOORS}
    old.stop()
    programs = place / "programs"
    programs.mkdir()
    for program in (OLD / "postgres", OLD / "pg_ctl", TOOLS / "pg_controldata"):
        (programs / program.name).symlink_to(program)
    resetwal = programs / "pg_resetwal"
    resetwal.write_text(RESETWAL)
    resetwal.chmod(0o755)
    as_server(
        *(TOOLS / "initdb", "-D", place / "new", "-U", "postgres", "-E", "UTF8", "--locale", "C", "-A", "trust"),
        *("--no-data-checksums", "--no-sync"),
        cwd=place,
    )
    as_server(
        *(TOOLS / "pg_upgrade", "-b", programs, "-B", TOOLS, "-d", place / "old", "-D", place / "new"),
        *("-U", "postgres", "-s", place, "--no-sync", "--jobs", 2),
        cwd=place,
    )
    old.start()  # for the other tests
    with EmbeddedServer(data_dir=place / "new", durable=False, settings=QUIET) as server:
        for name in DOORS:
            check_upgraded(Server("PostgreSQL 18", server.dsn), name, before[name])
