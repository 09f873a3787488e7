"""Words in the messages and the arguments of every part of the package."""

import re
from datetime import timedelta

__all__ = ["counted", "duration", "format_duration"]

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_PART = re.compile(rf"({_NUMBER.pattern})(ms|[smhd])")


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number with the words after it: 1 message, 2 messages. `many` is given if `one` is not all that changes."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def duration(text: str) -> timedelta:
    """The duration that 30s, 5m, 1h30m, 250ms, 7d, or 90, which is in seconds, means. Raises `ValueError`."""
    whole = f"{text}s" if _NUMBER.fullmatch(text) else text
    parts: list[tuple[str, str]] = _PART.findall(whole)
    if not parts or "".join(number + unit for number, unit in parts) != whole:
        raise ValueError(f"{text!r} is not a duration: write 30s, 5m, 1h30m, 250ms, 7d, or seconds.")
    try:
        return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in parts))
    except OverflowError:
        raise ValueError(f"{text!r} is too long for a duration.") from None


def format_duration(length: timedelta) -> str:
    """A duration in its two largest units, in the form that `duration` reads."""
    seconds = length.total_seconds()
    if 0 < seconds < 60:  # rounded first: 0.9996 s is 1s, not 1e+03ms
        seconds = float(f"{seconds:.3g}")
    if 0 < seconds < 1:
        return f"{seconds * 1000:g}ms"
    if seconds < 60 and not seconds.is_integer():
        return f"{seconds:g}s"
    parts, rest = [], int(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if rest >= size:
            parts.append(f"{rest // size}{unit}")
            rest %= size
    return "".join(parts[:2]) or "0s"
