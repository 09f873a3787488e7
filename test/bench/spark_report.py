"""Prints the figures of spark.py as tables, and draws them."""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PARTS = ("sink", "read", "stream", "copy")
SLOW = ("scale", "archive", "report", "long")
# The minimum for each part: a multiple of the rate of JDBC, messages per second, or messages per minute (archive).
TARGETS = {"sink": 0.8, "read": 0.8, "stream": 40_000, "copy": 250_000, "archive": 1_000_000}
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
    yield from slow_tables(report)


def slow_tables(report: dict[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield the same for the parts that take long."""
    if "scale" in report:
        figures = dict(report["scale"]["figures"])
        title = f"By partitions, {figures.pop('rows'):,} messages; a micro-batch has {figures.pop('batch'):,}"
        rows = []
        for name, by_partitions in figures.items():
            for partitions, one in by_partitions.items():
                first = next(iter(by_partitions.values()))
                faster = statistics.median(one["rates"]) / statistics.median(first["rates"])
                row = [name, partitions, spread(one["rates"]), f"{faster:.2f}"]
                # Figures of November 2026 have no CPU.
                cpu = [f"{statistics.median(one[at]):.1f}" if at in one else "" for at in ("server_us", "spark_us")]
                rows.append([*row, *cpu, str(one["connections"]), str(one["worker_mb"])])
        headings = ["", "partitions", "messages/s", "of the first", "CPU of the server, µs a row", "of Spark"]
        headings += ["most connections", "MB of a worker"]
        yield title, headings, rows
    if "archive" in report:
        figures = report["archive"]["figures"]
        rate = statistics.median(figures["seconds"])
        met = figures["rows"] / rate * 60 >= TARGETS["archive"]
        minutes = f"{figures['rows'] / rate * 60:,.0f}"
        row = [minutes, spread(figures["seconds"]), f"at least {TARGETS['archive']:,}: {'met' if met else 'missed'}"]
        yield f"archive_to_parquet, {figures['rows']:,} messages", ["messages a minute", "seconds", "target"], [row]
    if "report" in report:
        figures = dict(report["report"]["figures"])
        title = f"flow_report, one day of {figures.pop('rows'):,} messages"
        rows = [["percentiles in PostgreSQL", f"{figures.pop('postgresql_seconds'):.0f}", "", "", ""]]
        for name, one in figures.items():
            error, memory = f"{one['error']:.1e}", f"{one['most_mb']:,}"
            rows.append([f"report, {name}", f"{one['seconds']:.0f}", error, f"{one.get('page_mb', '')}", memory])
        yield title, ["", "seconds", "difference", "MB of the page", "MB of all processes"], rows
    if "long" in report:
        figures = report["long"]["figures"]
        minutes = figures["minutes"]
        shown = [one for one in minutes if one["minute"] == 1 or one["minute"] % 5 == 0]
        rows = [["" if value is None else f"{value:,}" for value in one.values()] for one in shown]
        title = f"A stream while {figures['rate']:,} messages a second are sent"
        yield f"{title}: {figures['sent']:,} sent, {figures['written']:,} written", [*minutes[0]], rows


def show(report: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    for title, headings, rows in tables(report):
        table = Table(title=title, title_justify="left", title_style="bold")
        for place, heading in enumerate(headings):
            table.add_column(heading, justify="right" if place and heading != "target" else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for part in (part for part in PARTS + SLOW if part in report):
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
    label(figure, report["stream"]["circumstances"])
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    if {"scale", "long"} <= report.keys():
        plot_slow(report, path.with_stem(f"{path.stem}_long"))
    return True


def plot_slow(report: dict[str, Any], path: Path) -> None:
    """Draw the rates by partitions, and the long stream minute by minute."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.8), layout="constrained")
    for number, (name, found) in enumerate(
        (name, found) for name, found in report["scale"]["figures"].items() if name not in ("rows", "batch")
    ):
        rates = [statistics.median(one["rates"]) / 1000 for one in found.values()]
        style = {"linestyle": "--" if name.endswith("JDBC") else "-", "marker": "o"}
        axes[0].plot([*found], rates, color=f"C{number // 2}", label=name, **style)
    axes[0].set(xlabel="partitions", ylabel="thousand messages a second", ylim=(0, None))
    axes[0].legend()
    minutes = report["long"]["figures"]["minutes"]
    at = [one["minute"] for one in minutes]
    for place, names in ((1, ("batch_median", "batch_max", "oldest")), (2, ("total_mb", "worker_mb", "tables_mb"))):
        for name in names:
            axes[place].plot(at, [one[name] for one in minutes], label=name.replace("_mb", "").replace("_", ", "))
        axes[place].set(xlabel="minute of the long stream", ylim=(0, None))
        axes[place].legend()
    axes[1].set_ylabel("seconds")
    axes[2].set_ylabel("MB")
    label(figure, report["long"]["circumstances"])
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def label(figure: Any, about: dict[str, Any]) -> None:
    """Write below a figure how it was measured."""
    names = ("commit", "date", "postgresql", "spark", "jdbc", "python")
    versions = ", ".join(f"{name} {about[name]}" for name in names)
    figure.supxlabel(f"{versions}\n{about['settings']}\n{about['machine']}", fontsize=7, color="grey")
