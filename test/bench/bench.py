"""Measures pgqueue and its peers on its own servers.

Systems take turns within a round. Queues are filled before every cell; if a queue runs empty, the cell is repeated on a
deeper queue. Each part replaces its own figures in results/latest.json. README.md in this directory describes what is
measured, and how to read it.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from charts import draw
from environment import RESULTS, circumstances, servers
from report import tables
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

LATEST = RESULTS / "latest.json"


def measure(names: list[str], options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure these parts, write the figures of each to the JSON file as soon as it is done, and return all."""
    from all_peers import ALL
    from calls import run_calls
    from cost import run_cost
    from latency import run_latency
    from plan import parts  # the peers behind these need the group `bench`
    from pressure import run_pressure
    from runner import Testbed, run_part

    run = {"latency": run_latency, "cost": run_cost, "calls": run_calls}
    run |= dict.fromkeys(("pressure", "pinned", "endurance", "mixed", "groups_pinned"), run_pressure)
    found = json.loads(options.output.read_text()) if options.output.exists() else {}
    report = {"parts": found.get("parts", {})}
    plan = {name: parts(options.full)[name].shortened(options.rounds, options.seconds) for name in names}
    expected = {name: part.expected for name, part in plan.items()}
    console.print(", ".join(f"{name} {took / 60:.1f}" for name, took in expected.items()), end="")
    console.print(f": {sum(expected.values()) / 60:.1f} minutes, about")
    majors = {18}.union(*(part.majors for part in plan.values()))
    columns = (TextColumn("{task.description:48.48}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with (
        servers(majors) as running,
        Progress(*columns, TimeRemainingColumn(), console=console, speed_estimate_period=300) as progress,
    ):
        testbed = Testbed(running, ALL)
        whole = progress.add_task("all parts, and time left", total=sum(expected.values()))
        try:
            for name, part in plan.items():
                about, began = circumstances(running), time.monotonic()
                steps = part.rounds * sum(len(testbed.systems(cell)) for cell in part.cells) or part.steps
                task = progress.add_task(name, total=steps)

                def tell(what: str, done: int, task: Any = task, name: str = name) -> None:
                    progress.update(task, advance=done, description=f"{name}: {what}")
                    progress.update(whole, advance=done * expected[name] / progress.tasks[task].total)

                cells = run.get(name, run_part)(testbed, part, tell)
                report["parts"][name] = {
                    "title": part.title,
                    "mode": "full" if options.full else "quick",
                    "rounds": part.rounds,
                    "circumstances": about,
                    "missing": {each: testbed.missing[each] for each in part.systems if each in testbed.missing},
                    "cells": cells,
                }
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
                progress.update(task, description=name, completed=steps)
                if not console.is_terminal:
                    console.print(f"{name}: {time.monotonic() - began:.0f} s")
        finally:
            testbed.close()
    return report


def show(report: dict[str, Any], names: list[str], console: Console) -> None:
    """Print the tables of these parts."""
    for name in names:
        for title, headings, rows, note in tables(report["parts"][name]):
            table = Table(title=title, title_justify="left", title_style="bold")
            for place, heading in enumerate(headings):
                table.add_column(heading, justify="right" if place else "left")
            for row in rows:
                table.add_row(*row)
            console.print(table)
            console.print(f"[dim]{note}\n")


def main() -> None:
    """Measure the parts on the command line, or print earlier figures."""
    from plan import QUICK, parts

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(parts(full=True))
    parser.add_argument("--full", action="store_true", help="more cells, rounds and seconds; takes hours")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"parts to measure, of {names}")
    parser.add_argument("--rounds", type=int, help="rounds of every part")
    parser.add_argument("--seconds", type=float, help="seconds of every cell")
    parser.add_argument("--output", type=Path, default=LATEST, help="JSON file; charts are written to its directory")
    parser.add_argument("--show", action="store_true", help="do not measure; print and draw the last figures")
    options = parser.parse_args()
    if options.only is None:
        options.only = names if options.full or options.show else list(QUICK)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
    if options.show:
        if not options.output.exists():
            parser.error(f"nothing was measured yet: {options.output} is missing")
        report = json.loads(options.output.read_text())
    else:
        report = measure(options.only, options, console)
    show(report, [name for name in options.only if name in report["parts"]], console)
    for chart in draw(report, options.output.parent):
        console.print(f"[dim]{chart}")


if __name__ == "__main__":
    main()
