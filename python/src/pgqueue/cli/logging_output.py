"""Log lines of `work` and `serve`, as text or as JSON."""

import logging
import traceback
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.text import Text

from .formatting import json_line, printable

__all__ = ["Level", "log_to"]

_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red", "DEBUG": "dim"}
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class Level(StrEnum):
    """Levels of logging."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def log_to(console: Console, level: Level, as_json: bool) -> None:
    """Let every logger write to a console. A live line on it stays below the log lines."""
    logging.basicConfig(level=level.upper(), handlers=[_Handler(console, as_json)], force=True)


class _Handler(logging.Handler):
    def __init__(self, console: Console, as_json: bool) -> None:
        super().__init__()
        self._console = console
        self._as_json = as_json

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = Text(json_line(_record(record))) if self._as_json else _line(record)
            self._console.print(line, soft_wrap=True)
        except Exception:
            self.handleError(record)


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that the caller of the logger added: the queue, the message, the attempt."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _traceback(record: logging.LogRecord) -> str:
    return "".join(traceback.format_exception(record.exc_info[1])) if record.exc_info and record.exc_info[1] else ""


def _record(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "at": datetime.fromtimestamp(record.created, UTC),
        "level": record.levelname.lower(),
        "logger": record.name,
        "text": record.getMessage(),
    }
    if trace := _traceback(record):
        fields["traceback"] = trace
    known = (str, int, float, bool, type(None))
    return fields | {name: each if isinstance(each, known) else str(each) for name, each in _extra(record).items()}


def _line(record: logging.LogRecord) -> Text:
    at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
    line = Text.assemble((at, "dim"), " ", (record.levelname.lower(), _STYLES.get(record.levelname, "")))
    line.append(f" {record.name}: {printable(record.getMessage(), keep=chr(10))}")
    for name, each in _extra(record).items():
        if name != "queue":  # the text starts with it
            line.append(f" {name}={printable(str(each))}", style="dim")
    if trace := _traceback(record):
        line.append(f"\n{printable(trace.rstrip(), keep=chr(10))}")
    return line
