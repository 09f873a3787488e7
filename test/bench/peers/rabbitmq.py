"""RabbitMQ, of Debian, as a reference from outside: a quorum queue with one member, as there is one machine.

A publish waits for its confirm, which a quorum queue gives once the message is on disk; it has no faster way. A
consumer is sent messages ahead (prefetch), and acknowledges as many at a time as the cell says; both as its
documentation recommends.
"""

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import ClassVar, Self

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage

from .base import QUEUE, Missing, payload
from .library import Handle, LibraryPeer, Session, number_in

LIB = Path(__file__).resolve().parents[3] / ".cache/bench/rabbitmq/root/usr/lib"
QUORUM = {"x-queue-type": "quorum"}
PREFETCH = 250
ENOUGH = 1.0  # seconds without a message: the queue is empty


class ChannelSession(Session):
    """A connection with one channel, with confirms."""

    def __init__(self, connection: AbstractConnection, channel: AbstractChannel) -> None:
        self.connection = connection
        self.channel = channel
        self.arrived: asyncio.Queue[AbstractIncomingMessage] | None = None

    @classmethod
    async def open(cls, dsn: str) -> Self:
        connection = await aio_pika.connect(dsn)
        return cls(connection, await connection.channel())

    async def enqueue(self, bodies: list[str]) -> None:
        await asyncio.gather(*(self.publish(body) for body in bodies))

    async def publish(self, body: str) -> None:
        message = aio_pika.Message(body.encode(), delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await self.channel.default_exchange.publish(message, routing_key=QUEUE)

    async def take(self, number: int) -> int:
        if self.arrived is None:
            self.arrived = asyncio.Queue()
            await self.channel.set_qos(prefetch_count=PREFETCH)
            await (await self.channel.get_queue(QUEUE, ensure=False)).consume(self.arrived.put)
        count = 0
        with suppress(TimeoutError):
            while count < number:
                message = await (
                    self.arrived.get() if self.arrived.qsize() else asyncio.wait_for(self.arrived.get(), ENOUGH)
                )
                count += 1
        if count:
            await message.ack(multiple=True)
        return count

    async def close(self) -> None:
        await self.connection.close()


class RabbitMq(LibraryPeer):
    name = "RabbitMQ quorum queues"
    client = "aio-pika"
    session = ChannelSession
    works: ClassVar = {("enqueue", 1), ("enqueue", 100), ("take", 1), ("take", 100), ("cycle", 1)}
    worker = f"a consumer with a prefetch of {PREFETCH}"

    def setup(self) -> None:
        if not (LIB / "rabbitmq").exists():
            raise Missing("Debian's rabbitmq-server, by test/bench/fetch.py")
        program = next(LIB.glob("rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server"))
        self.version = program.parents[1].name.rpartition("-")[2]
        self.home = Path(tempfile.mkdtemp(prefix="bench-rabbitmq-"))
        port, names, nodes = free_ports(3)
        self.dsn = f"amqp://guest:guest@127.0.0.1:{port}/"
        (self.home / "rabbitmq.conf").write_text(f"listeners.tcp.local = 127.0.0.1:{port}\nlog.console = false\n")
        (self.home / "plugins").write_text("[].\n")
        environment = os.environ | {
            "PATH": f"{LIB}/erlang/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{LIB}/x86_64-linux-gnu",
            "HOME": str(self.home),  # where its nodes' cookie is
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(names),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_CONFIG_FILE": str(self.home / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.home / "plugins"),
            "RABBITMQ_LOG_BASE": str(self.home / "log"),
            "RABBITMQ_MNESIA_BASE": str(self.home / "mnesia"),
            "RABBITMQ_NODENAME": f"bench{port}@localhost",
            "RABBITMQ_DIST_PORT": str(nodes),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RUNNING_UNDER_SYSTEMD": "true",  # no shell around it
        }
        with (self.home / "said").open("w") as said:
            self.processes = [
                # They do not outlive this program.
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *command], stdout=said, stderr=said, env=environment
                )
                for command in ([next(LIB.glob("erlang/erts-*/bin/epmd"))], [program])
            ]
        while True:  # until it answers
            with suppress(ConnectionError):
                socket.create_connection(("127.0.0.1", port)).close()
                asyncio.run(self._declare())
                return
            if self.processes[1].poll() is not None:
                why = " ".join((self.home / "said").read_text().split())[-300:]
                self.close()
                raise Missing(f"a rabbitmq-server that starts: {why}")
            time.sleep(0.1)

    async def _declare(self) -> None:
        """Leave an empty queue there."""
        connection = await aio_pika.connect(self.dsn)
        channel = await connection.channel()
        await channel.queue_delete(QUEUE)
        await channel.declare_queue(QUEUE, durable=True, arguments=QUORUM)
        await connection.close()

    async def _count(self) -> int:
        connection = await aio_pika.connect(self.dsn)
        queue = await (await connection.channel()).declare_queue(QUEUE, passive=True)
        await connection.close()
        return queue.declaration_result.message_count or 0

    async def _publish(self, messages: int, size: int) -> None:
        """Without confirms, as it is many; an answer on the same channel says that all have arrived."""
        connection = await aio_pika.connect(self.dsn)
        channel = await connection.channel(publisher_confirms=False)
        message = aio_pika.Message(payload(size).encode(), delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        for _ in range(messages):
            await channel.default_exchange.publish(message, routing_key=QUEUE)
        await channel.declare_queue(QUEUE, passive=True)
        await connection.close()

    def fill(self, messages: int, size: int) -> None:
        self.empty()
        asyncio.run(self._publish(messages, size))
        until = time.monotonic() + 60
        while (ready := self.left()) < messages:  # counted a little later than they arrive
            if time.monotonic() > until:
                raise RuntimeError(f"{ready} of {messages} messages arrived within a minute")
            time.sleep(0.05)

    def empty(self) -> None:
        asyncio.run(self._declare())

    def use(self, sync: str) -> None:
        self.sync = sync

    def left(self) -> int:
        return asyncio.run(self._count())

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            process.wait()
        shutil.rmtree(self.home)

    @staticmethod
    @asynccontextmanager
    async def working(dsn: str, handle: Handle) -> AsyncIterator[None]:
        connection = await aio_pika.connect(dsn)
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=PREFETCH)

        async def work(message: AbstractIncomingMessage) -> None:
            handle(number_in(message.body))
            await message.ack()

        await (await channel.get_queue(QUEUE, ensure=False)).consume(work)
        yield
        await connection.close()


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
