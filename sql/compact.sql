-- Returns the space of dead rows that vacuum cannot remove, because a long transaction pins the xmin horizon. A
-- compaction locks a table, usually for some hundredths of a second, reads the few living rows, truncates the table and
-- inserts them again. An enqueue, a sweep, or a session that reads the relation of a transport, requests a compaction.
-- Its transaction carries it out as the last step before its commit.

create or replace function pgqueue._compactable_tables() returns table (relation regclass, least_bytes bigint)
language sql stable as $$
    select coalesce(i.inhrelid, t.oid)::regclass, w.least_bytes
    from (values
        ('messages', 16777216), ('scheduled_messages', 4194304), ('requeued_messages', 4194304),
        ('dead_messages', 4194304), ('staged_attempts', 4194304), ('staged_messages', 4194304),
        ('sink_commits', 4194304),
        -- A key that is used again and again updates its row each time, and each use reads the dead ones before.
        ('dedup_keys', 262144),
        -- Rows of these tables are updated once a second.
        ('sweep_state', 1048576), ('streams', 1048576), ('transports', 1048576)
    ) as w (name, least_bytes)
    join pg_catalog.pg_class t on t.relname = w.name and t.relnamespace = 'pgqueue'::regnamespace
    left join pg_catalog.pg_inherits i on i.inhparent = t.oid
    where i.inhrelid is not null or w.name not in ('messages', 'dedup_keys', 'transports')
    -- A caller that joins this with a function calls it for these tables only.
    offset 0
$$;

create or replace function pgqueue._overgrown_tables()
returns table (relation regclass, bytes bigint, living_rows bigint, dead_rows bigint)
language sql volatile as $$
    -- The statistics are read without a lock, the size with one. So the size is read only if the statistics fit.
    select t.relation, s.bytes, pg_stat_get_live_tuples(t.relation), pg_stat_get_dead_tuples(t.relation)
    from pgqueue._compactable_tables() t
    cross join lateral (
        select
            case
                when pg_stat_get_dead_tuples(t.relation) >= 500
                    and pg_stat_get_dead_tuples(t.relation) >= 9 * pg_stat_get_live_tuples(t.relation)
                then pg_total_relation_size(t.relation)
            end as bytes
    ) s
    where s.bytes >= t.least_bytes
    order by s.bytes desc
$$;

create or replace function pgqueue._pinned_transactions() returns bigint
language sql volatile as $$
    -- These columns are visible to every role. The snapshot of a vacuum does not hold the horizon, and an automatic
    -- analyze ends soon.
    select greatest(
        (
            select max(greatest(age(a.backend_xmin), age(a.backend_xid)))
            from pg_catalog.pg_stat_activity a
            where (a.datname = pg_catalog.current_database() or a.datid is null)
                and a.pid <> pg_catalog.pg_backend_pid() and a.backend_type is distinct from 'autovacuum worker'
        ),
        (select max(age(s.xmin)) from pg_catalog.pg_replication_slots s),
        (
            select max(age(p.transaction)) from pg_catalog.pg_prepared_xacts p
            where p.database = pg_catalog.current_database()
        ),
        0)
$$;

-- Whether the horizon is pinned for long enough to compact a table of this size. A few transactions with large batches
-- fill a table. From 64 MB or 50,000 dead rows on, five seconds suffice, so that it does not become too large to
-- compact, or 100 transactions if the time is not known, as for the snapshot of a standby.
create or replace function pgqueue._is_pinned_for(bytes bigint, dead_rows bigint) returns boolean
language sql volatile as $$
    select pgqueue._pinned_transactions() >= 50000
        or (bytes >= 67108864 or dead_rows >= 50000) and coalesce(
            (select max(h.pinned_for) > interval '5 s' from pgqueue._horizon_holders() h),
            pgqueue._pinned_transactions() >= 100)
$$;

create or replace function pgqueue._is_compaction_on() returns boolean
language sql volatile as $$
    select case current_setting('pgqueue.compaction', true)
        when 'on' then true
        when 'off' then false
        -- Only the dump of an extension detects that it is incomplete. Not pg_extension: a lock there would look like
        -- that of a dump.
        else exists (
            select from pg_catalog.pg_depend d
            where d.classid = 'pg_class'::regclass and d.objid = 'pgqueue.messages'::regclass and d.deptype = 'e'
        )
    end
$$;

create or replace function pgqueue._compaction_obstacle(relation regclass) returns text
language sql volatile as $$
    select case
        when exists (
            select from pg_catalog.pg_publication_tables p
            join pg_catalog.pg_publication b on b.pubname = p.pubname
            where p.schemaname = 'pgqueue'
                and (
                    -- A subscriber would get the rows twice.
                    p.tablename = c.relname and not b.pubtruncate
                    -- A publication that publishes through the parent does not publish the truncation of a partition.
                    or c.relispartition and p.tablename = (
                        select r.relname from pg_catalog.pg_inherits i
                        join pg_catalog.pg_class r on r.oid = i.inhparent
                        where i.inhrelid = c.oid
                    )
                )
        ) then 'published'
        when exists (
            select from pg_catalog.pg_trigger g
            join pg_catalog.pg_proc f on f.oid = g.tgfoid
            -- Triggers for insert (4) and truncate (32).
            where g.tgrelid = c.oid and not g.tgisinternal and g.tgtype & 36 > 0 and g.tgenabled <> 'D'
                and f.pronamespace <> 'pgqueue'::regnamespace
        ) then 'trigger'
        when exists (select from pg_catalog.pg_constraint k where k.confrelid = c.oid) then 'referenced'
    end
    from pg_catalog.pg_class c
    where c.oid = relation
$$;

-- kept is null, and has the type of an array of rows of the table.
create or replace function pgqueue._rewrite_table(relation regclass, kept anyarray) returns bigint
language plpgsql volatile set enable_seqscan = on set enable_tidscan = on set max_parallel_workers_per_gather = 0
set jit = off as $$
declare
    places tid[];
    bytes bigint;
begin
    -- This scan over the dead rows takes nearly all of the time. An index does not help, because it has an entry for
    -- each dead row. The scan does not read values that are stored out of line.
    execute format(
        'select array_agg(l.ctid), sum(l.bytes) from (select t.ctid, %s as bytes from only %s t limit 10001) l', (
            select string_agg(format('coalesce(pg_column_size(t.%I), 0)', a.attname), ' + ')
            from pg_attribute a
            where a.attrelid = relation and a.attnum > 0 and not a.attisdropped
        ), relation)
    into places, bytes;
    if cardinality(places) > 10000 or bytes > 8388608 then
        return null;
    end if;
    if places is not null then
        execute format('select array_agg(t) from only %s t where t.ctid = any ($1)', relation) into kept using places;
    end if;
    execute format('truncate only %s', relation);
    execute format('insert into %s select k.* from unnest($1) k', relation) using kept;
    return coalesce(cardinality(places), 0);
end;
$$;

create or replace function pgqueue._compact_table(relation regclass) returns pgqueue.compaction
language plpgsql volatile as $$
declare
    done pgqueue.compaction;
begin
    done.table_name := relation::text;
    begin
        done.outcome := 'busy';
        -- The size is null if the table was dropped meanwhile.
        done.bytes_before := pg_total_relation_size(relation);
        done.outcome := case
            when done.bytes_before is null then 'busy'
            -- While this session waits for the lock, a worker of a parallel dump would not get its own lock, and fail.
            when pgqueue._is_dump_running() then 'dump'
            else pgqueue._compaction_obstacle(relation)
        end;
        if done.outcome is null then
            done.outcome := 'busy';
            execute format('lock table only %s in access exclusive mode', relation);
            -- Each of the following statements has a snapshot that is younger than the lock.
            done.outcome := 'backlog';
            execute format('select pgqueue._rewrite_table($1, null::%s[])', relation) into done.rows_kept using relation;
            if done.rows_kept is not null then
                -- A dump may have begun meanwhile. Its snapshot can be older than the commit that follows.
                perform pg_stat_clear_snapshot();
                done.outcome := case when pgqueue._is_dump_running() then 'dump' else 'compacted' end;
            end if;
            if done.outcome <> 'compacted' then
                -- The error undoes the truncation and releases the lock, which would last until the transaction ends.
                perform pgqueue._raise('queue_busy', done.table_name, 'compact_queue');
            end if;
        end if;
    exception when lock_not_available or deadlock_detected or object_in_use or undefined_table or sqlstate 'PQ004' then
        if done.outcome = 'backlog' and sqlstate <> 'PQ004' then
            done.outcome := 'busy';
        end if;
        done.rows_kept := null;
    end;
    if done.outcome = 'compacted' then
        -- A session reports its statistics once a second and loses a truncation if it commits again before that. The
        -- dead rows would still be counted, and autovacuum would start for them.
        perform pg_stat_force_next_flush();
    end if;
    done.bytes_after := case done.outcome when 'compacted' then pg_total_relation_size(relation) else done.bytes_before end;
    return done;
end;
$$;

create or replace function pgqueue._on_maintenance_due_compact(at timestamptz) returns void
language plpgsql volatile set lock_timeout = '20 ms' as $$
begin
    -- In a fixed snapshot rows that others have inserted since are missing.
    if not pgqueue._has_fixed_snapshot() and pgqueue._is_compaction_on()
        and exists (
            select from pgqueue._overgrown_tables() t
            where pg_relation_size(t.relation) <= 1073741824 and pgqueue._is_pinned_for(t.bytes, t.dead_rows))
    then
        perform pgqueue._request_at_commit('_compact_overgrown', at);
    end if;
end;
$$;

create or replace function pgqueue._compact_overgrown(at timestamptz) returns void
language plpgsql volatile set lock_timeout = '20 ms' as $$
declare
    candidate regclass;
    done pgqueue.compaction;
    next_at timestamptz := at + interval '1 s';
begin
    delete from pgqueue.compactions c
    where c.ctid = any (array(
        select o.ctid from pgqueue.compactions o
        where o.tried_at not between at - interval '1 day' and at + interval '1 day' for update skip locked));
    -- One session compacts at a time. It holds this lock until its commit. No queue can have this name.
    if not pg_try_advisory_xact_lock(pgqueue._lock_key('compact_queues()')) then
        return;
    end if;
    if pgqueue._is_dump_running() then
        perform setval('pgqueue.next_maintenance_at', pgqueue._to_micros(at + interval '10 s'));
        return;
    end if;
    for candidate in
        select t.relation from pgqueue._overgrown_tables() t
        -- A longer scan would block other sessions for too long. compact_queue has no such limit.
        where pg_relation_size(t.relation) <= 1073741824 and pgqueue._is_pinned_for(t.bytes, t.dead_rows)
        order by t.bytes desc
    loop
        done := pgqueue._compact_table(candidate);
        insert into pgqueue.compactions values (at, (done).*);
        exit when done.outcome = 'compacted';
        -- While this session waits for the lock of a table, other sessions wait behind it. Other sessions wait up to
        -- 20 ms every 10 s, which is 0.2 per cent. An attempt that has to scan the table first costs more.
        next_at := greatest(next_at, at + case done.outcome when 'backlog' then interval '60 s' else interval '10 s' end);
    end loop;
    if next_at > at + interval '1 s' then
        perform setval('pgqueue.next_maintenance_at', pgqueue._to_micros(next_at));
    end if;
exception when query_canceled or others then
    -- The compaction was undone, for example by a cancel. It must not fail the transaction of a claim.
    perform setval('pgqueue.next_maintenance_at', pgqueue._to_micros(at + interval '60 s'));
end;
$$;

create or replace function pgqueue._compact_tables(verb text, relations regclass[]) returns setof pgqueue.compaction
language plpgsql volatile set lock_timeout = '500 ms' as $$
declare
    candidate regclass;
    waits_until timestamptz;
begin
    if pgqueue._has_fixed_snapshot() then
        perform pgqueue._raise('not_read_committed', verb);
    end if;
    perform pg_advisory_xact_lock(pgqueue._lock_key('compact_queues()'));
    waits_until := pgqueue._now() + current_setting('lock_timeout')::interval;
    for candidate in
        select t.relation from pgqueue._compactable_tables() t
        where t.relation = any (coalesce(relations, array[t.relation]))
        order by t.relation::text
    loop
        -- Sessions wait for the tables that are compacted already. All waits together are shorter than
        -- deadlock_timeout: in a deadlock this call gives up, not a consumer. 0 would be no limit.
        perform set_config('lock_timeout', greatest(
            1, (date_part('epoch', waits_until - pgqueue._now()) * 1000)::int)::text, true);
        begin
            continue when coalesce(pg_total_relation_size(candidate), 0) < 1048576;
        exception when lock_not_available or deadlock_detected then
            -- Its time is used up.
            return next row(candidate::text, 'busy', null, null, null)::pgqueue.compaction;
            continue;
        end;
        return next pgqueue._compact_table(candidate);
    end loop;
end;
$$;

create or replace function pgqueue.compact_queue(queue_name pgqueue.queue_of_admin) returns setof pgqueue.compaction
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
begin
    return query
    select c.*
    from pgqueue._compact_tables(
        'compact_queue',
        array_remove(array[pgqueue._partition_of(q), to_regclass(format('pgqueue.transports_%s', q.queue_id))], null)) c;
end;
$$;
comment on function pgqueue.compact_queue is
'Compacts the table of the queue, which other queues may share, if it occupies 1 MB or more: locks it exclusively,
truncates it and inserts the living messages again, unchanged. Returns a row for each table with its outcome: compacted;
busy if the lock was not free within 500 ms of the call, and then with sizes of null if it hides them; backlog if more
than 10,000 messages or 8 MB are living; dump while pg_dump runs; published if a publication contains the table without
truncate or through its parent; trigger if a trigger of another schema would fire; referenced by a foreign key. Sweeps
do the same by themselves while a transaction pins the horizon and the table is nearly all dead, unless
pgqueue.compaction is set to off. The call has no upper limit for the size of the table; it blocks the queue for about
two seconds per GB. Call it in autocommit mode: the lock is held until the transaction ends. A transaction in repeatable
read that began before and reads the table afterwards finds it empty; the functions raise 40001 there. If pgqueue was
installed as plain SQL, call it only while no dump begins: a dump whose snapshot is older than the compaction has none
of the messages, and reports no error. Raises PQ001, 25001 in a transaction that is not in read committed, and 55P03 if
another compaction takes longer than 500 ms.';

create or replace function pgqueue.compact_queues(caller pgqueue.caller default current_user)
returns setof pgqueue.compaction language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set jit = off as $$
begin
    perform pgqueue._require_admin_of_all(caller, 'compact_queues');
    return query select c.* from pgqueue._compact_tables('compact_queues', null) c;
end;
$$;
comment on function pgqueue.compact_queues is
'Compacts all tables of messages, scheduled messages, dead letters, keys, staged messages and internal state that occupy
1 MB or more, as compact_queue does, and returns a row for each. The locks of all of them are held until the transaction
ends. Call it in a maintenance window, in autocommit mode. Raises 25001, 42501 without admin access to all queues, and
55P03 if another compaction takes longer than 500 ms.';

create or replace function pgqueue._findings_of_compact(q pgqueue.queues) returns setof pgqueue.finding
language plpgsql volatile set lock_timeout = '100 ms' as $$
declare
    at constant timestamptz := pgqueue._now();
    pinned constant bigint := pgqueue._pinned_transactions();
    t record;
    obstacle text;
    holder text;
    last_outcome text;
begin
    if q.name is not null or pg_is_in_recovery() then
        return;
    end if;
    if pinned >= 50000 then
        return next row(
            'info', null, 'compaction',
            format('the horizon is %s transactions old: ', pinned) || case
                when not pgqueue._is_compaction_on() then 'vacuum does not help, and automatic compaction is off'
                else 'enqueues and sweeps compact the tables that need it' || coalesce(
                    (
                        select format('; %s, they tried %s: %s', at - c.tried_at || ' ago', c.table_name, case c.outcome
                            when 'compacted' then format('compacted from %s to %s, with %s',
                                pg_size_pretty(c.bytes_before), pg_size_pretty(c.bytes_after), pgqueue._with_number(c.rows_kept, 'living row'))
                            else c.outcome end)
                        from pgqueue.compactions c where c.outcome is not null
                        order by c.tried_at desc limit 1
                    ), '; none was compacted in the last day')
            end,
            'End what pins the horizon: the finding pinned_horizon names it after a minute.')::pgqueue.finding;
    end if;
    for t in select o.*, pg_relation_size(o.relation) > 1073741824 as is_huge from pgqueue._overgrown_tables() o loop
        obstacle := pgqueue._compaction_obstacle(t.relation);
        select c.outcome into last_outcome from pgqueue.compactions c
        where c.table_name = t.relation::text and c.outcome is not null and c.tried_at > at - interval '5 min'
        order by c.tried_at desc limit 1;
        select case
                when a.pid is null then format('prepared transaction %L of %s has used it for %s', p.gid, p.owner, at - p.prepared)
                else format('process %s has used it for %s with: %s', a.pid, at - a.xact_start, left(a.query, 100))
            end
        into holder
        from pg_locks l
        left join pg_stat_activity a on a.pid = l.pid
        -- The lock of a prepared transaction has no process. Its own transaction id is locked, too.
        left join (
            pg_locks x join pg_prepared_xacts p on p.transaction = x.transactionid
        ) on l.pid is null and x.virtualtransaction = l.virtualtransaction
        where l.relation = t.relation and l.locktype = 'relation' and l.granted and l.pid is distinct from pg_backend_pid()
            and l.database = (select d.oid from pg_database d where d.datname = current_database())
        order by coalesce(a.xact_start, p.prepared) limit 1;
        return next row(
            'warning', null, 'uncompacted_table',
            format('%s occupies %s for about %s living rows, and %s', t.relation, pg_size_pretty(t.bytes), t.living_rows,
                case
                    when not pgqueue._is_pinned_for(t.bytes, t.dead_rows) then 'the space of dead rows can be used again, but is not returned'
                    when obstacle = 'published' then 'it is not compacted: a publication contains it without truncate, or through its parent'
                    when obstacle = 'trigger' then 'it is not compacted: a trigger of another schema would fire'
                    when obstacle = 'referenced' then 'it is not compacted: a foreign key references it'
                    when not pgqueue._is_compaction_on() then 'automatic compaction is off'
                    when pgqueue._is_dump_running() then format('it is not compacted while a dump runs (process %s)',
                        array_to_string(pgqueue._dumping_processes(), ', ', 'a prepared transaction'))
                    when t.is_huge then 'only compact_queue compacts a table of this size'
                    when last_outcome = 'backlog' then 'it is not compacted: more rows are living than the statistics say'
                    when last_outcome = 'busy' then 'the last attempt to compact it did not get its lock'
                        || coalesce('; ' || holder, '')
                    else 'the next enqueues or sweeps compact it'
                end),
            case obstacle
                when 'published' then 'alter publication <its name> set (publish = ''insert, update, delete, truncate'', publish_via_partition_root = false);'
                else 'select * from pgqueue.compact_queues();'
            end)::pgqueue.finding;
    end loop;
exception when lock_not_available then
    -- The size of a table that another transaction has locked exclusively cannot be read.
    null;
end;
$$;
