begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(14);

-- Claims and nacks a message repeatedly. Returns the delay after each nack, in seconds.
create function pg_temp.waits(queue text, times int) returns float8[] language plpgsql as $$
declare
    m pgqueue.message;
    waits float8[] := '{}';
begin
    for i in 1..times loop
        select * into strict m from pgqueue.claim(queue);
        perform pgqueue.nack(queue, m.id, m.claim_token);
        waits := waits || (select date_part('epoch', b.visible_at - pgqueue._now()) from pgqueue.browse(queue, 'scheduled') b where b.id = m.id);
        perform set_config('test.now', (select b.visible_at::text from pgqueue.browse(queue, 'scheduled') b where b.id = m.id), true);
    end loop;
    return waits;
end;
$$;

select lives_ok($$ select pgqueue.create_queue('backoff_plain', max_attempts => 100, backoff_jitter => 0) $$, 'a queue without jitter is created');
select lives_ok($$ select pgqueue.enqueue('backoff_plain', '1') $$, 'a message is sent to the queue without jitter');
select is(pg_temp.waits('backoff_plain', 12), array[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]::float8[],
    'the backoff doubles with every attempt, from 1 second up to 10 minutes');
select lives_ok($$ select pgqueue.alter_queue('backoff_plain', backoff_base => '3 s', backoff_factor => 1, backoff_max => '10 s') $$, 'alter_queue sets a backoff_factor of 1');
select is(pg_temp.waits('backoff_plain', 2), array[3, 3]::float8[], 'the backoff stays the same with a backoff_factor of 1');
select lives_ok($$ select pgqueue.alter_queue('backoff_plain', backoff_base => '1 s', backoff_factor => 100, backoff_max => '30 days') $$, 'alter_queue accepts a backoff_factor of 100 with a backoff_max of 30 days');
select is(pg_temp.waits('backoff_plain', 84), array_fill(2592000::float8, array[84]), 'the backoff after the 98th attempt is backoff_max and does not overflow');
select lives_ok($$ select pgqueue.alter_queue('backoff_plain', backoff_max => '0 s') $$, 'alter_queue sets a backoff_max of 0');
select is(pg_temp.waits('backoff_plain', 0), '{}'::float8[], 'no backoff was measured before the next claim');
create function pg_temp.comes_back_at_once() returns text language plpgsql as $$
declare
    m pgqueue.message;
begin
    select * into m from pgqueue.claim('backoff_plain');
    perform pgqueue.nack('backoff_plain', m.id, m.claim_token);
    return is((select c.attempt_count from pgqueue.claim('backoff_plain') c), 100, 'a message without backoff is ready at once, up to its 100th attempt');
end;
$$;
select pg_temp.comes_back_at_once();

select lives_ok($$ select pgqueue.create_queue('backoff_jitter', max_attempts => 100, backoff_base => '100 s', backoff_factor => 1, backoff_jitter => 0.5) $$, 'a queue with jitter is created');
create function pg_temp.jitters() returns setof text language plpgsql as $$
declare
    waits float8[];
begin
    perform pgqueue.enqueue('backoff_jitter', '1');
    waits := pg_temp.waits('backoff_jitter', 99);
    return next ok((select bool_and(w between 50 and 100) from unnest(waits) w), 'jitter shortens the backoff by at most backoff_jitter and never lengthens it');
    return next ok((select count(distinct w) > 90 from unnest(waits) w), 'jitter makes more than 90 of 99 backoffs distinct');
    return next ok((select max(w) - min(w) > 30 from unnest(waits) w), 'jitter spreads the backoffs over more than 30 of the possible 50 seconds');
end;
$$;
select pg_temp.jitters();

select * from finish();
rollback;
