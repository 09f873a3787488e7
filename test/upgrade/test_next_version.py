"""The version after a release: a database of the frozen script is upgraded to it, with messages in every state."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from doors import NEW, found, offer
from harness import started
from test_doors import data, fill, run_every_verb

sys.path.append(str(Path(__file__).parents[1] / "python"))

from test_release import Checkout

DELTA = "alter table pgqueue.queues add column note text;\n"


@pytest.mark.long(part="release")
def test_a_database_of_a_released_version_is_upgraded_to_the_next_with_all_its_messages(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "clone")
    version = NEW.partition("-")[0]
    major, minor, _ = map(int, version.split("."))
    following = f"{major}.{minor + 1}.0-dev"
    for words in ([version], ["--begin", following]):
        done = checkout.release(*words)
        assert done.returncode == 0, done.stderr
    # A change of a table, in the script of its state and in that of the upgrade.
    tables = checkout.path / "sql/tables.sql"
    columns = r"(create table pgqueue\.queues \(\n.*?)(?=    constraint )"
    changed, count = re.subn(
        columns, r"\1    note text,\n", tables.read_text(encoding="utf-8"), count=1, flags=re.DOTALL
    )
    assert count == 1
    tables.write_text(changed, encoding="utf-8")
    with (checkout.path / f"sql/upgrade/{version}--{following}.sql").open("a") as script:
        script.write(DELTA)
    subprocess.run(["make", "--silent", "-C", checkout.path, "build"], check=True)
    assert found("^default_version *= *'(.*)'", checkout.path / "pgqueue.control") == following

    scripts = {path.name: path.read_text() for path in (checkout.path / "extension").glob("pgqueue--*.sql")}
    assert {f"pgqueue--{each}.sql" for each in (version, f"{version}--{following}", following)} <= scripts.keys()
    with started(18) as server, server.database("upgraded") as upgraded:
        offer(server, scripts)
        with server.connect(upgraded) as connection:
            for role in ("producer", "consumer", "raw"):
                connection.execute(f"create role {role}")
            connection.execute(f"create extension pgqueue version '{version}'")
            fill(connection)
        old = data(server, upgraded)
        with server.connect(upgraded) as connection:
            connection.execute(f"alter extension pgqueue update to '{following}'")
        new = data(server, upgraded)
        assert {name: [row.replace(',"note":null', "") for row in rows] for name, rows in new.items()} == old
        assert all(',"note":null' in row for row in new["queues"])
        with server.connect(upgraded) as connection:
            assert connection.execute("select pgqueue.version()").fetchone() == (following,)
            run_every_verb(connection)
