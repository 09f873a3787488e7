"""Charts of a report as SVG. CSS classes of the page set the colours, for light and dark mode."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from html import escape
from typing import Final

__all__ = ["Series", "bars", "count", "lines", "seconds", "share"]

# The width is about that on the page, so that text has about its normal size.
WIDTH: Final = 420
HEIGHT: Final = 190
LEFT, RIGHT, TOP, BOTTOM = 62, 44, 10, 22
_PLOT_WIDTH: Final = WIDTH - LEFT - RIGHT
_PLOT_HEIGHT: Final = HEIGHT - TOP - BOTTOM
_LOG_FROM: Final = 50.0  # the scale is logarithmic if the highest value is at least this many times the lowest


@dataclass(frozen=True, slots=True)
class Series:
    """A line, or bars of one colour: a value for each window, or None for no value. `style` is a CSS class."""

    name: str
    style: str
    values: Sequence[float | None]


def count(value: float) -> str:
    """Format a number of messages: 950, 12k, 3.4M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{_digits(value / size)}{letter}"
    return _digits(value)


def share(value: float) -> str:
    """Format a fraction in percent."""
    return f"{_digits(value * 100)} %"


def seconds(value: float) -> str:
    """Format a duration, given in seconds, with a suitable unit."""
    if value <= 0:
        return "0 s"
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms")):
        if value >= size * (2 if size > 1 else 1):
            return f"{_digits(value / size)} {unit}"
    return f"{_digits(value * 1e6)} µs"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def bars(starts: Sequence[datetime], window: timedelta, series: Sequence[Series], show: Callable[[float], str]) -> str:
    """Draw stacked bars, one stack for each window."""
    totals = [sum(one.values[place] or 0 for one in series) for place in range(len(starts))]
    scale = _Linear(max(totals, default=0))
    axis = _Time(starts, window)
    drawn = []
    for place, start in enumerate(starts):
        below = 0.0
        left, right = axis.x(start), axis.x(start + window)
        gap = 1.0 if right - left > 4 else 0.0
        for one in series:
            value = one.values[place] or 0
            if value:
                top, bottom = scale.y(below + value), scale.y(below)
                # At least one pixel, so that small values are visible.
                height = max(bottom - top, 1.0)
                drawn.append(
                    f'<rect class="{one.style}" x="{left:.1f}" y="{bottom - height:.1f}"'
                    f' width="{max(right - left - gap, 0.8):.1f}" height="{height:.1f}"/>'
                )
            below += value
    return _svg([*scale.grid(show), *drawn, *axis.ticks(), *_hints(starts, window, axis, series, show)], series)


def lines(starts: Sequence[datetime], window: timedelta, series: Sequence[Series], show: Callable[[float], str]) -> str:
    """Draw a line for each series. A window without a value interrupts the line."""
    known = [value for one in series for value in one.values if value is not None]
    positive = [value for value in known if value > 0]
    highest = max(known, default=0)
    is_wide = bool(positive) and highest >= _LOG_FROM * min(positive)
    scale = _Logarithmic(min(positive), highest) if is_wide else _Linear(highest)
    axis = _Time(starts, window)
    drawn, ends = [], []
    for one in series:
        places = [
            (axis.x(start + window / 2), scale.y(value)) if value is not None else None
            for start, value in zip(starts, one.values, strict=True)
        ]
        for run in _runs(places):
            if len(run) == 1:
                drawn.append(f'<circle class="{one.style} dot" cx="{run[0][0]:.1f}" cy="{run[0][1]:.1f}" r="2.5"/>')
            else:
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in run)
                drawn.append(f'<polyline class="{one.style} line" points="{path}"/>')
        if last := [place for place in places if place is not None]:
            ends.append((last[-1][1], one.name))
    names = [
        f'<text class="name" x="{WIDTH - RIGHT + 3}" y="{y + 3.5:.1f}">{escape(name)}</text>'
        for y, name in _apart(ends, 11)
    ]
    return _svg([*scale.grid(show), *drawn, *names, *axis.ticks(), *_hints(starts, window, axis, series, show)], series)


class _Linear:
    def __init__(self, highest: float) -> None:
        self._step = _round_step(highest / 3) if highest > 0 else 1.0
        self._top = max(math.ceil(highest / self._step - 1e-9), 1) * self._step

    def y(self, value: float) -> float:
        return TOP + _PLOT_HEIGHT * (1 - max(value, 0) / self._top)

    def grid(self, show: Callable[[float], str]) -> list[str]:
        steps = range(round(self._top / self._step) + 1)
        return [_gridline(self.y(step * self._step), show(step * self._step), step == 0) for step in steps]


class _Logarithmic:
    def __init__(self, lowest: float, highest: float) -> None:
        self._low = math.floor(math.log10(lowest) + 1e-9)
        self._high = max(math.ceil(math.log10(highest) - 1e-9), self._low + 1)

    def y(self, value: float) -> float:
        power = math.log10(value) if value > 0 else self._low
        return TOP + _PLOT_HEIGHT * (1 - (max(power, self._low) - self._low) / (self._high - self._low))

    def grid(self, show: Callable[[float], str]) -> list[str]:
        stride = max(1, math.ceil((self._high - self._low) / 4))
        powers = range(self._low, self._high + 1, stride)
        return [_gridline(self.y(10.0**power), show(10.0**power), power == self._low) for power in powers]


class _Time:
    """The time axis, in UTC."""

    def __init__(self, starts: Sequence[datetime], window: timedelta) -> None:
        self._first, self._last = starts[0], starts[-1] + window
        self._span = (self._last - self._first).total_seconds()

    def x(self, at: datetime) -> float:
        return LEFT + _PLOT_WIDTH * (at - self._first).total_seconds() / self._span

    def ticks(self) -> list[str]:
        form = "%H:%M:%S" if self._span < 600 else "%H:%M" if self._span < 2 * 86400 else "%d %b"
        marks = [self._first + (self._last - self._first) * part / 3 for part in range(4)]
        anchors = ("start", "middle", "middle", "end")
        return [
            f'<text class="tick" x="{self.x(at):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{at:{form}}</text>'
            for at, anchor in zip(marks, anchors, strict=True)
        ]


def _hints(
    starts: Sequence[datetime],
    window: timedelta,
    axis: _Time,
    series: Sequence[Series],
    show: Callable[[float], str],
) -> list[str]:
    """Tooltips with the values of each window."""
    hints = []
    for place, start in enumerate(starts):
        values = [f"{one.name} {show(value)}" for one in series if (value := one.values[place]) is not None]
        left, right = axis.x(start), axis.x(start + window)
        text = escape(f"{start:%Y-%m-%d %H:%M:%S} UTC\n" + "\n".join(values))
        hints.append(
            f'<rect class="hint" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{_PLOT_HEIGHT}">'
            f"<title>{text}</title></rect>"
        )
    return hints


def _svg(parts: Sequence[str], series: Sequence[Series]) -> str:
    label = escape(", ".join(one.name for one in series))
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _gridline(y: float, label: str, is_base: bool) -> str:
    style = "base" if is_base else "grid"
    return (
        f'<line class="{style}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{escape(label)}</text>'
    )


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least - 1e-12)


def _runs(places: Sequence[tuple[float, float] | None]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for place in places:
        if place is None:
            runs.append([])
        else:
            runs[-1].append(place)
    return [run for run in runs if run]


def _apart(ends: list[tuple[float, str]], least: float) -> list[tuple[float, str]]:
    """Move labels up so that they do not overlap, starting with the lowest on the page."""
    placed = sorted(ends, reverse=True)
    for place, _ in enumerate(placed[1:], 1):
        y = min(placed[place][0], placed[place - 1][0] - least)
        placed[place] = (y, placed[place][1])
    shortfall = max((TOP - y for y, _ in placed), default=0)
    return [(y + max(shortfall, 0), name) for y, name in placed]
