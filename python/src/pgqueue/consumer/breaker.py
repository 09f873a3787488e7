"""A circuit breaker: counts failures of ours, never of handlers, and says how long to pause after one."""

import random
import time
from collections.abc import Callable
from typing import Literal

__all__ = ["CircuitBreaker", "CircuitState"]

CircuitState = Literal["closed", "armed", "open"]

_FIRST_PAUSE = 0.05
_ARMED_PAUSE = 1.0
_OPEN_PAUSE = 10.0


class CircuitBreaker:
    """Closed while all is well, armed by the first failure, open when no success followed for `after` seconds.

    Each kind of work fails and succeeds by itself: a peek that succeeds says nothing about claims that fail. The
    breaker is closed when no kind fails any more. `on_change` is told each new state, once.
    """

    def __init__(
        self,
        after: float,
        on_change: Callable[[CircuitState], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.after = after
        self.state: CircuitState = "closed"
        self._on_change = on_change
        self._clock = clock
        self._chance = chance
        self._since: dict[str, float] = {}
        self._failures: dict[str, int] = {}

    def failed(self, kind: str = "") -> float:
        """Count a failure; returns the seconds to pause before the next try.

        The pause doubles from 0.05 s to 1 s, and is 10 s while open; all of them vary by a quarter, so that many
        consumers of a database that comes back do not come back at once.
        """
        self._since.setdefault(kind, self._clock())
        self._failures[kind] = failures = self._failures.get(kind, 0) + 1
        if self.state == "closed":
            self._become("armed")
        self.look()
        longest = (
            _OPEN_PAUSE if self.state == "open" else min(_ARMED_PAUSE, _FIRST_PAUSE * 2.0 ** min(failures - 1, 10))
        )
        return longest * (0.75 + self._chance() / 2)

    def succeeded(self, kind: str = "") -> None:
        """Count a success: this kind of work is well again."""
        if self._since.pop(kind, None) is not None:
            del self._failures[kind]
            if not self._since and self.state != "closed":
                self._become("closed")

    def look(self) -> None:
        """Open if it has been armed for long enough; for a timer, as failures may take long to come."""
        if self.state == "armed" and self._clock() - min(self._since.values()) >= self.after:
            self._become("open")

    def _become(self, state: CircuitState) -> None:
        self.state = state
        self._on_change(state)
