-- Returns claimed messages: after a failure they are scheduled for a retry or become dead letters. A consumer that
-- stops releases its messages.

create or replace function pgqueue._check_failure(id bigint, delay interval, headers jsonb) returns void
language plpgsql stable as $$
begin
    if id is null then
        perform pgqueue._raise_invalid('id', null, 'the id of a message');
    end if;
    if not pgqueue._is_interval_between(delay, '0', '3652.5 days') then
        perform pgqueue._raise_invalid('delay', delay::text, 'an interval from 0 to 10 years (3652.5 days), or null for the queue''s backoff');
    end if;
    if jsonb_typeof(headers) <> 'object' then
        perform pgqueue._raise_invalid('headers', left(headers::text, 200), 'a JSON object, or null for none');
    end if;
end;
$$;

create or replace function pgqueue._retry_or_dead_letter(
    q pgqueue.queues, m pgqueue.messages, at timestamptz, delay interval, error text, headers jsonb, final_reason text
) returns void
language plpgsql volatile as $$
declare
    due_at timestamptz;
begin
    -- The caller has deleted the message from messages.
    m.last_error := coalesce(left(error, 65536), m.last_error);
    m.headers := pgqueue._merged_headers(m.headers, _retry_or_dead_letter.headers);
    perform pgqueue._count('failed', q.name, 1);

    if final_reason is not null or m.attempt_count >= m.max_attempts then
        if q.dlq_enabled then
            perform pgqueue._add_dead_letter(m, at, coalesce(final_reason, 'attempts_exhausted')), pgqueue._count_dead(q, 1);
        end if;
        return;
    end if;

    due_at := pgqueue._add_interval(at, coalesce(delay, interval '1 s' * (
        least(
            date_part('epoch', q.backoff_max),
            date_part('epoch', q.backoff_base) * q.backoff_factor ^ least(m.attempt_count - 1, 100)
        ) * (1 - q.backoff_jitter * random()))));
    if q.group_limit = 1 and m.headers ->> 'pgqueue.group' is not null then
        -- The message stays in messages, hidden until it is due, so that the later ones of its group wait.
        m.visible_at := due_at;
        m.claim_token := null;
        m.claimed_attempt := m.attempt_count;
        m.kind := q.kind;
        insert into pgqueue.messages select m.*;
        perform pgqueue._announce_due(q, due_at);
        return;
    end if;
    insert into pgqueue.scheduled_messages
    select (pgqueue._as_scheduled(m, pgqueue._clamp_due_at(due_at), m.attempt_count)).*;
    perform pgqueue._announce_due(q, due_at);
end;
$$;

create or replace function pgqueue._nack_or_reject(
    queue_name text, id bigint, claim_token uuid, delay interval, error text, headers jsonb, final_reason text
) returns boolean
language plpgsql volatile as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    m pgqueue.messages;
begin
    perform pgqueue._check_claim(id, claim_token);
    perform pgqueue._check_failure(id, delay, headers);
    if q.kind is null then
        delete from pgqueue.messages_shared c
        where c.queue_name = q.name and c.id = _nack_or_reject.id
            and pgqueue._is_claimed_by(c, _nack_or_reject.claim_token)
        returning c.* into m;
    else
        delete from pgqueue.messages c
        where c.kind = q.kind and c.queue_name = q.name and c.id = _nack_or_reject.id
            and pgqueue._is_claimed_by(c, _nack_or_reject.claim_token)
        returning c.* into m;
    end if;
    if not found then
        return false;
    end if;
    perform pgqueue._retry_or_dead_letter(q, m, at, delay, error, headers, final_reason);
    return true;
end;
$$;

create or replace function pgqueue.nack(
    queue_name pgqueue.queue_of_consumer,
    id bigint,
    claim_token uuid,
    delay interval default null,
    error text default null,
    headers jsonb default null
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
begin
    return pgqueue._nack_or_reject(queue_name, id, claim_token, delay, error, headers, null);
end;
$$;
comment on function pgqueue.nack is
'Returns a claimed message to the queue after a failure, and returns true; false if the claim was lost. The message is
delivered again after delay (0 to 10 years, default: the queue''s backoff). If no attempts are left, it goes to the dead
letters with reason attempts_exhausted, or is deleted if dlq_enabled of the queue is false. error is kept as last_error,
up to 65,536 characters. headers (a JSON object) is merged into the headers of the message and replaces headers of the
same name. The message keeps its own headers unchanged if the result exceeds 64 KB, or if they are not an object. Raises
22023, PQ001.';

create or replace function pgqueue.nack_claims(
    queue_name pgqueue.queue_of_consumer,
    ids bigint[],
    claim_tokens uuid[],
    delay interval default null,
    error text default null,
    headers jsonb default null
) returns setof pgqueue.settled_claim
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    claims constant record := pgqueue._lock_claims(q, ids, claim_tokens);
    m pgqueue.messages;
begin
    perform pgqueue._check_failure(0, delay, headers);
    for m in
        select d.* from pgqueue._delete_messages(q.name, q.kind, claims.held_ids) d
    loop
        perform pgqueue._retry_or_dead_letter(q, m, at, delay, error, headers, null);
        -- As in release, each message gets a due time of its own.
        at := at + interval '1 microsecond';
    end loop;
    return query select * from unnest(ids, claims.held);
end;
$$;
comment on function pgqueue.nack_claims is
'Returns messages of different claims to the queue after a failure, as nack does: ids[1] with claim_tokens[1], and so
on. Returns for each of them, in this order, true; false if its claim was lost. delay, error and headers apply to all;
without a delay each message gets the backoff of its own attempt. Both arrays have the same length and no nulls. Raises
22023, PQ001.';

create or replace function pgqueue.reject(
    queue_name pgqueue.queue_of_consumer,
    id bigint,
    claim_token uuid,
    error text default null,
    headers jsonb default null,
    reason text default 'rejected'
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
begin
    -- Callers cannot set the other reasons, as those state facts that pgqueue determines.
    perform pgqueue._require(reason in ('rejected', 'attempts_exhausted'), 'reason', reason, 'rejected or attempts_exhausted');
    return pgqueue._nack_or_reject(queue_name, id, claim_token, null, error, headers, reason);
end;
$$;
comment on function pgqueue.reject is
'Gives up a claimed message at once, even if attempts are left, and returns true; false if the claim was lost. The
message goes to the dead letters with reason, or is deleted if dlq_enabled of the queue is false. reason is rejected, or
attempts_exhausted if the caller counts attempts by its own rules and none is left. error and headers are kept as by
nack. Raises 22023, PQ001.';

create or replace function pgqueue.record_failure(
    queue_name pgqueue.queue_of_consumer,
    id bigint,
    attempt_count int,
    delay interval default null,
    error text default null,
    headers jsonb default null
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    m pgqueue.messages;
begin
    perform pgqueue._check_failure(id, delay, headers);
    perform pgqueue._require(
        attempt_count >= 1, 'attempt_count', attempt_count::text, 'the attempt_count that receive returned, from 1');
    delete from pgqueue.messages c
    where c.queue_name = q.name and c.id = (
        select f.id from pgqueue.messages f
        where f.queue_name = q.name and f.id = record_failure.id
            and f.attempt_count = record_failure.attempt_count - 1 and f.visible_at <= at
        for update skip locked)
    returning c.* into m;
    if not found then
        -- If the message was scheduled and came due, the transaction that rolled back had moved it from here.
        delete from pgqueue.scheduled_messages c
        where c.ctid = (
            select f.ctid from pgqueue.scheduled_messages f
            where f.queue_name = q.name and f.id = record_failure.id
                and f.attempt_count = record_failure.attempt_count - 1 and f.due_at <= at
            for update skip locked)
        returning (pgqueue._as_message(c)).* into m;
        if not found then
            return false;
        end if;
        if q.group_limit = 1 then
            -- A message of a group goes to messages, under an id that sweeps may have passed.
            insert into pgqueue.requeued_messages (queue_name, check_at, id) select q.name, (select pgqueue._now()), m.id;
        end if;
    end if;
    m.attempt_count := record_failure.attempt_count;
    perform pgqueue._retry_or_dead_letter(q, m, at, delay, error, headers, null);
    return true;
end;
$$;
comment on function pgqueue.record_failure is
'Records a failed attempt whose transaction was rolled back (a receive, or a claim that was never committed), and
returns true: the message is scheduled for a retry or goes to the dead letters. delay, error and headers are as in nack.
attempt_count is that of the failed attempt, as receive returned it (from 1). Returns false and does nothing if the
message is gone, claimed, or locked by another transaction, or if an attempt was counted since. Does not wait for that
transaction. Raises 22023, PQ001.';

-- Returns how many of the claims were still valid: those with this token or, if claim_token is null, those that the
-- caller has locked.
create or replace function pgqueue._release_held(q pgqueue.queues, ids bigint[], claim_token uuid, at timestamptz)
returns int language plpgsql volatile as $$
declare
    released int;
begin
    if q.group_limit is not null then
        -- In the other table the messages would be behind later ones of their group until a claim moves them back.
        update pgqueue.messages m
        set visible_at = at, attempt_count = m.attempt_count - 1, claimed_attempt = m.attempt_count - 1,
            claim_token = null
        from pgqueue._lookup_keys(q.name, ids) k
        where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
            and pgqueue._is_claimed_by(m, coalesce(_release_held.claim_token, m.claim_token));
        get diagnostics released = row_count;
        if released > 0 then
            perform pgqueue._wake_if_waiting(q, at);
        end if;
        return released;
    end if;
    with given_back as (
        select m from pgqueue._delete_messages(q.name, q.kind, ids, _release_held.claim_token) m
    )
    insert into pgqueue.scheduled_messages
    select (pgqueue._as_scheduled(
        g.m, pgqueue._clamp_due_at(at + (g.n - cardinality(ids)) * interval '1 microsecond'), (g.m).attempt_count - 1)).*
    -- Each message gets a due time of its own. Claims continue at the last due time: with equal times they would scan
    -- the dead index entries of all messages already taken.
    from (select b.m, row_number() over () as n from given_back b) g;
    get diagnostics released = row_count;
    if released > 0 then
        perform pgqueue._announce_due(q, at + (1 - cardinality(ids)) * interval '1 microsecond');
    end if;
    return released;
end;
$$;

create or replace function pgqueue.release(queue_name pgqueue.queue_of_consumer, ids bigint[], claim_token uuid)
returns int language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
begin
    perform pgqueue._check_claim(0, claim_token, ids);
    return pgqueue._release_held(q, ids, claim_token, at);
end;
$$;
comment on function pgqueue.release is
'Returns unprocessed messages of one claim to the queue, for example when a consumer stops, and returns how many of
their claims were still valid. The messages are ready at once, and the attempt is not counted. Raises 22023, PQ001.';

create or replace function pgqueue.release_claims(
    queue_name pgqueue.queue_of_consumer, ids bigint[], claim_tokens uuid[]
) returns setof pgqueue.settled_claim
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    claims constant record := pgqueue._lock_claims(q, ids, claim_tokens);
begin
    perform pgqueue._release_held(q, claims.held_ids, null, at);
    return query select * from unnest(ids, claims.held);
end;
$$;
comment on function pgqueue.release_claims is
'Returns unprocessed messages of different claims to the queue, as release does: ids[1] with claim_tokens[1], and so on.
Returns for each of them, in this order, whether it was released; false if its claim was lost. Both arrays have the same
length and no nulls. Raises 22023, PQ001.';
