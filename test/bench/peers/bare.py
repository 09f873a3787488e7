"""A bare table and SQL statements, without a queue product."""

from typing import ClassVar

from .base import SqlPeer, payload


class BareTable(SqlPeer):
    version = "—"
    definition: ClassVar[str]
    filling: ClassVar[str]  # inserts %(messages)s rows with %(payload)s

    def setup(self) -> None:
        self.make_database()
        self.execute(self.definition)

    def fill(self, messages: int, size: int) -> None:
        self.execute(f"truncate {self.table}")
        self.execute(self.filling, payload=payload(size), messages=messages)
        self.settle()
