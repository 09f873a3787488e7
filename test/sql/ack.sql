begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(46);

create function pg_temp.acknowledges(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    first_id bigint;
    id bigint;
    ids bigint[];
    mine pgqueue.message;
    theirs pgqueue.message;
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', dedicated => has_table);
    perform pgqueue.create_queue(queue || '_other');

    first_id := pgqueue.enqueue(queue, '{"n": 1}');
    select * into mine from pgqueue.claim(queue);
    return next is(pgqueue.ack(queue, first_id, gen_random_uuid()), false, queue || ': ack with a token that no claim has returns false');
    return next is(pgqueue.ack(queue || '_other', first_id, mine.claim_token), false, queue || ': ack through another queue returns false');
    return next is(pgqueue.ack(queue, first_id + 1000000, mine.claim_token), false, queue || ': ack of an id that does not exist returns false');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'inflight') b), array[first_id], queue || ': a refused ack leaves the message in flight');
    return next is(pgqueue.ack(queue, first_id, mine.claim_token), true, queue || ': ack of a claimed message returns true');
    return next is((select count(*) from pgqueue.messages m where m.queue_name = queue), 0::bigint, queue || ': an acknowledged message is deleted');
    return next is(pgqueue.ack(queue, first_id, mine.claim_token), false, queue || ': a second ack of a message returns false');
    perform pg_temp.pass('1 day');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': claim never returns an acknowledged message');

    id := pgqueue.enqueue(queue, '{"n": 2}');
    select * into mine from pgqueue.claim(queue);
    perform pg_temp.pass('31 s');
    select * into theirs from pgqueue.claim(queue);
    return next is(theirs.id, id, queue || ': claim returns a message whose last claim has expired');
    return next isnt(theirs.claim_token, mine.claim_token, queue || ': every claim has its own token');
    return next is(pgqueue.ack(queue, id, mine.claim_token), false, queue || ': ack with the token of an expired claim returns false after another claim took the message');
    return next is(pgqueue.ack(queue, id, theirs.claim_token), true, queue || ': a refused ack does not affect the current claim of the message');

    id := pgqueue.enqueue(queue, '{"n": 3}');
    select * into mine from pgqueue.claim(queue);
    perform pg_temp.pass('31 s');
    return next is(pgqueue.ack(queue, id, mine.claim_token), true, queue || ': ack succeeds after the claim has expired, if no other claim took the message');

    id := pgqueue.enqueue(queue, '{"n": 4}');
    select * into mine from pgqueue.claim(queue);
    perform pgqueue.nack(queue, id, mine.claim_token, delay => '1 h');
    return next is(pgqueue.ack(queue, id, mine.claim_token), false, queue || ': ack after nack returns false');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'scheduled') b), array[id], queue || ': ack after nack does not delete the message');
    perform pgqueue.purge_queue(queue);

    ids := array(select pgqueue.enqueue_batch(queue, array['1', '2', '3', '4']::jsonb[]));
    select c.* into mine from pgqueue.claim(queue, 3) c limit 1;
    select c.* into theirs from pgqueue.claim(queue) c;
    return next is(pgqueue.ack_batch(queue, ids, gen_random_uuid()), 0, queue || ': ack_batch with a token that no claim has acknowledges no message');
    return next is(pgqueue.ack_batch(queue, '{}', mine.claim_token), 0, queue || ': ack_batch of no ids acknowledges no message');
    return next is(pgqueue.ack_batch(queue, array[ids[1], ids[1]], mine.claim_token), 1, queue || ': ack_batch counts a repeated id once');
    return next is(pgqueue.ack_batch(queue, ids, mine.claim_token), 2, queue || ': ack_batch returns the number of messages that the token still claimed');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'inflight') b), ids[4:4], queue || ': ack_batch leaves messages of another claim in flight');
end;
$$;
select pg_temp.acknowledges('ack_shared', false);
select pg_temp.acknowledges('ack_dedicated', true);

select throws_ok($$ select pgqueue.ack('ack_shared', null, gen_random_uuid()) $$, '22023', null, 'ack refuses a null id');
select throws_ok($$ select pgqueue.ack('ack_shared', 1, null) $$, '22023', null, 'ack refuses a null token');
select throws_ok($$ select pgqueue.ack_batch('ack_shared', null, gen_random_uuid()) $$, '22023', null, 'ack_batch refuses null ids');
select throws_ok($$ select pgqueue.ack_batch('ack_shared', '{1}', null) $$, '22023', null, 'ack_batch refuses a null token');
select throws_ok($$ select pgqueue.ack('ack_nowhere', 1, gen_random_uuid()) $$, 'PQ001', null, 'ack refuses an unknown queue');
select throws_ok($$ select pgqueue.ack_batch('ack_nowhere', '{1}', gen_random_uuid()) $$, 'PQ001', null, 'ack_batch refuses an unknown queue');

select * from finish();
rollback;
