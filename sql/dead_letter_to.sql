-- Sends the dead letters of a queue to another queue. Claims of the queue write them to dead_messages as ever. The
-- sweeps of the other queue take them from there and send them as new messages, so no claim waits for the other queue.

create or replace function pgqueue._on_queue_changed_dead_letter_to(before pgqueue.queues, after pgqueue.queues)
returns void language plpgsql volatile as $$
begin
    if after.name is null then
        -- A later queue of this name, perhaps of another owner, gets no dead letters.
        update pgqueue.queues o set dead_letter_to = null, updated_at = pgqueue._now() where o.dead_letter_to = before.name;
    end if;
    if after.dead_letter_to is null or after.dead_letter_to = before.dead_letter_to then
        return;
    end if;
    perform pgqueue._get_locked_queue(after.dead_letter_to);
    -- One session at a time. Two could close a cycle, as neither sees what the other has not committed. No queue has
    -- such a name.
    perform pg_advisory_xact_lock(pgqueue._lock_key('dead_letter_to of all queues'));
    perform pgqueue._require_current_snapshot(format('queue %L', after.name));
    if exists (
        with recursive chain as (
            select after.dead_letter_to as name
            union
            select t.dead_letter_to from chain c join pgqueue.queues t on t.name = c.name where t.dead_letter_to is not null
        )
        select from chain c where c.name = after.name
    ) then
        perform pgqueue._raise_invalid('dead_letter_to', after.dead_letter_to,
            format('a queue whose dead letters do not come back to queue %L', after.name));
    end if;
    -- The other queue gets the dead letters that exist already.
    perform pg_notify(pgqueue.channel(after.dead_letter_to), '');
end;
$$;

create or replace function pgqueue._on_queue_sweeping_dead_letter_to(q pgqueue.queues) returns void
language plpgsql volatile as $$
declare
    source pgqueue.queues;
    dead refcursor;
    places tid[];
    slices_left int := 8;
begin
    for source in select s.* from pgqueue.queues s where s.dead_letter_to = q.name order by s.name loop
        continue when not exists (
            select from pgqueue.dead_messages d
            where d.queue_name = source.name and d.id >= (pgqueue._sweep_state_of(source.name, '-infinity')).first_id);
        select d into dead from pgqueue._open_dead_letters(source.name, null, 1000, false) as d;
        while slices_left > 0 and pgqueue._has_time() loop
            places := (pgqueue._fetch_slice(dead)).places;
            exit when places = '{}';
            perform pgqueue._send_dead_letters(places, q);
            slices_left := slices_left - 1;
        end loop;
        close dead;
    end loop;
exception when disk_full then
    -- They stay in the other queues for a later sweep.
    null;
end;
$$;
