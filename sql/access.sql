-- Decides which queues a role may use. The record is the privileges on views without columns: access_any stands for
-- all queues, access_<hash> for a queue or a pattern. PostgreSQL checks the privileges, follows the membership of
-- roles, and dumps them. The checks of the domains in types.sql are made here.

create or replace function pgqueue._is_name(name text) returns boolean
language sql immutable parallel safe as $$ select coalesce(name collate "C" ~ '^[a-z0-9_-]{1,128}$', false) $$;

create or replace function pgqueue._privileges_of(accesses text[]) returns text
language sql immutable parallel safe as $$
    select string_agg(p.privilege, ', ' order by p.privilege)
    from (values
        ('producer', 'INSERT'), ('consumer', 'UPDATE'), ('admin', 'DELETE'),
        ('reader', 'SELECT'), ('raw', 'TRUNCATE'), ('transport', 'TRIGGER')
    ) as p (access, privilege)
    where p.access = any (accesses)
$$;

-- Stable, as _to_micros.
create or replace function pgqueue._access_view(name_or_pattern text) returns text
language sql stable parallel safe
as $$ select 'pgqueue.access_' || left(encode(sha256(convert_to(name_or_pattern, 'UTF8')), 'hex'), 56) $$;

create or replace function pgqueue._may_use(caller name, queue_name text, privileges text) returns boolean
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    n int := 0;
begin
    if has_table_privilege(caller, 'pgqueue.access_any'::regclass, privileges) then
        return true;
    end if;
    if not pgqueue._is_name(queue_name) then
        return false;
    end if;
    if has_table_privilege(caller, to_regclass(pgqueue._access_view(queue_name)), privileges) then
        return true;
    end if;
    loop
        n := regexp_instr(queue_name, '[-_]', n + 1);
        exit when n = 0;
        if has_table_privilege(caller, to_regclass(pgqueue._access_view(left(queue_name, n) || '*')), privileges) then
            return true;
        end if;
    end loop;
    return false;
end;
$$;

-- For the checks of the domains: unless the caller may use the queue, raises PQ001 as for a queue that does not exist
-- or, if the queue would be created, 42501.
create or replace function pgqueue._may_or_raise(queue_name text, privileges text, creating boolean) returns boolean
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
    -- A null stands for all queues, which the verb limits to those of its caller, or is refused by the verb.
    if queue_name is not null and not pgqueue._may_use(current_user, queue_name, privileges) then
        if creating then
            perform pgqueue._raise('not_allowed', current_user, 'create queue', left(queue_name, 128));
        end if;
        perform pgqueue._raise('queue_not_found', variadic array[queue_name, current_user] || array(
            select a from unnest('{producer,consumer,admin,reader,raw,transport}'::text[]) as a
            where strpos(privileges, pgqueue._privileges_of(array[a])) > 0));
    end if;
    return true;
end;
$$;

create or replace function pgqueue._require_admin_of_all(caller name, verb text) returns void
language plpgsql stable as $$
begin
    if not has_table_privilege(caller, 'pgqueue.access_any'::regclass, pgqueue._privileges_of('{admin}')) then
        perform pgqueue._raise('not_allowed', caller, 'call, without admin access to all queues,', verb);
    end if;
end;
$$;

do $$
declare
    d record;
begin
    for d in
        select
            y.typname as name, y.typname = 'new_queue_of_admin' as creating,
            pgqueue._privileges_of(array(
                select a from unnest('{producer,consumer,admin,raw,reader,transport}'::text[]) as a
                where strpos(y.typname, a) > 0 or y.typname = 'queue_of_any_access' and a <> 'transport'
            )) as privileges
        from pg_catalog.pg_type y
        where y.typnamespace = 'pgqueue'::regnamespace and y.typname ~ '^(new_)?queue_of_'
    loop
        execute format('alter domain pgqueue.%I drop constraint if exists caller_may_use_queue', d.name);
        -- The looks at the views of the queue and of the shortest patterns are written out: a call of a function costs
        -- several of them. to_regclass truncates the name of the view as _access_view does.
        execute format(
            'alter domain pgqueue.%I add constraint caller_may_use_queue check ('
            'has_table_privilege(''pgqueue.access_any''::regclass, %2$L)%3$s or pgqueue._may_or_raise(value, %2$L, %4$L))',
            d.name, d.privileges, (
                select string_agg(format(
                    ' or has_table_privilege(to_regclass(textcat(''pgqueue.access_'','
                    ' encode(sha256(convert_to(%s, ''UTF8'')), ''hex''))), %L)', n.name, d.privileges), '' order by n.place)
                from unnest(array[
                    'value', 'textcat(substring(value, ''^[^-_]*[-_]''), ''*'')',
                    'textcat(substring(value, ''^[^-_]*[-_][^-_]*[-_]''), ''*'')'
                ]) with ordinality as n (name, place)
            ), d.creating);
        execute format('revoke usage on domain pgqueue.%I from public', d.name);
    end loop;
    revoke usage on domain pgqueue.caller from public;
end;
$$;
