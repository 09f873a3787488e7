"""Pipelines over queues, ready to run: each a function of a Spark session, and a command of `pgqueue spark`.

Finished messages to Parquet and back into a queue, dead letters by what they died of and back to life, how messages
flow, and the flights of the demo from one end to the other.
"""

from .again import Redriven, Replayed, read_dead_letters, redrive_where, replay
from .archive import ArchiveBusyError, Archived, StandbyError, archive_to_parquet, read_archive, read_finished
from .flights import Published, read_summaries, summarize, summarize_flights
from .flow import PERCENTILES, flow_metrics
from .letters import dead_letter_report, normalized_error
from .page import Flow, Letters, Measure
from .predicates import PredicateError, matching
from .report import FlowReport, flow_report
from .session import SparkFailure, local_session

__all__ = [
    "PERCENTILES",
    "ArchiveBusyError",
    "Archived",
    "Flow",
    "FlowReport",
    "Letters",
    "Measure",
    "PredicateError",
    "Published",
    "Redriven",
    "Replayed",
    "SparkFailure",
    "StandbyError",
    "archive_to_parquet",
    "dead_letter_report",
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
