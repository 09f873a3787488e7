begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(45);

create function pg_temp.steps(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    ids bigint[];
    m pgqueue.exchanged;
    n pgqueue.exchanged;
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', max_attempts => 3, dedicated => has_table);
    return next is((select count(*) from pgqueue.exchange(queue, null, null)), 0::bigint, queue || ': exchange without ids on an empty queue returns no row');
    ids := array(select pgqueue.enqueue_batch(queue, array['1', '2', '3', '4', '5']::jsonb[]));

    select * into m from pgqueue.exchange(queue, null, null, claimed_by => 'worker-1');
    return next is((m.id, m.attempt_count, m.claimed_by, m.lost)::text, (ids[1], 1, 'worker-1'::text, false)::text, queue || ': exchange with null ids claims a message');
    return next is(m.visible_at, pgqueue._now() + interval '30 s', queue || ': exchange hides the claimed message for the visibility timeout of the queue');
    select * into n from pgqueue.exchange(queue, array[m.id], m.claim_token, visibility_timeout => '1 min');
    return next is((n.id, n.payload, n.lost)::text, (ids[2], '2'::jsonb, false)::text, queue || ': exchange with ids returns the next message');
    return next is(n.visible_at, pgqueue._now() + interval '1 min', queue || ': exchange hides the claimed message for the visibility timeout that it was given');
    return next isnt(n.claim_token, m.claim_token, queue || ': exchange returns the next message under a new token');
    return next is((select array_agg(b.id) from pgqueue.messages b where b.queue_name = queue and b.id <= ids[2]), array[ids[2]], queue || ': exchange deletes the message that it acknowledges');

    return next results_eq(
        format('select id, lost, queue_name, payload, claim_token from pgqueue.exchange(%L, %L, %L, 2)', queue, array[m.id, n.id], n.claim_token),
        format('values (%s::bigint, true, %L::text, null::jsonb, null::uuid)', m.id, queue) || format(
            'union all select * from (select id, false, queue_name, payload, claim_token from pgqueue.browse(%L, %L) order by id) i', queue, 'inflight'),
        queue || ': exchange returns lost ids first and without content, then the claimed messages in order of id');
    return next is((select array_agg(b.id order by b.id) from pgqueue.messages b where b.queue_name = queue), ids[3:5], queue || ': exchange acknowledges the other ids although one was lost');

    select * into m from pgqueue.exchange(queue, '{}', null, 1);
    return next is(m.id, ids[5], queue || ': exchange with empty ids claims a message');
    perform pg_temp.pass('31 s');
    select * into n from pgqueue.exchange(queue, null, null, 3) e where e.id = ids[5];
    return next is((n.id, n.attempt_count)::text, (ids[5], 2)::text, queue || ': exchange returns messages whose claims have expired');
    return next is((select array_agg(e.id) from pgqueue.exchange(queue, array[ids[5]], m.claim_token) e where e.lost), array[ids[5]], queue || ': exchange with the token of an expired claim reports the id as lost');
    return next is((select array_agg(e.id) from pgqueue.exchange(queue, array[ids[5]], gen_random_uuid()) e where e.lost), array[ids[5]], queue || ': exchange with a token that no claim has reports the id as lost');
    return next is((select array_agg(e.id) from pgqueue.exchange(queue, array[ids[5], ids[5]], n.claim_token) e), null, queue || ': exchange acknowledges a repeated id once and does not report it as lost');

    perform pgqueue.purge_queue(queue);
    ids := array(select pgqueue.enqueue_batch(queue, array['6', '7']::jsonb[]));
    select * into m from pgqueue.exchange(queue, null, null);
    return next throws_ok(format('select pgqueue.exchange(%L, %L, %L, 1, %L)', queue, array[m.id], m.claim_token, '0 s'), '22023', null,
        queue || ': exchange with an invalid visibility timeout raises an error');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'inflight') b), ids[1:1], queue || ': an exchange that raises an error acknowledges nothing');
    perform pgqueue.pause_queue(queue);
    return next is((select count(*) from pgqueue.exchange(queue, array[m.id], m.claim_token)), 0::bigint, queue || ': exchange claims nothing from a paused queue');
    return next is((select array_agg(b.id) from pgqueue.messages b where b.queue_name = queue), ids[2:2], queue || ': exchange acknowledges messages of a paused queue');
end;
$$;
select pg_temp.steps('exchange_shared', false);
select pg_temp.steps('exchange_dedicated', true);

select throws_ok($$ select pgqueue.exchange('exchange_shared', '{1}', null) $$, '22023', null, 'exchange refuses ids without a token');
select throws_ok($$ select pgqueue.exchange('exchange_shared', null, null, 0) $$, '22023', null, 'exchange refuses to claim zero messages');
select throws_ok($$ select pgqueue.exchange('exchange_shared', null, null, 10001) $$, '22023', null, 'exchange refuses more than 10,000 messages');
select throws_ok($$ select pgqueue.exchange('exchange_shared', null, null, null) $$, '22023', null, 'exchange refuses a null number of messages');
select throws_ok($$ select pgqueue.exchange('exchange_shared', null, null, 1, '43201 s') $$, '22023', null, 'exchange refuses a timeout over 12 hours');
select throws_ok($$ select pgqueue.exchange('exchange_nowhere', null, null) $$, 'PQ001', null, 'exchange refuses an unknown queue');
select throws_ok($$ select pgqueue.exchange('exchange_nowhere', '{1}', gen_random_uuid()) $$, 'PQ001', null, 'exchange with ids refuses an unknown queue');
select is(
    (select array_agg(a.attname::text order by a.attnum) from pg_attribute a where a.attrelid = 'pgqueue.exchanged'::regclass),
    (select array_agg(a.attname::text order by a.attnum) from pg_attribute a where a.attrelid = 'pgqueue.message'::regclass) || 'lost'::text,
    'the type pgqueue.exchanged has the attributes of pgqueue.message, then lost');
select is(
    (select count(*) from pg_attribute a join pg_attribute b using (attname, atttypid) where a.attrelid = 'pgqueue.exchanged'::regclass and b.attrelid = 'pgqueue.message'::regclass),
    14::bigint, 'the attributes of pgqueue.exchanged have the types of those of pgqueue.message');

select * from finish();
rollback;
