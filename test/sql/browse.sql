begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(54);

create function pg_temp.shows(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    ids bigint[];
    m pgqueue.message;
    before text;
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', dedicated => has_table);
    return next is((select count(*) from pgqueue.browse(queue)), 0::bigint, queue || ': browse of an empty queue returns no row');
    ids := array(select pgqueue.enqueue_batch(queue, array['1', '2', '3', '4', '5', '6']::jsonb[], delays => array[null, null, null, null, '10 s', '20 s']::interval[]));
    select * into m from pgqueue.claim(queue, claimed_by => 'worker-1');
    before := (select array_agg(x::text order by x.id)::text from pgqueue.messages x where x.queue_name = queue);
    return next is((select array_agg(b.id) from pgqueue.browse(queue) b), ids[2:4], queue || ': browse returns ready messages in order of id');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'inflight') b), ids[1:1], queue || ': browse of state inflight returns claimed messages');
    return next is((select b::text from pgqueue.browse(queue, 'inflight') b), m::text, queue || ': browse of state inflight returns a message as claim returned it');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'scheduled') b), ids[5:6], queue || ': browse of state scheduled returns delayed messages');
    return next is((select array_agg(b.visible_at) from pgqueue.browse(queue, 'scheduled') b), array[pgqueue._now() + interval '10 s', pgqueue._now() + interval '20 s'],
        queue || ': browse of state scheduled returns the due time as visible_at');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, max_messages => 2) b), ids[2:3], queue || ': browse returns at most max_messages');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'ready', 2, ids[3]) b), ids[4:4], queue || ': browse with after_id continues behind that id');
    return next is((select array_agg(x::text order by x.id)::text from pgqueue.messages x where x.queue_name = queue), before, queue || ': browse changes no message');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 3) c), ids[2:4], queue || ': messages that browse returned can be claimed');
    perform pg_temp.pass('10 s');
    return next is((select array_agg(b.id) from pgqueue.browse(queue) b), ids[5:5], queue || ': browse returns a due message as ready');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'scheduled') b), ids[6:6], queue || ': browse does not return a due message as scheduled');
    perform pg_temp.pass('20 s');
    return next is((select array_agg(b.id) from pgqueue.browse(queue) b), ids, queue || ': browse returns a message whose claim has expired as ready, in order of id');
    return next is((select count(*) from pgqueue.browse(queue, 'inflight')), 0::bigint, queue || ': browse does not return a message whose claim has expired as in flight');

    perform pgqueue.enqueue(queue, '7', expires_in => '1 s');
    perform pg_temp.pass('1 s');
    return next is((select array_agg(b.id) from pgqueue.browse(queue) b), ids, queue || ': browse does not return an expired message as ready');
    for m in select * from pgqueue.claim(queue, 10) loop
        perform pgqueue.reject(queue, m.id, m.claim_token, 'error ' || (m.payload #>> '{}'));
    end loop;
    return next is((select array_agg((d.id, d.last_error, d.reason, d.died_at)::text) from pgqueue.browse_dead_messages(queue) d),
        (select array_agg((ids[i], 'error ' || i, 'rejected'::text, pgqueue._now())::text order by i) from generate_series(1, 6) i),
        queue || ': browse_dead_messages returns dead letters in order of id, with error, reason and time of death');
    return next is(
        (select array_agg(d.id) from (select * from pgqueue.browse_dead_messages(queue, 3) union all
            select * from pgqueue.browse_dead_messages(queue, 3, (select max(p.id) from pgqueue.browse_dead_messages(queue, 3) p))) d),
        (select array_agg(d.id) from pgqueue.browse_dead_messages(queue) d), queue || ': browse_dead_messages with after_id continues behind that id');
    ids[7] := pgqueue.enqueue(queue, '8', delay => '1 s', expires_in => '2 s');
    perform pg_temp.pass('2 s');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'scheduled') b), ids[7:7], queue || ': browse returns a delayed message that expired before a claim moved it as scheduled');
    return next is((pgqueue.stats(queue)).scheduled_messages, 1::bigint, queue || ': stats counts a delayed message that expired before a claim moved it as scheduled');
end;
$$;
select pg_temp.shows('browse_shared', false);
select pg_temp.shows('browse_dedicated', true);

select throws_ok($$ select pgqueue.browse('browse_shared', 'dead') $$, '22023', null, 'browse refuses an unknown state');
select throws_ok($$ select pgqueue.browse('browse_shared', null) $$, '22023', null, 'browse refuses a null state');
select throws_ok($$ select pgqueue.browse('browse_shared', 'ready', 0) $$, '22023', null, 'browse refuses a page of zero messages');
select throws_ok($$ select pgqueue.browse('browse_shared', 'ready', 10001) $$, '22023', null, 'browse refuses a page over 10,000 messages');
select throws_ok($$ select pgqueue.browse('browse_shared', 'ready', null) $$, '22023', null, 'browse refuses a page of null messages');
select throws_ok($$ select pgqueue.browse('browse_shared', 'ready', 1, null) $$, '22023', null, 'browse refuses a null after_id');
select throws_ok($$ select pgqueue.browse('browse_nowhere') $$, 'PQ001', null, 'browse refuses an unknown queue');
select throws_ok($$ select pgqueue.browse_dead_messages('browse_shared', 0) $$, '22023', null, 'browse_dead_messages refuses a page of zero messages');
select throws_ok($$ select pgqueue.browse_dead_messages('browse_shared', 10001) $$, '22023', null, 'browse_dead_messages refuses a page over 10,000 messages');
select throws_ok($$ select pgqueue.browse_dead_messages('browse_shared', null) $$, '22023', null, 'browse_dead_messages refuses a page of null messages');
select throws_ok($$ select pgqueue.browse_dead_messages('browse_shared', 1, null) $$, '22023', null, 'browse_dead_messages refuses a null after_id');
select throws_ok($$ select pgqueue.browse_dead_messages('browse_nowhere') $$, 'PQ001', null, 'browse_dead_messages refuses an unknown queue');
select lives_ok($$ select pgqueue.browse('browse_shared', 'ready', 10000) $$, 'browse accepts a page of 10,000 messages');
select is((select count(*) from pgqueue.browse('browse_shared', after_id => 9223372036854775807)), 0::bigint, 'browse behind the last id returns no row');
select is(
    (select array_agg(format('%s %s', a.attname, format_type(a.atttypid, a.atttypmod)) order by a.attnum) from pg_attribute a where a.attrelid = 'pgqueue.message'::regclass),
    array['id bigint', 'queue_name text', 'payload jsonb', 'body bytea', 'headers jsonb', 'message_id uuid', 'attempt_count integer', 'max_attempts integer',
        'enqueued_at timestamp with time zone', 'visible_at timestamp with time zone', 'expires_at timestamp with time zone', 'claimed_by text', 'claim_token uuid', 'last_error text'],
    'the type pgqueue.message has exactly the documented attributes');
select is(
    (select array_agg(format('%s %s', a.attname, format_type(a.atttypid, a.atttypmod)) order by a.attnum) from pg_attribute a where a.attrelid = 'pgqueue.dead_message'::regclass),
    array['id bigint', 'queue_name text', 'payload jsonb', 'body bytea', 'headers jsonb', 'message_id uuid', 'attempt_count integer', 'max_attempts integer',
        'enqueued_at timestamp with time zone', 'expires_at timestamp with time zone', 'claimed_by text', 'last_error text', 'reason text', 'died_at timestamp with time zone'],
    'the type pgqueue.dead_message has exactly the documented attributes');

select * from finish();
rollback;
