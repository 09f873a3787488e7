begin;
-- Files take turns: this one attaches a table and stops the clock.
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
    return next is(pgqueue.ack(queue, first_id, gen_random_uuid()), false, queue || ': ack with a foreign token is false');
    return next is(pgqueue.ack(queue || '_other', first_id, mine.claim_token), false, queue || ': ack in another queue is false');
    return next is(pgqueue.ack(queue, first_id + 1000000, mine.claim_token), false, queue || ': ack of an id that does not exist is false');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'inflight') b), array[first_id], queue || ': a refused ack leaves the message in flight');
    return next is(pgqueue.ack(queue, first_id, mine.claim_token), true, queue || ': ack of a claimed message is true');
    return next is((select count(*) from pgqueue.messages m where m.queue_name = queue), 0::bigint, queue || ': an acknowledged message is gone');
    return next is(pgqueue.ack(queue, first_id, mine.claim_token), false, queue || ': a second ack is false');
    perform pg_temp.pass('1 day');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': an acknowledged message never comes back');

    id := pgqueue.enqueue(queue, '{"n": 2}');
    select * into mine from pgqueue.claim(queue);
    perform pg_temp.pass('31 s');
    select * into theirs from pgqueue.claim(queue);
    return next is(theirs.id, id, queue || ': a claim that ran out goes to the next claimer');
    return next isnt(theirs.claim_token, mine.claim_token, queue || ': every claim has a token of its own');
    return next is(pgqueue.ack(queue, id, mine.claim_token), false, queue || ': ack with a stale token is false');
    return next is(pgqueue.ack(queue, id, theirs.claim_token), true, queue || ': a stale ack takes nothing from the new claimer');

    id := pgqueue.enqueue(queue, '{"n": 3}');
    select * into mine from pgqueue.claim(queue);
    perform pg_temp.pass('31 s');
    return next is(pgqueue.ack(queue, id, mine.claim_token), true, queue || ': a claim that ran out and that nobody took is still acknowledged');

    id := pgqueue.enqueue(queue, '{"n": 4}');
    select * into mine from pgqueue.claim(queue);
    perform pgqueue.nack(queue, id, mine.claim_token, delay => '1 h');
    return next is(pgqueue.ack(queue, id, mine.claim_token), false, queue || ': ack after nack is false');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'scheduled') b), array[id], queue || ': ack after nack removes nothing');
    perform pgqueue.purge_queue(queue);

    ids := array(select pgqueue.enqueue_batch(queue, array['1', '2', '3', '4']::jsonb[]));
    select c.* into mine from pgqueue.claim(queue, 3) c limit 1;
    select c.* into theirs from pgqueue.claim(queue) c;
    return next is(pgqueue.ack_batch(queue, ids, gen_random_uuid()), 0, queue || ': ack_batch with a foreign token acknowledges none');
    return next is(pgqueue.ack_batch(queue, '{}', mine.claim_token), 0, queue || ': ack_batch of no ids acknowledges none');
    return next is(pgqueue.ack_batch(queue, array[ids[1], ids[1]], mine.claim_token), 1, queue || ': ack_batch counts an id once');
    return next is(pgqueue.ack_batch(queue, ids, mine.claim_token), 2, queue || ': ack_batch returns how many were still the caller''s');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'inflight') b), ids[4:4], queue || ': ack_batch leaves what another claim holds');
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
