-- A message leaves: its work is done.

create or replace function pgqueue.ack(queue_name text, id bigint, claim_token uuid)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    if pgqueue._lock_queue_without_archive(queue_name) then
        delete from pgqueue.messages m
        where m.queue_name = ack.queue_name collate "C" and m.id = ack.id
            and pgqueue._is_claimed_by(m, ack.claim_token);
        if found then
            return true;
        end if;
    elsif pgqueue._ack_to_archive(queue_name, array[id], claim_token) <> '{}' then
        return true;
    end if;
    perform pgqueue._check_claim(id, claim_token);
    perform pgqueue._get_locked_queue(queue_name);
    return false;
end;
$$;
comment on function pgqueue.ack(text, bigint, uuid) is
'Removes a message whose work is done, to the archive where the queue has archive_for, and returns true; false if the claim was lost: it ran out and somebody else has claimed, buried or removed the message. Raises 22023, PQ001.';

create or replace function pgqueue.ack_batch(queue_name text, ids bigint[], claim_token uuid)
returns int
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    acked int;
begin
    if pgqueue._lock_queue_without_archive(queue_name) then
        delete from pgqueue.messages m
        using pgqueue._lookup_keys(ack_batch.queue_name collate "C", ids) k
        where pgqueue._matches_key(m.queue_name, m.id, ack_batch.queue_name collate "C", k.names, k.ids, k.id)
            and pgqueue._is_claimed_by(m, ack_batch.claim_token);
        get diagnostics acked = row_count;
    else
        acked := cardinality(pgqueue._ack_to_archive(queue_name, ids, claim_token));
    end if;
    if acked = 0 then
        if ids is null then
            perform pgqueue._raise_invalid('ids', null, 'an array of ids of claimed messages');
        end if;
        perform pgqueue._check_claim(0, claim_token);
        perform pgqueue._get_locked_queue(queue_name);
    end if;
    return acked;
end;
$$;
comment on function pgqueue.ack_batch(text, bigint[], uuid) is
'Removes the messages of one claim whose work is done, as ack does, and returns how many were still the caller''s. Raises 22023, PQ001.';
