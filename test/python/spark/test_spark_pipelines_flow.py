"""The metrics and the report of message flow: compared with PostgreSQL, in UTC, and as a self-contained page."""

import html.parser
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

pytest.importorskip("pyspark")

from pyspark.sql import functions as F

from pgqueue import Queue
from pgqueue.spark.options import OptionError
from pgqueue.spark.pipelines import (
    archive_to_parquet,
    dead_letter_report,
    flow_metrics,
    flow_report,
    read_dead_letters,
    read_finished,
    report_page,
    svg_charts,
)
from pgqueue.spark.pipelines.png_charts import draw
from pgqueue.spark.pipelines.report_page import DeadLetterGroup, Flow, Measure, render
from pgqueue.spark.pipelines.times import utc_day, utc_floor, window_of

Connection = psycopg.Connection[Any]

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


@pytest.fixture
def elsewhere(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the session and the process to different time zones with half-hour offsets."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    monkeypatch.setenv("TZ", "America/St_Johns")
    time.tzset()
    yield
    spark.conf.set("spark.sql.session.timeZone", before)
    monkeypatch.undo()
    time.tzset()


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


@pytest.mark.usefixtures("elsewhere")
def test_percentiles_equal_those_of_percentile_cont(
    spark: Any, database: str, connection: Connection, busy: str
) -> None:
    window = timedelta(minutes=30)
    expected = connection.execute(EXPECTED, {"queue": busy, "window": window}).fetchall()
    assert len(expected) > 4
    finished = read_finished(spark, queues=[busy], dsn=database)
    metrics = flow_metrics(finished, window=window).withColumn("window_start", F.unix_micros("window_start"))
    found = metrics.collect()
    for row, (start, count, retried, retries, wait, processing) in zip(found, expected, strict=True):
        assert row["window_start"] == round(start.timestamp() * 1e6)
        assert (row["finished"], row["retried"], row["retries"]) == (count, retried, retries)
        waited, processed = ([row[f"{what}_p{rank}"] for rank in (50, 95, 99)] for what in ("wait", "processing"))
        assert waited == pytest.approx(wait, rel=1e-9)
        assert processed == pytest.approx(processing, rel=1e-9)


def test_approximate_percentiles_are_within_their_accuracy(
    spark: Any, database: str, connection: Connection, busy: str
) -> None:
    finished = read_finished(spark, queues=[busy], dsn=database)
    (row,) = flow_metrics(finished, window=None, accuracy=100).collect()
    between = """
    select percentile_disc(array[0.48, 0.52]) within group (order by extract(epoch from claimed_at - enqueued_at))
    from pgqueue.archived_messages where queue_name = %s
    """
    ((low, high),) = connection.execute(between, [busy]).fetchone() or ((0, 0),)
    assert low <= row["wait_p50"] <= high


@pytest.mark.usefixtures("elsewhere")
def test_dead_letters_count_in_the_window_of_their_death(spark: Any) -> None:
    finished = spark.sql(
        "select 'q' as queue_name, timestamp'2026-06-30 23:10:00Z' as finished_at, null as claimed_at,"
        " 1 as attempt_count,"
        " timestamp'2026-06-30 23:09:00Z' as enqueued_at"
    )
    dead = spark.sql(
        "select 'q' as queue_name, explode(array(timestamp'2026-06-30 23:59:59.999999Z',"
        " timestamp'2026-07-01 00:00:00Z',"
        " timestamp'2026-07-01 00:59:59Z')) as died_at"
    )
    rows = flow_metrics(finished, dead).withColumn("window_start", F.unix_micros("window_start")).collect()
    told = [(row["window_start"], row["finished"], row["dead"], row["failure_rate"], row["wait_p50"]) for row in rows]
    before, after = (round((MIDNIGHT + timedelta(hours=hours)).timestamp() * 1e6) for hours in (-1, 0))
    assert told == [(before, 1, 1, 0.5, None), (after, 0, 2, 1.0, None)]
    # One window for all messages has no start.
    (row,) = flow_metrics(finished, dead, window=None).collect()
    assert (row["window_start"], row["finished"], row["dead"], row["failure_rate"]) == (None, 1, 3, 0.75)


@pytest.mark.usefixtures("elsewhere")
def test_days_and_windows_are_in_utc(spark: Any) -> None:
    moments = spark.sql(
        "select explode(array(timestamp'2026-06-30 23:59:59.999999Z', timestamp'2026-07-01 00:00:00Z',"
        " timestamp'1969-12-31 23:59:59.999999Z')) as at"
    )
    row = moments.select(
        utc_day(F.col("at")).cast("string").alias("day"),
        F.unix_micros(utc_floor(F.col("at"), timedelta(days=1))).alias("start"),
    ).collect()
    day = 86_400_000_000
    start = round(MIDNIGHT.timestamp() * 1e6)
    assert [tuple(one) for one in row] == [("2026-06-30", start - day), ("2026-07-01", start), ("1969-12-31", -day)]


@pytest.mark.usefixtures("elsewhere")
def test_a_report_counts_messages_in_both_archive_and_parquet_once(
    spark: Any, database: str, busy: str, tmp_path: Path
) -> None:
    archive_to_parquet(spark, str(tmp_path / "parquet"), dsn=database, queues=[busy])
    report = flow_report(
        spark,
        tmp_path / "report",
        [busy],
        dsn=database,
        path=str(tmp_path / "parquet"),
        # A time without a time zone is in UTC, not in the time zone of the process.
        since=(MIDNIGHT - timedelta(hours=1)).replace(tzinfo=None),
        until=MIDNIGHT,
        window=timedelta(hours=1),
        plots=True,
    )
    # 3,600 s, one each 2.71828 s.
    (total,) = report.flow.totals
    assert (total.finished, total.dead) == (1324, 1)
    (window,) = report.flow.windows
    assert window.window_start == MIDNIGHT - timedelta(hours=1)
    assert [letters.error for letters in report.flow.letters] == ["ValueError: <b>flight <n></b> & <text>"]
    assert report.page.read_text().count("2026-06-30 23:00:00") >= 2
    (picture,) = report.pictures
    assert picture.name == "flow.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_more_than_10_000_windows_are_refused(spark: Any, database: str, busy: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"invalid window: 2:\d\d:.* has more than 10,000 windows of 0:00:00.5"):
        flow_report(spark, tmp_path, [busy], dsn=database, window=timedelta(seconds=0.5))
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("window", [timedelta(0), timedelta(seconds=-1)])
def test_a_window_must_be_longer_than_zero(
    spark: Any, database: str, busy: str, tmp_path: Path, window: timedelta
) -> None:
    with pytest.raises(OptionError, match="invalid window: "):
        flow_report(spark, tmp_path, [busy], dsn=database, window=window)
    letters = read_dead_letters(spark, [busy], dsn=database)
    with pytest.raises(OptionError, match=r"invalid window: .*; must be longer than 0"):
        dead_letter_report(letters, window)


class Page(html.parser.HTMLParser):
    """Collects the addresses that a page requests, and its unclosed tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.asked += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def measure(queue: str, start: datetime | None, finished: int = 10, wait: float | None = 0.5) -> Measure:
    return Measure(queue, start, finished, 1, 2, 3, 1 / (finished + 1), wait, wait, wait, 0.001, 0.5, 60.0)


def test_the_page_makes_no_requests_and_escapes_messages() -> None:
    queue = "<script>alert(1)</script>"
    hour = timedelta(hours=1)
    windows = [measure(queue, MIDNIGHT), measure(queue, MIDNIGHT + 3 * hour, 0, None)]
    letters = [DeadLetterGroup(queue, "rejected", "</td><img src=//evil.example/x>\x1b[2J\x9b \u202e", 3, MIDNIGHT)]
    text = render(Flow(hour, [measure(queue, None)], windows, letters, MIDNIGHT, "Read from <archive>"))
    found = Page(text)
    assert found.open == []
    assert found.asked == []
    assert not {"script", "img", "link", "iframe", "object"} & set(found.tags)
    assert not re.search(r"url\(|@import|https?://", text)
    # Control characters are replaced, and characters that reverse text only affect their own cell.
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert "�[2J� \u202e</td>" in text
    assert "td.text { unicode-bidi: isolate;" in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    # Empty windows between others are included.
    assert text.count("2026-07-01 0") >= 4
    assert text.count('<rect class="hint"') == 4 * 4


def test_charts_have_room_for_labels_and_accept_negative_durations() -> None:
    assert [svg_charts.share(5.0), svg_charts.share(12.3456), svg_charts.seconds(2e8), svg_charts.count(999.6)] == [
        "500 %",
        "1,235 %",
        "2,315 d",
        "1,000",
    ]
    # The font size is 11 pixels, and a digit is less than 0.64 of that wide in any font.
    labels = [
        show(10.0**power) for show in (svg_charts.count, svg_charts.share, svg_charts.seconds) for power in range(-6, 3)
    ]
    assert max(map(len, labels)) * 11 * 0.64 + 5 <= svg_charts.LEFT
    hour = timedelta(hours=1)
    late = svg_charts.Series("p50", "low", [-5.0, 1.0])
    (points,) = re.findall(
        'points="([^"]*)"', svg_charts.lines([MIDNIGHT, MIDNIGHT + hour], hour, [late], svg_charts.seconds)
    )
    base = svg_charts.HEIGHT - svg_charts.BOTTOM
    assert [float(point.split(",")[1]) for point in points.split()] == [base, svg_charts.TOP]


def test_png_charts_have_no_object_for_each_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With an object for each, 10,000 windows would take a minute. Finding the best place for a legend is also slow.
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    hour = timedelta(hours=1)
    windows = [measure("q", MIDNIGHT + number * hour) for number in range(100)]
    draw(Flow(hour, [measure("q", None)], windows, [], MIDNIGHT, "Read"), tmp_path)
    (figure,) = drawn
    assert [len(axes.patches) + len(axes.lines) for axes in figure.axes] == [2, 2, 3, 3]
    assert all(axes.get_legend().get_bbox_to_anchor().y0 == axes.bbox.y1 for axes in figure.axes)


def test_png_charts_start_at_zero_and_show_the_whole_queue_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    dates = pytest.importorskip("matplotlib.dates")
    drawn: list[Any] = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    hour = timedelta(hours=1)
    # One window; only dead letters; a negative wait, as clocks can differ.
    for finished, wait, lowest in ((10, 0.5, 0), (0, None, 0), (10, -2.0, -2)):
        draw(
            Flow(
                hour, [measure("q" * 128, None)], [measure("q" * 128, MIDNIGHT, finished, wait)], [], MIDNIGHT, "Read"
            ),
            tmp_path,
        )
        figure = drawn.pop()
        assert [axes.get_xlim() for axes in figure.axes] == [tuple(dates.date2num([MIDNIGHT, MIDNIGHT + hour]))] * 4
        assert [axes.get_ylim()[0] for axes in figure.axes] == [0, 0, lowest, 0]
        title = figure.get_suptitle()
        assert (title.replace("\n", ""), max(map(len, title.splitlines()))) == ("q" * 128, 90)


def test_only_the_busiest_queues_have_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hour = timedelta(hours=1)
    names = [f"q{number}" for number in range(1000)]
    totals = [measure(name, None, finished) for finished, name in enumerate(names)]
    flow = Flow(hour, totals, [measure(name, MIDNIGHT) for name in names], [], MIDNIGHT, "Read")
    text = render(flow)
    assert [name for name in names if f"<h2>{name}</h2>" in text] == names[-100:]
    assert all(f">{name}</td>" in text for name in names)
    assert "The 100 busiest of 1,000 queues have charts." in text
    figures = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(figures.Figure, "savefig", lambda *_, **__: None)
    monkeypatch.setattr(report_page, "_MAX_CHARTED", 2)
    assert [picture.stem for picture in draw(flow, tmp_path)] == names[-2:]


def test_a_page_without_messages_says_so() -> None:
    assert "no message was finished, and none died" in render(Flow(timedelta(hours=1), [], [], [], MIDNIGHT, "Read"))


def test_default_windows_are_round_and_at_most_120() -> None:
    for whole in (timedelta(0), timedelta(seconds=90), timedelta(hours=7), timedelta(days=40), timedelta(days=800)):
        assert whole / window_of(whole) <= 120
    assert window_of(timedelta(hours=2)) == timedelta(minutes=1)
