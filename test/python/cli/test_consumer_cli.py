"""What `work` sees of a queue and does at its start, where the whole command would take long to show it."""

from datetime import datetime, timedelta
from typing import Any, cast

import psycopg
import pytest
from consumers import SECOND, prepare

from pgqueue.cli import watch
from pgqueue.cli.frame import Session


@pytest.mark.parametrize("off", [-2, 2])
def test_what_is_for_later_is_told_by_the_clock_of_the_server_alone(
    off: int, database: str, connection: psycopg.Connection[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + off * 3600 * SECOND

    monkeypatch.setattr(watch, "datetime", Wrong, raising=False)

    def is_empty(look_ahead: timedelta) -> bool:
        seen = watch.Watch(Session(), database, name, cast(Any, None), look_ahead)
        try:
            return seen._look()
        finally:
            seen._hang_up()

    queue = prepare(connection, name)
    assert is_empty(0 * SECOND)
    queue.enqueue(1, delay=3600 * SECOND)
    assert is_empty(60 * SECOND)
    assert not is_empty(5400 * SECOND)
    queue.enqueue(2)
    assert not is_empty(60 * SECOND)
