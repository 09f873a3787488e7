"""The page that shows what `doctor` finds in every database."""

import asyncio
from collections import defaultdict
from typing import Final

import psycopg
from psycopg_pool import PoolTimeout
from starlette.responses import Response

from ...client import AsyncQueues
from ...message import Finding
from ..calls import Call, Context, Routes
from ..errors import NO_SCHEMA, from_database_error
from ..metrics import Place
from ..security.rights import ALL, Need, current, forbidden
from .rendering import render

ROUTES: Final = Routes()

_SEVERITIES: Final = {"error": 0, "warning": 1, "info": 2}
_MAX_FINDINGS: Final = 50  # of a kind on the page


@ROUTES.page("GET", "/health", Need(("admin",), "some"))
async def health(call: Call) -> Response:
    """The page with the findings of `doctor` in every database that the user may administer, the worst first."""
    may, context = current().may, call.context
    places = [
        (each.id, name)
        for each in context.settings.services.values()
        for name in each.databases
        if may(("admin",), each.id, name, ALL)
    ]
    if not places:
        raise forbidden(("admin",), "all queues of a database")
    checked = await asyncio.gather(*(_check(context, *place) for place in places))
    # One finding, also of many queues: they are named together.
    cards: dict[tuple[str, str], list[tuple[Place, Finding]]] = defaultdict(list)
    for found, _ in checked:
        for place, finding in found:
            cards[finding.severity, finding.finding].append((place, finding))
    return render(
        "health.html",
        call.scope,
        cards=sorted(cards.items(), key=lambda card: _SEVERITIES.get(card[0][0], len(_SEVERITIES))),
        most=_MAX_FINDINGS,
        failing=[failure for _, failure in checked if failure is not None],
    )


async def _check(context: Context, service: str, database: str) -> tuple[list[tuple[Place, Finding]], Place | None]:
    """The findings in one database; or the service, the database, and why it could not be checked."""
    try:
        async with context.databases.target(service, database, is_slow=True) as connection:
            found = await AsyncQueues(connection).doctor()
            return [((service, database, each.queue_name or ""), each) for each in found], None
    except NO_SCHEMA:
        return [], None  # pgqueue is not installed there yet
    except psycopg.errors.InsufficientPrivilege:
        return [], (service, database, "the role of the service may not call pgqueue.doctor()")
    except (psycopg.Error, PoolTimeout, OSError) as error:
        return [], (service, database, from_database_error(error).message)
