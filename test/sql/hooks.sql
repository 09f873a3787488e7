begin;
-- The lock makes test files wait for each other: others compact the tables that this file writes to.
lock table pgqueue.messages in access exclusive mode;
select plan(13);

-- A room of this test that records every event.
create temp table notes (event text, queue_name text, detail text) on commit drop;
create function pgqueue._on_queue_changed_test(before pgqueue.queues, after pgqueue.queues) returns void language sql
as $$
    insert into pg_temp.notes
    select
        case when before.name is null then 'created' when after.name is null then 'dropping' else 'altered' end,
        coalesce(before.name, after.name),
        case
            when after.name is null then format('%s messages', (select count(*) from pgqueue.messages m where m.queue_name = before.name))
            when before.name is not null then format('%s to %s', before.max_attempts, after.max_attempts)
        end
$$;
create function pgqueue._on_housekeeping_due_test(at timestamptz) returns void language sql
as $$ insert into pg_temp.notes values ('housekeeping', null, null) $$;
-- Their names are before and after that of the other handler.
create function pgqueue._on_housekeeping_due_failing(at timestamptz) returns int language sql as $$ select 1 / 0 $$;
create function pgqueue._on_housekeeping_due_zero(at timestamptz) returns int language sql as $$ select 1 / 0 $$;
create function pgqueue._findings_of_test(q pgqueue.queues) returns setof pgqueue.finding language sql
as $$ select 'info', q.name, 'test_finding', coalesce('about ' || q.name, 'about no queue'), 'select 1;' where q.name is null or q.name ~ '^hooks' $$;
create function pg_temp.told(wanted text) returns setof text language sql
as $$ select n.event || coalesce(' ' || n.detail, '') from pg_temp.notes n where n.queue_name = wanted or n.queue_name is null and n.event = wanted $$;

select lives_ok($$ select pgqueue.create_queue('hooks', max_attempts => 3) $$, 'a queue is created while a room listens');
select results_eq($$ select * from pg_temp.told('hooks') $$, array['created'], 'create_queue calls the hooks for a created queue');
select lives_ok($$ select pgqueue.create_queue('hooks', if_not_exists => true) $$, 'create_queue with if_not_exists succeeds for the same queue');
select results_eq($$ select * from pg_temp.told('hooks') $$, array['created'], 'create_queue with if_not_exists calls no hook for an existing queue');
select lives_ok($$ select pgqueue.alter_queue('hooks', max_attempts => 4) $$, 'a setting of the queue is changed');
select results_eq($$ select * from pg_temp.told('hooks') $$, array['created', 'altered 3 to 4'], 'alter_queue calls its hooks with the row before and after the change');
select is_empty($$ select l.relation::regclass from pg_locks l where l.pid = pg_backend_pid() and l.relation::regclass::text ~ '^pgqueue[.](scheduled_messages|schedules|results|subscriptions|transports)$' $$,
    'create_queue and alter_queue lock no table of delayed messages, schedules, results, subscriptions or transports');

select results_eq($$ select f.queue_name, f.detail from pgqueue.doctor() f where f.finding = 'test_finding' order by f.queue_name nulls first $$,
    $$ values (null, 'about no queue'), ('hooks', 'about hooks') $$, 'doctor reports the findings of a room, for each queue and for no queue');

select lives_ok($$ select pgqueue.enqueue('hooks', '1') $$, 'a message is sent');
select results_eq($$ select pgqueue.drop_queue('hooks') $$, array[1::bigint], 'the queue is dropped');
select results_eq($$ select * from pg_temp.told('hooks') $$, array['created', 'altered 3 to 4', 'dropping 1 messages'],
    'drop_queue calls its hooks while the messages of the queue still exist');

create function pg_temp.housekeeping_of_three_claims() returns setof text language plpgsql as $$
begin
    perform pgqueue.create_queue('hooks_sweep');
    perform setval('pgqueue.next_housekeeping_at', pgqueue._to_micros(pgqueue._now() - interval '1 min'));
    for n in 1..3 loop
        perform pgqueue.claim('hooks_sweep');
    end loop;
    return query select * from pg_temp.told('housekeeping');
end;
$$;
select is((select count(*) from pg_temp.housekeeping_of_three_claims()), 1::bigint, 'claims call the hooks for housekeeping once an hour, also if others fail');
select isnt_empty($$ select from pgqueue.compactions c where c.handler = '_at_housekeeping_archive' $$, 'housekeeping requests its work at the commit also if a hook fails');

select * from finish();
rollback;
