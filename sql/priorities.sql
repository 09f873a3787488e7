-- In a queue with priorities a claim takes the messages with the highest priority first. The tables of such queues have
-- an index that lists the messages by queue, priority and then place. For each priority a register holds the position
-- from which claims read this index, so that they read no dead entries of consumed messages.

create or replace function pgqueue._level_position(headers jsonb, place bigint)
returns bigint
language sql immutable parallel safe
as $$
    select
        ((9 - coalesce(array_position('{1,2,3,4,5,6,7,8,9}'::text[], headers ->> 'pgqueue.priority'), 0))::bigint << 59)
        | (place & 576460752303423487)
$$;
comment on function pgqueue._level_position(jsonb, bigint) is
'Where a message stands in the order in which claims read a queue with priorities: (9 - priority) * 2^59 plus its place.
The place is transport_seq or, if that is null, the id. A priority that is no number from 0 to 9 counts as 0. Inlined.';

create or replace function pgqueue._level_position(m pgqueue.messages)
returns bigint
language sql immutable parallel safe
as $$ select pgqueue._level_position(m.headers, coalesce(m.transport_seq, m.id)) $$;
comment on function pgqueue._level_position(pgqueue.messages) is
'The expression of the index on the positions. Inlined.';

create or replace function pgqueue._level_start(level_position bigint)
returns bigint
language sql immutable parallel safe
as $$ select (level_position >> 59) << 59 $$;
comment on function pgqueue._level_start(bigint) is
'The lowest position of the priority to which a position belongs. Inlined.';

create or replace function pgqueue._is_in_level(m pgqueue.messages, kind bigint, name text, from_position bigint)
returns boolean
language sql immutable parallel safe
as $$
    select pgqueue._is_in_queue(m, kind, name)
        and pgqueue._level_position(m) >= from_position
        and pgqueue._level_position(m) < pgqueue._level_start(from_position) + 576460752303423488
$$;
comment on function pgqueue._is_in_level(pgqueue.messages, bigint, text, bigint) is
'Whether a message belongs to the queue of this kind and name, has the priority of from_position, and stands there or
after it. Inlined to a search of the index on the positions.';

create or replace function pgqueue._on_queue_created_priorities(q pgqueue.queues)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if not q.priorities then
        return;
    end if;
    perform setval(pgqueue._create_register(q.queue_id, format('level_%s', n)), 1) from generate_series(0, 9) as n;
    -- Functions that read the messages by id skip the vacant ids only below this register.
    perform setval(q.fresh_from_id, 4611686018427387904);
end;
$$;
comment on function pgqueue._on_queue_created_priorities(pgqueue.queues) is
'Creates the registers of a queue with priorities.';

create or replace function pgqueue._on_queue_dropping_priorities(q pgqueue.queues)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if q.priorities then
        for level in 0..9 loop
            execute format('drop sequence pgqueue.%I cascade', format('queue_%s_level_%s', q.queue_id, level));
        end loop;
    end if;
end;
$$;
comment on function pgqueue._on_queue_dropping_priorities(pgqueue.queues) is
'Drops the registers of a queue with priorities.';

create or replace function pgqueue._on_queue_altered_priorities(before pgqueue.queues, after pgqueue.queues)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if before.priorities <> after.priorities then
        perform pgqueue._on_queue_dropping_priorities(before);
        perform pgqueue._on_queue_created_priorities(after);
    end if;
end;
$$;
comment on function pgqueue._on_queue_altered_priorities(pgqueue.queues, pgqueue.queues) is
'Creates or drops the registers of a queue that gets or loses priorities.';

create or replace function pgqueue._level_registers(q pgqueue.queues)
returns regclass[]
language sql stable
as $$
    select array(
        select format('pgqueue.queue_%s_level_%s', q.queue_id, 10 - n)::regclass from generate_series(1, 10) as n)
$$;
comment on function pgqueue._level_registers(pgqueue.queues) is
'The registers of a queue with priorities, that of priority 9 first: the positions that no claim has passed.';

create or replace function pgqueue._level_floors(registers regclass[])
returns bigint[]
language sql volatile
as $$
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
comment on function pgqueue._level_floors(regclass[]) is
'For each priority, 9 first, the position from which claims read.';

create or replace function pgqueue._walk_levels(q pgqueue.queues, at timestamptz, taken bigint[], wanted int)
returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    registers constant regclass[] := pgqueue._level_registers(q);
    floors bigint[] := pgqueue._level_floors(registers);
    oldest bigint;
    found_ids bigint[];
    positions bigint[];
begin
    if random() < 0.1 then
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
    -- Within a priority the index returns the messages by place. An `order by` would sort the whole queue, as the
    -- planner cannot know that only a partition with this index is left at run time. The limit inside keeps the scan
    -- from locking more than is wanted.
    select array_agg(w.id), array_agg(w.position) into found_ids, positions
    from (
        select r.id, r.position
        from unnest(floors) as f (floor)
        cross join lateral (
            select m.id, pgqueue._level_position(m) as position
            from pgqueue.messages m
            where pgqueue._is_in_level(m, q.kind, q.name, f.floor)
                and m.id <> all (taken)
                and (pgqueue._is_ready(m, at) or m.visible_at <= at and pgqueue._is_walk_over(at))
            limit wanted for update skip locked
        ) r
        limit wanted
    ) w;
    perform setval(registers[(max(p) >> 59) + 1], max(p) + 1) from unnest(positions) as p group by p >> 59;
    if pgqueue._is_walk_over(at) then
        found_ids := pgqueue._keep_ready(q, found_ids, at);
    end if;
    return coalesce(found_ids, '{}');
end;
$$;
comment on function pgqueue._walk_levels(pgqueue.queues, timestamptz, bigint[], int) is
'The ids of up to wanted ready messages that no claim has passed, locked, without those in taken: those with the highest
priority, or, in one call of ten, first those with the priority whose next message has the lowest place.';

create or replace function pgqueue._move_levels_past_unready(q pgqueue.queues)
returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    registers constant regclass[] := pgqueue._level_registers(q);
begin
    perform setval(registers[(w.last >> 59) + 1], w.last + 1)
    from unnest(pgqueue._level_floors(registers)) as f (floor)
    cross join lateral (
        select max(pgqueue._level_position(m)) as last
        from pgqueue.messages m
        where pgqueue._is_in_level(m, q.kind, q.name, f.floor)
    ) w
    where w.last is not null;
    return found;
end;
$$;
comment on function pgqueue._move_levels_past_unready(pgqueue.queues) is
'Moves the registers beyond all messages, for a claim that has found no more ready ones there. From then on the sweep
finds the others, such as expired ones. Returns whether there were any.';

create or replace function pgqueue._move_levels_to_ready(q pgqueue.queues, at timestamptz)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
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
    cross join lateral (
        select pgqueue._is_ready(m, (select pgqueue._now())) as is_ready from pgqueue.messages m
        where pgqueue._is_in_level(m, q.kind, q.name, f.floor)
        limit 1
    ) w
    where not w.is_ready;
end;
$$;
comment on function pgqueue._move_levels_to_ready(pgqueue.queues, timestamptz) is
'Moves the registers to the first ready message of each priority, or beyond the last message if none is ready, within 20
ms after at. Otherwise each claim of a lower priority would read the messages before it, such as expired ones. The sweep
finds these.';

create or replace function pgqueue._set_levels_back(q pgqueue.queues, ids bigint[])
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
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
comment on function pgqueue._set_levels_back(pgqueue.queues, bigint[]) is
'Sets the registers back to messages that a claim has found and does not take.';

create or replace function pgqueue._lock_ready_in_order(
    q pgqueue.queues, ids bigint[], taken bigint[], at timestamptz, wanted int
)
returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    candidate_ids bigint[] := '{}'::bigint[];
    missing int := wanted;
begin
    while cardinality(ids) > 0 and missing > 0 loop
        candidate_ids := candidate_ids || pgqueue._lock_ready(q, ids[:missing], taken || candidate_ids, at, missing);
        ids := ids[missing + 1:];
        missing := wanted - cardinality(candidate_ids);
    end loop;
    return candidate_ids;
end;
$$;
comment on function pgqueue._lock_ready_in_order(pgqueue.queues, bigint[], bigint[], timestamptz, int) is
'Locks up to wanted of the messages that are ready, the first ones of ids, not those with the lowest ids.';

create or replace function pgqueue._sweep_recent_levels(
    q pgqueue.queues, taken bigint[], at timestamptz, wanted int, recent_count int
)
returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    ready_ids bigint[];
    spent_ids bigint[];
    candidate_ids bigint[];
begin
    select array_agg(w.id) filter (where w.is_ready), array_agg(w.id) filter (where not w.is_ready) into ready_ids, spent_ids
    from (
        select c.id, c.is_ready
        from unnest(pgqueue._level_floors(pgqueue._level_registers(q))) as f (floor)
        cross join lateral (
            select m.id, pgqueue._is_ready(m, at) as is_ready from pgqueue.messages m
            where pgqueue._is_in_queue(m, q.kind, q.name)
                and pgqueue._level_position(m)
                >= greatest(pgqueue._level_start(f.floor), f.floor - recent_count)
                and pgqueue._level_position(m) < f.floor
                and m.visible_at <= at
            limit 1000
        ) c
        limit 1000
    ) w;
    candidate_ids := pgqueue._lock_ready_in_order(q, ready_ids, taken, at, wanted);
    if spent_ids is not null then
        perform pgqueue._remove_spent_messages(q, spent_ids, at, 8);
    end if;
    return candidate_ids;
end;
$$;
comment on function pgqueue._sweep_recent_levels(pgqueue.queues, bigint[], timestamptz, int, int) is
'Checks the places where a message can appear at any time: the last recent_count places of each priority that claims
have passed, where transactions roll back or commit late. Returns up to wanted ids of ready messages, locked.';

create or replace function pgqueue._sweep_levels(q pgqueue.queues, taken bigint[], at timestamptz, wanted int)
returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    started_at constant timestamptz := pgqueue._now();
    started_from constant bigint := pgqueue._register_value(q.sweep_resume_id);
    state constant pgqueue.sweep_state := pgqueue._sweep_state_of(q.name, at);
    floors bigint[];
    id_range int8range;
    next_position bigint := 1;
    below_position bigint;
    span bigint;
    found_count int;
    ready_ids bigint[];
    page_spent_ids bigint[];
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
    candidate_ids := candidate_ids || pgqueue._sweep_recent_levels(
        q, candidate_ids, at, wanted - cardinality(candidate_ids), 4096);
    floors := pgqueue._level_floors(pgqueue._level_registers(q));

    <<walk>>
    for id_range in
        -- From where the last sweep stopped to the end, and then from the start. No place is below first_id.
        select int8range(greatest(lower(s.r), lower(h.part)), least(upper(s.r), upper(h.part)))
        from (
            values (1, int8range(started_from, 9223372036854775807)), (2, int8range(0, started_from))
        ) as h (half, part)
        cross join lateral (
            select int8range(pgqueue._level_start(f.floor) + state.first_id, f.floor) as r
            from unnest(floors) as f (floor)
            where pgqueue._level_start(f.floor) + state.first_id < f.floor
        ) s
        where s.r && h.part
        order by h.half, lower(s.r)
    loop
        next_position := lower(id_range);
        span := 1000;
        while next_position < upper(id_range) loop
            exit walk when cardinality(candidate_ids) >= wanted or pgqueue._now() > started_at + interval '10 ms';
            below_position := next_position + least(span, upper(id_range) - next_position);
            -- An `order by` of the limited rows would sort the whole range, as in _walk_levels. A range with too many
            -- messages is divided instead.
            select
                count(*), array_agg(w.id order by w.position) filter (where w.is_ready),
                array_agg(w.id) filter (where w.is_spent)
            into found_count, ready_ids, page_spent_ids
            from (
                select
                    m.id, pgqueue._is_ready(m, at) as is_ready, pgqueue._is_spent(m, at) as is_spent,
                    pgqueue._level_position(m) as position
                from pgqueue.messages m
                where pgqueue._is_in_queue(m, q.kind, q.name)
                    and pgqueue._level_position(m) >= next_position
                    and pgqueue._level_position(m) < below_position
                limit 1001
            ) w;
            if found_count > 1000 and span > 1 then
                span := span / 2;
                continue;
            end if;
            span := case when found_count <= 400 then pgqueue._next_span(span) else span end;
            spent_ids := spent_ids || page_spent_ids;
            candidate_ids := candidate_ids || pgqueue._lock_ready_in_order(
                q, ready_ids, candidate_ids, at, wanted - cardinality(candidate_ids));
            -- If there may be more messages here, the next sweep begins here.
            next_position := case when cardinality(candidate_ids) < wanted then below_position else next_position end;
        end loop;
        -- After a full pass the next sweep starts with the highest priority.
        next_position := 1;
    end loop;
    perform pgqueue._end_sweep(q, at, cardinality(candidate_ids) >= wanted, spent_ids, next_position);
    return candidate_ids;
end;
$$;
comment on function pgqueue._sweep_levels(pgqueue.queues, bigint[], timestamptz, int) is
'Makes one sweep over the positions that claims have passed, for at most 10 ms: appends to taken the ids of ready
messages, locked, until there are wanted ids. Such messages were committed late, or their claims have ended.';

create or replace function pgqueue._claim_candidates_by_priority(q pgqueue.queues, at timestamptz, wanted int)
returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    now_micros constant bigint := pgqueue._to_micros(at);
    first_due constant bigint := pgqueue._register_value(q.first_due_at);
    next_sweep constant bigint := pgqueue._register_value(q.next_sweep_at);
    is_sweep_due constant boolean := next_sweep - now_micros not between 1 and 15000000;
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
    if cardinality(candidate_ids) < wanted then
        candidate_ids := candidate_ids || pgqueue._walk_levels(
            q, at, candidate_ids, wanted - cardinality(candidate_ids));
    end if;
    -- As in _claim_candidates, a claim that has found too few messages sweeps at once, unless the last sweep was
    -- expensive.
    if pgqueue._is_walk_over(at) then
        return candidate_ids;
    elsif cardinality(candidate_ids) < wanted and not is_sweep_due and next_sweep > now_micros + 150000 then
        candidate_ids := candidate_ids || pgqueue._sweep_recent_levels(
            q, candidate_ids, at, wanted - cardinality(candidate_ids), case candidate_ids when '{}' then 4096 else 128 end);
    elsif cardinality(candidate_ids) < wanted and (pgqueue._move_levels_past_unready(q) or not is_sweep_due) then
        candidate_ids := pgqueue._sweep_levels(q, candidate_ids, at, wanted);
    end if;
    return candidate_ids;
end;
$$;
comment on function pgqueue._claim_candidates_by_priority(pgqueue.queues, timestamptz, int) is
'The ids of up to wanted ready messages of a queue with priorities, locked, for the caller to claim or delete.';
