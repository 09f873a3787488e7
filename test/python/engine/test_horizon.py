"""The adapter of pgqueue for the long-horizon harness (test/bench/harness), and the runner of its phases."""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest
from clients import PATIENCE, wait_for
from psycopg.conninfo import make_conninfo
from rich.console import Console

from pgqueue.embedded import EmbeddedServer

sys.path.append(str(Path(__file__).parents[2] / "bench"))
sys.path.append(str(Path(__file__).parents[2] / "bench/harness"))

import horizon
import protocol
from charts import draw
from report import tables

pytestmark = pytest.mark.long(part="soak")

BENCH = Path(__file__).parents[2] / "bench"
MANIFEST = json.loads((BENCH / "harness/adapter.json").read_text())
EVERY = 0.2
_numbers = count(1)
REQUIRED = {"claim_p50_ms", "claim_p95_ms", "claim_p99_ms", "enqueue_rate", "completion_rate", "queue_depth"}


class Adapter:
    """A process of the adapter with the environment of the harness, and what it wrote."""

    def __init__(self, server: EmbeddedServer, database: str, **settings: str) -> None:
        self.dsn = make_conninfo(server.dsn, dbname=database)
        words = psycopg.conninfo.conninfo_to_dict(self.dsn)
        url = f"postgres://{words['user']}@/{database}?host={words['host']}&port={words['port']}"
        environment = {"DATABASE_URL": url, "SAMPLE_EVERY_S": str(EVERY), "PRODUCER_RATE": "100"} | settings
        self.process = subprocess.Popen(
            [sys.executable, BENCH / "harness/main.py"],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.records: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.records.extend(json.loads(line) for line in iter(self.process.stdout.readline, ""))

    def values(self, metric: str) -> list[float]:
        return [record["value"] for record in self.records if record.get("metric") == metric]

    def terminate(self) -> int:
        self.process.terminate()
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def own_server() -> Iterator[EmbeddedServer]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(horizon, "EmbeddedServer", partial(EmbeddedServer, durable=False))
        with horizon.server() as server:
            yield server


@pytest.fixture
def start(own_server: EmbeddedServer) -> Iterator[Callable[..., Adapter]]:
    """A function that starts an adapter in a new database and waits for its descriptor."""
    started: list[Adapter] = []

    def start(**settings: str) -> Adapter:
        database = f"bench_{next(_numbers)}"
        with psycopg.connect(own_server.dsn, autocommit=True) as connection:
            connection.execute(f"create database {database}".encode())
        started.append(Adapter(own_server, database, **settings))
        wait_for(lambda: bool(started[-1].records) or started[-1].process.poll() is not None)
        return started[-1]

    yield start
    for adapter in started:
        adapter.close()


def test_the_adapter_describes_itself_and_every_tick_has_all_required_metrics(start: Callable[..., Adapter]) -> None:
    adapter = start()
    wait_for(lambda: len(adapter.values("queue_depth")) > 3)
    descriptor, *records = adapter.records
    assert (descriptor["kind"], descriptor["system"]) == ("descriptor", MANIFEST["system"])
    assert set(descriptor["event_tables"]) >= set(MANIFEST["event_tables"])
    assert set(descriptor["extensions"]) >= set(MANIFEST["extensions"])
    assert {"version", "schema_version", "db_name", "started_at"} < descriptor.keys()
    with psycopg.connect(adapter.dsn) as connection:
        kinds = [
            connection.execute("select relkind::text from pg_class where oid = to_regclass(%s)", [name]).fetchone()
            for name in MANIFEST["event_tables"] + MANIFEST["event_indexes"]
        ]
        assert connection.execute("select pgqueue._is_compaction_on()").fetchone() == (True,)
    # A partitioned table has neither rows nor statistics of its own.
    assert kinds == [("r",)] * len(MANIFEST["event_tables"]) + [("i",)] * len(MANIFEST["event_indexes"])
    ticks: dict[str, set[str]] = defaultdict(set)
    for record in records:
        assert record["kind"] == record["subject_kind"] == "adapter"
        assert (record["system"], record["subject"], record["instance_id"]) == ("pgqueue", "", 0)
        assert record["window_s"] in (0, EVERY, 30)
        ticks[record["t"]].add(record["metric"])
    *whole, _ = ticks.items()
    for at, metrics in whole:
        assert metrics >= REQUIRED
        assert round(datetime.fromisoformat(at).timestamp() * 1000) % round(EVERY * 1000) == 0
    wait_for(lambda: max(adapter.values("claim_p99_ms")) > 0)
    assert adapter.terminate() == 0


def test_percentiles_are_exact_to_a_thousandth_and_forget_after_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(protocol.time, "monotonic", lambda: now)
    latencies = protocol.Latencies()
    assert latencies.percentiles() == {"p50": 0, "p95": 0, "p99": 0}
    for ms in range(1, 1001):
        latencies.add(float(ms))
    assert latencies.percentiles() == pytest.approx({"p50": 500, "p95": 950, "p99": 990}, rel=0.001)
    now += protocol.WINDOW - 1
    latencies.add(7.0, 9000)
    assert latencies.percentiles()["p50"] == pytest.approx(7, rel=0.001)
    assert latencies.percentiles()["p99"] == pytest.approx(900, rel=0.001)
    now += 1
    assert latencies.percentiles()["p99"] == pytest.approx(7, rel=0.001)


def test_all_phases_run_and_their_figures_become_tables_and_charts(
    own_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(horizon, "server", lambda: nullcontext(own_server))
    phases = [horizon.Phase(kind, 0.5) for kind in dict.fromkeys(horizon.SEQUENCE)]
    options = argparse.Namespace(
        systems=["pgqueue"], rate=200.0, workers=4, every=EVERY, output=tmp_path / "results/horizon.json"
    )
    report = horizon.measure(options, phases, Console(quiet=True))
    assert json.loads(options.output.read_text()) == report
    cells = report["parts"]["horizon"]["cells"]
    assert [cell["phase"] for cell in cells] == [phase.kind for phase in phases]
    assert {phase.kind for phase in phases} == set(horizon.ACTS)
    for cell in cells:
        assert (cell["system"], cell["exits"]) == ("pgqueue", 0), cell
    # The machine may be so slow that a phase of half a second has no sample.
    for figure in ("rate", "enqueued", "p99_ms", "bytes"):
        assert any((cell[figure] or 0) > 0 for cell in cells), figure
    found = list(tables(report["parts"]["horizon"]))
    assert [len(rows) for _, _, rows, _ in found] == [len(phases)] * 5
    assert all(chart.stat().st_size > 0 for chart in draw(report, options.output.parent))
