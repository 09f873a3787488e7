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
    return next is(pgqueue.next_due_at(queue), null, queue || ': where nothing is pending nothing comes due');
    return next is(pgqueue.prepare_wait(queue, '1 min'), pgqueue._now() + interval '1 min', queue || ': a consumer looks again when its timeout ends');
    return next is(pgqueue.prepare_wait(queue), pgqueue._now() + interval '60 s', queue || ': which by default is 60 seconds');

    perform pgqueue.enqueue(queue, '1', delay => '50 s');
    return next is(pgqueue.next_due_at(queue), pgqueue._now() + interval '50 s', queue || ': a delayed message comes due when its delay ends');
    return next is(pgqueue.prepare_wait(queue, '1 min'), pgqueue._now() + interval '50 s', queue || ': a consumer looks again when a message comes due, if that is sooner');
    perform pgqueue.enqueue(queue, '2');
    return next ok(pgqueue.next_due_at(queue) <= pgqueue._now(), queue || ': with a ready message the moment has come');
    return next is(pgqueue.prepare_wait(queue, '1 min'), pgqueue._now() + interval '100 ms', queue || ': but who could not have it pauses before the next look');
    perform pgqueue.pause_queue(queue);
    return next is(pgqueue.prepare_wait(queue, '1 min'), pgqueue._now() + interval '1 min', queue || ': and while the queue is paused nothing is worth a look');
    perform pgqueue.resume_queue(queue);
    select * into m from pgqueue.claim(queue);
    return next is(pgqueue.next_due_at(queue), pgqueue._now() + interval '30 s', queue || ': a claim comes due when it runs out');
    perform pgqueue.extend(queue, m.id, m.claim_token, '40 s');
    return next is(pgqueue.next_due_at(queue), pgqueue._now() + interval '40 s', queue || ': an extended claim does so later');
    perform pgqueue.nack(queue, m.id, m.claim_token, '10 s');
    return next is(pgqueue.next_due_at(queue), pgqueue._now() + interval '10 s', queue || ': a message given back comes due when its delay ends');
    perform pg_temp.pass('10 s');
    select * into m from pgqueue.claim(queue);
    return next is((m.payload, pgqueue.next_due_at(queue))::text, ('2'::jsonb, pgqueue._now() + interval '30 s')::text, queue || ': claimed again, it comes due when that claim runs out');
    perform pgqueue.ack(queue, m.id, m.claim_token);
    return next is(pgqueue.next_due_at(queue), pgqueue._now() + interval '40 s', queue || ': what is acknowledged does not come due');
    return next lives_ok(format('select pgqueue.wake(%L)', queue), queue || ': consumers can be woken by hand');
end;
$$;
select pg_temp.is_due('wake_shared', false);
select pg_temp.is_due('wake_dedicated', true);

select is(pgqueue.channel('orders'), 'pgqueue_orders', 'a channel is named after its queue');
select is(
    (select array_agg(octet_length(pgqueue.channel(repeat('q', n)))) from unnest(array[54, 55, 128]) n), array[62, 40, 40],
    'a channel has a name that listen accepts, however long that of the queue');
select isnt(pgqueue.channel(repeat('q', 127) || 'a'), pgqueue.channel(repeat('q', 127) || 'b'), 'long names that differ at their end have channels of their own');
-- The clock was ahead by a year, and is set right.
select pg_temp.pass('365 days'), pgqueue.prepare_wait('wake_shared'), pg_temp.pass('-365 days'), pgqueue.enqueue('wake_shared', '3') \g /dev/null
select is((select pgqueue._from_micros(pg_sequence_last_value(q.waiting_until)) from pgqueue.queues q where q.name = 'wake_shared'), pgqueue._now() + interval '1 day',
    'after a clock that was wrong an enqueue goes on to notify, as somebody may wait, but not for longer than anybody would');
select pgqueue.prepare_wait('wake_shared', '1 day'), pgqueue.enqueue('wake_shared', '4') \g /dev/null
select is((select pgqueue._from_micros(pg_sequence_last_value(q.waiting_until)) from pgqueue.queues q where q.name = 'wake_shared'), pgqueue._now() + interval '1 day', 'who waits for a day is notified all day');

select throws_ok($$ select pgqueue.prepare_wait('wake_shared', '-1 s') $$, '22023', null, 'prepare_wait refuses a negative timeout');
select throws_ok($$ select pgqueue.prepare_wait('wake_shared', '25 h') $$, '22023', null, 'prepare_wait refuses a timeout over a day');
select throws_ok($$ select pgqueue.prepare_wait('wake_shared', null) $$, '22023', null, 'prepare_wait refuses a null timeout');

select * from finish();
rollback;
