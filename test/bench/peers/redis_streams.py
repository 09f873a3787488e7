"""Redis streams, of Debian, as a reference from outside: a group that reads, acknowledges and deletes.

With synchronous_commit on it writes to disk before it answers (appendfsync always), else within a second.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar, Self

import redis
import redis.asyncio

from .base import QUEUE, Missing
from .library import Handle, LibraryPeer, Session, number_in, until_told

HOME = Path(__file__).resolve().parents[3] / ".cache/bench/redis"


class StreamSession(Session):
    """A connection."""

    def __init__(self, connection: redis.asyncio.Redis) -> None:
        self.connection = connection
        self.name = f"{os.getpid()}-{id(self)}"

    @classmethod
    async def open(cls, dsn: str) -> Self:
        return cls(redis.asyncio.Redis(unix_socket_path=dsn, single_connection_client=True))

    async def enqueue(self, bodies: list[str]) -> None:
        if len(bodies) == 1:
            await self.connection.xadd(QUEUE, {"body": bodies[0]})
        else:
            pipeline = self.connection.pipeline(transaction=True)
            for body in bodies:
                pipeline.xadd(QUEUE, {"body": body})
            await pipeline.execute()

    async def take(self, number: int) -> int:
        found = await self.connection.xreadgroup("bench", self.name, {QUEUE: ">"}, count=number)
        if not found:
            return 0
        ids = [entry[0] for entry in found[0][1]]
        await self.settle(ids)
        return len(ids)

    async def settle(self, ids: list[bytes]) -> None:
        pipeline = self.connection.pipeline(transaction=True)
        pipeline.xack(QUEUE, "bench", *ids)
        pipeline.xdel(QUEUE, *ids)
        await pipeline.execute()

    async def close(self) -> None:
        await self.connection.aclose()


class RedisStreams(LibraryPeer):
    name = "Redis streams"
    client = "redis-py, asyncio"
    session = StreamSession
    works: ClassVar = {("enqueue", 1), ("enqueue", 100), ("take", 1), ("take", 100), ("cycle", 1)}
    worker = "XREADGROUP that blocks, up to 100 at a time"

    def setup(self) -> None:
        root = HOME / "root"
        if not (root / "usr/bin/redis-server").exists():
            raise Missing("Debian's redis-server, by test/bench/fetch.py")
        self.home = tempfile.mkdtemp(prefix="bench-redis-")
        self.dsn = f"{self.home}/socket"
        libraries = f"{root}/usr/lib/x86_64-linux-gnu:{root}/lib/x86_64-linux-gnu"
        self.process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL"),  # it does not outlive this program
                *(str(root / "usr/bin/redis-server"), "--port", "0", "--unixsocket", self.dsn, "--dir", self.home),
                *("--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"LD_LIBRARY_PATH": libraries},
        )
        self.connection = redis.Redis(unix_socket_path=self.dsn)
        while True:  # until it answers
            try:
                self.version = self.connection.info()["redis_version"]
                return
            except redis.ConnectionError:
                if self.process.poll() is not None:
                    raise Missing("a redis-server that starts") from None
                time.sleep(0.02)

    def use(self, sync: str) -> None:
        self.sync = sync
        self.connection.config_set("appendfsync", "always" if sync == "on" else "everysec")

    def empty(self) -> None:
        self.connection.flushall()
        self.connection.xgroup_create(QUEUE, "bench", mkstream=True)

    def settle(self) -> None:
        pass

    def left(self) -> int:
        return int(self.connection.xlen(QUEUE))

    @staticmethod
    @asynccontextmanager
    async def working(dsn: str, handle: Handle) -> AsyncIterator[None]:
        session = await StreamSession.open(dsn)

        async def work() -> None:
            while True:
                found = await session.connection.xreadgroup("bench", "worker", {QUEUE: ">"}, count=100, block=1000)
                if found:
                    for _, fields in found[0][1]:
                        handle(number_in(fields[b"body"]))
                    await session.settle([name for name, _ in found[0][1]])

        async with until_told(work()):
            yield
        await session.close()

    def close(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.wait()
        shutil.rmtree(self.home)
