"""Two more ways, called doors, to install pgqueue in a database: by an upgrade and by restoring a dump.

test/harness.py finds the prepare_ functions by name and runs the pgTAP suite after each. test_doors.py compares them.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import ROOT, TOOLS, Server, prepare_fresh

OLD = "0.0.9"


def found(pattern: str, path: Path) -> str:
    """The first group of a pattern in a file."""
    match = re.search(pattern, path.read_text(), re.MULTILINE)
    assert match is not None, pattern
    return match[1]


NEW = found(r"^default_version *= *'(.*)'", ROOT / "pgqueue.control")
COMMENT = found(r"^comment on table pgqueue.queues is\n'(.*)';", ROOT / "sql/tables.sql")

UPGRADE = f"pgqueue--{OLD}--{NEW}.sql"

# No older version exists yet, so the tests generate one. It lacks a column with its constraint and a function, and has
# another comment, an additional function and verbs with another result. The delta contains what `create or replace`
# cannot do.
DELTA = f"""
alter table pgqueue.dead_messages add column reason text not null default 'rejected';
alter table pgqueue.dead_messages alter column reason drop default;
alter table pgqueue.dead_messages add constraint dead_messages_reason_is_known
check (reason in ('attempts_exhausted', 'expired', 'rejected', 'queue_dropped'));
comment on table pgqueue.queues is
'{COMMENT}';
drop function pgqueue.forgotten();
"""


def old_script(current: str) -> str:
    """Turn the current installation script into that of the generated older version."""
    script = current
    for pattern, replacement in (
        (r"    reason text not null,\n(    constraint dead_messages_pkey .*),\n.*\n.*\n\)", r"\1\n)"),
        (r"(comment on table pgqueue.queues is\n)'.*';", r"\1'Queues.';"),
        (r"^create function pgqueue\.reject\((?s:.*?)^comment on function pgqueue\.reject is\n'(?s:.*?)';\n", ""),
        (rf"\$\$ select '{NEW}'::text \$\$", f"$$ select '{OLD}'::text $$"),
        (r"    return least\(total, max_records\);", "    return 42;"),
    ):
        script = re.sub(pattern, replacement, script, flags=re.MULTILINE)
    return script + "\ncreate function pgqueue.forgotten() returns int language sql as 'select 1';\n"


def build_upgrade(delta: str) -> dict[str, str]:
    """The old script and the upgrade script with a delta, by file name."""
    scripts = _build()
    assert DELTA in scripts[UPGRADE]
    return scripts | {UPGRADE: scripts[UPGRADE].replace(DELTA, delta)}


@cache
def _build() -> dict[str, str]:
    """Let the Makefile build the upgrade script. It contains the delta as it is."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        for name in ("Makefile", "pgqueue.control"):
            shutil.copy(ROOT / name, tree)
        shutil.copytree(ROOT / "sql", tree / "sql")
        (tree / "sql/upgrade").mkdir(exist_ok=True)
        (tree / f"sql/upgrade/{OLD}--{NEW}.sql").write_text(DELTA)
        subprocess.run(["make", "-s", "-C", tree, "build"], check=True, capture_output=True)
        current = (tree / f"extension/pgqueue--{NEW}.sql").read_text()
        old = old_script(current)
        assert "reason" not in old.split("create table pgqueue.dead_messages")[1].split(";")[0]
        assert "function pgqueue.reject(" not in old
        return {f"pgqueue--{OLD}.sql": old, UPGRADE: (tree / "extension" / UPGRADE).read_text()}


def offer(server: Server, scripts: dict[str, str]) -> None:
    """Copy scripts to the directory where a private server looks for extensions."""
    with server.connect("postgres") as connection:
        path = connection.execute("select split_part(current_setting('extension_control_path'), ':', 1)").fetchone()
    assert path is not None
    for name, script in scripts.items():
        (Path(str(path[0])) / "extension" / name).write_text(script)


def install_old(server: Server, database: str, delta: str = DELTA) -> None:
    """Install the generated older version."""
    offer(server, build_upgrade(delta))
    with server.connect(database) as connection:
        connection.execute(f"create extension pgqueue version '{OLD}'")


def upgrade(server: Server, database: str) -> None:
    with server.connect(database) as connection:
        connection.execute("alter extension pgqueue update")


def prepare_upgraded(server: Server, database: str) -> None:
    """The older version, upgraded to the current one."""
    install_old(server, database)
    upgrade(server, database)


def prepare_restored(server: Server, database: str) -> None:
    """A restored dump of a database in which queues were used and dropped."""
    with server.database("dumped") as source:
        prepare_fresh(server, source)
        with server.connect(source) as connection:
            for dedicated in (False, True):
                connection.execute("select pgqueue.create_queue('used', dedicated => %s)", (dedicated,))
                connection.execute("select pgqueue.enqueue('used', '1'), pgqueue.claim('used')")
                connection.execute("select pgqueue.drop_queue('used')")
        restore(server, dump(server, source), database)


def dump(server: Server, database: str, *options: str) -> str:
    """Return the output of pg_dump without its random parts."""
    done = subprocess.run(
        [TOOLS / "pg_dump", *options], env=server.environment(database), check=True, capture_output=True, text=True
    )
    return re.sub(r"^\\(un)?restrict .*\n", "", done.stdout, flags=re.MULTILINE)


def restore(server: Server, script: str, database: str, on_error_stop: int = 1) -> None:
    """Run a dump with psql, which stops at the first error, if it is to do so."""
    done = subprocess.run(
        [TOOLS / "psql", "--quiet", "--no-psqlrc", "--set", f"ON_ERROR_STOP={on_error_stop}"],
        env=server.environment(database),
        input=script,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


MEMBERS = """
select pg_describe_object(d.classid, d.objid, d.objsubid)
from pg_depend d
where d.refclassid = 'pg_extension'::regclass and d.deptype = 'e'
    and d.refobjid = (select e.oid from pg_extension e where e.extname = 'pgqueue')
order by 1
"""

FORGET = """
do $$
declare
    member record;
begin
    for member in
        select i.type, i.identity
        from pg_depend d cross join lateral pg_identify_object(d.classid, d.objid, d.objsubid) i
        where d.refclassid = 'pg_extension'::regclass and d.deptype = 'e'
            and d.refobjid = (select e.oid from pg_extension e where e.extname = 'pgqueue')
            and i.type not in ('type', 'table column') or d.objid in (
                select t.oid from pg_type t where (t.typtype = 'd' or t.typrelid in (
                    select c.oid from pg_class c where c.relkind = 'c'))
                and d.classid = 'pg_type'::regclass and d.deptype = 'e')
    loop
        execute format('alter extension pgqueue drop %s %s',
            case member.type when 'composite type' then 'type' else member.type end, member.identity);
    end loop;
    drop extension if exists pgqueue;
end
$$
"""


def members(server: Server, database: str) -> list[str]:
    """Return the members of the extension, and those of its tables that pg_dump dumps."""
    with server.connect(database) as connection:
        found = [str(row[0]) for row in connection.execute(MEMBERS)]
        dumped = connection.execute(
            "select 'dumped: ' || c::regclass from pg_extension, unnest(extconfig) as c"
            " where extname = 'pgqueue' order by 1"
        )
        return found + [str(row[0]) for row in dumped]


def shape(server: Server, database: str) -> str:
    """Return what pg_dump prints of the schema. It skips members, so a copy removes them from the extension first."""
    with server.database("shape") as copy:
        with server.connect("postgres") as connection:
            connection.execute(f'drop database "{copy}"')
            connection.execute(f'create database "{copy}" template "{database}"')
        with server.connect(copy) as connection:
            connection.execute(FORGET)
        script = dump(server, copy, "--schema-only", "--schema", "pgqueue")
        # pg_dump prints a check constraint with fewer parentheses after it was restored from a dump.
        return re.sub(r"^.* CHECK .*$", lambda line: re.sub("[()]", "", line[0]), script, flags=re.MULTILINE)
