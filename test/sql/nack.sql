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

    return next is(pgqueue.nack(queue, new_id, gen_random_uuid(), '0'), false, queue || ': nack with a token that no claim has returns false');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'inflight') b), array[new_id], queue || ': a refused nack leaves the message in flight');
    return next is(pgqueue.nack(queue, new_id, m.claim_token, '0', 'it broke'), true, queue || ': nack of a claimed message returns true');
    return next is(pgqueue.nack(queue, new_id, m.claim_token, '0'), false, queue || ': a second nack returns false');
    select * into n from pgqueue.claim(queue);
    return next is(n.id, new_id, queue || ': claim returns a message at once after nack with a delay of 0');
    return next is(n.attempt_count, 2, queue || ': claim increments attempt_count and nack does not');
    return next is(n.last_error, 'it broke', queue || ': nack stores its error as last_error');
    return next is(
        (n.payload, n.headers, n.message_id, n.enqueued_at, n.expires_at, n.max_attempts)::text,
        (sent.payload, sent.headers, sent.message_id, sent.enqueued_at, sent.expires_at, sent.max_attempts)::text,
        queue || ': nack leaves payload, headers, message_id, enqueued_at, expires_at and max_attempts unchanged');
    return next isnt(n.claim_token, m.claim_token, queue || ': the second claim has another token');
    return next is(pgqueue.nack(queue, new_id, m.claim_token, '0'), false, queue || ': nack with the token of an earlier claim returns false');
    return next is(pgqueue.extend(queue, new_id, m.claim_token), false, queue || ': extend with the token of an earlier claim returns false');

    perform pg_temp.pass('31 s');
    select * into m from pgqueue.claim(queue);
    return next is(m.id, new_id, queue || ': claim returns a message whose second claim has expired');
    return next is(m.attempt_count, 3, queue || ': the third claim returns an attempt_count of 3');
    return next is(m.last_error, 'it broke', queue || ': an expired claim keeps last_error');
    return next is(pgqueue.nack(queue, new_id, m.claim_token, '0', 'it broke for good'), true, queue || ': nack of the last attempt returns true');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': claim does not return a message whose last attempt failed');
    select * into d from pgqueue.browse_dead_messages(queue);
    return next is((d.id, d.reason, d.last_error, d.attempt_count)::text, (new_id, 'attempts_exhausted'::text, 'it broke for good'::text, 3)::text,
        queue || ': nack of the last attempt makes a dead letter with reason, last_error and attempt_count');
    return next is(d.died_at, pgqueue._now(), queue || ': died_at is the time of the last nack');
    return next is((d.payload, d.headers, d.message_id, d.enqueued_at)::text, (sent.payload, sent.headers, sent.message_id, sent.enqueued_at)::text,
        queue || ': a dead letter keeps payload, headers, message_id and enqueued_at');

    new_id := pgqueue.enqueue(queue, '{"n": 2}');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.nack(queue, new_id, m.claim_token, delay => '10 s', error => 'first');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': claim does not return a message at once after nack with a delay');
    perform pg_temp.pass('9.999 s');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': claim does not return a message 1 ms before its delay ends');
    perform pg_temp.pass('0.001 s');
    select * into m from pgqueue.claim(queue);
    return next is(m.id, new_id, queue || ': claim returns a message when its delay ends');
    perform pgqueue.nack(queue, new_id, m.claim_token, delay => '0');
    select * into m from pgqueue.claim(queue);
    return next is(m.last_error, 'first', queue || ': nack without an error keeps the previous last_error');
    perform pgqueue.ack(queue, m.id, m.claim_token);

    new_id := pgqueue.enqueue(queue, '{"n": 3}');
    select * into m from pgqueue.claim(queue);
    perform pg_temp.pass('31 s');
    return next is(pgqueue.nack(queue, new_id, m.claim_token), true, queue || ': nack succeeds after the claim has expired, if no other claim took the message');
    return next is((select b.visible_at from pgqueue.browse(queue, 'scheduled') b), pgqueue._now() + interval '1 s',
        queue || ': nack without a delay uses the backoff of the queue');
    perform pg_temp.pass('1 s');
    select * into m from pgqueue.claim(queue);
    return next is(m.attempt_count, 2, queue || ': claim returns a message when its backoff ends');

    return next is(pgqueue.reject(queue, new_id, gen_random_uuid(), 'no'), false, queue || ': reject with a token that no claim has returns false');
    return next is(pgqueue.reject(queue, new_id, m.claim_token, 'poison'), true, queue || ': reject of a claimed message returns true');
    return next is((select (b.reason, b.last_error, b.attempt_count)::text from pgqueue.browse_dead_messages(queue, after_id => new_id - 1) b), '(rejected,poison,2)',
        queue || ': reject makes a dead letter at once, with error and attempt_count');
    return next is(pgqueue.reject(queue, new_id, m.claim_token, 'poison'), false, queue || ': a second reject returns false');
    return next is((select count(*) from pgqueue.messages b where b.queue_name = queue), 0::bigint, queue || ': a rejected message is not in the queue');

    new_id := pgqueue.enqueue(queue, '{"n": 3}');
    select * into m from pgqueue.claim(queue);
    return next is(pgqueue.reject(queue, new_id, m.claim_token, 'enough', reason => 'attempts_exhausted'), true, queue || ': reject with reason attempts_exhausted returns true');
    return next is((select (b.reason, b.last_error, b.attempt_count)::text from pgqueue.browse_dead_messages(queue, after_id => new_id - 1) b), '(attempts_exhausted,enough,1)',
        queue || ': reject with reason attempts_exhausted makes such a dead letter before max_attempts is reached');

    perform pgqueue.alter_queue(queue, dlq_enabled => false, max_attempts => 1);
    perform pgqueue.purge_dead_messages(queue);
    new_id := pgqueue.enqueue(queue, '{"n": 4}');
    select * into m from pgqueue.claim(queue);
    return next is(pgqueue.nack(queue, new_id, m.claim_token, '0'), true, queue || ': nack of the last attempt returns true if the queue has no dead letters');
    new_id := pgqueue.enqueue(queue, '{"n": 5}');
    select * into m from pgqueue.claim(queue);
    return next is(pgqueue.reject(queue, new_id, m.claim_token), true, queue || ': reject returns true if the queue has no dead letters');
    return next is((select pgqueue.drop_queue(queue)), 0::bigint, queue || ': a queue without dead letters deletes messages that die');
end;
$$;
select pg_temp.gives_back('nack_shared', false);
select pg_temp.gives_back('nack_dedicated', true);

-- Headers of a failure are merged into those of the message.
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
    return next is(m.headers, '{"type": "order", "tries": 1, "host": {"name": "a"}}', queue || ': nack merges its headers into the message and replaces headers of the same name');
    perform pgqueue.nack(queue, new_id, m.claim_token, '0', headers => '{"host": {"zone": "b"}}');
    select * into m from pgqueue.claim(queue);
    return next is(m.headers -> 'host', '{"zone": "b"}', queue || ': nack replaces the whole value of a header');
    kept := m.headers;
    perform pgqueue.nack(queue, new_id, m.claim_token, '0');
    select * into m from pgqueue.claim(queue);
    return next is(m.headers, kept, queue || ': nack without headers leaves the headers unchanged');

    -- The limit of 64 KB is 65,536 bytes of JSON text.
    perform pgqueue.nack(queue, new_id, m.claim_token, '0', headers => jsonb_build_object('stack', repeat('x', 65536 - octet_length((kept || '{"stack": ""}')::text))));
    select * into m from pgqueue.claim(queue);
    return next is(octet_length(m.headers::text), 65536, queue || ': nack accepts headers if the merged headers have 64 KB');
    kept := m.headers;
    return next is(pgqueue.nack(queue, new_id, m.claim_token, '0', 'it broke', jsonb_build_object('stack', (kept ->> 'stack') || 'x')), true, queue || ': nack returns true if the merged headers exceed 64 KB');
    select * into m from pgqueue.claim(queue);
    return next ok(m.headers = kept and m.last_error = 'it broke', queue || ': nack keeps the old headers if the merged headers exceed 64 KB');
    perform pgqueue.nack(queue, new_id, m.claim_token, '0', headers => '{"stack": null}');
    select * into m from pgqueue.claim(queue);
    return next is(m.headers, kept || '{"stack": null}', queue || ': nack merges headers that make the result smaller');
    return next is(pgqueue.nack(queue, new_id, m.claim_token, '0', headers => jsonb_build_object('stack', repeat('x', 65537))), true, queue || ': nack with headers over 64 KB returns true');
    select * into m from pgqueue.claim(queue);
    return next is(m.headers, kept || '{"stack": null}', queue || ': nack ignores headers over 64 KB');

    perform pgqueue.reject(queue, new_id, m.claim_token, 'no use', '{"why": "no use"}');
    return next is((select d.headers from pgqueue.browse_dead_messages(queue) d), kept || '{"stack": null, "why": "no use"}', queue || ': reject merges its headers into the dead letter');

    new_id := pgqueue.enqueue(queue, '2');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.nack(queue, new_id, m.claim_token, '0', headers => '{}');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.nack(queue, new_id, m.claim_token, '0', headers => '{"n": 1}');
    select * into m from pgqueue.claim(queue);
    return next is(m.headers, '{"n": 1}', queue || ': nack with headers sets the headers of a message without headers');
    perform pgqueue.ack(queue, new_id, m.claim_token);

    insert into pgqueue.messages (queue_name, payload, headers, max_attempts) values (queue, '3', '["raw"]', 2);
    select * into m from pgqueue.claim(queue);
    return next is(pgqueue.nack(queue, m.id, m.claim_token, '0', headers => '{"n": 1}'), true, queue || ': nack with headers succeeds for a message whose headers are not an object');
    select * into m from pgqueue.claim(queue);
    return next is(m.headers, '["raw"]', queue || ': nack leaves headers that are not an object unchanged');
    -- The message is also among the dead letters: it was copied back by hand.
    insert into pgqueue.dead_messages (id, queue_name, enqueued_at, attempt_count, max_attempts, payload, headers, reason)
    values (m.id, queue, m.enqueued_at, 1, 2, '3', '{"old": true}', 'rejected');
    update pgqueue.messages c set headers = null where c.id = m.id;
    perform pgqueue.nack(queue, m.id, m.claim_token, headers => '{"last": true}');
    return next is((select d.headers from pgqueue.browse_dead_messages(queue, after_id => m.id - 1) d), '{"last": true}',
        queue || ': nack of the last attempt replaces an older dead letter of the same id, with the headers of the failure');
end;
$$;
select pg_temp.keeps_evidence('nack_headers', false);
select pg_temp.keeps_evidence('nack_headers_dedicated', true);

-- Messages given back without an attempt.
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

    return next is(pgqueue.release(queue, ids, gen_random_uuid()), 0, queue || ': release with a token that no claim has returns 0');
    return next is(pgqueue.release(queue, '{}', m.claim_token), 0, queue || ': release of no ids returns 0');
    return next is(pgqueue.release(queue, array[ids[2], ids[1], ids[1], null, ids[4], ids[4] + 1000000], m.claim_token), 2,
        queue || ': release returns the number of messages that the token still claimed and ignores all other ids');
    return next is(pgqueue.release(queue, ids[1:2], m.claim_token), 0, queue || ': a second release returns 0');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'inflight') b), ids[3:3], queue || ': release leaves other messages of the claim in flight');
    return next is(pgqueue.ack_batch(queue, ids[1:2], m.claim_token), 0, queue || ': ack_batch does not acknowledge released messages');
    return next is(pgqueue.nack(queue, ids[1], m.claim_token), false, queue || ': nack of a released message returns false');
    return next is((select b.attempt_count from pgqueue.browse(queue) b where b.id = ids[1]), 0, queue || ': release restores the attempt_count from before the claim');
    return next ok(pgqueue.next_due_at(queue) <= pgqueue._now(), queue || ': a released message is due at once');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 2) c), ids[1:2], queue || ': claim returns released messages before others, in order of id');
    return next is(
        (select (b.payload, b.headers, b.message_id, b.enqueued_at, b.expires_at, b.max_attempts, b.attempt_count, b.last_error)::text
            from pgqueue.browse(queue, 'inflight') b where b.id = ids[1]),
        (sent.payload, sent.headers, sent.message_id, sent.enqueued_at, sent.expires_at, sent.max_attempts, 1, sent.last_error)::text,
        queue || ': a released message is unchanged and its next claim is its first attempt');

    perform pg_temp.pass('31 s');
    return next is(pgqueue.release(queue, ids[3:3], m.claim_token), 1, queue || ': release succeeds after the claim has expired, if no other claim took the message');
    select * into n from pgqueue.claim(queue, 10) c where c.id = ids[1];
    return next is(n.attempt_count, 2, queue || ': an expired claim counts as an attempt and a released one does not');
    return next is((select b.attempt_count from pgqueue.browse(queue, 'inflight') b where b.id = ids[3]), 1, queue || ': a claim that was released after it expired does not count as an attempt');
    return next is(pgqueue.release(queue, ids, m.claim_token), 0, queue || ': release with the token of an expired claim returns 0 after another claim took the message');
    return next is(pgqueue.release(queue, ids, n.claim_token), 4, queue || ': the last attempt of a message can be released');
    return next is((select array_agg(c.attempt_count order by c.id) from pgqueue.claim(queue, 10) c), array[2, 2, 1, 1], queue || ': claim returns messages whose last attempt was released');
    return next is((select count(*) from pgqueue.browse_dead_messages(queue)), 0::bigint, queue || ': release makes no dead letters');

    -- A plain claim leaves claim_token as it is, but makes that token invalid.
    select b.* into n from pgqueue.browse(queue, 'inflight') b where b.id = ids[4];
    update pgqueue.messages c set attempt_count = c.attempt_count + 1, visible_at = pgqueue._now() + interval '1 min' where c.id = ids[4];
    return next is(pgqueue.release(queue, ids[4:4], n.claim_token), 0, queue || ': release does not release a message that plain SQL claimed since');
    perform pgqueue.pause_queue(queue);
    return next is(pgqueue.release(queue, ids[1:1], n.claim_token), 1, queue || ': release works while the queue is paused');
end;
$$;
select pg_temp.releases('nack_release', false);
select pg_temp.releases('nack_release_dedicated', true);

-- Failures of attempts that a rollback has undone.
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
    return next is(pg_temp.rolls_back(queue), 1, queue || ': receive returns the first attempt, and its transaction rolls back');
    return next is(pgqueue.record_failure(queue, new_id, 2), false, queue || ': record_failure of an attempt that is not the next returns false');
    return next is(pgqueue.record_failure(queue, new_id + 1000000, 1), false, queue || ': record_failure of an unknown id returns false');
    return next is(pgqueue.peek(queue), 1, queue || ': a message whose failure was not recorded stays ready');
    return next is(pgqueue.record_failure(queue, new_id, 1, error => 'it broke', headers => '{"tries": 1}'), true, queue || ': record_failure of the next attempt returns true');
    return next is(pgqueue.record_failure(queue, new_id, 1), false, queue || ': a second record_failure of the same attempt returns false');
    return next is((select b.visible_at from pgqueue.browse(queue, 'scheduled') b), pgqueue._now() + interval '1 s', queue || ': record_failure without a delay uses the backoff of the queue');
    return next is(pgqueue.record_failure(queue, new_id, 2), false, queue || ': record_failure of a message that is not due returns false');

    -- The transaction that rolls back also undoes moving the due message out of scheduled_messages.
    perform pg_temp.pass('1 s');
    return next is(pg_temp.rolls_back(queue), 2, queue || ': receive returns the second attempt, and its transaction rolls back');
    return next is(pgqueue.record_failure(queue, new_id, 1), false, queue || ': record_failure of the first attempt returns false after it was recorded');
    return next is(pgqueue.record_failure(queue, new_id, 2, '10 s'), true, queue || ': record_failure of the second attempt returns true');
    return next is((select b.visible_at from pgqueue.browse(queue, 'scheduled') b), pgqueue._now() + interval '10 s', queue || ': record_failure uses the delay that it was given');
    perform pg_temp.pass('10 s');
    return next is(pg_temp.rolls_back(queue), 3, queue || ': receive returns the last attempt, and its transaction rolls back');
    return next is(pgqueue.record_failure(queue, new_id, 3, error => 'it broke for good', headers => '{"tries": 3}'), true, queue || ': record_failure of the last attempt returns true');
    select * into d from pgqueue.browse_dead_messages(queue);
    return next is((d.id, d.reason, d.last_error, d.attempt_count, d.died_at)::text, (new_id, 'attempts_exhausted'::text, 'it broke for good'::text, 3, pgqueue._now())::text,
        queue || ': record_failure of the last attempt makes a dead letter with reason, last_error and attempt_count');
    return next is((d.payload, d.headers, d.message_id, d.enqueued_at, d.expires_at)::text,
        (sent.payload, sent.headers || '{"tries": 3}', sent.message_id, sent.enqueued_at, sent.expires_at)::text, queue || ': that dead letter keeps the message that was sent, with the merged headers of its failures');
    return next is(pgqueue.record_failure(queue, new_id, 3), false, queue || ': record_failure of a dead letter returns false');

    -- Messages that are or were claimed.
    new_id := pgqueue.enqueue(queue, '{"n": 2}');
    select * into m from pgqueue.claim(queue);
    return next is(pgqueue.record_failure(queue, new_id, 2), false, queue || ': record_failure of the next attempt returns false while the message is claimed');
    return next is(pgqueue.record_failure(queue, new_id, 1), false, queue || ': record_failure of the attempt of the current claim returns false');
    perform pg_temp.pass('31 s');
    return next is(pg_temp.rolls_back(queue), 2, queue || ': receive returns the next attempt after the claim has expired, and its transaction rolls back');
    perform pgqueue.extend(queue, new_id, m.claim_token);
    return next is(pgqueue.record_failure(queue, new_id, 2), false, queue || ': record_failure returns false if the expired claim was extended in the meantime');
    perform pg_temp.pass('31 s');
    return next is(pgqueue.record_failure(queue, new_id, 2, '0', 'it broke'), true, queue || ': record_failure returns true once the extended claim has expired');
    return next is(pgqueue.ack(queue, new_id, m.claim_token), false, queue || ': ack with the token of the expired claim returns false after record_failure');
    select * into m from pgqueue.claim(queue);
    return next is((m.id, m.attempt_count, m.last_error)::text, (new_id, 3, 'it broke'::text)::text, queue || ': claim returns the next attempt at once after record_failure with a delay of 0');
    perform pgqueue.ack(queue, new_id, m.claim_token);
    return next is(pgqueue.record_failure(queue, new_id, 4), false, queue || ': record_failure of an acknowledged message returns false');
end;
$$;
select pg_temp.records('nack_record', false);
select pg_temp.records('nack_record_dedicated', true);

select lives_ok($$ select pgqueue.create_queue('nack_errors', max_attempts => 100) $$, 'a queue is created for calls that are refused');
create function pg_temp.is_cut() returns text language plpgsql as $$
declare
    m pgqueue.message;
begin
    perform pgqueue.enqueue('nack_errors', '1');
    select * into m from pgqueue.claim('nack_errors');
    perform pgqueue.nack('nack_errors', m.id, m.claim_token, '0', repeat('é', 65537));
    select * into m from pgqueue.claim('nack_errors');
    return is(m.last_error, repeat('é', 65536), 'nack stores the first 65,536 characters of the error');
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

select throws_ok($$ select pgqueue.nack('nack_errors', 1, gen_random_uuid(), headers => '[]') $$, '22023', null, 'nack refuses headers that are not an object');
select throws_ok($$ select pgqueue.nack('nack_errors', 1, gen_random_uuid(), headers => 'null') $$, '22023', null, 'nack refuses the JSON value null as headers');
select throws_ok($$ select pgqueue.nack('nack_errors', 1, gen_random_uuid(), '300000 years') $$, '22023', null, 'nack refuses a delay of 300,000 years');
select throws_ok($$ select pgqueue.reject('nack_errors', 1, gen_random_uuid(), headers => '"x"') $$, '22023', null, 'reject refuses headers that are not an object');
select throws_ok($$ select pgqueue.reject('nack_errors', 1, gen_random_uuid(), reason => 'expired') $$, '22023', 'invalid reason: ''expired''', 'reject refuses the reason expired');
select throws_ok($$ select pgqueue.reject('nack_errors', 1, gen_random_uuid(), reason => 'queue_dropped') $$, '22023', 'invalid reason: ''queue_dropped''', 'reject refuses the reason queue_dropped');
select throws_ok($$ select pgqueue.reject('nack_errors', 1, gen_random_uuid(), reason => 'bored') $$, '22023', 'invalid reason: ''bored''', 'reject refuses an unknown reason');
select throws_ok($$ select pgqueue.reject('nack_errors', 1, gen_random_uuid(), reason => null) $$, '22023', 'invalid reason: null', 'reject refuses a null reason');
select throws_ok($$ select pgqueue.release('nack_errors', null, gen_random_uuid()) $$, '22023', null, 'release refuses null ids');
select throws_ok($$ select pgqueue.release('nack_errors', '{1}', null) $$, '22023', null, 'release refuses a null token');
select throws_ok($$ select pgqueue.release('nack_nowhere', '{1}', gen_random_uuid()) $$, 'PQ001', null, 'release refuses an unknown queue');
select throws_ok($$ select pgqueue.record_failure('nack_errors', null, 1) $$, '22023', null, 'record_failure refuses a null id');
select throws_ok($$ select pgqueue.record_failure('nack_errors', 1, null) $$, '22023', null, 'record_failure refuses a null attempt_count');
select throws_ok($$ select pgqueue.record_failure('nack_errors', 1, 0) $$, '22023', null, 'record_failure refuses an attempt_count below 1');
select throws_ok($$ select pgqueue.record_failure('nack_errors', 1, 1, '-1 s') $$, '22023', null, 'record_failure refuses a negative delay');
select throws_ok($$ select pgqueue.record_failure('nack_errors', 1, 1, headers => '7') $$, '22023', null, 'record_failure refuses headers that are not an object');
select throws_ok($$ select pgqueue.record_failure('nack_nowhere', 1, 1) $$, 'PQ001', null, 'record_failure refuses an unknown queue');

select * from finish();
rollback;
