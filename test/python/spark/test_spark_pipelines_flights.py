"""The pipeline of the demo is exactly once to Parquet and to a queue, although it is killed at critical points."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

pytestmark = pytest.mark.long(part="spark")

MESSAGES = 60_000

# What the pipeline has to come to, as PostgreSQL works it out.
EXPECTED = """
select time_hour, carrier, count(*), count(*) filter (where arr_time is null),
    sum(case when arr_time is null then 0 else coalesce(arr_delay, 0) end)
from flights_sent group by 1, 2 order by 1, 2
"""
PUBLISHED = """
select (m.payload ->> 'hour')::timestamptz, m.payload ->> 'carrier', (m.payload ->> 'flights')::bigint,
    (m.payload ->> 'cancelled')::bigint, (m.payload ->> 'minutes_late')::bigint
from pgqueue.messages m where m.queue_name = %s order by 1, 2
"""
# Twelve days of flights in order of departure; then the message that closes the last hours.
SEND = """
create table flights_sent as
select g as record,
    (array['AA', 'B6', 'DL', 'UA', 'WN'])[1 + (hashint4(g) & 65535) %% 5] as carrier,
    date_trunc('hour', '2013-01-01 00:00+00'::timestamptz + g * interval '17 s', 'UTC') as time_hour,
    case when (hashint4(g + 1) & 65535) %% 40 > 0 then (hashint4(g + 2) & 65535) %% 2400 end as arr_time,
    case when (hashint4(g + 3) & 65535) %% 90 > 0 then (hashint4(g + 4) & 65535) %% 300 - 60 end as arr_delay
from generate_series(1, %(messages)s) g;
insert into pgqueue.messages (queue_name, payload)
select %(queue)s, to_jsonb(f) from flights_sent f order by f.record;
"""

# Runs the pipeline in a process group of its own, which it kills in the middle of a batch, or to its end.
CHILD = """
import os, signal, sys
import sparks
from late_workers import completed
from pgqueue.demo import flight_summaries as flights

dsn, path, queue, where, number = sys.argv[1:]
send = flights._send

def dying(found, dsn, summaries, query_id, batch):
    if where == "before" and batch >= int(number):
        os.killpg(0, signal.SIGKILL)
    send(found, dsn, summaries, query_id, batch)
    if where == "after" and batch >= int(number):
        os.killpg(0, signal.SIGKILL)

flights._send = dying
settings = {"dsn": dsn, "queue": queue, "summaries": f"{queue}-summaries", "max_messages": 15_000}
query = completed(lambda: flights.summarize_flights(sparks.session(), path, **settings))
states = [state for progress in query.recentProgress for state in progress["stateOperators"]]
print(sum(state["numRowsDroppedByWatermark"] for state in states), "are late")
"""


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=1200,
        start_new_session=True,
    )


@pytest.mark.usefixtures("jre")
def test_sums_of_flights_are_exact_although_spark_is_killed_twice(
    empty_database: Callable[[], str], tmp_path: Path
) -> None:
    dsn, queue = empty_database(), "flights"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create extension pgqueue")
        connection.execute("select pgqueue.create_queue(%s), pgqueue.create_queue(%s)", [queue, f"{queue}-summaries"])
        psycopg.ClientCursor(connection).execute(SEND, {"messages": MESSAGES, "queue": queue})
        last = json.dumps({"carrier": None, "time_hour": "2013-12-31T00:00:00Z"})
        connection.execute("select pgqueue.enqueue(%s, %s)", [queue, last])

        # In Parquet and not yet in the queue; then in both, and Spark does not know.
        for where, number in (("before", 1), ("after", 2)):
            done = run(dsn, tmp_path, queue, where, number)
            assert done.returncode == -signal.SIGKILL, done.stderr
        done = run(dsn, tmp_path, queue, "nowhere", 0)
        assert (done.returncode, done.stdout) == (0, "0 are late\n"), done.stderr

        expected = connection.execute(EXPECTED).fetchall()
        assert sum(row[2] for row in expected) == MESSAGES
        assert connection.execute(PUBLISHED, [f"{queue}-summaries"]).fetchall() == expected
        assert in_parquet(tmp_path) == expected
        assert connection.execute(
            "select count(*) from pgqueue.messages where queue_name = %s", [queue]
        ).fetchone() == (0,)


def in_parquet(path: Path) -> list[tuple[Any, ...]]:
    """What any reader of Parquet finds, without Spark."""
    import pyarrow.dataset

    table = pyarrow.dataset.dataset([str(file) for file in path.glob("batch=*/*.parquet")]).to_table()
    columns = ("hour", "carrier", "flights", "cancelled", "minutes_late")
    return sorted(tuple(row[column] for column in columns) for row in table.to_pylist())
