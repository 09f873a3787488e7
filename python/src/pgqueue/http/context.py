"""What the routes share: the parts of the server, and the service and the database that a request names."""

import asyncio
import logging
import re
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from .._listener import NotificationListeners
from .databases import Databases
from .errors import ApiError, database_not_found, service_not_found
from .metrics import Metrics
from .sampling import Sampler
from .security.admission import Admission
from .security.rights import current
from .settings import Service, Settings

logger = logging.getLogger("pgqueue.http")

_NAME: Final = re.compile("[a-z0-9_-]{1,128}")


@dataclass(slots=True)
class Context:
    """The parts of a running server. `stopping` is set when it is told to stop; requests then end their wait."""

    settings: Settings
    databases: Databases
    metrics: Metrics
    sampler: Sampler
    listeners: NotificationListeners
    admission: Admission
    agent: Any = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    background_tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that outlives its request. The server waits for its end before it stops."""
        task = asyncio.create_task(_logged(work))
        self.background_tasks.add(task)
        task.add_done_callback(self.background_tasks.discard)


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception as error:  # no caller waits for it
        logger.warning("the background work of a request failed: %s", type(error).__name__)


def is_queue_name(text: str) -> bool:
    """Whether the text is a valid name of a queue."""
    return _NAME.fullmatch(text) is not None


def check_not_reserved(context: Context, name: str) -> None:
    """Raise `ApiError` 422 if a new queue would have the name of the queue of tasks, which is hidden from users."""
    if name == context.settings.tasks.queue:
        raise ApiError(422, "invalid", f"name {name} is reserved", "name", name, "any other name")


def find_service(context: Context, id: str | None) -> Service:
    """The service that a request names, by default the first that the user sees. Raises `ApiError` 404."""
    sees = current().sees
    name = next((each for each in context.settings.services if sees(each)), "") if id is None else id
    service = context.databases.service(name)
    if not sees(name):
        raise service_not_found(name)
    return service


def find_database(service: Service, name: str | None) -> str:
    """The database that a request names, by default the service's first that the user sees. Raises `ApiError` 404."""
    sees = current().sees
    there = [each for each in service.databases if sees(service.id, each)]
    if name is None:
        name = there[0] if there else ""
    if name not in there:
        raise database_not_found(name, there)
    return name
