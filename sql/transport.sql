-- Exposes a queue to an SQL transport of NServiceBus, as a relation into which the transport inserts messages and from
-- which it deletes the lowest row that is not locked. The relation is an automatically updatable view of the queue's
-- own partition: reading it runs no code except advance_transport, once a second. A trigger checks inserted messages.

create or replace function pgqueue._sync_archive_trigger(q pgqueue.queues) returns void
language plpgsql volatile set lock_timeout = '500 ms' as $$
declare
    partition constant regclass := pgqueue._partition_of(q);
    is_wanted constant boolean := q.archive_for is not null and to_regclass(pgqueue._transport_table(q)) is not null;
begin
    -- A statement trigger fires for deletes that name this partition, as the relation does. It does not fire for the
    -- SQL functions, which delete from the parent table and archive by themselves. Queues that do not archive have no
    -- trigger, and so do not pay for it.
    if is_wanted = exists (select from pg_trigger g where g.tgrelid = partition and g.tgname = 'archive_taken') then
        return;
    end if;
    execute format(case
        when is_wanted then
            'create trigger archive_taken after delete on %s referencing old table as taken for each statement'
            ' execute function pgqueue._archive_deleted_by_transport()'
        else 'drop trigger archive_taken on %s'
    end, partition);
exception when lock_not_available then
    perform pgqueue._raise('queue_busy', q.name, 'alter_queue');
end;
$$;

-- Stable, as _to_micros.
create or replace function pgqueue._transport_table(q pgqueue.queues) returns text
language sql stable parallel safe as $$ select format('pgqueue.%I', format('transports_%s', q.queue_id)) $$;

create or replace function pgqueue._transport_of(q pgqueue.queues) returns regclass
language plpgsql volatile as $$
declare
    relation regclass;
begin
    -- Look the table up by name, in a statement that locks it: after waiting for expose_transport, the session's
    -- catalog cache and its snapshot can be stale.
    execute format('select t.relation from %s t', pgqueue._transport_table(q)) into relation;
    if relation is null then
        perform pgqueue._raise('stale_snapshot', format('queue %L', q.name));
    end if;
    return relation;
exception when undefined_table then
    return null;
end;
$$;

create or replace function pgqueue.advance_transport(queue_name pgqueue.queue_of_transport) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
set enable_bitmapscan = off set enable_sort = off set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_unlocked_queue(queue_name);
    at constant timestamptz := pgqueue._now();
    past_the_end constant bigint := 9223372036854775807;
    table_name constant text := pgqueue._transport_table(q);
    seen pgqueue.transports;
    t pgqueue.transports;
    lowest bigint;
    is_due boolean;
begin
    if q.paused_at is not null or pgqueue._transport_of(q) is null then
        return past_the_end;
    end if;
    execute format('select t.head, t.next_at from %s t', table_name) into seen.head, seen.next_at;
    -- A transaction that receives can stay open while its handler works, and would hold the row for that long. For two
    -- seconds it leaves this work to statements that only read. A next_at more than a minute ahead was set while the
    -- clock was wrong, and is ignored.
    if current_setting('transaction_read_only')::boolean
        or seen.next_at < at + interval '1 min' and (
            seen.next_at > at
            or seen.next_at > at - interval '2 s' and current_query() ~* e'^[\\s(]*(delete|with|insert|update|merge)\\M'
        )
    then
        return seen.head;
    end if;
    -- A fixed snapshot does not show all rows up to settled_seq.
    if not pgqueue._has_fixed_snapshot() then
        execute format(
            'select t.seq_register, t.head, t.settled_seq, t.bound_seq, t.bound_id from %s t'
            ' for no key update skip locked', table_name)
        into t.seq_register, t.head, t.settled_seq, t.bound_seq, t.bound_id;
    end if;
    if not pgqueue._try_lock_existing_queue(q) then
        return seen.head;
    end if;
    -- Promote messages 15 s ahead, because the current statement does not see what it promotes. The relation shows no
    -- message before it is due.
    is_due := exists (
        select from pgqueue.scheduled_messages s
        where s.queue_name = q.name and s.due_at between (pgqueue._sweep_state_of(q.name, at)).first_due_at and at + interval '15 s');
    if is_due and (t.head is not null or seen.next_at not between at - interval '2 s' and at + interval '1 min') then
        perform pgqueue._move_due_messages(q, at + interval '15 s', 1000, (pgqueue._sweep_state_of(q.name, at)).first_due_at);
    end if;
    if t.head is null then
        return seen.head;
    end if;
    -- The work of sweeps, which a queue without claims does not have. It reads no ids, as only sweeps skip the vacant
    -- ones.
    perform pgqueue._adopt_messages(q);
    perform pgqueue._record_vacant_ids(q, at, 0);
    -- An insert takes an id first and a transport_seq second. A message that moves keeps its id. So bound_seq is read
    -- before bound_id is taken, and bound_id is a new id: _record_vacant_ids has listed the writers after both when it
    -- settles this id. Each row up to bound_seq is then visible, and no other one can appear there.
    if (select s.settled_id >= t.bound_id from pgqueue.sweep_state s where s.queue_name = q.name) then
        t.settled_seq := t.bound_seq;
        t.bound_seq := coalesce(pg_sequence_last_value(t.seq_register), 0);
        t.bound_id := nextval('pgqueue.message_id');
    end if;
    execute format(
        'select m.transport_seq from %s m where m.transport_seq >= $1 order by m.transport_seq limit 1', pgqueue._partition_of(q))
    into lowest using t.head;
    t.head := greatest(t.head, least(t.settled_seq + 1, lowest));
    execute format('update %s set head = $1, settled_seq = $2, bound_seq = $3, bound_id = $4, next_at = $5', table_name)
    using t.head, t.settled_seq, t.bound_seq, t.bound_id, case when is_due then at else at + interval '1 s' end;
    perform pgqueue._do_periodic_work(q, at);
    return t.head;
end;
$$;
comment on function pgqueue.advance_transport is
'Makes scheduled messages ready when they come due, takes the dead letters of queues whose dead_letter_to is this one,
does the housekeeping of claims, and returns the lowest seq at which statements on the relation of expose_transport have
to read; 9223372036854775807 while the queue is paused, or if it is not exposed. The relation calls this itself, at most
once a second. A role that reads the relation needs access to this function: grant_access(role, ''transport''). Raises
PQ001.';

create or replace function pgqueue._expose(
    q pgqueue.queues, schema_name text, table_name text, body_string boolean, flavor text, for_role name
) returns text
language plpgsql volatile as $$
declare
    relation constant text := format('%I.%I', schema_name, table_name);
    register constant text := format('pgqueue.%I', format('queue_%s_seq', q.queue_id));
    name constant text := format('messages_%s', q.queue_id);
    is_sqlserver constant boolean := flavor = 'sqlserver';
    partition regclass;
begin
    perform pgqueue._require(
        not q.priorities and coalesce(q.group_limit, q.max_in_flight, q.rate_limit) is null, 'queue_name', q.name,
        'a queue without group_limit, priorities, max_in_flight and rate_limit: endpoints receive without regard to them');
    if q.dedicated then
        -- Plain SQL inserts do not lock the queue. Without this lock their rows could miss the trigger and have no
        -- transport_seq. Creating the trigger takes the same lock anyway.
        execute format('lock table only %s in share row exclusive mode', pgqueue._partition_of(q));
        perform pgqueue._require_current_snapshot(format('queue %L', q.name));
    else
        perform pgqueue._create_partition(q);
        update pgqueue.queues set dedicated = true, updated_at = pgqueue._now() where queues.name = q.name returning * into q;
        q := pgqueue._change_kind(q);
    end if;
    partition := pgqueue._partition_of(q);
    perform pgqueue._create_register(q.queue_id, 'seq');
    execute format(
        'update %s m set transport_seq = o.n, transport_id = pgqueue._transport_id(m.id),'
        ' transport_headers = coalesce(m.transport_headers, pgqueue._wire_headers(m.headers, m.message_id))'
        ' from (select c.id, row_number() over (order by c.id) as n from %1$s c) o where o.id = m.id', partition);
    execute format('select setval(%L, greatest(count(*), 1), count(*) > 0) from %s', register, partition);
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
    -- The view shows messages that could be claimed, and expired ones, which the transport deletes itself.
    execute format(
        'create view %s as '
        'select m.transport_id as id,%s m.expires_at at time zone ''UTC'' as expires, m.transport_headers as headers,'
        ' coalesce(m.body, convert_to(m.payload::text, ''UTF8'')) as body,%s%s m.transport_seq as seq from %s m'
        -- Planning one condition is faster than planning two, and reading a table of one row is planned faster than a
        -- lookup by key.
        ' where case when m.attempt_count < m.max_attempts then m.visible_at <= clock_timestamp() end'
        ' and m.transport_seq >= ('
        ' select case when t.next_at > clock_timestamp() and t.next_at < clock_timestamp() + interval ''1 min'''
        ' then t.head else pgqueue.advance_transport(%L) end from %s t)'
        -- This condition has no column of m, so it is evaluated before the first row. Otherwise a sequential scan of an
        -- empty table would never call advance_transport, and no message would ever come due.
        ' and (select t.next_at > clock_timestamp() and t.next_at < clock_timestamp() + interval ''1 min'''
        ' or pgqueue.advance_transport(%L) is not null from %s t)',
        relation,
        case when is_sqlserver then
            ' (m.headers ->> ''NServiceBus.CorrelationId'')::varchar(255) as correlationid,'
            ' (m.headers ->> ''NServiceBus.ReplyToAddress'')::varchar(255) as replytoaddress, true as recoverable,'
        end,
        case when body_string then ' coalesce(encode(m.body, ''escape''), m.payload::text) as bodystring,' end,
        case when is_sqlserver then ' m.transport_seq as rowversion,' end,
        partition, q.name, pgqueue._transport_table(q), q.name, pgqueue._transport_table(q));
    perform pgqueue._revoke_default_privileges(relation::regclass);
    execute format('alter view %s alter column id set default gen_random_uuid()', relation);
    execute format(
        'create trigger insert_by_transport instead of insert on %s for each row'
        ' execute function pgqueue._insert_by_transport(%L, %L)', relation, q.name, flavor);
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

create or replace function pgqueue._transport_address(relation regclass) returns text
language sql stable as $$
    select format('"%s"."%s"', replace(n.nspname, '"', '""'), replace(c.relname, '"', '""'))
    from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where c.oid = relation
$$;

create or replace function pgqueue._exposed_comment(kind text) returns text
language sql immutable parallel safe as $$
    select case kind
        when 'contract' then 'A table of pgqueue, for plain SQL.' else 'The subscriptions of pgqueue, for a transport.' end
$$;

create or replace function pgqueue._check_exposure(
    schema_name text, table_name text default null, for_role name default null
) returns void
language plpgsql stable as $$
begin
    perform pgqueue._require(
        octet_length(schema_name) between 1 and 63 and schema_name !~ '^(pg_|pgqueue$|information_schema$)'
        and (for_role is null or exists (select from pg_namespace n where n.nspname = schema_name)), 'schema_name', schema_name,
        format('the name of %s schema, other than pgqueue and the system schemas', case when for_role is null then 'a' else 'an existing' end));
    if for_role is null then
        return;
    end if;
    perform pgqueue._require(
        octet_length(table_name) between 1 and 63, 'table_name', table_name, 'a name of 1 to 63 bytes');
    if not has_schema_privilege(for_role, schema_name, 'CREATE') then
        perform pgqueue._raise('not_allowed', for_role, 'create relations in schema', schema_name);
    end if;
end;
$$;

create or replace function pgqueue.expose_transport(
    queue_name pgqueue.queue_of_admin,
    schema_name text default 'public',
    table_name text default null,
    body_string boolean default false,
    flavor text default 'postgresql',
    caller pgqueue.caller default current_user
) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500 ms'
set jit = off as $$
declare
    q pgqueue.queues;
    exposed regclass;
    address text;
begin
    perform pg_advisory_xact_lock(pgqueue._lock_key(queue_name));
    q := pgqueue._get_locked_queue(queue_name);
    perform pgqueue._require_current_snapshot(format('queue %L', queue_name));
    perform pgqueue._check_exposure(schema_name collate "C", coalesce(table_name, queue_name), caller);
    perform pgqueue._require(body_string is not null, 'body_string', null, 'true or false');
    perform pgqueue._require(flavor in ('postgresql', 'sqlserver'), 'flavor', flavor, 'postgresql or sqlserver');
    select t.relation into exposed from pgqueue.transports t where t.queue_name = q.name;
    if found then
        perform pgqueue._raise('exposed', q.name, exposed::text);
    end if;
    address := pgqueue._expose(q, schema_name, coalesce(table_name, queue_name), body_string, flavor, caller);
    if not q.dedicated then
        perform pgqueue._call_queue_handlers(q, w) from pgqueue.queues w where w.name = q.name;
    end if;
    return address;
exception when lock_not_available then
    perform pgqueue._raise('queue_busy', queue_name, 'expose_transport');
    return null;
end;
$$;
comment on function pgqueue.expose_transport is
'Creates a relation over the queue, table_name (default: the queue''s name) in schema_name (default public), and returns
its address. An NServiceBus transport uses it like its own table. The columns are id, expires (UTC), headers, body and
seq; with body_string also bodystring, the body as text; with flavor sqlserver (default postgresql) also correlationid,
replytoaddress, recoverable and rowversion, which is seq. An insert sends a message. It raises 23502 if id or headers
are null, and PQ003 if the body exceeds max_payload_bytes, or the headers exceed both max_payload_bytes and 64 KB. A
null body becomes an empty one. Headers that are not a JSON object, or have characters that jsonb cannot represent, are
kept as they came; pgqueue returns them as a JSON string, and its consumers reject the message. A delete takes messages
as receive does, and archives them if the queue has archive_for; a purge cannot be told apart from a receive. The
relation shows messages that could be claimed, and expired ones, which the transport deletes itself and which are not
archived. The queue becomes dedicated, as by create_queue, and its messages are moved and numbered under the same lock:
expose it while it has few. The caller needs the CREATE privilege on the schema, and gets all privileges on the
relation, with grant option. A role that reads the relation also needs grant_access(role, ''transport''). Raises 22023,
PQ001, PQ004, 42501, 42P07 if the name is taken, and 42710 if the queue is already exposed.';

create or replace function pgqueue._unexpose(q pgqueue.queues) returns boolean
language plpgsql volatile as $$
declare
    relation constant regclass := pgqueue._transport_of(q);
begin
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
    execute format(
        'drop index if exists pgqueue.messages_%1$s_transport_seq, pgqueue.messages_%1$s_transport_id,'
        ' pgqueue.messages_%1$s_expires', q.queue_id);
    execute format('drop sequence pgqueue.queue_%s_seq cascade', q.queue_id);
    update pgqueue.subscriptions s set queue_address = q.name where s.queue_name = q.name;
    return true;
end;
$$;

create or replace function pgqueue.unexpose_transport(queue_name pgqueue.queue_of_admin) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500 ms'
set jit = off as $$
declare
    q pgqueue.queues;
begin
    perform pg_advisory_xact_lock(pgqueue._lock_key(queue_name));
    q := pgqueue._get_locked_queue(queue_name);
    perform pgqueue._require_current_snapshot(format('queue %L', queue_name));
    return pgqueue._unexpose(q);
exception when lock_not_available then
    perform pgqueue._raise('queue_busy', queue_name, 'unexpose_transport');
    return null;
end;
$$;
comment on function pgqueue.unexpose_transport is
'Drops the relation that expose_transport created and returns true; false if there is none. The queue keeps its messages
and stays dedicated. Raises PQ001, PQ004, and 2BP01 if another object depends on the relation.';

create or replace function pgqueue._on_queue_changed_transport(before pgqueue.queues, after pgqueue.queues) returns void
language plpgsql volatile as $$
declare
    seq_register constant text := format('pgqueue.queue_%s_seq', after.queue_id);
begin
    if after.name is null then
        perform pgqueue._unexpose(before);
    elsif before.name is not null then
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
    elsif to_regclass(pgqueue._transport_table(after)) is null then
        return;
    elsif not after.dedicated or after.priorities or coalesce(after.group_limit, after.max_in_flight) is not null then
        -- The relation was dropped with the table that such a queue cannot have.
        execute format('drop table %s cascade', pgqueue._transport_table(after));
        execute format('drop sequence %s cascade', seq_register);
    else
        -- A restore without rows has left the relation. Its trigger has the name of the queue.
        execute format(
            'insert into %s (queue_name, relation, seq_register) select $1, coalesce(max(g.tgrelid), 0), $2 from pg_trigger g'
            ' where g.tgfoid = ''pgqueue._insert_by_transport''::regproc and split_part(encode(g.tgargs, ''escape''), $3, 1) = $1'
            ' on conflict do nothing', pgqueue._transport_table(after))
        using after.name, seq_register::regclass, e'\\000';
        perform pgqueue._sync_archive_trigger(after);
        if after.rate_limit is not null then
            perform pgqueue._unexpose(after);
        end if;
    end if;
end;
$$;

create or replace function pgqueue._findings_of_transport(q pgqueue.queues) returns setof pgqueue.finding
language plpgsql volatile as $$
declare
    partition constant regclass := pgqueue._partition_of(q);
    table_name constant text := pgqueue._transport_table(q);
    top_seq bigint;
    register regclass;
    address text;
    expires boolean;
begin
    return query
    select
        'info', q.name, 'subscriber_without_relation',
        'the queue is subscribed, but has no relation: what endpoints of a transport publish does not reach it',
        format('select pgqueue.expose_transport(%L);', q.name)
    where exists (select from pgqueue.subscriptions s where s.queue_name = q.name)
        and not exists (select from pgqueue.transports t where t.queue_name = q.name)
        and exists (
            select from pg_description d
            where d.classoid = 'pg_class'::regclass and d.description = pgqueue._exposed_comment('subscriptions'))
    union all
    select
        'warning', q.name, 'renamed_relation',
        format('the relation of the queue was renamed to %s: what endpoints of a transport publish does not reach it', w.address),
        format('update pgqueue.subscriptions set queue_address = %L where queue_name = %L;', w.address, q.name)
    from (select pgqueue._transport_address(t.relation) as address from pgqueue.transports t where t.queue_name = q.name) w
    where exists (select from pgqueue.subscriptions s where s.queue_name = q.name and s.queue_address <> w.address);
    if to_regclass(table_name) is null then
        return;
    end if;
    execute format(
        'select greatest(t.head - 1, t.settled_seq, (select max(m.transport_seq) from %s m)), t.seq_register,'
        ' pgqueue._transport_address(t.relation),'
        ' (select bool_or(m.expires_at is not null) from (select c.expires_at from %1$s c limit 1000) m) from %2$s t',
        partition, table_name)
    into top_seq, register, address, expires;
    if address is null then
        return next row('error', q.name, 'missing_relation', 'the relation of the queue was dropped by hand: its transport fails',
            format('select pgqueue.unexpose_transport(%1$L); select pgqueue.expose_transport(%1$L);', q.name))::pgqueue.finding;
    end if;
    if top_seq > coalesce(pg_sequence_last_value(register), 0) then
        return next row('error', q.name, 'ids_above_sequence',
            format('its relation has already used seq %s, which the sequence %s has not reached: new messages are refused, or its transport does not find them', top_seq, register),
            format(
                'select setval(%1$L, greatest(%2$s, pg_sequence_last_value(%1$L)));'
                ' update %3$s set transport_seq = nextval(%1$L) where transport_seq < (select t.head from %4$s t);',
                register, top_seq, partition, table_name))::pgqueue.finding;
    end if;
    if expires and not pgqueue._has_index(partition, '(expires_at AT TIME ZONE ''UTC''::text)') then
        return next row('warning', q.name, 'missing_index',
            format('messages expire, and %s has no index on the column expires of its relation: the transport reads the whole queue', partition),
            format('create index concurrently on %s ((expires_at AT TIME ZONE ''UTC''::text)) where expires_at is not null;', partition)
        )::pgqueue.finding;
    end if;
end;
$$;
