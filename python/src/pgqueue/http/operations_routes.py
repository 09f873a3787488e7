"""Routes for operators: liveness, readiness and metrics."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from .context import CurrentContext, error_responses
from .errors import ApiError
from .page_rendering import TEMPLATES

__all__ = ["router"]

router = APIRouter(tags=["operations"])


@router.get("/healthz", responses={200: {"content": {"text/plain": {}}}}, response_class=Response)
async def healthz() -> Response:
    """Whether the process answers. It asks no database and needs no password."""
    return Response("ok\n", media_type="text/plain")


@router.get(
    "/readyz",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, 503: error_responses()[503]},
)
async def readyz(context: CurrentContext) -> Response:
    """Whether requests can be served: the control database answers, the agent runs, and the server is not stopping.

    It needs no password, and tells no details. The database is asked at most once a second.
    """
    if context.stopping.is_set():
        raise ApiError(503, "stopping", "the server is stopping")
    if not await context.readiness.reaches_control_database():
        raise ApiError(503, "database_unavailable", "the control database does not answer")
    if context.agent is not None and not context.agent.is_running:
        raise ApiError(503, "agent_unavailable", "the agent is not running")
    return Response("ok\n", media_type="text/plain")


@router.get("/metrics", response_class=Response, responses=error_responses() | {200: {"content": {"text/plain": {}}}})
async def metrics(context: CurrentContext) -> Response:
    """Metrics for Prometheus. The depths are those of the last sample, so a scrape costs the databases nothing."""
    return Response(context.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """The OpenAPI document as a page. It loads nothing from another host."""
    state = request.app.state
    if not hasattr(state, "docs"):
        state.docs = TEMPLATES.get_template("docs.html").render({"up": "", "document": request.app.openapi()})
    return HTMLResponse(state.docs)
