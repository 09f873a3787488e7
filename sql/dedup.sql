-- Deduplication: a sender gives a message a key, and a second message with this key is not added. A key is recorded in
-- the table of the period in which it was sent, and also in that of the next period if its window reaches into it. A
-- lookup reads one table. The unique index of that table decides which of two concurrent senders adds its message. The
-- table of a period that has ended is truncated as a whole.

create or replace function pgqueue._dedup_class(dedup_window interval)
returns int
language sql immutable parallel safe
as $$
    select case when dedup_window = '0' or dedup_window > '1 day' then 2 when dedup_window > '1 h' then 1 else 0 end
$$;
comment on function pgqueue._dedup_class(interval) is
'The class of the periods for a window: 0 lasts an hour, 1 a day, 2 30 days. At least as long as the window. Inlined.';

create or replace function pgqueue._dedup_period(class int, at timestamptz)
returns bigint
language sql stable parallel safe
as $$ select floor(date_part('epoch', at) / case class when 0 then 3600 when 1 then 86400 else 2592000 end)::bigint $$;
comment on function pgqueue._dedup_period(int, timestamptz) is
'The number of the period that contains a time. Inlined.';

create or replace function pgqueue._dedup_slice(class int, period bigint)
returns int
language sql immutable parallel safe
as $$ select 3 * class + (period % 3)::int $$;
comment on function pgqueue._dedup_slice(int, bigint) is
'The number of the table that records the keys of a period. Each class has three tables, which take turns. Inlined.';

create or replace function pgqueue._end_of_dedup_window(q pgqueue.queues, at timestamptz)
returns timestamptz
language sql stable parallel safe
as $$ select pgqueue._add_interval(at, case q.dedup_window when '0' then '30 days' else q.dedup_window end) $$;
comment on function pgqueue._end_of_dedup_window(pgqueue.queues, timestamptz) is
'The end of the window of a key sent at a given time. With dedup_window 0 the key is taken while its message exists, at
most 30 days.';

create or replace function pgqueue._check_dedup(dedup_keys text[], on_duplicate text)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if on_duplicate is null or on_duplicate not in ('keep', 'replace') then
        perform pgqueue._raise_invalid('on_duplicate', on_duplicate, 'keep or replace');
    end if;
    perform pgqueue._raise_invalid(
        pgqueue._element('dedup_key', u.n, cardinality(dedup_keys)), left(u.k, 300), '1 to 255 characters')
    from unnest(dedup_keys) with ordinality as u (k, n)
    where char_length(u.k) not between 1 and 255;
end;
$$;
comment on function pgqueue._check_dedup(text[], text) is
'Raises 22023 for a key that is empty or too long, and for an unknown on_duplicate. Null keys are allowed.';

create or replace function pgqueue._read_dedup_keys(
    q pgqueue.queues, period bigint, keys text[], at timestamptz, new_ids bigint[], gone bigint[], lock boolean,
    out found_keys text[], out found_ids bigint[], out taken_ids bigint[], out were_locked boolean
)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
    slice constant int := pgqueue._dedup_slice(pgqueue._dedup_class(q.dedup_window), period);
begin
    perform pgqueue._require_untruncated(array[format('pgqueue.dedup_keys_%s', slice)::regclass]);
    -- The statements name the table. A plan for the parent would lock the tables of all periods, and wait for the
    -- truncation of one of them. After waiting for the lock, the second statement sees what its last holder has done.
    if lock then
        execute format('
            select from (select k from unnest($3) as k order by k collate "C") as u (key)
            cross join lateral (
                select from pgqueue.dedup_keys_%1$s c
                where c.slice = %1$s and c.queue_id = $1 and c.dedup_key = u.key collate "C" and c.period = $2
                for update
            ) l', slice)
        using q.queue_id, period, keys;
    end if;
    -- `offset 0`, as the `for update` above, keeps the planner from a join that reads all keys of the queue.
    execute format('
        select array_agg(u.key), array_agg(k.id), array_agg(case
            when pgqueue._end_of_dedup_window($1, k.enqueued_at) > $4 and k.id <> all ($6) and (k.id = any ($5) or %2$s)
            then k.id
        end), bool_or(k.xmax <> 0)
        from unnest($3) as u (key)
        cross join lateral (
            select c.id, c.enqueued_at, c.xmax from pgqueue.dedup_keys_%1$s c
            where c.slice = %1$s and c.queue_id = ($1).queue_id and c.dedup_key = u.key collate "C" and c.period = $2
            offset 0
        ) k',
        slice, case
            when q.dedup_window > '0' then 'true'
            else '
                exists (select from pgqueue.messages m where m.queue_name = ($1).name and m.id = k.id)
                or exists (select from pgqueue.scheduled_messages s where s.queue_name = ($1).name and s.id = k.id)'
        end)
    into found_keys, found_ids, taken_ids, were_locked
    using q, period, keys, at, new_ids, gone;
end;
$$;
comment on function pgqueue._read_dedup_keys(
    pgqueue.queues, bigint, text[], timestamptz, bigint[], bigint[], boolean
) is
'The keys that are recorded in a period, and the message of each. taken_ids has, for each key, the message that has it,
or null if the key is free. A key is free if its window has ended or its message is in gone. With dedup_window 0 it is
also free if the message neither exists nor is in new_ids, which the caller is about to add. If lock is true, waits for
other transactions that replace the messages. were_locked is false if no other transaction is changing a key.';

create or replace function pgqueue._move_dedup_keys(
    q pgqueue.queues, period bigint, keys text[], old_ids bigint[], new_ids bigint[], at timestamptz
)
returns int
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_nestloop = on
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    moved int;
begin
    -- `offset 0` and the settings keep the planner from a join that reads all keys of the queue.
    execute format('
        update pgqueue.dedup_keys_%1$s k set id = u.new_id, enqueued_at = $6
        from unnest($3, $4, $5) as u (key, old_id, new_id)
        cross join lateral (
            select c.ctid as place from pgqueue.dedup_keys_%1$s c
            where c.slice = %1$s and c.queue_id = $1 and c.dedup_key = u.key collate "C" and c.period = $2
                and c.id = u.old_id
            offset 0
        ) c
        where k.ctid = c.place',
        pgqueue._dedup_slice(pgqueue._dedup_class(q.dedup_window), period))
    using q.queue_id, period, keys, old_ids, new_ids, at;
    get diagnostics moved = row_count;
    return moved;
end;
$$;
comment on function pgqueue._move_dedup_keys(
    pgqueue.queues, bigint, text[], bigint[], bigint[], timestamptz
) is
'Records other messages, or another time, for keys, and returns for how many: not for those of which another message
than the one in old_ids has the key. For several keys, the caller has locked the rows, in the order of the keys.';

create or replace function pgqueue._take_dedup_key(
    q pgqueue.queues, period bigint, key text, new_id bigint, at timestamptz, new_ids bigint[], gone bigint[],
    lock boolean
)
returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
as $$
declare
    slice constant int := pgqueue._dedup_slice(pgqueue._dedup_class(q.dedup_window), period);
    holder bigint;
    earlier record;
begin
    -- Another transaction can free the key, or take it over, between two of the statements. The loop then starts again.
    while holder is null loop
        insert into pgqueue.dedup_keys (slice, period, queue_id, dedup_key, id, enqueued_at)
        values (slice, _take_dedup_key.period, q.queue_id, key, new_id, at)
        on conflict do nothing
        returning dedup_keys.id into holder;
        if not found then
            earlier := pgqueue._read_dedup_keys(q, period, array[key], at, new_ids, gone, lock);
            holder := earlier.taken_ids[1];
            if holder is null and pgqueue._move_dedup_keys(q, period, array[key], earlier.found_ids[1:1], array[new_id], at) = 1 then
                holder := new_id;
            end if;
        end if;
    end loop;
    return holder;
end;
$$;
comment on function pgqueue._take_dedup_key(
    pgqueue.queues, bigint, text, bigint, timestamptz, bigint[], bigint[], boolean
) is
'Records a key for new_id if the key is free, and returns the message that has it afterwards. Waits for a transaction
that has sent the same key.';

create or replace function pgqueue._take_dedup_keys(
    q pgqueue.queues, keys text[], ids bigint[], at timestamptz, on_duplicate text, gone bigint[]
)
returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_nestloop = off
set jit = off
as $$
declare
    class constant int := pgqueue._dedup_class(q.dedup_window);
    present constant bigint := pgqueue._dedup_period(class, at);
    latest constant bigint := pgqueue._dedup_period(class, pgqueue._end_of_dedup_window(q, at));
    replaces constant boolean := on_duplicate = 'replace';
    holders bigint[] := ids;
    added bigint[];
    missed text[];
    freed text[];
    found record;
    free record;
    e record;
begin
    -- The later period comes first: a message whose window begins in the next period is recorded only there.
    for period in reverse latest..present loop
        -- All calls take keys in the same order, so that two of them cannot block each other.
        with new_keys as (
            insert into pgqueue.dedup_keys (slice, period, queue_id, dedup_key, id, enqueued_at)
            select pgqueue._dedup_slice(class, period), period, q.queue_id, u.key, u.id, at
            from unnest(keys, ids, holders) as u (key, id, holder)
            where u.key is not null and u.id = u.holder
            order by u.key collate "C", case when replaces then -u.id else u.id end
            on conflict do nothing
            returning dedup_keys.id
        )
        select array_agg(n.id) into added from new_keys n;
        missed := array(
            select distinct u.key collate "C" from unnest(keys, ids, holders) as u (key, id, holder)
            where u.key is not null and u.id = u.holder and u.id not in (select i from unnest(added) as i)
        );
        continue when missed = '{}';

        found := pgqueue._read_dedup_keys(q, period, missed, at, ids, gone, replaces);
        if array_position(found.taken_ids, null) is not null then
            -- Keys that are free again are taken over by one update, as one call for each would take milliseconds.
            freed := array(
                select f.key from unnest(found.found_keys, found.taken_ids) as f (key, id) where f.id is null);
            -- One key needs no order. Without the lock, later calls see that nothing is changing it.
            free := pgqueue._read_dedup_keys(q, period, freed, at, ids, gone, cardinality(freed) > 1);
            perform pgqueue._move_dedup_keys(
                q, period, array_agg(f.key), array_agg(f.old_id), array_agg(f.new_id), at)
            from (
                select distinct on (k.key) k.key, k.old_id, u.id as new_id
                from unnest(free.found_keys, free.found_ids, free.taken_ids) as k (key, old_id, taken_id)
                join unnest(keys, ids, holders) as u (key, id, holder) on u.key = k.key
                where k.taken_id is null and u.id = u.holder
                order by k.key, case when replaces then -u.id else u.id end
            ) f;
            -- The others stay taken, even if their message is removed now. To lock one of them after the locks above
            -- would break the order.
            free := pgqueue._read_dedup_keys(q, period, freed, at, ids, gone, false);
            select array_agg(k.key), array_agg(k.id) into found.found_keys, found.taken_ids
            from (
                select f.key, f.id from unnest(found.found_keys, found.taken_ids) as f (key, id)
                where f.id is not null
                union all
                select f.key, f.id from unnest(free.found_keys, free.taken_ids) as f (key, id)
            ) k;
        end if;
        for e in
            select u.key, u.id, u.n, k.id as taken_by
            from unnest(keys, ids, holders) with ordinality as u (key, id, holder, n)
            left join unnest(found.found_keys, found.taken_ids) as k (key, id) on k.key = u.key
            where u.key in (select m from unnest(missed) as m) and u.id = u.holder
            order by u.key collate "C", case when replaces then -u.id else u.id end
        loop
            holders[e.n] := coalesce(
                e.taken_by, pgqueue._take_dedup_key(q, period, e.key, e.id, at, ids, gone, replaces));
            if holders[e.n] <> e.id and period < latest then
                perform pgqueue._move_dedup_keys(q, latest, array[e.key], array[e.id], array[e.id], '-infinity');
            end if;
        end loop;
    end loop;
    -- If several elements have one key, an element can have recorded as holder another element that lost the key later.
    -- That element has recorded the present holder.
    return array(
        select coalesce(o.holder, u.holder)
        from unnest(holders) with ordinality as u (holder, n)
        left join unnest(ids, holders) as o (id, holder) on o.id = u.holder
        order by u.n);
end;
$$;
comment on function pgqueue._take_dedup_keys(pgqueue.queues, text[], bigint[], timestamptz, text, bigint[]) is
'For each element, the message that has the key: the given id or, if the key is taken, an earlier one. Keys of the
messages in gone count as free. If several elements have the same key, the first one keeps it; with on_duplicate
replace, the last. An element without a key keeps its id.';

create or replace function pgqueue._replace_message(
    q pgqueue.queues, id bigint, at timestamptz, delay interval, expires_at timestamptz, message_id uuid,
    payload jsonb, body bytea, headers jsonb
)
returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
    new_due_at constant timestamptz := pgqueue._clamp_due_at(pgqueue._add_interval(at, delay));
begin
    -- If another transaction has locked the row, it claims or replaces the message.
    update pgqueue.scheduled_messages s
    set due_at = new_due_at, expires_at = _replace_message.expires_at,
        message_id = _replace_message.message_id, payload = _replace_message.payload, body = _replace_message.body,
        headers = _replace_message.headers, transport_headers = null
    where s.ctid = (
        select c.ctid from pgqueue.scheduled_messages c
        where c.queue_name = q.name and c.id = _replace_message.id for update skip locked
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
            return false;
        end if;
        with moved as (
            delete from pgqueue.messages m
            where delay > interval '0' and m.queue_name = q.name and m.id = _replace_message.id
            returning m
        )
        insert into pgqueue.scheduled_messages
        select (pgqueue._as_scheduled(d.m, new_due_at, (d.m).attempt_count)).* from moved d;
    end if;
    perform pgqueue._announce_due(q, new_due_at);
    return true;
end;
$$;
comment on function pgqueue._replace_message(
    pgqueue.queues, bigint, timestamptz, interval, timestamptz, uuid, jsonb, bytea, jsonb
) is
'Replaces the content, due time and expiry of a message that is ready or scheduled. Returns false if a consumer has
claimed it, if another transaction has locked it, or if it is gone.';

create or replace function pgqueue._settled_dedup_key_holder(q pgqueue.queues, dedup_key text, at timestamptz)
returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    period constant bigint := pgqueue._dedup_period(pgqueue._dedup_class(q.dedup_window), at);
    k record;
begin
    k := pgqueue._read_dedup_keys(q, period, array[dedup_key], at, '{}', '{}', false);
    if k.were_locked then
        begin
            k := pgqueue._read_dedup_keys(q, period, array[dedup_key], at, '{}', '{}', true);
            -- Only an error releases the lock before the transaction ends. The caller does not change the key.
            perform pgqueue._raise_queue_busy(q.name, 'enqueue');
        exception when sqlstate 'PQ004' then
            null;
        end;
    end if;
    return k.taken_ids[1];
end;
$$;
comment on function pgqueue._settled_dedup_key_holder(pgqueue.queues, text, timestamptz) is
'The message that has a key; null if the key is free. Waits for a transaction that gives the key to another message or
frees it.';

create or replace function pgqueue._free_dedup_key(q pgqueue.queues, dedup_key text, id bigint, at timestamptz)
returns void
language sql volatile
as $$
    -- The order in which senders lock the rows of a key. A deleted row would break their order: the sender of a batch
    -- that has met the row would have to add it again, after rows of later keys.
    select pgqueue._move_dedup_keys(q, period, array[dedup_key], array[id], array[id], '-infinity')
    from generate_series(
        pgqueue._dedup_period(pgqueue._dedup_class(q.dedup_window), pgqueue._end_of_dedup_window(q, at)),
        pgqueue._dedup_period(pgqueue._dedup_class(q.dedup_window), at),
        -1
    ) as period
$$;
comment on function pgqueue._free_dedup_key(pgqueue.queues, text, bigint, timestamptz) is
'Makes the key of a message free.';

create or replace function pgqueue._ended_dedup_tables(at timestamptz)
returns setof regclass
language sql stable
as $$
    select format('pgqueue.dedup_keys_%s', pgqueue._dedup_slice(c, pgqueue._dedup_period(c, at) + 2))::regclass
    from generate_series(0, 2) as c
    where pgqueue._dedup_period(c, at) = pgqueue._dedup_period(c, at - interval '1 min')
$$;
comment on function pgqueue._ended_dedup_tables(timestamptz) is
'The tables of the periods that ended last, a minute ago or earlier. They are no longer read, and are used next.';

create or replace function pgqueue._truncate_dedup_keys(at timestamptz)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
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
comment on function pgqueue._truncate_dedup_keys(timestamptz) is
'Truncates the tables of dedup_keys whose period has ended, except those that are in use.';

create or replace function pgqueue._on_maintenance_due_dedup(at timestamptz)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
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
exception when others then
    -- A full disk or a lock must not fail a claim.
    null;
end;
$$;
comment on function pgqueue._on_maintenance_due_dedup(timestamptz) is
'Requests the truncation of the tables of dedup_keys whose period has ended.';
