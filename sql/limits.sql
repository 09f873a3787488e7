-- Limits of a queue. With max_in_flight a claim counts the messages in flight from their rows, under a lock that it
-- keeps until its transaction ends. With rate_limit a queue has a token for each message that claims may take. The
-- tokens are counted in a register, under a lock that no transaction keeps.

create or replace function pgqueue._on_queue_changed_limits(before pgqueue.queues, after pgqueue.queues) returns void
language plpgsql volatile as $$
begin
    -- The register stays when the limit ends: a claim that runs at the same time may still use it.
    if after.rate_limit is not null and before.rate_limit is null then
        -- It gets a value here, as a read-only transaction reads it, too, and could not set one.
        perform pgqueue._register_value(pgqueue._create_register(after.queue_id, 'rate_used_until'));
    end if;
    if before.name is not null and after.name is not null and (before.max_in_flight, before.rate_limit, before.rate_period)
        is distinct from (after.max_in_flight, after.rate_limit, after.rate_period)
    then
        -- A waiting consumer knows only when the old limits allow the next message.
        perform pg_notify(pgqueue.channel(after.name), '');
    end if;
end;
$$;

create or replace function pgqueue._read_bucket(
    q pgqueue.queues, now_micros bigint, out register regclass, out period bigint, out used_until bigint, out tokens int
)
language plpgsql volatile as $$
begin
    register := format('pgqueue.queue_%s_rate_used_until', q.queue_id);
    period := (date_part('epoch', q.rate_period) * 1000000)::bigint;
    used_until := pgqueue._register_value(register);
    -- A time that is more than a period ahead was set before the clock was set back.
    used_until := greatest(
        now_micros - period,
        case when used_until <= now_micros + period then used_until end);
    tokens := greatest(0, (now_micros - used_until) * q.rate_limit / period);
end;
$$;

create or replace function pgqueue._claimed_ids(q pgqueue.queues, after timestamptz) returns bigint[]
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    first_id bigint;
    first_check_at timestamptz;
    returned_ids bigint[] := '{}'::bigint[];
    ids bigint[];
begin
    -- A dead letter can hold first_id far below the messages in flight. Then the scan begins where the vacant ids end,
    -- and the messages that have returned to those ids are looked up.
    select
        greatest(s.first_id, pgqueue._first_possible_id(s)),
        case when pgqueue._first_possible_id(s) > coalesce(s.first_id, 1) then pgqueue._discard_future_time(s.first_check_at, pgqueue._now()) end
    into first_id, first_check_at
    from pgqueue.sweep_state s where s.queue_name = q.name;
    if first_check_at is not null then
        returned_ids := array(
            select distinct r.id from pgqueue.requeued_messages r
            where r.queue_name = q.name and r.check_at >= first_check_at and r.id < first_id);
    end if;
    -- In a queue with groups a message that waits for its retry stays in messages, without a token.
    ids := array(
        select m.id from pgqueue.messages m
        where pgqueue._is_in_queue(m, q.kind, q.name) and m.id + 0 >= coalesce(first_id, 1)
            and m.attempt_count > 0 and m.visible_at > after
            and (m.claim_token is not null or m.claimed_attempt is distinct from m.attempt_count));
    if returned_ids <> '{}' then
        ids := ids || array(
            select m.id from pgqueue.messages m, pgqueue._lookup_keys(q.name, returned_ids) k
            where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
                and m.attempt_count > 0 and m.visible_at > after
                and (m.claim_token is not null or m.claimed_attempt is distinct from m.attempt_count));
    end if;
    return ids;
end;
$$;

-- How many of the wanted messages the limits of a queue allow now. If is_locked is true, the caller holds the lock of
-- max_in_flight, and claims that other transactions may have extended count, too.
create or replace function pgqueue._allowed_messages(
    q pgqueue.queues, at timestamptz, wanted int, is_locked boolean default false
) returns int
language plpgsql volatile as $$
begin
    if q.rate_limit is not null then
        wanted := least(wanted, (pgqueue._read_bucket(q, pgqueue._to_micros(at))).tokens);
    end if;
    if q.max_in_flight is not null and wanted > 0 then
        wanted := least(wanted, case
            when is_locked
                then pgqueue._places_left(q, q.max_in_flight, pgqueue._claimed_ids(q, '-infinity'), at, wanted)
            else q.max_in_flight - cardinality(pgqueue._claimed_ids(q, at)) end);
    end if;
    return wanted;
end;
$$;

create or replace function pgqueue._in_flight_full_until(q pgqueue.queues, at timestamptz) returns timestamptz
language plpgsql volatile set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
set jit = off as $$
begin
    if q.max_in_flight is null then
        return null;
    end if;
    return (
        select m.visible_at from pgqueue.messages m, pgqueue._lookup_keys(q.name, pgqueue._claimed_ids(q, at)) k
        where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
        order by m.visible_at desc offset q.max_in_flight - 1 limit 1
    );
end;
$$;

-- Until the transaction ends, because other claims do not see its claims before. False if another transaction keeps the
-- lock for longer than 100 ms.
create or replace function pgqueue._lock_max_in_flight(q pgqueue.queues) returns boolean
language plpgsql volatile set lock_timeout = '100 ms' as $$
declare
    key constant bigint := hashtextextended(format('pgqueue.max_in_flight.%s', q.queue_id), 0);
begin
    -- lock_timeout is shorter than deadlock_timeout: claims of several queues in one transaction raise no error.
    if not pg_try_advisory_xact_lock(key) then
        perform pg_advisory_xact_lock(key);
    end if;
    return true;
exception when lock_not_available then
    return false;
end;
$$;

create or replace function pgqueue._take_tokens(q pgqueue.queues, wanted int) returns int
language plpgsql volatile as $$
declare
    bucket record;
    taken int;
begin
    begin
        perform pg_advisory_xact_lock(hashtextextended(format('pgqueue.rate_limit.%s', q.queue_id), 0));
        bucket := pgqueue._read_bucket(q, pgqueue._to_micros(pgqueue._now()));
        taken := least(wanted, bucket.tokens);
        if taken > 0 then
            perform setval(bucket.register, bucket.used_until + (taken * bucket.period + q.rate_limit - 1) / q.rate_limit);
        end if;
        -- Only an error releases the lock before the transaction ends, which may take long. It does not undo setval.
        perform pgqueue._raise('queue_busy', q.name, 'claim');
    exception when sqlstate 'PQ004' then
        null;
    end;
    return taken;
end;
$$;
