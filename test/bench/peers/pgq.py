"""PgQ, of Debian: events in batches that a ticker cuts, for each consumer all of them.

A batch is fetched and finished as a whole, by one client at a time: more clients would be more consumers, each of
which gets every event. So it has no counterpart of a claim of one message. Batches have a hundred events, as the ticker
runs behind each hundred while the queue is filled.
"""

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from .base import QUEUE, Missing, Sample, SqlPeer, Work, payload, pgbench

FILL = """
do $$
begin
    for n in 1..{batches} loop
        perform pgq.insert_event('{queue}', 'created', '{payload}') from generate_series(1, 100);
        commit;
        perform pgq.ticker('{queue}');
        commit;
    end loop;
end $$
"""


# One client consumes what the others insert, batch by batch; without one it looks again soon.
CYCLE = rf"""
    \if :client_id = 0
    select coalesce(pgq.next_batch('{QUEUE}', 'bench'), 0) as mid \gset
    \if :mid = 0
    \sleep 20 ms
    \else
    select count(ev_data) as body from pgq.get_batch_events(:mid::bigint) \gset
    select pgq.finish_batch(:mid::bigint);
    \endif
    \else
    select pgq.insert_event('{QUEUE}', 'created', :payload);
    \endif
"""
FINISHED = """
    select t.tick_event_seq from pgq.subscription s
    join pgq.tick t on t.tick_queue = s.sub_queue and t.tick_id = s.sub_last_tick
"""
STALLED = 5.0  # seconds without a batch that is finished
DAEMON = Path(__file__).resolve().parents[3] / ".cache/bench/pgqd/root"


class Pgq(SqlPeer):
    name = "PgQ"
    table = "pgq.tick"
    scripts: ClassVar = {
        ("enqueue", 1): f"select pgq.insert_event('{QUEUE}', 'created', :payload);\n",
        ("enqueue", 100): (
            f"select count(pgq.insert_event('{QUEUE}', 'created', :payload)) from generate_series(1, 100);\n"
        ),
        ("take", 100): rf"""
            select pgq.next_batch('{QUEUE}', 'bench') as mid \gset
            select array_agg(ev_data) as body from pgq.get_batch_events(:mid::bigint) \gset
            select pgq.finish_batch(:mid::bigint);
        """,
    }

    def setup(self) -> None:
        self.make_database()
        if not self.execute("select 1 from pg_available_extensions where name = 'pgq'"):
            raise Missing("Debian's postgresql-15-pgq3, and PostgreSQL 15 (make test-tools)")
        if not (DAEMON / "usr/bin/pgqd").exists():
            raise Missing("Debian's pgqd, by test/bench/fetch.py")
        self.execute("create extension pgq")
        ((self.version,),) = self.execute("select extversion from pg_extension where extname = 'pgq'")
        self._create()

    def _create(self) -> None:
        self.execute(
            f"select pgq.create_queue('{QUEUE}')",
            f"select pgq.set_queue_config('{QUEUE}', 'ticker_max_count', '100')",
            f"select pgq.register_consumer('{QUEUE}', 'bench')",
        )

    def fill(self, messages: int, size: int) -> None:
        self.execute(f"select pgq.drop_queue('{QUEUE}', true)")
        self._create()
        self.execute(FILL.format(queue=QUEUE, batches=messages // 100, payload=payload(size)))
        self.settle()

    def run(self, work: Work) -> Sample:
        if work.verb != "take":
            return super().run(work)
        return pgbench(self.dsn, self.scripts["take", 100], replace(work, clients=1))

    def cycle(self, work: Work) -> Sample:
        """Events from their insert to the batch that was finished; how long calls take is that of the inserts."""
        with watched(self.dsn) as moments:
            inserted = pgbench(self.dsn, CYCLE, work, unclocked=0)
            # From batch to batch, a second apart, unless they came to an end before.
            if time.monotonic() > moments[-1][0] + STALLED:
                moments.append((time.monotonic(), moments[-1][1]))
        if len(moments) < 3:
            return Sample(0, work.seconds, inserted.latencies)
        # The first batch has what was there before.
        (begin, first), (end, last) = moments[1], moments[-1]
        return Sample(last - first, end - begin, inserted.latencies)

    @contextmanager
    def assisted(self) -> Iterator[None]:
        """By its own daemon, pgqd, which cuts the batches; as it is by default, each second."""
        with tempfile.TemporaryDirectory() as home:
            words = conninfo_to_dict(self.dsn)
            server = make_conninfo(**{name: words[name] for name in ("host", "port", "user")})
            settings = {
                "logfile": f"{home}/log",
                "pidfile": f"{home}/pid",
                "base_connstr": server,
                "initial_database": self.database,
                "database_list": self.database,
            }
            lines = ["[pgqd]", *(f"{name} = {value}" for name, value in settings.items())]
            (Path(home) / "ini").write_text("\n".join(lines) + "\n")
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", DAEMON / "usr/bin/pgqd", "-q", f"{home}/ini"],
                env=os.environ | {"LD_LIBRARY_PATH": f"{DAEMON}/usr/lib/x86_64-linux-gnu"},
            )
            try:
                yield
            finally:
                process.terminate()
                process.wait()

    @property
    def scanned(self) -> str:
        ((found,),) = self.execute("select queue_data_pfx from pgq.queue")
        return str(found)

    def left(self) -> int:
        """Batches that nobody has fetched yet."""
        return len(
            self.execute(
                "select 1 from pgq.tick t join pgq.subscription s on s.sub_queue = t.tick_queue"
                " where t.tick_id > s.sub_last_tick limit 1"
            )
        )


@contextmanager
def watched(dsn: str) -> Iterator[list[tuple[float, int]]]:
    """Yields when the consumer had finished how many events: now, and whenever that is another number."""
    done = threading.Event()
    moments: list[tuple[float, int]] = []
    with psycopg.connect(dsn, autocommit=True) as connection:

        def look() -> None:
            (finished,) = connection.execute(FINISHED).fetchone() or (0,)
            if not moments or finished != moments[-1][1]:
                moments.append((time.monotonic(), finished))

        def repeat() -> None:
            while not done.wait(0.05):
                look()

        look()
        thread = threading.Thread(target=repeat)
        thread.start()
        try:
            yield moments
        finally:
            done.set()
            thread.join()


def unpack(root: Path, into: Path) -> None:
    """Lay the files of Debian's package where a server of ours finds them: scripts, and libraries by their path."""
    for directory in ("extension", "lib"):
        (into / directory).mkdir(parents=True, exist_ok=True)
    for library in (root / "usr/lib/postgresql/15/lib").glob("pgq_*.so"):
        shutil.copy(library, into / "lib")
    for file in (root / "usr/share/postgresql/15/extension").glob("pgq*"):
        (into / "extension" / file.name).write_text(file.read_text().replace("$libdir/", f"{into}/lib/"))
