-- Temporary queues, such as one for the replies to each instance of a service. A queue with expires_after_idle is
-- dropped when it is empty and was not used for that long. No daemon is needed: creating a queue drops idle ones.

create or replace function pgqueue._drop_idle_queues(
    max_queues int, may_block boolean, caller name default current_user
) returns setof text
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set lock_timeout = '100 ms' set jit = off
as $$
declare
    at constant timestamptz := pgqueue._now();
    dropped int := 0;
    q pgqueue.queues;
    swept_at timestamptz;
begin
    -- A snapshot that is older than the lock does not show messages that were sent in between.
    if pgqueue._has_fixed_snapshot() then
        return;
    end if;
    for q in
        select queues.* from pgqueue.queues
        where queues.expires_after_idle is not null
            and queues.updated_at <= pgqueue._add_interval(at, -queues.expires_after_idle)
            -- Dropping a dedicated table blocks all senders and consumers until this transaction ends.
            and (may_block or not queues.dedicated)
            and pgqueue._may_use(caller, queues.name, pgqueue._privileges_of('{admin}'))
        -- create_queue must not try thousands of queues that are in use. It tries some of them at random.
        order by case when may_block then queues.name end, random()
        limit case when not may_block then 100 end
    loop
        exit when dropped >= max_queues;
        begin
            -- A queue in use by another transaction stays: do not wait for the lock. It only blocks sessions that use
            -- this queue.
            continue when not pg_try_advisory_xact_lock(pgqueue._lock_key(q.name));
            select queues.* into q from pgqueue.queues where queues.name = q.name and queues.queue_id = q.queue_id;
            -- The register holds no usable time if no claim was ever made, if the last claim found all the messages it
            -- wanted, or if the clock was wrong. Then the queue counts as used now. Setting the register makes this
            -- happen only once, and the next sweep is still due at once.
            swept_at := pgqueue._from_micros(pg_sequence_last_value(q.next_sweep_at));
            if swept_at not between timestamptz '1970-01-02 00:00+00' and at + interval '1 min' then
                swept_at := at;
                perform setval(q.next_sweep_at, pgqueue._to_micros(at));
            end if;
            -- alter_queue can have ended the expiry, which makes this null. The statement locks the tables before it
            -- takes its snapshot: in an older one, a table that was compacted since is empty.
            if (
                pgqueue._add_interval(at, -q.expires_after_idle) >= greatest(
                    q.created_at, q.updated_at, swept_at,
                    least(pgqueue._from_micros(coalesce(pg_sequence_last_value(q.waiting_until), 1)), at),
                    (select t.next_at from pgqueue.transports t where t.queue_name = q.name and t.next_at <= at + interval '1 min'))
                and not exists (select from pgqueue.messages m where m.queue_name = q.name and m.id >= (pgqueue._sweep_state_of(q.name, '-infinity')).first_id)
                and not exists (select from pgqueue.scheduled_messages s where s.queue_name = q.name and s.id >= (pgqueue._sweep_state_of(q.name, '-infinity')).first_id)
                and not exists (select from pgqueue.dead_messages d where d.queue_name = q.name and d.id >= (pgqueue._sweep_state_of(q.name, '-infinity')).first_id)
            ) is not true then
                -- Only an error releases the lock before the transaction ends, which may take long.
                perform pgqueue._raise('queue_busy', q.name, 'drop_idle_queues');
            end if;
            perform pgqueue._drop_queue(q);
            dropped := dropped + 1;
            return next q.name;
        exception when lock_not_available or dependent_objects_still_exist or sqlstate 'PQ004' then
            null;
        end;
    end loop;
end;
$$;

create or replace function pgqueue.drop_idle_queues(caller pgqueue.caller default current_user) returns setof text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    -- Dropping a queue takes about ten locks. Thousands of queues would fill the lock table.
    return query select n from pgqueue._drop_idle_queues(100, true, caller) as n;
end;
$$;
comment on function pgqueue.drop_idle_queues is
'Drops at most 100 idle queues and returns their names; call it until it returns none. A queue is idle if it has
expires_after_idle, holds no message, including dead ones, and was not claimed from, received from or waited for during
that time. A queue that an open transaction uses stays. In repeatable read and serializable all queues stay, because
messages sent by other transactions may be invisible there. There is no need to call this, except to drop idle queues at
once: create_queue, in a transaction of its own, and expose_transport also drop up to ten idle queues, and dedicated
ones when a queue becomes dedicated.';

create or replace function pgqueue._on_queue_changed_idle(before pgqueue.queues, after pgqueue.queues) returns void
language plpgsql volatile as $$
begin
    -- Only in the first statement: a long transaction would hold the locks of the queues that it dropped.
    if (before.name is null or after.dedicated and not before.dedicated)
        -- A function cannot know whether its transaction commits at once. Without this guess, idle queues would go only
        -- where a scheduled job calls drop_idle_queues. The times are not compared for equality, as a driver sends a
        -- statement as several messages, each with a time of its own. If the same query begins a transaction or calls
        -- receive, the caller continues to work in it.
        and statement_timestamp() - transaction_timestamp() < interval '5 ms'
        and current_query() !~* e'(^|;)\\s*(begin|start)\\M|\\mreceive\\M'
    then
        perform pgqueue._drop_idle_queues(10, after.dedicated);
    end if;
end;
$$;
