begin;
-- The lock makes test files wait for each other: this file attaches a table and shifts the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select clock_timestamp() + current_setting('test.ahead')::interval $$;

-- now() stands still in a transaction: plain SQL does not see what enqueue sends in it. So enqueue with an earlier
-- clock.
set local test.ahead = '-1 min';
select plan(66);

-- The documented statements of the contract, with the schema's name added.
prepare raw_enqueue as
INSERT INTO pgqueue.messages (queue_name, payload, max_attempts, visible_at)
SELECT q.name, $2, q.max_attempts, now() + ($3 * interval '1 second')
FROM pgqueue.queues q WHERE q.name = $1
RETURNING id;

prepare raw_claim as
UPDATE pgqueue.messages m
SET visible_at = now() + (60 * interval '1 second'),
attempt_count = m.attempt_count + 1,
claimed_by = 'worker-1'
WHERE m.id IN (
SELECT id FROM pgqueue.messages
WHERE queue_name = 'order-events'
AND visible_at <= now()
AND attempt_count < max_attempts
ORDER BY id
FOR UPDATE SKIP LOCKED
LIMIT 10
)
RETURNING m.id, m.payload, m.attempt_count, m.enqueued_at;

prepare raw_ack as
DELETE FROM pgqueue.messages WHERE id = $1 AND claimed_by = $2;

prepare raw_nack as
UPDATE pgqueue.messages
SET visible_at = now() + ($3 * interval '1 second'),
last_error = $4
WHERE id = $1 AND claimed_by = $2;

prepare raw_extend as
UPDATE pgqueue.messages
SET visible_at = now() + ($3 * interval '1 second')
WHERE id = $1 AND claimed_by = $2;

create function pg_temp.send(payload text, delay int default 0) returns bigint language plpgsql as $$
declare
    id bigint;
begin
    execute format('execute raw_enqueue(%L, %L, %s)', 'order-events', payload, delay) into id;
    return id;
end;
$$;
create function pg_temp.take() returns bigint[] language plpgsql as $$
declare
    m record;
    ids bigint[] := '{}';
begin
    for m in execute 'execute raw_claim' loop
        ids := ids || m.id;
    end loop;
    return (select coalesce(array_agg(i order by i), '{}') from unnest(ids) i);
end;
$$;
create function pg_temp.settle(statement text, id bigint, variadic arguments text[]) returns void language plpgsql as $$
begin
    execute format('execute %s(%s, %s)', statement, id, (select string_agg(quote_nullable(a), ', ') from unnest(arguments) a));
end;
$$;
create function pg_temp.shift(ahead interval) returns void language sql as $$ select set_config('test.ahead', ahead::text, true) $$;
-- Every scene creates its queue anew, because the clock must not go back on a queue.
create function pg_temp.begin_with(ahead interval, has_table boolean) returns void language plpgsql as $$
begin
    perform pg_temp.shift(ahead);
    if exists (select from pgqueue.list_queues() q where q.name = 'order-events') then
        perform pgqueue.drop_queue('order-events');
    end if;
    perform pgqueue.create_queue('order-events', visibility_timeout => '30 s', max_attempts => 5, dedicated => has_table);
end;
$$;
create function pg_temp.row_of(wanted bigint) returns pgqueue.messages language plpgsql as $$
declare
    m pgqueue.messages;
begin
    select c.* into m from pgqueue.messages c where c.id = wanted;
    return m;
end;
$$;

create function pg_temp.mixes(kind text, has_table boolean) returns setof text language plpgsql as $$
declare
    queue constant text := 'order-events';
    new_id bigint;
    ids bigint[];
    m pgqueue.message;
    n pgqueue.message;
begin
    perform pg_temp.begin_with('-1 min', has_table);

    new_id := pg_temp.send('{"order_id": 1001}');
    return next ok(new_id is not null, kind || ': a plain insert sends a message and returns its id');
    return next is((pg_temp.row_of(new_id)).max_attempts, 5, kind || ': a plain insert copies max_attempts from the queue');
    execute format('execute raw_enqueue(%L, %L, 0)', 'nowhere', '{}') into m.id;
    return next is(m.id, null, kind || ': a plain insert sends nothing if the queue does not exist');
    perform pg_temp.shift('0 s');
    select * into m from pgqueue.claim(queue, claimed_by => 'worker-2');
    return next is((m.id, m.payload, m.attempt_count)::text, (new_id, '{"order_id": 1001}'::jsonb, 1)::text, kind || ': claim returns a message that a plain insert sent');
    return next is(pgqueue.ack(queue, new_id, m.claim_token), true, kind || ': ack deletes a message that a plain insert sent');

    perform pg_temp.begin_with('-1 min', has_table);
    ids := array[pgqueue.enqueue(queue, '{"order_id": 1002}'), pg_temp.send('{"order_id": 1003}')];
    return next is(pg_temp.take(), ids, kind || ': a plain update claims messages that enqueue and a plain insert sent');
    return next is(((pg_temp.row_of(ids[1])).attempt_count, (pg_temp.row_of(ids[1])).claimed_by)::text, '(1,worker-1)', kind || ': a plain claim increments attempt_count and sets claimed_by');
    return next is(pg_temp.take(), '{}'::bigint[], kind || ': a plain claim does not return a claimed message');
    perform pg_temp.shift('0 s');
    return next is((select count(*) from pgqueue.claim(queue, 10)), 0::bigint, kind || ': claim does not return a message that a plain update claimed');
    return next is(pgqueue.ack(queue, ids[1], gen_random_uuid()), false, kind || ': ack with a random token does not acknowledge a plain claim');
    return next throws_ok(format('select pgqueue.ack(%L, %s, null)', queue, ids[1]), '22023', null, kind || ': ack with a null token does not acknowledge a plain claim');
    perform pg_temp.settle('raw_ack', ids[1], 'worker-2');
    return next is((pg_temp.row_of(ids[1])).id, ids[1], kind || ': a plain delete does not acknowledge a claim of another worker');
    perform pg_temp.settle('raw_ack', ids[1], 'worker-1');
    return next is((pg_temp.row_of(ids[1])).id, null, kind || ': a plain delete acknowledges a claim of the same worker');
    perform pg_temp.settle('raw_extend', ids[2], 'worker-1', '600');
    perform pg_temp.shift('9 min');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, kind || ': claim does not return a message that a plain update extended');
    perform pg_temp.shift('11 min');
    select * into m from pgqueue.claim(queue);
    return next is((m.id, m.attempt_count)::text, (ids[2], 2)::text, kind || ': claim returns the message when the plain extension has expired');
    perform pgqueue.ack(queue, m.id, m.claim_token);

    -- Claimed by claim, settled by plain SQL with the name of the claimer.
    perform pg_temp.begin_with('-1 min', has_table);
    new_id := pgqueue.enqueue(queue, '{"order_id": 1004}');
    select * into m from pgqueue.claim(queue, claimed_by => 'worker-3');
    perform pg_temp.settle('raw_extend', new_id, 'worker-3', '600');
    return next is((pg_temp.row_of(new_id)).visible_at, now() + interval '600 s', kind || ': a plain update extends a claim made by claim');
    perform pg_temp.settle('raw_nack', new_id, 'worker-3', '0', 'it broke');
    perform pg_temp.shift('2 s');
    select * into n from pgqueue.claim(queue, claimed_by => 'worker-4');
    return next is((n.id, n.attempt_count, n.last_error)::text, (new_id, 2, 'it broke'::text)::text, kind || ': claim returns a message that a plain update gave back, with its last_error');
    return next is(pgqueue.ack(queue, new_id, m.claim_token), false, kind || ': ack with the token from before a plain nack returns false');
    perform pg_temp.settle('raw_nack', new_id, 'worker-3', '0', 'too late');
    return next is((pg_temp.row_of(new_id)).last_error, 'it broke', kind || ': a plain nack with the claimed_by of an earlier claim changes nothing');
    perform pg_temp.settle('raw_ack', new_id, 'worker-4');
    return next is((pg_temp.row_of(new_id)).id, null, kind || ': a plain delete acknowledges a claim made by claim');
    return next is(pgqueue.ack(queue, new_id, n.claim_token), false, kind || ': ack after a plain delete returns false');

    -- A plain claim of a message whose earlier claim has expired makes the earlier token invalid.
    perform pg_temp.begin_with('-2 min', has_table);
    new_id := pgqueue.enqueue(queue, '{"order_id": 1005}');
    select * into m from pgqueue.claim(queue, claimed_by => 'worker-5');
    return next is(pg_temp.take(), array[new_id], kind || ': a plain update claims a message whose claim has expired');
    perform pg_temp.shift('0 s');
    return next is(pgqueue.ack(queue, new_id, m.claim_token), false, kind || ': ack with the expired claim''s token returns false after a plain claim');
    return next is(pgqueue.nack(queue, new_id, m.claim_token, '0'), false, kind || ': nack with the expired claim''s token returns false after a plain claim');
    return next is(pgqueue.extend(queue, new_id, m.claim_token), false, kind || ': extend with the expired claim''s token returns false after a plain claim');
    return next is((select e.lost from pgqueue.exchange(queue, array[new_id], m.claim_token) e), true, kind || ': exchange with the expired claim''s token reports the message as lost after a plain claim');
    perform pg_temp.settle('raw_nack', new_id, 'worker-1', '20', 'not now');
    perform pg_temp.shift('10 s');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, kind || ': claim does not return a message during the delay of a plain nack');
    perform pg_temp.shift('21 s');
    select * into m from pgqueue.claim(queue);
    return next is((m.id, m.attempt_count, m.last_error)::text, (new_id, 3, 'not now'::text)::text, kind || ': claim returns the message after the delay of a plain nack');
    perform pgqueue.ack(queue, new_id, m.claim_token);

    -- A delayed message that a plain insert puts into messages itself.
    perform pg_temp.begin_with('0 s', has_table);
    new_id := pg_temp.send('{"order_id": 1006}', 30);
    ids := array[pgqueue.enqueue(queue, '{"order_id": 1007}')];
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids, kind || ': claim does not return a message that a plain insert delays');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'scheduled') b), array[new_id], kind || ': browse shows a message that a plain insert delays as scheduled');
    perform pg_temp.shift('31 s');
    return next ok(exists (select from pgqueue.claim(queue, 10) c where c.id = new_id), kind || ': claim returns a message that a plain insert delayed when it is due');

    -- A message that plain SQL claims until max_attempts is reached.
    perform pg_temp.begin_with('-1 min', has_table);
    new_id := pg_temp.send('{"order_id": 1008}');
    for i in 1..5 loop
        perform pg_temp.take();
        perform pg_temp.settle('raw_nack', new_id, 'worker-1', '0', 'attempt ' || i);
    end loop;
    return next is(pg_temp.take(), '{}'::bigint[], kind || ': a plain claim does not return a message whose attempts are exhausted');
    perform pg_temp.shift('1 s');
    perform pgqueue.claim(queue);
    return next is((select (d.id, d.attempt_count, d.reason, d.last_error, d.claimed_by)::text from pgqueue.browse_dead_messages(queue) d),
        (new_id, 5, 'attempts_exhausted'::text, 'attempt 5'::text, 'worker-1'::text)::text, kind || ': the next claim moves a message with exhausted attempts to the dead letters, with its last_error');
    perform pgqueue.drop_queue(queue);
end;
$$;
select pg_temp.mixes('shared', false);
select pg_temp.mixes('dedicated', true);

select * from finish();
rollback;
