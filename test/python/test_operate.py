"""The files of python/examples/operate name metrics, labels and options that exist."""

import json
import re
import shlex
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, cast

import psycopg
import pytest
from commands import in_process

import pgqueue
from pgqueue.http.metrics import Metrics
from pgqueue.http.sampling import Sampler

HERE = Path(__file__).parents[2] / "python/examples/operate"
LABELS = {"service", "database", "queue", "operation", "route", "status", "kind", "le"}


class NoQueues:
    """What the metrics read of a sampler."""

    last_message_ids: ClassVar[list[Any]] = []

    def histories(self) -> list[Any]:
        return []


def exported() -> set[str]:
    """The names of all series of the service."""
    text = Metrics(cast("Sampler", NoQueues())).exposition().decode()
    found = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    histograms = [name for name, kind in found.items() if kind == "histogram"]
    return found.keys() | {f"{name}_{part}" for name in histograms for part in ("bucket", "count", "sum")}


def expressions(name: str) -> list[str]:
    text = (HERE / name).read_text(encoding="utf-8")
    if name == "dashboard.json":
        dashboard = json.loads(text)
        queries = [variable.get("definition", "") for variable in dashboard["templating"]["list"]]
        return queries + [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return re.findall(r"expr: (?:>-\n)?(.+?)\n +(?:for|labels):", text, re.DOTALL)


@pytest.mark.parametrize(("name", "least"), [("alerts.yaml", 6), ("dashboard.json", 13)])
def test_each_expression_names_metrics_and_labels_of_the_service(name: str, least: int) -> None:
    found = expressions(name)
    assert len(found) >= least
    for expression in filter(None, found):
        names = re.findall(r"\bpgqueue_\w+", expression)
        assert names, expression
        assert set(names) <= exported(), expression
        assert set(re.findall(r"(\w+)=~?\"", expression)) <= LABELS, expression


def test_the_query_for_keda_counts_what_a_consumer_could_work_on(
    pgqueue_new_queue: Callable[..., pgqueue.Queue], pgqueue_connection: psycopg.Connection[Any]
) -> None:
    orders = pgqueue_new_queue("orders")
    orders.enqueue_batch([1, 2, 3])
    orders.claim()
    orders.enqueue(4, delay=timedelta(hours=1))
    (query,) = re.findall(r"query: (.*)", (HERE / "keda.yaml").read_text(encoding="utf-8"))
    assert pgqueue_connection.execute(query).fetchone() == (3,)


def test_the_services_use_options_that_exist() -> None:
    units = [re.findall(r"ExecStart=\S+/pgqueue (.*)", path.read_text()) for path in HERE.glob("*.service")]
    manifest = (HERE / "kubernetes.yaml").read_text(encoding="utf-8")
    worker, *others = [re.sub(r"[,\"]", " ", line) for line in re.findall(r"args: \[(.*)\]", manifest)]
    lines = [line for unit in units for line in unit] + [f"work {worker}", *others]
    assert len(lines) == 5
    for command, *words in map(shlex.split, lines):
        known = in_process("", command, "--help").out
        for option in (word for word in words if word.startswith("--")):
            assert re.search(rf"{option}\b", known), (command, option)
