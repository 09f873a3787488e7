-- Exposes the tables in a schema of another name, for applications whose SQL names that schema: sends, claims and
-- acknowledgements by plain SQL on automatically updatable views. The views have no rights of their own: PostgreSQL
-- checks the rights of their reader on the tables.

create or replace function pgqueue._contract_views(schema_name text) returns setof pg_catalog.pg_class
language sql stable as $$
    select c.* from pg_catalog.pg_class c
    where c.relnamespace = (select n.oid from pg_catalog.pg_namespace n where n.nspname = schema_name)
        and c.relkind = 'v' and pg_catalog.pg_get_userbyid(c.relowner) = current_user
        and pg_catalog.obj_description(c.oid, 'pg_class') = pgqueue._exposed_comment('contract')
$$;

create or replace function pgqueue.expose_contract(
    schema_name text default 'mdb_queue', caller pgqueue.caller default current_user
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    missing text[];
    table_name text;
    relation text;
begin
    perform pgqueue._require_admin_of_all(caller, 'expose_contract');
    perform pgqueue._check_exposure(schema_name collate "C");
    -- Concurrent calls wait for each other, so that the second one finds the views of the first. The lock is that of
    -- changes of privileges.
    perform pg_advisory_xact_lock(pgqueue._lock_key(''));
    perform pgqueue._require_current_snapshot(format('schema %I', schema_name));
    missing := array(
        select t from unnest(array[
            'queues', 'messages', 'scheduled_messages', 'dead_messages', 'archived_messages', 'unfiled_messages'
        ]) as t
        where t not in (select v.relname from pgqueue._contract_views(schema_name collate "C") v)
    );
    if missing = '{}' then
        return false;
    end if;
    if not exists (select from pg_namespace n where n.nspname = schema_name collate "C") then
        if not has_database_privilege(caller, current_database(), 'CREATE') then
            perform pgqueue._raise('not_allowed', caller, 'create schemas in database', current_database());
        end if;
        execute format('create schema %I', schema_name);
        execute format('comment on schema %I is %L', schema_name, pgqueue._exposed_comment('contract'));
        execute format('grant usage on schema %I to public', schema_name);
    elsif not has_schema_privilege(caller, schema_name, 'CREATE') then
        perform pgqueue._raise('not_allowed', caller, 'create relations in schema', schema_name);
    end if;
    foreach table_name in array missing loop
        relation := format('%I.%I', schema_name, table_name);
        execute format(
            'create view %s with (security_invoker = true) as select t.* from pgqueue.%I t', relation, table_name);
        perform pgqueue._revoke_default_privileges(relation::regclass);
        execute format('comment on view %s is %L', relation, pgqueue._exposed_comment('contract'));
        -- The rights on the table decide, because the view has security_invoker.
        execute format('grant select, insert, update, delete on %s to public', relation);
    end loop;
    return true;
end;
$$;
comment on function pgqueue.expose_contract is
'Creates views over the tables queues, messages, scheduled_messages, dead_messages, archived_messages and
unfiled_messages in schema_name (default mdb_queue), and returns true; false if the schema has them. An application
whose SQL names that schema sends, claims, extends, gives back and acknowledges messages through them as on the tables.
A schema that does not exist is created, and every role may use it. The rights on the tables decide what a role may do:
grant_access(role, ''raw'') lets it use all statements, reader lets it read. The caller needs the CREATE privilege on
the schema, or on the database if the schema is created. Raises 22023, 42501, and 42P07 if another relation has one of
these names.';

create or replace function pgqueue.unexpose_contract(
    schema_name text default 'mdb_queue', caller pgqueue.caller default current_user
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500 ms'
set jit = off as $$
declare
    views regclass[];
begin
    perform pgqueue._require_admin_of_all(caller, 'unexpose_contract');
    perform pgqueue._check_exposure(schema_name collate "C");
    perform pg_advisory_xact_lock(pgqueue._lock_key(''));
    perform pgqueue._require_current_snapshot(format('schema %I', schema_name));
    views := array(select v.oid::regclass from pgqueue._contract_views(schema_name collate "C") v);
    if views = '{}' then
        return false;
    end if;
    execute 'drop view ' || array_to_string(views, ', ');
    if exists (
        select from pg_namespace n
        where n.nspname = schema_name collate "C" and pg_get_userbyid(n.nspowner) = current_user
            and obj_description(n.oid, 'pg_namespace') = pgqueue._exposed_comment('contract')
    ) then
        begin
            execute format('drop schema %I', schema_name);
        exception when dependent_objects_still_exist then
            -- Other objects are in the schema.
            null;
        end;
    end if;
    return true;
end;
$$;
comment on function pgqueue.unexpose_contract is
'Drops the views that expose_contract created and returns true; false if there are none. Drops the schema, too, if
expose_contract created it and nothing else is in it. The tables and their messages stay. Raises 22023, 55P03 if a
longer transaction uses a view, and 2BP01 if another object depends on one.';
