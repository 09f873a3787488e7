begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(101);

-- Queue names.
create temp table names (name text, is_good boolean);
insert into names values
('a', true), ('0', true), ('-', true), ('_', true), ('--', true), ('a-b_c-0', true),
(repeat('n', 54), true), (repeat('n', 55), true), (repeat('n', 62) || '_', true), (repeat('n', 63), true), (repeat('n', 64), true), (repeat('n', 63) || 'x', true), (repeat('n', 128), true),
('', false), (repeat('n', 129), false), ('Hostile', false), ('a b', false), (' ', false), ('a.b', false), ('ü', false), ('📬', false), ('o''clock', false), ('a"b', false),
('a;drop', false), ('''; drop schema pgqueue cascade; --', false), ('a' || chr(10), false), (chr(10) || 'a', false), (E'a\nb', false), ('a$b', false), ('$$', false), ('a%s', false), ('a\b', false), ('١', false);

create function pg_temp.works(queue text, has_table boolean) returns boolean language plpgsql as $$
declare
    ids bigint[];
    m pgqueue.message;
begin
    perform pgqueue.create_queue(queue, dedicated => has_table);
    ids := array[pgqueue.enqueue(queue, '1'), pgqueue.enqueue(queue, '2', '1 h')];
    perform pgqueue.prepare_wait(queue, '1 min');
    perform pgqueue.enqueue(queue, '3');
    perform pgqueue.wake(queue);
    select * into m from pgqueue.claim(queue);
    return m.id = ids[1] and m.queue_name = queue and pgqueue.ack(queue, m.id, m.claim_token)
        and (pgqueue.get_queue(queue)).name = queue and pgqueue.drop_queue(queue) = 1 and pgqueue.purge_dead_messages(queue) = 1;
end;
$$;
select ok(pg_temp.works('hostile_' || n.name, t.has_table), format('a queue named hostile_%s (%s characters) works, %s', left(n.name, 20), length('hostile_' || n.name), case when t.has_table then 'dedicated' else 'shared' end))
from names n cross join unnest(array[false, true]) as t (has_table)
where n.is_good and length(n.name) < 120 order by length(n.name), n.name, t.has_table;
select ok(pg_temp.works(repeat('h', 128), has_table), format('a queue named with 128 characters works, %s', case when has_table then 'dedicated' else 'shared' end))
from unnest(array[false, true]) as t (has_table);
select ok(pg_temp.works(name, false), format('create_queue accepts the name %s', name)) from unnest(array['--', '-', '_', '0-0']) name
where not exists (select from pgqueue.queues q where q.name = name);
select throws_ok(format('select pgqueue.create_queue(%L)', n.name), '22023', null, format('create_queue refuses the name %s', to_json(left(n.name, 30))))
from names n where not n.is_good;
select is((select count(*) from pgqueue.queues q join names n on n.name = q.name and not n.is_good), 0::bigint, 'no queue has a refused name');
select throws_ok(format('insert into pgqueue.queues (name, fresh_from_id, sweep_resume_id, next_sweep_at, first_due_at, waiting_until) select %L, r, r, r, r, r from (select %L::regclass as r) s', 'Hostile', 'pgqueue.queue_id'),
    '23514', null, 'the table queues refuses an invalid name');

-- Long names that differ only in their last character.
select lives_ok(format('select pgqueue.create_queue(%L, dedicated => true)', repeat('l', 127) || e), format('create_queue accepts a name of 127 equal letters that ends in %s', e)) from unnest(array['a', 'b']) e;
select ok(pgqueue.enqueue(repeat('l', 127) || 'a', '1') > 0, 'a message is sent to the first of the two queues');
select is((select count(*) from pgqueue.claim(repeat('l', 127) || 'b')), 0::bigint, 'the second queue does not contain the message');
select is(pgqueue.drop_queue(repeat('l', 127) || 'b'), 0::bigint, 'drop_queue of the second queue deletes no message');
select is((select count(*) from pgqueue.claim(repeat('l', 127) || 'a')), 1::bigint, 'the first queue still has its message after the second was dropped');

-- Arguments that close a string literal and begin another statement.
select throws_ok(format('select pgqueue.%s(%L)', f, $n$x'; drop schema pgqueue cascade; --$n$), 'PQ001', null, format('%s treats an injection as the name of an unknown queue', f))
from unnest(array['drop_queue', 'purge_queue', 'claim', 'receive', 'peek', 'stats', 'browse', 'redrive', 'purge_expired', 'wake', 'next_due_at', 'pause_queue']) f;

-- Payloads.
select lives_ok($$ select pgqueue.create_queue('hostile') $$, 'a queue for hostile payloads is created');
create temp table payloads (n int generated always as identity, document jsonb);
insert into payloads (document) values
('{}'), ('[]'), ('""'), ('null'), ('0'), ('-1e-100'), ('12345678901234567890123456789.123456789'), ('"''; drop schema pgqueue cascade; --"'), ('{"\"q\"": "it''s; $$ %s \\ \t\n"}'),
('"📬🤷🏽‍♀️ ünïcödé \u00ff \ud83d\ude00"'), ('"\\u0000"'), (jsonb_build_object(repeat('k', 10000), repeat('v', 10000)));
select is(
    (select array_agg(c.payload order by c.id) from (select array(select pgqueue.enqueue_batch('hostile', (select array_agg(p.document order by p.n) from payloads p))) offset 0) s, pgqueue.claim('hostile', 100) c where s is not null),
    (select array_agg(p.document order by p.n) from payloads p), 'claim returns quotes, backslashes, emoji and long numbers in payloads unchanged');
select is(
    (select array_agg(pgqueue.enqueue('hostile', p.document, headers => jsonb_build_object('h', p.document)) is not null) from payloads p), array_fill(true, array[12]), 'enqueue accepts quotes, backslashes, emoji and long numbers in headers');
select is((select array_agg(c.headers -> 'h' order by c.id) from pgqueue.claim('hostile', 100) c), (select array_agg(p.document order by p.n) from payloads p), 'claim returns quotes, backslashes, emoji and long numbers in headers unchanged');
select throws_ok($$ select pgqueue.enqueue('hostile', '{"a": "\u0000"}') $$, '22P05', null, 'enqueue refuses JSON with the escape of the null character with the error of PostgreSQL');
select throws_ok($$ select pgqueue.enqueue('hostile', '{"a": ') $$, '22P02', null, 'enqueue refuses text that is not JSON');
select lives_ok($$ select pgqueue.enqueue('hostile', body => '\x00275c3b00') $$, 'enqueue accepts a body with null bytes, quotes and backslashes');
select is((select c.body from pgqueue.claim('hostile') c), '\x00275c3b00', 'claim returns a body with null bytes, quotes and backslashes unchanged');
create function pg_temp.keeps_words() returns setof text language plpgsql as $function$
declare
    words constant text := $w$it's "quoted"; \ $$ %s 📬
next line$w$;
    m pgqueue.message;
begin
    perform pgqueue.enqueue('hostile', '1');
    select * into m from pgqueue.claim('hostile', claimed_by => words);
    return next is(m.claimed_by, words, 'claimed_by may be any text');
    perform pgqueue.nack('hostile', m.id, m.claim_token, '0', words);
    select * into m from pgqueue.claim('hostile');
    return next is(m.last_error, words, 'last_error may be any text');
    perform pgqueue.ack('hostile', m.id, m.claim_token);
end;
$function$;
select pg_temp.keeps_words();

-- Sizes. The size of a document is the size of its text as jsonb prints it.
select lives_ok($$ select pgqueue.enqueue('hostile', body => decode(repeat('00', 262144), 'hex')) $$, 'enqueue accepts a body of 262,144 bytes');
select throws_ok($$ select pgqueue.enqueue('hostile', body => decode(repeat('00', 262145), 'hex')) $$, 'PQ003', null, 'enqueue refuses a body of 262,145 bytes');
select is(octet_length(to_jsonb(repeat('x', 262142))::text), 262144, 'a string of 262,142 characters is a document of 262,144 bytes');
select lives_ok($$ select pgqueue.enqueue('hostile', to_jsonb(repeat('x', 262142))) $$, 'enqueue accepts a document of 262,144 bytes');
select throws_ok($$ select pgqueue.enqueue('hostile', to_jsonb(repeat('x', 262143))) $$, 'PQ003', null, 'enqueue refuses a document of 262,145 bytes');
select throws_ok($$ select pgqueue.enqueue_batch('hostile', array[to_jsonb(repeat('x', 262143))]) $$, 'PQ003', null, 'enqueue_batch refuses a document of 262,145 bytes');
select throws_ok($$ select pgqueue.enqueue('hostile', to_jsonb(repeat('é', 131072))) $$, 'PQ003', null, 'the size of a document is counted in bytes, not in characters');
select throws_ok($$ select pgqueue.enqueue('hostile', '[1e131071, 1e131071]') $$, 'PQ003', null, 'the size of a number is counted in digits, not in the bytes of its binary form');
select throws_ok($$ select pgqueue.enqueue('hostile', '1', headers => '{"n": 1e131071}') $$, 'PQ003', null, 'the size of a number in headers is counted in digits');
select throws_ok($$ select pgqueue.enqueue_batch('hostile', array['1', '[1e131071, 1e131071]']::jsonb[]) $$, 'PQ003', null, 'enqueue_batch counts the size of a number in digits');
select lives_ok($$ select pgqueue.alter_queue('hostile', max_payload_bytes => 262145) $$, 'alter_queue raises max_payload_bytes to 262,145');
select lives_ok($$ select pgqueue.enqueue('hostile', to_jsonb(repeat('x', 262143))) $$, 'enqueue accepts a document of 262,145 bytes after max_payload_bytes was raised');

-- Headers.
select throws_ok(format('select pgqueue.enqueue(%L, %L, headers => %L)', 'hostile', 1, h), '22023', null, format('enqueue refuses the headers %s', h))
from unnest(array['[]', '"text"', '1', 'true', 'null']) h;
select has_schema('pgqueue'::name, 'the schema pgqueue still exists after all injections');

-- Settings of the calling session.
set local standard_conforming_strings = off;
set local escape_string_warning = off;
select pgqueue.create_queue('hostile-setting', backoff_base => '0') as made, pgqueue.expose_transport('hostile-setting') as exposed \gset
select lives_ok($$ select pgqueue.enqueue('hostile-setting', '1', headers => jsonb_build_object('🐘', 'a/b')) $$, 'enqueue accepts headers in a session with standard_conforming_strings off');
select is((select m.transport_headers from pgqueue.messages m where m.queue_name = 'hostile-setting'), '{"🐘": "a/b"}', 'the stored transport headers are the same with standard_conforming_strings off');
select pgqueue.purge_queue('hostile-setting') as purged \gset
insert into public."hostile-setting" (headers, body) values (e'{"a":"\\u00e4"}', 'x'), ('{}', 'y'), (e'\t', 'z');
select results_eq('select c.headers from pgqueue.claim(''hostile-setting'', 10) c', $$ values ('{"a": "ä"}'::jsonb), ('{}'), (null) $$, 'claim returns headers written through a relation unchanged with standard_conforming_strings off');
reset standard_conforming_strings;

select * from finish();
rollback;
