begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;
create function pg_temp.there() returns text[] language sql as $$ select array_agg(q.name order by q.name) from pgqueue.queues q where q.name ~ '^idle' $$;

select plan(36);

select is((select q.expires_after_idle from pgqueue.create_queue('idle-1', expires_after_idle => '1 h') q), '1 h'::interval, 'a queue is made for a while');
select is((select q.expires_after_idle from pgqueue.create_queue('idle-good') q), null, 'another one for good');
select is((select q.expires_after_idle from pgqueue.alter_queue('idle-good', expires_after_idle => '1 h') q), '1 h'::interval, 'that may be changed');
select is((select q.expires_after_idle from pgqueue.alter_queue('idle-good', expires_after_idle => '0') q), null, 'and changed back');
select throws_ok(format('select pgqueue.create_queue(%L, expires_after_idle => %L)', 'idle-bad', i), '22023', null, format('it may not be %s', i)) from unnest(array['0', '-1 s', '11 years']) i;
select is(array(select pgqueue.drop_idle_queues()), '{}', 'it stays while its time lasts');

-- The registers of a queue that was never used say nothing: the first look begins to count.
select pg_temp.pass('59 min') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{}', 'and a little less');
select pg_temp.pass('2 min') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{}', 'a queue that was never used is seen unused first');
select pg_temp.pass('61 min') \g /dev/null
savepoint idle;
select is(array(select pgqueue.drop_idle_queues()), '{idle-1}', 'then dropped');
select is(pg_temp.there(), '{idle-good}', 'alone');
select throws_ok($$ select pgqueue.enqueue('idle-1', '1') $$, 'PQ001', null, 'and gone');
rollback to idle;
select is((select count(*) from pgqueue.create_queue('idle-2', expires_after_idle => '1 h')), 1::bigint, 'who makes a queue in a transaction that goes on');
select is(pg_temp.there(), '{idle-1,idle-2,idle-good}', 'drops nothing in it');
select is(array(select pgqueue._drop_idle_queues(10, false)), '{idle-1}', 'where it is a transaction of its own it drops those that are over');

-- What keeps it.
select pgqueue.claim('idle-2') as nothing \g /dev/null
select pg_temp.pass('50 min') \g /dev/null
select is((select count(*) from pgqueue.claim('idle-2')), 0::bigint, 'who comes by for nothing uses it');
select pg_temp.pass('50 min') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{}', 'so that it stays');
select is(pgqueue.prepare_wait('idle-2', '1 min') is not null, true, 'who waits');
select pg_temp.pass('59 min') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{}', 'uses it, too');
select is((select q.name from pgqueue.create_queue('idle-2', if_not_exists => true) q), 'idle-2', 'and who asks for it again');
select pg_temp.pass('59 min') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{}', 'as well');
select pgqueue.enqueue('idle-2', '1') as sent \gset
select pg_temp.pass('1 day') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{}', 'a queue stays while a message waits');
select id, claim_token from pgqueue.claim('idle-2', visibility_timeout => '12 h') \gset
select pg_temp.pass('6 h') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{}', 'or is in flight');
select pgqueue.nack('idle-2', :id, :'claim_token', '2 days') as nacked \gset
select pg_temp.pass('1 day') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{}', 'or scheduled');
select pg_temp.pass('1 day') \g /dev/null
select id, claim_token from pgqueue.claim('idle-2') \gset
select pgqueue.reject('idle-2', :id, :'claim_token') as rejected \gset
select pg_temp.pass('1 day') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{}', 'or dead');
select is(pgqueue.purge_dead_messages('idle-2'), 1::bigint, 'without any');
select is(array(select pgqueue.drop_idle_queues()), '{idle-2}', 'it goes');

-- Whatever belongs to it.
select lives_ok($$ select pgqueue.create_queue('idle-3', expires_after_idle => '1 min', dedicated => true, archive_for => '1 day') $$, 'a queue with all there is');
select pgqueue.subscribe('idle', 'idle-3'), pgqueue.expose_transport('idle-3'), pgqueue.claim('idle-3') \g /dev/null
select pgqueue.drop_idle_queues() as none \g /dev/null
select pg_temp.pass('10 min') \g /dev/null
create temp view dependent as select id from public."idle-3";
select is(array(select pgqueue.drop_idle_queues()), '{}', 'stays while something else uses its relation');
drop view dependent;
select is(array(select pgqueue.drop_idle_queues()), '{idle-3}', 'else it goes');
select hasnt_view('public', 'idle-3', 'with it');
select is_empty($$ select from pgqueue.subscriptions s where s.queue_name = 'idle-3' $$, 'and its subscriptions');
-- A register that was set by a clock that is wrong.
select pgqueue.create_queue('idle-4', expires_after_idle => '1 min') is not null as made \gset
select setval(q.next_sweep_at, 9000000000000000) from pgqueue.queues q where q.name = 'idle-4' \g /dev/null
select pg_temp.pass('2 min'), pgqueue.drop_idle_queues() \g /dev/null
select pg_temp.pass('2 min') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{idle-4}', 'a clock that was wrong keeps no queue for ever');
-- So many that their locks would fill the lock table, if there were ten times as many.
select count(pgqueue.create_queue('idle-many-' || n, expires_after_idle => '1 min')) as made from generate_series(1, 101) n \gset
select pg_temp.pass('2 min'), pgqueue.drop_idle_queues(), pgqueue.drop_idle_queues() \g /dev/null
select pg_temp.pass('2 min') \g /dev/null
select is((select count(*) from pgqueue.drop_idle_queues()), 100::bigint, 'of many queues a call drops a hundred');
select is((select count(*) from pgqueue.drop_idle_queues()), 1::bigint, 'and the next one goes on');

select * from finish();
rollback;
