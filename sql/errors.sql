-- Every error that the product raises, each in one place: SQLSTATE, message, hint.

-- For grants.sql, later in this transaction: who has which access before an upgrade brings new verbs to it.
do $$
begin
    if to_regprocedure('pgqueue._has_access(name, text)') is not null then
        perform pg_catalog.set_config('pgqueue.had_access', (
            select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(r.rolname, k))::text
            from pg_catalog.pg_roles r, unnest(array['producer', 'consumer', 'admin', 'reader', 'raw', 'transport']) as k
            where r.oid in (
                select a.grantee from pg_catalog.pg_proc p cross join lateral pg_catalog.aclexplode(p.proacl) as a
                where p.pronamespace = 'pgqueue'::regnamespace and a.grantee <> p.proowner
            ) and pgqueue._has_access(r.rolname, k)
        ), true);
    end if;
end;
$$;

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

create or replace function pgqueue._raise_stale_snapshot(object text)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'serialization_failure',
        message = format('could not serialize access to %s', object),
        detail = 'The snapshot of this transaction is older than what others have committed.',
        hint = 'Try the transaction again, or in read committed, where it cannot happen.';
end;
$$;
comment on function pgqueue._raise_stale_snapshot(text) is
'Raises 40001: in repeatable read or serializable, where to go on would miss what others have done.';

create or replace function pgqueue._raise_exposed(queue_name text, relation regclass)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'duplicate_object',
        message = format('queue %L is exposed already, as %s', queue_name, relation),
        hint = format('Take the relation away first: select pgqueue.unexpose_transport(%L).', queue_name);
end;
$$;
comment on function pgqueue._raise_exposed(text, regclass) is
'Raises 42710: a queue has one relation at most.';

create or replace function pgqueue._raise_not_allowed(role_name name, deed text, object text)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'insufficient_privilege',
        message = format('role %I may not %s %I', role_name, deed, object),
        hint = 'Its owner can grant the right.';
end;
$$;
comment on function pgqueue._raise_not_allowed(name, text, text) is
'Raises 42501: the caller lacks a right that the function itself has.';

create or replace function pgqueue._raise_stream_not_found(queue_name text, stream_name text)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'PQ005',
        message = format('stream %s of queue %L does not exist',
            coalesce(quote_literal(left(stream_name, 200)), 'null'), queue_name),
        hint = 'Open it with pgqueue.stream_open, or see pgqueue.list_streams().';
end;
$$;
comment on function pgqueue._raise_stream_not_found(text, text) is
'Raises PQ005 stream_not_found.';

create or replace function pgqueue._raise_stream_fenced(s pgqueue.streams, epoch bigint)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'PQ006',
        message = format('stream %L of queue %L is fenced: epoch %s was superseded by %s',
            s.stream_name, s.queue_name, epoch, s.epoch),
        detail = format('Opened at %s by %s.', s.opened_at, coalesce(quote_literal(s.opened_by), 'somebody without a name')),
        hint = 'Another query has the same stream, or one of its batches was skipped. Let this one end; two queries need two streams.';
end;
$$;
comment on function pgqueue._raise_stream_fenced(pgqueue.streams, bigint) is
'Raises PQ006 stream_fenced.';

create or replace function pgqueue._raise_stream_out_of_step(s pgqueue.streams, seq bigint)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'PQ007',
        message = format('stream %L of queue %L is out of step: batch %s is %s', s.stream_name, s.queue_name, seq,
            case
                when seq < s.acked_seq then 'behind what was acknowledged'
                when seq = s.acked_seq then 'acknowledged, or another one of this number'
                when seq = s.acked_seq + 1 and s.claim_token is not null then 'another one of this number'
                else 'unknown'
            end),
        detail = format('Acknowledged up to batch %s, %s.', s.acked_seq,
            case when s.claim_token is null then 'none is open' else format('batch %s is open', s.acked_seq + 1) end),
        hint = 'The checkpoint was rolled back, copied or taken from another stream, or the database was restored. Use a new checkpoint, or go on with what there is by fail_on_data_loss => false.';
end;
$$;
comment on function pgqueue._raise_stream_out_of_step(pgqueue.streams, bigint) is
'Raises PQ007 stream_out_of_step.';

create or replace function pgqueue._raise_stream_data_lost(s pgqueue.streams, lost bigint[])
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'PQ008',
        message = format('stream %L of queue %L has lost %s of %s messages of batch %s: %s',
            s.stream_name, s.queue_name, cardinality(lost), cardinality(s.ids), s.acked_seq + 1, pgqueue._format_ids(lost)),
        detail = format('Reserved at %s until %s.', s.claimed_at, s.claimed_until),
        hint = 'The reservation ran out and others were given them, or they were purged. Go on without them by fail_on_data_loss => false, or by pgqueue.stream_skip; reserve for longer, or extend more often.';
end;
$$;
comment on function pgqueue._raise_stream_data_lost(pgqueue.streams, bigint[]) is
'Raises PQ008 stream_data_lost.';

create or replace function pgqueue._raise_stream_poisoned(s pgqueue.streams)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'PQ009',
        message = format('stream %L of queue %L gives batch %s up after %s replays: messages %s',
            s.stream_name, s.queue_name, s.acked_seq + 1, s.replays, pgqueue._format_ids(s.ids)),
        hint = format('Move it, or those of its ids that are the cause, to the dead letters: select pgqueue.stream_skip(%L, %L, %s); or allow more replays.',
            s.queue_name, s.stream_name, s.acked_seq + 1);
end;
$$;
comment on function pgqueue._raise_stream_poisoned(pgqueue.streams) is
'Raises PQ009 stream_poisoned.';

create or replace function pgqueue._raise_staged_messages_lost(
    run uuid, partition int, expected bigint, remaining bigint
)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'PQ010',
        message = format('run %s staged %s messages in partition %s, and %s are there', run, expected,
            coalesce(partition::text, 'unknown'), remaining),
        detail = 'Nothing was sent.',
        hint = 'The server crashed since, sweep_staged or sink_abort removed them, or another role staged them. Run the job, or the micro-batch, again.';
end;
$$;
comment on function pgqueue._raise_staged_messages_lost(uuid, int, bigint, bigint) is
'Raises PQ010 staged_messages_lost.';

create or replace function pgqueue._raise_in_row(code text, partition int, row_number int, error text, hint text)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = code,
        message = format('row %s of partition %s: %s', row_number, coalesce(partition::text, 'unknown'), error),
        detail = 'Nothing was sent.',
        hint = hint;
end;
$$;
comment on function pgqueue._raise_in_row(text, int, int, text, text) is
'Raises an error of one message again, with the row it is about.';

create or replace function pgqueue._format_ids(ids bigint[])
returns text
language sql immutable parallel safe
as $$
    select array_to_string(ids[:20], ', ')
        || case when cardinality(ids) > 20 then format(' and %s more', cardinality(ids) - 20) else '' end
$$;
comment on function pgqueue._format_ids(bigint[]) is
'The first 20 ids, and how many more there are, for a message.';

create or replace function pgqueue._raise_role_not_found(role_name name)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'undefined_object',
        message = format('role %I does not exist', role_name),
        hint = case role_name
            when 'public' then 'PUBLIC is everybody, and no access is for everybody: make a role, and grant it to those who need it.'
            else 'Create it with create role.'
        end;
end;
$$;
comment on function pgqueue._raise_role_not_found(name) is
'Raises 42704: an unknown role.';
