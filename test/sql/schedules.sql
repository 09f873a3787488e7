begin;
-- The lock makes test files wait for each other: this file stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:30+00';
set local timezone = 'America/New_York';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;
create function pg_temp.utc(moment timestamptz) returns text language sql
as $$ select to_char(moment at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS') $$;
create function pg_temp.ticks(cron text, time_zone text, after timestamptz, number int) returns text language plpgsql as $$
declare
    found text[] := '{}'::text[];
begin
    for n in 1..number loop
        after := pgqueue._next_tick(cron, time_zone, after);
        found := found || to_char(after at time zone time_zone, 'MM-DD HH24:MI');
    end loop;
    return array_to_string(found, ', ');
end $$;

select plan(150);

-- Cron expressions.
create temp table expressions (cron text, ticks text, description text);
insert into expressions values
('* * * * *', '01-01 12:01, 01-01 12:02, 01-01 12:03', 'five stars tick every minute'),
('*/20 * * * *', '01-01 12:20, 01-01 12:40, 01-01 13:00', 'a step ticks at its multiples'),
('5/20 * * * *', '01-01 12:05, 01-01 12:25, 01-01 12:45', 'a step behind a number starts there'),
('10-30/10 * * * *', '01-01 12:10, 01-01 12:20, 01-01 12:30', 'a step within a range stays in the range'),
('0,30 9-10 * * *', '01-02 09:00, 01-02 09:30, 01-02 10:00', 'lists and ranges combine'),
('0 0 * * MON', '01-07 00:00, 01-14 00:00, 01-21 00:00', 'a weekday may be a name in any case'),
('0 0 * * 0', '01-06 00:00, 01-13 00:00, 01-20 00:00', 'weekday 0 is Sunday'),
('0 0 * * 7', '01-06 00:00, 01-13 00:00, 01-20 00:00', 'weekday 7 is Sunday, too'),
('0 0 * * fri-7', '01-04 00:00, 01-05 00:00, 01-06 00:00', 'a range of weekdays may end with Sunday'),
('0 0 1 mar,jun *', '03-01 00:00, 06-01 00:00, 03-01 00:00', 'a month may be a name'),
('0 0 31 * *', '01-31 00:00, 03-31 00:00, 05-31 00:00', 'months without day 31 are skipped'),
('0 0 29 2 *', '02-29 00:00, 02-29 00:00, 02-29 00:00', 'February 29 ticks in leap years'),
('0 0 13 * fri', '01-04 00:00, 01-11 00:00, 01-13 00:00', 'a day matches one of two day fields'),
('0 0 */13 * fri', '02-01 00:00, 03-01 00:00, 06-14 00:00', 'a day matches both day fields if one begins with a star'),
('@hourly', '01-01 13:00, 01-01 14:00, 01-01 15:00', '@hourly ticks every hour'),
(' @Daily ', '01-02 00:00, 01-03 00:00, 01-04 00:00', '@daily ticks at midnight'),
('@midnight', '01-02 00:00, 01-03 00:00, 01-04 00:00', '@midnight ticks at midnight'),
('@weekly', '01-06 00:00, 01-13 00:00, 01-20 00:00', '@weekly ticks on Sundays'),
('@monthly', '02-01 00:00, 03-01 00:00, 04-01 00:00', '@monthly ticks on the first day of a month'),
('@yearly', '01-01 00:00, 01-01 00:00, 01-01 00:00', '@yearly ticks on January 1'),
('@annually', '01-01 00:00, 01-01 00:00, 01-01 00:00', '@annually ticks on January 1'),
(e' 0\t12  * * *\n', '01-02 12:00, 01-03 12:00, 01-04 12:00', 'fields may be separated by any white space');
select is(pg_temp.ticks(e.cron, 'UTC', pgqueue._now(), 3), e.ticks, e.description) from expressions e;
select is(pgqueue._next_tick('30 12 * * *', 'UTC', '2030-01-01 12:30:00+00'), '2030-01-02 12:30:00+00', '_next_tick returns a tick after the given moment, not at it');
select is(pgqueue._next_tick('0 0 29 2 */7', 'UTC', '2088-03-01 00:00+00'), '2128-02-29 00:00+00', 'February 29 on a Sunday is found 40 years ahead');

select is((select cardinality(c.minutes) * cardinality(c.hours) from pgqueue._parse_cron(repeat('0-59,', 15) || '0 ' || repeat('0-23,', 15) || '0 * * *') c), 1440, 'a cron expression that repeats its values has each of them once');
-- A collation, such as that of Turkish, can have its own rules for letters. The lower case of U+0130 is i in C.utf8.
select throws_ok($$ select pgqueue._next_tick(format('0 0 * * FR%s', chr(304)) collate "C.utf8", 'UTC', pgqueue._now()) $$, '22023', null, 'the collation has no effect on the names of weekdays');

-- Daylight saving time: in Berlin the wall clock goes from 02:00 to 03:00 on March 31, and from 03:00 to 02:00 on
-- October 27.
select is(pg_temp.ticks('30 2 * * *', 'Europe/Berlin', '2030-03-30 00:00+00', 3), '03-30 02:30, 03-31 03:00, 04-01 02:30', 'a fixed time that a day skips ticks at the end of the gap');
select is(pg_temp.ticks('10,50 2 * * *', 'Europe/Berlin', '2030-03-31 00:00+00', 2), '03-31 03:00, 04-01 02:10', 'two fixed times in a gap have one tick');
select is(pg_temp.ticks('30 2 * * *', 'Europe/Berlin', '2030-10-26 12:00+00', 2), '10-27 02:30, 10-28 02:30', 'a fixed time that occurs twice has one tick');
select is(pgqueue._next_tick('30 2 * * *', 'Europe/Berlin', '2030-10-26 12:00+00'), '2030-10-27 00:30+00', 'a fixed time that occurs twice has its tick at the first time');
select is(pg_temp.ticks('*/30 * * * *', 'Europe/Berlin', '2030-03-31 00:15+00', 3), '03-31 01:30, 03-31 03:00, 03-31 03:30', 'a schedule with * in the hour has no tick in the gap');
select is(pg_temp.ticks('*/30 * * * *', 'Europe/Berlin', '2030-10-26 23:45+00', 5), '10-27 02:00, 10-27 02:30, 10-27 02:00, 10-27 02:30, 10-27 03:00', 'a schedule with * in the hour has ticks in both hours that the wall clock shows twice');
select is(pg_temp.ticks('30 * * * *', 'Australia/Lord_Howe', '2030-04-06 14:00+00', 4), '04-07 01:30, 04-07 01:30, 04-07 02:30, 04-07 03:30', 'an hourly tick follows a change of half an hour');
select is(pg_temp.ticks('0 10 * * *', 'Pacific/Apia', '2011-12-29 12:00+00', 3), '12-29 10:00, 12-31 00:00, 12-31 10:00', 'a fixed time on a day that a time zone skips ticks when the next day begins');

-- A message at each tick.
select pgqueue.create_queue('schedules', max_attempts => 3) is not null as made \gset
select is(pgqueue.create_schedule('nightly', 'schedules', '0 3 * * *', '{"job": "report"}', '{"tenant": "a"}'), '2030-01-02 03:00+00', 'create_schedule returns the time of the first tick');
select is(pgqueue.next_due_at('schedules'), '2030-01-02 03:00+00', 'next_due_at returns the time of the next tick');
select is((select s.scheduled_messages || ' ' || s.ready_messages || ' ' || s.enqueued_total from pgqueue.stats('schedules') s), '1 0 0', 'stats counts the next tick as scheduled, not yet as enqueued');
select is_empty($$ select pgqueue.claim('schedules') $$, 'claim returns nothing before the tick');
select pg_temp.pass('15 h') \gset
create temp table claimed as select * from pgqueue.claim('schedules', 10, '1 min');
select results_eq($$ select c.payload, c.headers, c.attempt_count, pg_temp.utc(c.enqueued_at) from claimed c $$,
    $$ values ('{"job": "report"}'::jsonb, '{"tenant": "a", "pgqueue.schedule": "nightly", "pgqueue.scheduled_for": "2030-01-02T03:00:00Z"}'::jsonb, 1, '2030-01-02 03:00:00') $$,
    'claim returns one message at the tick, with the content and the time of the schedule');
select is(pgqueue.next_due_at('schedules'), '2030-01-02 03:01:30+00', 'next_due_at returns the end of the claim');
select results_eq($$ select l.name, l.queue_name, l.cron, l.time_zone, l.paused, l.catch_up, pg_temp.utc(l.next_at), pg_temp.utc(l.last_at) from pgqueue.list_schedules('schedules') l $$,
    $$ values ('nightly', 'schedules', '0 3 * * *', 'UTC', false, true, '2030-01-03 03:00:00', '2030-01-02 03:00:00') $$, 'list_schedules returns the next and the last tick');
select is((select s.enqueued_total || ' ' || s.inflight_messages || ' ' || s.scheduled_messages from pgqueue.stats('schedules') s), '1 1 1', 'stats counts the tick as enqueued when a claim takes it');
select is((select pgqueue.nack('schedules', c.id, c.claim_token, '1 h') from claimed c), true, 'nack returns the message of a tick to the queue');
select pg_temp.pass('1 h') \gset
truncate claimed;
insert into claimed select * from pgqueue.claim('schedules', 10, '1 min');
select is((select array_agg(c.attempt_count) from claimed c), '{2}', 'a retried tick comes back once');
select is((select count(*) from pgqueue.scheduled_messages s where s.queue_name = 'schedules'), 1::bigint, 'a retried tick adds no further message');
select is((select pgqueue.ack('schedules', c.id, c.claim_token) from claimed c), true, 'ack settles the message of a tick');

-- Missed ticks.
select pg_temp.pass('10 days') \gset
truncate claimed;
insert into claimed select * from pgqueue.claim('schedules', 10);
select is((select array_agg(c.headers ->> 'pgqueue.scheduled_for') from claimed c), '{2030-01-03T03:00:00Z}', 'claim returns one message for all ticks that no consumer claimed');
select is((select pg_temp.utc(l.next_at) from pgqueue.list_schedules() l), '2030-01-13 03:00:00', 'ticks go on after the present moment');
select is((select pgqueue.ack('schedules', c.id, c.claim_token) from claimed c), true, 'ack settles a late tick');
select is(pgqueue.alter_schedule('nightly', catch_up => false), '2030-01-13 03:00+00', 'alter_schedule returns the time of the next tick');
select pg_temp.pass('4 days') \gset
select is((select c.headers ->> 'pgqueue.scheduled_for' from pgqueue.claim('schedules') c), '2030-01-16T03:00:00Z', 'without catch_up claim returns the last of the ticks that no consumer claimed, and no other');
select is_empty($$ select pgqueue.claim('schedules') $$, 'without catch_up one tick is delivered after several were missed');
select is((select pg_temp.utc(l.next_at) from pgqueue.list_schedules() l), '2030-01-17 03:00:00', 'without catch_up the ticks go on after the present moment');
select set_config('test.now', '2030-01-17 20:00+00', true) is not null as passed \gset
select is((select count(*) from pgqueue.claim('schedules')), 1::bigint, 'without catch_up a tick is delivered late, but before the next one');
delete from pgqueue.messages where queue_name = 'schedules';

-- Changes.
select is(pgqueue.alter_schedule('nightly', cron => '15 8 * * *', time_zone => 'europe/paris', payload => '2', headers => '{}', catch_up => true), '2030-01-18 07:15+00', 'alter_schedule changes the times');
select results_eq($$ select s.payload, s.headers - 'pgqueue.scheduled_for', pg_temp.utc(s.due_at) from pgqueue.scheduled_messages s where s.queue_name = 'schedules' $$,
    $$ values ('2'::jsonb, '{"pgqueue.schedule": "nightly"}'::jsonb, '2030-01-18 07:15:00') $$, 'alter_schedule replaces the message of the next tick');
select is((select l.time_zone from pgqueue.list_schedules() l), 'Europe/Paris', 'list_schedules spells a time zone as PostgreSQL does');
select is(pgqueue.alter_schedule('nightly', paused => true), null, 'alter_schedule returns null for a paused schedule');
select is((select count(*) from pgqueue.scheduled_messages s where s.queue_name = 'schedules'), 0::bigint, 'a paused schedule has no next tick');
select pgqueue.run_schedule('nightly') as ran \gset
select is((select m.payload from pgqueue.messages m where m.id = :ran), '2'::jsonb, 'run_schedule sends a message at once, also while the schedule is paused');
select is((select c.headers from pgqueue.claim('schedules') c), '{"pgqueue.schedule": "nightly", "pgqueue.scheduled_for": "2030-01-17T20:00:00Z"}', 'the message of run_schedule has the present time in its headers');
select is(pgqueue.alter_schedule('nightly', paused => false), '2030-01-18 07:15+00', 'alter_schedule resumes a schedule');
select throws_ok($$ select pgqueue.reschedule('schedules', (select s.next_id from pgqueue.schedules s where s.name = 'nightly')) $$, '22023', null, 'reschedule refuses the message of a future tick');
select pgqueue.purge_queue('schedules') is not null as purged \gset
select is((select pg_temp.utc(s.due_at) from pgqueue.scheduled_messages s where s.queue_name = 'schedules'), '2030-01-18 07:15:00', 'a purge keeps the next tick');
select is((select l.last_at from pgqueue.list_schedules() l), '2030-01-17 03:00+00', 'a message that is removed before its tick is no tick');
delete from pgqueue.schedules where name = 'nightly';

-- Priorities.
create function pg_temp.headers() returns jsonb language sql as $$
    select s.headers - 'pgqueue.scheduled_for' - 'pgqueue.schedule' from pgqueue.scheduled_messages s where s.queue_name = 'schedules' and s.headers ->> 'pgqueue.schedule' = 'urgent'
$$;
select pgqueue.create_schedule('urgent', 'schedules', '@daily', headers => '{"a": 1}', priority => 7) \g /dev/null
select is(pg_temp.headers(), '{"a": 1, "pgqueue.priority": 7}', 'create_schedule gives its messages a priority');
select pgqueue.alter_schedule('urgent', priority => 0) \g /dev/null
select is(pg_temp.headers(), '{"a": 1, "pgqueue.priority": 0}', 'alter_schedule changes the priority and leaves the other headers');
select pgqueue.run_schedule('urgent') as ran \gset
select is((select m.headers -> 'pgqueue.priority' from pgqueue.messages m where m.id = :ran), '0', 'the message of run_schedule has the priority');
select pgqueue.alter_schedule('urgent', headers => '{"b": 2}') \g /dev/null
select is(pg_temp.headers(), '{"b": 2}', 'new headers without a priority remove it');
select throws_ok($$ select pgqueue.create_schedule('bad', 'schedules', '@daily', priority => 10) $$, '22023', 'invalid priority: ''10''', 'create_schedule refuses a priority above 9');
select throws_ok($$ select pgqueue.alter_schedule('urgent', priority => -1) $$, '22023', 'invalid priority: ''-1''', 'alter_schedule refuses a negative priority');
select pgqueue.alter_schedule('urgent', group_key => 'backup') \g /dev/null
select is(pg_temp.headers(), '{"b": 2, "pgqueue.group": "backup"}', 'alter_schedule gives the messages a group');
select throws_ok($$ select pgqueue.create_schedule('bad', 'schedules', '@daily', group_key => '') $$, '22023', 'invalid group_key: ''''', 'create_schedule refuses an empty group_key');
select throws_ok($$ select pgqueue.alter_schedule('urgent', group_key => repeat('x', 256)) $$, '22023', format('invalid group_key: %L', repeat('x', 200)), 'alter_schedule refuses a group_key of 256 characters');
select pgqueue.drop_schedule('urgent'), pgqueue.purge_queue('schedules') \g /dev/null

-- Groups: with group_limit 1 a tick waits for the tick before, and no message waits for a tick that is not due.
select pgqueue.create_queue('schedules_grouped', group_limit => 1), pgqueue.create_schedule('backup', 'schedules_grouped', '@hourly', group_key => 'backup') \g /dev/null
create function pg_temp.claim_tick() returns text language sql as $$
    with taken as (insert into claimed select * from pgqueue.claim('schedules_grouped', 10, '5 h') returning *)
    select string_agg(coalesce(t.headers ->> 'pgqueue.scheduled_for', t.payload #>> '{}'), ' ') from taken t
$$;
truncate claimed;
select pg_temp.pass('1 h') \gset
select is(pg_temp.claim_tick(), '2030-01-17T21:00:00Z', 'claim returns the message of a tick with a group');
select pg_temp.pass('1 h') \gset
select is(pg_temp.claim_tick(), null, 'the message of the next tick waits while the message of the tick before is in flight');
select is((select pgqueue.ack('schedules_grouped', c.id, c.claim_token) from claimed c), true, 'ack settles the message of a tick with a group');
truncate claimed;
select pgqueue.enqueue('schedules_grouped', '"sent"', group_key => 'backup') \g /dev/null
select is(pg_temp.claim_tick(), '2030-01-17T22:00:00Z', 'the message of the next tick is claimed when the one before is acknowledged');
select pgqueue.ack('schedules_grouped', c.id, c.claim_token) from claimed c \g /dev/null
select is(pg_temp.claim_tick(), 'sent', 'a message of the group does not wait for a tick that is not due');
select pgqueue.drop_queue('schedules_grouped'), set_config('test.now', '2030-01-17 20:00+00', true) \g /dev/null
select is(pgqueue.drop_schedule('nightly'), false, 'drop_schedule returns false if there is no such schedule');
select is(pgqueue.create_schedule('nightly', 'schedules', '@daily'), '2030-01-18 00:00+00', 'create_schedule can use a name again');
select is(pgqueue.drop_schedule('nightly'), true, 'drop_schedule returns true');
select is((select count(*) from pgqueue.scheduled_messages s where s.queue_name = 'schedules' and s.headers ->> 'pgqueue.scheduled_for' = '2030-01-18T00:00:00Z'), 0::bigint, 'drop_schedule removes the next tick');
select is_empty($$ select pgqueue.list_schedules() $$, 'list_schedules returns nothing when all schedules are dropped');

-- Repair, and the end of a queue.
select pgqueue.create_schedule('hourly', 'schedules', '@hourly') is not null as made, pgqueue.create_schedule('other', 'schedules', '@hourly', paused => true) is null as made_other \gset
alter table pgqueue.scheduled_messages disable trigger add_next_tick_message;
delete from pgqueue.scheduled_messages where queue_name = 'schedules';
alter table pgqueue.scheduled_messages enable trigger add_next_tick_message;
select results_eq($$ select d.severity, d.detail, d.repair from pgqueue.doctor() d where d.finding = 'stopped_schedule' $$,
    $$ values ('error', 'schedule ''hourly'' has no next tick', 'select pgqueue.alter_schedule(''hourly'');') $$, 'doctor reports a schedule whose next tick is missing');
select setval('pgqueue.next_housekeeping_at', 1), pgqueue._call_if_due('housekeeping', pgqueue._now()) is not null as done \gset
select results_eq($$ select s.headers ->> 'pgqueue.schedule', pg_temp.utc(s.due_at) from pgqueue.scheduled_messages s where s.queue_name = 'schedules' $$,
    $$ values ('hourly', '2030-01-17 21:00:00') $$, 'housekeeping adds a message of a next tick that is missing');
select is_empty($$ select from pgqueue.doctor() d where d.finding = 'stopped_schedule' $$, 'doctor reports no schedule with a next tick');
select is_empty($$ select from pgqueue.doctor() d where d.finding = 'clock_ahead' $$, 'doctor does not take the time of a next tick for a clock that was ahead');
select setval('pgqueue.next_housekeeping_at', 1), pgqueue._call_if_due('housekeeping', pgqueue._now()) is not null as done \gset
select is((select count(*) from pgqueue.scheduled_messages s where s.queue_name = 'schedules'), 1::bigint, 'housekeeping adds no second message of a tick');
update pgqueue.schedules set time_zone = 'Mars/Olympus' where name = 'hourly';
select pg_temp.pass('2 h') \gset
select is((select c.headers ->> 'pgqueue.schedule' from pgqueue.claim('schedules') c), 'hourly', 'a claim returns a tick also if the next tick cannot be computed');
select is((select d.detail from pgqueue.doctor() d where d.finding = 'stopped_schedule'), 'schedule ''hourly'' has stopped: time zone "Mars/Olympus" not recognized', 'doctor reports a schedule whose next tick cannot be computed');
select is(pgqueue.alter_schedule('hourly', paused => true), null, 'a schedule whose time zone is unknown can be paused');
select is_empty($$ select from pgqueue.doctor() d where d.finding = 'stopped_schedule' $$, 'doctor reports no paused schedule');
select setval('pgqueue.next_housekeeping_at', 1), pgqueue._call_if_due('housekeeping', pgqueue._now()) is not null as done \gset
select is(pgqueue.alter_schedule('hourly', time_zone => 'UTC', paused => false), '2030-01-17 23:00+00', 'alter_schedule adds the next tick of a stopped schedule');
update pgqueue.schedules set next_at = next_at + interval '10 years' where name = 'hourly';
select alike((select d.detail from pgqueue.doctor() d where d.finding = 'stopped_schedule'), '%because the clock was ahead', 'doctor reports a schedule whose next tick was set while the clock was ahead');
update pgqueue.schedules set next_at = next_at - interval '10 years' where name = 'hourly';

-- The relation of a transport takes messages before they are due.
select set_config('test.now', '2030-01-17 22:59:50+00', true) is not null as passed \gset
select pgqueue._move_due_messages(q, pgqueue._now() + interval '15 s', 10, '-infinity') is not null as promoted from pgqueue.queues q where q.name = 'schedules' \gset
select results_eq($$ select pg_temp.utc(l.last_at), pg_temp.utc(l.next_at) from pgqueue.list_schedules() l where l.name = 'hourly' $$,
    $$ values ('2030-01-17 23:00:00', '2030-01-18 00:00:00') $$, 'a message that is taken before its tick is followed by that of the next tick');
delete from pgqueue.messages where queue_name = 'schedules';
select pgqueue.drop_queue('schedules') is not null as dropped \gset
select is_empty($$ select pgqueue.list_schedules() $$, 'drop_queue drops the schedules of its queue');
select is_empty($$ select from pgqueue.scheduled_messages s where s.queue_name = 'schedules' union all select from pgqueue.dead_messages d where d.queue_name = 'schedules' $$, 'drop_queue leaves no message of a next tick');

-- Errors.
select pgqueue.create_queue('schedules', max_payload_bytes => 1024) is not null as made \gset
select throws_ok($$ select pgqueue.create_schedule('zone', 'schedules', '@daily', time_zone => format('EUROPE/%sSTANBUL', chr(304)) collate "C.utf8") $$, '22023', null, 'the collation has no effect on the names of time zones');
select pgqueue.create_schedule('taken', 'schedules', '@daily') is not null as made \gset
select throws_ok(format('select pgqueue.create_schedule(%L, %L, %L)', 'cron', 'schedules', c.cron), '22023', format('invalid cron: %L', c.cron), format('create_schedule refuses the cron expression %s', c.cron))
from unnest(array['', '* * * *', '* * * * * *', '60 * * * *', '* 24 * * *', '* * 0 * *', '* * 32 * *', '* * * 13 *', '* * * * 8', '5-1 * * * *', '*/0 * * * *', '* * * foo *', 'mon * * * *',
    '1, * * * *', '-1 * * * *', '1.5 * * * *', '* * L * *', '* * * * mon#1', '@reboot', '0 0 31 2 *', '0 0 30 feb *']) as c (cron);
select throws_ok($$ select pgqueue.create_schedule('cron', 'schedules', null) $$, '22023', 'invalid cron: null', 'create_schedule refuses null as cron expression');
select throws_ok($$ select pgqueue.create_schedule('cron', 'schedules', repeat('1,', 100) || '1 * * * *') $$, '22023', null, 'create_schedule refuses a cron expression of more than 200 characters');
select throws_ok(format('select pgqueue.create_schedule(%L, %L, %L, time_zone => %L)', 'zone', 'schedules', '@daily', z.name), '22023', format('invalid time_zone: %s', coalesce(quote_literal(z.name), 'null')), format('create_schedule refuses the time zone %s', quote_nullable(z.name)))
from unnest(array['Europe/Pariss', 'utc2', 'CET', '', null]) as z (name);
select throws_ok(format('select pgqueue.create_schedule(%L, %L, %L)', s.name, 'schedules', '@daily'), '22023', null, format('create_schedule refuses a name with %s', s.what))
from (values ('', 'no character'), (repeat('n', 256), '256 characters'), (e'a\nb', 'a control character'), (null, 'the value null')) as s (name, what);
select throws_ok($$ select pgqueue.create_schedule('taken', 'schedules', '@daily') $$, 'PQ012', 'schedule ''taken'' already exists', 'create_schedule refuses a name that is taken');
select is(pgqueue.create_schedule('taken', 'schedules', '@hourly', if_not_exists => true), (select l.next_at from pgqueue.list_schedules() l where l.name = 'taken'),
    'create_schedule with if_not_exists returns the next tick of a schedule that exists');
select is((select l.cron from pgqueue.list_schedules() l where l.name = 'taken'), '@daily', 'create_schedule with if_not_exists leaves a schedule unchanged');
select pgqueue.create_queue('schedules_others') is not null as made \gset
select throws_ok($$ select pgqueue.create_schedule('taken', 'schedules_others', '@daily', if_not_exists => true) $$, 'PQ012', null, 'create_schedule with if_not_exists refuses the name of a schedule of another queue');
select throws_ok($$ select pgqueue.create_schedule('a', 'schedules', '@daily', if_not_exists => null) $$, '22023', 'invalid if_not_exists: null', 'create_schedule refuses null for if_not_exists');
select throws_ok($$ select pgqueue.create_schedule('a', 'nothing', '@daily') $$, 'PQ001', 'queue ''nothing'' does not exist', 'create_schedule refuses a queue that does not exist');
select throws_ok($$ select pgqueue.create_schedule('a', 'schedules', '@daily', headers => '[]') $$, '22023', 'invalid headers: ''[]''', 'create_schedule refuses headers that are no object');
select throws_ok($$ select pgqueue.create_schedule('a', 'schedules', '@daily', payload => null) $$, '22023', 'invalid payload: null', 'create_schedule refuses a payload of SQL null');
select throws_ok($$ select pgqueue.create_schedule('a', 'schedules', '@daily', payload => to_jsonb(repeat('x', 2000))) $$, 'PQ003', null, 'create_schedule refuses a payload over the limit of the queue');
select throws_ok($$ select pgqueue.create_schedule('a', 'schedules', '@daily', paused => null) $$, '22023', 'invalid paused: null', 'create_schedule refuses null as paused');
select throws_ok($$ select pgqueue.create_schedule('a', 'schedules', '@daily', catch_up => null) $$, '22023', 'invalid catch_up: null', 'create_schedule refuses null as catch_up');
select throws_ok($$ select pgqueue.alter_schedule('nothing') $$, 'PQ011', 'schedule ''nothing'' does not exist', 'alter_schedule refuses a schedule that does not exist');
select throws_ok($$ select pgqueue.alter_schedule('taken', cron => 'x') $$, '22023', 'invalid cron: ''x''', 'alter_schedule refuses an invalid cron expression');
select is((select l.cron from pgqueue.list_schedules() l), '@daily', 'a change that was refused changes nothing');
select throws_ok($$ select pgqueue.run_schedule('nothing') $$, 'PQ011', 'schedule ''nothing'' does not exist', 'run_schedule refuses a schedule that does not exist');
select throws_ok($$ select pgqueue.list_schedules('nothing') $$, 'PQ001', 'queue ''nothing'' does not exist', 'list_schedules refuses a queue that does not exist');

-- Housekeeping in a session whose plan is that for few rows.
truncate pgqueue.scheduled_messages;
truncate pgqueue.schedules;
select pgqueue._on_housekeeping_due_schedules(pgqueue._now()) is not null as done \gset
insert into pgqueue.scheduled_messages (queue_name, due_at, payload) select 'schedules', pgqueue._now() + n * interval '1 h', '1' from generate_series(1, 20000) n;
select pgqueue.create_schedule('one', 'schedules', '@daily') is not null as made \gset
create function pg_temp.pages(statement text) returns int language plpgsql as $$
declare
    plan json;
begin
    execute 'explain (analyze, buffers, timing off, format json) ' || statement into plan;
    return (plan -> 0 -> 'Plan' ->> 'Shared Hit Blocks')::int + (plan -> 0 -> 'Plan' ->> 'Shared Read Blocks')::int;
end;
$$;
select cmp_ok(pg_temp.pages('select pgqueue._on_housekeeping_due_schedules(pgqueue._now())'), '<', 100, 'housekeeping looks up the next messages of schedules, and does not read all scheduled messages');

-- The schedules of one queue beside those of another.
select pgqueue.create_queue(name) from unnest('{schedules-many,schedules-few}'::text[]) name \g /dev/null
insert into pgqueue.schedules select 'many-' || n, 'schedules-many', '@daily', '1', null, 'UTC', true, false from generate_series(1, 30000) n;
select pgqueue.enqueue('schedules', '1', '1 h') as later_id \gset
select pgqueue.reschedule('schedules', :later_id, now() + interval '2 h') \g /dev/null
select cmp_ok(pg_temp.pages(format('select pgqueue.reschedule(%L, %s, now())', 'schedules', :later_id)), '<', 100, 'reschedule reads no schedule of another queue');
select cmp_ok(pg_temp.pages($$ select pgqueue._on_queue_changed_grants(q, null) from pgqueue.queues q where q.name = 'schedules-few' $$), '<', 200, 'a queue that is dropped reads no schedule of another one');

select * from finish();
rollback;
