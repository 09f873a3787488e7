"""The metrics and the report of message flow: compared with PostgreSQL, in UTC, and as a self-contained page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from clients import Connection
from sparks import long

from pgqueue import Queue

if TYPE_CHECKING:
    from pgqueue.demo.report_page import render
    from pgqueue.spark import pipelines
    from pgqueue.spark.options import OptionError
    from pgqueue.spark.pipelines import Flow, Measure, archive_to_parquet, flow_report, read_dead_letters, replay


# Messages in two hours around midnight UTC, with skewed durations and ties. Some were received and never claimed.
FINISH = """
insert into pgqueue.unfiled_messages
    (id, queue_name, payload, attempt_count, max_attempts, enqueued_at, claimed_at, finished_at)
select nextval('pgqueue.message_id'), %(queue)s, '{}', 1 + g %% 3, 5, f - w - p, case when g %% 10 > 0 then f - p end, f
from generate_series(1, %(messages)s) g,
    lateral (select '2026-06-30 22:30:00.123456+00'::timestamptz + g * interval '2.71828 s' as f) a,
    lateral (select power(10, (hashint4(g) & 1023) / 256.0) * interval '0.000317 s' as w) b,
    lateral (select power(10, (hashint4(-g) & 255) / 64.0) * interval '0.000031 s' as p) c
"""
EXPECTED = """
select date_bin(%(window)s, finished_at, '1970-01-01 00:00+00'), count(*), count(*) filter (where attempt_count > 1),
    sum(attempt_count - 1),
    percentile_cont(array[0.5, 0.95, 0.99]) within group (order by w),
    percentile_cont(array[0.5, 0.95, 0.99]) within group (order by p)
from pgqueue.archived_messages,
    lateral (select extract(epoch from claimed_at - enqueued_at)::float8) a (w),
    lateral (select extract(epoch from finished_at - claimed_at)::float8) b (p)
where queue_name = %(queue)s group by 1 order by 1
"""
DIE = """
insert into pgqueue.dead_messages
    (id, queue_name, enqueued_at, died_at, attempt_count, max_attempts, payload, last_error, reason)
select nextval('pgqueue.message_id'), %s, d - interval '1 min', d, 5, 5, '{}',
    'ValueError: <b>flight 12</b> & "x"', 'attempts_exhausted'
from unnest(%s::timestamptz[]) d
"""
MIDNIGHT = datetime(2026, 7, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def busy(database: str) -> Iterator[str]:
    """A queue with 3,000 finished messages."""
    with psycopg.connect(database, autocommit=True) as connection:
        Queue(connection, "flow").create_queue(archive_for=timedelta(days=3000))
        connection.execute(FINISH, {"queue": "flow", "messages": 3000})
        connection.execute("select pgqueue.maintain_archive()")
        connection.execute(DIE, ["flow", [MIDNIGHT - timedelta(microseconds=1), MIDNIGHT, MIDNIGHT]])
        yield "flow"
        Queue(connection, "flow").drop_queue()


@long
@pytest.mark.usefixtures("elsewhere")
def test_a_report_has_the_figures_of_sql_and_counts_messages_in_both_archive_and_parquet_once(
    spark: Any, database: str, connection: Connection, busy: str, tmp_path: Path
) -> None:
    archive_to_parquet(spark, str(tmp_path / "parquet"), dsn=database, queues=[busy])
    hour, begin = timedelta(hours=1), MIDNIGHT - timedelta(hours=1)
    report = flow_report(
        spark,
        [busy],
        dsn=database,
        path=str(tmp_path / "parquet"),
        # A time without a time zone is in UTC, not in the time zone of the process.
        since=begin.replace(tzinfo=None),
        until=MIDNIGHT,
        window=hour,
    )
    rows = connection.execute(EXPECTED, {"queue": busy, "window": hour}).fetchall()
    (row,) = (row for row in rows if row[0] == begin)
    start, count, retried, retries, wait, processing = row
    # One dead letter of three died before midnight.
    figures = [count, 1, retried, retries, 1 / (count + 1), *wait, *processing]
    for found, at in ((report.totals, None), (report.windows, start)):
        (measure,) = found
        assert (measure.queue_name, measure.window_start) == (busy, at)
        assert [*asdict(measure).values()][2:] == pytest.approx(figures, rel=1e-9)
    (letters,) = report.letters
    assert (letters.error, letters.letters) == ("ValueError: <b>flight <n></b> & <text>", 1)


@long
def test_invalid_arguments_are_named(spark: Any, database: str, busy: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"invalid window: 2:\d\d:.* has more than 10,000 windows of 0:00:00.5"):
        flow_report(spark, [busy], dsn=database, window=timedelta(seconds=0.5))
    wrong: Any
    for wrong in ({"window": 3600}, {"window": timedelta(0)}, {"since": "2026-01-01"}, {"until": 1}):
        with pytest.raises(OptionError, match=f"invalid .*{next(iter(wrong))}"):
            flow_report(spark, [busy], dsn=database, **wrong)
    letters = read_dead_letters(spark, [busy], dsn=database)
    for window in (timedelta(0), timedelta(seconds=-1)):
        with pytest.raises(OptionError, match=r"invalid window: .*; must be a timedelta longer than 0"):
            pipelines.dead_letter_report(letters, window)
    path = str(tmp_path)
    for call in (
        lambda: flow_report(spark, busy, dsn=database),
        lambda: pipelines.read_finished(spark, queues=busy, dsn=database),
        lambda: read_dead_letters(spark, busy, dsn=database),
        lambda: archive_to_parquet(spark, path, dsn=database, queues=busy),
        lambda: replay(spark, path, busy, dsn=database, queues=busy),
    ):
        with pytest.raises(OptionError, match=f"invalid queues: '{busy}' is a string; pass a list of names"):
            call()


def measure(queue: str, start: datetime | None, finished: int = 10, wait: float | None = 0.5) -> Measure:
    return Measure(queue, start, finished, 1, 2, 3, 1 / (finished + 1), wait, wait, wait, 0.001, 0.5, 60.0)


def test_the_page_shows_any_text_and_names_no_other_host() -> None:
    hour = timedelta(hours=1)
    windows = [measure("<script>", MIDNIGHT), measure("<script>", MIDNIGHT + 3 * hour, 0, None)]
    letters = [
        pipelines.DeadLetterGroup("q", "rejected", "</td><img src=//evil.example/x>\x1b[2J\x9b \u202e", 3, MIDNIGHT)
    ]
    text = render(Flow(hour, [measure("<script>", None)], windows, letters, MIDNIGHT, "Read from <archive>"))
    # Control characters are replaced.
    assert "&lt;img src=//evil.example/x&gt;\ufffd[2J\ufffd \u202e</td>" in text
    assert "Read from &lt;archive&gt;" in text
    assert not re.search(r"<(script|link|img)[^>]* (src|href)=", text)


def test_a_page_without_messages_says_so() -> None:
    assert "no message was finished, and none died" in render(Flow(timedelta(hours=1), [], [], [], MIDNIGHT, "Read"))
