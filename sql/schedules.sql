-- Schedules: a message at each tick of a cron expression. The message of the next tick waits in scheduled_messages, as
-- any delayed message does. When the message leaves scheduled_messages, a trigger adds the message of the following
-- tick in the same transaction. So each schedule has one message in that table, and no daemon is needed.

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
comment on function pgqueue._add_next_tick_message is
'If the time of the following tick cannot be computed, the schedule stops. Housekeeping tries again.';

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
            -- A time zone that the server does not know, for example, must not fail a claim.
            null;
        end;
    end loop;
end;
$$;
comment on function pgqueue._on_housekeeping_due_schedules is
'Adds the message of the next tick where it is missing, because a table was truncated or the trigger disabled.';
