-- The errors, each with its SQLSTATE, message and hint. Those of rooms whose text needs more than names and numbers
-- stand at the top of their files.

-- Neither strict nor immutable: PostgreSQL could not inline these two.
create or replace function pgqueue._with_number(number bigint, noun text) returns text
language sql stable parallel safe
as $$ select number || ' ' || noun || case number when 1 then '' else 's' end $$;

-- The name of an argument of enqueue_batch at a place, such as payloads[6] for payload; without the place if the batch
-- has one message.
create or replace function pgqueue._element(argument text, place bigint, messages int) returns text
language sql stable parallel safe as $$
    select case when messages = 1 then argument else format('%s[%s]',
        case argument when 'headers' then 'headers' when 'body' then 'bodies' when 'priority' then 'priorities'
            else argument || 's' end, place) end
$$;

create or replace function pgqueue._raise_invalid(argument text, given text, expected text) returns void
language plpgsql stable as $$
begin
    raise exception using
        errcode = 'invalid_parameter_value',
        message = format('invalid %s: %s', argument, coalesce(quote_literal(left(given, 200)), 'null')),
        hint = format('%s must be %s.', argument, expected);
end;
$$;

-- Raises 22023 unless the argument is valid. It takes a microsecond, so frequent verbs such as ack test it themselves.
create or replace function pgqueue._require(is_valid boolean, argument text, given text, expected text) returns void
language plpgsql stable as $$
begin
    if is_valid is not true then
        perform pgqueue._raise_invalid(argument, given, expected);
    end if;
end;
$$;

create or replace function pgqueue._raise(error text, variadic args text[]) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    quoted constant text := coalesce(quote_literal(left(args[1], 255)), 'null');
begin
    case error
        when 'queue_not_found' then raise exception using
            errcode = 'PQ001',
            message = format('queue %s does not exist', quoted),
            hint = 'Create it with pgqueue.create_queue, or see pgqueue.list_queues().'
                -- The role that calls, and accesses one of which it needs: the queue may exist.
                || case when args[2] is null then '' else format(
                    ' If it exists, role %I lacks the access %s to it: select pgqueue.grant_access(%L, %L, %s).',
                    args[2], array_to_string(args[3:], ' or '), args[2], args[3], quoted) end;
        when 'queue_exists' then raise exception using
            errcode = 'PQ002',
            message = format('queue %s already exists', quoted),
            hint = 'Change it with pgqueue.alter_queue, or call create_queue with if_not_exists => true.'
                || case when current_query() like '%create_queue(%).*%'
                    then ' PostgreSQL calls the function in (create_queue(...)).* once for each column. Write select * from'
                        ' pgqueue.create_queue(...).'
                    else '' end;
        when 'payload_too_large' then raise exception using
            errcode = 'PQ003',
            message = format('%s of %s is over the limit of %s of queue %s', args[2],
                pgqueue._with_number(args[3]::bigint, 'byte'), pgqueue._with_number(args[4]::bigint, 'byte'), quoted),
            hint = case args[2]
                when 'headers' then 'Move large values into the payload.'
                else 'Store the content elsewhere and send a reference, or raise max_payload_bytes with pgqueue.alter_queue.'
            end;
        when 'queue_busy' then raise exception using
            errcode = 'PQ004',
            message = format('queue %s is busy: %s could not obtain a lock', quoted, args[2]),
            hint = 'Another transaction holds a lock on the queue, its messages or its table, or the database is being dumped. Nothing was changed. Try again later.';
        when 'stream_not_found' then raise exception using
            errcode = 'PQ005',
            message = format('stream %s of queue %L does not exist', quoted, args[2]),
            hint = 'Open it with pgqueue.stream_open, or see pgqueue.list_streams().';
        when 'stream_fenced' then raise exception using
            errcode = 'PQ006',
            message = format('stream %s of queue %L is fenced: epoch %s was superseded by %s', quoted, args[2], args[3], args[4]),
            detail = format('Opened at %s by %s.', args[5], coalesce(quote_literal(args[6]), 'a reader without a name')),
            hint = 'Another query opened this stream, or stream_skip was called without an epoch. Stop this query. Each query needs its own stream. (stream_open(...)).* opens the stream once for each column: write select * from pgqueue.stream_open(...).';
        when 'staged_messages_lost' then raise exception using
            errcode = 'PQ010',
            message = format('run %s has %s in %s, not %s', args[1], pgqueue._with_number(args[4]::bigint, 'staged message'),
                coalesce('partition ' || args[2], 'an unknown partition'), args[3]),
            detail = 'Nothing was sent.',
            hint = 'The server crashed after they were staged, sweep_staged or sink_abort removed them, or another role staged them. Run the job or the micro-batch again.';
        when 'schedule_not_found' then raise exception using
            errcode = 'PQ011',
            message = format('schedule %s does not exist', quoted),
            hint = 'Create it with pgqueue.create_schedule, or see pgqueue.list_schedules().';
        when 'schedule_exists' then raise exception using
            errcode = 'PQ012',
            message = format('schedule %s already exists', quoted),
            hint = 'Change it with pgqueue.alter_schedule, or drop it with pgqueue.drop_schedule.';
        when 'invalid_row' then raise exception using
            errcode = args[1],
            message = format('row %s of partition %s: %s', args[2], coalesce(args[3], 'unknown'), args[4]),
            detail = 'Nothing was sent.',
            hint = args[5];
        -- In read committed every snapshot shows what other transactions have committed.
        when 'stale_snapshot' then raise exception using
            errcode = 'serialization_failure',
            message = format('could not serialize access to %s', args[1]),
            detail = 'The snapshot of this transaction is older than a change that another transaction has committed.',
            hint = 'Retry the transaction, or run it in read committed, where this error cannot occur.';
        when 'not_read_committed' then raise exception using
            errcode = 'active_sql_transaction',
            message = format('%s requires a transaction in read committed', args[1]),
            detail = format('The transaction is in %s.', current_setting('transaction_isolation')),
            hint = 'Call it in autocommit mode. Other sessions cannot use the tables until the transaction ends.';
        when 'role_not_found' then raise exception using
            errcode = 'undefined_object',
            message = format('role %I does not exist', args[1]),
            hint = case args[1]
                when 'public' then 'Access cannot be granted to PUBLIC. Create a role, and grant it to the users who need access.'
                else 'Create the role with create role.'
            end;
        when 'not_allowed' then raise exception using
            errcode = 'insufficient_privilege',
            message = format('role %I may not %s %I', args[1], args[2], args[3]),
            hint = 'The owner can grant this privilege.';
        when 'exposed' then raise exception using
            errcode = 'duplicate_object',
            message = format('queue %s is already exposed as %s', quoted, args[2]),
            hint = format('Drop that relation first: select pgqueue.unexpose_transport(%s).', quoted);
        -- The message and the fields are those of a table with a not-null constraint.
        when 'null_column' then raise exception using
            errcode = 'not_null_violation',
            message = format('null value in column "%s" of relation "%s" violates not-null constraint', args[3], args[2]),
            hint = 'A table of the transport has the same constraint. Headers may be {}.',
            schema = args[1], table = args[2], column = args[3];
    end case;
end;
$$;
