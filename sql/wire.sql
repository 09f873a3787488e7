-- What a transport writes and reads: the form of headers and ids, and the triggers of an exposed queue. These send what
-- is inserted into its relation, and archive what is deleted through it.

-- Headers as a transport reads them: a JSON object of strings and nulls, with the header NServiceBus.MessageId.
-- In PL/pgSQL, which keeps its plan: see _level_registers.
create or replace function pgqueue._wire_headers(headers jsonb, message_id uuid) returns text
language plpgsql immutable parallel safe as $$
begin
    return (
        select coalesce(jsonb_object_agg(h.key, h.value), '{}')::text
        from jsonb_each_text(
            case when message_id is null then '{}' else jsonb_build_object('NServiceBus.MessageId', message_id) end
            || case when jsonb_typeof(headers) = 'object' then headers else '{}' end
        ) h
    );
end;
$$;

-- The id that a transport sees for a message that no transport sent, or that was put back since.
create or replace function pgqueue._transport_id(id bigint) returns uuid
language sql immutable parallel safe as $$ select ('00000000000080008' || lpad(to_hex(id), 15, '0'))::uuid $$;

create or replace function pgqueue._insert_by_transport() returns trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(tg_argv[0]);
    largest constant int := greatest(65536, q.max_payload_bytes);
    headers jsonb;
    row_sent record;
    legacy jsonb;
begin
    if new.id is null then
        perform pgqueue._raise('null_column', tg_table_schema, tg_table_name, 'id');
    end if;
    if new.headers is null then
        perform pgqueue._raise('null_column', tg_table_schema, tg_table_name, 'headers');
    end if;
    if octet_length(new.headers) > largest then
        perform pgqueue._raise('payload_too_large', q.name, 'column headers', octet_length(new.headers)::text, largest::text);
    end if;
    if octet_length(new.body) > q.max_payload_bytes then
        perform pgqueue._raise('payload_too_large', q.name, 'body', octet_length(new.body)::text, q.max_payload_bytes::text);
    end if;
    if new.headers ~ '[^[:space:]]' then
        begin
            headers := new.headers::jsonb;
        exception when others then
            null;
        end;
        if jsonb_typeof(headers) = 'null' then
            -- The transport reads JSON null, but fails at its first use of the headers, again and again. It reads an
            -- empty object as no headers.
            headers := null;
            new.headers := '{}';
        elsif headers is null or jsonb_typeof(headers) <> 'object' then
            -- A transport moves a message whose headers it cannot read to the error queue of its endpoint. A consumer
            -- rejects a message whose headers are not an object.
            headers := to_jsonb(new.headers);
        elsif tg_argv[1] = 'sqlserver' then
            -- Only the relations of this flavor have the columns, so they are read as JSON, without the body.
            row_sent := new;
            row_sent.body := null;
            legacy := to_jsonb(row_sent);
            legacy := jsonb_strip_nulls(jsonb_build_object(
                'NServiceBus.CorrelationId', legacy -> 'correlationid', 'NServiceBus.ReplyToAddress', legacy -> 'replytoaddress'));
            if legacy <> '{}' then
                headers := legacy || headers;
                new.headers := headers::text;
            end if;
        end if;
    end if;
    insert into pgqueue.messages (
        queue_name, enqueued_at, visible_at, max_attempts, expires_at, message_id, body, headers,
        transport_headers, transport_id, kind
    )
    values (
        -- A transport reads a null body as an empty one. A message has either a payload or a body.
        q.name, at, at, q.max_attempts, new.expires at time zone 'UTC', new.id, coalesce(new.body, ''), headers,
        new.headers,
        -- An id that _transport_id makes was read from another queue. In this queue it can be the id of another message
        -- that will be put back.
        case when new.id not between pgqueue._transport_id(0) and pgqueue._transport_id((1::bigint << 60) - 1) then new.id end,
        q.kind
    )
    returning case when pgqueue._count('enqueued', q.name, 1) = 1 then transport_seq end into new.seq;
    perform pgqueue._wake_if_waiting(q, at);
    return new;
end;
$$;

create or replace function pgqueue._assign_transport_place() returns trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    new.transport_seq := nextval(tg_argv[0]::regclass);
    new.transport_id := coalesce(new.transport_id, pgqueue._transport_id(new.id));
    new.transport_headers := coalesce(new.transport_headers, pgqueue._wire_headers(new.headers, new.message_id));
    return new;
end;
$$;

create or replace function pgqueue._archive_deleted_by_transport() returns trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    at constant timestamptz := pgqueue._finish_time();
    is_filed constant boolean := coalesce(pgqueue._has_day_partition(pgqueue._utc_day(at)), false);
begin
    with done as (
        select
            t.id, t.queue_name, t.enqueued_at, null::timestamptz, at, t.attempt_count + 1, t.max_attempts, t.expires_at,
            t.message_id, t.payload, t.body, t.headers, t.claimed_by, t.last_error
        from taken t
        where coalesce(t.expires_at > pgqueue._now(), true)
    ),
    filed as (
        insert into pgqueue.archived_messages select d.* from done d where is_filed
    )
    insert into pgqueue.unfiled_messages select d.* from done d where not is_filed;
    return null;
end;
$$;
