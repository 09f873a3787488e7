-- Events for modules: a queue was created, altered or is being dropped, housekeeping or maintenance is due, a
-- transaction that made a request commits, doctor collects findings. A module defines a function of the matching name.
-- So the core calls no room by name, and a new room changes no core file. All events are rare: the lookup of the
-- functions by name costs some 0.1 ms each.

create or replace function pgqueue._handlers(event text) returns setof regproc
language sql stable as $$
    select p.oid::regproc
    from pg_catalog.pg_proc p
    -- A range condition on the name, which a catalog index supports.
    where p.proname >= event::name and p.proname < (event || '~')::name and p.pronamespace = 'pgqueue'::regnamespace
    order by p.proname
$$;

-- before is null if the queue was created, and after if it is being dropped: then its row is deleted and its messages
-- still exist. The queue is locked, in these two cases exclusively.
create or replace function pgqueue._call_queue_handlers(before pgqueue.queues, after pgqueue.queues) returns void
language plpgsql volatile as $$
declare
    handler regproc;
begin
    for handler in select h from pgqueue._handlers('_on_queue_changed_') as h loop
        execute format('select %s($1, $2)', handler) using before, after;
    end loop;
end;
$$;

-- Housekeeping is due once an hour, maintenance once a second. A handler must not wait for a lock. One that has more to
-- do sets the register to an earlier time, one that has nothing to do to a later one.
create or replace function pgqueue._call_if_due(event text, at timestamptz) returns void
language plpgsql volatile as $$
declare
    is_housekeeping constant boolean := event = 'housekeeping';
    register constant regclass := case
        when is_housekeeping then 'pgqueue.next_housekeeping_at'::regclass else 'pgqueue.next_maintenance_at'::regclass end;
    pause constant interval := case when is_housekeeping then interval '1 h' else interval '1 s' end;
    longest_micros constant bigint := case when is_housekeeping then 3600000000 else 60000000 end;
    handler regproc;
    is_at_commit boolean;
begin
    -- A time that is further ahead than a handler sets was set while the clock was ahead.
    if coalesce(pg_sequence_last_value(register) - pgqueue._to_micros(at), 0) between 1 and longest_micros then
        return;
    end if;
    -- The register is set before the calls: one session does the work, even if its transaction fails.
    perform setval(register, pgqueue._to_micros(at + pause));
    for handler, is_at_commit in
        select h, false from pgqueue._handlers(format('_on_%s_due_', event)) as h
        union all
        select h, true from pgqueue._handlers(format('_at_%s_', event)) as h
    loop
        begin
            if is_at_commit then
                perform pgqueue._request_at_commit(p.proname, at) from pg_proc p where p.oid = handler;
            else
                execute format('select %s($1)', handler) using at;
            end if;
        exception when others then
            -- A full disk or a lock must not fail a claim, nor keep the other handlers from their work.
            null;
        end;
    end loop;
end;
$$;

create or replace function pgqueue._do_at_commit() returns trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '20 ms'
set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    probe tid;
begin
    -- A commit obeys no statement_timeout, but each wait for a lock obeys the lock_timeout of this function.
    if new.handler = '' then
        delete from pgqueue.compactions c where c.handler = '';
        return null;
    end if;
    -- A request that is not carried out goes, too.
    delete from pgqueue.compactions c
    where c.ctid = any (array(
        select o.ctid from pgqueue.compactions o
        where o.handler = new.handler for update skip locked));
    -- Nothing but the text of the client shows that it prepares the transaction, which would keep the locks.
    if current_setting('max_prepared_transactions')::int > 0
        and current_query() ~* e'(^|[;\\n]|\\*/)\\s*prepare\\s+transaction\\M'
    then
        return null;
    end if;
    -- `set constraints` makes the trigger immediate before it fires the trigger. The trigger then fires again within
    -- the insert, and deletes the row. At the commit it is deferred.
    insert into pgqueue.compactions (tried_at, handler) values (at, '') returning compactions.ctid into probe;
    delete from pgqueue.compactions c where c.ctid = probe;
    if not found then
        return null;
    end if;
    execute format('select pgqueue.%I($1)', new.handler) using at;
    return null;
exception when query_canceled or others then
    -- It must not fail the transaction of a claim. The next housekeeping or maintenance requests it again.
    return null;
end;
$$;

drop trigger if exists do_at_commit on pgqueue.compactions;
create constraint trigger do_at_commit after insert on pgqueue.compactions deferrable initially deferred
for each row when (new.handler is not null) execute function pgqueue._do_at_commit();

-- Requests a call of pgqueue.<handler>(time of the commit) at the commit, with the rights of the owner, for what takes
-- an exclusive lock: the transaction can be that of a receive, whose handler works for long.
create or replace function pgqueue._request_at_commit(handler text, at timestamptz) returns void
language plpgsql volatile as $$
begin
    -- The caller may have set all constraints to immediate. The locks would then last until its transaction ends.
    set constraints pgqueue.do_at_commit deferred;
    insert into pgqueue.compactions (tried_at, handler) values (at, handler);
end;
$$;

create or replace function pgqueue._module_findings(q pgqueue.queues default null) returns setof pgqueue.finding
language plpgsql volatile as $$
declare
    handler regproc;
begin
    for handler in select h from pgqueue._handlers('_findings_of_') as h loop
        return query execute format('select f.* from %s($1) f', handler) using q;
    end loop;
end;
$$;
