-- Takes back messages that no consumer has claimed, or changes when they are due.

create or replace function pgqueue.cancel(queue_name pgqueue.queue_of_producer_or_admin, id bigint) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    place tid;
begin
    perform pgqueue._require(id is not null, 'id', null, 'the id of a message');
    -- If another transaction has locked the row, it claims the message, or moves it between the two tables.
    -- Only the primary key has the order of the ids: with `=`, a plan could read the whole queue through another index.
    -- The place is used by a statement of its own, whose snapshot shows the row version that is locked.
    place := (
        select c.ctid from pgqueue.scheduled_messages c
        where c.queue_name = q.name and c.id between cancel.id and cancel.id order by c.id for update skip locked
    );
    delete from pgqueue.scheduled_messages s where s.ctid = place;
    if not found then
        delete from pgqueue.messages_shared m
        where m.queue_name = q.name and m.id = (
            select c.id from pgqueue.messages_shared c
            where c.queue_name = q.name and c.id = cancel.id and (c.visible_at <= at or pgqueue._is_unclaimed(c))
            for update skip locked
        );
    end if;
    if not found and q.kind is not null then
        delete from pgqueue.messages m
        where m.kind = q.kind and m.queue_name = q.name and m.id = (
            select c.id from pgqueue.messages c
            where c.kind = q.kind and c.queue_name = q.name and c.id = cancel.id
                and (c.visible_at <= at or pgqueue._is_unclaimed(c))
            for update skip locked
        );
    end if;
    return found;
end;
$$;
comment on function pgqueue.cancel is
'Removes a message that is ready or scheduled and returns true. Returns false if a consumer has claimed it, if another
transaction has locked it at this moment, or if it is gone. Does not wait for consumers. If a consumer claims the
message at the same time, the message is either delivered or cancelled, never both. A message whose claim has ended is
ready again and can be cancelled; its consumer then loses the claim. Dead letters stay: purge_dead_messages removes
them. If you cancel the message of a future tick, the schedule adds it again. Pause the schedule with alter_schedule
instead. Raises 22023, PQ001.';

create or replace function pgqueue.cancel_by_key(queue_name pgqueue.queue_of_producer_or_admin, dedup_key text)
returns boolean language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    id bigint;
begin
    perform pgqueue._require(char_length(dedup_key) between 1 and 255, 'dedup_key', left(dedup_key, 300), '1 to 255 characters');
    id := (
        select k.id
        from pgqueue._read_dedup_keys(
            q, pgqueue._dedup_period(q.dedup_window, at), array[dedup_key], at, '{}', '{}') k
        where k.is_taken);
    if id is null or not pgqueue.cancel(queue_name, id) then
        return false;
    end if;
    -- In the order in which senders lock the rows of a key.
    perform pgqueue._write_dedup_keys(q, period, array[dedup_key], array[id], '-infinity', array[id])
    from generate_series(
        pgqueue._dedup_period(q.dedup_window, pgqueue._end_of_dedup_window(q, at)),
        pgqueue._dedup_period(q.dedup_window, at), -1) as period;
    return true;
end;
$$;
comment on function pgqueue.cancel_by_key is
'Removes the message that has a dedup_key, as cancel does, and makes the key free. Returns false, and the key stays
taken, if a consumer has claimed the message, if it is gone, or if no message has the key. A message has its key for
dedup_window from when it was sent, also if it waits for longer. With dedup_window 0 it has the key while it lives.
Raises 22023, PQ001.';

create or replace function pgqueue.reschedule(
    queue_name pgqueue.queue_of_producer_or_admin, id bigint, due_at timestamptz default null
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    new_due_at constant timestamptz := greatest(due_at, at);
    place tid;
begin
    perform pgqueue._require(id is not null, 'id', null, 'the id of a message');
    perform pgqueue._require(new_due_at <= pgqueue._add_interval(at, '3652.5 days'), 'due_at', due_at::text,
        'a time up to 10 years (3652.5 days) ahead, or null for now');
    perform pgqueue._require(
        not exists (select from pgqueue.schedules s where s.queue_name = q.name and s.next_id = reschedule.id),
        'id', id::text, 'that of a message which is no future tick of a schedule: see run_schedule and alter_schedule');
    -- If another transaction has locked the row, it claims the message, or moves it between the two tables.
    -- Found as in cancel.
    place := (
        select c.ctid from pgqueue.scheduled_messages c
        where c.queue_name = q.name and c.id between reschedule.id and reschedule.id and c.due_at > at
        -- Not `for update`: a replacement tells this lock from that of a consumer.
        order by c.id for no key update skip locked
    );
    update pgqueue.scheduled_messages s set due_at = pgqueue._clamp_due_at(new_due_at) where s.ctid = place;
    if not found then
        -- In a queue with group_limit 1, or that had it, a message waits here for its retry.
        update pgqueue.messages_shared m
        set visible_at = new_due_at
        where m.queue_name = q.name and m.id = (
            select c.id from pgqueue.messages_shared c
            where c.queue_name = q.name and c.id = reschedule.id and c.visible_at > at and pgqueue._is_unclaimed(c)
            for update skip locked
        );
    end if;
    if not found and q.kind is not null then
        update pgqueue.messages m
        set visible_at = new_due_at
        where m.kind = q.kind and m.queue_name = q.name and m.id = (
            select c.id from pgqueue.messages c
            where c.kind = q.kind and c.queue_name = q.name and c.id = reschedule.id and c.visible_at > at
                and pgqueue._is_unclaimed(c)
            for update skip locked
        );
    end if;
    if not found then
        return false;
    end if;
    perform pgqueue._announce_due(q, new_due_at);
    return true;
end;
$$;
comment on function pgqueue.reschedule is
'Makes a message that waits for a delay or a retry due at another time, and returns true. due_at is up to 10 years
ahead; null or a time that has passed is now. Waiting consumers are notified. Attempts, expiry, priority, and the place
in a group stay. Returns false if the message is ready or in flight, if another transaction has locked it at this
moment, or if it is gone. Does not wait for consumers. For the message of a future tick call run_schedule or
alter_schedule instead. A transaction that calls reschedule and then enqueue with the dedup_key of the message and
on_duplicate replace can deadlock with another replacement (40P01): call enqueue alone, which sets the due time, too.
Raises 22023, PQ001.';
