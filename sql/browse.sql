-- Shows messages and dead letters without changing or locking them.

create or replace function pgqueue.browse(
    queue_name pgqueue.queue_of_consumer_admin_or_reader,
    state text default 'ready',
    max_messages int default 100,
    after_id bigint default 0
) returns setof pgqueue.message
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
set enable_bitmapscan = off set enable_sort = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_unlocked_queue(queue_name);
begin
    perform pgqueue._require(state in ('ready', 'inflight', 'scheduled'), 'state', state,
        'ready, inflight or scheduled; dead letters are shown by pgqueue.browse_dead_messages');
    perform pgqueue._check_page(max_messages, after_id);
    perform pgqueue._require_untruncated_messages();
    return query
    select *
    from (
        (
            select
                m.id, m.queue_name, m.payload, m.body, m.headers, m.message_id, m.attempt_count, m.max_attempts,
                m.enqueued_at, m.visible_at, m.expires_at, m.claimed_by, m.claim_token, m.last_error
            from pgqueue.messages m
            where m.queue_name = q.name and m.id > greatest(after_id, (pgqueue._sweep_state_of(q.name, '-infinity')).first_id - 1)
                and case browse.state
                    when 'ready' then pgqueue._is_ready(m, at)
                    when 'inflight' then m.visible_at > at and m.attempt_count > 0
                    else m.visible_at > at and m.attempt_count = 0
                end
            order by m.id limit browse.max_messages
        )
        union all
        (
            select
                s.id, s.queue_name, s.payload, s.body, s.headers, s.message_id, s.attempt_count, s.max_attempts,
                s.enqueued_at, s.due_at, s.expires_at, s.claimed_by, null::uuid, s.last_error
            from pgqueue.scheduled_messages s
            where s.queue_name = q.name and s.id > greatest(after_id, (pgqueue._sweep_state_of(q.name, '-infinity')).first_id - 1)
                -- Evaluated once, before the first row. With `order by` it is one search of the index on the time.
                and (browse.state <> 'ready' or (
                    select true from pgqueue.scheduled_messages d
                    where d.queue_name = q.name and d.due_at between (pgqueue._sweep_state_of(q.name, at)).first_due_at and at
                    order by d.due_at limit 1
                ))
                and case browse.state
                    when 'ready' then s.due_at <= at and coalesce(s.expires_at > at, true)
                    when 'inflight' then false
                    -- A message that expired before a claim moved it stays scheduled until then, also for stats.
                    else s.due_at > at or s.expires_at <= at
                end
            order by s.id limit browse.max_messages
        )
    ) as found
    order by 1
    limit browse.max_messages;
end;
$$;
comment on function pgqueue.browse is
'Shows up to max_messages (1 to 10000) messages in state ready, inflight or scheduled, by id, starting after after_id;
for the next page pass the last id. State ready includes messages that wait for others of their groups, or that a limit
of the queue holds back. State inflight includes messages of a group that wait for their retry, if group_limit is 1.
State scheduled includes delayed messages that expired before a claim made them ready. Claims
and locks no message. Raises 22023, PQ001, 40001.';

create or replace function pgqueue.browse_dead_messages(
    queue_name pgqueue.queue_of_admin_or_reader, max_messages int default 100, after_id bigint default 0
) returns setof pgqueue.dead_message
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q pgqueue.queues;
    spent bigint[];
begin
    -- After waiting for a drop_queue or for another kind of the queue, the statements below see the new state.
    perform pgqueue._lock_queue(queue_name), pgqueue._require_untruncated_messages();
    -- The undelivered messages of a dropped queue remain under its name, so the queue need not exist.
    if not exists (
        select from pgqueue.dead_messages d
        where d.queue_name = browse_dead_messages.queue_name collate "C"
            and d.id >= (pgqueue._sweep_state_of(browse_dead_messages.queue_name, '-infinity')).first_id
    ) then
        perform pgqueue._get_locked_queue(queue_name);
    end if;
    perform pgqueue._check_page(max_messages, after_id);
    if exists (select from pgqueue.queues where queues.name = queue_name collate "C") then
        q := pgqueue._get_locked_queue(queue_name);
        spent := pgqueue._find_spent_messages(q, at, after_id, max_messages);
    end if;
    return query
    select
        d.id, d.queue_name, d.payload, d.body, d.headers, d.message_id, d.attempt_count, d.max_attempts,
        d.enqueued_at, d.expires_at, d.claimed_by, d.last_error, d.reason, d.died_at
    from (
        (
            select c.* from pgqueue.dead_messages c
            where c.queue_name = browse_dead_messages.queue_name collate "C"
                and c.id > greatest(after_id, (pgqueue._sweep_state_of(browse_dead_messages.queue_name, '-infinity')).first_id - 1)
            order by c.id limit browse_dead_messages.max_messages
        )
        union all
        (
            select l.*
            from unnest(spent) as i
            -- `offset 0` keeps the planner from a join that reads the whole queue.
            cross join lateral (
                select m as spent_message from pgqueue.messages m where m.queue_name = q.name and m.id = i offset 0
            ) g
            cross join lateral pgqueue._as_dead_letter(g.spent_message, (g.spent_message).visible_at, null) l
            where pgqueue._keeps_dead_letter(q, g.spent_message)
        )
    ) d
    order by d.id limit browse_dead_messages.max_messages;
end;
$$;
comment on function pgqueue.browse_dead_messages is
'Shows up to max_messages (1 to 10000) dead letters with reason, last error and time, by id, starting after after_id;
for the next page pass the last id. Messages that no claim has moved to the dead letters yet are included; died_at is
the time when their last claim ended. For a dropped queue it shows the messages that were never delivered. Raises 22023,
PQ001, 40001.';

-- In PL/pgSQL, which keeps its plan: see _level_registers.
create or replace function pgqueue._check_page(max_messages int, after_id bigint) returns void
language plpgsql stable as $$
begin
    perform pgqueue._require(max_messages between 1 and 10000, 'max_messages', max_messages::text, 'an integer from 1 to 10000');
    perform pgqueue._require(after_id is not null, 'after_id', null, 'the last id of the previous page, or 0');
end;
$$;
