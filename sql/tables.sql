-- Where messages live. The column names are a public contract: raw SQL on these tables is a
-- supported way to send, claim and settle. New columns go last.

create sequence pgqueue.queue_id;
comment on sequence pgqueue.queue_id is 'Numbers queues, to name the registers and partitions of each.';

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
    constraint queues_pkey primary key (name),
    constraint queues_queue_id_is_unique unique (queue_id),
    constraint queues_name_is_plain check (name ~ '^[a-z0-9_-]{1,128}$'),
    constraint queues_visibility_timeout_is_bounded
    check (visibility_timeout between '1 s' and '43200 s'),
    constraint queues_max_attempts_is_bounded check (max_attempts between 1 and 100),
    constraint queues_max_payload_bytes_is_bounded
    check (max_payload_bytes between 1 and 104857600),
    constraint queues_backoff_is_bounded check (
        backoff_base between '0 s' and '30 days'
        and backoff_max between '0 s' and '30 days'
        and backoff_factor between 1 and 100
        and backoff_jitter between 0 and 1
    ),
    constraint queues_archive_for_is_bounded check (archive_for between '1 day' and '3652.5 days'),
    constraint queues_expires_after_idle_is_bounded check (expires_after_idle between '1 s' and '3652.5 days')
);
comment on table pgqueue.queues is
'One row a queue. Rarely written, so that claims read one clean row; what changes with every claim is kept in registers.';
comment on column pgqueue.queues.archive_for is
'How long at least what was acknowledged stays in archived_messages; null: it does not get there.';
comment on column pgqueue.queues.expires_after_idle is
'How long the queue stays though nobody uses it and it holds no message; null: for good.';
comment on column pgqueue.queues.fresh_from_id is
'Register: no message below this id was never claimed, but for late commits. A hint.';
comment on column pgqueue.queues.sweep_resume_id is
'Register: the id from which the next sweep goes on. A hint.';
comment on column pgqueue.queues.next_sweep_at is
'Register: when the next sweep is due, in microseconds since 1970. A hint.';
comment on column pgqueue.queues.first_due_at is
'Register: when the first scheduled message is due, in microseconds since 1970. A hint.';
comment on column pgqueue.queues.waiting_until is
'Register: until when a consumer waits for a notification, in microseconds since 1970. A hint.';

create sequence pgqueue.message_id;
comment on sequence pgqueue.message_id is
'The ids of all messages of all queues. Its cache must stay 1: the sweep relies on ids being taken inside the inserting statement.';

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
    transport_seq bigint
) partition by list (queue_name);
comment on table pgqueue.messages is
'Messages that are ready (visible_at has come) or in flight (claimed, visible_at is the end of the claim). A message has a payload or a body.';
comment on column pgqueue.messages.claimed_attempt is
'The attempt_count that claim_token was given for: a later claim by plain SQL, which sets no token, thereby ends the token''s power.';
comment on column pgqueue.messages.transport_headers is
'The headers as a transport wrote them, or reads them; null where none does.';
comment on column pgqueue.messages.transport_id is
'The id of the message in the relation that expose_transport made; null where there is none.';
comment on column pgqueue.messages.transport_seq is
'Its place in that relation. Of its own, as ids of all queues are one sequence and may lie further apart than a transport counts.';
comment on column pgqueue.messages.claimed_at is
'When the claim was made that claimed_attempt speaks of; an extension leaves it as it is.';

-- The primary key is the only index, and nothing that a claim writes is in it: claims are HOT updates. A second
-- index, even a partial one that holds no row, costs every insert and every claim 2.5 microseconds of about 10
-- and 35; two check constraints, compiled anew by every statement, cost as much. So there are none: the verbs
-- check what they write, and an index on expires_at is for who needs it (doctor says when, and how).
-- The key is declared on each partition, not on the parent: pg_dump could not restore a dedicated partition
-- whose parent comes from the extension with a key.
-- fillfactor 50 leaves room for the claimed versions even while no dead version can be pruned: for those of all large
-- messages, and of three out of four of the smallest, which grow by a third when they are claimed.
-- Vacuum and analyze start by count, as the size of a queue says nothing about its churn, and vacuum never truncates,
-- as that ends with an exclusive lock.
create table pgqueue.messages_shared partition of pgqueue.messages (
    constraint messages_shared_pkey primary key (queue_name, id)
) default with (
    fillfactor = 50,
    autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_insert_threshold = 1000000,
    autovacuum_vacuum_insert_scale_factor = 0,
    autovacuum_analyze_threshold = 10000,
    vacuum_truncate = false
);
comment on table pgqueue.messages_shared is
'The messages of all queues that have no partition of their own.';

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
) with (
    autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_scale_factor = 0,
    vacuum_truncate = false
);
comment on table pgqueue.scheduled_messages is
'Messages that wait for a moment: delayed when sent, sent back with a delay, or redriven (due at once).';
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
comment on table pgqueue.dead_messages is
'Messages that were given up, with the reason, the last error and the moment. Those that were not due when their queue was dropped (queue_dropped) outlive it, under its name.';

-- A day of UTC is a partition, made days ahead. There is no default partition: attaching a day beside one locks it
-- against everybody who reads the archive, for as long as the transaction lasts, and fails the acknowledgement that
-- is just on its way there. What meets no partition goes to unfiled_messages instead.
-- No unique key: that somebody put a message back under its old id must not keep it from being acknowledged. The
-- index is declared on each partition, not on the parent: pg_dump could not restore a partition whose parent comes
-- from the extension with an index.
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
'Messages that were acknowledged, of queues that have archive_for. A partition a day (UTC), dropped as a whole.';
-- Without a key, and yet published with all that changes: so it is with every table here that has none.
alter table pgqueue.archived_messages replica identity full;
comment on column pgqueue.archived_messages.claimed_at is
'When the claim that was acknowledged was made; null for a receive, which takes and finishes at once.';
comment on column pgqueue.archived_messages.finished_at is
'When it was acknowledged, by the clock, before the commit.';

create table pgqueue.unfiled_messages (like pgqueue.archived_messages including all);
alter table pgqueue.unfiled_messages replica identity full;
comment on table pgqueue.unfiled_messages is
'Archived messages of days that had no partition, so that no acknowledgement fails for want of one: sweeps and maintain_archive file them.';

create sequence pgqueue.next_housekeeping_at;
comment on sequence pgqueue.next_housekeeping_at is
'Register: when a sweep next calls the housekeeping of the rooms, in microseconds since 1970. A hint, one for all queues.';

create table pgqueue.archive_promises (
    queue_name text collate "C" not null,
    archive_for interval not null,
    ends_at timestamptz not null
);
alter table pgqueue.archive_promises replica identity full;
comment on table pgqueue.archive_promises is
'Queues that were dropped, or archive no longer: until ends_at, what they archived is kept as long as they said.';

create table pgqueue.requeued_messages (
    queue_name text collate "C" not null,
    check_at timestamptz not null,
    id bigint not null
);
create index requeued_messages_check_at on pgqueue.requeued_messages (queue_name, check_at, id);
alter table pgqueue.requeued_messages replica identity full;
comment on table pgqueue.requeued_messages is
'Scheduled messages that came due went back to messages under their old id, which the sweep may have left behind for good: where it looks beside its walk.';

create table pgqueue.sweep_state (
    queue_name text collate "C" not null,
    vacant_ids int8multirange not null default '{(,1)}',
    settled_id bigint not null default 0,
    bound_id bigint not null default 0,
    writers text[] not null default '{}',
    bound_at timestamptz not null default '1970-01-01 00:00+00',
    recorded_at timestamptz not null default '1970-01-01 00:00+00',
    constraint sweep_state_pkey primary key (queue_name)
) with (fillfactor = 10, autovacuum_vacuum_threshold = 100, autovacuum_vacuum_scale_factor = 0);
comment on table pgqueue.sweep_state is
'What sweeps have learnt about each queue; written at most once a second. A row, not a register: it must be dumped with the messages it speaks of.';
comment on column pgqueue.sweep_state.vacant_ids is
'Ids at which no message lives and none will appear but by way of requeued_messages: a sweep skips them.';
comment on column pgqueue.sweep_state.settled_id is
'No transaction that took an id up to this one is running any more.';
comment on column pgqueue.sweep_state.bound_id is
'Becomes settled_id once none of writers runs any more: the highest id taken before they were listed.';

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
    constraint streams_pkey primary key (queue_name, stream_name),
    constraint streams_stream_name_is_plain check (stream_name ~ '^[a-z0-9_-]{1,128}$'),
    constraint streams_batch_is_whole check (
        num_nulls(claim_token, ids, left_out, partitions, visibility_timeout, claimed_at, claimed_until, replays)
        in (0, 8)
    ),
    constraint streams_on_ack_is_known check (on_ack in ('archive', 'delete'))
) with (fillfactor = 50, autovacuum_vacuum_threshold = 100, autovacuum_vacuum_scale_factor = 0);
comment on table pgqueue.streams is
'One row a stream: how far it has acknowledged, and the batch that it has claimed since, of which there is one at most.';
comment on column pgqueue.streams.epoch is
'Who opened the stream last has this number; who has a lower one is fenced.';
comment on column pgqueue.streams.acked_seq is
'The batch acknowledged last; the open one, if any, is the next. 0 before the first.';
comment on column pgqueue.streams.ids is
'The messages of the open batch, in order. Never changed, as the partitions are cut from it.';
comment on column pgqueue.streams.left_out is
'Those of ids that are no longer part of the batch: skipped, or lost and given up.';
comment on column pgqueue.streams.begun_epoch is
'The epoch in which the open batch was begun last; null until it is.';

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
'Who stages rows of a run, one row an attempt at a partition. Unlogged, as what it speaks of: a crash of the server empties both.';
comment on column pgqueue.staged_attempts.token is
'Known only to whoever stages: with it one adds rows, and names the attempt that won.';

-- Some hundred messages a row, as arrays: a row each would cost more to store, to read and to delete than the message
-- itself. What is read once is not compressed.
create unlogged table pgqueue.staged_messages (
    token uuid not null,
    row_number int not null,
    payloads jsonb[],
    bodies bytea[],
    headers jsonb[],
    message_ids uuid[],
    delays interval[],
    expires_in interval[],
    messages int not null,
    largest_bytes int not null,
    constraint staged_messages_pkey primary key (token, row_number)
);
alter table pgqueue.staged_messages alter column payloads set storage external;
alter table pgqueue.staged_messages alter column bodies set storage external;
alter table pgqueue.staged_messages alter column headers set storage external;
comment on table pgqueue.staged_messages is
'Messages that wait for sink_commit, in arrays of equal length, of which those that say nothing are null. Nobody can claim them.';
comment on column pgqueue.staged_messages.row_number is
'The number of the first message of the row, counted from 1 under the token.';
comment on column pgqueue.staged_messages.messages is
'How many there are in the row. This and largest_bytes are counted when it is staged, by the writers, of which there are many, and not by the one that commits.';
comment on column pgqueue.staged_messages.largest_bytes is
'The size of the largest payload, as JSON text, or body.';

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
comment on table pgqueue.sink_commits is
'The ledger of sink_commit: what is in it is not sent again. A run that has no app_id goes by its own id.';
comment on column pgqueue.sink_commits.forgotten_version is
'Of this app_id, versions up to this one were swept from the ledger: whether they were committed is not known.';

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
'Which queue has a copy of what is published to which topic, or to the topics that a pattern matches.';
comment on column pgqueue.subscriptions.endpoint is
'Whose subscription it is: an endpoint of a transport, or, with pgqueue: before its name, the queue that subscribe was called for.';
comment on column pgqueue.subscriptions.queue_address is
'The queue as a transport addresses it.';

create table pgqueue.transports (
    queue_name text collate "C" not null,
    relation regclass not null,
    seq_register regclass not null,
    head bigint not null default 1,
    next_at timestamptz not null default '-infinity',
    settled_seq bigint not null default 0,
    bound_seq bigint not null default 0,
    writers text[] not null default '{}'
);
alter table pgqueue.transports replica identity full;
comment on table pgqueue.transports is
'The relations that expose_transport made, one row each in a table of its own, which is planned and read faster than one row of many. Written at most once a second, by who looks at a relation.';
comment on column pgqueue.transports.seq_register is
'The sequence that transport_seq is taken from.';
comment on column pgqueue.transports.head is
'No message has a lower transport_seq, nor will one: there the statements of the transport begin to read.';
comment on column pgqueue.transports.next_at is
'When advance_transport is due again.';
comment on column pgqueue.transports.settled_seq is
'No transaction that took a transport_seq up to this one is running any more; bound_seq and writers as in sweep_state.';
