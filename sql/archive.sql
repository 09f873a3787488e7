-- What was acknowledged is kept for a while: the statement that removes a message writes it here, into the partition
-- of its day (UTC), which goes as a whole. Days are made ahead, by whoever switches archiving on, by a sweep once an
-- hour, and by maintain_archive; a message whose day has none is filed later. No acknowledgement waits or fails.

create or replace function pgqueue._utc_day(moment timestamptz)
returns date
language sql immutable parallel safe
as $$ select (moment at time zone 'UTC')::date $$;
comment on function pgqueue._utc_day(timestamptz) is
'The day of UTC in which a moment lies, whatever the TimeZone of the session.';

create or replace function pgqueue._day_partition_name(day date)
returns text
language sql stable parallel safe
as $$ select 'archived_messages_' || to_char(day, 'YYYYMMDD') $$;
comment on function pgqueue._day_partition_name(date) is
'The name of the partition that a day of the archive has, or would have.';

create or replace function pgqueue._has_day_partition(day date)
returns boolean
language sql volatile
as $$
    select pg_partition_root(to_regclass('pgqueue.' || pgqueue._day_partition_name(day))) = 'pgqueue.archived_messages'::regclass
$$;
comment on function pgqueue._has_day_partition(date) is
'Whether a day of the archive has its partition. By the catalog as it is now, not as an old snapshot has it; null or false if not.';

create or replace function pgqueue._archive_marker(queue_name text)
returns text
language sql immutable parallel safe
as $$ select 'pgqueue.archives_' || to_hex(hashtextextended(queue_name collate "C", 0)) $$;
comment on function pgqueue._archive_marker(text) is
'The name of the sequence that exists while a queue archives.';

create or replace function pgqueue._lock_queue_without_archive(queue_name text)
returns boolean
language sql volatile
as $$ select pgqueue._lock_queue(queue_name) and to_regclass(pgqueue._archive_marker(queue_name)) is null $$;
comment on function pgqueue._lock_queue_without_archive(text) is
'Holds the queue as _lock_queue does, and says whether it keeps no archive; false for a null name. One expression, as each costs an acknowledgement its preparation; by the cache of the catalog, as a look at the row costs ten times as much.';

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

create or replace function pgqueue._ack_to_archive(queue_name text, ids bigint[], claim_token uuid)
returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    at constant timestamptz := pgqueue._now();
    acked bigint[];
begin
    if not coalesce(pgqueue._has_day_partition(pgqueue._utc_day(at)), false) then
        return pgqueue._ack_to_unfiled(queue_name, ids, claim_token, at);
    end if;
    with gone as (
        delete from pgqueue.messages m
        using pgqueue._lookup_keys(_ack_to_archive.queue_name collate "C", ids) k
        where pgqueue._matches_key(m.queue_name, m.id, _ack_to_archive.queue_name collate "C", k.names, k.ids, k.id)
            and m.claim_token = _ack_to_archive.claim_token and m.claimed_attempt = m.attempt_count
        returning
            m.id, m.queue_name, m.enqueued_at, m.claimed_at, at, m.attempt_count, m.max_attempts, m.expires_at, m.message_id,
            m.payload, m.body, m.headers, m.claimed_by, m.last_error
    ),
    kept as (
        insert into pgqueue.archived_messages select g.* from gone g returning archived_messages.id
    )
    select array_agg(k.id) into acked from kept k;
    return coalesce(acked, '{}');
end;
$$;
comment on function pgqueue._ack_to_archive(text, bigint[], uuid) is
'Acknowledges messages of one claim: moves them to the archive, in one statement, and returns the ids of those that were still the caller''s.';

create or replace function pgqueue._ack_to_unfiled(queue_name text, ids bigint[], claim_token uuid, at timestamptz)
returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    acked bigint[];
begin
    with gone as (
        delete from pgqueue.messages m
        using pgqueue._lookup_keys(_ack_to_unfiled.queue_name collate "C", ids) k
        where pgqueue._matches_key(m.queue_name, m.id, _ack_to_unfiled.queue_name collate "C", k.names, k.ids, k.id)
            and m.claim_token = _ack_to_unfiled.claim_token and m.claimed_attempt = m.attempt_count
        returning
            m.id, m.queue_name, m.enqueued_at, m.claimed_at, at, m.attempt_count, m.max_attempts, m.expires_at, m.message_id,
            m.payload, m.body, m.headers, m.claimed_by, m.last_error
    ),
    kept as (
        insert into pgqueue.unfiled_messages select g.* from gone g returning unfiled_messages.id
    )
    select array_agg(k.id) into acked from kept k;
    return coalesce(acked, '{}');
end;
$$;
comment on function pgqueue._ack_to_unfiled(text, bigint[], uuid, timestamptz) is
'The same where the day has no partition.';

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
        perform setval('pgqueue.next_archive_check_at', pgqueue._to_micros(at + interval '1 h'));
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

create or replace function pgqueue._archive_housekeeping(at timestamptz)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    since_look constant interval :=
        at - pgqueue._from_micros(pg_sequence_last_value('pgqueue.next_archive_check_at')) + interval '1 h';
    day date;
begin
    -- Set first, so that one comes by an hour, whatever becomes of him.
    perform setval('pgqueue.next_archive_check_at', pgqueue._to_micros(at + interval '1 h'));
    begin
        lock table only pgqueue.archived_messages in share update exclusive mode nowait;
        perform pgqueue._create_missing_days(at);
        if pgqueue._file_messages(at, 1000) = 1000 then
            perform setval('pgqueue.next_archive_check_at', pgqueue._to_micros(at + interval '1 s'));
        end if;
        -- A day is locked against who reads the whole archive until the caller commits: not where that may take
        -- long. Nor by a clock that may have jumped: what it says must have held for an hour.
        if pgqueue._is_first_statement()
            and since_look between interval '0' and interval '1 day'
        then
            delete from pgqueue.archive_promises p where p.ends_at <= at;
            select d into day from pgqueue._expired_days(at) d where not pgqueue._is_day_empty(d) limit 1;
            if found then
                perform pgqueue._truncate_day(day);
            end if;
        end if;
    exception when others then
        -- Locks, a full disk, somebody's event trigger: nothing of that is the concern of a claim.
        null;
    end;
end;
$$;
comment on function pgqueue._archive_housekeeping(timestamptz) is
'The look of a sweep after the archive: makes the days ahead, files what is unfiled, forgets promises that are over and empties a day that nobody wants any more, unless it may be long until the commit. Waits for nobody, and never fails.';

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
