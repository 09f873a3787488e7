"""PgQ, of Debian: events in batches that a ticker cuts, for each consumer all of them.

A batch is fetched and finished as a whole, by one client at a time: more clients would be more consumers, each of
which gets every event. So it has no counterpart of a claim of one message. Batches have a hundred events, as the ticker
runs behind each hundred while the queue is filled.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

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

    def left(self) -> int:
        """Batches that nobody has fetched yet."""
        return len(
            self.execute(
                "select 1 from pgq.tick t join pgq.subscription s on s.sub_queue = t.tick_queue"
                " where t.tick_id > s.sub_last_tick limit 1"
            )
        )


def unpack(root: Path, into: Path) -> None:
    """Lay the files of Debian's package where a server of ours finds them: scripts, and libraries by their path."""
    for directory in ("extension", "lib"):
        (into / directory).mkdir(parents=True, exist_ok=True)
    for library in (root / "usr/lib/postgresql/15/lib").glob("pgq_*.so"):
        shutil.copy(library, into / "lib")
    for file in (root / "usr/share/postgresql/15/extension").glob("pgq*"):
        (into / "extension" / file.name).write_text(file.read_text().replace("$libdir/", f"{into}/lib/"))
