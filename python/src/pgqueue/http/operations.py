"""Routes for operators: liveness, readiness, metrics, and the description of the routes."""

from typing import Final

from starlette.types import Send

from .calls import Call, Operation, Route
from .errors import ApiError
from .security.rights import NOTHING, Need


async def _healthz(_call: Call, send: Send) -> None:
    """Whether the process answers. It asks no database and needs no password."""
    await _send_text(send, b"ok\n")


async def _readyz(call: Call, send: Send) -> None:
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
    await _send_text(send, b"ok\n")


async def _metrics(call: Call, send: Send) -> None:
    """Metrics for Prometheus. The depths are those of the last sample, so a scrape costs the databases nothing."""
    await _send_text(send, call.context.metrics.exposition(), b"text/plain; version=0.0.4; charset=utf-8")


async def _send_text(send: Send, text: bytes, kind: bytes = b"text/plain; charset=utf-8") -> None:
    headers = [(b"content-length", b"%d" % len(text)), (b"content-type", kind)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def _route(path: str, need: Need, endpoint: object, errors: tuple[int, ...]) -> Route:
    return Route("GET", path, need, endpoint, Operation(endpoint.__doc__ or "", "operations", errors=errors))  # type: ignore[arg-type]


ROUTES: Final = [
    _route("/healthz", NOTHING, _healthz, ()),
    _route("/readyz", NOTHING, _readyz, (503,)),
    _route("/metrics", Need(("admin", "reader"), "all"), _metrics, (401, 403, 413, 422, 429, 503)),
]
