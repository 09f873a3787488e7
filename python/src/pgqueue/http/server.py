"""Runs the application under uvicorn, or an agent alone, until a signal stops it; a second signal forces the stop."""

import asyncio
import ctypes
import errno
import gc
import ipaddress
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, Literal

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .app import Application, create_app
from .databases import Databases
from .errors import ApiError, error_body
from .managed.agent import Agent
from .metrics import Metrics, Sampler
from .settings import Settings

logger = logging.getLogger("pgqueue.http")

# SIGHUP, when the terminal is closed, stops the server, too, unless nohup has made the process ignore it.
_HANGUP: Final = (signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else ()
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, *_HANGUP)
_M_MMAP_THRESHOLD: Final = -3
_BACKLOG: Final = 4096  # connections that the kernel accepts before the server does; beyond, a client waits seconds
HEADERS_LIMIT: Final = 64 * 1024  # bytes
MOST_HEADERS: Final = 500  # each takes 150 bytes of memory besides its text
_FILES: Final = 110_000  # that the process may open if the system allows it


class BoundedProtocol(HttpToolsProtocol):
    """A client connection that is closed if it sends too many bytes that are no body. uvicorn bounds them only with its
    parser in Python, which needs half as much CPU time again for each request.

    It is closed, too, after the response before which the next request began: uvicorn keeps such requests without a
    bound. By RFC 9112, section 9.3.2, a client sends them again on another connection.
    """

    _other = 0  # bytes that are no body, as far as they exceed twice the body
    _is_head = True
    _is_refused = False
    _ending: asyncio.TimerHandle

    def data_received(self, data: bytes) -> None:
        """Count and parse data."""
        if self._is_refused:
            return
        self._other += len(data)
        super().data_received(data)
        if not self._is_refused and (self._other > HEADERS_LIMIT or len(self.headers or ()) > MOST_HEADERS):
            self._refuse()

    def _refuse(self) -> None:
        """Read no further. Close the connection: after the response, if one is sent and the request is whole."""
        self._is_refused = True
        if self._is_head and self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
            return
        if self._is_head:
            text = f"request line and headers are over the limit of {HEADERS_LIMIT} bytes or {MOST_HEADERS} headers"
            body = error_body(ApiError(431, "head_too_large", text))
            head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            self.transport.write(head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        """Begin a request. Raises an error, which ends the parsing, if the previous response is not complete."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._refuse()
            raise RuntimeError("a request began before the previous response ended")
        super().on_message_begin()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, unless it is refused."""
        if not self._is_refused:
            super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        """End the count of the headers. Raises an error, which ends the parsing, if they are too large or too many."""
        is_large = self._other > HEADERS_LIMIT
        if is_large:  # A part of the body can have been read together with them.
            is_large = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > HEADERS_LIMIT
        if is_large or len(self.headers) > MOST_HEADERS:
            self._refuse()
            raise RuntimeError("the headers are too large or too many")
        self._is_head, self._other = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Do not count the body."""
        self._other = max(0, self._other - 2 * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Expect the headers of the next request."""
        self._is_head, self._other = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Free what was read of the request: the connection may stay open."""
        self.cycle.body = bytearray()
        self.url, self.headers = b"", []
        del self.scope, self.cycle.scope
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Wait for the client to read. If it does not, end the connection: `close` would wait for it without end."""
        super().pause_writing()
        self._ending = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the client has read."""
        self._ending.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, which keep the headers in memory. uvicorn lets its own run if the client has reset."""
        if self.flow.write_paused:
            self._ending.cancel()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """Ends the long polls when it is told to stop, before it waits for requests to end."""

    def __init__(self, app: Application, config: uvicorn.Config, started: Callable[[str, int], None]) -> None:
        super().__init__(config)
        self._app = app
        self._started = started

    async def startup(self, sockets: object = None) -> None:
        await super().startup(sockets)  # type: ignore[arg-type]
        for server in self.servers:
            for listening in server.sockets:
                host, port = listening.getsockname()[:2]
                self._started(host, port)
                if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
                    logger.warning("%s is reached without TLS: put a reverse proxy with TLS in front of it", host)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with _signals(self._stop):
            yield

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._app.state.context.stopping.set()


@contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def listen(host: str = "127.0.0.1", port: int = 8080) -> list[socket.socket]:
    """Listen on all addresses of a host. Raises OSError, whose text names host and port."""
    found: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in addresses:
            try:
                found.append(socket.create_server(address, family=family, backlog=_BACKLOG))
            except OSError as error:
                # A name such as localhost can have an address of a family that this machine does not use.
                if error.errno != errno.EADDRNOTAVAIL or (address == addresses[-1][4] and not found):
                    raise
    except OSError as error:
        for each in found:
            each.close()
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise OSError(f"cannot listen on {at}: {why}") from error
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
    between them, which say by `X-Forwarded-For` who the client is. The role `agent` needs no sockets.
    """
    # Any client can cause their warnings, and the parts of the server report an unreachable database themselves.
    for chatty in ("psycopg.pool", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    if role == "agent":
        uvloop.run(_run_agent(settings))
        return
    app = create_app(settings, role)
    _tune_process()
    config = uvicorn.Config(
        app,
        lifespan="on",
        backlog=_BACKLOG,
        http=BoundedProtocol,
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


def _tune_process() -> None:
    """Let the event loop run beside threads, and bound open files and the memory that stays after large bodies."""
    # Threads parse large bodies: they give the interpreter back after 1 ms. The garbage collector, which keeps it, runs
    # less often, and does not visit the code of the server.
    sys.setswitchinterval(0.001)
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    # glibc returns the memory of large bodies and of scrypt to the system. By default it keeps up to 32 MB of each
    # thread, and more if a smaller piece is in use above it.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 64 * 1024)
    # Each connection needs a file, also an idle connection of a client.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


async def _run_agent(settings: Settings) -> None:
    databases = Databases(settings)
    agent = Agent(settings, databases, Metrics(Sampler(settings, databases)))
    stopping = asyncio.Event()
    working = asyncio.create_task(agent.run(stopping))

    def stop() -> None:
        if stopping.is_set():
            working.cancel()
        stopping.set()

    with _signals(stop), suppress(asyncio.CancelledError):
        await working
    await databases.close()
