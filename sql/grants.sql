-- Access to the functions and tables: defines what each kind of access may use, grants it and revokes it. The
-- privileges on the views access_* of access.sql are the only record of the access of a role.

create or replace function pgqueue._access_privileges()
returns table (object text, privileges text, accesses text[], for_all boolean) language sql stable as $$
    select 'function pgqueue.' || p.proname, 'execute', f.accesses, false
    from (values
        ('{producer}'::text[], '{
            enqueue, enqueue_batch, sink_stage, sink_commit, sink_abort, publish, create_result}'::name[]),
        ('{consumer}', '{
            claim, claim_any, ack, ack_batch, ack_claims, exchange, nack, nack_claims, reject, record_failure, release,
            release_claims, extend, extend_batch, extend_claims, receive, prepare_wait, update_result, stream_open,
            stream_claim, stream_begin, stream_read, stream_extend, stream_ack}'),
        ('{admin}', '{
            create_queue, alter_queue, drop_queue, drop_idle_queues, pause_queue, resume_queue, purge_queue, redrive,
            purge_dead_messages, purge_expired, purge_results, create_schedule, alter_schedule, drop_schedule,
            drop_stream, maintain_archive, sweep_staged, compact_queue, compact_queues, doctor, expose_transport,
            unexpose_transport, expose_subscriptions, unexpose_subscriptions, expose_contract, unexpose_contract}'),
        ('{transport}', '{advance_transport}'),
        ('{producer,admin}', '{cancel, cancel_by_key, reschedule, run_schedule}'),
        ('{consumer,admin}', '{subscribe, unsubscribe, list_subscriptions, stream_skip, sweep_queue}'),
        ('{admin,reader}', '{browse_dead_messages}'),
        ('{consumer,admin,reader}', '{browse, browse_archived_messages, list_schedules, list_streams}'),
        ('{producer,consumer,admin,reader}', '{get_result}'),
        ('{producer,admin,raw}', '{wake}'),
        ('{producer,consumer,admin,raw}', '{channel}'),
        ('{producer,consumer,admin,raw,reader}', '{get_queue, list_queues, peek, stats, next_due_at, version}'),
        -- The checks of the domains call these.
        ('{producer,consumer,admin,raw,reader,transport}',
            '{_may_or_raise, _may_use, _is_name, _access_view, _privileges_of, _raise}')
    ) as f (accesses, names)
    join pg_catalog.pg_proc p on p.proname = any (f.names) and p.pronamespace = 'pgqueue'::regnamespace
    union all
    select t.object, t.privileges, t.accesses, t.for_all
    from (values
        ('schema pgqueue', 'usage', '{producer,consumer,admin,reader,raw,transport}'::text[], false),
        ('table pgqueue.staged_messages', 'insert', '{producer}', false),
        ('table pgqueue.queues', 'select', '{raw,reader}', true),
        ('sequence pgqueue.message_id', 'usage', '{raw}', true),
        ('sequence pgqueue.message_id', 'select', '{reader}', true)
    ) as t (object, privileges, accesses, for_all)
    union all
    select 'table pgqueue.' || t, p.privileges, p.accesses, true
    from unnest('{messages,scheduled_messages,dead_messages,archived_messages,unfiled_messages}'::text[]) as t
    cross join (values
        ('select, insert, update, delete', '{raw}'::text[]), ('select', '{reader}')
    ) as p (privileges, accesses)
$$;

create or replace function pgqueue._granted_access()
returns table (role_name name, access text, queue_name text, access_view regclass) language sql stable as $$
    select
        r.rolname, p.access,
        case
            when c.relname <> 'access_any' then coalesce(pg_catalog.obj_description(c.oid, 'pg_class'), q.name, c.relname)
        end,
        c.oid::regclass
    from pg_catalog.pg_class c
    cross join lateral pg_catalog.aclexplode(c.relacl) as a
    join unnest(array['producer', 'consumer', 'admin', 'reader', 'raw', 'transport']) as p (access)
        on pgqueue._privileges_of(array[p.access]) = a.privilege_type
    join pg_catalog.pg_roles r on r.oid = a.grantee
    left join pgqueue.queues q on pgqueue._access_view(q.name) = 'pgqueue.' || c.relname
    where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'v' and c.relname ~ '^access_' and a.grantee <> c.relowner
$$;

create or replace function pgqueue._check_access(role_name name, access text, queue_name text) returns void
language plpgsql stable as $$
begin
    perform pgqueue._raise_invalid(c.name, c.given, c.expected)
    from (values
        ('access', access, access in ('producer', 'consumer', 'admin', 'reader', 'raw', 'transport'),
            'producer, consumer, admin, reader, raw or transport'),
        ('role_name', null, role_name is not null, 'the name of a role'),
        ('access', access, queue_name is null or access <> 'raw',
            'producer, consumer, admin, reader or transport for a queue: raw is access to the tables of all queues'),
        ('queue_name', queue_name, queue_name is null or right(queue_name, 1) <> '*' or queue_name ~ '^[a-z0-9_-]{0,127}[_-][*]$',
            'the name of a queue, or the beginning of names up to a - or _, and then *')
    ) as c (name, given, is_valid, expected)
    where c.is_valid is not true;
    if not exists (select from pg_roles r where r.rolname = role_name) then
        perform pgqueue._raise('role_not_found', role_name);
    end if;
end;
$$;

create or replace function pgqueue._access_statements(
    template text, role_identifier text, accesses text[], for_all boolean
) returns text
language sql stable as $$
    select string_agg(format(template, a.privileges, a.object, role_identifier), '; ')
    from pgqueue._access_privileges() a
    where a.accesses && _access_statements.accesses and (_access_statements.for_all or not a.for_all)
$$;

create or replace function pgqueue._apply_access(role_name name, access text, for_all boolean) returns void
language plpgsql volatile as $$
begin
    execute pgqueue._access_statements('grant %s on %s to %s', quote_ident(role_name), array[access], for_all);
end;
$$;

create or replace function pgqueue._find_access_view(queue_name text) returns regclass
language plpgsql volatile as $$
begin
    -- After waiting for a lock, the session's catalog cache can be stale. Opening a relation renews it.
    perform pg_relation_size('pgqueue.access_any'::regclass);
    return to_regclass(pgqueue._access_view(queue_name));
end;
$$;

create or replace function pgqueue.grant_access(role_name name, access text, queue_name text default null) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    access_view regclass := 'pgqueue.access_any';
begin
    perform pgqueue._check_access(role_name collate "C", access collate "C", queue_name collate "C");
    if queue_name is not null and right(queue_name, 1) <> '*' then
        perform pgqueue._get_locked_queue(queue_name);
    end if;
    -- PostgreSQL raises an error if two transactions change the privileges of one function at once. No queue has the
    -- empty name, so its lock is free for this purpose.
    perform pg_advisory_xact_lock(pgqueue._lock_key(''));
    perform pgqueue._apply_access(role_name, access collate "C", queue_name is null);
    if queue_name is not null then
        access_view := pgqueue._find_access_view(queue_name);
        if access_view is null then
            execute format('create view pgqueue.%I as select', split_part(pgqueue._access_view(queue_name), '.', 2));
            access_view := pgqueue._access_view(queue_name)::regclass;
            perform pgqueue._revoke_default_privileges(access_view);
        end if;
        -- Every role can read comments. The hash in the name of the view does not tell the name of a queue.
        if right(queue_name, 1) = '*' then
            execute format('comment on view %s is %L', access_view, queue_name);
        end if;
    end if;
    execute format('grant %s on %s to %I', pgqueue._privileges_of(array[access collate "C"]), access_view, role_name);
end;
$$;
comment on function pgqueue.grant_access is
'Grants a kind of access to a role. A producer sends messages, also by staging, and sees the depth of queues but no
payload. A consumer claims, acknowledges, receives, reads streams and browses, including the archive. An admin creates,
alters, pauses, drops, redrives, purges, maintains the archive and browses dead letters. A reader reads and browses all
messages, by select on the tables, and changes nothing; batch reads of Spark need this access. raw is select, insert,
update and delete on the tables, for applications that use plain SQL, also through the views of expose_contract.
transport is the use of relations that expose_transport created; the role also needs privileges on those relations. A
role may have several kinds of access.
queue_name limits the access to one queue, or to all queues, also future ones, whose names begin with a pattern such as
billing-*: what is before * ends in - or _. For other queues the functions then raise PQ001, as if these did not exist,
and functions over several queues show and change only those of the caller. drop_queue ends the access to a single
queue. raw cannot be limited, and a reader of one queue has the functions, not the tables. Access belongs to the role
that calls: after set role to that role, in a security definer function to its owner. Members of a role have its access
if they inherit its privileges. Only the owner of the extension may call this. Raises 22023, 42704 for an unknown role,
and PQ001.';

create or replace function pgqueue._revoke_access(role_name name, access text, access_view regclass) returns void
language plpgsql volatile as $$
begin
    if access_view is not null then
        execute format('revoke %s on %s from %I', pgqueue._privileges_of(array[access]), access_view, role_name);
    end if;
    execute pgqueue._access_statements(
        'revoke %s on %s from %s', quote_ident(role_name), array[access], access_view = 'pgqueue.access_any'::regclass);
    -- Privileges that other access of the role includes are granted again.
    perform pgqueue._apply_access(_revoke_access.role_name, g.access, g.for_all)
    from (
        select distinct w.access, w.queue_name is null as for_all from pgqueue._granted_access() w
        where w.role_name = _revoke_access.role_name collate "C"
    ) g;
end;
$$;

-- A queue that is dropped leaves nothing of the rooms but what it has archived. Only then: each delete locks its table
-- also if it finds nothing, and one from scheduled_messages makes the transaction count as one that has written to it.
create or replace function pgqueue._on_queue_changed_grants(before pgqueue.queues, after pgqueue.queues) returns void
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    dropped regclass;
begin
    if after.name is not null then
        return;
    end if;
    -- The messages of the next ticks would become dead letters.
    with gone as (delete from pgqueue.schedules s where s.queue_name = before.name returning s.next_id)
    delete from pgqueue.scheduled_messages m using gone g where m.queue_name = before.name and m.id = g.next_id;
    delete from pgqueue.streams t where t.queue_name = before.name;
    delete from pgqueue.subscriptions s where s.queue_name = before.name;
    delete from pgqueue.results r where r.queue_name = before.name;
    dropped := pgqueue._find_access_view(before.name);
    if dropped is null then
        return;
    end if;
    perform pg_advisory_xact_lock(pgqueue._lock_key(''));
    perform pgqueue._revoke_access(g.role_name, g.access, g.access_view)
    from pgqueue._granted_access() g
    where g.access_view = dropped;
    -- Any role can make a view that depends on this one. It must not keep the queue.
    execute format('drop view %s cascade', dropped);
end;
$$;

create or replace function pgqueue.revoke_access(role_name name, access text, queue_name text default null) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    access_view regclass;
begin
    perform pgqueue._check_access(role_name collate "C", access collate "C", queue_name collate "C");
    -- The functions call each other with the privileges of their owner.
    perform pgqueue._require(role_name collate "C" <> current_user, 'role_name', role_name,
        'a role other than the owner of pgqueue, whose access does not come from grants');
    if queue_name is not null and right(queue_name, 1) <> '*' then
        perform pgqueue._get_locked_queue(queue_name);
    end if;
    perform pg_advisory_xact_lock(pgqueue._lock_key(''));
    perform pgqueue._require_current_snapshot(format('the privileges of role %I', role_name));
    access_view := case when queue_name is null then 'pgqueue.access_any' else pgqueue._find_access_view(queue_name) end;
    perform pgqueue._revoke_access(role_name, access collate "C", access_view);
end;
$$;
comment on function pgqueue.revoke_access is
'Revokes what grant_access granted with the same queue_name: without queue_name the access to all queues, with it that
to the queue or the pattern. Privileges that the role has by other access remain. A transaction that is running keeps
what it has begun. Only the owner of the extension may call this. Raises 22023, 42704 for an unknown role, and PQ001.';

create or replace function pgqueue.list_access() returns setof pgqueue.access
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    return query
    select g.role_name, g.access, g.queue_name from pgqueue._granted_access() g
    -- A restore without rows leaves the access to queues that do not exist. Their names are not known.
    where g.queue_name is distinct from substr(g.access_view::text, 9)
    order by g.role_name, g.access, g.queue_name nulls first;
end;
$$;
comment on function pgqueue.list_access is
'Returns the access that grant_access granted: role_name, access, and queue_name, which is a name, a pattern, or null
for all queues. Access that a role has as a member of another is listed for the other. Access to queues that are missing
after a restore without rows is not listed. Only the owner of the extension may call this.';

create or replace function pgqueue._granted_privileges()
returns table (object text, privilege text, target text, grantee oid, relation regclass) language sql stable as $$
    select
        o.object, a.privilege_type,
        case when o.object = 'schema pgqueue' then a.privilege_type || ' on schema pgqueue' else coalesce(o.target, 'all on ' || o.object) end,
        a.grantee, o.relation
    from (
        select
            'function pgqueue.' || p.proname as object, 'all on function ' || p.oid::regprocedure as target,
            p.proacl as acl, p.proowner as owner, null::regclass as relation
        from pg_proc p
        where p.pronamespace = 'pgqueue'::regnamespace
        union all
        select
            case c.relkind when 'S' then 'sequence ' else 'table ' end || c.oid::regclass, null, c.relacl, c.relowner,
            c.oid::regclass
        from pg_class c
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'p', 'S', 'v')
        union all
        select
            format('column %I of table %s', t.attname, c.oid::regclass),
            format('all (%I) on table %s', t.attname, c.oid::regclass), t.attacl, c.relowner, null
        from pg_class c
        join pg_attribute t on t.attrelid = c.oid
        where c.relnamespace = 'pgqueue'::regnamespace
        union all
        -- With usage of a domain, a role could store a name that was checked before.
        select 'type ' || y.oid::regtype, null, y.typacl, y.typowner, null
        from pg_type y
        where y.typnamespace = 'pgqueue'::regnamespace and y.typtype = 'd'
        union all
        select 'schema pgqueue', null, n.nspacl, n.nspowner, null
        from pg_namespace n
        where n.nspname = 'pgqueue'
    ) o
    cross join lateral aclexplode(o.acl) as a
    where a.grantee <> o.owner
$$;

create or replace function pgqueue._findings_of_grants(q pgqueue.queues) returns setof pgqueue.finding
language sql stable as $$
    with access as materialized (
        select g.role_name, p.object
        from pgqueue._granted_access() g
        join pgqueue._access_privileges() p on g.access = any (p.accesses) and (g.queue_name is null or not p.for_all)
        where q.name is null
    ),
    past as (
        select g.grantee, g.object, null::oid as grantor, g.target as privileges
        from pgqueue._granted_privileges() g
        left join pg_roles r on r.oid = g.grantee
        where q.name is null and (r.oid is not null or g.grantee = 0)
            -- A grant on a view of access is access.
            and (g.object !~ '^table pgqueue[.]access_' or g.grantee = 0)
            and (g.object <> 'schema pgqueue' or g.privilege = 'CREATE')
            and not exists (
                select from access a where a.role_name = r.rolname and a.object = g.object and g.privilege <> 'CREATE'
            )
            and (g.relation <> all (array(select l.relation from pgqueue._leftovers() l))) is not false
        union all
        -- The admin that exposed the queue grants rights on its relation to endpoints. An endpoint that publishes needs
        -- insert on the relations of all subscribers.
        select a.grantee, 'relation ' || v.relation, nullif(a.grantor, v.relowner), a.privilege_type || ' on ' || v.relation
        from (
            select
                c.oid::regclass as relation, c.relowner, c.relacl,
                split_part(encode(t.tgargs, 'escape'), e'\\000', 1) as queue_name
            from pg_trigger t
            join pg_class c on c.oid = t.tgrelid
            where q.name is null and t.tgfoid = 'pgqueue._insert_by_transport'::regproc
        ) v
        cross join lateral aclexplode(v.relacl) as a
        left join pg_roles r on r.oid = a.grantee
        where a.grantee <> v.relowner
            and not coalesce(case a.privilege_type
                when 'INSERT' then pgqueue._may_use(r.rolname, v.queue_name, pgqueue._privileges_of('{producer,admin}'))
                    or has_function_privilege(
                        r.oid, 'pgqueue.advance_transport(pgqueue.queue_of_transport)'::regprocedure, 'EXECUTE')
                else pgqueue._may_use(r.rolname, v.queue_name, pgqueue._privileges_of('{admin,transport}'))
            end, false)
    )
    select
        'warning', null, 'unmanaged_grant',
        format('role %s has privileges that none of its access includes: %s', n.grantee,
            string_agg(distinct n.object, ', ' order by n.object)),
        -- What a role has granted further, only that role can revoke.
        string_agg(distinct case
            when n.grantor is null then format('revoke %s from %s;', n.privileges, n.grantee)
            else format('set role %s; revoke %s from %s; reset role;', n.grantor, n.privileges, n.grantee)
        end, ' ')
    from (
        select
            coalesce(quote_ident(r.rolname), 'public') as grantee, p.object, p.privileges, quote_ident(o.rolname) as grantor
        from past p
        left join pg_roles r on r.oid = p.grantee
        left join pg_roles o on o.oid = p.grantor
    ) n
    group by n.grantee
$$;

revoke all on all functions in schema pgqueue from public;

-- The default privileges of the installing role may have granted rights on the new objects: revoke them. In an upgrade
-- only private functions are treated, as functions and tables of the API may have been granted on purpose.
do $$
declare
    granted record;
begin
    for granted in
        select distinct g.target, case g.grantee when 0 then 'public' else g.grantee::regrole::text end as grantee
        from pgqueue._granted_privileges() g
        where current_setting('pgqueue.installing', true) = 'yes' or g.object ~ '^(function pgqueue[.]_|type )'
    loop
        execute pg_catalog.format('revoke %s from %s', granted.target, granted.grantee);
    end loop;
    perform pg_catalog.set_config('pgqueue.installing', '', true);

    -- An upgrade may have added functions, and its statement above has revoked those of the checks.
    perform pgqueue._apply_access(g.role_name, g.access, g.for_all)
    from (
        select distinct w.role_name, w.access, w.queue_name is null as for_all
        from pgqueue._granted_access() w
    ) g;
end;
$$;
