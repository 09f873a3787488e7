-- A queue as a transport of NServiceBus on SQL has it: a relation into which it inserts, and from which it deletes the
-- lowest row that nobody holds. It is a plain view of the queue's own table, updated by PostgreSQL itself: reading it
-- runs no code but, once a second, advance_transport. What comes in is checked by a trigger.

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

create or replace function pgqueue._raise_not_allowed(role_name name, deed text, object text)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using
        errcode = 'insufficient_privilege',
        message = format('role %I may not %s %I', role_name, deed, object),
        hint = 'The owner can grant this privilege.';
end;
$$;
comment on function pgqueue._raise_not_allowed(name, text, text) is
'Raises 42501: the caller lacks a privilege that the security definer function itself has.';

create or replace function pgqueue._wire_string(content text)
returns text
language sql immutable parallel safe
as $$
    select case
        when content is null then 'null'
        when octet_length(s) = char_length(s) then s
        else (
            -- What UTF-16 writes as two.
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
'A string, or null, as the serializer of the transport writes it.';

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
'Headers as a transport reads them: one compact JSON object of strings and nulls, with the name of the message where they lack it.';

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
        -- JSON may say what no text in PostgreSQL can: U+0000, and halves of characters; and characters that the
        -- encoding of the database lacks. A transport reads the original.
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
'Headers of a transport as JSON, U+FFFD in place of what PostgreSQL cannot store, a question mark where the encoding is not UTF8; null for what is no JSON.';

create or replace function pgqueue._transport_id(id bigint)
returns uuid
language sql immutable parallel safe
as $$ select ('00000000000080008' || lpad(to_hex(id), 15, '0'))::uuid $$;
comment on function pgqueue._transport_id(bigint) is
'The id that a transport sees of a message that did not come from one, or has been put back since.';

create or replace function pgqueue._is_transport_id(id uuid)
returns boolean
language sql immutable parallel safe
as $$ select id between '00000000-0000-8000-8000-000000000000' and '00000000-0000-8000-8fff-ffffffffffff' $$;
comment on function pgqueue._is_transport_id(uuid) is
'Whether it is an id such as _transport_id makes: nobody else may give one to a message of a queue.';

create or replace function pgqueue._accept_from_transport(
    queue_name text, id uuid, expires timestamp, wire_headers text, body bytea, own jsonb
)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    headers jsonb;
    fault text;
begin
    if wire_headers ~ e'\\S' then
        headers := pgqueue._parsed_headers(wire_headers);
        if headers is null or jsonb_typeof(headers) <> 'object' then
            fault := 'the headers are not a JSON object';
            headers := null;
        end if;
    end if;
    if own <> '{}' then
        headers := own || coalesce(headers, '{}');
    end if;
    if body is null then
        fault := concat_ws(', and ', fault, 'the body is null');
    end if;
    if octet_length(wire_headers) > 65536 then
        perform pgqueue._raise_payload_too_large(q.name, 'headers', octet_length(wire_headers), 65536);
    end if;
    if octet_length(body) > q.max_payload_bytes then
        perform pgqueue._raise_payload_too_large(q.name, 'body', octet_length(body), q.max_payload_bytes);
    end if;
    if fault is not null then
        -- Nobody could read it: it goes where somebody looks, as it came, and stands in nobody's way. Also where the
        -- queue has no dead letters: it was never tried.
        perform pgqueue._add_dead_letter(
            row(
                nextval('pgqueue.message_id'), q.name, at, at, 0, q.max_attempts, null::int, null::uuid,
                expires at time zone 'UTC', id, null::jsonb, body, headers, null::text, fault, null::timestamptz,
                wire_headers, null::uuid, null::bigint
            )::pgqueue.messages, at, 'rejected');
        return;
    end if;
    insert into pgqueue.messages (
        queue_name, enqueued_at, visible_at, max_attempts, expires_at, message_id, body, headers,
        transport_headers, transport_id
    )
    values (
        q.name, at, at, q.max_attempts, expires at time zone 'UTC', id, body, headers, wire_headers,
        -- What was read elsewhere, and may here be the id of another message that is to come back.
        case when not pgqueue._is_transport_id(id) then id end
    );
    perform pgqueue._wake_waiting(q, at);
end;
$$;
comment on function pgqueue._accept_from_transport(text, uuid, timestamp, text, bytea, jsonb) is
'Sends what a transport inserted; to the dead letters what nobody could read. own are headers that came in columns of their own. Raises PQ001, PQ003.';

create or replace function pgqueue._insert_by_postgresql()
returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    new.id := coalesce(new.id, gen_random_uuid());
    perform pgqueue._accept_from_transport(tg_argv[0], new.id, new.expires, new.headers, new.body, '{}');
    return new;
end;
$$;
comment on function pgqueue._insert_by_postgresql() is
'Trigger of a relation that expose_transport made: an insert sends a message.';

create or replace function pgqueue._insert_by_sqlserver()
returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    new.id := coalesce(new.id, gen_random_uuid());
    perform pgqueue._accept_from_transport(
        tg_argv[0], new.id, new.expires, new.headers, new.body,
        jsonb_strip_nulls(jsonb_build_object(
            'NServiceBus.CorrelationId', new.correlationid, 'NServiceBus.ReplyToAddress', new.replytoaddress)));
    return new;
end;
$$;
comment on function pgqueue._insert_by_sqlserver() is
'The same for the flavor sqlserver: what comes in columns of its own becomes a header, where the headers lack it.';

create or replace function pgqueue._assign_transport_place()
returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    new.transport_seq := nextval(tg_argv[0]::regclass);
    new.transport_id := coalesce(new.transport_id, pgqueue._transport_id(new.id));
    new.transport_headers := coalesce(new.transport_headers, pgqueue._wire_headers(new.headers, new.message_id));
    return new;
end;
$$;
comment on function pgqueue._assign_transport_place() is
'Trigger of the table of an exposed queue: whoever sends, a transport finds the message at its end.';

create or replace function pgqueue._archive_deleted_by_transport()
returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    at constant timestamptz := pgqueue._now();
    is_filed constant boolean := coalesce(pgqueue._has_day_partition(pgqueue._utc_day(at)), false);
begin
    with done as (
        select
            t.id, t.queue_name, t.enqueued_at, null::timestamptz, at, t.attempt_count + 1, t.max_attempts, t.expires_at,
            t.message_id, t.payload, t.body, t.headers, t.claimed_by, t.last_error
        from taken t
        where coalesce(t.expires_at > at, true)
    ),
    filed as (
        insert into pgqueue.archived_messages select d.* from done d where is_filed
    )
    insert into pgqueue.unfiled_messages select d.* from done d where not is_filed;
    return null;
end;
$$;
comment on function pgqueue._archive_deleted_by_transport() is
'Trigger of the table of an exposed queue that archives: what is deleted through the relation goes to the archive, as by receive.';

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
    -- Of the statement: it fires for a delete of this very table, as the relation does it, and not for those of the
    -- verbs, which delete from the parent and archive by themselves. Without an archive there is no trigger to pay for.
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
'Has the relation of a queue, if there is one, archive what is deleted through it, if the queue archives. Raises PQ004 where a longer transaction uses the table.';

create or replace function pgqueue._transport_table(q pgqueue.queues)
returns text
language sql immutable parallel safe
as $$ select format('pgqueue.%I', format('transports_%s', q.queue_id)) $$;
comment on function pgqueue._transport_table(pgqueue.queues) is
'The table that holds the row of transports of an exposed queue, and nothing else.';

create or replace function pgqueue._transport_of(q pgqueue.queues, out relation regclass, out seq_register regclass)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    -- By the name of its table, for which the catalog is asked anew: the cache of who had to wait for an expose_transport
    -- may be older than that, and so may a snapshot.
    execute format('select t.relation, t.seq_register from %s t', pgqueue._transport_table(q)) into relation, seq_register;
    if relation is null then
        perform pgqueue._raise_stale_snapshot(format('queue %L', q.name));
    end if;
exception when undefined_table then
    -- It is not exposed.
    null;
end;
$$;
comment on function pgqueue._transport_of(pgqueue.queues) is
'The relation and the sequence of a queue that is held, as of now; nulls where it is not exposed. Raises 40001 where it was exposed behind the snapshot.';

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
    -- As _record_vacant_ids does: the sequence first, the writers second, and what a later statement does not find below is not there.
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
'What is known of a relation, with its head moved up to the lowest row that is there or may appear.';

create or replace function pgqueue._advance_transport(q pgqueue.queues)
returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    at constant timestamptz := pgqueue._now();
    nowhere constant bigint := 9223372036854775807;
    row_of constant text := pgqueue._transport_table(q);
    t pgqueue.transports;
    mine pgqueue.transports;
    is_mine boolean := false;
begin
    if q.paused_at is not null or to_regclass(row_of) is null then
        return nowhere;
    end if;
    execute format('select t.head, t.next_at from %s t', row_of) into t.head, t.next_at;
    -- A receive may stay open for as long as its handler works: it leaves this to those who look, for two seconds.
    -- What is further off than a minute was set by a clock that was wrong.
    if current_setting('transaction_read_only')::boolean
        or t.next_at < at + interval '1 min' and (
            t.next_at > at
            or t.next_at > at - interval '2 s' and current_query() ~* e'^[\\s(]*(delete|with|insert|update|merge)\\M'
        )
    then
        return t.head;
    end if;
    -- A snapshot that is older than the look at the writers proves nothing.
    if not pgqueue._has_fixed_snapshot() then
        execute format(
            'select t.seq_register, t.head, t.settled_seq, t.bound_seq, t.writers from %s t'
            ' for no key update skip locked', row_of)
        into mine.seq_register, mine.head, mine.settled_seq, mine.bound_seq, mine.writers;
        is_mine := mine.head is not null;
    end if;
    -- Ahead of time, as this very statement does not see them any more: they are not shown before they are due.
    if (is_mine or t.next_at not between at - interval '2 s' and at + interval '1 min') and exists (
        select from pgqueue.scheduled_messages s where s.queue_name = q.name and s.due_at <= at + interval '15 s'
    ) and pgqueue._try_lock_existing_queue(q) then
        perform pgqueue._promote_due(q, at + interval '15 s', 1000, '-infinity');
    end if;
    if is_mine then
        -- What came back is noted for claims, which forget it when it has left; here there may never be one.
        perform pgqueue._prune_requeued(q, array_agg(w.id), max(w.check_at))
        from (
            select r.check_at, r.id from pgqueue.requeued_messages r
            where r.queue_name = q.name
            order by r.check_at, r.id limit 1000
        ) w
        having count(*) > 0;
        t := pgqueue._record_transport_head(mine, pgqueue._partition_of(q));
        execute format(
            'update %s set head = $1, settled_seq = $2, bound_seq = $3, writers = $4, next_at = $5', row_of)
        using t.head, t.settled_seq, t.bound_seq, t.writers, at + interval '1 s';
    end if;
    return t.head;
end;
$$;
comment on function pgqueue._advance_transport(pgqueue.queues) is
'Does what advance_transport says, where it is due.';

create or replace function pgqueue.advance_transport(queue_name text)
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
comment on function pgqueue.advance_transport(text) is
'Called by the relations of expose_transport themselves, once a second at most: makes ready what comes due, and returns where their statements begin to read; at the end of all numbers while the queue is paused, or where it is not exposed. Who may read such a relation needs access to this function: grant_access(role, ''transport''). Raises PQ001.';

create or replace function pgqueue._make_dedicated(q pgqueue.queues)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    partition constant text := format('pgqueue.%I', format('messages_%s', q.queue_id));
    hall constant text := format('pgqueue.%I', format('messages_%s_moving', q.queue_id));
    move constant text := format(
        'with moved as (delete from pgqueue.messages_shared m where m.queue_name = %L returning m.*)'
        ' insert into %s select m.* from moved m', q.name, hall);
begin
    -- By way of a table, as a partition cannot be made while its rows lie in the shared one.
    execute format('create unlogged table %s (like pgqueue.messages_shared)', hall);
    execute move;
    -- Who sends by plain SQL does not hold the queue: what came meanwhile follows, behind the lock that a new partition
    -- takes anyway.
    lock table only pgqueue.messages, pgqueue.messages_shared in access exclusive mode;
    execute move;
    perform pgqueue._create_partition(q.name, q.queue_id);
    execute format('insert into %s select m.* from %s m', partition, hall);
    execute format('drop table %s', hall);
    update pgqueue.queues set dedicated = true, updated_at = pgqueue._now() where queues.name = q.name;
end;
$$;
comment on function pgqueue._make_dedicated(pgqueue.queues) is
'Moves the messages of a queue into a partition of its own.';

create or replace function pgqueue._body_string(as_view text)
returns text
language sql stable
as $$
    -- By what every role may call. A body is text if its bytes are UTF-8, without a zero.
    select case
        when current_setting('server_encoding') = 'UTF8' then format(
            'case when encode(%1$s, ''hex'') ~ %2$L then convert_from(%1$s, ''UTF8'') else encode(%1$s, ''escape'') end', as_view,
            '^(?:0[1-9a-f]|[1-7].|(?:c[2-9a-f]|d.)[89ab].|e0[ab].[89ab].|(?:e[1-9abcef])(?:[89ab].){2}|ed[89].[89ab].|f0[9ab].(?:[89ab].){2}|f[1-3](?:[89ab].){3}|f48.(?:[89ab].){2})*$')
        else format('encode(%s, ''escape'')', as_view)
    end
$$;
comment on function pgqueue._body_string(text) is
'The expression that shows a body as text: readable where it is UTF-8, with its bytes as \000 where it is not.';

create or replace function pgqueue._relation_query(q pgqueue.queues, flavor text, body_string boolean)
returns text
language sql stable
as $$
    select format(
        'select m.transport_id as id,%1$s m.expires_at at time zone ''UTC'' as expires, m.transport_headers as headers,'
        ' coalesce(m.body, convert_to(m.payload::text, ''UTF8'')) as body,%2$s%3$s m.transport_seq as seq from %4$s m'
        -- One condition is planned in less time than two, and a table of one row in less than a row found by a key.
        ' where case when m.attempt_count < m.max_attempts then m.visible_at <= clock_timestamp() end'
        ' and m.transport_seq >= ('
        ' select case when t.next_at > clock_timestamp() and t.next_at < clock_timestamp() + interval ''1 min'''
        ' then t.head else pgqueue.advance_transport(%5$L) end from %6$s t)'
        -- Of no row, so it is asked before any: a table that is empty, and read in sequence as it is small, would ask
        -- for no head, and nothing would ever come due.
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
'What the relation of a transport shows: the rows that could be claimed, and expired ones, as the transport drops those itself.';

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
    if q.dedicated then
        -- Who sends by plain SQL does not hold the queue, and would have no place. The trigger takes this lock anyway.
        execute format('lock table only %s in share row exclusive mode', pgqueue._partition_of(q));
        perform pgqueue._require_current_snapshot(format('queue %L', q.name));
    else
        perform pgqueue._make_dedicated(q);
        q.dedicated := true;
    end if;
    partition := pgqueue._partition_of(q);
    perform pgqueue._create_register(q.queue_id, 'seq');
    execute format(
        'update %s m set transport_seq = o.n, transport_id = pgqueue._transport_id(m.id),'
        ' transport_headers = coalesce(m.transport_headers, pgqueue._wire_headers(m.headers, m.message_id))'
        ' from (select c.id, row_number() over (order by c.id) as n from %1$s c) o where o.id = m.id', partition);
    execute format('select setval(%L, count(*) + 1, false) from %s', register, partition);
    -- Who looks for the first reads all entries of a page: a page has few. And where next to nothing is known, every index
    -- seems to find one row, and the planner takes the smaller one, or the one that was made last: that of the id, please.
    execute format(
        'create unique index %I on %s (transport_seq) with (fillfactor = 30)', name || '_transport_seq', partition);
    execute format('create unique index %I on %s (transport_id)', name || '_transport_id', partition);
    -- What is known of a queue is mostly that it was empty. To read it in its order must look cheap then, too, and not to
    -- read and sort it as a whole: without knowing how the rows lie. And what is known must be learnt anew soon.
    execute format('alter table %s alter transport_seq set statistics 0', partition);
    execute format('alter table %s set (autovacuum_analyze_threshold = 1000)', partition);
    execute format('create index %I on %s ((expires_at at time zone ''UTC'')) where expires_at is not null',
        name || '_expires', partition);
    execute format(
        'create trigger place_for_transport before insert on %s for each row when (new.transport_seq is null)'
        ' execute function pgqueue._assign_transport_place(%L)', partition, register);
    -- Also in a session that has triggers off, as what has no place is never received.
    execute format('alter table %s enable always trigger place_for_transport', partition);
    execute format(
        'create table %s () inherits (pgqueue.transports)'
        ' with (fillfactor = 10, autovacuum_vacuum_threshold = 100, autovacuum_vacuum_scale_factor = 0)',
        pgqueue._transport_table(q));
    execute format('alter table %s replica identity full', pgqueue._transport_table(q));
    perform pgqueue._revoke_default_privileges(pgqueue._transport_table(q)::regclass);
    execute format('create view %s as %s', relation, pgqueue._relation_query(q, flavor, body_string));
    perform pgqueue._revoke_default_privileges(relation::regclass);
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
'Makes the relation of a queue that is held alone, and gives it to a role.';

create or replace function pgqueue._transport_address(relation regclass)
returns text
language sql stable
as $$
    select format('"%s"."%s"', replace(n.nspname, '"', '""'), replace(c.relname, '"', '""'))
    from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where c.oid = relation
$$;
comment on function pgqueue._transport_address(regclass) is
'A relation as a transport addresses it.';

create or replace function pgqueue._check_exposure(schema_name text, table_name text, flavor text)
returns name
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    -- In a definer's function the caller is the role that is set, or who logged in.
    for_role constant name := coalesce(nullif(current_setting('role'), 'none'), session_user);
begin
    if schema_name is null or schema_name ~ '^(pg_|pgqueue$|information_schema$)'
        or not exists (select from pg_namespace n where n.nspname = schema_name)
    then
        perform pgqueue._raise_invalid('schema_name', schema_name, 'the name of a schema that exists and is not the system''s');
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
    return for_role;
end;
$$;
comment on function pgqueue._check_exposure(text, text, text) is
'Raises 22023 or 42501 unless the caller may make such a relation there; returns who he is.';

create or replace function pgqueue.expose_transport(
    queue_name text,
    schema_name text default 'public',
    table_name text default null,
    body_string boolean default false,
    flavor text default 'postgresql'
)
returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '500 ms'
as $$
declare
    q pgqueue.queues;
    for_role name;
    exposed regclass;
    address text;
begin
    perform pg_advisory_xact_lock(pgqueue._lock_key(queue_name));
    q := pgqueue._get_locked_queue(queue_name);
    perform pgqueue._require_current_snapshot(format('queue %L', queue_name));
    for_role := pgqueue._check_exposure(schema_name collate "C", coalesce(table_name, queue_name), flavor);
    if body_string is null then
        perform pgqueue._raise_invalid('body_string', null, 'true or false');
    end if;
    select t.relation into exposed from pgqueue.transports t where t.queue_name = q.name;
    if found then
        perform pgqueue._raise_exposed(q.name, exposed);
    end if;
    address := pgqueue._expose(q, schema_name, coalesce(table_name, queue_name), body_string, flavor, for_role);
    if not q.dedicated then
        perform pgqueue._tell_rooms('queue_altered', w, q) from pgqueue.queues w where w.name = q.name;
    end if;
    return address;
exception
    when lock_not_available then
        perform pgqueue._raise_queue_busy(queue_name, 'expose_transport');
        return null;
    when check_violation then
        -- Plain SQL has sent to it behind the snapshot: no partition is made while that lies in the shared one.
        perform pgqueue._raise_stale_snapshot(format('queue %L', queue_name));
        return null;
end;
$$;
comment on function pgqueue.expose_transport(text, text, text, boolean, text) is
'Makes a relation over the queue, in schema_name under table_name (by default the queue''s name), on which an NServiceBus transport works as on its own table, and returns its address. Its columns are id, expires (UTC), headers, body and seq; with body_string also bodystring, the body as text where it is UTF-8; with flavor sqlserver also correlationid, replytoaddress, recoverable and rowversion. An insert sends a message; what comes with headers that are no JSON object, or without a body, goes to the dead letters as it is. A delete takes messages as receive does, to the archive where the queue has archive_for, though it does not tell a purge from a receive; who shows up are those that could be claimed, and expired ones, which the transport drops itself and nobody archives. The queue becomes dedicated. The caller needs the right to create in the schema, and is given all rights on the relation, to grant them on; who reads it needs grant_access(role, ''transport''), too. Raises 22023, PQ001, PQ004, 42501, 42P07 where the name is taken, 42710 where the queue is exposed.';

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
    -- Somebody may have dropped it, or an index.
    if exists (select from pg_class c where c.oid = relation) then
        execute format('drop view %s', relation);
    end if;
    execute format('drop table %s', pgqueue._transport_table(q));
    execute format('drop trigger place_for_transport on %s', pgqueue._partition_of(q));
    perform pgqueue._sync_archive_trigger(q);
    for index in
        select x.indexrelid from pg_index x join pg_class c on c.oid = x.indexrelid
        where x.indrelid = pgqueue._partition_of(q) and c.relname ~ '^messages_[0-9]+_(transport_id|transport_seq|expires)$'
    loop
        execute format('drop index %s', index);
    end loop;
    execute format('drop sequence %s', seq_register);
    update pgqueue.subscriptions s set queue_address = q.name where s.queue_name = q.name;
    return true;
end;
$$;
comment on function pgqueue._unexpose(pgqueue.queues) is
'Takes the relation of a queue away; false if there is none.';

create or replace function pgqueue.unexpose_transport(queue_name text)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '500 ms'
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
comment on function pgqueue.unexpose_transport(text) is
'Drops the relation that expose_transport made, and returns true; false if there is none. The queue keeps its messages, and stays dedicated. Raises PQ001, PQ004, and 2BP01 where something else uses the relation.';

create or replace function pgqueue._resolve_subscription()
returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    found_name text;
begin
    perform pgqueue._check_topic('topic', new.topic, true);
    select t.queue_name into found_name
    from pgqueue.transports t
    where pgqueue._transport_address(t.relation) = new.queue_address;
    new.queue_name := (pgqueue._get_locked_queue(coalesce(found_name, new.queue_address))).name;
    return new;
end;
$$;
comment on function pgqueue._resolve_subscription() is
'Trigger of subscriptions: finds the queue that an address leads to, for who has only the address. Raises 22023, PQ001.';

create or replace function pgqueue._address_subscription()
returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
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
'Trigger of subscriptions: gives a subscription that subscribe made the address by which a transport knows the queue.';

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
'By which the relations of expose_subscriptions are known.';

create or replace function pgqueue._create_subscriptions_relation(schema_name text, table_name text, for_role name)
returns text
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    relation constant text := format('%I.%I', schema_name, table_name);
begin
    execute format(
        'create view %s as select s.queue_address as queueaddress, s.endpoint, s.topic from pgqueue.subscriptions s', relation);
    perform pgqueue._revoke_default_privileges(relation::regclass);
    execute format('comment on view %s is %L', relation, pgqueue._subscriptions_comment());
    execute format('grant select, insert, update, delete on %s to %I with grant option', relation, for_role);
    return pgqueue._transport_address(relation::regclass);
end;
$$;
comment on function pgqueue._create_subscriptions_relation(text, text, name) is
'Makes the relation of expose_subscriptions, and gives it to a role.';

create or replace function pgqueue.expose_subscriptions(
    schema_name text default 'public', table_name text default 'SubscriptionRouting'
)
returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    return pgqueue._create_subscriptions_relation(
        schema_name, table_name, pgqueue._check_exposure(schema_name collate "C", table_name, 'postgresql'));
end;
$$;
comment on function pgqueue.expose_subscriptions(text, text) is
'Makes a relation over all subscriptions, in schema_name under table_name, on which an NServiceBus transport works as on its own table, and returns its address. Its columns are queueaddress, endpoint and topic; an address is what expose_transport returned, or a queue''s name, and what leads to no queue is refused with PQ001. An endpoint has a topic once, whichever relation it says so in: two systems on one database need endpoints of different names. Who may insert there has any queue sent what any other is sent. The caller needs the right to create in the schema, and is given all rights on the relation, to grant them on. Raises 22023, 42501, and 42P07 where the name is taken.';

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
'Drops a relation of expose_subscriptions; false if it is none.';

create or replace function pgqueue.unexpose_subscriptions(
    schema_name text default 'public', table_name text default 'SubscriptionRouting'
)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if schema_name is null then
        perform pgqueue._raise_invalid('schema_name', null, 'the name of a schema');
    end if;
    if table_name is null then
        perform pgqueue._raise_invalid('table_name', null, 'the name of a relation that expose_subscriptions made');
    end if;
    return pgqueue._drop_subscriptions_relation(to_regclass(format('%I.%I', schema_name, table_name)));
end;
$$;
comment on function pgqueue.unexpose_subscriptions(text, text) is
'Drops a relation that expose_subscriptions made, and returns true; false if there is none. The subscriptions stay. Raises 22023, and 2BP01 where something else uses the relation.';

create or replace function pgqueue._on_queue_altered_transport(before pgqueue.queues, after pgqueue.queues)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if not after.dedicated then
        return;
    end if;
    if after.archive_for is null and before.archive_for is not null then
        -- An older snapshot may not show that the queue is exposed.
        perform pgqueue._require_current_snapshot(format('queue %L', after.name));
    end if;
    perform pgqueue._sync_archive_trigger(after);
end;
$$;
comment on function pgqueue._on_queue_altered_transport(pgqueue.queues, pgqueue.queues) is
'Has the relation of the queue archive what is deleted through it, if the queue archives.';

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
    partition constant regclass := pgqueue._partition_of(q);
    expires boolean;
begin
    if to_regclass(pgqueue._transport_table(q)) is not null then
        execute format(
            'select greatest(t.head - 1, t.settled_seq, (select max(m.transport_seq) from %s m)), t.seq_register from %s t',
            pgqueue._partition_of(q), pgqueue._transport_table(q))
        into top_id, register;
        execute format('select t.last_value - (not t.is_called)::int from %s t', register) into last_id;
        if top_id > last_id then
            return next row('error', q.name, 'ids_above_sequence',
                format('its relation has known the seq %s, which the sequence %s has not reached: what is sent now is refused, or not found by its transport', top_id, register),
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
    end if;
end;
$$;
comment on function pgqueue._findings_of_transport(pgqueue.queues) is
'What doctor finds on the relation of a queue: a sequence that is behind.';
