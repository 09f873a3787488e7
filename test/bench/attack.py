"""Attacks `pgqueue serve` for an hour, and measures how long an honest client waits meanwhile.

README.md in this directory describes what is measured. The attacker knows the documentation, and has the password of a
user with a queue of its own. It works in a process of its own, on the machine of the server. With `--nginx` all clients
reach the server through nginx with the configuration of test/docker/nginx.conf.
"""

import argparse
import asyncio
import base64
import getpass
import json
import multiprocessing
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import psutil
import psycopg
import uvloop
from environment import SETTINGS, cpu, output_of
from psycopg.conninfo import make_conninfo
from rich.console import Console
from rich.table import Table

from pgqueue.embedded import EmbeddedServer

RESULTS = Path(__file__).parent / "results"
NGINX_CONFIGURATION = Path(__file__).parents[1] / "docker/nginx.conf"
CONTEXT = multiprocessing.get_context("forkserver")
MB: Final = 1024 * 1024
WAIT_GOAL_MS, MEMORY_GOAL_MB = 1000, 300
PACE_SECONDS = 0.05  # of the honest client between two requests
BATCH: Final = json.dumps({"messages": [{"payload": {"text": "x" * 250_000}}] * 100}).encode()
BATCH_8_MB: Final = json.dumps({"messages": [{"payload": {"text": "x" * 250_000}}] * 33}).encode()
ATTACKING: Final = ("127.0.0.2", "127.0.0.3")
QUEUES: Final = ("attacked", "empty", "searched")  # of the attacker
RIGHTS: Final = [f"{access}:bench/{name}" for access in ("producer", "consumer", "admin", "reader") for name in QUEUES]
STALL_SECONDS = 5  # for which an attacker does not read, or does not send


def authorization(user: str, password: str = "password") -> str:
    """Return the header of a user."""
    return f"Authorization: Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}\r\n"


ATTACKER = authorization("attacker")


@dataclass
class Client:
    """Opens connections to the server and sends requests, as text and without a library that would check them."""

    host: str
    port: int
    addresses: tuple[str, ...] = ("127.0.0.1",)  # of the client; its connections take turns with them
    sent: int = field(default=0, init=False)
    connected: int = field(default=0, init=False)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.connected += 1
        address = self.addresses[self.connected % len(self.addresses)]
        return await asyncio.open_connection(self.host, self.port, local_addr=(address, 0))

    def request(self, line: str, body: bytes = b"", headers: str = ATTACKER, form: bool = False) -> bytes:
        kind = "application/x-www-form-urlencoded" if form else "application/json"
        head = f"{line} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: {kind}\r\n{headers}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def ask(
        self, line: str, body: bytes = b"", headers: str = ATTACKER, stall: float = 0, form: bool = False
    ) -> None:
        """Send a request on a new connection, wait, and read the response."""
        reader, writer = await self.connect()
        try:
            writer.write(self.request(line, body, "Connection: close\r\n" + headers, form))
            await writer.drain()
            await asyncio.sleep(stall)
            while await reader.read(MB):
                pass
        finally:
            self.sent += 1
            writer.transport.abort()


Attack = Callable[[Client, int], Awaitable[None]]
ATTACKS: dict[str, tuple[int, Attack]] = {}


def attack(connections: int) -> Callable[[Attack], Attack]:
    """Register what so many connections do repeatedly. Each gets its number."""

    def register(function: Attack) -> Attack:
        ATTACKS[function.__name__.replace("_", " ")] = connections, function
        return function

    return register


def queue(verb: str) -> str:
    return f"POST /v1/queues/attacked/{verb}"


@attack(1500)
async def idle_connections(client: Client, number: int) -> None:
    """Connections on which nothing, or half of a request, is sent."""
    reader, writer = await client.connect()
    if number % 2:
        writer.write(b"POST /v1/queues/attacked/enqueue HTTP/1.1\r\nHost: x\r\n")
    with suppress(TimeoutError):
        await asyncio.wait_for(reader.read(), STALL_SECONDS)
    writer.transport.abort()


@attack(60)
async def new_connections(client: Client, _: int) -> None:
    """Connections that end as soon as they have begun."""
    _, writer = await client.connect()
    writer.transport.abort()


@attack(4)
async def pipelined_requests(client: Client, _: int) -> None:
    """Requests without end on a connection, each of which is sent before the response to the one before."""
    reader, writer = await client.connect()
    requests = client.request("GET /x", headers="") * 10_000
    try:
        async with asyncio.timeout(STALL_SECONDS):
            while True:
                writer.write(requests)
                await asyncio.gather(writer.drain(), reader.read(MB))
    except TimeoutError:
        pass
    finally:
        writer.transport.abort()


@attack(100)
async def wrong_passwords(client: Client, number: int) -> None:
    """Guesses of the password of the honest user, and of names that no user has."""
    await client.ask("GET /v1/queues", headers=authorization("honest" if number % 2 else f"n{number}", str(number)))


@attack(50)
async def log_ins(client: Client, _: int) -> None:
    """The form of the page, with a wrong password."""
    await client.ask("POST /login", urlencode({"user": "honest", "password": "guess"}).encode(), "", form=True)


@attack(8)
async def many_values(client: Client, number: int) -> None:
    """Bodies of 400,000 lists, of deep lists, and of long numbers."""
    body = (b"[" + b"[]," * 390_000 + b"0]", b"[" * 900_000 + b"]" * 900_000, b"[" + b"1e131071," * 180_000 + b"0]")
    await client.ask(queue("enqueue"), b'{"messages": [{"payload": ' + body[number % 3] + b"}]}")


@attack(6)
async def wide_characters(client: Client, number: int) -> None:
    """Bodies of 25 MB, half of them cut, with a character for which Python takes four bytes for each of the text."""
    body = BATCH.replace(b"xxxx", "\U0001f600".encode(), 1)
    await client.ask(queue("enqueue"), body[:-1] if number % 2 else body)


@attack(6)
async def large_batches(client: Client, _: int) -> None:
    """Batches of 25 MB."""
    await client.ask(queue("enqueue"), BATCH)


@attack(8)
async def bodies_of_8_mb(client: Client, _: int) -> None:
    """Batches of 8 MB, one after another on each connection."""
    await client.ask(queue("enqueue"), BATCH_8_MB)


@attack(6)
async def large_batches_with_keys(client: Client, number: int) -> None:
    """Batches of 25 MB with an idempotency key, also repeated ones."""
    key = f"Idempotency-Key: {number}-{client.sent // 12}\r\n"
    await client.ask(queue("enqueue"), BATCH, ATTACKER + key)


@attack(6)
async def large_managed_batches(client: Client, _: int) -> None:
    """Batches of 25 MB for an agent."""
    await client.ask("POST /managed-services/bench/queues/attacked/messages", BATCH)


@attack(60)
async def slow_bodies(client: Client, _: int) -> None:
    """Batches of 25 MB whose last part is not sent."""
    reader, writer = await client.connect()
    writer.write(client.request(queue("enqueue"), BATCH)[: -MB // 2])
    with suppress(TimeoutError):
        await asyncio.wait_for(reader.read(), STALL_SECONDS)
    writer.transport.abort()


@attack(20)
async def slow_readers(client: Client, _: int) -> None:
    """Dead letters of 25 MB, of which the first part is read."""
    reader, writer = await client.connect()
    writer.write(client.request("GET /v1/queues/attacked/browse_dead_messages?max_messages=100"))
    await reader.read(1024)
    await asyncio.sleep(STALL_SECONDS)
    writer.transport.abort()


@attack(6)
async def large_claims(client: Client, number: int) -> None:
    """Claims of 25 MB, half of them with an idempotency key. Their clients are slow, or leave."""
    key = f"Idempotency-Key: c{number}-{client.sent // 12}\r\n" if number % 2 else ""
    await client.ask(queue("enqueue"), BATCH)
    claim = json.dumps({"max_messages": 100, "visibility_timeout_seconds": 1}).encode()
    with suppress(TimeoutError):
        await asyncio.wait_for(client.ask(queue("claim"), claim, ATTACKER + key, stall=number / 3), STALL_SECONDS)


@attack(300)
async def long_polls(client: Client, _: int) -> None:
    """Claims that wait for a message."""
    await client.ask("POST /v1/queues/empty/claim", b'{"wait_seconds": 20}')


@attack(12)
async def searches(client: Client, _: int) -> None:
    """Searches of the page through all messages of a queue, for a text that none has."""
    await client.ask("GET /queue?service=bench&database=target&name=searched&state=ready&path=%24.nothing")


@attack(60)
async def tasks(client: Client, _: int) -> None:
    """Small tasks of an agent."""
    await client.ask("POST /managed-services/bench/queues/attacked/stats")


@attack(40)
async def small_pages(client: Client, number: int) -> None:
    """What needs no password, and the pages that show everything."""
    paths = "/readyz", "/login", "/openapi.json", "/static/style.css", "/", "/metrics", "/docs", "/health"
    await client.ask(f"GET {paths[number % len(paths)]}")


async def repeat(client: Client, attack: Attack, number: int) -> None:
    while True:
        try:
            await attack(client, number)
        except OSError:  # the server refuses the connection, or has closed it
            await asyncio.sleep(0.1)


async def run_attacks(host: str, port: int, names: list[str], seconds: float) -> None:
    client, loop = Client(host, port, ATTACKING), asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, _context: None)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for connections, attack in (ATTACKS[name] for name in names):
                for number in range(connections):
                    group.create_task(repeat(client, attack, number))


def attack_with(host: str, port: int, names: list[str], seconds: float) -> None:
    """Attack in this process."""
    os.nice(10)  # Attackers have machines of their own: here they must not take the processors of the server.
    uvloop.run(run_attacks(host, port, names, seconds))


async def be_honest(host: str, port: int, waits: Any) -> None:
    """Send a message and claim it, again and again; a tenth of the requests are on a new connection. Put the end of
    each request, its duration in ms, and the code of its error.
    """
    client, user = Client(host, port), authorization("honest")
    reader, writer = await client.connect()
    number = 0
    while True:
        number += 1
        is_new = number % 10 == 0
        began = time.perf_counter()
        if is_new:
            writer.close()
            reader, writer = await client.connect()
        verb, body = ("enqueue", b'{"messages": [{"payload": {"n": 1}}]}') if number % 2 else ("claim", b"{}")
        writer.write(client.request(f"POST /v1/queues/honest/{verb}", body, user))
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        body = await reader.readexactly(int(length[1])) if length else b""
        took = (time.perf_counter() - began) * 1000
        waits.put((time.time(), took, json.loads(body)["error"]["code"] if int(head[9:12]) >= 400 else None))
        await asyncio.sleep(PACE_SECONDS)


def honest(host: str, port: int, waits: Any) -> None:
    """Be an honest client in this process."""
    uvloop.run(be_honest(host, port, waits))


@contextmanager
def behind_nginx(program: str | None, port: int) -> Iterator[int]:
    """Start nginx in front of the server on a port, if a program is given; yields the port for clients."""
    if program is None:
        yield port
        return
    with tempfile.TemporaryDirectory() as directory, socket.create_server(("127.0.0.1", 0)) as free:
        outer = free.getsockname()[1]
        text = NGINX_CONFIGURATION.read_text().replace("127.0.0.1:8080", f"127.0.0.1:{port}")
        text = re.sub(r"ssl_certificate.*", "", text).replace("443 ssl http2", f"127.0.0.1:{outer}")
        (Path(directory) / "nginx.conf").write_text(text)
        temporary = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        paths = "".join(f"{each}_temp_path {directory}/{each}; " for each in temporary)
        (Path(directory) / "nginx.conf").write_text(text.replace("http {", f"http {{ access_log off; {paths}", 1))
        free.close()
        top = f"daemon off; user {getpass.getuser()}; pid {directory}/pid; error_log {directory}/errors;"
        process = subprocess.Popen([program, "-p", directory, "-c", f"{directory}/nginx.conf", "-g", top])
        try:
            while not is_open(outer):
                assert process.poll() is None, "nginx has ended"
                time.sleep(0.05)
            yield outer
        finally:
            process.terminate()
            process.wait()


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@contextmanager
def served() -> Iterator[tuple[str, int, psutil.Process]]:
    """Start a durable PostgreSQL and `pgqueue serve`, with queues; yields host, port and the process of the server."""
    with EmbeddedServer(settings=SETTINGS) as server, tempfile.TemporaryDirectory() as directory:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            for name in ("control", "target"):
                connection.execute(f"create database {name}")
        target = make_conninfo(server.dsn, dbname="target")
        config = Path(directory) / "pgqueue.toml"
        config.write_text(
            f"control_dsn = {json.dumps(make_conninfo(server.dsn, dbname='control'))}\n"
            "[users]\nhonest = { password_env = 'BENCH_PASSWORD' }\n"
            f"attacker = {{ password_env = 'BENCH_PASSWORD', allow = {json.dumps(RIGHTS)} }}\n"
            f"[services.bench]\ndsn = {json.dumps(server.dsn)}\ndatabases = ['target']\n"
        )
        command = [sys.executable, "-m", "pgqueue", "serve", "--config", str(config), "--port", "0"]
        with (Path(directory) / "log").open("w+") as log:
            environment = os.environ | {"BENCH_PASSWORD": "password"}
            process = subprocess.Popen(command, stderr=log, env=environment)
            try:
                while (found := re.search(r"serves http://([^/:]+):(\d+)", Path(log.name).read_text())) is None:
                    assert process.poll() is None, Path(log.name).read_text()
                    time.sleep(0.05)
                host, port = found[1], int(found[2])
                for name in (*QUEUES, "honest"):
                    asyncio.run(create(host, port, name))
                fill(target)
                yield host, port, psutil.Process(process.pid)
            finally:
                process.terminate()
                process.wait()


async def create(host: str, port: int, name: str) -> None:
    """Create a managed queue, and wait until it is active."""
    client, path = Client(host, port), "/managed-services/bench/queues"
    await client.ask(f"POST {path}", json.dumps({"name": name}).encode(), authorization("honest"))
    while True:
        reader, writer = await client.connect()
        writer.write(client.request(f"GET {path}/{name}", headers="Connection: close\r\n" + authorization("honest")))
        if b'"Active"' in await reader.read():
            writer.close()
            return
        writer.close()
        await asyncio.sleep(0.05)


def fill(dsn: str) -> None:
    """Give the attacked queue 100 dead letters of 250 KB, and another one 200,000 messages to search."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "insert into pgqueue.messages (queue_name, max_attempts, attempt_count, payload)"
            " select 'attacked', 1, 1, jsonb_build_object('text', repeat('x', 250000)) from generate_series(1, 100)"
        )
        connection.execute("select pgqueue.sweep_queue('attacked')")
        connection.execute(
            "insert into pgqueue.messages (queue_name, max_attempts, payload)"
            " select 'searched', 5, jsonb_build_object('n', n) from generate_series(1, 200000) n"
        )


@contextmanager
def running(function: Callable[..., None], *arguments: Any) -> Iterator[multiprocessing.process.BaseProcess]:
    process = CONTEXT.Process(target=function, args=arguments, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.terminate()
        process.join()


def turns(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """The attacks of each turn: none, each alone, and then several at once, until the time is over."""
    yield "none", []
    names = options.only or list(ATTACKS)
    for name in names:
        yield name, [name]
    for turn in range(len(names)):
        several = random.Random(turn).sample(names, min(5, len(names)))
        yield ", ".join(several), several


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Attack, and return the figures of all turns."""
    chosen = list(turns(options))
    seconds = options.minutes * 60 / len(chosen)
    found = []
    with (
        served() as (host, inner, server),
        behind_nginx(options.nginx, inner) as port,
        running(honest, host, port, waits := CONTEXT.Queue()) as client,
    ):
        for name, attacks in chosen:
            memory: list[int] = []
            Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # a new peak begins
            with running(attack_with, host, port, attacks, seconds + 60):
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    time.sleep(0.1)
                    memory.append(server.memory_info().rss)
                    assert client.is_alive(), f"the server closed the connection of the honest client under {name}"
            answers = []
            while not waits.empty():
                answers.append(waits.get())
            took = sorted(each[1] for each in answers)
            turn = {
                "attacks": name,
                "requests": len(answers),
                "errors": sum(each[2] is not None for each in answers),
                "longest_ms": round(took[-1]) if took else None,
                "p99_ms": round(took[int(len(took) * 0.99)], 1) if took else None,
                "most_mb": peak_mb(server.pid),
                "median_mb": round(sorted(memory)[len(memory) // 2] / MB),
                "codes": sorted({each[2] for each in answers if each[2] is not None}),
            }
            found.append(turn)
            console.print(json.dumps(turn))
    return {"seconds": round(seconds * len(chosen)), "turns": found}


def peak_mb(pid: int) -> int:
    """The peak of the memory (RSS) of a process in MB. Samples miss what lasts for less than a tenth of a second."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


def show(report: dict[str, Any], console: Console) -> None:
    """Print a table of the turns."""
    table = Table("attacks", "honest requests", "errors", "longest wait ms", "p99 ms", "most MB", "median MB", "codes")
    for turn in report["turns"]:
        table.add_row(*(str(value) for value in turn.values()))
    console.print(table)


def main() -> None:
    """Attack, write the JSON file, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="duration of all turns together (60)")
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), metavar="ATTACK", help=f"of {list(ATTACKS)}")
    parser.add_argument("--nginx", metavar="PROGRAM", help="put this nginx in front of the server")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    options.output = options.output or RESULTS / ("attack_nginx.json" if options.nginx else "attack.json")
    console = Console(highlight=False, width=120, soft_wrap=True)
    changed = output_of("git", "status", "--porcelain", "--", "python/src", "sql")
    report = {
        "commit": (output_of("git", "rev-parse", "--short", "HEAD") or "unknown")
        + (" with changes" if changed else ""),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores ({cpu()})",
        "load_before": round(os.getloadavg()[0], 2),
        **measure(options, console),
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    show(report, console)


if __name__ == "__main__":
    main()
