"""Plain SQL by the roles that managed servers give: without a superuser they install, upgrade, and grant access."""

import os
from pathlib import Path

import psycopg
import pytest
from doors import DELTA, NEW, OLD, build_upgrade, old_script
from harness import CACHE, started

from pgqueue import _files
from pgqueue.__main__ import main

# The role `manager` and its database, as the documents of the services describe them.
SERVICES = {
    "rds": """
        create role rds_superuser;
        grant pg_monitor, pg_signal_backend to rds_superuser with admin option;
        create role manager login createrole createdb in role rds_superuser;
        create database shop owner manager;
    """,
    "cloudsql": """
        create role cloudsqlsuperuser createrole createdb;
        grant pg_monitor, pg_signal_backend to cloudsqlsuperuser;
        create role manager login createrole createdb in role cloudsqlsuperuser;
        create database shop owner cloudsqlsuperuser;
    """,
    "neon": """
        create role neon_superuser createrole createdb bypassrls replication;
        grant pg_read_all_data, pg_write_all_data to neon_superuser;
        create role manager login createrole createdb in role neon_superuser;
        create database shop owner manager;
    """,
    "supabase": """
        create role manager login createrole createdb bypassrls replication;
        create database shop owner manager;
    """,
}
FAST = {("rds", 18), ("cloudsql", 15)}
# A role of an API, which gets all that is created in the schema public.
API = """
    create role anon login;
    alter default privileges in schema public grant all on tables to anon;
    alter default privileges in schema public grant all on functions to anon;
    alter default privileges in schema public grant all on sequences to anon;
"""


@pytest.mark.parametrize(
    ("service", "major"),
    [
        pytest.param(service, major, marks=() if (service, major) in FAST else pytest.mark.long(part="postgres"))
        for service in SERVICES
        for major in (18, 17, 16, 15)
    ],
)
def test_a_role_of_a_managed_server_installs_upgrades_and_grants(
    service: str, major: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installation = old_script(_files.install_script())
    (tmp_path / f"pgqueue--{OLD}--{NEW}.sql").write_text(build_upgrade(DELTA)[f"pgqueue--{OLD}--{NEW}.sql"])
    monkeypatch.setattr(_files, "extension_dir", lambda: tmp_path)
    if major != 18 and not os.environ.get("CI") and not (CACHE / f"postgres/node_modules/pg{major}").exists():
        pytest.skip(f"PostgreSQL {major} is not available on this machine (make test-tools fetches it)")
    with started(major) as server:

        def connect(role: str) -> "psycopg.Connection[tuple[object, ...]]":
            return psycopg.connect(server.dsn_of("shop"), user=role, autocommit=True)

        with server.connect("postgres") as superuser:
            for statement in SERVICES[service].strip().split(";\n"):
                superuser.execute(statement.encode())
        with connect("manager") as manager:
            assert manager.execute("select rolsuper from pg_roles where rolname = user").fetchone() == (False,)
            manager.execute(API)
            manager.execute(installation.encode())
            manager.execute("select pgqueue.create_queue('orders')")
            manager.execute("select pgqueue.enqueue('orders', '1')")
            assert main(["upgrade", psycopg.conninfo.make_conninfo(server.dsn_of("shop"), user="manager")]) == 0
            manager.execute("create role sender login")
            manager.execute("create role worker login")
            manager.execute("select pgqueue.grant_access('sender', 'producer', 'orders')")
            manager.execute("select pgqueue.grant_access('worker', 'consumer', 'orders')")
        with connect("sender") as sender, connect("worker") as worker, connect("anon") as anon:
            sender.execute("select pgqueue.enqueue('orders', '2')")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                sender.execute("select pgqueue.claim('orders')")
            claimed = worker.execute("select id, claim_token, payload from pgqueue.claim('orders', 10)").fetchall()
            assert [payload for *_, payload in claimed] == [1, 2]
            for number, token, _ in claimed:
                assert worker.execute("select pgqueue.ack('orders', %s, %s)", (number, token)).fetchone() == (True,)
            for statement in ("select pgqueue.stats('orders')", "select * from pgqueue.messages"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    anon.execute(statement.encode())
        with connect("manager") as manager:
            found = [finding for (finding,) in manager.execute("select finding from pgqueue.doctor()")]
        assert found == ([] if "pg_monitor" in SERVICES[service] else ["hidden_transactions"])
