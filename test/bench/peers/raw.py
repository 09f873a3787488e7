"""The statements that a table used as a queue is worked with, on a bare table: no function, no check, no wake-up.

They are prepared, name a consumer and count attempts; nothing moves a message to dead letters.
"""

from typing import ClassVar

from .bare import BareTable
from .base import QUEUE

TABLE = """
create table public.messages (
    id bigint generated always as identity primary key,
    queue_name text not null,
    payload jsonb not null,
    attempt_count int not null default 0,
    max_attempts int not null default 5,
    visible_at timestamptz not null default now(),
    enqueued_at timestamptz not null default now(),
    claimed_by text,
    last_error text
) with (fillfactor = 50)
"""
INSERT = "insert into public.messages (queue_name, payload, max_attempts, visible_at)"
# A subquery without "with" could run again for each row of a nested loop, and claim more than its limit.
CLAIM = f"""
    with picked as materialized (
        select id from public.messages
        where queue_name = '{QUEUE}' and visible_at <= now() and attempt_count < max_attempts
        order by id for update skip locked limit %d
    )
    update public.messages m
    set visible_at = now() + (60 * interval '1 second'), attempt_count = m.attempt_count + 1, claimed_by = 'worker-1'
    where m.id in (select p.id from picked p)
"""


class Raw(BareTable):
    name = "raw statements"
    table = "public.messages"
    definition = TABLE
    filling = f"{INSERT} select '{QUEUE}', %(payload)s::jsonb, 5, now() from generate_series(1, %(messages)s)"
    scripts: ClassVar = {
        ("enqueue", 1): f"{INSERT} values ('{QUEUE}', :payload::jsonb, 5, now()) returning id;\n",
        ("enqueue", 100): f"{INSERT} select '{QUEUE}', :payload::jsonb, 5, now() from generate_series(1, 100);\n",
        ("take", 1): rf"""
            {CLAIM % 1} returning m.id as mid, m.payload as body, m.attempt_count as attempt \gset
            delete from public.messages where id = :mid and claimed_by = 'worker-1';
        """,
        ("take", 100): rf"""
            with claimed as ({CLAIM % 100} returning m.id, m.payload)
            select array_agg(id) as mid, array_agg(payload) as body from claimed \gset
            delete from public.messages where id = any (:mid::bigint[]) and claimed_by = 'worker-1';
        """,
    }
