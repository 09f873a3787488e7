-- Deduplication: a sender gives a message a key, and a second message with this key is not added. A key is recorded in
-- the table of the period in which it was sent, and also in that of the next period if its window reaches into it. A
-- lookup reads one table. The unique index of that table decides which of two concurrent senders adds its message. The
-- table of a period that has ended is truncated as a whole.

create or replace function pgqueue._dedup_class(dedup_window interval) returns int
language sql immutable parallel safe
-- Periods of class 0 last an hour, of 1 a day, of 2 30 days: at least as long as the window.
as $$
    select case when dedup_window = '0' or dedup_window > '1 day' then 2 when dedup_window > '1 h' then 1 else 0 end
$$;

create or replace function pgqueue._dedup_period(dedup_window interval, at timestamptz) returns bigint
language sql stable parallel safe
as $$
    select floor(date_part('epoch', at) / ('{3600,86400,2592000}'::int[])[1 + pgqueue._dedup_class(dedup_window)])::bigint
$$;

create or replace function pgqueue._dedup_slice(dedup_window interval, period bigint) returns int
language sql immutable parallel safe as $$ select 3 * pgqueue._dedup_class(dedup_window) + (period % 3)::int $$;

create or replace function pgqueue._end_of_dedup_window(q pgqueue.queues, at timestamptz) returns timestamptz
language sql stable parallel safe
as $$ select pgqueue._add_interval(at, case q.dedup_window when '0' then '30 days' else q.dedup_window end) $$;

-- The keys that are recorded in a period, with the message of each. A key is free if its window has ended or its
-- message is in gone. With dedup_window 0 it is also free if the message neither exists nor is in new_ids, which the
-- caller is about to add. is_locked is false if no other transaction is changing the key.
create or replace function pgqueue._read_dedup_keys(
    q pgqueue.queues, period bigint, keys text[], at timestamptz, new_ids bigint[], gone bigint[], out key text,
    out id bigint, out is_taken boolean, out is_locked boolean
) returns setof record
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    slice constant int := pgqueue._dedup_slice(q.dedup_window, period);
begin
    perform pgqueue._require_untruncated(array[format('pgqueue.dedup_keys_%s', slice)::regclass]);
    -- The statement names the table. A plan for the parent would lock the tables of all periods, and wait for the
    -- truncation of one of them. `offset 0` keeps the planner from a join that reads all keys of the queue, and from a
    -- hash of all its messages. A row that _write_dedup_keys has updated keeps its xmin as xmax: that transaction has
    -- locked it, and has ended.
    for key, id, is_taken, is_locked in execute format('
        select u.key, k.id,
            pgqueue._end_of_dedup_window($1, k.enqueued_at) > $4 and k.id <> all ($6) and (k.id = any ($5) or %2$s),
            k.xmax <> 0 and k.xmax <> k.xmin
        from unnest($3) as u (key)
        cross join lateral (
            select c.id, c.enqueued_at, c.xmin, c.xmax from pgqueue.dedup_keys_%1$s c
            where c.slice = %1$s and c.queue_id = ($1).queue_id and c.dedup_key = u.key collate "C" and c.period = $2
            offset 0
        ) k',
        slice, case
            when q.dedup_window > '0' then 'true'
            else '
                exists (select from pgqueue.messages m where m.queue_name = ($1).name and m.id = k.id offset 0)
                or exists (
                    select from pgqueue.scheduled_messages s where s.queue_name = ($1).name and s.id = k.id offset 0)'
        end)
    using q, period, keys, at, new_ids, gone
    loop
        return next;
    end loop;
end;
$$;

-- Records the ids for the keys that have no row or that of a message in free_ids, and returns them. Locks the rows of
-- all keys until the transaction ends, in the order of the keys: so the next _read_dedup_keys shows what they stay.
create or replace function pgqueue._write_dedup_keys(
    q pgqueue.queues, period bigint, keys text[], ids bigint[], at timestamptz, free_ids bigint[]
) returns bigint[]
language plpgsql volatile set plan_cache_mode = force_generic_plan as $$
declare
    written bigint[];
begin
    with written_keys as (
        insert into pgqueue.dedup_keys as k (slice, period, queue_id, dedup_key, id, enqueued_at)
        select
            pgqueue._dedup_slice(q.dedup_window, _write_dedup_keys.period), _write_dedup_keys.period,
            q.queue_id, u.key, u.id, at
        from unnest(keys, ids) as u (key, id)
        order by u.key collate "C"
        on conflict on constraint dedup_keys_pkey do update set id = excluded.id, enqueued_at = excluded.enqueued_at
        where k.id in (select f from unnest(free_ids) as f)
        returning k.id
    )
    select coalesce(array_agg(w.id), '{}') into written from written_keys w;
    return written;
end;
$$;

-- For each element, the message that has the key: the given id or, if the key is taken, an earlier one. Keys of the
-- messages in gone count as free. If several elements have the same key, the first one keeps it; with on_duplicate
-- replace, the last. An element without a key keeps its id.
create or replace function pgqueue._take_dedup_keys(
    q pgqueue.queues, keys text[], ids bigint[], at timestamptz, on_duplicate text, gone bigint[]
) returns bigint[]
language plpgsql volatile set plan_cache_mode = force_generic_plan set enable_nestloop = off set jit = off as $$
declare
    present constant bigint := pgqueue._dedup_period(q.dedup_window, at);
    latest constant bigint := pgqueue._dedup_period(q.dedup_window, pgqueue._end_of_dedup_window(q, at));
    -- The keys that this call has or tries to take, each with the message that gets it, and those that others have.
    own_keys text[];
    own_ids bigint[];
    lost_keys text[] := '{}'::text[];
    lost_ids bigint[] := '{}'::bigint[];
    open_keys text[];
    open_ids bigint[];
    added bigint[];
    written bigint[];
    are_locked boolean;
    seen record;
begin
    select array_agg(k.key), array_agg(k.id) into own_keys, own_ids
    from (
        select u.key collate "C" as key, case on_duplicate when 'keep' then min(u.id) else max(u.id) end as id
        from unnest(keys, ids) as u (key, id) where u.key is not null group by 1
    ) k;
    -- The later period comes first: a message whose window begins in the next period is recorded only there.
    for period in reverse latest..present loop
        -- All calls take keys in the same order, so that two of them cannot block each other. To replace a message, its
        -- key is locked first. To keep it needs no lock.
        are_locked := on_duplicate = 'replace';
        if are_locked then
            added := pgqueue._write_dedup_keys(q, period, own_keys, own_ids, at, '{}');
        else
            with new_keys as (
                insert into pgqueue.dedup_keys (slice, period, queue_id, dedup_key, id, enqueued_at)
                select pgqueue._dedup_slice(q.dedup_window, period), period, q.queue_id, u.key, u.id, at
                from unnest(own_keys, own_ids) as u (key, id)
                order by u.key collate "C"
                on conflict do nothing
                returning dedup_keys.id
            )
            select coalesce(array_agg(n.id), '{}') into added from new_keys n;
        end if;
        loop
            select array_agg(u.key), array_agg(u.id) into open_keys, open_ids
            from unnest(own_keys, own_ids) as u (key, id) where u.id not in (select a from unnest(added) as a);
            exit when open_keys is null;
            select
                array_agg(r.id) filter (where r.is_taken and r.id = o.id) as own_ids,
                array_agg(r.key) filter (where w.is_lost) as lost_keys,
                array_agg(r.id) filter (where w.is_lost) as lost_ids,
                array_agg(r.id) filter (where not r.is_taken) as free_ids
            into seen
            from pgqueue._read_dedup_keys(q, period, open_keys, at, ids, gone) r
            join unnest(open_keys, open_ids) as o (key, id) on o.key = r.key collate "C"
            cross join lateral (
                select r.is_taken and r.id <> o.id and (are_locked or not r.is_locked) as is_lost
            ) w;
            added := added || seen.own_ids;
            if seen.lost_keys is not null then
                if period < latest then
                    perform pgqueue._write_dedup_keys(
                        q, latest, array_agg(u.key), array_agg(u.id), '-infinity', array_agg(u.id))
                    from unnest(own_keys, own_ids) as u (key, id)
                    where u.key collate "C" in (select k from unnest(seen.lost_keys) as k);
                end if;
                lost_keys := lost_keys || seen.lost_keys;
                lost_ids := lost_ids || seen.lost_ids;
                select array_agg(u.key), array_agg(u.id) into own_keys, own_ids
                from unnest(own_keys, own_ids) as u (key, id)
                where u.key collate "C" not in (select k from unnest(seen.lost_keys) as k);
            elsif seen.own_ids is null then
                -- Waits for transactions that are changing the keys.
                if seen.free_ids is not null then
                    written := pgqueue._write_dedup_keys(q, period, open_keys, open_ids, at, seen.free_ids);
                else
                    -- Calls that only keep keys do not wait for each other: an error releases the locks before the
                    -- transaction ends.
                    begin
                        written := pgqueue._write_dedup_keys(q, period, open_keys, open_ids, at, '{}');
                        if written = '{}' then
                            perform pgqueue._raise('queue_busy', q.name, 'enqueue');
                        end if;
                    exception when sqlstate 'PQ004' then
                        null;
                    end;
                end if;
                added := added || written;
                are_locked := true;
            end if;
        end loop;
    end loop;
    return array(
        select coalesce(h.id, u.id)
        from unnest(keys, ids) with ordinality as u (key, id, n)
        left join unnest(own_keys || lost_keys, own_ids || lost_ids) as h (key, id) on h.key = u.key collate "C"
        order by u.n);
end;
$$;

create or replace function pgqueue._replace_message(
    q pgqueue.queues, id bigint, at timestamptz, delay interval, expires_at timestamptz, message_id uuid, payload jsonb,
    body bytea, headers jsonb
) returns boolean
language plpgsql volatile set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
set enable_sort = off set jit = off as $$
declare
    new_due_at constant timestamptz := pgqueue._add_interval(at, delay);
begin
    -- If another transaction has locked the row, it claims or replaces the message.
    update pgqueue.scheduled_messages s
    set due_at = pgqueue._clamp_due_at(new_due_at), expires_at = _replace_message.expires_at,
        message_id = _replace_message.message_id, payload = _replace_message.payload, body = _replace_message.body,
        headers = _replace_message.headers, transport_headers = null
    where s.ctid = (
        select c.ctid from pgqueue.scheduled_messages c
        -- In the order of the primary key: a plan could read the whole queue through another index.
        where c.queue_name = q.name and c.id between _replace_message.id and _replace_message.id
        order by c.id for update skip locked
    );
    if not found then
        -- A consumer whose claim has ended must not settle the new content.
        update pgqueue.messages m
        set claim_token = null, visible_at = least(m.visible_at, at), expires_at = _replace_message.expires_at,
            message_id = _replace_message.message_id, payload = _replace_message.payload, body = _replace_message.body,
            headers = _replace_message.headers, transport_headers = null
        where m.queue_name = q.name and m.id = (
            select c.id from pgqueue.messages c
            where c.queue_name = q.name and c.id = _replace_message.id
                and (pgqueue._is_ready(c, at) or pgqueue._is_unclaimed(c))
            for update skip locked
        );
        if not found then
            -- Only the lock of reschedule lets this one pass: wait for it, and look again.
            perform from pgqueue.scheduled_messages s
            where s.queue_name = q.name and s.id = _replace_message.id for key share skip locked;
            if not found then
                return false;
            end if;
            perform from pgqueue.scheduled_messages s
            where s.queue_name = q.name and s.id = _replace_message.id for no key update;
            return pgqueue._replace_message(q, id, at, delay, expires_at, message_id, payload, body, headers);
        end if;
        with moved as (
            delete from pgqueue.messages m
            where delay > interval '0' and m.queue_name = q.name and m.id = _replace_message.id
            returning m
        )
        insert into pgqueue.scheduled_messages
        select (pgqueue._as_scheduled(d.m, pgqueue._clamp_due_at(new_due_at), (d.m).attempt_count)).* from moved d;
    end if;
    perform pgqueue._announce_due(q, new_due_at);
    return true;
end;
$$;

-- The tables of the periods that ended last, a minute ago or earlier. They are no longer read, and are used next.
create or replace function pgqueue._ended_dedup_tables(at timestamptz) returns setof regclass
language sql stable as $$
    select format('pgqueue.dedup_keys_%s', pgqueue._dedup_slice(w, pgqueue._dedup_period(w, at) + 2))::regclass
    from unnest('{1 h,1 day,30 days}'::interval[]) as w
    where pgqueue._dedup_period(w, at) = pgqueue._dedup_period(w, at - interval '1 min')
$$;

create or replace function pgqueue._truncate_dedup_keys(at timestamptz) returns void
language plpgsql volatile as $$
declare
    keys regclass;
begin
    -- A dump would fail.
    if pgqueue._is_dump_running() then
        return;
    end if;
    for keys in select t from pgqueue._ended_dedup_tables(at) as t loop
        begin
            -- A transaction that still writes to the table delays the truncation.
            execute format('lock table only %s in access exclusive mode nowait', keys);
            if pg_relation_size(keys) > 0 then
                execute format('truncate only %s', keys);
            end if;
        exception when lock_not_available or object_in_use then
            null;
        end;
    end loop;
    -- As for a compaction: otherwise the rows could still be counted, and each sweep would request a truncation.
    perform pg_stat_force_next_flush();
end;
$$;

create or replace function pgqueue._on_maintenance_due_dedup(at timestamptz) returns void
language plpgsql volatile as $$
begin
    -- The statistics are read without a lock of the table.
    if not pgqueue._is_dump_running() and exists (
        select from pgqueue._ended_dedup_tables(at) as t
        -- A crash of the server resets the first two.
        where pg_stat_get_live_tuples(t) + pg_stat_get_dead_tuples(t) > 0
            or exists (select from pg_catalog.pg_class c where c.oid = t and c.relpages > 0)
    ) then
        perform pgqueue._request_at_commit('_truncate_dedup_keys', at);
    end if;
end;
$$;
