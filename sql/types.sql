-- What the verbs return. Attributes are API: new ones go last.

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
    expires_after_idle interval
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
'A message, as claim, receive and browse return it; attempt_count includes the attempt in progress.';

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
'A row of exchange: a claimed message, or, where lost is true, the id of an acknowledgement that came too late.';

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
'A dead letter: the message, its last error, and why and when it died.';

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
'A message that was acknowledged: when it was sent, claimed and finished, and the attempt that it took; claimed_at is null where it was received.';

create type pgqueue.archive_change as (
    day date,
    change text
);
comment on type pgqueue.archive_change is
'What maintain_archive did with a day (UTC) of the archive: made, emptied, dropped, or busy where it gave way.';

create type pgqueue.queue_stats as (
    queue_name text,
    ready_messages bigint,
    inflight_messages bigint,
    scheduled_messages bigint,
    dead_messages bigint,
    oldest_age_seconds double precision,
    paused boolean,
    estimates text[]
);
comment on type pgqueue.queue_stats is
'The depth of a queue. estimates names the figures that are estimated; empty where all were counted.';

create type pgqueue.finding as (
    severity text,
    queue_name text,
    finding text,
    detail text,
    repair text
);
comment on type pgqueue.finding is
'Something that doctor found: how bad (error, warning, info), where, what, and the statement that repairs it.';

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
'A stream, as stream_open and list_streams return it: the batch it acknowledged last, by number and token, and the open one, whose columns from claim_token to claimed_until are null where there is none. last_id is the highest message id given out so far. on_ack is archive, delete, or null where that is as the queue says.';

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
'A batch that is reserved for a stream, named by seq and claim_token. lost has the ids that were found to be no longer the stream''s.';

create type pgqueue.subscription as (
    topic text,
    queue_name text,
    subscribed_at timestamptz
);
comment on type pgqueue.subscription is
'That a queue has a copy of what is published to a topic, or to the topics that a pattern matches.';
