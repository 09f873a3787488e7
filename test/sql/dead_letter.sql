begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(126);

-- Three messages die because their only claim expires, one is rejected.
create function pg_temp.die(queue text) returns bigint[] language plpgsql as $$
declare
    ids bigint[];
    m pgqueue.message;
begin
    ids := array(select pgqueue.enqueue_batch(queue, array['{"n": 1}', '{"n": 2}', '{"n": 3}']::jsonb[], headers => array['{"h": 1}', null, null]::jsonb[], expires_in => '1 day'));
    perform pgqueue.claim(queue, 3);
    perform pg_temp.pass('31 s');
    perform pgqueue.claim(queue, 3);
    perform pgqueue.enqueue(queue, '{"n": 4}');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.reject(queue, m.id, m.claim_token, 'poison');
    return ids || m.id;
end;
$$;

create function pg_temp.revives(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    ids bigint[];
    m pgqueue.message;
    sent_at timestamptz := pgqueue._now();
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', max_attempts => 1, dedicated => has_table);
    return next is(pgqueue.redrive(queue), 0, queue || ': redrive returns 0 if there are no dead letters');
    return next is(pgqueue.purge_dead_messages(queue), 0::bigint, queue || ': purge_dead_messages returns 0 if there are no dead letters');

    ids := pg_temp.die(queue);
    return next is((select array_agg(d.id) from pgqueue.browse_dead_messages(queue) d), ids, queue || ': browse_dead_messages returns the messages that died');
    perform pgqueue.alter_queue(queue, max_attempts => 2);
    return next is(pgqueue.redrive(queue, 2), 2, queue || ': redrive returns the number of messages that it sent back');
    return next is((select array_agg(d.id) from pgqueue.browse_dead_messages(queue) d), ids[3:4], queue || ': redrive takes the lowest ids first');
    return next is((select s.ready_messages from pgqueue.stats(queue) s), 2::bigint, queue || ': redriven messages are ready at once');
    select * into m from pgqueue.claim(queue);
    return next is((m.id, m.payload, m.headers, m.enqueued_at)::text, (ids[1], '{"n": 1}'::jsonb, '{"h": 1}'::jsonb, sent_at)::text,
        queue || ': a redriven message keeps its id, its payload, its headers and enqueued_at');
    return next is((m.attempt_count, m.max_attempts, m.expires_at)::text, (1, 2, null::timestamptz)::text,
        queue || ': a redriven message starts with no attempts, the max_attempts of the queue and no expiry');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids[2:2], queue || ': claim returns every redriven message once');

    return next is(pgqueue.redrive(queue, ids => ids[4:4] || ids[4:4] || ids[1:1]), 1, queue || ': redrive of ids skips ids that are not dead letters');
    select * into m from pgqueue.claim(queue);
    return next is((m.id, m.last_error)::text, (ids[4], 'poison'::text)::text, queue || ': a redriven message keeps its last_error');
    return next is((select array_agg(d.id) from pgqueue.browse_dead_messages(queue) d), ids[3:3], queue || ': redrive of ids leaves other dead letters');
    return next is(pgqueue.redrive(queue, ids => '{}'), 0, queue || ': redrive of no ids returns 0');

    perform pgqueue.nack(queue, m.id, m.claim_token, '0', 'again');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.nack(queue, m.id, m.claim_token, '0', 'for good');
    return next is((select (d.attempt_count, d.last_error, d.reason)::text from pgqueue.browse_dead_messages(queue) d where d.id = ids[4]), '(2,"for good",attempts_exhausted)',
        queue || ': a redriven message that dies again keeps its id and has the new reason');

    perform pgqueue.purge_queue(queue);
    return next is(pgqueue.purge_dead_messages(queue, ids[4:4] || ids[1:1]), 1::bigint, queue || ': purge_dead_messages of ids returns the number of dead letters that it deleted');
    return next is((select array_agg(d.id) from pgqueue.browse_dead_messages(queue) d), ids[3:3], queue || ': purge_dead_messages of ids leaves other dead letters');
    return next is(pgqueue.purge_dead_messages(queue, '{}'), 0::bigint, queue || ': purge_dead_messages of no ids returns 0');
    return next is(pgqueue.purge_dead_messages(queue), 1::bigint, queue || ': purge_dead_messages without ids deletes all dead letters of the queue');
    return next is(pgqueue.redrive(queue), 0, queue || ': redrive does not return purged dead letters');
end;
$$;
select pg_temp.revives('dead_letter_shared', false);
select pg_temp.revives('dead_letter_dedicated', true);

create function pg_temp.leaves_other_queues_alone() returns setof text language plpgsql as $$
declare
    ids bigint[];
begin
    perform pgqueue.create_queue('dead_letter_beside', max_attempts => 1, visibility_timeout => '30 s');
    ids := pg_temp.die('dead_letter_beside');
    return next is(pgqueue.redrive('dead_letter_shared', ids => ids), 0, 'redrive takes nothing from another queue');
    return next is(pgqueue.purge_dead_messages('dead_letter_shared', ids), 0::bigint, 'purge_dead_messages takes nothing from another queue');
end;
$$;
select pg_temp.leaves_other_queues_alone();

-- The last consumers died, and no consumer claims.
create function pg_temp.is_abandoned(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    ids bigint[];
    late bigint;
begin
    perform pgqueue.create_queue(queue, max_attempts => 1, visibility_timeout => '30 s', dedicated => has_table);
    ids := array(select pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[3])));
    perform pgqueue.claim(queue, 3);
    late := pgqueue.enqueue(queue, '2', delay => '1 s');
    perform pg_temp.pass('2 s');
    perform pgqueue.claim(queue);
    return next is((select (s.inflight_messages, s.dead_messages)::text from pgqueue.stats(queue) s), '(4,0)', queue || ': messages of a last attempt are in flight until their claims end');
    perform pg_temp.pass('31 s');
    return next is((select s::text from pgqueue.stats(queue) s), format('(%s,0,0,0,4,,f,{},4,0,0,0)', queue), queue || ': stats counts messages without attempts as dead when their last claims have ended');
    return next is((select count(*) from pgqueue.browse(queue)), 0::bigint, queue || ': browse does not show messages without attempts as ready');
    return next is((select array_agg((d.id, d.reason, d.died_at)::text) from pgqueue.browse_dead_messages(queue, 2, ids[1]) d),
        array[(ids[2], 'attempts_exhausted'::text, pgqueue._now() - interval '3 s')::text, (ids[3], 'attempts_exhausted'::text, pgqueue._now() - interval '3 s')::text],
        queue || ': browse_dead_messages shows messages without attempts by page, with the end of their last claim as died_at');
    return next is((select array_agg(f.finding || ': ' || f.detail) from pgqueue.doctor() f where f.queue_name = queue), array['dead_messages: 4 dead letters'], queue || ': doctor reports messages whose attempts are exhausted');
    return next is(pgqueue.purge_dead_messages(queue, ids[1:1]), 1::bigint, queue || ': purge_dead_messages of ids deletes a message without attempts');
    return next is(pgqueue.redrive(queue, ids => ids[2:2]), 1, queue || ': redrive of ids returns a message without attempts to the queue');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids[2:2], queue || ': claim returns a message that was redriven before any claim removed it');
    perform pg_temp.pass('31 s');
    return next is(pgqueue.sweep_queue(queue), 1, queue || ': sweep_queue returns the number of messages that it removed');
    return next is((select array_agg(d.id order by d.id) from pgqueue.dead_messages d where d.queue_name = queue), ids[2:3] || late, queue || ': claim and sweep_queue have moved messages without attempts to the dead letters');
    return next is(pgqueue.sweep_queue(queue), 0, queue || ': sweep_queue returns 0 if there is nothing to remove');
    return next is(pgqueue.redrive(queue), 3, queue || ': redrive returns all of these dead letters to the queue');
    perform pgqueue.claim(queue, 3);
    perform pg_temp.pass('31 s');
    return next is(pgqueue.sweep_queue(queue, 2), 2, queue || ': sweep_queue removes at most max_messages');
    return next is(pgqueue.redrive(queue), 3, queue || ': redrive includes messages that no claim has removed');
    perform pgqueue.claim(queue, 3);
    perform pg_temp.pass('31 s');
    return next is(pgqueue.purge_dead_messages(queue), 3::bigint, queue || ': purge_dead_messages includes messages that no claim has removed');

    perform pgqueue.alter_queue(queue, dlq_enabled => false);
    perform pgqueue.enqueue(queue, '3');
    perform pgqueue.claim(queue);
    perform pg_temp.pass('31 s');
    return next is((select (s.dead_messages, (select count(*) from pgqueue.browse_dead_messages(queue)))::text from pgqueue.stats(queue) s), '(0,0)', queue || ': browse_dead_messages shows no message without attempts if the queue has no dead letters');
    return next is(pgqueue.sweep_queue(queue), 1, queue || ': sweep_queue deletes a message without attempts if the queue has no dead letters');
end;
$$;
select pg_temp.is_abandoned('dead_letter_abandoned', false);
select pg_temp.is_abandoned('dead_letter_abandoned_apart', true);
-- In a queue with groups a claim can take a message that has any number of ready ones before it.
create function pg_temp.is_abandoned_behind_others() returns setof text language plpgsql as $$
declare
    last_id bigint;
begin
    perform pgqueue.create_queue('dead_letter_grouped', max_attempts => 1, visibility_timeout => '30 s', group_limit => 1);
    perform pgqueue.enqueue('dead_letter_grouped', '0');
    perform pgqueue.enqueue_batch('dead_letter_grouped', array_fill('1'::jsonb, array[1100]), group_keys => array_fill('a'::text, array[1100]));
    last_id := pgqueue.enqueue('dead_letter_grouped', '2', group_key => 'b');
    perform pgqueue.claim('dead_letter_grouped', 10);
    perform pg_temp.pass('31 s');
    return next is((pgqueue.stats('dead_letter_grouped')).dead_messages, 3::bigint, 'stats counts a message without attempts behind ready ones of another group as dead');
    return next is((select max(d.id) from pgqueue.browse_dead_messages('dead_letter_grouped') d), last_id, 'browse_dead_messages shows a message without attempts behind ready ones of another group');
    return next is(pgqueue.sweep_queue('dead_letter_grouped'), 3, 'sweep_queue removes a message without attempts behind ready ones of another group');
end;
$$;
select pg_temp.is_abandoned_behind_others();
create function pg_temp.is_abandoned_by_plain_sql() returns setof text language plpgsql as $$
declare
    last_id bigint;
begin
    perform pgqueue.create_queue('dead_letter_plain', max_attempts => 1);
    last_id := max(i) from pgqueue.enqueue_batch('dead_letter_plain', array_fill('1'::jsonb, array[1101])) i;
    update pgqueue.messages m
    set visible_at = pgqueue._now() + case m.id when last_id then interval '30 s' else '1 h' end,
        attempt_count = m.attempt_count + 1, claimed_by = 'plain'
    where m.queue_name = 'dead_letter_plain';
    perform pg_temp.pass('31 s');
    return next is((select array_agg(d.id) from pgqueue.browse_dead_messages('dead_letter_plain') d), array[last_id], 'browse_dead_messages shows a message without attempts behind others that plain SQL has claimed');
    return next is(pgqueue.sweep_queue('dead_letter_plain'), 1, 'sweep_queue removes a message without attempts behind others that plain SQL has claimed');
end;
$$;
select pg_temp.is_abandoned_by_plain_sql();
select throws_ok($$ select pgqueue.sweep_queue('dead_letter_shared', 0) $$, '22023', null, 'sweep_queue refuses zero messages');
select throws_ok($$ select pgqueue.sweep_queue('dead_letter_shared', 1000001) $$, '22023', null, 'sweep_queue refuses more than a million messages');

select throws_ok($$ select pgqueue.redrive('dead_letter_shared', 0) $$, '22023', null, 'redrive refuses zero messages');
select throws_ok($$ select pgqueue.redrive('dead_letter_shared', null) $$, '22023', null, 'redrive refuses a null number of messages');
select throws_ok($$ select pgqueue.redrive('dead_letter_nowhere') $$, 'PQ001', null, 'redrive refuses an unknown queue');
select throws_ok($$ select pgqueue.purge_dead_messages('dead_letter_nowhere') $$, 'PQ001', null, 'purge_dead_messages refuses an unknown queue');
select is((select count(*) from pgqueue.browse_dead_messages('dead_letter_beside')), 4::bigint, 'refused calls change no dead letter');

-- Messages that were not due when their queue was dropped.
create function pg_temp.outlives(queue text, has_table boolean, is_exposed boolean) returns setof text language plpgsql as $$
declare
    delayed bigint;
    nearer bigint;
    m pgqueue.message;
    d pgqueue.dead_message;
begin
    perform pgqueue.create_queue(queue, dedicated => has_table);
    if is_exposed then
        perform pgqueue.expose_transport(queue);
    end if;
    delayed := pgqueue.enqueue(queue, '{"n": 1}', delay => '1 h', headers => '{"h": 1}', expires_in => '2 h', message_id => '10000000-0000-0000-0000-000000000001');
    nearer := pgqueue.enqueue(queue, delay => '5 s', body => '\x00ff');
    perform pgqueue.enqueue(queue, '"it expires first"', delay => '1 h', expires_in => '1 s');
    perform pgqueue.enqueue(queue, '"it failed"');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.nack(queue, m.id, m.claim_token, '1 h');
    perform pgqueue.enqueue(queue, '"it is in flight"');
    perform pgqueue.claim(queue);
    perform pgqueue.enqueue(queue, '"it died"');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.reject(queue, m.id, m.claim_token);
    perform pgqueue.enqueue(queue, '"it is due"', delay => '1 s');
    perform pgqueue.enqueue(queue, '"it is ready"');
    perform pg_temp.pass('2 s');
    if is_exposed then
        -- advance_transport moves messages that are due within 15 seconds ahead of time.
        perform pgqueue.advance_transport(queue);
        return next is((select array_agg(c.visible_at > pgqueue._now()) from pgqueue.messages c where c.id = nearer), '{true}', queue || ': advance_transport moved the nearer message into messages before it is due');
    end if;
    return next is(pgqueue.drop_queue(queue), 6::bigint, queue || ': drop_queue deletes messages that are due, were claimed, are dead or have expired');
    return next is((select array_agg(l.id) from pgqueue.browse_dead_messages(queue) l), array[delayed, nearer], queue || ': drop_queue keeps messages that are not due as dead letters of the dropped queue');
    select * into d from pgqueue.browse_dead_messages(queue) l where l.id = delayed;
    return next is((d.queue_name, d.payload, d.headers, d.message_id)::text, (queue, '{"n": 1}'::jsonb, '{"h": 1}'::jsonb, '10000000-0000-0000-0000-000000000001'::uuid)::text, queue || ': an undelivered message keeps its queue_name, payload, headers and message_id');
    return next is((d.reason, d.died_at, d.last_error)::text, ('queue_dropped'::text, pgqueue._now(), format('the queue was dropped before %s, when the message was due', pgqueue._now() + interval '1 h' - interval '2 s'))::text, queue || ': an undelivered message has reason queue_dropped and an error that names its due time');
    return next is((d.expires_at, d.attempt_count, d.enqueued_at)::text, (null::timestamptz, 0, pgqueue._now() - interval '2 s')::text, queue || ': an undelivered message has no expiry and no attempts');
    return next is((select l.body from pgqueue.browse_dead_messages(queue) l where l.id = nearer), '\x00ff'::bytea, queue || ': an undelivered message keeps its raw body');
    return next is((select array_agg(row(f.severity, f.finding, f.repair)::text) from pgqueue.doctor() f where f.queue_name = queue),
        array[row('info', 'undelivered_messages', format('select pgqueue.create_queue(%L);', queue))::text], queue || ': doctor reports undelivered messages of a dropped queue');
    return next throws_ok(format('select pgqueue.redrive(%L)', queue), 'PQ001', null, queue || ': redrive refuses a queue that was dropped');
    return next is(pgqueue.purge_dead_messages(queue, array[nearer]), 1::bigint, queue || ': purge_dead_messages deletes undelivered messages of a dropped queue');
    perform pgqueue.create_queue(queue);
    return next is(pgqueue.redrive(queue), 1, queue || ': redrive sends undelivered messages back when the queue exists again');
    return next is((select (c.id, c.payload, c.expires_at)::text from pgqueue.claim(queue, 10) c), (delayed, '{"n": 1}'::jsonb, null::timestamptz)::text, queue || ': claim returns the redriven message of the dropped queue');

    perform pgqueue.alter_queue(queue, dlq_enabled => false);
    perform pgqueue.enqueue(queue, '1', delay => '1 h');
    return next is(pgqueue.drop_queue(queue), 2::bigint, queue || ': drop_queue of a queue without dead letters deletes delayed messages as well');
    return next throws_ok(format('select pgqueue.browse_dead_messages(%L)', queue), 'PQ001', null, queue || ': browse_dead_messages refuses the dropped queue after its last dead letter is gone');
end;
$$;
select pg_temp.outlives('dead_letter_dropped', false, false);
select pg_temp.outlives('dead_letter_table_dropped', true, false);
select pg_temp.outlives('dead_letter_relation_dropped', true, true);

select * from finish();
rollback;
