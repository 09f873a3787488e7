begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(79);

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
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': a claim on an empty queue returns no row');

    new_id := pgqueue.enqueue(queue, '{"n": 1}', headers => '{"h": 1}', expires_in => '1 day', message_id => name);
    perform pg_temp.pass('5 s');
    select * into m from pgqueue.claim(queue, claimed_by => 'worker-1');
    return next is(
        (m.id, m.queue_name, m.payload, m.body, m.headers, m.message_id)::text,
        (new_id, queue, '{"n": 1}'::jsonb, null::bytea, '{"h": 1}'::jsonb, name)::text,
        queue || ': a claim returns the message as it was sent');
    return next is((m.enqueued_at, m.expires_at)::text, (sent_at, sent_at + interval '1 day')::text, queue || ': a claim says when the message was sent and when it expires');
    return next is(m.attempt_count, 1, queue || ': a claim counts its attempt');
    return next is(m.max_attempts, 3, queue || ': a claim says how many attempts there are');
    return next is(m.claimed_by, 'worker-1', queue || ': a claim carries the name of the claimer');
    return next isnt(m.claim_token, null, queue || ': a claim has a token');
    return next is(m.visible_at, pgqueue._now() + interval '30 s', queue || ': a claim hides the message for the timeout of the queue, from now on');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': a claimed message is not claimed twice');
    perform pg_temp.pass('29.999 s');
    return next is((select count(*) from pgqueue.claim(queue, 10)), 0::bigint, queue || ': a claim holds until its timeout');
    perform pg_temp.pass('0.001 s');
    select * into n from pgqueue.claim(queue, 10, '2 min');
    return next is(n.id, new_id, queue || ': a claim that ran out is claimed again');
    return next is(n.attempt_count, 2, queue || ': the claim counts the second attempt');
    return next is(n.visible_at, pgqueue._now() + interval '2 min', queue || ': the timeout of a claim goes before that of the queue');
    return next isnt(n.claim_token, m.claim_token, queue || ': the second claim has another token');
    return next is(n.claimed_by, null, queue || ': a claim without a name wipes out the name before');
    perform pgqueue.ack(queue, new_id, n.claim_token);

    ids := array(select pgqueue.enqueue_batch(queue, array['1', '2', '3', '4', '5']::jsonb[]));
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 3) c), ids[1:3], queue || ': a claim of three returns the first three, by id');
    return next is((select count(distinct b.claim_token) from pgqueue.browse(queue, 'inflight') b), 1::bigint, queue || ': the messages of one claim share a token');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids[4:5], queue || ': a claim of more than there are returns what there is');
    perform pg_temp.pass('31 s');
    ids := ids || pgqueue.enqueue(queue, '6');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids, queue || ': claims that ran out come with what is new, by id');
    return next is((select array_agg(b.attempt_count order by b.id) from pgqueue.browse(queue, 'inflight') b), array[2, 2, 2, 2, 2, 1], queue || ': each has the attempts it had, and one more');
    perform pgqueue.purge_queue(queue);

    -- A claim takes its look below the hint as soon as it comes up short, not at the next turn of the sweep.
    new_id := pgqueue.enqueue(queue, '1');
    select * into m from pgqueue.claim(queue, visibility_timeout => '1 s');
    perform pg_temp.pass('0.980 s');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': a claim of one second holds for 980 ms');
    perform pg_temp.pass('0.020 s');
    return next is((select c.id from pgqueue.claim(queue) c), new_id, queue || ': on a quiet queue it is delivered again the moment it runs out, right after a claim that found nothing');
    perform pgqueue.purge_queue(queue);

    new_id := pgqueue.enqueue(queue, '1');
    begin
        perform pgqueue.claim(queue);
        raise exception 'this rolls back' using errcode = 'P0001';
    exception when raise_exception then
        null;
    end;
    select * into m from pgqueue.claim(queue);
    return next is(m.id, new_id, queue || ': a claim that was rolled back leaves the message to be claimed at once');
    return next is(m.attempt_count, 1, queue || ': a claim that was rolled back counts no attempt');
    perform pgqueue.purge_queue(queue);

    new_id := pgqueue.enqueue(queue, '1', delay => '1 min');
    ids := array[pgqueue.enqueue(queue, '2')];
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids, queue || ': a claim passes over what is delayed');
    perform pg_temp.pass('59.999 s');
    return next is((select count(*) from pgqueue.claim(queue) c where c.id = new_id), 0::bigint, queue || ': a delayed message is not delivered early');
    perform pg_temp.pass('0.001 s');
    return next ok(exists (select from pgqueue.claim(queue, 10) c where c.id = new_id), queue || ': a delayed message is delivered when it is due');
    perform pgqueue.purge_queue(queue);

    ids := array(select pgqueue.enqueue_batch(queue, array['1', '2', '3', '4', '5', '6']::jsonb[], delays => array[null, null, null, null, '10 s', '20 s']::interval[]));
    perform pgqueue.claim(queue, 4);
    perform pg_temp.pass('30 s');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 6) c), ids, queue || ': what ran out and what came due is claimed together, by id');
    perform pgqueue.purge_queue(queue);

    perform pgqueue.create_queue(queue || '_due', visibility_timeout => '30 s');
    ids := array(select pgqueue.enqueue_batch(queue || '_due', array['1', '2', '3', '4', '5', '6']::jsonb[], delays => array[null, null, null, null, '10 s', '20 s']::interval[]));
    perform pgqueue.claim(queue || '_due', 4);
    perform pg_temp.pass('30 s');
    return next is((select count(*) from pgqueue.claim(queue || '_due', 3)), 3::bigint, queue || ': a claim of three returns three where six are ready, two of them just come due');

    perform pgqueue.create_queue(queue || '_twice', visibility_timeout => '30 s');
    ids := array(select pgqueue.enqueue_batch(queue || '_twice', array['1', '2']::jsonb[]));
    select * into m from pgqueue.claim(queue || '_twice', 2);
    perform pg_temp.pass('31 s');
    return next is((select c.id from pgqueue.claim(queue || '_twice') c), ids[1], queue || ': the first of two claims that ran out is claimed again');
    perform pgqueue.ack(queue || '_twice', ids[2], m.claim_token);
    perform pg_temp.pass('31 s');
    return next is((select c.id from pgqueue.claim(queue || '_twice') c), ids[1], queue || ': when it runs out once more the next claim returns it');
end;
$$;
select pg_temp.lends('claim_shared', false);
select pg_temp.lends('claim_dedicated', true);

select lives_ok($$ select pgqueue.claim('claim_shared', 1, '1 s') $$, 'claim takes a timeout of 1 second');
select lives_ok($$ select pgqueue.claim('claim_shared', 10000, '43200 s') $$, 'claim takes a timeout of 12 hours and 10,000 messages');
select throws_ok($$ select pgqueue.claim('claim_shared', 1, '0.999 s') $$, '22023', null, 'claim refuses a timeout below 1 second');
select throws_ok($$ select pgqueue.claim('claim_shared', 1, '43201 s') $$, '22023', null, 'claim refuses a timeout over 12 hours');
select throws_ok($$ select pgqueue.claim('claim_shared', 1, '-1 s') $$, '22023', null, 'claim refuses a negative timeout');
select lives_ok($$ select pgqueue.enqueue('claim_shared', '1'), pgqueue.enqueue('claim_shared', '2'), pgqueue.claim('claim_shared') $$, 'where messages are ready, and no sweep is due');
select throws_ok($$ select pgqueue.claim('claim_shared', 1, '43201 s') $$, '22023', null, 'claim refuses a timeout over 12 hours, too');
select throws_ok($$ select pgqueue.claim('claim_shared', 1, '300000 years -108000000 days 9 s') $$, '22023', null, 'and one that compares like 9 seconds, but is not');
select throws_ok($$ select pgqueue.claim('claim_shared', 0) $$, '22023', null, 'claim refuses to claim zero messages');
select throws_ok($$ select pgqueue.claim('claim_shared', -1) $$, '22023', null, 'claim refuses a negative number of messages');
select throws_ok($$ select pgqueue.claim('claim_shared', 10001) $$, '22023', null, 'claim refuses more than 10,000 messages');
select throws_ok($$ select pgqueue.claim('claim_shared', null) $$, '22023', null, 'claim refuses a null number of messages');
select throws_ok($$ select pgqueue.claim('claim_nowhere') $$, 'PQ001', null, 'claim refuses an unknown queue');

-- The same on a clock that runs: nothing here depends on time standing still.
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
    return next is(m.id, new_id, 'nack then claim returns the message at once');
    perform set_config('test.ahead', '10 years 29 s', true);
    return next is((select count(*) from pgqueue.claim('claim_quiet')), 0::bigint, 'a claim holds while its time runs');
    perform set_config('test.ahead', '10 years 31 s', true);
    select * into m from pgqueue.claim('claim_quiet');
    return next is(m.id, new_id, 'a claim that ran out is delivered to the next claim');
    return next is(m.attempt_count, 3, 'attempts are counted by claims alone');
end;
$$;
select pg_temp.lends_as_time_goes_by();

select * from finish();
rollback;
