-- Finds problems, and for each the statement that repairs it.

create or replace function pgqueue.version()
returns text
language sql immutable parallel safe security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$ select '0.1.0'::text $$;
comment on function pgqueue.version() is
'Returns the version of the installed functions.';

create or replace function pgqueue._horizon_holders()
returns table (pinned_for interval, holder text, repair text)
language sql stable
as $$
    select
        pgqueue._now() - a.xact_start,
        pg_catalog.format('process %s (%s, %s), transaction open, state: %s, snapshot %s transactions old', a.pid,
            coalesce(a.usename, 'no user'), coalesce(nullif(a.application_name, ''), a.backend_type, 'unknown'),
            coalesce(a.state, 'hidden'), coalesce(age(a.backend_xmin), age(a.backend_xid))),
        pg_catalog.format('select pg_terminate_backend(%s);', a.pid)
    from pg_catalog.pg_stat_activity a
    where (a.backend_xmin is not null or a.backend_xid is not null)
        and a.backend_type is distinct from 'autovacuum worker'
        -- Without pg_read_all_stats the start of a transaction of another role is hidden, and its age is not.
        and (a.xact_start is not null or age(a.backend_xmin) >= 50000)
        and a.pid <> pg_catalog.pg_backend_pid()
        -- Those of other databases do not hold back the vacuum of these tables.
        and (a.datid is null or a.datname = pg_catalog.current_database())
    union all
    select
        pgqueue._now() - p.prepared,
        pg_catalog.format('prepared transaction %L of %s', p.gid, p.owner),
        pg_catalog.format('rollback prepared %L;', p.gid)
    from pg_catalog.pg_prepared_xacts p
    where p.database = pg_catalog.current_database()
    union all
    select
        null,
        case
            when s.active then pg_catalog.format('a query on the standby that uses replication slot %s, snapshot %s transactions old',
                s.slot_name, age(s.xmin))
            else pg_catalog.format('unused replication slot %s holds transaction %s', s.slot_name, s.xmin)
        end,
        case
            when s.active then 'End the long transaction on that standby, or set hot_standby_feedback = off there.'
            else pg_catalog.format('select pg_drop_replication_slot(%L);', s.slot_name)
        end
    from pg_catalog.pg_replication_slots s
    -- A standby in use always holds a recent transaction.
    where s.xmin is not null and (not s.active or age(s.xmin) >= 50000)
$$;
comment on function pgqueue._horizon_holders() is
'What keeps vacuum from removing dead rows: open transactions, prepared transactions, unused replication slots, and
long queries on standbys with hot_standby_feedback.';

create or replace function pgqueue._space_used()
returns text
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set lock_timeout = '100 ms'
as $$
begin
    return format('the tables of pgqueue, without the archive, occupy %s and have about %s', pg_size_pretty(sum(pg_total_relation_size(c.oid))),
        pgqueue._with_number(sum(pg_stat_get_dead_tuples(c.oid))::bigint, 'dead row'))
    from pg_class c
    where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r'
        -- Nothing is deleted from the archive row by row.
        and c.relname !~ '^archived_messages_';
exception when lock_not_available then
    return 'the size of the tables of pgqueue cannot be read, as one of them is locked';
end;
$$;
comment on function pgqueue._space_used() is
'What all tables but the archive occupy, with indexes and toast, and their dead rows by the statistics, as text.';

create or replace function pgqueue._orphaned_messages()
returns table (table_name text, queue_name text)
language sql stable
as $$
    -- One index probe for each gap between the names of two queues, and one for each name found there. A scan over the
    -- rows of a queue would read those that were removed.
    with recursive gaps as (
        select d.name as above, lead(d.name) over (order by d.name) as below from pgqueue.queues d
        union all
        select ''::text collate "C", min(d.name) from pgqueue.queues d
    ),
    names as (
        select t.table_name, g.below, g.above as queue_name, false as is_found
        from gaps g
        cross join unnest(array['messages', 'scheduled_messages', 'dead_messages']) as t (table_name)
        union all
        select n.table_name, n.below, f.queue_name, true
        from names n
        cross join lateral (
            (
                select m.queue_name from pgqueue.messages m
                where n.table_name = 'messages' and m.queue_name > n.queue_name and m.queue_name < n.below
                order by m.queue_name limit 1
            )
            union all
            (
                select m.queue_name from pgqueue.messages m
                where n.table_name = 'messages' and m.queue_name > n.queue_name and n.below is null
                order by m.queue_name limit 1
            )
            union all
            (
                select c.queue_name from pgqueue.scheduled_messages c
                where n.table_name = 'scheduled_messages' and c.queue_name > n.queue_name and c.queue_name < n.below
                order by c.queue_name limit 1
            )
            union all
            (
                select c.queue_name from pgqueue.scheduled_messages c
                where n.table_name = 'scheduled_messages' and c.queue_name > n.queue_name and n.below is null
                order by c.queue_name limit 1
            )
            union all
            (
                select d.queue_name from pgqueue.dead_messages d
                where n.table_name = 'dead_messages' and d.queue_name > n.queue_name and d.queue_name < n.below
                order by d.queue_name limit 1
            )
            union all
            (
                select d.queue_name from pgqueue.dead_messages d
                where n.table_name = 'dead_messages' and d.queue_name > n.queue_name and n.below is null
                order by d.queue_name limit 1
            )
        ) f
    )
    select a.table_name, a.queue_name from names a where a.is_found
$$;
comment on function pgqueue._orphaned_messages() is
'Tables and queue names for which there are messages but no queue: inserted by plain SQL or, for dead letters, left by
drop_queue.';

create or replace function pgqueue._has_index(partition regclass, keys text)
returns boolean
language sql stable
as $$
    select exists (
        select from pg_catalog.pg_index x
        where x.indrelid = partition and x.indisvalid
            and position(format('(%s', keys) in pg_catalog.pg_get_indexdef(x.indexrelid)) > 0
    )
$$;
comment on function pgqueue._has_index(regclass, text) is
'Whether a table has a valid index whose definition begins with these keys.';

create or replace function pgqueue._misplaced_messages()
returns table (queue_name text, id bigint)
language sql stable
as $$
    -- The first message of every range. A message that just came back is recorded in requeued_messages by the same
    -- transaction.
    select s.queue_name, m.id
    from pgqueue.sweep_state s
    cross join lateral unnest(s.vacant_ids) as d
    cross join lateral (
        select c.id from pgqueue.messages c
        where c.queue_name = s.queue_name and c.id >= coalesce(lower(d), 0) and c.id < upper(d)
            and not exists (select from pgqueue.requeued_messages r where r.queue_name = c.queue_name and r.id = c.id)
        order by c.id limit 1
    ) m
$$;
comment on function pgqueue._misplaced_messages() is
'Messages at ids that sweeps skip and that are not recorded in requeued_messages either.';

create or replace function pgqueue._queue_findings(q pgqueue.queues, at timestamptz, peek_delay interval)
returns setof pgqueue.finding
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
declare
    top_id bigint;
    last_id bigint;
    near_id bigint;
    reach_id bigint;
    twins bigint;
    lapsed bigint;
    oldest_at timestamptz;
    shortest interval;
    ahead_until timestamptz;
    late_until timestamptz;
    seen_at timestamptz;
    was_ahead boolean;
    late_from timestamptz;
    grouped_id bigint;
    ranked_id bigint;
    claimed_since timestamptz;
    hidden_ids bigint[];
    found pgqueue.finding[];
    pending text[];
    since timestamptz;
    s pgqueue.queue_stats;
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
    if top_id > last_id then
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
        -- The findings below would be wrong.
        return;
    end if;

    -- Here and below, a limit around each lookup by id prevents a plan that reads all messages of the queue instead.
    select count(*), min(m.id) into twins, top_id
    from (
        select c.id from pgqueue.scheduled_messages c
        where c.queue_name = q.name and c.due_at >= pgqueue._first_due_at_of(q.name, at)
        order by c.due_at, c.id limit 1000
    ) d
    cross join lateral (
        select c.id from pgqueue.messages c
        where c.queue_name = q.name and c.id = d.id
        limit 1
    ) m;
    if twins > 0 then
        return next row('error', q.name, 'twin_messages',
            format('a message and a scheduled message have the same id, for %s, the first is %s: claims fail when the scheduled one comes due', pgqueue._with_number(twins, 'id'), top_id),
            format(
                'update pgqueue.scheduled_messages s set id = nextval(''pgqueue.message_id'') from pgqueue.messages m'
                ' where s.queue_name = %L and m.queue_name = s.queue_name and m.id = s.id;', q.name))::pgqueue.finding;
    end if;

    if q.counters and pgqueue._missing_counters(q.name) <> '{}' then
        return next row('warning', q.name, 'missing_counter',
            format('the queue has no sequence for these counters: %s; stats returns null for their totals',
                array_to_string(pgqueue._missing_counters(q.name), ', ')),
            format('select pgqueue.alter_queue(%L);', q.name))::pgqueue.finding;
    end if;

    s := pgqueue._stats(q, at);
    if q.paused_at is not null then
        return next row('info', q.name, 'paused_queue',
            format('paused since %s, %s ready', q.paused_at, pgqueue._with_number(s.ready_messages, 'message')),
            format('select pgqueue.resume_queue(%L);', q.name))::pgqueue.finding;
    end if;
    if s.dead_messages > 0 then
        return next row('info', q.name, 'dead_messages',
            pgqueue._with_number(s.dead_messages, 'dead letter'),
            format('select * from pgqueue.browse_dead_messages(%L);', q.name))::pgqueue.finding;
    end if;

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
            where q.group_limit = 1 and w.visible_at > pgqueue._add_interval(at, q.backoff_max + interval '1 min')
                and (w.is_unclaimed or not isfinite(w.visible_at))),
        max(greatest(w.enqueued_at, w.claimed_at)) filter (where isfinite(w.enqueued_at)),
        min(w.id) filter (where q.group_limit is null and w.headers ->> 'pgqueue.group' is not null),
        min(w.id) filter (where not q.priorities and w.headers ->> 'pgqueue.priority' is not null)
    into lapsed, oldest_at, shortest, ahead_until, claimed_since, hidden_ids, seen_at, grouped_id, ranked_id
    from (
        (
            select c.*
            from pgqueue._possible_ranges(q.name, pgqueue._first_possible_id_of(q.name), 9223372036854775807) as r
            cross join lateral (
                select
                    m.id, m.visible_at, m.attempt_count, m.claimed_attempt, m.expires_at, m.enqueued_at, m.claimed_at,
                    m.headers, pgqueue._is_unclaimed(m) as is_unclaimed
                from pgqueue.messages m
                where m.queue_name = q.name and m.id >= lower(r) and m.id < upper(r)
                order by m.id limit 1000
            ) c
            limit 1000
        )
        union all
        (
            -- Messages that came back can have ids that the query above skips.
            select c.*
            from pgqueue._sample_requeued_ids(
                q.name, (select w.vacant_ids from pgqueue.sweep_state w where w.queue_name = q.name), at, 1000) as r
            cross join lateral unnest(r.ids) as requeued_id
            cross join lateral (
                select
                    m.id, m.visible_at, m.attempt_count, m.claimed_attempt, m.expires_at, m.enqueued_at, m.claimed_at,
                    m.headers, pgqueue._is_unclaimed(m)
                from pgqueue.messages m
                where m.queue_name = q.name and m.id = requeued_id
                limit 1
            ) c
        )
    ) w;
    if lapsed > 0 and q.paused_at is null then
        return next row('warning', q.name, 'stuck_claims',
            format('%s expired, the first %s ago, and no consumer has claimed since',
                pgqueue._with_number(lapsed, 'claim'), date_trunc('second', at - oldest_at)),
            'Start a consumer: any claim takes these messages over or removes them.')::pgqueue.finding;
    end if;
    if claimed_since is not null then
        return next row('warning', q.name, 'long_claims',
            format('messages are in flight, the first claimed and extended for %s: a handler may hang',
                date_trunc('second', at - claimed_since)),
            format(
                'select id, claimed_by, enqueued_at from pgqueue.browse(%L, ''inflight'') order by enqueued_at;'
                ' -- restart that consumer; a handler_timeout prevents this', q.name))::pgqueue.finding;
    end if;
    if hidden_ids is not null then
        return query
        select
            'warning', q.name, 'held_group',
            format('group %L waits for message %s, which is hidden until %s', left(m.headers ->> 'pgqueue.group', 255), m.id,
                m.visible_at),
            format('update pgqueue.messages set visible_at = %L where queue_name = %L and id = %s; -- or delete the message',
                at, q.name, m.id)
        from unnest(hidden_ids) as hidden_id
        cross join lateral (
            select c.id, c.headers, c.visible_at from pgqueue.messages c
            where c.queue_name = q.name and c.id = hidden_id
            limit 1
        ) m
        where exists (
            select from pgqueue.messages c
            where pgqueue._is_in_queue(c, q.kind, q.name)
                and pgqueue._group_position(c.headers, c.id) = pgqueue._group_position(m.headers, m.id) and c.id > m.id
        )
        order by m.id limit 10;
    end if;
    if ahead_until is not null then
        return next row('warning', q.name, 'clock_ahead',
            format('messages were sent or claimed while the clock was ahead: they cannot be claimed before %s', ahead_until),
            format(
                'update pgqueue.messages set visible_at = %1$L, enqueued_at = least(enqueued_at, %1$L) where queue_name = %2$L and visible_at > %1$L'
                ' and (%3$L < case attempt_count when 0 then enqueued_at else claimed_at end'
                ' or claimed_attempt is distinct from attempt_count and visible_at > %4$L and attempt_count > 0);',
                at, q.name, at + interval '1 min', at + interval '12 h 1 min'))::pgqueue.finding;
    end if;
    select
        -- The message of a schedule has its due time as enqueued_at.
        max(w.due_at) filter (where w.enqueued_at > at + interval '1 min' and w.enqueued_at < w.due_at),
        greatest(seen_at, max(w.enqueued_at) filter (where w.enqueued_at < w.due_at and isfinite(w.enqueued_at))),
        least(grouped_id, min(w.id) filter (where q.group_limit is null and w.headers ->> 'pgqueue.group' is not null)),
        least(ranked_id, min(w.id) filter (where not q.priorities and w.headers ->> 'pgqueue.priority' is not null))
    into ahead_until, seen_at, grouped_id, ranked_id
    from (
        select d.id, d.due_at, d.enqueued_at, d.headers from pgqueue.scheduled_messages d
        where d.queue_name = q.name and d.due_at > at
        order by d.due_at desc limit 1000
    ) w;
    -- A returned message does not show that the clock was ahead. Other messages and dead letters do.
    select greatest(seen_at, max(w.died_at) filter (where isfinite(w.died_at))) into seen_at
    from (
        select d.died_at from pgqueue.dead_messages d
        where d.queue_name = q.name and d.id >= pgqueue._first_id_of(q.name)
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
    if ahead_until is not null then
        return next row('warning', q.name, 'clock_ahead',
            format('delayed messages were sent while the clock was ahead: they are not due before %s', ahead_until),
            format(
                'update pgqueue.scheduled_messages'
                ' set due_at = greatest(%1$L, clock_timestamp()) + (due_at - enqueued_at), enqueued_at = %1$L'
                ' where queue_name = %2$L and due_at > %1$L and enqueued_at > %3$L and enqueued_at < due_at;',
                at, q.name, at + interval '1 min'))::pgqueue.finding;
    end if;
    if late_until is not null then
        return next row('info', q.name, 'late_retries',
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
                case when was_ahead then format(' or due_at <= %L', seen_at) end))::pgqueue.finding;
    end if;
    if grouped_id is not null then
        return next row('info', q.name, 'unused_group_keys',
            format('messages have a group_key, the first is %s, and the queue has no group_limit: messages of a group are delivered together', grouped_id),
            format('select pgqueue.alter_queue(%L, group_limit => 1); -- or send them without group_key', q.name))::pgqueue.finding;
    end if;
    if ranked_id is not null then
        return next row('info', q.name, 'unused_priorities',
            format('messages have a priority, the first is %s, and the queue has no priorities: they are delivered in the order of their ids', ranked_id),
            format('select pgqueue.alter_queue(%L, priorities => true); -- or send them without priority', q.name))::pgqueue.finding;
    end if;
    if shortest < peek_delay then
        return next row('warning', q.name, 'peek_delay_above_time_to_live',
            format('messages expire after as little as %s, but consumers poll every %s', shortest, peek_delay),
            format('Let consumers poll more often than every %s.', shortest))::pgqueue.finding;
    end if;
    found := array(select f from pgqueue._module_findings(q) f);
    -- A room that needs another index reports that one instead.
    if shortest is not null and not pgqueue._has_index(pgqueue._partition_of(q), 'queue_name, expires_at')
        and not pgqueue._has_index(pgqueue._partition_of(q), '(expires_at AT TIME ZONE ''UTC''::text)')
        and not exists (select from unnest(found) f where f.finding = 'missing_index')
    then
        return next row('warning', q.name, 'missing_index',
            format('messages expire, and %s has no index on expires_at: purge_expired reads the whole queue', pgqueue._partition_of(q)),
            format('create index concurrently on %s (queue_name, expires_at) where expires_at is not null;',
                pgqueue._partition_of(q)))::pgqueue.finding;
    end if;

    select w.bound_at, w.writers into since, pending from pgqueue.sweep_state w where w.queue_name = q.name;
    if at - since > interval '1 min' and pending && pgqueue._running_writers() then
        return next row('warning', q.name, 'long_writer',
            format('a transaction that writes to pgqueue.messages has been open for more than %s; until it ends, sweeps read the ids of all messages consumed since',
                date_trunc('second', at - since)),
            'select pid, virtualtransaction from pg_locks where relation = ''pgqueue.messages''::regclass;')::pgqueue.finding;
    end if;
    return query select f.* from unnest(found) f;
end;
$$;
comment on function pgqueue._queue_findings(pgqueue.queues, timestamptz, interval) is
'The findings of doctor about one queue.';

create or replace function pgqueue._installation_findings()
returns setof pgqueue.finding
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    return query
    select
        'warning', null::text, 'pinned_horizon',
        format('%s, for %s: vacuum cannot remove rows deleted or updated since; %s',
            h.holder, coalesce(date_trunc('second', h.pinned_for)::text, 'an unknown time'), pgqueue._space_used()),
        h.repair
    from pgqueue._horizon_holders() h
    where h.pinned_for > interval '1 min' or h.pinned_for is null;

    return query
    select
        case o.table_name when 'dead_messages' then 'info' else 'error' end, n.shown,
        case o.table_name when 'dead_messages' then 'undelivered_messages' else 'orphaned_messages' end,
        format('pgqueue.%s holds messages of queue %L, which does not exist', o.table_name, n.shown),
        case when n.is_valid then format('select pgqueue.create_queue(%L);', o.queue_name)
        else
            format('No queue can have this name. Move the messages to another queue: update pgqueue.%s'
                ' set queue_name = <its name> where md5(queue_name) = %L;', o.table_name, md5(o.queue_name))
        end
    from pgqueue._orphaned_messages() o
    cross join lateral (
        select
            pgqueue._is_name(o.queue_name) as is_valid,
            left(o.queue_name, 128) || case when length(o.queue_name) > 128 then '...' else '' end as shown
    ) n;

    return query
    select
        'error', null::text, 'ids_above_sequence',
        format('a queue has the number %s, which the sequence pgqueue.queue_id has not reached: create_queue fails', max(d.queue_id)),
        format('select setval(''pgqueue.queue_id'', %s);', max(d.queue_id))
    from pgqueue.queues d
    having max(d.queue_id) > (select t.last_value - (not t.is_called)::int from pgqueue.queue_id t);

    -- Without pg_read_all_stats the owner of pgqueue does not see the transactions of other roles.
    return query
    select
        'info', null::text, 'hidden_transactions',
        format('role %I, the owner of pgqueue, cannot see the transactions of other roles: doctor does not find one that pins the horizon', current_user),
        format('grant pg_read_all_stats to %I;', current_user)
    where not pg_has_role(current_user, 'pg_read_all_stats', 'usage');

    return query
    select
        'warning', null::text, 'unfit_keys',
        'pgqueue was moved here from another major version of PostgreSQL and still looks up ids in the way made for that version: calls cost a tenth more, or read whole queues',
        'select pgqueue._install_key_lookup();'
    where not pgqueue._has_current_key_lookup();

    return query
    select
        'error', null::text, 'sequence_cache',
        'the sequence pgqueue.message_id caches ids: messages that commit late may never be found',
        'alter sequence pgqueue.message_id cache 1;'
    from pg_sequence s
    where s.seqrelid = 'pgqueue.message_id'::regclass and s.seqcache <> 1;

    return query
    select
        'warning', null::text, 'few_locks',
        format('a sweep locks the tables of all %s dedicated queues, and the server has room for %s locks per connection: calls may fail with "out of shared memory"',
            w.tables, w.locks),
        format('alter system set max_locks_per_transaction = %s; -- and restart the server', 64 * ceil((w.tables + 16) / 32.0))
    from (
        select count(*) as tables, current_setting('max_locks_per_transaction')::int as locks
        from pgqueue.queues d where d.dedicated
    ) w
    -- In addition, a call locks the tables and indexes that all queues share, and the registers of its queue.
    where w.tables + 16 > w.locks;

    return query
    select
        'error', null::text, 'autovacuum_off',
        format('autovacuum is off for %s: rows of consumed messages are never removed', c.table_name),
        c.repair
    from (
        select 'the server' as table_name, 'alter system set autovacuum = on; select pg_reload_conf();' as repair
        where not current_setting('autovacuum')::boolean
        union all
        select c.oid::regclass::text, format('alter table %s reset (autovacuum_enabled);', c.oid::regclass)
        from pg_class c
        where c.relnamespace = 'pgqueue'::regnamespace
            and exists (
                select from pg_options_to_table(c.reloptions) o
                where o.option_name = 'autovacuum_enabled' and not o.option_value::boolean
            )
    ) c;

    return query
    select
        'error', m.queue_name, 'misplaced_messages',
        format('message %s, the first of these, has an id that sweeps skip: its id or queue_name was set by hand, or the sequence pgqueue.message_id was set back',
            min(m.id)),
        format(
            'insert into pgqueue.requeued_messages (queue_name, check_at, id) select m.queue_name, timestamptz ''now'', m.id'
            ' from pgqueue.sweep_state s, unnest(s.vacant_ids) d, pgqueue.messages m'
            ' where s.queue_name = %1$L and m.queue_name = s.queue_name and m.id <@ d'
            ' and not exists (select from pgqueue.requeued_messages r where r.queue_name = m.queue_name and r.id = m.id);'
            ' update pgqueue.sweep_state set first_id = least(first_id, %2$s) where queue_name = %1$L;',
            m.queue_name, min(m.id))
    from pgqueue._misplaced_messages() m
    group by m.queue_name
    order by m.queue_name;

    return query select f.* from pgqueue._module_findings() f;
end;
$$;
comment on function pgqueue._installation_findings() is
'The findings of doctor about what belongs to no queue, and about the names of queues that do not exist.';

create or replace function pgqueue.doctor(peek_delay interval default '1 s', caller pgqueue.caller default current_user)
returns setof pgqueue.finding
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set quote_all_identifiers = off
set datestyle = iso
set intervalstyle = postgres
set jit = off
as $$
declare
    at constant timestamptz := pgqueue._now();
    q pgqueue.queues;
    findings pgqueue.finding[];
begin
    perform pgqueue._require_untruncated_messages();
    if peek_delay is null or not pgqueue._is_interval_between(peek_delay, '0', '3652.5 days') then
        perform pgqueue._raise_invalid('peek_delay', peek_delay::text, 'an interval from 0 to 10 years (3652.5 days)');
    end if;

    if has_table_privilege(caller, 'pgqueue.access_any'::regclass, pgqueue._privileges_of('{admin}')) then
        return query select f.* from pgqueue._installation_findings() f;
    end if;

    for q in
        select queues.* from pgqueue.queues
        where pgqueue._may_use(caller, queues.name, pgqueue._privileges_of('{admin}'))
        order by queues.name
    loop
        findings := '{}';
        begin
            if pgqueue._try_lock_existing_queue(q) then
                findings := array(select f from pgqueue._queue_findings(q, at, peek_delay) f);
            end if;
            -- Only an error releases the lock before the transaction ends. Locks of thousands of queues would fill the
            -- lock table.
            perform pgqueue._raise_queue_busy(q.name, 'doctor');
        exception when sqlstate 'PQ004' then
            return query select f.* from unnest(findings) f;
        end;
    end loop;
end;
$$;
comment on function pgqueue.doctor(interval, pgqueue.caller) is
'Checks the installation and returns one row per problem, with the statement or action that repairs it; no row means
that none was found. An admin of some queues gets the findings about these. severity is error, warning or info. finding
is one of: pinned_horizon, orphaned_messages, undelivered_messages (left by a dropped queue), compaction (whether it
runs while the horizon is pinned, and the last one), uncompacted_table (nearly all of it is dead rows),
stopped_schedule, misplaced_messages, ids_above_sequence, twin_messages (checked among the first 1,000 scheduled
messages), sequence_cache, unfit_keys (after pg_upgrade), hidden_transactions (the owner of pgqueue cannot see the
transactions of other roles), few_locks (for the number of dedicated queues), autovacuum_off, stale_staging,
missing_counter, paused_queue, dead_messages, held_group (waits for a dead letter, or for a message that is hidden for
longer than backoff_max), stuck_claims, long_claims (extended for more than an hour and ten visibility timeouts),
clock_ahead, late_retries (returned messages wait for longer than backoff_max, or the clock was ahead),
unused_group_keys, unused_priorities (the queue has no group_limit, or no priorities), lapsed_stream,
peek_delay_above_time_to_live (for consumers that poll every peek_delay), missing_index, long_writer, unmanaged_grant
(by hand, not by grant_access), archive_mark, unfiled_messages, missing_archive_day, archive_overdue, doubled_archive (a
dump was restored twice), leftovers (of queues, in a database that was restored without rows), missing_relation,
renamed_relation (of a transport, by hand), subscriber_without_relation (endpoints of a transport do not find the
subscription). Raises 22023 unless peek_delay is from 0 to 10 years.';
