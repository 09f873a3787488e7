-- Every verb finds its queue here, and locks it. The order of locks: the queue, its row in queues, the row of a stream,
-- then message rows by id.

create or replace function pgqueue._lock_key(queue_name text)
returns bigint
language sql immutable strict parallel safe
as $$ select hashtextextended('pgqueue:' || queue_name collate "C", 0) $$;
comment on function pgqueue._lock_key(text) is
'The advisory lock that users of a queue share and that create_queue and drop_queue take alone.';

create or replace function pgqueue._lock_queue(queue_name text)
returns boolean
language sql volatile
as $$ select pg_advisory_xact_lock_shared(pgqueue._lock_key(queue_name)) is not null $$;
comment on function pgqueue._lock_queue(text) is
'Keeps the queue from being dropped until the transaction ends; false for a null name. Locks in this order everywhere: this one, then message rows by id.';

create or replace function pgqueue._has_fixed_snapshot()
returns boolean
language sql stable parallel safe
as $$ select current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') $$;
comment on function pgqueue._has_fixed_snapshot() is
'Whether all statements of the transaction see what its first one saw, and nothing that others have committed since.';

create or replace function pgqueue._refuse_missing_queue(queue_name text)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    -- A queue that was made behind the snapshot is there, though it cannot be seen: an index knows. What this inserts
    -- where there is none goes with the error.
    if pgqueue._has_fixed_snapshot() and queue_name collate "C" ~ '^[a-z0-9_-]{1,128}$' and not current_setting('transaction_read_only')::boolean then
        begin
            insert into pgqueue.sweep_state (queue_name) values (_refuse_missing_queue.queue_name) on conflict do nothing;
        exception when serialization_failure then
            perform pgqueue._raise_stale_snapshot(format('queue %L', queue_name));
        end;
    end if;
    perform pgqueue._raise_queue_not_found(queue_name);
end;
$$;
comment on function pgqueue._refuse_missing_queue(text) is
'Raises PQ001, or 40001 where there is such a queue now, but the transaction cannot see it.';

create or replace function pgqueue._require_current_snapshot(object text)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    snapshot constant pg_snapshot := pg_current_snapshot();
begin
    if not pgqueue._has_fixed_snapshot() then
        return;
    end if;
    if not exists (select from pg_snapshot_xip(snapshot) as x where pg_xact_status(x) = 'committed') then
        begin
            for n in 0..1000 loop
                exit when pg_xact_status((pg_snapshot_xmax(snapshot)::text::bigint + n)::text::xid8) = 'committed';
            end loop;
        exception when invalid_parameter_value then
            -- An id from the future: so far nobody has committed.
            return;
        end;
    end if;
    perform pgqueue._raise_stale_snapshot(object);
end;
$$;
comment on function pgqueue._require_current_snapshot(text) is
'For who must see all that there is of the object, behind the lock that keeps others from adding to it. Raises 40001 where the transaction keeps a snapshot and anybody has committed since: whether that concerned the object nobody can tell.';

create or replace function pgqueue._get_locked_queue(queue_name text)
returns pgqueue.queues
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    q pgqueue.queues;
begin
    -- The lock first, the row second, each on its own snapshot: who waited for a drop_queue sees
    -- that the queue is gone, and nobody writes into a queue while it is being dropped.
    if not pgqueue._lock_queue(queue_name) then
        perform pgqueue._raise_queue_not_found(queue_name);
    end if;
    select * into q from pgqueue.queues where queues.name = queue_name collate "C";
    -- The snapshot of a repeatable read may be older than a drop_queue: the catalog knows better.
    if not found or pg_relation_filenode(q.fresh_from_id) is null then
        perform pgqueue._refuse_missing_queue(queue_name);
    end if;
    return q;
end;
$$;
comment on function pgqueue._get_locked_queue(text) is
'The queue of that name, kept from being dropped until the transaction ends. Raises PQ001, or 40001 where it is there, but was made behind the snapshot.';

create or replace function pgqueue._get_unlocked_queue(queue_name text)
returns pgqueue.queues
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    q pgqueue.queues;
begin
    select * into q from pgqueue.queues where queues.name = queue_name collate "C";
    if not found then
        perform pgqueue._raise_queue_not_found(queue_name);
    end if;
    return q;
end;
$$;
comment on function pgqueue._get_unlocked_queue(text) is
'The queue of that name, for who only looks: holds nothing and waits for nobody. Raises PQ001.';

create or replace function pgqueue._try_lock_existing_queue(q pgqueue.queues)
returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    return pg_try_advisory_xact_lock_shared(pgqueue._lock_key(q.name))
        and exists (select from pgqueue.queues c where c.name = q.name and c.queue_id = q.queue_id)
        and pg_relation_filenode(q.fresh_from_id) is not null;
end;
$$;
comment on function pgqueue._try_lock_existing_queue(pgqueue.queues) is
'Whether the queue is there still, and kept from being dropped until the transaction ends; false, without waiting, while it is being dropped.';
