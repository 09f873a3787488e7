begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(123);

create function pg_temp.is_a_queue(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    made pgqueue.queue;
    q pgqueue.queue;
    ids bigint[];
    m pgqueue.message;
begin
    made := pgqueue.create_queue(queue, dedicated => has_table);
    return next is(
        (made.name, made.visibility_timeout, made.max_attempts, made.dlq_enabled, made.dead_letter_expired, made.max_payload_bytes)::text,
        (queue, interval '30 s', 5, true, false, 262144)::text, queue || ': a new queue has the documented default settings');
    return next is((made.backoff_base, made.backoff_factor, made.backoff_max, made.backoff_jitter)::text,
        (interval '1 s', 2::double precision, interval '10 min', 0.2::double precision)::text, queue || ': a new queue has the documented default backoff');
    return next is((made.dedicated, made.paused_at, made.created_at, made.updated_at)::text, (has_table, null::timestamptz, pgqueue._now(), pgqueue._now())::text,
        queue || ': create_queue returns whether the queue is dedicated, and when it was created');
    return next is(pgqueue.get_queue(queue)::text, made::text, queue || ': get_queue returns what create_queue returned');
    return next is((select l::text from pgqueue.list_queues() l where l.name = queue), made::text, queue || ': list_queues returns what create_queue returned');
    return next is((select (t.visibility_timeout, t.max_attempts, t.dlq_enabled)::text from pgqueue.queues t where t.name = queue), '(00:00:30,5,t)',
        queue || ': the table queues has the columns of the contract');
    return next is(pgqueue.create_queue(queue, visibility_timeout => '1 h', if_not_exists => true)::text, made::text, queue || ': create_queue with if_not_exists returns an existing queue unchanged');
    return next throws_ok(format('select pgqueue.create_queue(%L)', queue), 'PQ002', null, queue || ': create_queue refuses the name of an existing queue');

    perform pg_temp.pass('1 min');
    return next is(pgqueue.alter_queue(queue)::text, pgqueue.get_queue(queue)::text, queue || ': alter_queue with only nulls changes nothing and raises no error');
    q := pgqueue.alter_queue(queue, visibility_timeout => '1 min');
    return next is(
        (q.visibility_timeout, q.max_attempts, q.dlq_enabled, q.dead_letter_expired, q.max_payload_bytes, q.backoff_base, q.backoff_factor, q.backoff_max, q.backoff_jitter)::text,
        (interval '1 min', made.max_attempts, made.dlq_enabled, made.dead_letter_expired, made.max_payload_bytes, made.backoff_base, made.backoff_factor, made.backoff_max, made.backoff_jitter)::text,
        queue || ': alter_queue leaves settings that are null unchanged');
    return next is((q.created_at, q.updated_at)::text, (made.created_at, pgqueue._now())::text, queue || ': alter_queue sets updated_at');
    q := pgqueue.alter_queue(queue, '2 min', 7, false, true, 1000, '2 s', 3, '1 h', 0.5);
    return next is(
        (q.visibility_timeout, q.max_attempts, q.dlq_enabled, q.dead_letter_expired, q.max_payload_bytes, q.backoff_base, q.backoff_factor, q.backoff_max, q.backoff_jitter)::text,
        (interval '2 min', 7, false, true, 1000, interval '2 s', 3::double precision, interval '1 h', 0.5::double precision)::text,
        queue || ': alter_queue changes every setting');
    return next is(pgqueue.get_queue(queue)::text, q::text, queue || ': get_queue returns the changed settings');

    perform pgqueue.alter_queue(queue, max_attempts => 2, visibility_timeout => '30 s', dlq_enabled => true);
    perform pgqueue.enqueue(queue, '1');
    perform pgqueue.alter_queue(queue, max_attempts => 9);
    return next is((select c.max_attempts from pgqueue.claim(queue) c), 2, queue || ': a message keeps the max_attempts of the time when it was sent');
    perform pgqueue.enqueue(queue, '1');
    return next is((select c.max_attempts from pgqueue.claim(queue) c), 9, queue || ': a message sent after alter_queue has the new max_attempts');
    perform pgqueue.purge_queue(queue);

    ids := array(select pgqueue.enqueue_batch(queue, array['1', '2']::jsonb[]));
    select * into m from pgqueue.claim(queue);
    return next is(pgqueue.pause_queue(queue), true, queue || ': pause_queue of a running queue returns true');
    return next is(pgqueue.pause_queue(queue), false, queue || ': pause_queue of a paused queue returns false');
    return next is((pgqueue.get_queue(queue)).paused_at, pgqueue._now(), queue || ': get_queue returns when the queue was paused');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': claim returns no message of a paused queue');
    return next is((select count(*) from pgqueue.receive(queue)), 0::bigint, queue || ': receive returns no message of a paused queue');
    return next is((select count(*) from pgqueue.exchange(queue, null, null)), 0::bigint, queue || ': exchange returns no message of a paused queue');
    return next ok(pgqueue.enqueue(queue, '3') > ids[2], queue || ': enqueue sends to a paused queue');
    return next is(pgqueue.extend(queue, m.id, m.claim_token), true, queue || ': extend works in a paused queue');
    return next is(pgqueue.ack(queue, m.id, m.claim_token), true, queue || ': ack works in a paused queue');
    return next is(pgqueue.resume_queue(queue), true, queue || ': resume_queue of a paused queue returns true');
    return next is(pgqueue.resume_queue(queue), false, queue || ': resume_queue of a running queue returns false');
    return next is((pgqueue.get_queue(queue)).paused_at, null, queue || ': paused_at is null after resume_queue');
    return next is((select count(*) from pgqueue.claim(queue, 10)), 2::bigint, queue || ': claim returns all messages of a resumed queue, including those sent during the pause');
    perform pgqueue.purge_queue(queue);

    -- Two messages are ready, one is in flight, one is scheduled, one is dead.
    perform pgqueue.enqueue(queue, '0');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.reject(queue, m.id, m.claim_token);
    perform pgqueue.enqueue(queue, '0');
    perform pgqueue.claim(queue);
    perform pgqueue.enqueue_batch(queue, array['1', '2', '3']::jsonb[], delays => array[null, '1 h', null]::interval[]);
    return next is(pgqueue.purge_queue(queue), 4::bigint, queue || ': purge_queue returns the number of ready, scheduled and claimed messages');
    return next is((select (s.ready_messages, s.inflight_messages, s.scheduled_messages, s.dead_messages)::text from pgqueue.stats(queue) s), '(0,0,0,1)',
        queue || ': purge_queue deletes all messages and leaves dead letters');
    return next is(pgqueue.purge_queue(queue), 0::bigint, queue || ': purge_queue of an empty queue returns 0');
    ids := array[pgqueue.enqueue(queue, '1')];
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids, queue || ': a purged queue accepts and returns new messages');

    perform pgqueue.create_queue(queue || '_beside');
    perform pgqueue.enqueue(queue || '_beside', '1');
    perform pgqueue.enqueue_batch(queue, array['1', '2']::jsonb[]);
    return next is(pgqueue.drop_queue(queue), 4::bigint, queue || ': drop_queue returns the number of its messages, including dead letters');
    return next is((select count(*) from pgqueue.list_queues() l where l.name = queue), 0::bigint, queue || ': list_queues does not return a dropped queue');
    return next throws_ok(format('select pgqueue.drop_queue(%L)', queue), 'PQ001', null, queue || ': drop_queue of a dropped queue raises an error');
    return next throws_ok(format('select pgqueue.enqueue(%L, %L)', queue, 1), 'PQ001', null, queue || ': enqueue to a dropped queue raises an error');
    return next is((select count(*) from pgqueue.claim(queue || '_beside')), 1::bigint, queue || ': drop_queue leaves the messages of other queues');
    return next is((select count(*) from pg_class c where c.relnamespace = 'pgqueue'::regnamespace and c.relname ~ format('^(queue|messages)_%s(_|$)',
        (select t.queue_id - 1 from pgqueue.queues t where t.name = queue || '_beside'))), 0::bigint, queue || ': no table and no register of a dropped queue is left');
    made := pgqueue.create_queue(queue, dedicated => not has_table);
    return next is((select (s.ready_messages, s.inflight_messages, s.scheduled_messages, s.dead_messages)::text from pgqueue.stats(queue) s), '(0,0,0,0)',
        queue || ': the name of a dropped queue can be used again, for an empty queue');
    ids := array(select pgqueue.enqueue_batch(queue, array['1', '2']::jsonb[]));
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids, queue || ': a queue with a reused name accepts and returns messages');
    perform pgqueue.drop_queue(queue);
end;
$$;
create function pg_temp.creates_under_a_collation() returns text language plpgsql as $$
begin
    create collation pg_temp.ignores_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
    return lives_ok($q$ select pgqueue.create_queue('queue_e' collate pg_temp.ignores_case, dedicated => true) $q$,
        'create_queue creates a dedicated queue although the collation of its name is nondeterministic');
end;
$$;
select pg_temp.is_a_queue('queue_shared', false);
select pg_temp.is_a_queue('queue_dedicated', true);

select lives_ok($$ select pgqueue.create_queue('queue_b', dedicated => true) $$, 'a dedicated queue is created');
select lives_ok($$ select pgqueue.create_queue('queue_a') $$, 'a shared queue is created');
select lives_ok($$ select pgqueue.create_queue('queue-c', '1 s', 1, max_payload_bytes => 1, backoff_base => '0 s', backoff_factor => 1, backoff_max => '0 s', backoff_jitter => 0) $$,
    'create_queue accepts every setting at its lower bound');
select lives_ok($$ select pgqueue.create_queue('queue_d', '43200 s', 100, max_payload_bytes => 104857600, backoff_base => '30 days', backoff_factor => 100, backoff_max => '30 days', backoff_jitter => 1) $$,
    'create_queue accepts every setting at its upper bound');
select is((select array_agg(l.name) from pgqueue.list_queues() l where l.name ~ '^queue[_-].$'), array['queue-c', 'queue_a', 'queue_b', 'queue_d'], 'list_queues returns queues in order of name');
select lives_ok($$ select pgqueue.enqueue('queue_b', '1') $$, 'a message is sent to the dedicated queue');
select is((select count(*) from pgqueue.messages_shared m where m.queue_name = 'queue_b'), 0::bigint, 'the table messages_shared holds no message of a dedicated queue');

select throws_ok(format('select pgqueue.create_queue(%L, %s)', 'queue_bad', s.setting), '22023', null, 'create_queue refuses ' || s.setting)
from unnest(array[
    $$ visibility_timeout => '0.999 s' $$, $$ visibility_timeout => '43201 s' $$, $$ visibility_timeout => '-1 s' $$, $$ visibility_timeout => null $$,
    $$ max_attempts => -1 $$, $$ max_attempts => 101 $$, $$ max_attempts => null $$, $$ dlq_enabled => null $$, $$ dedicated => null $$, $$ dead_letter_expired => null $$,
    $$ max_payload_bytes => 0 $$, $$ max_payload_bytes => 104857601 $$, $$ backoff_base => '-1 s' $$, $$ backoff_base => '31 days' $$, $$ backoff_factor => 0.9 $$,
    $$ backoff_factor => 101 $$, $$ backoff_factor => 'NaN' $$, $$ backoff_max => '-1 s' $$, $$ backoff_max => '31 days' $$, $$ backoff_jitter => -0.1 $$, $$ backoff_jitter => 1.1 $$
]) as s (setting);
select is((select count(*) from pgqueue.list_queues() l where l.name = 'queue_bad'), 0::bigint, 'a refused create_queue creates no queue');
select throws_ok($$ select pgqueue.alter_queue('queue_a', visibility_timeout => '43201 s') $$, '22023', null, 'alter_queue refuses a visibility timeout over 12 hours');
select throws_ok($$ select pgqueue.alter_queue('queue_a', max_attempts => -1) $$, '22023', null, 'alter_queue refuses a max_attempts below 0');
select throws_ok($$ select pgqueue.alter_queue('queue_a', backoff_jitter => 2) $$, '22023', null, 'alter_queue refuses a backoff_jitter over 1');

-- Without a limit of attempts
select is((pgqueue.create_queue('queue_endless', '1 s', 0, backoff_jitter => 0)).max_attempts, 0, 'create_queue accepts a max_attempts of 0 and returns it');
select is((pgqueue.get_queue('queue_endless')).max_attempts, 0, 'get_queue returns it');
select is((select l.max_attempts from pgqueue.list_queues() l where l.name = 'queue_endless'), 0, 'list_queues returns it');
select is((select q.max_attempts from pgqueue.queues q where q.name = 'queue_endless'), 2147483647, 'the table has the highest integer, so that plain SQL can compare attempt_count with it');
select pgqueue.enqueue('queue_endless', '1'), pgqueue.enqueue('queue_endless', '2', delay => '1 h') \g /dev/null
select is(array(select m.max_attempts from pgqueue.messages m where m.queue_name = 'queue_endless' union all select s.max_attempts from pgqueue.scheduled_messages s where s.queue_name = 'queue_endless'),
    '{2147483647,2147483647}', 'its messages have the highest integer, too');
update pgqueue.messages set attempt_count = 1000000 where queue_name = 'queue_endless';
select is((select pgqueue.nack('queue_endless', c.id, c.claim_token) from pgqueue.claim('queue_endless') c), true, 'a message that has failed a million times fails again');
select ok((select s.attempt_count = 1000001 and s.due_at between pgqueue._now() + interval '9 min' and pgqueue._now() + interval '10 min' from pgqueue.scheduled_messages s where s.queue_name = 'queue_endless' and s.payload = '1'),
    'it is scheduled for a retry, after the longest backoff');
select is((pgqueue.alter_queue('queue_endless', max_attempts => 3)).max_attempts, 3, 'alter_queue sets a limit');
select is((pgqueue.alter_queue('queue_endless', max_attempts => 0, backoff_jitter => 1)).max_attempts, 0, 'alter_queue removes it');
select is((pgqueue.alter_queue('queue_endless', backoff_jitter => 0)).max_attempts, 0, 'alter_queue without the argument leaves it');

-- A build of PostgreSQL without ICU has no such collation.
select case when not exists (select from pg_collation c where c.collname ~ '-x-icu$')
    then skip('this build of PostgreSQL has no ICU, and so no nondeterministic collation', 1)
    else pg_temp.creates_under_a_collation() end;

select * from finish();
rollback;
