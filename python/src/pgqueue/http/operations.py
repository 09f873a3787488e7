"""Routes for operators and developers: liveness, readiness, metrics, and the OpenAPI document of the API."""

import asyncio
from collections.abc import Iterable
from functools import cache
from mimetypes import guess_type
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from .. import __version__
from .calls import Call, Route, Routes, Table
from .errors import ApiError, from_http_status
from .page.rendering import TEMPLATES
from .security.rights import NOTHING, Need

ROUTES: Final = Routes()
_FILES: Final = {
    each.name: Response(each.read_bytes(), media_type=guess_type(each.name)[0])
    for each in (Path(__file__).parent / "page/static").iterdir()
}
_DESCRIPTION: Final = """Queues in PostgreSQL, managed and used over HTTP.

Agents create, fill and inspect managed queues: a request returns at once, and the client polls for its result. The
direct routes answer in one round trip. A POST with an `Idempotency-Key` can be repeated: it takes effect once."""
_ERRORS: Final = {
    400: "The body is not JSON.",
    401: "Name or password, or the token, is missing or wrong.",
    403: "The user or the database role lacks a right, or a page of another site made the browser send this request.",
    404: "There is no such service, database, queue, task or message, or the user does not see it.",
    409: "The name is taken, or the queue is not Active.",
    410: "The claim was lost.",
    413: "The body or a payload is too large.",
    415: "The body is compressed.",
    422: "A field is missing or out of range.",
    429: "Too many passwords of this client wait to be verified.",
    503: "A database cannot be reached, or took too long, or the bodies of all requests take too much memory.",
}
_EVERYWHERE: Final = {401, 403, 413, 422, 429, 503}  # errors of every route of the API but the open ones
_KEY: Final[dict[str, Any]] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "A name for this request: a request that is repeated with it takes effect once.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}
# What a struct cannot say.
_EITHER: Final = [
    {"required": ["payload"], "properties": {"body": {"type": "null"}}},
    {"required": ["body"], "properties": {"payload": {"type": "null"}, "body": {"type": "string"}}},
]


@ROUTES.add("GET", "/healthz", NOTHING, tag="operations")
async def healthz(_call: Call) -> PlainTextResponse:
    """Whether the process answers. It asks no database and needs no password."""
    return PlainTextResponse("ok\n")


@ROUTES.add("GET", "/readyz", NOTHING, tag="operations", errors=(503,))
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


@ROUTES.add("GET", "/metrics", Need(("admin", "reader"), "all"), tag="operations")
async def metrics(call: Call) -> PlainTextResponse:
    """Metrics for Prometheus. The depths are those of the last sample, so a scrape costs the databases nothing."""
    return PlainTextResponse(call.context.metrics.exposition(), media_type="text/plain; version=0.0.4")


@ROUTES.add("GET", "/static/{file}", NOTHING)
async def static(call: Call) -> Response:
    """A file that pages load."""
    if (file := _FILES.get(call.path_params["file"])) is None:
        raise from_http_status(404)
    return file


@ROUTES.add("GET", "/openapi.json", NOTHING)
async def openapi(call: Call) -> Response:
    """The OpenAPI document."""
    text, _ = await asyncio.to_thread(_documents, call.table)
    return Response(text, media_type="application/json")


@ROUTES.add("GET", "/docs", NOTHING)
async def docs(call: Call) -> Response:
    """The OpenAPI document as a page. It loads nothing from another host."""
    _, page = await asyncio.to_thread(_documents, call.table)
    return HTMLResponse(page)


@cache
def _documents(table: Table) -> tuple[bytes, str]:
    """The document and its page; they are made once, in a thread, because this takes long."""
    found = document(table.routes)
    return msgspec.json.encode(found), TEMPLATES.get_template("docs.html").render({"up": "", "document": found})


class Fault(Struct):
    """An error: a stable code, a message, and the field with its value and its limit; these are null if they do not
    apply.
    """

    code: str
    message: str
    field: str | None
    value: str | int | float | bool | None
    limit: str | None


class ErrorBody(Struct):
    """The body of every error response."""

    error: Fault


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """The OpenAPI document of those routes that are part of the API."""
    described = [route for route in routes if route.tag]
    models: dict[Any, None] = {ErrorBody: None}
    for route in described:
        models |= dict.fromkeys(filter(None, (route.body, route.answer)))
    references, components = msgspec.json.schema_components(models, ref_template="#/components/schemas/{name}")
    reference = dict(zip(models, references, strict=True))
    for schema in components.values():
        for name, each in schema.get("properties", {}).items():
            for kind in (each, *each.get("anyOf", ())):
                if name.endswith("_at") and kind.get("type") == "string":
                    kind["format"] = "date-time"
    for name in ("DirectMessage", "Publish"):
        components[name]["anyOf"] = _EITHER
    paths: dict[str, dict[str, Any]] = {}
    for route in described:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, reference)
    schemes = {each: {"type": "http", "scheme": each} for each in ("basic", "bearer")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pgqueue", "description": _DESCRIPTION, "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": schemes},
        "security": [{each: []} for each in schemes],
    }


def _operation(route: Route, reference: dict[Any, Any]) -> dict[str, Any]:
    about = route.about or route.endpoint.__doc__ or ""
    found: dict[str, Any] = {
        "tags": [route.tag],
        "summary": route.path.rpartition("/")[2].replace("_", " ").strip("{}").capitalize(),
        "description": "\n".join(line.strip() for line in about.strip().splitlines()),
        "operationId": f"{route.method.lower()}{route.path.replace('/', '_').replace('{', '').replace('}', '')}",
        "parameters": _parameters(route),
        "responses": _responses(route, reference),
    }
    if route.body is not None:
        found["requestBody"] = {"required": True, "content": _json(reference[route.body])}
    if route.need == NOTHING:
        found["security"] = []
    return found


def _parameters(route: Route) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ]
    if route.parameters is not None:
        _, schemas = msgspec.json.schema_components([route.parameters])
        (schema,) = schemas.values()
        for name, each in schema["properties"].items():
            is_required = name in schema.get("required", ())
            found.append({"name": name, "in": "query", "required": is_required, "schema": each})
    return [*found, _KEY] if route.method == "POST" else found


def _responses(route: Route, reference: dict[Any, Any]) -> dict[str, Any]:
    content = {"text/plain": {}} if route.answer is None else _json(reference[route.answer])
    found = {str(route.status): {"description": "Success", "content": content}}
    if route.polls:
        found["202"] = {"description": "Pending or running", "content": content}
    errors = {*route.errors, *(() if route.need == NOTHING else _EVERYWHERE)}
    errors |= {404} if route.tag != "operations" else set()
    errors |= {409} if route.method == "POST" else set()
    errors |= {400, 415} if route.body is not None else set()
    for status in sorted(errors):
        found[str(status)] = {"description": _ERRORS[status], "content": _json(reference[ErrorBody])}
    return found


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
