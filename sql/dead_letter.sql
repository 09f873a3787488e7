-- Makes dead letters of the messages that have no attempts left, returns dead letters to their queue, or deletes them.

create or replace function pgqueue.sweep_queue(
    queue_name pgqueue.queue_of_consumer_or_admin, max_messages int default 10000
) returns int
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
begin
    perform pgqueue._require(
        max_messages between 1 and 1000000, 'max_messages', max_messages::text, 'an integer from 1 to 1000000');
    return pgqueue._remove_found_spent_messages(q, at, max_messages);
end;
$$;
comment on function pgqueue.sweep_queue is
'Removes up to max_messages (1 to 1000000) messages that have no attempts left and whose last claim has ended, or that
have expired after a claim, and returns how many. They become dead letters if the queue keeps them. Every claim does
this on its way, so the call is needed only while no consumer claims. Repeat it until it returns 0: it ends when half of
statement_timeout has passed, too. It reads all messages in flight, about 2 s for a million, and a statement_timeout
that is shorter cancels it. Expired messages that were never claimed may stay: see purge_expired. Raises 22023, PQ001.';

create or replace function pgqueue.redrive(
    queue_name pgqueue.queue_of_admin,
    max_messages int default 1000,
    ids bigint[] default null,
    to_queue pgqueue.queue_of_admin default null
) returns int
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    target pgqueue.queues;
    is_grouped constant boolean := q.group_limit is not null;
    dead refcursor;
    places tid[];
    slice_at timestamptz;
    first_due_at timestamptz;
    n int;
    redriven int := 0;
begin
    perform pgqueue._require(max_messages >= 1, 'max_messages', max_messages::text, 'an integer from 1');
    if to_queue collate "C" <> q.name then
        target := pgqueue._get_locked_queue(to_queue);
    end if;
    perform case
        when ids is null then pgqueue._remove_found_spent_messages(q, at, max_messages)
        else (pgqueue._remove_spent_messages(q, ids, at, null)).removed
    end;
    select d into dead from pgqueue._open_dead_letters(q.name, ids, max_messages, false) as d;
    loop
        places := (pgqueue._fetch_slice(dead)).places;
        exit when places = '{}';
        if target.name is not null then
            n := pgqueue._send_dead_letters(places, target);
        else
            slice_at := pgqueue._now();
            with revived as (
                delete from pgqueue.dead_messages d where d.ctid = any (places)
                returning d.id, d.queue_name, d.enqueued_at, 0, q.max_attempts, d.message_id, d.payload, d.body, d.headers,
                    d.claimed_by, d.last_error, d.transport_headers
            ),
            -- In a queue with groups the messages become ready in the transaction in which they stop being dead
            -- letters. Otherwise a claim between the redrive and their due time could take their successors.
            moved as (
                insert into pgqueue.messages (
                    id, queue_name, enqueued_at, attempt_count, max_attempts, message_id, payload, body, headers,
                    claimed_by, last_error, transport_headers, visible_at, kind
                )
                select r.*, slice_at, q.kind from revived r where is_grouped
                returning messages.id
            ),
            recorded as (
                insert into pgqueue.requeued_messages (queue_name, check_at, id)
                select q.name, (select pgqueue._now()), m.id from moved m
            ),
            delayed as (
                insert into pgqueue.scheduled_messages (
                    id, queue_name, enqueued_at, attempt_count, max_attempts, message_id, payload, body, headers,
                    claimed_by, last_error, transport_headers, due_at
                )
                -- Each message gets a due time of its own, because a claim continues at the last due time. With equal
                -- times it would scan the dead index entries of all messages already taken.
                select r.*, pgqueue._clamp_due_at(
                    slice_at - (row_number() over (order by r.id desc) - 1) * interval '1 microsecond')
                from revived r
                where not is_grouped
            )
            select count(*) into n from revived;
            first_due_at := coalesce(first_due_at, slice_at - (n - 1) * interval '1 microsecond');
        end if;
        redriven := redriven + n;
        exit when not pgqueue._has_time();
    end loop;
    close dead;
    if first_due_at is not null then
        perform pgqueue._announce_due(q, first_due_at);
    end if;
    return redriven;
end;
$$;
comment on function pgqueue.redrive is
'Returns up to max_messages dead letters to their queue and returns how many. It takes the lowest ids first; with ids,
only those. The messages keep id, payload, headers and last_error. They start with no attempts, the queue''s
max_attempts and no expiry, and are ready at once. Messages that no claim has moved to the dead letters yet are
included, as by sweep_queue. The call ends when half of statement_timeout has passed, and has then returned some: repeat
it until it returns 0. Due messages are claimed before new ones, so a large redrive delays all new messages. With
to_queue, for which the caller needs admin access, too, the dead letters become new messages of that queue, with ids of
their own and the header pgqueue.dead_letter, as by dead_letter_to of create_queue. Raises 22023, PQ001.';

create or replace function pgqueue.purge_dead_messages(queue_name pgqueue.queue_of_admin, ids bigint[] default null)
returns bigint language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q pgqueue.queues;
    dead refcursor;
    places tid[];
    n int;
    purged bigint := 0;
begin
    -- The undelivered messages of a dropped queue remain under its name, so the queue need not exist.
    if not pgqueue._lock_queue(queue_name)
        or not exists (
            select from pgqueue.dead_messages d
            where d.queue_name = purge_dead_messages.queue_name collate "C"
                and d.id >= (pgqueue._sweep_state_of(purge_dead_messages.queue_name, '-infinity')).first_id
        )
    then
        perform pgqueue._get_locked_queue(queue_name);
    end if;
    if exists (select from pgqueue.queues where queues.name = queue_name collate "C") then
        q := pgqueue._get_locked_queue(queue_name);
        perform case
            when ids is null then pgqueue._remove_found_spent_messages(q, at, 1000000)
            else (pgqueue._remove_spent_messages(q, ids, at, null)).removed
        end;
    end if;
    select d into dead from pgqueue._open_dead_letters(queue_name, ids, null, true) as d;
    loop
        places := (pgqueue._fetch_slice(dead)).places;
        exit when places = '{}';
        delete from pgqueue.dead_messages d where d.ctid = any (places);
        get diagnostics n = row_count;
        purged := purged + n;
        exit when not pgqueue._has_time();
    end loop;
    close dead;
    return purged;
end;
$$;
comment on function pgqueue.purge_dead_messages is
'Deletes the dead letters of a queue, all or only those in ids, and returns how many. Messages that
no claim has moved to the dead letters yet are included, as by sweep_queue. The call ends when half of statement_timeout
has passed, and has then deleted some: repeat it until it returns 0. The dead letters of a dropped queue are found by
its name. Raises PQ001 if there is neither a queue nor a dead letter of this name.';

create or replace function pgqueue._on_queue_changed_dead_letter_to(before pgqueue.queues, after pgqueue.queues)
returns void language plpgsql volatile as $$
begin
    if after.name is null then
        -- A later queue of this name, perhaps of another owner, gets no dead letters.
        update pgqueue.queues o set dead_letter_to = null, updated_at = pgqueue._now() where o.dead_letter_to = before.name;
    end if;
    if after.dead_letter_to is null or after.dead_letter_to = before.dead_letter_to then
        return;
    end if;
    perform pgqueue._get_locked_queue(after.dead_letter_to);
    -- One session at a time. Two could close a cycle, as neither sees what the other has not committed. No queue has
    -- such a name.
    perform pg_advisory_xact_lock(pgqueue._lock_key('dead_letter_to of all queues'));
    perform pgqueue._require_current_snapshot(format('queue %L', after.name));
    if exists (
        with recursive chain as (
            select after.dead_letter_to as name
            union
            select t.dead_letter_to from chain c join pgqueue.queues t on t.name = c.name where t.dead_letter_to is not null
        )
        select from chain c where c.name = after.name
    ) then
        perform pgqueue._raise_invalid('dead_letter_to', after.dead_letter_to,
            format('a queue whose dead letters do not come back to queue %L', after.name));
    end if;
    -- The other queue gets the dead letters that exist already.
    perform pg_notify(pgqueue.channel(after.dead_letter_to), '');
end;
$$;

create or replace function pgqueue._findings_of_held_groups(q pgqueue.queues) returns setof pgqueue.finding
language sql volatile as $$
    select
        'warning', q.name, 'held_group',
        format('group %L waits for %s, the first is %s: on_dead is hold', d.name,
            pgqueue._with_number(d.n::int, 'dead letter'), d.first_id),
        format('select pgqueue.redrive(%L, ids => array[%s]); -- or purge_dead_messages', q.name, d.first_id)
    from (
        select left(c.headers ->> 'pgqueue.group', 255) as name, count(*) as n, min(c.id) as first_id
        from (
            select m.headers, m.id from pgqueue.dead_messages m
            where q.group_limit is not null and q.on_dead = 'hold' and m.queue_name = q.name
                and m.id >= (pgqueue._sweep_state_of(q.name, '-infinity')).first_id and m.headers ->> 'pgqueue.group' is not null
            order by m.id limit 1000
        ) c
        group by c.headers ->> 'pgqueue.group'
        order by min(c.id) limit 10
    ) d
    where exists (
        select from pgqueue.messages m
        where m.queue_name = q.name
            and pgqueue._group_position(m.headers, m.id) = pgqueue._group_position(jsonb_build_object('pgqueue.group', d.name), 0)
    )
$$;
