"""A message of kombu as one of pgqueue: the body as it is, everything else in the headers."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

from kombu.utils.json import dumps

from ...consumer.policy import clean
from ...message import Message
from .options import Options

__all__ = ["sent", "to_kombu"]

_SHOWN_CHARACTERS: Final = 8192


def sent(message: Mapping[str, Any], priority: int, options: Options) -> dict[str, Any]:
    """The arguments of `enqueue` and `publish` for a message of kombu."""
    body, properties, headers = message["body"], dict(message["properties"]), dict(message.get("headers") or {})
    for name in ("argsrepr", "kwargsrepr"):  # what people see of the arguments
        if isinstance(headers.get(name), str):
            headers[name] = clean(headers[name], _SHOWN_CHARACTERS)
    for name in ("body_encoding", "delivery_tag"):
        properties.pop(name, None)
    stored = {
        "content-type": message.get("content-type"),
        "content-encoding": message.get("content-encoding"),
        "headers": headers,
        "properties": properties,
    }
    is_task = "task" in headers
    expiration = properties.get("expiration")
    # A task that has expired must reach a worker, which stores the result REVOKED.
    expires_in = None if is_task or expiration is None else timedelta(milliseconds=int(expiration))
    return {
        "body": body if isinstance(body, bytes) else body.encode(),
        "headers": stored,
        "delay": _delay(headers, options) if is_task else None,
        "expires_in": expires_in,
        "message_id": _message_id(headers.get("id") or properties.get("correlation_id")),
        "priority": priority or None,
    }


def _delay(headers: Mapping[str, Any], options: Options) -> timedelta | None:
    """The time until the ETA of a task, unless it is short, or unknown because it has no time zone."""
    eta = headers.get("eta")
    if options.native_delay is None or not eta:
        return None
    try:
        at = eta if isinstance(eta, datetime) else datetime.fromisoformat(eta)
    except (TypeError, ValueError):
        return None  # The worker rejects it, and stores the error as the result.
    if at.tzinfo is None:
        return None
    delay = at - datetime.now(UTC)
    return delay if delay.total_seconds() > options.native_delay else None


def _message_id(value: Any) -> UUID | None:
    try:
        return UUID(value)
    except (AttributeError, TypeError, ValueError):
        return None


def to_kombu(message: Message, tag: str) -> dict[str, Any]:
    """The message for kombu. A message that SQL has sent needs only the name of the task in its headers,
    `{"headers": {"task": …}}`; its payload is the arguments.

    Raises `TypeError` or `ValueError` if Celery cannot read it.
    """
    stored = message.headers if isinstance(message.headers, dict) else {}
    headers, properties = dict(stored.get("headers") or {}), dict(stored.get("properties") or {})
    if "task" in headers:
        payload: Any = message.payload
        is_hybrid = isinstance(payload, dict) and "args" in payload  # as of Celery 3
        if message.body is None and not is_hybrid and not (isinstance(payload, list) and len(payload) == 3):
            raise ValueError("its payload is not [arguments, keyword arguments, embedding]")
        task_id = headers.setdefault("id", str(message.message_id or uuid4()))
        properties.setdefault("correlation_id", task_id)
    properties["delivery_tag"] = tag
    info = properties["delivery_info"] = dict(properties.get("delivery_info") or {})
    info.setdefault("exchange", "")
    info.setdefault("routing_key", message.queue_name)
    info["redelivered"] = message.attempt_count > 1
    return {
        "body": dumps(message.payload).encode() if message.body is None else bytes(message.body),
        "content-type": stored.get("content-type") or "application/json",
        "content-encoding": stored.get("content-encoding") or "utf-8",
        "headers": headers,
        "properties": properties,
    }
