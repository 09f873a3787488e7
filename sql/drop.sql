-- Removes queues and the messages of queues.

create or replace function pgqueue._remove_messages(q pgqueue.queues, dropping boolean) returns bigint
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

create or replace function pgqueue.purge_queue(queue_name pgqueue.queue_of_admin) returns bigint
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

create or replace function pgqueue._drop_queue(q pgqueue.queues) returns bigint
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

create or replace function pgqueue.drop_queue(queue_name pgqueue.queue_of_admin) returns bigint
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
