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
