"""The bodies of the hot direct routes, parsed and checked in one pass by msgspec.

These structures accept a part of what the models in `models` accept, and nothing else, with the same meaning. What they
refuse is read again by the models, which also make the errors.
"""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from .enqueueing import is_small
from .models import BATCH_LIMIT, CLAIMED_BY_LIMIT, DELAY_LIMIT, MAX_ID, TIMEOUT_LIMIT, WAIT_LIMIT
from .request_body import DEPTH_LIMIT

__all__ = ["read_fast"]

_Id = Annotated[int, Meta(ge=1, le=MAX_ID)]
_Token = Annotated[str, Meta(pattern="^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\\Z")]


class _Message(Struct, forbid_unknown_fields=True, gc=False):
    payload: Any
    delay_seconds: Annotated[int, Meta(ge=0, le=DELAY_LIMIT)] = 0
    headers: dict[str, Any] | None = None


class _Enqueue(Struct, forbid_unknown_fields=True):
    messages: Annotated[list[_Message], Meta(min_length=1, max_length=BATCH_LIMIT)]


class _Claim(Struct, forbid_unknown_fields=True, gc=False):
    max_messages: Annotated[int, Meta(ge=1, le=BATCH_LIMIT)] = 1
    visibility_timeout_seconds: Annotated[int, Meta(ge=1, le=TIMEOUT_LIMIT)] | None = None
    claimed_by: Annotated[str, Meta(max_length=CLAIMED_BY_LIMIT)] | None = None
    wait_seconds: Annotated[int, Meta(ge=0, le=WAIT_LIMIT)] = 0


class _Ack(Struct, forbid_unknown_fields=True, gc=False):
    id: _Id
    claim_token: _Token


class _AckBatch(Struct, forbid_unknown_fields=True, gc=False):
    ids: Annotated[list[_Id], Meta(min_length=1, max_length=BATCH_LIMIT)]
    claim_token: _Token


_DECODERS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    "enqueue": msgspec.json.Decoder(_Enqueue),
    "claim": msgspec.json.Decoder(_Claim),
    "ack": msgspec.json.Decoder(_Ack),
    "ack_batch": msgspec.json.Decoder(_AckBatch),
}


def read_fast(verb: str, text: str) -> Any:
    """The body of a request with the attributes of its model; None if the model has to read it."""
    decoder = _DECODERS.get(verb) if is_small(text) else None
    # With a decimal point, a number could be an id that a float cannot hold.
    if decoder is None or (verb != "enqueue" and "." in text):
        return None
    if text.count("[") + text.count("{") > DEPTH_LIMIT:
        return None
    try:
        return decoder.decode(text)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None
