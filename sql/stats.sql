-- Reports the depth of queues at a bounded cost: up to 10,000 messages are counted; more are estimated from samples at
-- even distances, and the result names the estimated figures. Samples are read first, so that only a queue of moderate
-- depth is counted beyond 300 messages.

create or replace function pgqueue._sample_ranges(ids int8multirange)
returns table (from_id bigint, below_id bigint, stands_for bigint) language sql immutable as $$
    -- About 16 strata of equal width. A quarter of each is read, at a different place in each, so that clusters of
    -- messages are neither always hit nor always missed.
    with id_ranges as (
        select lower(r) as from_id, upper(r) as below_id,
            least(upper(r) - lower(r), ceil(16.0 * (upper(r) - lower(r)) / sum(upper(r) - lower(r)) over ())) as parts
        from unnest(ids) as r
    ),
    strata as (
        select
            s.from_id + floor((s.below_id - s.from_id) * (n - 1) / s.parts)::bigint as from_id,
            s.from_id + floor((s.below_id - s.from_id) * n / s.parts)::bigint as below_id,
            row_number() over () * 0.618034 % 1 as place
        from id_ranges s cross join lateral generate_series(1, s.parts) as n
    )
    select
        t.from_id + floor((t.below_id - t.from_id) * 0.75 * t.place)::bigint,
        t.from_id + floor((t.below_id - t.from_id) * 0.75 * t.place)::bigint + ceil((t.below_id - t.from_id) * 0.25)::bigint,
        t.below_id - t.from_id
    from strata t
$$;

create or replace function pgqueue._count_rows(q pgqueue.queues, at timestamptz, ids int8multirange, wanted int)
returns table (
    n bigint, first_id bigint, last_id bigint, ready bigint, inflight bigint, scheduled bigint, dead bigint,
    oldest_at timestamptz
)
language sql stable as $$
    -- Inlined. dead are the messages that the next sweep moves to the dead letters.
    select
        count(*), min(w.id), max(w.id),
        count(*) filter (where w.is_ready),
        count(*) filter (where w.visible_at > at and w.attempt_count > 0),
        count(*) filter (where w.visible_at > at and w.attempt_count = 0),
        count(*) filter (where w.is_dead),
        min(w.enqueued_at) filter (where w.is_ready)
    from (
        select c.*
        from unnest(ids) as r
        cross join lateral (
            select
                m.id, m.visible_at, m.attempt_count, m.enqueued_at,
                pgqueue._is_ready(m, at) as is_ready,
                m.visible_at <= at and not pgqueue._is_ready(m, at) and pgqueue._keeps_dead_letter(q, m) as is_dead
            from pgqueue.messages m
            where (m.kind = q.kind or m.kind is null) and m.queue_name = q.name and m.id >= lower(r) and m.id < upper(r)
            order by m.id limit wanted
        ) c
        limit wanted
    ) w
$$;

-- Counts up to 10,000 rows, and estimates beyond. Messages that came back to ids that sweeps skip are not counted.
create or replace function pgqueue._message_stats(
    q pgqueue.queues, at timestamptz, out ready bigint, out inflight bigint, out scheduled bigint, out dead bigint,
    out oldest_at timestamptz, out estimated boolean
)
language plpgsql stable as $$
declare
    ids constant int8multirange := (select range_agg(r) from pgqueue._possible_ranges(q.name, 1, 9223372036854775807) r);
    max_counted int;
    n bigint;
    lowest_id bigint;
    last_id bigint;
    fresh_from_id bigint;
    sampled_ids int8multirange;
    deep_samples bigint;
begin
    foreach max_counted in array array[300, 10000] loop
        select c.n, c.first_id, c.ready, c.inflight, c.scheduled, c.dead, c.oldest_at
        into n, lowest_id, ready, inflight, scheduled, dead, oldest_at
        from pgqueue._count_rows(q, at, ids, max_counted + 1) c;
        -- Only a deep queue is locked: locks of thousands of queues would fill the lock table.
        estimated := n > max_counted and pgqueue._try_lock_existing_queue(q);
        exit when not estimated;
        fresh_from_id := coalesce(pg_sequence_last_value(q.fresh_from_id), 1);

        select m.id into last_id
        from (select r from unnest(ids) as r order by lower(r) desc) d
        cross join lateral (
            select c.id from pgqueue.messages c
            where (c.kind = q.kind or c.kind is null) and c.queue_name = q.name and c.id >= lower(d.r) and c.id < upper(d.r)
            order by c.id desc limit 1
        ) m
        limit 1;
        sampled_ids := ids * int8multirange(int8range(lowest_id, last_id, '[]'));
        -- The samples are split at fresh_from_id: messages in flight lie below it, ready ones mostly above.
        select
            sum(p.weight * p.ready), sum(p.weight * p.inflight), sum(p.weight * p.scheduled), sum(p.weight * p.dead),
            least(_message_stats.oldest_at, min(p.oldest_at)), count(*) filter (where p.weight * p.n > 10000 / 16)
        into ready, inflight, scheduled, dead, oldest_at, deep_samples
        from (
            select * from pgqueue._sample_ranges(sampled_ids * int8multirange(int8range(null, fresh_from_id)))
            union all
            select * from pgqueue._sample_ranges(sampled_ids * int8multirange(int8range(fresh_from_id, null)))
        ) t
        cross join lateral (
            select
                c.*,
                -- A sample of fewer than 16 messages was read completely, another one up to last_id.
                t.stands_for::numeric / case when c.n < 16 then t.below_id - t.from_id else c.last_id - t.from_id + 1 end as weight
            from pgqueue._count_rows(q, at, int8multirange(int8range(t.from_id, t.below_id)), 16) c
        ) p;
        -- Samples of messages that lie in groups of ids with gaps between them can be several times too high, and a
        -- single sample that begins in such a group any number of times.
        exit when deep_samples >= 4 and ready + inflight + scheduled + dead > 4 * 10000;
    end loop;
end;
$$;

create or replace function pgqueue._other_ids(
    queue_name text, are_dead boolean, from_id bigint, below_id bigint, wanted int
) returns table (id bigint)
language sql stable as $$
    -- Inlined. One of the two is not executed.
    (
        select d.id from pgqueue.dead_messages d
        where are_dead and d.queue_name = _other_ids.queue_name and d.id >= from_id and d.id < below_id
        order by d.id limit wanted
    )
    union all
    (
        select s.id from pgqueue.scheduled_messages s
        where not are_dead and s.queue_name = _other_ids.queue_name and s.id >= from_id and s.id < below_id
        order by s.id limit wanted
    )
$$;

create or replace function pgqueue._count_others(
    queue_name text, are_dead boolean, out messages bigint, out estimated boolean
)
language plpgsql stable as $$
declare
    first_id constant bigint := (pgqueue._sweep_state_of(queue_name, '-infinity')).first_id;
    max_counted int;
    deep_samples bigint;
begin
    foreach max_counted in array array[300, 10000] loop
        select count(*) into messages from pgqueue._other_ids(queue_name, are_dead, first_id, 9223372036854775807, max_counted + 1);
        estimated := messages > max_counted;
        exit when not estimated;
        select sum(p.weight * p.n), count(*) filter (where p.weight * p.n > 10000 / 16) into messages, deep_samples
        from pgqueue._sample_ranges(int8multirange(int8range(
            (select o.id from pgqueue._other_ids(queue_name, are_dead, first_id, 9223372036854775807, 1) o),
            case when are_dead
                then (select max(d.id) from pgqueue.dead_messages d where d.queue_name = _count_others.queue_name)
                else (select max(s.id) from pgqueue.scheduled_messages s where s.queue_name = _count_others.queue_name)
            end,
            '[]'))) t
        cross join lateral (
            select
                count(*) as n,
                t.stands_for::numeric / case when count(*) < 16 then t.below_id - t.from_id else max(w.id) - t.from_id + 1 end as weight
            from pgqueue._other_ids(queue_name, are_dead, t.from_id, t.below_id, 16) w
        ) p;
        exit when deep_samples >= 4 and messages > 4 * 10000;
    end loop;
end;
$$;

-- The statistics of one queue. Stable, so that all queries use one snapshot and no message is missed while it moves
-- between two tables.
create or replace function pgqueue._stats(q pgqueue.queues, at timestamptz) returns pgqueue.queue_stats
language plpgsql stable as $$
declare
    scheduled constant record := pgqueue._count_others(q.name, false);
    dead constant record := pgqueue._count_others(q.name, true);
    counted record := pgqueue._message_stats(q, at);
    requeued_ids int8multirange;
    stand_for bigint;
    due bigint;
    due_oldest_at timestamptz;
    result pgqueue.queue_stats;
begin
    -- Messages that came back to ids that sweeps skip.
    select (select range_agg(int8range(i, i, '[]')) from unnest(r.ids) as i), r.stand_for into requeued_ids, stand_for
    from pgqueue._sample_requeued_ids(
        q.name, (select s.vacant_ids from pgqueue.sweep_state s where s.queue_name = q.name), at, 10000) r
    where exists (
        select from pgqueue.requeued_messages c
        where c.queue_name = q.name and c.check_at >= (pgqueue._sweep_state_of(q.name, at)).first_check_at
    );
    if requeued_ids is not null then
        select
            counted.ready + stand_for * r.ready as ready, counted.inflight + stand_for * r.inflight as inflight,
            counted.scheduled + stand_for * r.scheduled as scheduled, counted.dead + stand_for * r.dead as dead,
            least(counted.oldest_at, r.oldest_at) as oldest_at, counted.estimated or stand_for > 1 as estimated
        into counted
        from pgqueue._count_rows(q, at, requeued_ids, 10000) r;
    end if;
    -- Scheduled messages that are due count as ready: the next claim moves them to messages.
    select count(*), min(w.enqueued_at) into due, due_oldest_at
    from (
        select c.enqueued_at from pgqueue.scheduled_messages c
        where c.queue_name = q.name and c.due_at >= (pgqueue._sweep_state_of(q.name, at)).first_due_at and c.due_at <= at
            and coalesce(c.expires_at > at, true)
        order by c.due_at limit 10000
    ) w;
    if due = 10000 and scheduled.estimated then
        -- Due messages are counted up to 10,000 only. Beyond, all scheduled messages are assumed to be due.
        due := greatest(due, scheduled.messages);
    end if;
    result.queue_name := q.name;
    result.ready_messages := counted.ready + due;
    result.inflight_messages := counted.inflight;
    result.scheduled_messages := counted.scheduled + greatest(scheduled.messages - due, 0);
    result.dead_messages := dead.messages + counted.dead;
    result.oldest_age_seconds := date_part('epoch', at - nullif(least(counted.oldest_at, due_oldest_at), '-infinity'));
    result.paused := q.paused_at is not null;
    result.estimates := array_remove(array[
        case when counted.estimated or due > 10000 then 'ready_messages' end,
        case when counted.estimated then 'inflight_messages' end,
        case when counted.estimated or scheduled.estimated then 'scheduled_messages' end,
        case when dead.estimated or counted.estimated and counted.dead > 0 then 'dead_messages' end,
        case when counted.estimated then 'oldest_age_seconds' end
    ], null);
    return result;
end;
$$;

create or replace function pgqueue._stats_and_record(q pgqueue.queues, at timestamptz, is_only boolean)
returns pgqueue.queue_stats
language plpgsql volatile as $$
declare
    pages_before bigint;
    s pgqueue.queue_stats;
begin
    if is_only then
        -- It reads registers, whose locks the transaction keeps.
        perform pgqueue._record_if_old(q, true);
    end if;
    pages_before := pgqueue._pages_read(q);
    s := pgqueue._stats(q, at);
    if pgqueue._pages_read(q) - pages_before
        > 50 + 2 * (s.ready_messages + s.inflight_messages + s.scheduled_messages + s.dead_messages)
    then
        perform pgqueue._record_if_old(q);
    end if;
    return s;
end;
$$;

-- Raises 55P03 or 42P01 while the queue is being dropped.
create or replace function pgqueue._add_totals(s pgqueue.queue_stats) returns pgqueue.queue_stats
language plpgsql volatile set lock_timeout = '100 ms' as $$
begin
    -- pg_sequence_last_value would keep its lock until the end of the transaction, also if a subtransaction rolls back.
    execute format('select %s', (
        select string_agg(
            case when c is null then 'null' else format('(select t.last_value - (not t.is_called)::int from %s t)', c) end,
            ', ' order by r.place)
        from unnest(pgqueue._counter_roles()) with ordinality as r (role, place), pgqueue._counter(r.role, s.queue_name) as c))
    into s.enqueued_total, s.acknowledged_total, s.failed_total, s.dead_total;
    return s;
end;
$$;

create or replace function pgqueue.stats(
    queue_name pgqueue.queue_of_any_access default null, caller pgqueue.caller default current_user
) returns setof pgqueue.queue_stats
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q pgqueue.queues;
    s pgqueue.queue_stats;
begin
    if queue_name is not null then
        q := pgqueue._get_locked_queue(queue_name);
    else
        perform pgqueue._require_untruncated_messages();
    end if;
    -- _stats is stable: without the locks, a table looks empty if a compaction ends between its snapshot and its read.
    lock table pgqueue.messages, pgqueue.scheduled_messages, pgqueue.dead_messages, pgqueue.requeued_messages,
        pgqueue.sweep_state in access share mode;
    if q.name is not null then
        return next pgqueue._add_totals(pgqueue._stats_and_record(q, at, true));
        return;
    end if;
    for q in select queues.* from pgqueue.queues order by queues.name loop
        continue when not pgqueue._may_use(caller, q.name, pgqueue._privileges_of('{producer,consumer,admin,raw,reader}'));
        -- The snapshot can be older than a drop_queue or a change of kind. The catalog shows the current state.
        if pg_relation_filenode(q.fresh_from_id) is null then
            select queues.* into q from pgqueue.queues where queues.queue_id = q.queue_id;
            if pg_relation_filenode(q.fresh_from_id) is null then
                continue when to_regclass(format('pgqueue.queue_%s_fresh_from_id', q.queue_id)) is null;
                perform pgqueue._raise('stale_snapshot', format('queue %L', q.name));
            end if;
        end if;
        s := pgqueue._stats_and_record(q, at, false);
        begin
            s := pgqueue._add_totals(s);
            -- Only an error releases the locks of the counters before the transaction ends. Locks of thousands of
            -- queues would fill the lock table.
            perform pgqueue._raise('queue_busy', q.name, 'stats');
        exception
            when sqlstate 'PQ004' then
                return next s;
            when lock_not_available or undefined_table then
                -- The queue is being dropped.
                null;
        end;
    end loop;
end;
$$;
comment on function pgqueue.stats is
'Returns the depth of one queue or, if queue_name is null, of every queue, by name: the numbers of ready, in-flight,
scheduled and dead messages, the age of the oldest ready message in seconds since it was sent (null if none is ready),
and whether the queue is paused. Ready messages include those that a claim does not return yet, because they wait for
others of their groups (group_limit) or because max_in_flight or rate_limit holds. If group_limit is 1, the in-flight
messages include those of a group that wait for their retry. A message without attempts left counts as dead as soon as
its last claim has ended, also while no claim has moved it to the dead letters yet. In a queue without dead letters no
figure includes it, and the next claim or sweep_queue deletes it. Up to 10,000 messages of a kind are counted. Higher
figures are estimated from samples and named in estimates, so that the cost stays bounded. The totals count since the
queue was created and never decrease: enqueued_total the messages that the functions sent, acknowledged_total those that
ack, exchange, receive and streams removed, failed_total the failed attempts that nack, reject, record_failure and
stream_skip reported, and dead_total the messages that became dead letters. Work that is rolled back stays counted, and
a crash or failover can add up to 32 to a total. Plain SQL on the tables is not counted. A queue that another
transaction is dropping is left out of the statistics of all queues. Raises PQ001, 40001.';
