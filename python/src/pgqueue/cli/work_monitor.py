"""The monitor of `work`: the live status line, the check whether the queue is empty, and the summary at the end."""

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg
from rich.live import Live
from rich.text import Text

from .._connections import connect
from ..client import Queue
from ..errors import QueueNotFound
from ..message import QueueStats
from .formatting import counted, format_duration
from .session import Session

if TYPE_CHECKING:
    from ..consumer import AsyncConsumer, Consumer

__all__ = ["WorkMonitor"]

_TICK_SECONDS: Final = 0.1
_LOOK_SECONDS: Final = 0.5  # between looks at the queue
_RATE_SECONDS: Final = 5.0  # over which the rate is computed
_SECONDS_UNTIL_DUE: Final = "select date_part('epoch', pgqueue.next_due_at(queue_name => %s::text) - clock_timestamp())"


class WorkMonitor:
    """Watches a consumer and its queues, from a thread and with a connection of its own."""

    def __init__(
        self,
        session: Session,
        conninfo: str,
        queue_names: list[str],
        consumer: "Consumer | AsyncConsumer",
        look_ahead: timedelta | None,
    ) -> None:
        """Prepare a monitor. With `look_ahead` it stops the consumer when the queues are empty, also of messages due by
        then.
        """
        self.signals = 0
        self._session = session
        self._conninfo = conninfo
        self._queue_names = queue_names
        self._consumer = consumer
        self._look_ahead = look_ahead
        self._is_live = session.err.is_interactive and not session.quiet
        self._stopped = threading.Event()
        self._connection: psycopg.Connection[Any] | None = None
        self._depths: list[QueueStats] = []
        self._done: deque[tuple[float, int]] = deque()

    @contextmanager
    def __call__(self, stop: Callable[[], object]) -> Iterator[None]:
        """Watch while the consumer runs; `stop` ends the consumer. Then print a summary."""
        started = time.monotonic()
        thread = threading.Thread(target=self._watch, args=(stop,), name="pgqueue-watch", daemon=True)
        live = Live(
            get_renderable=self._status_line,
            console=self._session.err,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        with live if self._is_live else nullcontext():
            thread.start()
            try:
                yield
            finally:
                self._stopped.set()
                thread.join(2)  # bounded, because a database that does not answer can block the thread
        self._print_summary(timedelta(seconds=time.monotonic() - started))

    def _watch(self, stop: Callable[[], object]) -> None:
        is_stop_announced = False
        empty = 0
        looked_at = 0.0
        while not self._stopped.wait(_TICK_SECONDS):
            if self.signals and not is_stop_announced:
                is_stop_announced = True
                running = self._consumer.stats.running
                self._session.note(f"stopping, with {running} still running; a second signal aborts them")
            checks_empty = self._look_ahead is not None and self._is_idle()
            empty = empty if checks_empty else 0
            pause = _LOOK_SECONDS if self._is_live or checks_empty else math.inf
            if time.monotonic() - looked_at < (_TICK_SECONDS if empty else pause):
                continue
            looked_at = time.monotonic()
            try:
                is_empty = self._is_drained() and checks_empty
            except psycopg.Error:
                self._close_connection()
                is_empty = False
            empty = empty + 1 if is_empty else 0
            if empty == 2:  # twice, because a look can miss a message that changes its state during it
                stop()
        self._close_connection()

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()

    def _is_idle(self) -> bool:
        stats = self._consumer.stats
        return not (stats.running or stats.prefetched)

    def _is_drained(self) -> bool:
        """Read the depths. Returns whether no message is left, or all that are left are due after `look_ahead`.

        A paused queue is drained when no message is in flight.
        """
        if self._connection is None:
            self._connection = connect(self._conninfo)
        depths, is_drained = [], True
        for name in self._queue_names:
            with suppress(QueueNotFound):  # it was dropped
                queue = Queue(self._connection, name)
                depths.append(queue.stats())
                is_drained = self._is_queue_drained(queue, depths[-1]) and is_drained
        self._depths = depths or self._depths
        return is_drained

    def _is_queue_drained(self, queue: Queue, depth: QueueStats) -> bool:
        if self._look_ahead is None or depth.inflight_messages:
            return False
        if depth.paused:
            return True
        if depth.ready_messages or queue.peek(1):
            return False
        # Only the server's clock is used, because the client's clock may differ.
        [(seconds,)] = queue.connection.execute(_SECONDS_UNTIL_DUE, [queue.name]).fetchall()
        return seconds is None or seconds > self._look_ahead.total_seconds()

    def _status_line(self) -> Text:
        stats, depths, now = self._consumer.stats, self._depths, time.monotonic()
        done = stats.succeeded
        self._done.append((now, done))
        while now - self._done[0][0] > _RATE_SECONDS:
            self._done.popleft()
        since, before = self._done[0]
        rate = (done - before) / (now - since) if now > since else 0.0
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(", ".join(self._queue_names), style="bold")
        if stats.circuit != "closed":
            line.append("  database unavailable", style="bold red")
        elif self.signals:
            line.append("  stopping", style="bold yellow")
        line.append(f"  {rate:,.0f}/s", style="green")
        if depths:
            for name in ("ready", "in flight", "dead"):
                column = f"{name.replace(' ', '')}_messages"
                estimated = "~" if any(column in depth.estimates for depth in depths) else ""
                line.append(f"  {name} {estimated}{sum(getattr(depth, column) for depth in depths):,}")
        line.append(f"  running {stats.running}  done {done:,}")
        for what, figure in (("failed", stats.failed), ("hang", stats.overdue + stats.abandoned)):
            if figure:
                line.append(f"  {what} {figure:,}", style="red")
        return line

    def _print_summary(self, took: timedelta) -> None:
        stats = self._consumer.stats
        if self._session.json:
            first, *also = self._queue_names
            self._session.lines([{"queue_name": first, "also": also} | asdict(stats)])
        else:
            summary = counted(stats.succeeded, "message done", "messages done")
            for what, figure in (("failed", stats.failed), ("dead", stats.dead), ("lost", stats.lost)):
                summary += f", {figure:,} {what}" if figure else ""
            how = "by force " if self.signals > 1 else ""
            self._session.note(f"stopped {how}after {format_duration(took)}: {summary}")
        for depth in self._depths if self._look_ahead is not None else ():
            ready = f"{depth.ready_messages:,} ready, as the queue is paused" if depth.paused else ""
            scheduled = f"{depth.scheduled_messages:,} scheduled" if depth.scheduled_messages else ""
            if left := ", ".join(filter(None, (scheduled, ready))):
                name = f"queue {depth.queue_name}: " if len(self._queue_names) > 1 else ""
                self._session.note(f"left for later: {name}{left}")
