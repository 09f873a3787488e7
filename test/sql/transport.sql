begin;
-- The lock makes test files wait for each other: this file attaches tables.
lock table pgqueue.messages in access exclusive mode;
select plan(172);

-- The statements of the transport, on the relation of a queue.
create function pg_temp.relation(queue text) returns text language sql as $$ select t.relation::text from pgqueue.transports t where t.queue_name = queue $$;
create function pg_temp.send(queue text, headers text, body bytea, id uuid default gen_random_uuid(), ttbr bigint default null) returns uuid language plpgsql as $$
begin
    execute format('insert into %s (Id, Expires, Headers, Body) values ($1, now() at time zone ''UTC'' + $2 * interval ''1 ms'', $3, $4)', pg_temp.relation(queue)) using id, ttbr, headers, body;
    return id;
end $$;
create function pg_temp.take(queue text, out id uuid, out expired int, out headers text, out body bytea) language plpgsql as $$
begin
    execute format('delete from %1$s rs where rs.Id = (select Id from %1$s order by Seq limit 1 for update skip locked)
        returning Id, case when Expires is null then 0 when Expires > now() at time zone ''UTC'' then 0 else 1 end, Headers, Body', pg_temp.relation(queue)) into id, expired, headers, body;
end $$;
create function pg_temp.estimate(queue text) returns int language plpgsql as $$
declare
    n int;
begin
    execute format('select coalesce(cast((select Seq from %1$s order by Seq desc limit 1 for update skip locked) - (select Seq from %1$s order by Seq limit 1 for update skip locked) + 1 as int), 0)', pg_temp.relation(queue)) into n;
    return n;
end $$;
-- The relation maintains itself once a second. After this update it does so at the next read.
create function pg_temp.hurry(queue text) returns void language sql as $$ update pgqueue.transports set next_at = '-infinity' where queue_name = queue $$;

-- Creating relations.
select pgqueue.create_queue('transport') is not null as made \gset
select is(pgqueue.expose_transport('transport'), '"public"."transport"', 'expose_transport returns the address of the relation');
select columns_are('public', 'transport', array['id', 'expires', 'headers', 'body', 'seq'], 'the relation has the columns of the transport');
select col_type_is('public', 'transport', c::name, t, format('%s is of type %s', c, t)) from (values ('id', 'uuid'), ('expires', 'timestamp without time zone'), ('headers', 'text'), ('body', 'bytea'), ('seq', 'bigint')) v (c, t);
select is((select q.dedicated from pgqueue.get_queue('transport') q), true, 'expose_transport makes the queue dedicated');
select is_empty($$ select a.grantee from pg_class c, aclexplode(c.relacl) a where c.oid = 'public.transport'::regclass and a.grantee = 0 $$, 'PUBLIC has no right on the relation');
select is(pg_temp.estimate('transport'), 0, 'the estimate of an empty relation is 0');
select is((pg_temp.take('transport')).id, null, 'receiving from an empty relation returns no message');
select pgqueue.create_queue('transport-text', dedicated => true) is not null as made \gset
select is(pgqueue.expose_transport('transport-text', body_string => true), '"public"."transport-text"', 'expose_transport adds a column with the body as text');
select columns_are('public', 'transport-text', array['id', 'expires', 'headers', 'body', 'bodystring', 'seq'], 'the relation has the column bodystring if it is requested');

-- From a transport to pgqueue.
select pg_temp.send('transport', E'{"NServiceBus.CorrelationId":"c 1", "NServiceBus.ReplyToAddress":"\\"dbo\\".\\"Replies\\"","z":null,"a":"\\/größe 🐘"}', '\x00ff', '11111111-1111-4111-8111-111111111111', 3600000) as sent \gset
select results_eq($$ select c.body, c.headers, c.message_id, c.expires_at - c.enqueued_at between '50 min' and '1 h' from pgqueue.claim('transport') c $$,
    $$ values ('\x00ff'::bytea, '{"NServiceBus.CorrelationId": "c 1", "NServiceBus.ReplyToAddress": "\"dbo\".\"Replies\"", "z": null, "a": "/größe 🐘"}'::jsonb, '11111111-1111-4111-8111-111111111111'::uuid, true) $$,
    'claim returns body, headers, id and expiry that the transport sent');
select is(pg_temp.estimate('transport'), 0, 'the relation does not show a claimed message');
select is((select pgqueue.nack('transport', m.id, m.claim_token, '0', 'failed', '{"pgqueue.attempts": 1}') from pgqueue.messages m where m.queue_name = 'transport'), true, 'nack succeeds for a message that the transport sent');
select pg_temp.hurry('transport'), pg_temp.estimate('transport') as looked \gset
select is(pg_temp.estimate('transport'), 1, 'the relation shows a message again after nack');
select results_eq('select headers, body, expired from pg_temp.take(''transport'')',
    $$ values (E'{"NServiceBus.CorrelationId":"c 1", "NServiceBus.ReplyToAddress":"\\"dbo\\".\\"Replies\\"","z":null,"a":"\\/größe 🐘"}', '\x00ff'::bytea, 0) $$, 'the relation shows the headers of the transport byte for byte, whatever headers nack added');

-- The planner reads a small table in sequence. An empty table has no row for which a condition is evaluated.
select pgqueue.create_queue('transport-small', dedicated => true) is not null as made \gset
select pgqueue.expose_transport('transport-small') as exposed \gset
select pgqueue.enqueue('transport-small', '1') as sent \gset
select pgqueue.reject('transport-small', c.id, c.claim_token) as rejected from pgqueue.claim('transport-small') c \gset
analyze pgqueue.messages;
select pgqueue.redrive('transport-small') as redriven \gset
select pg_temp.hurry('transport-small'), (select count(*) from public."transport-small") as looked \gset
select is((select count(*) from public."transport-small"), 1::bigint, 'the relation shows a due message although its table was analyzed while empty');
-- The clock was ahead by a day and is then corrected.
delete from public."transport-small";
update pgqueue.transports set next_at = clock_timestamp() + interval '1 day' where queue_name = 'transport-small';
select pgqueue.enqueue('transport-small', '2', delay => '1 us') as sent \gset
select count(*) as looked from public."transport-small" \gset
select is((select count(*) from public."transport-small"), 1::bigint, 'reading a relation shows due messages although next_at is a day ahead');
delete from public."transport-small";
update pgqueue.transports set next_at = clock_timestamp() + interval '1 day' where queue_name = 'transport-small';
select pgqueue.enqueue('transport-small', '3', delay => '1 us') as sent \gset
delete from public."transport-small";
select is((select count(*) from pgqueue.messages m where m.queue_name = 'transport-small'), 1::bigint, 'receiving from a relation moves due messages although next_at is a day ahead');
select count(*) > 0 as noted from pgqueue.requeued_messages r where r.queue_name = 'transport-small' \gset
select ok(:'noted', 'a due message is recorded in requeued_messages, where claims find it');
delete from public."transport-small";
select pg_temp.hurry('transport-small') as hurried \gset
select count(*) as looked from public."transport-small" \gset
select is((select count(*) from pgqueue.requeued_messages r where r.queue_name = 'transport-small'), 0::bigint, 'the record in requeued_messages is deleted after the message was received, without any claim');
select pgqueue.drop_queue('transport-small') as dropped \gset

-- From pgqueue to a transport: the wire format of headers.
create temp table wire (headers jsonb, expected text);
insert into wire values
('{}', '{}'), ('{"a": null}', '{"a": null}'), ('{"a/b": "c\"d"}', '{"a/b": "c\"d"}'), ('{"🐘": "日本"}', '{"🐘": "日本"}'),
('{"n": 1, "o": {"x": [true]}}', '{"n": "1", "o": "{\"x\": [true]}"}'), ('["no", "object"]', '{}'), (null, '{}');
select is(pgqueue._wire_headers(w.headers, null), w.expected, format('the wire format of the headers %s is %s', w.headers, w.expected)) from wire w;
select pgqueue.enqueue('transport', '{"n": 1}', headers => '{"k": "v"}', message_id => '22222222-2222-4222-8222-222222222222') as sent \gset
select results_eq('select id, headers, body, expired from pg_temp.take(''transport'')',
    format($$ values (%L::uuid, '{"k": "v", "NServiceBus.MessageId": "22222222-2222-4222-8222-222222222222"}', '{"n": 1}'::bytea, 0) $$, pgqueue._transport_id(:sent)),
    'a transport receives the payload as JSON text, the headers and the message_id that pgqueue sent');
select pgqueue.enqueue('transport', body => '\xfffe00') as sent \gset
select is((pg_temp.take('transport')).body, '\xfffe00'::bytea, 'a transport receives a body as the bytes that pgqueue sent');

-- A transport sends a message under the id of another message that is to be delivered again.
select pgqueue.enqueue('transport', '"back"') as back \gset
select is((select pgqueue.nack('transport', c.id, c.claim_token, '0') from pgqueue.claim('transport') c), true, 'nack succeeds for a message whose id a transport will reuse');
insert into public.transport (id, headers, body) values (pgqueue._transport_id(:back), '{}', 'stranger');
select is((select array_agg(convert_from(coalesce(c.body, convert_to(c.payload::text, 'UTF8')), 'UTF8') order by c.id) from pgqueue.claim('transport', 10) c), '{"\"back\"",stranger}', 'claim returns both the returned message and the message that a transport sent under its id');
select is((select array_agg(c.message_id) from pgqueue.messages c where c.queue_name = 'transport' and c.id > :back), array[pgqueue._transport_id(:back)], 'the message of the transport keeps its id as message_id');
select pgqueue.purge_queue('transport') as purged \gset
select is(pgqueue.publish('transport.nobody', '1'), 0, 'publish sends nothing before the queue subscribes');
select is(pgqueue.subscribe('transport.*', 'transport'), true, 'an exposed queue can subscribe to a topic');
select is(pgqueue.publish('transport.made', '1'), 1, 'publish sends a copy to an exposed queue');
select is((pg_temp.take('transport')).headers, '{"pgqueue.topic": "transport.made"}', 'a transport receives the topic of a published message as a header');

-- Messages whose headers cannot be read, and null bodies.
create temp table corrupt (headers text, body bytea, read jsonb, shown text);
insert into corrupt (headers, body) values ('no json', 'a'), ('{"a":', 'a'), ('[]', 'a'), ('"x"', 'a'), ('{}', null), ('null', null), (' null ', 'a'), (repeat('[', 60000), 'a'), ('{"a":"\x"}', 'a');
update corrupt set read = case when headers = '{}' then '{}' when headers !~ 'null' then to_jsonb(headers) end, shown = case when headers ~ 'null' then '{}' else headers end;
select is((select count(*) from (select pg_temp.send('transport', c.headers, c.body) from corrupt c) s), 9::bigint, 'the relation accepts headers that cannot be read, and null bodies');
select pg_temp.send('transport', '{"behind":"it"}', 'b') as sent \gset
select set_eq($$ select t.headers, t.body from public.transport t where t.headers <> '{"behind":"it"}' $$, $$ select c.shown, coalesce(c.body, '') from corrupt c $$, 'the relation shows unreadable headers unchanged, except JSON null, and a null body as an empty one');
select is((pg_temp.take('transport')).headers, 'no json', 'a transport receives a message whose headers it cannot read');
select pg_temp.send('transport', 'no json', 'a') as sent \gset
select set_eq($$ select c.headers, c.body from pgqueue.claim('transport', 20) c where c.headers is distinct from '{"behind": "it"}' $$, $$ select c.read, coalesce(c.body, '') from corrupt c $$, 'claim returns unreadable headers as a JSON string of their text, and JSON null as no headers');
select is_empty($$ select from pgqueue.dead_messages d where d.queue_name = 'transport' $$, 'a message with unreadable headers is not a dead letter before a consumer rejects it');
select count(pgqueue.reject('transport', m.id, m.claim_token, headers => '{"pgqueue.attempts": 1}')) as rejected from pgqueue.messages m where m.queue_name = 'transport' and m.headers is distinct from '{"behind": "it"}' \gset
select pgqueue.purge_queue('transport') as purged \gset
select set_eq($$ select d.transport_headers, d.body from pgqueue.dead_messages d where d.queue_name = 'transport' $$, $$ select c.shown, coalesce(c.body, '') from corrupt c $$, 'rejected messages become dead letters with unchanged headers and body');
select is(pgqueue.redrive('transport', 100), 9, 'redrive sends messages with unreadable headers back');
select pg_temp.hurry('transport'), pg_temp.estimate('transport') as looked \gset
select set_eq($$ select t.headers, t.body from public.transport t $$, $$ select c.shown, coalesce(c.body, '') from corrupt c $$, 'the relation shows redriven messages with unchanged headers and body');
delete from public.transport;

-- The constraints of the table of the transport.
select throws_ok($$ insert into public.transport (id, headers, body) values (null, '{}', 'x') $$, '23502', 'null value in column "id" of relation "transport" violates not-null constraint', 'the relation refuses an id that is null');
select throws_ok($$ insert into public.transport (id, headers, body) values (gen_random_uuid(), null, 'x') $$, '23502', 'null value in column "headers" of relation "transport" violates not-null constraint', 'the relation refuses headers that are null');
select throws_ok($$ insert into public.transport (body) values ('x') $$, '23502', null, 'the relation refuses an insert without headers');
create temp table inserted (id uuid, seq bigint);
with i as (insert into public.transport (headers) values ('{}') returning id, seq) insert into inserted select i.* from i;
select results_eq('select t.id, t.seq from public.transport t', 'select i.id, i.seq from inserted i', 'an insert without id creates one, and returns id and seq');
delete from public.transport;

-- Statements that fail on a view, and that no endpoint makes.
select throws_ok($$ truncate public.transport $$, '42809', null, 'the relation cannot be truncated');
select throws_ok($$ create index on public.transport (expires) $$, '42809', null, 'the relation cannot have an index');
select throws_ok($$ alter table public.transport add bodystring text $$, '42809', null, 'no column can be added to the relation');
select throws_ok($$ insert into public.transport (id, headers) values (gen_random_uuid(), '{}') on conflict (id) do nothing $$, '42P10', null, 'an insert into the relation cannot name a conflict');
select throws_ok($$ update public.transport set body = 'x' $$, '0A000', null, 'the body of a message cannot be updated through the relation');
select throws_ok($$ update public.transport set expires = null $$, '0A000', null, 'the expiry of a message cannot be updated through the relation');
set local session_replication_role = replica;
insert into public.transport (headers, body) values ('{"replica": "sends"}', 'x');
reset session_replication_role;
select is_empty($$ select from public.transport where headers like '%replica%' $$, 'an insert while session_replication_role is replica sends nothing');

-- Sizes.
select lives_ok($$ select pg_temp.send('transport', repeat('h', 262144), 'x') $$, 'the relation accepts headers of the size of max_payload_bytes');
select throws_ok($$ select pg_temp.send('transport', repeat('h', 262145), 'x') $$, 'PQ003', 'column headers of 262145 bytes is over the limit of 262144 bytes of queue ''transport''', 'the relation refuses headers over max_payload_bytes');
select throws_ok($$ select pg_temp.send('transport', '{}', convert_to(repeat('b', 262145), 'UTF8')) $$, 'PQ003', null, 'the relation refuses a body over max_payload_bytes');
select pgqueue.alter_queue('transport', max_payload_bytes => 300000) is not null as altered \gset
select lives_ok($$ select pg_temp.send('transport', repeat('h', 300000), convert_to(repeat('b', 300000), 'UTF8')) $$, 'the relation accepts larger headers and bodies after max_payload_bytes was raised');
select pgqueue.alter_queue('transport', max_payload_bytes => 100) is not null as altered \gset
select lives_ok($$ select pg_temp.send('transport', repeat('h', 65536), 'x') $$, 'the relation accepts headers of 64 KB whatever max_payload_bytes is');
select throws_ok($$ select pg_temp.send('transport', repeat('h', 65537), 'x') $$, 'PQ003', null, 'the relation refuses headers over 64 KB if max_payload_bytes is smaller');
select pgqueue.alter_queue('transport', max_payload_bytes => 262144) is not null as altered \gset
delete from public.transport;

-- Unusual headers.
create temp table odd (wire text, headers jsonb);
insert into odd values ('', null), ('  ', null), ('{"a":"\u0000"}', '"{\"a\":\"\\u0000\"}"'), ('{"a":"\ud83d\udc18"}', '{"a": "🐘"}'), ('{"a":1,"a":2}', '{"a": 2}');
select pg_temp.send('transport', o.wire, 'x'::bytea) as sent from odd o \g /dev/null
select set_eq($$ select t.headers from public.transport t $$, $$ select o.wire from odd o $$, 'the relation shows unusual headers unchanged');
select set_eq($$ select c.headers from pgqueue.claim('transport', 10) c $$, $$ select o.headers from odd o $$, 'claim returns unusual headers, as a JSON string if jsonb cannot represent them');
select pgqueue.purge_queue('transport') as purged \gset

-- Bodies as readable text.
create temp table bodies (body bytea, expected text);
insert into bodies values ('', ''), ('plain', 'plain'), (convert_to('ö', 'UTF8'), '\303\266'), ('\x00', '\000');
select count(pg_temp.send('transport-text', '{}', b.body)) as sent from bodies b \gset
select set_eq($$ select t.body, t.bodystring from public."transport-text" t $$, $$ select * from bodies $$, 'bodystring shows a body as text with escaped bytes');
delete from public."transport-text";

-- Order, estimate and expiry.
select count(pg_temp.send('transport', format('{"n":"%s"}', n), 'x')) as sent from generate_series(1, 5) n \gset
select is(pg_temp.estimate('transport'), 5, 'the estimate is the difference of the highest and the lowest seq, plus one');
delete from public.transport where headers = '{"n":"3"}';
select is(pg_temp.estimate('transport'), 5, 'the estimate includes gaps in seq');
select is(array[(pg_temp.take('transport')).headers, (pg_temp.take('transport')).headers, (pg_temp.take('transport')).headers, (pg_temp.take('transport')).headers], array['{"n":"1"}', '{"n":"2"}', '{"n":"4"}', '{"n":"5"}'], 'messages are received in order of seq');
select setval(t.seq_register, 2147483647) as seq from pgqueue.transports t where t.queue_name = 'transport' \gset
select count(pg_temp.send('transport', format('{"n":"%s"}', n), 'x')) as sent from generate_series(1, 3) n \gset
select is(pg_temp.estimate('transport'), 3, 'the estimate is correct for a seq of more than 31 bits');
select is((pg_temp.take('transport')).headers, '{"n":"1"}', 'a message with a seq of more than 31 bits can be received');
select pgqueue.purge_queue('transport') as purged \gset
select setval('pgqueue.message_id', greatest(pg_sequence_last_value('pgqueue.message_id'), 5000000000)) as id \gset
select pg_temp.send('transport', '{}', 'x') as sent \gset
select setval('pgqueue.message_id', pg_sequence_last_value('pgqueue.message_id') + 5000000000) as id \gset
select pg_temp.send('transport', '{}', 'x') as sent \gset
select is(pg_temp.estimate('transport'), 2, 'gaps in the message ids of all queues do not change the estimate');
select pgqueue.purge_queue('transport') as purged \gset
select pg_temp.send('transport', '{"n":"expired"}', 'x', ttbr => -60000), pg_temp.send('transport', '{"NServiceBus.TimeToBeReceived":"00:00:00.001"}', 'x'), pg_temp.send('transport', '{"n":"long"}', 'x', ttbr => 2592000000) \g /dev/null
select results_eq($$ select t.expires is null, t.expires > now() at time zone 'UTC' + interval '29 days' from public.transport t order by t.seq $$, $$ values (false, false), (true, null), (false, true) $$, 'the column expires holds the expiry, a header does not, and 30 days are accepted');
select is(pg_temp.estimate('transport'), 3, 'the estimate includes expired messages');
select is((select t.expired from pg_temp.take('transport') t), 1, 'an expired message is received and marked as expired');
select is((select t.expired from pg_temp.take('transport') t), 0, 'a message that has not expired is received without that mark');
select pg_temp.send('transport', '{"n":"expired"}', 'x', ttbr => -60000) as sent from generate_series(1, 3) \g /dev/null
delete from public.transport where seq in (select t.seq from public.transport t where t.expires < now() at time zone 'UTC' order by t.seq limit 2 for update skip locked);
select is((select count(*) from public.transport t), 2::bigint, 'a transport can delete a batch of expired messages');
select is(pgqueue.purge_expired('transport'), 1, 'purge_expired deletes the remaining expired message');
select is((select t.headers from public.transport t), '{"n":"long"}', 'a message that has not expired is left after both purges');
delete from public.transport;
select is(pg_temp.estimate('transport'), 0, 'a delete without a condition removes all messages');

-- Scheduled messages.
select pgqueue.enqueue('transport', '"delayed"', delay => '10 s') as sent \gset
select pg_temp.hurry('transport'), pg_temp.estimate('transport') as looked \gset
select is(pg_temp.estimate('transport'), 0, 'the relation does not show a delayed message before it is due');
select is((select count(*) from pgqueue.messages m where m.queue_name = 'transport'), 1::bigint, 'a message that is due within seconds is moved into messages ahead of time');
update pgqueue.messages set visible_at = clock_timestamp() where queue_name = 'transport';
select is((pg_temp.take('transport')).body, '"delayed"'::bytea, 'the relation shows a delayed message when it is due');
select pgqueue.enqueue('transport', '"far"', delay => '1 h') as sent \gset
select pg_temp.hurry('transport'), pg_temp.estimate('transport') as looked \gset
select is((select count(*) from pgqueue.scheduled_messages s where s.queue_name = 'transport'), 1::bigint, 'a message that is due in an hour stays in scheduled_messages');

-- Large messages are moved in slices. Until all are moved, each read does a part.
select pgqueue.create_queue('transport-large') is not null, pgqueue.expose_transport('transport-large') is not null \g /dev/null
select pgqueue.enqueue_batch('transport-large', delays => array_fill(interval '12 s', array[100]), bodies => array_fill(b.body, array[100]))
from (select string_agg(sha256(n::text::bytea), '') as body from generate_series(1, 1920) as n) b \g /dev/null
select count(*) from public."transport-large" \g /dev/null
select cmp_ok((select count(*) from pgqueue.scheduled_messages s where s.queue_name = 'transport-large'), '>', 0::bigint, 'reading a relation does not move 6 MB of due messages at once');
do $$ begin for i in 1..12 loop perform count(*) from public."transport-large"; end loop; end $$;
select is((select count(*) from pgqueue.scheduled_messages s where s.queue_name = 'transport-large'), 0::bigint, 'the next reads of the relation move the others');
select pgqueue.drop_queue('transport-large') \g /dev/null
select pgqueue.pause_queue('transport') as paused, pg_temp.send('transport', '{}', 'x'), pg_temp.hurry('transport') \g /dev/null
select is(pg_temp.estimate('transport'), 0, 'the relation of a paused queue shows no message');
select pgqueue.resume_queue('transport') as resumed \g /dev/null
select is(pg_temp.estimate('transport'), 1, 'the relation shows messages again after resume_queue');
savepoint receiving;
select is((pg_temp.take('transport')).body, 'x'::bytea, 'a message is received before its savepoint is rolled back');
rollback to receiving;
select is(pg_temp.estimate('transport'), 1, 'a rollback restores a received message');
select throws_ok($$ select pg_temp.send('transport', '{}', 'x', t.id) from public.transport t $$, '23505', null, 'sending a message under an existing id raises an error');
select lives_ok($$ select pg_temp.send('transport', t.headers, t.body, t.id) from pg_temp.take('transport') t $$, 'a received message can be sent under its id in the same transaction');
set local client_min_messages = error;
select lives_ok($$ create table if not exists public.transport (Id uuid not null primary key, Expires timestamp, Headers text not null, Body bytea, Seq serial not null unique) $$, 'a transport may create the table of an exposed queue again');
reset client_min_messages;
create temp table delayed (id uuid default gen_random_uuid(), headers text, body bytea, due timestamptz);
insert into delayed (headers, body, due) values ('{"n":"due"}', null, now() - interval '1 s'), ('{"n":"late"}', 'x', now() + interval '1 h');
with message as (delete from delayed where id in (select id from delayed where due < now() limit 100) returning id, headers, body)
insert into public.transport (id, expires, headers, body) select id, null, headers, body from message;
select results_eq($$ select t.headers, t.body from public.transport t order by t.seq $$, $$ values ('{}', 'x'::bytea), ('{"n":"due"}', '') $$, 'a transport moves its delayed messages into the relation');

delete from public.transport;
create function pg_temp.stored_in(zone text, out is_short boolean, out stored text, out shown text) language plpgsql as $$
begin
    perform set_config('timezone', zone, true), pg_temp.send('transport', '{}', 'short', ttbr => 60000);
    insert into public.transport (expires, headers, body) values ('2030-03-31 02:30:00', '{}', 'absolute');
    -- The sender's now() is the start of this transaction. A time of another zone would be off by half an hour or more.
    select m.expires_at - m.enqueued_at between '-20 min' and '60 s' into is_short from pgqueue.messages m where m.queue_name = 'transport' and m.body = 'short';
    select (m.expires_at at time zone 'UTC')::text, t.expires::text into stored, shown
    from pgqueue.messages m join public.transport t on t.body = m.body where m.queue_name = 'transport' and m.body = 'absolute';
    delete from public.transport;
    perform set_config('timezone', 'UTC', true);
end $$;
-- This local time does not exist in Berlin on that date.
select is(pg_temp.stored_in(z)::text, '(t,"2030-03-31 02:30:00","2030-03-31 02:30:00")', 'timestamps of the relation are UTC in ' || z) from unnest(array['UTC', 'America/St_Johns', 'Pacific/Apia', 'Europe/Berlin']) z;

-- Names of relations.
create schema "transport's ""schema""";
select pgqueue.create_queue('transport-names') is not null as made \gset
select is(pgqueue.expose_transport('transport-names', 'transport''s "schema"', 'A.b"; drop table pgqueue.messages; --%s\'), '"transport''s ""schema"""."A.b""; drop table pgqueue.messages; --%s\"', 'expose_transport quotes schema and name of the relation');
select pg_temp.send('transport-names', '{}', 'x') as sent \gset
select is((pg_temp.take('transport-names')).body, 'x'::bytea, 'a relation with any name can be used to send and receive');
select is(pgqueue.unexpose_transport('transport-names'), true, 'unexpose_transport returns true for an exposed queue');
select is(pgqueue.unexpose_transport('transport-names'), false, 'unexpose_transport returns false for a queue that is not exposed');
select is(pgqueue.expose_transport('transport-names', table_name => repeat('ä', 31) || 'b'), '"public"."' || repeat('ä', 31) || 'b"', 'expose_transport accepts a relation name of 63 bytes');
select is(pgqueue.unexpose_transport('transport-names'), true, 'unexpose_transport drops a relation with a name of 63 bytes');
select throws_ok(format('select pgqueue.expose_transport(%L, table_name => %L)', 'transport-names', t), '22023', null, format('expose_transport refuses a relation name of %s bytes', octet_length(t))) from unnest(array['', repeat('ä', 32)]) t;
select throws_ok(format('select pgqueue.expose_transport(%L, %L)', 'transport-names', s), '22023', null, 'expose_transport refuses the schema ' || quote_nullable(s)) from unnest(array[null, '', 'nowhere', 'pgqueue', 'pg_catalog', 'pg_temp', 'information_schema']) s;
-- The columns of the SQL Server transport.
select pgqueue.create_queue('transport-sqlserver') is not null as made \gset
select is(pgqueue.expose_transport('transport-sqlserver', body_string => true, flavor => 'sqlserver'), '"public"."transport-sqlserver"', 'expose_transport accepts the flavor sqlserver');
select columns_are('public', 'transport-sqlserver', array['id', 'correlationid', 'replytoaddress', 'recoverable', 'expires', 'headers', 'body', 'bodystring', 'rowversion', 'seq'], 'the relation of flavor sqlserver has its own columns and, if requested, bodystring');
insert into public."transport-sqlserver" (id, correlationid, headers, body) values (gen_random_uuid(), 'c', 'no json', 'x');
select is((select c.headers from pgqueue.claim('transport-sqlserver') c), '"no json"', 'a legacy column does not change unreadable headers');
insert into public."transport-sqlserver" (correlationid, replytoaddress, recoverable, headers, body) values ('c1', 'r1', true, '{"x":"y"}', 'b'), ('c1', null, true, '{"NServiceBus.CorrelationId":"c2"}', 'b');
select results_eq($$ select t.correlationid::text, t.replytoaddress::text, t.recoverable, t.rowversion = t.seq from public."transport-sqlserver" t order by t.rowversion $$,
    $$ values ('c1', 'r1', true, true), ('c2', null, true, true) $$, 'the relation returns the legacy columns, and headers override them');
select is(array(select t.headers from public."transport-sqlserver" t order by t.rowversion),
    array['{"x": "y", "NServiceBus.CorrelationId": "c1", "NServiceBus.ReplyToAddress": "r1"}', '{"NServiceBus.CorrelationId": "c2"}'], 'headers with a legacy column are written in the form of jsonb');
select is((select c.headers from pgqueue.claim('transport-sqlserver') c), '{"x": "y", "NServiceBus.CorrelationId": "c1", "NServiceBus.ReplyToAddress": "r1"}', 'claim returns the legacy columns as headers');
insert into public."transport-sqlserver" (recoverable, headers) values (true, '{"z":"1",  "a":"2"}');
select is((select t.headers from public."transport-sqlserver" t order by t.rowversion desc limit 1), '{"z":"1",  "a":"2"}', 'headers without a legacy column are read byte for byte');
select throws_ok($$ insert into public."transport-sqlserver" (correlationid, headers) values ('c', null) $$, '23502', null, 'the relation of flavor sqlserver refuses headers that are null');
select pgqueue.drop_queue('transport-sqlserver') as dropped \gset
select throws_ok($$ select pgqueue.expose_transport('transport-names', flavor => 'oracle') $$, '22023', null, 'expose_transport refuses an unknown flavor');
select throws_ok($$ select pgqueue.expose_transport('transport-names', body_string => null) $$, '22023', null, 'expose_transport refuses a null body_string');
select throws_ok($$ select pgqueue.expose_transport('transport', table_name => 'other') $$, '42710', null, 'expose_transport refuses a second relation for a queue');
select throws_ok($$ select pgqueue.expose_transport('transport-names', table_name => 'transport') $$, '42P07', null, 'expose_transport refuses the name of an existing relation');

-- Rights.
create role pgqueue_test_transport;
create role pgqueue_test_sender;
create role pgqueue_test_exposer;
select pgqueue.grant_access('pgqueue_test_transport', 'transport'), pgqueue.grant_access('pgqueue_test_exposer', 'admin') \g /dev/null
grant select, update, delete on public.transport to pgqueue_test_transport;
grant insert on public.transport to pgqueue_test_sender;
set local role pgqueue_test_sender;
select lives_ok($$ insert into public.transport (id, headers, body) values (gen_random_uuid(), '{}', 'x') $$, 'a role with insert on the relation can send, without other rights');
select throws_ok($$ select from public.transport $$, '42501', null, 'a role with insert on the relation may not read it');
select throws_ok($$ insert into pgqueue.messages (queue_name) values ('transport') $$, '42501', null, 'a role with insert on the relation may not write into messages');
set local role pgqueue_test_transport;
select lives_ok($$ delete from public.transport where id = (select id from public.transport order by seq limit 1 for update skip locked) $$, 'a role with select, update and delete on the relation can receive');
select throws_ok($$ insert into public.transport (headers) values ('{}') $$, '42501', null, 'a role without insert on the relation may not send');
set local role pgqueue_test_exposer;
select throws_ok($$ select pgqueue.expose_transport('transport-names') $$, '42501', null, 'expose_transport refuses a role that may not create in the schema');
reset role;
grant create on schema "transport's ""schema""" to pgqueue_test_exposer;
set local role pgqueue_test_exposer;
select is(pgqueue.expose_transport('transport-names', 'transport''s "schema"'), '"transport''s ""schema"""."transport-names"', 'expose_transport accepts a role that may create in the schema');
reset role;
grant usage on schema "transport's ""schema""" to pgqueue_test_exposer;
set local role pgqueue_test_exposer;
select lives_ok($$ grant insert on "transport's ""schema"""."transport-names" to pgqueue_test_sender $$, 'the role that exposed a queue may grant rights on the relation');
reset role;

-- Dropping relations.
select pgqueue.enqueue('transport-names', '"kept"') as sent \gset
select is(pgqueue.unexpose_transport('transport-names'), true, 'unexpose_transport drops the relation of a queue with a message');
select is((select c.payload from pgqueue.claim('transport-names') c), '"kept"', 'claim returns the message after the relation was dropped');
create view pg_temp.dependent as select id from public.transport;
select throws_ok($$ select pgqueue.drop_queue('transport') $$, '2BP01', null, 'drop_queue fails while a view depends on the relation');
drop view pg_temp.dependent;
select lives_ok($$ select pgqueue.drop_queue('transport') $$, 'drop_queue succeeds after the view was dropped');
select hasnt_view('public', 'transport', 'drop_queue drops the relation');
select is_empty($$ select from pg_class c where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'S' and c.relname ~ '_seq$' and c.relname <> (select format('queue_%s_seq', q.queue_id) from pgqueue.queues q where q.name = 'transport-text') $$, 'drop_queue drops the seq register');

-- Archiving what a transport receives.
create function pg_temp.archived(queue text) returns jsonb language sql as $$ select jsonb_agg(a.payload order by a.id) from pgqueue.browse_archived_messages(queue) a $$;
select pgqueue.create_queue('transport-archive', archive_for => '1 day') is not null as made \gset
select pgqueue.expose_transport('transport-archive') as address \gset
select pgqueue.enqueue('transport-archive', '1', headers => '{"h": 1}', message_id => '20000000-0000-0000-0000-000000000001') as sent \gset
select isnt((pg_temp.take('transport-archive')).id, null, 'a transport receives a message from a queue with an archive');
select results_eq($$ select a.queue_name, a.payload, a.headers, a.message_id, a.attempt_count, a.claimed_at, a.finished_at >= a.enqueued_at from pgqueue.browse_archived_messages('transport-archive') a $$,
    $$ values ('transport-archive', '1'::jsonb, '{"h": 1}'::jsonb, '20000000-0000-0000-0000-000000000001'::uuid, 1, null::timestamptz, true) $$, 'the archive contains the received message, as after receive');
select is((select a.id from pgqueue.browse_archived_messages('transport-archive') a), :sent, 'the archived message keeps its id');
select pg_temp.send('transport-archive', '{"a":"b"}', '\x00ff') as wire \gset
select is((pg_temp.take('transport-archive')).id, :'wire', 'a transport receives a message that a transport sent');
select results_eq($$ select a.body, a.headers, a.message_id from pgqueue.browse_archived_messages('transport-archive', 1) a $$, format('values (%L::bytea, %L::jsonb, %L::uuid)', '\x00ff', '{"a": "b"}', :'wire'), 'the archive contains a message that a transport sent and received');
select pg_temp.send('transport-archive', '{}', '\x01', ttbr => -1000) as late \gset
select is((pg_temp.take('transport-archive')).expired, 1, 'a transport receives an expired message');
select is((select count(*) from pgqueue.browse_archived_messages('transport-archive')), 2::bigint, 'an expired message is not archived');
savepoint received;
select pgqueue.enqueue('transport-archive', '2') as sent \gset
select pg_temp.take('transport-archive') \g /dev/null
rollback to received;
select is((select count(*) from pgqueue.browse_archived_messages('transport-archive')), 2::bigint, 'a message whose receipt was rolled back is not archived');
-- Messages deleted by verbs are archived by the verb or not at all.
select pgqueue.enqueue_batch('transport-archive', array['3', '4', '5', '6']::jsonb[]) \g /dev/null
select count(*) as n from pgqueue.receive('transport-archive') \gset
select pgqueue.ack('transport-archive', c.id, c.claim_token) as acked from pgqueue.claim('transport-archive') c \gset
select pgqueue.nack('transport-archive', c.id, c.claim_token, '1 h') as nacked from pgqueue.claim('transport-archive') c \gset
select pgqueue.reject('transport-archive', c.id, c.claim_token) as rejected from pgqueue.claim('transport-archive') c \gset
select is((select jsonb_agg(a.payload order by a.id) from pgqueue.browse_archived_messages('transport-archive') a where a.payload is not null), '[1, 3, 4]', 'messages that receive or ack removed are archived once');
select pgqueue.enqueue_batch('transport-archive', array['7', '8']::jsonb[]) \g /dev/null
delete from public."transport-archive";
select is((select jsonb_agg(a.payload order by a.id) from pgqueue.browse_archived_messages('transport-archive') a where a.payload is not null), '[1, 3, 4, 7, 8]', 'a delete of many rows archives each message once');
-- A day without a partition.
create function pg_temp.day_table() returns text language sql as $$ select 'pgqueue.' || pgqueue._day_partition_name(pgqueue._utc_day(pgqueue._now())) $$;
do $$ begin execute 'alter table pgqueue.archived_messages detach partition ' || pg_temp.day_table(); execute 'alter table ' || pg_temp.day_table() || ' rename to detached'; end $$;
select pgqueue.enqueue('transport-archive', '9') as sent \gset
select isnt((pg_temp.take('transport-archive')).id, null, 'a transport receives a message while the partition of the day is missing');
select is((select u.payload from pgqueue.unfiled_messages u where u.queue_name = 'transport-archive'), '9', 'the message is kept in unfiled_messages while the partition of the day is missing');
-- A receiving role needs no right on the archive.
create role pgqueue_test_taker;
grant usage on schema public to pgqueue_test_taker;
grant select, update, delete on public."transport-archive" to pgqueue_test_taker;
select pgqueue.grant_access('pgqueue_test_taker', 'transport') \g /dev/null
select pgqueue.enqueue('transport-archive', '10') as sent \gset
set local role pgqueue_test_taker;
select lives_ok($$ delete from public."transport-archive" $$, 'a role without rights on the archive can receive');
reset role;
select is((select count(*) from pgqueue.unfiled_messages u where u.payload = '10'), 1::bigint, 'a message received by a role without rights on the archive is archived');
-- Turning the archive on and off.
create function pg_temp.triggers(queue text) returns bigint language sql as $$
    select count(*) from pg_trigger g where g.tgname = 'archive_taken' and g.tgrelid = (select pgqueue._partition_of(q) from pgqueue.queues q where q.name = queue) $$;
select is(pg_temp.triggers('transport-text'), 0::bigint, 'a relation without an archive has no archive trigger');
select lives_ok($$ select pgqueue.alter_queue('transport-text', archive_for => '1 day') $$, 'alter_queue turns on the archive of an exposed queue');
select lives_ok($$ select pgqueue.alter_queue('transport-text', archive_for => '2 days') $$, 'alter_queue changes the archive_for of an exposed queue');
select pgqueue.purge_queue('transport-text') as purged \gset
select pgqueue.enqueue('transport-text', '1') as sent \gset
select isnt((pg_temp.take('transport-text')).id, null, 'a transport receives a message after the archive was turned on');
select is((select count(*) from pgqueue.browse_archived_messages('transport-text')), 1::bigint, 'the message received after the archive was turned on is archived');
select lives_ok($$ select pgqueue.alter_queue('transport-text', archive_for => '0') $$, 'alter_queue turns off the archive of an exposed queue');
select pgqueue.enqueue('transport-text', '2') as sent \gset
select isnt((pg_temp.take('transport-text')).id, null, 'a transport receives a message after the archive was turned off');
select is((select count(*) from pgqueue.browse_archived_messages('transport-text')), 1::bigint, 'the message received after the archive was turned off is not archived');
select is(pg_temp.triggers('transport-text'), 0::bigint, 'the archive trigger does not exist after the archive was turned off');
select is(pgqueue.unexpose_transport('transport-archive'), true, 'unexpose_transport succeeds for a queue with an archive');
select is(pg_temp.triggers('transport-archive'), 0::bigint, 'unexpose_transport drops the archive trigger');
select lives_ok($$ select pgqueue.drop_queue('transport-archive') $$, 'drop_queue succeeds after unexpose_transport');

-- A queue that has messages when it is exposed.
select pgqueue.create_queue('transport-late') is not null as made \gset
select pgqueue.enqueue_batch('transport-late', array['1', '2', '3']::jsonb[]) as sent \g /dev/null
select pgqueue.enqueue('transport-late', '4', delay => '1 h') as sent \gset
select id, claim_token from pgqueue.claim('transport-late') \gset
select is(pgqueue.expose_transport('transport-late'), '"public"."transport-late"', 'expose_transport accepts a queue with messages');
select is(array(select convert_from(t.body, 'UTF8') from public."transport-late" t order by t.seq), '{2,3}', 'the relation shows the messages of the queue in order, except claimed ones');
select is(pgqueue.ack('transport-late', :id, :'claim_token'), true, 'ack succeeds for a claim from before the queue was exposed');
select pg_temp.send('transport-late', '{}', '4') as sent \gset
select is(array(select convert_from(t.body, 'UTF8') from public."transport-late" t order by t.seq), '{2,3,4}', 'the relation shows new messages behind older ones');
update pgqueue.messages m set attempt_count = m.max_attempts where m.queue_name = 'transport-late' and m.transport_seq = (select min(t.seq) from public."transport-late" t);
select is(array(select convert_from(t.body, 'UTF8') from public."transport-late" t order by t.seq), '{3,4}', 'the relation does not show a message whose attempts are exhausted');
set local session_replication_role = replica;
select pgqueue.enqueue('transport-late', '5') as sent \gset
reset session_replication_role;
select is(array(select convert_from(t.body, 'UTF8') from public."transport-late" t order by t.seq), '{3,4,5}', 'the relation shows messages of a session with session_replication_role replica');

select * from finish();
rollback;
