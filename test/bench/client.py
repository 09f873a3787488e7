"""Measures what a call of the client costs its own process, beside psycopg executing the same text.

Usage: client.py [--turns 20] [verb …]

A figure is the CPU time of this process for a call: the median of blocks of 10 calls, which alternate. The call of
psycopg is `connection.execute(text, values)` and `fetchall`, with the text that the client sends, rows as
tuples, JSON decoded by psycopg, and JSON given as text.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

import pgqueue
from pgqueue import _calls
from pgqueue.embedded import EmbeddedServer

CALLS, BLOCK = 200, 10
QUEUE = "orders"
PAYLOAD = {"order_id": 1001, "event": "created", "items": [{"sku": "A-1", "qty": 2}], "total": 123.45}
# Each verb with its first arguments; "claim" stands for the id and the token of a message, and "claims" for a list.
VERBS: dict[str, tuple[Any, ...]] = {
    "enqueue": (PAYLOAD,),
    "enqueue_batch": ([PAYLOAD] * 10,),
    "claim": (),
    "claim of 10": (10,),
    "receive": (),
    "exchange": ("claims",),
    "ack": ("claim",),
    "ack_batch": ("claims",),
    "nack": ("claim",),
    "extend": ("claim",),
    "release": ("claims",),
    "peek": (),
}
MOST_IDLE = 1.5  # of the load of the machine, with this program: above it the figures are marked
Figures = tuple[float, float]  # microseconds of the client and of psycopg


def turn_of(verb: str, connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    """Prepare the queue for a turn, and return the arguments of each call."""
    connection.execute("select pgqueue.purge_queue(%s)", [QUEUE])
    fill = "select count(*) from pgqueue.enqueue_batch(%s, %s::jsonb[])"
    arguments = VERBS[verb]
    if verb in ("claim", "claim of 10", "receive"):
        connection.execute(fill, [QUEUE, [json.dumps(PAYLOAD)] * CALLS * (arguments or (1,))[0]])
    if arguments not in (("claim",), ("claims",)):
        return [arguments] * CALLS
    connection.execute(fill, [QUEUE, [json.dumps(PAYLOAD)] * CALLS])
    claim = "select id, claim_token from pgqueue.claim(%s, 1, '1 h')"
    claims = [connection.execute(claim, [QUEUE]).fetchall()[0] for _ in range(CALLS)]
    if verb == "exchange":
        connection.execute(fill, [QUEUE, [json.dumps(PAYLOAD)] * CALLS])
    return [(number if arguments == ("claim",) else [number], token) for number, token in claims]


def statement(verb: str, arguments: tuple[Any, ...]) -> tuple[bytes, list[Any]]:
    """The text and the values that the client sends."""
    call = getattr(_calls, verb.partition(" ")[0])
    bound = call(QUEUE, *arguments, *[None] * (len(call.arguments) - 1 - len(arguments)))
    return bound.text, bound.values


def written(value: Any) -> Any:
    """A value as psycopg gets it: JSON as text."""
    if isinstance(value, list) and value and isinstance(value[0], (Jsonb, dict)):
        return [json.dumps(getattr(one, "obj", one)) for one in value]
    return json.dumps(getattr(value, "obj", value)) if isinstance(value, (Jsonb, dict)) else value


def values_of(verb: str, turn: list[tuple[Any, ...]]) -> list[Callable[[], list[Any]]]:
    """What makes the values of each call; of the values only JSON takes time."""
    if verb == "enqueue":
        return [lambda: [QUEUE, json.dumps(PAYLOAD)]] * CALLS
    if verb == "enqueue_batch":
        return [lambda: [QUEUE, [json.dumps(one) for one in [PAYLOAD] * 10]]] * CALLS
    return [partial(list, statement(verb, arguments)[1]) for arguments in turn]


def measure(dsn: str, verb: str, turns: int) -> Figures:
    """The figures of the sync client."""
    spent: list[list[float]] = [[], []]
    with psycopg.connect(dsn, autocommit=True) as other, psycopg.connect(dsn, autocommit=True) as connection:
        client: Any = getattr(pgqueue.Queue(connection, QUEUE), verb.partition(" ")[0])
        for _ in range(turns):
            turn = turn_of(verb, other)
            (text, _), values = statement(verb, turn[0]), values_of(verb, turn)
            for first in range(0, CALLS, BLOCK):
                is_plain = first // BLOCK % 2
                began = time.process_time_ns()
                if is_plain:
                    for make in values[first : first + BLOCK]:
                        connection.execute(text, make()).fetchall()
                else:
                    for arguments in turn[first : first + BLOCK]:
                        client(*arguments)
                spent[is_plain].append((time.process_time_ns() - began) / BLOCK / 1000)
    return median(spent[0]), median(spent[1])


async def measure_async(dsn: str, verb: str, turns: int) -> Figures:
    """The figures of the async client."""
    spent: list[list[float]] = [[], []]
    with psycopg.connect(dsn, autocommit=True) as other:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            client: Any = getattr(pgqueue.AsyncQueue(connection, QUEUE), verb.partition(" ")[0])
            for _ in range(turns):
                turn = turn_of(verb, other)
                (text, _), values = statement(verb, turn[0]), values_of(verb, turn)
                for first in range(0, CALLS, BLOCK):
                    is_plain = first // BLOCK % 2
                    began = time.process_time_ns()
                    if is_plain:
                        for make in values[first : first + BLOCK]:
                            await (await connection.execute(text, make())).fetchall()
                    else:
                        for arguments in turn[first : first + BLOCK]:
                            await client(*arguments)
                    spent[is_plain].append((time.process_time_ns() - began) / BLOCK / 1000)
    return median(spent[0]), median(spent[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("verbs", nargs="*", default=[])
    given = parser.parse_args()
    with EmbeddedServer(settings={"fsync": "off", "synchronous_commit": "off"}) as server:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("create extension pgqueue")
            pgqueue.Queue(connection, QUEUE).create_queue(max_attempts=100)
        is_busy = os.getloadavg()[0] > MOST_IDLE
        print(f"microseconds of CPU a call; psycopg {psycopg.__version__} ({psycopg.pq.__impl__})")
        print(f"{'':14} {'sync':>7} {'psycopg':>8} {'':>5} {'async':>8} {'psycopg':>8}")
        for verb in given.verbs or VERBS:
            ours, plain = measure(server.dsn, verb, given.turns)
            ours_async, plain_async = asyncio.run(measure_async(server.dsn, verb, given.turns))
            is_busy = is_busy or os.getloadavg()[0] > MOST_IDLE
            both = f"{ours:7.1f} {plain:8.1f} {ours / plain:5.2f} {ours_async:8.1f} {plain_async:8.1f}"
            print(f"{verb:14} {both} {ours_async / plain_async:5.2f}{'  busy' * is_busy}", flush=True)


if __name__ == "__main__":
    main()
