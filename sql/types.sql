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
