-- Removes messages. A processed message is deleted or, if its queue has archive_for, moved to the archive; a failed one
-- becomes a dead letter. Archiving on acknowledgement is part of the core: every acknowledgement passes here, and an
-- event would add a call to each.

-- Locks the queue, and returns whether it keeps no archive. It is one function, because an acknowledgement prepares
-- each expression that it evaluates.
create or replace function pgqueue._lock_queue_without_archive(queue_name text) returns boolean
language sql volatile
as $$ select pgqueue._lock_queue(queue_name) and to_regclass(pgqueue._sequence_name('archives', queue_name)) is null $$;

create or replace function pgqueue._utc_day(moment timestamptz) returns date
language sql immutable parallel safe as $$ select (moment at time zone 'UTC')::date $$;

-- The finished_at of a message that is acknowledged now: not before the confirmed time of the archive. Otherwise
-- messages acknowledged while the clock was behind would be removed with the day that it showed.
-- In PL/pgSQL, which keeps its plan: see _level_registers.
create or replace function pgqueue._finish_time() returns timestamptz
language plpgsql volatile as $$
begin
    return greatest(pgqueue._now(), (select c.confirmed_at from pgqueue.archive_clock c));
end;
$$;

create or replace function pgqueue._day_partition_name(day date) returns text
language sql stable parallel safe as $$ select 'archived_messages_' || to_char(day, 'YYYYMMDD') $$;

-- Null or false if not. Reads the current catalog, which can be newer than the snapshot.
create or replace function pgqueue._has_day_partition(day date) returns boolean
language sql volatile as $$
    select pg_partition_root(to_regclass('pgqueue.' || pgqueue._day_partition_name(day))) = 'pgqueue.archived_messages'::regclass
$$;

-- The messages of the claim or, if claim_token is null, all, which the caller has locked.
create or replace function pgqueue._delete_messages(
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
create or replace function pgqueue._ack_to_archive(queue_name text, ids bigint[], claim_token uuid) returns bigint[]
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
create or replace function pgqueue._moved_bytes(payload jsonb, body bytea, headers jsonb, transport_headers text)
returns bigint language sql stable parallel safe as $$
    select 1024::bigint + coalesce(pg_column_size(payload), 0) + coalesce(pg_column_size(body), 0)
        + coalesce(pg_column_size(headers), 0) + coalesce(pg_column_size(transport_headers), 0)
$$;

-- The next slice of messages, of at most 128 kB and one message, from a cursor with the columns id, place and bytes.
-- Fetching locks one row at a time, so a cursor with a locking clause locks no more than is returned.
create or replace function pgqueue._fetch_slice(source refcursor, out ids bigint[], out places tid[])
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

create or replace function pgqueue._as_message(s pgqueue.scheduled_messages) returns pgqueue.messages
language sql immutable parallel safe as $$
    select row(
        s.id, s.queue_name, s.enqueued_at, s.due_at, s.attempt_count, s.max_attempts, null::int, null::uuid,
        s.expires_at, s.message_id, s.payload, s.body, s.headers, s.claimed_by, s.last_error, null::timestamptz,
        s.transport_headers, null::uuid, null::bigint, null::bigint
    )::pgqueue.messages
$$;

create or replace function pgqueue._as_scheduled(m pgqueue.messages, due_at timestamptz, attempt_count int)
returns pgqueue.scheduled_messages language sql immutable parallel safe as $$
    select row(
        m.id, m.queue_name, due_at, m.enqueued_at, attempt_count, m.max_attempts, m.expires_at, m.message_id,
        m.payload, m.body, m.headers, m.claimed_by, m.last_error, m.transport_headers
    )::pgqueue.scheduled_messages
$$;

create or replace function pgqueue._as_dead_letter(m pgqueue.messages, at timestamptz, reason text)
returns pgqueue.dead_messages language sql immutable parallel safe as $$
    select row(
        m.id, m.queue_name, m.enqueued_at, at, m.attempt_count, m.max_attempts, m.expires_at, m.message_id,
        m.payload, m.body, m.headers, m.claimed_by, m.last_error, m.transport_headers,
        coalesce(reason, case when m.attempt_count >= m.max_attempts then 'attempts_exhausted' else 'expired' end)
    )::pgqueue.dead_messages
$$;

create or replace function pgqueue._keeps_dead_letter(q pgqueue.queues, m pgqueue.messages) returns boolean
language sql immutable parallel safe
as $$ select case when m.attempt_count >= m.max_attempts then q.dlq_enabled else q.dead_letter_expired end $$;

-- The message was deleted from its table. Functions that remove many messages contain the same insert, which takes half
-- of the time.
create or replace function pgqueue._add_dead_letter(m pgqueue.messages, at timestamptz, reason text) returns void
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
