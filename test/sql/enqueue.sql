begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(93);

create function pg_temp.enters(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    ids bigint[];
    new_id bigint;
    name uuid := gen_random_uuid();
    m pgqueue.message;
    n bigint;
begin
    perform pgqueue.create_queue(queue, dedicated => has_table, max_attempts => 4, max_payload_bytes => 1000);

    ids := array[pgqueue.enqueue(queue, '{"n": 1}'), pgqueue.enqueue(queue, '{"n": 2}')];
    return next ok(ids[2] > ids[1] and ids[1] > 0, queue || ': a later message has a higher id');
    select * into m from pgqueue.browse(queue) b where b.id = ids[1];
    return next is(
        (m.queue_name, m.payload, m.body, m.headers, m.message_id, m.attempt_count, m.max_attempts, m.enqueued_at, m.visible_at, m.expires_at, m.claimed_by, m.claim_token, m.last_error)::text,
        (queue, '{"n": 1}'::jsonb, null::bytea, null::jsonb, null::uuid, 0, 4, pgqueue._now(), pgqueue._now(), null::timestamptz, null::text, null::uuid, null::text)::text,
        queue || ': a message is ready at once, never claimed, with the attempts of its queue');
    perform pgqueue.purge_queue(queue);

    new_id := pgqueue.enqueue(queue, 'null', headers => '{"trace": "ü"}', expires_in => '1 h', message_id => name);
    select * into m from pgqueue.browse(queue);
    return next is((m.payload, m.headers, m.message_id, m.expires_at)::text, ('null'::jsonb, '{"trace": "ü"}'::jsonb, name, pgqueue._now() + interval '1 h')::text,
        queue || ': headers, expiry and name travel with a message, and JSON''s null is a payload');
    return next ok(pgqueue.enqueue(queue, '1', message_id => name) > new_id, queue || ': names of messages need not be unique');
    perform pgqueue.purge_queue(queue);
    perform pgqueue.enqueue(queue, body => '\x00ff');
    return next is((select (b.payload, b.body)::text from pgqueue.browse(queue) b), (null::jsonb, '\x00ff'::bytea)::text, queue || ': raw bytes travel as body');
    perform pgqueue.purge_queue(queue);
    perform pgqueue.enqueue(queue, body => '');
    return next is((select octet_length(b.body) from pgqueue.claim(queue) b), 0, queue || ': an empty body is a message');
    perform pgqueue.purge_queue(queue);

    new_id := pgqueue.enqueue(queue, '1', delay => '1 min', headers => '{"h": 1}', message_id => name, expires_in => '2 min');
    return next is((select (b.id, b.visible_at, b.headers, b.message_id, b.expires_at)::text from pgqueue.browse(queue, 'scheduled') b),
        (new_id, pgqueue._now() + interval '1 min', '{"h": 1}'::jsonb, name, pgqueue._now() + interval '2 min')::text, queue || ': a delayed message is scheduled for its moment, with all it has');
    return next is(pgqueue.next_due_at(queue), pgqueue._now() + interval '1 min', queue || ': and the queue knows the moment');
    ids := array[pgqueue.enqueue(queue, '2', delay => '30 s')];
    perform pg_temp.pass('30 s');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids, queue || ': a shorter delay that was asked for later ends sooner');
    perform pg_temp.pass('30 s');
    select * into m from pgqueue.claim(queue);
    return next is((m.id, m.headers, m.message_id, m.attempt_count)::text, (new_id, '{"h": 1}'::jsonb, name, 1)::text, queue || ': a delayed message is delivered under the id that was promised');
    perform pgqueue.purge_queue(queue);

    begin
        perform pgqueue.enqueue(queue, '1');
        perform pgqueue.enqueue(queue, '1', delay => '1 s');
        raise exception 'this rolls back' using errcode = 'P0001';
    exception when raise_exception then
        null;
    end;
    perform pg_temp.pass('2 s');
    return next is((select count(*) from pgqueue.claim(queue, 10)), 0::bigint, queue || ': a message is sent in the caller''s transaction, and a rollback takes it back');
    ids := array[pgqueue.enqueue(queue, '1')];
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids, queue || ': and those behind it are delivered');
    perform pgqueue.purge_queue(queue);

    ids := array(select pgqueue.enqueue_batch(queue, array_agg(to_jsonb(i) order by i))) from generate_series(1, 1000) i;
    return next ok((select bool_and(a < b) from unnest(ids[1:999], ids[2:1000]) as u (a, b)), queue || ': the ids of a batch rise');
    return next is((select array_agg(c.id order by (c.payload #>> '{}')::int) from pgqueue.claim(queue, 1000) c), ids, queue || ': and stand in the order of the request');
    perform pgqueue.purge_queue(queue);

    ids := array(select pgqueue.enqueue_batch(queue, array['"a"', '"b"', '"c"', '"d"']::jsonb[], delay => '1 min', headers => array['{"h": 1}', null, '{"h": 3}', null]::jsonb[],
        expires_in => '1 h', message_ids => array[name, null, null, name], delays => array['0', null, '30 s', '2 min']::interval[]));
    return next is((select array_agg(b.id) from pgqueue.browse(queue) b), ids[1:1], queue || ': a delay of a message goes before that of the batch');
    return next results_eq(
        format('select id, payload, headers, message_id, visible_at - pgqueue._now(), expires_at - pgqueue._now() from pgqueue.browse(%L, %L)', queue, 'scheduled'),
        format($q$values (%s::bigint, '"b"'::jsonb, null::jsonb, null::uuid, interval '1 min', interval '1 h'), (%s, '"c"', '{"h": 3}', null, '30 s', '1 h'), (%s, '"d"', null, %L, '2 min', '1 h')$q$,
            ids[2], ids[3], ids[4], name),
        queue || ': headers, names and delays of a batch go with their message');
    perform pg_temp.pass('3 min');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids, queue || ': a batch that was delayed in parts is delivered in the end, by id');
    perform pgqueue.purge_queue(queue);

    ids := array(select pgqueue.enqueue_batch(queue, bodies => array['\x01', '\x02']::bytea[]));
    return next is((select array_agg(b.body) from pgqueue.browse(queue) b), array['\x01', '\x02']::bytea[], queue || ': a batch of bodies is sent');
    perform pgqueue.purge_queue(queue);
    ids := array(select pgqueue.enqueue_batch(queue, array['1', null]::jsonb[], bodies => array[null, '\x02']::bytea[]));
    return next is((select array_agg((b.payload, b.body)::text) from pgqueue.browse(queue) b), array['(1,)', '(,"\\x02")'], queue || ': a batch may mix payloads and bodies');
    perform pgqueue.purge_queue(queue);

    -- All or nothing: the last of each batch is refused.
    return next throws_ok(format($q$select pgqueue.enqueue_batch(%L, array['1', null]::jsonb[])$q$, queue), '22023', null, queue || ': a null payload in a batch is refused');
    return next throws_ok(format($q$select pgqueue.enqueue_batch(%L, array['1', to_jsonb(repeat('x', 1001))])$q$, queue), 'PQ003', null, queue || ': an oversized payload in a batch is refused');
    return next throws_ok(format($q$select pgqueue.enqueue_batch(%L, bodies => array['\x00', decode(repeat('00', 1001), 'hex')])$q$, queue), 'PQ003', null, queue || ': an oversized body in a batch is refused');
    return next throws_ok(format($q$select pgqueue.enqueue_batch(%L, array['1', '2']::jsonb[], bodies => array[null, '\x00']::bytea[])$q$, queue), '22023', null, queue || ': payload and body at once in a batch are refused');
    return next throws_ok(format($q$select pgqueue.enqueue_batch(%L, array['1', '2']::jsonb[], headers => array[null, '[]']::jsonb[])$q$, queue), '22023', null, queue || ': headers that are no object in a batch are refused');
    return next throws_ok(format($q$select pgqueue.enqueue_batch(%L, array['1', '2']::jsonb[], delays => array['0', '-1 s']::interval[])$q$, queue), '22023', null, queue || ': a negative delay in a batch is refused');
    select count(*) into n from pgqueue.browse(queue);
    return next is(n + (select count(*) from pgqueue.browse(queue, 'scheduled')), 0::bigint, queue || ': a batch that is refused in part is refused as a whole');
end;
$$;
select pg_temp.enters('enqueue_shared', false);
select pg_temp.enters('enqueue_dedicated', true);

select lives_ok($$ select pgqueue.create_queue('enqueue_errors') $$, 'a queue is there for what is refused');
select throws_ok($$ select pgqueue.enqueue('enqueue_nowhere', '1') $$, 'PQ001', null, 'enqueue refuses an unknown queue');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', null) $$, '22023', null, 'enqueue refuses a null payload');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors') $$, '22023', null, 'enqueue refuses a message without content');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', body => '\x00') $$, '22023', null, 'enqueue refuses payload and body at once');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', delay => '-1 microsecond') $$, '22023', null, 'enqueue refuses a negative delay');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', delay => null) $$, '22023', null, 'enqueue refuses a null delay');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', delay => '10 years 1 s') $$, '22023', null, 'enqueue refuses a delay over 10 years');
select lives_ok($$ select pgqueue.enqueue('enqueue_errors', '1', delay => '10 years', expires_in => '10 years') $$, 'enqueue takes a delay of 10 years');
select lives_ok(format('select pgqueue.enqueue(%L, %L, delay => %L, expires_in => %3$L)', 'enqueue_errors', '1', d), 'as long as that are ' || d) from unnest(array['3650 days', '3652 days 12:00']) d;
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', delay => '3652 days 12:00:01') $$, '22023', null, 'and not a second more');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', expires_in => '-1 s') $$, '22023', null, 'enqueue refuses a negative expiry');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', expires_in => '10 years 1 s') $$, '22023', null, 'enqueue refuses an expiry over 10 years');
select throws_ok(format('select pgqueue.enqueue(%L, %L, %s => %L)', 'enqueue_errors', '1', argument, '300000 years -108000000 days 9 s'), '22023', null, argument || ' is measured, not only compared')
from unnest('{delay,expires_in}'::text[]) as argument;
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', '{1}', delays => '{300000 years -108000000 days 9 s}') $$, '22023', null, 'so are the delays of a batch');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', headers => '[1]') $$, '22023', null, 'enqueue refuses headers that are no object');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', headers => 'null') $$, '22023', null, 'enqueue refuses JSON''s null as headers');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', headers => jsonb_build_object('h', repeat('x', 65537))) $$, 'PQ003', null, 'enqueue refuses headers over 64 KB');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', to_jsonb(repeat('x', 262145))) $$, 'PQ003', null, 'enqueue refuses a payload over 256 KB');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', to_jsonb(repeat('x', 262145)), delay => '1 s') $$, 'PQ003', null, 'enqueue refuses a payload over 256 KB with a delay, too');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', body => decode(repeat('00', 262145), 'hex')) $$, 'PQ003', null, 'enqueue refuses a body over 256 KB');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_nowhere', array['1']::jsonb[]) $$, 'PQ001', null, 'enqueue_batch refuses an unknown queue');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', null) $$, '22023', null, 'enqueue_batch refuses null');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', '{}') $$, '22023', null, 'enqueue_batch refuses to send zero messages');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', array['1', '2']::jsonb[], headers => array['{}']::jsonb[]) $$, '22023', null, 'enqueue_batch refuses headers of another length');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', array['1', '2']::jsonb[], message_ids => array[gen_random_uuid()]) $$, '22023', null, 'enqueue_batch refuses message_ids of another length');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', array['1', '2']::jsonb[], bodies => array['\x00']::bytea[]) $$, '22023', null, 'enqueue_batch refuses bodies of another length');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', array['1', '2']::jsonb[], delays => array['1 s', '1 s', '1 s']::interval[]) $$, '22023', null, 'enqueue_batch refuses delays of another length');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', array['1']::jsonb[], delay => '-1 s') $$, '22023', null, 'enqueue_batch refuses a negative delay');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', array['1']::jsonb[], delay => null) $$, '22023', null, 'enqueue_batch refuses a null delay');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', array['1']::jsonb[], expires_in => '-1 s') $$, '22023', null, 'enqueue_batch refuses a negative expiry');
select is((select count(*) from pgqueue.browse('enqueue_errors')), 0::bigint, 'what was refused is not in the queue');
create temp table stored as select to_jsonb(string_agg(md5(n::text), '')) as document from generate_series(1, 7000) n;
select lives_ok($$ select pgqueue.enqueue('enqueue_errors', document) from stored $$, 'a document that comes out of a table is sent');
select is((select b.payload from pgqueue.browse('enqueue_errors') b), (select document from stored), 'and arrives as it was');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', d) from (select to_jsonb(repeat('x', 300000)) as d offset 0) s $$, 'PQ003', null, 'a document over 256 KB is refused wherever it comes from');
create temp table compressible as select to_jsonb(repeat('x', 300000)) as document;
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', document) from compressible $$, 'PQ003', null, 'and however small a table has made it');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', array[document]) from compressible $$, 'PQ003', null, 'in a batch, too');
select is((select array_agg(b.id) from pgqueue.browse('enqueue_errors', 'scheduled') b where b.visible_at < pgqueue._now() + interval '9 years'), null, 'nothing of what was refused is scheduled');
select is(pgqueue.peek('enqueue_errors'), 1, 'and one message is ready');

select * from finish();
rollback;
