-- The errors of the core. Each function raises one error, with its SQLSTATE, message and hint. A room defines the
-- errors that only it raises at the top of its own file.

create or replace function pgqueue._with_number(number bigint, noun text) returns text
language sql immutable strict parallel safe
as $$ select number || ' ' || noun || case number when 1 then '' else 's' end $$;

create or replace function pgqueue._element(argument text, place bigint, messages int) returns text
language sql immutable strict parallel safe as $$
    select case when messages = 1 then argument else format('%s[%s]',
        case argument when 'headers' then 'headers' when 'body' then 'bodies' when 'priority' then 'priorities'
            else argument || 's' end, place) end
$$;
comment on function pgqueue._element(text, bigint, int) is
'The name of an argument of enqueue_batch at a place, such as payloads[6] for payload; without the place if the batch
has one message.';

create or replace function pgqueue._raise_invalid(argument text, given text, expected text) returns void
language plpgsql stable as $$
begin
    raise exception using
        errcode = 'invalid_parameter_value',
        message = format('invalid %s: %s', argument, coalesce(quote_literal(left(given, 200)), 'null')),
        hint = format('%s must be %s.', argument, expected);
end;
$$;

create or replace function pgqueue._raise_queue_not_found(
    queue_name text, role_name name default null, accesses text[] default null
) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
    raise exception using
        errcode = 'PQ001',
        message = format('queue %s does not exist',
            coalesce(quote_literal(left(queue_name, 200)), 'null')),
        hint = 'Create it with pgqueue.create_queue, or see pgqueue.list_queues().'
            || case when role_name is null then '' else format(
                ' If it exists, role %I lacks the access %s to it: select pgqueue.grant_access(%L, %L, %L).',
                role_name, array_to_string(accesses, ' or '), role_name, accesses[1], left(queue_name, 200)) end;
end;
$$;
comment on function pgqueue._raise_queue_not_found(text, name, text[]) is
'Raises PQ001 queue_not_found. If accesses are given, the queue may exist: the hint says which access the role lacks.';

create or replace function pgqueue._raise_queue_exists(queue_name text) returns void
language plpgsql stable as $$
begin
    raise exception using
        errcode = 'PQ002',
        message = format('queue %L already exists', queue_name),
        hint = 'Change it with pgqueue.alter_queue, or call create_queue with if_not_exists => true.'
            || case when current_query() like '%create_queue(%).*%'
                then ' PostgreSQL calls the function in (create_queue(...)).* once for each column. Write select * from'
                    ' pgqueue.create_queue(...).'
                else '' end;
end;
$$;

create or replace function pgqueue._raise_payload_too_large(
    queue_name text, argument text, bytes bigint, limit_bytes bigint
) returns void
language plpgsql stable as $$
begin
    raise exception using
        errcode = 'PQ003',
        message = format('%s of %s is over the limit of %s of queue %L',
            argument, pgqueue._with_number(bytes, 'byte'), pgqueue._with_number(limit_bytes, 'byte'), queue_name),
        hint = case argument
            when 'headers' then 'Move large values into the payload.'
            else 'Store the content elsewhere and send a reference, or raise max_payload_bytes with pgqueue.alter_queue.'
        end;
end;
$$;

create or replace function pgqueue._raise_queue_busy(queue_name text, verb text) returns void
language plpgsql stable as $$
begin
    raise exception using
        errcode = 'PQ004',
        message = format('queue %L is busy: %s could not obtain a lock', queue_name, verb),
        hint = 'Another transaction holds a lock on the queue, its messages or its table, or the database is being dumped. Nothing was changed. Try again later.';
end;
$$;

create or replace function pgqueue._raise_stale_snapshot(object text) returns void
language plpgsql stable as $$
begin
    raise exception using
        errcode = 'serialization_failure',
        message = format('could not serialize access to %s', object),
        detail = 'The snapshot of this transaction is older than a change that another transaction has committed.',
        hint = 'Retry the transaction, or run it in read committed, where this error cannot occur.';
end;
$$;
comment on function pgqueue._raise_stale_snapshot(text) is
'Raises 40001. In read committed every snapshot shows what other transactions have committed.';

create or replace function pgqueue._raise_role_not_found(role_name name) returns void
language plpgsql stable as $$
begin
    raise exception using
        errcode = 'undefined_object',
        message = format('role %I does not exist', role_name),
        hint = case role_name
            when 'public' then 'Access cannot be granted to PUBLIC. Create a role, and grant it to the users who need access.'
            else 'Create the role with create role.'
        end;
end;
$$;

create or replace function pgqueue._raise_not_allowed(role_name name, action text, object text) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
    raise exception using
        errcode = 'insufficient_privilege',
        message = format('role %I may not %s %I', role_name, action, object),
        hint = 'The owner can grant this privilege.';
end;
$$;
