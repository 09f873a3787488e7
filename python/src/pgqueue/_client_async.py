"""The asynchronous client: the verbs as methods over the caller's psycopg connection."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

from psycopg import AsyncConnection, AsyncCursor

from . import _calls
from ._client_rows import AsyncRows, each_row_async, read_leniently
from ._copy import CopyRows, copy_messages, server_moment
from ._styles import correction
from .message import (
    ArchiveChange,
    ArchivedMessage,
    DeadMessage,
    Exchanged,
    Finding,
    Message,
    QueueInfo,
    QueueStats,
    Stream,
    StreamBatch,
    Subscription,
)

T = TypeVar("T")


class _Calls:
    """Runs bound calls on the caller's connection."""

    __slots__ = ("connection",)

    def __init__(self, connection: AsyncConnection[Any]) -> None:
        self.connection = connection

    async def _all(self, call: _calls.Bound[T]) -> list[T]:
        cursor = AsyncCursor(self.connection, row_factory=call.row)
        # psycopg cannot read some styles of texts: a claim that was made must not end in an error.
        await cursor.execute(call.text, call.values, binary=bool(correction(self.connection)))
        try:
            return await cursor.fetchall()
        except Exception as error:
            return read_leniently(cursor, call, error)

    async def _one(self, call: _calls.Bound[T]) -> T:
        (row,) = await self._all(call)
        return row


class AsyncQueues(_Calls):
    """The verbs that concern the database and not one queue, over the caller's `AsyncConnection`."""

    __slots__ = ()

    async def list_queues(self) -> list[QueueInfo]:
        """Every queue and its settings, by name."""
        return await self._all(_calls.list_queues())

    async def drop_idle_queues(self) -> list[str]:
        """Drop queues that have `expires_after_idle` and were not used for so long; returns their names, at most 100.

        They hold no message, dead ones included, and nobody has claimed, received or waited. Call it until it returns
        none. `create_queue` does the same, for ten at most: there is no need to call this.
        """
        return await self._all(_calls.drop_idle_queues())

    async def stats(self, queue_name: str | None = None) -> list[QueueStats]:
        """The depth of a queue, or of every queue, by name.

        Cheap on a deep queue: `estimates` says which figures are estimated. Raises `QueueNotFound`.
        """
        return await self._all(_calls.stats(queue_name))

    async def list_streams(self, queue_name: str | None = None) -> list[Stream]:
        """The streams of a queue, or of every queue, by name. Raises `QueueNotFound`."""
        return await self._all(_calls.list_streams(queue_name))

    async def list_subscriptions(self, queue_name: str | None = None) -> list[Subscription]:
        """The subscriptions of a queue, or of every queue, by topic and queue. Raises `QueueNotFound`."""
        return await self._all(_calls.list_subscriptions(queue_name))

    async def expose_subscriptions(self, schema_name: str | None = None, table_name: str | None = None) -> str:
        """Make a relation over all subscriptions on which an NServiceBus transport works as on its own table.

        In `schema_name` (public), under `table_name` (SubscriptionRouting); returns its address. Raises
        `InvalidArgument`, and `psycopg.errors.DuplicateTable` and `InsufficientPrivilege`.
        """
        return await self._one(_calls.expose_subscriptions(schema_name, table_name))

    async def unexpose_subscriptions(self, schema_name: str | None = None, table_name: str | None = None) -> bool:
        """Drop the relation that `expose_subscriptions` made; False if there is none. The subscriptions stay."""
        return await self._one(_calls.unexpose_subscriptions(schema_name, table_name))

    async def publish(
        self,
        topic: str,
        payload: Any = None,
        delay: timedelta | None = None,
        headers: Mapping[str, Any] | None = None,
        expires_in: timedelta | None = None,
        message_id: UUID | None = None,
        body: bytes | None = None,
        base_topics: Iterable[str] | None = None,
    ) -> int:
        """Send a copy of a message to every queue that is subscribed to a topic; returns how many those are.

        `topic` is 1 to 255 characters, words joined by dots; `base_topics` are further names of the same event.
        A queue gets one copy, however many of its subscriptions match, with the topic in the header
        `pgqueue.topic`. Everything else as in `AsyncQueue.enqueue`, for every copy: one queue's limit refuses all.
        Raises `InvalidArgument`, `PayloadTooLarge`.
        """
        return await self._one(
            _calls.publish(topic, payload, delay, headers, expires_in, message_id, body, base_topics)
        )

    async def sink_commit(
        self,
        run: UUID,
        tokens: Iterable[UUID],
        counts: Iterable[int],
        app_id: str | None = None,
        version: int | None = None,
    ) -> bool:
        """Send what was staged in a run, all or none: of each attempt, by its token, as many messages as `counts` says.

        False, and the run discarded, if `version` of `app_id` was committed before; a run without them goes by
        its id, so that the call can be repeated until it is answered.

        Raises `StagedMessagesLost` where some are not there any more; `QueueNotFound` for a queue dropped since;
        `PayloadTooLarge` for a message over the limit of its queue, with its row; and `InvalidArgument` for a
        version that another role has committed, or that `sweep_staged` has forgotten.
        """
        return await self._one(_calls.sink_commit(run, tokens, counts, app_id, version))

    async def sink_abort(self, run: UUID) -> int:
        """Discard what one's own role has staged in a run and not committed; returns how many messages."""
        return await self._one(_calls.sink_abort(run))

    async def sweep_staged(self, older_than: timedelta | None = None, forget_after: timedelta | None = None) -> int:
        """Discard what was staged longer than `older_than` (1 day) ago; returns how many messages.

        Also lets the ledger forget commits after `forget_after` (90 days), but never the highest version of an
        `app_id`: a lower one that was forgotten is refused from then on. Raises `InvalidArgument`.
        """
        return await self._one(_calls.sweep_staged(older_than, forget_after))

    async def maintain_archive(self) -> list[ArchiveChange]:
        """Look after the archive, and return what was done: days made ahead, days dropped that nobody wants any more.

        Claims do the same by the way but for the dropping, and receives but for the emptying. To be called once a day,
        by whatever calls things, in a transaction of its own; it keeps no acknowledgement waiting.
        """
        return await self._all(_calls.maintain_archive())

    async def doctor(self, peek_delay: timedelta | None = None) -> list[Finding]:
        """What hurts and what repairs it, one finding a row; no row means all is well.

        Among others a pinned horizon and who pins it, a missing index, stuck claims, messages that expire
        before a consumer that looks every `peek_delay` (1 s) can see them.
        """
        return await self._all(_calls.doctor(peek_delay))

    async def version(self) -> str:
        """The version of the SQL that is installed."""
        return await self._one(_calls.version())

    async def grant_access(self, role_name: str, access: str) -> None:
        """Let a role call the verbs of a `producer`, `consumer`, `admin` or `reader`.

        `raw` is SQL on the tables, `transport` the use of what `AsyncQueue.expose_transport` made. Raises
        `InvalidArgument` for another word, `psycopg.errors.UndefinedObject` for an unknown role.
        """
        await self._one(_calls.grant_access(role_name, access))

    async def revoke_access(self, role_name: str, access: str) -> None:
        """Take back what `grant_access` gave. Raises what it raises."""
        await self._one(_calls.revoke_access(role_name, access))


class AsyncQueue(_Calls):
    """One queue, by name, over the caller's `AsyncConnection`. Nothing is looked up before a verb is called."""

    __slots__ = ("name",)

    def __init__(self, connection: AsyncConnection[Any], name: str) -> None:
        super().__init__(connection)
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    async def create_queue(
        self,
        visibility_timeout: timedelta | None = None,
        max_attempts: int | None = None,
        dlq_enabled: bool | None = None,
        dedicated: bool | None = None,
        dead_letter_expired: bool | None = None,
        max_payload_bytes: int | None = None,
        backoff_base: timedelta | None = None,
        backoff_factor: float | None = None,
        backoff_max: timedelta | None = None,
        backoff_jitter: float | None = None,
        if_not_exists: bool | None = None,
        archive_for: timedelta | None = None,
        expires_after_idle: timedelta | None = None,
    ) -> QueueInfo:
        """Create this queue and return it.

        A claimed message stays hidden for `visibility_timeout` (1 s to 12 h; 30 s). After `max_attempts` (1
        to 100; 5) it goes to the dead letters if `dlq_enabled`, else it is deleted; `dead_letter_expired`
        sends expired messages there too. `dedicated` gives the queue a table of its own, for the heavy few.
        `max_payload_bytes` (up to 100 MB; 256 KB) bounds payload and body. The wait after a failed attempt
        is `backoff_base` (0 to 30 days; 1 s) times `backoff_factor` (1 to 100; 2) for every attempt after the first,
        at most `backoff_max` (0 to 30 days; 10 min), less a random part of up to `backoff_jitter` (0 to 1; 0.2).
        With `if_not_exists` an existing queue is returned as it is. `archive_for` (1 to 3652.5 days; None keeps
        nothing) keeps what is acknowledged in the table `archived_messages`, at least so long. With
        `expires_after_idle` (1 s to 3652.5 days; None for never) a queue goes that is empty and was not used so long.

        Raises `InvalidArgument`, `QueueExists`, `QueueBusy`.
        """
        return await self._one(
            _calls.create_queue(
                self.name,
                visibility_timeout,
                max_attempts,
                dlq_enabled,
                dedicated,
                dead_letter_expired,
                max_payload_bytes,
                backoff_base,
                backoff_factor,
                backoff_max,
                backoff_jitter,
                if_not_exists,
                archive_for,
                expires_after_idle,
            )
        )

    async def alter_queue(
        self,
        visibility_timeout: timedelta | None = None,
        max_attempts: int | None = None,
        dlq_enabled: bool | None = None,
        dead_letter_expired: bool | None = None,
        max_payload_bytes: int | None = None,
        backoff_base: timedelta | None = None,
        backoff_factor: float | None = None,
        backoff_max: timedelta | None = None,
        backoff_jitter: float | None = None,
        archive_for: timedelta | None = None,
        expires_after_idle: timedelta | None = None,
    ) -> QueueInfo:
        """Change the settings that are given, and return the queue. Bounds as in `create_queue`.

        Messages keep the `max_attempts` they were sent with. A new `archive_for` holds for what was archived
        before, too; `timedelta(0)` ends archiving, and what was archived is kept as long as was promised.
        Raises `InvalidArgument`, `QueueNotFound`, and `QueueBusy` where archiving begins or ends for the relation of
        a transport while a longer transaction uses it.
        """
        return await self._one(
            _calls.alter_queue(
                self.name,
                visibility_timeout,
                max_attempts,
                dlq_enabled,
                dead_letter_expired,
                max_payload_bytes,
                backoff_base,
                backoff_factor,
                backoff_max,
                backoff_jitter,
                archive_for,
                expires_after_idle,
            )
        )

    async def drop_queue(self) -> int:
        """Drop the queue and all its messages, dead ones included; returns how many those were.

        Delayed messages that are not due and were never claimed become dead letters under its name, with reason
        `queue_dropped`: `browse_dead_messages` and `purge_dead_messages` find them, and `redrive` once there is a
        queue of that name again. They go, too, where the queue has no dead letters. What it archived is kept as
        long as its `archive_for` said.
        Raises `QueueNotFound`, and `QueueBusy` where a transaction that uses the queue stays open.
        """
        return await self._one(_calls.drop_queue(self.name))

    async def get_queue(self) -> QueueInfo:
        """The queue and its settings. Raises `QueueNotFound`."""
        return await self._one(_calls.get_queue(self.name))

    async def pause_queue(self) -> bool:
        """Hand out no messages until `resume_queue`; the queue still accepts them.

        False if it was paused already.
        """
        return await self._one(_calls.pause_queue(self.name))

    async def resume_queue(self) -> bool:
        """Hand out messages again. False if it was not paused."""
        return await self._one(_calls.resume_queue(self.name))

    async def purge_queue(self) -> int:
        """Delete all messages, ready, in flight and scheduled; dead ones stay. Returns how many.

        Raises `QueueNotFound`, `QueueBusy`.
        """
        return await self._one(_calls.purge_queue(self.name))

    async def expose_transport(
        self,
        schema_name: str | None = None,
        table_name: str | None = None,
        body_string: bool | None = None,
        flavor: str | None = None,
    ) -> str:
        """Make a relation over the queue on which an NServiceBus transport works as on its own table.

        In `schema_name` (public), under `table_name` (the queue's name); returns its address. `body_string` adds
        a column with the body as text; `flavor` is `postgresql`, the default, or `sqlserver`. The queue becomes
        dedicated. Who reads the relation needs rights on it, and `grant_access(role, "transport")`.

        Raises `InvalidArgument`, `QueueNotFound`, `QueueBusy`, and `psycopg.errors.DuplicateTable`,
        `DuplicateObject` (the queue is exposed) and `InsufficientPrivilege` (no right to create in the schema).
        """
        return await self._one(_calls.expose_transport(self.name, schema_name, table_name, body_string, flavor))

    async def unexpose_transport(self) -> bool:
        """Drop the relation that `expose_transport` made; False if there is none. The queue keeps its messages.

        Raises `QueueNotFound`, `QueueBusy`, and `psycopg.errors.DependentObjectsStillExist`.
        """
        return await self._one(_calls.unexpose_transport(self.name))

    async def advance_transport(self) -> int:
        """What the relation of `expose_transport` calls by itself; there is no need to."""
        return await self._one(_calls.advance_transport(self.name))

    async def subscribe(self, topic: str) -> bool:
        """Have a copy of what is published to a topic from now on; False if the queue is subscribed already.

        `topic` is 1 to 255 characters, words joined by dots. In their place `*` stands for exactly one word, `#`
        for any number. Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._one(_calls.subscribe(topic, self.name))

    async def unsubscribe(self, topic: str) -> bool:
        """End a subscription, named as it was made; False if there was none.

        What was published before stays in the queue. Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._one(_calls.unsubscribe(topic, self.name))

    async def list_subscriptions(self) -> list[Subscription]:
        """The subscriptions of the queue, by topic. Raises `QueueNotFound`."""
        return await self._all(_calls.list_subscriptions(self.name))

    async def enqueue(
        self,
        payload: Any = None,
        delay: timedelta | None = None,
        headers: Mapping[str, Any] | None = None,
        expires_in: timedelta | None = None,
        message_id: UUID | None = None,
        body: bytes | None = None,
    ) -> int:
        """Send a message in the caller's transaction; returns its id.

        Exactly one of `payload`, any value that serialises to JSON, and `body`, raw bytes. JSON null is
        `Jsonb(None)`; JSON that is text already is `Jsonb(text, dumps=str)`. `headers` is an object of at
        most 64 KB. `delay` (0 to 3652.5 days) postpones the first delivery; after `expires_in` (0 to 3652.5 days)
        the message is dropped. `message_id` is the sender's own name for it and need not be unique.

        Raises `InvalidArgument`, `QueueNotFound`, `PayloadTooLarge`.
        """
        return await self._one(_calls.enqueue(self.name, payload, delay, headers, expires_in, message_id, body))

    async def enqueue_batch(
        self,
        payloads: Iterable[Any] | None = None,
        delay: timedelta | None = None,
        headers: Iterable[Mapping[str, Any] | None] | None = None,
        expires_in: timedelta | None = None,
        message_ids: Iterable[UUID | None] | None = None,
        bodies: Iterable[bytes | None] | None = None,
        delays: Iterable[timedelta | None] | None = None,
    ) -> list[int]:
        """Send many messages, all or none, in the caller's transaction; returns their ids in request order.

        What is given by message is as long as the messages are many; each message has exactly one of payload
        and body. `delays`, where not None, overrides `delay` for its message. Otherwise as `enqueue`, whose
        errors it raises.
        """
        return await self._all(
            _calls.enqueue_batch(self.name, payloads, delay, headers, expires_in, message_ids, bodies, delays)
        )

    async def enqueue_copy(self, rows: AsyncRows) -> int:
        """Send a stream of messages by COPY, the fastest way in; returns how many. Needs the access `raw`.

        A row is a JSON value, raw bytes (a body) or a `NewMessage`; JSON null is `Jsonb(None)`. Messages are
        ready at once. Memory stays constant however many there are. All or none: where a row is refused, or
        `rows` raises, none is sent and the caller's transaction can go on; in autocommit mode the call is a
        transaction of its own. Sizes are those of the JSON text.

        Raises `QueueNotFound`; `PayloadTooLarge` and `InvalidArgument`, which name the row (1 is the first);
        and what PostgreSQL says of JSON that it cannot store, such as a NUL character.
        """
        rows = _calls.many("rows", rows)
        if not self.connection.autocommit:
            await self.get_queue()  # Begins the caller's transaction: the one below is a savepoint in it.
        async with self.connection.transaction():
            lines = CopyRows(self.connection, await self.get_queue(), await self._one(server_moment))
            cursor = AsyncCursor(self.connection)
            async with cursor.copy(copy_messages) as copy:
                async for row in each_row_async(rows):
                    if block := lines.add(row):
                        await copy.write(block)
                await copy.write(lines.end())
            if cursor.rowcount:
                await self.wake()
            return cursor.rowcount

    async def claim(
        self,
        max_messages: int | None = None,
        visibility_timeout: timedelta | None = None,
        claimed_by: str | None = None,
    ) -> list[Message]:
        """Borrow up to `max_messages` (1), by id: hidden for `visibility_timeout` (the queue's).

        This counts an attempt. `claimed_by` is a name for humans; the `claim_token` of the messages proves
        the claim to `ack`, `nack` and `extend`. Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._all(_calls.claim(self.name, max_messages, visibility_timeout, claimed_by))

    async def ack(self, id: int, claim_token: UUID | None) -> bool:
        """Acknowledge a claimed message: it is done and deleted, or archived. False if the claim was lost."""
        return await self._one(_calls.ack(self.name, id, claim_token))

    async def ack_batch(self, ids: Iterable[int], claim_token: UUID | None) -> int:
        """Acknowledge the messages of one claim; returns how many were still ours."""
        return await self._one(_calls.ack_batch(self.name, ids, claim_token))

    async def exchange(
        self,
        ids: Iterable[int] | None,
        claim_token: UUID | None,
        max_messages: int | None = None,
        visibility_timeout: timedelta | None = None,
        claimed_by: str | None = None,
    ) -> list[Exchanged]:
        """Acknowledge what is done and claim what is next, in one call and one commit.

        Returns first, with `lost` true, the `ids` that were no longer ours, then the claimed messages by id.
        With `ids` None or empty nothing is acknowledged, and `claim_token` may be None. Raises as `claim`.
        """
        return await self._all(
            _calls.exchange(self.name, ids, claim_token, max_messages, visibility_timeout, claimed_by)
        )

    async def nack(
        self,
        id: int,
        claim_token: UUID | None,
        delay: timedelta | None = None,
        error: str | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> bool:
        """Give a claimed message back: it comes again after `delay` (the queue's backoff).

        If its attempts are spent it goes to the dead letters, or is deleted if the queue has none. `error` is
        kept as its `last_error`; `headers` are merged into its own, unless the two exceed 64 KB. False if the
        claim was lost. Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._one(_calls.nack(self.name, id, claim_token, delay, error, headers))

    async def reject(
        self,
        id: int,
        claim_token: UUID | None,
        error: str | None = None,
        headers: Mapping[str, Any] | None = None,
        reason: str | None = None,
    ) -> bool:
        """Send a claimed message to the dead letters at once.

        `reason` is `rejected` by default, or `attempts_exhausted` where the caller counts attempts by rules of his own,
        and they are spent. `error` and `headers` are kept as by `nack`. False if the claim was lost. Raises
        `InvalidArgument`, `QueueNotFound`.
        """
        return await self._one(_calls.reject(self.name, id, claim_token, error, headers, reason))

    async def record_failure(
        self,
        id: int,
        attempt_count: int,
        delay: timedelta | None = None,
        error: str | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> bool:
        """Count an attempt that failed in a `receive` whose transaction was rolled back.

        `attempt_count` is that of the message as it was received. It is then backed off or dead as by `nack`,
        whose `delay`, `error` and `headers` these are. False if the message is gone, claimed or held by
        another transaction, or if an attempt was counted since. Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._one(_calls.record_failure(self.name, id, attempt_count, delay, error, headers))

    async def release(self, ids: Iterable[int], claim_token: UUID | None) -> int:
        """Give messages of one claim back unworked: ready at once, their attempt not counted.

        Returns how many were still ours. Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._one(_calls.release(self.name, ids, claim_token))

    async def extend(self, id: int, claim_token: UUID | None, visibility_timeout: timedelta | None = None) -> bool:
        """Keep a claimed message for another `visibility_timeout` (the queue's) from now.

        False if the claim was lost. Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._one(_calls.extend(self.name, id, claim_token, visibility_timeout))

    async def extend_batch(
        self, ids: Iterable[int], claim_token: UUID | None, visibility_timeout: timedelta | None = None
    ) -> list[int]:
        """Keep messages of one claim as `extend` does; returns, by id, those that are still ours."""
        return await self._all(_calls.extend_batch(self.name, ids, claim_token, visibility_timeout))

    async def receive(self, max_messages: int | None = None) -> list[Message]:
        """Take up to `max_messages` (1), by id, for good: they are deleted in the caller's transaction.

        A rollback returns them to their place. In autocommit mode they are gone when this returns. Raises as
        `claim`.
        """
        return await self._all(_calls.receive(self.name, max_messages))

    async def stream_open(self, stream_name: str, opened_by: str | None = None, on_ack: str | None = None) -> Stream:
        """Open a stream, making it where there is none: its batches can be read again after any crash.

        The `epoch` of what is returned is new, and whoever opened the stream before is fenced: his calls raise
        `StreamFenced`. A reader without a checkpoint begins behind `acked_seq` and `acked_token`. `opened_by`
        is a name for humans. `on_ack` says what becomes of messages acknowledged from now on: `delete`;
        `archive`, which insists on the queue's `archive_for`; None for what the queue says. Raises
        `InvalidArgument`.
        """
        return await self._one(_calls.stream_open(self.name, stream_name, opened_by, on_ack))

    async def stream_claim(
        self,
        stream_name: str,
        epoch: int,
        after_seq: int,
        after_token: UUID | None,
        max_messages: int | None = None,
        partitions: int | None = None,
        visibility_timeout: timedelta | None = None,
        up_to_id: int | None = None,
        fail_on_data_loss: bool | None = None,
    ) -> list[StreamBatch]:
        """Acknowledge what is done for good, up to batch `after_seq` with `after_token`; return the next.

        That is the batch that is open already, with the same messages, or a new one of up to `max_messages`
        (10000, at most 100000) that are ready, reserved for `visibility_timeout` (the queue's), to be read in
        `partitions` (1); none where nothing is ready. Before the first batch `after_seq` is 0 and
        `after_token` None. `up_to_id` leaves what is sent later to a later run.

        Raises `StreamOutOfStep` where the two are not the stream's: a checkpoint rolled back, copied or
        another's; without `fail_on_data_loss` (true) the stream follows the checkpoint, and an open batch is
        given back. Raises `StreamFenced`, `StreamNotFound`, `InvalidArgument`.
        """
        return await self._all(
            _calls.stream_claim(
                self.name,
                stream_name,
                epoch,
                after_seq,
                after_token,
                max_messages,
                partitions,
                visibility_timeout,
                up_to_id,
                fail_on_data_loss,
            )
        )

    async def stream_begin(
        self,
        stream_name: str,
        epoch: int,
        seq: int,
        claim_token: UUID,
        max_replays: int | None = None,
        fail_on_data_loss: bool | None = None,
    ) -> StreamBatch:
        """Begin to read the open batch, for the first time or again: before its partitions are read.

        Where it is read again its reservation is renewed. Raises `StreamDataLost` if messages are no longer the
        stream's; without `fail_on_data_loss` (true) they are left out from then on, and are `lost`. Raises
        `StreamPoisoned` after `max_replays` (5) replays, one for each epoch that begins it again. Raises
        `StreamOutOfStep` for a batch that is not the open one; without `fail_on_data_loss` it is returned
        with no messages and no partitions. Raises `StreamFenced`, `StreamNotFound`, `InvalidArgument`.
        """
        return await self._one(
            _calls.stream_begin(self.name, stream_name, epoch, seq, claim_token, max_replays, fail_on_data_loss)
        )

    async def stream_read(
        self, stream_name: str, epoch: int, seq: int, claim_token: UUID, partition: int | None = None
    ) -> list[Message]:
        """The messages of one partition of the open batch, from 0, or of all of them, by id.

        Changes nothing and returns the same each time but for `visible_at`. Never returns less: raises
        `StreamDataLost` where messages are no longer the stream's, `StreamOutOfStep` for a batch that is not
        the open one, `StreamFenced`, `StreamNotFound`, `InvalidArgument`.
        """
        return await self._all(_calls.stream_read(self.name, stream_name, epoch, seq, claim_token, partition))

    async def stream_extend(
        self, stream_name: str, epoch: int, visibility_timeout: timedelta | None = None
    ) -> list[StreamBatch]:
        """End the reservation of the open batch `visibility_timeout` from now, by default that of its claim.

        Returns the batch, with the ids that are no longer the stream's as `lost`, or nothing if none is open.
        The heartbeat of a reader. Raises `StreamFenced`, `StreamNotFound`, `InvalidArgument`.
        """
        return await self._all(_calls.stream_extend(self.name, stream_name, epoch, visibility_timeout))

    async def stream_ack(self, stream_name: str, epoch: int, seq: int, claim_token: UUID) -> int:
        """Remove the messages of the open batch, which is done for good.

        Returns how many were still the stream's; 0 if it was acknowledged before. Raises `StreamOutOfStep`
        for a batch that never was claimed, `StreamFenced`, `StreamNotFound`, `InvalidArgument`.
        """
        return await self._one(_calls.stream_ack(self.name, stream_name, epoch, seq, claim_token))

    async def stream_skip(
        self,
        stream_name: str,
        seq: int,
        ids: Iterable[int] | None = None,
        error: str | None = None,
        epoch: int | None = None,
    ) -> int:
        """Take messages, all or those in `ids`, out of the open batch; returns how many went to the dead letters.

        Their reason is `rejected`, their `last_error` is `error`. The batch goes on with the rest, and its
        replays start over. Without `epoch` this fences who reads the stream: start him again. A reader that
        sorts out what it cannot use gives its own. Raises `StreamOutOfStep` if the batch is not open,
        `StreamFenced`, `StreamNotFound`, `InvalidArgument`.
        """
        return await self._one(_calls.stream_skip(self.name, stream_name, seq, ids, error, epoch))

    async def list_streams(self) -> list[Stream]:
        """The streams of the queue, by name."""
        return await self._all(_calls.list_streams(self.name))

    async def drop_stream(self, stream_name: str) -> int:
        """Drop a stream and give the messages of its open batch back; returns how many those were.

        Raises `StreamNotFound`.
        """
        return await self._one(_calls.drop_stream(self.name, stream_name))

    async def sink_stage(self, run: UUID, partition: int, attempt: int) -> UUID:
        """Begin to stage what one attempt at a partition of a run writes for this queue; returns its token.

        The messages are copied into `pgqueue.staged_messages` under the token, as arrays of some hundred a row, each
        with the number of its first message, from 1, in the same transaction. Nobody sees them before
        `AsyncQueues.sink_commit`. Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._one(_calls.sink_stage(self.name, run, partition, attempt))

    async def peek(self, max_records: int | None = None) -> int:
        """How many messages could be received now, counted up to `max_records` (100).

        Counted over rows that nobody holds; neither blocks nor is blocked. Raises as `claim`.
        """
        return await self._one(_calls.peek(self.name, max_records))

    async def browse(
        self, state: str | None = None, max_messages: int | None = None, after_id: int | None = None
    ) -> list[Message]:
        """Look at up to `max_messages` (100) without touching them, by id after `after_id` (0).

        `state` is `ready` (the default), `inflight` or `scheduled`. Raises `InvalidArgument`,
        `QueueNotFound`.
        """
        return await self._all(_calls.browse(self.name, state, max_messages, after_id))

    async def browse_dead_messages(
        self, max_messages: int | None = None, after_id: int | None = None
    ) -> list[DeadMessage]:
        """Look at up to `max_messages` (100) dead letters, by id after `after_id` (0).

        Those that a queue left which was dropped, too. Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._all(_calls.browse_dead_messages(self.name, max_messages, after_id))

    async def browse_archived_messages(
        self, max_messages: int | None = None, before_id: int | None = None
    ) -> list[ArchivedMessage]:
        """Look at up to `max_messages` (100) messages that were acknowledged, the newest id first, below `before_id`.

        Those of a queue that was dropped, too, as long as they are kept. Raises `InvalidArgument`,
        `QueueNotFound`.
        """
        return await self._all(_calls.browse_archived_messages(self.name, max_messages, before_id))

    async def stats(self) -> QueueStats:
        """The depth of the queue. Cheap on a deep queue: `estimates` says which figures are estimated."""
        return await self._one(_calls.stats(self.name))

    async def redrive(self, max_messages: int | None = None, ids: Iterable[int] | None = None) -> int:
        """Make dead letters ready again, up to `max_messages` (1000), or those of `ids`; returns how many."""
        return await self._one(_calls.redrive(self.name, max_messages, ids))

    async def purge_dead_messages(self, ids: Iterable[int] | None = None) -> int:
        """Delete all dead letters, or those of `ids`; returns how many. Also those that a dropped queue left."""
        return await self._one(_calls.purge_dead_messages(self.name, ids))

    async def purge_expired(self, batch_size: int | None = None) -> int:
        """Delete expired messages, up to `batch_size` (10000); returns how many."""
        return await self._one(_calls.purge_expired(self.name, batch_size))

    async def channel(self) -> str:
        """The channel to LISTEN on; its notifications carry no payload."""
        return await self._one(_calls.channel(self.name))

    async def wake(self) -> None:
        """Notify waiting consumers when the transaction commits.

        For those who insert into the table themselves; `enqueue` does it where somebody waits.
        """
        await self._one(_calls.wake(self.name))

    async def prepare_wait(self, timeout: timedelta | None = None) -> datetime:
        """Announce a wait on `channel` of up to `timeout` (60 s, at most a day): the next enqueue notifies.

        Returns when to look again at the latest. Claim once more between this call and the wait. Raises
        `InvalidArgument`.
        """
        return await self._one(_calls.prepare_wait(self.name, timeout))

    async def next_due_at(self) -> datetime | None:
        """When the next message comes due: a delay, a backoff or a claim that ends.

        In the past if one is ready, None if nothing is pending.
        """
        return await self._one(_calls.next_due_at(self.name))
