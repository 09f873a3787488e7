\echo Use "create extension pgqueue" to load this file. \quit
-- The schema of all objects. The installation fails if a schema of this name already exists: it is never adopted.
create schema pgqueue;
comment on schema pgqueue is
'A message queue in PostgreSQL: enqueue, claim, ack, nack, extend, dead letters and redrive.';

-- grants.sql reads this setting later in the same transaction. An upgrade does not set it.
do $$ begin perform pg_catalog.set_config('pgqueue.installing', 'yes', true); end $$;
-- The row types that the functions return. Their attributes are part of the API: add new ones at the end.

create type pgqueue.queue as (
    name text,
    visibility_timeout interval,
    max_attempts int,
    dlq_enabled boolean,
    dead_letter_expired boolean,
    max_payload_bytes int,
    backoff_base interval,
    backoff_factor double precision,
    backoff_max interval,
    backoff_jitter double precision,
    dedicated boolean,
    paused_at timestamptz,
    created_at timestamptz,
    updated_at timestamptz,
    archive_for interval,
    expires_after_idle interval,
    dedup_window interval,
    group_limit int,
    on_dead text,
    max_in_flight int,
    rate_limit int,
    rate_period interval,
    priorities boolean,
    counters boolean,
    dead_letter_to text
);
comment on type pgqueue.queue is
'A queue and its settings, as create_queue, alter_queue, get_queue and list_queues return it.';
comment on column pgqueue.queue.paused_at is 'when it was paused; null unless it is';
comment on column pgqueue.queue.created_at is 'when it was created';
comment on column pgqueue.queue.updated_at is 'when a setting was changed last, or it was paused or resumed';
comment on column pgqueue.queue.name is 'the name';

create type pgqueue.message as (
    id bigint,
    queue_name text,
    payload jsonb,
    body bytea,
    headers jsonb,
    message_id uuid,
    attempt_count int,
    max_attempts int,
    enqueued_at timestamptz,
    visible_at timestamptz,
    expires_at timestamptz,
    claimed_by text,
    claim_token uuid,
    last_error text
);
comment on type pgqueue.message is
'A message, as claim, receive and browse return it.';
comment on column pgqueue.message.id is 'the number of the message in the database; it never changes';
comment on column pgqueue.message.queue_name is 'the queue';
comment on column pgqueue.message.payload is 'the JSON document; null if the message has a body';
comment on column pgqueue.message.body is 'the raw bytes; null if the message has a payload';
comment on column pgqueue.message.headers is 'the JSON object that the sender gave; null if none';
comment on column pgqueue.message.message_id is 'the identifier that the sender chose; null if none';
comment on column pgqueue.message.attempt_count is 'how often it was claimed or received, with the attempt in progress';
comment on column pgqueue.message.max_attempts is 'the attempts that it has; 2147483647: any number';
comment on column pgqueue.message.enqueued_at is 'when it was sent';
comment on column pgqueue.message.visible_at is
'when it is ready: of a claimed message the end of its claim, of a scheduled one its due time';
comment on column pgqueue.message.expires_at is 'when it stops being delivered; null: never';
comment on column pgqueue.message.claimed_by is
'the name that the last claim gave; null if none, or if the message was given back';
comment on column pgqueue.message.claim_token is
'the token of the last claim, which ack, nack and extend need; null if it was not claimed, or was given back';
comment on column pgqueue.message.last_error is 'the error of the last failed attempt; null if none';

create type pgqueue.exchanged as (
    id bigint,
    queue_name text,
    payload jsonb,
    body bytea,
    headers jsonb,
    message_id uuid,
    attempt_count int,
    max_attempts int,
    enqueued_at timestamptz,
    visible_at timestamptz,
    expires_at timestamptz,
    claimed_by text,
    claim_token uuid,
    last_error text,
    lost boolean
);
comment on type pgqueue.exchanged is
'A row of exchange: a claimed message, or an acknowledgement that was refused.';
comment on column pgqueue.exchanged.lost is
'true for an acknowledgement whose claim was lost: all other columns but id and queue_name are null';

create type pgqueue.settled_claim as (
    id bigint,
    settled boolean
);
comment on type pgqueue.settled_claim is
'The answer to one claim of ack_claims, nack_claims, extend_claims or release_claims.';
comment on column pgqueue.settled_claim.id is 'the message';
comment on column pgqueue.settled_claim.settled is 'whether the claim was still valid; if not, nothing was changed';

create type pgqueue.dead_message as (
    id bigint,
    queue_name text,
    payload jsonb,
    body bytea,
    headers jsonb,
    message_id uuid,
    attempt_count int,
    max_attempts int,
    enqueued_at timestamptz,
    expires_at timestamptz,
    claimed_by text,
    last_error text,
    reason text,
    died_at timestamptz
);
comment on type pgqueue.dead_message is
'A dead letter, as browse_dead_messages returns it.';
comment on column pgqueue.dead_message.reason is
'attempts_exhausted, expired, rejected, or queue_dropped if its queue was dropped before it was due';
comment on column pgqueue.dead_message.died_at is 'when it became a dead letter';

create type pgqueue.archived_message as (
    id bigint,
    queue_name text,
    payload jsonb,
    body bytea,
    headers jsonb,
    message_id uuid,
    attempt_count int,
    max_attempts int,
    enqueued_at timestamptz,
    claimed_at timestamptz,
    finished_at timestamptz,
    expires_at timestamptz,
    claimed_by text,
    last_error text
);
comment on type pgqueue.archived_message is
'An acknowledged message, as browse_archived_messages returns it.';
comment on column pgqueue.archived_message.claimed_at is 'when it was claimed last; null if it was received';
comment on column pgqueue.archived_message.finished_at is 'when it was acknowledged or received';

create type pgqueue.archive_change as (
    day date,
    change text
);
comment on type pgqueue.archive_change is
'What maintain_archive did with one day of the archive.';
comment on column pgqueue.archive_change.day is 'the day (UTC)';
comment on column pgqueue.archive_change.change is
'made, emptied, dropped, or busy if another transaction used the partition';

create type pgqueue.queue_stats as (
    queue_name text,
    ready_messages bigint,
    inflight_messages bigint,
    scheduled_messages bigint,
    dead_messages bigint,
    oldest_age_seconds double precision,
    paused boolean,
    estimates text[],
    enqueued_total bigint,
    acknowledged_total bigint,
    failed_total bigint,
    dead_total bigint
);
comment on type pgqueue.queue_stats is
'The depth of a queue, and what was counted since it was created.';
comment on column pgqueue.queue_stats.ready_messages is 'messages that are ready';
comment on column pgqueue.queue_stats.inflight_messages is 'messages that are claimed and not settled';
comment on column pgqueue.queue_stats.scheduled_messages is 'messages that are delayed or wait for a retry';
comment on column pgqueue.queue_stats.dead_messages is 'dead letters';
comment on column pgqueue.queue_stats.oldest_age_seconds is
'seconds since the oldest ready message was sent; null if none is ready';
comment on column pgqueue.queue_stats.paused is 'whether the queue is paused';
comment on column pgqueue.queue_stats.estimates is
'the names of the columns that are estimated; empty if all were counted';
comment on column pgqueue.queue_stats.enqueued_total is
'messages sent; this and the other totals are null in a queue without counters';
comment on column pgqueue.queue_stats.acknowledged_total is 'messages acknowledged or received';
comment on column pgqueue.queue_stats.failed_total is 'failed attempts that consumers reported';
comment on column pgqueue.queue_stats.dead_total is 'messages that became dead letters';

create type pgqueue.finding as (
    severity text,
    queue_name text,
    finding text,
    detail text,
    repair text
);
comment on type pgqueue.finding is
'A problem that doctor found.';
comment on column pgqueue.finding.severity is 'error, warning or info';
comment on column pgqueue.finding.queue_name is 'the queue; null: the whole database';
comment on column pgqueue.finding.finding is 'a word for the kind of problem, which does not change';
comment on column pgqueue.finding.detail is 'what was found, in a sentence';
comment on column pgqueue.finding.repair is 'the statement that repairs it; null if none does';

create type pgqueue.stream as (
    queue_name text,
    stream_name text,
    epoch bigint,
    opened_by text,
    opened_at timestamptz,
    created_at timestamptz,
    acked_seq bigint,
    acked_token uuid,
    claim_token uuid,
    messages int,
    partitions int,
    replays int,
    claimed_at timestamptz,
    claimed_until timestamptz,
    last_id bigint,
    on_ack text
);
comment on type pgqueue.stream is
'A stream, as stream_open and list_streams return it.';
comment on column pgqueue.stream.stream_name is 'the stream';
comment on column pgqueue.stream.epoch is 'the number of the last stream_open: readers with a lower one are refused';
comment on column pgqueue.stream.opened_by is 'the name that stream_open gave; null if none';
comment on column pgqueue.stream.opened_at is 'when it was opened last';
comment on column pgqueue.stream.created_at is 'when it was opened first';
comment on column pgqueue.stream.acked_seq is 'the number of the batch that was acknowledged last; 0 if none';
comment on column pgqueue.stream.acked_token is 'the claim_token of that batch; null if none';
comment on column pgqueue.stream.claim_token is
'the token of the open batch; this and the columns to claimed_until are null if no batch is open';
comment on column pgqueue.stream.messages is 'how many messages the open batch has';
comment on column pgqueue.stream.partitions is 'into how many parts the open batch is divided';
comment on column pgqueue.stream.replays is 'how often the open batch was begun again';
comment on column pgqueue.stream.claimed_at is 'when the open batch was reserved';
comment on column pgqueue.stream.claimed_until is 'when its reservation ends';
comment on column pgqueue.stream.last_id is 'the highest id of a message in the database so far';
comment on column pgqueue.stream.on_ack is
'what an acknowledgement does: archive, delete, or null if the setting of the queue applies';

create type pgqueue.stream_batch as (
    queue_name text,
    stream_name text,
    seq bigint,
    claim_token uuid,
    messages int,
    partitions int,
    replays int,
    claimed_at timestamptz,
    claimed_until timestamptz,
    lost bigint[]
);
comment on type pgqueue.stream_batch is
'A batch that is reserved for a stream, identified by seq and claim_token.';
comment on column pgqueue.stream_batch.stream_name is 'the stream';
comment on column pgqueue.stream_batch.seq is 'the number of the batch in the stream';
comment on column pgqueue.stream_batch.claim_token is 'the token of the batch';
comment on column pgqueue.stream_batch.messages is 'how many messages it has';
comment on column pgqueue.stream_batch.partitions is 'into how many parts it is divided';
comment on column pgqueue.stream_batch.replays is 'how often it was begun again';
comment on column pgqueue.stream_batch.claimed_at is
'when it was reserved; null if there is no such batch and stream_begin accepts this';
comment on column pgqueue.stream_batch.claimed_until is 'when the reservation ends; null as claimed_at';
comment on column pgqueue.stream_batch.lost is 'the ids of messages that are no longer reserved for the stream';

create type pgqueue.subscription as (
    topic text,
    queue_name text,
    subscribed_at timestamptz
);
comment on type pgqueue.subscription is
'A subscription: the queue receives a copy of each message published to the topic, or to the topics that the pattern
matches.';
comment on column pgqueue.subscription.topic is 'the topic, or the pattern with * and #';
comment on column pgqueue.subscription.queue_name is 'the queue that gets the copies';
comment on column pgqueue.subscription.subscribed_at is 'when subscribe was called first';

create type pgqueue.schedule as (
    name text,
    queue_name text,
    cron text,
    payload jsonb,
    headers jsonb,
    time_zone text,
    paused boolean,
    catch_up boolean,
    next_at timestamptz,
    last_at timestamptz
);
comment on type pgqueue.schedule is
'A schedule: the queue gets a message at each tick of cron in time_zone.';
comment on column pgqueue.schedule.name is 'the name';
comment on column pgqueue.schedule.queue_name is 'the queue that gets the messages';
comment on column pgqueue.schedule.cron is 'the cron expression';
comment on column pgqueue.schedule.payload is 'the payload of the messages';
comment on column pgqueue.schedule.headers is 'their headers; null if none';
comment on column pgqueue.schedule.time_zone is 'the time zone of the cron expression';
comment on column pgqueue.schedule.paused is 'whether it is paused';
comment on column pgqueue.schedule.catch_up is 'whether the first of several missed ticks is sent, or the last';
comment on column pgqueue.schedule.next_at is 'the next tick; null if the schedule is paused or has stopped';
comment on column pgqueue.schedule.last_at is 'the last tick whose message a claim has taken; null if none';

create type pgqueue.result as (
    message_id uuid,
    queue_name text,
    id bigint,
    status text,
    task jsonb,
    value jsonb,
    errors jsonb,
    reason text,
    attempt_count int,
    workers text[],
    enqueued_at timestamptz,
    started_at timestamptz,
    last_attempted_at timestamptz,
    finished_at timestamptz,
    expires_at timestamptz
);
comment on type pgqueue.result is
'The result of a message: what consumers wrote about it.';
comment on column pgqueue.result.status is 'ready, running, successful or failed';
comment on column pgqueue.result.task is 'what create_result was given; null if nothing';
comment on column pgqueue.result.value is 'the value of a success; null if none';
comment on column pgqueue.result.errors is 'an array of what the last 20 failed attempts have left';
comment on column pgqueue.result.reason is
'why the message is gone without an outcome: the reason of the dead letter, or removed; null otherwise';
comment on column pgqueue.result.attempt_count is 'how many attempts have begun';
comment on column pgqueue.result.workers is 'the consumers of the last 100 attempts';
comment on column pgqueue.result.started_at is 'when the first attempt began; null: none has';
comment on column pgqueue.result.last_attempted_at is 'when the last attempt began; null: none has';
comment on column pgqueue.result.finished_at is 'when it ended; null: it has not, or its message was removed';
comment on column pgqueue.result.expires_at is 'when it is deleted, unless its message is still there';

create type pgqueue.compaction as (
    table_name text,
    outcome text,
    rows_kept bigint,
    bytes_before bigint,
    bytes_after bigint
);
comment on type pgqueue.compaction is
'What compact_queue did with one table.';
comment on column pgqueue.compaction.table_name is 'the table';
comment on column pgqueue.compaction.outcome is
'compacted, or why it was left alone: busy, backlog, dump, published, trigger or referenced';
comment on column pgqueue.compaction.rows_kept is 'how many rows it has; null if it was left alone';
comment on column pgqueue.compaction.bytes_before is 'its size before, with indexes and the toast table';
comment on column pgqueue.compaction.bytes_after is 'its size after';

create type pgqueue.access as (
    role_name name,
    access text,
    queue_name text
);
comment on type pgqueue.access is
'The access of a role, as list_access returns it.';
comment on column pgqueue.access.role_name is 'the role';
comment on column pgqueue.access.access is 'producer, consumer, admin, reader, raw or transport';
comment on column pgqueue.access.queue_name is 'a queue or a pattern such as billing-*; null: all queues';

-- The names of queues in the arguments of the verbs. PostgreSQL evaluates the check of a domain with the rights of the
-- role that calls, before the security definer function runs. access.sql adds the checks. No role has USAGE on the
-- domains, so no role can store a value that was checked for another.
do $$
declare
    domain_name text;
begin
    foreach domain_name in array array[
        'queue_of_producer', 'queue_of_consumer', 'queue_of_admin', 'queue_of_transport', 'queue_of_consumer_or_admin',
        'queue_of_producer_or_admin', 'queue_of_admin_or_reader', 'queue_of_consumer_admin_or_reader',
        'queue_of_producer_admin_or_raw', 'queue_of_any_access', 'new_queue_of_admin'
    ] loop
        execute format('create domain pgqueue.%I as text', domain_name);
        execute format('comment on domain pgqueue.%I is %L', domain_name,
            'The name of a queue. The caller needs an access that the name of the domain contains.');
    end loop;
end;
$$;

create domain pgqueue.caller as name
constraint caller_is_current_user check (coalesce(value = current_user, false));
comment on domain pgqueue.caller is
'The role that calls. A verb that works on several queues has it as its last argument, with current_user as default. No
other value is accepted, as PostgreSQL evaluates the check with the rights of the caller.';
-- Tables, sequences and indexes. The column names are part of the API: applications may send, claim and acknowledge
-- messages with plain SQL on these tables. Add new columns at the end.

create sequence pgqueue.queue_id;
comment on sequence pgqueue.queue_id is
'Numbers the queues. Registers and dedicated tables are named by these numbers.';

create table pgqueue.queues (
    name text collate "C" not null,
    visibility_timeout interval not null default '30 s',
    max_attempts int not null default 5,
    dlq_enabled boolean not null default true,
    dead_letter_expired boolean not null default false,
    max_payload_bytes int not null default 262144,
    backoff_base interval not null default '1 s',
    backoff_factor double precision not null default 2,
    backoff_max interval not null default '10 min',
    backoff_jitter double precision not null default 0.2,
    dedicated boolean not null default false,
    paused_at timestamptz,
    created_at timestamptz not null default clock_timestamp(),
    updated_at timestamptz not null default clock_timestamp(),
    queue_id bigint not null default nextval('pgqueue.queue_id'),
    fresh_from_id regclass not null,
    sweep_resume_id regclass not null,
    next_sweep_at regclass not null,
    first_due_at regclass not null,
    waiting_until regclass not null,
    archive_for interval,
    expires_after_idle interval,
    dedup_window interval not null default '5 min',
    group_limit int,
    on_dead text not null default 'skip',
    max_in_flight int,
    rate_limit int,
    rate_period interval not null default '1 s',
    priorities boolean not null default false,
    counters boolean not null default true,
    dead_letter_to text collate "C",
    kind bigint generated always as (case
        when dedicated then 1000 + queue_id
        when group_limit is not null then 1
        when priorities and max_in_flight is null then 2
        when priorities then 3
        when max_in_flight is not null then 4
    end) stored,
    constraint queues_pkey primary key (name),
    constraint queues_queue_id_is_unique unique (queue_id),
    constraint queues_name_is_plain check (name ~ '^[a-z0-9_-]{1,128}$')
);
create index queues_dead_letter_to on pgqueue.queues (dead_letter_to) where dead_letter_to is not null;
comment on table pgqueue.queues is
'One row per queue, rarely updated, so that a claim reads one row version. Registers hold what each claim changes.';
comment on column pgqueue.queues.kind is
'The partition of messages for the messages of the queue: null messages_shared, 1 messages_grouped, 2
messages_prioritized, 3 messages_prioritized_limited, 4 messages_limited, and from 1001 on a dedicated table.';

create sequence pgqueue.message_id;
comment on sequence pgqueue.message_id is
'The ids of the messages of all queues. Its cache must stay 1: the sweep relies on each id being taken inside the
inserting statement.';

create table pgqueue.messages (
    id bigint not null default nextval('pgqueue.message_id'),
    queue_name text collate "C" not null,
    enqueued_at timestamptz not null default clock_timestamp(),
    visible_at timestamptz not null default clock_timestamp(),
    attempt_count int not null default 0,
    max_attempts int not null default 5,
    claimed_attempt int,
    claim_token uuid,
    expires_at timestamptz,
    message_id uuid,
    payload jsonb,
    body bytea,
    headers jsonb,
    claimed_by text,
    last_error text,
    claimed_at timestamptz,
    transport_headers text,
    transport_id uuid,
    transport_seq bigint,
    kind bigint
) partition by list (kind);
comment on table pgqueue.messages is
'Messages that are ready (visible_at has passed) or in flight (claimed; visible_at is the end of the claim). A message
has either a payload or a body.';
comment on column pgqueue.messages.claimed_attempt is
'The attempt_count of the claim that set claim_token. The token is valid only while the two are equal: a claim by plain
SQL that raises attempt_count and sets no token invalidates the token.';
comment on column pgqueue.messages.transport_headers is
'The headers in the text form that a transport writes and reads; null if no transport uses the message.';
comment on column pgqueue.messages.transport_id is
'The id of the message in the relation that expose_transport created; null if the queue has no such relation.';
comment on column pgqueue.messages.transport_seq is
'The position of the message in that relation. The id cannot serve as position: all queues share one sequence, so the
gaps between the ids of a queue can exceed the range in which a transport counts. In a queue with priorities: the place
of a message that came due, among those of its priority; null if the id is its place.';
comment on column pgqueue.messages.kind is
'The kind of the queue (see queues.kind) when the message was sent or moved. Plain SQL leaves it null; a claim of a
queue of another kind then moves the message to the partition of that kind.';
comment on column pgqueue.messages.claimed_at is
'When the claim of claimed_attempt was made. An extension does not change it.';

-- The primary key is the only index, and a claim writes none of its columns: claims are HOT updates. A second index,
-- even a partial one without entries, adds 2.5 microseconds to every insert (about 10) and every claim (about 35). Two
-- check constraints cost as much, as every statement compiles them anew. So the table has neither. The functions check
-- what they write. If a queue needs an index on expires_at, doctor reports it with the statement.
-- Each partition declares the key, not the parent. Otherwise pg_dump could not restore a dedicated partition, as the
-- parent comes with its key from the extension.
-- fillfactor 50 leaves room for the row versions that claims write, even while no dead version can be pruned. A claim
-- enlarges the smallest messages by a third, so the room suffices for three out of four of those, and for all large
-- messages.
-- Autovacuum starts by count, as the size of a queue says nothing about its churn. Vacuum never truncates the table, as
-- a truncation takes an exclusive lock.
create table pgqueue.messages_shared partition of pgqueue.messages (
    constraint messages_shared_pkey primary key (queue_name, id)
) for values in (null) with (
    fillfactor = 50,
    autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_insert_threshold = 1000000,
    autovacuum_vacuum_insert_scale_factor = 0,
    autovacuum_analyze_threshold = 10000,
    vacuum_truncate = false
);
comment on table pgqueue.messages_shared is
'The messages of plain queues: those without groups, priorities, max_in_flight and a dedicated table.';

-- The queues of a kind share a table, which has the indexes that the kind needs. So a queue costs the others nothing,
-- and is created and altered without a lock on messages. In these indexes the queue and the id are expressions. As
-- plain columns they would also serve a search by queue and id: a plan made on a small table would take that index, and
-- read the whole queue later.
do $$
declare
    options constant text := (
        select array_to_string(c.reloptions, ', ') from pg_catalog.pg_class c where c.oid = 'pgqueue.messages_shared'::regclass
    );
    names constant text[] := '{grouped,prioritized,prioritized_limited,limited}';
    -- The bodies of _group_position and _level_position. A role that writes by plain SQL may not call functions.
    by_group constant text :=
        '(queue_name || ''''), coalesce((hashtextextended(headers ->> ''pgqueue.group'', 0) & 4611686018427387902)'
        ' + 4611686018427387904, id), (id + 0)';
    by_level constant text :=
        '(queue_name || ''''), (((9 - coalesce(array_position(''{1,2,3,4,5,6,7,8,9}''::text[], headers ->>'
        ' ''pgqueue.priority''), 0))::bigint << 59) | (coalesce(transport_seq, id) & 576460752303423487))';
    claimed constant text :=
        '((queue_name || ''''), (id + 0)) where attempt_count > 0'
        ' and (claim_token is not null or claimed_attempt is distinct from attempt_count)';
begin
    for kind in 1..4 loop
        execute format('create table pgqueue.messages_%s (like pgqueue.messages_shared including defaults)', names[kind]);
        execute format('alter table pgqueue.messages_%s add primary key (queue_name, id)', names[kind]);
        execute format('alter table pgqueue.messages_%s set (%s)', names[kind], options);
        execute format('alter table pgqueue.messages attach partition pgqueue.messages_%s for values in (%s)', names[kind], kind);
    end loop;
    execute format('create index messages_grouped_position on pgqueue.messages_grouped (%s)', by_group);
    -- A claim changes attempt_count, so its update is not HOT. Without this index, finding a message in flight behind a
    -- backlog of its group would read the backlog.
    execute format('create index messages_grouped_attempted on pgqueue.messages_grouped (%s) where attempt_count > 0', by_group);
    -- A claim changes no column of these two, so its update is HOT.
    execute format('create index messages_prioritized_level on pgqueue.messages_prioritized (%s)', by_level);
    execute format('create index messages_prioritized_limited_level on pgqueue.messages_prioritized_limited (%s)', by_level);
    -- Without these, a count of the messages in flight would read the backlog.
    execute format('create index messages_prioritized_limited_claimed on pgqueue.messages_prioritized_limited %s', claimed);
    execute format('create index messages_limited_claimed on pgqueue.messages_limited %s', claimed);
end;
$$;
comment on table pgqueue.messages_grouped is 'The messages of queues with group_limit.';
comment on table pgqueue.messages_prioritized is 'The messages of queues with priorities.';
comment on table pgqueue.messages_prioritized_limited is 'The messages of queues with priorities and max_in_flight.';
comment on table pgqueue.messages_limited is 'The messages of queues with max_in_flight alone.';

create table pgqueue.scheduled_messages (
    id bigint not null default nextval('pgqueue.message_id'),
    queue_name text collate "C" not null,
    due_at timestamptz not null,
    enqueued_at timestamptz not null default clock_timestamp(),
    attempt_count int not null default 0,
    max_attempts int not null default 5,
    expires_at timestamptz,
    message_id uuid,
    payload jsonb,
    body bytea,
    headers jsonb,
    claimed_by text,
    last_error text,
    transport_headers text,
    constraint scheduled_messages_pkey primary key (queue_name, id),
    constraint scheduled_messages_due_at_fits_a_register
    check (due_at between '1970-01-02 00:00+00' and '9999-12-31 00:00+00')
) with (autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_scale_factor = 0);
comment on table pgqueue.scheduled_messages is
'Messages with a due time: sent with a delay, returned to the queue after a claim, or redriven (due at once).';
create index scheduled_messages_due_at on pgqueue.scheduled_messages (queue_name, due_at, id);
create index scheduled_messages_expires_at on pgqueue.scheduled_messages (queue_name, expires_at)
where expires_at is not null;

create table pgqueue.dead_messages (
    id bigint not null,
    queue_name text collate "C" not null,
    enqueued_at timestamptz not null,
    died_at timestamptz not null default clock_timestamp(),
    attempt_count int not null,
    max_attempts int not null,
    expires_at timestamptz,
    message_id uuid,
    payload jsonb,
    body bytea,
    headers jsonb,
    claimed_by text,
    last_error text,
    transport_headers text,
    reason text not null,
    constraint dead_messages_pkey primary key (queue_name, id),
    constraint dead_messages_reason_is_known
    check (reason in ('attempts_exhausted', 'expired', 'rejected', 'queue_dropped'))
);
create index dead_messages_group on pgqueue.dead_messages (
    queue_name,
    coalesce((hashtextextended(headers ->> 'pgqueue.group', 0) & 4611686018427387902) + 4611686018427387904, id)
) where headers ->> 'pgqueue.group' is not null;
comment on table pgqueue.dead_messages is
'Dead letters, with reason, last error and time. When a queue is dropped, its delayed messages that are not due yet stay
here under its name, with reason queue_dropped.';

-- Each day (UTC) has a partition, created days ahead. There is no default partition: while one exists, attaching a day
-- locks it against all readers of the archive until the transaction ends, and a concurrent acknowledgement fails. A
-- message whose day has no partition goes to unfiled_messages.
-- There is no unique key: if a message was put back under its old id, its next acknowledgement must not fail. Each
-- partition declares the index, not the parent. Otherwise pg_dump could not restore a partition, as the parent comes
-- with its index from the extension.
create table pgqueue.archived_messages (
    id bigint not null,
    queue_name text collate "C" not null,
    enqueued_at timestamptz not null,
    claimed_at timestamptz,
    finished_at timestamptz not null default clock_timestamp(),
    attempt_count int not null,
    max_attempts int not null,
    expires_at timestamptz,
    message_id uuid,
    payload jsonb,
    body bytea,
    headers jsonb,
    claimed_by text,
    last_error text
) partition by range (finished_at);
comment on table pgqueue.archived_messages is
'Acknowledged messages of queues that have archive_for. Each day (UTC) is one partition and is dropped as a whole.';
-- The table has no key. With replica identity full, a publication that includes it still accepts updates and deletes.
-- The same holds for the other tables below that have no key.
alter table pgqueue.archived_messages replica identity full;

create table pgqueue.unfiled_messages (like pgqueue.archived_messages including all);
alter table pgqueue.unfiled_messages replica identity full;
comment on table pgqueue.unfiled_messages is
'Archived messages whose day had no partition when they were acknowledged. Sweeps and maintain_archive move them to
archived_messages.';

create sequence pgqueue.next_housekeeping_at;
comment on sequence pgqueue.next_housekeeping_at is
'Register: when a sweep next calls the housekeeping of the rooms, in microseconds since 1970. A hint, shared by all
queues.';

create table pgqueue.archive_promises (
    queue_name text collate "C" not null,
    archive_for interval not null,
    ends_at timestamptz not null
);
alter table pgqueue.archive_promises replica identity full;
comment on table pgqueue.archive_promises is
'Queues that were dropped or no longer archive. Until ends_at, what they archived is kept for archive_for.';

create table pgqueue.archive_clock (
    checked_at timestamptz not null,
    confirmed_at timestamptz
);
alter table pgqueue.archive_clock replica identity full;
create unique index archive_clock_has_one_row on pgqueue.archive_clock ((true));
comment on table pgqueue.archive_clock is
'One row: which readings of the clock the archive has compared. The table is empty before the first comparison.';

create table pgqueue.requeued_messages (
    queue_name text collate "C" not null,
    check_at timestamptz not null,
    id bigint not null
);
create index requeued_messages_check_at on pgqueue.requeued_messages (queue_name, check_at, id);
alter table pgqueue.requeued_messages replica identity full;
comment on table pgqueue.requeued_messages is
'Messages that a sweep looks up separately, because it may skip their ids: scheduled messages that came due and dead
letters of groups that were redriven, which return to messages under their old ids.';

create table pgqueue.dedup_keys (
    slice int not null,
    queue_id bigint not null,
    dedup_key text collate "C" not null,
    period bigint not null,
    id bigint not null,
    enqueued_at timestamptz not null,
    constraint dedup_keys_pkey primary key (slice, queue_id, dedup_key, period)
) partition by list (slice);
comment on table pgqueue.dedup_keys is
'The keys that senders have given to messages, and the message that has each key. A row belongs to a period of an hour,
a day or 30 days, whichever the window of the queue fits into. Three tables for each length take turns and are truncated
when their period has ended.';
comment on column pgqueue.dedup_keys.slice is
'The number of the table: 0 to 2 for periods of an hour, 3 to 5 for days, 6 to 8 for 30 days.';
do $$
begin
    for n in 0..8 loop
        execute format('create table pgqueue.dedup_keys_%s partition of pgqueue.dedup_keys for values in (%1$s)', n);
        execute format('comment on table pgqueue.dedup_keys_%s is %L', n, 'The keys of one period.');
    end loop;
end;
$$;

create table pgqueue.sweep_state (
    queue_name text collate "C" not null,
    vacant_ids int8multirange not null default '{(,1)}',
    settled_id bigint not null default 0,
    bound_id bigint not null default 0,
    writers text[] not null default '{}',
    bound_at timestamptz not null default '1970-01-01 00:00+00',
    recorded_at timestamptz not null default '1970-01-01 00:00+00',
    settled_at timestamptz not null default '-infinity',
    first_id bigint not null default 1,
    first_due_at timestamptz not null default '-infinity',
    first_check_at timestamptz not null default '-infinity',
    constraint sweep_state_pkey primary key (queue_name)
) with (fillfactor = 10, autovacuum_vacuum_threshold = 100, autovacuum_vacuum_scale_factor = 0);
comment on table pgqueue.sweep_state is
'What sweeps know about each queue; written at most once a second. It is a table, not a set of registers, because it
must be dumped together with the messages.';
comment on column pgqueue.sweep_state.vacant_ids is
'Ids at which there is no message and none will appear, except through requeued_messages. A sweep skips them.';
comment on column pgqueue.sweep_state.settled_id is 'No running transaction has taken an id up to this one.';
comment on column pgqueue.sweep_state.bound_id is
'The highest id taken before writers were listed. It becomes settled_id when none of writers runs any more.';
comment on column pgqueue.sweep_state.settled_at is
'No running transaction has written to the tables of messages since before this time. It is bound_at of the writers that
were listed for settled_id.';

create table pgqueue.streams (
    queue_name text collate "C" not null,
    stream_name text collate "C" not null,
    epoch bigint not null,
    opened_by text,
    opened_at timestamptz not null default clock_timestamp(),
    created_at timestamptz not null default clock_timestamp(),
    acked_seq bigint not null default 0,
    acked_token uuid,
    claim_token uuid,
    ids bigint[],
    left_out bigint[],
    partitions int,
    visibility_timeout interval,
    claimed_at timestamptz,
    claimed_until timestamptz,
    replays int,
    begun_epoch bigint,
    on_ack text,
    constraint streams_pkey primary key (queue_name, stream_name)
) with (fillfactor = 50, autovacuum_vacuum_threshold = 100, autovacuum_vacuum_scale_factor = 0);
comment on table pgqueue.streams is
'One row per stream: the batch acknowledged last and the open batch. A stream has at most one open batch.';
comment on column pgqueue.streams.ids is
'The messages of the open batch, in order. The array is never changed, as the partitions of the batch are slices of
it.';
comment on column pgqueue.streams.left_out is
'The elements of ids that no longer belong to the batch: skipped, or lost and given up.';
comment on column pgqueue.streams.begun_epoch is
'The epoch of the last stream_begin of the open batch; null before the first.';

create unlogged table pgqueue.staged_attempts (
    token uuid not null,
    run uuid not null,
    partition int not null,
    attempt bigint not null,
    queue_name text collate "C" not null,
    staged_by name not null,
    staged_at timestamptz not null,
    constraint staged_attempts_pkey primary key (token)
);
create index staged_attempts_run on pgqueue.staged_attempts (run);
comment on table pgqueue.staged_attempts is
'Attempts that stage messages of a run: one row per attempt at a partition. Unlogged, like staged_messages: a crash of
the server empties both.';
comment on column pgqueue.staged_attempts.token is
'A secret of the writer. The token is needed to add rows to the attempt and to name it as the one to commit.';

-- A row holds some hundred messages, as arrays. One row per message would cost more to store, read and delete than the
-- message itself. The arrays are not compressed, as each is read only once.
create unlogged table pgqueue.staged_messages (
    token uuid not null,
    row_number int not null,
    payloads jsonb[],
    bodies bytea[],
    headers jsonb[],
    message_ids uuid[],
    delays interval[],
    expires_in interval[],
    group_keys text[],
    priorities int[],
    messages int not null,
    largest_bytes int not null,
    dedup_keys text[],
    constraint staged_messages_pkey primary key (token, row_number)
);
alter table pgqueue.staged_messages alter column payloads set storage external;
alter table pgqueue.staged_messages alter column bodies set storage external;
alter table pgqueue.staged_messages alter column headers set storage external;
comment on table pgqueue.staged_messages is
'Messages that wait for sink_commit and cannot be claimed yet. The arrays of a row have equal length; an array without
values is null.';
comment on column pgqueue.staged_messages.row_number is
'The number of the first message of the row, counted from 1 for each token.';
comment on column pgqueue.staged_messages.group_keys is
'A trigger moves these and priorities to headers, so a stored row has neither.';
comment on column pgqueue.staged_messages.messages is
'The number of messages in the row. The parallel writers compute this and largest_bytes, so that the single commit does
not have to.';
comment on column pgqueue.staged_messages.largest_bytes is
'The size of the largest payload (as JSON text) or body, in bytes.';

create table pgqueue.sink_commits (
    app_id text collate "C" not null,
    version bigint not null,
    run uuid not null,
    messages bigint not null,
    committed_by name not null,
    committed_at timestamptz not null,
    forgotten_version bigint,
    constraint sink_commits_pkey primary key (app_id, version)
);
-- One row of an app_id has it: without this index a commit would read all commits of its app_id.
create index sink_commits_forgotten on pgqueue.sink_commits (app_id, forgotten_version)
where forgotten_version is not null;
comment on table pgqueue.sink_commits is
'The ledger of sink_commit: what is listed here is not sent again. A run without an app_id is listed under its own id.';
comment on column pgqueue.sink_commits.forgotten_version is
'Rows of this app_id up to this version were removed from the ledger: whether those versions were committed is
unknown.';

create table pgqueue.subscriptions (
    topic text collate "C" not null,
    queue_name text collate "C" not null,
    subscribed_at timestamptz not null default clock_timestamp(),
    endpoint text collate "C" not null,
    queue_address text not null,
    is_pattern boolean not null generated always as (topic ~ '(^|[.])[*#]([.]|$)') stored,
    constraint subscriptions_pkey primary key (endpoint, topic)
);
create index subscriptions_topic on pgqueue.subscriptions (topic, queue_name);
create index subscriptions_words on pgqueue.subscriptions ((topic || '.')) where is_pattern;
create index subscriptions_queue_name on pgqueue.subscriptions (queue_name, topic);
comment on table pgqueue.subscriptions is
'Subscriptions of queues to topics, or to the topics that a pattern matches. Each subscribed queue receives a copy of a
published message.';
comment on column pgqueue.subscriptions.endpoint is
'The owner of the subscription: an endpoint of a transport, or the queue that subscribe was called for, with the prefix
pgqueue:.';

create table pgqueue.schedules (
    name text collate "C" not null,
    queue_name text collate "C" not null,
    cron text not null,
    payload jsonb not null,
    headers jsonb,
    time_zone text not null,
    paused boolean not null,
    catch_up boolean not null,
    next_id bigint,
    next_at timestamptz,
    last_at timestamptz,
    constraint schedules_pkey primary key (name)
);
create index schedules_queue_name on pgqueue.schedules (queue_name);
comment on table pgqueue.schedules is 'Schedules: each adds a message to its queue at the ticks of a cron expression.';

create table pgqueue.transports (
    queue_name text collate "C" not null,
    relation regclass not null,
    seq_register regclass not null,
    head bigint not null default 1,
    next_at timestamptz not null default '-infinity',
    settled_seq bigint not null default 0,
    bound_seq bigint not null default 0,
    bound_id bigint not null default 0
);
alter table pgqueue.transports replica identity full;
comment on table pgqueue.transports is
'The relations that expose_transport created. Each has its row in a child table of its own, which is planned and read
faster than one row of many. A session that reads a relation updates its row at most once a second.';
comment on column pgqueue.transports.settled_seq is 'No running transaction has taken a transport_seq up to this one.';
comment on column pgqueue.transports.bound_id is
'An id that was taken after bound_seq was read. bound_seq becomes settled_seq when this id is settled in sweep_state.';

create table pgqueue.results (
    queue_name text collate "C" not null,
    id bigint not null,
    message_id uuid not null,
    status text not null default 'ready',
    task jsonb,
    value jsonb,
    errors jsonb not null default '[]',
    attempt_count int not null default 0,
    workers text[] not null default '{}',
    enqueued_at timestamptz not null,
    started_at timestamptz,
    last_attempted_at timestamptz,
    finished_at timestamptz,
    expires_at timestamptz not null,
    expires_in interval not null,
    constraint results_pkey primary key (queue_name, id),
    constraint results_message_id_is_unique unique (message_id)
) with (fillfactor = 80);
create index results_expires_at on pgqueue.results (expires_at);
comment on table pgqueue.results is
'The results of messages: what a consumer wrote about each. Columns as in pgqueue.result.';

create sequence pgqueue.next_maintenance_at;
comment on sequence pgqueue.next_maintenance_at is
'Register: when a sweep next calls the maintenance, in microseconds since 1970. A hint, shared by all
queues.';

create unlogged table pgqueue.compactions (
    tried_at timestamptz not null,
    table_name text,
    outcome text,
    rows_kept bigint,
    bytes_before bigint,
    bytes_after bigint,
    handler text
);
comment on table pgqueue.compactions is
'The automatic compactions of the last day, and requests: a row with a handler makes its transaction call this function
when it commits. Unlogged: a crash of the server empties it.';

-- Vacuum truncates no table, as for messages: its exclusive lock would make a parallel pg_dump fail, which locks a
-- member of an extension only when it copies it, and does not wait for the lock then.
do $$
declare
    relation regclass;
begin
    for relation in
        select c.oid from pg_catalog.pg_class c where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r'
    loop
        execute format('alter table %s set (vacuum_truncate = false)', relation);
    end loop;
end;
$$;

create view pgqueue.access_any as select;
comment on view pgqueue.access_any is
'Its privileges are the access of roles to all queues: INSERT is producer, UPDATE consumer, DELETE admin, SELECT reader,
TRUNCATE raw and TRIGGER transport. The view has no column. A view access_<hash> is the same for one queue or for the
queues of a pattern. Do not grant on them: call grant_access.';
-- Marks the tables and sequences of the extension whose data pg_dump must include. Registers, dedicated partitions and
-- the partitions of the archive are created later, by functions, and pg_dump includes them as ordinary objects.
do $$
declare
    name text;
begin
    foreach name in array array[
        'queue_id', 'message_id', 'messages', 'archived_messages', 'unfiled_messages', 'next_housekeeping_at',
        'next_maintenance_at', 'archive_clock', 'archive_promises', 'subscriptions', 'schedules', 'results',
        'dedup_keys', 'transports'
    ] loop
        perform pg_extension_config_dump(format('pgqueue.%I', name), '');
    end loop;
    -- Staged messages are not dumped, as they do not survive a crash either. The ledger of commits is dumped.
    foreach name in array array['staged_attempts', 'staged_messages', 'compactions'] loop
        perform pg_extension_config_dump(format('pgqueue.%I', name), 'where false');
    end loop;
    -- A compaction of a table between the snapshot of a dump and the lock of that table would leave its messages out
    -- of the dump. The condition lets such a dump fail: pg_class shows the file of each table as of the snapshot,
    -- pg_relation_filenode shows the current one. pg_dump locks a member of an extension only when it copies it, so
    -- each table has the condition. It contains only built-in functions, as the role that dumps may call no other. The
    -- text becomes the error, because it is no boolean.
    foreach name in array array[
        'queues', 'messages_shared', 'messages_grouped', 'messages_prioritized', 'messages_prioritized_limited', 'messages_limited',
        'scheduled_messages', 'dead_messages', 'requeued_messages', 'sweep_state', 'streams',
        'sink_commits', 'dedup_keys_0', 'dedup_keys_1', 'dedup_keys_2', 'dedup_keys_3', 'dedup_keys_4', 'dedup_keys_5',
        'dedup_keys_6', 'dedup_keys_7', 'dedup_keys_8'
    ] loop
        perform pg_extension_config_dump(format('pgqueue.%I', name), $condition$where not exists (
            select from pg_catalog.pg_class c
            where c.relnamespace = 'pgqueue'::pg_catalog.regnamespace and c.relkind = 'r'
                and c.relname !~ '^archived_messages_' and pg_catalog.pg_relation_filenode(c.oid) <> c.relfilenode
                and case when pg_catalog.pg_relation_filenode(c.oid) <> c.relfilenode then (
                    'repeat the dump, because pgqueue.' || c.relname || ' was compacted after the dump took its snapshot'
                )::boolean end
        )$condition$);
    end loop;
end;
$$;
-- The errors, each with its SQLSTATE, message and hint. Those of rooms whose text needs more than names and numbers
-- stand at the top of their files.

-- Neither strict nor immutable: PostgreSQL could not inline these two.
create function pgqueue._with_number(number bigint, noun text) returns text
language sql stable parallel safe
as $$ select number || ' ' || noun || case number when 1 then '' else 's' end $$;

-- The name of an argument of enqueue_batch at a place, such as payloads[6] for payload; without the place if the batch
-- has one message.
create function pgqueue._element(argument text, place bigint, messages int) returns text
language sql stable parallel safe as $$
    select case when messages = 1 then argument else format('%s[%s]',
        case argument when 'headers' then 'headers' when 'body' then 'bodies' when 'priority' then 'priorities'
            else argument || 's' end, place) end
$$;

create function pgqueue._raise_invalid(argument text, given text, expected text) returns void
language plpgsql stable as $$
begin
    raise exception using
        errcode = 'invalid_parameter_value',
        message = format('invalid %s: %s', argument, coalesce(quote_literal(left(given, 200)), 'null')),
        hint = format('%s must be %s.', argument, expected);
end;
$$;

-- Raises 22023 unless the argument is valid. It takes a microsecond, so frequent verbs such as ack test it themselves.
create function pgqueue._require(is_valid boolean, argument text, given text, expected text) returns void
language plpgsql stable as $$
begin
    if is_valid is not true then
        perform pgqueue._raise_invalid(argument, given, expected);
    end if;
end;
$$;

create function pgqueue._raise(error text, variadic args text[]) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    quoted constant text := coalesce(quote_literal(left(args[1], 255)), 'null');
begin
    case error
        when 'queue_not_found' then raise exception using
            errcode = 'PQ001',
            message = format('queue %s does not exist', quoted),
            hint = 'Create it with pgqueue.create_queue, or see pgqueue.list_queues().'
                -- The role that calls, and accesses one of which it needs: the queue may exist.
                || case when args[2] is null then '' else format(
                    ' If it exists, role %I lacks the access %s to it: select pgqueue.grant_access(%L, %L, %s).',
                    args[2], array_to_string(args[3:], ' or '), args[2], args[3], quoted) end;
        when 'queue_exists' then raise exception using
            errcode = 'PQ002',
            message = format('queue %s already exists', quoted),
            hint = 'Change it with pgqueue.alter_queue, or call create_queue with if_not_exists => true.'
                || case when current_query() like '%create_queue(%).*%'
                    then ' PostgreSQL calls the function in (create_queue(...)).* once for each column. Write select * from'
                        ' pgqueue.create_queue(...).'
                    else '' end;
        when 'payload_too_large' then raise exception using
            errcode = 'PQ003',
            message = format('%s of %s is over the limit of %s of queue %s', args[2],
                pgqueue._with_number(args[3]::bigint, 'byte'), pgqueue._with_number(args[4]::bigint, 'byte'), quoted),
            hint = case args[2]
                when 'headers' then 'Move large values into the payload.'
                else 'Store the content elsewhere and send a reference, or raise max_payload_bytes with pgqueue.alter_queue.'
            end;
        when 'queue_busy' then raise exception using
            errcode = 'PQ004',
            message = format('queue %s is busy: %s could not obtain a lock', quoted, args[2]),
            hint = 'Another transaction holds a lock on the queue, its messages or its table, or the database is being dumped. Nothing was changed. Try again later.';
        when 'stream_not_found' then raise exception using
            errcode = 'PQ005',
            message = format('stream %s of queue %L does not exist', quoted, args[2]),
            hint = 'Open it with pgqueue.stream_open, or see pgqueue.list_streams().';
        when 'stream_fenced' then raise exception using
            errcode = 'PQ006',
            message = format('stream %s of queue %L is fenced: epoch %s was superseded by %s', quoted, args[2], args[3], args[4]),
            detail = format('Opened at %s by %s.', args[5], coalesce(quote_literal(args[6]), 'a reader without a name')),
            hint = 'Another query opened this stream, or stream_skip was called without an epoch. Stop this query. Each query needs its own stream. (stream_open(...)).* opens the stream once for each column: write select * from pgqueue.stream_open(...).';
        when 'staged_messages_lost' then raise exception using
            errcode = 'PQ010',
            message = format('run %s has %s in %s, not %s', args[1], pgqueue._with_number(args[4]::bigint, 'staged message'),
                coalesce('partition ' || args[2], 'an unknown partition'), args[3]),
            detail = 'Nothing was sent.',
            hint = 'The server crashed after they were staged, sweep_staged or sink_abort removed them, or another role staged them. Run the job or the micro-batch again.';
        when 'schedule_not_found' then raise exception using
            errcode = 'PQ011',
            message = format('schedule %s does not exist', quoted),
            hint = 'Create it with pgqueue.create_schedule, or see pgqueue.list_schedules().';
        when 'schedule_exists' then raise exception using
            errcode = 'PQ012',
            message = format('schedule %s already exists', quoted),
            hint = 'Change it with pgqueue.alter_schedule, or drop it with pgqueue.drop_schedule.';
        when 'invalid_row' then raise exception using
            errcode = args[1],
            message = format('row %s of partition %s: %s', args[2], coalesce(args[3], 'unknown'), args[4]),
            detail = 'Nothing was sent.',
            hint = args[5];
        -- In read committed every snapshot shows what other transactions have committed.
        when 'stale_snapshot' then raise exception using
            errcode = 'serialization_failure',
            message = format('could not serialize access to %s', args[1]),
            detail = 'The snapshot of this transaction is older than a change that another transaction has committed.',
            hint = 'Retry the transaction, or run it in read committed, where this error cannot occur.';
        when 'not_read_committed' then raise exception using
            errcode = 'active_sql_transaction',
            message = format('%s requires a transaction in read committed', args[1]),
            detail = format('The transaction is in %s.', current_setting('transaction_isolation')),
            hint = 'Call it in autocommit mode. Other sessions cannot use the tables until the transaction ends.';
        when 'role_not_found' then raise exception using
            errcode = 'undefined_object',
            message = format('role %I does not exist', args[1]),
            hint = case args[1]
                when 'public' then 'Access cannot be granted to PUBLIC. Create a role, and grant it to the users who need access.'
                else 'Create the role with create role.'
            end;
        when 'not_allowed' then raise exception using
            errcode = 'insufficient_privilege',
            message = format('role %I may not %s %I', args[1], args[2], args[3]),
            hint = 'The owner can grant this privilege.';
        when 'exposed' then raise exception using
            errcode = 'duplicate_object',
            message = format('queue %s is already exposed as %s', quoted, args[2]),
            hint = format('Drop that relation first: select pgqueue.unexpose_transport(%s).', quoted);
        -- The message and the fields are those of a table with a not-null constraint.
        when 'null_column' then raise exception using
            errcode = 'not_null_violation',
            message = format('null value in column "%s" of relation "%s" violates not-null constraint', args[3], args[2]),
            hint = 'A table of the transport has the same constraint. Headers may be {}.',
            schema = args[1], table = args[2], column = args[3];
    end case;
end;
$$;
-- Decides which queues a role may use. The record is the privileges on views without columns: access_any stands for
-- all queues, access_<hash> for a queue or a pattern. PostgreSQL checks the privileges, follows the membership of
-- roles, and dumps them. The checks of the domains in types.sql are made here.

create function pgqueue._is_name(name text) returns boolean
language sql immutable parallel safe as $$ select coalesce(name collate "C" ~ '^[a-z0-9_-]{1,128}$', false) $$;

create function pgqueue._privileges_of(accesses text[]) returns text
language sql immutable parallel safe as $$
    select string_agg(p.privilege, ', ' order by p.privilege)
    from (values
        ('producer', 'INSERT'), ('consumer', 'UPDATE'), ('admin', 'DELETE'),
        ('reader', 'SELECT'), ('raw', 'TRUNCATE'), ('transport', 'TRIGGER')
    ) as p (access, privilege)
    where p.access = any (accesses)
$$;

-- Stable, as _to_micros.
create function pgqueue._access_view(name_or_pattern text) returns text
language sql stable parallel safe
as $$ select 'pgqueue.access_' || left(encode(sha256(convert_to(name_or_pattern, 'UTF8')), 'hex'), 56) $$;

create function pgqueue._may_use(caller name, queue_name text, privileges text) returns boolean
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    n int := 0;
begin
    if has_table_privilege(caller, 'pgqueue.access_any'::regclass, privileges) then
        return true;
    end if;
    if not pgqueue._is_name(queue_name) then
        return false;
    end if;
    if has_table_privilege(caller, to_regclass(pgqueue._access_view(queue_name)), privileges) then
        return true;
    end if;
    loop
        n := regexp_instr(queue_name, '[-_]', n + 1);
        exit when n = 0;
        if has_table_privilege(caller, to_regclass(pgqueue._access_view(left(queue_name, n) || '*')), privileges) then
            return true;
        end if;
    end loop;
    return false;
end;
$$;

-- For the checks of the domains: unless the caller may use the queue, raises PQ001 as for a queue that does not exist
-- or, if the queue would be created, 42501.
create function pgqueue._may_or_raise(queue_name text, privileges text, creating boolean) returns boolean
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
    -- A null stands for all queues, which the verb limits to those of its caller, or is refused by the verb.
    if queue_name is not null and not pgqueue._may_use(current_user, queue_name, privileges) then
        if creating then
            perform pgqueue._raise('not_allowed', current_user, 'create queue', left(queue_name, 128));
        end if;
        perform pgqueue._raise('queue_not_found', variadic array[queue_name, current_user] || array(
            select a from unnest('{producer,consumer,admin,reader,raw,transport}'::text[]) as a
            where strpos(privileges, pgqueue._privileges_of(array[a])) > 0));
    end if;
    return true;
end;
$$;

create function pgqueue._require_admin_of_all(caller name, verb text) returns void
language plpgsql stable as $$
begin
    if not has_table_privilege(caller, 'pgqueue.access_any'::regclass, pgqueue._privileges_of('{admin}')) then
        perform pgqueue._raise('not_allowed', caller, 'call, without admin access to all queues,', verb);
    end if;
end;
$$;

do $$
declare
    d record;
begin
    for d in
        select
            y.typname as name, y.typname = 'new_queue_of_admin' as creating,
            pgqueue._privileges_of(array(
                select a from unnest('{producer,consumer,admin,raw,reader,transport}'::text[]) as a
                where strpos(y.typname, a) > 0 or y.typname = 'queue_of_any_access' and a <> 'transport'
            )) as privileges
        from pg_catalog.pg_type y
        where y.typnamespace = 'pgqueue'::regnamespace and y.typname ~ '^(new_)?queue_of_'
    loop
        execute format('alter domain pgqueue.%I drop constraint if exists caller_may_use_queue', d.name);
        -- The looks at the views of the queue and of the shortest patterns are written out: a call of a function costs
        -- several of them. to_regclass truncates the name of the view as _access_view does.
        execute format(
            'alter domain pgqueue.%I add constraint caller_may_use_queue check ('
            'has_table_privilege(''pgqueue.access_any''::regclass, %2$L)%3$s or pgqueue._may_or_raise(value, %2$L, %4$L))',
            d.name, d.privileges, (
                select string_agg(format(
                    ' or has_table_privilege(to_regclass(textcat(''pgqueue.access_'','
                    ' encode(sha256(convert_to(%s, ''UTF8'')), ''hex''))), %L)', n.name, d.privileges), '' order by n.place)
                from unnest(array[
                    'value', 'textcat(substring(value, ''^[^-_]*[-_]''), ''*'')',
                    'textcat(substring(value, ''^[^-_]*[-_][^-_]*[-_]''), ''*'')'
                ]) with ordinality as n (name, place)
            ), d.creating);
        execute format('revoke usage on domain pgqueue.%I from public', d.name);
    end loop;
    revoke usage on domain pgqueue.caller from public;
end;
$$;
-- Time. _now is the only function that reads the clock, so that a test can replace it inside its own transaction.

-- Not now(): it stands still in a transaction, so claims and delays would start in the past.
create function pgqueue._now() returns timestamptz
language sql volatile parallel safe as $$ select clock_timestamp() $$;

-- A day counts as 24 hours. Plain addition would make it 23 or 25 where the TimeZone of the session changes its clocks.
create function pgqueue._add_interval(moment timestamptz, span interval) returns timestamptz
language sql stable parallel safe as $$ select moment + interval '1 s' * date_part('epoch', span) $$;

-- Whether less than half of statement_timeout has passed since the client sent its statement; true if there is none.
-- Functions that treat any number of messages end after a slice if this is false, and later calls do the rest.
create function pgqueue._has_time() returns boolean
language sql volatile as $$
    select current_setting('statement_timeout') = '0'
        or pgqueue._now() < statement_timestamp() + current_setting('statement_timeout')::interval / 2
$$;

-- Whether a claim that began at this time has to end its walk over messages that no claim has passed. The walk then
-- takes messages to remove, too: so it ends, and the register passes them. Inlined.
create function pgqueue._is_walk_over(at timestamptz) returns boolean
language sql volatile as $$ select pgqueue._now() > at + interval '20 ms' and not pgqueue._has_time() $$;
-- A register is a sequence that is used as a shared variable. Its value survives a crash. A sequence is updated in
-- place: no row version, no row lock, no rollback. Every register is a hint: a wrong value costs time, but loses no
-- message. Counters are sequences, too. Their totals never decrease.

-- A moment in the form that registers hold: microseconds since 1970, exact until the year 2106, then to two
-- microseconds. Stable, as date_part is: PostgreSQL could not inline an immutable function with this body.
create function pgqueue._to_micros(moment timestamptz) returns bigint
language sql stable parallel safe as $$ select (date_part('epoch', moment) * 1000000)::bigint $$;

create function pgqueue._from_micros(micros bigint) returns timestamptz
language sql stable parallel safe
as $$ select timestamptz '1970-01-01 00:00:00+00' + micros * interval '1 microsecond' $$;

-- A due time for an insert into scheduled_messages: at most 100 ms before the clock of the inserting statement.
-- sweep_state.first_due_at relies on this. The caller may have read the clock before it waited for a lock.
create function pgqueue._clamp_due_at(due_at timestamptz) returns timestamptz
language sql volatile as $$ select greatest(due_at, pgqueue._now() - interval '100 ms') $$;

create function pgqueue._drop_registers(queue_id bigint, kept text[]) returns void
language plpgsql volatile as $$
declare
    register regclass;
begin
    for register in
        select c.oid from pg_class c
        where c.relnamespace = 'pgqueue'::regnamespace
            -- Range conditions on the name, which a catalog index supports.
            and c.relname >= format('queue_%s_', queue_id)::name and c.relname < format('queue_%s_~', queue_id)::name
            and c.relname <> all (select format('queue_%s_%s', queue_id, k) from unnest(kept) as k)
    loop
        -- Another role can have a view of a register, which must not keep the queue.
        execute format('drop sequence %s cascade', register);
    end loop;
end;
$$;

-- The number of a new queue: that of a dedicated table that was left for it, otherwise the next one without such a
-- table. Drops the registers that were left for this number.
create function pgqueue._take_number(queue_name text) returns bigint
language plpgsql volatile as $$
declare
    number bigint;
begin
    -- Keeps _drop_leftovers away.
    lock table only pgqueue.queues in row exclusive mode;
    select substring(i.inhrelid::regclass::text, '[0-9]+')::bigint into number
    from pg_inherits i
    where i.inhparent = 'pgqueue.messages'::regclass
        and obj_description(i.inhrelid, 'pg_class') = format('The messages of queue %s.', queue_name);
    if found then
        -- No later queue gets this number.
        loop
            exit when nextval('pgqueue.queue_id') >= number;
        end loop;
    else
        loop
            number := nextval('pgqueue.queue_id');
            exit when to_regclass(format('pgqueue.messages_%s', number)) is null;
        end loop;
    end if;
    perform pgqueue._drop_registers(number, '{seq}');
    return number;
end;
$$;

create function pgqueue._create_sequence(name text) returns regclass
language plpgsql volatile set client_min_messages = warning as $$
begin
    -- After waiting for a lock, a session's catalog cache can be stale. "if not exists" reads the catalog again.
    execute format('create sequence if not exists pgqueue.%I', split_part(name, '.', 2));
    perform pgqueue._revoke_default_privileges(name::regclass);
    return name::regclass;
end;
$$;

create function pgqueue._create_register(queue_id bigint, role text) returns regclass
language sql volatile as $$ select pgqueue._create_sequence(format('pgqueue.queue_%s_%s', queue_id, role)) $$;

create function pgqueue._find_registers() returns trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    -- Null for a new queue or kind. pg_dump writes the number of a register in place of its name if the queue was
    -- dropped, or got another kind, since the snapshot of the dump. In a restored database another relation can have
    -- this number. The dump has the registers, too.
    if new.fresh_from_id is null
        or new.fresh_from_id is distinct from to_regclass(format('pgqueue.queue_%s_fresh_from_id', new.queue_id))
    then
        new.fresh_from_id := pgqueue._create_register(new.queue_id, 'fresh_from_id');
        new.sweep_resume_id := pgqueue._create_register(new.queue_id, 'sweep_resume_id');
        new.next_sweep_at := pgqueue._create_register(new.queue_id, 'next_sweep_at');
        new.first_due_at := pgqueue._create_register(new.queue_id, 'first_due_at');
        new.waiting_until := pgqueue._create_register(new.queue_id, 'waiting_until');
        perform setval(r, 1)
        from unnest(array[
            new.fresh_from_id, new.sweep_resume_id, new.next_sweep_at, new.first_due_at, new.waiting_until
        ]) as r
        where pg_sequence_last_value(r) is null;
        if new.priorities then
            perform pgqueue._create_register(new.queue_id, format('level_%s', n)) from generate_series(0, 9) as n;
            -- Functions that read the messages by id skip the vacant ids only below this register.
            perform setval(new.fresh_from_id, 4611686018427387904);
        end if;
    end if;
    return new;
end;
$$;

create or replace trigger find_registers
before insert or update of fresh_from_id on pgqueue.queues for each row execute function pgqueue._find_registers();
-- Also in sessions that have triggers disabled: they can create queues, too.
alter table pgqueue.queues enable always trigger find_registers;

create function pgqueue._register_value(register regclass) returns bigint
language sql volatile as $$ select coalesce(pg_sequence_last_value(register), setval(register, 1)) $$;

-- The name of a sequence that is found by the name of the queue, without reading its row. It contains a hash of this
-- name, as the name of a queue can be longer than an identifier. Inlined.
create function pgqueue._sequence_name(role text, queue_name text) returns text
language sql immutable parallel safe
as $$ select 'pgqueue.' || role || '_' || to_hex(hashtextextended(queue_name collate "C", 0)) $$;

create function pgqueue._counter(role text, queue_name text) returns regclass
language sql stable parallel safe as $$ select to_regclass(pgqueue._sequence_name(role, queue_name)) $$;

create function pgqueue._counter_roles() returns text[]
language sql immutable parallel safe
as $$ select '{enqueued,acknowledged,failed,dead}'::text[] $$;

create function pgqueue._count_many(counter regclass, messages int) returns int
language plpgsql volatile as $$
begin
    -- A loop over one expression. A statement with generate_series would take twice as long.
    for i in 1..messages loop
        continue when nextval(counter) > 0;
    end loop;
    return messages;
end;
$$;

-- Counts messages of a queue and returns their number. role is enqueued, acknowledged, failed or dead. Nothing is
-- counted if messages is null or 0, or if the counter is missing. Call it inside an expression that is evaluated
-- anyway, as each further one would slow down the call by its preparation. Inlined. A counter is never 0 after nextval.
create function pgqueue._count(role text, queue_name text, messages int) returns int
language sql volatile as $$
    select case
        when messages > 1 then pgqueue._count_many(pgqueue._counter(role, queue_name), messages)
        -- `and` would evaluate its second operand even if messages is null.
        when messages = 1 then case nextval(pgqueue._counter(role, queue_name)) when 0 then 0 else 1 end
        else messages
    end
$$;

create function pgqueue._missing_counters(queue_name text) returns text[]
language sql stable as $$
    select array(select r from unnest(pgqueue._counter_roles()) as r where pgqueue._counter(r, queue_name) is null)
$$;

create function pgqueue._drop_counters(queue_name text) returns void
language plpgsql volatile set client_min_messages = warning as $$
begin
    execute format('drop sequence if exists %s cascade', (
        select string_agg(pgqueue._sequence_name(r, queue_name), ', ') from unnest(pgqueue._counter_roles()) as r));
end;
$$;

create function pgqueue._revoke_default_privileges(relation regclass) returns void
language plpgsql volatile as $$
declare
    role_name name;
begin
    for role_name in
        select distinct r.rolname
        from pg_class c cross join lateral aclexplode(c.relacl) as a
        left join pg_roles r on r.oid = a.grantee
        where c.oid = relation and a.grantee <> c.relowner
    loop
        if role_name is null then
            execute format('revoke all on %s from public', relation);
        else
            execute format('revoke all on %s from %I', relation, role_name);
        end if;
    end loop;
end;
$$;
-- Finds messages by their ids. Functions that do so have enable_seqscan and enable_bitmapscan off and force generic
-- plans, and write `from pgqueue._lookup_keys(name, ids) k where pgqueue._matches_key(m.queue_name, m.id, name,
-- k.names, k.ids, k.id)`. Both are inlined to `m.queue_name = name and m.id = any (ids)`. A bitmap that exceeds
-- work_mem would compare each row with each id, which takes hours for millions of messages. Before PostgreSQL 17, a
-- plan for constants could read the whole queue.

-- Before PostgreSQL 17, a plan that was made while a queue was small may read the whole queue with `id = any` as a
-- filter, and the session keeps that plan. In those versions a join looks up each id instead. The name is compared
-- with an array, so the planner gains nothing by reading the whole index in order. The calling functions disable other
-- scans. _lookup_keys returns one row with all ids or, in those versions, one row per id, in order.
create function pgqueue._install_key_lookup() returns void
language plpgsql volatile as $$
declare
    joins constant boolean := current_setting('server_version_num')::int < 170000;
begin
    execute format(
        'create or replace function pgqueue._lookup_keys(queue_name text, inout ids bigint[], out id bigint, out names text[])'
        ' returns setof record language sql immutable parallel safe as %L',
        case when joins then ' select null::bigint[], i, array[queue_name] from unnest(ids) as i order by i '
            else ' select ids, null::bigint, null::text[] ' end);
    execute format(
        'create or replace function pgqueue._matches_key('
        'queue_name text, id bigint, name text, key_names text[], key_ids bigint[], key_id bigint)'
        ' returns boolean language sql immutable parallel safe as %L',
        case when joins then
            ' select queue_name = any (key_names) and id = key_id '
            else ' select queue_name = name and id = any (key_ids) ' end);
end;
$$;

do $$ begin perform pgqueue._install_key_lookup(); end $$;

-- Whether a message belongs to the queue of this kind and name, in a form that only the further indexes of the kind
-- have. A search by _group_position or _level_position finds the messages in the order of its index. An `order by`
-- would sort all messages: the planner cannot know that only the partition with this index is left at run time.
-- Inlined.
create function pgqueue._is_in_queue(m pgqueue.messages, kind bigint, name text) returns boolean
language sql immutable parallel safe as $$ select m.kind = _is_in_queue.kind and m.queue_name || '' = name $$;

-- In PL/pgSQL, which keeps its plan: see _level_registers.
create function pgqueue._array_except(ids bigint[], others bigint[]) returns bigint[]
language plpgsql immutable parallel safe as $$
begin
    return array(select unnest(ids) except select unnest(others) order by 1);
end;
$$;

-- Whether a claim may return the message. A visible message that is not ready is spent: it has expired or has no
-- attempt left. Inlined.
create function pgqueue._is_ready(m pgqueue.messages, at timestamptz) returns boolean
language sql immutable parallel safe as $$
    select m.visible_at <= at and m.attempt_count < m.max_attempts and (m.expires_at is null or m.expires_at > at)
$$;

-- Statements that name messages_shared call this form: PostgreSQL would build the row for the other one.
create function pgqueue._is_ready(m pgqueue.messages_shared, at timestamptz) returns boolean
language sql immutable parallel safe as $$
    select m.visible_at <= at and m.attempt_count < m.max_attempts and (m.expires_at is null or m.expires_at > at)
$$;

-- Whether the claim with this token is the latest claim of the message, counting also claims without a token. Inlined.
create function pgqueue._is_claimed_by(m pgqueue.messages, claim_token uuid) returns boolean
language sql immutable parallel safe
as $$ select m.claim_token = _is_claimed_by.claim_token and m.claimed_attempt = m.attempt_count $$;

create function pgqueue._is_claimed_by(m pgqueue.messages_shared, claim_token uuid) returns boolean
language sql immutable parallel safe
as $$ select m.claim_token = _is_claimed_by.claim_token and m.claimed_attempt = m.attempt_count $$;

-- Whether a message that is not visible waits for its time or for its retry. Otherwise a consumer has it. Inlined.
create function pgqueue._is_unclaimed(m pgqueue.messages) returns boolean
language sql immutable parallel safe
as $$ select m.attempt_count = 0 or (m.claim_token is null and m.claimed_attempt = m.attempt_count) $$;

-- Returns for each claim whether it is valid, and the ids of the messages of valid ones, which it locks in the order of
-- their ids. A claim that is given twice has the same answer twice.
create function pgqueue._lock_claims(
    q pgqueue.queues, ids bigint[], claim_tokens uuid[], out held boolean[], out held_ids bigint[]
)
language plpgsql volatile as $$
begin
    if ids is null or (select bool_or(i is null) from unnest(ids) as i) then
        perform pgqueue._raise_invalid('ids', ids::text, 'an array of ids of claimed messages, without nulls');
    end if;
    if claim_tokens is null or cardinality(claim_tokens) <> cardinality(ids)
        or (select bool_or(t is null) from unnest(claim_tokens) as t)
    then
        perform pgqueue._raise_invalid('claim_tokens', claim_tokens::text,
            format('an array with the claim_token of each of the %s, without nulls', pgqueue._with_number(cardinality(ids), 'id')));
    end if;
    -- A subquery with a locking clause is searched once for each claim, in the order of the ids, by any plan.
    if q.kind is not null then
        held := array(
            select m.id is not null
            from (
                select u.* from unnest(ids, claim_tokens) with ordinality as u (id, claim_token, place) order by u.id
            ) c
            left join lateral (
                select l.id from pgqueue.messages l
                where l.kind = q.kind and l.queue_name = q.name and l.id = c.id and pgqueue._is_claimed_by(l, c.claim_token)
                for update
            ) m on true
            order by c.place
        );
    else
        held := array(
            select m.id is not null
            from (
                select u.* from unnest(ids, claim_tokens) with ordinality as u (id, claim_token, place) order by u.id
            ) c
            left join lateral (
                select l.id from pgqueue.messages_shared l
                where l.queue_name = q.name and l.id = c.id and pgqueue._is_claimed_by(l, c.claim_token)
                for update
            ) m on true
            order by c.place
        );
    end if;
    held_ids := array(select distinct u.id from unnest(ids, held) as u (id, is_held) where u.is_held order by 1);
end;
$$;
-- Finds and locks the queue of a call. The order of locks: the queue, its row in queues, the row of a stream, then
-- message rows by id.

-- The key of the advisory lock of a queue. Its users hold the lock shared, create_queue and drop_queue exclusively.
create function pgqueue._lock_key(queue_name text) returns bigint
language sql immutable strict parallel safe as $$ select hashtextextended('pgqueue:' || queue_name collate "C", 0) $$;

-- Locks the queue against drop_queue until the transaction ends; false if the name is null. Every function takes this
-- lock before it locks message rows, and locks message rows by id.
create function pgqueue._lock_queue(queue_name text) returns boolean
language sql volatile as $$ select pg_advisory_xact_lock_shared(pgqueue._lock_key(queue_name)) is not null $$;

-- Whether all statements of the transaction use the snapshot of its first one, and so do not see what was committed
-- later.
create function pgqueue._has_fixed_snapshot() returns boolean
language sql stable parallel safe
as $$ select current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') $$;

-- For callers that hold the lock which keeps others from changing the object. Raises 40001 if the transaction keeps its
-- snapshot and any transaction has committed since.
create function pgqueue._require_current_snapshot(object text) returns void
language plpgsql volatile as $$
declare
    snapshot constant pg_snapshot := pg_current_snapshot();
begin
    if not pgqueue._has_fixed_snapshot() then
        return;
    end if;
    -- These calls could refuse repeatable read altogether. Then a database whose default_transaction_isolation is
    -- repeatable read could not alter a queue, or claim from one with groups or limits, whereas this check passes
    -- unless something was committed since. It takes 7 us, or 1.2 ms if the next thousand transactions all run or
    -- rolled back. In read committed it takes 1 us.
    if not exists (select from pg_snapshot_xip(snapshot) as x where pg_xact_status(x) = 'committed') then
        begin
            for n in 0..1000 loop
                exit when pg_xact_status((pg_snapshot_xmax(snapshot)::text::bigint + n)::text::xid8) = 'committed';
            end loop;
        exception when invalid_parameter_value then
            -- The id has not been assigned yet: nothing was committed after the snapshot.
            return;
        end;
    end if;
    perform pgqueue._raise('stale_snapshot', object);
end;
$$;

-- Raises 40001 if the transaction keeps its snapshot and one of the tables was truncated after it. In read committed
-- every statement locks its tables first and takes its snapshot second.
create function pgqueue._require_untruncated(tables regclass[]) returns void
language plpgsql volatile as $$
begin
    if not pgqueue._has_fixed_snapshot() then
        return;
    end if;
    -- After these locks no table is rewritten until the transaction ends. Partitions and children are locked, too.
    execute format('lock table %s in access share mode', array_to_string(tables, ', '));
    -- pg_class shows the file as of the snapshot, pg_relation_filenode the current one.
    perform pgqueue._raise('stale_snapshot', format('table %s', c.oid::regclass))
    from pg_class c
    where c.oid in (
            select t from unnest(tables) as t
            union all
            select i.inhrelid from pg_inherits i where i.inhparent = any (tables)
        )
        and pg_relation_filenode(c.oid) <> c.relfilenode;
end;
$$;

create function pgqueue._require_untruncated_messages() returns void
language sql volatile as $$
    select pgqueue._require_untruncated(array[
        'pgqueue.messages', 'pgqueue.scheduled_messages', 'pgqueue.dead_messages', 'pgqueue.requeued_messages',
        'pgqueue.sweep_state'
    ]::regclass[])
$$;

-- Raises PQ001, or 40001 if the snapshot is older than the queue or than a compaction.
create function pgqueue._get_locked_queue(queue_name text) returns pgqueue.queues
language plpgsql volatile as $$
declare
    q pgqueue.queues;
begin
    -- The lock is taken first and the row read second, each with its own snapshot. So a session that waited for
    -- drop_queue sees that the queue is gone, and no session writes to a queue while it is dropped.
    if not pgqueue._lock_queue(queue_name) then
        perform pgqueue._raise('queue_not_found', queue_name);
    end if;
    select * into q from pgqueue.queues where queues.name = queue_name collate "C";
    -- A repeatable read snapshot can be older than a drop_queue. The catalog shows the current state. The function that
    -- reads it locks the register, because the catalog cache of this session can be stale.
    if not found or pg_relation_filenode(q.fresh_from_id) is null or pgqueue._has_fixed_snapshot() then
        if q.name is null or pg_relation_size(q.fresh_from_id) is null then
            -- A queue created after the snapshot exists, but the transaction cannot see it. The insert detects it
            -- through the unique index. If there is no such queue, the error raised below rolls the insert back.
            if pgqueue._has_fixed_snapshot() and pgqueue._is_name(queue_name)
                and not current_setting('transaction_read_only')::boolean
            then
                begin
                    insert into pgqueue.sweep_state (queue_name) values (_get_locked_queue.queue_name) on conflict do nothing;
                exception when serialization_failure then
                    perform pgqueue._raise('stale_snapshot', format('queue %L', queue_name));
                end;
            end if;
            perform pgqueue._raise('queue_not_found', queue_name);
        end if;
        perform pgqueue._require_untruncated_messages();
    end if;
    return q;
end;
$$;

create function pgqueue._get_unlocked_queue(queue_name text) returns pgqueue.queues
language plpgsql stable as $$
declare
    q pgqueue.queues;
begin
    select * into q from pgqueue.queues where queues.name = queue_name collate "C";
    if not found then
        perform pgqueue._raise('queue_not_found', queue_name);
    end if;
    return q;
end;
$$;

create function pgqueue._try_lock_existing_queue(q pgqueue.queues) returns boolean
language plpgsql volatile as $$
begin
    -- The lock first and the row second, as in _get_locked_queue. A new kind comes with new registers.
    if not pg_try_advisory_xact_lock_shared(pgqueue._lock_key(q.name)) then
        return false;
    end if;
    return exists (select from pgqueue.queues c where c.name = q.name and c.fresh_from_id = q.fresh_from_id)
        and pg_relation_size(q.fresh_from_id) is not null;
end;
$$;

-- The processes that dump this database; null for a prepared transaction that has read pg_extension.
create function pgqueue._dumping_processes() returns int[]
language sql volatile as $$
    -- pg_dump reads pg_extension before it locks tables, so it holds a lock there until it ends. Few other clients do.
    select array(
        select l.pid from pg_catalog.pg_locks l
        where l.locktype = 'relation' and l.relation = 'pg_catalog.pg_extension'::regclass
            and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database())
            and l.pid is distinct from pg_catalog.pg_backend_pid()
        union
        select a.pid from pg_catalog.pg_stat_activity a
        where a.datname = pg_catalog.current_database() and a.application_name ~ '^pg_dump'
            and a.pid <> pg_catalog.pg_backend_pid()
    )
$$;

create function pgqueue._is_dump_running() returns boolean
language sql volatile as $$ select pgqueue._dumping_processes() <> '{}' $$;
-- The kinds of queues. The queues of a kind share a partition of messages, which has the indexes that they need. A
-- dedicated queue has a partition of its own.

create function pgqueue._shared_table(q pgqueue.queues) returns text
language sql stable as $$
    select 'pgqueue.messages_' || case
        when q.group_limit is not null then 'grouped'
        when q.priorities and q.max_in_flight is not null then 'prioritized_limited'
        when q.priorities then 'prioritized'
        when q.max_in_flight is not null then 'limited'
        else 'shared'
    end
$$;

create function pgqueue._partition_of(q pgqueue.queues) returns regclass
language sql stable as $$
    select (case when q.dedicated then format('pgqueue.messages_%s', q.queue_id) else pgqueue._shared_table(q) end)::regclass
$$;

-- Creates a partition for one queue, with the indexes of the shared table. Its name contains the number of the queue,
-- as the name of a queue can be longer than an identifier. By its comment create_queue finds the table after a restore
-- without rows.
create function pgqueue._create_partition(q pgqueue.queues) returns void
language plpgsql volatile as $$
declare
    partition constant text := format('messages_%s', q.queue_id);
begin
    -- A transaction that has sent messages keeps its lock on the parent, and the list of partitions of that time. It
    -- would not find this partition. So this call waits for such transactions. Readers and consumers go on.
    lock table only pgqueue.messages in share row exclusive mode;
    -- No `with` if it has no storage settings.
    execute format('create table pgqueue.%I (like %s including defaults including indexes)%s', partition, pgqueue._shared_table(q), (
        select format(' with (%s)', array_to_string(c.reloptions, ', '))
        from pg_class c where c.oid = 'pgqueue.messages_shared'::regclass and c.reloptions is not null));
    execute format('comment on table pgqueue.%I is %L', partition, format('The messages of queue %s.', q.name));
    perform pgqueue._revoke_default_privileges(format('pgqueue.%I', partition)::regclass);
    execute format(
        'alter table pgqueue.messages attach partition pgqueue.%I for values in (%s)', partition, 1000 + q.queue_id);
end;
$$;

-- Returns the number of the messages. Raises PQ004 while the database is dumped, or other sessions use the table.
create function pgqueue._truncate_or_drop_partition(q pgqueue.queues, dropping boolean) returns bigint
language plpgsql volatile set lock_timeout = '500 ms' as $$
declare
    partition constant regclass := pgqueue._partition_of(q);
    removed bigint;
    verb constant text := case when dropping then 'drop_queue' else 'purge_queue' end;
begin
    if pgqueue._is_dump_running() then
        -- pg_dump locks a member of an extension only when it copies it. It would fail if the table was gone then. A
        -- parallel dump would also fail if it met a session that waits for the table.
        perform pgqueue._raise('queue_busy', q.name, verb);
    end if;
    -- The parent is locked first, as by every statement on messages. lock_timeout is shorter than deadlock_timeout: in
    -- a deadlock this statement fails, not that of a client.
    if dropping then
        lock table only pgqueue.messages in access exclusive mode;
    end if;
    execute format('lock table only %s in access exclusive mode', partition);
    execute format('select count(*) from %s', partition) into removed;
    execute format(case when dropping then 'drop table %s cascade' else 'truncate only %s' end, partition);
    return removed;
exception when lock_not_available then
    perform pgqueue._raise('queue_busy', q.name, verb);
    return null;
end;
$$;

-- Where a message stands in the order in which claims read a queue with priorities: (9 - priority) * 2^59 plus its
-- place. The place is transport_seq or, if that is null, the id. A priority that is no number from 0 to 9 counts as 0.
-- Inlined.
create function pgqueue._level_position(headers jsonb, place bigint) returns bigint
language sql immutable parallel safe as $$
    select
        ((9 - coalesce(array_position('{1,2,3,4,5,6,7,8,9}'::text[], headers ->> 'pgqueue.priority'), 0))::bigint << 59)
        | (place & 576460752303423487)
$$;

create function pgqueue._level_position(m pgqueue.messages) returns bigint
language sql immutable parallel safe
as $$ select pgqueue._level_position(m.headers, coalesce(m.transport_seq, m.id)) $$;

create function pgqueue._level_start(level_position bigint) returns bigint
language sql immutable parallel safe as $$ select (level_position >> 59) << 59 $$;

create function pgqueue._is_in_level(m pgqueue.messages, kind bigint, name text, from_position bigint)
returns boolean language sql immutable parallel safe as $$
    select pgqueue._is_in_queue(m, kind, name)
        and pgqueue._level_position(m) >= from_position
        and pgqueue._level_position(m) < pgqueue._level_start(from_position) + 576460752303423488
$$;

-- Before PostgreSQL 18 a function in SQL that is not inlined makes its plan in each call, one in PL/pgSQL keeps it.
create function pgqueue._level_registers(q pgqueue.queues) returns regclass[]
language plpgsql stable as $$
begin
    return array(
        select format('pgqueue.queue_%s_level_%s', q.queue_id, 10 - n)::regclass from generate_series(1, 10) as n);
end;
$$;

create function pgqueue._level_floors(registers regclass[]) returns bigint[]
language plpgsql volatile as $$
begin
    -- A register that is ahead of all messages, for example after a restore, would hide new ones.
    return array(
        select greatest(
            (u.n - 1) << 59,
            least(
                pgqueue._register_value(u.register),
                ((u.n - 1) << 59) + coalesce(pg_sequence_last_value('pgqueue.message_id'), 0) + 1))
        from unnest(registers) with ordinality as u (register, n)
    );
end;
$$;

-- The positions that claims have passed, from the place first_id on: no message has a lower place.
create function pgqueue._passed_levels(q pgqueue.queues, first_id bigint) returns int8multirange
language plpgsql volatile as $$
begin
    return (
        select coalesce(range_agg(int8range(pgqueue._level_start(f) + first_id, f)), '{}')
        from unnest(pgqueue._level_floors(pgqueue._level_registers(q))) as f
        where pgqueue._level_start(f) + first_id < f
    );
end;
$$;

create function pgqueue._change_kind(q pgqueue.queues) returns pgqueue.queues
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    s pgqueue.sweep_state;
begin
    -- The caller holds the lock shared. After this lock no other transaction uses the queue, as in drop_queue.
    perform pg_advisory_xact_lock(pgqueue._lock_key(q.name));
    perform pgqueue._require_current_snapshot(format('queue %L', q.name));
    -- New registers: those of one kind have another meaning in another one, and a snapshot from before shows the old
    -- ones, so _get_locked_queue refuses it.
    perform pgqueue._drop_registers(q.queue_id, '{seq,rate_used_until}');
    update pgqueue.queues set fresh_from_id = null where queues.name = q.name returning queues.* into q;
    perform setval(q.fresh_from_id, w.first_id) from pgqueue.sweep_state w where w.queue_name = q.name and not q.priorities;
    update pgqueue.messages m set kind = q.kind where m.queue_name = q.name and m.kind is distinct from q.kind;
    -- By a new row, _get_locked_queue tells an old snapshot from a queue that was dropped.
    delete from pgqueue.sweep_state w where w.queue_name = q.name returning w.* into s;
    insert into pgqueue.sweep_state select s.*;
    return q;
end;
$$;

-- Moves up to 1,000 messages that plain SQL has sent to a queue that is not plain from messages_shared to the partition
-- of the queue. Returns whether there were any.
create function pgqueue._adopt_messages(q pgqueue.queues) returns boolean
language plpgsql volatile as $$
declare
    ids bigint[];
begin
    if q.kind is null then
        return false;
    end if;
    begin
        ids := array(
            select m.id from pgqueue.messages_shared m where m.queue_name = q.name
                and m.id >= coalesce((select w.first_id from pgqueue.sweep_state w where w.queue_name = q.name), 1)
            order by m.id limit 1000 for update skip locked);
        -- In the subtransaction that has locked them: another one would make a multixact.
        if ids <> '{}' then
            update pgqueue.messages m set kind = q.kind
            from pgqueue._lookup_keys(q.name, ids) k
            where m.kind is null and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id);
        end if;
    exception when serialization_failure then
        if pgqueue._has_fixed_snapshot() then
            perform pgqueue._raise('stale_snapshot', format('queue %L', q.name));
        end if;
        -- Since this statement took its snapshot, another claim has moved one of the messages and has committed.
        return true;
    end;
    return ids <> '{}';
end;
$$;
-- Events for modules: a queue was created, altered or is being dropped, housekeeping or maintenance is due, a
-- transaction that made a request commits, doctor collects findings. A module defines a function of the matching name.
-- So the core calls no room by name, and a new room changes no core file. All events are rare: the lookup of the
-- functions by name costs some 0.1 ms each.

create function pgqueue._handlers(event text) returns setof regproc
language sql stable as $$
    select p.oid::regproc
    from pg_catalog.pg_proc p
    -- A range condition on the name, which a catalog index supports.
    where p.proname >= event::name and p.proname < (event || '~')::name and p.pronamespace = 'pgqueue'::regnamespace
    order by p.proname
$$;

-- before is null if the queue was created, and after if it is being dropped: then its row is deleted and its messages
-- still exist. The queue is locked, in these two cases exclusively.
create function pgqueue._call_queue_handlers(before pgqueue.queues, after pgqueue.queues) returns void
language plpgsql volatile as $$
declare
    handler regproc;
begin
    for handler in select h from pgqueue._handlers('_on_queue_changed_') as h loop
        execute format('select %s($1, $2)', handler) using before, after;
    end loop;
end;
$$;

-- Housekeeping is due once an hour, maintenance once a second. A handler must not wait for a lock. One that has more to
-- do sets the register to an earlier time, one that has nothing to do to a later one.
create function pgqueue._call_if_due(event text, at timestamptz) returns void
language plpgsql volatile as $$
declare
    is_housekeeping constant boolean := event = 'housekeeping';
    register constant regclass := case
        when is_housekeeping then 'pgqueue.next_housekeeping_at'::regclass else 'pgqueue.next_maintenance_at'::regclass end;
    pause constant interval := case when is_housekeeping then interval '1 h' else interval '1 s' end;
    longest_micros constant bigint := case when is_housekeeping then 3600000000 else 60000000 end;
    handler regproc;
    is_at_commit boolean;
begin
    -- A time that is further ahead than a handler sets was set while the clock was ahead.
    if coalesce(pg_sequence_last_value(register) - pgqueue._to_micros(at), 0) between 1 and longest_micros then
        return;
    end if;
    -- The register is set before the calls: one session does the work, even if its transaction fails.
    perform setval(register, pgqueue._to_micros(at + pause));
    for handler, is_at_commit in
        select h, false from pgqueue._handlers(format('_on_%s_due_', event)) as h
        union all
        select h, true from pgqueue._handlers(format('_at_%s_', event)) as h
    loop
        begin
            if is_at_commit then
                perform pgqueue._request_at_commit(p.proname, at) from pg_proc p where p.oid = handler;
            else
                execute format('select %s($1)', handler) using at;
            end if;
        exception when others then
            -- A full disk or a lock must not fail a claim, nor keep the other handlers from their work.
            null;
        end;
    end loop;
end;
$$;

create function pgqueue._do_at_commit() returns trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '20 ms'
set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    probe tid;
begin
    -- A commit obeys no statement_timeout, but each wait for a lock obeys the lock_timeout of this function.
    if new.handler = '' then
        delete from pgqueue.compactions c where c.handler = '';
        return null;
    end if;
    -- A request that is not carried out goes, too.
    delete from pgqueue.compactions c
    where c.ctid = any (array(
        select o.ctid from pgqueue.compactions o
        where o.handler = new.handler for update skip locked));
    -- Nothing but the text of the client shows that it prepares the transaction, which would keep the locks.
    if current_setting('max_prepared_transactions')::int > 0
        and current_query() ~* e'(^|[;\\n]|\\*/)\\s*prepare\\s+transaction\\M'
    then
        return null;
    end if;
    -- `set constraints` makes the trigger immediate before it fires the trigger. The trigger then fires again within
    -- the insert, and deletes the row. At the commit it is deferred.
    insert into pgqueue.compactions (tried_at, handler) values (at, '') returning compactions.ctid into probe;
    delete from pgqueue.compactions c where c.ctid = probe;
    if not found then
        return null;
    end if;
    execute format('select pgqueue.%I($1)', new.handler) using at;
    return null;
exception when query_canceled or others then
    -- It must not fail the transaction of a claim. The next housekeeping or maintenance requests it again.
    return null;
end;
$$;

drop trigger if exists do_at_commit on pgqueue.compactions;
create constraint trigger do_at_commit after insert on pgqueue.compactions deferrable initially deferred
for each row when (new.handler is not null) execute function pgqueue._do_at_commit();

-- Requests a call of pgqueue.<handler>(time of the commit) at the commit, with the rights of the owner, for what takes
-- an exclusive lock: the transaction can be that of a receive, whose handler works for long.
create function pgqueue._request_at_commit(handler text, at timestamptz) returns void
language plpgsql volatile as $$
begin
    -- The caller may have set all constraints to immediate. The locks would then last until its transaction ends.
    set constraints pgqueue.do_at_commit deferred;
    insert into pgqueue.compactions (tried_at, handler) values (at, handler);
end;
$$;

create function pgqueue._module_findings(q pgqueue.queues default null) returns setof pgqueue.finding
language plpgsql volatile as $$
declare
    handler regproc;
begin
    for handler in select h from pgqueue._handlers('_findings_of_') as h loop
        return query execute format('select f.* from %s($1) f', handler) using q;
    end loop;
end;
$$;
-- Notifications: an enqueue notifies waiting consumers. If no consumer waits, it sends no notification.

-- Not strict: PostgreSQL could not inline it.
create function pgqueue.channel(queue_name text) returns text
language sql immutable parallel safe
as $$ select 'pgqueue_' || case when octet_length(queue_name) <= 54 then queue_name else md5(queue_name) end $$;
comment on function pgqueue.channel is
'Returns the notification channel of a queue: pgqueue_ and the name of the queue, or the MD5 of the name if the channel
would be longer than an identifier. Notifications carry no payload.';

create function pgqueue._count_dead(q pgqueue.queues, messages int) returns void
language plpgsql volatile as $$
begin
    if pgqueue._count('dead', q.name, messages) > 0 and q.dead_letter_to is not null then
        perform pg_notify(pgqueue.channel(q.dead_letter_to), '');
    end if;
end;
$$;

create function pgqueue._wake_if_waiting(q pgqueue.queues, at timestamptz) returns void
language plpgsql volatile as $$
declare
    until constant bigint := pgqueue._register_value(q.waiting_until);
    longest constant bigint := pgqueue._to_micros(at + interval '24 h');
begin
    if until > pgqueue._to_micros(at) then
        -- The register is not cleared. If a transaction cleared it and then ran for long or rolled back, other
        -- transactions would not notify in the meantime, and the consumer would sleep past their messages.
        perform pg_notify(pgqueue.channel(q.name), '');
    end if;
    -- No consumer waits for longer. The value was set while the clock was wrong, and every enqueue would notify until
    -- then.
    if until > longest then
        perform setval(q.waiting_until, longest);
    end if;
end;
$$;

create function pgqueue._announce_due(q pgqueue.queues, due_at timestamptz) returns void
language plpgsql volatile as $$
begin
    -- prepare_wait detects running senders by this lock. So the lock is taken before the registers are read.
    lock table only pgqueue.messages in row exclusive mode;
    if pgqueue._to_micros(due_at) < pg_sequence_last_value(q.first_due_at) then
        perform setval(q.first_due_at, pgqueue._to_micros(due_at));
    end if;
    -- Without a notification, a waiting consumer could sleep past this due time.
    perform pgqueue._wake_if_waiting(q, pgqueue._now());
end;
$$;
-- Removes messages. A processed message is deleted or, if its queue has archive_for, moved to the archive; a failed one
-- becomes a dead letter. Archiving on acknowledgement is part of the core: every acknowledgement passes here, and an
-- event would add a call to each.

-- Locks the queue, and returns whether it keeps no archive. It is one function, because an acknowledgement prepares
-- each expression that it evaluates.
create function pgqueue._lock_queue_without_archive(queue_name text) returns boolean
language sql volatile
as $$ select pgqueue._lock_queue(queue_name) and to_regclass(pgqueue._sequence_name('archives', queue_name)) is null $$;

create function pgqueue._utc_day(moment timestamptz) returns date
language sql immutable parallel safe as $$ select (moment at time zone 'UTC')::date $$;

-- The finished_at of a message that is acknowledged now: not before the confirmed time of the archive. Otherwise
-- messages acknowledged while the clock was behind would be removed with the day that it showed.
-- In PL/pgSQL, which keeps its plan: see _level_registers.
create function pgqueue._finish_time() returns timestamptz
language plpgsql volatile as $$
begin
    return greatest(pgqueue._now(), (select c.confirmed_at from pgqueue.archive_clock c));
end;
$$;

create function pgqueue._day_partition_name(day date) returns text
language sql stable parallel safe as $$ select 'archived_messages_' || to_char(day, 'YYYYMMDD') $$;

-- Null or false if not. Reads the current catalog, which can be newer than the snapshot.
create function pgqueue._has_day_partition(day date) returns boolean
language sql volatile as $$
    select pg_partition_root(to_regclass('pgqueue.' || pgqueue._day_partition_name(day))) = 'pgqueue.archived_messages'::regclass
$$;

-- The messages of the claim or, if claim_token is null, all, which the caller has locked.
create function pgqueue._delete_messages(
    queue_name text, kind bigint, ids bigint[], claim_token uuid default null
) returns setof pgqueue.messages
language plpgsql volatile as $$
begin
    if kind is null then
        return query
        delete from pgqueue.messages_shared m
        using pgqueue._lookup_keys(_delete_messages.queue_name, ids) k
        where pgqueue._matches_key(m.queue_name, m.id, _delete_messages.queue_name, k.names, k.ids, k.id)
            and (_delete_messages.claim_token is null or pgqueue._is_claimed_by(m, _delete_messages.claim_token))
        returning m.*;
    else
        return query
        delete from pgqueue.messages m
        using pgqueue._lookup_keys(_delete_messages.queue_name, ids) k
        -- What plain SQL has sent, and claimed before it was moved, has no kind.
        where (m.kind = _delete_messages.kind or m.kind is null)
            and pgqueue._matches_key(m.queue_name, m.id, _delete_messages.queue_name, k.names, k.ids, k.id)
            and (_delete_messages.claim_token is null or pgqueue._is_claimed_by(m, _delete_messages.claim_token))
        returning m.*;
    end if;
end;
$$;

-- Returns the ids of those whose claim was still valid. If claim_token is null, the caller has locked the messages of
-- valid claims.
create function pgqueue._ack_to_archive(queue_name text, ids bigint[], claim_token uuid) returns bigint[]
language plpgsql volatile as $$
declare
    at constant timestamptz := pgqueue._finish_time();
    is_filed constant boolean := coalesce(pgqueue._has_day_partition(pgqueue._utc_day(at)), false);
    acked bigint[];
begin
    with gone as (
        select
            g.id, g.queue_name, g.enqueued_at, g.claimed_at, at, g.attempt_count, g.max_attempts, g.expires_at,
            g.message_id, g.payload, g.body, g.headers, g.claimed_by, g.last_error
        from pgqueue._delete_messages(
            _ack_to_archive.queue_name collate "C",
            (select q.kind from pgqueue.queues q where q.name = _ack_to_archive.queue_name collate "C"),
            ids, _ack_to_archive.claim_token) g
    ),
    filed as (
        insert into pgqueue.archived_messages select g.* from gone g where is_filed
    ),
    unfiled as (
        insert into pgqueue.unfiled_messages select g.* from gone g where not is_filed
    )
    select coalesce(array_agg(g.id), '{}') into acked from gone g;
    return acked;
end;
$$;

-- The stored bytes of a message, and 1 kB, as moving a small one takes as long. Reads no stored value. Inlined.
create function pgqueue._moved_bytes(payload jsonb, body bytea, headers jsonb, transport_headers text)
returns bigint language sql stable parallel safe as $$
    select 1024::bigint + coalesce(pg_column_size(payload), 0) + coalesce(pg_column_size(body), 0)
        + coalesce(pg_column_size(headers), 0) + coalesce(pg_column_size(transport_headers), 0)
$$;

-- The next slice of messages, of at most 128 kB and one message, from a cursor with the columns id, place and bytes.
-- Fetching locks one row at a time, so a cursor with a locking clause locks no more than is returned.
create function pgqueue._fetch_slice(source refcursor, out ids bigint[], out places tid[])
language plpgsql volatile as $$
declare
    id bigint;
    place tid;
    size bigint;
    bytes bigint := 0;
begin
    ids := '{}';
    places := '{}';
    while bytes < 131072 loop
        fetch source into id, place, size;
        exit when not found;
        ids := ids || id;
        places := places || place;
        bytes := bytes + size;
    end loop;
end;
$$;

create function pgqueue._as_message(s pgqueue.scheduled_messages) returns pgqueue.messages
language sql immutable parallel safe as $$
    select row(
        s.id, s.queue_name, s.enqueued_at, s.due_at, s.attempt_count, s.max_attempts, null::int, null::uuid,
        s.expires_at, s.message_id, s.payload, s.body, s.headers, s.claimed_by, s.last_error, null::timestamptz,
        s.transport_headers, null::uuid, null::bigint, null::bigint
    )::pgqueue.messages
$$;

create function pgqueue._as_scheduled(m pgqueue.messages, due_at timestamptz, attempt_count int)
returns pgqueue.scheduled_messages language sql immutable parallel safe as $$
    select row(
        m.id, m.queue_name, due_at, m.enqueued_at, attempt_count, m.max_attempts, m.expires_at, m.message_id,
        m.payload, m.body, m.headers, m.claimed_by, m.last_error, m.transport_headers
    )::pgqueue.scheduled_messages
$$;

create function pgqueue._as_dead_letter(m pgqueue.messages, at timestamptz, reason text)
returns pgqueue.dead_messages language sql immutable parallel safe as $$
    select row(
        m.id, m.queue_name, m.enqueued_at, at, m.attempt_count, m.max_attempts, m.expires_at, m.message_id,
        m.payload, m.body, m.headers, m.claimed_by, m.last_error, m.transport_headers,
        coalesce(reason, case when m.attempt_count >= m.max_attempts then 'attempts_exhausted' else 'expired' end)
    )::pgqueue.dead_messages
$$;

create function pgqueue._keeps_dead_letter(q pgqueue.queues, m pgqueue.messages) returns boolean
language sql immutable parallel safe
as $$ select case when m.attempt_count >= m.max_attempts then q.dlq_enabled else q.dead_letter_expired end $$;

-- The message was deleted from its table. Functions that remove many messages contain the same insert, which takes half
-- of the time.
create function pgqueue._add_dead_letter(m pgqueue.messages, at timestamptz, reason text) returns void
language plpgsql volatile as $$
begin
    if reason = 'queue_dropped' then
        m.last_error := format('the queue was dropped before %s, when the message was due', m.visible_at);
        m.expires_at := null;
    end if;
    insert into pgqueue.dead_messages
    select (pgqueue._as_dead_letter(m, at, _add_dead_letter.reason)).*
    -- The row exists already if a dead letter was copied back into the queue by plain SQL and not deleted here.
    on conflict on constraint dead_messages_pkey do update
    set died_at = excluded.died_at, attempt_count = excluded.attempt_count, headers = excluded.headers,
        last_error = excluded.last_error, reason = excluded.reason;
end;
$$;
-- Creates, alters, looks up and pauses queues. Functions that use a queue get its row from
-- _get_locked_queue, so that a check for all of them has one place.

create function pgqueue._public_queue(q pgqueue.queues) returns pgqueue.queue
language sql stable as $$
    select row(
        q.name, q.visibility_timeout, coalesce(nullif(q.max_attempts, 2147483647), 0), q.dlq_enabled,
        q.dead_letter_expired, q.max_payload_bytes, q.backoff_base, q.backoff_factor, q.backoff_max, q.backoff_jitter,
        q.dedicated, q.paused_at, q.created_at, q.updated_at, q.archive_for, q.expires_after_idle,
        q.dedup_window, q.group_limit, q.on_dead, q.max_in_flight, q.rate_limit, q.rate_period, q.priorities,
        q.counters, q.dead_letter_to
    )::pgqueue.queue
$$;

create function pgqueue._is_interval_between(span interval, least_span interval, most_span interval)
returns boolean language sql immutable parallel safe as $$
    -- The length in seconds is compared, too: '300000 years -108000000 days' compares as equal to 0, but added to a
    -- moment it leads out of the calendar.
    select span between least_span and most_span
        and date_part('epoch', span) between date_part('epoch', least_span) and date_part('epoch', most_span)
$$;

create function pgqueue._check_visibility_timeout(visibility_timeout interval) returns void
language plpgsql stable as $$
begin
    if not pgqueue._is_interval_between(visibility_timeout, '1 s', '43200 s') then
        perform pgqueue._raise_invalid(
            'visibility_timeout', visibility_timeout::text, 'an interval from 1 second to 12 hours (43200 s)');
    end if;
end;
$$;

-- on_dead and rate_period are those that were given: a queue keeps both when alter_queue ends the limit to which they
-- belong.
create function pgqueue._check_settings(q pgqueue.queues, on_dead text, rate_period interval) returns void
language sql stable as $$
    select pgqueue._raise_invalid(s.name, s.given, s.expected)
    from (values
        ('visibility_timeout', q.visibility_timeout::text, pgqueue._is_interval_between(q.visibility_timeout, '1 s', '43200 s'),
            'an interval from 1 second to 12 hours (43200 s)'),
        ('max_attempts', q.max_attempts::text, q.max_attempts between 1 and 100 or q.max_attempts = 2147483647, 'an integer from 1 to 100, or 0 for no limit'),
        ('max_payload_bytes', q.max_payload_bytes::text, q.max_payload_bytes between 1 and 104857600, 'an integer from 1 to 104857600 (100 MB)'),
        ('backoff_base', q.backoff_base::text, pgqueue._is_interval_between(q.backoff_base, '0', '30 days'), 'an interval from 0 to 30 days'),
        ('backoff_max', q.backoff_max::text, pgqueue._is_interval_between(q.backoff_max, '0', '30 days'), 'an interval from 0 to 30 days'),
        ('backoff_factor', q.backoff_factor::text, q.backoff_factor between 1 and 100, 'a number from 1 to 100'),
        ('backoff_jitter', q.backoff_jitter::text, q.backoff_jitter between 0 and 1, 'a number from 0 to 1'),
        ('archive_for', q.archive_for::text, q.archive_for is null or pgqueue._is_interval_between(q.archive_for, '1 day', '3652.5 days'),
            'an interval from 1 day to 10 years (3652.5 days)'),
        ('expires_after_idle', q.expires_after_idle::text,
            q.expires_after_idle is null or pgqueue._is_interval_between(q.expires_after_idle, '1 s', '3652.5 days'),
            'an interval from 1 s to 10 years (3652.5 days), or null for never'),
        ('dedup_window', q.dedup_window::text,
            pgqueue._is_interval_between(q.dedup_window, '0', '0') or pgqueue._is_interval_between(q.dedup_window, '1 s', '30 days'),
            'an interval from 1 s to 30 days, or 0 for as long as the message lives'),
        ('group_limit', q.group_limit::text, q.group_limit is null or q.group_limit between 1 and 1000,
            'an integer from 1 to 1000, or null for a queue without groups'),
        ('on_dead', q.on_dead, q.on_dead in ('skip', 'hold'), 'skip or hold'),
        ('max_in_flight', q.max_in_flight::text, q.max_in_flight is null or q.max_in_flight between 1 and 10000,
            'an integer from 1 to 10000, or null for no limit'),
        ('rate_limit', q.rate_limit::text, q.rate_limit is null or q.rate_limit between 1 and 1000000,
            'an integer from 1 to 1000000, or null for no limit'),
        ('rate_period', q.rate_period::text, pgqueue._is_interval_between(q.rate_period, '1 ms', '1 day'), 'an interval from 1 ms to 1 day'),
        ('priorities', null, q.priorities is not null, 'true or false'),
        ('priorities', 'true', not q.priorities or q.group_limit is null, 'false for a queue with group_limit: its claims follow the groups'),
        ('counters', null, q.counters is not null, 'true or false'),
        ('dedicated', null, q.dedicated is not null, 'true or false'),
        ('dlq_enabled', null, q.dlq_enabled is not null, 'true or false'),
        ('on_dead', 'hold', q.on_dead = 'skip' or q.dlq_enabled,
            'skip while dlq_enabled is false: a message that is deleted cannot keep its group waiting'),
        ('dead_letter_to', q.dead_letter_to, q.dead_letter_to is null or q.dlq_enabled, 'null while dlq_enabled is false: there are no dead letters'),
        ('on_dead', 'hold', q.on_dead = 'skip' or q.dead_letter_to is null,
            'skip while dead_letter_to is set: a dead letter that leaves the queue cannot keep its group waiting'),
        ('dead_letter_expired', null, q.dead_letter_expired is not null, 'true or false'),
        ('on_dead', on_dead, q.group_limit is not null or coalesce(on_dead, 'skip') = 'skip',
            'skip without group_limit: no message waits for one of its group'),
        ('rate_period', rate_period::text, q.rate_limit is not null or coalesce(rate_period, '1 s') = '1 s',
            '1 s, its default, without rate_limit: there is no rate that it could change')
    ) as s (name, given, is_valid, expected)
    where s.is_valid is not true
$$;

-- The new queue is dedicated if a table was left for it.
create function pgqueue._add_queue(model pgqueue.queues, if_not_exists boolean) returns pgqueue.queues
language plpgsql volatile as $$
declare
    q pgqueue.queues;
    has_table boolean;
begin
    -- The lookup before the lock avoids a wait for the users of an existing queue. The lookup is repeated under the
    -- lock, which serializes this call with other create_queue and drop_queue calls.
    select queues.* into q from pgqueue.queues where queues.name = model.name;
    -- As in _get_locked_queue, a fixed snapshot can be older than a drop_queue.
    if not found or (pgqueue._has_fixed_snapshot() and pg_relation_size(q.fresh_from_id) is null)
        -- A session that drops the idle queue at this moment has the lock.
        or (q.expires_after_idle is not null and not pg_try_advisory_xact_lock_shared(pgqueue._lock_key(model.name)))
    then
        perform pg_advisory_xact_lock(pgqueue._lock_key(model.name));
        select queues.* into q from pgqueue.queues where queues.name = model.name;
        if found and pg_relation_size(q.fresh_from_id) is null then
            perform pgqueue._raise('stale_snapshot', format('queue %L', model.name));
        end if;
    end if;
    if q.name is not null then
        if not if_not_exists then
            perform pgqueue._raise('queue_exists', model.name);
        end if;
        if q.expires_after_idle is not null then
            -- This call counts as a use of the queue: the idle time starts again.
            perform setval(q.next_sweep_at, pgqueue._to_micros(pgqueue._now()));
        end if;
        return q;
    end if;
    -- This insert comes first. It fails if there is a queue of this name that the snapshot does not show.
    insert into pgqueue.sweep_state (queue_name) values (model.name) on conflict do nothing;
    model.queue_id := pgqueue._take_number(model.name);
    has_table := to_regclass(format('pgqueue.messages_%s', model.queue_id)) is not null;
    if has_table and (model.priorities or coalesce(model.group_limit, model.max_in_flight) is not null) then
        -- The claims of the new queue take the messages over.
        update pgqueue.messages m set kind = null where m.kind = 1000 + model.queue_id;
        execute format('drop table pgqueue.messages_%s cascade', model.queue_id);
        has_table := false;
    end if;
    if model.dedicated and not has_table then
        perform pgqueue._create_partition(model);
    end if;
    model.dedicated := model.dedicated or has_table;
    model.created_at := pgqueue._now();
    model.updated_at := model.created_at;
    -- All columns but kind, which is computed.
    execute format('insert into pgqueue.queues (%1$s) select %1$s from (select ($1).*) q', (
        select string_agg(quote_ident(a.attname), ', ') from pg_attribute a
        where a.attrelid = 'pgqueue.queues'::regclass and a.attnum > 0 and not a.attisdropped and a.attgenerated = ''))
    using model;
    select queues.* into q from pgqueue.queues where queues.name = model.name;
    if q.counters then
        perform pgqueue._create_sequence(pgqueue._sequence_name(r, q.name)) from unnest(pgqueue._counter_roles()) as r;
    else
        perform pgqueue._drop_counters(q.name);
    end if;
    perform pgqueue._call_queue_handlers(null, q);
    return q;
exception
    when lock_not_available then
        perform pgqueue._raise('queue_busy', model.name, 'create_queue');
        return null;
    when serialization_failure then
        perform pgqueue._raise('stale_snapshot', format('queue %L', model.name));
        return null;
end;
$$;

create function pgqueue.create_queue(
    queue_name pgqueue.new_queue_of_admin,
    visibility_timeout interval default '30 s',
    max_attempts int default 5,
    dlq_enabled boolean default true,
    dedicated boolean default false,
    dead_letter_expired boolean default false,
    max_payload_bytes int default 262144,
    backoff_base interval default '1 s',
    backoff_factor double precision default 2,
    backoff_max interval default '10 min',
    backoff_jitter double precision default 0.2,
    if_not_exists boolean default false,
    archive_for interval default null,
    expires_after_idle interval default null,
    dedup_window interval default '5 min',
    group_limit int default null,
    on_dead text default 'skip',
    max_in_flight int default null,
    rate_limit int default null,
    rate_period interval default '1 s',
    priorities boolean default false,
    counters boolean default true,
    dead_letter_to pgqueue.queue_of_admin default null
) returns pgqueue.queue
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500 ms'
set jit = off as $$
declare
    q pgqueue.queues;
begin
    perform pgqueue._require(pgqueue._is_name(queue_name), 'queue_name', queue_name,
        '1 to 128 characters: lowercase letters, digits, hyphens and underscores');
    perform pgqueue._require(if_not_exists is not null, 'if_not_exists', null, 'true or false');
    q := row(
        queue_name, visibility_timeout,
        -- No limit is stored as the highest integer, as plain SQL that claims compares attempt_count with it.
        case max_attempts when 0 then 2147483647 else max_attempts end, dlq_enabled, dead_letter_expired,
        max_payload_bytes, backoff_base, backoff_factor, backoff_max, backoff_jitter, dedicated,
        -- From paused_at to waiting_until.
        null, null, null, null, null, null, null, null, null,
        archive_for, expires_after_idle, dedup_window, group_limit, on_dead, max_in_flight, rate_limit, rate_period,
        priorities, counters, dead_letter_to, null);
    perform pgqueue._check_settings(q, on_dead, rate_period);
    return pgqueue._public_queue(pgqueue._add_queue(q, if_not_exists));
end;
$$;
comment on function pgqueue.create_queue is
'Creates a queue and returns it. queue_name has 1 to 128 characters: a-z, 0-9, hyphen and underscore. visibility_timeout
(1 s to 43200 s) is the time for which a claimed message is hidden. After max_attempts (1 to 100) attempts a message
goes to the dead letters if dlq_enabled is true, else it is deleted; 0 means that a message has any number of attempts,
and its max_attempts is 2147483647. An expired message goes to the dead letters if dead_letter_expired is true, else it
is deleted. dedicated gives the queue a table of its own; use it for a few queues with a high load. max_payload_bytes (1
byte to 100 MB) limits the size of a payload or body. The delay after a failed attempt is backoff_base times
backoff_factor for each attempt after the first, at most backoff_max, minus a random fraction of up to backoff_jitter (0
to 1). If if_not_exists is true, an existing queue is returned unchanged. archive_for (1 day to 10 years) is the minimum
time for which acknowledged messages are kept in pgqueue.archived_messages; null keeps none. expires_after_idle (1 s to
10 years) is for temporary queues, such as one for the replies to one instance of a service. Such a queue is dropped, as
by drop_idle_queues, if it holds no message and no session has claimed, received or waited for this long. A later
create_queue of any queue drops it; if it is dedicated, the next call that creates or exposes a dedicated queue.
dedup_window (1 s to 30 days) is the time for which enqueue adds no second message with the same dedup_key; 0 means as
long as the first message lives, at most 30 days. With group_limit (1 to 1000) at most group_limit messages with the
same group_key are in flight at a time, in the order of their ids. If group_limit is 1, a message that waits for its
retry keeps the later ones of its group waiting. With on_dead skip a group goes on after one of its messages has become
a dead letter; with hold, which needs group_limit and dlq_enabled, the group waits until the dead letter is redriven or
purged. At most max_in_flight (1 to 10000) messages of the queue are in flight at a time, over all consumers. Claims and
receives take at most rate_limit (1 to 1000000) messages in each rate_period (1 ms to 1 day), and up to rate_limit more
that earlier claims have left. With priorities true, messages with a higher priority are claimed first; the queue cannot
have a group_limit then. counters false makes its calls faster, and stats returns null for its totals. dead_letter_to
names another queue, for which the caller needs admin access, too. That queue takes the dead letters and sends them as
new messages, when it is claimed or received from, or its relation is read; their header pgqueue.dead_letter has the
queue, id, reason, attempts and died_at of the dead letter. It needs dlq_enabled and on_dead skip. If a dump without
rows was restored, the queue takes over what is left of the former queue of this name: its dedicated table, the relation
of its transport, and the access of roles. Raises 22023, PQ002 if the queue exists, and PQ004 if a longer transaction
keeps a dedicated table from being attached.';

create function pgqueue.alter_queue(
    queue_name pgqueue.queue_of_admin,
    visibility_timeout interval default null,
    max_attempts int default null,
    dlq_enabled boolean default null,
    dead_letter_expired boolean default null,
    max_payload_bytes int default null,
    backoff_base interval default null,
    backoff_factor double precision default null,
    backoff_max interval default null,
    backoff_jitter double precision default null,
    archive_for interval default null,
    expires_after_idle interval default null,
    dedup_window interval default null,
    group_limit int default null,
    on_dead text default null,
    max_in_flight int default null,
    rate_limit int default null,
    rate_period interval default null,
    counters boolean default null,
    dead_letter_to pgqueue.queue_of_admin default null,
    priorities boolean default null
) returns pgqueue.queue
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500 ms'
set jit = off as $$
declare
    q pgqueue.queues;
    before pgqueue.queues;
begin
    -- Not in a declaration: the handler below does not cover those.
    perform pgqueue._get_locked_queue(queue_name);
    select queues.* into before from pgqueue.queues where queues.name = queue_name collate "C" for no key update;
    perform pgqueue._require(coalesce(alter_queue.counters, true) or not before.counters, 'counters', 'false',
        format('true or null: calls use the counters of queue %L without a lock on the queue', before.name));
    update pgqueue.queues c
    set visibility_timeout = coalesce(alter_queue.visibility_timeout, c.visibility_timeout),
        max_attempts = case alter_queue.max_attempts when 0 then 2147483647 else coalesce(alter_queue.max_attempts, c.max_attempts) end,
        dlq_enabled = coalesce(alter_queue.dlq_enabled, c.dlq_enabled),
        dead_letter_expired = coalesce(alter_queue.dead_letter_expired, c.dead_letter_expired),
        max_payload_bytes = coalesce(alter_queue.max_payload_bytes, c.max_payload_bytes),
        backoff_base = coalesce(alter_queue.backoff_base, c.backoff_base),
        backoff_factor = coalesce(alter_queue.backoff_factor, c.backoff_factor),
        backoff_max = coalesce(alter_queue.backoff_max, c.backoff_max),
        backoff_jitter = coalesce(alter_queue.backoff_jitter, c.backoff_jitter),
        archive_for = nullif(coalesce(alter_queue.archive_for, c.archive_for), '0'),
        expires_after_idle = nullif(coalesce(alter_queue.expires_after_idle, c.expires_after_idle), '0'),
        dedup_window = coalesce(alter_queue.dedup_window, c.dedup_window),
        group_limit = nullif(coalesce(alter_queue.group_limit, c.group_limit), 0),
        on_dead = coalesce(alter_queue.on_dead, c.on_dead),
        max_in_flight = nullif(coalesce(alter_queue.max_in_flight, c.max_in_flight), 0),
        rate_limit = nullif(coalesce(alter_queue.rate_limit, c.rate_limit), 0),
        rate_period = coalesce(alter_queue.rate_period, c.rate_period),
        priorities = coalesce(alter_queue.priorities, c.priorities),
        counters = coalesce(alter_queue.counters, c.counters),
        -- The domain of the argument accepts no empty text from a role that has access to some queues only.
        dead_letter_to = nullif(coalesce(alter_queue.dead_letter_to::text, c.dead_letter_to) collate "C", c.name),
        updated_at = pgqueue._now()
    where c.name = queue_name collate "C"
    returning c.* into q;
    -- After the update, which has computed the new settings: an error undoes it.
    perform pgqueue._check_settings(q, on_dead, rate_period);
    perform pgqueue._raise_invalid(s.name, s.value,
        format('unchanged for the dedicated queue %L, whose table is made for its settings', q.name))
    from (
        values
        ('group_limit', coalesce(q.group_limit, 0)::text, (q.group_limit is null) <> (before.group_limit is null)),
        ('priorities', q.priorities::text, q.priorities <> before.priorities),
        ('max_in_flight', q.max_in_flight::text, q.max_in_flight is not null and before.max_in_flight is null)
    ) s (name, value, is_changed)
    where q.dedicated and s.is_changed;
    if q.kind is distinct from before.kind then
        q := pgqueue._change_kind(q);
    end if;
    -- The repair that doctor suggests relies on this.
    perform pgqueue._create_sequence(pgqueue._sequence_name(r, q.name)) from unnest(pgqueue._missing_counters(q.name)) as r
    where q.counters;
    perform pgqueue._call_queue_handlers(before, q);
    return pgqueue._public_queue(q);
exception when lock_not_available then
    perform pgqueue._raise('queue_busy', queue_name, 'alter_queue');
    return null;
end;
$$;
comment on function pgqueue.alter_queue is
'Changes the settings whose arguments are not null, and returns the queue. The limits are those of create_queue.
Messages keep the max_attempts with which they were sent. A new archive_for also applies to messages that are archived
already; a running transaction may not notice the change before it ends. archive_for 0 ends archiving, and archived
messages are kept for the time set before. expires_after_idle 0 means that the queue never expires. A new dedup_window
applies to messages that are sent from then on; the keys of earlier ones may be free at once. A new group_limit,
max_in_flight, rate_limit or rate_period applies to the next claims; group_limit 0, max_in_flight 0 and rate_limit 0 end
these limits. To give a queue its first group_limit, max_in_flight or priorities, or to take the last away, moves all
its messages to another table in one transaction. Other calls of this queue wait meanwhile, one to three seconds for
100,000 messages; claims stay valid, and other queues are not affected. A dedicated queue keeps what it was created
with; only max_in_flight can end, for good. A queue that has a stream gets no priorities, max_in_flight and rate_limit:
stream_claim would refuse it, and the open batch would be delivered again. counters true begins to count; a queue that
has counters keeps them. A new dead_letter_to applies also to the dead letters that the queue has; the name of the queue
itself ends it, and the dead letters stay. Raises 22023, PQ001, and PQ004 if a longer transaction has altered the queue
or uses it while messages would be moved, or if archiving would begin or end for the relation of a transport while a
longer transaction uses that relation.';

create function pgqueue.get_queue(queue_name pgqueue.queue_of_any_access) returns pgqueue.queue
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    return pgqueue._public_queue(pgqueue._get_unlocked_queue(queue_name));
end;
$$;
comment on function pgqueue.get_queue is
'Returns a queue with its settings. Raises PQ001.';

create function pgqueue.list_queues(caller pgqueue.caller default current_user) returns setof pgqueue.queue
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    return query
    select l.*
    from pgqueue.queues q cross join lateral pgqueue._public_queue(q) l
    where pgqueue._may_use(caller, q.name, pgqueue._privileges_of('{producer,consumer,admin,raw,reader}'))
    order by q.name;
end;
$$;
comment on function pgqueue.list_queues is
'Returns the queues of the caller with their settings, by name: all of them, or those for which the caller has access.';

create function pgqueue.pause_queue(queue_name pgqueue.queue_of_admin) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    perform pgqueue._get_locked_queue(queue_name);
    -- The row is locked even if nothing changes: if it was changed after a fixed snapshot, this statement fails.
    perform from pgqueue.queues where queues.name = queue_name collate "C" for no key update;
    update pgqueue.queues
    set paused_at = pgqueue._now(), updated_at = pgqueue._now()
    where queues.name = queue_name collate "C" and queues.paused_at is null;
    return found;
end;
$$;
comment on function pgqueue.pause_queue is
'Pauses a queue: claim, exchange, receive and stream_claim return no messages until resume_queue. Messages can still be
sent, acknowledged and returned. Returns false if the queue was paused already. Waits for a transaction that has changed
the queue. Raises PQ001.';

create function pgqueue.resume_queue(queue_name pgqueue.queue_of_admin) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    q pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    resumed boolean;
begin
    perform from pgqueue.queues where queues.name = queue_name collate "C" for no key update;
    update pgqueue.queues
    set paused_at = null, updated_at = pgqueue._now()
    where queues.name = queue_name collate "C" and queues.paused_at is not null;
    resumed := found;
    perform pg_notify(pgqueue.channel(q.name), '');
    return resumed;
end;
$$;
comment on function pgqueue.resume_queue is
'Ends the pause of a queue and notifies waiting consumers. Returns false if the queue was not paused. Waits as
pause_queue does. Raises PQ001.';
-- Removes queues and the messages of queues.

create function pgqueue._remove_messages(q pgqueue.queues, dropping boolean) returns bigint
language plpgsql volatile set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
set jit = off as $$
declare
    -- A drop must leave nothing. So it reads also what was removed long ago, and ids that were set by hand.
    first_id constant bigint := case when dropping then -9223372036854775808 else coalesce(
        (select w.first_id from pgqueue.sweep_state w where w.queue_name = q.name), 1) end;
    source refcursor;
    slice record;
    removed bigint := 0;
begin
    -- Rows are locked in the order of a claim: first scheduled_messages, then messages, by id.
    open source for
        select s.id, s.ctid as place, pgqueue._moved_bytes(s.payload, s.body, s.headers, s.transport_headers) as bytes
        from pgqueue.scheduled_messages s where s.queue_name = q.name and s.id >= first_id
        order by s.id for update;
    loop
        select f.* into slice from pgqueue._fetch_slice(source) f;
        exit when slice.ids = '{}';
        -- By ctid: by key, a plan could use another index and read the whole queue through it for each.
        delete from pgqueue.scheduled_messages s where s.ctid = any (slice.places);
        removed := removed + cardinality(slice.ids);
        if not dropping and not pgqueue._has_time() then
            return removed;
        end if;
    end loop;
    close source;
    -- Under a fixed snapshot, truncate would remove messages that the snapshot does not show and the result does not
    -- count.
    if q.dedicated and (dropping or not pgqueue._has_fixed_snapshot()) then
        removed := removed + pgqueue._truncate_or_drop_partition(q, dropping);
    end if;
    open source for
        select m.id, null::tid as place, pgqueue._moved_bytes(m.payload, m.body, m.headers, m.transport_headers) as bytes
        from pgqueue.messages m where m.queue_name = q.name and m.id >= first_id
        order by m.id for update;
    loop
        select f.* into slice from pgqueue._fetch_slice(source) f;
        exit when slice.ids = '{}';
        delete from pgqueue.messages m
        using pgqueue._lookup_keys(q.name, slice.ids) k
        where pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id);
        removed := removed + cardinality(slice.ids);
        exit when not dropping and not pgqueue._has_time();
    end loop;
    close source;
    return removed;
end;
$$;

create function pgqueue.purge_queue(queue_name pgqueue.queue_of_admin) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500 ms'
set jit = off as $$
begin
    return pgqueue._remove_messages(pgqueue._get_locked_queue(queue_name), false);
exception when lock_not_available then
    -- lock_timeout is shorter than deadlock_timeout: in a deadlock the purge fails, not a consumer that acknowledges
    -- several messages.
    perform pgqueue._raise('queue_busy', queue_name, 'purge_queue');
    return null;
end;
$$;
comment on function pgqueue.purge_queue is
'Removes the ready, in-flight and scheduled messages of a queue and returns their number. The call ends when half of
statement_timeout has passed, and has then removed some: repeat it until it returns 0 or, as each schedule adds its next
tick again, the number of schedules. A dedicated table is truncated at once. Dead letters stay. Streams stay, too, but
lose the messages that were reserved for them. Raises PQ001, and PQ004 if a longer transaction holds messages or a
dedicated table, or if a dump is running and the queue is dedicated.';

create function pgqueue._drop_queue(q pgqueue.queues) returns bigint
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    removed bigint;
begin
    delete from pgqueue.queues where queues.name = q.name;
    perform pgqueue._call_queue_handlers(q, null);
    delete from pgqueue.dead_messages d where d.queue_name = q.name;
    get diagnostics removed = row_count;
    if q.dlq_enabled then
        -- Delayed messages become dead letters. The statement names the partition, as the parent is locked later, and
        -- only once. The partition holds delayed messages if the relation of a transport has moved them there ahead of
        -- time.
        execute format(
            'with moved as ('
            ' delete from %s m where m.queue_name = $1 and m.visible_at > $2 and m.attempt_count = 0'
            ' and coalesce(m.expires_at > $2, true) returning m),'
            ' scheduled as ('
            ' delete from pgqueue.scheduled_messages s where s.queue_name = $1 and s.due_at > $2 and s.attempt_count = 0'
            ' and coalesce(s.expires_at > $2, true) returning s)'
            ' select pgqueue._add_dead_letter(u.m, $2, ''queue_dropped'')'
            ' from (select (g.m)::pgqueue.messages as m from moved g union all select pgqueue._as_message(g.s) from scheduled g) u',
            pgqueue._partition_of(q))
        using q.name, pgqueue._now();
    end if;
    removed := removed + pgqueue._remove_messages(q, true);
    delete from pgqueue.requeued_messages r where r.queue_name = q.name;
    delete from pgqueue.sweep_state where sweep_state.queue_name = q.name;
    perform pgqueue._drop_registers(q.queue_id, '{}');
    perform pgqueue._drop_counters(q.name);
    return removed;
end;
$$;

create function pgqueue.drop_queue(queue_name pgqueue.queue_of_admin) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500 ms'
set jit = off as $$
declare
    q pgqueue.queues;
begin
    -- After this lock no other transaction uses the queue: earlier users have ended, and later ones wait and then find
    -- the queue gone. lock_timeout limits the wait, as all new users of the queue wait behind this call while a long
    -- transaction holds the lock.
    perform pg_advisory_xact_lock(pgqueue._lock_key(queue_name));
    q := pgqueue._get_locked_queue(queue_name);
    perform pgqueue._require_current_snapshot(format('queue %L', queue_name));
    return pgqueue._drop_queue(q);
exception when lock_not_available then
    perform pgqueue._raise('queue_busy', queue_name, 'drop_queue');
    return null;
end;
$$;
comment on function pgqueue.drop_queue is
'Drops a queue with all its messages, dead letters, streams and subscriptions, and returns the number of messages
removed. Delayed messages that are not due and were never claimed are kept, as their delivery is still outstanding: they
become dead letters under the name of the queue, with reason queue_dropped, the due time in last_error, and no expiry.
browse_dead_messages and purge_dead_messages find them by that name. After a queue of that name is created again,
redrive sends them. Delayed messages are removed, too, if dlq_enabled of the queue is false, or if purge_queue was
called before. Queues whose dead_letter_to is this queue keep their dead letters from then on. Archived messages of the
queue are kept under its name for its archive_for. The call removes everything in one transaction. If statement_timeout
is too short for that, call purge_queue and purge_dead_messages before. Raises PQ001, PQ004 if a longer transaction
uses the queue, or if a longer transaction or a dump keeps a dedicated table from being dropped, and 2BP01 if another
object depends on the relation of its transport.';
-- Deduplication: a sender gives a message a key, and a second message with this key is not added. A key is recorded in
-- the table of the period in which it was sent, and also in that of the next period if its window reaches into it. A
-- lookup reads one table. The unique index of that table decides which of two concurrent senders adds its message. The
-- table of a period that has ended is truncated as a whole.

create function pgqueue._dedup_class(dedup_window interval) returns int
language sql immutable parallel safe
-- Periods of class 0 last an hour, of 1 a day, of 2 30 days: at least as long as the window.
as $$
    select case when dedup_window = '0' or dedup_window > '1 day' then 2 when dedup_window > '1 h' then 1 else 0 end
$$;

create function pgqueue._dedup_period(dedup_window interval, at timestamptz) returns bigint
language sql stable parallel safe
as $$
    select floor(date_part('epoch', at) / ('{3600,86400,2592000}'::int[])[1 + pgqueue._dedup_class(dedup_window)])::bigint
$$;

create function pgqueue._dedup_slice(dedup_window interval, period bigint) returns int
language sql immutable parallel safe as $$ select 3 * pgqueue._dedup_class(dedup_window) + (period % 3)::int $$;

create function pgqueue._end_of_dedup_window(q pgqueue.queues, at timestamptz) returns timestamptz
language sql stable parallel safe
as $$ select pgqueue._add_interval(at, case q.dedup_window when '0' then '30 days' else q.dedup_window end) $$;

-- The keys that are recorded in a period, with the message of each. A key is free if its window has ended or its
-- message is in gone. With dedup_window 0 it is also free if the message neither exists nor is in new_ids, which the
-- caller is about to add. is_locked is false if no other transaction is changing the key.
create function pgqueue._read_dedup_keys(
    q pgqueue.queues, period bigint, keys text[], at timestamptz, new_ids bigint[], gone bigint[], out key text,
    out id bigint, out is_taken boolean, out is_locked boolean
) returns setof record
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    slice constant int := pgqueue._dedup_slice(q.dedup_window, period);
begin
    perform pgqueue._require_untruncated(array[format('pgqueue.dedup_keys_%s', slice)::regclass]);
    -- The statement names the table. A plan for the parent would lock the tables of all periods, and wait for the
    -- truncation of one of them. `offset 0` keeps the planner from a join that reads all keys of the queue, and from a
    -- hash of all its messages. A row that _write_dedup_keys has updated keeps its xmin as xmax: that transaction has
    -- locked it, and has ended.
    for key, id, is_taken, is_locked in execute format('
        select u.key, k.id,
            pgqueue._end_of_dedup_window($1, k.enqueued_at) > $4 and k.id <> all ($6) and (k.id = any ($5) or %2$s),
            k.xmax <> 0 and k.xmax <> k.xmin
        from unnest($3) as u (key)
        cross join lateral (
            select c.id, c.enqueued_at, c.xmin, c.xmax from pgqueue.dedup_keys_%1$s c
            where c.slice = %1$s and c.queue_id = ($1).queue_id and c.dedup_key = u.key collate "C" and c.period = $2
            offset 0
        ) k',
        slice, case
            when q.dedup_window > '0' then 'true'
            else '
                exists (select from pgqueue.messages m where m.queue_name = ($1).name and m.id = k.id offset 0)
                or exists (
                    select from pgqueue.scheduled_messages s where s.queue_name = ($1).name and s.id = k.id offset 0)'
        end)
    using q, period, keys, at, new_ids, gone
    loop
        return next;
    end loop;
end;
$$;

-- Records the ids for the keys that have no row or that of a message in free_ids, and returns them. Locks the rows of
-- all keys until the transaction ends, in the order of the keys: so the next _read_dedup_keys shows what they stay.
create function pgqueue._write_dedup_keys(
    q pgqueue.queues, period bigint, keys text[], ids bigint[], at timestamptz, free_ids bigint[]
) returns bigint[]
language plpgsql volatile set plan_cache_mode = force_generic_plan as $$
declare
    written bigint[];
begin
    with written_keys as (
        insert into pgqueue.dedup_keys as k (slice, period, queue_id, dedup_key, id, enqueued_at)
        select
            pgqueue._dedup_slice(q.dedup_window, _write_dedup_keys.period), _write_dedup_keys.period,
            q.queue_id, u.key, u.id, at
        from unnest(keys, ids) as u (key, id)
        order by u.key collate "C"
        on conflict on constraint dedup_keys_pkey do update set id = excluded.id, enqueued_at = excluded.enqueued_at
        where k.id in (select f from unnest(free_ids) as f)
        returning k.id
    )
    select coalesce(array_agg(w.id), '{}') into written from written_keys w;
    return written;
end;
$$;

-- For each element, the message that has the key: the given id or, if the key is taken, an earlier one. Keys of the
-- messages in gone count as free. If several elements have the same key, the first one keeps it; with on_duplicate
-- replace, the last. An element without a key keeps its id.
create function pgqueue._take_dedup_keys(
    q pgqueue.queues, keys text[], ids bigint[], at timestamptz, on_duplicate text, gone bigint[]
) returns bigint[]
language plpgsql volatile set plan_cache_mode = force_generic_plan set enable_nestloop = off set jit = off as $$
declare
    present constant bigint := pgqueue._dedup_period(q.dedup_window, at);
    latest constant bigint := pgqueue._dedup_period(q.dedup_window, pgqueue._end_of_dedup_window(q, at));
    -- The keys that this call has or tries to take, each with the message that gets it, and those that others have.
    own_keys text[];
    own_ids bigint[];
    lost_keys text[] := '{}'::text[];
    lost_ids bigint[] := '{}'::bigint[];
    open_keys text[];
    open_ids bigint[];
    added bigint[];
    written bigint[];
    are_locked boolean;
    seen record;
begin
    select array_agg(k.key), array_agg(k.id) into own_keys, own_ids
    from (
        select u.key collate "C" as key, case on_duplicate when 'keep' then min(u.id) else max(u.id) end as id
        from unnest(keys, ids) as u (key, id) where u.key is not null group by 1
    ) k;
    -- The later period comes first: a message whose window begins in the next period is recorded only there.
    for period in reverse latest..present loop
        -- All calls take keys in the same order, so that two of them cannot block each other. To replace a message, its
        -- key is locked first. To keep it needs no lock.
        are_locked := on_duplicate = 'replace';
        if are_locked then
            added := pgqueue._write_dedup_keys(q, period, own_keys, own_ids, at, '{}');
        else
            with new_keys as (
                insert into pgqueue.dedup_keys (slice, period, queue_id, dedup_key, id, enqueued_at)
                select pgqueue._dedup_slice(q.dedup_window, period), period, q.queue_id, u.key, u.id, at
                from unnest(own_keys, own_ids) as u (key, id)
                order by u.key collate "C"
                on conflict do nothing
                returning dedup_keys.id
            )
            select coalesce(array_agg(n.id), '{}') into added from new_keys n;
        end if;
        loop
            select array_agg(u.key), array_agg(u.id) into open_keys, open_ids
            from unnest(own_keys, own_ids) as u (key, id) where u.id not in (select a from unnest(added) as a);
            exit when open_keys is null;
            select
                array_agg(r.id) filter (where r.is_taken and r.id = o.id) as own_ids,
                array_agg(r.key) filter (where w.is_lost) as lost_keys,
                array_agg(r.id) filter (where w.is_lost) as lost_ids,
                array_agg(r.id) filter (where not r.is_taken) as free_ids
            into seen
            from pgqueue._read_dedup_keys(q, period, open_keys, at, ids, gone) r
            join unnest(open_keys, open_ids) as o (key, id) on o.key = r.key collate "C"
            cross join lateral (
                select r.is_taken and r.id <> o.id and (are_locked or not r.is_locked) as is_lost
            ) w;
            added := added || seen.own_ids;
            if seen.lost_keys is not null then
                if period < latest then
                    perform pgqueue._write_dedup_keys(
                        q, latest, array_agg(u.key), array_agg(u.id), '-infinity', array_agg(u.id))
                    from unnest(own_keys, own_ids) as u (key, id)
                    where u.key collate "C" in (select k from unnest(seen.lost_keys) as k);
                end if;
                lost_keys := lost_keys || seen.lost_keys;
                lost_ids := lost_ids || seen.lost_ids;
                select array_agg(u.key), array_agg(u.id) into own_keys, own_ids
                from unnest(own_keys, own_ids) as u (key, id)
                where u.key collate "C" not in (select k from unnest(seen.lost_keys) as k);
            elsif seen.own_ids is null then
                -- Waits for transactions that are changing the keys.
                if seen.free_ids is not null then
                    written := pgqueue._write_dedup_keys(q, period, open_keys, open_ids, at, seen.free_ids);
                else
                    -- Calls that only keep keys do not wait for each other: an error releases the locks before the
                    -- transaction ends.
                    begin
                        written := pgqueue._write_dedup_keys(q, period, open_keys, open_ids, at, '{}');
                        if written = '{}' then
                            perform pgqueue._raise('queue_busy', q.name, 'enqueue');
                        end if;
                    exception when sqlstate 'PQ004' then
                        null;
                    end;
                end if;
                added := added || written;
                are_locked := true;
            end if;
        end loop;
    end loop;
    return array(
        select coalesce(h.id, u.id)
        from unnest(keys, ids) with ordinality as u (key, id, n)
        left join unnest(own_keys || lost_keys, own_ids || lost_ids) as h (key, id) on h.key = u.key collate "C"
        order by u.n);
end;
$$;

create function pgqueue._replace_message(
    q pgqueue.queues, id bigint, at timestamptz, delay interval, expires_at timestamptz, message_id uuid, payload jsonb,
    body bytea, headers jsonb
) returns boolean
language plpgsql volatile set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
set enable_sort = off set jit = off as $$
declare
    new_due_at constant timestamptz := pgqueue._add_interval(at, delay);
begin
    -- If another transaction has locked the row, it claims or replaces the message.
    update pgqueue.scheduled_messages s
    set due_at = pgqueue._clamp_due_at(new_due_at), expires_at = _replace_message.expires_at,
        message_id = _replace_message.message_id, payload = _replace_message.payload, body = _replace_message.body,
        headers = _replace_message.headers, transport_headers = null
    where s.ctid = (
        select c.ctid from pgqueue.scheduled_messages c
        -- In the order of the primary key: a plan could read the whole queue through another index.
        where c.queue_name = q.name and c.id between _replace_message.id and _replace_message.id
        order by c.id for update skip locked
    );
    if not found then
        -- A consumer whose claim has ended must not settle the new content.
        update pgqueue.messages m
        set claim_token = null, visible_at = least(m.visible_at, at), expires_at = _replace_message.expires_at,
            message_id = _replace_message.message_id, payload = _replace_message.payload, body = _replace_message.body,
            headers = _replace_message.headers, transport_headers = null
        where m.queue_name = q.name and m.id = (
            select c.id from pgqueue.messages c
            where c.queue_name = q.name and c.id = _replace_message.id
                and (pgqueue._is_ready(c, at) or pgqueue._is_unclaimed(c))
            for update skip locked
        );
        if not found then
            -- Only the lock of reschedule lets this one pass: wait for it, and look again.
            perform from pgqueue.scheduled_messages s
            where s.queue_name = q.name and s.id = _replace_message.id for key share skip locked;
            if not found then
                return false;
            end if;
            perform from pgqueue.scheduled_messages s
            where s.queue_name = q.name and s.id = _replace_message.id for no key update;
            return pgqueue._replace_message(q, id, at, delay, expires_at, message_id, payload, body, headers);
        end if;
        with moved as (
            delete from pgqueue.messages m
            where delay > interval '0' and m.queue_name = q.name and m.id = _replace_message.id
            returning m
        )
        insert into pgqueue.scheduled_messages
        select (pgqueue._as_scheduled(d.m, pgqueue._clamp_due_at(new_due_at), (d.m).attempt_count)).* from moved d;
    end if;
    perform pgqueue._announce_due(q, new_due_at);
    return true;
end;
$$;

-- The tables of the periods that ended last, a minute ago or earlier. They are no longer read, and are used next.
create function pgqueue._ended_dedup_tables(at timestamptz) returns setof regclass
language sql stable as $$
    select format('pgqueue.dedup_keys_%s', pgqueue._dedup_slice(w, pgqueue._dedup_period(w, at) + 2))::regclass
    from unnest('{1 h,1 day,30 days}'::interval[]) as w
    where pgqueue._dedup_period(w, at) = pgqueue._dedup_period(w, at - interval '1 min')
$$;

create function pgqueue._truncate_dedup_keys(at timestamptz) returns void
language plpgsql volatile as $$
declare
    keys regclass;
begin
    -- A dump would fail.
    if pgqueue._is_dump_running() then
        return;
    end if;
    for keys in select t from pgqueue._ended_dedup_tables(at) as t loop
        begin
            -- A transaction that still writes to the table delays the truncation.
            execute format('lock table only %s in access exclusive mode nowait', keys);
            if pg_relation_size(keys) > 0 then
                execute format('truncate only %s', keys);
            end if;
        exception when lock_not_available or object_in_use then
            null;
        end;
    end loop;
    -- As for a compaction: otherwise the rows could still be counted, and each sweep would request a truncation.
    perform pg_stat_force_next_flush();
end;
$$;

create function pgqueue._on_maintenance_due_dedup(at timestamptz) returns void
language plpgsql volatile as $$
begin
    -- The statistics are read without a lock of the table.
    if not pgqueue._is_dump_running() and exists (
        select from pgqueue._ended_dedup_tables(at) as t
        -- A crash of the server resets the first two.
        where pg_stat_get_live_tuples(t) + pg_stat_get_dead_tuples(t) > 0
            or exists (select from pg_catalog.pg_class c where c.oid = t and c.relpages > 0)
    ) then
        perform pgqueue._request_at_commit('_truncate_dedup_keys', at);
    end if;
end;
$$;
-- Sends messages in the caller's transaction: without delay to messages, with delay to scheduled_messages.

create function pgqueue._with_group_and_priority(headers jsonb, group_key text, priority int) returns jsonb
language sql stable parallel safe as $$
    select case
        when group_key is null and priority is null then headers
        when headers is null or jsonb_typeof(headers) = 'object'
            then coalesce(headers, '{}')
                || jsonb_strip_nulls(jsonb_build_object('pgqueue.group', group_key, 'pgqueue.priority', priority))
        else headers
    end
$$;

create function pgqueue._check_keys(
    dedup_keys text[], group_keys text[], priorities int[], on_duplicate text default 'keep'
) returns void
language plpgsql stable as $$
begin
    if on_duplicate is null or on_duplicate not in ('keep', 'replace') then
        perform pgqueue._raise_invalid('on_duplicate', on_duplicate, 'keep or replace');
    end if;
    perform pgqueue._raise_invalid(pgqueue._element(k.argument, k.n, k.messages), left(k.given, 300), k.expected)
    from (
        select 'dedup_key' as argument, u.k as given, u.n, cardinality(dedup_keys) as messages, '1 to 255 characters' as expected
        from unnest(dedup_keys) with ordinality as u (k, n) where char_length(u.k) not between 1 and 255
        union all
        select 'group_key', u.k, u.n, cardinality(group_keys), '1 to 255 characters'
        from unnest(group_keys) with ordinality as u (k, n) where char_length(u.k) not between 1 and 255
        union all
        select 'priority', u.p::text, u.n, cardinality(priorities), 'an integer from 0 to 9'
        from unnest(priorities) with ordinality as u (p, n) where u.p not between 0 and 9
    ) k;
end;
$$;

create function pgqueue._check_content(
    q pgqueue.queues, payload jsonb, body bytea, headers jsonb, place bigint default 1, messages int default 1
) returns void
language plpgsql stable as $$
declare
    content constant text := pgqueue._element(case when body is null then 'payload' else 'body' end, place, messages);
    bytes bigint;
begin
    if payload is not null and body is not null then
        perform pgqueue._raise_invalid(pgqueue._element('payload', place, messages), left(payload::text, 50),
            'null if body is given: a message has exactly one of the two');
    end if;
    if payload is null and body is null then
        perform pgqueue._raise_invalid(content, null, 'given unless body is given');
    end if;
    if headers is not null then
        if jsonb_typeof(headers) <> 'object' then
            perform pgqueue._raise_invalid(pgqueue._element('headers', place, messages), headers::text, 'a JSON object');
        end if;
        bytes := octet_length(headers::text);
        if bytes > 65536 then
            perform pgqueue._raise(
                'payload_too_large', q.name, pgqueue._element('headers', place, messages), bytes::text, '65536');
        end if;
    end if;
    bytes := coalesce(octet_length(body), octet_length(payload::text));
    if bytes > q.max_payload_bytes then
        perform pgqueue._raise('payload_too_large', q.name, content, bytes::text, q.max_payload_bytes::text);
    end if;
end;
$$;

create function pgqueue._check_enqueue(
    delay interval, expires_in interval, place bigint default 1, messages int default 1
) returns void
language plpgsql stable as $$
begin
    if delay is null or not pgqueue._is_interval_between(delay, '0', '3652.5 days') then
        perform pgqueue._raise_invalid(pgqueue._element('delay', place, messages), delay::text, 'an interval from 0 to 10 years (3652.5 days)');
    end if;
    if not pgqueue._is_interval_between(expires_in, '0', '3652.5 days') then
        perform pgqueue._raise_invalid('expires_in', expires_in::text, 'an interval from 0 to 10 years (3652.5 days), or null for never');
    end if;
end;
$$;

-- Whether a message can be sent. If not, _check_enqueue or _check_content raises the error. Inlined.
create function pgqueue._is_valid(
    q pgqueue.queues, payload jsonb, headers jsonb, expires_in interval, body bytea
) returns boolean
language sql immutable parallel safe as $$
    -- The limit applies to the JSON text that consumers receive: 1e131071 takes 16 bytes as jsonb.
    select case when body is null then octet_length(payload::text) when payload is null then octet_length(body) end
        <= q.max_payload_bytes
        and (headers is null or jsonb_typeof(headers) = 'object' and octet_length(headers::text) <= 65536)
        and (expires_in is null or pgqueue._is_interval_between(expires_in, '0', '3652.5 days'))
$$;

-- Notifies waiting consumers, and returns whether a fast path of enqueue can send the message, which does no
-- maintenance. One call in 500 returns false for the sake of maintenance. Inlined.
create function pgqueue._notify_if_valid(
    q pgqueue.queues, at timestamptz, payload jsonb, headers jsonb, expires_in interval, body bytea
) returns boolean
language sql volatile as $$
    select case
            -- A repeatable read snapshot can be older than a drop_queue, and reading a dropped register fails.
            when pg_relation_filenode(q.waiting_until) is null then false
            -- The slow path looks whether maintenance is due. To do so in each call would cost 3 per cent.
            when random() < 0.002 or pgqueue._is_valid(q, payload, headers, expires_in, body) is not true then false
            when pg_sequence_last_value(q.waiting_until) <= pgqueue._to_micros(at) then true
            when pg_sequence_last_value(q.waiting_until) <= pgqueue._to_micros(at) + 86400000000
                then pg_notify(pgqueue.channel(q.name), '') is not null
        end
$$;

create function pgqueue._enqueue_deduplicated(
    queue_name text, payload jsonb, delay interval, headers jsonb, expires_in interval, message_id uuid, body bytea,
    dedup_key text, on_duplicate text
) returns bigint
language plpgsql volatile set plan_cache_mode = force_generic_plan as $$
declare
    at constant timestamptz := pgqueue._now();
    new_id bigint;
begin
    -- The fast path for a key that is new and whose window ends within the period is two inserts.
    with new_key as (
        insert into pgqueue.dedup_keys (slice, period, queue_id, dedup_key, id, enqueued_at)
        select
            pgqueue._dedup_slice(q.dedup_window, p.period), p.period, q.queue_id,
            _enqueue_deduplicated.dedup_key, nextval('pgqueue.message_id'), at
        from pgqueue.queues q
        cross join lateral (select pgqueue._dedup_period(q.dedup_window, at) as period) p
        where q.name = _enqueue_deduplicated.queue_name collate "C"
            and p.period = pgqueue._dedup_period(q.dedup_window, pgqueue._end_of_dedup_window(q, at))
            and char_length(_enqueue_deduplicated.dedup_key) between 1 and 255 and on_duplicate in ('keep', 'replace')
            and delay = interval '0'
            and pgqueue._notify_if_valid(
                q, at, _enqueue_deduplicated.payload, _enqueue_deduplicated.headers, expires_in, _enqueue_deduplicated.body)
        on conflict do nothing
        returning dedup_keys.id
    )
    insert into pgqueue.messages (
        id, queue_name, enqueued_at, visible_at, max_attempts, expires_at, message_id, payload, body, headers, kind
    )
    select
        k.id, q.name, at, at,
        case when pgqueue._count('enqueued', _enqueue_deduplicated.queue_name, 1) = 1 then q.max_attempts end,
        pgqueue._add_interval(at, expires_in), _enqueue_deduplicated.message_id, _enqueue_deduplicated.payload,
        _enqueue_deduplicated.body, _enqueue_deduplicated.headers, q.kind
    from new_key k
    join pgqueue.queues q on q.name = _enqueue_deduplicated.queue_name collate "C"
    returning messages.id into new_id;
    if not found and on_duplicate = 'keep' then
        select k.id into new_id
        from pgqueue.queues q
        cross join lateral pgqueue._read_dedup_keys(
            q, pgqueue._dedup_period(q.dedup_window, at),
            array[_enqueue_deduplicated.dedup_key], at, '{}', '{}') k
        where q.name = _enqueue_deduplicated.queue_name collate "C" and k.is_taken and not k.is_locked
            and delay = interval '0'
            and pgqueue._is_valid(
                q, _enqueue_deduplicated.payload, _enqueue_deduplicated.headers, expires_in, _enqueue_deduplicated.body);
    end if;
    if new_id is null then
        new_id := pgqueue.enqueue_batch(
            queue_name, array[payload], delay, array[headers], expires_in, array[message_id], array[body],
            dedup_keys => array[dedup_key], on_duplicate => on_duplicate);
    end if;
    return new_id;
end;
$$;

create function pgqueue.enqueue(
    queue_name pgqueue.queue_of_producer,
    payload jsonb default null,
    delay interval default '0',
    headers jsonb default null,
    expires_in interval default null,
    message_id uuid default null,
    body bytea default null,
    dedup_key text default null,
    on_duplicate text default 'keep',
    group_key text default null,
    priority int default null
) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    new_id bigint;
begin
    -- One expression, as each further one would have to be prepared in every transaction.
    if not pgqueue._lock_queue(queue_name) or group_key is not null or priority is not null
        or on_duplicate is distinct from 'keep'
    then
        if queue_name is null then
            perform pgqueue._raise('queue_not_found', queue_name);
        end if;
        if on_duplicate is distinct from 'keep' or char_length(group_key) not between 1 and 255 or priority not between 0 and 9
        then
            perform pgqueue._check_keys(array[dedup_key], array[group_key], array[priority], on_duplicate);
        end if;
        headers := pgqueue._with_group_and_priority(headers, group_key, priority);
    end if;
    -- Fast path: a valid message without delay. It is one statement, as a transaction has to prepare each statement and
    -- expression. The statement also notifies waiting consumers and counts the message. It does so in one condition on
    -- the row of the queue: a volatile function in the select list, or a condition on arguments alone, would add a node
    -- with all columns to the plan.
    insert into pgqueue.messages (
        queue_name, enqueued_at, visible_at, max_attempts, expires_at, message_id, payload, body, headers, kind
    )
    select
        q.name, at, at, q.max_attempts,
        case when enqueue.expires_in is not null then pgqueue._add_interval(at, enqueue.expires_in) end,
        enqueue.message_id, enqueue.payload, enqueue.body, enqueue.headers, q.kind
    from pgqueue.queues q
    where q.name = enqueue.queue_name collate "C"
        and case
            when enqueue.dedup_key is null and enqueue.delay = interval '0' and pgqueue._notify_if_valid(
                q, at, enqueue.payload, enqueue.headers, enqueue.expires_in, enqueue.body)
            then pgqueue._count('enqueued', enqueue.queue_name, 1) = 1
        end
    returning messages.id into new_id;
    if found then
        return new_id;
    end if;
    if dedup_key is not null then
        return pgqueue._enqueue_deduplicated(
            queue_name, payload, delay, headers, expires_in, message_id, body, dedup_key, on_duplicate);
    end if;
    if delay > interval '0' then
        insert into pgqueue.scheduled_messages (
            queue_name, due_at, enqueued_at, max_attempts, expires_at, message_id, payload, body, headers
        )
        select
            q.name, pgqueue._clamp_due_at(pgqueue._add_interval(at, enqueue.delay)), at, q.max_attempts,
            pgqueue._add_interval(at, enqueue.expires_in), enqueue.message_id, enqueue.payload, enqueue.body, enqueue.headers
        from pgqueue.queues q
        where q.name = enqueue.queue_name collate "C"
            and case
                when random() >= 0.002 and pg_relation_filenode(q.first_due_at) is not null
                    and pgqueue._is_interval_between(enqueue.delay, '0', '3652.5 days')
                    and pgqueue._is_valid(q, enqueue.payload, enqueue.headers, enqueue.expires_in, enqueue.body)
                then pgqueue._count('enqueued', enqueue.queue_name, 1) = 1
            end
        returning scheduled_messages.id into new_id;
        if found then
            perform pgqueue._announce_due(q, pgqueue._add_interval(at, delay))
            from pgqueue.queues q where q.name = enqueue.queue_name collate "C";
            return new_id;
        end if;
    end if;
    return (
        select b from pgqueue.enqueue_batch(
            queue_name, array[payload], delay, array[headers], expires_in, array[message_id], array[body]) as b);
end;
$$;
comment on function pgqueue.enqueue is
'Sends a message in the caller''s transaction and returns its id. Exactly one of payload (any JSON document) and body
(raw bytes) is given, of at most the queue''s max_payload_bytes; a payload counts as JSON text. headers is a JSON object
of at most 64 KB. delay (0 to 10 years) postpones the first delivery. After expires_in (0 to 10 years; null: never) the
message is no longer delivered: it is removed, to the dead letters if the queue has dead_letter_expired. Both count from
the time of the call, not from the start of the transaction. message_id is an identifier that the sender chooses; it is
not checked for uniqueness. dedup_key (1 to 255 characters) is: while another message of the queue has the same key, no
message is added, and the id of the other one is returned. A key is taken for the queue''s dedup_window, also after its
message is gone, or, if that is 0, as long as its message lives. With on_duplicate replace (default: keep) the other
message gets the content, due time and expiry of this call, unless a consumer has claimed it or it is gone: then this
message is added and has the key from now on. A replaced message keeps its dedup_window, which begins when it is added:
to delay a message again and again, use dedup_window 0. A call with a dedup_key waits for a transaction that has sent
the same key, and replace for one that reschedules the other message. group_key (1 to 255 characters) is the group of
the message; it becomes the header pgqueue.group, and does nothing in a queue without group_limit. priority (0 to 9, the
highest; null is 0) becomes the header pgqueue.priority, and does nothing in a queue without priorities. Raises 22023,
PQ001, and PQ003 if the payload, body or headers are too large.';

create function pgqueue._take_or_replace(
    q pgqueue.queues, dedup_keys text[], on_duplicate text, ids bigint[], at timestamptz, payloads jsonb[],
    bodies bytea[], headers jsonb[], message_ids uuid[], delays interval[], expires_at timestamptz
) returns bigint[]
language plpgsql volatile as $$
declare
    holders bigint[];
    gone bigint[] := '{}'::bigint[];
    lost bigint[];
begin
    loop
        holders := pgqueue._take_dedup_keys(q, dedup_keys, ids, at, on_duplicate, gone);
        exit when on_duplicate = 'keep';
        lost := array(
            select d.holder
            from (
                select distinct on (u.holder) u.*
                from unnest(holders, payloads, bodies, headers, message_ids, delays) with ordinality
                    as u (holder, payload, body, headers, message_id, delay, n)
                where u.holder <> all (ids)
                order by u.holder, u.n desc
            ) d
            where not pgqueue._replace_message(
                q, d.holder, at, coalesce(d.delay, interval '0'), expires_at, d.message_id, d.payload, d.body, d.headers)
        );
        exit when lost = '{}';
        -- A message that cannot be replaced loses its key.
        gone := gone || lost;
    end loop;
    return holders;
end;
$$;

create function pgqueue._schedule_batch(
    q pgqueue.queues, ids bigint[], holders bigint[], at timestamptz, payloads jsonb[], bodies bytea[], headers jsonb[],
    message_ids uuid[], delays interval[], expires_at timestamptz
) returns void
language plpgsql volatile as $$
declare
    due_at timestamptz;
begin
    with delayed as (
        insert into pgqueue.scheduled_messages (
            id, queue_name, due_at, enqueued_at, max_attempts, expires_at, message_id, payload, body, headers
        )
        select
            d.id, q.name, pgqueue._clamp_due_at(pgqueue._add_interval(at, d.delay) + (d.n - 1) * interval '1 microsecond'),
            at, q.max_attempts, _schedule_batch.expires_at, d.message_id, d.payload, d.body, d.headers
        -- Each message gets a due time of its own. Claims continue at the last due time: with equal times they would
        -- scan the dead index entries of all messages already taken.
        from (
            select u.*, row_number() over (partition by u.delay order by u.id) as n
            from unnest(ids, payloads, bodies, headers, message_ids, delays, holders)
                as u (id, payload, body, headers, message_id, delay, holder)
            where u.delay > interval '0' and coalesce(u.holder, u.id) = u.id
        ) d
        returning scheduled_messages.due_at
    )
    select min(d.due_at) into due_at from delayed d;
    if due_at is not null then
        perform pgqueue._announce_due(q, due_at);
    end if;
end;
$$;

create function pgqueue.enqueue_batch(
    queue_name pgqueue.queue_of_producer,
    payloads jsonb[] default null,
    delay interval default '0',
    headers jsonb[] default null,
    expires_in interval default null,
    message_ids uuid[] default null,
    bodies bytea[] default null,
    delays interval[] default null,
    dedup_keys text[] default null,
    on_duplicate text default 'keep',
    group_keys text[] default null,
    priorities int[] default null
) returns setof bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    n constant int := coalesce(cardinality(payloads), cardinality(bodies));
    ids bigint[];
    holders bigint[];
    expires_at timestamptz;
begin
    if payloads is null and bodies is null then
        perform pgqueue._raise_invalid('payloads', null, 'an array with one element for each message, unless bodies is given');
    end if;
    perform pgqueue._raise_invalid(a.argument, pgqueue._with_number(a.given, 'element'),
        format('null or an array with one element for each message: %s has %s',
            case when payloads is null then 'bodies' else 'payloads' end, pgqueue._with_number(n, 'element')))
    from (
        values
            ('bodies', cardinality(bodies)), ('headers', cardinality(headers)),
            ('message_ids', cardinality(message_ids)), ('delays', cardinality(delays)),
            ('dedup_keys', cardinality(dedup_keys)), ('group_keys', cardinality(group_keys)),
            ('priorities', cardinality(priorities))
    ) as a (argument, given)
    where a.given <> n;
    if n = 0 then
        return;
    end if;
    if group_keys is not null or priorities is not null or dedup_keys is not null or on_duplicate is distinct from 'keep' then
        perform pgqueue._check_keys(dedup_keys, group_keys, priorities, on_duplicate);
    end if;
    if group_keys is not null or priorities is not null then
        headers := array(
            select pgqueue._with_group_and_priority(u.h, u.k, u.p)
            from unnest(headers, group_keys, priorities) with ordinality as u (h, k, p, n)
            order by u.n
        );
    end if;
    perform pgqueue._check_enqueue(delay, expires_in);
    perform pgqueue._check_enqueue(u.delay, null, u.place, n)
    from unnest(delays) with ordinality as u (delay, place)
    where not pgqueue._is_interval_between(u.delay, '0', '3652.5 days');
    perform pgqueue._check_content(q, c.payload, c.body, c.headers, c.place, n)
    from unnest(payloads, bodies, headers) with ordinality as c (payload, body, headers, place)
    where c.payload is null or c.body is not null or c.headers is not null
        or octet_length(c.payload::text) > q.max_payload_bytes;

    if delays is not null then
        delays := array(
            select coalesce(u.delay, enqueue_batch.delay) from unnest(delays) with ordinality as u (delay, place)
            order by u.place
        );
    elsif delay > interval '0' then
        delays := array_fill(delay, array[n]);
    end if;
    expires_at := pgqueue._add_interval(at, expires_in);

    -- The inserts need this lock anyway. It is taken before the ids, as the sweep relies on that order.
    lock table only pgqueue.messages in row exclusive mode;
    ids := array(
        select nextval('pgqueue.message_id')
        from generate_series(1, case when dedup_keys is null then pgqueue._count('enqueued', q.name, n) else n end));
    if dedup_keys is not null then
        holders := pgqueue._take_or_replace(
            q, dedup_keys, on_duplicate, ids, at, payloads, bodies, headers, message_ids, delays, expires_at);
        perform pgqueue._count('enqueued', q.name, count(*)::int)
        from unnest(ids, holders) as u (id, holder) where u.id = u.holder;
    end if;

    insert into pgqueue.messages (
        id, queue_name, enqueued_at, visible_at, max_attempts, expires_at, message_id, payload, body, headers, kind
    )
    select u.id, q.name, at, at, q.max_attempts, expires_at, u.message_id, u.payload, u.body, u.headers, q.kind
    from unnest(ids, payloads, bodies, headers, message_ids, delays, holders)
        as u (id, payload, body, headers, message_id, delay, holder)
    where coalesce(u.delay, interval '0') = interval '0' and coalesce(u.holder, u.id) = u.id;
    if found then
        perform pgqueue._wake_if_waiting(q, at);
    end if;
    perform pgqueue._call_if_due('maintenance', at);

    if delays is not null then
        perform pgqueue._schedule_batch(
            q, ids, holders, at, payloads, bodies, headers, message_ids, delays, expires_at);
    end if;
    return query select i from unnest(coalesce(holders, ids)) as i;
end;
$$;
comment on function pgqueue.enqueue_batch is
'Sends many messages, all or none, in the caller''s transaction, and returns their ids in the order of the arrays. All
arrays that are given have the same length, and each message has exactly one of payload and body. Empty arrays send
nothing. An error for an element names it, such as payloads[6], as SQL counts: the first element is payloads[1]. An
element of delays that is not null overrides delay for its message. dedup_keys contains null for a message without a
key, and so do group_keys and priorities. Of the elements with the same dedup_key one is added, the last one if
on_duplicate is replace, and all get its id. Everything else is as in enqueue. Raises 22023, PQ001, and PQ003 if a
payload, body or headers are too large.';
-- Records where a queue has no rows. A pinned horizon keeps dead index entries, so a scan that starts at the lowest key
-- reads an unbounded number of them. Scans start at the values recorded here instead.

-- The running transactions that have written to the messages, through the parent or directly to a partition; prepared
-- ones, too.
-- In PL/pgSQL, which keeps its plan: see _level_registers.
create function pgqueue._running_writers() returns text[]
language plpgsql volatile as $$
begin
    return array(
        select distinct l.virtualtransaction
        from pg_catalog.pg_locks l
        where l.locktype = 'relation' and l.mode = 'RowExclusiveLock' and l.granted
            and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database())
            and (
                l.relation in (
                    'pgqueue.messages'::regclass, 'pgqueue.scheduled_messages'::regclass, 'pgqueue.requeued_messages'::regclass
                )
                or l.relation in (
                    select i.inhrelid from pg_catalog.pg_inherits i where i.inhparent = 'pgqueue.messages'::regclass
                )
            )
    );
end;
$$;

-- The lowest id at which there can be a message, except those in requeued_messages.
create function pgqueue._first_possible_id(s pgqueue.sweep_state) returns bigint
language sql immutable parallel safe
-- The end of the first range. There is no subquery, so PostgreSQL can inline the function.
as $$
    select coalesce(
        lower(int8multirange(int8range(lower(s.vacant_ids), upper(s.vacant_ids))) - s.vacant_ids), upper(s.vacant_ids)
    )
$$;

create function pgqueue._possible_ranges(queue_name text, from_id bigint, below_id bigint)
returns setof int8range
language sql stable as $$
    select r
    from unnest(
        int8multirange(int8range(from_id, greatest(from_id, below_id)))
        - coalesce((select s.vacant_ids from pgqueue.sweep_state s where s.queue_name = _possible_ranges.queue_name), '{}')
    ) as r
$$;

-- A recorded time; -infinity if it is in the future, as it was then recorded before the clock was set back. Inlined.
create function pgqueue._discard_future_time(recorded timestamptz, at timestamptz) returns timestamptz
language sql immutable parallel safe as $$ select case when recorded <= at then recorded else '-infinity' end $$;

create function pgqueue._sweep_state_of(queue_name text, at timestamptz) returns pgqueue.sweep_state
language plpgsql stable as $$
declare
    s pgqueue.sweep_state;
begin
    select sweep_state.* into s from pgqueue.sweep_state where sweep_state.queue_name = _sweep_state_of.queue_name collate "C";
    s.vacant_ids := coalesce(s.vacant_ids, '{(,1)}');
    s.first_id := coalesce(s.first_id, 1);
    s.first_due_at := pgqueue._discard_future_time(s.first_due_at, at);
    s.first_check_at := pgqueue._discard_future_time(s.first_check_at, at);
    return s;
end;
$$;

create function pgqueue._next_span(span bigint) returns bigint
language sql immutable parallel safe
-- A wide step can take long, as each id in it can have dead rows. So steps grow slowly from 131,072 ids on. A gap of
-- 10^18 ids still takes less than three hundred steps. The cap prevents an overflow.
as $$ select least(span + case when span < 131072 then span else span / 8 end, 1152921504606846976) $$;

-- A statement on messages locks and starts up each partition. So sweeps read the messages of plain queues from
-- messages_shared. These functions are stable: their statements have the snapshot of the caller.

-- The ids of the first messages in a range, up to wanted, and those of the ready ones and of the spent ones among them.
-- Null if there are none. With by_level, the bounds and ids are positions of a queue with priorities.
create function pgqueue._read_messages(
    q pgqueue.queues, from_id bigint, below_id bigint, at timestamptz, wanted int, by_level boolean default false,
    out ids bigint[], out ready_ids bigint[], out spent_ids bigint[]
)
language plpgsql stable as $$
begin
    if by_level then
        -- Without `order by`, as in _lock_levels.
        select
            array_agg(w.position), array_agg(w.id) filter (where w.is_ready),
            array_agg(w.id) filter (where w.is_visible and not w.is_ready)
        into ids, ready_ids, spent_ids
        from (
            select
                m.id, pgqueue._is_ready(m, at) as is_ready, m.visible_at <= at as is_visible,
                pgqueue._level_position(m) as position
            from pgqueue.messages m
            where pgqueue._is_in_queue(m, q.kind, q.name)
                and pgqueue._level_position(m) >= from_id and pgqueue._level_position(m) < below_id
            limit wanted
        ) w;
    elsif q.kind is not null then
        select
            array_agg(w.id), array_agg(w.id) filter (where w.is_ready),
            array_agg(w.id) filter (where w.is_visible and not w.is_ready)
        into ids, ready_ids, spent_ids
        from (
            select m.id, pgqueue._is_ready(m, at) as is_ready, m.visible_at <= at as is_visible from pgqueue.messages m
            -- What plain SQL has sent, too: its id is not vacant before it is moved.
            where (m.kind = q.kind or m.kind is null) and m.queue_name = q.name and m.id >= from_id and m.id < below_id
            order by m.id limit wanted
        ) w;
    else
        select
            array_agg(w.id), array_agg(w.id) filter (where w.is_ready),
            array_agg(w.id) filter (where w.is_visible and not w.is_ready)
        into ids, ready_ids, spent_ids
        from (
            select m.id, pgqueue._is_ready(m, at) as is_ready, m.visible_at <= at as is_visible from pgqueue.messages_shared m
            where m.queue_name = q.name and m.id >= from_id and m.id < below_id
            order by m.id limit wanted
        ) w;
    end if;
end;
$$;

-- Reads the removed rows of a page at once, by a bitmap. As it reads all living rows, too, call it for small ranges.
create function pgqueue._living_ids(queue_name text, from_id bigint, below_id bigint, in_all_tables boolean)
returns bigint[] language plpgsql stable set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_indexscan = off set enable_bitmapscan = on set jit = off as $$
begin
    return array(
        select m.id from pgqueue.messages_shared m
        where m.queue_name = _living_ids.queue_name and m.id >= from_id and m.id < below_id
        union all
        select c.id from pgqueue.scheduled_messages c
        where in_all_tables and c.queue_name = _living_ids.queue_name and c.id >= from_id and c.id < below_id
        union all
        select d.id from pgqueue.dead_messages d
        where in_all_tables and d.queue_name = _living_ids.queue_name and d.id >= from_id and d.id < below_id);
end;
$$;

-- The ids in a range of rows of messages, and of the lowest of scheduled messages and dead letters if in_all_tables. If
-- there are 1,000 or more messages, those above the 1,000th can be missing.
create function pgqueue._ids_between(
    q pgqueue.queues, from_id bigint, below_id bigint, in_all_tables boolean default false
) returns bigint[]
language plpgsql stable as $$
begin
    if q.kind is null and below_id - from_id between 100 and 16384 then
        return pgqueue._living_ids(q.name, from_id, below_id, in_all_tables);
    end if;
    return (pgqueue._read_messages(q, from_id, below_id, '-infinity', 1000)).ids || array(
        select c.id from pgqueue.scheduled_messages c
        where in_all_tables and c.queue_name = q.name and c.id >= from_id and c.id < below_id
        order by c.id limit 1
    ) || array(
        select d.id from pgqueue.dead_messages d
        where in_all_tables and d.queue_name = q.name and d.id >= from_id and d.id < below_id
        order by d.id limit 1
    );
end;
$$;

create function pgqueue._visible_at_of(q pgqueue.queues, id bigint) returns timestamptz
language plpgsql stable as $$
begin
    if q.kind is not null then
        return (
            select m.visible_at from pgqueue.messages m
            where (m.kind = q.kind or m.kind is null) and m.queue_name = q.name and m.id = _visible_at_of.id);
    end if;
    return (select m.visible_at from pgqueue.messages_shared m where m.queue_name = q.name and m.id = _visible_at_of.id);
end;
$$;

create function pgqueue._read_requeued(
    q pgqueue.queues, at timestamptz, after_time timestamptz, after_id bigint, wanted int, out n int,
    out last_time timestamptz, out last_id bigint, out visible_ids bigint[], out gone tid[]
)
language plpgsql volatile as $$
begin
    -- A row and its message are written by the same transaction. If the snapshot of this statement shows the row but
    -- not the message, the message is gone, or has come back with a new row.
    select
        count(*), (array_agg(w.check_at))[count(*)], (array_agg(w.id))[count(*)],
        array_agg(distinct w.id) filter (where m.visible_at <= at),
        array_agg(w.ctid) filter (where m.visible_at is null)
    into n, last_time, last_id, visible_ids, gone
    from (
        select r.check_at, r.id, r.ctid from pgqueue.requeued_messages r
        where r.queue_name = q.name and (r.check_at, r.id) > (after_time, after_id)
        order by r.check_at, r.id limit wanted
    ) w
    cross join lateral (select pgqueue._visible_at_of(q, w.id) as visible_at offset 0) m;
end;
$$;

create function pgqueue._prune_requeued(q pgqueue.queues, gone tid[], up_to timestamptz) returns void
language plpgsql volatile as $$
begin
    -- A fixed snapshot can show the row and not its message, if a compaction has replaced the rows of messages since.
    if gone is null or pgqueue._has_fixed_snapshot() then
        return;
    end if;
    -- Since the row was read, another row can have been stored at its place. That row has a later check_at. `offset 0`
    -- keeps the planner from an index on check_at: it would read the dead entries of that index from the lowest on.
    delete from pgqueue.requeued_messages r
    where r.ctid = any (array(
        select l.ctid
        from (
            select c.ctid, c.queue_name, c.check_at from pgqueue.requeued_messages c
            where c.ctid = any (gone) offset 0 for update skip locked
        ) l
        where l.queue_name = q.name and l.check_at <= up_to));
end;
$$;

create function pgqueue._record_first_keys(q pgqueue.queues, s pgqueue.sweep_state, at timestamptz)
returns pgqueue.sweep_state language plpgsql volatile as $$
declare
    -- A due time can lie 100 ms back (_clamp_due_at), and the clock can be set back by less than the rest unnoticed.
    settled_at constant timestamptz := s.settled_at - interval '1 s';
    old_rows tid[];
    span bigint := 4096;
    below_id bigint;
    found_id bigint;
begin
    -- If a message has the recorded id, nothing has changed. Otherwise all three tables are read in one snapshot,
    -- as messages move between them.
    if pgqueue._visible_at_of(q, s.first_id) is null
        and not exists (select from pgqueue.scheduled_messages c where c.queue_name = q.name and c.id = s.first_id)
        and not exists (select from pgqueue.dead_messages d where d.queue_name = q.name and d.id = s.first_id)
    then
        while s.first_id <= s.settled_id loop
            below_id := s.first_id + least(span, s.settled_id + 1 - s.first_id);
            found_id := (select min(i) from unnest(pgqueue._ids_between(q, s.first_id, below_id, true)) as i);
            s.first_id := coalesce(found_id, below_id);
            exit when found_id is not null or pgqueue._now() > at + interval '50 ms';
            span := pgqueue._next_span(span);
        end loop;
    end if;

    -- Once an hour the scans start at the earliest times again. They then find messages that the recorded times
    -- exclude, because the clock was set back or plain SQL has set a due time in the past.
    if s.first_due_at > at or s.first_check_at > at or date_trunc('hour', s.recorded_at) <> date_trunc('hour', at) then
        s.first_due_at := '-infinity';
        s.first_check_at := '-infinity';
    end if;
    s.first_due_at := greatest(s.first_due_at, least(settled_at, (
        select c.due_at from pgqueue.scheduled_messages c
        where c.queue_name = q.name and c.due_at >= s.first_due_at
        order by c.due_at limit 1)));

    -- Sweeps delete the rows whose messages are gone, too, but there may be no claim.
    perform pgqueue._prune_requeued(q, r.gone, r.last_time)
    from pgqueue._read_requeued(q, at, s.first_check_at, -9223372036854775808, 500) r;
    -- A few rows that stay for long, such as that of a message with a long claim, get a new time. Otherwise all rows
    -- that were removed after them would be read again and again.
    old_rows := array(
        select r.ctid from pgqueue.requeued_messages r
        where r.queue_name = q.name and r.check_at >= s.first_check_at and r.check_at < settled_at - interval '10 s'
        order by r.check_at limit 101 for update skip locked);
    if cardinality(old_rows) <= 100 then
        update pgqueue.requeued_messages r set check_at = (select pgqueue._now()) where r.ctid = any (old_rows);
    end if;
    s.first_check_at := greatest(s.first_check_at, least(settled_at, (
        select r.check_at from pgqueue.requeued_messages r
        where r.queue_name = q.name and r.check_at >= s.first_check_at
        order by r.check_at limit 1)));
    return s;
end;
$$;

-- Records the ids below fresh_from_id at which no message can appear any more, and the first keys of the other tables,
-- so that scans skip what was removed. Returns true if the record had to wait for a long write transaction.
create function pgqueue._record_vacant_ids(q pgqueue.queues, at timestamptz, fresh_from_id bigint)
returns boolean language plpgsql volatile as $$
declare
    s pgqueue.sweep_state;
    bound bigint;
    writers text[];
    waited boolean := false;
    id_range int8range;
    from_id bigint;
    below_id bigint;
    span bigint;
    found_ids bigint[];
begin
    -- The rows must be read with a snapshot taken after the writers are listed. A fixed snapshot is older.
    if pgqueue._has_fixed_snapshot() then
        return false;
    end if;
    select sweep_state.* into s from pgqueue.sweep_state where sweep_state.queue_name = q.name for update skip locked;
    if not found then
        return false;
    end if;

    -- A compaction replaces the rows of a table: a snapshot that is older than its commit shows the table empty. So the
    -- tables are locked before the statements below take their snapshots. The second statement locks the partition.
    lock table pgqueue.scheduled_messages, pgqueue.requeued_messages, pgqueue.dead_messages in access share mode;
    perform pgqueue._visible_at_of(q, 0);

    -- An id without a row in the snapshot stays without a row only if no running transaction has taken it, as ids are
    -- taken before they are committed. So the sequence is read first, and then the running writers are listed. Once all
    -- of those have ended, every id up to the value read is decided, and the statements below see every message with
    -- such an id.
    bound := coalesce(pg_sequence_last_value('pgqueue.message_id'), 0);
    writers := pgqueue._running_writers();
    -- The name of a prepared transaction changes when the server restarts. A prepared transaction that is not listed
    -- can therefore be one of the listed ones, and is added.
    s.writers := s.writers || array(
        select w from unnest(writers) as w where w like '-1/%' and w <> all (s.writers));
    if not s.writers && writers then
        -- A check after bound_at found at least one of the writers still running.
        waited := s.recorded_at > s.bound_at;
        -- If no transaction writes, the bound that was read just now is settled, too.
        s.settled_id := case writers when '{}' then bound else s.bound_id end;
        s.settled_at := case writers when '{}' then at else least(s.bound_at, at) end;
        s.bound_id := bound;
        s.writers := writers;
        s.bound_at := at;
    end if;

    <<walk>>
    for id_range in
        select r
        from unnest(
            int8multirange(int8range(1, greatest(1, least(s.settled_id + 1, fresh_from_id)))) - s.vacant_ids
        ) as r
    loop
        from_id := lower(id_range);
        span := 4096;
        while from_id < upper(id_range) loop
            exit walk when pgqueue._now() > at + interval '40 ms';
            below_id := from_id + least(span, upper(id_range) - from_id);
            found_ids := pgqueue._ids_between(q, from_id, below_id);
            -- A range that is dense with messages has no gaps worth recording.
            exit walk when cardinality(found_ids) >= 1000;
            s.vacant_ids := s.vacant_ids + (
                int8multirange(int8range(from_id, below_id))
                - coalesce((select range_agg(int8range(l, l, '[]')) from unnest(found_ids) as l), '{}')
            );
            from_id := below_id;
            span := pgqueue._next_span(span);
        end loop;
    end loop;

    begin
        s := pgqueue._record_first_keys(q, s, at);
        update pgqueue.sweep_state
        set vacant_ids = (
                -- 64 ranges cover the gaps that are worth skipping, and are few enough for every sweep to read.
                select range_agg(w.r)
                from (
                    select r from unnest(s.vacant_ids) as r
                    order by lower_inf(r) desc, upper(r) - lower(r) desc limit 64
                ) w
            ),
            settled_id = s.settled_id, bound_id = s.bound_id,
            writers = s.writers, bound_at = s.bound_at, recorded_at = at, settled_at = s.settled_at, first_id = s.first_id,
            first_due_at = s.first_due_at, first_check_at = s.first_check_at
        where sweep_state.queue_name = q.name;
    exception when disk_full then
        return false;
    end;
    return waited;
end;
$$;

-- How many pages of the tables of a queue this session has read. The difference of two values in one statement counts
-- the pages in between; it is 0 if track_counts is off, and null if the queue is being dropped. A living row takes at
-- most two pages: those of a message and of its row in requeued_messages.
create function pgqueue._pages_read(q pgqueue.queues) returns bigint
language sql volatile as $$
    select pg_stat_get_xact_blocks_fetched('pgqueue.scheduled_messages'::regclass)
        + pg_stat_get_xact_blocks_fetched('pgqueue.requeued_messages'::regclass)
        + pg_stat_get_xact_blocks_fetched(case
            when q.dedicated then to_regclass(format('pgqueue.messages_%s', q.queue_id)) else pgqueue._partition_of(q)
        end)
$$;

-- Records where the queue has no rows, unless it was recorded less than a second ago or, with if_behind, claims have
-- passed few ids since. A read-only transaction, as on a standby, records nothing.
create function pgqueue._record_if_old(q pgqueue.queues, if_behind boolean default false) returns void
language plpgsql volatile as $$
declare
    at constant timestamptz := pgqueue._now();
begin
    if current_setting('transaction_read_only')::boolean or not exists (
        select from pgqueue.sweep_state s
        where s.queue_name = q.name and at - s.recorded_at not between interval '0' and interval '1 s'
    ) then
        return;
    end if;
    -- The lock comes first: a session that reads a register waits for a transaction that drops the queue.
    if pgqueue._try_lock_existing_queue(q) and (not if_behind or exists (
        select from pgqueue.sweep_state s
        where s.queue_name = q.name
            -- sweep_resume_id is 1 if the last sweep has read few removed rows.
            and pg_sequence_last_value(q.sweep_resume_id) <> 1
            and pg_sequence_last_value(q.fresh_from_id) - s.settled_id between 100 and 1000000000000
    )) then
        -- Also above fresh_from_id, which may lag: the slower one of two claims can set it back.
        perform pgqueue._record_vacant_ids(q, at, coalesce(pg_sequence_last_value('pgqueue.message_id'), 0) + 1);
    end if;
end;
$$;
-- Moves due messages and dead letters that go to another queue, and removes messages that have no attempts left or have
-- expired, in slices of bounded size and time. Claims and sweeps call it.

-- Returns how many messages were moved, and the ids of those that have not expired. Records each id in
-- requeued_messages, as the walk may never reach that id again.
create function pgqueue._move_due_slice(
    q pgqueue.queues, at timestamptz, wanted int, since timestamptz, out moved int, out ids bigint[]
)
language plpgsql volatile as $$
declare
    due refcursor;
    places tid[];
begin
    open due for
        select c.id, c.ctid as place, pgqueue._moved_bytes(c.payload, c.body, c.headers, c.transport_headers) as bytes
        from pgqueue.scheduled_messages c
        where c.queue_name = q.name and c.due_at >= since and c.due_at <= at
        order by c.due_at, c.id limit wanted for update skip locked;
    places := (pgqueue._fetch_slice(due)).places;
    close due;
    -- Rows are deleted by ctid. By key, a plan could use another index and read the whole queue through it.
    with gone as (
        delete from pgqueue.scheduled_messages s where s.ctid = any (places) returning s.*
    ),
    recorded as (
        insert into pgqueue.requeued_messages (queue_name, check_at, id)
        select q.name, (select pgqueue._now()), d.id from gone d
    ),
    arrived as (
        insert into pgqueue.messages (
            id, queue_name, enqueued_at, visible_at, attempt_count, max_attempts, expires_at, message_id,
            payload, body, headers, claimed_by, last_error, transport_headers, transport_seq, claimed_attempt, kind
        )
        select
            d.id, q.name, d.enqueued_at, d.due_at, d.attempt_count, d.max_attempts, d.expires_at, d.message_id,
            d.payload, d.body, d.headers, d.claimed_by, d.last_error, d.transport_headers,
            -- At its old place, below those that claims have passed, only a sweep would find the message.
            case when q.priorities then nextval('pgqueue.message_id') end,
            -- No consumer has it, also if it is moved before it is due.
            nullif(d.attempt_count, 0), q.kind
        from gone d
        returning messages.id, messages.expires_at
    )
    -- Expired messages are moved as well, so that the sweep removes them, but they are not returned.
    select count(*), coalesce(array_agg(m.id) filter (where coalesce(m.expires_at > at, true)), '{}') into moved, ids
    from arrived m;
end;
$$;

-- Returns how many messages were removed, and whether some are left for a later call. With max_slices, which claims
-- pass, it also ends after that many slices, or 50 ms after at.
create function pgqueue._remove_spent_messages(
    q pgqueue.queues, ids bigint[], at timestamptz, max_slices int, out removed int, out has_more boolean
)
language plpgsql volatile as $$
declare
    spent refcursor;
    slice_ids bigint[];
    slices_left int := max_slices;
    died int;
    all_died int := 0;
begin
    removed := 0;
    has_more := false;
    begin
        if q.kind is not null then
            open spent for
                select m.id, null::tid as place, pgqueue._moved_bytes(m.payload, m.body, m.headers, m.transport_headers) as bytes
                from pgqueue.messages m, pgqueue._lookup_keys(q.name, ids) k
                where (m.kind = q.kind or m.kind is null)
                    and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
                    and m.visible_at <= at and not pgqueue._is_ready(m, at)
                for update of m skip locked;
        else
            open spent for
                select m.id, null::tid as place, pgqueue._moved_bytes(m.payload, m.body, m.headers, m.transport_headers) as bytes
                from pgqueue.messages_shared m, pgqueue._lookup_keys(q.name, ids) k
                where pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
                    and m.visible_at <= at and not pgqueue._is_ready(m, at)
                for update of m skip locked;
        end if;
        loop
            -- The verbs that only remove messages give no number of slices, and remove at least one slice.
            has_more := case
                when max_slices is null then removed > 0 and not pgqueue._has_time()
                -- A claim whose time has passed with reading removes one slice: otherwise the next one reads the same.
                else slices_left <= 0 or removed > 0 and pgqueue._now() > at + interval '50 ms' or not pgqueue._has_time()
            end;
            exit when has_more;
            slice_ids := (pgqueue._fetch_slice(spent)).ids;
            exit when slice_ids = '{}';
            slices_left := slices_left - 1;
            -- A message is returned as columns: one value would be detoasted, and compressed again.
            insert into pgqueue.dead_messages
            select (pgqueue._as_dead_letter(row(g.*)::pgqueue.messages, at, null)).* from pgqueue._delete_messages(q.name, q.kind, slice_ids) g
            where pgqueue._keeps_dead_letter(q, row(g.*)::pgqueue.messages)
            -- The same conflict as in _add_dead_letter.
            on conflict on constraint dead_messages_pkey do update
            set died_at = excluded.died_at, attempt_count = excluded.attempt_count, headers = excluded.headers,
                last_error = excluded.last_error, reason = excluded.reason;
            get diagnostics died = row_count;
            all_died := all_died + died;
            removed := removed + cardinality(slice_ids);
        end loop;
        close spent;
    exception when disk_full then
        -- The messages stay for a later sweep and block no others.
        removed := 0;
        has_more := false;
        return;
    end;
    perform pgqueue._count_dead(q, all_died);
end;
$$;

create function pgqueue._find_spent_messages(q pgqueue.queues, at timestamptz, after_id bigint, wanted int)
returns bigint[] language plpgsql stable as $$
declare
    fresh_from_id constant bigint := case when q.group_limit is null then coalesce(pg_sequence_last_value(q.fresh_from_id), 1) end;
    -- The highest bigint has no successor.
    from_id constant bigint := least(after_id, 9223372036854775806) + 1;
begin
    if q.group_limit is not null then
        -- Claims pass messages whose groups wait, so the register tells nothing about those with an attempt.
        return array(
            select m.id from pgqueue.messages m
            where m.kind = q.kind and m.queue_name || '' = q.name and m.attempt_count > 0 and m.id + 0 >= from_id
                and m.visible_at <= at and not pgqueue._is_ready(m, at)
            order by m.id limit wanted
        );
    end if;
    return array(
        select distinct w.id
        from (
            (
                select m.id
                from pgqueue._possible_ranges(q.name, from_id, fresh_from_id) as r
                cross join lateral (
                    select c.id from pgqueue.messages c
                    where c.queue_name = q.name and c.id >= lower(r) and c.id < upper(r)
                        and c.visible_at <= at and not pgqueue._is_ready(c, at)
                    order by c.id limit wanted
                ) m
                limit wanted
            )
            union all
            (
                -- Claims by plain SQL do not move the register. If the first messages above it show one, all are read.
                select c.id
                from (
                    select m.id, m.visible_at <= at and not pgqueue._is_ready(m, at) as is_spent from pgqueue.messages m
                    where m.queue_name = q.name and m.id >= greatest(from_id, fresh_from_id)
                    order by m.id
                    limit case
                        when not exists (
                            select
                            from (
                                select f.attempt_count from pgqueue.messages f
                                where f.queue_name = q.name and f.id >= greatest(from_id, fresh_from_id)
                                order by f.id limit 1000
                            ) f
                            where f.attempt_count > 0
                        ) then 1000
                    end
                ) c
                where c.is_spent
                limit wanted
            )
            union all
            (
                select m.id
                from (
                    select r.id from pgqueue.requeued_messages r
                    where r.queue_name = q.name and r.check_at >= (pgqueue._sweep_state_of(q.name, at)).first_check_at
                    order by r.check_at, r.id limit 10000
                ) c
                -- `offset 0` keeps the planner from a join that reads the whole queue.
                cross join lateral (
                    select w.id from pgqueue.messages w
                    where w.queue_name = q.name and w.id = c.id and w.visible_at <= at and not pgqueue._is_ready(w, at)
                    offset 0
                ) m
                where c.id >= from_id
            )
        ) w
        order by w.id
        limit wanted
    );
end;
$$;

create function pgqueue._remove_found_spent_messages(q pgqueue.queues, at timestamptz, wanted int)
returns int language plpgsql volatile as $$
declare
    ids bigint[] := '{0}'::bigint[];
    removed int := 0;
begin
    loop
        ids := pgqueue._find_spent_messages(q, at, ids[cardinality(ids)], least(wanted - removed, 1000));
        removed := removed + (pgqueue._remove_spent_messages(q, ids, at, null)).removed;
        exit when cardinality(ids) < 1000 or removed >= wanted or not pgqueue._has_time();
    end loop;
    return removed;
end;
$$;

create function pgqueue._merged_headers(own jsonb, added jsonb) returns jsonb
language sql immutable parallel safe as $$
    -- A failure is recorded even if its headers do not fit. The message then keeps its own headers.
    select case
        when added is null or jsonb_typeof(own) <> 'object' then own
        when octet_length((coalesce(own, '{}') || added)::text) > 65536 then own
        else coalesce(own, '{}') || added
    end
$$;

-- Opens a cursor over dead letters for _fetch_slice, lowest id first, with ids only over those. It locks what it reads.
create function pgqueue._open_dead_letters(queue_name text, ids bigint[], wanted int, waits boolean)
returns refcursor
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    dead refcursor;
begin
    open dead for execute
        'select d.id, d.ctid as place, pgqueue._moved_bytes(d.payload, d.body, d.headers, d.transport_headers) as bytes'
        ' from pgqueue.dead_messages d'
        || case
            when ids is null then ' where d.queue_name = $1 and d.id >= (pgqueue._sweep_state_of($1, ''-infinity'')).first_id'
            else ', pgqueue._lookup_keys($1, $2) k where pgqueue._matches_key(d.queue_name, d.id, $1, k.names, k.ids, k.id)'
        end
        || ' order by d.id limit $3 for update of d' || case when waits then '' else ' skip locked' end
    using queue_name, ids, wanted;
    return dead;
end;
$$;

-- The caller has locked the dead letters. If the headers do not fit, they are sent without pgqueue.dead_letter.
create function pgqueue._send_dead_letters(places tid[], target pgqueue.queues) returns int
language plpgsql volatile as $$
declare
    at constant timestamptz := pgqueue._now();
    n int;
begin
    -- A message gets an id of its own in the target. Functions skip ids that the target had not used.
    with gone as (
        delete from pgqueue.dead_messages d where d.ctid = any (places) returning d.*
    )
    insert into pgqueue.messages (
        queue_name, enqueued_at, visible_at, max_attempts, message_id, payload, body, headers, last_error, transport_headers,
        kind
    )
    select
        -- The claim whose sweep this is looks for messages that were visible when it began.
        target.name, g.enqueued_at, least(g.died_at, at), target.max_attempts, g.message_id, g.payload, g.body,
        pgqueue._merged_headers(g.headers, jsonb_build_object('pgqueue.dead_letter', jsonb_build_object(
            'queue', g.queue_name, 'id', g.id, 'reason', g.reason, 'attempts', g.attempt_count, 'died_at', g.died_at))),
        g.last_error, g.transport_headers, target.kind
    from gone g
    order by g.id;
    get diagnostics n = row_count;
    if pgqueue._count('enqueued', target.name, n) > 0 then
        perform pgqueue._wake_if_waiting(target, at);
    end if;
    return n;
end;
$$;

-- Claims of other queues write their dead letters to dead_messages as ever. The sweeps of the queue that takes them
-- send them as new messages, so no claim waits for the other queue.
create function pgqueue._take_dead_letters(q pgqueue.queues) returns void
language plpgsql volatile as $$
declare
    source pgqueue.queues;
    dead refcursor;
    places tid[];
    slices_left int := 8;
begin
    for source in select s.* from pgqueue.queues s where s.dead_letter_to = q.name order by s.name loop
        continue when not exists (
            select from pgqueue.dead_messages d
            where d.queue_name = source.name and d.id >= (pgqueue._sweep_state_of(source.name, '-infinity')).first_id);
        select d into dead from pgqueue._open_dead_letters(source.name, null, 1000, false) as d;
        while slices_left > 0 and pgqueue._has_time() loop
            places := (pgqueue._fetch_slice(dead)).places;
            exit when places = '{}';
            perform pgqueue._send_dead_letters(places, q);
            slices_left := slices_left - 1;
        end loop;
        close dead;
    end loop;
exception when disk_full then
    -- They stay in the other queues for a later sweep.
    null;
end;
$$;
-- Finds messages below fresh_from_id for a claim: expired claims, rolled-back claims, late commits, messages that came
-- due. The sweep walks over the ids from where the last one stopped, within a time budget, so that dead rows do not
-- slow down claims.

create function pgqueue._move_due_messages(q pgqueue.queues, at timestamptz, wanted int, since timestamptz)
returns bigint[] language plpgsql volatile as $$
declare
    moved_ids bigint[] := '{}'::bigint[];
    moved int;
    all_moved int := 0;
    next_due_at timestamptz;
    next_due bigint;
    announced_due constant bigint := pg_sequence_last_value(q.first_due_at);
    this_second constant bigint := pgqueue._to_micros(date_trunc('second', least(at, pgqueue._now())));
    is_unsettled boolean;
begin
    select s.due_at into next_due_at
    from pgqueue.scheduled_messages s
    where s.queue_name = q.name and s.due_at >= since
    order by s.due_at limit 1;
    if next_due_at <= at then
        begin
            for n in 1..8 loop
                select r.moved, moved_ids || r.ids into moved, moved_ids
                from pgqueue._move_due_slice(q, at, wanted - all_moved, since) r;
                all_moved := all_moved + moved;
                exit when moved = 0 or all_moved >= wanted or not pgqueue._has_time();
            end loop;
        exception when disk_full then
            -- Without space nothing is moved, and ready messages are still claimed: acknowledging them needs no space,
            -- and frees some.
            perform setval(q.first_due_at, pgqueue._to_micros(at + interval '1 s'));
            return '{}'::bigint[];
        end;
        -- A claim that finds enough due messages makes no sweep, so rows of requeued_messages would accumulate. This
        -- call therefore checks twice as many rows as it has added. After fewer than 50 messages, the scan past
        -- removed rows would cost more than it saves. Rows older than a minute are left to the sweep, because a long
        -- write transaction can keep first_check_at far below them.
        if cardinality(moved_ids) >= 50 and pgqueue._has_time() then
            perform pgqueue._prune_requeued(q, r.gone, r.last_time)
            from pgqueue._read_requeued(
                q, at, greatest((pgqueue._sweep_state_of(q.name, at)).first_check_at, at - interval '1 min'), -9223372036854775808,
                2 * cardinality(moved_ids)) r;
        end if;
        -- If claims find enough due messages, they make no sweep, which would record where the next scan may start.
        if pgqueue._has_time() then
            perform pgqueue._record_if_old(q);
        end if;

        select s.due_at into next_due_at
        from pgqueue.scheduled_messages s
        where s.queue_name = q.name and s.due_at >= since
        order by s.due_at limit 1;
    end if;
    next_due := coalesce(pgqueue._to_micros(next_due_at), 9223372036854775807);
    -- A transaction announces a due time before it commits. Until then its message is invisible here, and the register
    -- would pass the due time. So once a second, if nothing else is due, the scan starts at the first due time of the
    -- last minute. While a transaction that has written delayed messages runs, the register stays in the present
    -- second. The register is set first. If another due time is announced after that, it lowers the register. If it
    -- was announced before that, the statements below see its message, or find its transaction running.
    if next_due > pgqueue._to_micros(at) and next_due <> announced_due
        and (announced_due < this_second or next_due >= this_second + 1000000)
    then
        perform setval(q.first_due_at, next_due);
        is_unsettled := exists (
            select from pg_locks l
            where l.locktype = 'relation' and l.relation = 'pgqueue.scheduled_messages'::regclass
                and l.mode = 'RowExclusiveLock' and l.granted and l.pid is distinct from pg_backend_pid()
                and l.database = (select d.oid from pg_database d where d.datname = current_database())
        );
        select s.due_at into next_due_at
        from pgqueue.scheduled_messages s
        where s.queue_name = q.name and s.due_at >= greatest((pgqueue._sweep_state_of(q.name, at)).first_due_at, at - interval '1 min')
        order by s.due_at limit 1;
        next_due := coalesce(pgqueue._to_micros(next_due_at), 9223372036854775807);
        if is_unsettled then
            next_due := least(next_due, greatest(announced_due, this_second + 999999));
        end if;
    end if;
    if next_due is distinct from pg_sequence_last_value(q.first_due_at) then
        perform setval(q.first_due_at, next_due);
    end if;
    return moved_ids;
end;
$$;

create function pgqueue._lock_ready(
    q pgqueue.queues, ids bigint[], taken bigint[], at timestamptz, wanted int
) returns bigint[]
language plpgsql volatile as $$
begin
    -- The result is ordered by id, as the index is searched for the ids in order. An explicit `order by` would add a
    -- sort.
    if q.kind is not null then
        return array(
            select m.id from pgqueue.messages m, pgqueue._lookup_keys(q.name, ids) k
            where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id) and m.id <> all (taken) and pgqueue._is_ready(m, at)
            limit wanted for update of m skip locked
        );
    end if;
    return array(
        select m.id from pgqueue.messages_shared m, pgqueue._lookup_keys(q.name, ids) k
        where pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id) and m.id <> all (taken) and pgqueue._is_ready(m, at)
        limit wanted for update of m skip locked
    );
end;
$$;

create function pgqueue._keep_ready(q pgqueue.queues, ids bigint[], at timestamptz) returns bigint[]
language plpgsql volatile as $$
declare
    ready_ids constant bigint[] := pgqueue._lock_ready(q, ids, '{}', at, cardinality(ids));
begin
    if cardinality(ready_ids) < cardinality(ids) then
        -- The next claim sweeps what the walk has passed, and walks on.
        perform setval(q.next_sweep_at, 1);
    end if;
    return ready_ids;
end;
$$;

-- Locks up to wanted ready messages between pairs of positions, without those in taken, and returns them in order. A
-- walk that is over returns the positions of visible messages that are not ready, too.
create function pgqueue._lock_levels(
    q pgqueue.queues, from_positions bigint[], below_positions bigint[], taken bigint[], at timestamptz, wanted int,
    out ids bigint[], out positions bigint[]
)
language plpgsql volatile as $$
begin
    -- Within a priority the index returns the messages by place. An `order by` would sort the whole queue, as the
    -- planner cannot know that only a partition with this index is left at run time. The limit inside keeps the scan
    -- from locking more than is wanted.
    select coalesce(array_agg(w.id), '{}'), array_agg(w.position) into ids, positions
    from (
        select r.id, r.position
        from unnest(from_positions, below_positions) as l (from_position, below_position)
        cross join lateral (
            select m.id, pgqueue._level_position(m) as position
            from pgqueue.messages m
            where pgqueue._is_in_queue(m, q.kind, q.name)
                and pgqueue._level_position(m) >= l.from_position and pgqueue._level_position(m) < l.below_position
                and m.id <> all (taken)
                and (pgqueue._is_ready(m, at) or m.visible_at <= at and pgqueue._is_walk_over(at))
            limit wanted for update skip locked
        ) r
        limit wanted
    ) w;
    if pgqueue._is_walk_over(at) then
        ids := pgqueue._keep_ready(q, ids, at);
    end if;
end;
$$;

create function pgqueue._sweep_requeued(
    q pgqueue.queues, taken bigint[], at timestamptz, wanted int, since timestamptz
) returns bigint[]
language plpgsql volatile as $$
declare
    candidate_ids bigint[] := '{}'::bigint[];
    seen_at timestamptz := since;
    seen_id bigint := -9223372036854775808;
    page int := least(greatest(20, wanted), 500);
    rows record;
    visible_ids bigint[] := '{}'::bigint[];
begin
    -- The rows are read in pages, as another transaction may lock any number of these messages for long. The first page
    -- is small, as each row costs several buffers and the first messages are often ready.
    loop
        select r.* into rows from pgqueue._read_requeued(q, at, seen_at, seen_id, page) r;
        exit when rows.n = 0;
        seen_at := rows.last_time;
        seen_id := rows.last_id;
        perform pgqueue._prune_requeued(q, rows.gone, seen_at);
        if rows.visible_ids is not null then
            visible_ids := visible_ids || rows.visible_ids;
            candidate_ids := candidate_ids || pgqueue._lock_ready(
                q, rows.visible_ids, taken || candidate_ids, at, wanted - cardinality(candidate_ids));
        end if;
        -- With wanted 0, only what has gone or is spent is removed.
        exit when rows.n < page or wanted > 0 and cardinality(candidate_ids) >= wanted
            or pgqueue._now() > at + case wanted when 0 then interval '20 ms' else interval '50 ms' end;
        page := least(2 * page, 500);
    end loop;
    if visible_ids <> '{}' then
        perform pgqueue._remove_spent_messages(q, visible_ids, at, 8);
    end if;
    return candidate_ids;
end;
$$;

-- Checks at a small bounded cost the last recent_count ids below fresh_from_id, where transactions roll back or commit
-- late, or the places below the register of each priority. Returns up to wanted ids of ready messages, locked.
create function pgqueue._sweep_recent(
    q pgqueue.queues, taken bigint[], at timestamptz, wanted int, fresh_from_id bigint, recent_count int
) returns bigint[]
language plpgsql volatile as $$
declare
    floors bigint[];
    visible_ids bigint[];
    candidate_ids bigint[];
begin
    if q.priorities then
        floors := pgqueue._level_floors(pgqueue._level_registers(q));
        return (pgqueue._lock_levels(
            q, array(select greatest(pgqueue._level_start(f), f - recent_count) from unnest(floors) as f), floors, taken, at,
            wanted)).ids;
    end if;
    visible_ids := array(
        select i
        from pgqueue._possible_ranges(q.name, fresh_from_id - recent_count, fresh_from_id) as r
        cross join lateral generate_series(lower(r), upper(r) - 1, 1000) as f
        cross join lateral pgqueue._read_messages(q, f, f + least(1000, upper(r) - f), at, 1000) as m
        cross join lateral unnest(m.ready_ids || m.spent_ids) as i
        limit 1000);
    if visible_ids = '{}' then
        return visible_ids;
    end if;
    candidate_ids := pgqueue._lock_ready(q, visible_ids, taken, at, wanted);
    perform pgqueue._remove_spent_messages(q, visible_ids, at, 8);
    return candidate_ids;
end;
$$;

create function pgqueue._do_periodic_work(q pgqueue.queues, at timestamptz) returns void
language plpgsql volatile as $$
begin
    perform pgqueue._call_if_due('housekeeping', at), pgqueue._call_if_due('maintenance', at);
    if exists (select from pgqueue.queues s where s.dead_letter_to = q.name) then
        perform pgqueue._take_dead_letters(q);
    end if;
end;
$$;

create function pgqueue._sweep_other_tables(q pgqueue.queues, state pgqueue.sweep_state, at timestamptz)
returns void language plpgsql volatile as $$
begin
    perform pgqueue._record_if_old(q);
    perform pgqueue._move_due_messages(q, at, 100, state.first_due_at);
    -- Claims do not need the rows of requeued_messages, as the indexes list all messages.
    perform pgqueue._sweep_requeued(q, '{}', at, 0, state.first_check_at);
end;
$$;

create function pgqueue._state_for_sweep(q pgqueue.queues, at timestamptz, fresh_from_id bigint)
returns pgqueue.sweep_state language plpgsql volatile as $$
declare
    s pgqueue.sweep_state;
    next_id constant bigint := pgqueue._register_value(q.sweep_resume_id);
begin
    select sweep_state.* into s from pgqueue.sweep_state where sweep_state.queue_name = q.name;
    if not found then
        -- The row was deleted by hand: nothing is known, so the sweep walks over all ids again.
        insert into pgqueue.sweep_state (queue_name) values (q.name) on conflict do nothing returning * into s;
        if not found then
            return s;
        end if;
    end if;
    -- If there are no new ids to record, the other tables can still hold many removed rows. Then next_id is not 1,
    -- because the last full pass has read many pages.
    if greatest(s.first_due_at, s.first_check_at) > '-infinity' and date_trunc('hour', s.recorded_at) <> date_trunc('hour', at)
        or (
            s.settled_id < fresh_from_id - 1
            or pgqueue._first_possible_id(s) < least(s.settled_id + 1, fresh_from_id) or next_id <> 1
        )
        and (
            -- After a short full pass there is little to skip, so ids are recorded less often. In a queue that shares
            -- the server with many others almost every claim sweeps, and recording would be most of the cost.
            at - s.recorded_at
                not between interval '0' and case
                    when next_id = 1 then interval '30 s'
                    when fresh_from_id - s.bound_id between 1000 and 1000000000000 then interval '100 ms'
                    else interval '1 s'
                end
            -- The writers of a long wait have ended: record at once.
            or s.writers <> '{}' and s.recorded_at > s.bound_at and not s.writers && pgqueue._running_writers()
        )
    then
        if pgqueue._record_vacant_ids(q, at, fresh_from_id) then
            -- A long write transaction may have left messages anywhere above the head: start there again.
            perform setval(q.sweep_resume_id, 1);
        end if;
        select sweep_state.* into s from pgqueue.sweep_state where sweep_state.queue_name = q.name;
    end if;
    return s;
end;
$$;

create function pgqueue._end_sweep(
    q pgqueue.queues, at timestamptz, has_enough boolean, spent_ids bigint[], resume_id bigint
) returns void
language plpgsql volatile as $$
declare
    has_more boolean := false;
begin
    perform setval(q.sweep_resume_id, greatest(resume_id, 1));
    -- Ready messages come first. What is left here is removed by later sweeps.
    if spent_ids <> '{}' then
        select r.has_more into has_more from pgqueue._remove_spent_messages(q, spent_ids, at, 8) r;
    end if;
    -- If there may be more messages, the next claim continues the sweep at once.
    perform setval(q.next_sweep_at, case when has_more or has_enough then 1 else pgqueue._to_micros(
        pgqueue._now() + least(greatest(interval '50 ms', 20 * (pgqueue._now() - at)), interval '500 ms')) end);
end;
$$;

-- Makes one sweep below fresh_from_id: appends to taken the ids of ready messages, locked, until there are wanted ids,
-- and sets the time of the next sweep. If fewer were found, that is after 20 times the duration of this sweep, at least
-- 50 ms and at most 500 ms, as messages that commit late wait for it; else at once.
create function pgqueue._sweep(
    q pgqueue.queues, taken bigint[], at timestamptz, wanted int, fresh_from_id bigint
) returns bigint[] language plpgsql volatile as $$
declare
    s pgqueue.sweep_state;
    -- Where there can be messages that claims have passed: ids or, in a queue with priorities, positions.
    possible int8multirange;
    head_id bigint;
    next_id bigint;
    start_id bigint;
    end_id bigint := fresh_from_id;
    started_at timestamptz;
    candidate_ids bigint[] := taken;
    id_range int8range;
    span bigint;
    below_id bigint;
    page record;
    spent_ids bigint[] := '{}'::bigint[];
    is_far_below_fresh boolean;
    is_full boolean := false;
    pages_before bigint;
begin
    -- For 50 ms, concurrent claims do not start another sweep.
    perform setval(q.next_sweep_at, pgqueue._to_micros(at + interval '50 ms')), pgqueue._do_periodic_work(q, at);
    s := pgqueue._state_for_sweep(q, at, fresh_from_id);
    if s.queue_name is null then
        return candidate_ids;
    end if;
    next_id := pgqueue._register_value(q.sweep_resume_id);
    started_at := pgqueue._now();
    pages_before := pgqueue._pages_read(q);
    -- From where the last sweep stopped up to fresh_from_id, and then from the head to that place: a full pass.
    if q.priorities then
        possible := pgqueue._passed_levels(q, coalesce(s.first_id, 1));
        head_id := coalesce(lower(possible), 1);
    else
        head_id := pgqueue._first_possible_id(s);
        possible := int8multirange(int8range(head_id, greatest(head_id, fresh_from_id))) - s.vacant_ids;
    end if;
    next_id := case when next_id >= head_id and next_id < fresh_from_id then next_id else head_id end;
    is_far_below_fresh := not q.priorities and next_id < fresh_from_id - 4096;
    if is_far_below_fresh and cardinality(candidate_ids) < wanted then
        -- The full pass takes long. Messages of transactions that have just rolled back or committed are found here.
        candidate_ids := candidate_ids || pgqueue._sweep_recent(
            q, candidate_ids, at, wanted - cardinality(candidate_ids), fresh_from_id, 4096);
    end if;
    start_id := next_id;
    <<round>>
    loop
        -- In a queue with priorities what comes back has its place beyond those that claims have passed.
        if next_id = head_id and cardinality(candidate_ids) < wanted and not q.priorities then
            candidate_ids := candidate_ids || pgqueue._sweep_requeued(
                q, candidate_ids, at, wanted - cardinality(candidate_ids),
                pgqueue._discard_future_time(s.first_check_at, at));
            if cardinality(candidate_ids) < wanted then
                candidate_ids := candidate_ids || pgqueue._move_due_messages(
                    q, at, wanted - cardinality(candidate_ids), pgqueue._discard_future_time(s.first_due_at, at));
            end if;
        end if;
        for id_range in
            select r from unnest(possible * int8multirange(int8range(next_id, greatest(next_id, end_id)))) as r
        loop
            next_id := lower(id_range);
            span := 1024;
            while next_id < upper(id_range) loop
                exit round when cardinality(candidate_ids) >= wanted;
                below_id := next_id + least(span, upper(id_range) - next_id);
                select r.* into page from pgqueue._read_messages(q, next_id, below_id, at, 1000, q.priorities) r;
                next_id := coalesce(page.ids[1000] + 1, below_id);
                span := case when page.ids[1000] is null then pgqueue._next_span(span) else span end;
                spent_ids := spent_ids || page.spent_ids;
                if page.ready_ids is not null then
                    candidate_ids := candidate_ids || pgqueue._lock_ready(
                        q, page.ready_ids, candidate_ids, at, wanted - cardinality(candidate_ids));
                    if cardinality(candidate_ids) >= wanted then
                        -- The next sweep continues here.
                        next_id := case when q.priorities then page.ids[1] else candidate_ids[cardinality(candidate_ids)] + 1 end;
                    end if;
                end if;
                exit round when pgqueue._now() > started_at + interval '10 ms';
            end loop;
        end loop;
        is_full := end_id < fresh_from_id or start_id = head_id;
        exit round when is_full or cardinality(candidate_ids) >= wanted;
        next_id := head_id;
        end_id := start_id;
    end loop;
    if cardinality(candidate_ids) < wanted and not is_full and not is_far_below_fresh then
        candidate_ids := candidate_ids || pgqueue._sweep_recent(
            q, candidate_ids, at, wanted - cardinality(candidate_ids), fresh_from_id, 4096);
    end if;
    -- 1 if the full pass read few pages: the next sweep starts at the head, and needs no new record. After each full
    -- pass of a queue with priorities the next sweep starts with the highest one.
    perform pgqueue._end_sweep(q, at, cardinality(candidate_ids) >= wanted, spent_ids, case
        when cardinality(candidate_ids) >= wanted
            or not (q.priorities and is_full) and pgqueue._pages_read(q) - pages_before > 50
            then next_id else 1 end);
    return candidate_ids;
end;
$$;
-- Message groups. At most group_limit messages of a group are in flight at a time, in the order of their ids. Whether a
-- group is blocked is read from the rows of its messages whenever a claim looks at it. So nothing has to be kept up to
-- date when a message leaves, by whatever statement, and no group can stay blocked by mistake.
-- The table of such queues has two more indexes, which list the messages by queue and group.

-- Where a message stands in the order in which claims visit a queue with groups: its id if it has no group, and from
-- 4611686018427387904 (2^62) on a hash of the group. Two groups with the same hash count as one. Inlined.
create function pgqueue._group_position(headers jsonb, id bigint) returns bigint
language sql immutable parallel safe as $$
    select coalesce(
        (hashtextextended(headers ->> 'pgqueue.group', 0) & 4611686018427387902) + 4611686018427387904, id)
$$;

create function pgqueue._is_in_group(
    m pgqueue.messages, kind bigint, name text, place bigint, first_id bigint
) returns boolean
language sql immutable parallel safe as $$
    select pgqueue._is_in_queue(m, kind, name) and pgqueue._group_position(m.headers, m.id) = place and m.id + 0 >= first_id
$$;

-- How many of the places are left, exact if they are fewer than wanted. claimed_ids are the claimed messages, also
-- those whose claims have ended. Such a message takes a place while another transaction has locked its row: it may have
-- extended the claim before the end. An extension that locks the row later finds the claim ended. The caller holds the
-- lock of the limit.
create function pgqueue._places_left(
    q pgqueue.queues, places int, claimed_ids bigint[], at timestamptz, wanted int
) returns int
language plpgsql volatile as $$
declare
    ended_ids bigint[];
begin
    places := places - cardinality(claimed_ids);
    if places >= wanted then
        return places;
    end if;
    ended_ids := array(
        select m.id from pgqueue.messages m, pgqueue._lookup_keys(q.name, claimed_ids) k
        where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id) and m.visible_at <= at);
    if ended_ids <> '{}' then
        begin
            places := places + (
                select count(*)
                from (
                    select from pgqueue.messages m, pgqueue._lookup_keys(q.name, ended_ids) k
                    where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id) and m.visible_at <= at
                    limit wanted - places for update of m skip locked
                ) l
            );
            -- Only an error releases the locks before the transaction ends, which may take long.
            perform pgqueue._raise('queue_busy', q.name, 'claim');
        exception when sqlstate 'PQ004' then
            null;
        end;
    end if;
    return greatest(0, places);
end;
$$;

-- Locks up to wanted messages of the groups at these positions, whose locks the caller holds, and returns the ready
-- ones and the first spent one of each. The claim removes the latter, and then looks again.
create function pgqueue._claim_groups(
    q pgqueue.queues, at timestamptz, positions bigint[], first_id bigint, wanted int,
    out ids bigint[], out spent_ids bigint[]
)
language plpgsql volatile as $$
begin
    -- What was committed after the walk can be in flight, or can be the first message.
    select coalesce(array_agg(g.id) filter (where g.is_ready), '{}'), array_agg(g.id) filter (where not g.is_ready)
    into ids, spent_ids
    from (
        select m.id, m.is_ready
        from unnest(positions) as p (place)
        cross join lateral (
            select array(
                select c.id from pgqueue.messages c
                where pgqueue._is_in_group(c, q.kind, q.name, p.place, first_id) and c.attempt_count > 0
                    and (c.visible_at > at or not pgqueue._is_unclaimed(c))
            ) as ids,
            -- With a limit of one, no message passes the first one, also if another transaction has locked it.
            case q.group_limit
                when 1 then (
                    select c.id from pgqueue.messages c
                    where pgqueue._is_in_group(c, q.kind, q.name, p.place, first_id) limit 1
                )
                else 9223372036854775807
            end as last_id
            offset 0
        ) claimed
        cross join lateral (
            select w.id, w.is_ready, count(*) filter (where not w.is_ready) over (rows unbounded preceding) as spent
            from (
                select c.id, pgqueue._is_ready(c, at) as is_ready from pgqueue.messages c
                where pgqueue._is_in_group(c, q.kind, q.name, p.place, first_id) and c.id + 0 <= claimed.last_id
                    and c.visible_at <= at
                limit case claimed.ids
                    when '{}' then q.group_limit
                    else pgqueue._places_left(q, q.group_limit, claimed.ids, at, q.group_limit)
                end
                for update skip locked
            ) w
        ) m
        where case when m.is_ready
            -- What has no attempts left holds the later ones like the dead letter that it will be.
            then not (q.on_dead = 'hold' and (m.spent > 0 or pgqueue._has_group_dead_letter(q.name, p.place)))
            -- One for each group: the claim reads the group from there on.
            else m.spent = 1 end
        limit wanted
    ) g;
end;
$$;

create function pgqueue._has_group_dead_letter(queue_name text, place bigint) returns boolean
language sql stable as $$
    select exists (
        select from pgqueue.dead_messages d
        where d.queue_name = _has_group_dead_letter.queue_name and d.headers ->> 'pgqueue.group' is not null
            and pgqueue._group_position(d.headers, d.id) = place
    )
$$;

create function pgqueue._claim_ungrouped(q pgqueue.queues, at timestamptz, wanted int, also_below boolean)
returns bigint[] language plpgsql volatile as $$
declare
    fresh_from_id bigint := pgqueue._register_value(q.fresh_from_id);
    first_id constant bigint := (pgqueue._sweep_state_of(q.name, '-infinity')).first_id;
    candidate_ids bigint[];
    visible_ids bigint[];
begin
    candidate_ids := array(
        select m.id from pgqueue.messages m
        where pgqueue._is_in_queue(m, q.kind, q.name) and pgqueue._group_position(m.headers, m.id) >= fresh_from_id
            and pgqueue._group_position(m.headers, m.id) < 4611686018427387904
            and (pgqueue._is_ready(m, at) or m.visible_at <= at and pgqueue._is_walk_over(at))
        limit wanted for update skip locked
    );
    if candidate_ids <> '{}' then
        perform setval(q.fresh_from_id, candidate_ids[cardinality(candidate_ids)] + 1);
    end if;
    if pgqueue._is_walk_over(at) then
        candidate_ids := pgqueue._lock_ready(q, candidate_ids, '{}', at, wanted);
    end if;
    if also_below or cardinality(candidate_ids) < wanted then
        visible_ids := array(
            select m.id from pgqueue.messages m
            where pgqueue._is_in_queue(m, q.kind, q.name) and pgqueue._group_position(m.headers, m.id) >= first_id
                and pgqueue._group_position(m.headers, m.id) < 4611686018427387904
                and m.visible_at <= at and m.id <> all (candidate_ids)
            limit greatest(1000, wanted)
        );
        if visible_ids <> '{}' then
            candidate_ids := candidate_ids || pgqueue._lock_ready(
                q, visible_ids, candidate_ids, at, wanted - cardinality(candidate_ids));
            -- Each maintenance sets the register back, so a claim without time removes a slice.
            perform pgqueue._remove_spent_messages(q, visible_ids, at, case when not pgqueue._is_walk_over(at) then 8 end);
        end if;
    end if;
    return candidate_ids;
end;
$$;

create function pgqueue._maintain_groups(q pgqueue.queues, at timestamptz) returns void
language plpgsql volatile as $$
declare
    state constant pgqueue.sweep_state := pgqueue._sweep_state_of(q.name, at);
begin
    perform setval(q.next_sweep_at, pgqueue._to_micros(at + interval '500 ms'));
    perform pgqueue._do_periodic_work(q, at);
    perform pgqueue._sweep_other_tables(q, state, at);
    -- If there is no message without a group, claims look for one only after they have looked for others.
    perform setval(q.fresh_from_id, coalesce(
        (
            select m.id from pgqueue.messages m
            where pgqueue._is_in_queue(m, q.kind, q.name) and pgqueue._group_position(m.headers, m.id) >= state.first_id
                and pgqueue._group_position(m.headers, m.id) < 4611686018427387904
            limit 1
        ), 4611686018427387904));
end;
$$;

-- Visits the groups from one position to another and locks up to wanted of those that have visible messages. Returns
-- the locked ones, and where to go on; null at the end.
create function pgqueue._walk_groups(
    q pgqueue.queues, at timestamptz, from_position bigint, below_position bigint, first_id bigint, wanted int,
    out locked bigint[], out next_position bigint
)
language plpgsql volatile as $$
declare
    -- With a higher limit each step counts the messages in flight, so a walk has fewer steps: between two walks the
    -- claim looks at the clock.
    most_steps constant int := case q.group_limit when 1 then 500 else 100 end;
begin
    -- With a limit of one, each step of the walk is one search of the index, so a group costs the same however many
    -- messages it has. A group whose first message is not visible is blocked. The lock keeps two claims from
    -- taking two messages of a group, as neither sees what the other has not committed. A group that another
    -- transaction has locked waits for its next turn.
    if q.group_limit = 1 and q.on_dead <> 'hold' then
        -- The second statement does the same, but a claim of one message takes a twentieth longer with it.
        with recursive walk as (
            select 0 as n, from_position - 1 as position, false as is_locked, 0 as found
            union all
            select w.n + 1, s.position, h.is_locked, w.found + h.is_locked::int
            from walk w
            cross join lateral (
                select pgqueue._group_position(m.headers, m.id) as position, m.visible_at <= at as is_visible
                from pgqueue.messages m
                where pgqueue._is_in_queue(m, q.kind, q.name)
                    and pgqueue._group_position(m.headers, m.id) > w.position
                    and pgqueue._group_position(m.headers, m.id) < below_position
                    -- PostgreSQL compares it in the index, so no row that was removed before is read.
                    and m.id + 0 >= first_id
                limit 1
            ) s
            cross join lateral (
                -- The lock of a group that gives no message would keep others from it until the transaction ends.
                select case when s.is_visible
                    then pg_try_advisory_xact_lock(hashint8extended(s.position, q.queue_id)) else false end as is_locked
                offset 0
            ) h
            where w.found < wanted and w.n < most_steps
        )
        select
            array_agg(w.position) filter (where w.is_locked),
            case when max(w.found) >= wanted or max(w.n) >= most_steps then max(w.position) + 1 end
        into locked, next_position
        from walk w;
        return;
    end if;
    with recursive walk as (
        select 0 as n, from_position - 1 as position, false as is_locked, 0 as found
        union all
        select w.n + 1, s.position, h.is_locked, w.found + h.is_locked::int
        from walk w
        cross join lateral (
            select
                pgqueue._group_position(m.headers, m.id) as position, m.visible_at <= at as is_visible, pgqueue._is_ready(m, at) as is_ready
            from pgqueue.messages m
            where pgqueue._is_in_queue(m, q.kind, q.name)
                and pgqueue._group_position(m.headers, m.id) > w.position
                and pgqueue._group_position(m.headers, m.id) < below_position and m.id + 0 >= first_id
            limit 1
        ) s
        cross join lateral (
            -- Of a group that waits for a dead letter, spent messages are removed: at its start, or claimed before.
            select case
                when case when q.group_limit = 1 then s.is_visible else
                        q.group_limit > (
                            select count(*)
                            from (
                                select from pgqueue.messages c
                                where pgqueue._is_in_group(c, q.kind, q.name, s.position, first_id)
                                    and c.attempt_count > 0 and c.visible_at > at
                                limit q.group_limit
                            ) f
                        )
                        and (s.is_visible or (
                            select true from pgqueue.messages c
                            where pgqueue._is_in_group(c, q.kind, q.name, s.position, first_id) and c.visible_at <= at
                            limit 1
                        ) is not null)
                    end
                    and not (q.on_dead = 'hold' and s.is_visible = s.is_ready
                        and pgqueue._has_group_dead_letter(q.name, s.position)
                        and (q.group_limit = 1 or (
                            select true from pgqueue.messages c
                            where pgqueue._is_in_group(c, q.kind, q.name, s.position, first_id)
                                and c.attempt_count > 0 and c.visible_at <= at and not pgqueue._is_ready(c, at)
                            limit 1
                        ) is null))
                then pg_try_advisory_xact_lock(hashint8extended(s.position, q.queue_id)) else false end as is_locked
            offset 0
        ) h
        where w.found < wanted and w.n < most_steps
    )
    select
        array_agg(w.position) filter (where w.is_locked),
        case when max(w.found) >= wanted or max(w.n) >= most_steps then max(w.position) + 1 end
    into locked, next_position
    from walk w;
end;
$$;

create function pgqueue._remove_spent_of_groups(q pgqueue.queues, ids bigint[], at timestamptz) returns int
language plpgsql volatile as $$
begin
    -- Their groups can have many more.
    return (pgqueue._remove_spent_messages(q, array(
        select distinct s.id
        from pgqueue._lookup_keys(q.name, _remove_spent_of_groups.ids) k, pgqueue.messages m
        cross join lateral (
            select c.id, c.visible_at <= at and not pgqueue._is_ready(c, at) as is_spent from pgqueue.messages c
            where pgqueue._is_in_group(c, q.kind, q.name, pgqueue._group_position(m.headers, m.id), m.id)
            limit 100
        ) s
        where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id) and s.is_spent
    ), at, 8)).removed;
end;
$$;

create function pgqueue._claim_candidates_grouped(q pgqueue.queues, at timestamptz, wanted int)
returns bigint[] language plpgsql volatile as $$
declare
    now_micros constant bigint := pgqueue._to_micros(at);
    first_due constant bigint := pgqueue._register_value(q.first_due_at);
    is_maintenance_due boolean :=
        pgqueue._register_value(q.next_sweep_at) - now_micros not between 1 and 15000000;
    -- Half of the claims look for messages without a group first, so that both kinds of messages are claimed.
    ungrouped_first constant boolean :=
        pgqueue._register_value(q.fresh_from_id) < 4611686018427387904 and random() < 0.5;
    first_position constant bigint := 4611686018427387904;
    started_from constant bigint := greatest(pgqueue._register_value(q.sweep_resume_id), first_position);
    from_position bigint := started_from;
    below_position bigint := 9223372036854775807;
    first_id constant bigint := (pgqueue._sweep_state_of(q.name, '-infinity')).first_id;
    locks_left int := 100;
    walk record;
    given record;
    spent_ids bigint[] := '{}'::bigint[];
    walks int := 0;
    candidate_ids bigint[] := '{}'::bigint[];
    due_ids bigint[];
    ungrouped_ids bigint[];
begin
    if first_due <= now_micros then
        -- Moved messages stay in messages while their groups are blocked.
        due_ids := pgqueue._move_due_messages(q, at, greatest(wanted, 20), pgqueue._from_micros(first_due - 1));
        -- A claim whose time is over leaves the maintenance to the next one, as in _claim_candidates.
        is_maintenance_due := is_maintenance_due and (due_ids = '{}' or pgqueue._has_time());
    end if;
    if is_maintenance_due then
        perform pgqueue._maintain_groups(q, at);
    end if;
    if ungrouped_first then
        candidate_ids := pgqueue._claim_ungrouped(q, at, wanted, is_maintenance_due);
    end if;
    ungrouped_ids := candidate_ids;
    while cardinality(candidate_ids) < wanted and locks_left > 0 loop
        walk := pgqueue._walk_groups(
            q, at, from_position, below_position, first_id, least(wanted - cardinality(candidate_ids), locks_left));
        if walk.locked is not null then
            -- The statements below see what the last holders of the groups have committed, if the snapshot is new.
            if pgqueue._has_fixed_snapshot() then
                perform pgqueue._require_current_snapshot(format('queue %L', q.name));
            end if;
            locks_left := locks_left - cardinality(walk.locked);
            given := pgqueue._claim_groups(q, at, walk.locked, first_id, wanted - cardinality(candidate_ids));
            candidate_ids := candidate_ids || given.ids;
            spent_ids := spent_ids || given.spent_ids;
        end if;
        from_position := walk.next_position;
        if from_position is null and (below_position = started_from or started_from = first_position) then
            -- No group has a ready message. The successors of removed ones may be ready.
            exit when candidate_ids <> ungrouped_ids or spent_ids = '{}'
                or pgqueue._remove_spent_of_groups(q, spent_ids, at) = 0;
            spent_ids := '{}';
            from_position := started_from;
            below_position := 9223372036854775807;
        elsif from_position is null then
            from_position := first_position;
            below_position := started_from;
        end if;
        -- A claim that was delayed, or that began behind the last group, walks a second time.
        walks := walks + 1;
        exit when walks > 1 and pgqueue._now() > at + interval '20 ms';
    end loop;
    if spent_ids <> '{}' then
        perform pgqueue._remove_spent_of_groups(q, spent_ids, at);
    end if;
    -- The next claim continues after the last group that this claim has visited, so that all groups are visited.
    if from_position is distinct from started_from then
        from_position := setval(q.sweep_resume_id, coalesce(from_position, first_position));
    end if;
    if cardinality(candidate_ids) < wanted and not ungrouped_first then
        candidate_ids := candidate_ids || pgqueue._claim_ungrouped(
            q, at, wanted - cardinality(candidate_ids), is_maintenance_due);
    end if;
    return candidate_ids;
end;
$$;
-- In a queue with priorities a claim takes the messages with the highest priority first. The tables of such queues have
-- an index that lists the messages by queue, priority and then place. For each priority a register holds the position
-- from which claims read this index, so that they read no dead entries of consumed messages.

create function pgqueue._walk_levels(
    q pgqueue.queues, at timestamptz, taken bigint[], wanted int, oldest_first boolean
) returns bigint[]
language plpgsql volatile as $$
declare
    registers constant regclass[] := pgqueue._level_registers(q);
    floors bigint[] := pgqueue._level_floors(registers);
    oldest bigint;
    found_ids bigint[];
    positions bigint[];
begin
    if oldest_first then
        -- Each message is the oldest one at some time, so none waits for ever.
        select f.floor into oldest
        from unnest(floors) as f (floor)
        cross join lateral (
            select pgqueue._level_position(m) as position
            from pgqueue.messages m
            where pgqueue._is_in_level(m, q.kind, q.name, f.floor)
                and (pgqueue._is_ready(m, at) or m.visible_at <= at and pgqueue._is_walk_over(at))
            limit 1
        ) w
        order by w.position - pgqueue._level_start(w.position) limit 1;
        if found then
            floors := oldest || array_remove(floors, oldest);
        end if;
    end if;
    select l.ids, l.positions into found_ids, positions
    from pgqueue._lock_levels(
        q, floors, array(select pgqueue._level_start(f) + 576460752303423488 from unnest(floors) as f), taken, at, wanted) l;
    perform setval(registers[(max(p) >> 59) + 1], max(p) + 1) from unnest(positions) as p group by p >> 59;
    return found_ids;
end;
$$;

create function pgqueue._sweep_levels(q pgqueue.queues, taken bigint[], at timestamptz, wanted int)
returns bigint[] language plpgsql volatile as $$
declare
    registers constant regclass[] := pgqueue._level_registers(q);
    state constant pgqueue.sweep_state := pgqueue._sweep_state_of(q.name, at);
begin
    if state.recorded_at is null or at - state.recorded_at not between interval '0' and interval '1 s' then
        perform pgqueue._sweep_other_tables(q, state, at);
    end if;
    -- The registers move to the first ready message of each priority, or beyond the last message if none is ready.
    -- Otherwise each claim of a lower priority would read the messages before it, such as expired ones. The sweep finds
    -- these. The time is read in this statement. At an earlier time, messages that were sent since would not be ready.
    perform setval(registers[(f.floor >> 59) + 1], coalesce(
        (
            select pgqueue._level_position(m) from pgqueue.messages m
            where pgqueue._is_in_level(m, q.kind, q.name, f.floor)
                and (pgqueue._is_ready(m, (select pgqueue._now())) or pgqueue._now() > at + interval '20 ms')
            limit 1
        ),
        (
            select max(pgqueue._level_position(m)) + 1 from pgqueue.messages m
            where pgqueue._is_in_level(m, q.kind, q.name, f.floor)
        )))
    from unnest(pgqueue._level_floors(registers)) as f (floor)
    where not (
        select pgqueue._is_ready(m, (select pgqueue._now())) from pgqueue.messages m
        where pgqueue._is_in_level(m, q.kind, q.name, f.floor)
        limit 1
    );
    return pgqueue._sweep(q, taken, at, wanted, 9223372036854775807);
end;
$$;

create function pgqueue._set_levels_back(q pgqueue.queues, ids bigint[]) returns void
language plpgsql volatile as $$
declare
    registers constant regclass[] := pgqueue._level_registers(q);
begin
    perform setval(
        registers[(min(w.position) >> 59) + 1],
        greatest(1, least(pgqueue._register_value(registers[(min(w.position) >> 59) + 1]), min(w.position))))
    from (
        select pgqueue._level_position(m) as position
        from pgqueue.messages m, pgqueue._lookup_keys(q.name, ids) k
        where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
    ) w
    group by w.position >> 59;
end;
$$;

create function pgqueue._claim_candidates_by_priority(q pgqueue.queues, at timestamptz, wanted int)
returns bigint[] language plpgsql volatile as $$
declare
    now_micros constant bigint := pgqueue._to_micros(at);
    first_due constant bigint := pgqueue._register_value(q.first_due_at);
    next_sweep constant bigint := pgqueue._register_value(q.next_sweep_at);
    is_sweep_due boolean := next_sweep - now_micros not between 1 and 15000000;
    oldest_first constant boolean := random() < 0.1;
    candidate_ids bigint[] := '{}'::bigint[];
    walked_ids bigint[];
    due_ids bigint[];
begin
    if first_due <= now_micros then
        -- Moved messages stay in messages while others have a higher priority.
        due_ids := pgqueue._move_due_messages(q, at, greatest(wanted, 20), pgqueue._from_micros(first_due - 1));
        -- As in _claim_candidates_grouped.
        is_sweep_due := is_sweep_due and (due_ids = '{}' or pgqueue._has_time());
    end if;
    if is_sweep_due then
        candidate_ids := pgqueue._sweep_levels(q, candidate_ids, at, wanted);
    end if;
    if candidate_ids = '{}' or oldest_first and cardinality(candidate_ids) < wanted then
        candidate_ids := candidate_ids || pgqueue._walk_levels(
            q, at, candidate_ids, wanted - cardinality(candidate_ids), oldest_first);
    elsif not oldest_first then
        -- What the sweep has found may have a lower priority than what no claim has passed. Later claims find again
        -- what this one leaves.
        walked_ids := pgqueue._walk_levels(q, at, candidate_ids, wanted, false);
        select array_agg(w.id order by w.position) into candidate_ids
        from (
            select m.id, pgqueue._level_position(m) as position
            from pgqueue.messages m, pgqueue._lookup_keys(q.name, candidate_ids || walked_ids) k
            where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
        ) w;
        perform pgqueue._set_levels_back(q, array(
            select u.id from unnest(candidate_ids[wanted + 1:]) as u (id) where u.id in (select i from unnest(walked_ids) as i)));
        candidate_ids := candidate_ids[:wanted];
    end if;
    -- As in _claim_candidates, a claim that has found too few messages sweeps at once, unless the last sweep was
    -- expensive.
    if pgqueue._is_walk_over(at) then
        return candidate_ids;
    elsif cardinality(candidate_ids) < wanted and not is_sweep_due and next_sweep > now_micros + 150000 then
        candidate_ids := candidate_ids || pgqueue._sweep_recent(
            q, candidate_ids, at, wanted - cardinality(candidate_ids), null,
            case candidate_ids when '{}' then 4096 else 128 end);
    elsif cardinality(candidate_ids) < wanted and not is_sweep_due then
        candidate_ids := pgqueue._sweep_levels(q, candidate_ids, at, wanted);
    end if;
    return candidate_ids;
end;
$$;
-- Limits of a queue. With max_in_flight a claim counts the messages in flight from their rows, under a lock that it
-- keeps until its transaction ends. With rate_limit a queue has a token for each message that claims may take. The
-- tokens are counted in a register, under a lock that no transaction keeps.

create function pgqueue._on_queue_changed_limits(before pgqueue.queues, after pgqueue.queues) returns void
language plpgsql volatile as $$
begin
    -- The register stays when the limit ends: a claim that runs at the same time may still use it.
    if after.rate_limit is not null and before.rate_limit is null then
        -- It gets a value here, as a read-only transaction reads it, too, and could not set one.
        perform pgqueue._register_value(pgqueue._create_register(after.queue_id, 'rate_used_until'));
    end if;
    if before.name is not null and after.name is not null and (before.max_in_flight, before.rate_limit, before.rate_period)
        is distinct from (after.max_in_flight, after.rate_limit, after.rate_period)
    then
        -- A waiting consumer knows only when the old limits allow the next message.
        perform pg_notify(pgqueue.channel(after.name), '');
    end if;
end;
$$;

create function pgqueue._read_bucket(
    q pgqueue.queues, now_micros bigint, out register regclass, out period bigint, out used_until bigint, out tokens int
)
language plpgsql volatile as $$
begin
    register := format('pgqueue.queue_%s_rate_used_until', q.queue_id);
    period := (date_part('epoch', q.rate_period) * 1000000)::bigint;
    used_until := pgqueue._register_value(register);
    -- A time that is more than a period ahead was set before the clock was set back.
    used_until := greatest(
        now_micros - period,
        case when used_until <= now_micros + period then used_until end);
    tokens := greatest(0, (now_micros - used_until) * q.rate_limit / period);
end;
$$;

create function pgqueue._claimed_ids(q pgqueue.queues, after timestamptz) returns bigint[]
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    first_id bigint;
    first_check_at timestamptz;
    returned_ids bigint[] := '{}'::bigint[];
    ids bigint[];
begin
    -- A dead letter can hold first_id far below the messages in flight. Then the scan begins where the vacant ids end,
    -- and the messages that have returned to those ids are looked up.
    select
        greatest(s.first_id, pgqueue._first_possible_id(s)),
        case when pgqueue._first_possible_id(s) > coalesce(s.first_id, 1) then pgqueue._discard_future_time(s.first_check_at, pgqueue._now()) end
    into first_id, first_check_at
    from pgqueue.sweep_state s where s.queue_name = q.name;
    if first_check_at is not null then
        returned_ids := array(
            select distinct r.id from pgqueue.requeued_messages r
            where r.queue_name = q.name and r.check_at >= first_check_at and r.id < first_id);
    end if;
    -- In a queue with groups a message that waits for its retry stays in messages, without a token.
    ids := array(
        select m.id from pgqueue.messages m
        where pgqueue._is_in_queue(m, q.kind, q.name) and m.id + 0 >= coalesce(first_id, 1)
            and m.attempt_count > 0 and m.visible_at > after
            and (m.claim_token is not null or m.claimed_attempt is distinct from m.attempt_count));
    if returned_ids <> '{}' then
        ids := ids || array(
            select m.id from pgqueue.messages m, pgqueue._lookup_keys(q.name, returned_ids) k
            where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
                and m.attempt_count > 0 and m.visible_at > after
                and (m.claim_token is not null or m.claimed_attempt is distinct from m.attempt_count));
    end if;
    return ids;
end;
$$;

-- How many of the wanted messages the limits of a queue allow now. If is_locked is true, the caller holds the lock of
-- max_in_flight, and claims that other transactions may have extended count, too.
create function pgqueue._allowed_messages(
    q pgqueue.queues, at timestamptz, wanted int, is_locked boolean default false
) returns int
language plpgsql volatile as $$
begin
    if q.rate_limit is not null then
        wanted := least(wanted, (pgqueue._read_bucket(q, pgqueue._to_micros(at))).tokens);
    end if;
    if q.max_in_flight is not null and wanted > 0 then
        wanted := least(wanted, case
            when is_locked
                then pgqueue._places_left(q, q.max_in_flight, pgqueue._claimed_ids(q, '-infinity'), at, wanted)
            else q.max_in_flight - cardinality(pgqueue._claimed_ids(q, at)) end);
    end if;
    return wanted;
end;
$$;

create function pgqueue._in_flight_full_until(q pgqueue.queues, at timestamptz) returns timestamptz
language plpgsql volatile set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
set jit = off as $$
begin
    if q.max_in_flight is null then
        return null;
    end if;
    return (
        select m.visible_at from pgqueue.messages m, pgqueue._lookup_keys(q.name, pgqueue._claimed_ids(q, at)) k
        where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
        order by m.visible_at desc offset q.max_in_flight - 1 limit 1
    );
end;
$$;

-- Until the transaction ends, because other claims do not see its claims before. False if another transaction keeps the
-- lock for longer than 100 ms.
create function pgqueue._lock_max_in_flight(q pgqueue.queues) returns boolean
language plpgsql volatile set lock_timeout = '100 ms' as $$
declare
    key constant bigint := hashtextextended(format('pgqueue.max_in_flight.%s', q.queue_id), 0);
begin
    -- lock_timeout is shorter than deadlock_timeout: claims of several queues in one transaction raise no error.
    if not pg_try_advisory_xact_lock(key) then
        perform pg_advisory_xact_lock(key);
    end if;
    return true;
exception when lock_not_available then
    return false;
end;
$$;

create function pgqueue._take_tokens(q pgqueue.queues, wanted int) returns int
language plpgsql volatile as $$
declare
    bucket record;
    taken int;
begin
    begin
        perform pg_advisory_xact_lock(hashtextextended(format('pgqueue.rate_limit.%s', q.queue_id), 0));
        bucket := pgqueue._read_bucket(q, pgqueue._to_micros(pgqueue._now()));
        taken := least(wanted, bucket.tokens);
        if taken > 0 then
            perform setval(bucket.register, bucket.used_until + (taken * bucket.period + q.rate_limit - 1) / q.rate_limit);
        end if;
        -- Only an error releases the lock before the transaction ends, which may take long. It does not undo setval.
        perform pgqueue._raise('queue_busy', q.name, 'claim');
    exception when sqlstate 'PQ004' then
        null;
    end;
    return taken;
end;
$$;
-- Claims messages: hides them for a time, counts the attempt, and sets a token that fences the claim. A claim starts at
-- the lowest id that no claim has passed. The sweep finds the messages below this id.

create function pgqueue._claim_candidates(
    q pgqueue.queues, at timestamptz, wanted int, found_ids bigint[] default null
) returns bigint[]
language plpgsql volatile as $$
declare
    now_micros constant bigint := pgqueue._to_micros(at);
    fresh_from_id bigint := pgqueue._register_value(q.fresh_from_id);
    first_due bigint;
    next_sweep bigint;
    candidate_ids bigint[] := '{}'::bigint[];
    last_id bigint;
    swept boolean := false;
begin
    -- A time further ahead than any sweep sets was set while the clock was wrong.
    next_sweep := pgqueue._register_value(q.next_sweep_at);
    if next_sweep > now_micros + 15000000 then
        next_sweep := 0;
    end if;

    if found_ids is null then
        first_due := pgqueue._register_value(q.first_due_at);
        if first_due <= now_micros then
            candidate_ids := pgqueue._move_due_messages(q, at, wanted, pgqueue._from_micros(first_due - 1));
            if candidate_ids <> '{}' and not pgqueue._has_time() then
                -- If it was cancelled in a sweep, the next claim would begin with the same messages.
                return candidate_ids;
            end if;
        end if;
        if cardinality(candidate_ids) < wanted and next_sweep <= now_micros then
            swept := true;
            candidate_ids := pgqueue._sweep(q, candidate_ids, at, wanted, fresh_from_id);
        end if;
        if cardinality(candidate_ids) < wanted and q.kind is not null then
            found_ids := array(
                select m.id from pgqueue.messages m
                where m.kind = q.kind and m.queue_name = q.name and m.id >= fresh_from_id and m.id <> all (candidate_ids)
                    and (pgqueue._is_ready(m, at) or m.visible_at <= at and pgqueue._is_walk_over(at))
                order by m.id limit wanted - cardinality(candidate_ids) for update skip locked
            );
        elsif cardinality(candidate_ids) < wanted then
            found_ids := array(
                select m.id from pgqueue.messages_shared m
                where m.queue_name = q.name and m.id >= fresh_from_id and m.id <> all (candidate_ids)
                    and (pgqueue._is_ready(m, at) or m.visible_at <= at and pgqueue._is_walk_over(at))
                order by m.id limit wanted - cardinality(candidate_ids) for update skip locked
            );
        end if;
    end if;
    last_id := found_ids[cardinality(found_ids)];
    if last_id >= fresh_from_id then
        fresh_from_id := setval(q.fresh_from_id, least(last_id, 9223372036854775806) + 1);
    end if;
    if cardinality(found_ids) > 0 and pgqueue._is_walk_over(at) then
        return candidate_ids || pgqueue._keep_ready(q, found_ids, at);
    end if;
    candidate_ids := candidate_ids || found_ids;

    -- If too few messages were found, the claim sweeps at once, so that it misses no message of a quiet queue. If the
    -- last sweep was expensive, the claim checks only where messages appear when a transaction rolls back. If it has
    -- found some messages, it checks fewer ids there: most claims find some but too few where consumers are faster than
    -- producers.
    -- A next sweep that is more than 150 ms away means that the last one took more than 7.5 ms.
    if cardinality(candidate_ids) < wanted and next_sweep > now_micros + 150000 then
        candidate_ids := candidate_ids || pgqueue._sweep_recent(
            q, candidate_ids, at, wanted - cardinality(candidate_ids), fresh_from_id,
            case candidate_ids when '{}' then 4096 else 128 end);
    elsif cardinality(candidate_ids) < wanted then
        -- The claim could not take the messages from fresh_from_id on. From now on the sweep finds them. If there are
        -- none, delayed messages may have come back to such ids and left since. Later claims skip their dead rows.
        if q.kind is not null then
            last_id := (
                select m.id from pgqueue.messages m
                where m.kind = q.kind and m.queue_name = q.name and m.id >= fresh_from_id order by m.id desc limit 1);
        else
            last_id := (
                select m.id from pgqueue.messages_shared m
                where m.queue_name = q.name and m.id >= fresh_from_id order by m.id desc limit 1);
        end if;
        last_id := coalesce(last_id, (select s.settled_id from pgqueue.sweep_state s where s.queue_name = q.name));
        if last_id >= fresh_from_id then
            fresh_from_id := setval(q.fresh_from_id, least(last_id, 9223372036854775806) + 1);
            swept := false;
        end if;
        if not swept then
            candidate_ids := pgqueue._sweep(q, candidate_ids, at, wanted, fresh_from_id);
        end if;
    end if;
    return candidate_ids;
end;
$$;

create function pgqueue._claim_candidates_limited(q pgqueue.queues, at timestamptz, wanted int)
returns bigint[] language plpgsql volatile as $$
declare
    allowed int := pgqueue._allowed_messages(q, at, wanted);
    candidate_ids bigint[];
    tokens_taken int;
begin
    if allowed > 0 and q.max_in_flight is not null then
        if not pgqueue._lock_max_in_flight(q) then
            return '{}'::bigint[];
        end if;
        perform pgqueue._require_current_snapshot(format('queue %L', q.name));
        -- This is a new statement: it sees the claims of those that held the lock before.
        at := pgqueue._now();
        allowed := pgqueue._allowed_messages(q, at, wanted, true);
    end if;
    if allowed <= 0 then
        return '{}'::bigint[];
    end if;
    if q.group_limit is not null then
        candidate_ids := pgqueue._claim_candidates_grouped(q, at, allowed);
    elsif q.priorities then
        candidate_ids := pgqueue._claim_candidates_by_priority(q, at, allowed);
    else
        candidate_ids := pgqueue._claim_candidates(q, at, allowed);
    end if;
    if q.rate_limit is null or candidate_ids = '{}' then
        return candidate_ids;
    end if;
    tokens_taken := pgqueue._take_tokens(q, cardinality(candidate_ids));
    if tokens_taken < cardinality(candidate_ids) then
        -- Another claim has taken tokens since. The messages above the limit are left to later claims.
        if q.priorities then
            -- A sweep would give them out before messages with a higher priority that are sent later.
            perform pgqueue._set_levels_back(q, candidate_ids[tokens_taken + 1:]);
        else
            -- The next claim sweeps, and finds them.
            perform setval(q.next_sweep_at, 1);
        end if;
    end if;
    return candidate_ids[:tokens_taken];
end;
$$;

-- Whether a sweep could find no message but those that a claim has found: no other one is visible at an id that is not
-- vacant. False if 500 are hidden, or rows of requeued_messages exist. Due messages that first_due_at has missed wait
-- for the next sweep. For a queue of messages_shared.
create function pgqueue._are_only_visible(queue_name text, found_ids bigint[]) returns boolean
language plpgsql volatile as $$
declare
    at constant timestamptz := pgqueue._now();
begin
    perform from pgqueue.sweep_state s
    where s.queue_name = _are_only_visible.queue_name collate "C"
        and (
            select count(*) filter (where m.visible_at <= at) = cardinality(found_ids) and count(*) < cardinality(found_ids) + 500
            from (
                select c.visible_at
                from unnest('{[1,9223372036854775807)}'::int8multirange - s.vacant_ids) as r
                cross join lateral (
                    select c.visible_at from pgqueue.messages_shared c
                    where c.queue_name = _are_only_visible.queue_name collate "C" and c.id >= lower(r) and c.id < upper(r)
                    offset 0
                ) c
                limit cardinality(found_ids) + 500
            ) m
        )
        -- With `order by` it is one search of the index on the time, whatever statistics say.
        and (
            select true from pgqueue.requeued_messages r
            where r.queue_name = _are_only_visible.queue_name collate "C"
                and r.check_at >= pgqueue._discard_future_time(s.first_check_at, at)
            order by r.check_at limit 1
        ) is null;
    return found;
end;
$$;

-- For all queues and states. found_ids are the messages that the fast path has locked, too few; null if it has not
-- looked.
create function pgqueue._lock_candidates_slowly(
    queue_name text, max_messages int, visibility_timeout interval, is_receive boolean, found_ids bigint[],
    out ids bigint[], out kind bigint
)
language plpgsql volatile as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    -- The scan before can have waited for a compaction or for the processor. What was ready then may be claimed by now,
    -- and what is ready now was not ready then.
    at constant timestamptz := pgqueue._now();
    has_adopted boolean := false;
begin
    kind := q.kind;
    if max_messages is null or max_messages not between 1 and 10000 then
        perform pgqueue._raise_invalid('max_messages', max_messages::text, 'an integer from 1 to 10000');
    end if;
    if visibility_timeout is not null then
        perform pgqueue._check_visibility_timeout(visibility_timeout);
    end if;
    if is_receive and q.max_in_flight is not null then
        perform pgqueue._raise_invalid('queue_name', q.name, 'a queue without max_in_flight: what is received cannot be counted');
    end if;
    if q.paused_at is not null then
        ids := '{}';
        return;
    end if;
    -- Messages that plain SQL has sent to a queue that is not plain.
    if pg_sequence_last_value(q.next_sweep_at) <= pgqueue._to_micros(at) and pgqueue._adopt_messages(q) then
        found_ids := null;
    end if;
    loop
        ids := case
            when coalesce(q.max_in_flight, q.rate_limit) is not null then pgqueue._claim_candidates_limited(q, at, max_messages)
            when q.group_limit is not null then pgqueue._claim_candidates_grouped(q, at, max_messages)
            when q.priorities then pgqueue._claim_candidates_by_priority(q, at, max_messages)
            else pgqueue._claim_candidates(q, at, max_messages, found_ids)
        end;
        exit when ids <> '{}' or has_adopted or not pgqueue._adopt_messages(q);
        has_adopted := true;
        found_ids := null;
    end loop;
end;
$$;

create function pgqueue._lock_candidates(
    queue_name text, max_messages int, visibility_timeout interval, is_receive boolean default false, out ids bigint[],
    out kind bigint
)
language plpgsql volatile as $$
declare
    at timestamptz;
    fresh_register regclass;
    resume_register regclass;
    sweep_register regclass;
    fresh_from_id bigint;
    is_fast_path boolean;
    found_ids bigint[];
    slow record;
begin
    if not pgqueue._lock_queue(queue_name) then
        perform pgqueue._raise('queue_not_found', queue_name);
    end if;

    at := pgqueue._now();
    -- The common case with few expressions, as a transaction has to prepare each of them: the arguments are valid, the
    -- queue is not paused, no message is due, and enough messages are ready from fresh_from_id on. All other cases are
    -- handled below. While claims find enough, a sweep may be late by 5 s. Otherwise, with a thousand queues, each
    -- claim would sweep, as the last claim of its queue is long ago, and a sweep costs three times as much as the rest
    -- of the claim.
    select
        w.fresh_from_id, pg_sequence_last_value(w.fresh_from_id),
        w.paused_at is null and coalesce(w.group_limit, w.max_in_flight, w.rate_limit) is null
            and not w.priorities and max_messages between 1 and 10000
            and coalesce(pgqueue._is_interval_between(_lock_candidates.visibility_timeout, '1 s', '43200 s'), true)
            and pg_sequence_last_value(w.first_due_at) > pgqueue._to_micros(at)
            and pg_sequence_last_value(w.next_sweep_at) - pgqueue._to_micros(at) between -5000000 and 15000000,
        w.kind, w.sweep_resume_id, w.next_sweep_at
    into fresh_register, fresh_from_id, is_fast_path, kind, resume_register, sweep_register
    from pgqueue.queues w
    where w.name = queue_name collate "C" and pg_relation_filenode(w.fresh_from_id) is not null;
    if is_fast_path then
        if kind is not null then
            ids := array(
                select m.id from pgqueue.messages m
                where m.kind = _lock_candidates.kind and m.queue_name = _lock_candidates.queue_name collate "C" and m.id >= fresh_from_id
                    and (pgqueue._is_ready(m, at) or m.visible_at <= at and pgqueue._is_walk_over(at))
                order by m.id limit max_messages for update skip locked
            );
        else
            ids := array(
                select m.id from pgqueue.messages_shared m
                where m.queue_name = _lock_candidates.queue_name collate "C" and m.id >= fresh_from_id
                    and (pgqueue._is_ready(m, at) or m.visible_at <= at and pgqueue._is_walk_over(at))
                order by m.id limit max_messages for update skip locked
            );
        end if;
        if not pgqueue._is_walk_over(at) then
            -- If no message was found, the register is unchanged.
            fresh_from_id := setval(fresh_register, ids[cardinality(ids)] + (ids[cardinality(ids)] < 9223372036854775807)::int);
            if cardinality(ids) = max_messages then
                return;
            -- Too few messages are ready from fresh_from_id on. For a second after a short full pass, there is nothing
            -- to sweep if no other message is visible and none was requeued.
            elsif kind is null and not pgqueue._has_fixed_snapshot() and pg_sequence_last_value(resume_register) = 1
                and pg_sequence_last_value(sweep_register) > pgqueue._to_micros(at) - 1000000
                and pgqueue._are_only_visible(queue_name, ids)
            then
                return;
            end if;
            found_ids := ids;
        -- Null if too few messages were found.
        elsif setval(fresh_register, ids[max_messages] + (ids[max_messages] < 9223372036854775807)::int) is not null then
            ids := pgqueue._keep_ready(pgqueue._get_locked_queue(queue_name), ids, at);
            return;
        end if;
    end if;

    slow := pgqueue._lock_candidates_slowly(queue_name, max_messages, visibility_timeout, is_receive, found_ids);
    ids := slow.ids;
    kind := slow.kind;
end;
$$;

create function pgqueue._claim_special(
    queue_name text, kind bigint, candidate_ids bigint[], visibility_timeout interval, claimed_by text
) returns setof pgqueue.message
language plpgsql volatile as $$
begin
    if cardinality(candidate_ids) > 1 and candidate_ids <> pgqueue._array_except(candidate_ids, '{}') and exists (
        select from pgqueue.queues q where q.name = _claim_special.queue_name collate "C" and q.priorities
    ) then
        -- A full join is a hash join by any plan. A nested loop would compare each message with each id.
        return query
        select c.*
        from pgqueue._claim_special(
            queue_name, kind, pgqueue._array_except(candidate_ids, '{}'), visibility_timeout, claimed_by) c
        full join unnest(candidate_ids) with ordinality as o (id, place) on o.id = c.id
        order by o.place;
        return;
    end if;
    return query
    update pgqueue.messages m
    set visible_at = pgqueue._add_interval((select pgqueue._now()), coalesce(
            _claim_special.visibility_timeout,
            (select q.visibility_timeout from pgqueue.queues q where q.name = _claim_special.queue_name collate "C"))),
        attempt_count = m.attempt_count + 1,
        claimed_attempt = m.attempt_count + 1,
        claim_token = (select gen_random_uuid()),
        claimed_by = _claim_special.claimed_by,
        claimed_at = (select pgqueue._now())
    from pgqueue._lookup_keys(_claim_special.queue_name collate "C", candidate_ids) k
    where m.kind = _claim_special.kind
        and pgqueue._matches_key(m.queue_name, m.id, _claim_special.queue_name collate "C", k.names, k.ids, k.id)
    returning m.id, m.queue_name, m.payload, m.body, m.headers, m.message_id, m.attempt_count, m.max_attempts,
        m.enqueued_at, m.visible_at, m.expires_at, m.claimed_by, m.claim_token, m.last_error;
end;
$$;

create function pgqueue.claim(
    queue_name pgqueue.queue_of_consumer,
    max_messages int default 1,
    visibility_timeout interval default null,
    claimed_by text default null
) returns setof pgqueue.message
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    candidates constant record := pgqueue._lock_candidates(queue_name, max_messages, visibility_timeout);
begin
    if candidates.ids = '{}' then
        return;
    elsif cardinality(candidates.ids) > 1 and candidates.kind is not null then
        return query
        select * from pgqueue._claim_special(queue_name, candidates.kind, candidates.ids, visibility_timeout, claimed_by);
        return;
    elsif candidates.kind is not null then
        -- With the function, a claim of one message takes a twentieth longer.
        return query
        update pgqueue.messages m
        set visible_at = pgqueue._add_interval((select pgqueue._now()), coalesce(
                claim.visibility_timeout,
                (select q.visibility_timeout from pgqueue.queues q where q.name = claim.queue_name collate "C"))),
            attempt_count = m.attempt_count + 1,
            claimed_attempt = m.attempt_count + 1,
            claim_token = (select gen_random_uuid()),
            claimed_by = claim.claimed_by,
            claimed_at = (select pgqueue._now())
        where m.kind = candidates.kind and m.queue_name = claim.queue_name collate "C" and m.id = candidates.ids[1]
        returning m.id, m.queue_name, m.payload, m.body, m.headers, m.message_id, m.attempt_count, m.max_attempts,
            m.enqueued_at, m.visible_at, m.expires_at, m.claimed_by, m.claim_token, m.last_error;
        return;
    end if;
    return query
    -- exchange contains the same statement. A shared function would make the claim of one message 7 per cent slower.
    update pgqueue.messages_shared m
    -- The clock is read again after all locks are taken. Otherwise a claim that had to wait could expire before it
    -- begins.
    set visible_at = pgqueue._add_interval((select pgqueue._now()), coalesce(
            claim.visibility_timeout,
            (select q.visibility_timeout from pgqueue.queues q where q.name = claim.queue_name collate "C"))),
        attempt_count = m.attempt_count + 1,
        claimed_attempt = m.attempt_count + 1,
        claim_token = (select gen_random_uuid()),
        claimed_by = claim.claimed_by,
        claimed_at = (select pgqueue._now())
    from pgqueue._lookup_keys(claim.queue_name collate "C", candidates.ids) k
    where pgqueue._matches_key(m.queue_name, m.id, claim.queue_name collate "C", k.names, k.ids, k.id)
    returning m.id, m.queue_name, m.payload, m.body, m.headers, m.message_id, m.attempt_count, m.max_attempts,
        m.enqueued_at, m.visible_at, m.expires_at, m.claimed_by, m.claim_token, m.last_error;
end;
$$;
comment on function pgqueue.claim is
'Claims up to max_messages (1 to 10000) ready messages and returns them by id. Each is hidden for visibility_timeout (1
s to 43200 s, default: the queue''s), its attempt is counted, and it gets a claim_token, which ack, nack and extend
require. claimed_by is a name for people to read. On its way a claim removes messages that have no attempts left or have
expired, to the dead letters if the queue keeps them, and makes due messages ready. It stops this work after a few MB,
about 50 ms, or half of statement_timeout, and later claims go on with it. So it can return fewer than max_messages
although more are due. In a queue with group_limit, a claim returns at most that many messages of a group, and messages
of at most 100 groups. In a queue with priorities, a claim takes the messages with the highest priority, and returns
them in the order in which it takes them; about one claim in ten first takes those with the priority whose next message
is the oldest, so that no message waits for ever. Waits only for drop_queue and, in a queue with max_in_flight, up to
100 ms for another claim that has not committed. Returns no row if no message is ready, the queue is paused, or a limit
of the queue allows none; next_due_at returns when to try again. Call it in autocommit mode: a rollback undoes the
claim. Raises 22023, PQ001.';
-- Receives messages inside the caller's transaction: a commit removes them, a rollback returns them to the queue.

create function pgqueue.receive(queue_name pgqueue.queue_of_consumer, max_messages int default 1)
returns setof pgqueue.message language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    candidates constant record := pgqueue._lock_candidates(queue_name, max_messages, null, true);
    at timestamptz;
    is_filed boolean;
begin
    -- All candidates are locked, so all of them are deleted below.
    if pgqueue._count('acknowledged', queue_name, cardinality(candidates.ids)) >= 0
        and pgqueue._lock_queue_without_archive(queue_name)
    then
        if candidates.kind is null then
            return query
            delete from pgqueue.messages_shared m
            using pgqueue._lookup_keys(receive.queue_name collate "C", candidates.ids) k
            where pgqueue._matches_key(m.queue_name, m.id, receive.queue_name collate "C", k.names, k.ids, k.id)
            returning m.id, m.queue_name, m.payload, m.body, m.headers, m.message_id, m.attempt_count + 1, m.max_attempts,
                m.enqueued_at, m.visible_at, m.expires_at, m.claimed_by, m.claim_token, m.last_error;
            return;
        end if;
    else
        at := pgqueue._finish_time();
        is_filed := coalesce(pgqueue._has_day_partition(pgqueue._utc_day(at)), false);
    end if;
    -- is_filed is null if the queue keeps no archive.
    return query
    with gone as (
        select m.* from pgqueue._delete_messages(receive.queue_name collate "C", candidates.kind, candidates.ids) m
    ),
    done as (
        select
            g.id, g.queue_name, g.enqueued_at, null::timestamptz, at, g.attempt_count + 1, g.max_attempts, g.expires_at,
            g.message_id, g.payload, g.body, g.headers, g.claimed_by, g.last_error
        from gone g
    ),
    filed as (
        insert into pgqueue.archived_messages select d.* from done d where is_filed
    ),
    unfiled as (
        insert into pgqueue.unfiled_messages select d.* from done d where not is_filed
    )
    select
        g.id, g.queue_name, g.payload, g.body, g.headers, g.message_id, g.attempt_count + 1, g.max_attempts,
        g.enqueued_at, g.visible_at, g.expires_at, g.claimed_by, g.claim_token, g.last_error
    from gone g;
end;
$$;
comment on function pgqueue.receive is
'Deletes up to max_messages (1 to 10000) ready messages in the caller''s transaction and returns them by id. A rollback
returns them to the queue with their attempt_count unchanged. Until the transaction ends, no other session gets them. On
its way the call removes messages that have no attempts left or have expired, to the dead letters if the queue keeps
them. If the queue has archive_for, received messages go to the archive. Waits only for drop_queue. Returns no row if no
message is ready, the queue is paused, or its rate_limit allows none. A rollback does not give back what rate_limit has
counted. A queue with max_in_flight is refused with 22023, because other sessions cannot count what was received. Raises
22023, PQ001.';
-- Extends claims: sets a new end for claims that the caller still holds.

create function pgqueue._check_claim(id bigint, claim_token uuid, ids bigint[] default '{}') returns void
language plpgsql stable as $$
begin
    if id is null or ids is null then
        perform pgqueue._raise_invalid(case when id is null then 'id' else 'ids' end, null,
            case when id is null then 'the id of a claimed message' else 'an array of ids of claimed messages' end);
    end if;
    if claim_token is null then
        perform pgqueue._raise_invalid('claim_token', null, 'the claim_token that claim returned');
    end if;
end;
$$;

create function pgqueue.extend(
    queue_name pgqueue.queue_of_consumer, id bigint, claim_token uuid, visibility_timeout interval default null
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    until timestamptz;
begin
    perform pgqueue._check_claim(id, claim_token), pgqueue._check_visibility_timeout(visibility_timeout);
    if q.kind is null then
        until := pgqueue._add_interval(pgqueue._now(), coalesce(visibility_timeout, q.visibility_timeout));
        update pgqueue.messages_shared m
        set visible_at = case when m.visible_at <= until or pgqueue._wake_if_waiting(q, pgqueue._now()) is not null then until end
        where m.queue_name = q.name and m.id = extend.id
            and pgqueue._is_claimed_by(m, extend.claim_token);
    else
        perform from pgqueue._extend_held(q, array[id], claim_token, visibility_timeout);
    end if;
    return found;
end;
$$;
comment on function pgqueue.extend is
'Extends the claim of a message: it ends visibility_timeout (1 s to 43200 s, default: the queue''s) after this call.
Returns true, or false if the claim was lost. In a queue with max_in_flight or group_limit a claim that has
ended is lost. If the claim ends earlier than before, waiting consumers are notified. Raises 22023, PQ001.';

-- Returns by id the messages whose claim is still valid: the claim with this token or, if claim_token is null, the
-- claim that the caller has locked.
create function pgqueue._extend_held(
    q pgqueue.queues, ids bigint[], claim_token uuid, visibility_timeout interval
) returns setof bigint
language plpgsql volatile as $$
declare
    until timestamptz;
begin
    if coalesce(q.max_in_flight, q.group_limit) is not null then
        -- The clock is read after the rows are locked. From then on claims count the messages as in flight.
        perform from pgqueue.messages m, pgqueue._lookup_keys(q.name, ids) k
        where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
            and pgqueue._is_claimed_by(m, coalesce(_extend_held.claim_token, m.claim_token))
        for no key update of m;
    end if;
    until := pgqueue._add_interval(pgqueue._now(), coalesce(visibility_timeout, q.visibility_timeout));
    if q.kind is null then
        return query
        update pgqueue.messages_shared m
        set visible_at = case when m.visible_at <= until or pgqueue._wake_if_waiting(q, pgqueue._now()) is not null then until end
        from pgqueue._lookup_keys(q.name, ids) k
        where pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
            and pgqueue._is_claimed_by(m, coalesce(_extend_held.claim_token, m.claim_token))
        returning m.id;
        return;
    end if;
    return query
    update pgqueue.messages m
    set visible_at = case when m.visible_at <= until or pgqueue._wake_if_waiting(q, pgqueue._now()) is not null then until end
    from pgqueue._lookup_keys(q.name, ids) k
    where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
        and pgqueue._is_claimed_by(m, coalesce(_extend_held.claim_token, m.claim_token))
        -- Another claim may have taken the place of one that has ended.
        and (coalesce(q.max_in_flight, q.group_limit) is null or m.visible_at > (select pgqueue._now()))
    returning m.id;
end;
$$;

create function pgqueue.extend_batch(
    queue_name pgqueue.queue_of_consumer, ids bigint[], claim_token uuid, visibility_timeout interval default null
) returns setof bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
begin
    perform pgqueue._check_claim(0, claim_token, ids), pgqueue._check_visibility_timeout(visibility_timeout);
    return query select pgqueue._extend_held(q, ids, claim_token, visibility_timeout);
end;
$$;
comment on function pgqueue.extend_batch is
'Extends the claims of messages of one claim as extend does, and returns by id the messages whose claim is still valid.
The claims of the others were lost. Raises 22023, PQ001.';

create function pgqueue.extend_claims(
    queue_name pgqueue.queue_of_consumer, ids bigint[], claim_tokens uuid[], visibility_timeout interval default null
) returns setof pgqueue.settled_claim
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    claims constant record := pgqueue._lock_claims(q, ids, claim_tokens);
begin
    perform pgqueue._check_visibility_timeout(visibility_timeout);
    return query
    select c.id, c.is_held and e.id is not null
    from unnest(ids, claims.held) with ordinality as c (id, is_held, place)
    left join pgqueue._extend_held(q, claims.held_ids, null, visibility_timeout) as e (id) on e.id = c.id
    order by c.place;
end;
$$;
comment on function pgqueue.extend_claims is
'Extends claims of different tokens as extend does: that of ids[1] with claim_tokens[1], and so on. Returns for each of
them, in this order, whether it was extended; false if it was lost. Both arrays have the same length and no nulls.
Raises 22023, PQ001.';
-- Acknowledges processed messages: deletes them or moves them to the archive if their claims are still valid.
-- A statement on messages locks and starts up each partition. So what every consumer calls looks into messages_shared
-- first, and into the partition of the queue only if it finds nothing there. The kind is a variable, as PostgreSQL 18
-- then opens no other partition.

create function pgqueue.ack(queue_name pgqueue.queue_of_consumer, id bigint, claim_token uuid)
returns boolean language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    queue_kind bigint;
begin
    if pgqueue._lock_queue_without_archive(queue_name) then
        delete from pgqueue.messages_shared m
        where m.queue_name = ack.queue_name collate "C" and m.id = ack.id
            and pgqueue._is_claimed_by(m, ack.claim_token);
        if not found then
            queue_kind := (select q.kind from pgqueue.queues q where q.name = ack.queue_name collate "C");
            if queue_kind is not null then
                delete from pgqueue.messages m
                where m.kind = queue_kind and m.queue_name = ack.queue_name collate "C" and m.id = ack.id
                    and pgqueue._is_claimed_by(m, ack.claim_token);
            end if;
        end if;
        if found then
            return pgqueue._count('acknowledged', queue_name, 1) = 1;
        end if;
    elsif claim_token is not null and pgqueue._ack_to_archive(queue_name, array[id], claim_token) <> '{}' then
        return pgqueue._count('acknowledged', queue_name, 1) = 1;
    end if;
    perform pgqueue._check_claim(id, claim_token);
    perform pgqueue._get_locked_queue(queue_name);
    return false;
end;
$$;
comment on function pgqueue.ack is
'Acknowledges a message and returns true; false if the claim was lost. The message is deleted or, if the queue has
archive_for, moved to the archive. A claim is lost if it expired and the message was then claimed again, dead-lettered
or removed. Raises 22023, PQ001.';

create function pgqueue.ack_batch(queue_name pgqueue.queue_of_consumer, ids bigint[], claim_token uuid)
returns int language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    queue_kind bigint;
    acked int;
begin
    if pgqueue._lock_queue_without_archive(queue_name) then
        delete from pgqueue.messages_shared m
        using pgqueue._lookup_keys(ack_batch.queue_name collate "C", ids) k
        where pgqueue._matches_key(m.queue_name, m.id, ack_batch.queue_name collate "C", k.names, k.ids, k.id)
            and pgqueue._is_claimed_by(m, ack_batch.claim_token);
        get diagnostics acked = row_count;
        if acked = 0 then
            queue_kind := (select q.kind from pgqueue.queues q where q.name = ack_batch.queue_name collate "C");
            if queue_kind is not null then
                delete from pgqueue.messages m
                using pgqueue._lookup_keys(ack_batch.queue_name collate "C", ids) k
                where m.kind = queue_kind
                    and pgqueue._matches_key(m.queue_name, m.id, ack_batch.queue_name collate "C", k.names, k.ids, k.id)
                    and pgqueue._is_claimed_by(m, ack_batch.claim_token);
                get diagnostics acked = row_count;
            end if;
        end if;
    else
        -- Null would stand for valid claims.
        acked := case when claim_token is null then 0 else cardinality(pgqueue._ack_to_archive(queue_name, ids, claim_token)) end;
    end if;
    if acked = 0 then
        perform pgqueue._check_claim(0, claim_token, ids);
        perform pgqueue._get_locked_queue(queue_name);
    end if;
    return pgqueue._count('acknowledged', queue_name, acked);
end;
$$;
comment on function pgqueue.ack_batch is
'Acknowledges messages of one claim as ack does, and returns how many of their claims were still valid. Raises 22023,
PQ001.';

create function pgqueue.ack_claims(queue_name pgqueue.queue_of_consumer, ids bigint[], claim_tokens uuid[])
returns setof pgqueue.settled_claim language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    claims constant record := pgqueue._lock_claims(q, ids, claim_tokens);
begin
    if not pgqueue._lock_queue_without_archive(q.name) then
        perform pgqueue._ack_to_archive(q.name, claims.held_ids, null);
    elsif q.kind is not null then
        -- Not by _delete_messages: it also returns the rows, which would take an eighth of the time of this call.
        delete from pgqueue.messages m
        using pgqueue._lookup_keys(q.name, claims.held_ids) k
        where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id);
    else
        delete from pgqueue.messages_shared m
        using pgqueue._lookup_keys(q.name, claims.held_ids) k
        where pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id);
    end if;
    perform pgqueue._count('acknowledged', q.name, cardinality(claims.held_ids));
    return query select * from unnest(ids, claims.held);
end;
$$;
comment on function pgqueue.ack_claims is
'Acknowledges messages of different claims as ack does: ids[1] with claim_tokens[1], and so on. Returns for each of
them, in this order, whether it was acknowledged; false if its claim was lost. Both arrays have the same length and no
nulls. Waits for other transactions that have locked the messages, in the order of the ids. Raises 22023, PQ001.';
-- Returns claimed messages: after a failure they are scheduled for a retry or become dead letters. A consumer that
-- stops releases its messages.

create function pgqueue._check_failure(id bigint, delay interval, headers jsonb) returns void
language plpgsql stable as $$
begin
    if id is null then
        perform pgqueue._raise_invalid('id', null, 'the id of a message');
    end if;
    if not pgqueue._is_interval_between(delay, '0', '3652.5 days') then
        perform pgqueue._raise_invalid('delay', delay::text, 'an interval from 0 to 10 years (3652.5 days), or null for the queue''s backoff');
    end if;
    if jsonb_typeof(headers) <> 'object' then
        perform pgqueue._raise_invalid('headers', left(headers::text, 200), 'a JSON object, or null for none');
    end if;
end;
$$;

create function pgqueue._retry_or_dead_letter(
    q pgqueue.queues, m pgqueue.messages, at timestamptz, delay interval, error text, headers jsonb, final_reason text
) returns void
language plpgsql volatile as $$
declare
    due_at timestamptz;
begin
    -- The caller has deleted the message from messages.
    m.last_error := coalesce(left(error, 65536), m.last_error);
    m.headers := pgqueue._merged_headers(m.headers, _retry_or_dead_letter.headers);
    perform pgqueue._count('failed', q.name, 1);

    if final_reason is not null or m.attempt_count >= m.max_attempts then
        if q.dlq_enabled then
            perform pgqueue._add_dead_letter(m, at, coalesce(final_reason, 'attempts_exhausted')), pgqueue._count_dead(q, 1);
        end if;
        return;
    end if;

    due_at := pgqueue._add_interval(at, coalesce(delay, interval '1 s' * (
        least(
            date_part('epoch', q.backoff_max),
            date_part('epoch', q.backoff_base) * q.backoff_factor ^ least(m.attempt_count - 1, 100)
        ) * (1 - q.backoff_jitter * random()))));
    if q.group_limit = 1 and m.headers ->> 'pgqueue.group' is not null then
        -- The message stays in messages, hidden until it is due, so that the later ones of its group wait.
        m.visible_at := due_at;
        m.claim_token := null;
        m.claimed_attempt := m.attempt_count;
        m.kind := q.kind;
        insert into pgqueue.messages select m.*;
        perform pgqueue._announce_due(q, due_at);
        return;
    end if;
    insert into pgqueue.scheduled_messages
    select (pgqueue._as_scheduled(m, pgqueue._clamp_due_at(due_at), m.attempt_count)).*;
    perform pgqueue._announce_due(q, due_at);
end;
$$;

create function pgqueue._nack_or_reject(
    queue_name text, id bigint, claim_token uuid, delay interval, error text, headers jsonb, final_reason text
) returns boolean
language plpgsql volatile as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    m pgqueue.messages;
begin
    perform pgqueue._check_claim(id, claim_token);
    perform pgqueue._check_failure(id, delay, headers);
    if q.kind is null then
        delete from pgqueue.messages_shared c
        where c.queue_name = q.name and c.id = _nack_or_reject.id
            and pgqueue._is_claimed_by(c, _nack_or_reject.claim_token)
        returning c.* into m;
    else
        delete from pgqueue.messages c
        where c.kind = q.kind and c.queue_name = q.name and c.id = _nack_or_reject.id
            and pgqueue._is_claimed_by(c, _nack_or_reject.claim_token)
        returning c.* into m;
    end if;
    if not found then
        return false;
    end if;
    perform pgqueue._retry_or_dead_letter(q, m, at, delay, error, headers, final_reason);
    return true;
end;
$$;

create function pgqueue.nack(
    queue_name pgqueue.queue_of_consumer,
    id bigint,
    claim_token uuid,
    delay interval default null,
    error text default null,
    headers jsonb default null
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
begin
    return pgqueue._nack_or_reject(queue_name, id, claim_token, delay, error, headers, null);
end;
$$;
comment on function pgqueue.nack is
'Returns a claimed message to the queue after a failure, and returns true; false if the claim was lost. The message is
delivered again after delay (0 to 10 years, default: the queue''s backoff). If no attempts are left, it goes to the dead
letters with reason attempts_exhausted, or is deleted if dlq_enabled of the queue is false. error is kept as last_error,
up to 65,536 characters. headers (a JSON object) is merged into the headers of the message and replaces headers of the
same name. The message keeps its own headers unchanged if the result exceeds 64 KB, or if they are not an object. Raises
22023, PQ001.';

create function pgqueue.nack_claims(
    queue_name pgqueue.queue_of_consumer,
    ids bigint[],
    claim_tokens uuid[],
    delay interval default null,
    error text default null,
    headers jsonb default null
) returns setof pgqueue.settled_claim
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    claims constant record := pgqueue._lock_claims(q, ids, claim_tokens);
    m pgqueue.messages;
begin
    perform pgqueue._check_failure(0, delay, headers);
    for m in
        select d.* from pgqueue._delete_messages(q.name, q.kind, claims.held_ids) d
    loop
        perform pgqueue._retry_or_dead_letter(q, m, at, delay, error, headers, null);
        -- As in release, each message gets a due time of its own.
        at := at + interval '1 microsecond';
    end loop;
    return query select * from unnest(ids, claims.held);
end;
$$;
comment on function pgqueue.nack_claims is
'Returns messages of different claims to the queue after a failure, as nack does: ids[1] with claim_tokens[1], and so
on. Returns for each of them, in this order, true; false if its claim was lost. delay, error and headers apply to all;
without a delay each message gets the backoff of its own attempt. Both arrays have the same length and no nulls. Raises
22023, PQ001.';

create function pgqueue.reject(
    queue_name pgqueue.queue_of_consumer,
    id bigint,
    claim_token uuid,
    error text default null,
    headers jsonb default null,
    reason text default 'rejected'
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
begin
    -- Callers cannot set the other reasons, as those state facts that pgqueue determines.
    perform pgqueue._require(reason in ('rejected', 'attempts_exhausted'), 'reason', reason, 'rejected or attempts_exhausted');
    return pgqueue._nack_or_reject(queue_name, id, claim_token, null, error, headers, reason);
end;
$$;
comment on function pgqueue.reject is
'Gives up a claimed message at once, even if attempts are left, and returns true; false if the claim was lost. The
message goes to the dead letters with reason, or is deleted if dlq_enabled of the queue is false. reason is rejected, or
attempts_exhausted if the caller counts attempts by its own rules and none is left. error and headers are kept as by
nack. Raises 22023, PQ001.';

create function pgqueue.record_failure(
    queue_name pgqueue.queue_of_consumer,
    id bigint,
    attempt_count int,
    delay interval default null,
    error text default null,
    headers jsonb default null
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    m pgqueue.messages;
begin
    perform pgqueue._check_failure(id, delay, headers);
    perform pgqueue._require(
        attempt_count >= 1, 'attempt_count', attempt_count::text, 'the attempt_count that receive returned, from 1');
    delete from pgqueue.messages c
    where c.queue_name = q.name and c.id = (
        select f.id from pgqueue.messages f
        where f.queue_name = q.name and f.id = record_failure.id
            and f.attempt_count = record_failure.attempt_count - 1 and f.visible_at <= at
        for update skip locked)
    returning c.* into m;
    if not found then
        -- If the message was scheduled and came due, the transaction that rolled back had moved it from here.
        delete from pgqueue.scheduled_messages c
        where c.ctid = (
            select f.ctid from pgqueue.scheduled_messages f
            where f.queue_name = q.name and f.id = record_failure.id
                and f.attempt_count = record_failure.attempt_count - 1 and f.due_at <= at
            for update skip locked)
        returning (pgqueue._as_message(c)).* into m;
        if not found then
            return false;
        end if;
        if q.group_limit = 1 then
            -- A message of a group goes to messages, under an id that sweeps may have passed.
            insert into pgqueue.requeued_messages (queue_name, check_at, id) select q.name, (select pgqueue._now()), m.id;
        end if;
    end if;
    m.attempt_count := record_failure.attempt_count;
    perform pgqueue._retry_or_dead_letter(q, m, at, delay, error, headers, null);
    return true;
end;
$$;
comment on function pgqueue.record_failure is
'Records a failed attempt whose transaction was rolled back (a receive, or a claim that was never committed), and
returns true: the message is scheduled for a retry or goes to the dead letters. delay, error and headers are as in nack.
attempt_count is that of the failed attempt, as receive returned it (from 1). Returns false and does nothing if the
message is gone, claimed, or locked by another transaction, or if an attempt was counted since. Does not wait for that
transaction. Raises 22023, PQ001.';

-- Returns how many of the claims were still valid: those with this token or, if claim_token is null, those that the
-- caller has locked.
create function pgqueue._release_held(q pgqueue.queues, ids bigint[], claim_token uuid, at timestamptz)
returns int language plpgsql volatile as $$
declare
    released int;
begin
    if q.group_limit is not null then
        -- In the other table the messages would be behind later ones of their group until a claim moves them back.
        update pgqueue.messages m
        set visible_at = at, attempt_count = m.attempt_count - 1, claimed_attempt = m.attempt_count - 1,
            claim_token = null
        from pgqueue._lookup_keys(q.name, ids) k
        where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
            and pgqueue._is_claimed_by(m, coalesce(_release_held.claim_token, m.claim_token));
        get diagnostics released = row_count;
        if released > 0 then
            perform pgqueue._wake_if_waiting(q, at);
        end if;
        return released;
    end if;
    with given_back as (
        select m from pgqueue._delete_messages(q.name, q.kind, ids, _release_held.claim_token) m
    )
    insert into pgqueue.scheduled_messages
    select (pgqueue._as_scheduled(
        g.m, pgqueue._clamp_due_at(at + (g.n - cardinality(ids)) * interval '1 microsecond'), (g.m).attempt_count - 1)).*
    -- Each message gets a due time of its own. Claims continue at the last due time: with equal times they would scan
    -- the dead index entries of all messages already taken.
    from (select b.m, row_number() over () as n from given_back b) g;
    get diagnostics released = row_count;
    if released > 0 then
        perform pgqueue._announce_due(q, at + (1 - cardinality(ids)) * interval '1 microsecond');
    end if;
    return released;
end;
$$;

create function pgqueue.release(queue_name pgqueue.queue_of_consumer, ids bigint[], claim_token uuid)
returns int language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
begin
    perform pgqueue._check_claim(0, claim_token, ids);
    return pgqueue._release_held(q, ids, claim_token, at);
end;
$$;
comment on function pgqueue.release is
'Returns unprocessed messages of one claim to the queue, for example when a consumer stops, and returns how many of
their claims were still valid. The messages are ready at once, and the attempt is not counted. Raises 22023, PQ001.';

create function pgqueue.release_claims(
    queue_name pgqueue.queue_of_consumer, ids bigint[], claim_tokens uuid[]
) returns setof pgqueue.settled_claim
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    claims constant record := pgqueue._lock_claims(q, ids, claim_tokens);
begin
    perform pgqueue._release_held(q, claims.held_ids, null, at);
    return query select * from unnest(ids, claims.held);
end;
$$;
comment on function pgqueue.release_claims is
'Returns unprocessed messages of different claims to the queue, as release does: ids[1] with claim_tokens[1], and so on.
Returns for each of them, in this order, whether it was released; false if its claim was lost. Both arrays have the same
length and no nulls. Raises 22023, PQ001.';
-- Acknowledges processed messages and claims the next ones, in one call and one commit.

create function pgqueue.exchange(
    queue_name pgqueue.queue_of_consumer,
    ids bigint[],
    claim_token uuid,
    max_messages int default 1,
    visibility_timeout interval default null,
    claimed_by text default null
) returns setof pgqueue.exchanged
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    given constant int := coalesce(cardinality(ids), 0);
    acked bigint[];
    candidates record;
begin
    if given > 0 then
        if claim_token is null then
            perform pgqueue._check_claim(0, claim_token);
        end if;
        if pgqueue._lock_queue_without_archive(queue_name) then
            with gone as (
                delete from pgqueue.messages_shared m
                using pgqueue._lookup_keys(exchange.queue_name collate "C", ids) k
                where pgqueue._matches_key(m.queue_name, m.id, exchange.queue_name collate "C", k.names, k.ids, k.id)
                    and pgqueue._is_claimed_by(m, exchange.claim_token)
                returning m.id
            )
            select array_agg(g.id) into acked from gone g;
            -- All claims of a plain queue were lost, or the messages are in the partition of another kind.
            acked := coalesce(
                acked, array(
                    select d.id from pgqueue._delete_messages(
                        exchange.queue_name collate "C",
                        (select q.kind from pgqueue.queues q where q.name = exchange.queue_name collate "C"), ids, claim_token) d));
        else
            acked := pgqueue._ack_to_archive(queue_name, ids, claim_token);
        end if;
        if pgqueue._count('acknowledged', queue_name, cardinality(acked)) is distinct from given then
            return query
            select
                i, exchange.queue_name::text, null::jsonb, null::bytea, null::jsonb, null::uuid, null::int, null::int,
                null::timestamptz, null::timestamptz, null::timestamptz, null::text, null::uuid, null::text, true
            from unnest(pgqueue._array_except(ids, acked)) as i
            where i is not null;
        end if;
    end if;
    candidates := pgqueue._lock_candidates(queue_name, max_messages, visibility_timeout);
    if candidates.kind is not null then
        return query
        select c.*, false from pgqueue._claim_special(queue_name, candidates.kind, candidates.ids, visibility_timeout, claimed_by) c;
        return;
    end if;
    return query
    update pgqueue.messages_shared m
    -- The clock is read again after all locks are taken. Otherwise a claim that had to wait could expire before it
    -- begins.
    set visible_at = pgqueue._add_interval((select pgqueue._now()), coalesce(
            exchange.visibility_timeout,
            (select q.visibility_timeout from pgqueue.queues q where q.name = exchange.queue_name collate "C"))),
        attempt_count = m.attempt_count + 1,
        claimed_attempt = m.attempt_count + 1,
        claim_token = (select gen_random_uuid()),
        claimed_by = exchange.claimed_by,
        claimed_at = (select pgqueue._now())
    from pgqueue._lookup_keys(exchange.queue_name collate "C", candidates.ids) k
    where pgqueue._matches_key(m.queue_name, m.id, exchange.queue_name collate "C", k.names, k.ids, k.id)
    returning m.id, m.queue_name, m.payload, m.body, m.headers, m.message_id, m.attempt_count, m.max_attempts,
        m.enqueued_at, m.visible_at, m.expires_at, m.claimed_by, m.claim_token, m.last_error, false;
end;
$$;
comment on function pgqueue.exchange is
'Acknowledges ids, all claimed with claim_token, as ack does, and claims up to max_messages as claim does, in one call.
Returns first a row with lost = true, id and queue_name for each id whose claim was lost, then the claimed messages with
lost = false, in the order of claim. ids may be empty or null; claim_token may then be null, too. Raises 22023, PQ001.';
-- Makes dead letters of the messages that have no attempts left, returns dead letters to their queue, or deletes them.

create function pgqueue.sweep_queue(
    queue_name pgqueue.queue_of_consumer_or_admin, max_messages int default 10000
) returns int
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
begin
    perform pgqueue._require(
        max_messages between 1 and 1000000, 'max_messages', max_messages::text, 'an integer from 1 to 1000000');
    return pgqueue._remove_found_spent_messages(q, at, max_messages);
end;
$$;
comment on function pgqueue.sweep_queue is
'Removes up to max_messages (1 to 1000000) messages that have no attempts left and whose last claim has ended, or that
have expired after a claim, and returns how many. They become dead letters if the queue keeps them. Every claim does
this on its way, so the call is needed only while no consumer claims. Repeat it until it returns 0: it ends when half of
statement_timeout has passed, too. It reads all messages in flight, about 2 s for a million, and a statement_timeout
that is shorter cancels it. Expired messages that were never claimed may stay: see purge_expired. Raises 22023, PQ001.';

create function pgqueue.redrive(
    queue_name pgqueue.queue_of_admin,
    max_messages int default 1000,
    ids bigint[] default null,
    to_queue pgqueue.queue_of_admin default null
) returns int
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    target pgqueue.queues;
    is_grouped constant boolean := q.group_limit is not null;
    dead refcursor;
    places tid[];
    slice_at timestamptz;
    first_due_at timestamptz;
    n int;
    redriven int := 0;
begin
    perform pgqueue._require(max_messages >= 1, 'max_messages', max_messages::text, 'an integer from 1');
    if to_queue collate "C" <> q.name then
        target := pgqueue._get_locked_queue(to_queue);
    end if;
    perform case
        when ids is null then pgqueue._remove_found_spent_messages(q, at, max_messages)
        else (pgqueue._remove_spent_messages(q, ids, at, null)).removed
    end;
    select d into dead from pgqueue._open_dead_letters(q.name, ids, max_messages, false) as d;
    loop
        places := (pgqueue._fetch_slice(dead)).places;
        exit when places = '{}';
        if target.name is not null then
            n := pgqueue._send_dead_letters(places, target);
        else
            slice_at := pgqueue._now();
            with revived as (
                delete from pgqueue.dead_messages d where d.ctid = any (places)
                returning d.id, d.queue_name, d.enqueued_at, 0, q.max_attempts, d.message_id, d.payload, d.body, d.headers,
                    d.claimed_by, d.last_error, d.transport_headers
            ),
            -- In a queue with groups the messages become ready in the transaction in which they stop being dead
            -- letters. Otherwise a claim between the redrive and their due time could take their successors.
            moved as (
                insert into pgqueue.messages (
                    id, queue_name, enqueued_at, attempt_count, max_attempts, message_id, payload, body, headers,
                    claimed_by, last_error, transport_headers, visible_at, kind
                )
                select r.*, slice_at, q.kind from revived r where is_grouped
                returning messages.id
            ),
            recorded as (
                insert into pgqueue.requeued_messages (queue_name, check_at, id)
                select q.name, (select pgqueue._now()), m.id from moved m
            ),
            delayed as (
                insert into pgqueue.scheduled_messages (
                    id, queue_name, enqueued_at, attempt_count, max_attempts, message_id, payload, body, headers,
                    claimed_by, last_error, transport_headers, due_at
                )
                -- Each message gets a due time of its own, because a claim continues at the last due time. With equal
                -- times it would scan the dead index entries of all messages already taken.
                select r.*, pgqueue._clamp_due_at(
                    slice_at - (row_number() over (order by r.id desc) - 1) * interval '1 microsecond')
                from revived r
                where not is_grouped
            )
            select count(*) into n from revived;
            first_due_at := coalesce(first_due_at, slice_at - (n - 1) * interval '1 microsecond');
        end if;
        redriven := redriven + n;
        exit when not pgqueue._has_time();
    end loop;
    close dead;
    if first_due_at is not null then
        perform pgqueue._announce_due(q, first_due_at);
    end if;
    return redriven;
end;
$$;
comment on function pgqueue.redrive is
'Returns up to max_messages dead letters to their queue and returns how many. It takes the lowest ids first; with ids,
only those. The messages keep id, payload, headers and last_error. They start with no attempts, the queue''s
max_attempts and no expiry, and are ready at once. Messages that no claim has moved to the dead letters yet are
included, as by sweep_queue. The call ends when half of statement_timeout has passed, and has then returned some: repeat
it until it returns 0. Due messages are claimed before new ones, so a large redrive delays all new messages. With
to_queue, for which the caller needs admin access, too, the dead letters become new messages of that queue, with ids of
their own and the header pgqueue.dead_letter, as by dead_letter_to of create_queue. Raises 22023, PQ001.';

create function pgqueue.purge_dead_messages(queue_name pgqueue.queue_of_admin, ids bigint[] default null)
returns bigint language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q pgqueue.queues;
    dead refcursor;
    places tid[];
    n int;
    purged bigint := 0;
begin
    -- The undelivered messages of a dropped queue remain under its name, so the queue need not exist.
    if not pgqueue._lock_queue(queue_name)
        or not exists (
            select from pgqueue.dead_messages d
            where d.queue_name = purge_dead_messages.queue_name collate "C"
                and d.id >= (pgqueue._sweep_state_of(purge_dead_messages.queue_name, '-infinity')).first_id
        )
    then
        perform pgqueue._get_locked_queue(queue_name);
    end if;
    if exists (select from pgqueue.queues where queues.name = queue_name collate "C") then
        q := pgqueue._get_locked_queue(queue_name);
        perform case
            when ids is null then pgqueue._remove_found_spent_messages(q, at, 1000000)
            else (pgqueue._remove_spent_messages(q, ids, at, null)).removed
        end;
    end if;
    select d into dead from pgqueue._open_dead_letters(queue_name, ids, null, true) as d;
    loop
        places := (pgqueue._fetch_slice(dead)).places;
        exit when places = '{}';
        delete from pgqueue.dead_messages d where d.ctid = any (places);
        get diagnostics n = row_count;
        purged := purged + n;
        exit when not pgqueue._has_time();
    end loop;
    close dead;
    return purged;
end;
$$;
comment on function pgqueue.purge_dead_messages is
'Deletes the dead letters of a queue, all or only those in ids, and returns how many. Messages that
no claim has moved to the dead letters yet are included, as by sweep_queue. The call ends when half of statement_timeout
has passed, and has then deleted some: repeat it until it returns 0. The dead letters of a dropped queue are found by
its name. Raises PQ001 if there is neither a queue nor a dead letter of this name.';

create function pgqueue._on_queue_changed_dead_letter_to(before pgqueue.queues, after pgqueue.queues)
returns void language plpgsql volatile as $$
begin
    if after.name is null then
        -- A later queue of this name, perhaps of another owner, gets no dead letters.
        update pgqueue.queues o set dead_letter_to = null, updated_at = pgqueue._now() where o.dead_letter_to = before.name;
    end if;
    if after.dead_letter_to is null or after.dead_letter_to = before.dead_letter_to then
        return;
    end if;
    perform pgqueue._get_locked_queue(after.dead_letter_to);
    -- One session at a time. Two could close a cycle, as neither sees what the other has not committed. No queue has
    -- such a name.
    perform pg_advisory_xact_lock(pgqueue._lock_key('dead_letter_to of all queues'));
    perform pgqueue._require_current_snapshot(format('queue %L', after.name));
    if exists (
        with recursive chain as (
            select after.dead_letter_to as name
            union
            select t.dead_letter_to from chain c join pgqueue.queues t on t.name = c.name where t.dead_letter_to is not null
        )
        select from chain c where c.name = after.name
    ) then
        perform pgqueue._raise_invalid('dead_letter_to', after.dead_letter_to,
            format('a queue whose dead letters do not come back to queue %L', after.name));
    end if;
    -- The other queue gets the dead letters that exist already.
    perform pg_notify(pgqueue.channel(after.dead_letter_to), '');
end;
$$;

create function pgqueue._findings_of_held_groups(q pgqueue.queues) returns setof pgqueue.finding
language sql volatile as $$
    select
        'warning', q.name, 'held_group',
        format('group %L waits for %s, the first is %s: on_dead is hold', d.name,
            pgqueue._with_number(d.n::int, 'dead letter'), d.first_id),
        format('select pgqueue.redrive(%L, ids => array[%s]); -- or purge_dead_messages', q.name, d.first_id)
    from (
        select left(c.headers ->> 'pgqueue.group', 255) as name, count(*) as n, min(c.id) as first_id
        from (
            select m.headers, m.id from pgqueue.dead_messages m
            where q.group_limit is not null and q.on_dead = 'hold' and m.queue_name = q.name
                and m.id >= (pgqueue._sweep_state_of(q.name, '-infinity')).first_id and m.headers ->> 'pgqueue.group' is not null
            order by m.id limit 1000
        ) c
        group by c.headers ->> 'pgqueue.group'
        order by min(c.id) limit 10
    ) d
    where exists (
        select from pgqueue.messages m
        where m.queue_name = q.name
            and pgqueue._group_position(m.headers, m.id) = pgqueue._group_position(jsonb_build_object('pgqueue.group', d.name), 0)
    )
$$;
-- Removes expired messages before a claim would pass over them.

create function pgqueue.purge_expired(queue_name pgqueue.queue_of_admin, batch_size int default 10000)
returns int language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    expired refcursor;
    places tid[];
    gone pgqueue.messages;
    removed int;
    died int := 0;
    purged int := 0;
begin
    perform pgqueue._require(
        batch_size between 1 and 1000000, 'batch_size', batch_size::text, 'an integer from 1 to 1000000');
    -- A message in flight is not removed, as its consumer may still acknowledge it.
    open expired for
        -- A thousand at a time: _remove_spent_messages divides them by their size.
        select m.id, null::tid as place, 132::bigint as bytes from pgqueue.messages m
        where (m.kind = q.kind or m.kind is null) and m.queue_name = q.name
            and m.id >= (pgqueue._sweep_state_of(q.name, '-infinity')).first_id and m.visible_at <= at
            -- A generic plan expects that a range selects fewer rows than one comparison. Thus it uses an index on
            -- expires_at instead of the primary key.
            and m.expires_at between '-infinity' and at
            -- The same condition again, in the form of the index on the relation of a transport.
            and m.expires_at at time zone 'UTC' between '-infinity' and at at time zone 'UTC'
        order by m.expires_at limit batch_size for update skip locked;
    loop
        -- On a full disk it removes none.
        removed := (pgqueue._remove_spent_messages(q, (pgqueue._fetch_slice(expired)).ids, at, null)).removed;
        exit when removed = 0;
        purged := purged + removed;
        exit when not pgqueue._has_time();
    end loop;
    close expired;
    open expired for
        select s.id, s.ctid as place, pgqueue._moved_bytes(s.payload, s.body, s.headers, s.transport_headers) as bytes
        from pgqueue.scheduled_messages s
        where s.queue_name = q.name and s.expires_at <= at
        order by s.expires_at limit batch_size - purged for update skip locked;
    while purged = 0 or pgqueue._has_time() loop
        places := (pgqueue._fetch_slice(expired)).places;
        exit when places = '{}';
        -- Deleted by ctid. By key, a plan could use another index and read the whole queue through it for each.
        for gone in
            delete from pgqueue.scheduled_messages s where s.ctid = any (places) returning (pgqueue._as_message(s)).*
        loop
            purged := purged + 1;
            continue when not pgqueue._keeps_dead_letter(q, gone);
            died := died + 1;
            perform pgqueue._add_dead_letter(gone, at, null);
        end loop;
    end loop;
    close expired;
    perform pgqueue._count_dead(q, died);
    return purged;
end;
$$;
comment on function pgqueue.purge_expired is
'Removes up to batch_size (1 to 1000000) expired messages that are not in flight, and returns how many. They go to the
dead letters if the queue has dead_letter_expired. Repeat the call until it returns 0: it ends when half of
statement_timeout has passed, too. It reads the whole queue unless pgqueue.messages has an index on expires_at; doctor
reports a missing index with the statement that creates it. Claims skip expired messages in any case. Raises 22023,
PQ001.';
-- Counts the messages that could be claimed, without changing or locking them.

create function pgqueue._was_running_at_snapshot(xid xid, snapshot pg_snapshot) returns boolean
language sql stable parallel safe as $$
    -- True for a transaction that began after the snapshot, and for one that was running at the snapshot. The snapshot
    -- does not list subtransactions and, on a standby, any transactions: for those pg_xact_status answers. Transaction
    -- ids are compared in 32 bits, as rows store them.
    select
        ((xid::text::bigint - pg_snapshot_xmax(snapshot)::text::bigint) & 4294967295) < 2147483648
        or exists (
            select from pg_snapshot_xip(snapshot) as x
            where x::text::bigint & 4294967295 = xid::text::bigint
        )
        or pg_xact_status(greatest(3, pg_snapshot_xmax(snapshot)::text::bigint
            - ((pg_snapshot_xmax(snapshot)::text::bigint - xid::text::bigint) & 4294967295))::text::xid8)
            is not distinct from 'in progress'
$$;

-- Whether another transaction holds a row, derived from the row's xmax without taking a lock. Shared row locks may be
-- misjudged.
create function pgqueue._is_locked(xmax xid) returns boolean
language sql stable parallel safe
-- The expression is short enough to be inlined. Most rows are locked by no transaction, and need no function call.
as $$ select xmax <> '0' and pgqueue._was_running_at_snapshot(xmax, pg_current_snapshot()) $$;

-- Ids of messages that came back, up to wanted and within ranges, and the number of messages for which each stands.
create function pgqueue._sample_requeued_ids(
    queue_name text, within int8multirange, at timestamptz, wanted int, out ids bigint[], out stand_for bigint
)
language sql stable as $$
    -- At most wanted ids, at even distances among the first rows. An id can have several rows.
    with requeued as (
        select distinct r.id
        from (
            select c.id from pgqueue.requeued_messages c
            where c.queue_name = _sample_requeued_ids.queue_name
                and c.check_at >= (pgqueue._sweep_state_of(_sample_requeued_ids.queue_name, _sample_requeued_ids.at)).first_check_at
            order by c.check_at, c.id limit greatest(5000, 2 * wanted)
        ) r
        where r.id <@ within
    ),
    placed as (
        select w.id, row_number() over (order by w.id) as place, greatest(ceil(count(*) over () / wanted::numeric), 1)::bigint as step
        from requeued w
    )
    select coalesce(array_agg(p.id order by p.id) filter (where p.place % p.step = 0), '{}'), coalesce(max(p.step), 1)
    from placed p
$$;

create function pgqueue.peek(queue_name pgqueue.queue_of_any_access, max_records int default 100) returns int
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    state pgqueue.sweep_state;
    fresh_from_id bigint;
    pages_before bigint;
    examined int;
    ready int;
    total int;
    some_came_back boolean;
    sample record;
begin
    perform pgqueue._require(
        max_records between 1 and 10000, 'max_records', max_records::text, 'an integer from 1 to 10000');
    if q.max_in_flight is not null or q.rate_limit is not null then
        max_records := greatest(0, pgqueue._allowed_messages(q, at, max_records));
    end if;
    if q.paused_at is not null or max_records = 0 then
        return 0;
    end if;
    perform pgqueue._record_if_old(q, true);
    state := pgqueue._sweep_state_of(q.name, at);
    fresh_from_id := greatest(pg_sequence_last_value(q.fresh_from_id), pgqueue._first_possible_id(state));
    pages_before := pgqueue._pages_read(q);
    select count(*) into total
    from (
        select from pgqueue.scheduled_messages s
        where s.queue_name = q.name and s.due_at >= state.first_due_at and s.due_at <= at
            and (s.expires_at is null or s.expires_at > at) and not pgqueue._is_locked(s.xmax)
        order by s.due_at limit max_records
    ) r;
    if total < max_records then
        select count(*) into ready
        from (
            select
            from (
                select pgqueue._is_ready(m, at) as is_ready, m.xmax as held_by
                from pgqueue.messages m
                where (m.kind = q.kind or m.kind is null) and m.queue_name = q.name and m.id >= fresh_from_id
                order by m.id limit max_records + 400
            ) w
            where w.is_ready and not pgqueue._is_locked(w.held_by)
            limit max_records - total
        ) r;
        total := total + ready;
    end if;
    if total < max_records then
        select
            count(*),
            count(*) filter (where w.is_ready and not pgqueue._is_locked(w.held_by)),
            exists (
                select from pgqueue.requeued_messages c
                where c.queue_name = q.name and c.check_at >= state.first_check_at
            )
        into examined, ready, some_came_back
        from (
            select c.is_ready, c.held_by
            from unnest(int8multirange(int8range(1, greatest(1, fresh_from_id))) - state.vacant_ids) as r
            cross join lateral (
                select pgqueue._is_ready(m, at) as is_ready, m.xmax as held_by
                from pgqueue.messages m
                where (m.kind = q.kind or m.kind is null) and m.queue_name = q.name and m.id >= lower(r) and m.id < upper(r)
                order by m.id limit 400
            ) c
            limit 400
        ) w;
        total := total + ready;
    end if;
    if pgqueue._pages_read(q) - pages_before > 50 + 2 * (total + coalesce(examined, 0)) then
        perform pgqueue._record_if_old(q);
    end if;
    if total = 0 and examined = 400 then
        return 1;
    end if;
    if some_came_back and total < max_records then
        -- Messages that came back can have ids that the query above skips.
        select c.* into sample
        from pgqueue._sample_requeued_ids(
            q.name, state.vacant_ids * int8multirange(int8range(null, fresh_from_id)), at, 400) c;
        select count(*) into ready
        from pgqueue.messages m, pgqueue._lookup_keys(q.name, sample.ids) k
        where (m.kind = q.kind or m.kind is null) and pgqueue._is_ready(m, at) and not pgqueue._is_locked(m.xmax)
            and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id);
        total := total + ready;
        if total = 0 and sample.stand_for > 1 then
            return 1;
        end if;
    end if;
    return least(total, max_records);
end;
$$;
comment on function pgqueue.peek is
'Returns how many messages could be claimed or received now, up to max_records (1 to 10000). Rows that another
transaction holds are not counted. max_in_flight and rate_limit are observed. In a queue with group_limit, messages that
wait for others of their groups are counted. Locks and changes no message, waits for no consumer, and reads a bounded
number of rows. After many messages have left, it may record where the next call can start, unless the transaction is
read-only. Returns 1 if more than 400 messages in flight hide whether any message is ready, and 0 if the
queue is paused. Raises 22023, PQ001.';
-- Shows messages and dead letters without changing or locking them.

create function pgqueue.browse(
    queue_name pgqueue.queue_of_consumer_admin_or_reader,
    state text default 'ready',
    max_messages int default 100,
    after_id bigint default 0
) returns setof pgqueue.message
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
set enable_bitmapscan = off set enable_sort = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_unlocked_queue(queue_name);
begin
    perform pgqueue._require(state in ('ready', 'inflight', 'scheduled'), 'state', state,
        'ready, inflight or scheduled; dead letters are shown by pgqueue.browse_dead_messages');
    perform pgqueue._check_page(max_messages, after_id);
    perform pgqueue._require_untruncated_messages();
    return query
    select *
    from (
        (
            select
                m.id, m.queue_name, m.payload, m.body, m.headers, m.message_id, m.attempt_count, m.max_attempts,
                m.enqueued_at, m.visible_at, m.expires_at, m.claimed_by, m.claim_token, m.last_error
            from pgqueue.messages m
            where m.queue_name = q.name and m.id > greatest(after_id, (pgqueue._sweep_state_of(q.name, '-infinity')).first_id - 1)
                and case browse.state
                    when 'ready' then pgqueue._is_ready(m, at)
                    when 'inflight' then m.visible_at > at and m.attempt_count > 0
                    else m.visible_at > at and m.attempt_count = 0
                end
            order by m.id limit browse.max_messages
        )
        union all
        (
            select
                s.id, s.queue_name, s.payload, s.body, s.headers, s.message_id, s.attempt_count, s.max_attempts,
                s.enqueued_at, s.due_at, s.expires_at, s.claimed_by, null::uuid, s.last_error
            from pgqueue.scheduled_messages s
            where s.queue_name = q.name and s.id > greatest(after_id, (pgqueue._sweep_state_of(q.name, '-infinity')).first_id - 1)
                -- Evaluated once, before the first row. With `order by` it is one search of the index on the time.
                and (browse.state <> 'ready' or (
                    select true from pgqueue.scheduled_messages d
                    where d.queue_name = q.name and d.due_at between (pgqueue._sweep_state_of(q.name, at)).first_due_at and at
                    order by d.due_at limit 1
                ))
                and case browse.state
                    when 'ready' then s.due_at <= at and coalesce(s.expires_at > at, true)
                    when 'inflight' then false
                    -- A message that expired before a claim moved it stays scheduled until then, also for stats.
                    else s.due_at > at or s.expires_at <= at
                end
            order by s.id limit browse.max_messages
        )
    ) as found
    order by 1
    limit browse.max_messages;
end;
$$;
comment on function pgqueue.browse is
'Shows up to max_messages (1 to 10000) messages in state ready, inflight or scheduled, by id, starting after after_id;
for the next page pass the last id. State ready includes messages that wait for others of their groups, or that a limit
of the queue holds back. State inflight includes messages of a group that wait for their retry, if group_limit is 1.
State scheduled includes delayed messages that expired before a claim made them ready. Claims
and locks no message. Raises 22023, PQ001, 40001.';

create function pgqueue.browse_dead_messages(
    queue_name pgqueue.queue_of_admin_or_reader, max_messages int default 100, after_id bigint default 0
) returns setof pgqueue.dead_message
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q pgqueue.queues;
    spent bigint[];
begin
    -- After waiting for a drop_queue or for another kind of the queue, the statements below see the new state.
    perform pgqueue._lock_queue(queue_name), pgqueue._require_untruncated_messages();
    -- The undelivered messages of a dropped queue remain under its name, so the queue need not exist.
    if not exists (
        select from pgqueue.dead_messages d
        where d.queue_name = browse_dead_messages.queue_name collate "C"
            and d.id >= (pgqueue._sweep_state_of(browse_dead_messages.queue_name, '-infinity')).first_id
    ) then
        perform pgqueue._get_locked_queue(queue_name);
    end if;
    perform pgqueue._check_page(max_messages, after_id);
    if exists (select from pgqueue.queues where queues.name = queue_name collate "C") then
        q := pgqueue._get_locked_queue(queue_name);
        spent := pgqueue._find_spent_messages(q, at, after_id, max_messages);
    end if;
    return query
    select
        d.id, d.queue_name, d.payload, d.body, d.headers, d.message_id, d.attempt_count, d.max_attempts,
        d.enqueued_at, d.expires_at, d.claimed_by, d.last_error, d.reason, d.died_at
    from (
        (
            select c.* from pgqueue.dead_messages c
            where c.queue_name = browse_dead_messages.queue_name collate "C"
                and c.id > greatest(after_id, (pgqueue._sweep_state_of(browse_dead_messages.queue_name, '-infinity')).first_id - 1)
            order by c.id limit browse_dead_messages.max_messages
        )
        union all
        (
            select l.*
            from unnest(spent) as i
            -- `offset 0` keeps the planner from a join that reads the whole queue.
            cross join lateral (
                select m as spent_message from pgqueue.messages m where m.queue_name = q.name and m.id = i offset 0
            ) g
            cross join lateral pgqueue._as_dead_letter(g.spent_message, (g.spent_message).visible_at, null) l
            where pgqueue._keeps_dead_letter(q, g.spent_message)
        )
    ) d
    order by d.id limit browse_dead_messages.max_messages;
end;
$$;
comment on function pgqueue.browse_dead_messages is
'Shows up to max_messages (1 to 10000) dead letters with reason, last error and time, by id, starting after after_id;
for the next page pass the last id. Messages that no claim has moved to the dead letters yet are included; died_at is
the time when their last claim ended. For a dropped queue it shows the messages that were never delivered. Raises 22023,
PQ001, 40001.';

-- In PL/pgSQL, which keeps its plan: see _level_registers.
create function pgqueue._check_page(max_messages int, after_id bigint) returns void
language plpgsql stable as $$
begin
    perform pgqueue._require(max_messages between 1 and 10000, 'max_messages', max_messages::text, 'an integer from 1 to 10000');
    perform pgqueue._require(after_id is not null, 'after_id', null, 'the last id of the previous page, or 0');
end;
$$;
-- Reports the depth of queues at a bounded cost: up to 10,000 messages are counted; more are estimated from samples at
-- even distances, and the result names the estimated figures. Samples are read first, so that only a queue of moderate
-- depth is counted beyond 300 messages.

create function pgqueue._sample_ranges(ids int8multirange)
returns table (from_id bigint, below_id bigint, stands_for bigint) language sql immutable as $$
    -- About 16 strata of equal width. A quarter of each is read, at a different place in each, so that clusters of
    -- messages are neither always hit nor always missed.
    with id_ranges as (
        select lower(r) as from_id, upper(r) as below_id,
            least(upper(r) - lower(r), ceil(16.0 * (upper(r) - lower(r)) / sum(upper(r) - lower(r)) over ())) as parts
        from unnest(ids) as r
    ),
    strata as (
        select
            s.from_id + floor((s.below_id - s.from_id) * (n - 1) / s.parts)::bigint as from_id,
            s.from_id + floor((s.below_id - s.from_id) * n / s.parts)::bigint as below_id,
            row_number() over () * 0.618034 % 1 as place
        from id_ranges s cross join lateral generate_series(1, s.parts) as n
    )
    select
        t.from_id + floor((t.below_id - t.from_id) * 0.75 * t.place)::bigint,
        t.from_id + floor((t.below_id - t.from_id) * 0.75 * t.place)::bigint + ceil((t.below_id - t.from_id) * 0.25)::bigint,
        t.below_id - t.from_id
    from strata t
$$;

create function pgqueue._count_rows(q pgqueue.queues, at timestamptz, ids int8multirange, wanted int)
returns table (
    n bigint, first_id bigint, last_id bigint, ready bigint, inflight bigint, scheduled bigint, dead bigint,
    oldest_at timestamptz
)
language sql stable as $$
    -- Inlined. dead are the messages that the next sweep moves to the dead letters.
    select
        count(*), min(w.id), max(w.id),
        count(*) filter (where w.is_ready),
        count(*) filter (where w.visible_at > at and w.attempt_count > 0),
        count(*) filter (where w.visible_at > at and w.attempt_count = 0),
        count(*) filter (where w.is_dead),
        min(w.enqueued_at) filter (where w.is_ready)
    from (
        select c.*
        from unnest(ids) as r
        cross join lateral (
            select
                m.id, m.visible_at, m.attempt_count, m.enqueued_at,
                pgqueue._is_ready(m, at) as is_ready,
                m.visible_at <= at and not pgqueue._is_ready(m, at) and pgqueue._keeps_dead_letter(q, m) as is_dead
            from pgqueue.messages m
            where (m.kind = q.kind or m.kind is null) and m.queue_name = q.name and m.id >= lower(r) and m.id < upper(r)
            order by m.id limit wanted
        ) c
        limit wanted
    ) w
$$;

-- Counts up to 10,000 rows, and estimates beyond. Messages that came back to ids that sweeps skip are not counted.
create function pgqueue._message_stats(
    q pgqueue.queues, at timestamptz, out ready bigint, out inflight bigint, out scheduled bigint, out dead bigint,
    out oldest_at timestamptz, out estimated boolean
)
language plpgsql stable as $$
declare
    ids constant int8multirange := (select range_agg(r) from pgqueue._possible_ranges(q.name, 1, 9223372036854775807) r);
    max_counted int;
    n bigint;
    lowest_id bigint;
    last_id bigint;
    fresh_from_id bigint;
    sampled_ids int8multirange;
    deep_samples bigint;
begin
    foreach max_counted in array array[300, 10000] loop
        select c.n, c.first_id, c.ready, c.inflight, c.scheduled, c.dead, c.oldest_at
        into n, lowest_id, ready, inflight, scheduled, dead, oldest_at
        from pgqueue._count_rows(q, at, ids, max_counted + 1) c;
        -- Only a deep queue is locked: locks of thousands of queues would fill the lock table.
        estimated := n > max_counted and pgqueue._try_lock_existing_queue(q);
        exit when not estimated;
        fresh_from_id := coalesce(pg_sequence_last_value(q.fresh_from_id), 1);

        select m.id into last_id
        from (select r from unnest(ids) as r order by lower(r) desc) d
        cross join lateral (
            select c.id from pgqueue.messages c
            where (c.kind = q.kind or c.kind is null) and c.queue_name = q.name and c.id >= lower(d.r) and c.id < upper(d.r)
            order by c.id desc limit 1
        ) m
        limit 1;
        sampled_ids := ids * int8multirange(int8range(lowest_id, last_id, '[]'));
        -- The samples are split at fresh_from_id: messages in flight lie below it, ready ones mostly above.
        select
            sum(p.weight * p.ready), sum(p.weight * p.inflight), sum(p.weight * p.scheduled), sum(p.weight * p.dead),
            least(_message_stats.oldest_at, min(p.oldest_at)), count(*) filter (where p.weight * p.n > 10000 / 16)
        into ready, inflight, scheduled, dead, oldest_at, deep_samples
        from (
            select * from pgqueue._sample_ranges(sampled_ids * int8multirange(int8range(null, fresh_from_id)))
            union all
            select * from pgqueue._sample_ranges(sampled_ids * int8multirange(int8range(fresh_from_id, null)))
        ) t
        cross join lateral (
            select
                c.*,
                -- A sample of fewer than 16 messages was read completely, another one up to last_id.
                t.stands_for::numeric / case when c.n < 16 then t.below_id - t.from_id else c.last_id - t.from_id + 1 end as weight
            from pgqueue._count_rows(q, at, int8multirange(int8range(t.from_id, t.below_id)), 16) c
        ) p;
        -- Samples of messages that lie in groups of ids with gaps between them can be several times too high, and a
        -- single sample that begins in such a group any number of times.
        exit when deep_samples >= 4 and ready + inflight + scheduled + dead > 4 * 10000;
    end loop;
end;
$$;

create function pgqueue._other_ids(
    queue_name text, are_dead boolean, from_id bigint, below_id bigint, wanted int
) returns table (id bigint)
language sql stable as $$
    -- Inlined. One of the two is not executed.
    (
        select d.id from pgqueue.dead_messages d
        where are_dead and d.queue_name = _other_ids.queue_name and d.id >= from_id and d.id < below_id
        order by d.id limit wanted
    )
    union all
    (
        select s.id from pgqueue.scheduled_messages s
        where not are_dead and s.queue_name = _other_ids.queue_name and s.id >= from_id and s.id < below_id
        order by s.id limit wanted
    )
$$;

create function pgqueue._count_others(
    queue_name text, are_dead boolean, out messages bigint, out estimated boolean
)
language plpgsql stable as $$
declare
    first_id constant bigint := (pgqueue._sweep_state_of(queue_name, '-infinity')).first_id;
    max_counted int;
    deep_samples bigint;
begin
    foreach max_counted in array array[300, 10000] loop
        select count(*) into messages from pgqueue._other_ids(queue_name, are_dead, first_id, 9223372036854775807, max_counted + 1);
        estimated := messages > max_counted;
        exit when not estimated;
        select sum(p.weight * p.n), count(*) filter (where p.weight * p.n > 10000 / 16) into messages, deep_samples
        from pgqueue._sample_ranges(int8multirange(int8range(
            (select o.id from pgqueue._other_ids(queue_name, are_dead, first_id, 9223372036854775807, 1) o),
            case when are_dead
                then (select max(d.id) from pgqueue.dead_messages d where d.queue_name = _count_others.queue_name)
                else (select max(s.id) from pgqueue.scheduled_messages s where s.queue_name = _count_others.queue_name)
            end,
            '[]'))) t
        cross join lateral (
            select
                count(*) as n,
                t.stands_for::numeric / case when count(*) < 16 then t.below_id - t.from_id else max(w.id) - t.from_id + 1 end as weight
            from pgqueue._other_ids(queue_name, are_dead, t.from_id, t.below_id, 16) w
        ) p;
        exit when deep_samples >= 4 and messages > 4 * 10000;
    end loop;
end;
$$;

-- The statistics of one queue. Stable, so that all queries use one snapshot and no message is missed while it moves
-- between two tables.
create function pgqueue._stats(q pgqueue.queues, at timestamptz) returns pgqueue.queue_stats
language plpgsql stable as $$
declare
    scheduled constant record := pgqueue._count_others(q.name, false);
    dead constant record := pgqueue._count_others(q.name, true);
    counted record := pgqueue._message_stats(q, at);
    requeued_ids int8multirange;
    stand_for bigint;
    due bigint;
    due_oldest_at timestamptz;
    result pgqueue.queue_stats;
begin
    -- Messages that came back to ids that sweeps skip.
    select (select range_agg(int8range(i, i, '[]')) from unnest(r.ids) as i), r.stand_for into requeued_ids, stand_for
    from pgqueue._sample_requeued_ids(
        q.name, (select s.vacant_ids from pgqueue.sweep_state s where s.queue_name = q.name), at, 10000) r
    where exists (
        select from pgqueue.requeued_messages c
        where c.queue_name = q.name and c.check_at >= (pgqueue._sweep_state_of(q.name, at)).first_check_at
    );
    if requeued_ids is not null then
        select
            counted.ready + stand_for * r.ready as ready, counted.inflight + stand_for * r.inflight as inflight,
            counted.scheduled + stand_for * r.scheduled as scheduled, counted.dead + stand_for * r.dead as dead,
            least(counted.oldest_at, r.oldest_at) as oldest_at, counted.estimated or stand_for > 1 as estimated
        into counted
        from pgqueue._count_rows(q, at, requeued_ids, 10000) r;
    end if;
    -- Scheduled messages that are due count as ready: the next claim moves them to messages.
    select count(*), min(w.enqueued_at) into due, due_oldest_at
    from (
        select c.enqueued_at from pgqueue.scheduled_messages c
        where c.queue_name = q.name and c.due_at >= (pgqueue._sweep_state_of(q.name, at)).first_due_at and c.due_at <= at
            and coalesce(c.expires_at > at, true)
        order by c.due_at limit 10000
    ) w;
    if due = 10000 and scheduled.estimated then
        -- Due messages are counted up to 10,000 only. Beyond, all scheduled messages are assumed to be due.
        due := greatest(due, scheduled.messages);
    end if;
    result.queue_name := q.name;
    result.ready_messages := counted.ready + due;
    result.inflight_messages := counted.inflight;
    result.scheduled_messages := counted.scheduled + greatest(scheduled.messages - due, 0);
    result.dead_messages := dead.messages + counted.dead;
    result.oldest_age_seconds := date_part('epoch', at - nullif(least(counted.oldest_at, due_oldest_at), '-infinity'));
    result.paused := q.paused_at is not null;
    result.estimates := array_remove(array[
        case when counted.estimated or due > 10000 then 'ready_messages' end,
        case when counted.estimated then 'inflight_messages' end,
        case when counted.estimated or scheduled.estimated then 'scheduled_messages' end,
        case when dead.estimated or counted.estimated and counted.dead > 0 then 'dead_messages' end,
        case when counted.estimated then 'oldest_age_seconds' end
    ], null);
    return result;
end;
$$;

create function pgqueue._stats_and_record(q pgqueue.queues, at timestamptz, is_only boolean)
returns pgqueue.queue_stats
language plpgsql volatile as $$
declare
    pages_before bigint;
    s pgqueue.queue_stats;
begin
    if is_only then
        -- It reads registers, whose locks the transaction keeps.
        perform pgqueue._record_if_old(q, true);
    end if;
    pages_before := pgqueue._pages_read(q);
    s := pgqueue._stats(q, at);
    if pgqueue._pages_read(q) - pages_before
        > 50 + 2 * (s.ready_messages + s.inflight_messages + s.scheduled_messages + s.dead_messages)
    then
        perform pgqueue._record_if_old(q);
    end if;
    return s;
end;
$$;

-- Raises 55P03 or 42P01 while the queue is being dropped.
create function pgqueue._add_totals(s pgqueue.queue_stats) returns pgqueue.queue_stats
language plpgsql volatile set lock_timeout = '100 ms' as $$
begin
    -- pg_sequence_last_value would keep its lock until the end of the transaction, also if a subtransaction rolls back.
    execute format('select %s', (
        select string_agg(
            case when c is null then 'null' else format('(select t.last_value - (not t.is_called)::int from %s t)', c) end,
            ', ' order by r.place)
        from unnest(pgqueue._counter_roles()) with ordinality as r (role, place), pgqueue._counter(r.role, s.queue_name) as c))
    into s.enqueued_total, s.acknowledged_total, s.failed_total, s.dead_total;
    return s;
end;
$$;

create function pgqueue.stats(
    queue_name pgqueue.queue_of_any_access default null, caller pgqueue.caller default current_user
) returns setof pgqueue.queue_stats
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q pgqueue.queues;
    s pgqueue.queue_stats;
begin
    if queue_name is not null then
        q := pgqueue._get_locked_queue(queue_name);
    else
        perform pgqueue._require_untruncated_messages();
    end if;
    -- _stats is stable: without the locks, a table looks empty if a compaction ends between its snapshot and its read.
    lock table pgqueue.messages, pgqueue.scheduled_messages, pgqueue.dead_messages, pgqueue.requeued_messages,
        pgqueue.sweep_state in access share mode;
    if q.name is not null then
        return next pgqueue._add_totals(pgqueue._stats_and_record(q, at, true));
        return;
    end if;
    for q in select queues.* from pgqueue.queues order by queues.name loop
        continue when not pgqueue._may_use(caller, q.name, pgqueue._privileges_of('{producer,consumer,admin,raw,reader}'));
        -- The snapshot can be older than a drop_queue or a change of kind. The catalog shows the current state.
        if pg_relation_filenode(q.fresh_from_id) is null then
            select queues.* into q from pgqueue.queues where queues.queue_id = q.queue_id;
            if pg_relation_filenode(q.fresh_from_id) is null then
                continue when to_regclass(format('pgqueue.queue_%s_fresh_from_id', q.queue_id)) is null;
                perform pgqueue._raise('stale_snapshot', format('queue %L', q.name));
            end if;
        end if;
        s := pgqueue._stats_and_record(q, at, false);
        begin
            s := pgqueue._add_totals(s);
            -- Only an error releases the locks of the counters before the transaction ends. Locks of thousands of
            -- queues would fill the lock table.
            perform pgqueue._raise('queue_busy', q.name, 'stats');
        exception
            when sqlstate 'PQ004' then
                return next s;
            when lock_not_available or undefined_table then
                -- The queue is being dropped.
                null;
        end;
    end loop;
end;
$$;
comment on function pgqueue.stats is
'Returns the depth of one queue or, if queue_name is null, of every queue, by name: the numbers of ready, in-flight,
scheduled and dead messages, the age of the oldest ready message in seconds since it was sent (null if none is ready),
and whether the queue is paused. Ready messages include those that a claim does not return yet, because they wait for
others of their groups (group_limit) or because max_in_flight or rate_limit holds. If group_limit is 1, the in-flight
messages include those of a group that wait for their retry. A message without attempts left counts as dead as soon as
its last claim has ended, also while no claim has moved it to the dead letters yet. In a queue without dead letters no
figure includes it, and the next claim or sweep_queue deletes it. Up to 10,000 messages of a kind are counted. Higher
figures are estimated from samples and named in estimates, so that the cost stays bounded. The totals count since the
queue was created and never decrease: enqueued_total the messages that the functions sent, acknowledged_total those that
ack, exchange, receive and streams removed, failed_total the failed attempts that nack, reject, record_failure and
stream_skip reported, and dead_total the messages that became dead letters. Work that is rolled back stays counted, and
a crash or failover can add up to 32 to a total. Plain SQL on the tables is not counted. A queue that another
transaction is dropping is left out of the statistics of all queues. Raises PQ001, 40001.';
-- Lets a consumer wait without polling. It listens on channel, calls prepare_wait, claims once more, and sleeps. Until
-- its timeout an enqueue notifies; if no consumer waits, an enqueue sends no notification.

create function pgqueue.wake(queue_name pgqueue.queue_of_producer_admin_or_raw) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    perform pg_notify(pgqueue.channel((pgqueue._get_locked_queue(queue_name)).name), '');
end;
$$;
comment on function pgqueue.wake is
'Notifies waiting consumers when the transaction commits. Call it after an insert into pgqueue.messages by plain SQL.
Raises PQ001.';

create function pgqueue._visible_times(q pgqueue.queues, from_id bigint, below_id bigint)
returns setof timestamptz language plpgsql stable as $$
begin
    if q.kind is not null then
        return query
        select m.visible_at from pgqueue.messages m
        where (m.kind = q.kind or m.kind is null) and m.queue_name = q.name and m.id >= from_id and m.id < below_id
        order by m.id limit 1000;
    else
        return query
        select m.visible_at from pgqueue.messages_shared m
        where m.queue_name = q.name and m.id >= from_id and m.id < below_id
        order by m.id limit 1000;
    end if;
end;
$$;

create function pgqueue.next_due_at(queue_name pgqueue.queue_of_any_access) returns timestamptz
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_unlocked_queue(queue_name);
    at constant timestamptz := pgqueue._now();
    pages_before constant bigint := pgqueue._pages_read(q);
    living bigint;
    due_at timestamptz;
begin
    -- The last one locks the table of the messages before the next statement takes its snapshot, as in
    -- _record_vacant_ids.
    perform pgqueue._require_untruncated_messages(), pgqueue._record_if_old(q, true), pgqueue._visible_at_of(q, 0);
    select
        least(
            (
                select s.due_at from pgqueue.scheduled_messages s
                where s.queue_name = q.name and s.due_at >= (pgqueue._sweep_state_of(q.name, at)).first_due_at
                order by s.due_at limit 1
            ),
            requeued.due_at, others.due_at),
        requeued.living + others.living
    into due_at, living
    from
        (
            select min(m.visible_at) as due_at, count(m.visible_at) as living
            from (
                select r.id from pgqueue.requeued_messages r
                where r.queue_name = q.name and r.check_at >= (pgqueue._sweep_state_of(q.name, at)).first_check_at
                order by r.check_at limit 1000
            ) c
            cross join lateral (select pgqueue._visible_at_of(q, c.id) as visible_at offset 0) m
        ) requeued,
        (
            select min(m.visible_at) as due_at, count(*) as living
            from (
                select v as visible_at
                from pgqueue._possible_ranges(q.name, 1, 9223372036854775807) as r
                cross join lateral pgqueue._visible_times(q, lower(r), upper(r)) as v
                limit 1000
            ) m
        ) others;
    if exists (
        select from pgqueue.queues s
        cross join lateral (
            select from pgqueue.dead_messages d
            where d.queue_name = s.name and d.id >= (pgqueue._sweep_state_of(s.name, '-infinity')).first_id
            limit 1
        ) d
        where s.dead_letter_to = q.name
    ) then
        -- The next sweep takes them.
        due_at := least(due_at, at);
    end if;
    if pgqueue._pages_read(q) - pages_before > 50 + 2 * living then
        perform pgqueue._record_if_old(q);
    end if;
    -- While a session drops the queue, reading the register of rate_limit would wait for it.
    if q.rate_limit is not null and pgqueue._try_lock_existing_queue(q) then
        select case when due_at is not null
            then greatest(due_at, pgqueue._from_micros(b.used_until + (b.period + q.rate_limit - 1) / q.rate_limit)) end
        into due_at
        from pgqueue._read_bucket(q, pgqueue._to_micros(at)) b;
    end if;
    return case when due_at is not null then greatest(due_at, pgqueue._in_flight_full_until(q, at)) end;
end;
$$;
comment on function pgqueue.next_due_at is
'Returns when the next message becomes ready, because a delay, a backoff or a claim ends. The time is in the past if
messages are ready, and null if nothing is pending. In a queue with group_limit it is also in the past while a message
waits for others of its group, as in stats; prepare_wait returns when to look again. It is the present while a queue
whose dead_letter_to is this one has dead letters. If a limit of the queue holds, it is the time at which the limit
allows the next message: when the next token of rate_limit comes, and with max_in_flight when the next claim ends, if no
message is settled before. Only the first 1,000 messages by id are checked for the ends of claims. Raises PQ001,
40001.';

create function pgqueue.prepare_wait(queue_name pgqueue.queue_of_consumer, timeout interval default '60 s')
returns timestamptz language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    until timestamptz;
    due_at timestamptz;
begin
    perform pgqueue._require(
        pgqueue._is_interval_between(timeout, '0', '1 day'), 'timeout', timeout::text, 'an interval from 0 to 1 day');
    until := pgqueue._now() + timeout;
    perform setval(q.waiting_until, greatest(pgqueue._to_micros(until), pg_sequence_last_value(q.waiting_until)));
    -- A transaction that is sending now has read the register before this call, and will not notify.
    if exists (
        select from unnest(pgqueue._running_writers()) as w
        where w <> (select l.virtualtransaction from pg_locks l where l.pid = pg_backend_pid() limit 1)
    ) then
        until := least(until, pgqueue._now() + interval '1 s');
    end if;
    due_at := pgqueue.next_due_at(queue_name);
    if pgqueue._in_flight_full_until(q, pgqueue._now()) is not null then
        -- An acknowledgement, which frees a place, notifies no consumer.
        until := least(until, pgqueue._now() + interval '1 s');
    end if;
    if due_at is null or q.paused_at is not null then
        return until;
    end if;
    -- Messages that are due but could not be claimed are locked by other transactions. The pause keeps the consumer
    -- from retrying without a break. In a queue with groups they mostly wait for others of their groups, and an
    -- acknowledgement notifies no consumer.
    return least(until, greatest(
        due_at, pgqueue._now() + case when q.group_limit is null then interval '100 ms' else interval '1 s' end));
end;
$$;
comment on function pgqueue.prepare_wait is
'Announces that the caller listens on channel(queue_name) and will wait for up to timeout (0 to 1 day). Until then each
enqueue notifies. Returns the latest time at which to look for messages again. After this call and before the wait, look
once more: a message may have arrived in between. While other transactions are sending, or while
max_in_flight messages are in flight, the returned time is at most one second ahead: those transactions do not notify,
and neither does an acknowledgement. It is one second ahead if messages of a queue with group_limit are due, as they
mostly wait for others of their groups. Raises 22023, PQ001.';
-- What doctor finds in one queue, and the statement that repairs it. A limit around each lookup by id prevents a plan
-- that reads all messages of the queue instead.

create function pgqueue._has_index(partition regclass, keys text) returns boolean
language sql stable as $$
    select exists (
        select from pg_catalog.pg_index x
        where x.indrelid = partition and x.indisvalid
            and position(format('(%s', keys) in pg_catalog.pg_get_indexdef(x.indexrelid)) > 0
    )
$$;

-- With such ids the other findings would be wrong.
create function pgqueue._ids_above_sequence(q pgqueue.queues) returns setof pgqueue.finding
language plpgsql volatile as $$
declare
    top_id bigint;
    near_id bigint;
    last_id bigint;
    reach_id bigint;
begin
    -- Only ids above the sequence are read: a scan from the highest id would read rows that were removed. The sequence
    -- is read again afterwards, as messages may be sent in between.
    select t.last_value - (not t.is_called)::int into last_id from pgqueue.message_id t;
    top_id := greatest(
        (select max(m.id) from pgqueue.messages m where m.queue_name = q.name and m.id > last_id),
        (select max(c.id) from pgqueue.scheduled_messages c where c.queue_name = q.name and c.id > last_id),
        (select max(d.id) from pgqueue.dead_messages d where d.queue_name = q.name and d.id > last_id),
        (select w.settled_id from pgqueue.sweep_state w where w.queue_name = q.name));
    select t.last_value - (not t.is_called)::int into last_id from pgqueue.message_id t;
    if top_id is null or top_id <= last_id then
        return;
    end if;
    -- The sequence was set back, for example by a restore of the tables alone, or ids were set by hand. The repair
    -- moves the sequence beyond these ids, unless the ids would soon run out.
    reach_id := last_id + least(1000000000000, 9223372036854775807 - last_id);
    near_id := greatest(
        (select max(m.id) from pgqueue.messages m where m.queue_name = q.name and m.id <= reach_id),
        (select max(c.id) from pgqueue.scheduled_messages c where c.queue_name = q.name and c.id <= reach_id),
        (select max(d.id) from pgqueue.dead_messages d where d.queue_name = q.name and d.id <= reach_id),
        (select w.settled_id from pgqueue.sweep_state w where w.queue_name = q.name));
    return next row('error', q.name, 'ids_above_sequence',
        format('the queue has used the id %s, which the sequence pgqueue.message_id has not reached: messages sent now are found late or never, claims may fail, and an enqueue fails if it gets the id of another message', top_id),
        case when near_id > last_id then
            format('select setval(''pgqueue.message_id'', greatest(%s, pg_sequence_last_value(''pgqueue.message_id'')));', near_id)
        else format(
            'update pgqueue.messages set id = nextval(''pgqueue.message_id'') where queue_name = %1$L and id > %2$s;'
            ' update pgqueue.scheduled_messages set id = nextval(''pgqueue.message_id'') where queue_name = %1$L and id > %2$s;'
            ' update pgqueue.dead_messages set id = nextval(''pgqueue.message_id'') where queue_name = %1$L and id > %2$s;'
            ' select setval(%3$L, greatest(1, min(id))) from pgqueue.messages where queue_name = %1$L;',
            q.name, last_id, q.fresh_from_id)
        end)::pgqueue.finding;
end;
$$;

create function pgqueue._id_findings(q pgqueue.queues, at timestamptz) returns setof pgqueue.finding
language sql volatile as $$
    select
        'error', q.name, 'twin_messages',
        format('a message and a scheduled message have the same id, for %s, the first is %s: claims fail when the scheduled one comes due',
            pgqueue._with_number(count(*), 'id'), min(m.id)),
        format(
            'update pgqueue.scheduled_messages s set id = nextval(''pgqueue.message_id'') from pgqueue.messages m'
            ' where s.queue_name = %L and m.queue_name = s.queue_name and m.id = s.id;', q.name)
    from (
        select c.id from pgqueue.scheduled_messages c
        where c.queue_name = q.name and c.due_at >= (pgqueue._sweep_state_of(q.name, at)).first_due_at
        order by c.due_at, c.id limit 1000
    ) d
    cross join lateral (
        select c.id from pgqueue.messages c
        where (c.kind = q.kind or c.kind is null) and c.queue_name = q.name and c.id = d.id
        limit 1
    ) m
    having count(*) > 0
    union all
    -- Partitions of the right kind are pruned. So are messages without a kind, which claims adopt.
    select
        'error', q.name, 'wrong_kind',
        format('message %s, the first of these, has a kind that plain SQL has set and the queue does not have: no claim finds it', m.id),
        format(
            'with moved as (update pgqueue.messages m set kind = q.kind from pgqueue.queues q where q.name = %L'
            ' and m.queue_name = q.name and m.kind <> coalesce(q.kind, -1) returning m.queue_name, m.id),'
            ' listed as (insert into pgqueue.requeued_messages (queue_name, check_at, id)'
            ' select v.queue_name, timestamptz ''now'', v.id from moved v)'
            ' update pgqueue.sweep_state s set first_id = least(s.first_id, %s) where s.queue_name = %1$L;', q.name, m.id)
    from (
        select c.id from pgqueue.messages c
        where c.queue_name = q.name and c.kind <> coalesce(q.kind, -1)
        order by c.id limit 1
    ) m
$$;

-- What up to 1,000 messages that came back, the first ones up to 2,000 in all, and the last 1,000 scheduled ones show.
-- lapsed, lapsed_at: claims that ended over a minute ago. shortest: the shortest time to live. ahead_until,
-- delayed_until: until when claims and delays last that were made while the clock was ahead. seen_at: the last time
-- that the clock has shown. hidden_ids: messages hidden for longer than backoff_max with group_limit. grouped_id,
-- ranked_id: the first messages with a group and with a priority that have no effect.
create function pgqueue._examine_messages(
    q pgqueue.queues, at timestamptz, out lapsed bigint, out lapsed_at timestamptz, out shortest interval,
    out ahead_until timestamptz, out delayed_until timestamptz, out claimed_since timestamptz, out hidden_ids bigint[],
    out seen_at timestamptz, out grouped_id bigint, out ranked_id bigint
)
language plpgsql volatile as $$
begin
    select
        count(*) filter (where w.visible_at <= at - interval '1 min' and w.attempt_count > 0),
        min(w.visible_at) filter (
            where w.visible_at <= at - interval '1 min' and w.attempt_count > 0 and isfinite(w.visible_at)),
        min(w.expires_at - w.enqueued_at) filter (where isfinite(w.expires_at) and isfinite(w.enqueued_at)),
        max(w.visible_at) filter (
            where isfinite(w.visible_at) and w.visible_at > at and (
                at + interval '1 min' < case w.attempt_count when 0 then w.enqueued_at else w.claimed_at end
                -- A claim by plain SQL sets no claimed_at. No claim lasts longer than 12 hours.
                or w.claimed_attempt is distinct from w.attempt_count and w.visible_at > at + interval '12 h 1 min'
                and w.attempt_count > 0)),
        min(w.claimed_at) filter (
            where w.visible_at > at and w.claimed_attempt = w.attempt_count and not w.is_unclaimed
                and w.claimed_at < at - greatest(10 * q.visibility_timeout, '1 h')),
        array_agg(w.id) filter (
            where q.group_limit is not null and w.visible_at > pgqueue._add_interval(at, q.backoff_max + interval '1 min')
                -- Released or redriven while the clock was ahead, or waiting for a retry.
                and (w.attempt_count = 0 and w.enqueued_at <= at + interval '1 min'
                    or q.group_limit = 1 and (w.is_unclaimed or not isfinite(w.visible_at)))),
        max(greatest(w.enqueued_at, w.claimed_at)) filter (where isfinite(w.enqueued_at)),
        min(w.id) filter (where q.group_limit is null and w.headers ->> 'pgqueue.group' is not null),
        min(w.id) filter (where not q.priorities and w.headers ->> 'pgqueue.priority' is not null)
    into lapsed, lapsed_at, shortest, ahead_until, claimed_since, hidden_ids, seen_at, grouped_id, ranked_id
    from (
        select c.*
        from (
            -- Messages that came back can have ids that the possible ranges skip.
            select int8range(i, i, '[]') as ids
            from pgqueue._sample_requeued_ids(
                q.name, (select w.vacant_ids from pgqueue.sweep_state w where w.queue_name = q.name), at, 1000) as s
            cross join lateral unnest(s.ids) as i
            union all
            select p from pgqueue._possible_ranges(q.name, 1, 9223372036854775807) as p
        ) r
        cross join lateral (
            -- Not the whole row: its payload and body would be read from the toast table.
            select
                m.id, m.visible_at, m.attempt_count, m.claimed_attempt, m.expires_at, m.enqueued_at, m.claimed_at,
                m.headers, pgqueue._is_unclaimed(m) as is_unclaimed
            from pgqueue.messages m
            where m.queue_name = q.name and m.id >= lower(r.ids) and m.id < upper(r.ids)
            order by m.id limit 1000
        ) c
        limit 2000
    ) w;
    select
        -- The message of a schedule has its due time as enqueued_at.
        max(w.due_at) filter (where w.enqueued_at > at + interval '1 min' and w.enqueued_at < w.due_at),
        greatest(seen_at, max(w.enqueued_at) filter (where w.enqueued_at < w.due_at and isfinite(w.enqueued_at))),
        least(grouped_id, min(w.id) filter (where q.group_limit is null and w.headers ->> 'pgqueue.group' is not null)),
        least(ranked_id, min(w.id) filter (where not q.priorities and w.headers ->> 'pgqueue.priority' is not null))
    into delayed_until, seen_at, grouped_id, ranked_id
    from (
        select d.id, d.due_at, d.enqueued_at, d.headers from pgqueue.scheduled_messages d
        where d.queue_name = q.name and d.due_at > at
        order by d.due_at desc limit 1000
    ) w;
end;
$$;

create function pgqueue._clock_findings(
    q pgqueue.queues, at timestamptz, ahead_until timestamptz, delayed_until timestamptz, seen_at timestamptz
) returns setof pgqueue.finding
language plpgsql volatile as $$
declare
    late_until timestamptz;
    late_from timestamptz;
    was_ahead boolean;
begin
    -- A returned message does not show that the clock was ahead. Other messages and dead letters do.
    select greatest(seen_at, max(w.died_at) filter (where isfinite(w.died_at))) into seen_at
    from (
        select d.died_at from pgqueue.dead_messages d
        where d.queue_name = q.name and d.id >= (pgqueue._sweep_state_of(q.name, '-infinity')).first_id
        order by d.id limit 1000
    ) w;
    was_ahead := coalesce(seen_at > at + interval '1 min', false);
    late_from := pgqueue._add_interval(at, case when was_ahead then interval '1 min' else q.backoff_max + interval '1 min' end);
    select max(w.due_at) into late_until
    from (
        select d.due_at, d.enqueued_at, d.attempt_count, d.claimed_by from pgqueue.scheduled_messages d
        where d.queue_name = q.name and d.due_at > late_from
        order by d.due_at desc limit 1000
    ) w
    where w.enqueued_at <= at + interval '1 min'
        and (w.attempt_count > 0 or w.claimed_by is not null or was_ahead and w.due_at <= seen_at);
    return query
    select f.severity, q.name, f.finding, f.detail, f.repair
    from (values
        (ahead_until is not null, 'warning', 'clock_ahead',
            format('messages were sent or claimed while the clock was ahead: they cannot be claimed before %s', ahead_until),
            format(
                'update pgqueue.messages set visible_at = %1$L, enqueued_at = least(enqueued_at, %1$L) where queue_name = %2$L and visible_at > %1$L'
                ' and (%3$L < case attempt_count when 0 then enqueued_at else claimed_at end'
                ' or claimed_attempt is distinct from attempt_count and visible_at > %4$L and attempt_count > 0);',
                at, q.name, at + interval '1 min', at + interval '12 h 1 min')),
        (delayed_until is not null, 'warning', 'clock_ahead',
            format('delayed messages were sent while the clock was ahead: they are not due before %s', delayed_until),
            format(
                'update pgqueue.scheduled_messages'
                ' set due_at = greatest(%1$L, clock_timestamp()) + (due_at - enqueued_at), enqueued_at = %1$L'
                ' where queue_name = %2$L and due_at > %1$L and enqueued_at > %3$L and enqueued_at < due_at;',
                at, q.name, at + interval '1 min')),
        (late_until is not null, 'info', 'late_retries',
            case
                when was_ahead then format('messages wait for up to %s: they were returned while the clock was ahead, until %s, or somebody asked for it',
                    late_until - at, seen_at)
                else format('returned messages wait for up to %s, longer than the backoff_max of %s: consumers asked for it, or the clock was ahead',
                    late_until - at, q.backoff_max)
            end,
            format(
                -- An earlier time than that of the statement could be missed (sweep_state.first_due_at).
                'update pgqueue.scheduled_messages set due_at = greatest(%1$L, clock_timestamp()) where queue_name = %2$L and due_at > %3$L'
                ' and enqueued_at <= %4$L and (attempt_count > 0 or claimed_by is not null%5$s); -- if nobody has asked for it',
                at, q.name, late_from, at + interval '1 min',
                case when was_ahead then format(' or due_at <= %L', seen_at) end))
    ) as f (is_found, severity, finding, detail, repair)
    where f.is_found;
end;
$$;

create function pgqueue._register_findings(q pgqueue.queues) returns setof pgqueue.finding
language sql volatile as $$
    select
        'error', q.name, 'missing_registers',
        'the queue was dropped or altered while this database was dumped, so its row does not name its registers: the functions do not find the queue',
        format('update pgqueue.queues set fresh_from_id = fresh_from_id where name = %L;', q.name)
    from pgqueue.queues c
    where c.name = q.name and c.fresh_from_id is distinct from to_regclass(format('pgqueue.queue_%s_fresh_from_id', c.queue_id))
        -- Without the lock, another session could be dropping or altering it now. A fixed snapshot can be older.
        and pg_try_advisory_xact_lock_shared(pgqueue._lock_key(q.name)) and not pgqueue._has_fixed_snapshot()
$$;

create function pgqueue._queue_findings(q pgqueue.queues, at timestamptz, peek_delay interval)
returns setof pgqueue.finding language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off
set enable_sort = off set jit = off as $$
declare
    s pgqueue.queue_stats;
    partition regclass;
    r record;
    missing_counters text[];
    found_by_modules pgqueue.finding[];
begin
    return query select f.* from pgqueue._ids_above_sequence(q) f;
    if found then
        return;
    end if;
    r := pgqueue._examine_messages(q, at);
    s := pgqueue._stats(q, at);
    found_by_modules := array(select f from pgqueue._module_findings(q) f);
    missing_counters := case when q.counters then pgqueue._missing_counters(q.name) else '{}' end;
    partition := case when r.shortest is not null then pgqueue._partition_of(q) end;
    return query
    select f.* from pgqueue._id_findings(q, at) f
    union all
    select f.* from pgqueue._clock_findings(q, at, r.ahead_until, r.delayed_until, r.seen_at) f
    union all
    select f.* from unnest(found_by_modules) f
    union all
    select f.severity, q.name, f.finding, f.detail, f.repair
    from (values
        (r.lapsed > 0 and q.paused_at is null, 'warning', 'stuck_claims',
            format('%s expired, the first %s ago, and no consumer has claimed since',
                pgqueue._with_number(r.lapsed, 'claim'), date_trunc('second', at - r.lapsed_at)),
            'Start a consumer: any claim takes these messages over or removes them.'),
        (r.claimed_since is not null, 'warning', 'long_claims',
            format('messages are in flight, the first claimed and extended for %s: a handler may hang',
                date_trunc('second', at - r.claimed_since)),
            format(
                'select id, claimed_by, enqueued_at from pgqueue.browse(%L, ''inflight'') order by enqueued_at;'
                ' -- restart that consumer; a handler_timeout prevents this', q.name)),
        (missing_counters <> '{}', 'warning', 'missing_counter',
            format('the queue has no sequence for these counters: %s; stats returns null for their totals', array_to_string(missing_counters, ', ')),
            format('select pgqueue.alter_queue(%L);', q.name)),
        (q.paused_at is not null, 'info', 'paused_queue',
            format('paused since %s, %s ready', q.paused_at, pgqueue._with_number(s.ready_messages, 'message')),
            format('select pgqueue.resume_queue(%L);', q.name)),
        (s.dead_messages > 0, 'info', 'dead_messages',
            pgqueue._with_number(s.dead_messages, 'dead letter'),
            format('select * from pgqueue.browse_dead_messages(%L);', q.name)),
        (r.grouped_id is not null, 'info', 'unused_group_keys',
            format('messages have a group_key, the first is %s, and the queue has no group_limit: messages of a group are delivered together', r.grouped_id),
            format('select pgqueue.alter_queue(%L, group_limit => 1); -- or send them without group_key', q.name)),
        (r.ranked_id is not null, 'info', 'unused_priorities',
            format('messages have a priority, the first is %s, and the queue has no priorities: they are delivered in the order of their ids', r.ranked_id),
            format('select pgqueue.alter_queue(%L, priorities => true); -- or send them without priority', q.name)),
        (r.shortest < peek_delay, 'warning', 'peek_delay_above_time_to_live',
            format('messages expire after as little as %s, but consumers poll every %s', r.shortest, peek_delay),
            format('Let consumers poll more often than every %s.', r.shortest)),
        -- A room that needs another index reports that one instead.
        (partition is not null and not pgqueue._has_index(partition, 'queue_name, expires_at')
            and not pgqueue._has_index(partition, '(expires_at AT TIME ZONE ''UTC''::text)')
            and not exists (select from unnest(found_by_modules) f where f.finding = 'missing_index'),
            'warning', 'missing_index',
            format('messages expire, and %s has no index on expires_at: purge_expired reads the whole queue', partition),
            format('create index concurrently on %s (queue_name, expires_at) where expires_at is not null;', partition))
    ) as f (is_found, severity, finding, detail, repair)
    where f.is_found
    union all
    (
        select
            case when w.holds then 'warning' else 'info' end, q.name, case when w.holds then 'held_group' else 'late_retries' end,
            case when w.holds
                then format('group %L waits for message %s, which is hidden until %s', left(m.headers ->> 'pgqueue.group', 255), m.id, m.visible_at)
                else format('message %s is hidden until %s: somebody asked for it, or the clock was ahead', m.id, m.visible_at) end,
            format('update pgqueue.messages set visible_at = %L where queue_name = %L and id = %s; -- %s', at, q.name, m.id,
                case when w.holds then 'or delete the message' else 'if nobody has asked for it' end)
        from unnest(r.hidden_ids) as hidden_id
        cross join lateral (select c.* from pgqueue.messages c where c.queue_name = q.name and c.id = hidden_id limit 1) m
        cross join lateral (
            select q.group_limit = 1 and exists (
                select from pgqueue.messages c
                where pgqueue._is_in_queue(c, q.kind, q.name) and c.id > m.id
                    and pgqueue._group_position(c.headers, c.id) = pgqueue._group_position(m.headers, m.id)
            ) as holds
        ) w
        where w.holds or m.attempt_count = 0 and m.enqueued_at <= at + interval '1 min'
        order by w.holds desc, m.id limit 10
    )
    union all
    select
        'warning', q.name, 'long_writer',
        format('a transaction that writes to pgqueue.messages has been open for more than %s; until it ends, sweeps read the ids of all messages consumed since',
            date_trunc('second', at - w.bound_at)),
        'select pid, virtualtransaction from pg_locks where relation = ''pgqueue.messages''::regclass;'
    from pgqueue.sweep_state w
    where w.queue_name = q.name and at - w.bound_at > interval '1 min' and w.writers && pgqueue._running_writers();
end;
$$;
-- Finds problems, and for each the statement that repairs it. findings.sql has those of one queue.

create function pgqueue.version() returns text
language sql immutable parallel safe security definer set search_path = pg_catalog, pg_temp set jit = off
as $$ select '0.2.0-dev'::text $$;
comment on function pgqueue.version is
'Returns the version of the installed functions.';

create function pgqueue._horizon_holders() returns table (pinned_for interval, holder text, repair text)
language sql stable as $$
    select
        pgqueue._now() - a.xact_start,
        pg_catalog.format('process %s (%s, %s), transaction open, state: %s, snapshot %s transactions old', a.pid,
            coalesce(a.usename, 'no user'), coalesce(nullif(a.application_name, ''), a.backend_type, 'unknown'),
            coalesce(a.state, 'hidden'), coalesce(age(a.backend_xmin), age(a.backend_xid))),
        pg_catalog.format('select pg_terminate_backend(%s);', a.pid)
    from pg_catalog.pg_stat_activity a
    where (a.backend_xmin is not null or a.backend_xid is not null)
        and a.backend_type is distinct from 'autovacuum worker'
        -- Without pg_read_all_stats the start of a transaction of another role is hidden, and its age is not.
        and (a.xact_start is not null or age(a.backend_xmin) >= 50000)
        and a.pid <> pg_catalog.pg_backend_pid()
        -- Those of other databases do not hold back the vacuum of these tables.
        and (a.datid is null or a.datname = pg_catalog.current_database())
    union all
    select
        pgqueue._now() - p.prepared,
        pg_catalog.format('prepared transaction %L of %s', p.gid, p.owner),
        pg_catalog.format('rollback prepared %L;', p.gid)
    from pg_catalog.pg_prepared_xacts p
    where p.database = pg_catalog.current_database()
    union all
    select
        null,
        case
            when s.active then pg_catalog.format('a query on the standby that uses replication slot %s, snapshot %s transactions old',
                s.slot_name, age(s.xmin))
            else pg_catalog.format('unused replication slot %s holds transaction %s', s.slot_name, s.xmin)
        end,
        case
            when s.active then 'End the long transaction on that standby, or set hot_standby_feedback = off there.'
            else pg_catalog.format('select pg_drop_replication_slot(%L);', s.slot_name)
        end
    from pg_catalog.pg_replication_slots s
    -- A standby in use always holds a recent transaction.
    where s.xmin is not null and (not s.active or age(s.xmin) >= 50000)
$$;

create function pgqueue._space_used() returns text
language plpgsql volatile set lock_timeout = '100 ms' as $$
begin
    return format('the tables of pgqueue, without the archive, occupy %s and have about %s', pg_size_pretty(sum(pg_total_relation_size(c.oid))),
        pgqueue._with_number(sum(pg_stat_get_dead_tuples(c.oid))::bigint, 'dead row'))
    from pg_class c
    where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r'
        -- Nothing is deleted from the archive row by row.
        and c.relname !~ '^archived_messages_';
exception when lock_not_available then
    return 'the size of the tables of pgqueue cannot be read, as one of them is locked';
end;
$$;

-- The names under which there are messages but no queue: of plain SQL, or of dead letters that drop_queue has left.
create function pgqueue._orphaned_messages() returns table (table_name text, queue_name text)
language plpgsql stable as $$
declare
    searched text;
begin
    -- One index probe for each gap between the names of two queues, and one for each name found there. A scan over the
    -- rows of a queue would read those that were removed.
    foreach searched in array '{messages,scheduled_messages,dead_messages}'::text[] loop
        for table_name, queue_name in execute format(
            $query$
            with recursive names as (
                select d.name as queue_name, lead(d.name) over (order by d.name) as below, false as is_found
                from pgqueue.queues d
                union all
                select ''::text collate "C", (select min(d.name) from pgqueue.queues d), false
                union all
                select f.queue_name, n.below, true
                from names n
                cross join lateral (
                    (
                        select m.queue_name from pgqueue.%1$I m
                        where m.queue_name > n.queue_name and m.queue_name < n.below
                        order by m.queue_name limit 1
                    )
                    union all
                    (
                        select m.queue_name from pgqueue.%1$I m
                        where m.queue_name > n.queue_name and n.below is null
                        order by m.queue_name limit 1
                    )
                ) f
            )
            select %1$L, a.queue_name from names a where a.is_found
            $query$, searched)
        loop
            return next;
        end loop;
    end loop;
end;
$$;

create function pgqueue._server_findings() returns setof pgqueue.finding
language sql volatile as $$
    select
        'warning', null::text, 'pinned_horizon',
        format('%s, for %s: vacuum cannot remove rows deleted or updated since; %s',
            h.holder, coalesce(date_trunc('second', h.pinned_for)::text, 'an unknown time'), pgqueue._space_used()),
        h.repair
    from pgqueue._horizon_holders() h
    where h.pinned_for > interval '1 min' or h.pinned_for is null
    union all
    -- Without pg_read_all_stats the owner of pgqueue does not see the transactions of other roles.
    select
        'info', null::text, 'hidden_transactions',
        format('role %I, the owner of pgqueue, cannot see the transactions of other roles: doctor does not find one that pins the horizon', current_user),
        format('grant pg_read_all_stats to %I;', current_user)
    where not pg_has_role(current_user, 'pg_read_all_stats', 'usage')
    union all
    select
        'warning', null::text, 'few_locks',
        format('a sweep locks the tables of all %s dedicated queues, and the server has room for %s locks per connection: calls may fail with "out of shared memory"',
            w.tables, w.locks),
        format('alter system set max_locks_per_transaction = %s; -- and restart the server', 64 * ceil((w.tables + 16) / 32.0))
    from (
        select count(*) as tables, current_setting('max_locks_per_transaction')::int as locks
        from pgqueue.queues d where d.dedicated
    ) w
    -- In addition, a call locks the tables and indexes that all queues share, and the registers of its queue.
    where w.tables + 16 > w.locks
    union all
    select
        'error', null::text, 'autovacuum_off',
        format('autovacuum is off for %s: rows of consumed messages are never removed', c.table_name),
        c.repair
    from (
        select 'the server' as table_name, 'alter system set autovacuum = on; select pg_reload_conf();' as repair
        where not current_setting('autovacuum')::boolean
        union all
        select c.oid::regclass::text, format('alter table %s reset (autovacuum_enabled);', c.oid::regclass)
        from pg_class c
        where c.relnamespace = 'pgqueue'::regnamespace
            and exists (
                select from pg_options_to_table(c.reloptions) o
                where o.option_name = 'autovacuum_enabled' and not o.option_value::boolean
            )
    ) c
$$;

create function pgqueue._installation_findings() returns setof pgqueue.finding
language sql volatile as $$
    select f.* from pgqueue._server_findings() f
    union all
    select
        case o.table_name when 'dead_messages' then 'info' else 'error' end, n.shown,
        case o.table_name when 'dead_messages' then 'undelivered_messages' else 'orphaned_messages' end,
        format('pgqueue.%s holds messages of queue %L, which does not exist', o.table_name, n.shown),
        case when n.is_valid then format('select pgqueue.create_queue(%L);', o.queue_name)
        else
            format('No queue can have this name. Move the messages to another queue: update pgqueue.%s'
                ' set queue_name = <its name> where md5(queue_name) = %L;', o.table_name, md5(o.queue_name))
        end
    from pgqueue._orphaned_messages() o
    cross join lateral (
        select
            pgqueue._is_name(o.queue_name) as is_valid,
            left(o.queue_name, 128) || case when length(o.queue_name) > 128 then '...' else '' end as shown
    ) n
    union all
    select
        'error', null::text, 'ids_above_sequence',
        format('a queue has the number %s, which the sequence pgqueue.queue_id has not reached: create_queue fails', max(d.queue_id)),
        format('select setval(''pgqueue.queue_id'', %s);', max(d.queue_id))
    from pgqueue.queues d
    having max(d.queue_id) > (select t.last_value - (not t.is_called)::int from pgqueue.queue_id t)
    union all
    select
        'warning', null::text, 'unfit_keys',
        'pgqueue was moved here from another major version of PostgreSQL and still looks up ids in the way made for that version: calls cost a tenth more, or read whole queues',
        'select pgqueue._install_key_lookup();'
    -- After pg_upgrade, or a restore of an installation that is no extension.
    where (select count(*) from pgqueue._lookup_keys('', '{1,2}'))
        <> case when current_setting('server_version_num')::int < 170000 then 2 else 1 end
    union all
    select
        'error', null::text, 'sequence_cache',
        'the sequence pgqueue.message_id caches ids: messages that commit late may never be found',
        'alter sequence pgqueue.message_id cache 1;'
    from pg_sequence s
    where s.seqrelid = 'pgqueue.message_id'::regclass and s.seqcache <> 1
    union all
    select
        'error', m.queue_name, 'misplaced_messages',
        format('message %s, the first of these, has an id that sweeps skip: its id or queue_name was set by hand, or the sequence pgqueue.message_id was set back',
            min(m.id)),
        format(
            'insert into pgqueue.requeued_messages (queue_name, check_at, id) select m.queue_name, timestamptz ''now'', m.id'
            ' from pgqueue.sweep_state s, unnest(s.vacant_ids) d, pgqueue.messages m'
            ' where s.queue_name = %1$L and m.queue_name = s.queue_name and m.id <@ d'
            ' and not exists (select from pgqueue.requeued_messages r where r.queue_name = m.queue_name and r.id = m.id);'
            ' update pgqueue.sweep_state set first_id = least(first_id, %2$s) where queue_name = %1$L;',
            m.queue_name, min(m.id))
    from (
        -- The first message of every range. A message that just came back is recorded in requeued_messages by the same
        -- transaction.
        select w.queue_name, c.id
        from pgqueue.sweep_state w
        cross join lateral unnest(w.vacant_ids) as d
        cross join lateral (
            select t.id from pgqueue.messages t
            where t.queue_name = w.queue_name and t.id >= coalesce(lower(d), 0) and t.id < upper(d)
                and not exists (select from pgqueue.requeued_messages r where r.queue_name = t.queue_name and r.id = t.id)
            order by t.id limit 1
        ) c
    ) m
    group by m.queue_name
    union all
    select f.* from pgqueue._module_findings() f
$$;

create function pgqueue.doctor(peek_delay interval default '1 s', caller pgqueue.caller default current_user)
returns setof pgqueue.finding language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set quote_all_identifiers = off set datestyle = iso set intervalstyle = postgres set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q pgqueue.queues;
    findings pgqueue.finding[];
begin
    perform pgqueue._require_untruncated_messages();
    perform pgqueue._require(pgqueue._is_interval_between(peek_delay, '0', '3652.5 days'), 'peek_delay', peek_delay::text,
        'an interval from 0 to 10 years (3652.5 days)');

    if has_table_privilege(caller, 'pgqueue.access_any'::regclass, pgqueue._privileges_of('{admin}')) then
        return query select f.* from pgqueue._installation_findings() f;
    end if;

    for q in
        select queues.* from pgqueue.queues
        where pgqueue._may_use(caller, queues.name, pgqueue._privileges_of('{admin}'))
        order by queues.name
    loop
        findings := '{}';
        begin
            if pgqueue._try_lock_existing_queue(q) then
                findings := array(select f from pgqueue._queue_findings(q, at, peek_delay) f);
            end if;
            findings := array(select f from pgqueue._register_findings(q) f) || findings;
            -- Only an error releases the lock before the transaction ends. Locks of thousands of queues would fill the
            -- lock table.
            perform pgqueue._raise('queue_busy', q.name, 'doctor');
        exception when sqlstate 'PQ004' then
            return query select f.* from unnest(findings) f;
        end;
    end loop;
end;
$$;
comment on function pgqueue.doctor is
'Checks the installation and returns one row per problem, with the statement or action that repairs it; no row means
that none was found. An admin of some queues gets the findings about these. severity is error, warning or info. finding
is one of: pinned_horizon, orphaned_messages, undelivered_messages (left by a dropped queue), compaction (whether it
runs while the horizon is pinned, and the last one), uncompacted_table (nearly all of it is dead rows),
stopped_schedule, misplaced_messages, ids_above_sequence, twin_messages (checked among the first 1,000 scheduled
messages), wrong_kind (set by plain SQL, so that no claim finds the message), sequence_cache, unfit_keys (after
pg_upgrade), hidden_transactions (the owner of pgqueue cannot see the transactions of other roles), few_locks (for the
number of dedicated queues), autovacuum_off, stale_staging, missing_counter, missing_registers (of a queue that was
dropped or altered while this database was dumped), paused_queue, dead_messages, held_group (waits for a dead letter, or
for a message that is hidden for longer than backoff_max), stuck_claims, long_claims (extended for more than an hour and
ten visibility timeouts), clock_ahead, late_retries (returned messages wait for longer than backoff_max, or the clock
was ahead), unused_group_keys, unused_priorities (the queue has no group_limit, or no priorities), lapsed_stream,
peek_delay_above_time_to_live (for consumers that poll every peek_delay), missing_index, long_writer, unmanaged_grant
(by hand, not by grant_access), archive_mark, unfiled_messages, missing_archive_day, archive_overdue, doubled_archive (a
dump was restored twice), leftovers (of queues, in a database that was restored without rows), missing_relation,
renamed_relation (of a transport, by hand), subscriber_without_relation (endpoints of a transport do not find the
subscription). Raises 22023 unless peek_delay is from 0 to 10 years.';
-- What a restore without rows leaves. A dump of the schema alone has the tables, sequences and views that were created
-- for queues, but not the rows of queues. create_queue uses what is left of a queue, and doctor reports the rest.

-- The relations that belong to no queue. queue_name is the queue for which a dedicated table was created; the other
-- relations of that queue are not listed.
create function pgqueue._leftovers() returns table (relation regclass, kind text, queue_name text)
language sql stable as $$
    with named as (
        select n.name
        from pgqueue.queues q
        cross join lateral (
            select pgqueue._sequence_name(r, q.name) as name
            from unnest(pgqueue._counter_roles() || '{archives}'::text[]) as r
            union all
            select pgqueue._access_view(q.name)
        ) n
    )
    select
        c.oid::regclass, c.relkind::text,
        -- The comment of a dedicated table has the name of its queue.
        case when c.relispartition then
            substring(pg_catalog.obj_description(c.oid, 'pg_class'), '^The messages of queue (.*)[.]$') end
    from pg_catalog.pg_class c
    cross join lateral (select substring(c.relname, '^(?:messages|transports|queue)_([0-9]+)(?![0-9])')::bigint) as w (number)
    where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'S', 'v') and case
        when w.number is not null then
            not exists (select from pgqueue.queues q where q.queue_id = w.number)
            and (c.relispartition or pg_catalog.to_regclass(format('pgqueue.messages_%s', w.number)) is null)
        when c.relname ~ '^(access|archives|enqueued|acknowledged|failed|dead)_[0-9a-f]+$' then
            'pgqueue.' || c.relname not in (select n.name from named n)
            -- The comment of a view of access is a pattern.
            and pg_catalog.obj_description(c.oid, 'pg_class') is null
    end
$$;

-- The repair that doctor suggests. Dedicated tables stay, as there can be messages in them.
create function pgqueue._drop_leftovers() returns void
language plpgsql volatile as $$
declare
    leftover record;
begin
    -- No queue is created meanwhile.
    lock table only pgqueue.queues in share mode;
    for leftover in select l.* from pgqueue._leftovers() l where l.queue_name is null loop
        execute format(
            case leftover.kind
                when 'S' then 'drop sequence %s cascade' when 'v' then 'drop view %s cascade' else 'drop table %s cascade'
            end,
            leftover.relation);
    end loop;
end;
$$;

create function pgqueue._findings_of_leftovers(q pgqueue.queues) returns setof pgqueue.finding
language sql stable as $$
    with leftovers as materialized (
        select l.* from pgqueue._leftovers() l where q.name is null
    )
    (
        select
            'warning', l.queue_name, 'leftovers',
            format('%s is the table of a queue that does not exist: a dump without rows was restored', l.relation),
            format('select pgqueue.create_queue(%L);', l.queue_name)
        from leftovers l
        where l.queue_name is not null
        order by l.queue_name
    )
    union all
    select
        'warning', null, 'leftovers',
        format('%s to no queue, the first is %s: a dump without rows was restored',
            case count(*) when 1 then '1 relation belongs' else count(*) || ' relations belong' end, min(l.relation::text)),
        'select pgqueue._drop_leftovers(); -- first create the queues that are missing, which keep the access of roles'
    from leftovers l
    where l.queue_name is null
    having count(*) > 0
$$;
-- Claims from several queues in one call, for consumers that serve queues of different importance.

create function pgqueue.claim_any(
    queue_names text[],
    max_messages int default 1,
    visibility_timeout interval default null,
    claimed_by text default null,
    caller pgqueue.caller default current_user
) returns setof pgqueue.message
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set jit = off as $$
declare
    queue_name text;
    wanted int := max_messages;
    found_messages int;
    grouped_queues_left int := 10;
begin
    if queue_names is null or array_ndims(queue_names) is distinct from 1 or cardinality(queue_names) > 100
        or array_position(queue_names, null) is not null
        or cardinality(queue_names) > (select count(distinct n collate "C") from unnest(queue_names) as n)
    then
        perform pgqueue._raise_invalid('queue_names', left(queue_names::text, 300),
            'an array of 1 to 100 names of queues, each once');
    end if;
    -- An array of a domain would not do: PostgreSQL checks a literal of such a type when it parses the statement, with
    -- the rights of that role, and not again for the role that runs a view, function or prepared statement later.
    foreach queue_name in array queue_names loop
        if not pgqueue._may_use(caller, queue_name, pgqueue._privileges_of('{consumer}')) then
            perform pgqueue._raise('queue_not_found', queue_name, caller, 'consumer');
        end if;
        return query select m.* from pgqueue.claim(queue_name, wanted, visibility_timeout, claimed_by) m;
        get diagnostics found_messages = row_count;
        wanted := wanted - found_messages;
        exit when wanted = 0;
        if found_messages > 0 and exists (
            select from pgqueue.queues q where q.name = queue_name collate "C" and q.group_limit is not null
        ) then
            -- Each of these claims keeps up to 100 locks of groups until the transaction ends. A hundred such claims
            -- could fill the lock table of the server.
            grouped_queues_left := grouped_queues_left - 1;
            exit when grouped_queues_left = 0;
        end if;
    end loop;
end;
$$;
comment on function pgqueue.claim_any is
'Claims up to max_messages (1 to 10000) messages from several queues (1 to 100), as claim does: as many as possible from
the first queue, then from the next. So while an earlier queue has ready messages, later ones wait. The messages of one
queue have the same claim_token; settle each under its own queue_name. Queues that come after max_messages messages are
not looked at, nor those that come after ten queues with group_limit that had messages. Raises 22023, PQ001.';
-- Keeps acknowledged messages for a while. The statement that removes a message inserts it into the partition of its
-- day (UTC), or into unfiled_messages if that day has no partition. Enabling archiving, the hourly housekeeping and
-- maintain_archive create partitions ahead, and remove expired ones as a whole. No acknowledgement waits or fails.

-- Before this time no archived message has to be kept.
create function pgqueue._archive_expiry(at timestamptz) returns timestamptz
language sql stable as $$
    select coalesce(min(pgqueue._add_interval(at, -w.archive_for)), at)
    from (
        select q.archive_for from pgqueue.queues q where q.archive_for is not null
        union all
        select p.archive_for from pgqueue.archive_promises p where p.ends_at > at
    ) w
$$;

-- The days that have passed at a time. At infinity all have.
create function pgqueue._days(at timestamptz default 'infinity') returns table (day date, relation regclass)
language sql stable as $$
    select d.day, d.relation
    from (
        select to_date(right(c.relname, 8), 'YYYYMMDD') as day, c.oid::regclass as relation
        from pg_catalog.pg_inherits i
        join pg_catalog.pg_class c on c.oid = i.inhrelid
        where i.inhparent = 'pgqueue.archived_messages'::regclass and c.relname ~ '^archived_messages_[0-9]{8}$'
    ) d
    -- As a subquery the expiry is computed once, and not for each day, or each pair of days.
    where d.day < (select pgqueue._utc_day(pgqueue._archive_expiry(at)))
    order by d.day
$$;

-- The caller holds a lock that keeps other sessions from doing the same.
create function pgqueue._create_missing_days(at timestamptz) returns setof date
language plpgsql volatile as $$
declare
    today constant date := pgqueue._utc_day(at);
    unwanted_before constant timestamptz := pgqueue._archive_expiry(at);
    day date;
    partition text;
begin
    -- Eight days ahead are enough for a queue that is used only once a week.
    for day in
        select today + n from generate_series(0, 8) as n
        where exists (select from pgqueue.queues q where q.archive_for is not null)
        union
        select pgqueue._utc_day(u.finished_at) from pgqueue.unfiled_messages u
        where u.finished_at >= unwanted_before and u.finished_at < at + interval '8 days'
        order by 1
    loop
        partition := 'pgqueue.' || pgqueue._day_partition_name(day);
        continue when to_regclass(partition) is not null;
        -- Create the table first and attach it afterwards: this blocks no reader or writer. "create table ... partition
        -- of" would take an access exclusive lock on the parent.
        execute format('create table %s (like pgqueue.archived_messages including all)', partition);
        execute format('create index on %s (queue_name, id)', partition);
        execute format('alter table %s replica identity full', partition);
        execute format('comment on table %s is %L', partition, format('Messages that were acknowledged on %s (UTC).', to_char(day, 'YYYY-MM-DD')));
        perform pgqueue._revoke_default_privileges(partition::regclass);
        execute format('alter table only pgqueue.archived_messages attach partition %s for values from (%L) to (%L)',
            partition, to_char(day, 'YYYY-MM-DD') || ' 00:00:00+00', to_char(day + 1, 'YYYY-MM-DD') || ' 00:00:00+00');
        return next day;
    end loop;
end;
$$;

create function pgqueue._on_queue_changed_archive(before pgqueue.queues, after pgqueue.queues) returns void
language plpgsql volatile set client_min_messages = warning as $$
declare
    mark constant text := pgqueue._sequence_name('archives', coalesce(after.name, before.name));
begin
    -- Also act if only the marker disagrees with the row: the repair that doctor suggests relies on this. A restore
    -- without rows leaves markers, too.
    if after.archive_for is not distinct from before.archive_for
        and (after.archive_for is null) = (to_regclass(mark) is null)
    then
        return;
    end if;
    if after.archive_for is null then
        -- Any role with access can make a view that depends on the marker. It must not keep the sequence.
        execute format('drop sequence if exists %s cascade', mark);
        insert into pgqueue.archive_promises (queue_name, archive_for, ends_at)
        -- A clock that is behind must not shorten the time.
        select before.name, before.archive_for, pgqueue._add_interval(pgqueue._finish_time(), before.archive_for)
        where before.archive_for is not null;
        return;
    end if;
    perform pgqueue._create_sequence(mark);
    begin
        -- This lock conflicts only with other sessions that create days.
        lock table only pgqueue.archived_messages in share update exclusive mode nowait;
        perform pgqueue._create_missing_days(pgqueue._now());
    exception when lock_not_available then
        null;
    end;
end;
$$;

-- Does what maintain_archive does, and a part of that at a commit: until then, a truncated day would block every reader
-- of the whole archive. Only the session with the lock does it: maintain_archive waits for the lock, a commit does not.
create function pgqueue._at_housekeeping_archive(at timestamptz, is_commit boolean default true)
returns setof pgqueue.archive_change language plpgsql volatile as $$
declare
    confirmed_at timestamptz;
    unfiled refcursor;
    places tid[];
    expired record;
    day date;
    emptied date[] := '{}'::date[];
    dropped date[] := '{}'::date[];
begin
    if is_commit then
        lock table only pgqueue.archived_messages in share update exclusive mode nowait;
    end if;
    return query select d, 'made' from pgqueue._create_missing_days(at) d;
    -- The confirmed time has passed even if this reading of the clock is wrong: it is an earlier reading, from which
    -- the clock has since moved on by an hour. If the clock has gone back, neither reading confirms the other.
    insert into pgqueue.archive_clock as c (checked_at) values (at)
    on conflict ((true)) do update
    set checked_at = at, confirmed_at = case when at < c.checked_at then c.confirmed_at else c.checked_at end
    where at < c.checked_at or at >= c.checked_at + interval '1 h';
    select least(at, coalesce(c.confirmed_at, '-infinity')) into confirmed_at from pgqueue.archive_clock c;

    -- A message with a future finished_at was acknowledged while the clock was wrong. It stays unfiled until its day
    -- has a partition. The lock of the caller keeps others from filing, so none of the rows is locked.
    open unfiled for
        select f.id, f.ctid as place, pgqueue._moved_bytes(f.payload, f.body, f.headers, null) as bytes
        from pgqueue.unfiled_messages f
        -- The array is computed once: any number of messages can wait for their day.
        where f.finished_at < (select pgqueue._archive_expiry(confirmed_at))
            or pgqueue._utc_day(f.finished_at) = any (array(select d.day from pgqueue._days() d))
            and pgqueue._has_day_partition(pgqueue._utc_day(f.finished_at));
    for n in 1..case when is_commit then 2 else 1000000 end loop
        places := (pgqueue._fetch_slice(unfiled)).places;
        exit when places = '{}';
        with gone as (delete from pgqueue.unfiled_messages u where u.ctid = any (places) returning u.*)
        insert into pgqueue.archived_messages
        select g.* from gone g where pgqueue._has_day_partition(pgqueue._utc_day(g.finished_at));
        if is_commit then
            perform setval('pgqueue.next_housekeeping_at', pgqueue._to_micros(at + interval '1 s'));
        end if;
        exit when not pgqueue._has_time();
    end loop;
    close unfiled;

    -- An older snapshot does not show an archive_for that another transaction has raised since.
    if is_commit and pgqueue._has_fixed_snapshot() then
        return;
    end if;
    perform pgqueue._require_current_snapshot('the archive');
    delete from pgqueue.archive_promises p where p.ends_at <= confirmed_at;
    for expired in
        select d.* from pgqueue._days(confirmed_at) d
        where not (is_commit and pg_relation_size(d.relation) = 0) limit case when is_commit then 1 end
    loop
        begin
            -- Lock only the partition: acknowledgements lock the parent and the partition of today, and are not
            -- blocked. Do not wait for the lock: other sessions would queue behind a waiting request.
            execute format('lock table only %1$s in access exclusive mode nowait; truncate only %1$s', expired.relation);
            emptied := emptied || expired.day;
        exception when lock_not_available then
            return next row(expired.day, 'busy')::pgqueue.archive_change;
        end;
    end loop;
    -- Do not wait for the lock: every acknowledgement would queue behind the request. Retry instead. Acknowledgements
    -- hold their locks only briefly. If a longer transaction uses the archive, no day is dropped.
    for attempt in 1..case when is_commit or emptied = '{}'::date[] then 0 else 1000 end loop
        begin
            lock table only pgqueue.archived_messages in access exclusive mode nowait;
            foreach day in array emptied loop
                begin
                    execute format('drop table pgqueue.%I', pgqueue._day_partition_name(day));
                    dropped := dropped || day;
                exception when dependent_objects_still_exist then
                    -- Another object, such as a view, depends on this day. Continue with the other days.
                    null;
                end;
            end loop;
            exit;
        exception when lock_not_available then
            continue;
        end;
    end loop;
    return query select d, case when d = any (dropped) then 'dropped' else 'emptied' end from unnest(emptied) as d;
end;
$$;

create function pgqueue.maintain_archive() returns setof pgqueue.archive_change
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500 ms'
set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
begin
    lock table only pgqueue.archived_messages in share update exclusive mode;
    return query select c.* from pgqueue._at_housekeeping_archive(at, false) c;
exception when lock_not_available then
    return next row(pgqueue._utc_day(at), 'busy')::pgqueue.archive_change;
end;
$$;
comment on function pgqueue.maintain_archive is
'Maintains pgqueue.archived_messages and returns one row per day changed. Creates the partitions of today and the next
eight days if any queue archives (made), moves pgqueue.unfiled_messages into their partitions, and drops the days
older than the longest archive_for of all queues, including queues that were dropped or stopped archiving, until the
archive_for they had has passed (dropped). A day has passed if the clock showed so in an earlier call or claim, and
has since moved on by an hour: one wrong reading of the clock removes nothing. Blocks no acknowledgement: a partition
that cannot be dropped, because a longer transaction uses the archive or a view depends on the partition, is emptied
(emptied), and one that is being read is left alone (busy); the next call tries again. About once an hour a claim or a
receive does the same at its commit, unless it is prepared, but empties only one day and drops nothing. Call this once a
day from a scheduler, or occasionally by hand, in a transaction of its own. Raises 40001 above read committed if another
transaction has committed since the snapshot.';

create function pgqueue._findings_of_archive(q pgqueue.queues) returns setof pgqueue.finding
language plpgsql volatile as $$
declare
    at constant timestamptz := pgqueue._now();
    repair constant text := 'select * from pgqueue.maintain_archive();';
    d record;
    is_doubled boolean;
begin
    if q.name is not null then
        return;
    end if;
    return query
    select
        'error', w.name, 'archive_mark',
        format('queue %L has archive_for %s, but its acknowledgements %s messages: archive_for was changed by plain SQL',
            w.name, coalesce(w.archive_for::text, 'null'), case when w.archive_for is null then 'archive' else 'delete' end),
        format('select pgqueue.alter_queue(%L, archive_for => %L);', w.name, coalesce(w.archive_for, '0'))
    from pgqueue.queues w
    where (w.archive_for is null) <> (to_regclass(pgqueue._sequence_name('archives', w.name)) is null)
    order by w.name;

    return query
    select
        'warning', null, 'unfiled_messages',
        format('not yet in a partition of pgqueue.archived_messages: %s%s%s', case u.n when 1000 then 'at least ' end,
            pgqueue._with_number(u.n, 'acknowledged message'),
            case when u.is_ahead then ', some of them acknowledged while the clock was ahead' end),
        case when u.is_ahead then
            format('update pgqueue.unfiled_messages set finished_at = %1$L where finished_at > %1$L; ', at)
        else '' end || repair
    from (
        select count(*) as n, bool_or(c.finished_at > at + interval '1 day') as is_ahead
        from (select m.finished_at from pgqueue.unfiled_messages m limit 1000) c
    ) u
    where u.n > 0
    union all
    select
        'warning', null, 'missing_archive_day',
        'pgqueue.archived_messages has no partition for today or tomorrow: messages acknowledged on such a day are filed later',
        repair
    where exists (select from pgqueue.queues w where w.archive_for is not null)
        and not coalesce(pgqueue._has_day_partition(pgqueue._utc_day(at)) and pgqueue._has_day_partition(pgqueue._utc_day(at) + 1), false)
    union all
    select
        case when o.is_empty then 'info' else 'warning' end, null, 'archive_overdue',
        format('no queue needs %s of the archive any more: %s', pgqueue._with_number(o.n, 'day'),
            case when o.is_empty then 'emptied, but not dropped' else 'not removed yet' end),
        repair
    from (
        select count(*) as n, bool_and(pg_relation_size(e.relation) = 0) as is_empty
        from pgqueue._days(at - interval '2 days') e
    ) o
    where o.n > case when o.is_empty then 30 else 0 end;

    -- The archive has no unique key. Of a dump that was restored twice, the oldest days are kept as long as any.
    for d in select y.* from pgqueue._days() y where pg_relation_size(y.relation) > 0 limit 10 loop
        -- By its name: a statement on the parent would lock the partitions of all days.
        execute format(
            'select exists ('
            'select from (select a.queue_name, a.id, a.finished_at from %s a order by a.queue_name, a.id limit 100) c'
            ' group by c.queue_name, c.id, c.finished_at having count(*) > 1)', d.relation)
        into is_doubled;
        continue when not is_doubled;
        return next row('warning', null, 'doubled_archive',
            format('messages that were acknowledged on %s are twice in pgqueue.archived_messages: a dump was restored twice', d.day),
            'delete from pgqueue.archived_messages a using pgqueue.archived_messages b where a.tableoid = b.tableoid'
            ' and a.queue_name = b.queue_name and a.id = b.id and a.finished_at = b.finished_at'
            ' and a.attempt_count = b.attempt_count and a.ctid > b.ctid;')::pgqueue.finding;
        return;
    end loop;
end;
$$;

create function pgqueue.browse_archived_messages(
    queue_name pgqueue.queue_of_consumer_admin_or_reader, max_messages int default 100, before_id bigint default null
) returns setof pgqueue.archived_message
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    -- Archived messages of a dropped queue remain under its name, so the queue need not exist.
    if not exists (select from pgqueue.queues q where q.name = browse_archived_messages.queue_name collate "C")
        and not exists (select from pgqueue.archived_messages a where a.queue_name = browse_archived_messages.queue_name collate "C")
        and not exists (select from pgqueue.unfiled_messages u where u.queue_name = browse_archived_messages.queue_name collate "C")
    then
        perform pgqueue._raise('queue_not_found', queue_name);
    end if;
    perform pgqueue._check_page(max_messages, 0);
    return query
    select
        f.id, f.queue_name, f.payload, f.body, f.headers, f.message_id, f.attempt_count, f.max_attempts, f.enqueued_at,
        f.claimed_at, f.finished_at, f.expires_at, f.claimed_by, f.last_error
    from (select a.* from pgqueue.archived_messages a union all select u.* from pgqueue.unfiled_messages u) f
    where f.queue_name = browse_archived_messages.queue_name collate "C" and f.id < coalesce(before_id, 9223372036854775807)
    order by f.id desc
    limit max_messages;
end;
$$;
comment on function pgqueue.browse_archived_messages is
'Shows up to max_messages (1 to 10000) acknowledged messages, newest id first, with ids below before_id; for the next
page pass the last id. For a dropped queue it shows the messages that are still kept. Raises 22023, PQ001.';
-- Streams: readers that can read a batch of messages again after a crash. A stream has at most one open batch, and one
-- reader: opening it again fences the previous reader. Each call is one transaction.

create function pgqueue._raise_stream(error text, s pgqueue.streams, seq bigint, lost bigint[] default null)
returns void language plpgsql stable as $$
declare
    named constant bigint[] := coalesce(lost, s.ids);
    ids constant text := array_to_string(named[:20], ', ')
        || case when cardinality(named) > 20 then format(' and %s more', cardinality(named) - 20) else '' end;
begin
    case error
        when 'out_of_step' then raise exception using
            errcode = 'PQ007',
            message = format('stream %L of queue %L is out of step: batch %s %s', s.stream_name, s.queue_name, seq,
                case
                    when seq < s.acked_seq then 'is older than the last acknowledged batch'
                    when seq = s.acked_seq then 'is already acknowledged, or its token does not match'
                    when seq = s.acked_seq + 1 and s.claim_token is not null then 'is open with another token'
                    else 'is unknown'
                end),
            detail = format('The last acknowledged batch is %s, and %s.', s.acked_seq,
                case when s.claim_token is null then 'no batch is open' else format('batch %s is open', s.acked_seq + 1) end),
            hint = 'The checkpoint was rolled back, copied or taken from another stream, or the database was restored. Use a new checkpoint, or continue after acked_seq and acked_token of the stream, which stream_open returns.';
        when 'data_lost' then raise exception using
            errcode = 'PQ008',
            message = format('stream %L of queue %L has lost %s of %s of batch %s: %s', s.stream_name, s.queue_name,
                cardinality(lost), pgqueue._with_number(cardinality(s.ids), 'message'), seq, ids),
            detail = format('The batch was claimed at %s, and reserved until %s.', s.claimed_at, s.claimed_until),
            hint = 'The reservation ran out and other consumers claimed the messages, or the messages were purged. stream_claim after the last acknowledged batch returns the batch without them, and pgqueue.stream_skip leaves them out. To avoid this error, reserve for longer, or extend more often.';
        when 'poisoned' then raise exception using
            errcode = 'PQ009',
            message = format('stream %L of queue %L gives up batch %s after %s: %s %s', s.stream_name, s.queue_name, seq,
                pgqueue._with_number(s.replays, 'replay'), case cardinality(s.ids) when 1 then 'message' else 'messages' end, ids),
            hint = format('Move the batch, or only the messages that cause the failure, to the dead letters: select pgqueue.stream_skip(%L, %L, %s). Or allow more replays.',
                s.queue_name, s.stream_name, seq);
    end case;
end;
$$;

-- At least the clock in microseconds: a counter would start over in a stream that was dropped and created again, or in
-- a restored database, and an old reader could pass for the new one.
create function pgqueue._next_epoch(epoch bigint) returns bigint
language sql volatile as $$ select greatest(coalesce(epoch, 0) + 1, pgqueue._to_micros(pgqueue._now())) $$;

create function pgqueue._check_epoch(s pgqueue.streams, epoch bigint) returns void
language plpgsql stable as $$
begin
    perform pgqueue._require(epoch is not null, 'epoch', null, 'the epoch that stream_open returned');
    if epoch <> s.epoch then
        perform pgqueue._raise(
            'stream_fenced', s.stream_name, s.queue_name, epoch::text, s.epoch::text, s.opened_at::text, s.opened_by);
    end if;
end;
$$;

create function pgqueue._lock_stream(queue_name text, stream_name text) returns pgqueue.streams
language plpgsql volatile as $$
declare
    s pgqueue.streams;
begin
    select t.* into s from pgqueue.streams t
    where t.queue_name = _lock_stream.queue_name collate "C" and t.stream_name = _lock_stream.stream_name collate "C"
    for no key update;
    if not found then
        perform pgqueue._require_untruncated('{pgqueue.streams}');
        perform pgqueue._raise('stream_not_found', stream_name, queue_name);
    end if;
    return s;
end;
$$;

create function pgqueue._public_stream(s pgqueue.streams) returns pgqueue.stream
language sql stable as $$
    select row(
        s.queue_name, s.stream_name, s.epoch, s.opened_by, s.opened_at, s.created_at, s.acked_seq, s.acked_token,
        s.claim_token, cardinality(s.ids) - cardinality(s.left_out), s.partitions, s.replays, s.claimed_at,
        s.claimed_until, coalesce(pg_sequence_last_value('pgqueue.message_id'), 0), s.on_ack
    )::pgqueue.stream
$$;

create function pgqueue.stream_open(
    queue_name pgqueue.queue_of_consumer, stream_name text, opened_by text default null, on_ack text default null
) returns pgqueue.stream
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    s pgqueue.streams;
begin
    perform pgqueue._require(pgqueue._is_name(stream_name), 'stream_name', stream_name,
        '1 to 128 characters: lowercase letters, digits, hyphens and underscores');
    perform pgqueue._require(on_ack is null or on_ack in ('archive', 'delete'), 'on_ack', on_ack,
        'archive or delete, or null for the default of the queue');
    perform pgqueue._require(on_ack is distinct from 'archive' or q.archive_for is not null, 'on_ack', on_ack,
        format('delete or null where queue %L has no archive_for', q.name));
    -- An alter_queue that gives the queue a limit ends before, or sees the stream.
    perform from pgqueue.queues where queues.name = q.name for share;
    insert into pgqueue.streams as t (queue_name, stream_name, epoch, opened_by, opened_at, created_at, on_ack)
    values (
        q.name, stream_open.stream_name, pgqueue._next_epoch(null), stream_open.opened_by, pgqueue._now(), pgqueue._now(),
        stream_open.on_ack
    )
    on conflict on constraint streams_pkey do update
    set epoch = pgqueue._next_epoch(t.epoch), opened_by = excluded.opened_by, opened_at = excluded.opened_at,
        on_ack = excluded.on_ack
    returning t.* into s;
    return pgqueue._public_stream(s);
end;
$$;
comment on function pgqueue.stream_open is
'Opens a stream of the queue, creates it if it does not exist, and returns it with a new epoch. The previous reader of
the stream is fenced: its calls raise PQ006. stream_name is 1 to 128 lowercase letters, digits, hyphens and underscores;
each query needs its own. A reader without a checkpoint starts after acked_seq and acked_token. While the queue has a
stream, alter_queue gives it no priorities, max_in_flight and rate_limit. opened_by is a name for humans. on_ack says
what happens to messages that are acknowledged from now on: delete; archive, which requires that the queue has
archive_for; or null, the default, for what the queue does at that time. Raises 22023, PQ001.';

create function pgqueue.list_streams(
    queue_name pgqueue.queue_of_consumer_admin_or_reader default null, caller pgqueue.caller default current_user
) returns setof pgqueue.stream
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    if queue_name is not null then
        perform pgqueue._get_unlocked_queue(queue_name);
    end if;
    perform pgqueue._require_untruncated('{pgqueue.streams}');
    return query
    select l.*
    from pgqueue.streams t cross join lateral pgqueue._public_stream(t) l
    where t.queue_name = coalesce(list_streams.queue_name collate "C", t.queue_name)
        and pgqueue._may_use(caller, t.queue_name, pgqueue._privileges_of('{consumer,admin,reader}'))
    order by t.queue_name, t.stream_name;
end;
$$;
comment on function pgqueue.list_streams is
'Returns the streams of a queue, or of all queues if queue_name is null, by queue and stream name. Raises PQ001.';

create function pgqueue.drop_stream(queue_name pgqueue.queue_of_admin, stream_name text) returns int
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    s constant pgqueue.streams := pgqueue._lock_stream(queue_name, stream_name);
    released int := 0;
begin
    if s.claim_token is not null then
        released := pgqueue.release(queue_name, s.ids, s.claim_token);
    end if;
    delete from pgqueue.streams t where t.queue_name = q.name and t.stream_name = s.stream_name;
    return released;
end;
$$;
comment on function pgqueue.drop_stream is
'Drops a stream, releases the messages of its open batch as release does, and returns how many were released. A reader
that still has a checkpoint of the stream gets PQ005, or PQ007 after the stream was created again. Raises PQ001,
PQ005.';

create function pgqueue._on_queue_changed_streams(before pgqueue.queues, after pgqueue.queues) returns void
language plpgsql volatile as $$
begin
    if before.name is null or after.name is null
        or before.priorities or coalesce(before.max_in_flight, before.rate_limit) is not null
        or not after.priorities and coalesce(after.max_in_flight, after.rate_limit) is null
    then
        return;
    end if;
    -- stream_claim would refuse the queue. It acknowledges the open batch, so this batch would be delivered again.
    perform pgqueue._require_current_snapshot(format('queue %L', after.name));
    perform pgqueue._raise_invalid(
        case when after.priorities then 'priorities' when after.rate_limit is null then 'max_in_flight' else 'rate_limit' end,
        case when after.priorities then 'true' else coalesce(after.rate_limit, after.max_in_flight)::text end,
        format('null while queue %L has a stream. End its query, then: select pgqueue.drop_stream(%L, %L);',
            after.name, after.name, t.stream_name))
    from pgqueue.streams t where t.queue_name = after.name;
end;
$$;

create function pgqueue._findings_of_streams(q pgqueue.queues) returns setof pgqueue.finding
language sql volatile as $$
    select
        'warning', q.name, 'lapsed_stream',
        format('the reservation of batch %s of stream %L, %s, ran out %s ago, and the stream was not read since',
            t.acked_seq + 1, t.stream_name, pgqueue._with_number(cardinality(t.ids) - cardinality(t.left_out), 'message'),
            n.at - t.claimed_until),
        format('Start its query again, or release the messages: select pgqueue.drop_stream(%L, %L);', q.name, t.stream_name)
    from (select pgqueue._now() as at offset 0) n
    join pgqueue.streams t on t.queue_name = q.name and t.claimed_until <= n.at - interval '1 min'
$$;
-- The batches of streams. A stream reserves messages under a batch number and a token, which the reader stores in its
-- checkpoint. After a crash the reader gets the same messages again, until it acknowledges the batch.

create function pgqueue._check_batch(s pgqueue.streams, epoch bigint, seq bigint, claim_token uuid)
returns void language plpgsql stable as $$
begin
    perform pgqueue._check_epoch(s, epoch);
    perform pgqueue._require(seq >= 1, 'seq', seq::text, 'the number of a batch, 1 or higher');
    perform pgqueue._require(claim_token is not null, 'claim_token', null, 'the claim_token that stream_claim returned');
    if seq <> s.acked_seq + 1 or s.claim_token is distinct from _check_batch.claim_token then
        perform pgqueue._raise_stream('out_of_step', s, seq);
    end if;
end;
$$;

create function pgqueue._public_batch(s pgqueue.streams, lost bigint[]) returns pgqueue.stream_batch
language sql stable as $$
    select row(
        s.queue_name, s.stream_name, s.acked_seq + 1, s.claim_token, cardinality(s.ids) - cardinality(s.left_out),
        s.partitions, s.replays, s.claimed_at, s.claimed_until, lost
    )::pgqueue.stream_batch
$$;

-- Extends the claims of the open batch to the given time, including claims that ran out if no other session has claimed
-- the message since. Returns the ids of the messages that are lost.
create function pgqueue._extend_open_batch(q pgqueue.queues, s pgqueue.streams, until timestamptz)
returns bigint[] language plpgsql volatile as $$
declare
    kept bigint[];
begin
    with extended as (
        update pgqueue.messages m
        set visible_at = case when m.visible_at <= until or pgqueue._wake_if_waiting(q, pgqueue._now()) is not null then until end
        from pgqueue._lookup_keys(s.queue_name, s.ids) k
        where (m.kind = q.kind or m.kind is null)
            and pgqueue._matches_key(m.queue_name, m.id, s.queue_name, k.names, k.ids, k.id)
            and pgqueue._is_claimed_by(m, s.claim_token)
        returning m.id
    )
    select coalesce(array_agg(e.id), '{}'::bigint[]) into kept from extended e;
    if cardinality(kept) = cardinality(s.ids) - cardinality(s.left_out) then
        return '{}'::bigint[];
    end if;
    return pgqueue._array_except(s.ids, s.left_out || kept);
end;
$$;

create function pgqueue._ack_open_batch(s pgqueue.streams) returns int
language plpgsql volatile as $$
declare
    acked int;
begin
    if s.on_ack = 'archive'
        or s.on_ack is null and (select q.archive_for is not null from pgqueue.queues q where q.name = s.queue_name)
    then
        acked := cardinality(pgqueue._ack_to_archive(s.queue_name, s.ids, s.claim_token));
    else
        delete from pgqueue.messages m
        using pgqueue._lookup_keys(s.queue_name, s.ids) k
        where (m.kind = (select q.kind from pgqueue.queues q where q.name = s.queue_name) or m.kind is null)
            and pgqueue._matches_key(m.queue_name, m.id, s.queue_name, k.names, k.ids, k.id)
            and pgqueue._is_claimed_by(m, s.claim_token);
        get diagnostics acked = row_count;
    end if;
    update pgqueue.streams t
    set acked_seq = s.acked_seq + 1, acked_token = s.claim_token, claim_token = null, ids = null, left_out = null,
        partitions = null, visibility_timeout = null, claimed_at = null, claimed_until = null, replays = null,
        begun_epoch = null
    where t.queue_name = s.queue_name and t.stream_name = s.stream_name;
    return pgqueue._count('acknowledged', s.queue_name, acked);
end;
$$;

create function pgqueue._save_batch(s pgqueue.streams) returns void
language plpgsql volatile as $$
begin
    update pgqueue.streams t
    set epoch = s.epoch, claim_token = s.claim_token, ids = s.ids, left_out = s.left_out, partitions = s.partitions,
        visibility_timeout = s.visibility_timeout, claimed_at = s.claimed_at, claimed_until = s.claimed_until,
        replays = s.replays, begun_epoch = s.begun_epoch
    where t.queue_name = s.queue_name and t.stream_name = s.stream_name;
end;
$$;

create function pgqueue._claim_batch(
    q pgqueue.queues, s pgqueue.streams, max_messages int, visibility_timeout interval, max_bytes bigint
) returns pgqueue.streams
language plpgsql volatile as $$
declare
    token constant uuid := gen_random_uuid();
    span constant interval := coalesce(visibility_timeout, q.visibility_timeout);
    -- Each search compares the ids that it finds with those of its portion.
    portion int := case when max_bytes is null then 10000 else 10 end;
    wanted int;
    found_ids bigint[];
    ids bigint[] := '{}'::bigint[];
    until timestamptz;
    first_until timestamptz;
    portion_bytes bigint;
    bytes bigint := 0;
begin
    loop
        wanted := least(max_messages - cardinality(ids), portion);
        exit when wanted = 0;
        found_ids := (pgqueue._lock_candidates(q.name, wanted, visibility_timeout)).ids;
        if found_ids <> '{}' then
            -- claim has a similar update. Here it runs for several portions of ids, and all get the token of the batch.
            until := pgqueue._add_interval(pgqueue._now(), span);
            with claimed as (
                update pgqueue.messages m
                set visible_at = until, attempt_count = m.attempt_count + 1, claimed_attempt = m.attempt_count + 1,
                    claim_token = token, claimed_by = 'stream ' || s.stream_name, claimed_at = pgqueue._now()
                from pgqueue._lookup_keys(q.name, found_ids) k
                where (m.kind = q.kind or m.kind is null)
                    and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
                returning case when max_bytes is not null then coalesce(pg_column_size(m.payload), pg_column_size(m.body)) end as size
            )
            select coalesce(sum(c.size), 0) into portion_bytes from claimed c;
            ids := ids || found_ids;
            bytes := bytes + portion_bytes;
            first_until := coalesce(first_until, until);
        end if;
        exit when cardinality(found_ids) < wanted or bytes >= max_bytes;
        if max_bytes is not null then
            -- As many as fit, if they are as large as those before.
            portion := greatest(least((max_bytes - bytes) / greatest(bytes / cardinality(ids), 1), 10000), 1);
        end if;
    end loop;
    if ids <> '{}' then
        s.claim_token := token;
        s.ids := pgqueue._array_except(ids, '{}');
        s.left_out := '{}';
        s.visibility_timeout := span;
        s.claimed_at := pgqueue._now();
        s.claimed_until := first_until;
        s.replays := 0;
    end if;
    return s;
end;
$$;

create function pgqueue.stream_claim(
    queue_name pgqueue.queue_of_consumer,
    stream_name text,
    epoch bigint,
    after_seq bigint,
    after_token uuid,
    max_messages int default 10000,
    partitions int default 1,
    visibility_timeout interval default null,
    max_bytes bigint default null
) returns setof pgqueue.stream_batch
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    s pgqueue.streams := pgqueue._lock_stream(queue_name, stream_name);
    lost bigint[];
begin
    perform pgqueue._check_epoch(s, epoch);
    perform pgqueue._require(after_seq >= 0, 'after_seq', after_seq::text,
        'the number of the last finished batch, or 0 before the first');
    perform pgqueue._require(max_messages between 1 and 100000, 'max_messages', max_messages::text, 'an integer from 1 to 100000');
    perform pgqueue._require(partitions between 1 and 1000, 'partitions', partitions::text, 'an integer from 1 to 1000');
    perform pgqueue._check_visibility_timeout(visibility_timeout);
    perform pgqueue._require(max_bytes is null or max_bytes >= 1, 'max_bytes', max_bytes::text,
        'an integer from 1, or null for no limit');
    perform pgqueue._require(not q.priorities and coalesce(q.max_in_flight, q.rate_limit) is null, 'queue_name', q.name,
        'a queue without priorities, max_in_flight and rate_limit: a batch has all ready messages by id, up to max_messages');

    if after_seq = s.acked_seq + 1 and after_token = s.claim_token then
        perform pgqueue._ack_open_batch(s);
        s := pgqueue._lock_stream(queue_name, stream_name);
    elsif after_seq <> s.acked_seq or after_token is distinct from s.acked_token then
        perform pgqueue._raise_stream('out_of_step', s, after_seq);
    elsif s.claim_token is not null then
        -- The reader crashed before it stored the batch in its checkpoint, or the answer was lost. Return the open
        -- batch without the messages that other sessions have claimed since. Its attempt is already counted.
        s.claimed_until := pgqueue._add_interval(pgqueue._now(), coalesce(visibility_timeout, s.visibility_timeout));
        lost := pgqueue._extend_open_batch(q, s, s.claimed_until);
        s.left_out := s.left_out || lost;
        perform pgqueue._save_batch(s);
        return next pgqueue._public_batch(s, lost);
        return;
    end if;

    s := pgqueue._claim_batch(q, s, max_messages, visibility_timeout, max_bytes);
    if s.claim_token is not null then
        s.partitions := partitions;
        perform pgqueue._save_batch(s);
        return next pgqueue._public_batch(s, '{}');
    end if;
end;
$$;
comment on function pgqueue.stream_claim is
'Acknowledges all batches up to after_seq with token after_token (0 and null before the first), whose results must be
stored durably, and returns the next batch: the open one, with the same messages, or a new one. Messages of the open
batch that the stream has lost are left out and returned as lost; if none is left, the batch is empty. A new batch has
up to max_messages (1 to 100000, default 10000) ready messages, claimed for visibility_timeout as by claim; no row is
returned if none are ready or the queue is paused. The batch is read in partitions (1 to 1000, default 1). It ends
earlier if its payloads and bodies have about max_bytes bytes, as stored; the default, null, is no limit, and up to 10
messages are taken of any size. If after_seq and after_token are not those of the stream, the checkpoint was rolled
back, copied or taken from another stream: this raises PQ007. Raises 22023, PQ001, PQ005, PQ006, PQ007.';

create function pgqueue.stream_begin(
    queue_name pgqueue.queue_of_consumer,
    stream_name text,
    epoch bigint,
    seq bigint,
    claim_token uuid,
    max_replays int default 5
) returns pgqueue.stream_batch
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    s pgqueue.streams := pgqueue._lock_stream(queue_name, stream_name);
    at constant timestamptz := pgqueue._now();
    lost bigint[];
begin
    perform pgqueue._require(max_replays is null or max_replays >= 0, 'max_replays', max_replays::text,
        'an integer from 0, or null for no limit');
    perform pgqueue._check_batch(s, epoch, seq, claim_token);
    -- A batch that was claimed just now is not checked. If messages are missing nevertheless, stream_read notices.
    if s.begun_epoch is not null or s.claimed_until < pgqueue._add_interval(at, s.visibility_timeout / 2) then
        s.claimed_until := pgqueue._add_interval(at, s.visibility_timeout);
        lost := pgqueue._extend_open_batch(q, s, s.claimed_until);
        if lost <> '{}' then
            perform pgqueue._raise_stream('data_lost', s, seq, lost);
        end if;
    end if;
    -- Count one replay per epoch, however often the reader begins the batch in it. Replays of an empty batch do not
    -- count.
    if s.begun_epoch <> epoch and cardinality(s.left_out) < cardinality(s.ids) then
        if s.replays >= max_replays then
            perform pgqueue._raise_stream('poisoned', s, seq);
        end if;
        s.replays := s.replays + 1;
    end if;
    s.begun_epoch := epoch;
    perform pgqueue._save_batch(s);
    return pgqueue._public_batch(s, '{}');
end;
$$;
comment on function pgqueue.stream_begin is
'Begins to read the open batch, for the first time or again after a crash, and returns it. Call this before reading its
partitions. Reading a batch again renews its reservation. Messages that the stream has lost, because the reservation ran
out and other sessions claimed them, raise PQ008, which names them. A batch that was begun in max_replays + 1 epochs
(default 5; null for no limit) raises PQ009, which names the batch and its messages. A batch that is not the open one
raises PQ007. Raises 22023, PQ001, PQ005, PQ006, PQ007, PQ008, PQ009.';

create function pgqueue.stream_read(
    queue_name pgqueue.queue_of_consumer, stream_name text, epoch bigint, seq bigint, claim_token uuid,
    partition int default null
) returns setof pgqueue.message
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_unlocked_queue(queue_name);
    s pgqueue.streams;
    wanted bigint[];
    n bigint;
begin
    -- Without the locks, the tables look empty if a compaction ends between a snapshot and the read.
    lock table pgqueue.streams, pgqueue.messages in access share mode;
    perform pgqueue._require_untruncated('{pgqueue.streams,pgqueue.messages}');
    select t.* into s from pgqueue.streams t
    where t.queue_name = q.name and t.stream_name = stream_read.stream_name collate "C";
    if not found then
        perform pgqueue._raise('stream_not_found', stream_name, queue_name);
    end if;
    perform pgqueue._check_batch(s, epoch, seq, claim_token);
    wanted := s.ids;
    if partition is not null then
        perform pgqueue._require(partition between 0 and s.partitions - 1, 'partition', partition::text,
            format('an integer from 0 to %s, or null for all', s.partitions - 1));
        n := cardinality(s.ids);
        wanted := s.ids[n * partition / s.partitions + 1 : n * (partition + 1) / s.partitions];
    end if;
    if s.left_out <> '{}' then
        wanted := pgqueue._array_except(wanted, s.left_out);
    end if;
    return query
    select
        m.id, m.queue_name, m.payload, m.body, m.headers, m.message_id, m.attempt_count, m.max_attempts,
        m.enqueued_at, m.visible_at, m.expires_at, m.claimed_by, m.claim_token, m.last_error
    from pgqueue.messages m, pgqueue._lookup_keys(q.name, wanted) k
    -- The kind of the queue may have changed: it is read in the snapshot of the messages.
    where (m.kind = (select c.kind from pgqueue.queues c where c.name = q.name) or m.kind is null)
        and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
        and pgqueue._is_claimed_by(m, s.claim_token);
    get diagnostics n = row_count;
    if n < cardinality(wanted) then
        -- The batch may have been acknowledged or skipped since.
        perform pgqueue._check_batch(t, stream_read.epoch, seq, stream_read.claim_token) from pgqueue.streams t
        where t.queue_name = q.name and t.stream_name = s.stream_name;
        perform pgqueue._raise_stream('data_lost', s, seq, pgqueue._array_except(wanted, array(
            select m.id from pgqueue.messages m, pgqueue._lookup_keys(q.name, wanted) k
            where pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
                and pgqueue._is_claimed_by(m, s.claim_token))));
    end if;
end;
$$;
comment on function pgqueue.stream_read is
'Returns the messages of one partition of the open batch, numbered from 0, or of all partitions if partition is null, in
the order of their ids; each partition is a contiguous range of the batch. It changes nothing, may be called repeatedly
and in parallel, and returns the same messages each time, except for visible_at. It never returns fewer messages: lost
messages raise PQ008, and a batch that is not the open one raises PQ007. Raises 22023, PQ001, PQ005, PQ006, PQ007,
PQ008.';

create function pgqueue.stream_extend(
    queue_name pgqueue.queue_of_consumer, stream_name text, epoch bigint, visibility_timeout interval default null
) returns setof pgqueue.stream_batch
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    s pgqueue.streams := pgqueue._lock_stream(queue_name, stream_name);
    lost bigint[];
begin
    perform pgqueue._check_epoch(s, epoch);
    perform pgqueue._check_visibility_timeout(visibility_timeout);
    if s.claim_token is null then
        return;
    end if;
    s.claimed_until := pgqueue._add_interval(pgqueue._now(), coalesce(visibility_timeout, s.visibility_timeout));
    lost := pgqueue._extend_open_batch(q, s, s.claimed_until);
    perform pgqueue._save_batch(s);
    return next pgqueue._public_batch(s, lost);
end;
$$;
comment on function pgqueue.stream_extend is
'Sets the end of the open batch''s reservation to visibility_timeout (1 s to 43200 s, default that of its claim) from
now. Returns the batch, with the ids of the messages that the stream has lost as lost; no row if no batch is open.
Readers call this periodically as a heartbeat. Raises 22023, PQ001, PQ005, PQ006.';

create function pgqueue.stream_ack(
    queue_name pgqueue.queue_of_consumer, stream_name text, epoch bigint, seq bigint, claim_token uuid
) returns int
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    s pgqueue.streams;
begin
    perform pgqueue._get_locked_queue(queue_name);
    s := pgqueue._lock_stream(queue_name, stream_name);
    perform pgqueue._check_epoch(s, epoch);
    if seq < s.acked_seq or seq = s.acked_seq and s.acked_token = stream_ack.claim_token then
        return 0;
    end if;
    perform pgqueue._check_batch(s, epoch, seq, claim_token);
    return pgqueue._ack_open_batch(s);
end;
$$;
comment on function pgqueue.stream_ack is
'Acknowledges the open batch, whose results must be stored durably, and returns how many of its messages the stream
still held; 0 if the batch was acknowledged before. A batch that was never claimed, or whose token differs, raises
PQ007. Raises 22023, PQ001, PQ005, PQ006, PQ007.';

create function pgqueue.stream_skip(
    queue_name pgqueue.queue_of_consumer_or_admin,
    stream_name text,
    seq bigint,
    ids bigint[] default null,
    error text default null,
    epoch bigint default null
) returns int
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    s pgqueue.streams := pgqueue._lock_stream(queue_name, stream_name);
    at constant timestamptz := pgqueue._now();
    wanted bigint[];
    m pgqueue.messages;
    skipped int := 0;
begin
    perform pgqueue._check_batch(s, coalesce(epoch, s.epoch), seq, coalesce(s.claim_token, gen_random_uuid()));
    wanted := pgqueue._array_except(s.ids, s.left_out);
    if stream_skip.ids is not null then
        wanted := pgqueue._array_except(wanted, pgqueue._array_except(wanted, stream_skip.ids));
    end if;
    for m in select d.* from pgqueue._delete_messages(q.name, q.kind, wanted, s.claim_token) d loop
        perform pgqueue._retry_or_dead_letter(
            q, m, at, null,
            coalesce(error, format('skipped with batch %s of stream %s after %s', seq, s.stream_name, pgqueue._with_number(s.replays, 'replay'))),
            null, 'rejected');
        skipped := skipped + 1;
    end loop;
    -- The remaining messages may be replayed max_replays times again. Without an epoch argument the caller is not the
    -- reader: a new epoch fences the reader, which does not know that the batch has changed.
    s.left_out := s.left_out || wanted;
    s.replays := 0;
    if epoch is null then
        s.epoch := pgqueue._next_epoch(s.epoch);
    end if;
    perform pgqueue._save_batch(s);
    return skipped;
end;
$$;
comment on function pgqueue.stream_skip is
'Removes messages, all or those in ids, from the open batch, whose number is seq. Returns how many went to the dead
letters, with reason rejected and error as last_error, or were deleted if the queue has no dead letters. Messages that
the stream has lost are left out as well. The batch continues with the remaining messages and its replay count starts
over; if none remain, it is read as an empty batch. An operator calls this without epoch, which fences the reader:
restart its query. A reader that skips messages it cannot use passes its own epoch. Raises 22023, PQ001, PQ005, PQ006,
and PQ007 if the batch is not open.';
-- Sends the messages of many writers in one commit. Each writer stages its messages under its own token. sink_commit
-- sends the messages of the successful attempts, all or none, and only once for each (app_id, version).

create function pgqueue.sink_stage(
    queue_name pgqueue.queue_of_producer, run uuid, partition int, attempt bigint
) returns uuid
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_unlocked_queue(queue_name);
    token constant uuid := gen_random_uuid();
begin
    perform pgqueue._require(run is not null, 'run', null, 'the id of a run');
    perform pgqueue._require(partition is not null, 'partition', null, 'the number of a partition');
    perform pgqueue._require(attempt is not null, 'attempt', null, 'the number of an attempt');
    insert into pgqueue.staged_attempts (token, run, partition, attempt, queue_name, staged_by, staged_at)
    values (token, run, partition, attempt, q.name, session_user, pgqueue._now());
    return token;
end;
$$;
comment on function pgqueue.sink_stage is
'Starts to stage the messages that one attempt of one partition of a run writes for a queue, and returns a token. In the
same transaction the caller copies the messages into pgqueue.staged_messages under this token: as arrays, some hundred
messages per row, each row with the number of its first message, counted from 1. The copy raises 22023 or PQ003 for
messages that enqueue would refuse; sink_commit refuses those over a limit of the queue that was lowered since. No
session can claim the messages before sink_commit, which must be called by the same session_user. Raises 22023, PQ001.';

create function pgqueue._check_messages(s pgqueue.staged_messages, a pgqueue.staged_attempts) returns void
language plpgsql volatile as $$
declare
    q pgqueue.queues;
    m record;
    error text;
    hint text;
begin
    select c.* into q from pgqueue.queues c where c.name = a.queue_name;
    for m in
        select u.*
        from unnest(
            s.payloads, s.bodies, s.headers, s.message_ids, s.delays, s.expires_in, s.group_keys, s.priorities,
            s.dedup_keys
        ) with ordinality
            as u (payload, body, headers, message_id, delay, expires_in, group_key, priority, dedup_key, place)
    loop
        perform pgqueue._check_keys(array[m.dedup_key], array[m.group_key], array[m.priority]);
        perform pgqueue._check_enqueue(coalesce(m.delay, '0'), m.expires_in);
        perform pgqueue._check_content(q, m.payload, m.body, m.headers);
    end loop;
exception when invalid_parameter_value or sqlstate 'PQ003' then
    get stacked diagnostics error = message_text, hint = pg_exception_hint;
    perform pgqueue._raise(
        'invalid_row', sqlstate, (s.row_number + m.place - 1)::text, a.partition::text, error, hint);
end;
$$;

create function pgqueue._measure_messages() returns trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    are_sound boolean;
begin
    if num_nonnulls(new.group_keys, new.priorities) > 0 then
        new.headers := array(
            select pgqueue._with_group_and_priority(u.headers, u.group_key, u.priority)
            from unnest(new.headers, new.group_keys, new.priorities)
                with ordinality as u (headers, group_key, priority, place)
            order by u.place);
    end if;
    select
        count(*), coalesce(max(coalesce(octet_length(u.body), octet_length(u.payload::text))), 0),
        coalesce(bool_and(
            (u.payload is null) <> (u.body is null)
            and (
                u.headers is null
                or jsonb_typeof(u.headers) = 'object' and octet_length(u.headers::text) <= 65536
            )
            and (u.delay is null or pgqueue._is_interval_between(u.delay, '0', '3652.5 days'))
            and (u.expires_in is null or pgqueue._is_interval_between(u.expires_in, '0', '3652.5 days'))
            and (char_length(u.group_key) between 1 and 255) is not false
            and (u.priority between 0 and 9) is not false
        ), true)
    into new.messages, new.largest_bytes, are_sound
    from unnest(
        new.payloads, new.bodies, new.headers, new.message_ids, new.delays, new.expires_in, new.group_keys, new.priorities
    ) as u (payload, body, headers, message_id, delay, expires_in, group_key, priority);
    if num_nonnulls(variadic new.dedup_keys) > 0 then
        are_sound := are_sound and cardinality(new.dedup_keys) <= new.messages
            and not exists (select from unnest(new.dedup_keys) as k where char_length(k) not between 1 and 255);
    else
        new.dedup_keys := null;
    end if;
    if not are_sound or new.largest_bytes > (
        select q.max_payload_bytes
        from pgqueue.staged_attempts a join pgqueue.queues q on q.name = a.queue_name
        where a.token = new.token
    ) then
        perform pgqueue._check_messages(new, (select a from pgqueue.staged_attempts a where a.token = new.token));
    end if;
    new.group_keys := null;
    new.priorities := null;
    return new;
end;
$$;

create or replace trigger measure_messages
before insert on pgqueue.staged_messages for each row execute function pgqueue._measure_messages();

-- No other session sends or deletes these attempts until the transaction ends. In a security definer function,
-- current_user is the owner. In PL/pgSQL, which keeps its plan: see _level_registers.
create function pgqueue._lock_own_attempts(run uuid) returns setof pgqueue.staged_attempts
language plpgsql volatile as $$
begin
    return query
    select a.* from pgqueue.staged_attempts a
    where a.run = _lock_own_attempts.run and a.staged_by = session_user
    order by a.token
    for update;
end;
$$;

-- Returns the number of messages sent of each token. Leaves out rows with a message over the limit of the queue.
create function pgqueue._send_staged(q pgqueue.queues, tokens uuid[], expected bigint, at timestamptz)
returns bigint[] language plpgsql volatile set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_bitmapscan = off set enable_sort = off set jit = off as $$
declare
    keys text[];
    ids bigint[];
    published bigint;
    delayed bigint;
    due_at timestamptz;
    sent bigint[];
begin
    if exists (select from pgqueue.staged_messages s where s.token = any (tokens) and s.dedup_keys is not null) then
        keys := array(
            select u.key
            from unnest(tokens) with ordinality as t (token, place)
            join pgqueue.staged_messages s on s.token = t.token
            cross join unnest(s.dedup_keys, array_fill(null::int, array[s.messages])) with ordinality
                as u (key, nothing, place)
            order by t.place, s.row_number, u.place
        );
    end if;
    -- If the number is wrong, sink_commit finds which messages are missing.
    if cardinality(keys) = expected then
        -- As in enqueue_batch, this lock is taken before the ids.
        lock table only pgqueue.messages in row exclusive mode;
        ids := array(select nextval('pgqueue.message_id') from generate_series(1, expected));
        -- The message of a key that is taken gets the id 0, and is counted but not sent.
        ids := array(
            select case when u.holder = u.id then u.id else 0 end
            from unnest(ids, pgqueue._take_dedup_keys(q, keys, ids, at, 'keep', '{}')) with ordinality
                as u (id, holder, place)
            order by u.place
        );
    end if;
    with staged as not materialized (
        select s.place + u.place as place, u.payload, u.body, u.headers, u.message_id, u.delay, u.expires_in, ids[s.place + u.place] as id
        from (
            select c.*, sum(c.messages) over (order by t.place, c.row_number) - c.messages as place
            from unnest(tokens) with ordinality as t (token, place)
            join pgqueue.staged_messages c on c.token = t.token
        ) s
        cross join unnest(s.payloads, s.bodies, s.headers, s.message_ids, s.delays, s.expires_in)
            with ordinality as u (payload, body, headers, message_id, delay, expires_in, place)
        where s.largest_bytes <= q.max_payload_bytes
    ),
    due as (
        insert into pgqueue.messages (
            id, queue_name, enqueued_at, visible_at, max_attempts, expires_at, message_id, payload, body, headers, kind
        )
        select
            coalesce(m.id, nextval('pgqueue.message_id')), q.name, at, at, q.max_attempts,
            pgqueue._add_interval(at, m.expires_in), m.message_id, m.payload, m.body, m.headers, q.kind
        from staged m
        where coalesce(m.delay, '0') = interval '0' and m.id is distinct from 0
        returning messages.id
    ),
    later as (
        insert into pgqueue.scheduled_messages (
            id, queue_name, due_at, enqueued_at, max_attempts, expires_at, message_id, payload, body, headers
        )
        select
            coalesce(d.id, nextval('pgqueue.message_id')), q.name,
            pgqueue._clamp_due_at(pgqueue._add_interval(at, d.delay) + (d.n - 1) * interval '1 microsecond'),
            at, q.max_attempts, pgqueue._add_interval(at, d.expires_in), d.message_id, d.payload, d.body, d.headers
        -- Give each message its own due_at: claims resume at the last due_at, and would read all removed entries that
        -- have the same one.
        from (
            select m.*, row_number() over (partition by m.delay order by m.place) as n
            from staged m
            where m.delay > interval '0' and m.id is distinct from 0
        ) d
        order by d.place
        returning scheduled_messages.due_at
    )
    select
        (select count(*) from due), count(*), min(l.due_at),
        array(
            select coalesce(sum(c.messages) filter (where c.largest_bytes <= q.max_payload_bytes), 0)
            from unnest(tokens) with ordinality as t (token, place)
            left join pgqueue.staged_messages c on c.token = t.token
            group by t.place order by t.place
        )
    into published, delayed, due_at, sent from later l;
    if delayed > 0 then
        perform pgqueue._announce_due(q, due_at);
    end if;
    perform pgqueue._count('enqueued', q.name, (published + delayed)::int);
    return sent;
end;
$$;

create function pgqueue._discard_staged(run uuid) returns bigint
language plpgsql volatile as $$
declare
    tokens constant uuid[] := array(select a.token from pgqueue._lock_own_attempts(run) a);
    discarded bigint;
begin
    with gone as (delete from pgqueue.staged_messages s where s.token = any (tokens) returning s.messages)
    select coalesce(sum(g.messages), 0) into discarded from gone g;
    delete from pgqueue.staged_attempts a where a.token = any (tokens);
    return discarded;
end;
$$;

create function pgqueue.sink_commit(
    run uuid,
    tokens uuid[],
    counts bigint[],
    app_id text default null,
    version bigint default null,
    caller pgqueue.caller default current_user
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    -- A run without app_id is recorded under its own id, so that a call whose answer was lost can be repeated.
    ledger constant text := coalesce(app_id, run::text);
    entry constant bigint := coalesce(version, 0);
    earlier_role name;
    at timestamptz;
    part record;
    sent bigint[];
begin
    perform pgqueue._require(run is not null, 'run', null, 'the id of a run');
    perform pgqueue._require(cardinality(tokens) = (select count(distinct t) from unnest(tokens) as t),
        'tokens', tokens::text, 'an array of tokens that sink_stage returned, each once');
    perform pgqueue._require(
        cardinality(counts) = cardinality(tokens)
        and not exists (select from unnest(counts) as n where (n between 0 and 2147483647) is not true),
        'counts', counts::text, format('an array of %s, one for each token: the number of messages staged under it, from 0 to 2147483647',
            pgqueue._with_number(cardinality(tokens), 'element')));
    perform pgqueue._require(
        app_id is null or length(app_id) between 1 and 512, 'app_id', app_id, '1 to 512 characters, or null');
    perform pgqueue._require(
        num_nulls(app_id, version) <> 1, 'version', version::text, 'given if app_id is given, and null otherwise');
    perform pgqueue._require_untruncated('{pgqueue.staged_attempts,pgqueue.staged_messages,pgqueue.sink_commits}');
    -- Lock the queues first, in the order of their names. From here on none of them can be dropped.
    perform case
        when pgqueue._may_use(caller, n.queue_name, pgqueue._privileges_of('{producer}'))
            then pgqueue._get_locked_queue(n.queue_name) is null
        else pgqueue._raise('queue_not_found', n.queue_name) is null
    end
    from (
        select distinct a.queue_name from pgqueue.staged_attempts a
        where a.run = sink_commit.run and a.staged_by = session_user and a.token = any (tokens)
        order by a.queue_name
    ) n;
    -- A concurrent commit of the same version waits at this insert until the first commit ends, and then finds its
    -- entry.
    insert into pgqueue.sink_commits (app_id, version, run, messages, committed_by, committed_at)
    select ledger, entry, run, coalesce(sum(n), 0), session_user, pgqueue._now() from unnest(counts) as n
    on conflict do nothing;
    if not found then
        -- Messages must not be discarded because of another role's entry: that would lose them.
        select c.committed_by into earlier_role from pgqueue.sink_commits c
        where c.app_id = ledger collate "C" and c.version = entry;
        if earlier_role <> session_user then
            perform pgqueue._raise_invalid('app_id', ledger,
                format('an app_id of your own: version %s of this one was committed by role %I', entry, earlier_role));
        end if;
        perform pgqueue._discard_staged(run);
        return false;
    end if;
    perform pgqueue._require(
        not exists (
            select from pgqueue.sink_commits c where c.app_id = ledger collate "C" and c.forgotten_version >= entry),
        'version', entry::text, format('higher than the versions of app_id %L that sweep_staged has forgotten: it is not known whether this one was committed', ledger));

    for part in
        select
            c as queue, array_agg(t.token order by t.place) as tokens, array_agg(t.expected order by t.place) as counts
        from unnest(tokens, counts) with ordinality as t (token, expected, place)
        left join pgqueue._lock_own_attempts(run) a on a.token = t.token
        left join pgqueue.queues c on c.name = a.queue_name
        group by c.name
        order by c.name
    loop
        -- Read the clock after all locks are taken: delays count from this time.
        at := pgqueue._now();
        sent := pgqueue._send_staged(part.queue, part.tokens, (select sum(n) from unnest(part.counts) as n)::bigint, at);
        if sent <> part.counts then
            perform pgqueue._check_messages(s, a)
            from pgqueue.staged_messages s join pgqueue.staged_attempts a on a.token = s.token
            where s.token = any (part.tokens) and s.largest_bytes > (part.queue).max_payload_bytes
            order by array_position(part.tokens, s.token), s.row_number;
            perform pgqueue._require_current_snapshot(format('run %s', run));
            perform pgqueue._raise(
                'staged_messages_lost', sink_commit.run::text, a.partition::text, n.expected::text, n.sent::text)
            from unnest(part.tokens, part.counts, sent) with ordinality as n (token, expected, sent, place)
            left join pgqueue._lock_own_attempts(sink_commit.run) a on a.token = n.token
            where n.sent <> n.expected
            order by n.place limit 1;
        end if;
        perform pgqueue._wake_if_waiting(part.queue, pgqueue._now());
    end loop;
    perform pgqueue._discard_staged(run);
    return true;
end;
$$;
comment on function pgqueue.sink_commit is
'Sends the staged messages of a run in one transaction and returns true. From each attempt named in tokens it sends
exactly the number of messages given in counts, in their order and by the rules of enqueue; delays count from now. A
message whose dedup_key is taken, by an earlier message or by an earlier one of the same commit, is not sent, as with
enqueue_batch and on_duplicate keep; counts contains it. A commit with keys waits for transactions that have sent one of
them. Messages of the other attempts of the run are discarded. If version of app_id was committed before, it discards
all messages and returns false. A run without app_id is identified by run, so that the call can be repeated until it is
answered. Raises PQ010 if staged messages are missing, for example after a crash of the server; PQ001 if a queue was
dropped; PQ003 for the first message over the limit of its queue, with its row; and 22023 if the version was committed
by another role, or is not higher than those that sweep_staged has forgotten.';

create function pgqueue.sink_abort(run uuid) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    perform pgqueue._require(run is not null, 'run', null, 'the id of a run');
    return pgqueue._discard_staged(run);
end;
$$;
comment on function pgqueue.sink_abort is
'Discards the messages that the caller''s own role has staged in a run and not committed, and returns how many there
were. Raises 22023.';

create function pgqueue.sweep_staged(
    older_than interval default '1 day', forget_after interval default '90 days',
    caller pgqueue.caller default current_user
) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    tokens uuid[];
    swept bigint;
begin
    perform pgqueue._require_admin_of_all(caller, 'sweep_staged');
    perform pgqueue._require(pgqueue._is_interval_between(older_than, '0', '3652.5 days'),
        'older_than', older_than::text, 'an interval from 0 to 10 years (3652.5 days)');
    perform pgqueue._require(pgqueue._is_interval_between(forget_after, '0', '3652.5 days'),
        'forget_after', forget_after::text, 'an interval from 0 to 10 years (3652.5 days)');
    perform pgqueue._require_untruncated('{pgqueue.staged_attempts,pgqueue.staged_messages,pgqueue.sink_commits}');
    -- One sweep at a time: a sweep must see which versions other sweeps have deleted from the ledger.
    lock table pgqueue.sink_commits in share update exclusive mode;
    -- Attempts that are being committed are locked. They are skipped.
    tokens := array(
        select a.token from pgqueue.staged_attempts a
        where a.staged_at <= pgqueue._add_interval(at, -older_than)
        order by a.token for update skip locked
    );
    delete from pgqueue.staged_attempts a where a.token = any (tokens);
    -- Also delete messages that were copied under a token that sink_stage never returned.
    with gone as (
        delete from pgqueue.staged_messages s
        where s.token = any (tokens) or not exists (select from pgqueue.staged_attempts a where a.token = s.token)
        returning s.messages
    )
    select coalesce(sum(g.messages), 0) into swept from gone g;

    with newest as (
        select c.app_id, max(c.version) as version from pgqueue.sink_commits c group by c.app_id
    ),
    forgotten as (
        delete from pgqueue.sink_commits c
        using newest n
        where n.app_id = c.app_id and c.committed_at <= pgqueue._add_interval(at, -forget_after)
            and (c.version < n.version or c.app_id = c.run::text)
        returning c.app_id, c.version
    )
    update pgqueue.sink_commits c
    set forgotten_version = greatest(c.forgotten_version, f.version)
    from (select o.app_id, max(o.version) as version from forgotten o group by o.app_id) f
    join newest n on n.app_id = f.app_id
    where c.app_id = f.app_id and c.version = n.version;
    return swept;
end;
$$;
comment on function pgqueue.sweep_staged is
'Discards messages that were staged more than older_than (0 to 10 years, default 1 day) ago, because the driver of their
run died, and returns how many there were. A run that takes longer than that fails with PQ010. Also deletes commits
older than forget_after (0 to 10 years, default 90 days) from the ledger, but never the highest version of an app_id: a
lower version that was forgotten is refused from then on, and not sent twice. Raises 22023, and 42501 without admin
access to all queues.';

create function pgqueue._findings_of_sink(q pgqueue.queues) returns setof pgqueue.finding
language plpgsql volatile as $$
declare
    at constant timestamptz := pgqueue._now();
begin
    -- On a standby, reading an unlogged table raises an error.
    if q.name is null and not pg_is_in_recovery() then
        return query
        select
            'warning', null::text, 'stale_staging',
            format('never committed: %s of %s, staged by %s and up to %s old; the driver of each run died',
                pgqueue._with_number(s.attempts, 'attempt'), pgqueue._with_number(s.runs, 'run'), s.staged_by, at - s.oldest_at),
            'select pgqueue.sweep_staged();'
        from (
            select a.staged_by, count(*) as attempts, count(distinct a.run) as runs, min(a.staged_at) as oldest_at
            from pgqueue.staged_attempts a
            where a.staged_at <= at - interval '1 day'
            group by a.staged_by
        ) s
        order by s.staged_by;
    end if;
end;
$$;
-- Publish and subscribe. Queues subscribe to topics, and publish sends a copy of a message to each subscribed queue, in
-- the caller's transaction. The consumers of one queue share its copy.

create function pgqueue._is_topic(topic text, may_be_pattern boolean) returns boolean
language sql immutable parallel safe as $$
    -- A word may contain all characters that a type name may contain. * and # are wildcards only as a whole word.
    select char_length(topic) between 1 and 255 and topic !~ '(^|[.])([.]|$)|[[:cntrl:]]|(^|[.])#[.]#([.]|$)'
        and (may_be_pattern or topic !~ '(^|[.])[*#]([.]|$)')
$$;

create function pgqueue._check_topic(argument text, topic text, may_be_pattern boolean) returns void
language plpgsql stable as $$
begin
    if pgqueue._is_topic(topic, may_be_pattern) is not true then
        perform pgqueue._raise_invalid(argument, topic,
            '1 to 255 characters: words joined by dots, not empty, without control characters'
            || case when may_be_pattern then '; the word * matches one word, # matches any number of words, and no # follows another #'
                else '; * and # are allowed only in subscriptions' end);
    end if;
end;
$$;

create function pgqueue._subscribers(topics text[]) returns text[]
language plpgsql stable as $$
declare
    topic text;
    word text;
    -- The prefixes of patterns that match the words read so far. Each word has a dot behind it.
    prefixes text[];
    patterns text[] := '{}'::text[];
begin
    foreach topic in array topics loop
        prefixes := '{"",#.}'::text[];
        -- Walk the index on the patterns as a tree: look up each prefix extended by the next word and by *, each alone
        -- and followed by #. A prefix that ends in # matches this word, too. So the cost depends on the topic and on
        -- the matching patterns, not on the number of subscriptions.
        foreach word in array string_to_array(topic, '.') loop
            prefixes := array(
                select c.prefix
                from unnest(prefixes) as b
                cross join lateral (values
                    (b || word || '.'), (b || word || '.#.'), (b || '*.'), (b || '*.#.')
                ) as c (prefix)
                where (
                    -- The character after "." is "/": this range contains all patterns with the prefix.
                    select true from pgqueue.subscriptions s
                    where s.is_pattern and (s.topic || '.') >= c.prefix and (s.topic || '.') < left(c.prefix, -1) || '/'
                    order by s.topic || '.' limit 1
                )
                union
                select b from unnest(prefixes) as b where '.' || b like '%.#.'
            );
            exit when prefixes = '{}'::text[];
        end loop;
        patterns := patterns || prefixes;
    end loop;
    return array(
        select s.queue_name from pgqueue.subscriptions s where s.topic = any (topics)
        union
        select s.queue_name from pgqueue.subscriptions s where s.is_pattern and (s.topic || '.') = any (patterns)
    );
end;
$$;

create function pgqueue.subscribe(topic text, queue_name pgqueue.queue_of_consumer_or_admin) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
begin
    perform pgqueue._check_topic('topic', topic collate "default", true);
    insert into pgqueue.subscriptions (topic, queue_name, endpoint, queue_address)
    -- The endpoint is not the plain queue name: a transport may have an endpoint with the name of another queue.
    values (subscribe.topic, q.name, 'pgqueue:' || q.name, q.name)
    on conflict do nothing;
    return found;
end;
$$;
comment on function pgqueue.subscribe is
'Subscribes the queue to topic and returns true; false if it is already subscribed. The queue gets a copy of each
message that is published to topic from now on. topic is 1 to 255 characters: words joined by dots. In place of a word,
* matches exactly one word and # any number of words, including none: orders.* matches orders.paid, and orders.# also
matches orders and orders.paid.late. A queue that several subscriptions match gets one copy. Endpoints of an NServiceBus
transport find the subscription if the queue has a relation of expose_transport and topic is not a pattern. Raises
22023, PQ001.';

create function pgqueue.unsubscribe(topic text, queue_name pgqueue.queue_of_consumer_or_admin)
returns boolean language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    perform pgqueue._check_topic('topic', topic collate "default", true);
    perform pgqueue._get_locked_queue(queue_name);
    delete from pgqueue.subscriptions s
    where s.topic = unsubscribe.topic collate "C" and s.queue_name = unsubscribe.queue_name collate "C";
    return found;
end;
$$;
comment on function pgqueue.unsubscribe is
'Ends the subscription of the queue to exactly this topic or pattern and returns true; false if there was none. Messages
that were published before stay in the queue. Raises 22023, PQ001.';

create function pgqueue.list_subscriptions(
    queue_name pgqueue.queue_of_consumer_or_admin default null, caller pgqueue.caller default current_user
) returns setof pgqueue.subscription
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    if queue_name is not null then
        perform pgqueue._get_unlocked_queue(queue_name);
    end if;
    return query
    -- A queue can be subscribed by subscribe, and also as the address of endpoints.
    select s.topic, s.queue_name, min(s.subscribed_at) from pgqueue.subscriptions s
    where (list_subscriptions.queue_name is null or s.queue_name = list_subscriptions.queue_name collate "C")
        and pgqueue._may_use(caller, s.queue_name, pgqueue._privileges_of('{consumer,admin}'))
    group by s.topic, s.queue_name
    order by s.topic, s.queue_name;
end;
$$;
comment on function pgqueue.list_subscriptions is
'Returns the subscriptions of a queue, or of all queues if queue_name is null, by topic and queue. Each is returned
once, with the time when it was first made, whether by subscribe or by endpoints of a transport. Raises PQ001.';

create function pgqueue._check_copies(
    names text[], payload jsonb, delay interval, headers jsonb, expires_in interval, body bytea, dedup_key text,
    on_duplicate text
) returns void
language plpgsql stable as $$
declare
    smallest pgqueue.queues;
begin
    select * into smallest from pgqueue.queues q where q.name = any (names) order by q.max_payload_bytes limit 1;
    smallest.name := coalesce(smallest.name, '');
    perform pgqueue._check_enqueue(delay, expires_in), pgqueue._check_content(smallest, payload, body, headers);
    if dedup_key is not null or on_duplicate is distinct from 'keep' then
        perform pgqueue._check_keys(array[dedup_key], null, null, on_duplicate);
    end if;
end;
$$;

create function pgqueue.publish(
    topic text,
    payload jsonb default null,
    delay interval default '0',
    headers jsonb default null,
    expires_in interval default null,
    message_id uuid default null,
    body bytea default null,
    base_topics text[] default null,
    dedup_key text default null,
    on_duplicate text default 'keep',
    group_key text default null,
    priority int default null,
    caller pgqueue.caller default current_user
) returns int
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    topics text[] collate "C" := array[topic];
    names text[] collate "C";
    queue_ids bigint[];
    smallest pgqueue.queues;
    sent int;
begin
    if pgqueue._is_topic(topic collate "default", false) is not true then
        perform pgqueue._check_topic('topic', topic collate "default", false);
    end if;
    if base_topics is not null then
        perform pgqueue._check_topic('base_topics', t collate "default", false) from unnest(base_topics) as t;
        topics := topics || array(select unnest(base_topics));
    end if;
    -- Lock one queue after the other, by name. After waiting for a drop_queue, the queue may be gone, or a new queue of
    -- the same name may exist, with other subscriptions: queue_id tells them apart in the statements below.
    select array_agg(f.name) filter (where pgqueue._lock_queue(f.name)), array_agg(f.queue_id), min(f.max_payload_bytes)
    into names, queue_ids, smallest.max_payload_bytes
    from (
        select q.name, q.queue_id, q.max_payload_bytes from pgqueue.queues q
        where q.name = any (case
                when exists (select from pgqueue.subscriptions s where s.is_pattern) then pgqueue._subscribers(topics)
                else array(select s.queue_name from pgqueue.subscriptions s where s.topic = any (topics))
            end)
            -- The first condition is the cheaper one.
            and (
                has_table_privilege(caller, 'pgqueue.access_any'::regclass, pgqueue._privileges_of('{producer}'))
                or pgqueue._may_use(caller, q.name, pgqueue._privileges_of('{producer}'))
            )
        order by q.name offset 0
    ) f;
    if group_key is not null or priority is not null then
        perform pgqueue._check_keys(null, array[group_key], array[priority]);
        headers := pgqueue._with_group_and_priority(headers, group_key, priority);
    end if;
    if headers is null then
        headers := jsonb_build_object('pgqueue.topic', topic);
    elsif jsonb_typeof(headers) = 'object' then
        headers := headers || jsonb_build_object('pgqueue.topic', topic);
    end if;
    -- What the fast path of enqueue would send needs no other check.
    if delay is distinct from interval '0' or dedup_key is not null or on_duplicate is distinct from 'keep'
        or pgqueue._is_valid(smallest, payload, headers, expires_in, body) is not true or pgqueue._has_fixed_snapshot()
    then
        perform pgqueue._check_copies(names, payload, delay, headers, expires_in, body, dedup_key, on_duplicate);
        -- pg_relation_size does not depend on the snapshot, and locks the register: the catalog cache can be stale.
        perform pgqueue._raise('stale_snapshot', format('queue %L', q.name))
        from pgqueue.queues q
        where q.name = any (names) and pgqueue._has_fixed_snapshot() and pg_relation_size(q.fresh_from_id) is null
            -- It was not dropped, but got new registers with another kind.
            and to_regclass(format('pgqueue.queue_%s_fresh_from_id', q.queue_id)) is not null;
        if dedup_key is not null or delay > interval '0' then
            perform pgqueue.enqueue(
                n.name, payload, delay, headers, expires_in, message_id, body, dedup_key => publish.dedup_key,
                on_duplicate => publish.on_duplicate)
            from (
                select q.name from pgqueue.queues q
                where q.name = any (names) and q.queue_id = any (queue_ids) and pg_relation_filenode(q.fresh_from_id) is not null
                order by q.name
            ) n;
            get diagnostics sent = row_count;
            return sent;
        end if;
    end if;
    insert into pgqueue.messages (
        queue_name, enqueued_at, visible_at, max_attempts, expires_at, message_id, payload, body, headers, kind
    )
    select
        q.name, at, at, case when pgqueue._count('enqueued', q.name, 1) = 1 then q.max_attempts end,
        pgqueue._add_interval(at, expires_in), publish.message_id, publish.payload, publish.body, publish.headers, q.kind
    from pgqueue.queues q
    where q.name = any (names) and q.queue_id = any (queue_ids)
        and case
            when pg_relation_filenode(q.fresh_from_id) is null then false
            when pg_sequence_last_value(q.waiting_until) <= pgqueue._to_micros(at) then true
            else pgqueue._wake_if_waiting(q, at) is not null
        end
    order by q.name;
    get diagnostics sent = row_count;
    return sent;
end;
$$;
comment on function pgqueue.publish is
'Sends a copy of a message to every queue that is subscribed to topic and to which the caller may send, in the caller''s
transaction, and returns the number of copies; 0 if there is no such queue. base_topics are further topics of the same
event, for example those of its base classes; a queue gets one copy, however many of its subscriptions match. The header
pgqueue.topic of each copy is topic. All else is as in enqueue, for each copy: a message over the limit of one queue is
sent to none. topic is 1 to 255 characters: words joined by dots. A queue in which dedup_key is taken counts, too.
Raises 22023, PQ003.';
-- Schedules: a message at each tick of a cron expression. The message of the next tick waits in scheduled_messages, as
-- any delayed message does. When the message leaves scheduled_messages, a trigger adds the message of the following
-- tick in the same transaction. So each schedule has one message in that table, and no daemon is needed.
--
-- A tick is a moment at which the wall clock of a time zone shows a time that the cron expression matches. Where the
-- clock changes, the rules are those of Debian's cron: see _next_tick.

-- is_fixed: neither the minute nor the hour begins with *; such times have rules of their own where the clock changes.
-- needs_both: a day must match both fields of days, because one of them begins with *; otherwise one match is enough.
create function pgqueue._parse_cron(
    cron text, out minutes int[], out hours int[], out days int[], out months int[], out weekdays int[],
    out is_fixed boolean, out needs_both boolean
)
language plpgsql stable as $$
declare
    -- Other collations, such as that of Turkish, have other lower case letters.
    trimmed constant text := lower(regexp_replace(cron, '^[[:space:]]+|[[:space:]]+$', '', 'g') collate "C");
    fields constant text[] := regexp_split_to_array(case trimmed
        when '@hourly' then '0 * * * *'
        when '@daily' then '0 0 * * *'
        when '@midnight' then '0 0 * * *'
        when '@weekly' then '0 0 * * 0'
        when '@monthly' then '0 0 1 * *'
        when '@yearly' then '0 0 1 1 *'
        when '@annually' then '0 0 1 1 *'
        else trimmed
    end, '[[:space:]]+');
    problem text := case
        when cron is null or char_length(cron) > 200 then 'it must have at most 200 characters'
        when cardinality(fields) <> 5 then format('it has %s', pgqueue._with_number(cardinality(fields), 'field'))
    end;
begin
    -- Materialized: otherwise every use of a column would match the part again.
    with ranges as materialized (
        select
            l.n, l.least_value, l.most_value, p.part, coalesce(m[4]::int, 1) as step,
            case when m[1] = '*' then l.least_value else v.lower_end end as first_value,
            -- 5/15 is from 5 on.
            case
                when m[1] = '*' or m[3] is null and m[4] is not null then l.most_value
                when m[3] is null then v.lower_end
                else v.upper_end
            end as last_value
        from (values
            (1, 0, 59, '{}'::text[]), (2, 0, 23, '{}'), (3, 1, 31, '{}'),
            (4, 1, 12, '{jan,feb,mar,apr,may,jun,jul,aug,sep,oct,nov,dec}'), (5, 0, 7, '{sun,mon,tue,wed,thu,fri,sat}')
        ) as l (n, least_value, most_value, names)
        cross join string_to_table(fields[l.n], ',') as p (part)
        -- Without backslashes, which the session's standard_conforming_strings gives another meaning.
        cross join regexp_match(p.part, '^(?:([*])|([0-9]{1,2}|[a-z]{3})(?:-([0-9]{1,2}|[a-z]{3}))?)(?:/([0-9]{1,2}))?$') as m
        cross join lateral (
            select
                case when m[2] ~ '^[0-9]' then m[2]::int else array_position(l.names, m[2]) - 1 + l.least_value end as lower_end,
                case when m[3] ~ '^[0-9]' then m[3]::int else array_position(l.names, m[3]) - 1 + l.least_value end as upper_end
        ) as v
    )
    select
        coalesce(problem, min(format('%L is not a value, a range or a step within %s to %s', r.part, r.least_value, r.most_value)) filter (
            where (r.step > 0 and r.first_value between r.least_value and r.last_value and r.last_value <= r.most_value) is not true)),
        array_agg(distinct v) filter (where r.n = 1), array_agg(distinct v) filter (where r.n = 2),
        array_agg(distinct v) filter (where r.n = 3), array_agg(distinct v) filter (where r.n = 4),
        array_agg(distinct v % 7) filter (where r.n = 5)
    into problem, minutes, hours, days, months, weekdays
    from ranges r left join generate_series(r.first_value, r.last_value, nullif(r.step, 0)) as v on true;
    if problem is not null then
        perform pgqueue._raise_invalid(
            'cron', cron, format('five fields, such as 0 9 * * mon-fri, or a word such as @daily: %s', problem));
    end if;
    is_fixed := left(fields[1], 1) <> '*' and left(fields[2], 1) <> '*';
    needs_both := left(fields[3], 1) = '*' or left(fields[5], 1) = '*';
end;
$$;

-- Null if there is no tick within 41 years. Raises 22023 for an invalid expression.
create function pgqueue._next_tick(cron text, time_zone text, after timestamptz) returns timestamptz
language plpgsql stable as $$
declare
    c constant record := pgqueue._parse_cron(cron);
    -- The minutes of a day at which the fields of the time match.
    times constant int[] := array(select h * 60 + m from unnest(c.hours) as h cross join unnest(c.minutes) as m);
    day date;
    midnight timestamptz;
    tick timestamptz;
begin
    -- The day before can have ticks after this moment, if its last hour is repeated. February 29 on a given weekday can
    -- be 40 years away.
    for day in
        select w.day
        from (select (after at time zone time_zone)::date + generate_series(-1, 15000) as day) w
        where date_part('month', w.day)::int = any (c.months)
            and case
                when c.needs_both then date_part('day', w.day)::int = any (c.days) and date_part('dow', w.day)::int = any (c.weekdays)
                else date_part('day', w.day)::int = any (c.days) or date_part('dow', w.day)::int = any (c.weekdays)
            end
    loop
        midnight := day::timestamp at time zone time_zone;
        if (midnight - interval '12 h') at time zone time_zone + interval '48 h' = (midnight + interval '36 h') at time zone time_zone
        then
            select min(midnight + n * interval '1 min') into tick
            from unnest(times) as n where midnight + n * interval '1 min' > after;
        else
            -- The offset from UTC changes about this day. Each minute that passes is compared with the wall clock.
            -- latest is the latest time that the wall clock has shown before. A fixed time ticks when the wall clock
            -- first shows it or a later time; other times tick whenever the wall clock shows them.
            select min(m.t) into tick
            from (
                select w.t, w.wall, max(w.wall) over (order by w.t rows between unbounded preceding and 1 preceding) as latest
                from (
                    select t, t at time zone time_zone as wall
                    from generate_series(midnight - interval '27 h', midnight + interval '51 h', interval '1 min') as t
                ) w
            ) m
            where m.t > after
                and case
                    when c.is_fixed and m.wall <= m.latest then false
                    when c.is_fixed and m.wall > m.latest + interval '1 min' then exists (
                        select from unnest(times) as n
                        where day::timestamp + n * interval '1 min' > m.latest
                            and day::timestamp + n * interval '1 min' <= m.wall
                    )
                    else m.wall::date = day
                        and date_part('hour', m.wall)::int * 60 + date_part('minute', m.wall)::int = any (times)
                end;
        end if;
        exit when tick is not null;
    end loop;
    return tick;
end;
$$;

create function pgqueue._tick_headers(s pgqueue.schedules, tick timestamptz) returns jsonb
language sql stable as $$
    select coalesce(s.headers, '{}') || jsonb_build_object(
        'pgqueue.schedule', s.name,
        'pgqueue.scheduled_for', to_char(tick at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'))
$$;

create function pgqueue._add_tick_message(s pgqueue.schedules, tick timestamptz) returns void
language plpgsql volatile as $$
begin
    s.next_id := null;
    insert into pgqueue.scheduled_messages (queue_name, due_at, enqueued_at, max_attempts, expires_at, payload, headers)
    select
        q.name, pgqueue._clamp_due_at(tick), tick, q.max_attempts,
        case when not s.catch_up then pgqueue._next_tick(s.cron, s.time_zone, tick) end,
        s.payload, pgqueue._tick_headers(s, tick)
    from pgqueue.queues q
    where q.name = s.queue_name and tick is not null
    returning scheduled_messages.id into s.next_id;
    update pgqueue.schedules c
    set next_id = s.next_id, next_at = case when s.next_id is not null then tick end, last_at = s.last_at
    where c.name = s.name;
end;
$$;

create function pgqueue._add_first_tick_message(s pgqueue.schedules, at timestamptz) returns timestamptz
language plpgsql volatile as $$
declare
    tick constant timestamptz := case when not s.paused then pgqueue._next_tick(s.cron, s.time_zone, at) end;
begin
    perform pgqueue._add_tick_message(s, tick);
    perform pgqueue._announce_due(q, tick) from pgqueue.queues q where q.name = s.queue_name and tick is not null;
    return tick;
end;
$$;

-- If the time of the following tick cannot be computed, the schedule stops. Housekeeping tries again.
create function pgqueue._add_next_tick_message() returns trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    s pgqueue.schedules;
    tick timestamptz;
    span interval := interval '1 min';
    early timestamptz;
begin
    -- A message that comes back with a delay has the header, too, but is no longer the next one.
    select schedules.* into s from pgqueue.schedules
    where schedules.name = old.headers ->> 'pgqueue.schedule' and schedules.next_id = old.id
        and schedules.queue_name = old.queue_name
    for update;
    if not found then
        return null;
    end if;
    begin
        -- The relation of a transport takes messages before they are due.
        if old.due_at <= at
            or exists (select from pgqueue.messages m where m.queue_name = old.queue_name and m.id = old.id)
        then
            tick := pgqueue._next_tick(s.cron, s.time_zone, greatest(at, old.due_at));
            s.last_at := s.next_at;
            if old.expires_at <= at then
                -- No consumer claimed it in time. The message of the last tick that has passed can still be valid. Step
                -- back until a tick lies between early and at, and then forward by half of the step while one still
                -- does. The tick that has expired is one.
                early := at - span;
                while pgqueue._next_tick(s.cron, s.time_zone, early) > at loop
                    span := 2 * span;
                    early := at - span;
                end loop;
                while span > interval '1 min' loop
                    span := span / 2;
                    if pgqueue._next_tick(s.cron, s.time_zone, early + span) <= at then
                        early := early + span;
                    end if;
                end loop;
                tick := pgqueue._next_tick(s.cron, s.time_zone, early);
            end if;
            perform pgqueue._count('enqueued', s.queue_name, 1);
        else
            -- The message was removed before it was due, for example by a purge.
            tick := pgqueue._next_tick(s.cron, s.time_zone, at);
        end if;
        -- No notification is needed: a consumer that waits knows when the message that was removed was due.
        perform pgqueue._add_tick_message(s, tick);
    exception when invalid_parameter_value then
        -- The server does not know the time zone any more. This must not fail a claim.
        perform pgqueue._add_tick_message(s, null);
    end;
    return null;
end;
$$;

drop trigger if exists add_next_tick_message on pgqueue.scheduled_messages;
create trigger add_next_tick_message after delete on pgqueue.scheduled_messages
for each row when (old.headers ? 'pgqueue.schedule') execute function pgqueue._add_next_tick_message();

create function pgqueue._lock_schedule(name text, caller name) returns pgqueue.schedules
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    s pgqueue.schedules;
    seen pgqueue.schedules;
begin
    -- The message is locked before the schedule, as a claim does. A claim may take the message meanwhile, or another
    -- queue get a schedule of this name.
    loop
        select schedules.* into s from pgqueue.schedules where schedules.name = _lock_schedule.name collate "C";
        if not found or not pgqueue._may_use(caller, s.queue_name, pgqueue._privileges_of('{admin}')) then
            perform pgqueue._raise('schedule_not_found', name);
        end if;
        seen := s;
        begin
            perform pgqueue._get_locked_queue(s.queue_name);
        exception when sqlstate 'PQ001' then
            -- The queue and its schedules were dropped meanwhile.
            perform pgqueue._raise('schedule_not_found', name);
        end;
        perform from pgqueue.scheduled_messages m where m.queue_name = s.queue_name and m.id = s.next_id for update;
        select schedules.* into s from pgqueue.schedules where schedules.name = s.name for update;
        exit when s.next_id is not distinct from seen.next_id and s.queue_name = seen.queue_name;
    end loop;
    return s;
end;
$$;

create function pgqueue._check_schedule(s pgqueue.schedules) returns pgqueue.schedules
language plpgsql volatile as $$
declare
    q pgqueue.queues;
    zone text;
    at constant timestamptz := pgqueue._now();
begin
    perform pgqueue._raise_invalid(c.name, c.given, c.expected)
    from (values
        ('name', s.name, char_length(s.name) between 1 and 255 and s.name !~ '[[:cntrl:]]', '1 to 255 characters, without control characters'),
        ('payload', null, s.payload is not null, 'a JSON document, such as ''null'''),
        ('paused', null, s.paused is not null, 'true or false'),
        ('catch_up', null, s.catch_up is not null, 'true or false'),
        ('headers', s.headers::text, s.headers is null or jsonb_typeof(s.headers) = 'object', 'a JSON object')
    ) as c (name, given, is_valid, expected)
    where c.is_valid is not true;
    q := pgqueue._get_locked_queue(s.queue_name);
    -- "at time zone" also takes POSIX specifications, such as a misspelled name that ends in a digit, and
    -- abbreviations, such as CET, which depend on a setting of the session and have no daylight saving time.
    select z.name into zone from pg_timezone_names z
    where lower(z.name collate "C") = lower(s.time_zone collate "C") and (z.name ~ '/' or z.name = 'UTC');
    perform pgqueue._require(zone is not null, 'time_zone', s.time_zone,
        'UTC, or the name of a region in pg_timezone_names, such as Europe/Paris');
    s.time_zone := zone;
    perform pgqueue._require(pgqueue._next_tick(s.cron, s.time_zone, at) is not null, 'cron', s.cron,
        'a cron expression with a date that a day has');
    perform pgqueue._check_content(q, s.payload, null, pgqueue._tick_headers(s, at));
    return s;
end;
$$;

create function pgqueue.create_schedule(
    name text,
    queue_name pgqueue.queue_of_admin,
    cron text,
    payload jsonb default 'null',
    headers jsonb default null,
    time_zone text default 'UTC',
    paused boolean default false,
    catch_up boolean default true,
    priority int default null,
    group_key text default null,
    if_not_exists boolean default false
) returns timestamptz
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    s pgqueue.schedules;
begin
    perform pgqueue._require(if_not_exists is not null, 'if_not_exists', null, 'true or false');
    perform pgqueue._check_keys(null, array[group_key], array[priority]);
    s := row(
        name, queue_name, cron, payload, pgqueue._with_group_and_priority(headers, group_key, priority), time_zone,
        paused, catch_up, null, null, null);
    s := pgqueue._check_schedule(s);
    insert into pgqueue.schedules select (s).* on conflict do nothing;
    if not found then
        select e.next_at into s.next_at from pgqueue.schedules e
        where if_not_exists and e.name = s.name and e.queue_name = s.queue_name;
        if not found then
            perform pgqueue._raise('schedule_exists', name);
        end if;
        return s.next_at;
    end if;
    return pgqueue._add_first_tick_message(s, pgqueue._now());
end;
$$;
comment on function pgqueue.create_schedule is
'Creates a schedule: at each tick of cron, the queue gets a message with payload and headers. Returns the time of the
first tick, or null if the schedule is paused. name is 1 to 255 characters, without control characters, and unique in
the database. cron has five fields: minute, hour, day of month, month, day of week, with names (jan, sun), lists, ranges
and steps; or is @hourly, @daily, @midnight, @weekly, @monthly, @yearly or @annually. If neither day field begins with
*, a day needs to match one of them, else both. time_zone is UTC or the name of a region in pg_timezone_names. If
daylight saving time skips an hour, a fixed time in it ticks at the end of the gap. If an hour is repeated, a fixed time
in it ticks the first time only. If the minute or the hour begins with *, there is a tick each time the local time
matches. The headers of the message also have pgqueue.schedule, the name, and pgqueue.scheduled_for, the time of the
tick in UTC. If no consumer claims while ticks pass, one message waits. It is the message of the first missed tick; if
catch_up is false, the last. Without catch_up, a message expires at the next tick if it is not finished by then.
priority (0 to 9, the highest; null is 0) is for a queue with priorities, and group_key (1 to 255 characters; null:
none) for a queue with group_limit; they become the headers pgqueue.priority and pgqueue.group of the schedule, and do
nothing in other queues. With group_limit 1, the message of a tick waits until the message of the tick before is
finished. While a transaction that received the message of a tick is open, the next ticks wait for it. A queue with a
schedule that is not paused is never idle. If if_not_exists (false) and the queue has a schedule of this name, that
stays unchanged, and the time of its next tick is returned. Raises 22023, PQ001, PQ003, PQ012.';

create function pgqueue.alter_schedule(
    name text,
    cron text default null,
    payload jsonb default null,
    headers jsonb default null,
    time_zone text default null,
    paused boolean default null,
    catch_up boolean default null,
    priority int default null,
    group_key text default null,
    caller pgqueue.caller default current_user
) returns timestamptz
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
set enable_bitmapscan = off set jit = off as $$
declare
    s pgqueue.schedules := pgqueue._lock_schedule(name, caller);
begin
    s.cron := coalesce(alter_schedule.cron, s.cron);
    s.payload := coalesce(alter_schedule.payload, s.payload);
    perform pgqueue._check_keys(null, array[group_key], array[priority]);
    s.headers := pgqueue._with_group_and_priority(coalesce(alter_schedule.headers, s.headers), group_key, priority);
    s.time_zone := coalesce(alter_schedule.time_zone, s.time_zone);
    s.paused := coalesce(alter_schedule.paused, s.paused);
    s.catch_up := coalesce(alter_schedule.catch_up, s.catch_up);
    -- A schedule whose settings have become invalid, for example because the time zone is gone, can still be paused.
    if not s.paused or coalesce(
            cron, payload::text, headers::text, time_zone, catch_up::text, priority::text, group_key) is not null
    then
        s := pgqueue._check_schedule(s);
    end if;
    -- The update comes first: otherwise the trigger would add the message again.
    update pgqueue.schedules c
    set cron = s.cron, payload = s.payload, headers = s.headers, time_zone = s.time_zone, paused = s.paused,
        catch_up = s.catch_up, next_id = null, next_at = null
    where c.name = s.name;
    delete from pgqueue.scheduled_messages m where m.queue_name = s.queue_name and m.id = s.next_id;
    return pgqueue._add_first_tick_message(s, pgqueue._now());
end;
$$;
comment on function pgqueue.alter_schedule is
'Changes the settings that are given and leaves the others. The priority and the group are headers: new headers without
pgqueue.priority or pgqueue.group remove them, unless priority or group_key is given, too. Returns the time of the next
tick; null if the schedule is paused. While it is paused, it has no ticks. Messages of earlier ticks stay as they are,
but the message of a tick that no consumer has claimed yet is removed. Waits for a transaction that is claiming a tick.
Raises 22023, PQ003, PQ011.';

create function pgqueue.drop_schedule(name text, caller pgqueue.caller default current_user) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
set enable_bitmapscan = off set jit = off as $$
declare
    s pgqueue.schedules;
begin
    s := pgqueue._lock_schedule(name, caller);
    delete from pgqueue.schedules c where c.name = s.name;
    delete from pgqueue.scheduled_messages m where m.queue_name = s.queue_name and m.id = s.next_id;
    return true;
exception when sqlstate 'PQ011' then
    return false;
end;
$$;
comment on function pgqueue.drop_schedule is
'Drops a schedule and returns true; false if there is none. Messages that were claimed stay; the message of a tick that
no consumer has claimed yet is removed. drop_queue drops the schedules of the queue. Waits for a transaction that is
claiming a tick.';

create function pgqueue.list_schedules(
    queue_name pgqueue.queue_of_consumer_admin_or_reader default null, caller pgqueue.caller default current_user
) returns setof pgqueue.schedule
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    if queue_name is not null then
        perform pgqueue._get_unlocked_queue(queue_name);
    end if;
    return query
    select s.name, s.queue_name, s.cron, s.payload, s.headers, s.time_zone, s.paused, s.catch_up, s.next_at, s.last_at
    from pgqueue.schedules s
    where (list_schedules.queue_name is null or s.queue_name = list_schedules.queue_name collate "C")
        and pgqueue._may_use(caller, s.queue_name, pgqueue._privileges_of('{consumer,admin,reader}'))
    order by s.name;
end;
$$;
comment on function pgqueue.list_schedules is
'Returns the schedules of a queue, or of all queues if queue_name is null, by name. next_at is the time of the next
tick; it lies in the past if no consumer has claimed since. Raises PQ001.';

create function pgqueue.run_schedule(name text, caller pgqueue.caller default current_user) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    s pgqueue.schedules;
begin
    select schedules.* into s from pgqueue.schedules where schedules.name = run_schedule.name collate "C";
    if not found or not pgqueue._may_use(caller, s.queue_name, pgqueue._privileges_of('{producer,admin}')) then
        perform pgqueue._raise('schedule_not_found', name);
    end if;
    return pgqueue.enqueue(s.queue_name, s.payload, headers => pgqueue._tick_headers(s, pgqueue._now()));
end;
$$;
comment on function pgqueue.run_schedule is
'Sends the message of a schedule now, also if the schedule is paused, and returns its id. The ticks stay as they are.
Raises PQ001, PQ003, PQ011.';

create function pgqueue._findings_of_schedules(q pgqueue.queues) returns setof pgqueue.finding
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    s pgqueue.schedules;
    problem text;
    repair text;
begin
    for s in select c.* from pgqueue.schedules c where c.queue_name = q.name and not c.paused order by c.name loop
        problem := null;
        repair := format('select pgqueue.alter_schedule(%L);', s.name);
        begin
            if not exists (select from pgqueue.scheduled_messages m where m.queue_name = q.name and m.id = s.next_id) then
                problem := 'has no next tick';
            end if;
            if pgqueue._next_tick(s.cron, s.time_zone, pgqueue._now()) < s.next_at then
                problem := format('has its next tick at %s only, because the clock was ahead', s.next_at);
            end if;
        exception when invalid_parameter_value then
            problem := format('has stopped: %s', sqlerrm);
            repair := format('select pgqueue.alter_schedule(%L, time_zone => ''UTC'');', s.name);
        end;
        if problem is not null then
            return next row('error', q.name, 'stopped_schedule', format('schedule %L %s', s.name, problem), repair)::pgqueue.finding;
        end if;
    end loop;
end;
$$;

-- Adds the message of the next tick where it is missing, because a table was truncated or the trigger disabled.
create function pgqueue._on_housekeeping_due_schedules(at timestamptz) returns void
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set jit = off as $$
declare
    s pgqueue.schedules;
    q pgqueue.queues;
begin
    for s in
        select c.* from pgqueue.schedules c
        where not c.paused
            -- `offset 0` keeps the planner from a join that reads all scheduled messages. The order, without a sort,
            -- keeps it from the index on due_at.
            and not exists (
                select from pgqueue.scheduled_messages m
                where m.queue_name = c.queue_name and m.id between c.next_id and c.next_id
                order by m.id offset 0)
        limit 100 for update skip locked
    loop
        -- Each statement sees what other transactions have committed before it starts.
        select queues.* into q from pgqueue.queues where queues.name = s.queue_name;
        begin
            if q.name is not null and pgqueue._try_lock_existing_queue(q)
                and not exists (select from pgqueue.scheduled_messages m where m.queue_name = q.name and m.id = s.next_id)
            then
                perform pgqueue._add_first_tick_message(s, at);
            end if;
        exception when others then
            -- One schedule must not fail a claim, for example by a time zone that the server does not know.
            null;
        end;
    end loop;
end;
$$;
-- Takes back messages that no consumer has claimed, or changes when they are due.

create function pgqueue.cancel(queue_name pgqueue.queue_of_producer_or_admin, id bigint) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    place tid;
begin
    perform pgqueue._require(id is not null, 'id', null, 'the id of a message');
    -- If another transaction has locked the row, it claims the message, or moves it between the two tables.
    -- Only the primary key has the order of the ids: with `=`, a plan could read the whole queue through another index.
    -- The place is used by a statement of its own, whose snapshot shows the row version that is locked.
    place := (
        select c.ctid from pgqueue.scheduled_messages c
        where c.queue_name = q.name and c.id between cancel.id and cancel.id order by c.id for update skip locked
    );
    delete from pgqueue.scheduled_messages s where s.ctid = place;
    if not found then
        delete from pgqueue.messages_shared m
        where m.queue_name = q.name and m.id = (
            select c.id from pgqueue.messages_shared c
            where c.queue_name = q.name and c.id = cancel.id and (c.visible_at <= at or pgqueue._is_unclaimed(c))
            for update skip locked
        );
    end if;
    if not found and q.kind is not null then
        delete from pgqueue.messages m
        where m.kind = q.kind and m.queue_name = q.name and m.id = (
            select c.id from pgqueue.messages c
            where c.kind = q.kind and c.queue_name = q.name and c.id = cancel.id
                and (c.visible_at <= at or pgqueue._is_unclaimed(c))
            for update skip locked
        );
    end if;
    return found;
end;
$$;
comment on function pgqueue.cancel is
'Removes a message that is ready or scheduled and returns true. Returns false if a consumer has claimed it, if another
transaction has locked it at this moment, or if it is gone. Does not wait for consumers. If a consumer claims the
message at the same time, the message is either delivered or cancelled, never both. A message whose claim has ended is
ready again and can be cancelled; its consumer then loses the claim. Dead letters stay: purge_dead_messages removes
them. If you cancel the message of a future tick, the schedule adds it again. Pause the schedule with alter_schedule
instead. Raises 22023, PQ001.';

create function pgqueue.cancel_by_key(queue_name pgqueue.queue_of_producer_or_admin, dedup_key text)
returns boolean language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    id bigint;
begin
    perform pgqueue._require(char_length(dedup_key) between 1 and 255, 'dedup_key', left(dedup_key, 300), '1 to 255 characters');
    id := (
        select k.id
        from pgqueue._read_dedup_keys(
            q, pgqueue._dedup_period(q.dedup_window, at), array[dedup_key], at, '{}', '{}') k
        where k.is_taken);
    if id is null or not pgqueue.cancel(queue_name, id) then
        return false;
    end if;
    -- In the order in which senders lock the rows of a key.
    perform pgqueue._write_dedup_keys(q, period, array[dedup_key], array[id], '-infinity', array[id])
    from generate_series(
        pgqueue._dedup_period(q.dedup_window, pgqueue._end_of_dedup_window(q, at)),
        pgqueue._dedup_period(q.dedup_window, at), -1) as period;
    return true;
end;
$$;
comment on function pgqueue.cancel_by_key is
'Removes the message that has a dedup_key, as cancel does, and makes the key free. Returns false, and the key stays
taken, if a consumer has claimed the message, if it is gone, or if no message has the key. A message has its key for
dedup_window from when it was sent, also if it waits for longer. With dedup_window 0 it has the key while it lives.
Raises 22023, PQ001.';

create function pgqueue.reschedule(
    queue_name pgqueue.queue_of_producer_or_admin, id bigint, due_at timestamptz default null
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    new_due_at constant timestamptz := greatest(due_at, at);
    place tid;
begin
    perform pgqueue._require(id is not null, 'id', null, 'the id of a message');
    perform pgqueue._require(new_due_at <= pgqueue._add_interval(at, '3652.5 days'), 'due_at', due_at::text,
        'a time up to 10 years (3652.5 days) ahead, or null for now');
    perform pgqueue._require(
        not exists (select from pgqueue.schedules s where s.queue_name = q.name and s.next_id = reschedule.id),
        'id', id::text, 'that of a message which is no future tick of a schedule: see run_schedule and alter_schedule');
    -- If another transaction has locked the row, it claims the message, or moves it between the two tables.
    -- Found as in cancel.
    place := (
        select c.ctid from pgqueue.scheduled_messages c
        where c.queue_name = q.name and c.id between reschedule.id and reschedule.id and c.due_at > at
        -- Not `for update`: a replacement tells this lock from that of a consumer.
        order by c.id for no key update skip locked
    );
    update pgqueue.scheduled_messages s set due_at = pgqueue._clamp_due_at(new_due_at) where s.ctid = place;
    if not found then
        -- In a queue with group_limit 1, or that had it, a message waits here for its retry.
        update pgqueue.messages_shared m
        set visible_at = new_due_at
        where m.queue_name = q.name and m.id = (
            select c.id from pgqueue.messages_shared c
            where c.queue_name = q.name and c.id = reschedule.id and c.visible_at > at and pgqueue._is_unclaimed(c)
            for update skip locked
        );
    end if;
    if not found and q.kind is not null then
        update pgqueue.messages m
        set visible_at = new_due_at
        where m.kind = q.kind and m.queue_name = q.name and m.id = (
            select c.id from pgqueue.messages c
            where c.kind = q.kind and c.queue_name = q.name and c.id = reschedule.id and c.visible_at > at
                and pgqueue._is_unclaimed(c)
            for update skip locked
        );
    end if;
    if not found then
        return false;
    end if;
    perform pgqueue._announce_due(q, new_due_at);
    return true;
end;
$$;
comment on function pgqueue.reschedule is
'Makes a message that waits for a delay or a retry due at another time, and returns true. due_at is up to 10 years
ahead; null or a time that has passed is now. Waiting consumers are notified. Attempts, expiry, priority, and the place
in a group stay. Returns false if the message is ready or in flight, if another transaction has locked it at this
moment, or if it is gone. Does not wait for consumers. For the message of a future tick call run_schedule or
alter_schedule instead. A transaction that calls reschedule and then enqueue with the dedup_key of the message and
on_duplicate replace can deadlock with another replacement (40P01): call enqueue alone, which sets the due time, too.
Raises 22023, PQ001.';
-- What a transport writes and reads: the form of headers and ids, and the triggers of an exposed queue. These send what
-- is inserted into its relation, and archive what is deleted through it.

-- Headers as a transport reads them: a JSON object of strings and nulls, with the header NServiceBus.MessageId.
-- In PL/pgSQL, which keeps its plan: see _level_registers.
create function pgqueue._wire_headers(headers jsonb, message_id uuid) returns text
language plpgsql immutable parallel safe as $$
begin
    return (
        select coalesce(jsonb_object_agg(h.key, h.value), '{}')::text
        from jsonb_each_text(
            case when message_id is null then '{}' else jsonb_build_object('NServiceBus.MessageId', message_id) end
            || case when jsonb_typeof(headers) = 'object' then headers else '{}' end
        ) h
    );
end;
$$;

-- The id that a transport sees for a message that no transport sent, or that was put back since.
create function pgqueue._transport_id(id bigint) returns uuid
language sql immutable parallel safe as $$ select ('00000000000080008' || lpad(to_hex(id), 15, '0'))::uuid $$;

create function pgqueue._insert_by_transport() returns trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(tg_argv[0]);
    largest constant int := greatest(65536, q.max_payload_bytes);
    headers jsonb;
    row_sent record;
    legacy jsonb;
begin
    if new.id is null then
        perform pgqueue._raise('null_column', tg_table_schema, tg_table_name, 'id');
    end if;
    if new.headers is null then
        perform pgqueue._raise('null_column', tg_table_schema, tg_table_name, 'headers');
    end if;
    if octet_length(new.headers) > largest then
        perform pgqueue._raise('payload_too_large', q.name, 'column headers', octet_length(new.headers)::text, largest::text);
    end if;
    if octet_length(new.body) > q.max_payload_bytes then
        perform pgqueue._raise('payload_too_large', q.name, 'body', octet_length(new.body)::text, q.max_payload_bytes::text);
    end if;
    if new.headers ~ '[^[:space:]]' then
        begin
            headers := new.headers::jsonb;
        exception when others then
            null;
        end;
        if jsonb_typeof(headers) = 'null' then
            -- The transport reads JSON null, but fails at its first use of the headers, again and again. It reads an
            -- empty object as no headers.
            headers := null;
            new.headers := '{}';
        elsif headers is null or jsonb_typeof(headers) <> 'object' then
            -- A transport moves a message whose headers it cannot read to the error queue of its endpoint. A consumer
            -- rejects a message whose headers are not an object.
            headers := to_jsonb(new.headers);
        elsif tg_argv[1] = 'sqlserver' then
            -- Only the relations of this flavor have the columns, so they are read as JSON, without the body.
            row_sent := new;
            row_sent.body := null;
            legacy := to_jsonb(row_sent);
            legacy := jsonb_strip_nulls(jsonb_build_object(
                'NServiceBus.CorrelationId', legacy -> 'correlationid', 'NServiceBus.ReplyToAddress', legacy -> 'replytoaddress'));
            if legacy <> '{}' then
                headers := legacy || headers;
                new.headers := headers::text;
            end if;
        end if;
    end if;
    insert into pgqueue.messages (
        queue_name, enqueued_at, visible_at, max_attempts, expires_at, message_id, body, headers,
        transport_headers, transport_id, kind
    )
    values (
        -- A transport reads a null body as an empty one. A message has either a payload or a body.
        q.name, at, at, q.max_attempts, new.expires at time zone 'UTC', new.id, coalesce(new.body, ''), headers,
        new.headers,
        -- An id that _transport_id makes was read from another queue. In this queue it can be the id of another message
        -- that will be put back.
        case when new.id not between pgqueue._transport_id(0) and pgqueue._transport_id((1::bigint << 60) - 1) then new.id end,
        q.kind
    )
    returning case when pgqueue._count('enqueued', q.name, 1) = 1 then transport_seq end into new.seq;
    perform pgqueue._wake_if_waiting(q, at);
    return new;
end;
$$;

create function pgqueue._assign_transport_place() returns trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    new.transport_seq := nextval(tg_argv[0]::regclass);
    new.transport_id := coalesce(new.transport_id, pgqueue._transport_id(new.id));
    new.transport_headers := coalesce(new.transport_headers, pgqueue._wire_headers(new.headers, new.message_id));
    return new;
end;
$$;

create function pgqueue._archive_deleted_by_transport() returns trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    at constant timestamptz := pgqueue._finish_time();
    is_filed constant boolean := coalesce(pgqueue._has_day_partition(pgqueue._utc_day(at)), false);
begin
    with done as (
        select
            t.id, t.queue_name, t.enqueued_at, null::timestamptz, at, t.attempt_count + 1, t.max_attempts, t.expires_at,
            t.message_id, t.payload, t.body, t.headers, t.claimed_by, t.last_error
        from taken t
        where coalesce(t.expires_at > pgqueue._now(), true)
    ),
    filed as (
        insert into pgqueue.archived_messages select d.* from done d where is_filed
    )
    insert into pgqueue.unfiled_messages select d.* from done d where not is_filed;
    return null;
end;
$$;
-- Exposes a queue to an SQL transport of NServiceBus, as a relation into which the transport inserts messages and from
-- which it deletes the lowest row that is not locked. The relation is an automatically updatable view of the queue's
-- own partition: reading it runs no code except advance_transport, once a second. A trigger checks inserted messages.

create function pgqueue._sync_archive_trigger(q pgqueue.queues) returns void
language plpgsql volatile set lock_timeout = '500 ms' as $$
declare
    partition constant regclass := pgqueue._partition_of(q);
    is_wanted constant boolean := q.archive_for is not null and to_regclass(pgqueue._transport_table(q)) is not null;
begin
    -- A statement trigger fires for deletes that name this partition, as the relation does. It does not fire for the
    -- SQL functions, which delete from the parent table and archive by themselves. Queues that do not archive have no
    -- trigger, and so do not pay for it.
    if is_wanted = exists (select from pg_trigger g where g.tgrelid = partition and g.tgname = 'archive_taken') then
        return;
    end if;
    execute format(case
        when is_wanted then
            'create trigger archive_taken after delete on %s referencing old table as taken for each statement'
            ' execute function pgqueue._archive_deleted_by_transport()'
        else 'drop trigger archive_taken on %s'
    end, partition);
exception when lock_not_available then
    perform pgqueue._raise('queue_busy', q.name, 'alter_queue');
end;
$$;

-- Stable, as _to_micros.
create function pgqueue._transport_table(q pgqueue.queues) returns text
language sql stable parallel safe as $$ select format('pgqueue.%I', format('transports_%s', q.queue_id)) $$;

create function pgqueue._transport_of(q pgqueue.queues) returns regclass
language plpgsql volatile as $$
declare
    relation regclass;
begin
    -- Look the table up by name, in a statement that locks it: after waiting for expose_transport, the session's
    -- catalog cache and its snapshot can be stale.
    execute format('select t.relation from %s t', pgqueue._transport_table(q)) into relation;
    if relation is null then
        perform pgqueue._raise('stale_snapshot', format('queue %L', q.name));
    end if;
    return relation;
exception when undefined_table then
    return null;
end;
$$;

create function pgqueue.advance_transport(queue_name pgqueue.queue_of_transport) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
set enable_bitmapscan = off set enable_sort = off set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_unlocked_queue(queue_name);
    at constant timestamptz := pgqueue._now();
    past_the_end constant bigint := 9223372036854775807;
    table_name constant text := pgqueue._transport_table(q);
    seen pgqueue.transports;
    t pgqueue.transports;
    lowest bigint;
    is_due boolean;
begin
    if q.paused_at is not null or pgqueue._transport_of(q) is null then
        return past_the_end;
    end if;
    execute format('select t.head, t.next_at from %s t', table_name) into seen.head, seen.next_at;
    -- A transaction that receives can stay open while its handler works, and would hold the row for that long. For two
    -- seconds it leaves this work to statements that only read. A next_at more than a minute ahead was set while the
    -- clock was wrong, and is ignored.
    if current_setting('transaction_read_only')::boolean
        or seen.next_at < at + interval '1 min' and (
            seen.next_at > at
            or seen.next_at > at - interval '2 s' and current_query() ~* e'^[\\s(]*(delete|with|insert|update|merge)\\M'
        )
    then
        return seen.head;
    end if;
    -- A fixed snapshot does not show all rows up to settled_seq.
    if not pgqueue._has_fixed_snapshot() then
        execute format(
            'select t.seq_register, t.head, t.settled_seq, t.bound_seq, t.bound_id from %s t'
            ' for no key update skip locked', table_name)
        into t.seq_register, t.head, t.settled_seq, t.bound_seq, t.bound_id;
    end if;
    if not pgqueue._try_lock_existing_queue(q) then
        return seen.head;
    end if;
    -- Promote messages 15 s ahead, because the current statement does not see what it promotes. The relation shows no
    -- message before it is due.
    is_due := exists (
        select from pgqueue.scheduled_messages s
        where s.queue_name = q.name and s.due_at between (pgqueue._sweep_state_of(q.name, at)).first_due_at and at + interval '15 s');
    if is_due and (t.head is not null or seen.next_at not between at - interval '2 s' and at + interval '1 min') then
        perform pgqueue._move_due_messages(q, at + interval '15 s', 1000, (pgqueue._sweep_state_of(q.name, at)).first_due_at);
    end if;
    if t.head is null then
        return seen.head;
    end if;
    -- The work of sweeps, which a queue without claims does not have. It reads no ids, as only sweeps skip the vacant
    -- ones.
    perform pgqueue._adopt_messages(q);
    perform pgqueue._record_vacant_ids(q, at, 0);
    -- An insert takes an id first and a transport_seq second. A message that moves keeps its id. So bound_seq is read
    -- before bound_id is taken, and bound_id is a new id: _record_vacant_ids has listed the writers after both when it
    -- settles this id. Each row up to bound_seq is then visible, and no other one can appear there.
    if (select s.settled_id >= t.bound_id from pgqueue.sweep_state s where s.queue_name = q.name) then
        t.settled_seq := t.bound_seq;
        t.bound_seq := coalesce(pg_sequence_last_value(t.seq_register), 0);
        t.bound_id := nextval('pgqueue.message_id');
    end if;
    execute format(
        'select m.transport_seq from %s m where m.transport_seq >= $1 order by m.transport_seq limit 1', pgqueue._partition_of(q))
    into lowest using t.head;
    t.head := greatest(t.head, least(t.settled_seq + 1, lowest));
    execute format('update %s set head = $1, settled_seq = $2, bound_seq = $3, bound_id = $4, next_at = $5', table_name)
    using t.head, t.settled_seq, t.bound_seq, t.bound_id, case when is_due then at else at + interval '1 s' end;
    perform pgqueue._do_periodic_work(q, at);
    return t.head;
end;
$$;
comment on function pgqueue.advance_transport is
'Makes scheduled messages ready when they come due, takes the dead letters of queues whose dead_letter_to is this one,
does the housekeeping of claims, and returns the lowest seq at which statements on the relation of expose_transport have
to read; 9223372036854775807 while the queue is paused, or if it is not exposed. The relation calls this itself, at most
once a second. A role that reads the relation needs access to this function: grant_access(role, ''transport''). Raises
PQ001.';

create function pgqueue._expose(
    q pgqueue.queues, schema_name text, table_name text, body_string boolean, flavor text, for_role name
) returns text
language plpgsql volatile as $$
declare
    relation constant text := format('%I.%I', schema_name, table_name);
    register constant text := format('pgqueue.%I', format('queue_%s_seq', q.queue_id));
    name constant text := format('messages_%s', q.queue_id);
    is_sqlserver constant boolean := flavor = 'sqlserver';
    partition regclass;
begin
    perform pgqueue._require(
        not q.priorities and coalesce(q.group_limit, q.max_in_flight, q.rate_limit) is null, 'queue_name', q.name,
        'a queue without group_limit, priorities, max_in_flight and rate_limit: endpoints receive without regard to them');
    if q.dedicated then
        -- Plain SQL inserts do not lock the queue. Without this lock their rows could miss the trigger and have no
        -- transport_seq. Creating the trigger takes the same lock anyway.
        execute format('lock table only %s in share row exclusive mode', pgqueue._partition_of(q));
        perform pgqueue._require_current_snapshot(format('queue %L', q.name));
    else
        perform pgqueue._create_partition(q);
        update pgqueue.queues set dedicated = true, updated_at = pgqueue._now() where queues.name = q.name returning * into q;
        q := pgqueue._change_kind(q);
    end if;
    partition := pgqueue._partition_of(q);
    perform pgqueue._create_register(q.queue_id, 'seq');
    execute format(
        'update %s m set transport_seq = o.n, transport_id = pgqueue._transport_id(m.id),'
        ' transport_headers = coalesce(m.transport_headers, pgqueue._wire_headers(m.headers, m.message_id))'
        ' from (select c.id, row_number() over (order by c.id) as n from %1$s c) o where o.id = m.id', partition);
    execute format('select setval(%L, greatest(count(*), 1), count(*) > 0) from %s', register, partition);
    -- A search for the first row reads all entries of an index page: fillfactor 30 keeps them few. Also, with hardly
    -- any statistics every index seems to find one row, and the planner takes the smaller index, or the one created
    -- last. For a search by id that must be the index on transport_id.
    execute format(
        'create unique index %I on %s (transport_seq) with (fillfactor = 30)', name || '_transport_seq', partition);
    execute format('create unique index %I on %s (transport_id)', name || '_transport_id', partition);
    -- The statistics of a queue mostly say that it was empty. Even then, reading it in the order of transport_seq must
    -- look cheaper than reading and sorting all rows. So keep no statistics of that column: they would tell the planner
    -- the physical order of the rows. The low threshold renews the other statistics soon.
    execute format('alter table %s alter transport_seq set statistics 0', partition);
    execute format('alter table %s set (autovacuum_analyze_threshold = 1000)', partition);
    execute format('create index %I on %s ((expires_at at time zone ''UTC'')) where expires_at is not null',
        name || '_expires', partition);
    execute format(
        'create trigger place_for_transport before insert on %s for each row when (new.transport_seq is null)'
        ' execute function pgqueue._assign_transport_place(%L)', partition, register);
    -- Fire the trigger also in sessions that have triggers disabled: a row without transport_seq is never received.
    execute format('alter table %s enable always trigger place_for_transport', partition);
    -- The key keeps a dump that is restored twice from adding a second row.
    execute format(
        'create table %s (primary key (queue_name)) inherits (pgqueue.transports)'
        ' with (fillfactor = 10, autovacuum_vacuum_threshold = 100, autovacuum_vacuum_scale_factor = 0, vacuum_truncate = false)',
        pgqueue._transport_table(q));
    perform pgqueue._revoke_default_privileges(pgqueue._transport_table(q)::regclass);
    -- The view shows messages that could be claimed, and expired ones, which the transport deletes itself.
    execute format(
        'create view %s as '
        'select m.transport_id as id,%s m.expires_at at time zone ''UTC'' as expires, m.transport_headers as headers,'
        ' coalesce(m.body, convert_to(m.payload::text, ''UTF8'')) as body,%s%s m.transport_seq as seq from %s m'
        -- Planning one condition is faster than planning two, and reading a table of one row is planned faster than a
        -- lookup by key.
        ' where case when m.attempt_count < m.max_attempts then m.visible_at <= clock_timestamp() end'
        ' and m.transport_seq >= ('
        ' select case when t.next_at > clock_timestamp() and t.next_at < clock_timestamp() + interval ''1 min'''
        ' then t.head else pgqueue.advance_transport(%L) end from %s t)'
        -- This condition has no column of m, so it is evaluated before the first row. Otherwise a sequential scan of an
        -- empty table would never call advance_transport, and no message would ever come due.
        ' and (select t.next_at > clock_timestamp() and t.next_at < clock_timestamp() + interval ''1 min'''
        ' or pgqueue.advance_transport(%L) is not null from %s t)',
        relation,
        case when is_sqlserver then
            ' (m.headers ->> ''NServiceBus.CorrelationId'')::varchar(255) as correlationid,'
            ' (m.headers ->> ''NServiceBus.ReplyToAddress'')::varchar(255) as replytoaddress, true as recoverable,'
        end,
        case when body_string then ' coalesce(encode(m.body, ''escape''), m.payload::text) as bodystring,' end,
        case when is_sqlserver then ' m.transport_seq as rowversion,' end,
        partition, q.name, pgqueue._transport_table(q), q.name, pgqueue._transport_table(q));
    perform pgqueue._revoke_default_privileges(relation::regclass);
    execute format('alter view %s alter column id set default gen_random_uuid()', relation);
    execute format(
        'create trigger insert_by_transport instead of insert on %s for each row'
        ' execute function pgqueue._insert_by_transport(%L, %L)', relation, q.name, flavor);
    execute format('comment on view %s is %L', relation, format('The pgqueue queue %s, for a transport.', q.name));
    execute format('grant select, insert, update, delete on %s to %I with grant option', relation, for_role);
    execute format('insert into %s (queue_name, relation, seq_register) values ($1, $2, $3)', pgqueue._transport_table(q))
    using q.name, relation::regclass, register::regclass;
    perform pgqueue._sync_archive_trigger(q);
    update pgqueue.subscriptions s
    set queue_address = pgqueue._transport_address(relation::regclass)
    where s.queue_name = q.name;
    return pgqueue._transport_address(relation::regclass);
end;
$$;

create function pgqueue._transport_address(relation regclass) returns text
language sql stable as $$
    select format('"%s"."%s"', replace(n.nspname, '"', '""'), replace(c.relname, '"', '""'))
    from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where c.oid = relation
$$;

create function pgqueue._exposed_comment(kind text) returns text
language sql immutable parallel safe as $$
    select case kind
        when 'contract' then 'A table of pgqueue, for plain SQL.' else 'The subscriptions of pgqueue, for a transport.' end
$$;

create function pgqueue._check_exposure(
    schema_name text, table_name text default null, for_role name default null
) returns void
language plpgsql stable as $$
begin
    perform pgqueue._require(
        octet_length(schema_name) between 1 and 63 and schema_name !~ '^(pg_|pgqueue$|information_schema$)'
        and (for_role is null or exists (select from pg_namespace n where n.nspname = schema_name)), 'schema_name', schema_name,
        format('the name of %s schema, other than pgqueue and the system schemas', case when for_role is null then 'a' else 'an existing' end));
    if for_role is null then
        return;
    end if;
    perform pgqueue._require(
        octet_length(table_name) between 1 and 63, 'table_name', table_name, 'a name of 1 to 63 bytes');
    if not has_schema_privilege(for_role, schema_name, 'CREATE') then
        perform pgqueue._raise('not_allowed', for_role, 'create relations in schema', schema_name);
    end if;
end;
$$;

create function pgqueue.expose_transport(
    queue_name pgqueue.queue_of_admin,
    schema_name text default 'public',
    table_name text default null,
    body_string boolean default false,
    flavor text default 'postgresql',
    caller pgqueue.caller default current_user
) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500 ms'
set jit = off as $$
declare
    q pgqueue.queues;
    exposed regclass;
    address text;
begin
    perform pg_advisory_xact_lock(pgqueue._lock_key(queue_name));
    q := pgqueue._get_locked_queue(queue_name);
    perform pgqueue._require_current_snapshot(format('queue %L', queue_name));
    perform pgqueue._check_exposure(schema_name collate "C", coalesce(table_name, queue_name), caller);
    perform pgqueue._require(body_string is not null, 'body_string', null, 'true or false');
    perform pgqueue._require(flavor in ('postgresql', 'sqlserver'), 'flavor', flavor, 'postgresql or sqlserver');
    select t.relation into exposed from pgqueue.transports t where t.queue_name = q.name;
    if found then
        perform pgqueue._raise('exposed', q.name, exposed::text);
    end if;
    address := pgqueue._expose(q, schema_name, coalesce(table_name, queue_name), body_string, flavor, caller);
    if not q.dedicated then
        perform pgqueue._call_queue_handlers(q, w) from pgqueue.queues w where w.name = q.name;
    end if;
    return address;
exception when lock_not_available then
    perform pgqueue._raise('queue_busy', queue_name, 'expose_transport');
    return null;
end;
$$;
comment on function pgqueue.expose_transport is
'Creates a relation over the queue, table_name (default: the queue''s name) in schema_name (default public), and returns
its address. An NServiceBus transport uses it like its own table. The columns are id, expires (UTC), headers, body and
seq; with body_string also bodystring, the body as text; with flavor sqlserver (default postgresql) also correlationid,
replytoaddress, recoverable and rowversion, which is seq. An insert sends a message. It raises 23502 if id or headers
are null, and PQ003 if the body exceeds max_payload_bytes, or the headers exceed both max_payload_bytes and 64 KB. A
null body becomes an empty one. Headers that are not a JSON object, or have characters that jsonb cannot represent, are
kept as they came; pgqueue returns them as a JSON string, and its consumers reject the message. A delete takes messages
as receive does, and archives them if the queue has archive_for; a purge cannot be told apart from a receive. The
relation shows messages that could be claimed, and expired ones, which the transport deletes itself and which are not
archived. The queue becomes dedicated, as by create_queue, and its messages are moved and numbered under the same lock:
expose it while it has few. The caller needs the CREATE privilege on the schema, and gets all privileges on the
relation, with grant option. A role that reads the relation also needs grant_access(role, ''transport''). Raises 22023,
PQ001, PQ004, 42501, 42P07 if the name is taken, and 42710 if the queue is already exposed.';

create function pgqueue._unexpose(q pgqueue.queues) returns boolean
language plpgsql volatile as $$
declare
    relation constant regclass := pgqueue._transport_of(q);
begin
    if relation is null then
        return false;
    end if;
    -- The relation, or an index, may have been dropped by hand.
    if exists (select from pg_class c where c.oid = relation) then
        execute format('drop view %s', relation);
    end if;
    -- Any role with access can make a view that depends on it, or on the sequence. It must not keep them.
    execute format('drop table %s cascade', pgqueue._transport_table(q));
    execute format('drop trigger place_for_transport on %s', pgqueue._partition_of(q));
    perform pgqueue._sync_archive_trigger(q);
    execute format(
        'drop index if exists pgqueue.messages_%1$s_transport_seq, pgqueue.messages_%1$s_transport_id,'
        ' pgqueue.messages_%1$s_expires', q.queue_id);
    execute format('drop sequence pgqueue.queue_%s_seq cascade', q.queue_id);
    update pgqueue.subscriptions s set queue_address = q.name where s.queue_name = q.name;
    return true;
end;
$$;

create function pgqueue.unexpose_transport(queue_name pgqueue.queue_of_admin) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500 ms'
set jit = off as $$
declare
    q pgqueue.queues;
begin
    perform pg_advisory_xact_lock(pgqueue._lock_key(queue_name));
    q := pgqueue._get_locked_queue(queue_name);
    perform pgqueue._require_current_snapshot(format('queue %L', queue_name));
    return pgqueue._unexpose(q);
exception when lock_not_available then
    perform pgqueue._raise('queue_busy', queue_name, 'unexpose_transport');
    return null;
end;
$$;
comment on function pgqueue.unexpose_transport is
'Drops the relation that expose_transport created and returns true; false if there is none. The queue keeps its messages
and stays dedicated. Raises PQ001, PQ004, and 2BP01 if another object depends on the relation.';

create function pgqueue._on_queue_changed_transport(before pgqueue.queues, after pgqueue.queues) returns void
language plpgsql volatile as $$
declare
    seq_register constant text := format('pgqueue.queue_%s_seq', after.queue_id);
begin
    if after.name is null then
        perform pgqueue._unexpose(before);
    elsif before.name is not null then
        if not after.dedicated then
            return;
        end if;
        if after.rate_limit is not null and exists (select from pgqueue.transports t where t.queue_name = after.name) then
            perform pgqueue._raise_invalid('rate_limit', after.rate_limit::text,
                format('null: queue %L has the relation of a transport', after.name));
        end if;
        if after.archive_for is null and before.archive_for is not null then
            -- An older snapshot may not show that the queue is exposed.
            perform pgqueue._require_current_snapshot(format('queue %L', after.name));
        end if;
        perform pgqueue._sync_archive_trigger(after);
    elsif to_regclass(pgqueue._transport_table(after)) is null then
        return;
    elsif not after.dedicated or after.priorities or coalesce(after.group_limit, after.max_in_flight) is not null then
        -- The relation was dropped with the table that such a queue cannot have.
        execute format('drop table %s cascade', pgqueue._transport_table(after));
        execute format('drop sequence %s cascade', seq_register);
    else
        -- A restore without rows has left the relation. Its trigger has the name of the queue.
        execute format(
            'insert into %s (queue_name, relation, seq_register) select $1, coalesce(max(g.tgrelid), 0), $2 from pg_trigger g'
            ' where g.tgfoid = ''pgqueue._insert_by_transport''::regproc and split_part(encode(g.tgargs, ''escape''), $3, 1) = $1'
            ' on conflict do nothing', pgqueue._transport_table(after))
        using after.name, seq_register::regclass, e'\\000';
        perform pgqueue._sync_archive_trigger(after);
        if after.rate_limit is not null then
            perform pgqueue._unexpose(after);
        end if;
    end if;
end;
$$;

create function pgqueue._findings_of_transport(q pgqueue.queues) returns setof pgqueue.finding
language plpgsql volatile as $$
declare
    partition constant regclass := pgqueue._partition_of(q);
    table_name constant text := pgqueue._transport_table(q);
    top_seq bigint;
    register regclass;
    address text;
    expires boolean;
begin
    return query
    select
        'info', q.name, 'subscriber_without_relation',
        'the queue is subscribed, but has no relation: what endpoints of a transport publish does not reach it',
        format('select pgqueue.expose_transport(%L);', q.name)
    where exists (select from pgqueue.subscriptions s where s.queue_name = q.name)
        and not exists (select from pgqueue.transports t where t.queue_name = q.name)
        and exists (
            select from pg_description d
            where d.classoid = 'pg_class'::regclass and d.description = pgqueue._exposed_comment('subscriptions'))
    union all
    select
        'warning', q.name, 'renamed_relation',
        format('the relation of the queue was renamed to %s: what endpoints of a transport publish does not reach it', w.address),
        format('update pgqueue.subscriptions set queue_address = %L where queue_name = %L;', w.address, q.name)
    from (select pgqueue._transport_address(t.relation) as address from pgqueue.transports t where t.queue_name = q.name) w
    where exists (select from pgqueue.subscriptions s where s.queue_name = q.name and s.queue_address <> w.address);
    if to_regclass(table_name) is null then
        return;
    end if;
    execute format(
        'select greatest(t.head - 1, t.settled_seq, (select max(m.transport_seq) from %s m)), t.seq_register,'
        ' pgqueue._transport_address(t.relation),'
        ' (select bool_or(m.expires_at is not null) from (select c.expires_at from %1$s c limit 1000) m) from %2$s t',
        partition, table_name)
    into top_seq, register, address, expires;
    if address is null then
        return next row('error', q.name, 'missing_relation', 'the relation of the queue was dropped by hand: its transport fails',
            format('select pgqueue.unexpose_transport(%1$L); select pgqueue.expose_transport(%1$L);', q.name))::pgqueue.finding;
    end if;
    if top_seq > coalesce(pg_sequence_last_value(register), 0) then
        return next row('error', q.name, 'ids_above_sequence',
            format('its relation has already used seq %s, which the sequence %s has not reached: new messages are refused, or its transport does not find them', top_seq, register),
            format(
                'select setval(%1$L, greatest(%2$s, pg_sequence_last_value(%1$L)));'
                ' update %3$s set transport_seq = nextval(%1$L) where transport_seq < (select t.head from %4$s t);',
                register, top_seq, partition, table_name))::pgqueue.finding;
    end if;
    if expires and not pgqueue._has_index(partition, '(expires_at AT TIME ZONE ''UTC''::text)') then
        return next row('warning', q.name, 'missing_index',
            format('messages expire, and %s has no index on the column expires of its relation: the transport reads the whole queue', partition),
            format('create index concurrently on %s ((expires_at AT TIME ZONE ''UTC''::text)) where expires_at is not null;', partition)
        )::pgqueue.finding;
    end if;
end;
$$;
-- The subscriptions of a transport: a relation over subscriptions that an NServiceBus transport uses like its own
-- table. A trigger of subscriptions finds the queue of an address, and the address of a queue.

create function pgqueue._match_subscription() returns trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    found_name text;
    q pgqueue.queues;
begin
    if tg_op = 'INSERT' and new.queue_name is not null then
        select queues.* into q from pgqueue.queues where queues.name = new.queue_name;
        if found then
            new.queue_address := coalesce(pgqueue._transport_address(pgqueue._transport_of(q)), new.queue_address);
        end if;
        return new;
    end if;
    if new.topic is null then
        perform pgqueue._raise('null_column', tg_table_schema, tg_table_name, 'topic');
    end if;
    if new.queue_address is null then
        perform pgqueue._raise('null_column', tg_table_schema, tg_table_name, 'queue_address');
    end if;
    perform pgqueue._check_topic('topic', new.topic, true);
    perform pgqueue._require_untruncated('{pgqueue.transports}');
    select t.queue_name into found_name
    from pgqueue.transports t
    where pgqueue._transport_address(t.relation) = new.queue_address;
    new.queue_name := (pgqueue._get_locked_queue(coalesce(found_name, new.queue_address))).name;
    return new;
end;
$$;

create or replace trigger match_new_subscription
before insert on pgqueue.subscriptions
for each row when (new.queue_name is null or new.queue_address = new.queue_name)
execute function pgqueue._match_subscription();

create or replace trigger match_changed_subscription
before update of queue_address on pgqueue.subscriptions
for each row when (new.queue_address is distinct from old.queue_address)
execute function pgqueue._match_subscription();

create function pgqueue.expose_subscriptions(
    schema_name text default 'public', table_name text default 'SubscriptionRouting',
    caller pgqueue.caller default current_user
) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    relation text;
begin
    perform pgqueue._require_admin_of_all(caller, 'expose_subscriptions');
    -- Such calls take turns. Otherwise the second would fail with an error of the catalog.
    lock table only pgqueue.subscriptions in share update exclusive mode;
    perform pgqueue._require_current_snapshot('pgqueue.subscriptions');
    perform pgqueue._check_exposure(schema_name collate "C", table_name, caller);
    relation := format('%I.%I', schema_name, table_name);
    -- A transport sends an event to all addresses or to none, and fails if one is not a relation. So the view does not
    -- show the subscriptions of a queue without a relation, whose address is the name of the queue, or whose relation
    -- was dropped or renamed by hand. to_regclass would require the reader to have access to the schemas of all.
    execute format(
        'create view %s as select s.queue_address as queueaddress, s.endpoint, s.topic from pgqueue.subscriptions s'
        ' where case when s.queue_address <> s.queue_name then exists ('
        'select from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace'
        ' where c.relname = (parse_ident(s.queue_address))[2] and n.nspname = (parse_ident(s.queue_address))[1]) end',
        relation);
    perform pgqueue._revoke_default_privileges(relation::regclass);
    execute format('comment on view %s is %L', relation, pgqueue._exposed_comment('subscriptions'));
    execute format('grant select, insert, update, delete on %s to %I with grant option', relation, caller);
    return pgqueue._transport_address(relation::regclass);
end;
$$;
comment on function pgqueue.expose_subscriptions is
'Creates a relation over the subscriptions, table_name in schema_name, and returns its address. An NServiceBus transport
uses it like its own table. The columns are queueaddress, endpoint and topic. It shows the subscriptions of queues that
have a relation of expose_transport: what an endpoint publishes reaches those that are subscribed to exactly the name of
the event or of one of its base types. publish reaches all subscribed queues, also by patterns. An address is one that
expose_transport returned, or the name of a queue; an address that leads to no queue raises PQ001. An endpoint has each
topic once across all such relations: two systems in one database need different endpoint names. A role that may insert
into the relation can subscribe any queue to any topic. The caller needs the CREATE privilege on the schema, and gets
all privileges on the relation, with grant option. Raises 22023, 42501, and 42P07 if the name is taken.';

create function pgqueue.unexpose_subscriptions(
    schema_name text default 'public', table_name text default 'SubscriptionRouting',
    caller pgqueue.caller default current_user
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    relation regclass;
begin
    perform pgqueue._require(schema_name is not null, 'schema_name', null, 'the name of a schema');
    perform pgqueue._require(
        table_name is not null, 'table_name', null, 'the name of a relation that expose_subscriptions made');
    perform pgqueue._require_admin_of_all(caller, 'unexpose_subscriptions');
    lock table only pgqueue.subscriptions in share update exclusive mode;
    perform pgqueue._require_current_snapshot('pgqueue.subscriptions');
    select c.oid into relation from pg_class c
    where c.oid = to_regclass(format('%I.%I', schema_name, table_name)) and c.relkind = 'v'
        and pg_get_userbyid(c.relowner) = current_user
        and obj_description(c.oid, 'pg_class') = pgqueue._exposed_comment('subscriptions');
    if found then
        execute format('drop view %s', relation);
    end if;
    return relation is not null;
end;
$$;
comment on function pgqueue.unexpose_subscriptions is
'Drops a relation that expose_subscriptions created and returns true; false if there is none. The subscriptions stay.
Raises 22023, and 2BP01 if another object depends on the relation.';
-- Exposes the tables in a schema of another name, for applications whose SQL names that schema: sends, claims and
-- acknowledgements by plain SQL on automatically updatable views. The views have no rights of their own: PostgreSQL
-- checks the rights of their reader on the tables.

create function pgqueue._contract_views(schema_name text) returns setof pg_catalog.pg_class
language sql stable as $$
    select c.* from pg_catalog.pg_class c
    where c.relnamespace = (select n.oid from pg_catalog.pg_namespace n where n.nspname = schema_name)
        and c.relkind = 'v' and pg_catalog.pg_get_userbyid(c.relowner) = current_user
        and pg_catalog.obj_description(c.oid, 'pg_class') = pgqueue._exposed_comment('contract')
$$;

create function pgqueue.expose_contract(
    schema_name text default 'mdb_queue', caller pgqueue.caller default current_user
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    missing text[];
    table_name text;
    relation text;
begin
    perform pgqueue._require_admin_of_all(caller, 'expose_contract');
    perform pgqueue._check_exposure(schema_name collate "C");
    -- Concurrent calls wait for each other, so that the second one finds the views of the first. The lock is that of
    -- changes of privileges.
    perform pg_advisory_xact_lock(pgqueue._lock_key(''));
    perform pgqueue._require_current_snapshot(format('schema %I', schema_name));
    missing := array(
        select t from unnest(array[
            'queues', 'messages', 'scheduled_messages', 'dead_messages', 'archived_messages', 'unfiled_messages'
        ]) as t
        where t not in (select v.relname from pgqueue._contract_views(schema_name collate "C") v)
    );
    if missing = '{}' then
        return false;
    end if;
    if not exists (select from pg_namespace n where n.nspname = schema_name collate "C") then
        if not has_database_privilege(caller, current_database(), 'CREATE') then
            perform pgqueue._raise('not_allowed', caller, 'create schemas in database', current_database());
        end if;
        execute format('create schema %I', schema_name);
        execute format('comment on schema %I is %L', schema_name, pgqueue._exposed_comment('contract'));
        execute format('grant usage on schema %I to public', schema_name);
    elsif not has_schema_privilege(caller, schema_name, 'CREATE') then
        perform pgqueue._raise('not_allowed', caller, 'create relations in schema', schema_name);
    end if;
    foreach table_name in array missing loop
        relation := format('%I.%I', schema_name, table_name);
        execute format(
            'create view %s with (security_invoker = true) as select t.* from pgqueue.%I t', relation, table_name);
        perform pgqueue._revoke_default_privileges(relation::regclass);
        execute format('comment on view %s is %L', relation, pgqueue._exposed_comment('contract'));
        -- The rights on the table decide, because the view has security_invoker.
        execute format('grant select, insert, update, delete on %s to public', relation);
    end loop;
    return true;
end;
$$;
comment on function pgqueue.expose_contract is
'Creates views over the tables queues, messages, scheduled_messages, dead_messages, archived_messages and
unfiled_messages in schema_name (default mdb_queue), and returns true; false if the schema has them. An application
whose SQL names that schema sends, claims, extends, gives back and acknowledges messages through them as on the tables.
A schema that does not exist is created, and every role may use it. The rights on the tables decide what a role may do:
grant_access(role, ''raw'') lets it use all statements, reader lets it read. The caller needs the CREATE privilege on
the schema, or on the database if the schema is created. Raises 22023, 42501, and 42P07 if another relation has one of
these names.';

create function pgqueue.unexpose_contract(
    schema_name text default 'mdb_queue', caller pgqueue.caller default current_user
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500 ms'
set jit = off as $$
declare
    views regclass[];
begin
    perform pgqueue._require_admin_of_all(caller, 'unexpose_contract');
    perform pgqueue._check_exposure(schema_name collate "C");
    perform pg_advisory_xact_lock(pgqueue._lock_key(''));
    perform pgqueue._require_current_snapshot(format('schema %I', schema_name));
    views := array(select v.oid::regclass from pgqueue._contract_views(schema_name collate "C") v);
    if views = '{}' then
        return false;
    end if;
    execute 'drop view ' || array_to_string(views, ', ');
    if exists (
        select from pg_namespace n
        where n.nspname = schema_name collate "C" and pg_get_userbyid(n.nspowner) = current_user
            and obj_description(n.oid, 'pg_namespace') = pgqueue._exposed_comment('contract')
    ) then
        begin
            execute format('drop schema %I', schema_name);
        exception when dependent_objects_still_exist then
            -- Other objects are in the schema.
            null;
        end;
    end if;
    return true;
end;
$$;
comment on function pgqueue.unexpose_contract is
'Drops the views that expose_contract created and returns true; false if there are none. Drops the schema, too, if
expose_contract created it and nothing else is in it. The tables and their messages stay. Raises 22023, 55P03 if a
longer transaction uses a view, and 2BP01 if another object depends on one.';
-- Temporary queues, such as one for the replies to each instance of a service. A queue with expires_after_idle is
-- dropped when it is empty and was not used for that long. No daemon is needed: creating a queue drops idle ones.

create function pgqueue._drop_idle_queues(
    max_queues int, may_block boolean, caller name default current_user
) returns setof text
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set lock_timeout = '100 ms' set jit = off
as $$
declare
    at constant timestamptz := pgqueue._now();
    dropped int := 0;
    q pgqueue.queues;
    swept_at timestamptz;
begin
    -- A snapshot that is older than the lock does not show messages that were sent in between.
    if pgqueue._has_fixed_snapshot() then
        return;
    end if;
    for q in
        select queues.* from pgqueue.queues
        where queues.expires_after_idle is not null
            and queues.updated_at <= pgqueue._add_interval(at, -queues.expires_after_idle)
            -- Dropping a dedicated table blocks all senders and consumers until this transaction ends.
            and (may_block or not queues.dedicated)
            and pgqueue._may_use(caller, queues.name, pgqueue._privileges_of('{admin}'))
        -- create_queue must not try thousands of queues that are in use. It tries some of them at random.
        order by case when may_block then queues.name end, random()
        limit case when not may_block then 100 end
    loop
        exit when dropped >= max_queues;
        begin
            -- A queue in use by another transaction stays: do not wait for the lock. It only blocks sessions that use
            -- this queue.
            continue when not pg_try_advisory_xact_lock(pgqueue._lock_key(q.name));
            select queues.* into q from pgqueue.queues where queues.name = q.name and queues.queue_id = q.queue_id;
            -- The register holds no usable time if no claim was ever made, if the last claim found all the messages it
            -- wanted, or if the clock was wrong. Then the queue counts as used now. Setting the register makes this
            -- happen only once, and the next sweep is still due at once.
            swept_at := pgqueue._from_micros(pg_sequence_last_value(q.next_sweep_at));
            if swept_at not between timestamptz '1970-01-02 00:00+00' and at + interval '1 min' then
                swept_at := at;
                perform setval(q.next_sweep_at, pgqueue._to_micros(at));
            end if;
            -- alter_queue can have ended the expiry, which makes this null. The statement locks the tables before it
            -- takes its snapshot: in an older one, a table that was compacted since is empty.
            if (
                pgqueue._add_interval(at, -q.expires_after_idle) >= greatest(
                    q.created_at, q.updated_at, swept_at,
                    least(pgqueue._from_micros(coalesce(pg_sequence_last_value(q.waiting_until), 1)), at),
                    (select t.next_at from pgqueue.transports t where t.queue_name = q.name and t.next_at <= at + interval '1 min'))
                and not exists (select from pgqueue.messages m where m.queue_name = q.name and m.id >= (pgqueue._sweep_state_of(q.name, '-infinity')).first_id)
                and not exists (select from pgqueue.scheduled_messages s where s.queue_name = q.name and s.id >= (pgqueue._sweep_state_of(q.name, '-infinity')).first_id)
                and not exists (select from pgqueue.dead_messages d where d.queue_name = q.name and d.id >= (pgqueue._sweep_state_of(q.name, '-infinity')).first_id)
            ) is not true then
                -- Only an error releases the lock before the transaction ends, which may take long.
                perform pgqueue._raise('queue_busy', q.name, 'drop_idle_queues');
            end if;
            perform pgqueue._drop_queue(q);
            dropped := dropped + 1;
            return next q.name;
        exception when lock_not_available or dependent_objects_still_exist or sqlstate 'PQ004' then
            null;
        end;
    end loop;
end;
$$;

create function pgqueue.drop_idle_queues(caller pgqueue.caller default current_user) returns setof text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    -- Dropping a queue takes about ten locks. Thousands of queues would fill the lock table.
    return query select n from pgqueue._drop_idle_queues(100, true, caller) as n;
end;
$$;
comment on function pgqueue.drop_idle_queues is
'Drops at most 100 idle queues and returns their names; call it until it returns none. A queue is idle if it has
expires_after_idle, holds no message, including dead ones, and was not claimed from, received from or waited for during
that time. A queue that an open transaction uses stays. In repeatable read and serializable all queues stay, because
messages sent by other transactions may be invisible there. There is no need to call this, except to drop idle queues at
once: create_queue, in a transaction of its own, and expose_transport also drop up to ten idle queues, and dedicated
ones when a queue becomes dedicated.';

create function pgqueue._on_queue_changed_idle(before pgqueue.queues, after pgqueue.queues) returns void
language plpgsql volatile as $$
begin
    -- Only in the first statement: a long transaction would hold the locks of the queues that it dropped.
    if (before.name is null or after.dedicated and not before.dedicated)
        -- A function cannot know whether its transaction commits at once. Without this guess, idle queues would go only
        -- where a scheduled job calls drop_idle_queues. The times are not compared for equality, as a driver sends a
        -- statement as several messages, each with a time of its own. If the same query begins a transaction or calls
        -- receive, the caller continues to work in it.
        and statement_timestamp() - transaction_timestamp() < interval '5 ms'
        and current_query() !~* e'(^|;)\\s*(begin|start)\\M|\\mreceive\\M'
    then
        perform pgqueue._drop_idle_queues(10, after.dedicated);
    end if;
end;
$$;
-- Results of messages: outcome, value, errors, attempts. The sender creates a result with the message, and a consumer
-- writes the outcome in the transaction of its acknowledgement. Nothing is written when a message dies or is removed:
-- get_result looks for the message.

-- A result that is not finished has failed if its message is gone.
create function pgqueue._as_result(r pgqueue.results) returns pgqueue.result
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
    dead pgqueue.dead_messages;
    attempts int;
    is_gone boolean;
    queue_kind bigint;
begin
    -- By one statement, as a message moves between the tables. One in scheduled_messages waits for its next attempt.
    select
        coalesce(
            (select m.attempt_count from pgqueue.messages_shared m where m.queue_name = r.queue_name and m.id = r.id),
            (select 0 from pgqueue.scheduled_messages s where s.queue_name = r.queue_name and s.id = r.id)),
        -- The snapshot of the caller can be older, and not show that a consumer has settled the message.
        exists (select from pgqueue.results c where c.queue_name = r.queue_name and c.id = r.id and c.finished_at is null),
        (select q.kind from pgqueue.queues q where q.name = r.queue_name)
    into attempts, is_gone, queue_kind;
    if attempts is null and queue_kind is not null then
        select
            coalesce(
                (select m.attempt_count from pgqueue.messages m where m.queue_name = r.queue_name and m.id = r.id),
                (select 0 from pgqueue.scheduled_messages s where s.queue_name = r.queue_name and s.id = r.id)),
            exists (select from pgqueue.results c where c.queue_name = r.queue_name and c.id = r.id and c.finished_at is null)
        into attempts, is_gone;
    end if;
    is_gone := is_gone and r.finished_at is null and attempts is null;
    if is_gone then
        select d.* into dead from pgqueue.dead_messages d where d.queue_name = r.queue_name and d.id = r.id;
    end if;
    return row(
        r.message_id, r.queue_name, r.id,
        -- The worker of the last attempt may have written nothing, and the message has returned.
        case when is_gone then 'failed' when r.status = 'running' and attempts = 0 then 'ready' else r.status end,
        r.task, r.value, r.errors,
        coalesce(dead.reason, case when is_gone then 'removed' end), r.attempt_count, r.workers, r.enqueued_at,
        r.started_at, r.last_attempted_at, coalesce(r.finished_at, dead.died_at), r.expires_at)::pgqueue.result;
end;
$$;

create function pgqueue.create_result(
    queue_name pgqueue.queue_of_producer, id bigint, message_id uuid, task jsonb default null,
    expires_in interval default '14 days'
) returns timestamptz
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
begin
    perform pgqueue._require(id is not null, 'id', null, 'that of a message');
    perform pgqueue._require(message_id is not null, 'message_id', null, 'that of a message');
    perform pgqueue._require(pgqueue._is_interval_between(expires_in, '0', '3652.5 days'),
        'expires_in', expires_in::text, 'an interval from 0 to 10 years (3652.5 days)');
    perform pgqueue._check_content(q, coalesce(task, 'null'), null, null);
    insert into pgqueue.results (queue_name, id, message_id, task, enqueued_at, expires_at, expires_in)
    values (
        q.name, create_result.id, create_result.message_id, create_result.task, at,
        pgqueue._add_interval(at, create_result.expires_in), create_result.expires_in);
    return at;
end;
$$;
comment on function pgqueue.create_result is
'Creates the result of a message, with the status ready, and returns its enqueued_at. Call it in the transaction of
enqueue, with the id that it has returned. message_id, by which get_result finds it, is that of the message, or another
UUID that no result has. task is for the program that reads the result, such as the name of a function and its
arguments; it has at most max_payload_bytes. expires_in, from 0 to 10 years, counts from the end of the message.
Raises 22023, 23505 (the message or message_id has a result), PQ001, PQ003.';

create function pgqueue.update_result(
    queue_name pgqueue.queue_of_consumer, id bigint, status text, value jsonb default null, error jsonb default null,
    worker text default null
) returns setof pgqueue.result
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off
as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    is_start constant boolean := status = 'running';
    is_end constant boolean := status in ('successful', 'failed');
    bytes bigint;
    changed pgqueue.results;
begin
    if id is null then
        perform pgqueue._raise_invalid('id', null, 'the id of a message');
    elsif status is null or status not in ('ready', 'running', 'successful', 'failed') then
        perform pgqueue._raise_invalid('status', status, 'ready, running, successful or failed');
    elsif value is not null and status <> 'successful' then
        perform pgqueue._raise_invalid('value', left(value::text, 50), 'null unless status is successful');
    elsif error is not null and status not in ('ready', 'failed') then
        perform pgqueue._raise_invalid('error', left(error::text, 50), 'null unless status is ready or failed');
    elsif worker is not null and not is_start then
        perform pgqueue._raise_invalid('worker', left(worker, 50), 'null unless status is running');
    end if;
    perform pgqueue._check_content(q, coalesce(value, 'null'), null, null);
    bytes := octet_length(error::text);
    if bytes > greatest(q.max_payload_bytes, 65536) then
        perform pgqueue._raise(
            'payload_too_large', q.name, 'error', bytes::text, greatest(q.max_payload_bytes, 65536)::text);
    end if;
    if is_start then
        -- An attempt can begin late, when its claim has ended and another one has settled or returned the message. Lock
        -- first: the next statement sees what that one has committed.
        select r.* into changed from pgqueue.results r where r.queue_name = q.name and r.id = update_result.id for update;
        if found and (
            changed.finished_at is not null
            and not exists (select from pgqueue.messages m where m.queue_name = q.name and m.id = update_result.id)
            or exists (select from pgqueue.scheduled_messages s where s.queue_name = q.name and s.id = update_result.id)
        ) then
            return next pgqueue._as_result(changed);
            return;
        end if;
    end if;
    update pgqueue.results r
    set status = update_result.status, value = update_result.value,
        errors = case when error is null then r.errors
            else case when jsonb_array_length(r.errors) < 20 then r.errors else r.errors - 0 end || jsonb_build_array(error) end,
        attempt_count = r.attempt_count + is_start::int,
        workers = case when is_start then (r.workers || coalesce(worker, ''))[greatest(cardinality(r.workers) - 98, 1):]
            else r.workers end,
        started_at = coalesce(r.started_at, case when is_start then at end),
        last_attempted_at = case when is_start then at else r.last_attempted_at end,
        finished_at = case when is_end then at end,
        expires_at = case when is_end then pgqueue._add_interval(at, r.expires_in) else r.expires_at end
    where r.queue_name = q.name and r.id = update_result.id
    returning r.* into changed;
    if found then
        return next pgqueue._as_result(changed);
    end if;
end;
$$;
comment on function pgqueue.update_result is
'Changes the result of a message and returns it; no row if the message has none. running begins an attempt of worker; it
changes nothing while the message is scheduled, and after the end of the result if the message is gone. ready ends an
attempt that failed and is repeated. successful, with the value, and failed end the result. Call it in the transaction
of ack, nack or reject: if one of these returns false, roll back. error is added to errors, which keeps the last 20, as
workers keeps the last 100. value has at most max_payload_bytes, and error, too, or 65536 if that is more. Raises 22023,
PQ001, PQ003.';

create function pgqueue.get_result(message_id uuid, caller pgqueue.caller default current_user)
returns setof pgqueue.result language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set jit = off as $$
begin
    perform pgqueue._require_untruncated_messages();
    return query
    select l.* from pgqueue.results r cross join lateral pgqueue._as_result(r) l
    where r.message_id = get_result.message_id
        and pgqueue._may_use(caller, r.queue_name, pgqueue._privileges_of('{producer,consumer,admin,reader}'));
end;
$$;
comment on function pgqueue.get_result is
'Returns the result of the message with this message_id; no row if there is none, if it has expired and was removed, or
if the caller may not use the queue. The status failed has a reason if no consumer has set it: that of the dead letter,
or removed if the message was purged, cancelled, acknowledged without an outcome, or has expired. If the dead letter is
sent again by redrive, the status is ready again.';

-- Deletes results that have expired. Those whose message is still there, or can be sent again, get a later time:
-- otherwise each call would look for the messages of all that stay. One that has succeeded was acknowledged. At the
-- commit, as the transaction of a receive would keep consumers from writing the results that stay.
create function pgqueue._at_housekeeping_results(at timestamptz) returns void
language plpgsql volatile set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
set enable_sort = off set jit = off as $$
declare
    kept tid[];
    gone tid[];
begin
    -- A fixed snapshot does not show messages that a compaction has moved since.
    if pgqueue._has_fixed_snapshot() then
        return;
    end if;
    select
        coalesce(array_agg(w.place) filter (where w.is_kept), '{}'),
        coalesce(array_agg(w.place) filter (where not w.is_kept), '{}')
    into kept, gone
    from (
        -- `offset 0` keeps the planner from a hash of all messages. The order, without a sort, keeps it from the index
        -- on due_at.
        select c.place, c.status <> 'successful' and (
                exists (select from pgqueue.dead_messages d where d.queue_name = c.queue_name and d.id = c.id offset 0)
                or exists (
                    select from pgqueue.scheduled_messages s
                    where s.queue_name = c.queue_name and s.id between c.id and c.id order by s.id offset 0)
                or exists (select from pgqueue.messages m where m.queue_name = c.queue_name and m.id = c.id offset 0)
            ) as is_kept
        from (
            select r.ctid as place, r.queue_name, r.id, r.status from pgqueue.results r
            where r.expires_at <= at
            order by r.expires_at limit 1000 for update skip locked
        ) c
    ) w;
    delete from pgqueue.results r where r.ctid = any (gone);
    update pgqueue.results r set expires_at = pgqueue._add_interval(at, greatest(r.expires_in, '1 h'))
    where r.ctid = any (kept);
    if cardinality(kept || gone) = 1000 then
        perform setval('pgqueue.next_housekeeping_at', pgqueue._to_micros(at + interval '1 s'));
    end if;
end;
$$;

create function pgqueue.purge_results(queue_name pgqueue.queue_of_admin, min_age interval default '0')
returns bigint language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    before timestamptz;
    purged bigint;
begin
    perform pgqueue._require(pgqueue._is_interval_between(min_age, '0', '3652.5 days'),
        'min_age', min_age::text, 'an interval from 0 to 10 years (3652.5 days)');
    before := pgqueue._add_interval(pgqueue._now(), -min_age);
    delete from pgqueue.results r
    where r.ctid = any (array(
        select c.ctid from pgqueue.results c
        where c.queue_name = q.name and coalesce(c.finished_at, c.enqueued_at) <= before
            and (c.status = 'successful' or not (
                exists (select from pgqueue.dead_messages d where d.queue_name = q.name and d.id = c.id offset 0)
                -- As in _at_housekeeping_results.
                or exists (
                    select from pgqueue.scheduled_messages s
                    where s.queue_name = q.name and s.id between c.id and c.id order by s.id offset 0)
                or exists (
                    select from pgqueue.messages m
                    where (m.kind = q.kind or m.kind is null) and m.queue_name = q.name and m.id = c.id offset 0)))
        order by c.id limit 10000 for update skip locked));
    get diagnostics purged = row_count;
    return purged;
end;
$$;
comment on function pgqueue.purge_results is
'Deletes up to 10,000 results of the queue that have ended at least min_age ago, and returns how many. Repeat the call
until it returns 0. Results of messages that are ready, scheduled, in flight or dead letters stay. Claims delete results
that have expired, so this call is for what shall go earlier. Raises 22023, PQ001.';
-- Returns the space of dead rows that vacuum cannot remove, because a long transaction pins the xmin horizon. A
-- compaction locks a table, usually for some hundredths of a second, reads the few living rows, truncates the table and
-- inserts them again. An enqueue, a sweep, or a session that reads the relation of a transport, requests a compaction.
-- Its transaction carries it out as the last step before its commit.

create function pgqueue._compactable_tables() returns table (relation regclass, least_bytes bigint)
language sql stable as $$
    select coalesce(i.inhrelid, t.oid)::regclass, w.least_bytes
    from (values
        ('messages', 16777216), ('scheduled_messages', 4194304), ('requeued_messages', 4194304),
        ('dead_messages', 4194304), ('staged_attempts', 4194304), ('staged_messages', 4194304),
        ('sink_commits', 4194304),
        -- A key that is used again and again updates its row each time, and each use reads the dead ones before.
        ('dedup_keys', 262144),
        -- Rows of these tables are updated once a second.
        ('sweep_state', 1048576), ('streams', 1048576), ('transports', 1048576)
    ) as w (name, least_bytes)
    join pg_catalog.pg_class t on t.relname = w.name and t.relnamespace = 'pgqueue'::regnamespace
    left join pg_catalog.pg_inherits i on i.inhparent = t.oid
    where i.inhrelid is not null or w.name not in ('messages', 'dedup_keys', 'transports')
    -- A caller that joins this with a function calls it for these tables only.
    offset 0
$$;

create function pgqueue._overgrown_tables()
returns table (relation regclass, bytes bigint, living_rows bigint, dead_rows bigint)
language sql volatile as $$
    -- The statistics are read without a lock, the size with one. So the size is read only if the statistics fit.
    select t.relation, s.bytes, pg_stat_get_live_tuples(t.relation), pg_stat_get_dead_tuples(t.relation)
    from pgqueue._compactable_tables() t
    cross join lateral (
        select
            case
                when pg_stat_get_dead_tuples(t.relation) >= 500
                    and pg_stat_get_dead_tuples(t.relation) >= 9 * pg_stat_get_live_tuples(t.relation)
                then pg_total_relation_size(t.relation)
            end as bytes
    ) s
    where s.bytes >= t.least_bytes
    order by s.bytes desc
$$;

create function pgqueue._pinned_transactions() returns bigint
language sql volatile as $$
    -- These columns are visible to every role. The snapshot of a vacuum does not hold the horizon, and an automatic
    -- analyze ends soon.
    select greatest(
        (
            select max(greatest(age(a.backend_xmin), age(a.backend_xid)))
            from pg_catalog.pg_stat_activity a
            where (a.datname = pg_catalog.current_database() or a.datid is null)
                and a.pid <> pg_catalog.pg_backend_pid() and a.backend_type is distinct from 'autovacuum worker'
        ),
        (select max(age(s.xmin)) from pg_catalog.pg_replication_slots s),
        (
            select max(age(p.transaction)) from pg_catalog.pg_prepared_xacts p
            where p.database = pg_catalog.current_database()
        ),
        0)
$$;

-- Whether the horizon is pinned for long enough to compact a table of this size. A few transactions with large batches
-- fill a table. From 64 MB or 50,000 dead rows on, five seconds suffice, so that it does not become too large to
-- compact, or 100 transactions if the time is not known, as for the snapshot of a standby.
create function pgqueue._is_pinned_for(bytes bigint, dead_rows bigint) returns boolean
language sql volatile as $$
    select pgqueue._pinned_transactions() >= 50000
        or (bytes >= 67108864 or dead_rows >= 50000) and coalesce(
            (select max(h.pinned_for) > interval '5 s' from pgqueue._horizon_holders() h),
            pgqueue._pinned_transactions() >= 100)
$$;

create function pgqueue._is_compaction_on() returns boolean
language sql volatile as $$
    select case current_setting('pgqueue.compaction', true)
        when 'on' then true
        when 'off' then false
        -- Only the dump of an extension detects that it is incomplete. Not pg_extension: a lock there would look like
        -- that of a dump.
        else exists (
            select from pg_catalog.pg_depend d
            where d.classid = 'pg_class'::regclass and d.objid = 'pgqueue.messages'::regclass and d.deptype = 'e'
        )
    end
$$;

create function pgqueue._compaction_obstacle(relation regclass) returns text
language sql volatile as $$
    select case
        when exists (
            select from pg_catalog.pg_publication_tables p
            join pg_catalog.pg_publication b on b.pubname = p.pubname
            where p.schemaname = 'pgqueue'
                and (
                    -- A subscriber would get the rows twice.
                    p.tablename = c.relname and not b.pubtruncate
                    -- A publication that publishes through the parent does not publish the truncation of a partition.
                    or c.relispartition and p.tablename = (
                        select r.relname from pg_catalog.pg_inherits i
                        join pg_catalog.pg_class r on r.oid = i.inhparent
                        where i.inhrelid = c.oid
                    )
                )
        ) then 'published'
        when exists (
            select from pg_catalog.pg_trigger g
            join pg_catalog.pg_proc f on f.oid = g.tgfoid
            -- Triggers for insert (4) and truncate (32).
            where g.tgrelid = c.oid and not g.tgisinternal and g.tgtype & 36 > 0 and g.tgenabled <> 'D'
                and f.pronamespace <> 'pgqueue'::regnamespace
        ) then 'trigger'
        when exists (select from pg_catalog.pg_constraint k where k.confrelid = c.oid) then 'referenced'
    end
    from pg_catalog.pg_class c
    where c.oid = relation
$$;

-- kept is null, and has the type of an array of rows of the table.
create function pgqueue._rewrite_table(relation regclass, kept anyarray) returns bigint
language plpgsql volatile set enable_seqscan = on set enable_tidscan = on set max_parallel_workers_per_gather = 0
set jit = off as $$
declare
    places tid[];
    bytes bigint;
begin
    -- This scan over the dead rows takes nearly all of the time. An index does not help, because it has an entry for
    -- each dead row. The scan does not read values that are stored out of line.
    execute format(
        'select array_agg(l.ctid), sum(l.bytes) from (select t.ctid, %s as bytes from only %s t limit 10001) l', (
            select string_agg(format('coalesce(pg_column_size(t.%I), 0)', a.attname), ' + ')
            from pg_attribute a
            where a.attrelid = relation and a.attnum > 0 and not a.attisdropped
        ), relation)
    into places, bytes;
    if cardinality(places) > 10000 or bytes > 8388608 then
        return null;
    end if;
    if places is not null then
        execute format('select array_agg(t) from only %s t where t.ctid = any ($1)', relation) into kept using places;
    end if;
    execute format('truncate only %s', relation);
    execute format('insert into %s select k.* from unnest($1) k', relation) using kept;
    return coalesce(cardinality(places), 0);
end;
$$;

create function pgqueue._compact_table(relation regclass) returns pgqueue.compaction
language plpgsql volatile as $$
declare
    done pgqueue.compaction;
begin
    done.table_name := relation::text;
    begin
        done.outcome := 'busy';
        -- The size is null if the table was dropped meanwhile.
        done.bytes_before := pg_total_relation_size(relation);
        done.outcome := case
            when done.bytes_before is null then 'busy'
            -- While this session waits for the lock, a worker of a parallel dump would not get its own lock, and fail.
            when pgqueue._is_dump_running() then 'dump'
            else pgqueue._compaction_obstacle(relation)
        end;
        if done.outcome is null then
            done.outcome := 'busy';
            execute format('lock table only %s in access exclusive mode', relation);
            -- Each of the following statements has a snapshot that is younger than the lock.
            done.outcome := 'backlog';
            execute format('select pgqueue._rewrite_table($1, null::%s[])', relation) into done.rows_kept using relation;
            if done.rows_kept is not null then
                -- A dump may have begun meanwhile. Its snapshot can be older than the commit that follows.
                perform pg_stat_clear_snapshot();
                done.outcome := case when pgqueue._is_dump_running() then 'dump' else 'compacted' end;
            end if;
            if done.outcome <> 'compacted' then
                -- The error undoes the truncation and releases the lock, which would last until the transaction ends.
                perform pgqueue._raise('queue_busy', done.table_name, 'compact_queue');
            end if;
        end if;
    exception when lock_not_available or deadlock_detected or object_in_use or undefined_table or sqlstate 'PQ004' then
        if done.outcome = 'backlog' and sqlstate <> 'PQ004' then
            done.outcome := 'busy';
        end if;
        done.rows_kept := null;
    end;
    if done.outcome = 'compacted' then
        -- A session reports its statistics once a second and loses a truncation if it commits again before that. The
        -- dead rows would still be counted, and autovacuum would start for them.
        perform pg_stat_force_next_flush();
    end if;
    done.bytes_after := case done.outcome when 'compacted' then pg_total_relation_size(relation) else done.bytes_before end;
    return done;
end;
$$;

create function pgqueue._on_maintenance_due_compact(at timestamptz) returns void
language plpgsql volatile set lock_timeout = '20 ms' as $$
begin
    -- In a fixed snapshot rows that others have inserted since are missing.
    if not pgqueue._has_fixed_snapshot() and pgqueue._is_compaction_on()
        and exists (
            select from pgqueue._overgrown_tables() t
            where pg_relation_size(t.relation) <= 1073741824 and pgqueue._is_pinned_for(t.bytes, t.dead_rows))
    then
        perform pgqueue._request_at_commit('_compact_overgrown', at);
    end if;
end;
$$;

create function pgqueue._compact_overgrown(at timestamptz) returns void
language plpgsql volatile set lock_timeout = '20 ms' as $$
declare
    candidate regclass;
    done pgqueue.compaction;
    next_at timestamptz := at + interval '1 s';
begin
    delete from pgqueue.compactions c
    where c.ctid = any (array(
        select o.ctid from pgqueue.compactions o
        where o.tried_at not between at - interval '1 day' and at + interval '1 day' for update skip locked));
    -- One session compacts at a time. It holds this lock until its commit. No queue can have this name.
    if not pg_try_advisory_xact_lock(pgqueue._lock_key('compact_queues()')) then
        return;
    end if;
    if pgqueue._is_dump_running() then
        perform setval('pgqueue.next_maintenance_at', pgqueue._to_micros(at + interval '10 s'));
        return;
    end if;
    for candidate in
        select t.relation from pgqueue._overgrown_tables() t
        -- A longer scan would block other sessions for too long. compact_queue has no such limit.
        where pg_relation_size(t.relation) <= 1073741824 and pgqueue._is_pinned_for(t.bytes, t.dead_rows)
        order by t.bytes desc
    loop
        done := pgqueue._compact_table(candidate);
        insert into pgqueue.compactions values (at, (done).*);
        exit when done.outcome = 'compacted';
        -- While this session waits for the lock of a table, other sessions wait behind it. Other sessions wait up to
        -- 20 ms every 10 s, which is 0.2 per cent. An attempt that has to scan the table first costs more.
        next_at := greatest(next_at, at + case done.outcome when 'backlog' then interval '60 s' else interval '10 s' end);
    end loop;
    if next_at > at + interval '1 s' then
        perform setval('pgqueue.next_maintenance_at', pgqueue._to_micros(next_at));
    end if;
exception when query_canceled or others then
    -- The compaction was undone, for example by a cancel. It must not fail the transaction of a claim.
    perform setval('pgqueue.next_maintenance_at', pgqueue._to_micros(at + interval '60 s'));
end;
$$;

create function pgqueue._compact_tables(verb text, relations regclass[]) returns setof pgqueue.compaction
language plpgsql volatile set lock_timeout = '500 ms' as $$
declare
    candidate regclass;
    waits_until timestamptz;
begin
    if pgqueue._has_fixed_snapshot() then
        perform pgqueue._raise('not_read_committed', verb);
    end if;
    perform pg_advisory_xact_lock(pgqueue._lock_key('compact_queues()'));
    waits_until := pgqueue._now() + current_setting('lock_timeout')::interval;
    for candidate in
        select t.relation from pgqueue._compactable_tables() t
        where t.relation = any (coalesce(relations, array[t.relation]))
        order by t.relation::text
    loop
        -- Sessions wait for the tables that are compacted already. All waits together are shorter than
        -- deadlock_timeout: in a deadlock this call gives up, not a consumer. 0 would be no limit.
        perform set_config('lock_timeout', greatest(
            1, (date_part('epoch', waits_until - pgqueue._now()) * 1000)::int)::text, true);
        begin
            continue when coalesce(pg_total_relation_size(candidate), 0) < 1048576;
        exception when lock_not_available or deadlock_detected then
            -- Its time is used up.
            return next row(candidate::text, 'busy', null, null, null)::pgqueue.compaction;
            continue;
        end;
        return next pgqueue._compact_table(candidate);
    end loop;
end;
$$;

create function pgqueue.compact_queue(queue_name pgqueue.queue_of_admin) returns setof pgqueue.compaction
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
begin
    return query
    select c.*
    from pgqueue._compact_tables(
        'compact_queue',
        array_remove(array[pgqueue._partition_of(q), to_regclass(format('pgqueue.transports_%s', q.queue_id))], null)) c;
end;
$$;
comment on function pgqueue.compact_queue is
'Compacts the table of the queue, which other queues may share, if it occupies 1 MB or more: locks it exclusively,
truncates it and inserts the living messages again, unchanged. Returns a row for each table with its outcome: compacted;
busy if the lock was not free within 500 ms of the call, and then with sizes of null if it hides them; backlog if more
than 10,000 messages or 8 MB are living; dump while pg_dump runs; published if a publication contains the table without
truncate or through its parent; trigger if a trigger of another schema would fire; referenced by a foreign key. Sweeps
do the same by themselves while a transaction pins the horizon and the table is nearly all dead, unless
pgqueue.compaction is set to off. The call has no upper limit for the size of the table; it blocks the queue for about
two seconds per GB. Call it in autocommit mode: the lock is held until the transaction ends. A transaction in repeatable
read that began before and reads the table afterwards finds it empty; the functions raise 40001 there. If pgqueue was
installed as plain SQL, call it only while no dump begins: a dump whose snapshot is older than the compaction has none
of the messages, and reports no error. Raises PQ001, 25001 in a transaction that is not in read committed, and 55P03 if
another compaction takes longer than 500 ms.';

create function pgqueue.compact_queues(caller pgqueue.caller default current_user)
returns setof pgqueue.compaction language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set jit = off as $$
begin
    perform pgqueue._require_admin_of_all(caller, 'compact_queues');
    return query select c.* from pgqueue._compact_tables('compact_queues', null) c;
end;
$$;
comment on function pgqueue.compact_queues is
'Compacts all tables of messages, scheduled messages, dead letters, keys, staged messages and internal state that occupy
1 MB or more, as compact_queue does, and returns a row for each. The locks of all of them are held until the transaction
ends. Call it in a maintenance window, in autocommit mode. Raises 25001, 42501 without admin access to all queues, and
55P03 if another compaction takes longer than 500 ms.';

create function pgqueue._findings_of_compact(q pgqueue.queues) returns setof pgqueue.finding
language plpgsql volatile set lock_timeout = '100 ms' as $$
declare
    at constant timestamptz := pgqueue._now();
    pinned constant bigint := pgqueue._pinned_transactions();
    t record;
    obstacle text;
    holder text;
    last_outcome text;
begin
    if q.name is not null or pg_is_in_recovery() then
        return;
    end if;
    if pinned >= 50000 then
        return next row(
            'info', null, 'compaction',
            format('the horizon is %s transactions old: ', pinned) || case
                when not pgqueue._is_compaction_on() then 'vacuum does not help, and automatic compaction is off'
                else 'enqueues and sweeps compact the tables that need it' || coalesce(
                    (
                        select format('; %s, they tried %s: %s', at - c.tried_at || ' ago', c.table_name, case c.outcome
                            when 'compacted' then format('compacted from %s to %s, with %s',
                                pg_size_pretty(c.bytes_before), pg_size_pretty(c.bytes_after), pgqueue._with_number(c.rows_kept, 'living row'))
                            else c.outcome end)
                        from pgqueue.compactions c where c.outcome is not null
                        order by c.tried_at desc limit 1
                    ), '; none was compacted in the last day')
            end,
            'End what pins the horizon: the finding pinned_horizon names it after a minute.')::pgqueue.finding;
    end if;
    for t in select o.*, pg_relation_size(o.relation) > 1073741824 as is_huge from pgqueue._overgrown_tables() o loop
        obstacle := pgqueue._compaction_obstacle(t.relation);
        select c.outcome into last_outcome from pgqueue.compactions c
        where c.table_name = t.relation::text and c.outcome is not null and c.tried_at > at - interval '5 min'
        order by c.tried_at desc limit 1;
        select case
                when a.pid is null then format('prepared transaction %L of %s has used it for %s', p.gid, p.owner, at - p.prepared)
                else format('process %s has used it for %s with: %s', a.pid, at - a.xact_start, left(a.query, 100))
            end
        into holder
        from pg_locks l
        left join pg_stat_activity a on a.pid = l.pid
        -- The lock of a prepared transaction has no process. Its own transaction id is locked, too.
        left join (
            pg_locks x join pg_prepared_xacts p on p.transaction = x.transactionid
        ) on l.pid is null and x.virtualtransaction = l.virtualtransaction
        where l.relation = t.relation and l.locktype = 'relation' and l.granted and l.pid is distinct from pg_backend_pid()
            and l.database = (select d.oid from pg_database d where d.datname = current_database())
        order by coalesce(a.xact_start, p.prepared) limit 1;
        return next row(
            'warning', null, 'uncompacted_table',
            format('%s occupies %s for about %s living rows, and %s', t.relation, pg_size_pretty(t.bytes), t.living_rows,
                case
                    when not pgqueue._is_pinned_for(t.bytes, t.dead_rows) then 'the space of dead rows can be used again, but is not returned'
                    when obstacle = 'published' then 'it is not compacted: a publication contains it without truncate, or through its parent'
                    when obstacle = 'trigger' then 'it is not compacted: a trigger of another schema would fire'
                    when obstacle = 'referenced' then 'it is not compacted: a foreign key references it'
                    when not pgqueue._is_compaction_on() then 'automatic compaction is off'
                    when pgqueue._is_dump_running() then format('it is not compacted while a dump runs (process %s)',
                        array_to_string(pgqueue._dumping_processes(), ', ', 'a prepared transaction'))
                    when t.is_huge then 'only compact_queue compacts a table of this size'
                    when last_outcome = 'backlog' then 'it is not compacted: more rows are living than the statistics say'
                    when last_outcome = 'busy' then 'the last attempt to compact it did not get its lock'
                        || coalesce('; ' || holder, '')
                    else 'the next enqueues or sweeps compact it'
                end),
            case obstacle
                when 'published' then 'alter publication <its name> set (publish = ''insert, update, delete, truncate'', publish_via_partition_root = false);'
                else 'select * from pgqueue.compact_queues();'
            end)::pgqueue.finding;
    end loop;
exception when lock_not_available then
    -- The size of a table that another transaction has locked exclusively cannot be read.
    null;
end;
$$;
-- Access to the functions and tables: defines what each kind of access may use, grants it and revokes it. The
-- privileges on the views access_* of access.sql are the only record of the access of a role.

create function pgqueue._access_privileges()
returns table (object text, privileges text, accesses text[], for_all boolean) language sql stable as $$
    select 'function pgqueue.' || p.proname, 'execute', f.accesses, false
    from (values
        ('{producer}'::text[], '{
            enqueue, enqueue_batch, sink_stage, sink_commit, sink_abort, publish, create_result}'::name[]),
        ('{consumer}', '{
            claim, claim_any, ack, ack_batch, ack_claims, exchange, nack, nack_claims, reject, record_failure, release,
            release_claims, extend, extend_batch, extend_claims, receive, prepare_wait, update_result, stream_open,
            stream_claim, stream_begin, stream_read, stream_extend, stream_ack}'),
        ('{admin}', '{
            create_queue, alter_queue, drop_queue, drop_idle_queues, pause_queue, resume_queue, purge_queue, redrive,
            purge_dead_messages, purge_expired, purge_results, create_schedule, alter_schedule, drop_schedule,
            drop_stream, maintain_archive, sweep_staged, compact_queue, compact_queues, doctor, expose_transport,
            unexpose_transport, expose_subscriptions, unexpose_subscriptions, expose_contract, unexpose_contract}'),
        ('{transport}', '{advance_transport}'),
        ('{producer,admin}', '{cancel, cancel_by_key, reschedule, run_schedule}'),
        ('{consumer,admin}', '{subscribe, unsubscribe, list_subscriptions, stream_skip, sweep_queue}'),
        ('{admin,reader}', '{browse_dead_messages}'),
        ('{consumer,admin,reader}', '{browse, browse_archived_messages, list_schedules, list_streams}'),
        ('{producer,consumer,admin,reader}', '{get_result}'),
        ('{producer,admin,raw}', '{wake}'),
        ('{producer,consumer,admin,raw}', '{channel}'),
        ('{producer,consumer,admin,raw,reader}', '{get_queue, list_queues, peek, stats, next_due_at, version}'),
        -- The checks of the domains call these.
        ('{producer,consumer,admin,raw,reader,transport}',
            '{_may_or_raise, _may_use, _is_name, _access_view, _privileges_of, _raise}')
    ) as f (accesses, names)
    join pg_catalog.pg_proc p on p.proname = any (f.names) and p.pronamespace = 'pgqueue'::regnamespace
    union all
    select t.object, t.privileges, t.accesses, t.for_all
    from (values
        ('schema pgqueue', 'usage', '{producer,consumer,admin,reader,raw,transport}'::text[], false),
        ('table pgqueue.staged_messages', 'insert', '{producer}', false),
        ('table pgqueue.queues', 'select', '{raw,reader}', true),
        ('sequence pgqueue.message_id', 'usage', '{raw}', true),
        ('sequence pgqueue.message_id', 'select', '{reader}', true)
    ) as t (object, privileges, accesses, for_all)
    union all
    select 'table pgqueue.' || t, p.privileges, p.accesses, true
    from unnest('{messages,scheduled_messages,dead_messages,archived_messages,unfiled_messages}'::text[]) as t
    cross join (values
        ('select, insert, update, delete', '{raw}'::text[]), ('select', '{reader}')
    ) as p (privileges, accesses)
$$;

create function pgqueue._granted_access()
returns table (role_name name, access text, queue_name text, access_view regclass) language sql stable as $$
    select
        r.rolname, p.access,
        case
            when c.relname <> 'access_any' then coalesce(pg_catalog.obj_description(c.oid, 'pg_class'), q.name, c.relname)
        end,
        c.oid::regclass
    from pg_catalog.pg_class c
    cross join lateral pg_catalog.aclexplode(c.relacl) as a
    join unnest(array['producer', 'consumer', 'admin', 'reader', 'raw', 'transport']) as p (access)
        on pgqueue._privileges_of(array[p.access]) = a.privilege_type
    join pg_catalog.pg_roles r on r.oid = a.grantee
    left join pgqueue.queues q on pgqueue._access_view(q.name) = 'pgqueue.' || c.relname
    where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'v' and c.relname ~ '^access_' and a.grantee <> c.relowner
$$;

create function pgqueue._check_access(role_name name, access text, queue_name text) returns void
language plpgsql stable as $$
begin
    perform pgqueue._raise_invalid(c.name, c.given, c.expected)
    from (values
        ('access', access, access in ('producer', 'consumer', 'admin', 'reader', 'raw', 'transport'),
            'producer, consumer, admin, reader, raw or transport'),
        ('role_name', null, role_name is not null, 'the name of a role'),
        ('access', access, queue_name is null or access <> 'raw',
            'producer, consumer, admin, reader or transport for a queue: raw is access to the tables of all queues'),
        ('queue_name', queue_name, queue_name is null or right(queue_name, 1) <> '*' or queue_name ~ '^[a-z0-9_-]{0,127}[_-][*]$',
            'the name of a queue, or the beginning of names up to a - or _, and then *')
    ) as c (name, given, is_valid, expected)
    where c.is_valid is not true;
    if not exists (select from pg_roles r where r.rolname = role_name) then
        perform pgqueue._raise('role_not_found', role_name);
    end if;
end;
$$;

create function pgqueue._access_statements(
    template text, role_identifier text, accesses text[], for_all boolean
) returns text
language sql stable as $$
    select string_agg(format(template, a.privileges, a.object, role_identifier), '; ')
    from pgqueue._access_privileges() a
    where a.accesses && _access_statements.accesses and (_access_statements.for_all or not a.for_all)
$$;

create function pgqueue._apply_access(role_name name, access text, for_all boolean) returns void
language plpgsql volatile as $$
begin
    execute pgqueue._access_statements('grant %s on %s to %s', quote_ident(role_name), array[access], for_all);
end;
$$;

create function pgqueue._find_access_view(queue_name text) returns regclass
language plpgsql volatile as $$
begin
    -- After waiting for a lock, the session's catalog cache can be stale. Opening a relation renews it.
    perform pg_relation_size('pgqueue.access_any'::regclass);
    return to_regclass(pgqueue._access_view(queue_name));
end;
$$;

create function pgqueue.grant_access(role_name name, access text, queue_name text default null) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    access_view regclass := 'pgqueue.access_any';
begin
    perform pgqueue._check_access(role_name collate "C", access collate "C", queue_name collate "C");
    if queue_name is not null and right(queue_name, 1) <> '*' then
        perform pgqueue._get_locked_queue(queue_name);
    end if;
    -- PostgreSQL raises an error if two transactions change the privileges of one function at once. No queue has the
    -- empty name, so its lock is free for this purpose.
    perform pg_advisory_xact_lock(pgqueue._lock_key(''));
    perform pgqueue._apply_access(role_name, access collate "C", queue_name is null);
    if queue_name is not null then
        access_view := pgqueue._find_access_view(queue_name);
        if access_view is null then
            execute format('create view pgqueue.%I as select', split_part(pgqueue._access_view(queue_name), '.', 2));
            access_view := pgqueue._access_view(queue_name)::regclass;
            perform pgqueue._revoke_default_privileges(access_view);
        end if;
        -- Every role can read comments. The hash in the name of the view does not tell the name of a queue.
        if right(queue_name, 1) = '*' then
            execute format('comment on view %s is %L', access_view, queue_name);
        end if;
    end if;
    execute format('grant %s on %s to %I', pgqueue._privileges_of(array[access collate "C"]), access_view, role_name);
end;
$$;
comment on function pgqueue.grant_access is
'Grants a kind of access to a role. A producer sends messages, also by staging, and sees the depth of queues but no
payload. A consumer claims, acknowledges, receives, reads streams and browses, including the archive. An admin creates,
alters, pauses, drops, redrives, purges, maintains the archive and browses dead letters. A reader reads and browses all
messages, by select on the tables, and changes nothing; batch reads of Spark need this access. raw is select, insert,
update and delete on the tables, for applications that use plain SQL, also through the views of expose_contract.
transport is the use of relations that expose_transport created; the role also needs privileges on those relations. A
role may have several kinds of access.
queue_name limits the access to one queue, or to all queues, also future ones, whose names begin with a pattern such as
billing-*: what is before * ends in - or _. For other queues the functions then raise PQ001, as if these did not exist,
and functions over several queues show and change only those of the caller. drop_queue ends the access to a single
queue. raw cannot be limited, and a reader of one queue has the functions, not the tables. Access belongs to the role
that calls: after set role to that role, in a security definer function to its owner. Members of a role have its access
if they inherit its privileges. Only the owner of the extension may call this. Raises 22023, 42704 for an unknown role,
and PQ001.';

create function pgqueue._revoke_access(role_name name, access text, access_view regclass) returns void
language plpgsql volatile as $$
begin
    if access_view is not null then
        execute format('revoke %s on %s from %I', pgqueue._privileges_of(array[access]), access_view, role_name);
    end if;
    execute pgqueue._access_statements(
        'revoke %s on %s from %s', quote_ident(role_name), array[access], access_view = 'pgqueue.access_any'::regclass);
    -- Privileges that other access of the role includes are granted again.
    perform pgqueue._apply_access(_revoke_access.role_name, g.access, g.for_all)
    from (
        select distinct w.access, w.queue_name is null as for_all from pgqueue._granted_access() w
        where w.role_name = _revoke_access.role_name collate "C"
    ) g;
end;
$$;

-- A queue that is dropped leaves nothing of the rooms but what it has archived. Only then: each delete locks its table
-- also if it finds nothing, and one from scheduled_messages makes the transaction count as one that has written to it.
create function pgqueue._on_queue_changed_grants(before pgqueue.queues, after pgqueue.queues) returns void
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    dropped regclass;
begin
    if after.name is not null then
        return;
    end if;
    -- The messages of the next ticks would become dead letters.
    with gone as (delete from pgqueue.schedules s where s.queue_name = before.name returning s.next_id)
    delete from pgqueue.scheduled_messages m using gone g where m.queue_name = before.name and m.id = g.next_id;
    delete from pgqueue.streams t where t.queue_name = before.name;
    delete from pgqueue.subscriptions s where s.queue_name = before.name;
    delete from pgqueue.results r where r.queue_name = before.name;
    dropped := pgqueue._find_access_view(before.name);
    if dropped is null then
        return;
    end if;
    perform pg_advisory_xact_lock(pgqueue._lock_key(''));
    perform pgqueue._revoke_access(g.role_name, g.access, g.access_view)
    from pgqueue._granted_access() g
    where g.access_view = dropped;
    -- Any role can make a view that depends on this one. It must not keep the queue.
    execute format('drop view %s cascade', dropped);
end;
$$;

create function pgqueue.revoke_access(role_name name, access text, queue_name text default null) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    access_view regclass;
begin
    perform pgqueue._check_access(role_name collate "C", access collate "C", queue_name collate "C");
    -- The functions call each other with the privileges of their owner.
    perform pgqueue._require(role_name collate "C" <> current_user, 'role_name', role_name,
        'a role other than the owner of pgqueue, whose access does not come from grants');
    if queue_name is not null and right(queue_name, 1) <> '*' then
        perform pgqueue._get_locked_queue(queue_name);
    end if;
    perform pg_advisory_xact_lock(pgqueue._lock_key(''));
    perform pgqueue._require_current_snapshot(format('the privileges of role %I', role_name));
    access_view := case when queue_name is null then 'pgqueue.access_any' else pgqueue._find_access_view(queue_name) end;
    perform pgqueue._revoke_access(role_name, access collate "C", access_view);
end;
$$;
comment on function pgqueue.revoke_access is
'Revokes what grant_access granted with the same queue_name: without queue_name the access to all queues, with it that
to the queue or the pattern. Privileges that the role has by other access remain. A transaction that is running keeps
what it has begun. Only the owner of the extension may call this. Raises 22023, 42704 for an unknown role, and PQ001.';

create function pgqueue.list_access() returns setof pgqueue.access
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    return query
    select g.role_name, g.access, g.queue_name from pgqueue._granted_access() g
    -- A restore without rows leaves the access to queues that do not exist. Their names are not known.
    where g.queue_name is distinct from substr(g.access_view::text, 9)
    order by g.role_name, g.access, g.queue_name nulls first;
end;
$$;
comment on function pgqueue.list_access is
'Returns the access that grant_access granted: role_name, access, and queue_name, which is a name, a pattern, or null
for all queues. Access that a role has as a member of another is listed for the other. Access to queues that are missing
after a restore without rows is not listed. Only the owner of the extension may call this.';

create function pgqueue._granted_privileges()
returns table (object text, privilege text, target text, grantee oid, relation regclass) language sql stable as $$
    select
        o.object, a.privilege_type,
        case when o.object = 'schema pgqueue' then a.privilege_type || ' on schema pgqueue' else coalesce(o.target, 'all on ' || o.object) end,
        a.grantee, o.relation
    from (
        select
            'function pgqueue.' || p.proname as object, 'all on function ' || p.oid::regprocedure as target,
            p.proacl as acl, p.proowner as owner, null::regclass as relation
        from pg_proc p
        where p.pronamespace = 'pgqueue'::regnamespace
        union all
        select
            case c.relkind when 'S' then 'sequence ' else 'table ' end || c.oid::regclass, null, c.relacl, c.relowner,
            c.oid::regclass
        from pg_class c
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'p', 'S', 'v')
        union all
        select
            format('column %I of table %s', t.attname, c.oid::regclass),
            format('all (%I) on table %s', t.attname, c.oid::regclass), t.attacl, c.relowner, null
        from pg_class c
        join pg_attribute t on t.attrelid = c.oid
        where c.relnamespace = 'pgqueue'::regnamespace
        union all
        -- With usage of a domain, a role could store a name that was checked before.
        select 'type ' || y.oid::regtype, null, y.typacl, y.typowner, null
        from pg_type y
        where y.typnamespace = 'pgqueue'::regnamespace and y.typtype = 'd'
        union all
        select 'schema pgqueue', null, n.nspacl, n.nspowner, null
        from pg_namespace n
        where n.nspname = 'pgqueue'
    ) o
    cross join lateral aclexplode(o.acl) as a
    where a.grantee <> o.owner
$$;

create function pgqueue._findings_of_grants(q pgqueue.queues) returns setof pgqueue.finding
language sql stable as $$
    with access as materialized (
        select g.role_name, p.object
        from pgqueue._granted_access() g
        join pgqueue._access_privileges() p on g.access = any (p.accesses) and (g.queue_name is null or not p.for_all)
        where q.name is null
    ),
    past as (
        select g.grantee, g.object, null::oid as grantor, g.target as privileges
        from pgqueue._granted_privileges() g
        left join pg_roles r on r.oid = g.grantee
        where q.name is null and (r.oid is not null or g.grantee = 0)
            -- A grant on a view of access is access.
            and (g.object !~ '^table pgqueue[.]access_' or g.grantee = 0)
            and (g.object <> 'schema pgqueue' or g.privilege = 'CREATE')
            and not exists (
                select from access a where a.role_name = r.rolname and a.object = g.object and g.privilege <> 'CREATE'
            )
            and (g.relation <> all (array(select l.relation from pgqueue._leftovers() l))) is not false
        union all
        -- The admin that exposed the queue grants rights on its relation to endpoints. An endpoint that publishes needs
        -- insert on the relations of all subscribers.
        select a.grantee, 'relation ' || v.relation, nullif(a.grantor, v.relowner), a.privilege_type || ' on ' || v.relation
        from (
            select
                c.oid::regclass as relation, c.relowner, c.relacl,
                split_part(encode(t.tgargs, 'escape'), e'\\000', 1) as queue_name
            from pg_trigger t
            join pg_class c on c.oid = t.tgrelid
            where q.name is null and t.tgfoid = 'pgqueue._insert_by_transport'::regproc
        ) v
        cross join lateral aclexplode(v.relacl) as a
        left join pg_roles r on r.oid = a.grantee
        where a.grantee <> v.relowner
            and not coalesce(case a.privilege_type
                when 'INSERT' then pgqueue._may_use(r.rolname, v.queue_name, pgqueue._privileges_of('{producer,admin}'))
                    or has_function_privilege(
                        r.oid, 'pgqueue.advance_transport(pgqueue.queue_of_transport)'::regprocedure, 'EXECUTE')
                else pgqueue._may_use(r.rolname, v.queue_name, pgqueue._privileges_of('{admin,transport}'))
            end, false)
    )
    select
        'warning', null, 'unmanaged_grant',
        format('role %s has privileges that none of its access includes: %s', n.grantee,
            string_agg(distinct n.object, ', ' order by n.object)),
        -- What a role has granted further, only that role can revoke.
        string_agg(distinct case
            when n.grantor is null then format('revoke %s from %s;', n.privileges, n.grantee)
            else format('set role %s; revoke %s from %s; reset role;', n.grantor, n.privileges, n.grantee)
        end, ' ')
    from (
        select
            coalesce(quote_ident(r.rolname), 'public') as grantee, p.object, p.privileges, quote_ident(o.rolname) as grantor
        from past p
        left join pg_roles r on r.oid = p.grantee
        left join pg_roles o on o.oid = p.grantor
    ) n
    group by n.grantee
$$;

revoke all on all functions in schema pgqueue from public;

-- The default privileges of the installing role may have granted rights on the new objects: revoke them. In an upgrade
-- only private functions are treated, as functions and tables of the API may have been granted on purpose.
do $$
declare
    granted record;
begin
    for granted in
        select distinct g.target, case g.grantee when 0 then 'public' else g.grantee::regrole::text end as grantee
        from pgqueue._granted_privileges() g
        where current_setting('pgqueue.installing', true) = 'yes' or g.object ~ '^(function pgqueue[.]_|type )'
    loop
        execute pg_catalog.format('revoke %s from %s', granted.target, granted.grantee);
    end loop;
    perform pg_catalog.set_config('pgqueue.installing', '', true);

    -- An upgrade may have added functions, and its statement above has revoked those of the checks.
    perform pgqueue._apply_access(g.role_name, g.access, g.for_all)
    from (
        select distinct w.role_name, w.access, w.queue_name is null as for_all
        from pgqueue._granted_access() w
    ) g;
end;
$$;
