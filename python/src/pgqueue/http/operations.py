"""Routes for operators: liveness, readiness and metrics."""

from typing import Final

from starlette.responses import PlainTextResponse

from .calls import Call, Operation, Routes
from .errors import ApiError
from .security.rights import NOTHING, Need

ROUTES: Final = Routes()


@ROUTES.add("GET", "/healthz", NOTHING, Operation("operations"))
async def healthz(_call: Call) -> PlainTextResponse:
    """Whether the process answers. It asks no database and needs no password."""
    return PlainTextResponse("ok\n")


@ROUTES.add("GET", "/readyz", NOTHING, Operation("operations", errors=(503,)))
async def readyz(call: Call) -> PlainTextResponse:
    """Whether requests can be served: the control database answers, the agent runs, and the server is not stopping.

    It needs no password, and tells no details. The database is asked at most once a second.
    """
    context = call.context
    if context.stopping.is_set():
        raise ApiError(503, "stopping", "the server is stopping")
    if not await context.databases.reach_control():
        raise ApiError(503, "database_unavailable", "the control database does not answer")
    if context.agent is not None and not context.agent.is_running:
        raise ApiError(503, "agent_unavailable", "the agent is not running")
    return PlainTextResponse("ok\n")


@ROUTES.add("GET", "/metrics", Need(("admin", "reader"), "all"), Operation("operations"))
async def metrics(call: Call) -> PlainTextResponse:
    """Metrics for Prometheus. The depths are those of the last sample, so a scrape costs the databases nothing."""
    return PlainTextResponse(call.context.metrics.exposition(), media_type="text/plain; version=0.0.4")
