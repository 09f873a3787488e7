"""Large batches of messages: each message is parsed, checked and forgotten before the next one.

So the memory of a batch is that of the body of its request, and of one message.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec
from fastapi.routing import APIRoute
from msgspec import Raw, Struct
from pydantic import BaseModel, ValidationError

from .enqueueing import check_size
from .errors import ApiError, from_validation_errors
from .models import BrokeredMessage, DirectMessage, EnqueueDirect, EnqueueRequest
from .request_body import read_json

__all__ = ["batch_reader"]

_MESSAGE_LIMIT: Final = 8 * 1024 * 1024  # bytes of a message, as the client writes it
_UNKNOWN: Final = re.compile("unknown field `(.*)`", re.DOTALL)


class _Batch(Struct, forbid_unknown_fields=True):
    messages: list[Raw]


_DECODER: Final = msgspec.json.Decoder(_Batch)


def batch_reader(route: APIRoute) -> Callable[[bytearray], Any] | None:
    """The function that reads a large batch for a route; None if the route takes none."""
    model: Any = route.body_field.field_info.annotation if route.body_field else None
    if model is EnqueueDirect:
        return _Reader(route, model, DirectMessage).read
    return _Reader(route, model, BrokeredMessage).read if model is EnqueueRequest else None


class _Reader:
    """Reads the batches of a route. The errors are those of its models, if the body is JSON."""

    def __init__(self, route: APIRoute, model: type[BaseModel], message_model: type[BaseModel]) -> None:
        self._route = route
        self._model = model
        self._message_model = message_model
        self._message = message_model.model_construct(payload=None)

    def read(self, body: bytearray) -> BaseModel:
        """The batch, without the payloads, headers and bodies of its messages.

        Raises the `ApiError` of a body that the model does not accept, or of a message that is too large.
        """
        messages = self._split(body)
        self._validated(self._model, {"messages": [self._message] * len(messages)})
        read = []
        for place, raw in enumerate(messages):
            name, size = f"messages[{place}]", len(memoryview(raw))
            if size > _MESSAGE_LIMIT:
                message = f"{name} of {size} bytes is over the limit of {_MESSAGE_LIMIT} bytes"
                raise ApiError(413, "payload_too_large", message, name, f"{size} bytes", f"{_MESSAGE_LIMIT} bytes")
            try:
                text = str(raw, "utf-8")
            except UnicodeDecodeError:
                raise ApiError(400, "malformed_json", "the body must be UTF-8", "body") from None
            found = self._validated(self._message_model, read_json(text), "messages", place)
            check_size(found, f"{name}.")
            found.payload = None
            if isinstance(found, DirectMessage):
                found.headers = None
                found.body = found.body and ""
            read.append(found)
        return self._model.model_construct(messages=read)

    def _split(self, body: bytearray) -> list[Raw]:
        try:
            return _DECODER.decode(body).messages
        except msgspec.ValidationError as error:
            said = str(error)
        except ValueError as error:
            raise ApiError(400, "malformed_json", f"the body is not JSON: {error}", "body") from None
        # Have the model make the error, for a body without the messages.
        value: dict[str, Any] | None
        if unknown := _UNKNOWN.search(said):
            value = {"messages": [self._message], unknown[1]: None}
        elif "missing" in said:
            value = {}
        else:
            value = {"messages": None} if "$.messages" in said else None
        self._validated(self._model, value)
        raise AssertionError(said)

    def _validated(self, model: type[BaseModel], value: Any, *place: str | int) -> Any:
        try:
            return model.__pydantic_validator__.validate_python(value)
        except ValidationError as error:
            errors = [{**each, "loc": ("body", *place, *each["loc"])} for each in error.errors(include_url=False)]
            raise from_validation_errors(errors, self._route) from None
