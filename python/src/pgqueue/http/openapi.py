"""The OpenAPI document of the routes."""

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from msgspec import Struct

from .. import __version__
from .calls import Operation, Route

_DESCRIPTION: Final = """Queues in PostgreSQL, managed and used over HTTP.

Agents create, fill and inspect managed queues: a request returns at once, and the client polls for its result. The
direct routes answer in one round trip. A POST with an `Idempotency-Key` can be repeated: it takes effect once."""
_OPEN: Final = ("/healthz", "/readyz")
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
    429: "The user sends too many requests, or too many passwords of this client wait to be verified.",
    503: "A database cannot be reached, or took too long, or the bodies of all requests take too much memory.",
}
_EVERYWHERE: Final = {401, 403, 413, 422, 429, 503}  # errors of every route of the API
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
    described = [(route, route.operation) for route in routes if route.operation is not None]
    models = {ErrorBody: None}
    for _, operation in described:
        models |= dict.fromkeys(filter(None, (operation.body, operation.answer, operation.unfinished)))
    references, components = msgspec.json.schema_components(models, ref_template="#/components/schemas/{name}")
    reference = dict(zip(models, references, strict=True))
    for schema in components.values():
        _complete(schema)
    paths: dict[str, dict[str, Any]] = {}
    for route, operation in described:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, operation, reference)
    schemes = {each: {"type": "http", "scheme": each} for each in ("basic", "bearer")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pgqueue", "description": _DESCRIPTION, "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": schemes},
        "security": [{each: []} for each in schemes],
    }


def _complete(schema: dict[str, Any]) -> None:
    properties = schema.get("properties", {})
    if "body" in properties and "payload" in properties and schema.get("additionalProperties") is False:
        schema["anyOf"] = _EITHER
    for name, each in properties.items():
        for kind in (each, *each.get("anyOf", ())):
            if name.endswith("_at") and kind.get("type") == "string":
                kind["format"] = "date-time"


def _operation(route: Route, operation: Operation, reference: dict[Any, Any]) -> dict[str, Any]:
    about = operation.about or route.endpoint.__doc__ or ""
    found: dict[str, Any] = {
        "tags": [operation.tag],
        "summary": route.path.rpartition("/")[2].replace("_", " ").strip("{}").capitalize(),
        "description": "\n".join(line.strip() for line in about.strip().splitlines()),
        "operationId": f"{route.method.lower()}{route.path.replace('/', '_').replace('{', '').replace('}', '')}",
        "parameters": _parameters(route, operation),
        "responses": _responses(route, operation, reference),
    }
    if operation.body is not None:
        found["requestBody"] = {"required": True, "content": _json(reference[operation.body])}
    if route.path in _OPEN:
        found["security"] = []
    return found


def _parameters(route: Route, operation: Operation) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ]
    if operation.parameters is not None:
        _, schemas = msgspec.json.schema_components([operation.parameters])
        (schema,) = schemas.values()
        for name, each in schema["properties"].items():
            is_required = name in schema.get("required", ())
            found.append({"name": name, "in": "query", "required": is_required, "schema": each})
    if operation.has_key:
        found.append(_KEY)
    return found


def _responses(route: Route, operation: Operation, reference: dict[Any, Any]) -> dict[str, Any]:
    content = {"text/plain": {}} if operation.answer is None else _json(reference[operation.answer])
    found = {str(operation.status): {"description": "Success", "content": content}}
    if operation.unfinished is not None:
        found["202"] = {"description": "Pending or running", "content": _json(reference[operation.unfinished])}
    errors = set(operation.errors) | (set() if route.path in _OPEN else _EVERYWHERE)
    if operation.body is not None:
        errors |= {415}
    for status in sorted(errors):
        found[str(status)] = {"description": _ERRORS[status], "content": _json(reference[ErrorBody])}
    return found


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
