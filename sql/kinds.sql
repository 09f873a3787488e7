-- The kinds of queues. The queues of a kind share a partition of messages, which has the indexes that they need. A
-- dedicated queue has a partition of its own.

create or replace function pgqueue._shared_table(q pgqueue.queues) returns text
language sql stable as $$
    select 'pgqueue.messages_' || case
        when q.group_limit is not null then 'grouped'
        when q.priorities and q.max_in_flight is not null then 'prioritized_limited'
        when q.priorities then 'prioritized'
        when q.max_in_flight is not null then 'limited'
        else 'shared'
    end
$$;

create or replace function pgqueue._partition_of(q pgqueue.queues) returns regclass
language sql stable as $$
    select (case when q.dedicated then format('pgqueue.messages_%s', q.queue_id) else pgqueue._shared_table(q) end)::regclass
$$;

-- Creates a partition for one queue, with the indexes of the shared table. Its name contains the number of the queue,
-- as the name of a queue can be longer than an identifier. By its comment create_queue finds the table after a restore
-- without rows.
create or replace function pgqueue._create_partition(q pgqueue.queues) returns void
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
create or replace function pgqueue._truncate_or_drop_partition(q pgqueue.queues, dropping boolean) returns bigint
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
create or replace function pgqueue._level_position(headers jsonb, place bigint) returns bigint
language sql immutable parallel safe as $$
    select
        ((9 - coalesce(array_position('{1,2,3,4,5,6,7,8,9}'::text[], headers ->> 'pgqueue.priority'), 0))::bigint << 59)
        | (place & 576460752303423487)
$$;

create or replace function pgqueue._level_position(m pgqueue.messages) returns bigint
language sql immutable parallel safe
as $$ select pgqueue._level_position(m.headers, coalesce(m.transport_seq, m.id)) $$;

create or replace function pgqueue._level_start(level_position bigint) returns bigint
language sql immutable parallel safe as $$ select (level_position >> 59) << 59 $$;

create or replace function pgqueue._is_in_level(m pgqueue.messages, kind bigint, name text, from_position bigint)
returns boolean language sql immutable parallel safe as $$
    select pgqueue._is_in_queue(m, kind, name)
        and pgqueue._level_position(m) >= from_position
        and pgqueue._level_position(m) < pgqueue._level_start(from_position) + 576460752303423488
$$;

-- Before PostgreSQL 18 a function in SQL that is not inlined makes its plan in each call, one in PL/pgSQL keeps it.
create or replace function pgqueue._level_registers(q pgqueue.queues) returns regclass[]
language plpgsql stable as $$
begin
    return array(
        select format('pgqueue.queue_%s_level_%s', q.queue_id, 10 - n)::regclass from generate_series(1, 10) as n);
end;
$$;

create or replace function pgqueue._level_floors(registers regclass[]) returns bigint[]
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
create or replace function pgqueue._passed_levels(q pgqueue.queues, first_id bigint) returns int8multirange
language plpgsql volatile as $$
begin
    return (
        select coalesce(range_agg(int8range(pgqueue._level_start(f) + first_id, f)), '{}')
        from unnest(pgqueue._level_floors(pgqueue._level_registers(q))) as f
        where pgqueue._level_start(f) + first_id < f
    );
end;
$$;

create or replace function pgqueue._change_kind(q pgqueue.queues) returns pgqueue.queues
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
create or replace function pgqueue._adopt_messages(q pgqueue.queues) returns boolean
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
