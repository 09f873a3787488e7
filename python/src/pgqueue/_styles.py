"""The session settings that psycopg needs to read values; a role, a database or a user may have changed them."""

from typing import Any

from psycopg import AsyncConnection, Connection

__all__ = ["correction_statement"]

_WANTED = {b"DateStyle": b"ISO", b"IntervalStyle": b"postgres", b"client_encoding": b"UTF8"}


def correction_statement(connection: Connection[Any] | AsyncConnection[Any]) -> bytes:
    """The statements that correct DateStyle, IntervalStyle and client_encoding of a connection; empty if they are
    correct.

    Needs no round trip: the server reports these settings when a session starts and when they change.
    """
    told = connection.pgconn.parameter_status
    wrong = [name for name, wanted in _WANTED.items() if (told(name) or wanted).partition(b",")[0] != wanted]
    return b"; ".join([b"set %b = %b" % (name, _WANTED[name]) for name in wrong])
