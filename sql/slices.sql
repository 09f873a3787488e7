-- Moves due messages and dead letters that go to another queue, and removes messages that have no attempts left or have
-- expired, in slices of bounded size and time. Claims and sweeps call it.

-- Returns how many messages were moved, and the ids of those that have not expired. Records each id in
-- requeued_messages, as the walk may never reach that id again.
create or replace function pgqueue._move_due_slice(
    q pgqueue.queues, at timestamptz, wanted int, since timestamptz, out moved int, out ids bigint[]
)
language plpgsql volatile as $$
declare
    due refcursor;
    places tid[];
begin
    open due for
        select c.id, c.ctid as place, pgqueue._moved_bytes(c.payload, c.body, c.headers, c.transport_headers) as bytes
        from pgqueue.scheduled_messages c
        where c.queue_name = q.name and c.due_at >= since and c.due_at <= at
        order by c.due_at, c.id limit wanted for update skip locked;
    places := (pgqueue._fetch_slice(due)).places;
    close due;
    -- Rows are deleted by ctid. By key, a plan could use another index and read the whole queue through it.
    with gone as (
        delete from pgqueue.scheduled_messages s where s.ctid = any (places) returning s.*
    ),
    recorded as (
        insert into pgqueue.requeued_messages (queue_name, check_at, id)
        select q.name, (select pgqueue._now()), d.id from gone d
    ),
    arrived as (
        insert into pgqueue.messages (
            id, queue_name, enqueued_at, visible_at, attempt_count, max_attempts, expires_at, message_id,
            payload, body, headers, claimed_by, last_error, transport_headers, transport_seq, claimed_attempt, kind
        )
        select
            d.id, q.name, d.enqueued_at, d.due_at, d.attempt_count, d.max_attempts, d.expires_at, d.message_id,
            d.payload, d.body, d.headers, d.claimed_by, d.last_error, d.transport_headers,
            -- At its old place, below those that claims have passed, only a sweep would find the message.
            case when q.priorities then nextval('pgqueue.message_id') end,
            -- No consumer has it, also if it is moved before it is due.
            nullif(d.attempt_count, 0), q.kind
        from gone d
        returning messages.id, messages.expires_at
    )
    -- Expired messages are moved as well, so that the sweep removes them, but they are not returned.
    select count(*), coalesce(array_agg(m.id) filter (where coalesce(m.expires_at > at, true)), '{}') into moved, ids
    from arrived m;
end;
$$;

-- Returns how many messages were removed, and whether some are left for a later call. With max_slices, which claims
-- pass, it also ends after that many slices, or 50 ms after at.
create or replace function pgqueue._remove_spent_messages(
    q pgqueue.queues, ids bigint[], at timestamptz, max_slices int, out removed int, out has_more boolean
)
language plpgsql volatile as $$
declare
    spent refcursor;
    slice_ids bigint[];
    slices_left int := max_slices;
    died int;
    all_died int := 0;
begin
    removed := 0;
    has_more := false;
    begin
        if q.kind is not null then
            open spent for
                select m.id, null::tid as place, pgqueue._moved_bytes(m.payload, m.body, m.headers, m.transport_headers) as bytes
                from pgqueue.messages m, pgqueue._lookup_keys(q.name, ids) k
                where (m.kind = q.kind or m.kind is null)
                    and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
                    and m.visible_at <= at and not pgqueue._is_ready(m, at)
                for update of m skip locked;
        else
            open spent for
                select m.id, null::tid as place, pgqueue._moved_bytes(m.payload, m.body, m.headers, m.transport_headers) as bytes
                from pgqueue.messages_shared m, pgqueue._lookup_keys(q.name, ids) k
                where pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
                    and m.visible_at <= at and not pgqueue._is_ready(m, at)
                for update of m skip locked;
        end if;
        loop
            -- The verbs that only remove messages give no number of slices, and remove at least one slice.
            has_more := case
                when max_slices is null then removed > 0 and not pgqueue._has_time()
                -- A claim whose time has passed with reading removes one slice: otherwise the next one reads the same.
                else slices_left <= 0 or removed > 0 and pgqueue._now() > at + interval '50 ms' or not pgqueue._has_time()
            end;
            exit when has_more;
            slice_ids := (pgqueue._fetch_slice(spent)).ids;
            exit when slice_ids = '{}';
            slices_left := slices_left - 1;
            -- A message is returned as columns: one value would be detoasted, and compressed again.
            insert into pgqueue.dead_messages
            select (pgqueue._as_dead_letter(row(g.*)::pgqueue.messages, at, null)).* from pgqueue._delete_messages(q.name, q.kind, slice_ids) g
            where pgqueue._keeps_dead_letter(q, row(g.*)::pgqueue.messages)
            -- The same conflict as in _add_dead_letter.
            on conflict on constraint dead_messages_pkey do update
            set died_at = excluded.died_at, attempt_count = excluded.attempt_count, headers = excluded.headers,
                last_error = excluded.last_error, reason = excluded.reason;
            get diagnostics died = row_count;
            all_died := all_died + died;
            removed := removed + cardinality(slice_ids);
        end loop;
        close spent;
    exception when disk_full then
        -- The messages stay for a later sweep and block no others.
        removed := 0;
        has_more := false;
        return;
    end;
    perform pgqueue._count_dead(q, all_died);
end;
$$;

create or replace function pgqueue._find_spent_messages(q pgqueue.queues, at timestamptz, after_id bigint, wanted int)
returns bigint[] language plpgsql stable as $$
declare
    fresh_from_id constant bigint := case when q.group_limit is null then coalesce(pg_sequence_last_value(q.fresh_from_id), 1) end;
    -- The highest bigint has no successor.
    from_id constant bigint := least(after_id, 9223372036854775806) + 1;
begin
    if q.group_limit is not null then
        -- Claims pass messages whose groups wait, so the register tells nothing about those with an attempt.
        return array(
            select m.id from pgqueue.messages m
            where m.kind = q.kind and m.queue_name || '' = q.name and m.attempt_count > 0 and m.id + 0 >= from_id
                and m.visible_at <= at and not pgqueue._is_ready(m, at)
            order by m.id limit wanted
        );
    end if;
    return array(
        select distinct w.id
        from (
            (
                select m.id
                from pgqueue._possible_ranges(q.name, from_id, fresh_from_id) as r
                cross join lateral (
                    select c.id from pgqueue.messages c
                    where c.queue_name = q.name and c.id >= lower(r) and c.id < upper(r)
                        and c.visible_at <= at and not pgqueue._is_ready(c, at)
                    order by c.id limit wanted
                ) m
                limit wanted
            )
            union all
            (
                -- Claims by plain SQL do not move the register. If the first messages above it show one, all are read.
                select c.id
                from (
                    select m.id, m.visible_at <= at and not pgqueue._is_ready(m, at) as is_spent from pgqueue.messages m
                    where m.queue_name = q.name and m.id >= greatest(from_id, fresh_from_id)
                    order by m.id
                    limit case
                        when not exists (
                            select
                            from (
                                select f.attempt_count from pgqueue.messages f
                                where f.queue_name = q.name and f.id >= greatest(from_id, fresh_from_id)
                                order by f.id limit 1000
                            ) f
                            where f.attempt_count > 0
                        ) then 1000
                    end
                ) c
                where c.is_spent
                limit wanted
            )
            union all
            (
                select m.id
                from (
                    select r.id from pgqueue.requeued_messages r
                    where r.queue_name = q.name and r.check_at >= (pgqueue._sweep_state_of(q.name, at)).first_check_at
                    order by r.check_at, r.id limit 10000
                ) c
                -- `offset 0` keeps the planner from a join that reads the whole queue.
                cross join lateral (
                    select w.id from pgqueue.messages w
                    where w.queue_name = q.name and w.id = c.id and w.visible_at <= at and not pgqueue._is_ready(w, at)
                    offset 0
                ) m
                where c.id >= from_id
            )
        ) w
        order by w.id
        limit wanted
    );
end;
$$;

create or replace function pgqueue._remove_found_spent_messages(q pgqueue.queues, at timestamptz, wanted int)
returns int language plpgsql volatile as $$
declare
    ids bigint[] := '{0}'::bigint[];
    removed int := 0;
begin
    loop
        ids := pgqueue._find_spent_messages(q, at, ids[cardinality(ids)], least(wanted - removed, 1000));
        removed := removed + (pgqueue._remove_spent_messages(q, ids, at, null)).removed;
        exit when cardinality(ids) < 1000 or removed >= wanted or not pgqueue._has_time();
    end loop;
    return removed;
end;
$$;

create or replace function pgqueue._merged_headers(own jsonb, added jsonb) returns jsonb
language sql immutable parallel safe as $$
    -- A failure is recorded even if its headers do not fit. The message then keeps its own headers.
    select case
        when added is null or jsonb_typeof(own) <> 'object' then own
        when octet_length((coalesce(own, '{}') || added)::text) > 65536 then own
        else coalesce(own, '{}') || added
    end
$$;

-- Opens a cursor over dead letters for _fetch_slice, lowest id first, with ids only over those. It locks what it reads.
create or replace function pgqueue._open_dead_letters(queue_name text, ids bigint[], wanted int, waits boolean)
returns refcursor
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    dead refcursor;
begin
    open dead for execute
        'select d.id, d.ctid as place, pgqueue._moved_bytes(d.payload, d.body, d.headers, d.transport_headers) as bytes'
        ' from pgqueue.dead_messages d'
        || case
            when ids is null then ' where d.queue_name = $1 and d.id >= (pgqueue._sweep_state_of($1, ''-infinity'')).first_id'
            else ', pgqueue._lookup_keys($1, $2) k where pgqueue._matches_key(d.queue_name, d.id, $1, k.names, k.ids, k.id)'
        end
        || ' order by d.id limit $3 for update of d' || case when waits then '' else ' skip locked' end
    using queue_name, ids, wanted;
    return dead;
end;
$$;

-- The caller has locked the dead letters. If the headers do not fit, they are sent without pgqueue.dead_letter.
create or replace function pgqueue._send_dead_letters(places tid[], target pgqueue.queues) returns int
language plpgsql volatile as $$
declare
    at constant timestamptz := pgqueue._now();
    n int;
begin
    -- A message gets an id of its own in the target. Functions skip ids that the target had not used.
    with gone as (
        delete from pgqueue.dead_messages d where d.ctid = any (places) returning d.*
    )
    insert into pgqueue.messages (
        queue_name, enqueued_at, visible_at, max_attempts, message_id, payload, body, headers, last_error, transport_headers,
        kind
    )
    select
        -- The claim whose sweep this is looks for messages that were visible when it began.
        target.name, g.enqueued_at, least(g.died_at, at), target.max_attempts, g.message_id, g.payload, g.body,
        pgqueue._merged_headers(g.headers, jsonb_build_object('pgqueue.dead_letter', jsonb_build_object(
            'queue', g.queue_name, 'id', g.id, 'reason', g.reason, 'attempts', g.attempt_count, 'died_at', g.died_at))),
        g.last_error, g.transport_headers, target.kind
    from gone g
    order by g.id;
    get diagnostics n = row_count;
    if pgqueue._count('enqueued', target.name, n) > 0 then
        perform pgqueue._wake_if_waiting(target, at);
    end if;
    return n;
end;
$$;

-- Claims of other queues write their dead letters to dead_messages as ever. The sweeps of the queue that takes them
-- send them as new messages, so no claim waits for the other queue.
create or replace function pgqueue._take_dead_letters(q pgqueue.queues) returns void
language plpgsql volatile as $$
declare
    source pgqueue.queues;
    dead refcursor;
    places tid[];
    slices_left int := 8;
begin
    for source in select s.* from pgqueue.queues s where s.dead_letter_to = q.name order by s.name loop
        continue when not exists (
            select from pgqueue.dead_messages d
            where d.queue_name = source.name and d.id >= (pgqueue._sweep_state_of(source.name, '-infinity')).first_id);
        select d into dead from pgqueue._open_dead_letters(source.name, null, 1000, false) as d;
        while slices_left > 0 and pgqueue._has_time() loop
            places := (pgqueue._fetch_slice(dead)).places;
            exit when places = '{}';
            perform pgqueue._send_dead_letters(places, q);
            slices_left := slices_left - 1;
        end loop;
        close dead;
    end loop;
exception when disk_full then
    -- They stay in the other queues for a later sweep.
    null;
end;
$$;
