-- Acknowledges processed messages: deletes them or moves them to the archive if their claims are still valid.
-- A statement on messages locks and starts up each partition. So what every consumer calls looks into messages_shared
-- first, and into the partition of the queue only if it finds nothing there. The kind is a variable, as PostgreSQL 18
-- then opens no other partition.

create or replace function pgqueue.ack(queue_name pgqueue.queue_of_consumer, id bigint, claim_token uuid)
returns boolean language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    queue_kind bigint;
begin
    if pgqueue._lock_queue_without_archive(queue_name) then
        delete from pgqueue.messages_shared m
        where m.queue_name = ack.queue_name collate "C" and m.id = ack.id
            and pgqueue._is_claimed_by(m, ack.claim_token);
        if not found then
            queue_kind := (select q.kind from pgqueue.queues q where q.name = ack.queue_name collate "C");
            if queue_kind is not null then
                delete from pgqueue.messages m
                where m.kind = queue_kind and m.queue_name = ack.queue_name collate "C" and m.id = ack.id
                    and pgqueue._is_claimed_by(m, ack.claim_token);
            end if;
        end if;
        if found then
            return pgqueue._count('acknowledged', queue_name, 1) = 1;
        end if;
    elsif claim_token is not null and pgqueue._ack_to_archive(queue_name, array[id], claim_token) <> '{}' then
        return pgqueue._count('acknowledged', queue_name, 1) = 1;
    end if;
    perform pgqueue._check_claim(id, claim_token);
    perform pgqueue._get_locked_queue(queue_name);
    return false;
end;
$$;
comment on function pgqueue.ack is
'Acknowledges a message and returns true; false if the claim was lost. The message is deleted or, if the queue has
archive_for, moved to the archive. A claim is lost if it expired and the message was then claimed again, dead-lettered
or removed. Raises 22023, PQ001.';

create or replace function pgqueue.ack_batch(queue_name pgqueue.queue_of_consumer, ids bigint[], claim_token uuid)
returns int language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    queue_kind bigint;
    acked int;
begin
    if pgqueue._lock_queue_without_archive(queue_name) then
        delete from pgqueue.messages_shared m
        using pgqueue._lookup_keys(ack_batch.queue_name collate "C", ids) k
        where pgqueue._matches_key(m.queue_name, m.id, ack_batch.queue_name collate "C", k.names, k.ids, k.id)
            and pgqueue._is_claimed_by(m, ack_batch.claim_token);
        get diagnostics acked = row_count;
        if acked = 0 then
            queue_kind := (select q.kind from pgqueue.queues q where q.name = ack_batch.queue_name collate "C");
            if queue_kind is not null then
                delete from pgqueue.messages m
                using pgqueue._lookup_keys(ack_batch.queue_name collate "C", ids) k
                where m.kind = queue_kind
                    and pgqueue._matches_key(m.queue_name, m.id, ack_batch.queue_name collate "C", k.names, k.ids, k.id)
                    and pgqueue._is_claimed_by(m, ack_batch.claim_token);
                get diagnostics acked = row_count;
            end if;
        end if;
    else
        -- Null would stand for valid claims.
        acked := case when claim_token is null then 0 else cardinality(pgqueue._ack_to_archive(queue_name, ids, claim_token)) end;
    end if;
    if acked = 0 then
        perform pgqueue._check_claim(0, claim_token, ids);
        perform pgqueue._get_locked_queue(queue_name);
    end if;
    return pgqueue._count('acknowledged', queue_name, acked);
end;
$$;
comment on function pgqueue.ack_batch is
'Acknowledges messages of one claim as ack does, and returns how many of their claims were still valid. Raises 22023,
PQ001.';

create or replace function pgqueue.ack_claims(queue_name pgqueue.queue_of_consumer, ids bigint[], claim_tokens uuid[])
returns setof pgqueue.settled_claim language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    claims constant record := pgqueue._lock_claims(q, ids, claim_tokens);
begin
    if not pgqueue._lock_queue_without_archive(q.name) then
        perform pgqueue._ack_to_archive(q.name, claims.held_ids, null);
    elsif q.kind is not null then
        -- Not by _delete_messages: it also returns the rows, which would take an eighth of the time of this call.
        delete from pgqueue.messages m
        using pgqueue._lookup_keys(q.name, claims.held_ids) k
        where m.kind = q.kind and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id);
    else
        delete from pgqueue.messages_shared m
        using pgqueue._lookup_keys(q.name, claims.held_ids) k
        where pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id);
    end if;
    perform pgqueue._count('acknowledged', q.name, cardinality(claims.held_ids));
    return query select * from unnest(ids, claims.held);
end;
$$;
comment on function pgqueue.ack_claims is
'Acknowledges messages of different claims as ack does: ids[1] with claim_tokens[1], and so on. Returns for each of
them, in this order, whether it was acknowledged; false if its claim was lost. Both arrays have the same length and no
nulls. Waits for other transactions that have locked the messages, in the order of the ids. Raises 22023, PQ001.';
