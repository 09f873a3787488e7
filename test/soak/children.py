"""A process of a soak as its parent sees it."""

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from .actors import TASKS_END


class Child:
    """A producer or consumer process."""

    def __init__(self, role: str, settings: dict[str, Any], log: Path) -> None:
        self.role, self.log, self.history = role, log, Path(settings["history"]).stem
        self._begun = Path(settings["history"])
        self.killed = False
        self.told_at: float | None = None  # when stop was sent
        self.paused_until: float | None = None
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, Path(__file__).parent, role, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def is_up(self) -> bool:
        return self.process.poll() is None

    def has_begun(self) -> bool:
        """Whether it has started and reads commands."""
        return self._begun.exists()

    def kill(self) -> None:
        self.killed = True
        self.process.kill()

    def pause(self, seconds: float) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.paused_until = time.monotonic() + seconds

    def resume(self) -> None:
        self.paused_until = None
        if self.is_up():
            self.process.send_signal(signal.SIGCONT)
        if self.told_at is not None:
            self.told_at = time.monotonic()

    def tell(self, order: str) -> None:
        self.told_at = time.monotonic()
        self._say(order)

    def explain(self) -> str:
        """Let the process print its threads and tasks; returns the output."""
        before = self.log.stat().st_size
        self.process.send_signal(signal.SIGUSR1)
        self._say("tasks")
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and self.is_up():
            if TASKS_END in (said := self.log.read_bytes()[before:].decode(errors="replace")):
                return said
            time.sleep(0.02)
        return self.log.read_bytes()[before:].decode(errors="replace") + "\n(incomplete)"

    def _say(self, order: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{order}\n".encode())
            self.process.stdin.flush()

    def close(self) -> None:
        """Kill the process if it has not ended, and close its pipe."""
        if self.is_up():
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
