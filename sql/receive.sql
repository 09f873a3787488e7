-- Receives messages inside the caller's transaction: a commit removes them, a rollback returns them to the queue.

create or replace function pgqueue.receive(queue_name pgqueue.queue_of_consumer, max_messages int default 1)
returns setof pgqueue.message language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    candidates constant record := pgqueue._lock_candidates(queue_name, max_messages, null, true);
    at timestamptz;
    is_filed boolean;
begin
    -- All candidates are locked, so all of them are deleted below.
    if pgqueue._count('acknowledged', queue_name, cardinality(candidates.ids)) >= 0
        and pgqueue._lock_queue_without_archive(queue_name)
    then
        if candidates.kind is null then
            return query
            delete from pgqueue.messages_shared m
            using pgqueue._lookup_keys(receive.queue_name collate "C", candidates.ids) k
            where pgqueue._matches_key(m.queue_name, m.id, receive.queue_name collate "C", k.names, k.ids, k.id)
            returning m.id, m.queue_name, m.payload, m.body, m.headers, m.message_id, m.attempt_count + 1, m.max_attempts,
                m.enqueued_at, m.visible_at, m.expires_at, m.claimed_by, m.claim_token, m.last_error;
            return;
        end if;
    else
        at := pgqueue._finish_time();
        is_filed := coalesce(pgqueue._has_day_partition(pgqueue._utc_day(at)), false);
    end if;
    -- is_filed is null if the queue keeps no archive.
    return query
    with gone as (
        select m.* from pgqueue._delete_messages(receive.queue_name collate "C", candidates.kind, candidates.ids) m
    ),
    done as (
        select
            g.id, g.queue_name, g.enqueued_at, null::timestamptz, at, g.attempt_count + 1, g.max_attempts, g.expires_at,
            g.message_id, g.payload, g.body, g.headers, g.claimed_by, g.last_error
        from gone g
    ),
    filed as (
        insert into pgqueue.archived_messages select d.* from done d where is_filed
    ),
    unfiled as (
        insert into pgqueue.unfiled_messages select d.* from done d where not is_filed
    )
    select
        g.id, g.queue_name, g.payload, g.body, g.headers, g.message_id, g.attempt_count + 1, g.max_attempts,
        g.enqueued_at, g.visible_at, g.expires_at, g.claimed_by, g.claim_token, g.last_error
    from gone g;
end;
$$;
comment on function pgqueue.receive is
'Deletes up to max_messages (1 to 10000) ready messages in the caller''s transaction and returns them by id. A rollback
returns them to the queue with their attempt_count unchanged. Until the transaction ends, no other session gets them. On
its way the call removes messages that have no attempts left or have expired, to the dead letters if the queue keeps
them. If the queue has archive_for, received messages go to the archive. Waits only for drop_queue. Returns no row if no
message is ready, the queue is paused, or its rate_limit allows none. A rollback does not give back what rate_limit has
counted. A queue with max_in_flight is refused with 22023, because other sessions cannot count what was received. Raises
22023, PQ001.';
