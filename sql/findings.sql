-- What doctor finds in one queue, and the statement that repairs it. A limit around each lookup by id prevents a plan
-- that reads all messages of the queue instead.

create or replace function pgqueue._has_index(partition regclass, keys text) returns boolean
language sql stable as $$
    select exists (
        select from pg_catalog.pg_index x
        where x.indrelid = partition and x.indisvalid
            and position(format('(%s', keys) in pg_catalog.pg_get_indexdef(x.indexrelid)) > 0
    )
$$;

-- With such ids the other findings would be wrong.
create or replace function pgqueue._ids_above_sequence(q pgqueue.queues) returns setof pgqueue.finding
language plpgsql volatile as $$
declare
    top_id bigint;
    near_id bigint;
    last_id bigint;
    reach_id bigint;
begin
    -- Only ids above the sequence are read: a scan from the highest id would read rows that were removed. The sequence
    -- is read again afterwards, as messages may be sent in between.
    select t.last_value - (not t.is_called)::int into last_id from pgqueue.message_id t;
    top_id := greatest(
        (select max(m.id) from pgqueue.messages m where m.queue_name = q.name and m.id > last_id),
        (select max(c.id) from pgqueue.scheduled_messages c where c.queue_name = q.name and c.id > last_id),
        (select max(d.id) from pgqueue.dead_messages d where d.queue_name = q.name and d.id > last_id),
        (select w.settled_id from pgqueue.sweep_state w where w.queue_name = q.name));
    select t.last_value - (not t.is_called)::int into last_id from pgqueue.message_id t;
    if top_id is null or top_id <= last_id then
        return;
    end if;
    -- The sequence was set back, for example by a restore of the tables alone, or ids were set by hand. The repair
    -- moves the sequence beyond these ids, unless the ids would soon run out.
    reach_id := last_id + least(1000000000000, 9223372036854775807 - last_id);
    near_id := greatest(
        (select max(m.id) from pgqueue.messages m where m.queue_name = q.name and m.id <= reach_id),
        (select max(c.id) from pgqueue.scheduled_messages c where c.queue_name = q.name and c.id <= reach_id),
        (select max(d.id) from pgqueue.dead_messages d where d.queue_name = q.name and d.id <= reach_id),
        (select w.settled_id from pgqueue.sweep_state w where w.queue_name = q.name));
    return next row('error', q.name, 'ids_above_sequence',
        format('the queue has used the id %s, which the sequence pgqueue.message_id has not reached: messages sent now are found late or never, claims may fail, and an enqueue fails if it gets the id of another message', top_id),
        case when near_id > last_id then
            format('select setval(''pgqueue.message_id'', greatest(%s, pg_sequence_last_value(''pgqueue.message_id'')));', near_id)
        else format(
            'update pgqueue.messages set id = nextval(''pgqueue.message_id'') where queue_name = %1$L and id > %2$s;'
            ' update pgqueue.scheduled_messages set id = nextval(''pgqueue.message_id'') where queue_name = %1$L and id > %2$s;'
            ' update pgqueue.dead_messages set id = nextval(''pgqueue.message_id'') where queue_name = %1$L and id > %2$s;'
            ' select setval(%3$L, greatest(1, min(id))) from pgqueue.messages where queue_name = %1$L;',
            q.name, last_id, q.fresh_from_id)
        end)::pgqueue.finding;
end;
$$;

create or replace function pgqueue._id_findings(q pgqueue.queues, at timestamptz) returns setof pgqueue.finding
language sql volatile as $$
    select
        'error', q.name, 'twin_messages',
        format('a message and a scheduled message have the same id, for %s, the first is %s: claims fail when the scheduled one comes due',
            pgqueue._with_number(count(*), 'id'), min(m.id)),
        format(
            'update pgqueue.scheduled_messages s set id = nextval(''pgqueue.message_id'') from pgqueue.messages m'
            ' where s.queue_name = %L and m.queue_name = s.queue_name and m.id = s.id;', q.name)
    from (
        select c.id from pgqueue.scheduled_messages c
        where c.queue_name = q.name and c.due_at >= (pgqueue._sweep_state_of(q.name, at)).first_due_at
        order by c.due_at, c.id limit 1000
    ) d
    cross join lateral (
        select c.id from pgqueue.messages c
        where (c.kind = q.kind or c.kind is null) and c.queue_name = q.name and c.id = d.id
        limit 1
    ) m
    having count(*) > 0
    union all
    -- Partitions of the right kind are pruned. So are messages without a kind, which claims adopt.
    select
        'error', q.name, 'wrong_kind',
        format('message %s, the first of these, has a kind that plain SQL has set and the queue does not have: no claim finds it', m.id),
        format(
            'with moved as (update pgqueue.messages m set kind = q.kind from pgqueue.queues q where q.name = %L'
            ' and m.queue_name = q.name and m.kind <> coalesce(q.kind, -1) returning m.queue_name, m.id),'
            ' listed as (insert into pgqueue.requeued_messages (queue_name, check_at, id)'
            ' select v.queue_name, timestamptz ''now'', v.id from moved v)'
            ' update pgqueue.sweep_state s set first_id = least(s.first_id, %s) where s.queue_name = %1$L;', q.name, m.id)
    from (
        select c.id from pgqueue.messages c
        where c.queue_name = q.name and c.kind <> coalesce(q.kind, -1)
        order by c.id limit 1
    ) m
$$;

-- What up to 1,000 messages that came back, the first ones up to 2,000 in all, and the last 1,000 scheduled ones show.
-- lapsed, lapsed_at: claims that ended over a minute ago. shortest: the shortest time to live. ahead_until,
-- delayed_until: until when claims and delays last that were made while the clock was ahead. seen_at: the last time
-- that the clock has shown. hidden_ids: messages hidden for longer than backoff_max with group_limit. grouped_id,
-- ranked_id: the first messages with a group and with a priority that have no effect.
create or replace function pgqueue._examine_messages(
    q pgqueue.queues, at timestamptz, out lapsed bigint, out lapsed_at timestamptz, out shortest interval,
    out ahead_until timestamptz, out delayed_until timestamptz, out claimed_since timestamptz, out hidden_ids bigint[],
    out seen_at timestamptz, out grouped_id bigint, out ranked_id bigint
)
language plpgsql volatile as $$
begin
    select
        count(*) filter (where w.visible_at <= at - interval '1 min' and w.attempt_count > 0),
        min(w.visible_at) filter (
            where w.visible_at <= at - interval '1 min' and w.attempt_count > 0 and isfinite(w.visible_at)),
        min(w.expires_at - w.enqueued_at) filter (where isfinite(w.expires_at) and isfinite(w.enqueued_at)),
        max(w.visible_at) filter (
            where isfinite(w.visible_at) and w.visible_at > at and (
                at + interval '1 min' < case w.attempt_count when 0 then w.enqueued_at else w.claimed_at end
                -- A claim by plain SQL sets no claimed_at. No claim lasts longer than 12 hours.
                or w.claimed_attempt is distinct from w.attempt_count and w.visible_at > at + interval '12 h 1 min'
                and w.attempt_count > 0)),
        min(w.claimed_at) filter (
            where w.visible_at > at and w.claimed_attempt = w.attempt_count and not w.is_unclaimed
                and w.claimed_at < at - greatest(10 * q.visibility_timeout, '1 h')),
        array_agg(w.id) filter (
            where q.group_limit is not null and w.visible_at > pgqueue._add_interval(at, q.backoff_max + interval '1 min')
                -- Released or redriven while the clock was ahead, or waiting for a retry.
                and (w.attempt_count = 0 and w.enqueued_at <= at + interval '1 min'
                    or q.group_limit = 1 and (w.is_unclaimed or not isfinite(w.visible_at)))),
        max(greatest(w.enqueued_at, w.claimed_at)) filter (where isfinite(w.enqueued_at)),
        min(w.id) filter (where q.group_limit is null and w.headers ->> 'pgqueue.group' is not null),
        min(w.id) filter (where not q.priorities and w.headers ->> 'pgqueue.priority' is not null)
    into lapsed, lapsed_at, shortest, ahead_until, claimed_since, hidden_ids, seen_at, grouped_id, ranked_id
    from (
        select c.*
        from (
            -- Messages that came back can have ids that the possible ranges skip.
            select int8range(i, i, '[]') as ids
            from pgqueue._sample_requeued_ids(
                q.name, (select w.vacant_ids from pgqueue.sweep_state w where w.queue_name = q.name), at, 1000) as s
            cross join lateral unnest(s.ids) as i
            union all
            select p from pgqueue._possible_ranges(q.name, 1, 9223372036854775807) as p
        ) r
        cross join lateral (
            -- Not the whole row: its payload and body would be read from the toast table.
            select
                m.id, m.visible_at, m.attempt_count, m.claimed_attempt, m.expires_at, m.enqueued_at, m.claimed_at,
                m.headers, pgqueue._is_unclaimed(m) as is_unclaimed
            from pgqueue.messages m
            where m.queue_name = q.name and m.id >= lower(r.ids) and m.id < upper(r.ids)
            order by m.id limit 1000
        ) c
        limit 2000
    ) w;
    select
        -- The message of a schedule has its due time as enqueued_at.
        max(w.due_at) filter (where w.enqueued_at > at + interval '1 min' and w.enqueued_at < w.due_at),
        greatest(seen_at, max(w.enqueued_at) filter (where w.enqueued_at < w.due_at and isfinite(w.enqueued_at))),
        least(grouped_id, min(w.id) filter (where q.group_limit is null and w.headers ->> 'pgqueue.group' is not null)),
        least(ranked_id, min(w.id) filter (where not q.priorities and w.headers ->> 'pgqueue.priority' is not null))
    into delayed_until, seen_at, grouped_id, ranked_id
    from (
        select d.id, d.due_at, d.enqueued_at, d.headers from pgqueue.scheduled_messages d
        where d.queue_name = q.name and d.due_at > at
        order by d.due_at desc limit 1000
    ) w;
end;
$$;

create or replace function pgqueue._clock_findings(
    q pgqueue.queues, at timestamptz, ahead_until timestamptz, delayed_until timestamptz, seen_at timestamptz
) returns setof pgqueue.finding
language plpgsql volatile as $$
declare
    late_until timestamptz;
    late_from timestamptz;
    was_ahead boolean;
begin
    -- A returned message does not show that the clock was ahead. Other messages and dead letters do.
    select greatest(seen_at, max(w.died_at) filter (where isfinite(w.died_at))) into seen_at
    from (
        select d.died_at from pgqueue.dead_messages d
        where d.queue_name = q.name and d.id >= (pgqueue._sweep_state_of(q.name, '-infinity')).first_id
        order by d.id limit 1000
    ) w;
    was_ahead := coalesce(seen_at > at + interval '1 min', false);
    late_from := pgqueue._add_interval(at, case when was_ahead then interval '1 min' else q.backoff_max + interval '1 min' end);
    select max(w.due_at) into late_until
    from (
        select d.due_at, d.enqueued_at, d.attempt_count, d.claimed_by from pgqueue.scheduled_messages d
        where d.queue_name = q.name and d.due_at > late_from
        order by d.due_at desc limit 1000
    ) w
    where w.enqueued_at <= at + interval '1 min'
        and (w.attempt_count > 0 or w.claimed_by is not null or was_ahead and w.due_at <= seen_at);
    return query
    select f.severity, q.name, f.finding, f.detail, f.repair
    from (values
        (ahead_until is not null, 'warning', 'clock_ahead',
            format('messages were sent or claimed while the clock was ahead: they cannot be claimed before %s', ahead_until),
            format(
                'update pgqueue.messages set visible_at = %1$L, enqueued_at = least(enqueued_at, %1$L) where queue_name = %2$L and visible_at > %1$L'
                ' and (%3$L < case attempt_count when 0 then enqueued_at else claimed_at end'
                ' or claimed_attempt is distinct from attempt_count and visible_at > %4$L and attempt_count > 0);',
                at, q.name, at + interval '1 min', at + interval '12 h 1 min')),
        (delayed_until is not null, 'warning', 'clock_ahead',
            format('delayed messages were sent while the clock was ahead: they are not due before %s', delayed_until),
            format(
                'update pgqueue.scheduled_messages'
                ' set due_at = greatest(%1$L, clock_timestamp()) + (due_at - enqueued_at), enqueued_at = %1$L'
                ' where queue_name = %2$L and due_at > %1$L and enqueued_at > %3$L and enqueued_at < due_at;',
                at, q.name, at + interval '1 min')),
        (late_until is not null, 'info', 'late_retries',
            case
                when was_ahead then format('messages wait for up to %s: they were returned while the clock was ahead, until %s, or somebody asked for it',
                    late_until - at, seen_at)
                else format('returned messages wait for up to %s, longer than the backoff_max of %s: consumers asked for it, or the clock was ahead',
                    late_until - at, q.backoff_max)
            end,
            format(
                -- An earlier time than that of the statement could be missed (sweep_state.first_due_at).
                'update pgqueue.scheduled_messages set due_at = greatest(%1$L, clock_timestamp()) where queue_name = %2$L and due_at > %3$L'
                ' and enqueued_at <= %4$L and (attempt_count > 0 or claimed_by is not null%5$s); -- if nobody has asked for it',
                at, q.name, late_from, at + interval '1 min',
                case when was_ahead then format(' or due_at <= %L', seen_at) end))
    ) as f (is_found, severity, finding, detail, repair)
    where f.is_found;
end;
$$;

create or replace function pgqueue._register_findings(q pgqueue.queues) returns setof pgqueue.finding
language sql volatile as $$
    select
        'error', q.name, 'missing_registers',
        'the queue was dropped or altered while this database was dumped, so its row does not name its registers: the functions do not find the queue',
        format('update pgqueue.queues set fresh_from_id = fresh_from_id where name = %L;', q.name)
    from pgqueue.queues c
    where c.name = q.name and c.fresh_from_id is distinct from to_regclass(format('pgqueue.queue_%s_fresh_from_id', c.queue_id))
        -- Without the lock, another session could be dropping or altering it now. A fixed snapshot can be older.
        and pg_try_advisory_xact_lock_shared(pgqueue._lock_key(q.name)) and not pgqueue._has_fixed_snapshot()
$$;

create or replace function pgqueue._queue_findings(q pgqueue.queues, at timestamptz, peek_delay interval)
returns setof pgqueue.finding language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off
set enable_sort = off set jit = off as $$
declare
    s pgqueue.queue_stats;
    partition regclass;
    r record;
    missing_counters text[];
    found_by_modules pgqueue.finding[];
begin
    return query select f.* from pgqueue._ids_above_sequence(q) f;
    if found then
        return;
    end if;
    r := pgqueue._examine_messages(q, at);
    s := pgqueue._stats(q, at);
    found_by_modules := array(select f from pgqueue._module_findings(q) f);
    missing_counters := case when q.counters then pgqueue._missing_counters(q.name) else '{}' end;
    partition := case when r.shortest is not null then pgqueue._partition_of(q) end;
    return query
    select f.* from pgqueue._id_findings(q, at) f
    union all
    select f.* from pgqueue._clock_findings(q, at, r.ahead_until, r.delayed_until, r.seen_at) f
    union all
    select f.* from unnest(found_by_modules) f
    union all
    select f.severity, q.name, f.finding, f.detail, f.repair
    from (values
        (r.lapsed > 0 and q.paused_at is null, 'warning', 'stuck_claims',
            format('%s expired, the first %s ago, and no consumer has claimed since',
                pgqueue._with_number(r.lapsed, 'claim'), date_trunc('second', at - r.lapsed_at)),
            'Start a consumer: any claim takes these messages over or removes them.'),
        (r.claimed_since is not null, 'warning', 'long_claims',
            format('messages are in flight, the first claimed and extended for %s: a handler may hang',
                date_trunc('second', at - r.claimed_since)),
            format(
                'select id, claimed_by, enqueued_at from pgqueue.browse(%L, ''inflight'') order by enqueued_at;'
                ' -- restart that consumer; a handler_timeout prevents this', q.name)),
        (missing_counters <> '{}', 'warning', 'missing_counter',
            format('the queue has no sequence for these counters: %s; stats returns null for their totals', array_to_string(missing_counters, ', ')),
            format('select pgqueue.alter_queue(%L);', q.name)),
        (q.paused_at is not null, 'info', 'paused_queue',
            format('paused since %s, %s ready', q.paused_at, pgqueue._with_number(s.ready_messages, 'message')),
            format('select pgqueue.resume_queue(%L);', q.name)),
        (s.dead_messages > 0, 'info', 'dead_messages',
            pgqueue._with_number(s.dead_messages, 'dead letter'),
            format('select * from pgqueue.browse_dead_messages(%L);', q.name)),
        (r.grouped_id is not null, 'info', 'unused_group_keys',
            format('messages have a group_key, the first is %s, and the queue has no group_limit: messages of a group are delivered together', r.grouped_id),
            format('select pgqueue.alter_queue(%L, group_limit => 1); -- or send them without group_key', q.name)),
        (r.ranked_id is not null, 'info', 'unused_priorities',
            format('messages have a priority, the first is %s, and the queue has no priorities: they are delivered in the order of their ids', r.ranked_id),
            format('select pgqueue.alter_queue(%L, priorities => true); -- or send them without priority', q.name)),
        (r.shortest < peek_delay, 'warning', 'peek_delay_above_time_to_live',
            format('messages expire after as little as %s, but consumers poll every %s', r.shortest, peek_delay),
            format('Let consumers poll more often than every %s.', r.shortest)),
        -- A room that needs another index reports that one instead.
        (partition is not null and not pgqueue._has_index(partition, 'queue_name, expires_at')
            and not pgqueue._has_index(partition, '(expires_at AT TIME ZONE ''UTC''::text)')
            and not exists (select from unnest(found_by_modules) f where f.finding = 'missing_index'),
            'warning', 'missing_index',
            format('messages expire, and %s has no index on expires_at: purge_expired reads the whole queue', partition),
            format('create index concurrently on %s (queue_name, expires_at) where expires_at is not null;', partition))
    ) as f (is_found, severity, finding, detail, repair)
    where f.is_found
    union all
    (
        select
            case when w.holds then 'warning' else 'info' end, q.name, case when w.holds then 'held_group' else 'late_retries' end,
            case when w.holds
                then format('group %L waits for message %s, which is hidden until %s', left(m.headers ->> 'pgqueue.group', 255), m.id, m.visible_at)
                else format('message %s is hidden until %s: somebody asked for it, or the clock was ahead', m.id, m.visible_at) end,
            format('update pgqueue.messages set visible_at = %L where queue_name = %L and id = %s; -- %s', at, q.name, m.id,
                case when w.holds then 'or delete the message' else 'if nobody has asked for it' end)
        from unnest(r.hidden_ids) as hidden_id
        cross join lateral (select c.* from pgqueue.messages c where c.queue_name = q.name and c.id = hidden_id limit 1) m
        cross join lateral (
            select q.group_limit = 1 and exists (
                select from pgqueue.messages c
                where pgqueue._is_in_queue(c, q.kind, q.name) and c.id > m.id
                    and pgqueue._group_position(c.headers, c.id) = pgqueue._group_position(m.headers, m.id)
            ) as holds
        ) w
        where w.holds or m.attempt_count = 0 and m.enqueued_at <= at + interval '1 min'
        order by w.holds desc, m.id limit 10
    )
    union all
    select
        'warning', q.name, 'long_writer',
        format('a transaction that writes to pgqueue.messages has been open for more than %s; until it ends, sweeps read the ids of all messages consumed since',
            date_trunc('second', at - w.bound_at)),
        'select pid, virtualtransaction from pg_locks where relation = ''pgqueue.messages''::regclass;'
    from pgqueue.sweep_state w
    where w.queue_name = q.name and at - w.bound_at > interval '1 min' and w.writers && pgqueue._running_writers();
end;
$$;
