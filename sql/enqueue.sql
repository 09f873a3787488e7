-- Sends messages in the caller's transaction: without delay to messages, with delay to scheduled_messages.

create or replace function pgqueue._with_group_and_priority(headers jsonb, group_key text, priority int) returns jsonb
language sql stable parallel safe as $$
    select case
        when group_key is null and priority is null then headers
        when headers is null or jsonb_typeof(headers) = 'object'
            then coalesce(headers, '{}')
                || jsonb_strip_nulls(jsonb_build_object('pgqueue.group', group_key, 'pgqueue.priority', priority))
        else headers
    end
$$;

create or replace function pgqueue._check_keys(
    dedup_keys text[], group_keys text[], priorities int[], on_duplicate text default 'keep'
) returns void
language plpgsql stable as $$
begin
    if on_duplicate is null or on_duplicate not in ('keep', 'replace') then
        perform pgqueue._raise_invalid('on_duplicate', on_duplicate, 'keep or replace');
    end if;
    perform pgqueue._raise_invalid(pgqueue._element(k.argument, k.n, k.messages), left(k.given, 300), k.expected)
    from (
        select 'dedup_key' as argument, u.k as given, u.n, cardinality(dedup_keys) as messages, '1 to 255 characters' as expected
        from unnest(dedup_keys) with ordinality as u (k, n) where char_length(u.k) not between 1 and 255
        union all
        select 'group_key', u.k, u.n, cardinality(group_keys), '1 to 255 characters'
        from unnest(group_keys) with ordinality as u (k, n) where char_length(u.k) not between 1 and 255
        union all
        select 'priority', u.p::text, u.n, cardinality(priorities), 'an integer from 0 to 9'
        from unnest(priorities) with ordinality as u (p, n) where u.p not between 0 and 9
    ) k;
end;
$$;

create or replace function pgqueue._check_content(
    q pgqueue.queues, payload jsonb, body bytea, headers jsonb, place bigint default 1, messages int default 1
) returns void
language plpgsql stable as $$
declare
    content constant text := pgqueue._element(case when body is null then 'payload' else 'body' end, place, messages);
    bytes bigint;
begin
    if payload is not null and body is not null then
        perform pgqueue._raise_invalid(pgqueue._element('payload', place, messages), left(payload::text, 50),
            'null if body is given: a message has exactly one of the two');
    end if;
    if payload is null and body is null then
        perform pgqueue._raise_invalid(content, null, 'given unless body is given');
    end if;
    if headers is not null then
        if jsonb_typeof(headers) <> 'object' then
            perform pgqueue._raise_invalid(pgqueue._element('headers', place, messages), headers::text, 'a JSON object');
        end if;
        bytes := octet_length(headers::text);
        if bytes > 65536 then
            perform pgqueue._raise(
                'payload_too_large', q.name, pgqueue._element('headers', place, messages), bytes::text, '65536');
        end if;
    end if;
    bytes := coalesce(octet_length(body), octet_length(payload::text));
    if bytes > q.max_payload_bytes then
        perform pgqueue._raise('payload_too_large', q.name, content, bytes::text, q.max_payload_bytes::text);
    end if;
end;
$$;

create or replace function pgqueue._check_enqueue(
    delay interval, expires_in interval, place bigint default 1, messages int default 1
) returns void
language plpgsql stable as $$
begin
    if delay is null or not pgqueue._is_interval_between(delay, '0', '3652.5 days') then
        perform pgqueue._raise_invalid(pgqueue._element('delay', place, messages), delay::text, 'an interval from 0 to 10 years (3652.5 days)');
    end if;
    if not pgqueue._is_interval_between(expires_in, '0', '3652.5 days') then
        perform pgqueue._raise_invalid('expires_in', expires_in::text, 'an interval from 0 to 10 years (3652.5 days), or null for never');
    end if;
end;
$$;

-- Whether a message can be sent. If not, _check_enqueue or _check_content raises the error. Inlined.
create or replace function pgqueue._is_valid(
    q pgqueue.queues, payload jsonb, headers jsonb, expires_in interval, body bytea
) returns boolean
language sql immutable parallel safe as $$
    -- The limit applies to the JSON text that consumers receive: 1e131071 takes 16 bytes as jsonb.
    select case when body is null then octet_length(payload::text) when payload is null then octet_length(body) end
        <= q.max_payload_bytes
        and (headers is null or jsonb_typeof(headers) = 'object' and octet_length(headers::text) <= 65536)
        and (expires_in is null or pgqueue._is_interval_between(expires_in, '0', '3652.5 days'))
$$;

-- Notifies waiting consumers, and returns whether a fast path of enqueue can send the message, which does no
-- maintenance. One call in 500 returns false for the sake of maintenance. Inlined.
create or replace function pgqueue._notify_if_valid(
    q pgqueue.queues, at timestamptz, payload jsonb, headers jsonb, expires_in interval, body bytea
) returns boolean
language sql volatile as $$
    select case
            -- A repeatable read snapshot can be older than a drop_queue, and reading a dropped register fails.
            when pg_relation_filenode(q.waiting_until) is null then false
            -- The slow path looks whether maintenance is due. To do so in each call would cost 3 per cent.
            when random() < 0.002 or pgqueue._is_valid(q, payload, headers, expires_in, body) is not true then false
            when pg_sequence_last_value(q.waiting_until) <= pgqueue._to_micros(at) then true
            when pg_sequence_last_value(q.waiting_until) <= pgqueue._to_micros(at) + 86400000000
                then pg_notify(pgqueue.channel(q.name), '') is not null
        end
$$;

create or replace function pgqueue._enqueue_deduplicated(
    queue_name text, payload jsonb, delay interval, headers jsonb, expires_in interval, message_id uuid, body bytea,
    dedup_key text, on_duplicate text
) returns bigint
language plpgsql volatile set plan_cache_mode = force_generic_plan as $$
declare
    at constant timestamptz := pgqueue._now();
    new_id bigint;
begin
    -- The fast path for a key that is new and whose window ends within the period is two inserts.
    with new_key as (
        insert into pgqueue.dedup_keys (slice, period, queue_id, dedup_key, id, enqueued_at)
        select
            pgqueue._dedup_slice(q.dedup_window, p.period), p.period, q.queue_id,
            _enqueue_deduplicated.dedup_key, nextval('pgqueue.message_id'), at
        from pgqueue.queues q
        cross join lateral (select pgqueue._dedup_period(q.dedup_window, at) as period) p
        where q.name = _enqueue_deduplicated.queue_name collate "C"
            and p.period = pgqueue._dedup_period(q.dedup_window, pgqueue._end_of_dedup_window(q, at))
            and char_length(_enqueue_deduplicated.dedup_key) between 1 and 255 and on_duplicate in ('keep', 'replace')
            and delay = interval '0'
            and pgqueue._notify_if_valid(
                q, at, _enqueue_deduplicated.payload, _enqueue_deduplicated.headers, expires_in, _enqueue_deduplicated.body)
        on conflict do nothing
        returning dedup_keys.id
    )
    insert into pgqueue.messages (
        id, queue_name, enqueued_at, visible_at, max_attempts, expires_at, message_id, payload, body, headers, kind
    )
    select
        k.id, q.name, at, at,
        case when pgqueue._count('enqueued', _enqueue_deduplicated.queue_name, 1) = 1 then q.max_attempts end,
        pgqueue._add_interval(at, expires_in), _enqueue_deduplicated.message_id, _enqueue_deduplicated.payload,
        _enqueue_deduplicated.body, _enqueue_deduplicated.headers, q.kind
    from new_key k
    join pgqueue.queues q on q.name = _enqueue_deduplicated.queue_name collate "C"
    returning messages.id into new_id;
    if not found and on_duplicate = 'keep' then
        select k.id into new_id
        from pgqueue.queues q
        cross join lateral pgqueue._read_dedup_keys(
            q, pgqueue._dedup_period(q.dedup_window, at),
            array[_enqueue_deduplicated.dedup_key], at, '{}', '{}') k
        where q.name = _enqueue_deduplicated.queue_name collate "C" and k.is_taken and not k.is_locked
            and delay = interval '0'
            and pgqueue._is_valid(
                q, _enqueue_deduplicated.payload, _enqueue_deduplicated.headers, expires_in, _enqueue_deduplicated.body);
    end if;
    if new_id is null then
        new_id := pgqueue.enqueue_batch(
            queue_name, array[payload], delay, array[headers], expires_in, array[message_id], array[body],
            dedup_keys => array[dedup_key], on_duplicate => on_duplicate);
    end if;
    return new_id;
end;
$$;

create or replace function pgqueue.enqueue(
    queue_name pgqueue.queue_of_producer,
    payload jsonb default null,
    delay interval default '0',
    headers jsonb default null,
    expires_in interval default null,
    message_id uuid default null,
    body bytea default null,
    dedup_key text default null,
    on_duplicate text default 'keep',
    group_key text default null,
    priority int default null
) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    new_id bigint;
begin
    -- One expression, as each further one would have to be prepared in every transaction.
    if not pgqueue._lock_queue(queue_name) or group_key is not null or priority is not null
        or on_duplicate is distinct from 'keep'
    then
        if queue_name is null then
            perform pgqueue._raise('queue_not_found', queue_name);
        end if;
        if on_duplicate is distinct from 'keep' or char_length(group_key) not between 1 and 255 or priority not between 0 and 9
        then
            perform pgqueue._check_keys(array[dedup_key], array[group_key], array[priority], on_duplicate);
        end if;
        headers := pgqueue._with_group_and_priority(headers, group_key, priority);
    end if;
    -- Fast path: a valid message without delay. It is one statement, as a transaction has to prepare each statement and
    -- expression. The statement also notifies waiting consumers and counts the message. It does so in one condition on
    -- the row of the queue: a volatile function in the select list, or a condition on arguments alone, would add a node
    -- with all columns to the plan.
    insert into pgqueue.messages (
        queue_name, enqueued_at, visible_at, max_attempts, expires_at, message_id, payload, body, headers, kind
    )
    select
        q.name, at, at, q.max_attempts,
        case when enqueue.expires_in is not null then pgqueue._add_interval(at, enqueue.expires_in) end,
        enqueue.message_id, enqueue.payload, enqueue.body, enqueue.headers, q.kind
    from pgqueue.queues q
    where q.name = enqueue.queue_name collate "C"
        and case
            when enqueue.dedup_key is null and enqueue.delay = interval '0' and pgqueue._notify_if_valid(
                q, at, enqueue.payload, enqueue.headers, enqueue.expires_in, enqueue.body)
            then pgqueue._count('enqueued', enqueue.queue_name, 1) = 1
        end
    returning messages.id into new_id;
    if found then
        return new_id;
    end if;
    if dedup_key is not null then
        return pgqueue._enqueue_deduplicated(
            queue_name, payload, delay, headers, expires_in, message_id, body, dedup_key, on_duplicate);
    end if;
    if delay > interval '0' then
        insert into pgqueue.scheduled_messages (
            queue_name, due_at, enqueued_at, max_attempts, expires_at, message_id, payload, body, headers
        )
        select
            q.name, pgqueue._clamp_due_at(pgqueue._add_interval(at, enqueue.delay)), at, q.max_attempts,
            pgqueue._add_interval(at, enqueue.expires_in), enqueue.message_id, enqueue.payload, enqueue.body, enqueue.headers
        from pgqueue.queues q
        where q.name = enqueue.queue_name collate "C"
            and case
                when random() >= 0.002 and pg_relation_filenode(q.first_due_at) is not null
                    and pgqueue._is_interval_between(enqueue.delay, '0', '3652.5 days')
                    and pgqueue._is_valid(q, enqueue.payload, enqueue.headers, enqueue.expires_in, enqueue.body)
                then pgqueue._count('enqueued', enqueue.queue_name, 1) = 1
            end
        returning scheduled_messages.id into new_id;
        if found then
            perform pgqueue._announce_due(q, pgqueue._add_interval(at, delay))
            from pgqueue.queues q where q.name = enqueue.queue_name collate "C";
            return new_id;
        end if;
    end if;
    return (
        select b from pgqueue.enqueue_batch(
            queue_name, array[payload], delay, array[headers], expires_in, array[message_id], array[body]) as b);
end;
$$;
comment on function pgqueue.enqueue is
'Sends a message in the caller''s transaction and returns its id. Exactly one of payload (any JSON document) and body
(raw bytes) is given, of at most the queue''s max_payload_bytes; a payload counts as JSON text. headers is a JSON object
of at most 64 KB. delay (0 to 10 years) postpones the first delivery. After expires_in (0 to 10 years; null: never) the
message is no longer delivered: it is removed, to the dead letters if the queue has dead_letter_expired. Both count from
the time of the call, not from the start of the transaction. message_id is an identifier that the sender chooses; it is
not checked for uniqueness. dedup_key (1 to 255 characters) is: while another message of the queue has the same key, no
message is added, and the id of the other one is returned. A key is taken for the queue''s dedup_window, also after its
message is gone, or, if that is 0, as long as its message lives. With on_duplicate replace (default: keep) the other
message gets the content, due time and expiry of this call, unless a consumer has claimed it or it is gone: then this
message is added and has the key from now on. A replaced message keeps its dedup_window, which begins when it is added:
to delay a message again and again, use dedup_window 0. A call with a dedup_key waits for a transaction that has sent
the same key, and replace for one that reschedules the other message. group_key (1 to 255 characters) is the group of
the message; it becomes the header pgqueue.group, and does nothing in a queue without group_limit. priority (0 to 9, the
highest; null is 0) becomes the header pgqueue.priority, and does nothing in a queue without priorities. Raises 22023,
PQ001, and PQ003 if the payload, body or headers are too large.';

create or replace function pgqueue._take_or_replace(
    q pgqueue.queues, dedup_keys text[], on_duplicate text, ids bigint[], at timestamptz, payloads jsonb[],
    bodies bytea[], headers jsonb[], message_ids uuid[], delays interval[], expires_at timestamptz
) returns bigint[]
language plpgsql volatile as $$
declare
    holders bigint[];
    gone bigint[] := '{}'::bigint[];
    lost bigint[];
begin
    loop
        holders := pgqueue._take_dedup_keys(q, dedup_keys, ids, at, on_duplicate, gone);
        exit when on_duplicate = 'keep';
        lost := array(
            select d.holder
            from (
                select distinct on (u.holder) u.*
                from unnest(holders, payloads, bodies, headers, message_ids, delays) with ordinality
                    as u (holder, payload, body, headers, message_id, delay, n)
                where u.holder <> all (ids)
                order by u.holder, u.n desc
            ) d
            where not pgqueue._replace_message(
                q, d.holder, at, coalesce(d.delay, interval '0'), expires_at, d.message_id, d.payload, d.body, d.headers)
        );
        exit when lost = '{}';
        -- A message that cannot be replaced loses its key.
        gone := gone || lost;
    end loop;
    return holders;
end;
$$;

create or replace function pgqueue._schedule_batch(
    q pgqueue.queues, ids bigint[], holders bigint[], at timestamptz, payloads jsonb[], bodies bytea[], headers jsonb[],
    message_ids uuid[], delays interval[], expires_at timestamptz
) returns void
language plpgsql volatile as $$
declare
    due_at timestamptz;
begin
    with delayed as (
        insert into pgqueue.scheduled_messages (
            id, queue_name, due_at, enqueued_at, max_attempts, expires_at, message_id, payload, body, headers
        )
        select
            d.id, q.name, pgqueue._clamp_due_at(pgqueue._add_interval(at, d.delay) + (d.n - 1) * interval '1 microsecond'),
            at, q.max_attempts, _schedule_batch.expires_at, d.message_id, d.payload, d.body, d.headers
        -- Each message gets a due time of its own. Claims continue at the last due time: with equal times they would
        -- scan the dead index entries of all messages already taken.
        from (
            select u.*, row_number() over (partition by u.delay order by u.id) as n
            from unnest(ids, payloads, bodies, headers, message_ids, delays, holders)
                as u (id, payload, body, headers, message_id, delay, holder)
            where u.delay > interval '0' and coalesce(u.holder, u.id) = u.id
        ) d
        returning scheduled_messages.due_at
    )
    select min(d.due_at) into due_at from delayed d;
    if due_at is not null then
        perform pgqueue._announce_due(q, due_at);
    end if;
end;
$$;

create or replace function pgqueue.enqueue_batch(
    queue_name pgqueue.queue_of_producer,
    payloads jsonb[] default null,
    delay interval default '0',
    headers jsonb[] default null,
    expires_in interval default null,
    message_ids uuid[] default null,
    bodies bytea[] default null,
    delays interval[] default null,
    dedup_keys text[] default null,
    on_duplicate text default 'keep',
    group_keys text[] default null,
    priorities int[] default null
) returns setof bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    n constant int := coalesce(cardinality(payloads), cardinality(bodies));
    ids bigint[];
    holders bigint[];
    expires_at timestamptz;
begin
    if payloads is null and bodies is null then
        perform pgqueue._raise_invalid('payloads', null, 'an array with one element for each message, unless bodies is given');
    end if;
    perform pgqueue._raise_invalid(a.argument, pgqueue._with_number(a.given, 'element'),
        format('null or an array with one element for each message: %s has %s',
            case when payloads is null then 'bodies' else 'payloads' end, pgqueue._with_number(n, 'element')))
    from (
        values
            ('bodies', cardinality(bodies)), ('headers', cardinality(headers)),
            ('message_ids', cardinality(message_ids)), ('delays', cardinality(delays)),
            ('dedup_keys', cardinality(dedup_keys)), ('group_keys', cardinality(group_keys)),
            ('priorities', cardinality(priorities))
    ) as a (argument, given)
    where a.given <> n;
    if n = 0 then
        return;
    end if;
    if group_keys is not null or priorities is not null or dedup_keys is not null or on_duplicate is distinct from 'keep' then
        perform pgqueue._check_keys(dedup_keys, group_keys, priorities, on_duplicate);
    end if;
    if group_keys is not null or priorities is not null then
        headers := array(
            select pgqueue._with_group_and_priority(u.h, u.k, u.p)
            from unnest(headers, group_keys, priorities) with ordinality as u (h, k, p, n)
            order by u.n
        );
    end if;
    perform pgqueue._check_enqueue(delay, expires_in);
    perform pgqueue._check_enqueue(u.delay, null, u.place, n)
    from unnest(delays) with ordinality as u (delay, place)
    where not pgqueue._is_interval_between(u.delay, '0', '3652.5 days');
    perform pgqueue._check_content(q, c.payload, c.body, c.headers, c.place, n)
    from unnest(payloads, bodies, headers) with ordinality as c (payload, body, headers, place)
    where c.payload is null or c.body is not null or c.headers is not null
        or octet_length(c.payload::text) > q.max_payload_bytes;

    if delays is not null then
        delays := array(
            select coalesce(u.delay, enqueue_batch.delay) from unnest(delays) with ordinality as u (delay, place)
            order by u.place
        );
    elsif delay > interval '0' then
        delays := array_fill(delay, array[n]);
    end if;
    expires_at := pgqueue._add_interval(at, expires_in);

    -- The inserts need this lock anyway. It is taken before the ids, as the sweep relies on that order.
    lock table only pgqueue.messages in row exclusive mode;
    ids := array(
        select nextval('pgqueue.message_id')
        from generate_series(1, case when dedup_keys is null then pgqueue._count('enqueued', q.name, n) else n end));
    if dedup_keys is not null then
        holders := pgqueue._take_or_replace(
            q, dedup_keys, on_duplicate, ids, at, payloads, bodies, headers, message_ids, delays, expires_at);
        perform pgqueue._count('enqueued', q.name, count(*)::int)
        from unnest(ids, holders) as u (id, holder) where u.id = u.holder;
    end if;

    insert into pgqueue.messages (
        id, queue_name, enqueued_at, visible_at, max_attempts, expires_at, message_id, payload, body, headers, kind
    )
    select u.id, q.name, at, at, q.max_attempts, expires_at, u.message_id, u.payload, u.body, u.headers, q.kind
    from unnest(ids, payloads, bodies, headers, message_ids, delays, holders)
        as u (id, payload, body, headers, message_id, delay, holder)
    where coalesce(u.delay, interval '0') = interval '0' and coalesce(u.holder, u.id) = u.id;
    if found then
        perform pgqueue._wake_if_waiting(q, at);
    end if;
    perform pgqueue._call_if_due('maintenance', at);

    if delays is not null then
        perform pgqueue._schedule_batch(
            q, ids, holders, at, payloads, bodies, headers, message_ids, delays, expires_at);
    end if;
    return query select i from unnest(coalesce(holders, ids)) as i;
end;
$$;
comment on function pgqueue.enqueue_batch is
'Sends many messages, all or none, in the caller''s transaction, and returns their ids in the order of the arrays. All
arrays that are given have the same length, and each message has exactly one of payload and body. Empty arrays send
nothing. An error for an element names it, such as payloads[6], as SQL counts: the first element is payloads[1]. An
element of delays that is not null overrides delay for its message. dedup_keys contains null for a message without a
key, and so do group_keys and priorities. Of the elements with the same dedup_key one is added, the last one if
on_duplicate is replace, and all get its id. Everything else is as in enqueue. Raises 22023, PQ001, and PQ003 if a
payload, body or headers are too large.';
