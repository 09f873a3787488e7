"""The pages that inspect: what `doctor` finds in every database, and the consumers of a queue."""

import asyncio
from collections import defaultdict
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import dict_row
from psycopg_pool import PoolTimeout
from starlette.responses import Response

from ...client import AsyncQueues
from ...message import Finding
from ..calls import Call
from ..context import Context
from ..errors import from_database_error
from ..sampling import Place
from ..security.rights import ALL, READER, Need, current, forbidden
from ..settings import Service
from .rendering import render
from .requests import Pages, open_queue, place_of
from .search import LOOK_LIMIT

__all__ = ["ROUTES"]

pages = Pages()
ROUTES: Final = pages.routes

_SEVERITIES: Final = {"error": 0, "warning": 1, "info": 2}
_MAX_FINDINGS: Final = 50  # of a kind on the page
# Only the index scan has the same cost on a deep queue.
_CLAIMS: Final = f"""
set local enable_seqscan = off;
set local enable_bitmapscan = off;
select
    c.claimed_by, count(*) as messages, min(c.claimed_at) as since, max(c.claimed_at) as last_claimed_at,
    min(c.visible_at) as ends_at
from (
    select m.claimed_by, m.claimed_at, m.visible_at, m.attempt_count
    from pgqueue.messages m where m.queue_name = {{name}} order by m.id limit {LOOK_LIMIT}
) c
where c.visible_at > now() and c.attempt_count > 0
group by c.claimed_by
order by 2 desc, 1 limit 100
"""  # noqa: S608 - the name is quoted when it is put in
# A consumer of the Python package names its sessions after the queue.
_SESSIONS: Final = """
select
    a.application_name, coalesce(host(a.client_addr), 'local') as address, a.usename as role, count(*) as sessions,
    min(a.backend_start) as since, max(a.state_change) as last_active_at
from pg_stat_activity a
where a.datname = current_database() and a.application_name = left('pgqueue ' || %(name)s, 63)
group by 1, 2, 3
order by 6 desc nulls last, 1 limit 100
"""


@pages.get("/health", Need(("admin",), "some"))
async def health(call: Call) -> Response:
    """The page with the findings of `doctor` in every database that the user may administer, the worst first."""
    may, context = current().may, call.context
    places = [
        (each, name)
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


async def _check(
    context: Context, service: Service, database: str
) -> tuple[list[tuple[Place, Finding]], tuple[str, str, str] | None]:
    """The findings in one database, and why it could not be checked."""
    try:
        async with context.databases.target(service, database, is_slow=True) as connection:
            found = await AsyncQueues(connection).doctor()
            return [((service.id, database, each.queue_name or ""), each) for each in found], None
    except (psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedFunction):
        return [], None  # pgqueue is not installed there yet
    except psycopg.errors.InsufficientPrivilege:
        return [], (service.id, database, "the role of the service may not call pgqueue.doctor()")
    except (psycopg.Error, PoolTimeout, OSError) as error:
        return [], (service.id, database, from_database_error(error).message)


@pages.get("/queue/consumers", READER)
async def consumers(call: Call) -> Response:
    """The page with the consumers and the streams of a queue."""
    place = place_of(call)
    async with open_queue(call.context, place, is_slow=True) as queue:
        settings = await queue.get_queue()
        streams = await queue.list_streams()
        claims = await _claims(queue.connection, queue.name)
        sessions, sees_all = await _sessions(queue.connection, queue.name)
    return render(
        "consumers.html",
        call.scope,
        place=place,
        settings=settings,
        streams=streams,
        claims=claims,
        sessions=sessions,
        sees_all=sees_all,
        look_limit=LOOK_LIMIT,
    )


async def _claims(connection: AsyncConnection[Any], name: str) -> list[dict[str, Any]] | None:
    """The consumers that hold messages; None if the role may not read the tables."""
    statements = psycopg.sql.SQL(_CLAIMS).format(name=name)
    try:
        cursor = connection.cursor(row_factory=dict_row)
        async with connection.transaction():
            await cursor.execute(statements)
    except psycopg.errors.InsufficientPrivilege:
        return None
    while cursor.nextset():
        pass
    return await cursor.fetchall()


async def _sessions(connection: AsyncConnection[Any], name: str) -> tuple[list[dict[str, Any]], bool]:
    """The sessions of consumers, and whether the role sees those of other roles."""
    cursor = connection.cursor(row_factory=dict_row)
    sessions = await (await cursor.execute(_SESSIONS, {"name": name})).fetchall()
    seeing = await connection.execute("select pg_has_role('pg_read_all_stats', 'usage')")
    (sees_all,) = await seeing.fetchone() or (False,)
    return sessions, sees_all
