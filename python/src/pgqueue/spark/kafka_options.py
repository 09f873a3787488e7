"""The options of Spark's Kafka source and sink: those that have the same meaning here, and what to write for others."""

from collections.abc import Collection

__all__ = ["DEFAULT_STREAM", "KAFKA_NAMES", "names_topic", "substitute"]

DEFAULT_STREAM = "kafka"  # A job for Kafka does not name its stream.
# For options of pgqueue, the names that they have for Kafka in reads (batch and stream) and in writes.
KAFKA_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "queue": {"read": ("subscribe",), "stream": ("subscribe",), "write": ("topic",)},
    "numPartitions": {"read": ("minPartitions",), "stream": ("minPartitions",)},
    "streamId": {"stream": ("kafka.group.id",)},
    "maxMessagesPerTrigger": {"stream": ("maxOffsetsPerTrigger",)},
    "minMessagesPerTrigger": {"stream": ("minOffsetsPerTrigger",)},
}
# Values that say what pgqueue does anyway. A queue keeps no message that was consumed.
_IMPLIED = {
    "startingoffsets": ("earliest", {"read", "stream"}),
    "endingoffsets": ("latest", {"read"}),
}
_OFFSETS = "a message is read once, so a queue has no offsets"
_SUBSTITUTES = {
    "kafka.bootstrap.servers": "set option dsn to the database",
    "subscribe": "set option topic or queue to the queue",
    "topic": "set option subscribe or queue to the queue",
    "subscribepattern": "set option queuePattern to the beginning of the names, such as billing-*",
    "assign": "a queue has no partitions: set option queue to the queue",
    "startingoffsets": f"{_OFFSETS}: the only value is earliest; minId and since limit a batch read",
    "endingoffsets": f"{_OFFSETS}: the only value is latest, in a batch read, which maxId and until limit",
    "startingtimestamp": "set option since of a batch read to a time in ISO 8601",
    "endingtimestamp": "set option until of a batch read to a time in ISO 8601",
    "startingoffsetsbytimestamp": "set option since of a batch read to a time in ISO 8601",
    "endingoffsetsbytimestamp": "set option until of a batch read to a time in ISO 8601",
    "startingoffsetsbytimestampstrategy": "leave it out",
    "maxrecordsperpartition": "set option numPartitions to the number of tasks",
    "minpartitions": "the partitions of the data are those of the write; coalesce limits them",
    "maxoffsetspertrigger": "set option maxMessagesPerTrigger of a stream",
    "minoffsetspertrigger": "set option minMessagesPerTrigger of a stream",
    "groupidprefix": "set option streamId to a name of the stream",
    "kafkaconsumer.polltimeoutms": "set option retryTimeout",
    "fetchoffset.numretries": "set option retryTimeout",
    "fetchoffset.retryintervalms": "set option retryTimeout",
}


def names_topic(given: Collection[str]) -> bool:
    """Whether options, in lower case, name the queue as Kafka names a topic."""
    return "subscribe" in given or "topic" in given


def substitute(name: str, value: str, use: str) -> str | None:
    """Return what to write in place of an option of Kafka: "" if nothing, None if Kafka has no such option."""
    lowered = name.lower()
    implied, uses = _IMPLIED.get(lowered, ("", set[str]()))
    if use in uses and value.strip().lower() == implied:
        return ""
    if lowered.startswith("kafka.") and lowered not in _SUBSTITUTES:
        return "leave it out: the settings of the connection are those of option dsn"
    return _SUBSTITUTES.get(lowered)
