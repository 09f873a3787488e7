"""The transport options: `broker_transport_options` of Celery, `transport_options` of kombu."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import Any, Final

__all__ = ["Options"]

_logger = logging.getLogger("pgqueue.contrib.celery")
# What kombu itself reads.
_OF_KOMBU: Final = (
    "callback",
    "connect_retries_timeout",
    "errback",
    "interval_max",
    "interval_start",
    "interval_step",
    "max_retries",
)
_DAY: Final = 86400.0
_logged: set[str] = set()


@dataclass(frozen=True, slots=True)
class Options:
    """The options and their defaults. Times are in seconds."""

    visibility_timeout: float = 30.0
    queue_name_prefix: str = ""
    create_queues: bool = True
    max_attempts: int = 0
    native_delay: float | None = 60.0
    polling_interval: float = 1.0

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Options":
        """The options of a connection. Raises `ValueError` for one that is unknown or out of range."""
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names and name not in _OF_KOMBU:
                known = ", ".join(sorted([*names, *_OF_KOMBU]))
                raise ValueError(f"unknown transport option of pgqueue: {name!r}; must be one of {known}")
        options = cls(**{name: given[name] for name in names if name in given})
        options._check_number("visibility_timeout", 1, 12 * 3600)
        options._check_number("polling_interval", 0.01, 3600)
        options._check_number("max_attempts", 0, 100)
        if options.native_delay is not None:
            options._check_number("native_delay", 0, 3650 * _DAY)
        if not isinstance(options.create_queues, bool):
            raise ValueError(f"invalid create_queues: {options.create_queues!r}; must be true or false")
        if not isinstance(options.queue_name_prefix, str) or not set(options.queue_name_prefix) <= set(_PREFIX):
            raise ValueError(
                f"invalid queue_name_prefix: {options.queue_name_prefix!r}; must consist of a-z, 0-9, -, _"
            )
        return options

    def _check_number(self, name: str, least: float, most: float) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ValueError(f"invalid {name}: {value!r}; must be a number from {least:g} to {most:g}")

    def log_once(self) -> None:
        """Log the options, unless this process has logged the same before."""
        text = ", ".join([f"{name}={value!r}" for name, value in asdict(self).items()])
        if text not in _logged:
            _logged.add(text)
            _logger.info("transport options of pgqueue: %s", text)

    @property
    def visibility(self) -> timedelta:
        """The visibility timeout."""
        return timedelta(seconds=self.visibility_timeout)


_PREFIX: Final = "abcdefghijklmnopqrstuvwxyz0123456789-_"
