"""Ready-made Spark pipelines over queues: functions that take a Spark session, and commands of `pgqueue spark`.

Finished messages to Parquet and back into a queue, reports and redrives of dead letters, and a report on message flow.
"""

from .archive import (
    ArchiveBusyError,
    Archived,
    Compacted,
    StandbyError,
    archive_to_parquet,
    compact_archive,
    read_archive,
    read_finished,
)
from .dead_letters import dead_letter_report, normalized_error, read_dead_letters
from .metrics import PERCENTILES, flow_metrics
from .predicates import PredicateError, matching
from .replay import Redriven, Replayed, redrive_where, replay
from .report import DeadLetterGroup, Flow, Measure, flow_report
from .session import SparkFailure, local_session

__all__ = [
    "PERCENTILES",
    "ArchiveBusyError",
    "Archived",
    "Compacted",
    "DeadLetterGroup",
    "Flow",
    "Measure",
    "PredicateError",
    "Redriven",
    "Replayed",
    "SparkFailure",
    "StandbyError",
    "archive_to_parquet",
    "compact_archive",
    "dead_letter_report",
    "flow_metrics",
    "flow_report",
    "local_session",
    "matching",
    "normalized_error",
    "read_archive",
    "read_dead_letters",
    "read_finished",
    "redrive_where",
    "replay",
]
