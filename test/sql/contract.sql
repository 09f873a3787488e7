begin;
-- The lock makes test files wait for each other: this file attaches a table and shifts the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select clock_timestamp() + current_setting('test.ahead')::interval $$;

-- now() stands still in a transaction, so that what enqueue sends in it is not yet visible to plain SQL: send it earlier.
set local test.ahead = '-1 min';
select plan(66);

-- The statements of the contract, as they are documented, but for the name of the schema.
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
-- Every scene has a new queue: time does not go back on it.
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
    return next ok(new_id is not null, kind || ': plain SQL sends a message and returns its id');
    return next is((pg_temp.row_of(new_id)).max_attempts, 5, kind || ': with the attempts of its queue');
    execute format('execute raw_enqueue(%L, %L, 0)', 'nowhere', '{}') into m.id;
    return next is(m.id, null, kind || ': plain SQL sends nothing to a queue that does not exist');
    perform pg_temp.shift('0 s');
    select * into m from pgqueue.claim(queue, claimed_by => 'worker-2');
    return next is((m.id, m.payload, m.attempt_count)::text, (new_id, '{"order_id": 1001}'::jsonb, 1)::text, kind || ': claim delivers what plain SQL sent');
    return next is(pgqueue.ack(queue, new_id, m.claim_token), true, kind || ': and ack removes it');

    perform pg_temp.begin_with('-1 min', has_table);
    ids := array[pgqueue.enqueue(queue, '{"order_id": 1002}'), pg_temp.send('{"order_id": 1003}')];
    return next is(pg_temp.take(), ids, kind || ': plain SQL claims what enqueue and plain SQL sent');
    return next is(((pg_temp.row_of(ids[1])).attempt_count, (pg_temp.row_of(ids[1])).claimed_by)::text, '(1,worker-1)', kind || ': it counts the attempt and names the claimer');
    return next is(pg_temp.take(), '{}'::bigint[], kind || ': plain SQL does not claim twice');
    perform pg_temp.shift('0 s');
    return next is((select count(*) from pgqueue.claim(queue, 10)), 0::bigint, kind || ': claim does not touch what plain SQL has claimed');
    return next is(pgqueue.ack(queue, ids[1], gen_random_uuid()), false, kind || ': ack has no token for it');
    return next throws_ok(format('select pgqueue.ack(%L, %s, null)', queue, ids[1]), '22023', null, kind || ': and refuses to go without');
    perform pg_temp.settle('raw_ack', ids[1], 'worker-2');
    return next is((pg_temp.row_of(ids[1])).id, ids[1], kind || ': plain SQL acknowledges nothing that another claimed');
    perform pg_temp.settle('raw_ack', ids[1], 'worker-1');
    return next is((pg_temp.row_of(ids[1])).id, null, kind || ': plain SQL acknowledges what it claimed');
    perform pg_temp.settle('raw_extend', ids[2], 'worker-1', '600');
    perform pg_temp.shift('9 min');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, kind || ': what plain SQL extended stays hidden');
    perform pg_temp.shift('11 min');
    select * into m from pgqueue.claim(queue);
    return next is((m.id, m.attempt_count)::text, (ids[2], 2)::text, kind || ': and is delivered by claim when its time has run out');
    perform pgqueue.ack(queue, m.id, m.claim_token);

    -- claim, then settled by plain SQL, by the name of the claimer.
    perform pg_temp.begin_with('-1 min', has_table);
    new_id := pgqueue.enqueue(queue, '{"order_id": 1004}');
    select * into m from pgqueue.claim(queue, claimed_by => 'worker-3');
    perform pg_temp.settle('raw_extend', new_id, 'worker-3', '600');
    return next is((pg_temp.row_of(new_id)).visible_at, now() + interval '600 s', kind || ': plain SQL extends what claim claimed');
    perform pg_temp.settle('raw_nack', new_id, 'worker-3', '0', 'it broke');
    perform pg_temp.shift('2 s');
    select * into n from pgqueue.claim(queue, claimed_by => 'worker-4');
    return next is((n.id, n.attempt_count, n.last_error)::text, (new_id, 2, 'it broke'::text)::text, kind || ': what plain SQL gives back is claimed again, with its error');
    return next is(pgqueue.ack(queue, new_id, m.claim_token), false, kind || ': the token from before is stale then');
    perform pg_temp.settle('raw_nack', new_id, 'worker-3', '0', 'too late');
    return next is((pg_temp.row_of(new_id)).last_error, 'it broke', kind || ': and so is the name from before');
    perform pg_temp.settle('raw_ack', new_id, 'worker-4');
    return next is((pg_temp.row_of(new_id)).id, null, kind || ': plain SQL acknowledges what claim claimed');
    return next is(pgqueue.ack(queue, new_id, n.claim_token), false, kind || ': after which ack has nothing left');

    -- A claim by plain SQL of a message that claim had before ends the power of the token.
    perform pg_temp.begin_with('-2 min', has_table);
    new_id := pgqueue.enqueue(queue, '{"order_id": 1005}');
    select * into m from pgqueue.claim(queue, claimed_by => 'worker-5');
    return next is(pg_temp.take(), array[new_id], kind || ': plain SQL claims what claim let lapse');
    perform pg_temp.shift('0 s');
    return next is(pgqueue.ack(queue, new_id, m.claim_token), false, kind || ': ack of it is refused: the claim was lost');
    return next is(pgqueue.nack(queue, new_id, m.claim_token, '0'), false, kind || ': nack of it is refused');
    return next is(pgqueue.extend(queue, new_id, m.claim_token), false, kind || ': extend of it is refused');
    return next is((select e.lost from pgqueue.exchange(queue, array[new_id], m.claim_token) e), true, kind || ': exchange reports it as lost');
    perform pg_temp.settle('raw_nack', new_id, 'worker-1', '20', 'not now');
    perform pg_temp.shift('10 s');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, kind || ': what plain SQL gives back with a delay waits for it');
    perform pg_temp.shift('21 s');
    select * into m from pgqueue.claim(queue);
    return next is((m.id, m.attempt_count, m.last_error)::text, (new_id, 3, 'not now'::text)::text, kind || ': and is claimed when it is over');
    perform pgqueue.ack(queue, new_id, m.claim_token);

    -- A message that waits in messages itself.
    perform pg_temp.begin_with('0 s', has_table);
    new_id := pg_temp.send('{"order_id": 1006}', 30);
    ids := array[pgqueue.enqueue(queue, '{"order_id": 1007}')];
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids, kind || ': a message that plain SQL delays is not delivered early');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'scheduled') b), array[new_id], kind || ': but is scheduled');
    perform pg_temp.shift('31 s');
    return next ok(exists (select from pgqueue.claim(queue, 10) c where c.id = new_id), kind || ': and is delivered when it is due');

    -- Poison that plain SQL claims until its attempts are spent.
    perform pg_temp.begin_with('-1 min', has_table);
    new_id := pg_temp.send('{"order_id": 1008}');
    for i in 1..5 loop
        perform pg_temp.take();
        perform pg_temp.settle('raw_nack', new_id, 'worker-1', '0', 'attempt ' || i);
    end loop;
    return next is(pg_temp.take(), '{}'::bigint[], kind || ': plain SQL claims no message whose attempts are spent');
    perform pg_temp.shift('1 s');
    perform pgqueue.claim(queue);
    return next is((select (d.id, d.attempt_count, d.reason, d.last_error, d.claimed_by)::text from pgqueue.browse_dead_messages(queue) d),
        (new_id, 5, 'attempts_exhausted'::text, 'attempt 5'::text, 'worker-1'::text)::text, kind || ': the next claim takes it to the dead letters, with its last error');
    perform pgqueue.drop_queue(queue);
end;
$$;
select pg_temp.mixes('shared', false);
select pg_temp.mixes('dedicated', true);

select * from finish();
rollback;
