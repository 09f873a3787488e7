"""Calls of verbs by the operations of migrations, for Alembic and Django."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from .._calls import Bound, Call

__all__ = ["bound_to_queue", "check_settings"]


def check_settings(verb: Call[Any], settings: Mapping[str, Any]) -> None:
    """Raise `TypeError` for a setting that the function does not have."""
    known = list(verb.arguments)[1:]
    for name in settings:
        if name not in known:
            raise TypeError(f"invalid setting {name!r} of {verb.function}; must be one of {', '.join(known) or 'none'}")


def bound_to_queue(verb: Call[Any], queue_name: str, settings: Mapping[str, Any]) -> Bound[Any]:
    """The call with these settings. A duration is a timedelta, or a text that SQL reads, such as `5 min`."""
    texts = {
        name: value for name, value in settings.items() if verb.arguments[name] == "interval" and isinstance(value, str)
    }
    stated: dict[str, Any] = {**settings, **dict.fromkeys(texts, timedelta(0))}
    call = verb(queue_name, *(stated.get(name) for name in list(verb.arguments)[1:]))
    return call._replace(values=[texts.get(name, value) for name, value in zip(call.names, call.values, strict=True)])
