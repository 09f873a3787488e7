-- Streams: readers that can read a batch of messages again after a crash. A stream has at most one open batch, and one
-- reader: opening it again fences the previous reader. Each call is one transaction.

create or replace function pgqueue._raise_stream(error text, s pgqueue.streams, seq bigint, lost bigint[] default null)
returns void language plpgsql stable as $$
declare
    named constant bigint[] := coalesce(lost, s.ids);
    ids constant text := array_to_string(named[:20], ', ')
        || case when cardinality(named) > 20 then format(' and %s more', cardinality(named) - 20) else '' end;
begin
    case error
        when 'out_of_step' then raise exception using
            errcode = 'PQ007',
            message = format('stream %L of queue %L is out of step: batch %s %s', s.stream_name, s.queue_name, seq,
                case
                    when seq < s.acked_seq then 'is older than the last acknowledged batch'
                    when seq = s.acked_seq then 'is already acknowledged, or its token does not match'
                    when seq = s.acked_seq + 1 and s.claim_token is not null then 'is open with another token'
                    else 'is unknown'
                end),
            detail = format('The last acknowledged batch is %s, and %s.', s.acked_seq,
                case when s.claim_token is null then 'no batch is open' else format('batch %s is open', s.acked_seq + 1) end),
            hint = 'The checkpoint was rolled back, copied or taken from another stream, or the database was restored. Use a new checkpoint, or continue after acked_seq and acked_token of the stream, which stream_open returns.';
        when 'data_lost' then raise exception using
            errcode = 'PQ008',
            message = format('stream %L of queue %L has lost %s of %s of batch %s: %s', s.stream_name, s.queue_name,
                cardinality(lost), pgqueue._with_number(cardinality(s.ids), 'message'), seq, ids),
            detail = format('The batch was claimed at %s, and reserved until %s.', s.claimed_at, s.claimed_until),
            hint = 'The reservation ran out and other consumers claimed the messages, or the messages were purged. stream_claim after the last acknowledged batch returns the batch without them, and pgqueue.stream_skip leaves them out. To avoid this error, reserve for longer, or extend more often.';
        when 'poisoned' then raise exception using
            errcode = 'PQ009',
            message = format('stream %L of queue %L gives up batch %s after %s: %s %s', s.stream_name, s.queue_name, seq,
                pgqueue._with_number(s.replays, 'replay'), case cardinality(s.ids) when 1 then 'message' else 'messages' end, ids),
            hint = format('Move the batch, or only the messages that cause the failure, to the dead letters: select pgqueue.stream_skip(%L, %L, %s). Or allow more replays.',
                s.queue_name, s.stream_name, seq);
    end case;
end;
$$;

-- At least the clock in microseconds: a counter would start over in a stream that was dropped and created again, or in
-- a restored database, and an old reader could pass for the new one.
create or replace function pgqueue._next_epoch(epoch bigint) returns bigint
language sql volatile as $$ select greatest(coalesce(epoch, 0) + 1, pgqueue._to_micros(pgqueue._now())) $$;

create or replace function pgqueue._check_epoch(s pgqueue.streams, epoch bigint) returns void
language plpgsql stable as $$
begin
    perform pgqueue._require(epoch is not null, 'epoch', null, 'the epoch that stream_open returned');
    if epoch <> s.epoch then
        perform pgqueue._raise(
            'stream_fenced', s.stream_name, s.queue_name, epoch::text, s.epoch::text, s.opened_at::text, s.opened_by);
    end if;
end;
$$;

create or replace function pgqueue._lock_stream(queue_name text, stream_name text) returns pgqueue.streams
language plpgsql volatile as $$
declare
    s pgqueue.streams;
begin
    select t.* into s from pgqueue.streams t
    where t.queue_name = _lock_stream.queue_name collate "C" and t.stream_name = _lock_stream.stream_name collate "C"
    for no key update;
    if not found then
        perform pgqueue._require_untruncated('{pgqueue.streams}');
        perform pgqueue._raise('stream_not_found', stream_name, queue_name);
    end if;
    return s;
end;
$$;

create or replace function pgqueue._public_stream(s pgqueue.streams) returns pgqueue.stream
language sql stable as $$
    select row(
        s.queue_name, s.stream_name, s.epoch, s.opened_by, s.opened_at, s.created_at, s.acked_seq, s.acked_token,
        s.claim_token, cardinality(s.ids) - cardinality(s.left_out), s.partitions, s.replays, s.claimed_at,
        s.claimed_until, coalesce(pg_sequence_last_value('pgqueue.message_id'), 0), s.on_ack
    )::pgqueue.stream
$$;

create or replace function pgqueue.stream_open(
    queue_name pgqueue.queue_of_consumer, stream_name text, opened_by text default null, on_ack text default null
) returns pgqueue.stream
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    s pgqueue.streams;
begin
    perform pgqueue._require(pgqueue._is_name(stream_name), 'stream_name', stream_name,
        '1 to 128 characters: lowercase letters, digits, hyphens and underscores');
    perform pgqueue._require(on_ack is null or on_ack in ('archive', 'delete'), 'on_ack', on_ack,
        'archive or delete, or null for the default of the queue');
    perform pgqueue._require(on_ack is distinct from 'archive' or q.archive_for is not null, 'on_ack', on_ack,
        format('delete or null where queue %L has no archive_for', q.name));
    -- An alter_queue that gives the queue a limit ends before, or sees the stream.
    perform from pgqueue.queues where queues.name = q.name for share;
    insert into pgqueue.streams as t (queue_name, stream_name, epoch, opened_by, opened_at, created_at, on_ack)
    values (
        q.name, stream_open.stream_name, pgqueue._next_epoch(null), stream_open.opened_by, pgqueue._now(), pgqueue._now(),
        stream_open.on_ack
    )
    on conflict on constraint streams_pkey do update
    set epoch = pgqueue._next_epoch(t.epoch), opened_by = excluded.opened_by, opened_at = excluded.opened_at,
        on_ack = excluded.on_ack
    returning t.* into s;
    return pgqueue._public_stream(s);
end;
$$;
comment on function pgqueue.stream_open is
'Opens a stream of the queue, creates it if it does not exist, and returns it with a new epoch. The previous reader of
the stream is fenced: its calls raise PQ006. stream_name is 1 to 128 lowercase letters, digits, hyphens and underscores;
each query needs its own. A reader without a checkpoint starts after acked_seq and acked_token. While the queue has a
stream, alter_queue gives it no priorities, max_in_flight and rate_limit. opened_by is a name for humans. on_ack says
what happens to messages that are acknowledged from now on: delete; archive, which requires that the queue has
archive_for; or null, the default, for what the queue does at that time. Raises 22023, PQ001.';

create or replace function pgqueue.list_streams(
    queue_name pgqueue.queue_of_consumer_admin_or_reader default null, caller pgqueue.caller default current_user
) returns setof pgqueue.stream
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    if queue_name is not null then
        perform pgqueue._get_unlocked_queue(queue_name);
    end if;
    perform pgqueue._require_untruncated('{pgqueue.streams}');
    return query
    select l.*
    from pgqueue.streams t cross join lateral pgqueue._public_stream(t) l
    where t.queue_name = coalesce(list_streams.queue_name collate "C", t.queue_name)
        and pgqueue._may_use(caller, t.queue_name, pgqueue._privileges_of('{consumer,admin,reader}'))
    order by t.queue_name, t.stream_name;
end;
$$;
comment on function pgqueue.list_streams is
'Returns the streams of a queue, or of all queues if queue_name is null, by queue and stream name. Raises PQ001.';

create or replace function pgqueue.drop_stream(queue_name pgqueue.queue_of_admin, stream_name text) returns int
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    s constant pgqueue.streams := pgqueue._lock_stream(queue_name, stream_name);
    released int := 0;
begin
    if s.claim_token is not null then
        released := pgqueue.release(queue_name, s.ids, s.claim_token);
    end if;
    delete from pgqueue.streams t where t.queue_name = q.name and t.stream_name = s.stream_name;
    return released;
end;
$$;
comment on function pgqueue.drop_stream is
'Drops a stream, releases the messages of its open batch as release does, and returns how many were released. A reader
that still has a checkpoint of the stream gets PQ005, or PQ007 after the stream was created again. Raises PQ001,
PQ005.';

create or replace function pgqueue._on_queue_changed_streams(before pgqueue.queues, after pgqueue.queues) returns void
language plpgsql volatile as $$
begin
    if before.name is null or after.name is null
        or before.priorities or coalesce(before.max_in_flight, before.rate_limit) is not null
        or not after.priorities and coalesce(after.max_in_flight, after.rate_limit) is null
    then
        return;
    end if;
    -- stream_claim would refuse the queue. It acknowledges the open batch, so this batch would be delivered again.
    perform pgqueue._require_current_snapshot(format('queue %L', after.name));
    perform pgqueue._raise_invalid(
        case when after.priorities then 'priorities' when after.rate_limit is null then 'max_in_flight' else 'rate_limit' end,
        case when after.priorities then 'true' else coalesce(after.rate_limit, after.max_in_flight)::text end,
        format('null while queue %L has a stream. End its query, then: select pgqueue.drop_stream(%L, %L);',
            after.name, after.name, t.stream_name))
    from pgqueue.streams t where t.queue_name = after.name;
end;
$$;

create or replace function pgqueue._findings_of_streams(q pgqueue.queues) returns setof pgqueue.finding
language sql volatile as $$
    select
        'warning', q.name, 'lapsed_stream',
        format('the reservation of batch %s of stream %L, %s, ran out %s ago, and the stream was not read since',
            t.acked_seq + 1, t.stream_name, pgqueue._with_number(cardinality(t.ids) - cardinality(t.left_out), 'message'),
            n.at - t.claimed_until),
        format('Start its query again, or release the messages: select pgqueue.drop_stream(%L, %L);', q.name, t.stream_name)
    from (select pgqueue._now() as at offset 0) n
    join pgqueue.streams t on t.queue_name = q.name and t.claimed_until <= n.at - interval '1 min'
$$;
