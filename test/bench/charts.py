"""Draws the figures, as PNG and SVG, where matplotlib is installed."""

import statistics
from pathlib import Path
from typing import Any

from report import label

COLOURS = ("#3a6ea5", "#d98c3f", "#9aa5b1", "#6f9f6a", "#a05a8c", "#c8b65a")


def draw(report: dict[str, Any], directory: Path) -> list[Path]:
    """A chart for each part: a group of bars for each workload, as tall as messages a second; returns the files."""
    try:
        import matplotlib as mpl
    except ImportError:
        return []
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "pgqueue"  # the same figures make the same file
    from matplotlib import pyplot as plt

    files = []
    for name, part in report["parts"].items():
        if not part["cells"] or "rates" not in part["cells"][0]:
            continue
        syncs = list(dict.fromkeys(cell["synchronous_commit"] for cell in part["cells"]))
        figure, every = plt.subplots(len(syncs), 1, figsize=(10, 3.6 * len(syncs)), squeeze=False, layout="constrained")
        for axes, sync in zip(every[:, 0], syncs, strict=True):
            cells = [cell for cell in part["cells"] if cell["synchronous_commit"] == sync]
            _bars(axes, cells)
            axes.set_title(f"{part['title']}, synchronous_commit = {sync}", loc="left", fontsize=10)
        for ending in ("png", "svg"):
            files.append(directory / f"{name}.{ending}")
            figure.savefig(files[-1], dpi=110, metadata={"Date": None} if ending == "svg" else None)
        plt.close(figure)
    return files


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
    axes.set_yscale("log")  # calls of one message and of a hundred are far apart
    axes.set_xticks(range(len(workloads)), workloads, fontsize=8)
    axes.set_ylabel("messages per second")
    axes.legend(fontsize=8, ncols=len(systems), frameon=False, loc="upper left")
    axes.margins(y=0.25)
    axes.spines[["top", "right"]].set_visible(False)
