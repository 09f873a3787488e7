begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(86);

-- Claims return the number of messages. They are kept for the calls that settle them.
create temporary table claims (queue text, id bigint, token uuid);
create function pg_temp.claim(queue text, wanted int default 10000) returns bigint language sql as $$
    with claimed as (insert into claims select queue, m.id, m.claim_token from pgqueue.claim(queue, wanted) m returning 1)
    select count(*) from claimed
$$;
create function pg_temp.taken(queue text, out id bigint, out token uuid) language sql as $$
    delete from claims c where c.id = (select min(o.id) from claims o where o.queue = taken.queue) returning c.id, c.token
$$;
create function pg_temp.send(queue text, messages int) returns void language sql
as $$ select count(*) from pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[messages])) $$;

-- Settings

select is((pgqueue.create_queue('rated', rate_limit => 10)).rate_limit, 10, 'create_queue returns the rate_limit');
select is((pgqueue.get_queue('rated')).rate_period, interval '1 s', 'rate_period is one second by default');
select is((pgqueue.create_queue('unlimited')).rate_limit, null, 'a queue has no rate_limit by default');
select throws_ok($$ select pgqueue.create_queue('x', rate_limit => 0) $$, '22023', 'invalid rate_limit: ''0''', 'create_queue refuses a rate_limit below 1');
select throws_ok($$ select pgqueue.create_queue('x', rate_limit => 1000001) $$, '22023', 'invalid rate_limit: ''1000001''', 'create_queue refuses a rate_limit above 1000000');
select throws_ok($$ select pgqueue.create_queue('x', rate_limit => 1, rate_period => '999 us') $$, '22023', 'invalid rate_period: ''00:00:00.000999''', 'create_queue refuses a rate_period below 1 ms');
select throws_ok($$ select pgqueue.create_queue('x', rate_limit => 1, rate_period => '24:00:01') $$, '22023', 'invalid rate_period: ''24:00:01''', 'create_queue refuses a rate_period above one day');
select throws_ok($$ select pgqueue.create_queue('x', rate_period => null) $$, '22023', 'invalid rate_period: null', 'create_queue refuses null as rate_period');
select throws_ok($$ select pgqueue.create_queue('x', rate_period => '1 min') $$, '22023', 'invalid rate_period: ''00:01:00''', 'create_queue refuses a rate_period without rate_limit');
select throws_ok($$ select pgqueue.alter_queue('unlimited', rate_period => '1 min') $$, '22023', 'invalid rate_period: ''00:01:00''', 'alter_queue refuses a rate_period without rate_limit');
select is((pgqueue.alter_queue('rated', rate_limit => 0, rate_period => '1 s')).rate_limit, null, 'alter_queue sets rate_period to its default as it ends the rate_limit');
select is((pgqueue.alter_queue('rated', rate_limit => 10)).rate_period, interval '1 s', 'alter_queue gives a rate_limit to a queue that has none');
select is((pgqueue.alter_queue('rated', rate_period => '2 s')).rate_limit, 10, 'alter_queue keeps the rate_limit that is not given');
select is((pgqueue.alter_queue('rated', rate_period => '1 s')).rate_period, interval '1 s', 'alter_queue changes the rate_period');

-- The bucket

create function pg_temp.peek_read_only(queue text) returns int language plpgsql as $$
declare
    n int;
begin
    perform set_config('transaction_read_only', 'on', true);
    n := pgqueue.peek(queue, 100);
    raise division_by_zero;
exception when division_by_zero or read_only_sql_transaction then
    return n;
end;
$$;
select is(pg_temp.peek_read_only('rated'), 0, 'peek reads a queue that was created with a rate_limit in a read-only transaction');
select pgqueue.create_queue('rated_later'), pgqueue.alter_queue('rated_later', rate_limit => 10) \g /dev/null
select is(pg_temp.peek_read_only('rated_later'), 0, 'peek reads a queue that got a rate_limit in a read-only transaction');
select pgqueue.drop_queue('rated_later') \g /dev/null
select pg_temp.send('rated', 100) \g /dev/null
select is(pgqueue.peek('rated', 100), 10, 'peek counts no more messages than there are tokens');
select is(pg_temp.claim('rated', 4), 4::bigint, 'a claim takes as many messages as it wants while there are tokens');
select is(pg_temp.claim('rated'), 6::bigint, 'a claim takes no more messages than there are tokens');
select is(pg_temp.claim('rated'), 0::bigint, 'without tokens a claim takes no message');
select is(pgqueue.peek('rated'), 0, 'without tokens peek counts no message');
select is(pgqueue.next_due_at('rated'), pgqueue._now() + interval '100 ms', 'next_due_at returns when the next token comes');
select is(pgqueue.prepare_wait('rated'), pgqueue._now() + interval '100 ms', 'prepare_wait returns when the next token comes');
select pg_temp.pass('99.999 ms') \g /dev/null
select is(pg_temp.claim('rated'), 0::bigint, 'a microsecond before the next token a claim takes no message');
select pg_temp.pass('1 us') \g /dev/null
select is(pg_temp.claim('rated'), 1::bigint, 'a claim takes a message when the next token has come');
select pg_temp.pass('550 ms') \g /dev/null
select is(pg_temp.claim('rated'), 5::bigint, 'a claim takes a message for each token that has come');
select is(pgqueue.next_due_at('rated'), pgqueue._now() + interval '50 ms', 'a claim does not discard the time that counts toward the next token');
select pg_temp.pass('1 h') \g /dev/null
select is(pg_temp.claim('rated'), 10::bigint, 'after a long pause there are no more tokens than rate_limit');
select pg_temp.pass('100 ms') \g /dev/null
select is((select count(*) from pgqueue.receive('rated', 10)), 1::bigint, 'receive obeys the rate_limit');
select pg_temp.pass('200 ms') \g /dev/null
select is((select count(*) from pgqueue.exchange('rated', null, null, 10)), 2::bigint, 'exchange obeys the rate_limit');
savepoint before_claim;
select pg_temp.pass('100 ms'), pg_temp.claim('rated') \g /dev/null
rollback to before_claim;
select pg_temp.pass('100 ms') \g /dev/null
select is(pg_temp.claim('rated'), 0::bigint, 'a rollback returns no token');
select pg_temp.pass('1 h'), pgqueue.purge_queue('rated'), pg_temp.send('rated', 3) \g /dev/null
select is(pg_temp.claim('rated'), 3::bigint, 'a claim of more messages than the queue has takes all of them');
select pg_temp.send('rated', 30) \g /dev/null
select is(pg_temp.claim('rated'), 7::bigint, 'a claim takes tokens for the messages that it has found only');
select pg_temp.pass('-1 h'), pg_temp.send('rated', 30) \g /dev/null
select is(pg_temp.claim('rated'), 10::bigint, 'after the clock was set back by more than a period there are tokens');
select pg_temp.pass('-500 ms') \g /dev/null
select is(pgqueue.next_due_at('rated'), pgqueue._now() + interval '600 ms', 'after the clock was set back by less than a period the next token comes at its time');
select pgqueue.purge_queue('rated') \g /dev/null
select is(pgqueue.next_due_at('rated'), null, 'next_due_at of an empty queue is null while there is no token');
select pgqueue.enqueue('rated', '1', delay => '2 s') \g /dev/null
select is(pgqueue.next_due_at('rated'), pgqueue._now() + interval '2 s', 'next_due_at returns when a message is due if the next token comes earlier');

-- Changes

select pgqueue.purge_queue('rated'), pg_temp.pass('1 h'), pg_temp.send('rated', 30), pg_temp.claim('rated'), pg_temp.pass('500 ms') \g /dev/null
select pgqueue.alter_queue('rated', rate_limit => 0) \g /dev/null
select is(pg_temp.claim('rated', 15), 15::bigint, 'alter_queue with rate_limit 0 ends the limit');
select pgqueue.alter_queue('rated', rate_limit => 4, max_in_flight => 1000) \g /dev/null
select is(pg_temp.claim('rated'), 2::bigint, 'a new rate_limit applies to the time that is not used, also with another kind');
select pgqueue.alter_queue('unlimited', rate_limit => 7, rate_period => '1 ms'), pg_temp.send('unlimited', 10), pg_temp.claim('unlimited') \g /dev/null
select is(pgqueue.next_due_at('unlimited'), pgqueue._now() + interval '143 us', 'the time until the next token is rounded up');
select pg_temp.pass('143 us') \g /dev/null
select is(pg_temp.claim('unlimited'), 1::bigint, 'a claim takes a message when the time of its token has been rounded up');

-- The number in flight

select is((pgqueue.create_queue('few', '30 s', max_in_flight => 3)).max_in_flight, 3, 'create_queue returns max_in_flight');
select throws_ok($$ select pgqueue.create_queue('x', max_in_flight => 0) $$, '22023', 'invalid max_in_flight: ''0''', 'create_queue refuses a max_in_flight below 1');
select throws_ok($$ select pgqueue.create_queue('x', max_in_flight => 10001) $$, '22023', 'invalid max_in_flight: ''10001''', 'create_queue refuses a max_in_flight above 10000');
select pg_temp.send('few', 20) \g /dev/null
select is(pgqueue.peek('few', 10), 3, 'peek counts no more messages than may be claimed');
select is(pg_temp.claim('few', 2), 2::bigint, 'a claim takes as many messages as it wants while max_in_flight allows them');
select is(pg_temp.claim('few'), 1::bigint, 'a claim takes no more messages than max_in_flight allows');
select is(pg_temp.claim('few'), 0::bigint, 'a claim takes no message while max_in_flight messages are in flight');
select is(pgqueue.peek('few'), 0, 'peek counts no message while max_in_flight messages are in flight');
select is(pgqueue.next_due_at('few'), pgqueue._now() + interval '30 s', 'next_due_at returns when the first claim ends');
select is(pgqueue.prepare_wait('few'), pgqueue._now() + interval '1 s', 'prepare_wait returns a time that is one second ahead while there are no places');
select is((select pgqueue.ack('few', t.id, t.token) from pg_temp.taken('few') t), true, 'a message of such a queue is acknowledged like others');
select is(pgqueue.prepare_wait('few'), pgqueue._now() + interval '100 ms', 'prepare_wait returns 100 ms from now while there is a place and a message');
select is(pg_temp.claim('few'), 1::bigint, 'an acknowledgement frees a place');
select is((select count(e.payload) from pg_temp.taken('few') t, pgqueue.exchange('few', array[t.id], t.token, 5) e), 1::bigint, 'exchange uses the place that its acknowledgement frees');
select pgqueue.purge_queue('few'), pg_temp.send('few', 20), pg_temp.claim('few') \g /dev/null
delete from claims where id not in (select id from pgqueue.messages);
select pgqueue.nack('few', t.id, t.token, '1 min') from pg_temp.taken('few') t \g /dev/null
select is(pg_temp.claim('few'), 1::bigint, 'nack frees a place');
select pgqueue.reject('few', t.id, t.token) from pg_temp.taken('few') t \g /dev/null
select is(pg_temp.claim('few'), 1::bigint, 'reject frees a place');
select pgqueue.release('few', array[t.id], t.token) from pg_temp.taken('few') t \g /dev/null
select is(pg_temp.claim('few'), 1::bigint, 'release frees a place');
delete from pgqueue.messages m using pg_temp.taken('few') t where m.queue_name = 'few' and m.id = t.id;
select is(pg_temp.claim('few'), 1::bigint, 'a delete by plain SQL frees a place');
select pg_temp.pass('20 s'), pgqueue.extend('few', t.id, t.token, '1 min') from pg_temp.taken('few') t \g /dev/null
select pg_temp.pass('10 s') \g /dev/null
select is(pg_temp.claim('few'), 2::bigint, 'a claim that ends frees its place, and one that was extended keeps it');
select pgqueue.purge_queue('few'), pg_temp.send('few', 20), pg_temp.claim('few'), pg_temp.pass('29.999999 s') \g /dev/null
delete from claims where id not in (select id from pgqueue.messages);
select is((select count(e) from claims c, pgqueue.extend_batch('few', array[c.id], c.token, '1 s') e), 3::bigint, 'extend_batch extends claims until they end');
select is((select pgqueue.extend('few', t.id, t.token, '1 s') from pg_temp.taken('few') t), true, 'extend extends a claim until it ends');
select pg_temp.pass('1 s') \g /dev/null
select is((select count(e) from claims c, pgqueue.extend_batch('few', array[c.id], c.token) e), 0::bigint, 'extend_batch extends no claim that has ended');
select is((select pgqueue.extend('few', t.id, t.token) from pg_temp.taken('few') t), false, 'extend extends no claim that has ended');
select pgqueue.purge_queue('few'), pg_temp.send('few', 20) \g /dev/null
update pgqueue.messages m set visible_at = pgqueue._now() + interval '1 min', attempt_count = 1
where m.id = (select max(l.id) from pgqueue.messages l where l.queue_name = 'few');
select is(pg_temp.claim('few'), 2::bigint, 'a claim by plain SQL takes a place');
select pgqueue.alter_queue('few', max_in_flight => 2) \g /dev/null
select is(pg_temp.claim('few'), 0::bigint, 'a lower max_in_flight applies to the next claim');
select is(pgqueue.next_due_at('few'), pgqueue._now() + interval '30 s', 'next_due_at waits for the end of as many claims as must end');
select pgqueue.alter_queue('few', max_in_flight => 1) \g /dev/null
select is(pgqueue.next_due_at('few'), pgqueue._now() + interval '1 min', 'next_due_at waits for the last claim if all must end');
select throws_ok($$ select pgqueue.receive('few') $$, '22023', 'invalid queue_name: ''few''', 'receive refuses a queue with max_in_flight');
select pgqueue.alter_queue('few', max_in_flight => 0) \g /dev/null
select is(pg_temp.claim('few', 5), 5::bigint, 'alter_queue with max_in_flight 0 ends the limit');
select is((pgqueue.alter_queue('few', max_in_flight => 9)).max_in_flight, 9, 'alter_queue gives max_in_flight again to a queue that was created with it');
select is(pg_temp.claim('few'), 1::bigint, 'a higher max_in_flight applies to the next claim');

-- Other features

select pgqueue.create_queue('both', group_limit => 1, max_in_flight => 2, rate_limit => 4) \g /dev/null
select pgqueue.enqueue_batch('both', array_fill('1'::jsonb, array[8]), group_keys => array['a', 'b', 'c', 'd', null, 'a', 'b', null]) \g /dev/null
select is(pg_temp.claim('both'), 2::bigint, 'a queue with groups obeys max_in_flight');
select pgqueue.nack('both', t.id, t.token, '1 min') from pg_temp.taken('both') t \g /dev/null
select is(pg_temp.claim('both'), 1::bigint, 'a message of a group that waits for its retry takes no place');
select pgqueue.ack('both', t.id, t.token), pg_temp.claim('both'), pgqueue.ack('both', u.id, u.token) from pg_temp.taken('both') t, pg_temp.taken('both') u \g /dev/null
select is(pgqueue.next_due_at('both'), pgqueue._now() + interval '250 ms', 'next_due_at of a queue with both limits returns when the limit that is reached allows a message');

select pgqueue.create_queue('grouped', group_limit => 1, rate_limit => 2) \g /dev/null
select pgqueue.enqueue_batch('grouped', array_fill('1'::jsonb, array[5]), group_keys => array['a', 'b', 'c', 'd', null]) \g /dev/null
select is(pg_temp.claim('grouped'), 2::bigint, 'a queue with groups obeys the rate_limit');
select pgqueue.create_queue('failed', group_limit => 1, max_in_flight => 1), pgqueue.enqueue('failed', '1', group_key => 'a') as first, pgqueue.enqueue('failed', '2', group_key => 'b') \gset
select is(pgqueue.record_failure('failed', :first, 1, '1 min'), true, 'record_failure counts the attempt of a message of a group');
select is(pg_temp.claim('failed'), 1::bigint, 'a message of a group whose failure was recorded takes no place');
select pgqueue.stream_open('rated', 's') \g /dev/null
select throws_ok($$ select pgqueue.stream_claim('rated', 's', s.epoch, 0, null) from pgqueue.list_streams('rated') s $$, '22023', 'invalid queue_name: ''rated''', 'stream_claim refuses a queue with limits');
select throws_ok($$ select pgqueue.expose_transport('rated') $$, '22023', 'invalid queue_name: ''rated''', 'expose_transport refuses a queue with rate_limit');
select pgqueue.create_queue('exposed'), pgqueue.expose_transport('exposed') \g /dev/null
select throws_ok($$ select pgqueue.alter_queue('exposed', rate_limit => 5) $$, '22023', 'invalid rate_limit: ''5''', 'alter_queue gives no rate_limit to a queue with the relation of a transport');
select lives_ok($$ select pgqueue.drop_queue(q) from unnest(array['rated', 'unlimited', 'grouped', 'few', 'both', 'failed']) as q $$, 'queues with limits are dropped like others');
select is((select count(*) from pg_class c where c.relnamespace = 'pgqueue'::regnamespace and c.relname ~ '_rate_used_until$'), 0::bigint, 'a dropped queue leaves no register rate_used_until');

-- Another claim takes the tokens between the look and the claim.
create function pg_temp.no_sweep_is_due() returns bigint language sql as $$
    select setval(q.next_sweep_at, pgqueue._to_micros(pgqueue._now() + interval '100 ms')) from pgqueue.queues q where q.name = 'raced' $$;
select pgqueue.create_queue('raced', rate_limit => 10), pgqueue.enqueue('raced', '1'), pg_temp.no_sweep_is_due() \g /dev/null
create or replace function pgqueue._take_tokens(q pgqueue.queues, wanted int) returns int language sql volatile as $$ select 0 $$;
select is((select count(*) from pgqueue.claim('raced')), 0::bigint, 'a claim that gets no token returns no message');
create or replace function pgqueue._take_tokens(q pgqueue.queues, wanted int) returns int language sql volatile as $$ select wanted $$;
select pgqueue.enqueue('raced', '2') \g /dev/null
select is((select c.payload from pgqueue.claim('raced') c), '1', 'the next claim takes the message for which there was no token, before later ones');
create or replace function pgqueue._take_tokens(q pgqueue.queues, wanted int) returns int language sql volatile as $$ select 0 $$;
select pgqueue.create_queue('ranked', rate_limit => 10, priorities => true), pgqueue.enqueue('ranked', '1', priority => 0) \g /dev/null
select count(*) from pgqueue.claim('ranked') \g /dev/null
create or replace function pgqueue._take_tokens(q pgqueue.queues, wanted int) returns int language sql volatile as $$ select wanted $$;
select pgqueue.enqueue('ranked', '2', priority => 9), setseed(0.5) \g /dev/null
select is((select c.payload from pgqueue.claim('ranked') c), '2', 'a message with a higher priority goes before one for which there was no token');

select * from finish();
rollback;
