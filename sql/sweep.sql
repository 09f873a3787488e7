-- Finds messages below fresh_from_id for a claim: expired claims, rolled-back claims, late commits, messages that came
-- due. The sweep walks over the ids from where the last one stopped, within a time budget, so that dead rows do not
-- slow down claims.

create or replace function pgqueue._move_due_messages(q pgqueue.queues, at timestamptz, wanted int, since timestamptz)
returns bigint[] language plpgsql volatile as $$
declare
    moved_ids bigint[] := '{}'::bigint[];
    moved int;
    all_moved int := 0;
    next_due_at timestamptz;
    next_due bigint;
    announced_due constant bigint := pg_sequence_last_value(q.first_due_at);
    this_second constant bigint := pgqueue._to_micros(date_trunc('second', least(at, pgqueue._now())));
    is_unsettled boolean;
begin
    select s.due_at into next_due_at
    from pgqueue.scheduled_messages s
    where s.queue_name = q.name and s.due_at >= since
    order by s.due_at limit 1;
    if next_due_at <= at then
        begin
            for n in 1..8 loop
                select r.moved, moved_ids || r.ids into moved, moved_ids
                from pgqueue._move_due_slice(q, at, wanted - all_moved, since) r;
                all_moved := all_moved + moved;
                exit when moved = 0 or all_moved >= wanted or not pgqueue._has_time();
            end loop;
        exception when disk_full then
            -- Without space nothing is moved, and ready messages are still claimed: acknowledging them needs no space,
            -- and frees some.
            perform setval(q.first_due_at, pgqueue._to_micros(at + interval '1 s'));
            return '{}'::bigint[];
        end;
        -- A claim that finds enough due messages makes no sweep, so rows of requeued_messages would accumulate. This
        -- call therefore checks twice as many rows as it has added. After fewer than 50 messages, the scan past
        -- removed rows would cost more than it saves. Rows older than a minute are left to the sweep, because a long
        -- write transaction can keep first_check_at far below them.
        if cardinality(moved_ids) >= 50 and pgqueue._has_time() then
            perform pgqueue._prune_requeued(q, r.gone, r.last_time)
            from pgqueue._read_requeued(
                q, at, greatest((pgqueue._sweep_state_of(q.name, at)).first_check_at, at - interval '1 min'), -9223372036854775808,
                2 * cardinality(moved_ids)) r;
        end if;
        -- If claims find enough due messages, they make no sweep, which would record where the next scan may start.
        if pgqueue._has_time() then
            perform pgqueue._record_if_old(q);
        end if;

        select s.due_at into next_due_at
        from pgqueue.scheduled_messages s
        where s.queue_name = q.name and s.due_at >= since
        order by s.due_at limit 1;
    end if;
    next_due := coalesce(pgqueue._to_micros(next_due_at), 9223372036854775807);
    -- A transaction announces a due time before it commits. Until then its message is invisible here, and the register
    -- would pass the due time. So once a second, if nothing else is due, the scan starts at the first due time of the
    -- last minute. While a transaction that has written delayed messages runs, the register stays in the present
    -- second. The register is set first. If another due time is announced after that, it lowers the register. If it
    -- was announced before that, the statements below see its message, or find its transaction running.
    if next_due > pgqueue._to_micros(at) and next_due <> announced_due
        and (announced_due < this_second or next_due >= this_second + 1000000)
    then
        perform setval(q.first_due_at, next_due);
        is_unsettled := exists (
            select from pg_locks l
            where l.locktype = 'relation' and l.relation = 'pgqueue.scheduled_messages'::regclass
                and l.mode = 'RowExclusiveLock' and l.granted and l.pid is distinct from pg_backend_pid()
                and l.database = (select d.oid from pg_database d where d.datname = current_database())
        );
        select s.due_at into next_due_at
        from pgqueue.scheduled_messages s
        where s.queue_name = q.name and s.due_at >= greatest((pgqueue._sweep_state_of(q.name, at)).first_due_at, at - interval '1 min')
        order by s.due_at limit 1;
        next_due := coalesce(pgqueue._to_micros(next_due_at), 9223372036854775807);
        if is_unsettled then
            next_due := least(next_due, greatest(announced_due, this_second + 999999));
        end if;
    end if;
    if next_due is distinct from pg_sequence_last_value(q.first_due_at) then
        perform setval(q.first_due_at, next_due);
    end if;
    return moved_ids;
end;
$$;

create or replace function pgqueue._lock_ready(
    q pgqueue.queues, ids bigint[], taken bigint[], at timestamptz, wanted int
) returns bigint[]
language plpgsql volatile as $$
begin
    -- The result is ordered by id, as the index is searched for the ids in order. An explicit `order by` would add a
    -- sort.
    if q.kind is not null then
        return array(
            select m.id from pgqueue.messages m, pgqueue._lookup_keys(q.name, ids) k
            where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id) and m.id <> all (taken) and pgqueue._is_ready(m, at)
            limit wanted for update of m skip locked
        );
    end if;
    return array(
        select m.id from pgqueue.messages_shared m, pgqueue._lookup_keys(q.name, ids) k
        where pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id) and m.id <> all (taken) and pgqueue._is_ready(m, at)
        limit wanted for update of m skip locked
    );
end;
$$;

create or replace function pgqueue._keep_ready(q pgqueue.queues, ids bigint[], at timestamptz) returns bigint[]
language plpgsql volatile as $$
declare
    ready_ids constant bigint[] := pgqueue._lock_ready(q, ids, '{}', at, cardinality(ids));
begin
    if cardinality(ready_ids) < cardinality(ids) then
        -- The next claim sweeps what the walk has passed, and walks on.
        perform setval(q.next_sweep_at, 1);
    end if;
    return ready_ids;
end;
$$;

-- Locks up to wanted ready messages between pairs of positions, without those in taken, and returns them in order. A
-- walk that is over returns the positions of visible messages that are not ready, too.
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

create or replace function pgqueue._sweep_requeued(
    q pgqueue.queues, taken bigint[], at timestamptz, wanted int, since timestamptz
) returns bigint[]
language plpgsql volatile as $$
declare
    candidate_ids bigint[] := '{}'::bigint[];
    seen_at timestamptz := since;
    seen_id bigint := -9223372036854775808;
    page int := least(greatest(20, wanted), 500);
    rows record;
    visible_ids bigint[] := '{}'::bigint[];
begin
    -- The rows are read in pages, as another transaction may lock any number of these messages for long. The first page
    -- is small, as each row costs several buffers and the first messages are often ready.
    loop
        select r.* into rows from pgqueue._read_requeued(q, at, seen_at, seen_id, page) r;
        exit when rows.n = 0;
        seen_at := rows.last_time;
        seen_id := rows.last_id;
        perform pgqueue._prune_requeued(q, rows.gone, seen_at);
        if rows.visible_ids is not null then
            visible_ids := visible_ids || rows.visible_ids;
            candidate_ids := candidate_ids || pgqueue._lock_ready(
                q, rows.visible_ids, taken || candidate_ids, at, wanted - cardinality(candidate_ids));
        end if;
        -- With wanted 0, only what has gone or is spent is removed.
        exit when rows.n < page or wanted > 0 and cardinality(candidate_ids) >= wanted
            or pgqueue._now() > at + case wanted when 0 then interval '20 ms' else interval '50 ms' end;
        page := least(2 * page, 500);
    end loop;
    if visible_ids <> '{}' then
        perform pgqueue._remove_spent_messages(q, visible_ids, at, 8);
    end if;
    return candidate_ids;
end;
$$;

-- Checks at a small bounded cost the last recent_count ids below fresh_from_id, where transactions roll back or commit
-- late, or the places below the register of each priority. Returns up to wanted ids of ready messages, locked.
create or replace function pgqueue._sweep_recent(
    q pgqueue.queues, taken bigint[], at timestamptz, wanted int, fresh_from_id bigint, recent_count int
) returns bigint[]
language plpgsql volatile as $$
declare
    floors bigint[];
    visible_ids bigint[];
    candidate_ids bigint[];
begin
    if q.priorities then
        floors := pgqueue._level_floors(pgqueue._level_registers(q));
        return (pgqueue._lock_levels(
            q, array(select greatest(pgqueue._level_start(f), f - recent_count) from unnest(floors) as f), floors, taken, at,
            wanted)).ids;
    end if;
    visible_ids := array(
        select i
        from pgqueue._possible_ranges(q.name, fresh_from_id - recent_count, fresh_from_id) as r
        cross join lateral generate_series(lower(r), upper(r) - 1, 1000) as f
        cross join lateral pgqueue._read_messages(q, f, f + least(1000, upper(r) - f), at, 1000) as m
        cross join lateral unnest(m.ready_ids || m.spent_ids) as i
        limit 1000);
    if visible_ids = '{}' then
        return visible_ids;
    end if;
    candidate_ids := pgqueue._lock_ready(q, visible_ids, taken, at, wanted);
    perform pgqueue._remove_spent_messages(q, visible_ids, at, 8);
    return candidate_ids;
end;
$$;

create or replace function pgqueue._do_periodic_work(q pgqueue.queues, at timestamptz) returns void
language plpgsql volatile as $$
begin
    perform pgqueue._call_if_due('housekeeping', at), pgqueue._call_if_due('maintenance', at);
    if exists (select from pgqueue.queues s where s.dead_letter_to = q.name) then
        perform pgqueue._take_dead_letters(q);
    end if;
end;
$$;

create or replace function pgqueue._sweep_other_tables(q pgqueue.queues, state pgqueue.sweep_state, at timestamptz)
returns void language plpgsql volatile as $$
begin
    perform pgqueue._record_if_old(q);
    perform pgqueue._move_due_messages(q, at, 100, state.first_due_at);
    -- Claims do not need the rows of requeued_messages, as the indexes list all messages.
    perform pgqueue._sweep_requeued(q, '{}', at, 0, state.first_check_at);
end;
$$;

create or replace function pgqueue._state_for_sweep(q pgqueue.queues, at timestamptz, fresh_from_id bigint)
returns pgqueue.sweep_state language plpgsql volatile as $$
declare
    s pgqueue.sweep_state;
    next_id constant bigint := pgqueue._register_value(q.sweep_resume_id);
begin
    select sweep_state.* into s from pgqueue.sweep_state where sweep_state.queue_name = q.name;
    if not found then
        -- The row was deleted by hand: nothing is known, so the sweep walks over all ids again.
        insert into pgqueue.sweep_state (queue_name) values (q.name) on conflict do nothing returning * into s;
        if not found then
            return s;
        end if;
    end if;
    -- If there are no new ids to record, the other tables can still hold many removed rows. Then next_id is not 1,
    -- because the last full pass has read many pages.
    if greatest(s.first_due_at, s.first_check_at) > '-infinity' and date_trunc('hour', s.recorded_at) <> date_trunc('hour', at)
        or (
            s.settled_id < fresh_from_id - 1
            or pgqueue._first_possible_id(s) < least(s.settled_id + 1, fresh_from_id) or next_id <> 1
        )
        and (
            -- After a short full pass there is little to skip, so ids are recorded less often. In a queue that shares
            -- the server with many others almost every claim sweeps, and recording would be most of the cost.
            at - s.recorded_at
                not between interval '0' and case
                    when next_id = 1 then interval '30 s'
                    when fresh_from_id - s.bound_id between 1000 and 1000000000000 then interval '100 ms'
                    else interval '1 s'
                end
            -- The writers of a long wait have ended: record at once.
            or s.writers <> '{}' and s.recorded_at > s.bound_at and not s.writers && pgqueue._running_writers()
        )
    then
        if pgqueue._record_vacant_ids(q, at, fresh_from_id) then
            -- A long write transaction may have left messages anywhere above the head: start there again.
            perform setval(q.sweep_resume_id, 1);
        end if;
        select sweep_state.* into s from pgqueue.sweep_state where sweep_state.queue_name = q.name;
    end if;
    return s;
end;
$$;

create or replace function pgqueue._end_sweep(
    q pgqueue.queues, at timestamptz, has_enough boolean, spent_ids bigint[], resume_id bigint
) returns void
language plpgsql volatile as $$
declare
    has_more boolean := false;
begin
    perform setval(q.sweep_resume_id, greatest(resume_id, 1));
    -- Ready messages come first. What is left here is removed by later sweeps.
    if spent_ids <> '{}' then
        select r.has_more into has_more from pgqueue._remove_spent_messages(q, spent_ids, at, 8) r;
    end if;
    -- If there may be more messages, the next claim continues the sweep at once.
    perform setval(q.next_sweep_at, case when has_more or has_enough then 1 else pgqueue._to_micros(
        pgqueue._now() + least(greatest(interval '50 ms', 20 * (pgqueue._now() - at)), interval '500 ms')) end);
end;
$$;

-- Makes one sweep below fresh_from_id: appends to taken the ids of ready messages, locked, until there are wanted ids,
-- and sets the time of the next sweep. If fewer were found, that is after 20 times the duration of this sweep, at least
-- 50 ms and at most 500 ms, as messages that commit late wait for it; else at once.
create or replace function pgqueue._sweep(
    q pgqueue.queues, taken bigint[], at timestamptz, wanted int, fresh_from_id bigint
) returns bigint[] language plpgsql volatile as $$
declare
    s pgqueue.sweep_state;
    -- Where there can be messages that claims have passed: ids or, in a queue with priorities, positions.
    possible int8multirange;
    head_id bigint;
    next_id bigint;
    start_id bigint;
    end_id bigint := fresh_from_id;
    started_at timestamptz;
    candidate_ids bigint[] := taken;
    id_range int8range;
    span bigint;
    below_id bigint;
    page record;
    spent_ids bigint[] := '{}'::bigint[];
    is_far_below_fresh boolean;
    is_full boolean := false;
    pages_before bigint;
begin
    -- For 50 ms, concurrent claims do not start another sweep.
    perform setval(q.next_sweep_at, pgqueue._to_micros(at + interval '50 ms')), pgqueue._do_periodic_work(q, at);
    s := pgqueue._state_for_sweep(q, at, fresh_from_id);
    if s.queue_name is null then
        return candidate_ids;
    end if;
    next_id := pgqueue._register_value(q.sweep_resume_id);
    started_at := pgqueue._now();
    pages_before := pgqueue._pages_read(q);
    -- From where the last sweep stopped up to fresh_from_id, and then from the head to that place: a full pass.
    if q.priorities then
        possible := pgqueue._passed_levels(q, coalesce(s.first_id, 1));
        head_id := coalesce(lower(possible), 1);
    else
        head_id := pgqueue._first_possible_id(s);
        possible := int8multirange(int8range(head_id, greatest(head_id, fresh_from_id))) - s.vacant_ids;
    end if;
    next_id := case when next_id >= head_id and next_id < fresh_from_id then next_id else head_id end;
    is_far_below_fresh := not q.priorities and next_id < fresh_from_id - 4096;
    if is_far_below_fresh and cardinality(candidate_ids) < wanted then
        -- The full pass takes long. Messages of transactions that have just rolled back or committed are found here.
        candidate_ids := candidate_ids || pgqueue._sweep_recent(
            q, candidate_ids, at, wanted - cardinality(candidate_ids), fresh_from_id, 4096);
    end if;
    start_id := next_id;
    <<round>>
    loop
        -- In a queue with priorities what comes back has its place beyond those that claims have passed.
        if next_id = head_id and cardinality(candidate_ids) < wanted and not q.priorities then
            candidate_ids := candidate_ids || pgqueue._sweep_requeued(
                q, candidate_ids, at, wanted - cardinality(candidate_ids),
                pgqueue._discard_future_time(s.first_check_at, at));
            if cardinality(candidate_ids) < wanted then
                candidate_ids := candidate_ids || pgqueue._move_due_messages(
                    q, at, wanted - cardinality(candidate_ids), pgqueue._discard_future_time(s.first_due_at, at));
            end if;
        end if;
        for id_range in
            select r from unnest(possible * int8multirange(int8range(next_id, greatest(next_id, end_id)))) as r
        loop
            next_id := lower(id_range);
            span := 1024;
            while next_id < upper(id_range) loop
                exit round when cardinality(candidate_ids) >= wanted;
                below_id := next_id + least(span, upper(id_range) - next_id);
                select r.* into page from pgqueue._read_messages(q, next_id, below_id, at, 1000, q.priorities) r;
                next_id := coalesce(page.ids[1000] + 1, below_id);
                span := case when page.ids[1000] is null then pgqueue._next_span(span) else span end;
                spent_ids := spent_ids || page.spent_ids;
                if page.ready_ids is not null then
                    candidate_ids := candidate_ids || pgqueue._lock_ready(
                        q, page.ready_ids, candidate_ids, at, wanted - cardinality(candidate_ids));
                    if cardinality(candidate_ids) >= wanted then
                        -- The next sweep continues here.
                        next_id := case when q.priorities then page.ids[1] else candidate_ids[cardinality(candidate_ids)] + 1 end;
                    end if;
                end if;
                exit round when pgqueue._now() > started_at + interval '10 ms';
            end loop;
        end loop;
        is_full := end_id < fresh_from_id or start_id = head_id;
        exit round when is_full or cardinality(candidate_ids) >= wanted;
        next_id := head_id;
        end_id := start_id;
    end loop;
    if cardinality(candidate_ids) < wanted and not is_full and not is_far_below_fresh then
        candidate_ids := candidate_ids || pgqueue._sweep_recent(
            q, candidate_ids, at, wanted - cardinality(candidate_ids), fresh_from_id, 4096);
    end if;
    -- 1 if the full pass read few pages: the next sweep starts at the head, and needs no new record. After each full
    -- pass of a queue with priorities the next sweep starts with the highest one.
    perform pgqueue._end_sweep(q, at, cardinality(candidate_ids) >= wanted, spent_ids, case
        when cardinality(candidate_ids) >= wanted
            or not (q.priorities and is_full) and pgqueue._pages_read(q) - pages_before > 50
            then next_id else 1 end);
    return candidate_ids;
end;
$$;
