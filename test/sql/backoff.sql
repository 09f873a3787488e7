begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(14);

-- Claims and gives back, and says how long each message then waited, in seconds.
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

select lives_ok($$ select pgqueue.create_queue('backoff_plain', max_attempts => 100, backoff_jitter => 0) $$, 'a queue without jitter is made');
select lives_ok($$ select pgqueue.enqueue('backoff_plain', '1') $$, 'a message is sent to it');
select is(pg_temp.waits('backoff_plain', 12), array[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]::float8[],
    'the wait doubles with every attempt, from 1 second up to 10 minutes');
select lives_ok($$ select pgqueue.alter_queue('backoff_plain', backoff_base => '3 s', backoff_factor => 1, backoff_max => '10 s') $$, 'the backoff is changed');
select is(pg_temp.waits('backoff_plain', 2), array[3, 3]::float8[], 'with a factor of 1 the wait stays the same');
select lives_ok($$ select pgqueue.alter_queue('backoff_plain', backoff_base => '1 s', backoff_factor => 100, backoff_max => '30 days') $$, 'the backoff is made as steep as it can be');
select is(pg_temp.waits('backoff_plain', 84), array_fill(2592000::float8, array[84]), 'the 98th attempt waits no longer than backoff_max, and its backoff can be computed');
select lives_ok($$ select pgqueue.alter_queue('backoff_plain', backoff_max => '0 s') $$, 'the backoff is switched off');
select is(pg_temp.waits('backoff_plain', 0), '{}'::float8[], 'nothing has waited yet');
create function pg_temp.comes_back_at_once() returns text language plpgsql as $$
declare
    m pgqueue.message;
begin
    select * into m from pgqueue.claim('backoff_plain');
    perform pgqueue.nack('backoff_plain', m.id, m.claim_token);
    return is((select c.attempt_count from pgqueue.claim('backoff_plain') c), 100, 'with no backoff a message comes back at once, until its 100th attempt');
end;
$$;
select pg_temp.comes_back_at_once();

select lives_ok($$ select pgqueue.create_queue('backoff_jitter', max_attempts => 100, backoff_base => '100 s', backoff_factor => 1, backoff_jitter => 0.5) $$, 'a queue with jitter is made');
create function pg_temp.jitters() returns setof text language plpgsql as $$
declare
    waits float8[];
begin
    perform pgqueue.enqueue('backoff_jitter', '1');
    waits := pg_temp.waits('backoff_jitter', 99);
    return next ok((select bool_and(w between 50 and 100) from unnest(waits) w), 'jitter takes up to its part off the wait, and adds nothing');
    return next ok((select count(distinct w) > 90 from unnest(waits) w), 'hardly two waits are the same');
    return next ok((select max(w) - min(w) > 30 from unnest(waits) w), 'and they are spread over the whole of that part');
end;
$$;
select pg_temp.jitters();

select * from finish();
rollback;
