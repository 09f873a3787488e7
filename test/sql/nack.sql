begin;
-- Files take turns: this one attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(78);

create function pg_temp.gives_back(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    new_id bigint;
    name uuid := gen_random_uuid();
    sent pgqueue.message;
    m pgqueue.message;
    n pgqueue.message;
    d pgqueue.dead_message;
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', max_attempts => 3, dedicated => has_table, backoff_jitter => 0);
    new_id := pgqueue.enqueue(queue, '{"n": 1}', headers => '{"h": 1}', message_id => name, expires_in => '1 day');
    select * into sent from pgqueue.browse(queue);
    select * into m from pgqueue.claim(queue, claimed_by => 'alice');

    return next is(pgqueue.nack(queue, new_id, gen_random_uuid(), '0'), false, queue || ': nack with a foreign token is false');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'inflight') b), array[new_id], queue || ': a refused nack leaves the message in flight');
    return next is(pgqueue.nack(queue, new_id, m.claim_token, '0', 'it broke'), true, queue || ': nack of a claimed message is true');
    return next is(pgqueue.nack(queue, new_id, m.claim_token, '0'), false, queue || ': a second nack is false');
    select * into n from pgqueue.claim(queue);
    return next is(n.id, new_id, queue || ': a message given back with no delay is claimed again at once');
    return next is(n.attempt_count, 2, queue || ': nack counts no attempt, the claim does');
    return next is(n.last_error, 'it broke', queue || ': the error of a nack is kept as last_error');
    return next is(
        (n.payload, n.headers, n.message_id, n.enqueued_at, n.expires_at, n.max_attempts)::text,
        (sent.payload, sent.headers, sent.message_id, sent.enqueued_at, sent.expires_at, sent.max_attempts)::text,
        queue || ': a message given back is otherwise the one that was sent');
    return next isnt(n.claim_token, m.claim_token, queue || ': the second claim has a token of its own');
    return next is(pgqueue.nack(queue, new_id, m.claim_token, '0'), false, queue || ': nack with a stale token is false');
    return next is(pgqueue.extend(queue, new_id, m.claim_token), false, queue || ': extend with a stale token is false');

    perform pg_temp.pass('31 s');
    select * into m from pgqueue.claim(queue);
    return next is(m.id, new_id, queue || ': a message that was given back, claimed again and lapsed is delivered again');
    return next is(m.attempt_count, 3, queue || ': its third claim is its third attempt');
    return next is(m.last_error, 'it broke', queue || ': last_error outlives a claim that lapsed');
    return next is(pgqueue.nack(queue, new_id, m.claim_token, '0', 'it broke for good'), true, queue || ': the nack of the last attempt is true');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': what spent its attempts is not delivered again');
    select * into d from pgqueue.browse_dead_messages(queue);
    return next is((d.id, d.reason, d.last_error, d.attempt_count)::text, (new_id, 'attempts_exhausted'::text, 'it broke for good'::text, 3)::text,
        queue || ': what spent its attempts by nack is a dead letter with its reason, last error and attempts');
    return next is(d.died_at, pgqueue._now(), queue || ': a dead letter says when it died');
    return next is((d.payload, d.headers, d.message_id, d.enqueued_at)::text, (sent.payload, sent.headers, sent.message_id, sent.enqueued_at)::text,
        queue || ': a dead letter is otherwise the message that was sent');

    new_id := pgqueue.enqueue(queue, '{"n": 2}');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.nack(queue, new_id, m.claim_token, delay => '10 s', error => 'first');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': a message given back with a delay is not delivered at once');
    perform pg_temp.pass('9.999 s');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': it is not delivered before its delay has passed');
    perform pg_temp.pass('0.001 s');
    select * into m from pgqueue.claim(queue);
    return next is(m.id, new_id, queue || ': it is delivered once its delay has passed');
    perform pgqueue.nack(queue, new_id, m.claim_token, delay => '0');
    select * into m from pgqueue.claim(queue);
    return next is(m.last_error, 'first', queue || ': a nack without error keeps the error before');
    perform pgqueue.ack(queue, m.id, m.claim_token);

    new_id := pgqueue.enqueue(queue, '{"n": 3}');
    select * into m from pgqueue.claim(queue);
    perform pg_temp.pass('31 s');
    return next is(pgqueue.nack(queue, new_id, m.claim_token), true, queue || ': a claim that ran out and that nobody took can still be given back');
    return next is((select b.visible_at from pgqueue.browse(queue, 'scheduled') b), pgqueue._now() + interval '1 s',
        queue || ': with no delay named the queue''s backoff applies');
    perform pg_temp.pass('1 s');
    select * into m from pgqueue.claim(queue);
    return next is(m.attempt_count, 2, queue || ': it is delivered when the backoff has passed');

    return next is(pgqueue.reject(queue, new_id, gen_random_uuid(), 'no'), false, queue || ': reject with a foreign token is false');
    return next is(pgqueue.reject(queue, new_id, m.claim_token, 'poison'), true, queue || ': reject of a claimed message is true');
    return next is((select (b.reason, b.last_error, b.attempt_count)::text from pgqueue.browse_dead_messages(queue, after_id => new_id - 1) b), '(rejected,poison,2)',
        queue || ': what was rejected is a dead letter at once, with the error and the attempts it had');
    return next is(pgqueue.reject(queue, new_id, m.claim_token, 'poison'), false, queue || ': a second reject is false');
    return next is((select count(*) from pgqueue.messages b where b.queue_name = queue), 0::bigint, queue || ': what was rejected is not in the queue');

    perform pgqueue.alter_queue(queue, dlq_enabled => false, max_attempts => 1);
    perform pgqueue.purge_dead_messages(queue);
    new_id := pgqueue.enqueue(queue, '{"n": 4}');
    select * into m from pgqueue.claim(queue);
    return next is(pgqueue.nack(queue, new_id, m.claim_token, '0'), true, queue || ': nack of the last attempt is true without dead letters, too');
    new_id := pgqueue.enqueue(queue, '{"n": 5}');
    select * into m from pgqueue.claim(queue);
    return next is(pgqueue.reject(queue, new_id, m.claim_token), true, queue || ': reject is true without dead letters, too');
    return next is((select pgqueue.drop_queue(queue)), 0::bigint, queue || ': a queue without dead letters deletes what was given up');
end;
$$;
select pg_temp.gives_back('nack_shared', false);
select pg_temp.gives_back('nack_dedicated', true);

select lives_ok($$ select pgqueue.create_queue('nack_errors', max_attempts => 100) $$, 'a queue is there for what is refused');
create function pg_temp.is_cut() returns text language plpgsql as $$
declare
    m pgqueue.message;
begin
    perform pgqueue.enqueue('nack_errors', '1');
    select * into m from pgqueue.claim('nack_errors');
    perform pgqueue.nack('nack_errors', m.id, m.claim_token, '0', repeat('é', 65537));
    select * into m from pgqueue.claim('nack_errors');
    return is(m.last_error, repeat('é', 65536), 'an error is kept up to 65,536 characters');
end;
$$;
select pg_temp.is_cut();
select throws_ok($$ select pgqueue.nack('nack_errors', null, gen_random_uuid()) $$, '22023', null, 'nack refuses a null id');
select throws_ok($$ select pgqueue.nack('nack_errors', 1, null) $$, '22023', null, 'nack refuses a null token');
select throws_ok($$ select pgqueue.nack('nack_errors', 1, gen_random_uuid(), '-1 s') $$, '22023', null, 'nack refuses a negative delay');
select throws_ok($$ select pgqueue.nack('nack_errors', 1, gen_random_uuid(), '11 years') $$, '22023', null, 'nack refuses a delay over 10 years');
select throws_ok($$ select pgqueue.nack('nack_nowhere', 1, gen_random_uuid()) $$, 'PQ001', null, 'nack refuses an unknown queue');
select throws_ok($$ select pgqueue.reject('nack_errors', null, gen_random_uuid()) $$, '22023', null, 'reject refuses a null id');
select throws_ok($$ select pgqueue.reject('nack_errors', 1, null) $$, '22023', null, 'reject refuses a null token');
select throws_ok($$ select pgqueue.reject('nack_nowhere', 1, gen_random_uuid()) $$, 'PQ001', null, 'reject refuses an unknown queue');

select * from finish();
rollback;
