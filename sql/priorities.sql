-- In a queue with priorities a claim takes the messages with the highest priority first. The tables of such queues have
-- an index that lists the messages by queue, priority and then place. For each priority a register holds the position
-- from which claims read this index, so that they read no dead entries of consumed messages.

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

create or replace function pgqueue._sweep_levels(q pgqueue.queues, taken bigint[], at timestamptz, wanted int)
returns bigint[] language plpgsql volatile as $$
declare
    registers constant regclass[] := pgqueue._level_registers(q);
    state constant pgqueue.sweep_state := pgqueue._sweep_state_of(q.name, at);
begin
    if state.recorded_at is null or at - state.recorded_at not between interval '0' and interval '1 s' then
        perform pgqueue._sweep_other_tables(q, state, at);
    end if;
    -- The registers move to the first ready message of each priority, or beyond the last message if none is ready.
    -- Otherwise each claim of a lower priority would read the messages before it, such as expired ones. The sweep finds
    -- these. The time is read in this statement. At an earlier time, messages that were sent since would not be ready.
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
    return pgqueue._sweep(q, taken, at, wanted, 9223372036854775807);
end;
$$;

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

create or replace function pgqueue._claim_candidates_by_priority(q pgqueue.queues, at timestamptz, wanted int)
returns bigint[] language plpgsql volatile as $$
declare
    now_micros constant bigint := pgqueue._to_micros(at);
    first_due constant bigint := pgqueue._register_value(q.first_due_at);
    next_sweep constant bigint := pgqueue._register_value(q.next_sweep_at);
    is_sweep_due boolean := next_sweep - now_micros not between 1 and 15000000;
    oldest_first constant boolean := random() < 0.1;
    candidate_ids bigint[] := '{}'::bigint[];
    walked_ids bigint[];
    due_ids bigint[];
begin
    if first_due <= now_micros then
        -- Moved messages stay in messages while others have a higher priority.
        due_ids := pgqueue._move_due_messages(q, at, greatest(wanted, 20), pgqueue._from_micros(first_due - 1));
        -- As in _claim_candidates_grouped.
        is_sweep_due := is_sweep_due and (due_ids = '{}' or pgqueue._has_time());
    end if;
    if is_sweep_due then
        candidate_ids := pgqueue._sweep_levels(q, candidate_ids, at, wanted);
    end if;
    if candidate_ids = '{}' or oldest_first and cardinality(candidate_ids) < wanted then
        candidate_ids := candidate_ids || pgqueue._walk_levels(
            q, at, candidate_ids, wanted - cardinality(candidate_ids), oldest_first);
    elsif not oldest_first then
        -- What the sweep has found may have a lower priority than what no claim has passed. Later claims find again
        -- what this one leaves.
        walked_ids := pgqueue._walk_levels(q, at, candidate_ids, wanted, false);
        select array_agg(w.id order by w.position) into candidate_ids
        from (
            select m.id, pgqueue._level_position(m) as position
            from pgqueue.messages m, pgqueue._lookup_keys(q.name, candidate_ids || walked_ids) k
            where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
        ) w;
        perform pgqueue._set_levels_back(q, array(
            select u.id from unnest(candidate_ids[wanted + 1:]) as u (id) where u.id in (select i from unnest(walked_ids) as i)));
        candidate_ids := candidate_ids[:wanted];
    end if;
    -- As in _claim_candidates, a claim that has found too few messages sweeps at once, unless the last sweep was
    -- expensive.
    if pgqueue._is_walk_over(at) then
        return candidate_ids;
    elsif cardinality(candidate_ids) < wanted and not is_sweep_due and next_sweep > now_micros + 150000 then
        candidate_ids := candidate_ids || pgqueue._sweep_recent(
            q, candidate_ids, at, wanted - cardinality(candidate_ids), null,
            case candidate_ids when '{}' then 4096 else 128 end);
    elsif cardinality(candidate_ids) < wanted and not is_sweep_due then
        candidate_ids := pgqueue._sweep_levels(q, candidate_ids, at, wanted);
    end if;
    return candidate_ids;
end;
$$;
