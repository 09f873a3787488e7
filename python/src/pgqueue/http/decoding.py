"""Bodies and parameters of requests as structs: msgspec parses and checks them in one pass. Errors name the field."""

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cache
from itertools import accumulate
from typing import Any, Final, TypeVar

import msgspec

from .errors import ApiError, shorten

T = TypeVar("T")

DEPTH_LIMIT: Final = 500  # of lists and objects in each other
VALUES_LIMIT: Final = 400_000  # of JSON in a body: items of lists and members of objects
_LARGEST_EXPLAINED: Final = 2 * 1024 * 1024  # bytes of a body; the error of a larger one does not repeat the value
_MOST_SAID: Final = 2000  # characters of an error of msgspec that are read
_WINDOW: Final = 64 * 1024  # bytes that are counted without a chance for another thread to run
DIGITS_LIMIT: Final = 32 * 1024 * 1024  # of the numbers of a body that have an exponent, as PostgreSQL writes them
_FEW: Final = 1024  # bytes of a body, in which the numbers that PostgreSQL can store have fewer digits
_SHAPES: Final = bytes.maketrans(b"123456789E", b"000000000e")  # an exponent becomes 0e
# Or a string, also one that does not end. The possessive repetitions keep no place to return to: such places take 12
# times the memory of a string, and a string without an end would be read again from each of its quotation marks.
_EXPONENT: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[eE][+-]?([0-9]+)', re.DOTALL)
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")  # half of a pair
_GZIP: Final = b"\x1f\x8b"
_DEPTH_STEPS: Final = [(code in b"[{") - (code in b"]}") for code in range(256)]
_PLACE: Final = re.compile(r"(?P<said>.*?)(?: - at `(?:key in )?\$(?P<place>.*)`)?", re.DOTALL)
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_BOUND: Final = re.compile(r"Expected `(\w+)` (?:of length )?([<>]=) (-?\d+)")
_FORMATS: Final = {"uuid": "a UUID", "date-time": "a timestamp with an offset, such as 2026-01-31T12:00:00Z"}
_FREE: Final = ("payload", "headers")  # fields of any JSON: an error in them names the field as a whole


_decoder: Final[Callable[[Any], msgspec.json.Decoder[Any]]] = cache(msgspec.json.Decoder)


class Violation(ValueError):
    """What a struct refuses in its `__post_init__`: the field, and what it must be."""

    def __init__(self, field: str, limit: str, is_missing: bool = False) -> None:
        super().__init__(field)
        self.field = field
        self.limit = limit
        self.is_missing = is_missing


def decode(model: type[T], body: bytes) -> T:
    """The struct in a body. Raises `ApiError`: 400, 413, 415 or 422."""
    if body.startswith(_GZIP):
        message = "the body is compressed with gzip: send it without compression"
        raise ApiError(415, "unsupported_encoding", message, "body", "gzip", "JSON in UTF-8, without compression")
    text = codecs.getincrementaldecoder("utf-8")()
    try:  # in parts: the whole text can have four bytes for each character
        for start in range(0, 0 if body.isascii() else len(body), _WINDOW):
            text.decode(body[start : start + _WINDOW], start + _WINDOW >= len(body))
    except UnicodeDecodeError:
        raise ApiError(400, "malformed_json", "the body must be UTF-8", "body") from None
    check_shape(body)
    decoder: msgspec.json.Decoder[T] = _decoder(model)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        found = error
    except (msgspec.DecodeError, RecursionError):
        raise _malformed(body) from None
    if "got `float`" in str(found):  # JSON has no integer type: 30.0 is accepted, too
        try:
            return decoder.decode(msgspec.json.encode(_WHOLE.decode(body)))
        except msgspec.ValidationError as error:
            found = error
    value = None
    if len(body) <= _LARGEST_EXPLAINED:
        try:
            value = _read(body)
        except ValueError:
            raise _malformed(body) from None
    raise _explanation(found, model, value) from None


def convert(model: type[T], given: Mapping[str, Any]) -> T:
    """The struct of the parameters of a URL. Raises `ApiError` 422."""
    try:
        return msgspec.convert(given, model, strict=False)
    except msgspec.ValidationError as error:
        raise _explanation(error, model, given) from None


def _whole(text: str) -> int | msgspec.Raw:
    exact = Decimal(text)
    # The exponent is bounded: 1e131071 is no integer of any field.
    return int(exact) if exact.adjusted() < 30 and exact == exact.to_integral_value() else msgspec.Raw(text.encode())


def _number(text: str) -> float | str:
    return float(text) if repr(float(text)) == text else text


_WHOLE: Final = msgspec.json.Decoder(float_hook=_whole)


def _read(body: bytes) -> Any:
    """Parse JSON; a number that Python would change stays a text. Raises `ValueError` and `RecursionError`."""
    return json.loads(
        body.decode(),
        parse_constant=_refuse_constant,
        parse_float=_number,
        parse_int=lambda text: int(text) if len(text) < 1000 else text,
    )


def check_shape(body: bytes) -> None:
    """Raise `ApiError` for JSON with too many values or digits, or too deep ones, before it is parsed."""
    windows = range(0, len(body), _WINDOW - 1)
    if len(body) > _FEW and any(b"0e" in body[at : at + _WINDOW].translate(_SHAPES) for at in windows):
        exponents = (found[1][-6:] for found in _EXPONENT.finditer(body) if found[1])
        if any(digits > DIGITS_LIMIT for digits in accumulate(min(int(each), 10**6) for each in exponents)):
            raise _too_many(f"{DIGITS_LIMIT} digits")
    opened = body.count(b"[") + body.count(b"{")
    if opened <= DEPTH_LIMIT and opened + body.count(b",") <= VALUES_LIMIT:
        return  # also if all of them are outside of strings
    values, depth, is_in_string = 0, 0, False
    start = 0
    while start < len(body):
        window = body[start : start + _WINDOW]
        if (len(window) - len(window.rstrip(b"\\"))) % 2:  # do not cut an escape sequence
            window += body[start + _WINDOW : start + _WINDOW + 1]
        start += len(window)
        pieces = window.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[is_in_string::2])
        is_in_string ^= len(pieces) % 2 == 0
        opened = outside.count(b"[") + outside.count(b"{")
        values += opened + outside.count(b",")
        if values > VALUES_LIMIT:
            raise _too_many(f"{VALUES_LIMIT} values")
        if depth + opened > DEPTH_LIMIT:
            *_, depth = deepest = list(accumulate(map(_DEPTH_STEPS.__getitem__, outside), initial=depth))
            if max(deepest) > DEPTH_LIMIT:
                raise _nesting_error()
        else:
            depth += opened - outside.count(b"]") - outside.count(b"}")


def _too_many(most: str) -> ApiError:
    message = f"the body has more than {most}: send it in several requests"
    return ApiError(413, "body_too_large", message, "body", f"over {most}", most)


def _nesting_error() -> ApiError:
    message = f"body is nested too deeply: over the limit of {DEPTH_LIMIT} levels"
    return ApiError(400, "malformed_json", message, "body", f"over {DEPTH_LIMIT} levels", f"{DEPTH_LIMIT} levels")


def _malformed(body: bytes) -> ApiError:
    """The error for a body that msgspec cannot parse. Python's parser says more, but takes ten times the memory."""
    limit = "a string of Unicode characters"
    try:
        if len(body) > _LARGEST_EXPLAINED:
            msgspec.json.decode(_SURROGATE.sub(rb"\\u0041", body), type=msgspec.Raw)
            return ApiError(422, "invalid", f"a string of the body is invalid; must be {limit}", "body", limit=limit)
        value = _read(body)
    except ValueError as error:
        return ApiError(400, "malformed_json", f"the body is not JSON: {error}", "body")
    except RecursionError:
        return _nesting_error()
    path = next(_half_characters(value, ()), ())  # Python's parser accepts half of a surrogate pair
    ends = [place + 1 for place, step in enumerate(path) if step in _FREE]
    field = _field(path[: ends[0]] if ends else path) or "body"
    return ApiError(422, "invalid", f"{field} is invalid; must be {limit}", field, _at(value, path), limit)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _half_characters(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """The paths of the strings that are not Unicode."""
    if isinstance(value, str) and any("\ud800" <= each <= "\udfff" for each in value):
        yield path
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from _half_characters(each, (*path, place))
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _half_characters(name, (*path, name))
            yield from _half_characters(each, (*path, name))


def _explanation(error: msgspec.ValidationError, model: Any, value: Any) -> ApiError:
    """The error that names the field, its value, and what it must be."""
    text = str(error)  # it repeats names of fields, and ends with the place
    found = _PLACE.fullmatch(text if len(text) <= _MOST_SAID else text[: _MOST_SAID // 2] + text[-_MOST_SAID // 2 :])
    assert found is not None  # noqa: S101 - it matches every text
    said, places = found["said"], _STEP.findall(found["place"] or "")
    steps: list[str | int] = [name or (int(index) if index != "..." else index) for name, index in places]
    if not steps and said.startswith("Expected `object`"):
        message = "the body must be a JSON object, sent as Content-Type: application/json"
        return ApiError(400, "malformed_json", message, field="body")
    if isinstance(error.__cause__, Violation):
        violation = error.__cause__
        steps.append(violation.field)
        problem, limit = "is missing" if violation.is_missing else "is invalid", violation.limit
    elif said.startswith("Object missing"):
        steps.append(said.partition("`")[2][:-1])
        problem, limit = "is missing", _description(_schema(model, steps))
    elif said.startswith("Object contains unknown"):
        known = ", ".join(_schema(model, steps).get("properties", ()))
        steps.append(said.partition("`")[2][:-1])
        problem, limit = "is unknown", f"one of {known}"
    else:
        problem, limit = "is invalid", _limit(said, _schema(model, steps))
    field = _field(steps) or "body"
    return ApiError(422, "invalid", f"{field} {problem}; must be {limit}", field, _at(value, steps), limit)


def _at(value: Any, steps: Sequence[str | int]) -> Any:
    """The value at a path; None if there is none."""
    for step in steps:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _field(steps: Sequence[str | int]) -> str:
    text = ""
    for step in steps:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return str(shorten(text))


def _limit(said: str, schema: Mapping[str, Any]) -> str:
    """What msgspec expects, in words."""
    if bound := _BOUND.match(said):
        kind, sign, most = bound.groups()
        unit = {"array": " items long", "str": " characters long"}.get(kind, "")
        return f"{'at most' if sign == '<=' else 'at least'} {most}{unit}"
    if "matching regex" in said:
        pattern = said.partition("regex ")[2][1:-1].replace(r"\\", "\\")
        return f"of the form {pattern}"
    return _description(schema)


_schema_of = cache(msgspec.json.schema)


def _schema(model: Any, steps: Sequence[str | int]) -> Mapping[str, Any]:
    """The JSON schema of a place in a struct. Empty if unknown."""
    whole = _schema_of(model)
    schema: Any = whole
    for step in (None, *steps):
        if isinstance(step, int):
            schema = schema.get("items", {})
        elif step is not None:
            schema = schema.get("properties", {}).get(step, {})
        if "$ref" in schema:
            schema = whole["$defs"][schema["$ref"].rpartition("/")[2]]
        kinds = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
        schema = kinds[0] if kinds else schema
    return schema if isinstance(schema, dict) else {}


def _description(schema: Mapping[str, Any]) -> str:
    """What a JSON schema allows, in words."""
    least, most = schema.get("minimum"), schema.get("maximum")
    match schema.get("type"):
        case "integer":
            return "a whole number" if most is None else f"a whole number from {least} to {most}"
        case "array":
            return f"a list of {schema.get('minItems', 0)} to {schema['maxItems']} items"
        case "string" if "format" in schema:
            return _FORMATS[schema["format"]]
        case "string":
            return f"a string of the form {schema['pattern']}" if "pattern" in schema else "a string"
        case "boolean":
            return "true or false"
        case "object":
            return "a JSON object"
    if "enum" in schema:
        return " or ".join(schema["enum"])
    return "any JSON"
