-- Finds and locks the queue of a call. The order of locks: the queue, its row in queues, the row of a stream, then
-- message rows by id.

-- The key of the advisory lock of a queue. Its users hold the lock shared, create_queue and drop_queue exclusively.
create or replace function pgqueue._lock_key(queue_name text) returns bigint
language sql immutable strict parallel safe as $$ select hashtextextended('pgqueue:' || queue_name collate "C", 0) $$;

-- Locks the queue against drop_queue until the transaction ends; false if the name is null. Every function takes this
-- lock before it locks message rows, and locks message rows by id.
create or replace function pgqueue._lock_queue(queue_name text) returns boolean
language sql volatile as $$ select pg_advisory_xact_lock_shared(pgqueue._lock_key(queue_name)) is not null $$;

-- Whether all statements of the transaction use the snapshot of its first one, and so do not see what was committed
-- later.
create or replace function pgqueue._has_fixed_snapshot() returns boolean
language sql stable parallel safe
as $$ select current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') $$;

-- For callers that hold the lock which keeps others from changing the object. Raises 40001 if the transaction keeps its
-- snapshot and any transaction has committed since.
create or replace function pgqueue._require_current_snapshot(object text) returns void
language plpgsql volatile as $$
declare
    snapshot constant pg_snapshot := pg_current_snapshot();
begin
    if not pgqueue._has_fixed_snapshot() then
        return;
    end if;
    -- These calls could refuse repeatable read altogether. Then a database whose default_transaction_isolation is
    -- repeatable read could not alter a queue, or claim from one with groups or limits, whereas this check passes
    -- unless something was committed since. It takes 7 us, or 1.2 ms if the next thousand transactions all run or
    -- rolled back. In read committed it takes 1 us.
    if not exists (select from pg_snapshot_xip(snapshot) as x where pg_xact_status(x) = 'committed') then
        begin
            for n in 0..1000 loop
                exit when pg_xact_status((pg_snapshot_xmax(snapshot)::text::bigint + n)::text::xid8) = 'committed';
            end loop;
        exception when invalid_parameter_value then
            -- The id has not been assigned yet: nothing was committed after the snapshot.
            return;
        end;
    end if;
    perform pgqueue._raise('stale_snapshot', object);
end;
$$;

-- Raises 40001 if the transaction keeps its snapshot and one of the tables was truncated after it. In read committed
-- every statement locks its tables first and takes its snapshot second.
create or replace function pgqueue._require_untruncated(tables regclass[]) returns void
language plpgsql volatile as $$
begin
    if not pgqueue._has_fixed_snapshot() then
        return;
    end if;
    -- After these locks no table is rewritten until the transaction ends. Partitions and children are locked, too.
    execute format('lock table %s in access share mode', array_to_string(tables, ', '));
    -- pg_class shows the file as of the snapshot, pg_relation_filenode the current one.
    perform pgqueue._raise('stale_snapshot', format('table %s', c.oid::regclass))
    from pg_class c
    where c.oid in (
            select t from unnest(tables) as t
            union all
            select i.inhrelid from pg_inherits i where i.inhparent = any (tables)
        )
        and pg_relation_filenode(c.oid) <> c.relfilenode;
end;
$$;

create or replace function pgqueue._require_untruncated_messages() returns void
language sql volatile as $$
    select pgqueue._require_untruncated(array[
        'pgqueue.messages', 'pgqueue.scheduled_messages', 'pgqueue.dead_messages', 'pgqueue.requeued_messages',
        'pgqueue.sweep_state'
    ]::regclass[])
$$;

-- Raises PQ001, or 40001 if the snapshot is older than the queue or than a compaction.
create or replace function pgqueue._get_locked_queue(queue_name text) returns pgqueue.queues
language plpgsql volatile as $$
declare
    q pgqueue.queues;
begin
    -- The lock is taken first and the row read second, each with its own snapshot. So a session that waited for
    -- drop_queue sees that the queue is gone, and no session writes to a queue while it is dropped.
    if not pgqueue._lock_queue(queue_name) then
        perform pgqueue._raise('queue_not_found', queue_name);
    end if;
    select * into q from pgqueue.queues where queues.name = queue_name collate "C";
    -- A repeatable read snapshot can be older than a drop_queue. The catalog shows the current state. The function that
    -- reads it locks the register, because the catalog cache of this session can be stale.
    if not found or pg_relation_filenode(q.fresh_from_id) is null or pgqueue._has_fixed_snapshot() then
        if q.name is null or pg_relation_size(q.fresh_from_id) is null then
            -- A queue created after the snapshot exists, but the transaction cannot see it. The insert detects it
            -- through the unique index. If there is no such queue, the error raised below rolls the insert back.
            if pgqueue._has_fixed_snapshot() and pgqueue._is_name(queue_name)
                and not current_setting('transaction_read_only')::boolean
            then
                begin
                    insert into pgqueue.sweep_state (queue_name) values (_get_locked_queue.queue_name) on conflict do nothing;
                exception when serialization_failure then
                    perform pgqueue._raise('stale_snapshot', format('queue %L', queue_name));
                end;
            end if;
            perform pgqueue._raise('queue_not_found', queue_name);
        end if;
        perform pgqueue._require_untruncated_messages();
    end if;
    return q;
end;
$$;

create or replace function pgqueue._get_unlocked_queue(queue_name text) returns pgqueue.queues
language plpgsql stable as $$
declare
    q pgqueue.queues;
begin
    select * into q from pgqueue.queues where queues.name = queue_name collate "C";
    if not found then
        perform pgqueue._raise('queue_not_found', queue_name);
    end if;
    return q;
end;
$$;

create or replace function pgqueue._try_lock_existing_queue(q pgqueue.queues) returns boolean
language plpgsql volatile as $$
begin
    -- The lock first and the row second, as in _get_locked_queue. A new kind comes with new registers.
    if not pg_try_advisory_xact_lock_shared(pgqueue._lock_key(q.name)) then
        return false;
    end if;
    return exists (select from pgqueue.queues c where c.name = q.name and c.fresh_from_id = q.fresh_from_id)
        and pg_relation_size(q.fresh_from_id) is not null;
end;
$$;

-- The processes that dump this database; null for a prepared transaction that has read pg_extension.
create or replace function pgqueue._dumping_processes() returns int[]
language sql volatile as $$
    -- pg_dump reads pg_extension before it locks tables, so it holds a lock there until it ends. Few other clients do.
    select array(
        select l.pid from pg_catalog.pg_locks l
        where l.locktype = 'relation' and l.relation = 'pg_catalog.pg_extension'::regclass
            and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database())
            and l.pid is distinct from pg_catalog.pg_backend_pid()
        union
        select a.pid from pg_catalog.pg_stat_activity a
        where a.datname = pg_catalog.current_database() and a.application_name ~ '^pg_dump'
            and a.pid <> pg_catalog.pg_backend_pid()
    )
$$;

create or replace function pgqueue._is_dump_running() returns boolean
language sql volatile as $$ select pgqueue._dumping_processes() <> '{}' $$;
