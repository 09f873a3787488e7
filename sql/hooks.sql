-- Events for modules: a queue was created, altered, is swept or is being dropped, housekeeping or maintenance is due, a
-- transaction that made a request commits, doctor collects findings. A module defines a function of the matching name.
-- So the core calls no room by name, and a new room changes no core file. All events are rare: the lookup of the
-- functions by name costs some 0.1 ms each.

create or replace function pgqueue._handlers(event text)
returns setof regproc
language sql stable
as $$
    select p.oid::regproc
    from pg_catalog.pg_proc p
    -- A range condition on the name, which a catalog index supports.
    where p.proname >= event::name and p.proname < (event || '~')::name and p.pronamespace = 'pgqueue'::regnamespace
    order by p.proname
$$;

create or replace function pgqueue._call_queue_handlers(
    event text, q pgqueue.queues, before pgqueue.queues default null
)
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
comment on function pgqueue._call_queue_handlers(text, pgqueue.queues, pgqueue.queues) is
'Calls _on_<event>_<module> of each module that defines it: _on_queue_created_<module>(q),
_on_queue_altered_<module>(before, after), _on_queue_sweeping_<module>(q), and _on_queue_dropping_<module>(q). A sweep
calls queue_sweeping, if the queue takes dead letters of others; its handler must not wait for a lock or raise an error.
At queue_dropping, the row of the queue is deleted and its messages still exist. The queue is locked, exclusively for
queue_dropping.';

create or replace function pgqueue._do_housekeeping(at timestamptz)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    handler regproc;
begin
    -- The register is set before the calls: one session an hour does the housekeeping, even if its transaction fails.
    perform setval('pgqueue.next_housekeeping_at', pgqueue._to_micros(at + interval '1 h'));
    for handler in select h from pgqueue._handlers('_on_housekeeping_due_') as h loop
        execute format('select %s($1)', handler) using at;
    end loop;
end;
$$;
comment on function pgqueue._do_housekeeping(timestamptz) is
'Calls _on_housekeeping_due_<module>(at) of each module that defines it. A sweep calls this once an hour, so a handler
must not wait for a lock or raise an error. A handler that has more to do sets pgqueue.next_housekeeping_at to an
earlier time.';

create or replace function pgqueue._do_maintenance(at timestamptz)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    handler regproc;
begin
    perform setval('pgqueue.next_maintenance_at', pgqueue._to_micros(at + interval '1 s'));
    for handler in select h from pgqueue._handlers('_on_maintenance_due_') as h loop
        execute format('select %s($1)', handler) using at;
    end loop;
end;
$$;
comment on function pgqueue._do_maintenance(timestamptz) is
'Calls _on_maintenance_due_<module>(at) of each module that defines it: compact and dedup request what is done at the
commit. An enqueue or a sweep calls this once a second, so a handler must not wait for a lock or raise an error. A
handler that wants to be called later sets pgqueue.next_maintenance_at.';

create or replace function pgqueue._is_maintenance_due(at timestamptz)
returns boolean
language sql volatile
-- The register is at most a minute ahead, or was set while the clock was ahead.
as $$
    select coalesce(pg_sequence_last_value('pgqueue.next_maintenance_at') - pgqueue._to_micros(at), 0)
        not between 1 and 60000000
$$;

create or replace function pgqueue._do_maintenance_if_due(at timestamptz)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if pgqueue._is_maintenance_due(at) then
        perform pgqueue._do_maintenance(at);
    end if;
end;
$$;

create or replace function pgqueue._is_at_commit()
returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    probe tid;
begin
    -- Nothing but the text of the client shows that it prepares the transaction, which would keep the locks.
    if current_setting('max_prepared_transactions')::int > 0
        and current_query() ~* e'(^|[;\\n]|\\*/)\\s*prepare\\s+transaction\\M'
    then
        return false;
    end if;
    -- `set constraints` makes the trigger immediate before it fires the trigger. The trigger then fires again within
    -- the insert, and deletes the row. At the commit it is deferred.
    insert into pgqueue.compactions (tried_at, table_name) values (pgqueue._now(), '') returning compactions.ctid into probe;
    delete from pgqueue.compactions c where c.ctid = probe;
    return found;
end;
$$;
comment on function pgqueue._is_at_commit() is
'For do_at_commit: whether the transaction commits now. It goes on if a statement, in whatever function, has set the
trigger to immediate, or if the transaction is prepared.';

create or replace function pgqueue._do_at_commit()
returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
    at constant timestamptz := pgqueue._now();
begin
    if new.table_name = '' then
        delete from pgqueue.compactions c where c.table_name = '';
        return null;
    end if;
    if not pgqueue._is_at_commit() then
        return null;
    end if;
    delete from pgqueue.compactions c
    where c.ctid = any (array(
        select o.ctid from pgqueue.compactions o
        where o.outcome is null and o.table_name = new.table_name for update skip locked));
    execute format('select pgqueue.%I($1)', new.table_name) using at;
    return null;
exception when query_canceled or others then
    -- It must not fail the transaction of a claim. The next housekeeping or maintenance requests it again.
    return null;
end;
$$;

drop trigger if exists do_at_commit on pgqueue.compactions;
create constraint trigger do_at_commit after insert on pgqueue.compactions deferrable initially deferred
for each row when (new.outcome is null) execute function pgqueue._do_at_commit();

create or replace function pgqueue._request_at_commit(handler text, at timestamptz)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    -- The caller may have set all constraints to immediate. The locks would then last until its transaction ends.
    set constraints pgqueue.do_at_commit deferred;
    insert into pgqueue.compactions (tried_at, table_name) values (at, handler);
end;
$$;
comment on function pgqueue._request_at_commit(text, timestamptz) is
'Requests a call of pgqueue.<handler>(time of the commit) when the transaction commits, with the rights of the owner. A
module uses it for what takes an exclusive lock: the transaction can be that of a receive, whose handler works for
long.';

create or replace function pgqueue._module_findings(q pgqueue.queues default null)
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
comment on function pgqueue._module_findings(pgqueue.queues) is
'What _findings_of_<module>(q) of each module reports to doctor, about the queue or, if q is null, about what belongs to
no queue.';
