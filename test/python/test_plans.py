"""The hot statements keep their plan and touch a bounded number of buffers, whatever the state of the table."""

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import psycopg
import pytest
from clients import connect, wait_for
from psycopg.conninfo import make_conninfo

from pgqueue.embedded import EmbeddedServer

DEPTH = 1_000_000
IN_FLIGHT = 100_000
DEAD_ROWS = 500_000
streams = count(1)
STATES = ("empty", "deep", "never_analysed", "bloated")

# Buffers, read and hit, of one call in a warmed session: in most calls, and in any call, as now and then one sweeps.
# About twice what was measured on PostgreSQL 18, which is given behind: the worst median and maximum over the states.
# What claims meet depends on what the cases before left in flight: they may take six times as much.
# A sweep is bounded by time, 10 ms of walking, not by buffers: SWEEP is what that can come to.
SWEEP = 60_000
BOUNDS = {
    "enqueue": (20, 20),  # 8 8
    "claim 1": (120, SWEEP),  # 17 18
    "claim 1, sweeping": (SWEEP, SWEEP),  # 22696 22705
    "claim 100": (3000, SWEEP),  # 465 1354
    "ack": (15, 15),  # 5 6
    "ack_batch 100": (300, 300),  # 128 134
    "exchange 1": (180, SWEEP),  # 23 30
    "exchange 100": (4200, SWEEP),  # 692 1162
    "extend": (30, 30),  # 8 14
    "extend_batch 100": (1300, 1400),  # 627 671
    "nack": (40, 40),  # 14 17
    "release 100": (1500, 1500),  # 736 742
    "record_failure": (40, 40),  # 20 21
    "receive 1": (120, SWEEP),  # 17 17
    "peek": (1000, 1000),  # 31 31
    "stats": (1000, 1000),  # 244 247 where deep
}


@pytest.fixture(scope="module")
def quiet_server() -> Iterator[EmbeddedServer]:
    """A server where nobody vacuums or analyses behind the tests' back."""
    settings = {
        "autovacuum": "off",
        "shared_buffers": "512MB",
        "max_wal_size": "8GB",
        "checkpoint_timeout": "1h",
    }
    with EmbeddedServer(durable=False, settings=settings) as server:
        yield server


def fill(connection: psycopg.Connection[Any], number: int) -> None:
    """Send many messages in one statement, in the way that is open to everybody."""
    connection.execute(
        "insert into pgqueue.messages (queue_name, payload) select 'q', '{\"n\": 1}' from generate_series(1, %s)",
        (number,),
    )


@pytest.fixture(scope="module")
def states(quiet_server: EmbeddedServer) -> Iterator[dict[str, str]]:
    """How to connect to a database in each state."""
    dsns = {state: make_conninfo(quiet_server.dsn, dbname=state) for state in STATES}

    def build(state: str) -> psycopg.Connection[Any]:
        maintenance.execute(f"create database {state}")
        connection = connect(dsns[state])
        connection.execute("create extension pgqueue")
        connection.execute("select pgqueue.create_queue('q', '12 h')")
        return connection

    with connect(quiet_server.dsn) as maintenance:
        build("empty").close()

        with build("never_analysed") as connection:
            fill(connection, DEPTH)
            for _ in range(IN_FLIGHT // 10_000):
                connection.execute("select count(*) from pgqueue.claim('q', 10000)")

        maintenance.execute("create database deep template never_analysed strategy file_copy")
        with connect(dsns["deep"]) as connection:
            connection.execute("vacuum analyze")

        with build("bloated") as connection, psycopg.connect(dsns["bloated"]) as pinned:
            pinned.execute("set transaction isolation level repeatable read")
            pinned.execute("select txid_current()")
            fill(connection, DEAD_ROWS)
            for _ in range(DEAD_ROWS // 10_000):
                connection.execute(
                    "select pgqueue.ack_batch('q', array_agg(c.id), min(c.claim_token::text)::uuid)"
                    " from pgqueue.claim('q', 10000) c"
                )
            connection.execute("vacuum")

            def head_has_followed() -> bool:
                """Whether claims have learnt that nothing is left there, which they do once a second."""
                connection.execute("select pgqueue.claim('q')")
                head = "select upper(d) > %s from pgqueue.sweeps, unnest(dead_ids) as d order by d limit 1"
                return bool(connection.execute(head, (DEAD_ROWS,)).fetchone()[0])

            wait_for(head_has_followed)
            fill(connection, 10_000)
            size = connection.execute("select pg_relation_size('pgqueue.messages_shared')").fetchone()
            assert size is not None
            assert size[0] > DEAD_ROWS * 100
            yield dsns


@dataclass
class Session:
    """A warmed session that says what its statements cost, and by which plans."""

    connection: psycopg.Connection[Any]
    plans: list[Any] = field(default_factory=list)

    def buffers(self, statement: str, *values: Any) -> int:
        """The buffers that one call reads or finds, its nested statements included."""
        explain = f"explain (analyze, buffers, timing off, summary off, format json) {statement}"
        with psycopg.ClientCursor(self.connection) as cursor:
            plan = cursor.execute(explain, values).fetchone()[0][0]["Plan"]
        return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])

    def claimed(self, number: int) -> tuple[list[int], Any]:
        rows = self.connection.execute("select id, claim_token from pgqueue.claim('q', %s)", (number,)).fetchall()
        if len(rows) < number:
            fill(self.connection, 1000)
            rows = self.connection.execute("select id, claim_token from pgqueue.claim('q', %s)", (number,)).fetchall()
        assert len(rows) == number
        return [row[0] for row in rows], rows[0][1]

    def reserved(self) -> tuple[str, int, int, Any]:
        """A stream of its own with a batch of 100: its name, epoch, and the number and token of the batch."""
        fill(self.connection, 200)
        name = f"plans_{next(streams)}"
        return self.connection.execute(
            "select s.stream_name, s.epoch, b.seq, b.claim_token from pgqueue.stream_open('q', %s) s,"
            " pgqueue.stream_claim('q', s.stream_name, s.epoch, 0, null, 100) b where b.messages = 100",
            (name,),
        ).fetchone()

    def begun(self) -> tuple[str, int, int, Any]:
        """A batch that another one has begun to read."""
        name, epoch, seq, token = self.reserved()
        self.connection.execute(
            "select pgqueue.stream_begin('q', %s, %s, %s, %s)",
            (name, epoch, seq, token),
        )
        epoch = self.connection.execute("select epoch from pgqueue.stream_open('q', %s)", (name,)).fetchone()[0]
        return name, epoch, seq, token

    def without_returns(self, cost: int) -> int:
        """Leave nothing that is due to the claims that come."""
        self.connection.execute("delete from pgqueue.scheduled_messages")
        return cost

    def ready(self) -> int:
        """The id of a message that nobody has claimed."""
        insert = "insert into pgqueue.messages (queue_name, payload) values ('q', '1') returning id"
        return int(self.connection.execute(insert).fetchone()[0])

    def sweeps(self) -> bool:
        """Have the next claim sweep from the head, and learn."""
        self.connection.execute("select setval(sweep_register, 1), setval(swept_register, 1) from pgqueue.queues")
        self.connection.execute("update pgqueue.sweeps set learnt_at = '1970-01-01 00:00+00'")
        return True

    def keep_plans(self) -> None:
        """From now on keep the plan of every statement, nested ones too."""
        self.connection.add_notice_handler(
            lambda notice: self.plans.append(json.loads(notice.message_primary.split("plan:\n")[1]))
        )
        for setting in (
            "log_min_duration = 0",
            "log_nested_statements = on",
            "log_format = json",
            "log_level = notice",
        ):
            self.connection.execute(f"set auto_explain.{setting}")


CALLS: dict[str, Callable[[Session, Callable[..., int]], int]] = {
    "enqueue": lambda _, run: run("select pgqueue.enqueue('q', '{}')"),
    "claim 1": lambda _, run: run("select * from pgqueue.claim('q')"),
    "claim 1, sweeping": lambda s, run: run("select * from pgqueue.claim('q')") if s.sweeps() else 0,
    "claim 100": lambda _, run: run("select * from pgqueue.claim('q', 100)"),
    "ack": lambda s, run: run("select pgqueue.ack('q', (%s::bigint[])[1], %s)", *s.claimed(1)),
    "ack_batch 100": lambda s, run: run("select pgqueue.ack_batch('q', %s::bigint[], %s)", *s.claimed(100)),
    "exchange 1": lambda s, run: run("select * from pgqueue.exchange('q', %s::bigint[], %s)", *s.claimed(1)),
    "exchange 100": lambda s, run: run("select * from pgqueue.exchange('q', %s::bigint[], %s, 100)", *s.claimed(100)),
    "extend": lambda s, run: run("select pgqueue.extend('q', (%s::bigint[])[1], %s)", *s.claimed(1)),
    "extend_batch 100": lambda s, run: run("select pgqueue.extend_batch('q', %s::bigint[], %s)", *s.claimed(100)),
    "nack": lambda s, run: run("select pgqueue.nack('q', (%s::bigint[])[1], %s)", *s.claimed(1)),
    "release 100": lambda s, run: s.without_returns(
        run("select pgqueue.release('q', %s::bigint[], %s)", *s.claimed(100))
    ),
    "record_failure": lambda s, run: run("select pgqueue.record_failure('q', %s, 1, '1 h')", s.ready()),
    "receive 1": lambda _, run: run("select * from pgqueue.receive('q')"),
    "stream_claim 100": lambda s, run: run(
        "select * from pgqueue.stream_claim('q', %s, %s, %s, %s, 100)", *s.reserved()
    ),
    "stream_claim 100 up to": lambda s, run: run(
        "select * from pgqueue.stream_claim('q', %s, %s, %s, %s, 100,"
        " up_to_id => (select last_value from pgqueue.message_id))",
        *s.reserved(),
    ),
    "stream_begin 100": lambda s, run: run("select pgqueue.stream_begin('q', %s, %s, %s, %s)", *s.begun()),
    "stream_read 100": lambda s, run: run("select * from pgqueue.stream_read('q', %s, %s, %s, %s)", *s.reserved()),
    "stream_extend 100": lambda s, run: run("select * from pgqueue.stream_extend('q', %s, %s)", *s.reserved()[:2]),
    "stream_ack 100": lambda s, run: run("select pgqueue.stream_ack('q', %s, %s, %s, %s)", *s.reserved()),
    "stream_skip 100": lambda s, run: run("select pgqueue.stream_skip('q', %s, 1)", s.reserved()[0]),
    "peek": lambda _, run: run("select pgqueue.peek('q')"),
    "stats": lambda _, run: run("select * from pgqueue.stats('q')"),
}


@pytest.fixture
def session(states: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Session]:
    with connect(states[request.param]) as connection:
        connection.execute("load 'auto_explain'")
        yield Session(connection)


@pytest.mark.parametrize("session", STATES, indirect=True)
@pytest.mark.parametrize("call", BOUNDS)
def test_a_call_touches_a_bounded_number_of_buffers(session: Session, call: str) -> None:
    if call not in ("peek", "stats"):
        session.connection.execute("select pgqueue.enqueue_batch('q', array_fill('1'::jsonb, array[200]))")
    # Dead rows are read, by stats too, until sweeps have learnt of them: once to note who writes, once to settle.
    for _ in range(3):
        session.sweeps()
        session.connection.execute("select pgqueue.claim('q')")
    CALLS[call](session, session.buffers)
    counts = [CALLS[call](session, session.buffers) for _ in range(20)]
    print(f"{call:14} {statistics.median(counts):7} {max(counts):7}")
    most, any_call = BOUNDS[call]
    if call == "stats" and session.connection.info.dbname != "deep":
        # Where the other tests have settled messages among those that stay, their dead rows lie in the samples.
        most, any_call = 20 * most, 20 * any_call
    assert statistics.median(counts) <= most
    assert max(counts) <= any_call


def nodes(plan: Any) -> Iterator[Any]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


@pytest.mark.parametrize("session", STATES, indirect=True)
@pytest.mark.parametrize("call", [call for call in CALLS if call not in ("stats", "enqueue")])
def test_a_call_reaches_messages_by_the_primary_key_alone(session: Session, call: str) -> None:
    session.connection.execute("select pgqueue.enqueue_batch('q', array_fill('1'::jsonb, array[2000]))")

    def run(statement: str, *values: Any) -> int:
        with psycopg.ClientCursor(session.connection) as cursor:
            cursor.execute(statement, values)
        return 0

    # Settle into the plan that is kept: a plan of the first executions could be another.
    for _ in range(7):
        CALLS[call](session, run)
    session.keep_plans()
    session.sweeps()
    session.plans.clear()
    CALLS[call](session, run)
    session.connection.execute("set auto_explain.log_min_duration = -1")

    seen = [
        node | {"Query Text": plan["Query Text"]}
        for plan in session.plans
        for node in nodes(plan["Plan"])
        if node.get("Relation Name", "").startswith("messages") and node["Node Type"] not in ("ModifyTable", "LockRows")
    ]
    assert seen, "no plan was seen"
    elsewhere = [
        node
        for node in seen
        if node["Node Type"] not in ("Index Scan", "Index Only Scan")
        or node["Index Name"] != "messages_shared_pkey"
        or "queue_name" not in node.get("Index Cond", "")
        or "id" not in node["Index Cond"].replace("queue_name", "")
    ]
    assert not elsewhere, json.dumps(elsewhere, indent=1)
    assert not [
        node["Node Type"]
        for plan in session.plans
        if "pgqueue.messages" in plan["Query Text"] and "returns" not in plan["Query Text"]
        for node in nodes(plan["Plan"])
        if node["Node Type"] in ("Sort", "Seq Scan", "Bitmap Heap Scan", "Incremental Sort")
    ]


@pytest.mark.parametrize("state", ["deep", "never_analysed"])
def test_the_statistics_of_a_deep_queue_are_near_the_truth_and_say_that_they_are_estimates(
    states: dict[str, str], state: str
) -> None:
    with connect(states[state]) as connection:
        truth = connection.execute(
            "select count(*) filter (where visible_at <= now()), count(*) filter (where visible_at > now())"
            " from pgqueue.messages"
        ).fetchone()
        ready, inflight, estimates = connection.execute(
            "select ready_messages, inflight_messages, estimates from pgqueue.stats('q')"
        ).fetchone()
        assert {"ready_messages", "inflight_messages"} <= set(estimates)
        assert ready == pytest.approx(truth[0], rel=0.2)
        assert inflight == pytest.approx(truth[1], rel=0.2)
        assert connection.execute("select pgqueue.peek('q', 100)").fetchone() == (100,)


def test_the_statistics_of_a_small_queue_are_exact(connection: psycopg.Connection[Any], name: str) -> None:
    connection.execute("select pgqueue.create_queue(%s)", (name,))
    connection.execute(
        "select count(*) from pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[150]))",
        (name,),
    )
    connection.execute("select count(*) from pgqueue.claim(%s, 50)", (name,))
    assert connection.execute(
        "select ready_messages, inflight_messages, estimates from pgqueue.stats(%s)",
        (name,),
    ).fetchone() == (100, 50, [])
