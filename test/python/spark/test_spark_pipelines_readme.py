"""The chapter on Spark: its example runs, and its tables are complete."""

import re
from pathlib import Path
from typing import Any

import psycopg
import pytest

pytest.importorskip("pyspark")

from pgqueue import Queue
from pgqueue.spark import OPTIONS, pipelines

CHAPTER = (Path(pipelines.__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_example_runs(spark: Any, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", CHAPTER, re.DOTALL)
    example = example.replace('.format("pgqueue")', f'.format("pgqueue").option("dsn", {database!r})')
    with psycopg.connect(database, autocommit=True) as connection:
        orders, bills = Queue(connection, "orders"), Queue(connection, "bills")
        orders.create_queue()
        bills.create_queue()
        orders.enqueue({"order_id": 1001})
        exec(example.replace("/srv/billing", str(tmp_path)), {})
        (bill,) = bills.claim(10)
        assert bill.payload["order_id"] == "1001"
        assert orders.peek() == 0
        orders.drop_queue()
        bills.drop_queue()
    assert '{"order_id": "1001", "enqueued_at": "20' in capsys.readouterr().out
    assert spark.range(1).count() == 1


def test_the_table_has_all_options() -> None:
    table = CHAPTER.partition("| option |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(option.name for option in OPTIONS)


def test_the_table_has_pipelines_that_there_are() -> None:
    table = CHAPTER.partition("## Pipelines")[2].partition("```")[0]
    named = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert len(named) == 6
    assert set(named) <= set(pipelines.__all__)
