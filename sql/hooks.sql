-- What the core tells the rooms: a queue was created, altered or is being dropped, housekeeping is due, doctor collects
-- findings. A room takes part by a function of the right name, so that the core calls no room and a new room changes no
-- file of the core. All events are rare: finding the functions by their names costs each of them some 0.1 ms.

create or replace function pgqueue._handlers(event text)
returns setof regproc
language sql stable
as $$
    select p.oid::regproc
    from pg_catalog.pg_proc p
    -- By a range of names, which is a range of an index of the catalog.
    where p.proname >= event::name and p.proname < (event || '~')::name and p.pronamespace = 'pgqueue'::regnamespace
    order by p.proname
$$;
comment on function pgqueue._handlers(text) is
'The functions whose names begin with that of the event, in the order of their names.';

create or replace function pgqueue._tell_rooms(event text, q pgqueue.queues, before pgqueue.queues default null)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    call constant text := case event when 'queue_altered' then 'select %s($2, $1)' else 'select %s($1)' end;
    handler regproc;
begin
    for handler in select h from pgqueue._handlers(format('_on_%s_', event)) as h loop
        execute format(call, handler) using q, before;
    end loop;
end;
$$;
comment on function pgqueue._tell_rooms(text, pgqueue.queues, pgqueue.queues) is
'Calls _on_<event>_<room> of each room that has it: _on_queue_created_<room>(q), _on_queue_altered_<room>(before, after), and _on_queue_dropping_<room>(q), when the row of the queue is deleted and its messages are still there. The queue is locked, for queue_dropping exclusively.';

create or replace function pgqueue._do_housekeeping(at timestamptz)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    since_last constant interval :=
        at - pgqueue._from_micros(pg_sequence_last_value('pgqueue.next_housekeeping_at')) + interval '1 h';
    handler regproc;
begin
    -- Set first: one session an hour does it, even if that session fails.
    perform setval('pgqueue.next_housekeeping_at', pgqueue._to_micros(at + interval '1 h'));
    for handler in select h from pgqueue._handlers('_on_housekeeping_due_') as h loop
        execute format('select %s($1, $2)', handler) using at, since_last;
    end loop;
end;
$$;
comment on function pgqueue._do_housekeeping(timestamptz) is
'Calls _on_housekeeping_due_<room>(at, since_last) of each room that has it; since_last is the time since the last call, null if there was none. A sweep calls this once an hour, so a handler waits for no lock and raises no error. A handler with more to do sets pgqueue.next_housekeeping_at to an earlier moment.';

create or replace function pgqueue._room_findings(q pgqueue.queues default null)
returns setof pgqueue.finding
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    handler regproc;
begin
    for handler in select h from pgqueue._handlers('_findings_of_') as h loop
        return query execute format('select f.* from %s($1) f', handler) using q;
    end loop;
end;
$$;
comment on function pgqueue._room_findings(pgqueue.queues) is
'What _findings_of_<room>(q) of each room reports to doctor: on one queue, or on what belongs to no queue where q is null.';
