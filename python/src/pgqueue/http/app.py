"""The application: a table of contents of the server. It makes the parts and joins the routes of all rooms."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final, Literal

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from .._listener import NotificationListeners
from . import operations
from .calls import Context, Table
from .databases import Databases
from .direct import routes as direct_routes
from .edge import Edge
from .managed import routes as managed_routes
from .managed.agent import Agent
from .metrics import Metrics, Sampler
from .page import actions, forms
from .page import routes as page_routes
from .page.rendering import error_page
from .security.admission import Admission, Sessions
from .security.tokens import Tokens
from .settings import Settings

Role = Literal["all", "controller"]
_ROOMS: Final = (direct_routes, managed_routes, operations, page_routes, forms, actions)


class Application(Starlette):
    """The ASGI application. Starlette runs its lifespan; the edge serves the requests."""

    def __init__(self, context: Context) -> None:
        super().__init__(lifespan=lambda _: _running(context))
        self.state.context = context
        self.table = Table(route for room in _ROOMS for route in room.ROUTES)
        self._edge = Edge(context, self.table, error_page)

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
