"""The files of python/examples/operate name metrics, labels and options that exist, and compose.yaml makes a shop."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, cast

import httpx
import psycopg
import pytest
import yaml  # type: ignore[import-untyped]
from clients import Connection, free_port, wait_for
from commands import COMMAND, NewDatabase, environment, in_process

import pgqueue
from pgqueue.http.metrics import Metrics, Sampler

HERE = Path(__file__).parents[2] / "python/examples/operate"
DOCKER = Path(__file__).parents[1] / "docker"
LABELS = {"service", "database", "queue", "operation", "route", "status", "kind", "le"}


class NoQueues:
    """What the metrics read of a sampler."""

    last_message_ids: ClassVar[dict[tuple[str, str], int]] = {}

    def all_samples(self) -> list[Any]:
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
def test_each_expression_names_metrics_and_labels_and_is_one_series_for_each_queue(name: str, least: int) -> None:
    found = expressions(name)
    assert len(found) >= least
    for expression in filter(None, found):
        names = re.findall(r"\bpgqueue_\w+", expression)
        assert names, expression
        assert set(names) <= exported(), expression
        assert set(re.findall(r"(\w+)=~?\"", expression)) <= LABELS, expression
        outside = re.sub(r"max by \(service, database, queue\) \((?:[^()]|\([^()]*\))*\)", "", expression)
        assert expression.startswith("label_values") or not re.findall(r"\bpgqueue_(?!http_)\w+", outside), expression


def test_the_query_for_keda_counts_what_a_consumer_could_work_on(
    pgqueue_new_queue: Callable[..., pgqueue.Queue], pgqueue_connection: Connection
) -> None:
    orders = pgqueue_new_queue("orders")
    orders.enqueue_batch([1, 2, 3])
    orders.claim()
    orders.enqueue(4, delay=timedelta(hours=1))
    (query,) = re.findall(r"query: (.*)", (HERE / "keda.yaml").read_text(encoding="utf-8"))
    assert pgqueue_connection.execute(query).fetchone() == (3,)


def test_the_services_and_cron_use_options_that_exist() -> None:
    units = [re.findall(r"ExecStart=\S+/pgqueue (.*)", path.read_text()) for path in HERE.glob("*.service")]
    cron = re.findall(r"^\*/15 .*/pgqueue (.*)", (HERE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    manifest = (HERE / "kubernetes.yaml").read_text(encoding="utf-8")
    worker, *others = [re.sub(r"[,\"]", " ", line) for line in re.findall(r"args: \[(.*)\]", manifest)]
    lines = [line for unit in units for line in unit] + [f"work {worker}", *others, *cron]
    assert len(lines) == 6
    for command, *words in map(shlex.split, lines):
        known = in_process("", command, "--help").out
        for option in (word for word in words if word.startswith("--")):
            assert re.search(rf"{option}\b", known), (command, option)


def test_a_service_monitor_leaves_the_labels_of_the_metrics_as_the_rules_and_the_dashboard_need_them() -> None:
    text = "\n---\n".join((HERE / name).read_text() for name in ("kubernetes.yaml", "servicemonitor.yaml"))
    *_, service, _, monitor = yaml.safe_load_all(text)
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["honorLabels"] is True  # else Prometheus renames their label service to exported_service
    assert endpoint["authorization"]["credentials"]["name"] == "pgqueue"  # /metrics is for users only


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.long(part="release")
def test_the_services_of_compose_are_a_shop(empty_database: NewDatabase) -> None:
    """Their commands run as processes of this machine, on a server of the tests."""
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    image = (DOCKER / "serve.Dockerfile").read_text(encoding="utf-8")
    dsn = in_process(empty_database(), "dsn", "--url").out.strip()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create extension pgqueue")
    ports = {"8000": str(free_port()), "8080": str(free_port())}
    urls = {port: f"http://127.0.0.1:{ports[port]}" for port in ports}

    def start(name: str, *more: str) -> "subprocess.Popen[bytes]":
        service = services[name]
        words = service.get("command") or json.loads(re.findall(r"^CMD (.*)", image, re.MULTILINE)[-1])
        program = [sys.executable, "-c"] if service.get("entrypoint") == ["python", "-c"] else COMMAND
        words = [word.replace("0.0.0.0", "127.0.0.1").replace("8000", ports["8000"]) for word in words]
        given = {key: re.sub(r"postgresql://.*", lambda _: dsn, text) for key, text in service["environment"].items()}
        shop = DOCKER.parents[1] / "python/examples/fastapi_shop"
        return subprocess.Popen([*program, *words, *more], cwd=shop, env=environment(**given))

    with ExitStack() as stack:

        def run(name: str, *more: str) -> None:
            process = start(name, *more)
            stack.callback(process.wait)
            stack.callback(process.terminate)

        run("app")
        run("serve", "--port", ports["8080"])
        wait_for(lambda: answers(f"{urls['8000']}/openapi.json"))
        placed = httpx.post(f"{urls['8000']}/orders", json={"article": "book"}).json()
        assert placed["shipped_at"] is None
        run("worker")
        wait_for(lambda: httpx.get(f"{urls['8000']}/orders/{placed['id']}").json()["shipped_at"])
        wait_for(lambda: answers(f"{urls['8080']}/readyz"))
        password = services["serve"]["environment"]["PGQUEUE_PASSWORD"]
        stats = httpx.get(f"{urls['8080']}/v1/queues/orders/stats", auth=("admin", password)).json()
        assert (stats["enqueued_total"], stats["acknowledged_total"]) == (1, 1)
