-- What a claim meets when it starts at the head: claims that ran out, claims rolled back, messages that
-- committed late, what came due, what spent its attempts, what expired. The walk goes on where the last
-- one stopped and stays within a budget, so that a pile of dead rows slows nobody down.

create or replace function pgqueue._running_writers()
returns text[]
language sql volatile
as $$
    select array(
        select distinct l.virtualtransaction
        from pg_catalog.pg_locks l
        where l.locktype = 'relation' and l.mode = 'RowExclusiveLock' and l.granted
            and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database())
            and (
                l.relation = 'pgqueue.messages'::regclass
                or l.relation in (
                    select i.inhrelid from pg_catalog.pg_inherits i where i.inhparent = 'pgqueue.messages'::regclass
                )
            )
    )
$$;
comment on function pgqueue._running_writers() is
'The transactions that have written to messages and run: prepared ones too, through the parent or straight into a partition.';

create or replace function pgqueue._promote_due(q pgqueue.queues, at timestamptz, wanted int, since timestamptz)
returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    picks bigint[] := '{}'::bigint[];
    next_due_at timestamptz;
    next_due bigint;
begin
    select s.due_at into next_due_at
    from pgqueue.scheduled_messages s
    where s.queue_name = q.name and s.due_at >= since
    order by s.due_at limit 1;
    if next_due_at <= at then
        begin
            -- By ctid, as there is an index besides the key that a plan could choose, to read all of the queue by it.
            with due as (
                delete from pgqueue.scheduled_messages s
                where s.ctid = any (array(
                    select c.ctid from pgqueue.scheduled_messages c
                    where c.queue_name = q.name and c.due_at >= since and c.due_at <= at
                    order by c.due_at, c.id limit wanted for update skip locked))
                returning s.*
            ),
            noted as (
                insert into pgqueue.requeued_messages (queue_name, check_at, id)
                select q.name, at, d.id from due d
            ),
            moved as (
                insert into pgqueue.messages (
                    id, queue_name, enqueued_at, visible_at, attempt_count, max_attempts, expires_at, message_id,
                    payload, body, headers, claimed_by, last_error, transport_headers
                )
                select
                    d.id, q.name, d.enqueued_at, d.due_at, d.attempt_count, d.max_attempts, d.expires_at, d.message_id,
                    d.payload, d.body, d.headers, d.claimed_by, d.last_error, d.transport_headers
                from due d
                returning messages.id, messages.expires_at
            )
            -- What expired meanwhile is moved, for the sweep to bury, but not handed out.
            select coalesce(array_agg(m.id) filter (where coalesce(m.expires_at > at, true)), '{}') into picks from moved m;
        exception when disk_full then
            -- What is ready is handed out all the same: to acknowledge it takes no room, and makes some.
            perform setval(q.first_due_at, pgqueue._to_micros(at + interval '1 s'));
            return '{}'::bigint[];
        end;

        select s.due_at into next_due_at
        from pgqueue.scheduled_messages s
        where s.queue_name = q.name and s.due_at >= since
        order by s.due_at limit 1;
    end if;
    next_due := coalesce(pgqueue._to_micros(next_due_at), 9223372036854775807);
    if next_due is distinct from pg_sequence_last_value(q.first_due_at) then
        perform setval(q.first_due_at, next_due);
    end if;
    return picks;
end;
$$;
comment on function pgqueue._promote_due(pgqueue.queues, timestamptz, int, timestamptz) is
'Moves up to wanted scheduled messages that are due back into messages and returns their ids. Every one is noted in requeued_messages: its id may lie where no walk comes by any more.';

create or replace function pgqueue._dead_letter_spent(q pgqueue.queues, ids bigint[], at timestamptz)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    spent_ids constant bigint[] := array(
        select m.id from pgqueue.messages m, pgqueue._lookup_keys(q.name, ids) k
        where pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id) and m.visible_at <= at
            and (m.attempt_count >= m.max_attempts or m.expires_at <= at)
        for update of m skip locked);
begin
    if spent_ids = '{}' then
        return;
    end if;
    begin
        with gone as (
            delete from pgqueue.messages m
            using pgqueue._lookup_keys(q.name, spent_ids) k
            where pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
            returning m
        )
        insert into pgqueue.dead_messages
        select (pgqueue._as_dead_letter(g.m, at, null)).* from gone g where pgqueue._keeps_spent(q, g.m)
        -- As in _add_dead_letter.
        on conflict on constraint dead_messages_pkey do update
        set died_at = excluded.died_at, attempt_count = excluded.attempt_count, headers = excluded.headers,
            last_error = excluded.last_error, reason = excluded.reason;
    exception when disk_full then
        -- They wait for a later sweep, and stand in nobody's way.
        null;
    end;
end;
$$;
comment on function pgqueue._dead_letter_spent(pgqueue.queues, bigint[], timestamptz) is
'Removes those of the messages that are not claimed and have spent their attempts or expired, to the dead letters where the queue wants that.';

create or replace function pgqueue._lock_ready(
    q pgqueue.queues, ids bigint[], taken bigint[], at timestamptz, wanted int
)
returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    return array(
        select m.id from pgqueue.messages m, pgqueue._lookup_keys(q.name, ids) k
        where pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id) and m.id <> all (taken) and pgqueue._is_ready(m, at)
        -- By id, as the index is asked for the ids in their order; to say so would cost a sort.
        limit wanted for update of m skip locked
    );
end;
$$;
comment on function pgqueue._lock_ready(pgqueue.queues, bigint[], bigint[], timestamptz, int) is
'Locks up to wanted of the messages that are ready, not held by another and not taken already, and returns their ids.';

create or replace function pgqueue._prune_requeued(q pgqueue.queues, watched bigint[], seen_at timestamptz)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    -- A row here was written together with its message. If this one snapshot shows the row but not
    -- the message, the message has left for good, or come back again with a row of its own.
    -- (An array rather than a join, which could be planned to read the whole queue.)
    delete from pgqueue.requeued_messages r
    where r.ctid = any (array(
        select c.ctid from pgqueue.requeued_messages c
        where c.queue_name = q.name and c.check_at <= seen_at and c.id = any (watched)
            and c.id <> all (array(
                select m.id from pgqueue.messages m, pgqueue._lookup_keys(q.name, watched) k
                where pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)))
        order by c.check_at, c.id limit 1000 for update skip locked));
end;
$$;
comment on function pgqueue._prune_requeued(pgqueue.queues, bigint[], timestamptz) is
'Removes from requeued_messages those of the messages noted up to a moment that have left.';

create or replace function pgqueue._sweep_requeued(q pgqueue.queues, taken bigint[], at timestamptz, wanted int)
returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    picks bigint[] := '{}'::bigint[];
    seen_at timestamptz := '-infinity'::timestamptz;
    seen_id bigint := -9223372036854775808;
    watched bigint[];
    ready bigint[];
begin
    -- Page by page, as another transaction may hold any number of them for long.
    loop
        select array_agg(w.id), (array_agg(w.check_at))[count(*)], (array_agg(w.id))[count(*)]
        into watched, seen_at, seen_id
        from (
            select r.check_at, r.id from pgqueue.requeued_messages r
            where r.queue_name = q.name and (r.check_at, r.id) > (seen_at, seen_id)
            order by r.check_at, r.id limit 1000
        ) w;
        exit when watched is null;
        perform pgqueue._prune_requeued(q, watched, seen_at);
        ready := array(
            select distinct m.id from pgqueue.messages m, pgqueue._lookup_keys(q.name, watched) k
            where pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id) and m.visible_at <= at);
        if ready <> '{}' then
            perform pgqueue._dead_letter_spent(q, ready, at);
            picks := picks || pgqueue._lock_ready(q, ready, taken || picks, at, wanted - cardinality(picks));
        end if;
        exit when cardinality(watched) < 1000 or cardinality(picks) >= wanted
            or pgqueue._now() > at + interval '50 ms';
    end loop;
    return picks;
end;
$$;
comment on function pgqueue._sweep_requeued(pgqueue.queues, bigint[], timestamptz, int) is
'Looks at the messages that came back from scheduled_messages: buries what is spent, forgets what has left, returns up to wanted ids that are ready again, locked.';

create or replace function pgqueue._first_possible_id(s pgqueue.sweep_state)
returns bigint
language sql immutable parallel safe
-- Where the first of the ranges ends. Without a query of its own it becomes part of who asks.
as $$
    select coalesce(
        lower(int8multirange(int8range(lower(s.vacant_ids), upper(s.vacant_ids))) - s.vacant_ids), upper(s.vacant_ids)
    )
$$;
comment on function pgqueue._first_possible_id(pgqueue.sweep_state) is
'The lowest id at which a message may live, those in requeued_messages aside.';

create or replace function pgqueue._first_possible_id_of(queue_name text)
returns bigint
language sql stable
as $$
    select coalesce(
        (
            select pgqueue._first_possible_id(s) from pgqueue.sweep_state s
            where s.queue_name = _first_possible_id_of.queue_name
        ), 1)
$$;
comment on function pgqueue._first_possible_id_of(text) is
'The lowest id at which a message of the queue may live, those in requeued_messages aside; 1 where nothing is known.';

create or replace function pgqueue._widest_ranges(ids int8multirange)
returns int8multirange
language sql immutable parallel safe
as $$
    -- Enough to skip what is worth skipping, few enough to be read by every sweep.
    select range_agg(w.r)
    from (
        select r from unnest(ids) as r
        order by lower_inf(r) desc, upper(r) - lower(r) desc
        limit 64
    ) w
$$;
comment on function pgqueue._widest_ranges(int8multirange) is
'The first and the 63 widest of the ranges.';

create or replace function pgqueue._record_vacant_ids(q pgqueue.queues, at timestamptz, fresh bigint)
returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    s pgqueue.sweep_state;
    bound bigint;
    writers text[];
    waited boolean := false;
    stretch int8range;
    from_id bigint;
    below_id bigint;
    span bigint := 4096;
    live bigint[];
begin
    -- A snapshot that is older than the look at the writers proves nothing.
    if pgqueue._has_fixed_snapshot() then
        return false;
    end if;
    select sweep_state.* into s from pgqueue.sweep_state where sweep_state.queue_name = q.name for update skip locked;
    if not found then
        return false;
    end if;

    -- What a snapshot shows as empty stays empty only below an id that no running transaction may have
    -- taken: ids are taken before they are committed. So the sequence is read first, then who is writing;
    -- once all of those have ended, every id up to that reading is decided, and what was decided to be a
    -- message is visible to the statements below.
    bound := coalesce(pg_sequence_last_value('pgqueue.message_id'), 0);
    writers := pgqueue._running_writers();
    -- A prepared transaction gets another name when the server restarts: one of that kind which was not
    -- noted may be any of those that were.
    s.writers := s.writers || array(
        select w from unnest(writers) as w where w like '-1/%' and w <> all (s.writers));
    if not s.writers && writers then
        -- One of them was still there at a look in between.
        waited := s.recorded_at > s.bound_at;
        s.settled_id := s.bound_id;
        s.bound_id := bound;
        s.writers := writers;
        s.bound_at := at;
    end if;

    <<walk>>
    for stretch in
        select r
        from unnest(
            int8multirange(int8range(pgqueue._first_possible_id(s), greatest(pgqueue._first_possible_id(s), least(s.settled_id + 1, fresh)))) - s.vacant_ids
        ) as r
    loop
        from_id := lower(stretch);
        while from_id < upper(stretch) loop
            exit walk when pgqueue._now() > at + interval '40 ms';
            below_id := least(from_id + span, upper(stretch));
            live := array(
                select m.id from pgqueue.messages m
                where m.queue_name = q.name and m.id >= from_id and m.id < below_id
                order by m.id limit 1000);
            -- Nothing to be learnt where messages lie close.
            exit walk when cardinality(live) = 1000;
            s.vacant_ids := s.vacant_ids + (
                int8multirange(int8range(from_id, below_id))
                - coalesce((select range_agg(int8range(l, l, '[]')) from unnest(live) as l), '{}')
            );
            from_id := below_id;
            -- Steps may be many: what doubles with each must end before bigint does.
            span := least(span * 2, 1099511627776);
        end loop;
    end loop;

    begin
        update pgqueue.sweep_state
        set vacant_ids = pgqueue._widest_ranges(s.vacant_ids), settled_id = s.settled_id, bound_id = s.bound_id,
            writers = s.writers, bound_at = s.bound_at, recorded_at = at
        where sweep_state.queue_name = q.name;
    exception when disk_full then
        return false;
    end;
    return waited;
end;
$$;
comment on function pgqueue._record_vacant_ids(pgqueue.queues, timestamptz, bigint) is
'Learns at which ids below fresh no message can appear any more, for sweeps to skip. True if that had to wait for a transaction that wrote for long.';

create or replace function pgqueue._sweep(
    q pgqueue.queues, taken bigint[], at timestamptz, wanted int, fresh bigint
)
returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    s pgqueue.sweep_state;
    head bigint;
    pos bigint := pgqueue._register_value(q.sweep_resume_id);
    start bigint;
    goal bigint;
    started_at timestamptz;
    picks bigint[] := taken;
    stretch int8range;
    span bigint := 1024;
    below_id bigint;
    live bigint[];
    ready bigint[];
    is_quick boolean;
begin
    -- Who comes by while this sweep is at it leaves it alone.
    perform setval(q.next_sweep_at, pgqueue._to_micros(at + interval '50 ms'));
    -- Once an hour, in one sweep of any queue. A moment further ahead was set while the clock was ahead.
    if coalesce(pg_sequence_last_value('pgqueue.next_housekeeping_at') - pgqueue._to_micros(at), 0) not between 1 and 3600000000
    then
        perform pgqueue._do_housekeeping(at);
    end if;

    select sweep_state.* into s from pgqueue.sweep_state where sweep_state.queue_name = q.name;
    if not found then
        -- Somebody has deleted it: nothing is known, so everything is walked again.
        insert into pgqueue.sweep_state (queue_name) values (q.name) on conflict do nothing returning * into s;
        if not found then
            return picks;
        end if;
    end if;
    if (s.settled_id < fresh - 1 or pgqueue._first_possible_id(s) < least(s.settled_id + 1, fresh))
        and (
            -- Where the last round was quick there is little to be skipped: a queue that many others share the
            -- machine with is swept by almost every claim, and learning would be most of what that costs.
            at - s.recorded_at not between interval '0' and case pos when 1 then interval '30 s' else interval '1 s' end
            -- Somebody writes for long: the end is noticed at once.
            or s.writers <> '{}' and s.recorded_at > s.bound_at and not s.writers && pgqueue._running_writers()
        )
    then
        if pgqueue._record_vacant_ids(q, at, fresh) then
            -- One that wrote for long may have left messages anywhere above the head: start over there.
            pos := 0;
        end if;
        select sweep_state.* into s from pgqueue.sweep_state where sweep_state.queue_name = q.name;
    end if;

    started_at := pgqueue._now();
    -- A full round from where the last sweep stopped, unless the messages suffice or the time runs out first.
    head := pgqueue._first_possible_id(s);
    if pos < head or pos >= fresh then
        pos := head;
    end if;
    if pos < fresh - 4096 and cardinality(picks) < wanted then
        -- Where a round takes long, as somebody writes for long, it must not be waited for by what is only a little late.
        ready := array(
            select m.id from pgqueue.messages m
            where m.queue_name = q.name and m.id >= fresh - 4096 and m.id < fresh and m.visible_at <= at
            order by m.id limit 1000);
        if ready <> '{}' then
            perform pgqueue._dead_letter_spent(q, ready, at);
            picks := picks || pgqueue._lock_ready(q, ready, picks, at, wanted - cardinality(picks));
        end if;
    end if;
    start := pos;
    goal := fresh;
    <<round>>
    loop
        if pos = head then
            picks := picks || pgqueue._sweep_requeued(q, picks, at, wanted - cardinality(picks));
            if cardinality(picks) < wanted then
                picks := picks || pgqueue._promote_due(q, at, wanted - cardinality(picks), '-infinity');
            end if;
        end if;
        for stretch in select r from unnest(int8multirange(int8range(pos, greatest(pos, goal))) - s.vacant_ids) as r loop
            pos := lower(stretch);
            while pos < upper(stretch) loop
                exit round when cardinality(picks) >= wanted;
                below_id := least(pos + span, upper(stretch));
                select array_agg(w.id), array_agg(w.id) filter (where w.visible_at <= at) into live, ready
                from (
                    select m.id, m.visible_at from pgqueue.messages m
                    where m.queue_name = q.name and m.id >= pos and m.id < below_id
                    order by m.id limit 1000
                ) w;
                if cardinality(live) = 1000 then
                    below_id := live[1000] + 1;
                else
                    span := least(span * 2, 1099511627776);
                end if;
                pos := below_id;
                if ready is not null then
                    perform pgqueue._dead_letter_spent(q, ready, at);
                    picks := picks || pgqueue._lock_ready(q, ready, picks, at, wanted - cardinality(picks));
                    if cardinality(picks) >= wanted then
                        -- Where the next sweep goes on.
                        pos := picks[cardinality(picks)] + 1;
                    end if;
                end if;
                exit round when pgqueue._now() > started_at + interval '10 ms';
            end loop;
        end loop;
        exit round when goal < fresh or start = head or cardinality(picks) >= wanted;
        pos := head;
        goal := start;
    end loop;

    -- At 1 where the whole round was quick: the next one may as well begin at the head.
    is_quick := cardinality(picks) < wanted and pgqueue._now() < started_at + interval '500 us';
    perform setval(q.sweep_resume_id, case when is_quick then 1 else greatest(pos, 1) end);
    if cardinality(picks) >= wanted then
        -- There may be more: the next claim goes on from here.
        perform setval(q.next_sweep_at, 1);
    else
        perform setval(q.next_sweep_at, pgqueue._to_micros(
            pgqueue._now() + least(greatest(interval '50 ms', 20 * (pgqueue._now() - at)), interval '500 ms')));
    end if;
    return picks;
end;
$$;
comment on function pgqueue._sweep(pgqueue.queues, bigint[], timestamptz, int, bigint) is
'One sweep below fresh: adds ids of messages that are ready, locked, to those taken, until they are wanted many, and says when the next sweep is due: 20 times what this one cost, at least 50 ms and at most 500 ms later, as what commits late waits for it.';
