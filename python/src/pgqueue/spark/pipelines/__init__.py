"""Ready-made Spark pipelines over queues: functions that take a Spark session, and commands of `pgqueue spark`.

Finished messages to Parquet and back into a queue, reports and redrives of dead letters, a report on message flow, and
the flights pipeline of the demo.
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
from .flights import Published, read_summaries, summarize, summarize_flights
from .metrics import PERCENTILES, duration_counts, flow_metrics
from .predicates import PredicateError, matching
from .replay import Redriven, Replayed, redrive_where, replay
from .report import FlowReport, flow_report
from .report_page import DeadLetterGroup, Durations, Flow, Measure
from .session import SparkFailure, local_session

__all__ = [
    "PERCENTILES",
    "ArchiveBusyError",
    "Archived",
    "Compacted",
    "DeadLetterGroup",
    "Durations",
    "Flow",
    "FlowReport",
    "Measure",
    "PredicateError",
    "Published",
    "Redriven",
    "Replayed",
    "SparkFailure",
    "StandbyError",
    "archive_to_parquet",
    "compact_archive",
    "dead_letter_report",
    "duration_counts",
    "flow_metrics",
    "flow_report",
    "local_session",
    "matching",
    "normalized_error",
    "read_archive",
    "read_dead_letters",
    "read_finished",
    "read_summaries",
    "redrive_where",
    "replay",
    "summarize",
    "summarize_flights",
]
