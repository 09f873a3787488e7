-- Exposes a queue to an SQL transport of NServiceBus, as a relation into which the transport inserts messages and from
-- which it deletes the lowest row that is not locked. The relation is an automatically updatable view of the queue's
-- own partition: reading it runs no code except advance_transport, once a second. A trigger checks inserted messages.

create or replace function pgqueue._raise_exposed(queue_name text, relation regclass)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'duplicate_object',
        message = format('queue %L is already exposed as %s', queue_name, relation),
        hint = format('Drop that relation first: select pgqueue.unexpose_transport(%L).', queue_name);
end;
$$;
comment on function pgqueue._raise_exposed(text, regclass) is
'Raises 42710: the queue already has a relation. A queue has at most one.';

create or replace function pgqueue._raise_null_column(relation regclass, column_name name)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    of_relation record;
begin
    select n.nspname, c.relname into of_relation
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where c.oid = relation;
    -- The message and the fields are those of a table with a not-null constraint.
    raise exception using
        errcode = 'not_null_violation',
        message = format('null value in column "%s" of relation "%s" violates not-null constraint', column_name, of_relation.relname),
        hint = 'A table of the transport has the same constraint. Headers may be {}.',
        schema = of_relation.nspname, table = of_relation.relname, column = column_name;
end;
$$;
comment on function pgqueue._raise_null_column(regclass, name) is
'Raises 23502: a transport inserted null into a column that must not be null.';

create or replace function pgqueue._wire_string(content text)
returns text
language sql immutable parallel safe
as $$
    select case
        when content is null then 'null'
        when octet_length(s) = char_length(s) then s
        else (
            -- A character that UTF-16 encodes in two units is written as two escapes.
            select string_agg(case
                when octet_length(convert_to(c, 'UTF8')) < 4 then c
                else format(e'\\u%s\\u%s', to_hex(55296 + ((ascii(c) - 65536) >> 10)), to_hex(56320 + ((ascii(c) - 65536) & 1023)))
            end, '' order by n)
            from regexp_split_to_table(s, '') with ordinality as r (c, n)
        )
    end
    from replace(to_json(content)::text, '/', e'\\/') as s
$$;
comment on function pgqueue._wire_string(text) is
'Returns a string, or null, in JSON as the serializer of the transport writes it.';

create or replace function pgqueue._wire_headers(headers jsonb, message_id uuid)
returns text
language sql immutable parallel safe
as $$
    select '{' || coalesce(string_agg(pgqueue._wire_string(h.key) || ':' || pgqueue._wire_string(h.value), ','), '') || '}'
    from jsonb_each_text(
        case when message_id is null then '{}' else jsonb_build_object('NServiceBus.MessageId', message_id) end
        || case when jsonb_typeof(headers) = 'object' then headers else '{}' end
    ) h
$$;
comment on function pgqueue._wire_headers(jsonb, uuid) is
'Returns headers as a transport reads them: one compact JSON object of strings and nulls. Adds the header
NServiceBus.MessageId from message_id if the headers lack it.';

create or replace function pgqueue._parsed_headers(wire text)
returns jsonb
language plpgsql immutable
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
begin
    return wire::jsonb;
exception when others then
    begin
        -- JSON can contain escapes that PostgreSQL cannot store: U+0000, unpaired surrogates, and characters that the
        -- encoding of the database lacks. They are replaced here. A transport reads the original text.
        if getdatabaseencoding() <> 'UTF8' then
            return regexp_replace(
                wire::json::text, '(?<!\\)((?:\\\\)*)\\u(?:0000|(?!00[0-7])[0-9a-fA-F]{4})', '\1?', 'g')::jsonb;
        end if;
        return regexp_replace(
            regexp_replace(wire::json::text, '(?<!\\)((?:\\\\)*)\\u0000', '\1\\ufffd', 'g'),
            '(?<!\\)((?:\\\\)*)(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])'
            || '|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2})',
            '\1\\ufffd', 'g')::jsonb;
    exception when others then
        return null;
    end;
end;
$$;
comment on function pgqueue._parsed_headers(text) is
'Returns the headers of a transport as jsonb, or null if they are not JSON. U+FFFD replaces characters that PostgreSQL
cannot store, or a question mark if the encoding of the database is not UTF8.';

create or replace function pgqueue._transport_id(id bigint)
returns uuid
language sql immutable parallel safe
as $$ select ('00000000000080008' || lpad(to_hex(id), 15, '0'))::uuid $$;
comment on function pgqueue._transport_id(bigint) is
'Returns the id that a transport sees for a message that no transport sent, or that was put back since.';

create or replace function pgqueue._is_transport_id(id uuid)
returns boolean
language sql immutable parallel safe
as $$ select id between '00000000-0000-8000-8000-000000000000' and '00000000-0000-8000-8fff-ffffffffffff' $$;
comment on function pgqueue._is_transport_id(uuid) is
'Returns whether _transport_id can return this id. No other source may give such an id to a message of a queue.';

create or replace function pgqueue._accept_from_transport(
    relation regclass, queue_name text, id uuid, expires timestamp, wire_headers text, body bytea, own jsonb
)
returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    largest constant int := greatest(65536, q.max_payload_bytes);
    headers jsonb;
    seq bigint;
begin
    if id is null then
        perform pgqueue._raise_null_column(relation, 'id');
    end if;
    if wire_headers is null then
        perform pgqueue._raise_null_column(relation, 'headers');
    end if;
    if octet_length(wire_headers) > largest then
        perform pgqueue._raise_payload_too_large(q.name, 'column headers', octet_length(wire_headers), largest);
    end if;
    if octet_length(body) > q.max_payload_bytes then
        perform pgqueue._raise_payload_too_large(q.name, 'body', octet_length(body), q.max_payload_bytes);
    end if;
    if wire_headers ~ e'\\S' then
        headers := pgqueue._parsed_headers(wire_headers);
        if jsonb_typeof(headers) = 'null' then
            -- The transport reads JSON null, but fails at its first use of the headers, again and again. It reads an
            -- empty object as no headers.
            headers := null;
            wire_headers := '{}';
        elsif headers is null or jsonb_typeof(headers) <> 'object' then
            -- A transport moves a message whose headers it cannot read to the error queue of its endpoint. A consumer
            -- rejects a message whose headers are not an object.
            headers := to_jsonb(wire_headers);
        end if;
    end if;
    if own <> '{}' and coalesce(jsonb_typeof(headers) = 'object', true) then
        headers := own || coalesce(headers, '{}');
    end if;
    insert into pgqueue.messages (
        queue_name, enqueued_at, visible_at, max_attempts, expires_at, message_id, body, headers,
        transport_headers, transport_id, kind
    )
    values (
        -- A transport reads a null body as an empty one. A message has either a payload or a body.
        q.name, at, at, q.max_attempts, expires at time zone 'UTC', id, coalesce(body, ''), headers, wire_headers,
        -- Such an id was read from another queue. In this queue it can be the id of another message that will be put
        -- back.
        case when not pgqueue._is_transport_id(id) then id end, q.kind
    )
    returning case when pgqueue._count('enqueued', q.name, 1) = 1 then transport_seq end into seq;
    perform pgqueue._wake_if_waiting(q, at);
    return seq;
end;
$$;
comment on function pgqueue._accept_from_transport(regclass, text, uuid, timestamp, text, bytea, jsonb) is
'Sends a message that a transport inserted into the relation, and returns its seq. own holds the headers that came in
columns of their own. Headers that are not a JSON object become a JSON string. Raises 23502, PQ001, PQ003.';

create or replace function pgqueue._insert_by_postgresql()
returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
begin
    new.seq := pgqueue._accept_from_transport(
        tg_relid, tg_argv[0], new.id, new.expires, new.headers, new.body, '{}');
    return new;
end;
$$;
comment on function pgqueue._insert_by_postgresql() is
'Trigger of a relation that expose_transport created: an insert sends a message.';

create or replace function pgqueue._insert_by_sqlserver()
returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
begin
    new.seq := pgqueue._accept_from_transport(
        tg_relid, tg_argv[0], new.id, new.expires, new.headers, new.body,
        jsonb_strip_nulls(jsonb_build_object(
            'NServiceBus.CorrelationId', new.correlationid, 'NServiceBus.ReplyToAddress', new.replytoaddress)));
    new.rowversion := new.seq;
    return new;
end;
$$;
comment on function pgqueue._insert_by_sqlserver() is
'Trigger of a relation of flavor sqlserver: an insert sends a message. correlationid and replytoaddress become headers
if the headers lack them.';

create or replace function pgqueue._assign_transport_place()
returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
begin
    new.transport_seq := nextval(tg_argv[0]::regclass);
    new.transport_id := coalesce(new.transport_id, pgqueue._transport_id(new.id));
    new.transport_headers := coalesce(new.transport_headers, pgqueue._wire_headers(new.headers, new.message_id));
    return new;
end;
$$;
comment on function pgqueue._assign_transport_place() is
'Trigger of the table of an exposed queue: gives each new row the next transport_seq, so that a transport finds it at
the end of the queue, and fills in transport_id and transport_headers.';

create or replace function pgqueue._archive_deleted_by_transport()
returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
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
comment on function pgqueue._archive_deleted_by_transport() is
'Trigger of the table of an exposed queue that archives: writes messages deleted through the relation to the archive, as
receive does. Expired messages are not archived.';

create or replace function pgqueue._sync_archive_trigger(q pgqueue.queues)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set lock_timeout = '500 ms'
as $$
declare
    partition constant regclass := pgqueue._partition_of(q);
    is_wanted constant boolean := q.archive_for is not null and to_regclass(pgqueue._transport_table(q)) is not null;
    is_there constant boolean := exists (
        select from pg_trigger g where g.tgrelid = partition and g.tgname = 'archive_taken');
begin
    -- A statement trigger fires for deletes that name this partition, as the relation does. It does not fire for the
    -- SQL functions, which delete from the parent table and archive by themselves. Queues that do not archive have no
    -- trigger, and so do not pay for it.
    if is_wanted and not is_there then
        execute format(
            'create or replace trigger archive_taken after delete on %s referencing old table as taken for each statement'
            ' execute function pgqueue._archive_deleted_by_transport()', partition);
    elsif is_there and not is_wanted then
        execute format('drop trigger archive_taken on %s', partition);
    end if;
exception when lock_not_available then
    perform pgqueue._raise_queue_busy(q.name, 'alter_queue');
end;
$$;
comment on function pgqueue._sync_archive_trigger(pgqueue.queues) is
'Creates the archive trigger on the table of a queue if the queue is exposed and archives, and drops it otherwise.
Raises PQ004 if a longer transaction uses the table.';

create or replace function pgqueue._transport_table(q pgqueue.queues)
returns text
language sql immutable parallel safe
as $$ select format('pgqueue.%I', format('transports_%s', q.queue_id)) $$;
comment on function pgqueue._transport_table(pgqueue.queues) is
'Returns the name of the table that holds the row in transports of an exposed queue, and no other row.';

create or replace function pgqueue._transport_of(q pgqueue.queues, out relation regclass, out seq_register regclass)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    -- Look the table up by name, in a statement that locks it: after waiting for expose_transport, the session's
    -- catalog cache and its snapshot can be stale.
    execute format('select t.relation, t.seq_register from %s t', pgqueue._transport_table(q)) into relation, seq_register;
    if relation is null then
        perform pgqueue._raise_stale_snapshot(format('queue %L', q.name));
    end if;
exception when undefined_table then
    -- The queue is not exposed.
    null;
end;
$$;
comment on function pgqueue._transport_of(pgqueue.queues) is
'Returns the current relation and sequence of a queue that the caller has locked; nulls if it is not exposed. Raises
40001 if it was exposed after the snapshot was taken.';

create or replace function pgqueue._record_transport_head(t pgqueue.transports, partition regclass)
returns pgqueue.transports
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    bound constant bigint := coalesce(pg_sequence_last_value(t.seq_register), 0);
    writers constant text[] := pgqueue._running_writers();
    lowest bigint;
begin
    -- As in _record_vacant_ids: read the sequence first and the running writers second. Once these writers have ended,
    -- a later statement sees all rows up to that value of the sequence, and no other row can appear there.
    t.writers := t.writers || array(select w from unnest(writers) as w where w like '-1/%' and w <> all (t.writers));
    if not t.writers && writers then
        t.settled_seq := t.bound_seq;
        t.bound_seq := bound;
        t.writers := writers;
    end if;
    execute format(
        'select m.transport_seq from %s m where m.transport_seq >= $1 order by m.transport_seq limit 1', partition)
    into lowest using t.head;
    t.head := greatest(t.head, least(t.settled_seq + 1, lowest));
    return t;
end;
$$;
comment on function pgqueue._record_transport_head(pgqueue.transports, regclass) is
'Returns the row in transports of a relation, with head moved up to the lowest transport_seq at which a row exists or
may appear.';

create or replace function pgqueue._advance_transport(q pgqueue.queues)
returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    at constant timestamptz := pgqueue._now();
    past_the_end constant bigint := 9223372036854775807;
    table_name constant text := pgqueue._transport_table(q);
    t pgqueue.transports;
    locked_row pgqueue.transports;
    is_locked boolean := false;
    has_more boolean := false;
begin
    if q.paused_at is not null or to_regclass(table_name) is null then
        return past_the_end;
    end if;
    execute format('select t.head, t.next_at from %s t', table_name) into t.head, t.next_at;
    -- A transaction that receives can stay open while its handler works, and would hold the row for that long. For two
    -- seconds it leaves this work to statements that only read. A next_at more than a minute ahead was set while the
    -- clock was wrong, and is ignored.
    if current_setting('transaction_read_only')::boolean
        or t.next_at < at + interval '1 min' and (
            t.next_at > at
            or t.next_at > at - interval '2 s' and current_query() ~* e'^[\\s(]*(delete|with|insert|update|merge)\\M'
        )
    then
        return t.head;
    end if;
    -- The running writers prove nothing if the snapshot is older than their list.
    if not pgqueue._has_fixed_snapshot() then
        execute format(
            'select t.seq_register, t.head, t.settled_seq, t.bound_seq, t.writers from %s t'
            ' for no key update skip locked', table_name)
        into locked_row.seq_register, locked_row.head, locked_row.settled_seq, locked_row.bound_seq, locked_row.writers;
        is_locked := locked_row.head is not null;
    end if;
    -- Promote messages 15 s ahead, because the current statement does not see what it promotes. The relation shows no
    -- message before it is due.
    if (is_locked or t.next_at not between at - interval '2 s' and at + interval '1 min') and exists (
        select from pgqueue.scheduled_messages s
        where s.queue_name = q.name and s.due_at between pgqueue._first_due_at_of(q.name, at) and at + interval '15 s'
    ) and pgqueue._try_lock_existing_queue(q) then
        perform pgqueue._move_due_messages(q, at + interval '15 s', 1000, pgqueue._first_due_at_of(q.name, at));
        has_more := exists (
            select from pgqueue.scheduled_messages s
            where s.queue_name = q.name and s.due_at between pgqueue._first_due_at_of(q.name, at) and at + interval '15 s'
        );
    end if;
    if is_locked and pgqueue._try_lock_existing_queue(q) then
        perform pgqueue._adopt_messages(q);
    end if;
    if is_locked then
        -- Promoted messages are recorded in requeued_messages for claims, and claims remove them again. This queue may
        -- never have a claim, so remove them here, too.
        perform pgqueue._prune_requeued(q, r.gone, r.last_time)
        from pgqueue._read_requeued(q, at, pgqueue._first_check_at_of(q.name, at), -9223372036854775808, false, 500) r;
        t := pgqueue._record_transport_head(locked_row, pgqueue._partition_of(q));
        execute format(
            'update %s set head = $1, settled_seq = $2, bound_seq = $3, writers = $4, next_at = $5', table_name)
        using t.head, t.settled_seq, t.bound_seq, t.writers, case when has_more then at else at + interval '1 s' end;
        -- As in a sweep, which this queue may never have.
        perform pgqueue._do_maintenance_if_due(at);
    end if;
    return t.head;
end;
$$;
comment on function pgqueue._advance_transport(pgqueue.queues) is
'Does the work of advance_transport if it is due, and returns its result.';

create or replace function pgqueue.advance_transport(queue_name pgqueue.queue_of_transport)
returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
begin
    return pgqueue._advance_transport(pgqueue._get_unlocked_queue(queue_name));
end;
$$;
comment on function pgqueue.advance_transport(pgqueue.queue_of_transport) is
'Makes scheduled messages ready when they come due, and returns the lowest seq at which statements on the relation of
expose_transport have to read; 9223372036854775807 while the queue is paused, or if it is not exposed. The relation
calls this itself, at most once a second. A role that reads the relation needs access to this function:
grant_access(role, ''transport''). Raises PQ001.';

create or replace function pgqueue._make_dedicated(q pgqueue.queues)
returns pgqueue.queues
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    perform pgqueue._create_partition(q.name, q.queue_id, 'pgqueue.messages_shared');
    update pgqueue.queues set dedicated = true, updated_at = pgqueue._now() where queues.name = q.name returning * into q;
    return pgqueue._change_kind(q);
end;
$$;
comment on function pgqueue._make_dedicated(pgqueue.queues) is
'Moves the messages of a queue into a partition of its own, and returns the row of the queue.';

create or replace function pgqueue._body_string(as_view text)
returns text
language sql stable
as $$
    -- Use only functions that every role may call. A body is text if its bytes are valid UTF-8 without a zero byte.
    select case
        when current_setting('server_encoding') = 'UTF8' then format(
            'case when encode(%1$s, ''hex'') ~ %2$L then convert_from(%1$s, ''UTF8'') else encode(%1$s, ''escape'') end', as_view,
            '^(?:0[1-9a-f]|[1-7].|(?:c[2-9a-f]|d.)[89ab].|e0[ab].[89ab].|(?:e[1-9abcef])(?:[89ab].){2}|ed[89].[89ab].|f0[9ab].(?:[89ab].){2}|f[1-3](?:[89ab].){3}|f48.(?:[89ab].){2})*$')
        else format('encode(%s, ''escape'')', as_view)
    end
$$;
comment on function pgqueue._body_string(text) is
'Returns the SQL expression that shows a body as text: decoded if it is UTF-8, otherwise in the format escape
of encode.';

create or replace function pgqueue._relation_query(q pgqueue.queues, flavor text, body_string boolean)
returns text
language sql stable
as $$
    select format(
        'select m.transport_id as id,%1$s m.expires_at at time zone ''UTC'' as expires, m.transport_headers as headers,'
        ' coalesce(m.body, convert_to(m.payload::text, ''UTF8'')) as body,%2$s%3$s m.transport_seq as seq from %4$s m'
        -- Planning one condition is faster than planning two, and reading a table of one row is planned faster than a
        -- lookup by key.
        ' where case when m.attempt_count < m.max_attempts then m.visible_at <= clock_timestamp() end'
        ' and m.transport_seq >= ('
        ' select case when t.next_at > clock_timestamp() and t.next_at < clock_timestamp() + interval ''1 min'''
        ' then t.head else pgqueue.advance_transport(%5$L) end from %6$s t)'
        -- This condition has no column of m, so it is evaluated before the first row. Otherwise a sequential scan of an
        -- empty table would never call advance_transport, and no message would ever come due.
        ' and (select t.next_at > clock_timestamp() and t.next_at < clock_timestamp() + interval ''1 min'''
        ' or pgqueue.advance_transport(%5$L) is not null from %6$s t)',
        case when flavor = 'sqlserver' then
            ' (m.headers ->> ''NServiceBus.CorrelationId'')::varchar(255) as correlationid,'
            ' (m.headers ->> ''NServiceBus.ReplyToAddress'')::varchar(255) as replytoaddress, true as recoverable,'
        end,
        case when body_string then
            format(' %s as bodystring,', pgqueue._body_string('coalesce(m.body, convert_to(m.payload::text, ''UTF8''))'))
        end,
        case when flavor = 'sqlserver' then ' m.transport_seq as rowversion,' end,
        pgqueue._partition_of(q), q.name, pgqueue._transport_table(q))
$$;
comment on function pgqueue._relation_query(pgqueue.queues, text, boolean) is
'Returns the query of the relation of a transport. It shows messages that could be claimed, and expired ones, which the
transport deletes itself.';

create or replace function pgqueue._expose(
    q pgqueue.queues, schema_name text, table_name text, body_string boolean, flavor text, for_role name
)
returns text
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    relation constant text := format('%I.%I', schema_name, table_name);
    register constant text := format('pgqueue.%I', format('queue_%s_seq', q.queue_id));
    name constant text := format('messages_%s', q.queue_id);
    partition regclass;
begin
    if q.group_limit is not null then
        perform pgqueue._raise_invalid('queue_name', q.name,
            'a queue without group_limit: endpoints receive without regard to groups');
    end if;
    if q.priorities then
        perform pgqueue._raise_invalid('queue_name', q.name,
            'a queue without priorities: endpoints receive without regard to them');
    end if;
    if q.max_in_flight is not null or q.rate_limit is not null then
        perform pgqueue._raise_invalid('queue_name', q.name, 'a queue without limits: endpoints receive without regard to them');
    end if;
    if q.dedicated then
        -- Plain SQL inserts do not lock the queue. Without this lock their rows could miss the trigger and have no
        -- transport_seq. Creating the trigger takes the same lock anyway.
        execute format('lock table only %s in share row exclusive mode', pgqueue._partition_of(q));
        perform pgqueue._require_current_snapshot(format('queue %L', q.name));
    else
        q := pgqueue._make_dedicated(q);
    end if;
    partition := pgqueue._partition_of(q);
    perform pgqueue._create_register(q.queue_id, 'seq');
    execute format(
        'update %s m set transport_seq = o.n, transport_id = pgqueue._transport_id(m.id),'
        ' transport_headers = coalesce(m.transport_headers, pgqueue._wire_headers(m.headers, m.message_id))'
        ' from (select c.id, row_number() over (order by c.id) as n from %1$s c) o where o.id = m.id', partition);
    execute format('select setval(%L, count(*) + 1, false) from %s', register, partition);
    -- A search for the first row reads all entries of an index page: fillfactor 30 keeps them few. Also, with hardly
    -- any statistics every index seems to find one row, and the planner takes the smaller index, or the one created
    -- last. For a search by id that must be the index on transport_id.
    execute format(
        'create unique index %I on %s (transport_seq) with (fillfactor = 30)', name || '_transport_seq', partition);
    execute format('create unique index %I on %s (transport_id)', name || '_transport_id', partition);
    -- The statistics of a queue mostly say that it was empty. Even then, reading it in the order of transport_seq must
    -- look cheaper than reading and sorting all rows. So keep no statistics of that column: they would tell the planner
    -- the physical order of the rows. The low threshold renews the other statistics soon.
    execute format('alter table %s alter transport_seq set statistics 0', partition);
    execute format('alter table %s set (autovacuum_analyze_threshold = 1000)', partition);
    execute format('create index %I on %s ((expires_at at time zone ''UTC'')) where expires_at is not null',
        name || '_expires', partition);
    execute format(
        'create trigger place_for_transport before insert on %s for each row when (new.transport_seq is null)'
        ' execute function pgqueue._assign_transport_place(%L)', partition, register);
    -- Fire the trigger also in sessions that have triggers disabled: a row without transport_seq is never received.
    execute format('alter table %s enable always trigger place_for_transport', partition);
    -- The key keeps a dump that is restored twice from adding a second row.
    execute format(
        'create table %s (primary key (queue_name)) inherits (pgqueue.transports)'
        ' with (fillfactor = 10, autovacuum_vacuum_threshold = 100, autovacuum_vacuum_scale_factor = 0, vacuum_truncate = false)',
        pgqueue._transport_table(q));
    perform pgqueue._revoke_default_privileges(pgqueue._transport_table(q)::regclass);
    execute format('create view %s as %s', relation, pgqueue._relation_query(q, flavor, body_string));
    perform pgqueue._revoke_default_privileges(relation::regclass);
    execute format('alter view %s alter column id set default gen_random_uuid()', relation);
    execute format(
        'create trigger insert_by_transport instead of insert on %s for each row'
        ' execute function pgqueue.%I(%L)', relation, '_insert_by_' || flavor, q.name);
    execute format('comment on view %s is %L', relation, format('The pgqueue queue %s, for a transport.', q.name));
    execute format('grant select, insert, update, delete on %s to %I with grant option', relation, for_role);
    execute format('insert into %s (queue_name, relation, seq_register) values ($1, $2, $3)', pgqueue._transport_table(q))
    using q.name, relation::regclass, register::regclass;
    perform pgqueue._sync_archive_trigger(q);
    update pgqueue.subscriptions s
    set queue_address = pgqueue._transport_address(relation::regclass)
    where s.queue_name = q.name;
    return pgqueue._transport_address(relation::regclass);
end;
$$;
comment on function pgqueue._expose(pgqueue.queues, text, text, boolean, text, name) is
'Creates the relation of a queue that the caller has locked exclusively, grants all privileges on it to a role, and
returns its address.';

create or replace function pgqueue._transport_address(relation regclass)
returns text
language sql stable
as $$
    select format('"%s"."%s"', replace(n.nspname, '"', '""'), replace(c.relname, '"', '""'))
    from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where c.oid = relation
$$;
comment on function pgqueue._transport_address(regclass) is
'Returns the address of a relation, in the form that a transport uses.';

create or replace function pgqueue._check_exposure(schema_name text, table_name text, flavor text, for_role name)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if schema_name is null or schema_name ~ '^(pg_|pgqueue$|information_schema$)'
        or not exists (select from pg_namespace n where n.nspname = schema_name)
    then
        perform pgqueue._raise_invalid('schema_name', schema_name, 'the name of an existing schema, other than pgqueue and the system schemas');
    end if;
    if table_name is null or octet_length(table_name) not between 1 and 63 then
        perform pgqueue._raise_invalid('table_name', table_name, 'a name of 1 to 63 bytes');
    end if;
    if flavor is null or flavor not in ('postgresql', 'sqlserver') then
        perform pgqueue._raise_invalid('flavor', flavor, 'postgresql or sqlserver');
    end if;
    if not has_schema_privilege(for_role, schema_name, 'CREATE') then
        perform pgqueue._raise_not_allowed(for_role, 'create relations in schema', schema_name);
    end if;
end;
$$;
comment on function pgqueue._check_exposure(text, text, text, name) is
'Raises 22023 or 42501 unless the role may create such a relation in the schema.';

create or replace function pgqueue.expose_transport(
    queue_name pgqueue.queue_of_admin,
    schema_name text default 'public',
    table_name text default null,
    body_string boolean default false,
    flavor text default 'postgresql',
    caller pgqueue.caller default current_user
)
returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '500 ms'
set jit = off
as $$
declare
    q pgqueue.queues;
    exposed regclass;
    address text;
begin
    perform pg_advisory_xact_lock(pgqueue._lock_key(queue_name));
    q := pgqueue._get_locked_queue(queue_name);
    perform pgqueue._require_current_snapshot(format('queue %L', queue_name));
    perform pgqueue._check_exposure(schema_name collate "C", coalesce(table_name, queue_name), flavor, caller);
    if body_string is null then
        perform pgqueue._raise_invalid('body_string', null, 'true or false');
    end if;
    select t.relation into exposed from pgqueue.transports t where t.queue_name = q.name;
    if found then
        perform pgqueue._raise_exposed(q.name, exposed);
    end if;
    address := pgqueue._expose(q, schema_name, coalesce(table_name, queue_name), body_string, flavor, caller);
    if not q.dedicated then
        perform pgqueue._call_queue_handlers('queue_altered', w, q) from pgqueue.queues w where w.name = q.name;
    end if;
    return address;
exception when lock_not_available then
    perform pgqueue._raise_queue_busy(queue_name, 'expose_transport');
    return null;
end;
$$;
comment on function pgqueue.expose_transport(pgqueue.queue_of_admin, text, text, boolean, text, pgqueue.caller) is
'Creates a relation over the queue, table_name (default: the queue''s name) in schema_name (default public), and returns
its address. An NServiceBus transport uses it like its own table. The columns are id, expires (UTC), headers, body and
seq; with body_string also bodystring, the body as text if it is UTF-8; with flavor sqlserver (default postgresql) also
correlationid, replytoaddress, recoverable and rowversion. An insert sends a message. It raises 23502 if id or headers
are null, and PQ003 if the body exceeds max_payload_bytes, or the headers exceed both max_payload_bytes and 64 KB. A
null body becomes an empty one. Headers that are not a JSON object are kept as they came; pgqueue returns them as a JSON
string, and its consumers reject the message. A delete takes messages as receive does, and archives them if the queue
has archive_for; a purge cannot be told apart from a receive. The relation shows messages that could be claimed, and
expired ones, which the transport deletes itself and which are not archived. The queue becomes dedicated, as by
create_queue, and its messages are moved and numbered under the same lock: expose it while it has few. The caller needs
the CREATE privilege on the schema, and gets all privileges on the relation, with grant option. A role that reads the
relation also needs grant_access(role, ''transport''). Raises 22023, PQ001, PQ004, 42501, 42P07 if the name is taken,
and 42710 if the queue is already exposed.';

create or replace function pgqueue._unexpose(q pgqueue.queues)
returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    relation regclass;
    seq_register regclass;
    index regclass;
begin
    select t.relation, t.seq_register into relation, seq_register from pgqueue._transport_of(q) t;
    if relation is null then
        return false;
    end if;
    -- The relation, or an index, may have been dropped by hand.
    if exists (select from pg_class c where c.oid = relation) then
        execute format('drop view %s', relation);
    end if;
    -- Any role with access can make a view that depends on it, or on the sequence. It must not keep them.
    execute format('drop table %s cascade', pgqueue._transport_table(q));
    execute format('drop trigger place_for_transport on %s', pgqueue._partition_of(q));
    perform pgqueue._sync_archive_trigger(q);
    for index in
        select x.indexrelid from pg_index x join pg_class c on c.oid = x.indexrelid
        where x.indrelid = pgqueue._partition_of(q) and c.relname ~ '^messages_[0-9]+_(transport_id|transport_seq|expires)$'
    loop
        execute format('drop index %s', index);
    end loop;
    execute format('drop sequence %s cascade', seq_register);
    update pgqueue.subscriptions s set queue_address = q.name where s.queue_name = q.name;
    return true;
end;
$$;
comment on function pgqueue._unexpose(pgqueue.queues) is
'Drops the relation of a queue; returns false if there is none.';

create or replace function pgqueue.unexpose_transport(queue_name pgqueue.queue_of_admin)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '500 ms'
set jit = off
as $$
declare
    q pgqueue.queues;
begin
    perform pg_advisory_xact_lock(pgqueue._lock_key(queue_name));
    q := pgqueue._get_locked_queue(queue_name);
    perform pgqueue._require_current_snapshot(format('queue %L', queue_name));
    return pgqueue._unexpose(q);
exception when lock_not_available then
    perform pgqueue._raise_queue_busy(queue_name, 'unexpose_transport');
    return null;
end;
$$;
comment on function pgqueue.unexpose_transport(pgqueue.queue_of_admin) is
'Drops the relation that expose_transport created and returns true; false if there is none. The queue keeps its messages
and stays dedicated. Raises PQ001, PQ004, and 2BP01 if another object depends on the relation.';

create or replace function pgqueue._resolve_subscription()
returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
    found_name text;
begin
    if new.topic is null then
        perform pgqueue._raise_null_column(tg_relid, 'topic');
    end if;
    if new.queue_address is null then
        perform pgqueue._raise_null_column(tg_relid, 'queue_address');
    end if;
    perform pgqueue._check_topic('topic', new.topic, true);
    perform pgqueue._require_untruncated('{pgqueue.transports}');
    select t.queue_name into found_name
    from pgqueue.transports t
    where pgqueue._transport_address(t.relation) = new.queue_address;
    new.queue_name := (pgqueue._get_locked_queue(coalesce(found_name, new.queue_address))).name;
    return new;
end;
$$;
comment on function pgqueue._resolve_subscription() is
'Trigger of subscriptions: sets queue_name to the queue that queue_address leads to, if only the address was given or
changed. Raises 22023, 23502, PQ001.';

create or replace function pgqueue._address_subscription()
returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
    q pgqueue.queues;
begin
    select queues.* into q from pgqueue.queues where queues.name = new.queue_name;
    if found then
        new.queue_address := coalesce(pgqueue._transport_address((pgqueue._transport_of(q)).relation), new.queue_address);
    end if;
    return new;
end;
$$;
comment on function pgqueue._address_subscription() is
'Trigger of subscriptions: sets queue_address of a subscription that subscribe created to the address by which a
transport knows the queue.';

create or replace trigger address_subscription
before insert on pgqueue.subscriptions
for each row when (new.queue_address = new.queue_name)
execute function pgqueue._address_subscription();

create or replace trigger resolve_new_subscription
before insert on pgqueue.subscriptions
for each row when (new.queue_name is null)
execute function pgqueue._resolve_subscription();

create or replace trigger resolve_changed_subscription
before update of queue_address on pgqueue.subscriptions
for each row when (new.queue_address is distinct from old.queue_address)
execute function pgqueue._resolve_subscription();

create or replace function pgqueue._subscriptions_comment()
returns text
language sql immutable parallel safe
as $$ select 'The subscriptions of pgqueue, for a transport.' $$;
comment on function pgqueue._subscriptions_comment() is
'Returns the comment that marks the relations of expose_subscriptions.';

create or replace function pgqueue._create_subscriptions_relation(schema_name text, table_name text, for_role name)
returns text
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    relation constant text := format('%I.%I', schema_name, table_name);
begin
    -- A transport sends an event to all addresses or to none, and fails if one is not a relation. So the view does not
    -- show the subscriptions of a queue without a relation, whose address is the name of the queue, or whose relation
    -- was dropped or renamed by hand. to_regclass would require the reader to have access to the schemas of all.
    execute format(
        'create view %s as select s.queue_address as queueaddress, s.endpoint, s.topic from pgqueue.subscriptions s'
        ' where case when s.queue_address <> s.queue_name then exists ('
        'select from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace'
        ' where c.relname = (parse_ident(s.queue_address))[2] and n.nspname = (parse_ident(s.queue_address))[1]) end',
        relation);
    perform pgqueue._revoke_default_privileges(relation::regclass);
    execute format('comment on view %s is %L', relation, pgqueue._subscriptions_comment());
    execute format('grant select, insert, update, delete on %s to %I with grant option', relation, for_role);
    return pgqueue._transport_address(relation::regclass);
end;
$$;
comment on function pgqueue._create_subscriptions_relation(text, text, name) is
'Creates the relation of expose_subscriptions, grants all privileges on it to a role, and returns its address.';

create or replace function pgqueue.expose_subscriptions(
    schema_name text default 'public', table_name text default 'SubscriptionRouting',
    caller pgqueue.caller default current_user
)
returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
begin
    -- Such calls take turns. Otherwise the second would fail with an error of the catalog.
    perform pgqueue._require_admin_of_all(caller, 'expose_subscriptions');
    lock table only pgqueue.subscriptions in share update exclusive mode;
    perform pgqueue._check_exposure(schema_name collate "C", table_name, 'postgresql', caller);
    return pgqueue._create_subscriptions_relation(schema_name, table_name, caller);
end;
$$;
comment on function pgqueue.expose_subscriptions(text, text, pgqueue.caller) is
'Creates a relation over the subscriptions, table_name in schema_name, and returns its address. An NServiceBus transport
uses it like its own table. The columns are queueaddress, endpoint and topic. It shows the subscriptions of queues that
have a relation of expose_transport: what an endpoint publishes reaches those that are subscribed to exactly the name of
the event or of one of its base types. publish reaches all subscribed queues, also by patterns. An address is one that
expose_transport returned, or the name of a queue; an address that leads to no queue raises PQ001. An endpoint has each
topic once across all such relations: two systems in one database need different endpoint names. A role that may insert
into the relation can subscribe any queue to any topic. The caller needs the CREATE privilege on the schema, and gets
all privileges on the relation, with grant option. Raises 22023, 42501, and 42P07 if the name is taken.';

create or replace function pgqueue._drop_subscriptions_relation(relation regclass)
returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if relation is null or obj_description(relation, 'pg_class') is distinct from pgqueue._subscriptions_comment()
        or not exists (select from pg_class c where c.oid = relation and c.relkind = 'v' and pg_get_userbyid(c.relowner) = current_user)
    then
        return false;
    end if;
    execute format('drop view %s', relation);
    return true;
end;
$$;
comment on function pgqueue._drop_subscriptions_relation(regclass) is
'Drops a relation that expose_subscriptions created; returns false if the relation is not one of them.';

create or replace function pgqueue.unexpose_subscriptions(
    schema_name text default 'public', table_name text default 'SubscriptionRouting',
    caller pgqueue.caller default current_user
)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
begin
    if schema_name is null then
        perform pgqueue._raise_invalid('schema_name', null, 'the name of a schema');
    end if;
    if table_name is null then
        perform pgqueue._raise_invalid('table_name', null, 'the name of a relation that expose_subscriptions made');
    end if;
    perform pgqueue._require_admin_of_all(caller, 'unexpose_subscriptions');
    lock table only pgqueue.subscriptions in share update exclusive mode;
    return pgqueue._drop_subscriptions_relation(to_regclass(format('%I.%I', schema_name, table_name)));
end;
$$;
comment on function pgqueue.unexpose_subscriptions(text, text, pgqueue.caller) is
'Drops a relation that expose_subscriptions created and returns true; false if there is none. The subscriptions stay.
Raises 22023, and 2BP01 if another object depends on the relation.';

create or replace function pgqueue._on_queue_created_transport(q pgqueue.queues)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if to_regclass(pgqueue._transport_table(q)) is null then
        return;
    end if;
    if not q.dedicated or q.priorities or coalesce(q.group_limit, q.max_in_flight) is not null then
        -- The relation was dropped with the table that such a queue cannot have.
        execute format('drop table %s cascade', pgqueue._transport_table(q));
        execute format('drop sequence pgqueue.queue_%s_seq cascade', q.queue_id);
        return;
    end if;
    -- A restore without rows has left the relation. Its trigger has the name of the queue.
    execute format(
        'insert into %s (queue_name, relation, seq_register) select $1, coalesce(max(g.tgrelid), 0), $2'
        ' from pg_trigger g join pg_proc p on p.oid = g.tgfoid'
        ' where p.pronamespace = ''pgqueue''::regnamespace and p.proname ~ ''^_insert_by_'' and g.tgargs = $3'
        ' on conflict do nothing', pgqueue._transport_table(q))
    using q.name, format('pgqueue.queue_%s_seq', q.queue_id)::regclass, convert_to(q.name, 'UTF8') || decode('00', 'hex');
    perform pgqueue._sync_archive_trigger(q);
    if q.rate_limit is not null then
        perform pgqueue._unexpose(q);
    end if;
end;
$$;
comment on function pgqueue._on_queue_created_transport(pgqueue.queues) is
'Connects a new queue to the relation that a restore without rows has left, or drops the relation if the queue cannot
have one.';

create or replace function pgqueue._on_queue_altered_transport(before pgqueue.queues, after pgqueue.queues)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if not after.dedicated then
        return;
    end if;
    if after.rate_limit is not null and exists (select from pgqueue.transports t where t.queue_name = after.name) then
        perform pgqueue._raise_invalid('rate_limit', after.rate_limit::text,
            format('null: queue %L has the relation of a transport', after.name));
    end if;
    if after.archive_for is null and before.archive_for is not null then
        -- An older snapshot may not show that the queue is exposed.
        perform pgqueue._require_current_snapshot(format('queue %L', after.name));
    end if;
    perform pgqueue._sync_archive_trigger(after);
end;
$$;
comment on function pgqueue._on_queue_altered_transport(pgqueue.queues, pgqueue.queues) is
'Creates or drops the archive trigger of the queue if archiving begins or ends. Raises 22023 if an exposed queue gets a
rate_limit, and 40001 if an old snapshot may hide that the queue is exposed.';

create or replace function pgqueue._on_queue_dropping_transport(q pgqueue.queues)
returns void
language sql volatile
as $$ select pgqueue._unexpose(q) $$;
comment on function pgqueue._on_queue_dropping_transport(pgqueue.queues) is
'Drops the relation of the queue.';

create or replace function pgqueue._findings_of_transport(q pgqueue.queues)
returns setof pgqueue.finding
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    top_id bigint;
    last_id bigint;
    register regclass;
    address text;
    partition constant regclass := pgqueue._partition_of(q);
    expires boolean;
begin
    if to_regclass(pgqueue._transport_table(q)) is not null then
        execute format(
            'select greatest(t.head - 1, t.settled_seq, (select max(m.transport_seq) from %s m)), t.seq_register,'
            ' pgqueue._transport_address(t.relation) from %s t',
            pgqueue._partition_of(q), pgqueue._transport_table(q))
        into top_id, register, address;
        if address is null then
            return next row('error', q.name, 'missing_relation', 'the relation of the queue was dropped by hand: its transport fails',
                format('select pgqueue.unexpose_transport(%1$L); select pgqueue.expose_transport(%1$L);', q.name))::pgqueue.finding;
        elsif exists (select from pgqueue.subscriptions s where s.queue_name = q.name and s.queue_address <> address) then
            return next row('warning', q.name, 'renamed_relation',
                format('the relation of the queue was renamed to %s: what endpoints of a transport publish does not reach it', address),
                format('update pgqueue.subscriptions set queue_address = %L where queue_name = %L;', address, q.name))::pgqueue.finding;
        end if;
        execute format('select t.last_value - (not t.is_called)::int from %s t', register) into last_id;
        if top_id > last_id then
            return next row('error', q.name, 'ids_above_sequence',
                format('its relation has already used seq %s, which the sequence %s has not reached: new messages are refused, or its transport does not find them', top_id, register),
                format(
                    'select setval(%1$L, greatest(%2$s, pg_sequence_last_value(%1$L)));'
                    ' update %3$s set transport_seq = nextval(%1$L) where transport_seq < (select t.head from %4$s t);',
                    register, top_id, pgqueue._partition_of(q), pgqueue._transport_table(q)))::pgqueue.finding;
        end if;
        if not pgqueue._has_index(partition, '(expires_at AT TIME ZONE ''UTC''::text)') then
            execute format(
                'select bool_or(m.expires_at is not null) from (select c.expires_at from %s c limit 1000) m', partition)
            into expires;
            if expires then
                return next row('warning', q.name, 'missing_index',
                    format('messages expire, and %s has no index on the column expires of its relation: the transport reads the whole queue', partition),
                    format('create index concurrently on %s ((expires_at AT TIME ZONE ''UTC''::text)) where expires_at is not null;', partition)
                )::pgqueue.finding;
            end if;
        end if;
    elsif exists (select from pgqueue.subscriptions s where s.queue_name = q.name)
        and exists (
            select from pg_description d
            where d.classoid = 'pg_class'::regclass and d.description = pgqueue._subscriptions_comment())
    then
        return next row('info', q.name, 'subscriber_without_relation',
            'the queue is subscribed, but has no relation: what endpoints of a transport publish does not reach it',
            format('select pgqueue.expose_transport(%L);', q.name))::pgqueue.finding;
    end if;
end;
$$;
comment on function pgqueue._findings_of_transport(pgqueue.queues) is
'The findings of doctor about the relation of a queue: it was dropped or renamed by hand, its sequence is behind, an
index on expires is missing, or endpoints do not find a subscription because there is no relation.';
