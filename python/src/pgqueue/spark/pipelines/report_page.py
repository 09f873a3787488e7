"""The HTML page of a report: one file without requests to other hosts, for light and dark mode and for any width."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from html import escape
from importlib import resources
from itertools import pairwise
from typing import Any, Final

from .metrics import STEPS

__all__ = ["DeadLetterGroup", "Durations", "Flow", "Measure", "busiest", "render"]

_MAX_CHARTED: Final = 100  # queues with charts
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f]")
_UNITS: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
_LOG_FROM: Final = 50.0  # an axis is logarithmic if the highest value is at least this many times the lowest
# Colours with enough contrast in light and in dark mode.
_COLOURS: Final = {
    "finished": "#3f86dc",
    "retries": "#3f86dc",
    "dead": "#d9534f",
    "p50": "#3f86dc",
    "p95": "#c97516",
    "p99": "#a85fc9",
}
_CLEAR: Final = "rgba(0,0,0,0)"
_LAYOUT: Final = {
    "template": "none",
    "paper_bgcolor": _CLEAR,
    "plot_bgcolor": _CLEAR,
    "modebar_bgcolor": _CLEAR,
    "margin": {"l": 12, "r": 8, "t": 4, "b": 28},
    "font": {"family": "system-ui, sans-serif", "size": 11},
}
_TIMES: Final = [f"{what}_{rank}" for what in ("wait", "processing") for rank in ("p50", "p95", "p99")]
_COLUMNS: Final = ("finished", "dead", "failure rate", "retries", *(name.replace("_", " ") for name in _TIMES))


@dataclass(frozen=True, slots=True)
class Measure:
    """The metrics of a queue in one window, or in total (window_start None): the columns of `flow_metrics`.

    Times are in seconds.
    """

    queue_name: str
    window_start: datetime | None
    finished: int
    dead: int
    retried: int
    retries: int
    failure_rate: float | None
    wait_p50: float | None
    wait_p95: float | None
    wait_p99: float | None
    processing_p50: float | None
    processing_p95: float | None
    processing_p99: float | None


@dataclass(frozen=True, slots=True)
class Durations:
    """The number of messages of a queue in one window with times in one range: a row of `duration_counts`."""

    queue_name: str
    window_start: datetime
    what: str
    step: int
    messages: int


@dataclass(frozen=True, slots=True)
class DeadLetterGroup:
    """Dead letters of one kind: with the same queue, reason and normalized error. `letters` is their number."""

    queue_name: str
    reason: str
    error: str | None
    letters: int
    last_died_at: datetime


@dataclass(frozen=True, slots=True)
class Flow:
    """The data of a report.

    `totals` has each queue in total, `windows` each queue by window (in order), `durations` the queues with charts by
    window and range of times, `letters` the kinds of dead letters (most frequent first). `window` is the length of a
    window, `made_at` the time of the report, and `places` says in words what was read.
    """

    window: timedelta
    totals: Sequence[Measure]
    windows: Sequence[Measure]
    durations: Sequence[Durations]
    letters: Sequence[DeadLetterGroup]
    made_at: datetime
    places: str

    def of(self, queue: str) -> list[Measure]:
        """Return the windows of a queue, including empty ones between the first and the last."""
        known = {found.window_start: found for found in self.windows if found.queue_name == queue}
        moments = sorted(start for start in known if start is not None)
        filled, at = [], moments[0] if moments else None
        while at is not None and at <= moments[-1]:
            filled.append(known.get(at) or Measure(queue, at, 0, 0, 0, 0, *[None] * 7))
            at += self.window
        return filled


def busiest(totals: Sequence[Measure]) -> list[str]:
    """Return the queues with charts: all of them, or the 100 busiest."""
    most = sorted(totals, key=lambda total: -total.finished - total.dead)[:_MAX_CHARTED]
    names = {total.queue_name for total in most}
    return [total.queue_name for total in totals if total.queue_name in names]


def seconds(value: float | None) -> str:
    """Format a duration, given in seconds, with a suitable unit."""
    if value is None or value <= 0:
        return "" if value is None else "0 s"
    for size, unit in _UNITS:
        if value >= size * (2 if size > 1 else 1):
            return f"{_digits(value / size)} {unit}"
    return f"{_digits(value * 1e6)} µs"


def share(value: float | None) -> str:
    """Format a fraction in percent."""
    return "" if value is None else f"{_digits(value * 100)} %"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def render(flow: Flow) -> str:
    """Return the page as HTML. All text from messages is escaped. Raises ImportError without plotly."""
    from plotly.offline import get_plotlyjs

    starts = [start for found in flow.windows if (start := found.window_start) is not None]
    period = "no message was finished, and none died"
    if starts:
        first, last = min(starts), max(starts) + flow.window
        length = seconds(flow.window.total_seconds())
        period = f"{first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC, in windows of {length}"
    drawn = busiest(flow.totals)
    body = [
        f"<p>{period}. {escape(flow.places)}, {flow.made_at:%Y-%m-%d %H:%M:%S} UTC.</p>",
        "<h2>Queues</h2>",
        _table(("queue", *_COLUMNS), [[total.queue_name, *_values(total)] for total in flow.totals]),
    ]
    if len(drawn) < len(flow.totals):
        body.append(f"<p>The {len(drawn)} busiest of {len(flow.totals):,} queues have charts.</p>")
    for queue in drawn:
        found = flow.of(queue)
        rows = [[f"{measure.window_start:%Y-%m-%d %H:%M:%S}", *_values(measure)] for measure in found]
        durations = [one for one in flow.durations if one.queue_name == queue]
        charts = _charts(found, flow.window, durations) if found else ()
        figures = "".join(_figure(title, figure) for title, figure in charts)
        body.append(
            f'<h2>{_text(queue)}</h2><div class="charts">{figures}</div><details><summary>The figures, by window'
            f"</summary>{_table(('from (UTC)', *_COLUMNS), rows)}</details>"
        )
    if flow.letters:
        letters = (
            [kind.queue_name, kind.reason, kind.error or "", kind.letters, kind.last_died_at] for kind in flow.letters
        )
        headings = ("queue", "reason", "error", "letters", "last (UTC)")
        body += ["<h2>Dead letters by error</h2>", _table(headings, letters, 3)]
    page = resources.files(__package__).joinpath("report_page.html").read_text(encoding="utf-8")
    parts = {"@body@": "\n".join(body), "@plotly@": get_plotlyjs()}
    return re.sub("@(body|plotly)@", lambda found: parts[found[0]], page)


def _charts(found: Sequence[Measure], window: timedelta, durations: Sequence[Durations]) -> Iterable[tuple[str, Any]]:
    """Yield the charts of a queue: their titles, and figures of plotly."""
    length = window.total_seconds()
    rates = {"finished": [one.finished / length for one in found], "dead": [one.dead / length for one in found]}
    yield "Messages per second", _chart(found, window, rates, _digits, {}, is_stacked=True)
    retries = [one.retries / one.finished if one.finished else None for one in found]
    shares = {"retries": retries, "dead": [one.failure_rate for one in found]}
    yield "Retries and failures", _chart(found, window, shares, share, {"tickformat": ",.3~%"})
    for title, what in (("Wait, from enqueue to claim", "wait"), ("Work, from claim to ack", "processing")):
        times = {rank: [getattr(one, f"{what}_{rank}") for one in found] for rank in ("p50", "p95", "p99")}
        yield title, _chart(found, window, times, seconds, _time_axis(times))
    for title, what in (("Share of messages by wait", "wait"), ("Share of messages by work", "processing")):
        counts = {(one.step, one.window_start): one.messages for one in durations if one.what == what}
        if counts:
            yield title, _heat_map([one.window_start for one in found if one.window_start is not None], window, counts)


def _heat_map(starts: Sequence[datetime], window: timedelta, counts: dict[tuple[int, datetime], int]) -> Any:
    """Return a map of the share that each range of times has of the messages in each window."""
    from plotly import graph_objects

    lowest, highest = min(step for step, _ in counts), max(step for step, _ in counts)
    steps = range(lowest, highest + 1)
    totals = {start: sum(counts.get((step, start), 0) for step in steps) for start in starts}
    shares = [
        [counts[step, start] / totals[start] if (step, start) in counts else None for start in starts] for step in steps
    ]
    bounds = [10 ** (step / STEPS) for step in range(lowest, highest + 2)]
    figure = graph_objects.Figure()
    figure.add_heatmap(
        x=[start.replace(tzinfo=None) for start in (*starts, starts[-1] + window)],
        y=[f"{seconds(low)} to {seconds(high)}" for low, high in pairwise(bounds)],
        z=shares,
        colorscale=[[0, "rgba(63,134,220,0.1)"], [1, "rgb(63,134,220)"]],
        showscale=False,
        hovertemplate="%{y}: %{z:,.3~%}<extra></extra>",
    )
    # At the bounds, which are between the ranges.
    ticks = range(-lowest % STEPS, len(bounds), STEPS) if len(bounds) > 2 * STEPS else range(len(bounds))
    labels = {"tickvals": [place - 0.5 for place in ticks], "ticktext": [seconds(bounds[place]) for place in ticks]}
    figure.update_layout(**_LAYOUT)
    figure.update_xaxes(showgrid=False, ticks="")
    figure.update_yaxes(automargin=True, showgrid=False, ticks="outside", tickcolor=_CLEAR, **labels)
    return figure


def _time_axis(times: dict[str, list[Any]]) -> dict[str, Any]:
    """Return an axis for durations: logarithmic if they differ much, and with labels that have units."""
    known = [value for values in times.values() for value in values if value is not None]
    positive = [value for value in known if value > 0]
    if not positive:
        return {}
    if min(known) >= 0 and max(positive) >= _LOG_FROM * min(positive):
        powers = [10.0**power for power in range(math.floor(math.log10(min(positive))), 9)]
        return {"type": "log", "tickvals": powers, "ticktext": [seconds(power) for power in powers]}
    power = 10.0 ** math.floor(math.log10(max(positive)))
    step = next(part * power for part in (0.5, 1, 2, 5) if max(positive) / (part * power) <= 4)
    values = [step * number for number in range(6)]
    return {"tickvals": values, "ticktext": [seconds(value) for value in values]}


def _chart(
    found: Sequence[Measure],
    window: timedelta,
    series: dict[str, list[Any]],
    show: Callable[[float], str],
    axis: dict[str, Any],
    *,
    is_stacked: bool = False,
) -> Any:
    from plotly import graph_objects

    middle = timedelta(0) if is_stacked else window / 2
    moments = [(one.window_start + middle).replace(tzinfo=None) for one in found if one.window_start is not None]
    figure = graph_objects.Figure()
    for name, values in series.items():
        texts = ["" if value is None else show(value) for value in values]
        shown = {"x": moments, "y": values, "name": name, "hovertext": texts, "hovertemplate": "%{hovertext}"}
        if is_stacked:
            # Without an outline, thousands of bars stay visible.
            wide = {"offset": 0, "width": window.total_seconds() * 1000}
            figure.add_bar(**shown, **wide, marker={"color": _COLOURS[name], "line_width": 0})
        else:
            figure.add_scatter(**shown, mode="lines+markers", marker_size=4, line_color=_COLOURS[name])
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
    figure.update_layout(barmode="stack", hovermode="x unified", legend=legend, **_LAYOUT)
    figure.update_xaxes(range=[moments[0] - middle, moments[-1] - middle + window], showgrid=False)
    figure.update_yaxes(rangemode="tozero", automargin=True, nticks=5, ticks="outside", tickcolor=_CLEAR, **axis)
    return figure


def _figure(title: str, figure: Any) -> str:
    return f'<figure><h3>{title}</h3><div class="chart" data-figure="{escape(figure.to_json())}"></div></figure>'


def _values(found: Measure) -> list[Any]:
    times = [(value, seconds(value)) for value in (getattr(found, name) for name in _TIMES)]
    return [found.finished, found.dead, (found.failure_rate, share(found.failure_rate)), found.retries, *times]


def _table(headings: Sequence[str], rows: Iterable[Sequence[Any]], texts: int = 1) -> str:
    """Return a table that sorts by the column whose heading is pressed, of which the first `texts` are texts.

    A cell can be a value and its text.
    """
    styles = [' class="text"'] * texts + [""] * (len(headings) - texts)
    head = "".join(
        f"<th{style}><button>{escape(heading)}</button></th>" for style, heading in zip(styles, headings, strict=True)
    )
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f'<div class="sheet"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return f'<td class="text">{_text(value)}</td>'
    if isinstance(value, datetime):
        return f"<td>{value:%Y-%m-%d %H:%M:%S}</td>"
    number, text = value if isinstance(value, tuple) else (value, f"{value:,}")
    return f'<td data-value="{"" if number is None else number}">{text}</td>'


def _text(text: str) -> str:
    """Escape a text, and replace control characters, which HTML does not allow."""
    return escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))
