"""What SIGINT and SIGTERM do to consumers."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["stop_signals"]


class StopSignals:
    """What SIGINT and SIGTERM do to the consumers that run in the main thread.

    The first signal asks them to stop. The second forces them, and raises `SystemExit` when they have ended. The third
    ends the process. The status is 128 + the number of the last signal.
    """

    def __init__(self) -> None:
        self._stops: list[Callable[[], None]] = []  # several consumers can run on one event loop
        self._received = 0
        self._last = 0
        self._replaced: dict[int, Any] = {}
        self._forking = threading.local()
        # A signal for a new process waits until the process has the handlers that the program had.
        os.register_at_fork(before=self._hold, after_in_parent=self._release, after_in_child=self._put_back_in_child)

    @contextmanager
    def call(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call `stop` for each signal. In another thread, and for a signal with a handler of the program, do nothing.

        The last of several users puts the former handlers back.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if not self._stops:
            self._received = 0
            found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            self._replaced = {number: handler for number, handler in found.items() if _is_default(handler)}
            for number in self._replaced:
                signal.signal(number, self._handle)
        self._stops.append(stop)
        try:
            yield
        finally:
            self._stops.remove(stop)
            if not self._stops:
                for number, handler in self._replaced.items():
                    signal.signal(number, handler)
        if not self._stops and self._received > 1:
            raise SystemExit(128 + self._last)

    def _hold(self) -> None:
        if self._stops:
            self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._replaced)

    def _release(self) -> None:
        mask = self._forking.__dict__.pop("mask", None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _put_back_in_child(self) -> None:
        """The consumers run in the parent. Where asyncio has handled a signal, there is no loop that it could stop."""
        if self._stops:
            self._stops.clear()
            for number, handler in self._replaced.items():
                by_asyncio = handler not in (signal.SIG_DFL, signal.default_int_handler)
                signal.signal(number, signal.default_int_handler if by_asyncio else handler)
        self._release()

    def _handle(self, number: int, _: object) -> None:
        self._received += 1
        self._last = number
        for stop in list(self._stops):
            stop()
        if self._received > 2:
            os._exit(128 + number)


def _is_default(handler: Any) -> bool:
    """Whether a handler of a signal was set by Python, or by asyncio in `Runner.run`, and not by the program."""
    made_by = getattr(getattr(handler, "func", None), "__self__", None)
    return handler in (signal.SIG_DFL, signal.default_int_handler) or isinstance(made_by, asyncio.Runner)


stop_signals = StopSignals()
