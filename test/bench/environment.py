"""What all benchmarks share: server settings, servers, and the description of server, machine and commit."""

import os
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg

from pgqueue.embedded import EmbeddedServer

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
SETTINGS = {"shared_buffers": "512MB", "max_wal_size": "8GB"}
PAYLOAD = """'{"order_id": 1001, "event": "created", "items": [{"sku": "A-1", "qty": 2}], "total": 123.45}'::jsonb"""
MANY = {"max_connections": "200"}  # for 64 clients and the connection pools of libraries


@contextmanager
def servers(majors: set[int]) -> Iterator[dict[int, EmbeddedServer | None]]:
    """Start a durable server of each major version; None for a version that is not available."""
    running: dict[int, EmbeddedServer | None] = {}
    try:
        for major in sorted(majors):
            bindir = None if major == 18 else ROOT / f".cache/postgres/node_modules/pg{major}/native/bin"
            if bindir is not None and not (bindir / "postgres").exists():
                running[major] = None
                continue
            pgq = ROOT / ".cache/bench/pgq/extension"
            extensions = [pgq] if major == 15 and pgq.is_dir() else []
            server = EmbeddedServer(bindir=bindir, settings=SETTINGS | MANY, extra_extension_dirs=extensions)
            running[major] = server.start()
        yield running
    finally:
        for server in running.values():
            if server is not None:
                server.stop()


def circumstances(running: dict[int, EmbeddedServer | None]) -> dict[str, Any]:
    """Describe the commit, date, servers, settings and machine of a measurement."""
    commit = output_of("git", "rev-parse", "--short", "HEAD") or "unknown"
    changed = output_of("git", "status", "--porcelain", "--", "sql", "extension", "python/src")
    settings = ", ".join(f"{name} = {value}" for name, value in (SETTINGS | MANY).items())
    return {
        "commit": commit + (" with changes" if changed else ""),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "postgresql": {str(major): version(server) for major, server in running.items() if server is not None},
        "settings": f"{settings}, fsync on, everything else as PostgreSQL has it",
        "machine": f"{os.cpu_count()} cores ({cpu()}), {platform.system()} {platform.release()}, Unix socket",
        "load_before": round(os.getloadavg()[0], 2),
    }


def version(server: EmbeddedServer) -> str:
    with psycopg.connect(server.dsn) as connection:
        (found,) = connection.execute("select split_part(version(), ' ', 2)").fetchone() or ("?",)
    return str(found)


def output_of(*command: object) -> str:
    """Return what a program prints; nothing if the machine does not have it."""
    try:
        return subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.machine()
