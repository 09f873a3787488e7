-- Access to the functions and tables: defines what each kind of access may call, grants it and revokes it. Grants to a
-- role are the only record of its access.

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
    ('create_schedule', '{admin}'::text[]),
    ('alter_schedule', '{admin}'::text[]),
    ('drop_schedule', '{admin}'::text[]),
    ('run_schedule', '{producer,admin}'::text[]),
    ('list_schedules', '{consumer,admin,reader}'::text[]),
    ('claim', '{consumer}'::text[]),
    ('claim_any', '{consumer}'::text[]),
    ('ack', '{consumer}'::text[]),
    ('ack_batch', '{consumer}'::text[]),
    ('exchange', '{consumer}'::text[]),
    ('nack', '{consumer}'::text[]),
    ('reject', '{consumer}'::text[]),
    ('record_failure', '{consumer}'::text[]),
    ('release', '{consumer}'::text[]),
    ('extend', '{consumer}'::text[]),
    ('extend_batch', '{consumer}'::text[]),
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
'The functions that each kind of access may call. grant_access and revoke_access are reserved for the owner.';

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

create or replace function pgqueue._has_access(role_name name, access text)
returns boolean
language sql stable
as $$
    -- Raw access is recognized by its rights on the tables, as other kinds of access include all of its functions.
    select not exists (
            select from pgqueue._verbs(access) as v
            where not exists (
                select from pg_catalog.pg_proc p cross join lateral aclexplode(p.proacl) as g
                where p.oid = v and g.privilege_type = 'EXECUTE' and g.grantee = (select r.oid from pg_catalog.pg_roles r where r.rolname = role_name)
            )
        )
        and (
            access <> 'raw'
            or exists (
                select from pg_catalog.pg_class c cross join lateral aclexplode(c.relacl) as g
                where c.oid = 'pgqueue.messages'::regclass and g.privilege_type = 'INSERT'
                    and g.grantee = (select r.oid from pg_catalog.pg_roles r where r.rolname = role_name)
            )
        )
        -- Reader access is recognized by select on message_id, which no other access includes.
        and (
            access <> 'reader'
            or exists (
                select from pg_catalog.pg_class c cross join lateral aclexplode(c.relacl) as g
                where c.oid = 'pgqueue.message_id'::regclass and g.privilege_type = 'SELECT'
                    and g.grantee = (select r.oid from pg_catalog.pg_roles r where r.rolname = role_name)
            )
        )
$$;
comment on function pgqueue._has_access(name, text) is
'Whether a kind of access was granted to the role itself.';

create or replace function pgqueue._check_access(role_name name, access text)
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
end;
$$;
comment on function pgqueue._check_access(name, text) is
'Raises 22023 for an unknown kind of access and 42704 for an unknown role.';

create or replace function pgqueue._apply_access(role_name name, access text)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    verb regprocedure;
begin
    execute format('grant usage on schema pgqueue to %I', role_name);
    if access = 'raw' then
        execute format('grant select on pgqueue.queues to %I', role_name);
        execute format(
            'grant select, insert, update, delete on pgqueue.messages, pgqueue.scheduled_messages, pgqueue.dead_messages,'
            ' pgqueue.archived_messages, pgqueue.unfiled_messages to %I',
            role_name);
        execute format('grant usage on sequence pgqueue.message_id to %I', role_name);
    end if;
    if access = 'reader' then
        execute format(
            'grant select on pgqueue.queues, pgqueue.messages, pgqueue.scheduled_messages, pgqueue.dead_messages,'
            ' pgqueue.archived_messages, pgqueue.unfiled_messages to %I',
            role_name);
        execute format('grant select on sequence pgqueue.message_id to %I', role_name);
    end if;
    if access = 'producer' then
        execute format('grant insert on pgqueue.staged_messages to %I', role_name);
    end if;
    for verb in select v from pgqueue._verbs(access) as v loop
        execute format('grant execute on function %s to %I', verb, role_name);
    end loop;
end;
$$;
comment on function pgqueue._apply_access(name, text) is
'Grants all privileges of a kind of access to a role.';

create or replace function pgqueue._serialize_grants()
returns void
language sql volatile
as $$ select pg_advisory_xact_lock(pgqueue._lock_key('')) $$;
comment on function pgqueue._serialize_grants() is
'Makes concurrent grants wait for each other: PostgreSQL raises an error if two transactions change the privileges of
one function at once. No queue has the empty name, so the lock is free for this purpose.';

create or replace function pgqueue.grant_access(role_name name, access text)
returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform pgqueue._check_access(role_name collate "C", access);
    perform pgqueue._serialize_grants();
    perform pgqueue._apply_access(role_name, access);
end;
$$;
comment on function pgqueue.grant_access(name, text) is
'Grants a kind of access to a role. A producer sends messages, also by staging, and sees the depth of queues but no
payload. A consumer claims, acknowledges, receives, reads streams and browses, including the archive. An admin creates,
alters, pauses, drops, redrives, purges, maintains the archive and browses dead letters. A reader reads and browses all
messages, by select on the tables, and changes nothing; batch reads of Spark need this access. raw is select, insert,
update and delete on the tables, for applications that use plain SQL, also through the views of expose_contract.
transport is the use of relations that expose_transport created; the role also needs privileges on those relations. A
role may have several kinds of access. Only the owner of the extension may call this. Raises 22023, and 42704 for an
unknown role.';

create or replace function pgqueue.revoke_access(role_name name, access text)
returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    kept text[];
    other text;
    verb regprocedure;
begin
    perform pgqueue._check_access(role_name collate "C", access);
    -- The functions call each other with the privileges of their owner.
    if role_name collate "C" = current_user then
        perform pgqueue._raise_invalid('role_name', role_name, 'a role other than the owner of pgqueue, whose access does not come from grants');
    end if;
    perform pgqueue._serialize_grants();
    perform pgqueue._require_current_snapshot(format('the privileges of role %I', role_name));
    kept := array(
        select k from unnest(array['producer', 'consumer', 'admin', 'reader', 'raw', 'transport']) as k
        where k <> access and pgqueue._has_access(role_name collate "C", k));
    for verb in select v from pgqueue._verbs(access) as v loop
        execute format('revoke execute on function %s from %I', verb, role_name);
    end loop;
    if access in ('raw', 'reader') then
        execute format(
            'revoke all on pgqueue.queues, pgqueue.messages, pgqueue.scheduled_messages, pgqueue.dead_messages,'
            ' pgqueue.archived_messages, pgqueue.unfiled_messages from %I',
            role_name);
        execute format('revoke all on sequence pgqueue.message_id from %I', role_name);
    end if;
    if access = 'producer' then
        execute format('revoke all on pgqueue.staged_messages from %I', role_name);
    end if;
    if kept = '{}' then
        execute format('revoke usage on schema pgqueue from %I', role_name);
    end if;
    -- Privileges that another kind of access includes are granted again.
    foreach other in array kept loop
        perform pgqueue._apply_access(role_name, other);
    end loop;
end;
$$;
comment on function pgqueue.revoke_access(name, text) is
'Revokes what grant_access granted. Privileges that the role has by another kind of access remain. Only the owner of the
extension may call this. Raises 22023, and 42704 for an unknown role.';

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
            where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'p', 'S') and installing
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

    perform pgqueue._apply_access((h ->> 0)::name, h ->> 1)
    from pg_catalog.jsonb_array_elements(nullif(current_setting('pgqueue.had_access', true), '')::jsonb) as h;
    perform pg_catalog.set_config('pgqueue.had_access', '', true);
end;
$$;
