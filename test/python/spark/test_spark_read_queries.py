"""Batch reads through a session of Spark."""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from sparks import long

from pgqueue import Queue

if TYPE_CHECKING:
    from pyspark.errors import AnalysisException


Loads = Callable[..., Any]


@pytest.fixture
def load(spark: Any, database: str, name: str) -> Callable[..., Any]:
    def load(schema: str | None = None, **options: str) -> Any:
        reader = spark.read.format("pgqueue").options(**{"dsn": database, "queue": name} | options)
        return (reader if schema is None else reader.schema(schema)).load()

    return load


def test_spark_reads_a_queue(orders: Queue, load: Loads) -> None:
    sent = orders.enqueue_batch([{"n": n} for n in range(3000)])
    frame = load(numPartitions="3")
    assert frame.rdd.getNumPartitions() == 3
    found = frame.selectExpr(
        "count(*)", "count(distinct id)", "min(id)", "max(id)", "sum(get_json_object(payload, '$.n'))"
    ).collect()
    assert tuple(found[0]) == (3000, 3000, sent[0], sent[-1], sum(range(3000)))
    (row,) = load("enqueued_at timestamp, payload string").where("payload = '{\"n\": 7}'").collect()
    (message,) = orders.browse(max_messages=1, after_id=sent[6])
    assert row.enqueued_at.astimezone(datetime.UTC) == message.enqueued_at


@long
@pytest.mark.usefixtures("orders")
def test_spark_shows_option_errors_but_never_a_password(
    database: str, load: Loads, capfd: pytest.CaptureFixture[str]
) -> None:
    for options, message in (
        ({"sauce": "dead"}, "did you mean source?"),
        ({"numPartitions": "many"}, "invalid option numPartitions: 'many' is not an integer from 1 to 1000"),
    ):
        with pytest.raises(AnalysisException) as raised:
            load(**options).collect()
        assert message in str(raised.value)
    load(dsn=f"{database} password=s3cret").explain("extended")
    load(user="postgres", password="s3cret").explain("extended")
    with pytest.raises(AnalysisException) as raised:
        load(dsn="host=/nowhere password=s3cret", retryTimeout="0").collect()
    assert "s3cret" not in str(raised.value) + "".join(capfd.readouterr())


WITHOUT_PANDAS = """
import sys
from pgqueue.spark.source import PgQueueDataSource

source = PgQueueDataSource(dict(zip(("dsn", "queue"), sys.argv[1:])))
reader = source.reader(source.schema())
print(sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part)), "pandas" in sys.modules)
"""


def test_tasks_read_without_an_import_of_pandas(orders: Queue, database: str) -> None:
    assert find_spec("pandas") is not None
    orders.enqueue({"n": 1}, headers={"trace": "a"})
    orders.enqueue(body=b"raw")
    # Values for each place that makes a scalar: a null among texts, and a time outside the years of Spark.
    orders.connection.execute(
        "update pgqueue.messages set expires_at = 'infinity' where queue_name = %s", [orders.name]
    )
    command = [sys.executable, "-c", WITHOUT_PANDAS, database, orders.name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 False\n", "")
