begin;
-- The lock makes test files wait for each other: this file stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.at(moment text) returns text language sql as $$ select set_config('test.now', moment || '+00', true) $$;

select plan(61);

-- The names of messages are their priority and a letter. A name without a digit has no priority.
create temporary table claims (payload text primary key, id bigint, token uuid);
create function pg_temp.send(queue text, names text) returns bigint language sql as $$
    select count(pgqueue.enqueue(queue, to_jsonb(n), priority => nullif(regexp_replace(n, '[^0-9]', '', 'g'), '')::int))
    from regexp_split_to_table(names, ' ') as n
$$;
create function pg_temp.claim(queue text, wanted int default 100) returns text language sql as $$
    with claimed as (
        insert into claims select m.payload #>> '{}', m.id, m.claim_token from pgqueue.claim(queue, wanted) m
        on conflict (payload) do update set id = excluded.id, token = excluded.token
        returning *
    )
    select string_agg(c.payload, ' ' order by c.id) from claimed c
$$;
-- Claims one message after the other. With this seed a claim begins with the highest priority.
create function pg_temp.claim_each(queue text, times int) returns text language plpgsql as $$
declare
    names text[];
begin
    for i in 1..times loop
        perform setseed(0.5);
        names := names || pg_temp.claim(queue, 1);
    end loop;
    return array_to_string(names, ' ');
end;
$$;
create function pg_temp.nack(queue text, name text, pause interval default null) returns boolean language sql as $$
    select pgqueue.nack(queue, c.id, c.token, pause) from claims c where c.payload = name
$$;

-- Settings
select is((pgqueue.create_queue('jobs', '30 s', 3, priorities => true)).priorities, true, 'create_queue returns priorities');
select is((pgqueue.create_queue('plain')).priorities, false, 'a queue has no priorities by default');
select throws_ok($$ select pgqueue.create_queue('x', priorities => null) $$, '22023', 'invalid priorities: null', 'create_queue refuses null as priorities');
select throws_ok($$ select pgqueue.create_queue('x', priorities => true, group_limit => 1) $$, '22023', 'invalid priorities: ''true''', 'create_queue refuses priorities with group_limit');
select throws_ok($$ select pgqueue.alter_queue('jobs', group_limit => 1) $$, '22023', 'invalid priorities: ''true''', 'alter_queue gives no group_limit to a queue with priorities');
select throws_ok($$ select pgqueue.expose_transport('jobs') $$, '22023', 'invalid queue_name: ''jobs''', 'expose_transport refuses a queue with priorities');
select throws_ok($$ select pgqueue.stream_claim('jobs', 's', (pgqueue.stream_open('jobs', 's')).epoch, 0, null) $$, '22023', 'invalid queue_name: ''jobs''', 'stream_claim refuses a queue with priorities');

-- The header
select throws_ok($$ select pgqueue.enqueue('jobs', '1', priority => 10) $$, '22023', 'invalid priority: ''10''', 'enqueue refuses a priority above 9');
select throws_ok($$ select pgqueue.enqueue('jobs', '1', priority => -1) $$, '22023', 'invalid priority: ''-1''', 'enqueue refuses a negative priority');
select throws_ok($$ select pgqueue.enqueue_batch('jobs', '{1}', priorities => '{11}') $$, '22023', 'invalid priority: ''11''', 'enqueue_batch refuses a priority above 9');
select throws_ok($$ select pgqueue.enqueue_batch('jobs', '{1,2}', priorities => '{1}') $$, '22023', 'invalid priorities: ''1 element''', 'enqueue_batch refuses an array of priorities of another length');
select throws_ok($$ select pgqueue.publish('t', '1', priority => 10) $$, '22023', 'invalid priority: ''10''', 'publish refuses a priority above 9');
select throws_ok($$ select pgqueue.enqueue('jobs', '1', headers => '[]', priority => 1) $$, '22023', 'invalid headers: ''[]''', 'enqueue refuses headers that are no object');
select pgqueue.subscribe('t', 'plain') \g /dev/null
select pgqueue.enqueue('plain', '1', headers => '{"a": 1}', priority => 9), pgqueue.enqueue('plain', '2', group_key => 'g', priority => 0), pgqueue.publish('t', '3', priority => 3) \g /dev/null
select pgqueue.enqueue_batch('plain', '{4,5}', priorities => '{null,7}') \g /dev/null
select is(
    (select array_agg(m.headers::text order by m.id) from pgqueue.messages m where m.queue_name = 'plain'),
    array['{"a": 1, "pgqueue.priority": 9}', '{"pgqueue.group": "g", "pgqueue.priority": 0}', '{"pgqueue.topic": "t", "pgqueue.priority": 3}', null, '{"pgqueue.priority": 7}'],
    'the priority becomes the header pgqueue.priority in enqueue, enqueue_batch and publish');
select is(pg_temp.claim('plain'), '1 2 3 4 5', 'a queue without priorities ignores the header');

-- Order
select pg_temp.send('jobs', 'a 0b 5c 9d 5e 9f g 1h') \g /dev/null
select is(pg_temp.claim_each('jobs', 9), '9d 9f 5c 5e 1h a 0b g', 'claim returns higher priorities first, and those of one priority by id');
select pg_temp.send('jobs', '9z'), pgqueue.pause_queue('jobs') \g /dev/null
select is(pg_temp.claim('jobs'), null, 'claim returns no message of a queue with priorities while it is paused');
select pgqueue.resume_queue('jobs'), pg_temp.claim('jobs') \g /dev/null
select pg_temp.send('jobs', '1i 8j 8k 3l'), setseed(0.5) \g /dev/null
select is(pg_temp.claim('jobs', 3), '8j 8k 3l', 'a claim of several messages takes those with the highest priority');
select is((select payload #>> '{}' from pgqueue.receive('jobs')), '1i', 'receive finds the message that is left');
select pg_temp.send('jobs', 'a 3b 9c 3d 9e'), setseed(0.5) \g /dev/null
select is((select string_agg(c.payload #>> '{}', ' ') from pgqueue.claim('jobs', 4) c), '9c 9e 3b 3d', 'a claim of several messages returns them in the order in which it takes them');
select pg_temp.send('jobs', '5f 7g'), setseed(0.5) \g /dev/null
select is((select string_agg(c.payload #>> '{}', ' ') from pgqueue.exchange('jobs', null, null, 3) c), '7g 5f a', 'exchange returns them in this order, too');
insert into pgqueue.messages (queue_name, payload, headers) values
    ('jobs', '"none"', '{"pgqueue.priority": "12"}'), ('jobs', '"four"', '{"pgqueue.priority": "4"}'), ('jobs', '"array"', '[]'), ('jobs', '"nine"', '{"pgqueue.priority": 9}');
update pgqueue.messages set enqueued_at = pgqueue._now(), visible_at = pgqueue._now() where queue_name = 'jobs' and attempt_count = 0;
select is(pg_temp.claim_each('jobs', 5), 'nine four none array', 'messages that plain SQL has inserted have their place, and a header that is no priority counts as 0');
select is((select count(*) from pgqueue.exchange('jobs', null, null, 100)), 0::bigint, 'all messages are in flight');

-- Messages that come back keep their priority.
select pg_temp.send('jobs', '2m 6n') \g /dev/null
select is(pg_temp.claim('jobs'), '2m 6n', 'two messages are claimed');
select is(pg_temp.nack('jobs', '2m', '10 s') and pg_temp.nack('jobs', '6n', '10 s'), true, 'both are returned');
select pgqueue.enqueue('jobs', '"7delayed"', delay => '10 s', priority => 7) \g /dev/null
select pg_temp.at('2030-01-01 12:00:11'), pg_temp.send('jobs', '3o 6p') \g /dev/null
select is(pg_temp.claim_each('jobs', 6), '7delayed 6p 6n 3o 2m', 'messages that came due are claimed by their priority, at its end');
select is((select pgqueue.release('jobs', array[c.id], c.token) from claims c where c.payload = '3o'), 1, 'a message is released');
select pg_temp.send('jobs', '1q 9r') \g /dev/null
select is(pg_temp.claim_each('jobs', 4), '9r 3o 1q', 'a released message keeps its priority');
select is((select pgqueue.reject('jobs', c.id, c.token) from claims c where c.payload = '9r'), true, 'a message becomes a dead letter');
select pgqueue.redrive('jobs'), pg_temp.send('jobs', '8s') \g /dev/null
select is(pg_temp.claim_each('jobs', 3), '9r 8s', 'a redriven message keeps its priority');
select pg_temp.send('jobs', '0t') \g /dev/null
select is(pg_temp.claim('jobs'), '0t', 'a message is claimed');
select is((select pgqueue.nack('jobs', c.id, c.token, '0', headers => '{"pgqueue.priority": 9}') from claims c where c.payload = '0t'), true, 'it is returned with another priority');
select pg_temp.send('jobs', '8u') \g /dev/null
select is(pg_temp.claim_each('jobs', 3), '0t 8u', 'the headers of nack change the priority');

-- Claims that end, and messages that have no attempts left or have expired
select pgqueue.purge_queue('jobs') \g /dev/null
select pg_temp.send('jobs', '1a 9b 5c') \g /dev/null
select is(pg_temp.claim('jobs'), '1a 9b 5c', 'three messages are in flight');
select pg_temp.at('2030-01-01 12:01:00') \g /dev/null
select is(pg_temp.claim_each('jobs', 4), '9b 5c 1a', 'messages whose claims have ended are claimed again by priority');
select pg_temp.at('2030-01-01 12:02:00'), pg_temp.claim('jobs'), pg_temp.at('2030-01-01 12:03:00') \g /dev/null
select pgqueue.enqueue('jobs', '"late"', expires_in => '1 s', priority => 9) from generate_series(1, 3) \g /dev/null
select pg_temp.at('2030-01-01 12:03:10'), pg_temp.send('jobs', '0z') \g /dev/null
select is(pg_temp.claim('jobs'), '0z', 'messages without attempts and expired ones are not claimed');
select is((select count(*) from pgqueue.messages where queue_name = 'jobs'), 1::bigint, 'a claim removes them');
select is((select string_agg(payload #>> '{}', ' ' order by id) from pgqueue.dead_messages where queue_name = 'jobs'), '1a 9b 5c', 'a message without attempts becomes a dead letter');

-- A claim that ends far below those that other claims have passed
select pgqueue.create_queue('far', priorities => true), pg_temp.send('far', '5a 0b 5e') \g /dev/null
select is(pg_temp.claim('far'), '5a 0b 5e', 'three messages are claimed');
select count(nextval('pgqueue.message_id')) from generate_series(1, 20000) \g /dev/null
select pg_temp.send('far', '5c 0d') \g /dev/null
select is(pg_temp.claim('far'), '5c 0d', 'claims pass them');
select pgqueue.ack('far', c.id, c.token) from claims c where c.payload in ('5c', '0d') \g /dev/null
select pg_temp.at('2030-01-01 12:05:00') \g /dev/null
select is(pg_temp.claim_each('far', 4), '5a 5e 0b', 'they are found in order when their claims have ended');

-- Many claims that end at the same time
select pgqueue.create_queue('many', priorities => true) \g /dev/null
select pgqueue.enqueue_batch('many', array_agg(to_jsonb(n)), priorities => array_agg(n % 2 * 9)) from generate_series(1, 5000) as n \g /dev/null
select is((select count(*) from pgqueue.claim('many', 5000)), 5000::bigint, '5,000 messages are in flight');
select pg_temp.at('2030-01-01 12:06:00') \g /dev/null
select is((select count(*) filter (where payload::int % 2 = 1) from pgqueue.claim('many', 2500)), 2500::bigint, 'a claim finds all those of the higher priority when their claims have ended');
select is((select count(*) filter (where payload::int % 2 = 0) from pgqueue.claim('many', 5000)), 2500::bigint, 'the next claim finds all others');
select pgqueue.drop_queue('many') \g /dev/null

-- Messages that have expired, or are not visible yet, before those that are claimed
create function pg_temp.buffers(queue text) returns int language plpgsql as $$
declare
    plan json;
begin
    -- No sweep runs in this claim.
    perform setval(q.next_sweep_at, pgqueue._to_micros(pgqueue._now() + interval '14 s')) from pgqueue.queues q where q.name = queue;
    execute format('explain (analyze, buffers, timing off, format json) select pgqueue.claim(%L)', queue) into plan;
    return (plan -> 0 -> 'Plan' ->> 'Shared Hit Blocks')::int + (plan -> 0 -> 'Plan' ->> 'Shared Read Blocks')::int;
end;
$$;
select pgqueue.create_queue('expired', priorities => true) \g /dev/null
select pgqueue.enqueue_batch('expired', array_fill('"late"'::jsonb, array[5000]), expires_in => '1 s', priorities => array_fill(9, array[5000])) \g /dev/null
insert into pgqueue.messages (queue_name, kind, payload, headers, enqueued_at, visible_at)
select 'expired', 2, '"hidden"', '{"pgqueue.priority": 5}', pgqueue._now(), pgqueue._now() + interval '1 h' from generate_series(1, 5000);
select pgqueue.enqueue_batch('expired', array_fill('"low"'::jsonb, array[100])), pg_temp.at('2030-01-01 12:06:10') \g /dev/null
select setval(q.next_sweep_at, 1), setseed(0.5) from pgqueue.queues q where q.name = 'expired' \g /dev/null
select is(pg_temp.claim('expired', 1), 'low', 'a claim passes messages that are not ready');
select cmp_ok(pg_temp.buffers('expired'), '<', 150, 'the next claim does not read them again');
-- Each of these claims sweeps, and removes some of them.
select setval(q.next_sweep_at, 1) from pgqueue.queues q where q.name = 'expired' \g /dev/null
select pgqueue.claim('expired') from generate_series(1, 20) \g /dev/null
select is((select count(*) from pgqueue.messages m where m.queue_name = 'expired' and m.payload = '"late"'), 0::bigint, 'sweeps remove those that have expired');
select pg_temp.send('expired', '9y 5x'), setseed(0.5) \g /dev/null
select is(pg_temp.claim('expired', 2), '9y 5x', 'messages of these priorities that are sent later are claimed first');
select pg_temp.at('2030-01-01 13:06:10'), setval(q.next_sweep_at, 1), setseed(0.5) from pgqueue.queues q where q.name = 'expired' \g /dev/null
select is((select count(*) filter (where m.payload = '"hidden"') from pgqueue.claim('expired', 5200) m), 5000::bigint, 'a sweep finds the others when they have become visible');
select pgqueue.drop_queue('expired'), pg_temp.at('2030-01-01 12:06:20') \g /dev/null

-- Claims that have ended
select pgqueue.create_queue('lapsed', '1 s', priorities => true) \g /dev/null
select pg_temp.send('lapsed', '2a 2b 2c'), setseed(0.5) \g /dev/null
select pg_temp.claim('lapsed'), pg_temp.at('2030-01-01 12:07:00'), pg_temp.send('lapsed', '9d 1e 9f') \g /dev/null
select is(pg_temp.claim_each('lapsed', 6), '9d 9f 2a 2b 2c 1e', 'messages whose claims have ended keep their priority');
select pg_temp.at('2030-01-01 12:08:00'), pg_temp.send('lapsed', '2g 9h 1i'), setseed(0.5) \g /dev/null
select is((select string_agg(m.payload #>> '{}', ' ') from pgqueue.claim('lapsed', 5) m), '9d 9f 9h 2a 2b', 'one claim takes both in this order');
select pgqueue.drop_queue('lapsed') \g /dev/null

-- A full pass of a sweep that reads many pages
select pgqueue.create_queue('churned', '30 s', priorities => true) \g /dev/null
select pgqueue.enqueue_batch('churned', array_fill(to_jsonb(repeat('x', 1500)), array[500])) \g /dev/null
select count(pgqueue.ack('churned', m.id, m.claim_token)) from pgqueue.claim('churned', 500) m \g /dev/null
select pg_temp.at('2030-01-01 15:00:00'), count(*) from pgqueue.claim('churned') \g /dev/null
select pg_temp.send('churned', '0y 0z 9z'), setseed(0.5), pg_temp.claim('churned', 3) \g /dev/null
select pg_temp.at('2030-01-01 15:01:00') \g /dev/null
select is(pg_temp.claim_each('churned', 3), '9z 0y 0z', 'after a sweep that has read many pages the next one starts with the highest priority');
select pgqueue.drop_queue('churned') \g /dev/null

-- Shares
select pgqueue.create_queue('shares', priorities => true) \g /dev/null
select pgqueue.enqueue_batch('shares', array_agg(to_jsonb(n % 3)), priorities => array_agg((array[0, 4, 9])[n % 3 + 1])) from generate_series(1, 3000) as n \g /dev/null
create function pg_temp.shares(times int) returns bigint[] language plpgsql as $$
declare
    counts bigint[];
begin
    create temporary table taken on commit drop as select 0 as level where false;
    for i in 1..times loop
        insert into taken select (m.payload #>> '{}')::int from pgqueue.claim('shares') m;
    end loop;
    return array(select count(t.level) from generate_series(0, 2) as n left join taken t on t.level = n group by n order by n);
end;
$$;
select setseed(0.1) \g /dev/null
select pg_temp.shares(500) as shares \gset
select ok((:'shares'::bigint[])[3] between 420 and 480, 'about nine claims of ten take the highest priority');
select ok((:'shares'::bigint[])[1] between 8 and 60 and (:'shares'::bigint[])[2] between 8 and 60, 'the other claims take the oldest messages, whatever their priority');

-- Limits
select pgqueue.create_queue('limited', priorities => true, max_in_flight => 3, rate_limit => 4, rate_period => '1 s') \g /dev/null
select pg_temp.send('limited', '1a 9b 5c 9d 1e 8f'), setseed(0.5) \g /dev/null
select is(pg_temp.claim('limited', 2), '9b 9d', 'a queue may have priorities and limits');
select is(pg_temp.claim('limited', 2), '8f', 'max_in_flight limits the claims');

-- Look-ups, a lost or wrong register, dropping
select pgqueue.purge_queue('jobs'), pg_temp.send('jobs', '1a 9b') \g /dev/null
select is((select (pgqueue.stats('jobs')).ready_messages), 2::bigint, 'stats counts the messages');
select is(pgqueue.peek('jobs', 10), 2, 'peek counts the messages');
select is((select string_agg(payload #>> '{}', ' ' order by id) from pgqueue.browse('jobs')), '1a 9b', 'browse returns the messages by id');
select setval(r, 9223372036854775807) from unnest(pgqueue._level_registers((select q from pgqueue.queues q where q.name = 'jobs'))) as r \g /dev/null
select is(pg_temp.claim_each('jobs', 3), '9b 1a', 'claims find messages below registers that are too high');
select pgqueue.drop_queue('jobs') \g /dev/null
select is((select count(*) from pg_class where relname ~ '_level_[0-9]$' and relnamespace = 'pgqueue'::regnamespace), 30::bigint, 'drop_queue drops the registers');

select * from finish();
rollback;
