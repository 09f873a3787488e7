"""For those who run the server: is it alive, is it ready, and its figures."""

import psycopg
from fastapi import APIRouter, Response
from psycopg_pool import PoolTimeout

from .context import CurrentContext, error_responses
from .errors import ApiError

__all__ = ["router"]

router = APIRouter(tags=["operations"])


@router.get("/healthz", responses={200: {"content": {"text/plain": {}}}}, response_class=Response)
async def healthz() -> Response:
    """Whether the process answers. Asks no database, and for no password."""
    return Response("ok\n", media_type="text/plain")


@router.get(
    "/readyz",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, 503: error_responses()[503]},
)
async def readyz(context: CurrentContext) -> Response:
    """Whether requests can be served: the control database answers, the agent works, and nobody told it to stop.

    Asks for no password, and says no more than that.
    """
    if context.stopping.is_set():
        raise ApiError(503, "stopping", "the server is told to stop")
    try:
        async with context.databases.control() as connection:
            await connection.execute("select 1")
    except (psycopg.Error, PoolTimeout, OSError):
        raise ApiError(503, "database_unavailable", "the control database does not answer") from None
    if context.agent is not None and not context.agent.is_running:
        raise ApiError(503, "agent_unavailable", "the agent does not work yet")
    return Response("ok\n", media_type="text/plain")


@router.get("/metrics", response_class=Response, responses=error_responses() | {200: {"content": {"text/plain": {}}}})
async def metrics(context: CurrentContext) -> Response:
    """Figures for Prometheus: depths as of the last sample, whoever asks how often."""
    return Response(context.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")
