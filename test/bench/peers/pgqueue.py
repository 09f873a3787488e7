"""pgqueue: its functions by pgbench, and its client of Python, which is what other libraries are compared with."""

import random
from typing import Any, ClassVar, Self

import psycopg
from psycopg.types.json import Jsonb

import pgqueue

from .base import GROUPS, IN_FLIGHT, MANY_QUEUES, QUEUE, QUEUES, SCHEDULED, GroupedPeer, SqlPeer, payload
from .library import LibraryPeer, Session, loads


def install(peer: Any) -> None:
    peer.make_database()
    peer.execute("create extension pgqueue", f"select pgqueue.create_queue('{QUEUE}')")
    ((peer.version,),) = peer.execute("select pgqueue.version()")


def refill(peer: Any, messages: int, size: int) -> None:
    """A queue as new, with messages as plain SQL may insert them."""
    peer.execute("truncate pgqueue.messages, pgqueue.scheduled_messages", f"select pgqueue.drop_queue('{QUEUE}')")
    peer.execute(f"select pgqueue.create_queue('{QUEUE}')")
    peer.execute(
        f"insert into pgqueue.messages (queue_name, max_attempts, payload)"
        f" select '{QUEUE}', 5, %(payload)s::jsonb from generate_series(1, %(messages)s)",
        payload=payload(size),
        messages=messages,
    )
    peer.settle()


def claim_any() -> str:
    """A claim that may find nothing; :mid is then 0."""
    return rf"""
        select coalesce(max(id), 0) as mid, coalesce(max(claim_token::text), :tok::text) as tok
        from pgqueue.claim('{QUEUE}') \gset
    """


class Pgqueue(SqlPeer):
    name = "pgqueue"
    table = "pgqueue.messages"
    conditions: ClassVar = {
        IN_FLIGHT: [
            f"select count(*) from (select pgqueue.enqueue_batch('{QUEUE}', array_fill('1'::jsonb, array[1000]))"
            " from generate_series(1, 100)) sent",
            *[f"select count(*) from pgqueue.claim('{QUEUE}', 1000, '1 hour')"] * 100,
        ],
        SCHEDULED: [
            f"select count(*) from (select pgqueue.enqueue_batch('{QUEUE}', array_fill('1'::jsonb, array[1000]),"
            " delay => '10 hours') from generate_series(1, 1000)) sent"
        ],
        MANY_QUEUES: [
            f"select pgqueue.create_queue('{QUEUE}' || n) from generate_series(1, {QUEUES}) n"
            f" where not exists (select from pgqueue.queues where name = '{QUEUE}' || n)",
            f"select pgqueue.enqueue('{QUEUE}' || n, '1'), pgqueue.enqueue('{QUEUE}' || n, '1')"
            f" from generate_series(1, {QUEUES}) n",
        ],
    }
    scripts: ClassVar = {
        ("enqueue", 1): f"select pgqueue.enqueue('{QUEUE}', :payload::jsonb);\n",
        ("enqueue", 100): (
            f"select count(*) from pgqueue.enqueue_batch('{QUEUE}', array_fill(:payload::jsonb, array[100]));\n"
        ),
        ("take", 1): rf"""
            select id as mid, claim_token as tok, payload as body from pgqueue.claim('{QUEUE}', 1) \gset
            select pgqueue.ack('{QUEUE}', :mid, :tok::uuid);
        """,
        ("take", 100): rf"""
            select array_agg(id) as mid, min(claim_token::text) as tok, array_agg(payload) as body
            from pgqueue.claim('{QUEUE}', 100) \gset
            select pgqueue.ack_batch('{QUEUE}', :mid::bigint[], :tok::uuid);
        """,
        # Acknowledges the message of the step before, and claims the next; the first step acknowledges nothing.
        ("exchange", 1): rf"""
            select id as mid, claim_token as tok, payload as body
            from pgqueue.exchange('{QUEUE}', array[:mid]::bigint[], :tok::uuid) where not lost \gset
        """,
        # Each step that does not acknowledge its message claims another, so that the queue does not grow.
        ("mixed", 1): rf"""
            \set sent random(1, 100)
            \set done random(1, 100)
            \set few random(1, 20)
            select pgqueue.enqueue('{QUEUE}', :payload::jsonb,
                delay => case when :sent <= 10 then interval '200 ms' else interval '0' end);
            {claim_any()}
            \if :done <= 10
            select pgqueue.nack('{QUEUE}', :mid, :tok::uuid, '100 ms') where :mid > 0;
            {claim_any()}
            \elif :done = 11
            select pgqueue.reject('{QUEUE}', :mid, :tok::uuid) where :mid > 0;
            \if :few = 1
            select pgqueue.redrive('{QUEUE}', 100);
            \endif
            {claim_any()}
            \endif
            select pgqueue.ack('{QUEUE}', :mid, :tok::uuid) where :mid > 0;
        """,
    }

    def setup(self) -> None:
        install(self)

    def fill(self, messages: int, size: int) -> None:
        refill(self, messages, size)


class GroupedQueue(GroupedPeer):
    """A queue of pgqueue with groups."""

    emptied_by = (
        "truncate pgqueue.messages, pgqueue.scheduled_messages",
        f"select pgqueue.drop_queue('{QUEUE}')",
        f"select pgqueue.create_queue('{QUEUE}', group_limit => 1)",
    )
    # Claims would have to move messages without the kind of the queue.
    filled_by = (
        "insert into pgqueue.messages (queue_name, max_attempts, payload, headers, kind)"
        f" select '{QUEUE}', 5, %(payload)s::jsonb, jsonb_build_object('pgqueue.group',"
        f" case when n <= %(hot)s then 'hot' else 'g' || n %% {GROUPS} end), q.kind"
        f" from generate_series(1, %(messages)s) n, pgqueue.queues q where q.name = '{QUEUE}'"
    )
    counted_by = "select count(*) from pgqueue.messages where headers ->> 'pgqueue.group' <> 'hot'"


class GroupedPgqueue(GroupedQueue, Pgqueue):
    name = "pgqueue, group_limit 1"
    scripts: ClassVar = {
        ("enqueue", 1): rf"""
            \set g random(0, {GROUPS - 1})
            select pgqueue.enqueue('{QUEUE}', :payload::jsonb, group_key => 'g' || :g::text);
        """,
        ("take", 1): rf"""
            select
                coalesce(max(id), 0) as mid, coalesce(max(claim_token::text), :tok::text) as tok,
                max(payload::text) as body
            from pgqueue.claim('{QUEUE}') \gset
            select pgqueue.ack('{QUEUE}', :mid, :tok::uuid) where :mid > 0;
        """,
    }


class ClientSession(Session):
    """A connection of the client."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self.connection = connection
        self.queue = pgqueue.AsyncQueue(connection, QUEUE)

    @classmethod
    async def open(cls, dsn: str) -> Self:
        return cls(await psycopg.AsyncConnection.connect(dsn, autocommit=True))

    async def enqueue(self, bodies: list[str]) -> None:
        if len(bodies) == 1:
            await self.queue.enqueue(loads(bodies[0]))
        else:
            await self.queue.enqueue_batch([loads(body) for body in bodies])

    async def take(self, number: int) -> int:
        messages = await self.queue.claim(number)
        if len(messages) == 1:
            await self.queue.ack(messages[0].id, messages[0].claim_token)
        elif messages:
            await self.queue.ack_batch([each.id for each in messages], messages[0].claim_token)
        return len(messages)

    async def copy(self, bodies: list[str]) -> None:
        await self.queue.enqueue_copy(Jsonb(body, dumps=str) for body in bodies)

    async def close(self) -> None:
        await self.connection.close()


class PgqueueClient(LibraryPeer):
    name = "pgqueue (Python)"
    client = "AsyncQueue, psycopg 3"
    session = ClientSession
    works: ClassVar = {("enqueue", 1), ("enqueue", 100), ("take", 1), ("take", 100), ("cycle", 1), ("copy", 10_000)}

    def setup(self) -> None:
        install(self)

    def fill(self, messages: int, size: int) -> None:
        refill(self, messages, size)

    def left(self) -> int:
        return len(self.execute("select 1 from pgqueue.messages limit 1"))


class GroupedClientSession(ClientSession):
    """A connection of the client to a queue with groups."""

    may_find_none = True

    async def enqueue(self, bodies: list[str]) -> None:
        await self.queue.enqueue(loads(bodies[0]), group_key=f"g{random.randrange(GROUPS)}")


class GroupedPgqueueClient(GroupedQueue, PgqueueClient):
    name = "pgqueue (Python), group_limit 1"
    session = GroupedClientSession
    works: ClassVar = {("cycle", 1)}
