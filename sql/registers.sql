-- Registers: sequences used as words of shared memory that survive a crash. A sequence is updated in
-- place: no row version, no row lock, no rollback. Every register is a hint: a wrong value costs
-- time, never a message.

create or replace function pgqueue._to_micros(moment timestamptz)
returns bigint
language sql stable parallel safe
as $$ select (date_part('epoch', moment) * 1000000)::bigint $$;
comment on function pgqueue._to_micros(timestamptz) is
'A moment as a register holds it: microseconds since 1970, exact until the year 2106, then to two microseconds. Stable as date_part is: an immutable function could not be inlined.';

create or replace function pgqueue._from_micros(micros bigint)
returns timestamptz
language sql stable parallel safe
as $$ select timestamptz '1970-01-01 00:00:00+00' + micros * interval '1 microsecond' $$;
comment on function pgqueue._from_micros(bigint) is
'What a register holds, as a moment.';

create or replace function pgqueue._create_register(queue_id bigint, role text)
returns regclass
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    execute format('create sequence pgqueue.%I', format('queue_%s_%s', queue_id, role));
    perform pgqueue._revoke_default_privileges(format('pgqueue.%I', format('queue_%s_%s', queue_id, role))::regclass);
    return format('pgqueue.%I', format('queue_%s_%s', queue_id, role))::regclass;
end;
$$;
comment on function pgqueue._create_register(bigint, text) is
'Creates a register. It is named by number: a queue''s name may be longer than an identifier.';

create or replace function pgqueue._register_value(register regclass)
returns bigint
language sql volatile
as $$ select coalesce(pg_sequence_last_value(register), setval(register, 1)) $$;
comment on function pgqueue._register_value(regclass) is
'What a register holds. One that holds nothing, as where sequences were not restored or replicated with the tables, begins anew at 1.';

create or replace function pgqueue._revoke_default_privileges(relation regclass)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    role_name name;
begin
    for role_name in
        select distinct r.rolname
        from pg_class c cross join lateral aclexplode(c.relacl) as a
        left join pg_roles r on r.oid = a.grantee
        where c.oid = relation and a.grantee <> c.relowner
    loop
        if role_name is null then
            execute format('revoke all on %s from public', relation);
        else
            execute format('revoke all on %s from %I', relation, role_name);
        end if;
    end loop;
end;
$$;
comment on function pgqueue._revoke_default_privileges(regclass) is
'Takes back what the default privileges of its owner granted on a new table or sequence.';
