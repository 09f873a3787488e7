"""The asynchronous client: the verbs as methods over the caller's psycopg connection."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

from psycopg import AsyncConnection, DataError

from . import _calls
from ._adapters import AsyncOwnCursor, JsonDumps, JsonLoads, client_adapters
from ._client_rows import AsyncRows, each_row_async, read_leniently
from ._connections import check_connection, correction_statement
from ._copy import CopyRows, add_row, copy_messages, server_moment
from ._elements import name_refused
from .errors import MISSING, not_installed
from .message import (
    Access,
    ArchiveChange,
    ArchivedMessage,
    Compaction,
    DeadMessage,
    Exchanged,
    Finding,
    Message,
    QueueInfo,
    QueueStats,
    Result,
    Schedule,
    SettledClaim,
    Stream,
    StreamBatch,
    Subscription,
)

T = TypeVar("T")


class _Calls:
    """Runs bound calls on the caller's connection.

    `json_loads` reads payloads and headers, from bytes; `json_dumps` writes them, as text or bytes. The defaults are
    those of the module `json`. The adapters of the connection are not used.
    """

    __slots__ = ("_adapters", "_idle", "connection")

    def __init__(
        self,
        connection: AsyncConnection[Any],
        *,
        json_loads: JsonLoads | None = None,
        json_dumps: JsonDumps | None = None,
    ) -> None:
        check_connection(connection, AsyncConnection)
        self.connection = connection
        self._adapters = client_adapters(json_loads, json_dumps)
        self._idle: dict[Any, AsyncOwnCursor] = {}  # by statement, and by the settings to which a cursor has adapted

    async def _all(self, call: _calls.Bound[T]) -> list[T]:
        told = self.connection.pgconn.parameter_status
        key = call.text, told(b"client_encoding"), told(b"TimeZone")
        # Executing a statement again on its cursor saves a fifth of the time. The idle cursor keeps its last row.
        cursor = self._idle.pop(key, None)
        if cursor is None or cursor.connection is not self.connection:
            cursor = AsyncOwnCursor(self.connection, self._adapters, call.row)
        try:
            values = _calls.with_json_as_text(call, self._adapters.json_dumps) if call.json else call.values
            # psycopg cannot read every text style of a value.
            binary = self._adapters.is_binary or bool(correction_statement(self.connection))
            await cursor.execute(call.text, values, binary=binary)
        except MISSING as error:
            raise not_installed(error, self.connection.info.dbname) from None
        except Exception as error:
            name_refused(error, call, self._adapters)
            raise
        try:
            rows = await cursor.fetchall()
        except Exception as error:
            return read_leniently(cursor, call, error)
        if len(rows) <= 1:
            self._idle[key] = cursor
        return rows

    async def _one(self, call: _calls.Bound[T]) -> T:
        (row,) = await self._all(call)
        return row


class AsyncQueues(_Calls):
    """The verbs that concern the whole database, over the caller's `AsyncConnection`."""

    __slots__ = ()

    async def list_queues(self) -> list[QueueInfo]:
        """All queues and their settings, by name."""
        return await self._all(_calls.list_queues())

    async def drop_idle_queues(self) -> list[str]:
        """Drop queues that were not used for their `expires_after_idle`. Returns their names, at most 100.

        Such a queue has no message and no dead letter, and no session has claimed, received or waited. Call it until it
        returns none. Calling it is optional: `create_queue` drops up to ten such queues.
        """
        return await self._all(_calls.drop_idle_queues())

    async def stats(self, queue_name: str | None = None) -> list[QueueStats]:
        """The depth of a queue, or of every queue, by name.

        Cheap on a deep queue: `estimates` names the figures that are estimated. Raises `QueueNotFound`.
        """
        return await self._all(_calls.stats(queue_name))

    async def list_streams(self, queue_name: str | None = None) -> list[Stream]:
        """The streams of a queue, or of every queue, by name. Raises `QueueNotFound`."""
        return await self._all(_calls.list_streams(queue_name))

    async def list_subscriptions(self, queue_name: str | None = None) -> list[Subscription]:
        """The subscriptions of a queue, or of every queue, by topic and queue. Raises `QueueNotFound`."""
        return await self._all(_calls.list_subscriptions(queue_name))

    async def expose_subscriptions(self, schema_name: str | None = None, table_name: str | None = None) -> str:
        """Create a relation over the subscriptions of exposed queues, which a transport uses like its own table.

        Its schema is `schema_name` (public), its name `table_name` (SubscriptionRouting). Returns the qualified name.
        Raises `InvalidArgument`, and `psycopg.errors.DuplicateTable` and `InsufficientPrivilege`.
        """
        return await self._one(_calls.expose_subscriptions(schema_name, table_name))

    async def unexpose_subscriptions(self, schema_name: str | None = None, table_name: str | None = None) -> bool:
        """Drop the relation that `expose_subscriptions` created. False if there is none. The subscriptions stay."""
        return await self._one(_calls.unexpose_subscriptions(schema_name, table_name))

    async def expose_contract(self, schema_name: str | None = None) -> bool:
        """Create views over the tables in a schema (mdb_queue), for SQL that names it. False if the schema has them.

        The rights on the tables decide what a role may do: access `raw` lets it use them. Raises `InvalidArgument`, and
        `psycopg.errors.DuplicateTable` and `InsufficientPrivilege`.
        """
        return await self._one(_calls.expose_contract(schema_name))

    async def unexpose_contract(self, schema_name: str | None = None) -> bool:
        """Drop the views that `expose_contract` created. False if there are none. The messages stay.

        Raises `InvalidArgument`, and `psycopg.errors.LockNotAvailable` if a longer transaction uses a view.
        """
        return await self._one(_calls.unexpose_contract(schema_name))

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
        dedup_key: str | None = None,
        on_duplicate: str | None = None,
        group_key: str | None = None,
        priority: int | None = None,
    ) -> int:
        """Send a copy of a message to every queue that is subscribed to a topic. Returns the number of queues.

        `topic` has 1 to 255 characters: words joined by dots. `base_topics` are further topics of the same event. A
        queue gets one copy, even if several of its subscriptions match; the header `pgqueue.topic` holds the topic. The
        other arguments are those of `AsyncQueue.enqueue` and apply to every copy. If the message exceeds the limit of
        one queue, no queue gets it. A queue in which `dedup_key` is taken counts, too. Raises `InvalidArgument`,
        `PayloadTooLarge`.
        """
        return await self._one(
            _calls.publish(
                topic,
                payload,
                delay,
                headers,
                expires_in,
                message_id,
                body,
                base_topics,
                dedup_key,
                on_duplicate,
                group_key,
                priority,
            )
        )

    async def claim_any(
        self,
        queue_names: Iterable[str],
        max_messages: int | None = None,
        visibility_timeout: timedelta | None = None,
        claimed_by: str | None = None,
    ) -> list[Message]:
        """Claim up to `max_messages` (1) from several queues (1 to 100): from the first one, then from the next.

        While an earlier queue has ready messages, later ones wait. The messages of one queue have the same
        `claim_token`; settle each under its own `queue_name`. The rest is as in `AsyncQueue.claim`. Raises
        `InvalidArgument`, `QueueNotFound`.
        """
        return await self._all(_calls.claim_any(queue_names, max_messages, visibility_timeout, claimed_by))

    async def get_result(self, message_id: UUID) -> Result | None:
        """The result of a message; None if there is none, or if it has expired.

        It has failed if its message is gone and no consumer has written an outcome: see `Result.reason`.
        """
        found = await self._all(_calls.get_result(message_id))
        return found[0] if found else None

    async def list_schedules(self, queue_name: str | None = None) -> list[Schedule]:
        """The schedules of a queue, or of every queue, by name. Raises `QueueNotFound`."""
        return await self._all(_calls.list_schedules(queue_name))

    async def alter_schedule(
        self,
        name: str,
        cron: str | None = None,
        payload: Any = None,
        headers: Mapping[str, Any] | None = None,
        time_zone: str | None = None,
        paused: bool | None = None,
        catch_up: bool | None = None,
        priority: int | None = None,
        group_key: str | None = None,
    ) -> datetime | None:
        """Change the given settings of a schedule. Returns the time of the next tick; None if the schedule is paused.

        The arguments are those of `AsyncQueue.create_schedule`. New `headers` without `pgqueue.priority` or
        `pgqueue.group` remove the priority or the group, unless `priority` or `group_key` is given, too. A tick that no
        consumer has claimed yet is removed. Waits for a transaction that is claiming a tick. Raises `InvalidArgument`,
        `PayloadTooLarge`, `ScheduleNotFound`.
        """
        return await self._one(
            _calls.alter_schedule(name, cron, payload, headers, time_zone, paused, catch_up, priority, group_key)
        )

    async def drop_schedule(self, name: str) -> bool:
        """Drop a schedule. False if there is none. A tick that nobody has claimed yet is removed."""
        return await self._one(_calls.drop_schedule(name))

    async def run_schedule(self, name: str) -> int:
        """Send the message of a schedule now, also if it is paused, and return its id. The ticks stay as they are.

        Raises `PayloadTooLarge`, `QueueNotFound`, `ScheduleNotFound`.
        """
        return await self._one(_calls.run_schedule(name))

    async def sink_commit(
        self,
        run: UUID,
        tokens: Iterable[UUID],
        counts: Iterable[int],
        app_id: str | None = None,
        version: int | None = None,
    ) -> bool:
        """Send the staged messages of a run, all or none. Of each attempt, given by its token, `counts` messages must
        exist.

        Returns False, and discards the run, if `version` of `app_id` was committed before. A run without them is
        identified by its id, so the call can be repeated until it returns.

        Raises `StagedMessagesLost` if messages are missing, `QueueNotFound` if a queue was dropped since,
        `PayloadTooLarge` for a message over the limit of its queue, with its row, and `InvalidArgument` for a version
        that another role committed or that `sweep_staged` removed from the ledger.
        """
        return await self._one(_calls.sink_commit(run, tokens, counts, app_id, version))

    async def sink_abort(self, run: UUID) -> int:
        """Discard the messages that the current role has staged in a run and not committed. Returns their number."""
        return await self._one(_calls.sink_abort(run))

    async def sweep_staged(self, older_than: timedelta | None = None, forget_after: timedelta | None = None) -> int:
        """Discard messages that were staged longer ago than `older_than` (1 day). Returns their number.

        Also removes commits older than `forget_after` (90 days) from the ledger, except the highest version of each
        `app_id`. From then on a lower version that was removed is refused. Needs admin access to all queues. Raises
        `InvalidArgument`.
        """
        return await self._one(_calls.sweep_staged(older_than, forget_after))

    async def maintain_archive(self) -> list[ArchiveChange]:
        """Maintain the archive: create partitions for the next days, and drop those that have expired. Returns the
        changes.

        Claims and receives do the same except for dropping. Call it once a day, from a scheduler, in a transaction of
        its own. It blocks no acknowledgement.
        """
        return await self._all(_calls.maintain_archive())

    async def compact_queues(self) -> list[Compaction]:
        """Return the disk space of dead rows in all tables of 1 MB or more. Returns what was done with each.

        Claims do the same by themselves while a long transaction keeps vacuum from it. The tables are locked until the
        transaction ends. Call it in a maintenance window, on a connection in autocommit mode. Needs admin access to all
        queues. Raises `psycopg.errors.ActiveSqlTransaction` in a transaction that is not in read committed.
        """
        return await self._all(_calls.compact_queues())

    async def doctor(self, peek_delay: timedelta | None = None) -> list[Finding]:
        """Problems of the installation, with the statements that repair them; an empty list if there is none.

        It finds, among others, a session that holds back vacuum, a missing index, stuck claims, and messages that
        expire before a consumer that polls every `peek_delay` (1 s) can see them.
        """
        return await self._all(_calls.doctor(peek_delay))

    async def version(self) -> str:
        """The version of the SQL that is installed."""
        return await self._one(_calls.version())

    async def grant_access(self, role_name: str, access: str, queue_name: str | None = None) -> None:
        """Let a role call the verbs of a `producer`, `consumer`, `admin` or `reader`.

        The access `raw` is SQL on the tables, and `transport` is the use of the relations of
        `AsyncQueue.expose_transport`. `queue_name` (all queues) limits every access but `raw` to one queue or, as in
        `billing-*`, to those whose names begin alike. For other queues the role then gets `QueueNotFound`. Raises
        `InvalidArgument` for another access, `QueueNotFound`, `psycopg.errors.UndefinedObject` for an unknown role.
        """
        await self._one(_calls.grant_access(role_name, access, queue_name))

    async def revoke_access(self, role_name: str, access: str, queue_name: str | None = None) -> None:
        """Revoke what `grant_access` gave with the same `queue_name`. Other access stays. Raises its errors."""
        await self._one(_calls.revoke_access(role_name, access, queue_name))

    async def list_access(self) -> list[Access]:
        """What `grant_access` gave to each role. The owner of pgqueue may call this, as the two before."""
        return await self._all(_calls.list_access())


class AsyncQueue(_Calls):
    """One queue, by name, over the caller's `AsyncConnection`. The database is not asked before a verb is called."""

    __slots__ = ("name",)

    def __init__(
        self,
        connection: AsyncConnection[Any],
        name: str,
        *,
        json_loads: JsonLoads | None = None,
        json_dumps: JsonDumps | None = None,
    ) -> None:
        super().__init__(connection, json_loads=json_loads, json_dumps=json_dumps)
        # None would select all queues in some calls.
        if not isinstance(name, str):
            raise TypeError(f"invalid name: {name!r}; must be a string")
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    async def grant_access(self, role_name: str, access: str) -> None:
        """Let a role use this queue, as `AsyncQueues.grant_access` does. `drop_queue` ends the access."""
        await self._one(_calls.grant_access(role_name, access, self.name))

    async def revoke_access(self, role_name: str, access: str) -> None:
        """Revoke the access that `grant_access` gave to this queue alone."""
        await self._one(_calls.revoke_access(role_name, access, self.name))

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
        dedup_window: timedelta | None = None,
        group_limit: int | None = None,
        on_dead: str | None = None,
        max_in_flight: int | None = None,
        rate_limit: int | None = None,
        rate_period: timedelta | None = None,
        priorities: bool | None = None,
        counters: bool | None = None,
        dead_letter_to: str | None = None,
    ) -> QueueInfo:
        """Create this queue and return it.

        A claimed message stays hidden for `visibility_timeout` (1 s to 12 h; 30 s). After `max_attempts` (1 to 100; 5;
        0 for any number) it becomes a dead letter if `dlq_enabled` (true), else it is deleted. With
        `dead_letter_expired` (false), expired messages become dead letters, too. `dedicated` (false) gives the queue a
        table of its own, for queues with much traffic. `max_payload_bytes` (up to 100 MB; 256 KB) bounds payload and
        body.

        The delay after a failed attempt is `backoff_base` (0 to 30 days; 1 s) times `backoff_factor` (1 to 100; 2) for
        every attempt after the first, at most `backoff_max` (0 to 30 days; 10 min), less a random part of up to
        `backoff_jitter` (0 to 1; 0.2) of it.

        With `if_not_exists` (false) an existing queue is returned unchanged. `archive_for` (1 to 3652.5 days; None: no
        archive) keeps acknowledged messages in the table `archived_messages` for at least that time. With
        `expires_after_idle` (1 s to 3652.5 days; None: never) the queue is dropped when it was empty and unused for
        that time. `dedup_window` (1 s to 30 days; 5 min) is the time for which a `dedup_key` is taken; `timedelta(0)`
        means as long as its message lives, at most 30 days. `group_limit` (1 to 1000; None: no groups) is how many
        messages with the same `group_key` may be in flight at a time, in the order of their ids. `on_dead` is `"skip"`
        (a group goes on after a dead letter) or `"hold"` (it waits for it). `max_in_flight` (1 to 10000; None: any
        number) is how many messages of the queue may be in flight at a time, over all consumers; `receive` refuses such
        a queue. `rate_limit` (1 to 1000000; None: any number) is how many messages claims and receives take in each
        `rate_period` (1 ms to 1 day; 1 s), and up to `rate_limit` more that earlier claims have left. With `priorities`
        (false), messages with a higher `priority` are claimed first; the queue cannot have a `group_limit` then.
        Without `counters` (true) its calls are faster, and the totals of `stats` are None. `dead_letter_to` (None: they
        stay) names another queue, which takes the dead letters and sends them as new messages; it needs `dlq_enabled`
        and admin access to both.

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
                dedup_window,
                group_limit,
                on_dead,
                max_in_flight,
                rate_limit,
                rate_period,
                priorities,
                counters,
                dead_letter_to,
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
        dedup_window: timedelta | None = None,
        group_limit: int | None = None,
        on_dead: str | None = None,
        max_in_flight: int | None = None,
        rate_limit: int | None = None,
        rate_period: timedelta | None = None,
        counters: bool | None = None,
        dead_letter_to: str | None = None,
        priorities: bool | None = None,
    ) -> QueueInfo:
        """Change the settings that are given, and return the queue. Ranges are those of `create_queue`.

        Messages keep the `max_attempts` that they were sent with. A new `archive_for` also applies to messages that are
        already archived. `timedelta(0)` ends archiving; archived messages are then kept for the time that was promised.
        An `expires_after_idle` of `timedelta(0)` keeps the queue for good. A new `dedup_window` applies to messages
        that are sent from then on; the keys of earlier ones may be free at once. 0 ends `group_limit`,
        `max_in_flight` and `rate_limit`. The first `group_limit`, `max_in_flight` or `priorities`, or the end of the
        last, moves all messages to another table: other calls of this queue wait for one to three seconds for 100,000
        messages, and claims stay valid. `counters` can only become true. A `dead_letter_to` with the name of the
        queue itself ends it, and dead letters stay.

        Raises `InvalidArgument`, `QueueNotFound`, and `QueueBusy` if a longer transaction uses the queue while messages
        would be moved, or its transport relation while archiving begins or ends.
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
                dedup_window,
                group_limit,
                on_dead,
                max_in_flight,
                rate_limit,
                rate_period,
                counters,
                dead_letter_to,
                priorities,
            )
        )

    async def drop_queue(self) -> int:
        """Drop the queue and all its messages, dead letters included. Returns the number of messages.

        Delayed messages that are not due and were never claimed become dead letters under its name, with the reason
        `queue_dropped`, unless the queue has no dead letters. `browse_dead_messages` and `purge_dead_messages` find
        them, and `redrive` works when there is a queue of that name again. Its archive is kept for the time of its
        `archive_for`. Raises `QueueNotFound`, and `QueueBusy` if a transaction that uses the queue stays open.
        """
        return await self._one(_calls.drop_queue(self.name))

    async def get_queue(self) -> QueueInfo:
        """The queue and its settings. Raises `QueueNotFound`."""
        return await self._one(_calls.get_queue(self.name))

    async def pause_queue(self) -> bool:
        """Deliver no messages until `resume_queue`. The queue still accepts messages.

        False if it was already paused.
        """
        return await self._one(_calls.pause_queue(self.name))

    async def resume_queue(self) -> bool:
        """Deliver messages again. False if the queue was not paused."""
        return await self._one(_calls.resume_queue(self.name))

    async def purge_queue(self) -> int:
        """Delete all messages that are ready, in flight or scheduled; dead letters stay. Returns their number.

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
        """Create a relation over the queue that an NServiceBus transport can use as its own table.

        Its schema is `schema_name` (public), its name `table_name` (the queue's name). Returns the qualified name.
        `body_string` (false) adds a column with the body as text. `flavor` is `postgresql`, the default, or
        `sqlserver`. The queue becomes dedicated. A role needs rights on the relation and `grant_access(role,
        "transport")` to use it.

        Raises `InvalidArgument`, `QueueNotFound`, `QueueBusy`, and `psycopg.errors.DuplicateTable`, `DuplicateObject`
        (the queue is already exposed) and `InsufficientPrivilege` (no right to create in the schema).
        """
        return await self._one(_calls.expose_transport(self.name, schema_name, table_name, body_string, flavor))

    async def unexpose_transport(self) -> bool:
        """Drop the relation that `expose_transport` created. False if there is none. The queue keeps its messages.

        Raises `QueueNotFound`, `QueueBusy`, and `psycopg.errors.DependentObjectsStillExist`.
        """
        return await self._one(_calls.unexpose_transport(self.name))

    async def advance_transport(self) -> int:
        """Make due messages ready for the relation of `expose_transport`. Returns where its statements begin to read.

        The relation calls this itself; callers need not.
        """
        return await self._one(_calls.advance_transport(self.name))

    async def cancel(self, id: int) -> bool:
        """Remove a message that is ready or scheduled. False if a consumer has claimed it, or if it is gone.

        Waits for no consumer: a message that is claimed at the same time is either delivered or cancelled. Raises
        `QueueNotFound`.
        """
        return await self._one(_calls.cancel(self.name, id))

    async def cancel_by_key(self, dedup_key: str) -> bool:
        """Remove the message that has a key, as `cancel` does, and make the key free. False if it removes nothing.

        Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._one(_calls.cancel_by_key(self.name, dedup_key))

    async def reschedule(self, id: int, due_at: datetime | None = None) -> bool:
        """Make a message that waits for a delay or a retry due at another time; None is now. False if it is ready or in
        flight, if another transaction has locked it, or if it is gone.

        `due_at` needs a time zone. Waiting consumers are notified. For the tick of a schedule call `run_schedule` or
        `alter_schedule` instead. Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._one(_calls.reschedule(self.name, id, due_at))

    async def create_schedule(
        self,
        name: str,
        cron: str,
        payload: Any = None,
        headers: Mapping[str, Any] | None = None,
        time_zone: str | None = None,
        paused: bool | None = None,
        catch_up: bool | None = None,
        priority: int | None = None,
        group_key: str | None = None,
        if_not_exists: bool | None = None,
    ) -> datetime | None:
        """Create a schedule: this queue gets one message at each tick. Returns the time of the first tick.

        `name` has 1 to 255 characters and is unique in the database. `cron` has five fields: minute, hour, day of
        month, month, day of week; or it is `@hourly`, `@daily`, `@weekly`, `@monthly` or `@yearly`. `time_zone` (UTC)
        is a name such as `Europe/Paris`. While `paused` (false), the schedule has no ticks, and None is returned. One
        message makes up for all ticks that nobody claimed. Without `catch_up` (true), a message expires if it is not
        finished at the next tick. The headers of a message also have `pgqueue.schedule`, the name, and
        `pgqueue.scheduled_for`, the time of the tick. In a queue with `priorities`, messages have the `priority` (0 to
        9, the highest), and in a queue with `group_limit` the `group_key`; both become `headers` of the schedule.
        With `if_not_exists` (false) an existing schedule of this queue stays unchanged, and the time of its next tick
        is returned.

        Raises `InvalidArgument`, `PayloadTooLarge`, `QueueNotFound`, `ScheduleExists`.
        """
        settings = (payload, headers, time_zone, paused, catch_up, priority, group_key, if_not_exists)
        return await self._one(_calls.create_schedule(name, self.name, cron, *settings))

    async def list_schedules(self) -> list[Schedule]:
        """The schedules of the queue, by name. Raises `QueueNotFound`."""
        return await self._all(_calls.list_schedules(self.name))

    async def subscribe(self, topic: str) -> bool:
        """Subscribe the queue to a topic from now on. False if it is already subscribed.

        `topic` has 1 to 255 characters: words joined by dots. A word `*` matches exactly one word, `#` any number of
        words. Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._one(_calls.subscribe(topic, self.name))

    async def unsubscribe(self, topic: str) -> bool:
        """End a subscription; `topic` is that of `subscribe`. False if there was none.

        Messages that were published before stay in the queue. Raises `InvalidArgument`, `QueueNotFound`.
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
        dedup_key: str | None = None,
        on_duplicate: str | None = None,
        group_key: str | None = None,
        priority: int | None = None,
    ) -> int:
        """Send a message in the caller's transaction. Returns its id.

        Exactly one of `payload`, any value that serialises to JSON, and `body`, raw bytes, must be given. JSON null is
        `Jsonb(None)`; JSON that is already text is `Jsonb(text, dumps=str)`. `headers` is an object of at most 64 KB.
        `delay` (0 to 3652.5 days; 0) postpones the first delivery. After `expires_in` (0 to 3652.5 days; never) the
        message is dropped. `message_id` is an id of the sender and need not be unique.

        `dedup_key` (1 to 255 characters): while another message of the queue has the same key, no message is added, and
        the id of the other one is returned. A key is taken for the `dedup_window` of the queue. `on_duplicate` is
        `"keep"` (the default) or `"replace"`: the other message gets the content, due time and expiry of this call,
        unless a consumer has claimed it or it is gone; then this message is added. The call waits for a transaction
        that has sent the same key. `group_key` (1 to 255 characters) is the group of the message, for a queue with
        `group_limit`; it becomes the header `pgqueue.group`. `priority` (0 to 9, the highest; None is 0) is for a queue
        with `priorities`; it becomes the header `pgqueue.priority`.

        Raises `InvalidArgument`, `QueueNotFound`, `PayloadTooLarge`.
        """
        return await self._one(
            _calls.enqueue(
                self.name,
                payload,
                delay,
                headers,
                expires_in,
                message_id,
                body,
                dedup_key,
                on_duplicate,
                group_key,
                priority,
            )
        )

    async def enqueue_batch(
        self,
        payloads: Iterable[Any] | None = None,
        delay: timedelta | None = None,
        headers: Iterable[Mapping[str, Any] | None] | None = None,
        expires_in: timedelta | None = None,
        message_ids: Iterable[UUID | None] | None = None,
        bodies: Iterable[bytes | None] | None = None,
        delays: Iterable[timedelta | None] | None = None,
        dedup_keys: Iterable[str | None] | None = None,
        on_duplicate: str | None = None,
        group_keys: Iterable[str | None] | None = None,
        priorities: Iterable[int | None] | None = None,
    ) -> list[int]:
        """Send many messages, all or none, in the caller's transaction. Returns their ids in the order of the
        arguments.

        Each iterable has one element per message; each message has exactly one of payload and body. An element of
        `delays` that is not None overrides `delay`. Of the elements with the same key of `dedup_keys` one is
        added, the last one if `on_duplicate` is `"replace"`, and all get its id. The rest, including the errors, is as
        in `enqueue`.
        """
        return await self._all(
            _calls.enqueue_batch(
                self.name,
                payloads,
                delay,
                headers,
                expires_in,
                message_ids,
                bodies,
                delays,
                dedup_keys,
                on_duplicate,
                group_keys,
                priorities,
            )
        )

    async def enqueue_copy(self, rows: AsyncRows) -> int:
        """Send many messages by COPY, the fastest way. Returns their number. Needs the access `raw`.

        A row is a JSON value, raw bytes (a body) or a `NewMessage`; JSON null is `Jsonb(None)`. The messages are ready
        at once. Memory stays constant, independent of the number of rows. Either all messages are sent or none: if a
        row is refused, or `rows` raises, the caller's transaction can continue. In autocommit mode the call is a
        transaction of its own. Limits of size apply to the JSON text.

        Raises `QueueNotFound`; `PayloadTooLarge` and `InvalidArgument`, which name the row (the first is 1); and the
        errors of PostgreSQL for JSON that it cannot store, such as a NUL character.
        """
        rows = _calls.many("rows", rows)
        if not self.connection.autocommit:
            # Begins the caller's transaction, so that the transaction below is a savepoint in it.
            await self.get_queue()
        async with self.connection.transaction():
            lines = CopyRows(self.connection, self._adapters, await self.get_queue(), await self._one(server_moment))
            cursor = AsyncOwnCursor(self.connection, self._adapters)
            try:
                async with cursor.copy(copy_messages) as copy:
                    async for row in each_row_async(rows):
                        if block := lines.add(row):
                            await copy.write(block)
                    await copy.write(lines.end())
            except DataError as error:
                add_row(error)
                raise
            if cursor.rowcount:
                await self.wake()
            return cursor.rowcount

    async def claim(
        self,
        max_messages: int | None = None,
        visibility_timeout: timedelta | None = None,
        claimed_by: str | None = None,
    ) -> list[Message]:
        """Claim up to `max_messages` (1), by id or priority, and hide them for `visibility_timeout` (the queue's).

        This counts an attempt. `claimed_by` is a name for people. The `claim_token` of the messages proves the claim to
        `ack`, `nack` and `extend`. Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._all(_calls.claim(self.name, max_messages, visibility_timeout, claimed_by))

    async def ack(self, id: int, claim_token: UUID | None) -> bool:
        """Acknowledge a claimed message: it is deleted, or archived. False if the claim was lost."""
        return await self._one(_calls.ack(self.name, id, claim_token))

    async def ack_batch(self, ids: Iterable[int], claim_token: UUID | None) -> int:
        """Acknowledge messages of one claim. Returns the number of messages that were still claimed with this token."""
        return await self._one(_calls.ack_batch(self.name, ids, claim_token))

    async def exchange(
        self,
        ids: Iterable[int] | None,
        claim_token: UUID | None,
        max_messages: int | None = None,
        visibility_timeout: timedelta | None = None,
        claimed_by: str | None = None,
    ) -> list[Exchanged]:
        """Acknowledge messages and claim the next ones, in one call and one commit.

        Returns first the `ids` whose claim was lost, with `lost` true, then the claimed messages. If `ids` is
        None or empty, nothing is acknowledged, and `claim_token` may be None. Raises the errors of `claim`.
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
        """Return a claimed message to the queue: it is delivered again after `delay` (the queue's backoff).

        If its attempts are spent it becomes a dead letter, or is deleted if the queue has no dead letters. `error` is
        stored as its `last_error`. `headers` are merged into its headers, unless the result exceeds 64 KB. False if the
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
        """Make a claimed message a dead letter at once.

        `reason` is `rejected` (the default), or `attempts_exhausted` if the caller counts attempts by its own rules.
        `error` and `headers` are stored as by `nack`. False if the claim was lost. Raises `InvalidArgument`,
        `QueueNotFound`.
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

        `attempt_count` is that of the received message. The message is then delayed or becomes a dead letter as by
        `nack`; `delay`, `error` and `headers` are those of `nack`. False if the message is gone, is claimed or locked
        by another transaction, or if an attempt was counted since. Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._one(_calls.record_failure(self.name, id, attempt_count, delay, error, headers))

    async def release(self, ids: Iterable[int], claim_token: UUID | None) -> int:
        """Return messages of one claim without work: they are ready at once, and their attempt is not counted.

        Returns the number of messages that were still claimed with this token. Raises `InvalidArgument`,
        `QueueNotFound`.
        """
        return await self._one(_calls.release(self.name, ids, claim_token))

    async def extend(self, id: int, claim_token: UUID | None, visibility_timeout: timedelta | None = None) -> bool:
        """Keep a claimed message hidden for another `visibility_timeout` (the queue's) from now.

        False if the claim was lost. Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._one(_calls.extend(self.name, id, claim_token, visibility_timeout))

    async def extend_batch(
        self, ids: Iterable[int], claim_token: UUID | None, visibility_timeout: timedelta | None = None
    ) -> list[int]:
        """Extend messages of one claim as `extend` does. Returns, by id, those still claimed with this token."""
        return await self._all(_calls.extend_batch(self.name, ids, claim_token, visibility_timeout))

    async def ack_claims(self, ids: Iterable[int], claim_tokens: Iterable[UUID]) -> list[SettledClaim]:
        """Acknowledge messages of different claims: the first of `ids` with the first of `claim_tokens`, and so on.

        Returns the answer for each of them, in this order. `settled` is false if the claim was lost. Raises
        `QueueNotFound`; `InvalidArgument` if the lists have different lengths or a value is None.
        """
        return await self._all(_calls.ack_claims(self.name, ids, claim_tokens))

    async def nack_claims(
        self,
        ids: Iterable[int],
        claim_tokens: Iterable[UUID],
        delay: timedelta | None = None,
        error: str | None = None,
        headers: dict[str, Any] | None = None,
    ) -> list[SettledClaim]:
        """Return messages of different claims after a failure, as `nack` does. Answers and errors as by `ack_claims`.

        `delay`, `error` and `headers` apply to all. If `delay` is None, each gets the backoff of its own attempt.
        """
        return await self._all(_calls.nack_claims(self.name, ids, claim_tokens, delay, error, headers))

    async def extend_claims(
        self, ids: Iterable[int], claim_tokens: Iterable[UUID], visibility_timeout: timedelta | None = None
    ) -> list[SettledClaim]:
        """Extend different claims, as `extend` does. Answers and errors as by `ack_claims`."""
        return await self._all(_calls.extend_claims(self.name, ids, claim_tokens, visibility_timeout))

    async def release_claims(self, ids: Iterable[int], claim_tokens: Iterable[UUID]) -> list[SettledClaim]:
        """Return unprocessed messages of different claims, as `release` does. Answers and errors as by `ack_claims`."""
        return await self._all(_calls.release_claims(self.name, ids, claim_tokens))

    async def receive(self, max_messages: int | None = None) -> list[Message]:
        """Take up to `max_messages` (1), by id: they are deleted in the caller's transaction.

        A rollback restores them. In autocommit mode they are deleted when this returns. Raises the errors of `claim`.
        """
        return await self._all(_calls.receive(self.name, max_messages))

    async def stream_open(self, stream_name: str, opened_by: str | None = None, on_ack: str | None = None) -> Stream:
        """Open a stream, and create it if there is none. Its batches can be read again after a crash.

        The result has a new `epoch`. The reader that opened the stream before is fenced: its calls raise
        `StreamFenced`. A reader without a checkpoint starts after `acked_seq` and `acked_token`. `opened_by` is a name
        for people. `on_ack` is what happens to messages that are acknowledged from now on: `delete`; `archive`, which
        needs the queue's `archive_for`; or None for the setting of the queue. Raises `InvalidArgument`.
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
        max_bytes: int | None = None,
    ) -> list[StreamBatch]:
        """Acknowledge all batches up to `after_seq` with `after_token`, and return the next batch.

        The next batch is the open one, with the same messages, or a new one of up to `max_messages` (10000, at most
        100000) ready messages. They are reserved for `visibility_timeout` (the queue's), and are read in `partitions`
        (1). No batch is returned if no message is ready. Before the first batch `after_seq` is 0 and `after_token`
        None. The batch ends earlier if its payloads have about `max_bytes` bytes as stored; 10 messages of any size are
        taken.

        Raises `StreamOutOfStep` if `after_seq` and `after_token` are not those of the stream: the checkpoint was rolled
        back, was copied, or belongs to another stream. Raises `StreamFenced`, `StreamNotFound`, `InvalidArgument`.
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
                max_bytes,
            )
        )

    async def stream_begin(
        self,
        stream_name: str,
        epoch: int,
        seq: int,
        claim_token: UUID,
        max_replays: int | None = None,
    ) -> StreamBatch:
        """Begin to read the open batch, for the first time or again. Call it before its partitions are read.

        If the batch is read again, its reservation is renewed. Raises `StreamDataLost` if messages do not belong to the
        stream any more, `StreamPoisoned` after `max_replays` (5) replays, of which each epoch that begins the batch
        again counts as one, and `StreamOutOfStep` if the batch is not the open one. Raises `StreamFenced`,
        `StreamNotFound`, `InvalidArgument`.
        """
        return await self._one(_calls.stream_begin(self.name, stream_name, epoch, seq, claim_token, max_replays))

    async def stream_read(
        self, stream_name: str, epoch: int, seq: int, claim_token: UUID, partition: int | None = None
    ) -> list[Message]:
        """The messages of one `partition` of the open batch (the first is 0; None: all partitions), by id.

        Changes nothing. Each call returns the same, except for `visible_at`, and never fewer messages: it raises
        `StreamDataLost` if messages do not belong to the stream any more. Raises `StreamOutOfStep` if the batch is not
        the open one, `StreamFenced`, `StreamNotFound`, `InvalidArgument`.
        """
        return await self._all(_calls.stream_read(self.name, stream_name, epoch, seq, claim_token, partition))

    async def stream_extend(
        self, stream_name: str, epoch: int, visibility_timeout: timedelta | None = None
    ) -> list[StreamBatch]:
        """Renew the reservation of the open batch: it ends `visibility_timeout` (that of its claim) from now.

        Returns the batch, with the ids that do not belong to the stream any more in `lost`; an empty list if no batch
        is open. A reader calls it as its heartbeat. Raises `StreamFenced`, `StreamNotFound`, `InvalidArgument`.
        """
        return await self._all(_calls.stream_extend(self.name, stream_name, epoch, visibility_timeout))

    async def stream_ack(self, stream_name: str, epoch: int, seq: int, claim_token: UUID) -> int:
        """Acknowledge the open batch: its messages are deleted or archived.

        Returns the number of messages that still belonged to the stream; 0 if the batch was acknowledged before. Raises
        `StreamOutOfStep` for a batch that was never claimed, `StreamFenced`, `StreamNotFound`, `InvalidArgument`.
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
        """Remove messages, all or those in `ids`, from the open batch. Returns the number of new dead letters.

        Their reason is `rejected`, their `last_error` is `error`. The batch continues with the remaining messages, and
        its replays are counted from 0. Without `epoch` this fences the reader of the stream, which must be started
        again. A reader that removes messages which it cannot use gives its own epoch. Raises `StreamOutOfStep` if the
        batch is not open, `StreamFenced`, `StreamNotFound`, `InvalidArgument`.
        """
        return await self._one(_calls.stream_skip(self.name, stream_name, seq, ids, error, epoch))

    async def list_streams(self) -> list[Stream]:
        """The streams of the queue, by name."""
        return await self._all(_calls.list_streams(self.name))

    async def drop_stream(self, stream_name: str) -> int:
        """Drop a stream and return the messages of its open batch to the queue. Returns their number.

        Raises `StreamNotFound`.
        """
        return await self._one(_calls.drop_stream(self.name, stream_name))

    async def sink_stage(self, run: UUID, partition: int, attempt: int) -> UUID:
        """Begin to stage the messages that one attempt at a partition of a run writes for this queue. Returns its
        token.

        The caller copies the messages into `pgqueue.staged_messages` under the token, in the same transaction: each row
        holds arrays of some hundred messages and the number of its first message, starting at 1. No session sees the
        messages before `AsyncQueues.sink_commit`. Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._one(_calls.sink_stage(self.name, run, partition, attempt))

    async def peek(self, max_records: int | None = None) -> int:
        """The number of messages that could be received now, counted up to `max_records` (100).

        Only rows that no transaction has locked are counted. It neither blocks nor waits. Raises the errors of `claim`.
        """
        return await self._one(_calls.peek(self.name, max_records))

    async def browse(
        self, state: str | None = None, max_messages: int | None = None, after_id: int | None = None
    ) -> list[Message]:
        """Read up to `max_messages` (100) without changing them, by id after `after_id` (0).

        `state` is `ready` (the default), `inflight` or `scheduled`. Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._all(_calls.browse(self.name, state, max_messages, after_id))

    async def browse_dead_messages(
        self, max_messages: int | None = None, after_id: int | None = None
    ) -> list[DeadMessage]:
        """Read up to `max_messages` (100) dead letters, by id after `after_id` (0).

        Includes the dead letters of a dropped queue of this name. Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._all(_calls.browse_dead_messages(self.name, max_messages, after_id))

    async def browse_archived_messages(
        self, max_messages: int | None = None, before_id: int | None = None
    ) -> list[ArchivedMessage]:
        """Read up to `max_messages` (100) acknowledged messages below `before_id`, the newest id first.

        Includes those of a dropped queue of this name, as long as they are kept. Raises `InvalidArgument`,
        `QueueNotFound`.
        """
        return await self._all(_calls.browse_archived_messages(self.name, max_messages, before_id))

    async def stats(self) -> QueueStats:
        """The depth of the queue. Cheap on a deep queue: `estimates` names the figures that are estimated."""
        return await self._one(_calls.stats(self.name))

    async def redrive(
        self, max_messages: int | None = None, ids: Iterable[int] | None = None, to_queue: str | None = None
    ) -> int:
        """Make dead letters ready again, up to `max_messages` (1000), or those of `ids`. Returns their number.

        With `to_queue` they become new messages of that queue, with the header `pgqueue.dead_letter`. Raises
        `QueueNotFound`, `InvalidArgument`.
        """
        return await self._one(_calls.redrive(self.name, max_messages, ids, to_queue))

    async def purge_dead_messages(self, ids: Iterable[int] | None = None) -> int:
        """Delete all dead letters, or those of `ids`, those of a dropped queue of this name included. Returns their
        number.
        """
        return await self._one(_calls.purge_dead_messages(self.name, ids))

    async def purge_expired(self, batch_size: int | None = None) -> int:
        """Delete expired messages, up to `batch_size` (10000). Returns their number."""
        return await self._one(_calls.purge_expired(self.name, batch_size))

    async def create_result(
        self, id: int, message_id: UUID, task: Any = None, expires_in: timedelta | None = None
    ) -> datetime:
        """Create the result of a message. Call it in the transaction of `enqueue`, which returns `id`.

        Returns the `enqueued_at` of the result.

        `get_result` finds it by `message_id`, that of the message or another one that no result has. `task` is JSON for
        the program that reads the result. `expires_in` (14 days) counts from the end of the message. Raises
        `InvalidArgument`, `PayloadTooLarge`, `QueueNotFound`, and `psycopg.errors.UniqueViolation` if the message or
        `message_id` has a result.
        """
        return await self._one(_calls.create_result(self.name, id, message_id, task, expires_in))

    async def update_result(
        self, id: int, status: str, value: Any = None, error: Any = None, worker: str | None = None
    ) -> Result | None:
        """Change the result of a message and return it; None if the message has none.

        `status` is `running` (an attempt of `worker` begins), `ready` (one has failed with `error`, and is repeated),
        `successful` (with `value`) or `failed` (with `error`). Call it in the transaction of `ack`, `nack` or `reject`,
        and roll back if one of these returns false. `value` and `error` are JSON. Raises `InvalidArgument`,
        `PayloadTooLarge`, `QueueNotFound`.
        """
        found = await self._all(_calls.update_result(self.name, id, status, value, error, worker))
        return found[0] if found else None

    async def purge_results(self, min_age: timedelta | None = None) -> int:
        """Delete up to 10,000 results that have ended at least `min_age` ago. Returns their number.

        Claims delete results that have expired. Raises `InvalidArgument`, `QueueNotFound`.
        """
        return await self._one(_calls.purge_results(self.name, min_age))

    async def sweep_queue(self, max_messages: int | None = None) -> int:
        """Move messages without attempts left to the dead letters, up to `max_messages` (10000), once their last claims
        have ended. Every claim does so, too. Returns the number of removed messages. Raises `InvalidArgument`.
        """
        return await self._one(_calls.sweep_queue(self.name, max_messages))

    async def compact_queue(self) -> list[Compaction]:
        """Return the disk space of dead rows in the table of the queue, as `compact_queues` does for all tables."""
        return await self._all(_calls.compact_queue(self.name))

    async def channel(self) -> str:
        """The channel to LISTEN on. Its notifications have no payload."""
        return await self._one(_calls.channel(self.name))

    async def wake(self) -> None:
        """Notify waiting consumers when the transaction commits.

        Call it after inserting into the table directly. `enqueue` notifies by itself if a session waits.
        """
        await self._one(_calls.wake(self.name))

    async def prepare_wait(self, timeout: timedelta | None = None) -> datetime:
        """Announce a wait on `channel` of up to `timeout` (60 s, at most a day): the next enqueue then notifies.

        Returns the time at which to claim again at the latest. Claim once more between this call and the wait, because
        a message that was sent before this call notifies nobody. Raises `InvalidArgument`.
        """
        return await self._one(_calls.prepare_wait(self.name, timeout))

    async def next_due_at(self) -> datetime | None:
        """The time at which the next message is due: the end of a delay, of a backoff or of a claim.

        It is in the past if a message is ready, and None if there is no message to wait for.
        """
        return await self._one(_calls.next_due_at(self.name))
