-- A register is a sequence that is used as a shared variable. Its value survives a crash. A sequence is updated in
-- place: no row version, no row lock, no rollback. Every register is a hint: a wrong value costs time, but loses no
-- message. Counters are sequences, too. Their totals never decrease.

-- A moment in the form that registers hold: microseconds since 1970, exact until the year 2106, then to two
-- microseconds. Stable, as date_part is: PostgreSQL could not inline an immutable function with this body.
create or replace function pgqueue._to_micros(moment timestamptz) returns bigint
language sql stable parallel safe as $$ select (date_part('epoch', moment) * 1000000)::bigint $$;

create or replace function pgqueue._from_micros(micros bigint) returns timestamptz
language sql stable parallel safe
as $$ select timestamptz '1970-01-01 00:00:00+00' + micros * interval '1 microsecond' $$;

-- A due time for an insert into scheduled_messages: at most 100 ms before the clock of the inserting statement.
-- sweep_state.first_due_at relies on this. The caller may have read the clock before it waited for a lock.
create or replace function pgqueue._clamp_due_at(due_at timestamptz) returns timestamptz
language sql volatile as $$ select greatest(due_at, pgqueue._now() - interval '100 ms') $$;

create or replace function pgqueue._drop_registers(queue_id bigint, kept text[]) returns void
language plpgsql volatile as $$
declare
    register regclass;
begin
    for register in
        select c.oid from pg_class c
        where c.relnamespace = 'pgqueue'::regnamespace
            -- Range conditions on the name, which a catalog index supports.
            and c.relname >= format('queue_%s_', queue_id)::name and c.relname < format('queue_%s_~', queue_id)::name
            and c.relname <> all (select format('queue_%s_%s', queue_id, k) from unnest(kept) as k)
    loop
        -- Another role can have a view of a register, which must not keep the queue.
        execute format('drop sequence %s cascade', register);
    end loop;
end;
$$;

-- The number of a new queue: that of a dedicated table that was left for it, otherwise the next one without such a
-- table. Drops the registers that were left for this number.
create or replace function pgqueue._take_number(queue_name text) returns bigint
language plpgsql volatile as $$
declare
    number bigint;
begin
    -- Keeps _drop_leftovers away.
    lock table only pgqueue.queues in row exclusive mode;
    select substring(i.inhrelid::regclass::text, '[0-9]+')::bigint into number
    from pg_inherits i
    where i.inhparent = 'pgqueue.messages'::regclass
        and obj_description(i.inhrelid, 'pg_class') = format('The messages of queue %s.', queue_name);
    if found then
        -- No later queue gets this number.
        loop
            exit when nextval('pgqueue.queue_id') >= number;
        end loop;
    else
        loop
            number := nextval('pgqueue.queue_id');
            exit when to_regclass(format('pgqueue.messages_%s', number)) is null;
        end loop;
    end if;
    perform pgqueue._drop_registers(number, '{seq}');
    return number;
end;
$$;

create or replace function pgqueue._create_sequence(name text) returns regclass
language plpgsql volatile set client_min_messages = warning as $$
begin
    -- After waiting for a lock, a session's catalog cache can be stale. "if not exists" reads the catalog again.
    execute format('create sequence if not exists pgqueue.%I', split_part(name, '.', 2));
    perform pgqueue._revoke_default_privileges(name::regclass);
    return name::regclass;
end;
$$;

create or replace function pgqueue._create_register(queue_id bigint, role text) returns regclass
language sql volatile as $$ select pgqueue._create_sequence(format('pgqueue.queue_%s_%s', queue_id, role)) $$;

create or replace function pgqueue._find_registers() returns trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    -- Null for a new queue or kind. pg_dump writes the number of a register in place of its name if the queue was
    -- dropped, or got another kind, since the snapshot of the dump. In a restored database another relation can have
    -- this number. The dump has the registers, too.
    if new.fresh_from_id is null
        or new.fresh_from_id is distinct from to_regclass(format('pgqueue.queue_%s_fresh_from_id', new.queue_id))
    then
        new.fresh_from_id := pgqueue._create_register(new.queue_id, 'fresh_from_id');
        new.sweep_resume_id := pgqueue._create_register(new.queue_id, 'sweep_resume_id');
        new.next_sweep_at := pgqueue._create_register(new.queue_id, 'next_sweep_at');
        new.first_due_at := pgqueue._create_register(new.queue_id, 'first_due_at');
        new.waiting_until := pgqueue._create_register(new.queue_id, 'waiting_until');
        perform setval(r, 1)
        from unnest(array[
            new.fresh_from_id, new.sweep_resume_id, new.next_sweep_at, new.first_due_at, new.waiting_until
        ]) as r
        where pg_sequence_last_value(r) is null;
        if new.priorities then
            perform pgqueue._create_register(new.queue_id, format('level_%s', n)) from generate_series(0, 9) as n;
            -- Functions that read the messages by id skip the vacant ids only below this register.
            perform setval(new.fresh_from_id, 4611686018427387904);
        end if;
    end if;
    return new;
end;
$$;

create or replace trigger find_registers
before insert or update of fresh_from_id on pgqueue.queues for each row execute function pgqueue._find_registers();
-- Also in sessions that have triggers disabled: they can create queues, too.
alter table pgqueue.queues enable always trigger find_registers;

create or replace function pgqueue._register_value(register regclass) returns bigint
language sql volatile as $$ select coalesce(pg_sequence_last_value(register), setval(register, 1)) $$;

-- The name of a sequence that is found by the name of the queue, without reading its row. It contains a hash of this
-- name, as the name of a queue can be longer than an identifier. Inlined.
create or replace function pgqueue._sequence_name(role text, queue_name text) returns text
language sql immutable parallel safe
as $$ select 'pgqueue.' || role || '_' || to_hex(hashtextextended(queue_name collate "C", 0)) $$;

create or replace function pgqueue._counter(role text, queue_name text) returns regclass
language sql stable parallel safe as $$ select to_regclass(pgqueue._sequence_name(role, queue_name)) $$;

create or replace function pgqueue._counter_roles() returns text[]
language sql immutable parallel safe
as $$ select '{enqueued,acknowledged,failed,dead}'::text[] $$;

create or replace function pgqueue._count_many(counter regclass, messages int) returns int
language plpgsql volatile as $$
begin
    -- A loop over one expression. A statement with generate_series would take twice as long.
    for i in 1..messages loop
        continue when nextval(counter) > 0;
    end loop;
    return messages;
end;
$$;

-- Counts messages of a queue and returns their number. role is enqueued, acknowledged, failed or dead. Nothing is
-- counted if messages is null or 0, or if the counter is missing. Call it inside an expression that is evaluated
-- anyway, as each further one would slow down the call by its preparation. Inlined. A counter is never 0 after nextval.
create or replace function pgqueue._count(role text, queue_name text, messages int) returns int
language sql volatile as $$
    select case
        when messages > 1 then pgqueue._count_many(pgqueue._counter(role, queue_name), messages)
        -- `and` would evaluate its second operand even if messages is null.
        when messages = 1 then case nextval(pgqueue._counter(role, queue_name)) when 0 then 0 else 1 end
        else messages
    end
$$;

create or replace function pgqueue._missing_counters(queue_name text) returns text[]
language sql stable as $$
    select array(select r from unnest(pgqueue._counter_roles()) as r where pgqueue._counter(r, queue_name) is null)
$$;

create or replace function pgqueue._drop_counters(queue_name text) returns void
language plpgsql volatile set client_min_messages = warning as $$
begin
    execute format('drop sequence if exists %s cascade', (
        select string_agg(pgqueue._sequence_name(r, queue_name), ', ') from unnest(pgqueue._counter_roles()) as r));
end;
$$;

create or replace function pgqueue._revoke_default_privileges(relation regclass) returns void
language plpgsql volatile as $$
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
