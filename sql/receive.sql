-- A message is taken inside the taker's transaction: a commit removes it, a rollback puts it back.

create or replace function pgqueue.receive(queue_name text, max_messages int default 1)
returns setof pgqueue.message
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
as $$
declare
    picks constant bigint[] := pgqueue._grab(queue_name, max_messages, null);
begin
    return query
    delete from pgqueue.messages m
    where m.queue_name = receive.queue_name and m.id = any (picks)
    returning m.id, m.queue_name, m.payload, m.body, m.headers, m.message_id, m.attempt_count + 1, m.max_attempts,
        m.enqueued_at, m.visible_at, m.expires_at, m.claimed_by, m.claim_token, m.last_error;
end;
$$;
comment on function pgqueue.receive(text, int) is
'Deletes up to max_messages (1 to 10000) messages in the caller''s transaction and returns them, by id. A rollback returns each to its place, with its attempts as they were; until the end of the transaction nobody else is given it. Drops what expired. Waits for nobody but a drop_queue; returns no row where none is ready or the queue is paused. Raises 22023, PQ001.';
