-- Claims messages: hides them for a time, counts the attempt, and sets a token that fences the claim. A claim starts at
-- the lowest id that no claim has passed. The sweep finds the messages below this id.

create or replace function pgqueue._claim_candidates(
    q pgqueue.queues, at timestamptz, wanted int, found_ids bigint[] default null
) returns bigint[]
language plpgsql volatile as $$
declare
    now_micros constant bigint := pgqueue._to_micros(at);
    fresh_from_id bigint := pgqueue._register_value(q.fresh_from_id);
    first_due bigint;
    next_sweep bigint;
    candidate_ids bigint[] := '{}'::bigint[];
    last_id bigint;
    swept boolean := false;
begin
    -- A time further ahead than any sweep sets was set while the clock was wrong.
    next_sweep := pgqueue._register_value(q.next_sweep_at);
    if next_sweep > now_micros + 15000000 then
        next_sweep := 0;
    end if;

    if found_ids is null then
        first_due := pgqueue._register_value(q.first_due_at);
        if first_due <= now_micros then
            candidate_ids := pgqueue._move_due_messages(q, at, wanted, pgqueue._from_micros(first_due - 1));
            if candidate_ids <> '{}' and not pgqueue._has_time() then
                -- If it was cancelled in a sweep, the next claim would begin with the same messages.
                return candidate_ids;
            end if;
        end if;
        if cardinality(candidate_ids) < wanted and next_sweep <= now_micros then
            swept := true;
            candidate_ids := pgqueue._sweep(q, candidate_ids, at, wanted, fresh_from_id);
        end if;
        if cardinality(candidate_ids) < wanted and q.kind is not null then
            found_ids := array(
                select m.id from pgqueue.messages m
                where m.kind = q.kind and m.queue_name = q.name and m.id >= fresh_from_id and m.id <> all (candidate_ids)
                    and (pgqueue._is_ready(m, at) or m.visible_at <= at and pgqueue._is_walk_over(at))
                order by m.id limit wanted - cardinality(candidate_ids) for update skip locked
            );
        elsif cardinality(candidate_ids) < wanted then
            found_ids := array(
                select m.id from pgqueue.messages_shared m
                where m.queue_name = q.name and m.id >= fresh_from_id and m.id <> all (candidate_ids)
                    and (pgqueue._is_ready(m, at) or m.visible_at <= at and pgqueue._is_walk_over(at))
                order by m.id limit wanted - cardinality(candidate_ids) for update skip locked
            );
        end if;
    end if;
    last_id := found_ids[cardinality(found_ids)];
    if last_id >= fresh_from_id then
        fresh_from_id := setval(q.fresh_from_id, least(last_id, 9223372036854775806) + 1);
    end if;
    if cardinality(found_ids) > 0 and pgqueue._is_walk_over(at) then
        return candidate_ids || pgqueue._keep_ready(q, found_ids, at);
    end if;
    candidate_ids := candidate_ids || found_ids;

    -- If too few messages were found, the claim sweeps at once, so that it misses no message of a quiet queue. If the
    -- last sweep was expensive, the claim checks only where messages appear when a transaction rolls back. If it has
    -- found some messages, it checks fewer ids there: most claims find some but too few where consumers are faster than
    -- producers.
    -- A next sweep that is more than 150 ms away means that the last one took more than 7.5 ms.
    if cardinality(candidate_ids) < wanted and next_sweep > now_micros + 150000 then
        candidate_ids := candidate_ids || pgqueue._sweep_recent(
            q, candidate_ids, at, wanted - cardinality(candidate_ids), fresh_from_id,
            case candidate_ids when '{}' then 4096 else 128 end);
    elsif cardinality(candidate_ids) < wanted then
        -- The claim could not take the messages from fresh_from_id on. From now on the sweep finds them. If there are
        -- none, delayed messages may have come back to such ids and left since. Later claims skip their dead rows.
        if q.kind is not null then
            last_id := (
                select m.id from pgqueue.messages m
                where m.kind = q.kind and m.queue_name = q.name and m.id >= fresh_from_id order by m.id desc limit 1);
        else
            last_id := (
                select m.id from pgqueue.messages_shared m
                where m.queue_name = q.name and m.id >= fresh_from_id order by m.id desc limit 1);
        end if;
        last_id := coalesce(last_id, (select s.settled_id from pgqueue.sweep_state s where s.queue_name = q.name));
        if last_id >= fresh_from_id then
            fresh_from_id := setval(q.fresh_from_id, least(last_id, 9223372036854775806) + 1);
            swept := false;
        end if;
        if not swept then
            candidate_ids := pgqueue._sweep(q, candidate_ids, at, wanted, fresh_from_id);
        end if;
    end if;
    return candidate_ids;
end;
$$;

create or replace function pgqueue._claim_candidates_limited(q pgqueue.queues, at timestamptz, wanted int)
returns bigint[] language plpgsql volatile as $$
declare
    allowed int := pgqueue._allowed_messages(q, at, wanted);
    candidate_ids bigint[];
    tokens_taken int;
begin
    if allowed > 0 and q.max_in_flight is not null then
        if not pgqueue._lock_max_in_flight(q) then
            return '{}'::bigint[];
        end if;
        perform pgqueue._require_current_snapshot(format('queue %L', q.name));
        -- This is a new statement: it sees the claims of those that held the lock before.
        at := pgqueue._now();
        allowed := pgqueue._allowed_messages(q, at, wanted, true);
    end if;
    if allowed <= 0 then
        return '{}'::bigint[];
    end if;
    if q.group_limit is not null then
        candidate_ids := pgqueue._claim_candidates_grouped(q, at, allowed);
    elsif q.priorities then
        candidate_ids := pgqueue._claim_candidates_by_priority(q, at, allowed);
    else
        candidate_ids := pgqueue._claim_candidates(q, at, allowed);
    end if;
    if q.rate_limit is null or candidate_ids = '{}' then
        return candidate_ids;
    end if;
    tokens_taken := pgqueue._take_tokens(q, cardinality(candidate_ids));
    if tokens_taken < cardinality(candidate_ids) then
        -- Another claim has taken tokens since. The messages above the limit are left to later claims.
        if q.priorities then
            -- A sweep would give them out before messages with a higher priority that are sent later.
            perform pgqueue._set_levels_back(q, candidate_ids[tokens_taken + 1:]);
        else
            -- The next claim sweeps, and finds them.
            perform setval(q.next_sweep_at, 1);
        end if;
    end if;
    return candidate_ids[:tokens_taken];
end;
$$;

-- Whether a sweep could find no message but those that a claim has found: no other one is visible at an id that is not
-- vacant. False if 500 are hidden, or rows of requeued_messages exist. Due messages that first_due_at has missed wait
-- for the next sweep. For a queue of messages_shared.
create or replace function pgqueue._are_only_visible(queue_name text, found_ids bigint[]) returns boolean
language plpgsql volatile as $$
declare
    at constant timestamptz := pgqueue._now();
begin
    perform from pgqueue.sweep_state s
    where s.queue_name = _are_only_visible.queue_name collate "C"
        and (
            select count(*) filter (where m.visible_at <= at) = cardinality(found_ids) and count(*) < cardinality(found_ids) + 500
            from (
                select c.visible_at
                from unnest('{[1,9223372036854775807)}'::int8multirange - s.vacant_ids) as r
                cross join lateral (
                    select c.visible_at from pgqueue.messages_shared c
                    where c.queue_name = _are_only_visible.queue_name collate "C" and c.id >= lower(r) and c.id < upper(r)
                    offset 0
                ) c
                limit cardinality(found_ids) + 500
            ) m
        )
        -- With `order by` it is one search of the index on the time, whatever statistics say.
        and (
            select true from pgqueue.requeued_messages r
            where r.queue_name = _are_only_visible.queue_name collate "C"
                and r.check_at >= pgqueue._discard_future_time(s.first_check_at, at)
            order by r.check_at limit 1
        ) is null;
    return found;
end;
$$;

-- For all queues and states. found_ids are the messages that the fast path has locked, too few; null if it has not
-- looked.
create or replace function pgqueue._lock_candidates_slowly(
    queue_name text, max_messages int, visibility_timeout interval, is_receive boolean, found_ids bigint[],
    out ids bigint[], out kind bigint
)
language plpgsql volatile as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    -- The scan before can have waited for a compaction or for the processor. What was ready then may be claimed by now,
    -- and what is ready now was not ready then.
    at constant timestamptz := pgqueue._now();
    has_adopted boolean := false;
begin
    kind := q.kind;
    if max_messages is null or max_messages not between 1 and 10000 then
        perform pgqueue._raise_invalid('max_messages', max_messages::text, 'an integer from 1 to 10000');
    end if;
    if visibility_timeout is not null then
        perform pgqueue._check_visibility_timeout(visibility_timeout);
    end if;
    if is_receive and q.max_in_flight is not null then
        perform pgqueue._raise_invalid('queue_name', q.name, 'a queue without max_in_flight: what is received cannot be counted');
    end if;
    if q.paused_at is not null then
        ids := '{}';
        return;
    end if;
    -- Messages that plain SQL has sent to a queue that is not plain.
    if pg_sequence_last_value(q.next_sweep_at) <= pgqueue._to_micros(at) and pgqueue._adopt_messages(q) then
        found_ids := null;
    end if;
    loop
        ids := case
            when coalesce(q.max_in_flight, q.rate_limit) is not null then pgqueue._claim_candidates_limited(q, at, max_messages)
            when q.group_limit is not null then pgqueue._claim_candidates_grouped(q, at, max_messages)
            when q.priorities then pgqueue._claim_candidates_by_priority(q, at, max_messages)
            else pgqueue._claim_candidates(q, at, max_messages, found_ids)
        end;
        exit when ids <> '{}' or has_adopted or not pgqueue._adopt_messages(q);
        has_adopted := true;
        found_ids := null;
    end loop;
end;
$$;

create or replace function pgqueue._lock_candidates(
    queue_name text, max_messages int, visibility_timeout interval, is_receive boolean default false, out ids bigint[],
    out kind bigint
)
language plpgsql volatile as $$
declare
    at timestamptz;
    fresh_register regclass;
    resume_register regclass;
    sweep_register regclass;
    fresh_from_id bigint;
    is_fast_path boolean;
    found_ids bigint[];
    slow record;
begin
    if not pgqueue._lock_queue(queue_name) then
        perform pgqueue._raise('queue_not_found', queue_name);
    end if;

    at := pgqueue._now();
    -- The common case with few expressions, as a transaction has to prepare each of them: the arguments are valid, the
    -- queue is not paused, no message is due, and enough messages are ready from fresh_from_id on. All other cases are
    -- handled below. While claims find enough, a sweep may be late by 5 s. Otherwise, with a thousand queues, each
    -- claim would sweep, as the last claim of its queue is long ago, and a sweep costs three times as much as the rest
    -- of the claim.
    select
        w.fresh_from_id, pg_sequence_last_value(w.fresh_from_id),
        w.paused_at is null and coalesce(w.group_limit, w.max_in_flight, w.rate_limit) is null
            and not w.priorities and max_messages between 1 and 10000
            and coalesce(pgqueue._is_interval_between(_lock_candidates.visibility_timeout, '1 s', '43200 s'), true)
            and pg_sequence_last_value(w.first_due_at) > pgqueue._to_micros(at)
            and pg_sequence_last_value(w.next_sweep_at) - pgqueue._to_micros(at) between -5000000 and 15000000,
        w.kind, w.sweep_resume_id, w.next_sweep_at
    into fresh_register, fresh_from_id, is_fast_path, kind, resume_register, sweep_register
    from pgqueue.queues w
    where w.name = queue_name collate "C" and pg_relation_filenode(w.fresh_from_id) is not null;
    if is_fast_path then
        if kind is not null then
            ids := array(
                select m.id from pgqueue.messages m
                where m.kind = _lock_candidates.kind and m.queue_name = _lock_candidates.queue_name collate "C" and m.id >= fresh_from_id
                    and (pgqueue._is_ready(m, at) or m.visible_at <= at and pgqueue._is_walk_over(at))
                order by m.id limit max_messages for update skip locked
            );
        else
            ids := array(
                select m.id from pgqueue.messages_shared m
                where m.queue_name = _lock_candidates.queue_name collate "C" and m.id >= fresh_from_id
                    and (pgqueue._is_ready(m, at) or m.visible_at <= at and pgqueue._is_walk_over(at))
                order by m.id limit max_messages for update skip locked
            );
        end if;
        if not pgqueue._is_walk_over(at) then
            -- If no message was found, the register is unchanged.
            fresh_from_id := setval(fresh_register, ids[cardinality(ids)] + (ids[cardinality(ids)] < 9223372036854775807)::int);
            if cardinality(ids) = max_messages then
                return;
            -- Too few messages are ready from fresh_from_id on. For a second after a short full pass, there is nothing
            -- to sweep if no other message is visible and none was requeued.
            elsif kind is null and not pgqueue._has_fixed_snapshot() and pg_sequence_last_value(resume_register) = 1
                and pg_sequence_last_value(sweep_register) > pgqueue._to_micros(at) - 1000000
                and pgqueue._are_only_visible(queue_name, ids)
            then
                return;
            end if;
            found_ids := ids;
        -- Null if too few messages were found.
        elsif setval(fresh_register, ids[max_messages] + (ids[max_messages] < 9223372036854775807)::int) is not null then
            ids := pgqueue._keep_ready(pgqueue._get_locked_queue(queue_name), ids, at);
            return;
        end if;
    end if;

    slow := pgqueue._lock_candidates_slowly(queue_name, max_messages, visibility_timeout, is_receive, found_ids);
    ids := slow.ids;
    kind := slow.kind;
end;
$$;

create or replace function pgqueue._claim_special(
    queue_name text, kind bigint, candidate_ids bigint[], visibility_timeout interval, claimed_by text
) returns setof pgqueue.message
language plpgsql volatile as $$
begin
    if cardinality(candidate_ids) > 1 and candidate_ids <> pgqueue._array_except(candidate_ids, '{}') and exists (
        select from pgqueue.queues q where q.name = _claim_special.queue_name collate "C" and q.priorities
    ) then
        -- A full join is a hash join by any plan. A nested loop would compare each message with each id.
        return query
        select c.*
        from pgqueue._claim_special(
            queue_name, kind, pgqueue._array_except(candidate_ids, '{}'), visibility_timeout, claimed_by) c
        full join unnest(candidate_ids) with ordinality as o (id, place) on o.id = c.id
        order by o.place;
        return;
    end if;
    return query
    update pgqueue.messages m
    set visible_at = pgqueue._add_interval((select pgqueue._now()), coalesce(
            _claim_special.visibility_timeout,
            (select q.visibility_timeout from pgqueue.queues q where q.name = _claim_special.queue_name collate "C"))),
        attempt_count = m.attempt_count + 1,
        claimed_attempt = m.attempt_count + 1,
        claim_token = (select gen_random_uuid()),
        claimed_by = _claim_special.claimed_by,
        claimed_at = (select pgqueue._now())
    from pgqueue._lookup_keys(_claim_special.queue_name collate "C", candidate_ids) k
    where m.kind = _claim_special.kind
        and pgqueue._matches_key(m.queue_name, m.id, _claim_special.queue_name collate "C", k.names, k.ids, k.id)
    returning m.id, m.queue_name, m.payload, m.body, m.headers, m.message_id, m.attempt_count, m.max_attempts,
        m.enqueued_at, m.visible_at, m.expires_at, m.claimed_by, m.claim_token, m.last_error;
end;
$$;

create or replace function pgqueue.claim(
    queue_name pgqueue.queue_of_consumer,
    max_messages int default 1,
    visibility_timeout interval default null,
    claimed_by text default null
) returns setof pgqueue.message
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    candidates constant record := pgqueue._lock_candidates(queue_name, max_messages, visibility_timeout);
begin
    if candidates.ids = '{}' then
        return;
    elsif cardinality(candidates.ids) > 1 and candidates.kind is not null then
        return query
        select * from pgqueue._claim_special(queue_name, candidates.kind, candidates.ids, visibility_timeout, claimed_by);
        return;
    elsif candidates.kind is not null then
        -- With the function, a claim of one message takes a twentieth longer.
        return query
        update pgqueue.messages m
        set visible_at = pgqueue._add_interval((select pgqueue._now()), coalesce(
                claim.visibility_timeout,
                (select q.visibility_timeout from pgqueue.queues q where q.name = claim.queue_name collate "C"))),
            attempt_count = m.attempt_count + 1,
            claimed_attempt = m.attempt_count + 1,
            claim_token = (select gen_random_uuid()),
            claimed_by = claim.claimed_by,
            claimed_at = (select pgqueue._now())
        where m.kind = candidates.kind and m.queue_name = claim.queue_name collate "C" and m.id = candidates.ids[1]
        returning m.id, m.queue_name, m.payload, m.body, m.headers, m.message_id, m.attempt_count, m.max_attempts,
            m.enqueued_at, m.visible_at, m.expires_at, m.claimed_by, m.claim_token, m.last_error;
        return;
    end if;
    return query
    -- exchange contains the same statement. A shared function would make the claim of one message 7 per cent slower.
    update pgqueue.messages_shared m
    -- The clock is read again after all locks are taken. Otherwise a claim that had to wait could expire before it
    -- begins.
    set visible_at = pgqueue._add_interval((select pgqueue._now()), coalesce(
            claim.visibility_timeout,
            (select q.visibility_timeout from pgqueue.queues q where q.name = claim.queue_name collate "C"))),
        attempt_count = m.attempt_count + 1,
        claimed_attempt = m.attempt_count + 1,
        claim_token = (select gen_random_uuid()),
        claimed_by = claim.claimed_by,
        claimed_at = (select pgqueue._now())
    from pgqueue._lookup_keys(claim.queue_name collate "C", candidates.ids) k
    where pgqueue._matches_key(m.queue_name, m.id, claim.queue_name collate "C", k.names, k.ids, k.id)
    returning m.id, m.queue_name, m.payload, m.body, m.headers, m.message_id, m.attempt_count, m.max_attempts,
        m.enqueued_at, m.visible_at, m.expires_at, m.claimed_by, m.claim_token, m.last_error;
end;
$$;
comment on function pgqueue.claim is
'Claims up to max_messages (1 to 10000) ready messages and returns them by id. Each is hidden for visibility_timeout (1
s to 43200 s, default: the queue''s), its attempt is counted, and it gets a claim_token, which ack, nack and extend
require. claimed_by is a name for people to read. On its way a claim removes messages that have no attempts left or have
expired, to the dead letters if the queue keeps them, and makes due messages ready. It stops this work after a few MB,
about 50 ms, or half of statement_timeout, and later claims go on with it. So it can return fewer than max_messages
although more are due. In a queue with group_limit, a claim returns at most that many messages of a group, and messages
of at most 100 groups. In a queue with priorities, a claim takes the messages with the highest priority, and returns
them in the order in which it takes them; about one claim in ten first takes those with the priority whose next message
is the oldest, so that no message waits for ever. Waits only for drop_queue and, in a queue with max_in_flight, up to
100 ms for another claim that has not committed. Returns no row if no message is ready, the queue is paused, or a limit
of the queue allows none; next_due_at returns when to try again. Call it in autocommit mode: a rollback undoes the
claim. Raises 22023, PQ001.';
