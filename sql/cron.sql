-- The times of cron expressions. A tick is a moment at which the wall clock of a time zone shows a time that the
-- expression matches. Where the clock changes, the rules are those of Debian's cron: see _next_tick.

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
comment on function pgqueue._parse_cron is
'The values that the fields of a cron expression allow. is_fixed: neither the minute nor the hour begins with *; such
times have rules of their own where the clock changes. needs_both: a day must match both fields of days, because one of
them begins with *; otherwise one match is enough. Raises 22023.';

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
comment on function pgqueue._next_tick is
'The first moment after another one that a cron expression matches in a time zone; null if there is none within 41
years. Raises 22023 for an invalid expression.';
