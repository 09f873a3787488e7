"""Turns figures into tables: for a terminal, and for the README, where they stand between two marks.

`report.py` writes the README's section from results/latest.json; with --check it changes nothing and fails where the
README is not current.
"""

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
LATEST = Path(__file__).parent / "results/latest.json"
BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"
Rows = list[list[str]]


def tables(part: dict[str, Any]) -> Iterator[tuple[str, list[str], Rows, str]]:
    """Of one part: title, headings, rows, and what the figures hold for; one table for each way to commit."""
    if part["cells"] and "pressure" in part["cells"][0]:
        yield pressures(part)
        return
    if part["cells"] and "disk_bytes" in part["cells"][0]:
        yield costs(part)
        return
    for sync in dict.fromkeys(cell["synchronous_commit"] for cell in part["cells"]):
        cells = [cell for cell in part["cells"] if cell["synchronous_commit"] == sync]
        systems = list(dict.fromkeys(cell["system"] for cell in cells))
        lines: dict[str, dict[str, dict[str, Any]]] = {}
        for cell in cells:
            lines.setdefault(label(cell, cells), {})[cell["system"]] = cell
        rows = [
            [name, *("\n".join(figures(by, system, systems[0], cells)) for system in systems)]
            for name, by in lines.items()
        ]
        headings = ["messages per second", *systems]
        yield f"{part['title']}, synchronous_commit = {sync}", headings, rows, note(part, cells)


def label(cell: dict[str, Any], cells: list[dict[str, Any]]) -> str:
    """A workload, with the number of clients where a table has several."""
    several = len({each["clients"] for each in cells if each["workload"] == cell["workload"]}) > 1
    return cell["workload"] + (f", {cell['clients']} client{'s' * (cell['clients'] > 1)}" if several else "")


def spread(rates: list[float]) -> str:
    """The median, and how far the farthest round was from it."""
    median = statistics.median(rates)
    return f"{median:,.0f} ±{max(max(rates) - median, median - min(rates)) / median:.0%}"


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> list[float]:
    """Round by round."""
    return [one / other for one, other in zip(ours["rates"], theirs["rates"], strict=True)]


def figures(by: dict[str, dict[str, Any]], system: str, ours: str, cells: list[dict[str, Any]]) -> Iterator[str]:
    """The rate of a system; what the same is of that without the condition; what the first one's is of it."""
    if system in by:
        mine = by[system]
        yield spread(mine["rates"])
        if condition := mine["condition"]:
            plain = mine["workload"].removesuffix(f": {condition}")
            for without in cells:
                if (without["workload"], without["system"], without["clients"]) == (plain, system, mine["clients"]):
                    yield f"{statistics.median(ratios(mine, without)):.0%} of without"
        if system != ours and ours in by:
            found = ratios(by[ours], by[system])
            yield f"{statistics.median(found):.2f}× ({min(found):.2f}-{max(found):.2f})"


def pressures(part: dict[str, Any]) -> tuple[str, list[str], Rows, str]:
    """The table of the part about pressure."""
    headings = ["cycles per second", "system", "clean", "under it", "last third / clean", "p99, ms"]
    headings += ["dead rows", "bytes a message", "WAL, MB", "bystander p99, ms"]
    rows = []
    for cell in part["cells"]:
        clean, under = cell["clean"], cell["under"]
        last = under["stretches"][-max(1, len(under["stretches"]) // 3) :]
        rows.append(
            [
                cell["pressure"],
                cell["system"],
                f"{clean['rate']:,.0f}",
                f"{under['rate']:,.0f}",
                f"{statistics.mean(last) / clean['rate']:.0%}" if last else "",
                f"{clean['p99_ms']:.1f} → {under['p99_ms']:.1f}",
                f"{under['dead_tuples'] or 0:,}",
                f"{under['grown_bytes_per_message']:,.0f}",
                f"{max(0, under['wal_kept_bytes']) / 1e6:,.0f}",
                f"{clean['bystander_p99_ms']:.1f} → {under['bystander_p99_ms']:.1f}",
            ]
        )
    seconds = part["cells"][0]["seconds"]
    more = (
        f" Each for {seconds:g} s, behind a third of that without it. The bystander updates one row 20 times a second."
    )
    return part["title"], headings, rows, about(part) + more


def costs(part: dict[str, Any]) -> tuple[str, list[str], Rows, str]:
    """The table of the part about cost."""
    headings = ["one message costs", "WAL, bytes: enqueue", "claim and ack", "CPU, µs: enqueue", "claim and ack"]
    headings += ["disk while it waits, bytes"]
    rows = []
    for cell in part["cells"]:
        many = f" (batches of {cell['take']['batch']})" if cell["take"]["batch"] > 1 else ""
        figures = [cell[verb][what] for what in ("wal_bytes", "cpu_us") for verb in ("enqueue", "take")]
        rows.append([cell["system"] + many, *(f"{each:,.0f}" for each in [*figures, cell["disk_bytes"]])])
    return part["title"], headings, rows, about(part) + " WAL holds full pages behind a checkpoint."


def note(part: dict[str, Any], cells: list[dict[str, Any]]) -> str:
    """What every number names, in a paragraph."""
    more = (
        f" Median of {part['rounds']} rounds of {cells[0]['seconds']:g} s ± the farthest of them; × is"
        f" {cells[0]['system']} as a multiple of this one, taken within each round: median, lowest and highest."
    )
    return about(part, cells) + more


def about(part: dict[str, Any], given: list[dict[str, Any]] | None = None) -> str:
    """The systems, the server, the machine, the commit."""
    cells, told = given or part["cells"], part["circumstances"]
    systems = dict.fromkeys((cell["system"], cell["version"], cell["client"]) for cell in cells)
    used = ", ".join(f"{name}{f' {version}' * (version != '—')} ({client})" for name, version, client in systems)
    major = " and ".join(
        told["postgresql"][str(major)] for major in dict.fromkeys(cell["postgresql"] for cell in cells)
    )
    missing = "".join(f" {name} could not be had here: it needs {why}." for name, why in part["missing"].items())
    return (
        f"{used}. PostgreSQL {major}, {told['settings']}; {told['machine']}, shared with the clients, load before it"
        f" {told['load_before']}; commit {told['commit']}, {told['date']}.{missing}"
    )


def section(report: dict[str, Any]) -> str:
    """The part of the README: the tables, each with what it holds for."""
    blocks = []
    for part in report["parts"].values():
        for title, headings, rows, text in tables(part):
            lines = [headings, ["---", *("---:" for _ in headings[1:])], *rows]
            blocks += [f"**{title}**", "\n".join(markdown(line) for line in lines), f"<sub>{text}</sub>"]
    return "\n\n".join(blocks)


def markdown(line: list[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(line)} |".replace("\n", "<br>")


def main(arguments: list[str]) -> int:
    check = "--check" in arguments
    text = README.read_text(encoding="utf-8")
    if BEGIN not in text:
        print(f"README.md has no {BEGIN}: put the two marks where the figures belong")
        return 1
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    new = f"{before}{BEGIN}\n\n{section(json.loads(LATEST.read_text(encoding='utf-8')))}\n\n{END}{after}"
    if check and new != text:
        print('README.md: the figures are not those of test/bench/results: run "python3 test/bench/report.py"')
        return 1
    if new != text:
        README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
