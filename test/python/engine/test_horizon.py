"""The runner of the phases of the long-horizon harness (test/bench/harness), with the adapter of pgqueue."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from pgqueue.embedded import EmbeddedServer

sys.path.append(str(Path(__file__).parents[2] / "bench"))
sys.path.append(str(Path(__file__).parents[2] / "bench/harness"))

import horizon
from charts import draw
from report import tables

pytestmark = pytest.mark.long(part="soak")


def test_all_phases_run_and_their_figures_become_tables_and_charts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(horizon, "EmbeddedServer", partial(EmbeddedServer, durable=False))
    phases = [horizon.Phase(kind, 0.5) for kind in dict.fromkeys(horizon.SEQUENCE)]
    options = argparse.Namespace(
        systems=["pgqueue"], rate=200.0, workers=4, every=0.2, output=tmp_path / "results/horizon.json"
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
