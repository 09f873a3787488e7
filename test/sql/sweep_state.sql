begin;
-- The lock makes test files wait for each other: this file stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(84);

create function pg_temp.state(queue text) returns pgqueue.sweep_state language sql
as $$ select s from pgqueue.sweep_state s where s.queue_name = queue $$;
-- As _record_vacant_ids does when no writer runs. In this transaction one always does.
create function pg_temp.record_vacant_ids(queue text) returns pgqueue.sweep_state language plpgsql as $$
declare
    q pgqueue.queues;
    s pgqueue.sweep_state := pg_temp.state(queue);
begin
    select * into q from pgqueue.queues where name = queue;
    perform pgqueue._register_value('pgqueue.message_id');
    s.settled_id := pg_sequence_last_value('pgqueue.message_id');
    s.settled_at := pgqueue._now();
    s := pgqueue._record_first_keys(q, s, pgqueue._now());
    update pgqueue.sweep_state set
        settled_id = s.settled_id, settled_at = s.settled_at, recorded_at = pgqueue._now(), first_id = s.first_id, first_due_at = s.first_due_at,
        first_check_at = s.first_check_at,
        vacant_ids = coalesce(
            int8multirange(int8range(null, s.settled_id + 1))
            - (select range_agg(int8range(m.id, m.id, '[]')) from pgqueue.messages m where m.queue_name = queue),
            int8multirange(int8range(null, s.settled_id + 1)))
    where queue_name = queue;
    return s;
end;
$$;
-- All rows that this transaction deletes stay in the tables, as with a pinned horizon.
create function pg_temp.buffers(statement text) returns int language plpgsql as $$
declare
    plan json;
begin
    -- The first call also reads the catalogs, for its plans.
    execute statement;
    execute 'explain (analyze, buffers, timing off, format json) ' || statement into plan;
    return (plan -> 0 -> 'Plan' ->> 'Shared Hit Blocks')::int + (plan -> 0 -> 'Plan' ->> 'Shared Read Blocks')::int;
end;
$$;
create function pg_temp.settle(queue text, number int) returns int language plpgsql as $$
declare
    token uuid;
    ids bigint[];
    settled int := 0;
begin
    loop
        select (array_agg(c.claim_token))[1], array_agg(c.id) into token, ids from pgqueue.claim(queue, number) c;
        exit when ids is null;
        settled := settled + pgqueue.ack_batch(queue, ids, token);
        perform pg_temp.pass('1 s');
    end loop;
    return settled;
end;
$$;

create function pg_temp.records_first_keys(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    low_id bigint;
    high_id bigint;
    m pgqueue.message;
    s pgqueue.sweep_state;
    call text;
    claims int[];
begin
    perform pgqueue.create_queue(queue, max_attempts => 2, backoff_base => '0', dedicated => has_table);
    return next is(pg_temp.state(queue)::text, (queue, '{(,1)}'::int8multirange, 0, 0, '{}'::text[], timestamptz '1970-01-01 00:00+00',
        timestamptz '1970-01-01 00:00+00', timestamptz '-infinity', 1, timestamptz '-infinity', timestamptz '-infinity')::text,
        queue || ': a new queue has the lowest first keys');

    -- first_id is the lowest id in any of the three tables.
    low_id := pgqueue.enqueue(queue, '"low"');
    high_id := pgqueue.enqueue(queue, '"high"');
    return next is((pg_temp.record_vacant_ids(queue)).first_id, low_id, queue || ': first_id is the id of a ready message');
    select * into m from pgqueue.claim(queue);
    return next is((pg_temp.record_vacant_ids(queue)).first_id, low_id, queue || ': first_id is the id of a message in flight');
    perform pgqueue.nack(queue, m.id, m.claim_token, '1 h');
    return next is((pg_temp.record_vacant_ids(queue)).first_id, low_id, queue || ': first_id is the id of a scheduled message');
    perform pg_temp.pass('1 h');
    select * into m from pgqueue.claim(queue);
    return next is(m.id, low_id, queue || ': the scheduled message is claimed');
    perform pgqueue.reject(queue, m.id, m.claim_token);
    return next is((pg_temp.record_vacant_ids(queue)).first_id, low_id, queue || ': first_id is the id of a dead letter');
    perform pgqueue.redrive(queue);
    return next is((pg_temp.record_vacant_ids(queue)).first_id, low_id, queue || ': first_id is the id of a redriven message');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.ack(queue, m.id, m.claim_token);
    return next is((pg_temp.record_vacant_ids(queue)).first_id, high_id, queue || ': after its acknowledgement, first_id is the next id');
    perform pg_temp.settle(queue, 10);
    s := pg_temp.record_vacant_ids(queue);
    return next is(s.first_id, s.settled_id + 1, queue || ': first_id of an empty queue is the first id that is not settled');

    -- first_due_at.
    return next is(s.first_due_at, pgqueue._now() - interval '1 s', queue || ': without scheduled messages, first_due_at is one second ago');
    perform pgqueue.enqueue(queue, '"due"', delay => '10 s');
    perform pg_temp.pass('20 s');
    return next is((pg_temp.record_vacant_ids(queue)).first_due_at, pgqueue._now() - interval '10 s', queue || ': first_due_at is the due time of the first scheduled message');
    perform pg_temp.pass('1 min');
    return next is(pg_temp.settle(queue, 10), 1, queue || ': a message at first_due_at is claimed');
    return next is((pg_temp.record_vacant_ids(queue)).first_due_at, pgqueue._now() - interval '1 s', queue || ': first_due_at is higher after the message has left');

    -- Plain SQL sets a due time in the past, and the register does not know it. Once an hour a sweep starts at the
    -- earliest time.
    perform pgqueue.enqueue(queue, '"past"', delay => '1 d');
    update pgqueue.scheduled_messages set due_at = pgqueue._now() - interval '1 d' where queue_name = queue;
    perform setval(q.first_due_at, 9223372036854775807) from pgqueue.queues q where q.name = queue;
    perform pg_temp.pass('20 s');
    return next is(pg_temp.settle(queue, 10), 0, queue || ': a due time before first_due_at is not seen');
    perform pg_temp.pass('1 h');
    return next is(pg_temp.settle(queue, 10), 1, queue || ': a message with a due time before first_due_at is claimed within an hour');

    -- The clock is set back. Times in the future are ignored, and recorded again.
    perform pg_temp.record_vacant_ids(queue);
    perform pg_temp.pass('-1 d');
    perform pgqueue.enqueue(queue, '"back"', delay => '1 s');
    perform setval(q.first_due_at, 9223372036854775807) from pgqueue.queues q where q.name = queue;
    perform pg_temp.pass('2 s');
    return next is(pgqueue.peek(queue), 1, queue || ': peek counts a message that came due after the clock was set back');
    return next is((pg_temp.record_vacant_ids(queue)).first_due_at, pgqueue._now() - interval '1 s', queue || ': first_due_at is recorded again after the clock was set back');
    update pgqueue.sweep_state set first_due_at = pgqueue._now() + interval '1 d' where queue_name = queue;
    return next is(pg_temp.settle(queue, 10), 1, queue || ': a message that came due after the clock was set back is claimed');

    -- A few rows of requeued_messages that stay for long get a new time, so that first_check_at moves on.
    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[101]), delay => '1 s');
    perform pg_temp.pass('2 s');
    perform pgqueue.claim(queue, 101, '12 h');
    perform pg_temp.pass('1 h');
    return next is((pg_temp.record_vacant_ids(queue)).first_check_at, pgqueue._now() - interval '1 h', queue || ': first_check_at is the time of the first row');
    perform pgqueue.ack(queue, c.id, c.claim_token) from pgqueue.browse(queue, 'inflight', 1) c;
    delete from pgqueue.requeued_messages r
    where r.queue_name = queue and not exists (select from pgqueue.messages c where c.queue_name = queue and c.id = r.id);
    perform pg_temp.record_vacant_ids(queue);
    return next is((select array[count(*), count(distinct r.check_at)] from pgqueue.requeued_messages r where r.queue_name = queue and r.check_at = pgqueue._now()),
        array[100, 1]::bigint[], queue || ': a hundred old rows get the present time');
    perform pg_temp.pass('10 s');
    return next is((pg_temp.record_vacant_ids(queue)).first_check_at, pgqueue._now() - interval '10 s', queue || ': first_check_at is the new time of the old rows');
    perform pgqueue.purge_queue(queue);

    -- Claims that find enough due messages make no sweep. They remove as many rows of earlier messages as they add.
    delete from pgqueue.requeued_messages r where r.queue_name = queue;
    for round in 1..3 loop
        perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[100]), delay => '1 s');
        perform pg_temp.pass('2 s');
        perform pgqueue.ack(queue, c.id, c.claim_token) from pgqueue.claim(queue, 100) c;
    end loop;
    return next is((select count(*) from pgqueue.requeued_messages r where r.queue_name = queue), 100::bigint,
        queue || ': claims of due messages leave no rows of earlier ones in requeued_messages');

    -- Thousands of messages were retried, delayed, dead and redriven, and all have left.
    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[2000]));
    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[2000]), delay => '1 s');
    perform pg_temp.pass('10 s');
    for round in 1..2 loop
        for part in 1..4 loop
            perform pgqueue.nack(queue, c.id, c.claim_token, '1 s') from pgqueue.claim(queue, 1000) c;
        end loop;
        perform pg_temp.pass('10 s');
    end loop;
    return next is(pgqueue.redrive(queue, 4000), 4000, queue || ': all messages became dead letters');
    return next is(pg_temp.settle(queue, 1000), 4000, queue || ': all messages were claimed again');
    perform pg_temp.pass('10 s');
    for sweep in 1..20 loop
        perform pgqueue.claim(queue);
        perform pg_temp.pass('1 s');
    end loop;
    perform pg_temp.pass('1 min');
    perform pg_temp.record_vacant_ids(queue);
    perform pgqueue.claim(queue);
    foreach call in array array[
        'pgqueue.peek(%L)', 'pgqueue.next_due_at(%L)', 'pgqueue.stats(%L)', 'pgqueue.browse(%L)', 'pgqueue.browse(%L, ''scheduled'')',
        'pgqueue.browse_dead_messages(%L)', 'pgqueue.redrive(%L)', 'pgqueue.sweep_queue(%L)'
    ] loop
        return next cmp_ok(pg_temp.buffers(format('select ' || call, queue)), '<', 200,
            queue || ': ' || format(call, queue) || ' does not read rows that were removed from the queue');
    end loop;
    for n in 1..20 loop
        perform pg_temp.pass('100 ms');
        claims := claims || pg_temp.buffers(format('select pgqueue.claim(%L)', queue));
    end loop;
    return next cmp_ok((select max(b) from unnest(claims) b), '<', 200, queue || ': claims do not read rows that were removed from the queue');
end;
$$;
select * from pg_temp.records_first_keys('shared', false);
select * from pg_temp.records_first_keys('dedicated', true);

-- Calls that look at a queue record, too: once a second, and not in a read-only transaction.
create function pg_temp.records(call text, resume_id int) returns text language plpgsql as $$
declare
    recorded text := '';
    now_recorded constant text := $q$ select s.recorded_at = pgqueue._now() from pgqueue.sweep_state s where s.queue_name = 'looks' $q$;
    is_recorded boolean := false;
begin
    perform pg_temp.pass('1.1 s'), setval(q.sweep_resume_id, resume_id), setval(q.fresh_from_id, s.settled_id + 1000)
    from pgqueue.queues q join pgqueue.sweep_state s on s.queue_name = q.name where q.name = 'looks';
    begin
        perform set_config('transaction_read_only', 'on', true);
        if call !~ 'prepare_wait' then  -- it sets a register
            execute call;
        end if;
        execute now_recorded into is_recorded;
        raise exception using errcode = 'ZZ000';
    exception when sqlstate 'ZZ000' then
        recorded := format('%s in a read-only transaction', is_recorded);
    end;
    execute call;
    execute now_recorded into is_recorded;
    recorded := format('%s, %s after a second', recorded, is_recorded);
    perform pg_temp.pass('0.9 s');
    execute call;
    execute now_recorded into is_recorded;
    return format('%s, %s before', recorded, is_recorded);
end;
$$;
select pgqueue.create_queue('looks') \g /dev/null
select is(pg_temp.records(format('select pgqueue.%s', call), 2), 'f in a read-only transaction, t after a second, f before',
    call || ' records where the queue has no rows, if the last sweep has read removed ones')
from unnest(array['peek(''looks'')', 'next_due_at(''looks'')', 'prepare_wait(''looks'')', 'stats(''looks'')']) as call;
select pgqueue.enqueue_batch('looks', array_fill('1'::jsonb, array[10000])) \g /dev/null
delete from pgqueue.messages where queue_name = 'looks';
select is(pg_temp.records(format('select pgqueue.%s', call), 1), 'f in a read-only transaction, t after a second, f before',
    call || ' records where the queue has no rows, if it has read many pages itself')
from unnest(array['peek(''looks'')', 'next_due_at(''looks'')', 'stats()']) as call;

select pgqueue.create_queue('limited', max_in_flight => 2), pgqueue.enqueue('limited', '"dead"') \g /dev/null
select pgqueue.reject('limited', c.id, c.claim_token) from pgqueue.claim('limited') c \g /dev/null
select pgqueue.enqueue('limited', '"returning"') \g /dev/null
select pgqueue.nack('limited', c.id, c.claim_token, '1 h') from pgqueue.claim('limited') c \g /dev/null
select pg_temp.record_vacant_ids('limited'), pg_temp.pass('1 h') \g /dev/null
select is((select c.payload from pgqueue.claim('limited') c), '"returning"', 'a claim finds a message that returns to an id that was vacant');
select pgqueue.enqueue_batch('limited', '{1,2}') \g /dev/null
select is((select count(*) from pgqueue.claim('limited', 5)), 1::bigint,
    'max_in_flight counts a message that has returned to an id that was vacant, above a dead letter');

select is(pgqueue._clamp_due_at(pgqueue._now() + interval '1 h'), pgqueue._now() + interval '1 h', 'a due time in the future is kept');
select is(pgqueue._clamp_due_at(pgqueue._now() - interval '1 h'), pgqueue._now() - interval '100 ms', 'a due time in the past becomes 100 ms ago');

-- A statement cannot look at the clock, so sweeps and records read ids in short steps. Here a page takes 50 us: a sweep
-- has time for 200 pages, a record for 800.
select pgqueue.create_queue('steps', '1 h', dedicated => true) as partition \gset
select format('pgqueue.messages_%s', q.queue_id) as partition from pgqueue.queues q where q.name = 'steps' \gset
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe as $$
    select current_setting('test.now')::timestamptz
        + coalesce(pg_stat_get_xact_blocks_fetched(current_setting('test.partition', true)::regclass), 0) * interval '50 us'
$$;
create temporary table kept (id bigint);
create function pg_temp.pages(statement text) returns bigint language plpgsql
-- The settings of claim.
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
as $$
declare
    before constant bigint := pg_stat_get_xact_blocks_fetched(current_setting('test.partition')::regclass);
begin
    execute statement;
    return pg_stat_get_xact_blocks_fetched(current_setting('test.partition')::regclass) - before;
end;
$$;
do $$
declare
    n bigint;
begin
    -- Twenty messages with a recorded id behind each, and then removed messages. Of these only the last are recorded,
    -- as a sweep always reads them.
    for i in 1..20 loop
        insert into kept select pgqueue.enqueue('steps', '1');
        n := pgqueue.enqueue('steps', '1');
    end loop;
    perform pgqueue.enqueue_batch('steps', array_fill('1'::jsonb, array[60000]));
    perform pgqueue.claim('steps', 10000) from generate_series(1, 7);
    delete from pgqueue.messages m where m.queue_name = 'steps' and m.id not in (select k.id from kept k);
    update pgqueue.sweep_state s
    set vacant_ids = (
            select range_agg(int8range(k.id + 1, k.id + 2))
                + int8multirange(int8range(null, min(k.id)), int8range(max(k.id) + 56000, max(k.id) + 60002))
            from kept k),
        settled_id = pg_sequence_last_value('pgqueue.message_id'), first_id = (select min(k.id) from kept k),
        recorded_at = pgqueue._now()
    where s.queue_name = 'steps';
    perform setval(q.sweep_resume_id, 1) from pgqueue.queues q where q.name = 'steps';
end $$;
select set_config('test.partition', :'partition', true) \gset
select cmp_ok(pg_temp.pages($$ select pgqueue._sweep(q, '{}', pgqueue._now(), 1, pg_sequence_last_value(q.fresh_from_id)) from pgqueue.queues q where q.name = 'steps' $$),
    '<', 700::bigint, 'a sweep ends soon after its time is up, also if it has passed many vacant ranges before it meets removed messages');
insert into pgqueue.messages (id, queue_name, payload, max_attempts, visible_at, kind) overriding system value
select (select max(k.id) + 4000 from kept k), 'steps', '1', 5, pgqueue._now(), q.kind from pgqueue.queues q where q.name = 'steps';
create function pg_temp.sweeps_until_found() returns int language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
as $$
begin
    for n in 1..50 loop
        -- No sweep records vacant ids, from which the next one could tell where to start.
        update pgqueue.sweep_state s set recorded_at = pgqueue._now() where s.queue_name = 'steps';
        if pgqueue._sweep(q, '{}', pgqueue._now(), 1, pg_sequence_last_value(q.fresh_from_id)) <> '{}' from pgqueue.queues q where q.name = 'steps' then
            return n;
        end if;
    end loop;
    return null;
end;
$$;
select cmp_ok(pg_temp.sweeps_until_found(), '>', 1, 'a sweep goes on where the last one had to stop, and so finds what one sweep alone does not reach');
delete from pgqueue.messages m where m.queue_name = 'steps' and m.id not in (select k.id from kept k);
select cmp_ok(pg_temp.pages($$ select pgqueue._record_vacant_ids(q, pgqueue._now(), pg_sequence_last_value(q.fresh_from_id)) from pgqueue.queues q where q.name = 'steps' $$),
    '<', 2500::bigint, '_record_vacant_ids ends soon after its time is up, also if it has passed many vacant ranges before it meets removed messages');
delete from pgqueue.messages m where m.queue_name = 'steps';
select cmp_ok(pg_temp.pages($$ select pgqueue._record_first_keys(q, s, pgqueue._now()) from pgqueue.queues q, pgqueue.sweep_state s where q.name = 'steps' and s.queue_name = 'steps' $$),
    '<', 2500::bigint, 'the search for the first id ends soon after its time is up');
select pg_temp.pages($$ select pgqueue._record_vacant_ids(q, pgqueue._now(), pg_sequence_last_value(q.fresh_from_id)) from pgqueue.queues q where q.name = 'steps' $$)
from generate_series(1, 20) \g /dev/null
select is((select s.first_id from pgqueue.sweep_state s where s.queue_name = 'steps'), (select s.settled_id + 1 from pgqueue.sweep_state s where s.queue_name = 'steps'),
    'several calls of _record_vacant_ids find the first id');
-- The steps get longer, so that a gap of any width takes few of them.
insert into pgqueue.messages (id, queue_name, payload, max_attempts, visible_at)
overriding system value
values (1000000000000000000, 'steps', '1', 5, pgqueue._now() + interval '1 h');
select setval(q.fresh_from_id, 1000000000000000001), setval(q.sweep_resume_id, 1) from pgqueue.queues q where q.name = 'steps' \g /dev/null
select pg_temp.pass('2 h') \gset
select is((select c.id from pgqueue.claim('steps') c), 1000000000000000000, 'a claim finds a message behind a gap of 10^18 ids');

-- A queue that is dropped after the snapshot of a statement, and before this statement has its lock
create or replace function pgqueue._lock_key(queue_name text) returns bigint language sql volatile
as $$ delete from pgqueue.queues q where q.name = _lock_key.queue_name; select 1::bigint $$;
select is((select pgqueue._try_lock_existing_queue(q) from pgqueue.queues q where q.name = 'steps'), false,
    '_try_lock_existing_queue looks for the queue after it has the lock');

select * from finish();
rollback;
