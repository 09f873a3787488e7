"""The monitor of `work` on its own, because the command would take long to show the same."""

from datetime import datetime, timedelta
from typing import Any, cast

import psycopg
import pytest
from consumers import SECOND, prepare

from pgqueue.cli import work_monitor
from pgqueue.cli.session import Session


@pytest.mark.parametrize("off", [-2, 2])
def test_the_look_ahead_uses_only_the_clock_of_the_server(
    off: int, database: str, connection: psycopg.Connection[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + off * 3600 * SECOND

    monkeypatch.setattr(work_monitor, "datetime", Wrong, raising=False)

    def is_empty(look_ahead: timedelta) -> bool:
        seen = work_monitor.WorkMonitor(Session(), database, [name], cast(Any, None), look_ahead)
        try:
            return seen._is_drained()
        finally:
            seen._close_connection()

    queue = prepare(connection, name)
    assert is_empty(0 * SECOND)
    queue.enqueue(1, delay=3600 * SECOND)
    assert is_empty(60 * SECOND)
    assert not is_empty(5400 * SECOND)
    queue.enqueue(2)
    assert not is_empty(60 * SECOND)
    queue.pause_queue()
    assert is_empty(60 * SECOND)
