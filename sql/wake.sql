-- Waiting without polling: a consumer listens on channel, says so by prepare_wait, looks once more,
-- and sleeps. Until its timeout is over an enqueue notifies; one that nobody waits for costs nothing.

create or replace function pgqueue.wake(queue_name text)
returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform pgqueue._wake(pgqueue._get_locked_queue(queue_name));
end;
$$;
comment on function pgqueue.wake(text) is
'Notifies waiting consumers when the transaction commits: for those who insert into pgqueue.messages themselves. Raises PQ001.';

create or replace function pgqueue.next_due_at(queue_name text)
returns timestamptz
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    q constant pgqueue.queues := pgqueue._get_unlocked_queue(queue_name);
    due_at timestamptz;
begin
    select least(
        (select min(s.due_at) from pgqueue.scheduled_messages s where s.queue_name = q.name),
        (
            select min(m.visible_at)
            from (
                select r.id from pgqueue.requeued_messages r where r.queue_name = q.name order by r.check_at limit 1000
            ) c
            join pgqueue.messages m on m.queue_name = q.name and m.id = c.id
        ),
        (
            select min(m.visible_at)
            from (
                select c.visible_at from pgqueue.messages c
                where c.queue_name = q.name and c.id >= pgqueue._first_possible_id_of(q.name)
                order by c.id limit 1000
            ) m
        )
    ) into due_at;
    return due_at;
end;
$$;
comment on function pgqueue.next_due_at(text) is
'When the next message comes due: a delay that ends, a backoff, or a claim that runs out; in the past if some are ready, null if nothing is pending. Claims are looked at among the first 1,000 messages by id. Raises PQ001.';

create or replace function pgqueue.prepare_wait(queue_name text, timeout interval default '60 s')
returns timestamptz
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    until timestamptz;
    due_at timestamptz;
begin
    if timeout is null or not pgqueue._is_interval_between(timeout, '0', '1 day') then
        perform pgqueue._raise_invalid('timeout', timeout::text, 'an interval from 0 to 1 day');
    end if;
    until := pgqueue._now() + timeout;
    perform setval(q.waiting_until, greatest(pgqueue._to_micros(until), pg_sequence_last_value(q.waiting_until)));
    -- Whoever is in the middle of sending looked at the register before this call, and will not notify.
    if exists (
        select from unnest(pgqueue._running_writers()) as w
        where w <> (select l.virtualtransaction from pg_locks l where l.pid = pg_backend_pid() limit 1)
    ) then
        until := least(until, pgqueue._now() + interval '1 s');
    end if;
    due_at := pgqueue.next_due_at(queue_name);
    if due_at is null or q.paused_at is not null then
        return until;
    end if;
    -- What is due already, and was not to be had, is held by somebody: no reason to look without a pause.
    return least(until, greatest(due_at, pgqueue._now() + interval '100 ms'));
end;
$$;
comment on function pgqueue.prepare_wait(text, interval) is
'Says that the caller listens on channel(queue_name) and is going to wait for up to timeout (0 to 1 day), as long as which each enqueue notifies. Returns when to look again at the latest. Look once more after this call and before the wait: a message may have come in between. While others are in the middle of sending, it returns a second at most, as they will not notify. Raises 22023, PQ001.';
