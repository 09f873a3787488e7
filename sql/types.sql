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
'A message, as claim, receive and browse return it. attempt_count includes the attempt in progress.';

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
'A row of exchange: a claimed message or, if lost is true, the id of a message whose claim was lost before the
acknowledgement.';

create type pgqueue.settled_claim as (
    id bigint,
    settled boolean
);
comment on type pgqueue.settled_claim is
'The answer to one claim of ack_claims, nack_claims, extend_claims or release_claims: the id of the message, and whether
the claim was still valid.';

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
'A dead letter: the message, its last error, and the reason and time of its dead-lettering.';

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
'An acknowledged message, with the times at which it was sent, claimed and acknowledged and with its number of attempts.
claimed_at is null if the message was received.';

create type pgqueue.archive_change as (
    day date,
    change text
);
comment on type pgqueue.archive_change is
'What maintain_archive did with one day (UTC) of the archive. change is made, emptied, dropped, or busy if another
transaction used the partition.';

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
'The depth of a queue, and what was counted since it was created. estimates lists the figures that are estimated; it is
empty if all were counted.';

create type pgqueue.finding as (
    severity text,
    queue_name text,
    finding text,
    detail text,
    repair text
);
comment on type pgqueue.finding is
'A problem that doctor found: its severity (error, warning or info), the queue, the name and detail of the finding, and
the statement that repairs it.';

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
'A stream, as stream_open and list_streams return it. acked_seq and acked_token name the batch acknowledged last. The
columns from claim_token to claimed_until describe the open batch and are null if no batch is open. last_id is the
highest message id given out so far. on_ack is archive, delete, or null if the setting of the queue applies.';

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
'A batch that is reserved for a stream, identified by seq and claim_token. lost lists the ids whose messages are no
longer reserved for the stream.';

create type pgqueue.subscription as (
    topic text,
    queue_name text,
    subscribed_at timestamptz
);
comment on type pgqueue.subscription is
'A subscription: the queue receives a copy of each message published to the topic, or to the topics that the pattern
matches.';

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
'A schedule: the queue gets a message at each tick of cron in time_zone. next_at is the next tick, null if the schedule
is paused or has stopped. last_at is the last tick whose message a claim has taken.';

create type pgqueue.compaction as (
    table_name text,
    outcome text,
    rows_kept bigint,
    bytes_before bigint,
    bytes_after bigint
);
comment on type pgqueue.compaction is
'What compact_queue did with one table. outcome is compacted or the reason why it was left alone. The sizes include
indexes and the toast table.';

create type pgqueue.access as (
    role_name name,
    access text,
    queue_name text
);
comment on type pgqueue.access is
'The access of a role to all queues (queue_name is null), to one, or to those of a pattern, as list_access returns it.';

-- The names of queues in the arguments of the verbs. PostgreSQL evaluates the check of a domain with the rights of the
-- role that calls, before the security definer function runs. access.sql adds the checks. No role has USAGE on the
-- domains, so no role can store a value that was checked for another.
create domain pgqueue.queue_of_producer as text;
comment on domain pgqueue.queue_of_producer is
'The name of a queue that the caller has producer access to.';
create domain pgqueue.queue_of_consumer as text;
comment on domain pgqueue.queue_of_consumer is
'The name of a queue that the caller has consumer access to.';
create domain pgqueue.queue_of_admin as text;
comment on domain pgqueue.queue_of_admin is
'The name of a queue that the caller has admin access to.';
create domain pgqueue.queue_of_transport as text;
comment on domain pgqueue.queue_of_transport is
'The name of a queue that the caller has transport access to.';
create domain pgqueue.queue_of_consumer_or_admin as text;
comment on domain pgqueue.queue_of_consumer_or_admin is
'The name of a queue that the caller has consumer or admin access to.';
create domain pgqueue.queue_of_producer_or_admin as text;
comment on domain pgqueue.queue_of_producer_or_admin is
'The name of a queue that the caller has producer or admin access to.';
create domain pgqueue.queue_of_admin_or_reader as text;
comment on domain pgqueue.queue_of_admin_or_reader is
'The name of a queue that the caller has admin or reader access to.';
create domain pgqueue.queue_of_consumer_admin_or_reader as text;
comment on domain pgqueue.queue_of_consumer_admin_or_reader is
'The name of a queue that the caller has consumer, admin or reader access to.';
create domain pgqueue.queue_of_producer_admin_or_raw as text;
comment on domain pgqueue.queue_of_producer_admin_or_raw is
'The name of a queue that the caller has producer, admin or raw access to.';
create domain pgqueue.queue_of_any_access as text;
comment on domain pgqueue.queue_of_any_access is
'The name of a queue that the caller has any access but transport to.';
create domain pgqueue.new_queue_of_admin as text;
comment on domain pgqueue.new_queue_of_admin is
'The name of a queue to create: the caller has admin access to queues of such names.';

create domain pgqueue.caller as name
constraint caller_is_current_user check (coalesce(value = current_user, false));
comment on domain pgqueue.caller is
'The role that calls. A verb that works on several queues has it as its last argument, with current_user as default. No
other value is accepted, as PostgreSQL evaluates the check with the rights of the caller.';
