"""How a session writes values so that psycopg can read them: a role, a database or a user may have it otherwise."""

from typing import Any

from psycopg import AsyncConnection, Connection

__all__ = ["correction"]

_WANTED = {b"DateStyle": b"ISO", b"IntervalStyle": b"postgres", b"client_encoding": b"UTF8"}


def correction(connection: Connection[Any] | AsyncConnection[Any]) -> bytes:
    """The statements that set right what psycopg could not read as text, or send, on a connection; mostly none.

    Asks nobody: the server tells of these settings by itself.
    """
    told = connection.pgconn.parameter_status
    wrong = [name for name, wanted in _WANTED.items() if (told(name) or wanted).partition(b",")[0] != wanted]
    return b"; ".join([b"set %b = %b" % (name, _WANTED[name]) for name in wrong])
