begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(70);

-- Ids from first_id on: the first and the last of 1,600,000, and 2,839 at the beginning of a range that stats samples.
create function pg_temp.burst(first_id bigint) returns setof bigint language sql as $$
    select first_id
    union all
    select r.from_id + n
    from (select from_id from pgqueue._sample_ranges(int8multirange(int8range(first_id, first_id + 1600000))) limit 1) r, generate_series(1, 2839) n
    union all
    select first_id + 1599999
$$;

create function pg_temp.measures(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    s pgqueue.queue_stats;
    m pgqueue.message;
    far bigint;
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', max_attempts => 5, dedicated => has_table);
    return next is(pgqueue.stats(queue)::text, (queue, 0::bigint, 0::bigint, 0::bigint, 0::bigint, null::double precision, false, '{}'::text[], 0::bigint, 0::bigint, 0::bigint, 0::bigint)::text,
        queue || ': stats of an empty queue returns no messages, no age and no estimates');
    perform pgqueue.enqueue(queue, '1');
    perform pg_temp.pass('2 s');
    perform pgqueue.enqueue_batch(queue, array['2', '3', '4', '5', '6']::jsonb[], delays => array[null, null, null, '1 min', '1 h']::interval[]);
    perform pg_temp.pass('45.2 s');
    s := pgqueue.stats(queue);
    return next is((s.ready_messages, s.inflight_messages, s.scheduled_messages, s.dead_messages)::text, '(4,0,2,0)', queue || ': stats counts ready and scheduled messages separately');
    return next is(s.oldest_age_seconds, 47.2::double precision, queue || ': oldest_age_seconds is the age of the oldest ready message');
    return next is(s.estimates, '{}'::text[], queue || ': stats of a small queue estimates nothing');
    select * into m from pgqueue.claim(queue);
    s := pgqueue.stats(queue);
    return next is((s.ready_messages, s.inflight_messages)::text, '(3,1)', queue || ': stats counts a claimed message as in flight and not as ready');
    return next is(s.oldest_age_seconds, 45.2::double precision, queue || ': oldest_age_seconds ignores messages in flight');
    perform pg_temp.pass('30 s');
    s := pgqueue.stats(queue);
    return next is((s.ready_messages, s.inflight_messages, s.scheduled_messages)::text, '(5,0,1)', queue || ': stats counts messages with expired claims and due messages as ready');
    return next is(s.oldest_age_seconds, 77.2::double precision, queue || ': oldest_age_seconds counts a message with an expired claim from enqueued_at');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.reject(queue, m.id, m.claim_token);
    return next is((pgqueue.stats(queue)).dead_messages, 1::bigint, queue || ': stats counts dead letters');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.nack(queue, m.id, m.claim_token, '10 min');
    return next is((pgqueue.stats(queue)).scheduled_messages, 2::bigint, queue || ': stats counts a message given back with a delay as scheduled');
    perform pgqueue.purge_queue(queue);
    perform pgqueue.enqueue(queue, '7', expires_in => '1 s');
    perform pg_temp.pass('1 s');
    s := pgqueue.stats(queue);
    return next is((s.ready_messages, s.oldest_age_seconds)::text, '(0,)', queue || ': stats does not count an expired message as ready');
    perform pgqueue.purge_queue(queue);
    perform pgqueue.pause_queue(queue);
    return next is((pgqueue.stats(queue)).paused, true, queue || ': stats shows that a queue is paused');
    perform pgqueue.resume_queue(queue);

    -- Another queue has taken ids before, so the ids of this queue are consecutive but start far from the first.
    perform nextval('pgqueue.message_id') from generate_series(1, 50000);
    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[300]));
    perform pgqueue.claim(queue, 120);
    s := pgqueue.stats(queue);
    return next is((s.ready_messages, s.inflight_messages, s.estimates)::text, '(180,120,{})', queue || ': stats counts up to 300 messages exactly');
    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[9700]));
    perform pgqueue.claim(queue, 1880);
    s := pgqueue.stats(queue);
    return next is((s.ready_messages, s.inflight_messages, s.estimates)::text, '(8000,2000,{})', queue || ': stats counts up to 10,000 messages exactly');
    perform pgqueue.claim(queue, 7999);
    s := pgqueue.stats(queue);
    return next is((s.ready_messages, s.inflight_messages, s.estimates)::text, '(1,9999,{})', queue || ': stats counts one ready message behind 9,999 in flight');
    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[30000]));
    s := pgqueue.stats(queue);
    return next ok(s.ready_messages between 27000 and 33000, queue || ': the estimate of 30,001 ready messages is within a tenth');
    return next ok(s.inflight_messages between 9000 and 11000, queue || ': the estimate of 9,999 messages in flight is within a tenth');
    return next ok(s.estimates @> array['ready_messages', 'inflight_messages', 'oldest_age_seconds'], queue || ': the column estimates names the estimated columns');
    return next ok(not s.estimates @> array['dead_messages'], queue || ': the column estimates does not name dead_messages, which was counted');
    perform pgqueue.purge_queue(queue);
    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[10000]), delay => '1 h');
    s := pgqueue.stats(queue);
    return next is((s.scheduled_messages, s.estimates)::text, '(10000,{})', queue || ': stats counts up to 10,000 scheduled messages exactly');
    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[20000]), delay => '1 h');
    s := pgqueue.stats(queue);
    return next ok(s.scheduled_messages between 27000 and 33000 and s.estimates @> array['scheduled_messages'], queue || ': stats estimates 30,000 scheduled messages within a tenth');
    perform pgqueue.purge_queue(queue);

    -- A requeued message lies in a range that sweeps have recorded as vacant.
    far := pgqueue.enqueue(queue, '1', expires_in => '1 h');
    perform pgqueue.nack(queue, c.id, c.claim_token, '1 s') from pgqueue.claim(queue) c;
    perform pg_temp.pass('2 s');
    perform pgqueue.claim(queue);
    update pgqueue.sweep_state w set vacant_ids = int8multirange(int8range(null, 5), int8range(6, far + 1)) where w.queue_name = queue;
    s := pgqueue.stats(queue);
    return next is((s.ready_messages, s.inflight_messages, s.estimates)::text, '(0,1,{})', queue || ': stats counts a requeued message that is claimed');
    perform pg_temp.pass('31 s');
    s := pgqueue.stats(queue);
    return next is((s.ready_messages, s.inflight_messages, s.oldest_age_seconds)::text, '(1,0,33)', queue || ': stats counts a requeued message whose claim has expired as ready');
    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[400]));
    s := pgqueue.stats(queue);
    return next ok(s.ready_messages = 401 and s.oldest_age_seconds = 33, queue || ': stats counts a requeued message among 400 others and uses its age');
    perform pg_temp.pass('1 h');
    s := pgqueue.stats(queue);
    return next ok(s.ready_messages = 400 and s.oldest_age_seconds = 3600, queue || ': stats does not count a requeued message that has expired');
    perform pgqueue.purge_queue(queue);
    -- Bursts of messages with gaps between their ids.
    insert into pgqueue.messages (id, queue_name, payload) select far + n + 200 * (n / 50), queue, '1' from generate_series(0, 9899) n;
    s := pgqueue.stats(queue);
    return next is((s.ready_messages, s.estimates)::text, '(9900,{})', queue || ': stats counts up to 10,000 messages exactly also if they were sent in bursts');
    perform pgqueue.purge_queue(queue);
    -- A sample hits the only burst in a wide range of ids.
    insert into pgqueue.messages (id, queue_name, payload)
    select i, queue, '1'
    from pg_temp.burst(far + 1) i;
    s := pgqueue.stats(queue);
    return next is((s.ready_messages, s.estimates)::text, '(2841,{})', queue || ': stats counts a burst of 2,841 messages that a sample hits exactly');
    perform pgqueue.purge_queue(queue);
    -- Stats samples more than ten thousand requeued messages.
    insert into pgqueue.messages (id, queue_name, payload, visible_at, attempt_count)
    select far - n, queue, '1', pgqueue._now() + interval '1 min', 1 from generate_series(1, 2400) n;
    insert into pgqueue.requeued_messages (queue_name, check_at, id) select queue, pgqueue._now(), far - n from generate_series(1, 2400) n, generate_series(1, 2);
    s := pgqueue.stats(queue);
    return next is((s.inflight_messages, s.estimates)::text, '(2400,{})', queue || ': stats counts 2,400 requeued messages');
    insert into pgqueue.messages (id, queue_name, payload, visible_at, attempt_count)
    select far - n, queue, '1', pgqueue._now() + interval '1 min', 1 from generate_series(2401, 12000) n;
    insert into pgqueue.requeued_messages (queue_name, check_at, id) select queue, pgqueue._now(), far - n from generate_series(2401, 12000) n;
    s := pgqueue.stats(queue);
    return next ok(s.inflight_messages between 10800 and 13200 and s.estimates @> array['inflight_messages'], queue || ': the estimate of 12,000 requeued messages is within a tenth');
    perform pgqueue.purge_queue(queue);

    -- Dead letters.
    delete from pgqueue.requeued_messages r where r.queue_name = queue;
    perform pgqueue.purge_dead_messages(queue);
    insert into pgqueue.dead_messages (id, queue_name, enqueued_at, attempt_count, max_attempts, reason)
    select i, queue, pgqueue._now(), 1, 1, 'rejected'
    from pg_temp.burst(far + 1) i;
    insert into pgqueue.scheduled_messages (id, queue_name, due_at, enqueued_at, attempt_count, max_attempts, payload)
    select d.id, queue, pgqueue._now() + interval '1 h', pgqueue._now(), 0, 1, '1' from pgqueue.dead_messages d where d.queue_name = queue;
    s := pgqueue.stats(queue);
    return next is((s.scheduled_messages, s.dead_messages, s.estimates)::text, '(2841,2841,{})', queue || ': stats counts a burst of scheduled messages or dead letters that a sample hits exactly');
    delete from pgqueue.scheduled_messages c where c.queue_name = queue;
    perform pgqueue.purge_dead_messages(queue);
    insert into pgqueue.dead_messages (id, queue_name, enqueued_at, attempt_count, max_attempts, reason)
    select far + n, queue, pgqueue._now(), 1, 1, 'rejected' from generate_series(1, 10000) n;
    s := pgqueue.stats(queue);
    return next is((s.dead_messages, s.estimates)::text, '(10000,{})', queue || ': stats counts up to 10,000 dead letters exactly');
    insert into pgqueue.dead_messages (id, queue_name, enqueued_at, attempt_count, max_attempts, reason)
    select far + 10000 + n, queue, pgqueue._now(), 1, 1, 'rejected' from generate_series(1, 20000) n;
    s := pgqueue.stats(queue);
    return next ok(s.dead_messages between 27000 and 33000 and s.estimates = array['dead_messages'], queue || ': stats estimates 30,000 dead letters within a tenth');
    perform pgqueue.purge_dead_messages(queue);
end;
$$;
select pg_temp.measures('stats_shared', false);
select pg_temp.measures('stats_dedicated', true);

select is((select array_agg(s.queue_name) from pgqueue.stats() s where s.queue_name like 'stats\_%'), array['stats_dedicated', 'stats_shared'], 'stats without a name returns every queue in order of name');
select is((select array_agg(s.queue_name) from pgqueue.stats() s), (select array_agg(l.name) from pgqueue.list_queues() l), 'stats without a name returns the queues that list_queues returns');
select is((select array_agg(s::text) from pgqueue.stats(null) s where s.queue_name = 'stats_shared'), (select array_agg(s::text) from pgqueue.stats('stats_shared') s), 'stats of null returns the same figures as stats of the queue');
select throws_ok($$ select pgqueue.stats('stats_nowhere') $$, 'PQ001', null, 'stats refuses an unknown queue');
select throws_ok($$ select pgqueue.stats('') $$, 'PQ001', null, 'stats refuses an empty queue name');
select is(
    (select array_agg(format('%s %s', a.attname, format_type(a.atttypid, a.atttypmod)) order by a.attnum) from pg_attribute a where a.attrelid = 'pgqueue.queue_stats'::regclass),
    array['queue_name text', 'ready_messages bigint', 'inflight_messages bigint', 'scheduled_messages bigint', 'dead_messages bigint', 'oldest_age_seconds double precision', 'paused boolean', 'estimates text[]', 'enqueued_total bigint', 'acknowledged_total bigint', 'failed_total bigint', 'dead_total bigint'],
    'the type pgqueue.queue_stats has exactly the documented attributes');

select * from finish();
rollback;
