begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(43);

create function pg_temp.takes(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    new_id bigint;
    ids bigint[];
    name uuid := gen_random_uuid();
    m pgqueue.message;
    sent_at timestamptz := pgqueue._now();
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', max_attempts => 3, dedicated => has_table);
    return next is((select count(*) from pgqueue.receive(queue)), 0::bigint, queue || ': receive of an empty queue returns no row');
    new_id := pgqueue.enqueue(queue, '{"n": 1}', headers => '{"h": 1}', message_id => name);
    select * into m from pgqueue.receive(queue);
    return next is(
        (m.id, m.queue_name, m.payload, m.body, m.headers, m.message_id, m.enqueued_at, m.max_attempts)::text,
        (new_id, queue, '{"n": 1}'::jsonb, null::bytea, '{"h": 1}'::jsonb, name, sent_at, 3)::text,
        queue || ': receive returns the message with the content that was sent');
    return next is(m.attempt_count, 1, queue || ': receive returns an attempt_count that includes the attempt in progress');
    return next is((select (s.ready_messages, s.inflight_messages, s.scheduled_messages)::text from pgqueue.stats(queue) s), '(0,0,0)', queue || ': a received message is not in the queue any more');

    ids := array(select pgqueue.enqueue_batch(queue, array['1', '2', '3', '4', '5']::jsonb[]));
    return next is((select array_agg(r.id) from pgqueue.receive(queue, 2) r), ids[1:2], queue || ': receive of two messages returns the two lowest ids');
    begin
        perform pgqueue.receive(queue, 2);
        raise exception 'this rolls back' using errcode = 'P0001';
    exception when raise_exception then
        null;
    end;
    return next is((select array_agg((b.id, b.attempt_count)::text) from pgqueue.browse(queue) b), array[(ids[3], 0)::text, (ids[4], 0)::text, (ids[5], 0)::text],
        queue || ': a rollback restores received messages with their attempt_count');
    return next is((select array_agg(r.id) from pgqueue.receive(queue, 10) r), ids[3:5], queue || ': receive returns restored messages again, before later ones');

    new_id := pgqueue.enqueue(queue, '1');
    select * into m from pgqueue.claim(queue);
    return next is((select count(*) from pgqueue.receive(queue)), 0::bigint, queue || ': receive does not return a message that is in flight');
    perform pg_temp.pass('31 s');
    select * into m from pgqueue.receive(queue);
    return next is((m.id, m.attempt_count)::text, (new_id, 2)::text, queue || ': receive returns a message whose claim has expired');
    perform pgqueue.enqueue(queue, '2', delay => '10 s');
    return next is((select count(*) from pgqueue.receive(queue)), 0::bigint, queue || ': receive does not return a delayed message');
    perform pg_temp.pass('10 s');
    return next is((select count(*) from pgqueue.receive(queue)), 1::bigint, queue || ': receive returns a delayed message when it is due');

    perform pgqueue.enqueue(queue, '3', expires_in => '10 s');
    new_id := pgqueue.enqueue(queue, '4');
    perform pg_temp.pass('10 s');
    return next is((select array_agg(r.id) from pgqueue.receive(queue, 10) r), array[new_id], queue || ': receive does not return an expired message');
    perform pgqueue.receive(queue);
    return next is((select count(*) from pgqueue.messages b where b.queue_name = queue), 0::bigint, queue || ': receive deletes expired messages');
    perform pgqueue.alter_queue(queue, dead_letter_expired => true);
    new_id := pgqueue.enqueue(queue, '5', expires_in => '10 s');
    perform pg_temp.pass('10 s');
    perform pgqueue.receive(queue);
    perform pgqueue.receive(queue);
    return next is((select (d.id, d.reason)::text from pgqueue.browse_dead_messages(queue) d), (new_id, 'expired'::text)::text,
        queue || ': receive makes a dead letter of an expired message if dead_letter_expired is set');

    perform pgqueue.create_queue(queue || '_poison', max_attempts => 1);
    new_id := pgqueue.enqueue(queue || '_poison', '6');
    perform pgqueue.claim(queue || '_poison');
    perform pg_temp.pass('31 s');
    return next is((select count(*) from pgqueue.receive(queue || '_poison')), 0::bigint, queue || ': receive does not return a message whose attempts are exhausted');
    return next is((select (d.id, d.reason)::text from pgqueue.browse_dead_messages(queue || '_poison') d), (new_id, 'attempts_exhausted'::text)::text,
        queue || ': receive makes a dead letter of a message whose attempts are exhausted');

    new_id := pgqueue.enqueue(queue, '7');
    perform pgqueue.pause_queue(queue);
    return next is((select count(*) from pgqueue.receive(queue)), 0::bigint, queue || ': receive returns no message of a paused queue');
    perform pgqueue.resume_queue(queue);
    return next is((select array_agg(r.id) from pgqueue.receive(queue) r), array[new_id], queue || ': receive returns messages again after resume_queue');
end;
$$;
select pg_temp.takes('receive_shared', false);
select pg_temp.takes('receive_dedicated', true);

select lives_ok($$ select pgqueue.receive('receive_shared', 10000) $$, 'receive accepts a limit of 10,000 messages');
select throws_ok($$ select pgqueue.receive('receive_shared', 0) $$, '22023', null, 'receive refuses to return zero messages');
select throws_ok($$ select pgqueue.receive('receive_shared', 10001) $$, '22023', null, 'receive refuses more than 10,000 messages');
select throws_ok($$ select pgqueue.receive('receive_shared', null) $$, '22023', null, 'receive refuses a null number of messages');
select throws_ok($$ select pgqueue.receive('receive_nowhere') $$, 'PQ001', null, 'receive refuses an unknown queue');
select is(
    (select array_agg(b.queue_name) from pgqueue.list_queues() q cross join pgqueue.browse(q.name) b where q.name like 'receive\_%'),
    null, 'no queue of this test has a ready message left');
select is(pgqueue.peek('receive_shared'), 0, 'peek finds no ready message at the end of this test');

select * from finish();
rollback;
