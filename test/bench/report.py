"""Turns figures into tables: for a terminal, and for documents, where they stand between two marks.

`report.py` writes all tables into README.md of this directory, and a few figures into that of the project, from
results/*.json; with --check it changes nothing and fails where one of the two is not current.
"""

import json
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from sections import update_section

HERE = Path(__file__).resolve().parent
LATEST, BREAKDOWN, HORIZON, WEB, ATTACK, PROXIED_ATTACK = (
    HERE / f"results/{name}.json" for name in ("latest", "breakdown", "horizon", "web", "attack", "attack_nginx")
)
Rows = list[list[str]]
Cell = dict[str, Any]
SINGLE_VERBS = ("enqueue 1", "claim 1, ack", "claim 100, ack 100")


def tables(part: dict[str, Any]) -> Iterator[tuple[str, list[str], Rows, str]]:
    """Yield the tables of a part, one for each value of synchronous_commit: title, headings, rows, note."""
    if part["cells"] and "pressure" in part["cells"][0]:
        yield pressures(part)
        return
    if part["cells"] and "disk_bytes" in part["cells"][0]:
        yield costs(part)
        return
    if part["cells"] and "call_us" in part["cells"][0]:
        yield calls(part)
        return
    if part["cells"] and "asked_rate" in part["cells"][0]:
        yield latencies(part)
        return
    if part["cells"] and "phase" in part["cells"][0]:
        yield from horizons(part)
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
    """The name of a workload, with the number of clients if the table has several."""
    several = len({each["clients"] for each in cells if each["workload"] == cell["workload"]}) > 1
    return cell["workload"] + (f", {cell['clients']} client{'s' * (cell['clients'] > 1)}" if several else "")


def spread(rates: list[float]) -> str:
    """Format the median of rates, and the largest deviation of a round from it."""
    median = statistics.median(rates)
    return f"{median:,.0f} ±{max(max(rates) - median, median - min(rates)) / median:.0%}"


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> list[float]:
    """The ratio of the rates in each round."""
    return [one / other for one, other in zip(ours["rates"], theirs["rates"], strict=True)]


def figures(by: dict[str, dict[str, Any]], system: str, ours: str, cells: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a field: the rate, its ratio to that without the condition, and ours as a multiple of it."""
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
    headings += ["p99.9, ms", "most dead rows", "most MB of tables", "WAL, MB", "bystander p99, ms"]
    rows = []
    several = len({cell["postgresql"] for cell in part["cells"]}) > 1
    for cell in part["cells"]:
        clean, under, beside = cell["clean"], cell["under"], cell.get("beside", False)
        number = max(1, len(under["stretches"]) // 3)
        last = under["stretches"][-number:]
        # Where both took turns, the turns of the last third are compared.
        without = statistics.mean(clean["stretches"][-number:]) if beside else clean["rate"]
        rows.append(
            [
                cell["pressure"],
                cell["system"] + (f", PostgreSQL {cell['postgresql']}" if several else ""),
                f"{clean['rate']:,.0f}",
                f"{under['rate']:,.0f}" + (f" ({under['rate'] / clean['rate']:.0%})" if beside else ""),
                f"{statistics.mean(last) / without:.0%}" if last and without else "",
                f"{clean['p99_ms']:.1f} → {under['p99_ms']:.1f}",
                f"{clean['p999_ms']:.1f} → {under['p999_ms']:.1f}",
                f"{clean['most_dead_rows']:,} → {under['most_dead_rows']:,}",
                f"{clean['most_bytes'] / 1e6:,.0f} → {under['most_bytes'] / 1e6:,.0f}",
                f"{max(0, under['wal_kept_bytes']) / 1e6:,.0f}",
                f"{clean['bystander_p99_ms']:.1f} → {under['bystander_p99_ms']:.1f}",
            ]
        )
    seconds, under = part["cells"][0]["seconds"], part["cells"][0]["under"]
    lasts = under["stretch_seconds"] * len(under["stretches"])
    if part["cells"][0].get("beside"):
        shared = f", in turns during {lasts:.0f} s; the clean cycle takes the same turns in another database"
    else:
        shared = f", in turns during {lasts:.0f} s" if lasts > seconds else ""
        shared += f" under the condition; before that, a {'fifth' if lasts > seconds else 'third'} as long without it"
    more = f" Each for {seconds:g} s{shared}. The bystander updates one row 20 times a second."
    if any(cell["system"] == "PgQ" for cell in part["cells"]):
        more += (
            " For PgQ the figures count events: three clients insert them, a fourth finishes them in batches. p99 is"
            " that of inserts."
        )
    return part["title"], headings, rows, about(part) + more


def latencies(part: dict[str, Any]) -> tuple[str, list[str], Rows, str]:
    """The table of the part about latency."""
    rates = list(dict.fromkeys(cell["asked_rate"] for cell in part["cells"]))
    labels = list(part["cells"][0]["latency_ms"])
    headings = ["milliseconds"]
    headings += [f"{rate:,}/s: {label}" if label == labels[0] else label for rate in rates for label in labels]
    rows = []
    for system in dict.fromkeys(cell["system"] for cell in part["cells"]):
        cells = [cell for cell in part["cells"] if cell["system"] == system]
        row = [system]
        for cell in cells:
            if cell["late"]:
                row += ["falls behind", *("" for _ in labels[1:])]
                continue
            found = [f"{cell['latency_ms'][label]:,.1f}" for label in labels]
            # The producer waits for each commit, so slow commits reduce its rate.
            short = cell["sent_rate"] < 0.95 * cell["asked_rate"]
            row += [found[0] + (f" (sent {cell['sent_rate']:,.0f}/s)" if short else ""), *found[1:]]
        rows.append(row)
    seconds = part["cells"][0]["seconds"]
    workers = dict.fromkeys(f"{cell['system']}: {cell['worker']}" for cell in part["cells"])
    more = f" Of {part['rounds']} round{'s' * (part['rounds'] > 1)} of {seconds:g} s together. How each waits: "
    more += "; ".join(workers) + "."
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


def calls(part: dict[str, Any]) -> tuple[str, list[str], Rows, str]:
    """The table of the part about single calls: a row for each call and PostgreSQL version."""
    rows = []
    systems = list(dict.fromkeys(cell["system"] for cell in part["cells"]))
    for major in dict.fromkeys(cell["postgresql"] for cell in part["cells"]):
        by = {cell["system"]: cell["call_us"] for cell in part["cells"] if cell["postgresql"] == major}
        for call in by[systems[0]]:
            texts = []
            for system in systems:
                low, median, high = by[system][call] if system in by else (0, 0, 0)
                ratio = f", {by[systems[0]][call][1] / median:.2f}×" if median and system != systems[0] else ""
                texts.append(f"{median:,.0f} ({low:,.0f}-{high:,.0f}){ratio}" if median else "")
            rows.append([f"{call}, PostgreSQL {major}", *texts])
    text = " Medians of bursts of five calls, with quartiles; the figure of the first system as a multiple of each."
    return part["title"], ["CPU of the backend, µs", *systems], rows, about(part) + text


def horizons(part: dict[str, Any]) -> Iterator[tuple[str, list[str], Rows, str]]:
    """The tables of the phases of the long horizon: a row for each phase, a column for each system."""
    systems = list(dict.fromkeys(cell["system"] for cell in part["cells"]))
    runs = {system: [cell for cell in part["cells"] if cell["system"] == system] for system in systems}
    ways: tuple[tuple[str, Callable[[Cell], str], str], ...] = (
        (
            "completions per second",
            lambda cell: completions(cell, cleans[cell["system"]]),
            about(part)
            + " Percentages are of the rate in the phase clean. An exit is an adapter that ended by itself.",
        ),
        (
            "p99 from sending to the handler, ms",
            lambda cell: optional(cell["p99_ms"], ",.0f"),
            "The median of the windows of 30 s that lie within the phase.",
        ),
        ("ready messages", lambda cell: optional(cell["depth"], ",.0f"), "At the end of the phase."),
        ("dead rows", lambda cell: optional(cell["dead_tuples"], ",.0f"), "The most of the phase, by the statistics."),
        (
            "MB of tables and indexes",
            lambda cell: optional(cell["bytes"] and cell["bytes"] / 1e6, ",.1f"),
            "At the end of the phase.",
        ),
    )
    cleans = {
        system: next((cell for cell in cells if cell["phase"] == "clean"), cells[0]) for system, cells in runs.items()
    }
    for what, text, more in ways:
        rows = [
            [f"{phase[0]['phase']}, {phase[0]['seconds']:.0f} s", *map(text, phase)]
            for phase in zip(*runs.values(), strict=True)
        ]
        yield f"{part['title']}: {what}", ["phase", *systems], rows, more


def completions(cell: Cell, clean: Cell) -> str:
    """The rate of a phase, its ratio to that of the phase clean, and how often the adapter ended by itself."""
    disturbed = cell["phase"] not in ("warmup", "clean")
    ratio = f" ({cell['rate'] / clean['rate']:.0%})" if disturbed and clean["rate"] else ""
    exits = f", {cell['exits']} exit{'s' * (cell['exits'] > 1)}" if cell["exits"] else ""
    return f"{cell['rate']:,.0f}{ratio}{exits}"


def optional(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)


def note(part: dict[str, Any], cells: list[dict[str, Any]]) -> str:
    """The note below a table of rates: circumstances, rounds, and the meaning of each number."""
    rounds = f"{part['rounds']} round{'s' * (part['rounds'] > 1)}"
    more = (
        f" Median of {rounds} of {cells[0]['seconds']:g} s; ± is the largest deviation of a round; × is the rate of"
        f" {cells[0]['system']} divided by the rate of this column, taken within each round: median, lowest and"
        " highest."
    )
    return about(part, cells) + more


def about(part: dict[str, Any], given: list[dict[str, Any]] | None = None) -> str:
    """Describe the systems, server, machine and commit of the figures."""
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
    """All tables, each with what its figures hold for."""
    blocks = []
    for part in report["parts"].values():
        for title, headings, rows, text in tables(part):
            lines = [headings, ["---", *("---:" for _ in headings[1:])], *rows]
            blocks += [f"**{title}**", "\n".join(markdown(line) for line in lines), wrapped(f"<sub>{text}</sub>")]
    return "\n\n".join(blocks)


def wrapped(text: str) -> str:
    """A paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def markdown(line: list[str]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(line)} |".replace("\n", "<br>")


def breakdown(report: dict[str, Any]) -> str:
    """The section of this directory's README: the cost of calls, and of their parts."""
    lines = [["microseconds of CPU", *(f"{verb['verb']}" for verb in report["verbs"])]]
    lines.append(["---", *("---:" for _ in report["verbs"])])
    inside = [sum(each["us"] for each in verb["statements"]) for verb in report["verbs"]]
    lines.append(["a call", *(f"{verb['cpu_us']:.0f}" for verb in report["verbs"])])
    lines.append(["of that running its statements", *(f"{us:.0f}" for us in inside)])
    blocks = ["\n".join(map(markdown, lines))]
    lines = [["statement", "in", "µs"], ["---", "---", "---:"]]
    for verb in report["verbs"]:
        for each in verb["statements"]:
            name = f"`{shortened(each['statement'])}`" if each["statement"] else f"{each['times']} more, now and then"
            if each["us"] >= 0.1:
                lines.append([name, verb["verb"], f"{each['us']:.1f}"])
    blocks.append("\n".join(map(markdown, lines)))
    first, *others = report["rights"]
    names = [name for name in first if name != "caller"]
    lines = [["a call by", *(name.removesuffix("_us") for name in names)], ["---", *("---:" for _ in names)]]
    lines.append([first["caller"], *(f"{first[name]:.1f}" for name in names)])
    lines += [
        [other["caller"], *(f"{other[name]:.1f} ({other[name] / first[name] - 1:+.0%})" for name in names)]
        for other in others
    ]
    blocks.append("\n".join(map(markdown, lines)))
    lines = [["alone, prepared", "µs"], ["---", "---:"]]
    lines += [[each["what"], f"{each['cpu_us']:.0f}"] for each in report["alone"]]
    blocks.append("\n".join(map(markdown, lines)))
    if report["perf"]:
        lines = [["what perf sees during claims, what it calls included", "per cent"], ["---", "---:"]]
        lines += [[name, f"{share:.0f}"] for name, share in report["perf"]["stages"]]
        blocks.append("\n".join(map(markdown, lines)))
        alone = ", ".join(f"{name} {share:.1f}" for name, share in report["perf"]["alone"])
        blocks.append(wrapped(f"Functions that take most by themselves, in per cent: {alone}."))
    told = report["circumstances"]
    blocks.append(
        wrapped(
            f"<sub>The lowest of {report['rounds']} rounds of {report['calls']:,} calls from one client;"
            f" synchronous_commit = off, 100 bytes. PostgreSQL {told['postgresql']['18']}; {told['machine']},"
            f" load before it {told['load_before']}; commit {told['commit']}, {told['date']}.</sub>"
        )
    )
    return "\n\n".join(blocks)


def web(report: dict[str, Any]) -> str:
    """The section on the HTTP server: the direct routes beside psycopg, and an enqueue through an agent."""
    cells = report["direct"]
    paced = [cell["http"]["paced"] for cell in cells if "paced" in cell["http"]]
    headings = ["a second", "direct routes", "psycopg", "ratio", "p99, ms: direct routes", "psycopg"]
    if paced:
        headings += [f"p99 at {paced[0]['load']:.0%} of the rate, ms: direct routes", "psycopg"]
    lines = [headings, ["---", *("---:" for _ in headings[1:])]]
    for cell in cells:
        number, ratio = cell["messages"], cell["ratio"]
        what = {"enqueue": "enqueue", "cycle": "claim and acknowledge"}[cell["verb"]]
        rates = [ranged(cell[kind]["calls_per_second"], number) for kind in ("http", "psycopg")]
        lines.append(
            [
                what if number == 1 else f"messages, {what} {number} at a time",
                *rates,
                f"{ratio['median']:.2f} ({ratio['lowest']:.2f}-{ratio['highest']:.2f})",
                *(f"{cell[kind]['p99_ms']['median']:.1f}" for kind in ("http", "psycopg")),
                *(f"{cell[kind]['paced']['p99_ms']:.1f}" for kind in ("http", "psycopg") if "paced" in cell[kind]),
            ]
        )
    brokered = report["brokered"]
    settings = ", ".join(f"{name} = {value}" for name, value in report["settings"].items())
    blocks = [
        "\n".join(map(markdown, lines)),
        f"An enqueue through an agent was completed after {brokered['p50_ms']['median']:.1f} ms (median;"
        f" p99: {brokered['p99_ms']['median']:.1f} ms).",
        wrapped(
            f"<sub>PostgreSQL {report['postgresql']}, {settings};"
            f" {report['cores']} cores ({report['cpu']}), shared by the server, its database and {report['clients']}"
            f" clients, load before it {report['load_before'][0]}; commit {report['commit']}, {report['at'][:10]}."
            f" Medians of {report['rounds']} rounds of {report['seconds']:g} s, with the lowest and the highest; the"
            " ratio is taken within each round.</sub>"
        ),
    ]
    return "\n\n".join(blocks)


def attack(alone: dict[str, Any], proxied: dict[str, Any]) -> str:
    """The section on an attack on the HTTP server, alone and behind nginx: a line for each turn."""
    names = ("longest_ms", "p99_ms", "most_mb")
    headings = ["attacks", "alone: longest wait, ms", "p99, ms", "most MB"]
    headings += ["behind nginx: longest wait, ms", "p99, ms", "most MB"]
    lines = [headings, ["---", *("---:" for _ in headings[1:])]]
    for one, other in zip(alone["turns"], proxied["turns"], strict=True):
        lines.append([one["attacks"], *(f"{turn[name]:,}" for turn in (one, other) for name in names)])
    refused, behind = (sum(turn["errors"] for turn in report["turns"]) for report in (alone, proxied))
    commits = " and ".join(dict.fromkeys(f"{report['commit']}, {report['at'][:10]}" for report in (alone, proxied)))
    about = (
        f"<sub>{alone['machine']}, shared by the attackers, the honest client, the server and its database, load"
        f" before it {alone['load_before']} and {proxied['load_before']}; commit {commits}."
        f" {alone['seconds'] / 60:.0f} and {proxied['seconds'] / 60:.0f} minutes in all. Requests of the honest client"
        f" that were refused: {refused} and {behind}.</sub>"
    )
    return "\n".join(map(markdown, lines)) + f"\n\n{wrapped(about)}"


def ranged(figures: dict[str, float], factor: int) -> str:
    """A median with the lowest and the highest, each times a factor."""
    median, lowest, highest = (f"{figures[name] * factor:,.0f}" for name in ("median", "lowest", "highest"))
    return f"{median} ({lowest}-{highest})"


def shortened(statement: str) -> str:
    """The first characters of a statement."""
    begin = statement[:56].rstrip()
    return begin + " …" * (len(statement) > len(begin))


def highlights(report: dict[str, Any]) -> str:
    """Five figures for the README of the project, beside pgmq."""
    verbs = {
        (cell["workload"], cell["system"]): cell["rates"]
        for cell in report["parts"]["verbs"]["cells"]
        if cell["synchronous_commit"] == "off"
    }
    lines = [["messages per second", "pgqueue", "pgmq", "ratio"], ["---", "---:", "---:", "---:"]]
    rows = [(workload, verbs[workload, "pgqueue"], verbs[workload, "pgmq"]) for workload in SINGLE_VERBS]
    ours, theirs = (
        next(
            cell
            for cell in report["parts"]["pressure"]["cells"]
            if (cell["system"], cell["postgresql"], cell["pressure"]) == (system, 18, "idle transaction with an id")
        )
        for system in ("pgqueue", "pgmq")
    )
    for name, when in (("before", "clean"), ("while", "under")):
        named = f"enqueue, claim 1, ack, {name} a transaction pins the xmin horizon"
        rows.append((named, [ours[when]["rate"]], [theirs[when]["rate"]]))
    for name, mine, other in rows:
        ratio = statistics.median(one / another for one, another in zip(mine, other, strict=True))
        lines.append([name, f"{statistics.median(mine):,.0f}", f"{statistics.median(other):,.0f}", f"{ratio:.1f}"])
    told = report["parts"]["verbs"]["circumstances"]
    about = f"Medians with four clients, 100 bytes and `synchronous_commit = off`; commit {told['commit']}."
    about += f"\n{told['machine']}."
    return "\n".join(map(markdown, lines)) + f"\n\n{about}"


def main() -> int:
    fix = 'are not those of test/bench/results: run "python3 test/bench/report.py"'
    report = json.loads(LATEST.read_text(encoding="utf-8"))
    failed = update_section("benchmark", f"{section(report)}\n", f"the figures {fix}", "test/bench/README.md")
    failed |= update_section("figures", f"{highlights(report)}\n", f"the figures {fix}")
    if BREAKDOWN.exists():
        text = breakdown(json.loads(BREAKDOWN.read_text(encoding="utf-8")))
        failed |= update_section("breakdown", f"{text}\n", f"the figures {fix}", "test/bench/README.md")
    if HORIZON.exists():
        text = section(json.loads(HORIZON.read_text(encoding="utf-8")))
        failed |= update_section("horizon", f"{text}\n", f"the figures {fix}", "test/bench/README.md")
    if WEB.exists():
        text = web(json.loads(WEB.read_text(encoding="utf-8")))
        failed |= update_section("http", f"{text}\n", f"the figures {fix}", "test/bench/README.md")
    if ATTACK.exists() and PROXIED_ATTACK.exists():
        text = attack(*(json.loads(each.read_text(encoding="utf-8")) for each in (ATTACK, PROXIED_ATTACK)))
        failed |= update_section("attack", f"{text}\n", f"the figures {fix}", "test/bench/README.md")
    return failed


if __name__ == "__main__":
    sys.exit(main())
