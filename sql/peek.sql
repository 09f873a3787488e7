-- Counts the messages that could be claimed, without changing or locking them.

create or replace function pgqueue._was_running_at_snapshot(xid xid, snapshot pg_snapshot) returns boolean
language sql stable parallel safe as $$
    -- True for a transaction that began after the snapshot, and for one that was running at the snapshot. The snapshot
    -- does not list subtransactions and, on a standby, any transactions: for those pg_xact_status answers. Transaction
    -- ids are compared in 32 bits, as rows store them.
    select
        ((xid::text::bigint - pg_snapshot_xmax(snapshot)::text::bigint) & 4294967295) < 2147483648
        or exists (
            select from pg_snapshot_xip(snapshot) as x
            where x::text::bigint & 4294967295 = xid::text::bigint
        )
        or pg_xact_status(greatest(3, pg_snapshot_xmax(snapshot)::text::bigint
            - ((pg_snapshot_xmax(snapshot)::text::bigint - xid::text::bigint) & 4294967295))::text::xid8)
            is not distinct from 'in progress'
$$;

-- Whether another transaction holds a row, derived from the row's xmax without taking a lock. Shared row locks may be
-- misjudged.
create or replace function pgqueue._is_locked(xmax xid) returns boolean
language sql stable parallel safe
-- The expression is short enough to be inlined. Most rows are locked by no transaction, and need no function call.
as $$ select xmax <> '0' and pgqueue._was_running_at_snapshot(xmax, pg_current_snapshot()) $$;

-- Ids of messages that came back, up to wanted and within ranges, and the number of messages for which each stands.
create or replace function pgqueue._sample_requeued_ids(
    queue_name text, within int8multirange, at timestamptz, wanted int, out ids bigint[], out stand_for bigint
)
language sql stable as $$
    -- At most wanted ids, at even distances among the first rows. An id can have several rows.
    with requeued as (
        select distinct r.id
        from (
            select c.id from pgqueue.requeued_messages c
            where c.queue_name = _sample_requeued_ids.queue_name
                and c.check_at >= (pgqueue._sweep_state_of(_sample_requeued_ids.queue_name, _sample_requeued_ids.at)).first_check_at
            order by c.check_at, c.id limit greatest(5000, 2 * wanted)
        ) r
        where r.id <@ within
    ),
    placed as (
        select w.id, row_number() over (order by w.id) as place, greatest(ceil(count(*) over () / wanted::numeric), 1)::bigint as step
        from requeued w
    )
    select coalesce(array_agg(p.id order by p.id) filter (where p.place % p.step = 0), '{}'), coalesce(max(p.step), 1)
    from placed p
$$;

create or replace function pgqueue.peek(queue_name pgqueue.queue_of_any_access, max_records int default 100) returns int
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    state pgqueue.sweep_state;
    fresh_from_id bigint;
    pages_before bigint;
    examined int;
    ready int;
    total int;
    some_came_back boolean;
    sample record;
begin
    perform pgqueue._require(
        max_records between 1 and 10000, 'max_records', max_records::text, 'an integer from 1 to 10000');
    if q.max_in_flight is not null or q.rate_limit is not null then
        max_records := greatest(0, pgqueue._allowed_messages(q, at, max_records));
    end if;
    if q.paused_at is not null or max_records = 0 then
        return 0;
    end if;
    perform pgqueue._record_if_old(q, true);
    state := pgqueue._sweep_state_of(q.name, at);
    fresh_from_id := greatest(pg_sequence_last_value(q.fresh_from_id), pgqueue._first_possible_id(state));
    pages_before := pgqueue._pages_read(q);
    select count(*) into total
    from (
        select from pgqueue.scheduled_messages s
        where s.queue_name = q.name and s.due_at >= state.first_due_at and s.due_at <= at
            and (s.expires_at is null or s.expires_at > at) and not pgqueue._is_locked(s.xmax)
        order by s.due_at limit max_records
    ) r;
    if total < max_records then
        select count(*) into ready
        from (
            select
            from (
                select pgqueue._is_ready(m, at) as is_ready, m.xmax as held_by
                from pgqueue.messages m
                where (m.kind = q.kind or m.kind is null) and m.queue_name = q.name and m.id >= fresh_from_id
                order by m.id limit max_records + 400
            ) w
            where w.is_ready and not pgqueue._is_locked(w.held_by)
            limit max_records - total
        ) r;
        total := total + ready;
    end if;
    if total < max_records then
        select
            count(*),
            count(*) filter (where w.is_ready and not pgqueue._is_locked(w.held_by)),
            exists (
                select from pgqueue.requeued_messages c
                where c.queue_name = q.name and c.check_at >= state.first_check_at
            )
        into examined, ready, some_came_back
        from (
            select c.is_ready, c.held_by
            from unnest(int8multirange(int8range(1, greatest(1, fresh_from_id))) - state.vacant_ids) as r
            cross join lateral (
                select pgqueue._is_ready(m, at) as is_ready, m.xmax as held_by
                from pgqueue.messages m
                where (m.kind = q.kind or m.kind is null) and m.queue_name = q.name and m.id >= lower(r) and m.id < upper(r)
                order by m.id limit 400
            ) c
            limit 400
        ) w;
        total := total + ready;
    end if;
    if pgqueue._pages_read(q) - pages_before > 50 + 2 * (total + coalesce(examined, 0)) then
        perform pgqueue._record_if_old(q);
    end if;
    if total = 0 and examined = 400 then
        return 1;
    end if;
    if some_came_back and total < max_records then
        -- Messages that came back can have ids that the query above skips.
        select c.* into sample
        from pgqueue._sample_requeued_ids(
            q.name, state.vacant_ids * int8multirange(int8range(null, fresh_from_id)), at, 400) c;
        select count(*) into ready
        from pgqueue.messages m, pgqueue._lookup_keys(q.name, sample.ids) k
        where (m.kind = q.kind or m.kind is null) and pgqueue._is_ready(m, at) and not pgqueue._is_locked(m.xmax)
            and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id);
        total := total + ready;
        if total = 0 and sample.stand_for > 1 then
            return 1;
        end if;
    end if;
    return least(total, max_records);
end;
$$;
comment on function pgqueue.peek is
'Returns how many messages could be claimed or received now, up to max_records (1 to 10000). Rows that another
transaction holds are not counted. max_in_flight and rate_limit are observed. In a queue with group_limit, messages that
wait for others of their groups are counted. Locks and changes no message, waits for no consumer, and reads a bounded
number of rows. After many messages have left, it may record where the next call can start, unless the transaction is
read-only. Returns 1 if more than 400 messages in flight hide whether any message is ready, and 0 if the
queue is paused. Raises 22023, PQ001.';
