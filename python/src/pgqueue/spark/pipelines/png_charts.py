"""Charts of a report as PNG, drawn by matplotlib (extra `plots`)."""

import math
from collections.abc import Sequence
from datetime import UTC, timedelta
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from .report_page import Flow, Measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_BLUES = {"p50": "#86b6ef", "p95": "#2a78d6", "p99": "#104281"}
_RED = "#d03b3b"
_TITLE_WIDTH = 90  # characters in a line


def draw(flow: Flow, directory: Path) -> list[Path]:
    """Draw the charts of each queue into `directory`, as QUEUE.png; returns the files. Raises ImportError."""
    from matplotlib import dates
    from matplotlib.figure import Figure

    drawn: list[Path] = []
    for queue in flow.drawn():
        found = flow.of(queue)
        if not found:
            continue
        figure = Figure(figsize=(11, 6.5), layout="constrained")
        figure.suptitle(fill(queue, _TITLE_WIDTH))
        for axes, kind in zip(figure.subplots(2, 2).flat, ("rate", "failures", "wait", "processing"), strict=True):
            _format_time(dates, axes)
            axes.grid(axis="y", color="#e4e3dd", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right", "left"]].set_visible(False)
            _plot(axes, kind, found, flow.window)
            _set_limits(axes, found, flow.window)
            # A fixed place next to the title: finding the best one takes seconds, and matplotlib warns of it.
            place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.3, "ncols": len(_BLUES)}
            axes.legend(frameon=False, fontsize="small", **place)
        drawn.append(directory / f"{queue}.png")
        figure.savefig(drawn[-1], dpi=110)
    return drawn


def _set_limits(axes: Any, found: Sequence[Measure], window: timedelta) -> None:
    """Give all charts of a queue the same time range, and start the value axis at zero."""
    starts = [measure.window_start for measure in found if measure.window_start is not None]
    axes.set_xlim(starts[0], starts[-1] + window)
    axes.set_ylim(bottom=min(axes.dataLim.ymin, 0) if math.isfinite(axes.dataLim.ymin) else 0)
    for line in axes.lines:
        line.set_clip_on(False)


def _format_time(dates: Any, axes: "Axes") -> None:
    locator = dates.AutoDateLocator(tz=UTC)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=UTC))


def _plot(axes: Any, kind: str, found: Sequence[Measure], window: timedelta) -> None:
    starts = [measure.window_start for measure in found if measure.window_start is not None]
    if kind == "rate":
        seconds = window.total_seconds()
        finished = [measure.finished / seconds for measure in found]
        dead = [measure.dead / seconds for measure in found]
        # Not bars: matplotlib makes an object for each bar, and there may be thousands.
        edges = [*starts, starts[-1] + window]
        both = [one + other for one, other in zip(finished, dead, strict=True)]
        axes.stairs(finished, edges, fill=True, color=_BLUES["p95"], label="finished")
        axes.stairs(both, edges, baseline=finished, fill=True, color=_RED, label="dead")
        axes.set_title("Messages per second", loc="left", fontsize="medium")
        return
    middles = [start + window / 2 for start in starts]
    if kind == "failures":
        retries = [measure.retries / measure.finished * 100 if measure.finished else math.nan for measure in found]
        failed = [math.nan if measure.failure_rate is None else measure.failure_rate * 100 for measure in found]
        axes.plot(middles, retries, color=_BLUES["p95"], marker=".", label="retries")
        axes.plot(middles, failed, color=_RED, marker=".", label="dead")
        axes.set_title("Retries and failures, %", loc="left", fontsize="medium")
        return
    for rank, colour in _BLUES.items():
        values = [getattr(measure, f"{kind}_{rank}") for measure in found]
        known = [math.nan if value is None else value for value in values]
        axes.plot(middles, known, color=colour, marker=".", label=rank)
    titles = {"wait": "Wait, from enqueue to claim, s", "processing": "Work, from claim to ack, s"}
    axes.set_title(titles[kind], loc="left", fontsize="medium")
