"""A view for load balancers and monitors."""

from collections.abc import Iterable
from typing import Any

from django.db import DEFAULT_DB_ALIAS, Error, transaction
from django.http import HttpRequest, JsonResponse

from ...errors import QueueNotFound
from .client import queue, queues

__all__ = ["health"]


@transaction.non_atomic_requests  # ATOMIC_REQUESTS would fail before the view is called
def health(
    _: HttpRequest, using: str = DEFAULT_DB_ALIAS, queue_names: Iterable[str] = (), max_age: float | None = None
) -> JsonResponse:
    """Answer 200 if the database answers, has pgqueue and has the queues, otherwise 503 with the error.

    With `max_age`, in seconds, the answer is also 503 if a ready message of one of the queues was sent longer ago, as
    when no worker runs. A delayed or redriven message was sent before it became ready. The arguments are given to
    `path`: `path("health/", health, {"queue_names": ["orders"]})`.
    """
    found: dict[str, Any] = {}
    problems: list[str] = []
    try:
        version = queues(using).version()
        for name in queue_names:
            stats = queue(name, using).stats()
            age = stats.oldest_age_seconds
            found[name] = {"ready": stats.ready_messages, "dead": stats.dead_messages, "oldest_age_seconds": age}
            if max_age is not None and age is not None and age > max_age:
                problems.append(f"a ready message of queue {name} was sent {age:.0f} s ago, more than {max_age:g} s")
    except Error as error:
        # Other errors can name hosts and users.
        text = str(error).partition("\n")[0] if isinstance(error, QueueNotFound) else type(error).__name__
        return JsonResponse({"status": "error", "queues": found, "errors": [text]}, status=503)
    answer = {"status": "error" if problems else "ok", "version": version, "queues": found, "errors": problems}
    return JsonResponse(answer, status=503 if problems else 200)
