"""pgmq: the SQL that PyPI's package carries."""

import importlib.util
from pathlib import Path
from typing import ClassVar

from .base import GROUPS, IN_FLIGHT, MANY_QUEUES, QUEUE, QUEUES, SCHEDULED, GroupedPeer, Missing, SqlPeer, payload


class Pgmq(SqlPeer):
    name = "pgmq"
    table = f"pgmq.q_{QUEUE}"
    conditions: ClassVar = {
        IN_FLIGHT: [
            f"select count(*) from (select pgmq.send_batch('{QUEUE}', array_fill('1'::jsonb, array[1000]))"
            " from generate_series(1, 100)) sent",
            *[f"select count(*) from pgmq.read('{QUEUE}', 3600, 1000)"] * 100,
        ],
        SCHEDULED: [
            f"select count(*) from (select pgmq.send_batch('{QUEUE}', array_fill('1'::jsonb, array[1000]), 36000)"
            " from generate_series(1, 1000)) sent"
        ],
        # A transaction each, as a queue is a table with locks.
        MANY_QUEUES: [
            f"do $$ begin for n in 1..{QUEUES} loop perform pgmq.create('{QUEUE}' || n); commit; end loop; end $$",
            f"do $$ begin for n in 1..{QUEUES} loop perform pgmq.purge_queue('{QUEUE}' || n); commit; end loop; end $$",
            f"do $$ begin for n in 1..{QUEUES} loop"
            f" perform pgmq.send_batch('{QUEUE}' || n, array_fill('1'::jsonb, array[2])); commit; end loop; end $$",
        ],
    }
    scripts: ClassVar = {
        ("enqueue", 1): f"select pgmq.send('{QUEUE}', :payload::jsonb);\n",
        ("enqueue", 100): (
            f"select count(*) from pgmq.send_batch('{QUEUE}', array_fill(:payload::jsonb, array[100]));\n"
        ),
        ("take", 1): rf"""
            select msg_id as mid, message as body from pgmq.read('{QUEUE}', 60, 1) \gset
            select pgmq.delete('{QUEUE}', :mid::bigint);
        """,
        ("take", 100): rf"""
            select array_agg(msg_id) as mid, array_agg(message) as body from pgmq.read('{QUEUE}', 60, 100) \gset
            select count(*) from pgmq.delete('{QUEUE}', :mid::bigint[]);
        """,
    }
    scripts[("exchange", 1)] = scripts[("take", 1)]  # it has none: the same step is these two calls

    def setup(self) -> None:
        spec = importlib.util.find_spec("pgmq")
        if spec is None or spec.origin is None:
            raise Missing("pip install pgmq==1.1.4")
        home = Path(spec.origin).parent / "sql"
        self.version = (home / "VERSION").read_text().strip()
        self.make_database()
        self.execute((home / "pgmq.sql").read_text(), f"select pgmq.create('{QUEUE}')")

    def fill(self, messages: int, size: int) -> None:
        self.execute(f"truncate {self.table}")
        self.execute(
            f"insert into {self.table} (vt, message)"
            " select clock_timestamp(), %(payload)s::jsonb from generate_series(1, %(messages)s)",
            payload=payload(size),
            messages=messages,
        )
        self.settle()


class GroupedPgmq(GroupedPeer, Pgmq):
    name = "pgmq, read_grouped_head"
    emptied_by = (f"truncate {Pgmq.table}",)
    filled_by = (
        f"insert into {Pgmq.table} (vt, message, headers)"
        " select clock_timestamp(), %(payload)s::jsonb, jsonb_build_object('x-pgmq-group',"
        f" case when n <= %(hot)s then 'hot' else 'g' || n %% {GROUPS} end) from generate_series(1, %(messages)s) n"
    )
    counted_by = f"select count(*) from {Pgmq.table} where headers ->> 'x-pgmq-group' <> 'hot'"
    scripts: ClassVar = {
        ("enqueue", 1): rf"""
            \set g random(0, {GROUPS - 1})
            select pgmq.send('{QUEUE}', :payload::jsonb, jsonb_build_object('x-pgmq-group', 'g' || :g::text));
        """,
        ("take", 1): rf"""
            select coalesce(max(msg_id), 0) as mid, max(message::text) as body
            from pgmq.read_grouped_head('{QUEUE}', 60, 1) \gset
            select pgmq.delete('{QUEUE}', :mid::bigint) where :mid > 0;
        """,
    }
