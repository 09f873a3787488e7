-- Extends claims: sets a new end for claims that the caller still holds.

create or replace function pgqueue._check_claim(id bigint, claim_token uuid, ids bigint[] default '{}') returns void
language plpgsql stable as $$
begin
    if id is null or ids is null then
        perform pgqueue._raise_invalid(case when id is null then 'id' else 'ids' end, null,
            case when id is null then 'the id of a claimed message' else 'an array of ids of claimed messages' end);
    end if;
    if claim_token is null then
        perform pgqueue._raise_invalid('claim_token', null, 'the claim_token that claim returned');
    end if;
end;
$$;

create or replace function pgqueue.extend(
    queue_name pgqueue.queue_of_consumer, id bigint, claim_token uuid, visibility_timeout interval default null
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    until timestamptz;
begin
    perform pgqueue._check_claim(id, claim_token), pgqueue._check_visibility_timeout(visibility_timeout);
    if q.kind is null then
        until := pgqueue._add_interval(pgqueue._now(), coalesce(visibility_timeout, q.visibility_timeout));
        update pgqueue.messages_shared m
        set visible_at = case when m.visible_at <= until or pgqueue._wake_if_waiting(q, pgqueue._now()) is not null then until end
        where m.queue_name = q.name and m.id = extend.id
            and pgqueue._is_claimed_by(m, extend.claim_token);
    else
        perform from pgqueue._extend_held(q, array[id], claim_token, visibility_timeout);
    end if;
    return found;
end;
$$;
comment on function pgqueue.extend is
'Extends the claim of a message: it ends visibility_timeout (1 s to 43200 s, default: the queue''s) after this call.
Returns true, or false if the claim was lost. In a queue with max_in_flight or group_limit a claim that has
ended is lost. If the claim ends earlier than before, waiting consumers are notified. Raises 22023, PQ001.';

-- Returns by id the messages whose claim is still valid: the claim with this token or, if claim_token is null, the
-- claim that the caller has locked.
create or replace function pgqueue._extend_held(
    q pgqueue.queues, ids bigint[], claim_token uuid, visibility_timeout interval
) returns setof bigint
language plpgsql volatile as $$
declare
    until timestamptz;
begin
    if coalesce(q.max_in_flight, q.group_limit) is not null then
        -- The clock is read after the rows are locked. From then on claims count the messages as in flight.
        perform from pgqueue.messages m, pgqueue._lookup_keys(q.name, ids) k
        where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
            and pgqueue._is_claimed_by(m, coalesce(_extend_held.claim_token, m.claim_token))
        for no key update of m;
    end if;
    until := pgqueue._add_interval(pgqueue._now(), coalesce(visibility_timeout, q.visibility_timeout));
    if q.kind is null then
        return query
        update pgqueue.messages_shared m
        set visible_at = case when m.visible_at <= until or pgqueue._wake_if_waiting(q, pgqueue._now()) is not null then until end
        from pgqueue._lookup_keys(q.name, ids) k
        where pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
            and pgqueue._is_claimed_by(m, coalesce(_extend_held.claim_token, m.claim_token))
        returning m.id;
        return;
    end if;
    return query
    update pgqueue.messages m
    set visible_at = case when m.visible_at <= until or pgqueue._wake_if_waiting(q, pgqueue._now()) is not null then until end
    from pgqueue._lookup_keys(q.name, ids) k
    where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
        and pgqueue._is_claimed_by(m, coalesce(_extend_held.claim_token, m.claim_token))
        -- Another claim may have taken the place of one that has ended.
        and (coalesce(q.max_in_flight, q.group_limit) is null or m.visible_at > (select pgqueue._now()))
    returning m.id;
end;
$$;

create or replace function pgqueue.extend_batch(
    queue_name pgqueue.queue_of_consumer, ids bigint[], claim_token uuid, visibility_timeout interval default null
) returns setof bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
begin
    perform pgqueue._check_claim(0, claim_token, ids), pgqueue._check_visibility_timeout(visibility_timeout);
    return query select pgqueue._extend_held(q, ids, claim_token, visibility_timeout);
end;
$$;
comment on function pgqueue.extend_batch is
'Extends the claims of messages of one claim as extend does, and returns by id the messages whose claim is still valid.
The claims of the others were lost. Raises 22023, PQ001.';

create or replace function pgqueue.extend_claims(
    queue_name pgqueue.queue_of_consumer, ids bigint[], claim_tokens uuid[], visibility_timeout interval default null
) returns setof pgqueue.settled_claim
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    claims constant record := pgqueue._lock_claims(q, ids, claim_tokens);
begin
    perform pgqueue._check_visibility_timeout(visibility_timeout);
    return query
    select c.id, c.is_held and e.id is not null
    from unnest(ids, claims.held) with ordinality as c (id, is_held, place)
    left join pgqueue._extend_held(q, claims.held_ids, null, visibility_timeout) as e (id) on e.id = c.id
    order by c.place;
end;
$$;
comment on function pgqueue.extend_claims is
'Extends claims of different tokens as extend does: that of ids[1] with claim_tokens[1], and so on. Returns for each of
them, in this order, whether it was extended; false if it was lost. Both arrays have the same length and no nulls.
Raises 22023, PQ001.';
