"""Routes for operators: liveness, readiness, metrics, and the description of the routes."""

import asyncio

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

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


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """The OpenAPI document."""
    document, _ = await _documents(request.app)
    return Response(document, media_type="application/json")


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """The OpenAPI document as a page. It loads nothing from another host."""
    _, page = await _documents(request.app)
    return HTMLResponse(page)


async def _documents(app: FastAPI) -> tuple[bytes, str]:
    """The OpenAPI document and its page. A thread generates them once, because this takes half a second."""

    def generate() -> tuple[bytes, str]:
        document = app.openapi()
        page = TEMPLATES.get_template("docs.html").render({"up": "", "document": document})
        return bytes(JSONResponse(document).body), page

    if not hasattr(app.state, "documents"):
        app.state.documents = asyncio.create_task(asyncio.to_thread(generate))
    found: tuple[bytes, str] = await asyncio.shield(app.state.documents)
    return found
