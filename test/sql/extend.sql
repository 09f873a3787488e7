begin;
-- Files take turns: this one attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(34);

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
    return next is(pgqueue.extend(queue, new_id, gen_random_uuid(), '1 h'), false, queue || ': extend with a foreign token is false');
    return next is((select b.visible_at from pgqueue.browse(queue, 'inflight') b), m.visible_at, queue || ': a refused extend changes nothing');
    return next is(pgqueue.extend(queue, new_id, m.claim_token, '1 min'), true, queue || ': extend of a claimed message is true');
    return next is((select b.visible_at from pgqueue.browse(queue, 'inflight') b), pgqueue._now() + interval '1 min', queue || ': the claim ends its timeout from now');
    return next is((select b.attempt_count from pgqueue.browse(queue, 'inflight') b), 1, queue || ': extend counts no attempt');
    perform pg_temp.pass('59.999 s');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': an extended claim outlives its first timeout');
    return next is(pgqueue.extend(queue, new_id, m.claim_token), true, queue || ': a claim can be extended again');
    return next is((select b.visible_at from pgqueue.browse(queue, 'inflight') b), pgqueue._now() + interval '30 s', queue || ': by default it gets the timeout of the queue');
    return next is(pgqueue.extend(queue, new_id, m.claim_token, '1 s'), true, queue || ': a claim can be shortened');
    perform pg_temp.pass('1 s');
    return next is(pgqueue.extend(queue, new_id, m.claim_token), true, queue || ': a claim that ran out and that nobody took can still be extended');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': which hides the message again');
    perform pg_temp.pass('30 s');
    select * into n from pgqueue.claim(queue);
    return next is(n.id, new_id, queue || ': an extended claim that runs out is claimed again');
    return next is(pgqueue.extend(queue, new_id, m.claim_token, '1 h'), false, queue || ': extend with a stale token is false');
    perform pgqueue.ack(queue, new_id, n.claim_token);
    return next is(pgqueue.extend(queue, new_id, n.claim_token), false, queue || ': extend of an acknowledged message is false');
end;
$$;
select pg_temp.keeps('extend_shared', false);
select pg_temp.keeps('extend_dedicated', true);

select throws_ok($$ select pgqueue.extend('extend_shared', null, gen_random_uuid()) $$, '22023', null, 'extend refuses a null id');
select throws_ok($$ select pgqueue.extend('extend_shared', 1, null) $$, '22023', null, 'extend refuses a null token');
select throws_ok($$ select pgqueue.extend('extend_shared', 1, gen_random_uuid(), '0.999 s') $$, '22023', null, 'extend refuses a timeout below 1 second');
select throws_ok($$ select pgqueue.extend('extend_shared', 1, gen_random_uuid(), '43201 s') $$, '22023', null, 'extend refuses a timeout over 12 hours');
select is(pgqueue.extend('extend_shared', 1, gen_random_uuid(), '43200 s'), false, 'extend takes a timeout of 12 hours');
select throws_ok($$ select pgqueue.extend('extend_nowhere', 1, gen_random_uuid()) $$, 'PQ001', null, 'extend refuses an unknown queue');

select * from finish();
rollback;
