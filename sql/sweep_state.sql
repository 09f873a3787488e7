-- Records where a queue has no rows. A pinned horizon keeps dead index entries, so a scan that starts at the lowest key
-- reads an unbounded number of them. Scans start at the values recorded here instead.

-- The running transactions that have written to the messages, through the parent or directly to a partition; prepared
-- ones, too.
-- In PL/pgSQL, which keeps its plan: see _level_registers.
create or replace function pgqueue._running_writers() returns text[]
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
create or replace function pgqueue._first_possible_id(s pgqueue.sweep_state) returns bigint
language sql immutable parallel safe
-- The end of the first range. There is no subquery, so PostgreSQL can inline the function.
as $$
    select coalesce(
        lower(int8multirange(int8range(lower(s.vacant_ids), upper(s.vacant_ids))) - s.vacant_ids), upper(s.vacant_ids)
    )
$$;

create or replace function pgqueue._possible_ranges(queue_name text, from_id bigint, below_id bigint)
returns setof int8range
language sql stable as $$
    select r
    from unnest(
        int8multirange(int8range(from_id, greatest(from_id, below_id)))
        - coalesce((select s.vacant_ids from pgqueue.sweep_state s where s.queue_name = _possible_ranges.queue_name), '{}')
    ) as r
$$;

-- A recorded time; -infinity if it is in the future, as it was then recorded before the clock was set back. Inlined.
create or replace function pgqueue._discard_future_time(recorded timestamptz, at timestamptz) returns timestamptz
language sql immutable parallel safe as $$ select case when recorded <= at then recorded else '-infinity' end $$;

create or replace function pgqueue._sweep_state_of(queue_name text, at timestamptz) returns pgqueue.sweep_state
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

create or replace function pgqueue._next_span(span bigint) returns bigint
language sql immutable parallel safe
-- A wide step can take long, as each id in it can have dead rows. So steps grow slowly from 131,072 ids on. A gap of
-- 10^18 ids still takes less than three hundred steps. The cap prevents an overflow.
as $$ select least(span + case when span < 131072 then span else span / 8 end, 1152921504606846976) $$;

-- A statement on messages locks and starts up each partition. So sweeps read the messages of plain queues from
-- messages_shared. These functions are stable: their statements have the snapshot of the caller.

-- The ids of the first messages in a range, up to wanted, and those of the ready ones and of the spent ones among them.
-- Null if there are none. With by_level, the bounds and ids are positions of a queue with priorities.
create or replace function pgqueue._read_messages(
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
create or replace function pgqueue._living_ids(queue_name text, from_id bigint, below_id bigint, in_all_tables boolean)
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
create or replace function pgqueue._ids_between(
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

create or replace function pgqueue._visible_at_of(q pgqueue.queues, id bigint) returns timestamptz
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

create or replace function pgqueue._read_requeued(
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

create or replace function pgqueue._prune_requeued(q pgqueue.queues, gone tid[], up_to timestamptz) returns void
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

create or replace function pgqueue._record_first_keys(q pgqueue.queues, s pgqueue.sweep_state, at timestamptz)
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
create or replace function pgqueue._record_vacant_ids(q pgqueue.queues, at timestamptz, fresh_from_id bigint)
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
create or replace function pgqueue._pages_read(q pgqueue.queues) returns bigint
language sql volatile as $$
    select pg_stat_get_xact_blocks_fetched('pgqueue.scheduled_messages'::regclass)
        + pg_stat_get_xact_blocks_fetched('pgqueue.requeued_messages'::regclass)
        + pg_stat_get_xact_blocks_fetched(case
            when q.dedicated then to_regclass(format('pgqueue.messages_%s', q.queue_id)) else pgqueue._partition_of(q)
        end)
$$;

-- Records where the queue has no rows, unless it was recorded less than a second ago or, with if_behind, claims have
-- passed few ids since. A read-only transaction, as on a standby, records nothing.
create or replace function pgqueue._record_if_old(q pgqueue.queues, if_behind boolean default false) returns void
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
