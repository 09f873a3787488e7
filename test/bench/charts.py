"""Draws the figures as PNG and SVG, if matplotlib is installed."""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import label

COLOURS = ("#3a6ea5", "#d98c3f", "#9aa5b1", "#6f9f6a", "#a05a8c", "#c8b65a", "#b5534c", "#5c5c5c")
SMALL = 8
Part = dict[str, Any]


def draw(report: dict[str, Any], directory: Path) -> list[Path]:
    """Draw a chart for each part; returns the files."""
    try:
        import matplotlib as mpl
    except ImportError:
        return []
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "pgqueue"  # makes the files reproducible
    from matplotlib import pyplot as plt

    files = []
    kinds: dict[str, Callable[[Any, Part], Any]] = {
        "latency": _latencies,
        "pressure": _pressures,
        "pinned": _pressures,
        "endurance": _pressures,
        "mixed": _pressures,
        "groups_pinned": _pressures,
        "cost": _costs,
        "horizon": _horizons,
    }
    for name, part in report["parts"].items():
        if part["cells"] and name != "calls":  # which is a table alone
            figure = kinds.get(name, _rates)(plt, part)
            for ending in ("png", "svg"):
                files.append(directory / f"{name}.{ending}")
                figure.savefig(files[-1], dpi=110, metadata={"Date": None} if ending == "svg" else None)
            plt.close(figure)
    return files


def _unframed(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SMALL)


def _rates(plt: Any, part: Part) -> Any:
    """A group of bars for each workload; the height is the rate in messages per second."""
    syncs = list(dict.fromkeys(cell["synchronous_commit"] for cell in part["cells"]))
    figure, every = plt.subplots(len(syncs), 1, figsize=(10, 3.6 * len(syncs)), squeeze=False, layout="constrained")
    for axes, sync in zip(every[:, 0], syncs, strict=True):
        cells = [cell for cell in part["cells"] if cell["synchronous_commit"] == sync]
        _bars(axes, cells)
        axes.set_title(f"{part['title']}, synchronous_commit = {sync}", loc="left", fontsize=10)
    return figure


def _bars(axes: Any, cells: list[dict[str, Any]]) -> None:
    systems = list(dict.fromkeys(cell["system"] for cell in cells))
    workloads = list(dict.fromkeys(label(cell, cells) for cell in cells))
    width = 0.8 / len(systems)
    for n, (system, colour) in enumerate(zip(systems, COLOURS, strict=False)):
        mine = [cell for cell in cells if cell["system"] == system]
        places = [workloads.index(label(cell, cells)) + (n - (len(systems) - 1) / 2) * width for cell in mine]
        medians = [statistics.median(cell["rates"]) for cell in mine]
        low = [middle - min(cell["rates"]) for middle, cell in zip(medians, mine, strict=True)]
        high = [max(cell["rates"]) - middle for middle, cell in zip(medians, mine, strict=True)]
        axes.bar(places, medians, width, label=system, color=colour)
        axes.errorbar(places, medians, yerr=[low, high], fmt="none", ecolor="#444444", elinewidth=0.8)
    axes.set_yscale("log")  # rates of single messages and of batches differ by orders of magnitude
    axes.set_xticks(range(len(workloads)), [name.replace(": ", "\n") for name in workloads], fontsize=SMALL)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel("messages per second")
    axes.legend(fontsize=SMALL, ncols=len(systems), frameon=False, loc="upper left")
    axes.margins(y=0.25)
    low_end, high_end = axes.get_ylim()
    if high_end < 10 * low_end:  # an axis within one power of ten needs labels at minor ticks
        axes.yaxis.set_minor_formatter("{x:,.0f}")
    axes.tick_params(axis="y", which="both", labelsize=SMALL)
    _unframed(axes)


def _latencies(plt: Any, part: Part) -> Any:
    """A row for each system: a dot at the p50, a bar at the p99, an open dot at the maximum."""
    rates = list(dict.fromkeys(cell["asked_rate"] for cell in part["cells"]))
    systems = list(dict.fromkeys(cell["system"] for cell in part["cells"]))[::-1]
    height = 1.6 + 0.32 * len(systems)
    figure, every = plt.subplots(1, len(rates), figsize=(10, height), sharey=True, squeeze=False, layout="constrained")
    for axes, rate in zip(every[0], rates, strict=True):
        for cell in (cell for cell in part["cells"] if cell["asked_rate"] == rate):
            place, ours = systems.index(cell["system"]), cell["system"].startswith("pgqueue ")
            colour = COLOURS[0] if ours else COLOURS[1]
            if cell["late"]:
                axes.annotate(
                    "falls behind", (0.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=SMALL
                )
                continue
            # A logarithmic scale has no zero. A handler may start before the producer has its answer.
            found = {name: max(ms, 0.1) for name, ms in cell["latency_ms"].items()}
            axes.plot([found["p50"], found["max"]], [place] * 2, color=colour, linewidth=1.2)
            axes.plot(found["p50"], place, "o", color=colour, label="p50")
            axes.plot(found["p99"], place, "|", color=colour, markersize=12, markeredgewidth=2)
            axes.plot(found["max"], place, "o", color=colour, markerfacecolor="white", markersize=4)
        axes.set_xscale("log")
        axes.set_yticks(range(len(systems)), systems)
        axes.set_ylim(-0.6, len(systems) - 0.4)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(f"{rate:,} messages a second", loc="left", fontsize=9)
        axes.set_xlabel("ms; dot: p50, bar: p99, open dot: maximum", fontsize=SMALL)
        axes.grid(axis="x", alpha=0.3)
        _unframed(axes)
    figure.suptitle(part["title"], x=0.01, ha="left", fontsize=10)
    return figure


def _pressures(plt: Any, part: Part) -> Any:
    """The rate and the bytes of each system over time, before and after the pressure starts."""
    names = list(dict.fromkeys(cell["pressure"] for cell in part["cells"]))
    systems = list(dict.fromkeys(cell["system"] for cell in part["cells"]))
    figure, every = plt.subplots(
        len(names), 2, figsize=(12, 2.6 * len(names) + 0.6), sharex=True, squeeze=False, layout="constrained"
    )
    for row, name in zip(every, names, strict=True):
        for cell in (cell for cell in part["cells"] if cell["pressure"] == name):
            look: dict[str, Any] = {"color": COLOURS[systems.index(cell["system"])], "linewidth": 1.6, "marker": "."}
            look["linestyle"] = "-" if cell["postgresql"] == 18 else "--"
            system, beside = f"{cell['system']}, PostgreSQL {cell['postgresql']}", cell.get("beside", False)
            for what, where in (("clean", f"{system}, clean" if beside else None), ("under", system)):
                middles = _middles(cell[what], before=what == "clean" and not beside)
                look["alpha"] = 0.5 if what == "clean" and beside else 1
                row[0].plot(middles, cell[what]["stretches"], **look, label=where)
                row[1].plot(middles, [size / 1e6 for size in cell[what]["stretch_bytes"]], **look)
        row[0].set_title(name, loc="left", fontsize=9)
        for axes, unit in zip(row, ("cycles per second", "MB of tables and indexes"), strict=True):
            axes.axvline(0, color="#444444", linewidth=0.8, linestyle=":")
            axes.margins(y=0.1)
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.set_ylabel(unit, fontsize=9)
            axes.grid(axis="y", alpha=0.3)
            axes.set_ylim(bottom=0)
            _unframed(axes)
    for axes in every[-1]:
        axes.set_xlabel("seconds since the start of the pressure", fontsize=9)
    handles, labels = every[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=SMALL, ncols=len(handles), frameon=False, loc="outside lower left")
    figure.suptitle(part["title"], x=0.01, ha="left", fontsize=10)
    return figure


def _middles(watched: dict[str, Any], *, before: bool) -> list[float]:
    """The middle of each stretch in seconds; stretches before the pressure end at zero."""
    stretch, number = watched["stretch_seconds"], len(watched["stretches"])
    start = -stretch * number if before else 0
    return [start + (n + 0.5) * stretch for n in range(number)]


def _costs(plt: Any, part: Part) -> Any:
    """Three panels of bars: WAL and CPU of the enqueue plus those of claim and ack, and bytes on disk."""
    cells = part["cells"][::-1]
    names = [cell["system"] + "*" * (cell["take"]["batch"] > 1) for cell in cells]
    figure, (wal, cpu, disk) = plt.subplots(
        1, 3, figsize=(10, 1.5 + 0.32 * len(cells)), sharey=True, layout="constrained"
    )
    for axes, what in ((wal, "wal_bytes"), (cpu, "cpu_us")):
        enqueue = [cell["enqueue"][what] for cell in cells]
        axes.barh(names, enqueue, 0.6, color=COLOURS[0], label="enqueue")
        takes = [cell["take"][what] for cell in cells]
        axes.barh(names, takes, 0.6, left=enqueue, color=COLOURS[1], label="claim and ack")
    disk.barh(names, [cell["disk_bytes"] for cell in cells], 0.6, color=COLOURS[2])
    titles = ((wal, "bytes of WAL"), (cpu, "microseconds of CPU"), (disk, "bytes on disk while it waits"))
    for axes, title in titles:
        axes.set_title(title, loc="left", fontsize=9)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        _unframed(axes)
    figure.legend(*wal.get_legend_handles_labels(), fontsize=SMALL, ncols=2, frameon=False, loc="outside lower left")
    batched = next((cell["take"]["batch"] for cell in cells if cell["take"]["batch"] > 1), None)
    if batched:
        disk.set_xlabel(f"* claimed in batches of {batched}", fontsize=SMALL, loc="right")
    figure.suptitle(part["title"], x=0.01, ha="left", fontsize=10)
    return figure


def _horizons(plt: Any, part: Part) -> Any:
    """Panels of rate, p99, dead rows and bytes over time; a line for each system, a band for each disturbance."""
    systems = list(dict.fromkeys(cell["system"] for cell in part["cells"]))
    titles = {
        "rate": "completions per second",
        "p99_ms": "p99 from sending to the handler, ms, of 30 s",
        "dead_tuples": "dead rows",
        "bytes": "MB of tables and indexes",
    }
    figure, every = plt.subplots(len(titles), 1, figsize=(12, 10), sharex=True, layout="constrained")
    for axes, (metric, title) in zip(every, titles.items(), strict=True):
        scale = 1e6 if metric == "bytes" else 1
        for system, colour in zip(systems, COLOURS, strict=False):
            points = [
                (cell["start"] + (n + 0.5) * cell["every"], math.nan if value is None else value / scale)
                for cell in part["cells"]
                if cell["system"] == system
                for n, value in enumerate(cell["series"][metric])
            ]
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.2, label=system)
        axes.set_yscale("linear" if metric == "rate" else "symlog", **({} if metric == "rate" else {"linthresh": 1}))
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_title(title, loc="left", fontsize=9)
        axes.grid(axis="y", alpha=0.3)
        _unframed(axes)
        for cell in part["cells"]:
            if cell["system"] != systems[0] or cell["phase"] in ("warmup", "clean", "recovery"):
                continue
            axes.axvspan(cell["start"], cell["start"] + cell["seconds"], color="#b5534c", alpha=0.12, linewidth=0)
            if axes is every[0]:
                axes.annotate(
                    cell["phase"], (cell["start"], 1), xycoords=("data", "axes fraction"), fontsize=6, va="top"
                )
    every[-1].set_xlabel("seconds", fontsize=9)
    figure.legend(
        *every[0].get_legend_handles_labels(),
        fontsize=SMALL,
        ncols=len(systems),
        frameon=False,
        loc="outside lower left",
    )
    figure.suptitle(part["title"], x=0.01, ha="left", fontsize=10)
    return figure
