begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(37);

create function pg_temp.removes(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    ids bigint[];
    m pgqueue.message;
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', dedicated => has_table);
    perform pgqueue.enqueue(queue, '0', expires_in => '10 s');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.enqueue_batch(queue, array['1', '2', '3']::jsonb[], expires_in => '10 s');
    perform pgqueue.enqueue(queue, '4', delay => '1 h', expires_in => '10 s');
    ids := array[pgqueue.enqueue(queue, '5', expires_in => '1 h'), pgqueue.enqueue(queue, '6')];
    return next is(pgqueue.purge_expired(queue), 0, queue || ': purge_expired does not purge messages before they expire');
    perform pg_temp.pass('10 s');
    return next is(pgqueue.purge_expired(queue, 2), 2, queue || ': purge_expired purges at most batch_size messages');
    return next is(pgqueue.purge_expired(queue), 2, queue || ': purge_expired returns the number of purged messages, including scheduled ones');
    return next is(pgqueue.purge_expired(queue), 0, queue || ': purge_expired returns 0 if no expired message is left');
    return next is((select array_agg(b.id) from pgqueue.browse(queue) b), ids, queue || ': purge_expired leaves messages that have not expired');
    return next is((select s.dead_messages from pgqueue.stats(queue) s), 0::bigint, queue || ': purge_expired makes no dead letters by default');
    return next is(pgqueue.ack(queue, m.id, m.claim_token), true, queue || ': purge_expired leaves an expired message that is in flight to its consumer');

    perform pgqueue.alter_queue(queue, dead_letter_expired => true);
    perform pgqueue.purge_queue(queue);
    ids := array(select pgqueue.enqueue_batch(queue, array['7', '8']::jsonb[], delays => array['0', '1 h']::interval[], expires_in => '10 s'));
    perform pg_temp.pass('10 s');
    return next is(pgqueue.purge_expired(queue), 2, queue || ': purge_expired with dead_letter_expired returns the number of purged messages');
    return next is((select array_agg((d.id, d.reason, d.died_at)::text) from pgqueue.browse_dead_messages(queue) d),
        array[(ids[1], 'expired'::text, pgqueue._now())::text, (ids[2], 'expired'::text, pgqueue._now())::text], queue || ': purge_expired with dead_letter_expired makes dead letters with reason expired');
    return next is((select array_agg(d.payload) from pgqueue.browse_dead_messages(queue) d), array['7', '8']::jsonb[], queue || ': dead letters with reason expired keep their payload');
    insert into pgqueue.messages (id, queue_name, payload, visible_at, expires_at) values (ids[1], queue, '7', pgqueue._now(), pgqueue._now());
    return next is(pgqueue.purge_expired(queue), 1, queue || ': purge_expired purges an expired message whose id is also that of a dead letter');

    -- Messages that have no attempt left.
    perform pgqueue.alter_queue(queue, dead_letter_expired => false);
    perform pgqueue.purge_dead_messages(queue);
    insert into pgqueue.messages (queue_name, payload, visible_at, max_attempts, expires_at) values (queue, '9', pgqueue._now(), 1, pgqueue._now() + interval '40 s');
    perform pgqueue.claim(queue);
    perform pg_temp.pass('1 min');
    return next is(pgqueue.purge_expired(queue), 1, queue || ': purge_expired purges an expired message whose attempts are exhausted');
    return next is((select array_agg((d.payload, d.reason, d.attempt_count)::text) from pgqueue.browse_dead_messages(queue) d), array[('9'::jsonb, 'attempts_exhausted'::text, 1)::text],
        queue || ': purge_expired makes a dead letter with reason attempts_exhausted of such a message, as claim does');
    perform pgqueue.alter_queue(queue, dead_letter_expired => true, dlq_enabled => false);
    insert into pgqueue.messages (queue_name, payload, visible_at, attempt_count, max_attempts, expires_at) values (queue, '10', pgqueue._now(), 1, 1, pgqueue._now());
    return next is(pgqueue.purge_expired(queue), 1, queue || ': purge_expired purges a message with exhausted attempts if the queue has no dead letters');
    return next is((select count(*) from pgqueue.browse_dead_messages(queue)), 1::bigint, queue || ': purge_expired makes no dead letter if the queue has none');
    update pgqueue.dead_messages d set expires_at = pgqueue._now() - interval '1 s' where d.queue_name = queue;
    perform pgqueue.purge_expired(queue), pgqueue.claim(queue, 10);
    return next is((select count(*) from pgqueue.browse_dead_messages(queue)), 1::bigint, queue || ': purge_expired and claim leave a dead letter whose expiry has passed');
end;
$$;
select pg_temp.removes('expire_shared', false);
select pg_temp.removes('expire_dedicated', true);

select throws_ok($$ select pgqueue.purge_expired('expire_shared', 0) $$, '22023', null, 'purge_expired refuses a batch of zero messages');
select throws_ok($$ select pgqueue.purge_expired('expire_shared', 1000001) $$, '22023', null, 'purge_expired refuses a batch of more than a million messages');
select throws_ok($$ select pgqueue.purge_expired('expire_shared', null) $$, '22023', null, 'purge_expired refuses a null batch size');
select throws_ok($$ select pgqueue.purge_expired('expire_nowhere') $$, 'PQ001', null, 'purge_expired refuses an unknown queue');
select lives_ok($$ select pgqueue.purge_expired('expire_shared', 1000000) $$, 'purge_expired accepts a batch of a million messages');

select * from finish();
rollback;
