begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(53);

create function pg_temp.counts(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    before text;
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', max_attempts => 5, dedicated => has_table);
    return next is(pgqueue.peek(queue), 0, queue || ': peek of an empty queue returns 0');
    perform pgqueue.enqueue_batch(queue, array['1', '2', '3']::jsonb[]);
    return next is(pgqueue.peek(queue), 3, queue || ': peek returns the number of ready messages');
    return next is(pgqueue.peek(queue, 2), 2, queue || ': peek counts at most max_records messages');
    return next is(pgqueue.peek(queue, 1), 1, queue || ': peek with max_records 1 returns 1 if more messages are ready');
    before := (select array_agg(x::text order by x.id)::text from pgqueue.messages x where x.queue_name = queue);
    perform pgqueue.peek(queue);
    return next is((select array_agg(x::text order by x.id)::text from pgqueue.messages x where x.queue_name = queue), before, queue || ': peek changes no message');
    -- Use a plain update: a row that claim has locked counts as claimed until this transaction ends.
    update pgqueue.messages x set visible_at = pgqueue._now() + interval '30 s', attempt_count = 1
    where x.queue_name = queue and x.id = (select min(b.id) from pgqueue.browse(queue) b);
    return next is(pgqueue.peek(queue), 2, queue || ': peek does not count messages in flight');
    update pgqueue.messages x set attempt_count = 5 where x.queue_name = queue and x.attempt_count = 1;
    perform pgqueue.enqueue(queue, '4', delay => '10 s');
    return next is(pgqueue.peek(queue), 2, queue || ': peek does not count scheduled messages');
    perform pg_temp.pass('10 s');
    return next is(pgqueue.peek(queue), 3, queue || ': peek counts messages that became due');
    perform pgqueue.enqueue(queue, '5', expires_in => '5 s');
    return next is(pgqueue.peek(queue), 4, queue || ': peek counts messages that have not expired');
    perform pg_temp.pass('5 s');
    return next is(pgqueue.peek(queue), 3, queue || ': peek does not count expired messages');
    perform pg_temp.pass('30 s');
    return next is(pgqueue.peek(queue), 3, queue || ': peek does not count messages whose attempts are exhausted');
    perform pgqueue.pause_queue(queue);
    return next is(pgqueue.peek(queue), 0, queue || ': peek of a paused queue returns 0');
    perform pgqueue.resume_queue(queue);
    return next is(pgqueue.peek(queue)::bigint, (select count(*) from pgqueue.receive(queue, 100)), queue || ': peek returns the number of messages that receive then returns');
    return next is(pgqueue.peek(queue), 0, queue || ': peek does not count received messages');

    perform pgqueue.purge_queue(queue);
    perform pgqueue.enqueue(queue, '6');
    update pgqueue.messages x set visible_at = pgqueue._now() + interval '30 s', attempt_count = 1
    where x.queue_name = queue;
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': claim returns no row while the only message is in flight');
    perform pg_temp.pass('31 s');
    return next is(pgqueue.peek(queue), 1, queue || ': peek counts a message whose claim has expired');
    delete from pgqueue.sweep_state w where w.queue_name = queue;
    return next is(pgqueue.peek(queue), 1, queue || ': peek counts a message whose claim has expired if the row in sweep_state is missing');
    perform pgqueue.purge_queue(queue);

    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[1000]));
    return next is(pgqueue.peek(queue), 100, queue || ': peek counts up to 100 messages by default');
    return next is(pgqueue.peek(queue, 10000), 1000, queue || ': peek with max_records 10000 counts all 1,000 ready messages');
    perform pgqueue.claim(queue, 900);
    return next is(pgqueue.peek(queue, 1000), 100, queue || ': peek counts 100 ready messages behind 900 in flight');
    perform pgqueue.purge_queue(queue);

    -- A requeued message lies in a range that sweeps have recorded as vacant.
    perform pgqueue.enqueue(queue, '1');
    perform pgqueue.nack(queue, c.id, c.claim_token, '1 s') from pgqueue.claim(queue) c;
    perform pg_temp.pass('2 s');
    perform pgqueue.claim(queue);
    update pgqueue.sweep_state w set vacant_ids = int8multirange(int8range(null, 5), int8range(6, pg_sequence_last_value('pgqueue.message_id') + 1)) where w.queue_name = queue;
    return next is(pgqueue.peek(queue), 0, queue || ': peek does not count a requeued message while it is claimed');
    perform pg_temp.pass('31 s');
    return next is(pgqueue.peek(queue), 1, queue || ': peek counts a requeued message whose claim has expired');
    insert into pgqueue.messages (id, queue_name, payload, visible_at, attempt_count)
    select 6 + n, queue, '1', pgqueue._now() + case when n % 3 = 0 then interval '1 h' else interval '0' end, 0 from generate_series(1, 900) n;
    insert into pgqueue.requeued_messages (queue_name, check_at, id) select queue, pgqueue._now(), 6 + n from generate_series(1, 900) n;
    update pgqueue.messages m set visible_at = pgqueue._now() + interval '1 h' where m.queue_name = queue and m.id > 906;
    return next is(pgqueue.peek(queue), 1, queue || ': peek returns 1 if those requeued messages that it has checked are hidden');
    delete from pgqueue.messages m where m.queue_name = queue and m.id between 7 and 906;
    update pgqueue.messages m set visible_at = pgqueue._now() where m.queue_name = queue;
    delete from pgqueue.sweep_state w where w.queue_name = queue;
    return next is(pgqueue.peek(queue), 1, queue || ': peek counts the requeued message once if the row in sweep_state is missing');
end;
$$;
select pg_temp.counts('peek_shared', false);
select pg_temp.counts('peek_dedicated', true);

select throws_ok($$ select pgqueue.peek('peek_shared', 0) $$, '22023', null, 'peek refuses a max_records of 0');
select throws_ok($$ select pgqueue.peek('peek_shared', 10001) $$, '22023', null, 'peek refuses a max_records over 10,000');
select throws_ok($$ select pgqueue.peek('peek_shared', null) $$, '22023', null, 'peek refuses a max_records of null');
select throws_ok($$ select pgqueue.peek('peek_nowhere') $$, 'PQ001', null, 'peek refuses an unknown queue');
select throws_ok($$ select pgqueue.peek(null) $$, 'PQ001', null, 'peek refuses a null queue');

select * from finish();
rollback;
