-- Queues for a while, such as one for the replies to each instance of a service: made when the instance starts, and
-- dropped when nobody has come by for long. There is no daemon: whoever makes a queue drops those that are over.

create or replace function pgqueue._last_used_at(q pgqueue.queues, at timestamptz)
returns timestamptz
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    swept_at timestamptz := pgqueue._from_micros(pg_sequence_last_value(q.next_sweep_at));
begin
    -- Where a claim found all it wanted, or never was, the register says nothing; nor does one from a clock that was
    -- wrong. It is taken for used now, once: the next sweep is due at once, as it was.
    if swept_at not between timestamptz '1970-01-02 00:00+00' and at + interval '1 min' then
        swept_at := at;
        perform setval(q.next_sweep_at, pgqueue._to_micros(at));
    end if;
    return greatest(
        q.created_at, q.updated_at, swept_at, least(pgqueue._from_micros(coalesce(pg_sequence_last_value(q.waiting_until), 1)), at),
        (select t.next_at from pgqueue.transports t where t.queue_name = q.name and t.next_at <= at + interval '1 min'));
end;
$$;
comment on function pgqueue._last_used_at(pgqueue.queues, timestamptz) is
'When somebody last claimed, received, or waited for a message of the queue, by its registers: to five seconds.';

create or replace function pgqueue._is_queue_empty(q pgqueue.queues)
returns boolean
language sql stable
as $$
    select not exists (select from pgqueue.messages m where m.queue_name = q.name)
        and not exists (select from pgqueue.scheduled_messages s where s.queue_name = q.name)
        and not exists (select from pgqueue.dead_messages d where d.queue_name = q.name)
$$;
comment on function pgqueue._is_queue_empty(pgqueue.queues) is
'Whether a queue holds no message: none ready, in flight, scheduled or dead.';

create or replace function pgqueue._has_exclusive_lock_on_messages()
returns boolean
language sql volatile
as $$
    select exists (
        select from pg_catalog.pg_locks l
        where l.pid = pg_catalog.pg_backend_pid() and l.relation = 'pgqueue.messages'::regclass
            and l.mode = 'AccessExclusiveLock' and l.granted
    )
$$;
comment on function pgqueue._has_exclusive_lock_on_messages() is
'Whether the transaction keeps everybody else from messages, as one does that made a dedicated table.';

create or replace function pgqueue._drop_if_idle(q pgqueue.queues, at timestamptz, patient boolean)
returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set lock_timeout = '100 ms'
as $$
begin
    -- Everybody who sends or claims waits for the end of who drops a table, which may be far off.
    if q.dedicated and not patient and not pgqueue._has_exclusive_lock_on_messages() then
        return false;
    end if;
    -- Whoever uses it keeps it. Nobody is waited for, and nobody waits but for a queue that is gone.
    if not pg_try_advisory_xact_lock(pgqueue._lock_key(q.name)) then
        return false;
    end if;
    select queues.* into q from pgqueue.queues where queues.name = q.name and queues.queue_id = q.queue_id;
    if not found or not pgqueue._is_queue_empty(q)
        or pgqueue._last_used_at(q, at) > pgqueue._add_interval(at, -q.expires_after_idle)
    then
        -- Not by return: only an error gives the lock back before the transaction ends, which may take long.
        perform pgqueue._raise_queue_busy(q.name, 'drop_idle_queues');
    end if;
    perform pgqueue._drop_queue(q);
    return true;
exception
    when lock_not_available or dependent_objects_still_exist or sqlstate 'PQ004' then
        return false;
end;
$$;
comment on function pgqueue._drop_if_idle(pgqueue.queues, timestamptz, boolean) is
'Drops a queue that nobody has used for as long as it said; false if it stays. Only who is patient, or holds messages anyway, drops a dedicated table.';

create or replace function pgqueue._drop_idle_queues(max_queues int, patient boolean)
returns setof text
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    at constant timestamptz := pgqueue._now();
    dropped int := 0;
    q pgqueue.queues;
begin
    -- A snapshot that is older than the lock does not show what was sent in between.
    if pgqueue._has_fixed_snapshot() then
        return;
    end if;
    for q in
        select queues.* from pgqueue.queues
        where queues.expires_after_idle is not null
            and queues.updated_at <= pgqueue._add_interval(at, -queues.expires_after_idle)
        order by queues.name
    loop
        exit when dropped >= max_queues;
        if pgqueue._drop_if_idle(q, at, patient) then
            dropped := dropped + 1;
            return next q.name;
        end if;
    end loop;
end;
$$;
comment on function pgqueue._drop_idle_queues(int, boolean) is
'Drops up to so many queues that nobody has used for as long as they said, and returns their names.';

create or replace function pgqueue.drop_idle_queues()
returns setof text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    -- Each takes some ten locks, and thousands of queues would fill the lock table.
    return query select n from pgqueue._drop_idle_queues(100, true) as n;
end;
$$;
comment on function pgqueue.drop_idle_queues() is
'Drops the queues that have expires_after_idle, hold no message, dead ones included, and that nobody has claimed or received from, or waited for, for so long, 100 at most, and returns their names: call it until it returns none. A queue in use by an open transaction stays, and in repeatable read all do, as what others sent cannot be seen there. create_queue does the same, for ten queues at most, where it is a transaction of its own, and so does expose_transport; dedicated queues go with the next that becomes dedicated: there is no need to call this, unless to be rid of them at once.';

create or replace function pgqueue._on_queue_created_idle(q pgqueue.queues)
returns void
language sql volatile
as $$
    -- A transaction that goes on for long would hold the locks of what it dropped.
    select case when pgqueue._is_first_statement() then (select count(*) from pgqueue._drop_idle_queues(10, false)) end
$$;
comment on function pgqueue._on_queue_created_idle(pgqueue.queues) is
'Drops up to ten idle queues when a queue is created.';

create or replace function pgqueue._on_queue_altered_idle(before pgqueue.queues, after pgqueue.queues)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    -- This transaction holds the lock that dropping a dedicated queue needs.
    if after.dedicated and not before.dedicated and pgqueue._is_first_statement() then
        perform pgqueue._drop_idle_queues(10, false);
    end if;
end;
$$;
comment on function pgqueue._on_queue_altered_idle(pgqueue.queues, pgqueue.queues) is
'Drops up to ten idle queues when a queue becomes dedicated.';
