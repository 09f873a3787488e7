"""`send`: enqueues messages from arguments or from JSON Lines."""

import errno
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Self

import psycopg
import typer
from psycopg.types.json import Jsonb
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ..client import Queue
from ..errors import InvalidArgument, PayloadTooLarge
from .formatting import counted
from .parameters import (
    DedupKey,
    GroupKey,
    OnDuplicateOption,
    Priority,
    QueueName,
    duration_option,
    parse_headers,
    parse_json,
)
from .session import Failure, Session, Status, explain

__all__ = ["send"]

_STDIN: Final = "-"
_BATCH = 1000  # messages per statement
_BATCH_BYTES = 4 * 1024 * 1024
_REFUSED = (psycopg.DataError, PayloadTooLarge, psycopg.errors.ProgramLimitExceeded, psycopg.errors.StatementTooComplex)


class Input(NamedTuple):
    """A message to send, and its place in the input."""

    where: str
    content: Jsonb | bytes
    size: int


class BadInput(Exception):
    """An input that cannot be sent: its place and the reason, and optionally a hint."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)


def send(
    session: Session,
    queue: QueueName,
    payload: Annotated[
        list[str] | None, typer.Argument(metavar="PAYLOAD", help="JSON documents.", show_default=False)
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option("--file", "-f", metavar="FILE", help="A file of JSON Lines; - is standard input."),
    ] = None,
    body: Annotated[
        bool, typer.Option("--body", help="Send bytes, not JSON: each argument and each whole file is a message.")
    ] = False,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header of all messages.", show_default=False),
    ] = None,
    delay: Annotated[timedelta | None, duration_option(help="The delay before the first delivery.")] = None,
    expires_in: Annotated[
        timedelta | None, duration_option(help="Drop messages that are not consumed by then.")
    ] = None,
    dedup_key: DedupKey = None,
    on_duplicate: OnDuplicateOption = None,
    group_key: GroupKey = None,
    priority: Priority = None,
    commit_every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Commit after every N messages.", show_default=False)
    ] = None,
) -> None:
    """Send messages from arguments or from JSON Lines.

    Without arguments each line of the files, or of standard input, is a message; empty lines are skipped.

    Either all messages are sent or none: they share a transaction, and a line that cannot be sent ends it; the error
    names its file and number. With --commit-every there are several transactions: those before the bad line stay, and
    the error says up to which line.
    """
    if dedup_key is not None and (len(payload or ()) != 1):
        raise typer.BadParameter(
            "only with one payload: messages with the same key are one.", param_hint="'--dedup-key'"
        )
    if on_duplicate and dedup_key is None:
        raise typer.BadParameter("only with --dedup-key.", param_hint="'--on-duplicate'")
    if payload and file:
        raise typer.BadParameter("not together with payloads.", param_hint="'--file'")
    if not payload and not file:
        if sys.stdin is None or sys.stdin.isatty():
            raise typer.BadParameter("nothing to send: give payloads, --file, or JSON Lines on standard input.")
        file = [_STDIN]
    paths = [_path(name) for name in file or ()]
    own_headers = parse_headers(header or [])
    try:
        given = [_argument(number, text, body) for number, text in enumerate(payload or (), 1)]
    except BadInput as error:
        raise Failure(
            error.args[0], """A JSON string needs quotes, as in '"text"'; --body sends bytes.""", Status.USAGE
        ) from None

    with session.connect() as connection, _ProgressBar(session, paths) as progress:
        verbs = Queue(connection, queue)

        def enqueue(inputs: Sequence[Input]) -> list[int]:
            contents: list[Any] = [each.content for each in inputs]
            return verbs.enqueue_batch(
                payloads=None if body else contents,
                bodies=contents if body else None,
                headers=[own_headers] * len(inputs) if own_headers else None,
                delay=delay,
                expires_in=expires_in,
                dedup_keys=[dedup_key] * len(inputs) if dedup_key is not None else None,
                on_duplicate=on_duplicate,
                group_keys=[group_key] * len(inputs) if group_key is not None else None,
                priorities=[priority] * len(inputs) if priority is not None else None,
            )

        inputs = chain(given, (each for path in paths for each in _inputs(path, body, progress)))
        sender = _Sender(session, connection, enqueue)
        sender.send(inputs, commit_every)
        if not sender.sent:
            verbs.get_queue()  # raises an error for a missing queue, as sending does
    if session.json:
        return
    if sender.sent == 1:
        session.say(f"message {sender.first} sent to {queue}")
    else:
        ids = f", ids {sender.first} to {sender.last}" if sender.sent else ""
        session.say(f"{counted(sender.sent, 'message')} sent to {queue}{ids}")


class _Sender:
    """Sends inputs in transactions of several statements, and records what was sent."""

    def __init__(
        self, session: Session, connection: psycopg.Connection[Any], enqueue: Callable[[Sequence[Input]], list[int]]
    ) -> None:
        self._session = session
        self._connection = connection
        self._enqueue = enqueue
        self._pending = 0  # messages in the open transaction
        self._ids: list[int] = []  # their ids, if they are to be printed
        self._where = ""
        self._outcome = "Nothing was sent."
        self.sent = 0
        self.first: int | None = None
        self.last: int | None = None

    def send(self, inputs: Iterator[Input], commit_every: int | None) -> None:
        """Send all inputs. An error, too, says what was sent."""
        try:
            for batch in _batches(inputs, commit_every):
                self._add(batch)
                if self._pending == commit_every:
                    self._commit()
            self._commit()
        except KeyboardInterrupt:
            raise Failure("interrupted", self._outcome, 128 + signal.SIGINT) from None
        except (BadInput, psycopg.Error, OSError) as error:
            message, hint = error.args if isinstance(error, BadInput) else explain(error)
            raise Failure(message, f"{hint} {self._outcome}" if hint else self._outcome) from error

    def _add(self, batch: list[Input]) -> None:
        if not self._pending:
            self._connection.execute("begin")  # makes the transaction blocks below savepoints of this transaction
        try:
            with self._connection.transaction():
                ids = self._enqueue(batch)
        except _REFUSED as error:
            if isinstance(error, InvalidArgument) or "headers" in (error.diag.message_primary or ""):
                raise  # the queue or the headers are wrong, and all messages share them
            ids = [self._add_alone(each) for each in batch]
        self.first, self.last = self.first or ids[0], ids[-1]
        self._pending += len(ids)
        self._where = batch[-1].where
        if self._session.json:
            self._ids += ids

    def _add_alone(self, one: Input) -> int:
        try:
            with self._connection.transaction():
                return self._enqueue([one])[0]
        except _REFUSED as error:
            message, hint = explain(error)
            raise BadInput(f"{one.where}: {message}", hint) from None

    def _commit(self) -> None:
        pending = counted(self._pending, "message")
        unknown = f"The commit of {pending} up to {self._where} failed; check whether they were sent."
        before, self._outcome = self._outcome, unknown
        self._connection.commit()
        self.sent += self._pending
        self._outcome = (
            f"The first {counted(self.sent, 'was', 'were')} sent, up to {self._where}; none after that."
            if self.sent
            else before
        )
        self._session.lines({"id": each} for each in self._ids)
        self._pending, self._ids = 0, []


def _batches(inputs: Iterator[Input], commit_every: int | None) -> Iterator[list[Input]]:
    """Lists of inputs, one for each statement. No list goes beyond the end of a transaction."""
    batch: list[Input] = []
    size = count = 0
    for one in inputs:
        batch.append(one)
        size += one.size
        count += 1
        if len(batch) == _BATCH or size >= _BATCH_BYTES or count == commit_every:
            yield batch
            batch, size = [], 0
            count = 0 if count == commit_every else count
    if batch:
        yield batch


def _argument(number: int, text: str, body: bool) -> Input:
    content = os.fsencode(text)
    return Input(f"argument {number}", content if body else _json(text, f"argument {number}"), len(content))


def _path(name: str) -> Path | None:
    """The path of a readable file; None is standard input."""
    if name == _STDIN:
        if sys.stdin is None:
            raise typer.BadParameter("-: standard input is closed.", param_hint="'--file'")
        return None
    path = Path(name)
    try:  # it is not opened, because it may be a pipe
        is_directory, is_readable = stat.S_ISDIR(path.stat().st_mode), os.access(path, os.R_OK)
    except OSError as error:
        raise typer.BadParameter(f"{name}: {error.strerror}.", param_hint="'--file'") from None
    if is_directory or not is_readable:
        reason = os.strerror(errno.EISDIR if is_directory else errno.EACCES)
        raise typer.BadParameter(f"{name}: {reason}.", param_hint="'--file'")
    return path


def _inputs(path: Path | None, body: bool, progress: "_ProgressBar") -> Iterator[Input]:
    name = "standard input" if path is None else str(path)
    try:
        yield from _read(path, name, body, progress)
    except OSError as error:  # a read error has no file name
        raise BadInput(f"{name}: {error.strerror}") from error


def _read(path: Path | None, name: str, body: bool, progress: "_ProgressBar") -> Iterator[Input]:
    with nullcontext(sys.stdin.buffer) if path is None else path.open("rb") as lines:
        if body:
            content = lines.read()
            progress.advance(len(content))
            yield Input(name, content, len(content))
            return
        for number, line in enumerate(lines, 1):
            progress.advance(len(line))
            if text := line.strip():
                where = f"{name}:{number}"
                try:
                    yield Input(where, _json(text.decode("utf-8-sig" if number == 1 else "utf-8"), where), len(text))
                except UnicodeDecodeError as error:
                    raise BadInput(f"{where}: not UTF-8 at byte {error.start + 1}") from None


def _json(text: str, where: str) -> Jsonb:
    try:
        return parse_json(text)
    except ValueError as error:
        raise BadInput(f"{where}: not JSON: {error}") from None


class _ProgressBar:
    """A progress bar for files, shown only on a terminal."""

    def __init__(self, session: Session, files: list[Path | None]) -> None:
        self._count = 0
        self._progress: Progress | None = None
        if not files or session.quiet or not session.err.is_interactive:
            return
        self._progress = Progress(
            TextColumn("sending"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[count]:,} messages"),
            TimeRemainingColumn(),
            console=session.err,
            transient=True,
        )
        sizes = [_size(path) for path in files]
        known = [size for size in sizes if size is not None]
        self._task = self._progress.add_task("", total=sum(known) if len(known) == len(sizes) else None, count=0)

    def advance(self, size: int) -> None:
        """Count an input that was read; `size` is its bytes."""
        if self._progress is not None:
            self._count += 1
            self._progress.update(self._task, advance=size, count=self._count)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


def _size(path: Path | None) -> int | None:
    """The size of a file in bytes; None if it is not known before the file is read."""
    try:
        status = os.fstat(sys.stdin.fileno()) if path is None else path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
