-- Keeps acknowledged messages for a while. The statement that removes a message inserts it into the partition of its
-- day (UTC), or into unfiled_messages if that day has no partition. Enabling archiving, the hourly housekeeping and
-- maintain_archive create partitions ahead, and remove expired ones as a whole. No acknowledgement waits or fails.

-- Before this time no archived message has to be kept.
create or replace function pgqueue._archive_expiry(at timestamptz) returns timestamptz
language sql stable as $$
    select coalesce(min(pgqueue._add_interval(at, -w.archive_for)), at)
    from (
        select q.archive_for from pgqueue.queues q where q.archive_for is not null
        union all
        select p.archive_for from pgqueue.archive_promises p where p.ends_at > at
    ) w
$$;

-- The days that have passed at a time. At infinity all have.
create or replace function pgqueue._days(at timestamptz default 'infinity') returns table (day date, relation regclass)
language sql stable as $$
    select d.day, d.relation
    from (
        select to_date(right(c.relname, 8), 'YYYYMMDD') as day, c.oid::regclass as relation
        from pg_catalog.pg_inherits i
        join pg_catalog.pg_class c on c.oid = i.inhrelid
        where i.inhparent = 'pgqueue.archived_messages'::regclass and c.relname ~ '^archived_messages_[0-9]{8}$'
    ) d
    -- As a subquery the expiry is computed once, and not for each day, or each pair of days.
    where d.day < (select pgqueue._utc_day(pgqueue._archive_expiry(at)))
    order by d.day
$$;

-- The caller holds a lock that keeps other sessions from doing the same.
create or replace function pgqueue._create_missing_days(at timestamptz) returns setof date
language plpgsql volatile as $$
declare
    today constant date := pgqueue._utc_day(at);
    unwanted_before constant timestamptz := pgqueue._archive_expiry(at);
    day date;
    partition text;
begin
    -- Eight days ahead are enough for a queue that is used only once a week.
    for day in
        select today + n from generate_series(0, 8) as n
        where exists (select from pgqueue.queues q where q.archive_for is not null)
        union
        select pgqueue._utc_day(u.finished_at) from pgqueue.unfiled_messages u
        where u.finished_at >= unwanted_before and u.finished_at < at + interval '8 days'
        order by 1
    loop
        partition := 'pgqueue.' || pgqueue._day_partition_name(day);
        continue when to_regclass(partition) is not null;
        -- Create the table first and attach it afterwards: this blocks no reader or writer. "create table ... partition
        -- of" would take an access exclusive lock on the parent.
        execute format('create table %s (like pgqueue.archived_messages including all)', partition);
        execute format('create index on %s (queue_name, id)', partition);
        execute format('alter table %s replica identity full', partition);
        execute format('comment on table %s is %L', partition, format('Messages that were acknowledged on %s (UTC).', to_char(day, 'YYYY-MM-DD')));
        perform pgqueue._revoke_default_privileges(partition::regclass);
        execute format('alter table only pgqueue.archived_messages attach partition %s for values from (%L) to (%L)',
            partition, to_char(day, 'YYYY-MM-DD') || ' 00:00:00+00', to_char(day + 1, 'YYYY-MM-DD') || ' 00:00:00+00');
        return next day;
    end loop;
end;
$$;

create or replace function pgqueue._on_queue_changed_archive(before pgqueue.queues, after pgqueue.queues) returns void
language plpgsql volatile set client_min_messages = warning as $$
declare
    mark constant text := pgqueue._sequence_name('archives', coalesce(after.name, before.name));
begin
    -- Also act if only the marker disagrees with the row: the repair that doctor suggests relies on this. A restore
    -- without rows leaves markers, too.
    if after.archive_for is not distinct from before.archive_for
        and (after.archive_for is null) = (to_regclass(mark) is null)
    then
        return;
    end if;
    if after.archive_for is null then
        -- Any role with access can make a view that depends on the marker. It must not keep the sequence.
        execute format('drop sequence if exists %s cascade', mark);
        insert into pgqueue.archive_promises (queue_name, archive_for, ends_at)
        -- A clock that is behind must not shorten the time.
        select before.name, before.archive_for, pgqueue._add_interval(pgqueue._finish_time(), before.archive_for)
        where before.archive_for is not null;
        return;
    end if;
    perform pgqueue._create_sequence(mark);
    begin
        -- This lock conflicts only with other sessions that create days.
        lock table only pgqueue.archived_messages in share update exclusive mode nowait;
        perform pgqueue._create_missing_days(pgqueue._now());
    exception when lock_not_available then
        null;
    end;
end;
$$;

-- Does what maintain_archive does, and a part of that at a commit: until then, a truncated day would block every reader
-- of the whole archive. Only the session with the lock does it: maintain_archive waits for the lock, a commit does not.
create or replace function pgqueue._at_housekeeping_archive(at timestamptz, is_commit boolean default true)
returns setof pgqueue.archive_change language plpgsql volatile as $$
declare
    confirmed_at timestamptz;
    unfiled refcursor;
    places tid[];
    expired record;
    day date;
    emptied date[] := '{}'::date[];
    dropped date[] := '{}'::date[];
begin
    if is_commit then
        lock table only pgqueue.archived_messages in share update exclusive mode nowait;
    end if;
    return query select d, 'made' from pgqueue._create_missing_days(at) d;
    -- The confirmed time has passed even if this reading of the clock is wrong: it is an earlier reading, from which
    -- the clock has since moved on by an hour. If the clock has gone back, neither reading confirms the other.
    insert into pgqueue.archive_clock as c (checked_at) values (at)
    on conflict ((true)) do update
    set checked_at = at, confirmed_at = case when at < c.checked_at then c.confirmed_at else c.checked_at end
    where at < c.checked_at or at >= c.checked_at + interval '1 h';
    select least(at, coalesce(c.confirmed_at, '-infinity')) into confirmed_at from pgqueue.archive_clock c;

    -- A message with a future finished_at was acknowledged while the clock was wrong. It stays unfiled until its day
    -- has a partition. The lock of the caller keeps others from filing, so none of the rows is locked.
    open unfiled for
        select f.id, f.ctid as place, pgqueue._moved_bytes(f.payload, f.body, f.headers, null) as bytes
        from pgqueue.unfiled_messages f
        -- The array is computed once: any number of messages can wait for their day.
        where f.finished_at < (select pgqueue._archive_expiry(confirmed_at))
            or pgqueue._utc_day(f.finished_at) = any (array(select d.day from pgqueue._days() d))
            and pgqueue._has_day_partition(pgqueue._utc_day(f.finished_at));
    for n in 1..case when is_commit then 2 else 1000000 end loop
        places := (pgqueue._fetch_slice(unfiled)).places;
        exit when places = '{}';
        with gone as (delete from pgqueue.unfiled_messages u where u.ctid = any (places) returning u.*)
        insert into pgqueue.archived_messages
        select g.* from gone g where pgqueue._has_day_partition(pgqueue._utc_day(g.finished_at));
        if is_commit then
            perform setval('pgqueue.next_housekeeping_at', pgqueue._to_micros(at + interval '1 s'));
        end if;
        exit when not pgqueue._has_time();
    end loop;
    close unfiled;

    -- An older snapshot does not show an archive_for that another transaction has raised since.
    if is_commit and pgqueue._has_fixed_snapshot() then
        return;
    end if;
    perform pgqueue._require_current_snapshot('the archive');
    delete from pgqueue.archive_promises p where p.ends_at <= confirmed_at;
    for expired in
        select d.* from pgqueue._days(confirmed_at) d
        where not (is_commit and pg_relation_size(d.relation) = 0) limit case when is_commit then 1 end
    loop
        begin
            -- Lock only the partition: acknowledgements lock the parent and the partition of today, and are not
            -- blocked. Do not wait for the lock: other sessions would queue behind a waiting request.
            execute format('lock table only %1$s in access exclusive mode nowait; truncate only %1$s', expired.relation);
            emptied := emptied || expired.day;
        exception when lock_not_available then
            return next row(expired.day, 'busy')::pgqueue.archive_change;
        end;
    end loop;
    -- Do not wait for the lock: every acknowledgement would queue behind the request. Retry instead. Acknowledgements
    -- hold their locks only briefly. If a longer transaction uses the archive, no day is dropped.
    for attempt in 1..case when is_commit or emptied = '{}'::date[] then 0 else 1000 end loop
        begin
            lock table only pgqueue.archived_messages in access exclusive mode nowait;
            foreach day in array emptied loop
                begin
                    execute format('drop table pgqueue.%I', pgqueue._day_partition_name(day));
                    dropped := dropped || day;
                exception when dependent_objects_still_exist then
                    -- Another object, such as a view, depends on this day. Continue with the other days.
                    null;
                end;
            end loop;
            exit;
        exception when lock_not_available then
            continue;
        end;
    end loop;
    return query select d, case when d = any (dropped) then 'dropped' else 'emptied' end from unnest(emptied) as d;
end;
$$;

create or replace function pgqueue.maintain_archive() returns setof pgqueue.archive_change
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500 ms'
set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
begin
    lock table only pgqueue.archived_messages in share update exclusive mode;
    return query select c.* from pgqueue._at_housekeeping_archive(at, false) c;
exception when lock_not_available then
    return next row(pgqueue._utc_day(at), 'busy')::pgqueue.archive_change;
end;
$$;
comment on function pgqueue.maintain_archive is
'Maintains pgqueue.archived_messages and returns one row per day changed. Creates the partitions of today and the next
eight days if any queue archives (made), moves pgqueue.unfiled_messages into their partitions, and drops the days
older than the longest archive_for of all queues, including queues that were dropped or stopped archiving, until the
archive_for they had has passed (dropped). A day has passed if the clock showed so in an earlier call or claim, and
has since moved on by an hour: one wrong reading of the clock removes nothing. Blocks no acknowledgement: a partition
that cannot be dropped, because a longer transaction uses the archive or a view depends on the partition, is emptied
(emptied), and one that is being read is left alone (busy); the next call tries again. About once an hour a claim or a
receive does the same at its commit, unless it is prepared, but empties only one day and drops nothing. Call this once a
day from a scheduler, or occasionally by hand, in a transaction of its own. Raises 40001 above read committed if another
transaction has committed since the snapshot.';

create or replace function pgqueue._findings_of_archive(q pgqueue.queues) returns setof pgqueue.finding
language plpgsql volatile as $$
declare
    at constant timestamptz := pgqueue._now();
    repair constant text := 'select * from pgqueue.maintain_archive();';
    d record;
    is_doubled boolean;
begin
    if q.name is not null then
        return;
    end if;
    return query
    select
        'error', w.name, 'archive_mark',
        format('queue %L has archive_for %s, but its acknowledgements %s messages: archive_for was changed by plain SQL',
            w.name, coalesce(w.archive_for::text, 'null'), case when w.archive_for is null then 'archive' else 'delete' end),
        format('select pgqueue.alter_queue(%L, archive_for => %L);', w.name, coalesce(w.archive_for, '0'))
    from pgqueue.queues w
    where (w.archive_for is null) <> (to_regclass(pgqueue._sequence_name('archives', w.name)) is null)
    order by w.name;

    return query
    select
        'warning', null, 'unfiled_messages',
        format('not yet in a partition of pgqueue.archived_messages: %s%s%s', case u.n when 1000 then 'at least ' end,
            pgqueue._with_number(u.n, 'acknowledged message'),
            case when u.is_ahead then ', some of them acknowledged while the clock was ahead' end),
        case when u.is_ahead then
            format('update pgqueue.unfiled_messages set finished_at = %1$L where finished_at > %1$L; ', at)
        else '' end || repair
    from (
        select count(*) as n, bool_or(c.finished_at > at + interval '1 day') as is_ahead
        from (select m.finished_at from pgqueue.unfiled_messages m limit 1000) c
    ) u
    where u.n > 0
    union all
    select
        'warning', null, 'missing_archive_day',
        'pgqueue.archived_messages has no partition for today or tomorrow: messages acknowledged on such a day are filed later',
        repair
    where exists (select from pgqueue.queues w where w.archive_for is not null)
        and not coalesce(pgqueue._has_day_partition(pgqueue._utc_day(at)) and pgqueue._has_day_partition(pgqueue._utc_day(at) + 1), false)
    union all
    select
        case when o.is_empty then 'info' else 'warning' end, null, 'archive_overdue',
        format('no queue needs %s of the archive any more: %s', pgqueue._with_number(o.n, 'day'),
            case when o.is_empty then 'emptied, but not dropped' else 'not removed yet' end),
        repair
    from (
        select count(*) as n, bool_and(pg_relation_size(e.relation) = 0) as is_empty
        from pgqueue._days(at - interval '2 days') e
    ) o
    where o.n > case when o.is_empty then 30 else 0 end;

    -- The archive has no unique key. Of a dump that was restored twice, the oldest days are kept as long as any.
    for d in select y.* from pgqueue._days() y where pg_relation_size(y.relation) > 0 limit 10 loop
        -- By its name: a statement on the parent would lock the partitions of all days.
        execute format(
            'select exists ('
            'select from (select a.queue_name, a.id, a.finished_at from %s a order by a.queue_name, a.id limit 100) c'
            ' group by c.queue_name, c.id, c.finished_at having count(*) > 1)', d.relation)
        into is_doubled;
        continue when not is_doubled;
        return next row('warning', null, 'doubled_archive',
            format('messages that were acknowledged on %s are twice in pgqueue.archived_messages: a dump was restored twice', d.day),
            'delete from pgqueue.archived_messages a using pgqueue.archived_messages b where a.tableoid = b.tableoid'
            ' and a.queue_name = b.queue_name and a.id = b.id and a.finished_at = b.finished_at'
            ' and a.attempt_count = b.attempt_count and a.ctid > b.ctid;')::pgqueue.finding;
        return;
    end loop;
end;
$$;

create or replace function pgqueue.browse_archived_messages(
    queue_name pgqueue.queue_of_consumer_admin_or_reader, max_messages int default 100, before_id bigint default null
) returns setof pgqueue.archived_message
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    -- Archived messages of a dropped queue remain under its name, so the queue need not exist.
    if not exists (select from pgqueue.queues q where q.name = browse_archived_messages.queue_name collate "C")
        and not exists (select from pgqueue.archived_messages a where a.queue_name = browse_archived_messages.queue_name collate "C")
        and not exists (select from pgqueue.unfiled_messages u where u.queue_name = browse_archived_messages.queue_name collate "C")
    then
        perform pgqueue._raise('queue_not_found', queue_name);
    end if;
    perform pgqueue._check_page(max_messages, 0);
    return query
    select
        f.id, f.queue_name, f.payload, f.body, f.headers, f.message_id, f.attempt_count, f.max_attempts, f.enqueued_at,
        f.claimed_at, f.finished_at, f.expires_at, f.claimed_by, f.last_error
    from (select a.* from pgqueue.archived_messages a union all select u.* from pgqueue.unfiled_messages u) f
    where f.queue_name = browse_archived_messages.queue_name collate "C" and f.id < coalesce(before_id, 9223372036854775807)
    order by f.id desc
    limit max_messages;
end;
$$;
comment on function pgqueue.browse_archived_messages is
'Shows up to max_messages (1 to 10000) acknowledged messages, newest id first, with ids below before_id; for the next
page pass the last id. For a dropped queue it shows the messages that are still kept. Raises 22023, PQ001.';
