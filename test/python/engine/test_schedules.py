"""Schedules: their ticks, compared with another implementation of cron, and exactly one message for each of them."""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from clients import Connection, connect, new_seed, value, wait_for
from cronsim import CronSim, CronSimError

import pgqueue

MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
WEEKDAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
FIELDS: list[tuple[int, int, list[str]]]
FIELDS = [(0, 59, []), (0, 23, []), (1, 31, []), (1, 12, MONTHS), (0, 7, WEEKDAYS)]


def random_field(chance: random.Random, least: int, most: int, names: list[str]) -> str:
    def value() -> int:
        return chance.randint(least, most)

    def written(number: int) -> str:
        return names[number - least] if number - least < len(names) and chance.random() < 0.5 else str(number)

    def part() -> str:
        low, high = sorted((value(), value()))
        kind = chance.random()
        step = f"/{chance.randint(1, most)}" if chance.random() < 0.3 else ""
        if kind < 0.3:
            return f"*{step}"
        # In a range of one value with a step, such as 5-5/2, the other implementation ignores the end.
        return f"{written(low)}{step}" if kind < 0.7 or low == high else f"{written(low)}-{written(high)}{step}"

    if chance.random() < 0.3:
        return "*"
    return ",".join(part() for _ in range(chance.choice([1, 1, 1, 2, 3])))


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
@pytest.mark.parametrize(
    ("expressions", "seed"),
    [(60, 1), pytest.param(3000, None, marks=pytest.mark.long(part="engine"))],
    ids=["short", "at length"],
)
def test_ticks_are_those_of_another_implementation(
    connection: Connection, zone: str, expressions: int, seed: int | None
) -> None:
    chance = random.Random(new_seed() if seed is None else seed)
    cases: list[tuple[str, datetime, list[datetime]]] = []
    while len(cases) < expressions:
        cron = " ".join(random_field(chance, *field) for field in FIELDS)
        start = datetime(2025, 1, 1, 12, tzinfo=ZoneInfo(zone)) + timedelta(days=chance.randrange(3652))
        try:
            ticks = CronSim(cron, start)
            # Fixed times in a gap share its end.
            expected = sorted({next(ticks).astimezone(UTC) for _ in range(2)})
        except CronSimError:
            continue  # no month has the day
        except StopIteration:
            continue  # nothing within 50 years
        cases.append((cron, start, expected))
    rows = connection.execute(
        "select pgqueue._next_tick(c.cron, %s, c.start), pgqueue._next_tick(c.cron, %s, t.first)"
        " from unnest(%s::text[], %s::timestamptz[], %s::timestamptz[]) with ordinality as c (cron, start, first, n)"
        " cross join lateral (select c.first) as t order by c.n",
        (zone, zone, *map(list, zip(*((cron, start, expected[0]) for cron, start, expected in cases), strict=True))),
    ).fetchall()
    wrong = [
        (cron, start, expected, found)
        for (cron, start, expected), found in zip(cases, rows, strict=True)
        if list(found)[: len(expected)] != expected
    ]
    assert not wrong, f"{len(wrong)} of {len(cases)} differ, such as {wrong[:5]}"


def make_due(connection: Connection, queue: str) -> datetime:
    """Let the next tick be now; returns its time."""
    due_at: datetime = value(
        connection,
        "with s as (update pgqueue.schedules set next_at = clock_timestamp() where queue_name = %s returning *)"
        " update pgqueue.scheduled_messages m set due_at = s.next_at from s where m.id = s.next_id returning m.due_at",
        queue,
    )
    connection.execute(
        "select setval(q.first_due_at, 1), setval(q.next_sweep_at, 1) from pgqueue.queues q where q.name = %s", (queue,)
    )
    return due_at


def test_each_tick_is_one_message_for_many_consumers(
    database: str, connection: Connection, orders: pgqueue.Queue
) -> None:
    orders.create_schedule(orders.name, "@yearly")  # no tick by the clock
    ticks = 10

    def consume(place: int) -> list[int]:
        chance, found = random.Random(place), list[int]()
        with connect(database) as mine:
            own = pgqueue.Queue(mine, orders.name)
            while not stopped:
                with mine.transaction(force_rollback=chance.random() < 0.2) as block:
                    got = own.receive(3)
                if not block.force_rollback:
                    found += [message.id for message in got]
        return found

    stopped: list[bool] = []
    with ThreadPoolExecutor(4) as threads:
        consumers = [threads.submit(consume, place) for place in range(4)]
        try:
            for _ in range(ticks):
                before = orders.list_schedules()[0]
                make_due(connection, orders.name)
                wait_for(lambda: orders.list_schedules()[0].last_at != before.last_at)  # noqa: B023
        finally:
            stopped.append(True)
    received = Counter(number for each in consumers for number in each.result())
    assert len(received) == ticks
    assert set(received.values()) == {1}
    (planned,) = orders.browse("scheduled")
    assert planned.headers is not None
    assert planned.headers["pgqueue.schedule"] == orders.name
