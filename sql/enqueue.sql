-- A message enters: at once into messages, with a delay into scheduled_messages, always in the
-- caller's transaction.

create or replace function pgqueue._check_content(
    q pgqueue.queues, payload jsonb, body bytea, headers jsonb
)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    bytes bigint;
begin
    if payload is not null and body is not null then
        perform pgqueue._raise_invalid('payload', left(payload::text, 50), 'null where body is given: a message has exactly one of the two');
    end if;
    if payload is null and body is null then
        perform pgqueue._raise_invalid('payload', null, 'given, or body in its place');
    end if;
    if headers is not null then
        if jsonb_typeof(headers) <> 'object' then
            perform pgqueue._raise_invalid('headers', headers::text, 'a JSON object');
        end if;
        bytes := octet_length(headers::text);
        if bytes > 65536 then
            perform pgqueue._raise_payload_too_large(q.name, 'headers', bytes, 65536);
        end if;
    end if;
    bytes := coalesce(octet_length(body), octet_length(payload::text));
    if bytes > q.max_payload_bytes then
        perform pgqueue._raise_payload_too_large(
            q.name, case when body is null then 'payload' else 'body' end, bytes, q.max_payload_bytes);
    end if;
end;
$$;
comment on function pgqueue._check_content(pgqueue.queues, jsonb, bytea, jsonb) is
'Raises 22023 or PQ003 unless there is exactly one of payload and body, within the limits, and headers are an object of at most 64 KB.';

create or replace function pgqueue._check_enqueue(delay interval, expires_in interval)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if delay is null or not pgqueue._is_interval_between(delay, '0', '3652.5 days') then
        perform pgqueue._raise_invalid('delay', delay::text, 'an interval from 0 to 10 years (3652.5 days)');
    end if;
    if not pgqueue._is_interval_between(expires_in, '0', '3652.5 days') then
        perform pgqueue._raise_invalid('expires_in', expires_in::text, 'an interval from 0 to 10 years (3652.5 days), or null for never');
    end if;
end;
$$;
comment on function pgqueue._check_enqueue(interval, interval) is
'Raises 22023 for a delay or an expires_in that is out of bounds.';

create or replace function pgqueue._announce_due(q pgqueue.queues, due_at timestamptz)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    -- Who prepares to wait knows by this lock that somebody sends; it comes before the look at the register.
    lock table only pgqueue.messages in row exclusive mode;
    if pgqueue._to_micros(due_at) < pg_sequence_last_value(q.first_due_at) then
        perform setval(q.first_due_at, pgqueue._to_micros(due_at));
    end if;
    -- Who waits may sleep past this moment.
    perform pgqueue._wake_waiting(q, pgqueue._now());
end;
$$;
comment on function pgqueue._announce_due(pgqueue.queues, timestamptz) is
'Lets claims look for scheduled messages from this moment on, and consumers that wait reckon with it.';

create or replace function pgqueue._enqueue(
    queue_name text,
    payload jsonb,
    delay interval,
    headers jsonb,
    expires_in interval,
    message_id uuid,
    body bytea
)
returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    new_id bigint;
begin
    perform pgqueue._check_enqueue(delay, expires_in);
    perform pgqueue._check_content(q, payload, body, headers);
    -- enqueue_batch, publish and sink_commit have the same two inserts, each of another source: one function for this and
    -- publish costs a delayed message 25 per cent.
    if delay > interval '0' then
        insert into pgqueue.scheduled_messages (
            queue_name, due_at, enqueued_at, max_attempts, expires_at, message_id, payload, body, headers
        )
        values (
            q.name, pgqueue._add_interval(at, delay), at, q.max_attempts, pgqueue._add_interval(at, expires_in), message_id, payload, body, headers
        )
        returning scheduled_messages.id into new_id;
        perform pgqueue._announce_due(q, pgqueue._add_interval(at, delay));
    else
        insert into pgqueue.messages (
            queue_name, enqueued_at, visible_at, max_attempts, expires_at, message_id, payload, body, headers
        )
        values (
            q.name, at, at, q.max_attempts, pgqueue._add_interval(at, expires_in), message_id, payload, body, headers
        )
        returning messages.id into new_id;
        perform pgqueue._wake_waiting(q, at);
    end if;
    return new_id;
end;
$$;
comment on function pgqueue._enqueue(text, jsonb, interval, jsonb, interval, uuid, bytea) is
'Sends any message, or says what is wrong with it; the short way that enqueue tries first takes only the common ones.';

create or replace function pgqueue.enqueue(
    queue_name text,
    payload jsonb default null,
    delay interval default '0',
    headers jsonb default null,
    expires_in interval default null,
    message_id uuid default null,
    body bytea default null
)
returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
as $$
declare
    at constant timestamptz := pgqueue._now();
    new_id bigint;
begin
    if not pgqueue._lock_queue(queue_name) then
        perform pgqueue._raise_queue_not_found(queue_name);
    end if;
    -- The common message in one statement, as every further one, and every expression, costs a transaction
    -- its preparation: a payload within the limit, due at once and for ever. Who waits is woken on the way.
    insert into pgqueue.messages (queue_name, enqueued_at, visible_at, max_attempts, message_id, payload, headers)
    select q.name, at, at, q.max_attempts, enqueue.message_id, enqueue.payload, enqueue.headers
    from pgqueue.queues q
    where q.name = enqueue.queue_name collate "C"
        and case
            -- The snapshot of a repeatable read may be older than a drop_queue, and to read a register that is gone fails.
            when pg_relation_filenode(q.waiting_until) is null then false
            when pg_sequence_last_value(q.waiting_until) <= pgqueue._to_micros(at) then true
            when pg_sequence_last_value(q.waiting_until) <= pgqueue._to_micros(at + interval '24 h')
                then pg_notify(pgqueue.channel(q.name), '') is not null
        end
        and enqueue.body is null and enqueue.delay = interval '0' and enqueue.expires_in is null
        -- As text, which is what will be handed out: 1e131071 takes 16 bytes as jsonb.
        and octet_length(enqueue.payload::text) <= q.max_payload_bytes
        and (
            enqueue.headers is null
            or jsonb_typeof(enqueue.headers) = 'object' and octet_length(enqueue.headers::text) <= 65536
        )
    returning messages.id into new_id;
    if found then
        return new_id;
    end if;
    return pgqueue._enqueue(queue_name, payload, delay, headers, expires_in, message_id, body);
end;
$$;
comment on function pgqueue.enqueue(text, jsonb, interval, jsonb, interval, uuid, bytea) is
'Sends a message in the caller''s transaction and returns its id. Exactly one of payload (any JSON document) and body (raw bytes) is given, of at most the queue''s max_payload_bytes, as JSON text; headers is a JSON object of at most 64 KB. delay (0 to 10 years) postpones the first delivery; expires_in (0 to 10 years) is when the message loses its worth and is dropped; both count from now, not from the start of the transaction. message_id is the sender''s own name for the message and is not checked for uniqueness. Raises 22023, PQ001, PQ003.';

create or replace function pgqueue.enqueue_batch(
    queue_name text,
    payloads jsonb[] default null,
    delay interval default '0',
    headers jsonb[] default null,
    expires_in interval default null,
    message_ids uuid[] default null,
    bodies bytea[] default null,
    delays interval[] default null
)
returns setof bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    n constant int := coalesce(cardinality(payloads), cardinality(bodies), 0);
    ids bigint[];
    due_at timestamptz;
begin
    if n = 0 then
        perform pgqueue._raise_invalid('payloads', payloads::text,
            'an array of at least one message, or bodies in its place');
    end if;
    perform pgqueue._raise_invalid(a.argument, format('%s elements', a.given),
        format('null or as long as the messages are many: %s elements', n))
    from (
        values
            ('bodies', cardinality(bodies)), ('headers', cardinality(headers)),
            ('message_ids', cardinality(message_ids)), ('delays', cardinality(delays))
    ) as a (argument, given)
    where a.given <> n;
    perform pgqueue._check_enqueue(delay, expires_in);
    perform pgqueue._check_enqueue(d, null) from unnest(delays) as d
    where not pgqueue._is_interval_between(d, '0', '3652.5 days');
    perform pgqueue._check_content(q, c.payload, c.body, c.headers)
    from unnest(payloads, bodies, headers) as c (payload, body, headers)
    where c.payload is null or c.body is not null or c.headers is not null
        or octet_length(c.payload::text) > q.max_payload_bytes;

    -- The lock that inserting takes anyway, before the ids are taken: the sweep relies on that order.
    lock table only pgqueue.messages in row exclusive mode;
    ids := array(select nextval('pgqueue.message_id') from generate_series(1, n));

    insert into pgqueue.messages (
        id, queue_name, enqueued_at, visible_at, max_attempts, expires_at, message_id, payload, body, headers
    )
    select
        u.id, q.name, at, at, q.max_attempts, pgqueue._add_interval(at, expires_in), u.message_id, u.payload, u.body, u.headers
    from unnest(ids, payloads, bodies, headers, message_ids, delays) as u (id, payload, body, headers, message_id, delay)
    where coalesce(u.delay, enqueue_batch.delay) = interval '0';
    if found then
        perform pgqueue._wake_waiting(q, at);
    end if;

    if delay > interval '0' or delays is not null then
        with delayed as (
            insert into pgqueue.scheduled_messages (
                id, queue_name, due_at, enqueued_at, max_attempts, expires_at, message_id, payload, body, headers
            )
            select
                d.id, q.name, pgqueue._add_interval(at, d.delay) + (d.n - 1) * interval '1 microsecond', at, q.max_attempts,
                pgqueue._add_interval(at, expires_in), d.message_id, d.payload, d.body, d.headers
            -- No two at the same moment: claims go on from there, and would meet all of it that is gone.
            from (
                select u.id, u.payload, u.body, u.headers, u.message_id, w.delay,
                    row_number() over (partition by w.delay order by u.id) as n
                from unnest(ids, payloads, bodies, headers, message_ids, delays)
                    as u (id, payload, body, headers, message_id, delay)
                cross join lateral (select coalesce(u.delay, enqueue_batch.delay)) as w (delay)
            ) d
            where d.delay > interval '0'
            returning scheduled_messages.due_at
        )
        select min(d.due_at) into due_at from delayed d;
        if due_at is not null then
            perform pgqueue._announce_due(q, due_at);
        end if;
    end if;
    return query select i from unnest(ids) as i;
end;
$$;
comment on function pgqueue.enqueue_batch(text, jsonb[], interval, jsonb[], interval, uuid[], bytea[], interval[]) is
'Sends many messages, all or none, in the caller''s transaction, and returns their ids in the order of the arrays. Arrays that are given have the same length; each message has exactly one of payload and body; delays, where not null, overrides delay for that message. Otherwise as enqueue. Raises 22023, PQ001, PQ003.';
