begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(105);

create function pg_temp.sweeps(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    new_id bigint;
    ids bigint[];
    m pgqueue.message;
    d pgqueue.dead_message;
    died timestamptz;
    attempts int[] := '{}';
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', max_attempts => 3, dedicated => has_table);

    -- A message whose consumers all crash.
    new_id := pgqueue.enqueue(queue, '{"n": 1}', headers => '{"h": 1}');
    for i in 1..3 loop
        select * into m from pgqueue.claim(queue, claimed_by => 'victim ' || i);
        attempts := attempts || m.attempt_count;
        perform pg_temp.pass('31 s');
    end loop;
    return next is(attempts, array[1, 2, 3], queue || ': claim returns a message whose claims expire max_attempts times');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': claim does not return the message again after max_attempts');
    died := pgqueue._now();
    select * into d from pgqueue.browse_dead_messages(queue);
    return next is((d.id, d.reason, d.attempt_count, d.max_attempts, d.claimed_by)::text, (new_id, 'attempts_exhausted'::text, 3, 3, 'victim 3'::text)::text,
        queue || ': claim moves the message to the dead letters, with reason, attempt_count and the last claimed_by');
    return next is((d.payload, d.headers, d.queue_name)::text, ('{"n": 1}'::jsonb, '{"h": 1}'::jsonb, queue)::text, queue || ': the dead letter keeps payload, headers and queue');
    return next is(d.died_at, died, queue || ': died_at is the time of the claim that moved the message');
    return next is((select count(*) from pgqueue.messages b where b.queue_name = queue), 0::bigint, queue || ': the dead message is not in the queue');
    return next is(pgqueue.ack(queue, new_id, m.claim_token), false, queue || ': ack with the token of the last claim returns false after the message died');
    return next is(pgqueue.nack(queue, new_id, m.claim_token, '0'), false, queue || ': nack with the token of the last claim returns false after the message died');

    -- After a redrive the message dies again.
    return next is(pgqueue.redrive(queue), 1, queue || ': redrive returns 1 for the dead letter');
    select * into m from pgqueue.claim(queue);
    return next is((m.id, m.attempt_count)::text, (new_id, 1)::text, queue || ': claim returns a redriven message under its id, with an attempt_count of 1');
    perform pg_temp.pass('31 s');
    select * into m from pgqueue.claim(queue);
    return next is((m.id, m.attempt_count)::text, (new_id, 2)::text, queue || ': claim returns a redriven message again when its claim has expired');
    perform pg_temp.pass('10 s');
    perform pgqueue.extend(queue, m.id, m.claim_token, '1 h');
    perform pg_temp.pass('59 min');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': claim does not return a redriven message whose claim was extended');
    perform pg_temp.pass('2 min');
    select * into m from pgqueue.claim(queue);
    return next is((m.id, m.attempt_count)::text, (new_id, 3)::text, queue || ': claim returns a redriven message when its extended claim has expired');
    perform pg_temp.pass('31 s');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': claim does not return a redriven message after max_attempts');
    return next is((select array_agg(b.id) from pgqueue.browse_dead_messages(queue) b), array[new_id], queue || ': a redriven message can die again under its id');
    perform pgqueue.purge_dead_messages(queue);

    perform pgqueue.alter_queue(queue, dlq_enabled => false, max_attempts => 1);
    perform pgqueue.enqueue(queue, '2');
    perform pgqueue.claim(queue);
    perform pg_temp.pass('31 s');
    perform pgqueue.claim(queue);
    return next is((select (s.ready_messages, s.inflight_messages, s.dead_messages)::text from pgqueue.stats(queue) s), '(0,0,0)',
        queue || ': a message whose attempts are exhausted is deleted if the queue has no dead letters');
    perform pgqueue.alter_queue(queue, dlq_enabled => true, max_attempts => 3);

    -- Time to live.
    new_id := pgqueue.enqueue(queue, '3', expires_in => '10 s');
    perform pg_temp.pass('9.999 s');
    return next is((select array_agg(b.id) from pgqueue.browse(queue) b), array[new_id], queue || ': a message is ready until it expires');
    perform pg_temp.pass('0.001 s');
    return next is((select count(*) from pgqueue.claim(queue, 10)), 0::bigint, queue || ': claim does not return an expired message');
    return next is((select count(*) from pgqueue.messages b where b.queue_name = queue), 0::bigint, queue || ': the claim that finds an expired message deletes it');

    perform pgqueue.claim(queue);
    return next is((select count(*) from pgqueue.messages b where b.queue_name = queue), 0::bigint, queue || ': an expired message is deleted after two claims at the latest');

    new_id := pgqueue.enqueue(queue, '4', expires_in => '10 s');
    ids := array[pgqueue.enqueue(queue, '5')];
    perform pg_temp.pass('10 s');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 1) c), ids, queue || ': claim skips an expired message and returns the next one');
    perform pgqueue.claim(queue, 10);
    return next is((select array_agg(b.id) from pgqueue.messages b where b.queue_name = queue), ids, queue || ': a later claim deletes the expired message');
    perform pgqueue.purge_queue(queue);

    perform pgqueue.enqueue(queue, '6', delay => '20 s', expires_in => '10 s');
    perform pg_temp.pass('20 s');
    return next is((select count(*) from pgqueue.claim(queue, 10)), 0::bigint, queue || ': claim does not return a message that expired while it was scheduled');
    perform pg_temp.pass('1 s');
    perform pgqueue.claim(queue, 10);
    return next is((select (s.ready_messages, s.scheduled_messages, s.dead_messages)::text from pgqueue.stats(queue) s), '(0,0,0)', queue || ': a later claim deletes a message that expired while it was scheduled');

    new_id := pgqueue.enqueue(queue, '7', expires_in => '10 s');
    select * into m from pgqueue.claim(queue);
    perform pg_temp.pass('20 s');
    perform pgqueue.claim(queue, 10);
    return next is(pgqueue.ack(queue, new_id, m.claim_token), true, queue || ': ack succeeds for a message that expired while it was in flight');
    perform pgqueue.enqueue(queue, '8', expires_in => '10 s');
    select * into m from pgqueue.claim(queue);
    perform pg_temp.pass('31 s');
    return next is((select count(*) from pgqueue.claim(queue, 10)), 0::bigint, queue || ': claim does not return a message again that expired while it was in flight');

    perform pgqueue.alter_queue(queue, dead_letter_expired => true);
    new_id := pgqueue.enqueue(queue, '9', expires_in => '10 s');
    perform pg_temp.pass('11 s');
    perform pgqueue.claim(queue, 10);
    perform pgqueue.claim(queue, 10);
    return next is((select (b.id, b.reason, b.attempt_count)::text from pgqueue.browse_dead_messages(queue) b), (new_id, 'expired'::text, 0)::text,
        queue || ': claim makes a dead letter with reason expired if dead_letter_expired is set');
    perform pgqueue.purge_dead_messages(queue);

    -- Of many claimed messages some are acknowledged. Exactly the others must come back, in any order of claims.
    ids := array(select pgqueue.enqueue_batch(queue, array_agg(to_jsonb(n))) from generate_series(1, 3000) n);
    for m in select * from pgqueue.claim(queue, 3000) loop
        if m.id % 3 <> 0 then
            perform pgqueue.ack(queue, m.id, m.claim_token);
        end if;
    end loop;
    perform pg_temp.pass('31 s');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 3000) c), (select array_agg(i order by i) from unnest(ids) i where i % 3 = 0),
        queue || ': claim returns exactly the messages whose claims have expired, in order of id');
    perform pg_temp.pass('31 s');
    perform pgqueue.claim(queue, 10) from generate_series(1, 20);
    return next is((select count(*) from pgqueue.claim(queue, 3000)), 800::bigint, queue || ': small claims and a large one together return every message with an expired claim once');
    perform pg_temp.pass('31 s');
    perform pgqueue.claim(queue, 10);
    perform pgqueue.claim(queue, 10000);
    return next is((select count(*) from pgqueue.browse_dead_messages(queue, 10000)), 1000::bigint, queue || ': all messages die when their attempts are exhausted');
    perform pgqueue.purge_dead_messages(queue);
    return next is((select (s.ready_messages, s.inflight_messages, s.scheduled_messages)::text from pgqueue.stats(queue) s), '(0,0,0)', queue || ': no message is left in the queue after all have died');

    -- The row in sweep_state may be lost.
    new_id := pgqueue.enqueue(queue, '4');
    perform pgqueue.claim(queue);
    delete from pgqueue.sweep_state s where s.queue_name = queue;
    perform pg_temp.pass('31 s');
    return next is((select s.ready_messages from pgqueue.stats(queue) s), 1::bigint, queue || ': stats counts a message with an expired claim if the row in sweep_state is missing');
    return next ok(pgqueue.next_due_at(queue) <= pgqueue._now(), queue || ': next_due_at is not in the future if the row in sweep_state is missing');
    return next is((select c.id from pgqueue.claim(queue) c), new_id, queue || ': claim returns a message with an expired claim if the row in sweep_state is missing');
    return next ok(exists (select from pgqueue.sweep_state s where s.queue_name = queue), queue || ': claim inserts the missing row in sweep_state');
end;
$$;
select pg_temp.sweeps('sweep_shared', false);
select pg_temp.sweeps('sweep_dedicated', true);

-- Messages far apart: there are more separate occupied ranges than a span can double, and each range takes a step.
select pgqueue.create_queue('scattered', visibility_timeout => '1 h');
create temporary table scattered as select id from pgqueue.enqueue_batch('scattered', array_fill('1'::jsonb, array[200])) as id;
select count(*) from pgqueue.claim('scattered', 200);
delete from pgqueue.messages m using scattered s where m.queue_name = 'scattered' and m.id = s.id and s.id % 2 = 0;
create function pg_temp.knows(every bigint) returns void language sql as $$
    update pgqueue.sweep_state
    set vacant_ids = (
            select range_agg(case when s.id = f.first then int8range(null, s.id) else int8range(s.id, s.id + 1) end)
            from scattered s, (select min(id) as first from scattered where id % 2 = 1) f
            where s.id = f.first or s.id % 2 = 0 and s.id % every = 0 and s.id < f.first + 126),
        settled_id = (select max(s.id) from scattered s), bound_id = (select max(s.id) from scattered s),
        recorded_at = pgqueue._now()
    where queue_name = 'scattered'
$$;
select pg_temp.knows(2);
select ok((select count(*) from pgqueue.sweep_state s, unnest(s.vacant_ids) where s.queue_name = 'scattered') between 60 and 64,
    'sweep_state can hold at least 60 vacant ranges');
select is((select count(*) from pgqueue.claim('scattered')), 0::bigint, 'a sweep that passes 60 vacant ranges returns no claimed message');
select pg_temp.pass('1 h 1 s');
select pg_temp.knows(2);
select is((select count(*) from pgqueue.claim('scattered', 200)), 100::bigint, 'claim returns messages with expired claims from between the vacant ranges');
select pg_temp.knows(2);
select lives_ok($$
    select pgqueue._record_vacant_ids(q, pgqueue._now(), (select max(s.id) + 1 from scattered s))
    from pgqueue.queues q where q.name = 'scattered' $$, '_record_vacant_ids succeeds with 60 vacant ranges');

-- Recording vacant ids costs more than a fast pass of the sweep. After fast passes it therefore happens rarely.
create function pg_temp.records_after(span interval) returns boolean language plpgsql as $$
begin
    perform pg_temp.pass(span);
    perform pgqueue.enqueue('rare', '1');
    perform pgqueue.ack('rare', c.id, c.claim_token) from pgqueue.claim('rare') c;
    perform setval(next_sweep_at, 1) from pgqueue.queues where name = 'rare';
    perform pgqueue.claim('rare');
    return recorded_at = pgqueue._now() from pgqueue.sweep_state where queue_name = 'rare';
end;
$$;
select pgqueue.create_queue('rare');
select ok(pg_temp.records_after('1 s'), 'the first sweep records vacant ids');
select ok(not pg_temp.records_after('29 s'), 'the next sweep after a fast pass does not record vacant ids for 29 seconds');
select ok(pg_temp.records_after('2 s'), 'a sweep after a fast pass records vacant ids after half a minute');
select setval(sweep_resume_id, 2) from pgqueue.queues where name = 'rare';
select ok(pg_temp.records_after('1.1 s'), 'a sweep after a slow pass records vacant ids after about a second');

-- Distant messages cost nothing. All rows that this transaction deletes stay in the tables, as with a horizon held
-- back.
create function pg_temp.buffers(statement text) returns int language plpgsql as $$
declare
    plan json;
begin
    execute 'explain (analyze, buffers, timing off, format json) ' || statement into plan;
    return (plan -> 0 -> 'Plan' ->> 'Shared Hit Blocks')::int + (plan -> 0 -> 'Plan' ->> 'Shared Read Blocks')::int;
end;
$$;
create function pg_temp.goes_straight(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    late_id bigint;
    found_id bigint;
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '1 s', dedicated => has_table);
    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[40000]));
    analyze pgqueue.messages;
    perform pgqueue.claim(queue, 5000, '1 h');
    perform pgqueue.claim(queue, 20);
    perform pg_temp.pass('2 s');
    return next cmp_ok(pg_temp.buffers(format('select pgqueue.claim(%L)', queue)), '<', 2300, queue || ': a claim that takes over expired claims does not read the messages behind them');
    perform pgqueue.purge_queue(queue);

    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[40000]));
    analyze pgqueue.messages;
    perform pgqueue.receive(queue, 10000) from generate_series(1, 4);
    late_id := pgqueue.enqueue(queue, '"late"');
    begin
        perform pgqueue.receive(queue);
        raise exception 'the receive is rolled back';
    exception when raise_exception then null;
    end;
    perform pg_temp.pass('1 s');
    return next cmp_ok(pg_temp.buffers(format('create temp table found on commit drop as select id from pgqueue.claim(%L)', queue)), '<', 800,
        queue || ': a claim that finds a message sent a little late does not read all consumed messages before it');
    select f.id into found_id from found f;
    return next is(found_id, late_id, queue || ': claim returns the message that was sent a little late');
    drop table found;
    perform pgqueue.purge_queue(queue);

    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[12000]), delay => '1 s');
    perform pg_temp.pass('2 s');
    perform pgqueue.receive(queue, 100) from generate_series(1, 90);
    return next cmp_ok(pg_temp.buffers(format('select pgqueue.receive(%L)', queue)), '<', 400, queue || ': receive does not read removed messages again that became due together');
    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[5000]));
    perform pgqueue.reject(queue, c.id, c.claim_token) from pgqueue.claim(queue, 10000) c;
    perform pgqueue.redrive(queue, 10000);
    perform pgqueue.receive(queue, 100) from generate_series(1, 75);
    return next cmp_ok(pg_temp.buffers(format('select pgqueue.receive(%L)', queue)), '<', 400, queue || ': receive does not read removed messages again that were redriven together');
end;
$$;
select pg_temp.goes_straight('straight_shared', false);
select pg_temp.goes_straight('straight_dedicated', true);

-- Claims that find enough messages sweep less often.
select pgqueue.create_queue('lazy', '1 s') is not null as made \gset
create temp table lazy as select n, i from pgqueue.enqueue_batch('lazy', '{1,2,3,4}') with ordinality as e (i, n);
select is((select c.payload from pgqueue.claim('lazy') c), '1', 'a first claim returns the first message');
select pg_temp.pass('4 s') \gset
select is((select c.payload from pgqueue.claim('lazy') c), '2', 'a claim that finds a new message makes no sweep that is late by less than five seconds');
select pg_temp.pass('2 s') \gset
select is((select c.payload from pgqueue.claim('lazy') c), '1', 'a claim makes a sweep that is late by five seconds, and returns a message whose claim has ended');
select is((select c.payload from pgqueue.claim('lazy') c), '2', 'a sweep that has found enough messages is due again at once, before new messages');

-- For a second after a short full pass, a claim that finds too few messages sweeps only if this would find others.
create function pg_temp.next_sweep_at(queue text) returns bigint language sql
as $$ select pg_sequence_last_value(q.next_sweep_at) from pgqueue.queues q where q.name = queue $$;
create function pg_temp.settle(queue text) returns void language plpgsql as $$
begin
    perform setval(q.next_sweep_at, 1) from pgqueue.queues q where q.name = queue;
    perform pgqueue.claim(queue);
    perform setval(q.sweep_resume_id, 1) from pgqueue.queues q where q.name = queue;
end;
$$;
create function pg_temp.probes(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    first_id bigint;
    swept_at bigint;
begin
    perform pgqueue.create_queue(queue, '1 s', max_attempts => 2, dedicated => has_table);
    perform pg_temp.settle(queue);
    swept_at := pg_temp.next_sweep_at(queue);
    perform pg_temp.pass('0.9 s');
    perform pgqueue.claim(queue);
    return next is(pg_temp.next_sweep_at(queue), swept_at, queue || ': a claim does not sweep within a second if a sweep would find nothing');
    perform pgqueue.enqueue(queue, '1');
    return next is((select c.payload from pgqueue.claim(queue, 10) c), '1', queue || ': a claim of ten returns the only message');
    return next is(pg_temp.next_sweep_at(queue), swept_at, queue || ': a claim of ten that has found one message does not sweep within a second');

    perform pg_temp.pass('0.9 s');
    perform pg_temp.settle(queue);
    perform pg_temp.pass('0.2 s');
    return next is((select c.attempt_count from pgqueue.claim(queue) c), 2, queue || ': the next claim returns a message whose claim has ended');
    perform pg_temp.pass('0.9 s');
    perform pg_temp.settle(queue);
    perform pg_temp.pass('0.2 s');
    perform pgqueue.claim(queue);
    return next is((select d.reason from pgqueue.browse_dead_messages(queue) d), 'attempts_exhausted', queue || ': the next claim removes a message without attempts left');
    perform pgqueue.purge_dead_messages(queue);

    perform pg_temp.settle(queue);
    perform pgqueue.enqueue(queue, '1', expires_in => '0.1 s');
    perform pg_temp.pass('0.2 s');
    perform pgqueue.claim(queue);
    return next is((select count(*) from pgqueue.messages m where m.queue_name = queue), 0::bigint, queue || ': the next claim removes a message that has expired');

    first_id := nextval('pgqueue.message_id');
    perform pgqueue.receive(queue) from pgqueue.enqueue(queue, '1');
    perform pg_temp.settle(queue);
    insert into pgqueue.messages (queue_name, id, enqueued_at, visible_at) values (queue, first_id, pgqueue._now(), pgqueue._now());
    return next is((select c.id from pgqueue.receive(queue) c), first_id, queue || ': the next claim returns a message that was committed late');

    perform pgqueue.enqueue(queue, '"due"', delay => '0.5 s');
    perform pg_temp.settle(queue);
    perform setval(q.first_due_at, 9223372036854775807) from pgqueue.queues q where q.name = queue;
    perform pg_temp.pass('1.1 s');
    return next is((select c.payload from pgqueue.claim(queue) c), '"due"', queue || ': a claim a second later returns a message that is due, although its register says never');
    -- It has returned to an id that sweeps skip.
    update pgqueue.sweep_state s set vacant_ids = int8multirange(int8range(null, nextval('pgqueue.message_id') + 1)) where s.queue_name = queue;
    perform pg_temp.pass('0.9 s');
    perform pg_temp.settle(queue);
    perform pg_temp.pass('0.2 s');
    return next is((select c.attempt_count from pgqueue.claim(queue) c), 2, queue || ': the next claim returns a message that requeued_messages lists');
    perform pgqueue.purge_queue(queue);

    insert into pgqueue.messages (queue_name, enqueued_at, visible_at, attempt_count)
    select queue, pgqueue._now(), pgqueue._now() + case n when 599 then interval '1 s' when 600 then interval '2 s' else '1 h' end, 1
    from generate_series(1, 600) n;
    perform pg_temp.pass('0.9 s');
    perform pg_temp.settle(queue);
    perform pg_temp.pass('0.2 s');
    return next is((select count(*) from pgqueue.receive(queue)), 1::bigint, queue || ': the next claim returns a message behind 598 in flight');
    perform pg_temp.pass('0.8 s');
    perform pg_temp.settle(queue);
    perform pgqueue.enqueue(queue, '1');
    perform pg_temp.pass('0.2 s');
    return next is((select count(*) from pgqueue.receive(queue, 10)), 2::bigint, queue || ': a claim of ten returns it beside a new message');
    perform pgqueue.purge_queue(queue);
end;
$$;
select pg_temp.probes('probed_shared', false);

-- One message in flight, and a gap behind it in which messages were consumed.
select pgqueue.create_queue('gap') is not null as made \gset
select min(i) as first_id, max(i) as last_id from pgqueue.enqueue_batch('gap', array_fill('1'::jsonb, array[6000])) as i \gset
select count(*) from pgqueue.claim('gap') \gset
select count(*) from pgqueue.receive('gap', 6000) \gset
update pgqueue.sweep_state
set vacant_ids = int8multirange(int8range(null, :first_id), int8range(:first_id + 1, :last_id + 1)), settled_id = :last_id
where queue_name = 'gap';
select pg_temp.settle('gap') \gset
select cmp_ok(pg_temp.buffers($$ select pgqueue.claim('gap', 10) $$), '<', 60, 'a claim that finds nothing reads no messages that were consumed behind one in flight');

-- 2,000 messages that came due are in flight. A claim of a later message was rolled back.
select pgqueue.create_queue('returned') is not null as made \gset
select count(*) from pgqueue.enqueue_batch('returned', array_fill('1'::jsonb, array[2000]), delay => '1 s') \gset
select pg_temp.pass('2 s') \gset
select count(*) from pgqueue.claim('returned', 2000, '1 h') \gset
select count(*) from pgqueue.enqueue_batch('returned', array_fill('1'::jsonb, array[5000])) \gset
select count(*) from pgqueue.claim('returned', 5000, '1 h') \gset
select max(m.id) as last_id from pgqueue.messages m where m.queue_name = 'returned' \gset
update pgqueue.messages set visible_at = pgqueue._now() where queue_name = 'returned' and id = :last_id;
select setval(q.next_sweep_at, 1), setval(q.sweep_resume_id, 1) from pgqueue.queues q where q.name = 'returned' \gset
select cmp_ok(pg_temp.buffers($$ select pgqueue.claim('returned') $$), '<', 3000, 'a claim that finds a returned message does not read all that came due before');

select * from finish();
rollback;
