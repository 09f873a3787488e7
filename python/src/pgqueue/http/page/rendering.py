"""What the pages share: how they show figures and JSON, the queue of a request, forms, errors, the templates."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal
from urllib.parse import parse_qs, urlencode

import psycopg
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from msgspec import Meta, Struct
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.types import Scope

from ..._wording import counted as count
from ..._wording import format_duration
from ...errors import InvalidArgument
from ...message import QueueStats, attempts_of
from ..calls import Call, Target, find_queue
from ..direct.structs import MAX_ID
from ..errors import ApiError, from_database_error
from ..managed.registry import QueueBody
from ..memory import run_beside
from ..metrics import Place, Sample, Sampler
from ..security.rights import ALL, current
from .search import State

_HEIGHT: Final = 28
_MAX_INDENT: Final = 40  # levels: deeper ones are not indented further, so that the text stays short
# Not "(?:[^"\\]|\\.)*", which takes 30 times as long for a long string, in which no other thread runs.
_TOKEN: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[][{},:]|[^]["{},:\s]+', re.DOTALL)
_MAX_FORM_FIELDS: Final = 10_000
_MOST_IDS: Final = 10_000  # of a request, as in the API
Form = dict[str, str]


@dataclass(frozen=True, slots=True)
class Row:
    """A queue in the table: from the registry, from the samples, or from both."""

    place: Place
    stats: QueueStats | None = None
    samples: Sequence[Sample] = ()
    registered: QueueBody | None = None

    @property
    def key(self) -> str:
        """The unique key of the row."""
        return "/".join(self.place)

    @property
    def state(self) -> str:
        """The state of the queue in one word."""
        if self.stats is not None and self.stats.paused:
            return "Paused"
        return self.registered.status if self.registered else "Active"


def build_rows(sampler: Sampler, registered: Sequence[QueueBody], hidden: str) -> list[Row]:
    """A row for each queue that was sampled or is registered, without the queue of the name `hidden`."""
    known = {(row.service_id, row.database_name, row.name): row for row in registered}
    rows = {
        place: Row(place, samples[-1].stats, samples, known.pop(place, None))
        for place, samples in sampler.all_samples()
        if place[2] != hidden
    }
    rows |= {place: Row(place, registered=row) for place, row in known.items()}
    return [row for _, row in sorted(rows.items())]


def sparkline(values: Sequence[float | None], label: str, kind: str) -> Markup:
    """An SVG line of the values, with gaps where one is None. The vertical range includes 0."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return Markup('<span class="spark"></span>')
    low, high = min(0.0, *known), max(0.0, *known)
    scale = (_HEIGHT - 4) / ((high - low) or 1.0)
    line, pen = "", "M"
    for place, value in enumerate(values):
        if value is None:
            pen = "M"
        elif not 0 < place < len(values) - 1 or not values[place - 1] == value == values[place + 1]:
            line += f"{pen}{place} {_HEIGHT - 2 - (value - low) * scale:.1f}" + ("h0" if pen == "M" else "")
            pen = "L"
    return Markup(
        '<svg class="spark {kind}" viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img"'
        ' aria-label="{label}"><title>{label}</title>'
        '<line x1="0" y1="{zero}" x2="{width}" y2="{zero}"/><path d="{line}"/></svg>'
    ).format(
        kind=kind, width=len(values) - 1, height=_HEIGHT, line=line, zero=f"{_HEIGHT - 2 + low * scale:.1f}",
        label=f"{label}, from {_compact_number(low)} to {_compact_number(high)}",
    )  # fmt: skip


def _compact_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or float(value).is_integer() else f"{value:,.1f}"


def format_seconds(value: float | None) -> str:
    """A duration as the command line writes it; – for None."""
    return "–" if value is None else format_duration(timedelta(seconds=value))


def format_moment(at: datetime | None) -> Markup:
    """A timestamp as an HTML time element: in UTC, until the script shows it in the viewer's time zone; – for None."""
    if at is None:
        return Markup("–")
    at = at.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(at.isoformat(), f"{at:%Y-%m-%d %H:%M:%S} UTC")


def pretty_json(text: str, limit: int) -> str:
    """JSON text, indented: about `limit` characters, and then …. Strings and numbers keep their text."""
    parts: list[str] = []
    depth = size = 0
    before = ""
    for match in _TOKEN.finditer(text):
        token = match[0]
        is_end = token in ("}", "]")
        if is_end:
            depth = max(0, depth - 1)
        if before not in ("{", "[") if is_end else before in ("{", "[", ","):
            parts.append("\n" + "  " * min(depth, _MAX_INDENT))
        elif before == ":":
            parts.append(" ")
        parts.append(token)
        if token in ("{", "["):
            depth += 1
        before = token
        size += sum(map(len, parts[-2:]))
        if size > limit:
            return "".join(parts)[:limit] + "…"
    return "".join(parts)


def queue_url(page: str, place: Place, /, **more: object) -> str:
    """The URL of a page about a queue, relative to the page of all queues. Parameters that are None are left out."""
    service, database, name = place
    given = {name: value for name, value in more.items() if value is not None}
    return f"{page}?{urlencode({'service': service, 'database': database, 'name': name} | given, doseq=True)}"


def render(template: str, scope: Scope, *, problem: ApiError | None = None, **values: object) -> HTMLResponse:
    """The response with a page. `problem` is the error that it shows."""
    up = "../" * (scope["path"].count("/") - 1)  # the path to the page of all queues
    page = TEMPLATES.get_template(template).render(values, up=up, problem=problem)
    return HTMLResponse(page, problem.status if problem else 200, problem.headers if problem else None)


TEMPLATES: Final = Environment(
    loader=PackageLoader("pgqueue.http.page"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {
    "seconds": format_seconds,
    "moment": format_moment,
    "rate": _compact_number,
    "number": lambda n: f"{n:,}",
}


TEMPLATES.globals |= {
    "ALL": ALL,
    "attempts_of": attempts_of,
    "caller": current,
    "count": count,
    "may": lambda access, place=(): current().may(access.split(), *place),
    "queue_url": queue_url,
    "sparkline": sparkline,
}


class _Place(Struct):
    service: str
    database: str
    name: str


class View(Struct):
    """Which queues or messages a page shows, what it asks, and what a request has done."""

    find: str = ""
    sort: Literal["", "ready_messages", "dead_messages", "oldest_age_seconds"] = ""
    state: State | Literal[""] = ""
    after: Annotated[int, Meta(ge=0, le=MAX_ID)] | None = None
    id: str = ""
    action: str = ""
    of: str = ""
    done: str = ""


def back_to(path: str, place: Place, **more: object) -> RedirectResponse:
    """The redirect from an action on a queue to a page; more are parameters of its URL."""
    return RedirectResponse("../" + queue_url(path, place, **more), 303)


def queue_of(call: Call) -> Target:
    """The queue of a page. Raises `ApiError`: 404, 422, or 403 if the user lacks the access."""
    given = call.parameters(_Place)
    return find_queue(call, given.service, given.database, given.name)


async def read_form(call: Call) -> Form:
    """The fields of a form, without empty ones. The values of a repeated field have commas between them."""
    text = (await call.body()).decode(errors="replace")
    try:
        found = await run_beside(len(text), parse_qs, text, max_num_fields=_MAX_FORM_FIELDS)
    except ValueError:
        limit = f"at most {_MAX_FORM_FIELDS}"
        raise ApiError(422, "invalid", "the form has too many fields", "body", limit=limit) from None
    return {name: ",".join(values) for name, values in found.items()}


def message_ids(given: str) -> list[int]:
    """The ids of messages in a form or in a URL, with commas between them. Raises `ApiError` 422."""
    number = given.count(",") + 1
    if number > _MOST_IDS:
        limit = f"at most {_MOST_IDS} messages"
        raise ApiError(422, "invalid", f"id has {number} messages; must be {limit}", "id", number, limit)
    ids = given.split(",")
    if not all(each.isdecimal() and each.isascii() and 0 < int(each[:20]) <= MAX_ID for each in ids):
        limit = "the id of a message, or all"
        raise ApiError(422, "invalid", f"id is invalid; must be {limit}", "id", given, limit)
    return [int(each) for each in ids]


def explain(error: Any) -> ApiError:
    """The error that a form shows beside what the user has typed. Raises errors that the user cannot correct."""
    answer = error if isinstance(error, ApiError) else from_database_error(error)
    if answer.status >= 500 or answer.status == 404:
        raise error
    if isinstance(error, InvalidArgument) and not answer.message:  # raised by the client
        answer = ApiError(422, "invalid", str(error))
    hint = error.diag.message_hint if isinstance(error, psycopg.Error) else None
    return ApiError(answer.status, answer.code, f"{answer.message}. {hint}" if hint else answer.message)


def error_page(scope: Scope, error: ApiError) -> HTMLResponse:
    """The page that shows an error."""
    return render("error.html", scope, problem=error)
