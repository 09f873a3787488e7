-- What was acknowledged is kept for a while: the statement that removes a message writes it here, into the partition
-- of its day (UTC), which goes as a whole. Days are made ahead, by whoever switches archiving on, by a sweep once an
-- hour, and by maintain_archive; a message whose day has none is filed later. No acknowledgement waits or fails.

create or replace function pgqueue._set_archive_marker(queue_name text, archive_for interval)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set client_min_messages = warning
as $$
declare
    mark constant text := pgqueue._archive_marker(queue_name);
begin
    -- Without a look: who had to wait for another who altered the queue may still have an old one in his cache. These ask anew.
    if archive_for is null then
        execute format('drop sequence if exists %s', mark);
    else
        execute format('create sequence if not exists %s', mark);
        perform pgqueue._revoke_default_privileges(mark::regclass);
    end if;
end;
$$;
comment on function pgqueue._set_archive_marker(text, interval) is
'Has the mark of a queue say whether it archives.';

create or replace function pgqueue._archive_expiry(at timestamptz)
returns timestamptz
language sql stable
as $$
    select coalesce(min(pgqueue._add_interval(at, -w.archive_for)), at)
    from (
        select q.archive_for from pgqueue.queues q where q.archive_for is not null
        union all
        select p.archive_for from pgqueue.archive_promises p where p.ends_at > at
    ) w
$$;
comment on function pgqueue._archive_expiry(timestamptz) is
'What was acknowledged before this moment no queue wants to have kept any more, nor does one that was dropped.';

create or replace function pgqueue._expired_days(at timestamptz)
returns setof date
language sql stable
as $$
    select d.day
    from (
        select to_date(right(c.relname, 8), 'YYYYMMDD') as day
        from pg_catalog.pg_inherits i
        join pg_catalog.pg_class c on c.oid = i.inhrelid
        where i.inhparent = 'pgqueue.archived_messages'::regclass and c.relname ~ '^archived_messages_[0-9]{8}$'
    ) d
    where d.day < pgqueue._utc_day(pgqueue._archive_expiry(at))
    order by d.day
$$;
comment on function pgqueue._expired_days(timestamptz) is
'The days of the archive, oldest first, that ended before anybody would miss them.';

create or replace function pgqueue._create_day_partition(day date)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    partition constant text := pgqueue._day_partition_name(day);
begin
    -- Made by itself and attached then, which hinders nobody who writes or reads; made as a partition it would lock
    -- everybody out.
    execute format('create table pgqueue.%I (like pgqueue.archived_messages including all)', partition);
    execute format('create index on pgqueue.%I (queue_name, id)', partition);
    execute format('alter table pgqueue.%I replica identity full', partition);
    execute format('comment on table pgqueue.%I is %L', partition,
        format('Messages that were acknowledged on %s (UTC).', to_char(day, 'YYYY-MM-DD')));
    perform pgqueue._revoke_default_privileges(format('pgqueue.%I', partition)::regclass);
    execute format('alter table only pgqueue.archived_messages attach partition pgqueue.%I for values from (%L) to (%L)',
        partition, to_char(day, 'YYYY-MM-DD') || ' 00:00:00+00', to_char(day + 1, 'YYYY-MM-DD') || ' 00:00:00+00');
end;
$$;
comment on function pgqueue._create_day_partition(date) is
'Makes the partition of a day of the archive.';

create or replace function pgqueue._create_missing_days(at timestamptz)
returns setof date
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    today constant date := pgqueue._utc_day(at);
    unwanted_before constant timestamptz := pgqueue._archive_expiry(at);
    day date;
begin
    -- Eight days ahead: a queue that is used once a week never finds the archive unprepared.
    for day in
        select today + n from generate_series(0, 8) as n
        where exists (select from pgqueue.queues q where q.archive_for is not null)
        union
        select pgqueue._utc_day(u.finished_at) from pgqueue.unfiled_messages u
        where u.finished_at >= unwanted_before and u.finished_at < at + interval '8 days'
        order by 1
    loop
        if to_regclass('pgqueue.' || pgqueue._day_partition_name(day)) is null then
            perform pgqueue._create_day_partition(day);
            return next day;
        end if;
    end loop;
end;
$$;
comment on function pgqueue._create_missing_days(timestamptz) is
'Makes, behind a lock that keeps others from doing so, the days of the archive that are missing, those of unfiled messages and, where any queue archives, today and eight days ahead, and returns them.';

create or replace function pgqueue._file_messages(at timestamptz, max_messages int)
returns int
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    unwanted_before constant timestamptz := pgqueue._archive_expiry(at);
    filed int;
begin
    -- What lies ahead was acknowledged under a clock that was wrong, and waits until its day has come.
    with gone as (
        delete from pgqueue.unfiled_messages u
        where u.ctid = any (array(
            select c.ctid from pgqueue.unfiled_messages c
            where c.finished_at < unwanted_before or pgqueue._has_day_partition(pgqueue._utc_day(c.finished_at))
            limit max_messages for update skip locked))
        returning u.*
    )
    insert into pgqueue.archived_messages
    select g.* from gone g where pgqueue._has_day_partition(pgqueue._utc_day(g.finished_at));
    get diagnostics filed = row_count;
    return filed;
end;
$$;
comment on function pgqueue._file_messages(timestamptz, int) is
'Moves up to so many unfiled messages into the partitions of their days, where those have one, forgets what nobody wants any more, and returns how many it moved.';

create or replace function pgqueue._start_archiving(q pgqueue.queues)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set lock_timeout = '500 ms'
as $$
declare
    at constant timestamptz := pgqueue._now();
begin
    perform pgqueue._set_archive_marker(q.name, q.archive_for);
    begin
        -- The lock of who makes days concerns nobody else.
        lock table only pgqueue.archived_messages in share update exclusive mode;
        perform pgqueue._create_missing_days(at);
    exception when lock_not_available then
        -- Somebody else is at it.
        return;
    end;
end;
$$;
comment on function pgqueue._start_archiving(pgqueue.queues) is
'Prepares the archive for a queue that begins to keep what it acknowledges.';

create or replace function pgqueue._stop_archiving(q pgqueue.queues)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    perform pgqueue._set_archive_marker(q.name, null);
    if q.archive_for is not null then
        insert into pgqueue.archive_promises (queue_name, archive_for, ends_at)
        values (q.name, q.archive_for, pgqueue._add_interval(pgqueue._now(), q.archive_for));
    end if;
end;
$$;
comment on function pgqueue._stop_archiving(pgqueue.queues) is
'Has a queue keep nothing from now on, and notes how long what it kept was promised to last.';

create or replace function pgqueue._on_queue_created_archive(q pgqueue.queues)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if q.archive_for is not null then
        perform pgqueue._start_archiving(q);
    end if;
end;
$$;
comment on function pgqueue._on_queue_created_archive(pgqueue.queues) is
'Prepares the archive for a new queue that has archive_for.';

create or replace function pgqueue._on_queue_altered_archive(before pgqueue.queues, after pgqueue.queues)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    -- Also where the row has not changed, but the marker does not say what the row says: doctor repairs it so.
    if after.archive_for is distinct from before.archive_for
        or (after.archive_for is null) <> (to_regclass(pgqueue._archive_marker(after.name)) is null)
    then
        if after.archive_for is null then
            perform pgqueue._stop_archiving(before);
        else
            perform pgqueue._start_archiving(after);
        end if;
    end if;
end;
$$;
comment on function pgqueue._on_queue_altered_archive(pgqueue.queues, pgqueue.queues) is
'Starts or stops archiving as the row of the queue says.';

create or replace function pgqueue._on_queue_dropping_archive(q pgqueue.queues)
returns void
language sql volatile
as $$ select pgqueue._stop_archiving(q) $$;
comment on function pgqueue._on_queue_dropping_archive(pgqueue.queues) is
'Keeps what the queue has archived for as long as its archive_for promised.';

create or replace function pgqueue._truncate_day(day date)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    -- The partition alone: acknowledgements, which lock the parent and today, do not notice. And at once or not at
    -- all: a request that waits for who reads lets others wait behind it.
    execute format('lock table only pgqueue.%I in access exclusive mode nowait', pgqueue._day_partition_name(day));
    execute format('truncate only pgqueue.%I', pgqueue._day_partition_name(day));
end;
$$;
comment on function pgqueue._truncate_day(date) is
'Removes the messages of a day of the archive. Raises 55P03 where it is being read.';

create or replace function pgqueue._is_day_empty(day date)
returns boolean
language sql volatile
as $$ select pg_relation_size(to_regclass('pgqueue.' || pgqueue._day_partition_name(day))) = 0 $$;
comment on function pgqueue._is_day_empty(date) is
'Whether a day of the archive was emptied, or never had a message.';

create or replace function pgqueue._on_housekeeping_due_archive(at timestamptz, since_last interval)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    day date;
begin
    lock table only pgqueue.archived_messages in share update exclusive mode nowait;
    perform pgqueue._create_missing_days(at);
    if pgqueue._file_messages(at, 1000) = 1000 then
        perform setval('pgqueue.next_housekeeping_at', pgqueue._to_micros(at + interval '1 s'));
    end if;
    -- Until this transaction commits, a truncated day blocks every reader of the whole archive. So a day is truncated only
    -- if the transaction can commit at once, and only if the clock has not jumped since the last housekeeping.
    if pgqueue._is_first_statement() and since_last between interval '0' and interval '1 day' then
        delete from pgqueue.archive_promises p where p.ends_at <= at;
        select d into day from pgqueue._expired_days(at) d where not pgqueue._is_day_empty(d) limit 1;
        if found then
            perform pgqueue._truncate_day(day);
        end if;
    end if;
exception when others then
    -- A lock, a full disk or an event trigger of the user must not fail a claim.
    null;
end;
$$;
comment on function pgqueue._on_housekeeping_due_archive(timestamptz, interval) is
'Creates the days ahead, files unfiled messages, deletes promises that have ended and truncates one day that no queue needs any more, unless the transaction may stay open for long. Waits for no lock and raises no error.';

create or replace function pgqueue._drop_days(days date[])
returns setof date
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    day date;
begin
    -- A request that waits for the whole table lets every acknowledgement wait behind it. So it never waits; it
    -- is there again at once, as acknowledgements come and go in no time.
    for attempt in 1..1000 loop
        begin
            lock table only pgqueue.archived_messages in access exclusive mode nowait;
            foreach day in array days loop
                begin
                    execute format('drop table pgqueue.%I', pgqueue._day_partition_name(day));
                    return next day;
                exception when dependent_objects_still_exist then
                    -- Somebody has a view of this day: no reason to keep the others.
                    null;
                end;
            end loop;
            return;
        exception when lock_not_available then
            continue;
        end;
    end loop;
end;
$$;
comment on function pgqueue._drop_days(date[]) is
'Drops the partitions of days, and returns those: none if a longer transaction uses the archive, nor one that something else uses.';

create or replace function pgqueue.maintain_archive()
returns setof pgqueue.archive_change
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '500 ms'
as $$
declare
    at constant timestamptz := pgqueue._now();
    day date;
    emptied date[] := '{}'::date[];
    dropped date[];
begin
    begin
        lock table only pgqueue.archived_messages in share update exclusive mode;
        return query select d, 'made' from pgqueue._create_missing_days(at) d;
    exception when lock_not_available then
        return next row(pgqueue._utc_day(at), 'busy')::pgqueue.archive_change;
        return;
    end;
    perform pgqueue._file_messages(at, null);

    delete from pgqueue.archive_promises p where p.ends_at <= at;
    for day in select d from pgqueue._expired_days(at) d loop
        begin
            perform pgqueue._truncate_day(day);
            emptied := emptied || day;
        exception when lock_not_available then
            return next row(day, 'busy')::pgqueue.archive_change;
        end;
    end loop;
    if emptied <> '{}' then
        dropped := array(select d from pgqueue._drop_days(emptied) as d);
        return query
        select d, case when d = any (dropped) then 'dropped' else 'emptied' end from unnest(emptied) as d;
    end if;
end;
$$;
comment on function pgqueue.maintain_archive() is
'Looks after pgqueue.archived_messages, and returns what it did, a row a day: makes the partitions of today and eight days ahead, where any queue archives, files pgqueue.unfiled_messages, and drops the days that ended longer ago than the longest archive_for of any queue, dropped ones included as long as their own. Keeps no acknowledgement waiting: a partition that a longer transaction, or a view of it, keeps from being dropped is emptied, and one that is being read is left (busy), both until the next time. Claims do the same by the way but for the dropping, and receives but for the emptying, so that it may be called once a day, by whatever calls things, or now and then by hand; in a transaction of its own.';

create or replace function pgqueue._findings_of_archive(q pgqueue.queues)
returns setof pgqueue.finding
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    at constant timestamptz := pgqueue._now();
    repair constant text := 'select * from pgqueue.maintain_archive();';
    unfiled bigint;
    is_ahead boolean;
    overdue bigint;
    is_empty boolean;
begin
    if q.name is not null then
        return;
    end if;
    return query
    select
        'error', w.name, 'archive_mark',
        format('queue %L has archive_for %s, but its acknowledgements %s: it was changed by plain SQL',
            w.name, coalesce(w.archive_for::text, 'null'), case when w.archive_for is null then 'archive' else 'delete' end),
        format('select pgqueue.alter_queue(%L, archive_for => %L);', w.name, coalesce(w.archive_for, '0'))
    from pgqueue.queues w
    where (w.archive_for is null) <> (to_regclass(pgqueue._archive_marker(w.name)) is null)
    order by w.name;

    select count(*), bool_or(u.finished_at > at + interval '1 day') into unfiled, is_ahead
    from (select c.finished_at from pgqueue.unfiled_messages c limit 1000) u;
    if unfiled > 0 then
        return next row('warning', null, 'unfiled_messages',
            format('%s acknowledged messages wait for a partition of pgqueue.archived_messages%s',
                case unfiled when 1000 then '1000 or more' else unfiled::text end,
                case when is_ahead then ', also such as were acknowledged while the clock was ahead' else '' end),
            case when is_ahead then
                format('update pgqueue.unfiled_messages set finished_at = %1$L where finished_at > %1$L; ', at)
            else '' end || repair)::pgqueue.finding;
    end if;

    if exists (select from pgqueue.queues w where w.archive_for is not null)
        and not coalesce(pgqueue._has_day_partition(pgqueue._utc_day(at)) and pgqueue._has_day_partition(pgqueue._utc_day(at) + 1), false)
    then
        return next row('warning', null, 'missing_archive_day',
            'pgqueue.archived_messages has no partition for today or tomorrow: what is acknowledged is filed later',
            repair)::pgqueue.finding;
    end if;

    select count(*), bool_and(pgqueue._is_day_empty(d)) into overdue, is_empty
    from pgqueue._expired_days(at) d
    where d < pgqueue._utc_day(pgqueue._archive_expiry(at)) - 1;
    if overdue > 0 and not is_empty or overdue > 30 then
        return next row(case when is_empty then 'info' else 'warning' end, null, 'archive_overdue',
            format('%s days of the archive that no queue wants any more %s', overdue,
                case when is_empty then 'were emptied, but not dropped' else 'are still there' end),
            repair)::pgqueue.finding;
    end if;
end;
$$;
comment on function pgqueue._findings_of_archive(pgqueue.queues) is
'What doctor finds on the archive: the marks of all queues, unfiled messages, and days that are missing or overdue.';
