-- Access to the functions and tables: defines what each kind of access may call, grants it and revokes it. The
-- privileges on the views access_* of access.sql are the only record of the access of a role; those on the views
-- rights_* follow from them.

create or replace function pgqueue._access_matrix()
returns table (verb text, allowed_to text[])
language sql immutable
as $$
    values
    ('enqueue', '{producer}'::text[]),
    ('enqueue_batch', '{producer}'::text[]),
    ('sink_stage', '{producer}'::text[]),
    ('sink_commit', '{producer}'::text[]),
    ('sink_abort', '{producer}'::text[]),
    ('publish', '{producer}'::text[]),
    ('subscribe', '{consumer,admin}'::text[]),
    ('unsubscribe', '{consumer,admin}'::text[]),
    ('list_subscriptions', '{consumer,admin}'::text[]),
    ('cancel', '{producer,admin}'::text[]),
    ('cancel_by_key', '{producer,admin}'::text[]),
    ('reschedule', '{producer,admin}'::text[]),
    ('create_schedule', '{admin}'::text[]),
    ('alter_schedule', '{admin}'::text[]),
    ('drop_schedule', '{admin}'::text[]),
    ('run_schedule', '{producer,admin}'::text[]),
    ('create_result', '{producer}'::text[]),
    ('update_result', '{consumer}'::text[]),
    ('get_result', '{producer,consumer,admin,reader}'::text[]),
    ('purge_results', '{admin}'::text[]),
    ('list_schedules', '{consumer,admin,reader}'::text[]),
    ('claim', '{consumer}'::text[]),
    ('claim_any', '{consumer}'::text[]),
    ('ack', '{consumer}'::text[]),
    ('ack_batch', '{consumer}'::text[]),
    ('ack_claims', '{consumer}'::text[]),
    ('exchange', '{consumer}'::text[]),
    ('nack', '{consumer}'::text[]),
    ('nack_claims', '{consumer}'::text[]),
    ('reject', '{consumer}'::text[]),
    ('record_failure', '{consumer}'::text[]),
    ('release', '{consumer}'::text[]),
    ('release_claims', '{consumer}'::text[]),
    ('extend', '{consumer}'::text[]),
    ('extend_batch', '{consumer}'::text[]),
    ('extend_claims', '{consumer}'::text[]),
    ('receive', '{consumer}'::text[]),
    ('stream_open', '{consumer}'::text[]),
    ('stream_claim', '{consumer}'::text[]),
    ('stream_begin', '{consumer}'::text[]),
    ('stream_read', '{consumer}'::text[]),
    ('stream_extend', '{consumer}'::text[]),
    ('stream_ack', '{consumer}'::text[]),
    ('stream_skip', '{consumer,admin}'::text[]),
    ('list_streams', '{consumer,admin,reader}'::text[]),
    ('drop_stream', '{admin}'::text[]),
    ('prepare_wait', '{consumer}'::text[]),
    ('browse', '{consumer,admin,reader}'::text[]),
    ('browse_dead_messages', '{admin,reader}'::text[]),
    ('browse_archived_messages', '{consumer,admin,reader}'::text[]),
    ('maintain_archive', '{admin}'::text[]),
    ('create_queue', '{admin}'::text[]),
    ('alter_queue', '{admin}'::text[]),
    ('drop_queue', '{admin}'::text[]),
    ('drop_idle_queues', '{admin}'::text[]),
    ('pause_queue', '{admin}'::text[]),
    ('resume_queue', '{admin}'::text[]),
    ('purge_queue', '{admin}'::text[]),
    ('redrive', '{admin}'::text[]),
    ('purge_dead_messages', '{admin}'::text[]),
    ('purge_expired', '{admin}'::text[]),
    ('sweep_queue', '{consumer,admin}'::text[]),
    ('sweep_staged', '{admin}'::text[]),
    ('compact_queue', '{admin}'::text[]),
    ('compact_queues', '{admin}'::text[]),
    ('doctor', '{admin}'::text[]),
    ('expose_transport', '{admin}'::text[]),
    ('unexpose_transport', '{admin}'::text[]),
    ('expose_subscriptions', '{admin}'::text[]),
    ('unexpose_subscriptions', '{admin}'::text[]),
    ('expose_contract', '{admin}'::text[]),
    ('unexpose_contract', '{admin}'::text[]),
    ('advance_transport', '{transport}'::text[]),
    ('wake', '{producer,admin,raw}'::text[]),
    ('get_queue', '{producer,consumer,admin,raw,reader}'::text[]),
    ('list_queues', '{producer,consumer,admin,raw,reader}'::text[]),
    ('peek', '{producer,consumer,admin,raw,reader}'::text[]),
    ('stats', '{producer,consumer,admin,raw,reader}'::text[]),
    ('next_due_at', '{producer,consumer,admin,raw,reader}'::text[]),
    ('channel', '{producer,consumer,admin,raw}'::text[]),
    ('version', '{producer,consumer,admin,raw,reader}'::text[])
$$;
comment on function pgqueue._access_matrix() is
'The functions that each kind of access may call. grant_access, revoke_access and list_access are
reserved for the owner.';

create or replace function pgqueue._verbs(access text)
returns setof regprocedure
language sql stable
as $$
    select p.oid::regprocedure
    from pgqueue._access_matrix() a
    join pg_catalog.pg_proc p on p.proname = a.verb and p.pronamespace = 'pgqueue'::regnamespace
    where access = any (a.allowed_to)
$$;
comment on function pgqueue._verbs(text) is
'The functions that a kind of access may call.';

create or replace function pgqueue._granted_access()
returns table (role_name name, access text, queue_name text, access_view regclass)
language sql stable
as $$
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
comment on function pgqueue._granted_access() is
'The access that grant_access granted to each role; queue_name is null for all queues.';

create or replace function pgqueue._is_access_to(queue_name text, name_or_pattern text)
returns boolean
language sql immutable parallel safe
as $$
    select case right(name_or_pattern, 1)
        when '*' then starts_with(queue_name, left(name_or_pattern, -1))
        else queue_name = name_or_pattern
    end
$$;
comment on function pgqueue._is_access_to(text, text) is
'Whether access to a name or a pattern is access to this queue.';

create or replace function pgqueue._check_access(role_name name, access text, queue_name text)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if access is null or access not in ('producer', 'consumer', 'admin', 'reader', 'raw', 'transport') then
        perform pgqueue._raise_invalid('access', access, 'producer, consumer, admin, reader, raw or transport');
    end if;
    if role_name is null then
        perform pgqueue._raise_invalid('role_name', null, 'the name of a role');
    end if;
    if not exists (select from pg_roles r where r.rolname = role_name) then
        perform pgqueue._raise_role_not_found(role_name);
    end if;
    if queue_name is not null and access = 'raw' then
        perform pgqueue._raise_invalid('access', access,
            'producer, consumer, admin, reader or transport for a queue: raw is access to the tables of all queues');
    end if;
    if right(queue_name, 1) = '*' and queue_name !~ '^[a-z0-9_-]{0,127}[_-][*]$' then
        perform pgqueue._raise_invalid('queue_name', queue_name,
            'the name of a queue, or the beginning of names up to a - or _, and then *');
    end if;
end;
$$;
comment on function pgqueue._check_access(name, text, text) is
'Raises 22023 for an unknown kind of access or an invalid pattern, and 42704 for an unknown role.';

create or replace function pgqueue._apply_access(role_name name, access text, for_all boolean)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    verb regprocedure;
begin
    execute format('grant usage on schema pgqueue to %I', role_name);
    if for_all and access = 'raw' then
        execute format('grant select on pgqueue.queues to %I', role_name);
        execute format(
            'grant select, insert, update, delete on pgqueue.messages, pgqueue.scheduled_messages, pgqueue.dead_messages,'
            ' pgqueue.archived_messages, pgqueue.unfiled_messages to %I',
            role_name);
        execute format('grant usage on sequence pgqueue.message_id to %I', role_name);
    end if;
    if for_all and access = 'reader' then
        execute format(
            'grant select on pgqueue.queues, pgqueue.messages, pgqueue.scheduled_messages, pgqueue.dead_messages,'
            ' pgqueue.archived_messages, pgqueue.unfiled_messages to %I',
            role_name);
        execute format('grant select on sequence pgqueue.message_id to %I', role_name);
    end if;
    if access = 'producer' then
        execute format('grant insert on pgqueue.staged_messages to %I', role_name);
    end if;
    foreach verb in array array(select v from pgqueue._verbs(access) as v) || pgqueue._functions_of_checks() loop
        execute format('grant execute on function %s to %I', verb, role_name);
    end loop;
end;
$$;
comment on function pgqueue._apply_access(name, text, boolean) is
'Grants to a role the privileges of a kind of access: the functions, which check the queue, and for all queues also the
tables.';

create or replace function pgqueue._create_access_view(access_view text)
returns regclass
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if to_regclass(access_view) is null then
        execute format('create view pgqueue.%I as select', replace(access_view, 'pgqueue.', ''));
        perform pgqueue._revoke_default_privileges(access_view::regclass);
    end if;
    return access_view::regclass;
end;
$$;
comment on function pgqueue._create_access_view(text) is
'Returns the view of this name, whose privileges are access, and creates it if it does not exist.';

create or replace function pgqueue._apply_rights(role_name name, name_or_pattern text)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    r record;
    rights_view regclass;
    n int := 0;
begin
    for r in
        with granted as materialized (
            select g.queue_name, g.access
            from pgqueue._granted_access() g
            where g.role_name = _apply_rights.role_name collate "C"
        ),
        rights as (
            select
                pgqueue._rights_view(q.name) as rights_view,
                array(
                    select distinct g.access
                    from granted g
                    where pgqueue._is_access_to(q.name, g.queue_name)
                ) as due
            from pgqueue.queues q
            where pgqueue._is_access_to(q.name, name_or_pattern collate "C")
        ),
        found as (
            select
                s.rights_view, s.due, to_regclass(s.rights_view) is null as missing,
                (
                    select string_agg(a.privilege_type, ', ' order by a.privilege_type)
                    from pg_class c
                    cross join lateral aclexplode(c.relacl) as a
                    where c.oid = to_regclass(s.rights_view) and a.grantee = quote_ident(role_name)::regrole
                ) as given
            from rights s
        )
        select * from found f where pgqueue._privileges_of(f.due) is distinct from f.given
    loop
        -- The locks of new views are held until the transaction ends. The lock table has no room for thousands.
        n := n + r.missing::int;
        continue when r.missing and n > 1000;
        rights_view := pgqueue._create_access_view(r.rights_view);
        execute format('revoke all on %s from %I', rights_view, role_name);
        if r.due <> '{}' then
            execute format('grant %s on %s to %I', pgqueue._privileges_of(r.due), rights_view, role_name);
        end if;
    end loop;
end;
$$;
comment on function pgqueue._apply_rights(name, text) is
'Makes the privileges of a role on the rights views of these queues those that the views of access give. A pattern to
which more than 1,000 queues belong gets views for 1,000 of them. For the others the check reads the views of access.';

create or replace function pgqueue._serialize_grants()
returns void
language sql volatile
as $$ select pg_advisory_xact_lock(pgqueue._lock_key('')) $$;
comment on function pgqueue._serialize_grants() is
'Makes concurrent grants wait for each other: PostgreSQL raises an error if two transactions change the privileges of
one function at once. No queue has the empty name, so the lock is free for this purpose.';

create or replace function pgqueue.grant_access(role_name name, access text, queue_name text default null)
returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
    access_view regclass := 'pgqueue.access_any';
begin
    perform pgqueue._check_access(role_name collate "C", access collate "C", queue_name collate "C");
    if queue_name is not null and right(queue_name, 1) <> '*' then
        perform pgqueue._get_locked_queue(queue_name);
    end if;
    perform pgqueue._serialize_grants();
    perform pgqueue._apply_access(role_name, access collate "C", queue_name is null);
    if queue_name is not null then
        access_view := pgqueue._create_access_view(pgqueue._access_view(queue_name));
        -- Every role can read comments. The hash in the name of the view does not tell the name of a queue.
        if right(queue_name, 1) = '*' then
            execute format('comment on view %s is %L', access_view, queue_name);
        end if;
    end if;
    execute format('grant %s on %s to %I', pgqueue._privileges_of(array[access collate "C"]), access_view, role_name);
    if not pgqueue._has_fixed_snapshot() then
        perform pgqueue._apply_rights(role_name, queue_name);
    end if;
end;
$$;
comment on function pgqueue.grant_access(name, text, text) is
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

create or replace function pgqueue._revoke_access(role_name name, access text, access_view regclass)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    verb regprocedure;
    kept record;
begin
    if access_view is not null then
        execute format('revoke %s on %s from %I', pgqueue._privileges_of(array[access]), access_view, role_name);
    end if;
    foreach verb in array array(select v from pgqueue._verbs(access) as v) loop
        execute format('revoke execute on function %s from %I', verb, role_name);
    end loop;
    if access_view = 'pgqueue.access_any'::regclass and access in ('raw', 'reader') then
        execute format(
            'revoke all on pgqueue.queues, pgqueue.messages, pgqueue.scheduled_messages, pgqueue.dead_messages,'
            ' pgqueue.archived_messages, pgqueue.unfiled_messages from %I',
            role_name);
        execute format('revoke all on sequence pgqueue.message_id from %I', role_name);
    end if;
    if access = 'producer' then
        execute format('revoke all on pgqueue.staged_messages from %I', role_name);
    end if;
    if not exists (select from pgqueue._granted_access() g where g.role_name = _revoke_access.role_name collate "C") then
        foreach verb in array pgqueue._functions_of_checks() loop
            execute format('revoke execute on function %s from %I', verb, role_name);
        end loop;
        execute format('revoke usage on schema pgqueue from %I', role_name);
    end if;
    -- Privileges that other access of the role includes are granted again.
    for kept in
        select distinct g.access, g.queue_name is null as for_all
        from pgqueue._granted_access() g
        where g.role_name = _revoke_access.role_name collate "C"
    loop
        perform pgqueue._apply_access(role_name, kept.access, kept.for_all);
    end loop;
end;
$$;
comment on function pgqueue._revoke_access(name, text, regclass) is
'Revokes a kind of access that a view records, and the privileges that no other access of the role includes.';

create or replace function pgqueue._on_queue_created_grants(q pgqueue.queues)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    left_view constant regclass := to_regclass(pgqueue._rights_view(q.name));
    patterns constant text[] := array(
        select distinct g.queue_name from pgqueue._granted_access() g where pgqueue._is_access_to(q.name, g.queue_name)
    );
begin
    -- A grant of a pattern that committed after a queue of this name was dropped may have left its view. Revokes since
    -- then have not found it.
    if left_view is not null then
        execute format('drop view %s cascade', left_view);
    end if;
    -- A rights view may be missing, so this does not wait for a transaction that grants or revokes. The lock keeps
    -- others from doing so until the queue is visible to them. The next statement reads what they committed before.
    if patterns = '{}' or pgqueue._has_fixed_snapshot() or not pg_try_advisory_xact_lock_shared(pgqueue._lock_key('')) then
        return;
    end if;
    -- revoke_access changes all views of a pattern in one transaction.
    if (
        select count(*) from pgqueue.queues o
        where exists (select from unnest(patterns) as p where pgqueue._is_access_to(o.name, p))
    ) <= 1000
    then
        perform pgqueue._apply_rights(w.role_name, q.name)
        from (select distinct g.role_name from pgqueue._granted_access() g where pgqueue._is_access_to(q.name, g.queue_name)) w;
    end if;
end;
$$;
comment on function pgqueue._on_queue_created_grants(pgqueue.queues) is
'Creates the rights view of a queue that belongs to a pattern.';

create or replace function pgqueue._on_queue_dropping_grants(q pgqueue.queues)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    access_view constant regclass := to_regclass(pgqueue._access_view(q.name));
    rights_view constant regclass := to_regclass(pgqueue._rights_view(q.name));
    dropped regclass;
begin
    if access_view is not null then
        perform pgqueue._serialize_grants();
        perform pgqueue._revoke_access(g.role_name, g.access, g.access_view)
        from pgqueue._granted_access() g
        where g.access_view = to_regclass(pgqueue._access_view(q.name));
    elsif rights_view is not null then
        perform pg_advisory_xact_lock_shared(pgqueue._lock_key(''));
    end if;
    -- Any role can make a view that depends on these. It must not keep the queue.
    foreach dropped in array array_remove(array[access_view, rights_view], null) loop
        execute format('drop view %s cascade', dropped);
    end loop;
end;
$$;
comment on function pgqueue._on_queue_dropping_grants(pgqueue.queues) is
'Ends the access that was granted for this queue. Access by a pattern stays.';

create or replace function pgqueue.revoke_access(role_name name, access text, queue_name text default null)
returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
    access_view regclass;
begin
    perform pgqueue._check_access(role_name collate "C", access collate "C", queue_name collate "C");
    -- The functions call each other with the privileges of their owner.
    if role_name collate "C" = current_user then
        perform pgqueue._raise_invalid('role_name', role_name, 'a role other than the owner of pgqueue, whose access does not come from grants');
    end if;
    if queue_name is not null and right(queue_name, 1) <> '*' then
        perform pgqueue._get_locked_queue(queue_name);
    end if;
    perform pgqueue._serialize_grants();
    perform pgqueue._require_current_snapshot(format('the privileges of role %I', role_name));
    access_view := case when queue_name is null then 'pgqueue.access_any' else to_regclass(pgqueue._access_view(queue_name)) end;
    perform pgqueue._revoke_access(role_name, access collate "C", access_view);
    perform pgqueue._apply_rights(role_name, queue_name);
end;
$$;
comment on function pgqueue.revoke_access(name, text, text) is
'Revokes what grant_access granted with the same queue_name: without queue_name the access to all queues, with it that
to the queue or the pattern. Privileges that the role has by other access remain. A transaction that is running keeps
what it has begun. Only the owner of the extension may call this. Raises 22023, 42704 for an unknown role, and PQ001.';

create or replace function pgqueue.list_access()
returns setof pgqueue.access
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
begin
    return query
    select g.role_name, g.access, g.queue_name from pgqueue._granted_access() g
    -- A restore without rows leaves the access to queues that do not exist. Their names are not known.
    where g.queue_name is distinct from substr(g.access_view::text, 9)
    order by g.role_name, g.access, g.queue_name nulls first;
end;
$$;
comment on function pgqueue.list_access() is
'Returns the access that grant_access granted: role_name, access, and queue_name, which is a name, a pattern, or null
for all queues. Access that a role has as a member of another is listed for the other. Access to queues that are missing
after a restore without rows is not listed. Only the owner of the extension may call this.';

create or replace function pgqueue._unmanaged_relation_grants()
returns table (grantee oid, object text, privileges text, grantor oid)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    -- The admin that exposed the queue grants rights on its relation to endpoints. An endpoint that publishes needs
    -- insert on the relations of all subscribers.
    select a.grantee, 'relation ' || v.relation, a.privilege_type || ' on ' || v.relation, nullif(a.grantor, v.relowner)
    from (
        select
            c.oid::regclass as relation, c.relowner, c.relacl,
            split_part(encode(g.tgargs, 'escape'), e'\\000', 1) as queue_name
        from pg_trigger g
        join pg_class c on c.oid = g.tgrelid
        where g.tgfoid = 'pgqueue._insert_by_transport'::regproc
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
$$;
comment on function pgqueue._unmanaged_relation_grants() is
'The privileges on relations of transports that no access of their holder includes. grantor is null for the owner.';

create or replace function pgqueue._findings_of_grants(q pgqueue.queues)
returns setof pgqueue.finding
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    with granted as (
        select
            'function pgqueue.' || p.proname as object, p.proowner as owner, a.grantee, coalesce(m.allowed_to, '{}') as accesses,
            false as for_all
        from pg_proc p
        left join pgqueue._access_matrix() m on m.verb = p.proname
        cross join lateral aclexplode(p.proacl) as a
        where p.pronamespace = 'pgqueue'::regnamespace
            -- As a subquery, it is called once and not for each function.
            and p.oid <> all (array(select unnest(pgqueue._functions_of_checks())))
        union all
        select
            case c.relkind when 'S' then 'sequence ' else 'table ' end || c.oid::regclass, c.relowner, a.grantee,
            case
                when c.relname = 'staged_messages' then '{producer}'::text[]
                when c.relname in (
                    'queues', 'messages', 'scheduled_messages', 'dead_messages', 'archived_messages', 'unfiled_messages',
                    'message_id') then '{raw,reader}'
                else '{}'
            end,
            c.relname <> 'staged_messages'
        from pg_class c
        cross join lateral aclexplode(c.relacl) as a
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'p', 'S')
    ),
    rights as materialized (
        select
            pgqueue._rights_view(o.name) as rights_view, w.role_name, pgqueue._privileges_of(array[w.access]) as privilege
        from pgqueue.queues o
        join pgqueue._granted_access() w on pgqueue._is_access_to(o.name, w.queue_name)
    ),
    past as (
        select g.grantee, g.object, 'all on ' || g.object as privileges, null::oid as grantor
        from granted g
        left join pg_roles r on r.oid = g.grantee
        where q.name is null and g.grantee <> g.owner and (r.oid is not null or g.grantee = 0)
            and not exists (
                select from pgqueue._granted_access() w
                where w.role_name = r.rolname and w.access = any (g.accesses)
                    and (w.queue_name is null or not g.for_all)
            )
        union all
        select a.grantee, 'table ' || c.oid::regclass, 'all on table ' || c.oid::regclass, null
        from pg_class c
        cross join lateral aclexplode(c.relacl) as a
        left join pg_roles r on r.oid = a.grantee
        where q.name is null and c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'v' and a.grantee <> c.relowner
            and c.oid <> all (array(select l.relation::oid from pgqueue._leftovers() l))
            and case
                when c.relname ~ '^access_' then a.grantee = 0
                else (coalesce(r.rolname, ''), a.privilege_type) not in (
                    select s.role_name, s.privilege from rights s where s.rights_view = 'pgqueue.' || c.relname)
            end
        union all
        select
            a.grantee, format('column %I of table %s', t.attname, c.oid::regclass),
            format('all (%I) on table %s', t.attname, c.oid::regclass), null
        from pg_class c
        join pg_attribute t on t.attrelid = c.oid
        cross join lateral aclexplode(t.attacl) as a
        where q.name is null and c.relnamespace = 'pgqueue'::regnamespace and a.grantee <> c.relowner
        union all
        -- With usage of a domain, a role could store a name that was checked before.
        select a.grantee, 'type ' || y.oid::regtype, 'all on type ' || y.oid::regtype, null
        from pg_type y
        cross join lateral aclexplode(y.typacl) as a
        where q.name is null and y.typnamespace = 'pgqueue'::regnamespace and y.typtype = 'd' and a.grantee <> y.typowner
        union all
        select a.grantee, 'schema pgqueue', 'create on schema pgqueue', null
        from pg_namespace n
        cross join lateral aclexplode(n.nspacl) as a
        where q.name is null and n.nspname = 'pgqueue' and a.privilege_type = 'CREATE' and a.grantee <> n.nspowner
        union all
        select w.* from pgqueue._unmanaged_relation_grants() w where q.name is null
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
comment on function pgqueue._findings_of_grants(pgqueue.queues) is
'The findings of doctor about privileges on functions, tables, columns, views, types and the schema that were granted
by hand, and about those on the relation of a transport that belong to no access. Such functions find no queue, and such
tables show all queues. A grant on access_* is the access that it records.';

revoke all on all functions in schema pgqueue from public;

-- The default privileges of the installing role may have granted rights on the new objects: revoke them. In an upgrade
-- only private functions are treated, as functions and tables of the API may have been granted on purpose.
do $$
declare
    installing constant boolean := coalesce(current_setting('pgqueue.installing', true) = 'yes', false);
    granted record;
begin
    for granted in
        select g.object, case a.grantee when 0 then 'public' else a.grantee::regrole::text end as grantee
        from (
            select 'function ' || p.oid::regprocedure as object, p.proacl as acl, p.proowner as owner
            from pg_catalog.pg_proc p
            where p.pronamespace = 'pgqueue'::regnamespace and (installing or p.proname ~ '^_')
            union all
            select 'table ' || c.oid::regclass, c.relacl, c.relowner
            from pg_catalog.pg_class c
            where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'p', 'S', 'v') and installing
            union all
            select 'type ' || y.oid::regtype, y.typacl, y.typowner
            from pg_catalog.pg_type y
            where y.typnamespace = 'pgqueue'::regnamespace and y.typtype = 'd'
            union all
            select 'schema pgqueue', n.nspacl, n.nspowner
            from pg_catalog.pg_namespace n
            where n.nspname = 'pgqueue' and installing
        ) g
        cross join lateral pg_catalog.aclexplode(g.acl) as a
        where a.grantee <> g.owner
        group by 1, 2
    loop
        execute pg_catalog.format('revoke all on %s from %s', granted.object, granted.grantee);
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
