-- Message groups. At most group_limit messages of a group are in flight at a time, in the order of their ids. Whether a
-- group is blocked is read from the rows of its messages whenever a claim looks at it. So nothing has to be kept up to
-- date when a message leaves, by whatever statement, and no group can stay blocked by mistake.
-- The table of such queues has two more indexes, which list the messages by queue and group.

-- Where a message stands in the order in which claims visit a queue with groups: its id if it has no group, and from
-- 4611686018427387904 (2^62) on a hash of the group. Two groups with the same hash count as one. Inlined.
create or replace function pgqueue._group_position(headers jsonb, id bigint) returns bigint
language sql immutable parallel safe as $$
    select coalesce(
        (hashtextextended(headers ->> 'pgqueue.group', 0) & 4611686018427387902) + 4611686018427387904, id)
$$;

create or replace function pgqueue._is_in_group(
    m pgqueue.messages, kind bigint, name text, place bigint, first_id bigint
) returns boolean
language sql immutable parallel safe as $$
    select pgqueue._is_in_queue(m, kind, name) and pgqueue._group_position(m.headers, m.id) = place and m.id + 0 >= first_id
$$;

-- How many of the places are left, exact if they are fewer than wanted. claimed_ids are the claimed messages, also
-- those whose claims have ended. Such a message takes a place while another transaction has locked its row: it may have
-- extended the claim before the end. An extension that locks the row later finds the claim ended. The caller holds the
-- lock of the limit.
create or replace function pgqueue._places_left(
    q pgqueue.queues, places int, claimed_ids bigint[], at timestamptz, wanted int
) returns int
language plpgsql volatile as $$
declare
    ended_ids bigint[];
begin
    places := places - cardinality(claimed_ids);
    if places >= wanted then
        return places;
    end if;
    ended_ids := array(
        select m.id from pgqueue.messages m, pgqueue._lookup_keys(q.name, claimed_ids) k
        where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id) and m.visible_at <= at);
    if ended_ids <> '{}' then
        begin
            places := places + (
                select count(*)
                from (
                    select from pgqueue.messages m, pgqueue._lookup_keys(q.name, ended_ids) k
                    where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id) and m.visible_at <= at
                    limit wanted - places for update of m skip locked
                ) l
            );
            -- Only an error releases the locks before the transaction ends, which may take long.
            perform pgqueue._raise('queue_busy', q.name, 'claim');
        exception when sqlstate 'PQ004' then
            null;
        end;
    end if;
    return greatest(0, places);
end;
$$;

-- Locks up to wanted messages of the groups at these positions, whose locks the caller holds, and returns the ready
-- ones and the first spent one of each. The claim removes the latter, and then looks again.
create or replace function pgqueue._claim_groups(
    q pgqueue.queues, at timestamptz, positions bigint[], first_id bigint, wanted int,
    out ids bigint[], out spent_ids bigint[]
)
language plpgsql volatile as $$
begin
    -- What was committed after the walk can be in flight, or can be the first message.
    select coalesce(array_agg(g.id) filter (where g.is_ready), '{}'), array_agg(g.id) filter (where not g.is_ready)
    into ids, spent_ids
    from (
        select m.id, m.is_ready
        from unnest(positions) as p (place)
        cross join lateral (
            select array(
                select c.id from pgqueue.messages c
                where pgqueue._is_in_group(c, q.kind, q.name, p.place, first_id) and c.attempt_count > 0
                    and (c.visible_at > at or not pgqueue._is_unclaimed(c))
            ) as ids,
            -- With a limit of one, no message passes the first one, also if another transaction has locked it.
            case q.group_limit
                when 1 then (
                    select c.id from pgqueue.messages c
                    where pgqueue._is_in_group(c, q.kind, q.name, p.place, first_id) limit 1
                )
                else 9223372036854775807
            end as last_id
            offset 0
        ) claimed
        cross join lateral (
            select w.id, w.is_ready, count(*) filter (where not w.is_ready) over (rows unbounded preceding) as spent
            from (
                select c.id, pgqueue._is_ready(c, at) as is_ready from pgqueue.messages c
                where pgqueue._is_in_group(c, q.kind, q.name, p.place, first_id) and c.id + 0 <= claimed.last_id
                    and c.visible_at <= at
                limit case claimed.ids
                    when '{}' then q.group_limit
                    else pgqueue._places_left(q, q.group_limit, claimed.ids, at, q.group_limit)
                end
                for update skip locked
            ) w
        ) m
        where case when m.is_ready
            -- What has no attempts left holds the later ones like the dead letter that it will be.
            then not (q.on_dead = 'hold' and (m.spent > 0 or pgqueue._has_group_dead_letter(q.name, p.place)))
            -- One for each group: the claim reads the group from there on.
            else m.spent = 1 end
        limit wanted
    ) g;
end;
$$;

create or replace function pgqueue._has_group_dead_letter(queue_name text, place bigint) returns boolean
language sql stable as $$
    select exists (
        select from pgqueue.dead_messages d
        where d.queue_name = _has_group_dead_letter.queue_name and d.headers ->> 'pgqueue.group' is not null
            and pgqueue._group_position(d.headers, d.id) = place
    )
$$;

create or replace function pgqueue._claim_ungrouped(q pgqueue.queues, at timestamptz, wanted int, also_below boolean)
returns bigint[] language plpgsql volatile as $$
declare
    fresh_from_id bigint := pgqueue._register_value(q.fresh_from_id);
    first_id constant bigint := (pgqueue._sweep_state_of(q.name, '-infinity')).first_id;
    candidate_ids bigint[];
    visible_ids bigint[];
begin
    candidate_ids := array(
        select m.id from pgqueue.messages m
        where pgqueue._is_in_queue(m, q.kind, q.name) and pgqueue._group_position(m.headers, m.id) >= fresh_from_id
            and pgqueue._group_position(m.headers, m.id) < 4611686018427387904
            and (pgqueue._is_ready(m, at) or m.visible_at <= at and pgqueue._is_walk_over(at))
        limit wanted for update skip locked
    );
    if candidate_ids <> '{}' then
        perform setval(q.fresh_from_id, candidate_ids[cardinality(candidate_ids)] + 1);
    end if;
    if pgqueue._is_walk_over(at) then
        candidate_ids := pgqueue._lock_ready(q, candidate_ids, '{}', at, wanted);
    end if;
    if also_below or cardinality(candidate_ids) < wanted then
        visible_ids := array(
            select m.id from pgqueue.messages m
            where pgqueue._is_in_queue(m, q.kind, q.name) and pgqueue._group_position(m.headers, m.id) >= first_id
                and pgqueue._group_position(m.headers, m.id) < 4611686018427387904
                and m.visible_at <= at and m.id <> all (candidate_ids)
            limit greatest(1000, wanted)
        );
        if visible_ids <> '{}' then
            candidate_ids := candidate_ids || pgqueue._lock_ready(
                q, visible_ids, candidate_ids, at, wanted - cardinality(candidate_ids));
            -- Each maintenance sets the register back, so a claim without time removes a slice.
            perform pgqueue._remove_spent_messages(q, visible_ids, at, case when not pgqueue._is_walk_over(at) then 8 end);
        end if;
    end if;
    return candidate_ids;
end;
$$;

create or replace function pgqueue._maintain_groups(q pgqueue.queues, at timestamptz) returns void
language plpgsql volatile as $$
declare
    state constant pgqueue.sweep_state := pgqueue._sweep_state_of(q.name, at);
begin
    perform setval(q.next_sweep_at, pgqueue._to_micros(at + interval '500 ms'));
    perform pgqueue._do_periodic_work(q, at);
    perform pgqueue._sweep_other_tables(q, state, at);
    -- If there is no message without a group, claims look for one only after they have looked for others.
    perform setval(q.fresh_from_id, coalesce(
        (
            select m.id from pgqueue.messages m
            where pgqueue._is_in_queue(m, q.kind, q.name) and pgqueue._group_position(m.headers, m.id) >= state.first_id
                and pgqueue._group_position(m.headers, m.id) < 4611686018427387904
            limit 1
        ), 4611686018427387904));
end;
$$;

-- Visits the groups from one position to another and locks up to wanted of those that have visible messages. Returns
-- the locked ones, and where to go on; null at the end.
create or replace function pgqueue._walk_groups(
    q pgqueue.queues, at timestamptz, from_position bigint, below_position bigint, first_id bigint, wanted int,
    out locked bigint[], out next_position bigint
)
language plpgsql volatile as $$
declare
    -- With a higher limit each step counts the messages in flight, so a walk has fewer steps: between two walks the
    -- claim looks at the clock.
    most_steps constant int := case q.group_limit when 1 then 500 else 100 end;
begin
    -- With a limit of one, each step of the walk is one search of the index, so a group costs the same however many
    -- messages it has. A group whose first message is not visible is blocked. The lock keeps two claims from
    -- taking two messages of a group, as neither sees what the other has not committed. A group that another
    -- transaction has locked waits for its next turn.
    if q.group_limit = 1 and q.on_dead <> 'hold' then
        -- The second statement does the same, but a claim of one message takes a twentieth longer with it.
        with recursive walk as (
            select 0 as n, from_position - 1 as position, false as is_locked, 0 as found
            union all
            select w.n + 1, s.position, h.is_locked, w.found + h.is_locked::int
            from walk w
            cross join lateral (
                select pgqueue._group_position(m.headers, m.id) as position, m.visible_at <= at as is_visible
                from pgqueue.messages m
                where pgqueue._is_in_queue(m, q.kind, q.name)
                    and pgqueue._group_position(m.headers, m.id) > w.position
                    and pgqueue._group_position(m.headers, m.id) < below_position
                    -- PostgreSQL compares it in the index, so no row that was removed before is read.
                    and m.id + 0 >= first_id
                limit 1
            ) s
            cross join lateral (
                -- The lock of a group that gives no message would keep others from it until the transaction ends.
                select case when s.is_visible
                    then pg_try_advisory_xact_lock(hashint8extended(s.position, q.queue_id)) else false end as is_locked
                offset 0
            ) h
            where w.found < wanted and w.n < most_steps
        )
        select
            array_agg(w.position) filter (where w.is_locked),
            case when max(w.found) >= wanted or max(w.n) >= most_steps then max(w.position) + 1 end
        into locked, next_position
        from walk w;
        return;
    end if;
    with recursive walk as (
        select 0 as n, from_position - 1 as position, false as is_locked, 0 as found
        union all
        select w.n + 1, s.position, h.is_locked, w.found + h.is_locked::int
        from walk w
        cross join lateral (
            select
                pgqueue._group_position(m.headers, m.id) as position, m.visible_at <= at as is_visible, pgqueue._is_ready(m, at) as is_ready
            from pgqueue.messages m
            where pgqueue._is_in_queue(m, q.kind, q.name)
                and pgqueue._group_position(m.headers, m.id) > w.position
                and pgqueue._group_position(m.headers, m.id) < below_position and m.id + 0 >= first_id
            limit 1
        ) s
        cross join lateral (
            -- Of a group that waits for a dead letter, spent messages are removed: at its start, or claimed before.
            select case
                when case when q.group_limit = 1 then s.is_visible else
                        q.group_limit > (
                            select count(*)
                            from (
                                select from pgqueue.messages c
                                where pgqueue._is_in_group(c, q.kind, q.name, s.position, first_id)
                                    and c.attempt_count > 0 and c.visible_at > at
                                limit q.group_limit
                            ) f
                        )
                        and (s.is_visible or (
                            select true from pgqueue.messages c
                            where pgqueue._is_in_group(c, q.kind, q.name, s.position, first_id) and c.visible_at <= at
                            limit 1
                        ) is not null)
                    end
                    and not (q.on_dead = 'hold' and s.is_visible = s.is_ready
                        and pgqueue._has_group_dead_letter(q.name, s.position)
                        and (q.group_limit = 1 or (
                            select true from pgqueue.messages c
                            where pgqueue._is_in_group(c, q.kind, q.name, s.position, first_id)
                                and c.attempt_count > 0 and c.visible_at <= at and not pgqueue._is_ready(c, at)
                            limit 1
                        ) is null))
                then pg_try_advisory_xact_lock(hashint8extended(s.position, q.queue_id)) else false end as is_locked
            offset 0
        ) h
        where w.found < wanted and w.n < most_steps
    )
    select
        array_agg(w.position) filter (where w.is_locked),
        case when max(w.found) >= wanted or max(w.n) >= most_steps then max(w.position) + 1 end
    into locked, next_position
    from walk w;
end;
$$;

create or replace function pgqueue._remove_spent_of_groups(q pgqueue.queues, ids bigint[], at timestamptz) returns int
language plpgsql volatile as $$
begin
    -- Their groups can have many more.
    return (pgqueue._remove_spent_messages(q, array(
        select distinct s.id
        from pgqueue._lookup_keys(q.name, _remove_spent_of_groups.ids) k, pgqueue.messages m
        cross join lateral (
            select c.id, c.visible_at <= at and not pgqueue._is_ready(c, at) as is_spent from pgqueue.messages c
            where pgqueue._is_in_group(c, q.kind, q.name, pgqueue._group_position(m.headers, m.id), m.id)
            limit 100
        ) s
        where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id) and s.is_spent
    ), at, 8)).removed;
end;
$$;

create or replace function pgqueue._claim_candidates_grouped(q pgqueue.queues, at timestamptz, wanted int)
returns bigint[] language plpgsql volatile as $$
declare
    now_micros constant bigint := pgqueue._to_micros(at);
    first_due constant bigint := pgqueue._register_value(q.first_due_at);
    is_maintenance_due boolean :=
        pgqueue._register_value(q.next_sweep_at) - now_micros not between 1 and 15000000;
    -- Half of the claims look for messages without a group first, so that both kinds of messages are claimed.
    ungrouped_first constant boolean :=
        pgqueue._register_value(q.fresh_from_id) < 4611686018427387904 and random() < 0.5;
    first_position constant bigint := 4611686018427387904;
    started_from constant bigint := greatest(pgqueue._register_value(q.sweep_resume_id), first_position);
    from_position bigint := started_from;
    below_position bigint := 9223372036854775807;
    first_id constant bigint := (pgqueue._sweep_state_of(q.name, '-infinity')).first_id;
    locks_left int := 100;
    walk record;
    given record;
    spent_ids bigint[] := '{}'::bigint[];
    walks int := 0;
    candidate_ids bigint[] := '{}'::bigint[];
    due_ids bigint[];
    ungrouped_ids bigint[];
begin
    if first_due <= now_micros then
        -- Moved messages stay in messages while their groups are blocked.
        due_ids := pgqueue._move_due_messages(q, at, greatest(wanted, 20), pgqueue._from_micros(first_due - 1));
        -- A claim whose time is over leaves the maintenance to the next one, as in _claim_candidates.
        is_maintenance_due := is_maintenance_due and (due_ids = '{}' or pgqueue._has_time());
    end if;
    if is_maintenance_due then
        perform pgqueue._maintain_groups(q, at);
    end if;
    if ungrouped_first then
        candidate_ids := pgqueue._claim_ungrouped(q, at, wanted, is_maintenance_due);
    end if;
    ungrouped_ids := candidate_ids;
    while cardinality(candidate_ids) < wanted and locks_left > 0 loop
        walk := pgqueue._walk_groups(
            q, at, from_position, below_position, first_id, least(wanted - cardinality(candidate_ids), locks_left));
        if walk.locked is not null then
            -- The statements below see what the last holders of the groups have committed, if the snapshot is new.
            if pgqueue._has_fixed_snapshot() then
                perform pgqueue._require_current_snapshot(format('queue %L', q.name));
            end if;
            locks_left := locks_left - cardinality(walk.locked);
            given := pgqueue._claim_groups(q, at, walk.locked, first_id, wanted - cardinality(candidate_ids));
            candidate_ids := candidate_ids || given.ids;
            spent_ids := spent_ids || given.spent_ids;
        end if;
        from_position := walk.next_position;
        if from_position is null and (below_position = started_from or started_from = first_position) then
            -- No group has a ready message. The successors of removed ones may be ready.
            exit when candidate_ids <> ungrouped_ids or spent_ids = '{}'
                or pgqueue._remove_spent_of_groups(q, spent_ids, at) = 0;
            spent_ids := '{}';
            from_position := started_from;
            below_position := 9223372036854775807;
        elsif from_position is null then
            from_position := first_position;
            below_position := started_from;
        end if;
        -- A claim that was delayed, or that began behind the last group, walks a second time.
        walks := walks + 1;
        exit when walks > 1 and pgqueue._now() > at + interval '20 ms';
    end loop;
    if spent_ids <> '{}' then
        perform pgqueue._remove_spent_of_groups(q, spent_ids, at);
    end if;
    -- The next claim continues after the last group that this claim has visited, so that all groups are visited.
    if from_position is distinct from started_from then
        from_position := setval(q.sweep_resume_id, coalesce(from_position, first_position));
    end if;
    if cardinality(candidate_ids) < wanted and not ungrouped_first then
        candidate_ids := candidate_ids || pgqueue._claim_ungrouped(
            q, at, wanted - cardinality(candidate_ids), is_maintenance_due);
    end if;
    return candidate_ids;
end;
$$;
