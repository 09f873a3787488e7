"""How the page shows figures: rows of the table, sparklines, durations, and the Jinja environment."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..message import QueueStats
from .registry import QueueRow
from .sampling import History, Place, Sampler
from .throughput import Throughput

__all__ = ["TEMPLATES", "Row", "build_rows"]

_HEIGHT: Final = 28


@dataclass(frozen=True, slots=True)
class Row:
    """A queue in the table: from the registry, from the samples, or from both."""

    place: Place
    stats: QueueStats | None = None
    history: History | None = None
    status: str = ""
    error_message: str | None = None

    @property
    def key(self) -> str:
        """The unique key of the row."""
        return "/".join(self.place)

    @property
    def state(self) -> str:
        """The state of the queue in one word."""
        if self.stats is not None and self.stats.paused:
            return "Paused"
        return self.status or "Active"

    def is_estimated(self, number: str) -> bool:
        """Whether the figure of this name is an estimate."""
        return self.stats is not None and number in self.stats.estimates

    @property
    def depths(self) -> list[float]:
        """The depth at each sample."""
        return [] if self.history is None else [float(each.depth) for each in self.history.samples]

    @property
    def incoming(self) -> list[float]:
        """Incoming messages per second at each sample."""
        return [] if self.history is None else [each.incoming for each in self.history.throughputs]

    @property
    def outgoing(self) -> list[float]:
        """Outgoing messages per second at each sample."""
        return [] if self.history is None else [each.outgoing for each in self.history.throughputs]

    @property
    def ages(self) -> list[float]:
        """The age of the oldest ready message at each sample, in seconds."""
        samples = () if self.history is None else self.history.samples
        return [each.stats.oldest_age_seconds or 0.0 for each in samples]

    @property
    def throughput(self) -> Throughput:
        """The throughput at the last sample."""
        return Throughput() if self.history is None else self.history.throughput


def build_rows(sampler: Sampler, registered: Sequence[QueueRow], hidden: str) -> list[Row]:
    """A row for each queue that was sampled or is registered, without the queue of the name `hidden`."""
    known = {(row.service_id, row.database_name, row.name): row for row in registered}
    rows = {}
    for place, history in sampler.histories():
        row = known.pop(place, None)
        if place[2] != hidden:
            status, message = (row.status, row.error_message) if row else ("", None)
            rows[place] = Row(place, history.last.stats, history, status, message)
    for place, row in known.items():
        rows[place] = Row(place, status=row.status, error_message=row.error_message)
    return [row for _, row in sorted(rows.items())]


def sparkline(values: Sequence[float], label: str, kind: str) -> Markup:
    """An SVG line of the values, the newest at the right. The vertical range always includes 0."""
    if len(values) < 2:
        return Markup('<span class="spark"></span>')
    low, high = min(0.0, *values), max(0.0, *values)
    scale = (_HEIGHT - 4) / ((high - low) or 1.0)

    def y(value: float) -> float:
        return _HEIGHT - 2 - (value - low) * scale

    # Points inside of a level stretch are left out. Most of hundreds of queues are idle, and each refresh draws all of
    # them.
    last = len(values) - 1
    points = " ".join(
        f"{place},{y(value):.1f}"
        for place, value in enumerate(values)
        if place in (0, last) or not values[place - 1] == value == values[place + 1]
    )
    zero = y(0.0)
    return Markup(
        '<svg class="spark {kind}" viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img"'
        ' aria-label="{label}"><title>{label}</title>'
        '<polygon points="0,{zero} {points} {width},{zero}"/>'
        '<line x1="0" y1="{zero}" x2="{width}" y2="{zero}"/><polyline points="{points}"/></svg>'
    ).format(
        kind=kind, width=last, height=_HEIGHT, label=f"{label}, from {_compact_number(low)} to {_compact_number(high)}",
        zero=f"{zero:.1f}", points=points,
    )  # fmt: skip


def _compact_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or float(value).is_integer() else f"{value:,.1f}"


def format_seconds(value: float | None) -> str:
    """A duration in its one or two largest units; – for None."""
    if value is None:
        return "–"
    whole = int(value)
    if whole < 60:
        return f"{value:.1f} s" if value < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    hours = f"{whole // 3600 % 24} h" if whole >= 86400 else f"{whole // 3600} h {whole // 60 % 60:02d} min"
    return f"{whole // 86400} d {hours}" if whole >= 86400 else hours


def format_moment(at: datetime) -> Markup:
    """A timestamp in UTC as an HTML time element."""
    at = at.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(at.isoformat(), f"{at:%Y-%m-%d %H:%M:%S} UTC")


TEMPLATES: Final = Environment(
    loader=PackageLoader("pgqueue.http"),
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
TEMPLATES.globals["sparkline"] = sparkline
