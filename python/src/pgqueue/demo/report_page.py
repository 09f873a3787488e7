"""The HTML page of a report: one file without requests to other hosts, for light and dark mode and for any width."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from html import escape
from importlib import resources
from typing import Any, Final

from ..spark.pipelines.report import Flow, Measure

__all__ = ["render"]

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
    most = sorted(flow.totals, key=lambda total: -total.finished - total.dead)[:_MAX_CHARTED]
    drawn = [total.queue_name for total in flow.totals if total in most]
    body = [
        f"<p>{period}. {escape(flow.places)}, {flow.made_at:%Y-%m-%d %H:%M:%S} UTC.</p>",
        "<h2>Queues</h2>",
        _table(("queue", *_COLUMNS), [[total.queue_name, *_values(total)] for total in flow.totals]),
    ]
    if len(drawn) < len(flow.totals):
        body.append(f"<p>The {len(drawn)} busiest of {len(flow.totals):,} queues have charts.</p>")
    for queue in drawn:
        found = _windows(flow, queue)
        rows = [[f"{measure.window_start:%Y-%m-%d %H:%M:%S}", *_values(measure)] for measure in found]
        charts = _charts(found, flow.window) if found else ()
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


def _windows(flow: Flow, queue: str) -> list[Measure]:
    """Return the windows of a queue, including empty ones between the first and the last."""
    known = {found.window_start: found for found in flow.windows if found.queue_name == queue}
    moments = sorted(start for start in known if start is not None)
    filled, at = [], moments[0] if moments else None
    while at is not None and at <= moments[-1]:
        filled.append(known.get(at) or Measure(queue, at, 0, 0, 0, 0, *[None] * 7))
        at += flow.window
    return filled


def _charts(found: Sequence[Measure], window: timedelta) -> Iterable[tuple[str, Any]]:
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
