-- Schedules: a message at each tick of a cron expression. The message of the next tick waits in scheduled_messages, as
-- any delayed message does. When the message leaves scheduled_messages, a trigger adds the message of the following
-- tick in the same transaction. So each schedule has one message in that table, and no daemon is needed.
--
-- A tick is a moment at which the wall clock of a time zone shows a time that the cron expression matches. Where the
-- clock changes, the rules are those of Debian's cron: see _next_tick.

-- is_fixed: neither the minute nor the hour begins with *; such times have rules of their own where the clock changes.
-- needs_both: a day must match both fields of days, because one of them begins with *; otherwise one match is enough.
create or replace function pgqueue._parse_cron(
    cron text, out minutes int[], out hours int[], out days int[], out months int[], out weekdays int[],
    out is_fixed boolean, out needs_both boolean
)
language plpgsql stable as $$
declare
    -- Other collations, such as that of Turkish, have other lower case letters.
    trimmed constant text := lower(regexp_replace(cron, '^[[:space:]]+|[[:space:]]+$', '', 'g') collate "C");
    fields constant text[] := regexp_split_to_array(case trimmed
        when '@hourly' then '0 * * * *'
        when '@daily' then '0 0 * * *'
        when '@midnight' then '0 0 * * *'
        when '@weekly' then '0 0 * * 0'
        when '@monthly' then '0 0 1 * *'
        when '@yearly' then '0 0 1 1 *'
        when '@annually' then '0 0 1 1 *'
        else trimmed
    end, '[[:space:]]+');
    problem text := case
        when cron is null or char_length(cron) > 200 then 'it must have at most 200 characters'
        when cardinality(fields) <> 5 then format('it has %s', pgqueue._with_number(cardinality(fields), 'field'))
    end;
begin
    -- Materialized: otherwise every use of a column would match the part again.
    with ranges as materialized (
        select
            l.n, l.least_value, l.most_value, p.part, coalesce(m[4]::int, 1) as step,
            case when m[1] = '*' then l.least_value else v.lower_end end as first_value,
            -- 5/15 is from 5 on.
            case
                when m[1] = '*' or m[3] is null and m[4] is not null then l.most_value
                when m[3] is null then v.lower_end
                else v.upper_end
            end as last_value
        from (values
            (1, 0, 59, '{}'::text[]), (2, 0, 23, '{}'), (3, 1, 31, '{}'),
            (4, 1, 12, '{jan,feb,mar,apr,may,jun,jul,aug,sep,oct,nov,dec}'), (5, 0, 7, '{sun,mon,tue,wed,thu,fri,sat}')
        ) as l (n, least_value, most_value, names)
        cross join string_to_table(fields[l.n], ',') as p (part)
        -- Without backslashes, which the session's standard_conforming_strings gives another meaning.
        cross join regexp_match(p.part, '^(?:([*])|([0-9]{1,2}|[a-z]{3})(?:-([0-9]{1,2}|[a-z]{3}))?)(?:/([0-9]{1,2}))?$') as m
        cross join lateral (
            select
                case when m[2] ~ '^[0-9]' then m[2]::int else array_position(l.names, m[2]) - 1 + l.least_value end as lower_end,
                case when m[3] ~ '^[0-9]' then m[3]::int else array_position(l.names, m[3]) - 1 + l.least_value end as upper_end
        ) as v
    )
    select
        coalesce(problem, min(format('%L is not a value, a range or a step within %s to %s', r.part, r.least_value, r.most_value)) filter (
            where (r.step > 0 and r.first_value between r.least_value and r.last_value and r.last_value <= r.most_value) is not true)),
        array_agg(distinct v) filter (where r.n = 1), array_agg(distinct v) filter (where r.n = 2),
        array_agg(distinct v) filter (where r.n = 3), array_agg(distinct v) filter (where r.n = 4),
        array_agg(distinct v % 7) filter (where r.n = 5)
    into problem, minutes, hours, days, months, weekdays
    from ranges r left join generate_series(r.first_value, r.last_value, nullif(r.step, 0)) as v on true;
    if problem is not null then
        perform pgqueue._raise_invalid(
            'cron', cron, format('five fields, such as 0 9 * * mon-fri, or a word such as @daily: %s', problem));
    end if;
    is_fixed := left(fields[1], 1) <> '*' and left(fields[2], 1) <> '*';
    needs_both := left(fields[3], 1) = '*' or left(fields[5], 1) = '*';
end;
$$;

-- Null if there is no tick within 41 years. Raises 22023 for an invalid expression.
create or replace function pgqueue._next_tick(cron text, time_zone text, after timestamptz) returns timestamptz
language plpgsql stable as $$
declare
    c constant record := pgqueue._parse_cron(cron);
    -- The minutes of a day at which the fields of the time match.
    times constant int[] := array(select h * 60 + m from unnest(c.hours) as h cross join unnest(c.minutes) as m);
    day date;
    midnight timestamptz;
    tick timestamptz;
begin
    -- The day before can have ticks after this moment, if its last hour is repeated. February 29 on a given weekday can
    -- be 40 years away.
    for day in
        select w.day
        from (select (after at time zone time_zone)::date + generate_series(-1, 15000) as day) w
        where date_part('month', w.day)::int = any (c.months)
            and case
                when c.needs_both then date_part('day', w.day)::int = any (c.days) and date_part('dow', w.day)::int = any (c.weekdays)
                else date_part('day', w.day)::int = any (c.days) or date_part('dow', w.day)::int = any (c.weekdays)
            end
    loop
        midnight := day::timestamp at time zone time_zone;
        if (midnight - interval '12 h') at time zone time_zone + interval '48 h' = (midnight + interval '36 h') at time zone time_zone
        then
            select min(midnight + n * interval '1 min') into tick
            from unnest(times) as n where midnight + n * interval '1 min' > after;
        else
            -- The offset from UTC changes about this day. Each minute that passes is compared with the wall clock.
            -- latest is the latest time that the wall clock has shown before. A fixed time ticks when the wall clock
            -- first shows it or a later time; other times tick whenever the wall clock shows them.
            select min(m.t) into tick
            from (
                select w.t, w.wall, max(w.wall) over (order by w.t rows between unbounded preceding and 1 preceding) as latest
                from (
                    select t, t at time zone time_zone as wall
                    from generate_series(midnight - interval '27 h', midnight + interval '51 h', interval '1 min') as t
                ) w
            ) m
            where m.t > after
                and case
                    when c.is_fixed and m.wall <= m.latest then false
                    when c.is_fixed and m.wall > m.latest + interval '1 min' then exists (
                        select from unnest(times) as n
                        where day::timestamp + n * interval '1 min' > m.latest
                            and day::timestamp + n * interval '1 min' <= m.wall
                    )
                    else m.wall::date = day
                        and date_part('hour', m.wall)::int * 60 + date_part('minute', m.wall)::int = any (times)
                end;
        end if;
        exit when tick is not null;
    end loop;
    return tick;
end;
$$;

create or replace function pgqueue._tick_headers(s pgqueue.schedules, tick timestamptz) returns jsonb
language sql stable as $$
    select coalesce(s.headers, '{}') || jsonb_build_object(
        'pgqueue.schedule', s.name,
        'pgqueue.scheduled_for', to_char(tick at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'))
$$;

create or replace function pgqueue._add_tick_message(s pgqueue.schedules, tick timestamptz) returns void
language plpgsql volatile as $$
begin
    s.next_id := null;
    insert into pgqueue.scheduled_messages (queue_name, due_at, enqueued_at, max_attempts, expires_at, payload, headers)
    select
        q.name, pgqueue._clamp_due_at(tick), tick, q.max_attempts,
        case when not s.catch_up then pgqueue._next_tick(s.cron, s.time_zone, tick) end,
        s.payload, pgqueue._tick_headers(s, tick)
    from pgqueue.queues q
    where q.name = s.queue_name and tick is not null
    returning scheduled_messages.id into s.next_id;
    update pgqueue.schedules c
    set next_id = s.next_id, next_at = case when s.next_id is not null then tick end, last_at = s.last_at
    where c.name = s.name;
end;
$$;

create or replace function pgqueue._add_first_tick_message(s pgqueue.schedules, at timestamptz) returns timestamptz
language plpgsql volatile as $$
declare
    tick constant timestamptz := case when not s.paused then pgqueue._next_tick(s.cron, s.time_zone, at) end;
begin
    perform pgqueue._add_tick_message(s, tick);
    perform pgqueue._announce_due(q, tick) from pgqueue.queues q where q.name = s.queue_name and tick is not null;
    return tick;
end;
$$;

-- If the time of the following tick cannot be computed, the schedule stops. Housekeeping tries again.
create or replace function pgqueue._add_next_tick_message() returns trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    s pgqueue.schedules;
    tick timestamptz;
    span interval := interval '1 min';
    early timestamptz;
begin
    -- A message that comes back with a delay has the header, too, but is no longer the next one.
    select schedules.* into s from pgqueue.schedules
    where schedules.name = old.headers ->> 'pgqueue.schedule' and schedules.next_id = old.id
        and schedules.queue_name = old.queue_name
    for update;
    if not found then
        return null;
    end if;
    begin
        -- The relation of a transport takes messages before they are due.
        if old.due_at <= at
            or exists (select from pgqueue.messages m where m.queue_name = old.queue_name and m.id = old.id)
        then
            tick := pgqueue._next_tick(s.cron, s.time_zone, greatest(at, old.due_at));
            s.last_at := s.next_at;
            if old.expires_at <= at then
                -- No consumer claimed it in time. The message of the last tick that has passed can still be valid. Step
                -- back until a tick lies between early and at, and then forward by half of the step while one still
                -- does. The tick that has expired is one.
                early := at - span;
                while pgqueue._next_tick(s.cron, s.time_zone, early) > at loop
                    span := 2 * span;
                    early := at - span;
                end loop;
                while span > interval '1 min' loop
                    span := span / 2;
                    if pgqueue._next_tick(s.cron, s.time_zone, early + span) <= at then
                        early := early + span;
                    end if;
                end loop;
                tick := pgqueue._next_tick(s.cron, s.time_zone, early);
            end if;
            perform pgqueue._count('enqueued', s.queue_name, 1);
        else
            -- The message was removed before it was due, for example by a purge.
            tick := pgqueue._next_tick(s.cron, s.time_zone, at);
        end if;
        -- No notification is needed: a consumer that waits knows when the message that was removed was due.
        perform pgqueue._add_tick_message(s, tick);
    exception when invalid_parameter_value then
        -- The server does not know the time zone any more. This must not fail a claim.
        perform pgqueue._add_tick_message(s, null);
    end;
    return null;
end;
$$;

drop trigger if exists add_next_tick_message on pgqueue.scheduled_messages;
create trigger add_next_tick_message after delete on pgqueue.scheduled_messages
for each row when (old.headers ? 'pgqueue.schedule') execute function pgqueue._add_next_tick_message();

create or replace function pgqueue._lock_schedule(name text, caller name) returns pgqueue.schedules
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    s pgqueue.schedules;
    seen pgqueue.schedules;
begin
    -- The message is locked before the schedule, as a claim does. A claim may take the message meanwhile, or another
    -- queue get a schedule of this name.
    loop
        select schedules.* into s from pgqueue.schedules where schedules.name = _lock_schedule.name collate "C";
        if not found or not pgqueue._may_use(caller, s.queue_name, pgqueue._privileges_of('{admin}')) then
            perform pgqueue._raise('schedule_not_found', name);
        end if;
        seen := s;
        begin
            perform pgqueue._get_locked_queue(s.queue_name);
        exception when sqlstate 'PQ001' then
            -- The queue and its schedules were dropped meanwhile.
            perform pgqueue._raise('schedule_not_found', name);
        end;
        perform from pgqueue.scheduled_messages m where m.queue_name = s.queue_name and m.id = s.next_id for update;
        select schedules.* into s from pgqueue.schedules where schedules.name = s.name for update;
        exit when s.next_id is not distinct from seen.next_id and s.queue_name = seen.queue_name;
    end loop;
    return s;
end;
$$;

create or replace function pgqueue._check_schedule(s pgqueue.schedules) returns pgqueue.schedules
language plpgsql volatile as $$
declare
    q pgqueue.queues;
    zone text;
    at constant timestamptz := pgqueue._now();
begin
    perform pgqueue._raise_invalid(c.name, c.given, c.expected)
    from (values
        ('name', s.name, char_length(s.name) between 1 and 255 and s.name !~ '[[:cntrl:]]', '1 to 255 characters, without control characters'),
        ('payload', null, s.payload is not null, 'a JSON document, such as ''null'''),
        ('paused', null, s.paused is not null, 'true or false'),
        ('catch_up', null, s.catch_up is not null, 'true or false'),
        ('headers', s.headers::text, s.headers is null or jsonb_typeof(s.headers) = 'object', 'a JSON object')
    ) as c (name, given, is_valid, expected)
    where c.is_valid is not true;
    q := pgqueue._get_locked_queue(s.queue_name);
    -- "at time zone" also takes POSIX specifications, such as a misspelled name that ends in a digit, and
    -- abbreviations, such as CET, which depend on a setting of the session and have no daylight saving time.
    select z.name into zone from pg_timezone_names z
    where lower(z.name collate "C") = lower(s.time_zone collate "C") and (z.name ~ '/' or z.name = 'UTC');
    perform pgqueue._require(zone is not null, 'time_zone', s.time_zone,
        'UTC, or the name of a region in pg_timezone_names, such as Europe/Paris');
    s.time_zone := zone;
    perform pgqueue._require(pgqueue._next_tick(s.cron, s.time_zone, at) is not null, 'cron', s.cron,
        'a cron expression with a date that a day has');
    perform pgqueue._check_content(q, s.payload, null, pgqueue._tick_headers(s, at));
    return s;
end;
$$;

create or replace function pgqueue.create_schedule(
    name text,
    queue_name pgqueue.queue_of_admin,
    cron text,
    payload jsonb default 'null',
    headers jsonb default null,
    time_zone text default 'UTC',
    paused boolean default false,
    catch_up boolean default true,
    priority int default null,
    group_key text default null,
    if_not_exists boolean default false
) returns timestamptz
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    s pgqueue.schedules;
begin
    perform pgqueue._require(if_not_exists is not null, 'if_not_exists', null, 'true or false');
    perform pgqueue._check_keys(null, array[group_key], array[priority]);
    s := row(
        name, queue_name, cron, payload, pgqueue._with_group_and_priority(headers, group_key, priority), time_zone,
        paused, catch_up, null, null, null);
    s := pgqueue._check_schedule(s);
    insert into pgqueue.schedules select (s).* on conflict do nothing;
    if not found then
        select e.next_at into s.next_at from pgqueue.schedules e
        where if_not_exists and e.name = s.name and e.queue_name = s.queue_name;
        if not found then
            perform pgqueue._raise('schedule_exists', name);
        end if;
        return s.next_at;
    end if;
    return pgqueue._add_first_tick_message(s, pgqueue._now());
end;
$$;
comment on function pgqueue.create_schedule is
'Creates a schedule: at each tick of cron, the queue gets a message with payload and headers. Returns the time of the
first tick, or null if the schedule is paused. name is 1 to 255 characters, without control characters, and unique in
the database. cron has five fields: minute, hour, day of month, month, day of week, with names (jan, sun), lists, ranges
and steps; or is @hourly, @daily, @midnight, @weekly, @monthly, @yearly or @annually. If neither day field begins with
*, a day needs to match one of them, else both. time_zone is UTC or the name of a region in pg_timezone_names. If
daylight saving time skips an hour, a fixed time in it ticks at the end of the gap. If an hour is repeated, a fixed time
in it ticks the first time only. If the minute or the hour begins with *, there is a tick each time the local time
matches. The headers of the message also have pgqueue.schedule, the name, and pgqueue.scheduled_for, the time of the
tick in UTC. If no consumer claims while ticks pass, one message waits. It is the message of the first missed tick; if
catch_up is false, the last. Without catch_up, a message expires at the next tick if it is not finished by then.
priority (0 to 9, the highest; null is 0) is for a queue with priorities, and group_key (1 to 255 characters; null:
none) for a queue with group_limit; they become the headers pgqueue.priority and pgqueue.group of the schedule, and do
nothing in other queues. With group_limit 1, the message of a tick waits until the message of the tick before is
finished. While a transaction that received the message of a tick is open, the next ticks wait for it. A queue with a
schedule that is not paused is never idle. If if_not_exists (false) and the queue has a schedule of this name, that
stays unchanged, and the time of its next tick is returned. Raises 22023, PQ001, PQ003, PQ012.';

create or replace function pgqueue.alter_schedule(
    name text,
    cron text default null,
    payload jsonb default null,
    headers jsonb default null,
    time_zone text default null,
    paused boolean default null,
    catch_up boolean default null,
    priority int default null,
    group_key text default null,
    caller pgqueue.caller default current_user
) returns timestamptz
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
set enable_bitmapscan = off set jit = off as $$
declare
    s pgqueue.schedules := pgqueue._lock_schedule(name, caller);
begin
    s.cron := coalesce(alter_schedule.cron, s.cron);
    s.payload := coalesce(alter_schedule.payload, s.payload);
    perform pgqueue._check_keys(null, array[group_key], array[priority]);
    s.headers := pgqueue._with_group_and_priority(coalesce(alter_schedule.headers, s.headers), group_key, priority);
    s.time_zone := coalesce(alter_schedule.time_zone, s.time_zone);
    s.paused := coalesce(alter_schedule.paused, s.paused);
    s.catch_up := coalesce(alter_schedule.catch_up, s.catch_up);
    -- A schedule whose settings have become invalid, for example because the time zone is gone, can still be paused.
    if not s.paused or coalesce(
            cron, payload::text, headers::text, time_zone, catch_up::text, priority::text, group_key) is not null
    then
        s := pgqueue._check_schedule(s);
    end if;
    -- The update comes first: otherwise the trigger would add the message again.
    update pgqueue.schedules c
    set cron = s.cron, payload = s.payload, headers = s.headers, time_zone = s.time_zone, paused = s.paused,
        catch_up = s.catch_up, next_id = null, next_at = null
    where c.name = s.name;
    delete from pgqueue.scheduled_messages m where m.queue_name = s.queue_name and m.id = s.next_id;
    return pgqueue._add_first_tick_message(s, pgqueue._now());
end;
$$;
comment on function pgqueue.alter_schedule is
'Changes the settings that are given and leaves the others. The priority and the group are headers: new headers without
pgqueue.priority or pgqueue.group remove them, unless priority or group_key is given, too. Returns the time of the next
tick; null if the schedule is paused. While it is paused, it has no ticks. Messages of earlier ticks stay as they are,
but the message of a tick that no consumer has claimed yet is removed. Waits for a transaction that is claiming a tick.
Raises 22023, PQ003, PQ011.';

create or replace function pgqueue.drop_schedule(name text, caller pgqueue.caller default current_user) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
set enable_bitmapscan = off set jit = off as $$
declare
    s pgqueue.schedules;
begin
    s := pgqueue._lock_schedule(name, caller);
    delete from pgqueue.schedules c where c.name = s.name;
    delete from pgqueue.scheduled_messages m where m.queue_name = s.queue_name and m.id = s.next_id;
    return true;
exception when sqlstate 'PQ011' then
    return false;
end;
$$;
comment on function pgqueue.drop_schedule is
'Drops a schedule and returns true; false if there is none. Messages that were claimed stay; the message of a tick that
no consumer has claimed yet is removed. drop_queue drops the schedules of the queue. Waits for a transaction that is
claiming a tick.';

create or replace function pgqueue.list_schedules(
    queue_name pgqueue.queue_of_consumer_admin_or_reader default null, caller pgqueue.caller default current_user
) returns setof pgqueue.schedule
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    if queue_name is not null then
        perform pgqueue._get_unlocked_queue(queue_name);
    end if;
    return query
    select s.name, s.queue_name, s.cron, s.payload, s.headers, s.time_zone, s.paused, s.catch_up, s.next_at, s.last_at
    from pgqueue.schedules s
    where (list_schedules.queue_name is null or s.queue_name = list_schedules.queue_name collate "C")
        and pgqueue._may_use(caller, s.queue_name, pgqueue._privileges_of('{consumer,admin,reader}'))
    order by s.name;
end;
$$;
comment on function pgqueue.list_schedules is
'Returns the schedules of a queue, or of all queues if queue_name is null, by name. next_at is the time of the next
tick; it lies in the past if no consumer has claimed since. Raises PQ001.';

create or replace function pgqueue.run_schedule(name text, caller pgqueue.caller default current_user) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    s pgqueue.schedules;
begin
    select schedules.* into s from pgqueue.schedules where schedules.name = run_schedule.name collate "C";
    if not found or not pgqueue._may_use(caller, s.queue_name, pgqueue._privileges_of('{producer,admin}')) then
        perform pgqueue._raise('schedule_not_found', name);
    end if;
    return pgqueue.enqueue(s.queue_name, s.payload, headers => pgqueue._tick_headers(s, pgqueue._now()));
end;
$$;
comment on function pgqueue.run_schedule is
'Sends the message of a schedule now, also if the schedule is paused, and returns its id. The ticks stay as they are.
Raises PQ001, PQ003, PQ011.';

create or replace function pgqueue._findings_of_schedules(q pgqueue.queues) returns setof pgqueue.finding
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    s pgqueue.schedules;
    problem text;
    repair text;
begin
    for s in select c.* from pgqueue.schedules c where c.queue_name = q.name and not c.paused order by c.name loop
        problem := null;
        repair := format('select pgqueue.alter_schedule(%L);', s.name);
        begin
            if not exists (select from pgqueue.scheduled_messages m where m.queue_name = q.name and m.id = s.next_id) then
                problem := 'has no next tick';
            end if;
            if pgqueue._next_tick(s.cron, s.time_zone, pgqueue._now()) < s.next_at then
                problem := format('has its next tick at %s only, because the clock was ahead', s.next_at);
            end if;
        exception when invalid_parameter_value then
            problem := format('has stopped: %s', sqlerrm);
            repair := format('select pgqueue.alter_schedule(%L, time_zone => ''UTC'');', s.name);
        end;
        if problem is not null then
            return next row('error', q.name, 'stopped_schedule', format('schedule %L %s', s.name, problem), repair)::pgqueue.finding;
        end if;
    end loop;
end;
$$;

-- Adds the message of the next tick where it is missing, because a table was truncated or the trigger disabled.
create or replace function pgqueue._on_housekeeping_due_schedules(at timestamptz) returns void
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set jit = off as $$
declare
    s pgqueue.schedules;
    q pgqueue.queues;
begin
    for s in
        select c.* from pgqueue.schedules c
        where not c.paused
            -- `offset 0` keeps the planner from a join that reads all scheduled messages. The order, without a sort,
            -- keeps it from the index on due_at.
            and not exists (
                select from pgqueue.scheduled_messages m
                where m.queue_name = c.queue_name and m.id between c.next_id and c.next_id
                order by m.id offset 0)
        limit 100 for update skip locked
    loop
        -- Each statement sees what other transactions have committed before it starts.
        select queues.* into q from pgqueue.queues where queues.name = s.queue_name;
        begin
            if q.name is not null and pgqueue._try_lock_existing_queue(q)
                and not exists (select from pgqueue.scheduled_messages m where m.queue_name = q.name and m.id = s.next_id)
            then
                perform pgqueue._add_first_tick_message(s, at);
            end if;
        exception when others then
            -- One schedule must not fail a claim, for example by a time zone that the server does not know.
            null;
        end;
    end loop;
end;
$$;
