begin;
-- The lock makes test files wait for each other: this file stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';

select plan(18);

create function pg_temp.claim(queues text[], wanted int default 1) returns text language sql as $$
    select string_agg(m.queue_name || ' ' || m.payload, ', ') from pgqueue.claim_any(queues, wanted) m
$$;
select pgqueue.create_queue('urgent', '10 s'), pgqueue.create_queue('normal', '20 s', dedicated => true), pgqueue.create_queue('idle') \g /dev/null
select pgqueue.enqueue('normal', '1'), pgqueue.enqueue('normal', '2'), pgqueue.enqueue('urgent', '3'), pgqueue.enqueue('urgent', '4'), pgqueue.enqueue('urgent', '5') \g /dev/null

select is(pg_temp.claim('{idle,urgent,normal}'), 'urgent 3', 'claim_any claims one message by default, from the first queue that has one');
select is(pg_temp.claim('{urgent,normal}', 3), 'urgent 4, urgent 5, normal 1', 'claim_any takes all messages of a queue before those of the next');
select is(pg_temp.claim('{urgent}'), null, 'claim_any returns nothing if no queue has a ready message');
select is((select array_agg(m.visible_at order by m.id) from pgqueue.messages m where m.queue_name in ('urgent', 'normal') and m.claim_token is not null), array['2030-01-01 12:00:20+00', '2030-01-01 12:00:10+00', '2030-01-01 12:00:10+00', '2030-01-01 12:00:10+00']::timestamptz[], 'each queue has its own visibility_timeout');
select is((select m.visible_at from pgqueue.claim_any('{urgent,normal}', 5, '1 min', 'worker') m where m.claimed_by = 'worker'), '2030-01-01 12:01:00+00'::timestamptz, 'claim_any takes visibility_timeout and claimed_by');
select is((select bool_and(pgqueue.ack(m.queue_name, m.id, m.claim_token)) from pgqueue.messages m where m.queue_name in ('urgent', 'normal')), true, 'messages are settled under their own queue_name');
select pgqueue.enqueue('normal', '6'), pgqueue.pause_queue('urgent'), pgqueue.enqueue('urgent', '7') \g /dev/null
select is(pg_temp.claim('{urgent,normal}', 5), 'normal 6', 'claim_any passes a paused queue');

-- The locks of groups
select pgqueue.create_queue(format('grouped-%s', n), group_limit => 1) from generate_series(1, 12) as n \g /dev/null
select pgqueue.enqueue_batch(format('grouped-%s', n), array_fill('1'::jsonb, array[150]), group_keys => array(select g::text from generate_series(1, 150) as g)) from generate_series(1, 12) as n \g /dev/null
select pgqueue.enqueue('normal', '8') \g /dev/null
create temporary table locks as select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid();
select is((select count(*) from pgqueue.claim_any('{normal}' || array(select format('grouped-%s', n) from generate_series(1, 12) as n), 10000)), 1001::bigint, 'claim_any takes messages of at most ten queues with groups');
select cmp_ok((select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()) - (select count from locks), '<=', 1050::bigint, 'claim_any locks at most 100 groups of each of ten queues');
select is((select count(*) from pgqueue.claim_any(array(select format('grouped-%s', n) from generate_series(1, 12) as n), 10000)), 500::bigint, 'the next call takes the messages of the other groups of these queues');

select throws_ok($$ select pgqueue.claim_any(null) $$, '22023', 'invalid queue_names: null', 'claim_any refuses null');
select throws_ok($$ select pgqueue.claim_any('{}') $$, '22023', 'invalid queue_names: ''{}''', 'claim_any refuses an empty array');
select throws_ok($$ select pgqueue.claim_any('{urgent,null}') $$, '22023', 'invalid queue_names: ''{urgent,NULL}''', 'claim_any refuses null as a name');
select throws_ok($$ select pgqueue.claim_any('{urgent,urgent}') $$, '22023', 'invalid queue_names: ''{urgent,urgent}''', 'claim_any refuses a queue that is named twice');
select throws_ok($$ select pgqueue.claim_any(array_fill('urgent'::text, array[101])) $$, '22023', null, 'claim_any refuses more than 100 queues');
select throws_ok($$ select pgqueue.claim_any('{normal,missing}', 5) $$, 'PQ001', 'queue ''missing'' does not exist', 'claim_any refuses a queue that does not exist');
select throws_ok($$ select pgqueue.claim_any('{normal}', 0) $$, '22023', 'invalid max_messages: ''0''', 'claim_any refuses a max_messages of 0');
select throws_ok($$ select pgqueue.claim_any('{normal}', null) $$, '22023', 'invalid max_messages: null', 'claim_any refuses null as max_messages');

select * from finish();
rollback;
