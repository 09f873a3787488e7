"""Runs the application under uvicorn, or an agent alone, until a signal stops it; a second signal forces the stop."""

import asyncio
import ctypes
import errno
import gc
import ipaddress
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Literal

import uvicorn
import uvloop
from fastapi import FastAPI
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from .agent import Agent
from .app import create_app
from .client_connections import ClientConnections
from .databases import Databases
from .metrics import Metrics
from .protocol import LimitedHttpProtocol
from .sampling import Sampler
from .settings import Settings

__all__ = ["listen", "serve"]

logger = logging.getLogger("pgqueue.http")

# SIGHUP, when the terminal is closed, stops the server, too, unless nohup has made the process ignore it.
_HANGUP: Final = (signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else ()
_M_MMAP_THRESHOLD: Final = -3
_BACKLOG: Final = 4096  # connections that the kernel accepts before the server does; beyond, a client waits seconds
_ACCEPT_SECONDS: Final = 0.02  # in a turn of the event loop
_OTHER_FILES: Final = 100  # of the process, besides connections
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, *_HANGUP)


class _Server(uvicorn.Server):
    """Ends the long polls when it is told to stop, before it waits for requests to end."""

    def __init__(self, app: FastAPI, config: uvicorn.Config, started: Callable[[str, int], None]) -> None:
        super().__init__(config)
        self._app = app
        self._started = started
        self._listening: list[socket.socket] = []
        self._connecting: set[asyncio.Task[Any]] = set()

    async def startup(self, sockets: object = None) -> None:
        await super().startup(sockets)  # type: ignore[arg-type]
        for server in self.servers:
            for listening in server.sockets:
                host, port = listening.getsockname()[:2]
                self._started(host, port)
                if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
                    logger.warning("%s is reached without TLS: put a reverse proxy with TLS in front of it", host)
        self._accept_more()

    def _accept_more(self) -> None:
        """Accept connections also by duplicates of the descriptors.

        libuv accepts one connection for each descriptor in a turn of the event loop. So a client would wait for as many
        turns as there are connections before its own, and the turns of a busy server are long.
        """
        given = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        protocol: Callable[[], asyncio.Protocol] = partial(self.config.http_protocol_class, **given)
        for listening in [each.dup() for server in self.servers for each in server.sockets]:
            listening.setblocking(False)
            self._listening.append(listening)
            asyncio.get_running_loop().add_reader(listening, self._accept, listening, protocol)

    def _accept(self, listening: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Accept connections for some milliseconds. Those that their clients have left get no transport."""
        loop = asyncio.get_running_loop()
        until = time.monotonic() + _ACCEPT_SECONDS
        while time.monotonic() < until:
            try:
                accepted, _ = listening.accept()
            except OSError:  # none waits, its client has left it, or the process may open no more files
                return
            accepted.setblocking(False)
            if _is_left(accepted):
                accepted.close()
            else:
                connecting = loop.create_task(loop.connect_accepted_socket(protocol, accepted))
                self._connecting.add(connecting)
                connecting.add_done_callback(self._connecting.discard)

    async def shutdown(self, sockets: object = None) -> None:
        for listening in self._listening:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        await super().shutdown(sockets)  # type: ignore[arg-type]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._app.state.context.stopping.set()


def listen(host: str = "127.0.0.1", port: int = 8080) -> list[socket.socket]:
    """Listen on all addresses of a host. Raises OSError, whose text names host and port."""
    found: list[socket.socket] = []
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        addresses = dict.fromkeys(socket.getaddrinfo(host or None, port, 0, socket.SOCK_STREAM, 0, socket.AI_PASSIVE))
        for place, (family, kind, protocol, _, address) in enumerate(addresses):
            listening = socket.socket(family, kind, protocol)
            found.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                listening.bind(address)
            except OSError as error:
                # A name such as localhost can have an address of a family that this machine does not use.
                if error.errno != errno.EADDRNOTAVAIL or (place == len(addresses) - 1 and len(found) == 1):
                    raise
                found.pop().close()
            else:
                listening.listen(_BACKLOG)
    except OSError as error:
        for each in found:
            each.close()
        raise OSError(f"cannot listen on {at}: {error.strerror or error}") from error
    return found


def serve(
    settings: Settings,
    role: Literal["all", "controller", "agent"] = "all",
    sockets: Sequence[socket.socket] = (),
    grace_seconds: int = 25,
    started: Callable[[str, int], None] = lambda _host, _port: None,
    forwarded_allow_ips: str = "",
) -> None:
    """Serve on the sockets of `listen` until a signal, and close them; `started` is called with host and port of each.

    Running requests get `grace_seconds` to end. `forwarded_allow_ips` are the addresses of reverse proxies, with commas
    between them. The address of a client is then that in their header `X-Forwarded-For`. The role `agent` needs no
    sockets.
    """
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    for chatty in ("psycopg.pool", "uvicorn.error"):
        logging.getLogger(chatty).addFilter(_repeat_filter())
    if role == "agent":
        uvloop.run(_run_agent(settings))
        return
    app = create_app(settings, role)
    # Threads parse large bodies. For the sake of the event loop, they give the interpreter back after 1 ms. The garbage
    # collector, which keeps it, runs less often, and does not visit the code of the server.
    sys.setswitchinterval(0.001)
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    _return_large_memory()
    # The addresses may be networks or *, which this middleware parses.
    proxies = ProxyHeadersMiddleware(app, forwarded_allow_ips).trusted_hosts  # type: ignore[arg-type]
    clients = ClientConnections(_most_client_connections(settings), proxies.__contains__)
    config = uvicorn.Config(
        app,
        lifespan="on",
        backlog=_BACKLOG,
        http=partial(LimitedHttpProtocol, clients=clients),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(forwarded_allow_ips),
        forwarded_allow_ips=forwarded_allow_ips or None,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=grace_seconds,
    )
    uvloop.run(_Server(app, config, started).serve([*sockets]))


def _is_left(connection: socket.socket) -> bool:
    """Whether the client of a new connection has closed it, and has sent nothing."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _most_client_connections(settings: Settings) -> int:
    """How many connections from clients the server accepts. The system may allow fewer than the settings."""
    most = settings.limits.client_connections
    databases = 1 + sum(len(each.databases) for each in settings.services.values())
    # A connection to a database listens, and those of agents are not in a pool.
    others = databases * (settings.limits.connections + 2) + settings.tasks.concurrency + _BACKLOG + _OTHER_FILES
    files = most + others
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < files:
        files, most = hard, min(most, hard // 2)
        logger.warning("the system allows %d open files: the server accepts %d connections", hard, most)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return most


def _return_large_memory() -> None:
    """Have glibc return the memory of large bodies and of scrypt to the system. By default it keeps up to 32 MB of each
    thread, and more if a smaller piece is in use above it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 64 * 1024)


def _repeat_filter() -> Callable[[logging.LogRecord], bool]:
    """A filter that passes a repeated warning once a minute, such as those of a pool whose database is down."""
    last_logged_at: dict[object, float] = {}

    def filter_(record: logging.LogRecord) -> bool:
        subject = record.args[0] if isinstance(record.args, tuple) and record.args else record.msg
        if record.levelno < logging.ERROR and record.created - last_logged_at.get(subject, 0.0) < 60:
            return False
        last_logged_at[subject] = record.created
        return True

    return filter_


async def _run_agent(settings: Settings) -> None:
    databases = Databases(settings)
    agent = Agent(settings, databases, Metrics(Sampler(settings, databases)))
    stopping = asyncio.Event()
    working = asyncio.create_task(agent.run(stopping))

    def stop() -> None:
        if stopping.is_set():
            working.cancel()
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        await working
    except asyncio.CancelledError:
        pass
    finally:
        await databases.close()
