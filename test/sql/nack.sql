begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(217);

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

    new_id := pgqueue.enqueue(queue, '{"n": 3}');
    select * into m from pgqueue.claim(queue);
    return next is(pgqueue.reject(queue, new_id, m.claim_token, 'enough', reason => 'attempts_exhausted'), true, queue || ': reject of a message whose attempts are spent by rules of the caller''s own is true');
    return next is((select (b.reason, b.last_error, b.attempt_count)::text from pgqueue.browse_dead_messages(queue, after_id => new_id - 1) b), '(attempts_exhausted,enough,1)',
        queue || ': the dead letter says so, though it could have had more attempts');

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

-- Evidence: headers of a failure beside those of the message.
create function pg_temp.keeps_evidence(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    new_id bigint;
    m pgqueue.message;
    kept jsonb;
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', max_attempts => 100, dedicated => has_table);
    new_id := pgqueue.enqueue(queue, '1', headers => '{"type": "order", "tries": 0}');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.nack(queue, new_id, m.claim_token, '0', headers => '{"tries": 1, "host": {"name": "a"}}');
    select * into m from pgqueue.claim(queue);
    return next is(m.headers, '{"type": "order", "tries": 1, "host": {"name": "a"}}', queue || ': headers of a nack are added, and take the place of those of the same name');
    perform pgqueue.nack(queue, new_id, m.claim_token, '0', headers => '{"host": {"zone": "b"}}');
    select * into m from pgqueue.claim(queue);
    return next is(m.headers -> 'host', '{"zone": "b"}', queue || ': a header is replaced as a whole');
    kept := m.headers;
    perform pgqueue.nack(queue, new_id, m.claim_token, '0');
    select * into m from pgqueue.claim(queue);
    return next is(m.headers, kept, queue || ': a nack without headers leaves them');

    -- 64 KB are 65,536 bytes of JSON text.
    perform pgqueue.nack(queue, new_id, m.claim_token, '0', headers => jsonb_build_object('stack', repeat('x', 65536 - octet_length((kept || '{"stack": ""}')::text))));
    select * into m from pgqueue.claim(queue);
    return next is(octet_length(m.headers::text), 65536, queue || ': headers may come to 64 KB with those of a failure');
    kept := m.headers;
    return next is(pgqueue.nack(queue, new_id, m.claim_token, '0', 'it broke', jsonb_build_object('stack', (kept ->> 'stack') || 'x')), true, queue || ': a nack whose headers do not fit is true nevertheless');
    select * into m from pgqueue.claim(queue);
    return next ok(m.headers = kept and m.last_error = 'it broke', queue || ': but the message keeps the headers it had');
    perform pgqueue.nack(queue, new_id, m.claim_token, '0', headers => '{"stack": null}');
    select * into m from pgqueue.claim(queue);
    return next is(m.headers, kept || '{"stack": null}', queue || ': what takes the place of more fits');
    return next is(pgqueue.nack(queue, new_id, m.claim_token, '0', headers => jsonb_build_object('stack', repeat('x', 65537))), true, queue || ': a nack with headers over 64 KB is true');
    select * into m from pgqueue.claim(queue);
    return next is(m.headers, kept || '{"stack": null}', queue || ': which are not kept');

    perform pgqueue.reject(queue, new_id, m.claim_token, 'no use', '{"why": "no use"}');
    return next is((select d.headers from pgqueue.browse_dead_messages(queue) d), kept || '{"stack": null, "why": "no use"}', queue || ': headers of a reject are added to the dead letter');

    new_id := pgqueue.enqueue(queue, '2');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.nack(queue, new_id, m.claim_token, '0', headers => '{}');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.nack(queue, new_id, m.claim_token, '0', headers => '{"n": 1}');
    select * into m from pgqueue.claim(queue);
    return next is(m.headers, '{"n": 1}', queue || ': a message without headers gets those of its failure');
    perform pgqueue.ack(queue, new_id, m.claim_token);

    insert into pgqueue.messages (queue_name, payload, headers, max_attempts) values (queue, '3', '["raw"]', 2);
    select * into m from pgqueue.claim(queue);
    return next is(pgqueue.nack(queue, m.id, m.claim_token, '0', headers => '{"n": 1}'), true, queue || ': a message with headers that are no object can be given back');
    select * into m from pgqueue.claim(queue);
    return next is(m.headers, '["raw"]', queue || ': which stay as they were');
    -- Put back by hand and left among the dead as well.
    insert into pgqueue.dead_messages (id, queue_name, enqueued_at, attempt_count, max_attempts, payload, headers, reason)
    values (m.id, queue, m.enqueued_at, 1, 2, '3', '{"old": true}', 'rejected');
    update pgqueue.messages c set headers = null where c.id = m.id;
    perform pgqueue.nack(queue, m.id, m.claim_token, headers => '{"last": true}');
    return next is((select d.headers from pgqueue.browse_dead_messages(queue, after_id => m.id - 1) d), '{"last": true}',
        queue || ': the dead letter of the last attempt has the headers of its failure');
end;
$$;
select pg_temp.keeps_evidence('nack_headers', false);
select pg_temp.keeps_evidence('nack_headers_dedicated', true);

-- Given back unworked.
create function pg_temp.releases(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    ids bigint[];
    sent pgqueue.message;
    m pgqueue.message;
    n pgqueue.message;
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', max_attempts => 2, dedicated => has_table);
    ids := array(select pgqueue.enqueue_batch(queue, '{1,2,3,4}', expires_in => '1 h', headers => array['{"h": 1}', null, null, null]::jsonb[]));
    select * into sent from pgqueue.browse(queue, max_messages => 1);
    select * into m from pgqueue.claim(queue, 3, claimed_by => 'alice');

    return next is(pgqueue.release(queue, ids, gen_random_uuid()), 0, queue || ': release with a foreign token gives nothing back');
    return next is(pgqueue.release(queue, '{}', m.claim_token), 0, queue || ': release of nothing gives nothing back');
    return next is(pgqueue.release(queue, array[ids[2], ids[1], ids[1], null, ids[4], ids[4] + 1000000], m.claim_token), 2,
        queue || ': release returns how many were still the caller''s, whatever else is named');
    return next is(pgqueue.release(queue, ids[1:2], m.claim_token), 0, queue || ': a second release gives nothing back');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'inflight') b), ids[3:3], queue || ': what was not released stays in flight');
    return next is(pgqueue.ack_batch(queue, ids[1:2], m.claim_token), 0, queue || ': what was released cannot be acknowledged');
    return next is(pgqueue.nack(queue, ids[1], m.claim_token), false, queue || ': nor given back');
    return next is((select b.attempt_count from pgqueue.browse(queue) b where b.id = ids[1]), 0, queue || ': a released message has the attempts it had before the claim');
    return next ok(pgqueue.next_due_at(queue) <= pgqueue._now(), queue || ': it is due at once');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 2) c), ids[1:2], queue || ': and is claimed again before others, by id');
    return next is(
        (select (b.payload, b.headers, b.message_id, b.enqueued_at, b.expires_at, b.max_attempts, b.attempt_count, b.last_error)::text
            from pgqueue.browse(queue, 'inflight') b where b.id = ids[1]),
        (sent.payload, sent.headers, sent.message_id, sent.enqueued_at, sent.expires_at, sent.max_attempts, 1, sent.last_error)::text,
        queue || ': it is otherwise the message that was sent, in its first attempt');

    perform pg_temp.pass('31 s');
    return next is(pgqueue.release(queue, ids[3:3], m.claim_token), 1, queue || ': a claim that ran out and that nobody took can still be released');
    select * into n from pgqueue.claim(queue, 10) c where c.id = ids[1];
    return next is(n.attempt_count, 2, queue || ': an attempt that ran out counts, one that was released does not');
    return next is((select b.attempt_count from pgqueue.browse(queue, 'inflight') b where b.id = ids[3]), 1, queue || ': also where it was released after it had run out');
    return next is(pgqueue.release(queue, ids, m.claim_token), 0, queue || ': a stale token gives nothing back');
    return next is(pgqueue.release(queue, ids, n.claim_token), 4, queue || ': the last attempt can be released');
    return next is((select array_agg(c.attempt_count order by c.id) from pgqueue.claim(queue, 10) c), array[2, 2, 1, 1], queue || ': and is then made again');
    return next is((select count(*) from pgqueue.browse_dead_messages(queue)), 0::bigint, queue || ': nothing dies of a release');

    -- A claim by plain SQL sets no token and ends the power of the one before.
    select b.* into n from pgqueue.browse(queue, 'inflight') b where b.id = ids[4];
    update pgqueue.messages c set attempt_count = c.attempt_count + 1, visible_at = pgqueue._now() + interval '1 min' where c.id = ids[4];
    return next is(pgqueue.release(queue, ids[4:4], n.claim_token), 0, queue || ': what plain SQL has claimed since is not released');
    perform pgqueue.pause_queue(queue);
    return next is(pgqueue.release(queue, ids[1:1], n.claim_token), 1, queue || ': release works in a paused queue');
end;
$$;
select pg_temp.releases('nack_release', false);
select pg_temp.releases('nack_release_dedicated', true);

-- An attempt that a rollback has undone.
create function pg_temp.rolls_back(queue text) returns int language plpgsql as $$
declare
    m pgqueue.message;
begin
    begin
        select * into m from pgqueue.receive(queue);
        raise exception 'it broke';
    exception when raise_exception then
        return m.attempt_count;
    end;
end;
$$;
create function pg_temp.records(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    new_id bigint;
    sent pgqueue.message;
    m pgqueue.message;
    d pgqueue.dead_message;
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', max_attempts => 3, dedicated => has_table, backoff_jitter => 0);
    new_id := pgqueue.enqueue(queue, '{"n": 1}', headers => '{"h": 1}', message_id => gen_random_uuid(), expires_in => '1 day');
    select * into sent from pgqueue.browse(queue);
    return next is(pg_temp.rolls_back(queue), 1, queue || ': a message is received, and the receiver rolls back');
    return next is(pgqueue.record_failure(queue, new_id, 2), false, queue || ': another attempt than the next is not counted');
    return next is(pgqueue.record_failure(queue, new_id + 1000000, 1), false, queue || ': nor is one of a message that is not there');
    return next is(pgqueue.peek(queue), 1, queue || ': what was not counted stays ready');
    return next is(pgqueue.record_failure(queue, new_id, 1, error => 'it broke', headers => '{"tries": 1}'), true, queue || ': the attempt is counted');
    return next is(pgqueue.record_failure(queue, new_id, 1), false, queue || ': once');
    return next is((select b.visible_at from pgqueue.browse(queue, 'scheduled') b), pgqueue._now() + interval '1 s', queue || ': the message is backed off');
    return next is(pgqueue.record_failure(queue, new_id, 2), false, queue || ': no attempt is counted that cannot have been made');

    -- What came due is fetched from scheduled_messages by the transaction that rolls back.
    perform pg_temp.pass('1 s');
    return next is(pg_temp.rolls_back(queue), 2, queue || ': it is received again, and the receiver rolls back');
    return next is(pgqueue.record_failure(queue, new_id, 1), false, queue || ': the first attempt is not counted again');
    return next is(pgqueue.record_failure(queue, new_id, 2, '10 s'), true, queue || ': the second is counted');
    return next is((select b.visible_at from pgqueue.browse(queue, 'scheduled') b), pgqueue._now() + interval '10 s', queue || ': with a delay named that is the wait');
    perform pg_temp.pass('10 s');
    return next is(pg_temp.rolls_back(queue), 3, queue || ': it is received for the last time');
    return next is(pgqueue.record_failure(queue, new_id, 3, error => 'it broke for good', headers => '{"tries": 3}'), true, queue || ': the last attempt is counted');
    select * into d from pgqueue.browse_dead_messages(queue);
    return next is((d.id, d.reason, d.last_error, d.attempt_count, d.died_at)::text, (new_id, 'attempts_exhausted'::text, 'it broke for good'::text, 3, pgqueue._now())::text,
        queue || ': and the message is a dead letter with its reason, last error and attempts');
    return next is((d.payload, d.headers, d.message_id, d.enqueued_at, d.expires_at)::text,
        (sent.payload, sent.headers || '{"tries": 3}', sent.message_id, sent.enqueued_at, sent.expires_at)::text, queue || ': otherwise the message that was sent, with the headers of its failures');
    return next is(pgqueue.record_failure(queue, new_id, 3), false, queue || ': for a dead letter nothing is counted');

    -- Claims.
    new_id := pgqueue.enqueue(queue, '{"n": 2}');
    select * into m from pgqueue.claim(queue);
    return next is(pgqueue.record_failure(queue, new_id, 2), false, queue || ': for a message that is claimed nothing is counted');
    return next is(pgqueue.record_failure(queue, new_id, 1), false, queue || ': nor what its claim has counted');
    perform pg_temp.pass('31 s');
    return next is(pg_temp.rolls_back(queue), 2, queue || ': a message whose claim ran out is received, and the receiver rolls back');
    perform pgqueue.extend(queue, new_id, m.claim_token);
    return next is(pgqueue.record_failure(queue, new_id, 2), false, queue || ': if its old holder has extended the claim nothing is counted');
    perform pg_temp.pass('31 s');
    return next is(pgqueue.record_failure(queue, new_id, 2, '0', 'it broke'), true, queue || ': once that ran out the attempt is counted');
    return next is(pgqueue.ack(queue, new_id, m.claim_token), false, queue || ': which ends the claim before it');
    select * into m from pgqueue.claim(queue);
    return next is((m.id, m.attempt_count, m.last_error)::text, (new_id, 3, 'it broke'::text)::text, queue || ': the next claim is the next attempt, at once where the delay is none');
    perform pgqueue.ack(queue, new_id, m.claim_token);
    return next is(pgqueue.record_failure(queue, new_id, 4), false, queue || ': for a message that is done nothing is counted');
end;
$$;
select pg_temp.records('nack_record', false);
select pg_temp.records('nack_record_dedicated', true);

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

select throws_ok($$ select pgqueue.nack('nack_errors', 1, gen_random_uuid(), headers => '[]') $$, '22023', null, 'nack refuses headers that are no object');
select throws_ok($$ select pgqueue.nack('nack_errors', 1, gen_random_uuid(), headers => 'null') $$, '22023', null, 'nack refuses headers that are JSON null');
select throws_ok($$ select pgqueue.nack('nack_errors', 1, gen_random_uuid(), '300000 years') $$, '22023', null, 'nack refuses a delay beyond all calendars');
select throws_ok($$ select pgqueue.reject('nack_errors', 1, gen_random_uuid(), headers => '"x"') $$, '22023', null, 'reject refuses headers that are no object');
select throws_ok($$ select pgqueue.reject('nack_errors', 1, gen_random_uuid(), reason => 'expired') $$, '22023', 'invalid reason: ''expired''', 'reject refuses a reason that is not a matter of opinion');
select throws_ok($$ select pgqueue.reject('nack_errors', 1, gen_random_uuid(), reason => 'queue_dropped') $$, '22023', 'invalid reason: ''queue_dropped''', 'reject refuses any other reason');
select throws_ok($$ select pgqueue.reject('nack_errors', 1, gen_random_uuid(), reason => 'bored') $$, '22023', 'invalid reason: ''bored''', 'reject refuses a reason that nobody knows');
select throws_ok($$ select pgqueue.reject('nack_errors', 1, gen_random_uuid(), reason => null) $$, '22023', 'invalid reason: null', 'reject refuses a null reason');
select throws_ok($$ select pgqueue.release('nack_errors', null, gen_random_uuid()) $$, '22023', null, 'release refuses null ids');
select throws_ok($$ select pgqueue.release('nack_errors', '{1}', null) $$, '22023', null, 'release refuses a null token');
select throws_ok($$ select pgqueue.release('nack_nowhere', '{1}', gen_random_uuid()) $$, 'PQ001', null, 'release refuses an unknown queue');
select throws_ok($$ select pgqueue.record_failure('nack_errors', null, 1) $$, '22023', null, 'record_failure refuses a null id');
select throws_ok($$ select pgqueue.record_failure('nack_errors', 1, null) $$, '22023', null, 'record_failure refuses a null attempt_count');
select throws_ok($$ select pgqueue.record_failure('nack_errors', 1, 0) $$, '22023', null, 'record_failure refuses an attempt_count below 1');
select throws_ok($$ select pgqueue.record_failure('nack_errors', 1, 1, '-1 s') $$, '22023', null, 'record_failure refuses a negative delay');
select throws_ok($$ select pgqueue.record_failure('nack_errors', 1, 1, headers => '7') $$, '22023', null, 'record_failure refuses headers that are no object');
select throws_ok($$ select pgqueue.record_failure('nack_nowhere', 1, 1) $$, 'PQ001', null, 'record_failure refuses an unknown queue');

select * from finish();
rollback;
