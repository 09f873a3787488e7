"""The FastAPI application: makes its parts, adds the routes, and maps exceptions to responses.

`pgqueue.http.app:app` is the application for other servers than `pgqueue serve`. It reads the configuration file that
the environment variable PGQUEUE_CONFIG names.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any, Literal

import psycopg
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from psycopg_pool import PoolClosed, PoolTimeout, TooManyRequests
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from . import direct_routes, managed_routes, operations_routes, page_routes, schedule_routes, topic_routes
from .admission import Admission
from .agent import Agent
from .audit import Audit
from .context import Context
from .databases import Databases
from .direct_requests import DirectRequests
from .errors import ApiError, error_response, from_database_error, from_http_status, from_validation_errors
from .metrics import Metrics
from .middleware import RequestMiddleware
from .notifications import NotificationListeners
from .request_body import Bodies
from .rights import authorize
from .sampling import Sampler
from .settings import Settings, SettingsError

__all__ = ["Role", "create_app"]

logger = logging.getLogger("pgqueue.http")
Role = Literal["all", "controller"]

_DESCRIPTION = """Queues in PostgreSQL, managed and used over HTTP.

Agents create, fill and inspect managed queues: a request returns at once, and the client polls for its result. The
direct routes answer in one round trip. A POST with an `Idempotency-Key` can be repeated: it takes effect once."""


class _Application(FastAPI):
    """FastAPI, beside which the common requests of the direct routes are served."""

    def serve_direct_requests(self, middleware: Mapping[str, Any]) -> None:
        """Serve them from now on, behind the middleware with these arguments."""
        self._direct_requests = DirectRequests(self)
        self._direct_app = RequestMiddleware(self._direct_requests, **middleware)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        app = self._direct_app if self._direct_requests.serves(scope) else super().__call__
        await app(scope, receive, send)


def create_app(settings: Settings, role: Role = "all") -> FastAPI:
    """Make the application. With the role `controller` it has no agent of its own."""
    databases = Databases(settings)
    sampler = Sampler(settings, databases)
    metrics = Metrics(sampler)
    context = Context(settings, databases, metrics, sampler, NotificationListeners(), Admission(settings, databases))
    if role == "all":
        context.agent = Agent(settings, databases, metrics)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        sampling = asyncio.create_task(sampler.run(), name="pgqueue sampler")
        working = asyncio.create_task(_run_agent(context), name="pgqueue agent")
        try:
            yield
        finally:
            context.stopping.set()
            sampling.cancel()
            with suppress(asyncio.CancelledError):
                await sampling
            await working
            await asyncio.gather(*context.background_tasks)
            await context.listeners.close()
            await databases.close()

    app = _Application(
        title="pgqueue",
        version=version("pgqueue"),
        description=_DESCRIPTION,
        lifespan=lifespan,
        openapi_url=None,  # the routes of operators have it, and its page
        docs_url=None,  # the pages of Swagger and ReDoc load scripts from another host
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(authorize)],
    )
    app.state.context = context
    app.include_router(managed_routes.router)
    app.include_router(direct_routes.list_router)
    app.include_router(direct_routes.router)
    app.include_router(schedule_routes.router)
    app.include_router(topic_routes.publish_router)
    app.include_router(topic_routes.router)
    app.include_router(operations_routes.router)
    app.include_router(page_routes.router)
    app.mount("/static", StaticFiles(packages=[("pgqueue.http", "static")]), name="static")
    before: dict[str, Any] = {
        "admission": context.admission,
        "audit": Audit(context),
        "metrics": metrics,
        "seconds": settings.limits.request_seconds,
        "bodies": Bodies(),
    }
    app.add_middleware(RequestMiddleware, **before)
    app.serve_direct_requests(before)
    _handle_errors(app)
    _document_authentication(app)
    return app


async def _run_agent(context: Context) -> None:
    if context.agent is not None:
        await context.agent.run(context.stopping)


def _handle_errors(app: FastAPI) -> None:
    def respond(request: Request, error: ApiError) -> Response:
        return page_routes.error_page(request, error) if page_routes.is_page(request) else error_response(error)

    async def api(request: Request, error: Any) -> Response:
        return respond(request, error)

    async def validation(request: Request, error: Any) -> Response:
        return respond(request, from_validation_errors(error.errors(), request.scope.get("route")))

    async def status(request: Request, error: Any) -> Response:
        if isinstance(error.__cause__, ApiError):  # an ApiError that reading the body raised
            return respond(request, error.__cause__)
        return respond(request, from_http_status(error.status_code, str(error.detail), error.headers))

    async def database(request: Request, error: Any) -> Response:
        answer = from_database_error(error)
        if answer.status >= 500:
            level = logging.ERROR if answer.status == 500 else logging.WARNING
            trace = error if answer.status == 500 else None
            logger.log(level, "%s %s: %s", request.method, answer.code, type(error).__name__, exc_info=trace)
        return respond(request, answer)

    async def disconnected(_request: Request, _error: Any) -> Response:
        return Response(status_code=400)  # nobody reads it

    def add(kind: type[Exception], respond: Callable[[Request, Any], Awaitable[Response]]) -> None:
        async def handle(request: Request, error: Any) -> Response:
            response = await respond(request, error)
            _forget_frames(error)
            return response

        app.add_exception_handler(kind, handle)

    add(ApiError, api)
    add(ClientDisconnect, disconnected)
    add(RequestValidationError, validation)
    add(HTTPException, status)
    for kind in (psycopg.Error, PoolTimeout, PoolClosed, TooManyRequests, ConnectionError):
        add(kind, database)


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an exception that was answered. Their frames hold the body of the request, and some refer
    to the exception: only the garbage collector would free them, which runs seldom.
    """
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _document_authentication(app: FastAPI) -> None:
    """Document authentication by password and by token in the OpenAPI schema."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = generate()
            schemes = {each: {"type": "http", "scheme": each} for each in ("basic", "bearer")}
            schema["components"]["securitySchemes"] = schemes
            schema["security"] = [{each: []} for each in schemes]
            for path in ("/healthz", "/readyz"):
                schema["paths"][path]["get"]["security"] = []
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path = os.environ.get("PGQUEUE_CONFIG")
    if not path:
        raise SettingsError("PGQUEUE_CONFIG is not set: set it to the path of the configuration file")
    return create_app(Settings.load(path))
