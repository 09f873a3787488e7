-- Finds problems, and for each the statement that repairs it. findings.sql has those of one queue.

create or replace function pgqueue.version() returns text
language sql immutable parallel safe security definer set search_path = pg_catalog, pg_temp set jit = off
as $$ select '0.2.0-dev'::text $$;
comment on function pgqueue.version is
'Returns the version of the installed functions.';

create or replace function pgqueue._horizon_holders() returns table (pinned_for interval, holder text, repair text)
language sql stable as $$
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

create or replace function pgqueue._space_used() returns text
language plpgsql volatile set lock_timeout = '100 ms' as $$
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

-- The names under which there are messages but no queue: of plain SQL, or of dead letters that drop_queue has left.
create or replace function pgqueue._orphaned_messages() returns table (table_name text, queue_name text)
language plpgsql stable as $$
declare
    searched text;
begin
    -- One index probe for each gap between the names of two queues, and one for each name found there. A scan over the
    -- rows of a queue would read those that were removed.
    foreach searched in array '{messages,scheduled_messages,dead_messages}'::text[] loop
        for table_name, queue_name in execute format(
            $query$
            with recursive names as (
                select d.name as queue_name, lead(d.name) over (order by d.name) as below, false as is_found
                from pgqueue.queues d
                union all
                select ''::text collate "C", (select min(d.name) from pgqueue.queues d), false
                union all
                select f.queue_name, n.below, true
                from names n
                cross join lateral (
                    (
                        select m.queue_name from pgqueue.%1$I m
                        where m.queue_name > n.queue_name and m.queue_name < n.below
                        order by m.queue_name limit 1
                    )
                    union all
                    (
                        select m.queue_name from pgqueue.%1$I m
                        where m.queue_name > n.queue_name and n.below is null
                        order by m.queue_name limit 1
                    )
                ) f
            )
            select %1$L, a.queue_name from names a where a.is_found
            $query$, searched)
        loop
            return next;
        end loop;
    end loop;
end;
$$;

create or replace function pgqueue._server_findings() returns setof pgqueue.finding
language sql volatile as $$
    select
        'warning', null::text, 'pinned_horizon',
        format('%s, for %s: vacuum cannot remove rows deleted or updated since; %s',
            h.holder, coalesce(date_trunc('second', h.pinned_for)::text, 'an unknown time'), pgqueue._space_used()),
        h.repair
    from pgqueue._horizon_holders() h
    where h.pinned_for > interval '1 min' or h.pinned_for is null
    union all
    -- Without pg_read_all_stats the owner of pgqueue does not see the transactions of other roles.
    select
        'info', null::text, 'hidden_transactions',
        format('role %I, the owner of pgqueue, cannot see the transactions of other roles: doctor does not find one that pins the horizon', current_user),
        format('grant pg_read_all_stats to %I;', current_user)
    where not pg_has_role(current_user, 'pg_read_all_stats', 'usage')
    union all
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
    where w.tables + 16 > w.locks
    union all
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
    ) c
$$;

create or replace function pgqueue._installation_findings() returns setof pgqueue.finding
language sql volatile as $$
    select f.* from pgqueue._server_findings() f
    union all
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
    ) n
    union all
    select
        'error', null::text, 'ids_above_sequence',
        format('a queue has the number %s, which the sequence pgqueue.queue_id has not reached: create_queue fails', max(d.queue_id)),
        format('select setval(''pgqueue.queue_id'', %s);', max(d.queue_id))
    from pgqueue.queues d
    having max(d.queue_id) > (select t.last_value - (not t.is_called)::int from pgqueue.queue_id t)
    union all
    select
        'warning', null::text, 'unfit_keys',
        'pgqueue was moved here from another major version of PostgreSQL and still looks up ids in the way made for that version: calls cost a tenth more, or read whole queues',
        'select pgqueue._install_key_lookup();'
    -- After pg_upgrade, or a restore of an installation that is no extension.
    where (select count(*) from pgqueue._lookup_keys('', '{1,2}'))
        <> case when current_setting('server_version_num')::int < 170000 then 2 else 1 end
    union all
    select
        'error', null::text, 'sequence_cache',
        'the sequence pgqueue.message_id caches ids: messages that commit late may never be found',
        'alter sequence pgqueue.message_id cache 1;'
    from pg_sequence s
    where s.seqrelid = 'pgqueue.message_id'::regclass and s.seqcache <> 1
    union all
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
    from (
        -- The first message of every range. A message that just came back is recorded in requeued_messages by the same
        -- transaction.
        select w.queue_name, c.id
        from pgqueue.sweep_state w
        cross join lateral unnest(w.vacant_ids) as d
        cross join lateral (
            select t.id from pgqueue.messages t
            where t.queue_name = w.queue_name and t.id >= coalesce(lower(d), 0) and t.id < upper(d)
                and not exists (select from pgqueue.requeued_messages r where r.queue_name = t.queue_name and r.id = t.id)
            order by t.id limit 1
        ) c
    ) m
    group by m.queue_name
    union all
    select f.* from pgqueue._module_findings() f
$$;

create or replace function pgqueue.doctor(peek_delay interval default '1 s', caller pgqueue.caller default current_user)
returns setof pgqueue.finding language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set quote_all_identifiers = off set datestyle = iso set intervalstyle = postgres set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q pgqueue.queues;
    findings pgqueue.finding[];
begin
    perform pgqueue._require_untruncated_messages();
    perform pgqueue._require(pgqueue._is_interval_between(peek_delay, '0', '3652.5 days'), 'peek_delay', peek_delay::text,
        'an interval from 0 to 10 years (3652.5 days)');

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
            findings := array(select f from pgqueue._register_findings(q) f) || findings;
            -- Only an error releases the lock before the transaction ends. Locks of thousands of queues would fill the
            -- lock table.
            perform pgqueue._raise('queue_busy', q.name, 'doctor');
        exception when sqlstate 'PQ004' then
            return query select f.* from unnest(findings) f;
        end;
    end loop;
end;
$$;
comment on function pgqueue.doctor is
'Checks the installation and returns one row per problem, with the statement or action that repairs it; no row means
that none was found. An admin of some queues gets the findings about these. severity is error, warning or info. finding
is one of: pinned_horizon, orphaned_messages, undelivered_messages (left by a dropped queue), compaction (whether it
runs while the horizon is pinned, and the last one), uncompacted_table (nearly all of it is dead rows),
stopped_schedule, misplaced_messages, ids_above_sequence, twin_messages (checked among the first 1,000 scheduled
messages), wrong_kind (set by plain SQL, so that no claim finds the message), sequence_cache, unfit_keys (after
pg_upgrade), hidden_transactions (the owner of pgqueue cannot see the transactions of other roles), few_locks (for the
number of dedicated queues), autovacuum_off, stale_staging, missing_counter, missing_registers (of a queue that was
dropped or altered while this database was dumped), paused_queue, dead_messages, held_group (waits for a dead letter, or
for a message that is hidden for longer than backoff_max), stuck_claims, long_claims (extended for more than an hour and
ten visibility timeouts), clock_ahead, late_retries (returned messages wait for longer than backoff_max, or the clock
was ahead), unused_group_keys, unused_priorities (the queue has no group_limit, or no priorities), lapsed_stream,
peek_delay_above_time_to_live (for consumers that poll every peek_delay), missing_index, long_writer, unmanaged_grant
(by hand, not by grant_access), archive_mark, unfiled_messages, missing_archive_day, archive_overdue, doubled_archive (a
dump was restored twice), leftovers (of queues, in a database that was restored without rows), missing_relation,
renamed_relation (of a transport, by hand), subscriber_without_relation (endpoints of a transport do not find the
subscription). Raises 22023 unless peek_delay is from 0 to 10 years.';
