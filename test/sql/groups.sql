begin;
-- The lock makes test files wait for each other: this file stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.at(moment text) returns text language sql as $$ select set_config('test.now', moment || '+00', true) $$;

select plan(101);

-- Claims and receives in one call, as "payload payload ..." by id. The claims are kept for the calls that settle them.
create temporary table claims (payload text primary key, id bigint, token uuid);
create function pg_temp.claim(queue text, wanted int default 100) returns text language sql as $$
    with claimed as (
        insert into claims select m.payload #>> '{}', m.id, m.claim_token from pgqueue.claim(queue, wanted) m
        on conflict (payload) do update set id = excluded.id, token = excluded.token
        returning *
    )
    select string_agg(c.payload, ' ' order by c.id) from claimed c
$$;
create function pg_temp.receive(queue text, wanted int default 100) returns text language sql as $$
    select string_agg(m.payload #>> '{}', ' ' order by m.id) from pgqueue.receive(queue, wanted) m
$$;
create function pg_temp.ack(queue text, name text) returns boolean language sql as $$
    select pgqueue.ack(queue, c.id, c.token) from claims c where c.payload = name
$$;
create function pg_temp.nack(queue text, name text, pause interval default null) returns boolean language sql as $$
    select pgqueue.nack(queue, c.id, c.token, pause) from claims c where c.payload = name
$$;
create function pg_temp.send(queue text, names text) returns bigint language sql as $$
    -- The letters of a name are its group.
    select count(pgqueue.enqueue(queue, to_jsonb(n), group_key => nullif(regexp_replace(n, '[0-9]', '', 'g'), '')))
    from regexp_split_to_table(names, ' ') as n
$$;

-- Settings

select is((pgqueue.create_queue('fifo', '30 s', 3, group_limit => 1)).group_limit, 1, 'create_queue returns the group_limit');
select is((pgqueue.get_queue('fifo')).on_dead, 'skip', 'on_dead is skip by default');
select is((pgqueue.create_queue('plain')).group_limit, null, 'a queue has no group_limit by default');
select throws_ok($$ select pgqueue.create_queue('x', group_limit => 0) $$, '22023', 'invalid group_limit: ''0''', 'create_queue refuses a group_limit below 1');
select throws_ok($$ select pgqueue.create_queue('x', group_limit => 1001) $$, '22023', 'invalid group_limit: ''1001''', 'create_queue refuses a group_limit above 1000');
select throws_ok($$ select pgqueue.create_queue('x', group_limit => 1, on_dead => 'wait') $$, '22023', 'invalid on_dead: ''wait''', 'create_queue refuses an unknown on_dead');
select throws_ok($$ select pgqueue.create_queue('x', on_dead => null) $$, '22023', 'invalid on_dead: null', 'create_queue refuses null as on_dead');
select throws_ok($$ select pgqueue.create_queue('x', group_limit => 1, on_dead => 'hold', dlq_enabled => false) $$, '22023', 'invalid on_dead: ''hold''', 'create_queue refuses on_dead hold without dead letters');
select throws_ok($$ select pgqueue.alter_queue('plain', on_dead => 'hold', dlq_enabled => false) $$, '22023', 'invalid on_dead: ''hold''', 'alter_queue refuses on_dead hold without dead letters');
select is((pgqueue.alter_queue('fifo', on_dead => 'hold')).on_dead, 'hold', 'alter_queue changes on_dead');
select throws_ok($$ select pgqueue.alter_queue('fifo', dlq_enabled => false) $$, '22023', 'invalid on_dead: ''hold''', 'alter_queue does not end the dead letters of a queue with on_dead hold');
select throws_ok($$ select pgqueue.create_queue('x', on_dead => 'hold') $$, '22023', 'invalid on_dead: ''hold''', 'create_queue refuses on_dead hold without group_limit');
select throws_ok($$ select pgqueue.alter_queue('plain', on_dead => 'hold') $$, '22023', 'invalid on_dead: ''hold''', 'alter_queue refuses on_dead hold without group_limit');
select is((pgqueue.alter_queue('fifo', group_limit => 0)).on_dead, 'hold', 'alter_queue keeps on_dead when it ends the groups');
select is((pgqueue.alter_queue('fifo', group_limit => 1, visibility_timeout => '30 s')).on_dead, 'hold', 'alter_queue gives groups to a queue that has kept on_dead');
select is((pgqueue.alter_queue('fifo', on_dead => 'skip')).group_limit, 1, 'alter_queue keeps the group_limit that is not given');

-- Sending

select throws_ok($$ select pgqueue.enqueue('fifo', '1', group_key => '') $$, '22023', 'invalid group_key: ''''', 'enqueue refuses an empty group_key');
select throws_ok($$ select pgqueue.enqueue('fifo', '1', group_key => repeat('x', 256)) $$, '22023', null, 'enqueue refuses a group_key of 256 characters');
select throws_ok($$ select pgqueue.enqueue('fifo', '1', headers => '[]', group_key => 'a') $$, '22023', 'invalid headers: ''[]''', 'enqueue refuses headers that are no object, also with a group_key');
select throws_ok($$ select * from pgqueue.enqueue_batch('fifo', array['1', '2']::jsonb[], group_keys => array['a']) $$, '22023', 'invalid group_keys: ''1 element''', 'enqueue_batch refuses group_keys of another length');
select throws_ok($$ select * from pgqueue.enqueue_batch('fifo', array['1']::jsonb[], group_keys => array['']) $$, '22023', 'invalid group_key: ''''', 'enqueue_batch refuses an empty group_key');
select throws_ok($$ select pgqueue.publish('t', '1', group_key => '') $$, '22023', 'invalid group_key: ''''', 'publish refuses an empty group_key');
select pgqueue.enqueue('plain', '1', headers => '{"a": 1}', group_key => 'g'), pgqueue.enqueue('plain', '2', delay => '1 s', group_key => 'g'), pgqueue.enqueue('plain', '3', dedup_key => 'k', group_key => 'g'), (select count(*) from pgqueue.enqueue_batch('plain', array['4', '5']::jsonb[], headers => array['{"a": 2}', null]::jsonb[], group_keys => array['g', null])), pgqueue.subscribe('t', 'plain'), pgqueue.publish('t', '6', group_key => 'g') \g /dev/null
select is(
    (select array_agg((m.payload #>> '{}') || ' ' || coalesce(m.headers::text, '-') order by m.payload) from (select payload, headers from pgqueue.messages where queue_name = 'plain' union all select payload, headers from pgqueue.scheduled_messages where queue_name = 'plain') m),
    array['1 {"a": 1, "pgqueue.group": "g"}', '2 {"pgqueue.group": "g"}', '3 {"pgqueue.group": "g"}', '4 {"a": 2, "pgqueue.group": "g"}', '5 -', '6 {"pgqueue.group": "g", "pgqueue.topic": "t"}'],
    'group_key becomes the header pgqueue.group in enqueue, enqueue_batch and publish');
select is(pg_temp.claim('plain'), '1 3 4 5 6', 'claim returns all messages of a group if the queue has no group_limit');

-- Order, with a limit of one

select pg_temp.send('fifo', 'a1 a2 b1 a3 b2') \g /dev/null
select is(pg_temp.claim('fifo'), 'a1 b1', 'a claim returns the first message of each group, by id');
select is(pg_temp.claim('fifo'), null, 'while a message is in flight, the others of its group wait');
select is((select s.ready_messages from pgqueue.stats('fifo') s), 3::bigint, 'stats counts messages that wait for others of their groups as ready');
select is(
    (
        select count(*) from (
            select m.visible_at <= pgqueue._now() as is_ready,
                row_number() over (partition by m.headers ->> 'pgqueue.group' order by m.visible_at <= pgqueue._now(), m.id) as n
            from pgqueue.messages m where m.queue_name = 'fifo' and m.headers ? 'pgqueue.group'
        ) w where w.is_ready and w.n > 1
    ), 3::bigint, 'a query of sql/REFERENCE.md counts those that wait');
select is(pgqueue.prepare_wait('fifo'), pgqueue._now() + interval '1 s', 'prepare_wait returns a time that is one second ahead while messages wait for others of their groups');
select is(pgqueue.next_due_at('fifo') <= pgqueue._now(), true, 'next_due_at does not return a later time while messages wait for others of their groups');
select is(pg_temp.ack('fifo', 'a1'), true, 'a message of a group is acknowledged like others');
select is(pg_temp.claim('fifo'), 'a2', 'claim returns the next message of a group after an acknowledgement');
select is(pg_temp.nack('fifo', 'b1', '1 min'), true, 'nack returns a message of a group');
select is(pg_temp.claim('fifo'), null, 'while a message waits for its retry, the others of its group wait');
select is((select s.inflight_messages from pgqueue.stats('fifo') s), 2::bigint, 'a message that waits for its retry counts as in flight');
select is(pgqueue.next_due_at('fifo') <= '2030-01-01 12:01:00+00', true, 'next_due_at returns when a message of a group is due again');
select pg_temp.ack('fifo', 'a2'), pg_temp.at('2030-01-01 12:01:00') \g /dev/null
select is(pg_temp.claim('fifo'), 'b1 a3', 'a message is delivered again before the later ones of its group');
select pg_temp.ack('fifo', 'a3') \g /dev/null
select is((select pgqueue.release('fifo', array[c.id], c.token) from claims c where c.payload = 'b1'), 1, 'release returns a message of a group');
select is(pg_temp.claim('fifo'), 'b1', 'a released message is delivered before the later ones of its group');
select is((select m.attempt_count from pgqueue.messages m, claims c where m.queue_name = 'fifo' and m.id = c.id and c.payload = 'b1'), 2, 'release does not count the attempt');
select pg_temp.at('2030-01-01 12:02:00') \g /dev/null
select is(pg_temp.claim('fifo'), 'b1', 'a message whose claim has ended is delivered before the later ones of its group');
select pg_temp.at('2030-01-01 12:03:00') \g /dev/null
select is(pg_temp.claim('fifo'), 'b2', 'a message without attempts left frees its group');
select is((select array_agg(d.payload) from pgqueue.browse_dead_messages('fifo') d), array['"b1"'::jsonb], 'a message without attempts left becomes a dead letter');
select is(pgqueue.redrive('fifo'), 1, 'redrive returns a dead letter of a group');
select is(pg_temp.claim('fifo'), null, 'a redriven message waits for the later message of its group that is in flight');
select pg_temp.ack('fifo', 'b2') \g /dev/null
select is(pg_temp.claim('fifo'), 'b1', 'a redriven message is delivered when its group is free');
select is((select pgqueue.reject('fifo', c.id, c.token) from claims c where c.payload = 'b1'), true, 'reject gives up a message of a group');
select pgqueue.purge_dead_messages('fifo') \g /dev/null

-- What else removes or adds messages

select pg_temp.send('fifo', 'a1 a2 a3 a4 a5 a6'), pg_temp.claim('fifo') \g /dev/null
delete from pgqueue.messages m using claims c where m.queue_name = 'fifo' and m.id = c.id and c.payload = 'a1';
select is(pg_temp.claim('fifo'), 'a2', 'a delete by plain SQL frees the group');
select is((select string_agg(e.payload #>> '{}', ' ') from claims c cross join lateral pgqueue.exchange('fifo', array[c.id], c.token, 100) e where c.payload = 'a2'), 'a3', 'exchange acknowledges a message and claims the next one of its group');
select pgqueue.purge_queue('fifo'), pg_temp.send('fifo', 'a1 a2 a3 a4 a5 a6') \g /dev/null
select is((select pgqueue.cancel('fifo', m.id) from pgqueue.messages m where m.queue_name = 'fifo' and m.payload = '"a1"'), true, 'cancel removes the first message of a group');
select is(pg_temp.receive('fifo'), 'a2', 'receive returns the first message of a group');
select is(pg_temp.receive('fifo'), 'a3', 'receive returns the next message of a group after the first was removed');
update pgqueue.messages m set visible_at = '2030-01-01 13:00:00+00', attempt_count = 1
where m.queue_name = 'fifo' and m.payload = '"a5"';
select is(pg_temp.claim('fifo'), null, 'a claim by plain SQL keeps its group waiting, also if the message is not the first');
delete from pgqueue.messages m where m.queue_name = 'fifo' and m.payload = '"a5"';
update pgqueue.messages m set expires_at = '2030-01-01 12:00:00+00' where m.queue_name = 'fifo' and m.payload = '"a4"';
select is(pg_temp.claim('fifo'), 'a6', 'an expired message frees its group');
select pg_temp.ack('fifo', 'a6') \g /dev/null
select pgqueue.enqueue('fifo', '"c1"', delay => '10 s', group_key => 'c'), pg_temp.send('fifo', 'c2') \g /dev/null
select is(pg_temp.claim('fifo'), 'c2', 'a message that is not yet due does not keep its group waiting');
select pg_temp.at('2030-01-01 12:03:10') \g /dev/null
select is(pg_temp.claim('fifo'), null, 'a message that comes due waits for the later message of its group that is in flight');
select pg_temp.ack('fifo', 'c2') \g /dev/null
select is(pg_temp.claim('fifo'), 'c1', 'a message that came due is delivered when its group is free');
select pg_temp.ack('fifo', 'c1'), pgqueue.enqueue('fifo', '"d1"', headers => '{"pgqueue.group": "d"}'), pgqueue.enqueue('fifo', '"d2"', group_key => 'd') \g /dev/null
select is(pg_temp.claim('fifo'), 'd1', 'a group can be given by the header alone');
select pg_temp.ack('fifo', 'd1'), pg_temp.claim('fifo'), pg_temp.ack('fifo', 'd2') \g /dev/null
select is((select count(*) from pgqueue.messages m where m.queue_name = 'fifo'), 0::bigint, 'the queue has no message left');

-- Messages without a group

select pg_temp.send('fifo', '1 2 3 a1 a2') \g /dev/null
select is(pg_temp.claim('fifo', 4), '1 2 3 a1', 'messages without a group do not wait for each other');
select is(pg_temp.nack('fifo', '1', '10 s'), true, 'nack returns a message without a group');
select is((select s.scheduled_messages from pgqueue.stats('fifo') s), 1::bigint, 'a message without a group is scheduled for its retry');
select pg_temp.at('2030-01-01 12:03:20') \g /dev/null
select is(pg_temp.claim('fifo'), '1', 'a message without a group is delivered again when it is due');
select pgqueue.release('fifo', array[c.id], c.token) from claims c where c.payload = '2' \g /dev/null
select is(pg_temp.claim('fifo'), '2', 'a released message without a group is delivered again');
select pg_temp.at('2030-01-01 12:05:30') \g /dev/null
select is(pg_temp.claim('fifo'), '1 2 3 a1', 'messages whose claims have ended are delivered again, with a group and without');
select pgqueue.pause_queue('fifo'), pg_temp.at('2030-01-01 12:07:00') \g /dev/null
select is(pg_temp.claim('fifo'), null, 'claim returns no message of a group while the queue is paused');
select pgqueue.resume_queue('fifo'), pgqueue.purge_queue('fifo') \g /dev/null
select pg_temp.send('fifo', string_agg(n::text, ' ')) from generate_series(1, 50) as n \g /dev/null
select pg_temp.send('fifo', 'a1 b1 c1') \g /dev/null
select is((select count(*) from generate_series(1, 40) as n, lateral pgqueue.claim('fifo', 1 + 0 * n) m where m.headers ->> 'pgqueue.group' is not null), 3::bigint, 'a backlog without groups does not keep messages of groups waiting');

-- Fairness, and many groups

select pgqueue.purge_queue('fifo') \g /dev/null
select pgqueue.enqueue_batch('fifo', array_agg(to_jsonb('hot' || n)), group_keys => array_agg('hot'::text)) from generate_series(1, 2000) as n \g /dev/null
select pg_temp.send('fifo', 'a1 b1 c1') \g /dev/null
select is(pg_temp.claim('fifo'), 'hot1 a1 b1 c1', 'a group with a backlog does not keep other groups waiting');
select pgqueue.purge_queue('fifo') \g /dev/null
select pgqueue.enqueue_batch('fifo', array_agg(to_jsonb(n)), group_keys => array_agg('g' || n)) from generate_series(1, 250) as n \g /dev/null
select is((select array_agg(array_length(string_to_array(pg_temp.claim('fifo', 1000 + 0 * n), ' '), 1)) from generate_series(1, 4) as n), array[100, 100, 50, null], 'a claim returns messages of at most 100 groups, and the next claims those of the others');

-- A higher limit

select pgqueue.create_queue('pairs', '30 s', group_limit => 2) \g /dev/null
select pg_temp.send('pairs', 'a1 a2 a3 b1 a4') \g /dev/null
select is(pg_temp.claim('pairs'), 'a1 a2 b1', 'a claim returns as many messages of a group as the limit allows');
select is(pg_temp.claim('pairs'), null, 'claim returns no message of a group that has group_limit messages in flight');
select pg_temp.ack('pairs', 'a2') \g /dev/null
select is(pg_temp.claim('pairs'), 'a3', 'claim returns one more message of a group after an acknowledgement');
select pg_temp.nack('pairs', 'a1', '10 s') \g /dev/null
select is(pg_temp.claim('pairs'), 'a4', 'with a higher limit, a message that waits for its retry does not count');
select pgqueue.alter_queue('pairs', group_limit => 1), pg_temp.at('2030-01-01 12:07:10') \g /dev/null
select is(pg_temp.claim('pairs'), null, 'a lower group_limit applies to the next claim');
select pgqueue.purge_queue('pairs'), pgqueue.alter_queue('pairs', group_limit => 2), pg_temp.send('pairs', 'a1 a2 a3'), pg_temp.claim('pairs'), pg_temp.at('2030-01-01 12:07:41') \g /dev/null
select is((select pgqueue.extend('pairs', c.id, c.token) from claims c where c.payload = 'a1'), false, 'a claim that has ended is not extended, as its place can be taken');
select is((select count(*) from claims c cross join lateral pgqueue.extend_batch('pairs', array[c.id], c.token) where c.payload = 'a2'), 0::bigint, 'extend_batch does not extend a claim that has ended');

-- Dead letters that hold their group

select pgqueue.create_queue('held', group_limit => 1, on_dead => 'hold') \g /dev/null
select pg_temp.send('held', 'a1 a2 b1'), pg_temp.claim('held'), pg_temp.ack('held', 'b1') \g /dev/null
select pgqueue.reject('held', c.id, c.token) from claims c where c.payload = 'a1' \g /dev/null
select is(pg_temp.claim('held'), null, 'with on_dead hold a group waits for its dead letter');
select results_eq(
    $$ select d.finding, d.detail, d.repair from pgqueue.doctor() d where d.queue_name = 'held' and d.finding = 'held_group' $$,
    $$ select 'held_group', format('group %L waits for 1 dead letter, the first is %s: on_dead is hold', 'a', c.id), format('select pgqueue.redrive(%L, ids => array[%s]); -- or purge_dead_messages', 'held', c.id) from claims c where c.payload = 'a1' $$,
    'doctor reports a group that waits for a dead letter');
select pgqueue.redrive('held') \g /dev/null
select is(pg_temp.claim('held'), 'a1', 'a redriven dead letter is delivered before the later messages of its group');
select pgqueue.reject('held', c.id, c.token) from claims c where c.payload = 'a1' \g /dev/null
select pgqueue.purge_dead_messages('held') \g /dev/null
select is(pg_temp.claim('held'), 'a2', 'a group goes on after its dead letter is purged');
select is((select count(*) from pgqueue.doctor() d where d.finding = 'held_group'), 0::bigint, 'doctor no longer reports the group');
select pgqueue.purge_queue('held') \g /dev/null
select pgqueue.enqueue_batch('held', array_agg(to_jsonb(g || n) order by n), group_keys => array_agg(g order by n))
from generate_series(1, 2) as n, (select 'g' || s || '-' as g from generate_series(1, 200) as s) as groups \g /dev/null
select pgqueue.reject('held', c.id, c.claim_token) from generate_series(1, 2) as n, lateral pgqueue.claim('held', 100 + 0 * n) c \g /dev/null
select is(pgqueue.redrive('held'), 200, 'redrive returns the dead letters of many groups');
select is((select count(distinct c.payload) filter (where c.payload #>> '{}' like '%-1') from generate_series(1, 200) as n, lateral pgqueue.claim('held', 1 + 0 * n) c), 200::bigint,
    'all redriven dead letters are delivered before the later messages of their groups');
select pgqueue.create_queue('held2', '30 s', 1, group_limit => 2, on_dead => 'hold'), pg_temp.send('held2', 'a1 a2 a3'), pg_temp.claim('held2') \g /dev/null
select pgqueue.extend('held2', c.id, c.token, '1 h') from claims c where c.payload = 'a1' \g /dev/null
select pg_temp.at('2030-01-01 12:08:20') \g /dev/null
select is(pg_temp.claim('held2'), null, 'with on_dead hold a group waits for a message without attempts, also if an earlier message is in flight');
select is((select string_agg(d.payload #>> '{}', ' ') from pgqueue.dead_messages d where d.queue_name = 'held2'), 'a2', 'a claim makes a dead letter of a message without attempts, also if an earlier message of its group is in flight');
select pgqueue.create_queue('held3', '1 s', 1, group_limit => 3, on_dead => 'hold'), pg_temp.send('held3', 'a1'), pg_temp.claim('held3'), pg_temp.send('held3', 'a2 a3') \g /dev/null
select pg_temp.at('2030-01-01 12:08:22') \g /dev/null
select is(pg_temp.claim('held3'), null, 'with on_dead hold a group waits for a message without attempts before the ready ones');
select pgqueue.create_queue('held4', '1 s', 1, group_limit => 3, on_dead => 'hold'), pg_temp.send('held4', 'a1 a2 a3'), pg_temp.claim('held4') \g /dev/null
select pgqueue.release('held4', array[c.id], c.token) from claims c where c.payload = 'a1' \g /dev/null
select pgqueue.reject('held4', c.id, c.token) from claims c where c.payload = 'a3' \g /dev/null
select pg_temp.at('2030-01-01 12:08:24') \g /dev/null
select is(pg_temp.claim('held4'), null, 'with on_dead hold a group gives no message while it waits for its dead letter');
select is((select string_agg(d.payload #>> '{}', ' ' order by d.id) from pgqueue.dead_messages d where d.queue_name = 'held4'), 'a2 a3', 'a claim makes a dead letter of a message without attempts, also if its group waits for another one');
select pgqueue.create_queue('spent', group_limit => 3) \g /dev/null
select pgqueue.enqueue('spent', to_jsonb(w.g || n), group_key => w.g, expires_in => case w.place when 2 then interval '1 s' end)
from (
    select g, row_number() over (order by pgqueue._group_position(jsonb_build_object('pgqueue.group', g), 0)) as place
    from unnest('{a,b,c}'::text[]) as g
) w, generate_series(1, case w.place when 2 then 3 else 1 end) as n \g /dev/null
select pg_temp.at('2030-01-01 12:08:26') \g /dev/null
select is((select count(*) from pgqueue.claim('spent', 3)), 2::bigint, 'expired messages of a group take no places of the groups behind it in a claim');

-- Groups that give no message

create function pg_temp.last_group() returns text language sql as $$
    -- A claim visits the groups in the order of their positions.
    select g from (select 'free' || n as g from generate_series(1, 1000) as n) w
    order by pgqueue._group_position(jsonb_build_object('pgqueue.group', w.g), 0) desc limit 1
$$;
select pgqueue.create_queue('crowd', group_limit => 1, on_dead => 'hold') \g /dev/null
insert into pgqueue.dead_messages (id, queue_name, enqueued_at, attempt_count, max_attempts, payload, headers, reason)
select nextval('pgqueue.message_id'), 'crowd', '2030-01-01', 1, 1, '1', jsonb_build_object('pgqueue.group', 'g' || n), 'rejected'
from generate_series(1, 600) as n;
select pgqueue.enqueue_batch('crowd', array_agg('1'::jsonb), group_keys => array_agg('g' || n)) from generate_series(1, 600) as n \g /dev/null
select pgqueue.enqueue('crowd', '"free"', group_key => pg_temp.last_group()) \g /dev/null
select is(pg_temp.claim('crowd'), 'free', 'a claim passes any number of groups that wait for their dead letters');
select pgqueue.create_queue('crowd2', group_limit => 2) \g /dev/null
select pgqueue.enqueue_batch('crowd2', array_agg('1'::jsonb), group_keys => array_agg('g' || n % 300)) from generate_series(1, 900) as n \g /dev/null
select is((select count(*) from generate_series(1, 3) as n, lateral pgqueue.claim('crowd2', 1000 + 0 * n)), 600::bigint, 'with a higher limit, a claim returns messages of at most 100 groups');
select pgqueue.enqueue('crowd2', '"free"', group_key => pg_temp.last_group()), setval(q.sweep_resume_id, 1) from pgqueue.queues q where q.name = 'crowd2' \g /dev/null
select is(pg_temp.claim('crowd2'), 'free', 'a claim passes any number of groups that have group_limit messages in flight');

-- The failure of a delayed message: the message stays in messages, at an id that sweeps skip.

select pgqueue.create_queue('late', '30 s', group_limit => 1, max_in_flight => 1), pgqueue.enqueue('late', '"a1"', delay => '1 s', group_key => 'a') as late_id, pg_temp.send('late', 'a2 b1 c1'), pg_temp.at('2030-01-01 12:08:41') \gset
update pgqueue.sweep_state set vacant_ids = int8multirange(int8range(null, :late_id + 1)) where queue_name = 'late';
select pg_temp.at('2030-01-01 12:08:43') \g /dev/null
select is(pgqueue.record_failure('late', :late_id, 1, '10 s'), true, 'record_failure counts the attempt of a due message of a group');
select is((select count(*) from pgqueue.doctor() d where d.queue_name = 'late' and d.finding = 'misplaced_messages'), 0::bigint, 'a due message whose failure was recorded is at an id that is known');
select is(pg_temp.claim('late'), 'b1', 'a message whose failure was recorded keeps its group waiting');
select pg_temp.ack('late', 'b1'), pgqueue.cancel('late', m.id), pg_temp.at('2030-01-01 12:08:53') from pgqueue.messages m where m.queue_name = 'late' and m.payload = '"c1"' \g /dev/null
select is(pg_temp.claim('late'), 'a1', 'a message whose failure was recorded is delivered before the later ones of its group');
select pg_temp.send('late', 'd1') \g /dev/null
select is(pg_temp.claim('late'), null, 'max_in_flight counts a message whose failure was recorded before');

-- Rooms

select throws_ok($$ select pgqueue.expose_transport('held') $$, '22023', 'invalid queue_name: ''held''', 'expose_transport refuses a queue with group_limit');
select pgqueue.create_queue('streamed', group_limit => 1) \g /dev/null
select pgqueue.enqueue_batch('streamed', '{1,2,3}', group_keys => '{a,a,b}') \g /dev/null
select results_eq($$ select c.messages::int from pgqueue.stream_open('streamed', 's') s, pgqueue.stream_claim('streamed', 's', s.epoch, 0, null) c $$,
    array[2], 'a batch of a stream has one message of each group, as group_limit says');
select lives_ok($$ select pgqueue.drop_queue(q) from unnest(array['streamed', 'fifo', 'pairs', 'held', 'held2', 'held3', 'plain', 'crowd', 'crowd2', 'late']) as q $$, 'queues with groups are dropped like others');

-- A claim for which the time passes, here 30 ms with each look at the clock, and that begins behind the last group.
select pgqueue.create_queue('delayed', group_limit => 1), pg_temp.send('delayed', 'a1 b1 c1'), pg_temp.claim('delayed', 1) \g /dev/null
create temporary sequence ticks;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz + nextval('pg_temp.ticks') * interval '30 ms' $$;
select setval(q.sweep_resume_id, 9223372036854775806), setval(q.next_sweep_at, pgqueue._to_micros(pgqueue._now() + interval '14 s')) from pgqueue.queues q where q.name = 'delayed' \g /dev/null
select isnt(pg_temp.claim('delayed', 1), null, 'a claim that was delayed visits all groups');

select * from finish();
rollback;
