-- A message comes back later, or dies.

create or replace function pgqueue._settle_failed(
    queue_name text, id bigint, claim_token uuid, delay interval, error text, rejected boolean
)
returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._find_queue(queue_name);
    m pgqueue.messages;
    due_at timestamptz;
begin
    perform pgqueue._check_claim(id, claim_token);
    if delay not between interval '0' and interval '10 years' then
        perform pgqueue._raise_invalid('delay', delay::text, 'an interval from 0 to 10 years, or null for the queue''s backoff');
    end if;

    delete from pgqueue.messages c
    where c.queue_name = q.name and c.id = _settle_failed.id
        and c.claim_token = _settle_failed.claim_token and c.claimed_attempt = c.attempt_count
    returning c.* into m;
    if not found then
        return false;
    end if;
    m.last_error := coalesce(left(error, 65536), m.last_error);

    if rejected or m.attempt_count >= m.max_attempts then
        if q.dlq_enabled then
            insert into pgqueue.dead_messages (
                id, queue_name, enqueued_at, died_at, attempt_count, max_attempts, expires_at, message_id,
                payload, body, headers, claimed_by, last_error, reason
            )
            values (
                m.id, m.queue_name, m.enqueued_at, at, m.attempt_count, m.max_attempts, m.expires_at, m.message_id,
                m.payload, m.body, m.headers, m.claimed_by, m.last_error,
                case when rejected then 'rejected' else 'attempts_exhausted' end
            )
            on conflict on constraint dead_messages_pkey do update
            set died_at = excluded.died_at, attempt_count = excluded.attempt_count, last_error = excluded.last_error,
                reason = excluded.reason;
        end if;
        return true;
    end if;

    due_at := at + coalesce(delay, pgqueue._backoff(q, m.attempt_count));
    insert into pgqueue.scheduled_messages (
        id, queue_name, due_at, enqueued_at, attempt_count, max_attempts, expires_at, message_id,
        payload, body, headers, claimed_by, last_error
    )
    values (
        m.id, m.queue_name, due_at, m.enqueued_at, m.attempt_count, m.max_attempts, m.expires_at, m.message_id,
        m.payload, m.body, m.headers, m.claimed_by, m.last_error
    );
    perform pgqueue._schedule_by(q, due_at);
    return true;
end;
$$;
comment on function pgqueue._settle_failed(text, bigint, uuid, interval, text, boolean) is
'What nack and reject share.';

create or replace function pgqueue.nack(
    queue_name text, id bigint, claim_token uuid, delay interval default null, error text default null
)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    return pgqueue._settle_failed(queue_name, id, claim_token, delay, error, false);
end;
$$;
comment on function pgqueue.nack(text, bigint, uuid, interval, text) is
'Gives a claimed message back after a failure, and returns true; false if the claim was lost. It is delivered again after delay (0 to 10 years), by default after the queue''s backoff; if its attempts are spent it goes to the dead letters with reason attempts_exhausted, or is deleted where the queue has none. error is kept as last_error, up to 65,536 characters. Raises 22023, PQ001.';

create or replace function pgqueue.reject(
    queue_name text, id bigint, claim_token uuid, error text default null
)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    return pgqueue._settle_failed(queue_name, id, claim_token, null, error, true);
end;
$$;
comment on function pgqueue.reject(text, bigint, uuid, text) is
'Gives a claimed message up at once, whatever attempts are left, and returns true; false if the claim was lost. It goes to the dead letters with reason rejected, or is deleted where the queue has none. error is kept as last_error, up to 65,536 characters. Raises 22023, PQ001.';
