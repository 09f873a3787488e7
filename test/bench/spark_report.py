"""Prints the figures of spark.py as tables, and draws them."""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PARTS = ("sink", "read", "stream", "copy")
# The minimum for each part: a multiple of the rate of JDBC, or messages per second.
TARGETS = {"sink": 1.0, "read": 0.8, "stream": 20_000, "copy": 250_000}
# The minimum rate in the last third of a backlog, as a fraction of that in the first.
STEADY = 0.9


def spread(rates: list[float]) -> str:
    """Format the median, and the largest deviation from it."""
    median = statistics.median(rates)
    return f"{median:,.0f} ±{max(max(rates) - median, median - min(rates)) / median:.0%}"


def ratio(ours: list[float], theirs: list[float]) -> list[float]:
    """The ratio of the rates in each round."""
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def medians(rounds: list[list[float]]) -> list[float]:
    """The median over the rounds for each part of the backlog."""
    return [statistics.median(rates) for rates in zip(*rounds, strict=True)]


def tables(report: dict[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield title, headings and rows of each table."""
    for part, title in (("sink", "Writing"), ("read", "Reading a batch")):
        if part not in report:
            continue
        figures = dict(report[part]["figures"])
        rows = []
        figures.pop("rows")
        for name, rates in figures.items():
            each = ratio(figures["pgqueue"], rates)
            row = [name, spread(rates), f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})"]
            is_target = name == "jdbc"
            met = statistics.median(each) >= TARGETS[part]
            rows.append([*row, f"at least {TARGETS[part]:g}: {'met' if met else 'missed'}" if is_target else ""])
        yield f"{title}, {report[part]['figures']['rows']:,} rows", ["", "rows/s", "pgqueue is", "target"], rows
    if "stream" in report:
        figures = report["stream"]["figures"]
        rows = []
        for total, batches, thirds in zip(figures["pgqueue"], figures["batches"], figures["thirds"], strict=True):
            row = [f"{total:,}", spread(batches), *(f"{rate:,.0f}" for rate in thirds), f"{thirds[-1] / thirds[0]:.2f}"]
            met = statistics.median(batches) >= TARGETS["stream"]
            rows.append([*row, f"at least {TARGETS['stream']:,}: {'met' if met else 'missed'}"])
        typical = medians(figures["thirds"])
        steady = statistics.median(thirds[-1] / thirds[0] for thirds in figures["thirds"])
        row = [f"{statistics.median(figures['pgqueue']):,.0f}", "", *(f"{rate:,.0f}" for rate in typical)]
        rows.append([*row, f"{steady:.2f}", f"at least {STEADY:g}: {'met' if steady >= STEADY else 'missed'}"])
        headings = ["messages/s, start to end", "of a micro-batch", "1st third", "2nd", "3rd", "3rd / 1st", "target"]
        title = f"A stream to Parquet, {figures['messages']:,} messages, {figures['batch']:,} a batch"
        yield f"{title}; the last row is the median", headings, rows
        rows = [[f"{rate:,.0f}" for rate in medians(figures["deciles"])]]
        yield "By tenths of the backlog, messages/s, median", [str(place) for place in range(1, 11)], rows
    if "copy" in report:
        figures = dict(report["copy"]["figures"])
        count = figures.pop("rows")
        rows = []
        for name, rates in figures.items():
            met = statistics.median(rates) >= TARGETS["copy"]
            rows.append([name, spread(rates), f"at least {TARGETS['copy']:,}: {'met' if met else 'missed'}"])
        yield f"enqueue_copy, {count:,} messages, one process", ["", "messages/s", "target"], rows


def show(report: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    for title, headings, rows in tables(report):
        table = Table(title=title, title_justify="left", title_style="bold")
        for place, heading in enumerate(headings):
            table.add_column(heading, justify="right" if place and heading != "target" else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for part in (part for part in PARTS if part in report):
        about = ", ".join(f"{name} {value}" for name, value in report[part]["circumstances"].items())
        console.print(f"{part}: {about}")


def plot(report: dict[str, Any], path: Path) -> bool:
    """Draw the rates, and that of the stream by tenths of its backlog; False without matplotlib or all figures."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    if not {"sink", "read", "stream"} <= report.keys():
        return False
    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.8), layout="constrained")
    for axis, part, title in zip(axes, ("sink", "read"), ("written", "read"), strict=False):
        figures = {name: rates for name, rates in report[part]["figures"].items() if name != "rows"}
        for place, (name, rates) in enumerate(figures.items()):
            axis.barh(place, statistics.median(rates) / 1000, color="C0" if name.startswith("pgqueue") else "C7")
            axis.plot([rate / 1000 for rate in rates], [place] * len(rates), "k|", markersize=12)
        axis.set(yticks=range(len(figures)), yticklabels=list(figures), xlabel=f"thousand rows {title} in a second")
        axis.invert_yaxis()
    tenths = report["stream"]["figures"]["deciles"]
    for rates in tenths:
        axes[2].plot(range(1, 11), [rate / 1000 for rate in rates], color="C7", linewidth=0.8)
    axes[2].plot(range(1, 11), [rate / 1000 for rate in medians(tenths)], color="C0", marker="o", label="median")
    axes[2].axhline(TARGETS["stream"] / 1000, color="grey", linewidth=0.8, linestyle=":", label="target")
    axes[2].set(xlabel="tenth of the backlog", ylabel="thousand messages a second, to Parquet", ylim=(0, None))
    axes[2].set(xticks=range(1, 11))
    axes[2].legend(loc="lower right")
    about = report["stream"]["circumstances"]
    names = ("commit", "date", "postgresql", "spark", "jdbc", "python")
    versions = ", ".join(f"{name} {about[name]}" for name in names)
    figure.supxlabel(f"{versions}\n{about['settings']}\n{about['machine']}", fontsize=7, color="grey")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
