begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(105);

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
        queue || ': a new message is ready at once, has no claim and has the max_attempts of its queue');
    perform pgqueue.purge_queue(queue);

    new_id := pgqueue.enqueue(queue, 'null', headers => '{"trace": "ü"}', expires_in => '1 h', message_id => name);
    select * into m from pgqueue.browse(queue);
    return next is((m.payload, m.headers, m.message_id, m.expires_at)::text, ('null'::jsonb, '{"trace": "ü"}'::jsonb, name, pgqueue._now() + interval '1 h')::text,
        queue || ': enqueue stores headers, expiry and message_id, and accepts the JSON value null as a payload');
    return next ok(pgqueue.enqueue(queue, '1', message_id => name) > new_id, queue || ': enqueue accepts a message_id that another message has');
    perform pgqueue.purge_queue(queue);
    perform pgqueue.enqueue(queue, body => '\x00ff');
    return next is((select (b.payload, b.body)::text from pgqueue.browse(queue) b), (null::jsonb, '\x00ff'::bytea)::text, queue || ': enqueue stores raw bytes as body');
    perform pgqueue.purge_queue(queue);
    perform pgqueue.enqueue(queue, body => '');
    return next is((select octet_length(b.body) from pgqueue.claim(queue) b), 0, queue || ': enqueue accepts an empty body');
    perform pgqueue.purge_queue(queue);

    new_id := pgqueue.enqueue(queue, '1', delay => '1 min', headers => '{"h": 1}', message_id => name, expires_in => '2 min');
    return next is((select (b.id, b.visible_at, b.headers, b.message_id, b.expires_at)::text from pgqueue.browse(queue, 'scheduled') b),
        (new_id, pgqueue._now() + interval '1 min', '{"h": 1}'::jsonb, name, pgqueue._now() + interval '2 min')::text, queue || ': a delayed message is scheduled for its due time, with headers, message_id and expiry');
    return next is(pgqueue.next_due_at(queue), pgqueue._now() + interval '1 min', queue || ': next_due_at returns the due time of a delayed message');
    ids := array[pgqueue.enqueue(queue, '2', delay => '30 s')];
    perform pg_temp.pass('30 s');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids, queue || ': claim returns the message with the shorter delay first, although it was sent later');
    perform pg_temp.pass('30 s');
    select * into m from pgqueue.claim(queue);
    return next is((m.id, m.headers, m.message_id, m.attempt_count)::text, (new_id, '{"h": 1}'::jsonb, name, 1)::text, queue || ': claim returns a delayed message under the id that enqueue returned');
    perform pgqueue.purge_queue(queue);

    begin
        perform pgqueue.enqueue(queue, '1');
        perform pgqueue.enqueue(queue, '1', delay => '1 s');
        raise exception 'this rolls back' using errcode = 'P0001';
    exception when raise_exception then
        null;
    end;
    perform pg_temp.pass('2 s');
    return next is((select count(*) from pgqueue.claim(queue, 10)), 0::bigint, queue || ': enqueue takes part in the transaction of the caller, so a rollback removes the message');
    ids := array[pgqueue.enqueue(queue, '1')];
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids, queue || ': claim returns a message sent after a rolled-back one');
    perform pgqueue.purge_queue(queue);

    ids := array(select pgqueue.enqueue_batch(queue, array_agg(to_jsonb(i) order by i))) from generate_series(1, 1000) i;
    return next ok((select bool_and(a < b) from unnest(ids[1:999], ids[2:1000]) as u (a, b)), queue || ': enqueue_batch returns ascending ids');
    return next is((select array_agg(c.id order by (c.payload #>> '{}')::int) from pgqueue.claim(queue, 1000) c), ids, queue || ': enqueue_batch returns ids in the order of the payloads');
    perform pgqueue.purge_queue(queue);

    ids := array(select pgqueue.enqueue_batch(queue, array['"a"', '"b"', '"c"', '"d"']::jsonb[], delay => '1 min', headers => array['{"h": 1}', null, '{"h": 3}', null]::jsonb[],
        expires_in => '1 h', message_ids => array[name, null, null, name], delays => array['0', null, '30 s', '2 min']::interval[]));
    return next is((select array_agg(b.id) from pgqueue.browse(queue) b), ids[1:1], queue || ': a delay of 0 in delays overrides the delay of the batch');
    return next results_eq(
        format('select id, payload, headers, message_id, visible_at - pgqueue._now(), expires_at - pgqueue._now() from pgqueue.browse(%L, %L)', queue, 'scheduled'),
        format($q$values (%s::bigint, '"b"'::jsonb, null::jsonb, null::uuid, interval '1 min', interval '1 h'), (%s, '"c"', '{"h": 3}', null, '30 s', '1 h'), (%s, '"d"', null, %L, '2 min', '1 h')$q$,
            ids[2], ids[3], ids[4], name),
        queue || ': each message of a batch has its own headers, message_id and delay');
    perform pg_temp.pass('3 min');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids, queue || ': claim returns the messages of a batch with different delays when all are due, in order of id');
    perform pgqueue.purge_queue(queue);

    ids := array(select pgqueue.enqueue_batch(queue, bodies => array['\x01', '\x02']::bytea[]));
    return next is((select array_agg(b.body) from pgqueue.browse(queue) b), array['\x01', '\x02']::bytea[], queue || ': enqueue_batch sends raw bodies');
    perform pgqueue.purge_queue(queue);
    ids := array(select pgqueue.enqueue_batch(queue, array['1', null]::jsonb[], bodies => array[null, '\x02']::bytea[]));
    return next is((select array_agg((b.payload, b.body)::text) from pgqueue.browse(queue) b), array['(1,)', '(,"\\x02")'], queue || ': a batch may contain both payloads and bodies');
    perform pgqueue.purge_queue(queue);

    -- A batch is all or nothing: in each of these batches only the last message is refused.
    return next throws_ok(format($q$select pgqueue.enqueue_batch(%L, array['1', null]::jsonb[])$q$, queue), '22023', null, queue || ': enqueue_batch refuses a null payload');
    return next throws_ok(format($q$select pgqueue.enqueue_batch(%L, array['1', to_jsonb(repeat('x', 1001))])$q$, queue), 'PQ003', null, queue || ': enqueue_batch refuses an oversized payload');
    return next throws_ok(format($q$select pgqueue.enqueue_batch(%L, bodies => array['\x00', decode(repeat('00', 1001), 'hex')])$q$, queue), 'PQ003', null, queue || ': enqueue_batch refuses an oversized body');
    return next throws_ok(format($q$select pgqueue.enqueue_batch(%L, array['1', '2']::jsonb[], bodies => array[null, '\x00']::bytea[])$q$, queue), '22023', null, queue || ': enqueue_batch refuses a message with both a payload and a body');
    return next throws_ok(format($q$select pgqueue.enqueue_batch(%L, array['1', '2']::jsonb[], headers => array[null, '[]']::jsonb[])$q$, queue), '22023', null, queue || ': enqueue_batch refuses headers that are not an object');
    return next throws_ok(format($q$select pgqueue.enqueue_batch(%L, array['1', '2']::jsonb[], delays => array['0', '-1 s']::interval[])$q$, queue), '22023', null, queue || ': enqueue_batch refuses a negative delay in delays');
    select count(*) into n from pgqueue.browse(queue);
    return next is(n + (select count(*) from pgqueue.browse(queue, 'scheduled')), 0::bigint, queue || ': a batch of which one message is refused sends none');
end;
$$;
select pg_temp.enters('enqueue_shared', false);
select pg_temp.enters('enqueue_dedicated', true);

select lives_ok($$ select pgqueue.create_queue('enqueue_errors') $$, 'a queue is created for calls that are refused');
select throws_ok($$ select pgqueue.enqueue('enqueue_nowhere', '1') $$, 'PQ001', null, 'enqueue refuses an unknown queue');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', null) $$, '22023', null, 'enqueue refuses a null payload');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors') $$, '22023', null, 'enqueue refuses a message without payload and body');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', body => '\x00') $$, '22023', null, 'enqueue refuses a message with both a payload and a body');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', delay => '-1 microsecond') $$, '22023', null, 'enqueue refuses a negative delay');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', delay => null) $$, '22023', null, 'enqueue refuses a null delay');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', delay => '10 years 1 s') $$, '22023', null, 'enqueue refuses a delay over 10 years');
select lives_ok($$ select pgqueue.enqueue('enqueue_errors', '1', delay => '10 years', expires_in => '10 years') $$, 'enqueue accepts a delay and an expiry of 10 years');
select lives_ok(format('select pgqueue.enqueue(%L, %L, delay => %L, expires_in => %3$L)', 'enqueue_errors', '1', d), 'enqueue accepts a delay and an expiry of ' || d) from unnest(array['3650 days', '3652 days 12:00']) d;
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', delay => '3652 days 12:00:01') $$, '22023', null, 'enqueue refuses a delay of one second over 10 years');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', expires_in => '-1 s') $$, '22023', null, 'enqueue refuses a negative expiry');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', expires_in => '10 years 1 s') $$, '22023', null, 'enqueue refuses an expiry over 10 years');
select throws_ok(format('select pgqueue.enqueue(%L, %L, %s => %L)', 'enqueue_errors', '1', argument, '300000 years -108000000 days 9 s'), '22023', null, argument || ' is refused if it compares like 9 seconds but spans thousands of years')
from unnest('{delay,expires_in}'::text[]) as argument;
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', '{1}', delays => '{300000 years -108000000 days 9 s}') $$, '22023', null, 'enqueue_batch refuses delays that compare like 9 seconds but span thousands of years');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', headers => '[1]') $$, '22023', null, 'enqueue refuses headers that are not an object');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', headers => 'null') $$, '22023', null, 'enqueue refuses the JSON value null as headers');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', '1', headers => jsonb_build_object('h', repeat('x', 65537))) $$, 'PQ003', null, 'enqueue refuses headers over 64 KB');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', to_jsonb(repeat('x', 262145))) $$, 'PQ003', null, 'enqueue refuses a payload over 256 KB');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', to_jsonb(repeat('x', 262145)), delay => '1 s') $$, 'PQ003', null, 'enqueue refuses a delayed message with a payload over 256 KB');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', body => decode(repeat('00', 262145), 'hex')) $$, 'PQ003', null, 'enqueue refuses a body over 256 KB');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_nowhere', array['1']::jsonb[]) $$, 'PQ001', null, 'enqueue_batch refuses an unknown queue');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', null) $$, '22023', null, 'enqueue_batch refuses null payloads');
select is_empty($$ select pgqueue.enqueue_batch('enqueue_errors', '{}', headers => '{}', delays => '{}', group_keys => '{}') $$, 'enqueue_batch sends nothing if its arrays are empty');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', '{}', bodies => array['\x00']::bytea[]) $$, '22023', 'invalid bodies: ''1 element''', 'enqueue_batch refuses bodies beside empty payloads');
create temp table refused (arguments text, message text);
insert into refused values
('array[''1'', ''2'', null]::jsonb[]', 'invalid payloads[3]: null'),
('array[''1'', to_jsonb(repeat(''é'', 3000000))]', 'payloads[2] of 6000002 bytes is over the limit of 262144 bytes of queue ''enqueue_errors'''),
('bodies => array[''\x00'', decode(repeat(''00'', 262145), ''hex'')]', 'bodies[2] of 262145 bytes is over the limit of 262144 bytes of queue ''enqueue_errors'''),
('array[''1'', ''2'']::jsonb[], bodies => array[null, ''\x00'']::bytea[]', 'invalid payloads[2]: ''2'''),
('array[''1'', ''2'']::jsonb[], headers => array[null, ''[]'']::jsonb[]', 'invalid headers[2]: ''[]'''),
('array[''1'', ''2'']::jsonb[], headers => array[null, jsonb_build_object(''k'', repeat(''x'', 65530))]', 'headers[2] of 65539 bytes is over the limit of 65536 bytes of queue ''enqueue_errors'''),
('array[''1'', ''2'']::jsonb[], delays => array[''0'', ''-1 s'']::interval[]', 'invalid delays[2]: ''-00:00:01'''),
('array[''1'', ''2'']::jsonb[], dedup_keys => array[null, '''']', 'invalid dedup_keys[2]: '''''),
('array[''1'', ''2'']::jsonb[], group_keys => array[null, '''']', 'invalid group_keys[2]: '''''),
('array[''1'', ''2'']::jsonb[], priorities => array[0, 10]', 'invalid priorities[2]: ''10'''),
('array[null]::jsonb[]', 'invalid payload: null');
select throws_ok(format('select pgqueue.enqueue_batch(''enqueue_errors'', %s)', r.arguments), null, r.message, 'the refusal is ' || r.message) from refused r;
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', array['1', '2']::jsonb[], headers => array['{}']::jsonb[]) $$, '22023', 'invalid headers: ''1 element''', 'enqueue_batch refuses headers of another length');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', array['1', '2']::jsonb[], message_ids => array[gen_random_uuid()]) $$, '22023', null, 'enqueue_batch refuses message_ids of another length');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', array['1', '2']::jsonb[], bodies => array['\x00']::bytea[]) $$, '22023', null, 'enqueue_batch refuses bodies of another length');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', array['1', '2']::jsonb[], delays => array['1 s', '1 s', '1 s']::interval[]) $$, '22023', null, 'enqueue_batch refuses delays of another length');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', array['1']::jsonb[], delay => '-1 s') $$, '22023', null, 'enqueue_batch refuses a negative delay');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', array['1']::jsonb[], delay => null) $$, '22023', null, 'enqueue_batch refuses a null delay');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', array['1']::jsonb[], expires_in => '-1 s') $$, '22023', null, 'enqueue_batch refuses a negative expiry');
select is((select count(*) from pgqueue.browse('enqueue_errors')), 0::bigint, 'refused calls leave no message in the queue');
create temp table stored as select to_jsonb(string_agg(md5(n::text), '')) as document from generate_series(1, 7000) n;
select lives_ok($$ select pgqueue.enqueue('enqueue_errors', document) from stored $$, 'enqueue accepts a document that is stored in a table');
select is((select b.payload from pgqueue.browse('enqueue_errors') b), (select document from stored), 'a payload that came from a table arrives unchanged');
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', d) from (select to_jsonb(repeat('x', 300000)) as d offset 0) s $$, 'PQ003', null, 'enqueue refuses a document over 256 KB that a query computes');
create temp table compressible as select to_jsonb(repeat('x', 300000)) as document;
select throws_ok($$ select pgqueue.enqueue('enqueue_errors', document) from compressible $$, 'PQ003', null, 'enqueue refuses a document over 256 KB although its compressed form in a table is smaller');
select throws_ok($$ select pgqueue.enqueue_batch('enqueue_errors', array[document]) from compressible $$, 'PQ003', null, 'enqueue_batch refuses a document over 256 KB although its compressed form in a table is smaller');
select is((select array_agg(b.id) from pgqueue.browse('enqueue_errors', 'scheduled') b where b.visible_at < pgqueue._now() + interval '9 years'), null, 'refused calls leave no scheduled message');
select is(pgqueue.peek('enqueue_errors'), 1, 'only the one accepted message is ready');

select * from finish();
rollback;
