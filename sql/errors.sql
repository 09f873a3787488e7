-- Every error that the product raises, each in one place: SQLSTATE, message, hint.

create or replace function pgqueue._raise_invalid(argument text, given text, expected text)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'invalid_parameter_value',
        message = format('invalid %s: %s', argument, coalesce(quote_literal(left(given, 200)), 'null')),
        hint = format('%s must be %s.', argument, expected);
end;
$$;
comment on function pgqueue._raise_invalid(text, text, text) is
'Raises 22023: a bad argument, with its name, its value and what it must be.';

create or replace function pgqueue._raise_queue_not_found(queue_name text)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'PQ001',
        message = format('queue %s does not exist',
            coalesce(quote_literal(left(queue_name, 200)), 'null')),
        hint = 'Create it with pgqueue.create_queue, or see pgqueue.list_queues().';
end;
$$;
comment on function pgqueue._raise_queue_not_found(text) is
'Raises PQ001 queue_not_found.';

create or replace function pgqueue._raise_queue_exists(queue_name text)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'PQ002',
        message = format('queue %L already exists', queue_name),
        hint = 'Change it with pgqueue.alter_queue, or call create_queue with if_not_exists => true.';
end;
$$;
comment on function pgqueue._raise_queue_exists(text) is
'Raises PQ002 queue_exists.';

create or replace function pgqueue._raise_payload_too_large(
    queue_name text, argument text, bytes bigint, limit_bytes bigint
)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'PQ003',
        message = format('%s of %s bytes is over the limit of %s bytes of queue %L',
            argument, bytes, limit_bytes, queue_name),
        hint = case argument
            when 'headers' then 'Move what is large into the payload.'
            else 'Store it elsewhere and send a reference, or raise max_payload_bytes with pgqueue.alter_queue.'
        end;
end;
$$;
comment on function pgqueue._raise_payload_too_large(text, text, bigint, bigint) is
'Raises PQ003 payload_too_large.';

create or replace function pgqueue._raise_queue_busy(queue_name text, verb text)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'PQ004',
        message = format('queue %L is busy: %s waited in vain for a lock', queue_name, verb),
        hint = 'A longer transaction holds the queue, its messages or its table. Nothing was changed: try again.';
end;
$$;
comment on function pgqueue._raise_queue_busy(text, text) is
'Raises PQ004 queue_busy.';

create or replace function pgqueue._raise_role_not_found(role_name name)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'undefined_object',
        message = format('role %I does not exist', role_name),
        hint = 'Create it with create role.';
end;
$$;
comment on function pgqueue._raise_role_not_found(name) is
'Raises 42704: an unknown role.';
