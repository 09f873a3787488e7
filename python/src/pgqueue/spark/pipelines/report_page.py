"""The HTML page of a report: one file without requests to other hosts, for light and dark mode and for any width."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from html import escape
from typing import Final

from .svg_charts import Series, bars, count, lines, seconds, share

__all__ = ["DeadLetterGroup", "Flow", "Measure", "render"]

_MAX_CHARTED: Final = 100  # queues with charts: each has the size of a small page, and a PNG takes a second
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f]")


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

    `totals` has each queue in total, `windows` each queue by window (in order), `letters` the kinds of dead letters
    (most frequent first). `window` is the length of a window, `made_at` the time of the report, and `places` says in
    words what was read.
    """

    window: timedelta
    totals: Sequence[Measure]
    windows: Sequence[Measure]
    letters: Sequence[DeadLetterGroup]
    made_at: datetime
    places: str

    def drawn(self) -> list[str]:
        """Return the queues with charts: all of them, or the 100 busiest."""
        busiest = sorted(self.totals, key=lambda total: -total.finished - total.dead)[:_MAX_CHARTED]
        names = {total.queue_name for total in busiest}
        return [total.queue_name for total in self.totals if total.queue_name in names]

    def of(self, queue: str) -> list[Measure]:
        """Return the windows of a queue, including empty ones between the first and the last."""
        known = {found.window_start: found for found in self.windows if found.queue_name == queue}
        moments = sorted(start for start in known if start is not None)
        filled, at = [], moments[0] if moments else None
        while at is not None and at <= moments[-1]:
            filled.append(known.get(at) or Measure(queue, at, 0, 0, 0, 0, *[None] * 7))
            at += self.window
        return filled


_STYLE: Final = """
:root { color-scheme: light dark;
  --page: #f9f9f7; --card: #fcfcfb; --ink: #0b0b0b; --soft: #52514e; --faint: #75746f; --grid: #e4e3dd; --base: #bdbbb3;
  --done: #2a78d6; --dead: #d03b3b; --low: #86b6ef; --mid: #2a78d6; --high: #104281; --rim: #0b0b0b1a; }
@media (prefers-color-scheme: dark) { :root {
  --page: #0d0d0d; --card: #1a1a19; --ink: #ffffff; --soft: #c3c2b7; --faint: #95948d; --grid: #2c2c2a; --base: #4a4945;
  --done: #3987e5; --dead: #e66767; --low: #256abf; --mid: #5598e7; --high: #b7d3f6; --rim: #ffffff1a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 12px; overflow-wrap: anywhere; }
h3 { font-size: 14px; margin: 0; font-weight: 600; } p { margin: 0; color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); gap: 12px; }
figure, .sheet { margin: 0; background: var(--card); border: 1px solid var(--rim); border-radius: 8px; padding: 12px; }
figcaption { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 2px 12px; margin-bottom: 6px; }
.legend { color: var(--soft); font-size: 12px; display: flex; gap: 10px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 4px; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--faint); font-variant-numeric: tabular-nums; }
svg .name { fill: var(--soft); }
.grid { stroke: var(--grid); } .base { stroke: var(--base); }
.hint { fill: transparent; } .hint:hover { fill: var(--rim); }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.done { fill: var(--done); } .dead { fill: var(--dead); }
.low.line { stroke: var(--low); } .mid.line { stroke: var(--mid); } .high.line, .dead.line { stroke: var(--high); }
.dead.line { stroke: var(--dead); fill: none; } .mid.line { fill: none; }
.low.dot { fill: var(--low); } .mid.dot { fill: var(--mid); } .high.dot { fill: var(--high); }
i.done { background: var(--done); } i.dead { background: var(--dead); } i.low { background: var(--low); }
i.mid { background: var(--mid); } i.high { background: var(--high); }
.sheet { overflow-x: auto; padding: 4px 12px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 8px; white-space: nowrap; border-bottom: 1px solid var(--grid); }
tr:last-child td { border-bottom: 0; } th { color: var(--soft); font-weight: 600; }
th.text, td.text { text-align: left; }
td.text { unicode-bidi: isolate; white-space: normal; min-width: 96px; overflow-wrap: anywhere; }
td.wrap { min-width: 220px; }
details { margin-top: 12px; } summary { cursor: pointer; color: var(--soft); } details .sheet { margin-top: 8px; }
"""


def render(flow: Flow) -> str:
    """Return the page as HTML. All text from messages is escaped."""
    starts = [start for found in flow.windows if (start := found.window_start) is not None]
    length = flow.window.total_seconds()
    period = "no message was finished, and none died"
    if starts:
        first, last = min(starts), max(starts) + flow.window
        period = f"{first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC, in windows of {seconds(length)}"
    body = [
        "<h1>Message flow</h1>",
        f"<p>{period}. {escape(flow.places)}, {flow.made_at:%Y-%m-%d %H:%M:%S} UTC.</p>",
        "<h2>Queues</h2>",
        _totals(flow),
    ]
    drawn = flow.drawn()
    if len(drawn) < len(flow.totals):
        body.append(f"<p>The {len(drawn)} busiest of {len(flow.totals):,} queues have charts.</p>")
    body += [_queue(flow, queue) for queue in drawn]
    if flow.letters:
        body += ["<h2>Dead letters by error</h2>", _letters(flow.letters)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Message flow</title>\n<style>{_STYLE}</style>\n</head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body>\n</html>\n"
    )


def _queue(flow: Flow, queue: str) -> str:
    found = flow.of(queue)
    heading = f"<h2>{escape(queue)}</h2>"
    if not found:
        return heading
    starts = [measure.window_start for measure in found if measure.window_start is not None]

    def series(name: str, style: str, column: str) -> Series:
        return Series(name, style, [getattr(measure, column) for measure in found])

    ranks = (("p50", "low"), ("p95", "mid"), ("p99", "high"))
    length = flow.window.total_seconds()
    rates = [
        Series("finished", "done", [measure.finished / length for measure in found]),
        Series("dead", "dead", [measure.dead / length for measure in found]),
    ]
    retries = [measure.retries / measure.finished if measure.finished else None for measure in found]
    charts = [
        _figure("Messages per second", rates, bars(starts, flow.window, rates, count)),
        _figure(
            "Retries and failures",
            (shown := [Series("retries", "mid", retries), series("dead", "dead", "failure_rate")]),
            lines(starts, flow.window, shown, share),
        ),
        *(
            _figure(
                title,
                (times := [series(rank, style, f"{what}_{rank}") for rank, style in ranks]),
                lines(starts, flow.window, times, seconds),
            )
            for what, title in (("wait", "Wait, from enqueue to claim"), ("processing", "Work, from claim to ack"))
        ),
    ]
    return f'{heading}<div class="charts">{"".join(charts)}</div>{_windows(found)}'


def _figure(title: str, series: Sequence[Series], chart: str) -> str:
    legend = "".join(f'<span><i class="{one.style}"></i>{one.name}</span>' for one in series)
    return f'<figure><figcaption><h3>{title}</h3><span class="legend">{legend}</span></figcaption>{chart}</figure>'


_TIMES: Final = ("wait_p50", "wait_p95", "wait_p99", "processing_p50", "processing_p95", "processing_p99")


def _cells(found: Measure) -> list[str]:
    rate = "" if found.failure_rate is None else share(found.failure_rate)
    times = ("" if (value := getattr(found, name)) is None else seconds(value) for name in _TIMES)
    return [f"{found.finished:,}", f"{found.dead:,}", rate, f"{found.retries:,}", *times]


_COLUMNS: Final = (
    "finished", "dead", "failure rate", "retries",
    "wait p50", "p95", "p99", "work p50", "p95", "p99",
)  # fmt: skip


def _totals(flow: Flow) -> str:
    return _table(("queue", *_COLUMNS), ([total.queue_name, *_cells(total)] for total in flow.totals), 1)


def _windows(found: Iterable[Measure]) -> str:
    rows = ([f"{measure.window_start:%Y-%m-%d %H:%M:%S}", *_cells(measure)] for measure in found)
    return f"<details><summary>The figures, by window</summary>{_table(('from (UTC)', *_COLUMNS), rows, 1)}</details>"


def _letters(letters: Iterable[DeadLetterGroup]) -> str:
    rows = (
        [kind.queue_name, kind.reason, kind.error or "", f"{kind.letters:,}", f"{kind.last_died_at:%Y-%m-%d %H:%M:%S}"]
        for kind in letters
    )
    return _table(("queue", "reason", "error", "letters", "last (UTC)"), rows, 3)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], texts: int) -> str:
    """Return a table whose first `texts` columns are texts. The last of several text columns may wrap."""

    def style(place: int) -> str:
        if place >= texts:
            return ""
        return ' class="text wrap"' if texts > 1 and place == texts - 1 else ' class="text"'

    head = "".join(f"<th{style(place)}>{escape(heading)}</th>" for place, heading in enumerate(headings))
    body = "".join(
        "<tr>" + "".join(f"<td{style(place)}>{_shown(cell)}</td>" for place, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="sheet"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _shown(text: str) -> str:
    """Escape a text, and replace control characters, which HTML does not allow."""
    return escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))
