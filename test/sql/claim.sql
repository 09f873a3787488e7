begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(81);

create function pg_temp.lends(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    new_id bigint;
    ids bigint[];
    name uuid := gen_random_uuid();
    m pgqueue.message;
    n pgqueue.message;
    sent_at timestamptz := pgqueue._now();
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', max_attempts => 3, dedicated => has_table);
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': claim of an empty queue returns no row');

    new_id := pgqueue.enqueue(queue, '{"n": 1}', headers => '{"h": 1}', expires_in => '1 day', message_id => name);
    perform pg_temp.pass('5 s');
    select * into m from pgqueue.claim(queue, claimed_by => 'worker-1');
    return next is(
        (m.id, m.queue_name, m.payload, m.body, m.headers, m.message_id)::text,
        (new_id, queue, '{"n": 1}'::jsonb, null::bytea, '{"h": 1}'::jsonb, name)::text,
        queue || ': claim returns the message with the content that was sent');
    return next is((m.enqueued_at, m.expires_at)::text, (sent_at, sent_at + interval '1 day')::text, queue || ': claim returns when the message was sent and when it expires');
    return next is(m.attempt_count, 1, queue || ': the first claim returns an attempt_count of 1');
    return next is(m.max_attempts, 3, queue || ': claim returns the max_attempts of the queue');
    return next is(m.claimed_by, 'worker-1', queue || ': claim returns the claimed_by that it was given');
    return next isnt(m.claim_token, null, queue || ': claim returns a claim token');
    return next is(m.visible_at, pgqueue._now() + interval '30 s', queue || ': claim hides the message for the visibility timeout of the queue, counted from the claim');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': claim does not return a message that is in flight');
    perform pg_temp.pass('29.999 s');
    return next is((select count(*) from pgqueue.claim(queue, 10)), 0::bigint, queue || ': a claim lasts until its visibility timeout ends');
    perform pg_temp.pass('0.001 s');
    select * into n from pgqueue.claim(queue, 10, '2 min');
    return next is(n.id, new_id, queue || ': claim returns a message whose last claim has expired');
    return next is(n.attempt_count, 2, queue || ': the second claim returns an attempt_count of 2');
    return next is(n.visible_at, pgqueue._now() + interval '2 min', queue || ': the visibility timeout given to claim overrides that of the queue');
    return next isnt(n.claim_token, m.claim_token, queue || ': the second claim returns another token');
    return next is(n.claimed_by, null, queue || ': a claim without claimed_by clears the claimed_by of the previous claim');
    perform pgqueue.ack(queue, new_id, n.claim_token);

    ids := array(select pgqueue.enqueue_batch(queue, array['1', '2', '3', '4', '5']::jsonb[]));
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 3) c), ids[1:3], queue || ': claim of three messages returns the three lowest ids in order');
    return next is((select count(distinct b.claim_token) from pgqueue.browse(queue, 'inflight') b), 1::bigint, queue || ': messages of one claim share a token');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids[4:5], queue || ': claim of more messages than are ready returns all that are ready');
    perform pg_temp.pass('31 s');
    ids := ids || pgqueue.enqueue(queue, '6');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids, queue || ': claim returns messages with expired claims and new messages together, in order of id');
    return next is((select array_agg(b.attempt_count order by b.id) from pgqueue.browse(queue, 'inflight') b), array[2, 2, 2, 2, 2, 1], queue || ': claim increments the attempt_count of every message that it returns');
    perform pgqueue.purge_queue(queue);

    -- A claim that finds too few messages looks below the hint at once. It does not wait until the next sweep is due.
    new_id := pgqueue.enqueue(queue, '1');
    select * into m from pgqueue.claim(queue, visibility_timeout => '1 s');
    perform pg_temp.pass('0.980 s');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': a claim of one second lasts at least 980 ms');
    perform pg_temp.pass('0.020 s');
    return next is((select c.id from pgqueue.claim(queue) c), new_id, queue || ': claim of a quiet queue returns a message as soon as its claim expires, right after an empty claim');
    perform pgqueue.purge_queue(queue);

    new_id := pgqueue.enqueue(queue, '1');
    begin
        perform pgqueue.claim(queue);
        raise exception 'this rolls back' using errcode = 'P0001';
    exception when raise_exception then
        null;
    end;
    select * into m from pgqueue.claim(queue);
    return next is(m.id, new_id, queue || ': a message whose claim was rolled back can be claimed at once');
    return next is(m.attempt_count, 1, queue || ': a claim that was rolled back does not count as an attempt');
    perform pgqueue.purge_queue(queue);

    new_id := pgqueue.enqueue(queue, '1', delay => '1 min');
    ids := array[pgqueue.enqueue(queue, '2')];
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids, queue || ': claim does not return a delayed message');
    perform pg_temp.pass('59.999 s');
    return next is((select count(*) from pgqueue.claim(queue) c where c.id = new_id), 0::bigint, queue || ': claim does not return a delayed message 1 ms before it is due');
    perform pg_temp.pass('0.001 s');
    return next ok(exists (select from pgqueue.claim(queue, 10) c where c.id = new_id), queue || ': claim returns a delayed message when it is due');
    perform pgqueue.purge_queue(queue);

    ids := array(select pgqueue.enqueue_batch(queue, array['1', '2', '3', '4', '5', '6']::jsonb[], delays => array[null, null, null, null, '10 s', '20 s']::interval[]));
    perform pgqueue.claim(queue, 4);
    perform pg_temp.pass('30 s');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 6) c), ids, queue || ': claim returns messages with expired claims and due messages together, in order of id');
    perform pgqueue.purge_queue(queue);

    perform pgqueue.create_queue(queue || '_due', visibility_timeout => '30 s');
    ids := array(select pgqueue.enqueue_batch(queue || '_due', array['1', '2', '3', '4', '5', '6']::jsonb[], delays => array[null, null, null, null, '10 s', '20 s']::interval[]));
    perform pgqueue.claim(queue || '_due', 4);
    perform pg_temp.pass('30 s');
    return next is((select count(*) from pgqueue.claim(queue || '_due', 3)), 3::bigint, queue || ': claim of three messages returns three if six are ready, two of which just became due');

    perform pgqueue.create_queue(queue || '_twice', visibility_timeout => '30 s');
    ids := array(select pgqueue.enqueue_batch(queue || '_twice', array['1', '2']::jsonb[]));
    select * into m from pgqueue.claim(queue || '_twice', 2);
    perform pg_temp.pass('31 s');
    return next is((select c.id from pgqueue.claim(queue || '_twice') c), ids[1], queue || ': claim returns the first of two messages whose claims have expired');
    perform pgqueue.ack(queue || '_twice', ids[2], m.claim_token);
    perform pg_temp.pass('31 s');
    return next is((select c.id from pgqueue.claim(queue || '_twice') c), ids[1], queue || ': the next claim returns that message again when its second claim has expired');
end;
$$;
select pg_temp.lends('claim_shared', false);
select pg_temp.lends('claim_dedicated', true);

select lives_ok($$ select pgqueue.claim('claim_shared', 1, '1 s') $$, 'claim accepts a visibility timeout of 1 second');
select lives_ok($$ select pgqueue.claim('claim_shared', 10000, '43200 s') $$, 'claim accepts a visibility timeout of 12 hours and 10,000 messages');
select throws_ok($$ select pgqueue.claim('claim_shared', 1, '0.999 s') $$, '22023', null, 'claim refuses a visibility timeout below 1 second');
select throws_ok($$ select pgqueue.claim('claim_shared', 1, '43201 s') $$, '22023', null, 'claim refuses a visibility timeout over 12 hours');
select throws_ok($$ select pgqueue.claim('claim_shared', 1, '-1 s') $$, '22023', null, 'claim refuses a negative visibility timeout');
select lives_ok($$ select pgqueue.enqueue('claim_shared', '1'), pgqueue.enqueue('claim_shared', '2'), pgqueue.claim('claim_shared') $$, 'two messages are sent and one is claimed, so that no sweep is due');
select throws_ok($$ select pgqueue.claim('claim_shared', 1, '43201 s') $$, '22023', null, 'claim refuses a visibility timeout over 12 hours also if no sweep is due');
select throws_ok($$ select pgqueue.claim('claim_shared', 1, '300000 years -108000000 days 9 s') $$, '22023', null, 'claim refuses a visibility timeout that compares like 9 seconds but spans thousands of years');
select throws_ok($$ select pgqueue.claim('claim_shared', 0) $$, '22023', null, 'claim refuses to claim zero messages');
select throws_ok($$ select pgqueue.claim('claim_shared', -1) $$, '22023', null, 'claim refuses a negative number of messages');
select throws_ok($$ select pgqueue.claim('claim_shared', 10001) $$, '22023', null, 'claim refuses more than 10,000 messages');
select throws_ok($$ select pgqueue.claim('claim_shared', null) $$, '22023', null, 'claim refuses a null number of messages');
select throws_ok($$ select pgqueue.claim('claim_nowhere') $$, 'PQ001', null, 'claim refuses an unknown queue');

-- The same with a clock that runs: claim does not depend on a clock that stands still.
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select clock_timestamp() + current_setting('test.ahead')::interval $$;
set local test.ahead = '10 years';
create function pg_temp.lends_as_time_goes_by() returns setof text language plpgsql as $$
declare
    new_id bigint;
    m pgqueue.message;
begin
    perform pgqueue.create_queue('claim_quiet', visibility_timeout => '30 s');
    new_id := pgqueue.enqueue('claim_quiet', '1');
    select * into m from pgqueue.claim('claim_quiet');
    perform pgqueue.claim('claim_quiet');
    perform pgqueue.nack('claim_quiet', m.id, m.claim_token, '0');
    select * into m from pgqueue.claim('claim_quiet');
    return next is(m.id, new_id, 'claim returns a message at once after nack with a delay of 0');
    perform set_config('test.ahead', '10 years 29 s', true);
    return next is((select count(*) from pgqueue.claim('claim_quiet')), 0::bigint, 'a claim lasts until its visibility timeout ends, with a running clock');
    perform set_config('test.ahead', '10 years 31 s', true);
    select * into m from pgqueue.claim('claim_quiet');
    return next is(m.id, new_id, 'claim returns a message whose claim has expired, with a running clock');
    return next is(m.attempt_count, 3, 'only claims increment attempt_count');
end;
$$;
select pg_temp.lends_as_time_goes_by();

-- The largest id, which no enqueue can get.
create function pg_temp.claims_the_largest_id() returns bigint[] language plpgsql as $$
begin
    perform pgqueue.create_queue('claim_largest');
    insert into pgqueue.messages (id, queue_name, payload) values (9223372036854775807, 'claim_largest', '1');
    return array(select c.id from pgqueue.claim('claim_largest') c);
end;
$$;
select is(pg_temp.claims_the_largest_id(), array[9223372036854775807], 'claim returns a message with the largest id');
select pgqueue.enqueue('claim_largest', '2') is not null as sent, set_config('test.ahead', '10 years 40 s', true) is not null as passed \gset
select is((select c.payload from pgqueue.claim('claim_largest', 5) c), '2'::jsonb, 'claim returns a message sent after one with the largest id');

select * from finish();
rollback;
