"""The application: a table of contents of the server. It makes the parts and joins the routes of all rooms.

`pgqueue.http.app:app` is the application for other servers than `pgqueue serve`. It reads the configuration file that
the environment variable PGQUEUE_CONFIG names.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from .._listener import NotificationListeners
from . import openapi, operations
from .calls import Table
from .context import Context
from .databases import Databases
from .direct import routes as direct_routes
from .edge import Edge
from .managed import routes as managed_routes
from .managed.agent import Agent
from .metrics import Metrics
from .page import actions as page_actions
from .page import docs as page_docs
from .page import forms as page_forms
from .page import health as page_health
from .page import routes as page_routes
from .page import schedules as page_schedules
from .page import session as page_session
from .page.requests import error_page
from .sampling import Sampler
from .security.admission import Admission
from .security.sessions import Sessions
from .security.tokens import Tokens
from .settings import Settings, SettingsError

Role = Literal["all", "controller"]
_ROOMS = (
    direct_routes,
    managed_routes,
    operations,
    page_routes,
    page_forms,
    page_health,
    page_schedules,
    page_actions,
    page_session,
    page_docs,
)


class Application(Starlette):
    """The ASGI application. Starlette runs its lifespan and serves its files; the edge serves all else."""

    def __init__(self, context: Context) -> None:
        files = Mount("/static", StaticFiles(packages=[("pgqueue.http.page", "static")]), name="static")
        super().__init__(routes=[files], lifespan=lambda _: _running(context))
        self.state.context = context
        self.table = Table(route for room in _ROOMS for route in room.ROUTES)
        self._edge = Edge(context, self.table, self._serve_file, error_page)

    @property
    def routes(self) -> list[Any]:
        """The routes of all rooms."""
        return self.table.routes

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        return openapi.document(self.table.routes)

    async def _serve_file(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self.router(scope, receive, send)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or the lifespan."""
        await (self._edge if scope["type"] == "http" else super().__call__)(scope, receive, send)


def create_app(settings: Settings, role: Role = "all") -> Application:
    """Make the application. With the role `controller` it has no agent of its own."""
    databases = Databases(settings)
    sampler = Sampler(settings, databases)
    metrics = Metrics(sampler)
    sessions = Sessions(settings.session_key, settings.limits.session_seconds)
    admission = Admission(settings.users, Tokens(databases.control), sessions)
    context = Context(settings, databases, metrics, sampler, NotificationListeners(), admission)
    if role == "all":
        context.agent = Agent(settings, databases, metrics)
    return Application(context)


@asynccontextmanager
async def _running(context: Context) -> AsyncIterator[None]:
    sampling = asyncio.create_task(context.sampler.run(), name="pgqueue sampler")
    agent = context.agent
    working = asyncio.create_task(agent.run(context.stopping), name="pgqueue agent") if agent else None
    try:
        yield
    finally:
        context.stopping.set()
        sampling.cancel()
        with suppress(asyncio.CancelledError):
            await sampling
        if working is not None:
            await working
        await asyncio.gather(*context.background_tasks)
        await context.listeners.close()
        await context.databases.close()


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path = os.environ.get("PGQUEUE_CONFIG")
    if not path:
        raise SettingsError("PGQUEUE_CONFIG is not set: set it to the path of the configuration file")
    return create_app(Settings.load(path))
