begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(97);

-- enqueued, acknowledged, failed, dead
create function pg_temp.totals(queue text) returns text language sql volatile as $$
    select format('%s %s %s %s', s.enqueued_total, s.acknowledged_total, s.failed_total, s.dead_total) from pgqueue.stats(queue) s
$$;
create function pg_temp.payloads(n int) returns jsonb[] language sql as $$ select array_agg(to_jsonb(i)) from generate_series(1, n) i $$;

create function pg_temp.sending(queue text, has_table boolean) returns setof text language plpgsql as $$
begin
    perform pgqueue.create_queue(queue, dedicated => has_table, max_payload_bytes => 100);
    return next is(pg_temp.totals(queue), '0 0 0 0', queue || ': a new queue has counted nothing');
    perform pgqueue.enqueue(queue, '1');
    return next is(pg_temp.totals(queue), '1 0 0 0', queue || ': enqueue counts the message');
    perform pgqueue.enqueue(queue, body => '\x01', expires_in => '1 h');
    return next is(pg_temp.totals(queue), '2 0 0 0', queue || ': enqueue counts a message that its fast path does not handle');
    perform pgqueue.enqueue(queue, '1', delay => '1 h');
    return next is(pg_temp.totals(queue), '3 0 0 0', queue || ': a delayed message counts when it is sent');
    begin
        perform pgqueue.enqueue(queue, to_jsonb(repeat('x', 200)));
    exception when sqlstate 'PQ003' then
        null;
    end;
    return next is(pg_temp.totals(queue), '3 0 0 0', queue || ': a refused message does not count');
    perform pgqueue.enqueue_batch(queue, pg_temp.payloads(1));
    return next is(pg_temp.totals(queue), '4 0 0 0', queue || ': enqueue_batch counts one message');
    perform pgqueue.enqueue_batch(queue, pg_temp.payloads(9));
    perform pgqueue.enqueue_batch(queue, pg_temp.payloads(10));
    perform pgqueue.enqueue_batch(queue, pg_temp.payloads(37), delays => array_fill('1 h'::interval, array[37]));
    perform pgqueue.enqueue_batch(queue, pg_temp.payloads(100));
    return next is(pg_temp.totals(queue), '160 0 0 0', queue || ': enqueue_batch counts each message of batches of any size, delayed ones included');
    perform pgqueue.subscribe('counters.' || queue, queue);
    perform pgqueue.publish('counters.' || queue, '1');
    perform pgqueue.publish('counters.' || queue, '1', delay => '1 h');
    return next is(pg_temp.totals(queue), '162 0 0 0', queue || ': publish counts the copy that the queue gets, at once or delayed');
    perform pg_temp.pass('2 h');
    perform pgqueue.claim(queue, 1000);
    return next is(pg_temp.totals(queue), '162 0 0 0', queue || ': messages that come due, and claims, do not count again');
    perform pgqueue.purge_queue(queue);
    return next is(pg_temp.totals(queue), '162 0 0 0', queue || ': purged messages count neither as acknowledged nor as dead');
    insert into pgqueue.messages (queue_name, payload) values (queue, '1');
    return next is(pg_temp.totals(queue), '162 0 0 0', queue || ': a plain insert does not count');
end
$$;
select pg_temp.sending('sending-shared', false);
select pg_temp.sending('sending-dedicated', true);

create function pg_temp.finishing(queue text, archive_for interval) returns setof text language plpgsql as $$
declare
    m pgqueue.message;
    ids bigint[];
    token uuid;
    s pgqueue.stream;
    b pgqueue.stream_batch;
begin
    perform pgqueue.create_queue(queue, archive_for => finishing.archive_for, visibility_timeout => '1 min');
    perform pgqueue.enqueue_batch(queue, pg_temp.payloads(1000));
    select * into m from pgqueue.claim(queue);
    perform pgqueue.ack(queue, m.id, gen_random_uuid());
    return next is(pg_temp.totals(queue), '1000 0 0 0', queue || ': ack with a wrong token does not count');
    perform pgqueue.ack(queue, m.id, m.claim_token);
    return next is(pg_temp.totals(queue), '1000 1 0 0', queue || ': ack counts the message');
    perform pgqueue.ack(queue, m.id, m.claim_token);
    return next is(pg_temp.totals(queue), '1000 1 0 0', queue || ': a repeated ack does not count');
    select array_agg(c.id), min(c.claim_token::text)::uuid into ids, token from pgqueue.claim(queue, 100) c;
    perform pgqueue.ack_batch(queue, ids[:1], token);
    return next is(pg_temp.totals(queue), '1000 2 0 0', queue || ': ack_batch counts one message');
    perform pgqueue.ack_batch(queue, ids[:25], token);
    return next is(pg_temp.totals(queue), '1000 26 0 0', queue || ': ack_batch counts only the messages whose claims were valid');
    perform pgqueue.ack_batch(queue, ids, token);
    return next is(pg_temp.totals(queue), '1000 101 0 0', queue || ': ack_batch counts the rest');
    perform pgqueue.ack_batch(queue, ids, token);
    return next is(pg_temp.totals(queue), '1000 101 0 0', queue || ': ack_batch of lost claims does not count');
    select array_agg(c.id), min(c.claim_token::text)::uuid into ids, token from pgqueue.claim(queue, 14) c;
    perform pgqueue.exchange(queue, ids[:13], token, 1);
    perform pgqueue.exchange(queue, ids, token, 1);
    perform pgqueue.exchange(queue, ids[:1], token, 1);
    return next is(pg_temp.totals(queue), '1000 115 0 0', queue || ': exchange counts the messages whose claims were valid');
    perform pgqueue.receive(queue);
    return next is(pg_temp.totals(queue), '1000 116 0 0', queue || ': receive counts the message');
    perform pgqueue.receive(queue, 34);
    return next is(pg_temp.totals(queue), '1000 150 0 0', queue || ': receive counts each message of a batch');
    s := pgqueue.stream_open(queue, 's');
    b := pgqueue.stream_claim(queue, 's', s.epoch, 0, null, 200);
    perform pgqueue.stream_ack(queue, 's', s.epoch, b.seq, b.claim_token);
    return next is(pg_temp.totals(queue), '1000 350 0 0', queue || ': stream_ack counts the messages of the batch');
    b := pgqueue.stream_claim(queue, 's', s.epoch, b.seq, b.claim_token, 20);
    perform pgqueue.stream_skip(queue, 's', b.seq, error => 'bad');
    return next is(pg_temp.totals(queue), '1000 350 20 20', queue || ': stream_skip counts failures and dead letters');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.release(queue, array[m.id], m.claim_token);
    return next is(pg_temp.totals(queue), '1000 350 20 20', queue || ': release counts neither as acknowledged nor as failed');
end
$$;
select pg_temp.finishing('finishing-deletes', null);
select pg_temp.finishing('finishing-archives', '1 day');

create function pg_temp.failing(queue text, has_letters boolean) returns setof text language plpgsql as $$
declare
    m pgqueue.message;
    letters constant int := has_letters::int;
begin
    perform pgqueue.create_queue(queue, dlq_enabled => has_letters, dead_letter_expired => has_letters, max_attempts => 2, backoff_base => '0', visibility_timeout => '30 s');
    perform pgqueue.enqueue(queue, '1');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.nack(queue, m.id, gen_random_uuid());
    return next is(pg_temp.totals(queue), '1 0 0 0', queue || ': nack with a wrong token does not count');
    perform pgqueue.nack(queue, m.id, m.claim_token, delay => '10 s');
    return next is(pg_temp.totals(queue), '1 0 1 0', queue || ': nack counts a failure');
    perform pg_temp.pass('20 s');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.nack(queue, m.id, m.claim_token);
    return next is(pg_temp.totals(queue), format('1 0 2 %s', letters), queue || ': nack of the last attempt also counts the dead letter, if there is one');
    perform pgqueue.enqueue(queue, '2');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.reject(queue, m.id, m.claim_token);
    return next is(pg_temp.totals(queue), format('2 0 3 %s', 2 * letters), queue || ': reject counts a failure, and the dead letter, if there is one');
    perform pgqueue.record_failure(queue, pgqueue.enqueue(queue, '3'), 1, delay => '0');
    return next is(pg_temp.totals(queue), format('3 0 4 %s', 2 * letters), queue || ': record_failure counts a failure');
    perform pgqueue.purge_queue(queue);
    -- Two consumers crash.
    perform pgqueue.enqueue_batch(queue, pg_temp.payloads(11));
    perform pgqueue.claim(queue, 11);
    perform pg_temp.pass('1 min');
    perform pgqueue.claim(queue, 11);
    perform pg_temp.pass('1 min');
    perform pgqueue.sweep_queue(queue);
    return next is(pg_temp.totals(queue), format('14 0 4 %s', 13 * letters), queue || ': messages whose claims ended without a report count as dead letters, not as failures');
    perform pgqueue.enqueue_batch(queue, pg_temp.payloads(12), expires_in => '1 s');
    perform pg_temp.pass('1 min');
    perform pgqueue.purge_expired(queue);
    return next is(pg_temp.totals(queue), format('26 0 4 %s', 25 * letters), queue || ': expired messages count if they become dead letters');
    perform pgqueue.redrive(queue);
    return next is(pg_temp.totals(queue), format('26 0 4 %s', 25 * letters), queue || ': redrive counts nothing');
end
$$;
select pg_temp.failing('failing-kept', true);
select pg_temp.failing('failing-deleted', false);

-- The life of the counters.
select pgqueue.create_queue('counted') is not null as made \gset
select pgqueue.create_queue('other') is not null as made \gset
select pgqueue.enqueue_batch('counted', pg_temp.payloads(25)) \g /dev/null
savepoint work;
select pgqueue.enqueue('counted', '1') \g /dev/null
rollback to work;
select is(pg_temp.totals('counted'), '26 0 0 0', 'work that is rolled back stays counted');
select is(pg_temp.totals('other'), '0 0 0 0', 'each queue has its own counters');
select is(
    (select format('%s %s %s %s', s.enqueued_total, s.acknowledged_total, s.failed_total, s.dead_total) from pgqueue.stats() s where s.queue_name = 'counted'),
    '26 0 0 0', 'stats of all queues returns the totals');
select pgqueue.pause_queue('counted') is not null as paused \gset
select pgqueue.enqueue('counted', '1') \g /dev/null
select is(pg_temp.totals('counted'), '27 0 0 0', 'a paused queue counts what is sent');
select pgqueue.resume_queue('counted') is not null as resumed \gset

create function pg_temp.sequences(queue text) returns bigint language sql as $$
    select count(*) from pg_class c where c.relkind = 'S' and c.relnamespace = 'pgqueue'::regnamespace and c.relname ~ ('_' || to_hex(hashtextextended(queue, 0)) || '$')
$$;
select is(pg_temp.sequences('counted'), 4::bigint, 'a queue has one sequence for each of its four counters');
select is_empty($$ select f.finding from pgqueue.doctor() f where f.finding = 'missing_counter' $$, 'doctor finds all counters');
select format('drop sequence %s', pgqueue._sequence_name(r, 'counted')) from unnest(array['enqueued', 'acknowledged', 'failed', 'dead']) r \gexec
select lives_ok($$ select pgqueue.enqueue('counted', '1'), pgqueue.enqueue_batch('counted', pg_temp.payloads(11)) $$, 'messages are sent without the counters');
select results_eq($$ select pgqueue.ack('counted', c.id, c.claim_token) from pgqueue.claim('counted') c $$, array[true], 'a message is acknowledged without the counters');
select results_eq($$ select pgqueue.ack_batch('counted', array_agg(c.id), min(c.claim_token::text)::uuid) from pgqueue.claim('counted', 12) c $$, array[12],
    'a batch is acknowledged without the counters');
select results_eq($$ select count(*) from pgqueue.receive('counted', 12) $$, array[12::bigint], 'a batch is received without the counters');
select results_eq($$ select pgqueue.reject('counted', c.id, c.claim_token) from pgqueue.claim('counted') c $$, array[true], 'a message is rejected without the counters');
select is(pg_temp.totals('counted'), '   ', 'stats returns null for the totals without the counters');
select results_eq($$ select f.severity, f.queue_name, f.repair from pgqueue.doctor() f where f.finding = 'missing_counter' $$,
    $$ values ('warning', 'counted', 'select pgqueue.alter_queue(''counted'');') $$, 'doctor reports the missing counters');
select repair from pgqueue.doctor() where finding = 'missing_counter' \gexec
select pgqueue.enqueue('counted', '1') \g /dev/null
select is(pg_temp.totals('counted'), '1 0 0 0', 'the repair creates the counters');
select pgqueue.drop_queue('counted') is not null as dropped \gset
select is(pg_temp.sequences('counted'), 0::bigint, 'drop_queue drops the counters');
select pgqueue.create_queue('counted') is not null as made \gset
select is(pg_temp.totals('counted'), '0 0 0 0', 'a queue that is created again begins at 0');

-- The relation of a transport.
select pgqueue.create_queue('counted-relation') is not null as made \gset
select pgqueue.expose_transport('counted-relation') is not null as made \gset
insert into "counted-relation" (id, headers, body) values (gen_random_uuid(), '{}', '');
select is(pg_temp.totals('counted-relation'), '1 0 0 0', 'an insert into the relation of a transport counts');
delete from "counted-relation";
select is(pg_temp.totals('counted-relation'), '1 0 0 0', 'a delete from the relation of a transport does not count');

-- Staged messages.
select pgqueue.create_queue('counted-sink') is not null as made \gset
select gen_random_uuid() as run \gset
select pgqueue.sink_stage('counted-sink', :'run', 0, 1) as token \gset
insert into pgqueue.staged_messages (token, row_number, payloads, delays) values (:'token', 1, pg_temp.payloads(14), array['1 h']::interval[] || array_fill(null::interval, array[13]));
select is(pg_temp.totals('counted-sink'), '0 0 0 0', 'staged messages do not count');
select pgqueue.sink_commit(:'run', array[:'token']::uuid[], '{14}') is not null as sent \gset
select is(pg_temp.totals('counted-sink'), '14 0 0 0', 'sink_commit counts the messages that it sends');
select gen_random_uuid() as run \gset
select pgqueue.sink_stage('counted-sink', :'run', 0, 1) as token \gset
insert into pgqueue.staged_messages (token, row_number, payloads, dedup_keys, delays) values (:'token', 1, pg_temp.payloads(3), '{a,b,a}', '{1 h,0,0}');
select pgqueue.sink_commit(:'run', array[:'token']::uuid[], '{3}') is not null as sent \gset
select is(pg_temp.totals('counted-sink'), '16 0 0 0', 'sink_commit counts the messages with new dedup_keys, delayed ones included');

-- A queue without counters.
select pgqueue.create_queue('uncounted', counters => false) is not null as made \gset
select is(pg_temp.sequences('uncounted'), 0::bigint, 'a queue with counters false has no sequences for counters');
select pgqueue.alter_queue('uncounted', max_attempts => 7) is not null as altered \gset
select is(pg_temp.sequences('uncounted'), 0::bigint, 'alter_queue creates none unless counters is true');
select is((pgqueue.get_queue('uncounted')).counters, false, 'get_queue returns the setting');
select pgqueue.enqueue_batch('uncounted', pg_temp.payloads(25)) \g /dev/null
select results_eq($$ select pgqueue.ack('uncounted', c.id, c.claim_token) from pgqueue.claim('uncounted') c $$, array[true], 'its messages are acknowledged');
select is(pg_temp.totals('uncounted'), '   ', 'its totals are null');
select is((select s.enqueued_total from pgqueue.stats() s where s.queue_name = 'uncounted'), null, 'they are null in the statistics of all queues, too');
select is_empty($$ select f.finding from pgqueue.doctor() f where f.finding = 'missing_counter' $$, 'doctor does not miss the counters of such a queue');
select lives_ok($$ select pgqueue.alter_queue('uncounted', counters => false) $$, 'counters false changes nothing there');
select is((pgqueue.alter_queue('uncounted', counters => true)).counters, true, 'alter_queue adds counters');
select pgqueue.enqueue('uncounted', '1') \g /dev/null
select is(pg_temp.totals('uncounted'), '1 0 0 0', 'they count from then on');
select throws_ok($$ select pgqueue.alter_queue('uncounted', counters => false) $$, '22023', 'invalid counters: ''false''', 'alter_queue does not remove counters');
select throws_ok($$ select pgqueue.create_queue('uncounted-null', counters => null) $$, '22023', 'invalid counters: null', 'create_queue refuses counters null');

select * from finish();
rollback;
