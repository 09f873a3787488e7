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

select is((select q.expires_after_idle from pgqueue.create_queue('idle-1', expires_after_idle => '1 h') q), '1 h'::interval, 'create_queue returns the expires_after_idle that it was given');
select is((select q.expires_after_idle from pgqueue.create_queue('idle-good') q), null, 'the default of expires_after_idle is null');
select is((select q.expires_after_idle from pgqueue.alter_queue('idle-good', expires_after_idle => '1 h') q), '1 h'::interval, 'alter_queue sets expires_after_idle');
select is((select q.expires_after_idle from pgqueue.alter_queue('idle-good', expires_after_idle => '0') q), null, 'alter_queue with expires_after_idle 0 sets it to null');
select throws_ok(format('select pgqueue.create_queue(%L, expires_after_idle => %L)', 'idle-bad', i), '22023', null, format('create_queue refuses an expires_after_idle of %s', i)) from unnest(array['0', '-1 s', '11 years']) i;
select is(array(select pgqueue.drop_idle_queues()), '{}', 'drop_idle_queues does not drop a new queue');

-- The registers of an unused queue are not set: its idle time counts from the first call of drop_idle_queues.
select pg_temp.pass('59 min') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{}', 'drop_idle_queues does not drop a queue before expires_after_idle has passed');
select pg_temp.pass('2 min') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{}', 'drop_idle_queues does not drop an unused queue within expires_after_idle of the first call');
select pg_temp.pass('61 min') \g /dev/null
savepoint idle;
select is(array(select pgqueue.drop_idle_queues()), '{idle-1}', 'drop_idle_queues drops an unused queue expires_after_idle after the first call');
select is(pg_temp.there(), '{idle-good}', 'drop_idle_queues leaves queues without expires_after_idle');
select throws_ok($$ select pgqueue.enqueue('idle-1', '1') $$, 'PQ001', null, 'enqueue refuses a queue that was dropped as idle');
rollback to idle;
select is((select count(*) from pgqueue.create_queue('idle-2', expires_after_idle => '1 h')), 1::bigint, 'create_queue succeeds in a longer transaction while an idle queue exists');
select is(pg_temp.there(), '{idle-1,idle-2,idle-good}', 'create_queue in a longer transaction drops no idle queue');
select is(array(select pgqueue._drop_idle_queues(10, false)), '{idle-1}', '_drop_idle_queues drops idle queues in a transaction of its own');

-- Use that keeps a queue.
select pgqueue.claim('idle-2') as nothing \g /dev/null
select pg_temp.pass('50 min') \g /dev/null
select is((select count(*) from pgqueue.claim('idle-2')), 0::bigint, 'claim of an empty queue returns no row 50 minutes later');
select pg_temp.pass('50 min') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{}', 'a claim that returns no row counts as use of the queue');
select is(pgqueue.prepare_wait('idle-2', '1 min') is not null, true, 'prepare_wait succeeds on an empty queue');
select pg_temp.pass('59 min') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{}', 'prepare_wait counts as use of the queue');
select is((select q.name from pgqueue.create_queue('idle-2', if_not_exists => true) q), 'idle-2', 'create_queue with if_not_exists returns the existing queue');
select pg_temp.pass('59 min') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{}', 'create_queue with if_not_exists counts as use of the queue');
select pgqueue.enqueue('idle-2', '1') as sent \gset
select pg_temp.pass('1 day') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{}', 'drop_idle_queues does not drop a queue with a ready message');
select id, claim_token from pgqueue.claim('idle-2', visibility_timeout => '12 h') \gset
select pg_temp.pass('6 h') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{}', 'drop_idle_queues does not drop a queue with a message in flight');
select pgqueue.nack('idle-2', :id, :'claim_token', '2 days') as nacked \gset
select pg_temp.pass('1 day') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{}', 'drop_idle_queues does not drop a queue with a scheduled message');
select pg_temp.pass('1 day') \g /dev/null
select id, claim_token from pgqueue.claim('idle-2') \gset
select pgqueue.reject('idle-2', :id, :'claim_token') as rejected \gset
select pg_temp.pass('1 day') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{}', 'drop_idle_queues does not drop a queue with a dead letter');
select is(pgqueue.purge_dead_messages('idle-2'), 1::bigint, 'purge_dead_messages deletes the dead letter of the queue');
select is(array(select pgqueue.drop_idle_queues()), '{idle-2}', 'drop_idle_queues drops the queue when no message and no dead letter is left');

-- A queue with an archive, a relation, a subscription and a table of its own.
select lives_ok($$ select pgqueue.create_queue('idle-3', expires_after_idle => '1 min', dedicated => true, archive_for => '1 day') $$, 'a dedicated queue with an archive and expires_after_idle is created');
select pgqueue.subscribe('idle', 'idle-3'), pgqueue.expose_transport('idle-3'), pgqueue.claim('idle-3') \g /dev/null
select pgqueue.drop_idle_queues() as none \g /dev/null
select pg_temp.pass('10 min') \g /dev/null
create temp view dependent as select id from public."idle-3";
select is(array(select pgqueue.drop_idle_queues()), '{}', 'drop_idle_queues does not drop a queue while a view depends on its relation');
drop view dependent;
select is(array(select pgqueue.drop_idle_queues()), '{idle-3}', 'drop_idle_queues drops the queue after the view was dropped');
select hasnt_view('public', 'idle-3', 'drop_idle_queues drops the relation with the queue');
select is_empty($$ select from pgqueue.subscriptions s where s.queue_name = 'idle-3' $$, 'drop_idle_queues deletes the subscriptions of the queue');
-- A register that was set while the clock was wrong.
select pgqueue.create_queue('idle-4', expires_after_idle => '1 min') is not null as made \gset
select setval(q.next_sweep_at, 9000000000000000) from pgqueue.queues q where q.name = 'idle-4' \g /dev/null
select pg_temp.pass('2 min'), pgqueue.drop_idle_queues() \g /dev/null
select pg_temp.pass('2 min') \g /dev/null
select is(array(select pgqueue.drop_idle_queues()), '{idle-4}', 'drop_idle_queues drops an idle queue although a register is far in the future');
-- A call drops at most a hundred queues: the locks of ten times as many would fill the lock table.
select count(pgqueue.create_queue('idle-many-' || n, expires_after_idle => '1 min')) as made from generate_series(1, 101) n \gset
select pg_temp.pass('2 min'), pgqueue.drop_idle_queues(), pgqueue.drop_idle_queues() \g /dev/null
select pg_temp.pass('2 min') \g /dev/null
select is((select count(*) from pgqueue.drop_idle_queues()), 100::bigint, 'drop_idle_queues drops at most 100 queues in a call');
select is((select count(*) from pgqueue.drop_idle_queues()), 1::bigint, 'the next call of drop_idle_queues drops the remaining queue');

select * from finish();
rollback;
