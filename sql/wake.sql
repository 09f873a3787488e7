-- Lets a consumer wait without polling. It listens on channel, calls prepare_wait, claims once more, and sleeps. Until
-- its timeout an enqueue notifies; if no consumer waits, an enqueue sends no notification.

create or replace function pgqueue.wake(queue_name pgqueue.queue_of_producer_admin_or_raw) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    perform pg_notify(pgqueue.channel((pgqueue._get_locked_queue(queue_name)).name), '');
end;
$$;
comment on function pgqueue.wake is
'Notifies waiting consumers when the transaction commits. Call it after an insert into pgqueue.messages by plain SQL.
Raises PQ001.';

create or replace function pgqueue._visible_times(q pgqueue.queues, from_id bigint, below_id bigint)
returns setof timestamptz language plpgsql stable as $$
begin
    if q.kind is not null then
        return query
        select m.visible_at from pgqueue.messages m
        where (m.kind = q.kind or m.kind is null) and m.queue_name = q.name and m.id >= from_id and m.id < below_id
        order by m.id limit 1000;
    else
        return query
        select m.visible_at from pgqueue.messages_shared m
        where m.queue_name = q.name and m.id >= from_id and m.id < below_id
        order by m.id limit 1000;
    end if;
end;
$$;

create or replace function pgqueue.next_due_at(queue_name pgqueue.queue_of_any_access) returns timestamptz
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_unlocked_queue(queue_name);
    at constant timestamptz := pgqueue._now();
    pages_before constant bigint := pgqueue._pages_read(q);
    living bigint;
    due_at timestamptz;
begin
    -- The last one locks the table of the messages before the next statement takes its snapshot, as in
    -- _record_vacant_ids.
    perform pgqueue._require_untruncated_messages(), pgqueue._record_if_old(q, true), pgqueue._visible_at_of(q, 0);
    select
        least(
            (
                select s.due_at from pgqueue.scheduled_messages s
                where s.queue_name = q.name and s.due_at >= (pgqueue._sweep_state_of(q.name, at)).first_due_at
                order by s.due_at limit 1
            ),
            requeued.due_at, others.due_at),
        requeued.living + others.living
    into due_at, living
    from
        (
            select min(m.visible_at) as due_at, count(m.visible_at) as living
            from (
                select r.id from pgqueue.requeued_messages r
                where r.queue_name = q.name and r.check_at >= (pgqueue._sweep_state_of(q.name, at)).first_check_at
                order by r.check_at limit 1000
            ) c
            cross join lateral (select pgqueue._visible_at_of(q, c.id) as visible_at offset 0) m
        ) requeued,
        (
            select min(m.visible_at) as due_at, count(*) as living
            from (
                select v as visible_at
                from pgqueue._possible_ranges(q.name, 1, 9223372036854775807) as r
                cross join lateral pgqueue._visible_times(q, lower(r), upper(r)) as v
                limit 1000
            ) m
        ) others;
    if exists (
        select from pgqueue.queues s
        cross join lateral (
            select from pgqueue.dead_messages d
            where d.queue_name = s.name and d.id >= (pgqueue._sweep_state_of(s.name, '-infinity')).first_id
            limit 1
        ) d
        where s.dead_letter_to = q.name
    ) then
        -- The next sweep takes them.
        due_at := least(due_at, at);
    end if;
    if pgqueue._pages_read(q) - pages_before > 50 + 2 * living then
        perform pgqueue._record_if_old(q);
    end if;
    -- While a session drops the queue, reading the register of rate_limit would wait for it.
    if q.rate_limit is not null and pgqueue._try_lock_existing_queue(q) then
        select case when due_at is not null
            then greatest(due_at, pgqueue._from_micros(b.used_until + (b.period + q.rate_limit - 1) / q.rate_limit)) end
        into due_at
        from pgqueue._read_bucket(q, pgqueue._to_micros(at)) b;
    end if;
    return case when due_at is not null then greatest(due_at, pgqueue._in_flight_full_until(q, at)) end;
end;
$$;
comment on function pgqueue.next_due_at is
'Returns when the next message becomes ready, because a delay, a backoff or a claim ends. The time is in the past if
messages are ready, and null if nothing is pending. In a queue with group_limit it is also in the past while a message
waits for others of its group, as in stats; prepare_wait returns when to look again. It is the present while a queue
whose dead_letter_to is this one has dead letters. If a limit of the queue holds, it is the time at which the limit
allows the next message: when the next token of rate_limit comes, and with max_in_flight when the next claim ends, if no
message is settled before. Only the first 1,000 messages by id are checked for the ends of claims. Raises PQ001,
40001.';

create or replace function pgqueue.prepare_wait(queue_name pgqueue.queue_of_consumer, timeout interval default '60 s')
returns timestamptz language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    until timestamptz;
    due_at timestamptz;
begin
    perform pgqueue._require(
        pgqueue._is_interval_between(timeout, '0', '1 day'), 'timeout', timeout::text, 'an interval from 0 to 1 day');
    until := pgqueue._now() + timeout;
    perform setval(q.waiting_until, greatest(pgqueue._to_micros(until), pg_sequence_last_value(q.waiting_until)));
    -- A transaction that is sending now has read the register before this call, and will not notify.
    if exists (
        select from unnest(pgqueue._running_writers()) as w
        where w <> (select l.virtualtransaction from pg_locks l where l.pid = pg_backend_pid() limit 1)
    ) then
        until := least(until, pgqueue._now() + interval '1 s');
    end if;
    due_at := pgqueue.next_due_at(queue_name);
    if pgqueue._in_flight_full_until(q, pgqueue._now()) is not null then
        -- An acknowledgement, which frees a place, notifies no consumer.
        until := least(until, pgqueue._now() + interval '1 s');
    end if;
    if due_at is null or q.paused_at is not null then
        return until;
    end if;
    -- Messages that are due but could not be claimed are locked by other transactions. The pause keeps the consumer
    -- from retrying without a break. In a queue with groups they mostly wait for others of their groups, and an
    -- acknowledgement notifies no consumer.
    return least(until, greatest(
        due_at, pgqueue._now() + case when q.group_limit is null then interval '100 ms' else interval '1 s' end));
end;
$$;
comment on function pgqueue.prepare_wait is
'Announces that the caller listens on channel(queue_name) and will wait for up to timeout (0 to 1 day). Until then each
enqueue notifies. Returns the latest time at which to look for messages again. After this call and before the wait, look
once more: a message may have arrived in between. While other transactions are sending, or while
max_in_flight messages are in flight, the returned time is at most one second ahead: those transactions do not notify,
and neither does an acknowledgement. It is one second ahead if messages of a queue with group_limit are due, as they
mostly wait for others of their groups. Raises 22023, PQ001.';
