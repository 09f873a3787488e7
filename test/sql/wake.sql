begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(36);

create function pg_temp.is_due(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    ids bigint[];
    m pgqueue.message;
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', dedicated => has_table);
    return next is(pgqueue.next_due_at(queue), null, queue || ': next_due_at of an empty queue returns null');
    return next is(pgqueue.prepare_wait(queue, '1 min'), pgqueue._now() + interval '1 min', queue || ': prepare_wait returns the end of the timeout if nothing is due earlier');
    return next is(pgqueue.prepare_wait(queue), pgqueue._now() + interval '60 s', queue || ': prepare_wait has a default timeout of 60 seconds');

    perform pgqueue.enqueue(queue, '1', delay => '50 s');
    return next is(pgqueue.next_due_at(queue), pgqueue._now() + interval '50 s', queue || ': next_due_at returns when the delay of a delayed message ends');
    return next is(pgqueue.prepare_wait(queue, '1 min'), pgqueue._now() + interval '50 s', queue || ': prepare_wait returns the next due time if it comes before the end of the timeout');
    perform pgqueue.enqueue(queue, '2');
    return next ok(pgqueue.next_due_at(queue) <= pgqueue._now(), queue || ': next_due_at is not in the future while a message is ready');
    return next is(pgqueue.prepare_wait(queue, '1 min'), pgqueue._now() + interval '100 ms', queue || ': prepare_wait returns 100 ms from now if a ready message could not be claimed');
    perform pgqueue.pause_queue(queue);
    return next is(pgqueue.prepare_wait(queue, '1 min'), pgqueue._now() + interval '1 min', queue || ': prepare_wait of a paused queue returns the end of the timeout');
    perform pgqueue.resume_queue(queue);
    select * into m from pgqueue.claim(queue);
    return next is(pgqueue.next_due_at(queue), pgqueue._now() + interval '30 s', queue || ': next_due_at returns when the claim of a message expires');
    perform pgqueue.extend(queue, m.id, m.claim_token, '40 s');
    return next is(pgqueue.next_due_at(queue), pgqueue._now() + interval '40 s', queue || ': next_due_at returns the end of an extended claim');
    perform pgqueue.nack(queue, m.id, m.claim_token, '10 s');
    return next is(pgqueue.next_due_at(queue), pgqueue._now() + interval '10 s', queue || ': next_due_at returns when the delay of a nack ends');
    perform pg_temp.pass('10 s');
    select * into m from pgqueue.claim(queue);
    return next is((m.payload, pgqueue.next_due_at(queue))::text, ('2'::jsonb, pgqueue._now() + interval '30 s')::text, queue || ': next_due_at returns when the next claim expires');
    perform pgqueue.ack(queue, m.id, m.claim_token);
    return next is(pgqueue.next_due_at(queue), pgqueue._now() + interval '40 s', queue || ': next_due_at ignores acknowledged messages');
    return next lives_ok(format('select pgqueue.wake(%L)', queue), queue || ': wake can be called by hand');
end;
$$;
select pg_temp.is_due('wake_shared', false);
select pg_temp.is_due('wake_dedicated', true);

select is(pgqueue.channel('orders'), 'pgqueue_orders', 'the name of a channel is that of its queue with a prefix');
select is(
    (select array_agg(octet_length(pgqueue.channel(repeat('q', n)))) from unnest(array[54, 55, 128]) n), array[62, 40, 40],
    'the name of a channel fits the limit of listen, however long the name of the queue is');
select isnt(pgqueue.channel(repeat('q', 127) || 'a'), pgqueue.channel(repeat('q', 127) || 'b'), 'long queue names that differ only in their last character have different channels');
-- The clock was ahead by a year and is then corrected.
select pg_temp.pass('365 days'), pgqueue.prepare_wait('wake_shared'), pg_temp.pass('-365 days'), pgqueue.enqueue('wake_shared', '3') \g /dev/null
select is((select pgqueue._from_micros(pg_sequence_last_value(q.waiting_until)) from pgqueue.queues q where q.name = 'wake_shared'), pgqueue._now() + interval '1 day',
    'enqueue limits a waiting register that a wrong clock set far ahead to a day from now');
select pgqueue.prepare_wait('wake_shared', '1 day'), pgqueue.enqueue('wake_shared', '4') \g /dev/null
select is((select pgqueue._from_micros(pg_sequence_last_value(q.waiting_until)) from pgqueue.queues q where q.name = 'wake_shared'), pgqueue._now() + interval '1 day', 'enqueue keeps the waiting register of a consumer that waits for a day');

select throws_ok($$ select pgqueue.prepare_wait('wake_shared', '-1 s') $$, '22023', null, 'prepare_wait refuses a negative timeout');
select throws_ok($$ select pgqueue.prepare_wait('wake_shared', '25 h') $$, '22023', null, 'prepare_wait refuses a timeout over a day');
select throws_ok($$ select pgqueue.prepare_wait('wake_shared', null) $$, '22023', null, 'prepare_wait refuses a null timeout');

select * from finish();
rollback;
