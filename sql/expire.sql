-- Removes expired messages before a claim would pass over them.

create or replace function pgqueue.purge_expired(queue_name pgqueue.queue_of_admin, batch_size int default 10000)
returns int language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    expired refcursor;
    slice record;
    died int;
    all_died int := 0;
    purged int := 0;
    is_scheduled boolean := false;
begin
    if batch_size is null or batch_size not between 1 and 1000000 then
        perform pgqueue._raise_invalid('batch_size', batch_size::text, 'an integer from 1 to 1000000');
    end if;
    -- A message in flight is not removed, as its consumer may still acknowledge it.
    open expired for
        select m.id, null::tid as place, pgqueue._moved_bytes(m.payload, m.body, m.headers, m.transport_headers) as bytes
        from pgqueue.messages m
        where m.queue_name = q.name and m.id >= pgqueue._first_id_of(q.name) and m.visible_at <= at
            -- A generic plan expects that a range selects fewer rows than one comparison. Thus it uses an index on
            -- expires_at instead of the primary key.
            and m.expires_at between '-infinity' and at
            -- The same condition again, in the form of the index on the relation of a transport.
            and m.expires_at at time zone 'UTC' between '-infinity' and at at time zone 'UTC'
        order by m.expires_at limit batch_size for update skip locked;
    loop
        select f.* into slice from pgqueue._fetch_slice(expired) f;
        if slice.ids = '{}' then
            exit when is_scheduled;
            -- Scheduled messages are deleted by ctid. By key, a plan could use another index and read the whole queue
            -- through it for each.
            close expired;
            open expired for
                select
                    null::bigint as id, s.ctid as place,
                    pgqueue._moved_bytes(s.payload, s.body, s.headers, s.transport_headers) as bytes
                from pgqueue.scheduled_messages s
                where s.queue_name = q.name and s.expires_at <= at
                order by s.expires_at limit batch_size - purged for update skip locked;
            is_scheduled := true;
            continue;
        end if;
        with gone_messages as (
            delete from pgqueue.messages m
            using pgqueue._lookup_keys(q.name, slice.ids) k
            where pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
            returning m.*
        ),
        gone_scheduled as (
            delete from pgqueue.scheduled_messages s where s.ctid = any (slice.places) returning s.*
        ),
        -- As columns: _remove_spent_messages says why.
        gone as (
            select g.* from gone_messages g
            union all
            select (pgqueue._as_message(row(g.*)::pgqueue.scheduled_messages)).* from gone_scheduled g
        )
        insert into pgqueue.dead_messages
        select (pgqueue._as_dead_letter(row(g.*)::pgqueue.messages, at, null)).* from gone g
        where pgqueue._keeps_dead_letter(q, row(g.*)::pgqueue.messages)
        -- The same conflict as in _add_dead_letter.
        on conflict on constraint dead_messages_pkey do update
        set died_at = excluded.died_at, attempt_count = excluded.attempt_count, headers = excluded.headers,
            last_error = excluded.last_error, reason = excluded.reason;
        get diagnostics died = row_count;
        all_died := all_died + died;
        purged := purged + cardinality(slice.ids);
        exit when not pgqueue._has_time();
    end loop;
    close expired;
    perform pgqueue._count('dead', q.name, 1) from generate_series(1, all_died);
    if all_died > 0 then
        perform pgqueue._wake_dead_letter_queue(q);
    end if;
    return purged;
end;
$$;
comment on function pgqueue.purge_expired is
'Removes up to batch_size (1 to 1000000) expired messages that are not in flight, and returns how many. They go to the
dead letters if the queue has dead_letter_expired. Repeat the call until it returns 0: it ends when half of
statement_timeout has passed, too. It reads the whole queue unless pgqueue.messages has an index on expires_at; doctor
reports a missing index with the statement that creates it. Claims skip expired messages in any case. Raises 22023,
PQ001.';
