-- Removes expired messages before a claim would pass over them.

create or replace function pgqueue.purge_expired(queue_name pgqueue.queue_of_admin, batch_size int default 10000)
returns int language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    expired refcursor;
    places tid[];
    gone pgqueue.messages;
    removed int;
    died int := 0;
    purged int := 0;
begin
    perform pgqueue._require(
        batch_size between 1 and 1000000, 'batch_size', batch_size::text, 'an integer from 1 to 1000000');
    -- A message in flight is not removed, as its consumer may still acknowledge it.
    open expired for
        -- A thousand at a time: _remove_spent_messages divides them by their size.
        select m.id, null::tid as place, 132::bigint as bytes from pgqueue.messages m
        where (m.kind = q.kind or m.kind is null) and m.queue_name = q.name
            and m.id >= (pgqueue._sweep_state_of(q.name, '-infinity')).first_id and m.visible_at <= at
            -- A generic plan expects that a range selects fewer rows than one comparison. Thus it uses an index on
            -- expires_at instead of the primary key.
            and m.expires_at between '-infinity' and at
            -- The same condition again, in the form of the index on the relation of a transport.
            and m.expires_at at time zone 'UTC' between '-infinity' and at at time zone 'UTC'
        order by m.expires_at limit batch_size for update skip locked;
    loop
        -- On a full disk it removes none.
        removed := (pgqueue._remove_spent_messages(q, (pgqueue._fetch_slice(expired)).ids, at, null)).removed;
        exit when removed = 0;
        purged := purged + removed;
        exit when not pgqueue._has_time();
    end loop;
    close expired;
    open expired for
        select s.id, s.ctid as place, pgqueue._moved_bytes(s.payload, s.body, s.headers, s.transport_headers) as bytes
        from pgqueue.scheduled_messages s
        where s.queue_name = q.name and s.expires_at <= at
        order by s.expires_at limit batch_size - purged for update skip locked;
    while purged = 0 or pgqueue._has_time() loop
        places := (pgqueue._fetch_slice(expired)).places;
        exit when places = '{}';
        -- Deleted by ctid. By key, a plan could use another index and read the whole queue through it for each.
        for gone in
            delete from pgqueue.scheduled_messages s where s.ctid = any (places) returning (pgqueue._as_message(s)).*
        loop
            purged := purged + 1;
            continue when not pgqueue._keeps_dead_letter(q, gone);
            died := died + 1;
            perform pgqueue._add_dead_letter(gone, at, null);
        end loop;
    end loop;
    close expired;
    perform pgqueue._count_dead(q, died);
    return purged;
end;
$$;
comment on function pgqueue.purge_expired is
'Removes up to batch_size (1 to 1000000) expired messages that are not in flight, and returns how many. They go to the
dead letters if the queue has dead_letter_expired. Repeat the call until it returns 0: it ends when half of
statement_timeout has passed, too. It reads the whole queue unless pgqueue.messages has an index on expires_at; doctor
reports a missing index with the statement that creates it. Claims skip expired messages in any case. Raises 22023,
PQ001.';
