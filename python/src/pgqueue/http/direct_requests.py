"""Serves the POST requests of the direct routes without FastAPI, which would take most of their time.

A request with an idempotency key, or with a body of another type than JSON, is left to FastAPI, which also documents
the routes. It calls the same functions with the same values, and its errors are the same.
"""

from collections.abc import Awaitable, Callable
from inspect import signature
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from .direct_routes import router, target_of
from .fast_bodies import read_fast
from .request_body import LARGE_BATCH, JsonRequest, JsonRoute
from .rights import require

__all__ = ["DirectRequests"]

_PREFIX: Final = "/v1/queues/"
_HEADERS: Final = {b"idempotency-key", b"content-type"}


class _Verb(NamedTuple):
    """A verb: its route, the model of its body, its function, and whether the function takes the request."""

    route: APIRoute
    model: type[BaseModel]
    function: Callable[..., Awaitable[Response]]
    takes_request: bool
    read_batch: Callable[[bytearray], Any] | None


def _verbs() -> dict[str, _Verb]:
    verbs = {}
    for route in router.routes:
        if isinstance(route, APIRoute) and route.methods == {"POST"}:
            parameters = signature(route.endpoint).parameters
            reader = route.batch_reader() if isinstance(route, JsonRoute) else None
            verb = _Verb(route, parameters["body"].annotation, route.endpoint, "request" in parameters, reader)
            verbs[route.path.rpartition("/")[2]] = verb
    return verbs


class DirectRequests:
    """The ASGI application for the requests that `serves` accepts."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._verbs = _verbs()

    def serves(self, scope: Scope) -> bool:
        """Whether this application serves the request. If so, note its verb in the scope."""
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(_PREFIX):
            return False
        name, slash, verb = scope["path"][len(_PREFIX) :].partition("/")
        found = self._verbs.get(verb) if name and slash else None
        if found is None or [value for key, value in scope["headers"] if key in _HEADERS] != [b"application/json"]:
            return False
        scope["direct_queue"], scope["direct_verb"], scope["route"] = name, found, found.route
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        request = JsonRequest(scope, receive)
        verb: _Verb = scope["direct_verb"]
        request.read_batch = verb.read_batch
        try:
            response = await self._respond(scope, request)
        except Exception as error:
            response = await self._respond_to_error(request, error)
        await response(scope, receive, send)

    async def _respond(self, scope: Scope, request: JsonRequest) -> Response:
        verb: _Verb = scope["direct_verb"]
        require(f"POST {verb.route.path}")
        query = {}
        if scope["query_string"]:
            query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        context = self._app.state.context
        target = target_of(context, scope["direct_queue"], query.get("service_id"), query.get("database_name"))
        content = await request.content()
        if not content:
            raise RequestValidationError([{"type": "missing", "loc": ("body",), "msg": "", "input": None}])
        body: Any = None
        if len(content) <= LARGE_BATCH:
            body = read_fast(verb.function.__name__, await request.text())
        if body is None:
            body = _validated(verb.model, await request.json())
        if verb.takes_request:
            return await verb.function(request=request, target=target, body=body)
        return await verb.function(target=target, body=body)

    async def _respond_to_error(self, request: JsonRequest, error: Exception) -> Response:
        """The response of the application's handler of this exception. Raise the exception if there is none."""
        for kind in type(error).__mro__:
            handler: Any = self._app.exception_handlers.get(kind)
            if handler is not None:
                response: Response = await handler(request, error)
                return response
        raise error


def _validated(model: type[BaseModel], value: Any) -> BaseModel:
    try:
        found: BaseModel = model.__pydantic_validator__.validate_python(value)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in errors]) from None
    return found
