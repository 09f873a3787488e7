"""The documents: their code runs as it stands there, their links lead somewhere, their tables are complete."""

import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import commands
import psycopg
import pytest
from clients import PATIENCE
from psycopg.conninfo import conninfo_to_dict

import pgqueue
import pgqueue.consumer
from pgqueue import testing
from pgqueue._connections import as_url
from pgqueue.embedded import EmbeddedServer

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for directory in (ROOT, *(ROOT / name for name in ("extension", "sql", "python", "test")))
    for path in directory.glob("*.md" if directory == ROOT else "**/*.md")
    if not any(part.startswith(".") or part == "node_modules" for part in path.relative_to(ROOT).parts)
)
# Pasted as a whole below; the chapter on Spark by a test of its own, which needs Spark.
PASTED = (
    "README.md",
    "python/README.md",
    "python/src/pgqueue/cli/README.md",
    "python/src/pgqueue/consumer/README.md",
    "python/src/pgqueue/contrib/README.md",
    "python/src/pgqueue/http/README.md",
    "sql/README.md",
    "sql/REFERENCE.md",
    "extension/doc/guarantees.md",
    "extension/doc/how-to",  # its pages, in their alphabetical order
    "extension/doc/other-languages.md",
)
FIRST = ("README.md", "extension/doc/guarantees.md")  # these create extension and queue themselves
HOW_TO = "extension/doc/how-to"
TUTORIAL = "extension/doc/tutorial.md"
SPARK = [f"python/src/pgqueue/spark/{name}" for name in ("README.md", "CLUSTERS.md", "pipelines/README.md")]


class Block(NamedTuple):
    language: str
    code: str


def blocks(document: str | Path, language: str = "") -> list[Block]:
    text = (ROOT / document).read_text(encoding="utf-8")
    found = [
        Block(language, dedent(code))
        for _, language, code in re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE)
    ]
    return [block for block in found if block.language == language or not language]


def psql(dsn: str, script: str) -> str:
    done = subprocess.run(
        [str(EmbeddedServer().bindir / "psql"), "-XqAt", "-v", "ON_ERROR_STOP=1", dsn],
        input=script,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def pasted(empty_database: commands.NewDatabase) -> tuple[str, str]:
    """A database into which the life of a message was pasted, and the answers of psql."""
    dsn = empty_database()
    return dsn, psql(dsn, blocks("extension/doc/guarantees.md", "sql")[0].code)


class Pasting:
    """A person who pastes blocks into a terminal, one after the other, with one database."""

    def __init__(self, dsn: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.variables: dict[str, Any] = {"PGQUEUE_PASSWORD": "password"}
        self.dsn, self.directory, self.monkeypatch = dsn, directory, monkeypatch
        self.out = self.held = ""

    def paste(self, block: Block) -> None:
        match block.language:
            case "sql":  # psql 15 would add to the arguments of \\gset what is pasted behind it
                self.held += block.code
                if not self.held.endswith("\\gset\n"):
                    self.out, self.held = self.out + psql(self.dsn, self.held), ""
            case "python":
                self.python(block.code)
            case "sh" if "curl" in block.code:
                self.curl(block.code)
            case "sh":
                self.shell(block.code)
            case "toml":
                assert tomllib.loads(block.code)
            case "bash":  # the quick start, which runs as a whole with Spark, in test_spark_readme.py
                assert "pyspark" in block.code
            case "js" | "java":  # a program, which runs in test_other_languages.py
                assert "PGQUEUE_DSN" in block.code or "JDBC_URL" in block.code
            case _:  # drawings, signatures, and commands that take hours
                assert block.language in ("", "text", "yaml")

    def python(self, code: str) -> None:
        """Run it on the database, and its tests; a consumer that is not drained stops after its first message."""

        def consumer(_dsn: str, *arguments: Any, **options: Any) -> pgqueue.Consumer:
            made = pgqueue.consumer.Consumer(self.dsn, *arguments, **options)
            if "drain" not in code:
                made.observe = lambda event: made.request_stop() if event.kind == "succeeded" else None
            return made

        with self.monkeypatch.context() as patch:
            patch.setenv("PGQUEUE_DSN", self.dsn)
            patch.setenv("DATABASE_URL", as_url({key: str(part) for key, part in conninfo_to_dict(self.dsn).items()}))
            patch.setattr(pgqueue, "Consumer", consumer, raising=False)
            if "Consumer(" in code and "enqueue(" not in code:
                with psycopg.connect(self.dsn, autocommit=True) as connection:
                    pgqueue.Queue(connection, "orders").enqueue({"order_id": 1004})
            names: dict[str, Any] = {}
            exec(code, names)
            if "engine" in names:  # of SQLAlchemy
                names["engine"].dispose()
            for test in [function for name, function in names.items() if name.startswith("test_")]:
                with psycopg.connect(self.dsn, autocommit=True) as connection, testing.queue(connection) as queue:
                    fixtures = {"pgqueue_dsn": self.dsn, "pgqueue_queue": queue}
                    test(**{name: fixtures[name] for name in inspect.signature(test).parameters})

    def shell(self, code: str) -> None:
        """Run the commands of pgqueue, but not what would install something or go on until Ctrl-C."""
        for line in code.splitlines():
            program, *words = shlex.split(line, comments=True) or [""]
            if program == "echo":
                subprocess.run(["bash", "-c", line], cwd=self.directory, check=True)
            elif program == "pgqueue":
                words = [word for word in words if word not in ("--watch", "--until-empty")]
                words += ["--until-empty"] * ("work" in words)
                with commands.inside(self.directory):
                    done = commands.in_process(self.dsn, *words, **self.variables)
                assert done.status == 0, (line, done)
                self.out += done.out + done.err
            else:
                assert program in ("", "python3", "pip", "make", "npm") or re.match(
                    r"PGQUEUE_PASSWORD=|(PGQUEUE_DSN|JDBC_URL)=\$\(pgqueue dsn .*\) (node|java) ", line
                ), line

    def curl(self, code: str) -> None:
        """Run it against a server on the database."""
        variables = self.variables | {"PGQUEUE_DSN": self.dsn}
        with commands.running("serve", "--port", "0", directory=self.directory, **variables) as server:
            url = server.wait_for(lambda: re.search(r"serves (http://[^/\s]+)/", server.err))[1]
            script = ["bash", "-c", code.replace("http://127.0.0.1:8080", url)]
            done = subprocess.run(script, capture_output=True, text=True, timeout=PATIENCE, check=True)
        assert '"error"' not in done.stdout, done.stdout
        self.out += done.stdout


@pytest.mark.usefixtures("curl")
@pytest.mark.parametrize("document", PASTED)
def test_every_block_can_be_pasted_in_order_into_one_database(
    document: str, empty_database: commands.NewDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some drivers take no other form.
    dsn = commands.in_process(empty_database(), "dsn", "--url").out.strip()
    person = Pasting(dsn, tmp_path, monkeypatch)
    if document not in FIRST:
        psql(person.dsn, "create extension pgqueue; select pgqueue.create_queue('orders');")
    pages = sorted((ROOT / document).glob("*.md")) or [ROOT / document]
    for block in (block for page in pages for block in blocks(page)):
        person.paste(block)
    if document in FIRST:  # somebody who has tried it before
        person.paste(blocks(document, "sql")[0])
    said = {
        "README.md": ["ships 1002"],
        "extension/doc/how-to": ["printer is off"],
        "python/src/pgqueue/http/README.md": ['{"task_id":"', '"payload":{"order_id": 1001}'],
    }
    for text in said.get(document, []):
        assert text in person.out, person.out
    shipping = [block for block in blocks(pages[0], "python") if "shipped" in block.code]
    assert (len(shipping) > 0) is (document == "python/README.md")
    if shipping:
        with psycopg.connect(person.dsn) as connection:
            orders = connection.execute("select order_id from shipped order by order_id").fetchall()
        assert [order for (order,) in orders] == [1001, 1004][: len(shipping)]


def test_a_message_goes_through_the_life_that_the_guarantees_show(pasted: tuple[str, str]) -> None:
    answers = pasted[1].splitlines()
    assert answers[1:4] == ["1", "2", '{"order_id": 1001}|t|t']  # two ids, extend, nack
    assert answers[4] == "1|2|card declined|t"  # ack
    assert answers[5].split("|")[:5] == ["orders", "0", "0", "1", "0"]  # what is left is scheduled
    plain = psql(pasted[0], blocks("sql/REFERENCE.md", "sql")[0].code).splitlines()  # claims what it inserted
    assert plain[0] == "3"
    assert plain[1].startswith('3|{"order_id": 1003}|1|')


# Without hash and merge joins, and with the statistics of a new table, the planner chooses a nested loop that runs a
# subquery again for each row.
NESTED_LOOPS = """
set local enable_hashjoin = off;
set local enable_mergejoin = off;
set local enable_hashagg = off;
set local enable_sort = off;
set local enable_material = off;
set local enable_memoize = off;
"""


@pytest.mark.parametrize(("document", "place"), [(f"{HOW_TO}/plain-sql.md", 0), ("sql/REFERENCE.md", 0)])
def test_a_plain_claim_takes_no_more_than_its_limit_with_any_plan(
    document: str, place: int, pasted: tuple[str, str]
) -> None:
    block = blocks(document, "sql")[place]
    (claim,) = (statement for statement in block.code.split(";\n") if "skip locked" in statement)
    nested = """
        update pgqueue.messages m set visible_at = now() + interval '60 s' where m.id in (
            select id from pgqueue.messages where queue_name = 'orders' and visible_at <= now()
            order by id for update skip locked limit 10)
        returning m.id
    """
    with psycopg.connect(pasted[0]) as connection:
        connection.execute("delete from pgqueue.messages")
        connection.execute(
            "insert into pgqueue.messages (queue_name, payload, visible_at)"
            " select 'orders', '1', now() from generate_series(1, 1000)"
        )
        connection.execute(NESTED_LOOPS)
        with connection.transaction(force_rollback=True):
            assert len(connection.execute(nested).fetchall()) > 10  # so this plan is a danger
        assert len(connection.execute(claim.encode()).fetchall()) == 10


def test_topics_groups_schedules_and_the_relation_of_a_transport_work_as_shown(pasted: tuple[str, str]) -> None:
    publish, group, schedule, expose = (
        blocks(f"{HOW_TO}/{page}.md", "sql")[0] for page in ("topics", "order", "schedules", "nservicebus")
    )
    assert psql(pasted[0], publish.code).splitlines()[-1] == "2"
    *_, withdrawal, claimed = psql(pasted[0], group.code).splitlines()
    assert withdrawal.isdigit()
    assert claimed == '{"deposit": 100}'
    *_, first, listed = psql(pasted[0], schedule.code).splitlines()
    assert listed == f"nightly|{first}"
    assert psql(pasted[0], expose.code).splitlines()[1:] == ['"public"."Invoicing"', "1"]


@pytest.mark.long(part="release")
def test_the_tutorial_runs_from_the_first_line_to_the_last(home: Path, tmp_path: Path) -> None:
    script = "".join(block.code for block in blocks(TUTORIAL, "sh"))
    steps = re.sub(r"^(python3 -m venv|pip install) .*\n", "", script, flags=re.MULTILINE)
    program = tmp_path / "bin/pgqueue"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pgqueue "$@"\n')
    program.chmod(0o755)
    variables = commands.environment(PGQUEUE_HOME=home, PATH=f"{program.parent}:{os.environ['PATH']}")
    done = subprocess.run(["bash", "-e"], input=steps, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"^ships (\d+)", done.stdout, re.MULTILINE)) == ["1001", "1002", "1003"]
    assert done.stdout.count("KeyError: 'city'") == 1
    assert re.findall(r"^attempt (\d)", done.stdout, re.MULTILINE) == ["1", "2"]
    assert done.stdout.splitlines()[-5:-2] == ["----------", "     1005", "     1006"]


def prose(document: Path) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives to the headings, and those of promises."""
    text = prose(document)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    of_headings = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return of_headings | set(re.findall(r'<a id="([^"]+)"></a>', text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_link_leads_to_a_file_and_a_heading_and_all_code_is_run(document: Path) -> None:
    languages = {block.language for block in blocks(document)}
    assert {str(document), str(document.parent)} & {*PASTED, *SPARK, TUTORIAL} or languages <= {"", "text"}
    for block in blocks(document):  # the pip of Debian 12 installs into a virtual environment only
        assert "pip install" not in block.code or "venv" in block.code, block
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(ROOT / document)):
        path, _, anchor = target.partition("#")
        file = ((ROOT / document).parent / path).resolve() if path else ROOT / document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def table(document: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    text = (ROOT / document).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    (first,) = re.findall(r"\n\n((?:\|.+\n)+)", text)[:1]
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in first.splitlines()[2:]]


def test_every_error_is_in_the_reference() -> None:
    listed = {row[0].strip("`"): row[1].replace("_", "") for row in table("sql/REFERENCE.md", "Errors")}
    ours = [error for error in pgqueue.Error.__subclasses__() if str(error.sqlstate).startswith("PQ")]
    codes = {error.sqlstate: error.__name__.lower() for error in ours}
    assert {code: name for code, name in listed.items() if code.startswith("PQ")} == codes
    # The codes that errors of ours have besides; names of conditions as in PostgreSQL's list.
    sql = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "sql").glob("*.sql"))
    raised = set(re.findall(r"errcode = '([a-z_]+)'", sql))
    assert raised <= {row[1] for row in table("sql/REFERENCE.md", "Errors")}
    # The codes that the descriptions of functions promise, also those of PostgreSQL's own errors.
    described = (ROOT / "sql/REFERENCE.md").read_text(encoding="utf-8").partition("<!-- reference: begin -->")[2]
    promises = " ".join(re.findall(r"[^.]*\braises?\b[^.]*", described, re.IGNORECASE))
    assert set(re.findall(r"\b(?:\d[0-9A-Z]{4}|PQ\d{3})\b", promises)) <= listed.keys()


def test_every_setting_is_in_the_reference_with_its_default() -> None:
    sql = (ROOT / "sql/queue.sql").read_text(encoding="utf-8")
    arguments = sql.partition("function pgqueue.create_queue(")[2].partition("\n) returns ")[0]
    defaults = dict(re.findall(r"^    (\w+) [a-z_. ]+ default '?([^',]+)'?,?$", arguments, re.MULTILINE))
    del defaults["if_not_exists"]
    listed = {row[0].strip("`"): row[1] for row in table("sql/REFERENCE.md", "Settings of a queue")}
    assert listed == defaults


def test_each_access_allows_what_the_document_says(pasted: tuple[str, str]) -> None:
    functions = """
        select p.proname from pg_proc p where p.pronamespace = 'pgqueue'::regnamespace and p.proname !~ '^_'
        and has_function_privilege('pgqueue_test_access', p.oid, 'execute')
    """
    relations = """
        select c.relname, p from pg_class c cross join unnest(
            array['select', 'insert', 'update', 'delete', 'truncate', 'references', 'trigger', 'usage']) p
        where c.relnamespace = 'pgqueue'::regnamespace and c.relname !~ '^(access|rights)_' and case
            when c.relkind = 'S'
                then p in ('select', 'update', 'usage') and has_sequence_privilege('pgqueue_test_access', c.oid, p)
            when c.relkind in ('r', 'p', 'v')
                then p <> 'usage' and has_table_privilege('pgqueue_test_access', c.oid, p)
        end
    """
    with psycopg.connect(pasted[0]) as connection:
        listed = table("SECURITY.md", "What each access allows")
        kinds = ("producer", "consumer", "admin", "reader", "raw", "transport")
        assert [row[0] for row in listed] == [f"`{access}`" for access in kinds]
        for access, verbs, tables in listed:
            for queue_name in (None, "orders", "ord-*") if access != "`raw`" else (None,):
                with connection.transaction(force_rollback=True):
                    connection.execute("create role pgqueue_test_access")
                    grant = "select pgqueue.grant_access('pgqueue_test_access', %s, %s)"
                    connection.execute(grant, [access.strip("`"), queue_name])
                    allowed = {name for (name,) in connection.execute(functions)}
                    assert allowed == set(re.findall(r"`(\w+)`", verbs)), access
                    expected = {
                        (name, privilege)
                        for part in tables.split("; ")
                        for name in re.findall(r"`(\w+)`", part)
                        for privilege in part.partition(": ")[2].split(", ")
                        if queue_name is None or name == "staged_messages"
                    }
                    assert set(connection.execute(relations).fetchall()) == expected, access


def test_the_documents_list_every_sql_module() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    lists = re.findall(r"^(STATE|CORE|ROOMS) = (.*)$", makefile, re.MULTILINE)
    modules = {name.lower(): words.split() for name, words in lists}
    listed = {row[0]: row[1].split() for row in table("sql/README.md", "Core and rooms")}
    assert {name: listed[name] for name in modules} == modules
    layout = [row[0].strip("`") for row in table("CONTRIBUTING.md", "Layout")]
    named = " ".join(cell.removeprefix("sql/") for cell in layout if re.fullmatch(r"sql/[a-z_ ]+", cell))
    assert named.split() == [*(module for group in modules.values() for module in group), "grants"]


def test_every_argument_of_a_consumer_is_in_its_chapter() -> None:
    arguments = list(inspect.signature(pgqueue.consumer.Consumer).parameters)[3:]
    text = (ROOT / "python/src/pgqueue/consumer/README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", text.partition("| argument |")[2].partition("\n\n")[0], re.MULTILINE)
    assert listed == arguments
