-- Acknowledges processed messages and claims the next ones, in one call and one commit.

create or replace function pgqueue.exchange(
    queue_name pgqueue.queue_of_consumer,
    ids bigint[],
    claim_token uuid,
    max_messages int default 1,
    visibility_timeout interval default null,
    claimed_by text default null
) returns setof pgqueue.exchanged
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    given constant int := coalesce(cardinality(ids), 0);
    acked bigint[];
    candidates record;
begin
    if given > 0 then
        if claim_token is null then
            perform pgqueue._check_claim(0, claim_token);
        end if;
        if pgqueue._lock_queue_without_archive(queue_name) then
            with gone as (
                delete from pgqueue.messages_shared m
                using pgqueue._lookup_keys(exchange.queue_name collate "C", ids) k
                where pgqueue._matches_key(m.queue_name, m.id, exchange.queue_name collate "C", k.names, k.ids, k.id)
                    and pgqueue._is_claimed_by(m, exchange.claim_token)
                returning m.id
            )
            select array_agg(g.id) into acked from gone g;
            -- All claims of a plain queue were lost, or the messages are in the partition of another kind.
            acked := coalesce(
                acked, array(
                    select d.id from pgqueue._delete_messages(
                        exchange.queue_name collate "C",
                        (select q.kind from pgqueue.queues q where q.name = exchange.queue_name collate "C"), ids, claim_token) d));
        else
            acked := pgqueue._ack_to_archive(queue_name, ids, claim_token);
        end if;
        if pgqueue._count('acknowledged', queue_name, cardinality(acked)) is distinct from given then
            return query
            select
                i, exchange.queue_name::text, null::jsonb, null::bytea, null::jsonb, null::uuid, null::int, null::int,
                null::timestamptz, null::timestamptz, null::timestamptz, null::text, null::uuid, null::text, true
            from unnest(pgqueue._array_except(ids, acked)) as i
            where i is not null;
        end if;
    end if;
    candidates := pgqueue._lock_candidates(queue_name, max_messages, visibility_timeout);
    if candidates.kind is not null then
        return query
        select c.*, false from pgqueue._claim_special(queue_name, candidates.kind, candidates.ids, visibility_timeout, claimed_by) c;
        return;
    end if;
    return query
    update pgqueue.messages_shared m
    -- The clock is read again after all locks are taken. Otherwise a claim that had to wait could expire before it
    -- begins.
    set visible_at = pgqueue._add_interval((select pgqueue._now()), coalesce(
            exchange.visibility_timeout,
            (select q.visibility_timeout from pgqueue.queues q where q.name = exchange.queue_name collate "C"))),
        attempt_count = m.attempt_count + 1,
        claimed_attempt = m.attempt_count + 1,
        claim_token = (select gen_random_uuid()),
        claimed_by = exchange.claimed_by,
        claimed_at = (select pgqueue._now())
    from pgqueue._lookup_keys(exchange.queue_name collate "C", candidates.ids) k
    where pgqueue._matches_key(m.queue_name, m.id, exchange.queue_name collate "C", k.names, k.ids, k.id)
    returning m.id, m.queue_name, m.payload, m.body, m.headers, m.message_id, m.attempt_count, m.max_attempts,
        m.enqueued_at, m.visible_at, m.expires_at, m.claimed_by, m.claim_token, m.last_error, false;
end;
$$;
comment on function pgqueue.exchange is
'Acknowledges ids, all claimed with claim_token, as ack does, and claims up to max_messages as claim does, in one call.
Returns first a row with lost = true, id and queue_name for each id whose claim was lost, then the claimed messages with
lost = false, in the order of claim. ids may be empty or null; claim_token may then be null, too. Raises 22023, PQ001.';
