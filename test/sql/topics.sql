begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';

select plan(106);

-- Matching of patterns and topics.
create temp table subjects (pattern text, topic text, matches boolean);
insert into subjects values
('orders', 'orders', true), ('orders', 'order', false), ('orders', 'orders.paid', false), ('orders.paid', 'orders', false), ('Orders', 'orders', false),
('orders.*', 'orders.paid', true), ('orders.*', 'orders', false), ('orders.*', 'orders.paid.late', false), ('*', 'orders', true), ('*', 'orders.paid', false),
('orders.#', 'orders', true), ('orders.#', 'orders.paid', true), ('orders.#', 'orders.paid.late', true), ('orders.#', 'orders-x.paid', false), ('orders.#', 'ordersx', false),
('#', 'orders', true), ('#', 'orders.paid.late', true), ('#.late', 'late', true), ('#.late', 'orders.paid.late', true), ('#.late', 'late.orders', false),
('orders.#.late', 'orders.late', true), ('orders.#.late', 'orders.a.b.late', true), ('orders.#.late', 'orders.a.b', false), ('*.*', 'a.b', true), ('*.*', 'a', false),
('#.*', 'a', true), ('#.*', 'a.b.c', true), ('*.#', 'a.b', true), ('a.#.b.#.c', 'a.b.c', true), ('a.#.b.#.c', 'a.x.b.b.y.c', true), ('a.#.b.#.c', 'a.x.c', false),
('*.paid', 'orders-x.paid', true), ('Ns.List`1[[System.Int32, mscorlib, Version=4.0.0.0]]', 'Ns.List`1[[System.Int32, mscorlib, Version=4.0.0.0]]', true),
('größe.🐘.*', 'größe.🐘.日', true), ('a%.b', 'ax.b', false), ('a_.*', 'ab.c', false), ('a.*x', 'a.bx', false), ('a.*x.*', 'a.*x.b', true),
('c#.*', 'c#.b', true), ('c#.*', 'c#.a.b', false), ('c#.#', 'c#.a.b', true), ('a.c#.*', 'a.c#.b.c', false), ('#.c#.*', 'a.c#.b.c', false), ('##.b', '##.a.b', false);
create function pg_temp.delivered(pattern text, topic text) returns boolean language plpgsql as $$
declare
    sent int;
begin
    perform pgqueue.create_queue('match');
    perform pgqueue.subscribe(pattern, 'match');
    sent := pgqueue.publish(topic, '1');
    perform pgqueue.drop_queue('match');
    return sent = 1;
end $$;
select is(pg_temp.delivered(s.pattern, s.topic), s.matches, format('%s %s %s', s.pattern, case when s.matches then 'matches' else 'does not match' end, s.topic)) from subjects s;
select pgqueue.create_queue('all') is not null as made \gset
select count(pgqueue.subscribe(s.pattern, 'all')) as made from (select distinct pattern from subjects) s \gset
select is_empty(
    $$ select s.topic, pgqueue._subscribers(array[s.topic]) from subjects s where s.matches <> (pgqueue._subscribers(array[s.topic]) = '{all}') and s.matches $$,
    'a pattern among many matches the same topics as alone');
select is(pgqueue.publish('a.x.b.b.y.c', '1'), 1, 'publish sends one copy to a queue with several matching subscriptions');
select is(pgqueue.drop_queue('all'), 1::bigint, 'drop_queue counts the published copy');
select is_empty($$ select from pgqueue.subscriptions $$, 'drop_queue deletes the subscriptions of its queue');

-- One copy for each subscribed queue.
select count(pgqueue.create_queue(n, max_attempts => a, dedicated => d)) as made from (values ('one', 3, false), ('two', 4, true), ('three', 5, false)) v (n, a, d) \gset
select is(pgqueue.publish('nobody', '1'), 0, 'publish to a topic without subscriptions sends nothing');
select is(pgqueue.subscribe('orders.*', 'one'), true, 'subscribe returns true for a new subscription');
select is(pgqueue.subscribe('orders.*', 'one'), false, 'subscribe returns false for an existing subscription');
select is(pgqueue.subscribe('orders.paid', 'one'), true, 'a queue can have several subscriptions');
select is(pgqueue.subscribe('orders.paid', 'two'), true, 'a topic can have several subscribed queues');
select is(pgqueue.subscribe('#.cancelled', 'three'), true, 'a third queue subscribes to a pattern that begins with #');
select is((select array_agg(l.topic || ' ' || l.queue_name) from pgqueue.list_subscriptions() l), '{#.cancelled three,orders.* one,orders.paid one,orders.paid two}',
    'list_subscriptions returns all subscriptions in order of topic and queue');
select is((select array_agg(l.topic || ' ' || l.queue_name) from pgqueue.list_subscriptions('two') l), '{orders.paid two}', 'list_subscriptions of a queue returns only its subscriptions');
select is(pgqueue.publish('orders.paid', '{"n": 1}', headers => '{"tenant": "a"}', message_id => '00000000-0000-0000-0000-000000000001', expires_in => '1 h'), 2, 'publish returns the number of queues that got a copy');
select results_eq(
    $$ select m.queue_name::name, m.payload, m.headers, m.max_attempts, m.message_id, m.expires_at - m.enqueued_at from pgqueue.messages m where m.queue_name in ('one', 'two', 'three') order by m.id $$,
    $$ values ('one'::name, '{"n": 1}'::jsonb, '{"tenant": "a", "pgqueue.topic": "orders.paid"}'::jsonb, 3, '00000000-0000-0000-0000-000000000001'::uuid, interval '1 h'),
        ('two', '{"n": 1}', '{"tenant": "a", "pgqueue.topic": "orders.paid"}', 4, '00000000-0000-0000-0000-000000000001', '1 h') $$,
    'each copy has the content, headers, topic and expiry of the message and the max_attempts of its queue');
select is(pgqueue.publish('orders.paid', body => '\x00ff', delay => '1 min', expires_in => '2 min'), 2, 'publish accepts bodies and delays');
select results_eq($$ select s.queue_name::name, s.body, s.due_at, s.expires_at from pgqueue.scheduled_messages s order by s.id $$,
    $$ values ('one'::name, '\x00ff'::bytea, '2030-01-01 12:01:00+00'::timestamptz, '2030-01-01 12:02:00+00'::timestamptz), ('two', '\x00ff', '2030-01-01 12:01:00+00', '2030-01-01 12:02:00+00') $$,
    'the delay of publish applies to each copy, and expires_in counts from the call');
set local test.now = '2030-01-01 12:01:00+00';
select is((select count(*) from pgqueue.claim('two', 10)), 2::bigint, 'claim returns the delayed copies when they are due');
select is(pgqueue.publish('orders.new', '1', base_topics => '{orders.paid,a.cancelled}'), 3, 'publish with base_topics sends to subscribers of all its topics');
select is((select array_agg(m.queue_name::text order by m.id) from pgqueue.messages m where m.headers ->> 'pgqueue.topic' = 'orders.new'), '{one,three,two}', 'publish sends one copy to each queue, in order of queue name');
select is((select pgqueue.publish('orders.paid', '1', base_topics => '{}')), 2, 'publish with empty base_topics uses the topic only');
select is((select pgqueue.publish('orders.new', '1', base_topics => '{{orders.paid,x},{a.cancelled,y}}')), 3, 'publish uses all elements of a two-dimensional base_topics');
select is((select pgqueue.publish('orders.new', '1', base_topics => '[5:6]={orders.paid,a.cancelled}')), 3, 'publish uses all elements of base_topics whatever its lower bound');
savepoint sent;
select is((select pgqueue.publish('orders.paid', '"rolled back"')), 2, 'publish returns 2 before its savepoint is rolled back');
rollback to sent;
select is_empty($$ select from pgqueue.messages where payload = '"rolled back"' $$, 'a rollback removes published copies');

-- Queues with waiting consumers are notified.
create function pg_temp.waiting(queue text) returns boolean language sql as $$
    select pg_sequence_last_value(q.waiting_until) > pgqueue._to_micros(pgqueue._now()) from pgqueue.queues q where q.name = queue $$;
select pgqueue.prepare_wait('three') is not null as waits \gset
select is(pgqueue.publish('orders.cancelled', '1'), 2, 'publish sends to a queue with a waiting consumer');
select ok(pg_temp.waiting('three'), 'the waiting register stays set until a transaction of one statement clears it');

-- Unsubscribing.
select is(pgqueue.unsubscribe('orders.paid', 'two'), true, 'unsubscribe returns true for an existing subscription');
select is(pgqueue.unsubscribe('orders.paid', 'two'), false, 'unsubscribe returns false for a subscription that does not exist');
select is(pgqueue.publish('orders.paid', '1'), 1, 'publish sends nothing to a queue that unsubscribed');
select is(pgqueue.unsubscribe('orders.*', 'one'), true, 'unsubscribe ends one of two subscriptions of a queue');
select is(pgqueue.publish('orders.paid', '1'), 1, 'publish still sends to a queue by its other subscription');
select pgqueue.pause_queue('one') as paused \gset
select is(pgqueue.publish('orders.paid', '1'), 1, 'publish sends to a paused queue');

-- Refused calls.
select throws_ok($$ select pgqueue.subscribe('a', 'missing') $$, 'PQ001', null, 'subscribe refuses an unknown queue');
select throws_ok($$ select pgqueue.unsubscribe('a', null) $$, 'PQ001', null, 'unsubscribe refuses a null queue');
select throws_ok($$ select pgqueue.list_subscriptions('missing') $$, 'PQ001', null, 'list_subscriptions refuses an unknown queue');
select throws_ok(format('select pgqueue.subscribe(%L, %L)', t, 'one'), '22023', null, format('subscribe refuses the topic %s', quote_nullable(left(t, 20))))
from unnest(array[null, '', '.', 'a.', '.a', 'a..b', 'a.#.#', '#.#.b', E'a\nb', repeat('a', 256)]) t;
select lives_ok(format('select pgqueue.subscribe(%L, %L)', t, 'one'), format('subscribe accepts the topic %s', left(t, 20))) from unnest(array[repeat('ä', 255), 'a.#.*.#', E'x''); drop table pgqueue.messages; --']) t;
select throws_ok(format('select pgqueue.publish(%L, %L)', t, '1'), '22023', null, format('publish refuses the topic %s', quote_nullable(t))) from unnest(array[null, '', 'a..b', 'a.*', '#', 'a.#.b']) t;
select throws_ok($$ select pgqueue.publish('a', '1', base_topics => '{b,null}') $$, '22023', null, 'publish refuses a base topic that is null');
select throws_ok($$ select pgqueue.publish('nobody') $$, '22023', null, 'publish refuses a message without payload and body even if no queue subscribes');
select throws_ok($$ select pgqueue.publish('nobody', '1', body => 'x') $$, '22023', null, 'publish refuses a message with both a payload and a body');
select throws_ok($$ select pgqueue.publish('nobody', '1', '-1 s') $$, '22023', null, 'publish refuses a negative delay');
select throws_ok($$ select pgqueue.publish('nobody', '1', expires_in => '11 years') $$, '22023', null, 'publish refuses an expiry over 10 years');
select throws_ok($$ select pgqueue.publish('orders.paid', '1', headers => '[]') $$, '22023', null, 'publish refuses headers that are not an object');
select pgqueue.create_queue('small', max_payload_bytes => 10) is not null as made \gset
select pgqueue.subscribe('#', 'small') as made \gset
select throws_like($$ select pgqueue.publish('orders.paid', '"0123456789"') $$, '%queue ''small''%', 'the error for a message over the limit of one queue names that queue');
select throws_ok(format('select pgqueue.publish(%L, %L, headers => %L)', 'nobody', '1', jsonb_build_object('a', repeat('x', 65536))), 'PQ003', null, 'publish refuses headers over 64 KB');

select * from finish();
rollback;
