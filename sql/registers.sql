-- Registers are sequences used as variables in shared memory that survive a crash. A sequence is updated in place: no
-- row version, no row lock, no rollback. Every register is a hint: a wrong value costs time, but loses no message.

create or replace function pgqueue._to_micros(moment timestamptz)
returns bigint
language sql stable parallel safe
as $$ select (date_part('epoch', moment) * 1000000)::bigint $$;
comment on function pgqueue._to_micros(timestamptz) is
'A moment in the form that registers hold: microseconds since 1970, exact until the year 2106, then to two microseconds.
Stable, as date_part is: PostgreSQL could not inline an immutable function with this body.';

create or replace function pgqueue._from_micros(micros bigint)
returns timestamptz
language sql stable parallel safe
as $$ select timestamptz '1970-01-01 00:00:00+00' + micros * interval '1 microsecond' $$;
comment on function pgqueue._from_micros(bigint) is
'The moment that a register value denotes.';

create or replace function pgqueue._due_from_now(due_at timestamptz)
returns timestamptz
language sql volatile
as $$ select greatest(due_at, pgqueue._now() - interval '1 s') $$;
comment on function pgqueue._due_from_now(timestamptz) is
'A due time for an insert into scheduled_messages: at most one second before the clock of the inserting statement.
sweep_state.first_due_at relies on this. The caller may have read the clock before it waited for a lock.';

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
'Creates a register. Its name contains the number of the queue, as the name of a queue can be longer than an
identifier.';

create or replace function pgqueue._register_value(register regclass)
returns bigint
language sql volatile
as $$ select coalesce(pg_sequence_last_value(register), setval(register, 1)) $$;
comment on function pgqueue._register_value(regclass) is
'The value of a register. A register without a value is set to 1, for example if the tables were restored or replicated
without the sequences.';

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
'Revokes what the default privileges of the owner granted on a new table or sequence.';
