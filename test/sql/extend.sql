begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(59);

create function pg_temp.keeps(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    new_id bigint;
    m pgqueue.message;
    n pgqueue.message;
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', dedicated => has_table);
    new_id := pgqueue.enqueue(queue, '1');
    select * into m from pgqueue.claim(queue);
    perform pg_temp.pass('20 s');
    return next is(pgqueue.extend(queue, new_id, gen_random_uuid(), '1 h'), false, queue || ': extend with a token that no claim has returns false');
    return next is((select b.visible_at from pgqueue.browse(queue, 'inflight') b), m.visible_at, queue || ': a refused extend changes nothing');
    return next is(pgqueue.extend(queue, new_id, m.claim_token, '1 min'), true, queue || ': extend of a claimed message returns true');
    return next is((select b.visible_at from pgqueue.browse(queue, 'inflight') b), pgqueue._now() + interval '1 min', queue || ': extend sets the end of the claim to the given visibility timeout from now');
    return next is((select b.attempt_count from pgqueue.browse(queue, 'inflight') b), 1, queue || ': extend does not count as an attempt');
    perform pg_temp.pass('59.999 s');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': an extended claim lasts beyond its first visibility timeout');
    return next is(pgqueue.extend(queue, new_id, m.claim_token), true, queue || ': a claim can be extended again');
    return next is((select b.visible_at from pgqueue.browse(queue, 'inflight') b), pgqueue._now() + interval '30 s', queue || ': extend uses the visibility timeout of the queue by default');
    return next is(pgqueue.extend(queue, new_id, m.claim_token, '1 s'), true, queue || ': extend can shorten a claim');
    perform pg_temp.pass('1 s');
    return next is(pgqueue.extend(queue, new_id, m.claim_token), true, queue || ': extend succeeds after the claim has expired, if no other claim took the message');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': claim does not return a message whose expired claim was extended');
    perform pg_temp.pass('30 s');
    select * into n from pgqueue.claim(queue);
    return next is(n.id, new_id, queue || ': claim returns a message whose extended claim has expired');
    return next is(pgqueue.extend(queue, new_id, m.claim_token, '1 h'), false, queue || ': extend with the token of an expired claim returns false after another claim took the message');
    perform pgqueue.ack(queue, new_id, n.claim_token);
    return next is(pgqueue.extend(queue, new_id, n.claim_token), false, queue || ': extend of an acknowledged message returns false');
end;
$$;
select pg_temp.keeps('extend_shared', false);
select pg_temp.keeps('extend_dedicated', true);

create function pg_temp.keeps_many(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    ids bigint[];
    token uuid;
    other uuid;
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', dedicated => has_table);
    ids := array(select pgqueue.enqueue_batch(queue, '{1,2,3,4}'));
    select c.claim_token into token from pgqueue.claim(queue, 3) c;
    select c.claim_token into other from pgqueue.claim(queue) c;
    perform pgqueue.ack(queue, ids[2], token);
    perform pg_temp.pass('20 s');
    return next is(array(select pgqueue.extend_batch(queue, array[ids[4], ids[3], ids[2], ids[1], ids[1], null], token, '1 min')), array[ids[1], ids[3]],
        queue || ': extend_batch returns the ids that the token still claims, in order of id');
    return next is((select array_agg(b.visible_at - pgqueue._now() order by b.id) from pgqueue.browse(queue, 'inflight') b), '{1 min, 1 min, 10 s}', queue || ': extend_batch extends only the claims that it returns');
    return next is((select array_agg(b.attempt_count) from pgqueue.browse(queue, 'inflight') b), '{1,1,1}', queue || ': extend_batch does not count as an attempt');
    return next is(array(select pgqueue.extend_batch(queue, ids[1:1], token)), ids[1:1], queue || ': extend_batch can extend some messages of a claim');
    return next is((select array_agg(b.visible_at - pgqueue._now() order by b.id) from pgqueue.browse(queue, 'inflight') b), '{30 s, 1 min, 10 s}', queue || ': extend_batch uses the visibility timeout of the queue by default');
    perform pg_temp.pass('30 s');
    return next is(array(select pgqueue.extend_batch(queue, ids, token)), array[ids[1], ids[3]], queue || ': extend_batch succeeds after the claims have expired, if no other claim took the messages');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids[4:4], queue || ': claim does not return messages whose expired claims were extended by extend_batch');
    return next is((select count(*) from pgqueue.extend_batch(queue, ids, other)), 0::bigint, queue || ': extend_batch with the token of an expired claim returns no id after another claim took the message');
    update pgqueue.messages m set attempt_count = m.attempt_count + 1 where m.id = ids[3];
    return next is(array(select pgqueue.extend_batch(queue, ids, token)), ids[1:1], queue || ': extend_batch does not return a message that plain SQL claimed since');
    return next is((select count(*) from pgqueue.extend_batch(queue, '{}', token)), 0::bigint, queue || ': extend_batch of no ids returns no id');
end;
$$;
select pg_temp.keeps_many('extend_batch_shared', false);
select pg_temp.keeps_many('extend_batch_dedicated', true);

select throws_ok($$ select pgqueue.extend('extend_shared', null, gen_random_uuid()) $$, '22023', null, 'extend refuses a null id');
select throws_ok($$ select pgqueue.extend('extend_shared', 1, null) $$, '22023', null, 'extend refuses a null token');
select throws_ok($$ select pgqueue.extend('extend_shared', 1, gen_random_uuid(), '0.999 s') $$, '22023', null, 'extend refuses a timeout below 1 second');
select throws_ok($$ select pgqueue.extend('extend_shared', 1, gen_random_uuid(), '43201 s') $$, '22023', null, 'extend refuses a timeout over 12 hours');
select is(pgqueue.extend('extend_shared', 1, gen_random_uuid(), '43200 s'), false, 'extend accepts a visibility timeout of 12 hours');
select throws_ok($$ select pgqueue.extend('extend_nowhere', 1, gen_random_uuid()) $$, 'PQ001', null, 'extend refuses an unknown queue');

select throws_ok($$ select pgqueue.extend_batch('extend_shared', null, gen_random_uuid()) $$, '22023', null, 'extend_batch refuses null ids');
select throws_ok($$ select pgqueue.extend_batch('extend_shared', '{1}', null) $$, '22023', null, 'extend_batch refuses a null token');
select throws_ok($$ select pgqueue.extend_batch('extend_shared', '{1}', gen_random_uuid(), '0.999 s') $$, '22023', null, 'extend_batch refuses a timeout below 1 second');
select throws_ok($$ select pgqueue.extend_batch('extend_shared', '{1}', gen_random_uuid(), '43201 s') $$, '22023', null, 'extend_batch refuses a timeout over 12 hours');
select throws_ok($$ select pgqueue.extend_batch('extend_nowhere', '{1}', gen_random_uuid()) $$, 'PQ001', null, 'extend_batch refuses an unknown queue');

select * from finish();
rollback;
