-- In a queue with priorities a claim takes the messages with the highest priority first. The tables of such queues have
-- an index that lists the messages by queue, priority and then place. For each priority a register holds the position
-- from which claims read this index, so that they read no dead entries of consumed messages.

create or replace function pgqueue._level_position(headers jsonb, place bigint) returns bigint
language sql immutable parallel safe as $$
    select
        ((9 - coalesce(array_position('{1,2,3,4,5,6,7,8,9}'::text[], headers ->> 'pgqueue.priority'), 0))::bigint << 59)
        | (place & 576460752303423487)
$$;
comment on function pgqueue._level_position(jsonb, bigint) is
'Where a message stands in the order in which claims read a queue with priorities: (9 - priority) * 2^59 plus its place.
The place is transport_seq or, if that is null, the id. A priority that is no number from 0 to 9 counts as 0. Inlined.';

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

create or replace function pgqueue._level_registers(q pgqueue.queues) returns regclass[]
language sql stable as $$
    select array(
        select format('pgqueue.queue_%s_level_%s', q.queue_id, 10 - n)::regclass from generate_series(1, 10) as n)
$$;

create or replace function pgqueue._level_floors(registers regclass[]) returns bigint[]
language sql volatile as $$
    -- A register that is ahead of all messages, for example after a restore, would hide new ones.
    select array(
        select greatest(
            (u.n - 1) << 59,
            least(
                pgqueue._register_value(u.register),
                ((u.n - 1) << 59) + coalesce(pg_sequence_last_value('pgqueue.message_id'), 0) + 1))
        from unnest(registers) with ordinality as u (register, n)
    )
$$;

create or replace function pgqueue._lock_levels(
    q pgqueue.queues, from_positions bigint[], below_positions bigint[], taken bigint[], at timestamptz, wanted int,
    out ids bigint[], out positions bigint[]
)
language plpgsql volatile as $$
begin
    -- Within a priority the index returns the messages by place. An `order by` would sort the whole queue, as the
    -- planner cannot know that only a partition with this index is left at run time. The limit inside keeps the scan
    -- from locking more than is wanted.
    select coalesce(array_agg(w.id), '{}'), array_agg(w.position) into ids, positions
    from (
        select r.id, r.position
        from unnest(from_positions, below_positions) as l (from_position, below_position)
        cross join lateral (
            select m.id, pgqueue._level_position(m) as position
            from pgqueue.messages m
            where pgqueue._is_in_queue(m, q.kind, q.name)
                and pgqueue._level_position(m) >= l.from_position and pgqueue._level_position(m) < l.below_position
                and m.id <> all (taken)
                and (pgqueue._is_ready(m, at) or m.visible_at <= at and pgqueue._is_walk_over(at))
            limit wanted for update skip locked
        ) r
        limit wanted
    ) w;
    if pgqueue._is_walk_over(at) then
        ids := pgqueue._keep_ready(q, ids, at);
    end if;
end;
$$;
comment on function pgqueue._lock_levels(pgqueue.queues, bigint[], bigint[], bigint[], timestamptz, int) is
'Locks up to wanted ready messages between pairs of positions, without those in taken, and returns them in order. A walk
that is over returns the positions of visible messages that are not ready, too.';

create or replace function pgqueue._walk_levels(
    q pgqueue.queues, at timestamptz, taken bigint[], wanted int, oldest_first boolean
) returns bigint[]
language plpgsql volatile as $$
declare
    registers constant regclass[] := pgqueue._level_registers(q);
    floors bigint[] := pgqueue._level_floors(registers);
    oldest bigint;
    found_ids bigint[];
    positions bigint[];
begin
    if oldest_first then
        -- Each message is the oldest one at some time, so none waits for ever.
        select f.floor into oldest
        from unnest(floors) as f (floor)
        cross join lateral (
            select pgqueue._level_position(m) as position
            from pgqueue.messages m
            where pgqueue._is_in_level(m, q.kind, q.name, f.floor)
                and (pgqueue._is_ready(m, at) or m.visible_at <= at and pgqueue._is_walk_over(at))
            limit 1
        ) w
        order by w.position - pgqueue._level_start(w.position) limit 1;
        if found then
            floors := oldest || array_remove(floors, oldest);
        end if;
    end if;
    select l.ids, l.positions into found_ids, positions
    from pgqueue._lock_levels(
        q, floors, array(select pgqueue._level_start(f) + 576460752303423488 from unnest(floors) as f), taken, at, wanted) l;
    perform setval(registers[(max(p) >> 59) + 1], max(p) + 1) from unnest(positions) as p group by p >> 59;
    return found_ids;
end;
$$;

create or replace function pgqueue._move_levels_to_ready(q pgqueue.queues, at timestamptz) returns void
language plpgsql volatile as $$
declare
    registers constant regclass[] := pgqueue._level_registers(q);
begin
    -- The time is read in this statement. At an earlier time, messages that were sent since would not be ready.
    perform setval(registers[(f.floor >> 59) + 1], coalesce(
        (
            select pgqueue._level_position(m) from pgqueue.messages m
            where pgqueue._is_in_level(m, q.kind, q.name, f.floor)
                and (pgqueue._is_ready(m, (select pgqueue._now())) or pgqueue._now() > at + interval '20 ms')
            limit 1
        ),
        (
            select max(pgqueue._level_position(m)) + 1 from pgqueue.messages m
            where pgqueue._is_in_level(m, q.kind, q.name, f.floor)
        )))
    from unnest(pgqueue._level_floors(registers)) as f (floor)
    where not (
        select pgqueue._is_ready(m, (select pgqueue._now())) from pgqueue.messages m
        where pgqueue._is_in_level(m, q.kind, q.name, f.floor)
        limit 1
    );
end;
$$;
comment on function pgqueue._move_levels_to_ready(pgqueue.queues, timestamptz) is
'Moves the registers to the first ready message of each priority, or beyond the last message if none is ready, within 20
ms after at. Otherwise each claim of a lower priority would read the messages before it, such as expired ones. The sweep
finds these.';

create or replace function pgqueue._set_levels_back(q pgqueue.queues, ids bigint[]) returns void
language plpgsql volatile as $$
declare
    registers constant regclass[] := pgqueue._level_registers(q);
begin
    perform setval(
        registers[(min(w.position) >> 59) + 1],
        greatest(1, least(pgqueue._register_value(registers[(min(w.position) >> 59) + 1]), min(w.position))))
    from (
        select pgqueue._level_position(m) as position
        from pgqueue.messages m, pgqueue._lookup_keys(q.name, ids) k
        where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
    ) w
    group by w.position >> 59;
end;
$$;

create or replace function pgqueue._sweep_recent_levels(
    q pgqueue.queues, taken bigint[], at timestamptz, wanted int, recent_count int
) returns bigint[]
language sql volatile as $$
    select l.ids
    from pgqueue._level_floors(pgqueue._level_registers(q)) as floors
    cross join lateral pgqueue._lock_levels(
        q, array(select greatest(pgqueue._level_start(f), f - recent_count) from unnest(floors) as f), floors, taken, at,
        wanted) l
$$;
comment on function pgqueue._sweep_recent_levels(pgqueue.queues, bigint[], timestamptz, int, int) is
'Locks up to wanted ready messages at the last recent_count places of each priority that claims have passed, where
transactions roll back or commit late.';

create or replace function pgqueue._sweep_levels(q pgqueue.queues, taken bigint[], at timestamptz, wanted int)
returns bigint[] language plpgsql volatile as $$
declare
    started_at constant timestamptz := pgqueue._now();
    started_from constant bigint := pgqueue._register_value(q.sweep_resume_id);
    state constant pgqueue.sweep_state := pgqueue._sweep_state_of(q.name, at);
    floors bigint[];
    id_range int8range;
    next_position bigint := 1;
    below_position bigint;
    span bigint;
    page record;
    spent_ids bigint[] := '{}'::bigint[];
    candidate_ids bigint[] := taken;
begin
    -- For 50 ms, concurrent claims do not start another sweep.
    perform setval(q.next_sweep_at, pgqueue._to_micros(at + interval '50 ms'));
    perform pgqueue._do_periodic_work(q, at);
    if state.recorded_at is null or at - state.recorded_at not between interval '0' and interval '1 s' then
        perform pgqueue._sweep_other_tables(q, state, at);
    end if;
    perform pgqueue._move_levels_to_ready(q, at);
    floors := pgqueue._level_floors(pgqueue._level_registers(q));

    <<walk>>
    for id_range in
        -- From where the last sweep stopped to the end, and then from the start. No place is below first_id.
        select r
        from (values (1, int8range(started_from, null)), (2, int8range(0, started_from))) as h (half, part)
        cross join lateral (
            select int8range(pgqueue._level_start(f) + state.first_id, f) * h.part as r from unnest(floors) as f
            where pgqueue._level_start(f) + state.first_id < f
        ) s
        where not isempty(r)
        order by h.half, r
    loop
        next_position := lower(id_range);
        span := 1000;
        while next_position < upper(id_range) loop
            exit walk when cardinality(candidate_ids) >= wanted or pgqueue._now() > started_at + interval '10 ms';
            below_position := next_position + least(span, upper(id_range) - next_position);
            -- Without `order by`, as in _lock_levels.
            select
                array_agg(w.position) as positions, array_agg(w.id) filter (where w.is_ready) as ready_ids,
                array_agg(w.id) filter (where w.is_spent) as spent_ids
            into page
            from (
                select
                    m.id, pgqueue._is_ready(m, at) as is_ready, pgqueue._is_spent(m, at) as is_spent,
                    pgqueue._level_position(m) as position
                from pgqueue.messages m
                where pgqueue._is_in_queue(m, q.kind, q.name)
                    and pgqueue._level_position(m) >= next_position
                    and pgqueue._level_position(m) < below_position
                limit 1000
            ) w;
            spent_ids := spent_ids || page.spent_ids;
            if page.ready_ids is not null then
                candidate_ids := candidate_ids || pgqueue._lock_ready(
                    q, page.ready_ids, candidate_ids, at, wanted - cardinality(candidate_ids));
                -- There may be more messages here.
                exit walk when cardinality(candidate_ids) >= wanted;
            end if;
            next_position := coalesce(page.positions[1000] + 1, below_position);
            span := case when page.positions[1000] is null then pgqueue._next_span(span) else span end;
        end loop;
        -- After a full pass the next sweep starts with the highest priority.
        next_position := 1;
    end loop;
    if cardinality(candidate_ids) < wanted and next_position > 1 then
        candidate_ids := candidate_ids || pgqueue._sweep_recent_levels(
            q, candidate_ids, at, wanted - cardinality(candidate_ids), 4096);
    end if;
    perform pgqueue._end_sweep(q, at, cardinality(candidate_ids) >= wanted, spent_ids, next_position);
    return candidate_ids;
end;
$$;

create or replace function pgqueue._take_highest(q pgqueue.queues, swept_ids bigint[], walked_ids bigint[], wanted int)
returns bigint[] language plpgsql volatile as $$
declare
    ids bigint[];
begin
    select array_agg(w.id order by w.position) into ids
    from (
        select m.id, pgqueue._level_position(m) as position
        from pgqueue.messages m, pgqueue._lookup_keys(q.name, swept_ids || walked_ids) k
        where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
    ) w;
    perform pgqueue._set_levels_back(q, array(
        select u.id from unnest(ids[wanted + 1:]) as u (id) where u.id in (select i from unnest(walked_ids) as i)));
    return ids[:wanted];
end;
$$;
comment on function pgqueue._take_highest(pgqueue.queues, bigint[], bigint[], int) is
'Up to wanted of the messages that a sweep and a walk have locked, those with the highest priority first. Later claims
find the others again.';

create or replace function pgqueue._claim_candidates_by_priority(q pgqueue.queues, at timestamptz, wanted int)
returns bigint[] language plpgsql volatile as $$
declare
    now_micros constant bigint := pgqueue._to_micros(at);
    first_due constant bigint := pgqueue._register_value(q.first_due_at);
    next_sweep constant bigint := pgqueue._register_value(q.next_sweep_at);
    is_sweep_due constant boolean := next_sweep - now_micros not between 1 and 15000000;
    oldest_first constant boolean := random() < 0.1;
    candidate_ids bigint[] := '{}'::bigint[];
begin
    if q.paused_at is not null then
        return candidate_ids;
    end if;
    if first_due <= now_micros then
        -- Moved messages stay in messages while others have a higher priority.
        perform pgqueue._move_due_messages(q, at, greatest(wanted, 20), pgqueue._from_micros(first_due - 1));
    end if;
    if is_sweep_due then
        candidate_ids := pgqueue._sweep_levels(q, candidate_ids, at, wanted);
    end if;
    if candidate_ids = '{}' or oldest_first and cardinality(candidate_ids) < wanted then
        candidate_ids := candidate_ids || pgqueue._walk_levels(
            q, at, candidate_ids, wanted - cardinality(candidate_ids), oldest_first);
    elsif not oldest_first then
        -- What the sweep has found may have a lower priority than what no claim has passed.
        candidate_ids := pgqueue._take_highest(
            q, candidate_ids, pgqueue._walk_levels(q, at, candidate_ids, wanted, false), wanted);
    end if;
    -- As in _claim_candidates, a claim that has found too few messages sweeps at once, unless the last sweep was
    -- expensive.
    if pgqueue._is_walk_over(at) then
        return candidate_ids;
    elsif cardinality(candidate_ids) < wanted and not is_sweep_due and next_sweep > now_micros + 150000 then
        candidate_ids := candidate_ids || pgqueue._sweep_recent_levels(
            q, candidate_ids, at, wanted - cardinality(candidate_ids), case candidate_ids when '{}' then 4096 else 128 end);
    elsif cardinality(candidate_ids) < wanted and not is_sweep_due then
        candidate_ids := pgqueue._sweep_levels(q, candidate_ids, at, wanted);
    end if;
    return candidate_ids;
end;
$$;
